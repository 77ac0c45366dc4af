"""LongFlow's score of a token, and the token of least score (§3.2, Eqs. 2 to 6)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.core import slots
from kvjax.core.cache import Cache
from kvjax.core.context import At
from kvjax.core.plan import Attended


def scores(attended: Attended, norm: Float[Array, "B K S"]) -> Float[Array, "B K S"]:
  """log (Σ_g α_g · ‖v‖₁), the size of what each token adds to the output (Eqs. 5, 6).

  α is summed over the query heads of a KV head; attention has noted its logits [B, K, G, S].
  """
  assert attended.logits is not None
  share = attended.logits - attended.state.lse[..., None]  # log α = s − log Z (Eq. 5)
  return jax.nn.logsumexp(share, 2) + jnp.log(norm)  # log (α · Σ_l |v_l|) (Eq. 6)


def over_heads(at: At, score: Float[Array, "B K S"]) -> Float[Array, "B K S"]:
  """log of the sum over all heads, those of other shards included."""
  top = at.max_heads(score.max(1, keepdims=True))
  top = jnp.where(jnp.isneginf(top), 0.0, top)
  total = at.sum_heads(jnp.exp(score - top).sum(1, keepdims=True))
  return jnp.broadcast_to(jnp.log(total) + top, score.shape)


def least(
  cache: Cache, score: Float[Array, "B K S"], *, sinks: int, recent: int
) -> Int[Array, "B K"]:
  """The next victim: arg min of the score (Eq. 2) over the tokens that may leave."""
  staying = stays(cache.pos, cache.seen, sinks=sinks, recent=recent) | (cache.pos < 0)
  return slots.lowest(jnp.where(staying, jnp.inf, score), cache.pos)


def stays(
  pos: Int[Array, "B K S"], end: Int[Array, " B"], *, sinks: int, recent: int
) -> Bool[Array, "B K S"]:
  """Tokens that may not leave: the first ones, and the newest before `end`."""
  return (pos < sinks) | (pos >= (end - recent)[:, None, None])
