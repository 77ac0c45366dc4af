"""Plan of a run: methods with their settings, cells of rows, batches of one shape."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import kvjax
from kvjax.methods.labels import instance
from kvjax.models.nn.transformer import Transformer
from kvjax.programs.evals.fitted import Fitted, of_label
from kvjax.programs.evals.prompt import Prompt
from kvjax.programs.evals.task import Row, Task

Mode = Literal["aware", "agnostic", "second", "reuse"]
# Questions of a row in each.
TURNS: dict[Mode, int] = {"aware": 1, "agnostic": 1, "second": 2, "reuse": 2}
MEANING: dict[Mode, str] = {
  "aware": "the prompt is read at once, so compression sees the question",
  "agnostic": "the context is compressed before the question is seen",
  "second": "a second question on the same text, after the first one and its answer",
  "reuse": "two questions on one context, which was compressed before both; their mean score",
}


@dataclasses.dataclass(frozen=True)
class Entry:
  """A method as it runs at one length.

  Attributes:
    label: as the command line names it: a registered name, with keyword arguments if any.
    budget: tokens that it keeps or reads, as asked for; None where it has no such setting.
    method: the instance.
    fitted: what it got from files, or heads given by hand.
  """

  label: str
  budget: int | None
  method: kvjax.Method
  fitted: tuple[Fitted, ...] = dataclasses.field(default=(), compare=False)

  @property
  def key(self) -> tuple[str, int | None]:
    """The name of its rows of results."""
    return self.label, self.budget


@dataclasses.dataclass(frozen=True)
class Cell:
  """Rows of one task at one length, as token ids.

  Attributes:
    task, length: whose rows; tokens that prompt and answer take at most.
    rows, prompts: by index.
    forced: token ids of each row's continuation, for tasks that read one.
    turns: questions that each row asks: 2 in the modes "second" and "reuse".
    mode: how they are asked: one of `MEANING`.
  """

  task: Task
  length: int
  rows: Sequence[Row]
  prompts: Sequence[Prompt]
  forced: Sequence[list[int]] = ()
  turns: int = 1
  mode: Mode = "aware"


def entries(labels: Sequence[str], budgets: Sequence[str], length: int) -> list[Entry]:
  """Every method with every budget, those without one once; the full cache first.

  Args:
    labels: as `instance` takes them.
    budgets: tokens ("512"), or shares of the length ("0.25").
    length: tokens of prompt and answer.

  Raises:
    ValueError: a name, a field or a budget is not one, or a method refuses it.
  """
  made: dict[kvjax.Method, Entry] = {}
  tokens = [_tokens(budget, length) for budget in budgets]
  for label in dict.fromkeys(["full", *labels]):
    for budget in tokens:
      method = instance(label, budget, "--methods")
      free = instance(label, 2 * budget) == method
      made.setdefault(method, Entry(label, None if free else budget, method, of_label(label)))
  return list(made.values())


def _tokens(budget: str, length: int) -> int:
  try:
    value = float(budget)
    share = value < 1
    tokens = math.floor(value * length) if share else int(budget)
  except ValueError:
    tokens = 0
  if tokens < 1:
    raise ValueError(f"--budgets: found {budget!r}, expected tokens (512) or a share (0.25)")
  return tokens


def cache_bytes(method: kvjax.Method, model: Transformer, batch: int, length: int) -> int:
  """Bytes of a method's empty caches, on each device of the model's and on the host.

  Raises:
    ValueError, NotImplementedError: they cannot be split over these devices.
  """
  made = kvjax.plan_memory(model.spec(batch, length), method, model.mesh)
  return made.device + made.host


def read_at_once(batch: int) -> int:
  """Prompts that are read together, of rows that decode together."""
  return max(1, batch // 5)


def groups(
  chosen: Sequence[Entry], model: Transformer, batch: int, length: int, limit: float
) -> list[list[Entry]]:
  """Methods that one prompt pass fills together, as many as `limit` bytes of caches hold.

  Methods that read a prompt their own way are alone, and those that a model's mesh refuses.
  """
  made: list[list[Entry]] = []
  alone: list[list[Entry]] = []
  room = 0.0
  for entry in chosen:
    dense = kvjax.families.forms.dense_prefill(entry.method)
    if not dense or entry.method.traits.repeats:
      alone.append([entry])
      continue
    try:
      size = cache_bytes(entry.method, model, batch + read_at_once(batch), length)
    except (ValueError, NotImplementedError):
      alone.append([entry])
      continue
    if not made or size > room:
      made.append([])
      room = limit
    made[-1].append(entry)
    room -= size
  return made + alone
