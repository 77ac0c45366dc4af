"""For developers: write the API reference from the docstrings; a warning is an error.

    make docs                                      installs pdoc, writes build/docs/index.html
    python -m scripts.reference --out build/docs

It covers the public names of `kvjax`, the modules of `kvjax.models` and the others in MODULES.
A public name without a docstring is an error, too.
"""

import dataclasses
import importlib
import inspect
import pathlib
import warnings
from typing import Annotated

import tyro

from . import common

MODULES = (
  "kvjax",
  *(
    "kvjax.fields",
    "kvjax.leaves",
    "kvjax.rope",
    "kvjax.sharding",
    "kvjax.memory",
    "kvjax.offload",
  ),
  *("kvjax.streamed", "kvjax.certificates", "kvjax.diagnostics", "kvjax.early_stops"),
  *(f"kvjax.methods.{name}" for name in ("double_sparsity", "ltri")),
  *(f"kvjax.models.{name}" for name in ("convert", "transformer", "prefill", "generate")),
  *(f"kvjax.models.{name}" for name in ("sampling", "tokenizer", "caches", "parallel")),
  *(f"kvjax.models.{name}" for name in ("config", "presets", "step_bytes", "by_layer", "flat")),
  "kvjax.testing",
)


@dataclasses.dataclass(frozen=True)
class Args:
  """Where the pages go."""

  out: Annotated[pathlib.Path, tyro.conf.arg(metavar="FOLDER")] = pathlib.Path("build/docs")
  """A page for each module, and index.html."""


def undocumented() -> list[str]:
  """Public classes and functions of MODULES that have no docstring."""
  found = []
  for name in MODULES:
    module = importlib.import_module(name)
    public = getattr(module, "__all__", None) or [x for x in vars(module) if not x.startswith("_")]
    for each in public:
      value = getattr(module, each)
      own = name == "kvjax" or getattr(value, "__module__", None) == name
      if own and (inspect.isclass(value) or inspect.isfunction(value)) and not value.__doc__:
        found.append(f"{name}.{each}")
  return found


def main(args: Args) -> None:
  try:
    import pdoc
  except ModuleNotFoundError as error:
    raise ModuleNotFoundError("found no pdoc, expected it: pip install 'kvjax[docs]'") from error
  if missing := undocumented():
    raise ValueError(f"docstrings: found none of {', '.join(missing)}, expected one of each")
  pdoc.render.configure(docformat="google", math=False, show_source=False)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    pdoc.pdoc(*MODULES, output_directory=args.out)
  pages = sum(1 for _ in args.out.rglob("*.html"))
  print(f"{args.out / 'index.html'}: {pages} pages")


if __name__ == "__main__":
  common.run(main, Args, "reference")
