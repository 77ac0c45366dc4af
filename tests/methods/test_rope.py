"""Rotation against complex arithmetic, distances, shifts, and the published scalings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.primitives.rope import Linear, Llama3, LongRope, Rope, Yarn, angles

rotate, shift = (jax.jit(f, static_argnums=0) for f in (Rope.rotate, Rope.shift))


def complex_oracle(x, pos, freq):
  """Pairs (i, i + H/2) as complex numbers, turned by e^(i·pos·freq)."""
  half = x.shape[-1] // 2
  z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * np.asarray(pos)[..., None] * freq)
  return np.concatenate([z.real, z.imag], -1)


def test_rotate_against_complex_numbers():
  rng = np.random.default_rng(0)
  x, pos = rng.normal(size=(2, 5, 8)), rng.integers(0, 4000, (2, 5))
  freq = 10000.0 ** (-np.arange(4) / 4)
  out = rotate(Rope(), np.float32(x), pos)
  np.testing.assert_allclose(out, complex_oracle(x, pos, freq), atol=2e-3)
  small = rotate(Rope(), np.float32(x), pos % 16)
  np.testing.assert_allclose(small, complex_oracle(x, pos % 16, freq), atol=1e-5)


ROPES = [
  Rope(5e5),
  Rope(scaling=Linear(4.0)),
  Rope(5e5, Llama3()),
  Rope(scaling=Yarn(4.0, 2048)),
  Rope(scaling=LongRope(tuple(np.linspace(0.1, 9, 32)))),  # the first pair turns 1.6 times a token
  Rope(partial=0.5),
]
FAR = np.array([32_768, 40_001, 1_000_000, 16_000_000, 16_777_217, 100_000_000])


@pytest.mark.parametrize("rope", ROPES, ids=range(len(ROPES)))
def test_angles_far_away_are_exact(rope):
  """Within 1e-6 of float64's, on either side of 0."""
  freq = rope.frequencies(64)
  for pos in (FAR, -FAR):
    found = angles(jnp.asarray(rope.table(64)), jnp.asarray(pos, jnp.int32)[:, None])
    off = np.angle(np.exp(1j * (np.float64(found) - pos[:, None] * freq)))
    assert np.abs(off).max() < 1e-6
  back = rope.shift(rope.shift(jnp.ones((6, 64)), jnp.array(FAR)), jnp.array(-FAR))
  np.testing.assert_allclose(back, 1, atol=1e-6)


@pytest.mark.parametrize("rope", ROPES, ids=range(len(ROPES)))
def test_angles_of_ordinary_positions_are_float32_products(rope):
  """Bit by bit, as models are trained with and as every cache has them."""
  pos = jnp.array([0, 1, 4095, 32_767, -5, -32_767])[:, None]
  found = jax.jit(angles)(jnp.asarray(rope.table(64)), pos)
  want = np.float32(pos) * np.float32(rope.frequencies(64))
  np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("start", [1_000_000, 16_000_000, 100_000_000])
def test_a_window_far_away_is_that_of_the_first_tokens(start):
  rng = np.random.default_rng(1)
  q, k = np.float32(rng.normal(size=(2, 40, 16)))
  here, there = (
    rotate(Rope(), q, at + np.arange(40)) @ rotate(Rope(), k, at + np.arange(40)).T
    for at in (0, start)
  )
  np.testing.assert_allclose(there, here, atol=2e-5)


@pytest.mark.parametrize("scaling", [None, Linear(4.0), Llama3(), Yarn(4.0, 2048)])
def test_shift_continues_a_rotation(scaling):
  x = np.float32(np.random.default_rng(2).normal(size=(3, 32)))
  rope, pos, by = Rope(scaling=scaling), np.array([3, 50, 200]), np.array([4, -20, 0])
  there = shift(rope, rotate(rope, x, pos), by)
  np.testing.assert_allclose(there, rotate(rope, x, pos + by), atol=1e-4)


def test_linear_divides_positions():
  x = np.ones((1, 8), np.float32)
  a = rotate(Rope(scaling=Linear(2.0)), x, np.array([10]))
  np.testing.assert_allclose(a, rotate(Rope(), x, np.array([5])), atol=1e-6)


def test_llama3_keeps_high_and_divides_low_frequencies():
  plain, scaled = Rope(5e5).frequencies(128), Rope(5e5, Llama3()).frequencies(128)
  wavelength = 2 * np.pi / plain
  high, low = wavelength < 8192 / 4, wavelength > 8192 / 1
  np.testing.assert_array_equal(scaled[high], plain[high])
  np.testing.assert_allclose(scaled[low], plain[low] / 8)
  between = ~(high | low)
  assert between.any() and ((scaled < plain) & (scaled > plain / 8))[between].all()


def test_yarn_over_its_own_context_turns_as_plain_rope():
  assert Rope(1e4, Yarn(1.0, 4096)).magnitude == 1.0 == Rope(1e4).magnitude
  assert Rope(1e4, Yarn(1.0, 4096, attention_factor=0.5)).magnitude == 0.5


def test_yarn_interpolates_slow_pairs_and_scales_attention():
  rope = Rope(1e4, Yarn(8.0, 4096))
  plain, scaled = Rope(1e4).frequencies(128), rope.frequencies(128)
  np.testing.assert_allclose(scaled[0], plain[0])
  np.testing.assert_allclose(scaled[-1], plain[-1] / 8)
  assert rope.magnitude == pytest.approx(0.1 * np.log(8) + 1)
  x = np.ones((1, 128), np.float32)
  norm = np.linalg.norm(rotate(rope, x, np.array([7])))
  assert float(norm) == pytest.approx(rope.magnitude * np.sqrt(128), rel=1e-5)


def test_dtype_is_kept_and_odd_heads_refused():
  assert Rope().rotate(jnp.ones((1, 8), jnp.bfloat16), jnp.array([3])).dtype == jnp.bfloat16
  with pytest.raises(ValueError, match="head_dim: found 7"):
    Rope().frequencies(7)
