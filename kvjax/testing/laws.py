"""The laws: what every method must obey, whatever it computes.

Each is a function of a `Case` that raises AssertionError where the method breaks it. Compiling
takes all the time, so the laws of a case share its programs: of a small decoder a prompt of WIDTH
tokens, a chunk of CHUNK onto live caches and a decode step, under a tight setting and the neutral
one; of a layer a prompt and a step, with and without the NaN guard. Shapes and static arguments of
a call are part of its program: a law that needs others pays for them.
"""

import contextlib
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from .. import forms, settings
from ..full import Full
from ..leaves import Leaf
from ..method import Method
from ..models.generate import join
from ..shared_prefill import SharedPrefill, take
from ..types import Env
from ..wrapper import Wrapper
from .layer import Layer, Stream
from .tiny import CAPACITY, CLOSE, CONFIG, LENGTHS, TOKENS, Run

BUDGET = 12
STEPS = 6
WIDTH, CHUNK = 32, 8  # tokens of a prompt and of what is read onto live caches, padding included


@dataclasses.dataclass(frozen=True)
class Case:
  """A method class under the laws.

  Attributes:
    method: the class; it has `example` and `neutral`.
    settings: fields of the tight setting, `example(BUDGET)`, that a decoder this shallow needs.
    layers: how many layers show what the method does.
    drops_newest: why it may drop the newest token; empty: it may not.
    skips_newest: why a step may leave out the newest token; empty: it may not.
    has_repo: whether `repo` gives a setting.
  """

  method: type[Method]
  settings: tuple[tuple[str, Any], ...] = ()
  layers: int = 2
  drops_newest: str = ""
  skips_newest: str = ""
  has_repo: bool = False

  @functools.cached_property
  def tight(self) -> Method:
    """A setting under which the method has something to drop at these lengths."""
    return dataclasses.replace(settings.example(self.method, BUDGET), **dict(self.settings))

  @functools.cached_property
  def neutral(self) -> Method:
    return settings.neutral(self.method, CAPACITY)


LAWS: dict[str, Callable[[Case], None]] = {}


def law(f: Callable[[Case], None]) -> Callable[[Case], None]:
  """Adds a function to `LAWS`, by its name."""
  LAWS[f.__name__] = f
  return f


def check(method: type[Method] | Case, **how: Any) -> None:
  """Puts a method under all laws.

  Args:
    method: the class, which has `example` and `neutral`; or a case.
    how: fields of `Case`, for a class.

  Raises:
    AssertionError: a law does not hold; a note names it.
  """
  case = method if isinstance(method, Case) else Case(method, **how)
  for name, holds in LAWS.items():
    try:
      holds(case)
    except Exception as error:
      error.add_note(f"{case.method.__name__} breaks the law {name}")
      raise


# ---- calls of a small decoder


class Told(Run):
  """A run of calls whose shapes are those of the shared programs."""

  def __init__(self, case: Case, method: Method | None = None, **how: Any):
    super().__init__(case.tight if method is None else method, layers=case.layers, **how)

  def prompt(self, lengths=LENGTHS, tokens=TOKENS):
    return self.prefill(lengths, tokens=tokens, width=WIDTH)

  def chunk(self, lengths, start, tokens=TOKENS):
    return self.prefill(np.asarray(lengths, np.int32), start, tokens, width=CHUNK, past=None)

  def generate(self, steps=STEPS, lengths=LENGTHS, **given):
    return super().generate(steps, lengths, width=WIDTH, **given)


@functools.cache
def logits_of(case: Case, method: Method | None = None) -> np.ndarray:
  """The prompt's logits and those of STEPS decoded tokens, [B, STEPS + 1, V]."""
  return Told(case, method).generate()


@law
def neutral_setting_equals_full(case):
  out = logits_of(case, case.neutral)
  np.testing.assert_allclose(out, logits_of(case, Full()), atol=CLOSE)


@law
def tight_setting_has_an_effect(case):
  """The partner of the law above: it must not hold because nothing happens."""
  if case.method is not Full:
    assert np.abs(logits_of(case) - logits_of(case, Full()))[:, 1:].max() > 0.05


@law
def chunked_prefill(case):
  """Reading the prompt in chunks of 8 equals reading it at once, where the method says so."""
  run = Told(case)
  run.prompt(np.minimum(LENGTHS, CHUNK))
  for start in range(CHUNK, int(LENGTHS.max()), CHUNK):
    run.chunk(np.clip(LENGTHS - start, 0, CHUNK), np.minimum(LENGTHS, start).astype(np.int32))
  chunked = np.stack([run.decode(LENGTHS + i) for i in range(STEPS)], 1)
  assert np.isfinite(chunked).all()
  if run.method.traits.chunkable:
    np.testing.assert_allclose(chunked, logits_of(case)[:, 1:], atol=CLOSE)


