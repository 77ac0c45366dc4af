"""For developers: do a new user's first tasks, and tell how long each takes.

    python -m scripts.tools.first_hour --out first_hour.txt

Each task is commands of a shell in a folder of its own and a text that they must print. The model
is SmolLM2-135M-Instruct; whether it has been fetched and converted before is the user's cache's.
"""

import argparse
import dataclasses
import os
import pathlib
import re
import resource
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
HELP = """for name in $(python -c "from kvjax.programs import commands
print(*commands.MODULES)"); do kvjax $name --help > help.txt && echo "$name: helps"; done"""
PAGES = """python -c "import pathlib; from tests import readme
print(readme.program(pathlib.Path('made'), 'from scripts.examples import tiny'))" > pages.py
mkdir made
XLA_FLAGS=--xla_force_host_platform_device_count=2 python pages.py && echo "pages: done" """
FOLDER = """python -c "import pathlib; from scripts.examples import tiny
tiny.huggingface_folder(pathlib.Path('hf'))" && kvjax generate hello --checkpoint hf --steps 4 --raw
kvjax convert hf converted && ls converted"""
EVALUATE = "kvjax evaluate --tasks needle --methods snapkv --lengths 512 --samples 6 --out run"
EXAMPLES = """for name in decode_loop batch compose memory quest_blocks; do
python -m scripts.examples.$name && echo "$name: done"; done"""


@dataclasses.dataclass(frozen=True)
class Task:
  """A step of a user: a command line of bash, and a pattern that its output has."""

  name: str
  command: str
  said: str


TASKS = (
  Task("help of every command", HELP, r"(?s)demo: helps.*plot-spans: helps"),
  Task("snippets of the first pages, tiny model", PAGES, "pages: done"),
  Task("chat, two messages", r"printf 'Name a lake.\n/quit\n' | kvjax chat --steps 16", r"\w"),
  Task("generate", "kvjax generate 'Name three rivers.' --steps 16 --json", '"cache_bytes"'),
  Task("evaluate, killed", f"timeout -s KILL 15 {EVALUATE}; wc -l run/rows.jsonl", r"\d run"),
  Task("evaluate, resumed", f"{EVALUATE} && wc -l run/rows.jsonl", "12 run"),
  Task(
    "advise: 8B, 128K, 80 GB",
    "kvjax advise --model Llama-3.1-8B --length 131072 --memory 80",
    "kvjax generate",
  ),
  Task(
    "advise: 32B, 32K, 24 GB",
    "kvjax advise --model Qwen3-32B --length 32768 --memory 24",
    "do not fit",
  ),
  Task("a method of one's own", "python -m scripts.examples.own_method", r"\w"),
  Task("a layer of one's own", "python -m scripts.examples.flax_layer", r"\w"),
  Task("a Hugging Face folder", FOLDER, "config.json"),
  Task("examples", EXAMPLES, "quest_blocks: done"),
  Task("API reference", "python -m scripts.tools.reference --out docs && ls docs", "index.html"),
  Task("what moved", f"grep -c '^|' {ROOT}/MOVING.md", r"\d\d"),
)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--out", type=pathlib.Path, required=True, help="table of times")
  parser.add_argument("--only", default="", help="tasks whose names contain it")
  options = parser.parse_args()
  lines, failed = ["task  ok  s  CPU s"], 0
  with tempfile.TemporaryDirectory() as folder:
    for task in (task for task in TASKS if options.only in task.name):
      seconds, cpu, text = run(task, pathlib.Path(folder))
      right = re.search(task.said, text) is not None
      failed += not right
      lines.append(f"{task.name:40} {'yes' if right else 'NO':>3} {seconds:6.1f} {cpu:6.1f}")
      print(lines[-1] if right else f"{lines[-1]}\n{text[-2000:]}", flush=True)
  options.out.write_text("\n".join(lines) + "\n", "utf-8")
  return int(failed > 0)


def run(task: Task, folder: pathlib.Path) -> tuple[float, float, str]:
  """Seconds, CPU-seconds and output of a task."""
  tools = f'python() {{ "{sys.executable}" "$@"; }}; kvjax() {{ python -m kvjax "$@"; }}'
  # `timeout` starts a program, not a function.
  command = task.command.replace("KILL 15 kvjax", f'KILL 15 "{sys.executable}" -m kvjax')
  began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
  done = subprocess.run(
    ["bash", "-c", f"{tools}; {command}"],
    cwd=folder,
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    check=False,
  )
  after = resource.getrusage(resource.RUSAGE_CHILDREN)
  cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
  return time.perf_counter() - began, cpu, done.stdout


if __name__ == "__main__":
  sys.exit(main())
