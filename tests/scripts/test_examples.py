"""The short programs run and print what they promise; so do the README's snippets."""

import json
import pathlib
import re
import runpy
import sys

import numpy as np
import pytest

from kvjax.models.io import convert
from scripts import examples
from scripts.examples import tiny

FOLDER = pathlib.Path(examples.__file__).parent
PRINTED = {
  "batch": r"(Name a river\. .*, log p = -\d+\.\d\n){2}(Which .*, log p = -\d+\.\d\n){2}$",
  "compose": r"Full\(\)\): mean age 1\d\d tokens\n.*LLM.*mean age \d\d tokens\n.*ART\(base=SnapKV",
  "convert_folder": r"^2 layers, 4 query and 2 key/value heads, 258 tokens\n",
  "decode_loop": r"\n65 tokens seen, 64 kept per layer and head\n$",
  "flax_layer": r"\de-0[678] apart; \[6 5\] tokens kept\n$",
  "own_method": r"^a window over all changes nothing; one of 4 tokens .* by \d\.\d\d\n$",
}

# Those that end in a picture, with arguments that make it small.
DRAWN = {
  "memory": ("--lengths", "4096", "65536"),
  "quest_blocks": ("--words", "60", "--steps", "4"),
}
SAID = {
  "memory": r"^full +8\.66 GB at 65,536 tokens\n(.*\n)*ltri .* \+ \d+ on the host",
  "quest_blocks": r"png: \d+% of \d+ pages are read on average\n",
}


def run(name, monkeypatch, *arguments):
  monkeypatch.setattr(sys, "argv", [name, *arguments])
  runpy.run_module(f"scripts.examples.{name}", run_name="__main__")


@pytest.mark.slow
@pytest.mark.parametrize("name", PRINTED)
def test_example(name, monkeypatch, capsys):
  run(name, monkeypatch)
  assert re.search(PRINTED[name], capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
def test_example_ends_in_a_picture(name, monkeypatch, tmp_path, capsys):
  picture = tmp_path / "new" / "made.png"
  run(name, monkeypatch, *DRAWN[name], "--out", str(picture))
  assert re.search(SAID[name], capsys.readouterr().out)
  assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 4000
  with pytest.raises(IsADirectoryError, match="new: found a folder, expected a file to write"):
    run(name, monkeypatch, *DRAWN[name], "--out", str(picture.parent))


@pytest.mark.slow
def test_the_notebook_ends_in_a_picture(monkeypatch, tmp_path, capsys):
  """On a tiny random model; it is kept without outputs."""
  cells = json.loads((FOLDER / "first_steps.ipynb").read_text("utf-8"))["cells"]
  code = [cell for cell in cells if cell["cell_type"] == "code"]
  assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)
  monkeypatch.setattr(convert, "default_checkpoint", lambda: None)
  monkeypatch.setattr(convert, "load", lambda path: tiny.load())
  names = {}
  for cell in code:
    exec("".join(cell["source"]), names)
  names["figure"].savefig(tmp_path / "made.png")
  lost = np.array([*names["lost"].values()])
  assert lost.shape == (3, 3) and (lost > 0).all() and "MB  Quantised" in capsys.readouterr().out


def test_every_example_is_short_and_run():
  lines = {path.stem: len(path.read_text("utf-8").splitlines()) for path in FOLDER.glob("*.py")}
  assert set(lines) == {*PRINTED, *DRAWN, "tiny", "__init__"}
  assert max(lines[name] for name in PRINTED) <= 40
  assert max(lines[name] for name in DRAWN) <= 65


@pytest.mark.rest(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["batch", "compose", "decode_loop", "own_method"])
def test_example_on_a_checkpoint(name, monkeypatch, smollm2):
  run(name, monkeypatch, "--checkpoint", str(smollm2))
