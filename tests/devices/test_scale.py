"""What a 70B model takes on each of four devices, that its steps lower, and how it gets there."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax import METHODS, plan_memory
from kvjax.models.io.presets import PRESETS
from kvjax.models.nn import parallel
from kvjax.models.nn.transformer import Transformer
from kvjax.programs.suites import e2e, fitting
from kvjax.runtime import sharding
from scripts.benches import scale

(NAME, BATCH, TOKENS), DEVICES = scale.LARGE, max(scale.DEVICES)
CONFIG = PRESETS[NAME]
H100 = 80 << 30


def abstract(layers, heads=DEVICES, slots=1):
  """The decoder on its mesh, shapes and places only."""
  config = dataclasses.replace(CONFIG, layers=layers)
  made = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
  place = lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to)  # noqa: E731
  return parallel.placed(made, kvjax.make_mesh(heads, slots), place)


def methods(name):
  """A method of the suite, and ART over it."""
  base = kvjax.settings.example(METHODS[name], TOKENS // scale.KEPT)
  return base, kvjax.ART(base)


@pytest.mark.slow
@pytest.mark.parametrize("name", scale.WITH_ART)
def test_70b_fits_on_four_devices(name):
  """A quarter of the weights and of the cache, with room to spare on 80 GiB."""
  one, two = (abstract(n).weight_bytes() for n in (1, 2))  # layers are alike
  weights = one + (CONFIG.layers - 1) * (two - one)
  assert weights == pytest.approx(2 * 70_553_706_496 / DEVICES, rel=1e-3)
  spec = dataclasses.replace(abstract(1).spec(BATCH, TOKENS + e2e.STEPS), layers=CONFIG.layers)
  for method in methods(name):
    caches = plan_memory(spec, method, kvjax.make_mesh(heads=DEVICES)).device
    assert DEVICES * caches == pytest.approx(plan_memory(spec, method).device, rel=1e-3)
    assert weights + caches < 0.8 * H100


def step_of(model, method):
  """A decode step of the model, lowered for its mesh."""
  leaves, form = jax.tree.flatten(model)
  caches = jax.eval_shape(lambda: method.init_caches(model.spec(BATCH, TOKENS + e2e.STEPS)))
  where = sharding.named(model.mesh, sharding.cache_specs(caches, method))
  caches = jax.tree.map(lambda x, to: x.update(sharding=to), caches, where)

  def step(leaves, caches, token):
    return jax.tree.unflatten(form, leaves).decode(token, caches, method)

  token = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
  return jax.jit(step, donate_argnums=1).lower(leaves, caches, token)


@pytest.mark.slow
@pytest.mark.parametrize("name", scale.WITH_ART)
def test_steps_of_70b_lower(name):
  """Two of its layers, as each of four devices runs them: two all-reduces each, and one before."""
  for method in methods(name):
    lowered = step_of(abstract(2), method)
    assert lowered.out_info[0].shape == (BATCH, CONFIG.vocab)
    assert lowered.as_text().count("stablehlo.all_reduce") == 2 * 2 + 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "quest"])
@pytest.mark.parametrize(("heads", "slots"), [(8, 1), (4, 2)])
def test_the_plan_of_70b_is_what_its_step_is_compiled_for(name, heads, slots):
  """Caches and weights of two layers, by heads and by slots; the devices need not be there."""
  model = abstract(2, heads, slots)
  method = kvjax.settings.example(METHODS[name], TOKENS // scale.KEPT)
  mesh = jax.sharding.AbstractMesh((heads, slots), ("heads", "slots"))
  plan = kvjax.plan_memory(model.spec(BATCH, TOKENS + e2e.STEPS), method, mesh).device
  memory = step_of(model, method).compile().memory_analysis()
  tokens = BATCH * 4
  assert memory.argument_size_in_bytes == pytest.approx(
    model.weight_bytes() + plan + tokens, abs=1024
  )
  assert memory.alias_size_in_bytes == pytest.approx(plan, abs=1024)


@pytest.mark.slow
def test_weights_and_caches_are_made_where_they_belong():
  """No device holds another's part, nor draws it: not even while it is drawn."""
  mesh = kvjax.make_mesh(heads=2)
  model = e2e.drawn(e2e.TINY, jnp.float32, mesh)
  caches = e2e.filled(model, kvjax.settings.example(METHODS["snapkv"], 16), 2, 64)
  layer = model.layers[1]
  for x in (layer.attention.wqkv[...], layer.mlp.down[...], caches[1].slots["k"], caches[1].pos):
    assert [part.data.nbytes for part in x.addressable_shards] == [x.nbytes // 2] * 2
  pos = np.sort(np.asarray(caches[0].pos))
  np.testing.assert_array_equal(pos, np.broadcast_to([*range(4), *range(52, 64)], pos.shape))
  to = jax.NamedSharding(kvjax.make_mesh(heads=8), sharding.spec_of(("dim", None, "ffn")))
  draw = jax.jit(e2e._weight, static_argnums=(1, 2), out_shardings=to)
  memory = draw.lower(jax.random.key(0), (256, 2, 4096), jnp.float32).compile().memory_analysis()
  part = 256 * 2 * 4096 * 4 // 8
  assert memory.output_size_in_bytes == part
  assert memory.temp_size_in_bytes < 4 * part  # random bits, in several steps


@pytest.mark.slow
def test_caches_that_fit_once_are_had_in_turn(monkeypatch):
  """On one device, on two, on one again: each time from the state that all begin with."""
  mesh = kvjax.make_mesh(heads=2)
  outputs = []
  for memory in (math.inf, 1.0):
    monkeypatch.setattr(scale.suites, "memory", lambda memory=memory: memory)
    made = scale.decoder("tiny", "tiny", 2, 64, mesh)
    steps = made.contenders[:2]
    for contender in (*steps, *steps):
      assert contender.seconds() > 0
    outputs.append([made.reference(), *(contender.output() for contender in steps)])
  for output in jax.tree.leaves(outputs):
    np.testing.assert_allclose(output, outputs[0][0], atol=1e-4)


def test_what_has_no_room_is_said_and_passed_over(capsys):
  def case(label, error):
    raise jax.errors.JaxRuntimeError(error)

  assert not list(fitting("B8 T32768", case, "RESOURCE_EXHAUSTED: Out of memory"))
  told = f"B8 T32768: not run, takes more than the memory of {jax.devices()[0].device_kind}"
  assert told in capsys.readouterr().out
  with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
    list(fitting("B8 T32768", case, "INTERNAL: a launch failed"))


def test_one_device_is_too_few(monkeypatch):
  monkeypatch.setattr(jax, "device_count", lambda: 1)
  with pytest.raises(ValueError, match=r"found 1 \w+ device, expected at least 2"):
    next(scale.cases(quick=True))
