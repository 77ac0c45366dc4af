"""Studies on the models' own activations: foresight, shared selections, certificates."""

from collections.abc import Iterable
from typing import Any

from scripts.tools.tablemakers import cells
from scripts.tools.tablemakers.records import Figure, Number, Part
from scripts.tools.tablemakers.results import GPU, Results, Study

HITS = f"{GPU}/prr_hits.json"
BASES = ("Quest, 63 + 1 of pages of 16", "InfLLM-v2, 16 + 1 + 4 of blocks of 32")
PREDICTORS = {
  "last step's": "the last step's tiles",
  "ema, ρ = 1": "EMA, ρ = 1",
  "holt, ρ = 1": "Holt, ρ = 1",
  "holt, ρ = 1.25": "Holt, ρ = 1.25",
  "holt, ρ = 1.5": "Holt, ρ = 1.5",
}
CERTIFICATES = "cpu/certificates/certificates.json"
LARGER = "cpu/certificates_1.5b/certificates.json"
SHARING, LONG_SHARING = "cpu/sharing/sharing.json", f"{GPU}/real/sharing/sharing.json"
SHARED = {"retrieved": ".2f", "visited": ".1f", "overlap": ".3f", "dropped": ".3f"}
AHEAD = ("overlap", "dropped")


def hits(results: Results) -> Study:
  """PRR's hit rates, on the texts that α, β, γ were searched on, a step later."""
  about = results.json(HITS)
  setting = f"{about['model']}; {about['texts']}; {about['n']}"
  fitted = f"α, β, γ: on {about['calibrated on']}"
  texts = len(about["texts"].split("(")[0].split(","))
  return results.study(HITS, card=about["device"], n=texts, setting=setting, fitted=fitted)


def hit(study: Study, base: str, name: str) -> Figure:
  """Share of the tiles chosen by score that were foreseen; weighted by the score in brackets."""
  share, weighted = (study.number("bases", base, name, key) for key in HIT_RATES)
  return cells.join("{} ({})", cells.percent(share), cells.percent(weighted))


HIT_RATES = ("hit_rate", "weighted_hit_rate")


def foresight(results: Results) -> Part:
  study, first = hits(results), next(iter(PREDICTORS))
  again = [cells.percent(study.number("bases", base, first, "reuse")) for base in BASES]
  rows = [["of a step's tiles, listed by the last one (its newest tile too)", *again]]
  for name, label in PREDICTORS.items():
    rows.append([label, *(hit(study, base, name) for base in BASES)])
  head = "63 of 504 pages of 16 (Quest), 16 of 252 blocks of 32 (InfLLM-v2)"
  return cells.table((head, "Quest", "InfLLM-v2"), rows)


# ---- shared selections


def study_of(results: Results, path: str) -> Study:
  held = results.json(path)
  device, texts = held["about"]["device"], held.get("texts") or held["starts"]
  card = "CPU" if device == "cpu" else device
  setting = f"{held['about'].get('model', 'Qwen2.5-Coder-1.5B-Instruct')}; {held['n']}"
  return results.study(path, card=card, n=len(texts), setting=setting)


def sharing(results: Results) -> Part:
  return _sharing(study_of(results, SHARING))


def long_sharing(results: Results) -> Part:
  return _sharing(study_of(results, LONG_SHARING))


def _sharing(study: Study) -> Part:
  """Settings by method from the fewest retrievals to the most; what CIS is ahead by."""
  rows = []
  for line, points in study.get("found").items():
    for point in sorted(points, key=lambda point: points[point]["retrieved"]["mean"]):
      figures = [within(study, line, point, name, form) for name, form in SHARED.items()]
      ahead = [within(study, line, point, f"{name} ahead", f"+{SHARED[name]}") for name in AHEAD]
      rows.append([f"{line}, {point}", *figures, *ahead])
  head = ("", "ρ̂", "tokens a head", "overlap", "dropped")
  return cells.table((*head, "overlap less HShare's", "dropped less HShare's"), rows)


def within(study: Study, line: str, point: str, name: str, form: str) -> Figure:
  """A mean and half the width of its interval."""
  if study.get("found", line, point).get(name) is None:
    return Figure("", ())
  keys = ("found", line, point, name)
  mean, high = (study.number(*keys, end, setting=f"{line}, {point}") for end in ("mean", "high"))
  text = f"{float(mean):{form}}".replace("-", "−")
  return Figure(f"{text} ± {high - mean:{form.lstrip('+')}}", (*mean.records, *high.records))


def shared(results: Results) -> Part:
  return _shared(study_of(results, SHARING))


def long_shared(results: Results) -> Part:
  return _shared(study_of(results, LONG_SHARING))


def _shared(study: Study) -> Part:
  """What the table is of, and what CIS attended to."""
  texts, tokens = ", ".join(f"`{text}`" for text in study.get("texts")), []
  for line, points in study.get("found").items():
    seen = [study.number("found", line, point, "visited", "mean") for point in points]
    tokens.append(
      cells.join(f"{line.replace('16', '`16`')} attends to {{}} tokens a head", _span(seen, ".1f"))
    )
  named = study.get("retrieved_tokens")
  kept = [study.number("retrieved_tokens", x, point) for x in named for point in named[x]]
  return cells.sentence(
    f"`{study.get('n').replace('text(s)', 'texts')}` ({texts}; {{}} tokens read). {{}}. For that "
    "CIS retrieves {} tokens.",
    cells.number(study.number("length"), "{:,.0f}"),
    cells.listed(tokens, "; "),
    _span(kept, ".0f"),
  )


def _span(values: Iterable[Number], form: str) -> Figure:
  ends = [cells.number(end(values), f"{{:{form}}}") for end in (min, max)]
  return ends[0] if ends[0] == ends[1] else cells.listed(ends, " to ")


# ---- certificates


def certificates(results: Results) -> Part:
  return _certificates(study_of(results, CERTIFICATES))


def larger_certificates(results: Results) -> Part:
  return _certificates(study_of(results, LARGER))


def _certificates(study: Study) -> Part:
  """Shares of the bounds that say something, and of those that fail."""
  rows = []
  for i, row in enumerate(study.get("rows")):
    fails = study.number("rows", i, "fails", setting=row["name"])
    rows.append(
      [
        row["name"],
        row["fitted"],
        cells.number(study.number("rows", i, "bounds"), "{:,.0f}"),
        below(study, i),
        cells.number(fails, "{:.0f}") if fails == 0 else cells.percent(fails, 1),
        *(cells.number(study.number("rows", i, key), "{:.2g}") for key in OVER_TRIVIAL),
      ]
    )
  head = ("bound on", "fitted to", "bounds", "below the trivial maximum", "fail")
  return cells.table((*head, "median bound", "median actual"), rows, labels=2)


OVER_TRIVIAL = ("bound_over_trivial", "actual_over_trivial")


def below(study: Study, i: int) -> Figure:
  """The share of a row's bounds that say something, and the texts' least to most."""
  row: dict[str, Any] = study.get("rows", i)
  share = cells.percent(study.number("rows", i, "below", setting=row["name"]))
  each = [study.number("rows", i, "below_by_text", t) for t in range(len(row["below_by_text"]))]
  low, high = (cells.percent(end(each)) for end in (min, max))
  return share if low == high else cells.join("{} ({} to {})", share, low, high)


def certified(results: Results) -> Part:
  """What the table is of."""
  return cells.sentence(f"`{results.json(CERTIFICATES, 'n')}`.")


def larger_certified(results: Results) -> Part:
  return cells.sentence(f"`{results.json(LARGER, 'n')}`.")
