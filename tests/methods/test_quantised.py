"""Codes of 8, 4 and 2 bits: worked examples, a NumPy float64 oracle, what may lie beneath them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import (
  ART,
  H2O,
  METHODS,
  PSAW,
  TOVA,
  Env,
  Full,
  Measured,
  Quantised,
  Quest,
  Rope,
  SnapKV,
  settings,
)
from kvjax.ops import decode
from kvjax.primitives import codes as quantised
from kvjax.primitives.codes import Codes
from kvjax.testing.layer import Layer, Stream, rotate, softmax_average
from tests.coded import kept, own_codes, own_rounded
from tests.compiled import compiled
from tests.oracles import begun, held
from tests.oracles import keys as rotated

dequantise, quantise = compiled(quantised.dequantise), compiled(quantised.quantise)
packed, unpacked = compiled(quantised.packed), compiled(quantised.unpacked)
CLOSE = 1e-5  # float32 against NumPy's float64


def test_worked_examples():
  # a = 2 / 127: ½ / a = 31.75, and 1 / a = 63.5 goes to the even one.
  codes = quantise(jnp.asarray([0.5, -2, 1]), 8)
  np.testing.assert_array_equal(codes.words, [32, -127, 64])
  np.testing.assert_allclose(codes.scale, 2 / 127, rtol=1e-6)
  # Four bits: z = −1 and a = 30 / 15 = 2; 0, 1 and 3 are half-way: codes 0, 1 and 2.
  codes = quantise(jnp.asarray([-1.0, 29, 0, 1, 2, 4]), 4)
  np.testing.assert_array_equal(unpacked(codes.words, 4), [0, 15, 0, 1, 2, 2])
  assert (float(codes.scale), float(codes.zero)) == (2, -1)
  np.testing.assert_array_equal(dequantise(codes, 4), [-1, 29, -1, 1, 3, 3])


def test_groups_have_scales_of_their_own():
  """Two bits, four channels a group: a = 2 and z = −1, then a = 1 and z = 0."""
  codes = quantise(jnp.asarray([-1.0, 0, 1, 5, 3, 2, 1, 0]), 2, jnp.int8, 4)
  np.testing.assert_array_equal(unpacked(codes.words, 2), [0, 0, 1, 3, 3, 2, 1, 0])
  assert codes.scale.tolist() == [2, 1] and codes.zero.tolist() == [-1, 0]
  np.testing.assert_array_equal(dequantise(codes, 2), [-1, -1, 1, 5, 3, 2, 1, 0])


def test_integers_survive_and_constants_have_no_scale():
  for bits, most in ((8, 127), (4, 15), (2, 3)):
    whole = jnp.asarray([[0, 1, 2, most], [most, 2, 1, 0]], jnp.float32)
    np.testing.assert_array_equal(dequantise(quantise(whole, bits), bits), whole)
    constant = jnp.full((4,), 0.0 if bits == 8 else 7.5)
    codes = quantise(constant, bits)
    assert float(codes.scale) == 0 and not codes.words.any()
    np.testing.assert_array_equal(dequantise(codes, bits), constant)


def test_words_hold_channels_a_stride_apart():
  # Four codes of 4 bits in one word of 16: 1 + 2·16 + 3·256 + 15·4096 − 2¹⁶.
  words = packed(jnp.asarray([1, 2, 3, 15]), 4, jnp.int16)
  np.testing.assert_array_equal(words, [1 + 32 + 768 + 15 * 4096 - 2**16])
  # Two words of 8 bits: channels 0 and 2, then 1 and 3.
  np.testing.assert_array_equal(packed(jnp.asarray([1, 2, 3, 4]), 4, jnp.int8), [1 + 48, 2 + 64])


@pytest.mark.core(4)
@pytest.mark.parametrize("group", [0, 8, 64])
@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_codes_equal_the_oracles(bits, dtype, group):
  """Numbers of 16 bits are often half-way between two codes; quantising again changes nothing."""
  x = jnp.asarray(np.random.default_rng(bits).normal(size=(5, 3, 40, 64)) * 3 + 1, dtype)
  parted = np.float64(np.asarray(x)).reshape(5, 3, 40, -1, group or 64)
  code, a, _ = own_codes(parted, bits)
  code, step = (np.broadcast_to(y, parted.shape).reshape(x.shape) for y in (code, a))
  a = a[..., 0] if group == 8 else a[..., 0, 0]
  for word in (jnp.int8, jnp.int16):
    codes = quantise(x, bits, word, group)
    np.testing.assert_array_equal(unpacked(codes.words, bits), code)
    np.testing.assert_allclose(codes.scale, a, rtol=1e-6)
    back = dequantise(codes, bits)
    assert (np.abs(back - np.float64(x)) <= step / 2 * (1 + 1e-4)).all()
    np.testing.assert_array_equal(quantise(back, bits, word, group).words, codes.words)


def test_what_is_not_finite_is_loud():
  for bad in (jnp.nan, jnp.inf):
    codes = quantise(jnp.asarray([1.0, bad, 2, 3]), 8)
    assert np.isnan(dequantise(codes, 8)).all()
  assert isinstance(codes, Codes) and codes.zero is None


# ---- a layer


def attended(stream, b, h, g, t, first, positions, bits, group=0):
  """A decode step's output over positions: the query in 8 bits."""
  keys, values = kept(stream, b, h, first, positions, bits, group)
  q = own_rounded(rotate(stream.q[b, h, g, t], t), 8)
  return softmax_average(keys @ q / np.sqrt(len(q)), values)