@law
def decode_equals_prefill(case):
  """prefill(n + i) equals prefill(n) then i decode steps, where the method says so.

  Others decide by what they saw in which order.
  """
  for i in (1, STEPS) if case.tight.traits.order_independent else ():
    whole = Told(case).prompt((LENGTHS + i).astype(np.int32))
    np.testing.assert_allclose(logits_of(case)[:, i], whole, atol=CLOSE)


@law
def kept_positions(case):
  """Occupied slots are the prefix [0, used); they hold distinct seen tokens, the newest too."""
  run = Told(case)
  for step in range(STEPS + 1):
    seen = LENGTHS + step
    run.prompt() if step == 0 else run.decode(seen - 1)
    check_kept(case, run.caches, seen)


def check_kept(case, caches, seen):
  for cache in caches:
    pos, used = np.asarray(cache.pos), np.asarray(cache.used)
    np.testing.assert_array_equal(cache.seen, seen)
    for b in range(len(seen)):
      for row in pos[b]:
        kept = row[: used[b]]
        assert (kept >= 0).all() and (row[used[b] :] == -1).all()
        assert len(set(kept.tolist())) == used[b]
        assert kept.max() == seen[b] - 1 or case.drops_newest


TURN = np.array([5, 8], np.int32)


@law
def further_turns_of_the_neutral_setting_equal_full(case):
  """A prompt, two tokens of answer, a turn onto the live cache, two tokens more."""

  def conversation(method):
    run, seen = Told(case, method), LENGTHS.copy()
    out = [run.prompt()]
    for _ in range(2):
      out += [run.decode(seen + i) for i in range(2)]
      seen += 2
      out.append(run.chunk(TURN, seen))
      seen += TURN
    return np.stack(out)

  want = conversation(Full())
  np.testing.assert_allclose(conversation(case.neutral), want, atol=CLOSE)


@law
def a_second_question_on_the_same_cache(case):
  """Two questions to one document, each in its row: who asks what in the other row is all one."""
  document = np.array([23, 23], np.int32)
  texts = [TOKENS[0, 23:40], TOKENS[1, 10:27]]

  def ask(first, second):
    tokens = np.stack([np.concatenate([TOKENS[0, :23], texts[i]]) for i in (first, second)])
    lengths = TURN[[first, second]]
    run = Told(case)
    run.prompt(document, tokens)
    out = [run.chunk(lengths, document, tokens)]
    check_kept(case, run.caches, document + lengths)
    for i in range(3):
      out.append(run.decode(document + lengths + i, tokens=tokens))
      check_kept(case, run.caches, document + lengths + i + 1)
    return np.stack(out, 1)

  both, swapped, alike = ask(0, 1), ask(1, 0), ask(0, 0)
  assert np.isfinite(both).all()
  np.testing.assert_allclose(swapped[::-1], both, atol=CLOSE)
  np.testing.assert_allclose(alike, both[[0, 0]], atol=CLOSE)
  assert np.abs(both[0] - both[1]).max() > 0.05


@law
def nan_in_empty_slots_never_leaks(case):
  run = Told(case)
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


@law
def rows_are_isolated(case):
  """Row 0 does not notice another text or another length in row 1."""
  want = logits_of(case)[0]
  other = TOKENS.copy()
  other[1] = (other[1] + 7) % CONFIG.vocab
  np.testing.assert_allclose(Told(case).generate(tokens=other)[0], want, atol=CLOSE)
  short = LENGTHS.copy()
  short[1] = 3
  np.testing.assert_allclose(Told(case).generate(lengths=short)[0], want, atol=CLOSE)


@law
def idle_rows_stay_untouched(case):
  """A row without tokens in a second turn, and a finished row in decode, keep every bit."""
  run = Told(case)
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


# ---- one layer


TOP = 3  # the layer of four in which every method does what it does


def one_layer(case: Case, stream: Stream, **how: Any) -> Layer:
  """A layer of four KV heads, of which [22, 9] tokens are read at once."""
  env = Env(4, tile=4, **{"impl": "reference", **how})
  return Layer(case.tight, stream, CAPACITY, TOP, env)


def stream_of(seed: int) -> Stream:
  return Stream.random(seed, kv_heads=4, groups=2, tokens=40)


@law
def nan_is_loud_and_leaves_no_trace(case):
  """A query of NaN: its output is NaN, statistics are not, and the other row notices nothing."""
  clean = stream_of(5)
  ill = clean.poisoned("q", row=0, token=24)
  layers = one_layer(case, clean), one_layer(case, ill)
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


