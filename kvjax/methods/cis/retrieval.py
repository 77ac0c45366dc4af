"""Selection criteria: first tokens, the heaviest of the middle, newest ones (PrHS, §IV-A a)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.core.cache import Cache
from kvjax.core.context import At
from kvjax.core.plan import Plan, Window
from kvjax.ops import attention, slot_shards

NOWHERE = jnp.iinfo(jnp.int32).max  # after all positions


class Budget(NamedTuple):
  """Tokens of the three groups: C_sink first ones, k of the middle, C_local newest ones."""

  sinks: int
  k: int
  local: int


class Retrieval(NamedTuple):
  """S*_t of each unit. Units that share hold anything.

  Attributes:
    found: int32 [B, K, U, f], the heaviest tokens of the middle by position, −1 after them.
    weight: float32 [B, K, U, f], theirs, on any scale that keeps their order.
  """

  found: Array
  weight: Array


def log_weights(
  at: At, cache: Cache, q: Float[Array, "B K G H"], visible: Plan
) -> tuple[Float[Array, "B K G S"], Bool[Array, "B K S"]]:
  """ln A_i of every slot (Eq. 2), −∞ where it is out of sight; and which are in sight.

  Logarithms of small weights still have an order where the weights are all 0.
  """
  now = (cache.seen - 1)[:, None]
  keys, window = cache.slots["k"], visible.window
  logits = attention.windowed_logits(at, q[:, :, :, None], now, keys, cache.pos, window)
  here = slot_shards.part(at, cache, visible)
  sees = attention.seen(here, cache.pos, jnp.arange(cache.size, dtype=jnp.int32))
  logits = jnp.where(sees[:, :, None], logits[:, :, :, 0], -jnp.inf)
  return slot_shards.log_softmax(at, logits), sees


def retrieve(
  at: At, cache: Cache, q: Float[Array, "B K G H"], visible: Plan, budget: Budget
) -> Retrieval:
  """S*_t: the k tokens of the middle with the largest weight; of equal ones the first.

  A KV head that decides as one takes the mean weight of its query heads.
  """
  weight, sees = log_weights(at, cache, q, visible)
  if cache.heads["anchor"].shape[3] < q.shape[2]:
    weight = jax.nn.logsumexp(weight, 2, keepdims=True)  # of the mean, up to a constant
  place = slot_shards.first(at, cache.size) + jnp.arange(cache.size, dtype=jnp.int32)
  place = in_middle(cache, jnp.where(sees, place, -1)[:, :, None], budget)
  weight = jnp.where(place >= 0, weight, -jnp.inf)
  best, index = slot_shards.top_k(at, weight, budget.k)
  index = jnp.where(best > -jnp.inf, index, NOWHERE)
  index, best = jax.lax.sort((index, best), num_keys=1)
  return Retrieval(jnp.where(index == NOWHERE, -1, index), best)


def critical_set(
  cache: Cache, chosen: Int[Array, "B K U W"], window: Window | None, budget: Budget
) -> tuple[Int[Array, "B K X"], Int[Array, "B K"]]:
  """C_t, table and count: first tokens, the newest backwards, then those chosen of the middle."""
  chosen = in_middle(cache, chosen, budget)
  always = _always(cache, budget)
  table = jnp.concatenate([always, chosen.reshape(*chosen.shape[:2], -1)], -1)
  if window is not None:
    table = jnp.where(window.sees(table)[:, :, 0], table, -1)
  return distinct(table)


def in_middle(cache: Cache, token: Int[Array, "B K U X"], budget: Budget) -> Int[Array, "B K U X"]:
  """Tokens in [C_sink, n − C_local); −1 in place of the others."""
  end = (cache.seen - budget.local)[:, None, None, None]
  return jnp.where((token >= budget.sinks) & (token < end), token, -1)


def _always(cache: Cache, budget: Budget) -> Int[Array, "B K X"]:
  """First tokens, then the newest backwards, none twice."""
  n = cache.seen[:, None]
  first = jnp.arange(budget.sinks, dtype=jnp.int32)
  newest = n - 1 - jnp.arange(budget.local, dtype=jnp.int32)
  newest = jnp.where(newest >= budget.sinks, newest, -1)
  both = jnp.concatenate([jnp.where(first < n, first, -1), newest], -1)[:, None]
  return jnp.broadcast_to(both, (*cache.pos.shape[:2], both.shape[-1]))


def distinct(table: Int[Array, "*heads W"]) -> tuple[Int[Array, "*heads W"], Int[Array, "*heads"]]:
  """The table without repetitions and holes (−1), first occurrences in their order; and its count.

  Entries after the count are −1.
  """
  width = table.shape[-1]
  order = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), table.shape)
  token, order = jax.lax.sort((table, order), num_keys=2)
  again = jnp.concatenate(
    [jnp.zeros_like(token[..., :1], bool), token[..., 1:] == token[..., :-1]], -1
  )
  drop = again | (token < 0)
  order = jnp.where(drop, width, order)
  _, token = jax.lax.sort((order, jnp.where(drop, -1, token)), num_keys=1)
  return token, (~drop).sum(-1, dtype=jnp.int32)
