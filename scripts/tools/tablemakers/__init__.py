"""Makers of the tables of README and the results, from the result files.

A document says where: `<!-- MODULE.NAME ARGUMENT: begin -->` and its `end` hold what `NAME` of a
module here makes of the files, and of an argument if it takes one. Figures are found by the names
of their cases and contenders (`results`), and what is missing is named; ratios (`timings`) do not
divide by what was not steady; tables (`cells`) take nothing without a source.
"""

import importlib
from collections.abc import Callable

from scripts.tools.tablemakers.records import Figure, Number, Part, Record
from scripts.tools.tablemakers.results import GPU, H100, Case, Named, Results, Row

__all__ = ["DOCUMENTS", "GPU", "H100", "maker"]
__all__ += ["Case", "Figure", "Named", "Number", "Part", "Record", "Results", "Row"]

_PAGES = ("README", "art", "prr", "prhs", "longflow", "ltri", "real_model", "smollm2")
_PAGES += ("selection", "codes", "cards", "beside")
DOCUMENTS = (
  *(f"scripts/results/{page}.md" for page in _PAGES),
  *("README.md", "kvjax/README.md", "kvjax/methods/README.md"),
)


def maker(name: str) -> Callable[[Results], Part]:
  """Maker of the part between some markers: its lines and their figures.

  Raises:
    ValueError: there is none of this name.
  """
  named, _, argument = name.partition(" ")
  module, _, function = named.partition(".")
  try:
    made = getattr(importlib.import_module(f"{__name__}.{module}"), function)
  except (AttributeError, ImportError):
    raise ValueError("found no maker of this name") from None
  return lambda results: made(results, argument) if argument else made(results)
