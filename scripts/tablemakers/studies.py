"""Studies on the models' own activations: needles, foresight, shared selections, certificates."""

from . import cells
from .results import GPU, Results

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


def short_needles(results: Results) -> list[str]:
  return _needles(results, "cpu/needles/needles.txt")


def long_needles(results: Results) -> list[str]:
  return _needles(results, f"{GPU}/needles/needles.txt")


def real_needles(results: Results) -> list[str]:
  return _if_there(results, f"{GPU}/real/needles/needles.txt")


def stream_needles(results: Results) -> list[str]:
  return _if_there(results, f"{GPU}/real/stream/needles.txt")


def _if_there(results: Results, path: str) -> list[str]:
  return _needles(results, path) if (results.folder / path).is_file() else []


def _needles(results: Results, path: str) -> list[str]:
  """Runs of before recall stood beside chance have a column less."""
  rows, columns = results.columns(path), ("method", "right", "needle recall", "best layer")
  if len(rows[0]) == len(columns) + 1:
    columns = (*columns[:3], "by chance", columns[3])
  for row in rows:
    if len(row) != len(columns):
      raise ValueError(f"{path}: found a row {row}, expected {', '.join(columns)}")
    name, comma, rest = row[0].partition(",")
    row[0] = f"`{name}`{comma}{rest}"
  return cells.table(columns, rows)


def foresight(results: Results) -> list[str]:
  bases = [results.json(HITS, "bases", base) for base in BASES]
  again = [cells.percent(base[next(iter(PREDICTORS))]["reuse"]) for base in bases]
  rows = [["selected again in the next step", *again]]
  for name, label in PREDICTORS.items():
    found = [results.json(HITS, "bases", base, name) for base in BASES]
    shares = [
      f"{cells.percent(each['hit_rate'])} ({cells.percent(each['weighted_hit_rate'])})"
      for each in found
    ]
    rows.append([label, *shares])
  head = (
    "63 of 504 pages of 16 (Quest), 16 of 252 blocks of 32 (InfLLM-v2)",
    *("Quest", "InfLLM-v2"),
  )
  return cells.table(head, rows)


def sharing(results: Results) -> list[str]:
  return _sharing(results, SHARING)


def long_sharing(results: Results) -> list[str]:
  return _sharing(results, LONG_SHARING)


def _sharing(results: Results, path: str) -> list[str]:
  """Settings by method from the fewest retrievals to the most; what CIS is ahead by."""
  rows = []
  for line, points in results.json(path, "found").items():
    for point, found in sorted(points.items(), key=lambda named: named[1]["retrieved"]["mean"]):
      figures = [_within(found[name], form) for name, form in SHARED.items()]
      ahead = [_within(found.get(f"{name} ahead"), f"+{SHARED[name]}") for name in AHEAD]
      rows.append([f"{line}, {point}", *figures, *ahead])
  head = ("", "ρ̂", "tokens a head", "overlap", "dropped")
  return cells.table((*head, "overlap less HShare's", "dropped less HShare's"), rows)


def _within(found: dict[str, float] | None, form: str) -> str:
  """A mean and half the width of its interval."""
  if found is None:
    return ""
  text = f"{found['mean']:{form}}".replace("-", "−")
  return f"{text} ± {found['high'] - found['mean']:{form.lstrip('+')}}"


def shared(results: Results) -> list[str]:
  return _shared(results, SHARING)


def long_shared(results: Results) -> list[str]:
  return _shared(results, LONG_SHARING)


def _shared(results: Results, path: str) -> list[str]:
  """What the table is of, and what CIS attended to."""
  report = results.json(path)
  texts, tokens = report["texts"], []
  for line, points in report["found"].items():
    low, high = (f"{end(p['visited']['mean'] for p in points.values()):.1f}" for end in (min, max))
    tokens.append(f"{line} attends to {low if low == high else f'{low} to {high}'} tokens a head")
  kept = [x for points in report["retrieved_tokens"].values() for x in points.values()]
  return cells.sentence(
    f"{report['n'].replace('text(s)', 'texts')} ({', '.join(texts)}; {report['length']:,} tokens "
    f"read). {'; '.join(tokens)}. For that CIS retrieves {min(kept)} to {max(kept)} tokens."
  )


def certificates(results: Results) -> list[str]:
  return _certificates(results, CERTIFICATES)


def larger_certificates(results: Results) -> list[str]:
  return _certificates(results, LARGER)


def _certificates(results: Results, path: str) -> list[str]:
  """Shares of the bounds that say something, and of those that fail."""
  rows = []
  for row in results.json(path, "rows"):
    low, high = (cells.percent(end(row["below_by_text"])) for end in (min, max))
    below = cells.percent(row["below"])
    fails = row["fails"]
    rows.append(
      [
        row["name"],
        row["fitted"],
        f"{row['bounds']:,}",
        below if low == high else f"{below} ({low} to {high})",
        "0" if fails == 0 else cells.percent(fails, 1),
        f"{row['bound_over_trivial']:.2g}",
        f"{row['actual_over_trivial']:.2g}",
      ]
    )
  head = ("bound on", "fitted to", "bounds", "below the trivial maximum", "fail")
  return cells.table((*head, "median bound", "median actual"), rows)


def certified(results: Results) -> list[str]:
  """What the table is of."""
  return cells.sentence(results.json(CERTIFICATES, "n") + ".")


def larger_certified(results: Results) -> list[str]:
  return cells.sentence(results.json(LARGER, "n") + ".")
