"""CriticalKV: a token matters by its attention and by what its value adds (Feng et al., 2025)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.core import settings, slots
from kvjax.core.context import At, Turn
from kvjax.core.fields import between, expect
from kvjax.core.traits import Traits
from kvjax.families import forms
from kvjax.families.bounded import Bounded
from kvjax.families.method import Method
from kvjax.families.prompt_scored import PromptScored
from kvjax.families.wrapper import Wrapper
from kvjax.methods.snapkv import SnapKV

TOKENS = 512  # whose products with the output projection are held at once


@dataclasses.dataclass(frozen=True)
class CriticalKV(Wrapper):
  """Over a method that scores a prompt's tokens: half stay by score, half by what is lost (Alg. 1).

  Of n tokens the first ⌊φ·n⌋ are those of best score s, the window's among them. The others are
  those of the rest with the largest

      (s_i + ε) · w_i,    w_i = mean over the group's query heads g of ‖v_i · W_O^(g)‖₁,

  W_O^(g) being the head's rows of the layer's output projection. The product bounds how far the
  layer's output moves where the first half holds more than half of the attention. Scores should be
  probabilities, or sums of them. Decoding is the base's; a later turn weighs what is cached anew.

  A window of more than ⌊φ·n⌋ tokens stays as a whole; in kvpress what is beyond competes.

  Attributes:
    base: says how many tokens stay, and scores them; every layer has its `budget`.
    share: φ, the share that stays by score alone (½), in [0, 1]; 1 is the base.
    epsilon: ε. The authors' 1e-4 is of mean probabilities; SnapKV's scores are sums over the 32
      queries of its window, where that is 3.2e-3.
  """

  base: Method = dataclasses.field(default_factory=SnapKV)
  share: float | int = between(0, 1, 0.5)
  epsilon: float = between(0, 1, 3.2e-3)

  def __post_init__(self):
    super().__post_init__()
    base = self.base
    scores = isinstance(base, PromptScored) and type(base).rank is PromptScored.rank
    expect(self, "base", scores, "a method that cuts a prompt by `score`, such as SnapKV()")
    sizes = "capacity", "_most"
    even = scores and not any(forms.overrides(base, size, Bounded) for size in sizes)
    expect(self, "base", even, "one that gives every layer its budget")

  @property
  def traits(self) -> Traits:
    return super().traits.but(weighs_outputs=True)

  def rank(self, at: At, turn: Turn) -> tuple[Float[Array, "B K S"], slots.Slots]:
    if turn.prompt.wo is None:
      raise TypeError(f"{at.name}: found no output projection, expected prefill(..., wo=...)")
    score, staged = self.base.rank(at, turn)
    held = jnp.where(staged["pos"] >= 0, score, -jnp.inf)
    place = jnp.argsort(jnp.argsort(-held, -1, stable=True), -1)  # by score, ties to the first
    first = (place < int(self.share * self.base.budget)) | jnp.isinf(score)  # type: ignore[attr-defined]
    weight = norms_of_outputs(staged["v"], turn.prompt.wo)
    return jnp.where(first, jnp.inf, (score + self.epsilon) * weight), staged


def norms_of_outputs(
  v: Float[Array, "B K S H"], wo: Float[Array, "K G H D"]
) -> Float[Array, "B K S"]:
  """w: the mean over query heads of ‖v · W_O‖₁, in float32."""
  batch, heads, tokens, width = v.shape
  groups, size = wo.shape[1], min(TOKENS, tokens)
  blocks = -(-tokens // size)
  v = jnp.pad(v, ((0, 0), (0, 0), (0, blocks * size - tokens), (0, 0)))
  v = v.reshape(batch, heads, blocks, size, width)

  def of_block(i: Array) -> Float[Array, "K B T"]:
    def add(g: Array, total: Array) -> Array:
      # Heads first: as bktd, XLA's CPU has no such product of bfloat16.
      out = jnp.einsum("bkth,khd->kbtd", v[:, :, i], wo[:, g], preferred_element_type=jnp.float32)
      return total + jnp.abs(out).sum(-1)

    total = jnp.zeros((heads, batch, size), jnp.float32)
    return jax.lax.fori_loop(0, groups, add, total) / groups

  norms = jax.lax.map(of_block, jnp.arange(blocks))  # [blocks, K, B, T]
  return norms.transpose(2, 1, 0, 3).reshape(batch, heads, -1)[:, :, :tokens]


settings.register(
  CriticalKV,
  example=lambda cls, budget: cls(settings.example(SnapKV, budget)),
  neutral=lambda cls, length: cls(settings.neutral(SnapKV, length)),
)
