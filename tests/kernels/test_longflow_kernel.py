"""LongFlow's kernels against NumPy float64, and the reference's victims over a long run.

On a GPU the same tests run the compiled kernels, and the run has 2,000 steps.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import Cache, CacheSpec, Carry, Env, LongFlow, Rope
from kvjax.kernels import config, longflow
from kvjax.kernels.longflow import victim

ON_GPU = jax.default_backend() == "gpu"


def oracle(logits, m, l, norm, pos, used, seen, *_, sinks, recent, per_layer):
  """Slots by their scores in float64, and how far the second best is behind, [B, K]."""
  batch, heads, groups, _ = logits.shape
  slot, gap = np.zeros((batch, heads), int), np.zeros((batch, heads))
  for b in range(batch):
    may = [s for s in range(used[b]) if sinks <= pos[b, 0, s] < seen[b] - recent]
    total = np.full((heads, len(may)), -np.inf)
    for h in range(heads):
      for g in range(groups):
        lse = m[b, h, g] + np.log(l[b, h, g])
        x = np.float64(logits[b, h, g, may]) - lse + np.log(np.float64(norm[b, h, may]))
        total[h] = np.logaddexp(total[h], x)
    if per_layer:
      total[:] = np.logaddexp.reduce(total, 0)
    for h in range(heads):
      order = sorted(range(len(may)), key=lambda i: (total[h, i], pos[b, h, may[i]]))
      slot[b, h] = may[order[0]]
      gap[b, h] = total[h, order[1]] - total[h, order[0]]
  return slot, gap


def operands(seed, kv_heads, groups, slots, scale=1.0):
  """Two rows, one of them half full, with softmax states of their own logits."""
  rng = np.random.default_rng(seed)
  logits = (rng.normal(size=(2, kv_heads, groups, slots)) * scale).astype(np.float32)
  used = np.array([slots, slots // 2 + 1], np.int32)
  held = np.arange(slots) < used[:, None, None, None]
  logits = np.where(held, logits, -np.inf)
  m = logits.max(-1)
  l = np.exp(logits - m[..., None]).sum(-1)
  norm = rng.uniform(0.1, 2, (2, kv_heads, slots)).astype(np.float32)
  pos = np.stack([rng.permutation(n).tolist() + [-1] * (slots - n) for n in used])
  pos = np.broadcast_to(pos[:, None], norm.shape).astype(np.int32)
  named = np.full((2, kv_heads), -7, np.int32)
  return logits, m, l, norm, pos, used, used, np.ones(2, bool), named


@pytest.mark.core(2)
@pytest.mark.parametrize("lone", [False, True])
@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize(
  ("kv_heads", "groups", "slots"), [(1, 1, 16), (3, 3, 200), (8, 4, 1100), (2, 7, 130)]
)
def test_victim(kv_heads, groups, slots, scale, per_layer, lone, monkeypatch):
  """Many programs take small steps, few of them large ones."""
  device = config.Device("", 1000 if lone else 0, 0)
  monkeypatch.setattr(longflow, "this_device", lambda: device)
  arrays = operands(0, kv_heads, groups, slots, scale)
  options = {"sinks": 2, "recent": 3, "per_layer": per_layer}
  got = np.asarray(jax.jit(functools.partial(victim, **options))(*arrays))
  want, gap = oracle(*arrays, **options)
  tied = gap < 1e-4 * max(1.0, scale / 100)
  assert (got == want)[~tied].all() and tied.mean() < 0.2


def test_ties_go_to_the_lowest_position():
  logits, m, l, norm, pos, *rest = operands(1, 2, 3, 300)
  logits = np.where(np.isfinite(logits), np.float32(0), -np.inf)
  call = jax.jit(functools.partial(victim, sinks=4, recent=1))
  got = np.asarray(call(logits, m, l, np.ones_like(norm), pos, *rest))
  named = np.take_along_axis(pos, got[..., None], 2)
  assert (named == 4).all()


@pytest.mark.parametrize(("per_layer", "ill"), [(False, np.nan), (True, np.inf)])
def test_rows_that_do_not_count_keep_their_victims(per_layer, ill):
  call = jax.jit(functools.partial(victim, sinks=2, recent=3, per_layer=per_layer))
  logits, m, l, *rest, live, old = operands(2, 3, 3, 200)
  every = np.asarray(call(logits, m, l, *rest, live, old))
  idle = np.asarray(call(logits, m, l, *rest, np.array([False, True]), old))
  assert (idle[0] == old[0]).all() and (idle[1] == every[1]).all() and (every != old).all()
  l[1, 2, 0] = ill  # of one head: none of the row's counts
  broken = np.asarray(call(logits, m, l, *rest, live, old))
  assert (broken[1] == old[1]).all() and (broken[0] == every[0]).all()


@pytest.mark.core(1)
@pytest.mark.parametrize("per", ["kv_head", "layer"])
def test_same_victims_as_the_reference_over_a_run(per):
  """Both implementations from the same cache at every step; the kernels' cache goes on."""
  budget, steps = (96, 2000) if ON_GPU else (24, 60)
  spec = CacheSpec(2, budget, 3, 3, 64, 1, jnp.float32)
  method = LongFlow(budget, window_size=8, per=per)

  def step(impl, cache, q, k, v):
    at = method.at(Env(1, Rope(), impl=impl), 0)
    out, cache, _, _ = method.decode_step(at, cache, q, k, v, jnp.ones(2, bool), Carry())
    return out, cache

  @jax.jit
  def run(cache, key):
    def body(cache, key):
      q, k, v = (
        jax.random.normal(key, shape) * scale
        for key, shape, scale in zip(
          jax.random.split(key, 3), ((2, 3, 3, 64), (2, 3, 64), (2, 3, 64)), (3, 1, 1), strict=True
        )
      )
      out, after = step("pallas", cache, q, k, v)
      want, other = step("reference", cache, q, k, v)
      full = cache.used == budget
      same = (after.heads["victim"] == other.heads["victim"]) | ~full[:, None]
      same_pos = (after.pos == other.pos).all()
      return after, (jnp.abs(out - want).max(), same.all(), same_pos)

    return jax.lax.scan(body, cache, jax.random.split(key, steps))

  cache, (error, same, same_pos) = run(Cache.empty(method, spec, 0), jax.random.key(0))
  assert np.asarray(cache.used).tolist() == [budget] * 2
  assert int(cache.pos.min()) >= 0 and float(error.max()) < 1e-4
  assert np.asarray(same_pos).all()
  assert (~np.asarray(same)).mean() <= 1e-3  # scores that differ by rounding alone
  if not ON_GPU:
    assert np.asarray(same).all()
