"""Times of dense decode, steps and prompts, on one device and on several, beside bounds."""

import functools
from collections.abc import Iterable
from typing import Any

from scripts.tools.tablemakers import cells
from scripts.tools.tablemakers.cells import Pair, faster, longer, median, own, said
from scripts.tools.tablemakers.records import Figure, Part
from scripts.tools.tablemakers.results import GPU, Case, Results

LLAMA = "Llama-3.1-8B"
H100 = "nvidia-h100-80gb-hbm3"


def _versions(results: Results) -> str:
  """Versions of jax, the usual one first, the others with their suites."""
  suites: dict[str, list[str]] = {}
  for bench in results.benches():
    suites.setdefault(bench.held["jax"], []).append(f"`{bench.path.stem}`")
  usual, *others = sorted(suites, key=lambda version: -len(suites[version]))
  apart = (f", `{version}` in {', '.join(suites[version])}" for version in others)
  return "".join([f"`{usual}`", *apart])


# ---- dense decode

# Of torch's SDPA the faster of its two layouts.
CUDNN, FLASH = ("torch cuDNN", "torch cuDNN (heads)"), ("torch flash", "torch flash (heads)")
SHAPES = {
  "B1 T128K 8x4": "B1 T128K, 8×4",
  "B8 T32K 8x4": "B8 T32K, 8×4",
  "B32 T8K 8x4": "B32 T8K, 8×4",
  "B16 T4K 32x1": "B16 T4K, 32×1 (no groups)",
  "B8 T16K 8x4 H256": "B8 T16K, 8×4, H 256",
  "B32 T8K 3x3 H64": "B32 T8K, 3×3, H 64",
  "B1 T32K 8x4": "B1 T32K, 8×4",
  "B8 T4K 8x4": "B8 T4K, 8×4",
  "B1 T4K 8x4": "B1 T4K, 8×4",
  "B16 T32K 8x4 ragged": "16 ragged rows of 1K to 32K, 8×4",
}
LARGE = ("B1 T128K 8x4", "B8 T32K 8x4", "B32 T8K 8x4", "B1 T32K 8x4", "B8 T4K 8x4")


def decode(results: Results) -> Part:
  bench = results.bench("decode")
  return cells.cases(
    {label: bench.case(name) for name, label in SHAPES.items()},
    ("kvjax", own()),
    ("share of read", faster("kvjax", "read")),
    ("torch cuDNN SDPA", lambda case: median(_fastest(case, CUDNN))(case)),
    ("jax cuDNN", median("jax cuDNN")),
    ("torch flash SDPA", lambda case: median(_fastest(case, FLASH))(case)),
    ("FlashInfer", median("FlashInfer")),
    first="shape (KV heads × group)",
  )


def cards(results: Results) -> Part:
  """Dense decode on both cards: the time, of a read, over the fastest of cuDNN's."""
  rows = []
  for name, label in (SHAPES | {"B64 T32K 8x4 ragged": "64 ragged rows of 1K to 32K, 8×4"}).items():
    row: list[Any] = [label]
    for bench in (results.bench("decode", card) for card in (GPU, H100)):
      case = bench.case(name) if bench.has(name) else None
      row += ["–"] * 3 if case is None else [how(case) for how in (own(), OF_READ, _over_cudnn)]
    rows.append(row)
  head = [f"{card}, {what}" for card in ("H200", "H100") for what in COLUMNS]
  return cells.table(("shape (KV heads × group)", *head), rows)


OF_READ, COLUMNS = faster("kvjax", "read"), ("kvjax", "of a read", "over cuDNN")


def _over_cudnn(case: Case) -> Any:
  """Our time over the fastest of cuDNN's, torch's or jax's; none where they take no such shape."""
  peers = [name for name in (*CUDNN, "jax cuDNN") if case.has(name)]
  if not peers:
    return "–"
  return cells.ratio(*cells.over(case.time("kvjax"), case.time(_fastest(case, peers))))


