"""A real model at long contexts: scores beside measured costs, and which method when."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

from kvjax.programs.evals import choices, costs, families, store, walks
from kvjax.programs.evals.costs import Board, Cost, Point
from kvjax.programs.evals.standing import FULL, Standing
from scripts.tools.tablemakers import cells, scored
from scripts.tools.tablemakers.cells import say
from scripts.tools.tablemakers.records import Number, Part
from scripts.tools.tablemakers.results import GPU, Results
from scripts.tools.tablemakers.scored import View, called
from scripts.tools.tablemakers.timings import Timing, ends, over

FOLDER = f"{GPU}/real"
LENGTHS = (8192, 32768)
LEAST = 0.5  # the full cache's score in the tasks that are compared
# Rows that are not shown: their gates were found on needles of the draw that they were tested on.
WITHDRAWN = ("duo_attention",)


@dataclasses.dataclass(frozen=True)
class Held:
  """The runs of the folder.

  Attributes:
    settings: the model and the device.
    views: scores by length and mode, without methods whose walks cannot end early there.
    costs: of steps.
  """

  settings: dict[str, Any]
  views: list[View]
  costs: list[Cost]

  def view(self, length: int, mode: str = "aware") -> View | None:
    by = {(view.whole.length, view.whole.mode): view for view in self.views}
    return by.get((length, mode))

  def boards(self, length: int) -> list[tuple[View, Board]]:
    """Scores beside costs at a length, by batch."""
    view = self.view(length)
    return [(view, board) for board in costs.boards([view.whole], self.costs)] if view else []

  def time(self, cost: Cost) -> Timing:
    return scored.timed(cost, FOLDER, self.settings["device"])

  def number(self, cost: Cost, value: float | None) -> Number | None:
    """A value of a cost's line."""
    return None if value is None else Number(value, *self.time(cost).records)

  def shown(self, cost: Cost, full: Cost) -> dict[str, str | None]:
    """Of a step of the whole batch: tokens attended to, milliseconds, over the full cache's, GB."""

    def figure(value: float | None, form: str = "") -> str | None:
      number = self.number(cost, value)
      form = form or ("{:.2f}" if value is None or value >= 0.1 else "{:.3f}")
      return None if number is None else say(form, number)

    mine, kept = self.time(cost), figure(cost.kept)
    wide = "" if mine.steady else say(" [{}]", mine.spread)
    ratio = over(mine, self.time(full))
    if cost.host_bytes:
      kept = say("{} + {} on the host", kept, figure(cost.host_bytes / cost.batch / 1e9))
    return {
      "attended": figure(cost.attended, "{:,.0f}"),
      "ms": say("{:.2f}{} ({:.2f})", mine.us / 1e3, wide, ratio),
      "kept": kept,
      "read": figure(cost.read),
      "holds": figure(cost.peak_bytes and cost.peak_bytes / 1e9, "{:.1f}"),
      "expected": figure(cost.expected_us and cost.expected_us / 1e3, "{:.2f}"),
    }


@functools.cache
def held(results: Results) -> Held:
  """The folder's rows and costs."""
  settings = store.settings_of(results.folder / FOLDER)

  def wanted(row: dict[str, Any]) -> bool:
    short = walks.too_short(row["method"], row["budget"], row["length"], settings)
    return not short and not row["method"].startswith(WITHDRAWN)

  views = scored.views(results, FOLDER, wanted, LEAST)
  return Held(settings, views, costs.read(results.folder / FOLDER))


def _quoted(one: Point | Cost) -> str:
  """A method in a sentence."""
  return f"`{called(one).replace('`', '')}`"


def _point(board: Board, one: Standing) -> Point | None:
  who = one.method, one.budget
  return next((point for point in board.points if (point.method, point.budget) == who), None)


# ---- scores and costs


