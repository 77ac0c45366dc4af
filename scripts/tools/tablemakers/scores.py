"""Scores: methods on a task, quality per byte, and SmolLM2."""

import functools
from collections.abc import Sequence
from typing import Any

import pandas as pd

from kvjax.programs import plot
from kvjax.programs.evals.standing import Standings, standings
from kvjax.programs.evals.stats import Estimate
from scripts.tools.tablemakers import GPU, Part, Results, cells
from scripts.tools.tablemakers.cells import figure, said, say

FULL = "`full`"
REAL = f"{GPU}/real"
# Not shown: their gates were found on needles of the draw that they were tested on.
WITHDRAWN = ("duo_attention",)


@functools.cache
def run(results: Results, folder: str) -> plot.Results:
  """An evaluation's rows, without walks too short to end early, and costs."""
  found = plot.Results([results.folder / folder])
  found.rows = [row for row in found.rows if not row["method"].startswith(WITHDRAWN)]
  return found


def called(method: str, budget: int | None) -> str:
  """A method with its budget."""
  return f"`{method}`" if budget is None else f"`{method}`, {budget:,}"


def interval(found: Estimate | None, form: str = ".2g", unit: float = 1) -> str | None:
  """A mean with its interval; zero has no sign."""
  if found is None:
    return None
  mean, low, high = (f"{unit * x:z{form}}" for x in (found.mean, found.low, found.high))
  return f"{mean} ({low}–{high})"


percent = functools.partial(interval, form=".0f", unit=100)


def gap(whole: Standings, *who: Any) -> str | None:
  """Points less than the full cache's on the same prompts; None for itself."""
  one = whole.by.get(who)
  if one is None or one.gap is None or one is whole.full:
    return None
  points = (100 * x for x in (one.gap.mean, one.gap.low, one.gap.high))
  return say("{:+.0f} ({:+.0f} to {:+.0f})", *points)


def shown(whole: Standings, tasks: Sequence[str], form: str = ".0f") -> pd.DataFrame:
  """Methods' scores in tasks, means, gaps and divergences, and what to sort them by."""
  rows = {}
  for who, one in whole.by.items():
    asked = tasks if one.score else one.tasks
    counts = [len(one.prompts[task]) for task in asked if task in one.prompts]
    row = {"n": cells.span(counts, "{}")}
    for task in tasks:
      weak = ", not in the mean" if task in whole.weak else ""
      row[f"`{task}`{weak}"] = percent(one.tasks.get(task), form=form)
    row |= {"mean": percent(one.score), "less full": gap(whole, *who)}
    row["KL, nats"] = "0" if one.kl and one.kl.high == 0 else interval(one.kl)
    rows[called(*who)] = row | {"score": one.score and one.score.mean, "budget": one.budget}
  return pd.DataFrame.from_dict(rows, "index").rename_axis("method, budget")


def task(results: Results, where: str) -> Part:
  folder, _, name = where.partition(" ")
  rows = [row for row in run(results, folder).rows if row["task"] == name]
  found = shown(standings(rows)[0], [name], ".1f")
  found["MB kept a row"] = [f"{size / 1e6:.1f}" for size in _cache(rows)[found.index]]
  found = found[found.score.notna()]
  found = found.sort_values(["budget", "score"], ascending=[True, False], na_position="first")
  found = found.rename(columns={f"`{name}`": "right, %"})
  return found[["n", "right, %", "less full", "MB kept a row"]]


def _cache(rows: list[dict[str, Any]]) -> pd.Series:
  """Bytes of a row's cache by method, the mean."""
  sizes = pd.Series([row["cache_bytes"] for row in rows])
  return sizes.groupby([called(row["method"], row["budget"]) for row in rows]).mean()


TASKS = ("needle", "niah_multikey_1", "niah_multivalue")
# Shares of the full cache's bytes, each with what is nearest to it.
SHARES = {"a sixteenth": 0.1, "an eighth": 0.2, "a quarter": 0.4, "a half": 0.6}
BEST = 3  # of each share, the best by score; others of it are in the summary


def per_byte(results: Results) -> Part:
  """The full cache, then of each share of its bytes the methods that find most."""
  every = (row for row in run(results, REAL).rows if row["task"] in (*TASKS, "kl"))
  rows = [row for row in every if (row["length"], row["mode"]) == (8192, "aware")]
  found, sizes = shown(standings(rows)[0], TASKS), _cache(rows)
  shares = sizes / sizes[FULL]
  found["cache"] = [say("{:.0%}", share) for share in shares[found.index]]
  found["share"] = pd.cut(shares, [0, *SHARES.values()], right=False, labels=[*SHARES])
  ranked = found.sort_values(["share", "score"], ascending=False).dropna(subset=["share", "score"])
  best = ranked.groupby("share", observed=True).head(BEST).astype({"share": str})
  made = pd.concat([found.loc[[FULL]].assign(share="all"), best])
  return made.set_index("share", append=True).swaplevel().drop(columns=["score", "budget"])


FOLDER = f"{GPU}/evaluation"
LENGTHS = (1024, 2048, 4096)
# In these the full cache reaches half at 1K and 2K.
RULER = ("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1")
RULER += ("niah_multivalue", "niah_multiquery")


def summary(results: Results, path: str) -> pd.DataFrame:
  """Means of a file, of compression that has seen the question."""
  rows = [row for row in results.json(path) if row["mode"] == "aware"]
  for row in rows:
    kl = row["also"].get("kl")
    row |= {"score": Estimate(**row["score"]), "kl": kl and Estimate(**kl)}
  return pd.DataFrame(rows)


def smollm2(results: Results) -> Part:
  """A needle and divergence at 2K, and percent, the mean of RULER's tasks, by length.

  Walks that are too short to end early at a length have no figure there.
  """
  found = summary(results, f"{FOLDER}/summary.json").fillna({"budget": 0})
  found = found[~found.method.str.startswith("ltri")]
  means = [kl.mean if kl else 100 * one.mean for one, kl in zip(found.score, found.kl, strict=True)]
  found["value"] = pd.Series(means, found.index).mask(found.too_short)
  wide = found.set_index(["budget", "method", "task", "length"]).value.unstack([2, 3], sort=False)
  rows = pd.DataFrame({"needle": wide["needle", 2048], "kl": wide["kl", 2048]})
  for n in LENGTHS:
    rows[f"RULER at {n >> 10}K"] = wide[[(task, n) for task in RULER]].mean(axis=1, skipna=False)
  rows = rows.reset_index().sort_values(["budget", "needle"], ascending=[True, False])
  return cells.table(
    rows.replace({"budget": {0: None}}),
    [("budget", figure("{:.0f}", "budget")), ("method", figure("`{}`", "method"))],
    said("needle", "{:.0f}"),
    ("KL, nats", figure("{:.4f}", "kl")),
    *(said(f"RULER at {n >> 10}K", "{:.1f}") for n in LENGTHS),
  )
