"""Settings of methods by their size, for demos, laws, benchmarks and evaluations.

They are defined next to the class and receive it: a subclass inherits all but `repo`.

    register(Mine, example=lambda cls, budget: cls(budget), neutral=lambda cls, length: cls(length))
    usual(Mine, 1024)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
  from kvjax.families.method import Method

M = TypeVar("M")
Made = Callable[[Any, int], Any]
_KNOWN: dict[tuple[type, str], Made] = {}


def register(
  cls: type[Method],
  *,
  example: Made | None = None,
  usual: Made | None = None,
  neutral: Made | None = None,
  repo: Made | None = None,
) -> None:
  """Says how a class is made of a number of tokens, each by a function of the class and the number.

  Args:
    cls: the method.
    example, usual, neutral, repo: as the functions of these names; None: those of its bases.
  """
  given = {"example": example, "usual": usual, "neutral": neutral, "repo": repo}
  _KNOWN.update({(cls, name): made for name, made in given.items() if made is not None})


def example(cls: type[M], budget: int) -> M:
  """An instance that keeps or reads about `budget` tokens: for demos, laws and benchmarks."""
  return _made(cls, "example")(cls, budget)


def usual(cls: type[M], budget: int) -> M:
  """As `example`, with the paper's settings where those would do nothing in a short context.

  >>> import kvjax
  >>> kvjax.settings.usual(kvjax.LagKV, 1024).window_size
  128
  """
  known = any((base, "usual") in _KNOWN for base in cls.__mro__)
  return _made(cls, "usual" if known else "example")(cls, budget)


def neutral(cls: type[M], length: int) -> M:
  """The setting under which the method equals Full on sequences of up to `length` tokens."""
  return _made(cls, "neutral")(cls, length)


def repo(cls: type[M], budget: int) -> M:
  """The setting of the authors' repository, where it computes something else than the paper.

  Raises:
    NotImplementedError: no such difference is known; the defaults are the paper's.
  """
  if (cls, "repo") not in _KNOWN:
    raise NotImplementedError(f"{cls.__name__}.repo: no setting that differs from the paper's")
  return _KNOWN[cls, "repo"](cls, budget)


def _made(cls: type, name: str) -> Made:
  """The nearest class's; NotImplementedError where none has it."""
  for base in cls.__mro__:
    if (base, name) in _KNOWN:
      return _KNOWN[base, name]
  raise NotImplementedError(
    f"{cls.__name__}.{name}: found none, expected kvjax.settings.register({cls.__name__}, "
    f"{name}=...) beside the class"
  )
