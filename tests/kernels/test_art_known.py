"""The kernel of ART's known lengths against a loop in float64; on a GPU it is the compiled one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import ART
from kvjax.kernels.art.known import read
from kvjax.kernels.common.config import Config
from kvjax.methods.art import known
from tests.kernels.art_oracle import inputs
from tests.kernels.decode_oracle import same_bits
from tests.methods.art_walks import known_walk

WHERE = {
  "a long tail, in many pieces": (3, 1, 48, {"patience": 5, "margin": 6, "tau": 0.4}),
  "a tile in parts, first tiles first": (2, 3, 96, {"patience": 2, "margin": 1, "sinks": 20}),
  "the whole output, relative": (2, 2, 24, {"margin": 2, "probe": "full", "relative": True}),
  "tiles listed by heads": (2, 3, 64, {"patience": 3, "margin": 3, "tau": 0.4}),
  "entries of a fourth of a tile": (3, 2, 48, {"patience": 2, "margin": 2}),
  "others in the places of tiles": (2, 3, 64, {"patience": 2, "margin": 2, "sinks": 30}),
}


def drawn_tables(name, tile, shape, used):
  """Entries in an order of each head's own, how many count, and their slots; None: no table."""
  if not name.startswith(("tiles", "entries")):
    return None
  unit = tile if name.startswith("tiles") else tile // 4
  rng, most = np.random.default_rng(1), -(-max(used) // unit)
  table = np.full((*shape, most), -1, np.int32)
  count = np.array([[-(-n // unit) - h for h in range(shape[1])] for n in used], np.int32)
  for b, h in np.ndindex(*shape):
    table[b, h, : count[b, h]] = rng.permutation(-(-used[b] // unit))[: count[b, h]]
  return jnp.asarray(table), jnp.asarray(count), unit


def tiles_listed(table, count, unit, b, h, tile, used):
  """Slots of each tile of a head's table."""
  entries = np.asarray(table)[b, h, : int(count[b, h])]
  per = tile // unit
  groups = (entries[i : i + per] for i in range(0, len(entries), per))
  return [
    [s for e in group for s in range(e * unit, min((e + 1) * unit, used))] for group in groups
  ]


def drawn_places(name, tile, first, shape, slots, used):
  """Distances from the places of a walk to the tiles that it takes there; 0 for first ones."""
  if not name.startswith("others"):
    return None
  rng, moved = np.random.default_rng(1), np.zeros((*shape, -(-slots // tile)), np.int32)
  for b, h in np.ndindex(*shape):
    own = np.arange(first, -(-used[b] // tile) - 1)
    moved[b, h, own] = rng.permutation(own) - own
  return moved


@pytest.mark.slow
@pytest.mark.parametrize("name", WHERE)
def test_lengths_of_each_head_against_a_loop(name):
  """Lengths too short, too long and unknown; slots after the last one hold NaN."""
  heads, groups, size, kwargs = WHERE[name]
  tile, slots, used = 32 if "parts" in name else 16, 700, [690, 277]
  method = ART(**{"tau": 0.5, "phi": 0.4, "patience": 1, "tile": tile, **kwargs})
  q, k, v = inputs(size, 2, heads, groups, slots, size)
  most = -(-np.array(used) // tile)[:, None]
  length = np.random.default_rng(0).integers(1, most + 9, (2, heads)).astype(np.int32)
  length[0, 0], length[1, -1] = 0, 4
  stop = np.broadcast_to(np.array(used, np.int32)[:, None], length.shape)
  held = (np.arange(slots) < stop[..., None])[..., None]
  how = {name: getattr(method, name) for name in ("tau", "phi", "patience", "relative")}
  how["tail"] = known.tail(method.patience, method.margin)
  how |= {"tile": tile, "full": method.probe == "full", "kept": -(-method.sinks // tile)}
  if "parts" in name:
    how["cut"] = Config(16, 1, 4, 1)
  entries = drawn_tables(name, tile, length.shape, used)
  if entries is not None:
    how["unit"] = entries[2]
  how["following"] = functools.partial(known.following, margin=method.margin)
  moved = drawn_places(name, tile, how["kept"], length.shape, slots, used)
  if moved is not None:
    how["moved"], how["kept"] = jnp.asarray(moved), how["kept"] + 1  # and the newest one
    method = dataclasses.replace(method, sinks=how["kept"] * tile)
  run = jax.jit(functools.partial(read, **how))
  poisoned = (jnp.asarray(np.where(held, x, np.nan)) for x in (k, v))
  operands = jnp.asarray(q), *poisoned, jnp.zeros_like(stop), jnp.asarray(stop), jnp.asarray(length)
  listed = {} if entries is None else dict(zip(("table", "count"), entries, strict=False))
  found, again = (run(*operands, **listed) for _ in range(2))
  same_bits(found, again)
  state, rounded = found[:2]
  walked, following = map(np.asarray, found[2:])
  stopped = further = close = 0
  for b, h in np.ndindex(length.shape):
    tiles = [range(t, min(t + tile, used[b])) for t in range(0, used[b], tile)][::-1]
    first = how["kept"] - (moved is not None)
    if moved is not None:
      tiles = [tiles[len(tiles) - 1 - t] for t in range(len(tiles))]  # from the first up
      tiles = [tiles[t + moved[b, h, t]] for t in range(len(tiles))][::-1]
    tiles = tiles[len(tiles) - first :][::-1] + tiles[: len(tiles) - first]
    if entries is not None:
      tiles = tiles_listed(*entries, b, h, tile, used[b])
    flat = [s for t in tiles for s in t]
    keys, values = (np.float64(x[b, h, flat]) for x in (k, v))
    sizes = [len(t) for t in tiles]
    want, least, (after, _), near = known_walk(
      np.float64(q[b, h]), keys, values, sizes, method, length[b, h]
    )
    if near < 1e-5:
      close += 1
      continue
    assert (walked[b, h], following[b, h]) == (least, after)
    np.testing.assert_allclose(state.o[b, h], want, atol=2e-5)
    stopped += least < len(sizes)
    further += 0 < length[b, h] < least
  assert close <= 1 and stopped and further
  np.testing.assert_array_equal(rounded, state.o)


def test_a_tail_has_its_limit():
  q, k, v = map(jnp.asarray, inputs(0, 1, 1, 1, 20, 16))
  where = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32)
  with pytest.raises(NotImplementedError, match="tail: found 63, expected up to 62"):
    read(q, k, v, *where, tail=63, patience=5, following=known.following)
