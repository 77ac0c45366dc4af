"""Prompts into caches: padded, checked, compiled, at once or in chunks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jaxtyping import Array, Int
from numpy.typing import ArrayLike

from kvjax.core.cache import CacheSpec
from kvjax.core.traits import Stream
from kvjax.families.method import Method
from kvjax.models.decode import by_layer, checks
from kvjax.models.decode.by_layer import ByLayer
from kvjax.models.decode.pieces import Pieces, Read, side_by_side, width
from kvjax.models.nn import flat
from kvjax.models.nn.transformer import Caches, Transformer
from kvjax.ops import offload
from kvjax.runtime import arguments, sharding


def pad(prompts: Sequence[Sequence[int]], *, multiple: int = 64) -> tuple[np.ndarray, np.ndarray]:
  """Token ids of several rows as `prefill` takes them.

  >>> from kvjax.models.decode.generate import pad
  >>> tokens, lengths = pad([[5, 6, 7], [8]], multiple=4)
  >>> tokens.tolist(), lengths.tolist()
  ([[5, 6, 7, 0], [8, 0, 0, 0]], [3, 1])

  Args:
    prompts: each row's ids; an empty one leaves its row idle.
    multiple: T is rounded up to a multiple of it: few sizes, few compilations.

  Returns:
    int32 [B, T], right-padded, and the lengths int32 [B].

  Raises:
    TypeError: a row is no list of integers.
    ValueError: `multiple` is not at least 1, or an id is no int32.
  """
  multiple = checks.whole("multiple", multiple, 1)
  if not np.iterable(prompts):
    raise TypeError(f"prompts: found {prompts!r}, expected a list of lists of token ids")
  rows = [checks.token_ids(f"prompts[{i}]", ids) for i, ids in enumerate(prompts)]
  lengths = np.array([len(ids) for ids in rows], np.int32)
  size = -(-lengths.max(initial=1) // multiple) * multiple
  tokens = np.zeros((len(rows), size), np.int32)
  for row, ids in zip(tokens, rows, strict=True):
    row[: len(ids)] = ids
  return tokens, lengths


def empty(model: Transformer, method: Method, batch: int, capacity: int) -> Caches:
  """`Transformer.init_caches` in one dispatch, for those who make caches again and again.

  Args:
    model: the decoder.
    method: whose caches they are.
    batch, capacity: as `Transformer.spec` takes them.
  """
  spec = model.spec(batch, capacity)
  if model.mesh is not None:
    return sharding.init_caches(method, spec, model.mesh)
  if not by_layer.reads(model) or offload.hosted(shapes(method, spec)):  # in places of their own
    return method.init_caches(spec)
  return _init(method, spec)


@functools.cache
def shapes(method: Method, spec: CacheSpec) -> Any:
  """Empty caches as shapes."""
  return jax.eval_shape(lambda: method.init_caches(spec))


@flat.own
@functools.partial(jax.jit, static_argnums=(0, 1))
def _init(method: Method, spec: CacheSpec) -> Caches:
  return method.init_caches(spec)


def prefill(
  model: Transformer,
  tokens: ArrayLike,
  lengths: ArrayLike,
  caches: Caches,
  method: Method,
  *,
  total: ArrayLike | None = None,
  past: int | None = None,
  chunk: int | None = None,
  all_logits: bool = False,
  with_aux: bool = False,
  on_chunk: Callable[[int, int], Any] | None = None,
) -> Any:
  """`Transformer.prefill`, jitted, with checked arguments and donated caches.

  On live caches it reads a further turn; rows of length 0 stay as they are (their logits mean
  nothing).

  T is rounded up to a few sizes (multiples of 64, from 1,024 tokens on by up to a sixteenth), each
  of which compiles once; with `all_logits` or `with_aux` it is taken as it is. What all prompts and
  steps have compiled is dropped where it is much (384 programs). With `chunk`, it compiles
  once for the first chunk and then once for every doubling of what is cached, whatever T is.
  Methods that stream read a prompt in pieces of their own (`Traits.stream`), row by row, of two or
  three widths, however long the prompt is. What is compiled is a layer, once for all that are alike
  (`Stream.alike`); over a mesh, or where NaN raises, all layers at once.

  Args:
    model: the decoder.
    tokens: int32 [B, T], right-padded with any valid id.
    lengths: int32 [B], valid tokens of each row; 0 leaves a row idle.
    caches: donated; the result replaces them.
    method: the KV-cache method.
    total: integers [B], length of the whole prompt of this turn, when `tokens` is a part of it.
    past: static upper bound on the tokens already cached in any row. None: 0 if the caches are
      empty, else unknown (one compilation serves every later call).
    chunk: tokens per row to read at a time, which bounds the memory that a prompt takes; None:
      all at once, or as the method streams.
    all_logits: logits of every position.
    with_aux: also return the method's reports (of a prompt in pieces, those of the last one).
    on_chunk: called with (tokens read, tokens to read) of the longest row after every chunk.

  Returns:
    As `Transformer.prefill`: logits float32 [B, V] ([B, T, V]), caches, and requested reports.

  Raises:
    TypeError: `method` is no method, or `caches` no caches.
    ValueError: shapes, lengths or token ids are out of range, every row is empty, the caches are
      those of another method or model or were donated before, or a prompt does not fit in the
      capacity of a method that keeps every token, or in the context that the model was converted
      for. Nothing has run then.
    NotImplementedError: `chunk` is given, or `total` of a part, and the method has to see a prompt
      at once, or streams in pieces of its own.
    MemoryError: a device is full; the message names the sizes and what would fit. The caches that
      were passed are gone.
    FloatingPointError: a row's logits came out as NaN or infinity. The caches that were passed are
      gone.
    JaxRuntimeError: of `jax.experimental.checkify`, with `model.env.check_nan` only: attention
      came out as NaN or infinity. The caches that were passed are gone.

  Warns:
    UserWarning: a row exceeds the context that the model was trained for, under a method that does
      not bound distances (`Traits.endless`).
  """
  tokens, lengths = arguments.array("tokens", tokens), arguments.array("lengths", lengths)
  checks.callbacks(on_chunk=on_chunk)
  past = None if past is None else checks.whole("past", past, 0)
  chunk = None if chunk is None else checks.whole("chunk", chunk, 1)
  seen = checks.prompt(model, tokens, lengths, caches, method)
  checks.context(model.config, method, seen, lengths, "prefill")
  by_layer.bound_programs()
  known = arguments.whole(method, lengths, total)
  whole = lengths if known is None else known
  longest = int(seen.max())
  if past is not None and longest > past:
    raise ValueError(f"past: found {past}, expected at least the {longest} tokens already cached")
  if chunk is not None:
    checks.prompt_chunk(method, chunk, past, with_aux)
  result = read_prompt(
    *(model, tokens, lengths, caches, method, whole, longest, past),
    chunk=chunk,
    all_logits=all_logits,
    with_aux=with_aux,
    on_chunk=on_chunk,
  )
  check_sound(model, lengths, *result[:2])
  return result


def read_prompt(
  model: Transformer,
  tokens: np.ndarray,
  lengths: np.ndarray,
  caches: Caches,
  method: Method,
  total: Int[Any, " B"],
  cached: int,
  past: int | None = None,
  *,
  chunk: int | None = None,
  all_logits: bool = False,
  with_aux: bool = False,
  on_chunk: Callable[[int, int], Any] | None = None,
  layered: ByLayer | None = None,
) -> Any:
  """`prefill`, unchecked: it waits for nothing on the device.

  Args:
    cached: tokens in the fullest row.
    layered: of the model, where somebody keeps it.
  """
  read = caller(model, caches, method, total, all_logits, with_aux, layered)
  size = tokens.shape[1]
  if chunk is None and method.traits.stream is None:
    if not (all_logits or with_aux):  # which have T entries
      extra = _width(size, checks.capacity(caches, method)) - size
      tokens = np.pad(tokens, ((0, 0), (0, extra)))
    return read(caches, tokens, lengths, 0 if past is None and cached == 0 else past)
  pieces, kept, end = Pieces(read, caches, method, chunk, cached), [], int(lengths.max())
  pieces.add(tokens, lengths)
  for piece in pieces.read(ending=True):
    if all_logits:
      kept.append(piece)
    if on_chunk is not None:
      jax.block_until_ready(piece.logits)
      on_chunk(int(pieces.done.max()), end)
  logits = side_by_side(kept, size) if all_logits else pieces.logits
  return (logits, pieces.caches, *piece.reports)


def caller(
  model: Transformer,
  caches: Caches,
  method: Method,
  total: Int[Any, " B"] | None,
  all_logits: bool = False,
  with_aux: bool = False,
  layered: ByLayer | None = None,
) -> Read:
  """The call of a model that reads a piece of its prompts.

  Args:
    model, caches, method: as `prefill` takes them.
    total: length of each row's whole prompt; None: that of the piece.
    all_logits, with_aux: as `prefill` takes them.
    layered: of the model, where somebody keeps it.
  """
  if layered is None and by_layer.reads(model):
    layered = ByLayer(model)
  explained = checks.explained("prefill", model, caches, method)

  def read(caches: Caches, tokens: np.ndarray, valid: np.ndarray, bound: int | None) -> Any:
    arrays = jnp.asarray(tokens, jnp.int32), jnp.asarray(valid, jnp.int32)
    whole = jnp.asarray(valid if total is None else total, jnp.int32)
    options = bound, all_logits, with_aux
    with explained():
      if layered is not None:
        return layered.prefill(
          *(*arrays, caches, method),
          total=whole,
          past=bound,
          all_logits=all_logits,
          with_aux=with_aux,
        )
      form, leaves = flat.split(model)
      run = flat.jitted(_prefill, 5, model.mesh)
      error, result = run(form, method, *options, leaves, caches, *arrays, whole)
    if error is not None:
      error.throw()
    return result

  return read


def widths(
  method: Method, size: int, chunk: int | None, capacity: Int[np.ndarray, " B"] | None
) -> tuple[int, ...]:
  """Widths of the calls that read a prompt of `size` tokens.

  Prompts of equal ones may be read side by side: each has the calls that it has alone.

  Args:
    method, chunk: as `prefill` takes them.
    size: tokens.
    capacity: of `checks.capacity`.
  """
  stream = method.traits.stream if chunk is None else Stream(chunk)
  if stream is None:
    return (_width(size, capacity),)
  return tuple(width(stream, n, bounded=chunk is not None) for n in stream.pieces(size))


def _width(size: int, capacity: Int[np.ndarray, " B"] | None) -> int:
  """T to read a prompt with: one of few, at most a sixteenth more, or 63 tokens.

  Where there is no room for it, T is what there is room for.
  """
  step = max(64, (1 << size.bit_length()) // 32)
  width = -(-size // step) * step
  return width if capacity is None else max(size, min(width, int(capacity.max())))


def check_sound(
  model: Transformer, lengths: Int[np.ndarray, " B"], logits: Array, caches: Caches
) -> None:
  """Raises where a row that was read has logits, of [B, V] or [B, T, V], that are not finite."""
  size = logits.shape[1] if logits.ndim == 3 else 1
  read = np.arange(size) < lengths[:, None]
  ill = read & ~np.asarray(checks.sound(logits)).reshape(read.shape)
  if ill.any():
    row, place = np.argwhere(ill)[0].tolist()
    place = (
      f"token {place}" if logits.ndim == 3 else f"after the {lengths[row]} tokens of its prompt"
    )
    raise checks.unsound("prefill", row, place, model, caches)


def _prefill(
  form: flat.Form,
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
  """The result of `Transformer.prefill`, behind an error if the model checks for NaN."""
  model = flat.join(form, leaves)

  def run(caches: Caches) -> Any:
    options = {"past": past, "all_logits": all_logits, "with_aux": with_aux}
    return offload.settled(model.prefill(tokens, lengths, caches, method, total=total, **options))

  return checkify.checkify(run)(caches) if model.env.check_nan else (None, run(caches))
