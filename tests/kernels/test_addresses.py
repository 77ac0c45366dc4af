"""Arrays of one byte an element with more elements than a signed word of 32 bits counts.

What offsets the kernels compute is read off the Triton IR, on any machine; on a GPU with room for
such arrays their rows are held against each row alone.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from kvjax import Rope
from kvjax.kernels.art import walk
from kvjax.kernels.common import addresses, backend
from kvjax.kernels.decode.dense import decode_attention
from kvjax.kernels.decode.sparse import sparse_decode
from kvjax.kernels.insertion.enter_token import enter_token
from tests.kernels.calls import CALLS, FAST, slow_unless
from tests.lowering import lower

GPU = jax.default_backend() == "gpu"


def codes_of(arguments):
  """Arrays of a byte an element that grow with the slots."""
  return [x for x in jax.tree.leaves(arguments) if x.ndim > 2 and jnp.dtype(x.dtype).itemsize == 1]


OVER_CODES = [
  call
  for call, (kind, _, arguments) in CALLS.items()
  if kind == "NVIDIA H200" and codes_of(arguments)
]


def with_slots(arguments, most, past):
  """The arguments with as many slots as `most` elements of codes have, and `past` more."""
  codes = codes_of(arguments)[0]
  slots = codes.shape[2]
  wanted = most // (codes.size // slots) + past

  def of(x):
    shape = (*x.shape[:2], wanted, *x.shape[3:]) if x.shape[2:3] == (slots,) else x.shape
    return jax.ShapeDtypeStruct(shape, x.dtype)

  return jax.tree.map(of, arguments)


def offsets(call, past):
  """Types of the offsets from the pointers to codes, in all kernels of a call."""
  kind, function, arguments = CALLS[call]
  arguments = with_slots(arguments, addresses.MOST, past)
  found = r'"tt.addptr"\(.*?\) : \(tensor<[\dx]*!tt.ptr<i[18]>>, tensor<[\dx]*(i\d+)>\)'
  texts = [kernel.text for kernel in lower(function, *arguments, kind=kind)]
  return {width for text in texts for width in re.findall(found, text)}


@pytest.mark.core(2)
@pytest.mark.parametrize("call", [slow_unless(call in FAST, call) for call in OVER_CODES])
def test_offsets_have_64_bits_where_32_do_not_reach(call):
  """Those to smaller arrays beside them, such as one code a page, do not."""
  codes = codes_of(with_slots(CALLS[call][2], addresses.MOST, 1))
  reached = {"i64" if addresses.is_far(x) else "i32" for x in codes}
  assert offsets(call, past=1) == reached and "i64" in reached


@pytest.mark.parametrize("call", [slow_unless(False, call) for call in OVER_CODES])
def test_offsets_have_32_bits_where_they_reach(call):
  assert offsets(call, past=0) == {"i32"}


def copied(source, target):
  """source [N] -> target [N]: one element."""
  target[0] = source[0]


def copy(x, out, aliases):
  """`copied`, lowered for a GPU."""
  how = {"grid": (1,), "out": [out], "warps": 1, "stages": 1, "name": "copied", "aliases": aliases}
  return lower(lambda x: backend.call(copied, x, interpret=False, **how), x)


def widths(kernel, types):
  """Types of the offsets from pointers to elements of these types, of which each is one offset."""
  return set(re.findall(rf'"tt.addptr"\(.*?\) : \(!tt.ptr<{types}>, (i\d+)\)', kernel.text))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "bool"])
def test_all_types_of_a_byte_are_addressed_alike(dtype):
  for past, width in ((0, "i32"), (1, "i64")):
    x = jax.ShapeDtypeStruct((addresses.MOST + past,), dtype)
    (kernel,) = copy(x, x, {0: 0})
    assert widths(kernel, "i[18]") == {width}


def test_wider_types_have_offsets_of_64_bits_from_the_lowering():
  x = jax.ShapeDtypeStruct((addresses.MOST + 1,), "int16")
  (kernel,) = copy(x, x, {0: 0})
  assert widths(kernel, "i16") == {"i64"}


REFUSED = r"copied: found {} of shape \({},\) and dtype int8, expected at most 2\*\*31 elements"


def test_a_result_that_is_not_in_place_is_refused():
  x = jax.ShapeDtypeStruct((addresses.MOST + 1,), jnp.int8)
  with pytest.raises(NotImplementedError, match=REFUSED.format("a result", x.size)):
    copy(x, x, {})


def test_a_jax_that_maps_operands_unasked_is_refused(monkeypatch):
  class Deaf(pl.BlockSpec):
    """Is not asked for its mapping."""

    asked = ()

  monkeypatch.setattr(addresses, "_Far", Deaf)
  x = jax.ShapeDtypeStruct((addresses.MOST + 2,), jnp.int8)
  with pytest.raises(NotImplementedError, match=REFUSED.format("an operand", x.size)):
    copy(x, x, {0: 0})


# Rows, slots, KV heads, head size; the large one has 2.3·10⁹ codes of keys.
SIZES = {"small": (3, 64, 2, 32), "large": (17, 131_072, 8, 128)}
ROOM = 24 << 30  # bytes of the large one: its codes, copies of them, and scales
MEMORY = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0) if GPU else 0
SIZED = [
  "small",
  pytest.param(
    "large",
    marks=pytest.mark.skipif(
      MEMORY < ROOM, reason=f"needs a GPU with {ROOM >> 30} GiB, found {MEMORY >> 30}"
    ),
  ),
]


@functools.cache
def drawn(size):
  """q, words of k and v, scales of both."""
  batch, slots, heads, head_dim = SIZES[size]

  @functools.partial(jax.jit, static_argnums=(1, 2))
  def bits(seed, width, word):
    drawn = jax.random.bits(jax.random.key(seed), (batch, heads, slots, width), f"uint{word}")
    return jax.lax.bitcast_convert_type(drawn, f"int{word}")

  scales = [jnp.full((batch, heads, slots), x, jnp.float32) for x in (0.02, 0.01)]
  q = jax.random.normal(jax.random.key(3), (batch, heads, 4, head_dim), jnp.bfloat16)
  return q, bits(1, head_dim, 8), bits(2, head_dim // 2, 16), scales


def reads(batch, slots, heads):
  """Operations that read codes, as functions of some rows' q, k, v, scales and lists."""
  rng = np.random.default_rng(0)
  table = np.sort(
    rng.permuted(np.tile(np.arange(slots // 16), (batch, heads, 1)), axis=2)[..., :64]
  )
  tables = jnp.asarray(table, jnp.int32), jnp.full((batch, heads), table.shape[2], jnp.int32)

  def span(n):
    return jnp.zeros((n, 1), jnp.int32), jnp.full((n, 1), slots, jnp.int32)

  def decoded(q, k, v, scales, *_):
    return decode_attention(q, k, v, *span(len(q)), per_slot=scales).o

  def listed(q, k, v, scales, *tables):
    return sparse_decode(q, k, v, *tables, *span(len(q)), unit=16, per_slot=scales)[0].o

  def walked(q, k, v, scales, *_, share=0):
    how = {
      "patience": None,
      "per_slot": scales,
      "splits": 1,
      "share": share,
      "tile": max(32, slots >> 10),
    }
    return walk.walk(q, k, v, None, None, *span(len(q)), **how)[0].o

  runs = {"decode": decoded, "sparse": listed, "art": walked}
  return runs | {"art, shared": functools.partial(walked, share=4)}, tables


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZED)
@pytest.mark.parametrize("operation", ["decode", "sparse", "art", "art, shared"])
def test_every_row_is_read_as_if_alone(operation, size):
  batch, slots, heads, _ = SIZES[size]
  runs, tables = reads(batch, slots, heads)
  run, arguments = jax.jit(runs[operation]), (*drawn(size), *tables)
  every = np.asarray(run(*arguments))
  for b in (0, batch // 2, batch - 1):
    alone = np.asarray(run(*jax.tree.map(lambda x, b=b: x[b : b + 1], arguments)))[0]
    # Cut in other places: weights are rounded to float16, and what they weigh cancels.
    np.testing.assert_allclose(every[b], alone, atol=0.02 * np.abs(alone).max())


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZED)
def test_every_row_is_entered_as_if_alone(size):
  """The newest slot of each row gets its codes, and no other slot changes."""
  (batch, slots, heads, head_dim), (_, *words, scales) = SIZES[size], drawn(size)
  qkv = jax.random.normal(jax.random.key(4), (batch, heads, 6, head_dim), jnp.bfloat16)
  pos = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (batch, heads, slots))
  rows = [jnp.full(batch, slots - 1, jnp.int32)] * 2
  mean = jnp.zeros((batch, heads, head_dim), jnp.float32)

  @jax.jit
  def enter(qkv, mean, *cache):
    live = jnp.ones(len(qkv), bool)
    how = {"mean": mean, "rope": Rope(), "bits": 8}
    new = enter_token(qkv, live, None, *cache, **how)[1:3]
    changed = [(x != y).any(-1).sum((1, 2)) for x, y in zip(new, cache, strict=False)]
    return [x[:, :, -1] for x in new], changed

  arguments = qkv, mean, *words, pos, *rows, *scales
  entered, changed = enter(*arguments)
  assert all((np.asarray(x) == heads).all() for x in changed)
  for b in (0, batch // 2, batch - 1):
    alone, _ = enter(*jax.tree.map(lambda x, b=b: x[b : b + 1], arguments))
    for x, y in zip(entered, alone, strict=True):
      np.testing.assert_array_equal(x[b], y[0])