def gate(results: Results) -> Part:
  """Whole steps of the gate on the H100."""
  bench = results.bench("gate", H100)
  steps = {case.name: case for case in bench.cases("")}
  return cells.cases(steps, ("a step, 8B's shape", own()), ("× all bytes", _of_bytes))


def cuts(results: Results) -> Part:
  """Shapes that a seed drew: the heuristic's cut over the fastest of a sweep."""
  bench = results.bench("cuts", H100)
  drawn = {case.name.partition(": ")[2]: case for case in bench.cases("")}
  return cells.cases(drawn, ("over the fastest cut", said(r"([\d.]+) × the fastest")))


def _fastest(case: Case, names: Iterable[str]) -> str:
  """The fastest of some contenders that take the shape; the first where none does."""
  names = list(names)
  return min(filter(case.has, names), key=lambda name: case.time(name).us, default=names[0])


def _beside_cudnn(case: Case) -> Pair:
  best = _fastest(case, ("jax cuDNN", *CUDNN))
  return cells.over(case.time("kvjax"), case.time(best))


# ---- whole steps

STEPS = ((1, 4096), (8, 4096), (1, 32768), (8, 32768), (1, 131072))
MODELS = {LLAMA: "e2e", "Qwen3-1.7B": "e2e_qwen3"}
PEERS = ("torch, CUDA graph", "transformers")


def _steps(results: Results) -> dict[str, Case]:
  return {
    f"{model}, B{batch} T{tokens >> 10}K": results.bench(suite).case(f"{model} B{batch} T{tokens}")
    for model, suite in MODELS.items()
    for batch, tokens in STEPS
  }


def _over_products(case: Case, whose: str = "XLA's", name: str = "products (XLA)") -> Pair:
  """A step over matrix products and the bytes of keys and values."""
  return case.number(rf"([\d.]+) × \({whose} products \+ KV bytes"), case.time(name)


def _of_bytes(case: Case) -> str:
  took = case.time("kvjax")
  return cells.number(cells.rate(took) * took.us * 1e-6 / case.bytes, "{:.3f}")


def steps(results: Results) -> Part:
  return cells.cases(
    _steps(results),
    ("kvjax, a token", own()),
    ("over XLA's products + KV", lambda case: cells.ratio(*_over_products(case), "{:.3f}")),
    (
      "over ours + KV",
      lambda case: cells.ratio(*_over_products(case, "our", "products"), "{:.3f}"),
    ),
    ("over all bytes", _of_bytes),
  )


def peers(results: Results) -> Part:
  """A token's time beside that of other libraries, on the cards that ran any."""
  held = {label: c for label, c in _steps(results).items() if any(map(c.has, PEERS))}
  columns = []
  for head, peer in zip(("PyTorch, compiled, CUDA graph", "transformers"), PEERS, strict=True):
    columns += [(head, median(peer)), ("over ours", functools.partial(_over_ours, peer))]
  return cells.cases(held, ("kvjax, a token", own()), *columns)


def _over_ours(peer: str, case: Case) -> str:
  return faster("kvjax", peer)(case) if case.has(peer) else "–"


def generate(results: Results) -> Part:
  """`generate` and a loop of one's own, as a user calls them, over a loop on the device."""
  ways = {
    "generate": "`generate`",
    "generate, streamed": "streamed",
    "own loop": "own loop",
    "generate, chunk=1": "`chunk=1`",
    "short answer": "an answer of 8 tokens",
  }
  bench = results.bench("generate")
  held = {
    f"B{batch} T{tokens >> 10}K": bench.case(f"{LLAMA} B{batch} T{tokens}")
    for tokens in (4096, 32768)
    for batch in (1, 8)
  }
  columns = ((head, longer(way, "loop", "{:.3f}")) for way, head in ways.items())
  return cells.cases(held, ("loop on the device, a token", own("loop")), *columns)


# ---- prompts

LAYERS = {
  "kvjax": "dense: cuDNN, as kvjax calls it",
  "our kernel": "dense: our kernel",
  "torch flash": "dense: torch flash",
  "torch cuDNN": "dense: torch cuDNN",
}
PIECES = {"PSAW": "PSAW's top layer", "ETF + PSAW": "ETF's and PSAW's top layer"}


