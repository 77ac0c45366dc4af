"""The program `kvjax`: every user's program as a command, imported when it is asked for."""

import argparse
import importlib
import os
import sys
from importlib import metadata

from kvjax import __version__
from kvjax.programs.installed import file_of, in_checkout, summary

# What users call -> the module, under the heading that the help shows.
COMMANDS = {
  "run a model": {
    "demo": "kvjax.programs.demo",
    "chat": "kvjax.programs.chat",
    "generate": "kvjax.programs.generate",
    "serve": "kvjax.programs.serve",
    "convert": "kvjax.programs.convert_checkpoint",
  },
  "choose a method": {
    "methods": "kvjax.programs.methods",
    "advise": "kvjax.programs.advise",
    "evaluate": "kvjax.programs.evaluate",
    "speed": "kvjax.programs.speed",
    "plot": "kvjax.programs.plot",
  },
  "measure a device": {
    "bench": "kvjax.programs.bench",
    "cold": "kvjax.programs.cold",
    "tune": "kvjax.programs.tune",
  },
  "prepare a method for your model": {
    "calibrate": "kvjax.programs.calibrate_channels",
    "retrieval-heads": "kvjax.programs.retrieval_heads",
  },
  "repeat the studies, in a checkout": {
    "record": "scripts.studies.record",
    "art-study": "scripts.studies.art_study",
    "sharing-study": "scripts.studies.sharing_study",
    "certificate-study": "scripts.studies.certificate_study",
    "hit-rates": "scripts.studies.hit_rates",
    "needle-recall": "scripts.studies.needle_recall",
    "plot-spans": "scripts.studies.plot_spans",
    "span-search": "scripts.studies.span_search",
    "turnover": "scripts.studies.turnover",
  },
}
MODULES = {name: module for group in COMMANDS.values() for name, module in group.items()}
# Run from a checkout, `python -m scripts.<name>`.
DEVELOPERS = (
  *(f"tools.{name}" for name in ("on_gpu", "launches", "compiled", "frames", "tables")),
  *(f"tools.{name}" for name in ("reference", "support_table", "soak", "fuzz", "make_golden")),
  *(f"tools.{name}" for name in ("soak_streams", "make_family_goldens")),
  *("studies.beside_kvpress", "studies.beside_kvzip"),
)
EXTRAS = {"serve": "serve"}  # what a command needs besides; the others' is `eval`
_DEVELOPERS = "For developers: "
_EXAMPLES = """examples:
  kvjax demo
  kvjax chat --method quest --budget 512
  kvjax convert hf:Qwen/Qwen2.5-0.5B-Instruct qwen
  kvjax generate "Name three rivers." --checkpoint qwen --method snapkv
  kvjax advise --model Llama-3.1-8B --length 131072 --device h100
  kvjax evaluate --tasks ruler needle --methods snapkv quest --out run
"""


def _listing() -> str:
  lines = []
  for heading, group in COMMANDS.items():
    here = {name: module for name, module in group.items() if file_of(module)}
    if here:
      lines += [f"{heading}:", *(f"  {name:18} {summary(m)}" for name, m in here.items()), ""]
  if in_checkout():
    lines += ["for developers of kvjax (python -m scripts.NAME):"]
    for name in DEVELOPERS:
      said = summary(f"scripts.{name}").removeprefix(_DEVELOPERS)
      lines.append(f"  {name:25} {said[:1].upper()}{said[1:]}")
    lines.append("")
  return "\n".join([*lines, _EXAMPLES, "`kvjax COMMAND --help` explains a command."])


def _versions() -> str:
  python = ".".join(map(str, sys.version_info[:3]))
  try:
    jax = metadata.version("jax")
  except metadata.PackageNotFoundError:
    jax = "not installed"
  return f"kvjax {__version__}, jax {jax}, Python {python}"


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
  if len(sys.argv) == 1:
    parser.print_help()
    return
  given = parser.parse_args()
  module = MODULES[given.command]
  if not file_of(module):
    parser.exit(1, f"error: {given.command} is a study, expected in a checkout of kvjax\n")
  name = module.rpartition(".")[2]
  sys.argv = [f"{name}.py", *given.arguments]  # as `python -m` has them
  sys.path.append(os.getcwd())  # for methods of one's own, module:Class
  if {"-h", "--help"} & set(given.arguments):
    common = importlib.import_module("kvjax.programs.common")
    arguments = importlib.import_module("kvjax.programs.arguments")
    common.parse(arguments.of(module), f"kvjax {given.command}")
  try:
    program = importlib.import_module(module)
  except ModuleNotFoundError as error:
    if (error.name or "kvjax").split(".")[0] == __name__.split(".")[0]:
      raise
    extra = EXTRAS.get(given.command, "eval")
    needed = f"{error}, expected it for {given.command}: pip install 'kvjax[{extra}]'"
    parser.exit(1, f"error: {needed}\n")
  common = importlib.import_module("kvjax.programs.common")
  common.run(program.main, program.Args, command=f"kvjax {given.command}")
