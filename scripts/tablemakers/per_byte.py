"""Quality per byte on a real model: what cuts, what rounds, and both, beside each other."""

from typing import Any

from ..evals import store
from ..evals.standing import FULL, Standing, Who, standings
from . import cells, real
from .results import Results

TASKS = ("needle", "niah_multikey_1", "niah_multivalue")
LENGTH, ROWS = 8192, 30  # the rows that all of them have done
# Shares of the full cache's bytes, each with what is nearest to it.
SHARES = {
  "a half": (0.4, 0.6),
  "a quarter": (0.2, 0.4),
  "an eighth": (0.1, 0.2),
  "a sixteenth": (0.0, 0.1),
}
BEST = 3  # of each share, the best by score; others of it are in the summary


def table(results: Results) -> list[str]:
  """Of each share of the bytes, the methods that find most; the full cache first."""
  folder = results.folder / real.FOLDER
  if not folder.is_dir():
    return []
  rows = [row for row in store.read(folder) if _counts(row)]
  by, shares = standings(rows)[0].by, _shares(rows)
  whole = by[FULL, None]
  head = ("", "method, budget", "cache", *(f"`{task}`" for task in TASKS), "mean", "of full")
  lines = [["all", *_line(whole, whole, 1.0)]]
  for label, (low, high) in SHARES.items():
    inside = [who for who, one in by.items() if one.score and low <= shares[who] < high]
    inside.sort(key=lambda who: -real.mean(by[who]))
    for i, who in enumerate(inside[:BEST]):
      lines.append([label * (i == 0), *_line(by[who], whole, shares[who])])
  return cells.table((*head, "KL, nats"), lines)


def _counts(row: dict[str, Any]) -> bool:
  asked = row["task"] in (*TASKS, "kl") and row["index"] < ROWS
  return asked and (row["length"], row["mode"]) == (LENGTH, "aware")


def _shares(rows: list[dict[str, Any]]) -> dict[Who, float]:
  """Bytes of a row's cache, measured, as a share of the full one's."""
  sums: dict[Who, list[int]] = {}
  for row in rows:
    sums.setdefault((row["method"], row["budget"]), []).append(row["cache_bytes"])
  means = {who: sum(found) / len(found) for who, found in sums.items()}
  return {who: size / means[FULL, None] for who, size in means.items()}


def _line(one: Standing, whole: Standing, share: float) -> list[str]:
  scores = [real.percent(one.tasks[task]) for task in TASKS]
  mean = real.percent(one.score) if one.score else "–"
  name = real.called(one.method, one.budget)
  row = [name, cells.percent(share), *scores, mean, real.relative(one, whole)]
  return [*row, real.divergence(one.kl)]
