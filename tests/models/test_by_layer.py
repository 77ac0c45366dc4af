"""Prompts by programs of a layer: what all layers at once give, compiled once for those alike."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import At, Env
from kvjax.models.decode import by_layer
from kvjax.models.decode.prefill import prefill
from kvjax.models.nn import flat
from kvjax.runtime import sites
from kvjax.testing.tiny import LENGTHS, TOKENS, Run, model

HEADS_OF_FOUR = (1, 0, 0.2), (3, 5, 0.4)
# How many programs the layers of a prompt take: of four layers, all alike but where a method asks.
PROGRAMS = {
  "snapkv": (kvjax.SnapKV(12, window_size=4), 1),
  "pyramidkv": (kvjax.settings.example(kvjax.PyramidKV, 12), None),  # by the sizes of its caches
  "quest": (kvjax.Quest(16, page=4), 2),  # two dense layers
  "random": (kvjax.Random(12), 4),  # the layer's number is in its seed
  "etf": (kvjax.ETF(start=0.25), 4),  # nothing, and three shares
  "cpe": (kvjax.settings.example(kvjax.CPE, 12), 2),
  "art over quest": (kvjax.ART(kvjax.Quest(16, page=4), splits=1), 2),
  "ltri": (kvjax.settings.example(kvjax.Ltri, 12), 1),
  **{
    name: (kvjax.Ltri(2, 6, 4, 2, chunk=24, held=2, heads=HEADS_OF_FOUR, from_top=from_top), 2)
    for name, from_top in (("ltri, heads", False), ("ltri, top layer's blocks", True))
  },
}

STREAMED = {"init_tokens": 2, "local": 8, "block": 4, "retrieved": 2, "chunk": 8, "held": 4}
HEADS = tuple((layer, layer % 6, layer / 10) for layer in (2, 3, 5, 6, 8))


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_equals_all_layers_at_once(name):
  method, programs = PROGRAMS[name]
  by_layer._SITES.clear()
  run = Run(method)
  want = run.prefill()
  caches = method.init_caches(model().spec(2, 64))
  tokens, lengths = jnp.asarray(TOKENS[:, : LENGTHS.max()]), jnp.asarray(LENGTHS)
  got, caches = by_layer.ByLayer(model()).prefill(tokens, lengths, caches, method)
  np.testing.assert_allclose(got, want, atol=1e-5)
  chex.assert_trees_all_close(caches, run.caches, atol=1e-5)
  (sites,) = by_layer._SITES.values()
  sizes = {(id(site), cache.size) for site, cache in zip(sites, caches, strict=True)}
  assert len(sizes) == (programs or len({cache.size for cache in caches}))
  # A layer whose carry has another form takes a program of its own at the same site.
  counted = by_layer.ByLayer(model()).programs(method, 2, int(LENGTHS.max()), 64)
  assert len(sizes) <= counted <= len(sizes) + 1


@pytest.mark.slow
@pytest.mark.parametrize(
  ("method", "prompt", "step"),
  [
    (kvjax.settings.example(kvjax.InfLLM, 12), 1, 1),
    # Four rates, and no program for each; the first layer is handed votes, of which there are none.
    (kvjax.Ltri(**STREAMED, rate=(20.0, 9.0, 5.0, 3.0)), 1, 1),
    (kvjax.Ltri(**STREAMED, prefetch=True), 2, 1),
    # Layers with a retrieval head and layers without.
    (kvjax.Ltri(**STREAMED, heads=HEADS), 2, 2),
    (kvjax.Ltri(**STREAMED, heads=HEADS, persistent=False), 2, 2),
  ],
)
def test_programs_of_streams(method, prompt, step):
  """Few, however many layers there are, each with a retrieval head and settings of its own."""
  layered = by_layer.ByLayer(model(layers=10))
  assert layered.programs(method, 1, 8, 64) == prompt
  assert layered.programs(method, 1, None, 64) == step


@pytest.mark.slow
def test_programs_that_were_dropped_are_traced_again():
  """Each for the layers that it serves: the method asks for the layer's number."""
  method = kvjax.Random(12)

  def read():
    caches = method.init_caches(model().spec(2, 64))
    return prefill(model(), TOKENS[:, :23], LENGTHS, caches, method)

  want = read()
  by_layer._prefill.clear_cache()
  chex.assert_trees_all_equal(read(), want)


