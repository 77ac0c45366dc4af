"""kvpress and kvjax on the same prompts: what both keep and find, and what each library does."""

import functools
from fractions import Fraction
from typing import Any

from kvjax import METHODS

from ..evals import kept, store
from ..evals.stats import Estimate
from . import cells
from .results import Results

FOLDER = "cpu/kvpress"
LIMITS = "limits.json"
BY = ("model", "length", "mode", "method", "budget")
MODES = {"aware": "before the cut", "agnostic": "after it"}

Found = list[dict[str, Any]]


@functools.cache
def found(results: Results) -> tuple[Found, list[dict[str, Any]]]:
  """Each cell's means, of all models, and the models' settings.

  Raises:
    FileNotFoundError: there are no results.
  """
  folders = sorted(path.parent for path in (results.folder / FOLDER).glob(f"*/{store.SETTINGS}"))
  if not folders:
    raise FileNotFoundError(f"{results.folder / FOLDER}: found no results of beside_kvpress")
  settings = [store.settings_of(folder) for folder in folders]
  means: Found = []
  for folder, own in zip(folders, settings, strict=True):
    rows = [{**row, "model": own["model"]} for row in store.read(folder)]
    means += kept.summary(rows, BY)
  return means, settings


def about(results: Results) -> list[str]:
  """What the tables are of."""
  means, settings = found(results)
  texts = []
  for own in settings:
    mine = [each for each in means if each["model"] == own["model"]]
    apart = [each["logits_apart"] for each in mine if "logits_apart" in each]
    n = "n = " + _span({each["n"] for each in mine})
    who = f"logits of the full caches at most {max(apart):.0e} apart" if apart else "kvpress alone"
    texts.append(f"{own['model']}, {own['length']:,} tokens, {n}, {who}")
  versions = settings[0]["versions"]
  names = ", ".join(f"{name} {versions[name]}" for name in ("kvpress", "transformers", "torch"))
  return cells.sentence(f"{'; '.join(texts)}. {names}; jax {versions['jax']}.")


def pairs(results: Results) -> list[str]:
  """Methods that both libraries have, at equal budgets; the question is read before the cut."""
  rows = []
  for each in found(results)[0]:
    if "equal" not in each:
      continue
    rows.append(
      [
        *_named(each),
        _both(each, "kept", "kept_by_kvpress", "{:.0f}"),
        *(_share(each[name]) for name in ("equal", "of_fewer", "identical")),
        _both(each, "needle_kept", "needle_kept_by_kvpress", "{:.0f} %", 0.01),
        *(_percent(each[name]) for name in ("score", "score_of_kvpress")),
        f"{each['same_answers']} of {each['n']}",
        cells.percent(each["answer_kept"]) if "answer_kept" in each else "–",
        _both(each, "bytes", "bytes_of_kvpress", "{:.2f}", 1e6),
      ]
    )
  head = ("model", "method", "kept", "tokens a head", "equal", "of fewer", "heads alike")
  ends = (
    "needle's tokens kept",
    "found by kvjax",
    "by kvpress",
    "same answer",
    "of it cached",
    "MB",
  )
  return cells.table((*head, *ends), rows)


def presses(results: Results) -> list[str]:
  """What kvpress finds under its own protocol and other settings, and two yardsticks.

  A press that stands there for several methods of kvjax has one row.
  """
  means, settings = found(results)
  models = [own["model"] for own in settings]
  asked: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
  for each in means:
    own = settings[models.index(each["model"])]["presses"]
    first = next(name for name in own if own[name] == own[each["method"]])
    if first == each["method"] or each["method"] == "knorm":  # all at ratio 0 is "full"
      cell = (*_named(each)[1:], MODES[each["mode"]])
      asked.setdefault(cell, {})[each["model"]] = each
  rows = []
  for named, by_model in asked.items():
    row = list(named)
    for model in models:
      each = by_model.get(model)
      row += (
        ["", ""]
        if each is None
        else [
          cells.percent(each["needle_kept_by_kvpress"]),
          _percent(each["score_of_kvpress"]),
        ]
      )
    rows.append(row)
  head = ["press", "kept", "question"]
  for model in models:
    head += [f"{model}: needle's tokens kept", "found"]
  return cells.table(head, rows)