@pytest.mark.core(1)
@pytest.mark.parametrize("impl", ["reference", "pallas"])
@pytest.mark.parametrize(
  ("base", "bits"), [(H2O(12), 8), (Full(), 4), (Full(), 8), (TOVA(9), 4), (SnapKV(12, 4), 8)]
)
def test_a_step_attends_to_what_codes_stand_for(base, bits, impl):
  """Of whatever tokens the base has kept; a prompt is attended to as it is."""
  stream, lengths = Stream.random(4), [22, 9]
  layer = Layer(Quantised(base, bits=bits), stream, env=Env(4, impl=impl, tile=4))
  plain = Layer(base, stream)
  np.testing.assert_allclose(layer.prefill(lengths), plain.prefill(lengths), atol=2e-5)
  for step in range(6):
    at = [n + step for n in lengths]
    out, _ = layer.decode(at)
    for b, h, g in np.ndindex(out.shape[:3]):
      want = attended(stream, b, h, g, at[b], lengths[b], held(layer.cache, b, h), bits)
      np.testing.assert_allclose(out[b, h, g], want, atol=2e-5)


@pytest.mark.slow
def test_a_further_turn_sees_codes_of_the_past_and_itself_as_it_is():
  stream = Stream.random(5)
  layer = begun(Quantised(bits=4), stream, [10, 6])
  out = layer.prefill([5, 3], start=[10, 6], past=None)
  for b, (start, count) in enumerate(((10, 5), (6, 3))):
    for h, g, i in np.ndindex(3, 3, count):
      own = np.arange(start, start + i + 1)
      keys, values = kept(stream, b, h, start, np.arange(start), 4)
      keys = np.concatenate([keys, rotate(stream.k[b, h, own], own)])
      values = np.concatenate([values, stream.v[b, h, own]])
      q = rotate(stream.q[b, h, g, start + i], start + i)
      want = softmax_average(keys @ q / np.sqrt(len(q)), values)
      np.testing.assert_allclose(out[b, h, g, i], want, atol=CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "group"), [(2, 8), (2, 0), (8, 4)])
def test_two_bits_and_groups_in_a_layer(bits, group):
  """Under H2O, whose evictions move codes and scales; the kernel, asked for by name, refuses."""
  stream, lengths = Stream.random(14), [22, 9]
  method = Quantised(H2O(12), bits=bits, group=group)
  layer = begun(method, stream, lengths)
  for step in range(4):
    at = [n + step for n in lengths]
    out, _ = layer.decode(at)
    for b, h, g in np.ndindex(out.shape[:3]):
      want = attended(stream, b, h, g, at[b], lengths[b], held(layer.cache, b, h), bits, group)
      np.testing.assert_allclose(out[b, h, g], want, atol=2e-5)
  named = Layer(method, stream, env=Env(4, impl="pallas", tile=4))
  beyond = "bits = 2" if bits == 2 else r"a scale for each group of channels \(group\)"
  with pytest.raises(NotImplementedError, match=f"attend_quantised: Quantised has {beyond}"):
    named.decode(lengths)


