"""Methods over methods: a wrapper overrides some moves and hands the rest to its base."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from kvjax.method import Method
from kvjax.methods.full import Full

MOVES = (
  *("pieces", "room", "capacity", "extra", "window", "span"),
  *("victim", "fresh", "insert", "score", "select", "everything", "plan", "order", "read"),
  *(
    "attend",
    "observe",
    "active",
    "apart",
    "fill",
    "stage",
    "attend_prompt",
    "rank",
    "keep",
    "settle",
  ),
  "conclude",
)


@dataclasses.dataclass(frozen=True)
class Wrapper(Method):
  """A method that changes another one's moves.

  A subclass overrides moves and calls `self.base.<move>(at, …)` where it adds to the base's; moves
  that it replaces outright are listed in `replaces`, and a base that has its own form of one of
  them is refused: it would be dropped silently.

  Attributes:
    base: the method that is wrapped.
  """

  replaces: ClassVar[tuple[str, ...]] = ()
  base: Method = dataclasses.field(default_factory=Full)

  def __post_init__(self):
    lost = [move for move in self.replaces if self.base.overrides(move)]
    if lost:
      raise ValueError(
        f"{type(self).__name__} replaces {', '.join(lost)}, and so does its base {self.base!r}: "
        "wrap a base that leaves it as it is"
      )

  @property
  def positional(self) -> bool:
    return self.base.positional

  @property
  def wants_logits(self) -> bool:
    return self.base.wants_logits

  @property
  def ordered(self) -> bool:
    return type(self).attend is not Wrapper.attend or self.base.ordered

  @property
  def standing(self) -> tuple[str, ...]:
    return self.base.standing

  @property
  def chunkable(self) -> bool:
    return self.base.chunkable

  @property
  def order_independent(self) -> bool:
    return self.base.order_independent

  @property
  def in_place(self) -> tuple[str, ...]:
    return self.base.in_place

  @property
  def along_slots(self) -> tuple[str, ...]:
    return self.base.along_slots

  @property
  def projects_all(self) -> bool:
    return self.base.projects_all

  def overrides(self, move: str) -> bool:
    own = getattr(type(self), move) is not getattr(Wrapper, move)
    return own or self.base.overrides(move)


def _to_base(move: str) -> Any:
  def call(self, *args, **kwargs):
    return getattr(self.base, move)(*args, **kwargs)

  call.__name__ = move
  call.__doc__ = getattr(Method, move).__doc__
  return call


for _move in MOVES:
  setattr(Wrapper, _move, _to_base(_move))
