"""Find the retrieval heads of a model: those that copy from the context.

    kvjax retrieval-heads heads.json
    kvjax retrieval-heads heads.json --checkpoint FOLDER --samples 20

No test uses these texts, keys and numbers (`scripts/programs/evals/streams.py`), and the file
records them: `kvjax evaluate` and `kvjax needle-recall` do not accept heads that were found on
their own test data.

A head's score is the share of a needle's tokens that it copies, mean over prompts: a token counts
as copied when the head attends most to that very token within the needle at the step that has to
produce it (Wu et al., 2024, §2). The file is JSON: `heads` holds the best head of every layer with
a score above the threshold as [layer, query head, score], `scores` all of them, `fitted` what they
were found on. Use it with

    kvjax.Ltri(heads=load(path))

With `--pattern heads.tsv` it also writes a gate for each key/value head, the best score of its
query heads: a line of tab-separated numbers per layer, in the format of published patterns, and a
comment with the same record:

    kvjax.DuoAttention.from_tsv("heads.tsv", sparsity=0.5)
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import kvjax
from kvjax.models.decode.generate import join, prefill, split
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn.transformer import Transformer
from kvjax.programs import common, console
from kvjax.programs.evals import fitted, needle
from kvjax.programs.evals.prompt import Reader
from kvjax.programs.evals.streams import FITTING
from kvjax.programs.evals.task import Row

TASK, SHAPE = "needle", needle.SHAPES["niah_single_2"]


@dataclasses.dataclass(frozen=True)
class Args:
  """Scores every query head of a model on needles in natural text."""

  out: Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
  """The .json file to write; written aside and renamed last."""
  samples: int = 20
  """Prompts, each with a needle of its own."""
  length: int = 2048
  """Tokens per prompt."""
  threshold: float = 0.1
  """Heads with a higher score are retrieval heads (the paper's: 0.1)."""
  pattern: pathlib.Path | None = None
  """A .tsv file of gates for `kvjax.DuoAttention`."""
  seed: int = 0
  """Random seed of texts, needles and depths."""
  checkpoint: common.Checkpoint = None
  """A checkpoint, a Hugging Face folder, a .gguf file or a model of the hub (owner/name);
  SmolLM2-135M-Instruct by default."""


@dataclasses.dataclass(frozen=True)
class Looking(kvjax.Full):
  """The full cache; a step reports the position that each head attends to most, int32 [B, K, G]."""

  @property
  def traits(self) -> kvjax.core.traits.Traits:
    return super().traits.but(wants_logits=True)

  def observe(self, at: Any, cache: Any, q: Any, plan: Any, attended: Any) -> Any:
    return cache, {"most": jnp.argmax(attended.logits, -1).astype(jnp.int32)}


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
  row: Row | None = None


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
  method, (graph, leaves) = Looking(), split(model)

  @functools.partial(jax.jit, donate_argnums=1)
  def step(leaves: Any, caches: Any, token: Any) -> Any:
    decoder = join(graph, leaves)
    _, caches, reports = decoder.decode(token, caches, method, with_aux=True)
    return caches, jnp.stack([report["most"][0].reshape(-1) for report in reports])

  room = max(len(sample.ids) + len(sample.answer) for sample in samples)
  total = 0.0
  with console.bar(len(samples), "prompts", "prompt") as bar:
    for sample in samples:
      # The last token of the prompt, and then each of the answer, has to produce the next one.
      read, fed = sample.ids[:-1], [sample.ids[-1], *sample.answer[:-1]]
      caches = method.init_caches(model.spec(1, -(-room // 64) * 64))
      tokens = common.right_padded(read, multiple=64)
      _, caches = prefill(model, tokens, np.array([len(read)]), caches, method, past=0)
      most = []
      for token in fed:
        caches, where = step(leaves, caches, jnp.array([token], jnp.int32))
        most.append(np.asarray(where))
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
  """Prompts with one needle each, whose value is to be copied; nothing in them is of a test."""
  reader, samples = Reader(tokenizer), []
  for index in range(args.samples):
    draw = FITTING.rng(TASK, args.seed, index)
    row = needle.build(reader.count, SHAPE, length=args.length, draw=draw, stream=FITTING)
    ids = reader.row(row).ids
    # A number is the same tokens wherever it stands after a space, or is found without one.
    for text in (f" {row.answers[0]}", row.answers[0]):
      answer = tokenizer.encode(text, bos=False)
      places = [i for i in range(len(ids)) if ids[i : i + len(answer)] == answer]
      if places:
        samples.append(Sample(ids, places[0], answer, row))
        break
  if not samples:
    raise ValueError("found no needle's value as tokens of its prompt, expected at least one")
  return samples


def record(samples: Sequence[Sample], args: Args) -> dict[str, Any]:
  """A record of what heads were found on: texts, keys, numbers and the draws of all."""
  rows = [sample.row for sample in samples if sample.row is not None]
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
  common.check_numbers(args, samples=1, length=1)
  model, tokenizer = common.load_model(args.checkpoint)
  samples = needles(tokenizer, args)
  found = scores(model, samples)
  heads = best(found, args.threshold)
  held = record(samples, args)
  about = {
    "fitted": held,
    "threshold": args.threshold,
    "heads": heads,
    "scores": found.round(4).tolist(),
  }
  with common.written_aside(args.out) as path:
    path.write_text(json.dumps(about, indent=1) + "\n", "utf-8")
  if args.pattern is not None:
    with common.written_aside(args.pattern) as path:
      said = fitted.COMMENT + json.dumps(held)
      every = gates(found, model.config.kv_heads)
      np.savetxt(path, every, "%.6g", "\t", header=said, comments="", encoding="utf-8")
  rows = [[str(layer), str(head), f"{score:.2f}"] for layer, head, score in heads]
  print(console.table(("layer", "query head", "score"), rows, left=()))
  print(f"{args.out}: {len(heads)} retrieval heads of {found.size} in {len(found)} layers")


if __name__ == "__main__":
  common.run(main, Args)
