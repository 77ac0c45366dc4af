"""The program `kvjax`: every user's program as a command, imported when it is asked for."""

import argparse
import importlib
import pathlib
import sys
from importlib import metadata

from kvjax import __version__

# What users call -> the module, under the heading that the help shows.
COMMANDS = {
  "run a model": {
    "demo": "demo",
    "chat": "chat",
    "generate": "generate",
    "convert": "convert_checkpoint",
  },
  "choose a method": {
    "advise": "advise",
    "evaluate": "evaluate",
    "speed": "speed",
    "plot": "plot",
  },
  "measure a device": {
    "bench": "bench",
    "cold": "cold",
  },
  "prepare a method for your model": {
    "calibrate": "calibrate_channels",
    "retrieval-heads": "retrieval_heads",
  },
  "repeat the studies": {
    "record": "record",
    "art-study": "art_study",
    "sharing-study": "sharing_study",
    "certificate-study": "certificate_study",
    "hit-rates": "hit_rates",
    "needle-recall": "needle_recall",
    "plot-spans": "plot_spans",
  },
}
MODULES = {name: module for group in COMMANDS.values() for name, module in group.items()}
# Run from a checkout, `python -m scripts.<name>`.
DEVELOPERS = (
  *("on_gpu", "launches", "tables", "reference", "support_table", "tune", "soak", "fuzz", "mutate"),
  *("make_golden", "make_family_goldens", "beside_kvpress", "beside_kvzip"),
)
_FOLDER = pathlib.Path(__file__).resolve().parent
_DEVELOPERS = "For developers: "
_EXAMPLES = """examples:
  kvjax demo
  kvjax chat --method quest --budget 512
  kvjax convert hf:Qwen/Qwen2.5-0.5B-Instruct qwen
  kvjax generate "Name three rivers." --checkpoint qwen --method snapkv
  kvjax advise --model Llama-3.1-8B --length 131072 --memory 80
  kvjax evaluate --tasks ruler needle --methods snapkv quest --out run
"""


def summary(module: str) -> str:
  """The first line of a module's docstring, without importing it; `module` may be in a folder."""
  with (_FOLDER / f"{module}.py").open(encoding="utf-8") as file:
    return file.readline().strip().strip('"')


def _first_up(text: str) -> str:
  return text[:1].upper() + text[1:]


def _listing() -> str:
  lines = []
  for heading, group in COMMANDS.items():
    lines += [f"{heading}:", *(f"  {name:18} {summary(m)}" for name, m in group.items()), ""]
  lines += ["for developers of kvjax, in a checkout (python -m scripts.NAME):"]
  lines += [
    f"  {name:20} {_first_up(summary(name).removeprefix(_DEVELOPERS))}" for name in DEVELOPERS
  ]
  return "\n".join([*lines, "", _EXAMPLES, "`kvjax COMMAND --help` explains a command."])


def _versions() -> str:
  python = ".".join(map(str, sys.version_info[:3]))
  return f"kvjax {__version__}, jax {_version('jax')}, Python {python}"


def _version(package: str) -> str:
  try:
    return metadata.version(package)
  except metadata.PackageNotFoundError:
    return "not installed"


def main() -> None:
  parser = argparse.ArgumentParser(
    prog="kvjax",
    usage="kvjax [-h] [--version] COMMAND ...",
    description="KV-cache methods for long contexts: run, compare and measure them.\n\n"
    + _listing(),
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("--version", action="version", version=_versions())
  parser.add_argument("command", choices=MODULES, metavar="COMMAND", help=argparse.SUPPRESS)
  parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
  given = parser.parse_args()
  name = MODULES[given.command]
  sys.argv = [f"{name}.py", *given.arguments]  # as `python -m` has them
  try:
    program = importlib.import_module(f".{name}", __package__)
  except ModuleNotFoundError as error:
    if (error.name or "kvjax").split(".")[0] == __name__.split(".")[0]:
      raise
    parser.exit(1, f"error: {error}, expected it for {given.command}: pip install 'kvjax[eval]'\n")
  common = importlib.import_module(".common", __package__)
  common.run(program.main, program.Args, name, command=f"kvjax {given.command}")
