"""Find the retrieval heads of a model: those whose queries ask for a needle's blocks.

    kvjax retrieval-heads heads.json
    kvjax retrieval-heads heads.json --checkpoint FOLDER --samples 20

No test uses these texts, keys and numbers (`scripts/programs/evals/streams.py`), and the file
records them: `kvjax evaluate` and `kvjax needle-recall` do not accept heads that were found on
their own test data.

A head's score is its block recall: of the blocks that hold a needle, which have left the window,
the share that is among those most similar to the spans of the question's queries (Ltri-LLM, Eqs. 8
and 9), mean over prompts, and that as a share of what is between chance and all of them. The
prompts are read under Ltri-LLM, all heads choosing together. The file is JSON: `heads` holds the
best head of every layer with a score above the threshold as [layer, query head, score], `scores`
all of them, `method` and `fitted` what they were found under and on. Use it with

    kvjax.Ltri(heads=load(path))

With `--pattern heads.tsv` it also writes a gate for each key/value head, the best copy score of its
query heads: the share of a needle's tokens at which the head attends most to that very token when
it has to be produced (Wu et al., 2024, §2). A line of tab-separated numbers per layer, in the
format of published patterns, and a comment with the same record:

    kvjax.DuoAttention.from_tsv("heads.tsv", sparsity=0.5)
"""

import dataclasses
import json
import pathlib
import random
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import jax.numpy as jnp
import numpy as np
import tyro

import kvjax
from kvjax.core.leaves import Leaf
from kvjax.families.streamed import Streamed
from kvjax.methods import labels
from kvjax.methods.ltri import evidence
from kvjax.models.decode.generate import pad, prefill
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn.transformer import Transformer
from kvjax.programs import common, console
from kvjax.programs.evals import fitted, haystack, needle, trace
from kvjax.programs.evals.prompt import Reader
from kvjax.programs.evals.streams import FITTING
from kvjax.programs.evals.task import Row

TASK, SHAPE = "needle", needle.SHAPES["niah_single_2"]
STEPS = 16  # longest answer
LEAST = {"window": 1, "init": 0, "block": 1, "retrieved": 1, "chunk": 1}  # of sizes
Ltri = TypeVar("Ltri", bound=kvjax.Ltri)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """Sizes of a stream, and settings of Ltri-LLM."""

  window: int = 512
  """Newest tokens that stay on the device."""
  init: int = 32
  """First tokens that stay."""
  block: int = 64
  """Tokens per block."""
  retrieved: int = 4
  """Blocks that are retrieved."""
  chunk: int = 256
  """Tokens read at a time."""
  settings: str = ""
  """Settings of Ltri-LLM as in a label: Q, C, M and Ω are last=48,spans=6,vectors=24,ratio=col."""


@dataclasses.dataclass(frozen=True)
class Args(Sizes):
  out: Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
  """The .json file to write; written aside and renamed last."""
  samples: int = 20
  """Prompts, each with a needle of its own."""
  length: int = 4096
  """Tokens per prompt."""
  threshold: float = 0.1
  """Heads with a higher score are retrieval heads (the paper's: 0.1)."""
  pattern: pathlib.Path | None = None
  """A .tsv file of gates for `kvjax.DuoAttention`."""
  seed: int = 0
  """Random seed of texts, needles and depths."""
  checkpoint: common.Checkpoint = None


def streamed(args: Sizes) -> dict[str, int]:
  """Settings that all methods with a store have."""
  sizes = {"init_tokens": args.init, "local": args.window, "block": args.block}
  return sizes | {"retrieved": args.retrieved, "chunk": args.chunk, "held": 2 * args.retrieved}


def ltri(args: Sizes, cls: type[Ltri] = kvjax.Ltri, **more: Any) -> Ltri:
  """Ltri-LLM with these settings, and more."""
  _, fields = labels.parts(f"ltri:{args.settings}", "--settings")
  return labels.changed(cls(**streamed(args)), fields, "--settings", "ltri", **more)


def depths(args: Sizes, length: int, samples: int, draw: random.Random) -> list[float]:
  """Depths of needles: even over what is retrieved or missed, any beginning of them spread.

  That is what stands after the first tokens, and leaves the window before the question.

  Raises:
    ValueError: nothing does.
  """
  near, far = args.init, length - args.window - 3 * args.block - STEPS
  if far <= near:
    raise ValueError(
      f"--length: found {length}, expected more than {near} first tokens, a window of "
      f"{args.window} and 3 blocks"
    )
  places = haystack.spread(range(samples), draw)
  return [(near + (far - near) * (place + 0.5) / samples) / length for place in places]


