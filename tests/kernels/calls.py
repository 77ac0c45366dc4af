"""Calls of every kernel at shapes that matter: what is lowered for GPUs."""

import dataclasses
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
from kvjax.kernels.common import config
from kvjax.kernels.common.config import Config
from kvjax.kernels.decode import dense
from kvjax.kernels.decode.sparse import settings, sparse_decode
from kvjax.kernels.insertion import host_blocks
from kvjax.kernels.insertion.enter_token import enter_token
from kvjax.kernels.insertion.keep_rows import keep as keep_rows
from kvjax.kernels.longflow import read as longflow_read
from kvjax.kernels.longflow.victim import victim
from kvjax.kernels.ltri import divide
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
from kvjax.methods.art.known import following
from kvjax.runtime.forked import QUERIES
from kvjax.testing.decode_cases import Shape, by_name

# JAX device kind -> compute capability. Where two have the same, calls that are cut alike are one.
DEVICES = {
  "NVIDIA H200": 90,
  "NVIDIA H100 80GB HBM3": 90,
  "NVIDIA A100-SXM4-80GB": 80,
  "NVIDIA RTX A6000": 86,
  "NVIDIA GeForce RTX 5090": 120,
}


of, i32, f32, bf16 = jax.ShapeDtypeStruct, jnp.int32, jnp.float32, jnp.bfloat16
Calls = Iterator[tuple[str, Callable, list[Any]]]


def ints(*shape: int) -> jax.ShapeDtypeStruct:
  return of(shape, i32)


def floats(*shape: int) -> jax.ShapeDtypeStruct:
  return of(shape, f32)


