"""CIS: which heads share an earlier retrieval, and whose (§IV-A).

Between its queries of the block and its cache entries a step of CIS has a dozen small operations,
two of them sorts and three scatters, each of which would be a launch of its own. It takes three
small launches around retrieval and attention: this one, `cis.listed` and `cis.note`.

Cosines with the block's queries (Eq. 12), head by head (J = G) or of the group's mean (J = 1), the
most recent that is alike, and whose retrieval it used; a row that shares with none may look at its
keys at once, as `key_logits` does.

Bytes: the block's queries, 4 s J H per row, and the keys of rows that look; else next to nothing.

Grid: one program per row, or with keys as many as `key_logits` cuts them for.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kvjax.kernels.common import backend, tiling
from kvjax.kernels.common.backend import by_row
from kvjax.kernels.common.split_k import columns_of
from kvjax.kernels.selection.key_weights import STAGES, cut, score_keys

WARPS = 4
AHEAD = 4  # query heads whose queries are held at once


class _Keys(NamedTuple):
  """Operands of rows that share with none: queries in the dtype of the keys, keys, their stop."""

  q: Any
  k: Any
  stop: Any


def _kernel(
  q_ref: Any,
  queries_ref: Any,
  anchor_ref: Any,
  step_ref: Any,
  seen_ref: Any,
  keys: _Keys | None,
  query_ref: Any,
  found_ref: Any,
  retrieves_ref: Any,
  steps_ref: Any,
  first_ref: Any | None,
  logits_refs: tuple[Any, ...] | None,
  *,
  tau: float,
  alone: bool,
  first: Callable[[Array], Array] | None,
  score: Callable[..., None] | None,
) -> None:
  """q [R, G, H], queries [R, s, J, H], anchor [R, s, U], step, seen [B](, q [R, G, H], keys
  [R, S, H], stop [B]) -> query [R, J, H] of norm 1, anchor, retrieves [R, U], step [R]
  (, first [B])(, logits [R, G, S], m, l [R, G, C]). `alone`: U = G. J = 1: a group's mean query.
  `score`: `score_keys`, where keys are given.
  """
  rows = queries_ref.shape[0]
  row, piece = pl.program_id(0), pl.program_id(1)
  shared = rows // step_ref.shape[0]
  step = step_ref[row // shared]
  steps_ref[row] = step
  start = jnp.int32(0)
  if first is not None and first_ref is not None:
    start = first(seen_ref[row // shared])

    @pl.when(row % shared == 0)
    def _():
      first_ref[row // shared] = start

  looks = decide(
    row, step, q_ref, queries_ref, anchor_ref, query_ref, found_ref, retrieves_ref, tau, alone
  )
  if keys is not None and score is not None:
    stop = keys.stop[row // shared]
    pl.when(looks)(lambda: score(row, piece, (keys.q, keys.k), logits_refs, start, stop, stop))


def decide(
  row: Array,
  step: Array,
  q_ref: Any,
  queries_ref: Any,
  anchor_ref: Any,
  query_ref: Any,
  found_ref: Any,
  retrieves_ref: Any,
  tau: float,
  alone: bool,
) -> Array:
  """Writes a row's queries of norm 1 and with whom its units share; whether any does with none.

  Refs and `alone` as above.
  """
  _, block, judged, head_dim = queries_ref.shape
  groups = q_ref.shape[1]
  column, turn = jnp.arange(columns_of(head_dim)), jnp.arange(pl.next_power_of_2(block))
  inside, earlier = column < head_dim, (turn < block) & (turn < step)

  def find(unit: int, alike: Array) -> Array:
    """Writes whose retrieval a unit uses: of those alike the latest's, or else its own."""
    latest = jnp.where(alike, turn, -1).max()
    anchor = anchor_ref[row, jnp.maximum(latest, 0), unit]
    found_ref[row, unit] = jnp.where(latest >= 0, anchor, step)
    retrieves_ref[row, unit] = (latest < 0).astype(jnp.int32)
    return latest < 0

  def load(g: int) -> Array:
    """A query of this step."""
    return backend.load(q_ref, row, g, column, mask=inside).astype(jnp.float32)

  def load_others(g: int) -> Array:
    """Those of the block."""
    mask = earlier[:, None] & inside[None, :]
    return backend.load(queries_ref, row, turn[:, None], g, column[None, :], mask=mask)

  def compare(g: int, q: Array, others: Array) -> Array:
    """Writes a query of norm 1; the block's that are alike."""
    backend.store(query_ref, row, g, column, value=q, mask=inside)
    cosine = (others * q[None, :]).sum(axis=1)  # Eq. 12, of norms 1
    return earlier & (jnp.minimum(cosine, 1.0) > tau)

  if judged < groups:
    others = load_others(0)
    mean = functools.reduce(jnp.add, (_unit(load(g)) for g in range(groups))) / groups
    return find(0, compare(0, _unit(mean), others))
  every, looks = earlier, jnp.bool_(False)
  ahead: list[tuple[Array, Array]] = []
  for g in range(groups):
    if not ahead:  # those of a few heads at once, as their memory is waited for
      ahead = [(load(i), load_others(i)) for i in range(g, min(g + AHEAD, groups))]
    q, others = ahead.pop(0)
    alike = compare(g, _unit(q), others)
    if alone:
      looks |= find(g, alike)
    every = every & alike
  if not alone:
    looks = find(0, every)
  return looks


