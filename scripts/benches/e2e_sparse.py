"""whole decode steps in a long context: methods that read a part of the cache, against all of it"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.kernels.common.devices import this_device
from kvjax.models.decode.generate import join, split
from kvjax.models.decode.step_bytes import step_bytes
from kvjax.models.nn.transformer import Transformer
from kvjax.programs.suites import Case, Contender, fitting, together
from kvjax.programs.suites.e2e import drawn, seconds_of, stepping, weights
from scripts.benches.longflow import holding

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


def cases(quick: bool, peers: bool = True, only: str = "") -> Iterator[Case]:
  """Every method at batches of 1 and 4, then PRR over Quest at every length."""
  name, tokens = ("tiny", 128) if quick else ("Llama-3.1-8B", TOKENS)
  for batch in (2,) if quick else (1, 4):
    for label, method in methods(tokens).items():
      title = f"{label} {name} B{batch} T{tokens >> 10}K"
      if only in title:
        yield from fitting(title, case, weights(name), method, batch, tokens, quick)
  for length in (tokens,) if quick else PREDICTED:
    title = f"PRR {name} B1 T{length >> 10}K"
    if only in title:
      yield predicted_case(title, weights(name), methods(length)["Quest"], length, quick)


def case(
  title: str, model: Transformer, method: kvjax.Method, batch: int, tokens: int, quick: bool
) -> Case:
  """A step of the method and one of the full cache, whose caches take turns in memory."""
  impl = "reference" if quick else "pallas"  # the interpreter takes minutes to compile a loop
  full = kvjax.Full()
  run = [functools.partial(timed, model, m, impl, batch, tokens) for m in (method, full)]
  ours, dense = together(run)
  contenders = [
    Contender("kvjax", ours, functools.partial(logits, model, method, "pallas")),
    Contender("Full", dense, None),
  ]
  moved = {m: moved_by(model, m, batch, tokens) for m in (method, full)}

  def remarks(seconds: dict[str, float]) -> list[str]:
    rate = this_device().read
    faster, limit = seconds["Full"] / seconds["kvjax"], moved[full] / moved[method]
    return [
      f"{faster:.2f} × Full, {faster / limit:.3f} of what the bytes allow ({limit:.2f} ×; at least "
      "0.8); "
      f"{seconds['kvjax'] * rate / moved[method]:.2f} × its bytes over {rate / 1e12:.2f} TB/s"
    ]

  return Case(
    name=title,
    shapes=f"{method!r}; {model.dtype.name}; compared over four layers",
    bytes=moved[method],
    reference=lambda: logits(model, method, "reference"),
    tolerance=1e-4 if model.dtype == jnp.float32 else 2e-2,
    contenders=tuple(contenders),
    subject="kvjax",
    remarks=remarks,
  )


def predicted_case(
  title: str, model: Transformer, base: kvjax.Method, tokens: int, quick: bool
) -> Case:
  """A step of PRR at a fixed ρ and at the ρ of its profile, and one that selects first."""
  impl = "reference" if quick else "pallas"
  fixed, auto = kvjax.PRR(base, budget=RATIO), kvjax.PRR(base)
  named = {f"ρ = {RATIO:g}": fixed, "by profile": auto, "serial": base}
  checked = functools.partial(logits, model, fixed, "pallas")
  run = together(functools.partial(timed, model, m, impl, 1, tokens) for m in named.values())
  contenders = [
    Contender(label, seconds, checked if named[label] is fixed else None)
    for label, seconds in zip(named, run, strict=True)
  ]

  def remarks(seconds: dict[str, float]) -> list[str]:
    gain = {label: seconds["serial"] / t for label, t in seconds.items() if label != "serial"}
    hit, missed = hits(model, fixed, impl, tokens)
    return [
      "TPOT of serial over PRR's: " + ", ".join(f"{label} {x:.3f}" for label, x in gain.items()),
      f"ρ = {RATIO:g} hit {hit:.0%} of what was chosen, {missed:.1f} pages missed a head; random "
      f"weights; the profile says ρ = {auto._ratio(1, tokens + STEPS):g}",
    ]

  return Case(
    name=title,
    shapes=f"{fixed!r}; {model.dtype.name}; compared over four layers",
    bytes=moved_by(model, base, 1, tokens),
    reference=lambda: logits(model, fixed, "reference"),
    tolerance=1e-4 if model.dtype == jnp.float32 else 2e-2,
    contenders=tuple(contenders),
    subject="serial",
    remarks=remarks,
  )


def moved_by(model: Transformer, method: kvjax.Method, batch: int, tokens: int) -> int:
  """Bytes of a step."""
  return step_bytes(model.config, method, batch, tokens, model.dtype).device


def hits(model: Transformer, method: kvjax.Method, impl: str, tokens: int) -> tuple[float, float]:
  """Share of the chosen pages that PRR had foreseen, and pages that it had not, by KV head."""
  graph, leaves = split(model)

  def run(leaves: Any, held: Any) -> Any:
    decoder = join(graph, leaves)
    decoder.env = dataclasses.replace(decoder.env, impl=impl)

    def step(carry: Any, _: Any) -> Any:
      held, token = carry
      out, held, reports = decoder.decode(token, held, method, with_aux=True)
      told = [aux for aux in reports if "missed" in aux]
      means = [jnp.mean(jnp.stack([aux[name] for aux in told])) for name in ("hit_rate", "missed")]
      return (held, jnp.argmax(out, -1).astype(jnp.int32)), means

    start = held, jnp.zeros(1, jnp.int32)
    (held, _), found = jax.lax.scan(step, start, None, length=STEPS)
    return held, [x[1:].mean() for x in found]  # nothing has been foreseen for the first

  hit, missed = jax.jit(run, donate_argnums=1)(leaves, caches(model, method, 1, tokens))[1]
  return float(hit), float(missed)


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
  graph, leaves = split(model)
  token = jnp.zeros(batch, jnp.int32)
  run = stepping(graph, method, impl, STEPS)
  shapes = jax.eval_shape(lambda: filled(model, method, batch, tokens))
  program = jax.jit(run, donate_argnums=1).lower(leaves, shapes, token).compile()

  def seconds() -> float:
    return seconds_of(program, leaves, filled(model, method, batch, tokens), token, STEPS)

  return seconds


def logits(model: Transformer, method: kvjax.Method, impl: str, filled: Any = caches) -> np.ndarray:
  """Logits of one step of two rows in four layers, in a context short enough for the reference.

  Over 32 layers of random weights two ways to round to bfloat16 part by 5 %.
  """
  model = _few_layers(dataclasses.replace(model.config, layers=min(4, model.config.layers)))
  graph, leaves = split(model)
  tokens = 128 if model.config.vocab < 1000 else 12 << 10

  @jax.jit
  def step(leaves: Any, held: Any) -> Any:
    decoder = join(graph, leaves)
    decoder.env = dataclasses.replace(decoder.env, impl=impl)
    return decoder.decode(jnp.arange(2, dtype=jnp.int32), held, method)[0]

  return np.asarray(step(leaves, filled(model, method, 2, tokens)))


@functools.cache
def _few_layers(config: Any) -> Transformer:
  return drawn(config, jnp.float32 if config.vocab < 1000 else jnp.bfloat16)
