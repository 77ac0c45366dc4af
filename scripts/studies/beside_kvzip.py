"""For developers: KVzip beside kvpress's, by how a budget is divided among heads and layers.

One checkpoint's weights, in float32 on a CPU, under both (`scripts.studies.pressed`). Rows of the
task `needle`: the context is read, repeated and cut before the question, which stays whole. The
markup before the user's text stays and is not repeated, as in the authors' code. Three ways to
divide as many tokens: `head`, all heads alike (the paper's pair-uniform, which no press does:
kvpress's own scores are cut); `layer`, the heads of a layer compete (AdaKV over KVzip; the press's
`layerwise`); `all`, the heads of all layers do (the paper's default, and the press's). Two more, of
kvpress alone, ask what a single layer does, the one that has most under `all`: in `one` it is whole
and the others are as in `head`; in `without` it is as in `head` and the others as in `all`.

It needs torch and kvpress, in an environment of their own, as `scripts.studies.beside_kvpress`
says. In OUT: settings.json and rows.jsonl, written after each prompt: a killed run resumes.
"""

import dataclasses
import itertools
import types
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.models.decode import reconstruct
from kvjax.models.decode.by_layer import ByLayer
from kvjax.models.decode.caches import fork
from kvjax.models.decode.generate import pad
from kvjax.models.decode.reconstruct import Instructions
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn.transformer import Transformer
from kvjax.programs import common, console
from kvjax.programs.evals import kept, registry
from kvjax.programs.evals.prompt import Prompt, Reader
from kvjax.programs.evals.store import Store
from kvjax.programs.evals.task import Row
from kvjax.programs.retrieval_heads import places
from scripts.studies import both, pressed
from scripts.studies.pressed import Pressed
from scripts.tools import tablemakers
from scripts.tools.tablemakers import beside

ROOM = 128


@dataclasses.dataclass(frozen=True)
class Args(both.Args):
  length: int = 1536
  """Tokens of a prompt and its answer."""
  parts: tuple[int, ...] = (16, 8, 4, 2)
  """Of a context this part is kept: a sixteenth, …"""


class Theirs:
  """kvpress's side: `KVzipPress` on the checkpoint's weights, with kvjax's tokenizer."""

  def __init__(self, model: Transformer, tokenizer: Tokenizer):
    self.pressed, self.tokenizer = Pressed(model), tokenizer
    self.torch = self.pressed.torch
    mark = "\ue000"
    self.before, self.behind = tokenizer.render([{"role": "user", "content": mark}]).split(mark)
    self.opening = len(tokenizer.encode(self.before, bos=False))
    module = import_module("kvpress.presses.kvzip_press")
    module.AutoTokenizer = types.SimpleNamespace(from_pretrained=lambda name: self)  # type: ignore

  # ---- what the press asks of a tokenizer

  chat_template = "as the checkpoint's"

  def apply_chat_template(self, messages: list[dict[str, str]], **how: Any) -> str:
    return self.before + messages[0]["content"] + self.behind

  def encode(self, text: str, **how: Any) -> Any:
    return self.torch.tensor([self.tokenizer.encode(text, bos=False)], dtype=self.torch.long)

  # ---- reading and answering

  def read(self, ids: list[int], counts: dict[int, int]) -> tuple[np.ndarray, Any, dict]:
    """Scores [L, K, T], the full cache, and what stays, bool [L, K, T], by (how, part)."""
    torch, library = self.torch, self.pressed.library
    masks: dict[tuple[str, int], np.ndarray] = {}
    found: list[np.ndarray] = []

    class Press(library.KVzipPress):  # type: ignore[name-defined]
      def compress_post(self, model):  # type: ignore[no-untyped-def]
        found.append(self.score_val[:, 0].clone().numpy())
        layers, _, heads, size = self.score_val.shape
        for part, count in counts.items():
          for how in ("layer", "all"):
            among = heads * size * (1 if how == "layer" else layers)
            self.layerwise = how == "layer"
            self.compression_ratio = (among * (1 - count / size) + 0.5) / among
            super().compress_post(model)
            stays = np.ones((layers, heads, size), bool)
            for i, layer in enumerate(model.model.layers):
              _, head, at = layer.self_attn.masked_key_indices
              stays[i, head, at] = False
              layer.self_attn.masked_key_indices = None
            masks[how, part] = stays

    cache = self.pressed.transformers.DynamicCache()
    press = Press(compression_ratio=0.5, n_sink=self.opening)
    with torch.inference_mode(), press(self.pressed.model):
      self.pressed.model.model(input_ids=torch.tensor([ids]), past_key_values=cache)
    scores = found[0].copy()
    scores[..., : self.opening] = 2
    for part, count in counts.items():
      masks["head", part] = np.zeros(scores.shape, bool)
      best = np.argsort(-scores, -1, kind="stable")[..., :count]
      np.put_along_axis(masks["head", part], best, True, -1)
      alike, spread = masks["head", part], masks["all", part]
      top = (np.arange(len(scores)) == spread.mean((1, 2)).argmax())[:, None, None]
      masks["one", part] = alike | top
      masks["without", part] = np.where(top, alike, spread)
    return scores, cache, masks

  def answer(self, cache: Any, stays: np.ndarray, prompt: Prompt, steps: int) -> str:
    held = pressed.Kept()
    for layer, of_layer in zip(cache.layers, stays, strict=True):
      head, at = (self.torch.from_numpy(x) for x in np.nonzero(~of_layer))
      held.keys.append(layer.keys)
      held.values.append(layer.values)
      held.hidden.append((self.torch.zeros_like(head), head, at) if len(head) else None)
    past, ends = len(prompt.head), self.tokenizer.ends
    said = self.pressed.answers([held], np.zeros(1), prompt.tail, past, steps, ends)
    return self.tokenizer.decode(said[0])