def scores(results: Results, length: str) -> Part:
  """The table of one length: full first, then methods that attend to as many tokens, by score."""
  found = held(results)
  if (view := found.view(int(length))) is None:
    return Part()
  boards = [board for _, board in found.boards(int(length))]
  tasks = [*view.whole.tasks, *view.whole.weak]

  def row(one: Standing) -> list[str | None]:
    made: list[str | None] = [called(one), view.n(one, *(tasks if one.score else one.tasks))]
    made += [view.score(one, task) for task in tasks]
    made += [view.mean(one), view.gap(one), view.kl(one)]
    shown: dict[str, str | None] = {}
    for board in boards:
      point = _point(board, one)
      shown = found.shown(point.cost, board.full.cost) if point else {}
      made.append(shown.get("ms"))
    return made + [shown.get(name) for name in ("kept", "read", "expected") if boards]

  rows = [["all", *row(view.whole.full)]]
  for label, ones in _classes(view, boards):
    rows += [[label, *made] for made in view.ranked(ones, row)]
  rows += [["no mean", *row(one)] for one in view.whole.missing]
  head = ["tokens attended to", "method, budget", "n", *(f"`{task}`" for task in view.whole.tasks)]
  head += [*(f"`{task}`, not in the mean" for task in view.whole.weak), "mean"]
  head += ["less full", "KL, nats"]
  if boards:
    head += [f"ms a token, batch {board.batch} (× full)" for board in boards]
    head += ["GB kept a row", f"GB read a step, batch {boards[-1].batch}", "expected ms"]
  return cells.table(head, rows, labels=2)


def _classes(view: View, boards: list[Board]) -> list[tuple[str, list[Standing]]]:
  """Methods with a mean by the tokens that they were seen attending to, the most first."""
  pairs: list[tuple[int, Standing]] = []
  for one in view.whole.by.values():
    seen = (point.cost.attended for board in boards if (point := _point(board, one)))
    if one.score and one is not view.whole.full:
      pairs.append((next(filter(None, seen), 0), one))
  least, groups = 0, dict[int, list[tuple[int, Standing]]]()
  for tokens, one in sorted(pairs, key=lambda pair: pair[0]):
    least = least if tokens <= choices.ALIKE * least else tokens
    groups.setdefault(least, []).append((tokens, one))
  return [
    (_tokens(tokens for tokens, _ in group), [one for _, one in group])
    for group in reversed(groups.values())
  ]


def _tokens(attended: Iterable[int | None]) -> str:
  """Tokens that some methods attend to; those that were not seen have none."""
  seen = [tokens for tokens in attended if tokens]
  return ends(seen, "{:,}") if seen else "not seen"


def modes(results: Results) -> Part:
  """Mean scores by mode, side by side, at each length."""
  found, rows = held(results), []
  names = list(dict.fromkeys(view.whole.mode for view in found.views))
  for length in LENGTHS:
    first, *others = (found.view(length, mode) for mode in names)
    for who, one in first.whole.by.items() if first else ():
      there = [view and view.whole.by.get(who) for view in others]
      if first and one.score and any(other and other.score for other in there):
        pairs = zip((first, *others), (one, *there), strict=True)
        row = [f"{length:,}", called(one), *(_with_gap(*pair) for pair in pairs)]
        rows.append((first.value(one), row))
  head = ("tokens", "method, budget", *(f"{name}; less full" for name in names))
  return cells.table(head, cells.ranked(rows), labels=2)


def _with_gap(view: View | None, one: Standing | None) -> str | None:
  if view is None or one is None or one.score is None:
    return None
  less = view.gap(one)
  return view.mean(one) if less is None else say("{}; {}", view.mean(one), less)


# ---- long answers, longer contexts, and what was expected


def answers(results: Results) -> Part:
  """GSM8K: methods that evict while they answer, by budget."""
  (view,) = scored.of_task(results, FOLDER, "gsm8k")
  sizes = cache_bytes(row for row in results.rows(FOLDER) if row["task"] == "gsm8k")

  def row(one: Standing) -> list[Any]:
    size = Number(sizes[one.method, one.budget] / 1e6, *view.records(one, "gsm8k"))
    return [called(one), view.n(one, "gsm8k"), view.mean(one), view.gap(one), size]

  head = ("method, budget", "n", "right", "less full", ("MB kept a row", "{:.1f}"))
  return cells.table(head, view.by_budget(row))


def cache_bytes(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, int | None], float]:
  """Bytes of a row's cache by method and budget, the mean."""
  sizes: dict[tuple[str, int | None], list[int]] = {}
  for row in rows:
    sizes.setdefault((row["method"], row["budget"]), []).append(row["cache_bytes"])
  return {who: sum(found) / len(found) for who, found in sizes.items()}


