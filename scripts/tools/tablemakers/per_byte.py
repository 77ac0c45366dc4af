"""Quality per byte on a real model: what cuts, what rounds, and both, beside each other."""

from typing import Any

from kvjax.programs.evals.standing import FULL, Standing, Standings, Who, standings
from scripts.tools.tablemakers import cells, real
from scripts.tools.tablemakers.records import Number, Part
from scripts.tools.tablemakers.results import Results

TASKS = ("needle", "niah_multikey_1", "niah_multivalue")
LENGTH = 8192
# Shares of the full cache's bytes, each with what is nearest to it.
SHARES = {
  "a half": (0.4, 0.6),
  "a quarter": (0.2, 0.4),
  "an eighth": (0.1, 0.2),
  "a sixteenth": (0.0, 0.1),
}
BEST = 3  # of each share, the best by score; others of it are in the summary


def table(results: Results) -> Part:
  """Of each share of the bytes, the methods that find most; the full cache first."""
  there = real.held(results)
  if there is None:
    return Part()
  rows = [row for row in results.rows(real.FOLDER) if _counts(row)]
  whole, shares = standings(rows)[0], _shares(rows)
  head = ("", "method, budget", "cache", *(f"`{task}`" for task in TASKS), "mean", "less full")
  lines = [["all", *_line(there, whole, whole.full, 1.0)]]
  for label, (low, high) in SHARES.items():
    inside = [
      (there.rows.value(whole, one), _line(there, whole, one, shares[who]))
      for who, one in whole.by.items()
      if one.score and one is not whole.full and low <= shares[who] < high
    ]
    lines += [[label, *line] for line in cells.ranked(inside)[:BEST]]
  return cells.table((*head, "KL, nats"), lines, labels=2)


def _counts(row: dict[str, Any]) -> bool:
  asked = row["task"] in (*TASKS, "kl") and not row["method"].startswith(real.WITHDRAWN)
  return asked and (row["length"], row["mode"]) == (LENGTH, "aware")


def _shares(rows: list[dict[str, Any]]) -> dict[Who, float]:
  """Bytes of a row's cache, measured, as a share of the full one's."""
  sums: dict[Who, list[int]] = {}
  for row in rows:
    sums.setdefault((row["method"], row["budget"]), []).append(row["cache_bytes"])
  means = {who: sum(found) / len(found) for who, found in sums.items()}
  return {who: size / means[FULL, None] for who, size in means.items()}


def _line(there: real.Held, whole: Standings, one: Standing, share: float) -> list[str]:
  rows = there.rows
  kept = cells.percent(Number(share, *rows.records(whole, one, *TASKS)))
  less = "–" if one is whole.full else rows.gap(whole, one)
  scores = [rows.score(whole, one, task) for task in TASKS]
  name = real.called(one.method, one.budget)
  return [name, kept, *scores, rows.mean(whole, one), less, rows.divergence(whole, one)]