class Ours:
  """kvjax's side: caches that are cut, questions and answers layer by layer."""

  def __init__(self, model: Transformer, tokenizer: Tokenizer, length: int):
    self.model, self.tokenizer, self.length = model, tokenizer, length
    self.ask, self.layered = Instructions.of(tokenizer), ByLayer(model)

  def read(self, ids: list[int]) -> tuple[list[jax.Array], Any]:
    tokens, lengths = pad([ids], multiple=self.length)
    _, caches, scores = reconstruct.scored(self.model, tokens, lengths, self.ask)
    return scores, caches

  def cut(self, caches: Any, scores: list[jax.Array], how: str, count: int, size: int) -> Any:
    """The method and its caches."""
    method: kvjax.Method = kvjax.KVzip(count + ROOM, ROOM)
    if how != "head":
      method = kvjax.AdaKV(method, safeguard=0)
    if how == "all":
      method = reconstruct.over_layers(method, scores, [size], tile=32)
    spec = self.model.spec(1, self.length)
    return method, reconstruct.cut(self.model.env, caches, scores, method, spec)

  def answer(self, method: kvjax.Method, caches: Any, prompt: Prompt, steps: int) -> str:
    tail, asked = map(jnp.asarray, pad([prompt.tail]))
    logits, caches = self.layered.prefill(tail, asked, caches, method, past=None)
    ends = self.tokenizer.ends
    said, _ = both.greedy(self.layered, method, logits, caches, steps, ends)
    return self.tokenizer.decode(said)


def rows_of(
  ours: Ours | None,
  theirs: Theirs,
  row: Row,
  prompt: Prompt,
  args: Args,
  cells: list[tuple[str, int]],
) -> dict[tuple[str, int], dict[str, Any]]:
  """One prompt, by how a budget is divided and which part is kept: those that are asked for."""
  size, score = len(prompt.head), registry.TASKS[both.TASK].score
  wanted = places(theirs.tokenizer, prompt.head, row.answers[0])
  counts = {part: size // part for part in args.parts}
  with console.step("kvpress reads"):
    their_scores, their_cache, every = theirs.read(prompt.head, counts)
  masks = {cell: every[cell] for cell in cells}
  rows: dict[tuple[str, int], dict[str, Any]] = {}
  with console.step("kvpress answers"):
    for (how, part), stays in masks.items():
      said = theirs.answer(their_cache, stays, prompt, args.steps)
      rows[how, part] = {
        "context": size,
        "needle_kept_by_kvpress": float(stays[..., wanted].mean()),
        "needle_by_layer": np.round(stays[..., wanted].mean((1, 2)), 4).tolist(),
        "kept_by_layer": np.round(stays.mean((1, 2)), 4).tolist(),
        "score_of_kvpress": score(said, row),
        "answer_of_kvpress": said,
      }
  if ours is None:
    return rows
  with console.step("kvjax reads"):
    scores, caches = ours.read(prompt.head)
  mine = np.stack([np.asarray(x[0]) for x in scores])[..., :size]
  apart = float(np.abs(mine - their_scores)[..., theirs.opening :].max())
  with console.step("kvjax answers"):
    for (how, part), stays in masks.items():
      if how not in beside.OURS:
        continue
      method, held = ours.cut(caches, scores, how, counts[part], size)
      positions = both.positions(held)
      shares = kept.overlap(positions, [[np.flatnonzero(x) for x in of] for of in stays])
      said = ours.answer(method, fork(jnp.zeros((1, 1)), held, 1)[1], prompt, args.steps)
      rows[how, part] |= {
        **shares,
        "scores_apart": apart,
        "needle_kept": kept.holds(positions, wanted),
        "score": score(said, row),
        "answer": said,
      }
  return rows


def main(args: Args) -> None:
  common.check_numbers(args, samples=1, length=256, steps=1)
  pressed.versions()
  model, tokenizer = common.load_model(args.checkpoint)
  settings = both.settings(args, model, tokenizer, parts=list(args.parts))
  store = Store(args.out or tablemakers.FOLDER / beside.KVZIP / settings["model"], settings)
  theirs, reader = Theirs(model, tokenizer), Reader(tokenizer)
  ours = None if args.alone else Ours(model, tokenizer, args.length)

  def answer(row: Row, cells: list[tuple[str, int]]) -> dict[tuple[str, int], dict[str, Any]]:
    return rows_of(ours, theirs, row, reader.row(row), args, cells)

  names = {
    (how, part): {"mode": "agnostic", "method": how, "budget": part}
    for how, part in itertools.product(beside.DIVIDED, args.parts)
  }
  both.ask(args, reader, store, names, answer)
  for each, said in both.summary(store, "method", "budget"):
    print(f"{each['method']:6} 1/{each['budget']:<3} {said}")


if __name__ == "__main__":
  common.run(main, Args)
