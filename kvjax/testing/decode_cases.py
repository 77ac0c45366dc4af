"""Shapes of decode attention that tests, benchmarks and tuning share."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Shape:
  """One decode step: dimension letters as everywhere; dtype by name.

  `ragged`: rows are of different lengths, from S down to S / 32; all of length S otherwise.
  """

  batch: int
  kv_heads: int
  groups: int
  slots: int
  head_dim: int = 128
  dtype: str = "bfloat16"
  ragged: bool = False

  @property
  def name(self) -> str:
    """B8 T32K 8x4, say."""
    slots = f"{self.slots >> 10}K" if self.slots % 1024 == 0 else str(self.slots)
    name = f"B{self.batch} T{slots} {self.kv_heads}x{self.groups}"
    if self.head_dim != 128:
      name += f" H{self.head_dim}"
    if self.dtype != "bfloat16":
      name += f" {self.dtype}"
    return name + (" ragged" if self.ragged else "")

  def lengths(self) -> np.ndarray:
    """Visible slots of every row, [B] int32."""
    if not self.ragged:
      return np.full(self.batch, self.slots, np.int32)
    return (self.slots * 2.0 ** -np.linspace(0, 5, self.batch)).astype(np.int32)

  def kv_bytes(self) -> int:
    """Bytes of the visible keys and values."""
    per_slot = 2 * self.kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize
    return per_slot * int(self.lengths().sum())

  def abstract(self) -> tuple[ShapeDtypeStruct, ...]:
    """Shapes and dtypes of `arrays`."""
    of, rows = ShapeDtypeStruct, (self.batch, self.kv_heads)
    q = of((*rows, self.groups, self.head_dim), self.dtype)
    kv, bound = of((*rows, self.slots, self.head_dim), self.dtype), of(rows, jnp.int32)
    return q, kv, kv, bound, bound

  def coded(self, bits: int) -> tuple[Any, ...]:
    """q, words of codes of k and v, and a tuple of their scales and zero points: `abstract`."""
    q, cache = self.abstract()[0], (self.batch, self.kv_heads, self.slots)
    words = ((jnp.int8, 8), (jnp.int16, 16))
    k, v = (ShapeDtypeStruct((*cache, self.head_dim * bits // n), dtype) for dtype, n in words)
    return q, k, v, (ShapeDtypeStruct(cache, jnp.float32),) * (2 if bits == 8 else 4)

  def lists(self, width: int) -> tuple[ShapeDtypeStruct, ShapeDtypeStruct]:
    """A table of so many entries a head, and its counts: `abstract`."""
    heads = self.batch, self.kv_heads
    return ShapeDtypeStruct((*heads, width), jnp.int32), ShapeDtypeStruct(heads, jnp.int32)

  def arrays(self, seed: int = 0) -> tuple[jax.Array, ...]:
    """Random q [B, K, G, H], k, v [B, K, S, H], start, stop [B, K]."""
    keys = jax.random.split(jax.random.key(seed), 3)
    cache = self.batch, self.kv_heads, self.slots, self.head_dim
    query = *cache[:2], self.groups, self.head_dim
    q, k, v = (
      jax.random.normal(key, shape, self.dtype)
      for key, shape in zip(keys, (query, cache, cache), strict=True)
    )
    stop = jnp.broadcast_to(jnp.asarray(self.lengths())[:, None], cache[:2])
    return q, k, v, jnp.zeros_like(stop), stop


def by_name(run: Callable, *names: str, **how: Any) -> Callable:
  """`run` with the last of its operands as arguments of these names, and with `how`."""

  def call(*operands: Any, **more: Any) -> Any:
    first = len(operands) - len(names)
    named = dict(zip(names, operands[first:], strict=True))
    return run(*operands[:first], **named, **how, **more)

  return call


# The marks of the benchmark: long context alone, in a batch, many rows, and without groups.
MARKS = (
  Shape(1, 8, 4, 128 << 10),
  Shape(8, 8, 4, 32 << 10),
  Shape(32, 8, 4, 8 << 10),
  Shape(16, 32, 1, 4 << 10),
)
# What else the benchmark shows: short contexts, where latency counts, other heads, ragged rows.
OTHERS = (
  Shape(1, 8, 4, 4 << 10),
  Shape(1, 8, 4, 32 << 10),
  Shape(8, 8, 4, 4 << 10),
  Shape(8, 2, 6, 32 << 10),
  Shape(16, 8, 4, 32 << 10, ragged=True),
  Shape(64, 8, 4, 32 << 10, ragged=True),
  Shape(32, 3, 3, 8 << 10, head_dim=64),
  Shape(8, 8, 4, 16 << 10, head_dim=256),
)
# One shape for every bucket that has measurements of its own: first what the marks need.
TUNED = (
  *MARKS,
  *(shape for shape in OTHERS if not shape.ragged),
  Shape(1, 3, 3, 8 << 10, head_dim=64),
  Shape(64, 8, 4, 32 << 10),
  Shape(128, 8, 4, 4 << 10),
)
# Caches that evict: many rows of a few thousand slots.
BOUNDED = (
  Shape(16, 8, 4, 3200),
  Shape(128, 8, 4, 3200),
)
QUICK = (Shape(2, 2, 3, 300, head_dim=64, dtype="float32"), Shape(2, 1, 4, 200, ragged=True))
