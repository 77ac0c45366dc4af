"""Times with their quartiles, and their ratios.

Where the quartiles of what is divided by are wider than 5 % of its median, they
stand in the ratio's place; a time's own stand after it where they are as wide.
"""

import dataclasses
from typing import NamedTuple

from kvjax.kernels.common.devices import device
from kvjax.programs import bench_files
from scripts.tools.tablemakers import records
from scripts.tools.tablemakers.records import Figure, Number, Records


@dataclasses.dataclass(frozen=True)
class Timing:
  """Microseconds of a contender: the median with its source, and the quartiles.

  A format such as `**`, for the time that a row is about, marks the median.
  """

  name: str
  us: Number
  low: float
  high: float

  @property
  def records(self) -> Records:
    return records.of(self.us)

  @property
  def steady(self) -> bool:
    """True where others may be divided by it."""
    return bench_files.steady(self.low, self.us, self.high)

  @property
  def rate(self) -> float:
    """Bytes a microsecond of a streaming read of the card that it was taken on."""
    return device(self.records[0].card).read * 1e-6

  @property
  def spread(self) -> Figure:
    """The quartiles with their unit."""
    unit, (_, low, high) = self._written()
    return Figure(f"{low} to {high} {unit}", self.records)

  def __add__(self, other: "Timing | float") -> "Timing":
    """This one and another, or an exact time, one after the other."""
    if isinstance(other, Timing):
      name = f"{self.name} + {other.name}"
      return Timing(name, self.us + other.us, self.low + other.low, self.high + other.high)
    return Timing(self.name, self.us + other, self.low + other, self.high + other)

  def __mul__(self, factor: float) -> "Timing":
    """So many of it."""
    return Timing(self.name, self.us * factor, self.low * factor, self.high * factor)

  def __format__(self, mark: str) -> str:
    """The median with its unit; the quartiles after it where it was not steady."""
    unit, (us, low, high) = self._written()
    text = f"{mark}{us} {unit}{mark}"
    return text if self.steady else f"{text} ({low} to {high})"

  def _written(self) -> tuple[str, list[str]]:
    """The unit, and the median and quartiles in it."""
    unit, form, scale = "µs", "{:.1f}", 1.0
    if self.us >= 1e3:
      unit, form, scale = "ms", "{:.2f}" if self.us < 1e5 else "{:,.0f}", 1e3
    return unit, [form.format(us / scale) for us in (self.us, self.low, self.high)]


class Ratio(NamedTuple):
  """A ratio, or a text made from one, and the reference that was divided by."""

  value: Number | Figure
  reference: Timing

  @property
  def records(self) -> Records:
    return records.of(*self)

  def __format__(self, form: str) -> str:
    """The ratio, or the quartiles of a reference that are too wide to divide by."""
    if self.reference.steady:
      return format(self.value, form)
    return f"– ({self.reference.name}: {self.reference.spread})"


def over(mine: Timing, reference: Timing) -> Ratio:
  """One time over another of the same card, which is divided by.

  Raises:
    ValueError: they are of unlike cards.
  """
  records.alike((record,) for record in records.of(mine, reference))
  return Ratio(mine.us / reference.us, reference)


def gain(mine: Timing, reference: Timing) -> Ratio:
  """The same the other way round: how often as fast as the reference it is."""
  return Ratio(over(reference, mine).value, reference)
