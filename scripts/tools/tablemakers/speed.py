"""Times of dense decode, steps and prompts, on one device and several."""

from typing import Any

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


# What both cards have of each suite: whose time, and beside whom; a bar is between names.
BESIDE = {
  "decode": ("kvjax", {"of a read": faster("read"), "over cuDNN": longer(f"jax cuDNN|{CUDNN}")}),
  "sparse": ("kvjax", "FlashInfer paged"),
  "select": ("kvjax", "read"),
  "prr": ("prr", "serial"),
  "longflow": ("kvjax", "dense decode"),
  "cpe": ("kvjax", "dense decode"),
  "art": ("ART|ART, p = inf", "dense decode|sparse decode"),
  "quantised": ("kvjax", "dense decode|Full"),
  "per_head": ("shared|kvjax", "equal heads|SnapKV"),
  "prefill": ("kvjax", "torch cuDNN|dense"),
  "e2e": ("kvjax", {"× all bytes": cells.over_bytes()}),
  "e2e_sparse": ("kvjax|by profile", "Full|serial"),
  "art_e2e": ("ART 1e-2", "SnapKV 0.2|Full"),
  "forked": ("kvjax", "copies"),
}


def cards(results: Results, suite: str) -> Part:
  """Cases that both cards have, side by side: the time, and what it is beside others'."""
  mine, beside = BESIDE[suite]
  if isinstance(beside, str):
    beside = {f"over {beside.replace('|', ' or ')}": longer(beside, mine)}
  columns = {"a call": own(mine), **beside}
  rows: dict[str, dict[str, Any]] = {}
  for card, folder in (("H200", GPU), ("H100", H100)):
    for case in results.cases(suite, card=folder):
      if cells.timed(case, mine):
        row = rows.setdefault(case.name, {"": case.name})
        row |= {f"{card}, {what}": show(case) for what, show in columns.items()}
  both = [
    row for row in rows.values() if {f"{card}, a call" for card in ("H200", "H100")} <= set(row)
  ]
  return cells.framed(both)


# Other libraries on the H100.
FLASHINFER = "FlashInfer paged|FlashInfer"
peers = Cases("decode", card=H100).table(
  ("kvjax", own()),
  *(*FLASHINFER.split("|"), "tokamax", "torch flex"),
  ("over the faster of FlashInfer and cuDNN", longer(f"{FLASHINFER}|jax cuDNN|{CUDNN}")),
)


def wheel(results: Results) -> Part:
  """Decode from the wheel on the H100: its table, none, and what `kvjax tune` wrote."""
  rows = []
  for case in results.cases("wheel_shipped", card=H100):
    first = case.time("kvjax")
    others = (
      results.bench(f"wheel_{how}", H100)[case.name].time("kvjax") for how in ("none", "tuned")
    )
    rows.append([case.name, say("{:**}", first), *(say("{:.3f}", over(x, first)) for x in others)])
  return cells.table(("", "its table", "none, over it", "`kvjax tune`, over it"), rows)


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
