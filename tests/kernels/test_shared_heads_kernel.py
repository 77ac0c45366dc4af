"""Decode attention where heads share a row of slots: its cut, and a float64 oracle.

On a GPU the same tests run the compiled kernel.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.kernels.common import split_k
from kvjax.kernels.common.config import Config
from kvjax.kernels.decode.dense import decode_with_output
from tests.kernels.dense_oracle import exact


def dealt(tiles: list[int], programs: int, monkeypatch) -> list[list[split_k.Piece]]:
  """The pieces of every program."""
  found = []
  of = jnp.asarray([*tiles, *[0] * (1 << 10)])
  for pid in range(programs):
    monkeypatch.setattr(split_k.pl, "program_id", lambda axis, pid=pid: jnp.int32(pid))
    found.append([])
    with jax.disable_jit():
      split_k.level(lambda at, _: of[at], found[-1].append, rows=len(tiles), programs=programs)
  return found


@pytest.mark.parametrize(
  ("tiles", "programs"),
  [
    ([3], 1),
    ([5, 1, 9], 4),  # 15 tiles: three or four each
    ([7, 7, 7], 4),
    ([0, 0, 3, 0], 2),
    ([0, 0, 0], 5),
    ([6, 9, 12, 15], 12),  # one row to a program
    ([6, 9, 12, 15], 11),  # one piece too many for that
    ([4, 5, 6, 8] * 2, 7),  # most programs cross a row's end
    ([1] * 40, 7),  # several rows to a program
  ],
)
def test_every_tile_is_dealt_once_and_all_have_as_many(tiles, programs, monkeypatch):
  rows = [[] for _ in tiles]
  sizes, numbers = [], []
  for pieces in dealt(tiles, programs, monkeypatch):
    sizes.append(0)
    for piece in pieces:
      row, part, number = int(piece.row), int(piece.part), int(piece.pid)
      low, high = map(int, piece.share(jnp.int32(tiles[row])))
      assert bool(piece.active)
      assert part == len(rows[row])  # in order, as the join reads them
      rows[row].append((low, high, int(piece.parts), number))
      numbers.append(number)
      sizes[-1] += max(high - low, 0)
  for count, parts in zip(tiles, rows, strict=True):
    assert [low for low, *_ in parts] == [0, *(high for _, high, *_ in parts)][:-1]
    assert parts[-1][1] == count
    assert all(of == len(parts) for *_, of, _ in parts)
    first = parts[0][-1]
    assert [number for *_, number in parts] == list(range(first, first + len(parts)))
  assert len(set(numbers)) == len(numbers)
  assert max(numbers) < split_k.most_pieces(len(tiles), programs)
  least = sum(max(count, 1) for count in tiles)
  assert max(sizes) <= -(-least // programs)


@pytest.mark.core
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("programs", [2, 5, 23, 64])
def test_equals_oracle(programs, dtype):
  """Spans of 0 to 190 slots that begin anywhere, three heads to a row of slots, odd groups."""
  rng = np.random.default_rng(3)
  batch, heads, kept, groups, slots, head_dim = 3, 6, 2, 3, 300, 32
  lengths = np.array([[0, 190, 17], [1, 64, 33]])
  starts = np.cumsum(lengths, -1) - lengths
  start = np.stack([starts.reshape(-1) + 7 * b for b in range(batch)]).astype(np.int32)
  stop = start + np.stack([np.roll(lengths, b, 0).reshape(-1) for b in range(batch)])
  q = jnp.asarray(rng.standard_normal((batch, heads, groups, head_dim)), dtype)
  k, v = (jnp.asarray(rng.standard_normal((batch, kept, slots, head_dim)), dtype) for _ in "kv")
  used = np.zeros((batch, kept, slots), bool)
  for b, h in np.ndindex(batch, heads):
    used[b, h // 3, start[b, h] : stop[b, h]] = True
  k, v = (jnp.where(used[..., None], x, jnp.nan) for x in (k, v))  # others are not read
  state, rounded, logits = decode_with_output(
    *(q, k, v, jnp.asarray(start), jnp.asarray(stop, jnp.int32)),
    logits=True,
    config=Config(tile=16, programs=programs, warps=4, stages=2),
  )
  own = (np.repeat(x, heads // kept, 1) for x in (k, v))
  o, m, l, raw = exact(q, *own, lambda b, h: range(start[b, h], stop[b, h]))
  tolerance = {"float32": 2e-5, "bfloat16": 1e-2}[dtype]
  for found, want in ((state.o, o), (state.m, m), (state.l, l), (logits, raw)):
    np.testing.assert_allclose(found, want, atol=tolerance, rtol=tolerance)
  np.testing.assert_allclose(rounded.astype(jnp.float32), o, atol=tolerance, rtol=tolerance)
