"""Prefill and decode loops for hosts: jitted once over flat leaves, caches donated.

Dispatching a module of a few hundred arrays costs tens of milliseconds through `nnx.jit`, so both
entry points split it into its leaves first, and decoding runs a chunk of steps per dispatch.
What a host has to see (stop strings, streaming) happens between chunks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import checkify
from jaxtyping import Array, Bool, Float, Int
from numpy.typing import ArrayLike

from kvjax import memory, offload, sharding
from kvjax.method import Method
from models import by_layer
from models.by_layer import ByLayer
from models.sampling import Knobs, Sampling, draw
from models.stopping import RowText
from models.tokenizer import Tokenizer
from models.transformer import Caches, Transformer

GREEDY = Sampling()


@dataclasses.dataclass(frozen=True)
class Generation:
  """What `generate` produced.

  Attributes:
    tokens: int32 [B, steps], −1 after a row has stopped (the stop token, or the token that
      completes a stop string, is the last one).
    lengths: int32 [B], tokens of each row.
    last: float32 [B, V], the logits after each row's last token: pass them on to continue.
    logits: float32 [B, steps, V], the logits that each token was chosen from, where asked for.
    logprobs: float32 [B, steps], log-probability in nats of each token under the model (before
      temperature and filters), where asked for; 0 where there is no token.
    texts: each row's text, without stop tokens and stop strings, where a tokenizer was given.
  """

  tokens: np.ndarray
  lengths: np.ndarray
  last: Array
  logits: Array | None = None
  logprobs: np.ndarray | None = None
  texts: list[str] | None = None


def pad(prompts: Sequence[Sequence[int]], *, multiple: int = 1) -> tuple[np.ndarray, np.ndarray]:
  """Token ids of several rows as `prefill` takes them.

  Args:
    prompts: each row's ids; an empty one leaves its row idle.
    multiple: T is rounded up to a multiple of it: few sizes, few compilations.

  Returns:
    int32 [B, T], right-padded, and the lengths int32 [B].
  """
  if multiple < 1:
    raise ValueError(f"multiple: found {multiple}, expected at least 1")
  lengths = np.array([len(ids) for ids in prompts], np.int32)
  size = -(-lengths.max(initial=1) // multiple) * multiple
  tokens = np.zeros((len(prompts), size), np.int32)
  for row, ids in zip(tokens, prompts, strict=True):
    row[: len(ids)] = ids
  return tokens, lengths


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

  Compiles once per shape of `tokens`: callers round T up to a few sizes. With `chunk`, it compiles
  once for the first chunk and then once for every doubling of what is cached, whatever T is.
  Methods that stream read a prompt in pieces of their own (`Method.pieces`), row by row, of one or
  two widths, however long the prompt is. Those that ask for it (`Method.by_layer`) are compiled for
  a layer, not for all of them at once.

  Args:
    model: the decoder.
    tokens: int32 [B, T], right-padded with any valid id.
    lengths: int32 [B], valid tokens of each row; 0 leaves a row idle.
    caches: donated; the result replaces them.
    method: the KV-cache method.
    total: int32 [B], length of the whole prompt of this turn, when `tokens` is a part of it.
    past: static upper bound on the tokens already cached in any row. None: 0 if the caches are
      empty, else unknown (one compilation serves every later call).
    chunk: tokens per row to read at a time, which bounds the memory that a prompt takes; None:
      all at once, or as the method streams.
    all_logits: logits of every position.
    with_aux: also return what the method reports (of a prompt in pieces, on the last one).
    on_chunk: called with (tokens read, tokens to read) of the longest row after every chunk.

  Returns:
    As `Transformer.prefill`: logits float32 [B, V] ([B, T, V]), caches, and the reports if asked.

  Raises:
    ValueError: shapes, lengths or token ids are out of range, every row is empty, or a prompt does
      not fit in the capacity of a method that keeps every token. Nothing has run then.
    NotImplementedError: `chunk` is given and the method has to see a prompt at once, or streams in
      pieces of its own.
    MemoryError: a device has no room; the message says what takes it and what would fit. The caches
      that were passed are gone.
    JaxRuntimeError: of `jax.experimental.checkify`, with `model.env.check_nan` only: attention
      came out as NaN or infinity. The caches that were passed are gone.
  """
  tokens, lengths = np.asarray(tokens), np.asarray(lengths)
  seen = _check_prompt(model, tokens, lengths, caches, method)
  total = lengths if total is None else np.asarray(total)
  if total.shape != lengths.shape or (total < lengths).any():
    raise ValueError(
      f"total: found {total.tolist()}, expected one per row, at least lengths {lengths.tolist()}"
    )
  longest = int(seen.max())
  if past is not None and longest > past:
    raise ValueError(f"past: found {past}, expected at least the {longest} tokens already cached")
  whole = jnp.asarray(total, jnp.int32)
  layered = ByLayer(model) if by_layer.suits(model, method) else None
  graph, leaves = (None, []) if layered else split(model)

  def read(caches: Caches, tokens: np.ndarray, valid: np.ndarray, bound: int | None) -> Any:
    arrays = jnp.asarray(tokens, jnp.int32), jnp.asarray(valid, jnp.int32)
    options = bound, all_logits, with_aux
    with _explained("prefill", model, caches, method):
      if layered is not None:
        return layered.prefill(
          *(*arrays, caches, method),
          total=whole,
          past=bound,
          all_logits=all_logits,
          with_aux=with_aux,
        )
      run = _jitted(_prefill, model)
      error, result = run(graph, method, *options, leaves, caches, *arrays, whole)
    _throw(error)
    return result

  if chunk is None and method.pieces(int(lengths.max())) is not None:
    return _read_pieces(read, tokens, lengths, caches, method, all_logits, with_aux, on_chunk)
  if chunk is None:
    return read(caches, tokens, lengths, 0 if past is None and longest == 0 else past)
  _check_chunk(method, chunk, past, with_aux)
  size, end = tokens.shape[1], int(lengths.max())
  parts: list[Array] = []
  for start in range(0, end, chunk):
    piece = tokens[:, start : start + chunk]
    piece = np.pad(piece, ((0, 0), (0, chunk - piece.shape[1])))
    valid = np.clip(lengths - start, 0, chunk)
    bound = _bound(caches, method, longest + start, chunk)
    logits, caches = read(caches, piece, valid, bound)
    if parts and not all_logits:  # rows that have ended before keep their logits
      logits = jnp.where((valid > 0)[:, None], logits, parts.pop())
    parts.append(logits)
    if on_chunk is not None:
      jax.block_until_ready(logits)
      on_chunk(min(start + chunk, end), end)
  return (_joined(parts, size)[:, :size] if all_logits else parts[0]), caches