def decode_calls(kind: str) -> Calls:
  """Dense decode: every distinct configuration once for each head size and dtype."""
  seen = set()
  for head_dim in (128, 64, 96, 256):
    for dtype in ("bfloat16", "float32"):
      for batch, slots in ((1, 4 << 10), (1, 128 << 10), (8, 32 << 10), (32, 8 << 10)):
        shape = Shape(batch, 8, 4, slots, head_dim, dtype)
        cut = config.choose("decode", rows=batch * 8, slots=slots, **sizes(shape), kind=kind)
        # How many programs there are changes no code.
        key = head_dim, dtype, cut.tile, cut.warps, cut.stages
        if key not in seen:
          seen.add(key)
          name = f"H{head_dim}-{dtype}-tile{cut.tile}-warps{cut.warps}-stages{cut.stages}"
          yield name, *decode_call(shape, cut)
  # float16, many groups, and sinks with a query of their own.
  small = Config(tile=64, programs=264, warps=4, stages=3)
  shape = Shape(2, 8, 4, 32 << 10)
  yield "level", *decode_call(shape, dataclasses.replace(small, level=True))
  (run, (q, *_)), kept = decode_call(shape, small), of((2, 1, 32 << 10, 128), bf16)
  yield "shared", run, [q, kept, kept, ints(2, 8), ints(2, 8)]
  run, (q, *rest) = decode_call(Shape(1, 3, 3, 999, 64, "float16"), small, sinks=4)
  yield "float16-sinks", by_name(run, "q_sinks"), [q, *rest, q]
  yield "G32", *decode_call(Shape(1, 1, 32, 999), small)
  branches = Shape(1, 8, QUERIES, 32 << 10)  # `kvjax.runtime.forked`
  cut = config.choose("decode", rows=8, slots=branches.slots, **sizes(branches), kind=kind)
  yield f"G{QUERIES}", *decode_call(branches, cut)
  for dtype, warps in (("bfloat16", 4), ("float16", 4), ("float32", 8)):
    shape, cut = Shape(4, 8, 4, 3200, 128, dtype), Config(64 // (warps // 4), 264, warps, 3)
    yield f"logits-{dtype}", *decode_call(shape, cut, logits=True)
  yield "ring", *decode_call(Shape(4, 8, 4, 4480), small, logits=True, ring=128)


def sizes(shape: Shape) -> dict[str, int]:
  """Sizes of a shape that cuts of kernels ask for."""
  itemsize = jnp.dtype(shape.dtype).itemsize
  return {"groups": shape.groups, "head_dim": shape.head_dim, "itemsize": itemsize}


def decode_call(shape: Shape, cut: Config, **how: Any) -> tuple[Callable, list[Any]]:
  """The function and its abstract arguments."""
  return functools.partial(dense.decode_with_output, config=cut, **how), [*shape.abstract()]


def quantised_calls(kind: str) -> Calls:
  """Decode over codes of every width, at sizes of heads that are cut apart."""
  for bits, head_dim, groups, options in (
    *((8, 128, 4, {}), (4, 128, 4, {}), (8, 256, 4, {}), (4, 96, 3, {"sinks": 4})),
    *((8, 64, 16, {"sinks": 4}), (4, 256, 32, {}), (8, 80, 4, {})),
    *((8, 64, 4, {"logits": True}), (4, 256, 4, {"logits": True})),
  ):
    shape = Shape(8, 8, groups, 32768, head_dim, "float32" if head_dim == 80 else "bfloat16")
    *operands, per_slot = shape.coded(bits)
    call = by_name(dense.decode_with_output, "per_slot", bits=bits, **options)
    yield f"int{bits}-H{head_dim}-G{groups}", call, [*operands, *[ints(8, 1)] * 2, per_slot]


def quantised_sparse_calls(kind: str) -> Calls:
  """Sparse decode over codes: tiles that gather, tiles that do not, a program for each row."""
  for bits, head_dim, groups, unit, batch in (
    *((8, 128, 4, 16, 1), (4, 128, 4, 16, 1), (8, 128, 4, 64, 8), (4, 128, 4, 64, 8)),
    *((8, 128, 1, 1, 64), (4, 96, 3, 1, 1), (8, 256, 4, 16, 64), (4, 256, 32, 256, 1)),
    *((8, 64, 16, 16, 1), (8, 80, 4, 16, 1)),
  ):
    dtype = "float32" if head_dim == 80 else "bfloat16"
    shape = Shape(batch, 8, groups, 131072 // batch, head_dim, dtype)
    *operands, per_slot = shape.coded(bits)
    call = by_name(sparse_decode, "per_slot", bits=bits, unit=unit)
    name = f"int{bits}-unit{unit}-H{head_dim}" + f"-rows{8 * batch}" * (batch > 1)
    yield name, call, [*operands, *shape.lists(4096 // unit), *[ints(batch, 1)] * 2, per_slot]


def sparse_decode_calls(kind: str) -> Calls:
  """Sparse decode at every unit of a plan that matters, as the heuristics of a device cut it."""
  for batch, heads, groups, unit, dtype, head_dim in (
    *((1, 8, 4, unit, "bfloat16", 128) for unit in (1, 16, 64, 128)),
    *((1, 8, 4, 16, "float32", 128), (1, 8, 4, 16, "float16", 64)),
    *((1, 8, 4, 16, "bfloat16", 256), (16, 32, 1, 1, "bfloat16", 128)),
    *((16, 32, 1, 1, "float32", 128), (64, 8, 4, 16, "bfloat16", 256)),
  ):
    shape = Shape(batch, heads, groups, 131072 // batch, head_dim, dtype)
    cut = settings(rows=batch * heads, slots=8192, **sizes(shape), unit=unit, kind=kind)
    call = functools.partial(sparse_decode, unit=unit, config=cut)
    rows = f"-rows{batch * heads}" * (batch > 1)
    arguments = [*shape.abstract()[:3], *shape.lists(8192 // unit), *[ints(batch, 1)] * 2]
    yield f"unit{unit}-H{head_dim}-{dtype}{rows}", call, arguments


def art_calls(kind: str) -> Calls:
  """ART's walk without a table and at several units of one."""
  where, walk = [ints(1, 1)] * 2, functools.partial(art.walk, patience=5)
  for unit, dtype, head_dim, tile, options in (
    (None, "bfloat16", 128, 128, {}),
    (None, "bfloat16", 64, 128, {"per_head": True, "full": True}),
    (None, "float32", 128, 128, {}),
    (None, "bfloat16", 256, 256, {"relative": True}),
    (1, "bfloat16", 128, 128, {}),
    (16, "float16", 96, 100, {"per_head": True}),
    (128, "bfloat16", 128, 128, {}),
    (None, "bfloat16", 128, 128, {"splits": 1, "share": 4}),
    (16, "float32", 128, 100, {"splits": 1, "share": 8, "per_head": True, "full": True}),
  ):
    shape = Shape(1, 8, 4, 131072, head_dim, dtype)
    listed = shape.lists(8192 // unit) if unit else (None, None)
    call = functools.partial(walk, unit=unit or 1, tile=tile, **{"splits": 4, **options})
    name = f"unit{unit}-H{head_dim}-{dtype}" + "-share" * ("share" in options)
    yield name, call, [*shape.abstract()[:3], *listed, *where]

  for bits, unit, head_dim, options in (
    (8, None, 128, {"splits": 4}),
    (8, None, 128, {"splits": 1, "share": 4}),
    (4, 16, 128, {"splits": 4, "per_head": True}),
    (4, None, 256, {"splits": 4, "full": True}),
  ):
    shape = Shape(1, 8, 4, 131072, head_dim)
    *operands, per_slot = shape.coded(bits)
    listed = shape.lists(8192 // unit) if unit else (None, None)
    call = by_name(walk, "per_slot", bits=bits, unit=unit or 1, tile=128, **options)
    name = f"int{bits}-unit{unit}-H{head_dim}" + "-share" * ("share" in options)
    yield name, call, [*operands, *listed, *where, per_slot]

  shape = Shape(1, 8, 4, 131072)
  operands = [*shape.abstract()[:3]]
  how = {"unit": 128, "tile": 128, "splits": 1, "log_ratio": -3.0}
  certified = [*operands, *shape.lists(1024), *where, floats(1, 8, 4, 1025)]
  yield "certified", by_name(walk, "unread", **how), certified
  ring = by_name(walk, "ring", "seen", sinks=4, splits=4)
  yield "ring", ring, [*operands, None, None, *where, ints(1, 8, 2), ints(1)]
  at_once = functools.partial(known.read, following=functools.partial(following, margin=16))
  for batch, groups, dtype, options in (
    (8, 4, "bfloat16", {"sinks": 4, "kept": 1, "relative": True}),
    (1, 6, "bfloat16", {"full": True, "tail": 37}),
    (1, 1, "float32", {}),
  ):
    shape = Shape(batch, 8, groups, 32768, 128, dtype)
    call = functools.partial(at_once, **{"patience": 5, "tail": 15, **options})
    yield f"known-G{groups}-{dtype}", call, [*shape.abstract(), ints(batch, 8)]
  shape = Shape(8, 2, 6, 32768)
  call = by_name(at_once, "moved", patience=5, tail=25, kept=2, relative=True)
  yield "known-moved", call, [*shape.abstract(), ints(8, 2), ints(8, 2, 256)]


def select_calls(kind: str) -> Calls:
  """Scoring and choosing tiles: pages, compressed keys and tokens of long contexts."""
  where = [ints(1, 1)] * 2
  for name, heads, tiles, k, ordered in (
    ("pages", 8, 8192, 63, True),
    ("blocks", 8, 2048, 64, False),
    ("tokens", 8, 131072, 432, True),
    ("MHA", 32, 4096, 432, True),
  ):
    choose = functools.partial(top_k.best, unit=16, sinks=1, local=4, k=k, ordered=ordered)
    yield f"top_k-{name}", choose, [floats(1, heads, tiles), *where]
  spans = [floats(1, 8, 2, 8192), ints(1, 1), ints(1, 8, 2)]
  how = {"unit": 16, "sinks": 1, "local": 4}
  run = functools.partial(top_k.best_of_each, k=(63, 78), limit=(63, 78), **how)
  yield "top_k-lists", run, spans
  for rows, tiles, k in ((512, 4112, 432), (64, 1024, 88)):
    shapes = [floats(1, rows, tiles), *where]
    run = functools.partial(top_k.others, k=k, first=k // 3, ordered=False, **how)
    yield f"top_k-first-{rows}", run, shapes
  for group, dtype, head_dim in (
    ("mean", bf16, 128),
    ("max", bf16, 128),
    ("mean", "float32", 96),
  ):
    run = functools.partial(page_bounds, unit=16, group=group)
    pages = of((1, 8, 8192, head_dim), dtype)
    shapes = [of((1, 8, 4, head_dim), dtype), pages, pages, *where]
    yield f"page_bounds-{group}-{head_dim}", run, shapes
  cache, pages = of((1, 8, 131072, 128), bf16), of((1, 8, 8192, 128), bf16)
  renew = functools.partial(summaries.renew_extremes, unit=16)
  yield "renew_extremes", renew, [cache, ints(1), pages, pages]
  codes = [of(x, jnp.int8) for x in (pages.shape, pages.shape, pages.shape[:3])]
  renew = functools.partial(summaries.renew_coded_extremes, unit=16)
  yield "renew_coded_extremes", renew, [cache, ints(1), *codes]
  run, q = functools.partial(page_bounds, unit=16, group="mean"), of((1, 8, 4, 128), bf16)
  yield "page_bounds-int8", run, [q, *codes[:2], *where, codes[2]]
  renew = functools.partial(summaries.renew_mean, width=32, stride=16)
  yield "renew_mean", renew, [cache, ints(1), pages]
  blocks = {"blocks": 2048, "stride": 16, "width": 32, "block": 64}
  for name, count, groups, dtype, options in (
    ("blocks", 8191, 4, bf16, blocks),
    ("tokens", 131072, 4, bf16, {"blocks": 131072, "log": True}),
    ("again", 131072, 4, bf16, {"blocks": 131072, "log": True, "programs": 60}),
    ("float32", 999, 3, "float32", {"blocks": 999, "log": True}),
  ):
    run = functools.partial(key_weights, **options, newest=1)
    keys = of((1, 8, count, 128), dtype)
    shapes = [of((1, 8, groups, 128), dtype), keys, *where, where[0]]
    yield f"key_weights-{name}", run, shapes


def cis_calls(kind: str) -> Calls:
  """CIS's decision and list, per KV head, per query head, and by a group's mean query."""
  for batch, heads, groups, judged, units, k, slots in (
    (1, 8, 4, 4, 1, 432, 131072),
    (1, 8, 4, 4, 4, 432, 131072),
    (1, 2, 6, 1, 1, 432, 32768),
    (16, 32, 1, 1, 1, 88, 4096),
  ):
    row, block = (batch, heads), (batch, heads, 16)
    shapes = [of((*row, groups, 128), bf16), floats(*block, judged, 128)]
    shapes += [ints(*block, units), *[ints(batch)] * 2]
    run = functools.partial(anchors.anchors, tau=0.8, first=narrowed)
    yield f"anchors-{heads}x{units}", run, shapes
    keys = of((*row, slots, 128), bf16), ints(batch)
    run = by_name(run, "keys", span_sinks=16)
    yield f"anchors-and-logits-{heads}x{units}", run, [*shapes, keys]
    run = functools.partial(listed.listed, slots=slots, sinks=16, local=64)
    fresh, unit = ints(*row, units, k), ints(*row, units)
    shapes = [ints(*block, units, k + 2 * (k // 3)), fresh, unit, unit]
    shapes += [ints(batch), ints(batch, 1)]
    yield f"listed-{heads}x{units}", run, shapes
    if units == 1:
      how = {"k": k, "sinks": 16, "local": 64}
      run, where = functools.partial(listed.found_and_listed, **how), [ints(batch, 1)] * 2
      fused = [[floats(*row, slots)], *where, shapes[0], unit, unit, ints(batch)]
      yield f"found-and-listed-{heads}x{units}", run, fused
      partial = [floats(*row, groups, size) for size in (slots, 65, 65)]
      yield f"weighed-{heads}x{units}", run, [partial, *fused[1:]]
    shapes = [of((batch,), bool), floats(*row, groups), ints(*row)]
    shapes += [floats(*row, judged, 128), unit, unit, fresh, floats(*fresh.shape)]
    shapes += [floats(*block, judged, 128), ints(*block, units)]
    shapes += [ints(*block, units, k + 2 * (k // 3)), ints(batch)]
    run = functools.partial(note.note, sinks=16, heaviest=k // 3, radius=1)
    yield f"note-{heads}x{units}", run, shapes
  for batch, k, slots, dtype in (
    *((8, 88, 1040, bf16), (16, 432, 4112, bf16)),
    *((16, 88, read.LANES, bf16), (8, 216, 999, f32)),
  ):
    row, block = (batch, 32), (batch, 32, 16)
    shapes = [of((*row, 1, 128), dtype), *[of((*row, slots, 128), dtype)] * 2]
    shapes += [floats(*block, 1, 128), ints(*block, 1)]
    shapes += [ints(*block, 1, k + 2 * (k // 3)), *[ints(batch)] * 3]
    how = {"k": k, "sinks": 16, "local": 64, "first": narrowed, "span_sinks": 16}
    run = functools.partial(read.read, tau=0.8, **how)
    yield f"read-{batch}x{slots}", run, shapes
  per_head = [floats(2, 2, 3, 96), floats(2, 2, 5, 3, 96), ints(2, 2, 5, 3)]
  run = functools.partial(anchors.anchors, tau=0.8)
  yield "anchors-per-query-head", run, [*per_head, *[ints(2)] * 2]


def narrowed(seen):
  """The first token that PSAW's window shows, as `kvjax.methods.CIS` has a kernel work it out."""
  return depth.floor_of_each(depth.share(0.7, 1.0, 0.75, 3, 4), seen.reshape(1, 1)).reshape(()) - 1


def hshare_calls(kind: str) -> Calls:
  """HShare's sets and lists at both of its budgets."""
  for batch, heads, k in ((1, 8, 88), (4, 32, 432)):
    row = (batch, heads)
    shapes = [ints(*row, k), ints(*row, k), ints(*row), *[ints(batch)] * 2]
    shapes += [ints(batch, 1), ints(*row, 32, k)]
    how = {"own": 5, "slots": 131072, "steps": 2, "budget": k + 40, "sinks": 8, "local": 32}
    run = functools.partial(hshare_listed, **how)
    yield f"listed-{heads}-{k}", run, shapes


def enter_token_calls(kind: str) -> Calls:
  """Entering a token: few and many heads, an odd head size, with and without victims."""
  for name, heads, groups, head_dim, dtype, evicts in (
    ("GQA", 8, 4, 128, bf16, False),
    ("MHA-evicts", 32, 1, 128, bf16, True),
    ("odd-float32", 3, 3, 96, f32, True),
  ):
    shapes = enter_token_shapes(heads, groups, head_dim, dtype, evicts)
    if evicts:
      shapes.append(floats(2, heads, 999))
    call = functools.partial(enter_token, rope=Rope())
    yield name, call, shapes
  shapes = enter_token_shapes(8, 4, 128, bf16, False)
  turned = Rope(scaling=Yarn(4.0, 4096), partial=0.5)  # a factor on what is turned alone
  yield "partial", functools.partial(enter_token, rope=turned), shapes
  yield "ring", by_name(enter_token, "ring", rope=Rope()), [*shapes, ints(2, 8, 2)]
  kept = [of((2, 1, *x.shape[2:]), x.dtype) for x in shapes[3:6]]
  victim = ints(2, 8)
  shared = functools.partial(enter_token, rope=Rope(), room=999)
  yield "shared", shared, [*shapes[:2], victim, *kept, *shapes[6:]]
  yield "part", part_entered, [*shapes, ints()]
  entered = by_name(enter_token, "pages", rope=Rope(), unit=16)
  pages, codes = of((2, 8, 63, 128), bf16), of((2, 8, 63, 128), jnp.int8)
  yield "extremes", entered, [*shapes, (pages, pages)]
  yield "extremes-int8", entered, [*shapes, (codes, codes, of((2, 8, 63), jnp.int8))]


def enter_codes_calls(kind: str) -> Calls:
  """Entering a token as codes: few and many heads, odd sizes, with victims, rings and neither."""
  for name, heads, groups, head_dim, dtype, bits, evicts in (
    ("GQA", 8, 4, 128, bf16, 8, False),
    ("GQA", 8, 4, 128, bf16, 4, False),
    ("few", 2, 6, 128, bf16, 8, False),
    ("MHA-evicts", 32, 1, 128, bf16, 8, True),
    ("MHA-evicts", 32, 1, 128, bf16, 4, True),
    ("large", 8, 16, 256, bf16, 4, False),
    ("odd-float32", 3, 3, 96, f32, 8, True),
    ("odd-float16", 3, 3, 24, jnp.float16, 4, True),
    ("ring", 8, 4, 128, bf16, 8, None),
  ):
    row, slots = (2, heads), (2, heads, 999)
    shapes = enter_token_shapes(heads, groups, head_dim, dtype, evicts)
    shapes[3:5] = [
      of((*slots, head_dim * bits // 8), jnp.int8),
      of((*slots, head_dim * bits // 16), jnp.int16),
    ]
    shapes += [floats(*slots)] * (2 if bits == 8 else 4)
    shapes += [ints(*row, 2) if evicts is None else None, floats(*row, head_dim)]
    call = by_name(enter_token, "ring", "mean", rope=Rope(), bits=bits)
    yield f"{name}-int{bits}", call, shapes


def part_entered(*arrays, **how):
  """`enter_token` where slots are split over devices."""
  return enter_token(*arrays[:-1], rope=Rope(), part=(arrays[-1], 4 * 999), **how)


def enter_token_shapes(heads, groups, head_dim, dtype, evicts):
  """Abstract operands of `enter_token`: two rows of 999 slots."""
  cache = of((2, heads, 999, head_dim), dtype)
  return [
    of((2, heads, groups + 2, head_dim), dtype),
    of((2,), bool),
    ints(2, heads) if evicts else None,
    *(cache, cache, ints(2, heads, 999)),
    *(ints(2), ints(2)),
  ]


def keep_rows_calls(kind: str) -> Calls:
  """Keeping statistics: long and short ones, of all dtypes."""
  sizes = (
    ((2, 8, 8192), "float32"),
    ((2, 8, 300), "int32"),
    ((2,), "int32"),
    ((2, 64), "bfloat16"),
  )
  stats = [of(shape, dtype) for shape, dtype in sizes]
  yield "all", keep_rows, [of((2,), bool), of((2, 3, 5), "float32"), stats, stats]


def longflow_calls(kind: str) -> Calls:
  """Naming a victim, for one KV head and for a layer."""
  cases = [(2, 8, 4, False), (128, 8, 4, False), (2, 32, 1, False)]
  for rows, kv_heads, groups, per_layer in (*cases, (2, 3, 3, True), (2, 8, 4, True)):
    head = floats(rows, kv_heads, groups)
    slots = rows, kv_heads, 3200
    shapes = [floats(*head.shape, 3200), head, head, floats(*slots)]
    shapes += [ints(*slots), ints(rows), ints(rows), of((rows,), bool)]
    shapes.append(ints(rows, kv_heads))
    call = functools.partial(victim, sinks=4, recent=1, per_layer=per_layer)
    yield f"{kv_heads}x{groups}{'-layer' * per_layer}{'-many' * (rows > 2)}", call, shapes
  cases = [(128, 8, 4, 3200, "bfloat16"), (16, 8, 4, 3200, "bfloat16"), (64, 2, 6, 2048, "float16")]
  for rows, kv_heads, groups, slots, dtype in cases:
    lead = rows, kv_heads
    if not longflow_read.takes(rows * kv_heads, groups, slots, 2, interpret=False, kind=kind):
      continue
    key = of((*lead, slots, 128), dtype)
    shapes = [of((*lead, groups, 128), dtype), key, key, floats(*lead, slots)]
    shapes += [ints(*lead, slots), ints(rows), ints(rows)]
    call = functools.partial(longflow_read.read, sinks=4, recent=1)
    yield f"read-{kv_heads}x{groups}-B{rows}-{dtype}", call, shapes


def ltri_calls(kind: str) -> Calls:
  """Maps of all heads, and of blocks; a block's size that is no power of two."""
  for size in (128, 96):
    maps = of((40, size, size), f32)
    yield f"between-{size}", divide.between, [maps, *[ints(40)] * 3]
    run = functools.partial(divide.divide, count=4, mode="rowcol")
    yield f"divide-{size}", run, [maps, floats(40), ints(40), floats(40)]


def product_calls(kind: str) -> Calls:
  """A step's products and what stands between them: an 8B decoder's and an odd one's shapes."""
  for name, rows, dim, ffn, dtype in (
    ("8B-B1", 1, 4096, 14336, bf16),
    ("B16", 16, 2048, 6144, bf16),
    ("part-of-8B", 8, 4096, 3584, bf16),
    ("part-of-70B", 8, 8192, 7168, bf16),
    ("odd-float32", 3, 576, 1000, f32),
  ):
    x, h = of((rows, dim), dtype), of((rows, ffn), dtype)
    up, down = of((dim, 2, ffn), dtype), of((ffn, dim), dtype)
    parts = floats(4, rows, dim)
    for function, arguments in (
      (product.partial_products, [h, down]),
      (product.product, [h, down]),
      (product.gated_product, [x, up]),
      (functools.partial(add_norm, eps=1e-6), [x, parts, floats(dim)]),
    ):
      called = getattr(function, "func", function)
      yield f"{called.__name__}-{name}", function, arguments
  heads, scale = floats(4, 2, 8, 4, 128), floats(128)
  call = functools.partial(qkv_heads, dtype=bf16)
  yield "qkv_heads", call, [heads, of(heads.shape[2:], bf16), scale, scale]


def prefill_calls(kind: str) -> Calls:
  """Prompt attention, plain and with everything it can do, and its second pass."""
  for queries, head_dim, dtype in (
    *((8192, 128, bf16), (32, 64, jnp.float16)),
    *((8192, 256, bf16), (8192, 128, f32)),
  ):
    name = f"{queries}-H{head_dim}-{jnp.dtype(dtype).name}"
    q, k = of((1, 8, 4, queries, head_dim), dtype), of((1, 8, 32768, head_dim), dtype)
    pos, qpos, state = ints(1, 8, 32768), ints(1, queries), floats(*q.shape[:4])
    run = functools.partial(prefill.prefill_attention, sinks=16)
    yield f"window-{name}", run, [q, k, k, qpos, qpos]
    if head_dim == 128 and queries == 8192:
      yield f"plain-{name}", prefill.prefill_attention, [q, k, k, qpos]
    yield f"any-order-{name}", by_name(run, "q_sinks", "pos"), [q, k, k, qpos, qpos, q, pos]
    run = functools.partial(prefill.column_mass, sinks=16)
    yield f"mass-{name}", run, [q, k, pos, qpos, state, state, qpos]
  # A chunk of a stream.
  q, k, pos, qpos = (
    of((1, 8, 4, 512, 128), bf16),
    of((1, 8, 4992, 128), bf16),
    ints(1, 8, 4992),
    ints(1, 512),
  )
  run = functools.partial(prefill.prefill_attention, past=4480)
  yield "past-512-H128-bfloat16", by_name(run, "pos"), [q, k, k, qpos, pos]
  run = functools.partial(prefill.column_mass, past=4480)
  yield "past-mass-512-H128-bfloat16", run, [q, k, pos, qpos, *[floats(*q.shape[:4])] * 2]


def host_blocks_calls(kind: str) -> Calls:
  """Blocks over the link: one segment and three, a head size that is no power of two."""
  for segments, head_dim, dtype in ((1, 128, bf16), (3, 96, f32)):
    part = of((1, 8, 512, 128, head_dim), dtype)
    store = {"k": (part,) * segments, "v": (part,) * segments}
    block, name = ints(1, 16), f"{segments}-H{head_dim}"
    copies = dict.fromkeys("kv", of((1, 8, 32 * 128, head_dim), dtype))
    yield f"fetch-{name}", host_blocks.fetch, [store, block, copies, block]
    new = of((1, 8, 16, 128, head_dim), dtype)
    yield f"append-{name}", host_blocks.append, [store, {"k": new, "v": new}, block, floats(8)]


def prr_calls(kind: str) -> Calls:
  """Repair of every kind of stored state, speculation beside scoring, and single tiles."""
  for unit, head_dim, dtype in ((64, 128, bf16), (16, 128, f32)):
    rows, pages, width = 8, 131072 // unit, 4096 // unit
    q, cache = of((1, rows, 4, head_dim), dtype), of((1, rows, 131072, head_dim), dtype)
    where, lists = [ints(1, 1)] * 2, ints(1, rows, width)
    whole = [
      floats(rows, 4, head_dim),
      *[floats(rows, 4)] * 2,
      of((rows, 4, head_dim), dtype),
    ]
    for stored, parts in (("whole", 0), ("pieces", 64), ("tiles", width)):
      states = [floats(parts * rows, 4, head_dim), *[floats(parts * rows, 4)] * 2]
      call = functools.partial(repair, unit=unit, stored=stored)
      shapes = [q, cache, cache, lists, lists, *where, states if parts else whole]
      yield f"repair-{stored}-unit{unit}", call, shapes
    call = functools.partial(attend_tiles, unit=unit)
    yield f"tiles-unit{unit}", call, [q, cache, cache, lists, *where]
    edge, state = of((1, rows, pages, head_dim), dtype), floats(1, rows, pages)
    shapes = [q, cache, cache, lists, ints(1), edge, edge, state, state, floats(1, 3)]
    call = functools.partial(speculate, unit=unit)
    yield f"speculate-unit{unit}", call, shapes
    yield f"speculate-last-unit{unit}", functools.partial(call, predictor="last"), shapes[:-3]
    apart = functools.partial(speculate, unit=unit, apart=True)
    yield f"speculate-apart-unit{unit}", apart, shapes
    over = {"unit": unit, "stride": unit // 4, "width": unit // 2}
    keys = of((1, rows, 4 * pages - 1, head_dim), dtype)
    shapes = [q, cache, cache, lists, ints(1), keys, state, state, floats(1, 3)]
    for name, single in (("", False), ("-apart", True)):
      call = functools.partial(speculate_keys, **over, apart=single)
      yield f"speculate-keys{name}-unit{unit}", call, shapes
    call = functools.partial(speculate_keys, **over, predictor="last")
    yield f"speculate-keys-last-unit{unit}", call, shapes[:-3]


# Kernel -> its calls on a device, as (name, function, abstract arguments).
KERNELS: dict[str, Callable] = {
  "art": art_calls,
  "decode": decode_calls,
  "enter_codes": enter_codes_calls,
  "enter_token": enter_token_calls,
  "keep_rows": keep_rows_calls,
  "host_blocks": host_blocks_calls,
  "longflow": longflow_calls,
  "ltri": ltri_calls,
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


def capped_calls(kind: str) -> Calls:
  """The same under a soft cap, which takes registers but no shared memory: on two devices."""
  if kind not in ("NVIDIA H200", "NVIDIA A100-SXM4-80GB"):
    return
  for kernel, calls in KERNELS.items():
    for name, function, arguments in calls(kind):
      if f"{kernel}-{name}".startswith(CAPPED):
        yield f"{kernel}-{name}", functools.partial(function, soft_cap=50.0), arguments


def for_gpus(function: Callable) -> Callable:
  """A call for a GPU, wherever that is lowered."""
  return functools.partial(function, interpret=False)


CALLS: dict[str, tuple[str, Callable, list[Any]]] = {}
for kind, capability in DEVICES.items():
  for kernel, calls in KERNELS.items():
    for name, function, arguments in calls(kind):
      CALLS.setdefault(f"{kernel}-{name}-sm{capability}", (kind, for_gpus(function), arguments))
  for name, function, arguments in capped_calls(kind):
    CALLS.setdefault(f"capped-{name}-sm{capability}", (kind, for_gpus(function), arguments))

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
  "select-renew_coded_extremes",
  "select-renew_mean",
  "select-key_weights-blocks",
  "cis-anchors-8x1",
  "cis-listed-8x1",
  "cis-note-8x1",
  "cis-read-8x1040",
  "hshare-listed-8-88",
  "sparse_decode-unit16-H128-bfloat16",
  "ltri-between-128",
  "ltri-divide-128",
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