@pytest.mark.slow
def test_auto_takes_the_reference_of_codes_that_the_kernel_does_not_take(monkeypatch):
  """Where "auto" would take a kernel: as it is told in the table."""
  from kvjax.ops import decode as step

  asked = []

  def choose(operation, impl, *_):
    asked.append(operation)
    return "pallas" if impl == "auto" else impl

  stream = Stream.random(15)
  layers = [
    begun(Quantised(bits=2), stream, [9, 4], env=Env(3, impl=x)) for x in ("auto", "reference")
  ]
  monkeypatch.setattr(step, "choose", choose)
  outs = [layer.decode([9, 4])[0] for layer in layers]
  assert "attend_quantised" in asked
  np.testing.assert_array_equal(*outs)


REFUSED = {
  "r_kv": "replaces insert, and so does",  # which makes room first
  "infllm": "replaces stage, and so does",  # which streams
  "ltri": "replaces stage, and so does",
  **dict.fromkeys(("quantised", "kivi"), "replaces insert, and so does"),  # codes of codes
  "adakv": "expected a base with slots",
  "duo_attention": "expected a base with slots",
}


TOGETHER = {
  "art over h2o": ART(H2O(12), patience=1),  # which puts slots in order
  "quest over snapkv": Quest(8, page=4, base=SnapKV(12, 4), dense_layers=0),
}


@pytest.mark.kin
@pytest.mark.core(1)
@pytest.mark.rest
@pytest.mark.parametrize(("bits", "group"), [(8, 0), (4, 0), (2, 8)])
@pytest.mark.parametrize("name", [*METHODS, *TOGETHER])
def test_codes_move_with_their_tokens(name, bits, group):
  """Under every method: each slot has the codes of the token whose position it has, and no other.

  The others are refused, by the move that is their own.
  """
  base = TOGETHER[name] if name in TOGETHER else settings.example(METHODS[name], 12)
  if name in REFUSED:
    with pytest.raises(ValueError, match=REFUSED[name]):
      Quantised(base)
    return
  stream, lengths = Stream.random(6), [22, 9]
  layer = begun(Quantised(base, bits=bits, group=group), stream, lengths, layer=3)
  for step in range(4):
    out, _ = layer.decode([n + step for n in lengths])
    assert np.isfinite(out).all()
  slots = jax.tree.map(np.asarray, layer.cache.slots)
  pos = slots["pos"]
  assert (pos >= 0).any()
  for b, h, s in np.argwhere(pos >= 0):
    key = rotate(stream.k[b, h, pos[b, h, s]], pos[b, h, s])
    key -= rotated(stream, b, h, range(lengths[b])).mean(0)
    for what, exact in (("k", key), ("v", stream.v[b, h, pos[b, h, s]])):
      parts = (slots.get(f"{what}_{part}") for part in ("scale", "zero"))
      held = Codes(*(x if x is None else x[b, h, s] for x in (slots[what], *parts)))
      parted = exact.reshape(-1, group or exact.size)
      error = np.abs(np.reshape(dequantise(held, bits), parted.shape) - parted)
      assert (error <= own_codes(parted, bits)[1] / 2 * (1 + 1e-4)).all(), (what, b, h, s)


@pytest.mark.slow
def test_summaries_are_of_what_is_stored():
  """Quest's pages: the least and largest of keys as their codes have them."""
  stream = Stream.random(7)
  layer = begun(Quantised(Quest(8, page=4, dense_layers=0), bits=4), stream, [8, 8])
  layer.decode([8, 8])
  for b, h in np.ndindex(2, 3):
    keys, _ = kept(stream, b, h, 8, range(4, 8), 4)
    np.testing.assert_allclose(layer.cache.heads["key_min"][b, h, 1], keys.min(0), atol=CLOSE)
    np.testing.assert_allclose(layer.cache.heads["key_max"][b, h, 1], keys.max(0), atol=CLOSE)
  # Settling the cache as it is stored makes the same of its codes, and leaves these as they are.
  count = jnp.full(2, 9)
  settle = jax.jit(functools.partial(layer.method.settle, layer.at))
  again = settle(layer.cache, kvjax.Prompt(count, count, None, 9, 0))
  for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(layer.cache), strict=True):
    np.testing.assert_array_equal(x, y)


