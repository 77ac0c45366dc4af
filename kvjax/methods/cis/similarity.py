"""Similarity criteria: a query shares with the latest one alike of its block (PrHS, §IV-A b).

On the heads shelf a cache holds what is known of the block: "queries" [B, K, s, J, H] of norm 1,
"anchor" [B, K, s, U], the step whose retrieval each used, and "retrieved" [B, K, s, U, W], dilated,
−1 = none, at the end; and on the rows shelf "step" [B], this one's. A KV head decides as one
(U = 1), or each of its query heads for itself (U = G). Queries are compared head by head (J = G),
or the mean of a group's (J = 1).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.core.cache import Cache

HELD = ("queries", "anchor", "retrieved")


class Choice(NamedTuple):
  """Choice of a step's queries: with whom they share.

  Attributes:
    query: float32 [B, K, J, H], what is compared, at norm 1.
    anchor: int32 [B, K, U], the step of the block whose retrieval is used: this one's where a unit
      retrieves.
    retrieves: int32 [B, K, U], 1 where a unit shares with none.
    step: int32 [B, K], this one, of the block.
  """

  query: Array
  anchor: Array
  retrieves: Array
  step: Array


def share(cache: Cache, q: Float[Array, "B K G H"], tau: float) -> Choice:
  """The latest earlier query j of the block with sim(i, j) > τ, and whose retrieval it used."""
  query, step = _unit(q), cache.rows["step"][:, None, None]
  queries, anchors, _ = (cache.heads[name] for name in HELD)
  if queries.shape[3] < q.shape[2]:
    query = _unit(query.mean(2, keepdims=True))  # Σ_g q_g/‖q_g‖, at norm 1
  similarity = (query[:, :, None] * queries).sum(-1)  # Eq. 12, [B, K, s, J]
  alike = jnp.minimum(similarity, 1.0) > tau  # rounding must not let 1 exceed τ = 1
  if anchors.shape[3] < q.shape[2]:
    alike = alike.all(-1, keepdims=True)
  earlier = jnp.arange(queries.shape[2], dtype=jnp.int32)[:, None]
  latest = jnp.where(alike & (earlier < step[..., None]), earlier, -1).max(2)  # j
  anchor = _of_step(anchors, latest)
  anchor = jnp.where(latest >= 0, anchor, step)
  steps = jnp.broadcast_to(step[..., 0], q.shape[:2])
  return Choice(query, anchor, (latest < 0).astype(jnp.int32), steps)


def chosen(cache: Cache, choice: Choice, found: Int[Array, "B K U f"]) -> Int[Array, "B K U W"]:
  """S_t of each unit: what it found itself, or what its anchor did, dilated (Def. 3.2)."""
  retrieved = cache.heads["retrieved"]
  missing = retrieved.shape[-1] - found.shape[-1]
  fresh = jnp.pad(found, [(0, 0)] * 3 + [(0, missing)], constant_values=-1)
  old = _of_step(retrieved, choice.anchor[..., None])
  return jnp.where(choice.retrieves[..., None] > 0, fresh, old)


def _unit(q: Float[Array, "B K G H"]) -> Float[Array, "B K G H"]:
  """q / ‖q‖, float32; 0 stays 0."""
  q = q.astype(jnp.float32)
  q = q / jnp.maximum(jnp.abs(q).max(-1, keepdims=True), 1e-30)  # its square must not overflow
  return q / jnp.maximum(jnp.linalg.norm(q, axis=-1, keepdims=True), 1e-30)


def _of_step(
  x: Int[Array, "B K s *unit"], step: Int[Array, "B K *#unit"]
) -> Int[Array, "B K *unit"]:
  """Notes of a step of the block; those of −1 are any."""
  return jnp.take_along_axis(x, step[:, :, None], 2, mode="clip")[:, :, 0]
