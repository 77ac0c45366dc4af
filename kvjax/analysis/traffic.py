"""Bytes of its caches that a decode step moves, in advance: nothing is allocated or run.

A step of the reference is traced, layer by layer, and every array of the cache followed through it:
what is gathered counts by what is gathered, of an array or of numbers made of it one by one (codes
that become keys), what anything else looks at counts as a whole, and what is only written in place
or handed on counts nothing. Of arrays by slot only what a query may see is read, as kernels do.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from kvjax.core.cache import Cache, CacheSpec, Origin
from kvjax.core.context import Carry, Env
from kvjax.families import forms, sliding
from kvjax.families.bounded import Bounded
from kvjax.families.coded import Coded
from kvjax.families.method import Method
from kvjax.methods.registry import check_method
from kvjax.ops import offload, shared_slots
from kvjax.runtime.sites import DifferentLayer, Site

# What gives another view of an array: reading happens where the view is used.
_VIEWS = (
  *("reshape", "squeeze", "transpose", "convert_element_type", "broadcast_in_dim", "expand_dims"),
  *("slice", "copy", "optimization_barrier", "stop_gradient", "rev"),
)
# What makes numbers of codes, each of those in its place: they are read where the result is.
_DECODES = (
  *("add", "sub", "mul", "and", "or", "gt", "lt", "select_n", "concatenate"),
  *("shift_left", "shift_right_arithmetic", "shift_right_logical", "bitcast_convert_type"),
  *("exp2", "max", "min"),
)
_TAKES = ("gather", "dynamic_slice")
_WRITES = ("scatter", "dynamic_update_slice")
# What references see slots by; kernels have spans.
_MASKS = "slots.pos", "heads.apart.pos", "heads.context_pos"
_CODES = "slots.k", "slots.v", "heads.k_mean", "heads.k_scale", "heads.k_zero", "heads.k_power"
_KEYS = "slots.k", "heads.held_k", "heads.apart.k", "heads.context_k"
_VALUES = "slots.v", "heads.held_v", "heads.apart.v", "heads.context_v"


@dataclasses.dataclass(frozen=True)
class LayerTraffic:
  """The most that a step moves of one layer's cache, all rows and heads together.

  Attributes:
    attended: slots that each KV head attends to, on average over the heads.
    tokens: bytes of keys and values that are attended to.
    scanned: bytes of the keys that are looked at to choose those.
    spared: bytes of `scanned` that sharing can spare (`Traits.scans`).
    others: bytes of everything else: summaries, labels, scores; what is written as a whole counts
      once more.
    host: bytes that cross the link to the host's memory.
    chosen: whether a selection comes before attention.
    walks: how many times a step attends, one after the other.
    bound: whether data decide how much of this a step moves: walks that end early, plans that are
      pruned, blocks that are on the device already, queries that share.
  """

  attended: float
  tokens: float
  scanned: float
  spared: float
  others: float
  host: float
  chosen: bool
  walks: int
  bound: bool

  @property
  def device(self) -> float:
    """Bytes in the device's memory."""
    return self.tokens + self.scanned + self.others


@dataclasses.dataclass
class _Read:
  """The parts of an array that were read: a share of the whole, and elements, so many times."""

  whole: float = 0.0
  taken: float = 0.0
  times: int = 0


@dataclasses.dataclass(frozen=True)
class _View:
  """A view of an input array: which one, and the share of it that is left."""

  name: str
  share: float = 1.0


_Views = tuple[_View, ...]  # of what a value is made, number by number; empty: of no input


