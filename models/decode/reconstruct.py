"""A context that is cut once, for many questions: the model repeats it, and keeps what it needs.

KVzip (Kim et al., NeurIPS 2025, §3 and App. A). The context is read densely. Then each chunk of it
is repeated on top of the whole cache, after an instruction to do so, and what the repetition looks
at is kept. The repetition's own keys are thrown away.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpy.typing import ArrayLike

from kvjax.core import slots
from kvjax.core.cache import Cache, CacheSpec, Origin
from kvjax.core.context import At, Carry, Env, Prompt
from kvjax.families import entrance, sliding
from kvjax.families.full import Full
from kvjax.families.method import Aux, Method
from kvjax.methods import adakv
from kvjax.methods.adakv import AdaKV
from kvjax.methods.kvzip import KVzip
from kvjax.methods.quantised import Quantised
from kvjax.models.decode import checks, compress
from kvjax.models.decode.prefill import pad, prefill
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn import flat
from kvjax.models.nn.transformer import Caches, Transformer
from kvjax.ops import attention

TAIL = 8  # tokens of the chunk before, which an instruction quotes
QUERIES = 512  # whose probabilities are held at once
FIRST = "\n\nRepeat the previous context exactly."
AGAIN = "\n\nRepeat the part of the previous context exactly, starting with"


@dataclasses.dataclass(frozen=True)
class Instructions:
  """Token ids that ask for a repetition.

  Attributes:
    first: before the first chunk.
    again: before the others, and before the last tokens of the chunk before.
    suffix: after both: what the chat template puts between a user's text and the answer.
    opening: tokens that the chat template puts before a user's text. They always stay, and are not
      repeated.
  """

  first: tuple[int, ...]
  again: tuple[int, ...]
  suffix: tuple[int, ...] = ()
  opening: int = 0

  @classmethod
  def of(cls, tokenizer: Tokenizer) -> Instructions:
    """The authors' words, for a context that is the head of a user's text (or plain text)."""
    opening = suffix = ""
    if tokenizer.chat_template is not None:
      mark = "\N{REPLACEMENT CHARACTER}text\N{REPLACEMENT CHARACTER}"
      opening, _, suffix = tokenizer.render([{"role": "user", "content": mark}]).partition(mark)
    first, again, suffix_ids, opening_ids = (
      tuple(tokenizer.encode(text, bos=False)) for text in (FIRST, AGAIN, suffix, opening)
    )
    return cls(first, again, suffix_ids, len(opening_ids))

  def before(self, last: Sequence[int]) -> list[int]:
    """Tokens put before a chunk, of which `last` are the tokens that come before it."""
    if not last:
      return [*self.first, *self.suffix]
    return [*self.again, *last[-TAIL:], *self.suffix]


def read(
  model: Transformer,
  tokens: ArrayLike,
  lengths: ArrayLike,
  method: Method,
  instructions: Instructions,
  *,
  chunk: int = 2048,
  sinks: int = 4,
  dtype: Any = None,
  on_chunk: Callable[[int, int], Any] | None = None,
) -> tuple[Float[Array, "B V"], Caches]:
  """Reads a context, scores its tokens by repeating it, and cuts the cache to the best.

  It holds the context's full cache until it is done, and takes about two to three times as long as
  reading the context alone. The result takes questions by `prefill` and answers by `generate`, and
  can be copied (`kvjax.models.decode.caches.fork`) for other questions: what belongs to the context
  stays. Under a `KVzip` every head keeps as many tokens, in codes under a `Quantised` over one.
  Under an `AdaKV` over one the heads of a layer compete, and all heads do with
  `KVzip(over_layers=True)`: the caches are then those of a method with budgets of its own,
  `caches[0].origin.method`.

  Args:
    model: the decoder.
    tokens: int32 [B, T], right-padded with any valid id.
    lengths: int32 [B], tokens of each row's context; 0 leaves a row idle.
    method: how much is kept of the context: `budget` − `room` tokens a head, or on average over the
      heads that compete.
    instructions, chunk, sinks, dtype, on_chunk: as for `scored`.

  Returns:
    Logits float32 [B, V] after the context, and the caches, one per layer.

  Raises:
    TypeError: `method` is neither a KVzip nor an AdaKV or a Quantised over one.
    ValueError: shapes, lengths or token ids are out of range.
    NotImplementedError: the model is spread over several devices, or `method` is another one over a
      KVzip.
  """
  competes = _kvzip(method).over_layers  # refused before the context is read
  how: dict[str, Any] = {"chunk": chunk, "sinks": sinks, "dtype": dtype, "on_chunk": on_chunk}
  logits, caches, scores = scored(model, tokens, lengths, instructions, **how)
  if competes:
    method = over_layers(method, scores, lengths)
  batch, width = np.shape(tokens)
  kept = _kvzip(method)  # a layer may get more than the context's tokens: `room` comes on top
  spec = model.spec(batch, max(width, kept.budget, *kept.budgets), dtype)
  return logits, cut(model.env, caches, scores, method, spec)


def scored(
  model: Transformer,
  tokens: ArrayLike,
  lengths: ArrayLike,
  instructions: Instructions,
  *,
  chunk: int = 2048,
  sinks: int = 4,
  dtype: Any = None,
  on_chunk: Callable[[int, int], Any] | None = None,
) -> tuple[Float[Array, "B V"], Caches, list[Float[Array, "B K T"]]]:
  """Reads a context, and scores its tokens by repeating it: what `cut` and `over_layers` take.

  Args:
    model: the decoder.
    tokens: int32 [B, T], right-padded with any valid id.
    lengths: int32 [B], tokens of each row's context; 0 leaves a row idle.
    instructions: what asks for a repetition.
    chunk: m, tokens that are repeated at a time (the paper's 2K).
    sinks: first tokens, which always stay, are not repeated, and which every repetition looks at:
      at least 1, and at least `instructions.opening` (4).
    dtype: of cached keys and values; None: the model's.
    on_chunk: called with (tokens repeated, tokens to repeat) of the longest row after every chunk.

  Returns:
    Logits float32 [B, V] after the context, its full caches, and of each layer that sees everything
    the scores float32 [B, K, T].

  Raises:
    ValueError: shapes, lengths or token ids are out of range, or a context and its repetition are
      longer together than what the model was converted for.
    NotImplementedError: the model is spread over several devices.
  """
  if model.mesh is not None:
    raise NotImplementedError("model: found a mesh of several devices, expected one device")
  for name, found in (("chunk", chunk), ("sinks", sinks)):
    if found < 1:
      raise ValueError(f"{name}: found {found}, expected at least 1")
  tokens, lengths = np.asarray(tokens, np.int32), np.asarray(lengths)
  sinks = max(sinks, instructions.opening)
  longest = max(len(instructions.first), len(instructions.again) + TAIL) + len(instructions.suffix)
  batch, width = tokens.shape
  chunk = min(chunk, width)
  spec = model.spec(batch, width + longest + chunk, dtype)
  full = Full()
  repeated = np.where(lengths > 0, longest + np.minimum(chunk, lengths), 0)
  checks.context(model.config, full, lengths, repeated, "repeating a context")
  logits, caches = prefill(model, tokens, lengths, full.init_caches(spec), full, past=0)
  form, leaves = flat.split(model)
  end = int(lengths.max())
  size = batch, model.config.kv_heads, sinks + width + chunk
  scores = [np.zeros(size, np.float32) for _ in sliding.served(caches)]
  for start in range(sinks, end, chunk):
    count = np.clip(lengths - start, 0, chunk)
    last = slice(start if start == sinks else max(sinks, start - TAIL), start)
    rows = [
      instructions.before(row[last].tolist()) + row[start : start + n].tolist() if n else []
      for row, n in zip(tokens, count, strict=True)
    ]
    ids, valid = pad(rows, multiple=1)
    ids = np.pad(ids, ((0, 0), (0, longest + chunk - ids.shape[1])))
    given = ids, valid, np.full(batch, start, np.int32)
    parts = _repeat(form, Repeating(chunk, sinks), leaves, caches, *map(jnp.asarray, given))
    for score, part in zip(scores, parts, strict=True):
      score[:, :, start : start + chunk] = part
    if on_chunk is not None:
      on_chunk(min(start + chunk, end), end)
  for score in scores:
    score[:, :, :sinks] = 2.0  # above every probability
  return logits, caches, [jnp.asarray(x[:, :, :width]) for x in scores]


def over_layers(
  method: Method,
  scores: Sequence[Float[Array, "B K T"]],
  lengths: ArrayLike,
  *,
  tile: int = 64,
) -> AdaKV:
  """The method with as many slots in each layer as it has of the best tokens of all (`pair`, §3).

  All layers' and heads' tokens compete for L·K·(budget − room) places. What a layer wins is known
  once they are scored, and its arrays have a size: that of the row with most, rounded up. Slots
  that are gained this way hold the layer's next best. Another set of sizes is compiled anew.

  Args:
    method: over a `KVzip`; with safeguard 0, which promises no head anything, as the paper's.
    scores: float32 [B, K, T] of each layer, as `scored` returns them.
    lengths: int32 [B], tokens of each row's context.
    tile: tokens a head that sizes are a multiple of, beside the room.

  Returns:
    The method over `KVzip(budgets=…)`, for `cut`, `prefill` and `generate`.

  Raises:
    TypeError: `method` is no AdaKV over a KVzip.
    ValueError: `tile` is not at least 1.
  """
  base = _kvzip(method)
  if not isinstance(method, AdaKV):
    raise TypeError(
      f"method: found {method!r}, expected kvjax.AdaKV over it, as heads differ in length"
    )
  if tile < 1:
    raise ValueError(f"tile: found {tile}, expected at least 1")
  every = np.stack([np.asarray(x) for x in scores], 1)  # [B, L, K, T]
  _, layers, heads, width = every.shape
  there = np.arange(width) < np.asarray(lengths)[:, None, None, None]
  ranked = np.argsort(np.where(there, -every, np.inf).reshape(len(every), -1), -1, kind="stable")
  best = ranked[:, : layers * heads * (base.budget - base.room)]
  real = best % width < np.asarray(lengths)[:, None]
  owner = np.where(real, best // (heads * width), layers)
  won = [np.bincount(row, minlength=layers + 1)[:layers] for row in owner]
  tiles = -(-np.max(won, 0) // (heads * tile))
  budgets = tuple(int(x) + base.room for x in np.maximum(tiles, 1) * tile)
  return dataclasses.replace(method, base=dataclasses.replace(base, budgets=budgets))


def _kvzip(method: Method) -> KVzip:
  """The KVzip in a method, which says how much is kept."""
  base = method.base if isinstance(method, AdaKV | Quantised) else method
  if not isinstance(base, KVzip):
    expected = "a kvjax.KVzip, or kvjax.AdaKV or kvjax.Quantised over one"
    message = f"method: found {method!r}, expected {expected}"
    over_one = isinstance(method, Method) and method.traits.repeats
    raise NotImplementedError(message) if over_one else TypeError(message)
  return base


@functools.partial(jax.jit, static_argnums=(0, 1))
def _repeat(
  form: flat.Form,
  method: Repeating,
  leaves: list[Array],
  caches: Caches,
  tokens: Int[Array, "B A"],
  lengths: Int[Array, " B"],
  start: Int[Array, " B"],
) -> list[Float[Array, "B K M"]]:
  """A pass over instruction and chunk on top of the caches, which stay as they are."""
  told = tuple(cache.put(rows={"chunk": start}) for cache in caches)
  model = flat.join(form, leaves)
  _, _, reports = model.prefill(tokens, lengths, told, method, past=None, with_aux=True)
  return [report["score"] for report in reports if "score" in report]


@dataclasses.dataclass(frozen=True)
class Repeating(Full):
  """The full cache, which also reports how much a repetition looks at the chunk that it repeats.

  `cache.rows["chunk"]`, int32 [B], is where each row's chunk begins.

  Attributes:
    chunk, sinks: as in `read`.
  """

  chunk: int = 2048
  sinks: int = 4

  def prefill(
    self, at: At, cache: Cache, q: Array, k: Array, v: Array, prompt: Prompt, carry: Carry
  ) -> tuple[Array, Cache, Carry, Aux]:
    turned, qpos, own, _ = entrance.enter(at, cache, q, k, v, prompt, carry)
    start = cache.rows["chunk"][:, None]
    sinks = jnp.broadcast_to(jnp.arange(self.sinks), (len(start), self.sinks))
    slot = jnp.concatenate([sinks, start + jnp.arange(self.chunk)], 1)
    slot = jnp.broadcast_to(slot[:, None], (*cache.pos.shape[:2], slot.shape[1]))
    held = {name: slots.take(cache.slots[name], slot) for name in ("k", "pos")}
    there = slot < cache.seen[:, None, None]  # after the context there is nothing
    held["pos"] = jnp.where(there, held["pos"], -1)
    new = {name: own[name] for name in ("k", "pos")}
    score = looked_at(turned, qpos, held, new, at.env.soft_cap)
    out, cache, carry, aux = super().prefill(at, cache, q, k, v, prompt, carry)
    return out, cache, carry, {**aux, "score": score[:, :, self.sinks :]}


def looked_at(
  q: Float[Array, "B K G A H"],
  qpos: Int[Array, "B A"],
  held: dict[str, Array],
  own: dict[str, Array],
  soft_cap: float | None = None,
) -> Float[Array, "B K M"]:
  """max over queries and query heads of softmax([held ‖ own])'s probability of each held key.

  Args:
    q: rotated queries of the repetition, and qpos their positions; −1 = padding.
    held: "k" [B, K, M, H] and "pos" [B, K, M] of sinks and chunk; −1: none.
    own: of the repetition's own keys, [B, K, A, H] and [B, K, A], of which queries see what came
      before them.
    soft_cap: as in `Env`.
  """
  count = held["pos"].shape[2]
  k = jnp.concatenate([held["k"], own["k"].astype(held["k"].dtype)], 2)
  pos = jnp.concatenate([held["pos"], own["pos"]], 2)
  size = min(QUERIES, q.shape[3])
  blocks = -(-q.shape[3] // size)
  more = blocks * size - q.shape[3]
  q = jnp.pad(q, [(0, 0)] * 3 + [(0, more), (0, 0)])
  qpos = jnp.pad(qpos, ((0, 0), (0, more)), constant_values=-1)

  def add(i: Array, best: Array) -> Array:
    of_block = jax.lax.dynamic_slice_in_dim(q, i * size, size, 3)
    at = jax.lax.dynamic_slice_in_dim(qpos, i * size, size, 1)
    sees = (pos >= 0)[:, :, None] & (pos[:, :, None] <= at[:, None, :, None])
    logits = jnp.where(sees[:, :, None], attention.logits_of(of_block, k, soft_cap), -jnp.inf)
    top = logits.max(-1, keepdims=True)
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(top), top, 0))  # [B, K, G, T, S]
    total = weights.sum(-1, keepdims=True)
    share = weights[..., :count] / jnp.where(total > 0, total, 1)
    return jnp.maximum(best, share.max((2, 3)))

  none = jnp.zeros((*pos.shape[:2], count), jnp.float32)
  return jax.lax.fori_loop(0, blocks, add, none)


def cut(
  env: Env,
  caches: Caches,
  scores: Sequence[Float[Array, "B K T"]],
  method: Method,
  spec: CacheSpec,
) -> Caches:
  """Live full caches, of which the tokens with the best scores stay.

  Args:
    env: the model's.
    caches: of the full cache, after a context; they are left as they are.
    scores: float32 [B, K, T] for each layer that sees everything, of its first T slots.
    method: how many stay, as for `read`.
    spec: sizes of the new caches.

  Raises:
    TypeError: `method` is neither a KVzip nor an AdaKV or a Quantised over one.
  """
  _kvzip(method)
  origin, given, made = Origin.of(method, spec), iter(scores), []
  layers = itertools.count()
  alike: dict[Any, int] = {}  # the first layer with such arrays: they share a program
  for cache, window in zip(caches, sliding.windows_of(caches), strict=True):
    if window is None:
      layer = next(layers)
      empty = jax.eval_shape(functools.partial(Cache.empty, method, spec, layer))
      shapes = tuple((x.shape, x.dtype) for x in jax.tree.leaves(empty))
      first = alike.setdefault((jax.tree.structure(empty), shapes), layer)
      cache = _cut_layer(method.at(env, first), cache, next(given), spec)
    else:
      cache = jax.tree.map(jnp.array, cache)
    made.append(dataclasses.replace(cache, origin=origin))
  return tuple(made)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _cut_layer(at: At, cache: Cache, score: Float[Array, "B K T"], spec: CacheSpec) -> Cache:
  """One layer of `cut`."""
  method = at.top
  most = _kvzip(method).capacity(spec, at.layer) - _kvzip(method).room
  held = {name: cache.slots[name][:, :, : score.shape[2]] for name in ("k", "v", "pos")}
  held["score"] = score
  nothing = jnp.zeros_like(cache.seen)
  if isinstance(method, AdaKV):
    empty = Cache.empty(method, spec, at.layer)
    made = adakv.cut(method, empty, held, score, cache.used, most)
  else:
    best, count = slots.keep_best(held, score, most), jnp.minimum(cache.used, most)
    unasked = jnp.zeros_like(best["k"])[:, :, None]  # in place of queries: nothing looks at it
    entering = Prompt(count, count, None, most, 0)
    made = compress.kept(at, spec, best, entering, unasked, unasked, *[unasked[..., 0]] * 2)
    made = made.put(slots={"score": slots.resize({"score": best["score"]}, made.size)["score"]})
  made = made.put(rows={"seen": jnp.array(cache.seen)})
  return method.settle(at, made, Prompt(nothing, nothing, None, 1))
