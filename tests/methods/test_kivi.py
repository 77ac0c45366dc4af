"""KIVI: worked examples, a NumPy float64 oracle, and what may lie beneath it."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import KIVI, METHODS, PSAW, Cache, Env, Full, Quest, settings
from kvjax.primitives import codes as quantised
from kvjax.testing.layer import Layer, Stream, rotate, softmax_average
from tests.compiled import compiled
from tests.oracles import begun

levels, of_levels = compiled(quantised.levels), compiled(quantised.of_levels)
CLOSE = 2e-5  # float32 against NumPy's float64
GROUP, R = 4, 8


# ---- groups


def numbers(x, bits, dtype=jnp.float32):
  """What the codes of groups along the last axis stand for."""
  code, parts = levels(np.float32(x), bits, dtype)
  return of_levels(code, *parts)


def test_worked_examples():
  """(x − z) / a of −1 0 1 5 is 0 ½ 1 3, and half goes to the even one."""
  for dtype in (jnp.float32, jnp.float16):
    code, (scale, zero) = levels(np.float32([-1, 0, 1, 5]), 2, dtype)
    assert code.tolist() == [0, 0, 1, 3] and (float(scale), float(zero)) == (2, -1)
    assert scale.dtype == zero.dtype == dtype
    np.testing.assert_array_equal(numbers([-1, 0, 1, 5], 2, dtype), [-1, -1, 1, 5])
    np.testing.assert_array_equal(numbers([0, 1, 2, 3], 2, dtype), [0, 1, 2, 3])


def test_a_group_of_equal_numbers_is_its_zero_point():
  code, (scale, zero) = levels(np.full((3, 4), 0.3, np.float32), 2, jnp.float16)
  assert not np.any(code) and not np.any(scale)
  np.testing.assert_array_equal(zero, np.float16([0.3] * 3))


def own_numbers(x, bits):
  """Groups along the last axis as stored, in float64, with z and a in float16."""
  x = np.asarray(x, np.float64)
  if x.size == 0:
    return x
  low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
  z = np.float64(np.float16(low))
  a = np.float64(np.float16((high - low) / (2**bits - 1)))
  code = np.clip(np.rint((x - z) / np.where(a > 0, a, 1)), 0, 2**bits - 1)
  return np.where(a > 0, code, 0) * a + z


@pytest.mark.parametrize("bits", [4, 2])
def test_codes_are_half_a_step_away_at_most(bits):
  """And what rounding z and a to 16 bits moves; rounding again changes nothing more than that."""
  x = np.float32(np.random.default_rng(bits).normal(size=(3, 50, 32)) * 3 + 1)
  exact, stored = (np.asarray(numbers(x, bits, kind)) for kind in (jnp.float32, jnp.float16))
  np.testing.assert_allclose(stored, own_numbers(x, bits), atol=CLOSE)
  step = (x.max(-1) - x.min(-1))[..., None] / (2**bits - 1)
  assert (np.abs(exact - x) <= step / 2 * (1 + 1e-5)).all()
  moved = np.spacing(np.float16(np.abs(x).max(-1, keepdims=True))).astype(np.float32)
  assert (np.abs(stored - x) <= step / 2 + moved).all()
  np.testing.assert_allclose(numbers(exact, bits), exact, atol=CLOSE)


@pytest.mark.core
@pytest.mark.parametrize("size", [3e4, 1e5, 1e20, 3e38])
@pytest.mark.parametrize("bits", [4, 2])
def test_any_finite_number_has_a_code(bits, size):
  """Numbers that float16 does not hold stay half a step away at most; small ones beside them, too.

  float16 keeps 11 bits of z and a, of the largest number's size.
  """
  method, x = KIVI(bits=bits), np.random.default_rng(bits).uniform(-1, 1, (6, 32)) * size
  x[0] /= size  # a group of plain numbers, which has no power
  x[1] = size
  x = np.float32(x)
  v = x[None, None]
  leaves = jax.jit(method._codes_of_values)(v)
  cache = Cache({"k": leaves["v"], **leaves}, {}, {})
  found = np.asarray(jax.jit(method._values)(cache), np.float64)[0, 0]
  step = np.ptp(np.float64(x), axis=-1, keepdims=True) / (2**bits - 1)
  moved = np.abs(np.float64(x)).max(-1, keepdims=True) * 2.0**-10
  assert (np.abs(found - x) <= step / 2 + moved).all()
  power = np.asarray(leaves["v_power"])[0, 0, :, 0]
  assert power[0] == 0 and (power[1:] == max(0, np.frexp(size)[1] - 15)).all()


# ---- a layer


def blocks(x, bits):
  """Keys [T, H] of whole groups: per channel, GROUP tokens together."""
  parted = np.reshape(x, (-1, GROUP, x.shape[-1])).swapaxes(1, 2)
  return own_numbers(parted, bits).swapaxes(1, 2).reshape(x.shape)


def stored(stream, b, h, count, rounded, bits):
  """What a head's first `count` tokens are: keys rounded up to one, values but for the newest R."""
  exact = np.stack([rotate(stream.k[b, h, p], p) for p in range(count)])
  keys = np.concatenate([blocks(np.float32(exact[:rounded]), bits), exact[rounded:]])
  values = np.float64(stream.v[b, h, :count])
  old = max(0, count - R)
  parted = values[:old].reshape(old, values.shape[1] // GROUP, GROUP)
  values[:old] = own_numbers(parted, bits).reshape(old, values.shape[1])
  return keys, values


def attended(stream, b, h, g, t, keys, values):
  q = rotate(stream.q[b, h, g, t], t)
  return softmax_average(keys @ q / np.sqrt(len(q)), values)


@pytest.mark.core(1)
@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("impl", ["reference", "pallas"])
def test_steps_equal_the_oracle(bits, impl):
  """Ragged rows, one of them shorter than R; each completes blocks at steps of its own."""
  stream, lengths = Stream.random(bits), [22, 5]
  method = KIVI(bits=bits, group=GROUP, residual=R)
  layer = Layer(method, stream, env=Env(4, impl=impl, tile=4))
  plain = Layer(Full(), stream)
  np.testing.assert_allclose(layer.prefill(lengths), plain.prefill(lengths), atol=CLOSE)
  for step in range(12):
    at = [n + step for n in lengths]
    out, _ = layer.decode(at)
    for b, h, g in np.ndindex(out.shape[:3]):
      # A block of keys that this token completes is still exact.
      held = stored(stream, b, h, at[b] + 1, at[b] // R * R, bits)
      np.testing.assert_allclose(out[b, h, g], attended(stream, b, h, g, at[b], *held), atol=CLOSE)
    np.testing.assert_array_equal(layer.cache.rows["rounded"], [(n + 1) // R * R for n in at])


def further_turn(stream, layer, start, count):
  """Outputs of a turn, and what the oracle has: the past as stored, the turn itself exact."""
  out = layer.prefill(count, start=start, past=None)
  want = np.zeros_like(out)
  for b, h, g in np.ndindex(out.shape[:3]):
    n = start[b]
    keys, values = stored(stream, b, h, n, n // R * R, layer.method.bits)
    for i in range(count[b]):
      own = np.arange(n, n + i + 1)
      k = np.concatenate([keys, rotate(stream.k[b, h, own], own)])
      v = np.concatenate([values, stream.v[b, h, own]])
      want[b, h, g, i] = attended(stream, b, h, g, n + i, k, v)
  for b, n in enumerate(count):
    np.testing.assert_allclose(out[b, ..., :n, :], want[b, ..., :n, :], atol=CLOSE)


@pytest.mark.slow
def test_further_turns_complete_blocks_that_waited():
  """Of 16, 3 tokens onto 5, onto none: blocks of old and new keys, and steps after them."""
  stream = Stream.random(7, batch=3)
  layer = Layer(KIVI(bits=2, group=GROUP, residual=R), stream)
  seen = np.array([16, 3, 9])
  layer.prefill(seen)
  np.testing.assert_array_equal(layer.cache.rows["rounded"], [16, 0, 8])
  for count in ([5, 7, 0], [9, 1, 19]):
    further_turn(stream, layer, seen, count)
    seen = seen + count
    np.testing.assert_array_equal(layer.cache.rows["rounded"], seen // R * R)
  out, _ = layer.decode(seen)
  for b, h, g in np.ndindex(out.shape[:3]):
    held = stored(stream, b, h, seen[b] + 1, seen[b] // R * R, 2)
    np.testing.assert_allclose(out[b, h, g], attended(stream, b, h, g, seen[b], *held), atol=CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_stored_does_not_depend_on_how_tokens_came(dtype):
  """In one prompt, in two turns, or in steps: codes, rings and counts are the same, bit by bit."""
  stream = Stream.random(17)

  def layer():
    made = Layer(KIVI(bits=2, group=GROUP, residual=R), stream)
    made.cache = Cache.empty(made.method, stream.spec(64, dtype=jnp.dtype(dtype)), 1)
    return made

  once, turns, steps = (layer() for _ in range(3))
  once.prefill([22, 17])
  turns.prefill([10, 8], tokens=22)
  turns.prefill([12, 9], start=[10, 8], past=None)
  steps.prefill([19, 14], tokens=22)
  for step in range(3):
    steps.decode([19 + step, 14 + step])
  chex.assert_trees_all_equal(turns.cache, once.cache)
  chex.assert_trees_all_equal(steps.cache, once.cache)


@pytest.mark.slow
def test_a_full_cache_takes_no_more():
  """Tokens beyond the last slot are dropped, as by the full cache, and the ring keeps its own."""
  stream = Stream.random(8)
  layer = begun(KIVI(group=GROUP, residual=R), stream, [16, 18], capacity=18)
  layer.decode([16, 18])
  before = jax.tree.map(np.asarray, {**layer.cache.slots, **layer.cache.heads})
  for t in (17, 18, 19, 20):
    layer.decode([t, t + 2])
  after = jax.tree.map(np.asarray, {**layer.cache.slots, **layer.cache.heads})
  for name, x in before.items():
    np.testing.assert_array_equal(after[name][1], x[1], err_msg=name)
  np.testing.assert_array_equal(layer.cache.used, [18, 18])


@pytest.mark.slow
def test_bounds_of_quest_are_of_keys_as_they_came():
  """An idle row's stay so when its newest keys have become codes."""
  stream = Stream.random(11)
  method = KIVI(Quest(8, page=4, dense_layers=0), group=GROUP, residual=R)
  layer = begun(method, stream, [18, 9])
  for step in range(7):
    layer.decode([18 + step, 9 + step])
    layer.decode([19 + step, 10 + step], live=[False, False])
  for b, h in np.ndindex(2, 3):
    for page in range(4):
      keys = np.stack([rotate(stream.k[b, h, p], p) for p in range(4 * page, 4 * page + 4)])
      for name, bound in (("key_min", keys.min(0)), ("key_max", keys.max(0))):
        held = layer.cache.heads[name][b, h, page]
        np.testing.assert_allclose(held, bound, atol=CLOSE)


BENEATH = (
  *("quest", "etf", "full", "topk_oracle", "infllm_v2", "double_sparsity", "hshare", "cis"),
  *("psaw", "cpe", "twilight"),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", BENEATH)
def test_codes_are_the_same_over_what_keeps_every_token(name):
  """Over whatever keeps all tokens in order, a cache stores what it stores over the full cache."""
  base, stream, lengths = settings.example(METHODS[name], 12), Stream.random(12), [22, 9]
  layers = [
    begun(KIVI(x, group=GROUP, residual=R), stream, lengths, layer=3) for x in (base, Full())
  ]
  for step in range(3):
    for layer in layers:
      out, _ = layer.decode([n + step for n in lengths])
      assert np.isfinite(out).all()
  of_base, of_full = (x.cache for x in layers)
  for shelf in ("slots", "heads", "rows"):
    for leaf, x in getattr(of_full, shelf).items():
      np.testing.assert_array_equal(getattr(of_base, shelf)[leaf], x, err_msg=leaf)


@pytest.mark.parametrize(("bits", "share"), [(4, 0.364), (2, 0.24)])
def test_planned_bytes(bits, share):
  """Codes; scale, zero point and power for 32 numbers, 5 bytes; the newest, and the position."""
  spec = kvjax.CacheSpec(2, 4096, 4, 2, 128, 3)
  method = KIVI(bits=bits)
  planned = kvjax.plan_memory(spec, method).device
  heads, layers, rows = 2 * 4, 3, 2
  codes = 4096 * 2 * (128 * bits // 8 + 128 // 32 * 5)
  newest = 128 * 2 * 128 * 2
  assert planned == layers * (heads * (codes + newest + 4096 * 4) + rows * 3 * 4)
  whole = kvjax.plan_memory(spec, Full()).device
  assert planned / whole == pytest.approx(share, abs=0.005)


@pytest.mark.slow
def test_a_window_of_the_outermost_method_holds():
  """PSAW over KIVI sees what KIVI over PSAW sees."""
  stream = Stream.random(13)
  psaw = PSAW(Full(), sinks=2, phi=0.5, start=0.25)
  inner = KIVI(psaw, group=GROUP, residual=R)
  outer = PSAW(KIVI(group=GROUP, residual=R), sinks=2, phi=0.5, start=0.25)
  layers = [Layer(x, stream, layer=3) for x in (inner, outer)]
  outs = [layer.prefill([22, 9]) for layer in layers]
  outs += [layer.decode([22, 9])[0] for layer in layers]
  np.testing.assert_array_equal(outs[0], outs[1])
  np.testing.assert_array_equal(outs[2], outs[3])