def prompt_layers(results: Results) -> Part:
  bench = results.bench("prefill")
  dense, rows = bench.case("dense 32K"), []
  for name, label in LAYERS.items():
    over = "one" if name == "kvjax" else longer(name, "kvjax")(dense)
    rows.append([label, own(name)(dense), _rate(dense, name), over, "all"])
  for name, label in PIECES.items():
    case = bench.case(f"top layer of {name} 32K")
    seen = said(r"queries see ([\d.]+) of what they see in a dense layer")(case)
    rows.append([f"{label}, in pieces", own()(case), "", longer("kvjax", "dense")(case), seen])
  return cells.table(("", "time", "TFLOP/s", "against dense", "of what its queries see"), rows)


def _rate(case: Case, name: str) -> str:
  return case.remark(f"^{name}: (\\d+) TFLOP/s")[0]


def prompt_model(results: Results) -> Part:
  case = results.bench("prefill").case("model 32K")
  full, ours = case.time("Full"), case.time("kvjax")
  less = cells.guarded(cells.number(100 * (1 - ours.us / full.us), "{:.1f} %"), full)
  rows = [
    ["Full", cells.ours(full), _rate(case, "Full"), "", ""],
    ["ETF with PSAW", cells.ours(ours), _rate(case, "kvjax"), less, saved(case)],
  ]
  return cells.table(("32,768 tokens", "time", "TFLOP/s", "less time", "less work"), rows)


def saved(case: Case) -> Figure:
  return cells.percent(case.number(r"saves ([\d.]+) of the operations"), 1)


def prompt_long(results: Results) -> Part:
  """A prompt of 128K tokens in one piece, beside transformers."""
  case, rows = results.bench("prefill").case("model 128K in one piece"), []
  forms = ("{:.0f}", "{:.2f} GB", "{:.1f} GB", "{:.1f} GB")
  for name in ("Full", "SnapKV", "PyramidKV"):
    found = case.numbers(
      f"^{name}: [\\d.]+ s, (\\d+) TFLOP/s; caches ([\\d.]+) GB, temporary ([\\d.]+) GB, of "
      r"which \+([\d.]+) GB come"
    )
    rows.append([name, own(name)(case), *map(cells.number, found, forms)])
  peer = cells.join("transformers ({} of Full)", longer("transformers", "Full")(case))
  rows.append([peer, median("transformers")(case), "–", "–", "–", "–"])
  head = ("131,072 tokens", "time", "TFLOP/s", "caches", "temporary", "of it, of 30 of the layers")
  return cells.table(head, rows)


# ---- several GPUs: one program over two and four devices, beside one

CHAIN = 64  # all-reduces that a case times, one after the other
REDUCES = {"8B": 64, "70B": 160}
SPLIT = {
  "Llama-3.1-8B B8 T32768, heads over 2": "a step, B8 T32K, heads over two",
  "Llama-3.1-8B B8 T32768, heads over 4": "a step, B8 T32K, heads over four",
  "Llama-3.1-8B B1 T262144, slots over 2": "a step, B1 T256K, slots over two",
  "attention B1 T524288, slots over 2": "attention, B1 T512K, slots over two",
  "attention B1 T524288, slots over 4": "attention, B1 T512K, slots over four",
  "Llama-3.1-8B prompt of 32768, heads over 2": "a prompt of 32K, heads over two",
  "Llama-3.1-8B prompt of 32768, slots over 2": "a prompt of 32K, slots over two",
}
LARGE_MODEL = {  # Llama-3.1-70B's shape: two all-reduces in each of 80 layers
  2: ("snapkv", "pyramidkv", "streaming_llm"),
  4: ("full", "snapkv", "streaming_llm"),
}


def _devices(case: Case) -> int:
  return int(case.name.partition(" over ")[2].partition(",")[0])


def _several(case: Case) -> str:
  return f"{_devices(case)} devices"