def libraries(results: Results) -> list[str]:
  """What each library does, from its sources; bytes and padded rows are measured.

  Raises:
    ValueError: a figure is missing, or kvpress does what `FACTS` says that it does not.
  """
  means, settings = found(results)
  last = next((own for own in settings if not own["alone"]), settings[0])
  limits = results.json(f"{FOLDER}/{last['model']}/{LIMITS}")
  if not limits["uneven"]:
    raise ValueError(f"{FOLDER}: found a question behind uneven layers answered, expected an error")
  shares = [cells.percent(limits["padded"][f"{name}Press"]) for name in ("KeyDiff", "TOVA")]

  def mb(name: str, side: str) -> str:
    for each in means:
      if (each["model"], each["method"]) == (last["model"], name) and side in each:
        return f"{each[side] / 1e6:.1f} MB"
    raise ValueError(f"{FOLDER}: found no {side} of {name!r} of {last['model']}")

  def freed(side: str) -> str:
    return f"{mb('full', side)} become {mb('snapkv', side)} (SnapKV)"

  head = ("", "kvjax", f"kvpress {last['versions']['kvpress']}")
  rows = [
    (
      "memory is freed",
      f"yes: {freed('bytes')}; allocated beforehand",
      f"yes, layer by layer: {freed('bytes_of_kvpress')}",
    ),
    (
      "budgets by head",
      "AdaKV and DuoAttention: a layer has as many slots as its heads keep",
      f"keys are hidden: {mb(BY_HEAD, 'bytes_of_kvpress')} stay (AdaKVPress)",
    ),
    (
      "batch",
      "each row has its own true length; rows are isolated",
      "presses do not look at a padding mask: of 50 tokens that a row of 200 keeps, it keeps "
      f"{shares[0]} (KeyDiff) to {shares[1]} (TOVA) behind 56 pads (a random model); the pipeline "
      "reads one context at a time",
    ),
    *FACTS,
    ("methods", f"{len(METHODS)} registered", f"{limits['presses']} presses, wrappers included"),
  ]
  return cells.table(head, rows)


BY_HEAD = "expected_attention, ε = 0.01, by head"
FACTS = (
  (
    "when it cuts",
    "a prompt as it is read, and the budget holds in every decode step",
    "once, after a prompt; while decoding only under DecodingPress, every 512 steps to 2,048",
  ),
  (
    "a question after the cut",
    "is ranked with what is cached, within the budget",
    "is appended",
  ),
  (
    "methods that keep all and read a part",
    "Quest, Double Sparsity, InfLLM-v2, CIS, HShare, PRR, ART and others",
    "none: what is cut is gone, or hidden",
  ),
  (
    "grouped queries",
    "one selection a KV head, keys never repeated in memory",
    "one selection a KV head; scoring repeats keys for the query heads",
  ),
  (
    "layers of different sizes (PyramidKV)",
    "any later turn is read",
    "one token at a time; a longer question fails under `sdpa`, as one mask serves all layers",
  ),
  (
    "kernels",
    "Pallas, for decode, prompts, scoring and selection; a reference of each",
    "none of its own: transformers' attention, torch",
  ),
  (
    "speed",
    "measured on an H200, above; static shapes, no second trace",
    "no figures here; eager, and caches change their size",
  ),
  (
    "models",
    "its own decoder: Llama, Mistral, Qwen, Phi, GLM-4, Gemma 2 and 3, gpt-oss",
    "those of transformers: Llama, Mistral, Phi-3, Qwen2, Qwen3, Gemma 3 tested",
  ),
  ("quantised caches", "8, 4 or 2 bits under most methods; KIVI", "transformers' QuantizedCache"),
)


def _named(each: dict[str, Any]) -> list[str]:
  method, comma, rest = each["method"].partition(",")
  share = Fraction(each["budget"], each["length"]).limit_denominator(64)
  return [each["model"], f"`{method}`{comma}{rest}", "all" if share == 1 else str(share)]


def _both(each: dict[str, Any], ours: str, theirs: str, form: str, unit: float = 1) -> str:
  """Two figures, or one where they read alike."""
  left, right = (form.format(each[name] / unit) for name in (ours, theirs))
  return left if left == right else f"{left} / {right}"


def _share(x: float) -> str:
  """A share that is 100 % only where nothing differs."""
  if x == 1:
    return "100 %"
  return f"{min(100 * x, 99.99):.2f} %" if x > 0.99 else cells.percent(x)


def _percent(score: Estimate) -> str:
  return f"{100 * score.mean:.0f} ({100 * score.low:.0f}–{100 * score.high:.0f})"


def _span(numbers: set[int]) -> str:
  low, high = min(numbers), max(numbers)
  return str(low) if low == high else f"{low} to {high}"
