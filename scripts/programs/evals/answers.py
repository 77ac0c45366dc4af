"""Answers to a cell's questions under one method: in a live batch, scored as they come."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

import kvjax
from kvjax.models.decode.batcher import Batcher
from kvjax.models.decode.requests import Answer
from kvjax.models.nn.transformer import Caches
from kvjax.ops import offload
from kvjax.programs.evals import walks
from kvjax.programs.evals.plan import TURNS, Cell, Entry
from kvjax.programs.evals.task import Row

if TYPE_CHECKING:
  from kvjax.programs.evals.run import Runner


@dataclasses.dataclass
class _Asked:
  """A row between its prompt and its result; scores are by the number of the question."""

  index: int
  timing: dict[str, Any]
  facts: dict[str, Any]
  scores: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)


class Answers:
  """The answers of one method to rows of a cell, with a clock that stands still while others run.

  Args:
    runner: reads questions, and says which programs are new.
    cell: which rows, and how they are asked.
    entry: the method, as it is asked for.
    method: what it is, once a prompt that it repeats has told.
    capacity: tokens that a row has room for.
  """

  def __init__(self, runner: Runner, cell: Cell, entry: Entry, method: kvjax.Method, capacity: int):
    self._cold = bool(runner.cold("decode", method, cell.length, runner.batch))
    self._runner, self._cell, self._entry = runner, cell, entry
    sizes = {"rows": runner.batch, "capacity": capacity}
    self._batch = Batcher(runner.model, method, **sizes, tokenizer=runner.tokenizer)
    self._method, self._questions = method, TURNS[cell.mode]
    # By request: row, number of the question, and steps and seconds so far when it entered.
    self._live: dict[int, tuple[_Asked, int, int, float]] = {}
    self._steps, self._clock = 0, 0.0

  def enter(
    self, rows: dict[int, int], logits: jax.Array, caches: Caches, about: dict[str, Any]
  ) -> Iterator[dict[str, Any]]:
    """Asks prompts that have been read; results that come until all have entered the batch.

    Args:
      rows: their places among those that were read, by number in the cell.
      logits, caches: of the reading.
      about: seconds, and bytes of a row.
    """
    asked = [
      (place, _Asked(i, {**about["seconds"], "cold": [*about["seconds"]["cold"]]}, about["bytes"]))
      for i, place in rows.items()
    ]
    turns = range(self._questions if self._cell.mode == "reuse" else 1)
    for turn in turns:
      mine, held = logits, caches
      if self._cell.mode in ("agnostic", "reuse"):
        if turn != turns[-1]:
          held = offload.rows_of(caches, np.arange(logits.shape[0]))
        mine, held = self._ask(asked, turn, logits.shape[0], held)
      for place, one in asked:
        yield from self._put(one, turn, mine, held, place)

  def finish(self) -> Iterator[dict[str, Any]]:
    """Results of all that are in the batch."""
    while self._live:
      yield from self._step()

  def _step(self) -> Iterator[dict[str, Any]]:
    """Results of rows whose last answer ends with a step of the batch."""
    self._steps += self._timed(self._batch.step)
    answers = self._batch.ready()
    if answers:  # what comes next is not of these steps
      self._timed(self._batch.wait)
    for one, turn, answer in [self._ended(answer) for answer in answers]:
      one.scores[turn] = self._score(self._row(one.index, turn), answer)
      if len(one.scores) == self._questions:
        yield self._result(one)
      elif answer.caches is not None:
        prompts = self._cell.prompts
        text = prompts[one.index].second_after(answer.tokens.tolist())
        longest = max(len(prompt.second) for prompt in prompts)
        read = self._read([text], longest, answer.caches, [one.timing])
        yield from self._put(one, 1, *read, 0)

  def _timed(self, run: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    made = run()
    self._clock += time.perf_counter() - began
    return made

  def _ended(self, answer: Answer) -> tuple[_Asked, int, Answer]:
    """The row of an answer and the number of its question; notes how long it took."""
    one, turn, steps, clock = self._live.pop(answer.request)
    if answer.error is not None:
      raise answer.error
    seconds, stage = self._clock - clock, "decode" if turn == self._questions - 1 else "first"
    one.timing[stage] = seconds
    if stage == "decode":
      one.timing |= {"steps": self._steps - steps, "rows": self._runner.batch}
    one.timing["cold"] += [stage] if self._cold and steps == 0 else []
    return one, turn, answer

  def _ask(
    self, asked: Sequence[tuple[int, _Asked]], turn: int, size: int, caches: Caches
  ) -> tuple[jax.Array, Caches]:
    """Reads a question about each context into the caches."""
    prompts = self._cell.prompts
    texts: list[list[int]] = [[]] * size
    for place, one in asked:
      texts[place] = prompts[one.index].tail if turn == 0 else prompts[one.index].other
    longest = max(len(prompt.tail if turn == 0 else prompt.other) for prompt in prompts)
    return self._read(texts, longest, caches, [one.timing for _, one in asked])

  def _read(
    self, texts: list[list[int]], longest: int, caches: Caches, timings: Sequence[dict[str, Any]]
  ) -> tuple[jax.Array, Caches]:
    logits, caches, seconds, cold = self._runner.ask(
      self._cell.length, self._method, texts, longest, caches
    )
    for timing in timings:
      timing["question"] = seconds
      timing["cold"] += cold
    return logits, caches

  def _put(
    self, one: _Asked, turn: int, logits: jax.Array, caches: Caches, place: int
  ) -> Iterator[dict[str, Any]]:
    """Lets a row answer a question that it has read, at its place in the reading, once one is free.

    Results that come until then.
    """
    visited = walks.visited(self._runner.model, self._method, caches, logits)
    if visited is not None:
      one.facts = one.facts | {"visited": round(float(visited[place]), 5)}
    limit = self._row(one.index, turn).max_new_tokens
    if self._questions == 1:  # an answer takes what its prompt leaves
      limit = min(limit, self._cell.length - len(self._cell.prompts[one.index].ids))
    one.facts = one.facts | {"answer_limit": limit}
    keep = self._cell.mode == "second" and turn == 0
    while not self._batch.free:
      yield from self._step()
    self._timed(self._batch.wait)
    ends = {"stop": self._runner.tokenizer.ends, "stop_strings": self._cell.task.stop}
    number = self._batch.insert(logits, caches, place, limit=limit, keep=keep, **ends)
    self._live[number] = one, turn, self._steps, self._clock

  def _row(self, index: int, turn: int) -> Row:
    row = self._cell.rows[index]
    return row if turn == 0 else row.second

  def _score(self, row: Row, answer: Answer) -> dict[str, Any]:
    """An answer and what it is worth."""
    task, text = self._cell.task, answer.text
    try:
      also = {name: scorer(text, row) for name, scorer in task.also.items()}
      score = task.score(text, row)
    except (ValueError, NotImplementedError) as error:  # which are a method's, where it refuses
      raise RuntimeError(f"{task.name}: found {error!r} in scoring {text!r}") from error
    return {"answer": text, "answer_tokens": len(answer.tokens), "score": score, "also": also}

  def _result(self, one: _Asked) -> dict[str, Any]:
    score = one.scores[self._questions - 1]
    if self._questions == 2:
      first = one.scores[0]
      score["also"]["first"], score["first_answer"] = first["score"], first["answer"]
    if self._cell.mode == "reuse":
      score["also"]["other"] = score["score"]
      score["score"] = (first["score"] + score["score"]) / 2
    return self._runner.result(self._cell, one.index, self._entry, score, one.timing, one.facts)
