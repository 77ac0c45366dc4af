"""Cells, sentences and tables in Markdown, which carry their records."""

import functools
import operator
import re
import string
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from scripts.tools.tablemakers import GPU, Case, Figure, Part, Results, Row, records, timings
from scripts.tools.tablemakers.timings import Ratio, gain, over

Column = Callable[[Case], Any] | str  # or a contender, for its time


def say(template: str, *parts: Any) -> Figure:
  """A template with values in it, which are all that may have numbers.

  Raises:
    ValueError: a number has no source.
  """
  literal = (text for text, *_ in string.Formatter().parse(template))
  for text in (*literal, *(part for part in parts if isinstance(part, str))):
    records.without_source(text)
  sources = (x for x in parts if isinstance(x, Figure) or not isinstance(x, str))
  return Figure(template.format(*parts), records.of(*sources))


def method(name: str) -> str:
  """A method as code, and what is said of its settings."""
  return re.sub("^[^,]*", r"`\g<0>`", name)


def listed(parts: Iterable[Any], between: str = ", ") -> Figure:
  """Values one after the other."""
  parts = list(parts)
  return say(between.join(["{}"] * len(parts)), *parts)


def span(values: Iterable[Any], form: str, between: str = " to ") -> str:
  """From the least to the largest of some numbers; one where they read alike."""
  found = sorted(values)
  return between.join(dict.fromkeys(form.format(value) for value in (found[0], found[-1])))


def ends(values: Iterable[Any], form: str = "{:.2f}", between: str = " to ") -> Figure:
  """The same of numbers from files."""
  found = list(values)
  return Figure(span(found, form, between), records.of(*found))


def table(head: Iterable[Any], rows: Iterable[Sequence[Any]], labels: int = 1) -> Part:
  """A table in Markdown, whose first columns are names; nothing without rows.

  Args:
    head: of each column its name, or its name and the form of its values.
    rows: texts and values; None is a dash.

  Raises:
    ValueError: a row is not as long as the head, or a number has no source.
  """
  columns = [(column, "{}") if isinstance(column, str) else column for column in head]
  names = [name for name, _ in columns]
  part = Part([_line(names), "|" + "---|" * len(columns)])
  for row in map(list, rows):
    if len(row) != len(columns):
      raise ValueError(f"row: found {len(row)} cells {row}, expected {len(columns)}")
    shown = [_shown(cell, form) for cell, (_, form) in zip(row, columns, strict=True)]
    behind = [records.without_source(text) for text in shown[labels:]]
    part.figures += [x for x in behind if isinstance(x, Figure)]
    part.rows.append((", ".join(shown[:labels]), dict(zip(names[labels:], behind, strict=True))))
    part.append(_line(shown))
  return part if part.rows else Part()


def framed(rows: Iterable[Row], labels: int = 1) -> Part:
  """The same of rows by their columns; what a row lacks is a dash."""
  rows = list(rows)
  head = list(dict.fromkeys(name for row in rows for name in row))
  return table(head, (map(row.get, head) for row in rows), labels)


def noted(part: Part, note: Figure) -> Part:
  """A table with what it is made of below."""
  part += ["", f"`{note}`"]
  part.figures.append(note)
  return part


def _line(texts: Iterable[str]) -> str:
  return f"| {' | '.join(texts)} |"


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


def cell(case: Case, column: Column) -> Any:
  """Value that a column shows of a case; None if a contender has no time."""
  return timed(case, column) if isinstance(column, str) else column(case)


class Cases(NamedTuple):
  """The cases of a suite whose names have the pattern, on a card.

  A document names the suite if it is not given, else another card if any.
  """

  suite: str = ""
  pattern: str = ""
  card: str = GPU

  def table(self, *columns: str | tuple[str, Column]) -> Callable[..., Part]:
    """A maker of a table with a row a case; a head may be its contender."""
    pairs = [(column, column) if isinstance(column, str) else column for column in columns]

    def make(results: Results, named: str = "") -> Part:
      suite, card = (self.suite, named or self.card) if self.suite else (named, self.card)
      held = results.cases(suite, self.pattern, card)
      rows = ([case.name, *(cell(case, column) for _, column in pairs)] for case in held)
      return table(("", *(name for name, _ in pairs)), rows)

    return make


def timed(case: Case, names: str) -> timings.Timing | None:
  """The time of the fastest of some contenders, between bars, if any took the case.

  One may be several, one after the other, with a plus between them.
  """
  each = (name.split(" + ") for name in names.split("|"))
  found = [functools.reduce(operator.add, map(case.time, x)) for x in each if all(map(case.has, x))]
  return min(found, key=lambda timing: timing.us, default=None)


def own(names: str = "kvjax") -> Column:
  """The time that the row is about."""
  return lambda case: say("{:**}", timed(case, names) or case.time(names))


def longer(
  reference: str, mine: str = "kvjax", form: str = "{:.2f}", how: Callable[..., Ratio] = over
) -> Column:
  """Ratio of this time to the reference's, if both have one."""

  def show(case: Case) -> str | None:
    both = timed(case, mine), timed(case, reference)
    return say(form, how(*both)) if all(both) else None

  return show


faster = functools.partial(longer, how=gain)  # the reference's time over this one


def over_bytes(form: str = "{:.3f}") -> Column:
  """Ratio of our time to that of its bytes at a read's bandwidth."""
  return lambda case: say(form, (took := case.time("kvjax")).us * took.rate / case.bytes)


def bandwidth(name: str) -> Column:
  """Share of a read's bandwidth that a contender has."""
  return lambda case: say("{:.2f}", case.bytes / (took := case.time(name)).rate / took.us)


def figure(name: str, form: str = "{:.2f}", reference: str = "") -> Column:
  """A figure of the case, or several; of a ratio, what it is to, if timed."""

  def show(case: Case) -> str | Ratio:
    found = case.figures[name]
    text = say(form, *(found if isinstance(found, list) else [found]))
    return Ratio(text, took) if (took := timed(case, reference)) else text

  return show


def said(name: str, form: str = "{:.2f}", reference: str = "") -> tuple[str, Column]:
  """The same, under its own name."""
  return name, figure(name, form, reference)
