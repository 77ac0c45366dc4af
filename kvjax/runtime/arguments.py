"""Arguments of prompts and steps: checked on the host where they are known there."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int

from kvjax.core.cache import Cache
from kvjax.families.method import Method


def integer(name: str, value: Any, least: int, below: int | None = None) -> int:
  """An argument that is an integer in a range; floats and booleans are none."""
  try:
    if isinstance(value, bool | np.bool_):
      raise TypeError
    number = operator.index(value)
  except TypeError:
    raise TypeError(f"{name}: found {value!r}, expected an integer") from None
  if number < least or (below is not None and number >= below):
    expected = f"at least {least}" if below is None else f"an integer in [{least}, {below})"
    raise ValueError(f"{name}: found {number}, expected {expected}")
  return number


def array(name: str, x: Any) -> np.ndarray:
  """An argument as an array on the host; ValueError where it is none, as rows of unlike lengths."""
  try:
    found = np.asarray(x)
  except ValueError:
    raise ValueError(f"{name}: found rows of unlike lengths, expected an array") from None
  if found.dtype.kind in "OUS":
    raise ValueError(f"{name}: found {_shown(x)}, expected an array of numbers")
  return found


def _given(name: str, x: Any) -> Any:
  """An argument as an array, on the device or in a program if it is there."""
  return jnp.asarray(x) if isinstance(x, jax.Array) or not known(x) else array(name, x)


def positive(name: str, value: Any) -> float:
  """A finite number above 0; booleans and strings are none."""
  given = np.asarray(value)
  if given.shape or given.dtype.kind not in "iuf" or not 0 < given < np.inf:
    raise ValueError(f"{name}: found {value!r}, expected a finite number of more than 0, or None")
  return float(given)


def _shown(x: Any) -> str:
  """A value in an error; of what holds many, the type."""
  return type(x).__name__ if isinstance(x, np.ndarray | list | tuple) else repr(x)


def known(*given: Any) -> bool:
  """True if all of these have values on the host, and none is of a program that is traced."""
  return not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(given))


def counts(name: str, x: Any, rows: int, most: int | None = None) -> Int[Array, " B"]:
  """A count of each row, int32 [B]; within a program its values are as they come.

  Raises:
    ValueError: another shape or dtype, or a known count outside of [0, most].
  """
  found = _by_row(name, x, rows)
  if not jnp.issubdtype(found.dtype, jnp.integer):
    raise ValueError(f"{name}: found {found.dtype}, expected integers")
  if known(found):
    held, limit = np.asarray(found), np.iinfo(np.int32).max if most is None else most
    if ((held < 0) | (held > limit)).any():
      upto = "0 or more" if most is None else f"values in [0, {most}]"
      raise ValueError(f"{name}: found {held.tolist()}, expected {upto}")
  return jnp.asarray(found, jnp.int32)


def rows_that_take_part(live: Any, rows: int) -> Bool[Array, " B"]:
  """bool [B]; ValueError for any other array. None: all."""
  if live is None:
    return jnp.ones(rows, bool)
  found = _by_row("live", live, rows)
  if found.dtype != bool:
    raise ValueError(f"live: found {found.dtype}, expected bool")
  return jnp.asarray(found)


def _by_row(name: str, x: Any, rows: int) -> Any:
  """An array with one entry per row."""
  found = _given(name, x)
  if found.shape != (rows,):
    raise ValueError(f"{name}: found shape {found.shape}, expected ({rows},), one for each row")
  return found


def floats(name: str, x: ArrayLike, wide: bool = False) -> Array:
  """Floats, of 32 bits or fewer unless `wide`, regardless of `jax_enable_x64`; else TypeError."""
  found = jnp.asarray(_given(name, x))
  if not jnp.issubdtype(found.dtype, jnp.floating):
    raise TypeError(f"{name}: found {found.dtype}, expected floats")
  return found.astype(jnp.float32) if found.dtype.itemsize > 4 and not wide else found


def check_shape(name: str, x: Array, sizes: tuple[int, ...]) -> None:
  """Raises ValueError for an array of other sizes than the cache has."""
  if tuple(x.shape) != sizes:
    raise ValueError(f"{name}: found shape {tuple(x.shape)}, expected {sizes}, as the cache has it")


def span(
  rows: int, tokens: int, starts: Any, lengths: Any
) -> tuple[Int[Array, " B"] | None, Int[Array, " B"]]:
  """The first token of each row, None for 0, and the number of its tokens, int32 [B].

  Within a program, tokens past the `tokens` of a row are not there.

  Raises:
    ValueError: not one count per row, or known ones that reach past `tokens`.
  """
  first = None if starts is None else counts("starts", starts, rows, tokens)
  room = jnp.full(rows, tokens, jnp.int32) if first is None else tokens - first
  valid = room if lengths is None else counts("lengths", lengths, rows, tokens)
  if known(first, valid):
    begin, size = (np.asarray(x) for x in (0 if first is None else first, valid))
    if (begin + size > tokens).any():
      raise ValueError(
        f"starts: found {begin.tolist()} with lengths {size.tolist()}, expected tokens within the "
        f"{tokens} of a row"
      )
    return first, valid
  first = None if first is None else jnp.clip(first, 0, tokens)
  return first, jnp.clip(valid, 0, tokens if first is None else tokens - first)


def check_past(seen: Int[Array, " B"], new: Int[Array, " B"], past: Any) -> None:
  """Raises ValueError where rows that read on have cached more than the bound says."""
  if past is None:
    return
  if isinstance(past, bool) or not isinstance(past, int | np.integer) or past < 0:
    raise ValueError(f"past: found {past!r}, expected an integer of 0 or more, or None")
  if known(seen, new):
    most = int(np.where(np.asarray(new) > 0, np.asarray(seen), 0).max(initial=0))
    if most > past:
      raise ValueError(
        f"past: found {past}, expected at least the {most} tokens already cached, or None"
      )


def check_room(cache: Cache, most: Any, new: Array) -> None:
  """Raises ValueError where rows would hold more than `most` tokens; None: any number is fine."""
  if most is None or not known(cache, new):
    return
  coming, seen = np.asarray(new, np.int32), np.asarray(cache.seen)
  room = np.broadcast_to(most, seen.shape)
  if (full := (coming > 0) & (seen + coming > room)).any():
    row = int(full.argmax())
    raise ValueError(
      f"cache: found {seen[row]} cached tokens and {coming[row]} to come in row {row}, expected at "
      f"most the capacity of {room[row]}"
    )


def whole(method: Method, lengths: Any, total: Any) -> Int[Array, " B"] | None:
  """The lengths of whole prompts, int32 [B], of which these may be parts; None: they are not.

  The single rule for which methods accept a prompt in parts.

  Raises:
    ValueError: not one per row, or less than what is given of a prompt.
    NotImplementedError: a part of a prompt, for a method that has to see it at once; within a
      program any `total` may be that of a part.
  """
  if total is None or total is lengths:
    return None
  if not known(total, lengths):
    traced = counts("total", total, lengths.shape[0])
    _whole_only(method, "total", "traced lengths")
    return jnp.maximum(traced, lengths)
  whole, part = np.asarray(counts("total", total, lengths.shape[0])), np.asarray(lengths)
  if (whole < part).any():
    raise ValueError(
      f"total: found {whole.tolist()}, expected one per row, at least lengths {part.tolist()}"
    )
  if ((whole > part) & (part > 0)).any():
    _whole_only(method, "total", f"{whole.tolist()} for {part.tolist()} tokens")
  return jnp.asarray(whole)


def chunk(method: Method, size: int | None) -> None:
  """Raises NotImplementedError for a method whose prompts cannot be read in chunks of `size`."""
  if size is not None:
    _whole_only(method, "chunk", str(size))


def _whole_only(method: Method, name: str, found: str) -> None:
  """Raises for a method whose prompts cannot be read in parts."""
  if method.traits.stream is not None:
    raise NotImplementedError(
      f"{name}: found {found}, expected None for {method!r}, which reads a prompt in its own pieces"
    )
  if not method.traits.chunkable:
    raise NotImplementedError(
      f"{name}: found {found}, expected None for {method!r}, which has to see a whole "
      "prompt before it chooses tokens"
    )
