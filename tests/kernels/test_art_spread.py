"""ART's walk by many programs against the walk of one, and how shares are cut and counted.

`test_art_kernel` holds both to Algorithm 1.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.kernels.art import judge, settle, spread
from kvjax.kernels.art.remaining import calm_before
from kvjax.kernels.art.spread import waves
from kvjax.kernels.art.walk import walk
from kvjax.kernels.common.config import Config
from tests.kernels.art_oracle import inputs
from tests.kernels.decode_oracle import same_bits


@pytest.mark.rest
@pytest.mark.slow
@pytest.mark.parametrize("share", [8, 1, 2])
@pytest.mark.parametrize(
  "kwargs",
  [
    {},
    {"per_head": True, "patience": 2},
    {"full": True, "kept": 9},
    {"relative": True, "tau": 0.3},
    {"cut": Config(16, 1, 4, 1)},
  ],
  ids=str,
)
def test_many_programs_walk_as_one_does(share, kwargs, monkeypatch):
  """They end at the same tiles, in several waves; what they have read behind is told."""
  monkeypatch.setattr(spread, "programs", lambda rows, interpret: 18)
  tile = 32
  q, k, v = map(jnp.asarray, inputs(9, 3, 2, 3, 2000, 64))
  bounds = jnp.zeros((3, 1), jnp.int32), jnp.asarray([[1990], [577], [31]], jnp.int32)
  detector = {"tau": 0.12, "phi": 0.1, "patience": 3, "tile": tile, "splits": 1, **kwargs}
  run = functools.partial(walk, q, k, v, None, None, *bounds, **detector)
  alone, many, again, loaded = (
    run(share=0),
    *(run(share=share) for _ in range(2)),
    run(share=share, loaded=True),
  )
  np.testing.assert_array_equal(alone[2], many[2])
  # The same float32 products, added up in another order.
  np.testing.assert_allclose(alone[0].o, many[0].o, atol=1e-5)
  np.testing.assert_allclose(alone[0].lse, many[0].lse, atol=1e-5)
  same_bits(many, again)
  tiles = -(-np.array([1990, 577, 31]) // tile)[:, None, None, None]
  assert (np.asarray(many[2]) < tiles).any() and (np.asarray(many[2]) <= tiles).all()
  ends = {first + shares * share for first, shares in waves(63, 6, share, 18)}
  assert len(ends) == (4 if share < 8 else 2)
  read = np.asarray(loaded[2])
  assert (read >= np.asarray(many[2])).all()
  assert all(
    x in ends or x == most for x, most in zip(read.max((1, 2, 3)), tiles[:, 0, 0, 0], strict=True)
  )


@pytest.mark.slow
@pytest.mark.parametrize(("patience", "walked", "loaded"), [(2, 3, 6), (5, 6, 6), (7, 8, 18)])
def test_stable_tiles_are_counted_over_waves_and_loaded_by_them(
  patience, walked, loaded, monkeypatch
):
  """Values that never change: stable from the second tile on. Waves end at tiles 6 and 18."""
  monkeypatch.setattr(spread, "programs", lambda rows, interpret: 3)
  q, k, v = map(jnp.asarray, inputs(1, 1, 1, 1, 400, 24))
  stop = jnp.array([[400]], jnp.int32)
  detector = {"tau": 0.7, "phi": 0.4, "patience": patience, "tile": 16, "splits": 1, "share": 2}
  assert waves(25, 1, 2, 3) == [(0, 3), (6, 6), (18, 4)]
  run = functools.partial(walk, q, k, v * 0 + 1, None, None, stop * 0, stop, **detector)
  assert run(chunk=patience)[2].item() == walked
  assert run(chunk=64, loaded=True)[2].item() == loaded  # a chunk has no part in it


def test_waves():
  assert waves(256, 2, 8, 264) == [(0, 32)]
  assert waves(1024, 8, 8, 264) == [(0, 33), (264, 66), (792, 29)]
  assert waves(256, 64, 8, 264) == [(0, 4), (32, 8), (96, 16), (224, 4)]
  assert waves(4096, 128, 8, 264) == [(0, 2), (16, 4), (48, 8), (112, 498)]


@pytest.mark.slow  # what programs hold is cut above too, into shares
@pytest.mark.parametrize("kwargs", [{}, {"per_head": True, "full": True}], ids=str)
def test_walks_are_the_same_however_little_a_program_holds(kwargs, monkeypatch):
  """Lanes one by one, two shares at a time: what is counted and added goes on between these."""
  q, k, v = map(jnp.asarray, inputs(4, 2, 1, 3, 900, 48))
  bounds = jnp.zeros((2, 1), jnp.int32), jnp.asarray([[890], [277]], jnp.int32)
  detector = {"tau": 0.2, "phi": 0.1, "patience": 5, "tile": 16, "splits": 1, **kwargs}
  run = functools.partial(walk, q, k, v, None, None, *bounds, **detector)
  alone = run(share=0)
  monkeypatch.setattr(judge, "VALUES", 64)
  monkeypatch.setattr(settle, "VALUES", 64)
  assert judge.cut_of(12, 2, 3, 32, 6) == (6, 1, 2)
  assert settle.cut_of(12, 2, 3) == (4, 1)
  few = run(share=2)
  np.testing.assert_array_equal(alone[2], few[2])
  assert 5 < few[2][0].max() < 890 // 16
  # As above: blocks of another size are another order of sums.
  np.testing.assert_allclose(alone[0].o, few[0].o, atol=1e-5)
  np.testing.assert_allclose(alone[0].lse, few[0].lse, atol=1e-5)


def test_rows_of_stable_tiles_are_counted_across_shares():
  """Shares of 0 to 3 stable tiles at their end, of which some begin a row."""
  rng = np.random.default_rng(0)
  count, broken = rng.integers(0, 4, (19, 5)), rng.random((19, 5)) < 0.3
  before = rng.integers(0, 9, 5)
  want, calm = np.zeros((19, 5), int), before
  for t in range(19):
    want[t], calm = calm, np.where(broken[t], 0, calm) + count[t]
  np.testing.assert_array_equal(calm_before(*map(jnp.asarray, (count, broken, before))), want)