@law
def nan_raises_when_asked(case):
  """The switch names method, layer and row; the row goes on later as if nothing had happened."""
  clean, live = stream_of(6), [True, False]
  plain, checked = (one_layer(case, clean, check_nan=check) for check in (False, True))
  plain.prefill([22, 9])
  message = (
    rf"{case.method.__name__}, layer {TOP}: found NaN .* of row 0, which has cached {{}} tokens"
  )
  checked.stream = clean.poisoned("k", row=0, token=5)
  with raises(checkify.JaxRuntimeError, message.format(0)):
    checked.prefill([22, 9])
  checked.stream = clean
  checked.prefill([22, 0], tokens=22)
  for step, which in enumerate("qk" if case.skips_newest else "qkv"):
    at = [22 + step, 9 + step]
    want, _ = plain.decode(at)
    before = jax.tree.map(lambda x: np.asarray(x[0]), checked.cache)
    checked.stream = clean.poisoned(which, row=0, token=at[0])
    with raises(checkify.JaxRuntimeError, message.format(at[0])):
      checked.decode(at)
    chex.assert_trees_all_equal(jax.tree.map(lambda x: np.asarray(x[0]), checked.cache), before)
    checked.stream = clean
    out, _ = checked.decode(at, live=live)
    np.testing.assert_allclose(out[0], want[0], atol=1e-6)
  chex.assert_trees_all_close(checked.cache, plain.cache, atol=1e-6)


@contextlib.contextmanager
def raises(kind: type[Exception], pattern: str) -> Iterator[None]:
  """An error of a kind is raised, whose message the pattern finds."""
  try:
    yield
  except kind as error:
    assert re.search(pattern, str(error)), f"found {error}, expected {pattern}"
  else:
    raise AssertionError(f"found no {kind.__name__}, expected {pattern}")


@law
def pallas_equals_reference_in_a_layer(case):
  """The kernels (interpreted on a CPU) against the reference: a prompt, and steps after it."""
  plain, kernels = (one_layer(case, stream_of(4), impl=impl) for impl in ("reference", "pallas"))
  np.testing.assert_allclose(kernels.prefill([22, 9]), plain.prefill([22, 9]), atol=2e-5)
  for step in range(STEPS):
    (out, _), (want, _) = (layer.decode([22 + step, 9 + step]) for layer in (kernels, plain))
    np.testing.assert_allclose(out, want, atol=2e-5)


@law
def pallas_equals_reference(case):
  """The same in a decoder, whose products and norms are kernels too."""
  out = Told(case, impl="pallas").generate()
  np.testing.assert_allclose(out, logits_of(case), atol=CLOSE)


@law
def heads_sharded_over_two_devices(case):
  """One layer under shard_map, KV heads split in two, equals the layer on one device.

  With fewer devices nothing is asked; a CPU has as many as
  XLA_FLAGS=--xla_force_host_platform_device_count=2 says.
  """
  if jax.device_count() < 2:
    return
  whole, split = (one_layer(case, stream_of(3)) for _ in range(2))
  at = split.method.at(dataclasses.replace(split.at.env, head_axis="heads"), TOP)
  mesh, heads = Mesh(np.array(jax.devices()[:2]), ("heads",)), P(None, "heads")
  kinds = {"slots": heads, "heads": heads, "rows": P()}
  shelves: dict[str, Any] = {
    x: dict.fromkeys(getattr(split.cache, x), kind) for x, kind in kinds.items()
  }
  specs = dataclasses.replace(split.cache, **shelves)

  def sharded(move):
    def run(*args):
      out, cache, _, _ = getattr(split.method, move)(at, *args)
      return out, cache

    how: dict[str, Any] = {"mesh": mesh, "in_specs": (specs, heads, heads, heads, P(), P())}
    both = jax.jit(jax.shard_map(run, **how, out_specs=(heads, specs), check_vma=False))
    return lambda *args: (None, (*both(*args), None, None))

  split._prefill, split._decode = sharded("prefill"), sharded("decode_step")
  for run in ("prefill", [22, 9]), ("decode", [22, 9]), ("decode", [23, 10]):
    outs = [np.asarray(getattr(layer, run[0])(run[1])[0]) for layer in (whole, split)]
    np.testing.assert_allclose(outs[1], outs[0], atol=2e-5)


# ---- what is traced


def operations(jaxpr: Any) -> Any:
  """Every equation with what it reads by number, those of the jaxprs inside of it likewise."""
  inner = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
  constants = zip(inner.constvars, getattr(jaxpr, "consts", ()), strict=False)
  known: dict[Any, Any] = {x: str(value) for x, value in constants}
  fresh = itertools.count()

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


