"""The cut of decode attention where heads share a row of slots."""

import jax
import jax.numpy as jnp
import pytest

from kvjax.kernels.common import split_k


def dealt(tiles: list[int], programs: int, monkeypatch) -> list[list[split_k.Piece]]:
  """The pieces of every program."""
  found = []
  of = jnp.asarray([*tiles, *[0] * (1100 - len(tiles))])  # one width: one program of each kind
  for pid in range(programs):
    monkeypatch.setattr(split_k.pl, "program_id", lambda axis, pid=pid: jnp.int32(pid))
    found.append([])
    with jax.disable_jit():
      split_k.level(lambda at, _: of[at], found[-1].append, rows=len(tiles), programs=programs)
  return found


@pytest.mark.core(2)
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
