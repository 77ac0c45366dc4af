"""The decoder: its config, its dtypes and shapes, and queries apart from keys and values."""

import dataclasses
import functools
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.models.decode.generate import prefill
from kvjax.models.nn.config import ModelConfig
from kvjax.models.nn.transformer import Transformer
from kvjax.primitives.rope import Linear, Llama3, Yarn

SMALL = ModelConfig(
  vocab=31, dim=24, layers=2, heads=6, kv_heads=3, head_dim=8, ffn=40, tie_embeddings=False
)


@functools.cache
def small(dtype=jnp.float32, config=SMALL):
  return Transformer(config, dtype=dtype, rngs=nnx.Rngs(0))


# ---- config


def test_config_goes_through_json():
  for scaling in (None, Linear(2.0), Llama3(factor=32.0), Yarn(4.0, 4096)):
    config = dataclasses.replace(SMALL, rope=kvjax.Rope(1e5, scaling))
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"kv_heads": 4}, r"heads: found 6, expected a multiple of kv_heads = 4"),
    ({"head_dim": 7}, r"head_dim: found 7, expected an even number"),
    ({"layers": 0}, r"layers: found 0, expected 1 or more"),
    ({"norm_eps": 0.0}, r"norm_eps: found 0\.0"),
    ({"vocab": None, "size": 31}, r"missing \['vocab'\], unknown \['size'\]"),
    ({"rope": {"theta": 1e4, "scaling": {"kind": "cubic"}}}, r"rope: found .*'cubic'"),
  ],
)
def test_config_says_what_is_wrong(change, message):
  values = {**SMALL.to_json(), **change}
  with pytest.raises(ValueError, match=message):
    ModelConfig.from_json({name: x for name, x in values.items() if x is not None})


# ---- the decoder


@pytest.mark.core(1)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dtypes(dtype):
  decoder = small(dtype)
  assert decoder.layers[0].attention.wqkv[...].dtype == dtype
  assert decoder.layers[0].attention_norm.scale[...].dtype == jnp.float32
  assert decoder.spec(1, 8).dtype == dtype
  assert decoder.spec(1, 8, jnp.float16).dtype == jnp.float16
  method = kvjax.Full()
  logits, caches = prefill(decoder, [[1] * 4], [4], method.init_caches(decoder.spec(1, 16)), method)
  assert logits.dtype == jnp.float32
  assert caches[0].slots["k"].dtype == dtype
  again, _ = jax.jit(lambda token: decoder.decode(token, caches, method))(np.array([3]))
  assert again.dtype == jnp.float32


def test_queries_and_keys_of_different_tokens():
  """Apart they are what they are together, with biases and norms per head too."""
  config = dataclasses.replace(SMALL, qkv_bias=True, qk_norm=True)
  attention = small(config=config).layers[0].attention
  bias = attention.bqkv
  bias[...] = jax.random.normal(jax.random.key(0), bias[...].shape)
  x = jax.random.normal(jax.random.key(1), (2, 5, config.dim))
  q, k, v = jax.jit(lambda x: attention.qkv(x, "reference"))(x)
  some, *every = jax.jit(lambda x: attention.qkv_apart(x[:, 3:], x))(x)
  chex.assert_trees_all_close((some, *every), (q[:, 3:], k, v), rtol=1e-5, atol=1e-6)
