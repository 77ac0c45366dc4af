"""A layer's cache, and the sizes that it is made of.

One dimension key everywhere: B batch, T query tokens, S cache slots, N query heads, K key/value
heads, G = N/K query heads per key/value head, H head size, L layers.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jaxtyping import Array

from kvjax.core import fields
from kvjax.core.leaves import Layout, Leaf, traced
from kvjax.primitives.trees import pytree

if TYPE_CHECKING:
  from kvjax.families.method import Method


@dataclasses.dataclass(frozen=True)
class CacheSpec:
  """Global sizes of a model's cache; read by `init` only (moves read sizes from arrays).

  >>> import kvjax
  >>> spec = kvjax.CacheSpec(batch=1, capacity=4096, kv_heads=2, groups=4, head_dim=64, layers=0)
  Traceback (most recent call last):
  ...
  ValueError: CacheSpec.layers: found 0, expected 1 or more

  Attributes:
    batch: rows B.
    capacity: longest sequence, prompt and generation together, in tokens.
    kv_heads: K.
    groups: G, query heads per key/value head.
    head_dim: H.
    layers: L, the layers that the method serves.
    dtype: dtype of stored keys and values, floats; statistics are float32.
    windows: for each layer of the model the newest tokens that it sees and keeps
      (`kvjax.families.sliding`), or None where it is one of the `layers`; (): there are no others.
  """

  batch: int = fields.least(1)
  capacity: int = fields.least(1)
  kv_heads: int = fields.least(1)
  groups: int = fields.least(1)
  head_dim: int = fields.least(1)
  layers: int = fields.least(0)
  dtype: Any = jnp.bfloat16
  windows: tuple[int | None, ...] = ()

  def __post_init__(self):
    fields.check(type(self), vars(self))
    fields.expect(self, "layers", self.layers or self.windows, "1 or more")
    whole = all(w is None or (type(w) is int and w >= 1) for w in self.windows)
    fields.expect(self, "windows", whole, "tokens, or None, of each layer")
    served = self.windows.count(None) if self.windows else self.layers
    fields.expect(self, "windows", served == self.layers, f"None {self.layers} times, as layers")
    fields.expect(self, "head_dim", self.head_dim % 2 == 0, "an even number")  # pairs, for RoPE
    fields.check_float(f"{type(self).__name__}.dtype", self.dtype)

  @property
  def depth(self) -> int:
    """Layers of the model, those with a window too."""
    return len(self.windows) or self.layers


@dataclasses.dataclass(frozen=True)
class Origin:
  """Model and method of caches, compared on the host, where caches meet a method.

  Programs are compiled for it: it holds nothing that differs between layers, or between caches
  that may share a program (rows, capacity).

  Attributes:
    method: whose caches they are.
    layers, kv_heads, groups, head_dim, windows: of the model, as in `CacheSpec`.
  """

  method: Method
  layers: int
  kv_heads: int
  groups: int
  head_dim: int
  windows: tuple[int | None, ...] = ()

  @classmethod
  def of(cls, method: Method, spec: CacheSpec) -> Origin:
    """TypeError where the spec is none: whoever lays out caches comes by."""
    if not isinstance(spec, CacheSpec):
      raise TypeError(f"spec: found {spec!r}, expected a kvjax.CacheSpec, as model.spec gives")
    sizes = spec.layers, spec.kv_heads, spec.groups, spec.head_dim
    return cls(method, *sizes, spec.windows)


_PLAIN = Leaf("slots")


@functools.cache
def _one_of(kinds: tuple[tuple[str, Leaf], ...]) -> tuple[tuple[str, Leaf], ...]:
  """The same object for equal ones: jit compares a call's with those that it compiled for."""
  return kinds


