"""Operands with more elements than 32 bits with a sign count.

jax's lowering gives offsets 64 bits where an operand has more than 2³² bytes. At one byte an
element that is too late: from element 2³¹ on, offsets are below zero. It reads the operand's shape
and dtype off its block mapping and uses them for nothing else, so `_Far` says two bytes there; the
pointer keeps the type of the operand itself. The mapping of a result is the result's type too:
what is updated in place is written through its operand, the same memory.
"""

import dataclasses
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

MOST = 2**31  # elements with offsets from 0 to 2³¹ − 1


@dataclasses.dataclass
class _Far(pl.BlockSpec):
  """The whole operand, addressed with 64 bits; `asked` grows when jax maps it (it copies this)."""

  asked: list[str] = dataclasses.field(default_factory=list, kw_only=True)

  def to_block_mapping(self, origin: Any, array_aval: Any, **how: Any) -> Any:
    self.asked.append(origin)
    mapping = super().to_block_mapping(origin, array_aval, **how)
    return mapping.replace(array_aval=array_aval.update(dtype=jnp.dtype(jnp.int16)))


def is_far(x: Any) -> bool:
  """True if the lowering would address this array with too few bits."""
  return jnp.dtype(x.dtype).itemsize == 1 and math.prod(x.shape) > MOST


class Reach(NamedTuple):
  """A kernel that reaches all of its operands, with the block specifications that see to it.

  Attributes:
    kernel: the kernel.
    specs: `in_specs` of `pallas_call`, or nothing.
    check: what is called once it has been launched; raises where jax did not ask for them.
  """

  kernel: Callable[..., None]
  specs: Mapping[str, Any] = types.MappingProxyType({})
  check: Callable[[], None] = lambda: None


def reach(
  kernel: Callable[..., None],
  operands: Sequence[Any],
  out: Sequence[Any],
  aliases: Sequence[tuple[int, int]],
  name: str,
) -> Reach:
  """A kernel as it reaches all of its operands.

  Raises:
    NotImplementedError: a result that is no operand in place is too large, or this version of jax
      lays out block mappings in another way.
  """
  given, written = jax.tree.leaves(operands), jax.tree.leaves(out)
  far = {i: _Far() for i, x in enumerate(given) if is_far(x)}
  source = {result: operand for operand, result in aliases}
  for i, x in enumerate(written):
    if is_far(x) and i not in source:
      raise NotImplementedError(_found(name, "a result", x))
  if not far:
    return Reach(kernel)

  def through_operands(*refs: Any) -> None:
    leaves, tree = jax.tree.flatten(refs)
    for result, operand in source.items():
      if operand in far:
        leaves[len(given) + result] = leaves[operand]
    kernel(*jax.tree.unflatten(tree, leaves))

  def check() -> None:
    for i, spec in far.items():
      if not spec.asked:
        raise NotImplementedError(_found(name, "an operand", given[i]))

  specs = [far.get(i) or pl.BlockSpec() for i in range(len(given))]
  specs = jax.tree.unflatten(jax.tree.structure(operands), specs)
  return Reach(through_operands, {"in_specs": specs}, check)


def _found(name: str, which: str, x: Any) -> str:
  return (
    f"{name}: found {which} of shape {x.shape} and dtype {jnp.dtype(x.dtype).name}, expected at "
    "most 2**31 elements: jax addresses more of one byte with 32 bits"
  )
