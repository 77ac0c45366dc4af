"""Forms of figures: times, ratios, spans of ratios, tables and sentences.

A ratio to a reference that was not steady says nothing: where the quartiles of what is divided by
are wider than 5 % of its median, they stand in the ratio's place. A time's own quartiles stand
after it where they are as wide. Everything that is written carries its records.
"""

import string
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvjax.kernels.common.devices import device
from kvjax.programs import bench_files
from scripts.tools.tablemakers import records
from scripts.tools.tablemakers.records import Figure, Number, Part
from scripts.tools.tablemakers.results import Case, Timing

Pair = tuple[float, Timing]  # a ratio, and the reference that was divided by


def steady(timing: Timing) -> bool:
  """True where others may be divided by it."""
  return bench_files.steady(timing.low, timing.us, timing.high)


def rate(timing: Timing) -> float:
  """Bytes a second of a streaming read of the card that a time was taken on."""
  return device(records.of(timing)[0].card).read


def over(mine: Timing, reference: Timing) -> Pair:
  """One time over another of the same card, which is divided by.

  Raises:
    ValueError: they are of unlike cards.
  """
  return _divided(mine, reference), reference


def gain(mine: Timing, reference: Timing) -> Pair:
  """The same the other way round: how often as fast as the reference it is."""
  return _divided(reference, mine), reference


def _divided(top: Timing, bottom: Timing) -> float:
  records.alike((record,) for record in records.of(top, bottom))
  return top.us / bottom.us


def ratio(value: float, reference: Timing, form: str = "{:.2f}") -> Figure:
  """A ratio, or the quartiles of its reference where these are too wide to divide by."""
  return guarded(number(value, form), reference)


def guarded(figure: Figure, reference: Timing) -> Figure:
  """A figure made from a ratio, under the same rule."""
  if steady(reference):
    return figure
  return Figure(f"– ({reference.name}: {spread(reference)})", records.of(figure, reference))


def span(pairs: Iterable[Pair], form: str = "{:.2f}", unit: str = "") -> Figure:
  """From the least to the largest of some ratios, and how many have no steady reference.

  Where one or two references are not steady, their quartiles are given.
  """
  listed = list(pairs)
  values = [form.format(x) for x in sorted(x for x, reference in listed if steady(reference))]
  wide = [reference for _, reference in listed if not steady(reference)]
  why = [f"{reference.name}: {spread(reference)}" for reference in wide]
  if len(wide) > 2:
    why = ["their references were not steady"]
  if not values:
    text = f"– ({', '.join(why)})" if why else "–"
  else:
    text = values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}"
    left_out = f" ({len(wide)} of {len(listed)} left out: {', '.join(why)})" if wide else ""
    text += unit + left_out
  return Figure(text, records.of(*(part for pair in listed for part in pair)))


def read(figure: Figure) -> Number:
  """The number that a text is."""
  return Number(float(figure.replace(",", "")), *figure.records)


def number(value: float, form: str = "{:.2f}", *sources: object) -> Figure:
  """A value in a form such as "{:,.0f} MiB"; the sources of one that was worked out from others."""
  return Figure(form.format(float(value)), records.of(*(sources or (value,))))


def percent(share: float, digits: int = 0) -> Figure:
  """A share of one."""
  return Figure(f"{100 * share:.{digits}f} %", records.of(share))


def signed(value: float, digits: int = 2) -> str:
  """A number with its sign, and a true minus."""
  return f"{value:+.{digits}f}".replace("-", "−")


def time(timing: Timing, mark: str = "") -> Figure:
  """A median with its unit, between marks; the quartiles after it where it was not steady."""
  unit, (us, low, high) = _written(timing)
  text = f"{mark}{us} {unit}{mark}"
  return Figure(text if steady(timing) else f"{text} ({low} to {high})", records.of(timing))


def ours(timing: Timing) -> Figure:
  """The time that a row is about."""
  return time(timing, "**")


def spread(timing: Timing) -> Figure:
  """The quartiles with their unit."""
  unit, (_, low, high) = _written(timing)
  return Figure(f"{low} to {high} {unit}", records.of(timing))


def _written(timing: Timing) -> tuple[str, list[str]]:
  """The unit, and the median and quartiles in it."""
  unit, form, scale = "µs", "{:.1f}", 1.0
  if timing.us >= 1e3:
    unit, form, scale = "ms", "{:.2f}" if timing.us < 1e5 else "{:,.0f}", 1e3
  return unit, [form.format(us / scale) for us in (timing.us, timing.low, timing.high)]


def join(template: str, *parts: str) -> Figure:
  """A template such as "{} of {}" with figures in it, which are all that may have numbers.

  Raises:
    ValueError: a number has no source.
  """
  return Figure(template.format(*parts), _sources(template, parts))


def listed(parts: Iterable[str], between: str = ", ") -> Figure:
  """Figures one after the other."""
  parts = list(parts)
  return Figure(between.join(parts), _sources(between, parts))


def _sources(template: str, parts: Iterable[str]) -> records.Records:
  for text, *_ in string.Formatter().parse(template):
    records.without_source(text)
  figures = [part for part in parts if records.without_source(part) and isinstance(part, Figure)]
  return records.of(*figures)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], labels: int = 1) -> Part:
  """A table in Markdown, whose first columns are names; nothing without rows.

  Raises:
    ValueError: a row has not as many cells as the head, or a number behind the names no source.
  """
  lines, figures = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)], []
  for row in rows:
    if len(row) != len(head):
      raise ValueError(f"row: found {len(row)} cells {row}, expected {len(head)}")
    figures += [x for x in map(records.without_source, row[labels:]) if isinstance(x, Figure)]
    lines.append(f"| {' | '.join(row)} |")
  return Part(lines, figures) if len(lines) > 2 else Part()


def ranked(rows: Iterable[tuple[float, Sequence[str]]]) -> list[Sequence[str]]:
  """Rows by their values, the largest first: of one card and of the same prompts.

  Raises:
    ValueError: they are of unlike cards, or of unlike prompts.
  """
  listed = list(rows)
  records.alike(records.of(value) for value, _ in listed)
  return [row for _, row in sorted(listed, key=lambda pair: -pair[0])]


# ---- tables with a row a case

Column = Callable[[Case], str]


def cases(held: Mapping[str, Case], *columns: tuple[str, Column], first: str = "") -> Part:
  """A table of cases by their labels; each column has a head and what it shows."""
  rows = ([label, *(show(case) for _, show in columns)] for label, case in held.items())
  return table((first, *(head for head, _ in columns)), rows)


def median(name: str) -> Column:
  """A contender's time; a dash where it has none."""
  return lambda case: time(case.time(name)) if case.has(name) else "–"


def own(name: str = "kvjax") -> Column:
  """The time that the row is about."""
  return lambda case: ours(case.time(name))


def faster(mine: str, reference: str, form: str = "{:.2f}") -> Column:
  """Ratio of the reference's time to this one."""
  return lambda case: ratio(*gain(case.time(mine), case.time(reference)), form)


def longer(mine: str, reference: str, form: str = "{:.2f}") -> Column:
  """Ratio of this time to the reference's."""
  return lambda case: ratio(*over(case.time(mine), case.time(reference)), form)


def said(pattern: str, form: str = "{:.2f}") -> Column:
  """The number of a remark."""
  return lambda case: number(case.number(pattern), form)
