"""For developers: kvpress beside kvjax, kept tokens and answers of the same prompts.

One checkpoint's weights, in float32 on a CPU, under both: transformers' model is made of the very
arrays that kvjax has loaded. Both read the same token ids, rows of the task `needle`, in one dense
pass each; kvpress's presses get the budgets and, where they have them, the settings of kvjax's
methods. In `aware` rows the question is read before the cut, and both sides answer. In `agnostic`
rows, kvpress's own protocol, the question follows the cut; with further settings of the presses
they are kvpress's alone: they ask whether a method that loses the needle does so by its nature.

It needs torch and kvpress, best in an environment of their own:

    python -m venv kvpress && kvpress/bin/pip install -e '.[eval]' torch kvpress
    kvpress/bin/python -m scripts.studies.beside_kvpress --checkpoint FOLDER

In OUT: settings.json, limits.json (what kvpress does not do), and rows.jsonl, written after each
prompt: a run that is killed resumes where it stopped, and `--samples` can be raised.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

import kvjax
from kvjax.models.decode.by_layer import ByLayer
from kvjax.models.decode.generate import pad, prefill
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn.transformer import Transformer
from kvjax.programs import common, console
from kvjax.programs.evals import kept, registry
from kvjax.programs.evals.prompt import Prompt, Reader
from kvjax.programs.evals.store import Store
from kvjax.programs.evals.task import Row
from kvjax.programs.retrieval_heads import places
from kvjax.runtime.shared_prefill import take
from scripts.studies import both, press_limits, pressed, sheets
from scripts.studies.pressed import ORACLE, Cut, Pressed
from scripts.tools import tablemakers
from scripts.tools.tablemakers import beside

CLOSE = 1e-2  # by which logits of the full cache may differ
MEMBERS = 8  # of a prompt pass, as many as compile in a minute or two
EIGHTH, QUARTER, HALF, WHOLE = 0.125, 0.25, 0.5, 1.0


@dataclasses.dataclass(frozen=True)
class Pair:
  """A press, and the method that is its counterpart.

  Attributes:
    press: kvpress's class, or the oracle.
    fields: its settings, where its defaults are others.
    method: kvjax's, of a budget; None: the press alone is asked.
    skip: layers that keep everything.
    under: kvpress's class of a press over this one.
    aware, agnostic: shares of the length that are kept, by mode.
  """

  press: str
  fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  method: Callable[[int], kvjax.Method] | None = None
  skip: tuple[int, ...] = ()
  under: str = ""
  aware: tuple[float, ...] = (EIGHTH,)
  agnostic: tuple[float, ...] = ()


def _over(press: str, method: Callable[[kvjax.Method], kvjax.Method]) -> Pair:
  """A press over SnapKV's, and a method over SnapKV, question before the cut and after it."""
  how: dict[str, Any] = {"under": press, "agnostic": (EIGHTH,)}
  return Pair("SnapKVPress", {"window_size": 32}, lambda n: method(kvjax.SnapKV(n)), **how)


_expected = functools.partial(kvjax.ExpectedAttention, window_size=1)  # the press has no window
_EXPECTED, _BOTH = "ExpectedAttentionPress", (EIGHTH, HALF)
PAIRS = {
  "full": Pair("KnormPress", {}, lambda budget: kvjax.Full(), aware=(WHOLE,), agnostic=(WHOLE,)),
  "snapkv": Pair("SnapKVPress", {"window_size": 32}, kvjax.SnapKV, agnostic=(EIGHTH,)),
  "pyramidkv": Pair("PyramidKVPress", {"window_size": 8}, kvjax.PyramidKV),
  "tova": Pair("TOVAPress", {}, kvjax.TOVA),
  "keydiff": Pair("KeyDiffPress", {}, kvjax.KeyDiff, agnostic=(EIGHTH,)),
  "knorm": Pair("KnormPress", {}, kvjax.Knorm, aware=_BOTH, agnostic=(EIGHTH, QUARTER, HALF)),
  "expected_attention": Pair(
    _EXPECTED, {}, _expected, aware=_BOTH, agnostic=(EIGHTH, QUARTER, HALF)
  ),
  "adakv": _over("AdaKVPress", lambda base: kvjax.AdaKV(base)),
  "chunkkv": _over("ChunkKVPress", lambda base: kvjax.ChunkKV(base, chunk=20)),
  "criticalkv": _over("CriticalKVPress", lambda base: kvjax.CriticalKV(base)),
  "lagkv": Pair(
    "LagKVPress",
    {"n_sink": 4, "lag_size": 32},
    lambda budget: kvjax.LagKV(budget, window_size=32, sinks=4),
    aware=(QUARTER,),
  ),
  "expected_attention, window 32": Pair(_EXPECTED, {}, kvjax.ExpectedAttention, aware=_BOTH),
  "knorm, layers 0 and 1 whole": Pair("KnormPress", skip=(0, 1), aware=_BOTH),
  "expected_attention, ε = 0.02": Pair(_EXPECTED, {"epsilon": 0.02}, aware=_BOTH),
  "expected_attention, 32 positions": Pair(_EXPECTED, {"n_future_positions": 32}),
  "expected_attention, no covariance": Pair(_EXPECTED, {"use_covariance": False}),
  "expected_attention, ε = 0.01, by head": Pair(
    _EXPECTED, {"epsilon": 0.01}, under="AdaKVPress", agnostic=_BOTH
  ),
  "random": Pair("RandomPress", {"seed": 0}, aware=_BOTH),
  "oracle": Pair(ORACLE),
}


