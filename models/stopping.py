"""One row's text as it is generated, cut at the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from .tokenizer import TextStream


class RowText:
  """Turns a row's tokens into text that never shows any part of a stop string.

  The end of the text that may still become a stop string is held back until it is decided.

  Args:
    stream: of `Tokenizer.stream`, fresh.
    stop: strings that end the row.

  Attributes:
    text: what has been released so far.
    ended: whether a stop string has been met; nothing is released after it.
  """

  def __init__(self, stream: TextStream, stop: Sequence[str] = ()):
    self.text = ""
    self.ended = False
    self._stream = stream
    self._stop = tuple(stop)
    self._held = ""

  def feed(self, token: int) -> str:
    """The text that this token releases; may be empty."""
    return "" if self.ended else self._release(self._stream.feed(token), last=False)

  def flush(self) -> str:
    """What was held back, once no token follows."""
    return "" if self.ended else self._release(self._stream.flush(), last=True)

  def _release(self, new: str, *, last: bool) -> str:
    self._held += new
    found = [at for at in (self._held.find(s) for s in self._stop) if at >= 0]
    self.ended = bool(found)
    cut = min(found) if found else len(self._held) - (0 if last else self._undecided())
    out, self._held = self._held[:cut], self._held[cut:]
    self.text += out
    return out

  def _undecided(self) -> int:
    """Length of the longest end of the held text that begins a stop string."""
    longest = min(len(self._held), max(map(len, self._stop), default=1) - 1)
    ends = (
      n for n in range(longest, 0, -1) if any(s.startswith(self._held[-n:]) for s in self._stop)
    )
    return next(ends, 0)
