"""Search the thresholds θ and φ of Ltri-LLM's spans, layer by layer.

    kvjax span-search spans.json
    kvjax needle-recall OUT --settings quantile=spans.json,overlap=spans.json

As the paper did for its Tabs. 6 and 7 (§5), `trials` pairs are drawn uniformly for every layer: θ
from (0.0001, 0.95), a quantile of each head's map, φ from (0.01, 0.95). Kept is the pair with the
highest F1 between the tokens of all spans that overlap with a needle's sentence and the sentence's
own, mean over texts. Texts, keys and numbers are of those that no test uses, and the file records
them. A sentence lies in one block, at a random place in it, as where the paper restricts needles to
one (Fig. 8).

The file is JSON: `quantile` and `overlap` by layer, `f1` of both, and `f1_before` of the settings
that the search began from.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array, Bool, Float, Int

import kvjax
from kvjax.methods.ltri import spans, vectors
from kvjax.models.decode.generate import pad, prefill
from kvjax.models.nn.transformer import Transformer
from kvjax.programs import common, console, retrieval_heads
from kvjax.programs.evals import needle
from kvjax.programs.retrieval_heads import LEAST, Sample, Sizes, ltri
from scripts.studies import sheets

THETA, PHI = (0.0001, 0.95), (0.01, 0.95)


@dataclasses.dataclass(frozen=True)
class Args(Sizes):
  out: Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
  """The .json file to write."""
  samples: int = 20
  """Prompts, each with a needle of its own."""
  length: int = 2048
  """Tokens per prompt; each is read up to the needle's block."""
  trials: int = 200
  """Pairs that are tried in each layer."""
  seed: int = 0
  """Random seed of texts, needles, depths and pairs."""
  checkpoint: common.Checkpoint = None


@dataclasses.dataclass(frozen=True)
class Evidence:
  """A needle's block in every layer.

  Attributes:
    maps: float32 [L, N, U, U], of each query head; the last row is not there yet, and 0.
    said: bool [U], the tokens of the needle's sentence.
  """

  maps: np.ndarray
  said: np.ndarray


def evidence(
  model: Transformer, method: kvjax.Ltri, ids: Sequence[int], start: int, stop: int, place: int
) -> Evidence:
  """Reads a prompt until the block of its tokens [start, stop) lacks one token.

  Args:
    place: where in the block they shall begin: tokens before the prompt's second are left out so
      that they do.
  """
  block = method.block
  skipped = (start - place - method.init_tokens) % block
  if start - place < method.init_tokens + skipped:
    raise ValueError(f"--init: found a needle at token {start}, expected it after the first ones")
  read = [ids[0], *ids[1 + skipped : start - place + block - 1]]
  caches = method.init_caches(model.spec(1, len(read) + 1))
  _, caches = prefill(model, *pad([read], multiple=256), caches, method)
  maps = np.stack([np.asarray(cache.heads["map"][0]) for cache in caches])
  token = np.arange(block)
  said = (token >= place) & (token < place + stop - start)
  return Evidence(maps.reshape(len(maps), -1, block, block), said)


def f1(
  start: Int[Array, "*batch C"], stop: Int[Array, "*batch C"], said: Bool[Array, "*batch U"]
) -> Float[Array, " *batch"]:
  """F1 of the tokens of the spans that overlap with what was said; 0 where none does."""
  held = vectors.inside(start, stop, said.shape[-1])
  overlaps = (held & said[..., None, :]).any(-1, keepdims=True)
  found = (held & overlaps).any(-2)
  return 2 * (found & said).sum(-1) / (found.sum(-1) + said.sum(-1))


def tried(
  maps: Float[np.ndarray, "B N U U"],
  said: Bool[np.ndarray, "B U"],
  theta: Float[np.ndarray, " P"],
  phi: Float[np.ndarray, " P"],
  count: int,
) -> np.ndarray:
  """Mean F1 of each pair of quantile and overlap in one layer, float [P]."""
  real = maps.shape[-1] - 1
  row, column = np.tril_indices(real)
  theta = np.quantile(maps[..., row, column], theta, axis=-1).sum(-1)  # [P, B], Σ_h θ_h of Eq. 5
  return np.asarray(_tried(maps.sum(1), said, theta.astype(np.float32), phi, count))


@jax.jit(static_argnums=4)
def _tried(every: Array, said: Array, theta: Array, phi: Array, count: int) -> Array:
  length = jnp.full(len(every), every.shape[-1] - 1)

  def one(pair: tuple[Array, Array]) -> Array:
    return f1(*spans.divide(every, pair[0], pair[1], count, length), said).mean()

  return jax.lax.map(one, (theta, phi))


def search(found: Sequence[Evidence], method: kvjax.Ltri, args: Args) -> dict[str, list[float]]:
  """θ, φ and F1 of every layer, and the F1 of the method's own."""
  draw = np.random.default_rng(args.seed)
  said, best = np.stack([each.said for each in found]), []
  for layer in range(len(found[0].maps)):
    own = (values[min(layer, len(values) - 1)] for values in (method.quantile, method.overlap))
    drawn = (draw.uniform(*ends, args.trials) for ends in (THETA, PHI))
    pairs = [np.array([x, *more], np.float32) for x, more in zip(own, drawn, strict=True)]
    scores = tried(np.stack([each.maps[layer] for each in found]), said, *pairs, method.spans)
    top = int(scores.argmax())
    best.append((*(x[top] for x in pairs), scores[top], scores[0]))
  names = "quantile", "overlap", "f1", "f1_before"
  return {
    name: [round(float(x), 4) for x in column]
    for name, column in zip(names, zip(*best, strict=True), strict=True)
  }


def main(args: Args) -> None:
  common.check_numbers(args, **LEAST, samples=1, length=1, trials=1)
  method = ltri(args, heads=None, last=0)
  model, tokenizer = common.load_model(args.checkpoint)
  samples = retrieval_heads.needles(tokenizer, args)
  found, draw = [], np.random.default_rng(args.seed)
  with console.bar(len(samples), "prompts", "prompt") as bar:
    for sample in samples:
      start, stop = sentence(tokenizer, sample)
      if stop - start >= method.block:
        raise ValueError(
          f"--block: found {method.block}, expected more than a needle's {stop - start} tokens"
        )
      place = int(draw.integers(0, method.block - (stop - start)))
      found.append(evidence(model, method, sample.ids, start, stop, place))
      bar.update(1)
  with console.step(f"trying {args.trials} pairs in each of {len(found[0].maps)} layers"):
    best = search(found, method, args)
  held = retrieval_heads.record(samples, args)
  sheets.write(args.out, {"fitted": held, "method": repr(method), "trials": args.trials, **best})
  print(f"{args.out}: F1 {np.mean(best['f1_before']):.3f} → {np.mean(best['f1']):.3f}")


def sentence(tokenizer: Any, sample: Sample) -> tuple[int, int]:
  """Where the needle's sentence begins, and where its number ends."""
  words = needle.NEEDLE.partition(" for ")[0].format(kind=retrieval_heads.SHAPE.value)
  start = retrieval_heads.places(tokenizer, sample.ids, words).start
  return start, sample.start + len(sample.answer)


if __name__ == "__main__":
  common.run(main, Args)
