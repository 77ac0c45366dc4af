"""The protocol: what a KV-cache method is.

A decode step is four moves over an explicit cache:

    insert    the new key and value go into the cache (and, when it is full, something leaves)
    plan      which slots this query will see, in which order
    attend    walk the plan with online softmax (`plan_and_attend` is both)
    observe   update the statistics that the method keeps

and a prompt is three: `stage` the slots that its queries see, attend, `keep` what stays cached.
A method is a frozen dataclass of its hyperparameters that overrides some of these moves.

*Drivers* (`prefill`, `decode_step`) and moves reach moves through `at.top`, the outermost method,
so a wrapper's override is seen by the method it wraps.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from jax.experimental import checkify
from jaxtyping import Array, Bool, Float, Int

from kvjax.core import fields, slots
from kvjax.core.cache import Cache, CacheSpec, Origin
from kvjax.core.context import Active, At, Carry, Env, Prompt, Turn
from kvjax.core.leaves import Leaf
from kvjax.core.plan import Attended, Plan, Span, Window
from kvjax.core.traits import Traits
from kvjax.families import entrance, forms, sight
from kvjax.families.shapes import parts, ranked
from kvjax.ops import attention, decode, insertion, shared_slots, slot_shards
from kvjax.ops import prefill as prefill_ops
from kvjax.primitives.once import once, without_kept

Aux = dict[str, Any]
ONCE = ("traits", "tiles")  # properties that are evaluated once for each method


@dataclasses.dataclass(frozen=True)
class Method:
  """The full cache, move by move; every method is a subclass that overrides some of them.

  An override has the same effect under every implementation. If a kernel would ignore it, "auto"
  uses the reference, and a kernel requested by name raises an error when a step is traced.

  All public functions and properties are moves, and a class has those of its bases: another one,
  perhaps a misspelt one, is a TypeError where the class is made. Helpers begin with _; a family
  that asks its members for more says so: `class Paged(Method, moves=("page",))`.

  Arguments of a constructor are checked by the types of its fields (TypeError), then by the class.
  """

  def __init_subclass__(cls, moves: Sequence[str] = (), **options: Any) -> None:
    super().__init_subclass__(**options)
    forms.check_moves(cls, moves)
    once(cls, *ONCE)
    forms.void(cls)

  def __new__(cls, *args: Any, **values: Any) -> Method:
    fields.check(cls, {**fields.named_arguments(cls, args), **values})
    return super().__new__(cls)

  def __getstate__(self) -> dict[str, Any]:
    return without_kept(self)

  # ---- what a method declares

  # Which operation `insert` and `attend` are, and which slot `victim` gives up. What a kernel knows
  # of a method is these: an override of the move voids them, if its class says nothing new.
  entry: ClassVar[str | forms.Void] = "enter_token"
  placement: ClassVar[insertion.Placement | forms.Void] = insertion.Placement.APPEND
  attention: ClassVar[str | forms.Void] = "attend_span"
  _covers: ClassVar[bool | forms.Void] = True  # `span`, of the window and of what leaves
  # Arrays of slots and heads that `keep` leaves alone in rows without new tokens, or so that their
  # results are the same: nobody chooses between rows.
  _spares: ClassVar[tuple[str, ...] | forms.Void] = ()

  @property
  def traits(self) -> Traits:
    """Static facts; a subclass gives those that differ: `super().traits.but(positional=False)`.

    Each instance is asked once, and so it is for `tiles`.
    """
    return Traits(ordered=forms.overrides(self, "attend"))

  def _entering(self, at: At, cache: Cache) -> Any:
    """Summaries that the entry of a token brings up to date (`ops.summaries`); None: none."""
    return None

  def _form(self, move: str) -> Any:
    """The form of a move, as its class wrote it (`kvjax.families.forms`)."""
    return next((vars(cls)[move] for cls in type(self).__mro__ if move in vars(cls)), None)

  # Of a model with sliding windows, too: what such a layer keeps is a method itself (`sliding`).
  _caches_of_layers: ClassVar[Callable[..., list[Any]]]

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

  def init_caches(self, spec: CacheSpec) -> tuple[Any, ...]:
    """Empty caches, one per layer, which know whose they are (`Cache.origin`).

    A layer with a window of the model's own has a cache of that size (`kvjax.families.sliding`).
    """
    origin, made = Origin.of(self, spec), self._caches_of_layers(self, spec)
    return tuple(dataclasses.replace(cache, origin=origin) for cache in made)

  # ---- moves: what a query may see

  def window(self, at: At, qpos: Int[Array, "B T"]) -> Window | None:
    """The part of the past that queries may see, in prefill and decode; None = everything."""
    return None

  def span(self, at: At, cache: Cache, window: Window | None) -> Span:
    """The slots that the newest token's window covers, and no others."""
    stop = cache.used[:, None]
    if window is None:
      return Span(jnp.zeros_like(stop), stop)
    if not at.top.traits.positional:
      raise NotImplementedError(
        f"{at.name}: a window over slots that are not in order of position needs its own span()"
      )
    if window.by_head:
      start = window.first[..., 0]
      return Span(start, jnp.broadcast_to(stop, start.shape), window.sinks)
    return Span(window.first, stop, window.sinks)

  # ---- moves: decode

  def victim(self, at: At, cache: Cache) -> Int[Array, "B K"]:
    """The slot that a full cache gives up for the new token; S (none) drops the new token."""
    return jnp.full(cache.pos.shape[:2], cache.size, jnp.int32)

  def insert(
    self,
    at: At,
    cache: Cache,
    k: Float[Array, "B K H"],
    v: Float[Array, "B K H"],
    live: Bool[Array, " B"],
  ) -> Cache:
    """Writes the new token: into the first empty slot, or over the victim when none is empty."""
    slot, heads = entrance.landing(at, cache, live), shared_slots.sharers(cache)
    pos = jnp.broadcast_to(cache.seen[:, None, None], (*slot.shape, 1))
    new = {"k": k[:, :, None], "v": v[:, :, None], "pos": pos}
    new |= cache.of_new(new, decoded=True)
    written = {n: shared_slots.put(cache.slots[n], slot, x, heads) for n, x in new.items()}
    step = live.astype(jnp.int32)
    room = cache.used < slot_shards.size(at, cache)
    return dataclasses.replace(
      cache,
      slots={**cache.slots, **written},
      rows={**cache.rows, "seen": cache.seen + step, "used": cache.used + step * room},
    )

  def plan(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"], visible: Plan, carry: Carry
  ) -> tuple[Plan, Carry]:
    """Chooses the slots to attend to, and their order, among those that this query may see.

    It narrows `visible`, which names all of them (`Plan.listed`), and never writes the cache.
    """
    return visible, carry

  def order(self, at: At, cache: Cache) -> Float[Array, "B K S"] | None:
    """Priority of slots for a walk that may stop early, highest first; None: newest first."""
    return None

  def attend(self, at: At, cache: Cache, plan: Plan, q: Float[Array, "B K G H"]) -> Attended:
    """Walks the plan with online softmax."""
    return slot_shards.merged(at, decode.attend(at, cache, slot_shards.part(at, cache, plan), q))

  def plan_and_attend(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"], visible: Plan, carry: Carry
  ) -> tuple[Plan, Attended, Carry]:
    """`plan`, then `attend`; one that does both at once, or notes for `observe` what it finds.

    An override asks `at.top` for each of the two that is not as its class knows it.
    """
    made = at.top.plan(at, cache, q, visible, carry)
    plan, carry = parts(at, "plan", made, plan=Plan, carry=Carry)
    plan = sight.narrowed(at, visible, plan)
    (attended,) = parts(at, "attend", (at.top.attend(at, cache, plan, q),), attended=Attended)
    return plan, attended, carry

  def observe(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"], plan: Plan, attended: Attended
  ) -> tuple[Cache, Aux]:
    """Updates statistics (never k, v or pos). The second result is for diagnostics only."""
    return cache, {}

  # ---- moves: prompt

  def active(self, at: At, tokens: int, total: Int[Array, " B"]) -> Active | None:
    """The tokens that this layer computes of a chunk of `tokens`; None = all.

    The decoder asks before its projections: the others cost nothing and keep their hidden state.
    First tokens and one piece are sliced (`Active.ends`), any others gathered.
    """
    return None

  def fill(
    self,
    at: At,
    k: Float[Array, "B K C H"],
    v: Float[Array, "B K C H"],
    prompt: Prompt,
    carry: Carry,
  ) -> tuple[Float[Array, "B K T H"], Float[Array, "B K T H"], Carry]:
    """Keys and values (not rotated) of all tokens of the chunk, from those of the computed ones.

    C = A, or all T where the method `projects_all` (`traits`).
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
      local = cache.seen - slot_shards.first(at, cache.size)
      return slots.append(cache.slots, new, local, None), cache, carry
    if not at.top.traits.positional:
      return slots.join(shared_slots.by_head(cache), new), cache, carry
    staged = slots.append(cache.slots, new, cache.seen, prompt.past)
    if prompt.past is not None:
      staged = {name: x[:, :, : prompt.past + prompt.tokens] for name, x in staged.items()}
    return staged, cache, carry

  def rank(self, at: At, turn: Turn) -> tuple[Float[Array, "B K S"], slots.Slots]:
    """Ranks `turn.staged`, best first; with their statistics (methods that evict)."""
    raise NotImplementedError(f"{at.top!r} evicts tokens but does not rank a prompt's")

  def keep(self, at: At, cache: Cache, turn: Turn, new: slots.Slots) -> Cache:
    """The cache after the chunk: appended to (positional methods), or the best S of old and new."""
    prompt = turn.prompt
    if at.top.traits.positional:
      past = None if at.env.slot_axis else prompt.past
      kept = slots.append(cache.slots, new, cache.seen - slot_shards.first(at, cache.size), past)
    else:
      staged = new if prompt.past == 0 else slots.join(cache.slots, new)
      priority, staged = ranked(at, dataclasses.replace(turn, staged=staged))
      kept = slots.keep_best(staged, priority, cache.size)
    used = jnp.minimum(cache.used + prompt.valid, slot_shards.size(at, cache))
    rows = {**cache.rows, "seen": cache.seen + prompt.valid, "used": used}
    return at.top.settle(at, dataclasses.replace(cache, slots=kept, rows=rows), prompt)

  def settle(self, at: At, cache: Cache, prompt: Prompt) -> Cache:
    """Rebuilds summaries (of tiles, say) after a chunk."""
    return cache

  def conclude(self, env: Env, caches: tuple[Any, ...], valid: Int[Array, " B"]) -> tuple[Any, ...]:
    """Settles what needs a chunk to have passed through all layers.

    The decoder calls it on the outermost method after the last layer; `valid` as in `Prompt`: rows
    without tokens stay as they are.
    """
    return caches

  def _conclude_step(
    self, env: Env, caches: tuple[Any, ...], sound: Bool[Array, " B"]
  ) -> tuple[Any, ...]:
    """Settles what a step leaves until it has passed through all layers (`Env.defers`).

    Asked as `conclude` is; `sound`: rows that took part, and whose logits are finite.
    """
    return caches

  # ---- drivers

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
    q, cache = entrance.enter_token(at, cache, q, k, v, live)
    visible = dataclasses.replace(sight.visible(at, cache), live=live)
    plan, attended, carry = at.top.plan_and_attend(at, cache, q, visible, carry)
    if plan.table is not None and at.top.traits.wants_logits:
      attended = attention.at_slots(attended, cache.size)
    # Statistics are made of logits; so is the denominator, the smallest thing to look at.
    clean = forms.overrides(at.top, "observe")
    counted = live & insertion.finite_rows(at, attended.state.l) if clean else live
    attended = dataclasses.replace(attended, counted=counted, live=live)
    made = at.top.observe(at, cache, q, plan, attended)
    cache, aux = parts(at, "observe", made, cache=Cache, aux=dict)
    if at.env.check_nan:
      rows = entrance.with_room(at, old, live, live)
      cache = slots.choose_rows(checked_rows(at, attended.state.o, old, rows), cache, old)
    else:
      cache = _idle_rows(at, attended, cache, old)
    out = attended.state.o.astype(q.dtype) if attended.out is None else attended.out
    return out, cache, carry, {"visited": attended.visited, **aux, **lse_of(at, attended)}

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
    q, qpos, new, carry = entrance.enter(at, cache, q, k, v, prompt, carry)
    made = at.top.stage(at, cache, new, q, prompt, carry)
    staged, staged_cache, carry = parts(at, "stage", made, staged=dict, cache=Cache, carry=Carry)
    attended = at.top.attend_prompt(at, staged, q, qpos, prompt)
    kept = at.top.keep(at, staged_cache, Turn(staged, q, qpos, attended, prompt), new)
    rows = prompt.valid > 0
    if at.env.check_nan:
      rows = entrance.with_room(at, cache, rows, prompt.valid)
      rows = checked_rows(at, attended.state.o, cache, rows)
    chosen = slots.choose_rows(rows, kept, cache)
    spared = at.top._spares
    if not at.env.check_nan and not isinstance(spared, forms.Void):
      slot, head = (
        {n: x for n, x in shelf.items() if n in spared} for shelf in (kept.slots, kept.heads)
      )
      chosen = chosen.put(slots=slot, heads=head)
    out = attended.state.o.astype(q.dtype) if attended.out is None else attended.out
    return out, chosen, carry, lse_of(at, attended)

  def attend_prompt(
    self, at: At, staged: slots.Slots, q: Array, qpos: Int[Array, "B A"], prompt: Prompt
  ) -> Attended:
    """Causal attention of the chunk's queries, q [B, K, G, A, H], over the staged slots."""
    attend = functools.partial(
      prefill_ops.attend_prompt, qpos=qpos, chunk=sight.of(at, qpos, prompt)
    )
    if prompt.past == 0:  # what they see is the chunk itself, which all devices have
      return slot_shards.shared(at, attend, staged, q)
    return slot_shards.reduced(at, attend(at, staged, q))

  def at(self, env: Env, layer: Any) -> At:
    """Site of this method's drivers in a layer; methods that mind their depth need to know it."""
    return At(layer, env, self)