def end_to_end(results: Results) -> Part:
  """Steps at longer contexts than the first, each beside the full cache's."""
  found, rows = held(results), []
  timed = [cost for cost in found.costs if cost.length > LENGTHS[0]]
  full = {(cost.length, cost.batch): cost for cost in timed if cost.method == FULL}
  for cost in sorted(timed, key=lambda cost: (cost.length, cost.batch, cost.us)):
    shown = found.shown(cost, full[cost.length, cost.batch])
    row = [f"{cost.length:,}", str(cost.batch), called(cost)]
    rows.append([*row, *(shown[name] for name in ("attended", "ms", "read", "expected"))])
  head = ("tokens", "batch", "method, budget", "attended to", "ms a step (× full)", "GB read")
  return cells.table((*head, "expected ms"), rows, labels=3)


# ---- which method when


def when(results: Results) -> Part:
  """Choices by length, batch, tokens attended to and memory."""
  found, rows = held(results), []
  for view, board in (pair for length in LENGTHS for pair in found.boards(length)):
    for same in choices.classes(board):
      for memory, chosen in choices.by_memory(same):
        for choice in chosen:
          place = [f"{view.whole.length:,}", str(board.batch), _attended(same), memory]
          rows.append([*place, ", ".join(choice.aims), *_taken(choice, board, view, found)])
  head = ("tokens", "batch", "attended to", "memory", "for", "take", "ms a token (× full)")
  head += ("GB kept a row", "GB a step holds", "score", "less full", "risk")
  return cells.table(head, rows, labels=6)


def _attended(board: Board) -> str:
  """Tokens that the methods of a class attend to."""
  return _tokens(point.cost.attended for point in board.points[1:])


def _taken(choice: choices.Choice, board: Board, view: View, found: Held) -> list[str | None]:
  """A method with its costs and scores, its family's limits, and what it loses in other modes."""
  if (point := choice.point) is None:
    return ["nothing that was measured fits", *[""] * 6]
  shown, one = found.shown(point.cost, board.full.cost), _standing(view, point)
  less = say("**{}**", view.gap(one)) if choice.loses else view.gap(one)
  risks: list[str] = [families.of(point.method).risk]
  for other in found.views:
    there = other.whole.by.get((point.method, point.budget))
    if other.whole.length == board.standings.length and other is not view and there:
      risks += [say(f"{other.whole.mode} {{}}", gap) for gap in [other.gap(there)] if gap]
  risk = cells.listed(risks, "; ") if len(risks) > 1 else risks[0]
  row = (shown[name] for name in ("ms", "kept", "holds"))
  return [called(point), *row, view.mean(one), less, risk]


def _standing(view: View, point: Point) -> Standing:
  return view.whole.by[point.method, point.budget]


def advice(results: Results) -> Part:
  """The first page's: of methods that attend to as many tokens, which keep the score, and cost."""
  found, rows = held(results), []
  for view, board in (pair for length in LENGTHS for pair in found.boards(length)[-1:]):
    for same in choices.classes(board):
      taken = [_best(same, aim) for aim in ("fastest", "least kept")]
      if any(taken):
        fastest, least = (_advised(found, view, board, point) for point in taken)
        place = f"{view.whole.length >> 10}K, batch {board.batch}"
        rows.append([place, _attended(same), fastest, "the same" if least == fastest else least])
  head = ("context", "tokens attended to", "fastest", "smallest cache")
  return cells.table(head, rows, labels=2)


def _best(board: Board, aim: str) -> Point | None:
  """The choice for an aim; None where it is the full cache, or nothing."""
  point = next(choice.point for choice in choices.choices(board) if aim in choice.aims)
  return None if point is None or point.method == FULL else point


def _advised(found: Held, view: View, board: Board, point: Point | None) -> str:
  """A method with its time and bytes over the full cache's, and its difference in points."""
  if point is None:
    return "the full cache"
  return say(
    f"{_quoted(point)}: time {{:.2f}}, bytes {{:.2f}}, {{}}",
    over(found.time(point.cost), found.time(board.full.cost)),
    found.number(point.cost, point.cost.kept / board.full.cost.kept),
    view.gap(_standing(view, point)),
  )


def picture(results: Results) -> Part:
  """The pictures of each length's largest batch; one shows all lengths that have its batch."""
  boards = (board for length in LENGTHS for _, board in held(results).boards(length)[-1:])
  return Part(
    f"![Score against milliseconds a token, bytes kept and bytes read, batch {batch}]"
    f"({FOLDER}/score_by_cost_aware_b{batch}.png)"
    for batch in dict.fromkeys(board.batch for board in boards)
  )
