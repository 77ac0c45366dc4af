"""Programs that are stopped in the middle leave whole files or none, and say so in one line."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from kvjax.models.io import convert
from kvjax.programs.evals import store
from scripts.examples import tiny
from tests.processes import ROOT, port

# A shell starts what runs in its background deaf to Ctrl-C, and so are the children of that.
HEED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
stopped_by = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


def stop(command, number, ready, status=1, **streams):
  """Starts a program, sends it a signal once `ready()`; its standard error."""
  env = {**os.environ, "JAX_PLATFORMS": "cpu"}
  command = [sys.executable, "-c", HEED, *command]
  streams["stderr"] = subprocess.PIPE
  process = subprocess.Popen(command, text=True, cwd=ROOT, env=env, **streams)
  try:
    for _ in range(1200):
      if ready() or process.poll() is not None:
        break
      time.sleep(0.1)
    running = process.poll() is None
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert running, said
  finally:
    process.kill()
  if number == signal.SIGKILL:
    assert process.returncode == -number
    return said
  assert process.returncode == status and "Traceback" not in said, said
  assert said.splitlines()[-1].startswith("stopped"), said
  return said


@pytest.fixture
def folder(tmp_path):
  """A checkpoint of the examples' model."""
  source = tiny.huggingface_folder(tmp_path / "source")
  return convert.convert(source, tmp_path / "tiny", progress=False)


@pytest.mark.slow
@stopped_by
def test_generate(folder, tmp_path, number):
  """What was written until then is text, each character of it whole."""
  text = tmp_path / "text"
  command = ["-m", "kvjax.programs.generate", "hello", "--raw", "--steps", "200000"]
  command += ["--method", "streaming_llm", "--budget", "32", "--checkpoint", str(folder)]
  with text.open("w") as out:
    stop(command, number, lambda: text.stat().st_size > 100, stdout=out)
  assert len(text.read_text("utf-8")) > 50


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_evaluate(folder, tmp_path, number):
  """Rows are on the disk as they come, and the program goes on from them: each is there once."""
  out = tmp_path / "out"
  command = ["-m", "kvjax.programs.evaluate", "--tasks", "needle", "--methods", "snapkv"]
  command += ["--no-chat", "--budgets", "64", "--lengths", "720", "--samples", "12", "--batch", "1"]
  command += ["--checkpoint", str(folder), "--out", str(out)]
  rows = out / store.ROWS

  def lines():
    return rows.read_text("utf-8").splitlines() if rows.exists() else []

  said = stop(command, number, lambda: len(lines()) >= 2, stdout=subprocess.DEVNULL)
  before = lines()
  told = f"stopped: {len(before)} rows are in {rows}; the same command adds the others"
  assert number == signal.SIGKILL or told in said
  how = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 600}
  done = subprocess.run([sys.executable, *command], **how)
  assert done.returncode == 0 and f"24 rows in {rows}" in done.stdout, done.stderr
  whole = before if number != signal.SIGKILL else before[:-1]  # the last may have been cut off
  assert lines()[: len(whole)] == whole
  assert len({store.key(row) for row in store.read(out)}) == len(lines()) == 24


@pytest.mark.slow
@stopped_by
def test_serve(folder, number):
  """It ends as it should, though a client still reads; nothing listens any more."""
  pytest.importorskip("uvicorn")
  free = port()
  command = ["-m", "kvjax.programs.serve", "--checkpoint", str(folder), "--port", str(free)]
  asked = json.dumps({"prompt": "a", "stream": True, "max_tokens": 500, "n": 16, "seed": 1})
  links, said = [], []

  def answers():
    links.append(http.client.HTTPConnection("127.0.0.1", free, timeout=60))
    with contextlib.suppress(ConnectionError):
      links[-1].request("POST", "/v1/completions", asked, {"content-type": "application/json"})
      said.append(links[-1].getresponse())
      return said[0].read(5) == b"data:"

  stop(command, number, answers, status=0)
  assert b"the server was stopped before" in said[0].read()
  with pytest.raises(ConnectionError):
    socket.create_connection(("127.0.0.1", free))
  for link in links:
    link.close()
