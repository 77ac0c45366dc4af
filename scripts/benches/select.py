"""choosing the tiles of a step: scores and an exact top-k, against the bytes of the summaries"""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.families import sight
from kvjax.kernels.common.devices import this_device
from kvjax.ops.extremes import coded
from kvjax.programs import suites
from kvjax.programs.suites import Case, jax_contender
from scripts.benches._layer import holding

METHODS = {
  "Quest page 16": kvjax.Quest(1024, dense_layers=0),
  "Quest page 16 int8": kvjax.Quest(1024, extremes="int8", dense_layers=0),
  "InfLLM-v2 block 64": kvjax.InfLLMv2(),
}
QUICK = {
  "Quest page 16": kvjax.Quest(128, dense_layers=0),
  "Quest page 16 int8": kvjax.Quest(128, extremes="int8", dense_layers=0),
  "InfLLM-v2 block 64": kvjax.InfLLMv2(top=4, local=128, dense_below=0),
}
# KV heads and queries of each, by what a case's name says of them; rows and tokens.
EIGHT, GLM = ("", 8, 4), (" GLM-4-9B", 2, 16)
SHAPES = [(EIGHT, 1, 128 << 10), (EIGHT, 1, 512 << 10), (EIGHT, 8, 32 << 10)]
SHAPES += [(GLM, 1, length << 10) for length in (16, 32, 64, 128, 256, 512)]  # PRR's Fig. 2b
TINY = ("", 2, 3)


@suites.suite
def cases(quick: bool, peers: bool) -> Iterator[tuple]:
  """Every method at every length."""
  for name, method in (QUICK if quick else METHODS).items():
    for (model, *heads), batch, tokens in [(TINY, 2, 1024)] if quick else SHAPES:
      label = f"{name}{model} B{batch} T{tokens >> 10}K"
      yield label, case, method, batch, tokens, *heads, quick


def case(
  label: str, method: Any, batch: int, tokens: int, heads: int, groups: int, quick: bool
) -> Case:
  """The plan of one step of one layer. Summaries are random, and rotate."""
  head_dim, dtype = (32, jnp.float32) if quick else (128, jnp.bfloat16)
  spec = kvjax.CacheSpec(batch, tokens, heads, groups, head_dim, 1, dtype)
  cache = holding(method, spec, tokens)
  moved = sum(x.nbytes for x in cache.heads.values())
  copies = 2 if quick else min(max(4, (256 << 20) // moved), 8)
  turns = [(query(spec, seed), summaries(cache, seed), cache) for seed in range(copies)]

  def run(impl: str) -> Any:
    at = method.at(kvjax.Env(1, kvjax.Rope(), impl=impl), 0)

    def plan(q, held, cache):
      cache = cache.put(heads=held)
      made = method.plan(at, cache, q, sight.visible(at, cache), kvjax.Carry())[0]
      return {"table": made.table, "count": made.count, "scores": made.scores}

    return plan

  def scored(q, held, cache):
    at = method.at(kvjax.Env(1, kvjax.Rope(), impl="pallas"), 0)
    cache = cache.put(heads=held)
    return method.score(at, cache, q, sight.visible(at, cache))

  calls = 2 if quick else 16
  contenders = [
    jax_contender("kvjax", run("pallas"), turns, output=_ranking, calls=calls),
    jax_contender("scores alone", scored, turns, calls=calls),
    jax_contender("XLA", run("reference"), turns, output=_ranking, calls=calls),
    suites.reading([held.values() for _, held, _ in turns], calls),
  ]

  def figures(seconds: dict[str, float]) -> dict[str, float]:
    return {"over the summaries' bytes": seconds["kvjax"] * this_device().read / moved}

  return Case(
    name=label,
    shapes=f"{batch} rows × {heads} KV heads × {groups}, {tokens} tokens of {head_dim} "
    f"{jnp.dtype(dtype).name}, {copies} rotating; budget {method.tiles.best} of "
    f"{math.ceil(tokens / method.tiles.unit)} tiles",
    bytes=moved,
    reference=lambda: _ranking(jax.jit(run("reference"))(*turns[0])),
    tolerance=1e-5 if quick else 1e-3,
    contenders=contenders,
    figures=figures,
  )


def query(spec: kvjax.CacheSpec, seed: int) -> Any:
  """Random queries of one token."""
  shape = spec.batch, spec.kv_heads, spec.groups, spec.head_dim
  return jax.random.normal(jax.random.key(seed), shape, spec.dtype)


def summaries(cache: Any, seed: int) -> dict[str, Any]:
  """Random summaries of the shapes that a cache has; extremes in order."""
  keys = jax.random.split(jax.random.key(1000 + seed), len(cache.heads))
  made = {
    name: jax.random.normal(key, x.shape)
    for key, (name, x) in zip(keys, cache.heads.items(), strict=True)
  }
  if "key_min" in made:
    pair = made["key_min"], made["key_max"]
    made |= {"key_min": jnp.minimum(*pair), "key_max": jnp.maximum(*pair)}
  if "key_exponent" in made:
    codes = coded(made["key_min"], made["key_max"])
    made = dict(zip(("key_min", "key_max", "key_exponent"), codes, strict=True))
  return {name: made[name].astype(x.dtype) for name, x in cache.heads.items()}


def _ranking(plan: Any) -> np.ndarray:
  """The scores of what a plan lists, best first: equal where two sets differ by ties alone."""
  scores = np.sort(np.asarray(plan["scores"], np.float64), -1)
  return np.where(np.isfinite(scores), scores, 0.0)
