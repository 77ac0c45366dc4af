"""Beside the papers: their headline figures, ours from the result files, and why they differ.

The papers' figures are fixed, with the table or figure that has them. Ours are those of the tables
further down each page, found there by their rows, or are made from the same cases.
"""

from collections.abc import Sequence

from . import (
  art,
  cells,
  evaluations,
  longflow,
  prompts,
  prr,
  real,
  real_stops,
  selection,
  streams,
  studies,
)
from .results import Case, Results, Timing

HEAD = ("", "the paper", "here", "why they differ")
SHORT, LONG = real.LENGTHS
SHARING = studies.sharing, studies.long_sharing  # of SmolLM2, of the 1.5B
NEWEST = "tokens, newest tile first"
DENSE_BYTES = 16 * 2048 * 32 * 2 * 128 * 2  # keys and values of a layer of LLaMA-2-7B, B16 T2K


def quoted(lines: Sequence[str], *label: str) -> dict[str, str]:
  """The row of a table that begins with a label, by the head's names; of two alike the first.

  Raises:
    ValueError: there is no such row.
  """
  rows = [[cell.strip() for cell in x.strip("|").split("|")] for x in lines if x.startswith("|")]
  for row in rows[2:]:
    if tuple(row[: len(label)]) == label:
      return {name: cell.strip("*") for name, cell in zip(rows[0][::-1], row[::-1], strict=True)}
  firsts = [", ".join(row[: len(label)]) for row in rows[2:]]
  raise ValueError(f"found no row {', '.join(label)!r}, expected it among {firsts}")


def _table(rows: Sequence[tuple[str, str, str, str]]) -> list[str]:
  return cells.table(HEAD, rows)


def _times(slow: Timing, fast: Timing) -> str:
  """Two times, and how many times as fast the second is."""
  return f"{cells.time(slow)} → {cells.time(fast)}, {cells.ratio(slow.us / fast.us, slow)} ×"


# ---- ART


def of_art(results: Results) -> list[str]:
  whole, fifth = (
    quoted(art.steps(results), f"B8 T32K, {base}") for base in ("Full", "SnapKV, a fifth")
  )
  forced = whole["ART, paper's share"]
  checked = quoted(art.endless(results), "B8 T32K")["ART is slower by"]
  read = quoted(real_stops.stops(results), f"16,384 {NEWEST}", "1e-5")
  loose = quoted(real_stops.stops(results), f"16,384 {NEWEST}", "0.01")
  probe = results.json(real_stops.STUDY.format(SHORT).format("newest"), "agreement", "1e-05", "all")
  scores = real.by_length(SHORT)(results)
  kept = quoted(scores, "`art`")
  return _table(
    [
      (
        "a token, over the full cache",
        "1.16 × (Mistral-7B), 1.15 × (Llama-3.1-70B) (Tab. 1)",
        f"{whole['ART, τ = 1e-5']} that the bytes allow; {forced} with the "
        "paper's share of stops (8B shape, B8 T32K)",
        "Forced to stop as there, it gains nearly as much. By themselves SmolLM2's heads, whose "
        "stops the first figure has, spare next to nothing at τ = 1e-5",
      ),
      (
        "a token over the full cache's, SnapKV at a fifth",
        "1.47 → 1.58 × (Llama-3.1-70B) (Tab. 1)",
        f"{fifth['base']} → {fifth['ART, τ = 1e-5']} (8B shape, B8 T32K)",
        "A fifth of 32K tokens in four walks a head is 13 tiles each, beside a patience of five",
      ),
      (
        "the check alone, p = ∞",
        "+1.3 % of the kernel (Tab. 6)",
        f"{checked} (B8 T32K)",
        f"In the kernel none shows; looking in vain costs {art.cost(results)}",
      ),
      (
        "what is left of the walk at τ = 1e-5",
        "0.81 of the kernel's time: 0.633 of 0.78 ms (Tab. 3, 6)",
        f"a query head reads {read['read, a query head']}, a group of six {read['read, a group']}; "
        f"at τ = 0.01 {loose['read, a query head']} and {loose['read, a group']} "
        "(Qwen2.5-Coder-1.5B, 16K)",
        "Heads share what is loaded, so that a group waits for its last one; single heads of these "
        "models seldom stop either",
      ),
      (
        "quality, τ = 1e-5",
        "LongBench 46.29 → 45.74 (Mistral-7B) (Tab. 1)",
        f"{quoted(scores, '`full`')['mean']} → {kept['mean']}, KL {kept['KL, nats']} "
        "(four tasks, Qwen2.5-Coder-1.5B, 8K)",
        "Nothing is lost, as next to nothing is left out",
      ),
      (
        "needles, newest tile first",
        "99.88 → 95.24 at 8K, 99.34 → 78.65 at 32K (eight tasks, Qwen3-8B) (Tab. 2)",
        "; ".join(_needles(results, length) for length in real.LENGTHS)
        + " (`niah_multikey_1`, 1.5B)",
        "Where walks end, what lies far back is missed, as the paper says (§4.3); here they end at "
        "τ = 0.01 only",
      ),
      (
        "probe and oracle alike, 8K",
        "99.88 % (last layer, Qwen3-8B) (Tab. 4)",
        f"{cells.percent(probe['agree'], 1)} of all walks, "
        f"{cells.percent(probe['agree_of_ended'], 1)} of those that either ends (1.5B, all layers)",
        "Walks that neither ends count as alike; where 128 dimensions move, 32 may be calm",
      ),
    ]
  )


