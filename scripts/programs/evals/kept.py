"""Tokens that two libraries keep of the same prompts: shares, needles, bytes, and their sums."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvjax.programs.evals.stats import estimate

Positions = Sequence[Sequence[np.ndarray]]  # per layer and KV head; negative ones are none
KEPT = ("equal", "of_fewer", "identical", "kept", "kept_by_kvpress")


def overlap(ours: Positions, theirs: Positions) -> dict[str, float]:
  """Means over layers and heads of what two selections have in common.

  Returns:
    `equal`: tokens that both keep, of as many as the larger side keeps; `of_fewer`: of as many as
    the smaller side keeps, 1 where one selection holds the other; `identical`: heads that keep the
    very same tokens; `kept`, `kept_by_kvpress`: tokens a head.

  Raises:
    ValueError: numbers of layers or heads differ, or a head keeps nothing.
  """
  found = []
  for a, b in zip(ours, theirs, strict=True):
    for left, right in zip(a, b, strict=True):
      x, y = np.unique(left[left >= 0]), np.unique(right[right >= 0])
      if not (x.size and y.size):
        raise ValueError(f"positions: found {x.size} and {y.size}, expected some of each")
      both = np.intersect1d(x, y).size
      larger, smaller = max(x.size, y.size), min(x.size, y.size)
      found.append((both / larger, both / smaller, both == larger, x.size, y.size))
  return dict(zip(KEPT, np.mean(found, 0).tolist(), strict=True))


def holds(positions: Positions, wanted: Sequence[int]) -> float:
  """The share of the wanted tokens that is kept, mean over layers and heads."""
  return float(np.mean([np.isin(wanted, head).mean() for layer in positions for head in layer]))


def summary(rows: Iterable[dict[str, Any]], by: Sequence[str]) -> list[dict[str, Any]]:
  """Rows by some fields, in the order of their first ones: n, means of numbers, scores.

  Scores (`score`, `score_of_kvpress`) become estimates; `same_answers` counts rows whose answers
  are the same text. A number that some rows of a group lack is left out.
  """
  groups: dict[tuple, list[dict[str, Any]]] = {}
  for row in rows:
    groups.setdefault(tuple(row[name] for name in by), []).append(row)
  found = []
  for key, mine in groups.items():
    each: dict[str, Any] = {**dict(zip(by, key, strict=True)), "n": len(mine)}
    for name in mine[0]:
      values = [row.get(name) for row in mine]
      if name in by or name == "index" or not all(isinstance(x, int | float) for x in values):
        continue
      each[name] = estimate(values) if name.startswith("score") else float(np.mean(values))
    if "answer" in mine[0]:
      each["same_answers"] = sum(row["answer"] == row["answer_of_kvpress"] for row in mine)
    found.append(each)
  return found
