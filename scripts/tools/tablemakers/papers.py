"""Beside the papers: their headline figures and ours, each with its source.

The papers' are kept in papers.json, ours are made from the result files. Why they differ stands on
the pages.
"""

from collections.abc import Callable, Sequence

from kvjax.programs.evals.standing import standings
from scripts.tools.tablemakers import (
  art,
  cells,
  longflow,
  needles,
  prr,
  real,
  real_stops,
  selection,
  streams,
  studies,
)
from scripts.tools.tablemakers.records import NOTHING, Figure, Part, Record
from scripts.tools.tablemakers.results import Case, Maker, Results, Timing

FILE = "papers.json"
SHORT, LONG = real.LENGTHS
OPEN = "not measured yet"


def beside(page: str, ours: Callable[[Results], Sequence[str]]) -> Maker:
  """The maker of a page's first table; `ours` gives a cell for each of the paper's figures."""

  def made(results: Results) -> Part:
    theirs = results.json(FILE, "pages", page)
    rows = []
    for i, (row, here) in enumerate(zip(theirs, ours(results), strict=True)):
      place, setting = ("pages", page, i, "figure"), f"{row['what']}, {row['where']}"
      record = Record(FILE, place, row["card"], 1, setting, NOTHING)
      rows.append([row["what"], row["where"], Figure(row["figure"], (record,)), here])
    return cells.table(("", "where", "the paper", "here"), rows, labels=2)

  return made


def _times(slow: Timing, fast: Timing) -> Figure:
  """Two times, and how many times as fast the second is."""
  return cells.join(
    "{} → {}, {} ×", cells.time(slow), cells.time(fast), cells.ratio(*cells.gain(fast, slow))
  )


def _mean(found: real.Held, length: int, method: str, budget: int | None = None) -> Figure:
  whole = found.standing(length)
  assert whole
  return found.rows.mean(whole, whole.by[method, budget])


def _of_art(results: Results) -> list[str]:
  bench = results.bench("art_e2e")
  full, fifth = (
    art.gains(bench.case(f"{base} {art.MODEL} B8 T32K"), base) for base in ("Full", "SnapKV 0.2")
  )
  check = results.bench("art").case("p=inf B8 T32K 8x4")
  held = real.held(results)
  assert held
  short, long = (
    real_stops.studies(results)[f"{n} tokens, newest tile first"] for n in ("8,192", "16,384")
  )
  walk = art.stopped(long, "tau 1e-05, 1 splits")
  agreed = [short.number("agreement", "1e-05", "all", x) for x in ("agree", "agree_of_ended")]
  return [
    cells.join(
      "{} that the bytes allow; {} with the paper's share of stops (8B shape, B8 T32K)", *full[1::2]
    ),
    cells.join("{} → {} (8B shape, B8 T32K)", *fifth[:2]),
    cells.join(
      "{} over the same walk that does not look (B8 T32K); {}",
      art.paired(check, art.BLIND),
      art.cost(results),
    ),
    cells.join("a query head reads {}, a group {} (1.5B, 16K)", walk[0], walk[3]),
    cells.join("{} → {} (four tasks, 1.5B)", _mean(held, SHORT, "full"), _mean(held, SHORT, "art")),
    *(_needles(held, length) for length in real.LENGTHS),
    cells.join(
      "{} of all walks, {} of those that either ends (1.5B, all layers)",
      *(cells.percent(x, 1) for x in agreed),
    ),
  ]


def _needles(held: real.Held, length: int) -> Figure:
  """Of many keys: the full cache, the paper's τ and a larger one."""
  whole, task = held.standing(length), "niah_multikey_1"
  assert whole
  ones = [whole.by[name, None] for name in ("full", "art", "art:tau=0.01")]
  ours = [held.rows.score(whole, one, task) for one in ones]
  return cells.join(f"{{}} → {{}}, at τ = `0.01` {{}} (`{task}`, 1.5B)", *ours)


