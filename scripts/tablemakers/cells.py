"""How figures are written: times, ratios, spans of ratios, tables and sentences.

A ratio to a reference that was not steady says nothing: where the quartiles of what is divided by
are wider than 5 % of its median, they stand in the ratio's place. A time's own quartiles stand
after it where they are as wide.
"""

import textwrap
from collections.abc import Iterable, Sequence

from .. import bench_files
from .results import Timing

Pair = tuple[float, Timing]  # a ratio, and the reference that was divided by


def steady(timing: Timing) -> bool:
  """Whether others may be divided by it."""
  return bench_files.steady(timing.low, timing.us, timing.high)


def ratio(value: float, reference: Timing, form: str = "{:.2f}") -> str:
  """A ratio, or the quartiles of its reference where these are too wide to divide by."""
  return guarded(form.format(value), reference)


def guarded(text: str, reference: Timing) -> str:
  """A figure made from a ratio, under the same rule."""
  return text if steady(reference) else f"– ({reference.name}: {spread(reference)})"


def span(pairs: Iterable[Pair], form: str = "{:.2f}", unit: str = "") -> str:
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
    return f"– ({', '.join(why)})" if why else "–"
  text = values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}"
  left_out = f" ({len(wide)} of {len(listed)} left out: {', '.join(why)})" if wide else ""
  return text + unit + left_out


def percent(share: float, digits: int = 0) -> str:
  """A share of one."""
  return f"{100 * share:.{digits}f} %"


def signed(value: float, digits: int = 2) -> str:
  """A number with its sign, and a true minus."""
  return f"{value:+.{digits}f}".replace("-", "−")


def time(timing: Timing) -> str:
  """A median with its unit."""
  unit, form, scale = _unit(timing)
  text = f"{form.format(timing.us / scale)} {unit}"
  if steady(timing):
    return text
  low, high = (form.format(us / scale) for us in (timing.low, timing.high))
  return f"{text} ({low} to {high})"


def ours(timing: Timing) -> str:
  """The time that a row is about."""
  unit, form, scale = _unit(timing)
  text = f"{form.format(timing.us / scale)} {unit}"
  return time(timing).replace(text, f"**{text}**")


def spread(timing: Timing) -> str:
  """The quartiles with their unit."""
  unit, form, scale = _unit(timing)
  return f"{form.format(timing.low / scale)} to {form.format(timing.high / scale)} {unit}"


def _unit(timing: Timing) -> tuple[str, str, float]:
  if timing.us < 1e3:
    return "µs", "{:.1f}", 1
  return "ms", "{:.2f}" if timing.us < 1e5 else "{:,.0f}", 1e3


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
  """The lines of a table in Markdown."""
  lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
  for row in rows:
    if len(row) != len(head):
      raise ValueError(f"row: found {len(row)} cells {row}, expected {len(head)}")
    lines.append(f"| {' | '.join(row)} |")
  return lines


def sentence(text: str) -> list[str]:
  """Lines of at most 100 columns."""
  return textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False)
