"""Methods over others: a wrapper changes some moves and leaves the rest to its base."""

import dataclasses
import pathlib

import jax
import numpy as np
import tyro

import kvjax
from kvjax.models.decode.generate import join, pad, prefill, split
from scripts.examples.tiny import load


@dataclasses.dataclass(frozen=True)
class Watched(kvjax.Wrapper):
  """Reports how old the cached tokens of each head are, whatever method keeps them."""

  def observe(self, at, cache, q, plan, attended):
    cache, aux = self.base.observe(at, cache, q, plan, attended)
    age = cache.seen[:, None, None] - 1 - cache.pos
    return cache, {**aux, "age": age.mean(-1, where=cache.pos >= 0)}


def main(checkpoint: pathlib.Path | None = None) -> None:
  model, tokenizer = load(checkpoint)
  graph, leaves = split(model)
  tokens, lengths = pad([tokenizer.encode("A cache forgets what it has no room for. " * 9)])
  early = kvjax.ART(kvjax.SnapKV(budget=32, window_size=8))  # a wrapper in a wrapper
  for base in (kvjax.Full(), kvjax.StreamingLLM(budget=32), early):
    method = Watched(base)
    caches = method.init_caches(model.spec(batch=1, capacity=tokens.shape[1] + 1))
    logits, caches = prefill(model, tokens, lengths, caches, method)
    decode = jax.jit(lambda leaves, *x, m=method: join(graph, leaves).decode(*x, m, with_aux=True))
    _, _, reports = decode(leaves, logits.argmax(-1), caches)
    print(f"{method}: mean age {np.mean([report['age'] for report in reports]):.0f} tokens")


if __name__ == "__main__":
  tyro.cli(main)
