"""`split` describes a module by all that it is but its arrays, and notices what else changed."""

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


def check(model):
  """The form, from which `join` makes what flax says that the module is, of the same arrays."""
  form, leaves = flat.split(model)
  (graph, state), (again, same) = (nnx.split(x) for x in (model, flat.join(form, leaves)))
  assert again == graph
  assert all(a is b for a, b in zip(*map(jax.tree.leaves, (state, same)), strict=True))
  return form


def test_new_arrays_are_seen_under_the_same_description(model):
  before = check(model)
  model.layers[1].mlp_norm.scale[...] = jnp.full(48, 2.0)
  model.embedding.set_value(model.embedding[...] * 2)
  assert check(model) is before
  assert check(nnx.clone(model)) is before


@pytest.mark.parametrize(
  "change",
  [
    lambda m: setattr(m, "env", Env(2, m.config.rope, "reference", 8)),
    lambda m: setattr(m.layers[0].mlp_norm, "eps", 1e-3),
    lambda m: setattr(m, "head", nnx.Param(m.embedding[...] + 1)),
    lambda m: setattr(m.layers[0], "mlp", nnx.clone(m.layers[0].attention)),
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


def test_a_variable_in_two_places_is_two_of_one_array(model):
  model.head = model.embedding
  again = flat.join(*flat.split(model))
  held = [x.get_raw_value() for x in (model.embedding, again.embedding, again.head)]
  assert held[0] is held[1] is held[2]
