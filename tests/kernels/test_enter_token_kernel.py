"""enter_token against a loop in NumPy float64, over head counts, full caches and idle rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import Rope
from kvjax.kernels.insertion.enter_token import enter_token
from kvjax.ops import extremes
from kvjax.testing.layer import rotate
from tests.kernels import listed
from tests.kernels.decode_oracle import same_bits

SLOTS = 7


def operands(seed, heads, groups, head_dim, dtype=jnp.float32):
  """Four rows: empty, half full, full, and idle."""
  rng = np.random.default_rng(seed)
  sizes = [(4, heads, groups, head_dim), *[(4, heads, head_dim)] * 2]
  q, k, v = (jnp.asarray(rng.normal(size=size), dtype) for size in sizes)
  cache = [jnp.asarray(rng.normal(size=(4, heads, SLOTS, head_dim)), dtype) for _ in range(2)]
  used = np.array([0, 3, SLOTS, 4], np.int32)
  seen = np.array([0, 3, 16_000_900, 4], np.int32)  # one far away
  pos = np.where(np.arange(SLOTS) < used[:, None], np.arange(SLOTS), -1)
  pos = np.broadcast_to(pos[:, None], (4, heads, SLOTS)).astype(np.int32)
  victim = rng.integers(0, SLOTS, (4, heads)).astype(np.int32)
  live = np.array([1, 1, 1, 0], bool)
  return q, k, v, live, victim, *cache, pos, seen, used


@functools.cache
def enter(rope, rings=False):
  """enter_token, jitted, on separate q, k and v; the last operand may be a ring."""

  def run(q, k, v, *rest):
    rest, ring = (rest[:-1], rest[-1]) if rings else (rest, None)
    qkv = jnp.concatenate([q, k[:, :, None], v[:, :, None]], 2)
    return enter_token(qkv, *rest, rope=rope, ring=ring)

  return jax.jit(run)


def oracle(q, k, v, live, victim, cache_k, cache_v, pos, seen, used):
  """The same, head by head."""
  q, k, v, cache_k, cache_v = (np.array(x, np.float64) for x in (q, k, v, cache_k, cache_v))
  pos, seen, used = (np.array(x) for x in (pos, seen, used))
  for b in range(len(seen)):
    q[b] = rotate(q[b], seen[b])
    for h in range(k.shape[1]):
      slot = used[b] if used[b] < SLOTS else (SLOTS if victim is None else victim[b, h])
      if live[b] and slot < SLOTS:
        cache_k[b, h, slot], cache_v[b, h, slot] = rotate(k[b, h], seen[b]), v[b, h]
        pos[b, h, slot] = seen[b]
    if live[b]:
      used[b] += used[b] < SLOTS
      seen[b] += 1
  return q, cache_k, cache_v, pos, seen, used


@pytest.mark.core(1)
@pytest.mark.parametrize(("heads", "rows"), [(6, 2), (3, 1)])
def test_heads_that_share_slots(heads, rows):
  """Every head's token goes to the slot that it is told, of the row that it shares."""
  q, k, v, live, _, *_, seen, used = operands(5, heads, 3, 64)
  rng, sharers = np.random.default_rng(5), heads // rows
  cache = [jnp.asarray(rng.normal(size=(4, rows, 20, 64)), jnp.float32) for _ in range(2)]
  pos = rng.integers(0, 99, (4, rows, 20)).astype(np.int32)
  slot = np.stack([rng.permutation(20)[:heads] for _ in range(4)]).astype(np.int32)
  slot[1, 0] = 20  # nowhere
  qkv = jnp.concatenate([q, k[:, :, None], v[:, :, None]], 2)
  room = int(used[1]) + 1  # for one more token in the second row
  arrays = qkv, live, slot, *cache, pos, seen, used
  out = jax.jit(functools.partial(enter_token, rope=Rope(), room=room))(*arrays)
  want = [np.array(x) for x in (*cache, pos)]
  for b, h in np.ndindex(4, heads):
    if live[b] and slot[b, h] < 20:
      where = b, h // sharers, slot[b, h]
      new = rotate(k[b, h], seen[b]), v[b, h], seen[b]
      for x, value in zip(want, new, strict=True):
        x[where] = value
  for found, expected in zip(out[1:4], want, strict=True):
    # Angles of positions up to 900 are rounded to float32.
    np.testing.assert_allclose(found, expected, atol=2e-6 * 900)
  np.testing.assert_array_equal(out[4], seen + live)
  np.testing.assert_array_equal(out[5], used + (live & (used < room)))
  with pytest.raises(ValueError, match=r"cache_k: found .* expected as many rows, or a divisor"):
    jax.jit(functools.partial(enter_token, rope=Rope()))(*arrays)


@pytest.mark.core(1)
@pytest.mark.parametrize("evicts", [True, False])
@pytest.mark.parametrize(
  ("heads", "groups", "head_dim"), [(1, 1, 64), (3, 3, 64), (8, 4, 128), (3, 1, 96), (1, 16, 256)]
)
def test_against_oracle(heads, groups, head_dim, evicts):
  arrays = list(operands(1, heads, groups, head_dim))
  if not evicts:
    arrays[4] = None
  out, want = enter(Rope())(*arrays), oracle(*arrays)
  same_bits(out, enter(Rope())(*arrays))
  for got, right in zip(out[:3], want[:3], strict=True):
    np.testing.assert_allclose(got, right, atol=2e-4)  # float32 angles of up to 900 radians
  for got, right in zip(out[3:], want[3:], strict=True):
    np.testing.assert_array_equal(got, right)


