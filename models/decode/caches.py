"""Live caches: remaining room, saving and restoring, forking rows, the next turn of a chat."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int
from numpy.typing import ArrayLike

from kvjax.core.cache import CacheSpec
from kvjax.families import sliding
from kvjax.families.method import Method
from kvjax.methods.registry import check_method
from kvjax.models.decode import checks
from kvjax.models.io import files, items, orbax
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn.transformer import Caches
from kvjax.ops import offload
from kvjax.runtime import arguments, sharding
from kvjax.runtime.forked import Forked, branched

FORMAT = "kvjax-caches"
VERSION = 3  # of the folder's layout: one that is read otherwise gets the next number
TILE = 64  # slots that a shared context's are a multiple of: few sizes, few compilations


def room(caches: Caches, method: Method) -> Int[np.ndarray, " B"] | None:
  """Number of tokens that each row can still take; None: any number, because tokens are evicted.

  For your own decode loop: a step beyond it stores no token in the cache of a method that keeps
  every token, and its output is wrong. The call waits for the caches: use it before a loop.

  Raises:
    TypeError, ValueError: `method` is no method, or the caches are another's, or gone.
  """
  checks.laid_out(caches, method, None)
  capacity = checks.capacity(caches, method)
  return None if capacity is None else capacity - np.asarray(caches[0].seen)


def save(
  path: str | os.PathLike[str],
  logits: Float[Array, "B V"],
  caches: Caches,
  method: Method,
  spec: CacheSpec,
) -> pathlib.Path:
  """Writes caches, and the logits to continue from, into a folder of Orbax's.

  A new version replaces the old one once it is complete: a writer that is killed leaves the old
  one. Writers of one folder take turns. With several processes, all call it with a shared folder,
  and each writes the parts on its devices.

  Args:
    path: the folder; an earlier version is replaced.
    logits: float32 [B, V] of `prefill`, or `Generation.last`.
    caches: of `method.init_caches(spec)`, live.
    method: the KV-cache method.
    spec: sizes of the caches, as `Transformer.spec` gives them.

  Raises:
    TypeError: `method` is no method, or `spec` no sizes.
    ValueError: the caches are not those of `method` for `spec`, or were donated before.
    OSError: the folder cannot be written.
  """
  return _saving(path, logits, caches, method, spec, lent=True).wait()


def save_async(
  path: str | os.PathLike[str],
  logits: Float[Array, "B V"],
  caches: Caches,
  method: Method,
  spec: CacheSpec,
) -> orbax.Saving:
  """As `save`, in the background: the arrays are copied when it returns.

  The caches may then be donated. `wait()` of the result blocks until the folder is complete, and
  raises the error if writing failed; the end of the program also waits for it.

  Raises:
    TypeError, ValueError, OSError: of `save`.
  """
  return _saving(path, logits, caches, method, spec, lent=False)


def _saving(
  path: str | os.PathLike[str],
  logits: Any,
  caches: Caches,
  method: Method,
  spec: CacheSpec,
  *,
  lent: bool,
) -> orbax.Saving:
  """Begins to write what was checked; `lent`: nobody changes the caches meanwhile."""
  check_whose(method, spec)
  logits = logits if isinstance(logits, jax.Array) else arguments.array("logits", logits)
  named = _named((logits, caches))
  if np.ndim(logits) != 2:
    raise ValueError(f"logits: found shape {np.shape(logits)}, expected [B, V], as prefill returns")
  layouts = [cache.layout.name for cache in caches]
  _check_layout("caches", named, layouts, method, spec, np.shape(logits)[-1])
  checks.laid_out(caches, method, spec)
  header = {**_identity(method, spec), "layouts": layouts}
  return orbax.Saving(pathlib.Path(files.path_of("path", path)), header, named, lent=lent)


def restore(
  path: str | os.PathLike[str], method: Method, spec: CacheSpec, *, mesh: Mesh | None = None
) -> tuple[Float[Array, "B V"], Caches]:
  """Reads what `save` wrote: logits and caches, as `prefill` returns them.

  The folder records the method and the sizes, not the weights: use the model that filled the
  caches. They may have been saved from other devices.

  Args:
    path: the folder.
    method: the KV-cache method.
    spec: sizes of the caches.
    mesh: the model's; every device reads its part.

  Raises:
    TypeError: `method` is no method, or `spec` no sizes.
    FileNotFoundError: there is no such folder, or nothing was saved there.
    ValueError: the folder is damaged, of a version that this kvjax does not read, or of another
      method or other sizes; or such caches cannot be split over the mesh.
    NotImplementedError: the method does not run on such a mesh.
  """
  check_whose(method, spec)
  path = pathlib.Path(files.path_of("path", path))
  saved, header = _header(path)
  with files.whole(path, orbax.EXPECTED):
    described = header["method"], dict(header["spec"])
    layouts, sums = list(header["layouts"]), dict(header["sums"])
  _check_identity(path, *described, method, spec)
  found = orbax.described(saved / orbax.ARRAYS)
  if "logits" not in found or found["logits"].ndim != 2:
    raise ValueError(f"{path}: found no logits, expected an array [B, V] beside the caches")
  tree = _check_layout(str(path), found, layouts, method, spec, found["logits"].shape[1])
  wanted = _named(_placed(tree, method, spec, mesh))
  read = orbax.load(saved / orbax.ARRAYS, wanted)
  if (other := orbax.sums(read)) != sums:
    names = [name for name in other if other[name] != sums.get(name)]
    raise ValueError(f"{path}: found other numbers than were saved in {', '.join(names)}")
  return jax.tree.unflatten(jax.tree.structure(tree), [read[name] for name in wanted])


def saved_capacity(path: str | os.PathLike[str]) -> int:
  """Capacity of the caches in a folder that `save` wrote.

  Raises:
    FileNotFoundError, ValueError: of `restore`.
  """
  path = pathlib.Path(files.path_of("path", path))
  _, header = _header(path)
  with files.whole(path, orbax.EXPECTED):
    return int(header["spec"]["capacity"])


def _header(path: pathlib.Path) -> tuple[pathlib.Path, dict[str, Any]]:
  """The newest save in a folder that this code reads, and what is said of its arrays."""
  if path.is_file():
    raise ValueError(
      f"{path}: found a file, expected a folder of {FORMAT!r} version {VERSION} (an older kvjax, "
      "which reads it, wrote a file)"
    )
  saved = orbax.latest(path)
  header = files.read_json(saved / orbax.HEADER, "a header of saved caches")
  kind, version = header.get("format"), header.get("version")
  if (kind, version) == (FORMAT, VERSION):
    return saved, header
  age = ""
  if kind == FORMAT and isinstance(version, int):
    newer = "a newer kvjax, which reads it" if version > VERSION else "an older kvjax"
    age = f" (it was written by {newer})"
  raise ValueError(
    f"{path}: found format {kind!r} version {version!r}, expected {FORMAT!r} version {VERSION}{age}"
  )


def _placed(
  tree: tuple[Any, Caches], method: Method, spec: CacheSpec, mesh: Mesh | None
) -> tuple[Any, Caches]:
  """Logits and caches as shapes, with where they belong: on a mesh, in the host's memory."""
  logits, caches = tree
  if mesh is not None:
    where = sharding.placement(method, spec, mesh, caches)
    everywhere = NamedSharding(mesh, PartitionSpec())
    return logits.update(sharding=everywhere), jax.tree.map(
      lambda x, to: x.update(sharding=to), caches, where
    )
  stores = {id(x) for x in offload.hosted(caches)} if offload.on_host() else set()
  return logits, jax.tree.map(
    lambda x: x.update(sharding=offload.host()) if id(x) in stores else x, caches
  )


