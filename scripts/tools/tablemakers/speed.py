"""Times of dense decode, steps and prompts, on one device and on several, beside bounds."""

from typing import Any

from scripts.tools.tablemakers import cells
from scripts.tools.tablemakers.cells import Name, faster, longer, median, over_bytes, own, said, say
from scripts.tools.tablemakers.records import Part
from scripts.tools.tablemakers.results import GPU, H100, Case, Results
from scripts.tools.tablemakers.timings import Ratio, Timing, gain, over, span


def _versions(results: Results) -> str:
  """Versions of jax, the usual one first, the others with their suites."""
  suites: dict[str, list[str]] = {}
  for bench in results.benches():
    suites.setdefault(bench.jax, []).append(f"`{bench.suite}`")
  usual, *others = sorted(suites, key=lambda version: -len(suites[version]))
  apart = (f", `{version}` in {', '.join(suites[version])}" for version in others)
  return "".join([f"`{usual}`", *apart])


# ---- dense decode


def fastest(*names: str) -> Name:
  """The fastest of some contenders that take the shape; the first where none does."""
  return lambda case: min(
    filter(case.has, names), key=lambda name: case.time(name).us, default=names[0]
  )


# Of torch's SDPA the faster of its two layouts.
CUDNN = fastest("torch cuDNN", "torch cuDNN (heads)")
FLASH = fastest("torch flash", "torch flash (heads)")
EVERY_CUDNN = fastest("jax cuDNN", "torch cuDNN", "torch cuDNN (heads)")
SHAPES = {
  "B1 T128K, 8×4": "B1 T128K 8x4",
  "B8 T32K, 8×4": "B8 T32K 8x4",
  "B32 T8K, 8×4": "B32 T8K 8x4",
  "B16 T4K, 32×1 (no groups)": "B16 T4K 32x1",
  "B8 T16K, 8×4, H 256": "B8 T16K 8x4 H256",
  "B32 T8K, 3×3, H 64": "B32 T8K 3x3 H64",
  "B1 T32K, 8×4": "B1 T32K 8x4",
  "B8 T4K, 8×4": "B8 T4K 8x4",
  "B1 T4K, 8×4": "B1 T4K 8x4",
  "16 ragged rows of 1K to 32K, 8×4": "B16 T32K 8x4 ragged",
}
LARGE = ("B1 T128K 8x4", "B8 T32K 8x4", "B32 T8K 8x4", "B1 T32K 8x4", "B8 T4K 8x4")

decode = cells.cases(
  "decode",
  SHAPES,
  ("kvjax", own()),
  ("share of read", faster("kvjax", "read")),
  ("torch cuDNN SDPA", median(CUDNN)),
  ("jax cuDNN", median("jax cuDNN")),
  ("torch flash SDPA", median(FLASH)),
  ("FlashInfer", median("FlashInfer")),
  first="shape (KV heads × group)",
)


def cards(results: Results) -> Part:
  """Dense decode on both cards: the time, of a read, over the fastest of cuDNN's."""
  columns = {
    "kvjax": own(),
    "of a read": faster("kvjax", "read"),
    "over cuDNN": cells.where(EVERY_CUDNN, longer("kvjax", EVERY_CUDNN)),
  }
  rows = []
  for label, name in (SHAPES | {"64 ragged rows of 1K to 32K, 8×4": "B64 T32K 8x4 ragged"}).items():
    row: list[Any] = [label]
    for bench in (results.bench("decode", card) for card in (GPU, H100)):
      row += [show(bench[name]) if name in bench else None for show in columns.values()]
    rows.append(row)
  head = [f"{card}, {what}" for card in ("H200", "H100") for what in columns]
  return cells.table(("shape (KV heads × group)", *head), rows)


