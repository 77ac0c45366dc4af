"""What `prefill` and `generate` refuse before anything runs, and what they say of failures."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .. import memory
from ..method import Method
from .transformer import Caches, Transformer


def settings(
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


def of_rows(name: str, x: ArrayLike, batch: int) -> np.ndarray:
  """An argument with one entry per row."""
  x = np.asarray(x)
  if x.shape != (batch,):
    raise ValueError(f"{name}: found shape {x.shape}, expected ({batch},)")
  return x


def row_numbers(rows: ArrayLike, batch: int) -> np.ndarray:
  """The rows' numbers, int32 [B]."""
  rows = of_rows("rows", rows, batch)
  if not np.issubdtype(rows.dtype, np.integer) or rows.min() < 0 or rows.max() >= 2**31:
    raise ValueError(f"rows: found {rows.tolist()}, expected integers in [0, 2**31)")
  return rows.astype(np.int32)


def forced(tokens: np.ndarray, batch: int, steps: int, vocab: int) -> np.ndarray:
  """Tokens to insert, int32 [B, steps]."""
  if tokens.shape != (batch, steps):
    raise ValueError(f"forced: found shape {tokens.shape}, expected {(batch, steps)}")
  if tokens.min() < -1 or tokens.max() >= vocab:
    raise ValueError(
      f"forced: found ids in [{tokens.min()}, {tokens.max()}], expected [0, {vocab}) or -1"
    )
  return tokens.astype(np.int32)


def prompt_chunk(method: Method, chunk: int, past: int | None, with_aux: bool) -> None:
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


def prompt(
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
  return room(caches, method, lengths, f"a prompt of {lengths.max()} tokens")


def room(caches: Caches, method: Method, new: np.ndarray, what: str) -> np.ndarray:
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


def explained(
  what: str, model: Transformer, caches: Caches, method: Method
) -> Callable[[], contextlib.AbstractContextManager[None]]:
  """Makes contexts that say what would fit where a device has no memory left."""
  spec = model.spec(caches[0].seen.shape[0], max(cache.size for cache in caches))
  how = what, method, spec, model.mesh, model.weight_bytes
  return functools.partial(memory.explained, *how)


def throw(error: Any) -> None:
  """Raises what a jitted function found, if it looked."""
  if error is not None:
    error.throw()
