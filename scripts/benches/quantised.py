"""keys and values in 8 and 4 bits: decode, lists and steps, against bfloat16 (or `--only sweep`)"""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import kvjax
from kvjax.kernels.common.config import Config
from kvjax.kernels.common.devices import this_device
from kvjax.kernels.decode.dense import decode_attention
from kvjax.kernels.decode.sparse import sparse_decode
from kvjax.primitives.codes import WORDS, Codes, dequantise, quantise, rounded_query
from kvjax.programs import suites
from kvjax.programs.suites import Case, Contender, jax_contender, named, optional, sparse, together
from kvjax.programs.suites.decode import reference, rotated
from kvjax.testing.decode_cases import Shape, by_name
from scripts.benches import e2e_sparse

BITS = (8, 4)
SHAPES = Shape(8, 8, 4, 32 << 10), Shape(1, 8, 4, 128 << 10), Shape(1, 8, 4, 32 << 10)
QUICK = (Shape(2, 2, 3, 300, head_dim=64, dtype="float32"),)
# Slots of a list's entries, and of a whole list.
LISTS = ((16, 2048), (16, 4096), (64, 4096), (1, 2048))
STEPS = (8, 32 << 10), (1, 128 << 10)  # rows and tokens of whole steps

# What the sweep goes over: tile, warps, stages, programs on each multiprocessor.
CUTS = (
  *((64, 2, 4, 2), (64, 2, 4, 4), (64, 4, 3, 2), (64, 4, 3, 4), (64, 4, 4, 2), (64, 4, 4, 3)),
  *((64, 4, 6, 2), (128, 4, 2, 2), (128, 4, 2, 3), (128, 4, 3, 2), (128, 4, 3, 3)),
  *((128, 4, 4, 2), (128, 8, 3, 2), (128, 8, 4, 2), (256, 8, 2, 2), (256, 8, 3, 2)),
)


def cases(quick: bool, peers: bool = True, only: str = "") -> Iterator[Case]:
  """The cases; sweeps of decode only if they are asked for."""
  return suites.suite(functools.partial(_cases, "sweep" in only))(quick, peers, only)


def _cases(sweeps: bool, quick: bool, peers: bool) -> Iterator[tuple]:
  """At every number of bits: decode, its sweeps, lists, then whole steps."""
  shapes = QUICK if quick else SHAPES
  for sweep, bits, shape in itertools.product((False, True)[: 1 + sweeps], BITS, shapes):
    yield "sweep " * sweep + f"int{bits} {shape.name}", case, shape, bits, quick, sweep
  lists = ((16, 64),) if quick else LISTS
  for bits, shape, (unit, budget) in itertools.product(BITS, shapes, lists):
    tokens = named(shape.slots)
    name = f"listed int{bits} B{shape.batch} T{tokens} page {unit} budget {budget}"
    yield name, listed_case, shape, bits, unit, budget, quick
  model, steps = ("tiny", ((2, 128),)) if quick else ("Llama-3.1-8B", STEPS)
  for bits, (label, base), (batch, tokens) in itertools.product(BITS, bases(quick).items(), steps):
    method = kvjax.Quantised(base, bits=bits)
    name = f"int{bits} {label}{model} B{batch} T{tokens >> 10}K"
    yield name, e2e_sparse.beside_full, model, method, batch, tokens, quick


def bases(quick: bool) -> dict[str, kvjax.Method]:
  """Base methods of whole steps, by label."""
  quest = kvjax.Quest(32, page=8, dense_layers=1) if quick else kvjax.Quest(4096)
  return {"": kvjax.Full(), "Quest ": quest}


