"""whole decode steps in a long context: methods that read a part of the cache, against all of it"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.kernels.common.devices import this_device
from kvjax.models.decode.step_bytes import step_bytes
from kvjax.models.nn.config import ModelConfig
from kvjax.models.nn.transformer import Transformer
from kvjax.programs.evals import trace
from kvjax.programs.suites import Case, Contender, optional, suite, together, torch_decoder
from kvjax.programs.suites.e2e import drawn, step_logits, timing, weights
from scripts.benches._layer import compared, holding

STEPS = 16  # decode steps per dispatch: a block of CPE's
TOKENS = 128 << 10
PREDICTED = [n << 10 for n in (16, 32, 64, 128, 256, 512)]  # lengths at which PRR runs
RATIO = 1.25  # ρ where its profile is not asked


def methods(tokens: int) -> dict[str, kvjax.Method]:
  """At the budgets of their papers; τ = −1 shares always, as random weights' queries never do."""
  if tokens < 8192:
    duo = kvjax.DuoAttention("alternate", sinks=8, recent=24)
    return {"Quest": kvjax.Quest(32, page=8, dense_layers=1), "DuoAttention": duo}
  return {
    "Quest": kvjax.Quest(4096),
    "InfLLM-v2": kvjax.InfLLMv2(),
    "CPE": kvjax.CPE.preset(512, tau=-1.0),
    "DuoAttention": kvjax.DuoAttention("alternate"),
  }


