"""What every registered method must obey, whatever it computes: one table, all methods."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from kvjax import METHODS, Cache, Carry, Env, Full, Prompt, SharedPrefill, Wrapper
from kvjax.shared_prefill import take
from models.generate import join
from tests.layer import Layer, Stream
from tests.tiny import CAPACITY, CLOSE, CONFIG, LENGTHS, TOKENS, Run, model

BUDGET = 12
STEPS = 6

# Which methods may drop the newest token, and why.
DROPS_NEWEST = {"tova": "the paper protects no token from the cut of the prompt"}

# Methods whose authors' repository computes something else than their paper.
HAVE_REPO = {
  *("streaming_llm", "snapkv", "pyramidkv", "r_kv", "longflow", "quest", "infllm_v2"),
  "double_sparsity",
}

# Which methods may leave out the newest token, whose value then is not heard of, and why.
MAY_SKIP_NEWEST = {"topk_oracle": "reads what weighs most and nothing else"}

every = pytest.mark.parametrize("name", METHODS)


# Fields of settings that do something in a decoder of four layers, and why.
SHALLOW = {"etf": {"start": 0.25}}  # frozen in the top layer alone, no token is missed by anybody


def tight(name):
  """A setting under which the method has something to drop at these lengths."""
  return dataclasses.replace(METHODS[name].example(BUDGET), **SHALLOW.get(name, {}))


@functools.cache
def logits_of(method):
  """The prompt's logits and those of STEPS decoded tokens, [B, STEPS + 1, V]."""
  return Run(method).generate(STEPS)


@every
def test_neutral_setting_equals_full(name):
  out = logits_of(METHODS[name].neutral(CAPACITY))
  np.testing.assert_allclose(out, logits_of(Full()), atol=CLOSE)


@every
def test_tight_setting_has_an_effect(name):
  """The partner of the law above: it must not hold because nothing happens."""
  if name == "full":
    return
  assert np.abs(logits_of(tight(name)) - logits_of(Full()))[:, 1:].max() > 0.05


@every
def test_chunked_prefill(name):
  """Reading the prompt in chunks of 8 equals reading it at once, where the method says so."""
  method = tight(name)
  run = Run(method)
  for start in range(0, int(LENGTHS.max()), 8):
    part = np.clip(LENGTHS - start, 0, 8).astype(np.int32)
    before = np.minimum(LENGTHS, start).astype(np.int32)
    run.prefill(part, before, width=8, past=None if start else 0)
  chunked = np.stack([run.decode(LENGTHS + i) for i in range(STEPS)], 1)
  assert np.isfinite(chunked).all()
  if method.chunkable:
    np.testing.assert_allclose(chunked, logits_of(method)[:, 1:], atol=CLOSE)


@every
def test_decode_equals_prefill(name):
  """prefill(n + i) equals prefill(n) then i decode steps, where the method says so."""
  method = tight(name)
  if not method.order_independent:
    pytest.skip("the method decides by what it saw in which order")
  for i in (1, STEPS):
    whole = Run(method).prefill((LENGTHS + i).astype(np.int32), width=int(LENGTHS.max()) + STEPS)
    np.testing.assert_allclose(logits_of(method)[:, i], whole, atol=CLOSE)


@every
def test_kept_positions(name):
  """Occupied slots are the prefix [0, used); they hold distinct seen tokens, the newest too."""
  run = Run(tight(name))
  for step in range(STEPS + 1):
    seen = LENGTHS + step
    run.prefill() if step == 0 else run.decode(seen - 1)
    check_kept(run.caches, seen, name)


def check_kept(caches, seen, name):
  for cache in caches:
    pos, used = np.asarray(cache.pos), np.asarray(cache.used)
    np.testing.assert_array_equal(cache.seen, seen)
    for b in range(len(seen)):
      for row in pos[b]:
        kept = row[: used[b]]
        assert (kept >= 0).all() and (row[used[b] :] == -1).all()
        assert len(set(kept.tolist())) == used[b]
        assert kept.max() == seen[b] - 1 or name in DROPS_NEWEST


TURN = np.array([5, 8], np.int32)


