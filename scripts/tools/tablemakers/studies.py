"""Studies on the models' own activations: shared selections, certificates, and rounded caches."""

from collections.abc import Iterable
from typing import Any

from scripts.tools.tablemakers import cells, records, scored
from scripts.tools.tablemakers.records import Figure, Number, Part
from scripts.tools.tablemakers.results import GPU, Results, Study

CERTIFICATES = "cpu/certificates/certificates.json"
LARGER = "cpu/certificates_1.5b/certificates.json"
SHARING, LONG_SHARING = "cpu/sharing/sharing.json", f"{GPU}/real/sharing/sharing.json"
SHARED = {"retrieved": ".2f", "visited": ".1f", "overlap": ".3f", "dropped": ".3f"}
AHEAD = {"overlap ahead": "+.3f", "dropped ahead": "+.3f"}


def _study(results: Results, path: str) -> Study:
  held = results.json(path)
  device, texts = held["about"]["device"], held.get("texts") or held["starts"]
  card = "CPU" if device == "cpu" else device
  setting = f"{held['about'].get('model', 'Qwen2.5-Coder-1.5B-Instruct')}; {held['n']}"
  return results.study(path, card=card, n=len(texts), setting=setting)


def sharing(results: Results, path: str) -> Part:
  """Settings by method from the fewest retrievals to the most; what CIS is ahead by."""
  study, rows = _study(results, path), []
  for line, points in study.get("found").items():
    for point in sorted(points, key=lambda point: points[point]["retrieved"]["mean"]):
      figures = (_within(study, line, point, *how) for how in (SHARED | AHEAD).items())
      rows.append([f"{line}, {point}", *figures])
  head = ("", "ρ̂", "tokens a head", "overlap", "dropped")
  return cells.table((*head, "overlap less HShare's", "dropped less HShare's"), rows)


def _within(study: Study, line: str, point: str, name: str, form: str) -> str:
  """A mean and half the width of its interval."""
  keys = ("found", line, point, name)
  if not study.has(*keys):
    return ""
  mean, high = (study.number(*keys, end, setting=f"{line}, {point}") for end in ("mean", "high"))
  text = cells.number(mean, f"{{:{form}}}")
  half = cells.number(high - mean, f"{{:{form.lstrip('+')}}}")
  return Figure(f"{text.replace('-', '−')} ± {half}", half.records)


def _span(values: Iterable[Number], form: str) -> Figure:
  low, high = (cells.number(end(values), form) for end in (min, max))
  return low if low == high else cells.listed((low, high), " to ")


def certificates(results: Results, path: str) -> Part:
  """Shares of the bounds that say something, and of those that fail; medians over the trivial."""
  study, rows = _study(results, path), []
  for i, row in enumerate(study.get("rows")):
    fails = study.number("rows", i, "fails", setting=row["name"])
    figures = [
      cells.number(study.number("rows", i, "bounds"), "{:,.0f}"),
      _below(study, i),
      cells.number(fails, "{:.0f}") if fails == 0 else cells.percent(fails, 1),
    ]
    for key in ("bound_over_trivial", "actual_over_trivial"):
      figures.append(cells.number(study.number("rows", i, key), "{:.2g}"))
    rows.append([row["name"], row["fitted"], *figures])
  head = ("bound on", "fitted to", "bounds", "below the trivial maximum", "fail")
  return cells.table((*head, "median bound", "median actual"), rows, labels=2)


def _below(study: Study, i: int) -> Figure:
  """The share of a row's bounds that say something, and the texts' least to most."""
  row: dict[str, Any] = study.get("rows", i)
  share = cells.percent(study.number("rows", i, "below", setting=row["name"]))
  each = [study.number("rows", i, "below_by_text", t) for t in range(len(row["below_by_text"]))]
  low, high = cells.percent(min(each)), cells.percent(max(each))
  return share if low == high else cells.join("{} ({} to {})", share, low, high)


# ---- keys and values in 8, 4 and 2 bits: what rounding costs two models

SUMMARY = "cpu/quantised/summary.json"
# Of Qwen2.5-Coder-1.5B-Instruct, and the same before keys were rounded less their mean.
LARGER_MODEL, WITHOUT_MEAN = (
  f"cpu/quantised_1.5b/{name}.json" for name in ("summary", "without_mean")
)
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
ENDS = ("mean", "low", "high")


