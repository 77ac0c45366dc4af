"""Calls of every kernel at shapes that matter: what is lowered for GPUs."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from kvjax import Rope, Yarn
from kvjax.kernels.art import known
from kvjax.kernels.art import walk as art
from kvjax.kernels.cis import anchors, listed, note, read
from kvjax.kernels.codes.dense import decode_attention as quantised_decode
from kvjax.kernels.codes.enter import enter_codes
from kvjax.kernels.codes.sparse import sparse_decode as quantised_sparse
from kvjax.kernels.common import config
from kvjax.kernels.common.config import Config
from kvjax.kernels.decode import dense
from kvjax.kernels.decode.sparse import settings, sparse_decode
from kvjax.kernels.insertion import host_blocks
from kvjax.kernels.insertion.enter_token import enter_token
from kvjax.kernels.insertion.keep_rows import keep as keep_rows
from kvjax.kernels.longflow import read as longflow_read
from kvjax.kernels.longflow.victim import victim
from kvjax.kernels.prefill import dense as prefill
from kvjax.kernels.products import product
from kvjax.kernels.products.add_norm import add_norm
from kvjax.kernels.products.qkv_heads import qkv_heads
from kvjax.kernels.prr.repair import repair
from kvjax.kernels.prr.speculate import attend_tiles, speculate, speculate_keys
from kvjax.kernels.selection import summaries, top_k
from kvjax.kernels.selection.hshare import listed as hshare_listed
from kvjax.kernels.selection.key_weights import key_weights
from kvjax.kernels.selection.page_bounds import page_bounds
from kvjax.methods import depth
from kvjax.runtime.forked import QUERIES
from kvjax.testing.decode_cases import Shape

# JAX device kind -> compute capability. Where two have the same, calls that are cut alike are one.
DEVICES = {
  "NVIDIA H200": 90,
  "NVIDIA H100 80GB HBM3": 90,
  "NVIDIA A100-SXM4-80GB": 80,
  "NVIDIA RTX A6000": 86,
  "NVIDIA GeForce RTX 5090": 120,
}


def decode_calls(kind: str) -> Iterator[tuple[str, Callable, list[Any]]]:
  """Dense decode: every distinct configuration once for each head size and dtype."""
  seen = set()
  for head_dim in (128, 64, 96, 256):
    for dtype in ("bfloat16", "float32"):
      for batch, slots in ((1, 4 << 10), (1, 128 << 10), (8, 32 << 10), (32, 8 << 10)):
        shape = Shape(batch, 8, 4, slots, head_dim, dtype)
        cut = config.choose(
          "decode",
          rows=batch * 8,
          groups=4,
          slots=slots,
          head_dim=head_dim,
          itemsize=jnp.dtype(dtype).itemsize,
          kind=kind,
        )
        # How many programs there are changes no code.
        key = head_dim, dtype, cut.tile, cut.warps, cut.stages
        if key not in seen:
          seen.add(key)
          name = f"H{head_dim}-{dtype}-tile{cut.tile}-warps{cut.warps}-stages{cut.stages}"
          yield name, *decode_call(shape, cut)
  # float16, many groups, and sinks with a query of their own.
  small = Config(tile=64, programs=264, warps=4, stages=3)
  yield "shared", *decode_call(Shape(2, 8, 4, 32 << 10), small, rows=1)
  yield "float16-sinks", *decode_call(Shape(1, 3, 3, 999, 64, "float16"), small, 4)
  yield "G32", *decode_call(Shape(1, 1, 32, 999), small)
  branches = {"groups": QUERIES, "slots": 32 << 10, "head_dim": 128}  # `kvjax.runtime.forked`
  cut = config.choose("decode", rows=8, itemsize=2, kind=kind, **branches)
  yield f"G{QUERIES}", *decode_call(Shape(1, 8, **branches), cut)
  for dtype, warps in (("bfloat16", 4), ("float16", 4), ("float32", 8)):
    shape, cut = Shape(4, 8, 4, 3200, 128, dtype), Config(64 // (warps // 4), 264, warps, 3)
    yield f"logits-{dtype}", *decode_call(shape, cut, logits=True)


def decode_call(
  shape: Shape, cut: Config, sinks: int = 0, logits: bool = False, rows: int | None = None
) -> tuple[Callable, list[Any]]:
  """The function and its abstract arguments; `rows` of slots that heads share."""
  q, k, v, start, stop = shape.abstract()
  if rows is not None:
    k = v = jax.ShapeDtypeStruct((k.shape[0], rows, *k.shape[2:]), k.dtype)
    start = stop = jax.ShapeDtypeStruct(q.shape[:2], jnp.int32)

  def run(q, k, v, start, stop, **how):
    how |= {"sinks": sinks, "q_sinks": q if sinks else None, "logits": logits}
    return dense.decode_with_output(q, k, v, start, stop, config=cut, interpret=False, **how)

  return run, [q, k, v, start, stop]


def quantised_calls(kind: str) -> Iterator[tuple[str, Callable, list[Any]]]:
  """Decode over codes of every width, at sizes of heads that are cut apart."""
  of, f32, where = jax.ShapeDtypeStruct, jnp.float32, [jax.ShapeDtypeStruct((8, 1), jnp.int32)] * 2
  for bits, head_dim, groups, options in (
    *((8, 128, 4, {}), (4, 128, 4, {}), (8, 256, 4, {}), (4, 96, 3, {"sinks": 4})),
    *((8, 64, 16, {"sinks": 4}), (4, 256, 32, {}), (8, 80, 4, {})),
    *((8, 64, 4, {"logits": True}), (4, 256, 4, {"logits": True})),
  ):
    cache, dtype = (8, 8, 32768), jnp.float32 if head_dim == 80 else jnp.bfloat16
    shapes = [of((8, 8, groups, head_dim), dtype)]
    shapes += [of((*cache, head_dim * bits // 8), jnp.int8)]
    shapes += [of((*cache, head_dim * bits // 16), jnp.int16)]
    per_slot = [of(cache, f32)] * (2 if bits == 8 else 4)
    call = functools.partial(quantised_decode, bits=bits, interpret=False, **options)
    yield f"int{bits}-H{head_dim}-G{groups}", call, [*shapes, per_slot, *where]


def quantised_sparse_calls(kind: str) -> Iterator[tuple[str, Callable, list[Any]]]:
  """Sparse decode over codes: tiles that gather, tiles that do not, a program for each row."""
  of, i32 = jax.ShapeDtypeStruct, jnp.int32
  for bits, head_dim, groups, unit, batch in (
    *((8, 128, 4, 16, 1), (4, 128, 4, 16, 1), (8, 128, 4, 64, 8), (4, 128, 4, 64, 8)),
    *((8, 128, 1, 1, 64), (4, 96, 3, 1, 1), (8, 256, 4, 16, 64), (4, 256, 32, 256, 1)),
    *((8, 64, 16, 16, 1), (8, 80, 4, 16, 1)),
  ):
    rows, dtype = (batch, 8), jnp.float32 if head_dim == 80 else jnp.bfloat16
    cache = *rows, 131072 // batch
    shapes = [of((*rows, groups, head_dim), dtype)]
    shapes += [of((*cache, head_dim * bits // 8), jnp.int8)]
    shapes += [of((*cache, head_dim * bits // 16), jnp.int16)]
    per_slot = [of(cache, jnp.float32)] * (2 if bits == 8 else 4)
    where = [of((*rows, 4096 // unit), i32), of(rows, i32), *[of((batch, 1), i32)] * 2]
    call = functools.partial(quantised_sparse, bits=bits, unit=unit, interpret=False)
    name = f"int{bits}-unit{unit}-H{head_dim}" + f"-rows{8 * batch}" * (batch > 1)
    yield name, call, [*shapes, per_slot, *where]


def sparse_decode_calls(kind: str) -> Iterator[tuple[str, Callable, list[Any]]]:
  """Sparse decode at every unit of a plan that matters, as the heuristics of a device cut it."""
  of, i32 = jax.ShapeDtypeStruct, jnp.int32
  for batch, heads, groups, unit, dtype, head_dim in (
    *((1, 8, 4, unit, jnp.bfloat16, 128) for unit in (1, 16, 64, 128)),
    *((1, 8, 4, 16, jnp.float32, 128), (1, 8, 4, 16, jnp.float16, 64)),
    *((1, 8, 4, 16, jnp.bfloat16, 256), (16, 32, 1, 1, jnp.bfloat16, 128)),
    *((16, 32, 1, 1, jnp.float32, 128), (64, 8, 4, 16, jnp.bfloat16, 256)),
  ):
    cut = settings(
      rows=batch * heads,
      groups=groups,
      slots=8192,
      head_dim=head_dim,
      itemsize=jnp.dtype(dtype).itemsize,
      unit=unit,
      kind=kind,
    )
    cache = of((batch, heads, 131072 // batch, head_dim), dtype)
    shapes = [of((batch, heads, groups, head_dim), dtype), cache, cache]
    shapes += [of((batch, heads, max(8192 // unit, 1)), i32), of((batch, heads), i32)]
    shapes += [of((batch, 1), i32)] * 2
    call = functools.partial(sparse_decode, unit=unit, config=cut, interpret=False)
    rows = f"-rows{batch * heads}" * (batch > 1)
    yield f"unit{unit}-H{head_dim}-{jnp.dtype(dtype).name}{rows}", call, shapes


def art_calls(kind: str) -> Iterator[tuple[str, Callable, list[Any]]]:
  """ART's walk without a table and at several units of one."""
  of, i32 = jax.ShapeDtypeStruct, jnp.int32
  for unit, dtype, head_dim, tile, options in (
    (None, jnp.bfloat16, 128, 128, {}),
    (None, jnp.bfloat16, 64, 128, {"per_head": True, "full": True}),
    (None, jnp.float32, 128, 128, {}),
    (None, jnp.bfloat16, 256, 256, {"relative": True}),
    (1, jnp.bfloat16, 128, 128, {}),
    (16, jnp.float16, 96, 100, {"per_head": True}),
    (128, jnp.bfloat16, 128, 128, {}),
    (None, jnp.bfloat16, 128, 128, {"splits": 1, "share": 4}),
    (16, jnp.float32, 128, 100, {"splits": 1, "share": 8, "per_head": True, "full": True}),
  ):
    cache = of((1, 8, 131072, head_dim), dtype)
    shapes = [of((1, 8, 4, head_dim), dtype), cache, cache, *[of((1, 1), i32)] * 2]
    if unit:
      shapes[3:3] = [of((1, 8, 8192 // unit), i32), of((1, 8), i32)]
    call = functools.partial(art_call, unit=unit, tile=tile, **{"splits": 4, **options})
    name = f"unit{unit}-H{head_dim}-{jnp.dtype(dtype).name}"
    yield name + "-share" * ("share" in options), call, shapes

  for bits, unit, head_dim, options in (
    (8, None, 128, {"splits": 4}),
    (8, None, 128, {"splits": 1, "share": 4}),
    (4, 16, 128, {"splits": 4, "per_head": True}),
    (4, None, 256, {"splits": 4, "full": True}),
  ):
    rows = 1, 8, 131072
    words = (
      of((*rows, head_dim * bits // 8), jnp.int8),
      of((*rows, head_dim * bits // 16), jnp.int16),
    )
    shapes = [[of(rows, jnp.float32)] * (2 if bits == 8 else 4)]
    shapes += [of((1, 8, 4, head_dim), jnp.bfloat16), *words]
    shapes += [of((1, 8, 8192 // unit), i32), of((1, 8), i32)] if unit else []
    call = functools.partial(coded_call, bits=bits, unit=unit, tile=128, **options)
    name = f"int{bits}-unit{unit}-H{head_dim}" + "-share" * ("share" in options)
    yield name, call, [*shapes, *[of((1, 1), i32)] * 2]

  cache = of((1, 8, 131072, 128), jnp.bfloat16)
  shapes = [of((1, 8, 4, 128), jnp.bfloat16), cache, cache, of((1, 8, 1024), i32)]
  shapes += [of((1, 8), i32), *[of((1, 1), i32)] * 2, of((1, 8, 4, 1025), jnp.float32)]
  yield "certified", certified_call, shapes
  shapes = [*shapes[:3], *shapes[5:7], of((1, 8, 2), i32), of((1,), i32)]
  yield "ring", ring_call, shapes
  for batch, groups, dtype, options in (
    (8, 4, jnp.bfloat16, {"sinks": 4, "kept": 1, "relative": True}),
    (1, 6, jnp.bfloat16, {"full": True, "tail": 37}),
    (1, 1, jnp.float32, {}),
  ):
    cache, rows = of((batch, 8, 32768, 128), dtype), [of((batch, 8), i32)] * 3
    call = functools.partial(known_call, **options)
    shapes = [of((batch, 8, groups, 128), dtype), cache, cache, *rows]
    yield f"known-G{groups}-{jnp.dtype(dtype).name}", call, shapes


def coded_call(per_slot, *arrays, **options):
  """`art.walk` over codes."""
  return art_call(*arrays, per_slot=per_slot, **options)


def ring_call(q, k, v, start, stop, ring, seen, **options):
  """`art.walk` around a ring."""
  where = None, None, start, stop
  options |= {"ring": ring, "seen": seen, "sinks": 4, "splits": 4, "patience": 5}
  return art.walk(q, k, v, *where, interpret=False, **options)


def known_call(*arrays, **options):
  """`art.known.read`."""
  return known.read(*arrays, **{"patience": 5, "tail": 15, **options}, interpret=False)


def certified_call(*arrays, **options):
  """`art.walk` with a bound on what is unread."""
  *arrays, unread = arrays
  options |= {"unit": 128, "tile": 128, "patience": 5, "splits": 1, "log_ratio": -3.0}
  return art.walk(*arrays, unread=unread, interpret=False, **options)


def art_call(q, k, v, *rest, unit, **options):
  """`art.walk` with a table or without."""
  table, count, start, stop = rest if unit else (None, None, *rest)
  return art.walk(
    *(q, k, v, table, count, start, stop),
    unit=unit or 1,
    patience=5,
    interpret=False,
    **options,
  )


def select_calls(kind: str) -> Iterator[tuple[str, Callable, list[Any]]]:
  """Scoring and choosing tiles: pages, compressed keys and tokens of long contexts."""
  of, i32, bf16 = jax.ShapeDtypeStruct, jnp.int32, jnp.bfloat16
  where = [of((1, 1), i32)] * 2
  for name, heads, tiles, k, ordered in (
    ("pages", 8, 8192, 63, True),
    ("blocks", 8, 2048, 64, False),
    ("tokens", 8, 131072, 432, True),
    ("MHA", 32, 4096, 432, True),
  ):
    choose = functools.partial(
      top_k.best, unit=16, sinks=1, local=4, k=k, ordered=ordered, interpret=False
    )
    yield f"top_k-{name}", choose, [of((1, heads, tiles), jnp.float32), *where]
  spans = [of((1, 8, 2, 8192), jnp.float32), of((1, 1), i32), of((1, 8, 2), i32)]
  how = {"unit": 16, "sinks": 1, "local": 4, "interpret": False}
  run = functools.partial(top_k.best_of_each, k=(63, 78), limit=(63, 78), **how)
  yield "top_k-lists", run, spans
  for rows, tiles, k in ((512, 4112, 432), (64, 1024, 88)):
    shapes = [of((1, rows, tiles), jnp.float32), *where]
    run = functools.partial(top_k.others, k=k, first=k // 3, ordered=False, **how)
    yield f"top_k-first-{rows}", run, shapes
  for group, dtype, head_dim in (
    ("mean", bf16, 128),
    ("max", bf16, 128),
    ("mean", "float32", 96),
  ):
    run = functools.partial(page_bounds, unit=16, group=group, interpret=False)
    pages = of((1, 8, 8192, head_dim), dtype)
    shapes = [of((1, 8, 4, head_dim), dtype), pages, pages, *where]
    yield f"page_bounds-{group}-{head_dim}", run, shapes
  cache, pages = of((1, 8, 131072, 128), bf16), of((1, 8, 8192, 128), bf16)
  renew = functools.partial(summaries.renew_extremes, unit=16, interpret=False)
  yield "renew_extremes", renew, [cache, of((1,), i32), pages, pages]
  renew = functools.partial(summaries.renew_mean, width=32, stride=16, interpret=False)
  yield "renew_mean", renew, [cache, of((1,), i32), pages]
  blocks = {"blocks": 2048, "stride": 16, "width": 32, "block": 64}
  for name, count, groups, dtype, options in (
    ("blocks", 8191, 4, bf16, blocks),
    ("tokens", 131072, 4, bf16, {"blocks": 131072, "log": True}),
    ("again", 131072, 4, bf16, {"blocks": 131072, "log": True, "programs": 60}),
    ("float32", 999, 3, "float32", {"blocks": 999, "log": True}),
  ):
    run = functools.partial(key_weights, **options, newest=1, interpret=False)
    keys = of((1, 8, count, 128), dtype)
    shapes = [of((1, 8, groups, 128), dtype), keys, *where, where[0]]
    yield f"key_weights-{name}", run, shapes


def weighed(logits, m, l, *arrays, **how):
  """`listed.found_and_listed` where keys have logits."""
  return listed.found_and_listed([logits, m, l], *arrays, **how)


def cis_calls(kind: str) -> Iterator[tuple[str, Callable, list[Any]]]:
  """CIS's decision and list, per KV head and per query head."""
  of, i32, f32 = jax.ShapeDtypeStruct, jnp.int32, jnp.float32
  for batch, heads, groups, units, k, slots in (
    (1, 8, 4, 1, 432, 131072),
    (1, 8, 4, 4, 432, 131072),
    (16, 32, 1, 1, 88, 4096),
  ):
    row, block = (batch, heads), (batch, heads, 16)
    shapes = [of((*row, groups, 128), jnp.bfloat16), of((*block, groups, 128), f32)]
    shapes += [of((*block, units), i32), *[of((batch,), i32)] * 2]
    run = functools.partial(anchors.anchors, tau=0.8, first=narrowed, interpret=False)
    yield f"anchors-{heads}x{units}", run, shapes
    keys = [of((*row, slots, 128), jnp.bfloat16), of((batch,), i32)]
    yield f"anchors-and-logits-{heads}x{units}", looking, shapes + keys
    run = functools.partial(listed.listed, slots=slots, sinks=16, local=64, interpret=False)
    fresh, unit = of((*row, units, k), i32), of((*row, units), i32)
    shapes = [of((*block, units, k + 2 * (k // 3)), i32), fresh, unit, unit]
    shapes += [of((batch,), i32), of((batch, 1), i32)]
    yield f"listed-{heads}x{units}", run, shapes
    if units == 1:
      how = {"k": k, "sinks": 16, "local": 64, "interpret": False}
      run, where = functools.partial(listed.found_and_listed, **how), [of((batch, 1), i32)] * 2
      fused = [[of((*row, slots), f32)], *where, shapes[0], unit, unit, of((batch,), i32)]
      yield f"found-and-listed-{heads}x{units}", run, fused
      partial = [of((*row, groups, size), f32) for size in (slots, 65, 65)]
      run = functools.partial(weighed, **how)
      yield f"weighed-{heads}x{units}", run, [*partial, *fused[1:]]
    shapes = [of((batch,), bool), of((*row, groups), f32), of(row, i32)]
    shapes += [of((*row, groups, 128), f32), unit, unit, fresh, of(fresh.shape, f32)]
    shapes += [of((*block, groups, 128), f32), of((*block, units), i32)]
    shapes += [of((*block, units, k + 2 * (k // 3)), i32), of((batch,), i32)]
    run = functools.partial(note.note, sinks=16, heaviest=k // 3, radius=1, interpret=False)
    yield f"note-{heads}x{units}", run, shapes
  for batch, k, slots, dtype in (
    *((8, 88, 1040, jnp.bfloat16), (16, 432, 4112, jnp.bfloat16)),
    *((16, 88, read.LANES, jnp.bfloat16), (8, 216, 999, jnp.float32)),
  ):
    row, block = (batch, 32), (batch, 32, 16)
    shapes = [of((*row, 1, 128), dtype), *[of((*row, slots, 128), dtype)] * 2]
    shapes += [of((*block, 1, 128), f32), of((*block, 1), i32)]
    shapes += [of((*block, 1, k + 2 * (k // 3)), i32), *[of((batch,), i32)] * 3]
    how = {"k": k, "sinks": 16, "local": 64, "first": narrowed, "span_sinks": 16}
    run = functools.partial(read.read, tau=0.8, interpret=False, **how)
    yield f"read-{batch}x{slots}", run, shapes
  per_head = [of((2, 2, 3, 96), f32), of((2, 2, 5, 3, 96), f32), of((2, 2, 5, 3), i32)]
  run = functools.partial(anchors.anchors, tau=0.8, interpret=False)
  yield "anchors-per-query-head", run, [*per_head, *[of((2,), i32)] * 2]


def narrowed(seen):
  """The first token that PSAW's window shows, as `kvjax.methods.CIS` has a kernel work it out."""
  return depth.floor_of_each(depth.share(0.7, 1.0, 0.75, 3, 4), seen.reshape(1, 1)).reshape(()) - 1


def hshare_calls(kind: str) -> Iterator[tuple[str, Callable, list[Any]]]:
  """HShare's sets and lists at both of its budgets."""
  of, i32 = jax.ShapeDtypeStruct, jnp.int32
  for batch, heads, k in ((1, 8, 88), (4, 32, 432)):
    row = (batch, heads)
    shapes = [of((*row, k), i32), of((*row, k), i32), of(row, i32), *[of((batch,), i32)] * 2]
    shapes += [of((batch, 1), i32), of((*row, 32, k), i32)]
    how = {"own": 5, "slots": 131072, "steps": 2, "budget": k + 40, "sinks": 8, "local": 32}
    run = functools.partial(hshare_listed, **how, interpret=False)
    yield f"listed-{heads}-{k}", run, shapes


def looking(q, queries, anchor, step, seen, *keys, **how):
  """CIS's decision, and the logits of rows that share with none."""
  how |= {"first": narrowed, "keys": keys, "span_sinks": 16, "interpret": False}
  return anchors.anchors(q, queries, anchor, step, seen, tau=0.8, **how)


def enter_token_calls(kind: str) -> Iterator[tuple[str, Callable, list[Any]]]:
  """Entering a token: few and many heads, an odd head size, with and without victims."""
  for name, heads, groups, head_dim, dtype, evicts in (
    ("GQA", 8, 4, 128, jnp.bfloat16, False),
    ("MHA-evicts", 32, 1, 128, jnp.bfloat16, True),
    ("odd-float32", 3, 3, 96, jnp.float32, True),
  ):
    shapes = enter_token_shapes(2, heads, groups, 999, head_dim, dtype, evicts)
    if evicts:
      shapes.append(jax.ShapeDtypeStruct((2, heads, 999), jnp.float32))
    call = functools.partial(enter_token, rope=Rope(), interpret=False)
    yield name, call, shapes
  shapes = enter_token_shapes(2, 8, 4, 999, 128, jnp.bfloat16, False)
  turned = Rope(scaling=Yarn(4.0, 4096), partial=0.5)  # a factor on what is turned alone
  yield "partial", functools.partial(enter_token, rope=turned, interpret=False), shapes
  yield "ring", ring_entered, [*shapes, jax.ShapeDtypeStruct((2, 8, 2), jnp.int32)]
  kept = [jax.ShapeDtypeStruct((2, 1, *x.shape[2:]), x.dtype) for x in shapes[3:6]]
  victim = jax.ShapeDtypeStruct((2, 8), jnp.int32)
  shared = functools.partial(enter_token, rope=Rope(), room=999, interpret=False)
  yield "shared", shared, [*shapes[:2], victim, *kept, *shapes[6:]]
  yield "part", part_entered, [*shapes, jax.ShapeDtypeStruct((), jnp.int32)]


def enter_codes_calls(kind: str) -> Iterator[tuple[str, Callable, list[Any]]]:
  """Entering a token as codes: few and many heads, odd sizes, with victims, rings and neither."""
  of, i32 = jax.ShapeDtypeStruct, jnp.int32
  for name, heads, groups, head_dim, dtype, bits, evicts in (
    ("GQA", 8, 4, 128, jnp.bfloat16, 8, False),
    ("GQA", 8, 4, 128, jnp.bfloat16, 4, False),
    ("few", 2, 6, 128, jnp.bfloat16, 8, False),
    ("MHA-evicts", 32, 1, 128, jnp.bfloat16, 8, True),
    ("MHA-evicts", 32, 1, 128, jnp.bfloat16, 4, True),
    ("large", 8, 16, 256, jnp.bfloat16, 4, False),
    ("odd-float32", 3, 3, 96, jnp.float32, 8, True),
    ("odd-float16", 3, 3, 24, jnp.float16, 4, True),
    ("ring", 8, 4, 128, jnp.bfloat16, 8, None),
  ):
    row = 2, heads
    slots = *row, 999
    shapes = [of((*row, groups + 2, head_dim), dtype), of((2,), bool)]
    shapes += [of((*row, 2) if evicts is None else row, i32), of((*row, head_dim), jnp.float32)]
    shapes += [of((*slots, head_dim * bits // 8), jnp.int8)]
    shapes += [of((*slots, head_dim * bits // 16), jnp.int16), of(slots, i32)]
    shapes += [of((2,), i32)] * 2 + [of(slots, jnp.float32)] * (2 if bits == 8 else 4)
    call = functools.partial(codes_entered, bits=bits, evicts=evicts)
    yield f"{name}-int{bits}", call, shapes


def codes_entered(qkv, live, given, mean, *cache, bits, evicts):
  """`enter_codes` with a victim, or (None) a ring, or neither."""
  victim, ring = given if evicts else None, given if evicts is None else None
  how = {"mean": mean, "rope": Rope(), "bits": bits, "ring": ring}
  return enter_codes(qkv, live, victim, *cache, interpret=False, **how)


def ring_entered(*arrays):
  """`enter_token` where slots are used in turn."""
  return enter_token(*arrays[:-1], rope=Rope(), ring=arrays[-1], interpret=False)


def part_entered(*arrays):
  """`enter_token` where slots are split over devices."""
  return enter_token(*arrays[:-1], rope=Rope(), part=(arrays[-1], 4 * 999), interpret=False)


def enter_token_shapes(batch, heads, groups, slots, head_dim, dtype, evicts):
  """Abstract operands of `enter_token`."""
  of, per_head = jax.ShapeDtypeStruct, (batch, heads)
  i32 = jnp.int32
  cache = (*per_head, slots, head_dim)
  return [
    of((*per_head, groups + 2, head_dim), dtype),
    of((batch,), bool),
    of(per_head, i32) if evicts else None,
    *(of(cache, dtype), of(cache, dtype), of((*per_head, slots), i32)),
    *(of((batch,), i32), of((batch,), i32)),
  ]


def keep_rows_calls(kind: str) -> Iterator[tuple[str, Callable, list[Any]]]:
  """Keeping statistics: long and short ones, of all dtypes."""
  of = jax.ShapeDtypeStruct
  sizes = (
    ((2, 8, 8192), "float32"),
    ((2, 8, 300), "int32"),
    ((2,), "int32"),
    ((2, 64), "bfloat16"),
  )
  stats = [of(shape, dtype) for shape, dtype in sizes]
  run = functools.partial(keep_rows, interpret=False)
  yield "all", run, [of((2,), bool), of((2, 3, 5), "float32"), stats, stats]


def longflow_calls(kind: str) -> Iterator[tuple[str, Callable, list[Any]]]:
  """Naming a victim, for one KV head and for a layer."""
  of, i32 = jax.ShapeDtypeStruct, jnp.int32
  cases = [(2, 8, 4, False), (128, 8, 4, False), (2, 32, 1, False)]
  for rows, kv_heads, groups, per_layer in (*cases, (2, 3, 3, True), (2, 8, 4, True)):
    head = of((rows, kv_heads, groups), jnp.float32)
    slots = rows, kv_heads, 3200
    shapes = [of((*head.shape, 3200), jnp.float32), head, head, of(slots, jnp.float32)]
    shapes += [of(slots, i32), of((rows,), i32), of((rows,), i32), of((rows,), bool)]
    shapes.append(of((rows, kv_heads), i32))
    call = functools.partial(victim, sinks=4, recent=1, per_layer=per_layer, interpret=False)
    yield f"{kv_heads}x{groups}{'-layer' * per_layer}{'-many' * (rows > 2)}", call, shapes
  cases = [(128, 8, 4, 3200, "bfloat16"), (16, 8, 4, 3200, "bfloat16"), (64, 2, 6, 2048, "float16")]
  for rows, kv_heads, groups, slots, dtype in cases:
    lead = rows, kv_heads
    if not longflow_read.takes(rows * kv_heads, groups, slots, 2, interpret=False, kind=kind):
      continue
    key = of((*lead, slots, 128), dtype)
    shapes = [of((*lead, groups, 128), dtype), key, key, of((*lead, slots), jnp.float32)]
    shapes += [of((*lead, slots), i32), of((rows,), i32), of((rows,), i32)]
    call = functools.partial(longflow_read.read, sinks=4, recent=1, interpret=False)
    yield f"read-{kv_heads}x{groups}-B{rows}-{dtype}", call, shapes


def product_calls(kind: str) -> Iterator[tuple[str, Callable, list[Any]]]:
  """A step's products and what stands between them: an 8B decoder's and an odd one's shapes."""
  of = jax.ShapeDtypeStruct
  for name, rows, dim, ffn, dtype in (
    ("8B-B1", 1, 4096, 14336, jnp.bfloat16),
    ("B16", 16, 2048, 6144, jnp.bfloat16),
    ("part-of-8B", 8, 4096, 3584, jnp.bfloat16),
    ("part-of-70B", 8, 8192, 7168, jnp.bfloat16),
    ("odd-float32", 3, 576, 1000, jnp.float32),
  ):
    x, h = of((rows, dim), dtype), of((rows, ffn), dtype)
    up, down = of((dim, 2, ffn), dtype), of((ffn, dim), dtype)
    parts = of((4, rows, dim), jnp.float32)
    for function, arguments in (
      (product.partial_products, [h, down]),
      (product.product, [h, down]),
      (product.gated_product, [x, up]),
      (functools.partial(add_norm, eps=1e-6), [x, parts, of((dim,), jnp.float32)]),
    ):
      called = getattr(function, "func", function)
      function = functools.partial(function, interpret=False)
      yield f"{called.__name__}-{name}", function, arguments
  heads, scale = of((4, 2, 8, 4, 128), jnp.float32), of((128,), jnp.float32)
  call = functools.partial(qkv_heads, dtype=jnp.bfloat16, interpret=False)
  yield "qkv_heads", call, [heads, of(heads.shape[2:], jnp.bfloat16), scale, scale]


def prefill_calls(kind: str) -> Iterator[tuple[str, Callable, list[Any]]]:
  """Prompt attention, plain and with everything it can do, and its second pass."""
  of, i32 = jax.ShapeDtypeStruct, jnp.int32
  for queries, head_dim, dtype in (
    *((8192, 128, jnp.bfloat16), (32, 64, jnp.float16)),
    *((8192, 256, jnp.bfloat16), (8192, 128, jnp.float32)),
  ):
    name = f"{queries}-H{head_dim}-{jnp.dtype(dtype).name}"
    q, k = of((1, 8, 4, queries, head_dim), dtype), of((1, 8, 32768, head_dim), dtype)
    pos, qpos, state = of((1, 8, 32768), i32), of((1, queries), i32), of(q.shape[:4], jnp.float32)
    plain = functools.partial(prefill.prefill_attention, interpret=False)
    run = functools.partial(plain, sinks=16)
    yield f"window-{name}", run, [q, k, k, qpos, qpos]
    if head_dim == 128 and queries == 8192:
      yield f"plain-{name}", plain, [q, k, k, qpos]

    def any_order(q, k, v, qpos, first, pos, run=run, **how):
      return run(q, k, v, qpos, first, q_sinks=q, pos=pos, **how)

    yield f"any-order-{name}", any_order, [q, k, k, qpos, qpos, pos]
    run = functools.partial(prefill.column_mass, sinks=16, interpret=False)
    yield f"mass-{name}", run, [q, k, pos, qpos, state, state, qpos]


def host_blocks_calls(kind: str) -> Iterator[tuple[str, Callable, list[Any]]]:
  """Blocks over the link: one segment and three, a head size that is no power of two."""
  of = jax.ShapeDtypeStruct
  for segments, head_dim, dtype in ((1, 128, jnp.bfloat16), (3, 96, jnp.float32)):
    part = of((1, 8, 512, 128, head_dim), dtype)
    store = {"k": (part,) * segments, "v": (part,) * segments}
    block, name = of((1, 16), jnp.int32), f"{segments}-H{head_dim}"
    fetch = functools.partial(host_blocks.fetch, interpret=False)
    yield f"fetch-{name}", fetch, [store, block]
    new = of((1, 8, 16, 128, head_dim), dtype)
    append = functools.partial(host_blocks.append, interpret=False)
    arguments = [store, {"k": new, "v": new}, block, of((8,), jnp.float32)]
    yield f"append-{name}", append, arguments


def prr_calls(kind: str) -> Iterator[tuple[str, Callable, list[Any]]]:
  """Repair of every kind of stored state, speculation beside scoring, and single tiles."""
  of, i32, f32 = jax.ShapeDtypeStruct, jnp.int32, jnp.float32
  for unit, head_dim, dtype in ((64, 128, jnp.bfloat16), (16, 128, jnp.float32)):
    rows, pages, width = 8, 131072 // unit, 4096 // unit
    q, cache = of((1, rows, 4, head_dim), dtype), of((1, rows, 131072, head_dim), dtype)
    where, lists = [of((1, 1), i32)] * 2, of((1, rows, width), i32)
    whole = [
      of((rows, 4, head_dim), f32),
      *[of((rows, 4), f32)] * 2,
      of((rows, 4, head_dim), dtype),
    ]
    for stored, parts in (("whole", 0), ("pieces", 64), ("tiles", width)):
      states = [of((parts * rows, 4, head_dim), f32), *[of((parts * rows, 4), f32)] * 2]
      call = functools.partial(repair, unit=unit, stored=stored, interpret=False)
      shapes = [q, cache, cache, lists, lists, *where, states if parts else whole]
      yield f"repair-{stored}-unit{unit}", call, shapes
    call = functools.partial(attend_tiles, unit=unit, interpret=False)
    yield f"tiles-unit{unit}", call, [q, cache, cache, lists, *where]
    edge, state = of((1, rows, pages, head_dim), dtype), of((1, rows, pages), f32)
    shapes = [q, cache, cache, lists, of((1,), i32), edge, edge, state, state, of((1, 3), f32)]
    call = functools.partial(speculate, unit=unit, interpret=False)
    yield f"speculate-unit{unit}", call, shapes
    apart = functools.partial(speculate, unit=unit, apart=True, interpret=False)
    yield f"speculate-apart-unit{unit}", apart, shapes
    over = {"unit": unit, "stride": unit // 4, "width": unit // 2}
    keys = of((1, rows, 4 * pages - 1, head_dim), dtype)
    shapes = [q, cache, cache, lists, of((1,), i32), keys, state, state, of((1, 3), f32)]
    for name, single in (("", False), ("-apart", True)):
      call = functools.partial(speculate_keys, **over, apart=single, interpret=False)
      yield f"speculate-keys{name}-unit{unit}", call, shapes


# Kernel -> its calls on a device, as (name, function, abstract arguments).
KERNELS: dict[str, Callable] = {
  "art": art_calls,
  "decode": decode_calls,
  "enter_codes": enter_codes_calls,
  "enter_token": enter_token_calls,
  "keep_rows": keep_rows_calls,
  "host_blocks": host_blocks_calls,
  "longflow": longflow_calls,
  "prefill": prefill_calls,
  "select": select_calls,
  "cis": cis_calls,
  "hshare": hshare_calls,
  "sparse_decode": sparse_decode_calls,
  "products": product_calls,
  "prr": prr_calls,
  "quantised": quantised_calls,
  "quantised_sparse": quantised_sparse_calls,
}


# Of every kernel that makes logits of attention, and of Gemma 2's heads of 256.
CAPPED = (
  "art-unitNone-H128-bfloat16",
  "art-unit16-H128-float32-share",
  "decode-H256-bfloat16",
  "decode-logits-bfloat16",
  "quantised-int8-H256",
  "quantised-int4-H128",
  "quantised_sparse-int8-unit16-H256",
  "quantised_sparse-int4-unit16-H128",
  "prefill-plain-8192-H128-bfloat16",
  "prefill-window-8192-H256-bfloat16",
  "prefill-mass-8192-H256-bfloat16",
  "select-key_weights-tokens",
  "cis-anchors-and-logits-8x4",
  "sparse_decode-unit1-H128-bfloat16-rows512",
  "sparse_decode-unit16-H256-bfloat16",
  "prr-repair-whole-unit64",
  "prr-tiles-unit64",
  "prr-speculate-unit64",
  "prr-speculate-keys-unit64",
)


def capped_calls(kind: str) -> Iterator[tuple[str, Callable, list[Any]]]:
  """The same under a soft cap, which takes registers but no shared memory: on two devices."""
  if kind not in ("NVIDIA H200", "NVIDIA A100-SXM4-80GB"):
    return
  for kernel, calls in KERNELS.items():
    for name, function, arguments in calls(kind):
      if f"{kernel}-{name}".startswith(CAPPED):
        yield f"{kernel}-{name}", functools.partial(function, soft_cap=50.0), arguments


CALLS: dict[str, tuple[str, Callable, list[Any]]] = {}
for kind, capability in DEVICES.items():
  for kernel, calls in KERNELS.items():
    for name, function, arguments in calls(kind):
      CALLS.setdefault(f"{kernel}-{name}-sm{capability}", (kind, function, arguments))
  for name, function, arguments in capped_calls(kind):
    CALLS.setdefault(f"capped-{name}-sm{capability}", (kind, function, arguments))

# One shape of every kernel on the GPU that the measurements are of, and those that want most of the
# smallest shared memory. The core compiles a few of them; the others are slow tests.
CORE = (
  "art-unitNone-H128-bfloat16-sm",
  "art-unitNone-H128-bfloat16-share",
  "art-int8-unitNone-H128-sm",
  "art-known-G4",
  "decode-H128-bfloat16",
  "enter_codes-GQA-int8",
  "enter_codes-GQA-int4",
  "enter_token-GQA",
  "keep_rows-all",
  "host_blocks-fetch-1-H128",
  "host_blocks-append-1-H128",
  "longflow-8x4",
  "longflow-read-8x4-B16-bfloat16",
  "prefill-plain-8192-H128-bfloat16",
  "prefill-mass-8192-H128-bfloat16",
  "select-top_k-pages",
  "select-page_bounds-mean-128",
  "select-renew_extremes",
  "select-renew_mean",
  "select-key_weights-blocks",
  "cis-anchors-8x1",
  "cis-listed-8x1",
  "cis-note-8x1",
  "cis-read-8x1040",
  "hshare-listed-8-88",
  "sparse_decode-unit16-H128-bfloat16",
  "products-product-8B-B1",
  "products-add_norm-8B-B1",
  "products-qkv_heads",
  "prr-repair-whole-unit64",
  "prr-tiles-unit64",
  "prr-speculate-unit64",
  "prr-speculate-keys-unit64",
  "capped-decode-H256-bfloat16",
  "capped-prefill-window-8192-H256-bfloat16",
  "quantised-int8-H128",
  "quantised-int4-H128",
  "quantised_sparse-int8-unit16-H128",
  "quantised_sparse-int4-unit16-H128",
)


def called(start: str, capability: int = 90) -> str:
  """The first call whose name begins so, on a device of a capability."""
  return next(x for x in CALLS if x.startswith(start) and x.endswith(f"sm{capability}"))


LARGE = "art-unitNone-H128-float32", "decode-H128-bfloat16", "products-gated_product-odd-float32"
FAST = {called(start) for start in CORE} | {called(start, 86) for start in LARGE}


def slow_unless(fast: bool, *values: Any) -> Any:
  """Parameters of a test that is in the core, or else slow."""
  return pytest.param(*values, marks=() if fast else pytest.mark.slow)
