"""Branches that share a context: against attention in loops, against copies, and what they take."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import Env, Forked, Full, KVzip, Quest, SnapKV
from kvjax.analysis.traffic import step_traffic
from kvjax.core.leaves import Layout
from kvjax.models.decode import reconstruct
from kvjax.models.decode.caches import fork, fork_shared, restore, room, save
from kvjax.models.decode.generate import generate, prefill
from kvjax.models.nn.parallel import shard
from kvjax.primitives.rope import Rope
from kvjax.runtime.forked import branched
from kvjax.testing import LAWS, Case, tiny
from kvjax.testing.layer import Layer, Stream
from kvjax.testing.tiny import CLOSE, LENGTHS, TOKENS
from tests import family_models, tiny_hf
from tests.oracles import attend, begun

model = functools.partial(tiny.model, layers=2)  # that they are several is enough
CONTEXTS = [22, 9]  # tokens of each row's context
QUESTIONS = np.random.default_rng(1).integers(0, 61, (6, 5), np.int32)
ASKED = np.array([5, 3, 1, 0, 4, 5], np.int32)  # tokens of each branch's question


def test_worked_example():
  """Keys that weigh 3 and 1 are shared; one branch has a key of its own, of weight 4."""
  x = np.log([3.0, 1.0])
  context = {
    "k": jnp.array(np.stack([x, 0 * x], -1) * 2**0.5)[None, None].astype(jnp.float32),
    "v": jnp.array([[[[8.0, 0], [0, 8]]]]),
    "pos": jnp.array([[[0, 1]]]),
  }
  method = Forked(branches=2, context=2, room=1)
  at = method.at(Env(1, Rope(), impl="reference"), 0)
  own = {
    "k": jnp.array([[[[0, 0.0]]], [[[np.log(4) * 2**0.5, 0]]]]),
    "v": jnp.array([[[[0, 0.0]]], [[[16, 16.0]]]]),
    "pos": jnp.array([[[-1]], [[2]]]),
  }
  rows = {"seen": jnp.array([2, 3]), "used": jnp.array([0, 1]), "context": jnp.array([2])}
  held = {f"context_{name}": x for name, x in context.items()}
  cache = kvjax.Cache(own, held, rows, Layout.BRANCHED)
  q = jnp.ones((2, 1, 1, 2)) * jnp.array([1.0, 0])

  @jax.jit
  def attend(cache, q):
    return method.attend(at, cache, kvjax.Plan(method.span(at, cache, None)), q)

  found = attend(cache, q)
  np.testing.assert_allclose(found.state.o[:, 0, 0], [[6, 2], [11, 9]], rtol=1e-5)
  assert found.visited.tolist() == [[2], [3]]


def branches_of(stream, branches, seed):
  """The stream of all branches: each row's context again, then what is each branch's own."""
  fresh = Stream.random(seed, batch=len(CONTEXTS) * branches)

  def joined(of_context, own):
    rows = np.repeat(of_context, branches, 0)
    for row, n in enumerate(np.repeat(CONTEXTS, branches)):
      rows[row, ..., n:, :] = own[row, ..., n:, :]
    return rows

  return Stream(*(joined(getattr(stream, x), getattr(fresh, x)) for x in ("q", "k", "v")))


def expected(stream, b, t):
  """Attention [K, G, H] of query t of a row over its keys 0 … t, in float64."""
  return np.array([attend(stream, b, h, t, range(t + 1)) for h in range(stream.q.shape[1])])


def forked_layer(stream, branches, impl, *, context=32, seed=3):
  """A layer of branches of contexts that the full cache has read, and the stream of all of them."""
  env = Env(4, Rope(), impl=impl, tile=4)
  base = begun(Full(), stream, CONTEXTS, env=env)
  every = branches_of(stream, branches, seed)
  layer = Layer(Forked(Full(), branches, context, 12), every, env=env)
  layer.cache = branched(layer.method, base.cache)
  return layer, every


@pytest.mark.core(1)
@pytest.mark.parametrize("impl", ["reference", "pallas"])
@pytest.mark.parametrize("branches", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_questions_and_answers_against_loops(branches, impl):
  """Ragged contexts and questions, one of them empty, three heads of three queries."""
  layer, every = forked_layer(Stream.random(2), branches, impl)
  start = np.repeat(CONTEXTS, branches)
  asked = np.resize([5, 0, 3, 2, 5, 1], len(start))
  out = layer.prefill(asked, start=start, tokens=5, past=None)
  for b, n in enumerate(asked):
    for i in range(n):
      np.testing.assert_allclose(out[b, :, :, i], expected(every, b, start[b] + i), atol=2e-5)
  for step in range(4):
    at = start + asked + step
    out, aux = layer.decode(at)
    np.testing.assert_array_equal(aux["visited"], np.broadcast_to(at[:, None] + 1, (len(at), 3)))
    for b, t in enumerate(at):
      np.testing.assert_allclose(out[b], expected(every, b, t), atol=2e-5)
  np.testing.assert_array_equal(layer.cache.used, asked + 4)


@pytest.mark.parametrize("impl", ["reference", pytest.param("pallas", marks=pytest.mark.slow)])
def test_more_queries_than_go_at_once(impl):
  """50 branches of three query heads are put to a head in three parts."""
  layer, every = forked_layer(Stream.random(4), 50, impl)
  out, _ = layer.decode(np.repeat(CONTEXTS, 50))
  for b in (0, 20, 21, 41, 42, 49, 50, 99):
    np.testing.assert_allclose(out[b], expected(every, b, CONTEXTS[b // 50]), atol=2e-5)


def test_branches_do_not_touch_each_other():
  """NaN in one branch's query and value, and idle branches: the others are the same, bit by bit."""
  plain, every = forked_layer(Stream.random(2), 3, "reference")
  ill, _ = forked_layer(Stream.random(2), 3, "reference")
  ill.stream = every.poisoned("q", row=1, token=22).poisoned("v", row=1, token=23)
  before = ill.cache
  live = np.array([True, True, True, False, True, True])
  for step in range(3):
    (want, _), (out, _) = (x.decode(np.repeat(CONTEXTS, 3) + step, live=live) for x in (plain, ill))
    others = [0, 2, 4, 5]
    np.testing.assert_array_equal(out[others], want[others])
    assert np.isnan(out[1]).all() and np.isfinite(want[live]).all()
  for name, x in before.heads.items():
    np.testing.assert_array_equal(ill.cache.heads[name], x)
  idle = [jax.tree.map(lambda x: np.asarray(x[3]), c.slots) for c in (before, ill.cache)]
  chex.assert_trees_all_equal(*idle)
  assert ill.cache.used.tolist() == [3, 3, 3, 0, 3, 3]


