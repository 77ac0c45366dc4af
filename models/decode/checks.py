"""Checks of `prefill` and `generate` before anything runs, and their messages of failures."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from numpy.typing import ArrayLike

from kvjax.core.cache import CacheSpec, Origin
from kvjax.families import entrance, sliding
from kvjax.families.method import Method
from kvjax.methods.registry import check_method
from kvjax.models.io.token_backends import check_unicode
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn import flat
from kvjax.models.nn.config import ModelConfig
from kvjax.models.nn.transformer import Caches, Transformer
from kvjax.runtime import arguments, memory

whole = arguments.integer


def token_ids(name: str, ids: Any) -> np.ndarray:
  """Ids of one row, int32 [T]; [] are none."""
  try:
    found = np.asarray(ids)
  except ValueError:  # lists of unlike lengths
    found = np.asarray(ids, object)
  if found.ndim != 1 or (found.size and _no_integers(found)):
    raise TypeError(f"{name}: found {found.dtype} {found.shape}, expected a list of integers")
  most = np.iinfo(np.int32)
  if found.size and not most.min <= found.min() <= found.max() <= most.max:
    raise ValueError(f"{name}: found an id of {found.max()}, expected at most {most.max}")
  return found.astype(np.int32)


def stops(stop: Iterable[int], vocab: int) -> tuple[int, ...]:
  """Ids of stop tokens."""
  if isinstance(stop, str) or not np.iterable(stop):
    raise TypeError(f"stop: found {stop!r}, expected a list of token ids")
  return tuple(whole("stop", token, 0, vocab) for token in stop)


def stop_strings(strings: Iterable[str], name: str = "stop_strings") -> tuple[str, ...]:
  """Stop strings, of an argument of this name."""
  listed = isinstance(strings, Iterable) and not isinstance(strings, str | bytes)
  found = tuple(strings) if listed else ()
  if not listed or not all(isinstance(text, str) and text for text in found):
    wrong = list(found) if listed else strings
    raise ValueError(f"{name}: found {wrong!r}, expected a list of non-empty strings")
  for text in found:
    check_unicode(text, name)
  return found


def kind(name: str, x: Any, wanted: type) -> None:
  """Raises TypeError for an argument of another class."""
  if not isinstance(x, wanted):
    raise TypeError(f"{name}: found {x!r}, expected a {wanted.__name__}")


def tokenizer(given: Any, needed: bool) -> None:
  """Raises where there is none and texts are looked at, or something else."""
  if given is not None:
    kind("tokenizer", given, Tokenizer)
  elif needed:
    raise ValueError("tokenizer: found None, expected one, to find stop_strings or call on_text")


def callbacks(**given: Any) -> None:
  """Raises TypeError for what cannot be called."""
  for name, x in given.items():
    if x is not None and not callable(x):
      raise TypeError(f"{name}: found {x!r}, expected a function, or None")


def of_rows(name: str, x: ArrayLike, batch: int) -> np.ndarray:
  """An argument with one entry per row."""
  x = arguments.array(name, x)
  if x.shape != (batch,):
    raise ValueError(f"{name}: found shape {x.shape}, expected ({batch},)")
  return x


def live(rows: ArrayLike | None, batch: int) -> np.ndarray:
  """Rows that take part, bool [B]."""
  found = of_rows("live", np.ones(batch, bool) if rows is None else rows, batch)
  if found.dtype != bool and (_no_integers(found) or not np.isin(found, (0, 1)).all()):
    raise ValueError(f"live: found {found.tolist()}, expected booleans")
  return found.astype(bool)


def row_numbers(rows: ArrayLike, batch: int) -> np.ndarray:
  """The rows' numbers, int32 [B]."""
  rows = of_rows("rows", rows, batch)
  if _no_integers(rows) or rows.min() < 0 or rows.max() >= 2**31:
    raise ValueError(f"rows: found {rows.tolist()}, expected integers in [0, 2**31)")
  return rows.astype(np.int32)


def forced(tokens: np.ndarray, batch: int, steps: int, vocab: int) -> np.ndarray:
  """Tokens to insert, int32 [B, steps]."""
  if tokens.shape != (batch, steps):
    raise ValueError(f"forced: found shape {tokens.shape}, expected {(batch, steps)}")
  if _no_integers(tokens):
    raise TypeError(f"forced: found {tokens.dtype}, expected integers")
  if tokens.min() < -1 or tokens.max() >= vocab:
    raise ValueError(
      f"forced: found ids in [{tokens.min()}, {tokens.max()}], expected [0, {vocab}) or -1"
    )
  return tokens.astype(np.int32)


