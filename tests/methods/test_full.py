"""Full: exact attention, against a NumPy float64 oracle that keeps no cache at all."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import Env, Full, Plan
from kvjax.core.leaves import Leaf
from kvjax.ops import attention
from kvjax.testing.layer import Layer, Stream
from tests.oracles import begun, follow, read_prompt


def test_worked_example():
  """Keys 0 and 0 weigh alike: the output is the mean of the values."""
  stream = Stream(np.ones((1, 1, 1, 2, 2)), np.zeros((1, 1, 2, 2)), np.array([[[[0, 2], [4, 0]]]]))
  stream = Stream(*(np.float32(x) for x in (stream.q, stream.k, stream.v)))
  out = Layer(Full(), stream, capacity=4).prefill([2])
  np.testing.assert_allclose(out[0, 0, 0], [[0, 2], [2, 1]], atol=1e-6)


def test_prompt_and_decode_against_oracle():
  layer, lengths = Layer(Full(), Stream.random(0)), [30, 11]
  read_prompt(layer, lengths, lambda b, h, t: range(t + 1), atol=2e-6)
  follow(layer, lengths, 4, lambda b, h, t: range(t + 1), atol=2e-6)


@pytest.mark.core(1)
@pytest.mark.parametrize("blocks", [(7, 5), (64, 3), (3, 64)])
def test_prompt_attention_in_any_blocks(monkeypatch, blocks):
  """Query and key blocks that divide nothing, ragged rows, a later chunk, `past` known or not."""
  stream, lengths = Stream.random(1), [26, 9]
  whole = Layer(Full(), stream).prefill(lengths)
  monkeypatch.setattr(attention, "QUERY_BLOCK", blocks[0])
  monkeypatch.setattr(attention, "KEY_BLOCK", blocks[1])
  np.testing.assert_allclose(Layer(Full(), stream).prefill(lengths), whole, atol=2e-6)
  for past in (16, None):
    layer = Layer(Full(), stream)
    first = layer.prefill([16, 4])
    second = layer.prefill([10, 5], start=[16, 4], past=past)
    np.testing.assert_allclose(first[0], whole[0][:, :, :16], atol=2e-6)
    np.testing.assert_allclose(second[0], whole[0][:, :, 16:], atol=2e-6)
    np.testing.assert_allclose(second[1][:, :, :5], whole[1][:, :, 4:9], atol=2e-6)


def test_a_plan_fetches_what_it_lists():
  """A hole, entries after the count and slots after the last one hold no token."""
  layer = begun(Full(), Stream.random(0), [13, 13], capacity=13)
  entries = np.broadcast_to(np.array([3, -1, 0, 1]), (2, 3, 4))
  count, span = jnp.full((2, 3), 3), layer.method.span(layer.at, layer.cache, None)
  plan = Plan(span, jnp.asarray(entries, jnp.int32), count, unit=4)
  view = attention.read(layer.cache, plan)
  want = [12, -1, -1, -1, -1, -1, -1, -1, 0, 1, 2, 3, -1, -1, -1, -1]
  assert (np.asarray(view.pos) == want).all()
  assert (np.asarray(view.slot) == np.where(np.array(want) < 0, 13, want)).all()
  held = np.array(want) >= 0
  k = np.asarray(layer.cache.slots["k"])[:, :, np.array(want)[held]]
  np.testing.assert_array_equal(np.asarray(view.k)[:, :, held], k)


@pytest.mark.slow
def test_ranges_end_before_their_stops():
  """Two of each row, that differ by row; no logit elsewhere."""
  q, k, v = jnp.ones((2, 1, 1, 4)), jnp.ones((2, 1, 9, 4)), jnp.arange(18.0).reshape(2, 1, 9, 1)
  edges = ([[0], [1]], [[2], [1]], [[4], [6]], [[5], [9]])
  a, b, c, d = (jnp.array(x) for x in edges)
  at, v = Full().at(Env(1), 0), jnp.repeat(v, 4, -1)
  state, logits = attention.attend_ranges(at, q, k, v, [(a, b), (c, d)])
  seen = [np.flatnonzero(x).tolist() for x in np.isfinite(logits[:, 0, 0])]
  assert seen == [[0, 1, 4], [6, 7, 8]]
  np.testing.assert_allclose(state.o[:, 0, 0, 0], [5 / 3, 16])


@dataclasses.dataclass(frozen=True)
class Marked(Full):
  """Keeps two numbers with every slot."""

  def leaves(self, spec, layer):
    return {**super().leaves(spec, layer), "mark": Leaf("slots", (2,), new=ones)}


def ones(new):
  return jnp.ones((*new["pos"].shape, 2))


def test_slots_may_hold_vectors():
  """What a method keeps with a slot has any shape, in prompts and after them."""
  layer = begun(Marked(), Stream.random(0), [20, 5])
  layer.decode([20, 5])
  mark, held = layer.cache.slots["mark"], layer.cache.pos >= 0
  assert held.sum() == 3 * (21 + 6)
  np.testing.assert_array_equal(mark, np.repeat(np.float32(held)[..., None], 2, -1))
