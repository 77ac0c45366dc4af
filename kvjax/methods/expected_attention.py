"""Expected Attention: what queries to come will attend to (Devoto, Jeblick, Jégou, 2025)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.core.context import At, Turn
from kvjax.core.fields import least
from kvjax.families.prompt_scored import PromptScored
from kvjax.primitives.rope import angles

FIRST = 1e30  # the score of the first tokens, above all others


@dataclasses.dataclass(frozen=True)
class ExpectedAttention(PromptScored):
  """Cuts a prompt to what Gaussian queries at the positions to come attend to (§3).

  Queries q ~ N(μ, Σ) before rotation, per query head, over the prompt without its sinks; R̄ is the
  mean of the next `future` rotations. E exp(q·k/√H) gives the logit z = μ̄·k/√H + kᵀΣ̄k/(2H), with
  μ̄ = R̄μ and Σ̄ = R̄ΣR̄ᵀ; a token scores (softmax(z) + ε)·‖v‖₂, its KV head the mean of the group's
  softmax. The paper has no window: `window_size` tokens are the room that generated ones take.
  Logits under a soft cap are refused.

  Attributes:
    sinks: first tokens, which stay (4).
    future: N_f, positions over which rotations are averaged (512).
    epsilon: ε (0; the paper's 0.02 adds ‖v‖ of tokens without expected attention).
  """

  sinks: int = least(0, 4)
  future: int = least(1, 512)
  epsilon: float | int = least(0, 0.0)

  def score(self, at: At, turn: Turn, past: Bool[Array, "B K S"]) -> Float[Array, "B K S"]:
    if at.env.soft_cap is not None:
      raise NotImplementedError(
        f"{at.name}: found logits under a soft cap of {at.env.soft_cap}, expected none: the "
        "expectation of exp(c·tanh(q·k/c)) has no closed form"
      )
    staged, q, qpos = turn.staged, turn.q, turn.qpos
    pos, size = staged["pos"], q.shape[-1]
    counted = (qpos >= self.sinks)[:, None, None, :, None]
    x = at.env.rope.shift(q.astype(jnp.float32), -qpos[:, None, None])  # before rotation
    n = jnp.maximum(counted.sum(3), 1)
    mean = jnp.where(counted, x, 0).sum(3) / n  # μ
    d = jnp.where(counted, x - mean[:, :, :, None], 0)
    cov = jnp.einsum("bkgth,bkgtj->bkghj", d, d) / n[..., None]  # Σ
    next_ones = pos[:, 0].max(-1)[:, None] + 1 + jnp.arange(self.future)
    angle = angles(jnp.asarray(at.env.rope.table(size)), next_ones[..., None])
    c, s = (f(angle).mean(1)[:, None, None] for f in (jnp.cos, jnp.sin))  # R̄
    a, b = jnp.split(staged["k"].astype(jnp.float32), 2, -1)
    k = jnp.concatenate([c * a + s * b, c * b - s * a], -1)  # R̄ᵀk: μ̄·k = μ·R̄ᵀk, and so for Σ̄

    def logits(of_head: tuple[Array, Array]) -> Float[Array, "B K S"]:
      mu, sigma = of_head
      z = jnp.einsum("bksh,bkh->bks", k, mu) * size**-0.5
      return z + jnp.einsum("bksh,bkhj,bksj->bks", k, sigma, k) / (2 * size)

    z = jax.lax.map(logits, (jnp.moveaxis(mean, 2, 0), jnp.moveaxis(cov, 2, 0)))
    p = jax.nn.softmax(jnp.where(pos >= self.sinks, z, -jnp.inf), -1).mean(0)
    score = (p + self.epsilon) * jnp.linalg.norm(staged["v"].astype(jnp.float32), axis=-1)
    return jnp.where(pos < self.sinks, FIRST, score)
