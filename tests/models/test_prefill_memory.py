"""What a long prompt holds at once, by the shapes of its traced program at full size.

What XLA makes of it on a GPU is printed by the bench suite `prefill`.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core

from kvjax import (
  H2O,
  TOVA,
  AdaKV,
  Cache,
  CacheSpec,
  Carry,
  DuoAttention,
  Env,
  Full,
  Prompt,
  PyramidKV,
  SnapKV,
)


def sizes(jaxpr):
  """Elements of every array that a program names, those of its inner programs included."""
  for equation in jaxpr.eqns:
    shaped = (variable.aval for variable in equation.outvars)
    yield from (aval.size for aval in shaped if hasattr(aval, "size"))
    for value in jax.tree.leaves(list(equation.params.values()), is_leaf=is_program):
      if is_program(value):
        yield from sizes(getattr(value, "jaxpr", value))


def is_program(x):
  return isinstance(x, core.Jaxpr | core.ClosedJaxpr)


@pytest.mark.core(3)
@pytest.mark.parametrize("impl", ["pallas", "reference"])
@pytest.mark.parametrize(
  "method",
  [
    Full(),
    SnapKV(budget=2048),
    PyramidKV(budget=2048),
    TOVA(budget=2048),
    H2O(budget=2048),
    AdaKV(SnapKV(budget=2048)),
    DuoAttention("alternate"),
  ],
  ids=lambda m: type(m).__name__,
)
def test_no_map_of_queries_and_slots(method, impl):
  """A layer of an 8B shape over 128K tokens: nothing is larger than blocks of the reference are.

  The map of one head would have 2^34 elements, of a layer 2^39; the queries have 2^29.
  """
  tokens, spec = 1 << 17, CacheSpec(1, 1 << 17, 8, 4, 128, 32)
  at = method.at(Env(32, impl=impl), 1)
  of = jax.ShapeDtypeStruct
  kv = of((1, 8, tokens, 128), jnp.bfloat16)
  cache = jax.eval_shape(lambda: Cache.empty(method, spec, 1))

  def run(cache, q, k, v, valid):
    prompt = Prompt(valid, valid, None, tokens, 0)
    return method.prefill(at, cache, q, k, v, prompt, Carry())[:2]

  q = of((1, 8, 4, tokens, 128), jnp.bfloat16)
  traced, (_, kept) = jax.make_jaxpr(run, return_shape=True)(cache, q, kv, kv, of((1,), jnp.int32))
  blocks = 32 * 512 * tokens if impl == "reference" and isinstance(method, H2O) else 0
  assert max(sizes(traced.jaxpr)) <= max(q.size, blocks)
  held = sum(x.size for x in jax.tree.leaves(kept))
  assert held == sum(x.size for x in jax.tree.leaves(cache))
  if not method.traits.positional:  # what the layers above are computed beside
    assert held < kv.size / 10


@pytest.mark.parametrize("impl", ["pallas", "reference"])
def test_a_chunk_never_makes_the_full_cache(impl):
  """DuoAttention with half of the heads retrieving: no array has the keys of all heads.

  A layer of an 8B shape of 128K tokens, read in chunks of 2,048.
  """
  tokens, chunk, spec = 1 << 17, 2048, CacheSpec(1, 1 << 17, 8, 4, 128, 32)
  method = DuoAttention("alternate")
  at, of = method.at(Env(32, impl=impl), 1), jax.ShapeDtypeStruct
  kv = of((1, 8, chunk, 128), jnp.bfloat16)
  cache = jax.eval_shape(lambda: Cache.empty(method, spec, 1))

  def run(cache, q, k, v, valid):
    prompt = Prompt(valid, valid, None, chunk)
    return method.prefill(at, cache, q, k, v, prompt, Carry())[:2]

  q = of((1, 8, 4, chunk, 128), jnp.bfloat16)
  traced = jax.make_jaxpr(run)(cache, q, kv, kv, of((1,), jnp.int32))
  held = sum(x.size for x in jax.tree.leaves(cache))
  assert held < 0.6 * 2 * 8 * tokens * 128
  assert max(sizes(traced.jaxpr)) < 0.6 * 8 * tokens * 128
