"""Studies on activations: sharing, certificates, rounded caches."""

import pandas as pd

from scripts.tools.tablemakers import Part, Record, Results, cells
from scripts.tools.tablemakers.cells import Column, figure, said, say
from scripts.tools.tablemakers.scores import called, interval, percent, summary

SHARED = {
  "retrieved": ("ρ̂", "{:.2f} ± {:.2f}"),
  "visited": ("tokens a head", "{:.1f} ± {:.1f}"),
  "overlap": ("overlap", "{:.3f} ± {:.3f}"),
  "dropped": ("dropped", "{:.3f} ± {:.3f}"),
  "overlap ahead": ("overlap less HShare's", "{:+.3f} ± {:.3f}"),
  "dropped ahead": ("dropped less HShare's", "{:+.3f} ± {:.3f}"),
}


def sharing(results: Results, path: str) -> Part:
  study = results.json(path)
  rows = pd.json_normalize(
    {"label": f"{line}, {name}", **point}
    for line, points in study["found"].items()
    for name, point in sorted(points.items(), key=lambda pair: pair[1]["retrieved"]["mean"])
  )
  for name in SHARED:
    rows[f"{name}.half"] = rows[f"{name}.high"] - rows[f"{name}.mean"]
  columns = ((head, figure(form, f"{x}.mean", f"{x}.half")) for x, (head, form) in SHARED.items())
  made = cells.table(rows, [("", "label")], *columns).fillna("")
  made.attrs["note"] = study["n"].replace("text(s)", "texts")
  return made


def certificates(results: Results, path: str) -> Part:
  study = results.json(path)
  made = cells.table(
    study["rows"],
    [("bound on", "name"), ("fitted to", "fitted")],
    said("bounds", "{:,.0f}"),
    ("below the trivial maximum", lambda row: _share(row, "below")),
    ("below half of it", lambda row: _share(row, "below_half")),
    ("fail", lambda row: say("{:.1%}", row["fails"]) if row["fails"] else "0"),
    ("median bound", figure("{:.2g}", "bound_over_trivial")),
    ("median actual", figure("{:.2g}", "actual_over_trivial")),
  )
  made.attrs["note"] = study["n"]
  return made


def _share(row: Record, name: str) -> str:
  """A share of a row's bounds, and the texts' least to most."""
  share, texts = say("{:.0%}", row[name]), cells.span(row[f"{name}_by_text"], "{:.0%}")
  return f"{share} ({texts})" if " to " in texts else share


def codes(results: Results, folder: str) -> Part:
  keys, path = ["length", "method", "budget"], f"{folder}/without_mean.json"
  found = summary(results, f"{folder}/summary.json")
  rows, needles = found[found.task == "kl"], found[found.task == "needle"]
  rows = rows.merge(needles[[*keys, "score"]], "left", keys, suffixes=("", ", needle"))
  columns = [("cache", figure("{:.0%}", "share")), *_divergence("KL, nats")]
  if (results.folder / path).is_file():
    without = summary(results, path)[[*keys, "score", "kl"]]
    rows = rows.merge(without, "left", keys, suffixes=("", ", without"))
    columns += _divergence("KL without the mean", ", without")
  columns.append(("needles, %", figure(percent, "score, needle")))  # dropped where there are none
  columns.append(("rows", lambda row: row["score"].n))
  who = "method", lambda row: called(row["method"], row["budget"] and int(row["budget"]))
  return cells.table(rows, [who], *columns)


def _divergence(head: str, where: str = "") -> list[tuple[str, Column]]:
  """The KL to the full cache with its interval, and percent of alike tokens."""
  same = figure(lambda score: f"{100 * score.mean:.1f}", f"score{where}")
  return [(head, figure(interval, f"kl{where}")), ("same next token, %", same)]