@dataclasses.dataclass(frozen=True)
class Args(both.Args):
  """Kept tokens and needle scores of kvpress and kvjax, side by side."""


@dataclasses.dataclass(frozen=True)
class Cell:
  """One pair at one share of the length, in one mode."""

  pair: str
  share: float
  mode: str

  @property
  def ours(self) -> bool:
    """True if kvjax takes part."""
    return self.mode == "aware" and PAIRS[self.pair].method is not None

  def budget(self, length: int) -> int:
    return round(self.share * length)

  def cut(self, length: int, read: int) -> Cut:
    """Request to kvpress for it, of a prompt of which so many tokens are read."""
    pair = PAIRS[self.pair]
    budget = min(self.budget(length), read)
    return Cut(pair.press, pair.fields, budget, pair.skip, read, pair.under)


CELLS = tuple(
  Cell(name, share, mode)
  for mode in ("aware", "agnostic")
  for name, pair in PAIRS.items()
  for share in getattr(pair, mode)
)


class Ours:
  """kvjax's side: prompt passes for several methods whose layers are alike, then each one's answer.

  Answers run layer by layer, as prompts do: for a few steps, compiling a layer takes longest.
  """

  def __init__(self, model: Transformer, tokenizer: Tokenizer, length: int):
    self.model, self.tokenizer, self.length = model, tokenizer, length
    self.layered = ByLayer(model)
    self.methods = {cell: _method(cell, length) for cell in CELLS if cell.ours}
    alike, others = [], []
    for cell, method in self.methods.items():
      caches = jax.eval_shape(functools.partial(method.init_caches, model.spec(1, length)))
      sizes = {tuple(x.shape for x in jax.tree.leaves(layer)) for layer in caches}
      (alike if len(sizes) == 1 else others).append(cell)
    shared = [alike[i : i + MEMBERS] for i in range(0, len(alike), MEMBERS)]
    self.passes = [*shared, *([cell] for cell in others)]

  def read(self, ids: list[int]) -> tuple[np.ndarray, dict[Cell, Any]]:
    """The last logits [1, V], and each cell's caches."""
    (tokens, lengths), found = pad([ids], multiple=self.length), {}
    for cells in self.passes:
      shared = kvjax.SharedPrefill(tuple(self.methods[cell] for cell in cells))
      caches = shared.init_caches(self.model.spec(1, self.length))
      logits, caches = prefill(self.model, tokens, lengths, caches, shared, past=0)
      found |= {cell: take(caches, i) for i, cell in enumerate(cells)}
    return np.asarray(logits), found

  def answer(
    self, cell: Cell, logits: np.ndarray, caches: Any, steps: int
  ) -> tuple[str, float | None]:
    """A greedy answer without what ends it, and the share of its tokens that is cached at its end.

    Of tokens that were read as input, all but the last one; None where there are none.
    """
    past, ends = int(caches[0].seen[0]), self.tokenizer.ends
    said, caches = both.greedy(self.layered, self.methods[cell], logits, caches, steps, ends)
    read = list(range(past, int(caches[0].seen[0])))
    cached = kept.holds(both.positions(caches), read) if read else None
    return self.tokenizer.decode(said), cached


