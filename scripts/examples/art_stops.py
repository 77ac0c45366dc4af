"""Stops of ART: the share of the cache that each layer visits, token by token."""

import pathlib

import tyro
from matplotlib.figure import Figure

import kvjax
from kvjax.programs.evals.haystack import words_from
from kvjax.programs.evals.trace import trace
from scripts.examples.tiny import load


def main(
  checkpoint: pathlib.Path | None = None,
  out: pathlib.Path = pathlib.Path("art_stops.png"),
  words: int = 100,
  steps: int = 32,
  tau: float = 0.05,
) -> None:
  model, tokenizer = load(checkpoint)
  ids = tokenizer.encode(" ".join(words_from("1862-Lincoln-1", words)))
  method = kvjax.ART(kvjax.Full(), tau=tau, phi=0.1, patience=2, tile=32, splits=1)
  visited = trace(model, method, ids, steps)["visited"]  # [steps, L]
  figure = Figure(figsize=(7, 3.5), layout="constrained")
  axes = figure.subplots()
  image = axes.imshow(visited.T, aspect="auto", origin="lower", vmin=0, vmax=1)
  axes.yaxis.get_major_locator().set_params(integer=True)
  axes.set(xlabel="token that is decoded", ylabel="layer", title=f"ART after {len(ids):,} tokens")
  figure.colorbar(image, label="share of the cache visited")
  figure.savefig(out)
  print(f"{out}: {visited.mean():.0%} visited on average, {visited.min():.0%} at least")


if __name__ == "__main__":
  tyro.cli(main)