def fork(
  logits: Float[Array, "B V"], caches: Caches, times: int, *, row: int | None = None
) -> tuple[Float[Array, "rows V"], Caches]:
  """Repeats every row `times` times, to sample several continuations of each.

  Args:
    logits: float32 [B, V].
    caches: left as they are; the result holds copies.
    times: n.
    row: repeat this row only.

  Returns:
    logits and caches of B·n rows (0, 0, …, 1, 1, …), or of n.

  Raises:
    TypeError: `times` or `row` is no integer, or `caches` are none.
    ValueError: `times` or `row` is out of range, or the caches were donated before, have other
      rows than the logits, or are branches of a shared context.
  """
  batch, times = _check_fork(logits, caches, times)
  row = None if row is None else checks.whole("row", row, 0, batch)
  rows = np.repeat(np.arange(batch) if row is None else np.array([row]), times)
  return jnp.asarray(logits)[rows], offload.rows_of(caches, rows)


def fork_shared(
  logits: Float[Array, "B V"], caches: Caches, method: Method, times: int, *, room: int
) -> tuple[Float[Array, "rows V"], Caches, Forked]:
  """As `fork`, but the context is stored once, and read once per step for all branches.

  Of S cached tokens and n branches it takes the bytes of S + n·room, where copies take n·(S +
  room). Layers with a window of the model's own, which hold no more than that, are copied.

  Args:
    logits: float32 [B, V].
    caches: of `method`, left as they are; the result holds one copy of what they hold: let go of
      them if they are not needed.
    method: attends to all that it holds, and evicts nothing while a branch is read: `Full` and
      `KVzip`; methods that cut a prompt by a score, where there is room after it.
    times: n.
    room: tokens that each branch will read and generate, at most.

  Returns:
    logits and caches of B·n rows (0, 0, …, 1, 1, …), and the method to go on with, which lays out
    the same for a spec of B·n rows.

  Raises:
    TypeError: `method` is no method, `times` or `room` no integer, or `caches` are none.
    ValueError: `times` or `room` is out of range; the caches are another method's, were donated
      before, have other rows than the logits, or would evict tokens within `room`; the method does
      not attend to all that it holds.
  """
  checks.laid_out(caches, method, None)
  _, times = _check_fork(logits, caches, times)
  room = checks.whole("room", room, 1)
  windows = sliding.windows_of(caches)
  own = sliding.served(caches)
  used = np.max([np.asarray(cache.used) for cache in own], axis=0, initial=1)
  context = -(-int(used.max()) // TILE) * TILE
  forked = Forked(method, times, context, room)
  _check_evicts_nothing(method, own, room)

  def of_layer(cache: Any, window: int | None) -> Any:
    if window is None:
      return branched(forked, cache)
    rows = jax.tree.map(lambda x: jnp.repeat(x, times, 0), cache)
    return dataclasses.replace(rows, origin=dataclasses.replace(cache.origin, method=forked))

  made = tuple(of_layer(*layer) for layer in zip(caches, windows, strict=True))
  return jnp.repeat(logits, times, 0), made, forked


def _check_fork(logits: Array, caches: Caches, times: int) -> tuple[int, int]:
  """The number of rows, and of repeats of each; raises where that cannot be."""
  checks.listed(caches)
  checks.there((logits, caches))
  shape, batch = np.shape(logits), caches[0].seen.shape[0]
  if len(shape) != 2 or shape[0] != batch:
    raise ValueError(
      f"logits: found shape {shape}, expected [{batch}, V], a row for each of caches"
    )
  times = checks.whole("times", times, 1)
  if any(len(x) != batch for x in jax.tree.leaves(caches)):
    raise ValueError(
      "caches: found branches that share a context (fork_shared), expected caches with all of a "
      "row in the row: fork those that they come from"
    )
  return batch, times


def _check_evicts_nothing(method: Method, caches: Caches, room: int) -> None:
  """Raises where a row would give up tokens before it has read `room` more."""
  if method.traits.positional or not caches:
    return
  left = np.min([cache.size - np.asarray(cache.used) for cache in caches], axis=0)
  if left.min() < room:
    row = int(left.argmin())
    raise ValueError(
      f"room: found {room}, expected at most {left[row]}: {method!r} has so many free slots after "
      f"the {int(caches[0].seen[row])} tokens of row {row}, and then evicts some, which branches "
      "that share them cannot do each for itself"
    )


def next_turn(
  tokenizer: Tokenizer, message: str, answer: ArrayLike = (), **arguments: Any
) -> list[int]:
  """Token ids that take a live conversation from the end of an answer to the next answer's begin.

  They are what the chat template puts after an assistant's message: its end, the user's next
  message, and the opening of the next answer. Read them with `prefill` on the live caches. Behind
  the prompt and the answer they make the tokens of the whole conversation, as far as the model
  said what the template would have: its tokens stay as they are cached.

  Args:
    tokenizer: with a chat template.
    message: what the user says next.
    answer: int32 [n], the tokens of the last answer, as they were cached: where they already end
      with the token that closes a message, it is not repeated. Tokens < 0, as they end a row of
      `Generation.tokens`, are ignored.
    arguments: of `Tokenizer.render`: what the conversation began with (tools, enable_thinking, …).

  Raises:
    TypeError: `message` is no string, or `answer` no list of integers.
    ValueError: the template does not render an assistant's message as it is.
  """
  if not isinstance(message, str):
    raise TypeError(f"message: found {message!r}, expected a string")
  mark = "\N{REPLACEMENT CHARACTER}answer\N{REPLACEMENT CHARACTER}"
  asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": mark}]

  def behind(messages: list[dict[str, str]], **more: Any) -> str:
    _, found, rest = tokenizer.render(messages, **arguments, **more).partition(mark)
    if not found:
      raise ValueError("chat_template: found no trace of an assistant's message, expected its text")
    return rest

  rest = behind([*asked, {"role": "user", "content": message}])
  said = [token for token in checks.token_ids("answer", answer).tolist() if token >= 0]
  if not said or not (said[-1] in tokenizer.ends or tokenizer.is_special(said[-1])):
    return tokenizer.encode(rest, after=tokenizer.decode(said, skip_special=False) or mark)
  end = tokenizer.decode(said[-1:], skip_special=False)
  close, text = end, rest.lstrip()
  if not text.startswith(end) and behind(asked, add_generation_prompt=False).startswith(end):
    # The last answer is closed in another way than those before it (gpt-oss).
    first = tokenizer.encode(text, bos=False)[:1]
    if first and tokenizer.is_special(first[0]):
      close = tokenizer.decode(first, skip_special=False)
  return tokenizer.encode(text.removeprefix(close) if text.startswith(close) else rest, after=end)


def check_whose(method: Any, spec: Any) -> None:
  """Raises TypeError for what is no method, or are no sizes of caches."""
  check_method("method", method)
  if not isinstance(spec, CacheSpec):
    raise TypeError(f"spec: found {spec!r}, expected a kvjax.CacheSpec, as Transformer.spec gives")


def _named(tree: tuple[Any, Any]) -> dict[str, Any]:
  """Leaves of (logits, caches) by a name that says where they belong."""
  logits, caches = tree
  return {"logits": logits, **{f"layer{name}": x for name, x in items.named(caches).items()}}


def _identity(method: Method, spec: CacheSpec) -> dict[str, Any]:
  """The same for numbers of Python and of NumPy, which are equal in methods and sizes."""
  sizes = {**dataclasses.asdict(spec), "dtype": jnp.dtype(spec.dtype).name}
  windows = list(sizes.pop("windows"))
  sizes |= {"windows": windows} if windows else {}
  sizes = jax.tree.map(lambda x: x.item() if isinstance(x, np.generic) else x, sizes)
  return {"format": FORMAT, "version": VERSION, "method": _plain(repr(method)), "spec": sizes}


def _plain(text: str) -> str:
  return re.sub(r"np\.\w+\(([^()]*)\)", r"\1", text)


def _check_identity(
  path: pathlib.Path, name: Any, sizes: dict[str, Any], method: Method, spec: CacheSpec
) -> None:
  """Raises unless a header's method and sizes are these."""
  if _plain(str(name)) != _plain(repr(method)):
    raise ValueError(f"{path}: found caches of {name}, expected {method!r}")
  wanted = _identity(method, spec)["spec"]
  for size in {**wanted, **sizes}:  # either may have some that the other lacks
    found, expected = sizes.get(size), wanted.get(size)
    if found != expected:
      raise ValueError(f"{path}: spec.{size}: found {found!r}, expected {expected!r}")


def _check_layout(
  what: str,
  arrays: dict[str, Any],
  layouts: list[str],
  method: Method,
  spec: CacheSpec,
  vocab: int,
) -> tuple[Any, Caches]:
  """Raises unless layouts, and the arrays' names, shapes and dtypes, are the method's for the spec.

  Returns:
    Logits and caches, as shapes.
  """
  logits = jax.ShapeDtypeStruct((spec.batch, vocab), jnp.float32)
  tree = logits, jax.eval_shape(lambda: method.init_caches(spec))
  found, expected = (
    {name: (str(x.dtype), tuple(x.shape)) for name, x in each.items()}
    for each in (arrays, _named(tree))
  )
  for name in {**expected, **found}:
    if found.get(name) != expected.get(name):
      raise ValueError(
        f"{what}: {name}: found {found.get(name, 'nothing')}, "
        f"expected {expected.get(name, 'nothing')} as {method!r} lays it out"
      )
  if layouts != (wanted := [cache.layout.name for cache in tree[1]]):
    raise ValueError(f"{what}: layouts: found {layouts}, expected {wanted} of {method!r}")
  return tree