class _Walk:
  """Follows input arrays through a program and notes what of them is looked at.

  Args:
    sizes: numbers of the arrays, by name.
    codes: names of those that keys and values are made of.
  """

  def __init__(self, sizes: dict[str, int], codes: frozenset[str] = frozenset()):
    self.sizes, self.codes = sizes, codes
    self.reads = {name: _Read() for name in sizes}

  def follow(self, jaxpr: Any, given: Sequence[_Views], times: float = 1.0) -> list[_Views]:
    """Views that the outputs are of inputs.

    Args:
      jaxpr: a program.
      given: what its arguments are views of.
      times: how often it runs; infinity where unknown.
    """
    held: dict[Any, _Views] = {x: v for x, v in zip(jaxpr.invars, given, strict=True) if v}

    def views_of(x: Any) -> _Views:
      return () if isinstance(x, Literal) else held.get(x, ())

    for eqn in _needed(jaxpr):
      views = [views_of(x) for x in eqn.invars]
      if any(views):
        made = self._equation(eqn, views, times)
        held.update((x, v) for x, v in zip(eqn.outvars, made, strict=True) if v)
    return [views_of(x) for x in jaxpr.outvars]

  def _equation(self, eqn: Any, views: list[_Views], times: float) -> Sequence[_Views]:
    name, first = eqn.primitive.name, views[0]
    nothing: list[_Views] = [()] * len(eqn.outvars)
    if name in _VIEWS and first:
      left = min(1.0, eqn.outvars[0].aval.size / max(1, eqn.invars[0].aval.size))
      return [tuple(_View(v.name, v.share * left) for v in first)]
    if name == "select_n" and all(views[1:]) and len(_together(views[1:])) == 1:
      return [views[1]]
    repeats = name == "gather" and eqn.outvars[0].aval.size > eqn.invars[0].aval.size  # by group
    if (repeats or name in _DECODES) and all(v.name in self.codes for v in _together(views)):
      return [_together(views)]
    if name in _TAKES and first:
      self._taken(first, eqn.outvars[0].aval.size, eqn.invars[0].aval.size, times)
      return nothing
    if name.startswith(_WRITES) and first:
      return [first]
    inner = _inner(eqn)
    if inner is not None:
      return self._inside(eqn, inner, views, times)
    self._whole(views)
    return nothing

  def _whole(self, views: Sequence[_Views]) -> None:
    """All of each view."""
    for found in _together(views):
      read = self.reads[found.name]
      read.whole = max(read.whole, found.share)

  def _taken(self, views: _Views, size: int, of: int, times: float) -> None:
    """`size` of a value's `of` numbers, so many times; all of it where that would be more."""
    for found in views:
      read, most = self.reads[found.name], self.sizes[found.name] * found.share
      if size * times >= of:
        self._whole([(found,)])
      else:
        read.taken += most * size * times / of
        read.times += 1

  def _inside(
    self, eqn: Any, inner: list[Any], views: list[_Views], times: float
  ) -> Sequence[_Views]:
    """Reads of an equation's inner programs; branches add up, as it is not known which is taken."""
    name, params = eqn.primitive.name, eqn.params
    if name == "cond":
      made = [self.follow(branch, views[1:], times) for branch in inner]
      return [each[0] if len(set(each)) == 1 else () for each in zip(*made, strict=True)]
    if name == "while":
      return self.follow(inner[0], views[params["cond_nconsts"] :], math.inf)
    if name == "scan":
      carried = _alike(eqn.invars, inner[0].invars)
      self._whole([v for v, same in zip(views, carried, strict=True) if not same])
      given = [v if same else () for v, same in zip(views, carried, strict=True)]
      out = self.follow(inner[0], given, times * params["length"])
      kept = _alike(eqn.outvars, inner[0].outvars)
      return [v if same else () for v, same in zip(out, kept, strict=True)]
    return self.follow(inner[0], views, times)


def _together(views: Sequence[_Views]) -> _Views:
  """All of them, each input once."""
  shares: dict[str, float] = {}
  for found in (v for of_one in views for v in of_one):
    shares[found.name] = max(shares.get(found.name, 0.0), found.share)
  return tuple(_View(*each) for each in shares.items())


def _alike(outside: Sequence[Any], inside: Sequence[Any]) -> list[bool]:
  """Marks values that a scan's program takes whole: the others are slices along a first axis."""
  return [a.aval.ndim == b.aval.ndim for a, b in zip(outside, inside, strict=True)]


def _inner(eqn: Any) -> list[Any] | None:
  """The programs that an equation runs."""
  params = eqn.params
  if eqn.primitive.name == "cond":
    return [branch.jaxpr for branch in params["branches"]]
  if eqn.primitive.name == "while":
    return [params["body_jaxpr"].jaxpr]
  for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
    if name in params:
      return [getattr(params[name], "jaxpr", params[name])]
  return None


def _needed(jaxpr: Any) -> list[Any]:
  """Equations that the outputs need, in order."""
  needed = {x for x in jaxpr.outvars if not isinstance(x, Literal)}
  kept = []
  for eqn in reversed(jaxpr.eqns):
    if needed.intersection(eqn.outvars):
      kept.append(eqn)
      needed.update(x for x in eqn.invars if not isinstance(x, Literal))
  return kept[::-1]


def step_traffic(spec: CacheSpec, method: Method) -> tuple[LayerTraffic, ...]:
  """Traffic of a decode step in each layer's cache, in a context of `spec.capacity` tokens.

  Where data decide (`LayerTraffic.bound`), this is what it takes at most.

  Args:
    spec: sizes, as `Transformer.spec` gives them; the capacity is the context's length.
    method: the KV-cache method.

  Raises:
    TypeError: `method` is no method, or `spec` no sizes.
  """
  check_method("method", method)
  Origin.of(method, spec)
  method = _long_enough(method, spec.capacity)
  env = Env(max(1, spec.layers), impl="reference")
  sites: list[Site] = []
  known: dict[Any, tuple[LayerTraffic, Any]] = {}
  carry, found = Carry(), []
  for at in sliding.places(method, env, spec.windows):
    cache = jax.eval_shape(lambda at=at: Cache.empty(at.top, spec, at.layer))
    alike = [site for site in sites if (site.env, site.top) == (at.env, at.top)]
    for site in [*alike, Site(at.layer, at.env, at.top)]:
      key = site, jax.tree.structure((cache, carry)), *_shapes((cache, carry))
      try:
        with site.serving(at.layer):
          if key not in known:
            known[key] = _layer(site, spec, cache, carry)
      except DifferentLayer:
        continue
      break
    sites += [site] * (site not in sites)
    traffic, carry = known[key]
    found.append(traffic)
  return tuple(found)


