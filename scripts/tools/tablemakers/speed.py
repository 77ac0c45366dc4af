"""Times of dense decode, steps and prompts, on one device and several."""

from scripts.tools.tablemakers import GPU, H100, Case, Part, Results, cells
from scripts.tools.tablemakers.cells import Cases, faster, figure, longer, own, say
from scripts.tools.tablemakers.timings import Timing, over

# Of torch's SDPA the faster of its two layouts.
CUDNN = "torch cuDNN|torch cuDNN (heads)"
decode = Cases("decode").table(
  ("kvjax", own()),
  ("share of read", faster("read")),
  ("over cuDNN", longer(f"jax cuDNN|{CUDNN}")),
  ("torch cuDNN SDPA", CUDNN),
  "jax cuDNN",
  ("torch flash SDPA", "torch flash|torch flash (heads)"),
  "FlashInfer",
)


def cards(results: Results) -> Part:
  """Dense decode on both cards: the time, of a read, over cuDNN's best."""
  columns = {
    "kvjax": own(),
    "of a read": faster("read"),
    "over cuDNN": longer(f"jax cuDNN|{CUDNN}"),
  }
  rows: dict[str, dict[str, str]] = {}
  for card, folder in (("H200", GPU), ("H100", H100)):
    for case in results.cases("decode", card=folder):
      row = rows.setdefault(case.name, {"": case.name})
      row |= {f"{card}, {what}": show(case) for what, show in columns.items()}
  return cells.framed(rows.values())


# Whole steps on the H100.
rows = Cases(card=H100).table(("a step, 8B's shape", own()), ("× all bytes", cells.over_bytes()))
# Requests of unequal answers, on the H100.
batcher = Cases("batcher", card=H100).table(
  ("live batch", own("Batcher")),
  ("batches that wait", "waiting"),
  ("live over waiting", longer("waiting", "Batcher")),
  ("tokens a second over a full batch's", figure("of a full batch")),
)
# Shapes that a seed drew: the heuristic's cut over the fastest of a sweep.
cuts = Cases("cuts", card=H100).table(("over the fastest cut", figure("over the fastest")))


# ---- whole steps

# A token's time over matrix products and the bytes of keys and values, and peers.
steps = Cases().table(
  ("kvjax, a token", own()),
  cells.said("over XLA's products + KV", "{:.3f}", "products (XLA)"),
  ("over ours + KV", figure("over our products + KV", "{:.3f}", "products")),
  ("over all bytes", cells.over_bytes()),
  ("PyTorch, compiled, CUDA graph", "torch, CUDA graph"),
  ("PyTorch over ours", faster("torch, CUDA graph")),
  "transformers",
  ("transformers over ours", faster("transformers")),
)
# `generate` and a loop of one's own over a loop on the device.
generate = Cases("generate").table(
  ("loop on the device, a token", own("loop")),
  ("`generate`", longer("loop", "generate", "{:.3f}")),
  ("streamed", longer("loop", "generate, streamed", "{:.3f}")),
  ("own loop", longer("loop", "own loop", "{:.3f}")),
  ("`chunk=1`", longer("loop", "generate, chunk=1", "{:.3f}")),
  ("an answer of 8 tokens", longer("loop", "short answer", "{:.3f}")),
)


# ---- prompts

# Figures of contenders, and their forms.
FIGURES = {
  "TFLOP/s": "{:.0f}",
  "less work": "{:.1%}",
  "less time": "{:.1%}",
  "caches": "{:.2f} GB",
  "temporary": "{:.1f} GB",
  "of it, of 30 of the layers": "{:.1f} GB",
}


def prompts(results: Results, name: str) -> Part:
  """A case's contenders, beside the full cache or else the first, and their figures."""
  case = results.bench("prefill")[name]
  names = list(filter(case.has, case.rows))
  reference = "Full" if "Full" in names else names[0]
  said = {x: form for x, form in FIGURES.items() if any(y.endswith(x) for y in case.figures)}
  rows = []
  for who in names:
    figures = (case.figures.get(f"{who}, {each}") for each in said)
    rows.append([who, own(who)(case), longer(reference, who)(case), *figures])
  return cells.table((name, "time", f"over {reference}", *said.items()), rows)


pieces = Cases("prefill", "^top layer").table(
  ("in pieces", own()),
  "dense",
  ("against dense", longer("dense")),
  ("of what queries see there", figure("visible")),
)


# ---- several GPUs: one program over two and four devices, beside one

CHAIN = 64  # all-reduces that a case times, one after the other
SEVERAL = "2 devices|4 devices"


def _reduces(case: Case, n: int = 1, kernel: str = "") -> Timing | None:
  """So many all-reduces."""
  took = cells.timed(case, f"{CHAIN} all-reduces{kernel}")
  return took and took * (n / CHAIN)


def _over_share(case: Case) -> str | None:
  """Over a share of one device's time and the all-reduces, where heads are split."""
  several, reduces = cells.timed(case, SEVERAL), _reduces(case, 64)
  if not several or not reduces:
    return None
  share = case.time("1 device") * (1 / int(several.name.split()[0]))
  return say("{:.2f}", over(several, share + reduces))


gpus = Cases("scale", "^(?!Llama-3.1-70B)").table(
  ("one", "1 device"),
  ("several", own(SEVERAL)),
  ("times as fast", faster("1 device", SEVERAL)),
  ("over its share + all-reduces", _over_share),
  ("an all-reduce in a chain", _reduces),
  ("several, XLA's all-reduces", "2 devices, XLA's kernel"),
  ("XLA's in a chain", lambda case: _reduces(case, 1, ", XLA's kernel")),
)

LARGE = "full|snapkv|pyramidkv|streaming_llm"


def _over_least(case: Case) -> str | None:
  """Over the bytes and two all-reduces in each of 80 layers."""
  least, step = _reduces(case, 160), cells.timed(case, LARGE)
  return say("{:.2f}", over(step, least + case.bytes / least.rate)) if least and step else None


gpus_70b = Cases("scale", "^Llama-3.1-70B").table(
  ("a step", own(LARGE)),
  ("over bytes + all-reduces", _over_least),
  ("with ART", "|".join(f"ART({name})" for name in LARGE.split("|"))),
  ("an all-reduce", _reduces),
)
