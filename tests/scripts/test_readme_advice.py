"""Advice in README files holds in the stored results, or in the facts of the library."""

import functools
import gzip
import json
import statistics

import pytest

import kvjax
from kvjax.methods import labels
from kvjax.programs.evals import advice, choices
from tests.processes import ROOT

REAL = ROOT / "scripts/results/nvidia-h200/real"
SPEC = kvjax.CacheSpec(batch=1, layers=4, kv_heads=2, groups=2, head_dim=64, capacity=4096)


@functools.cache
def times():
  """Microseconds of a step by (length, batch), then by method and budget."""
  found = {}
  for row in map(json.loads, (REAL / "speed.jsonl").read_text("utf-8").splitlines()):
    found.setdefault((row["length"], row["batch"]), {})[row["method"], row["budget"]] = row["us"]
  return found


def traits(label):
  return labels.instance(label, 1024).traits


def keeping_all_is_slower_on_a_single_row():
  cells = [cell for (_, batch), cell in times().items() if batch == 1]
  return cells and all(
    us > cell["full", None]
    for cell in cells
    for (label, _), us in cell.items()
    if label != "full" and traits(label).positional
  )


def second_questions_miss_what_was_evicted():
  scores = {}
  with gzip.open(REAL / "rows.jsonl.gz", "rt", encoding="utf-8") as file:
    for row in map(json.loads, file):
      if row["mode"] == "second":
        scores.setdefault(row["method"], []).append(row["score"])
  means = {label: statistics.mean(each) for label, each in scores.items()}
  evicting = [label for label in means if not traits(label).positional]
  return evicting and all(means[label] < 0.9 * means["full"] for label in evicting)


def only_these_keep_tokens_on_the_host():
  plans = {x: kvjax.plan_memory(SPEC, labels.instance(x, 1024), apart=True) for x in kvjax.METHODS}
  return {name for name, plan in plans.items() if plan.host} == {"ltri", "infllm"}


def streaming_llm_ends_nowhere():
  longer = kvjax.plan_memory(SPEC, labels.instance("streaming_llm", 1024)).device
  return traits("streaming_llm").endless and longer < kvjax.plan_memory(SPEC, kvjax.Full()).device


def art_is_rarely_faster():
  ratios = [
    us / cell["full", None]
    for cell in times().values()
    for (label, _), us in cell.items()
    if label.startswith("art")
  ]
  return 0 < sum(ratio < 1 for ratio in ratios) < len(ratios) / 10


def prr_is_slower_than_quest():
  pairs = [(cell["prr", 1024], cell["quest", 1024]) for cell in times().values()]
  return pairs and all(prr > quest for prr, quest in pairs)


def these_bound_distances():
  named = {"streaming_llm", "lm_infinite", "infllm", "ltri"}
  return {name for name in kvjax.METHODS if traits(name).endless} == named


ADVICE = [
  ("README.md", "a single row, methods that keep all", keeping_all_is_slower_on_a_single_row),
  ("README.md", "a second question may need them", second_questions_miss_what_was_evicted),
  ("README.md", "device memory use `ltri` or `infllm`", only_these_keep_tokens_on_the_host),
  ("README.md", "for endless chats `streaming_llm`", streaming_llm_ends_nowhere),
  ("README.md", "is rarely faster than `full`", art_is_rarely_faster),
  ("README.md", "is slower than `quest` at equal budgets", prr_is_slower_than_quest),
  ("README.md", "reach `98 %` of the full", lambda: choices.AIMS[0].share == 0.98),
  ("models/README.md", "`infllm` and `ltri`, which bound distances", these_bound_distances),
  ("scripts/README.md", "each a tenth better", lambda: advice.BETTER == 0.9),
  ("scripts/README.md", "keep 98 % of the full cache's score", lambda: advice.SHARES[0] == 0.98),
  ("scripts/README.md", "(90 % where none does)", lambda: advice.SHARES[1] == 0.9),
]


@pytest.mark.parametrize(("page", "sentence", "holds"), ADVICE)
def test_advice_holds(page, sentence, holds):
  text = " ".join((ROOT / page).read_text("utf-8").split())
  assert sentence in text
  assert holds()
