"""Prompts that come in parts, over hours or days: read in chunks, grown, kept, taken up again."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpy.typing import ArrayLike

from kvjax.core.cache import CacheSpec
from kvjax.core.context import OwnRows
from kvjax.families.method import Method
from kvjax.models.decode import by_layer, checks
from kvjax.models.decode import caches as kept
from kvjax.models.decode.pieces import Pieces, undivided
from kvjax.models.decode.prefill import caller, check_sound, shapes
from kvjax.models.nn.transformer import Caches, Transformer
from kvjax.ops import offload
from kvjax.runtime import arguments, memory

FIRST = 1 << 17  # tokens that the store of a longer stream has room for at first


class PromptStream:
  """A prompt that comes in parts, of which whole chunks are read as soon as they are there.

      stream = PromptStream(model, method, model.spec(batch=1, capacity=1_000_000))
      for part in parts:
        stream.feed([part])
      logits, caches = stream.finish(room=256)

  Chunks are counted from the first token of the stream: in whatever parts it comes, the same chunks
  are read. Under methods that stream, and of a single row, the same programs read them, and the
  caches have the same bits; with `chunk` a program depends on the fullest row. Tokens that do not
  fill a chunk wait for those that follow, or for `finish`.

  Between two calls the caches are those of the last whole chunk, whatever ended a call: Ctrl-C,
  which waits for the chunk under way (a second one does not), or an error of `on_chunk`. A further
  call reads on. An error of the device in the midst of a chunk is different, and so is a killed
  process: `save` from time to time, and `restore`.

  A store in the host's memory has room for 131,072 tokens at first, and whenever it is full for
  twice as many, up to the capacity; programs are compiled anew then.

  Args:
    model: the decoder.
    method: one that streams, as `InfLLM` and `Ltri` do, or with `chunk` one that reads in chunks.
    spec: sizes of the caches, as `Transformer.spec` gives them; its capacity is the most that a row
      will hold.
    caches: of an earlier `finish`, or of `prefill`: the stream is a further turn. They are donated.
      None: empty ones.
    chunk: tokens to read at a time, where the method does not say it.
    total: integers [B], the length of each row's whole prompt; needed with `chunk`.

  Attributes:
    caches: as of the last whole chunk; `feed` and `finish` donate them.
    logits: float32 [B, V] after each row's last chunk; zeros before it.
    seen: int [B], tokens of each row that the caches hold. A stream that is restored goes on with
      the token of this number.
    waiting: int [B], tokens that do not fill a chunk.
    spec: sizes of the caches as they are: its capacity grows.

  Raises:
    TypeError: `method` is no method, or `spec` no sizes.
    ValueError: the caches are others, or were donated before; `chunk` is given without `total`.
    NotImplementedError: the method does not stream and `chunk` is not given, or it does and it is,
      or the method has to see a prompt at once.
    MemoryError: the host's memory, or a device's, has no room for caches of the capacity.
  """

  def __init__(
    self,
    model: Transformer,
    method: Method,
    spec: CacheSpec,
    *,
    caches: Caches | None = None,
    chunk: int | None = None,
    total: ArrayLike | None = None,
  ):
    self._begin(model, method, spec, chunk, total)
    if caches is None:
      self.spec = self._sizes[0]
      caches = model.init_caches(method, spec.batch, self.spec.capacity, spec.dtype)
    else:
      checks.laid_out(caches, method, spec)
      self.spec = _spec_of(caches, method, self._sizes)
    self._take(caches, jnp.zeros((spec.batch, model.config.vocab), jnp.float32))

  def _begin(
    self, model: Transformer, method: Method, spec: CacheSpec, chunk: Any = None, total: Any = None
  ) -> None:
    """Checks and keeps what does not change."""
    kept.check_whose(method, spec)
    if chunk is not None:
      chunk = checks.whole("chunk", chunk, 1)
      arguments.chunk(method, chunk)
    elif method.traits.stream is None:
      raise NotImplementedError(
        f"chunk: found None, expected tokens to read at a time: {method!r} does not stream"
      )
    if (chunk is None) != (total is None):
      raise ValueError(f"total: found {total} with chunk = {chunk}, expected both or neither")
    if total is not None:
      total = np.asarray(arguments.counts("total", total, spec.batch))
    memory.check_host(method, spec)
    self._model, self._method, self._most, self._ended = model, method, spec, False
    self._sizes, self._how = _sizes(model, method, spec), (chunk, total)
    by_layer.bound_programs()

  def _take(self, caches: Caches, logits: Array) -> None:
    chunk, total = self._how
    self._before = np.asarray(caches[0].seen).astype(np.int64)
    read = caller(self._model, caches, self._method, total)
    how = caches, self._method, chunk, self._before, logits
    self._pieces = Pieces(read, *how, grown=self._grown)

  @property
  def caches(self) -> Caches:
    return self._pieces.caches

  @property
  def logits(self) -> Float[Array, "B V"]:
    assert self._pieces.logits is not None  # zeros at first
    return self._pieces.logits

  @property
  def seen(self) -> Int[np.ndarray, " B"]:
    return self._before + self._pieces.done

  @property
  def waiting(self) -> Int[np.ndarray, " B"]:
    return np.array([len(row) for row in self._pieces.waiting])

  def feed(
    self,
    tokens: ArrayLike,
    lengths: ArrayLike | None = None,
    *,
    on_chunk: Callable[[int, int], Any] | None = None,
  ) -> None:
    """Takes the next tokens, and reads the chunks that are whole now.

    Args:
      tokens: int32 [B, T], right-padded with any valid id.
      lengths: int32 [B], valid tokens of each row; None: all.
      on_chunk: called after every chunk with (tokens read, tokens that came) of the longest row.

    Raises:
      ValueError: shapes, lengths or ids are out of range; the tokens are more than `total`, or do
        not fit in the capacity, or in the context that the model was converted for; or the stream
        has ended. Nothing was taken then.
      MemoryError: there is no room for a larger store, and the caches are as they were; or a device
        has none, and they are gone.
    """
    if self._ended:
      raise ValueError(
        "tokens: found some after finish, expected a further stream, with its caches"
      )
    tokens = arguments.array("tokens", tokens)
    batch, size = tokens.shape if tokens.ndim == 2 else (len(self.seen), 0)
    lengths = np.full(batch, size) if lengths is None else arguments.array("lengths", lengths)
    checks.callbacks(on_chunk=on_chunk)
    checks.there(self.caches)
    checks.of_prompts(self._model, tokens, lengths, len(self.seen))
    coming, total = self.waiting + lengths, self._how[1]
    if total is not None and (self._pieces.done + coming > total).any():
      told = (self._pieces.done + coming).tolist()
      raise ValueError(f"tokens: found {told} in all, expected at most total = {total.tolist()}")
    what = f"a stream with {lengths.max()} more tokens"
    checks.room(shapes(self._method, self._most), self._method, coming, what, self.seen)
    checks.context(self._model.config, self._method, self.seen, coming, "feed")
    self._pieces.add(tokens, lengths)
    self._read(on_chunk, ending=False)

  def finish(
    self, *, room: int = 0, on_chunk: Callable[[int, int], Any] | None = None
  ) -> tuple[Float[Array, "B V"], Caches]:
    """Reads what waits; logits and caches, as `prefill` returns them. The stream ends with it.

    Args:
      room: tokens that each row will generate at most: the store has room for them.
      on_chunk: as in `feed`.

    Raises:
      ValueError: no token was read; or no capacity for the room.
      FloatingPointError: a row's logits came out as NaN or infinity.
      MemoryError: as in `feed`.
    """
    room = checks.whole("room", room, 0)
    checks.there(self.caches)
    if not (self._pieces.done + self.waiting).any():
      raise ValueError("tokens: found none, expected at least one before finish")
    self._ended = True
    self._read(on_chunk, ending=True)
    check_sound(self._model, self._pieces.done, self.logits, self.caches)
    with undivided():
      self._pieces.caches = self._grown(self.caches, int(self.seen.max()) + room)
    return self.logits, self.caches

  def save(self, path: str | os.PathLike[str]) -> pathlib.Path:
    """Writes what the caches hold into a folder, as `kvjax.models.decode.caches.save`.

    Tokens that wait are not in it: after `restore`, feed those from `seen` on.

    Raises:
      OSError: the folder cannot be written.
      ValueError: the caches are gone.
    """
    return kept.save(path, self.logits, self.caches, self._method, self.spec)

  @classmethod
  def restore(
    cls,
    path: str | os.PathLike[str],
    model: Transformer,
    method: Method,
    spec: CacheSpec,
    **how: Any,
  ) -> PromptStream:
    """The stream that `save` wrote, in this process or another.

    Args:
      path: the folder.
      model: that which filled the caches.
      method: the same as then.
      spec: as then; the capacity may be another, as long as it holds what was saved.
      **how: `chunk` and `total`, as then.

    Raises:
      As `kvjax.models.decode.caches.restore`.
    """
    made = cls.__new__(cls)
    made._begin(model, method, spec, **how)
    saved = kept.saved_capacity(path)
    made.spec = dataclasses.replace(spec, capacity=saved)
    grows = saved <= spec.capacity and _extends(shapes(method, made.spec), shapes(method, spec))
    if made.spec not in made._sizes and not grows:
      raise ValueError(f"spec.capacity: found {spec.capacity}, expected {saved}, as it was saved")
    logits, caches = kept.restore(path, method, made.spec, mesh=model.mesh)
    made._take(caches, logits)
    return made

  def _read(self, on_chunk: Callable[[int, int], Any] | None, *, ending: bool) -> None:
    before, pieces = None, self._pieces
    end = int((pieces.done + self.waiting).max())
    for piece in pieces.read(ending=ending):
      # The next chunk is dispatched while this one runs, and no more: who interrupts waits for two.
      jax.block_until_ready(piece.logits if on_chunk is not None else before)
      before = piece.logits
      if on_chunk is not None:
        on_chunk(int(pieces.done.max()), end)

  def _grown(self, caches: Caches, tokens: int) -> Caches:
    """The caches, with room for so many tokens in a row."""
    if self.spec.capacity < (need := min(tokens, self._most.capacity)):
      larger = next(x for x in self._sizes if x.capacity >= need)
      caches, self.spec = _enlarged(caches, self._method, larger), larger
    return caches


def _sizes(model: Transformer, method: Method, spec: CacheSpec) -> list[CacheSpec]:
  """Sizes that the caches take on as they grow: what can grow is a store, on one device."""
  if model.mesh is not None or not offload.hosted(shapes(method, spec)):
    return [spec]
  doubled = (FIRST << i for i in range(64) if FIRST << i < spec.capacity)
  smaller = [dataclasses.replace(spec, capacity=n) for n in doubled]
  return [*(x for x in smaller if _extends(shapes(method, x), shapes(method, spec))), spec]


def _spec_of(caches: Caches, method: Method, sizes: list[CacheSpec]) -> CacheSpec:
  """That of the sizes which caches have."""
  found = _every_shape(caches)
  for spec in sizes:
    if found == _every_shape(shapes(method, spec)):
      return spec
  room, expected = checks.capacity(caches, method), sizes[-1].capacity
  raise ValueError(
    f"caches: found room for {'any number of' if room is None else room.max()} tokens, expected "
    f"caches of spec, whose capacity is {expected}, or of a stream with such a spec"
  )


def _every_shape(tree: Any) -> list[tuple[int, ...]]:
  return [x.shape for x in jax.tree.leaves(tree)]


def _own_rows(x: Any) -> bool:
  return isinstance(x, OwnRows)


def _extends(small: Any, large: Any) -> bool:
  """True if caches of one size become those of the other by what is written block by block."""
  pairs = zip(*(jax.tree.leaves(x, is_leaf=_own_rows) for x in (small, large)), strict=True)
  return all(_own_rows(x) or x.shape == y.shape for x, y in pairs)


def _enlarged(caches: Caches, method: Method, spec: CacheSpec) -> Caches:
  """Copies of caches that hold the same, of a larger size; whole segments of a store are shared."""

  def one(x: Any, to: Any) -> Any:
    if offload.is_store(x):
      return offload.enlarged(x, to)
    return jax.tree.map(_padded, x, to) if _own_rows(x) else x

  return jax.tree.map(one, caches, shapes(method, spec), is_leaf=_own_rows)


def _padded(x: Array, to: Any) -> Array:
  return jnp.pad(x, [(0, n - m) for m, n in zip(x.shape, to.shape, strict=True)])
