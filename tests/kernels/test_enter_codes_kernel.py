"""enter_token of codes against a loop in NumPy float64: sizes of heads, full caches, idle rows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import (
  H2O,
  VATP,
  Env,
  Full,
  Quantised,
  Rope,
  SnapKV,
  StreamingLLM,
  settings,
)
from kvjax.families import entrance
from kvjax.kernels.insertion.enter_token import enter_token
from kvjax.primitives.codes import quantise
from kvjax.testing.layer import Layer, Stream, rotate
from tests import steps
from tests.coded import own_codes
from tests.kernels.decode_oracle import same_bits
from tests.kernels.listed import ROPES, codes, rings_and_victims

SLOTS = 7
SEEN = np.array([0, 3, 900, 4], np.int32)  # of four rows: empty, half full, full, and idle
USED = np.array([0, 3, SLOTS, 4], np.int32)
LIVE = np.array([1, 1, 1, 0], bool)


def operands(seed, heads, groups, head_dim, bits, dtype=jnp.float32):
  """qkv, and a cache as it comes: words, pos, counters, scales and zero points; and the mean."""
  rng = np.random.default_rng(seed)
  qkv = rng.normal(size=(4, heads, groups + 2, head_dim)).astype(np.float32).astype(dtype)
  row, size = (4, heads, SLOTS), head_dim * bits // 8
  words_k = rng.integers(-128, 128, (*row, size)).astype(np.int8)
  words_v = rng.integers(-(2**15), 2**15, (*row, size // 2)).astype(np.int16)
  pos = np.where(np.arange(SLOTS) < USED[:, None, None], np.arange(SLOTS), -1)
  pos = np.broadcast_to(pos, row).astype(np.int32)
  scales = [rng.uniform(size=row).astype(np.float32) for _ in range(2 if bits == 8 else 4)]
  mean = (3 * rng.normal(size=(4, heads, head_dim))).astype(np.float32)
  return qkv, [words_k, words_v, pos, SEEN, USED, *scales], mean


@functools.cache
def enter(rope, bits, rings=False):
  """enter_token, jitted, into NumPy; what full caches give up is a victim, or a ring."""

  def run(qkv, given, cache, mean):
    where = {"ring": given} if rings else {}
    victim = None if rings else given
    return enter_token(
      qkv, jnp.asarray(LIVE), victim, *cache, mean=mean, rope=rope, bits=bits, **where
    )

  jitted = jax.jit(run)
  return lambda *operands: jax.device_get(jitted(*operands))


def own_words(code, bits, word):
  """Code after code: the channel c is in word c mod W, above those of lower channels."""
  size = 8 * np.dtype(word).itemsize
  width = len(code) * bits // size
  words = [0] * width
  for c, x in enumerate(code):
    words[c % width] += (int(x) % 2**bits) << (bits * (c // width))
  return np.array([x - 2**size if x >= 2 ** (size - 1) else x for x in words], word)


def entered(found, cache, victim):
  """Where tokens went, (row, head, slot); all other slots and the counters are checked."""
  words_k, words_v, pos, *scales, seen, used = found
  where = []
  for b, h in np.ndindex(*pos.shape[:2]):
    slot = USED[b] if USED[b] < SLOTS else (SLOTS if victim is None else victim[b, h])
    if LIVE[b] and slot < SLOTS:
      where.append((b, h, slot))
      assert pos[b, h, slot] == SEEN[b]
  old = np.ones(pos.shape, bool)
  for one in where:
    old[one] = False
  before = [*cache[:3], *cache[5:]]
  for x, y in zip((words_k, words_v, pos, *scales), before, strict=True):
    np.testing.assert_array_equal(np.asarray(x)[old], np.asarray(y)[old])
  np.testing.assert_array_equal(seen, SEEN + LIVE)
  np.testing.assert_array_equal(used, USED + (LIVE & (USED < SLOTS)))
  return where


def check(qkv, cache, mean, victim, bits, out, rope):
  """What is written is what the oracle writes; rotated keys may lie on either side of a half."""
  q, words_k, words_v, pos, *scales, seen, used = (np.asarray(x) for x in out)
  where = entered((words_k, words_v, pos, *scales, seen, used), cache, victim)
  for b, h, slot in where:
    at = [x[b, h, slot] for x in scales] + ([0, 0] if bits == 8 else [])
    code, a, zero = map(np.squeeze, own_codes(qkv[b, h, -1], bits))
    np.testing.assert_array_equal(words_v[b, h, slot], own_words(code, bits, np.int16))
    np.testing.assert_allclose([at[1], at[3]], [a, zero], rtol=1e-6)
    k = np.float32(qkv[b, h, -2])
    if rope.partial:
      k = np.float32(np.float32(rotate(k, SEEN[b])).astype(qkv.dtype))
    code, a, zero = map(np.squeeze, own_codes(k - mean[b, h], bits))
    if rope.partial:
      back = codes(words_k[b, h, slot], bits) * np.float64(at[0]) + at[2]
      off = 1e-3 if qkv.dtype == jnp.float32 else 2e-2  # angles of up to 900; a unit of bfloat16
      assert np.abs(back - (k - mean[b, h])).max() <= a / 2 + off
    else:
      np.testing.assert_array_equal(words_k[b, h, slot], own_words(code, bits, np.int8))
      np.testing.assert_allclose([at[0], at[2]], [a, zero], rtol=1e-6)
  if not rope.partial:
    np.testing.assert_array_equal(q, qkv[:, :, :-2])
  return where


SHAPES = [(3, 3, 24), (1, 1, 64), (8, 4, 128), (3, 1, 96), (1, 16, 256)]


@pytest.mark.core(2)
@pytest.mark.rest
@pytest.mark.parametrize("evicts", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("heads", "groups", "head_dim"), SHAPES)
@pytest.mark.parametrize("rope", [Rope(), Rope.none()], ids=["turned", "not"])
def test_against_oracle(rope, heads, groups, head_dim, bits, dtype, evicts):
  qkv, cache, mean = operands(1, heads, groups, head_dim, bits, dtype)
  victim = None
  if evicts:
    victim = np.random.default_rng(2).integers(0, SLOTS + 1, (4, heads)).astype(np.int32)
  out, again = (enter(rope, bits)(qkv, victim, cache, mean) for _ in range(2))
  where = check(qkv, cache, mean, victim, bits, out, rope)
  assert len(where) >= 2 * heads
  same_bits(out, again)


@pytest.mark.core(1)
@pytest.mark.parametrize("bits", [8, 4])
def test_rings_name_their_victims(bits):
  """As a victim does that is the ring's next slot, by a count from the position that closed it."""
  qkv, cache, mean = operands(6, 3, 2, 24, bits)
  rings, victim = rings_and_victims(SEEN, SLOTS)
  out = enter(Rope.none(), bits, True)(qkv, rings, cache, mean)
  assert len(check(qkv, cache, mean, victim, bits, out, Rope.none())) == 9


