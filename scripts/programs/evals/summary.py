"""Results by cell: means with confidence intervals, relative to the full cache, as a table."""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from kvjax.programs import console
from kvjax.programs.evals import plan, walks
from kvjax.programs.evals.stats import Estimate, estimate

GROUP = ("task", "length", "mode", "method", "budget")


@dataclasses.dataclass(frozen=True)
class Summary:
  """One method with one budget on one task at one length.

  Attributes:
    task, length, mode, method, budget: whose rows.
    score: mean score; for tasks that follow a given text, agreement with the full cache.
    also: further means by name: "kl" and "nll" in nats, another scorer's score.
    relative: score over the full cache's, None where that is 0 or not there.
    cache_bytes, host_bytes: bytes of the caches per row, on the device and offloaded.
    share: cache_bytes over the full cache's.
    step_seconds: median seconds of a decode step of the whole batch, compilation excluded; None
      where every batch compiled.
    prefill_seconds: median seconds in which a batch's prompts were read, for all methods that
      shared that pass.
    batch: rows of those batches.
    visited: share of the tokens seen that the first step attended to, where rows have it.
    too_short: whether the method ends walks early and none of this length can be.
  """

  task: str
  length: int
  mode: str
  method: str
  budget: int | None
  score: Estimate
  also: dict[str, Estimate]
  relative: float | None
  cache_bytes: float
  host_bytes: float
  share: float | None
  step_seconds: float | None
  prefill_seconds: float | None
  batch: int
  visited: float | None = None
  too_short: bool = False


def summarise(
  rows: Iterable[dict[str, Any]], settings: dict[str, Any] | None = None
) -> list[Summary]:
  """One summary per cell, in the order in which cells first come; full caches first within a cell.

  Relative values compare the rows that both have: a run that was stopped compares like with like.
  `settings` are the folder's; without them no walk is too short.
  """
  cells: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
  for row in rows:
    cells.setdefault(tuple(row[name] for name in GROUP), {})[row["index"]] = row
  out = []
  for named, by_index in cells.items():
    task, length, mode, method, budget = named
    full = cells.get((task, length, mode, "full", None), {})
    both = sorted(by_index.keys() & full.keys())
    mine = list(by_index.values())
    whole = sum(full[i]["score"] for i in both)
    full_bytes = sum(full[i]["cache_bytes"] for i in both)
    followed = "positions" in mine[0]
    out.append(
      Summary(
        task=task,
        length=length,
        mode=mode,
        method=method,
        budget=budget,
        score=estimate([row["score"] for row in mine], shares=not followed),
        also={
          name: estimate([row["also"][name] for row in mine], shares=not followed)
          for name in mine[0]["also"]
        },
        relative=None if not whole or followed else sum(by_index[i]["score"] for i in both) / whole,
        cache_bytes=statistics.fmean(row["cache_bytes"] for row in mine),
        host_bytes=statistics.fmean(row["host_bytes"] for row in mine),
        share=sum(by_index[i]["cache_bytes"] for i in both) / full_bytes if full_bytes else None,
        step_seconds=_median(
          row["seconds"]["decode"] / row["seconds"]["steps"]
          for row in mine
          if "decode" not in row["seconds"]["cold"] and row["seconds"]["steps"]
        ),
        prefill_seconds=_median(
          row["seconds"]["prefill"] for row in mine if "prefill" not in row["seconds"]["cold"]
        ),
        batch=max(row["seconds"]["rows"] for row in mine),
        visited=_mean(row["visited"] for row in mine if "visited" in row),
        too_short=settings is not None and walks.too_short(method, budget, length, settings),
      )
    )
  first = {named[:3]: i for i, named in reversed(list(enumerate(cells)))}
  return sorted(out, key=lambda s: (first[s.task, s.length, s.mode], s.method != "full"))


def _median(values: Iterable[float]) -> float | None:
  listed = list(values)
  return statistics.median(listed) if listed else None


def _mean(values: Iterable[float]) -> float | None:
  listed = list(values)
  return statistics.fmean(listed) if listed else None