def _needles(results: Results, length: int) -> str:
  """Of many keys: the full cache, the paper's τ and a larger one."""
  found = real.by_length(length)(results)
  ours = [
    quoted(found, f"`{name}`")["`niah_multikey_1`"] for name in ("full", "art", "art:tau=0.01")
  ]
  return f"{length >> 10}K: {ours[0]} → {ours[1]}, at τ = 0.01 {ours[2]}"


# ---- PRR


def of_prr(results: Results) -> list[str]:
  every = prr.every(results).values()
  first = prr.shape(results, "8B", 1, "16K")
  select, longest = (
    prr.shape(results, "GLM-4-9B-like", 1, n).time("select") for n in ("16K", "512K")
  )
  serial = first.time("serial")
  stages = [first.time(name) for name in ("prr, S1", "prr, S2", "prr")]
  gained = ", ".join(cells.ratio(serial.us / stage.us, serial) for stage in stages)
  peers = [prr.over_peers(case) for case in every if case.has(prr.PEERS[-1])]
  again = quoted(studies.foresight(results), "selected again in the next step")
  forecast, slack, more = (
    quoted(studies.foresight(results), f"Holt, ρ = {ratio}") for ratio in ("1", "1.25", "1.5")
  )
  calibrated = quoted(prr.calibration(results), "T16K")
  searched = calibrated["a layer's calibration"]
  return _table(
    [
      (
        "over selecting first",
        "1.28 to 1.42 × (Quest), 1.31 to 1.56 × (InfLLM-v2), a token, means of six models (Tab. 1)",
        f"a layer's attention {cells.span(map(prr.gain, every), unit=' ×')}; a token at ρ = 1.25 "
        f"{_whole(results, 'ρ = 1.25')}, by the profile {_whole(results, 'by profile')}",
        f"Our parts allow {cells.span(map(prr.bound, every), unit=' ×')}: a repair takes as "
        "long as the attention that it spares, and scores over 512K tokens of 8 KV heads leave "
        "little bandwidth to hide it in. Random queries repair many misses",
      ),
      (
        "a selection",
        "4 ms at 16K, 8 ms at 512K (Fig. 2b, GLM-4-9B)",
        f"{cells.time(select)} a layer at 16K, {cells.time(longest)} a layer at 512K (GLM-4-9B's "
        "heads, B1)",
        "Of how many layers theirs is, the paper does not say; 4 ms are "
        f"{cells.ratio(4000 / select.us, select, '{:.0f}')} of ours. There is less to hide",
      ),
      (
        "over scores, `top_k` and FlashInfer's block-sparse attention",
        "FlashInfer's is its base (§2, §5.3)",
        cells.span(peers, "{:.1f}", " ×"),
        "Most of this is the kernels', not speculation's; a layer's attention alone, not a token",
      ),
      (
        "stages S1, S2, S3",
        "1.01, 1.30, 1.56 × (GLM-4-9B, InfLLM-v2) (Tab. 2)",
        f"{gained} × (8B heads, Quest, B1 T16K)",
        "The paper's S2 brings its kernel, which gains over FlashInfer's; our base has ours",
      ),
      (
        "sparse attention over FlashInfer's block-sparse, T128K",
        "1.03 to 1.17 × at 1,024 tokens, 3.64 to 3.71 × at 8,192 (Tab. 3, H100)",
        f"{_sparse(results, 1024)} at 1,024 tokens, {_sparse(results, 8192)} at 8,192",
        "Another card and another kernel; FlashInfer is "
        f"{results.bench('sparse').facts['flashinfer-python']} here, the paper does not say",
      ),
      (
        "chosen again in the next step",
        "68 % (Fig. 3)",
        f"{again['Quest']} (Quest), {again['InfLLM-v2']} (InfLLM-v2)",
        "A model of 1.5B on speeches; under Quest as good or better",
      ),
      (
        "hit by the predictor",
        "91 % (§5.2); 98.05 % (Quest), 97.52 % (InfLLM-v2) with slack (Tab. 4)",
        f"{forecast['Quest']}, {forecast['InfLLM-v2']} at ρ = 1; {slack['Quest']}, "
        f"{slack['InfLLM-v2']} at 1.25; {more['Quest']}, {more['InfLLM-v2']} at 1.5 (in brackets "
        "weighted by the score)",
        "The predictor adds a point to the last step's tiles, slack does most",
      ),
      (
        "calibration on a prompt, 16K",
        "2.4 ms in all, on the CPU beside the prompt, 0.06 ms of it after the prompt (§A.5)",
        f"{searched} a layer, {calibrated['without the search']} without the search",
        "450 candidates on 512 tokens, on the GPU, after the prompt: none of it is hidden",
      ),
    ]
  )