@pytest.mark.core(1)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_makes_the_scale_nan(bad, dtype, bits):
  """Of its own head, of keys and of values alike, wherever the channel lies; as the reference's."""
  qkv, cache, mean = operands(3, 3, 2, 24, bits, dtype)
  qkv[0, 0, -2, 20] = qkv[1, 1, -1, 7] = bad
  out = enter(Rope.none(), bits)(qkv, None, cache, mean)

  @jax.jit
  def reference(k, v):
    k = Rope.none().rotate(k, jnp.zeros((4, 1), jnp.int32))  # infinity times 0 for its pair
    return quantise(k - mean, bits, jnp.int8), quantise(v, bits, jnp.int16)

  k, v = jax.device_get(reference(qkv[:, :, -2], qkv[:, :, -1]))
  for b, h in np.ndindex(2, 3):
    slot = USED[b]
    found = [x[b, h, slot] for x in out[4:-2]]
    assert np.isnan(found[0]) == ((b, h) == (0, 0))
    assert np.isnan(found[1]) == ((b, h) == (1, 1))
    want = [k.scale, v.scale] + ([k.zero, v.zero] if bits == 4 else [])
    np.testing.assert_array_equal(found, [x[b, h] for x in want])
    for words, held, x in ((out[1], k, found[0]), (out[2], v, found[1])):
      if np.isfinite(x):
        np.testing.assert_array_equal(words[b, h, slot], held.words[b, h])


@pytest.mark.core(1)
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_codes_equal_the_references(rope, bits):
  """Keys are rotated and rounded to the model's dtype before they are quantised."""
  qkv, cache, mean = operands(2, 3, 3, 64, bits, jnp.bfloat16)
  out = enter(rope, bits)(qkv, None, cache, mean)

  @jax.jit
  def reference(qkv, mean):
    turned = rope.rotate(qkv[:, :, :-1], jnp.asarray(SEEN)[:, None, None])
    return turned, quantise(turned[:, :, -1].astype(jnp.float32) - mean, bits, jnp.int8)

  turned, held = jax.device_get(reference(qkv, mean))
  close = 2e-2  # one unit of bfloat16 at the largest values
  np.testing.assert_allclose(np.float32(out[0]), np.float32(turned[:, :, :-1]), atol=close)
  parts = [held.scale] if bits == 8 else [held.scale, held.zero]
  for found, want in zip((out[1], *out[4:-2:2]), (held.words, *parts), strict=True):
    for b in (0, 1):
      np.testing.assert_array_equal(found[b, :, USED[b]], want[b])