def _of_prr(results: Results) -> list[str]:
  every = prr.every(results).values()
  first = prr.shape(results, "8B", 1, "16K")
  selected = [
    cells.time(prr.shape(results, "GLM-4-9B-like", 1, n).time("select")) for n in ("16K", "512K")
  ]
  stages = [
    cells.ratio(*cells.gain(first.time(name), first.time("serial")))
    for name in ("prr, S1", "prr, S2", "prr")
  ]
  peers = [prr.over_peers(case) for case in every if case.has(prr.PEERS[-1])]
  study = studies.hits(results)
  again = [
    cells.percent(study.number("bases", base, "last step's", "reuse")) for base in studies.BASES
  ]
  hits = [
    studies.hit(study, base, f"holt, ρ = {r}") for r in ("1", "1.5") for base in studies.BASES
  ]
  calibrated = results.bench("prr").case("calibration 8B B1 T16K 1024x16")
  return [
    cells.join(
      "a layer's attention {}; a token over random queries at ρ = `1.25` {}",
      cells.span(map(prr.gain, every)),
      _whole(results, "ρ = 1.25"),
    ),
    cells.join("{}, {} a layer (GLM-4-9B's heads, B1)", *selected),
    cells.join("{}: the kernels' gain, not speculation's", cells.span(peers, "{:.1f}", " ×")),
    cells.join("{} (8B heads, Quest, B1 T16K)", cells.listed(stages)),
    _sparse(results, 1024),
    _sparse(results, 8192),
    cells.join("{} (Quest), {} (InfLLM-v2) (1.5B)", *again),
    cells.join(
      "{} (Quest), {} (InfLLM-v2) at ρ = `1`; {}, {} at `1.5`; weighted by the score in brackets",
      *hits,
    ),
    cells.join(
      "{} a layer, on the GPU after the prompt; {} without the search",
      *(cells.time(calibrated.time(name)) for name in ("searched", "followed")),
    ),
  ]


def _whole(results: Results, name: str) -> Figure:
  """Whole steps over selecting first, of all lengths."""
  cases = results.bench("e2e_sparse").cases(r"^PRR Llama-3\.1-8B B1 T")
  return cells.span((cells.gain(c.time(name), c.time("serial")) for c in cases), "{:.3f}", " ×")


def _sparse(results: Results, budget: int) -> Figure:
  cases = results.bench("sparse").cases(rf"^block \d+ budget {budget}$")
  return cells.span(
    cells.gain(case.time("kvjax"), case.time(selection.BLOCK_SPARSE)) for case in cases
  )


def _of_prhs(results: Results) -> list[str]:
  held = real.held(results)
  assert held
  scores = [_mean(held, SHORT, name, 1024) for name in ("cis", "cpe", "hshare")]
  steps = [
    cells.ratio(*selection.over_full(selection.step(results, "CPE", batch))) for batch in (1, 4)
  ]
  both = [studies.study_of(results, path) for path in (studies.SHARING, studies.LONG_SHARING)]
  share, ahead = (
    [studies.within(study, "CIS, s = 16", "τ = 0.8", name, form) for study in both]
    for name, form in (("retrieved", ".2f"), ("overlap ahead", "+.3f"))
  )
  prompt = results.bench("prefill").case("model 32K")
  (saved,) = prompt.numbers(r"saves ([\d.]+) of the operations")
  fall = 1 - prompt.time("kvjax").us / prompt.time("Full").us
  less = cells.worked_out(100 * fall, "{:.1f} %", prompt.time("kvjax"), prompt.time("Full"))
  return [
    *(_attention(results, tokens) for tokens in (2048, 4096)),
    cells.join(
      "{} of clustered keys, {} of random ones (B8 T4K)",
      *(_visited(results, keys) for keys in ("clustered", "random")),
    ),
    cells.join(
      "{} and {} at B1 and B4, `τ = −1`: always shared (8B shape, T128K); with τ = `0.8` after "
      "real text a step takes {} of the full cache's time (1.5B, 8K, B8)",
      *steps,
      _step(held, "cpe"),
    ),
    cells.join("{} (SmolLM2, groups of three), {} (1.5B, groups of six)", *share),
    cells.join("{} (SmolLM2), {} (1.5B)", *ahead),
    cells.join("{} → {}, {}, {} (four tasks, 1.5B, 8K)", _mean(held, SHORT, "full"), *scores),
    cells.join("a prompt of T32K: {} less work, {} less time", cells.percent(saved, 1), less),
    _certified(results),
  ]


def _step(held: real.Held, method: str) -> Figure:
  board = held.at(SHORT)[-1]
  point = next(point for point in board.points if point.method == method)
  return cells.ratio(*cells.over(held.time(point.cost), held.time(board.full.cost)))