# Whole steps of the gate on the H100.
gate = cells.cases(
  "gate", "", ("a step, 8B's shape", own()), ("× all bytes", over_bytes()), card=H100
)
# Whole steps of many rows on the H100.
live = cells.cases(
  "live",
  {
    f"{name}, B{rows}": f"{name} B{rows}"
    for name, most in (
      ("Full", 64),
      ("Quest, 1,024 tokens", 64),
      ("int8", 128),
      ("SnapKV, 1,024 slots", 256),
      ("LongFlow, 1,024 slots", 256),
    )
    for rows in (64, 128, 256)
    if rows <= most
  },
  ("a step, 8B's shape, T4K", own()),
  ("× all bytes", over_bytes()),
  card=H100,
)
# Requests of unequal answers, on the H100.
batcher = cells.cases(
  "batcher",
  "",
  ("live batch", own("Batcher")),
  ("batches that wait", median("waiting")),
  ("live over waiting", longer("Batcher", "waiting")),
  ("tokens a second over a full batch's", said(r"([\d.]+) of the tokens")),
  label=lambda name: name.partition(" ")[0],
  card=H100,
)
# Shapes that a seed drew: the heuristic's cut over the fastest of a sweep.
cuts = cells.cases(
  "cuts",
  "",
  ("over the fastest cut", said(r"([\d.]+) × the fastest")),
  label=lambda name: name.partition(": ")[2],
  card=H100,
)


# ---- whole steps

STEPS = ((1, 4096), (8, 4096), (1, 32768), (8, 32768), (1, 131072))
PEERS = ("torch, CUDA graph", "transformers")
# A step over matrix products and the bytes of keys and values.
OVER_PRODUCTS = r"([\d.]+) × \(XLA's products \+ KV bytes"
OVER_OURS = r"([\d.]+) × \(our products \+ KV bytes"


def _steps(results: Results) -> dict[str, Case]:
  return {
    f"{model}, B{batch} T{tokens >> 10}K": results.bench(suite)[f"{model} B{batch} T{tokens}"]
    for model, suite in (("Llama-3.1-8B", "e2e"), ("Qwen3-1.7B", "e2e_qwen3"))
    for batch, tokens in STEPS
  }


def steps(results: Results) -> Part:
  return cells.of_cases(
    _steps(results),
    ("kvjax, a token", own()),
    ("over XLA's products + KV", said(OVER_PRODUCTS, "{:.3f}", "products (XLA)")),
    ("over ours + KV", said(OVER_OURS, "{:.3f}", "products")),
    ("over all bytes", over_bytes()),
  )


def peers(results: Results) -> Part:
  """A token's time beside that of other libraries, on the shapes that ran any."""
  columns = []
  for head, peer in zip(("PyTorch, compiled, CUDA graph", "transformers"), PEERS, strict=True):
    over_ours = cells.where(peer, faster("kvjax", peer))
    columns += [(head, median(peer)), ("over ours", over_ours)]
  held = {label: case for label, case in _steps(results).items() if any(map(case.has, PEERS))}
  return cells.of_cases(held, ("kvjax, a token", own()), *columns)


# `generate` and a loop of one's own, as a user calls them, over a loop on the device.
generate = cells.cases(
  "generate",
  {
    f"B{batch} T{tokens >> 10}K": f"Llama-3.1-8B B{batch} T{tokens}"
    for tokens in (4096, 32768)
    for batch in (1, 8)
  },
  ("loop on the device, a token", own("loop")),
  ("`generate`", longer("generate", "loop", "{:.3f}")),
  ("streamed", longer("generate, streamed", "loop", "{:.3f}")),
  ("own loop", longer("own loop", "loop", "{:.3f}")),
  ("`chunk=1`", longer("generate, chunk=1", "loop", "{:.3f}")),
  ("an answer of 8 tokens", longer("short answer", "loop", "{:.3f}")),
)


# ---- prompts

