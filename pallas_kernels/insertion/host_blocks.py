"""Blocks of keys and values in host memory: fetched to the device, appended, and moved by rows.

The store's segments are operands in pinned host memory. What a kernel loads from them or stores to
them crosses the link as it is needed: no staging copy, and nothing but the blocks that are named.
Bytes: a block of keys and values is 2·U·H per KV head, once over the link, once through the
device's memory; the link is the limit by a factor of a hundred.

Grid: (batch row × KV head, block × piece of it). A program moves one piece of keys and the same of
values, so that two requests are on their way at a time. Which segment holds a block is found by
masks: what a mask leaves out is neither read nor written.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from kvjax.kernels.common import backend

WARPS = 4
PIECE = 32  # tokens of a program
NAMES = ("k", "v")
Place = tuple[Any, Any, Any, Array, Array]  # batch row, KV head, block, tokens and columns


def _place(heads: int, pieces: int) -> tuple[Any, Any, Any, Any]:
  """Batch row, KV head, entry of the list, and piece of this program."""
  row, part = pl.program_id(0), pl.program_id(1)
  return row // heads, row % heads, part // pieces, part % pieces


def _lanes(piece: Any, tokens: int, head_dim: int) -> tuple[Array, Array, Array]:
  """Tokens and columns of a piece, and which of them exist."""
  token = piece * PIECE + jnp.arange(PIECE)[:, None]
  column = jnp.arange(pl.next_power_of_2(head_dim))[None, :]
  return token, column, (token < tokens) & (column < head_dim)


def _fetch_kernel(*refs: Any, starts: Sequence[int]) -> None:
  """block, place [B, R], segments of k, then of v, [B, K, n, U, H], copies k, v [B, K, S, H] as
  they are -> copies.
  """
  (block_ref, place_ref, *segments), copies = refs[:-4], refs[-2:]
  heads, (tokens, head_dim) = segments[0].shape[1], segments[0].shape[3:]
  b, head, entry, piece = _place(heads, pl.cdiv(tokens, PIECE))
  block, place = block_ref[b, entry], place_ref[b, entry]

  @pl.when(block >= 0)
  def _():
    token, column, real = _lanes(piece, tokens, head_dim)
    for of_name, out in zip(_halves(segments), copies, strict=True):
      found = _load(of_name, starts, (b, head, block, token, column), real)
      backend.store(out, b, head, place * tokens + token, column, value=found, mask=real)


def _append_kernel(*refs: Any, starts: Sequence[int]) -> None:
  """block [B, E], new k, v [B, K, E, U, H], anything, segments as they are -> segments."""
  block_ref, news, segments = refs[0], refs[1:3], refs[-2 * len(starts) :]
  _, heads, _, tokens, head_dim = news[0].shape
  b, head, entry, piece = _place(heads, pl.cdiv(tokens, PIECE))
  token, column, real = _lanes(piece, tokens, head_dim)
  block = block_ref[b, entry]
  for of_name, new in zip(_halves(segments), news, strict=True):
    x = backend.load(new, b, head, entry, token, column, mask=real)
    _store(of_name, starts, (b, head, block, token, column), x, real)


def _move_kernel(*refs: Any, starts: Sequence[int], others: Sequence[int], heads: int) -> None:
  """row, source [R], other segments [R', …], segments as they are [B, …] -> segments."""
  row_ref, source_ref, sources = *refs[:2], refs[2 : 2 + 2 * len(others)]
  segments = refs[-2 * len(starts) :]
  tokens, head_dim = segments[0].shape[3:]
  i, head, block, piece = _place(heads, pl.cdiv(tokens, PIECE))
  token, column, real = _lanes(piece, tokens, head_dim)
  for theirs, ours in zip(_halves(sources), _halves(segments), strict=True):
    x = _load(theirs, others, (source_ref[i], head, block, token, column), real)
    _store(ours, starts, (row_ref[i], head, block, token, column), x, real)


def _halves(segments: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
  """Those of keys, and those of values."""
  half = len(segments) // 2
  return segments[:half], segments[half:]


def _load(segments: Sequence[Any], starts: Sequence[int], place: Place, real: Array) -> Array:
  """A piece of a block, from the segment that holds it; zeros where none does."""
  row, head, block, token, column = place
  found = jnp.zeros(real.shape, segments[0].dtype)
  for segment, start in zip(segments, starts, strict=True):
    here = (block >= start) & (block < start + segment.shape[2])
    index = row, head, jnp.where(here, block - start, 0), token, column
    found += backend.load(segment, *index, mask=real & here)
  return found


def _store(
  segments: Sequence[Any], starts: Sequence[int], place: Place, x: Array, real: Array
) -> None:
  """Writes a piece of a block into the segment that holds it."""
  row, head, block, token, column = place
  for segment, start in zip(segments, starts, strict=True):
    here = (block >= start) & (block < start + segment.shape[2])
    index = row, head, jnp.where(here, block - start, 0), token, column
    backend.store(segment, *index, value=x.astype(segment.dtype), mask=real & here)


def _starts(segments: Sequence[Array]) -> tuple[int, ...]:
  """The first block of every segment."""
  sizes = [segment.shape[2] for segment in segments]
  return tuple(sum(sizes[:i]) for i in range(len(sizes)))


def fetch(
  store: dict[str, tuple[Array, ...]],
  block: Int[Array, "B R"],
  copies: dict[str, Array],
  place: Int[Array, "B R"],
  *,
  interpret: bool | None = None,
) -> dict[str, Array]:
  """The copies with the named blocks at `place`, in place where they are donated.

  Args:
    store: "k" and "v", each the segments [B, K, n, U, H] of `kvjax.ops.offload.empty`.
    block: int32; −1: nothing is read or written.
    copies: "k" and "v" [B, K, S, H].
    place: int32, as counted in blocks of U slots, for no two blocks of a row the same.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.
  """
  check(store, block)
  batch, heads, _, tokens, _ = store["k"][0].shape
  written = backend.renew(
    functools.partial(_fetch_kernel, starts=_starts(store["k"])),
    *(block, place, *store["k"], *store["v"]),
    held=[copies[name] for name in NAMES],
    grid=(batch * heads, block.shape[1] * pl.cdiv(tokens, PIECE)),
    warps=WARPS,
    stages=1,
    name="fetch_blocks",
    interpret=interpret,
  )
  return dict(zip(NAMES, written, strict=True))


def append(
  store: dict[str, tuple[Array, ...]],
  new: dict[str, Array],
  block: Int[Array, "B E"],
  after: Array,
  *,
  interpret: bool | None = None,
) -> dict[str, tuple[Array, ...]]:
  """The store with new blocks at `block`, in place where it is donated; past the end: nothing.

  Args:
    store: as in `fetch`.
    new: "k" and "v" [B, K, E, U, H].
    block: int32, no number twice in a row.
    after: any array; the writing comes after it has been computed. Without that, XLA may copy a
      store that the same program reads.
    interpret: as in `fetch`.
  """
  check(store, block)
  batch, heads, count, tokens, _ = new["k"].shape
  written = backend.renew(
    functools.partial(_append_kernel, starts=_starts(store["k"])),
    *(block, new["k"], new["v"], after),
    held=[*store["k"], *store["v"]],
    grid=(batch * heads, count * pl.cdiv(tokens, PIECE)),
    warps=WARPS,
    stages=1,
    name="append_blocks",
    interpret=interpret,
  )
  return dict(zip(NAMES, map(tuple, _halves(written)), strict=True))


def move(
  store: dict[str, tuple[Array, ...]],
  row: Int[Array, " R"],
  other: dict[str, tuple[Array, ...]],
  source: Int[Array, " R"],
  *,
  interpret: bool | None = None,
) -> dict[str, tuple[Array, ...]]:
  """The store with rows of another one at `row`, in place where it is donated.

  Args:
    store: as in `fetch`.
    row: int32, no number twice.
    other: a store whose segments may be cut elsewhere.
    source: int32, the rows of `other`.
    interpret: as in `fetch`.
  """
  segments, sources = ([*x["k"], *x["v"]] for x in (store, other))
  _, heads, _, tokens, _ = segments[0].shape
  blocks = sum(x.shape[2] for x in store["k"])
  written = backend.renew(
    functools.partial(
      _move_kernel, starts=_starts(store["k"]), others=_starts(other["k"]), heads=heads
    ),
    *(row, source, *sources),
    held=segments,
    grid=(row.size * heads, blocks * pl.cdiv(tokens, PIECE)),
    warps=WARPS,
    stages=1,
    name="move_rows",
    interpret=interpret,
  )
  return dict(zip(NAMES, map(tuple, _halves(written)), strict=True))


def check(store: dict[str, tuple[Any, ...]], block: Any) -> None:
  """Raises on a store that the kernels do not take; the message names the argument."""
  if block.dtype != "int32":
    raise TypeError(f"block: found dtype {block.dtype.name}, expected int32")
  if block.ndim != 2 or block.shape[0] != store["k"][0].shape[0]:
    raise ValueError(f"block: found shape {block.shape}, expected [{store['k'][0].shape[0]}, R]")
  for segment in (*store["k"], *store["v"]):
    if segment.size >= 2**31:
      raise ValueError(
        f"store: found a segment of shape {segment.shape}, expected less than 2**31 elements"
      )
