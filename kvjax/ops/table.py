"""Choice of the implementation of an operation.

An operation declares its kernels beside its reference by name; they are imported when they run.
"reference" always exists; a kernel that is asked for by name and does not exist, or does not take
these operands, raises. "auto" means: the Pallas kernel on a GPU where there is one that has run
there, does all that the method needs and finds the shared memory that it needs, the reference
otherwise; for a prompt, on Hopper a kernel of its own, else cuDNN's attention before either, where
it does.
"""

import functools
import importlib
import warnings
from collections.abc import Callable

import jax
from jaxtyping import Array

from kvjax.core.context import At

_KERNELS: dict[str, dict[str, str]] = {}  # operation -> implementation -> "module:function"
_UNRUN: set[str] = set()


def declare(operation: str, *, unrun: bool = False, **kernels: str) -> str:
  """Declares the kernels of an operation, and returns its name.

  Args:
    operation: its name.
    unrun: they equal the reference in the interpreter, where programs run one after another, and
      compile, but have not run and been timed on a GPU in their present form: "auto" leaves them
      alone.
    kernels: "module:function" of each by its implementation (jax_triton: "jax-triton").
  """
  _KERNELS[operation] = {impl.replace("_", "-"): where for impl, where in kernels.items()}
  if unrun:
    _UNRUN.add(operation)
  return operation


def kernel(operation: str, impl: str) -> Callable:
  """The kernel of an operation; NotImplementedError names both if there is none."""
  try:
    module, _, function = _KERNELS[operation][impl].partition(":")
  except KeyError:
    have = ", ".join(["reference", *_KERNELS.get(operation, {})])
    raise NotImplementedError(
      f"{operation}: no {impl!r} implementation (there is: {have})"
    ) from None
  return getattr(importlib.import_module(module), function)


def choose(operation: str, impl: str, q: Array | None = None, k: Array | None = None) -> str:
  """Resolves "auto" for the default backend; other names are returned as they are.

  Args:
    operation, impl: a declared name, and as in `kvjax.Env`.
    q: queries [B, K, G, ...] of attention; for operations without any, None.
    k: the keys [..., H] of that attention.

  Raises:
    NotImplementedError: the kernel that `impl` names wants more shared memory than the device has,
      or a lowering that this jax lacks; "auto" takes the reference there, and says so once.
  """
  trusted = "pallas" in _KERNELS.get(operation, {}) and operation not in _UNRUN
  if impl == "reference" or (impl == "auto" and not (trusted and jax.default_backend() == "gpu")):
    return "reference"
  if lacking := unlowered():
    if impl != "auto":
      raise NotImplementedError(f"{operation}: the {impl!r} kernel {lacking}")
    _say_once(f"a GPU kernel {lacking}: impl='auto' takes the reference")
    return "reference"
  beyond = "" if q is None or k is None else beyond_device(operation, q, k)
  if beyond and impl != "auto":
    raise NotImplementedError(f"{operation}: the {impl!r} kernel {beyond}")
  if beyond:
    _say_once(f"{operation}: the kernel {beyond}: impl='auto' takes the reference")
    return "reference"
  return "pallas" if impl == "auto" else impl


@functools.cache
def unlowered() -> str:
  """The part of the kernels' lowering that this jax lacks, in words; empty if none."""
  try:
    importlib.import_module("kvjax.kernels.common.backend")
  except ImportError as error:
    return f"needs jax.experimental.pallas.triton, which jax {jax.__version__} lacks ({error})"
  return ""


def beyond_device(operation: str, q: Array, k: Array) -> str:
  """The memory that a kernel needs and the default device lacks, in words; empty if none."""
  if jax.default_backend() != "gpu":
    return ""  # the interpreter has all memory there is
  config = importlib.import_module("kvjax.kernels.common.config")
  devices = importlib.import_module("kvjax.kernels.common.devices")
  here, groups, head_dim = devices.this_device(), q.shape[2], k.shape[-1]
  shape = {"groups": groups, "head_dim": head_dim, "itemsize": k.dtype.itemsize}
  if (needed := config.least_shared(operation, **shape)) <= here.shared:
    return ""
  return (
    f"needs {needed} bytes of shared memory for {groups} query heads of {head_dim} {k.dtype.name} "
    f"per key/value head, of which {here.name} has {here.shared}"
  )


@functools.cache
def _say_once(message: str) -> None:
  warnings.warn(message, stacklevel=3)


def pallas(
  at: At, operation: str, q: Array | None = None, k: Array | None = None, *, whole: bool = False
) -> Callable | None:
  """The Pallas kernel of an operation where it is what runs, as `choose` says; None: the reference.

  `whole`: it takes a cache's slots for all there are; the reference runs where they are split.
  """
  if (whole and at.env.slot_axis) or choose(operation, at.env.impl, q, k) != "pallas":
    return None
  return kernel(operation, "pallas")
