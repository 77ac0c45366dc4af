"""A module's functions, each jitted: one program a call in the place of one for every operation."""

import functools
import types

import jax

from kvjax.runtime import drivers


@functools.cache
def _jitted(function, static, names):
  return jax.jit(function, static_argnums=static, static_argnames=names)


def compiled(function):
  """`function`; numbers, texts, types and None among its arguments are static."""

  @functools.wraps(function)
  def call(*args, **kwargs):
    plain = (int, float, str, type, type(None))
    static = tuple(i for i, x in enumerate(args) if isinstance(x, plain))
    names = tuple(sorted(n for n, x in kwargs.items() if isinstance(x, plain)))
    return _jitted(function, static, names)(*args, **kwargs)

  return call


def of(module: types.ModuleType) -> types.SimpleNamespace:
  """The module with its functions compiled."""
  own = {n: x for n, x in vars(module).items() if not n.startswith("_")}
  functions = {n: compiled(x) for n, x in own.items() if isinstance(x, types.FunctionType)}
  return types.SimpleNamespace(**{**own, **functions})


def front_door(monkeypatch):
  """Has `kvjax.prefill` and `kvjax.decode` be one program each where they are called alone, too."""
  for name in ("read", "step"):
    monkeypatch.setattr(drivers, name, jax.jit(getattr(drivers, name), static_argnums=0))
