"""`split` remembers a module's description, never its arrays, and notices what else changed."""

import copy

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from kvjax.core.context import Env
from kvjax.models.nn import flat
from kvjax.testing import tiny


@pytest.fixture
def model():
  return nnx.clone(tiny.model(layers=2))


def described(model):
  """What flax says, anew."""
  graph, state = nnx.split(model)
  return graph, jax.tree.leaves(state)


def check(model):
  form, leaves = flat.split(model)
  graph, expected = described(model)
  assert form.graph == graph
  assert len(leaves) == len(expected)
  assert all(a is b for a, b in zip(leaves, expected, strict=True))
  return form


def test_a_second_split_describes_nothing(model, monkeypatch):
  first, leaves = flat.split(model)
  monkeypatch.setattr(nnx, "split", lambda _: pytest.fail("described anew"))
  second, again = flat.split(model)
  assert second is first
  assert all(a is b for a, b in zip(leaves, again, strict=True))


def test_new_arrays_are_seen_under_the_same_description(model):
  before = check(model)
  model.layers[1].mlp_norm.scale[...] = jnp.full(48, 2.0)
  model.embedding.set_value(model.embedding[...] * 2)
  assert check(model) is before


@pytest.mark.parametrize(
  "change",
  [
    lambda m: setattr(m, "env", Env(2, m.config.rope, "reference", 8)),
    lambda m: setattr(m.layers[0].mlp_norm, "eps", 1e-3),
    lambda m: setattr(m, "head", nnx.Param(m.embedding[...] + 1)),
    lambda m: setattr(m.layers[0], "mlp", copy.copy(m.layers[0].attention)),
    lambda m: m.layers.append(nnx.clone(m.layers[0])),
  ],
  ids=["env", "eps", "head", "module", "layer"],
)
def test_what_else_changes_is_described_anew(model, change):
  before = check(model)
  change(model)
  assert check(model) is not before


def test_a_replaced_variable_is_seen(model):
  check(model)
  old = model.layers[0].attention.wo
  model.layers[0].attention.wo = nnx.Param(old[...] * 3)
  check(model)


def test_arrays_in_two_places_are_described_each_time(model):
  model.head = model.embedding
  check(model)
  model.head = nnx.Param(model.embedding[...])
  check(model)
