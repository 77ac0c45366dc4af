"""Ltri-LLM and InfLLM: streams with a window, and their needles."""

import itertools
from collections.abc import Iterable

import pandas as pd
from scipy.stats import binomtest

from kvjax.programs.evals import stats
from scripts.studies.needle_recall import mean_recall
from scripts.tools.tablemakers import Part, Record, Results, cells, over
from scripts.tools.tablemakers.cells import say

RETRIEVING = 14  # of 32 layers: those with a retrieval head divide their blocks
MAPS = 32  # that a case of `spans` divides


def stream(results: Results) -> Part:
  """The first marks of a run, in which programs are loaded, do not count."""
  suites = {"offload": "1,048,576 tokens", "offload_128K": "131,072 tokens, divided by kernels"}
  columns = {}
  for suite, label in suites.items():
    case = results.bench(suite)["whole stream"]
    rates = case["tokens a second to each mark"][1:]
    parts = case["vectors, GiB"], case["copies, GiB"]
    columns[label] = {
      "tokens a second, from 100K tokens on": cells.span(rates, "{:,.0f}"),
      "device memory in use after every call": f"{cells.span(case['in use, GiB'], '{:.3f}')} GiB",
      "of which index vectors, copied blocks": say("{:.3f} GiB, {:.3f} GiB", *parts),
      "host memory": say("{:.1f} GiB", case["host, GiB"]),
      "a token at 100K": case["token at 100K"],
      "a token at 1024K": case.get("token at 1024K"),
    }
  return pd.DataFrame(columns).rename_axis("one H200")


def parts(results: Results) -> Part:
  bench, rows = results.bench("offload"), {}
  link, held = bench["link"], bench["stream"]
  words = ("fetch", "read out of the store"), ("append", "written to it")
  for name, how in (*words, ("device_put", "by `device_put`")):
    rate = link["bytes"] / link[name].us / 1e3
    rows[f"16 blocks of 512 KiB, {how}"] = f"{rate:.0f} GB/s, {link[name]}"
  divide = bench["spans"]["divide"] * (1 / MAPS)
  share = RETRIEVING * divide.us / bench["whole stream"]["chunk to 200K"].us
  label = f"one map a layer, of a chunk's time, in the {RETRIEVING} layers that divide"
  apart = next(row["error"] for row in held["results"] if row["name"] == "chunk at 100K")
  rows |= {
    "a map of 128 × 128 divided into spans, one layer": divide,
    label: say("{:.1%}", share),
    "index vectors on the device at 800K tokens": say("{:.3f} GiB", held["vectors, GiB"]),
    "four layers beside the reference, logits apart": say("{:.1%}", apart),
  }
  return pd.Series(rows, name="one H200").rename_axis("").to_frame()


def prefetch(results: Results) -> Part:
  suites, rows = {"offload": "", "offload_graphs": ", concurrent regions"}, {}
  for (suite, label), mark in itertools.product(suites.items(), ("100K", "792K")):
    case = results.bench(suite)["stream"]
    chunk, ahead = case[f"chunk at {mark}"], case[f"chunk at {mark}, ahead"]
    rows[f"at {mark}{label}"] = {
      "a chunk": f"{chunk:**}",
      "prefetch": ahead,
      "over without": over(ahead, chunk, "{:.3f}"),
      "a token": case[f"token at {mark}"],
    }
  return pd.DataFrame.from_dict(rows, "index").rename_axis("four layers")


def needles(results: Results, folder: str) -> Part:
  """Right answers, of all that were asked and of those that everybody answered.

  Rows are withdrawn whose heads were found on these needles, or on unknown ones.
  """
  held = results.json(f"{folder}/needles.json")
  about, answers = held["about"], {x: y for x, y in held["answers"].items() if y}
  fitted = () if about.get("fitted") else ("ltri",)
  kept = {x: y for x, y in answers.items() if "all heads" in x or not x.startswith(fitted)}
  shared, rows = set.intersection(*map(set, kept.values())), {}
  for name in filter(answers.get, about["methods"]):
    rows[cells.method(name)] = {"right of answered": "withdrawn"}
    if found := kept.get(name):
      right = {"right of answered": _right(found, found)}
      right["right where all answered"] = _right(found, shared)
      rows[cells.method(name)] = right | _retrieved(about, name, found)
  return pd.DataFrame.from_dict(rows, "index").rename_axis("method")


def apart(results: Results, folder: str) -> Part:
  """Needles that one of two rows finds and the other does not, Ltri beside each.

  p is McNemar's exact test: that either finds what the other misses as often.
  """
  answers, rows = results.json(f"{folder}/needles.json")["answers"], {}
  mine = answers.pop("ltri")
  for name, theirs in ((x, y) for x, y in answers.items() if y):
    both = [(mine[i]["right"], theirs[i]["right"]) for i in mine.keys() & theirs.keys()]
    first, second = both.count((True, False)), both.count((False, True))
    p = binomtest(first, max(1, first + second)).pvalue
    rows[cells.method(name)] = {"`ltri` alone": first, "this one alone": second, "p": f"{p:.1e}"}
  return pd.DataFrame.from_dict(rows, "index").rename_axis("beside `ltri`")


def _right(found: Record, listed: Iterable[str]) -> str:
  right = [found[i]["right"] for i in listed]
  low, high = (round(100 * x) for x in stats.wilson(sum(right), len(right)))
  return f"{sum(right)} of {len(right)} ({low}–{high} %)"


def _retrieved(about: Record, name: str, found: Record) -> dict[str, str | None]:
  """Recall, by layer the mean over answers, then over steps; that by chance."""
  if not (answers := [x for x in found.values() if x["recall"]]):  # one that failed has none
    return {}
  by_layer = mean_recall(answers).mean(0)
  # By chance: as many blocks drawn from all that have left the window.
  gone = (about["length"] - 16 - about["init"] - about["window"]) // about["block"]
  chance = None if "inject" in name else min(1.0, about["retrieved"] / max(gone, 1))
  wrong = [x["recall"][0][-1] for x in answers if not x["right"]]
  none, whole = wrong.count(0), wrong.count(1)
  shown = {"recall": f"{by_layer.mean():.3f}", "by chance": say("{:.3f}", chance)}
  shown["wrong with no block, a part, all on top"] = f"{none}, {len(wrong) - none - whole}, {whole}"
  return shown | {"best layer": f"{by_layer.max():.2f} ({by_layer.argmax()})"}
