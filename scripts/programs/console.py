"""Output of programs while they work: steps with their seconds, bars, text as it comes, tables."""

import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self, TextIO

from tqdm import tqdm

_START = time.perf_counter()
_TICK_SECONDS = 0.25
_OFTEN_IN_LOGS = 20.0  # seconds
_WIDTH = 88


class Step:
  """One line `[ 12.3 s] what is done ....... 4.5 s`, whose seconds run on a terminal.

  On anything else the line appears when the step begins and is completed when it ends, so that a
  log shows where a program is, without control characters; of a long step it has a note now and
  then. A fleeting step is gone when it ends, and in a log it does not appear.
  """

  def __init__(self, text: str, out: TextIO, fleeting: bool = False):
    self._text = text
    self._note = ""
    self._out = out
    self._live, self._fleeting = out.isatty(), fleeting
    self._begin, self._noted = time.perf_counter(), 0.0
    self._stamp = f"[{self._begin - _START:6.1f} s] "
    self._done = threading.Event()
    self._ticker = threading.Thread(target=self._tick, daemon=True)

  def note(self, text: str) -> None:
    """Shows the result of the step after its text."""
    self._note = text

  def progress(self, text: str) -> None:
    """Shows how far the step is; "" in place of it at its end."""
    self._note = text
    if text and not (self._live or self._fleeting) and self.seconds - self._noted > _OFTEN_IN_LOGS:
      self._noted = self.seconds
      self._out.write(f"{text} ")
      self._out.flush()

  @property
  def seconds(self) -> float:
    """Seconds since the step began."""
    return time.perf_counter() - self._begin

  def __enter__(self) -> Self:
    if self._live:
      self._ticker.start()
    elif not self._fleeting:
      self._out.write(f"{self._stamp}{self._text} ")
      self._out.flush()
    return self

  def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
    self._done.set()
    if self._fleeting:
      if self._live:
        self._ticker.join()
        self._out.write("\r\x1b[K")
        self._out.flush()
      return
    tail = self._tail(f"{self.seconds:.1f} s" if error is None else "stopped")
    if self._live:
      self._ticker.join()
      tail = f"\r\x1b[K{self._stamp}{self._text} {tail}"
    self._out.write(f"{tail}\n")
    self._out.flush()

  def _tail(self, end: str) -> str:
    """Dots that bring `end` to the same column on every line."""
    note = f" {self._note}" if self._note else ""
    width = min(_WIDTH, shutil.get_terminal_size().columns - 1) if self._live else _WIDTH
    dots = width - len(self._stamp) - len(self._text) - len(note) - len(end) - 2
    return f"{'.' * max(3, dots)}{note} {end}"

  def _tick(self) -> None:
    while not self._done.wait(_TICK_SECONDS):
      tail = self._tail(f"{self.seconds:.0f} s")
      self._out.write(f"\r\x1b[K{self._stamp}{self._text} {tail}")
      self._out.flush()


def step(text: str, out: TextIO | None = None, *, fleeting: bool = False) -> Step:
  """A step to be entered with `with`; printed to standard output unless `out` is given."""
  return Step(text, out or sys.stdout, fleeting)


def heading(text: str) -> None:
  """A blank line and a title, bold on a terminal."""
  bold, plain = ("\x1b[1m", "\x1b[0m") if sys.stdout.isatty() else ("", "")
  print(f"\n{bold}{text}{plain}", flush=True)


class Streamer:
  """Prints text that grows, wrapped at words and indented.

  A word appears once something follows it, since only then is it known to fit its line.
  """

  def __init__(self, width: int = _WIDTH):
    how: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    self._wrapper = textwrap.TextWrapper(width, "  ", "  ", **how)
    self._begin = self._shown = 0  # of the line that grows: its place, and printed characters

  def show(self, text: str, *, final: bool = False) -> None:
    """Prints what `text` has beyond the part already printed; `final` prints the last word too."""
    end = len(text) if final else max(text.rfind(" "), text.rfind("\n")) + 1
    lines = text[self._begin : end].split("\n")
    wrapped = [self._wrapper.fill(" ".join(line.split())) for line in lines]
    ended = "\n" if final and wrapped[-1] else ""
    print("\n".join(wrapped)[self._shown :], end=ended, flush=True)
    self._begin, self._shown = end - len(lines[-1]), len(wrapped[-1])


def bar(total: int, text: str, unit: str) -> tqdm:
  """A progress bar with the time left, on standard error; in a log a line now and then."""
  often = 0.1 if sys.stderr.isatty() else _OFTEN_IN_LOGS
  return tqdm(total=total, desc=text, unit=unit, mininterval=often, smoothing=0.1)


def passing(items: Sequence[Any], text: str, unit: str) -> Iterable[Any]:
  """The items, with a bar that goes away where it takes more than a second to pass them."""
  often = 0.1 if sys.stderr.isatty() else _OFTEN_IN_LOGS
  return tqdm(items, desc=text, unit=unit, mininterval=often, delay=1.0, leave=False)


class Table:
  """A table whose rows are printed as they are known, in columns of fixed widths.

  Args:
    columns: heads and widths; what is longer is cut.
    left: columns that are aligned to the left.
  """

  def __init__(self, columns: Mapping[str, int], *, left: Sequence[int] = (0,)):
    self._widths, self._left = list(columns.values()), left
    self.row(list(columns))
    self.row(["-" * width for width in self._widths])

  def row(self, cells: Sequence[str]) -> None:
    cut = [
      cell if len(cell) <= width else f"{cell[: width - 1]}…"
      for cell, width in zip(cells, self._widths, strict=True)
    ]
    print(_line(cut, self._widths, self._left), flush=True)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,)) -> str:
  """Columns as wide as their content; numbers to the right, the columns of `left` to the left."""
  widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
  rule = ["-" * width for width in widths]
  return "\n".join(_line(cells, widths, left) for cells in (head, rule, *rows))


def _line(cells: Sequence[str], widths: Sequence[int], left: Sequence[int]) -> str:
  padded = (
    cell.ljust(width) if i in left else cell.rjust(width)
    for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
  )
  return "  ".join(padded).rstrip()