def table(summaries: Sequence[Summary]) -> str:
  """The summaries as a table, one block of columns for scores and one for divergences."""
  answered = [s for s in summaries if not s.also.keys() & {"kl", "bytes"}]
  rolled = [s for s in summaries if "bytes" in s.also]
  followed = [s for s in summaries if "kl" in s.also]
  parts = []
  if answered:
    head = ("task", "length", "mode", "method", "budget", "n", "score", "95 % interval")
    head += ("of full", "cache", "of full", "ms/step")
    parts.append(_part(head, answered, _score))
  if followed:
    head = ("task", "length", "mode", "method", "budget", "n", "KL", "95 % interval", "top-1")
    head += ("perplexity", "cache", "of full", "ms/step")
    parts.append(_part(head, followed, _divergence))
  if rolled:
    head = ("task", "length", "mode", "method", "budget", "n", "word perplexity")
    head += ("byte perplexity", "bits/byte", "cache", "of full", "ms/token")
    parts.append(_part(head, rolled, _perplexities))
  kinds = sorted({s.score.interval for s in answered} | {"bootstrap" for _ in followed + rolled})
  meaning = {
    "Wilson": "Wilson's, where every score is 0 or 1",
    "bootstrap": "the bootstrap's percentiles (2,000 resamples of the rows), elsewhere",
  }
  modes = dict.fromkeys(s.mode for s in summaries)
  parts.append(
    "\n".join(
      [
        *(f"  {mode}: {plan.MEANING[mode]}" for mode in plan.MEANING if mode in modes),
        "  n: rows; 95 % interval: " + "; ".join(meaning[kind] for kind in kinds),
      ]
    )
  )
  if any(s.too_short for s in summaries):
    parts.append(
      "  cannot stop: its walks are too short to end early, it reads what the full cache does"
    )
  return "\n\n".join(parts)


def _part(head: tuple[str, ...], summaries: Sequence[Summary], middle: Any) -> str:
  """A block of the table; what was visited is a column where a method says it."""
  rows = [_cells(s, middle) for s in summaries]
  if any(s.visited is not None or s.too_short for s in summaries):
    head += ("visited",)
    rows = [[*row, _visited(s)] for row, s in zip(rows, summaries, strict=True)]
  return console.table(head, rows, left=(0, 2, 3))


def _visited(s: Summary) -> str:
  if s.too_short:
    return "cannot stop"
  return "" if s.visited is None else f"{s.visited:.1%}"


def _cells(s: Summary, middle: Any) -> list[str]:
  size = (s.cache_bytes + s.host_bytes) / 1e6
  return [
    s.task,
    f"{s.length:,}",
    s.mode,
    s.method,
    "–" if s.budget is None else f"{s.budget:,}",
    str(s.score.n),
    *middle(s),
    (f"{size:,.1f} MB" if size >= 1 else f"{size:.3f} MB") + " (host)" * bool(s.host_bytes),
    "" if s.share is None else f"{s.share:.0%}",
    "" if s.step_seconds is None else f"{s.step_seconds * 1e3:.1f}",
  ]


def _score(s: Summary) -> list[str]:
  interval = f"{s.score.low:.1%} – {s.score.high:.1%}"
  return [f"{s.score.mean:.1%}", interval, "" if s.relative is None else f"{s.relative:.0%}"]


def _divergence(s: Summary) -> list[str]:
  kl = s.also["kl"]
  interval = f"{kl.low:.4f} – {kl.high:.4f}"
  perplexity = f"{math.exp(s.also['nll'].mean):.3f}"
  return [f"{kl.mean:.4f}", interval, f"{s.score.mean:.1%}", perplexity]


def perplexities(s: Summary) -> tuple[float, float, float]:
  """Perplexity of a word and of a byte, and bits of a byte, of all texts together."""
  nats, words, size = (s.also[name].mean for name in ("log_likelihood", "words", "bytes"))
  word, byte = (math.exp(min(-nats / n, 700.0)) for n in (words, size))  # floats end near e^709
  return word, byte, -nats / size / math.log(2)


def _perplexities(s: Summary) -> list[str]:
  return [f"{value:,.4f}" for value in perplexities(s)]