def _whole(results: Results, name: str) -> str:
  """Whole steps over selecting first, of all lengths."""
  cases = results.bench("e2e_sparse").cases(r"^PRR Llama-3\.1-8B B1 T")
  pairs = [(case.time("serial").us / case.time(name).us, case.time("serial")) for case in cases]
  return cells.span(pairs, "{:.3f}", " ×")


def _sparse(results: Results, budget: int) -> str:
  cases = results.bench("sparse").cases(rf"^block \d+ budget {budget}$")
  peers = [case.time(selection.BLOCK_SPARSE) for case in cases]
  pairs = [(p.us / case.time("kvjax").us, p) for case, p in zip(cases, peers, strict=True)]
  return cells.span(pairs, unit=" ×")


# ---- PrHS


def of_prhs(results: Results) -> list[str]:
  scores = real.by_length(SHORT)(results)
  names = ("`full`", "`cis`", "`hshare`", "`psaw`", "`etf`", "`cpe`")
  full, cis, hshare, psaw, etf, cpe = (
    quoted(scores, name if name == "`full`" else f"{name}, 1,024")["mean"] for name in names
  )
  slower = next(cell for name, cell in quoted(scores, "`cpe`, 1,024").items() if "ms a" in name)
  steps = [selection.over_full(selection.step(results, "CPE", batch)) for batch in (1, 4)]
  gains = " and ".join(cells.ratio(*pair) for pair in steps)
  small, large = (quoted(made(results), "CIS, s = 16, τ = 0.8") for made in SHARING)
  ahead = {
    tau: ", ".join(
      quoted(made(results), f"CIS, s = 16, τ = {tau}")["overlap less HShare's"] for made in SHARING
    )
    for tau in ("0.8", "0.5")
  }
  prompt = quoted(prompts.model(results), "ETF with PSAW")
  bounds, larger = studies.certificates(results), studies.larger_certificates(results)
  below = "below the trivial maximum"
  said = {
    name: " and ".join(quoted(lines, *label)[below] for lines in (bounds, larger))
    for name, label in {
      "sharing": ("sharing, Δ_att by the drift's bound", "–"),
      "PSAW's window": ("window (PSAW)", "another text"),
      "ETF's freezing": ("freezing (ETF), keys projected", "another text"),
    }.items()
  }
  return _table(
    [
      (
        "CPE's attention over dense, s = 16",
        "1.63 → 0.165 ms, 9.9 × at B16 T2K; 3.23 → 0.821 ms, 3.9 × at T4K (Tab. IV, A100)",
        "; ".join(_attention(results, tokens) for tokens in (2048, 4096)),
        f"Their dense kernel is slower: 1.63 ms for {DENSE_BYTES / 1e9:.2f} GB of keys and values "
        f"of 16 bits is {DENSE_BYTES / 1.63e9:.2f} TB/s, ours has "
        f"{DENSE_BYTES / _cpe(results, 2048).time('dense decode').us / 1e6:.2f} TB/s",
      ),
      (
        "tokens a head at 512",
        "547.5 (§V-C)",
        f"{_visited(results, 'clustered')} of clustered keys, {_visited(results, 'random')} of "
        "random ones (B8 T4K)",
        "What is selected of clustered keys lies in runs, whose neighbours are mostly selected too",
      ),
      (
        "CPE's tokens a second over dense",
        "2.82 × at B16 T4K (Tab. V, over GPT-fast, LLaMA-2-7B)",
        f"{gains} × at B1 and B4 (8B shape, T128K, always shared); a step, ms (× full): "
        f"{slower} (Qwen2.5-Coder-1.5B, 8K, B8)",
        "On the 1.5B six query heads have to agree before a KV head shares, so that three in ten "
        "retrieve in a step; LLaMA-2-7B has no query groups",
      ),
      (
        "ρ̂ of CIS, τ = 0.8, s = 16",
        "0.087 (LLaMA-2-7B) (Tab. II)",
        f"{small['ρ̂']} (SmolLM2, groups of 3), {large['ρ̂']} (1.5B, groups of 6)",
        "The cosines of all of a group's queries must exceed τ",
      ),
      (
        "overlap with the oracle beside HShare",
        "far ahead at low ρ̂ (Fig. 7 right)",
        f"{ahead['0.8']} at τ = 0.8, {ahead['0.5']} at τ = 0.5 (SmolLM2, 1.5B)",
        "Groups share less well, and CIS's neighbours count in its budget here",
      ),
      (
        "quality",
        "LongBench 32.90 → 32.40 (CIS), 32.11 (CPE), 31.97 (HShare) (Tab. III)",
        f"{full} → {cis} (CIS), {cpe} (CPE), {hshare} (HShare) (four tasks, 1.5B, 8K)",
        "CIS loses next to nothing and HShare little, as there; CPE loses by its other parts: PSAW "
        f"alone has {psaw}, ETF {etf}",
      ),
      (
        "prompts under ETF and PSAW",
        "attention's FLOPs −15 % beside other sparse methods (abstract)",
        f"a prompt of 32K: {prompt['less work']} less work, {prompt['less time']} less time",
        "Ours is of a whole prompt, all products counted; pieces of windows cost what they save",
      ),
      (
        "certificates",
        "bounds in advance (§VII)",
        f"bounds that say something: {'; '.join(f'{name} {x}' for name, x in said.items())} "
        "(SmolLM2 and 1.5B)",
        "They hold, but drift goes by norms, and keys are long: attention moves far less",
      ),
    ]
  )


