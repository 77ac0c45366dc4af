"""Several GPUs: one program over two and four devices, beside one."""

import re

from scripts.tools.tablemakers import cells
from scripts.tools.tablemakers.records import Figure, Part
from scripts.tools.tablemakers.results import Case, Results, Timing
from scripts.tools.tablemakers.steps import BANDWIDTH

CHAIN = 64  # all-reduces that a case times, one after the other
XLA = ", XLA's kernel"
SPLIT = {
  "Llama-3.1-8B B8 T32768, heads over 2": "a step, B8 T32K, heads over two",
  "Llama-3.1-8B B8 T32768, heads over 4": "a step, B8 T32K, heads over four",
  "Llama-3.1-8B B1 T262144, slots over 2": "a step, B1 T256K, slots over two",
  "attention B1 T524288, slots over 2": "attention, B1 T512K, slots over two",
  "attention B1 T524288, slots over 4": "attention, B1 T512K, slots over four",
  "Llama-3.1-8B prompt of 32768, heads over 2": "a prompt of 32K, heads over two",
  "Llama-3.1-8B prompt of 32768, slots over 2": "a prompt of 32K, slots over two",
}
LARGE = {  # Llama-3.1-70B's shape: two all-reduces in each of 80 layers
  2: ("snapkv", "pyramidkv", "streaming_llm"),
  4: ("full", "snapkv", "streaming_llm"),
}
REDUCES = {"8B": 64, "70B": 160}


def case(results: Results, name: str) -> Case:
  return results.bench("scale").case(name)


def faster(held: Case) -> cells.Pair:
  """One device's time over that of several."""
  return cells.gain(held.time(f"{_devices(held)} devices"), held.time("1 device"))


def _devices(held: Case) -> int:
  match = re.search(r" over (\d+)", held.name)
  if not match:
    raise ValueError(f"{held.path}, {held.name}: found no number of devices in the case's name")
  return int(match[1])


def bound(held: Case) -> Timing:
  """An equal share of one device's time, and the all-reduces."""
  return held.time("1 device").scaled(1 / _devices(held)).then(_reduces(held, "", "8B"))


def _reduces(held: Case, kernel: str, model: str) -> Timing:
  return held.time(f"{CHAIN} all-reduces{kernel}").scaled(REDUCES[model] / CHAIN)


def split(results: Results) -> Part:
  rows = []
  for name, label in SPLIT.items():
    held = case(results, name)
    several = held.time(f"{_devices(held)} devices")
    over = "–"
    if "heads" in name and "prompt" not in name:
      over = cells.ratio(*cells.over(several, bound(held)))
    one = cells.time(held.time("1 device"))
    rows.append([label, one, cells.ours(several), cells.ratio(*faster(held)), over])
  head = ("Llama-3.1-8B's shape", "one", "several", "times as fast", "over its share + all-reduces")
  return cells.table(head, rows)


def reduces(results: Results) -> Part:
  """NCCL's all-reduces beside XLA's own kernel."""
  held = case(results, next(iter(SPLIT)))
  rows = []
  for label, kernel in (("NCCL", ""), ("XLA's kernel", XLA)):
    chain = held.time(f"{CHAIN} all-reduces{kernel}")
    rows.append(
      [label, cells.time(chain.scaled(1 / CHAIN)), cells.ours(held.time(f"2 devices{kernel}"))]
    )
  return cells.table(("heads over two, B8 T32K", "an all-reduce in a chain", "a step"), rows)


def large(results: Results) -> Part:
  rows = []
  for devices, methods in LARGE.items():
    for method in methods:
      held = case(results, f"Llama-3.1-70B B8 T32768, heads over {devices}, {method} and ART")
      took = held.time(method)
      least = _reduces(held, "", "70B").later(held.bytes / BANDWIDTH * 1e6)
      rows.append(
        [
          f"`{method}`, over {devices}",
          cells.ours(took),
          cells.ratio(*cells.over(took, least)),
          cells.time(held.time(f"ART({method})")),
          cells.time(held.time(f"{CHAIN} all-reduces").scaled(1 / CHAIN)),
        ]
      )
  head = ("Llama-3.1-70B's shape, B8 T32K", "a step", "over bytes + all-reduces", "with ART")
  return cells.table((*head, "an all-reduce"), rows)


def in_short(results: Results) -> Figure:
  """The line of the results in short."""
  two = [name for name in SPLIT if name.endswith("over 2")]
  heads, slots, attention, prompt, by_slots = (
    cells.ratio(*faster(case(results, name))) for name in two
  )
  return cells.join(
    "the 8B step at B8 T32K {} × as fast with its heads split, at B1 T256K {} × with its slots "
    "split; a prompt of T32K {} × and {} ×; attention over T512K {} ×",
    heads,
    slots,
    prompt,
    by_slots,
    attention,
  )
