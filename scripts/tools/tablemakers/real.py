"""A real model at long contexts: scores beside costs, and which method when."""

import functools
import itertools
from typing import Any

import pandas as pd

from kvjax.programs.evals import choices, costs, families
from kvjax.programs.evals.standing import Standings, standings
from scripts.tools.tablemakers import Part, Results, Timing, cells, over
from scripts.tools.tablemakers.cells import say
from scripts.tools.tablemakers.scores import FULL, REAL, called, gap, percent, run, shown

FIRST, LAST = 8192, 32768  # lengths that are compared
LEAST = 0.5  # the full cache's score in the tasks that are compared
MS, KEPT = "ms a token (× full)", "GB kept a row (× full)"
LABEL = "tokens attended to"


@functools.cache
def views(results: Results, folder: str = REAL) -> dict[tuple[int, str], Standings]:
  """Scores by length and mode, without walks too short to end early."""
  return {(x.length, x.mode): x for x in standings(run(results, folder).rows, LEAST)}


@functools.cache
def steps(results: Results, folder: str = REAL) -> pd.DataFrame:
  """Steps that the full cache was timed beside: numbers, and texts."""
  found, rows = run(results, folder), []
  ((_, settings),) = found.runs
  card = settings["device"]
  times = {x: Timing(f"`{x.method}`", x.us, x.low, x.high, card) for x in found.costs}
  full = {(cost.length, cost.batch): time for cost, time in times.items() if cost.method == "full"}
  for cost, time in times.items():
    if theirs := full.get((cost.length, cost.batch)):
      took = f"{cost.milliseconds:.2f}" + ("" if time.steady else f" [{time.spread}]")
      host = cost.host_bytes / cost.batch / 1e9
      row = {**vars(cost), "cost": cost, "who": called(cost.method, cost.budget), "time": time}
      row |= {"tokens": say("{:,.0f}", cost.attended), "ms": f"{took} ({over(time, theirs)})"}
      row["kept"] = _size(cost.kept) + (f" + {_size(host)} on the host" if host else "")
      row["read"] = _size(cost.read)
      row["holds"] = say("{:.1f}", cost.peak_bytes and cost.peak_bytes / 1e9)
      row["expected"] = say("{:.2f}", cost.expected_us and cost.expected_us / 1e3)
      rows.append(row)
  return pd.DataFrame(rows)


def _size(gigabytes: float) -> str:
  return f"{gigabytes:.2f}" if gigabytes >= 0.1 else f"{gigabytes:.3f}"


def scores(results: Results, where: str) -> Part:
  """At a length, in a mode or a folder; alike are those that attend to as many tokens."""
  length, _, other = where.partition(" ")
  mode, folder = ("", other) if "/" in other else (other, REAL)
  whole = views(results, folder).get((int(length), mode or "aware"))
  if whole is None:
    return pd.DataFrame()
  found = shown(whole, [*whole.tasks, *whole.weak])
  compared, found["seen"] = found.score.notna(), 0.0
  timed = pd.DataFrame() if mode else steps(results, folder)
  if len(timed):
    timed = timed[(timed.length == int(length)) & timed.who.isin(found.index[compared])]
    timed = timed.set_index("who").sort_values("batch")
  if len(timed):
    for batch, here in timed.groupby("batch"):
      found[f"ms a token, batch {batch} (× full)"] = here.ms
    found["GB kept a row"] = here.kept
    found[f"GB read a step, batch {batch}"] = here.read
    found["expected ms"] = here.expected
    seen = timed.cost.map(lambda cost: cost.attended).groupby("who").first()
    found["seen"] = seen.reindex(found.index).fillna(0)
  tokens = sorted({*found.seen[compared].astype(float)})
  least = itertools.accumulate(tokens, lambda x, n: x if n <= choices.ALIKE * x else n)
  found["least"] = found.seen.map(dict(zip(tokens, least, strict=True))).where(compared)
  alike = found.drop(FULL).groupby("least").seen
  found[LABEL] = found.least.map(alike.agg(_tokens if len(timed) else lambda _: "–"))
  found.loc[FULL, [LABEL, "least"]] = "all", float("inf")
  found = found.sort_values(["least", "score"], ascending=False).fillna({LABEL: "no mean"})
  found = found.drop(columns=["score", "budget", "seen", "least"])
  return found.set_index(LABEL, append=True).swaplevel()


def _tokens(attended: Any) -> str:
  seen = [tokens for tokens in attended if tokens]
  return cells.span(seen, "{:,.0f}") if seen else "not seen"


def end_to_end(results: Results) -> Part:
  timed = steps(results).sort_values(["length", "batch", "us"]).query(f"length > {FIRST}")
  timed["length"] = timed.length.map("{:,}".format)
  made = timed.set_index(["length", "batch", "who"])[["tokens", "ms", "read", "expected"]]
  heads = ["attended to", "ms a step (× full)", "GB read", "expected ms"]
  return made.set_axis(heads, axis=1).rename_axis(["tokens", "batch", "method, budget"])


def when(results: Results) -> Part:
  timed, rows = steps(results), []
  if timed.empty:
    return timed
  wholes = [whole for x in (FIRST, LAST) if (whole := views(results).get((x, "aware")))]
  for board in costs.boards(wholes, [*timed.cost]):
    for same in choices.classes(board):
      attended = _tokens(point.cost.attended for point in same.points[1:])
      for memory, chosen in choices.by_memory(same):
        row = {"tokens": f"{board.standings.length:,}", "batch": board.batch}
        row |= {"attended to": attended, "memory": memory}
        rows += [row | _taken(results, board, choice) for choice in chosen]
  return pd.DataFrame(rows).set_index([*rows[0]][:6])


def _taken(results: Results, board: costs.Board, choice: choices.Choice) -> dict[str, Any]:
  """A method's costs and score, and what it loses in each mode."""
  row = {"for": ", ".join(choice.aims), "take": "nothing that was measured fits"}
  if (point := choice.point) is None:
    return row
  step = steps(results).set_index("cost").loc[point.cost]
  who, whole = (point.method, point.budget), board.standings
  lost, risks = gap(whole, *who), [families.of(point.method).risk]
  for (length, mode), other in views(results).items():
    if length == whole.length and other is not whole and (there := gap(other, *who)):
      risks.append(f"{mode} {there}")
  return row | {
    "take": step.who,
    MS: step.ms,
    KEPT: f"{step.kept} ({point.cost.kept / board.full.cost.kept:.2f})",
    "GB a step holds": step.holds,
    "score": percent(point.score),
    "less full": f"**{lost}**" if choice.loses and lost else lost,
    "risk": "; ".join(risks),
  }


def advice(results: Results) -> Part:
  rows = when(results).reset_index()
  aims = [{"fastest", "least kept"} & {*aims.split(", ")} for aims in rows["for"]]
  rows["for"] = [", ".join(sorted(aim)) for aim in aims]
  free = rows.memory.str.endswith("more") & (rows["take"] != FULL) & (rows["for"] != "")
  rows = rows[free & (rows.batch == rows.groupby("tokens").batch.transform("last"))]
  return rows.set_index(["tokens", "attended to", "for", "take"])[[MS, KEPT, "less full"]]