@pytest.mark.slow
def test_a_branch_without_room_raises_where_it_is_asked():
  """Under check_nan, by row: the context's tokens count in no other."""
  layer, _ = forked_layer(Stream.random(2), 2, "reference")
  env = dataclasses.replace(layer.at.env, check_nan=True)
  checked = Layer(Forked(Full(), 2, 32, 2), layer.stream, env=env)
  base = begun(Full(), Stream.random(2), CONTEXTS)
  checked.cache = branched(checked.method, base.cache)
  start = np.repeat(CONTEXTS, 2)
  for step in range(2):
    checked.decode(start + step, live=[True, False, True, True])
  message = r"found row 0 with 24 cached tokens and 1 to come, expected at most the capacity of 24"
  with pytest.raises(Exception, match=message):
    checked.decode(start + 2)


# ---- a model


def read(method, batch=2):
  """Two contexts of different lengths under a method."""
  if isinstance(method, KVzip):
    ask = reconstruct.Instructions((7, 8, 9), (10, 11), (12,))
    return reconstruct.read(model(), TOKENS[:, :23], LENGTHS, method, ask, chunk=12)
  caches = method.init_caches(model().spec(batch, 64))
  return prefill(model(), TOKENS[:batch, :23], LENGTHS[:batch], caches, method)


def conversation(logits, caches, method, decoder=None):
  """A question to every branch, and the logits of what it says."""
  decoder = decoder or model()
  asked, caches = prefill(decoder, QUESTIONS, ASKED, caches, method)
  logits = jnp.where((ASKED > 0)[:, None], asked, logits)
  how = {"steps": 7, "chunk": 4, "return_logits": True}
  said, caches = generate(decoder, logits, caches, method, **how)
  return np.concatenate([np.asarray(said.logits), np.asarray(said.last)[:, None]], 1), said, caches


