"""Operands of attention that its kernels take: others raise, with the argument's name."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

MAX_HEAD_DIM = 256
MAX_GROUPS = 128
DTYPES = ("bfloat16", "float16", "float32")
BITS = (8, 4)


def expect(shape: Sequence[int], dtype: Any, **operands: Any) -> None:
  """Raises ValueError or TypeError unless operands have this shape and dtype."""
  for name, x in operands.items():
    if x.shape != tuple(shape):
      raise ValueError(f"{name}: found shape {x.shape}, expected {list(shape)}")
    if x.dtype != dtype:
      raise TypeError(f"{name}: found dtype {x.dtype.name}, expected {jnp.dtype(dtype).name}")


def check(
  q: Any,
  k: Any,
  v: Any,
  start: Any,
  stop: Any,
  sinks: int = 0,
  q_sinks: Any = None,
  per_slot: Sequence[Any] | None = None,
  bits: int = 8,
) -> None:
  """Raises on operands that decode over a span does not take; `per_slot`, `bits`: of codes."""
  check_queries(q, "[B, K, G, H]", sinks)
  batch, heads, groups, _ = q.shape
  if groups > MAX_GROUPS:
    raise NotImplementedError(
      f"q: found {groups} query heads per key/value head, expected at most {MAX_GROUPS}"
    )
  if start.shape not in ((batch, heads), (batch, 1)):
    raise ValueError(
      f"start: found shape {start.shape}, expected [{batch}, {heads}] or [{batch}, 1]"
    )
  if per_slot is None:
    shared = k.ndim == 4 and 0 < k.shape[1] < heads and heads % k.shape[1] == 0
    check_cache(q, k, v, k.shape[1] if shared else heads)
    if shared and (sinks or start.shape != (batch, heads)):
      raise ValueError(
        f"k: found {k.shape[1]} rows of slots for {heads} heads, sinks = {sinks} and start "
        f"{start.shape}, expected a range of each head, [{batch}, {heads}], without sinks"
      )
  else:
    _check_codes(q, k, v, per_slot, bits)
  expect(start.shape, "int32", start=start, stop=stop)
  if q_sinks is not None:
    if per_slot is not None:
      raise ValueError("q_sinks: expected None with codes, whose queries are rounded once")
    expect(q.shape, q.dtype, q_sinks=q_sinks)


def check_queries(q: Any, axes: str, sinks: int) -> None:
  """Raises on queries that attention does not take."""
  if q.ndim != axes.count(",") + 1 or 0 in q.shape:
    raise ValueError(f"q: found shape {q.shape}, expected {axes} without empty axes")
  if q.dtype.name not in DTYPES:
    raise TypeError(f"q: found dtype {q.dtype.name}, expected one of {', '.join(DTYPES)}")
  if sinks < 0:
    raise ValueError(f"sinks: found {sinks}, expected at least 0")
  if q.shape[-1] > MAX_HEAD_DIM:
    raise NotImplementedError(f"q: found head size {q.shape[-1]}, expected at most {MAX_HEAD_DIM}")


def check_cache(q: Any, k: Any, v: Any, kept: int) -> None:
  """Raises on keys and values of queries [B, K, ..., H] that are not [B, kept, S, H] alike."""
  batch, heads, *_, head_dim = q.shape
  if k.ndim != 4 or k.shape[2] == 0 or (*k.shape[:2], k.shape[3]) != (batch, kept, head_dim):
    raise ValueError(f"k: found shape {k.shape}, expected [{batch}, {heads}, S ≥ 1, {head_dim}]")
  expect(k.shape, q.dtype, k=k, v=v)


def _check_codes(q: Any, k: Any, v: Any, per_slot: Sequence[Any], bits: int) -> None:
  if bits not in BITS:
    raise ValueError(f"bits: found {bits}, expected one of {', '.join(map(str, BITS))}")
  head_dim, count = q.shape[3], 2 if bits == 8 else 4
  if head_dim % (16 // bits):
    raise ValueError(f"q: found head size {head_dim}, expected a multiple of {16 // bits}")
  slots = *q.shape[:2], k.shape[2] if k.ndim == 4 else 0
  if 0 in slots:
    raise ValueError(f"k: found shape {k.shape}, expected [{slots[0]}, {slots[1]}, S ≥ 1, Wk]")
  expect((*slots, head_dim * bits // 8), "int8", k=k)
  expect((*slots, head_dim * bits // 16), "int16", v=v)
  if len(per_slot) != count:
    raise ValueError(f"per_slot: found {len(per_slot)} arrays, expected {count}")
  for x in per_slot:
    expect(slots, "float32", per_slot=x)


def check_table(table: Any, count: Any, unit: int, heads: tuple[int, ...]) -> None:
  """Raises on a plan that the kernels do not take."""
  if table.ndim != 3 or table.shape[:2] != heads or table.shape[2] == 0:
    raise ValueError(f"table: found shape {table.shape}, expected [{heads[0]}, {heads[1]}, W ≥ 1]")
  expect(table.shape, "int32", table=table)
  expect(heads, "int32", count=count)
  if not 1 <= unit <= 256:
    raise ValueError(f"unit: found {unit}, expected 1 to 256")
