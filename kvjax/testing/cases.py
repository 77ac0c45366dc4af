"""Methods under the laws, and the calls of a small decoder whose programs the laws share.

Shapes and static arguments of a call are part of its program: a law that needs others pays for it.
"""

import dataclasses
import functools
import inspect
import unittest
from collections.abc import Callable
from typing import Any

import numpy as np

from kvjax.core import settings
from kvjax.families.method import Method
from kvjax.testing.tiny import CAPACITY, LENGTHS, TOKENS, Run

BUDGET = 12
STEPS = 6
WIDTH, CHUNK = 32, 8  # tokens of a prompt and of what is read onto live caches, padding included


@dataclasses.dataclass(frozen=True)
class Case:
  """A method class under the laws.

  Attributes:
    method: the class; it has `example` and `neutral`.
    settings: fields of the tight setting, `example(BUDGET)`, that a decoder this shallow needs.
    layers: how many layers show what the method does.
    drops_newest: why it may drop the newest token; empty: it may not.
    skips_newest: why a step may leave out the newest token; empty: it may not.
    has_repo: whether `repo` gives a setting.
  """

  method: type[Method]
  settings: tuple[tuple[str, Any], ...] = ()
  layers: int = 2
  drops_newest: str = ""
  skips_newest: str = ""
  has_repo: bool = False

  @functools.cached_property
  def tight(self) -> Method:
    """A setting under which the method has something to drop at these lengths."""
    return dataclasses.replace(settings.example(self.method, BUDGET), **dict(self.settings))

  @functools.cached_property
  def neutral(self) -> Method:
    return settings.neutral(self.method, CAPACITY)


LAWS: dict[str, Callable[[Case], None]] = {}


def law(f: Callable[[Case], None]) -> Callable[[Case], None]:
  """Adds a function to `LAWS`, by its name; a note on its errors says what it checks."""

  @functools.wraps(f)
  def holds(case: Case) -> None:
    try:
      f(case)
    except unittest.SkipTest:
      raise
    except Exception as error:
      checks = " ".join(inspect.cleandoc(f.__doc__ or "").split("\n\n")[0].split())
      error.add_note(f"{case.method.__name__} breaks the law {f.__name__}: {checks}")
      raise

  LAWS[f.__name__] = holds
  return holds


def finite(what: str, x: np.ndarray) -> None:
  """Raises AssertionError for numbers that are NaN or infinite."""
  ill = x.size - int(np.isfinite(x).sum())
  assert not ill, f"{what}: found {ill} of {x.size} that are NaN or infinite, expected none"


def same(what: str, found: Any, expected: Any) -> None:
  """Raises AssertionError for another value."""
  assert found == expected, f"{what}: found {found}, expected {expected}"


raises = unittest.TestCase().assertRaisesRegex


# ---- calls of a small decoder


class Told(Run):
  """A run of calls whose shapes are those of the shared programs."""

  def __init__(self, case: Case, method: Method | None = None, **how: Any):
    super().__init__(case.tight if method is None else method, layers=case.layers, **how)

  def prompt(self, lengths=LENGTHS, tokens=TOKENS):
    return self.prefill(lengths, tokens=tokens, width=WIDTH)

  def chunk(self, lengths, start, tokens=TOKENS):
    return self.prefill(np.asarray(lengths, np.int32), start, tokens, width=CHUNK, past=None)

  def generate(self, steps=STEPS, lengths=LENGTHS, **given):
    return super().generate(steps, lengths, width=WIDTH, **given)


@functools.cache
def logits_of(case: Case, method: Method | None = None) -> np.ndarray:
  """The prompt's logits and those of STEPS decoded tokens, [B, STEPS + 1, V]."""
  return Told(case, method).generate()
