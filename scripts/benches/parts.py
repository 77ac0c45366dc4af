"""what a layer's step is made of: the step up to each of its stages, beside dense decode"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import entrance, sight
from kvjax.softmax_state import State

from . import Case, Contender, looped_contender
from .longflow import holding

STAGES = ("enter", "plan", "attend", "observe")
CACHES, CALLS = 4, 16  # caches in turn, as the layers of a model, and steps before all begins anew
LAYERS = 32  # of which the first is timed
HEADS = {"8x4": (8, 4, 128), "2x6": (2, 6, 128), "32x1": (32, 1, 128), "3x2": (3, 2, 16)}


@dataclasses.dataclass(frozen=True)
class Layer:
  """One layer of one method.

  Attributes:
    method: its method.
    heads: KV heads × query heads of each, of `HEADS`.
    batch, tokens: rows, and what each has seen.
    full: the cache has no room left, so that the token takes the place of another.
    before: steps taken before any is timed, so that there is something to share.
  """

  method: kvjax.Method
  heads: str
  batch: int
  tokens: int
  full: bool = False
  before: int = 0

  @property
  def spec(self) -> kvjax.CacheSpec:
    kv_heads, groups, head_dim = HEADS[self.heads]
    dtype = jnp.float32 if head_dim < 64 else jnp.bfloat16
    room = 0 if self.full else CALLS + self.before
    return kvjax.CacheSpec(
      self.batch, self.tokens + room, kv_heads, groups, head_dim, LAYERS, dtype
    )


def layers(quick: bool) -> dict[str, Layer]:
  """The cases by name. Of CIS, all share what the step before retrieved, or none does."""
  if quick:
    return {
      "Quest tiny": Layer(kvjax.Quest(32, page=8, dense_layers=0), "3x2", 2, 96),
      "CIS tiny, sharing": Layer(kvjax.CIS(8, 4, 8), "3x2", 2, 96, before=2),
      "LongFlow tiny": Layer(kvjax.LongFlow(96, window_size=8), "3x2", 2, 96, full=True),
    }
  quest, infllm = kvjax.Quest(1024, dense_layers=0), kvjax.InfLLMv2(dense_below=0)
  sharing = kvjax.settings.example(kvjax.CIS, 1024)
  alone = dataclasses.replace(sharing, block=1)
  mha = {thousands: kvjax.settings.example(kvjax.CIS, thousands * 128) for thousands in (2, 4)}
  return {
    "Quest B1 T32K 8x4": Layer(quest, "8x4", 1, 32 << 10),
    "Quest B1 T128K 8x4": Layer(quest, "8x4", 1, 128 << 10),
    "InfLLM-v2 B1 T32K 8x4": Layer(infllm, "8x4", 1, 32 << 10),
    "InfLLM-v2 B1 T128K 8x4": Layer(infllm, "8x4", 1, 128 << 10),
    "LongFlow B128 S3200 8x4": Layer(kvjax.LongFlow(3200), "8x4", 128, 3200, full=True),
    "LongFlow B16 S3200 8x4": Layer(kvjax.LongFlow(3200), "8x4", 16, 3200, full=True),
    "CIS B8 T4K 32x1, sharing": Layer(mha[4], "32x1", 8, 4 << 10, before=2),
    "CIS B16 T2K 32x1, sharing": Layer(mha[2], "32x1", 16, 2 << 10, before=2),
    "CIS B8 T32K 2x6, sharing": Layer(sharing, "2x6", 8, 32 << 10, before=2),
    "CIS B8 T32K 2x6, retrieving": Layer(alone, "2x6", 8, 32 << 10),
    "CIS B8 T8K 2x6, retrieving": Layer(alone, "2x6", 8, 8 << 10),
  }


def cases(quick: bool, peers: bool = True, only: str = "") -> Iterator[Case]:
  """Every layer, the selecting ones first."""
  for name, layer in layers(quick).items():
    if only in name:
      yield case(name, layer, "pallas" if quick else "auto")


def case(name: str, layer: Layer, impl: str) -> Case:
  """A layer's step up to each stage: what a stage takes is the difference to the one before it."""
  spec, whole = layer.spec, STAGES[-1]
  contenders = [made(stage, layer, impl, stage) for stage in STAGES]
  dense = dataclasses.replace(layer, method=kvjax.Full(), full=False)
  contenders.append(made("dense decode", dense, impl))
  return Case(
    name=name,
    shapes=f"{layer.method!r}; {layer.batch} rows × {layer.heads} heads, {layer.tokens} tokens of "
    f"{spec.head_dim} {jnp.dtype(spec.dtype).name}; {CACHES} caches in turn",
    bytes=0,
    reference=lambda: output(layer, "reference"),
    tolerance=1e-5 if spec.dtype == jnp.float32 else 1e-2,
    contenders=tuple(contenders),
    subject=whole,
    remarks=remarks,
  )


