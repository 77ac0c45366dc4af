"""Settings of methods by their size, for demos, laws, benchmarks and evaluations.

They are defined next to the class and receive it: a subclass inherits all but `repo`.

    register(Mine, example=lambda cls, budget: cls(budget), neutral=lambda cls, length: cls(length))
    usual(Mine, 1024)
"""

from __future__ import annotations

import numbers
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
  return _made(cls, budget, "example")


def usual(cls: type[M], budget: int) -> M:
  """As `example`, with the paper's settings where those would do nothing in a short context.

  >>> import kvjax
  >>> kvjax.settings.usual(kvjax.LagKV, 1024).window_size
  128
  """
  return _made(cls, budget, "usual", "example")


def neutral(cls: type[M], length: int) -> M:
  """The setting under which the method equals Full on sequences of up to `length` tokens."""
  return _made(cls, length, "neutral")


def repo(cls: type[M], budget: int) -> M:
  """The setting of the authors' repository, where it computes something else than the paper.

  Raises:
    NotImplementedError: no such difference is known; the defaults are the paper's.
  """
  _check(cls, budget)
  if (cls, "repo") not in _KNOWN:
    raise NotImplementedError(f"{cls.__name__}.repo: no setting that differs from the paper's")
  return _KNOWN[cls, "repo"](cls, budget)


def _made(cls: type[M], tokens: int, *names: str) -> M:
  """By the nearest class's function of the first name that any has; NotImplementedError if none."""
  _check(cls, tokens)
  for name in names:
    for base in cls.__mro__:
      if (base, name) in _KNOWN:
        return _KNOWN[base, name](cls, tokens)
  raise NotImplementedError(
    f"{cls.__name__}.{names[-1]}: found none, expected kvjax.settings.register({cls.__name__}, "
    f"{names[-1]}=...) beside the class"
  )


def _check(cls: Any, tokens: Any) -> None:
  """Raises for what is no class, and for what is no number of tokens."""
  if not isinstance(cls, type):
    raise TypeError(f"cls: found {cls!r}, expected the class of a method, such as kvjax.SnapKV")
  if not isinstance(tokens, numbers.Integral) or isinstance(tokens, bool):
    raise TypeError(f"{cls.__name__}: found {tokens!r} tokens, expected an integer")
  if tokens < 1:
    raise ValueError(f"{cls.__name__}: found {tokens} tokens, expected 1 or more")
