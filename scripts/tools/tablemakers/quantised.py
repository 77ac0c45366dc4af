"""Keys and values in 8, 4 and 2 bits: what rounding costs two models."""

from scripts.tools.tablemakers import cells, scored
from scripts.tools.tablemakers.records import Figure, Number, Part
from scripts.tools.tablemakers.results import Results, Study

SUMMARY = "cpu/quantised/summary.json"
# Of Qwen2.5-Coder-1.5B-Instruct, and the same before keys were rounded less their mean.
LARGER, WITHOUT_MEAN = (f"cpu/quantised_1.5b/{name}.json" for name in ("summary", "without_mean"))
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


def evaluation(results: Results) -> Part:
  """Divergence from the full cache, and needles found, of every number of bits."""
  study, places = _summary(results, SUMMARY, "SmolLM2-135M-Instruct")
  rows = []
  for method, label in NAMES.items():
    kl, needle = (places[task, method] for task in ("kl", "needle"))
    found = [study.number(needle, "score", end, setting=method) for end in ENDS]
    rows.append([label, *_divergence(study, kl), scored.shares(*found), _n(study, kl)])
  head = ("keys and values", "cache", "KL, nats", "same next token, %", "needles, %", "rows")
  return cells.table(head, rows)


def larger(results: Results) -> Part:
  """Divergence of the 1.5B, with keys rounded less their mean and as they are."""
  (found, places), (before, old) = (
    _summary(results, name, "Qwen2.5-Coder-1.5B-Instruct") for name in (LARGER, WITHOUT_MEAN)
  )
  rows = []
  for method, label in NAMES.items():
    if ("kl", method) in places:
      at, was = places["kl", method], old.get(("kl", method))
      earlier = ["–", "–"] if was is None else _divergence(before, was)[1:]
      rows.append([label, *_divergence(found, at), *earlier, _n(found, at)])
  head = ("keys and values", "cache", "KL, nats", "same next token, %")
  return cells.table((*head, "KL without the mean", "same next token, %", "rows"), rows)


ENDS = ("mean", "low", "high")


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
  return [
    cells.percent(share),
    scored.span(*kl),
    cells.number(Number(100 * same, *same.records), "{:.1f}"),
  ]


def _n(study: Study, at: int) -> Figure:
  return cells.number(study.number(at, "score", "n"), "{:.0f}")


def kernels(results: Results) -> Part:
  """Decode over codes, whole and listed, beside the same over bfloat16."""
  rows = []
  for case in results.bench("quantised").cases(r"^(listed )?int\d B"):
    base = "sparse decode" if case.name.startswith("listed") else "dense decode"
    ours, other, read = (case.time(name) for name in ("kvjax", base, "read"))
    rows.append(
      [
        case.name.replace("int", "").replace(" B", " bits, B", 1),
        cells.ours(ours),
        cells.time(other),
        cells.ratio(*cells.gain(ours, other)),
        cells.ratio(*cells.gain(ours, read)),
      ]
    )
  return cells.table(("", "codes", "bfloat16", "times as fast", "share of read"), rows)


def steps(results: Results) -> Part:
  """Whole steps under codes, beside the full cache."""
  rows = []
  for case in results.bench("quantised").cases("Llama"):
    ours, full = case.time("kvjax"), case.time("Full")
    (limit,) = case.numbers(r"of what the bytes allow \(([\d.]+) ×")
    name = case.name.replace("int", "").replace(" ", " bits, ", 1)
    faster = cells.ratio(*cells.gain(ours, full))
    rows.append([name, cells.ours(ours), cells.time(full), faster, cells.number(limit)])
  return cells.table(("", "codes", "full cache", "times as fast", "bytes allow"), rows)


def in_short(results: Results) -> Figure:
  """The kernel at B8 T32K, and a whole step."""
  bench = results.bench("quantised")
  parts = []
  for bits in (8, 4):
    case = bench.case(f"int{bits} B8 T32K 8x4")
    faster = cells.ratio(*cells.gain(case.time("kvjax"), case.time("dense decode")))
    parts.append(cells.join(f"decode over int{bits} {{}} × bfloat16's at B8 T32K", faster))
  step = bench.case("int8 Llama-3.1-8B B8 T32K")
  faster = cells.ratio(*cells.gain(step.time("kvjax"), step.time("Full")))
  return cells.listed([*parts, cells.join("the 8B step over int8 {} ×", faster)], "; ")
