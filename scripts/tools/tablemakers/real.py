"""A real model at long contexts: scores beside measured costs, and which method when."""

import dataclasses
import functools
import re
from collections.abc import Sequence

from kvjax.programs.evals import choices, costs, families, store, walks
from kvjax.programs.evals.costs import Board, Cost, Point
from kvjax.programs.evals.standing import FULL, Standing, Standings, standings
from scripts.tools.tablemakers import cells, scored
from scripts.tools.tablemakers.records import Number, Part
from scripts.tools.tablemakers.results import GPU, Results, Timing

FOLDER = f"{GPU}/real"
LENGTHS = (8192, 32768)
LEAST = 0.5  # the full cache's score in the tasks that are compared
# Rows that are not shown: their gates were found on needles of the draw that they were tested on.
WITHDRAWN = ("duo_attention",)


@dataclasses.dataclass(frozen=True)
class Held:
  """The runs of the folder.

  Attributes:
    model, device: its settings.
    short: methods whose walks cannot end early, and where; their rows are left out.
    standings: by length and mode.
    boards: by mode, length and batch.
    rows: where figures of its rows stand.
  """

  model: str
  device: str
  short: list[str]
  standings: list[Standings]
  boards: list[Board]
  rows: scored.Held

  def standing(self, length: int, mode: str = "aware") -> Standings | None:
    return next((s for s in self.standings if (s.length, s.mode) == (length, mode)), None)

  def at(self, length: int, mode: str = "aware") -> list[Board]:
    """The boards of a length, by batch."""
    found = [board for board in self.boards if board.standings is self.standing(length, mode)]
    return sorted(found, key=lambda board: board.batch)

  def time(self, cost: Cost) -> Timing:
    return scored.timed(cost, FOLDER, self.device)


@functools.cache
def held(results: Results) -> Held:
  """The folder's rows and costs."""
  folder = results.folder / FOLDER
  settings, rows, short = store.settings_of(folder), [], []
  for row in results.rows(FOLDER):
    if walks.too_short(row["method"], row["budget"], row["length"], settings):
      short.append(f"`{row['method']}` at T{row['length'] >> 10}K")
    elif not row["method"].startswith(WITHDRAWN):
      rows.append(row)
  found = standings(rows, LEAST)
  made = costs.boards(found, costs.read(folder))
  where = scored.Held.of(results, FOLDER)
  return Held(settings["model"], settings["device"], list(dict.fromkeys(short)), found, made, where)


def _quoted(method: str, budget: int | None) -> str:
  """A method in a sentence."""
  return f"`{method}`" if budget is None else f"`{method}, {budget:,}`"


# ---- scores and costs


def scores(results: Results, length: str) -> Part:
  """The table of one length: full first, then methods that attend to as many tokens, by score."""
  found = held(results)
  if (whole := found.standing(int(length))) is None:
    return Part()
  boards, tasks = found.at(int(length)), [*whole.tasks, *whole.weak]
  row = functools.partial(_row, found, whole, tasks, boards)
  rows = [["all", *row(whole.full)]]
  for label, ones in _classes(whole, boards):
    rows += [[label, *made] for made in found.rows.ranked(whole, ones, row)]
  rows += [["no mean", *row(one)] for one in whole.missing]
  head = ["tokens attended to", "method, budget", "n", *(f"`{task}`" for task in tasks), "mean"]
  head += ["less full", "KL, nats"]
  if boards:
    head += [f"ms a token, batch {board.batch} (× full)" for board in boards]
    head += ["GB kept a row", f"GB read a step, batch {boards[-1].batch}", "expected ms"]
  return cells.table(head, rows, labels=2)


def _classes(whole: Standings, boards: list[Board]) -> list[tuple[str, list[Standing]]]:
  """Methods with a mean by the tokens that they were seen attending to, the most first."""
  attended: dict[tuple[str, int | None], int] = {}
  for board in boards:
    for point in board.points:
      if point.cost.attended:
        attended.setdefault((point.method, point.budget), point.cost.attended)
  ones = [one for one in whole.by.values() if one.score and one is not whole.full]
  groups: list[tuple[int, list[Standing]]] = []
  for one in sorted(ones, key=lambda one: attended.get((one.method, one.budget), 0)):
    tokens = attended.get((one.method, one.budget), 0)
    if groups and groups[-1][0] <= tokens <= choices.ALIKE * groups[-1][0]:
      groups[-1][1].append(one)
    else:
      groups.append((tokens, [one]))
  seen = [[attended.get((one.method, one.budget), 0) for one in ones] for _, ones in groups]
  return [(_span(found), ones) for found, (_, ones) in list(zip(seen, groups, strict=True))[::-1]]


