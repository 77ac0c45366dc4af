"""What every registered method must obey, whatever it computes: one table, all methods.

Compiling takes all the time, so the laws of a method share its programs: of a small decoder a
prompt of WIDTH tokens, a chunk of CHUNK onto live caches and a decode step, under a tight setting
and the neutral one; of a layer a prompt and a step, with and without the NaN guard. Shapes and
static arguments of a call are part of its program: a law that needs others pays for them.
"""

import dataclasses
import functools
import itertools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from kvjax import METHODS, Cache, Carry, Env, Full, Method, Quest, SharedPrefill, Wrapper
from kvjax.models.generate import join
from kvjax.shared_prefill import take
from tests.layer import Layer, Stream, driver
from tests.tiny import CAPACITY, CLOSE, CONFIG, LENGTHS, TOKENS, Run

BUDGET = 12
STEPS = 6
WIDTH, CHUNK = 32, 8  # tokens of a prompt and of what is read onto live caches, padding included

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

# How many layers show what a method does; two where it is not said.
DEPTHS = {
  "pyramidkv": 3,  # a capacity for the first, the last and those between
  "etf": 3,  # frozen in the top layer alone, no token is missed by anybody
}

# Fields of settings that do something in decoders as shallow as these, and why.
SHALLOW = {
  "quest": {"dense_layers": 1},  # the paper's two would be all there are
  "prr": {"base": Quest(BUDGET, page=4, dense_layers=1)},
  "psaw": {"start": 0.5},  # a quarter of two layers is none; so below
  "cpe": {"start": 0.5},
  "etf": {"start": 0.33},
}


def tight(name):
  """A setting under which the method has something to drop at these lengths."""
  return dataclasses.replace(METHODS[name].example(BUDGET), **SHALLOW.get(name, {}))


class Told(Run):
  """A run of calls whose shapes are those of the shared programs."""

  def __init__(self, name, method=None, **how):
    method = tight(name) if method is None else method
    super().__init__(method, layers=DEPTHS.get(name, 2), **how)

  def prompt(self, lengths=LENGTHS, tokens=TOKENS):
    return self.prefill(lengths, tokens=tokens, width=WIDTH)

  def chunk(self, lengths, start, tokens=TOKENS):
    return self.prefill(np.asarray(lengths, np.int32), start, tokens, width=CHUNK, past=None)

  def generate(self, steps=STEPS, lengths=LENGTHS, tokens=TOKENS):
    return super().generate(steps, lengths, tokens=tokens, width=WIDTH)


@functools.cache
def logits_of(name, method=None):
  """The prompt's logits and those of STEPS decoded tokens, [B, STEPS + 1, V]."""
  return Told(name, method).generate()


def neutral(name):
  return METHODS[name].neutral(CAPACITY)


@every
def test_neutral_setting_equals_full(name):
  out = logits_of(name, neutral(name))
  np.testing.assert_allclose(out, logits_of(name, Full()), atol=CLOSE)


@every
def test_tight_setting_has_an_effect(name):
  """The partner of the law above: it must not hold because nothing happens."""
  if name == "full":
    return
  assert np.abs(logits_of(name) - logits_of(name, Full()))[:, 1:].max() > 0.05


@every
def test_chunked_prefill(name):
  """Reading the prompt in chunks of 8 equals reading it at once, where the method says so."""
  run = Told(name)
  run.prompt(np.minimum(LENGTHS, CHUNK))
  for start in range(CHUNK, int(LENGTHS.max()), CHUNK):
    run.chunk(np.clip(LENGTHS - start, 0, CHUNK), np.minimum(LENGTHS, start).astype(np.int32))
  chunked = np.stack([run.decode(LENGTHS + i) for i in range(STEPS)], 1)
  assert np.isfinite(chunked).all()
  if run.method.chunkable:
    np.testing.assert_allclose(chunked, logits_of(name)[:, 1:], atol=CLOSE)


@every
def test_decode_equals_prefill(name):
  """prefill(n + i) equals prefill(n) then i decode steps, where the method says so."""
  if not tight(name).order_independent:
    pytest.skip("the method decides by what it saw in which order")
  for i in (1, STEPS):
    whole = Told(name).prompt((LENGTHS + i).astype(np.int32))
    np.testing.assert_allclose(logits_of(name)[:, i], whole, atol=CLOSE)


@every
def test_kept_positions(name):
  """Occupied slots are the prefix [0, used); they hold distinct seen tokens, the newest too."""
  run = Told(name)
  for step in range(STEPS + 1):
    seen = LENGTHS + step
    run.prompt() if step == 0 else run.decode(seen - 1)
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
    run, seen = Told(name, method), LENGTHS.copy()
    out = [run.prompt()]
    for _ in range(2):
      out += [run.decode(seen + i) for i in range(2)]
      seen += 2
      out.append(run.chunk(TURN, seen))
      seen += TURN
    return np.stack(out)

  want = conversation(Full())
  np.testing.assert_allclose(conversation(neutral(name)), want, atol=CLOSE)


