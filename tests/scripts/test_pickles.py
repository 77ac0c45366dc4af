"""No file that may come from elsewhere can run code: no pickle is read, and a search sees them."""

import gzip
import pathlib
import pickle
import re

import pytest

from kvjax.programs.evals import cells, written
from kvjax.programs.evals.prompt import Prompt, Reader
from kvjax.programs.evals.registry import TASKS
from kvjax.programs.evals.task import Row
from scripts.examples import tiny
from tests.processes import ROOT

FOLDERS = ("kvjax", "models", "pallas_kernels", "scripts")
# Modules whose files run code when they are read, functions that read such files, and arguments
# that say so: wherever they stand but for "a pickle", also as a text that is imported.
READS = re.compile(
  r"(?<!a )\b(_?pickle|cPickle|cloudpickle|dill|joblib|marshal|shelve|jsonpickle|hickle)\b"
  r"|\b(read_pickle|unsafe_load|unpickle|Unpickler)\b"
  r"|\ballow_pickle\s*=(?!\s*False\b)|\bweights_only\s*=(?!\s*True\b)"
  r"|\btorch\.load\((?![^)]*\bweights_only\b)"
)


def pickles(source: str) -> list[str]:
  """Words of a program's text that read pickles."""
  return [found[0] for found in READS.finditer(source)]


@pytest.mark.parametrize(
  "source",
  [
    "import pickle",
    "import os, dill as d",
    "from pickle import loads",
    "import joblib.externals",
    "def f():\n  from shelve import open",
    "np.load(path, allow_pickle=True)",
    "np.load(path, allow_pickle=chosen)",
    "torch.load(path)",
    "torch.load(path, weights_only=False)",
    "pd.read_pickle(path)",
    "importlib.import_module('pickle')",
    "__import__('marshal')",
    "yaml.unsafe_load(text)",
  ],
)
def test_the_search_sees_what_reads_a_pickle(source):
  assert pickles(source)


def test_no_pickle_is_read():
  files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
  assert len(files) > 200
  found = {str(path.relative_to(ROOT)): pickles(path.read_text("utf-8")) for path in files}
  assert {path: lines for path, lines in found.items() if lines} == {}


# ---- rows that are kept


class Planted:
  """An object that writes a file when it is unpickled."""

  def __init__(self, path):
    self.path = path

  def __reduce__(self):
    return pathlib.Path.touch, (self.path,)


ROW = Row(
  "text", "q", "a", ("1", "2"), "t", 3, about={"depth": 0.5}, second=Row(*"cqa", (), "t", 1)
)
MADE = ROW, Prompt([1, 2], [3], [4])


@pytest.fixture
def kept(tmp_path, monkeypatch):
  """Calls with one key, and the file that holds its row."""
  monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "cache"))
  calls = []

  def make():
    calls.append(1)
    return MADE

  assert cells._kept("key", make) == MADE == cells._kept("key", make) and len(calls) == 1
  (path,) = (tmp_path / "cache/rows").iterdir()
  return lambda: (cells._kept("key", make), len(calls)), path


def test_a_planted_file_runs_nothing(kept, tmp_path):
  again, path = kept
  path.write_bytes(gzip.compress(pickle.dumps(Planted(tmp_path / "ran"))))
  assert again() == (MADE, 2) and again() == (MADE, 2)
  assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
  "data",
  [
    b"",
    b"no gzip",
    gzip.compress(b"{}", mtime=0)[:-4],
    gzip.compress(b"\xff{", mtime=0),
    gzip.compress(b"[1]", mtime=0),
    gzip.compress(b"[" * 100_000),
    gzip.compress(written.text(MADE).replace(b'"max_new_tokens": 3', b'"max_new_tokens": "3"')),
    gzip.compress(written.text(MADE).replace(b'"head": [1, 2]', b'"head": [1, 2.5]')),
    gzip.compress(written.text(MADE).replace(b'"head": [1, 2]', b'"head": "12"')),
    gzip.compress(written.text(MADE).replace(b'"context"', b'"contents"')),
    gzip.compress(written.text(MADE).replace(b'"answers": ["1", "2"]', b'"answers": "12"')),
  ],
)
def test_a_damaged_row_is_made_anew(kept, data):
  again, path = kept
  path.write_bytes(data)
  assert again() == (MADE, 2) == again()


def test_a_row_that_cannot_be_kept_is_made(tmp_path, monkeypatch):
  """No folder to write in, or a value that JSON gives back as another."""
  (tmp_path / "file").touch()
  monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "file"))
  assert cells._kept("key", lambda: MADE) == MADE
  assert written.text((Row(*"cqa", (), "t", 1, about={"pair": (1, 2)}), MADE[1])) is None


LONG = [name for name, task in TASKS.items() if not task.needs and name != "gsm_symbolic"]


@pytest.mark.slow
def test_what_is_made_is_kept_as_it_is():
  """Every task whose long rows are kept: JSON gives back the same row."""
  reader = Reader(tiny.byte_tokenizer(), chat=False)
  held = {}
  for name in LONG:
    try:
      row = TASKS[name].build(reader.count, length=3000, seed=0, index=0)
    except (ValueError, ModuleNotFoundError, FileNotFoundError):
      continue
    made = row, reader.row(row)
    held[name] = written.text(made) is not None and written.read(written.text(made)) == made
  assert len(held) > 5 and all(held.values()), held
