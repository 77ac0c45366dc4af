"""A real model at long contexts: scores beside measured costs, and which method when.

All give nothing while there are no results.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

from ..evals import choices, costs, families, store, walks
from ..evals.costs import Board, Cost, Point
from ..evals.standing import Standing, Standings, Who, standings
from ..evals.stats import Estimate
from . import cells
from .results import GPU, Maker, Results, Timing

FOLDER = f"{GPU}/real"
LENGTHS = (8192, 32768)
COMPLETE = (8192,)  # where the table has only what has done every task
LEAST = 0.5  # the full cache's score in the tasks that are compared


@dataclasses.dataclass(frozen=True)
class Held:
  """What the folder has.

  Attributes:
    model, device: its settings.
    short: methods whose walks cannot end early, and where; their rows are left out.
    standings: by length and mode.
    boards: by mode, length and batch.
  """

  model: str
  device: str
  short: list[str]
  standings: list[Standings]
  boards: list[Board]

  def standing(self, length: int, mode: str = "aware") -> Standings | None:
    return next((s for s in self.standings if (s.length, s.mode) == (length, mode)), None)

  def at(self, length: int, mode: str = "aware") -> list[Board]:
    """The boards of a length, by batch."""
    found = [board for board in self.boards if board.standings is self.standing(length, mode)]
    return sorted(found, key=lambda board: board.batch)


@functools.cache
def held(results: Results) -> Held | None:
  """The folder's rows and costs; None where it is not there."""
  folder = results.folder / FOLDER
  if not folder.is_dir():
    return None
  settings, rows, short = store.settings_of(folder), [], []
  for row in store.read(folder):
    if walks.too_short(row["method"], row["budget"], row["length"], settings):
      short.append(f"`{row['method']}` at {row['length']:,} tokens")
    else:
      rows.append(row)
  found = standings(rows, LEAST)
  made = costs.boards(found, costs.read(folder))
  return Held(settings["model"], settings["device"], list(dict.fromkeys(short)), found, made)


def _given(maker: Callable[[Held], Sequence[str]]) -> Maker:
  """A maker that gives nothing without results."""

  @functools.wraps(maker)
  def made(results: Results) -> Sequence[str]:
    found = held(results)
    return maker(found) if found else []

  return made


# ---- what was compared


@_given
def about(found: Held) -> list[str]:
  parts = [f"{found.model} on an {found.device}."]
  for one in found.standings:
    if one.mode == "aware":
      text = f"At {one.length:,} tokens the score is the mean of {_listed(one.tasks)}, {one.n} each"
      if one.weak:
        text += f", without {_listed(one.weak)}, of which the full cache solves less than half"
      if one.missing and one.length not in COMPLETE:
        text += "; rows without a mean have not done all of these"
      parts.append(f"{text}.")
  if found.short:
    parts.append(
      f"Left out, since no walk can end early there and all is read: {', '.join(found.short)}."
    )
  return cells.sentence(" ".join(parts))


def _listed(tasks: Sequence[str]) -> str:
  return ", ".join(f"`{task}`" for task in tasks)


def called(method: str, budget: int | None) -> str:
  return f"`{method}`" if budget is None else f"`{method}`, {budget:,}"


# ---- scores and costs


def by_length(length: int) -> Maker:
  """The table of one length: methods by their mean scores, full first."""
  return _given(lambda found: _scores(found, length))


def _scores(found: Held, length: int) -> list[str]:
  whole = found.standing(length)
  if whole is None:
    return []
  boards = found.at(length)
  tasks = [*whole.tasks, *whole.weak]
  listed = [one for one in whole.by.values() if one.score or length not in COMPLETE]
  ranked = sorted(listed, key=lambda one: (one is not whole.full, -mean(one)))
  rows = [_row(one, whole, tasks, boards) for one in ranked]
  head = ["method, budget", "n", *(f"`{task}`" for task in tasks), "mean", "of full", "KL, nats"]
  if boards:
    head += [f"ms a token, batch {board.batch} (× full)" for board in boards]
    head += ["GB kept a row", f"GB read a step, batch {boards[-1].batch}", "expected ms"]
  return cells.table(head, rows)


def mean(one: Standing) -> float:
  return one.score.mean if one.score else -1.0


def _row(one: Standing, whole: Standings, tasks: Sequence[str], boards: list[Board]) -> list[str]:
  counts = sorted({estimate.n for estimate in one.tasks.values()})
  n = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}" if counts else "–"
  scores = [percent(one.tasks[task]) if task in one.tasks else "–" for task in tasks]
  row = [called(one.method, one.budget), n, *scores]
  row += [percent(one.score) if one.score else "–", relative(one, whole.full), divergence(one.kl)]
  return row + _costs((one.method, one.budget), boards) if boards else row


