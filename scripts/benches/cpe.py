"""CPE's attention against dense decode: shared retrievals over blocks of steps, MHA"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.kernels.decode.dense import decode_attention
from kvjax.kernels.decode.sparse import sparse_decode
from kvjax.programs import suites
from kvjax.programs.suites import Case, Contender, jax_contender, looped_contender, optional, sparse
from kvjax.testing.decode_cases import Shape
from scripts.benches._layer import compared, holding, projected, step_of

BLOCK = 16  # s, steps that share
CACHES = 4  # in turn, as the layers of a model: what one step's lists touch would stay in L2
LAYERS = 32  # of which the first is timed: it sees every token, those on top a window of them
ALIKE = 0.95  # cosine of neighbours among clustered keys
SHAPES = [(batch, tokens) for batch in (8, 16) for tokens in (1 << 10, 2 << 10, 4 << 10)]


@suites.suite
def cases(quick: bool, peers: bool) -> Iterator[tuple]:
  """Every batch and length, at an eighth of the tokens, over keys of two kinds."""
  for batch, tokens in [(2, 256)] if quick else SHAPES:
    name, sizes = f"B{batch} T{tokens} 32x1 1/8", (batch, tokens, quick)
    yield f"{name}, random keys", case, *sizes, 0.0, peers
    yield f"{name}, clustered keys", case, *sizes, ALIKE, peers
    yield f"{name}, the list alone", listed, *sizes


def case(name: str, batch: int, tokens: int, quick: bool, alike: float, peers: bool) -> Case:
  """A layer's step, averaged over a block: enter a token, plan, attend, note.

  `alike` is the cosine of neighbouring keys: 0, or near 1, where what is selected lies in runs,
  which the dilated lists share.
  """
  heads, head_dim = (3, 32) if quick else (32, 128)
  dtype = jnp.float32 if quick else jnp.bfloat16
  spec = kvjax.CacheSpec(batch, tokens + BLOCK, heads, 1, head_dim, LAYERS, dtype)
  cis = kvjax.settings.example(kvjax.CIS, tokens // 8)
  cpe = kvjax.CPE(cis.k, cis.sinks, cis.local, BLOCK)
  full, ours = kvjax.Full(), "pallas" if quick else "auto"  # what runs unasked on a GPU
  block = 2 if quick else BLOCK  # a CPU compiles every step of it anew
  where = spec, tokens, alike
  contenders = [
    looped("kvjax", cpe, ours, *where, block, functools.partial(outputs, cpe, ours, *where)),
    looped("dense decode", full, ours, *where, block),
  ]
  others = [] if quick and alike else compared(cis, cpe, tokens // 8)
  contenders += [looped(told, method, ours, *where, block) for told, method in others]
  if peers:
    flash = (batch, heads, 1, head_dim), (batch, heads, tokens, head_dim)
    contenders += optional("torch flash", lambda: suites.torch_attention("torch flash", *flash))
  told = [aux for _, aux in walked(BLOCK, cpe, "auto", *where)]
  retrieved, visited = (np.mean([x[name] for x in told]) for name in ("retrieved", "visited"))
  token_bytes = 2 * head_dim * jnp.dtype(dtype).itemsize  # a key and a value
  rows = batch * heads
  dense_bytes = rows * tokens * token_bytes
  sparse_bytes = rows * (visited * token_bytes + retrieved * tokens * token_bytes / 2)

  def figures(seconds: dict[str, float]) -> dict[str, float]:
    limit = dense_bytes / sparse_bytes
    return {
      "of the limit by bytes": seconds["dense decode"] / seconds["kvjax"] / limit,
      "limit by bytes": limit,
      "ρ̂": retrieved,
      "tokens a head": visited,
    }

  return Case(
    name=name,
    shapes=f"{batch} rows × {heads} heads, {tokens} tokens of {head_dim} {jnp.dtype(dtype).name}; "
    f"{cpe.k} retrieved + {cpe.sinks} + {cpe.local}, blocks of {BLOCK}; {CACHES} caches in turn",
    bytes=int(sparse_bytes),
    reference=functools.partial(outputs, cpe, "reference", *where),
    tolerance=1e-5 if quick else 1e-2,
    contenders=contenders,
    figures=figures,
  )


def listed(name: str, batch: int, tokens: int, quick: bool) -> Case:
  """Attention alone over as many single tokens as a step lists: apart, in runs of 8, in a row."""
  heads, head_dim, dtype = (3, 32, jnp.float32) if quick else (32, 128, jnp.bfloat16)
  count = tokens * 3 // 16  # what steps over random keys list at an eighth of the tokens
  full = jnp.full((batch, heads), count, jnp.int32)
  ends = jnp.zeros((batch, 1), jnp.int32), jnp.full((batch, 1), tokens, jnp.int32)

  def drawn(seed: int, run: int) -> jax.Array:
    """Runs of slots by position [B, K, W], each head its own."""
    order = jnp.argsort(jax.random.uniform(jax.random.key(seed), (batch, heads, tokens // run)), -1)
    first = run * jnp.sort(order[..., : count // run], -1)
    return (first[..., None] + jnp.arange(run)).reshape(batch, heads, -1).astype(jnp.int32)

  def turn(seed: int, run: int) -> tuple[Any, ...]:
    q, k, v, *_ = Shape(batch, heads, 1, tokens, head_dim, jnp.dtype(dtype).name).arrays(seed)
    return q, k, v, drawn(seed, run), full, *ends

  def dense(q: Any, k: Any, v: Any) -> Any:
    return decode_attention(q, k, v, ends[0], jnp.full_like(ends[0], count))

  run = functools.partial(sparse_decode, unit=1)
  turns = {of: [turn(seed, of) for seed in range(CACHES)] for of in (1, 8, count)}
  names = {1: "apart", 8: "runs of 8", count: "in a row"}
  calls = 2 if quick else 16
  first = turns[1][0]
  contenders = [
    jax_contender(names[of], run, each, output=(lambda x: x[0].o) if of == 1 else None, calls=calls)
    for of, each in turns.items()
  ]
  contenders.append(jax_contender("dense decode", dense, [t[:3] for t in turns[1]], calls=calls))
  moved = batch * heads * count * 2 * head_dim * jnp.dtype(dtype).itemsize

  return Case(
    name=name,
    shapes=f"{batch} rows × {heads} heads, {count} of {tokens} tokens of {head_dim}",
    bytes=moved,
    reference=lambda: sparse.reference(*first, unit=1),
    tolerance=1e-5 if quick else 1e-2,
    contenders=contenders,
    subject="apart",
  )


def looped(
  name: str,
  method: Any,
  impl: str,
  spec: kvjax.CacheSpec,
  tokens: int,
  alike: float,
  block: int,
  output: Callable[[], np.ndarray] | None = None,
) -> Contender:
  """A block of steps over each of several caches, in turn step by step; blocks begin anew."""
  made = looped_contender(
    name,
    step_of(method, impl, LAYERS),
    [start(method, filled(method, spec, tokens, alike, seed)) for seed in range(CACHES)],
    [projected(spec)] * CACHES,
    renewed=lambda before, after: after.put(rows=before.rows),
    calls=block * CACHES,
    loops=2,
  )
  return dataclasses.replace(made, output=output)


def filled(method: Any, spec: kvjax.CacheSpec, tokens: int, alike: float, seed: int = 0) -> Any:
  """A cache of random tokens whose neighbouring keys are as alike as that."""
  size = jax.eval_shape(functools.partial(kvjax.Cache.empty, method, spec, 0)).size
  cache = holding(method, spec, jnp.int32(min(tokens, size)))
  new = jax.random.normal(jax.random.key(seed + 1), cache.slots["k"].shape)
  return cache.put(slots={"k": smoothed(new, alike).astype(spec.dtype)})


@functools.partial(jax.jit, static_argnums=1)
def smoothed(x: jax.Array, alike: float) -> jax.Array:
  """x [B, K, S, H] as a walk along its slots: neighbours have this cosine, the variance stays."""

  def step(last: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
    now = alike * last + (1 - alike**2) ** 0.5 * new
    return now, now

  first, rest = x[:, :, 0], jnp.moveaxis(x[:, :, 1:], 2, 0)
  walked = jax.lax.scan(step, first, rest)[1]
  return jnp.concatenate([x[:, :, :1], jnp.moveaxis(walked, 0, 2)], 2)


def start(method: Any, cache: Any) -> Any:
  """The cache at the start of a block."""
  if "step" not in cache.rows:
    return cache
  return cache.put(rows={"step": jnp.zeros_like(cache.rows["step"])})


def outputs(method: Any, impl: str, spec: kvjax.CacheSpec, tokens: int, alike: float) -> np.ndarray:
  """Outputs of a retrieving step and two sharing ones."""
  return np.stack([out for out, _ in walked(3, method, impl, spec, tokens, alike)])


def walked(
  steps: int, method: Any, impl: str, spec: kvjax.CacheSpec, tokens: int, alike: float
) -> Iterator[tuple[np.ndarray, dict[str, Any]]]:
  """Results of each step of a block, and what the method tells of it.

  Queries are alike at every step: rotated by one place more, the cosine with the last one is 0.97.
  """
  step, inputs = jax.jit(step_of(method, impl, LAYERS, with_aux=True)), projected(spec)
  cache = start(method, filled(method, spec, tokens, alike))
  for _ in range(steps):
    cache, (out, aux) = step(cache, *inputs)
    yield np.asarray(out, np.float32), aux
