"""Rotary position embedding (Su et al., 2021), half-split, and its long-context variants."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

ORDINARY = 1 << 15  # positions below it turn by a float32 product, as models are trained with


@dataclasses.dataclass(frozen=True)
class Linear:
  """Position interpolation (Chen et al., 2023): every frequency divided by `factor`."""

  factor: float


@dataclasses.dataclass(frozen=True)
class Llama3:
  """Llama 3.1's scaling: low frequencies divided by `factor`, high ones kept, a ramp between."""

  factor: float = 8.0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_context: int = 8192


@dataclasses.dataclass(frozen=True)
class Yarn:
  """YaRN (Peng et al., 2023, §3): ramped interpolation, and attention scaled by `attention_factor`.

  Attributes:
    factor: context extension s.
    original_context: training length in tokens.
    beta_fast, beta_slow: rotations over the training length that bound the ramp.
    attention_factor: factor on rotated q and k; None: 0.1·ln(s) + 1 (Eq. 22).
    truncate: the ramp's ends are whole pairs; False: where the rotations put them (gpt-oss).
  """

  factor: float
  original_context: int
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  attention_factor: float | None = None
  truncate: bool = True


@dataclasses.dataclass(frozen=True)
class LongRope:
  """LongRoPE (Ding et al., 2024, §3): a divisor for each frequency, and attention scaled.

  Attributes:
    factors: the divisors, one for each pair that is turned.
    attention_factor: factor on rotated q and k.
  """

  factors: tuple[float, ...]
  attention_factor: float = 1.0

  def __post_init__(self):
    if not self.factors or min(self.factors) <= 0:
      raise ValueError(f"LongRope.factors: found {self.factors}, expected numbers above 0")


