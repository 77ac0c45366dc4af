"""A real model at long contexts: scores beside costs, and which method when."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator

from kvjax.programs.evals import choices, costs, families, store, walks
from kvjax.programs.evals.costs import Board, Cost
from kvjax.programs.evals.standing import FULL, Standing
from scripts.tools.tablemakers import GPU, Number, Part, Record, Results, Row, cells, scored
from scripts.tools.tablemakers.cells import say
from scripts.tools.tablemakers.scored import View, called
from scripts.tools.tablemakers.timings import Timing, over

FOLDER = f"{GPU}/real"
LENGTHS = (8192, 32768)
LEAST = 0.5  # the full cache's score in the tasks that are compared
# Rows that are not shown: their gates were found on needles of the draw that they were tested on.
WITHDRAWN = ("duo_attention",)

MS, KEPT = "ms a token (× full)", "GB kept a row (× full)"


@dataclasses.dataclass(frozen=True)
class Held:
  """The runs of a folder.

  Attributes:
    folder: below scripts/results.
    device: where they ran.
    views: scores by length and mode, without walks too short to end early.
    costs: of steps.
  """

  folder: str
  device: str
  views: dict[tuple[int, str], View]
  costs: list[Cost]

  def boards(self, length: int) -> list[tuple[View, Board]]:
    """Scores beside costs at a length, by batch."""
    view = self.views.get((length, "aware"))
    return [(view, board) for board in costs.boards([view.whole], self.costs)] if view else []

  def time(self, cost: Cost) -> Timing:
    """A step of a method, with its line of speed.jsonl."""
    names = ("method", "budget", "length", "batch")
    place = tuple((name, getattr(cost, name)) for name in names)
    record = Record(f"{self.folder}/speed.jsonl", place, self.device, cost.times)
    return Timing(f"`{cost.method}`", Number(cost.us, record), cost.low, cost.high)

  def shown(self, cost: Cost, full: Cost) -> dict[str, str | None]:
    """Of a step of the whole batch: tokens attended to, milliseconds, GB."""
    mine, theirs = self.time(cost), self.time(full)

    def figure(value: float | None, form: str = "") -> str | None:
      form = form or ("{:.2f}" if value is None or value >= 0.1 else "{:.3f}")
      return None if value is None else say(form, Number(value, *mine.records))

    kept = figure(cost.kept)
    if cost.host_bytes:
      kept = say("{} + {} on the host", kept, figure(cost.host_bytes / cost.batch / 1e9))
    wide = "" if mine.steady else say(" [{}]", mine.spread)
    return {
      "attended": figure(cost.attended, "{:,.0f}"),
      "ms": say("{:.2f}{} ({:.2f})", mine.us / 1e3, wide, over(mine, theirs)),
      "kept": kept,
      "read": figure(cost.read),
      "holds": figure(cost.peak_bytes and cost.peak_bytes / 1e9, "{:.1f}"),
      "expected": figure(cost.expected_us and cost.expected_us / 1e3, "{:.2f}"),
    }


@functools.cache
def held(results: Results, folder: str = FOLDER) -> Held:
  """A folder's rows and costs."""
  settings = store.settings_of(results.folder / folder)

  def wanted(row: Row) -> bool:
    short = walks.too_short(row["method"], row["budget"], row["length"], settings)
    return not short and not row["method"].startswith(WITHDRAWN)

  listed = scored.views(results, folder, wanted, LEAST)
  views = {(view.whole.length, view.whole.mode): view for view in listed}
  return Held(folder, settings["device"], views, costs.read(results.folder / folder))


# ---- scores and costs


def scores(results: Results, where: str) -> Part:
  """At a length, in a mode or a folder: full, then who attends to as many tokens, by score."""
  length, _, other = where.partition(" ")
  mode, folder = ("", other) if "/" in other else (other, FOLDER)
  found = held(results, folder)
  if (view := found.views.get((int(length), mode or "aware"))) is None:
    return Part()
  boards = [] if mode else [board for _, board in found.boards(int(length))]
  tasks = [*view.whole.tasks, *view.whole.weak]

  def row(one: Standing, label: str) -> Row:
    made = {"tokens attended to": label, **view.shown(one, tasks)}
    for board in boards:
      costs = {(x.method, x.budget): x.cost for x in board.points}
      cost = costs.get((one.method, one.budget))
      shown = found.shown(cost, board.full.cost) if cost else {}
      made[f"ms a token, batch {board.batch} (× full)"] = shown.get("ms")
      if board is boards[-1]:
        made |= {"GB kept a row": shown.get("kept")}
        made[f"GB read a step, batch {board.batch}"] = shown.get("read")
        made["expected ms"] = shown.get("expected")
    return made

  rows = [row(view.whole.full, "all")]
  for label, ones in _classes(view, boards):
    rows += view.ranked(ones, lambda one, label=label: row(one, label))
  return cells.framed([*rows, *(row(one, "no mean") for one in view.whole.missing)], labels=2)


