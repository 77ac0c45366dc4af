"""One row's text as it is generated, cut at the first stop string."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from kvjax.models.io.tokenizer import TextStream


class RowText:
  """Turns a row's tokens into text that never shows any part of a stop string.

  The end of the text that may still become a stop string is held back until it is decided. Special
  tokens, which the text leaves out, are found in stop strings all the same ("<|im_end|>").

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
    self._held: list[str] = []  # characters, and "" at the places of `_marked`
    self._marked = ""  # the same with special tokens written out: what is searched

  def feed(self, token: int) -> str:
    """The text that this token releases; may be empty."""
    if self.ended:
      return ""
    left_out = self._stream.left_out(token) if self._stop else ""
    new = self._stream.feed(token)
    if left_out:  # it stands behind bytes that the stream holds back until another token follows
      held = copy.copy(self._stream).flush()
      new = held if any(s in self._marked + held + left_out for s in self._stop) else ""
    self._held += [*new, *[""] * len(left_out)]
    return self._release(new + left_out, last=False)

  def flush(self) -> str:
    """Text that was held back, once no token follows."""
    if self.ended:
      return ""
    new = self._stream.flush()
    self._held += new
    return self._release(new, last=True)

  def _release(self, new: str, *, last: bool) -> str:
    self._marked += new
    found = [at for at in (self._marked.find(s) for s in self._stop) if at >= 0]
    self.ended = bool(found)
    cut = min(found) if found else len(self._marked) - (0 if last else self._undecided())
    out = "".join(self._held[:cut])
    self._held, self._marked = self._held[cut:], self._marked[cut:]
    self.text += out
    return out

  def _undecided(self) -> int:
    """Length of the longest end of the held text that begins a stop string."""
    longest = min(len(self._marked), max(map(len, self._stop), default=1) - 1)
    ends = (
      n for n in range(longest, 0, -1) if any(s.startswith(self._marked[-n:]) for s in self._stop)
    )
    return next(ends, 0)
