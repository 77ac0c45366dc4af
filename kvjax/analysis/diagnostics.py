"""Quantities of the methods' theory, to be measured: pure functions over queries, keys and values.

Shapes: leading axes broadcast, so that q [B, K, G, H] goes with k [B, K, 1, S, H]; of a cache,

    held = cache.pos[:, :, None] >= 0
    k, v = (cache.slots[name][:, :, None] for name in ("k", "v"))
    change = eviction_change(q, k, v, held)

Results are float32, or float64 where an argument is. `held` marks the slots that count; the others'
results are 0. Bounds are those of exact arithmetic: logits of size s carry rounding errors of
about s · 6e-8 in float32, which a bound near zero does not cover. No logits have a soft cap.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.primitives import softmax_state
from kvjax.primitives.softmax_state import State

# ---- LongFlow, §3.2, §3.3 and App. D: what an eviction costs, and how well one query tells


def weights(
  q: Float[Array, "*#b H"], k: Float[Array, "*#b S H"], held: Bool[Array, "*#b S"] | None = None
) -> Float[Array, "*b S"]:
  """α_i = exp(s_i) / Z with s_i = q·k_i/√H (Eq. 1)."""
  s = _logits(q, k)
  return _weights(s if held is None else jnp.where(held, s, -jnp.inf))


def eviction_change(
  q: Float[Array, "*#b H"],
  k: Float[Array, "*#b S H"],
  v: Float[Array, "*#b S H"],
  held: Bool[Array, "*#b S"] | None = None,
) -> Float[Array, "*b S H"]:
  """Δo_i = o − o^(∖i): by how much the output changes when token i is evicted (Eq. 4), exactly.

  As α_i·(v_i − o^(∖i)), which cancels nothing even where α_i is close to 1. A token that is alone
  leaves the output 0.
  """
  logits, v = _logits_and_values(q, k, v, held)
  rest = _without_each(logits, v)
  return _weights(logits)[..., None] * (v - rest.o)


def contribution(
  q: Float[Array, "*#b H"],
  k: Float[Array, "*#b S H"],
  v: Float[Array, "*#b S H"],
  held: Bool[Array, "*#b S"] | None = None,
) -> Float[Array, "*b S H"]:
  """c_i = α_i·v_i, which approximates Δo_i (Eq. 5); ‖c_i‖₁ is LongFlow's score (Eq. 6).

  What it leaves out is of the order α_i·o: small, but relative to c_i as large as o is to v_i.
  """
  logits, v = _logits_and_values(q, k, v, held)
  return _weights(logits)[..., None] * v


def remainder_bound(
  q: Float[Array, "*#b H"],
  k: Float[Array, "*#b S H"],
  v: Float[Array, "*#b S H"],
  held: Bool[Array, "*#b S"] | None = None,
  *,
  tight: bool = False,
) -> Float[Array, "*b S"]:
  """At least ‖R_i‖ = ‖Δo_i − c_i‖, the error of leaving the denominator as it is (Eq. 13).

  The paper's 2·V·α_i / (1 − α_i) with V = max_j ‖v_j‖; infinite for a token that is alone. With
  `tight`, α_i·V: in Eq. 12, R_i = −α_i / (1 − α_i)·(o − c_i), the difference is a sum of values
  whose weights sum to 1 − α_i.
  """
  logits, v = _logits_and_values(q, k, v, held)
  part = _weights(logits) * _norm(v).max(-1, keepdims=True)
  if tight:
    return part
  others = jnp.exp(_without_each(logits, v).lse - _lse(logits))  # 1 − α_i, not by subtraction
  return jnp.where(part > 0, 2 * part / others, 0)


def logit_drift(
  q: Float[Array, "*#b H"],
  q_next: Float[Array, "*#b H"],
  k: Float[Array, "*#b S H"],
  held: Bool[Array, "*#b S"] | None = None,
) -> Float[Array, "*b"]:
  """max_j |s′_j − s_j|, at least every |α′_i − α_i| (Eqs. 9 and 14).

  Both queries see the same keys: a token that joins between the two steps changes α by itself.
  """
  drift = jnp.abs(_logits(q_next - q, k))
  return drift.max(-1) if held is None else jnp.where(held, drift, 0).max(-1)


def logit_drift_bound(
  q: Float[Array, "*#b H"],
  q_next: Float[Array, "*#b H"],
  k: Float[Array, "*#b S H"],
  held: Bool[Array, "*#b S"] | None = None,
) -> Float[Array, "*b"]:
  """‖q′ − q‖·max_j ‖k_j‖ / √H, at least `logit_drift` (Eqs. 10 and 15).

  Eq. 10 goes on to the cosine of the two, which holds for queries of norm 1 only: queries that
  differ in length have drifted too.
  """
  length = _norm(k) if held is None else jnp.where(held, _norm(k), 0)
  return _norm(q_next - q) * length.max(-1) / q.shape[-1] ** 0.5


def score_error(
  q: Float[Array, "*#b H"],
  q_next: Float[Array, "*#b H"],
  k: Float[Array, "*#b S H"],
  v: Float[Array, "*#b S H"],
  held: Bool[Array, "*#b S"] | None = None,
) -> Float[Array, "*b S"]:
  """|‖Δo′_i‖² − ‖c_i‖²|: the next step's true objective against this step's score (Eq. 7)."""
  change, now = eviction_change(q_next, k, v, held), contribution(q, k, v, held)
  return jnp.abs(_norm(change) ** 2 - _norm(now) ** 2)


def score_error_bound(
  q: Float[Array, "*#b H"],
  q_next: Float[Array, "*#b H"],
  k: Float[Array, "*#b S H"],
  v: Float[Array, "*#b S H"],
  held: Bool[Array, "*#b S"] | None = None,
  *,
  tight: bool = False,
) -> Float[Array, "*b S"]:
  """At least `score_error`: the two bounds put together (Eqs. 8 and 11, §D.3).

  With r the bound on ‖R′_i‖ and δ that on the drift, at most 1 as weights are:
  |‖Δo′‖² − ‖c′‖²| ≤ r·(r + 2·‖c′‖) and |‖c′‖² − ‖c‖²| ≤ δ·(α′ + α)·‖v‖².
  """
  logits, values = _logits_and_values(q, k, v, held)
  after, _ = _logits_and_values(q_next, k, v, held)
  size = _norm(values)
  then, now = _weights(after), _weights(logits)
  r = remainder_bound(q_next, k, v, held, tight=tight)
  drift = jnp.minimum(logit_drift_bound(q, q_next, k, held), 1)[..., None]
  return r * (r + 2 * then * size) + drift * (then + now) * size**2


def _logits(q: Array, k: Array) -> Float[Array, "*b S"]:
  dtype = jnp.promote_types(jnp.result_type(q, k), jnp.float32)
  s = jnp.einsum("...h,...sh->...s", q.astype(dtype), k.astype(dtype))
  return s / q.shape[-1] ** 0.5


def _logits_and_values(
  q: Array, k: Array, v: Array, held: Array | None
) -> tuple[Float[Array, "*b S"], Float[Array, "*b S H"]]:
  """s_i = q·k_i/√H, −∞ where nothing is held; values of the same leading axes, 0 there."""
  s = _logits(q, k)
  if held is not None:
    s = jnp.where(held, s, -jnp.inf)
    v = jnp.where(held[..., None], v, 0)
  return s, jnp.broadcast_to(v.astype(s.dtype), (*s.shape, v.shape[-1]))


def _weights(logits: Float[Array, "*b S"]) -> Float[Array, "*b S"]:
  """α_i = exp(s_i) / Z, 0 where nothing is held."""
  return jnp.where(logits > -jnp.inf, jnp.exp(logits - _lse(logits)), 0)


def _lse(logits: Float[Array, "*b S"]) -> Float[Array, "*b 1"]:
  return jax.nn.logsumexp(logits, -1, keepdims=True)


def _without_each(logits: Float[Array, "*b S"], v: Float[Array, "*b S H"]) -> State:
  """Attention over all tokens but i, for every i: those before it merged with those after it."""
  present = (logits > -jnp.inf).astype(logits.dtype)
  each = State(jnp.moveaxis(v, -2, 0), *(jnp.moveaxis(x, -1, 0) for x in (logits, present)))
  none = State(
    *(jnp.full_like(x[:1], fill) for x, fill in ((each.o, 0), (each.m, -jnp.inf), (each.l, 0)))
  )

  def up_to_here(reverse: bool) -> State:
    return jax.lax.associative_scan(softmax_state.merge, each, reverse=reverse)

  before = jax.tree.map(lambda x, e: jnp.concatenate([e, x[:-1]]), up_to_here(False), none)
  behind = jax.tree.map(lambda x, e: jnp.concatenate([x[1:], e]), up_to_here(True), none)
  rest = softmax_state.merge(before, behind)
  return State(
    *(jnp.moveaxis(x, 0, axis) for x, axis in ((rest.o, -2), (rest.m, -1), (rest.l, -1)))
  )


def _norm(x: Float[Array, "*b H"]) -> Float[Array, "*b"]:
  return jnp.linalg.norm(x.astype(jnp.promote_types(x.dtype, jnp.float32)), axis=-1)
