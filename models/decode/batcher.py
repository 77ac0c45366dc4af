"""Requests that come and go in a batch of fixed rows: a row that ends makes room for the next.

Prompts are read between two decode steps, one or several at a time, and enter free rows; all rows
decode in one program, whatever their lengths. The interface is JetStream's: prefill, insert,
generate.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.checkify import JaxRuntimeError
from jaxtyping import Array, Bool, Float
from numpy.typing import ArrayLike

from kvjax.families.method import Method
from kvjax.methods.registry import check_method
from kvjax.models.decode import by_layer, checks
from kvjax.models.decode.by_layer import ByLayer
from kvjax.models.decode.generate import GREEDY
from kvjax.models.decode.pieces import undivided
from kvjax.models.decode.prefill import empty, read_prompt, widths
from kvjax.models.decode.requests import AHEAD, Answer, End, Reading, Request
from kvjax.models.decode.rows import check_alike
from kvjax.models.decode.sampling import Sampling
from kvjax.models.decode.step import UNSOUND, Always, Device, Step, ends
from kvjax.models.decode.stopping import RowText
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn.transformer import Caches, Transformer
from kvjax.ops import offload
from kvjax.runtime import arguments

# Errors of a prompt, which leave the others as they are.
FAULTS = FloatingPointError, MemoryError, JaxRuntimeError
STOPS = 8  # stop tokens of a request that the device knows; the host finds others a little later


class Batcher:
  """A queue of requests over a batch of fixed rows.

      batcher = Batcher(model, method, rows=8, capacity=4096, tokenizer=tokenizer)
      for prompt in prompts:
        batcher.submit(prompt, limit=256, stop=tokenizer.ends)
      for answer in batcher:
        print(answer.request, answer.text)

  An answer is the one that the same request gets alone in such a batch, bit by bit: it depends on
  the prompt, the limit, the stops, the sampling and the seed, not on its row's number or on what
  stands beside it. One decode program is compiled, and one for each padded length of a prompt
  (`prefill`).

  A few hundred tokens do not keep a GPU busy: `together` = 4 reads the prompts of four requests at
  once. It takes the first one that waits and the next three whose padded lengths are the same (with
  `chunk`, the numbers of pieces; under a streaming method, the pieces' widths), as soon as one row
  is free; no row waits for others to be free. Prompts that find no free row wait, read, for the
  next ones, and nothing else is read until all have one. The first request that waits is always in
  the next reading, so that a request is overtaken only by those that are read with an earlier one
  of another length, at most `together` − 1 for each reading. Places in a reading for which there is
  no prompt are computed nevertheless: the program, and with it the bits of an answer, are the same,
  and a single prompt takes the time of four.

  Args:
    model: the decoder.
    method: the KV-cache method.
    rows: requests that decode together.
    capacity: tokens that a row has room for: a prompt and its limit.
    sampling: temperature and filters of requests that bring none. A batch whose temperature is 0
      takes no request of another; one that draws takes all.
    tokenizer: turns tokens into text: for stop strings, `on_text` and `Answer.text`.
    chunk: tokens of a prompt that are read at a time, a step of the others between two pieces; it
      bounds the memory that a prompt takes, and how long the others wait. None: all at once.
    together: prompts that are read at a time. From the reading until all have a row they take the
      bytes of so many rows of `capacity` tokens, beside those of the batch
      (`plan_memory(model.spec(together, capacity), method)`).
    logprobs: keep the log-probability of every token.

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
    together: int = 1,
    logprobs: bool = False,
  ):
    check_method("method", method)
    checks.kind("sampling", sampling, Sampling)
    checks.tokenizer(tokenizer, needed=False)
    rows = checks.whole("rows", rows, 1)
    self._together = checks.whole("together", together, 1)
    self._chunk = None if chunk is None else checks.whole("chunk", chunk, 1)
    arguments.chunk(method, self._chunk)
    self._model, self._method, self._tokenizer = model, method, tokenizer
    self._sampling, self._logprobs = sampling, logprobs
    self._capacity = checks.whole("capacity", capacity, 2)
    caches = model.init_caches(method, rows, capacity)
    self._most = checks.capacity(caches, method)
    vocab = model.config.vocab
    stop = np.full((rows, STOPS), -1, np.int32)
    knobs: Any = tuple(np.repeat(np.asarray(x), rows) for x in sampling.knobs(vocab))
    always = Always(stop, np.zeros(rows, np.int32), knobs, np.uint32(0))
    logits, idle = np.zeros((rows, vocab), np.float32), np.zeros(rows, bool)
    kind = method, sampling.greedy, logprobs
    self._device = Device(model, kind, logits, caches, idle, always, None)
    self._rows: list[Request | None] = [None] * rows
    self._queue: collections.deque[Request] = collections.deque()
    self._reading: Reading | None = None
    self._layered = ByLayer(model) if by_layer.reads(model) else None
    self._known: dict[int, Request] = {}
    self._under_way: collections.deque[tuple[Step, list[Request]]] = collections.deque()
    self._answers: list[Answer] = []
    self._next = 0

  @property
  def free(self) -> int:
    """Rows that no request holds."""
    return self._rows.count(None)

  @property
  def waiting(self) -> int:
    """Requests that hold no row: in the queue, or with a prompt that is or has been read."""
    return len(self._queue) + (0 if self._reading is None else len(self._reading.requests))

  @undivided()
  def submit(self, prompt: ArrayLike, *, limit: int, **how: Any) -> int:
    """Puts a request at the end of the queue.

    Args:
      prompt: int [n], token ids.
      limit: tokens of the answer, at most.
      **how: what `insert` takes besides.

    Returns:
      The request's number: 0, 1, …

    Raises:
      TypeError, ValueError: an argument is none, or out of range, or the row has too little room;
        nothing is queued then.
    """
    vocab = self._model.config.vocab
    ids = checks.token_ids("prompt", prompt)
    if not ids.size or not 0 <= ids.min() <= ids.max() < vocab:
      shown = f"ids in [{ids.min()}, {ids.max()}]" if ids.size else "no token"
      raise ValueError(f"prompt: found {shown}, expected ids in [0, {vocab})")
    request = self._request(ids.size, limit, **how)
    request.prompt = ids
    request.widths = widths(self._method, ids.size, self._chunk, self._most)
    self._queue.append(request)
    if request.number == 0:
      self._device.compile_ahead()  # while its prompt is read
    return request.number

  @undivided()
  def insert(
    self,
    logits: Float[Any, "n V"],
    caches: Caches,
    row: int = 0,
    *,
    limit: int,
    seed: int | None = None,
    stop: Sequence[int] = (),
    stop_strings: Sequence[str] = (),
    sampling: Sampling | None = None,
    tokenizer: Tokenizer | None = None,
    on_text: Callable[[str], Any] | None = None,
    keep: bool = False,
  ) -> int:
    """Puts a prompt that was read elsewhere into a free row, ahead of all that wait.

    Args:
      logits: float32 [n, V], of `prefill`.
      caches: of n rows, with the batcher's method and capacity; they stay as they are.
      row: which of them.
      limit: tokens of the answer, at most.
      seed: of its draws, below 2³¹; by default the request's number. Equal seeds draw alike.
      stop: token ids that end the answer.
      stop_strings: strings that end it.
      sampling: temperature and filters; None: the batcher's.
      tokenizer: in place of the batcher's: `Tokenizer.continuing` where a text is continued.
      on_text: called with the answer's new text, as it comes.
      keep: `Answer.caches` holds a copy of the row's caches.

    Returns:
      The request's number.

    Raises:
      TypeError, ValueError: as in `submit`, or the caches are others.
      RuntimeError: no row is free (`free`).
    """
    if not self.free:
      raise RuntimeError(f"insert: found {len(self._rows)} rows that are held, expected a free one")
    check_alike(self._device.caches, caches)
    logits = checks.logits(logits, caches, self._model.config.vocab)
    row = checks.whole("row", row, 0, logits.shape[0])
    if not (seen := int(np.asarray(caches[0].seen)[row])):
      raise ValueError(f"row: found {row}, which holds no token, expected a prompt that was read")
    how = seed, stop, stop_strings, sampling, tokenizer, on_text, keep
    request = self._request(seen, limit, *how)
    self._enter(request, (logits, _sound(logits)), caches, row)
    return request.number

  def _request(
    self,
    size: int,
    limit: int,
    seed: int | None = None,
    stop: Sequence[int] = (),
    stop_strings: Sequence[str] = (),
    sampling: Sampling | None = None,
    tokenizer: Tokenizer | None = None,
    on_text: Callable[[str], Any] | None = None,
    keep: bool = False,
  ) -> Request:
    """A checked request after a prompt of so many tokens, with the next number."""
    config = self._model.config
    limit = checks.whole("limit", limit, 1)
    if self._most is not None and size + limit > self._most[0]:
      raise ValueError(
        f"limit: found {limit} after a prompt of {size}, expected at most "
        f"{self._most[0]} tokens together, the room of a row"
      )
    new = np.array([size + limit])
    checks.context(config, self._method, np.zeros(1, np.int32), new, "submit")
    strings = checks.stop_strings(stop_strings)
    checks.callbacks(on_text=on_text)
    tokenizer = self._tokenizer if tokenizer is None else tokenizer
    checks.tokenizer(tokenizer, bool(strings or on_text is not None))
    sampling = self._sampling if sampling is None else sampling
    checks.kind("sampling", sampling, Sampling)
    if self._sampling.greedy and not sampling.greedy:
      raise ValueError(
        f"sampling: found temperature {sampling.temperature:g}, expected 0 as the batcher's"
      )
    seed = self._next if seed is None else checks.whole("seed", seed, 0, 2**31)
    text = None if tokenizer is None else RowText(tokenizer.stream(), strings)
    stops = checks.stops(stop, config.vocab)
    request = Request(self._next, limit, seed, stops, sampling, text, on_text, keep)
    self._known[request.number] = request
    self._next += 1
    return request

  @undivided()
  def cancel(self, request: int) -> None:
    """Ends a request, whose answer so far is among the next; one that has ended stays as it is.

    Raises:
      ValueError: no request has had that number.
    """
    request = checks.whole("request", request, 0, self._next)
    if (found := self._known.get(request)) is not None:
      self._end(found, "cancelled")
      found.tell()

  def __iter__(self) -> Iterator[Answer]:
    """Answers as requests end, until none is left; more may be submitted meanwhile."""
    while self._answers or self._known:
      if self._answers:
        yield self._answers.pop(0)
      else:
        self.step()

  def ready(self) -> list[Answer]:
    """Answers of requests that have ended since the last call."""
    answers, self._answers = self._answers, []
    return answers

  def wait(self) -> None:
    """Waits until the device has done all steps that are under way."""
    jax.block_until_ready(self._device.logits)

  @undivided()
  def step(self) -> bool:
    """Fills free rows from the queue, decodes a token of every row, reads one of steps before.

    On a GPU, under a method that streams, it decodes several, unless a prompt is being read or a
    request shows its text or keeps its caches. Ctrl-C waits for the end of a step (pressed twice,
    it does not), an error of `on_text` until all rows have their tokens: a further step goes on.

    Returns:
      Whether there was a row to decode for.
    """
    self._admit()
    going = [x for x in self._rows if x is not None and x.steps < x.limit]
    if going:
      count = self._steps(going)
      self._under_way.append((self._device.step(count), going))
      for request in going:
        request.steps += count
      done = [x for x in going if x.steps == x.limit]
      self._idle([x.row for x in done])
      for request in (x for x in done if not x.keep):
        self._rows[request.row] = None  # its last token is on its way
    if self._under_way and (sum(x.steps for x, _ in self._under_way) > AHEAD or not going):
      self._read(*self._under_way.popleft())
    return bool(going)

  def _steps(self, going: list[Request]) -> int:
    """Steps of the next call."""
    if self._reading is not None or any(x.keep or x.on_text is not None for x in going):
      return 1
    return min(AHEAD, self._device.most, *(x.limit - x.steps for x in going))

  def _admit(self) -> None:
    """Reads prompts while a row is free, and gives rows to them; with `chunk`, reads a piece."""
    while self._reading is not None or (self._queue and self.free):
      reading = self._reading = self._reading or self._gathered()
      if reading.read is None:
        try:
          self._advance(reading)
        except BaseException as error:  # what was read of them is gone
          self._reading = None
          self._failed(list(reading.requests.values()), error)
          continue
      if reading.read is None:
        return  # the others go on
      while reading.requests and self.free:
        place = next(iter(reading.requests))
        self._enter(reading.requests.pop(place), reading.read, reading.caches, place)
      if reading.requests:
        return
      self._reading = None

  def _gathered(self) -> Reading:
    """Takes the first request and others of its widths out of the queue, to be read together."""
    first = self._queue[0]
    alike = (x for x in self._queue if not x.alone and x.widths == first.widths)
    chosen = [first] if first.alone else [*itertools.islice(alike, self._together)]
    sizes = np.zeros(self._together, np.int32)
    sizes[: len(chosen)] = [request.prompt.size for request in chosen]
    tokens = np.zeros((self._together, sizes.max()), np.int32)
    for row, request in zip(tokens, chosen, strict=False):
      self._queue.remove(request)
      row[: request.prompt.size] = request.prompt
    return Reading(dict(enumerate(chosen)), tokens, sizes)

  def _advance(self, reading: Reading) -> None:
    """Reads the prompts, or with `chunk` the next piece of each."""
    if not reading.caches:
      reading.caches = empty(self._model, self._method, self._together, self._capacity)
    done, size = reading.done, reading.tokens.shape[1]
    end = reading.done = min(size, done + (self._chunk or size))
    tokens, lengths = reading.tokens[:, done:end], np.clip(reading.sizes - done, 0, end - done)
    given = self._model, tokens, lengths, reading.caches, self._method, reading.sizes, done
    logits, reading.caches = read_prompt(*given, chunk=self._chunk, layered=self._layered)
    if end == size:
      reading.read = logits, _sound(logits)

  def _failed(self, requests: list[Request], error: BaseException) -> None:
    """Ends a request whose reading failed; several are read again, each alone.

    An error that is no request's is raised, and all of them are read again.
    """
    if (own := isinstance(error, FAULTS)) and len(requests) == 1:
      self._end(requests[0], "failed", error)
      return
    for request in reversed(requests):
      request.alone |= own
      self._queue.appendleft(request)
    if not own:
      raise error

  def _enter(self, request: Request, read: tuple[Array, Array], caches: Caches, of: int) -> None:
    """Gives a free row to a request whose prompt has been read, as row `of` of `Reading.read`."""
    logits, sound = read
    request.sound = sound, of
    row = request.row = self._rows.index(None)
    self._rows[row] = request
    stop = ends(request.stop)[:STOPS]
    knobs = request.sampling.knobs(self._model.config.vocab)
    self._device.enter(row, logits, caches, of, request.seed, stop, knobs)

  def _read(self, step: Step, holders: list[Request]) -> None:
    """Gives a call's tokens to the requests that it was dispatched with."""
    known: Exception | None = None
    try:
      every, logprobs = self._device.fetch(step)
    except JaxRuntimeError as error:  # rows that it is not about have their tokens
      known, (every, logprobs) = error, self._device.fetch(step._replace(error=None))
    for i, tokens in enumerate(every):
      for request in (x for x in holders if not x.over):
        token, place = int(tokens[request.row]), f"token {len(request.tokens) + 1} of the answer"
        if request.sound is not None:
          sound, source = request.sound
          if not np.asarray(sound)[source]:
            token, place = UNSOUND, "its prompt"
          request.sound = None
        if token == UNSOUND:
          found = f"request {request.number}: found logits that are NaN or infinite"
          self._end(request, "failed", known or FloatingPointError(f"{found} after {place}"))
        else:
          logprob = None if logprobs is None else float(logprobs[i, request.row])
          if (end := request.feed(token, logprob)) is not None:
            self._end(request, end)
    for request in holders:  # all have their tokens, if one's `on_text` raises
      request.tell()

  def _end(self, request: Request, end: End, error: Exception | None = None) -> None:
    """Its answer is there, and its row free."""
    answer = request.answer(end, self._logprobs, error)
    del self._known[request.number]
    if request.row < 0:
      self._forget(request)
    elif self._rows[request.row] is request:
      self._rows[request.row] = None
      self._idle([request.row])
      if request.keep:
        held = offload.rows_of(self._device.caches, np.array([request.row]))
        answer = dataclasses.replace(answer, caches=held)
    self._answers.append(answer)

  def _forget(self, request: Request) -> None:
    """Has a request wait no longer; a reading that nobody waits for is dropped."""
    if request in self._queue:
      self._queue.remove(request)
    if (reading := self._reading) is not None:
      reading.requests = {i: x for i, x in reading.requests.items() if x is not request}
      self._reading = reading if reading.requests else None

  def _idle(self, rows: list[int]) -> None:
    """No step that is dispatched from now on touches these rows."""
    self._device.end(np.isin(np.arange(len(self._rows)), rows))


def _sound(logits: Float[Array, "n V"]) -> Bool[Array, " n"]:
  """`checks.sound`, on its way to the host."""
  found = checks.sound(logits)
  found.copy_to_host_async()
  return found
