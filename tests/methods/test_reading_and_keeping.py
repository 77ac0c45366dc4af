"""What is read and what is kept, chosen apart: Quest over methods that evict.

The oracle is NumPy in float64: it knows which positions stand in which slots (from the base alone,
whose own file tests it), and computes bounds, pages and attention from the stream.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import (
  Cache,
  Env,
  ExpectedAttention,
  KeyDiff,
  Knorm,
  PyramidKV,
  Quest,
  SnapKV,
  TopKOracle,
  settings,
)
from kvjax.testing import LAWS, Case
from kvjax.testing.layer import Stream
from tests.oracles import attend, begun, keys, probabilities, queries
from tests.selection import Watched
from tests.selection import read as watched

PAGE = 4
ATTENDED = 2e-5  # float32 against NumPy's float64; kernels sum in another order
BOUNDS = 1e-5  # keys rotated in float32 against float64: nothing is summed


class OverSnapKV(Quest):
  """Under the laws: as many tokens are kept as the budget says, half of them are read."""


settings.register(
  OverSnapKV,
  example=lambda cls, budget: cls(
    max(budget // 2, PAGE), PAGE, base=SnapKV(budget, 3), dense_layers=0
  ),
  neutral=lambda cls, length: cls(length + 2 * PAGE, PAGE, base=settings.neutral(SnapKV, length)),
)

CORE = ("kept_positions",)


@pytest.mark.parametrize(
  "law", [pytest.param(law, marks=[pytest.mark.slow] * (law not in CORE)) for law in LAWS]
)
def test_obeys_the_laws(law):
  LAWS[law](Case(OverSnapKV))  # Quest's


def bound(q, k):
  """Σ_d max(q_d·min_d, q_d·max_d)."""
  return np.maximum(q * k.min(0), q * k.max(0)).sum()


def pages_read(stream, before, after, b, h, t, count):
  """Pages of slots: the newest token's, and the best others by the bounds of the step before."""
  newest = int(np.flatnonzero(after == t)[0]) // PAGE if t in after else None
  scores = {}
  for j in range(-(-len(after) // PAGE)):
    held = [p for p in before[j * PAGE : (j + 1) * PAGE] if p >= 0]
    if held and j != newest:
      scores[j] = bound(queries(stream, b, h, t).mean(0), keys(stream, b, h, held))
  best = sorted(scores, key=lambda j: (-scores[j], j))
  others = count - (newest is not None)
  return sorted(best[:others] + ([] if newest is None else [newest]))


@pytest.mark.core(1)
@pytest.mark.parametrize("impl", ["reference", "pallas"])
@pytest.mark.parametrize(
  "base",
  [
    SnapKV(18, 3),
    pytest.param(ExpectedAttention(20, 4), marks=pytest.mark.slow),
    Knorm(16),  # each head gives up a slot of its own
    pytest.param(KeyDiff(17), marks=pytest.mark.slow),
    pytest.param(PyramidKV(18, 3), marks=pytest.mark.slow),
  ],
  ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_a_generation(base, impl):
  """Long enough for every slot to be used again; one row starts below the budget."""
  stream, env = Stream.random(5, tokens=72), Env(4, impl=impl, tile=4)
  method = Quest(2 * PAGE, PAGE, base=base, dense_layers=0)
  told = impl == "reference"  # kernels that walk a table return no logits
  read = begun(Watched(method) if told else method, stream, [30, 9], env=env)
  kept = begun(base, stream, [30, 9])
  for step in range(34):
    at = [30 + step, 9 + step]
    before = np.asarray(kept.cache.pos)
    kept.decode(at)
    after = np.asarray(kept.cache.pos)
    out, aux = read.decode(at)
    np.testing.assert_array_equal(read.cache.pos, after)
    for b, t in enumerate(at):
      for h in range(after.shape[1]):
        pages = pages_read(stream, before[b, h], after[b, h], b, h, t, 2)
        slots = [s for j in pages for s in range(j * PAGE, min((j + 1) * PAGE, after.shape[2]))]
        slots = [s for s in slots if after[b, h, s] >= 0]
        if told:
          assert sorted(watched(aux, b, h)) == slots, (step, b, h)
        assert aux["visited"][b, h] == len(slots)
        held = after[b, h][slots]
        np.testing.assert_allclose(out[b, h], attend(stream, b, h, t, held), atol=ATTENDED)


def test_bytes_are_those_of_what_is_kept():
  """Summaries are of the base's slots: 1,024 of 32K tokens are 64 pages, not 2,048."""
  spec = Stream.random(0, 1, 2, 2, 4, 64).spec(32768, dtype=jnp.bfloat16)
  cache = Cache.empty(Quest(256, base=SnapKV(1024)), spec, 2)
  assert cache.slots["k"].shape == (1, 2, 1024, 64)
  assert cache.heads["key_min"].shape == (1, 2, 64, 64)


@pytest.mark.slow
def test_a_second_turn_makes_all_bounds_anew():
  """A cut moves every slot: the bounds are those of what stands there now."""
  stream = Stream.random(7, tokens=70)
  layer = begun(Quest(8, PAGE, base=SnapKV(18, 3), dense_layers=0), stream, [25, 12])
  for step in range(5):
    layer.decode([25 + step, 12 + step])
  layer.prefill([11, 20], start=[30, 17], past=None)
  pos = np.asarray(layer.cache.pos)
  for b, h in np.ndindex(pos.shape[:2]):
    for j in range(-(-pos.shape[2] // PAGE)):
      held = pos[b, h, j * PAGE : (j + 1) * PAGE]
      k = keys(stream, b, h, held[held >= 0])
      for name, want in (("key_min", k.min(0)), ("key_max", k.max(0))):
        np.testing.assert_allclose(layer.cache.heads[name][b, h, j], want, atol=BOUNDS)


def test_the_oracle_reads_what_weighs_most_of_what_is_kept():
  stream = Stream.random(8, tokens=60)
  layer = begun(Watched(TopKOracle(6, base=SnapKV(18, 3), dense_layers=0)), stream, [40, 26])
  for step in range(10):
    at = [40 + step, 26 + step]
    _, aux = layer.decode(at)
    pos = np.asarray(layer.cache.pos)
    for b, h in np.ndindex(pos.shape[:2]):
      held = pos[b, h][pos[b, h] >= 0]
      weight = probabilities(stream, b, h, at[b], held).mean(0)
      want = {int(x) for x in held[np.argsort(-weight)[:6]]}
      assert {int(pos[b, h, s]) for s in watched(aux, b, h)} == want
