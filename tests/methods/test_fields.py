"""Bounds that fields declare: what is refused, in which words, and what subclasses inherit."""

import dataclasses
import math
import re

import numpy as np
import pytest

from kvjax import Method, Quest
from kvjax.core import fields


@dataclasses.dataclass(frozen=True)
class Declared(Method):
  few: int = fields.least(2, 4)
  share: float | int = fields.between(0, 1, 0.5)
  part: float | int = fields.between(0, 1, 0.5, "(]")
  slope: float | int = fields.between(0, math.inf, 1.0, "[)")
  free: float | int = fields.number(0.0)
  width: int = fields.odd(3)
  mode: str = fields.one_of(("a", "b"), "a")
  size: str = fields.one_of(("s", "m", "l"), "s")
  even: int | None = fields.bound(lambda x: x % 2 == 0, "an even number", None)
  plain: float = 0.0

  def __post_init__(self):
    fields.expect(self, "few", self.few > self.width, f"more than width = {self.width}")


@dataclasses.dataclass(frozen=True)
class Other(Declared):
  """Another default, no word about bounds, and a `__post_init__` that asks no other."""

  few: int = 8

  def __post_init__(self):
    pass


@pytest.mark.parametrize("cls", [Declared, Other])
@pytest.mark.parametrize(
  ("field", "refused", "expected"),
  [
    ("few", (1, -5), "2 or more"),
    ("share", (-0.1, 1.1, math.nan), "0 to 1"),
    ("part", (0.0, 0, 1.1, math.nan), "more than 0 and at most 1"),
    ("slope", (-1.0, math.inf, math.nan), "0 or more, below inf"),
    ("free", (math.nan, np.float32("nan")), "a number"),
    ("width", (0, 2, -1), "an odd number"),
    ("mode", ("c", ""), "'a' or 'b'"),
    ("size", ("x",), "one of ('s', 'm', 'l')"),
    ("even", (1,), "an even number"),
  ],
)
def test_what_is_out_of_bounds_is_refused(cls, field, refused, expected):
  for value in refused:
    message = f"{cls.__name__}.{field}: found {value!r}, expected {expected}"
    with pytest.raises(ValueError, match=re.escape(message)):
      cls(**{field: value})


@pytest.mark.parametrize(
  ("field", "taken"),
  [
    ("few", (4, 99, np.int32(7))),
    ("share", (0, 0.0, 1, 1.0)),
    ("part", (1e-9, 1.0)),
    ("slope", (0.0, 1e30)),
    ("free", (-math.inf, math.inf, 0)),
    ("width", (1, 3)),
    ("mode", ("a", "b")),
    ("even", (None, 2)),
    ("plain", (math.nan, -1.0)),  # declares nothing
  ],
)
def test_what_is_within_is_taken(field, taken):
  for value in taken:
    assert getattr(Declared(**{field: value}), field) is value


@pytest.mark.parametrize("cls", [Declared, Other])
@pytest.mark.parametrize(
  ("values", "message"),
  [
    ({"few": True}, "few: found True, expected int"),
    ({"few": 4.0}, "few: found 4.0, expected int"),
    ({"share": True}, "share: found True, expected float or int"),
    ({"share": "0.5"}, "share: found '0.5', expected float or int"),
    ({"mode": None}, "mode: found None, expected str"),
    ({"even": "2"}, "even: found '2', expected int or None"),
  ],
)
def test_types_come_before_bounds(cls, values, message):
  with pytest.raises(TypeError, match=re.escape(f"{cls.__name__}.{message}")):
    cls(**values)


def test_fields_are_held_against_each_other():
  with pytest.raises(ValueError, match=r"Declared\.few: found 5, expected more than width = 5$"):
    Declared(few=5, width=5)
  with pytest.raises(ValueError, match=r"Declared\.few: found 2, expected more than width = 3$"):
    dataclasses.replace(Declared(), few=2)


def test_a_subclass_has_its_own_bound_where_it_declares_one():
  @dataclasses.dataclass(frozen=True)
  class Looser(Other):
    few: int = fields.least(0, 1)

  @dataclasses.dataclass(frozen=True)
  class Below(Looser):
    few: int = 3

  assert (Looser().few, Looser(few=0).few, Below(few=0).few) == (1, 0, 0)
  with pytest.raises(ValueError, match=r"Below\.few: found -1, expected 0 or more"):
    Below(few=-1)


def test_defaults_of_subclasses_are_held_to_the_bound():
  @dataclasses.dataclass(frozen=True)
  class Pageless(Quest):
    page: int = 0

  with pytest.raises(ValueError, match=r"Pageless\.page: found 0, expected 1 or more"):
    Pageless()
  assert Pageless(page=16).page == 16


def test_by_position_as_by_name():
  with pytest.raises(ValueError, match=r"Quest\.page: found 0, expected 1 or more"):
    Quest(64, 0)
  with pytest.raises(ValueError, match=r"Quest\.dense_layers: found -1, expected 0 or more"):
    Quest(64, 16, dense_layers=-1)