def _span(tokens: Sequence[int]) -> str:
  low, high = f"{min(tokens):,}", f"{max(tokens):,}"
  return "not seen" if low == "0" else low if low == high else f"{low} to {high}"


def _row(
  found: Held, whole: Standings, tasks: Sequence[str], boards: list[Board], one: Standing
) -> list[str]:
  rows, compared = found.rows, tasks if one.score else list(one.tasks)
  row = [scored.called(one.method, one.budget), rows.prompts(whole, one, *compared)]
  row += [rows.score(whole, one, task) for task in tasks] + rows.results(whole, one)
  return row + _costs(found, one, boards) if boards else row


def _costs(found: Held, one: Standing, boards: list[Board]) -> list[str]:
  """Milliseconds at each batch; bytes kept and read, and what `advise` expects, at the largest."""
  who, row, shown = (one.method, one.budget), [], {}
  for board in boards:
    point = next((point for point in board.points if (point.method, point.budget) == who), None)
    shown = _shown(found, point.cost, board.full.cost) if point else {}
    row.append(shown.get("ms", "–"))
  return [*row, *(shown.get(name, "–") for name in ("kept", "read", "expected"))]


def _shown(found: Held, cost: Cost, full: Cost) -> dict[str, str]:
  """Of a step of the whole batch: milliseconds, over the full cache's too, GB, tokens attended."""
  mine = found.time(cost)

  def figure(value: float | None, form: str = "") -> str:
    form = form or ("{:.2f}" if value is None or value >= 0.1 else "{:.3f}")
    return "–" if value is None else cells.number(value, form, mine)

  took = figure(cost.milliseconds, "{:.2f}")
  if not cells.steady(mine):
    took = cells.join("{} [{}]", took, cells.spread(mine))
  kept = figure(cost.kept)
  if cost.host_bytes:
    kept = cells.join("{} + {} on the host", kept, figure(cost.host_bytes / cost.batch / 1e9))
  return {
    "attended": figure(cost.attended, "{:,.0f}"),
    "ms": cells.join("{} ({})", took, cells.ratio(*cells.over(mine, found.time(full)))),
    "kept": kept,
    "read": figure(cost.read),
    "holds": figure(cost.peak_bytes and cost.peak_bytes / 1e9, "{:.1f}"),
    "expected": figure(cost.expected_us and cost.expected_us / 1e3, "{:.2f}"),
  }


def modes(results: Results) -> Part:
  """Mean scores by mode, side by side, at each length."""
  found, rows = held(results), []
  names = list(dict.fromkeys(one.mode for one in found.standings))
  for length in LENGTHS:
    sides = [found.standing(length, mode) for mode in names]
    if sides[0] is None:
      continue
    for who, first in sides[0].by.items():
      ours = [side.by.get(who) if side else None for side in sides]
      if first.score and any(one and one.score for one in ours[1:]):
        pairs = [_with_gap(found, *pair) for pair in zip(sides, ours, strict=True)]
        row = [f"{length:,}", scored.called(*who), *pairs]
        rows.append((found.rows.value(sides[0], first), row))
  head = ("tokens", "method, budget", *(f"{name}; less full" for name in names))
  return cells.table(head, cells.ranked(rows), labels=2)


def _with_gap(found: Held, whole: Standings | None, one: Standing | None) -> str:
  if whole is None or one is None or one.score is None:
    return "–"
  if one is whole.full:
    return found.rows.mean(whole, one)
  return cells.join("{}; {}", found.rows.mean(whole, one), found.rows.gap(whole, one))


# ---- long answers, longer contexts, and what was expected


ANSWERS = "gsm8k"


def answered(results: Results) -> Standings:
  """GSM8K's, of methods that evict while they answer."""
  (whole,) = standings(row for row in results.rows(FOLDER) if row["task"] == ANSWERS)
  return whole


def answers(results: Results) -> Part:
  """GSM8K: methods that evict while they answer, by budget."""
  found, whole = held(results), answered(results)
  sizes: dict[tuple[str, int | None], list[int]] = {}
  for row in results.rows(FOLDER):
    if row["task"] == ANSWERS:
      sizes.setdefault((row["method"], row["budget"]), []).append(row["cache_bytes"])
  line = functools.partial(_answered, found.rows, whole, sizes)
  made: list[Sequence[str]] = [line(whole.full)]
  for ones in scored.by_budget(whole):
    made += found.rows.ranked(whole, ones, line)
  return cells.table(("method, budget", "n", "right", "less full", "MB kept a row"), made)