@every
def test_a_second_question_on_the_same_cache(name):
  """Two questions to one document, each in its row: who asks what in the other row is all one."""
  document = np.array([23, 23], np.int32)
  texts = [TOKENS[0, 23:40], TOKENS[1, 10:27]]

  def ask(first, second):
    tokens = np.stack([np.concatenate([TOKENS[0, :23], texts[i]]) for i in (first, second)])
    lengths = TURN[[first, second]]
    run = Told(name)
    run.prompt(document, tokens)
    out = [run.chunk(lengths, document, tokens)]
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
  run = Told(name)
  run.prompt()
  clean = run.caches
  want = run.decode(LENGTHS)

  def poison(cache):
    empty = (cache.pos < 0)[..., None]
    return cache.put(slots={n: jnp.where(empty, jnp.nan, cache.slots[n]) for n in ("k", "v")})

  run.caches = tuple(poison(cache) for cache in clean)
  np.testing.assert_array_equal(run.decode(LENGTHS), want)
  run.caches = tuple(poison(cache) for cache in clean)
  assert np.isfinite(run.chunk([3, 3], LENGTHS)).all()


TOP = 3  # the layer of four in which every method does what it does


def one_layer(name, stream, **how):
  """A layer of four KV heads, of which [22, 9] tokens are read at once."""
  env = Env(4, tile=4, **{"impl": "reference", **how})
  return Layer(tight(name), stream, CAPACITY, TOP, env)


def stream_of(seed):
  return Stream.random(seed, kv_heads=4, groups=2, tokens=40)


