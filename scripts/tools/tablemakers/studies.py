"""Studies on models' own activations: sharing, certificates, rounded caches."""

from typing import Any

from kvjax.programs.evals.stats import Estimate
from scripts.tools.tablemakers import Figure, Named, Part, Results, cells, records, scored
from scripts.tools.tablemakers.cells import ends, say

# ---- selections that are shared

SHARED = {
  "retrieved": ("ρ̂", ".2f"),
  "visited": ("tokens a head", ".1f"),
  "overlap": ("overlap", ".3f"),
  "dropped": ("dropped", ".3f"),
  "overlap ahead": ("overlap less HShare's", "+.3f"),
  "dropped ahead": ("dropped less HShare's", "+.3f"),
}


def sharing(results: Results, path: str) -> Part:
  """Settings by method and retrievals, the fewest first; what CIS is ahead by."""
  rows, study = [], results.study(path)
  for line, points in study["found"].items():
    for name, point in sorted(points.items(), key=lambda pair: pair[1]["retrieved"]["mean"]):
      rows.append([f"{line}, {name}", *(_within(point, column) for column in SHARED)])
  part = cells.table(("", *(head for head, _ in SHARED.values())), rows)
  return cells.noted(part, Figure(study["n"].replace("text(s)", "texts"), study["n"].records))


def _within(point: Named, name: str) -> str:
  """A mean and half the width of its interval."""
  if point.get(name) is None:
    return ""
  form, mean = SHARED[name][1], point[name]["mean"]
  return say(f"{{:{form}}} ± {{:{form.lstrip('+')}}}", mean, point[name]["high"] - mean)


# ---- certificates


def certificates(results: Results, path: str) -> Part:
  """Shares of bounds that are below the trivial, and that fail; medians over it."""
  rows, study = [], results.study(path)
  for row in study["rows"]:
    fails = say("{:.0f}" if row["fails"] == 0 else "{:.1%}", row["fails"])
    medians = map(row.get, ("bound_over_trivial", "actual_over_trivial"))
    below = _share(row, "below"), _share(row, "below_half")
    rows.append([row["name"], row["fitted"], row["bounds"], *below, fails, *medians])
  head = ["bound on", "fitted to", ("bounds", "{:,.0f}"), "below the trivial maximum"]
  head += ["below half of it", "fail", ("median bound", "{:.2g}"), ("median actual", "{:.2g}")]
  return cells.noted(cells.table(head, rows, labels=2), study["n"])


def _share(row: Named, name: str) -> Figure:
  """A share of a row's bounds, and the texts' least to most."""
  share, texts = say("{:.0%}", row[name]), list(row[f"{name}_by_text"])
  alike = len({say("{:.0%}", text) for text in texts}) == 1
  return share if alike else say("{} ({})", share, ends(texts, "{:.0%}"))


# ---- keys and values in 8, 4 and 2 bits: what rounding costs a model


def codes(results: Results, folder: str) -> Part:
  """Divergence from the full cache and needles found, with and without keys' mean."""
  names = (f"{folder}/{name}.json" for name in ("summary", "without_mean"))
  there = (name for name in names if (results.folder / name).is_file())
  summary, *without = (scored.summary(results, name) for name in there)
  rows, needles = [], any(cell[0] == "needle" for cell in summary)
  for (task, *cell), kl in summary.items():
    if task == "kl":
      row = [f"`{cell[1]}`", kl["share"], *_divergence(kl)]
      for was in (held.get((task, *cell)) for held in without):
        row += _divergence(was) if was else [None, None]
      if needles:
        row.append(_interval(summary["needle", *cell]["score"], ".0f", 100))
      rows.append([*row, kl["score"]["n"]])
  same = ("same next token, %", "{:.1f}")
  head = ["keys and values", ("cache", "{:.0%}"), "KL, nats", same]
  head += ["KL without the mean", same] * len(without) + ["needles, %"] * needles
  return cells.table([*head, ("rows", "{:.0f}")], rows)


def _divergence(kl: Named) -> list[Any]:
  """The KL to the full cache with its interval, and percent of alike tokens."""
  return [_interval(kl["also"]["kl"], ".2g"), 100 * kl["score"]["mean"]]


def _interval(found: Named, form: str, unit: float = 1) -> Figure:
  text = scored.interval(Estimate(**found), form, unit)
  return Figure(text, records.of(*map(found.get, ("mean", "low", "high"))))
