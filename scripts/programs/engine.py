"""A thread that owns a model's batch: it answers and scores what others ask for (`kvjax serve`)."""

import _thread
import functools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvjax.families.method import Method
from kvjax.models.decode.batcher import Answer, Batcher
from kvjax.models.decode.sampling import Sampling
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn.transformer import Transformer
from kvjax.programs.evals import continuations
from kvjax.programs.evals.continuations import Pair

Score = tuple[int, float, int, float]  # token, its log-probability, the likeliest token, and its
# New text; or a job's last event: its answer, the scores of each pair's tokens, or an error.
Event = str | Answer | list[list[Score]] | Exception
Tell = Callable[[Event], Any]


class Engine:
  """A thread that alone steps a `Batcher`.

  A job is named by the function that is told of its events, in the engine's thread: it must return
  at once, and raises nothing. Answers are decoded side by side; prompts are scored one job after
  another, a piece between two steps of the batch. A device that fails ends all jobs, and interrupts
  the main thread.

  Args:
    model, tokenizer: of a checkpoint.
    method: the KV-cache method.
    rows, capacity, chunk: as `Batcher` takes them.

  Attributes:
    method: the KV-cache method.
    batcher: the batch; only for this thread, but for its `free` rows.
  """

  def __init__(self, model: Transformer, tokenizer: Tokenizer, method: Method, **sizes: Any):
    how: dict[str, Any] = {"tokenizer": tokenizer, "sampling": Sampling(1.0), "logprobs": True}
    self.method, self.batcher = method, Batcher(model, method, **how, **sizes)
    self._rows = sizes["rows"]
    self._score = functools.partial(continuations.score, model, method, batch=self._rows)
    self._answering: dict[int, Tell] = {}
    self._scoring: dict[Tell, Iterator[Event | None]] = {}
    self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
    self._thread = threading.Thread(target=self._run, daemon=True)
    self._thread.start()

  def answer(self, tell: Tell, **how: Any) -> None:
    """Starts a job that answers a prompt; `how` is what `Batcher.submit` takes."""
    self._asked.put(lambda: self._submit(tell, how))

  def score(self, tell: Tell, pairs: Sequence[Pair]) -> None:
    """Starts a job that scores continuations."""
    self._asked.put(lambda: self._scoring.update({tell: self._scored(pairs)}))

  def cancel(self, tell: Tell) -> None:
    """Ends a job early, which frees its row; one that has ended stays as it is."""
    self._asked.put(lambda: self._cancel(tell))

  def close(self) -> None:
    """Ends the thread after its step; jobs that are left are told nothing."""
    self._asked.put(None)
    self._thread.join()

  def _run(self) -> None:
    while True:
      try:
        command = self._asked.get(block=not (self._answering or self._scoring))
      except queue.Empty:
        command = self._turn
      if command is None:
        return
      command()

  def _turn(self) -> None:
    """Scores a piece, and steps the batch."""
    try:
      if self._scoring:
        self._score_piece(*next(iter(self._scoring.items())))
      if self._answering:
        self.batcher.step()
        self._hand_over()
    except Exception as error:
      for tell in (*self._answering.values(), *self._scoring):
        tell(error)
      _thread.interrupt_main()
      raise

  def _score_piece(self, tell: Tell, pieces: Iterator[Event | None]) -> None:
    try:
      event = next(pieces)
    except (ValueError, FloatingPointError, MemoryError) as error:
      event = error
    if event is not None:
      del self._scoring[tell]
      tell(event)

  def _submit(self, tell: Tell, how: dict[str, Any]) -> None:
    try:
      self._answering[self.batcher.submit(on_text=tell, **how)] = tell
    except ValueError as error:
      tell(error)

  def _cancel(self, tell: Tell) -> None:
    for number in [number for number, other in self._answering.items() if other is tell]:
      self.batcher.cancel(number)
    self._hand_over()
    if self._scoring.pop(tell, None) is not None:
      tell(InterruptedError("cancelled"))

  def _hand_over(self) -> None:
    for answer in self.batcher.ready():
      self._answering.pop(answer.request)(answer)

  def _scored(self, pairs: Sequence[Pair]) -> Iterator[Event | None]:
    """None after each piece, and at last the scores of each pair's tokens."""
    found: list[list[Score]] = [[] for _ in pairs]
    for indices in continuations.batches(pairs, self._rows):
      for piece in self._score(pairs=[pairs[i] for i in indices]):
        for row, i in enumerate(indices):
          parts = piece.tokens, piece.logprobs, piece.likeliest, piece.best
          scores = zip(*(x[row].tolist() for x in parts), strict=True)
          found[i] += [score for score in scores if score[0] >= 0]
        yield None
    yield found