@suite
def cases(quick: bool, peers: bool) -> Iterator[tuple]:
  """Every method at batches of 1 and 4, PRR over Quest at every length, then PrHS's Tab. V."""
  name, tokens = ("tiny", 128) if quick else ("Llama-3.1-8B", TOKENS)
  for batch in (2,) if quick else (1, 4):
    for label, method in methods(tokens).items():
      title = f"{label} {name} B{batch} T{tokens >> 10}K"
      yield title, beside_full, name, method, batch, tokens, quick
  for length in (tokens,) if quick else PREDICTED:
    yield f"PRR {name} B1 T{length >> 10}K", predicted, name, length, quick
  name, batches = ("tiny", (2,)) if quick else ("Llama-2-7B", (8, 16))
  for batch in batches:
    for length in (tokens,) if quick else (1 << 10, 2 << 10, 4 << 10):
      title = f"Tab. V {name} B{batch} T{length >> 10}K"
      made = functools.partial(tab_5, peers=peers)
      yield title, made, name, shared(length // 8), batch, length, quick


def shared(budget: int) -> dict[str, kvjax.Method]:
  """CPE, the full cache and the other columns of Tab. V; CIS and CPE share always (τ = −1)."""
  cis = dataclasses.replace(kvjax.settings.example(kvjax.CIS, budget), tau=-1.0)
  cpe = kvjax.CPE(cis.k, cis.sinks, cis.local, tau=-1.0)
  return {"kvjax": cpe, "Full": kvjax.Full()} | dict(compared(cis, cpe, budget))


def tab_5(
  title: str, name: str, methods: dict[str, kvjax.Method], *sizes: Any, peers: bool
) -> Case:
  """A step of each, and of the strongest plain one in PyTorch."""
  made = beside(title, name, methods, *sizes, layers=2)  # over more, roundings add up
  if not peers:
    return made
  held = caches(weights(name), kvjax.Full(), *sizes[:2])
  plain = functools.partial(torch_decoder.contender, weights(name), held, sizes[1])
  more = [dataclasses.replace(x, output=None) for x in optional("torch, CUDA graph", plain)]
  return dataclasses.replace(made, contenders=[*made.contenders, *more])


def case(
  title: str,
  name: str,
  methods: dict[str, kvjax.Method],
  batch: int,
  tokens: int,
  quick: bool,
  *,
  figures: Callable[[dict[str, float]], dict[str, float]] | None = None,
  subject: str = "kvjax",
  compared: tuple[kvjax.Method, kvjax.Method] | None = None,
  layers: int = 4,
  **filled: Any,
) -> Case:
  """A step of each method, whose caches take turns in memory.

  Args:
    compared: the method whose kernels are compared with another's reference; by default the first
      one with itself.
    layers: over how many they are compared.
    filled: `filled`, what makes caches in place of `caches`.
  """
  model, impl = weights(name), "reference" if quick else "pallas"  # no loop compiles interpreted
  first, moved = next(iter(methods.values())), moved_by(model, methods[subject], batch, tokens)
  ours, theirs = compared or (first, first)
  run = together(
    functools.partial(timed, model, method, impl, batch, tokens, **filled)
    for method in methods.values()
  )
  how = {"layers": layers, **filled}
  outputs = [functools.partial(logits, model, ours, "pallas", **how), *[None] * len(methods)]
  return Case(
    name=title,
    shapes=f"{first!r}; {model.dtype.name}; compared over {layers} layers",
    bytes=moved,
    reference=functools.partial(logits, model, theirs, "reference", **how),
    tolerance=1e-4 if model.dtype == jnp.float32 else 2e-2,
    contenders=[Contender(*each) for each in zip(methods, run, outputs, strict=False)],
    subject=subject,
    figures=figures or (lambda seconds: over_bytes(seconds[subject], moved)),
  )


def over_bytes(seconds: float, moved: int) -> dict[str, float]:
  """A step's time over that of its bytes."""
  return {"over its bytes": seconds * this_device().read / moved}


def beside(
  title: str, name: str, methods: dict[str, kvjax.Method], *sizes: Any, **how: Any
) -> Case:
  """A case of methods: how much faster the first is than the second, and the bytes allow."""
  ours, other, *_ = methods

  def figures(seconds: dict[str, float]) -> dict[str, float]:
    moved = {each: moved_by(weights(name), methods[each], *sizes[:2]) for each in methods}
    faster, limit = seconds[other] / seconds[ours], moved[other] / moved[ours]
    found = {"of what bytes allow": faster / limit, "bytes allow": limit}
    return found | over_bytes(seconds[ours], moved[ours])

  return case(title, name, methods, *sizes, figures=figures, **how)


def beside_full(title: str, name: str, method: kvjax.Method, *sizes: Any) -> Case:
  """A step of the method and one of the full cache."""
  methods = {"kvjax": method, "Full": kvjax.Full()}
  return beside(title, name, methods, *sizes)


def predicted(title: str, name: str, tokens: int, quick: bool) -> Case:
  """A step of PRR at a fixed ρ and at the ρ of its profile, and one that selects first."""
  base = methods(tokens)["Quest"]
  fixed, auto = kvjax.PRR(base, budget=RATIO), kvjax.PRR(base)

  def figures(seconds: dict[str, float]) -> dict[str, float]:
    hit, missed = hits(weights(name), fixed, tokens)
    profile = auto._ratio(1, tokens + STEPS)
    return {"hit, %": 100 * hit, "pages missed a head": missed, "ρ of the profile": profile}

  named = {f"ρ = {RATIO:g}": fixed, "by profile": auto, "serial": base}
  return case(title, name, named, 1, tokens, quick, figures=figures, subject="serial")


def moved_by(model: Transformer, method: kvjax.Method, batch: int, tokens: int) -> int:
  """Bytes of a step."""
  return step_bytes(model.config, method, batch, tokens, model.dtype).device


def hits(model: Transformer, method: kvjax.Method, tokens: int) -> list[float]:
  """Share of the chosen pages that PRR had foreseen, and pages that it had not, by KV head."""
  held, token, found = caches(model, method, 1, tokens), jnp.zeros(1, jnp.int32), []
  step = trace.stepper(model, method)
  for _ in range(STEPS):
    logits, held, reports = step(held, token)
    token = jnp.argmax(logits, -1).astype(jnp.int32)
    told = [aux for aux in reports if "missed" in aux]
    found.append([[aux[name].mean() for aux in told] for name in ("hit_rate", "missed")])
  # Nothing has been foreseen for the first.
  return np.mean(jax.device_get(found)[1:], (0, 2)).tolist()


def caches(model: Transformer, method: kvjax.Method, batch: int, tokens: int) -> Any:
  """Caches of `tokens` random tokens, full where they are bounded, and what the method makes of
  them; room for a dispatch. Layers of equal shapes hold the same.
  """
  spec = model.spec(batch, tokens + STEPS)
  made: dict[Any, Any] = {}

  def layer(i: int) -> Any:
    shapes = jax.eval_shape(lambda: kvjax.Cache.empty(method, spec, i))
    key = jax.tree.structure(shapes), *((x.shape, x.dtype) for x in jax.tree.leaves(shapes))
    if key in made:
      return jax.tree.map(jnp.copy, made[key])
    at = method.at(dataclasses.replace(model.env, impl="reference"), i)
    made[key] = holding(method, spec, jnp.int32(min(tokens, shapes.size)), i)
    if method.traits.positional:
      made[key] = _settled(method, at, tokens, made[key])
    return made[key]

  return tuple(layer(i) for i in range(spec.layers))


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def _settled(method: kvjax.Method, at: Any, tokens: int, cache: Any) -> Any:
  count = jnp.full(cache.pos.shape[0], tokens, jnp.int32)
  return method.settle(at, cache, kvjax.Prompt(count, count, None, tokens, 0))


def timed(
  model: Transformer, method: kvjax.Method, impl: str, batch: int, tokens: int, filled: Any = caches
) -> Any:
  """A function that gives the seconds of a step, in programs of STEPS steps from one state."""
  fill = functools.partial(filled, model, method, batch, tokens)
  seconds = timing(model, method, impl, STEPS, jax.eval_shape(fill))
  return lambda: seconds(fill())


def logits(
  model: Transformer, method: kvjax.Method, impl: str, layers: int = 4, filled: Any = caches
) -> np.ndarray:
  """Logits of one step of two rows in few layers, in a context short enough for the reference.

  Over 32 layers of random weights two ways to round to bfloat16 part by 5 %.
  """
  model = few_layers(model.config, model.dtype, layers)
  tokens = 128 if model.config.vocab < 1000 else 12 << 10
  return step_logits(model, method, impl, filled(model, method, 2, tokens))


@functools.lru_cache(maxsize=1)
def few_layers(config: ModelConfig, dtype: Any, most: int) -> Transformer:
  """So many layers of a shape, on which implementations are compared."""
  return drawn(dataclasses.replace(config, layers=min(most, config.layers)), dtype)