def _cpe(results: Results, tokens: int) -> Case:
  return results.bench("cpe").case(f"B16 T{tokens} 32x1 1/8, clustered keys")


def _attention(results: Results, tokens: int) -> str:
  case = _cpe(results, tokens)
  ours, flash = case.time("kvjax"), case.time("torch flash")
  over = cells.ratio(flash.us / ours.us, flash)
  return f"{_times(case.time('dense decode'), ours)} at B16 T{tokens >> 10}K ({over} over flash)"


def _visited(results: Results, keys: str) -> str:
  case = results.bench("cpe").case(f"B8 T4096 32x1 1/8, {keys} keys")
  (visited,) = case.numbers(r"([\d.]+) tokens a head at a budget")
  return f"{visited:.0f}"


# ---- LongFlow


def of_longflow(results: Results) -> list[str]:
  ours, full, peer = (
    quoted(longflow.answers(results), name)
    for name in (
      "LongFlow, budget 3,200",
      "Full",
      "transformers, dynamic cache, bfloat16, not compiled",
    )
  )
  rates = [_number(row["tokens a second"]) for row in (ours, full, peer)]
  sizes = [_number(row["cache of a row"].removesuffix(" MiB")) for row in (ours, full)]
  step = results.bench("longflow").case("step B128 S3200 8x4")
  h2o, kernel, dense = (step.time(name) for name in ("H2O in XLA", "kvjax", "dense decode"))
  answers = real.answers(results)
  gaps = {n: quoted(answers, f"`longflow`, {n}") for n in (512, 256)}
  found = "; ".join(
    f"{row['right']}, {row['less full']} at {budget}" for budget, row in gaps.items()
  )
  return _table(
    [
      (
        "tokens a second over the full cache, 512 in, 16,000 out, Qwen3-1.7B",
        "11.8 × (Fig. 4, A100 of 40 GB)",
        f"{rates[0] / rates[1]:.1f} × ({ours['tokens a second']} and {full['tokens a second']}); "
        f"{rates[0] / rates[2]:.1f} × over transformers",
        f"A row's cache is {sizes[1] / sizes[0]:.1f} × as large in full. Our full cache runs at "
        f"{full['of its byte limit']} of its byte limit; over transformers' dynamic cache, "
        "not compiled, the gain is near theirs. Of theirs the paper says only that nothing manages "
        "it",
      ),
      (
        "attention and eviction beside H2O's, B128, 3,200 slots",
        "47 → 8 ms, 5.9 × (Fig. 1, Qwen3-8B)",
        f"{_times(h2o, kernel)} (a layer)",
        "H2O is compiled by XLA here; of how many layers theirs is, the paper does not say. "
        "LongFlow takes "
        f"{cells.ratio(kernel.us / dense.us, dense)} × dense decode",
      ),
      (
        "smaller cache, 3,200 of 16,000",
        "80 % (§4.2)",
        f"{cells.percent(1 - sizes[0] / sizes[1])} ({sizes[0]:,.0f} of {sizes[1]:,.0f} MiB a row)",
        "no difference",
      ),
      (
        "GSM8K",
        "95.68 → 96.36 at 3,200, 95.83 at 2,400 (Qwen3-8B) (Tab. 1)",
        f"{quoted(answers, '`full`')['right']} → {found} (Qwen2.5-Coder-1.5B; less the full cache "
        "after the comma)",
        "Budgets here are below the prompt of 1,300 tokens, whose examples are cut",
      ),
    ]
  )