def percent(estimate: Estimate) -> str:
  mean, low, high = (round(100 * x) for x in (estimate.mean, estimate.low, estimate.high))
  return f"{mean} ({low}–{high})"


def relative(one: Standing, full: Standing) -> str:
  if one.gap is None or not full.score or not full.score.mean:
    return "–"
  return cells.percent(1 + one.gap.mean / full.score.mean)


def divergence(kl: Estimate | None) -> str:
  if kl is None:
    return "–"
  return "0" if kl.high == 0 else f"{kl.mean:.2g} ({kl.low:.2g}–{kl.high:.2g})"


def _costs(who: Who, boards: list[Board]) -> list[str]:
  """Milliseconds at each batch; bytes kept and read, and what `advise` expects, at the largest."""
  row = []
  points = [next((p for p in b.points if (p.method, p.budget) == who), None) for b in boards]
  for board, point in zip(boards, points, strict=True):
    row.append(_milliseconds(point.cost, board.full.cost) if point else "–")
  if (last := points[-1]) is None:
    return [*row, "–", "–", "–"]
  expected = last.cost.expected_us
  hoped = "–" if expected is None else f"{expected / 1e3:.2f}"
  return [*row, _kept(last.cost), f"{last.cost.read:.2f}", hoped]


def _timing(cost: Cost) -> Timing:
  name = f"`{cost.method}`"
  return Timing(name, cost.us, cost.low, cost.high)


def _milliseconds(cost: Cost, full: Cost) -> str:
  """Of a step of the whole batch, and its ratio to the full cache's at the same shape."""
  mine, whole = _timing(cost), _timing(full)
  text = f"{cost.milliseconds:.2f}"
  if not cells.steady(mine):
    text += f" [{cells.spread(mine)}]"
  return f"{text} ({cells.ratio(cost.us / full.us, whole)})"


def _kept(cost: Cost) -> str:
  text = _gigabytes(cost.kept)
  if not cost.host_bytes:
    return text
  return f"{text} + {_gigabytes(cost.host_bytes / cost.batch / 1e9)} in host memory"


def _gigabytes(value: float) -> str:
  return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


@_given
def modes(found: Held) -> list[str]:
  """Mean scores by mode, side by side, at each length."""
  rows, names = [], list(dict.fromkeys(one.mode for one in found.standings))
  if len(names) < 2:
    return []
  for length in LENGTHS:
    sides = [found.standing(length, mode) for mode in names]
    if sides[0] is None:
      continue
    for who in sorted(sides[0].by, key=lambda who: -mean(sides[0].by[who])):
      ours = [side.by.get(who) if side else None for side in sides]
      cuts = [percent(one.score) if one and one.score else "–" for one in ours]
      gaps = [points(one.gap) if one and one.gap else "–" for one in ours]
      paired = [f"{score}; {gap}" for score, gap in zip(cuts, gaps, strict=True)]
      if any(one and one.score for one in ours[1:]):
        rows.append([f"{length:,}", called(*who), *paired])
  return cells.table(("tokens", "method, budget", *(f"{name}; less full" for name in names)), rows)


def points(gap: Estimate) -> str:
  """A difference in points of percent."""
  if gap.low == gap.high == 0:
    return "0"
  mean, low, high = (cells.signed(100 * x, 0) for x in (gap.mean, gap.low, gap.high))
  return f"{mean} ({low} to {high})"


# ---- long answers, and what was expected


ANSWERS = "gsm8k"


def answers(results: Results) -> list[str]:
  """GSM8K: methods that evict while they answer."""
  folder = results.folder / FOLDER
  if not folder.is_dir():
    return []
  rows = [row for row in store.read(folder) if row["task"] == ANSWERS]
  made = []
  for found in standings(rows):
    for one in found.by.values():
      mine = [row for row in rows if (row["method"], row["budget"]) == (one.method, one.budget)]
      size = sum(row["cache_bytes"] for row in mine) / len(mine) / 1e6
      score, gap = percent(one.tasks[ANSWERS]), points(one.gap) if one.gap else "–"
      made.append([called(one.method, one.budget), str(len(mine)), score, gap, f"{size:.1f}"])
  return cells.table(("method, budget", "n", "right", "less full", "MB kept a row"), made)


