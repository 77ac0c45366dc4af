"""Tables: records, columns that are declared as functions of these, and Markdown."""

import functools
import operator
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pandas as pd

from scripts.tools.tablemakers import GPU, Part, Ratio, Record, Results, over

# A name of a record's, contenders of a case (`value`), or a function of the record.
Column = str | Callable[[Any], Any]


def say(form: str | Callable[..., str], *values: Any) -> str | None:
  """Values in a form, with a space before percent and a true minus after signs."""
  if None in values:
    return None
  if callable(form):
    return form(*values)
  text = form.format(*values).replace("%", " %")
  return text.replace("-", "−") if "{:+" in form else text


method = functools.partial(re.sub, "^[^,]*", r"`\g<0>`")  # as code, without its settings


def span(values: Iterable[Any], form: str = "{:.2f}", between: str = " to ") -> str:
  """From the least to the largest of some numbers; one where they read alike."""
  found = sorted(values)
  return between.join(dict.fromkeys(say(form, value) for value in (found[0], found[-1])))


def value(record: Any, column: Column) -> Any:
  """Content of a column for a record; None is a dash.

  Of contenders between bars it is the time of the fastest that took the case. One may be several,
  one after the other: `0.5 * attend + join`.
  """
  if callable(column):
    return column(record)
  if column in record:
    return record[column]
  sums = ([x.rpartition(" * ") for x in each.split(" + ")] for each in column.split("|"))
  times = [
    functools.reduce(operator.add, (record[name] * float(n or 1) for n, _, name in each))
    for each in sums
    if all(name in record for _, _, name in each)
  ]
  return min(times, key=lambda time: time.us, default=None)


def table(records: Any, labels: list[Any], *columns: str | tuple[str, Column]) -> pd.DataFrame:
  """A row a record; a head may be what the column shows."""
  if isinstance(records, pd.DataFrame):
    records = records.astype(object).where(records.notna(), None).to_dict("records")
  pairs = [(x, x) if isinstance(x, str) else x for x in (*labels, *columns)]
  heads = [head for head, _ in pairs]
  rows = [[value(record, column) for _, column in pairs] for record in records]
  made = pd.DataFrame(rows, columns=heads, dtype=object).set_index(heads[: len(labels)])
  return made.dropna(axis=1, how="all") if rows else made


class Cases(NamedTuple):
  """The cases of a suite whose names have the pattern, on a card.

  A document names the suite if it is not given, else another card if any.
  """

  suite: str = ""
  pattern: str = ""
  card: str = GPU

  def table(self, *columns: str | tuple[str, Column]) -> Callable[..., Part]:
    """A maker of a table with a row a case."""

    def make(results: Results, named: str = "") -> Part:
      suite, card = (self.suite, named or self.card) if self.suite else (named, self.card)
      return table(results.cases(suite, self.pattern, card), [("", "case")], *columns)

    return make


def own(names: str = "kvjax") -> Column:
  """The time that the row is about."""
  return lambda case: f"{value(case, names) or case[names]:**}"


def longer(reference: str, mine: str = "kvjax", form: str = "{:.2f}", power: int = 1) -> Column:
  """Ratio of this time to the reference's, if both have one."""

  def show(case: Record) -> Ratio | None:
    both = value(case, mine), value(case, reference)
    return over(*both, form, power) if all(both) else None

  return show


faster = functools.partial(longer, power=-1)  # the reference's time over this one


def figure(form: str | Callable[..., str], *names: str, to: str = "") -> Column:
  """Figures of a record in a form; of a ratio, the time that it is to."""

  def show(record: Any) -> Any:
    values = [record[name] for name in names]
    text = say(form, *(values[0] if isinstance(values[0], list) else values))
    reference = value(record, to)
    return Ratio(values[0], text, reference) if reference else text

  return show


def said(name: str, form: str = "{:.2f}", to: str = "") -> tuple[str, Column]:
  """One figure, under its own name."""
  return name, figure(form, name, to=to)