def _number(cell: str) -> float:
  return float(cell.replace(",", ""))


# ---- Ltri-LLM


def of_ltri(results: Results) -> list[str]:
  whole = streams.whole(results)
  least, most = streams.rates(whole)
  token = cells.time(whole.time(f"token at {streams.MARKS[-1]}"))
  runs = {"2K": studies.short_needles(results), "8K": studies.long_needles(results)}

  def right(*labels: str) -> str:
    """Right answers of each method, at both lengths."""
    found = {n: " → ".join(quoted(lines, x)["right"] for x in labels) for n, lines in runs.items()}
    return ", ".join(f"{answers} at {n}" for n, answers in found.items())

  stream = studies.stream_needles(results)
  ruler = evaluations.ruler(results)
  four = [quoted(ruler, name)["4K"] for name in ("`full`", "`ltri`, 512", "`streaming_llm`, 512")]
  parts = {"not persistent": "2K", "no voting": "2K", "all heads": "8K"}
  ablated = ", ".join(
    f"{quoted(runs[n], f'`ltri`, {part}')['right']} {part} ({n})" for part, n in parts.items()
  )
  return _table(
    [
      (
        "index vectors at 800K tokens, λ = 3, M = 12",
        "0.240 GiB (Tab. 4)",
        streams.vectors(results),
        "A span is kept as the sum of its vectors, in float32; by Eq. 8 nothing is lost",
      ),
      (
        "longest stream",
        "800K tokens (Tab. 4), no speed",
        f"1,048,576 tokens at {least:,} to {most:,} a second, {token} a token at the end, "
        f"{streams.in_use(whole)}",
        "Random tokens through an 8B model's shape: speed and memory, no answers",
      ),
      (
        "InfLLM's failures, the needle's blocks injected",
        "85 to 99.7 % of them right in four English tasks, 0 to 94 % in four Chinese ones (Tab. 1)",
        right("`infllm`", "`infllm`, injected"),
        "No difference in English: what fails is retrieval. In Chinese, says the paper, it is "
        "probably the model, trained on English above all",
      ),
      (
        "needles, InfLLM → Ltri-LLM",
        "Ltri-LLM ahead at all lengths from 20K to 230K (Fig. 8)",
        f"1.5B: {' → '.join(quoted(stream, x)['right'] for x in ('`infllm`', '`ltri`'))} at 131K; "
        f"SmolLM2: {right('`infllm`', '`ltri`')}, full {right('`full`')}",
        "As there on the 1.5B, at the paper's budget. SmolLM2 attends to 800 tokens: what its "
        "retrieval heads see seldom reaches a vote, and at 8K the model itself is lost",
      ),
      (
        "Ltri-LLM with a part left out",
        "worse without retrieval heads, voting or persistence (Fig. 10)",
        f"{ablated}; whole {right('`ltri`')}",
        "The same direction, too few right answers to rank the parts",
      ),
      (
        "RULER",
        "full 97.2, Ltri-LLM 92.8, StreamingLLM 92.5 at 4K; 84.4, 76.6, 42.2, means of 4K to 128K "
        "(Tab. 3)",
        f"full {four[0]}, Ltri {four[1]}, StreamingLLM {four[2]} (SmolLM2, six tasks, 4K, 512 "
        "tokens)",
        "Another model, and a twelfth of the tokens attended to: the paper's window of 4,096 (§4) "
        "holds all of 4K, ours an eighth",
      ),
    ]
  )
