"""Results by cell: means with confidence intervals, relative to the full cache, as a table."""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from kvjax.programs import console
from kvjax.programs.evals import plan, standing, walks
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
    prefill_seconds: median seconds in which prompts were read at once (a fifth of a batch's, or of
      given texts all of them), for all methods that shared that pass.
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

  @property
  def answered(self) -> bool:
    """True if the task is scored by answers, and not by what follows a given text."""
    return standing.answered(self.also)


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
    followed, visited = "positions" in mine[0], [x["visited"] for x in mine if "visited" in x]
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
        visited=statistics.fmean(visited) if visited else None,
        too_short=settings is not None and walks.too_short(method, budget, length, settings),
      )
    )
  first = {named[:3]: i for i, named in reversed(list(enumerate(cells)))}
  return sorted(out, key=lambda s: (first[s.task, s.length, s.mode], s.method != "full"))


def _median(values: Iterable[float]) -> float | None:
  listed = list(values)
  return statistics.median(listed) if listed else None


def table(summaries: Sequence[Summary]) -> str:
  """The summaries as a table, one block of columns for scores and one for divergences."""
  parts = [console.table(head, rows, left=LEFT) for head, rows in blocks(summaries)]
  return "\n\n".join([*parts, "\n".join(f"  {note}" for note in notes(summaries))])


Block = tuple[tuple[str, ...], list[list[str]]]
LEFT = (0, 2, 3)  # columns of words


def blocks(summaries: Sequence[Summary]) -> list[Block]:
  """Heads and rows of the tables: of scores, of divergences, of perplexities."""
  kinds: tuple[tuple[tuple[str, ...], Any, Any], ...] = (
    (("score", "95 % interval", "of full"), _score, lambda s: s.answered),
    (("KL, nats", "95 % interval", "top-1", "perplexity"), _divergence, lambda s: "kl" in s.also),
    (("word perplexity", "byte perplexity", "bits/byte"), _words, lambda s: "bytes" in s.also),
  )
  made: list[Block] = []
  for middle, cells, is_one in kinds:
    if chosen := [s for s in summaries if is_one(s)]:
      step = "ms/token" if cells is _words else "ms/step"
      head = ("task", "length", "mode", "method", "budget", "n", *middle, "cache", "of full", step)
      rows = [_cells(s, cells) for s in chosen]
      if any(s.visited is not None or s.too_short for s in chosen):
        head += ("visited",)
        rows = [[*row, _visited(s)] for row, s in zip(rows, chosen, strict=True)]
      made.append((head, rows))
  return made


def notes(summaries: Sequence[Summary]) -> list[str]:
  """Lines that say what modes, columns and empty cells mean, of those that there are."""
  answered = [s for s in summaries if s.answered]
  others = len(answered) < len(summaries)
  kinds = sorted({s.score.interval for s in answered} | ({"bootstrap"} if others else set()))
  meaning = {
    "Wilson": "Wilson's, where every score is 0 or 1",
    "bootstrap": "the bootstrap's percentiles (2,000 resamples of the rows), elsewhere",
  }
  modes = dict.fromkeys(s.mode for s in summaries)
  lines = [f"{mode}: {plan.MEANING[mode]}" for mode in plan.MEANING if mode in modes]
  lines.append("n: rows; 95 % interval: " + "; ".join(meaning[kind] for kind in kinds))
  reasons = (
    ("budget", any(s.budget is None for s in summaries), "the method takes none"),
    (
      "of full",
      any(s.share is None or (s.answered and s.relative is None) for s in summaries),
      "the full cache has no such rows, or scores 0 in them",
    ),
    (
      "ms",
      any(s.step_seconds is None for s in summaries),
      "every batch compiled a program, or decoded no step",
    ),
    (
      "visited",
      any(s.visited is not None for s in summaries)
      and any(s.visited is None and not s.too_short for s in summaries),
      "the method does not report it",
    ),
  )
  lines += [f"–: {name}: {why}" for name, there, why in reasons if there]
  if any(s.too_short for s in summaries):
    lines.append(
      "cannot stop: its walks are too short to end early, it reads what the full cache does"
    )
  return lines


def _visited(s: Summary) -> str:
  if s.too_short:
    return "cannot stop"
  return "–" if s.visited is None else f"{s.visited:.1%}"


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
    "–" if s.share is None else f"{s.share:.0%}",
    "–" if s.step_seconds is None else f"{s.step_seconds * 1e3:.1f}",
  ]


def _score(s: Summary) -> list[str]:
  interval = f"{s.score.low:.1%} – {s.score.high:.1%}"
  return [f"{s.score.mean:.1%}", interval, "–" if s.relative is None else f"{s.relative:.0%}"]


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


def _words(s: Summary) -> list[str]:
  return [f"{value:,.4f}" for value in perplexities(s)]