def codes(results: Results) -> Part:
  """Divergence from the full cache, and needles found, of every number of bits."""
  study, places = _summary(results, SUMMARY, "SmolLM2-135M-Instruct")
  rows = []
  for method, label in NAMES.items():
    kl, needle = (places[task, method] for task in ("kl", "needle"))
    found = [study.number(needle, "score", end, setting=method) for end in ENDS]
    rows.append([label, *_divergence(study, kl), _interval(found, ".0f", 100), _n(study, kl)])
  head = ("keys and values", "cache", "KL, nats", "same next token, %", "needles, %", "rows")
  return cells.table(head, rows)


def codes_larger(results: Results) -> Part:
  """Divergence of the 1.5B, with keys rounded less their mean and as they are."""
  (found, places), (before, old) = (
    _summary(results, name, "Qwen2.5-Coder-1.5B-Instruct") for name in (LARGER_MODEL, WITHOUT_MEAN)
  )
  rows = []
  for method, label in NAMES.items():
    if ("kl", method) in places:
      at, was = places["kl", method], old.get(("kl", method))
      earlier = ["–", "–"] if was is None else _divergence(before, was)[1:]
      rows.append([label, *_divergence(found, at), *earlier, _n(found, at)])
  head = ("keys and values", "cache", "KL, nats", "same next token, %")
  return cells.table((*head, "KL without the mean", "same next token, %", "rows"), rows)


def _summary(results: Results, path: str, model: str) -> tuple[Study, dict[tuple[str, str], int]]:
  """A summary, and where each task of a method stands in it."""
  held = results.json(path)
  study = results.study(path, card="CPU", n=held[0]["score"]["n"], setting=model)
  return study, {(entry["task"], entry["method"]): i for i, entry in enumerate(held)}


def _divergence(study: Study, at: int) -> list[Figure]:
  """Bytes kept, the KL to the full cache with its interval, and the share of alike tokens."""
  setting = study.get(at, "method")
  kl = [study.number(at, "also", "kl", end, setting=setting) for end in ENDS]
  same = study.number(at, "score", "mean", setting=setting)
  share = study.number(at, "share", setting=setting)
  return [cells.percent(share), _interval(kl, ".2g"), cells.number(100 * same, "{:.1f}")]


def _interval(found: list[Number], form: str, unit: float = 1) -> Figure:
  return Figure(scored.interval(*found, form, unit), records.of(*found))


def _n(study: Study, at: int) -> Figure:
  return cells.number(study.number(at, "score", "n"), "{:.0f}")


# ---- figures in sentences

CERTIFIED = {
  "drift": ("sharing, Δ_att by the drift's bound", "–"),
  "psaw": ("window (PSAW)", "another text"),
  "etf": ("freezing (ETF), keys projected", "another text"),
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
      found[f"{label}-certified"] = f"`{study.get('n')}`"
      places = {(row["name"], row["fitted"]): i for i, row in enumerate(study.get("rows"))}
      for name, bound in CERTIFIED.items():
        if bound in places:
          found[f"{label}-{name}"] = _below(study, places[bound])
  return found


def _shared(study: Study) -> dict[str, str]:
  """The table's samples, what methods attend to, and what CIS retrieves for that."""
  seen = {
    line.split(",")[0]: [study.number("found", line, point, "visited", "mean") for point in points]
    for line, points in study.get("found").items()
  }
  kept = [
    study.number("retrieved_tokens", line, point)
    for line, points in study.get("retrieved_tokens").items()
    for point in points
  ]
  paper = "CIS, s = 16", "τ = 0.8"
  of_paper: dict[str, str] = {}
  if paper[1] in study.get("found").get(paper[0], ()):
    of_paper = {
      "retrieved": _within(study, *paper, "retrieved", SHARED["retrieved"]),
      "ahead": _within(study, *paper, "overlap ahead", AHEAD["overlap ahead"]),
    }
  return of_paper | {
    "n": f"`{study.get('n').replace('text(s)', 'texts')}`",
    "texts": ", ".join(f"`{text}`" for text in study.get("texts")),
    "length": cells.number(study.number("length"), "{:,.0f}"),
    "cis": _span(seen["CIS"], "{:.1f}"),
    "hshare": _span(seen["HShare"], "{:.1f}"),
    "tokens": _span(kept, "{:.0f}"),
  }
