"""Kernels of attention under a soft cap, c·tanh(x/c), against NumPy in float64; for decode it is an
axis of its own tests.

On a GPU the same tests run the compiled kernels.
"""

import functools
import types

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.kernels.art import walk
from kvjax.kernels.cis import anchors
from kvjax.kernels.prefill import dense as prefill
from kvjax.kernels.prr.repair import repair
from kvjax.kernels.prr.speculate import attend_tiles, speculate, speculate_keys
from kvjax.kernels.selection import key_weights
from kvjax.methods.art.certificate import TANH_ERROR
from tests.kernels.decode_oracle import exact

pytestmark = pytest.mark.slow  # the core has layers that run some of these kernels

CAP = 1.5  # of logits with a deviation of 1.5
UNIT = 16
CLOSE = {"float32": 1e-5, "bfloat16": 2e-2}
STOP = np.array([75, 41], np.int32)  # occupied slots of each row; what lies after them is NaN


@functools.cache
def case(dtype, groups=3, heads=3, head_dim=24, slots=80):
  """Queries, keys and values, and what attention of each query over all slots is."""
  rng = np.random.default_rng(groups)
  shapes = (2, heads, groups, head_dim), *[(2, heads, slots, head_dim)] * 2
  q, k, v = (rng.normal(size=shape) for shape in shapes)
  q, k, v = (jnp.asarray(x, dtype) for x in (1.5 * q, k, v))
  o, m, l, logits = exact(q, k, v, lambda b, h: range(STOP[b]), CAP)
  lse = m + np.log(l)
  empty = (np.arange(slots) >= STOP[:, None])[:, None, :, None]
  k, v = (jnp.where(empty, jnp.nan, y).astype(dtype) for y in (k, v))
  tiles = jnp.broadcast_to(jnp.arange(slots // UNIT, dtype=jnp.int32), (2, heads, slots // UNIT))
  stop = jnp.asarray(STOP)[:, None]
  p = np.exp(logits - lse[..., None])
  return types.SimpleNamespace(
    q=q, k=k, v=v, logits=logits, p=p, o=o, lse=lse, tiles=tiles, stop=stop
  )


def walks(c, share=None):
  where = None, None, jnp.zeros_like(c.stop), c.stop
  how = {"tile": UNIT, "patience": np.inf, "splits": 1, "share": share}
  return walk.walk(c.q, c.k, c.v, *where, soft_cap=CAP, **how)[0]


def repaired(c, written, stored):
  """The first tiles as they were written, and the others."""
  where = jnp.zeros_like(c.stop), c.stop
  operands = c.q, c.k, c.v, c.tiles, c.tiles[..., :3], *where, written
  return repair(*operands, unit=UNIT, stored=stored, soft_cap=CAP)[0]


def single_tiles(c):
  where = c.tiles[..., :3], jnp.zeros_like(c.stop), c.stop
  return repaired(c, attend_tiles(c.q, c.k, c.v, *where, unit=UNIT, soft_cap=CAP), "tiles")


def beside(c, run, *scored, **how):
  tiles = c.tiles.shape[2]
  state = jnp.zeros((*c.q.shape[:2], tiles), jnp.float32)
  operands = c.q, c.k, c.v, c.tiles[..., :3], c.stop[:, 0], *scored
  factors = jnp.full((2, 3), 0.5, jnp.float32)
  return run(*operands, state, state, factors, unit=UNIT, soft_cap=CAP, **how)


def beside_pages(c):
  edge = jnp.zeros((*c.q.shape[:2], 5, c.q.shape[3]), c.q.dtype)
  return repaired(c, beside(c, speculate, edge, edge)[0], "pieces")


def beside_keys(c):
  """Every key stands for itself; of a tile counts the best, the newest key not yet."""
  written, (both, *_) = beside(c, speculate_keys, c.k, stride=1, width=1)
  known = np.where(np.arange(80) < STOP[:, None] - 1, 0, -np.inf)[:, None, None]
  p = np.exp(c.logits + known)
  p = (p / p.sum(-1, keepdims=True)).sum(2).reshape(2, 3, 5, UNIT).max(-1)
  real = np.arange(5) * UNIT < STOP[:, None] - 1
  scores = np.where(real[:, None], both[:, :, 0], 0)
  np.testing.assert_allclose(scores, np.where(real[:, None], p, 0), atol=CLOSE[c.q.dtype.name])
  return repaired(c, written, "pieces")


STATES = {
  "art": walks,
  "art, shared": functools.partial(walks, share=2),
  "tiles and repair": single_tiles,
  "speculate": beside_pages,
  "speculate_keys": beside_keys,
}


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("name", STATES)
def test_a_step(name, dtype):
  c = case(dtype)
  state = STATES[name](c)
  np.testing.assert_allclose(state.o, c.o, atol=CLOSE[dtype])
  np.testing.assert_allclose(state.lse, c.lse, atol=CLOSE[dtype])


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("ordered", [True, False])
def test_a_prompt_and_its_second_pass(dtype, ordered):
  """The newest query of each row, over all slots, and the probability that it gives to each."""
  c = case(dtype)
  q, qpos = c.q[:, :, :, None], c.stop - 1
  pos = jnp.where(jnp.arange(80) < c.stop, jnp.arange(80), -1)[:, None]
  pos = jnp.broadcast_to(pos, c.k.shape[:3]).astype(jnp.int32)
  state, _ = prefill.prefill_attention(
    q, c.k, c.v, qpos, pos=None if ordered else pos, soft_cap=CAP
  )
  np.testing.assert_allclose(state.o[:, :, :, 0], c.o, atol=CLOSE[dtype])
  np.testing.assert_allclose(state.lse[..., 0], c.lse, atol=CLOSE[dtype])
  mass = prefill.column_mass(q, c.k, pos, qpos, state.m, state.l, soft_cap=CAP)
  np.testing.assert_allclose(mass, c.p.mean(2), atol=CLOSE[dtype])


@pytest.mark.parametrize("dtype", CLOSE)
def test_scores_of_keys(dtype):
  """Logits and weights of all keys, and the logits that CIS looks at beside its decision."""
  c = case(dtype)
  where = jnp.zeros_like(c.stop), c.stop, c.stop
  logits = key_weights.key_logits(c.q, c.k, *where, soft_cap=CAP)[0] * np.log(2)
  np.testing.assert_allclose(logits, c.logits, atol=CLOSE[dtype])
  weights = key_weights.key_weights(c.q, c.k, *where, blocks=80, soft_cap=CAP)
  np.testing.assert_allclose(weights, c.p.sum(2), atol=CLOSE[dtype])
  block = jnp.zeros((2, 3, 4, 3, 24), jnp.float32), jnp.zeros((2, 3, 4, 3), jnp.int32)
  none = jnp.zeros(2, jnp.int32)
  how = {"tau": 0.8, "keys": (c.k, c.stop[:, 0]), "soft_cap": CAP}
  looked = anchors.anchors(c.q, *block, none, c.stop[:, 0], **how)[-3] * np.log(2)
  np.testing.assert_allclose(looked, c.logits, atol=CLOSE[dtype])


def test_tanh_is_far_closer_than_certificates_count_on():
  """On this device, in XLA and in a kernel, whose only logits are those of single channels."""
  x = np.linspace(-12, 12, 1 << 14, dtype=np.float32)
  keys = jnp.zeros((1, 1, x.size, 16)).at[..., 0].set(4 * x)
  stop = jnp.full((1, 1), x.size, jnp.int32)
  query = jnp.zeros((1, 1, 1, 16)).at[..., 0].set(1)
  logits = key_weights.key_logits(query, keys, 0 * stop, stop, stop, soft_cap=1.0)[0]
  for got in (jnp.tanh(x), logits[0, 0, 0] * np.log(2)):
    assert np.abs(np.asarray(got, np.float64) - np.tanh(np.float64(x))).max() < TANH_ERROR / 10
