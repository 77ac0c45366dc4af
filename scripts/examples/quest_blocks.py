"""Pages that Quest reads: how many KV heads of all layers choose a page, token by token."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from matplotlib.figure import Figure

import kvjax
from kvjax.models.decode.generate import join, pad, prefill, split
from kvjax.models.io.asides import aside
from kvjax.programs.evals.haystack import words_from
from scripts.examples.tiny import load


@dataclasses.dataclass(frozen=True)
class Chosen(kvjax.Wrapper):
  """Reports the share of heads that read each page, float32 [B, pages]; none in a dense layer."""

  def observe(self, at, cache, q, plan, attended):
    cache, aux = self.base.observe(at, cache, q, plan, attended)
    if plan.table is not None:
      listed = jnp.arange(plan.table.shape[-1]) < plan.count[..., None]
      page = jnp.where(listed, plan.table, -1)[..., None] == jnp.arange(cache.size // plan.unit)
      aux = {**aux, "chosen": page.any(2).mean(1)}
    return cache, aux


def main(
  checkpoint: pathlib.Path | None = None,
  out: pathlib.Path = pathlib.Path("quest_blocks.png"),
  words: int = 100,
  steps: int = 32,
) -> None:
  model, tokenizer = load(checkpoint)
  tokens, lengths = pad(
    [tokenizer.encode(" ".join(words_from("1862-Lincoln-1", words)))], multiple=64
  )
  method = Chosen(kvjax.Quest(budget=tokens.shape[1] // 4, page=16, dense_layers=1))
  size = -(-(tokens.shape[1] + steps) // 16) * 16
  caches = method.init_caches(model.spec(batch=1, capacity=size))
  logits, caches = prefill(model, tokens, lengths, caches, method)
  graph, leaves = split(model)
  decode = jax.jit(lambda leaves, *x: join(graph, leaves).decode(*x, method, with_aux=True))
  shares = []
  for _ in range(steps):
    logits, caches, reports = decode(leaves, logits.argmax(-1), caches)
    shares.append(np.mean([r["chosen"][0] for r in reports if "chosen" in r], 0))
  figure = Figure(figsize=(7, 3.5), layout="constrained")
  axes = figure.subplots()
  image = axes.imshow(np.array(shares).T, aspect="auto", origin="lower", vmin=0, vmax=1)
  axes.set(
    xlabel="token that is decoded", ylabel="page of 16 tokens", title="Pages that Quest reads"
  )
  figure.colorbar(image, label="share of KV heads")
  with aside(out, replace=True) as path:
    figure.savefig(path)
  print(f"{out}: {np.mean(shares):.0%} of {size // 16} pages are read on average")


if __name__ == "__main__":
  tyro.cli(main)
