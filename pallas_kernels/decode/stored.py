"""Keys and values as a cache stores them, floats or codes, loaded tile by tile: one row of them.

    held = of_row(sources, row, scale)
    carry = held.walk(held.start(), held.query(), find, first, last)
    held.store(piece, carry, outs)

`find(i)` gives the slots of tile i and which of them are read, both [T].
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from kvjax.kernels.codes import code_words
from kvjax.kernels.common import backend, split_k, tiling

Find = Callable[[Any], tuple[Array, Array]]
See = Callable[..., None] | None


class Sources(NamedTuple):
  """q [R, G, H], k, v [R/P, S, H] in its dtype; or of codes words int8 k [R, S, Wk] and int16
  v [R, S, Wv] with `per_slot`, scales of both (, zero points of both) [R, S]. P rows share slots.
  """

  q: Any
  k: Any
  v: Any
  per_slot: tuple[Any, ...] = ()

  @classmethod
  def of(cls, q: Array, k: Array, v: Array, per_slot: Sequence[Array] | None = None) -> "Sources":
    """Arrays [B, K, ...] with their rows on one axis."""
    q, k, v, *held = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v, *(per_slot or ()))]
    return cls(q, k, v, tuple(held))


Scale = tiling.Scale | code_words.How


def scale_of(
  q: Array, factor: float | None, soft_cap: float | None, bits: int | None, interpret: bool
) -> Scale:
  """The map to logits, `tiling.Scale.of`; with `bits` how codes of so many are read."""
  scale = tiling.Scale.of(q.shape[3], factor, soft_cap)
  weights = jnp.float32 if q.dtype == jnp.float32 else jnp.float16
  return scale if bits is None else code_words.How(scale, bits, weights, inline=not interpret)


def of_row(
  sources: Sources, row: Any, scale: Scale, *, evict: str | None = None, whole: bool = False
) -> "Floats | Codes":
  """One row of floats or of codes; `evict` as in `backend.load`.

  `whole`: for a walk that looks at the output between tiles, all columns are in one array.
  """
  if isinstance(scale, code_words.How):
    return Codes(sources, row, scale, evict, whole)
  return Floats(sources, row, scale, evict)


class Floats:
  """Keys and values as they are."""

  def __init__(self, sources: Sources, row: Any, scale: tiling.Scale, evict: str | None = None):
    self._sources, self._row, self._scale, self._evict = sources, row, scale, evict
    rows, self.groups, self.head_dim = sources.q.shape
    self._sharers = rows // sources.k.shape[0]
    self.lanes = jnp.arange(split_k.lanes_of(self.groups))
    self.columns = jnp.arange(split_k.columns_of(self.head_dim))
    self.inside = (self.columns < self.head_dim)[None, :]

  def query(self, other: Any = None) -> Array:
    """The row's queries, or those of another ref."""
    real = (self.lanes < self.groups)[:, None] & self.inside
    index = self._row, self.lanes[:, None], self.columns[None, :]
    return backend.load(self._sources.q if other is None else other, *index, mask=real)

  def start(self) -> tiling.Carry:
    """The carry before any key."""
    return tiling.start(self.lanes.size, self.columns.size)

  def fetch(self, slot: Array, keep: Array) -> tiling.Tile:
    """Tile of some slots."""
    row = self._row if self._sharers == 1 else self._row // self._sharers
    index, mask = (row, slot[:, None], self.columns[None, :]), keep[:, None] & self.inside
    refs = self._sources.k, self._sources.v
    k, v = (backend.load(ref, *index, mask=mask, evict=self._evict) for ref in refs)
    return tiling.Tile(k, v, keep)

  def step(self, carry: tiling.Carry, q: Array, tile: tiling.Tile, see: See = None) -> tiling.Carry:
    """Adds one tile, as `tiling.step`."""
    return tiling.step(carry, q, tile, scale=self._scale, see=see)

  def walk(
    self,
    carry: tiling.Carry,
    q: Array,
    find: Find,
    first: Any,
    last: Any,
    *,
    see: See = None,
    ahead: Find | None = None,
  ) -> tiling.Carry:
    """Adds tiles [first, last), as `tiling.walk`."""
    fetch = lambda i: self.fetch(*find(i))  # noqa: E731
    return tiling.walk(carry, q, fetch, first, last, scale=self._scale, see=see)

  def store(self, piece: split_k.Piece, carry: tiling.Carry, outs: Sequence[Any]) -> None:
    """Writes a walked piece to the refs of `split_k.results`."""
    split_k.store(piece, carry, outs, groups=self.groups, head_dim=self.head_dim)


