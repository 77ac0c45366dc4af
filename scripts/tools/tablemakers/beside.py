"""kvpress and kvjax on the same prompts: what both keep and find, and what each library does."""

import functools
from fractions import Fraction
from typing import Any

from kvjax.programs.evals import kept, store
from scripts.tools.tablemakers import cells, scored
from scripts.tools.tablemakers.records import NOTHING, Figure, Part, Record
from scripts.tools.tablemakers.results import Results

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
    for each in kept.summary(rows, BY):
      means.append({**each, "record": _record(own, each)})
  return means, settings


def _record(own: dict[str, Any], each: dict[str, Any]) -> Record:
  place = tuple((name, each[name]) for name in BY[1:])
  setting = own["methods"].get(f"{each['method']}, {each['budget']}", each["method"])
  file = f"{FOLDER}/{own['model']}/{store.ROWS}"
  return Record(file, place, "CPU", each["n"], f"{own['model']}, {setting}", NOTHING)


def said(each: dict[str, Any], text: str) -> Figure:
  """A text with figures of a cell."""
  return Figure(text, (each["record"],))


def about(results: Results) -> Part:
  """What the tables are of."""
  means, settings = found(results)
  texts = []
  for own in settings:
    mine = [each for each in means if each["model"] == own["model"]]
    apart = [each for each in mine if "logits_apart" in each]
    who = "kvpress alone"
    if apart:
      far = max(apart, key=lambda each: each["logits_apart"])
      far = said(far, f"{far['logits_apart']:.0e}")
      who = cells.join("logits of the full caches at most {} apart", far)
    n = Figure(_span({each["n"] for each in mine}), (each["record"] for each in mine))
    texts.append(cells.join(f"{own['model']}, `{own['length']:,}` tokens, n = {{}}, {{}}", n, who))
  versions = settings[0]["versions"]
  names = ", ".join(f"{name} `{versions[name]}`" for name in ("kvpress", "transformers", "torch"))
  return cells.sentence(f"{{}}. {names}; jax `{versions['jax']}`.", cells.listed(texts, "; "))


def pairs(results: Results) -> Part:
  """Methods that both libraries have, at equal budgets; the question is read before the cut."""
  rows = []
  for each in found(results)[0]:
    if "equal" not in each:
      continue
    rows.append(
      [
        *_named(each),
        _both(each, "kept", "kept_by_kvpress", "{:.0f}"),
        *(said(each, share(each[name])) for name in ("equal", "of_fewer", "identical")),
        _both(each, "needle_kept", "needle_kept_by_kvpress", "{:.0f} %", 0.01),
        *(said(each, scored.percent(each[name])) for name in ("score", "score_of_kvpress")),
        said(each, f"{each['same_answers']} of {each['n']}"),
        said(each, f"{each['answer_kept']:.0%}") if "answer_kept" in each else "–",
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
  return cells.table((*head, *ends), rows, labels=3)


def presses(results: Results) -> Part:
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
          said(each, f"{each['needle_kept_by_kvpress']:.0%}"),
          said(each, scored.percent(each["score_of_kvpress"])),
        ]
      )
    rows.append(row)
  head = ["press", "kept", "question"]
  for model in models:
    head += [f"{model}: needle's tokens kept", "found"]
  return cells.table(head, rows, labels=3)


def libraries(results: Results) -> Part:
  """What each library does, from its sources; bytes and padded rows are measured.

  Raises:
    ValueError: a figure is missing, or kvpress does what `FACTS` says that it does not.
  """
  means, settings = found(results)
  last = next((own for own in settings if not own["alone"]), settings[0])
  limits = results.json(f"{FOLDER}/{last['model']}/{LIMITS}")
  if not limits["uneven"]:
    raise ValueError(f"{FOLDER}: found a question behind uneven layers answered, expected an error")
  path = f"{FOLDER}/{last['model']}/{LIMITS}"
  study = results.study(
    path, card="CPU", n=1, setting="a random model, a row of 200 behind 56 pads"
  )
  shares = [cells.percent(study.number("padded", f"{name}Press")) for name in ("KeyDiff", "TOVA")]

  def mb(name: str, side: str) -> Figure:
    for each in means:
      if (each["model"], each["method"]) == (last["model"], name) and side in each:
        return said(each, f"{each[side] / 1e6:.1f} MB")
    raise ValueError(f"{FOLDER}: found no {side} of {name!r} of {last['model']}")

  def freed(template: str, side: str) -> Figure:
    return cells.join(template, mb("full", side), mb("snapkv", side))

  head = ("", "kvjax", f"kvpress {last['versions']['kvpress']}")
  rows = [
    (
      "memory is freed",
      freed("yes: {} become {} (SnapKV); allocated beforehand", "bytes"),
      freed("yes, layer by layer: {} become {} (SnapKV)", "bytes_of_kvpress"),
    ),
    (
      "budgets by head",
      "AdaKV and DuoAttention: a layer has as many slots as its heads keep",
      cells.join("keys are hidden: {} stay (AdaKVPress)", mb(BY_HEAD, "bytes_of_kvpress")),
    ),
    (
      "batch",
      "each row has its own true length; rows are isolated",
      cells.join(
        "presses do not look at a padding mask: of the tokens that a row keeps without, it keeps "
        "{} (KeyDiff) to {} (TOVA) behind pads (a random model); the pipeline reads one context at "
        "a time",
        *shares,
      ),
    ),
    *FACTS,
    (
      "methods",
      "those of `kvjax.METHODS`",
      cells.join("{} presses, wrappers included", cells.number(study.number("presses"), "{:.0f}")),
    ),
  ]
  return cells.table(head, rows)


BY_HEAD = "expected_attention, ε = 0.01, by head"
FACTS = (
  (
    "when it cuts",
    "a prompt as it is read, and the budget holds in every decode step",
    "once, after a prompt; while decoding only under DecodingPress, every some hundred steps",
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
    "measured; static shapes, no second trace",
    "no figures here; eager, and caches change their size",
  ),
  (
    "models",
    "its own decoder: Llama, Mistral, Qwen, Phi, GLM-4, Gemma, gpt-oss",
    "those of transformers: Llama, Mistral, Phi-3, Qwen2, Qwen3, Gemma tested",
  ),
  (
    "quantised caches",
    "two to eight bits under most methods; KIVI",
    "transformers' QuantizedCache",
  ),
)


def _named(each: dict[str, Any]) -> list[str]:
  method, comma, rest = each["method"].partition(",")
  share = Fraction(each["budget"], each["length"]).limit_denominator(64)
  return [each["model"], f"`{method}`{comma}{rest}", "all" if share == 1 else str(share)]


def _both(each: dict[str, Any], ours: str, theirs: str, form: str, unit: float = 1) -> Figure:
  """Two figures, or one where they read alike."""
  left, right = (form.format(each[name] / unit) for name in (ours, theirs))
  return said(each, left if left == right else f"{left} / {right}")


def share(x: float) -> str:
  """A share that is 100 % only where nothing differs."""
  if x == 1:
    return "100 %"
  return f"{min(100 * x, 99.99):.2f} %" if x > 0.99 else f"{100 * x:.0f} %"


def _span(numbers: set[int]) -> str:
  low, high = min(numbers), max(numbers)
  return str(low) if low == high else f"{low} to {high}"