@pytest.mark.slow
@pytest.mark.parametrize(
  "method", [Full(), KVzip(budget=24, room=12), SnapKV(40, 4)], ids=lambda x: type(x).__name__
)
def test_branches_say_what_copies_say(method):
  """The merge of two float32 states for one: the logits are as close as the laws ask."""
  logits, caches = read(method)
  copied = conversation(*fork(logits, caches, 3), method)
  *shared, forked = fork_shared(logits, caches, method, 3, room=12)
  branched = conversation(*shared, forked)
  np.testing.assert_allclose(branched[0], copied[0], atol=CLOSE)
  np.testing.assert_array_equal(branched[1].tokens, copied[1].tokens)
  assert len({tuple(row) for row in copied[1].tokens[:3].tolist()}) > 1  # branches differ
  fork(logits, caches, 1)  # the caches that they come from are still there


def test_branches_have_the_window_of_their_own_row():
  """Row by row what `fork` copies, of two rows that have read different texts."""
  decoder = family_models.model("gemma3-parameters")
  caches = Full().init_caches(decoder.spec(2, 72))
  tokens, lengths = tiny_hf.tokens()[:, :40], np.array([40, 31])
  logits, caches = prefill(decoder, tokens, lengths, caches, Full())
  copied, shared = fork(logits, caches, 3)[1], fork_shared(logits, caches, Full(), 3, room=12)[1]
  windows = [i for i, window in enumerate(decoder.config.windows) if window]
  assert windows
  for i in windows:
    assert not np.array_equal(caches[i].pos[0], caches[i].pos[1])
    chex.assert_trees_all_equal(*map(jax.tree.leaves, (shared[i], copied[i])))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "gemma3-parameters", "gpt-oss"])
def test_families(family):
  """Windows of the model's own are copied; soft caps and sink logits are the model's."""
  decoder, method, tokens = family_models.model(family), Full(), tiny_hf.tokens()
  caches = method.init_caches(decoder.spec(2, 72))
  logits, caches = prefill(decoder, tokens[:, :40], np.array([40, 31]), caches, method)
  forks = (*fork(logits, caches, 3), method), fork_shared(logits, caches, method, 3, room=12)
  (copied, *_), (out, _, mine) = (conversation(*given, decoder) for given in forks)
  np.testing.assert_allclose(out, copied, atol=CLOSE)
  windows = decoder.config.windows
  shared = [cache.layout is Layout.BRANCHED for cache in mine]
  assert shared == [w is None for w in windows] and len(set(shared)) == 2


def test_bytes_are_as_planned():
  """Of S tokens and n branches S + n·room, where copies take n·(S + room)."""
  spec = model().spec(2, 512)
  method = Full()
  logits, caches = prefill(model(), TOKENS[:, :23], LENGTHS, method.init_caches(spec), method)
  _, shared, forked = fork_shared(logits, caches, method, 8, room=16)
  planned = kvjax.plan_memory(model().spec(16, 512), forked)
  assert sum(x.nbytes for x in jax.tree.leaves(shared)) == planned.device
  token = 2 * 2 * 16 * 4 * 2 + 2 * 2 * 4  # two heads, two layers: k, v and position
  counts = 2 * 4 * (16 * 2 + 2)  # of each layer: seen, used; the context's
  assert planned.device == token * (2 * 64 + 16 * 16) + counts
  # A step reads the context once for all of its branches.
  moved = sum(layer.tokens for layer in step_traffic(model().spec(16, 64), forked))
  assert moved == 2 * 2 * 16 * 4 * 2 * (2 * 64 + 16 * 16)


@pytest.mark.slow
def test_caches_that_branches_come_from_stay_alive():
  """Of one branch too, whose context is all of theirs; that a step writes in place is a law."""
  logits, caches = read(Full())
  *alone, one = fork_shared(logits, caches, Full(), 1, room=12)
  generate(model(), *alone, one, steps=1)
  assert not any(x.is_deleted() for x in jax.tree.leaves((logits, caches)))


@pytest.mark.slow
def test_heads_over_two_devices():
  """Split over two devices, branches say what they say on one."""
  if jax.device_count() < 2:
    pytest.skip("needs 2 devices")
  method, spread = Full(), shard(model(), kvjax.make_mesh(2))
  out = []
  for decoder in (model(), spread):
    caches = decoder.init_caches(method, 2, 64)
    logits, caches = prefill(decoder, TOKENS[:, :23], LENGTHS, caches, method)
    said, _, caches = conversation(*fork_shared(logits, caches, method, 3, room=12), decoder)
    out.append(said)
    context = caches[0].heads["context_k"]
    assert context.sharding.shard_shape(context.shape)[1] == (2 if decoder is model() else 1)
  np.testing.assert_allclose(*out, atol=CLOSE)


