"""Hit rates: how good a predicted selection was, beside the true one (PRR, Eq. 4 and App. A)."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.core.plan import Plan


def among(a: Int[Array, "B K V"], b: Int[Array, "B K W"]) -> Bool[Array, "B K V"]:
  """True where a tile of table a is in table b (−1 = none, in neither)."""
  return ((a[..., :, None] == b[..., None, :]) & (a >= 0)[..., None]).any(-1)


def weights(
  scores: Float[Array, "B K k"], ok: Bool[Array, "B K k"], positive: bool
) -> Float[Array, "B K k"]:
  """w: what chosen tiles count; 0 where there is none."""
  if positive:
    return jnp.where(ok, scores, 0.0)
  top = jnp.where(ok, scores, -jnp.inf).max(-1, keepdims=True)
  return jnp.where(ok, jnp.exp(scores - jnp.where(ok, top, 0)), 0.0)


def report(plan: Plan, guess: Plan, before: Int[Array, "B K W"], positive: bool) -> dict[str, Any]:
  """Quality of the forecast, per KV head [B, K].

      missed, wasted      |S∖Ŝ| and |Ŝ∖S|, int32
      hit_rate            |Ŝ∩S| / |S|, of the tiles chosen by score alone, float32
      hit_rate_forced     the same with the tiles that are always read
      weighted_hit_rate   Σ_{Ŝ∩S} w / Σ_S w, of those chosen by score
      reuse               |S∩S′| / |S|, of those chosen by score, S′ being all that the last step
                          listed: a tile that was read as the newest one then counts

  Rates are 1 where there was nothing to choose.
  """
  assert plan.table is not None and plan.scores is not None
  assert guess.table is not None and guess.count is not None
  listed, hit = plan.table >= 0, among(plan.table, guess.table)
  chosen = listed & (plan.scores < jnp.inf)
  weight = weights(plan.scores, chosen, positive)

  def rate(found: Array, of: Array) -> Array:
    total = of.sum(-1)
    share = jnp.where(found, of, 0).sum(-1) / jnp.where(total > 0, total, 1)
    return jnp.where(total > 0, share, 1.0).astype(jnp.float32)

  return {
    "missed": (listed & ~hit).sum(-1, dtype=jnp.int32),
    "wasted": guess.count - hit.sum(-1, dtype=jnp.int32),
    "hit_rate": rate(hit, chosen),
    "hit_rate_forced": rate(hit, listed),
    "weighted_hit_rate": rate(hit, weight),
    "reuse": rate(among(plan.table, before), chosen),
  }