def _classes(view: View, boards: list[Board]) -> list[tuple[str, list[Standing]]]:
  """Methods with a mean by the tokens that they attend to, the most first."""
  costs = (x.cost for board in reversed(boards) for x in board.points)
  seen = {(cost.method, cost.budget): cost.attended for cost in costs if cost.attended}

  def tokens(one: Standing) -> int:
    return seen.get((one.method, one.budget), 0)

  ones = [x for x in view.whole.by.values() if x.score and x is not view.whole.full]
  least, groups = 0, dict[int, list[Standing]]()
  for one in sorted(ones, key=tokens):
    least = least if tokens(one) <= choices.ALIKE * least else tokens(one)
    groups.setdefault(least, []).append(one)
  names = (_tokens(map(tokens, group)) if boards else "–" for group in groups.values())
  return [*zip(names, groups.values(), strict=True)][::-1]


def _tokens(attended: Iterable[int | None]) -> str:
  """Tokens that some methods attend to; those that were not seen have none."""
  seen = [tokens for tokens in attended if tokens]
  return cells.span(seen, "{:,}") if seen else "not seen"


def end_to_end(results: Results) -> Part:
  """Steps at longer contexts than the first, each beside the full cache's."""
  found, rows = held(results), []
  timed = [cost for cost in found.costs if cost.length > LENGTHS[0]]
  full = {(cost.length, cost.batch): cost for cost in timed if cost.method == FULL}
  for cost in sorted(timed, key=lambda cost: (cost.length, cost.batch, cost.us)):
    shown = found.shown(cost, full[cost.length, cost.batch])
    row = {"tokens": f"{cost.length:,}", "batch": str(cost.batch), "method, budget": called(cost)}
    row |= {"attended to": shown["attended"], "ms a step (× full)": shown["ms"]}
    rows.append(row | {"GB read": shown["read"], "expected ms": shown["expected"]})
  return cells.framed(rows, labels=3)


# ---- which method when


def _choices(results: Results) -> Iterator[Row]:
  """Choices by length, batch, tokens attended to and memory, with costs."""
  found = held(results)
  for view, board in (pair for length in LENGTHS for pair in found.boards(length)):
    for same in choices.classes(board):
      for memory, chosen in choices.by_memory(same):
        for choice in chosen:
          attended = _tokens(point.cost.attended for point in same.points[1:])
          row = {"tokens": f"{view.whole.length:,}", "batch": str(board.batch)}
          row |= {"attended to": attended, "memory": memory, "for": ", ".join(choice.aims)}
          yield row | _taken(choice, board, view, found)


def _taken(choice: choices.Choice, board: Board, view: View, found: Held) -> Row:
  """A method's costs, scores and limits, and what it loses in other modes."""
  if (point := choice.point) is None:
    return {"take": "nothing that was measured fits"}
  shown, who = found.shown(point.cost, board.full.cost), (point.method, point.budget)
  gap, (record,) = view.gap(view.whole.by[who]), found.time(point.cost).records
  share = Number(point.cost.kept / board.full.cost.kept, record)
  risks: list[str] = [families.of(point.method).risk]
  for (length, mode), other in found.views.items():
    there = other.whole.by.get(who)
    if length == board.standings.length and other is not view and there:
      risks += [say(f"{mode} {{}}", gap) for gap in [other.gap(there)] if gap]
  return {
    "take": called(point),
    MS: shown["ms"],
    KEPT: say("{} ({:.2f})", shown["kept"], share),
    "GB a step holds": shown["holds"],
    "score": view.mean(view.whole.by[who]),
    "less full": say("**{}**", gap) if choice.loses else gap,
    "risk": cells.listed(risks, "; ") if len(risks) > 1 else risks[0],
  }


def when(results: Results) -> Part:
  return cells.framed(_choices(results), labels=6)


def advice(results: Results) -> Part:
  """The first page's: each length's largest batch, where anything gains."""
  largest = {row["tokens"]: row["batch"] for row in _choices(results)}
  names = ("tokens", "attended to", "for", "take", MS, KEPT, "less full")
  rows = []
  for row in _choices(results):
    free = row["memory"].endswith("more") and row["batch"] == largest[row["tokens"]]
    aims = {"fastest", "least kept"} & set(row["for"].split(", "))
    if free and aims and row["take"] != f"`{FULL}`":
      rows.append({name: row[name] for name in names} | {"for": ", ".join(sorted(aims))})
  return cells.framed(rows, labels=4)


def picture(results: Results) -> Part:
  """The pictures of each length's largest batch; one shows all with its batch."""
  boards = (board for length in LENGTHS for _, board in held(results).boards(length)[-1:])
  return Part(
    f"![Score against milliseconds a token, bytes kept and bytes read, batch {batch}]"
    f"({FOLDER}/score_by_cost_aware_b{batch}.png)"
    for batch in dict.fromkeys(board.batch for board in boards)
  )
