"""Full-size shapes: built without their weights, counted, and stepped once."""

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import kvjax
from kvjax.models.io.presets import PRESETS
from kvjax.models.nn.transformer import Transformer

# Parameters as the publishers' checkpoints hold them, a tied embedding counted once.
PUBLISHED = {
  "Llama-2-7B": 6_738_415_616,
  "Llama-3.1-8B": 8_030_261_248,
  "Llama-3.1-70B": 70_553_706_496,
  "Llama-3.2-1B": 1_235_814_400,
  "Llama-3.2-3B": 3_212_749_824,
  "Mistral-7B": 7_248_023_552,
  "Qwen2.5-1.5B": 1_543_714_304,
  "Qwen2.5-7B": 7_615_616_512,
  "Qwen3-0.6B": 596_049_920,
  "Qwen3-1.7B": 1_720_574_976,
  "Qwen3-4B": 4_022_468_096,
  "Qwen3-8B": 8_190_735_360,
  "Qwen3-14B": 14_768_307_200,
  "Qwen3-32B": 32_762_123_264,
  "DeepSeek-R1-Distill-Llama-8B": 8_030_261_248,
  "DeepSeek-R1-Distill-Qwen-7B": 7_615_616_512,
  "GLM-4-9B": 9_399_951_360,
  "Gemma-2-2B": 2_614_341_888,
  "Gemma-3-270M": 268_098_176,
  "Gemma-3-1B": 999_885_952,
  "gpt-oss-20B": 20_914_757_184,
  "Phi-4": 14_659_507_200,
  "Qwen3-30B-A3B": 30_532_122_624,
}


def abstract(config):
  return nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))


def test_every_preset_has_a_published_count():
  assert set(PUBLISHED) == set(PRESETS)


@pytest.mark.core(4)
@pytest.mark.parametrize("name", PRESETS)
def test_builds_with_the_published_parameters(name):
  """Layers are alike: one is built, and counted as often as there are layers."""
  config = PRESETS[name]
  model = abstract(dataclasses.replace(config, layers=1, windows=config.windows[:1]))
  count = lambda part: sum(math.prod(x.shape) for x in jax.tree.leaves(part))  # noqa: E731
  total = count(model) + (config.layers - 1) * count(model.layers[0])
  assert total == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.core(4)
@pytest.mark.parametrize("name", PRESETS)
def test_decode_step(name):
  """Shapes of one step with the caches of a full context, over the first two layers."""
  config = PRESETS[name]
  config = dataclasses.replace(config, layers=2, windows=config.windows[-2:])
  model, method = abstract(config), kvjax.Full()
  spec = model.spec(2, config.max_context)

  def step(model, tokens, caches):
    return model.decode(tokens, caches, method)

  caches = jax.eval_shape(lambda: method.init_caches(spec))
  tokens = jax.ShapeDtypeStruct((2,), jnp.int32)
  logits, after = jax.eval_shape(step, model, tokens, caches)
  assert (logits.shape, logits.dtype) == ((2, config.vocab), jnp.float32)
  chex.assert_trees_all_equal_shapes_and_dtypes(after, caches)
  assert after[0].slots["k"].shape[:2] == (2, config.kv_heads)
  assert after[0].slots["k"].shape[-1] == config.head_dim