def _long_enough(method: Method, tokens: int) -> Method:
  """The method without what it has for rows shorter than these, whose tables are longer."""
  fields = {field.name: field.init for field in dataclasses.fields(method)}
  changes: dict[str, Any] = {}
  slots = tokens
  if fields.get("base"):
    base = changes["base"] = _long_enough(method.base, tokens)  # type: ignore[attr-defined]
    slots = min(tokens, base.budget) if isinstance(base, Bounded) else tokens
  if fields.get("dense_below") and method.tiles.dense_below <= slots:  # type: ignore[attr-defined]
    changes["dense_below"] = 0
  return dataclasses.replace(method, **changes) if changes else method


def _shapes(tree: Any) -> tuple[Any, ...]:
  return tuple((x.shape, x.dtype) for x in jax.tree.leaves(tree))


def _layer(at: Site, spec: CacheSpec, cache: Cache, carry: Carry) -> tuple[LayerTraffic, Carry]:
  """A layer's traffic, and what it hands on."""
  rows, heads = spec.batch, spec.kv_heads
  q = jax.ShapeDtypeStruct((rows, heads, spec.groups, spec.head_dim), spec.dtype)
  k = jax.ShapeDtypeStruct((rows, heads, spec.head_dim), spec.dtype)
  live = jax.ShapeDtypeStruct((rows,), jnp.bool_)

  def step(cache: Cache, carry: Carry, q: Any, k: Any, v: Any, live: Any) -> Any:
    return at.top.decode_step(at, cache, q, k, v, live, carry)[:3]

  with offload.followed():
    program, made = jax.make_jaxpr(step, return_shape=True)(cache, carry, q, k, k, live)
  paths, _ = jax.tree_util.tree_flatten_with_path(cache)
  leaves = {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in paths}
  coded = jnp.issubdtype(cache.slots["k"].dtype, jnp.integer)
  codes = [name for name in leaves if name.startswith(_CODES)] if coded else []
  walk = _Walk({name: x.size for name, x in leaves.items()}, frozenset(codes))
  rest = [()] * (len(program.jaxpr.invars) - len(leaves))
  views = walk.follow(program.jaxpr, [*((_View(name),) for name in leaves), *rest])
  written = views[1 : 1 + len(leaves)]
  changed = {
    name for name, of in zip(leaves, written, strict=True) if [v.name for v in of] != [name]
  }
  return _summed(at, spec, cache, leaves, walk, changed), made[2]


def _summed(
  at: Site,
  spec: CacheSpec,
  cache: Cache,
  leaves: dict[str, Any],
  walk: _Walk,
  changed: set[str],
) -> LayerTraffic:
  """Sum of what was read, in bytes; `changed` are arrays that come back as other ones."""
  visible = _visible(at, spec, cache)
  hosted = {id(x) for x in offload.hosted(cache)}
  sums = dict.fromkeys(("tokens", "scanned", "others", "host"), 0.0)
  attended = 0.0
  values = walk.reads["slots.v"]
  chosen = values.taken > values.whole == 0
  for name, x in leaves.items():
    if name in _MASKS:
      continue
    read, size = walk.reads[name], x.size * x.dtype.itemsize
    whole = read.whole * size * (visible if name.startswith("slots.") else 1.0)
    taken = read.taken * x.dtype.itemsize
    if name in _VALUES:
      heads = x.shape[0] * cache.kv_heads
      attended += (whole + taken) / (x.dtype.itemsize * heads * x.shape[-1])
    if id(x) in hosted:
      sums["host"] += whole + taken
    elif name == "slots.k" and chosen:
      sums["scanned"] += whole
      sums["tokens"] += taken
    else:
      sums["tokens" if name in (*_KEYS, *_VALUES) else "others"] += whole + taken
      sums["others"] += size * (name in changed)
  traits = at.top.traits
  least, most = traits.scans(spec)
  inner = at.top
  while isinstance(inner, Coded):  # attends as its base does, over other numbers
    inner = inner.base
  ends = forms.differs(inner, "attend")  # it may not read all that the plan lists
  return LayerTraffic(
    attended=attended,
    tokens=sums["tokens"],
    scanned=sums["scanned"] * most,
    spared=sums["scanned"] * (most - least),
    others=sums["others"],
    host=sums["host"],
    chosen=chosen,
    walks=values.times if chosen else 1,
    bound=ends or traits.prunes or (least < most and sums["scanned"] > 0),
  )


def _visible(at: Site, spec: CacheSpec, cache: Cache) -> float:
  """The share of the slots that the newest token's query may see."""
  window = at.top.window(at, jnp.full((1, 1), spec.capacity - 1, jnp.int32))
  tokens = spec.capacity
  seen: float = tokens
  if window is not None:
    first = jnp.maximum(window.first[0, ..., 0], window.sinks)  # of each head, if they see apart
    seen = min(window.sinks, tokens) + float(jnp.maximum(tokens - first, 0).mean())
  return min(1.0, seen * shared_slots.sharers(cache) / cache.size)
