"""Laws of every method in one layer: NaN, kernels, heads on two devices."""

import dataclasses
import unittest
from typing import Any

import chex
import jax
import numpy as np
from jax.experimental import checkify
from jax.sharding import PartitionSpec as P

from kvjax.core.context import Env
from kvjax.ops import shared_slots
from kvjax.runtime import sharding
from kvjax.testing.cases import STEPS, Case, Told, finite, law, logits_of, raises
from kvjax.testing.layer import Layer, Stream
from kvjax.testing.tiny import CAPACITY, CLOSE

TOP = 3  # the layer of four in which every method does what it does


def one_layer(case: Case, stream: Stream, **how: Any) -> Layer:
  """A layer of four KV heads, of which [22, 9] tokens are read at once."""
  env = Env(4, tile=4, **{"impl": "reference", **how})
  return Layer(case.tight, stream, CAPACITY, TOP, env)


def stream_of(seed: int) -> Stream:
  return Stream.random(seed, kv_heads=4, groups=2, tokens=40)


@law
def nan_is_loud_and_leaves_no_trace(case):
  """A query of NaN: its output is NaN, statistics are not, and the other row notices nothing."""
  clean = stream_of(5)
  ill = clean.poisoned("q", row=0, token=24)
  layers = one_layer(case, clean), one_layer(case, ill)
  for layer in layers:
    layer.prefill([22, 9])
  for step in range(STEPS):
    (want, _), (out, _) = (layer.decode([22 + step, 9 + step]) for layer in layers)
    np.testing.assert_array_equal(out[1], want[1])
    if step == 2:
      assert np.isnan(out[0]).all(), "output of a NaN query: found numbers, expected NaN"
    else:
      finite(f"output of step {step}", out[0])
  cache = layers[1].cache
  for path, x in jax.tree.leaves_with_path(cache):
    ill = int(np.isnan(x).sum())
    assert not ill, f"cache{jax.tree_util.keystr(path)}: found {ill} NaN, expected none"
  for row in np.asarray(shared_slots.by_head(cache)["pos"])[0]:
    shared = shared_slots.sharers(cache) > 1
    kept = row[: (row >= 0).sum() if shared else int(cache.used[0])]
    once = (kept >= 0).all() and len(set(kept.tolist())) == len(kept)
    assert once, f"pos: found {kept.tolist()}, expected each token once"


@law
def nan_raises_when_asked(case):
  """The switch names method, layer and row; the row goes on later as if nothing had happened."""
  clean, live = stream_of(6), [True, False]
  plain, checked = (one_layer(case, clean, check_nan=check) for check in (False, True))
  plain.prefill([22, 9])
  message = (
    rf"{case.method.__name__}, layer {TOP}: found NaN .* of row 0, which has cached {{}} tokens"
  )
  checked.stream = clean.poisoned("k", row=0, token=5)
  with raises(checkify.JaxRuntimeError, message.format(0)):
    checked.prefill([22, 9])
  checked.stream = clean
  checked.prefill([22, 0], tokens=22)
  for step, which in enumerate("qk" if case.skips_newest else "qkv"):
    at = [22 + step, 9 + step]
    want, _ = plain.decode(at)
    before = jax.tree.map(lambda x: np.asarray(x[0]), checked.cache)
    checked.stream = clean.poisoned(which, row=0, token=at[0])
    with raises(checkify.JaxRuntimeError, message.format(at[0])):
      checked.decode(at)
    chex.assert_trees_all_equal(jax.tree.map(lambda x: np.asarray(x[0]), checked.cache), before)
    checked.stream = clean
    out, _ = checked.decode(at, live=live)
    np.testing.assert_allclose(out[0], want[0], atol=1e-6)
  chex.assert_trees_all_close(checked.cache, plain.cache, atol=1e-6)


@law
def pallas_equals_reference_in_a_layer(case):
  """The kernels (interpreted on a CPU) against the reference: a prompt, and steps after it."""
  plain, kernels = (one_layer(case, stream_of(4), impl=impl) for impl in ("reference", "pallas"))
  np.testing.assert_allclose(kernels.prefill([22, 9]), plain.prefill([22, 9]), atol=2e-5)
  for step in range(STEPS):
    (out, _), (want, _) = (layer.decode([22 + step, 9 + step]) for layer in (kernels, plain))
    np.testing.assert_allclose(out, want, atol=2e-5)


@law
def pallas_equals_reference(case):
  """The same in a decoder, whose products and norms are kernels too."""
  out = Told(case, impl="pallas").generate()
  np.testing.assert_allclose(out, logits_of(case), atol=CLOSE)


@law
def heads_sharded_over_two_devices(case):
  """One layer under shard_map, KV heads split in two, equals the layer on one device.

  Skipped with fewer devices, and where the method refuses such a mesh; a CPU has as many as
  XLA_FLAGS=--xla_force_host_platform_device_count=2 says.
  """
  if jax.device_count() < 2:
    raise unittest.SkipTest(f"needs 2 devices, found {jax.device_count()}")
  whole, split = (one_layer(case, stream_of(3)) for _ in range(2))
  uneven = case.tight.traits.uneven
  if uneven is not None and (why := uneven(whole.spec, 2)):
    raise unittest.SkipTest(f"refused over two devices: {why}")
  mesh, heads = sharding.make_mesh(2), P(None, "heads")
  at = split.method.at(sharding.on_mesh(split.at.env, mesh), TOP)
  specs = sharding.cache_specs(split.cache, split.method)

  def sharded(move):
    def run(wo, cache, q, k, v, told, carry):
      told = told if wo is None else dataclasses.replace(told, wo=wo)
      return getattr(split.method, move)(at, cache, q, k, v, told, carry)[:2]

    given = P("heads"), specs, heads, heads, heads, P(), P()
    both = jax.jit(sharding.shard_map(run, mesh, given, (heads, specs)))

    def call(*args):
      *arrays, told, carry = args
      wo = getattr(told, "wo", None)
      told = told if wo is None else dataclasses.replace(told, wo=None)
      return None, (*both(wo, *arrays, told, carry), None, None)

    return call

  split._prefill, split._decode = sharded("prefill"), sharded("decode_step")
  for run in ("prefill", [22, 9]), ("decode", [22, 9]), ("decode", [23, 10]):
    outs = [np.asarray(getattr(layer, run[0])(run[1])[0]) for layer in (whole, split)]
    np.testing.assert_allclose(outs[1], outs[0], atol=2e-5)