def _unit(q: Array) -> Array:
  """q / ‖q‖ [H]; 0 stays 0."""
  q = q / jnp.maximum(jnp.abs(q).max(), 1e-30)  # its square must not overflow
  return q / jnp.maximum(jnp.sqrt((q * q).sum()), 1e-30)


def anchors(
  q: Float[Array, "B K G H"],
  queries: Float[Array, "B K s J H"],
  anchor: Int[Array, "B K s U"],
  step: Int[Array, " B"],
  seen: Int[Array, " B"],
  *,
  tau: float,
  first: Callable[[Array], Array] | None = None,
  keys: tuple[Array, Array] | None = None,
  span_sinks: int = 0,
  soft_cap: float | None = None,
  interpret: bool | None = None,
) -> tuple[Array, ...]:
  """The queries at norm 1, the step whose retrieval each unit uses, and whether it is its own.

  Args:
    q: queries of the newest token, rotated.
    queries: those of the block, float32, of norm 1; J = 1: their group's mean decides.
    anchor: the step whose retrieval each of them used.
    step: of the block, this one's.
    seen: cached tokens of every row.
    tau: the cosine that all queries of a unit must exceed, or their mean: a KV head (U = 1) or a
      query head.
    first: the first token in sight as a function of `seen`, int32 scalars.
    keys: cached keys [B, K, S, H] and occupied slots of every row, int32 [B]: rows that share with
      none look at them.
    span_sinks: first tokens that are in sight whatever `first` says.
    soft_cap: as in `key_logits`.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.

  Returns:
    float32 [B, K, J, H]; int32 [B, K, U]; int32 [B, K, U], 1 where a unit shares with none; the
    step of every KV head, int32 [B, K]; with `first` what it gives, int32 [B]; and with `keys` the
    three results of `key_logits`, which hold anything in rows that share.
  """
  batch, heads, _, judged, head_dim = queries.shape
  groups = q.shape[2]
  rows, units = batch * heads, anchor.shape[3]
  floats = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
  ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)

  pieces, looked, score, logits = 1, None, None, None
  if keys is not None:
    k, stop = keys
    tile, steps = cut(q, k, None, None)
    pieces = pl.cdiv(k.shape[2], tile * steps)
    looked = _Keys(by_row(q.astype(k.dtype)), by_row(k), stop)
    how: dict[str, Any] = {"tile": tile, "steps": steps, "stride": 1, "width": 1}
    how |= {"span_sinks": span_sinks, "scale": tiling.Scale.of(head_dim, None, soft_cap)}
    score = functools.partial(score_keys, **how)
    logits = tuple(floats((rows, groups, size)) for size in (k.shape[2], pieces, pieces))
  query, found, retrieves, steps_of, start, logits = backend.call(
    functools.partial(_kernel, tau=tau, alone=units == groups, first=first, score=score),
    *(by_row(q), by_row(queries), by_row(anchor), step, seen, looked),
    grid=(rows, pieces),
    out=[
      floats((rows, judged, head_dim)),
      *(ints((rows, units)), ints((rows, units)), ints((rows,))),
      None if first is None else ints((batch,)),
      logits,
    ],
    warps=WARPS,
    stages=STAGES,
    name="cis_anchors",
    interpret=interpret,
  )
  more = [] if start is None else [start]
  if logits is not None:
    more += [x.reshape(*q.shape[:3], -1) for x in logits]
  shape = batch, heads, units
  made = found.reshape(shape), retrieves.reshape(shape), steps_of.reshape(batch, heads)
  return query.reshape(batch, heads, judged, head_dim), *made, *more
