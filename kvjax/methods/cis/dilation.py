"""Neighboring dilation: what later queries share has neighbours (PrHS, §IV-A c, Eq. 13)."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.core.cache import Cache
from kvjax.core.plan import Attended
from kvjax.methods.cis.retrieval import Retrieval, distinct
from kvjax.methods.cis.similarity import HELD, Choice


def dilated(
  found: Int[Array, "B K U f"],
  weight: Float[Array, "B K U f"],
  widest: int,
  *,
  sinks: int,
  heaviest: int,
  radius: int,
) -> Int[Array, "B K U W"]:
  """Ŝ_t: a retrieval and the neighbours of its heaviest tokens (Eq. 13), none twice, then −1.

  What lies in the middle of now is for later queries to say, all but the first tokens.
  """
  order = jnp.argsort(-weight, -1, stable=True)[..., :heaviest]
  heavy = jnp.take_along_axis(found, jnp.sort(order, -1), -1)[..., None, :]
  away = jnp.array([d for r in range(1, radius + 1) for d in (-r, r)], jnp.int32)
  near = heavy + away[:, None]  # the nearest first
  near = jnp.where((heavy >= 0) & (near >= sinks), near, -1)
  both = jnp.concatenate([found, near.reshape(*found.shape[:3], -1)], -1)
  missing = max(0, widest - both.shape[-1])
  both = jnp.pad(both, [(0, 0)] * 3 + [(0, missing)], constant_values=-1)
  return distinct(both)[0][..., :widest]


def note(
  cache: Cache, choice: Choice, own: Retrieval, attended: Attended, **dilation: int
) -> Cache:
  """The cache that knows of this step, in rows that count; its retrieval dilated."""
  queries, anchor, retrieved = (cache.heads[name] for name in HELD)
  step, block = cache.rows["step"], queries.shape[2]
  counted = jnp.ones_like(step, bool) if attended.counted is None else attended.counted
  row, head, unit = jnp.indices(choice.anchor.shape, jnp.int32, sparse=True)
  place = jnp.where(counted, step, block)[:, None, None]
  found = jnp.where(choice.retrieves > 0, place, block)
  noted = {
    "queries": queries.at[row[..., 0], head[..., 0], place[..., 0]].set(choice.query, mode="drop"),
    "anchor": anchor.at[row, head, place, unit].set(choice.anchor, mode="drop"),
  }
  near = dilated(own.found, own.weight, retrieved.shape[-1], **dilation)
  noted["retrieved"] = retrieved.at[row, head, found, unit].set(near, mode="drop")
  return cache.put(heads=noted, rows={"step": jnp.where(counted, (step + 1) % block, step)})
