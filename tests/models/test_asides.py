"""Files and folders that are written aside: whole or not there, and nothing is left."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading

import pytest

from kvjax.models.io import asides
from kvjax.models.io.asides import aside


def names(folder):
  return sorted(path.name for path in folder.iterdir())


def killed(folder, system=None):
  """Leaves what a writer leaves that is killed; the name of it."""
  lines = f"""
import os, signal
from kvjax.models.io import asides
{"" if system is None else f"asides._system = lambda: {system!r}"}
with asides.aside({str(folder / "x.json")!r}, replace=True) as path:
  path.write_text("half")
  os.kill(os.getpid(), signal.SIGKILL)
"""
  assert subprocess.run([sys.executable, "-c", lines]).returncode == -signal.SIGKILL
  (left,) = folder.glob(".*")
  return left


def test_writers_of_one_path_have_their_own(tmp_path):
  dest, ready = tmp_path / "x.json", threading.Barrier(8)

  def write(text):
    with aside(dest, replace=True) as path:
      ready.wait()
      path.write_text(text)

  threads = [threading.Thread(target=write, args=(c * 1000,)) for c in "abcdefgh"]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  text = dest.read_text()
  assert len(text) == 1000 and len(set(text)) == 1
  assert names(tmp_path) == ["x.json"]


@pytest.mark.slow
@pytest.mark.parametrize("locked", [True, False])
def test_a_folder_that_is_swept_before_its_writer_locks_it(tmp_path, monkeypatch, locked):
  """A sweep finds the folder unlocked, and removes it while its writer waits or before it looks."""
  make, swept = tempfile.mkdtemp, []

  def made(**keywords):
    folder = pathlib.Path(make(**keywords))
    if not swept:
      swept.append(folder)
      lock = asides._lock(folder) if locked else None
      sweep = threading.Timer(0.2, lambda: (folder.rmdir(), asides._release(lock)))
      sweep.start()
      if not locked:
        sweep.join()
    return str(folder)

  monkeypatch.setattr(tempfile, "mkdtemp", made)
  with aside(tmp_path / "x.json") as path:
    path.write_text("whole")
    assert path.parent != swept[0]
  assert names(tmp_path) == ["x.json"]


def test_what_a_killed_writer_left_is_swept_up(tmp_path):
  left = killed(tmp_path)
  (tmp_path / ".x.json.mine").write_text("stays")
  with aside(tmp_path / "x.json", replace=True) as path:
    path.write_text("whole")
    assert not left.exists()
  assert names(tmp_path) == [".x.json.mine", "x.json"]


def test_what_a_living_writer_writes_is_left_alone(tmp_path):
  with aside(tmp_path / "x.json", replace=True) as first:
    first.write_text("first")
    os.utime(first.parent, (0, 0))  # however old
    with aside(tmp_path / "x.json", replace=True) as second:
      second.write_text("second")
    assert first.read_text() == "first"
  assert (tmp_path / "x.json").read_text() == "first"


def test_what_another_machine_left_is_swept_up_after_a_day(tmp_path):
  left = killed(tmp_path, system="another")
  for age, stays in ((0, True), (3600, True), (25 * 3600, False)):
    at = left.stat().st_ctime - age
    os.utime(left, (at, at))
    with aside(tmp_path / "x.json", replace=True) as path:
      path.write_text("whole")
    assert left.exists() == stays


def test_what_is_there_is_not_replaced_unless_told(tmp_path):
  for make in (lambda path: path.write_text("x"), lambda path: (path / "deep").mkdir(parents=True)):
    dest = tmp_path / "x"
    with aside(dest) as path:
      make(path)
    with pytest.raises(FileExistsError, match="x: exists already"), aside(dest) as path:
      make(path)
    assert names(tmp_path) == ["x"]
    dest.rename(tmp_path.with_name("away")) if dest.is_dir() else dest.unlink()


def test_long_names_and_others_signs(tmp_path):
  for name in ("x" * 250, "[a]*?", "é" * 100):
    with aside(tmp_path / name, replace=True) as path:
      path.write_text("x")
  assert len(names(tmp_path)) == 3


def test_a_folder_that_cannot_be_locked(tmp_path, monkeypatch):
  """Nothing is known of other writers there, and nothing of theirs is touched."""
  left = killed(tmp_path)
  monkeypatch.setattr(asides, "_lock", lambda folder, **_: None)
  with aside(tmp_path / "x.json", replace=True) as path:
    path.write_text("whole")
  assert names(tmp_path) == [left.name, "x.json"]
