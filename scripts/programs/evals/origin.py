"""Origins of a result, as fingerprints: weights, tokenizer, row, and the code of own methods.

Names do not tell: another model may lie in a folder of the same name, a data file may have other
lines, and an own method may have been edited. A folder of results keeps these beside its rows.
"""

import ast
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import itertools
import json
import os
import pathlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

import kvjax
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn.transformer import Transformer
from kvjax.programs.evals import written
from kvjax.programs.evals.plan import Cell, Entry

UNKNOWN = "unknown"  # code that has no file; equal to nothing
FACTS = {
  "settings": "fields of the method",
  "code": "source files of the method",
  "prompt": "the prompt's tokens",
  "data": "the row: its texts, references and stop strings",
}


def _digest(*parts: str | bytes) -> str:
  """A name for some texts in their order."""
  whole = hashlib.sha256()
  for part in parts:
    data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
    whole.update(len(data).to_bytes(8, "little"))
    whole.update(data)
  return whole.hexdigest()[:16]


# ---- the model


def weights(model: Transformer) -> str:
  """Tells weights apart: every array's place, dtype, shape and bytes."""
  named = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model)))
  threads = min(4, os.cpu_count() or 1) if jax.process_count() == 1 else 1  # all in one order
  with concurrent.futures.ThreadPoolExecutor(threads) as pool:
    digests = pool.map(_array, (x for _, x in named))
    parts = zip((jax.tree_util.keystr(path) for path, _ in named), digests, strict=True)
    return _digest(*sorted(" ".join(part) for part in parts))


def _array(x: jax.Array) -> str:
  # A copy's bytes: those of x itself would stay in the host's memory as long as x.
  on_host = all(device.platform == "cpu" for device in x.devices())
  if not x.is_fully_addressable:
    x = multihost_utils.process_allgather(x, tiled=True)
  host = np.ascontiguousarray(x if on_host or isinstance(x, np.ndarray) else jnp.copy(x))
  return f"{host.dtype} {host.shape} {hashlib.sha256(host.reshape(-1).view(np.uint8)).hexdigest()}"


def tokenizer(given: Tokenizer) -> str:
  """Tells tokenizers apart: the backend, the chat template, and what else they are told."""
  told = {name: x for name, x in vars(given).items() if name != "backend" and name[0] != "_"}
  return _digest(given.backend.to_str(), *(f"{name} {_plain(told[name])}" for name in sorted(told)))


def _plain(value: Any) -> str:
  return repr(sorted(value, key=repr) if isinstance(value, set | frozenset) else value)


# ---- a row


def facts(cell: Cell, index: int, entry: Entry) -> dict[str, str]:
  """Facts that a result depends on beside the settings of its folder, as its row keeps them."""
  code = own_code(entry.method)
  return {
    "settings": repr(entry.method),
    **({} if code is None else {"code": code}),
    "prompt": prompt(cell, index),
    "data": data(cell, index),
  }


def prompt(cell: Cell, index: int) -> str:
  """Tells the tokens of a row's turns apart."""
  ids = cell.prompts[index].ids + cell.prompts[index].second
  return hashlib.sha256(np.asarray(ids, np.int32).tobytes()).hexdigest()[:16]


def data(cell: Cell, index: int) -> str:
  """Tells rows apart: what is asked, what is right, and where an answer ends."""
  made = written.plain(cell.rows[index]), cell.prompts[index].other, cell.task.stop
  forced = cell.forced[index] if cell.forced else ()
  return _digest(json.dumps([*made, forced], sort_keys=True, default=repr))


def check(
  rows: dict[tuple[Any, ...], dict[str, Any]], cell: Cell, entries: Iterable[Entry]
) -> None:
  """Raises ValueError where a row that is there comes from something else than it would now."""
  codes = [(entry, repr(entry.method), own_code(entry.method)) for entry in entries]
  for index in range(len(cell.rows)):
    shared: dict[str, Any] = {}
    for entry, settings, code in codes:
      there = rows.get((cell.task.name, cell.length, cell.mode, entry.label, entry.budget, index))
      if there is None:
        continue
      shared = shared or {"prompt": prompt(cell, index), "data": data(cell, index)}
      compare(there, {"settings": settings, "code": code, **shared})