LAYERS = {
  "kvjax": "dense: cuDNN, as kvjax calls it",
  "our kernel": "dense: our kernel",
  "torch flash": "dense: torch flash",
  "torch cuDNN": "dense: torch cuDNN",
}
PIECES = {"PSAW": "PSAW's top layer", "ETF + PSAW": "ETF's and PSAW's top layer"}
SAVED = said(r"saves ([\d.]+) of the operations", "{:.1%}")


def _rate(case: Case, name: str) -> str:
  return case.remark(f"^{name}: (\\d+) TFLOP/s")[0]


def prompt_layers(results: Results) -> Part:
  bench = results.bench("prefill")
  dense, rows = bench["dense 32K"], []
  for name, label in LAYERS.items():
    over = "one" if name == "kvjax" else longer(name, "kvjax")(dense)
    rows.append([label, own(name)(dense), _rate(dense, name), over, "all"])
  seen = said(r"queries see ([\d.]+) of what they see in a dense layer")
  for name, label in PIECES.items():
    case = bench[f"top layer of {name} 32K"]
    row = (own()(case), "", longer("kvjax", "dense")(case), seen(case))
    rows.append([f"{label}, in pieces", *row])
  return cells.table(("", "time", "TFLOP/s", "against dense", "of what its queries see"), rows)


def prompt_model(results: Results) -> Part:
  case = results.bench("prefill")["model 32K"]
  full = case.time("Full")
  less = say("{:.1%}", Ratio(1 - case.time("kvjax").us / full.us, full))
  rows = [
    ["Full", own("Full")(case), _rate(case, "Full"), "", ""],
    ["ETF with PSAW", own()(case), _rate(case, "kvjax"), less, SAVED(case)],
  ]
  return cells.table(("32,768 tokens", "time", "TFLOP/s", "less time", "less work"), rows)


def prompt_long(results: Results) -> Part:
  """A prompt of 128K tokens in one piece, beside transformers."""
  case, rows = results.bench("prefill")["model 128K in one piece"], []
  for name in ("Full", "SnapKV", "PyramidKV"):
    found = case.numbers(
      f"^{name}: [\\d.]+ s, (\\d+) TFLOP/s; caches ([\\d.]+) GB, temporary ([\\d.]+) GB, of "
      r"which \+([\d.]+) GB come"
    )
    rows.append([name, own(name)(case), *found])
  peer = say("transformers ({} of Full)", longer("transformers", "Full")(case))
  rows.append([peer, median("transformers")(case), *[None] * 4])
  head = ["131,072 tokens", "time", ("TFLOP/s", "{:.0f}"), ("caches", "{:.2f} GB")]
  head += [("temporary", "{:.1f} GB"), ("of it, of 30 of the layers", "{:.1f} GB")]
  return cells.table(head, rows)


# ---- several GPUs: one program over two and four devices, beside one

CHAIN = 64  # all-reduces that a case times, one after the other
TWO = "Llama-3.1-8B B8 T32768, heads over 2"
SPLIT = {
  "a step, B8 T32K, heads over two": TWO,
  "a step, B8 T32K, heads over four": "Llama-3.1-8B B8 T32768, heads over 4",
  "a step, B1 T256K, slots over two": "Llama-3.1-8B B1 T262144, slots over 2",
  "attention, B1 T512K, slots over two": "attention B1 T524288, slots over 2",
  "attention, B1 T512K, slots over four": "attention B1 T524288, slots over 4",
  "a prompt of 32K, heads over two": "Llama-3.1-8B prompt of 32768, heads over 2",
  "a prompt of 32K, slots over two": "Llama-3.1-8B prompt of 32768, slots over 2",
}
LARGE_MODEL = {  # Llama-3.1-70B's shape: two all-reduces in each of 80 layers
  2: ("snapkv", "pyramidkv", "streaming_llm"),
  4: ("full", "snapkv", "streaming_llm"),
}


def _reduces(case: Case, n: int = 1, kernel: str = "") -> Timing:
  """So many all-reduces."""
  return case.time(f"{CHAIN} all-reduces{kernel}") * (n / CHAIN)