def places(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> range:
  """Places of a text's tokens where it stands first in a prompt.

  Raises:
    ValueError: it does not.
  """
  # A text is the same tokens wherever it stands after a space, or is found without one.
  for tokens in (tokenizer.encode(f" {text}", bos=False), tokenizer.encode(text, bos=False)):
    for start in range(len(ids)):
      if list(ids[start : start + len(tokens)]) == tokens:
        return range(start, start + len(tokens))
  raise ValueError(f"{text}: found no such tokens in the prompt, expected the needle")


@dataclasses.dataclass(frozen=True)
class Sample:
  """A prompt whose text holds what has to be said after it.

  Attributes:
    ids: the prompt's tokens.
    start: where the answer's tokens stand among them.
    answer: the tokens that are to be copied.
    row: the prompt's text.
  """

  ids: list[int]
  start: int
  answer: list[int]
  row: Row

  @classmethod
  def of(cls, tokenizer: Tokenizer, row: Row) -> "Sample":
    """A row's prompt.

    Raises:
      ValueError: its answer is not in it, as tokens.
    """
    ids = Reader(tokenizer).row(row).ids
    at = places(tokenizer, ids, row.answers[0])
    return cls(ids, at.start, ids[at.start : at.stop], row)

  def blocks(self, method: Streamed) -> list[int]:
    """The blocks that hold the answer; none where it is among the first tokens."""
    first = max(self.start - method.init_tokens, 0) // method.block
    stop = self.start + len(self.answer)
    return list(range(first, (stop - 1 - method.init_tokens) // method.block + 1))


# ---- block recall: which head's queries ask for the needle


@dataclasses.dataclass(frozen=True)
class Asking(kvjax.Ltri):
  """All heads choose together; kept is how similar each alone finds the newest chunk's blocks."""

  def summaries(self, spec: kvjax.CacheSpec, layer: int) -> dict[str, Leaf]:
    alone = Leaf("heads", (spec.groups, self._stored_blocks(spec)))
    return {**super().summaries(spec, layer), "alone": alone}

  def stage(self, at: Any, cache: kvjax.Cache, new: Any, q: Any, prompt: Any, carry: Any) -> Any:
    index = prompt.query_index()
    qpos = jnp.where(index < prompt.valid[:, None], cache.seen[:, None] + index, -1)
    turned = self._turned(at, q, qpos).astype(jnp.float32)
    sums, some = self._asked(at, cache, turned, q, new["k"], qpos)  # [B, K, G, J, H]
    pairs = jnp.einsum("bkgjh,bknch->bkgjnc", sums, cache.heads["index"].of["sum"])
    alone = evidence.best_pairs(pairs, some, cache.rows["found"].of["spans"])
    alone = jnp.where(prompt.valid[:, None, None, None] > 0, alone, cache.heads["alone"])
    return super().stage(at, cache.put(heads={"alone": alone}), new, q, prompt, carry)


def recalled(similarity: np.ndarray, wanted: Sequence[int], count: int) -> np.ndarray:
  """Share of the wanted blocks among each head's `count` best of [L, N, blocks], 0 being chance.

  Of equal blocks the oldest is the better one; −∞ is none. All wanted blocks found is 1, and none
  found is below 0.
  """
  best = np.argsort(-similarity, -1, kind="stable")[..., :count]
  best = np.where(np.take_along_axis(similarity, best, -1) > -np.inf, best, -1)
  found = (best[..., None] == np.array(wanted)).any(-2).mean(-1)
  chance = min(1.0, count / similarity.shape[-1])
  return (found - chance) / (1 - chance) if chance < 1 else np.zeros_like(found)


def recall(model: Transformer, samples: Sequence[Sample], method: Asking) -> np.ndarray:
  """Block recall of every layer's query heads, float64 [L, N], mean over samples.

  Raises:
    ValueError: a needle has not left the window before the question.
  """
  room = -(-max(len(sample.ids) for sample in samples) // method.block) * method.block
  total = 0.0
  with console.bar(len(samples), "prompts", "prompt") as bar:
    for sample in samples:
      caches = method.init_caches(model.spec(1, room))
      tokens, lengths = pad([sample.ids], multiple=room)
      _, caches = prefill(model, tokens, lengths, caches, method)
      gone, wanted = int(caches[0].rows["gone"][0]), sample.blocks(method)
      if not wanted or wanted[-1] >= gone:
        raise ValueError(
          f"--length: found a needle at token {sample.start} of {len(sample.ids)}, expected it "
          f"after the first {method.init_tokens} and out of the window of {method.local}"
        )
      alone = np.stack([np.asarray(cache.heads["alone"][0]) for cache in caches])
      alone = alone.reshape(len(caches), -1, alone.shape[-1])[..., :gone]
      total = total + recalled(alone, wanted, method.retrieved)
      bar.update(1)
  return np.asarray(total) / len(samples)


# ---- copy score: which head looks at the very token that has to be produced


@dataclasses.dataclass(frozen=True)
class Looking(kvjax.Full):
  """The full cache; a step reports the position that each head attends to most, int32 [B, K, G]."""

  @property
  def traits(self) -> kvjax.core.traits.Traits:
    return super().traits.but(wants_logits=True)

  def observe(self, at: Any, cache: Any, q: Any, plan: Any, attended: Any) -> Any:
    return cache, {"most": jnp.argmax(attended.logits, -1).astype(jnp.int32)}


def copied(most: np.ndarray, sample: Sample) -> np.ndarray:
  """Share of the answer's tokens that each head copies: float64, the shape of `most` but its first.

  Args:
    most: int [steps, …], where each head looked most when it had to produce answer[step].
    sample: the prompt.
  """
  ids, stop = np.asarray(sample.ids), sample.start + len(sample.answer)
  inside = (most >= sample.start) & (most < stop)
  said = np.asarray(sample.answer).reshape(-1, *(1,) * (most.ndim - 1))
  there = ids[np.clip(most, 0, len(ids) - 1)]
  return (inside & (there == said)).mean(0)


def scores(model: Transformer, samples: Sequence[Sample]) -> np.ndarray:
  """Copy score of every layer's query heads, float64 [L, N], mean over samples."""
  method = Looking()
  step = trace.stepper(model, method)
  room = max(len(sample.ids) + len(sample.answer) for sample in samples)
  total = 0.0
  with console.bar(len(samples), "prompts", "prompt") as bar:
    for sample in samples:
      # The last token of the prompt, and then each of the answer, has to produce the next one.
      read, fed = sample.ids[:-1], [sample.ids[-1], *sample.answer[:-1]]
      caches = method.init_caches(model.spec(1, -(-room // 64) * 64))
      tokens, lengths = pad([read])
      _, caches = prefill(model, tokens, lengths, caches, method, past=0)
      most = []
      for token in fed:
        _, caches, reports = step(caches, jnp.array([token], jnp.int32))
        most.append(np.stack([np.asarray(report["most"][0]).reshape(-1) for report in reports]))
      total = total + copied(np.stack(most), sample)
      bar.update(1)
  return np.asarray(total) / len(samples)


def best(found: np.ndarray, threshold: float) -> list[tuple[int, int, float]]:
  """Of every layer its best head, where its score is above the threshold (App. C of Ltri-LLM)."""
  heads = found.argmax(1)
  return [
    (layer, int(head), round(float(found[layer, head]), 4))
    for layer, head in enumerate(heads)
    if found[layer, head] > threshold
  ]


def gates(found: np.ndarray, kv_heads: int) -> np.ndarray:
  """Of every key/value head the best score of its query heads: [L, N] -> [L, K]."""
  return found.reshape(len(found), kv_heads, -1).max(-1)


def needles(tokenizer: Tokenizer, args: Args) -> list[Sample]:
  """Prompts with one needle each, whose value is to be copied; nothing in them is of a test.

  Depths are even over what stands after the first tokens and leaves the window.

  Raises:
    ValueError: nothing does.
  """
  every = depths(args, args.length, args.samples, FITTING.rng(TASK, args.seed, -1))
  count, samples = Reader(tokenizer).count, []
  for index, depth in enumerate(every):
    draw = FITTING.rng(TASK, args.seed, index)
    sizes = {"length": args.length, "max_new_tokens": STEPS}
    row = needle.build(count, SHAPE, **sizes, draw=draw, depth=depth, stream=FITTING)
    samples.append(Sample.of(tokenizer, row))
  return samples


def record(samples: Sequence[Sample], args: Args) -> dict[str, Any]:
  """A record of what heads were found on: texts, keys, numbers and the draws of all."""
  rows = [sample.row for sample in samples]
  said = needle.ONE[0].format(kind=SHAPE.value)
  return fitted.record(
    FITTING.about,
    [row.context.removeprefix(said) for row in rows],
    model=args.checkpoint,
    task=FITTING.task(TASK),
    seed=args.seed,
    samples=len(samples),
    length=args.length,
    sources=sorted({row.about["source"] for row in rows}),
    hidden=[text for row in rows for text in (_key(row), *row.answers)],
  )


def _key(row: Row) -> str:
  """The key that a row asks for."""
  before, after = needle.ONE[1].format(kind=SHAPE.value, key="\n").rsplit("\n", 1)
  return row.question.removeprefix(before).removesuffix(after)


def main(args: Args) -> None:
  common.check_numbers(args, **LEAST, samples=1, length=1, threshold=0)
  for name, suffix in (("out", ".json"), ("--pattern", ".tsv")):  # by which labels tell them
    path = getattr(args, name.removeprefix("--"))
    if path is not None and path.suffix != suffix:
      raise ValueError(f"{name}: found {path}, expected a name that ends in {suffix}")
  method = ltri(args, Asking, heads=None)
  model, tokenizer = common.load_model(args.checkpoint)
  samples = needles(tokenizer, args)
  found = recall(model, samples, method)
  heads = best(found, args.threshold)
  held = record(samples, args)
  about = {
    "fitted": held,
    "method": repr(method),
    "threshold": args.threshold,
    "heads": heads,
    "scores": found.round(4).tolist(),
  }
  common.write(args.out, about)
  if args.pattern is not None:
    every = gates(scores(model, samples), model.config.kv_heads)
    with common.written_aside(args.pattern) as path:
      said = fitted.COMMENT + json.dumps(held)
      np.savetxt(path, every, "%.6g", "\t", header=said, comments="", encoding="utf-8")
  rows = [[str(layer), str(head), f"{score:.2f}"] for layer, head, score in heads]
  print(console.table(("layer", "query head", "score"), rows, left=()))
  print(f"{args.out}: {len(heads)} retrieval heads of {found.size} in {len(found)} layers")


if __name__ == "__main__":
  common.run(main, Args)
