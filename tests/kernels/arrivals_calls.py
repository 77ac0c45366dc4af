"""Calls of the kernels in which the last program of a row to arrive finishes it, for lowering."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.kernels import select
from kvjax.kernels.decode import decode_joined
from kvjax.kernels.sparse_decode import sparse_joined
from tests.decode_cases import Shape

Call = tuple[str, Callable, list[Any]]


def arrivals_calls(kind: str) -> Iterator[Call]:
  """All of them, cut as the heuristics of the device do."""
  yield from decode_calls()
  yield from select_calls()


def decode_calls() -> Iterator[Call]:
  """Splits that are joined, of dense and of sparse decode."""
  of, i32 = jax.ShapeDtypeStruct, jnp.int32
  for groups, head_dim, dtype in (
    *((4, 128, "bfloat16"), (4, 128, "float32"), (1, 128, "bfloat16")),
    *((7, 96, "float16"), (32, 256, "bfloat16")),
  ):
    q, *rest = Shape(1, 8, groups, 4 << 10, head_dim, dtype).abstract()
    run = functools.partial(decode_joined, interpret=False)
    yield f"decode-H{head_dim}-G{groups}-{dtype}", run, [q, *rest, of(q.shape[:2], i32)]
  for unit, groups, dtype in (
    *((1, 4, "bfloat16"), (16, 4, "bfloat16"), (64, 4, "bfloat16")),
    *((16, 1, "bfloat16"), (16, 4, "float32")),
  ):
    row, cache = (1, 8), of((1, 8, 131072, 128), dtype)
    shapes = [of((*row, groups, 128), dtype), cache, cache, of((*row, 8192 // unit), i32)]
    shapes += [of(row, i32), *[of((1, 1), i32)] * 2, of(row, i32)]
    run = functools.partial(sparse_joined, unit=unit, interpret=False)
    yield f"sparse-unit{unit}-G{groups}-{dtype}", run, shapes


def select_calls() -> Iterator[Call]:
  """Scoring and choosing by one launch: pages and blocks of long contexts."""
  of, i32, bf16 = jax.ShapeDtypeStruct, jnp.int32, jnp.bfloat16
  where, counters = [of((1, 1), i32)] * 2, of((1, 8), i32)
  for pages, k, group, dtype in (
    *((8192, 63, "mean", bf16), (32768, 63, "max", bf16), (8192, 255, "mean", "float32")),
  ):
    how = {"unit": 16, "sinks": 0, "local": 1, "k": k, "group": group, "interpret": False}
    page = of((1, 8, pages, 128), dtype)
    shapes = [of((1, 8, 4, 128), dtype), page, page, *where, counters]
    yield f"pages-{pages}-{k}", functools.partial(select.best_pages, **how), shapes
  rows = {"sinks": 1, "local": 32, "k": 95, "limit": 63, "dense_below": 8192}
  how = {"stride": 16, "width": 32, "unit": 64, "newest": 1, "interpret": False}
  for keys, blocks in ((8191, 2048), (32767, 8192)):
    run = functools.partial(select.best_blocks, blocks=blocks, **how, **rows)
    shapes = [of((1, 8, 4, 128), bf16), of((1, 8, keys, 128), bf16)]
    yield f"blocks-{blocks}", run, [*shapes, *where, where[0], counters]
