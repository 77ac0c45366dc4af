"""Precision by name, and the same numbers whether or not 64-bit types are enabled."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.models.decode.generate import generate, prefill
from kvjax.models.io import convert
from kvjax.models.nn.config import PRECISIONS
from kvjax.models.nn.transformer import Transformer
from kvjax.testing import tiny
from tests import tiny_hf


def products(model):
  """Precisions of all matrix products of a decode step."""
  method = kvjax.Full()
  caches = jax.eval_shape(lambda: method.init_caches(model.spec(1, 8)))

  def step(model, tokens, caches):
    return model.decode(tokens, caches, method)

  text = str(jax.make_jaxpr(step)(model, jax.ShapeDtypeStruct((1,), jnp.int32), caches))
  return set(re.findall(r"Precision\.(\w+)", text)) or {"DEFAULT"}


@pytest.mark.core(1)
@pytest.mark.parametrize(
  ("name", "dtype", "precision"),
  [
    ("bf16", jnp.bfloat16, "DEFAULT"),
    ("float32", jnp.float32, "HIGHEST"),
    ("float32-tf32", jnp.float32, "HIGH"),
  ],
)
def test_products_are_traced_as_named(name, dtype, precision):
  with jax.default_matmul_precision("default"):
    model = nnx.eval_shape(lambda: Transformer(tiny.CONFIG, precision=name, rngs=nnx.Rngs(0)))
    found = products(model)
  assert model.dtype == dtype
  assert found == {precision}
  assert name in PRECISIONS


def test_unnamed_precision_is_the_surrounding_one():
  model = nnx.eval_shape(lambda: Transformer(tiny.CONFIG, dtype=jnp.float32, rngs=nnx.Rngs(0)))
  with jax.default_matmul_precision("highest"):
    assert products(model) == {"HIGHEST"}
  with jax.default_matmul_precision("default"):
    assert products(model) == {"DEFAULT"}


def test_names_and_dtypes_that_disagree(tmp_path, untyped):
  source = tiny_hf.write(tmp_path / "x", tiny_hf.CASES["llama3"])
  made = convert.convert(source, tmp_path / "made", progress=False)
  with pytest.raises(ValueError, match=r"precision: found 'fp8', expected one of \['bf16'"):
    convert.load(made, precision="fp8")
  with pytest.raises(ValueError, match=r"dtype: found bfloat16, expected float32"):
    convert.load(made, precision="float32", dtype=jnp.bfloat16)
  for dtype in ("int8", "float", 3):
    with pytest.raises(TypeError, match=r"dtype: found .*, expected "):
      convert.load(made, dtype=dtype)
  with pytest.raises(TypeError, match=r"mesh: found 2, expected one of kvjax\.make_mesh"):
    convert.load(made, mesh=2)
  assert convert.load(made, precision="float32-tf32")[0].dtype == jnp.float32
  assert convert.load(made, precision="bf16", dtype="bfloat16")[0].dtype == jnp.bfloat16


@pytest.mark.slow
def test_x64_changes_nothing(tmp_path):
  """A checkpoint that is loaded, prompts and generations of two methods, and their caches."""
  source = tiny_hf.write(tmp_path / "x", tiny_hf.CASES["qwen3"])
  made = convert.convert(source, tmp_path / "made", progress=False)
  tokens, lengths = tiny_hf.tokens()[:, :24], np.array([24, 9], np.int32)

  def run():
    model, _ = convert.load(made, precision="float32", impl="reference")
    for method in (kvjax.Full(), kvjax.StreamingLLM(budget=16)):
      caches = method.init_caches(model.spec(2, 32))
      logits, caches = prefill(model, tokens, lengths, caches, method)
      yield generate(model, logits, caches, method, steps=4, return_logits=True, chunk=2)

  plain = jax.tree.leaves([(out.tokens, out.logits, caches) for out, caches in run()])
  with jax.enable_x64(True):
    wide = jax.tree.leaves([(out.tokens, out.logits, caches) for out, caches in run()])
  for x, y in zip(plain, wide, strict=True):
    assert x.dtype == y.dtype
    np.testing.assert_allclose(y, x, rtol=1e-6, atol=1e-6)
