"""What writes the figures of README and the results, from the result files.

A document says where: `<!-- MODULE.NAME ARGUMENT: begin -->` and its `end` hold what `NAME` of a
module here makes of the files, and of an argument if it takes one; `<!--MODULE.NAME-->` and
`<!--.-->` hold one of the module's `figures`, in a sentence. Ratios are written by `cells`, which
does not divide by what was not steady; figures are found by the names of their cases and contenders
(`results`), and what is missing is named.
"""

import importlib
from collections.abc import Mapping

from scripts.tools.tablemakers.results import Maker, Results

__all__ = ["DOCUMENTS", "Maker", "Results", "figures", "maker"]

_PAGES = ("README", "art", "prr", "prhs", "longflow", "ltri", "real_model", "smollm2")
_PAGES += ("selection", "codes", "beside")
DOCUMENTS = (
  *(f"scripts/results/{page}.md" for page in _PAGES),
  *("README.md", "kvjax/README.md", "kvjax/methods/README.md"),
)


def maker(name: str) -> Maker:
  """Of a part between markers.

  Raises:
    ValueError: there is none of this name.
  """
  named, *arguments = name.split(" ")
  module, _, function = named.partition(".")
  try:
    made = getattr(_module(module), function)
  except (AttributeError, ImportError):
    raise ValueError("found no maker of this name") from None
  return lambda results: made(results, *arguments)


def figures(module: str, results: Results) -> Mapping[str, str]:
  """A module's figures in sentences, by their names."""
  return _module(module).figures(results)


def _module(name: str):
  return importlib.import_module(f"{__name__}.{name}")
