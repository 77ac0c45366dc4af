"""Parts of every task: a row, how its tokens are counted, and how a text is filled up."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from typing import Any

# Tokens of (context, question, answer prefix) as a model reads them, chat markup included; of
# (…, second question, its answer prefix) with the second turn.
Count = Callable[..., int]

# A row uses at least this share of the tokens that it may.
FILLED = 0.95


class NoMoreRows(ValueError):
  """A data set has fewer rows than that."""


@dataclasses.dataclass(frozen=True)
class Row:
  """One question, in the schema that every task shares.

  Attributes:
    context: what is asked about, with the task's instruction in front.
    question: the question itself, apart from the context so that a cache can be compressed
      before the question is known.
    answer_prefix: how the answer begins; it belongs to the assistant's turn.
    answers: what a right answer is held against; the task's scorer says how.
    task: the task's name.
    max_new_tokens: tokens reserved for the answer.
    continuation: what follows the context in its source, where a task compares predictions of
      given text.
    about: further facts that results keep: a needle's depth, a document's length.
    scoring: further facts that the scorer needs.
    second: what is asked next about the same context, once the first answer is given: a row
      without a context of its own.
  """

  context: str
  question: str
  answer_prefix: str
  answers: tuple[str, ...]
  task: str
  max_new_tokens: int
  continuation: str = ""
  about: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  scoring: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  second: Row | None = None


@dataclasses.dataclass(frozen=True)
class Task:
  """A named source of rows, and the scorer of their answers.

  Attributes:
    name: unique among all tasks.
    family: the tasks that are asked for together: the name of its benchmark.
    summary: one line for lists.
    build: (count, length=, seed=, index=) to row number `index` of the task. The row with its
      answer takes at most `length` tokens; seed and index decide everything else. Raises
      ValueError where that cannot be, NoMoreRows where a data set has no row of that index,
      FileNotFoundError where its data is not on this machine.
    score: (answer, row) to a number in [0, 1].
    chat: whether the row is put to a chat model as a user's turn; few-shot and code tasks are
      read as plain text.
    filled: whether a row fills at least 95 % of its tokens.
    forced: the row's continuation is read token by token instead of an answer; there is no score.
    open_ended: `build` also takes answer=, tokens of an answer at most: what a task leaves open.
    rolling: the row's continuation is the whole text, and its log-likelihood is what is measured.
    stop: strings that end an answer.
    also: further scores by name, which results keep beside the task's own.
    needs: files below the folder of data sets that the task reads.
    stand_in: task that takes its place in its family where these files are not there.
    second: as `build`, for rows with a second question: both turns with both answers take at most
      `length` tokens. None: the task has none. Such a task has no stop strings: what they leave in
      the cache after the first answer would be read by the second.
  """

  name: str
  family: str
  summary: str
  build: Callable[..., Row]
  score: Callable[[str, Row], float]
  chat: bool = True
  filled: bool = True
  forced: bool = False
  open_ended: bool = False
  rolling: bool = False
  stop: tuple[str, ...] = ()
  also: Mapping[str, Callable[[str, Row], float]] = dataclasses.field(default_factory=dict)
  needs: tuple[str, ...] = ()
  stand_in: str = ""
  second: Callable[..., Row] | None = None


def rng(task: str, seed: int, index: int) -> random.Random:
  """The random numbers of one row: the same on every machine, whatever the rows around it."""
  return random.Random(f"{task} {seed} {index}")


def check_length(length: int, least: int) -> None:
  """Raises ValueError where a row would take more tokens than it may."""
  if least > length:
    raise ValueError(
      f"length: found {length} tokens, expected at least {least} for question and answer"
    )


def fit(tokens: Callable[[int], int], length: int, most: int) -> tuple[int, int]:
  """The number of units of text with which a row takes at most `length` tokens, and these tokens.

  Token counts are nearly linear in the units, so that interpolation finds the number in a few
  counts; every third is a bisection, which bounds them where it does not.

  Args:
    tokens: the row's tokens by number of units, its answer included.
    length: tokens that the row may take.
    most: units that there are.

  Raises:
    ValueError: a row without any unit is too long.
  """
  least = below = tokens(0)
  check_length(length, least)
  low, high, above = 0, most + 1, None
  probe, turn = min(most, max(1, length // 16)), 0
  while high - low > 1:
    probe = min(max(probe, low + 1), high - 1)
    count = tokens(probe)
    if count <= length:
      low, below = probe, count
    else:
      high, above = probe, count
    turn += 1
    if turn % 3 == 0 and above is not None:
      probe = (low + high) // 2
    elif above is not None:
      probe = low + int((high - low) * (length - below) / (above - below))
    else:
      probe = low + max(1, int((length - below) * low / max(1, below - least)))
  return low, below


def fill(tokens: Callable[[int], int], length: int, most: int, unit: str) -> int:
  """`fit` that insists on 95 % of the tokens; `unit` is what messages call a unit.

  Raises:
    ValueError: a row without any unit is too long, there is too little text, or units are so
      coarse that 95 % cannot be reached.
  """
  n, used = fit(tokens, length, most)
  if used < FILLED * length:
    why = f"there are only {most}" if n == most else f"one more {unit} is too long"
    raise ValueError(
      f"length: found {length} tokens, of which {n} × {unit} with question and answer fill "
      f"{used} ({used / length:.0%}), expected at least {FILLED:.0%}: {why}"
    )
  return n


def cut_middle(
  count: Count, before: str, text: str, ask: tuple[str, str], *, length: int, reserved: int
) -> str:
  """`before` and `text`, whose middle is left out as far as `length` tokens ask for.

  LongBench's way with texts that are too long: the first and the last half of what fits stay.

  Args:
    count: tokens of context, question and answer prefix.
    before: instruction in front of the text; it is never cut.
    text: the text to shorten.
    ask: question and answer prefix.
    length: tokens that the row may take.
    reserved: how many of them are for the answer.
  """

  def shortened(n: int) -> str:
    return before + (text if n >= len(text) else text[: (n + 1) // 2] + text[len(text) - n // 2 :])

  n, _ = fit(lambda n: count(shortened(n), *ask) + reserved, length, len(text))
  return shortened(n)
