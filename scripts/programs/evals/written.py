"""Rows and their prompts as JSON, and back: what a file says is read, and nothing of it is run."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from kvjax.programs.evals.prompt import Prompt
from kvjax.programs.evals.task import Row

_TEXTS = ("context", "question", "answer_prefix", "task", "continuation")


def text(made: tuple[Row, Prompt]) -> bytes | None:
  """A row and its prompt as JSON; None where JSON would give back something else."""
  try:
    said = json.dumps(told(*made)).encode()
    return said if read(said) == made else None
  except (TypeError, ValueError):
    return None


def read(said: bytes) -> tuple[Row, Prompt]:
  """The row and prompt that `text` wrote; raises ValueError for anything else."""
  try:
    return made(json.loads(said))
  except (KeyError, TypeError, RecursionError) as error:
    raise ValueError(f"row: found {error!r}, expected a row and its prompt") from error


def told(row: Row, prompt: Prompt) -> dict[str, Any]:
  """A row and its prompt as plain values."""
  return {"row": plain(row), "prompt": dataclasses.asdict(prompt)}


def made(found: dict[str, Any]) -> tuple[Row, Prompt]:
  """The row and prompt of `told`; raises KeyError or TypeError where it is something else."""
  return _row(found["row"]), _prompt(found["prompt"])


def plain(row: Row) -> dict[str, Any]:
  """The fields of a row, and of the row after it."""
  fields = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
  maps = {name: dict(value) for name, value in fields.items() if isinstance(value, Mapping)}
  return fields | maps | {"second": None if row.second is None else plain(row.second)}


def _row(found: dict[str, Any]) -> Row:
  answers, second = found["answers"], found["second"]
  row = Row(**found | {"answers": (*answers,), "second": None if second is None else _row(second)})
  texts = [getattr(row, name) for name in _TEXTS]
  right = all(isinstance(one, str) for one in [*texts, *row.answers])
  right = right and isinstance(answers, list) and type(row.max_new_tokens) is int
  if not (right and isinstance(row.about, dict) and isinstance(row.scoring, dict)):
    raise TypeError("a field of another type")
  return row


def _prompt(found: dict[str, Any]) -> Prompt:
  prompt = Prompt(**found)
  for ids in found.values():
    if not (isinstance(ids, list) and all(type(token) is int and token >= 0 for token in ids)):
      raise TypeError("token ids of another type")
  return prompt
