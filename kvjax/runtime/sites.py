"""Places that layers share: one trace for all that give equal answers to what is asked of them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from kvjax.core.context import At, Env
from kvjax.families.method import Method


class DifferentLayer(Exception):
  """A layer gives another answer than the one whose program it was to share."""


class Site(At):
  """A place for all layers that give equal answers to whatever is asked of their number."""

  def __init__(self, first: int, env: Env, top: Method, asked: list[Any] | None = None):
    super().__init__(first, env, top)
    vars(self).update(first=first, served=first, asked=[] if asked is None else asked)

  __eq__, __hash__ = object.__eq__, object.__hash__

  def __getattribute__(self, name: str) -> Any:
    if name == "layer":
      return self.of_layer(lambda layer: layer)
    return super().__getattribute__(name)

  def of_layer(self, f: Callable[[int], Any]) -> Any:
    self.asked.append(f)
    if f(self.first) != f(self.served):
      raise DifferentLayer
    return f(self.first)

  def under(self, top: Method) -> At:
    site = Site(self.first, self.env, top, self.asked)
    vars(site)["served"] = self.served
    return site

  def by(self, impl: str) -> At:
    site = Site(self.first, dataclasses.replace(self.env, impl=impl), self.top, self.asked)
    vars(site)["served"] = self.served
    return site

  @contextlib.contextmanager
  def serving(self, layer: int) -> Iterator[None]:
    """Serves this layer to what is traced meanwhile; later traces are for the first."""
    if any(f(self.first) != f(layer) for f in self.asked):
      raise DifferentLayer
    vars(self)["served"] = layer
    try:
      yield
    finally:
      vars(self)["served"] = self.first
