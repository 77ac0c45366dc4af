"""CIS's decisions and sets in NumPy float64, and layers that are followed step by step."""

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import Cache, Carry, Env, Rope
from kvjax.families import sight
from kvjax.methods.cis.kernel import Selected
from kvjax.testing.layer import Layer, Stream, capped
from tests.kernels.listed import tokens_of
from tests.oracles import attend, keys, queries, softmax

NOTES = ("queries", "anchor", "retrieved")


class Oracle:
  """One KV head of one row, step by step; positions count from 0."""

  def __init__(self, method, groups, cap=None):
    self.method, self.step, self.cap = method, 0, cap
    self.shared = [range(groups)] if method.per == "kv_head" else [[g] for g in range(groups)]
    self.used = [[] for _ in self.shared]  # of the block: (queries, their retrieval)
    self.retrieved = []

  def attended(self, q, keys, visible=None):
    """Positions that the newest query [G, H] attends to, of keys [n, H]."""
    c, n = self.method, len(keys)
    seen = set(range(n)) if visible is None else visible
    middle = [i for i in range(c.sinks, n - c.local) if i in seen]
    chosen, self.retrieved = set(), []
    for heads, used in zip(self.shared, self.used, strict=True):
      if self.step % c.block == 0:
        used.clear()
      own = [q[g] for g in heads]
      heaviest = self.shared_with(own, used)
      self.retrieved.append(heaviest is None)
      if heaviest is None:
        weight = sum(self.weights(x, keys, seen) for x in own)
        heaviest = sorted(middle, key=lambda i: (-weight[i], i))[: c.k]
        chosen |= set(heaviest)
      else:
        m = c.k // 3 if c.m is None else c.m
        near = {i + d for i in heaviest[:m] for d in range(-c.radius, c.radius + 1)}
        chosen |= (set(heaviest) | near) & set(middle)
      used.append((own, heaviest))
    self.step += 1
    always = set(range(min(c.sinks, n))) | set(range(max(0, n - c.local), n))
    return (always & seen) | chosen

  def shared_with(self, own, used):
    def cosine(a, b):
      return a @ b / np.linalg.norm(a) / np.linalg.norm(b)

    def middle(group):
      return sum(a / np.linalg.norm(a) for a in group)

    for others, heaviest in reversed(used):
      if self.method.agree == "mean":
        cosines = [cosine(middle(own), middle(others))]
      else:
        cosines = map(cosine, own, others)
      if all(x > self.method.tau for x in cosines):
        return heaviest
    return None

  def weights(self, query, keys, seen):
    x = capped(keys @ query / np.sqrt(len(query)), self.cap)
    x[[i for i in range(len(keys)) if i not in seen]] = -np.inf
    return softmax(x)


def wandering(seed, tokens, kv_heads=2, groups=3, stay=0.8):
  """Queries that mostly resemble the one before, with a jump now and then in each head."""
  stream = Stream.random(seed, kv_heads=kv_heads, groups=groups, tokens=tokens)
  rng = np.random.default_rng(seed)
  slow = np.where(np.arange(16) % 8 < 3, 0.3, 1.0)  # pairs that turn fast count less
  q = stream.q * slow
  for t in range(1, tokens):
    keep = rng.random(q.shape[:2])[:, :, None, None] < stay
    q[:, :, :, t] = np.where(keep, q[:, :, :, t - 1] + 0.25 * q[:, :, :, t], q[:, :, :, t])
  stream.q[:] = q
  return stream


class Planned(Layer):
  """A layer whose plan of the step that comes next can be looked at."""

  def __init__(self, *args, **kwargs):
    super().__init__(*args, **kwargs)

    @jax.jit
    def plan(cache, q, k, v):
      rope, place = self.at.env.rope, cache.seen[:, None]
      q, k = rope.rotate(q, place[..., None]), rope.rotate(k, place)
      cache = self.method.insert(self.at, cache, k, v, jnp.ones(len(q), bool))
      visible = sight.visible(self.at, cache)
      plan, attended, _ = self.method.plan_and_attend(self.at, cache, q, visible, Carry())
      retrieves = attended.noted(Selected).choice.retrieves
      return plan.table, plan.count, (retrieves > 0).any(-1)

    self._plan = plan

  def plan(self, at):
    """Table, count, and which KV heads look at all keys, for stream token at[b] of each row."""
    rows, s = range(len(at)), self.stream
    new = (np.stack([x[b][..., at[b], :] for b in rows]) for x in (s.q, s.k, s.v))
    return tuple(np.asarray(x) for x in self._plan(self.cache, *new))


