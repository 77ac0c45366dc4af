"""The protocol: what a KV-cache method is.

A decode step is four moves over an explicit cache:

    insert    the new key and value go into the cache (and, when it is full, something leaves)
    plan      which slots this query will see, in which order
    attend    walk the plan with online softmax
    observe   update whatever statistics the method keeps

and a prompt is three: `stage` the slots that its queries see, attend, `keep` what stays cached.
A method is a frozen dataclass of its hyperparameters that overrides some of these moves.

*Drivers* (`prefill`, `decode_step`) and moves reach moves through `at.top`, the outermost method,
so a wrapper's override is seen by the method it wraps.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import checkify
from jaxtyping import Array, Bool, Float, Int

from kvjax import dispatch, entrance, fields
from kvjax.leaves import Leaf
from kvjax.ops import context, slots
from kvjax.shapes import check_shape
from kvjax.types import (
  At,
  Attended,
  Cache,
  CacheSpec,
  Carry,
  Env,
  Origin,
  Plan,
  Prompt,
  Span,
  View,
  Window,
)

Aux = dict[str, Any]
Driver = TypeVar("Driver", bound=Callable[..., Any])


def _shared(driver: Driver) -> Driver:
  """A driver whose program alike layers share (`Method._twin`): traced and lowered once."""

  @functools.wraps(driver)
  def run(self: Method, at: At, *given: Any, **named: Any) -> Any:
    twin = at.top._twin(at)
    if twin is None:
      return driver(self, at, *given, **named)
    return _once(driver, twin, *given, **named)

  return run  # type: ignore[return-value]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _once(driver: Callable[..., Any], at: At, *given: Any, **named: Any) -> Any:
  return driver(at.top, at, *given, **named)


@dataclasses.dataclass(frozen=True)
class Method:
  """The full cache, move by move; every method is a subclass that overrides some of them.

  An override means the same under every implementation. Where a kernel would pass it by, "auto"
  takes the reference, and a kernel asked for by name raises as soon as a step is traced.

  All public functions and properties are moves, and a class has those of its bases: another one,
  perhaps a misspelt one, is a TypeError where the class is made. Helpers begin with _; a family
  that asks its members for more says so: `class Paged(Method, moves=("page",))`.

  Arguments of a constructor are checked by the types of its fields (TypeError), then by the class.
  """

  def __init_subclass__(cls, moves: Sequence[str] = (), **options: Any) -> None:
    super().__init_subclass__(**options)
    _check_moves(cls, moves)

  def __new__(cls, *args: Any, **values: Any) -> Method:
    fields.check(cls, {**fields.named_arguments(cls, args), **values})
    return super().__new__(cls)

  # ---- what a method declares

  @property
  def positional(self) -> bool:
    """Whether slot = position: tokens are appended and none ever leaves or moves."""
    return True

  @property
  def wants_logits(self) -> bool:
    """Whether `observe` reads the logits of a decode step."""
    return False

  @property
  def ordered(self) -> bool:
    """Whether attention minds in which order a plan lists its tiles; else kernels take any."""
    return self.overrides("attend")

  @property
  def chunkable(self) -> bool:
    """Whether a prompt read in chunks gives what the prompt read at once gives."""
    return self.positional

  @property
  def order_independent(self) -> bool:
    """Whether decoding a token gives what a prompt that includes it gives."""
    return False

  @property
  def dense_prefill(self) -> bool:
    """Whether a prompt is computed as under the full cache, so that one pass can serve many."""
    return not any(self.overrides(move) for move in ("window", "active", "fill", "stage"))

  def pieces(self, length: int) -> list[int] | None:
    """How many tokens at a time a turn of `length` tokens has to be read; None: as one likes.

    For methods that stream: each piece is one call of the model, and what it retrieves depends on
    the pieces before it.
    """
    return None

  @property
  def by_layer(self) -> bool:
    """Whether decode steps are compiled layer by layer: all together would take minutes to compile.

    Prompts always are, where the model can (`kvjax.models.by_layer`).
    """
    return False

  def room(self, cache: Any) -> int | None:
    """How many tokens a row of this cache can take in all; None: any number, something leaves."""
    return cache.size if self.positional else None

  @property
  def projects_all(self) -> bool:
    """Whether tokens that a layer does not compute (`active`) still get its keys and values.

    The decoder then projects those of all tokens of a chunk, and `fill` is handed all of them.
    """
    return False

  @property
  def spreads(self) -> bool:
    """Whether the method runs with the slots of its caches split over devices."""
    return False

  def scans(self, spec: CacheSpec) -> tuple[float, float]:
    """Least and largest share of heads, layers and steps that look at keys to choose some of them.

    For methods whose selections are shared; it only says how many bytes a step moves
    (`kvjax.traffic`).
    """
    return 1.0, 1.0

  def form(self, move: str) -> Any:
    """What a move is here, as its class wrote it: a kernel stands for one form and no other."""
    return next((vars(cls)[move] for cls in type(self).__mro__ if move in vars(cls)), None)

  def overrides(self, move: str) -> bool:
    """Whether this method has its own form of a move."""
    return self.form(move) is not vars(Method)[move]

  def knows(self, move: str, other: str) -> bool:
    """Whether the class whose form of `move` this is knew the form of `other`, or is its class."""

    def said(name: str) -> int:
      return max((i for i, cls in enumerate(self._lineage()) if name in vars(cls)), default=-1)

    return said(move) >= said(other)

  def _lineage(self) -> list[type]:
    """All classes that have a say, each after those whose forms it overrides."""
    return [*reversed(type(self).__mro__)]

  def _twin(self, at: At) -> At | None:
    """The first layer that does just what this one does: they share a program. None: none does."""
    return None

  @classmethod
  def example(cls, budget: int) -> Method:
    """An instance that keeps or reads about `budget` tokens: for demos, laws and benchmarks."""
    raise NotImplementedError(f"{cls.__name__}.example")

  @classmethod
  def usual(cls, budget: int) -> Method:
    """As `example`, with the paper's settings where those would do nothing in a short context."""
    return cls.example(budget)

  @classmethod
  def neutral(cls, length: int) -> Method:
    """The setting under which the method equals Full on sequences of up to `length` tokens."""
    raise NotImplementedError(f"{cls.__name__}.neutral")

  @classmethod
  def repo(cls, budget: int) -> Method:
    """The setting of the authors' repository, where it computes something else than the paper.

    Raises:
      NotImplementedError: no such difference is known; the defaults are the paper's.
    """
    raise NotImplementedError(f"{cls.__name__}.repo: no setting that differs from the paper's")

  # ---- shapes (host, static)

  def capacity(self, spec: CacheSpec, layer: int) -> int:
    """S, the slots of a layer's cache."""
    return spec.capacity

  def leaves(self, spec: CacheSpec, layer: int) -> dict[str, Leaf]:
    """The arrays of a layer's cache by name: what they are, and how they are written."""
    kv = Leaf("slots", (spec.head_dim,), spec.dtype)
    count = Leaf("rows", dtype=jnp.int32)
    return {
      "k": kv,
      "v": kv,
      "pos": Leaf("slots", dtype=jnp.int32, fill=-1),
      "seen": count,
      "used": count,
    }

  def init(self, spec: CacheSpec, layer: int) -> Cache:
    """An empty cache of one layer."""
    leading = spec.batch, spec.kv_heads, self.capacity(spec, layer)
    return Cache.of(self.leaves(spec, layer), leading)

  def init_caches(self, spec: CacheSpec) -> tuple[Any, ...]:
    """Empty caches, one per layer, which know whose they are (`Cache.origin`).

    A layer with a window of the model's own has a cache of that size (`kvjax.windowed`).
    """
    from kvjax import windowed  # what such a layer keeps is a method itself

    origin, made = Origin.of(self, spec), windowed.init_caches(self, spec)
    return tuple(dataclasses.replace(x, origin=origin) if hasattr(x, "origin") else x for x in made)

  # ---- moves: what a query may see

  def window(self, at: At, qpos: Int[Array, "B T"]) -> Window | None:
    """The part of the past that queries may see, in prefill and decode; None = everything."""
    return None

  def span(self, at: At, cache: Cache, window: Window | None) -> Span:
    """The slots that the newest token's window covers, and no others."""
    stop = cache.used[:, None]
    if window is None:
      return Span(jnp.zeros_like(stop), stop)
    if not at.top.positional:
      raise NotImplementedError(
        f"{type(at.top).__name__}: a window over slots that are not in order of position needs "
        "its own span()"
      )
    if window.by_head:
      start = window.first[..., 0]
      return Span(start, jnp.broadcast_to(stop, start.shape), window.sinks)
    return Span(window.first, stop, window.sinks)

  # ---- moves: decode

  def victim(self, at: At, cache: Cache) -> Int[Array, "B K"]:
    """The slot that a full cache gives up for the new token; S (none) drops the new token."""
    return jnp.full(cache.pos.shape[:2], cache.size, jnp.int32)

  def landing(self, at: At, cache: Cache, live: Bool[Array, " B"]) -> Int[Array, "B K"]:
    """The slot of the next token: the first empty one, or the victim's; S (none) in idle rows.

    Occupied slots are a prefix: as long as one is empty it is the first of them.
    """
    room = (cache.used < context.size(at, cache))[:, None]
    slot = context.own(at, cache, cache.used)[:, None]
    victim = at.top.victim(at, cache)
    check_shape(at, "victim", victim, cache.pos.shape[:2])
    slot = jnp.where(room, slot, victim)
    return jnp.where(live[:, None], slot, cache.size)

  def insert(
    self,
    at: At,
    cache: Cache,
    k: Float[Array, "B K H"],
    v: Float[Array, "B K H"],
    live: Bool[Array, " B"],
  ) -> Cache:
    """Writes the new token: into the first empty slot, or over the victim when none is empty."""
    slot = at.top.landing(at, cache, live)[:, :, None]
    pos = jnp.broadcast_to(cache.seen[:, None, None], slot.shape)
    new = {"k": k[:, :, None], "v": v[:, :, None], "pos": pos}
    new |= cache.of_new(new, decoded=True)
    written = {name: slots.put(cache.slots[name], slot, x) for name, x in new.items()}
    step = live.astype(jnp.int32)
    room = cache.used < context.size(at, cache)
    return dataclasses.replace(
      cache,
      slots={**cache.slots, **written},
      rows={**cache.rows, "seen": cache.seen + step, "used": cache.used + step * room},
    )

  def score(self, at: At, cache: Cache, q: Float[Array, "B K G H"]) -> Float[Array, "B K P"] | None:
    """Importance of every tile to this query; None = attend to everything."""
    return None

  def select(self, at: At, cache: Cache, scores: Float[Array, "B K P"], ratio: float = 1.0) -> Plan:
    """The plan of the best tiles; `ratio` widens the budget (speculation asks for more)."""
    raise NotImplementedError(f"{at.top!r} scores tiles but does not select them")

  def everything(self, at: At, cache: Cache) -> Plan:
    """The plan of all visible slots."""
    window = at.top.window(at, (cache.seen - 1)[:, None])
    return Plan(at.top.span(at, cache, window), unit=at.env.tile)

  def plan(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"], carry: Carry
  ) -> tuple[Plan, Carry]:
    """What this query sees, in which order. Never writes the cache (use Plan.memo)."""
    scores = at.top.score(at, cache, q)
    plan = at.top.everything(at, cache) if scores is None else at.top.select(at, cache, scores)
    return plan, carry

  def order(self, at: At, cache: Cache) -> Float[Array, "B K S"] | None:
    """Priority of slots for a walk that may stop early, highest first; None: newest first."""
    return None

  def read(self, at: At, cache: Cache, plan: Plan) -> View:
    """Fetches the slots that a plan names (offloading methods override this)."""
    if plan.table is None:
      slot = jnp.broadcast_to(jnp.arange(cache.size, dtype=jnp.int32), cache.pos.shape)
      return View(cache.slots["k"], cache.slots["v"], cache.pos, slot)
    assert plan.count is not None  # a table comes with its count
    batch, heads, width = plan.table.shape
    within = jnp.arange(plan.unit, dtype=jnp.int32)
    listed = (jnp.arange(width) < plan.count[..., None]) & (plan.table >= 0)
    slot = (plan.table[..., None] * plan.unit + within).reshape(batch, heads, -1)
    ok = jnp.repeat(listed, plan.unit, -1) & (slot < cache.size)
    pos = jnp.where(ok, slots.take(cache.pos, slot), -1)
    k, v = (slots.take(cache.slots[name], slot) for name in ("k", "v"))
    return View(k, v, pos, jnp.where(ok, slot, cache.size))

  def attend(self, at: At, cache: Cache, plan: Plan, q: Float[Array, "B K G H"]) -> Attended:
    """Walks the plan with online softmax."""
    return context.merged(at, dispatch.attend(at, cache, context.part(at, cache, plan), q))

  def observe(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"], plan: Plan, attended: Attended
  ) -> tuple[Cache, Aux]:
    """Updates statistics (never k, v or pos). The second result is for diagnostics only."""
    return cache, {}

  # ---- moves: prompt

  def active(self, at: At, tokens: int, total: Int[Array, " B"]) -> Int[Array, "B A"] | None:
    """Indices of the tokens that this layer computes (`tokens` = padding); None = all.

    The decoder asks before its projections: the others cost nothing and keep their hidden state.
    """
    return None

  def apart(self, at: At) -> int | None:
    """How many of the first computed tokens (`active`) may stand apart; the others are neighbours.

    None: more of them, or not known. It only decides how attention is computed.
    """
    return None if at.top.overrides("active") else 0

  def fill(
    self,
    at: At,
    k: Float[Array, "B K C H"],
    v: Float[Array, "B K C H"],
    prompt: Prompt,
    carry: Carry,
  ) -> tuple[Float[Array, "B K T H"], Float[Array, "B K T H"], Carry]:
    """Keys and values (not rotated) of all tokens of the chunk, from those of the computed ones.

    C = A, or all T where the method `projects_all`.
    """
    return k, v, carry

  def stage(
    self,
    at: At,
    cache: Cache,
    new: slots.Slots,
    q: Float[Array, "B K G A H"],
    prompt: Prompt,
    carry: Carry,
  ) -> tuple[slots.Slots, Cache, Carry]:
    """The slots that the chunk's queries see: what is cached, and the chunk itself after it."""
    if prompt.past == 0:
      return new, cache, carry
    if at.env.slot_axis:  # each device attends to what it will hold
      local = cache.seen - context.first(at, cache.size)
      return slots.append(cache.slots, new, local, None), cache, carry
    if not at.top.positional:
      return slots.join(cache.slots, new), cache, carry
    staged = slots.append(cache.slots, new, cache.seen, prompt.past)
    if prompt.past is not None:
      staged = {name: x[:, :, : prompt.past + prompt.tokens] for name, x in staged.items()}
    return staged, cache, carry

  def rank(
    self,
    at: At,
    staged: slots.Slots,
    q: Float[Array, "B K G A H"],
    qpos: Int[Array, "B A"],
    attended: Attended,
    prompt: Prompt,
  ) -> tuple[Float[Array, "B K S"], slots.Slots]:
    """Which of [cached ‖ new] stay, best first, and their statistics (methods that evict)."""
    raise NotImplementedError(f"{at.top!r} evicts tokens but does not rank a prompt's")

  def keep(
    self,
    at: At,
    cache: Cache,
    new: slots.Slots,
    q: Float[Array, "B K G A H"],
    qpos: Int[Array, "B A"],
    attended: Attended,
    prompt: Prompt,
  ) -> Cache:
    """The cache after the chunk: appended to (positional methods), or the best S of old and new."""
    if at.top.positional:
      past = None if at.env.slot_axis else prompt.past
      kept = slots.append(cache.slots, new, cache.seen - context.first(at, cache.size), past)
    else:
      staged = new if prompt.past == 0 else slots.join(cache.slots, new)
      priority, staged = at.top.rank(at, staged, q, qpos, attended, prompt)
      check_shape(at, "rank", priority, staged["pos"].shape)
      kept = slots.keep_best(staged, priority, cache.size)
    used = jnp.minimum(cache.used + prompt.valid, context.size(at, cache))
    rows = {**cache.rows, "seen": cache.seen + prompt.valid, "used": used}
    return at.top.settle(at, dataclasses.replace(cache, slots=kept, rows=rows), prompt)

  def settle(self, at: At, cache: Cache, prompt: Prompt) -> Cache:
    """Rebuilds summaries (of tiles, say) after a chunk."""
    return cache

  def conclude(self, env: Env, caches: tuple[Any, ...], valid: Int[Array, " B"]) -> tuple[Any, ...]:
    """What can only be settled once a chunk has passed through all layers.

    The decoder calls it on the outermost method after the last layer; `valid` as in `Prompt`: rows
    without tokens stay as they are.
    """
    return caches

  # ---- drivers

  @_shared
  def decode_step(
    self,
    at: At,
    cache: Cache,
    q: Float[Array, "B K G H"],
    k: Float[Array, "B K H"],
    v: Float[Array, "B K H"],
    live: Bool[Array, " B"],
    carry: Carry,
  ) -> tuple[Float[Array, "B K G H"], Cache, Carry, Aux]:
    """One token per row: insert, plan, attend, observe.

    A row whose attention comes out as NaN or infinity says so in its output; its statistics stay
    as they were. With `env.check_nan` its whole cache does, and an error is raised.

    Args:
      at: layer, environment and the outermost method, whose moves these are.
      cache: this layer's cache; donate it.
      q, k, v: projections of the new token, not rotated.
      live: rows that take part; the others' caches stay as they are, their output means nothing.
      carry: cross-layer carry.

    Returns:
      Attention output in q's dtype, the cache, the carry, diagnostics.
    """
    entrance.check_step(at, cache, q, k, v, live)
    old = cache
    q, cache = dispatch.enter_token(at, cache, q, k, v, live)
    plan, carry = at.top.plan(at, cache, q, carry)
    attended = at.top.attend(at, cache, plan, q)
    # Statistics are made of logits; so is the denominator, the smallest thing to look at.
    clean = at.top.overrides("observe")
    counted = live & finite_rows(at, attended.state.l) if clean else live
    attended = dataclasses.replace(attended, counted=counted, live=live)
    cache, aux = at.top.observe(at, cache, q, plan, attended)
    if at.env.check_nan:
      rows = entrance.with_room(at, old, live, live)
      cache = slots.choose_rows(checked_rows(at, attended, old, rows), cache, old)
    else:
      cache = _idle_rows(at, attended, cache, old)
    out = attended.state.o.astype(q.dtype) if attended.out is None else attended.out
    return out, cache, carry, {"visited": attended.visited, **aux, **lse_of(at, attended)}

  @_shared
  def prefill(
    self,
    at: At,
    cache: Cache,
    q: Float[Array, "B K G A H"],
    k: Float[Array, "B K C H"],
    v: Float[Array, "B K C H"],
    prompt: Prompt,
    carry: Carry,
  ) -> tuple[Float[Array, "B K G A H"], Cache, Carry, Aux]:
    """A prompt, a chunk of one, or a later turn; arguments and results as in `decode_step`.

    q is that of the A computed tokens; k and v are too, or of all T if the method `projects_all`.
    """
    entrance.check_prompt(at, cache, q, k, v, prompt)
    q, qpos, new, carry = at.top.enter(at, cache, q, k, v, prompt, carry)
    staged, staged_cache, carry = at.top.stage(at, cache, new, q, prompt, carry)
    attended = at.top.attend_prompt(at, staged, q, qpos, prompt)
    kept = at.top.keep(at, staged_cache, new, q, qpos, attended, prompt)
    rows = prompt.valid > 0
    if at.env.check_nan:
      rows = entrance.with_room(at, cache, rows, prompt.valid)
      rows = checked_rows(at, attended, cache, rows)
    kept = slots.choose_rows(rows, kept, cache)
    out = attended.state.o.astype(q.dtype) if attended.out is None else attended.out
    return out, kept, carry, lse_of(at, attended)

  def enter(
    self, at: At, cache: Cache, q: Array, k: Array, v: Array, prompt: Prompt, carry: Carry
  ) -> tuple[Array, Int[Array, "B A"], slots.Slots, Carry]:
    """Rotates a chunk: queries, their positions (−1 = padding), and the new slots."""
    index, rope = prompt.query_index(), at.env.rope
    qpos = cache.seen[:, None] + index
    q = rope.rotate(q, qpos[:, None, None])
    k, v, carry = at.top.fill(at, k, v, prompt, carry)
    every = jnp.arange(prompt.tokens, dtype=jnp.int32)
    kpos = cache.seen[:, None] + every
    k = rope.rotate(k, kpos[:, None])
    pos = jnp.where(every < prompt.valid[:, None], kpos, -1)
    new = {"k": k, "v": v, "pos": jnp.broadcast_to(pos[:, None], k.shape[:3])}
    new |= cache.of_new(new)
    return q, jnp.where(index < prompt.valid[:, None], qpos, -1), new, carry

  def attend_prompt(
    self, at: At, staged: slots.Slots, q: Array, qpos: Int[Array, "B A"], prompt: Prompt
  ) -> Attended:
    """Causal attention of the chunk's queries over the staged slots."""
    if prompt.past == 0:  # what they see is the chunk itself, which all devices have
      attend = functools.partial(dispatch.attend_prompt, qpos=qpos, prompt=prompt)
      return context.shared(at, attend, staged, q)
    return context.reduced(at, dispatch.attend_prompt(at, staged, q, qpos, prompt))

  def at(self, env: Env, layer: Any) -> At:
    """Where this method's drivers run in a layer, which it has to know if it minds its depth."""
    return At(layer, env, self)


