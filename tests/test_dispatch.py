"""Which implementation runs: names are honoured, missing ones raise, auto is stated."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import Env, Full, Rope, dispatch
from tests.fit_methods import Evict, Offload
from tests.layer import Layer, Stream


def env(impl):
  return Env(4, Rope(), impl=impl, tile=4)


def test_missing_kernel_names_what_there_is():
  with pytest.raises(NotImplementedError, match=r"attend_table: no 'jax-triton' .*pallas"):
    dispatch.kernel("attend_table", "jax-triton")


def test_unknown_implementation():
  with pytest.raises(ValueError, match=r"Env\.impl: found 'cuda', expected one of"):
    env("cuda")


def test_auto_is_the_reference_without_a_gpu():
  assert dispatch.choose("attend_span", "auto") == "reference"
  assert dispatch.choose("attend_span", "pallas") == "pallas"


def test_a_kernel_that_returns_no_logits_is_refused_to_who_reads_them():
  layer = Layer(Evict(budget=12), Stream.random(0), env=env("jax-triton"))
  layer.prefill([5, 3])
  with pytest.raises(NotImplementedError, match="Evict reads logits; the 'jax-triton' kernel"):
    layer.decode([5, 3])


def test_a_kernel_never_walks_past_a_method_that_reads_its_own_way():
  layer = Layer(Offload(), Stream.random(0), env=env("pallas"))
  layer.prefill([5, 3])
  with pytest.raises(NotImplementedError, match="Offload fetches slots its own way; the 'pallas'"):
    layer.decode([5, 3])


def test_queries_are_rounded_to_the_dtype_of_the_cache():
  """Float32 projections over a bfloat16 cache: the kernel agrees to bfloat16, in float32."""
  outputs = []
  for impl in ("pallas", "reference"):
    layer = Layer(Full(), Stream.random(1), env=env(impl))
    layer.cache = Full().init(dataclasses.replace(layer.spec, dtype=jnp.bfloat16), 1)
    layer.prefill([20, 7])
    out, _ = layer.decode([20, 7])
    outputs.append(out)
  assert outputs[0].dtype == np.float32
  np.testing.assert_allclose(*outputs, atol=2e-2)
