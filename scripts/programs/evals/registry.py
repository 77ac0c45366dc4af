"""Name -> task, and the names that a command line may give for several."""

import dataclasses
import functools
from collections.abc import Sequence
from difflib import get_close_matches

from kvjax.programs.evals import (
  coding,
  coqa,
  divergence,
  documents,
  infinitebench,
  infinitebench_files,
  local,
  longbench,
  lost_in_the_middle,
  maths,
  needle,
  passages,
  ruler,
  wikitext,
)
from kvjax.programs.evals.task import Task

_FILES = (divergence, needle, ruler, documents, infinitebench, passages, maths)
_LOCAL = (longbench, infinitebench_files, lost_in_the_middle, coqa, coding, wikitext)
TASKS: dict[str, Task] = {task.name: task for file in _FILES + _LOCAL for task in file.TASKS}


def choose(names: Sequence[str]) -> list[Task]:
  """The tasks of the given names and families, each once, in the order of the names.

  A family leaves out tasks whose files are not on this machine, or puts what stands in for them; a
  task that is named itself is there in any case, and says what is missing when it is built.

  Raises:
    ValueError: a name is neither.
    FileNotFoundError: no file of a family is there.
  """
  families = {task.family for task in TASKS.values()}
  unknown = [name for name in names if name not in TASKS and name not in families]
  if unknown:
    known = [*families, *TASKS]
    near = dict.fromkeys(x for name in unknown for x in get_close_matches(name, known, 1))
    hint = f" (did you mean {', '.join(near)}?)" if near else ""
    raise ValueError(
      f"--tasks: found {', '.join(unknown)}, expected families ({', '.join(sorted(families))}) "
      f"or tasks, which `kvjax evaluate --list` names{hint}"
    )
  chosen: dict[str, Task] = {}
  for name in names:
    if name in TASKS:
      chosen[name] = TASKS[name]
    else:
      chosen |= {task.name: task for task in _family(name)}
  return list(chosen.values())


def with_answers(tasks: Sequence[Task], most: int | None) -> list[Task]:
  """The tasks, those whose answers' length is open with `most` tokens for one; None: as they are.

  Raises:
    ValueError: no task leaves it open.
  """
  if most is not None and not any(task.open_ended for task in tasks):
    listed = ", ".join(name for name, task in TASKS.items() if task.open_ended)
    raise ValueError(
      f"--answer-tokens: found {most} with {', '.join(task.name for task in tasks)}, "
      f"expected one of {listed}"
    )
  return [
    dataclasses.replace(task, build=functools.partial(task.build, answer=most))
    if most is not None and task.open_ended
    else task
    for task in tasks
  ]


def _family(name: str) -> list[Task]:
  """The tasks of a family whose files are there, and what stands in for the others."""
  members = [task for task in TASKS.values() if task.family == name]
  there = []
  for task in members:
    if all(map(local.there, task.needs)):
      there.append(task)
    elif task.stand_in:
      there.append(TASKS[task.stand_in])
  if not there:
    missing = local.folder() / members[0].needs[0]
    raise FileNotFoundError(
      f"--tasks {name}: found none of its files, expected {missing} and similar files: give a "
      f"task's name ({members[0].name}) to see where its file comes from"
    )
  return there