def _method(cell: Cell, length: int) -> kvjax.Method:
  return PAIRS[cell.pair].method(cell.budget(length))


def rows_of(
  reader: Reader, ours: Ours | None, theirs: Pressed, row: Row, prompt: Prompt, args: Args
) -> dict[Cell, dict[str, Any]]:
  """One prompt under every cell, on both sides, or without kvjax's.

  Raises:
    ValueError: the full cache's logits differ by more than they may.
  """
  score = registry.TASKS[both.TASK].score
  wanted = places(reader.tokenizer, prompt.ids, row.answers[0])
  gold = reader.tokenizer.encode(row.answers[0], bos=False)
  read = {"aware": len(prompt.ids), "agnostic": len(prompt.head)}
  cuts = {cell: cell.cut(args.length, read[cell.mode]) for cell in CELLS}
  with console.step("kvpress reads"):
    their_logits, left = theirs.read(prompt.ids, gold, cuts)
  said: dict[Cell, str] = {}
  with console.step("kvpress answers"):
    for mode, tail in (("aware", []), ("agnostic", prompt.tail)):
      asked = {cell: each for cell, each in left.items() if cell.mode == mode}
      for cells in pressed.alike(asked):  # caches of equal lengths run together
        several, ends = [left[cell] for cell in cells], reader.tokenizer.ends
        found = theirs.answers(several, their_logits, tail, read[mode], args.steps, ends)
        texts = map(reader.tokenizer.decode, found)
        said |= dict(zip(cells, texts, strict=True))
  rows = {}
  for cell in CELLS:
    rows[cell] = {
      "needle_kept_by_kvpress": kept.holds(left[cell].positions, wanted),
      "bytes_of_kvpress": left[cell].bytes,
      "score_of_kvpress": score(said[cell], row),
      "answer_of_kvpress": said[cell],
    }
  if ours is None:
    return rows
  with console.step("kvjax reads"):
    logits, caches = ours.read(prompt.ids)
  apart = float(np.abs(logits[0] - their_logits).max())
  if apart > CLOSE:
    raise ValueError(f"logits: found them {apart:.2g} apart, expected at most {CLOSE}")
  with console.step("kvjax answers"):
    for cell, mine in caches.items():
      positions = both.positions(mine)
      held = common.bytes_of(mine)[0]
      answer, cached = ours.answer(cell, logits, mine, args.steps)
      rows[cell] |= {
        **kept.overlap(positions, left[cell].positions),
        "needle_kept": kept.holds(positions, wanted),
        "bytes": held,
        "score": score(answer, row),
        "answer": answer,
        "answer_kept": cached,
        "logits_apart": apart,
      }
  return rows


def main(args: Args) -> None:
  common.check_numbers(args, samples=1, length=256, steps=1)
  pressed.versions()
  model, tokenizer = common.load_model(args.checkpoint)
  methods = {
    f"{cell.pair}, {cell.budget(args.length)}": repr(_method(cell, args.length))
    for cell in CELLS
    if cell.ours
  }
  presses = {
    name: [pair.press, dict(pair.fields), list(pair.skip), pair.under]
    for name, pair in PAIRS.items()
  }
  settings = both.settings(args, model, tokenizer, methods=methods, presses=presses)
  out = args.out or tablemakers.FOLDER / beside.FOLDER / settings["model"]
  store = Store(out, settings)
  if not (out / beside.LIMITS).is_file():
    with console.step("kvpress's limits"):
      sheets.write(out / beside.LIMITS, press_limits.limits())
  with console.step("the same weights in transformers"):
    theirs = Pressed(model)
  ours, reader = None if args.alone else Ours(model, tokenizer, args.length), Reader(tokenizer)

  def answer(row: Row, _: list[Cell]) -> dict[Cell, dict[str, Any]]:
    return rows_of(reader, ours, theirs, row, reader.row(row), args)

  names = {
    cell: {"mode": cell.mode, "method": cell.pair, "budget": cell.budget(args.length)}
    for cell in CELLS
  }
  both.ask(args, reader, store, names, answer)
  for each, said in both.summary(store, "mode", "method", "budget"):
    print(f"{each['mode']:9}{each['method']:40}{each['budget']:6} {said}")


if __name__ == "__main__":
  common.run(main, Args)
