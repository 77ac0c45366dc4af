"""What only a GPU can show, one step after another: kernel tests, then timings, then evaluations.

    python -m scripts.on_gpu --out run                  everything
    python -m scripts.on_gpu --out run --minutes 9      goes on where the last call ended
    python -m scripts.on_gpu --out run --only kernels sparse

Every step is a process with a limit of its own, so that none takes the others down. What it prints
is in OUT/<step>.log, what became of all of them in OUT/steps.json. A step that ended well is not
repeated; one that failed or ran into its limit is.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

from scripts import common, console

REPO = pathlib.Path(__file__).resolve().parent.parent
LIMIT = 100  # seconds that most steps may take


@dataclasses.dataclass(frozen=True)
class Step:
  """A module with its arguments, in which {out} is the folder of results."""

  arguments: str
  limit: int = LIMIT

  def command(self, out: pathlib.Path) -> list[str]:
    return [sys.executable, "-m", *(part.format(out=out) for part in self.arguments.split())]


KERNEL_TESTS = " ".join(
  sorted(f"tests/{path.name}" for path in (REPO / "tests").glob("test_*kernel*.py"))
  + ["tests/test_prefill_pieces.py", "tests/test_offload.py", "tests/test_speculation.py"]
)
BOUNDED = "streaming_llm lm_infinite random h2o tova vatp snapkv pyramidkv longflow r_kv"
EVALUATE = "scripts.evaluate --tasks needle kl --lengths 2048 --samples 50 --out {out}/evaluation"

STEPS = {
  "kernels": Step(f"pytest {KERNEL_TESTS} -q -n 14 -p no:cacheprovider -p no:benchmark", 240),
  "select": Step("scripts.bench select --out {out}"),
  "sparse": Step("scripts.bench sparse --repetitions 5 --out {out}", 150),
  "cpe": Step("scripts.bench cpe --out {out}"),
  "art": Step("scripts.bench art --out {out}", 150),
  "art_e2e": Step("scripts.bench art_e2e --repetitions 5 --minutes 4 --out {out}", 300),
  "speculation": Step("scripts.tune prr"),
  "prr": Step("scripts.bench prr --repetitions 5 --minutes 2 --out {out}", 180),
  "prefill": Step("scripts.bench prefill --only 32K --out {out}"),
  "offload": Step("scripts.bench offload --out {out}", 200),
  "stream": Step("scripts.bench offload --only whole --out {out}", 590),
  "heads": Step("scripts.retrieval_heads {out}/heads.json --length 4096", 150),
  "needles": Step("scripts.needle_recall {out}/needles --heads {out}/heads.json", 500),
  "spans": Step("scripts.plot_spans {out}/spans --length 8000 --local 512"),
  "e2e_sparse": Step("scripts.bench e2e_sparse --repetitions 5 --out {out}", 150),
  "longflow": Step("scripts.bench longflow --out {out}"),
  "decode": Step("scripts.bench decode --out {out}", 150),
  "bounded": Step(f"{EVALUATE} --methods {BOUNDED} --budgets 128 256 512", 500),
  "methods": Step(f"{EVALUATE} --methods all --budgets 256 512", 500),
}


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(
    prog="python -m scripts.on_gpu",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    epilog="steps:\n" + "\n".join(f"  {k:12} {s.limit:4} s at most" for k, s in STEPS.items()),
  )
  parser.add_argument(
    "--out", type=pathlib.Path, required=True, metavar="FOLDER", help="logs and results"
  )
  parser.add_argument(
    "--only", nargs="+", choices=STEPS, metavar="STEP", help="these steps, in this order"
  )
  parser.add_argument(
    "--minutes", type=float, default=60, metavar="M", help="start no step that may end later (60)"
  )
  options = parser.parse_args(argv)
  options.out.mkdir(parents=True, exist_ok=True)
  path = options.out / "steps.json"
  done = json.loads(path.read_text()) if path.exists() else {}
  end = time.monotonic() + 60 * options.minutes
  chosen = options.only or list(STEPS)
  for name in chosen:
    if done.get(name, {}).get("became") == "done":
      continue
    left = max(end - time.monotonic(), 0)
    if left < STEPS[name].limit:
      print(f"{name}: {left:.0f} s left, expected {STEPS[name].limit}: not started")
      continue
    done[name] = run(name, STEPS[name], options.out)
    with common.written_aside(path) as aside:
      aside.write_text(json.dumps(done, indent=1) + "\n")
  return int(any(done.get(name, {}).get("became") != "done" for name in chosen))


def run(name: str, step: Step, out: pathlib.Path) -> dict[str, object]:
  """What became of a step, and the seconds that it took."""
  # torch, where it runs beside JAX, needs memory too.
  env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONUNBUFFERED": "1"}
  with console.step(name) as shown, (out / f"{name}.log").open("w") as log:
    process = subprocess.Popen(
      step.command(out.resolve()),
      cwd=REPO,
      env=env,
      stdout=log,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )
    try:
      code = process.wait(step.limit)
      became = "done" if code == 0 else f"exit status {code}"
    except subprocess.TimeoutExpired:
      became = f"stopped after {step.limit} s"
    finally:
      if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    shown.note(became)
    return {"became": became, "seconds": round(shown.seconds, 1)}


if __name__ == "__main__":
  sys.exit(main())