@pytest.mark.slow
def test_what_is_measured_beneath_codes_is_of_their_numbers():
  """The top layer of PSAW hides the older half but for one sink: attention to keys as stored."""
  stream = Stream.random(16)
  psaw = PSAW(Full(), sinks=1, phi=0.5, start=0.25)
  layer = begun(Quantised(Measured(psaw), bits=4), stream, [22, 9], layer=3)
  _, aux = layer.decode([22, 9])
  for b, t in enumerate((22, 9)):
    hidden = np.arange(1, (t + 1) // 2 - 1)
    for h, g in np.ndindex(3, 3):
      keys, _ = kept(stream, b, h, t, range(t + 1), 4)
      weight = np.exp(keys @ rotate(stream.q[b, h, g, t], t) / 4)
      want = weight[hidden].sum() / weight.sum()
      np.testing.assert_allclose(aux["dropped"][b, h, g], want, atol=CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
def test_large_channels_that_all_keys_share_take_no_levels(bits):
  """One channel of all keys is near 300, as in Qwen2.5's first layer: errors stay as they were.

  With a soft cap the mean would matter: there is none, and scales grow.
  """
  stream, errors = Stream.random(16), []
  for large, cap in ((0, None), (300, None), (300, 2.0)):
    stream.k[..., 3] += large  # which turns by less than a thousandth
    layer = Layer(Quantised(bits=bits), stream, env=Env(4, Rope(1e12), soft_cap=cap))
    plain = Layer(Full(), stream, env=Env(4, Rope(1e12)))
    layer.prefill([22, 9]), plain.prefill([22, 9])
    mean = np.asarray(layer.cache.heads["k_mean"])
    assert (np.abs(mean).max() > 200) == (large > 0 and cap is None)
    numbers = jax.jit(layer.method._of_base)(layer.cache).slots["k"]
    there = np.asarray(layer.cache.pos) >= 0
    errors.append(np.abs(np.asarray(numbers) - plain.cache.slots["k"])[there].max())
    stream.k[..., 3] -= large
  assert errors[1] < 3 * errors[0] < errors[2] / 3


@pytest.mark.slow
def test_rows_without_a_prompt_have_no_mean():
  """Nor do later chunks change one, of rows that had some."""
  stream = Stream.random(17)
  layer = Layer(Quantised(), stream)
  layer.decode([0, 0], live=[True, False])
  layer.prefill([6, 9], start=[1, 0], past=None)
  mean = np.asarray(layer.cache.heads["k_mean"])
  assert not mean[0].any()
  for h in range(3):
    np.testing.assert_allclose(mean[1, h], rotated(stream, 1, h, range(9)).mean(0), atol=CLOSE)
  layer.prefill([5, 4], start=[7, 9], past=None)
  np.testing.assert_array_equal(layer.cache.heads["k_mean"], mean)


@pytest.mark.slow
def test_first_layers_may_stay_exact():
  stream = Stream.random(8)
  method = Quantised(exact_layers=2)
  for at, coded in ((1, False), (2, True)):
    layer, plain = Layer(method, stream, layer=at), Layer(Full(), stream, layer=at)
    layer.prefill([9, 4]), plain.prefill([9, 4])
    assert ("k_scale" in layer.cache.slots) == coded
    out, want = layer.decode([9, 4])[0], plain.decode([9, 4])[0]
    assert (np.abs(out - want).max() > 1e-4) == coded


@pytest.mark.parametrize(
  ("bits", "group", "per_slot"),
  [(8, 0, 2 * 128 + 8 + 4), (4, 0, 128 + 16 + 4), (2, 32, 64 + 4 * 16 + 4)],
)
def test_planned_bytes(bits, group, per_slot):
  """Codes and float32 scales (and zero points), and the position."""
  spec = kvjax.CacheSpec(2, 512, 4, 2, 128, 3)
  method = Quantised(bits=bits, group=group)
  planned = kvjax.plan_memory(spec, method).device
  tokens, rows = 3 * 2 * 4 * 512, 3 * 2 * (2 * 4 + 4 * 4 * 128)
  assert planned == tokens * per_slot + rows
  whole = kvjax.plan_memory(spec, Full()).device
  assert planned / whole == pytest.approx({8: 0.52, 4: 0.29, 2: 0.255}[bits], abs=0.006)


def test_auto_runs_no_kernel_on_numbers_made_for_it():
  """On a GPU: a kernel that wants keys in memory would make them all, to read a few."""
  at = Quantised(Quest()).at(Env(2, impl="auto"), 1)
  assert decode.sparing(at).env.impl == "reference"
  named = Quantised(Quest()).at(Env(2, impl="pallas"), 1)
  assert decode.sparing(named) is named
