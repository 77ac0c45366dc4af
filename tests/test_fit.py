"""The protocol fits: every hard case runs through the unchanged decoder (see fit_methods)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax import CacheSpec, Carry, Env, Full, Prompt, Rope, StreamingLLM
from models.generate import join
from tests.fit_methods import (
  EarlyStop,
  Evict,
  Freeze,
  FusedEvict,
  Offload,
  Pages,
  PredictRepair,
  Pyramid,
)
from tests.tiny import CLOSE, CONFIG, LENGTHS, TOKENS, Run

CASES = {
  "select": (Pages(pages=99), Pages(pages=1)),
  "stop early": (EarlyStop(Full()), EarlyStop(Full(), tau=0.3, patience=1)),
  "stop early over a window": (
    EarlyStop(StreamingLLM(64, rope="original")),
    EarlyStop(StreamingLLM(12, rope="original"), tau=0.3, patience=1),
  ),
  "stop early over pages": (
    EarlyStop(Pages(pages=99)),
    EarlyStop(Pages(pages=3), tau=0.3, patience=1),
  ),
  "predict and repair": (PredictRepair(Pages(pages=99)), PredictRepair(Pages(pages=1))),
  "evict": (Evict(budget=64), Evict(budget=12)),
  "fused step": (FusedEvict(budget=64), FusedEvict(budget=12)),
  "capacity per layer": (Pyramid(budget=64), Pyramid(budget=14)),
  "offloaded, with votes": (Offload(recent=64), Offload(recent=8, retrieved=1)),
  "frozen prefix": (Freeze(Full(), frozen=0.0), Freeze(Full(), frozen=0.5)),
  "frozen prefix over pages": (
    Freeze(Pages(pages=99), frozen=0.0),
    Freeze(Pages(pages=1), frozen=0.5),
  ),
}
case = pytest.mark.parametrize("name", CASES)


def run(method, steps=5):
  return Run(method).generate(steps)


@case
def test_neutral_equals_full_and_tight_does_not(name):
  neutral, tight = CASES[name]
  full = run(Full())
  np.testing.assert_allclose(run(neutral), full, atol=CLOSE)
  assert np.abs(run(tight) - full).max() > 0.05


@case
def test_second_turn_on_a_live_cache(name):
  """A further prompt, in rows of different lengths, one of them idle; then decoding goes on."""
  neutral, tight = CASES[name]
  want = None
  for method in (Full(), neutral, tight):
    turns = Run(method)
    turns.prefill()
    second = turns.prefill(np.array([5, 0], np.int32), LENGTHS, width=6, past=None)
    third = turns.decode(LENGTHS + np.array([5, 0]))
    assert np.isfinite(second[0]).all() and np.isfinite(third).all()
    if method == Full():
      want = second[0], third
      whole = Run(Full()).prefill(LENGTHS + np.array([6, 1], np.int32))
      np.testing.assert_allclose(third, whole, atol=CLOSE)
    elif method is neutral:
      np.testing.assert_allclose(second[0], want[0], atol=CLOSE)
      np.testing.assert_allclose(third, want[1], atol=CLOSE)


def test_patience_without_end_equals_the_base():
  for base in (Full(), Pages(pages=2), StreamingLLM(12, rope="original")):
    np.testing.assert_allclose(run(EarlyStop(base)), run(base), atol=CLOSE)


def test_a_fused_step_is_the_same_method():
  np.testing.assert_allclose(run(FusedEvict(12), 12), run(Evict(12), 12), atol=CLOSE)


def test_capacities_differ_by_layer():
  caches = Run(Pyramid(budget=14)).caches
  assert [cache.size for cache in caches] == [14, 12, 10, 8]


def test_all_blocks_retrieved_equals_full_prefill():
  """In chunks of 6: a window of 8 on the device, everything before it read back from the store."""
  whole = Run(Full()).prefill()
  for blocks, same in ((16, True), (1, False)):
    turn = Run(Offload(recent=8, retrieved=blocks))
    for start in range(0, 24, 6):
      part = np.clip(LENGTHS - start, 0, 6).astype(np.int32)
      before = np.minimum(LENGTHS, start).astype(np.int32)
      logits = turn.prefill(part, before, width=6, past=None)
    assert (np.abs(logits - whole)[0].max() < CLOSE) == same
    stored = turn.caches[1].heads["store_k"].reshape(2, 2, -1, 16)[0, :, 15:23]
    held = turn.caches[1].slots["k"][0]  # positions 15 … 22, in order
    np.testing.assert_array_equal(stored, held)


def test_two_wrappers_may_not_replace_the_same_move():
  with pytest.raises(ValueError, match="EarlyStop replaces attend, and so does its base"):
    EarlyStop(PredictRepair(Pages()))


def test_repair_covers_the_true_selection():
  """Everything that serial selection attends to is attended to: more is visited, never less."""
  serial, repaired = Run(Pages(pages=1)), Run(PredictRepair(Pages(pages=1)))
  for turn in (serial, repaired):
    turn.prefill()
  a, b = (_visited(turn) for turn in (serial, repaired))
  assert (b >= a).all() and (b > a).any()


def _visited(turn):
  step = jax.jit(
    lambda leaves, caches, token: join(turn.graph, leaves).decode(
      token, caches, turn.method, with_aux=True
    )[2]
  )
  aux = step(turn.leaves, turn.caches, TOKENS[:, 30])
  return np.stack([layer["visited"] for layer in aux])


def test_stopping_early_visits_less():
  turn = Run(EarlyStop(Full(), tau=0.3, patience=1))
  turn.prefill()
  assert (_visited(turn) < (LENGTHS + 1)[:, None]).any()


def test_frozen_tokens_cost_nothing():
  """Half the prompt frozen in two of four layers: their products, MLP included, really go away."""

  def flops(method):
    turn = Run(method)
    tokens = jnp.zeros((2, 64), jnp.int32)
    lengths = jnp.array([64, 50], jnp.int32)

    def prefill(leaves, caches):
      return join(turn.graph, leaves).prefill(tokens, lengths, caches, method)

    return jax.jit(prefill).lower(turn.leaves, turn.caches).compile().cost_analysis()["flops"]

  c = CONFIG
  per_token = 2 * c.dim * ((c.heads + 2 * c.kv_heads) * 16 + c.heads * 16 + 3 * c.ffn)
  saved = flops(Freeze(Full(), frozen=0.0)) - flops(Freeze(Full(), frozen=0.5))
  assert saved > 0.9 * 2 * 2 * (32 - 2) * per_token


def test_frozen_tokens_keep_their_hidden_state():
  """Logits at frozen positions are those of the layer below the first frozen one."""
  turn = Run(Freeze(Full(), frozen=0.5))
  model = join(turn.graph, turn.leaves)
  out = _all_logits(model, turn.method)
  del model.layers[2:]
  np.testing.assert_allclose(
    out[0, 2:11], _all_logits(model, Full())[0, 2:11], atol=CLOSE
  )  # E = ⌊23/2⌋ = 11, two sinks


def _all_logits(model, method):
  caches = method.init_caches(model.spec(2, 64))[: len(model.layers)]
  tokens, lengths = jnp.asarray(TOKENS[:, :23]), jnp.asarray(LENGTHS)
  prefill = jax.jit(lambda c: model.prefill(tokens, lengths, c, method, all_logits=True)[0])
  return np.asarray(prefill(caches))


class PlainAttention(nnx.Module):
  """An attention layer of somebody else's: any method, no decoder of ours."""

  def __init__(self, method, rngs):
    self.method, self.env = method, Env(layers=1, rope=Rope(), impl="reference", tile=4)
    self.spec = CacheSpec(2, 32, kv_heads=2, groups=2, head_dim=8, layers=1, dtype=jnp.float32)
    self.qkv = nnx.Linear(12, 2 * 4 * 8, rngs=rngs)

  def __call__(self, x, cache):
    """x [B, T, 12]: a prompt if T > 1, a decode step otherwise."""
    batch, tokens, _ = x.shape
    y = self.qkv(x).reshape(batch, tokens, 2, 4, 8).transpose(0, 2, 3, 1, 4)
    q, k, v = y[:, :, :2], y[:, :, 2], y[:, :, 3]
    at, carry = self.method.at(self.env, 0), Carry()
    if tokens > 1:
      valid = jnp.full(batch, tokens, jnp.int32)
      prompt = Prompt(valid, valid, None, tokens, past=0)
      out, cache, _, _ = self.method.prefill(at, cache, q, k, v, prompt, carry)
      return out.transpose(0, 3, 1, 2, 4).reshape(batch, tokens, -1), cache
    new = (y[..., 0, :] for y in (q, k, v))
    live = jnp.ones(batch, bool)
    out, cache, _, _ = self.method.decode_step(at, cache, *new, live, carry)
    return out.reshape(batch, 1, -1), cache


@pytest.mark.parametrize("method", [Full(), StreamingLLM(9, 2), Pages(pages=1, dense_layers=0)])
def test_plain_flax_layer(method):
  layer = PlainAttention(method, nnx.Rngs(0))
  x = jax.random.normal(jax.random.key(0), (2, 12, 12))
  step = nnx.jit(lambda layer, x, cache: layer(x, cache))
  _, cache = step(layer, x[:, :11], method.init(layer.spec, 0))
  out, cache = step(layer, x[:, 11:], cache)
  assert np.isfinite(out).all() and int(cache.seen[0]) == 12
  if method.order_independent:
    whole, _ = step(layer, x, method.init(layer.spec, 0))
    np.testing.assert_allclose(out[:, 0], whole[:, 11], atol=1e-5)
