"""Properties that are evaluated once for each instance, frozen ones too."""

from __future__ import annotations

from typing import Any

_KEPT = "_once"  # in the instance's __dict__: what each property gave


class Once(property):
  """A property that keeps what it gave, beside the instance's fields.

  Each class's own keeps its own, so that `super()` gives what the class above says.
  """

  def __get__(self, instance: Any, owner: type | None = None, /) -> Any:
    if instance is None:
      return self
    kept = vars(instance).setdefault(_KEPT, {})
    if self not in kept:
      kept[self] = super().__get__(instance, owner)
    return kept[self]


def once(cls: type, *names: str) -> None:
  """Has the properties of these names in a class body evaluated once for each instance."""
  for name in names:
    found = vars(cls).get(name)
    if isinstance(found, property) and not isinstance(found, Once):
      setattr(cls, name, Once(found.fget, found.fset, found.fdel, found.__doc__))


def without_kept(instance: Any) -> dict[str, Any]:
  """The instance's fields, without what properties gave: what is pickled and copied."""
  return {name: x for name, x in vars(instance).items() if name != _KEPT}
