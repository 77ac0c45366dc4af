"""What caches take is known beforehand, and a lack of memory says what would fit."""

import dataclasses

import jax
import numpy as np
import pytest

import kvjax
from kvjax import METHODS, CacheSpec, plan_memory
from kvjax.models.decode import by_layer, generate, step
from kvjax.runtime import memory
from tests.meshes import mesh_of, model

ON_GPU = jax.default_backend() == "gpu"  # where stores lie on the host
SPEC = CacheSpec(batch=2, capacity=128, kv_heads=8, groups=2, head_dim=16, layers=4)


@pytest.mark.kin
@pytest.mark.core(9)
@pytest.mark.parametrize("name", METHODS)
def test_the_plan_is_what_caches_take(name):
  method = kvjax.settings.example(METHODS[name], 24)
  caches = method.init_caches(SPEC)
  leaves = jax.tree.leaves(caches)
  hosted = sum(x.nbytes for x in leaves if "host" in x.sharding.memory_kind and ON_GPU)
  held = sum(x.nbytes for x in leaves) - hosted
  assert plan_memory(SPEC, method) == kvjax.MemoryPlan(held, hosted)


@pytest.mark.parametrize(("heads", "slots"), [(4, 1), (2, 4)])
def test_the_plan_of_a_mesh_is_what_each_device_takes(heads, slots):
  mesh, method = mesh_of(heads, slots), kvjax.settings.example(METHODS["quest"], 24)
  decoder = model(heads, slots)
  caches = decoder.init_caches(method, 2, 128)
  parts = [x.addressable_shards[-1].data.nbytes for x in jax.tree.leaves(caches)]
  spec = decoder.spec(2, 128)
  assert plan_memory(spec, method, mesh).device == sum(parts)
  assert plan_memory(spec, method).device == sum(x.nbytes for x in jax.tree.leaves(caches))


def refuse(*args, **kwargs):
  raise jax.errors.JaxRuntimeError(
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4096 bytes."
  )


@pytest.mark.parametrize("entry", ["prefill", "generate"])
@pytest.mark.parametrize(
  ("method", "name"),
  [
    (kvjax.H2O(budget=48), "budget"),
    (kvjax.ART(kvjax.SnapKV(90)), "budget"),
    (kvjax.Quest(24, 4, base=kvjax.SnapKV(60, 4)), "budget"),  # of what is kept
    (kvjax.Full(), "capacity"),
    pytest.param(kvjax.AdaKV(kvjax.SnapKV(90)), "budget", marks=pytest.mark.slow),
    pytest.param(
      kvjax.DuoAttention("alternate", sinks=4, recent=8), "capacity", marks=pytest.mark.slow
    ),
  ],
)
def test_a_lack_of_memory_says_what_would_fit(monkeypatch, entry, method, name):
  """The setting that is named fits in what is left beside the weights; one more does not."""
  decoder = model()
  spec = decoder.spec(2, 128)
  caches = decoder.init_caches(method, 2, 128)
  need, weights = plan_memory(spec, method).device, decoder.weight_bytes()
  room = need // 2
  monkeypatch.setattr(
    memory, "device_limit", lambda: int((weights + room) / (1 - memory.SPARE)) + 1
  )
  monkeypatch.setattr(by_layer.ByLayer, "prefill", refuse)
  monkeypatch.setattr(step, "decode", refuse)
  tokens, lengths = np.ones((2, 5), np.int32), np.array([5, 3])
  with pytest.raises(MemoryError) as caught:
    if entry == "prefill":
      generate.prefill(decoder, tokens, lengths, caches, method)
    else:
      generate.generate(decoder, np.zeros((2, 64), np.float32), caches, method, steps=4)
  text = str(caught.value)
  assert repr(method) in text and "batch 2, capacity" in text and "4.00 KiB failed" in text
  assert memory.readable(need) in text and memory.readable(weights) in text
  fits = int(text.split(f"a {name} of ")[1].split()[0])
  for extra, expected in ((0, True), (1, False)):
    if name == "budget":
      assert memory._budget(memory._with_budget(method, fits)) == fits < memory._budget(method)
      changed = plan_memory(spec, memory._with_budget(method, fits + extra))
    else:
      changed = plan_memory(dataclasses.replace(spec, capacity=fits + extra), method)
    assert (changed.device <= room) == expected


def test_caches_beyond_all_memory():
  before = r"capacity: found .* take 3168\.00 TiB .* take a smaller"
  after = r"3168\.00 TiB of caches.* a capacity of \d+ would fit"  # on a GPU, which is asked for it
  with pytest.raises(MemoryError, match=f"{before}|{after}"):
    model().init_caches(kvjax.Full(), 1, 1 << 40)


def test_stores_that_numpy_was_shown_are_named():
  said = "INVALID_ARGUMENT: Donation requested for buffer with external reference"
  with (
    pytest.raises(ValueError, match="caches: found an array in the host's memory that NumPy"),
    memory.explained("x", kvjax.Full(), SPEC),
  ):
    raise jax.errors.JaxRuntimeError(said)


def test_other_errors_are_left_alone():
  shared = "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 300000"
  for error in (jax.errors.JaxRuntimeError(shared), jax.errors.JaxRuntimeError("INTERNAL")):
    with pytest.raises(jax.errors.JaxRuntimeError), memory.explained("x", kvjax.Full(), SPEC):
      raise error
