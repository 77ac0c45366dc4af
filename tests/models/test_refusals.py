"""What used to go wrong in silence raises: the argument, what was found, what is expected."""

import copy
import dataclasses
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.checkify import JaxRuntimeError

import kvjax
from kvjax import CacheSpec, Carry, Env, Prompt
from kvjax.analysis.traffic import step_traffic
from kvjax.models.decode import reconstruct
from kvjax.models.decode.caches import fork, restore, room, save
from kvjax.models.decode.generate import generate, prefill
from kvjax.runtime.shared_prefill import take
from kvjax.testing.layer import Layer, Stream
from kvjax.testing.tiny import CONFIG, LENGTHS, TOKENS, model
from tests.oracles import begun

FULL, WINDOW, EVICTS = kvjax.Full(), kvjax.StreamingLLM(16), kvjax.H2O(16)
INFLLM = kvjax.settings.example(kvjax.InfLLM, 16)
SPEC = CacheSpec(2, 64, 2, 3, 16, 4, jnp.float32)
CHECKED = Env(4, impl="reference", check_nan=True)


pytestmark = pytest.mark.usefixtures("untyped")  # annotations would speak first


def start(method=FULL):
  """Logits and caches after a prompt."""
  caches = method.init_caches(model().spec(2, 64))
  return prefill(model(), TOKENS[:, :23], LENGTHS, caches, method)


def both(caches, method):
  """The calls that take caches, to be refused alike; nothing of them is compiled."""
  logits = np.zeros((2, CONFIG.vocab), np.float32)
  return (
    lambda: prefill(model(), TOKENS[:, :23], LENGTHS, caches, method),
    lambda: generate(model(), logits, caches, method, steps=2),
  )


# ---- room


def test_room_is_counted_on_the_host():
  _, caches = start()
  assert room(caches, FULL).tolist() == [64 - 23, 64 - 14]
  assert room(WINDOW.init_caches(SPEC), WINDOW) is None
  with pytest.raises(ValueError, match=r"caches: found those of Full\(\), expected StreamingLLM"):
    room(caches, WINDOW)
  given = (lambda spec: kvjax.plan_memory(spec, FULL)), lambda spec: step_traffic(spec, FULL)
  for make in (FULL.init_caches, *given):
    with pytest.raises(TypeError, match=r"spec: found 3, expected a kvjax\.CacheSpec"):
      make(3)
  with pytest.raises(TypeError, match="dtype: found 'bf16', expected a dtype of floats"):
    model().spec(2, 64, "bf16")


@pytest.mark.core(1)
@pytest.mark.parametrize("method", [FULL, kvjax.TopKOracle(8, 1, 1)], ids=["full", "selective"])
def test_a_step_beyond_the_capacity(method):
  """A loop of one's own hears of it under check_nan; the other rows' room does not matter."""
  layer = begun(method, Stream.random(0), [5, 3], capacity=6, env=CHECKED)
  layer.decode([5, 3])
  layer.decode([5, 4], live=[False, True])  # the row that is full takes no part
  name = type(method).__name__
  says = f"{name}, layer 1: found row 0 with 6 cached tokens and 1 to come, expected at most the "
  with pytest.raises(JaxRuntimeError, match=says + "capacity of 6"):
    layer.decode([6, 5])
  assert layer.cache.seen.tolist() == [6, 5 + 1]  # what came back, the full row as it was


def test_a_prompt_beyond_the_capacity():
  layer = Layer(FULL, Stream.random(0), 6, env=CHECKED)
  with pytest.raises(JaxRuntimeError, match=r"row 1 with 0 cached tokens and 7 to come, .* of 6"):
    layer.prefill([5, 7])


def test_what_goes_round_has_room():
  layer = Layer(WINDOW, Stream.random(0), 6, env=CHECKED)
  for at in range(18):
    layer.decode([at, at])
  assert layer.cache.seen.tolist() == [18, 18]


# ---- the context of the model


def of_context(most, limited=False):
  """The tiny decoder, as if it had been trained on, or converted for, so many tokens."""
  decoder = copy.copy(model())
  decoder.config = dataclasses.replace(CONFIG, max_context=most, limited=limited)
  return decoder