def _speed(case: Case) -> Figure:
  """One device's time over that of several."""
  return cells.ratio(*cells.gain(case.time(_several(case)), case.time("1 device")))


def _over_share(case: Case) -> str:
  """Over an equal share of one device's time, and the all-reduces; of steps with split heads."""
  if "heads" not in case.name or "prompt" in case.name:
    return "–"
  chain = case.time(f"{CHAIN} all-reduces").scaled(REDUCES["8B"] / CHAIN)
  bound = case.time("1 device").scaled(1 / _devices(case)).then(chain)
  return cells.ratio(*cells.over(case.time(_several(case)), bound))


def gpus(results: Results) -> Part:
  return cells.cases(
    {label: results.bench("scale").case(name) for name, label in SPLIT.items()},
    ("one", median("1 device")),
    ("several", lambda case: own(_several(case))(case)),
    ("times as fast", _speed),
    ("over its share + all-reduces", _over_share),
    first="Llama-3.1-8B's shape",
  )


def all_reduces(results: Results) -> Part:
  """NCCL's all-reduces beside XLA's own kernel."""
  case, rows = results.bench("scale").case(next(iter(SPLIT))), []
  for label, kernel in (("NCCL", ""), ("XLA's kernel", ", XLA's kernel")):
    rows.append([label, _reduce(case, kernel), own(f"2 devices{kernel}")(case)])
  return cells.table(("heads over two, B8 T32K", "an all-reduce in a chain", "a step"), rows)


def _reduce(case: Case, kernel: str = "") -> str:
  return cells.time(case.time(f"{CHAIN} all-reduces{kernel}").scaled(1 / CHAIN))


def gpus_70b(results: Results) -> Part:
  rows = []
  for devices, methods in LARGE_MODEL.items():
    for method in methods:
      name = f"Llama-3.1-70B B8 T32768, heads over {devices}, {method} and ART"
      case = results.bench("scale").case(name)
      least = case.time(f"{CHAIN} all-reduces").scaled(REDUCES["70B"] / CHAIN)
      least = least.later(case.bytes / cells.rate(least) * 1e6)
      over = cells.ratio(*cells.over(case.time(method), least))
      art = median(f"ART({method})")(case)
      rows.append([f"`{method}`, over {devices}", own(method)(case), over, art, _reduce(case)])
  head = ("Llama-3.1-70B's shape, B8 T32K", "a step", "over bytes + all-reduces", "with ART")
  return cells.table((*head, "an all-reduce"), rows)


# ---- figures in sentences


def figures(results: Results) -> dict[str, str]:
  repeated = [case.repeated() for bench in results.benches() for case in bench.cases("")]
  dense = [results.bench("decode").case(name) for name in LARGE]
  steps = list(_steps(results).values())[: len(STEPS)]
  two = [results.bench("scale").case(name) for name in SPLIT if name.endswith("over 2")]
  names = ("gpus-heads", "gpus-slots", "gpus-attention", "gpus-prompt", "gpus-prompt-slots")
  prompt = results.bench("prefill").case("model 32K")
  less = 1 - prompt.time("kvjax").us / prompt.time("Full").us
  return dict(zip(names, map(_speed, two), strict=True)) | {
    "jax": _versions(results),
    "fewest": cells.number(min(repeated), "{:.0f}"),
    "most": cells.number(max(repeated), "{:.0f}"),
    "decode-read": cells.span(cells.gain(c.time("kvjax"), c.time("read")) for c in dense),
    "decode-cudnn": cells.span(map(_beside_cudnn, dense), unit=" ×"),
    "step": cells.time(steps[0].time("kvjax")),
    "long-step": cells.time(steps[3].time("kvjax")),
    "step-bound": cells.span(map(_over_products, steps), unit=" ×"),
    "torch": _over_ours(PEERS[0], steps[0]),
    "torch-b8": _over_ours(PEERS[0], steps[1]),
    "prompt-work": saved(prompt),
    "prompt-time": cells.number(100 * less, "{:.1f} %"),
  }
