"""Times of dense decode, steps and prompts, on one GPU and several."""

import pandas as pd

from scripts.benches.cuts import contender_of
from scripts.tools.tablemakers import GPU, H100, READ, Part, Ratio, Record, Results, cells, over
from scripts.tools.tablemakers.cells import Cases, faster, figure, longer, own, said

# Of torch's SDPA the faster of its two layouts.
CUDNN = "torch cuDNN|torch cuDNN (heads)"
decode = Cases("decode").table(
  ("kvjax", own()),
  ("share of read", faster("read")),
  ("over cuDNN", longer(f"jax cuDNN|{CUDNN}")),
  ("torch cuDNN SDPA", CUDNN),
  "jax cuDNN",
  ("torch flash SDPA", "torch flash|torch flash (heads)"),
  *("FlashInfer", "FlashInfer paged", "tokamax", "torch flex"),
)


def cards(results: Results, compared: str) -> Part:
  """The cases of a suite that both cards have: whose time, and over whose."""
  suite, mine, other = compared.split(" :: ")
  columns = ("a call", own(mine)), (f"over {other.replace('|', ' or ')}", longer(other, mine))
  both = []
  for card, folder in (("H200", GPU), ("H100", H100)):
    cases = [x for x in results.cases(suite, card=folder) if cells.value(x, mine)]
    both.append(cells.table(cases, [("", "case")], *columns).add_prefix(f"{card}, "))
  return pd.concat(both, axis=1, join="inner")


def wheel(results: Results) -> Part:
  """Decode from the wheel: its table, none, and what `kvjax tune` wrote."""
  heads = {"shipped": "its table", "none": "none, over it", "tuned": "`kvjax tune`, over it"}
  tables = [Cases(f"wheel_{x}", card=H100).table((heads[x], "kvjax"))(results) for x in heads]
  (first, times), *others = pd.concat(tables, axis=1).items()
  ratios = {name: map(over, column, times, ["{:.3f}"] * len(times)) for name, column in others}
  return pd.DataFrame({first: times.map("{:**}".format), **ratios})


def over_fastest(case: Record, named: str | None) -> Ratio | None:
  """The fastest contender of such a name, over the fastest of all."""
  names = [row["name"] for row in case["results"]]
  return longer("|".join(names), "|".join(x for x in names if named and named in x))(case)


rows = Cases(card=H100).table(
  ("a step, 8B's shape", own()), ("× all bytes", longer(READ, form="{:.3f}"))
)
# Requests of unequal answers, on the H100.
batcher = Cases("batcher", card=H100).table(
  ("live batch", own("Batcher")),
  ("batches that wait", "waiting"),
  ("live over waiting", longer("waiting", "Batcher")),
  ("tokens a second over a full batch's", figure("{:.2f}", "of a full batch")),
)
# Shapes that a seed drew, over the fastest of a sweep: the heuristic's cut, then and today, and a
# piece for each row.
cuts = Cases("cuts", card=H100).table(
  ("the heuristic's cut as it ran", figure("{:.2f}", "over the fastest")),
  ("today's", lambda case: over_fastest(case, contender_of(case))),
  ("a piece a row", lambda case: over_fastest(case, "programs=1,")),
)
# A token's time over products and the bytes of keys and values, and peers.
steps = Cases().table(
  ("kvjax, a token", own()),
  said("over XLA's products + KV", "{:.3f}", "products (XLA)"),
  ("over ours + KV", figure("{:.3f}", "over our products + KV", to="products")),
  ("over all bytes", longer(READ, form="{:.3f}")),
  ("PyTorch, compiled, CUDA graph", "torch, CUDA graph"),
  ("PyTorch over ours", faster("torch, CUDA graph")),
  "transformers",
  ("transformers over ours", faster("transformers")),
)
generate = Cases("generate").table(
  ("loop on the device, a token", own("loop")),
  ("`generate`", longer("loop", "generate", "{:.3f}")),
  ("streamed", longer("loop", "generate, streamed", "{:.3f}")),
  ("own loop", longer("loop", "own loop", "{:.3f}")),
  ("`chunk=1`", longer("loop", "generate, chunk=1", "{:.3f}")),
  ("an answer of 8 tokens", longer("loop", "short answer", "{:.3f}")),
)
FIGURES = {
  "TFLOP/s": "{:.0f}",
  "less work": "{:.1%}",
  "less time": "{:.1%}",
  "caches": "{:.2f} GB",
  "temporary": "{:.1f} GB",
  "of it, of 30 of the layers": "{:.1f} GB",
}


def prompts(results: Results, name: str) -> Part:
  case = results.bench("prefill")[name]
  times = {row["name"]: case[row["name"]] for row in case["results"] if row["name"] in case}
  reference = "Full" if "Full" in times else next(iter(times))
  rows = {}
  for who, time in times.items():
    figures = {x: cells.say(form, case.get(f"{who}, {x}")) for x, form in FIGURES.items()}
    rows[who] = {"time": f"{time:**}", f"over {reference}": over(time, times[reference]), **figures}
  return pd.DataFrame.from_dict(rows, "index").dropna(axis=1, how="all").rename_axis(name)


windows = Cases("prefill", "^top layer").table(
  ("Hopper's kernel", own()),
  *("our kernel", "dense"),
  ("against dense", longer("dense")),
  ("of what queries see there", figure("{:.2f}", "visible")),
)
# Cases time 64 all-reduces, one after the other; a step has two in each layer.
REDUCE = "0.015625 * 64 all-reduces"
SEVERAL = "2 devices|4 devices"


def _over_share(case: Record) -> Ratio | None:
  share = 1 / int(cells.value(case, SEVERAL).name.split()[0])
  return longer(f"{share} * 1 device + 64 all-reduces", SEVERAL)(case)


gpus = Cases("scale", "^(?!Llama-3.1-70B)").table(
  ("one", "1 device"),
  ("several", own(SEVERAL)),
  ("times as fast", faster("1 device", SEVERAL)),
  ("over its share + all-reduces", _over_share),
  ("an all-reduce in a chain", REDUCE),
  ("several, XLA's all-reduces", "2 devices, XLA's kernel"),
  ("XLA's in a chain", f"{REDUCE}, XLA's kernel"),
)

LARGE = "full|snapkv|pyramidkv|streaming_llm"
gpus_70b = Cases("scale", "^Llama-3.1-70B").table(
  ("a step", own(LARGE)),
  ("over bytes + all-reduces", longer(f"2.5 * 64 all-reduces + {READ}", LARGE)),
  ("with ART", "|".join(f"ART({name})" for name in LARGE.split("|"))),
  ("an all-reduce", REDUCE),
)
