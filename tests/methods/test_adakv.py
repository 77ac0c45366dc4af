"""Ada-KV against lists: whose tokens stay, what each head's slots take, what a layer holds."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import AdaKV, CacheSpec, ExpectedAttention, PyramidKV, SnapKV, plan_memory
from kvjax.ops import shared_slots
from kvjax.runtime.sharding import init_caches
from kvjax.testing import LAWS, Case
from kvjax.testing.layer import Stream
from tests.oracles import ByValue, begun, generation, in_turn


def lengths_of(scores, n, window, safeguard, rounded=False):
  """Tokens of each head of a pool; scores[h][j] of token j of head h. Lists, no sorting by arrays.

  The window's tokens stay and count (`rounded`: beside).
  """
  past = [row[: len(row) - window] for row in scores]
  heads = range(len(scores))
  if len(scores[0]) <= n:
    return [len(row) for row in scores]
  if rounded:
    m = n - window
    ranked = sorted((-past[h][j], j, h) for h in heads for j in range(len(past[h])))
    f = [sum(owner == h for _, _, owner in ranked[: len(scores) * m]) for h in heads]
    return [round((1 - safeguard) * x + int(safeguard * m)) + window for x in f]
  safe = max(1, int(safeguard * n))
  forced = [max(safe - window, 0) for _ in heads]
  free = []
  for h in heads:
    ranked = sorted((-x, j) for j, x in enumerate(past[h]))
    free += [(x, j, h) for x, j in ranked[forced[h] :]]
  left = len(scores) * n - sum(window + x for x in forced)
  won = [owner for _, _, owner in sorted(free)[:left]]
  return [window + forced[h] + won.count(h) for h in heads]


def kept_of(scores, length, window):
  """Positions that a head keeps of a prompt: its best, and the window."""
  past = len(scores) - window
  best = sorted(range(past), key=lambda j: (-scores[j], j))[: length - window]
  return sorted(best), list(range(past, len(scores)))


by_head = jax.jit(shared_slots.by_head)


def held(cache):
  """Positions by row and head, and that slots of a head are the first of its own."""
  pos = np.asarray(by_head(cache)["pos"])
  found = [[[int(p) for p in head if p >= 0] for head in row] for row in pos]
  for row, lists in zip(pos, found, strict=True):
    assert all((head[: len(x)] >= 0).all() for head, x in zip(row, lists, strict=True))
  return found


def test_worked_example():
  """Scores .9 .05 .03 .02 and .4 .3 .2 .1 with n = 2: of the four best one and three."""
  scores = [[0.9, 0.05, 0.03, 0.02], [0.4, 0.3, 0.2, 0.1]]
  key = -jnp.array([scores])
  time = jnp.broadcast_to(jnp.arange(4), (1, 2, 4)).astype(jnp.int32)

  def lengths(safeguard, rounded):
    method = AdaKV(SnapKV(3, 1), safeguard, rounded)  # m = 2 beside a window of one
    return (method._lengths(key, time, 3 if rounded else 2, 2)[0] - rounded).tolist()

  assert [lengths(x, False) for x in (0.0, 0.2, 0.5, 1.0)] == [[1, 3], [1, 3], [1, 3], [2, 2]]
  assert [lengths(x, True) for x in (0.0, 0.2, 0.5, 1.0)] == [[1, 3], [1, 2], [2, 2], [2, 2]]


CASES = {
  "exact": AdaKV(ByValue(7, 2)),
  "half": AdaKV(ByValue(9, 2), 0.5),
  "rounded": AdaKV(ByValue(9, 2), 0.3, rounded=True),
  "uniform": AdaKV(ByValue(7, 2), 1),
  "free": AdaKV(ByValue(7, 2), 0),
}


def skewed(seed, **sizes):
  """Scores whose heads differ: some have many large ones."""
  stream = Stream.random(seed, **sizes)
  stream.v[..., 0] = np.abs(stream.v[..., 0]) * np.linspace(0.2, 2, stream.v.shape[1])[:, None]
  return stream


@pytest.mark.core(1)
@pytest.mark.parametrize("method", CASES.values(), ids=CASES)
def test_prompt_then_long_decode(method):
  """Kept tokens, outputs over them, and which leaves, in every head and at every step."""
  stream, stay, rooms = skewed(1, tokens=64), {}, {}
  n, window = method.base.budget, method.base.window_size
  scores = stream.v[..., 0]

  def prompt(b, h, t):
    rows = [scores[b, i, :t].tolist() for i in range(3)]
    lengths = lengths_of(rows, n, window, method.safeguard, method.rounded)
    assert t <= n or method.rounded or sum(lengths) == 3 * n
    rooms[b, h] = lengths[h] if t > n else n
    stay[b, h], turn = kept_of(rows[h], lengths[h], min(window, t))
    return stay[b, h] + turn

  def step(kept, b, h, t):
    in_turn(rooms[b, h], stay)(kept, b, h, t)

  def holds(cache, b, h):
    return sorted(held(cache)[b][h])

  generation(method, stream, [23, 5], 20, prompt, step, atol=3e-6, holds=holds)
  if method.safeguard != 1:
    assert len({rooms[0, h] for h in range(3)}) > 1  # heads differ


def test_a_later_turn_ranks_what_each_head_holds():
  """Pools of 3·7: tokens cached of each head compete with the new ones; a row stays as it was."""
  method, stream = AdaKV(ByValue(7, 2)), skewed(3, tokens=50)
  layer = begun(method, stream, [23, 20])
  layer.decode([23, 20])
  before = held(layer.cache)
  layer.prefill([6, 0], [24, 21], tokens=6, past=None)
  scores, found = stream.v[..., 0], held(layer.cache)
  assert found[1] == before[1]
  texts = [sorted(row) + list(range(24, 30)) for row in before[0]]
  rows = [scores[0, h, texts[h]].tolist() for h in range(3)]
  # Heads hold different numbers now: as many as are missing score less than any.
  width = max(map(len, rows))
  padded = [[-1.0] * (width - len(row)) + row for row in rows]
  lengths = lengths_of(padded, 7, 2, method.safeguard)
  for h in range(3):
    stay, turn = kept_of(rows[h], lengths[h], 2)
    assert sorted(found[0][h]) == [texts[h][i] for i in stay + turn]


@pytest.mark.slow
@pytest.mark.parametrize(
  "base", [SnapKV(10, 3, pool=3), PyramidKV(10, 3), ExpectedAttention(10, 3, sinks=2)]
)
def test_scores_of_other_methods(base):
  """Each head keeps the best of the scores that its base gives; the sum is that of the base."""
  stream = skewed(4, tokens=40)
  scores = []

  @dataclasses.dataclass(frozen=True)
  class Told(type(base)):
    def score(self, at, turn, past):
      found = super().score(at, turn, past)
      jax.debug.callback(lambda x: scores.append(np.asarray(x)), found)
      return found

  told = Told(**{f.name: getattr(base, f.name) for f in dataclasses.fields(base)})
  layer = begun(AdaKV(told, 0.3), stream, [33, 28])
  jax.effects_barrier()
  n, found = base.capacity(layer.spec, 1), held(layer.cache)
  for b, t in enumerate([33, 28]):
    rows = scores[0][b, :, :t].tolist()
    lengths = lengths_of(rows, n, 3, 0.3)
    assert sum(lengths) == 3 * n
    for h in range(3):
      stay, turn = kept_of(rows[h], lengths[h], 3)
      assert found[b][h] == stay + turn


GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "goldens" / "adakv.json").read_text())


@pytest.mark.core(2)
@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: f"α={case['safeguard']}")
def test_kept_tokens_are_those_of_kvpress(case):
  """`AdaKVPress` of kvpress 0.5.5 was given the same scores, with its window above all others."""
  heads, tokens = case["heads"], case["tokens"]
  drawn = np.random.default_rng(case["seed"]).random((heads, tokens))
  skewed = drawn * np.linspace(0.2, 2, heads)[:, None]
  stream = Stream.random(0, batch=1, kv_heads=heads, groups=1, tokens=tokens)
  stream.v[0, :, :, 0] = np.argsort(np.argsort(skewed.ravel())).reshape(heads, tokens) + 1
  base = ByValue(case["budget"], case["window_size"])
  layer = begun(AdaKV(base, case["safeguard"]), stream, [tokens])
  assert held(layer.cache)[0] == case["kept"]


def test_bytes_are_those_of_the_budgets():
  spec, base = CacheSpec(2, 512, 6, 2, 16, 2), SnapKV(64)
  caches = AdaKV(base).init_caches(spec)
  assert caches[0].slots["k"].shape == (2, 1, 6 * 64, 16)
  places = 2 * 2 * 6 * 2 * 4  # where heads lie
  assert plan_memory(spec, AdaKV(base)).device == plan_memory(spec, base).device + places
  rounded = AdaKV(base, rounded=True).init_caches(spec)
  assert rounded[0].size == 6 * 64 + 3  # half a slot a head, at most


@pytest.mark.slow
def test_pools_of_heads():
  """Two pools of two heads give what two layers of two heads give."""
  stream = skewed(6, kv_heads=4)
  whole = begun(AdaKV(ByValue(7, 2), pools=2), stream, [22, 9])
  for i in range(2):
    part = Stream(*(x[:, 2 * i : 2 * i + 2] for x in (stream.q, stream.k, stream.v)))
    layer = begun(AdaKV(ByValue(7, 2)), part, [22, 9])
    found, want = held(whole.cache), held(layer.cache)
    assert [row[2 * i : 2 * i + 2] for row in found] == want


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
def test_pools_split_over_devices():
  case = Case(AdaKV, (("pools", 2),))
  for law in ("heads_sharded_over_two_devices", "pallas_equals_reference_in_a_layer"):
    LAWS[law](case)
  spec, mesh = CacheSpec(1, 64, 4, 1, 16, 2), kvjax.make_mesh(2)
  for refused in (plan_memory, init_caches):
    args = (spec, AdaKV(SnapKV(40))) if refused is plan_memory else (AdaKV(SnapKV(40)), spec)
    with pytest.raises(ValueError, match=r"mesh: .* expected pools = 1 to be a multiple"):
      refused(*args, mesh)