def test_arguments_that_do_not_fit():
  qkv, cache, mean = jax.tree.map(jnp.asarray, operands(0, 1, 1, 8, 8))
  live, how = jnp.asarray(LIVE), {"mean": mean, "rope": Rope()}
  for bits in (4, 2):
    with pytest.raises(ValueError, match=rf"bits: found {bits} and 2 scales .* expected 8 and 2"):
      enter_token(qkv, live, None, *cache, bits=bits, **how)
  ring = jnp.zeros((4, 1, 2), jnp.int32)
  with pytest.raises(ValueError, match="found several of victim, ring and part, expected one"):
    enter_token(qkv, live, ring[..., 0], *cache, bits=8, ring=ring, **how)


# ---- under Quantised

BASES = {
  "snapkv": settings.example(SnapKV, 12),
  "h2o": H2O(12),
  "streaming_llm": StreamingLLM(12, rope="original"),
  "full": Full(),
}


def taken(method, impl, poisoned=None):
  """Outputs and the cache after steps, one row idle in two of them, and the reference's prompt."""
  stream = Stream.random(11)
  stream = stream if poisoned is None else stream.poisoned(*poisoned)
  prompt, layer = (
    Layer(method, stream, 64, env=Env(4, impl=which, tile=4)) for which in ("reference", impl)
  )
  at = np.array([22, 9])
  prompt.prefill(at)
  layer.cache, outs = prompt.cache, []
  for step in range(6):
    live = np.array([True, step not in (1, 2)])
    outs.append(layer.decode(at, live)[0][live])
    at = at + live
  return outs, layer.cache


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("base", BASES)
def test_steps_equal_the_references(base, bits):
  """Codes, scales and positions to the bit, of whatever stays; K = 3 and G = 3."""
  method = Quantised(BASES[base], bits=bits)
  assert steps.operations(method)["launch enter_codes"] == 1
  found, cache = taken(method, "pallas")
  wanted, reference = taken(method, "reference")
  for a, b in zip(found, wanted, strict=True):
    np.testing.assert_allclose(a, b, atol=2e-5)
  for name, x in reference.slots.items():
    if x.dtype == jnp.float32 and not name.endswith(("_scale", "_zero")):
      np.testing.assert_allclose(cache.slots[name], x, atol=1e-5, err_msg=name)  # statistics
    else:
      np.testing.assert_array_equal(cache.slots[name], x, err_msg=name)
  for name, x in reference.rows.items():
    np.testing.assert_array_equal(cache.rows[name], x, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["k", "v"])
def test_nan_is_loud(which):
  """In its row, from its step on; the other row's outputs are finite."""
  for impl in ("pallas", "reference"):
    outs, cache = taken(Quantised(), impl, poisoned=(which, 0, 23))
    assert np.isnan(cache.slots[f"{which}_scale"][0, :, 23]).all()
    assert np.isfinite(outs[0]).all() and np.isnan(outs[1]).all()
    assert np.isfinite(outs[3][1]).all() and np.isnan(outs[3][0]).all()


@dataclasses.dataclass(frozen=True)
class Doubled(Quantised):
  """Stores values twice as large; what it wraps lends it its name, and nothing else."""

  @functools.wraps(Quantised.insert)
  def insert(self, at, cache, k, v, live):
    return super().insert(at, cache, k, 2 * v, live)


@pytest.mark.parametrize(
  "method",
  [
    Doubled(),
    Quantised(settings.example(VATP, 12)),  # ‖v‖₁ is of the numbers that codes stand for
    Quantised(bits=2),
    Quantised(group=8),
    Quantised(exact_layers=8),
  ],
  ids=["insert", "norm", "2 bits", "groups", "exact"],
)
def test_what_the_kernel_does_not_do_is_inserted_as_it_is_written(method):
  spec = dataclasses.replace(steps.SPEC, head_dim=16)
  _, arguments = steps.decode_step(method, spec=spec)
  at = method.at(Env(spec.layers, Rope(), impl="pallas"), 7)
  made = jax.make_jaxpr(functools.partial(entrance.enter_token, at))(*arguments)
  assert "pallas_call" not in str(made)