def _answered(rows: scored.Held, whole: Standings, sizes: dict, one: Standing) -> list[str]:
  mine = sizes[one.method, one.budget]
  size = Number(sum(mine) / len(mine) / 1e6, *rows.records(whole, one, ANSWERS))
  n, right = rows.prompts(whole, one, ANSWERS), rows.score(whole, one, ANSWERS)
  name = scored.called(one.method, one.budget)
  return [name, n, right, rows.gap(whole, one), cells.number(size, "{:.1f}")]


def _foreseen(found: Held, timed: Sequence[Cost]) -> dict[str, str]:
  """Estimates of `advise` beside what was measured."""
  if not timed:
    return {}
  ratios = [(cost, (cost.expected_us or 0) / found.time(cost).us) for cost in timed]
  far = [
    cells.number(
      ratio, f"{_quoted(cost.method, cost.budget)} at T{cost.length >> 10}K B{cost.batch} {{:.2f}}"
    )
    for cost, ratio in ratios
    if abs(ratio - 1) > 0.15
  ]
  every = [found.time(cost) for cost in timed]
  return {
    "near": cells.number(len(timed) - len(far), "{:.0f}", *every),
    "timed": cells.number(len(timed), "{:.0f}", *every),
    "far": cells.listed(far) if far else "none",
  }


def end_to_end(results: Results) -> Part:
  """Steps at longer contexts than the first, each beside the full cache's."""
  found = held(results)
  timed = [cost for cost in costs.read(results.folder / FOLDER) if cost.length > LENGTHS[0]]
  full = {(cost.length, cost.batch): cost for cost in timed if cost.method == FULL}
  rows = []
  for cost in sorted(timed, key=lambda cost: (cost.length, cost.batch, cost.us)):
    shown = _shown(found, cost, full[cost.length, cost.batch])
    row = [f"{cost.length:,}", str(cost.batch), scored.called(cost.method, cost.budget)]
    rows.append([*row, *(shown[name] for name in ("attended", "ms", "read", "expected"))])
  head = ("tokens", "batch", "method, budget", "attended to", "ms a step (× full)", "GB read")
  return cells.table((*head, "expected ms"), rows, labels=3)


# ---- which method when


def when(results: Results) -> Part:
  """Choices by length, batch, tokens attended to and memory."""
  found, rows = held(results), []
  for length in LENGTHS:
    for board in found.at(length):
      for same in choices.classes(board):
        for memory, chosen in choices.by_memory(same):
          for choice in chosen:
            place = [f"{length:,}", str(board.batch), _attended(same), memory]
            rows.append([*place, ", ".join(choice.aims), *_taken(choice, same, found)])
  head = ("tokens", "batch", "attended to", "memory", "for", "take", "ms a token (× full)")
  head += ("GB kept a row", "GB a step holds", "score", "less full", "risk")
  return cells.table(head, rows, labels=6)


def advice(results: Results) -> Part:
  """The first page's: of methods that attend to as many tokens, which keep the score, and cost."""
  found, rows = held(results), []
  for length in LENGTHS:
    for board in found.at(length)[-1:]:
      for same in choices.classes(board):
        chosen = {aim: choice for choice in choices.choices(same) for aim in choice.aims}
        points = {aim: chosen[aim].point for aim in ("fastest", "least kept")}
        if any(point and point.method != FULL for point in points.values()):
          place = [f"{length >> 10}K, batch {board.batch}", _attended(same)]
          fastest, least = (_advised(found, same, point) for point in points.values())
          rows.append([*place, fastest, "the same" if least == fastest else least])
  head = ("context", "tokens attended to", "fastest", "least kept")
  return cells.table(head, rows, labels=2)


def _advised(found: Held, board: Board, point: Point | None) -> str:
  """A method with its time and bytes over the full cache's, and its difference in points."""
  if point is None or point.method == FULL:
    return "the full cache"
  whole, time = board.standings, found.time(point.cost)
  kept = point.cost.kept / board.full.cost.kept
  return cells.join(
    f"{_quoted(point.method, point.budget)}: time {{}}, bytes {{}}, {{}}",
    cells.ratio(*cells.over(time, found.time(board.full.cost))),
    cells.number(kept, "{:.2f}", time),
    found.rows.gap(whole, whole.by[point.method, point.budget]),
  )


def _attended(board: Board) -> str:
  """Tokens that the methods of a class attend to."""
  return _span([point.cost.attended for point in board.points[1:] if point.cost.attended])