def test_rings_name_their_victims():
  """As a victim does that is the ring's next slot, by a count from the position that closed it."""
  arrays = list(operands(6, 3, 2, 24))
  rings, arrays[4] = listed.rings_and_victims(arrays[-2], SLOTS)
  assert len(set(arrays[4][2])) == 3
  want = enter(Rope())(*arrays)
  arrays[4] = None
  same_bits(enter(Rope(), True)(*arrays, rings), want)


@pytest.mark.slow
def test_parts_of_a_cache_are_entered_as_the_whole():
  """Slots split over devices: one writes, all of them count; a full cache drops the token."""
  arrays = list(operands(7, 3, 2, 24))
  arrays[4] = None
  want = oracle(*arrays)
  q, k, v, live, _, cache_k, cache_v, pos, seen, used = arrays
  qkv = jnp.concatenate([q, k[:, :, None], v[:, :, None]], 2)
  found = []
  for first, last in ((0, 2), (2, 3), (3, SLOTS)):
    slots = (x[:, :, first:last] for x in (cache_k, cache_v, pos))
    run = functools.partial(enter_token, rope=Rope(), part=(jnp.int32(first), SLOTS))
    found.append(jax.jit(run)(qkv, live, None, *slots, seen, used))
  for part in found:
    np.testing.assert_allclose(part[0], want[0], atol=2e-4)  # float32 angles of up to 900 radians
    np.testing.assert_array_equal(part[4], want[4])
    np.testing.assert_array_equal(part[5], want[5])
  for i in (1, 2, 3):
    whole = np.concatenate([part[i] for part in found], 2)
    np.testing.assert_allclose(whole, want[i], atol=2e-4)


def test_parts_have_no_victims():
  q, k, v, *rest = map(jnp.asarray, operands(8, 1, 1, 8))
  qkv = jnp.concatenate([q, k[:, :, None], v[:, :, None]], 2)
  with pytest.raises(ValueError, match="found several of victim, ring and part, expected one"):
    enter_token(qkv, *rest, rope=Rope(), part=(jnp.int32(0), SLOTS))


def test_keeps_the_norms_of_values():
  """The new slot's ‖v‖₁, and every other slot's as it was; idle rows as they were."""
  arrays = operands(4, 3, 2, 24)
  before = np.random.default_rng(5).uniform(size=(4, 3, SLOTS)).astype(np.float32)
  *_, pos, norm, _, _ = enter(Rope())(*arrays, before)
  fresh = np.array(pos) != arrays[7]
  want = np.where(fresh, np.abs(np.float64(arrays[2])).sum(-1)[..., None], before)
  assert fresh.sum() == 9
  np.testing.assert_allclose(norm, want, rtol=1e-6)


@pytest.mark.core(1)
@pytest.mark.parametrize("rope", listed.ROPES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rotates_as_the_reference_does(rope, dtype):
  arrays = operands(2, 3, 3, 64, dtype)
  q, cache_k, *_ = enter(rope)(*arrays)
  seen, rotate = np.asarray(arrays[-2]), jax.jit(rope.rotate)
  want = rotate(arrays[0], seen[:, None, None])
  close = 1e-3 if dtype == jnp.float32 else 2e-2  # one unit of bfloat16 at the largest values
  np.testing.assert_allclose(np.float32(q), np.float32(want), atol=close)
  want = rotate(arrays[1], seen[:, None])
  np.testing.assert_allclose(np.float32(cache_k)[1, :, 3], np.float32(want[1]), atol=close)


def extremes_of(k, used, unit, coded):
  """Extremes of the keys of every page, from its occupied slots; zeros where there are none."""
  pages = -(-k.shape[2] // unit)
  held = np.arange(pages * unit) < used[:, None]
  k = np.pad(np.float32(k), ((0, 0), (0, 0), (0, pages * unit - k.shape[2]), (0, 0)))
  parts = (np.where(held[:, None, :, None], k, fill) for fill in (np.inf, -np.inf))
  low, high = (x.reshape(*k.shape[:2], pages, unit, -1) for x in parts)
  low, high = jnp.asarray(low.min(3)), jnp.asarray(high.max(3))
  found = jax.jit(extremes.coded)(low, high) if coded else (low, high)
  there = held[:, None, ::unit]
  return [np.where(there if x.ndim == 3 else there[..., None], x, 0) for x in found]


@pytest.mark.slow
@pytest.mark.parametrize("unit", [2, 3, 4])
@pytest.mark.parametrize(
  ("coded", "dtype"), [(False, "float32"), (False, "bfloat16"), (True, "bfloat16")]
)
def test_extremes_of_the_page_that_a_token_enters(coded, dtype, unit):
  """Those of all its keys: first and later ones, larger and smaller, not finite."""
  for seed in range(8):
    q, k, v, live, _, *cache = operands(seed, 3, 2, 24, jnp.dtype(dtype))
    k *= 2.0 ** np.random.default_rng(seed).integers(-9, 9, (4, 3, 1))
    k = k.at[1, 0, 5].set([1, jnp.inf, jnp.nan, 0][seed % 4]).astype(dtype)
    pages = extremes_of(cache[0], np.array(cache[4]), unit, coded)
    if not coded:
      pages = [x.astype(dtype) for x in pages]
    qkv = jnp.concatenate([q, k[:, :, None], v[:, :, None]], 2)
    run = jax.jit(functools.partial(enter_token, rope=Rope(), unit=unit))
    _, now, _, _, _, used, *got = run(qkv, live, None, *cache, pages=tuple(map(jnp.asarray, pages)))
    want = extremes_of(now, np.array(used), unit, coded)
    for found, x in zip(got, want, strict=True):
      # XLA contracts the interpreter's products, in each use of a sum of them as it likes.
      close = 1e-6 if dtype == "float32" else 0
      np.testing.assert_allclose(np.float32(found), np.float32(x), rtol=close, atol=close)
