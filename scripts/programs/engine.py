"""A batch that the requests of a server share (`kvjax serve`); one thread does the work of all."""

import asyncio
import collections
import concurrent.futures
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kvjax.models.decode.batcher import Batcher
from kvjax.models.decode.requests import Answer
from kvjax.programs.evals.continuations import Pair, Score

Inbox = collections.deque[tuple["Choice", str | Answer]]


@dataclasses.dataclass(eq=False)
class Choice:
  """An answer to a prompt, and the prompt's scores.

  Attributes:
    index: its number in its request.
    prompt: token ids.
    cut: tokens of the prompt that are read before the others are scored; None: no scores.
    how: arguments of `Batcher.submit`.
    inbox: of its request; new texts come in as they are made, and at last the answer.
    answer: once it has been taken out.
    scores: of the tokens after `cut`.
  """

  index: int
  prompt: list[int]
  cut: int | None
  how: dict[str, Any]
  inbox: Inbox
  answer: Answer | None = None
  scores: list[Score] = dataclasses.field(default_factory=list)

  def put(self, event: str | Answer) -> None:
    self.inbox.append((self, event))


class Engine:
  """A `Batcher` and the thread that alone uses it.

  A request submits choices and waits for steps until they are answered: nothing runs unless a
  request waits. An error of the thread is raised to those who wait.

  Args:
    batcher: with a tokenizer and log-probabilities.
    score: the scores of several pairs' continuations.
  """

  def __init__(self, batcher: Batcher, score: Callable[[list[Pair]], list[list[Score]]]):
    self.batcher, self._score = batcher, score
    self._open: dict[int, Choice] = {}
    self._thread = concurrent.futures.ThreadPoolExecutor(1)
    self._step: asyncio.Future | None = None

  def submit(self, choices: Sequence[Choice]) -> asyncio.Future:
    """Scores the prompts of choices, if `cut` is there, and puts them into the batch's queue."""
    return self._call(self._submit, choices)

  def step(self) -> asyncio.Future:
    """The next step of the batch, which all that wait for one share."""
    if self._step is None or self._step.done():
      self._step = self._call(self._decode)
    return asyncio.shield(self._step)

  def cancel(self, choices: Sequence[Choice]) -> None:
    """Ends choices, which frees their rows; those that have ended stay as they are."""
    self._thread.submit(self._cancel, choices)

  def close(self) -> None:
    """Ends the thread after its step."""
    self._thread.shutdown(cancel_futures=True)

  def _call(self, function: Callable, *given: Any) -> asyncio.Future:
    return asyncio.get_running_loop().run_in_executor(self._thread, function, *given)

  def _submit(self, choices: Sequence[Choice]) -> None:
    scored = [choice for choice in choices if choice.cut is not None]
    pairs = [(choice.prompt[: choice.cut], choice.prompt[choice.cut :]) for choice in scored]
    for choice, scores in zip(scored, self._score(pairs), strict=True):
      choice.scores = scores
    for choice in choices:
      number = self.batcher.submit(choice.prompt, on_text=choice.put, **choice.how)
      self._open[number] = choice

  def _decode(self) -> None:
    self.batcher.step()
    self._hand_over()

  def _cancel(self, choices: Sequence[Choice]) -> None:
    for number in [number for number, choice in self._open.items() if choice in choices]:
      self.batcher.cancel(number)
    self._hand_over()

  def _hand_over(self) -> None:
    for answer in self.batcher.ready():
      self._open.pop(answer.request).put(answer)
