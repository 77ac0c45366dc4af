"""Methods over methods: a wrapper overrides some moves and hands the rest to its base."""

import dataclasses
import functools
from typing import Any, ClassVar

from kvjax.core.cache import CacheSpec
from kvjax.core.traits import Traits
from kvjax.families import forms
from kvjax.families.full import Full
from kvjax.families.method import Method

# What is the base's own unless a wrapper says otherwise.
FORWARDED = (
  *("capacity", "leaves", "window", "span", "victim", "insert"),
  *("plan", "order", "attend", "plan_and_attend", "observe", "active", "fill", "stage", "rank"),
  *("keep", "settle", "conclude", "_conclude_step", "_entering"),
  *("decode_step", "prefill", "attend_prompt"),
)
# What asks for other moves, of which these are about shapes and the others are not.
DRIVERS = ("init_caches", "prefill", "decode_step")
SHAPES = ("capacity", "leaves")


def of_base(name: str) -> Any:
  """A declaration of the base's that holds for a wrapper, too."""
  return property(lambda self: getattr(self.base, name))


@dataclasses.dataclass(frozen=True)
class Wrapper(Method):
  """A method that changes another one's moves.

  What it leaves alone is the base's, drivers too. A subclass overrides moves and calls
  `self.base.<move>(at, …)` where it adds to the base's; moves that it replaces outright are listed
  in `replaces`, and a base that has its own form of one of them is refused: it would be dropped
  silently. So is a base with drivers of its own, if these need not ask for what is overridden.

  Attributes:
    base: the method that is wrapped.
  """

  replaces: ClassVar[tuple[str, ...]] = ()
  entry: ClassVar[Any] = of_base("entry")
  placement: ClassVar[Any] = of_base("placement")
  attention: ClassVar[Any] = of_base("attention")
  _covers: ClassVar[Any] = of_base("_covers")
  _spares: ClassVar[Any] = of_base("_spares")
  base: Method = dataclasses.field(default_factory=Full)

  def __post_init__(self):
    lost = [move for move in self.replaces if forms.differs(self.base, move)]
    if lost:
      raise ValueError(
        f"{type(self).__name__} replaces {', '.join(lost)}, and so does its base {self.base!r}: "
        "wrap a base that leaves it as it is"
      )
    own = self._own()
    if own and self.base.traits.uneven is not None:
      raise ValueError(
        f"{type(self).__name__}.base: found {self.base!r}, whose heads have different numbers "
        "of slots, expected a base with slots [B, K, S]"
      )
    for driver in DRIVERS:
      shapes = driver == "init_caches"
      asked = [x for x in own if (x in SHAPES) == shapes and x not in DRIVERS]
      if asked and driver not in own and forms.overrides(self.base, driver):
        raise ValueError(
          f"{type(self).__name__}.base: found {self.base!r}, whose {driver} may not call "
          f"{', '.join(asked)}, expected a base that does not override {driver}"
        )

  @property
  def traits(self) -> Traits:
    """The base's; a wrapper that overrides anything has to say itself that it spreads."""
    own, base = self._own(), self.base.traits
    if not own:
      return base
    stream = base.stream and dataclasses.replace(base.stream, alike=None)
    return base.but(ordered="attend" in own or base.ordered, spreads=False, stream=stream)

  def init_caches(self, spec: CacheSpec) -> tuple[Any, ...]:
    if forms.overrides(self.base, "init_caches"):
      return self.base.init_caches(spec)
    return super().init_caches(spec)

  def _form(self, move: str) -> Any:
    own = next((vars(cls)[move] for cls in self._classes() if move in vars(cls)), None)
    return self.base._form(move) if own is None else own

  def _classes(self) -> list[type]:
    """The classes of the wrapper itself, the outermost first."""
    line = type(self).__mro__
    return [*line[: line.index(Wrapper)]]

  def _own(self) -> list[str]:
    """Moves and properties that are not left to the base."""
    names = dict.fromkeys(name for cls in self._classes() for name in vars(cls))
    named = [x for x in names if x in vars(Method) and x not in forms.DESCRIBED]
    return [x for x in named if not x.startswith("_")]


class _ToBase:
  """The base's own answer, or its own form of a move: a wrapper's call of it is a call of that."""

  def __init__(self, move: str):
    known, self.move = vars(Method)[move], move

    @functools.wraps(known)
    def call(self: Wrapper, *args: Any, **named: Any) -> Any:
      return getattr(self.base, move)(*args, **named)

    self.call = call

  def __get__(self, wrapper: Wrapper | None, _: type) -> Any:
    return self.call if wrapper is None else getattr(wrapper.base, self.move)


for _move in FORWARDED:
  setattr(Wrapper, _move, _ToBase(_move))
