"""Name -> task, and the names that a command line may give for several."""

from collections.abc import Sequence

from scripts.evals import (
  divergence,
  documents,
  infinitebench,
  local,
  maths,
  needle,
  passages,
  ruler,
)
from scripts.evals.task import Task

_FILES = (divergence, needle, ruler, documents, infinitebench, passages, maths)
TASKS: dict[str, Task] = {task.name: task for file in _FILES for task in file.TASKS}


def choose(names: Sequence[str]) -> list[Task]:
  """The tasks of the given names and families, each once, in the order of the names.

  A family leaves out tasks whose files are not on this machine, or puts what stands in for them; a
  task that is named itself is there in any case, and says what is missing when it is built.

  Raises:
    ValueError: a name is neither.
  """
  families = {task.family for task in TASKS.values()}
  unknown = [name for name in names if name not in TASKS and name not in families]
  if unknown:
    raise ValueError(
      f"--tasks: found {', '.join(unknown)}, expected families ({', '.join(sorted(families))}) "
      f"or tasks ({', '.join(TASKS)})"
    )
  chosen: dict[str, Task] = {}
  for name in names:
    if name in TASKS:
      chosen[name] = TASKS[name]
    if name in families:
      members = (task for task in TASKS.values() if task.family == name)
      for task in members:
        if not all(map(local.there, task.needs)):
          if not task.stand_in:
            continue
          task = TASKS[task.stand_in]
        chosen[task.name] = task
  return list(chosen.values())
