"""A method's traits and tiles are evaluated once for each instance, and nothing shows it."""

import copy
import dataclasses
import pickle

import pytest

import kvjax
from kvjax import METHODS, Full, Quest, Wrapper, settings

SAID = []


@dataclasses.dataclass(frozen=True)
class Lower(Full):
  size: int = 1

  @property
  def traits(self):
    SAID.append(("Lower", self.size))
    return super().traits.but(chunkable=False)


@dataclasses.dataclass(frozen=True)
class Upper(Lower):
  @property
  def traits(self):
    SAID.append(("Upper", self.size))
    return super().traits.but(prunes=self.size > 1)

  def _above(self):
    return super().traits


@dataclasses.dataclass(frozen=True)
class Around(Wrapper):
  @property
  def traits(self):
    SAID.append(("Around", None))
    return super().traits.but(endless=True)


@dataclasses.dataclass(frozen=True)
class Wide(Quest):
  @property
  def tiles(self):
    SAID.append(("Wide", None))
    return dataclasses.replace(super().tiles, best=7)


@pytest.fixture(autouse=True)
def nothing_said():
  SAID.clear()


def test_once_for_each_instance():
  one, two = Upper(1), Upper(2)
  for _ in range(3):
    assert (one.traits.prunes, two.traits.prunes) == (False, True)
  assert SAID == [("Upper", 1), ("Lower", 1), ("Upper", 2), ("Lower", 2)]
  wide = Wide(16)
  assert [wide.tiles.best for _ in range(3)] == [7, 7, 7] and SAID[4:] == [("Wide", None)]


def test_what_the_class_above_says_is_kept_apart():
  early, late = Upper(2), Upper(2)
  above = early._above()
  assert early.traits.prunes and not above.prunes and early._above() is above
  assert late.traits.prunes and late._above() == above and not above.chunkable
  assert len(SAID) == 4
  # Classes of one name do not take each other's.
  again = type("Upper", (Upper,), {"traits": property(lambda self: Upper.traits.fget(self).but())})
  assert again(2).traits.prunes and again(2).traits is not again(2)._above()


def test_a_wrapper_asks_its_base():
  """Which may be evaluated already, or the base of several."""
  base = Upper(2)
  for _ in range(2):
    method = Around(base)
    assert method.traits.endless and method.traits.prunes and not base.traits.endless
  assert [name for name, _ in SAID] == ["Upper", "Lower", "Around", "Around"]


def test_an_instance_is_what_its_fields_are():
  """Values of properties are not compared, stored or copied."""
  asked, fresh = Upper(2), Upper(2)
  assert asked.traits.prunes
  assert asked == fresh and hash(asked) == hash(fresh) and repr(asked) == repr(fresh)
  assert pickle.dumps(asked) == pickle.dumps(fresh)
  for other in (pickle.loads(pickle.dumps(asked)), copy.copy(asked), copy.deepcopy(asked)):
    assert other == asked and vars(other) == {"size": 2} and other.traits == asked.traits
  assert not dataclasses.replace(asked, size=1).traits.prunes and asked.traits.prunes


@pytest.mark.parametrize("name", METHODS)
def test_a_method_that_was_asked_is_stored(name):
  """Traits may hold what cannot be pickled."""
  method = settings.example(METHODS[name], 16)
  assert method.traits is method.traits
  assert pickle.loads(pickle.dumps(method)) == method


def test_fields_of_any_kind():
  """Neither hashable nor slots."""

  @dataclasses.dataclass(frozen=True, slots=True)
  class Slotted(kvjax.Full):
    sizes: list = dataclasses.field(default_factory=list)

    @property
    def traits(self):
      return kvjax.Full.traits.fget(self).but(prunes=bool(self.sizes))

  for sizes in ([], [1]):
    method = Slotted(sizes)
    assert method.traits is method.traits and method.traits.prunes == bool(sizes)
