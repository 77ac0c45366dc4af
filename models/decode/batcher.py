"""Requests that come and go in a batch of fixed rows: a row that ends makes room for the next.

A prompt is read alone, between two decode steps, and enters a free row; all rows decode in one
program, whatever their lengths. The interface is JetStream's: prefill, insert, generate.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

import jax
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from kvjax.families.method import Method
from kvjax.methods.registry import check_method
from kvjax.models.decode import checks
from kvjax.models.decode.generate import AHEAD, GREEDY, Device, Step
from kvjax.models.decode.prefill import prefill
from kvjax.models.decode.sampling import Sampling
from kvjax.models.decode.step import UNSOUND, Always, ends
from kvjax.models.decode.stopping import RowText
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn.transformer import Caches, Transformer

End = Literal["stop", "limit", "cancelled", "failed"]


@dataclasses.dataclass(frozen=True)
class Answer:
  """The end of a request, and its answer.

  Attributes:
    request: the number that `Batcher.submit` gave.
    tokens: int32 [n], the answer; a stop token, or the token that completes a stop string, is last.
    end: why it ended: at a stop, at its limit, cancelled, or failed.
    text: of the tokens, without stops; None where the batcher has no tokenizer.
    error: what failed.
  """

  request: int
  tokens: np.ndarray
  end: End
  text: str | None = None
  error: Exception | None = None


@dataclasses.dataclass
class _Request:
  """A request from its submission to its end; `row` None: it waits in the queue."""

  number: int
  prompt: np.ndarray
  limit: int
  seed: int
  stop: tuple[int, ...]
  text: RowText | None
  row: int | None = None
  tokens: list[int] = dataclasses.field(default_factory=list)
  over: bool = False

  def feed(self, token: int) -> End | None:
    """Takes a token; the reason if it is the last one."""
    self.tokens.append(token)
    stopped = token in self.stop
    if self.text is not None:
      self.text.flush() if stopped else self.text.feed(token)
      stopped |= self.text.ended
    return "stop" if stopped else "limit" if len(self.tokens) == self.limit else None

  def answer(self, end: End, error: Exception | None = None) -> Answer:
    self.over = True
    text = None
    if self.text is not None:
      self.text.flush()
      text = self.text.text
    return Answer(self.number, np.array(self.tokens, np.int32), end, text, error)


class Batcher:
  """A queue of requests over a batch of fixed rows.

      batcher = Batcher(model, method, rows=8, capacity=4096, tokenizer=tokenizer)
      for prompt in prompts:
        batcher.submit(prompt, limit=256, stop=tokenizer.ends)
      for answer in batcher:
        print(answer.request, answer.text)

  An answer is the one that the same request gets alone in such a batch, bit by bit: it depends on
  the prompt, the limit, the stops and the seed, not on its row's number or on what stands beside
  it. One decode program is compiled, and one for each padded length of a prompt (`prefill`).

  Args:
    model: the decoder.
    method: the KV-cache method.
    rows: requests that decode together.
    capacity: tokens that a row has room for: a prompt, its limit, and `AHEAD` = 2, the steps that
      are under way while the host reads one.
    sampling: temperature and filters of all requests.
    tokenizer: turns tokens into text: for stop strings and `Answer.text`.
    chunk: tokens of a prompt that are read at a time, which bounds the memory that it takes; None:
      all at once.

  Raises:
    TypeError: `method` is no method, or a number is of another type.
    ValueError: a number is out of range.
    NotImplementedError: the method has to see a prompt at once, and `chunk` is given.
  """

  def __init__(
    self,
    model: Transformer,
    method: Method,
    *,
    rows: int,
    capacity: int,
    sampling: Sampling = GREEDY,
    tokenizer: Tokenizer | None = None,
    chunk: int | None = None,
  ):
    check_method("method", method)
    checks.kind("sampling", sampling, Sampling)
    if tokenizer is not None:
      checks.kind("tokenizer", tokenizer, Tokenizer)
    self._count = checks.whole("rows", rows, 1)
    self._chunk = None if chunk is None else checks.whole("chunk", chunk, 1)
    if chunk is not None and not method.traits.chunkable:
      raise NotImplementedError(
        f"chunk: found {chunk}, expected None: {method!r} reads a prompt whole"
      )
    self._model, self._method, self._tokenizer = model, method, tokenizer
    self._single = model.spec(1, checks.whole("capacity", capacity, 1 + AHEAD))
    caches = method.init_caches(dataclasses.replace(self._single, batch=rows))
    self._most = checks.capacity(caches, method)
    vocab = model.config.vocab
    always = Always(ends(()), np.zeros(rows, np.int32), sampling.knobs(vocab), np.uint32(0))
    logits, idle = np.zeros((rows, vocab), np.float32), np.zeros(rows, bool)
    kind = method, sampling.greedy, False
    self._device = Device(model, kind, logits, caches, idle, always, None)
    self._rows: list[_Request | None] = [None] * rows
    self._queue: collections.deque[_Request] = collections.deque()
    self._known: dict[int, _Request] = {}
    self._under_way: collections.deque[tuple[Step, list[_Request | None]]] = collections.deque()
    self._answers: list[Answer] = []
    self._next = 0

  def submit(
    self,
    prompt: ArrayLike,
    *,
    limit: int,
    seed: int | None = None,
    stop: Sequence[int] = (),
    stop_strings: Sequence[str] = (),
  ) -> int:
    """Puts a request at the end of the queue.

    Args:
      prompt: int [n], token ids.
      limit: tokens of the answer, at most.
      seed: of its draws, below 2³¹; by default the request's number. Equal seeds draw alike.
      stop: token ids that end the answer.
      stop_strings: strings that end it.

    Returns:
      The request's number: 0, 1, …

    Raises:
      TypeError, ValueError: an argument is none, or out of range, or the row has too little room;
        nothing is queued then.
    """
    vocab, config = self._model.config.vocab, self._model.config
    ids = checks.token_ids("prompt", prompt)
    if not ids.size or not 0 <= ids.min() <= ids.max() < vocab:
      shown = f"ids in [{ids.min()}, {ids.max()}]" if ids.size else "no token"
      raise ValueError(f"prompt: found {shown}, expected ids in [0, {vocab})")
    limit = checks.whole("limit", limit, 1)
    need = ids.size + limit + AHEAD
    if self._most is not None and need > self._most[0]:
      raise ValueError(
        f"limit: found {limit} after a prompt of {ids.size}, expected at most "
        f"{self._most[0] - ids.size - AHEAD}: a row has room for {self._most[0]} tokens"
      )
    new = np.array([ids.size + limit])
    checks.context(config, self._method, np.zeros(1, np.int32), new, "submit")
    strings = checks.stop_strings(stop_strings)
    if strings and self._tokenizer is None:
      raise ValueError("tokenizer: found None, expected one, to find stop_strings")
    seed = self._next if seed is None else checks.whole("seed", seed, 0, 2**31)
    text = None if self._tokenizer is None else RowText(self._tokenizer.stream(), strings)
    request = _Request(self._next, ids, limit, seed, checks.stops(stop, vocab), text)
    self._queue.append(request)
    self._known[request.number] = request
    self._next += 1
    return request.number

  def cancel(self, request: int) -> None:
    """Ends a request, whose answer so far is among the next; one that has ended stays as it is.

    Raises:
      ValueError: no request has had that number.
    """
    if not 0 <= checks.whole("request", request, 0) < self._next:
      raise ValueError(
        f"request: found {request}, expected one of {self._next} that were submitted"
      )
    if (found := self._known.get(request)) is not None:
      self._end(found, "cancelled")

  def __iter__(self) -> Iterator[Answer]:
    """Answers as requests end, until none is left; more may be submitted meanwhile."""
    while self._answers or self._known:
      if not self._answers:
        self.step()
      yield from self.ready()

  def ready(self) -> list[Answer]:
    """Answers of requests that have ended since the last call."""
    answers, self._answers = self._answers, []
    return answers

  def step(self) -> None:
    """Fills free rows from the queue, decodes a token of every row, reads one of `AHEAD` before."""
    self._admit()
    if any(self._rows):
      self._under_way.append((self._device.step(), list(self._rows)))
    if self._under_way and (len(self._under_way) > AHEAD or not any(self._rows)):
      self._read(*self._under_way.popleft())

  def _admit(self) -> None:
    """Reads the prompts that have a row to go to."""
    for row in (i for i, holder in enumerate(self._rows) if holder is None):
      while self._queue and self._rows[row] is None:
        request = self._queue.popleft()
        if request.over:
          continue
        try:
          logits, caches = self._prompt(request)
        except (FloatingPointError, MemoryError) as error:
          self._end(request, "failed", error)
          continue
        self._device.enter(row, logits, caches, request.seed)
        self._rows[row], request.row = request, row

  def _prompt(self, request: _Request) -> tuple[Float[Array, "1 V"], Caches]:
    """Logits and caches of a prompt that is read alone."""
    caches = self._method.init_caches(self._single)
    tokens, lengths = request.prompt[None], [request.prompt.size]
    return prefill(self._model, tokens, lengths, caches, self._method, chunk=self._chunk)

  def _read(self, step: Step, holders: list[_Request | None]) -> None:
    """Gives a step's tokens to the requests that held the rows when it was dispatched."""
    tokens, _ = self._device.fetch(step)
    for request, token in zip(holders, tokens.tolist(), strict=True):
      if request is None or request.over:
        continue
      if token == UNSOUND:
        count = len(request.tokens) + 1
        found = f"request {request.number}: found logits that are NaN or infinite"
        error = FloatingPointError(f"{found} after token {count} of the answer")
        self._end(request, "failed", error)
      elif (end := request.feed(token)) is not None:
        self._end(request, end)

  def _end(self, request: _Request, end: End, error: Exception | None = None) -> None:
    """Its answer is there, and its row free."""
    self._answers.append(request.answer(end, error))
    del self._known[request.number]
    if request.row is not None:
      self._rows[request.row] = None
      self._device.end(np.arange(self._count) == request.row)
