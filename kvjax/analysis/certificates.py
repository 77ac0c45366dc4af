"""Cost of a selection of keys, and the bounds on it that PrHS proves (§II-C, §VII, App. A-D).

Pure functions on the host, in float64, so that no rounding comes between a quantity and its bound.
Arrays are NumPy's or JAX's; leading axes are arbitrary. Keys count from 0, and logarithms are
natural. Where the paper's statement needs an assumption that models do not meet (unit queries,
constants that are given), this module has the form that holds for any input; where a closer bound
holds, it has that. No logits have a soft cap.
"""

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int
from scipy import special

Numbers = np.ndarray | jax.Array

RATES = np.geomspace(1e-6, 30.0, 400)  # λ that `fit_recency` tries, per token
ROUNDING = 1e-12


class Certificate(NamedTuple):
  """A quantity and the bound on it, float64, of one shape."""

  actual: np.ndarray
  bound: np.ndarray

  @property
  def holds(self) -> bool:
    """True if the bound holds everywhere, up to the rounding of float64."""
    return bool((self.actual <= self.bound + ROUNDING).all())


class Recency(NamedTuple):
  """Eq. 44: A_i ≤ κ·(1 − ρ)·ρ^(t − i) with ρ = e^−λ, for all i after the first tokens."""

  log_kappa: np.ndarray  # ln κ: κ itself can exceed float64
  rate: np.ndarray  # λ, per token


# ---- what was read


def retrieval_ratio(
  retrieved: Bool[Numbers, "steps L B *heads"], live: Bool[Numbers, "steps B"] | None = None
) -> float:
  """ρ̂: retrievals / (heads · layers · steps) (§V-A).

  Args:
    retrieved: which heads retrieved, as CIS reports it in every step and layer.
    live: rows that took part in each step; None: all.
  """
  return _mean_of_live(retrieved, live)


def tokens_per_head(
  visited: Int[Numbers, "steps L B K"], live: Bool[Numbers, "steps B"] | None = None
) -> float:
  """Average number of tokens that a KV head attended to (Tab. VI), of `visited` of every step."""
  return _mean_of_live(visited, live)


def _mean_of_live(x: Numbers, live: Numbers | None) -> float:
  x = np.asarray(x, np.float64)
  if live is None:
    return float(x.mean())
  rows, sizes = np.asarray(live, bool), (x.shape[0], x.shape[2])
  if rows.shape != sizes:
    raise ValueError(f"live: found shape {rows.shape}, expected {sizes}, steps and rows")
  rows = rows.reshape(len(x), 1, -1, *(1,) * (x.ndim - 3))
  return float(x.mean(where=np.broadcast_to(rows, x.shape)))


# ---- what was missed


def attention(
  q: Float[Numbers, "*#batch H"],
  k: Float[Numbers, "*#batch S H"],
  visible: Bool[Numbers, "*#batch S"] | None = None,
) -> Float[np.ndarray, "*out S"]:
  """A_i = softmax_i(q·k_i/√H) (Eq. 2) over the visible keys; 0 for the others."""
  q, k = _wide(q), _wide(k)
  logits = (k @ q[..., None])[..., 0] / np.sqrt(q.shape[-1])
  if visible is not None:
    logits = np.where(np.asarray(visible), logits, -np.inf)
  return special.softmax(logits, -1)


def heaviest(weight: Float[Numbers, "*batch S"], count: int) -> Bool[np.ndarray, "*batch S"]:
  """The oracle's set: the `count` keys of largest weight (Eq. 5), ties to the lowest position."""
  order = np.argsort(-_wide(weight), -1, kind="stable")
  return np.argsort(order, -1) < count


def overlap(
  chosen: Bool[Numbers, "*#batch S"], oracle: Bool[Numbers, "*#batch S"]
) -> Float[np.ndarray, "*out"]:
  """Share of the oracle's keys that were chosen (Fig. 4, 7); 1 where the oracle has none."""
  chosen, oracle = np.asarray(chosen), np.asarray(oracle)
  hits, size = (chosen & oracle).sum(-1), oracle.sum(-1)
  return np.where(size > 0, hits / np.maximum(size, 1), 1.0)


def dropped_mass(
  weight: Float[Numbers, "*#batch S"], chosen: Bool[Numbers, "*#batch S"]
) -> Float[np.ndarray, "*out"]:
  """δ = Σ A_i over the keys that were not chosen (Eqs. 3 and 18), without 1 − τ's cancellation."""
  return np.asarray(np.where(np.asarray(chosen), 0.0, _wide(weight)).sum(-1))


# ---- bounds


