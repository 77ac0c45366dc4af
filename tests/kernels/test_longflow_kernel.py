"""LongFlow's kernels against NumPy float64, and the reference's victims over a long run.

On a GPU the same tests run the compiled kernels, and the run has 2,000 steps.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import Cache, CacheSpec, Carry, Env, LongFlow, Rope
from kvjax.kernels.common import devices
from kvjax.kernels.longflow import read
from kvjax.kernels.longflow import victim as longflow
from kvjax.kernels.longflow.victim import victim
from tests.kernels.decode_oracle import exact, same_bits

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
  device = devices.Device("", 1000 if lone else 0, 0)
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


def read_operands(seed, heads, groups, slots, head_dim, dtype=np.float32):
  """q, k, v of two rows, the second half full, then as `operands`; NaN where nothing is cached."""
  rng = np.random.default_rng(seed)
  *_, norm, pos, used, seen, _, _ = operands(seed, heads, groups, slots)
  shapes = (2, heads, groups, head_dim), *2 * [(2, heads, slots, head_dim)]
  q, k, v = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
  held = (np.arange(slots) < used[:, None])[:, None, :, None]
  return q, *(jnp.where(held, x, jnp.nan) for x in (k, v)), norm, pos, used, seen


@pytest.mark.core(1)
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize(
  ("heads", "groups", "slots", "head_dim"),
  [(3, 3, 200, 64), (1, 1, 16, 128), (2, 4, 1100, 128), (2, 7, 130, 80)],
)
def test_read(heads, groups, slots, head_dim, soft_cap):
  """Output, state and victims of one launch, with ragged rows; the same bits twice."""
  arrays = read_operands(3, heads, groups, slots, head_dim)
  how = {"sinks": 2, "recent": 3, "soft_cap": soft_cap}
  run = jax.jit(functools.partial(read.read, **how))
  state, out, got = run(*arrays)
  q, k, v, norm, pos, used, seen = arrays
  o, m, l, logits = exact(q, k, v, lambda b, h: range(used[b]), soft_cap)
  want, gap = oracle(*(logits, m, l, norm, pos, used, seen), sinks=2, recent=3, per_layer=False)
  np.testing.assert_allclose(state.o, o, atol=2e-5)
  np.testing.assert_allclose(state.lse, m + np.log(l), atol=2e-5)
  np.testing.assert_array_equal(out, state.o)
  assert (np.asarray(got) == want)[gap > 1e-4].all() and (gap > 1e-4).mean() > 0.7
  again = run(*arrays)
  same_bits(again, (state, out, got))


def test_read_in_half_precision():
  """bfloat16, as users have it: the victim is that of the kernel's own logits."""
  arrays = read_operands(4, 2, 4, 600, 128, jnp.bfloat16)
  q, k, v, norm, pos, used, seen = arrays
  state, out, got = jax.jit(functools.partial(read.read, sinks=0, recent=1))(*arrays)
  o, m, l, logits = exact(q, k, v, lambda b, h: range(used[b]))
  want, gap = oracle(*(logits, m, l, norm, pos, used, seen), sinks=0, recent=1, per_layer=False)
  assert out.dtype == jnp.bfloat16
  np.testing.assert_allclose(state.o, o, atol=1e-2)
  assert (np.asarray(got) == want)[gap > 1e-3].all() and (gap > 1e-3).any()


def test_read_refuses_what_does_not_fit():
  arrays = read_operands(5, 1, 7, 2100, 64)
  with pytest.raises(NotImplementedError, match="k: found 2100 slots for 7 query heads"):
    read.read(*map(jnp.asarray, arrays), sinks=0, recent=1)


@pytest.mark.parametrize("move", ["", "plan", "attend", "observe"])
def test_a_move_of_ones_own_has_logits(move, monkeypatch):
  """One launch attends and names the victim, unless one of these is another's."""
  own = {move: lambda self, *args: getattr(LongFlow, move)(self, *args)} if move else {}
  method = type("Own", (LongFlow,), own)(24, window_size=8)
  spec, seen = CacheSpec(2, 24, 3, 3, 64, 1, jnp.float32), []
  cache, at = Cache.empty(method, spec, 0), method.at(Env(1, Rope(), impl="pallas"), 0)
  usual = LongFlow.plan_and_attend

  def spy(self, *args):
    seen.append(usual(self, *args))
    return seen[-1]

  monkeypatch.setattr(LongFlow, "plan_and_attend", spy)
  monkeypatch.setattr(read, "takes", lambda *_, **__: True)
  q, k, live = np.ones((2, 3, 3, 64)), np.ones((2, 3, 64)), np.ones(2, bool)
  jax.eval_shape(functools.partial(method.decode_step, at), cache, q, k, k, live, Carry())
  assert (seen[0][1].logits is not None) == bool(move)


@pytest.mark.slow
@pytest.mark.parametrize("per", ["kv_head", "layer", "kv_head, two launches"])
def test_same_victims_as_the_reference_over_a_run(per, monkeypatch):
  """Both implementations from the same cache at every step; the kernels' cache goes on."""
  per, *apart = per.split(", ")
  monkeypatch.setattr(read, "takes", lambda *_, **__: not apart)
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


def test_one_launch_where_rows_fill_the_device():
  """On an H200 from 88 rows on, in 16 bits; not where one program has no room for another."""
  how = {"interpret": False, "kind": "NVIDIA H200"}
  assert read.takes(88, 4, 3200, 2, **how)
  assert not read.takes(87, 4, 3200, 2, **how)
  assert not read.takes(88, 4, 4097, 2, **how)
  assert not read.takes(88, 4, 3200, 4, **how)
  assert not read.takes(88, 4, 3200, 2, interpret=False, kind="NVIDIA RTX A6000")
