"""ETF: early tokens of a prompt stop being updated in deep layers (PrHS, §IV-C)."""

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.core import chunks, settings
from kvjax.core.context import Active, At, Carry, Prompt
from kvjax.core.fields import between, least, one_of
from kvjax.core.traits import Traits
from kvjax.families.full import Full
from kvjax.families.wrapper import Wrapper
from kvjax.methods import depth


@dataclasses.dataclass(frozen=True)
class ETF(Wrapper):
  """Deep layers of prefill compute the first tokens and the end of a prompt only (early freezing).

  Of a prompt of T tokens layer ℓ freezes C_sink < i ≤ E_ℓ(T) with (Eq. 16)

      E_ℓ(T) = ⌊(1 − ψ^(γ·(ℓ − ℓ_s)/(L − ℓ_s)))·T⌋ for ℓ ≥ ℓ_s, and 0 below,

  where layers and positions count from 1 (one range for all queries, Fig. 5). A frozen token keeps
  the state that the layer below gave it: no query, attention or MLP is computed for it. The other
  tokens still attend to it; decoding is the base's.

  E depends on the length of the whole prompt, so a prompt is read at once. A further turn is a
  prompt of its own: T, i and the first tokens are counted within it.

  Attributes:
    base: the method that caches what was read.
    sinks: C_sink, first tokens that every layer computes.
    psi: ψ, share of the prompt that the top layer computes where γ = 1, in (0, 1]; 1 freezes none.
    gamma: γ, how fast the frozen part grows, 0 or more; 0 freezes none.
    start: ℓ_s = ⌊start·L⌋.
    kv: a frozen token's key and value: "project", projected from the state that it keeps (§IV-C, D:
      freezing comes after the projection), or "previous", those of the layer below (App. D), which
      saves the projection too. A model that was not trained for the latter does not survive it: on
      SmolLM2 the KL to the full cache is 2.0 nats, with "project" 0.016.
  """

  replaces: ClassVar[tuple[str, ...]] = ("active", "fill")
  sinks: int = least(0, 16)
  psi: float = between(0, 1, 0.5, "(]")
  gamma: float = between(0, math.inf, 1.0, "[)")
  start: float = between(0, 1, 0.75)
  kv: str = one_of(("previous", "project"), "project")

  @property
  def traits(self) -> Traits:
    base, whole = self.base.traits, self.psi == 1 or self.gamma == 0 or self.start == 1
    return super().traits.but(
      projects_all=self.kv == "project",
      spreads=base.spreads,
      chunkable=base.chunkable and whole,
      order_independent=base.order_independent and whole,
    )

  def _share(self, layer: int, layers: int) -> int:
    """E_ℓ(T)/T in units of `depth`; the first layer has none below to take from."""
    if layer == 0:
      return 0
    return depth.share(self.psi, self.gamma, self.start, layer, layers)

  def active(self, at: At, tokens: int, total: Int[Array, " B"]) -> Active | None:
    """The first tokens and, in one piece, the end of the prompt."""
    share = at.of_layer(lambda layer: self._share(layer, at.env.layers))
    # A longer prompt computes no fewer tokens than a shorter one: the padded chunk bounds them.
    longest = (share * tokens) >> depth.BITS  # E_ℓ(tokens)
    if longest <= self.sinks:
      return None
    count = tokens - (longest - self.sinks)
    total = jnp.minimum(total, tokens)
    frozen = depth.floor_of_each(share, total)  # the first E_ℓ(T), of which sinks are computed
    return Active.ends(self.sinks, frozen, count, tokens, total)

  def fill(
    self,
    at: At,
    k: Float[Array, "B K C H"],
    v: Float[Array, "B K C H"],
    prompt: Prompt,
    carry: Carry,
  ) -> tuple[Float[Array, "B K T H"], Float[Array, "B K T H"], Carry]:
    """Those of the computed tokens over those of the layer below; kept for the layer above."""
    if self.kv == "project":
      return k, v, carry
    heads = dict(carry.heads)
    below = [heads.pop(name, None) for name in ("below_k", "below_v")]
    if prompt.index is not None:
      k, v = (chunks.put(old, prompt, new, 2) for old, new in zip(below, (k, v), strict=True))
    layers = at.env.layers
    if at.of_layer(lambda layer: layer + 1 < layers and self._share(layer + 1, layers) > 0):
      heads |= {"below_k": k, "below_v": v}
    return k, v, dataclasses.replace(carry, heads=heads)


settings.register(
  ETF,
  # The paper's freezing, and a 32nd of the budget as sinks.
  example=lambda cls, budget: cls(Full(), sinks=max(1, budget // 32)),
  neutral=lambda cls, length: cls(Full(), psi=1.0),
)