@pytest.mark.slow
def test_files_and_room(tmp_path):
  """Branches are kept in a file, and say how many tokens each can still take."""
  logits, caches = read(Full())
  logits, caches, forked = fork_shared(logits, caches, Full(), 3, room=12)
  _, caches = prefill(model(), QUESTIONS, ASKED, caches, forked)
  np.testing.assert_array_equal(room(caches, forked), 12 - ASKED)
  spec = model().spec(6, 64)
  path = save(tmp_path / "x.npz", logits, caches, forked, spec)
  chex.assert_trees_all_equal(restore(path, forked, spec), (logits, caches))
  with pytest.raises(ValueError, match=r"branches=3.*expected .*branches=2"):
    generate(model(), logits, caches, dataclasses.replace(forked, branches=2), steps=2)
  found = r"steps = 8 after 28 cached tokens \(row 0\) needs 36 slots, found a capacity of 35"
  with pytest.raises(ValueError, match=found):
    generate(model(), logits, caches, forked, steps=8)
  with pytest.raises(ValueError, match="caches: found branches that share a context"):
    fork(logits, caches, 2)
  with pytest.raises(ValueError, match="caches: found branches that share a context"):
    fork_shared(logits, caches, forked, 2, room=4)


def empty(cls, length):
  """Two branches of nothing, which keep all that they read."""
  return cls(Full(), 2, 1, 64)


kvjax.settings.register(Forked, example=empty, neutral=empty)


@pytest.mark.slow
@pytest.mark.parametrize("law", [x for x in LAWS if x != "tight_setting_has_an_effect"])
def test_laws(law):
  """All but that a tight setting drops something: nothing does."""
  LAWS[law](Case(Forked))


@dataclasses.dataclass(frozen=True)
class Windowed(Forked):
  """Branches that would see their newest four tokens."""

  def window(self, at, qpos):
    return kvjax.Window(0, qpos - 3)

  def span(self, at, cache, window):
    return super().span(at, cache, None)


@pytest.mark.parametrize("impl", ["reference", "pallas"])
def test_a_window_is_refused(impl):
  """An override means the same under every implementation: here, an error that names it."""
  layer, every = forked_layer(Stream.random(2), 3, impl)
  narrow = Layer(Windowed(Full(), 3, 32, 12), every, env=layer.at.env)
  narrow.cache = layer.cache
  start = np.repeat(CONTEXTS, 3)
  with pytest.raises(NotImplementedError, match="Windowed: found an override of window or plan"):
    narrow.decode(start)
  with pytest.raises(NotImplementedError, match="Windowed: found an override of window or plan"):
    narrow.prefill(np.full(6, 2), start=start, past=None)


def test_refusals():
  logits, caches = read(Full())
  with pytest.raises(ValueError, match="times: found 0, expected at least 1"):
    fork_shared(logits, caches, Full(), 0, room=4)
  with pytest.raises(ValueError, match="room: found 0, expected at least 1"):
    fork_shared(logits, caches, Full(), 2, room=0)
  with pytest.raises(ValueError, match=r"caches: found those of Full.* expected KVzip"):
    fork_shared(logits, caches, KVzip(24, room=12), 2, room=4)
  for base, own in (
    (Quest(16), "plan"),
    (kvjax.H2O(16), "observe"),
    (kvjax.StreamingLLM(16), "window"),
    (kvjax.Quantised(), "attend"),
    (Forked(), "attend"),
  ):
    with pytest.raises(ValueError, match=rf"Forked\.base: found .* without .*{own}.* of its own"):
      Forked(base)
  with pytest.raises(ValueError, match=r"Forked\.branches: found 2, expected a divisor of the 3"):
    Forked().init_caches(model().spec(3, 64))
  method = SnapKV(20, 4)
  logits, caches = read(method)
  with pytest.raises(ValueError, match=r"room: found 4, expected at most 0: SnapKV.* row 0, and"):
    fork_shared(logits, caches, method, 2, room=4)