@pytest.mark.slow
def test_a_row_that_outgrows_what_the_model_was_trained_for_is_told():
  """By a prompt and by steps; up to the last token nothing is said, nor of an endless method."""
  for most, method, told in ((22, FULL, True), (23, FULL, False), (22, WINDOW, False)):
    decoder = of_context(most)
    caches = method.init_caches(decoder.spec(2, 64))
    with warnings.catch_warnings(record=True) as said:
      warnings.simplefilter("always")
      logits, caches = prefill(decoder, TOKENS[:, :23], LENGTHS, caches, method)
      assert [str(x.message)[:7] for x in said] == ["prefill"] * told
      generate(decoder, logits, caches, method, steps=2, live=[False, True])
      assert len(said) == told  # the row that goes on has 14
  decoder = of_context(23)
  logits, caches = start()
  with pytest.warns(UserWarning, match=r"generate\(steps=2\): found .* than max_context = 23"):
    generate(decoder, logits, caches, FULL, steps=2)


@pytest.mark.parametrize("method", [FULL, WINDOW], ids=["full", "endless"])
def test_a_row_that_outgrows_a_conversion_is_refused(method):
  logits, caches = start(method)
  decoder = of_context(24, limited=True)
  with pytest.raises(ValueError, match=r"found 25 tokens \(row 0\), expected .* max_context = 24"):
    generate(decoder, logits, caches, method, steps=2)
  empty = method.init_caches(model().spec(2, 64))
  with pytest.raises(ValueError, match=r"prefill: found 25 tokens .* convert it again"):
    prefill(decoder, TOKENS[:, :25], np.array([25, 1]), empty, method)


def test_a_repetition_counts_to_the_context():
  """It stands after the context that it repeats."""
  decoder, ask = of_context(40, limited=True), reconstruct.Instructions((1, 2), (3,))
  with pytest.raises(ValueError, match=r"repeating a context: found 55 tokens \(row 0\)"):
    reconstruct.read(decoder, TOKENS[:, :23], LENGTHS, kvjax.KVzip(12, room=3), ask, chunk=32)


# ---- whose caches they are


@pytest.mark.parametrize(
  ("made", "given", "says"),
  [
    (kvjax.H2O(64), kvjax.H2O(32), "H2O(budget=64), expected H2O(budget=32)"),
    (FULL, kvjax.Quest(64), "Full(), expected Quest(base=Full(), dense_layers=2, budget=64"),
    (kvjax.PSAW(phi=0.5), kvjax.PSAW(sinks=8), "PSAW(sinks=16, phi=0.5), expected PSAW(sinks=8, "),
    (kvjax.ART(FULL), kvjax.ART(kvjax.PSAW()), "ART(base=Full()), expected ART(base=PSAW("),
    (
      *(kvjax.Measured(kvjax.Quest(n)) for n in (64, 32)),
      "Measured(base=Quest(budget=64)), expected Measured(base=Quest(budget=32))",
    ),
    (
      *(kvjax.SharedPrefill(members) for members in ((FULL, EVICTS), (FULL,))),
      "SharedPrefill(members=(Full(), H2O(budget=16, recent=None))), expected SharedPrefill(",
    ),
  ],
)
def test_caches_of_another_method(made, given, says):
  for call in both(made.init_caches(SPEC), given):
    with pytest.raises(ValueError, match=re.escape(f"caches: found those of {says}")):
      call()


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    ({"layers": 3}, "layers = 3, expected layers = 4"),
    ({"groups": 1}, "groups = 1, expected groups = 3"),
    ({"kv_heads": 6, "groups": 1}, "kv_heads = 6, groups = 1, expected kv_heads = 2, groups = 3"),
    ({"head_dim": 8}, "head_dim = 8, expected head_dim = 16"),
  ],
)
def test_caches_of_another_model(changes, says):
  for call in both(FULL.init_caches(dataclasses.replace(SPEC, **changes)), FULL):
    with pytest.raises(ValueError, match=f"caches: found those of a model with {says}"):
      call()


def test_a_shared_prompt_has_the_room_of_its_smallest_member():
  """Of those that keep every token; one that evicts takes any."""

  class Small(kvjax.Full):
    def capacity(self, spec, layer):
      return 8

  for members in ((FULL, Small(), EVICTS), (Small(), FULL)):
    shared = kvjax.SharedPrefill(members).init_caches(SPEC)
    assert {cache.size for cache in shared} == {8}


