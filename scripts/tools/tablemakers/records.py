"""Values that know where they come from: no table or sentence takes one that does not.

A `Record` is a place in a kept file, which says there how the figure was made.
Numbers and texts of a file carry theirs; what is made of them carries them all.
A plain float has none, and is refused.
"""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

# A number by itself: not in a name (B8, T32K, Qwen2.5, 8B), nor quoted as code.
_NUMBER = re.compile(r"(?<![\w.,‑-])[+−-]?\d[\d.,]*(?![\d.]*[BK]\b)")
_QUOTED = re.compile(
  r"`[^`]*`|\]\([^)]*\)|§[\d.]+|"
  r"\b(?:Tab|Fig|Eq|App|Lemma|Theorem|Assumption)\w*\.? \w+(?: and \d\w*)?"
)

Place = tuple[str | int, ...] | tuple[tuple[str, str | int | None], ...]


@dataclasses.dataclass(frozen=True)
class Record:
  """The place of a figure, what it was measured on, and how often.

  Attributes:
    file: the kept file, below scripts/results.
    place: where in it: the keys that lead to it in JSON; `("line", n)` of a text; or pairs of
      names and values that its rows have in common.
    card: the device's name, "CPU" for processors.
    n: repetitions, prompts, walks or texts behind it, at least one.
    samples: prompts, where methods are compared by prompt.
  """

  file: str
  place: Place
  card: str
  n: int
  samples: frozenset[str] = dataclasses.field(default=frozenset(), repr=False)

  def __post_init__(self) -> None:
    for name in ("file", "place", "card"):
      if not getattr(self, name):
        raise ValueError(f"{self.file}: found no {name} of a figure, expected it to be said")
    if self.n < 1:
      raise ValueError(f"{self.file}: found n = {self.n} of a figure, expected at least 1")


Records = tuple[Record, ...]


class Number(float):
  """A value with its records, which sums, products and the like keep."""

  records: Records

  def __new__(cls, value: float, *records: Record) -> "Number":
    made = super().__new__(cls, value)
    made.records = records
    return made

  def __format__(self, form: str) -> str:
    """A float's, with a space before percent, and a true minus where signs are asked for."""
    text = super().__format__(form).replace("%", " %")
    return text.replace("-", "−") if form.startswith("+") else text


def _keeping(name: str) -> None:
  plain = getattr(float, name)

  def made(self: Number, other: float) -> Number:
    both = (*self.records, *getattr(other, "records", ()))
    return Number(plain(self, other), *dict.fromkeys(both))

  setattr(Number, name, made)


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv"):
  _keeping(f"__{_name}__")


class Figure(str):
  """A text with the records of the numbers in it."""

  records: Records

  def __new__(cls, text: str, records: Iterable[Record]) -> "Figure":
    made = super().__new__(cls, text)
    made.records = tuple(records)
    return made


class Part(list[str]):
  """Lines of a document, with what stands in them.

  Attributes:
    rows: of a table, each row's labels as one text, and other cells by column.
    figures: in the order of the lines.
  """

  def __init__(self, lines: Iterable[str] = ()):
    super().__init__(lines)
    self.rows: list[tuple[str, dict[str, str]]] = []
    self.figures: list[Figure] = []


def of(*sources: Any) -> Records:
  """The records of numbers and figures, each once.

  Raises:
    ValueError: one of them has none.
  """
  found: dict[Record, None] = {}
  for source in sources:
    records = getattr(source, "records", ())
    if not records:
      raise ValueError(f"{source!r}: found a figure without a source, expected one from a file")
    found |= dict.fromkeys(records)
  return tuple(found)


def alike(rows: Iterable[Records]) -> None:
  """Refuse to compare what was measured on unlike cards or on unlike prompts.

  Args:
    rows: the records of each figure that is compared, task by task.

  Raises:
    ValueError: the cards differ, or the samples of a task.
  """
  listed = list(rows)
  cards = sorted({record.card for row in listed for record in row})
  if len(cards) > 1:
    raise ValueError(f"cards: found {cards}, expected figures of one card to be compared")
  if len({tuple(record.samples for record in row) for row in listed}) > 1:
    raise ValueError("samples: found unlike prompts, expected the same for all")


def numbers(text: str) -> list[str]:
  """The figures of a text: no numbers in names, code, links or references."""
  return _NUMBER.findall(_QUOTED.sub(" ", text))


def without_source(text: str) -> str:
  """The text again, if it has no figures of its own.

  Raises:
    ValueError: it has.
  """
  if not isinstance(text, Figure) and (found := numbers(text)):
    raise ValueError(f"{text!r}: found {found} without a source, expected figures from files")
  return text
