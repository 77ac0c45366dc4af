"""What ran where, of all files of a device."""

from . import cells
from .results import GPU, Results


def runs(results: Results) -> list[str]:
  """Versions of jax with their suites, and the repetitions."""
  suites: dict[str, list[str]] = {}
  times = set()
  for bench in results.benches(GPU):
    suites.setdefault(bench.facts["jax"], []).append(f"`{bench.path.stem}`")
    times |= {case.repetitions for case in bench.cases("")}
  usual, *others = sorted(suites, key=lambda version: -len(suites[version]))
  apart = "".join(f", {version} in {', '.join(suites[version])}" for version in others)
  return cells.sentence(
    f"They are of jax {usual}{apart}, with {min(times)} to {max(times)} repetitions."
  )