@every
def test_further_turns_of_the_neutral_setting_equal_full(name):
  """A prompt, two tokens of answer, a turn onto the live cache, two tokens more."""

  def conversation(method):
    run, seen = Run(method), LENGTHS.copy()
    out = [run.prefill()]
    for _ in range(2):
      out += [run.decode(seen + i) for i in range(2)]
      seen += 2
      out.append(run.prefill(TURN, seen, width=8, past=None))
      seen += TURN
    return np.stack(out)

  want = conversation(Full())
  np.testing.assert_allclose(conversation(METHODS[name].neutral(CAPACITY)), want, atol=CLOSE)


@every
def test_a_second_question_on_the_same_cache(name):
  """Two questions to one document, each in its row: who asks what in the other row is all one."""
  method = tight(name)
  document = np.array([23, 23], np.int32)
  texts = [TOKENS[0, 23:40], TOKENS[1, 10:27]]

  def ask(first, second):
    tokens = np.stack([np.concatenate([TOKENS[0, :23], texts[i]]) for i in (first, second)])
    lengths = TURN[[first, second]]
    run = Run(method)
    run.prefill(document, tokens=tokens)
    out = [run.prefill(lengths, document, tokens, width=8, past=None)]
    check_kept(run.caches, document + lengths, name)
    for i in range(3):
      out.append(run.decode(document + lengths + i, tokens=tokens))
      check_kept(run.caches, document + lengths + i + 1, name)
    return np.stack(out, 1)

  both, swapped, alike = ask(0, 1), ask(1, 0), ask(0, 0)
  assert np.isfinite(both).all()
  np.testing.assert_allclose(swapped[::-1], both, atol=CLOSE)
  np.testing.assert_allclose(alike, both[[0, 0]], atol=CLOSE)
  assert np.abs(both[0] - both[1]).max() > 0.05


@every
def test_nan_in_empty_slots_never_leaks(name):
  run = Run(tight(name))
  run.prefill()
  clean = run.caches
  want = run.decode(LENGTHS)

  def poison(cache):
    empty = (cache.pos < 0)[..., None]
    return cache.put(slots={n: jnp.where(empty, jnp.nan, cache.slots[n]) for n in ("k", "v")})

  run.caches = tuple(poison(cache) for cache in clean)
  np.testing.assert_array_equal(run.decode(LENGTHS), want)
  second = LENGTHS * 0 + 3
  run.caches = tuple(poison(cache) for cache in clean)
  assert np.isfinite(run.prefill(second, LENGTHS, past=None)).all()


@every
def test_nan_is_loud_and_leaves_no_trace(name):
  """A query of NaN: its output is NaN, statistics are not, and the other row notices nothing."""
  clean = Stream.random(5, tokens=40)
  ill = clean.poisoned("q", row=0, token=24)
  layers = Layer(tight(name), clean), Layer(tight(name), ill)
  for layer in layers:
    layer.prefill([22, 9])
  for step in range(STEPS):
    (want, _), (out, _) = (layer.decode([22 + step, 9 + step]) for layer in layers)
    np.testing.assert_array_equal(out[1], want[1])
    assert np.isnan(out[0]).all() if step == 2 else np.isfinite(out[0]).all()
  cache = layers[1].cache
  assert not any(np.isnan(x).any() for x in jax.tree.leaves(cache))
  for row in np.asarray(cache.pos)[0]:
    kept = row[: int(cache.used[0])]
    assert (kept >= 0).all() and len(set(kept.tolist())) == len(kept)


@every
def test_nan_raises_when_asked(name):
  """The switch names method, layer and row; the row goes on later as if nothing had happened."""
  clean, live = Stream.random(6, tokens=40), [True, False]
  plain, checked = (
    Layer(tight(name), clean, env=Env(4, impl="reference", tile=4, check_nan=check))
    for check in (False, True)
  )
  plain.prefill([22, 9])
  message = (
    rf"{METHODS[name].__name__}, layer 1: found NaN .* of row 0, which has cached {{}} tokens"
  )
  checked.stream = clean.poisoned("k", row=0, token=5)
  with pytest.raises(checkify.JaxRuntimeError, match=message.format(0)):
    checked.prefill([22, 9])
  checked.stream = clean
  checked.prefill([22, 0], tokens=22)
  for step, which in enumerate("qk" if name in MAY_SKIP_NEWEST else "qkv"):
    at = [22 + step, 9 + step]
    want, _ = plain.decode(at)
    before = jax.tree.map(lambda x: np.asarray(x[0]), checked.cache)
    checked.stream = clean.poisoned(which, row=0, token=at[0])
    with pytest.raises(checkify.JaxRuntimeError, match=message.format(at[0])):
      checked.decode(at)
    chex.assert_trees_all_equal(jax.tree.map(lambda x: np.asarray(x[0]), checked.cache), before)
    checked.stream = clean
    out, _ = checked.decode(at, live=live)
    np.testing.assert_allclose(out[0], want[0], atol=1e-6)
  chex.assert_trees_all_close(checked.cache, plain.cache, atol=1e-6)