@dataclasses.dataclass(frozen=True)
class Rope:
  """Rotates queries and keys by position: dimension pair (i, i + H/2) turns by pos · θ^(−2i/H).

  >>> import kvjax
  >>> rope = kvjax.Rope(theta=500_000.0, scaling=kvjax.Linear(factor=4.0), partial=0.5)
  >>> rope.turned(128)  # dimensions of a head of 128
  64

  Attributes:
    theta: base of the frequencies.
    scaling: None (default), Linear, Llama3, Yarn or LongRope.
    partial: share of each head that is turned; the rest stays as it is (GLM-4: 0.5). The pairs that
      are turned come first, (i, i + H/2) for i below partial·H/2: a model whose files order its
      heads otherwise is reordered where it is converted.
  """

  theta: float = 10000.0
  scaling: Linear | Llama3 | Yarn | LongRope | None = None
  partial: float = 1.0

  def __post_init__(self):
    if not 0 <= self.partial <= 1:
      raise ValueError(f"Rope.partial: found {self.partial}, expected 0 to 1")

  @classmethod
  def none(cls) -> "Rope":
    """For queries and keys that are rotated already, or by nothing: they stay as they are."""
    return cls(partial=0.0)

  def turned(self, head_dim: int) -> int:
    """R, the dimensions of a head that are turned."""
    return int(self.partial * head_dim)

  def frequencies(self, head_dim: int) -> np.ndarray:
    """Angle per position of each dimension pair, float64 [H/2], 0 where nothing is turned; computed
    on the host.

    Raises:
      ValueError: an odd number of dimensions, or factors that do not fit them.
      TypeError: `scaling` is none that is known.
    """
    if head_dim % 2 or self.turned(head_dim) % 2:
      found = head_dim if head_dim % 2 else self.turned(head_dim)
      raise ValueError(f"head_dim: found {found}, expected an even number")
    if self.partial < 1:
      some = dataclasses.replace(self, partial=1.0).frequencies(self.turned(head_dim))
      return np.pad(some, (0, head_dim // 2 - some.size))
    freq = self.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    match self.scaling:
      case None:
        return freq
      case Linear(factor):
        return freq / factor
      case LongRope(factors):
        if len(factors) != freq.size:
          raise ValueError(
            f"LongRope.factors: found {len(factors)}, expected one for each of {freq.size} pairs"
          )
        return freq / np.asarray(factors)
      case Llama3() as s:
        turns = s.original_context * freq / (2 * math.pi)
        ramp = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
        ramp = np.clip(ramp, 0, 1)
        return (1 - ramp) * freq / s.factor + ramp * freq
      case Yarn() as s:

        def pair_with(
          turns: float,
        ) -> float:  # the pair that turns so often over the training length
          return (
            head_dim
            * math.log(s.original_context / (turns * 2 * math.pi))
            / (2 * math.log(self.theta))
          )

        low, high = pair_with(s.beta_fast), pair_with(s.beta_slow)
        if s.truncate:
          low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 1e-3), 0, 1)
        return freq / s.factor * ramp + freq * (1 - ramp)
    raise TypeError(f"scaling: found {self.scaling!r}, expected None or a rope's scaling")

  def table(self, head_dim: int) -> np.ndarray:
    """Operands of `angles`, float32 [4, H/2]: each pair's frequency, and its turns per
    position in units of 2⁻³² as two integers of 16 bits and what is left of a unit.
    """
    freq = self.frequencies(head_dim)
    units = freq / (2 * math.pi) % 1 * 2**32
    whole = units.astype(np.uint32)
    return np.stack([freq, whole >> 16, whole & 0xFFFF, units - whole]).astype(np.float32)

  @property
  def magnitude(self) -> float:
    """Factor that `rotate` puts on what it turns: YaRN's or LongRoPE's attention factor, or 1."""
    if isinstance(self.scaling, LongRope):
      return self.scaling.attention_factor
    if not isinstance(self.scaling, Yarn):
      return 1.0
    if self.scaling.attention_factor is not None:
      return self.scaling.attention_factor
    return 0.1 * math.log(self.scaling.factor) + 1 if self.scaling.factor > 1 else 1.0

  def rotate(
    self, x: Float[Array, "*batch H"], pos: Int[Array, "*#batch"]
  ) -> Float[Array, "*batch H"]:
    """x as seen at position `pos`; float32 inside, x's dtype kept."""
    return self._turn(x, pos, self.magnitude)

  def shift(
    self, x: Float[Array, "*batch H"], by: Int[Array, "*#batch"]
  ) -> Float[Array, "*batch H"]:
    """An already rotated x moved by `by` positions (may be negative).

    Raises:
      NotImplementedError: how it was rotated is not known (`Rope.none`).
    """
    if not self.partial:
      raise NotImplementedError(
        "rope: found Rope.none(), keys that are rotated already, and a method that moves tokens to "
        "other positions: expected the rotary embedding, and keys without it"
      )
    return self._turn(x, by, 1.0)

  def _turn(self, x: Array, pos: Array, magnitude: Any) -> Array:
    angle = angles(jnp.asarray(self.table(x.shape[-1])), pos[..., None])
    if self.partial < 1:  # what is not turned stays as it is
      pairs = self.turned(x.shape[-1]) // 2
      magnitude = jnp.where(jnp.arange(angle.shape[-1]) < pairs, magnitude, 1.0)
    cos, sin = jnp.cos(angle) * magnitude, jnp.sin(angle) * magnitude
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def angles(table: Any, pos: Int[Array, "*#shape"]) -> Float[Array, "*shape"]:
  """Angles at positions in radians, float32, in kernels too.

  A float32 product of position and frequency is off by up to 6e-8 of itself: 0.06 at a million,
  1.0 at 16.8 million. From `ORDINARY` on turns are counted in integers, of which the whole ones
  overflow: the angle, in [−π, π], is off by less than 1e-6 at a hundred million.

  Args:
    table: the four rows of `Rope.table`, each [*#shape].
    pos: int32; the angle of −pos is minus that of pos.
  """
  freq, upper, lower, rest = table
  units = (upper.astype(jnp.int32) << 16) + lower.astype(jnp.int32)  # bits of an unsigned number
  near = pos.astype(jnp.float32)
  turns = pos * units + (near * rest).astype(jnp.int32)
  far = turns.astype(jnp.float32) * (math.pi / 2**31)
  return jnp.where(jnp.abs(pos) < ORDINARY, near * freq, far)