@pytest.mark.parametrize(("tokens", "own"), [(511, True), (512, False)])
def test_a_gpu_may_make_kernels_of_its_own_for_small_prompts(monkeypatch, tokens, own):
  taken, method = [], kvjax.Full()

  def through(_, head, run, method, past, caches, x, told, handed):
    taken.append(run)
    return x, caches, handed, []

  monkeypatch.setattr(by_layer.ByLayer, "_through", through)
  caches = method.init_caches(model().spec(1, tokens))
  given = jnp.zeros((1, tokens), jnp.int32), jnp.array([tokens]), caches, method
  by_layer.ByLayer(model()).prefill(*given)
  assert taken == [by_layer._prefill if own else by_layer._prefill_large]


@pytest.mark.slow
def test_a_row_that_takes_no_part_in_a_step_keeps_every_bit():
  method = kvjax.SnapKV(12, window_size=4)
  run = Run(method)
  run.prefill()
  before = jax.tree.map(np.asarray, run.caches)
  layered = by_layer.ByLayer(model())
  tokens, live = jnp.asarray(TOKENS[:, 30]), jnp.asarray([False, True])
  got, after = layered.decode(tokens, run.caches, method, live)
  for cache, old in zip(after, before, strict=True):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[0], y[0]), cache, old)
    np.testing.assert_array_equal(cache.seen, old.rows["seen"] + [0, 1])
  want = Run(method)
  want.prefill()
  said = want.decode(np.array([30, 30]), live=np.asarray(live))
  np.testing.assert_allclose(got[1], said[1], atol=1e-5)


def test_members_of_a_shared_prompt_are_asked_each_by_itself():
  """Four layers under Full and Quest with its two dense ones, read at once: two programs."""
  by_layer._SITES.clear()
  method = kvjax.SharedPrefill((kvjax.Full(), kvjax.Quest(16, page=4)))
  caches = method.init_caches(model().spec(2, 64))
  prefill(model(), TOKENS[:, :23], LENGTHS, caches, method)
  (sites,) = by_layer._SITES.values()
  assert [site.first for site in sites] == [0, 0, 2, 2]


def test_a_call_compiles_nothing_that_was_compiled_beside():
  """What threads compile side by side is what calls find; a second prompt compiles nothing."""
  compiled = []

  def listen(name, _, **about):
    if name.endswith("backend_compile_duration"):
      compiled.append(about["fun_name"])

  method = kvjax.Quest(17, page=4)
  flat.drop()
  by_layer._SITES.clear()
  jax.monitoring.register_event_duration_secs_listener(listen)
  for _ in range(2):
    caches = method.init_caches(model().spec(2, 64))
    prefill(model(), TOKENS[:, :23], LENGTHS, caches, method)
    names = [name for name in compiled if "_of_prompt" in name or "_predict" in name]
    assert sorted(names) == ["jit(_of_prompt)"] * 2 + ["jit(_predict)"]
  jax.monitoring.unregister_event_duration_listener(listen)


def test_a_site_serves_layers_of_equal_answers():
  site = sites.Site(2, Env(8), kvjax.Full())
  assert site.of_layer(lambda layer: layer >= 2)
  with site.serving(5):
    assert site.of_layer(lambda layer: layer < 6)
    assert site.by("pallas").of_layer(lambda layer: layer != 4)
    assert (site.by("pallas").env.impl, site.env.impl) == ("pallas", "auto")
  for layer in (1, 6, 4):  # below, above, and where something was asked elsewhere
    with pytest.raises(sites.DifferentLayer), site.serving(layer):
      raise AssertionError(layer)
  with pytest.raises(sites.DifferentLayer), site.serving(3):
    _ = site.layer
  assert site != At(2, Env(8), kvjax.Full()) and site == site