def follow(method, stream, lengths, steps, scale=1.0, over=None, visible=None, layer=1, cap=None):
  """Runs layer and oracles side by side; returns retrieved [steps, B, K] (or [.., G]).

  `over` is the method that stands over CIS, if any; visible(t) are the positions that it lets
  query t see.
  """
  stream.q[:] *= scale
  env = Env(4, impl="reference", tile=4, soft_cap=cap)
  layer = Planned(over or method, stream, capacity=stream.k.shape[2], layer=layer, env=env)
  layer.prefill(lengths)
  batch, heads, groups = stream.q.shape[:3]
  oracles = {(b, h): Oracle(method, groups, cap) for b in range(batch) for h in range(heads)}
  reports = []
  for step in range(steps):
    at = [n + step for n in lengths]
    table, count, looks = layer.plan(at)
    out, aux = layer.decode(at)
    reports.append(np.asarray(aux["retrieved"]))
    np.testing.assert_array_equal(looks, reports[-1].reshape(batch, heads, -1).any(-1))
    for (b, h), oracle in oracles.items():
      t = at[b]
      q, k = queries(stream, b, h, t), keys(stream, b, h, range(t + 1))
      want = oracle.attended(q, k, visible and visible(t))
      got = table[b, h, : count[b, h]].tolist()
      assert len(got) == len(set(got)) and set(got) == want, (b, h, step)
      assert (table[b, h, count[b, h] :] == -1).all()
      assert reports[-1][b, h].tolist() == (
        oracle.retrieved if method.per == "query_head" else oracle.retrieved[0]
      )
      assert int(aux["visited"][b, h]) == len(want)
      exact = attend(stream, b, h, t, sorted(want), cap)
      np.testing.assert_allclose(out[b, h], exact, atol=2e-5 * max(1.0, scale))
  return np.stack(reports)


def places(method, cap=None):
  return {
    impl: method.at(Env(4, Rope(), impl=impl, soft_cap=cap), 3) for impl in ("pallas", "reference")
  }


def step(at, cache, q, k, v, live):
  """A decode step: cache, output, list, and what it says."""
  method, place = at.top, cache.seen[:, None]
  turned = at.env.rope.rotate(q, place[..., None])
  entered = method.insert(at, cache, at.env.rope.rotate(k, place), v, live)
  plan, *_ = method.plan_and_attend(at, entered, turned, sight.visible(at, entered), Carry())
  out, cache, _, aux = method.decode_step(at, cache, q, k, v, live, Carry())
  return cache, out, (plan.table, plan.count), (aux["retrieved"], aux["visited"])


def beside_the_reference(method, stream, slots, cap=None, idle=False):
  """26 steps by kernels, each of which the reference takes from the same cache; who retrieved.

  Lists, reports, outputs and notes are alike. `idle`: the second row rests now and then.
  """
  at, run = places(method, cap), jax.jit(step, static_argnums=0)
  cache, place, retrieved = Cache.empty(method, stream.spec(slots), 3), np.zeros(2, int), []
  for t in range(26):
    live = np.array([True, not idle or (t >= 7 and t % 5 > 0)])
    token = [
      np.stack([x[b][..., place[b], :] for b in range(2)]) for x in (stream.q, stream.k, stream.v)
    ]
    want, out, lists, said = run(at["reference"], cache, *token, live)
    cache, mine, my_lists, mine_said = run(at["pallas"], cache, *token, live)
    for row in np.flatnonzero(live):
      assert tokens_of(*my_lists)[row] == tokens_of(*lists)[row]
      for a, b in zip(mine_said, said, strict=True):
        np.testing.assert_array_equal(a[row], b[row])
      np.testing.assert_allclose(mine[row], out[row], atol=1e-5)
    for held in NOTES:
      np.testing.assert_allclose(cache.heads[held], want.heads[held], atol=1e-6)
    for held in ("step", "seen", "used"):
      np.testing.assert_array_equal(cache.rows[held], want.rows[held])
    place += live
    retrieved.append(np.asarray(said[0])[live].reshape(-1))
  return np.concatenate(retrieved)
