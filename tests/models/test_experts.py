"""The mixture of experts: two ways to the same sum, over devices, in little memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.models.decode import step_bytes
from kvjax.models.decode.generate import prefill
from kvjax.models.nn import experts, parallel
from kvjax.models.nn.config import ModelConfig
from kvjax.models.nn.transformer import Transformer

SIZES = {"vocab": 61, "dim": 16, "layers": 2, "heads": 6, "kv_heads": 2, "head_dim": 8, "ffn": 12}
CONFIG = ModelConfig(**SIZES, experts=5, experts_per_token=2, qk_norm=True)
CLOSE = 2e-5  # float32 against sums in float64
SPLIT = 1e-5  # logits, float32; two devices sum halves of the width apart
BIASED = dataclasses.replace(CONFIG, mlp_bias=True, activation="clipped", norm_experts=False)


@functools.cache
def block(config, seed=0):
  """Experts of random weights, biases among them."""
  made = experts.Experts(config, dtype=jnp.float32, rngs=nnx.Rngs(seed))
  for i, bias in enumerate(("router_bias", "gate_up_bias", "down_bias")):
    if config.mlp_bias:
      shape = getattr(made, bias).shape
      getattr(made, bias)[...] = 0.5 * jax.random.normal(jax.random.key(i), shape)
  return made


def oracle(made, config, x):
  """Token by token and expert by expert, in float64."""
  w = {name: np.asarray(x, np.float64) for name, x in nnx.to_pure_dict(nnx.state(made)).items()}
  out = np.zeros_like(x, np.float64)
  for n, row in enumerate(np.asarray(x, np.float64)):
    logits = row @ w["router"] + w.get("router_bias", 0)
    p = np.exp(logits - logits.max())
    p /= p.sum()
    best = np.argsort(-p)[: config.experts_per_token]
    for e in best:
      y = np.einsum("d,dcf->cf", row, w["gate_up"][e]) + w.get("gate_up_bias", np.zeros(99))[e]
      gate, up = y
      if config.activation == "clipped":
        gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
        y = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
      else:
        y = gate / (1 + np.exp(-gate)) * up
      weight = p[e] / (p[best].sum() if config.norm_experts else 1)
      out[n] += weight * (y @ w["down"][e] + w.get("down_bias", np.zeros(99))[e])
  return out


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIG, BIASED], ids=["plain", "biased"])
@pytest.mark.parametrize("tokens", [1, 2, 3, 37, 130])
def test_few_and_many_tokens_equal_the_oracle(config, tokens, monkeypatch):
  """On a GPU up to 2 tokens of 2 experts are gathered; the others go in blocks of 1 to 32 rows."""
  made, rng = block(config), np.random.default_rng(tokens)
  x = np.float32(rng.normal(size=(tokens, config.dim)) * 3)
  want = oracle(made, config, x)
  for backend in ("cpu", "gpu"):
    monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
    got = jax.jit(lambda x: made(x, "reference", ()))(x)
    np.testing.assert_allclose(got[0], want, rtol=0, atol=CLOSE)


def test_one_expert_for_all():
  """Every token at the same experts: the others have no block."""
  made, x = block(CONFIG), np.ones((40, CONFIG.dim), np.float32)
  got, *_ = jax.jit(lambda x: made(x, "reference", ()))(x)
  np.testing.assert_allclose(got, oracle(made, CONFIG, x), atol=CLOSE)


@pytest.mark.slow
def test_over_devices():
  """A width that is split over two devices, experts and biases whole in number."""
  model = Transformer(BIASED, dtype=jnp.float32, impl="reference", rngs=nnx.Rngs(0))
  for layer in model.layers:
    layer.mlp = block(BIASED)
  spread, method = parallel.shard(model, kvjax.make_mesh(heads=2)), kvjax.Full()
  assert spread.layers[0].mlp.down[...].sharding.shard_shape((5, 12, 16)) == (5, 6, 16)
  tokens, lengths = np.arange(18, dtype=np.int32).reshape(2, 9), np.array([9, 7], np.int32)

  def run(model):
    caches = model.init_caches(method, 2, 16)
    logits, caches = prefill(model, tokens, lengths, caches, method)
    return logits, jax.jit(
      lambda caches: model.decode(jnp.asarray(tokens[:, 0]), caches, method)[0]
    )(caches)

  for one, two in zip(run(model), run(spread), strict=True):
    np.testing.assert_allclose(two, one, atol=SPLIT)


def test_memory_of_a_prompt_is_a_few_copies_of_its_states():
  """2,048 tokens at 4 of 64 experts: neither all experts' rows, nor all weights once more."""
  sizes = {"dim": 64, "ffn": 96, "experts": 64, "experts_per_token": 4, "heads": 2, "head_dim": 32}
  config = dataclasses.replace(CONFIG, **sizes)
  made = nnx.eval_shape(lambda: block(config))
  x = jax.ShapeDtypeStruct((2048, config.dim), jnp.float32)
  step = jax.jit(lambda made, x: made(x, "reference", ()))
  temporary = step.lower(made, x).compile().memory_analysis().temp_size_in_bytes
  states, weights = 4 * x.size, 4 * 64 * 3 * 64 * 96
  assert temporary < 4 * states < weights


def test_bytes_of_a_step_are_those_of_the_chosen():
  """Three rows choose at most all five experts, one row two of them, gathered: three times."""
  read = lambda batch: step_bytes.step_bytes(CONFIG, kvjax.Full(), batch, 64, jnp.float32).weights  # noqa: E731
  one = 2 * 3 * 16 * 12 * 4  # an expert of both layers
  assert step_bytes.expert_bytes(CONFIG, jnp.float32) == one
  assert read(3) - read(1) == 3 * (5 - 2) * one
