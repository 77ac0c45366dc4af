"""Layers with a window of the model's own keep it and no more, whatever the method."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import settings
from kvjax.families import sliding
from kvjax.families.retrieval import injected
from kvjax.families.sliding import Sliding
from kvjax.methods.double_sparsity import calibrated
from kvjax.models.decode.by_layer import ByLayer
from kvjax.models.decode.caches import fork, restore, room, save
from kvjax.models.decode.generate import generate, prefill
from kvjax.models.decode.step_bytes import step_bytes
from kvjax.models.nn import parallel
from kvjax.runtime.shared_prefill import SharedPrefill, take
from kvjax.testing import Stream
from tests import tiny_hf
from tests.family_models import model
from tests.law_cases import CASES, FAMILIES
from tests.oracles import begun

GEMMA = "gemma3-parameters"  # window, full, window, full: heads of 256, a window of 24
WINDOW, CAPACITY = 24, 72
LENGTHS = np.array([60, 41], np.int32)
TOKENS = tiny_hf.tokens()[:, :CAPACITY]
# Logits of up to 60, float32, summed in another order.
CLOSE = 2e-4
BY_HAND = 1e-5  # one layer: float32 against sums in float64
# Layers with a window are no method's: the rest tries a method of each kind, and those that hand
# something from layer to layer or count layers.
KINDS = {*FAMILIES, "hshare", "etf", "psaw", "pyramidkv", "quantised"}


def of_kinds(core=()):
  """A case for every method."""
  marks = {
    name: [pytest.mark.slow] * (name not in core) + [pytest.mark.sweep] * (name not in KINDS)
    for name in kvjax.METHODS
  }
  return pytest.mark.parametrize("name", [pytest.param(n, marks=x) for n, x in marks.items()])


def start(method, name=GEMMA, decoder=None, **how):
  """Logits and caches after a prompt that outgrows the window."""
  decoder = decoder or model(name)
  caches = decoder.init_caches(method, 2, CAPACITY)
  return prefill(decoder, TOKENS[:, :60], LENGTHS, caches, method, **how)


def check_steps(got, want, count=6):
  """Both say the same of more tokens; each is a method and its caches, and a decoder."""
  np.testing.assert_allclose(*(steps(*x, count=count)[0] for x in (got, want)), rtol=0, atol=CLOSE)


def steps(method, caches, decoder=None, count=6):
  """Logits of so many more tokens of each row, [count, B, V], and the caches."""
  decoder, out = decoder or model(GEMMA), []
  step = jax.jit(lambda token, caches: decoder.decode(token, caches, method))
  for i in range(count):
    token = np.take_along_axis(TOKENS, (LENGTHS + i)[:, None], 1)[:, 0]
    logits, caches = step(jnp.asarray(token), caches)
    out.append(logits)
  return np.stack(out), caches


# ---- what is kept


@pytest.mark.slow
@of_kinds(core=("snapkv",))
def test_a_window_layer_keeps_its_window(name):
  """After a prompt and steps its positions are the newest 24, under a tight setting of a method."""
  method = CASES[name].tight
  logits, caches = start(method)
  assert np.isfinite(logits).all()
  for seen in (LENGTHS, LENGTHS + 6):
    for layer in (0, 2):
      pos = np.sort(np.asarray(caches[layer].pos), -1)
      assert pos.shape[-1] == WINDOW
      newest = seen[:, None, None] - WINDOW + np.arange(WINDOW)
      np.testing.assert_array_equal(pos, np.broadcast_to(newest, pos.shape))
    if seen is LENGTHS:
      logits, caches = steps(method, caches)
  assert np.isfinite(logits).all()


@pytest.mark.parametrize("name", kvjax.METHODS)
def test_the_bytes_show_it(name):
  """Those of a model of the full layers alone, and two windows."""
  method, spec = CASES[name].tight, model(GEMMA).spec(2, 4096)
  alone = dataclasses.replace(spec, windows=())
  assert (spec.layers, spec.depth, alone.depth) == (2, 4, 2)
  plan, own = kvjax.plan_memory(spec, method), kvjax.plan_memory(alone, method)
  tokens = 2 * 2 * WINDOW * (2 * 256 * 4 + 4)  # k, v and positions of both rows and heads
  ring_and_counts = 2 * 2 * 2 * 4 + 2 * 2 * 4
  assert plan.device + plan.host - own.device - own.host == 2 * (tokens + ring_and_counts)


def test_a_window_has_no_more_slots_than_it_needs():
  caches = model(GEMMA).init_caches(kvjax.Full(), 2, 512)
  assert [cache.size for cache in caches] == [WINDOW, 512, WINDOW, 512]
  short = model(GEMMA).init_caches(kvjax.Full(), 2, 10)
  assert [cache.size for cache in short] == [10] * 4  # no row will ever fill a window


def test_a_step_reads_the_window_and_no_more():
  read = step_bytes(model(GEMMA).config, kvjax.Full(), 1, 64, jnp.float32).layers
  assert [layer.attended for layer in read] == [WINDOW, 64, WINDOW, 64]


# ---- what is computed


def check_neutral(name, family, count):
  """A method's neutral setting and the full cache say the same of a prompt and of steps."""
  method, decoder = settings.neutral(CASES[name].method, CAPACITY), model(family)
  (want, full), (got, caches) = start(kvjax.Full(), family), start(method, family)
  np.testing.assert_allclose(got, want, atol=CLOSE)
  check_steps((method, caches, decoder), (kvjax.Full(), full, decoder), count)


