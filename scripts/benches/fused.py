"""kernels whose last program to arrive finishes a row, beside the same work in more launches"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import sight
from kvjax.kernels import top_k
from kvjax.kernels.decode import decode_joined, decode_with_output
from kvjax.kernels.quest import page_bounds
from kvjax.kernels.select import best_pages
from kvjax.kernels.sparse_decode import sparse_decode, sparse_joined
from tests.decode_cases import Shape

from . import Case, Contender, decode, looped_contender, select, sparse
from .longflow import holding

DENSE = (Shape(1, 8, 4, 4 << 10), Shape(1, 8, 4, 32 << 10), Shape(8, 8, 4, 4 << 10))
LISTS = ((16, 1024), (64, 4096))  # slots per block, and in all
LAYERS = ((1, 32 << 10), (1, 128 << 10))
FORMS = {"kvjax": False, "one launch": True}
CUTS = {f"{n} by {warps} warps": (n, warps) for n, warps in ((32, 4), (64, 4), (64, 8), (128, 8))}


def cases(quick: bool, peers: bool = True, only: str = "") -> Iterator[Case]:
  """Selections, how pages are cut for them, attention over a span or a list, whole layers."""
  methods = select.QUICK if quick else select.METHODS
  made: list[tuple[str, Callable[[str], Case]]] = []
  for name, method in methods.items():
    for batch, tokens in [(2, 1024)] if quick else select.SHAPES:
      build = functools.partial(selection, method, batch, tokens, quick)
      made.append((f"select {name} B{batch} T{tokens >> 10}K", build))
  for tokens in (1024,) if quick else (128 << 10, 512 << 10):
    made.append((f"pages B1 T{tokens >> 10}K", functools.partial(pages, tokens, quick)))
  for shape in (Shape(2, 2, 3, 300, 64, "float32"),) if quick else DENSE:
    made.append((f"span {shape.name}", functools.partial(dense, shape)))
  for unit, budget in ((16, 64),) if quick else LISTS:
    made.append((f"list {unit} of {budget}", functools.partial(listed, unit, budget, quick)))
  for name, method in methods.items():
    for batch, tokens in [(2, 1024)] if quick else LAYERS:
      build = functools.partial(layer, method, batch, tokens, quick)
      made.append((f"layer {name} B{batch} T{tokens >> 10}K", build))
  for name, build in made:
    if only in name:
      yield build(name)


def beside(
  name: str,
  shapes: str,
  moved: int,
  step: Callable[..., Any],
  states: Callable[[Any], list[Any]],
  turns: list[tuple],
  *,
  forms: dict[str, Any] = FORMS,
  tolerance: float,
  output: Callable[[Any], Any],
  steps: Callable[[Any], Any] | None = None,
  renewed: Callable[[Any, Any], Any] = lambda before, after: after,
  calls: int,
) -> Case:
  """`step(form, state, *arguments)` in every form: what "kvjax" gives is what the others should."""

  def contender(title: str, form: Any) -> Contender:
    how: dict[str, Any] = {"output": output, "steps": steps, "renewed": renewed}
    run = functools.partial(step, form)
    return looped_contender(title, run, states(form), turns, calls=calls, **how)

  def first(part: Callable[[Any], Any], dtype: Any) -> np.ndarray:
    form = forms["kvjax"]
    made = jax.jit(functools.partial(step, form))(states(form)[0], *turns[0])[1]
    return np.asarray(part(made), dtype)

  def remarks(seconds: dict[str, float]) -> list[str]:
    return [
      f"{title}: {launches(functools.partial(step, form), states(form)[0], *turns[0])} launches, "
      f"{(seconds['kvjax'] - seconds[title]) * 1e6:.1f} µs fewer"
      for title, form in forms.items()
      if title in seconds
    ]

  return Case(
    name=name,
    shapes=shapes,
    bytes=moved,
    reference=lambda: first(output, np.float32),
    tolerance=tolerance,
    contenders=tuple(contender(*form) for form in forms.items()),
    subject="kvjax",
    remarks=remarks,
    steps=None if steps is None else lambda: first(steps, np.int64),
  )


def launches(function: Callable[..., Any], *arguments: Any) -> int:
  """Kernels that a function launches."""

  def count(jaxpr: Any) -> int:
    total = 0
    for equation in jaxpr.eqns:
      inner = [getattr(x, "jaxpr", x) for x in equation.params.values()]
      kernel = equation.primitive.name == "pallas_call"
      total += kernel or sum(count(x) for x in inner if hasattr(x, "eqns"))
    return total

  return count(jax.make_jaxpr(function)(*arguments).jaxpr)


def selection(method: Any, batch: int, tokens: int, quick: bool, name: str) -> Case:
  """The plan of one step of one layer: the same tiles, index by index."""
  spec = spec_of(batch, tokens, quick)
  cache = holding(method, spec, tokens)
  moved = sum(x.nbytes for x in cache.heads.values())
  copies = 2 if quick else min(max(4, (256 << 20) // moved), 8)
  turns = [(select.query(spec, i), select.summaries(cache, i), cache) for i in range(copies)]

  def step(fused: bool, carry: Any, q: Any, held: Any, cache: Any) -> tuple[Any, Any]:
    at, cache = method.at(env(fused), 0), cache.put(heads=held)
    plan, carry = method.plan(at, cache, q, sight.visible(at, cache), carry)
    return carry, {"table": plan.table, "count": plan.count, "scores": plan.scores}

  return beside(
    *(name, f"{copies} rotating", moved, step),
    lambda fused: [carry_of(spec, fused) for _ in turns],
    turns,
    tolerance=1e-5,
    output=lambda plan: jnp.where(jnp.isfinite(x := jnp.sort(plan["scores"])), x, 0.0),
    steps=lambda plan: jnp.sort(plan["table"]),
    calls=2 if quick else 16,
  )


def pages(tokens: int, quick: bool, name: str) -> Case:
  """Quest's pages, more or fewer of them a program: each waits for its count to come back."""
  spec, method = spec_of(1, tokens, quick), kvjax.Quest(dense_layers=0)
  cache = holding(method, spec, tokens)
  moved = sum(x.nbytes for x in cache.heads.values())
  copies = 2 if quick else min(max(4, (256 << 20) // moved), 8)
  where = jnp.zeros((1, 1), jnp.int32), jnp.full((1, 1), tokens, jnp.int32)
  turns = [
    (select.query(spec, i), *select.summaries(cache, i).values(), *where) for i in range(copies)
  ]
  chosen = {"unit": method.page, "sinks": 0, "local": 1, "k": method.tiles.best}

  def step(cut: Any, arrivals: Any, *operands: Any) -> tuple[Any, Any]:
    if cut is None:
      scores = page_bounds(*operands, unit=method.page)
      return arrivals, top_k.best(scores, *where, ordered=False, **chosen)
    found, arrivals = best_pages(*operands, arrivals, tile=cut[0], warps=cut[1], **chosen)
    return arrivals, found

  return beside(
    *(name, f"{copies} rotating", moved, step),
    lambda _: [jnp.zeros((1, spec.kv_heads), jnp.int32) for _ in turns],
    turns,
    forms={"kvjax": None, **(dict([*CUTS.items()][:1]) if quick else CUTS)},
    tolerance=1e-5,
    output=lambda found: jnp.where(jnp.isfinite(found[2]), found[2], 0.0),
    steps=lambda found: found[0],
    calls=2 if quick else 16,
  )


def dense(shape: Shape, name: str) -> Case:
  """Attention over a span, whose splits are joined."""
  copies, calls = decode.rotation(shape) if shape.slots > 4096 else (4, 32)
  turns = [shape.arrays(seed) for seed in range(copies)]

  def step(fused: bool, arrivals: Any, *operands: Any) -> tuple[Any, Any]:
    if fused:
      state, *_, arrivals = decode_joined(*operands, arrivals)
      return arrivals, state.o
    return arrivals, decode_with_output(*operands)[0].o

  return beside(
    *(name, f"{copies} rotating", shape.kv_bytes(), step),
    lambda fused: [jnp.zeros(turns[0][0].shape[:2], jnp.int32) for _ in turns],
    turns,
    tolerance=1e-5,
    output=lambda o: o,
    calls=calls,
  )


def listed(unit: int, budget: int, quick: bool, name: str) -> Case:
  """Attention over a list, whose splits are joined."""
  spec = spec_of(1, 1024 if quick else 128 << 10, quick)
  shape = 1, spec.kv_heads, spec.capacity, spec.head_dim
  k, v = (jax.random.normal(key, shape, spec.dtype) for key in jax.random.split(jax.random.key(0)))
  plans = [sparse.plan(i, k, spec.groups, unit, budget) for i in range(2 if quick else 8)]
  turns = [(q, k, v, *rest) for q, *rest in plans]

  def step(fused: bool, arrivals: Any, *operands: Any) -> tuple[Any, Any]:
    if fused:
      state, _, arrivals = sparse_joined(*operands, arrivals, unit=unit)
      return arrivals, state.o
    return arrivals, sparse_decode(*operands, unit=unit)[0].o

  return beside(
    *(name, f"{len(turns)} plans", 2 * spec.kv_heads * budget * spec.head_dim * 2, step),
    lambda fused: [jnp.zeros((1, spec.kv_heads), jnp.int32) for _ in turns],
    turns,
    tolerance=1e-5,
    output=lambda o: o,
    calls=4 if quick else 16,
  )


def layer(method: Any, batch: int, tokens: int, quick: bool, name: str) -> Case:
  """A whole step of a layer that selects: it enters a token, scores, selects, attends."""
  spec = spec_of(batch, tokens, quick)
  cache = holding(method, spec, tokens - 64)
  moved = sum(x.nbytes for x in cache.heads.values())
  copies = 2 if quick else 4
  live, seeds = jnp.ones(batch, bool), range(copies)
  k, v = (select.query(spec, 100 + i)[:, :, 0] for i in range(2))
  turns = [(select.query(spec, i), k, v, live) for i in seeds]

  def step(fused: bool, state: Any, *operands: Any) -> tuple[Any, Any]:
    held, carry = state
    out, held, carry, _ = method.decode_step(method.at(env(fused), 0), held, *operands, carry)
    return (held, carry), out

  def renewed(before: Any, after: Any) -> Any:
    """As many tokens as before."""
    rows = {n: before[0].rows[n] for n in ("seen", "used")}
    return after[0].put(rows=rows), after[1]

  return beside(
    *(name, f"{copies} rotating", moved, step),
    lambda fused: [
      (cache.put(heads=select.summaries(cache, i)), carry_of(spec, fused)) for i in seeds
    ],
    turns,
    tolerance=1e-5 if quick else 1e-2,
    output=lambda out: out,
    renewed=renewed,
    calls=copies,
  )


def env(fused: bool) -> kvjax.Env:
  return kvjax.Env(1, kvjax.Rope(), impl="pallas", fused=fused)


def spec_of(batch: int, tokens: int, quick: bool) -> kvjax.CacheSpec:
  heads, groups, head_dim = (2, 3, 32) if quick else (8, 4, 128)
  return kvjax.CacheSpec(
    *(batch, tokens, heads, groups, head_dim, 1), jnp.float32 if quick else jnp.bfloat16
  )


def carry_of(spec: kvjax.CacheSpec, fused: bool) -> kvjax.Carry:
  """What a layer before this one hands on."""
  arrivals = {"arrivals": jnp.zeros((spec.batch, spec.kv_heads), jnp.int32)}
  return kvjax.Carry(arrivals if fused else {})
