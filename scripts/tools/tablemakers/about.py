"""What ran where, of all files of a device."""

from scripts.tools.tablemakers import cells
from scripts.tools.tablemakers.records import Part
from scripts.tools.tablemakers.results import GPU, Results


def runs(results: Results) -> Part:
  """Versions of jax with their suites, and the repetitions."""
  suites: dict[str, list[str]] = {}
  for bench in results.benches(GPU):
    suites.setdefault(bench.facts["jax"], []).append(f"`{bench.path.stem}`")
  usual, *others = sorted(suites, key=lambda version: -len(suites[version]))
  apart = "".join(f", `{version}` in {', '.join(suites[version])}" for version in others)
  cases = [case for bench in results.benches(GPU) for case in bench.cases("")]
  few, many = (cells.number(end(case.repeated() for case in cases), "{:.0f}") for end in (min, max))
  return cells.sentence(
    f"They are of jax `{usual}`{apart}, with {{}} to {{}} repetitions.", few, many
  )