@pytest.mark.slow
def test_who_laid_caches_out_is_carried_along(tmp_path):
  """Through steps, forks, files, loops and the members of a shared prompt."""
  method = kvjax.SharedPrefill((FULL, EVICTS))
  logits, shared = start(method)
  own = take(shared, 1)
  spec = dataclasses.replace(SPEC, capacity=128)
  like = EVICTS.init_caches(spec)[0].origin
  assert {cache.origin for cache in own} == {like} and like.method == EVICTS
  out, own = generate(model(), logits, own, EVICTS, steps=2)
  path = save(tmp_path / "x.npz", out.last, own, EVICTS, model().spec(2, 64))
  forked = fork(*restore(path, EVICTS, model().spec(2, 64)), 2)[1]
  looped = jax.eval_shape(lambda c: jax.lax.fori_loop(0, 3, lambda _, c: c, c), forked)
  assert {cache.origin for cache in (*own, *forked, *looped)} == {like}
  for call in both(own, FULL):
    with pytest.raises(ValueError, match=r"found those of H2O\(.*expected Full\(\)"):
      call()
  other = kvjax.H2O(16, recent=5)
  with pytest.raises(ValueError, match=r"H2O\(recent=None\), expected H2O\(recent=5\)"):
    save(path, out.last, own, other, model().spec(2, 64))


def test_layers_and_capacities_share_programs():
  """What is compiled for is alike in all layers, and in caches of any capacity."""
  first, second = (WINDOW.init_caches(model().spec(2, n)) for n in (64, 99))
  assert len({jax.tree.structure(cache) for cache in (*first, *second)}) == 1


def test_what_is_no_cache():
  logits, caches = start()
  for given in (logits, None, list(logits), (1, 2), ()):
    for call in both(given, FULL):
      with pytest.raises(TypeError, match=r"caches: found \w+, expected the tuple that"):
        call()
  with pytest.raises(ValueError, match=r"logits: found shape \(2, 60\), expected \(2, 61\)"):
    generate(model(), logits[:, 1:], caches, FULL, steps=1)
  with pytest.raises(ValueError, match=r"logits: found shape \(1, 61\), expected \[2, V\], a row"):
    fork(logits[:1], caches, 2)


def test_donated_caches(tmp_path):
  logits, caches = start()
  _, newer = generate(model(), logits, caches, FULL, steps=2)
  assert not logits.is_deleted()
  gone = "caches: found arrays that an earlier call was given .* expected the caches that"
  calls = *both(caches, FULL), lambda: room(caches, FULL), lambda: fork(logits, caches, 2)
  for call in (*calls, lambda: save(tmp_path / "x", logits, caches, FULL, model().spec(2, 64))):
    with pytest.raises(ValueError, match=gone):
      call()
  assert room(newer, FULL).tolist() == [64 - 25, 64 - 16]


# ---- what is no method


def test_what_is_no_method(tmp_path):
  _, caches = start()
  spec = model().spec(2, 64)
  uses = [
    ("method", lambda m: both(caches, m)[0]()),
    ("method", lambda m: both(caches, m)[1]()),
    ("method", lambda m: model().init_caches(m, 2, 64)),
    ("method", lambda m: room(caches, m)),
    ("method", lambda m: restore(tmp_path / "x", m, spec)),
    ("method", lambda m: save(tmp_path / "x", np.zeros((2, 61)), caches, m, spec)),
    ("method", lambda m: kvjax.plan_memory(spec, m)),
    (r"SharedPrefill\.members\[1\]", lambda m: kvjax.SharedPrefill((FULL, m))),
  ]
  for name, use in uses:
    for found, says in (
      ("tova", r"the string 'tova', expected a method such as .*usual\(kvjax\.METHODS\['tova'\]"),
      ("nope", r"the string 'nope', expected a method such as .*kvjax\.METHODS\['quest'\]"),
      (kvjax.Quest, r"the class Quest, expected a method such as .*\(kvjax\.METHODS\['quest'\]"),
      (None, r"None, expected a method such as"),
      (kvjax.Ltri(heads=([0, 1, 0.5],)), r"Ltri\(.*, expected hashable fields"),
    ):
      with pytest.raises(TypeError, match=f"{name}: found {says}"):
        use(found)


# ---- sizes and shapes


@pytest.mark.parametrize(
  ("changes", "error", "says"),
  [
    ({"dtype": jnp.int8}, TypeError, "dtype: found int8, expected a dtype of floats"),
    ({"dtype": bool}, TypeError, "dtype: found bool, expected a dtype of floats"),
    ({"dtype": jnp.complex64}, TypeError, "dtype: found complex64, expected"),
    ({"dtype": "half a byte"}, TypeError, "dtype: found 'half a byte', expected a dtype of floats"),
    ({"dtype": None}, TypeError, "dtype: found None, expected a dtype of floats"),
    ({"dtype": np.float64}, TypeError, "dtype: found float64, expected float32, or jax_enable_x64"),
    ({"head_dim": 15}, ValueError, "head_dim: found 15, expected an even number"),
    ({"batch": 0}, ValueError, "batch: found 0, expected 1 or more"),
    ({"layers": 2.0}, TypeError, r"layers: found 2\.0, expected int"),
    ({"layers": 0}, ValueError, "layers: found 0, expected 1 or more"),
    ({"layers": 2, "windows": (8, None)}, ValueError, r"windows: found .*, expected None 2 times"),
    ({"windows": (0, None)}, ValueError, r"windows: found .*, expected tokens, or None"),
    ({"windows": (True, None)}, ValueError, r"windows: found .*, expected tokens, or"),
  ],
)
def test_specs(changes, error, says):
  with pytest.raises(error, match=rf"CacheSpec\.{says}"):
    dataclasses.replace(SPEC, **changes)