def test_nobody_looks_for_nan_unasked():
  """A decode step without statistics has no such operation; with the switch it has."""
  stream = Stream.random(0)
  new = [x[..., 0, :] for x in (stream.q, stream.k, stream.v)]
  for check in (False, True):
    layer = Layer(Full(), stream, env=Env(4, impl="reference", check_nan=check))
    step = functools.partial(layer.run, functools.partial(Full().decode_step, layer.at))
    jaxpr = jax.make_jaxpr(step)(layer.cache, *new, jnp.ones(2, bool), Carry())
    assert ("is_finite" in str(jaxpr)) == check


@every
def test_rows_are_isolated(name):
  """Row 0 does not notice another text or another length in row 1."""
  method = tight(name)
  want = logits_of(method)[0]
  other = TOKENS.copy()
  other[1] = (other[1] + 7) % CONFIG.vocab
  np.testing.assert_allclose(Run(method).generate(STEPS, tokens=other)[0], want, atol=CLOSE)
  short = LENGTHS.copy()
  short[1] = 3
  out = Run(method).generate(STEPS, short, width=int(LENGTHS.max()))
  np.testing.assert_allclose(out[0], want, atol=CLOSE)


@every
def test_idle_rows_stay_untouched(name):
  """A row without tokens in a second turn, and a finished row in decode, keep every bit."""
  run = Run(tight(name))
  run.prefill()

  def row(caches, b):
    return jax.tree.map(lambda x: np.asarray(x[b]), caches)

  before = row(run.caches, 1)
  run.prefill(np.array([4, 0], np.int32), LENGTHS, width=4, past=None)
  chex.assert_trees_all_equal(row(run.caches, 1), before)
  before, other = row(run.caches, 0), row(run.caches, 1)
  run.decode(LENGTHS, live=np.array([False, True]))
  chex.assert_trees_all_equal(row(run.caches, 0), before)
  changed = jax.tree.map(lambda a, b: (a != b).any(), row(run.caches, 1), other)
  assert any(jax.tree.leaves(changed))


@every
def test_second_call_does_not_retrace(name):
  method = tight(name)
  chex.clear_trace_counter()
  base = model()

  @chex.assert_max_traces(n=1)
  def step(caches, token):
    return base.decode(token, caches, method)

  step = jax.jit(step)
  caches = method.init_caches(base.spec(2, CAPACITY))
  for token in TOKENS.T[:3]:
    _, caches = step(caches, token)


@every
def test_decode_loop_is_in_place(name):
  """Sixteen jitted steps alias all cache bytes and need less memory than one layer's cache.

  The budget is an eighth of the cache: a reference gathers copies of what its plan lists.
  """
  run = Run(METHODS[name].example(512), capacity=4096)

  def loop(leaves, caches, tokens):
    decoder = join(run.graph, leaves)
    return jax.lax.scan(lambda c, token: decoder.decode(token, c, run.method)[::-1], caches, tokens)

  tokens = jnp.asarray(TOKENS.T[:16])
  compiled = jax.jit(loop, donate_argnums=1).lower(run.leaves, run.caches, tokens).compile()
  memory = compiled.memory_analysis()
  cache_bytes = sum(x.nbytes for x in jax.tree.leaves(run.caches))
  assert memory.alias_size_in_bytes >= cache_bytes
  per_layer = sum(x.nbytes for x in jax.tree.leaves(run.caches[0]))
  logits = 16 * 2 * CONFIG.vocab * 4
  assert memory.temp_size_in_bytes - logits < per_layer