def information_bound(
  delta: Float[Numbers, "*batch"] | float, keys: int
) -> Float[np.ndarray, "*batch"]:
  """g(δ) = 2·[h_b(δ) + δ·ln n] nats, n = `keys` eligible ones (Eq. 4; the paper's L).

  For any law of contexts X: |I(X; T) − I(X; T_S)| ≤ g(δ), where T is the key that attention draws,
  T_S the one that it draws from the chosen keys, and δ the largest dropped mass of a context. This
  is the index channel of Remark 1; its information may rise as well as fall.
  """
  delta = np.clip(_wide(delta), 0.0, 1.0)
  entropy = special.entr(delta) - special.xlog1py(1 - delta, -delta)
  return np.asarray(2 * (entropy + delta * np.log(keys)))


def shift_bound(change: Float[Numbers, "*batch S"]) -> Float[np.ndarray, "*batch"]:
  """tanh(osc/4) ≥ ½·‖A(x + d) − A(x)‖₁ for any logits x: osc = max d − min d, of their change d.

  A weight is multiplied by e^d_i / Σ A_j e^d_j. Among changes of one oscillation most moves where d
  has two values, and 1 / (1 + e^(osc/2)) of the mass has the larger: then the two laws mirror each
  other. Lemma 6 has osc/2 for it.

  Args:
    change: d; keys that are out of sight have NaN.
  """
  change = _wide(change)
  return np.asarray(np.tanh((np.nanmax(change, -1) - np.nanmin(change, -1)) / 4))


def query_drift(
  q: Float[Numbers, "*#batch H"],
  anchor: Float[Numbers, "*#batch H"],
  k: Float[Numbers, "*#batch S H"],
  visible: Bool[Numbers, "*#batch S"] | None = None,
  *,
  in_advance: bool = False,
) -> Certificate:
  """Δ_att = ‖A(q′) − A(q)‖₁ ≤ 2·tanh(osc/4), osc over the keys of (q′ − q)·k_i/√H (`shift_bound`).

  That reads every key. What is known in advance is osc ≤ 2·‖q′ − q‖·max_i ‖k_i‖ / √H. Lemmas 5
  and 6 have 2·‖q′ − q‖·max_i ‖k_i‖ / √H for Δ_att, at least twice as much; and Eq. 14 puts
  √(2 − 2τ) for ‖q′ − q‖, which is right for queries of norm 1 only.
  """
  shift = attention(q, k, visible) - attention(anchor, k, visible)
  step, root = _wide(q) - _wide(anchor), np.sqrt(q.shape[-1])
  if in_advance:
    length = np.where(_seen(visible), np.linalg.norm(_wide(k), axis=-1), 0.0)
    bound = np.tanh(np.linalg.norm(step, axis=-1) * length.max(-1) / (2 * root))
  else:
    change = (_wide(k) @ step[..., None])[..., 0] / root
    bound = shift_bound(np.where(_seen(visible), change, np.nan))
  return Certificate(np.abs(shift).sum(-1), 2 * bound)


def sharing_loss(
  q: Float[Numbers, "*#batch H"],
  anchor: Float[Numbers, "*#batch H"],
  k: Float[Numbers, "*#batch S H"],
  count: int,
  also: Bool[Numbers, "*#batch S"] | None = None,
  visible: Bool[Numbers, "*#batch S"] | None = None,
) -> Certificate:
  """β = τ*(q′) − τ(q′) ≤ Δ_att: what q′ loses by sharing the anchor's keys (Eqs. 14 and 42).

  τ* is the mass of its own `count` heaviest keys, τ that of the anchor's and of `also`, the
  neighbours, say. Keys that only one of the two sets has are counted once each, so that the paper's
  2·Δ_att is twice what is needed. The keys are the same for both, and no radius is assumed;
  `query_drift` bounds Δ_att.
  """
  own, other = attention(q, k, visible), attention(anchor, k, visible)
  shared = heaviest(other, count)
  if also is not None:
    shared = shared | np.asarray(also)
  lost = dropped_mass(own, shared) - dropped_mass(own, heaviest(own, count))
  return Certificate(lost, np.abs(own - other).sum(-1))


def shared_mass(
  q: Float[Numbers, "*#batch H"],
  anchor: Float[Numbers, "*#batch H"],
  k: Float[Numbers, "*#batch S H"],
  chosen: Bool[Numbers, "*#batch S"],
  visible: Bool[Numbers, "*#batch S"] | None = None,
) -> Certificate:
  """δ(q′) ≤ δ(q) + Δ_att/2: what q′ drops of keys that any rule `chosen` for the anchor q.

  No set's mass moves more than half of Δ_att, which `query_drift` bounds. The anchor's own δ is
  known once it has retrieved.
  """
  own, other = attention(q, k, visible), attention(anchor, k, visible)
  moved = np.abs(own - other).sum(-1) / 2
  return Certificate(dropped_mass(own, chosen), dropped_mass(other, chosen) + moved)


