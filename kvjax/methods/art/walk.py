"""Algorithm 1: a walk over tiles that ends once the output has stopped moving (ART, §3.2)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.core import slots
from kvjax.core.cache import Cache
from kvjax.core.context import At
from kvjax.methods.art import certificate
from kvjax.methods.art.order import Order, tiles_of
from kvjax.ops import attention
from kvjax.primitives import softmax_state
from kvjax.primitives.softmax_state import State
from kvjax.primitives.trees import pytree

PROBES = 32  # m, dimensions of the output that a strided probe looks at
NEVER = 1 << 30  # a patience that no walk exhausts


@dataclasses.dataclass(frozen=True)
class Stop:
  """Condition that ends a walk; static.

  Attributes:
    tau, phi, patience, relative, certify: as in `ART`.
    full: whether the probe is the whole output.
    per_head: whether each query head stops by itself.
  """

  tau: float | int
  phi: float | int
  patience: float | int
  relative: bool
  full: bool
  per_head: bool
  certify: float | None

  def probe(self, o: Float[Array, "B K G H"]) -> Float[Array, "B K G P"]:
    """x = Probe(o): the dimensions ⌊i·H/32⌋, i < 32; all where there are no more."""
    size = o.shape[-1]
    if self.full or size <= PROBES:
      return o
    return o[..., [i * size // PROBES for i in range(PROBES)]]

  def stable(self, o: Float[Array, "B K G H"], before: Float[Array, "B K G H"]) -> Array:
    """True where O(t) has moved little since O(t − 1); a probe of norm 0 is not stable."""
    x, last = self.probe(o), self.probe(before)  # 6: x(t), x(t − 1)
    scale = jnp.linalg.norm(x - last, axis=-1)  # 7: d_scale (Eq. 2)
    norm = jnp.linalg.norm(x, axis=-1)
    norms = norm * jnp.linalg.norm(last, axis=-1)
    cosine = (x * last).sum(-1) / jnp.where(norms > 0, norms, 1.0)  # 8 (Eq. 2)
    limit = self.tau * norm if self.relative else self.tau
    return (norms > 0) & (scale < limit) & (1 - cosine < self.phi)  # 9: 1 − cos = d_direction


@pytree()
@dataclasses.dataclass(frozen=True)
class Walk:
  """A walk between two tiles, per query head [B, K, G].

  Attributes:
    state: softmax state of the tiles read; its o is O(t), normalised.
    calm: c(t), stable tiles in a row.
    going: whether it goes on.
    tiles, keys: steps taken (tiles with a key in them), and keys read.
    lse: ln of the mass of each tile read, float32 [B, K, G, W] in visiting order; −∞ elsewhere.
    logits: of the keys read, float32 [B, K, S, G], −∞ elsewhere; None where they are not asked for.
  """

  state: State
  calm: Array
  going: Array
  tiles: Array
  keys: Array
  logits: Array | None
  lse: Array


def walk(
  at: At,
  cache: Cache,
  order: Order,
  q: Float[Array, "B K G H"],
  split: int,
  splits: int,
  stop: Stop,
  logits: Float[Array, "B K S G"] | None,
) -> Walk:
  """Algorithm 1, its lines by number, for all heads at once; one that has stopped keeps its state.

  Tiles t are split, split + splits, … of the order; `logits` are those that were read before. The
  first probe, and one of norm 0, is not stable. A tile without a key is no step.
  """

  def step(walk: Walk, t: Array) -> tuple[Walk, Array]:
    logits, v, slot, ok = load(at, cache, order, q, t)  # 4
    own = softmax_state.of_logits(logits, v)
    new = softmax_state.merge(walk.state, own)  # 5: O(t)
    stable = stop.stable(new.o, walk.state.o)  # 6–9
    counts = ok.any(-1)[..., None] & walk.going
    calm = jnp.where(counts, jnp.where(stable, walk.calm + 1, 0), walk.calm)  # 10–13: c(t) (Eq. 3)
    done = calm >= stop.patience  # 14
    if stop.certify is not None:
      assert order.unread is not None
      done = certificate.proven(order.unread[..., t + 1], new.lse, stop.certify)
    if not stop.per_head:
      done = done.all(-1, keepdims=True)
    if order.whole is not None:
      done = done & ~order.whole[:, None, None]
    seen = walk.logits
    if seen is not None:
      shown = jnp.where(counts[..., None], logits, -jnp.inf)
      seen = slots.put(seen, slot, jnp.moveaxis(shown, 2, 3))
    return Walk(
      state=jax.tree.map(lambda a, b: _where(counts, a, b), new, walk.state),
      calm=calm,
      going=walk.going & ~(done & (t + splits >= order.kept)),  # 15: break
      tiles=walk.tiles + counts,
      keys=walk.keys + jnp.where(counts, ok.sum(-1, dtype=jnp.int32)[..., None], 0),
      logits=seen,
      lse=walk.lse,
    ), jnp.where(counts, own.lse, -jnp.inf)

  tiles = jnp.arange(split, tiles_of(order.plan, cache.size, order.tile), splits, dtype=jnp.int32)
  zero = jnp.zeros(q.shape[:3], jnp.int32)
  empty = softmax_state.empty(zero.shape, q.shape[-1])
  start = Walk(empty, zero, zero == 0, tiles=zero, keys=zero, logits=logits, lse=empty.m)  # 1, 2
  found, lse = jax.lax.scan(step, start, tiles)  # 3, 17, 18
  return dataclasses.replace(found, lse=jnp.moveaxis(lse, 0, -1))


def load(
  at: At, cache: Cache, order: Order, q: Float[Array, "B K G H"], t: Int[Array, ""]
) -> tuple[Float[Array, "B K G T"], Array, Int[Array, "B K T"], Bool[Array, "B K T"]]:
  """Logits, values and slots of the keys of tile t, and which of them the query sees."""
  plan, tile = order.plan, order.tile
  assert plan.table is not None and plan.count is not None
  key = t * tile + jnp.arange(tile, dtype=jnp.int32)
  entry = jnp.take(plan.table, key // plan.unit, 2, mode="clip")
  listed = (key // plan.unit < plan.count[..., None]) & (entry >= 0)
  slot = jnp.where(listed, entry * plan.unit + key % plan.unit, -1)
  full = jnp.full_like(plan.count, tile)
  view = attention.read(cache, dataclasses.replace(plan, table=slot, count=full, unit=1))
  ok, qpos = attention.seen(plan, view.pos, view.slot), (cache.seen - 1)[:, None]
  x = attention.windowed_logits(at, q[:, :, :, None], qpos, view.k, view.pos, plan.window)
  x = x[:, :, :, 0]
  x = jnp.where(ok[:, :, None], x, -jnp.inf)
  v = jnp.where(ok[..., None], view.v, 0)  # empty slots may hold NaN
  return x, v, view.slot, ok


def _where(ok: Bool[Array, "B K G"], new: Array, old: Array) -> Array:
  return jnp.where(ok.reshape(ok.shape + (1,) * (new.ndim - 3)), new, old)
