"""The GPU lowering that every kernel uses, and the switch to the interpreter.

The only module that imports `jax.experimental.pallas.triton`: the lowering has been deprecated
since jax 0.11 (still there in 0.12), so what has to change if it goes is here.
`decode/jax_triton.py` is the proof that a kernel can leave it.

Kernels take whole arrays as refs and index them with integer vectors: one form that lowers to
plain pointer arithmetic on the GPU and needs no special case at the edges under the interpreter.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from kvjax.kernels.common import addresses

with warnings.catch_warnings():
  warnings.filterwarnings("ignore", category=DeprecationWarning)
  from jax.experimental.pallas import triton as plgpu

INTEGERS = 32  # products of bytes that the matrix units sum at a time

# jax emits it at every lowering, after this module's import is long over.
warnings.filterwarnings(
  "ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning
)


def interpreted(interpret: bool | None) -> bool:
  """True to run under the interpreter: as asked, else wherever the default backend is no GPU."""
  return jax.default_backend() != "gpu" if interpret is None else interpret


def call(
  kernel: Callable[..., None],
  *operands: Any,
  grid: tuple[int, ...],
  out: Sequence[Any],
  warps: int,
  stages: int,
  name: str,
  interpret: bool | None = None,
  aliases: dict[int, int] | None = None,
) -> Sequence[Any]:
  """Runs `kernel(*operand refs, *result refs)` on whole arrays.

  Operands and results may be tuples of several, named ones too, of which the kernel gets tuples of
  refs, and None where there is none; `aliases` counts the arrays in them one by one.

  Layers that launch the same kernel over equal shapes share one trace of it, and one lowering.
  """
  how: dict[str, Any] = {
    "grid": grid,
    "out": tuple(out),
    "warps": warps,
    "stages": stages,
    "name": name,
    "interpret": interpreted(interpret),
    "aliases": tuple((aliases or {}).items()),
  }
  # Weak types would let `jnp.where(c, 0, x[i])` pass the Triton lowering a 0 of no type.
  leaves, tree = jax.tree.flatten(operands)
  leaves = [lax.convert_element_type(x, x.dtype) for x in leaves]
  operands = jax.tree.unflatten(tree, leaves)
  try:
    shared = _Kernel.of(kernel)
  except TypeError:
    return _launch(kernel, *operands, **how)
  return _shared_launch(shared, *operands, **how)


def renew(
  kernel: Callable[..., None], *operands: Any, held: Sequence[Any], **how: Any
) -> Sequence[Any]:
  """As `call`, of operands with `held` after them, whose arrays the results renew in place."""
  ahead, count = len(jax.tree.leaves(operands)), len(jax.tree.leaves(held))
  out = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), [*held])
  aliases = {ahead + i: i for i in range(count)}
  return call(kernel, *operands, *held, out=out, aliases=aliases, **how)


@dataclasses.dataclass(frozen=True)
class _Kernel:
  """A kernel that equals another one if it does the same: a partial function by its parts."""

  function: Callable[..., Any]
  args: tuple[Any, ...] = ()
  options: frozenset = frozenset()

  @staticmethod
  def of(value: Any) -> Any:
    """The same for a partial function; other values as they are. TypeError: it is like no other."""
    if not isinstance(value, functools.partial):
      if "<locals>" in getattr(value, "__qualname__", ""):
        raise TypeError("a function made anew each time")
      hash(value)
      return value
    args = [_Kernel.of(x) if callable(x) else x for x in value.args]
    options = [(name, _Kernel.of(x) if callable(x) else x) for name, x in value.keywords.items()]
    made = _Kernel(_Kernel.of(value.func), tuple(args), frozenset(options))
    hash(made)
    return made

  def __call__(self, *given: Any) -> Any:
    return self.function(*self.args, *given, **dict(self.options))


def _launch(
  kernel: Callable[..., None],
  *operands: Any,
  grid: tuple[int, ...],
  out: tuple[Any, ...],
  warps: int,
  stages: int,
  name: str,
  interpret: bool,
  aliases: tuple[tuple[int, int], ...],
) -> Sequence[Any]:
  """Compiler parameters are always passed: with none, jax picks another lowering."""
  reach = addresses.Reach(kernel)
  if not interpret:
    reach = addresses.reach(kernel, operands, out, aliases, name)
  results = pl.pallas_call(
    reach.kernel,
    out_shape=out,
    grid=grid,
    input_output_aliases=dict(aliases),
    compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
    interpret=interpret,
    name=name,
    **reach.specs,
  )(*operands)
  reach.check()
  return results


_shared_launch = jax.jit(
  _launch,
  static_argnums=0,
  static_argnames=("grid", "out", "warps", "stages", "name", "interpret", "aliases"),
)


def load(ref: Any, *index: Any, mask: Any, other: Any = 0.0, evict: str | None = None) -> Array:
  """ref[index] where mask holds, else `other`. The index holds integers and integer vectors.

  Without a mask (None) the whole index must lie inside.

  `evict="evict_first"` marks bytes that nothing reads again before they leave the L2 cache.
  """
  other = None if mask is None else other
  return plgpu.load(ref.at[index], mask=mask, other=other, eviction_policy=evict)


def store(ref: Any, *index: Any, value: Array, mask: Any) -> None:
  """ref[index] = value where mask holds."""
  plgpu.store(ref.at[index], value, mask=mask)


def dot(a: Array, b: Array, *, trans_b: bool = False) -> Array:
  """a @ b (or a @ bᵀ) with float32 accumulation; float32 operands are not rounded to TF32.

  Integers are summed in int32, INTEGERS at a time: a GPU counts fewer of them twice.
  """
  if jnp.issubdtype(a.dtype, jnp.integer) and a.shape[1] < INTEGERS:
    raise ValueError(
      f"dot: found sums of {a.shape[1]} products of {a.dtype}, expected {INTEGERS} or more"
    )
  return plgpu.dot(a, b, trans_b=trans_b, precision=lax.Precision.HIGHEST)


def inline(asm: str, x: Array, dtype: Any, *, pack: int) -> Array:
  """x by PTX that makes one register of 32 bits, `pack` elements of `dtype`, of another ($0 of $1).

  Not for the interpreter.
  """
  result = jax.ShapeDtypeStruct(x.shape, dtype)
  (made,) = plgpu.elementwise_inline_asm(
    asm, args=[x], constraints="=r,r", pack=pack, result_shape_dtypes=[result]
  )
  return made


def where_active(active_ref: Any | None, row: Any, run: Callable[[], None]) -> None:
  """Calls `run` for a row of which active [R] is above 0, or for all of them without such."""
  if active_ref is None:
    run()
  else:
    pl.when(active_ref[row] > 0)(run)


def by_row(x: Array) -> Array:
  """An array [B, K, ...] with its rows on one axis."""
  return lax.collapse(x, 0, 2)


def barrier(interpret: bool) -> None:
  """All warps of a program wait here for each other. The interpreter has one, which does not."""
  if not interpret:
    plgpu.debug_barrier()
