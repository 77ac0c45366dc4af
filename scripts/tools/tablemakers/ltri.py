"""Ltri-LLM and InfLLM: streams with a window on the device, and their needles."""

from collections.abc import Iterable
from typing import Any

from scipy.stats import binomtest

from kvjax.programs.evals import stats
from scripts.studies.needle_recall import mean_recall
from scripts.tools.tablemakers import GPU, H100, Figure, Number, Part, Record, Results, Row, cells
from scripts.tools.tablemakers.cells import longer, own, say

RETRIEVING = 14  # of 32 layers: those with a retrieval head divide their blocks
MAPS = 32  # that a case of `spans` divides


def stream(results: Results) -> Part:
  case = results.bench("offload")["whole stream"]
  figures = case.figures
  parts = figures["vectors, GiB"], figures["copies, GiB"]
  rates = cells.ends(figures["tokens a second to each mark"][1:], "{:,.0f}")
  in_use = cells.ends(figures["in use, GiB"], "{:.3f}")
  rows = [
    ["tokens a second, from 100K tokens on", rates],
    ["device memory in use after every call", say("{} GiB", in_use)],
    ["of which index vectors, copied blocks", say("{:.3f} GiB, {:.3f} GiB", *parts)],
    ["host memory", say("{:.1f} GiB", figures["host, GiB"])],
    ["a token at 100K", case.time("token at 100K")],
    ["a token at 1024K", case.time("token at 1024K")],
  ]
  return cells.table(("1,048,576 tokens", "one H200"), rows)


def parts(results: Results) -> Part:
  bench, rows = results.bench("offload"), []
  link = bench["link"]
  for name, words in (
    ("fetch", "read out of the store"),
    ("append", "written to it"),
    ("device_put", "by `device_put`"),
  ):
    took = link.time(name)
    rate = say("{:.0f} GB/s, {}", link.bytes / took.us / 1e3, took)
    rows.append([f"16 blocks of 512 KiB, {words}", rate])
  divide = bench["spans"].time("divide") * (1 / MAPS)
  share = RETRIEVING * divide.us / bench["whole stream"].time("chunk to 200K").us
  label = f"one map a layer, of a chunk's time, in the {RETRIEVING} layers that divide"
  vectors = bench["stream"].figures["vectors, GiB"]
  apart = bench["stream"].rows["chunk at 100K"]["error"]
  rows += [
    ["a map of 128 × 128 divided into spans, one layer", divide],
    [label, say("{:.1%}", share)],
    ["index vectors on the device at 800K tokens", say("{:.3f} GiB", vectors)],
    ["four layers beside the reference, logits apart", say("{:.1%}", apart)],
  ]
  return cells.table(("", "one H200"), rows)


def prefetch(results: Results) -> Part:
  rows = []
  for label, suite in (("", "offload"), (", concurrent regions", "offload_graphs")):
    for mark in ("100K", "792K"):
      chunk, token = f"chunk at {mark}", f"token at {mark}"
      columns = own(chunk), f"{chunk}, ahead", longer(chunk, f"{chunk}, ahead", "{:.3f}"), token
      row = (cells.cell(results.bench(suite)["stream"], column) for column in columns)
      rows.append([f"at {mark}{label}", *row])
  return cells.table(("four layers", "a chunk", "prefetch", "over without", "a token"), rows)


# ---- needles: what was asked of every method, answered and retrieved

CARDS = {"cpu": "CPU", GPU: "NVIDIA H200", H100: "NVIDIA H100 80GB HBM3"}
FILE = "needles.json"


def needles(results: Results, folder: str) -> Part:
  """Right answers, of all that were asked and of those that everybody answered."""
  if not (results.folder / folder / FILE).is_file():
    return Part()
  about, answers, records = _read(results, folder)
  kept = {name: found for name, found in answers.items() if not _withdrawn(name, about)}
  shared = set.intersection(*map(set, kept.values()))
  rows = []
  for name in filter(answers.get, about["methods"]):
    row: list[Any] = ["withdrawn", *[None] * 4]
    if found := kept.get(name):
      row = [_right(records[name], found, listed) for listed in (found, shared)]
      row += _retrieved(records[name], about, name, list(found.values()))
    rows.append([cells.method(name), *row])
  head = ["method", "right of answered", "right where all answered"]
  head += [("recall", "{:.3f}"), ("by chance", "{:.3f}"), "best layer"]
  return cells.table(head, rows)


def apart(results: Results, folder: str) -> Part:
  """Needles that one of two rows finds and the other does not, Ltri beside each.

  p is McNemar's exact test: that either finds what the other misses as often.
  """
  _, answers, records = _read(results, folder)
  mine, rows = answers.pop("ltri"), []
  for name, theirs in answers.items():
    both = [(mine[i]["right"], theirs[i]["right"]) for i in mine.keys() & theirs.keys()]
    only = [both.count(which) for which in ((True, False), (False, True))]
    p = binomtest(only[0], max(1, sum(only))).pvalue
    numbers = (Number(x, records["ltri"], records[name]) for x in (*only, p))
    rows.append([cells.method(name), *numbers])
  head = ["beside `ltri`", *((f"{who} alone", "{:.0f}") for who in ("`ltri`", "this one"))]
  return cells.table([*head, ("p", "{:.1e}")], rows)


def _read(results: Results, folder: str) -> tuple[Row, ...]:
  """Words about a run, and the answers of each method that was asked, and their records."""
  file, card = f"{folder}/{FILE}", CARDS[folder.partition("/")[0]]
  held = results.json(file)
  asked = {name: found for name, found in held["answers"].items() if found}
  records = {
    name: Record(file, ("answers", name), card, len(found), frozenset(found))
    for name, found in asked.items()
  }
  return held["about"], asked, records


def _withdrawn(name: str, about: Row) -> bool:
  """True where retrieval heads were found on these needles, or on unknown ones."""
  return name.startswith("ltri") and "all heads" not in name and not about.get("fitted")


def _right(record: Record, found: Row, listed: Iterable[str]) -> Figure:
  right = [found[i]["right"] for i in listed]
  low, high = (round(100 * x) for x in stats.wilson(sum(right), len(right)))
  return Figure(f"{sum(right)} of {len(right)} ({low}–{high} %)", (record,))


def _retrieved(record: Record, about: Row, name: str, answers: list[Row]) -> list[Any]:
  """Recall, by layer the mean over answers, then over steps; that by chance."""
  answers = [found for found in answers if found["recall"]]  # one that failed has none
  if not answers:
    return [None, None, None]
  by_layer = mean_recall(answers).mean(0)
  best = Figure(f"{by_layer.max():.2f} ({by_layer.argmax()})", (record,))
  # By chance: as many blocks drawn from all that have left the window.
  gone = (about["length"] - 16 - about["init"] - about["window"]) // about["block"]
  chance = Number(min(1.0, about["retrieved"] / max(gone, 1)), record)
  return [Number(by_layer.mean(), record), None if "inject" in name else chance, best]
