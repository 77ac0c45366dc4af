"""Programs that are compiled in threads while something else runs, where calls find them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array

from kvjax.models.nn import flat

THREAD = "kvjax: compiles ahead"  # the threads' name
WAITED = "/kvjax/waited_for_compile_ahead"  # event of `jax.monitoring`: seconds that a call did


class _Begun(set[Any]):
  """Programs that have been begun, until `flat.drop` drops programs."""

  def _cache_size(self) -> int:
    return 0  # programs are counted where they are called

  def clear_cache(self) -> None:
    self.clear()


_begun = flat.own(_Begun())
_under_way: list[threading.Thread] = []


def begin(program: Any, static: Sequence[Any], weights: list[Array], given: Any) -> None:
  """Begins to compile a jitted function, unless that was begun before.

  Args:
    program: the function.
    static: its static arguments, which come first.
    weights: the next one.
    given: the others, of which what runs before returns some: those are committed to a device as
      soon as anything that it is given is.
  """
  where = next((x.sharding for x in jax.tree.leaves((weights, given)) if x.committed), None)
  shapes = _shapes(weights, None), *_shapes(given, where)
  leaves, tree = jax.tree.flatten(shapes)
  key = program, *static, tree, *leaves
  if key not in _begun:
    _begun.add(key)
    thread = threading.Thread(target=_compile, args=(program, *static, *shapes), name=THREAD)
    thread.start()
    _under_way.append(thread)


def _shapes(arrays: Any, where: Any) -> Any:
  """Shapes of arrays: those that are not committed come to be `where`; None: nowhere."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if x.committed else where),
    arrays,
  )


def _compile(program: Any, *given: Any) -> None:
  with contextlib.suppress(Exception):  # which comes, and is explained, where it is called
    program.lower(*given).compile()


def wait() -> None:
  """Waits for all that was begun."""
  if _under_way:
    began = time.perf_counter()
    for thread in _under_way.copy():
      thread.join()
      with contextlib.suppress(ValueError):  # another caller waited, too
        _under_way.remove(thread)
    jax.monitoring.record_event_duration_secs(WAITED, time.perf_counter() - began)
