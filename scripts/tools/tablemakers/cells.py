"""Cells, sentences and tables in Markdown: everything that is written carries its records."""

import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from scripts.tools.tablemakers import records, timings
from scripts.tools.tablemakers.records import Figure, Part
from scripts.tools.tablemakers.results import GPU, Case, Maker, Results
from scripts.tools.tablemakers.timings import Ratio, gain, over

Column = Callable[[Case], str]
Name = str | Callable[[Case], str]  # of a contender


def say(template: str, *parts: Any) -> Figure:
  """A template such as "{:.2f} of {}" with values in it, which are all that may have numbers.

  Raises:
    ValueError: a number has no source.
  """
  literal = (text for text, *_ in string.Formatter().parse(template))
  for text in (*literal, *(part for part in parts if isinstance(part, str))):
    records.without_source(text)
  sources = (x for x in parts if isinstance(x, Figure) or not isinstance(x, str))
  return Figure(template.format(*parts), records.of(*sources))


def listed(parts: Iterable[Any], between: str = ", ", form: str = "{}") -> Figure:
  """Values one after the other."""
  parts = list(parts)
  return say(between.join([form] * len(parts)), *parts)


def ends(values: Iterable[Any], form: str = "{:.2f}", between: str = " to ") -> Figure:
  """From the least to the largest of some numbers; one where they read alike."""
  found = list(values)
  return Figure(timings.ends(found, form, between), records.of(*found))


def table(head: Iterable[Any], rows: Iterable[Sequence[Any]], labels: int = 1) -> Part:
  """A table in Markdown, whose first columns are names; nothing without rows.

  Args:
    head: of each column its name, or its name and the form of its values.
    rows: texts and values; None is a dash.

  Raises:
    ValueError: a row has not as many cells as the head, or a number behind the names no source.
  """
  columns = [(column, "{}") if isinstance(column, str) else column for column in head]
  lines = [f"| {' | '.join(name for name, _ in columns)} |", "|" + "---|" * len(columns)]
  figures: list[Figure] = []
  for row in rows:
    if len(row) != len(columns):
      raise ValueError(f"row: found {len(row)} cells {row}, expected {len(columns)}")
    shown = [_shown(cell, form) for cell, (_, form) in zip(row, columns, strict=True)]
    figures += [x for x in map(records.without_source, shown[labels:]) if isinstance(x, Figure)]
    lines.append(f"| {' | '.join(shown)} |")
  return Part(lines, figures) if len(lines) > 2 else Part()


def _shown(value: Any, form: str) -> str:
  if value is None:
    return "–"
  return value if isinstance(value, str) else say(form, value)


def ranked(rows: Iterable[tuple[float, Sequence[Any]]]) -> list[Sequence[Any]]:
  """Rows by their values, the largest first: of one card and of the same prompts.

  Raises:
    ValueError: they are of unlike cards, or of unlike prompts.
  """
  listed = list(rows)
  records.alike(records.of(value) for value, _ in listed)
  return [row for _, row in sorted(listed, key=lambda pair: -pair[0])]


# ---- tables with a row a case


def of_cases(held: Mapping[str, Case], *columns: tuple[str, Column], first: str = "") -> Part:
  """A table of cases by their labels; each column has a head and what it shows."""
  rows = ([label, *(show(case) for _, show in columns)] for label, case in held.items())
  return table((first, *(head for head, _ in columns)), rows)


def cases(
  suite: str,
  names: Mapping[str, str] | str,
  *columns: tuple[str, Column],
  label: Callable[[str], str] = str,
  first: str = "",
  card: str = GPU,
) -> Maker:
  """A maker of such a table from a file of `kvjax.programs.bench`.

  Args:
    names: of cases by their labels, or a pattern of names, which `label` turns into labels.
    first: head of the labels.
  """

  def make(results: Results) -> Part:
    if isinstance(names, str):
      held = {label(case.name): case for case in results.cases(suite, names, card)}
    else:
      held = {text: results.bench(suite, card)[name] for text, name in names.items()}
    return of_cases(held, *columns, first=first)

  return make


def _time(case: Case, name: Name) -> timings.Timing:
  return case.time(name if isinstance(name, str) else name(case))


def own(name: Name = "kvjax") -> Column:
  """The time that the row is about."""
  return lambda case: say("{:**}", _time(case, name))


def median(name: Name) -> Column:
  """A contender's time; a dash where it has none."""
  return where(name, lambda case: say("{}", _time(case, name)))


def where(name: Name, column: Column) -> Column:
  """The cell of a column where a contender has a time, else a dash."""
  return lambda case: (
    column(case) if case.has(name if isinstance(name, str) else name(case)) else "–"
  )


def faster(mine: Name, reference: Name, form: str = "{:.2f}") -> Column:
  """Ratio of the reference's time to this one."""
  return lambda case: say(form, gain(_time(case, mine), _time(case, reference)))


def longer(mine: Name, reference: Name, form: str = "{:.2f}") -> Column:
  """Ratio of this time to the reference's."""
  return lambda case: say(form, over(_time(case, mine), _time(case, reference)))


def over_bytes(form: str = "{:.3f}") -> Column:
  """Ratio of our time to that of its bytes at a read's bandwidth."""
  return lambda case: say(form, (took := case.time("kvjax")).us * took.rate / case.bytes)


def said(pattern: str, form: str = "{:.2f}", reference: str = "") -> Column:
  """The number of a remark; if it is a ratio, to a reference."""

  def show(case: Case) -> str:
    number = case.numbers(pattern)[0]
    return say(form, Ratio(number, case.time(reference)) if reference else number)

  return show
