"""A method's live batch in an evaluation: rows are put in as they are read, answers come out."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

import kvjax
from kvjax.models.decode.batcher import Batcher
from kvjax.models.decode.requests import Answer
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn.transformer import Caches, Transformer


@dataclasses.dataclass(frozen=True)
class Said:
  """An answer, whose it is, and how long the batch's steps took while it was made.

  Attributes:
    about: what `Lane.put` was given.
    answer: of the batch.
    seconds: "decode", in which the batch made so many "steps" of so many "rows".
    cold: whether they include the compilation of a program.
  """

  about: Any
  answer: Answer
  seconds: dict[str, Any]
  cold: bool


class Lane:
  """Rows that decode under one method, with a clock that stands still while others run.

  Args:
    model, tokenizer: of the checkpoint.
    method: under which rows decode.
    rows, capacity: of the batch, and tokens of each row.
    cold: whether its program has not run before.
  """

  def __init__(
    self,
    model: Transformer,
    tokenizer: Tokenizer,
    method: kvjax.Method,
    rows: int,
    capacity: int,
    cold: bool,
  ):
    self.method = method
    self._rows, self._cold, self._ends = rows, cold, tokenizer.ends
    self._batch = Batcher(model, method, rows=rows, capacity=capacity, tokenizer=tokenizer)
    self._asked: dict[int, tuple[Any, int, float]] = {}  # with the clock when it entered
    self._steps, self._clock = 0, 0.0

  def put(
    self,
    about: Any,
    logits: jax.Array,
    caches: Caches,
    row: int,
    *,
    limit: int,
    stop_strings: Sequence[str],
    keep: bool = False,
  ) -> Iterator[Said]:
    """Puts in a row that has been read, once one is free; answers that end until then.

    Args:
      about: whose answer it is.
      logits, caches, row: of a reading.
      limit, stop_strings, keep: as `Batcher.insert` takes them.
    """
    while not self._batch.free:
      yield from self._step()
    self._timed(self._batch.wait)
    number = self._batch.insert(
      logits, caches, row, limit=limit, stop=self._ends, stop_strings=stop_strings, keep=keep
    )
    self._asked[number] = about, self._steps, self._clock

  def drain(self) -> Iterator[Said]:
    """Answers of all rows that are left."""
    while self._asked:
      yield from self._step()

  def _step(self) -> list[Said]:
    self._steps += self._timed(self._batch.step)
    answers = self._batch.ready()
    if answers:  # what comes next is not of these steps
      self._timed(self._batch.wait)
    return [self._said(answer) for answer in answers]

  def _timed(self, run: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    made = run()
    self._clock += time.perf_counter() - began
    return made

  def _said(self, answer: Answer) -> Said:
    about, steps, clock = self._asked.pop(answer.request)
    if answer.error is not None:
      raise answer.error
    taken = {"decode": self._clock - clock, "steps": self._steps - steps, "rows": self._rows}
    return Said(about, answer, taken, self._cold and steps == 0)