def _several(case: Case) -> str:
  """The contender that a case is about."""
  return f"{case.name.partition(' over ')[2]} devices"


def _over_share(case: Case) -> str:
  """Over an equal share of one device's time, and the all-reduces; of steps with split heads."""
  if "heads" not in case.name or "prompt" in case.name:
    return "–"
  several = _several(case)
  share = case.time("1 device") * (1 / int(several.split()[0]))
  return say("{:.2f}", over(case.time(several), share + _reduces(case, 64)))


AS_FAST = faster(_several, "1 device")
gpus = cells.cases(
  "scale",
  SPLIT,
  ("one", median("1 device")),
  ("several", own(_several)),
  ("times as fast", AS_FAST),
  ("over its share + all-reduces", _over_share),
  first="Llama-3.1-8B's shape",
)


def all_reduces(results: Results) -> Part:
  """NCCL's all-reduces beside XLA's own kernel."""
  case, rows = results.bench("scale")[TWO], []
  for label, kernel in (("NCCL", ""), ("XLA's kernel", ", XLA's kernel")):
    rows.append([label, _reduces(case, kernel=kernel), own(f"2 devices{kernel}")(case)])
  return cells.table(("heads over two, B8 T32K", "an all-reduce in a chain", "a step"), rows)


def gpus_70b(results: Results) -> Part:
  rows = []
  for devices, methods in LARGE_MODEL.items():
    for method in methods:
      name = f"Llama-3.1-70B B8 T32768, heads over {devices}, {method} and ART"
      case = results.bench("scale")[name]
      least = _reduces(case, 160)
      ratio = over(case.time(method), least + case.bytes / least.rate)
      row = (own(method)(case), ratio, median(f"ART({method})")(case), _reduces(case))
      rows.append([f"`{method}`, over {devices}", *row])
  head = ["Llama-3.1-70B's shape, B8 T32K", "a step", ("over bytes + all-reduces", "{:.2f}")]
  return cells.table([*head, "with ART", "an all-reduce"], rows)


# ---- figures in sentences

TWICE = {
  "gpus-heads": "a step, B8 T32K, heads over two",
  "gpus-slots": "a step, B1 T256K, slots over two",
  "gpus-attention": "attention, B1 T512K, slots over two",
  "gpus-prompt": "a prompt of 32K, heads over two",
  "gpus-prompt-slots": "a prompt of 32K, slots over two",
}


def figures(results: Results) -> dict[str, str]:
  repeated = [case.held["repetitions"] for bench in results.benches() for case in bench.values()]
  dense = [results.bench("decode")[name] for name in LARGE]
  first, second, _, fourth, *_ = steps = list(_steps(results).values())[: len(STEPS)]
  products = (Ratio(case.numbers(OVER_PRODUCTS)[0], case.time("products (XLA)")) for case in steps)
  prompt = results.bench("prefill")["model 32K"]
  found = {
    "jax": _versions(results),
    "fewest": say("{:.0f}", min(repeated)),
    "most": say("{:.0f}", max(repeated)),
    "decode-read": span(gain(case.time("kvjax"), case.time("read")) for case in dense),
    "decode-cudnn": span(
      (over(case.time("kvjax"), case.time(EVERY_CUDNN(case))) for case in dense), unit=" ×"
    ),
    "step": median("kvjax")(first),
    "long-step": median("kvjax")(fourth),
    "step-bound": span(products, unit=" ×"),
    "torch": faster("kvjax", PEERS[0])(first),
    "torch-b8": faster("kvjax", PEERS[0])(second),
    "prompt-work": SAVED(prompt),
    "prompt-time": say("{:.1%}", 1 - prompt.time("kvjax").us / prompt.time("Full").us),
  }
  for name, label in TWICE.items():
    found[name] = AS_FAST(results.bench("scale")[SPLIT[label]])
  return found
