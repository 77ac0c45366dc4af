"""Steps on shared GPUs: apart from each other, quiet while one of them times, results together."""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from kvjax.programs import bench, common, quiet
from scripts.tools import on_gpu


@pytest.mark.slow
def test_steps_on_a_gpu_are_apart_and_go_on(tmp_path, monkeypatch, capsys):
  """One ends, one fails, one runs into its limit; the next call repeats what did not end well."""
  steps = {"well": on_gpu.Step("platform", 60), "ill": on_gpu.Step("json.tool {out}/none", 60)}
  endless = on_gpu.Step("http.server 0 --bind 127.0.0.1", 2)
  wide = on_gpu.Step("platform", 60, gpus=3)
  monkeypatch.setattr(on_gpu, "STEPS", {**steps, "endless": endless, "wide": wide})
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
  assert on_gpu.main(["--out", str(tmp_path)]) == 1
  became = {k: v["became"] for k, v in json.loads((tmp_path / "steps.json").read_text()).items()}
  assert became["well"] == "done" and became["endless"] == "stopped at its limit of 2 s"
  assert became["ill"].startswith("exit status") and "none" in (tmp_path / "ill.log").read_text()
  assert "wide: needs 3 GPUs, found 2: left out" in capsys.readouterr().out
  (tmp_path / "none").write_text("{}")
  assert on_gpu.main(["--out", str(tmp_path), "--only", "well", "ill"]) == 0
  assert "well" not in capsys.readouterr().out
  assert on_gpu.main(["--out", str(tmp_path), "--minutes", "0"]) == 1
  assert "endless: 0 s left, expected 2: not started" in capsys.readouterr().out


@pytest.mark.slow
def test_an_interrupt_ends_all_steps(tmp_path, monkeypatch):
  endless = on_gpu.Step("http.server 0 --bind 127.0.0.1", 20)
  monkeypatch.setattr(on_gpu, "STEPS", dict.fromkeys("abc", endless))
  begun, start = [], subprocess.Popen

  def starting(*args, **kwargs):
    begun.append(start(*args, **kwargs))
    return begun[-1]

  monkeypatch.setattr(on_gpu.subprocess, "Popen", starting)
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
  # What a shell starts in the background ignores interrupts.
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  try:
    threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
      on_gpu.main(["--out", str(tmp_path)])
  finally:
    signal.signal(signal.SIGINT, before)
  assert len(begun) == 2 and all(process.poll() is not None for process in begun)


COUNTING = """
import pathlib, sys, time
while True:
  with open(sys.argv[1], "a") as file:
    file.write(".")
  time.sleep(0.01)
"""


def test_who_times_has_its_gpu_to_itself(tmp_path, monkeypatch):
  """Steps on the same GPU stand still meanwhile, those on others do not, and all go on."""
  monkeypatch.setenv(quiet.FOLDER, str(tmp_path / "quiet"))
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
  counts = {gpu: tmp_path / gpu for gpu in ("0", "1")}

  def starting(gpu):
    command = [sys.executable, "-c", COUNTING, str(counts[gpu])]
    return lambda: subprocess.Popen(command, start_new_session=True)

  def moving(gpu):
    before = counts[gpu].stat().st_size if counts[gpu].exists() else 0
    end = time.monotonic() + 20
    while time.monotonic() < end:
      if counts[gpu].exists() and counts[gpu].stat().st_size > before:
        return True
      time.sleep(0.02)
    return False

  with contextlib.ExitStack() as stack:
    for gpu in counts:
      stack.enter_context(quiet.sharing(tmp_path / "quiet", [gpu], starting(gpu)))
    assert moving("0") and moving("1")
    with quiet.alone():
      held = counts["0"].stat().st_size
      with quiet.alone():  # nested: nothing more
        assert moving("1")
      time.sleep(0.2)
      assert counts["0"].stat().st_size == held
    assert moving("0")
  assert [path.suffix for path in (tmp_path / "quiet").iterdir()] == [".lock"] * 2


def test_who_times_waits_for_what_was_enqueued(tmp_path, monkeypatch):
  """A stopped process's long prompt goes on by itself: the GPU says when it has ended."""
  monkeypatch.setenv(quiet.FOLDER, str(tmp_path / "quiet"))
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
  (tmp_path / "quiet").mkdir()
  tool = tmp_path / "nvidia-smi"
  asked = tmp_path / "asked"
  tool.write_text(
    f'#!/bin/sh\necho "$@" >> {asked}\n[ $(wc -l < {asked}) -lt 3 ] && echo 97 || echo 0\n'
  )
  tool.chmod(0o755)
  monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
  monkeypatch.setattr(quiet, "SETTLED", 0.01)
  with quiet.alone():
    assert asked.read_text().count("--id=3") == 3
  monkeypatch.setattr(quiet, "PATIENCE", 0.0)
  asked.unlink()
  busy = pytest.raises(TimeoutError, match="GPU 3: found it 97 % busy, expected nothing beside")
  with busy, quiet.alone():
    raise AssertionError("was not to be timed")
  assert os.environ[quiet.FOLDER]  # the next one waits again


def bench_main(*given):
  return bench.main(common.parse(bench.Args, "bench", given))


def test_benches_are_put_together(tmp_path, capsys):
  """Cases of other folders join those of the same versions, and never replace others."""
  facts = {"device": "NVIDIA H200", "jax": "1"}

  def case(name, us):
    named = {"case": name, "shapes": "", "subject": "a", "bytes": 1, "read_bandwidth": None}
    rest = {"floor_us": None, "tolerance": 0, "repetitions": 1, "remarks": []}
    row = {"name": "a", "error": None, "us": us, "us_quartiles": [us, us]}
    return {**named, **rest, "results": [row], "command": name}

  bench.write(tmp_path / "out", "prr", facts, [case("x", 1.0), case("y", 2.0)])
  bench.write(tmp_path / "run", "prr", {**facts, "torch": "2"}, [case("y", 3.0), case("z", 4.0)])
  command = ["--add", str(tmp_path / "run" / "nvidia-h200"), "--out", str(tmp_path / "out")]
  assert bench_main(*command) == 0
  assert capsys.readouterr().out == "prr: y\nprr: z\n"
  made = json.loads((tmp_path / "out" / "nvidia-h200" / "bench_prr.json").read_text())
  assert {c["case"]: c["results"][0]["us"] for c in made["cases"]} == {"x": 1, "y": 3, "z": 4}
  assert made["torch"] == "2" and made["command"] == "kvjax bench prr"

  bench.write(tmp_path / "run", "prr", {**facts, "jax": "2"}, [case("w", 5.0)])
  with pytest.raises(ValueError, match="found results of other versions"):
    bench_main(*command)
  with pytest.raises(ValueError, match="--add with --out"):
    bench_main("--add", str(tmp_path))
  with pytest.raises(FileNotFoundError, match="expected results of bench"):
    bench_main("--add", str(tmp_path), "--out", str(tmp_path))


@pytest.mark.parametrize("name", [name for name in on_gpu.REAL if "8K" not in name])
def test_programs_take_what_steps_give_them(name, tmp_path):
  """A step is not found to be misspelt on the day that there is a GPU."""
  _, _, module, *given = on_gpu.REAL[name].command(tmp_path, tmp_path)
  program = importlib.import_module(module)
  assert isinstance(common.parse(program.Args, module, given), program.Args)
