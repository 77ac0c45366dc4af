"""Precision by name, and the same numbers whether or not 64-bit types are enabled."""

import os
import pathlib
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.models.io import convert
from kvjax.models.nn.config import PRECISIONS
from kvjax.models.nn.transformer import Transformer
from kvjax.testing import tiny
from tests import tiny_hf

REPO = pathlib.Path(__file__).resolve().parents[2]


def products(model):
  """Precisions of all matrix products of a decode step."""
  graph, state = nnx.split(model)
  method = kvjax.Full()
  caches = jax.eval_shape(lambda: method.init_caches(model.spec(1, 8)))

  def step(state, tokens, caches):
    return nnx.merge(graph, state).decode(tokens, caches, method)

  text = str(jax.make_jaxpr(step)(state, jax.ShapeDtypeStruct((1,), jnp.int32), caches))
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


def test_names_and_dtypes_that_disagree(tmp_path):
  source = tiny_hf.write(tmp_path / "x", tiny_hf.CASES["llama3"])
  made = convert.convert(source, tmp_path / "made", progress=False)
  with pytest.raises(ValueError, match=r"precision: found 'fp8', expected one of \['bf16'"):
    convert.load(made, precision="fp8")
  with pytest.raises(ValueError, match=r"dtype: found bfloat16, expected float32"):
    convert.load(made, precision="float32", dtype=jnp.bfloat16)
  assert convert.load(made, precision="float32-tf32")[0].dtype == jnp.float32
  assert convert.load(made, precision="bf16", dtype="bfloat16")[0].dtype == jnp.bfloat16


@pytest.mark.slow
def test_x64_changes_nothing(tmp_path):
  """Prompt and steps of two methods in processes of their own, with and without jax_enable_x64."""
  source = tiny_hf.write(tmp_path / "x", tiny_hf.CASES["qwen3"])
  made = convert.convert(source, tmp_path / "made", progress=False)
  script = textwrap.dedent("""
    import sys
    import jax, numpy as np
    import kvjax
    from kvjax.models.io import convert
    from kvjax.models.decode.generate import generate, prefill
    from tests import tiny_hf

    model, _ = convert.load(sys.argv[1], precision="float32", impl="reference")
    out = {"x64": np.array(jax.config.jax_enable_x64)}
    tokens, lengths = tiny_hf.tokens()[:, :24], np.array([24, 9], np.int32)
    for method in (kvjax.Full(), kvjax.StreamingLLM(budget=16)):
      caches = method.init_caches(model.spec(2, 32))
      logits, caches = prefill(model, tokens, lengths, caches, method)
      made, caches = generate(
        model, logits, caches, method, steps=4, return_logits=True, chunk=2
      )
      name = type(method).__name__
      out[f"{name}/prompt"], out[f"{name}/steps"] = logits, made.logits
      out[f"{name}/tokens"] = made.tokens
      for i, leaf in enumerate(jax.tree.leaves(caches)):
        out[f"{name}/cache {i}"] = leaf
    np.savez(sys.argv[2], **out)
    """)
  found = []
  for flag in "01":
    file = tmp_path / f"{flag}.npz"
    done = subprocess.run(
      [sys.executable, "-c", script, str(made), str(file)],
      cwd=REPO,
      env={**os.environ, "JAX_ENABLE_X64": flag},
      capture_output=True,
      text=True,
    )
    assert done.returncode == 0, done.stderr
    with np.load(file) as stored:
      found.append(dict(stored))
  plain, wide = found
  assert (bool(plain.pop("x64")), bool(wide.pop("x64"))) == (False, True)
  assert plain.keys() == wide.keys()
  for name, x in plain.items():
    assert wide[name].dtype == x.dtype, name
    np.testing.assert_allclose(wide[name], x, rtol=1e-6, atol=1e-6, err_msg=name)