@pytree("layout", "origin", "kinds")
@dataclasses.dataclass(frozen=True)
class Cache:
  """One layer's cache: three shelves of arrays, every leaf leading with B.

  Occupied slots are always the prefix [0, used) of a row.

  Attributes:
    slots: [B, K, S, ...], moved together by compaction: "k", "v" [B, K, S, H] (post-RoPE), "pos"
      int32 [B, K, S] (−1 = empty), and per-slot statistics; "norm" is float32 ‖v‖₁.
    heads: [B, K, ...], sharded with the heads: tile summaries, victims, predictors; "ring" int32
      [B, K, 2], the turn of a ring; "place" int32 [B, K, 2], where each head's shared slots lie;
      "apart", a tree [B, K', S', ...] of the slots of K' heads that have another number of them.
    rows: [B, ...], alike on all heads: "seen" int32 [B], the next token's position; "used" int32
      [B], occupied slots; calibrated values.
    layout: how the slots of its heads lie (static).
    origin: what `init_caches` laid it out for (static); None: unknown, and nothing is compared.
    kinds: how its arrays are written and split (static), for those that are not plain zeros.
  """

  slots: dict[str, Any]
  heads: dict[str, Any]
  rows: dict[str, Any]
  layout: Layout = Layout.DENSE
  origin: Origin | None = None
  kinds: tuple[tuple[str, Leaf], ...] = ()

  @classmethod
  def of(cls, leaves: dict[str, Leaf], leading: tuple[int, int, int]) -> Cache:
    """An empty cache of these arrays, where `leading` is (B, K, S)."""
    shelves: dict[str, dict[str, Any]] = {"slots": {}, "heads": {}, "rows": {}}
    abstract = traced()
    for name, leaf in leaves.items():
      axes = {"slots": 3, "heads": 2, "rows": 1}[leaf.shelf]
      batch, heads, size = leading
      if leaf.heads is not None:
        heads = leaf.heads
      shelves[leaf.shelf][name] = leaf.empty((batch, heads, size)[:axes], abstract)
    kinds = tuple((name, leaf.kind()) for name, leaf in sorted(leaves.items()))
    told = _one_of(tuple((name, kind) for name, kind in kinds if kind != Leaf(kind.shelf)))
    layouts = [leaf.layout for leaf in leaves.values() if leaf.layout is not None]
    layout = layouts[-1] if layouts else Layout.DENSE
    return cls(shelves["slots"], shelves["heads"], shelves["rows"], layout, kinds=told)

  @classmethod
  def empty(cls, method: Method, spec: CacheSpec, layer: int) -> Cache:
    """A method's empty cache of one layer."""
    leading = spec.batch, spec.kv_heads, method.capacity(spec, layer)
    return cls.of(method.leaves(spec, layer), leading)

  def leaf(self, name: str) -> Leaf:
    """The leaf of one of its arrays: how it is written and split."""
    return dict(self.kinds).get(name, _PLAIN)

  def of_new(self, new: dict[str, Array], decoded: bool = False) -> dict[str, Array]:
    """The statistics of new tokens, of which `new` has "k", "v" and "pos" [B, K, T, ...].

    A token that is `decoded` finds some of them in its slot (`Leaf.standing`).
    """
    others = {name: x for name, x in self.slots.items() if name not in new}
    asked = {n: x for n, x in others.items() if not (decoded and self.leaf(n).standing)}
    return {name: self.leaf(name).of_new(new, x) for name, x in asked.items()}

  @property
  def kv_heads(self) -> int:
    """K, the layer's heads on this device, wherever their slots are."""
    if self.layout is Layout.SHARED:
      return self.heads["place"].shape[1]
    apart = self.heads["apart"]["pos"].shape[1] if self.layout is Layout.SPLIT else 0
    return self.slots["pos"].shape[1] + apart

  @property
  def size(self) -> int:
    """S, the slots that the arrays hold."""
    return self.slots["pos"].shape[2]

  @property
  def head_dim(self) -> int:
    """H, the numbers of a key."""
    k, bits = self.slots["k"], self.leaf("k").bits
    return k.shape[3] if bits is None else k.shape[3] * 8 * k.dtype.itemsize // bits

  @property
  def seen(self) -> Array:
    """int32 [B], tokens that each row has seen: the position of the next one."""
    return self.rows["seen"]

  @property
  def used(self) -> Array:
    """int32 [B], slots of each row that hold a token."""
    return self.rows["used"]

  @property
  def pos(self) -> Array:
    """int32 [B, K, S], the position of the token in each slot; −1 = empty."""
    return self.slots["pos"]

  def put(self, **shelves: dict[str, Any]) -> Cache:
    """A copy with some entries of some shelves replaced: cache.put(heads={"victim": x})."""
    changed: dict[str, Any] = {s: {**getattr(self, s), **new} for s, new in shelves.items()}
    return dataclasses.replace(self, **changed)
