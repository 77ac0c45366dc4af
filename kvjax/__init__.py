"""kvjax: KV-cache methods for long-context decoding, as jittable steps over an explicit cache."""

import importlib
import importlib.util
from typing import Any

from kvjax import _public

__version__ = "0.3.0"
__all__ = sorted(_public.MODULES)


def __getattr__(name: str) -> Any:
  """A module of this package, or a public name, imported when it is first asked for.

  JAX is not imported before: `kvjax --help` and `kvjax.__version__` do without.
  """
  if name in _public.MODULES:
    return globals().setdefault(name, _public.find(name))
  if name.startswith("_") or not importlib.util.find_spec(f"{__name__}.{name}"):
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
