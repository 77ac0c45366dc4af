"""The last program of a row to arrive finishes what the others have left in memory.

A row has a counter, 0 before a launch and after it. A program writes its part, then adds 1; the one
that finds all others counted sets the counter back and goes on alone with the row, in a fixed
order: whoever comes last, a second run is equal to the bit. That saves a launch, which takes 2 µs.

The addition releases and acquires (`atom.acq_rel.gpu`), by one thread between two barriers: what
any thread of a row's programs wrote before is seen by all threads of the last one after. Arrays
that pass this way are results of the launch, and read as `fresh`.

Counters are an operand that the launch updates in place and gives back as it was: whoever calls it
hands them from launch to launch, and fills them once. Launches that share counters run one after
another, as each takes what the one before gave. A fill for each launch would cost what it saves.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Int

from . import _backend


def last(ref: Any, row: Array, programs: Array | int, *, interpret: bool) -> Bool[Array, ""]:
  """Counts this program in; whether it is the last of a row's `programs`, which sets back.

  Args:
    ref: counters of all rows, int32 [R].
    row, programs: of this program, and how many arrive at its counter.
    interpret: under the interpreter programs run one after another, and have one thread.
  """
  if not interpret:
    _backend.barrier()  # what all threads wrote is counted by one of them
  arrived = _backend.add(ref, row, jnp.int32(1)) == programs - 1

  @pl.when(arrived)
  def _():
    ref[row] = jnp.int32(0)

  return arrived


def none(rows: int) -> Int[Array, " R"]:
  """Counters before anything has arrived."""
  return jnp.zeros(rows, jnp.int32)


def check(arrivals: Any, shape: tuple[int, ...]) -> None:
  """Raises on counters that are not those of the rows; the message names the argument."""
  if arrivals.shape != shape:
    raise ValueError(f"arrivals: found shape {arrivals.shape}, expected {list(shape)}")
  if arrivals.dtype != jnp.int32:
    raise TypeError(f"arrivals: found dtype {arrivals.dtype.name}, expected int32")


def like(rows: int) -> jax.ShapeDtypeStruct:
  """What a launch gives back."""
  return jax.ShapeDtypeStruct((rows,), jnp.int32)