def test_environments():
  for name in ("layers", "tile"):
    with pytest.raises(ValueError, match=rf"Env\.{name}: found 0, expected 1 or more"):
      Env(**{"layers": 4, name: 0})


def traced(move, method, change=lambda given: {}):
  """Traces a driver on arguments of which one is changed."""
  cache = kvjax.Cache.empty(method, SPEC, 1)
  at = method.at(Env(4, impl="reference"), 1)
  q, k = np.zeros((2, 2, 3, 16), np.float32), np.zeros((2, 2, 16), np.float32)
  live = np.ones(2, bool)
  given = {"cache": cache, "q": q, "k": k, "v": k, "live": live}
  if move == "prefill":
    prompt = Prompt(np.array([5, 3], np.int32), np.array([5, 3], np.int32), None, 5, 0)
    q, k = (np.repeat(np.expand_dims(x, -2), 5, -2) for x in (q, k))
    given = {"cache": cache, "q": q, "k": k, "v": k, "prompt": prompt}
  given |= change(given)
  jax.eval_shape(lambda *told: getattr(method, move)(at, *told, Carry())[:3], *given.values())


@pytest.mark.core(3)
@pytest.mark.parametrize("method", [FULL, WINDOW, INFLLM], ids=["full", "streaming_llm", "infllm"])
@pytest.mark.parametrize("move", ["decode_step", "prefill"])
def test_shapes_at_the_entrance(move, method):
  """K and V are those of the cache: one head too few would be broadcast, or read another's."""
  traced(move, method)
  name = type(method).__name__
  for wrong in ("k", "v"):
    for cut in (lambda x: x[:, :1], lambda x: x[..., :8], lambda x: x[:1], lambda x: x[:, 0]):
      with pytest.raises(ValueError, match=rf"{name}: {wrong}: found shape \(.*expected \(2, 2, "):
        traced(move, method, lambda given, cut=cut, wrong=wrong: {wrong: cut(given[wrong])})
  with pytest.raises(ValueError, match=rf"{name}: q: found .*\(2, 1, 3, .*expected \(2, 2, any"):
    traced(move, method, lambda given: {"q": given["q"][:, :1]})
  if move == "prefill":
    with pytest.raises(ValueError, match=r"v: found .*\(2, 2, 4, 16\), expected \(2, 2, 5, 16\)"):
      traced(move, method, lambda given: {"v": given["v"][:, :, :4]})
  else:
    with pytest.raises(ValueError, match=r"live: found shape \(1,\), expected \(2\)"):
      traced(move, method, lambda given: {"live": given["live"][:1]})


@pytest.mark.parametrize(
  ("move", "made", "says"),
  [
    ("rank", None, "found NoneType, expected (priority, staged)"),
    ("rank", (jnp.zeros(3), {}, 1), "found (array, dict, int), expected (priority, staged)"),
    ("rank", ({}, jnp.zeros(3)), "found (dict, array), expected (priority, staged)"),
    (
      "rank",
      (jnp.zeros((2, 5)), {"pos": jnp.zeros((2, 2, 5))}),
      "found shape (2, 5), expected (2, 2, 5)",
    ),
    ("victim", jnp.zeros(2, int), "found shape (2,), expected (2, 2)"),
    ("plan", None, "found NoneType, expected (plan, carry)"),
    ("attend", None, "found (NoneType), expected (attended)"),
    ("observe", (1, {}), "found (int, dict), expected (cache, aux)"),
    ("stage", {}, "found dict, expected (staged, cache, carry)"),
    ("score", jnp.zeros((2, 64)), "found shape (2, 64), expected (2, 2, any"),
  ],
)
def test_what_a_move_hands_back(move, made, says):
  base, *sizes = (kvjax.TopKOracle, 8, 1, 1) if move == "score" else (kvjax.TOVA, 8)
  method = type("Says", (base,), {move: lambda *_: made})(*sizes)
  error = ValueError if "shape" in says else TypeError
  with pytest.raises(error, match=re.escape(f"Says: {move}: {says}")):
    traced("prefill" if move in ("rank", "stage") else "decode_step", method)