def _taken(choice: choices.Choice, board: Board, found: Held) -> list[str]:
  point = choice.point
  if point is None:
    return ["nothing that was measured fits", *[""] * 6]
  whole, shown = board.standings, _shown(found, point.cost, board.full.cost)
  one = whole.by[point.method, point.budget]
  less = found.rows.gap(whole, one)
  row = [scored.called(point.method, point.budget), *(shown[x] for x in ("ms", "kept", "holds"))]
  row += [found.rows.mean(whole, one), cells.join("**{}**", less) if choice.loses else less]
  return [*row, _risk(point, board, found)]


def _risk(point: Point, board: Board, found: Held) -> str:
  """Limits of a method's family, and what it loses in other modes."""
  parts = [families.of(point.method).risk]
  for other in found.standings:
    one = other.by.get((point.method, point.budget))
    elsewhere = other.length == board.standings.length and other.mode != board.standings.mode
    if elsewhere and one and one.gap and point.method != FULL:
      parts.append(cells.join(f"{other.mode} {{}}", found.rows.gap(other, one)))
  return cells.listed(parts, "; ") if len(parts) > 1 else parts[0]


def picture(results: Results) -> Part:
  """The pictures of each length's largest batch; one shows all lengths that have its batch."""
  found = held(results)
  batches = dict.fromkeys(made[-1].batch for length in LENGTHS if (made := found.at(length)))
  return Part(
    f"![Score against milliseconds a token, bytes kept and bytes read, batch {batch}]"
    f"({FOLDER}/score_by_cost_aware_b{batch}.png)"
    for batch in batches
  )


# ---- figures in sentences


def figures(results: Results) -> dict[str, str]:
  found = held(results)
  made: dict[str, str] = {"model": found.model, "device": found.device, "short": ""}
  if found.short:
    made["short"] = f" Left out, since no walk can end early there: {', '.join(found.short)}."
  if boards := [board for length in LENGTHS for board in found.at(length)]:
    shape = f"T{boards[-1].standings.length >> 10}K, B{boards[-1].batch}"
    made |= {"shape": shape, "fastest": _fastest(found, boards[-1])}
    made |= _foreseen(found, [p.cost for b in boards for p in b.points if p.cost.expected_us])
  for one in found.standings:
    if one.mode == "aware":
      made |= {
        f"tasks-{one.length}": ", ".join(f"`{task}`" for task in one.tasks),
        f"weak-{one.length}": _weak(one),
        f"prompts-{one.length}": found.rows.prompts(one, one.full, *one.tasks),
      }
      for who in one.by.values():
        label = re.sub(r"[^\w.]+", "-", f"{who.method}-{who.budget or ''}").strip("-")
        made[f"{label}-mean-{one.length}"] = found.rows.mean(one, who)
        made[f"{label}-keys-{one.length}"] = found.rows.score(one, who, "niah_multikey_1")
  return made | _for_papers(results, found)


def _weak(one: Standings) -> str:
  tasks = ", ".join(f"`{task}`" for task in one.weak)
  return f"; {tasks}, of which the full cache solves less than half, are not in it" * bool(tasks)


def _fastest(found: Held, board: Board) -> str:
  """Methods that keep the score, by the tokens that they attend to."""
  parts = []
  for same in choices.classes(board):
    point = next(c.point for c in choices.choices(same) if "fastest" in c.aims)
    if point and point.method != FULL:
      whole = board.standings
      less = found.rows.gap(whole, whole.by[point.method, point.budget])
      shown = _shown(found, point.cost, board.full.cost)
      name = _quoted(point.method, point.budget)
      text = f"{name}, which attends to {{}}: {{}} ms, score less full {{}}"
      parts.append(cells.join(text, shown["attended"], shown["ms"], less))
  return cells.listed(parts, "; ")


def _for_papers(results: Results, found: Held) -> dict[str, str]:
  """CPE's step over the full cache's, and LongFlow's answers."""
  made: dict[str, str] = {}
  for board in found.at(LENGTHS[0])[-1:]:
    for point in board.points:
      if point.method == "cpe":
        pair = cells.over(found.time(point.cost), found.time(board.full.cost))
        made["cpe-step"] = cells.ratio(*pair)
  if any(row["task"] == ANSWERS for row in results.rows(FOLDER)):
    whole = answered(results)
    for one in (whole.full, *(one for who, one in whole.by.items() if who[0] == "longflow")):
      label = f"answers-{one.budget or one.method}"
      made[label] = found.rows.mean(whole, one)
      made[f"{label}-less"] = found.rows.gap(whole, one)
  return made