def case(name: str, shape: Shape, bits: int, quick: bool, sweep: bool) -> Case:
  """One shape: decode over its codes, and dense decode over what they were made of."""
  floats, calls = rotated(shape, quick)
  inputs = jax.block_until_ready([coded(*x, bits=bits) for x in floats])

  def contender(name: str, **how: Any) -> Contender:
    run = by_name(decode_attention, "per_slot", bits=bits, **how)
    made = jax_contender(name, run, inputs, output=lambda s: s.o, calls=calls)
    made.output()  # compiled here, beside others
    return made

  makers = [functools.partial(contender, "kvjax")]
  if sweep:
    cores = 1 if quick else this_device().cores
    cuts = {cut: Config(cut[0], cores * cut[3], *cut[1:3]) for cut in CUTS}
    makers += [functools.partial(contender, str(cut), config=x) for cut, x in cuts.items()]
  labelled = ((maker.args[0], maker) for maker in makers)
  made = together([functools.partial(optional, *each) for each in labelled])
  contenders = [
    *(one for some in made for one in some),
    jax_contender("dense decode", decode_attention, floats, calls=calls),
    suites.reading([x[1:3] for x in inputs], calls),
  ]

  batch, kv_heads, groups, head_dim = inputs[0][0].shape
  return Case(
    name=name,
    shapes=f"q [{batch}, {kv_heads}, {groups}, {head_dim}] {shape.dtype}, {shape.slots} slots of "
    f"{bits} bits, {len(floats)} rotating",
    bytes=sum(x.nbytes for x in (*inputs[0][1:3], *inputs[0][-1])),
    reference=lambda: exact(*inputs[0], bits=bits),
    tolerance=5e-3,
    contenders=contenders,
  )


def listed_case(name: str, shape: Shape, bits: int, unit: int, budget: int, quick: bool) -> Case:
  """One shape and list: sparse decode over codes, and over what they were made of.

  Several random plans over one cache, so that the L2 cache holds little of what is read.
  """
  q, k, v, *where = shape.arrays()
  _, words_of_k, words_of_v, *_, per_slot = coded(q, k, v, *where, bits=bits)
  rows = shape.batch * shape.kv_heads
  moved = rows * budget * (2 * shape.head_dim * bits // 8 + 4 * len(per_slot))
  copies = 2 if quick else min(max(4, (128 << 20) // moved), 16)
  plans = [sparse.plan(i, k, shape.groups, unit, budget) for i in range(copies)]
  codes = [(q, words_of_k, words_of_v, *rest, per_slot) for q, *rest in plans]
  floats = [(q, k, v, *rest) for q, *rest in plans]
  how = {"output": lambda r: r[0].o, "calls": 2 * copies}
  listed = functools.partial(sparse_decode, unit=unit)
  parts = [
    [x[:, :, i * budget : (i + 1) * budget] for x in (words_of_k, words_of_v, *per_slot)]
    for i in range(min(copies, shape.slots // budget))
  ]
  contenders = [
    jax_contender("kvjax", by_name(listed, "per_slot", bits=bits), codes, **how),
    jax_contender("sparse decode", listed, floats, calls=2 * copies),
    suites.reading(parts, 2 * copies),
  ]

  def wanted() -> np.ndarray:
    q, k, v, *rest, per_slot = codes[0]
    return sparse.reference(rounded_query(q), *numbers(k, v, per_slot, bits), *rest, unit=unit)

  return Case(
    name=name,
    shapes=f"{shape.batch} rows of {shape.kv_heads} KV heads × {shape.groups}, {shape.slots} slots "
    f"of {shape.head_dim} in {bits} bits, q {shape.dtype}, {copies} plans in turn",
    bytes=moved,
    reference=wanted,
    tolerance=5e-3,
    contenders=contenders,
  )


@functools.partial(jax.jit, static_argnames="bits")
def coded(q, k, v, start, stop, *, bits: int) -> tuple:
  """Arguments of dense decode with codes, and their scales behind them."""
  k, v = quantise(k, bits, WORDS["k"]), quantise(v, bits, WORDS["v"])
  per_slot = [k.scale, v.scale] + ([] if k.zero is None else [k.zero, v.zero])
  return q, k.words, v.words, start, stop, per_slot


def exact(q, k, v, start, stop, per_slot, *, bits: int) -> np.ndarray:
  """Attention over what the codes stand for, in float32, [B, K, G, H]."""
  return reference(rounded_query(q), *numbers(k, v, per_slot, bits), start, stop)


def numbers(k, v, per_slot, bits: int) -> list[jax.Array]:
  """The keys and values that codes stand for, float32."""
  zeros = per_slot[2:] or (None, None)
  run = jax.jit(dequantise, static_argnums=1)
  parts = zip((k, v), per_slot[:2], zeros, strict=True)
  return [run(Codes(*x), bits) for x in parts]