def traced(case: Case, method: Method) -> list:
  """What a prompt and a decode step compute; jit remembers those that other laws called."""
  jaxprs = Told(case, method).jaxprs(TOKENS[:, :WIDTH])
  return [operations(jaxpr) for jaxpr in jaxprs]


@law
def second_call_does_not_retrace(case):
  """The caches that a prompt and a step return are of the types of those that they were given."""
  run = Told(case)
  given = jax.tree.map(jax.typeof, run.caches)
  for call in run.prompt, lambda: run.decode(LENGTHS):
    call()
    assert jax.tree.map(jax.typeof, run.caches) == given


@law
def decode_loop_is_in_place(case):
  """Sixteen jitted steps alias all cache bytes and need less memory than one layer's cache.

  The budget is an eighth of the cache: a reference gathers copies of what its plan lists.
  """
  run = Told(case, settings.example(case.method, 512), capacity=4096)

  def loop(leaves, caches, tokens):
    decoder = join(run.graph, leaves)
    return jax.lax.scan(lambda c, token: decoder.decode(token, c, run.method)[::-1], caches, tokens)

  tokens = jnp.asarray(TOKENS.T[:16])
  compiled = jax.jit(loop, donate_argnums=1).lower(run.leaves, run.caches, tokens).compile()
  memory: Any = compiled.memory_analysis()
  cache_bytes = sum(x.nbytes for x in jax.tree.leaves(run.caches))
  assert memory.alias_size_in_bytes >= cache_bytes
  per_layer = sum(x.nbytes for x in jax.tree.leaves(run.caches[0]))
  logits = 16 * 2 * CONFIG.vocab * 4
  assert memory.temp_size_in_bytes - logits < per_layer


# Properties of a method, all of which are answers.
FACTS = [fact for fact, value in vars(Method).items() if isinstance(value, property)]


@dataclasses.dataclass(frozen=True)
class Through(Wrapper):
  """A wrapper that changes nothing."""


@law
def empty_wrapper_is_transparent(case):
  """It traces to the programs of its base, not an operation is another one, and answers as it."""
  base = case.tight
  through = Through(base)
  assert traced(case, through) == traced(case, base)
  for fact in FACTS:
    assert getattr(through, fact) == getattr(base, fact), fact
  for n in (1, 100):
    assert through.traits.pieces(n) == base.traits.pieces(n)


# ---- what a method says of itself


@law
def shared_prefill(case):
  """One pass that fills several caches equals the method's own prefill, bit for bit."""
  if not forms.dense_prefill(case.tight):
    with raises(ValueError, "leave prefill attention dense"):
      SharedPrefill((case.tight,))
    return
  shared, own = Told(case, SharedPrefill((Full(), case.tight))), Told(case)
  shared.prompt()
  own.prompt()
  chex.assert_trees_all_close(take(shared.caches, 1), own.caches, atol=1e-5)


@law
def the_repository_setting(case):
  """Where the authors' code differs from their paper, `repo` is that setting, and it runs."""
  method = case.method
  if not case.has_repo:
    with raises(NotImplementedError, rf"{method.__name__}\.repo: no setting"):
      settings.repo(method, 40)
    return
  preset = settings.repo(method, 40)
  assert isinstance(preset, method) and preset != settings.example(method, 40)
  run = Told(case, preset)
  assert np.isfinite(run.generate(2)).all()
  if not preset.traits.positional:
    sizes = [cache.size for cache in run.caches]
    assert np.mean(sizes) <= 40 + getattr(preset, "buffer", 0)


@law
def caches_are_as_described(case):
  """`leaves` names the arrays of each layer's cache and no others, before and after a prompt."""
  run = Told(case)
  run.prompt()
  spec = run.model.spec(len(LENGTHS), CAPACITY)
  for layer, cache in enumerate(run.caches):
    leaves = case.tight.leaves(spec, layer)
    found = {shelf: {*getattr(cache, shelf)} for shelf in ("slots", "heads", "rows")}
    assert found == {shelf: {n for n, x in leaves.items() if x.shelf == shelf} for shelf in found}
    for name, leaf in leaves.items():
      if leaf.made is None:
        x = getattr(cache, leaf.shelf)[name]
        assert x.dtype == jnp.dtype(leaf.dtype)
        assert dict(cache.kinds).get(name, Leaf(leaf.shelf)) == leaf.kind()


@law
def is_hashable_and_equal_by_value(case):
  again = Case(case.method, case.settings)
  assert case.tight == again.tight and hash(case.tight) == hash(again.tight)