def _no_integers(x: np.ndarray) -> bool:
  return not np.issubdtype(x.dtype, np.integer)


def prompt_chunk(method: Method, chunk: int, past: int | None, with_aux: bool) -> None:
  """Raises where a prompt cannot be read in chunks."""
  if past is not None or with_aux:
    name, value = ("past", past) if past is not None else ("with_aux", with_aux)
    raise ValueError(f"{name}: found {value} and chunk = {chunk}, expected only one of the two")
  arguments.chunk(method, chunk)


def laid_out(caches: Any, method: Any, spec: CacheSpec | None) -> None:
  """Raises for caches that are no longer there, or that another method or model laid out.

  Args:
    caches: what was given as caches.
    method: what was given as method; TypeError if it is none.
    spec: sizes of the model's caches, whatever their rows and capacity; None: any.
  """
  check_method("method", method)
  listed(caches)
  there(caches)
  origins = {id(x): x for x in (getattr(cache, "origin", None) for cache in caches)}
  for origin in filter(None, origins.values()):
    other = dataclasses.replace(origin, method=method)
    expected = other if spec is None else Origin.of(method, spec)
    if origin != expected:
      raise ValueError(f"caches: {_other(origin, expected)}")
  if spec is not None and len(caches) != spec.depth:
    raise ValueError(f"caches: found {len(caches)}, expected one per layer, {spec.depth}")


def listed(caches: Any) -> None:
  """Raises TypeError for what are no caches of a model."""
  some = isinstance(caches, tuple | list) and len(caches) > 0
  if not some or not all(hasattr(x, "seen") for x in caches):
    found = type(caches).__name__
    raise TypeError(f"caches: found {found}, expected the tuple that method.init_caches gives")


def logits(x: Any, caches: Caches, vocab: int) -> Float[Array, "B V"]:
  """One row of logits for each row of the caches; TypeError or ValueError for anything else."""
  x, expected = arguments.floats("logits", x), (caches[0].seen.shape[0], vocab)
  if x.shape != expected:
    raise ValueError(f"logits: found shape {x.shape}, expected {expected}, as prefill returns")
  return x


@flat.own
@jax.jit
def sound(logits: Float[Array, "*rows V"]) -> Bool[Array, "*rows"]:
  """True where something can be chosen: no NaN, no +∞, and not −∞ alone."""
  return (logits < jnp.inf).all(-1) & (logits > -jnp.inf).any(-1)


def unsound(
  what: str, row: int, place: str, model: Transformer, caches: Caches
) -> FloatingPointError:
  """The error of a row whose logits are not finite."""
  kinds = {x.dtype for x in jax.tree.leaves(caches) if jnp.issubdtype(x.dtype, jnp.floating)}
  advice = "env.check_nan names the layer"
  if np.float16 in (*kinds, model.dtype):
    most = f"{float(np.finfo(np.float16).max):,.0f}"
    advice = f"float16 ends at {most}: load the model as bfloat16 or float32, or {advice}"
  return FloatingPointError(
    f"{what}: found NaN or infinite logits in row {row}, {place}, of a model in "
    f"{model.dtype.name}, expected finite ones ({advice})"
  )


def there(caches: Any) -> None:
  """Raises for caches that were donated to an earlier call."""
  if any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(caches)):
    raise ValueError(
      "caches: found arrays that an earlier call was given (it donates them: they are gone), "
      "expected the caches that it returned"
    )


def _other(found: Origin, expected: Origin) -> str:
  """In words, in what two descriptions of caches differ."""
  if found.method != expected.method:
    a, b = _differing(found.method, expected.method)
    return f"found those of {a}, expected {b}"
  sizes = [f.name for f in dataclasses.fields(Origin) if f.name != "method"]
  wrong = [name for name in sizes if getattr(found, name) != getattr(expected, name)]
  a, b = (", ".join(f"{n} = {getattr(x, n)}" for n in wrong) for x in (found, expected))
  return f"found those of a model with {a}, expected {b}"


