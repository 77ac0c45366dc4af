"""Prompts read piece by piece: which tokens are a piece, and what is held between two."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.core.traits import Stream
from kvjax.families import sliding
from kvjax.families.method import Method
from kvjax.models.nn.transformer import Caches

# Reads valid [B] tokens [B, T] after at most so many that are cached: logits, caches, reports.
Read = Callable[[Caches, np.ndarray, np.ndarray, int | None], Any]


def width(stream: Stream, tokens: int, *, bounded: bool) -> int:
  """Tokens to which a piece of `tokens` is padded: of a stream, one of three numbers.

  Chunks with a `bounded` number of cached tokens, for which they are compiled, have one.
  """
  short = stream.chunk if bounded else -(-stream.chunk // 8)
  return next(n for n in (short, stream.chunk, stream.last) if n >= tokens)


class Piece(NamedTuple):
  """A piece that was read.

  Attributes:
    start, valid: int [B], each row's first token, counted from the turn's first, and its tokens.
    logits: as the model gives them.
    reports: what the method reports, in a list; empty where nobody asked.
  """

  start: Int[np.ndarray, " B"]
  valid: Int[np.ndarray, " B"]
  logits: Array
  reports: list[Any]


class Pieces:
  """Reads a turn of every row in pieces, which depend on a token's place in the turn only.

  A row's pieces are whole chunks as long as more tokens follow than end a turn
  (`Stream.pieces`). They have two widths, whatever the rows' lengths: that of a chunk, and a short
  one for the ends of turns; a third one where those are longer than a chunk.

  Args:
    read: calls the model.
    caches: of the rows; they are donated to `read`.
    method: the KV-cache method.
    chunk: tokens of a piece; None: as the method streams.
    cached: tokens in each row, or in the fullest one.
    logits: float32 [B, V] before the first piece.
    grown: gives caches room for so many tokens in the fullest row.

  Attributes:
    caches: as of the last piece, also where an interrupt or a callback's error ended the reading.
    logits: float32 [B, V] after each row's last piece.
    done: int [B], tokens of the turn that were read.
    waiting: each row's tokens that were not.
  """

  def __init__(
    self,
    read: Read,
    caches: Caches,
    method: Method,
    chunk: int | None,
    cached: int | Int[np.ndarray, " B"],
    logits: Array | None = None,
    grown: Callable[[Caches, int], Caches] = lambda caches, _: caches,
  ) -> None:
    self._read, self._method, self._cached, self._grown = read, method, cached, grown
    stream = method.traits.stream if chunk is None else Stream(chunk)
    assert stream is not None  # or there are no pieces
    self._chunk, self._last = stream.chunk, stream.last
    self._bounded = chunk is not None
    self._width = functools.partial(width, stream, bounded=self._bounded)
    self.caches, self.logits = caches, logits
    self.done = np.zeros(caches[0].seen.shape[0], np.int64)
    self.waiting: list[np.ndarray] = [np.zeros(0, np.int32) for _ in self.done]

  def add(self, tokens: np.ndarray, lengths: Sequence[int] | np.ndarray) -> None:
    """Puts the first tokens of each row of [B, T] after those that wait."""
    new = zip(self.waiting, tokens, lengths, strict=True)
    self.waiting = [np.concatenate([row, more[:n]]) for row, more, n in new]

  def read(self, *, ending: bool) -> Iterator[Piece]:
    """Reads the whole chunks that wait, and if the turn is `ending` all that waits."""
    while (valid := self._next(ending)).any():
      piece = np.zeros((len(valid), self._width(int(valid.max()))), np.int32)
      for to, row, n in zip(piece, self.waiting, valid, strict=True):
        to[:n] = row[:n]
      bound = self._bound() if self._bounded else None
      with undivided():
        self.caches = self._grown(self.caches, int((self._cached + self.done + valid).max()))
        logits, caches, *reports = self._read(self.caches, piece, valid, bound)
        start, self.caches, self.done = self.done, caches, self.done + valid
        self.waiting = [row[n:] for row, n in zip(self.waiting, valid, strict=True)]
        if logits.ndim == 2:  # rows that take no part keep their logits
          held = logits if self.logits is None else self.logits
          self.logits = jnp.where((valid > 0)[:, None], logits, held)
      yield Piece(start, valid, logits, reports)

  def _next(self, ending: bool) -> Int[np.ndarray, " B"]:
    """Tokens of each row's next piece."""
    waiting = np.array([len(row) for row in self.waiting])
    if ending and self._bounded:  # all rows at once: a row's bound hangs on its own tokens before
      return np.minimum(waiting, self._chunk)
    whole = np.where(waiting >= self._chunk + self._last, self._chunk, 0)
    if whole.any() or not ending:
      return whole
    rest = np.maximum(waiting - self._last, 0)
    return rest if rest.any() else waiting

  def _bound(self) -> int | None:
    """A static bound on the cached tokens that takes few values; what needs none gets one value."""
    cached, bound = int((self._cached + self.done).max()), self._chunk
    if cached == 0:
      return 0
    own = sliding.served(self.caches)
    if not self._method.traits.positional or not own:
      return None
    while bound < cached:
      bound *= 2
    return min(bound, *(cache.size for cache in own))


def side_by_side(pieces: Sequence[Piece], size: int) -> Array:
  """Logits [B, T, V] of every position, from those of pieces [B, n, V]; 0 where there is none."""
  index = np.full((len(pieces[0].valid), size), -1)
  offset = 0
  for piece in pieces:
    for row, (start, n) in enumerate(zip(piece.start, piece.valid, strict=True)):
      index[row, start : start + n] = offset + np.arange(n)
    offset += piece.logits.shape[1]
  joined = jnp.concatenate([piece.logits for piece in pieces], 1)
  found = jnp.take_along_axis(joined, np.maximum(index, 0)[..., None], 1, mode="clip")
  return jnp.where((index >= 0)[..., None], found, 0)


@contextlib.contextmanager
def undivided() -> Iterator[None]:
  """Has a first Ctrl-C or SIGTERM wait for the end of the block; a second one does not wait."""
  if threading.current_thread() is not threading.main_thread():
    yield  # other threads are not interrupted
    return
  came: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
  handlers = {
    number: handler
    for number in (signal.SIGINT, signal.SIGTERM)
    if callable(handler := signal.getsignal(number))
  }

  def wait(number: int, frame: Any) -> None:
    came.append((handlers[signal.Signals(number)], (number, frame)))
    if len(came) > 1:
      call, told = came.pop()
      call(*told)

  try:
    for number in handlers:
      signal.signal(number, wait)
    yield
  finally:
    for number, handler in handlers.items():
      signal.signal(number, handler)
    if came:
      call, told = came[0]
      call(*told)
