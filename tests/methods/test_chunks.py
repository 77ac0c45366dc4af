"""Taking a chunk's computed tokens and putting them back, against NumPy's indexing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import ETF, Active, Full, Prompt
from kvjax.core import chunks
from kvjax.testing.tiny import model
from tests.compiled import compiled
from tests.steps import equations

T = 23
# Rows: as long as the chunk, shorter, of the first tokens alone, of fewer than these, idle.
TOTAL = np.array([23, 14, 3, 2, 0], np.int32)
START = np.array([12, 7, 3, 3, 3], np.int32)
ends = pytest.mark.parametrize(("apart", "count"), [(3, 14), (0, 11), (3, 3), (0, 23)])
axes = pytest.mark.parametrize("axis", [1, 2])


ends_of = compiled(Active.ends)


def prompt_of(active):
  total = jnp.asarray(TOTAL)
  return Prompt(total, total, active.index, T, 0, active.start, active.apart)


def array(axis, size, seed=0):
  """[5, size, 4] or [5, 3, size, 4]."""
  shape = (len(TOTAL), size, 4) if axis == 1 else (len(TOTAL), 3, size, 4)
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def made(apart, count):
  return ends_of(apart, START, count, T, TOTAL)


def placed(row, apart, count):
  """Of a row, the tokens that are computed, padding included."""
  start = min(max(int(START[row]), apart), T - (count - apart))
  return [*range(apart), *range(start, start + count - apart)]


def test_worked_example():
  """Ten tokens, of which a layer computes two and four: what lies past a row's end is padding."""
  active = ends_of(2, np.array([6, 3, 0, 9]), 6, 10, np.array([10, 5, 1, 10]))
  assert active.index.tolist() == [
    [0, 1, 6, 7, 8, 9],
    [0, 1, 3, 4, 10, 10],
    [0, 10, 10, 10, 10, 10],
    [0, 1, 6, 7, 8, 9],  # from 9 on it would not fit
  ]
  assert active.start.tolist() == [6, 3, 2, 6]


@pytest.mark.core(2)
@axes
@ends
def test_what_is_taken(axis, apart, count):
  x, active = array(axis, T), made(apart, count)
  for prompt in (prompt_of(active), prompt_of(Active(active.index))):
    found = np.asarray(jax.jit(lambda x, p: chunks.take(x, p, axis))(x, prompt))
    for b, total in enumerate(TOTAL):
      at = placed(b, apart, count)
      assert found.shape[axis] == len(at) == count
      real = np.array(at) < total
      want = x[b].take(at, axis - 1).compress(real, axis - 1)
      np.testing.assert_array_equal(found[b].compress(real, axis - 1), want)


@pytest.mark.core(2)
@axes
@ends
def test_what_is_put_back(axis, apart, count):
  """Of real tokens the computed ones change, and no others, whether sliced or scattered."""
  x, new, active = array(axis, T), array(axis, count, 1), made(apart, count)
  for prompt in (prompt_of(active), prompt_of(Active(active.index))):
    found = np.asarray(jax.jit(lambda x, p, y: chunks.put(x, p, y, axis))(x, prompt, new))
    for b, total in enumerate(TOTAL):
      want, written = x[b].copy(), new[b]
      for i, t in enumerate(placed(b, apart, count)):
        if t < total:
          want[(slice(None),) * (axis - 1) + (t,)] = written.take(i, axis - 1)
      real = np.arange(T) < total
      kept = found[b].compress(real, axis - 1), want.compress(real, axis - 1)
      np.testing.assert_array_equal(*kept)


@axes
def test_all_tokens_are_no_copy(axis):
  x, new, total = (jnp.asarray(x) for x in (array(axis, T), array(axis, T, 1), TOTAL))
  prompt = Prompt(total, total, None, T, 0)
  assert chunks.take(x, prompt, axis) is x
  assert chunks.put(x, prompt, new, axis) is new


@pytest.mark.parametrize("sizes", [(-1, 5, 9), (6, 5, 9), (0, 10, 9)])
def test_sizes_out_of_order(sizes):
  apart, count, tokens = sizes
  message = rf"Active.ends: found apart {apart}, count {count} and tokens {tokens}, expected 0 <= "
  with pytest.raises(ValueError, match=message):
    Active.ends(apart, jnp.zeros(1, jnp.int32), count, tokens, jnp.ones(1, jnp.int32))


# ---- a decoder under ETF, whose tokens are gathered and scattered instead


def gathered(self, at, tokens, total):
  found = super(type(self), self).active(at, tokens, total)
  return None if found is None else Active(found.index)


def by_index(cls):
  """The same method, which names its tokens one by one."""
  own = type("ByIndex", (cls,), {"active": gathered})
  return dataclasses.dataclass(frozen=True)(own)


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["project", "previous"])
@pytest.mark.parametrize("rows", [1, 3])
def test_nothing_is_gathered_or_scattered(rows, kv):
  """Under ETF states, keys and values move in pieces: none by token."""
  decoder, options = model(), {"sinks": 2, "psi": 0.3, "start": 0.25, "kv": kv}
  tokens, lengths = np.zeros((rows, 40), np.int32), np.full(rows, 40, np.int32)

  def by_token(method):
    """Gathers and scatters of fewer than eight tokens at a time."""
    caches = jax.eval_shape(lambda: method.init_caches(decoder.spec(rows, 64)))
    read = jax.make_jaxpr(lambda *args: decoder.prefill(*args, method))(tokens, lengths, caches)
    return [name for name, size in moves(read.jaxpr) if size < 8]

  last = by_token(Full())  # the state that the logits come from
  assert by_token(ETF(**options)) == last
  assert {*by_token(by_index(ETF)(**options))} == {"gather", "scatter"}


def moves(jaxpr):
  """Gathers and scatters of layers' numbers, with how many tokens each moves at a time."""
  for equation in equations(jaxpr):
    name, x = equation.primitive.name, equation.invars[0].aval if equation.invars else None
    if name in ("gather", "scatter") and x.ndim > 2 and x.dtype == jnp.float32:
      yield name, max(equation.params["slice_sizes"][1:-1]) if name == "gather" else 1