def remarks(seconds: dict[str, float]) -> list[str]:
  """What each stage adds, and the whole step beside dense decode's."""
  added = np.diff([0.0, *(seconds[stage] for stage in STAGES)]) * 1e6
  parts = ", ".join(f"{stage} {x:.1f}" for stage, x in zip(STAGES, added, strict=True))
  return [
    f"{parts} µs; {seconds['dense decode'] / seconds[STAGES[-1]]:.2f} × as fast as dense decode"
  ]


def made(name: str, layer: Layer, impl: str, stage: str = STAGES[-1]) -> Contender:
  """The step up to a stage, over several caches in turn; none of them comes to hold more."""
  spec = layer.spec
  caches = [start(layer, impl, seed) for seed in range(CACHES)]
  step = steps(layer.method, impl, spec, stage)
  contender = looped_contender(
    name,
    step,
    caches,
    [projected(spec, i) for i in range(CACHES)],
    renewed=lambda before, after: after.put(rows=before.rows),
    calls=CALLS,
    loops=8,
  )
  compared = isinstance(layer.method, kvjax.Full) or stage != STAGES[-1]
  return dataclasses.replace(contender, output=None if compared else lambda: output(layer, impl))


def steps(method: kvjax.Method, impl: str, spec: kvjax.CacheSpec, stage: str) -> Callable:
  """The moves of a decode step up to a stage: (cache, qkv, live) to the cache and what was made."""
  at = method.at(kvjax.Env(LAYERS, kvjax.Rope(), impl=impl), 0)

  def step(cache: Any, qkv: Any, live: Any) -> tuple[Any, Any]:
    q, k, v = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
    if stage == "observe":
      out, cache, *_ = method.decode_step(at, cache, q, k, v, live, kvjax.Carry())
      return cache, out
    q, cache = entrance.enter_token(at, cache, q, k, v, live)
    if stage == "enter":
      return cache, q
    visible = sight.visible(at, cache)
    plan, _ = method.plan(at, cache, q, visible, kvjax.Carry())
    plan = sight.narrowed(at, visible, plan)
    if stage == "plan":
      listed = plan.read or (plan.table, plan.count)
      return cache, jax.tree.leaves((q, listed))
    attended = method.attend(at, cache, plan, q)
    return cache, _numbers(attended.state, attended.out, attended.logits)

  return step


def _numbers(state: State, out: Any, logits: Any) -> list[Any]:
  """What attention wrote: the output once, and logits where it has them."""
  return [x for x in (state.o if out is None else out, state.l, logits) if x is not None]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def start(layer: Layer, impl: str, seed: int) -> Any:
  """A cache of random tokens, after the steps that come before."""
  cache = holding(layer.method, layer.spec, jnp.int32(layer.tokens))
  keys = jax.random.normal(jax.random.key(seed + 1), cache.slots["k"].shape, jnp.float32)
  cache = cache.put(slots={"k": keys.astype(layer.spec.dtype)})
  step = steps(layer.method, impl, layer.spec, STAGES[-1])
  for _ in range(layer.before):
    cache, _ = step(cache, *projected(layer.spec, seed))
  return cache


def projected(spec: kvjax.CacheSpec, seed: int) -> tuple[jax.Array, jax.Array]:
  """Queries, key and value of each KV head in one array, as a decoder's product, and live rows."""
  shape = spec.batch, spec.kv_heads, spec.groups + 2, spec.head_dim
  return jax.random.normal(jax.random.key(seed), shape, spec.dtype), jnp.ones(spec.batch, bool)


def output(layer: Layer, impl: str) -> np.ndarray:
  """What the first step gives."""
  step = jax.jit(steps(layer.method, impl, layer.spec, STAGES[-1]))
  return np.asarray(step(start(layer, impl, 0), *projected(layer.spec, 0))[1], np.float32)
