"""The softmax state (o, m, l): attention over a subset of keys, in a form that merges exactly.

For logits x_i and values v_i over any set of keys:

    m = max_i x_i        l = Σ_i exp(x_i − m)        o = Σ_i exp(x_i − m) v_i / l

Two states over disjoint sets merge into the state of their union. The merge is associative and
commutative with identity (0, −∞, 0): split-K, repair of missed blocks, context parallelism and
sinks + window + retrieved are all this one operation.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
  """Attention over a set of keys. Leading axes are arbitrary and shared.

  Attributes:
    o: normalised output, float32 [..., H]; zero where the set is empty.
    m: largest scaled logit (natural log), float32 [...]; −inf where the set is empty.
    l: denominator relative to m, float32 [...]; zero where the set is empty.
  """

  o: Array
  m: Array
  l: Array

  @property
  def lse(self) -> Array:
    """log Σ exp(logit), float32 [...]; −inf where the set is empty."""
    return self.m + jnp.log(self.l)


def empty(shape: tuple[int, ...], head_dim: int) -> State:
  """The identity of `merge`: attention over no keys."""
  return State(
    jnp.zeros((*shape, head_dim), jnp.float32),
    jnp.full(shape, -jnp.inf, jnp.float32),
    jnp.zeros(shape, jnp.float32),
  )


def capped(logits: Float[Array, "*shape"], cap: float | None) -> Float[Array, "*shape"]:
  """c·tanh(x/c) under a soft cap c (Gemma 2 technical report, 2024, §2); x without one."""
  return logits if cap is None else cap * jnp.tanh(logits / cap)


def of_logits(logits: Float[Array, "B K *queries S"], v: Float[Array, "B K S H"]) -> State:
  """State of queries over keys whose values they share.

  Logits are −inf where a key is masked; V must be finite there (0 · NaN is NaN: mask it too).
  """
  x = logits.astype(jnp.float32)
  m = x.max(-1)
  p = jnp.exp(x - _finite(m)[..., None])
  l = p.sum(-1)
  flat = p.reshape(*p.shape[:2], -1, p.shape[-1])
  o = jnp.einsum("bkqs,bksh->bkqh", flat, v.astype(jnp.float32))
  return State(o.reshape(*p.shape[:-1], v.shape[-1]) / _nonzero(l)[..., None], m, l)


def merge(a: State, b: State) -> State:
  """State over the union of two disjoint sets of keys."""
  m = jnp.maximum(a.m, b.m)
  wa = a.l * jnp.exp(a.m - _finite(m))
  wb = b.l * jnp.exp(b.m - _finite(m))
  l = wa + wb
  return State((a.o * wa[..., None] + b.o * wb[..., None]) / _nonzero(l)[..., None], m, l)


def merge_all(states: State) -> State:
  """State over the union of disjoint sets of keys, those of the last axis of m and l."""
  m = states.m.max(-1)
  w = states.l * jnp.exp(states.m - _finite(m)[..., None])
  l = w.sum(-1)
  return State((states.o * w[..., None]).sum(-2) / _nonzero(l)[..., None], m, l)


def probabilities(state: State, logits: Float[Array, "*batch S"]) -> Float[Array, "*batch S"]:
  """Softmax probabilities of logits whose denominator is the state's; −inf logits give 0.

  So does a state of NaN: what it says of its keys is not known.
  """
  p = jnp.exp(logits - _finite(state.m)[..., None]) / _nonzero(state.l)[..., None]
  return jnp.where(jnp.isnan(state.l)[..., None], 0, p)


def _finite(m: Array) -> Array:
  return jnp.where(m == -jnp.inf, 0.0, m)


def _nonzero(l: Array) -> Array:
  return jnp.where(l == 0, 1.0, l)
