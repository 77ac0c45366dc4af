"""Steps that need a GPU: each a process of its own, not repeated once done; results together."""

import importlib
import json
import os
import signal
import subprocess
import threading

import pytest

from kvjax.programs import bench, common
from scripts.tools import on_gpu


@pytest.mark.slow
def test_steps_on_a_gpu_are_apart_and_go_on(tmp_path, monkeypatch, capsys):
  """One ends, one fails, one runs into its limit; the next call repeats what did not end well."""
  steps = {"well": on_gpu.Step("platform", 60), "ill": on_gpu.Step("json.tool {out}/none", 60)}
  endless = on_gpu.Step("http.server 0 --bind 127.0.0.1", 2)
  wide, real = on_gpu.Step("platform", 60, gpus=3), on_gpu.Step("platform {checkpoint}", 60)
  others = {"endless": endless, "wide": wide, "real": real}
  monkeypatch.setattr(on_gpu, "STEPS", {**steps, **others})
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
  assert on_gpu.main(on_gpu.Args(tmp_path)) == 1
  said = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
  assert said["well"].startswith("done") and said["ill"].startswith("exit status")
  assert said["endless"].startswith("stopped at its limit of 2 s")
  assert said["wide"].startswith("needs 3 GPUs, found 2: left out")
  assert said["real"].startswith("needs --checkpoint: left out")
  assert "none" in (tmp_path / "ill.log").read_text()
  (tmp_path / "none").write_text("{}")
  assert on_gpu.main(on_gpu.Args(tmp_path, ("well", "ill"))) == 0
  assert "well" not in capsys.readouterr().out
  assert on_gpu.main(on_gpu.Args(tmp_path, minutes=0)) == 1
  assert "endless: 0 s left, expected 2: not started" in capsys.readouterr().out


@pytest.mark.slow
def test_an_interrupt_ends_the_step(tmp_path, monkeypatch):
  endless = on_gpu.Step("http.server 0 --bind 127.0.0.1", 20)
  monkeypatch.setattr(on_gpu, "STEPS", dict.fromkeys("ab", endless))
  begun, start = [], subprocess.Popen

  def starting(*args, **kwargs):
    begun.append(start(*args, **kwargs))
    return begun[-1]

  monkeypatch.setattr(on_gpu.subprocess, "Popen", starting)
  # What a shell starts in the background ignores interrupts.
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  try:
    threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
      on_gpu.main(on_gpu.Args(tmp_path))
  finally:
    signal.signal(signal.SIGINT, before)
  (only,) = begun
  assert only.wait(5) != 0


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

  bench.write(tmp_path / "run", "art", facts, [case("v", 6.0)])
  damaged = tmp_path / "run" / "nvidia-h200" / "bench_prr.json"
  damaged.write_text(damaged.read_text().replace('"subject"', '"subj"'))
  with pytest.raises(ValueError, match=r"bench_prr\.json: found KeyError: 'subject', expected"):
    bench_main(*command)
  assert not (tmp_path / "out" / "nvidia-h200" / "bench_art.json").exists()
  damaged.unlink()

  bench.write(tmp_path / "run", "prr", {**facts, "jax": "2"}, [case("w", 5.0)])
  with pytest.raises(ValueError, match="found results of other versions"):
    bench_main(*command)
  bench.write(tmp_path / "old", "decode", {**bench.environment(), "jax": "0"}, [case("w", 5.0)])
  with pytest.raises(ValueError, match=r"json: found results of other versions than this run, exp"):
    bench_main("decode", "--quick", "--only", "nothing", "--out", str(tmp_path / "old"))
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
