"""Ltri-LLM and InfLLM: streams of which a window is on the device, and needles in them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax.programs.evals import stats
from scripts.tools.tablemakers import cells
from scripts.tools.tablemakers.cells import longer, median, own
from scripts.tools.tablemakers.records import NOTHING, Figure, Number, Part, Record
from scripts.tools.tablemakers.results import GPU, Case, Results

RETRIEVING = 14  # of 32 layers: those with a retrieval head divide their blocks
MARKS = ("100K", "1024K")
MAPS = 32  # that a case of `spans` divides


def _whole(results: Results) -> Case:
  return results.bench("offload").case("whole stream")


def _rates(case: Case) -> Figure:
  """Tokens a second from the first mark on, the least to the most."""
  (listed,) = case.remark(r"^tokens a second to each mark: ([\d, ]+)$")
  later = [int(rate.replace(",", "")) for rate in listed.split(", ")[1:]]
  return Figure(f"{min(later):,} to {max(later):,}", listed.records)


def _in_use(case: Case) -> Figure:
  low, high = case.remark(r"device memory in use ([\d.]+) to ([\d.]+) GiB")
  return cells.join("{} GiB", low) if low == high else cells.join("{} to {} GiB", low, high)


def _vectors(results: Results) -> Figure:
  """Index vectors on the device at 800K tokens."""
  stream = results.bench("offload").case("stream")
  return cells.join("{} GiB", *stream.remark(r"allocated for 819,200 tokens: ([\d.]+) GiB of vec"))


def stream(results: Results) -> Part:
  case = _whole(results)
  host, vectors, copies = case.remark(
    r"host memory ([\d.]+) GiB; .* has ([\d.]+) GiB of vectors, ([\d.]+) GiB of copies"
  )
  rows = [
    ["tokens a second, from 100K tokens on", _rates(case)],
    ["device memory in use after every call", _in_use(case)],
    ["of which index vectors, copied blocks", cells.join("{} GiB, {} GiB", vectors, copies)],
    ["host memory", cells.join("{} GiB", host)],
    *([f"a token at {mark}", median(f"token at {mark}")(case)] for mark in MARKS),
  ]
  return cells.table(("1,048,576 tokens", ""), rows)


def parts(results: Results) -> Part:
  bench = results.bench("offload")
  ways = {
    "fetch": "read out of the store",
    "append": "written to it",
    "device_put": "by `device_put`",
  }
  link = bench.case("link")
  rows = [[f"16 blocks of 512 KiB, {words}", _rate(link, name)] for name, words in ways.items()]
  divide = bench.case("spans").time("divide").scaled(1 / MAPS)
  share = RETRIEVING * divide.us / _whole(results).time("chunk to 200K").us
  label = f"one map a layer, of a chunk's time, in the {RETRIEVING} layers that divide"
  apart = bench.case("stream").error("chunk at 100K")
  rows += [
    ["a map of 128 × 128 divided into spans, one layer", cells.time(divide)],
    [label, cells.percent(share, 1)],
    ["index vectors on the device at 800K tokens", _vectors(results)],
    ["four layers beside the reference, logits apart", cells.percent(apart, 1)],
  ]
  return cells.table(("", ""), rows)


def _rate(case: Case, name: str) -> Figure:
  rate = cells.number(1 / (case.time(name).us / case.bytes) / 1e3, "{:.0f} GB/s")
  return cells.join("{}, {}", rate, median(name)(case))


def prefetch(results: Results) -> Part:
  rows = []
  for label, suite in (("", "offload"), (", concurrent regions", "offload_graphs")):
    case = results.bench(suite).case("stream")
    for mark in ("100K", "792K"):
      chunk, ahead = f"chunk at {mark}", f"chunk at {mark}, ahead"
      columns = (
        own(chunk),
        median(ahead),
        longer(ahead, chunk, "{:.3f}"),
        median(f"token at {mark}"),
      )
      rows.append([f"at {mark}{label}", *(show(case) for show in columns)])
  return cells.table(("four layers", "a chunk", "prefetch", "over without", "a token"), rows)


# ---- needles: of every method what was asked, what it answered, and what it retrieved

H100 = "nvidia-h100-80gb-hbm3"
CARDS = {"cpu": "CPU", GPU: "NVIDIA H200", H100: "NVIDIA H100 80GB HBM3"}
QUOTED = {"2K": "cpu/needles", "8K": f"{GPU}/needles", "real": f"{H100}/real/needles"}
FILE = "needles.json"
# Their retrieval heads were found on these very needles, and they do not say on which.
WITHDRAWN = "withdrawn"


def needles(results: Results, folder: str) -> Part:
  """Right answers of all that were asked, and of those that everybody answered."""
  if not (results.folder / folder / FILE).is_file():
    return Part()
  held = results.json(f"{folder}/{FILE}")
  about, answers = held["about"], {name: found for name, found in held["answers"].items() if found}
  kept = {name: found for name, found in answers.items() if not _withdrawn(name, about)}
  shared = sorted(set.intersection(*map(set, kept.values())))
  rows = []
  for name in about["methods"]:
    method, comma, rest = name.partition(",")
    row = ["–"] * 4
    if name in kept:
      record = _record(folder, about, name, kept[name])
      right = [_right(record, kept[name], listed) for listed in (list(kept[name]), shared)]
      row = [*right, *_retrieved(record, about, name, list(kept[name].values()))]
    elif name in answers:
      row = [WITHDRAWN, *row]
    else:
      row = ["not run: longer than its context" if name == "full" else "not run", *row]
    rows.append([f"`{method}`{comma}{rest}", *row])
  head = ("method", "right of answered", "right where all answered", "recall", "by chance")
  return cells.table((*head, "best layer"), rows)


def _withdrawn(name: str, about: dict[str, Any]) -> bool:
  return name.startswith("ltri") and "all heads" not in name and not about.get("fitted")


def _record(folder: str, about: dict[str, Any], name: str, found: dict[str, Any]) -> Record:
  setting = f"{about['methods'][name]}, {about['length']} tokens"
  fitted = "; ".join(about.get("fitted", ())) or NOTHING
  file, card = f"{folder}/{FILE}", CARDS[folder.partition("/")[0]]
  return Record(file, ("answers", name), card, len(found), setting, fitted, frozenset(found))


def _right(record: Record, found: dict[str, Any], listed: Sequence[str]) -> Figure:
  hits = sum(found[i]["right"] for i in listed)
  low, high = (round(100 * x) for x in stats.wilson(hits, len(listed)))
  return Figure(f"{hits} of {len(listed)} ({low}–{high} %)", (record,))


def _retrieved(
  record: Record, about: dict[str, Any], name: str, answers: list[dict[str, Any]]
) -> list[str]:
  """Recall, by layer the mean over answers that have a step, then over steps; that by chance."""
  if not answers[0]["recall"]:
    return ["–", "–", "–"]
  steps = range(max(len(found["recall"]) for found in answers))
  rows = [[a["recall"][i] for a in answers if len(a["recall"]) > i] for i in steps]
  by_layer = np.mean([np.mean(row, 0) for row in rows], 0)
  drawn = "–" if "inject" in name else cells.number(Number(_chance(about), record), "{:.3f}")
  best = Figure(f"{by_layer.max():.2f} ({by_layer.argmax()})", (record,))
  return [cells.number(Number(by_layer.mean(), record), "{:.3f}"), drawn, best]


def _chance(about: dict[str, Any]) -> float:
  """Recall of as many blocks drawn from all that leave the window before the answer."""
  gone = (about["length"] - 16 - about["init"] - about["window"]) // about["block"]
  return min(1.0, about["retrieved"] / max(gone, 1))


# ---- figures in sentences


def figures(results: Results) -> dict[str, str]:
  whole = _whole(results)
  found = {
    "vectors": _vectors(results),
    "rates": _rates(whole),
    "token": median(f"token at {MARKS[-1]}")(whole),
    "in-use": _in_use(whole),
  }
  for label, folder in QUOTED.items():
    held = results.json(f"{folder}/{FILE}")
    for name, answers in held["answers"].items():
      record = _record(folder, held["about"], name, answers)
      right = _right(record, answers, list(answers))
      found[f"{label}-{name.replace(', ', '-').replace(' ', '-')}"] = right
  return found