def _check_moves(cls: type, moves: Sequence[str]) -> None:
  """Raises TypeError for public names that are no fields, and no moves of the class's bases."""
  known = {name for base in cls.__bases__ for name in dir(base) if not name.startswith("_")}
  for name, value in vars(cls).items():
    public = not name.startswith("_") and name not in (*known, *moves)
    # Fields are values, and class methods are constructors.
    if public and name not in inspect.get_annotations(cls) and not isinstance(value, classmethod):
      close = difflib.get_close_matches(name, known, 1)
      raise TypeError(
        f"{cls.__name__}.{name}: found a public name that is no move"
        f"{f' (is {close[0]} meant?)' if close else ''}, expected a move of "
        f"{', '.join(base.__name__ for base in cls.__bases__)}, or a name beginning with _"
      )
  if missing := [name for name in moves if name not in vars(cls)]:
    raise TypeError(f"{cls.__name__}: found no {', '.join(missing)}, which its moves name")


def checked_rows(
  at: At, attended: Attended, cache: Cache, rows: Bool[Array, " B"]
) -> Bool[Array, " B"]:
  """Those of `rows` whose attention is finite; the others raise (checkify)."""
  bad = rows & ~finite_rows(at, attended.state.o)
  checkify.check(
    ~bad.any(),
    f"{type(at.top).__name__}, layer {at.layer}: found NaN or infinity in the attention of row "
    "{row}, which has cached {seen} tokens, expected finite numbers; its cache stays as it was",
    row=jnp.argmax(bad),
    seen=cache.seen[jnp.argmax(bad)],
  )
  return rows & ~bad


def lse_of(at: At, attended: Attended) -> Aux:
  """The report of `Env.lse`; empty where it is off."""
  return {"lse": attended.state.lse} if at.env.lse else {}


def finite_rows(at: At, x: Array) -> Bool[Array, " B"]:
  """Rows of x that are finite on every head, those of other shards included."""
  bad = ~jnp.isfinite(x).all(tuple(range(1, x.ndim)))
  return at.sum_heads(bad.astype(jnp.int32)) == 0


def _idle_rows(at: At, attended: Attended, new: Cache, old: Cache) -> Cache:
  """Statistics of rows that do not count as they were; entering left the rest of them alone."""
  entered = {"k", "v", "pos", "norm", "seen", "used"}

  def statistics(cache: Cache) -> dict[tuple[str, str], Any]:
    shelves = {shelf: getattr(cache, shelf) for shelf in ("slots", "heads", "rows")}
    every = ((s, n, x) for s, held in shelves.items() for n, x in held.items())
    return {(s, n): x for s, n, x in every if n not in entered and not cache.leaf(n).in_place}

  kept = dispatch.keep_rows(at, attended, statistics(new), statistics(old))
  for (shelf, name), x in kept.items():
    new = new.put(**{shelf: {name: x}})
  return new
