"""ART's walk: tile by tile in a given order, until the output has stopped moving (§3, Alg. 1)."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.core import slots
from kvjax.core.cache import Cache
from kvjax.core.context import At
from kvjax.core.plan import Attended, Plan
from kvjax.ops import attention, mass_bound
from kvjax.ops.decode import beyond_codes, beyond_kernel, over_codes
from kvjax.ops.table import choose, kernel
from kvjax.primitives import softmax_state
from kvjax.primitives.softmax_state import State
from kvjax.primitives.trees import pytree

LARGEST_TILE = 256  # that the kernel takes
PROBES = 32  # dimensions of the output that a strided probe looks at


@dataclasses.dataclass(frozen=True)
class Stop:
  """When a walk ends; static.

  Attributes:
    tau, phi, patience, certify: as in `ART`.
    full: whether the probe is the whole output.
    per_head: whether each query head stops by itself.
  """

  tau: float | int
  phi: float | int
  patience: float | int
  full: bool
  per_head: bool
  certify: float | None

  def looks_at(self, o: Float[Array, "B K G H"]) -> Float[Array, "B K G P"]:
    """x = Probe(o): the dimensions ⌊i·H/32⌋, i < 32; all where there are no more."""
    size = o.shape[-1]
    if self.full or size <= PROBES:
      return o
    return o[..., [i * size // PROBES for i in range(PROBES)]]

  def is_stable(self, new: Float[Array, "B K G P"], old: Array) -> Bool[Array, "B K G"]:
    """d_scale < τ and d_direction < φ; a probe of norm 0, the first one too, is not (§3.2)."""
    scale = jnp.linalg.norm(new - old, axis=-1)  # ‖x(t) − x(t−1)‖₂
    norms = jnp.linalg.norm(new, axis=-1) * jnp.linalg.norm(old, axis=-1)
    cosine = (new * old).sum(-1) / jnp.where(norms > 0, norms, 1.0)
    return (norms > 0) & (scale < self.tau) & (1 - cosine < self.phi)


@pytree("direct")
@dataclasses.dataclass(frozen=True)
class Order:
  """In which order tiles are walked.

  Attributes:
    plan: what is walked, with a table; its pinned entries are never skipped.
    unread: for a certificate, the `unread_mass` after each tile of the order.
    direct: whether the table has whole tiles, newest first after the pinned ones, so that a kernel
      can do without it.
    ring: int32 [B, K, 2], the slots that such an order goes round; None: it begins at the end of
      what is cached.
  """

  plan: Plan
  unread: Array | None = None
  direct: bool = False
  ring: Array | None = None


@pytree()
@dataclasses.dataclass(frozen=True)
class Walked:
  """What is known of a walk beside its output.

  Attributes:
    tiles: int32 [B, K, G], tiles with a key that each query head took.
  """

  tiles: Array


def walk(
  at: At,
  cache: Cache,
  order: Order,
  q: Float[Array, "B K G H"],
  tile: int,
  splits: int,
  stop: Stop,
) -> Attended:
  """Algorithm 1 for all heads at once, its walks joined; the memo is `Walked`.

  Split s of P walks tiles s, s + P, … of the order. With a certificate, which is that of the query
  in the dtype of the keys, q is rounded first; it proves what comes of numbers, not of codes.
  """
  if stop.certify is not None:
    order = dataclasses.replace(order, plan=dataclasses.replace(order.plan, codes=None))
  run = _kernel(at, cache, order.plan, q, tile)
  if run is not None:
    return _walk_by(run, at, cache, order, q, tile, splits, stop)
  if stop.certify is not None:
    q = q.astype(cache.slots["k"].dtype)
  plan = order.plan
  assert plan.table is not None
  logits = None
  if plan.needs.logits:
    logits = jnp.full((*cache.pos.shape, q.shape[2]), -jnp.inf)
  walks: list[_Walk] = []
  for first in range(splits):
    steps = jnp.arange(first, -(-plan.table.shape[-1] * plan.unit // tile), splits, dtype=jnp.int32)
    walks.append(_walk_tiles(at, cache, order, q, tile, steps, splits, stop, logits))
    logits = walks[-1].logits
  state = functools.reduce(softmax_state.merge, (w.state for w in walks))
  taken = Walked(sum((w.tiles for w in walks[1:]), walks[0].tiles))
  visited = sum((w.keys for w in walks[1:]), walks[0].keys).max(-1)
  if logits is None:
    return Attended(state, None, None, visited, memo=taken)
  every = jnp.broadcast_to(jnp.arange(cache.size, dtype=jnp.int32), cache.pos.shape)
  return Attended(state, jnp.moveaxis(logits, 3, 2), every, visited, memo=taken)


def filling_splits(rows: int, length: int, tile: int) -> int:
  """Splits of walks over `length` slots with which `rows` heads fill the default device."""
  quiet = jax.default_backend() != "gpu"
  return kernel("art_splits", "pallas")(rows, length, tile, interpret=quiet)


# ---- the reference


@pytree()
@dataclasses.dataclass(frozen=True)
class _Walk:
  """A walk between two tiles, per query head [B, K, G].

  Attributes:
    state: softmax state of the tiles read.
    calm: c, stable tiles in a row.
    going: whether it goes on.
    tiles, keys: steps taken (tiles with a key in them), and keys read.
    logits: of the keys read, float32 [B, K, S, G], −∞ elsewhere; None where they are not asked for.
  """

  state: State
  calm: Array
  going: Array
  tiles: Array
  keys: Array
  logits: Array | None


def _walk_tiles(
  at: At,
  cache: Cache,
  order: Order,
  q: Float[Array, "B K G H"],
  tile: int,
  tiles: Int[Array, " T"],
  stride: int,
  stop: Stop,
  logits: Float[Array, "B K S G"] | None,
) -> _Walk:
  """One walk over some tiles of the order, `stride` apart; `logits` are those read so far."""
  heads, plan = q.shape[:3], order.plan
  kept = -(-plan.pinned * plan.unit // tile)  # tiles that are never skipped

  def step(walk: _Walk, t: Array) -> tuple[_Walk, None]:
    logits, v, slot, ok = _load(at, cache, plan, q, tile, t)
    new = softmax_state.merge(walk.state, softmax_state.of_logits(logits, v))
    stable = stop.is_stable(stop.looks_at(new.o), stop.looks_at(walk.state.o))
    counts = ok.any(-1)[..., None] & walk.going
    calm = jnp.where(counts, jnp.where(stable, walk.calm + 1, 0), walk.calm)
    done = calm >= stop.patience
    if stop.certify is not None:
      assert order.unread is not None
      done = mass_bound.proven(order.unread[..., t + 1], new.lse, stop.certify)
    if not stop.per_head:
      done = done.all(-1, keepdims=True)
    seen = walk.logits
    if seen is not None:
      shown = jnp.where(counts[..., None], logits, -jnp.inf)
      seen = slots.put(seen, slot, jnp.moveaxis(shown, 2, 3))
    return _Walk(
      state=jax.tree.map(lambda a, b: _where(counts, a, b), new, walk.state),
      calm=calm,
      going=walk.going & ~(done & (t + stride >= kept)),
      tiles=walk.tiles + counts,
      keys=walk.keys + jnp.where(counts, ok.sum(-1, dtype=jnp.int32)[..., None], 0),
      logits=seen,
    ), None

  zero = jnp.zeros(heads, jnp.int32)
  empty = softmax_state.empty(heads, q.shape[-1])
  start = _Walk(empty, calm=zero, going=zero == 0, tiles=zero, keys=zero, logits=logits)
  return jax.lax.scan(step, start, tiles)[0]


def _load(
  at: At, cache: Cache, plan: Plan, q: Float[Array, "B K G H"], tile: int, t: Int[Array, ""]
) -> tuple[Float[Array, "B K G T"], Array, Int[Array, "B K T"], Bool[Array, "B K T"]]:
  """Logits, values and slots of the keys of tile t, and which of them the query sees."""
  assert plan.table is not None and plan.count is not None
  key = t * tile + jnp.arange(tile, dtype=jnp.int32)
  entry = jnp.take(plan.table, key // plan.unit, 2, mode="clip")
  listed = (key // plan.unit < plan.count[..., None]) & (entry >= 0)
  slot = jnp.where(listed, entry * plan.unit + key % plan.unit, -1)
  full = jnp.full_like(plan.count, tile)
  view = attention.read(cache, dataclasses.replace(plan, table=slot, count=full, unit=1))
  ok, qpos = attention.seen(plan, view), (cache.seen - 1)[:, None]
  x = attention.windowed_logits(at, q[:, :, :, None], qpos, view.k, view.pos, plan.window)
  x = x[:, :, :, 0]
  x = jnp.where(ok[:, :, None], x, -jnp.inf)
  v = jnp.where(ok[..., None], view.v, 0)  # empty slots may hold NaN
  return x, v, view.slot, ok


def _where(ok: Bool[Array, "B K G"], new: Array, old: Array) -> Array:
  return jnp.where(ok.reshape(ok.shape + (1,) * (new.ndim - 3)), new, old)


# ---- the kernel


def _kernel(at: At, cache: Cache, plan: Plan, q: Array, tile: int) -> Callable | None:
  """The kernel, where it does what the method needs; None: the reference."""
  operation = "art" if plan.codes is None else "art_quantised"
  at = at if plan.codes is None else over_codes(at, plan.codes)
  impl = choose(operation, at.env.impl, q, cache.slots["k"])
  if impl == "reference":
    return None
  beyond = beyond_kernel(plan, impl, logits=False, turned=False)
  if plan.codes is not None:
    beyond = beyond or beyond_codes(plan.codes)
  if tile > LARGEST_TILE:
    beyond = f"walks tiles of {tile}; the {impl!r} kernel takes up to {LARGEST_TILE}"
  if beyond and at.env.impl == "auto":
    return None
  run = kernel(operation, impl)
  if beyond:
    raise NotImplementedError(f"{operation}: {at.name} {beyond}")
  return run


def _walk_by(
  run: Callable,
  at: At,
  cache: Cache,
  order: Order,
  q: Float[Array, "B K G H"],
  tile: int,
  splits: int,
  stop: Stop,
) -> Attended:
  """`walk` by its kernel."""
  k, v, plan, coded = cache.slots["k"], cache.slots["v"], order.plan, {}
  query = q.astype(k.dtype)
  if plan.codes is not None:
    query, k, v = plan.codes.q, plan.codes.k, plan.codes.v
    coded = {"per_slot": plan.codes.per_slot, "bits": plan.codes.bits}
  assert plan.table is not None and plan.count is not None
  state, out, walked = run(
    query,
    k,
    v,
    None if order.direct else plan.table,
    None if order.direct else plan.count,
    plan.span.start,
    plan.span.stop,
    unit=plan.unit,
    sinks=plan.span.sinks,
    tile=tile,
    tau=stop.tau,
    phi=stop.phi,
    patience=stop.patience,
    full=stop.full,
    per_head=stop.per_head,
    kept=-(-plan.pinned * plan.unit // tile),
    splits=splits,
    unread=order.unread,
    log_ratio=None if stop.certify is None else mass_bound.log_ratio(stop.certify),
    ring=order.ring,
    seen=None if order.ring is None else cache.seen,
    soft_cap=at.env.soft_cap,
    **coded,
  )
  if plan.codes is not None:
    state, _ = plan.codes.of_keys(state)
  tiles, visited = read_by(plan, cache.size, walked, tile)
  return Attended(state, None, None, visited, out.astype(q.dtype), memo=Walked(tiles))


def read_by(
  plan: Plan, size: int, walked: Int[Array, "B K P G"], tile: int
) -> tuple[Int[Array, "B K G"], Int[Array, "B K"]]:
  """Tiles with a key that each query head took, and slots that any of a KV head's read.

  Split s of P has walked its first `walked` tiles s, s + P, … of the plan's table.
  """
  assert plan.table is not None and plan.count is not None
  tiles, splits = -(-plan.table.shape[-1] * plan.unit // tile), walked.shape[2]
  key = jnp.arange(tiles * tile, dtype=jnp.int32)
  entry = jnp.take(plan.table, key // plan.unit, 2, mode="fill", fill_value=-1)
  slot = entry * plan.unit + key % plan.unit
  real = (key // plan.unit < plan.count[..., None]) & (entry >= 0) & (slot < size)
  held = (real & plan.span.holds(slot)).reshape(*slot.shape[:2], tiles, tile)
  held = held.sum(-1, dtype=jnp.int32)[:, :, None]  # keys of every tile
  t = jnp.arange(tiles, dtype=jnp.int32)
  read = t // splits < jnp.moveaxis(walked, 2, 3)[..., t % splits]
  return (read & (held > 0)).sum(-1, dtype=jnp.int32), jnp.where(read, held, 0).sum(-1).max(-1)