@_given
def foreseen(found: Held) -> list[str]:
  """How near `advise` came to what was measured."""
  ratios = [
    (cost, cost.expected_us / cost.us)
    for length in LENGTHS
    for board in found.at(length)
    for cost in (point.cost for point in board.points)
    if cost.expected_us
  ]
  if not ratios:
    return []
  far = [
    f"{called(cost.method, cost.budget)} at {cost.length:,} × {cost.batch} {ratio:.2f}"
    for cost, ratio in ratios
    if abs(ratio - 1) > 0.15
  ]
  near = len(ratios) - len(far)
  text = f"What `advise` expects is within 15 % of the measured step for {near} of {len(ratios)}"
  if far:
    text += f"; expected over measured of the others: {', '.join(far)}"
  return cells.sentence(f"{text}.")


def end_to_end(results: Results) -> list[str]:
  """Steps at longer contexts than the first, each beside the full cache's."""
  rows, timed = [], [c for c in costs.read(results.folder / FOLDER) if c.length > LENGTHS[0]]
  full = {(cost.length, cost.batch): cost for cost in timed if cost.method == "full"}
  for cost in sorted(timed, key=lambda cost: (cost.length, cost.batch, cost.us)):
    whole = full[cost.length, cost.batch]
    step = [_milliseconds(cost, whole), f"{cost.read:.2f}", f"{(cost.expected_us or 0) / 1e3:.2f}"]
    rows.append([f"{cost.length:,}", str(cost.batch), called(cost.method, cost.budget), *step])
  head = ("tokens", "batch", "method, budget", "ms a step (× full)", "GB read", "expected ms")
  return cells.table(head, rows) if rows else []


# ---- which method when


@_given
def when(found: Held) -> list[str]:
  """What to take, by length, batch and memory."""
  rows = []
  for length in LENGTHS:
    for board in found.at(length):
      for memory, chosen in choices.by_memory(board):
        for choice in chosen:
          place = [f"{length:,}", str(board.batch), memory, ", ".join(choice.aims)]
          rows.append([*place, *_taken(choice, board, found)])
  if not rows:
    return []
  head = ("tokens", "batch", "memory", "for", "take", "ms a token (× full)", "GB kept a row")
  head += ("GB read a step", "GB a step holds", "score", "less full", "risk")
  return cells.table(head, rows)


def _taken(choice: choices.Choice, board: Board, found: Held) -> list[str]:
  point = choice.point
  if point is None:
    return ["nothing that was measured fits", *[""] * 7]
  cost, gap = point.cost, points(point.gap)
  return [
    called(point.method, point.budget),
    _milliseconds(cost, board.full.cost),
    _kept(cost),
    f"{cost.read:.2f}",
    "–" if cost.peak_bytes is None else f"{cost.peak_bytes / 1e9:.1f}",
    percent(point.score),
    f"**{gap}**" if choice.loses else gap,
    _risk(point, board, found),
  ]


def _risk(point: Point, board: Board, found: Held) -> str:
  """What the method's family cannot promise, and what it loses in other modes."""
  parts = [families.of(point.method).risk]
  for other in found.standings:
    one = other.by.get((point.method, point.budget))
    elsewhere = other.length == board.standings.length and other.mode != board.standings.mode
    if elsewhere and one and one.gap and point is not board.full:
      parts.append(f"{other.mode} {points(one.gap)}")
  return "; ".join(parts)


@_given
def picture(found: Held) -> list[str]:
  """The pictures of each length's largest batch; one shows all lengths that have its batch."""
  batches = dict.fromkeys(made[-1].batch for length in LENGTHS if (made := found.at(length)))
  return [
    f"![Score against milliseconds a token, bytes kept and bytes read, batch {batch}]"
    f"({FOLDER}/score_by_cost_aware_b{batch}.png)"
    for batch in batches
  ]


def in_short(results: Results) -> str:
  """What is fastest at 90 % of the score, at the longest length and its largest batch."""
  found = held(results)
  boards = [board for length in LENGTHS for board in found.at(length)] if found else []
  if not boards:
    return ""
  aims = {aim: choice.point for choice in choices.choices(boards[-1]) for aim in choice.aims}
  point, full = aims["fastest at 90 %"], boards[-1].full
  assert found and point
  kept = f"{_gigabytes(point.cost.kept)} of {_gigabytes(full.cost.kept)} GB a row"
  return (
    f"{found.model}, {boards[-1].standings.length:,} tokens, batch {boards[-1].batch}: at nine "
    f"tenths of the full cache's score the fastest is {called(point.method, point.budget)}, "
    f"{_milliseconds(point.cost, full.cost).replace('(', '(× ')} ms a token, {kept}, score "
    f"{percent(point.score)} beside {percent(full.score)}"
  )
