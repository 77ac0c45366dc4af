"""Prefill and decode loops for hosts: jitted once over flat leaves, caches donated.

Dispatching a module of a few hundred arrays costs tens of milliseconds through `nnx.jit`, so both
entry points split it into its leaves first, and decoding runs a chunk of steps per dispatch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int
from numpy.typing import ArrayLike

from kvjax.method import Method
from models.transformer import Caches, Transformer


@dataclasses.dataclass(frozen=True)
class Generation:
  """What `generate` produced.

  Attributes:
    tokens: int32 [B, steps], −1 after a row has stopped (the stop token itself is included).
    lengths: int32 [B], tokens of each row.
    last: float32 [B, V], the logits after each row's last token: pass them on to continue.
    logits: float32 [B, steps, V], the logits that each token was chosen from, where asked for.
  """

  tokens: np.ndarray
  lengths: np.ndarray
  last: Array
  logits: Array | None = None


def prefill(
  model: Transformer,
  tokens: ArrayLike,
  lengths: ArrayLike,
  caches: Caches,
  method: Method,
  *,
  total: ArrayLike | None = None,
  past: int | None = None,
  all_logits: bool = False,
  with_aux: bool = False,
) -> Any:
  """`Transformer.prefill`, jitted, with checked arguments and donated caches.

  Compiles once per shape of `tokens`: callers round T up to a few sizes.

  Args:
    model: the decoder.
    tokens: int32 [B, T], right-padded with any valid id.
    lengths: int32 [B], valid tokens of each row; 0 leaves a row idle.
    caches: donated; the result replaces them.
    method: the KV-cache method.
    total: int32 [B], length of the whole prompt of this turn, when `tokens` is a chunk of it.
    past: static upper bound on the tokens already cached in any row. None: 0 if the caches are
      empty, else unknown (one compilation serves every later chunk).
    all_logits: logits of every position.
    with_aux: also return what the method reports.

  Returns:
    As `Transformer.prefill`: logits float32 [B, V] ([B, T, V]), caches, and the reports if asked.

  Raises:
    ValueError: shapes, lengths or token ids are out of range, every row is empty, or a prompt does
      not fit in the capacity of a method that keeps every token.
  """
  tokens, lengths = np.asarray(tokens), np.asarray(lengths)
  seen = _check_prompt(model, tokens, lengths, caches, method)
  if total is not None:
    total = np.asarray(total)
    if total.shape != lengths.shape or (total < lengths).any():
      raise ValueError(
        f"total: found {total.tolist()}, expected one per row, at least lengths {lengths.tolist()}"
      )
  longest = int(seen.max())
  if past is None:
    past = 0 if longest == 0 else None
  elif longest > past:
    raise ValueError(f"past: found {past}, expected at least the {longest} tokens already cached")
  graph, leaves = split(model)
  total = lengths if total is None else total
  arrays = [jnp.asarray(x, jnp.int32) for x in (tokens, lengths, total)]
  return _prefill(graph, method, past, all_logits, with_aux, leaves, caches, *arrays)


def generate(
  model: Transformer,
  logits: Float[Any, "B V"],
  caches: Caches,
  method: Method,
  *,
  steps: int,
  temperature: float = 0.0,
  seed: int = 0,
  stop: Sequence[int] = (),
  live: ArrayLike | None = None,
  forced: ArrayLike | None = None,
  return_logits: bool = False,
  chunk: int = 16,
  on_chunk: Callable[[np.ndarray], Any] | None = None,
) -> tuple[Generation, Caches]:
  """Decodes up to `steps` tokens per row.

  Each step chooses a token from the current logits, inserts it into the caches and predicts the
  next; every token that is returned is therefore cached, and a row that stopped is idle from then
  on. Decoding ends early when all rows have stopped.

  Args:
    model: the decoder.
    logits: float32 [B, V] of `prefill`, or `Generation.last` of an earlier call.
    caches: donated; the result replaces them.
    method: the KV-cache method.
    steps: tokens to generate.
    temperature: 0 takes the likeliest token; otherwise softmax(logits / temperature) is sampled.
    seed: random seed. A row's draws depend on (seed, row, step) only, not on its neighbours.
    stop: token ids that end a row (unless forced).
    live: bool [B], rows that take part (None: all).
    forced: int32 [B, steps], tokens to insert instead of the chosen ones; −1 = free.
    return_logits: keep the logits of every step, float32 [B, steps, V].
    chunk: steps per dispatch.
    on_chunk: called with the tokens int32 [B, n] of every chunk as they come (−1 = no token).

  Returns:
    The generation and the caches.

  Raises:
    ValueError: an argument is out of range, or the longest row would outgrow the capacity of a
      method that keeps every token. Nothing has run then and the caches are intact.
  """
  batch, vocab = logits.shape
  if steps < 1:
    raise ValueError(f"steps: found {steps}, expected at least 1")
  if chunk < 1:
    raise ValueError(f"chunk: found {chunk}, expected at least 1")
  if not 0 <= temperature < float("inf"):
    raise ValueError(f"temperature: found {temperature}, expected a finite number of at least 0")
  for token in stop:
    if not 0 <= token < vocab:
      raise ValueError(f"stop: found token {token}, expected ids in [0, {vocab})")
  live = np.ones(batch, bool) if live is None else np.asarray(live)
  if live.shape != (batch,):
    raise ValueError(f"live: found shape {live.shape}, expected ({batch},)")
  if forced is None:
    forced = np.full((batch, steps), -1, np.int32)
  forced = np.asarray(forced)
  if forced.shape != (batch, steps):
    raise ValueError(f"forced: found shape {forced.shape}, expected {(batch, steps)}")
  if forced.min() < -1 or forced.max() >= vocab:
    raise ValueError(
      f"forced: found ids in [{forced.min()}, {forced.max()}], expected [0, {vocab}) or -1"
    )
  _check_room(caches, method, steps * live, f"steps = {steps}")

  graph, leaves = split(model)
  run = functools.partial(_decode_chunk, graph, method, temperature == 0, return_logits)
  ends = jnp.asarray(sorted(set(stop)), jnp.int32)
  padded = np.full((batch, -(-steps // chunk) * chunk), -1, np.int32)
  padded[:, :steps] = forced
  on = jnp.asarray(live)
  tokens: list[Any] = []
  kept: list[Any] = []
  last = jnp.asarray(logits, jnp.float32)
  for start in range(0, steps, chunk):
    count = min(chunk, steps - start)
    wanted = jnp.asarray(padded[:, start : start + chunk])
    scalars = jnp.int32(start), jnp.int32(count), jnp.float32(temperature), jnp.uint32(seed)
    last, caches, on, out, used = run(leaves, caches, last, on, ends, wanted, *scalars)
    tokens.append(out[:, :count])
    if return_logits:
      kept.append(used[:, :count])
    if on_chunk is not None:
      on_chunk(np.asarray(tokens[-1]))
    if stop and not np.asarray(on).any():
      break
  result = np.full((batch, steps), -1, np.int32)
  done = np.concatenate([np.asarray(x) for x in tokens], 1)
  result[:, : done.shape[1]] = done
  chosen_from = None
  if return_logits:
    missing = jnp.zeros((batch, steps - done.shape[1], vocab), jnp.float32)
    chosen_from = jnp.concatenate([*kept, missing], 1)
  return Generation(result, (result >= 0).sum(1, dtype=np.int32), last, chosen_from), caches


def split(model: nnx.Module) -> tuple[Any, list[Array]]:
  """A module as a static, hashable description and its flat arrays; `join` is the inverse.

  For own decode loops: pass the description as a static argument and the list as a traced one.
  """
  graph, state = nnx.split(model)
  leaves, tree = jax.tree.flatten(state)
  return (graph, tree), leaves


def join(graph: Any, leaves: Sequence[Array]) -> Any:
  """The module of `split`, inside jit or out."""
  return nnx.merge(graph[0], jax.tree.unflatten(graph[1], list(leaves)))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4), donate_argnums=(6,))
def _prefill(
  graph: Any,
  method: Method,
  past: int | None,
  all_logits: bool,
  with_aux: bool,
  leaves: list[Array],
  caches: Caches,
  tokens: Int[Array, "B T"],
  lengths: Int[Array, " B"],
  total: Int[Array, " B"],
) -> Any:
  return join(graph, leaves).prefill(
    tokens,
    lengths,
    caches,
    method,
    total=total,
    past=past,
    all_logits=all_logits,
    with_aux=with_aux,
  )


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=(5,))
def _decode_chunk(
  graph: Any,
  method: Method,
  greedy: bool,
  keep_logits: bool,
  leaves: list[Array],
  caches: Caches,
  logits: Float[Array, "B V"],
  live: Bool[Array, " B"],
  stop: Int[Array, " E"],
  forced: Int[Array, "B C"],
  start: Array,
  count: Array,
  temperature: Array,
  seed: Array,
) -> tuple[Float[Array, "B V"], Caches, Bool[Array, " B"], Int[Array, "B C"], Array | None]:
  """`count` ≤ C steps from step `start` on, fewer if every row stops.

  The count is traced, so that a shorter last chunk needs no second compilation.
  """
  model = join(graph, leaves)
  B, C = forced.shape
  rows = jnp.arange(B)

  def draw(row: Array, step: Array, row_logits: Array) -> Array:
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), row), step)
    return jax.random.categorical(key, row_logits / temperature)

  def step(carry: Any) -> Any:
    i, logits, caches, live, out, used = carry
    if keep_logits:
      used = used.at[:, i].set(logits)
    if greedy:
      token = jnp.argmax(logits, -1)
    else:
      token = jax.vmap(draw, (0, None, 0))(rows, start + i, logits)
    want = forced[:, i]
    token = jnp.where(want >= 0, want, token.astype(jnp.int32))
    out = out.at[:, i].set(jnp.where(live, token, -1))
    new, caches = model.decode(token, caches, method, live)
    logits = jnp.where(live[:, None], new, logits)
    live = live & ((want >= 0) | ~jnp.isin(token, stop))
    return i + 1, logits, caches, live, out, used

  def going(carry: Any) -> Array:
    return (carry[0] < count) & carry[3].any()

  out = jnp.full((B, C), -1, jnp.int32)
  used = jnp.zeros((B, C, logits.shape[1]), jnp.float32) if keep_logits else None
  first = jnp.int32(0), logits, caches, live, out, used
  _, logits, caches, live, out, used = jax.lax.while_loop(going, step, first)
  return logits, caches, live, out, used


def _check_prompt(
  model: Transformer, tokens: np.ndarray, lengths: np.ndarray, caches: Caches, method: Method
) -> np.ndarray:
  """Raises for a prompt that cannot be read; returns the tokens already seen per row."""
  for name, x, rank in (("tokens", tokens, 2), ("lengths", lengths, 1)):
    if x.ndim != rank or not np.issubdtype(x.dtype, np.integer):
      raise ValueError(
        f"{name}: found {x.dtype} {x.shape}, expected an integer array of {rank} dimension(s)"
      )
  batch, size = tokens.shape
  if lengths.shape != (batch,):
    raise ValueError(f"lengths: found shape {lengths.shape}, expected ({batch},) as tokens has")
  if len(caches) != model.config.layers:
    raise ValueError(f"caches: found {len(caches)}, expected one per layer, {model.config.layers}")
  rows = caches[0].seen.shape[0]
  if rows != batch:
    raise ValueError(f"tokens: found {batch} rows, expected {rows} as the caches have")
  if lengths.min(initial=0) < 0 or lengths.max(initial=0) > size:
    raise ValueError(f"lengths: found {lengths.tolist()}, expected values in [0, {size}]")
  if not lengths.any():
    raise ValueError("lengths: found an empty prompt in every row, expected at least one token")
  real = tokens[np.arange(size) < lengths[:, None]]
  if real.min() < 0 or real.max() >= model.config.vocab:
    raise ValueError(
      f"tokens: found ids in [{real.min()}, {real.max()}], expected [0, {model.config.vocab})"
    )
  return _check_room(caches, method, lengths, f"a prompt of {lengths.max()} tokens")


def _check_room(caches: Caches, method: Method, new: np.ndarray, what: str) -> np.ndarray:
  """Raises if a row would outgrow a method that keeps every token; returns tokens seen per row."""
  seen = np.asarray(caches[0].seen)
  need = np.where(new > 0, seen + new, 0)
  capacity = min(cache.size for cache in caches)
  if method.positional and need.max() > capacity:
    row = int(need.argmax())
    raise ValueError(
      f"{what} after {seen[row]} cached tokens (row {row}) needs {need[row]} slots, "
      f"found a capacity of {capacity}, expected at least {need[row]}"
    )
  return seen