once(Method, *ONCE)


def checked_rows(at: At, o: Array, cache: Cache, rows: Bool[Array, " B"]) -> Bool[Array, " B"]:
  """Those of `rows` whose attention o [B, ...] is finite; the others raise (checkify)."""
  bad = rows & ~insertion.finite_rows(at, o)
  checkify.check(
    ~bad.any(),
    f"{at.name}, layer {at.layer}: found NaN or infinity in the attention of row "
    "{row}, which has cached {seen} tokens, expected finite numbers; its cache stays as it was",
    row=jnp.argmax(bad),
    seen=cache.seen[jnp.argmax(bad)],
  )
  return rows & ~bad


def lse_of(at: At, attended: Attended) -> Aux:
  """The report of `Env.lse`; empty where it is off."""
  return {"lse": attended.state.lse} if at.env.lse else {}


def _idle_rows(at: At, attended: Attended, new: Cache, old: Cache) -> Cache:
  """Statistics of rows that do not count as they were; entering left the rest of them alone."""
  entered = {"k", "v", "pos", "norm", "seen", "used"}

  def statistics(cache: Cache) -> dict[tuple[str, str], Any]:
    shelves = {"slots": cache.slots, "heads": cache.heads, "rows": cache.rows}
    every = [(s, n, x) for s, held in shelves.items() for n, x in held.items() if n not in entered]
    return {(s, n): x for s, n, x in every if not cache.leaf(n).in_place}

  kept = insertion.keep_rows(at, attended, statistics(new), statistics(old))
  for (shelf, name), x in kept.items():
    new = new.put(**{shelf: {name: x}})
  return new