def _certified(results: Results) -> Figure:
  """Shares of the bounds that are below the trivial maximum, of both models."""
  labels = {
    "sharing, Δ_att by the drift's bound": ("sharing", "–"),
    "window (PSAW)": ("PSAW's window", "another text"),
    "freezing (ETF), keys projected": ("ETF's freezing", "another text"),
  }
  parts = []
  for name, (said, fitted) in labels.items():
    found = []
    for path in (studies.CERTIFICATES, studies.LARGER):
      study = studies.study_of(results, path)
      rows = study.get("rows")
      i = next(i for i, x in enumerate(rows) if (x["name"], x["fitted"]) == (name, fitted))
      found.append(studies.below(study, i))
    parts.append(cells.join(f"{said} {{}} and {{}}", *found))
  return cells.join("{} (SmolLM2 and 1.5B)", cells.listed(parts, "; "))


def _attention(results: Results, tokens: int) -> Figure:
  case = results.bench("cpe").case(f"B16 T{tokens} 32x1 1/8, clustered keys")
  ours, flash = case.time("kvjax"), case.time("torch flash")
  over = cells.ratio(*cells.gain(ours, flash))
  return cells.join(
    "{}; {} over flash; CIS's lists, keys with a cosine of `0.95`",
    _times(case.time("dense decode"), ours),
    over,
  )


def _visited(results: Results, keys: str) -> Figure:
  case: Case = results.bench("cpe").case(f"B8 T4096 32x1 1/8, {keys} keys")
  (visited,) = case.numbers(r"([\d.]+) tokens a head at a budget")
  return cells.number(visited, "{:.0f}")


def _of_longflow(results: Results) -> list[str]:
  case = results.bench("longflow").case(longflow.ANSWER)
  rates = [case.remark("^" + name + longflow.RATE)[1] for name in ("LongFlow", "Full")]
  ours, full = (cells.read(rate) for rate in rates)
  sizes = case.numbers(r"Cache of a row ([\d.]+) MiB against ([\d.]+)")
  step = results.bench("longflow").case("step B128 S3200 8x4")
  return [
    cells.join("{} ({} and {})", cells.worked_out(ours / full, "{:.1f}", ours, full), *rates),
    cells.join(
      "{}, a layer; H2O as its reference, compiled by XLA, without kernels",
      _times(step.time("H2O in XLA"), step.time("kvjax")),
    ),
    cells.join(
      "{} smaller ({} of {} a row)",
      cells.worked_out(100 * (1 - sizes[0] / sizes[1]), "{:.0f} %", *sizes),
      *(cells.number(size, "{:,.0f} MiB") for size in sizes),
    ),
    _answers(results),
  ]


def _answers(results: Results) -> Figure:
  held = real.held(results)
  assert held
  rows = [r for r in results.rows(real.FOLDER) if r["task"] == real.ANSWERS]
  (whole,) = standings(rows)
  said = [held.rows.mean(whole, whole.full)]
  for budget in (512, 256):
    one = whole.by["longflow", budget]
    said += [held.rows.mean(whole, one), held.rows.gap(whole, one)]
  return cells.join("{} → {}, {} at `512`; {}, {} at `256`, both below the prompt (1.5B)", *said)


def _of_ltri(results: Results) -> list[str]:
  whole = streams.whole(results)
  runs = {"2K": needles.SHORT, "8K": needles.LONG}
  injected = [
    cells.join(f"{{}} → {{}} at {length}", *(needles.right(results, run, x) for x in INJECTED))
    for length, run in runs.items()
  ]
  return [
    streams.vectors(results),
    cells.join(
      "`1,048,576` random tokens at {} a second, {} a token at the end, {}",
      streams.rates(whole),
      cells.time(whole.time(f"token at {streams.MARKS[-1]}")),
      streams.in_use(whole),
    ),
    cells.join("{} right (SmolLM2)", cells.listed(injected)),
    cells.join(
      "InfLLM {}, Ltri-LLM {} of T8K with four blocks (1.5B)",
      *(needles.right(results, needles.REAL, name) for name in ("infllm", "ltri")),
    ),
    cells.join(
      "all heads {}, not persistent {}, no voting {}; whole {} (1.5B)",
      *(needles.right(results, needles.REAL, name) for name in PARTS),
    ),
    OPEN,
  ]


INJECTED = ("infllm", "infllm, injected")
PARTS = ("ltri, all heads", "ltri, not persistent", "ltri, no voting", "ltri")
of_art, of_prr, of_prhs, of_longflow, of_ltri = (
  beside(page, ours)
  for page, ours in (
    ("art", _of_art),
    ("prr", _of_prr),
    ("prhs", _of_prhs),
    ("longflow", _of_longflow),
    ("ltri", _of_ltri),
  )
)
