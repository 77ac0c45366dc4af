"""Studies on the models' own activations: shared selections, certificates, and rounded caches."""

from typing import Any

from kvjax.programs.evals.stats import Estimate
from scripts.tools.tablemakers import cells, records, scored
from scripts.tools.tablemakers.cells import ends, say
from scripts.tools.tablemakers.records import Figure, Part
from scripts.tools.tablemakers.results import GPU, Results, Study

CERTIFICATES = "cpu/certificates/certificates.json"
LARGER = "cpu/certificates_1.5b/certificates.json"
SHARING, LONG_SHARING = "cpu/sharing/sharing.json", f"{GPU}/real/sharing/sharing.json"


def _study(results: Results, path: str) -> Study:
  held = results.json(path)
  model = held["about"].get("model", "Qwen2.5-Coder-1.5B-Instruct")
  texts = held.get("texts") or held["starts"]
  return results.study(path, f"{model}; {held['n']}", n=len(texts))


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
  """Settings by method from the fewest retrievals to the most; what CIS is ahead by."""
  rows = []
  for line, points in _study(results, path)["found"].items():
    for name, point in sorted(points.items(), key=lambda pair: pair[1]["retrieved"]["mean"]):
      rows.append([f"{line}, {name}", *(_within(point, column) for column in SHARED)])
  return cells.table(("", *(head for head, _ in SHARED.values())), rows)


def _within(point: Study, name: str) -> str:
  """A mean and half the width of its interval."""
  if name not in point:
    return ""
  form, mean = SHARED[name][1], point[name]["mean"]
  return say(f"{{:{form}}} ± {{:{form.lstrip('+')}}}", mean, point[name]["high"] - mean)


# ---- certificates


def certificates(results: Results, path: str) -> Part:
  """Shares of the bounds that say something, and of those that fail; medians over the trivial."""
  rows = []
  for row in _study(results, path)["rows"]:
    fails = say("{:.0f}" if row["fails"] == 0 else "{:.1%}", row["fails"])
    medians = row.each("bound_over_trivial", "actual_over_trivial")
    rows.append([row["name"], row["fitted"], row["bounds"], _below(row), fails, *medians])
  head = ["bound on", "fitted to", ("bounds", "{:,.0f}"), "below the trivial maximum", "fail"]
  head += [("median bound", "{:.2g}"), ("median actual", "{:.2g}")]
  return cells.table(head, rows, labels=2)


def _below(row: Study) -> Figure:
  """The share of a row's bounds that say something, and the texts' least to most."""
  share, texts = say("{:.0%}", row["below"]), list(row["below_by_text"])
  alike = len({say("{:.0%}", text) for text in texts}) == 1
  return share if alike else say("{} ({})", share, ends(texts, "{:.0%}"))


# ---- keys and values in 8, 4 and 2 bits: what rounding costs two models

NAMES = {
  "full": "float32",
  "quantised": "8 bits",
  "quantised:bits=4": "4 bits",
  "quantised:bits=4,group=32": "4 bits, 32 channels a scale",
  "kivi:bits=4,residual=32": "KIVI, 4 bits, R = 32",
  "kivi:bits=4": "KIVI, 4 bits, R = 128",
  "quantised:bits=2": "2 bits",
  "quantised:bits=2,group=32": "2 bits, 32 channels a scale",
  "kivi:residual=32": "KIVI, 2 bits, R = 32",
  "kivi": "KIVI, 2 bits, R = 128",
}
CACHE, SAME, N = ("cache", "{:.0%}"), ("same next token, %", "{:.1f}"), ("rows", "{:.0f}")


def codes(results: Results) -> Part:
  """Divergence from the full cache, and needles found, of every number of bits."""
  held = scored.summary(results, "cpu/quantised/summary.json", "SmolLM2-135M-Instruct")
  rows = []
  for method, label in NAMES.items():
    kl, needle = (held[task, 1024, method, None] for task in ("kl", "needle"))
    found = _interval(needle["score"], ".0f", 100)
    rows.append([label, kl["share"], *_divergence(kl), found, kl["score"]["n"]])
  head = ["keys and values", CACHE, "KL, nats", SAME, "needles, %", N]
  return cells.table(head, rows)


def codes_larger(results: Results) -> Part:
  """Divergence of the 1.5B, with keys rounded less their mean and as they are."""
  found, before = (
    scored.summary(results, f"cpu/quantised_1.5b/{name}.json", "Qwen2.5-Coder-1.5B-Instruct")
    for name in ("summary", "without_mean")
  )
  rows = []
  for method, label in NAMES.items():
    now, was = (held.get(("kl", 2048, method, None)) for held in (found, before))
    if now:
      earlier = _divergence(was) if was else [None, None]
      rows.append([label, now["share"], *_divergence(now), *earlier, now["score"]["n"]])
  head = ["keys and values", CACHE, "KL, nats", SAME, "KL without the mean", SAME, N]
  return cells.table(head, rows)


def _divergence(kl: Study) -> list[Any]:
  """The KL to the full cache with its interval, and percent of alike tokens."""
  return [_interval(kl["also"]["kl"], ".2g"), 100 * kl["score"]["mean"]]


def _interval(found: Study, form: str, unit: float = 1) -> Figure:
  text = scored.interval(Estimate(**found.held), form, unit)
  return Figure(text, records.of(*found.each("mean", "low", "high")))


# ---- figures in sentences

CERTIFIED = {
  ("sharing, Δ_att by the drift's bound", "–"): "drift",
  ("window (PSAW)", "another text"): "psaw",
  ("freezing (ETF), keys projected", "another text"): "etf",
}


def figures(results: Results) -> dict[str, str]:
  found: dict[str, str] = {}
  for label, path in (("smollm2", SHARING), ("qwen", LONG_SHARING)):
    if (results.folder / path).is_file():
      shared = _shared(_study(results, path))
      found |= {f"{label}-{name}": figure for name, figure in shared.items()}
  for label, path in (("smollm2", CERTIFICATES), ("qwen", LARGER)):
    if (results.folder / path).is_file():
      study = _study(results, path)
      found[f"{label}-certified"] = f"`{study['n']}`"
      for row in study["rows"]:
        if name := CERTIFIED.get((row["name"], row["fitted"])):
          found[f"{label}-{name}"] = _below(row)
  return found


def _shared(study: Study) -> dict[str, str]:
  """The table's samples, what methods attend to, and what CIS retrieves for that."""
  seen: dict[str, list[Any]] = {}
  for line, points in study["found"].items():
    visited = [point["visited"]["mean"] for _, point in points.items()]
    seen.setdefault(line.split(",")[0], []).extend(visited)
  kept = [n for _, points in study["retrieved_tokens"].items() for _, n in points.items()]
  made = {
    "n": f"`{study['n'].replace('text(s)', 'texts')}`",
    "texts": ", ".join(f"`{text}`" for text in study["texts"]),
    "length": say("{:,.0f}", study["length"]),
    "cis": ends(seen["CIS"], "{:.1f}"),
    "hshare": ends(seen["HShare"], "{:.1f}"),
    "tokens": ends(kept, "{:.0f}"),
  }
  # The paper's setting
  lines = study["found"]
  if "CIS, s = 16" in lines and "τ = 0.8" in (line := lines["CIS, s = 16"]):
    made["retrieved"] = _within(line["τ = 0.8"], "retrieved")
    made["ahead"] = _within(line["τ = 0.8"], "overlap ahead")
  return made