def _read_pieces(
  read: Callable[..., Any],
  tokens: np.ndarray,
  lengths: np.ndarray,
  caches: Caches,
  method: Method,
  all_logits: bool,
  with_aux: bool,
  on_chunk: Callable[[int, int], Any] | None,
) -> Any:
  """A prompt in the pieces of a method that streams, each row in its own; result as `prefill`'s."""
  parts = [method.pieces(int(n)) or [] for n in lengths]
  calls, end = max(map(len, parts)), int(lengths.max())
  # Two widths, whatever the prompt's length: that of the longest piece, and a short one for what
  # the rows' last ones may be.
  large = max(map(max, filter(None, parts)))
  small = -(-large // 8)
  starts = np.zeros(len(lengths), np.int64)
  kept, rest = None, ()
  for i in range(calls):
    valid = np.array([part[i] if i < len(part) else 0 for part in parts])
    width = small if valid.max() <= small else large
    index = np.minimum(starts[:, None] + np.arange(width), tokens.shape[1] - 1)
    piece = np.take_along_axis(tokens, index, 1)
    logits, caches, *rest = read(caches, piece, valid, None)
    if all_logits:
      place = np.where(np.arange(width) < valid[:, None], index, tokens.shape[1])
      empty = (*tokens.shape, logits.shape[-1])
      kept = jnp.zeros(empty, logits.dtype) if kept is None else kept
      kept = kept.at[np.arange(len(valid))[:, None], place].set(logits, mode="drop")
    else:  # rows that have ended before keep their logits
      kept = logits if kept is None else jnp.where((valid > 0)[:, None], logits, kept)
    starts += valid
    if on_chunk is not None:
      jax.block_until_ready(logits)
      on_chunk(int(starts.max()), end)
  return (kept, caches, *rest) if with_aux else (kept, caches)


def generate(
  model: Transformer,
  logits: Float[Any, "B V"],
  caches: Caches,
  method: Method,
  *,
  steps: int,
  sampling: Sampling = GREEDY,
  seed: int = 0,
  rows: ArrayLike | None = None,
  stop: Sequence[int] = (),
  stop_strings: Sequence[str] = (),
  tokenizer: Tokenizer | None = None,
  live: ArrayLike | None = None,
  forced: ArrayLike | None = None,
  return_logits: bool = False,
  return_logprobs: bool = False,
  chunk: int = 16,
  on_chunk: Callable[[np.ndarray], Any] | None = None,
  on_text: Callable[[list[str]], Any] | None = None,
) -> tuple[Generation, Caches]:
  """Decodes up to `steps` tokens per row.

  Each step chooses a token from the current logits, inserts it into the caches and predicts the
  next; every token that is returned is therefore cached, and a row that stopped is idle from then
  on. Decoding ends early when all rows have stopped.

  Stop strings are found by the host between chunks: until the chunk's end, up to chunk − 1 tokens
  that are not returned enter the row's cache and its `last`. Where that matters (a conversation
  that goes on from there), `chunk=1` leaves nothing behind.

  Args:
    model: the decoder.
    logits: float32 [B, V] of `prefill`, or `Generation.last` of an earlier call.
    caches: donated; the result replaces them.
    method: the KV-cache method.
    steps: tokens to generate.
    sampling: temperature and filters; the likeliest token by default. Other numbers compile
      nothing again, unless the temperature comes from or goes to 0.
    seed: random seed, below 2³². A draw depends on (seed, the row's number, the token's position
      in the row) only: not on the row's neighbours, nor on where an earlier call ended.
    rows: int32 [B], the rows' numbers in all that is generated, so that a row draws the same text
      in any batch; None: 0, 1, …
    stop: token ids that end a row (unless forced).
    stop_strings: strings that end a row; its text ends before them.
    tokenizer: turns tokens into text: for `stop_strings`, `on_text` and `Generation.texts`.
    live: bool [B], rows that take part (None: all).
    forced: int32 [B, steps], tokens to insert instead of the chosen ones; −1 = free.
    return_logits: keep the logits of every step, float32 [B, steps, V].
    return_logprobs: keep the log-probability of every token, float32 [B, steps].
    chunk: steps per dispatch.
    on_chunk: called with the tokens int32 [B, n] of every chunk as they come (−1 = no token).
    on_text: called with the new text of every row after every chunk; all calls together give
      `Generation.texts`.

  Returns:
    The generation and the caches.

  Raises:
    ValueError: an argument is out of range, or the longest row would outgrow the capacity of a
      method that keeps every token. Nothing has run then and the caches are intact.
    MemoryError, JaxRuntimeError: as in `prefill`.
  """
  batch, vocab = logits.shape
  _check_settings(vocab, steps, chunk, seed, stop, stop_strings)
  if tokenizer is None and (stop_strings or on_text is not None):
    raise ValueError("tokenizer: found None, expected one, to find stop_strings or call on_text")
  live = np.ones(batch, bool) if live is None else np.asarray(live)
  rows = np.arange(batch, dtype=np.int32) if rows is None else np.asarray(rows)
  for name, array in (("live", live), ("rows", rows)):
    if array.shape != (batch,):
      raise ValueError(f"{name}: found shape {array.shape}, expected ({batch},)")
  if not np.issubdtype(rows.dtype, np.integer) or rows.min() < 0 or rows.max() >= 2**31:
    raise ValueError(f"rows: found {rows.tolist()}, expected integers in [0, 2**31)")
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

  kind = method, sampling.greedy, return_logits, return_logprobs
  if by_layer.suits(model, method):
    run = functools.partial(_decode_by_layer, ByLayer(model), *kind)
  else:
    graph, leaves = split(model)
    run = functools.partial(_jitted(_decode_chunk, model), graph, *kind, leaves)
  ends = jnp.asarray(sorted(set(stop)), jnp.int32)
  constants = jnp.asarray(rows, jnp.int32), sampling.knobs(vocab), jnp.uint32(seed)
  padded = np.full((batch, -(-steps // chunk) * chunk), -1, np.int32)
  padded[:, :steps] = forced
  on = jnp.asarray(live)
  texts = None
  if tokenizer is not None:
    texts = [RowText(tokenizer.stream(), stop_strings) for _ in range(batch)]
  pieces: list[tuple[Any, ...]] = []
  last = jnp.asarray(logits, jnp.float32)
  for start in range(0, steps, chunk):
    count = min(chunk, steps - start)
    wanted = padded[:, start : start + chunk]
    with _explained("generate", model, caches, method):
      error, (last, caches, on, *kept) = run(
        caches, last, on, ends, jnp.asarray(wanted), jnp.int32(count), *constants
      )
    _throw(error)
    tokens, *kept = [None if x is None else x[:, :count] for x in kept]
    if texts is not None:
      tokens = np.array(tokens)
      new = _read(texts, tokens, np.isin(tokens, ends) & (wanted[:, :count] < 0))
      on &= ~np.array([text.ended for text in texts])
      if on_text is not None:
        on_text(new)
    pieces.append((tokens, *kept))
    if on_chunk is not None:
      on_chunk(np.asarray(tokens))
    if (stop or stop_strings) and not np.asarray(on).any():
      break
  if texts is not None:
    rest = [text.flush() for text in texts]
    if on_text is not None and any(rest):
      on_text(rest)

  emitted, used, logprobs = zip(*pieces, strict=True)
  tokens = np.concatenate([np.asarray(x) for x in emitted], 1)
  tokens = np.pad(tokens, ((0, 0), (0, steps - tokens.shape[1])), constant_values=-1)
  generation = Generation(
    tokens=tokens,
    lengths=(tokens >= 0).sum(1, dtype=np.int32),
    last=last,
    logits=_joined(used, steps) if return_logits else None,
    logprobs=np.where(tokens >= 0, _joined(logprobs, steps), 0) if return_logprobs else None,
    texts=None if texts is None else [text.text for text in texts],
  )
  return generation, caches


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


def _jitted(function: Callable[..., Any], model: Transformer) -> Callable[..., Any]:
  """`_prefill` or `_decode_chunk`, compiled for the devices that a model is on."""
  return _jit(function, tuple(sharding.compiler_options(model.mesh).items()))


@functools.cache
def _jit(function: Callable[..., Any], options: tuple[tuple[str, str], ...]) -> Callable[..., Any]:
  settings = range(5)
  return jax.jit(
    function, static_argnums=settings, donate_argnums=6, compiler_options=dict(options) or None
  )


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
  """The result of `Transformer.prefill`, behind an error if the model checks for NaN."""
  model = join(graph, leaves)

  def run(caches: Caches) -> Any:
    options = {"past": past, "all_logits": all_logits, "with_aux": with_aux}
    return offload.settled(model.prefill(tokens, lengths, caches, method, total=total, **options))

  return checkify.checkify(run)(caches) if model.env.check_nan else (None, run(caches))


class _Decoding(NamedTuple):
  """What the steps of a chunk hand on: logits [B, V], live rows [B], tokens [B, C], and the logits
  [B, C, V] and log-probabilities [B, C] that they were chosen by, or None.
  """

  logits: Array
  live: Array
  tokens: Array
  used: Array | None
  logprobs: Array | None

  @classmethod
  def start(
    cls, logits: Array, live: Array, steps: int, keep_logits: bool, keep_logprobs: bool
  ) -> _Decoding:
    batch, vocab = logits.shape
    tokens = jnp.full((batch, steps), -1, jnp.int32)
    used = jnp.zeros((batch, steps, vocab), jnp.float32) if keep_logits else None
    logprobs = jnp.zeros((batch, steps), jnp.float32) if keep_logprobs else None
    return cls(logits, live, tokens, used, logprobs)


def _chosen(
  greedy: bool,
  state: _Decoding,
  seen: Int[Array, " B"],
  i: Array,
  forced: Int[Array, "B C"],
  rows: Int[Array, " B"],
  knobs: Knobs,
  seed: Array,
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
  """The token that goes in at step i, and what was forced there (−1: nothing)."""
  if greedy:
    token = jnp.argmax(state.logits, -1).astype(jnp.int32)
  else:
    token = draw(state.logits, knobs, seed, rows, seen)
  want = forced[:, i]
  return jnp.where(want >= 0, want, token), want


def _inserted(
  state: _Decoding, i: Array, token: Array, want: Array, new: Array, stop: Array
) -> _Decoding:
  """The state once the token of step i is in and `new` logits have come."""
  logits, live, tokens, used, logprobs = state
  tokens = tokens.at[:, i].set(jnp.where(live, token, -1))
  if used is not None:
    used = used.at[:, i].set(logits)
  if logprobs is not None:
    chosen = jnp.take_along_axis(logits, token[:, None], 1)[:, 0]
    logprobs = logprobs.at[:, i].set(chosen - jax.nn.logsumexp(logits, -1))
  logits = jnp.where(live[:, None], new, logits)
  live = live & ((want >= 0) | ~jnp.isin(token, stop))
  return _Decoding(logits, live, tokens, used, logprobs)


def _decode_chunk(
  graph: Any,
  method: Method,
  greedy: bool,
  keep_logits: bool,
  keep_logprobs: bool,
  leaves: list[Array],
  caches: Caches,
  logits: Float[Array, "B V"],
  live: Bool[Array, " B"],
  stop: Int[Array, " E"],
  forced: Int[Array, "B C"],
  count: Array,
  rows: Int[Array, " B"],
  knobs: Knobs,
  seed: Array,
) -> Any:
  """`count` ≤ C steps, fewer if every row stops, behind an error if the model checks for NaN.

  The count is traced, so that a shorter last chunk needs no second compilation.

  Returns:
    The error or None, and: logits [B, V], caches, live rows [B], tokens int32 [B, C], and the
    logits and log-probabilities of each step or None.
  """
  model = join(graph, leaves)

  def step(carry: Any) -> Any:
    i, state, caches = carry
    token, want = _chosen(greedy, state, caches[0].seen, i, forced, rows, knobs, seed)
    new, caches = model.decode(token, caches, method, state.live)
    return i + 1, _inserted(state, i, token, want, new, stop), caches

  def going(carry: Any) -> Array:
    return (carry[0] < count) & carry[1].live.any()

  start = _Decoding.start(logits, live, forced.shape[1], keep_logits, keep_logprobs)
  first = jnp.int32(0), start, offload.loose(caches)

  def run(first: Any) -> Any:
    _, state, caches = jax.lax.while_loop(going, step, first)
    return state.logits, offload.settled(caches), *state[1:]

  return checkify.checkify(run)(first) if model.env.check_nan else (None, run(first))


_choose, _insert = jax.jit(_chosen, static_argnums=0), jax.jit(_inserted)


def _decode_by_layer(
  model: ByLayer,
  method: Method,
  greedy: bool,
  keep_logits: bool,
  keep_logprobs: bool,
  caches: Caches,
  logits: Float[Array, "B V"],
  live: Bool[Array, " B"],
  stop: Int[Array, " E"],
  forced: Int[Array, "B C"],
  count: Array,
  *constants: Any,
) -> Any:
  """`_decode_chunk` from programs of a layer; rows that stop are idle until the chunk's end."""
  state = _Decoding.start(logits, live, forced.shape[1], keep_logits, keep_logprobs)
  for i in map(jnp.int32, range(int(count))):
    token, want = _choose(greedy, state, caches[0].seen, i, forced, *constants)
    new, caches = model.decode(token, caches, method, state.live)
    state = _insert(state, i, token, want, new, stop)
  return None, (state.logits, caches, *state[1:])


def _explained(
  what: str, model: Transformer, caches: Caches, method: Method
) -> contextlib.AbstractContextManager[None]:
  """Says what would fit where a device has no memory left."""
  capacity = max(cache.size for cache in caches)
  spec = model.spec(caches[0].seen.shape[0], capacity)
  return memory.explained(what, method, spec, model.mesh, model.weight_bytes())


def _throw(error: Any) -> None:
  """Raises what a jitted function found, if it looked."""
  if error is not None:
    error.throw()


def _read(texts: list[RowText], tokens: np.ndarray, ends: np.ndarray) -> list[str]:
  """Feeds each row its tokens [B, n]; returns the new texts, and drops what follows a stop string.

  Tokens at `ends` (bool [B, n]) stop their row and are not text.
  """
  new = []
  for text, ids, last in zip(texts, tokens, ends, strict=True):
    released = ""
    for i in range(int((ids >= 0).sum())):
      released += text.flush() if last[i] else text.feed(int(ids[i]))
      if text.ended:
        ids[i + 1 :] = -1
        break
    new.append(released)
  return new


def _joined(pieces: Sequence[Array], size: int) -> Array:
  """[B, n, ...] pieces side by side, padded with zeros to [B, size, ...] or more."""
  whole = jnp.concatenate(pieces, 1)
  missing = max(0, size - whole.shape[1])
  return jnp.pad(whole, ((0, 0), (0, missing), *[(0, 0)] * (whole.ndim - 2)))


def _check_settings(
  vocab: int, steps: int, chunk: int, seed: int, stop: Sequence[int], stop_strings: Sequence[str]
) -> None:
  """Raises for settings of `generate` that are out of range."""
  for name, value in (("steps", steps), ("chunk", chunk)):
    if value < 1:
      raise ValueError(f"{name}: found {value}, expected at least 1")
  if not 0 <= seed < 2**32:
    raise ValueError(f"seed: found {seed}, expected an integer in [0, 2**32)")
  for token in stop:
    if not 0 <= token < vocab:
      raise ValueError(f"stop: found token {token}, expected ids in [0, {vocab})")
  if isinstance(stop_strings, str) or "" in stop_strings:
    raise ValueError(f"stop_strings: found {stop_strings!r}, expected a list of non-empty strings")


def _check_chunk(method: Method, chunk: int, past: int | None, with_aux: bool) -> None:
  """Raises where a prompt cannot be read in chunks."""
  if chunk < 1:
    raise ValueError(f"chunk: found {chunk}, expected at least 1, or None")
  if past is not None or with_aux:
    name, value = ("past", past) if past is not None else ("with_aux", with_aux)
    raise ValueError(f"{name}: found {value} and chunk = {chunk}, expected only one of the two")
  if method.pieces(chunk) is not None:
    raise NotImplementedError(
      f"chunk: found {chunk}, expected None for {method!r}, which reads a prompt in its own pieces"
    )
  if not method.chunkable:
    raise NotImplementedError(
      f"chunk: found {chunk}, expected None for {method!r}, which has to see a whole "
      "prompt before it chooses what stays"
    )


def _bound(caches: Caches, method: Method, cached: int, chunk: int) -> int | None:
  """A static bound on the cached tokens that takes few values; what needs none gets one value."""
  if cached == 0:
    return 0
  if not method.positional:
    return None
  bound = chunk
  while bound < cached:
    bound *= 2
  return min(bound, *(cache.size for cache in caches))


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
  """Raises if a row would outgrow what the method has room for; returns tokens seen per row."""
  seen = np.asarray(caches[0].seen)
  need = np.where(new > 0, seen + new, 0)
  rooms = [room for room in map(method.room, caches) if room is not None]
  capacity = min(rooms, default=None)
  if capacity is not None and need.max() > capacity:
    row = int(need.argmax())
    raise ValueError(
      f"{what} after {seen[row]} cached tokens (row {row}) needs {need[row]} slots, "
      f"found a capacity of {capacity}, expected at least {need[row]}"
    )
  return seen