def compare(there: dict[str, Any], now: dict[str, Any]) -> None:
  """Raises ValueError where a row's facts are not those of now."""
  for name, meaning in FACTS.items():
    before, after = there.get(name), now.get(name)
    if name in now and (before != after or after == UNKNOWN):
      of = "{task} at {length} tokens, {mode}, {method}, row {index}".format_map(there)
      raise ValueError(
        f"{of}: found results with {name} = {before!r} ({meaning}), and now it is {after!r}: "
        "expected the same, or another --out"
      )


# ---- code of own methods


def own_code(method: kvjax.Method) -> str | None:
  """Tells apart the source files of a method's classes that are not kvjax's; None: all are.

  A file counts if a class is in it, or if such a file imports it and it belongs to the same package
  or lies in the same folder. What a file reads when it is run does not count.
  """
  modules = {cls.__module__ for cls in _classes(method) if not _is_ours(cls.__module__)}
  if not modules:
    return None
  if not all(_file(name) for name in modules):
    return UNKNOWN
  return _digest(*(_bytes_of(name) for name in sorted(_reached(modules))))


def _classes(value: Any) -> Iterator[type]:
  """Classes of a method, of those that it is over, and all their bases."""
  if isinstance(value, tuple):
    for one in value:
      yield from _classes(one)
  elif dataclasses.is_dataclass(value) and not isinstance(value, type):
    yield from type(value).__mro__
    for field in dataclasses.fields(value):
      yield from _classes(getattr(value, field.name))


def _is_ours(module: str) -> bool:
  top = module.partition(".")[0]
  return top == "kvjax" or (top in sys.stdlib_module_names and top != "__main__")


@functools.cache
def _file(module: str) -> pathlib.Path | None:
  """The file of a module, imported or not."""
  found = getattr(sys.modules.get(module), "__file__", None)
  if found is None and module not in sys.modules:
    with contextlib.suppress(ImportError, ValueError, AttributeError):
      spec = importlib.util.find_spec(module)
      found = spec.origin if spec and spec.has_location else None
  path = pathlib.Path(found) if found else None
  return path if path and path.is_file() else None


def _bytes_of(module: str) -> bytes:
  file = _file(module)
  return module.encode() + b"\0" + (file.read_bytes() if file else b"")


def _reached(modules: set[str]) -> set[str]:
  """The modules, and those beside them that they import, one through the other."""
  found, left = set(modules), list(modules)
  while left:
    module = left.pop()
    near = {name for name in _imported(module) if _beside(name, module)} - found
    found |= near
    left += near
  return found


def _beside(name: str, module: str) -> bool:
  """True if an imported module is of the same package, or lies in the same folder, as another."""
  file, own = _file(name), _file(module)
  if file is None or own is None or _is_ours(name):
    return False
  if name.partition(".")[0] == module.partition(".")[0]:
    return True
  top = own.parents[module.count(".") + (own.stem == "__init__")]
  installed = {pathlib.Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")}
  return top not in installed and top in file.parents and not installed & set(file.parents)


def _imported(module: str) -> set[str]:
  """Names of modules in a module's import statements, wherever they stand."""
  file = _file(module)
  if file is None or file.suffix != ".py":
    return set()
  package = module if file.stem == "__init__" else module.rpartition(".")[0]
  names: set[str] = set()
  for node in ast.walk(ast.parse(file.read_bytes())):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      relative = "." * node.level + (node.module or "")
      with contextlib.suppress(ImportError, ValueError):
        base = importlib.util.resolve_name(relative, package) if node.level else relative
        names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
  parts = (name.split(".") for name in names)
  return {name for each in parts for name in itertools.accumulate(each, "{}.{}".format)}
