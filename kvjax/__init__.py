"""kvjax: KV-cache methods for long-context decoding, as jittable steps over an explicit cache."""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
  from kvjax._public import *  # noqa: F403
  from kvjax._public import __all__ as __all__


def __getattr__(name: str) -> Any:
  """A module of this package, or a public name, imported when it is first asked for.

  JAX is not imported before: `kvjax --help` and `kvjax.__version__` do without.
  """
  if name.startswith("_") and name != "__all__":
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  if importlib.util.find_spec(f"{__name__}.{name}"):
    return importlib.import_module(f"{__name__}.{name}")
  public = vars(importlib.import_module(f"{__name__}._public"))
  if name not in public:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  return globals().setdefault(name, public[name])


def __dir__() -> list[str]:
  return sorted({*globals(), *importlib.import_module(f"{__name__}._public").__all__})
