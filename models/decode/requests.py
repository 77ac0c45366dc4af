"""Requests of a batch whose rows come and go: what each asked for, how far it is, its answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from jaxtyping import Array

from kvjax.models.decode.sampling import Sampling
from kvjax.models.decode.stopping import RowText
from kvjax.models.nn.transformer import Caches

End = Literal["stop", "limit", "cancelled", "failed"]
AHEAD = 8  # steps under way while the host reads one, or sees to a prompt


@dataclasses.dataclass(frozen=True)
class Answer:
  """The end of a request, and its answer.

  Attributes:
    request: the number that `Batcher.submit` or `insert` gave.
    tokens: int32 [n], the answer; a stop token, or the token that completes a stop string, is last.
    end: why it ended: at a stop, at its limit, cancelled, or failed.
    text: of the tokens, without stops; None where the batcher has no tokenizer.
    logprobs: float32 [n], log-probability in nats of each token under the model; None where the
      batcher was not asked for them.
    caches: of its row, at batch 1, for a request that keeps them: `prefill` reads a further turn
      into them. After a stop string, or a stop token beyond the first 8, up to `AHEAD` = 8 more
      tokens are in.
    error: what failed.
  """

  request: int
  tokens: np.ndarray
  end: End
  text: str | None = None
  logprobs: np.ndarray | None = None
  caches: Caches | None = None
  error: Exception | None = None


@dataclasses.dataclass(eq=False)
class Request:
  """A request from its submission to its end; `row` −1: it waits for one.

  Prompts of equal `widths` may be read together, unless one is to be read `alone`. `sound` says
  whether the logits of a reading are finite, and which are this prompt's, where nobody has looked.
  """

  number: int
  limit: int
  seed: int
  stop: tuple[int, ...]
  sampling: Sampling
  text: RowText | None
  on_text: Callable[[str], Any] | None
  keep: bool
  prompt: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
  widths: tuple[int, ...] = ()
  alone: bool = False
  row: int = -1
  steps: int = 0  # dispatched with it
  tokens: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)
  new: str = ""  # text that `on_text` was not told
  sound: tuple[Array, int] | None = None
  over: bool = False

  def feed(self, token: int, logprob: float | None) -> End | None:
    """Takes a token; the reason if it is the last one."""
    self.tokens.append(token)
    if logprob is not None:
      self.logprobs.append(logprob)
    stopped, last = token in self.stop, len(self.tokens) == self.limit
    if self.text is not None:
      self.new += "" if stopped else self.text.feed(token)
      self.new += self.text.flush() if stopped or last else ""
      stopped |= self.text.ended
    return "stop" if stopped else "limit" if last else None

  def tell(self) -> None:
    """Calls back with the text that came since."""
    new, self.new = self.new, ""
    if new and self.on_text is not None:
      self.on_text(new)

  def answer(self, end: End, told: bool, error: Exception | None) -> Answer:
    """The answer so far, as the last one; with log-probabilities if `told`."""
    self.over = True
    text = None
    if self.text is not None:
      self.new += self.text.flush()
      text = self.text.text
    logprobs = np.array(self.logprobs, np.float32) if told else None
    return Answer(self.number, np.array(self.tokens, np.int32), end, text, logprobs, None, error)


@dataclasses.dataclass
class Reading:
  """Prompts that are read together, and then wait for a row each.

  Attributes:
    requests: those that have no row yet, by their places in the reading.
    tokens, sizes: int32 [n, T] and [n], of the prompts; a place without one has size 0.
    done: tokens of the longest prompt that have been read.
    caches: of n rows, once there are any.
    read: logits float32 [n, V], and whether they are finite, bool [n], once all have been read.
  """

  requests: dict[int, Request]
  tokens: np.ndarray
  sizes: np.ndarray
  done: int = 0
  caches: Caches = ()
  read: tuple[Array, Array] | None = None