@every
def test_pallas_equals_reference(name):
  """The kernels (interpreted on a CPU) against the reference, prompt and decode."""
  method = tight(name)
  out = Run(method, impl="pallas").generate(STEPS)
  np.testing.assert_allclose(out, logits_of(method), atol=CLOSE)


@every
def test_heads_sharded_over_two_devices(name):
  """One layer under shard_map, KV heads split in two, equals the layer on one device."""
  method, stream = tight(name), Stream.random(3, kv_heads=4, tokens=32)
  spec = stream.spec(CAPACITY)
  q, k, v = stream.q, stream.k, stream.v

  def layer(env, q, k, v, cache):
    at, valid = method.at(env, 3), jnp.asarray(LENGTHS)  # methods may leave first layers dense
    prompt = Prompt(valid, valid, None, 24, 0)
    cut = [x[..., :24, :] for x in (q, k, v)]
    out, cache, _, _ = method.prefill(at, cache, *cut, prompt, Carry())
    outs = [out[:, :, :, 0]]
    for t in (24, 25):
      new = [x[..., t, :] for x in (q, k, v)]
      out, cache, _, _ = method.decode_step(at, cache, *new, jnp.ones(2, bool), Carry())
      outs.append(out)
    return jnp.stack(outs)

  env = Env(4, impl="reference", tile=4)
  cache = method.init(spec, 3)
  want = jax.jit(functools.partial(layer, env))(q, k, v, cache)
  mesh = Mesh(np.array(jax.devices()[:2]), ("heads",))
  heads = P(None, "heads")
  specs = Cache(
    dict.fromkeys(cache.slots, heads),
    dict.fromkeys(cache.heads, heads),
    {n: P() for n in cache.rows},
  )
  sharded = jax.shard_map(
    functools.partial(layer, dataclasses.replace(env, head_axis="heads")),
    mesh=mesh,
    in_specs=(heads, heads, heads, specs),
    out_specs=P(None, None, "heads"),
    check_vma=False,
  )
  np.testing.assert_allclose(jax.jit(sharded)(q, k, v, cache), want, atol=2e-5)


@dataclasses.dataclass(frozen=True)
class Through(Wrapper):
  """A wrapper that changes nothing."""


@every
def test_empty_wrapper_is_transparent(name):
  method = tight(name)
  np.testing.assert_array_equal(Run(Through(method)).generate(2), Run(method).generate(2))


@every
def test_shared_prefill(name):
  """One pass that fills several caches equals the method's own prefill, bit for bit."""
  method = tight(name)
  if not method.dense_prefill:
    with pytest.raises(ValueError, match="leave prefill attention dense"):
      SharedPrefill((method,))
    return
  shared, own = Run(SharedPrefill((Full(), method))), Run(method)
  shared.prefill()
  own.prefill()
  chex.assert_trees_all_close(take(shared.caches, 1), own.caches, atol=1e-5)


@every
def test_the_repository_setting(name):
  """Where the authors' code differs from their paper, `repo` is that setting, and it runs."""
  method = METHODS[name]
  if name not in HAVE_REPO:
    with pytest.raises(NotImplementedError, match=rf"{method.__name__}\.repo: no setting"):
      method.repo(40)
    return
  preset = method.repo(40)
  assert isinstance(preset, method) and preset != method.example(40)
  run = Run(preset)
  assert np.isfinite(run.generate(2)).all()
  if not preset.positional:
    sizes = [cache.size for cache in run.caches]
    assert np.mean(sizes) <= 40 + getattr(preset, "buffer", 0)


@every
def test_declared_arrays_are_there(name):
  """What a method says of its arrays it says of arrays that its caches have, in some layer."""
  for method in (tight(name), METHODS[name].neutral(CAPACITY), METHODS[name].usual(BUDGET)):
    caches = method.init_caches(Stream.random(0).spec(CAPACITY))
    in_slots, in_heads, in_rows = (
      {array for cache in caches for array in getattr(cache, shelf)}
      for shelf in ("slots", "heads", "rows")
    )
    assert in_slots >= {*method.standing}
    assert in_heads | in_rows >= {*method.in_place}
    assert in_heads >= {*method.along_slots}


@every
def test_is_hashable_and_equal_by_value(name):
  assert tight(name) == tight(name) and hash(tight(name)) == hash(tight(name))
