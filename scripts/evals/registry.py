"""Name -> task, and the names that a command line may give for several."""

from collections.abc import Sequence

from scripts.evals import divergence, needle
from scripts.evals.task import Task

TASKS: dict[str, Task] = {
  task.name: task for family in (divergence, needle) for task in family.TASKS
}


def choose(names: Sequence[str]) -> list[Task]:
  """The tasks of the given names and families, each once, in the order of the names.

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
  chosen = {
    task.name: task for name in names for task in TASKS.values() if name in (task.name, task.family)
  }
  return list(chosen.values())