def _differing(a: Any, b: Any) -> tuple[str, str]:
  """Two methods, of one class by the fields in which they differ."""
  if type(a) is not type(b):
    return repr(a), repr(b)
  names = [f.name for f in dataclasses.fields(a) if getattr(a, f.name) != getattr(b, f.name)]
  pairs = [(getattr(a, name), getattr(b, name)) for name in names]
  shown = [_differing(*pair) if isinstance(pair[0], Method) else map(repr, pair) for pair in pairs]
  each = [
    ", ".join(f"{name}={x}" for name, x in zip(names, side, strict=True))
    for side in zip(*shown, strict=True)
  ]
  return f"{type(a).__name__}({each[0]})", f"{type(b).__name__}({each[1]})"


def prompt(
  model: Transformer, tokens: np.ndarray, lengths: np.ndarray, caches: Caches, method: Method
) -> np.ndarray:
  """Raises for a prompt that cannot be read; returns the tokens already seen per row."""
  laid_out(caches, method, model.spec(1, 1))
  of_prompts(model, tokens, lengths, caches[0].seen.shape[0])
  return room(caches, method, lengths, f"a prompt of {lengths.max()} tokens")


def of_prompts(model: Transformer, tokens: np.ndarray, lengths: np.ndarray, rows: int) -> None:
  """Raises for tokens and lengths that are not those of so many rows, one token or more."""
  for name, x, rank in (("tokens", tokens, 2), ("lengths", lengths, 1)):
    if x.ndim != rank or not np.issubdtype(x.dtype, np.integer):
      raise ValueError(
        f"{name}: found {x.dtype} {x.shape}, expected an integer array of {rank} dimension(s)"
      )
  batch, size = tokens.shape
  if lengths.shape != (batch,):
    raise ValueError(f"lengths: found shape {lengths.shape}, expected ({batch},) as tokens has")
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


def capacity(
  caches: Caches, method: Method, rows: tuple[int] | None = None
) -> Int[np.ndarray, " B"] | None:
  """Number of tokens that each row can take in all; None: any number, something leaves.

  Args:
    caches: with `rows`, shapes will do.
    method: the KV-cache method.
    rows: (B,); None: those of the caches.
  """
  rows = caches[0].seen.shape if rows is None else rows
  rooms = [
    entrance.room(method if window is None else sliding.Sliding(window), cache)
    for cache, window in zip(caches, sliding.windows_of(caches), strict=True)
  ]
  known = [np.broadcast_to(n, rows) for n in rooms if n is not None]
  return functools.reduce(np.minimum, known) if known else None


def room(
  caches: Caches, method: Method, new: np.ndarray, what: str, seen: np.ndarray | None = None
) -> np.ndarray:
  """Raises if a row would outgrow what the method has room for; returns tokens seen per row.

  With `seen` caches may be shapes.
  """
  seen = np.asarray(caches[0].seen) if seen is None else seen
  need = np.where(new > 0, seen + new, 0)
  most = capacity(caches, method, seen.shape)
  if most is not None and (need > most).any():
    row = int((need - most).argmax())
    raise ValueError(
      f"{what} after {seen[row]} cached tokens (row {row}) needs {need[row]} slots, "
      f"found a capacity of {most[row]}, expected at least {need[row]}"
    )
  return seen


def context(
  config: ModelConfig, method: Method, seen: np.ndarray, new: np.ndarray, what: str
) -> None:
  """Says where a row outgrows the context of the model: an error past a conversion's limit, else a
  warning, unless the method keeps distances within what it holds.

  Args:
    config: of the model.
    method: the KV-cache method.
    seen, new: tokens that each row has read, and will.
    what: the call.
  """
  need, most = np.where(new > 0, seen + new, 0), config.max_context
  if need.max(initial=0) <= most:
    return
  if config.limited:
    row = int(need.argmax())
    raise ValueError(
      f"{what}: found {need[row]} tokens (row {row}), expected at most max_context = {most}, which "
      "the model was converted for: convert it again, for more or without a limit"
    )
  if not method.traits.endless:
    # One text for all lengths: it is shown once.
    warnings.warn(
      f"{what}: found a row of more tokens than max_context = {most}, expected no more than the "
      "model was trained for: from there on its answers may be wrong",
      stacklevel=3,
    )


def explained(
  what: str, model: Transformer, caches: Caches, method: Method
) -> Callable[[], contextlib.AbstractContextManager[None]]:
  """Makes contexts that say what would fit where a device has no memory left."""
  spec = model.spec(caches[0].seen.shape[0], max(cache.size for cache in caches))
  how = what, method, spec, model.mesh, model.weight_bytes
  return functools.partial(memory.explained, *how)
