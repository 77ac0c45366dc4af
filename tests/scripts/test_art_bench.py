"""ART's suites: walks of layers and of whole steps end where they should, over every base."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.kernels.art import walk as kernel
from kvjax.models.io.presets import PRESETS
from kvjax.models.nn.transformer import Transformer
from kvjax.programs import bench, suites
from kvjax.programs.suites import e2e
from scripts.benches import art, art_e2e

# ---- a layer: outputs alone would let a walk pass that never stops


@functools.cache
def quick(**options):
  """The quick case whose walks stop, by a kernel with these options instead."""
  walk = kernel.walk
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(kernel, "walk", lambda *args, **how: walk(*args, **{**how, **options}))
    case = next(art.cases(True, only="decay"))
    return case, bench.check(case)["ART"], bench.check_steps(case)["ART"]


@pytest.mark.slow
def test_walks_of_the_quick_shapes_stop_where_the_references_do():
  case, error, apart = quick()
  walked = case.steps()
  assert (walked < -(-art.QUICK_STOPS.slots // art.QUICK_TILE)).any() and len(set(walked.flat)) > 1
  assert error <= case.tolerance and apart == 0


@pytest.mark.slow  # that other steps get no time is shown below, of a case that takes none
@pytest.mark.parametrize("patience", [math.inf, 6], ids=["never", "a tile later"])
def test_a_walk_that_stops_elsewhere_is_wrong(patience):
  case, error, apart = quick(patience=patience)
  assert apart > case.slack
  assert error <= case.tolerance  # which is why outputs are not enough


def test_a_contender_of_other_steps_gets_no_time():
  """As many steps apart as the case allows pass."""

  def contender(name, steps):
    counted = functools.partial(np.array, [[3, steps]])
    return suites.Contender(name, lambda: 1e-6, lambda: np.ones(2), steps=counted)

  case = suites.Case(
    *("case", "none", 1, lambda: np.ones(2), 1e-3, (contender("near", 8), contender("far", 9))),
    subject="near",
    steps=lambda: np.array([[3, 7]]),
    slack=1,
  )
  report = bench.measure(case, 1)
  near, far = report["results"]
  assert "us" in near and near["steps_apart"] == 1
  assert "us" not in far and far["error"] == 0
  assert "2 steps apart, expected at most 1" in bench.table(report)


@pytest.mark.slow
@pytest.mark.sweep
def test_known_lengths_read_what_they_say():
  """Everything where nothing stops; else each head its own share."""
  cases = list(art.cases(True, only="known"))
  assert len({tuple(case.steps().flat) for case in cases}) == len(cases) == 3
  for case in cases:
    assert bench.check(case)["ART, known"] <= case.tolerance
    assert bench.check_steps(case)["ART, known"] == 0


# ---- whole steps

BASES = list(art_e2e.bases(4096))


def test_recorded_shares():
  """0.976 of the tiles with 15.3 % of the groups stopped: those took 1 − 0.024 / 0.153 of it."""
  shares = {"Full": (0.976, 0.686, 0.81), "SnapKV 0.2": (0.973, 0.573)}
  for base, read in shares.items():
    for end, visited in zip(art_e2e.stops(base).values(), read, strict=True):
      assert 1 - end.stopped * (1 - end.after) == pytest.approx(visited, abs=2e-3)
  first = art_e2e.stops("Full")["1e-5"]
  assert first.stopped == pytest.approx(0.1528, abs=1e-4)
  assert first.after == pytest.approx(0.8454, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
  "base, splits",
  [("Full", 2), ("StreamingLLM 0.8", 1), ("SnapKV 0.2", 2), ("PyramidKV 0.2", 1)],
)
def test_walks_end_where_they_are_told_to(base, splits):
  """The share that a step reports is what the suite says of it, and some heads are not stopped."""
  tokens, batch, model = 512, 2, e2e.weights("tiny")
  method = art_e2e.Forced(art_e2e.bases(tokens)[base], after=0.4, tile=2, splits=splits)
  held = art_e2e.filled(model, method, batch, tokens, 0.5, jax.random.key(0))
  sizes = [cache.size for cache in held]
  for _ in range(3):
    _, held, aux = model.decode(jnp.zeros(batch, jnp.int32), held, method, with_aux=True)
    tiles = np.array([layer["tiles"] for layer in aux])  # [L, B, K, G]
  heads = tiles.shape[1:3]
  for layer, size in enumerate(sizes):
    stops = art_e2e.stopping(*heads, layer, 0.5)
    every = -(-min(size, tokens + 3) // 2)
    assert stops.any() and not stops.all()
    np.testing.assert_array_equal(tiles[layer][~stops], every)
    share = method.visited(heads, size)
    assert share < 0.5 and np.abs(tiles[layer][stops] / every - share).max() < 0.03


def test_bases_are_as_large_as_they_say():
  model = e2e.weights("tiny")
  bases = art_e2e.bases(512)
  full = art_e2e.cache_bytes(model, bases["Full"], 2, 512)
  for base, method in bases.items():
    share = 1.0 if base == "Full" else float(base.split()[1])
    assert art_e2e.cache_bytes(model, method, 2, 512) / full == pytest.approx(share, rel=0.02)


@pytest.mark.core(2)
@pytest.mark.parametrize("base", BASES)
def test_kernels_take_every_base(base):
  """At the full shape, two layers of it: nothing of ART falls back."""
  config = dataclasses.replace(PRESETS["Llama-3.1-8B"], layers=2)
  model = nnx.eval_shape(lambda: Transformer(config, impl="pallas", rngs=nnx.Rngs(0)))
  method = art_e2e.Forced(art_e2e.bases(4096)[base], after=0.5)
  graph, leaves = nnx.split(model)

  def step(leaves, key):
    decoder = nnx.merge(graph, leaves)
    held = art_e2e.filled(decoder, method, 2, 4096, 0.5, key)
    return decoder.decode(jnp.zeros(2, jnp.int32), held, method)[0]

  assert jax.eval_shape(step, leaves, jax.random.key(0)).shape == (2, config.vocab)


@pytest.mark.slow
@pytest.mark.parametrize(("after", "share"), [(1.0, 1.0), (0.6, 0.6)])
def test_known_lengths_stay(after, share):
  """A step reads the same share as the one before, and all where nothing stops."""
  model, method = e2e.weights("tiny"), art_e2e.Held(after=after, tile=4)
  held = art_e2e.filled(model, method, 2, 400, 1.0, jax.random.key(0))
  for step in range(3):
    _, held, aux = model.decode(jnp.zeros(2, jnp.int32), held, method, with_aux=True)
    every = 100 if share < 1 else -(-(401 + step) // 4)
    assert (np.array([layer["tiles"] for layer in aux]) == round(share * every)).all()
