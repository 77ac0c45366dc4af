"""Makers of the figures of README and the results, from the result files.

A document says where: `<!-- MODULE.NAME ARGUMENT: begin -->` and its `end` hold what `NAME` of a
module here makes of the files, and of an argument if it takes one; `<!--MODULE.NAME-->` and
`<!--.-->` hold one of the module's `figures`, in a sentence. Figures are found by the names of
their cases and contenders (`results`), and what is missing is named; ratios (`timings`) do not
divide by what was not steady; tables and sentences (`cells`) take nothing without a source.
"""

import functools
import importlib
from collections.abc import Mapping

from scripts.tools import markers
from scripts.tools.tablemakers import records
from scripts.tools.tablemakers.records import Figure
from scripts.tools.tablemakers.results import Maker, Results

__all__ = ["DOCUMENTS", "Maker", "Results", "maker", "quoted"]

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


@functools.cache
def figures(module: str, results: Results) -> Mapping[str, str]:
  """A module's figures in sentences, by their names."""
  found = _module(module).figures(results)
  return {f"{module}.{name}": records.without_source(figure) for name, figure in found.items()}


def quoted(text: str, results: Results) -> tuple[str, list[Figure]]:
  """A text with its figures in sentences made anew, and those that have a source.

  Raises:
    ValueError: there are no such figures, or their files are missing; all are named.
  """
  said: dict[str, str] = {}
  wrong, names = [], markers.figures(text)
  for module in sorted({name.partition(".")[0] for name in names}):
    try:
      said |= figures(module, results)
    except (ValueError, OSError) as error:
      wrong.append(f"{module}: {error}")
  if missing := sorted(set(names) - set(said)):
    wrong.append(f"found no figures {missing}")
  if wrong:
    raise ValueError("\n".join(wrong))
  sources = [x for name in names if isinstance(x := said[name], Figure)]
  return markers.quoted(text, lambda name: said[name]), sources


def _module(name: str):
  return importlib.import_module(f"{__name__}.{name}")