def fit_recency(
  weight: Float[Numbers, "*batch T S"],
  position: Int[Numbers, " T"],
  sinks: int,
  distance: Int[Numbers, " T"],
) -> Recency:
  """κ and λ of a head for which Eq. 44 holds at every query and key given.

  For any λ the least such κ is max A_i·e^(λ(t − i)) / (1 − ρ). Of these pairs it returns the one
  whose bound κ·e^(−λD) is least on (geometric) average over the queries.

  Args:
    weight: attention of T queries over keys 0 … S − 1.
    position: of each query.
    sinks: first tokens that the decay says nothing about.
    distance: D, of each query.

  Returns:
    ln κ and λ, float64 of the leading axes.
  """
  with np.errstate(divide="ignore"):
    log_weight = np.log(_wide(weight)[..., sinks:])
  behind = np.asarray(position)[:, None] - np.arange(sinks, weight.shape[-1])  # t − i
  # Of all keys at one distance Eq. 44 asks most of the heaviest.
  far = max(int(behind.max(initial=0)), 0) + 1
  peak = np.full((*weight.shape[:-2], far), -np.inf)
  for t, away in enumerate(behind):
    real = away >= 0
    at = away[real]
    peak[..., at] = np.maximum(peak[..., at], log_weight[..., t, real])
  reach = np.mean(np.asarray(distance, np.float64))
  least = [(peak + rate * np.arange(far)).max(-1) - np.log(-np.expm1(-rate)) for rate in RATES]
  log_kappa = np.stack(least, -1)
  best = np.argmin(log_kappa - RATES * reach, -1)
  return Recency(np.take_along_axis(log_kappa, best[..., None], -1)[..., 0], RATES[best])


def window_loss(
  weight: Float[Numbers, "*batch T S"],
  position: Int[Numbers, " T"],
  sinks: int,
  first: Int[Numbers, " T"],
  recency: Recency | None = None,
) -> Certificate:
  """PSAW's dropped mass δ ≤ κ·e^(−λD), D = t − P + 1 (Th. 7), per query.

  The paper takes κ ≤ 1 and λ as given. Here they are fitted (`fit_recency`) so that Eq. 44 holds
  at every key, whatever κ that takes; those of other queries can be passed, and then the bound
  holds where Eq. 44 does.

  Args:
    weight: attention of T queries over keys 0 … S − 1, nothing hidden.
    position: t, of each query.
    sinks: C_sink.
    first: P, oldest position that each query sees except the sinks, as in `kvjax.Window`.
    recency: κ and λ of the leading axes.
  """
  position, first = np.asarray(position), np.asarray(first)
  key = np.arange(weight.shape[-1])
  seen = (key < sinks) | (key >= first[:, None])
  distance = position - np.maximum(first, 0) + 1
  if recency is None:
    recency = fit_recency(weight, position, sinks, distance)
  log_bound = recency.log_kappa[..., None] - recency.rate[..., None] * distance
  return Certificate(dropped_mass(weight, seen), np.exp(np.minimum(log_bound, 700.0)))


def freezing_loss(
  q: Float[Numbers, "*#batch H"],
  k: Float[Numbers, "*#batch S H"],
  frozen: Float[Numbers, "*#batch S H"],
  visible: Bool[Numbers, "*#batch S"] | None = None,
  largest: Float[Numbers, "*#batch"] | None = None,
) -> Certificate:
  """β_ETF = ½·‖Ã − A‖₁ ≤ tanh(osc/4), osc of q·(k̃_i − k_i)/√H: one layer's change by freezing.

  Theorem 8 has ‖q‖·max_i ‖k̃_i − k_i‖ / √H, at least twice as much; there the largest change of a
  key stands for B·e^(−μ(ℓ − ℓ_s)), the least that Eq. 45 allows. That of other keys can be passed,
  and then the bound, with osc ≤ 2·‖q‖·`largest`/√H, holds where no key changes more. It is the
  change of one layer for one query; that of the layers above, which read changed states, adds up.

  Args:
    q: query.
    k: keys as the layer computes them.
    frozen: keys with those of frozen tokens taken from the layer below; rotated alike.
    visible: keys that the query sees; None: all.
    largest: change of a key, B·e^(−μ(ℓ − ℓ_s)); None: osc itself, of the keys that the query sees.
  """
  shift = attention(q, frozen, visible) - attention(q, k, visible)
  if largest is None:
    change = ((_wide(frozen) - _wide(k)) @ _wide(q)[..., None])[..., 0] / np.sqrt(q.shape[-1])
    bound = shift_bound(np.where(_seen(visible), change, np.nan))
  else:
    reach = np.linalg.norm(_wide(q), axis=-1) * _wide(largest) / np.sqrt(q.shape[-1])
    bound = np.tanh(reach / 2)
  return Certificate(np.abs(shift).sum(-1) / 2, bound)


def _seen(visible: Numbers | None) -> np.ndarray:
  return np.asarray(True if visible is None else visible)


def _wide(x: Numbers | float) -> np.ndarray:
  return np.asarray(x, np.float64)