# ---- layers under scan


def scanned(method, move="decode_step"):
  """Traces all layers as one, over caches that are stacked."""

  def body(carry, layer):
    i, cache = layer
    at = method.at(Env(4, impl="reference"), i)
    q, k, live = jnp.zeros((2, 2, 3, 16)), jnp.zeros((2, 2, 16)), jnp.ones(2, bool)
    if move == "prefill":
      prompt = Prompt.of(at, 5, jnp.array([5, 3]), jnp.array([5, 3]), 0)
      q, k = (jnp.repeat(jnp.expand_dims(x, -2), 5, -2) for x in (q, k))
      return carry, method.prefill(at, cache, q, k, k, prompt, Carry())[:2]
    return carry, method.decode_step(at, cache, q, k, k, live, Carry())[:2]

  cache = jax.eval_shape(lambda: kvjax.Cache.empty(method, SPEC, 1))
  stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((4, *x.shape), x.dtype), cache)
  jax.eval_shape(lambda caches: jax.lax.scan(body, 0, (jnp.arange(4), caches)), stacked)


ZERO = ", or set dense_layers=0"


@pytest.mark.parametrize(
  ("method", "move", "remedy"),
  [
    (kvjax.PyramidKV(32), "prefill", ""),
    (kvjax.PyramidKV(32), "decode_step", ""),
    (kvjax.PSAW(sinks=1), "decode_step", ""),
    (kvjax.ETF(sinks=1), "prefill", ""),
    (kvjax.HShare(8, 1, 2), "decode_step", ""),
    (kvjax.HShare(8, 1, 2, dense_layers=1), "decode_step", ""),  # and without it, too
    (kvjax.CPE(k=8, sinks=1, local=2), "decode_step", ""),
    (kvjax.Quest(16, dense_layers=1), "decode_step", ZERO),
    (kvjax.Quantised(kvjax.TopKOracle(8, 1, 2, dense_layers=1)), "decode_step", ZERO),
    (kvjax.ART(kvjax.PSAW(sinks=1)), "decode_step", ""),
  ],
  ids=repr,
)
def test_methods_that_mind_their_depth_under_scan(method, move, remedy):
  name = type(method).__name__
  says = f"{name}: found a traced layer number, expected an int: .* jax.lax.scan .* unroll"
  with pytest.raises(TypeError, match=f"(?m){says} them{remedy}$"):
    scanned(method, move)


def test_caches_of_dense_layers_are_not_stacked():
  sizes = {"batch": 1, "capacity": 64, "heads": 2, "kv_heads": 1, "head_dim": 16, "layers": 4}
  stacked = kvjax.stacked(kvjax.empty_caches(kvjax.Quest(16, dense_layers=0), **sizes))
  assert stacked.layer is None
  with pytest.raises(ValueError, match=r"equal layers: unroll them, or set dense_layers=0$"):
    kvjax.stacked(kvjax.empty_caches(kvjax.Quest(16), **sizes))


@pytest.mark.core(1)  # prompts under a scan are those of test_front
@pytest.mark.parametrize("move", ["decode_step", "prefill"])
def test_methods_that_are_alike_in_all_layers_may_be_scanned(move):
  spans = kvjax.settings.example(kvjax.Ltri, 16)  # what differs by layer is in its caches
  for method in (FULL, WINDOW, kvjax.TopKOracle(8, 1, 2), kvjax.Random(8), INFLLM, spans):
    scanned(method, move)


# ---- classes


def test_a_bounded_method_without_a_victim():
  @dataclasses.dataclass(frozen=True)
  class Forgetful(kvjax.Bounded):
    def rank(self, at, turn):
      return turn.staged["pos"].astype(jnp.float32), turn.staged

  with pytest.raises(TypeError, match=r"Forgetful\.victim: found none, expected the slot that"):
    Forgetful(8)

  @dataclasses.dataclass(frozen=True)
  class Mindful(Forgetful):
    def victim(self, at, cache):
      return jnp.zeros(cache.pos.shape[:2], jnp.int32)

  assert Mindful(8).budget == 8


def test_moves_that_are_missing_name_the_outermost_method():
  @dataclasses.dataclass(frozen=True)
  class Unranked(kvjax.Bounded):
    def victim(self, at, cache):
      return jnp.zeros((2, 2), jnp.int32)

  with pytest.raises(NotImplementedError, match=r"ETF\(base=.*Unranked\(.* does not rank"):
    traced("prefill", kvjax.ETF(Unranked(4)))