@of_kinds()  # in the core under gpt-oss, below
def test_the_neutral_setting_equals_full(name):
  """What methods hand from layer to layer passes by the layers with a window."""
  check_neutral(name, GEMMA, 6)


@pytest.mark.slow
@pytest.mark.rest(4)
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_sinks_under_every_kind_of_method(name):
  """gpt-oss under the neutral setting: each driver tells the softmax's denominator."""
  check_neutral(name, "gpt-oss", 3)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [7, 24, 32])
def test_chunks_give_what_one_call_gives(chunk):
  """Shorter than the window, of its size, longer: a query sees past the chunk's begin."""
  want, whole = start(kvjax.Full())
  got, caches = start(kvjax.Full(), chunk=chunk)
  np.testing.assert_allclose(got, want, atol=CLOSE)
  check_steps((kvjax.Full(), caches), (kvjax.Full(), whole))


@pytest.mark.slow
def test_further_turns_and_idle_rows():
  """A second turn for one row leaves the other's ring as it was."""
  method = kvjax.Full()
  _, caches = start(method)
  before = jax.tree.map(np.asarray, caches[0])
  more = np.array([0, 12])
  tokens = np.concatenate([TOKENS[:1, :12], TOKENS[1:, 41:53]])
  logits, caches = prefill(model(GEMMA), tokens, more, caches, method)
  for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(caches[0]), strict=True):
    np.testing.assert_array_equal(old[0], new[0])
  whole = np.array([60, 53])
  empty = model(GEMMA).init_caches(method, 2, CAPACITY)
  want, _ = prefill(model(GEMMA), TOKENS[:, :60], whole, empty, method)
  np.testing.assert_allclose(logits[1], want[1], atol=CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-oss", "gemma3", "mistral-sliding"])
def test_kernels_equal_the_reference(name):
  """Interpreted: the window in a prompt, the ring in a step, a sink in either's denominator."""
  method = kvjax.Full()
  want, theirs = start(method, name)
  decoder = model(name, "pallas")
  got, caches = start(method, decoder=decoder)
  np.testing.assert_allclose(got, want, atol=CLOSE)
  check_steps((method, caches, decoder), (method, theirs, model(name)), 2)


def test_layers_of_a_kind_share_a_program():
  assert ByLayer(model("gemma3")).programs(kvjax.Full(), 2, 32, 64) == 2
  assert ByLayer(model("mistral-sliding")).programs(kvjax.Full(), 2, 32, 64) == 1


def test_a_methods_layers_are_counted_among_themselves():
  """Those that see everything: methods whose depth decides do not hear of the others."""
  method = kvjax.PSAW()
  sites = sliding.places(method, kvjax.Env(4), (24, None, 24, None))
  assert [(at.layer, at.env.layers) for at in sites if at.top is method] == [(0, 2), (1, 2)]


# ---- around it


@pytest.mark.slow
def test_generate_fork_save_and_restore(tmp_path):
  method, decoder = settings.example(kvjax.SnapKV, 16), model(GEMMA)
  logits, caches = start(method)
  path = save(tmp_path / "x.npz", logits, caches, method, decoder.spec(2, CAPACITY))
  want, _ = generate(decoder, logits, caches, method, steps=5)
  logits, caches = restore(path, method, decoder.spec(2, CAPACITY))
  got, caches = generate(decoder, *fork(logits, caches, 2, row=1), method, steps=5)
  np.testing.assert_array_equal(got.tokens, want.tokens[[1, 1]])


@pytest.mark.slow
def test_room():
  """What does not end bounds it: the full layers, or a ring that is smaller than its window."""
  _, caches = start(kvjax.Full())
  assert room(caches, kvjax.Full()).tolist() == (CAPACITY - LENGTHS).tolist()
  with pytest.raises(ValueError, match=r"needs 73 slots, found a capacity of 72"):
    generate(model(GEMMA), np.zeros((2, 64), np.float32), caches, kvjax.Full(), steps=13)
  assert room(start(kvjax.TOVA(8))[1], kvjax.TOVA(8)) is None
  decoder = model("mistral-sliding")
  endless, short = (decoder.init_caches(kvjax.Full(), 2, n) for n in (WINDOW, WINDOW - 1))
  assert room(endless, kvjax.Full()) is None  # all layers have the window
  assert room(short, kvjax.Full()).tolist() == [WINDOW - 1] * 2


def test_caches_know_their_windows():
  """Those of another model with the same sizes are refused."""
  _, caches = start(kvjax.Full())
  other = dataclasses.replace(model(GEMMA).config, windows=(None, 24, None, 24))
  with pytest.raises(ValueError, match=r"windows = \(24, None.*expected .*windows = \(None, 24"):
    kvjax.models.decode.checks.laid_out(caches, kvjax.Full(), other.cache_spec(1, 1, jnp.float32))


@pytest.mark.slow
def test_one_prefill_for_several_members():
  """Each has a window of its own afterwards: a step of one leaves the other's alone."""
  members = settings.example(kvjax.SnapKV, 16), kvjax.Full()
  _, caches = start(SharedPrefill(members))
  for i, method in enumerate(members):
    check_steps((method, take(caches, i)), (method, start(method)[1]), 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", [GEMMA, "gpt-oss"])
def test_heads_over_two_devices(name):
  spread, method = parallel.shard(model(name), kvjax.make_mesh(heads=2)), kvjax.H2O(16)
  want, caches = start(method, name)
  got, over = start(method, decoder=spread)
  np.testing.assert_allclose(got, want, atol=CLOSE)
  assert over[0].slots["k"].sharding.shard_shape(over[0].slots["k"].shape)[1:3] == (1, WINDOW)
  check_steps((method, over, spread), (method, caches, model(name)), 3)


def test_split_slots_are_refused():
  mesh, spec = kvjax.make_mesh(slots=2), model(GEMMA).spec(2, 64)
  for call in (
    lambda: parallel.shard(model(GEMMA), mesh),
    lambda: kvjax.plan_memory(spec, kvjax.Full(), mesh),
    lambda: kvjax.runtime.sharding.init_caches(kvjax.Full(), spec, mesh),
  ):
    with pytest.raises(NotImplementedError, match=r"slots split over 2 .* windows of \[24\] tok"):
      call()


def test_a_window_by_hand():
  """Worked out: five tokens through a ring of three, each value the mean of what is seen."""
  method, stream = Sliding(3), Stream.random(0)
  flat = dataclasses.replace(stream, q=np.zeros_like(stream.q))  # all weights alike
  layer = begun(method, flat, [2] * len(flat.v), capacity=16)
  for t in range(2, 6):
    out, _ = layer.decode([t] * len(flat.v))
    seen = np.asarray(flat.v[:, :, max(0, t - 2) : t + 1]).mean(2)
    np.testing.assert_allclose(out[:, :, 0], seen, atol=BY_HAND)
  assert layer.cache.size == 3


def test_what_is_said_of_layers_is_said_of_the_methods():
  """Calibrated channels and injected blocks: two layers of four."""
  sparse = CASES["double_sparsity"].tight
  _, caches = start(sparse)
  count = caches[1].heads["channels"].shape[-1]
  fixed = calibrated(caches, np.tile(np.arange(256), (2, 2, 1)))
  assert fixed[1].heads["channels"].tolist() == [[list(range(count))] * 2] * 2
  assert fixed[0] is caches[0] and len(fixed) == 4
  with pytest.raises(ValueError, match=r"channels: found shape \(4, 2, 256\), expected \(2, 2, "):
    calibrated(caches, np.tile(np.arange(256), (4, 2, 1)))
  method = dataclasses.replace(CASES["infllm"].tight, inject=1)
  told = injected(method.init_caches(model(GEMMA).spec(2, 64)), jnp.array([[3], [4]]))
  assert ["inject" in cache.rows for cache in told] == [False, True, False, True]
