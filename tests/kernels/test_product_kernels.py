"""A step's products and what stands between them, against NumPy float64, over odd sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.kernels.products import product
from kvjax.kernels.products.add_norm import add_norm
from kvjax.kernels.products.qkv_heads import qkv_heads

CLOSE = {"float32": 1e-5, "bfloat16": 1e-2}
SIZES = [(1, 64, 64), (3, 200, 130), (8, 577, 96), (17, 96, 33)]

dtypes = pytest.mark.parametrize("dtype", CLOSE)
sizes = pytest.mark.parametrize("size", SIZES, ids=str)


def draw(seed, *shapes, dtype="float32"):
  """Random arrays of about unit length per column, and the same in float64."""
  rng = np.random.default_rng(seed)
  arrays = [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]
  return arrays, [np.array(x, np.float64) for x in arrays]


def assert_close(got, want, dtype):
  error = np.linalg.norm(np.array(got, np.float64) - want) / np.linalg.norm(want)
  assert error <= CLOSE[dtype]


def summed(x, w):
  """Partial products, of which there are several, put together."""
  parts = product.partial_products(x, w)
  assert parts.dtype == jnp.float32 and parts.shape[0] > 1
  return parts.sum(0)


def gated(x, w):
  gate, up = x @ w[:, 0], x @ w[:, 1]
  return gate / (1 + np.exp(-gate)) * up


# A kernel, the axes of its weights between those of the sizes, and the same in NumPy.
PRODUCTS = {
  "partial": (summed, (), np.matmul),
  "whole": (product.product, (), np.matmul),
  "gated": (product.gated_product, (2,), gated),
}


@pytest.mark.core(6)
@dtypes
@sizes
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name, size, dtype):
  (run, between, want), (rows, depth, columns) = PRODUCTS[name], size
  (x, w), wide = draw(1, (rows, depth), (depth, *between, columns), dtype=dtype)
  y = jax.jit(run)(x, w)
  exact = name == "partial"  # the others are rounded to the dtype of x
  assert y.dtype == (jnp.float32 if exact else x.dtype)
  assert_close(y, want(*wide), "float32" if exact else dtype)


def test_products_of_a_part_fill_the_device(monkeypatch):
  """Fewer columns than multiprocessors ask for are cut into narrower blocks."""
  monkeypatch.setattr(product, "_cores", lambda: 132)
  for gated in (False, True):
    cuts = [product.whole_blocking(n, gated=gated) for n in (14336, 7168, 3584)]
    assert [cut.columns for cut in cuts] == [64, 64, 32]
    assert all(cut.splits == 1 for cut in cuts)
    flying = [cut.stages * cut.depth * cut.columns for cut in cuts]
    assert flying[0] < flying[1]  # one program instead of two on a multiprocessor


def test_gated_product_is_finite_where_the_gate_is_huge():
  x, w = jnp.full((1, 16), 50.0), jnp.ones((16, 2, 16)) * jnp.array([-1.0, 1.0])[None, :, None]
  assert np.array_equal(product.gated_product(x, w), np.zeros((1, 16)))


@dtypes
@pytest.mark.parametrize("splits", [1, 5])
def test_add_norm(splits, dtype):
  (x,), (wide_x,) = draw(3, (3, 200), dtype=dtype)
  (parts, scale), (wide_parts, wide_scale) = draw(4, (splits, 3, 200), (200,))
  summed, y = jax.jit(add_norm, static_argnums=3)(x, parts, scale, 1e-2)
  assert summed.dtype == y.dtype == x.dtype
  want = wide_x + wide_parts.sum(0)
  assert_close(summed, want, dtype)
  want = np.array(summed, np.float64)
  assert_close(y, want / np.sqrt((want**2).mean(-1, keepdims=True) + 1e-2) * wide_scale, dtype)


@pytest.mark.core(3)
@dtypes
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_qkv_heads(normed, biased, dtype):
  (parts, bias, *scales), (wide, wide_bias, *wide_scales) = draw(
    5, (3, 2, 3, 5, 24), (3, 5, 24), (24,), (24,)
  )
  given = {"bias": bias if biased else None}
  if normed:
    given |= dict(zip(("q_scale", "k_scale"), scales, strict=True))
  want = wide.sum(0) + (wide_bias if biased else 0)
  for h in range(4 if normed else 0):  # three queries and the key
    head = want[..., h, :]
    length = np.sqrt((head**2).mean(-1, keepdims=True) + 1e-2)
    want[..., h, :] = head / length * wide_scales[h == 3]
  y = jax.jit(lambda parts, given: qkv_heads(parts, **given, eps=1e-2, dtype=dtype))(parts, given)
  assert y.dtype == dtype
  assert_close(y, want, dtype)


def test_bad_operands():
  (x, w), _ = draw(6, (2, 16), (16, 8))
  with pytest.raises(ValueError, match=r"x: found shape \(65, 16\), expected \[1 … 64, D\]"):
    product.check(jnp.zeros((65, 16)), w)
  with pytest.raises(ValueError, match=r"w: found shape \(8, 16\), expected 16 rows"):
    product.check(x, w.T)
  with pytest.raises(TypeError, match="w: found dtype bfloat16, expected float32, as x"):
    product.check(x, w.astype(jnp.bfloat16))
  with pytest.raises(ValueError, match="k_scale: found one of"):
    qkv_heads(jnp.zeros((1, 1, 1, 3, 8)), q_scale=jnp.ones(8), dtype=jnp.float32)
