"""What a long prompt holds at once, by the shapes of its traced program at full size.

What XLA makes of it on a GPU is printed by the bench suite `prefill`.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core

import kvjax
from kvjax import Cache, CacheSpec, Carry, Env, Prompt


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


TOKENS = 1 << 17


def traced(method, impl, tokens, past):
  """Queries and keys of a layer of an 8B shape that reads tokens, and its cache before and after.

  And how many elements the largest array of the program has.
  """
  at, of = method.at(Env(32, impl=impl), 1), jax.ShapeDtypeStruct
  q, kv = (of((1, 8, *shape, 128), jnp.bfloat16) for shape in ((4, tokens), (tokens,)))
  cache = jax.eval_shape(lambda: Cache.empty(method, CacheSpec(1, TOKENS, 8, 4, 128, 32), 1))

  def run(cache, q, k, v, valid):
    prompt = Prompt(valid, valid, None, tokens, past)
    return method.prefill(at, cache, q, k, v, prompt, Carry())[:2]

  given = cache, q, kv, kv, of((1,), jnp.int32)
  program, (_, kept) = jax.make_jaxpr(run, return_shape=True)(*given)
  held, after = (sum(x.size for x in jax.tree.leaves(each)) for each in (cache, kept))
  return q.size, kv.size, held, after, max(sizes(program.jaxpr))


@pytest.mark.core(3)
@pytest.mark.parametrize("impl", ["pallas", "reference"])
@pytest.mark.parametrize(
  "method",
  [
    kvjax.Full(),
    *(cls(budget=2048) for cls in (kvjax.SnapKV, kvjax.PyramidKV, kvjax.TOVA, kvjax.H2O)),
    kvjax.AdaKV(kvjax.SnapKV(budget=2048)),
    kvjax.DuoAttention("alternate"),
  ],
  ids=lambda m: type(m).__name__,
)
def test_no_map_of_queries_and_slots(method, impl):
  """A layer of an 8B shape over 128K tokens: nothing is larger than blocks of the reference are.

  The map of one head would have 2^34 elements, of a layer 2^39; the queries have 2^29.
  """
  q, kv, held, after, largest = traced(method, impl, TOKENS, 0)
  blocks = 32 * 512 * TOKENS if impl == "reference" and isinstance(method, kvjax.H2O) else 0
  assert largest <= max(q, blocks) and held == after
  if not method.traits.positional:  # what the layers above are computed beside
    assert held < kv / 10


@pytest.mark.parametrize("impl", ["pallas", "reference"])
def test_a_chunk_never_makes_the_full_cache(impl):
  """DuoAttention with half of the heads retrieving: no array has the keys of all heads.

  A layer of an 8B shape of 128K tokens, read in chunks of 2,048.
  """
  _, _, held, _, largest = traced(kvjax.DuoAttention("alternate"), impl, 2048, None)
  keys = 8 * TOKENS * 128
  assert held < 0.6 * 2 * keys and largest < 0.6 * keys