@every
def test_nan_is_loud_and_leaves_no_trace(name):
  """A query of NaN: its output is NaN, statistics are not, and the other row notices nothing."""
  clean = stream_of(5)
  ill = clean.poisoned("q", row=0, token=24)
  layers = one_layer(name, clean), one_layer(name, ill)
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
  clean, live = stream_of(6), [True, False]
  plain, checked = (one_layer(name, clean, check_nan=check) for check in (False, True))
  plain.prefill([22, 9])
  message = (
    rf"{METHODS[name].__name__}, layer {TOP}: found NaN .* of row 0, which has cached {{}} tokens"
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
    step = driver(layer.at, "decode_step")
    jaxpr = jax.make_jaxpr(step)(layer.cache, *new, jnp.ones(2, bool), Carry())
    assert ("is_finite" in str(jaxpr)) == check


@every
def test_rows_are_isolated(name):
  """Row 0 does not notice another text or another length in row 1."""
  want = logits_of(name)[0]
  other = TOKENS.copy()
  other[1] = (other[1] + 7) % CONFIG.vocab
  np.testing.assert_allclose(Told(name).generate(tokens=other)[0], want, atol=CLOSE)
  short = LENGTHS.copy()
  short[1] = 3
  np.testing.assert_allclose(Told(name).generate(lengths=short)[0], want, atol=CLOSE)


@every
def test_idle_rows_stay_untouched(name):
  """A row without tokens in a second turn, and a finished row in decode, keep every bit."""
  run = Told(name)
  run.prompt()

  def row(caches, b):
    return jax.tree.map(lambda x: np.asarray(x[b]), caches)

  before = row(run.caches, 1)
  run.chunk([4, 0], LENGTHS)
  chex.assert_trees_all_equal(row(run.caches, 1), before)
  before, other = row(run.caches, 0), row(run.caches, 1)
  run.decode(LENGTHS, live=np.array([False, True]))
  chex.assert_trees_all_equal(row(run.caches, 0), before)
  changed = jax.tree.map(lambda a, b: (a != b).any(), row(run.caches, 1), other)
  assert any(jax.tree.leaves(changed))


def operations(jaxpr):
  """Every equation with what it reads by number, those of the jaxprs inside of it likewise."""
  inner = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
  constants = zip(inner.constvars, getattr(jaxpr, "consts", ()), strict=False)
  known, fresh = {x: str(value) for x, value in constants}, itertools.count()

  def plain(value):
    if isinstance(value, Jaxpr | ClosedJaxpr):
      return operations(value)
    if isinstance(value, dict):
      return {key: plain(x) for key, x in value.items()}
    if isinstance(value, tuple | list):
      return [plain(x) for x in value]
    return re.sub(r"0x\w+", "", str(value))

  def read(x):
    if isinstance(x, Literal):
      return str(x)
    if x not in known:
      known[x] = next(fresh)
    return known[x]

  done: list = [[read(x) for x in inner.invars]]
  for eqn in inner.eqns:
    into = [(read(x), str(x.aval)) for x in eqn.outvars]
    done.append((eqn.primitive.name, [read(x) for x in eqn.invars], into, plain(eqn.params)))
  return done, [read(x) for x in inner.outvars]


def traced(name, method):
  """What a prompt and a decode step compute, and how often three steps trace the latter."""
  run = Told(name, method)
  traces = []

  def prompt(leaves, caches, tokens):
    model = join(run.graph, leaves)
    return model.prefill(tokens, jnp.asarray(LENGTHS), caches, method, past=0)

  @jax.jit
  def step(leaves, caches, token):
    traces.append(1)
    return join(run.graph, leaves).decode(token, caches, method)

  jaxprs = (
    jax.make_jaxpr(prompt)(run.leaves, run.caches, TOKENS[:, :WIDTH]),
    step.trace(run.leaves, run.caches, TOKENS[:, 0]).jaxpr,
  )
  caches = run.caches
  for token in TOKENS.T[:3]:
    _, caches = jax.eval_shape(step, run.leaves, caches, token)
  return [operations(jaxpr) for jaxpr in jaxprs], len(traces)


@functools.cache
def programs(name):
  return traced(name, tight(name))


@every
def test_second_call_does_not_retrace(name):
  """The caches that a step returns are of the types of those that it was given."""
  assert programs(name)[1] == 1


@every
def test_decode_loop_is_in_place(name):
  """Sixteen jitted steps alias all cache bytes and need less memory than one layer's cache.

  The budget is an eighth of the cache: a reference gathers copies of what its plan lists.
  """
  run = Told(name, METHODS[name].example(512), capacity=4096)

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


def all_but(*names):
  """Every method; the core leaves some out, which take long and whose files show it, too."""
  marks = [[pytest.mark.slow] * (name in names) for name in METHODS]
  cases = [pytest.param(name, marks=mark) for name, mark in zip(METHODS, marks, strict=True)]
  return pytest.mark.parametrize("name", cases)


@all_but("ltri", "prr")
def test_pallas_equals_reference_in_a_layer(name):
  """The kernels (interpreted on a CPU) against the reference: a prompt, and steps after it."""
  plain, kernels = (one_layer(name, stream_of(4), impl=impl) for impl in ("reference", "pallas"))
  np.testing.assert_allclose(kernels.prefill([22, 9]), plain.prefill([22, 9]), atol=2e-5)
  for step in range(STEPS):
    (out, _), (want, _) = (layer.decode([22 + step, 9 + step]) for layer in (kernels, plain))
    np.testing.assert_allclose(out, want, atol=2e-5)


@all_but(*METHODS.keys() - {"full"})
def test_pallas_equals_reference(name):
  """The same in a decoder, whose products and norms are kernels too."""
  out = Told(name, impl="pallas").generate()
  np.testing.assert_allclose(out, logits_of(name), atol=CLOSE)


@all_but("ltri")
def test_heads_sharded_over_two_devices(name):
  """One layer under shard_map, KV heads split in two, equals the layer on one device."""
  whole, split = (one_layer(name, stream_of(3)) for _ in range(2))
  at = split.method.at(dataclasses.replace(split.at.env, head_axis="heads"), TOP)
  mesh, heads = Mesh(np.array(jax.devices()[:2]), ("heads",)), P(None, "heads")
  shelves = (split.cache.slots, split.cache.heads, split.cache.rows)
  specs = Cache(
    *(dict.fromkeys(x, how) for x, how in zip(shelves, (heads, heads, P()), strict=True))
  )

  def sharded(move):
    def run(*args):
      out, cache, _, _ = getattr(split.method, move)(at, *args)
      return out, cache

    sides = {"mesh": mesh, "in_specs": (specs, heads, heads, heads, P(), P())}
    both = jax.jit(jax.shard_map(run, **sides, out_specs=(heads, specs), check_vma=False))
    return lambda *args: (None, (*both(*args), None, None))

  split._prefill, split._decode = sharded("prefill"), sharded("decode_step")
  for run in ("prefill", [22, 9]), ("decode", [22, 9]), ("decode", [23, 10]):
    outs = [np.asarray(getattr(layer, run[0])(run[1])[0]) for layer in (whole, split)]
    np.testing.assert_allclose(outs[1], outs[0], atol=2e-5)


# Properties of a method, all of which are answers.
FACTS = [fact for fact, value in vars(Method).items() if isinstance(value, property)]


@dataclasses.dataclass(frozen=True)
class Through(Wrapper):
  """A wrapper that changes nothing."""


@every
def test_empty_wrapper_is_transparent(name):
  """It traces to the programs of its base, not an operation is another one, and answers as it."""
  base = tight(name)
  through = Through(base)
  assert traced(name, through) == programs(name)
  for fact in FACTS:
    assert getattr(through, fact) == getattr(base, fact), fact
  for n in (1, 100):
    assert through.pieces(n) == base.pieces(n)


@every
def test_shared_prefill(name):
  """One pass that fills several caches equals the method's own prefill, bit for bit."""
  method = tight(name)
  if not method.dense_prefill:
    with pytest.raises(ValueError, match="leave prefill attention dense"):
      SharedPrefill((method,))
    return
  shared, own = Told(name, SharedPrefill((Full(), method))), Told(name)
  shared.prompt()
  own.prompt()
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
  run = Told(name, preset)
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


def test_every_law_is_put_to_every_method():
  """Here, or with a reason: what does not depend on the method."""
  alone = {"test_nobody_looks_for_nan_unasked", "test_every_law_is_put_to_every_method"}
  for name, law in globals().items():
    if name.startswith("test_") and name not in alone:
      (mark,) = law.pytestmark
      cases = [getattr(case, "values", (case,))[0] for case in mark.args[1]]
      assert cases == list(METHODS), name
