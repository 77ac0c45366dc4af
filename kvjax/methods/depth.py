"""The depth schedule of PrHS: what share of a sequence deep layers leave out (Eqs. 15 and 16).

Layer ℓ = 1 … L leaves out ⌊(1 − x^(p·(ℓ − ℓ_s)/(L − ℓ_s)))·n⌋ of n tokens, ℓ_s = ⌊start·L⌋. The
floor jumps where the product is a whole number, so it is taken in integers: float32 would miss it
from a few thousand tokens on, and float64 too where x has no exact binary form (1 − 0.9 < 0.1).
"""

import decimal
import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

BITS = 48  # of a share's fraction
DIGIT = 8  # bits of it that are multiplied at a time


def share(base: float, power: float, start: float, layer: Any, layers: int) -> int:
  """1 − base^(power·(ℓ − ℓ_s)/(L − ℓ_s)) in units of 2^−48, rounded up; 0 up to layer ℓ_s.

  Args:
    base: x, what is left in the top layer where power = 1; in (0, 1], read as a decimal number.
    power: p, 0 or more.
    start: ℓ_s / L, in [0, 1].
    layer: ℓ − 1, an int counted from 0; what is no number yet says so.
    layers: L.
  """
  with decimal.localcontext(prec=50):
    first = math.floor(_exact(start) * layers)  # ℓ_s
    if layer + 1 <= first:
      return 0
    exponent = _exact(power) * (layer + 1 - first) / (layers - first)
    left_out = (1 - _exact(base) ** exponent) * 2**BITS
    return min(math.ceil(left_out), 2**BITS - 1)


def floor_of_each(share: int, count: Int[Array, "*batch"]) -> Int[Array, "*batch"]:
  """⌊share·count⌋ of counts in [0, 2^24): a long multiplication from the last digit on."""
  count = count.astype(jnp.uint32)
  total = jnp.zeros_like(count)
  for i in range(BITS // DIGIT):
    digit = (share >> (DIGIT * i)) & (2**DIGIT - 1)
    total = (total + count * jnp.uint32(digit)) >> DIGIT
  return total.astype(jnp.int32)


def _exact(x: float) -> decimal.Decimal:
  """The decimal number that was written: 0.9, not the binary fraction next to it."""
  return decimal.Decimal(str(x))
