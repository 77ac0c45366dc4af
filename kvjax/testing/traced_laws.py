"""Laws of every method as it is traced, and of what it declares of itself."""

import dataclasses
import itertools
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from kvjax.core import settings
from kvjax.core.leaves import Layout, Leaf
from kvjax.families import forms
from kvjax.families.full import Full
from kvjax.families.method import Method
from kvjax.families.wrapper import Wrapper
from kvjax.models.decode.generate import join
from kvjax.ops import shared_slots
from kvjax.runtime.shared_prefill import SharedPrefill, take
from kvjax.testing.cases import WIDTH, Case, Told, finite, law, raises, same
from kvjax.testing.tiny import CAPACITY, CONFIG, LENGTHS, TOKENS


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
  """Operations of a prompt and a decode step; jit remembers those that other laws called."""
  jaxprs = Told(case, method).jaxprs(TOKENS[:, :WIDTH])
  return [operations(jaxpr) for jaxpr in jaxprs]


@law
def second_call_does_not_retrace(case):
  """The caches that a prompt and a step return are of the types of those that they were given."""
  run = Told(case)
  given = jax.tree.map(jax.typeof, run.caches)
  for call in run.prompt, lambda: run.decode(LENGTHS):
    call()
    same("types of the caches", jax.tree.map(jax.typeof, run.caches), given)


def of_codes(cache: Any) -> int:
  """Bytes of the float32 numbers that a cache's codes stand for."""
  bits = {name: cache.leaf(name).bits for name in cache.slots}
  return sum(4 * 8 * cache.slots[name].nbytes // of for name, of in bits.items() if of)


@law
def decode_loop_is_in_place(case):
  """Sixteen jitted steps alias all cache bytes and need less memory than one layer's cache.

  The budget is an eighth of the cache: a reference gathers copies of what its plan lists. Where
  slots are of one head (`Full` of one, too), XLA on a CPU transposes the keys for the product. Of
  codes it makes the numbers, those of one layer.
  """
  run = Told(case, settings.example(case.method, 512), capacity=4096)

  def loop(leaves, caches, tokens):
    decoder = join(run.graph, leaves)
    return jax.lax.scan(lambda c, token: decoder.decode(token, c, run.method)[::-1], caches, tokens)

  tokens = jnp.asarray(TOKENS.T[:16])
  compiled = jax.jit(loop, donate_argnums=1).lower(run.leaves, run.caches, tokens).compile()
  memory: Any = compiled.memory_analysis()
  cache_bytes = sum(x.nbytes for x in jax.tree.leaves(run.caches))
  kept = memory.alias_size_in_bytes
  assert kept >= cache_bytes, f"bytes in place: found {kept}, expected the caches' {cache_bytes}"
  per_layer = sum(x.nbytes for x in jax.tree.leaves(run.caches[0]))
  keys = run.caches[0].slots["k"]
  turned = keys.nbytes if keys.shape[1] == 1 else 0
  per_layer += 2 * of_codes(run.caches[0])  # the numbers, and what attention takes beside them
  logits = 16 * 2 * CONFIG.vocab * 4
  taken, most = memory.temp_size_in_bytes - logits, per_layer + turned
  assert taken < most, (
    f"bytes of temporaries: found {taken}, expected below {most}, a layer's cache"
  )


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
  alike = traced(case, through) == traced(case, base)
  assert alike, "operations under a wrapper: found others than without, expected the same"
  for fact in FACTS:
    same(f"{fact} under a wrapper", getattr(through, fact), getattr(base, fact))
  for n in (1, 100):
    same(f"traits.pieces({n})", through.traits.pieces(n), base.traits.pieces(n))


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
  """Setting `repo` is that of the authors' code where it differs from the paper, and it runs."""
  method = case.method
  if not case.has_repo:
    with raises(NotImplementedError, rf"{method.__name__}\.repo: no setting"):
      settings.repo(method, 40)
    return
  preset = settings.repo(method, 40)
  other = isinstance(preset, method) and preset != settings.example(method, 40)
  assert other, f"repo: found {preset!r}, expected another {method.__name__} than example's"
  run = Told(case, preset)
  finite("logits", run.generate(2))
  if not preset.traits.positional:
    sizes = [cache.size // shared_slots.sharers(cache) for cache in run.caches]
    most = 40 + getattr(preset, "buffer", 0)
    assert np.mean(sizes) <= most, f"slots: found {sizes}, expected at most {most} on average"


@law
def caches_are_as_described(case):
  """`leaves` names the arrays of each layer's cache and no others, before and after a prompt."""
  run = Told(case)
  run.prompt()
  spec = run.model.spec(len(LENGTHS), CAPACITY)
  for layer, cache in enumerate(run.caches):
    leaves = case.tight.leaves(spec, layer)
    said = [leaf.layout for leaf in leaves.values() if leaf.layout is not None]
    same(f"layout of layer {layer}", cache.layout, (said or [Layout.DENSE])[-1])
    found = {shelf: {*getattr(cache, shelf)} for shelf in ("slots", "heads", "rows")}
    listed = {shelf: {n for n, x in leaves.items() if x.shelf == shelf} for shelf in found}
    same(f"arrays of layer {layer}", found, listed)
    for name, leaf in leaves.items():
      if leaf.made is None:
        x = getattr(cache, leaf.shelf)[name]
        same(f"dtype of {name}", x.dtype, jnp.dtype(leaf.dtype))
        same(f"kind of {name}", dict(cache.kinds).get(name, Leaf(leaf.shelf)), leaf.kind())


@law
def is_hashable_and_equal_by_value(case):
  """Two methods of the same settings are equal, and hash alike."""
  again = Case(case.method, case.settings)
  same("the same settings", case.tight, again.tight)
  same("hash of the same settings", hash(case.tight), hash(again.tight))