class Codes:
  """Codes of keys and values, and queries rounded once, as `code_words` multiplies them."""

  def __init__(
    self, sources: Sources, row: Any, how: code_words.How, evict: str | None, whole: bool
  ):
    self._sources, self._row, self._how, self._evict = sources, row, how, evict
    _, self.groups, self.head_dim = sources.q.shape
    self._width = sources.v.shape[2]
    self.lanes = jnp.arange(split_k.lanes_of(self.groups))
    self._k_words = code_words.words_of(sources.k.shape[2])
    # Words of values that are read once for each of their codes stay in the L2 cache.
    self._again = None if whole else evict
    columns = split_k.columns_of(self.head_dim if whole else self._width)
    self._v_words, self._whole = jnp.arange(columns), whole

  def query(self, _: Any = None) -> code_words.Query:
    """The row's queries."""
    return self._query

  @functools.cached_property
  def _query(self) -> code_words.Query:
    width, arrays = self._sources.k.shape[2], (self._sources.q, self._row)
    return code_words.query(*arrays, self.lanes, self._k_words, width, self._how)

  def start(self) -> code_words.Carry:
    """The carry before any key."""
    return code_words.start(self.lanes.size, self._v_words.size, self._how.bits)

  def fetch(
    self, slot: Array, keep: Array, per_slot: tuple[Array, ...] | None = None
  ) -> code_words.Tile:
    """Tile of some slots; `per_slot`: their scales, where these are loaded already."""
    v_words = self._v_words % self._width if self._whole else self._v_words
    k = code_words.words(self._sources.k, self._row, slot, self._k_words, keep, self._evict)
    v = code_words.words(self._sources.v, self._row, slot, v_words, keep, self._again)
    return code_words.Tile(k, v, self._scales(slot, keep) if per_slot is None else per_slot, keep)

  def step(
    self, carry: tiling.Carry, q: code_words.Query, tile: code_words.Tile, see: See
  ) -> tiling.Carry:
    """Adds one tile to a `whole` output, as `tiling.step`."""
    return code_words.step_whole(carry, q, tile, self._how, width=self._width, see=see)

  def walk(
    self,
    carry: code_words.Carry,
    q: code_words.Query,
    find: Find,
    first: Any,
    last: Any,
    *,
    see: See = None,
    ahead: Find | None = None,
  ) -> code_words.Carry:
    """Adds tiles [first, last), whose scales are loaded one ahead.

    `ahead(i)` is `find(i)` where tile i may be the one after the last.
    """
    per_slot = lambda i: self._scales(*(ahead or find)(i))  # noqa: E731
    fetch = lambda i, held: self.fetch(*find(i), held)  # noqa: E731
    return code_words.walk(carry, q, per_slot, fetch, first, last, self._how, see=see)

  def store(self, piece: split_k.Piece, carry: code_words.Carry, outs: Sequence[Any]) -> None:
    """Writes a walked piece to the refs of `split_k.results`."""
    code_words.store(piece, carry, outs, groups=self.groups, head_dim=self.head_dim)

  def _scales(self, slot: Array, keep: Array) -> tuple[Array, ...]:
    refs = self._sources.per_slot
    return tuple(backend.load(x, self._row, slot, mask=keep, evict=self._again) for x in refs)
