"""CIS: queries that resemble an earlier one share what it retrieved (PrHS, §IV-A)."""

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import dispatch
from kvjax.fields import expect, least, number, one_of
from kvjax.leaves import Leaf
from kvjax.method import Aux, Method
from kvjax.ops import attention, context
from kvjax.types import At, Attended, Cache, CacheSpec, Carry, Plan, Prompt, Window, pytree

# Tokens in all -> first tokens, newest tokens, retrieved ones, retrieved ones of CIS* (§V-B, §V-C).
BUDGETS = {128: (8, 32, 88, 72), 512: (16, 64, 432, 388)}
NOWHERE = jnp.iinfo(jnp.int32).max  # behind all positions


@dataclasses.dataclass(frozen=True)
class CIS(Method):
  """Attends to the first tokens, the newest ones, and the heaviest of the middle, often shared.

  With n tokens cached the middle is [C_sink, n − C_local). Decoded tokens are counted in blocks of
  s from the first one on. A head's first query of a block retrieves: the k tokens of the middle
  with the largest attention weight, exactly. A later one looks for earlier queries of its block
  whose cosine with it exceeds τ (Eq. 12; both rotated); if there is one, it shares what the most
  recent of them used, otherwise it retrieves.

  What is shared is always a retrieval as it was made, dilated once (Eq. 13): its m heaviest tokens
  gain their neighbours up to r away, as far as those lie in the middle of now. Prompts are read
  densely.

  The paper's models have no query groups. Here, with per="kv_head", the weights of a KV head are
  averaged over its query heads, and it shares only if the cosines of all of them with the same
  earlier query exceed τ. With per="query_head" every query head retrieves and shares on its own,
  as in the paper; but a KV head reads one list of slots for all its query heads, so each of them
  attends to the union of what they chose, and the list is up to G times as long. With G = 1 the
  two are one.

  Attributes:
    k: tokens retrieved from the middle.
    sinks: C_sink, first tokens that are always attended to.
    local: C_local, newest tokens that are always attended to, the query's own among them.
    block: s, decoded tokens within which queries share; 1 never shares.
    tau: τ, the cosine that must be exceeded; 1 or more never shares.
    radius: r, distance up to which neighbours are added.
    m: heaviest tokens of a shared retrieval that gain neighbours; None: ⌊k/3⌋.
    per: "kv_head" or "query_head".
  """

  k: int = least(1, 432)
  sinks: int = least(0, 16)
  local: int = least(1, 64)
  block: int = least(1, 16)
  tau: float = number(0.8)
  radius: int = least(0, 1)
  m: int | None = None
  per: str = one_of(("kv_head", "query_head"), "kv_head")

  def __post_init__(self):
    expect(self, "m", self.m is None or 0 <= self.m <= self.k, f"0 to k = {self.k}")

  @classmethod
  def preset(cls, budget: int, matched: bool = False, **changes: Any) -> "CIS":
    """The paper's split of 128 or 512 tokens; matched=True is CIS*, whose average is the budget.

    Retrieving steps attend to `budget` tokens and sharing ones to a few more; CIS* retrieves less,
    so that both together come to `budget`.
    """
    return cls(**{**split(budget, matched), **changes})

  @classmethod
  def example(cls, budget: int) -> "CIS":
    if budget in BUDGETS:
      return cls.preset(budget)
    sinks, local = max(1, budget // 32), max(1, budget // 8)
    return cls(k=max(1, budget - sinks - local), sinks=sinks, local=local)

  @classmethod
  def neutral(cls, length: int) -> "CIS":
    return cls(k=1, sinks=0, local=length)

  @property
  def spreads(self) -> bool:
    return True

  @property
  def _dilated(self) -> int:
    """m, how many tokens of a shared retrieval gain neighbours."""
    return self.k // 3 if self.m is None else self.m

  @property
  def _widest(self) -> int:
    """Tokens of a dilated retrieval, at most."""
    return self.k + 2 * self.radius * self._dilated

  def scans(self, spec: CacheSpec) -> tuple[float, float]:
    """Once a block where all queries share, in every step where none does."""
    return (1 / self.block if self.tau < 1 else 1.0), (1 / self.block if self.tau <= -1 else 1.0)

  def leaves(self, spec: CacheSpec, layer: int) -> dict[str, Leaf]:
    """What the queries of the current block were, whose retrieval each used, and the retrievals.

    U = 1 decision per KV head, or one per query head. Retrievals are dilated, as they are shared;
    steps that shared have none of their own, and hold anything.
    """
    units = 1 if self.per == "kv_head" else spec.groups
    of = functools.partial(Leaf, in_place=True)
    wide = self.block, units, self._widest
    return {
      **super().leaves(spec, layer),
      "queries": of("heads", (self.block, spec.groups, spec.head_dim)),  # of norm 1
      "anchor": of("heads", (self.block, units), jnp.int32),  # step of the block
      "retrieved": of("heads", wide, jnp.int32, -1),  # −1 = none, behind
      "step": of("rows", (), jnp.int32),  # step within the block
    }

  def settle(self, at: At, cache: Cache, prompt: Prompt) -> Cache:
    """After a prompt the next token begins a block."""
    return cache.put(rows={"step": jnp.zeros_like(cache.rows["step"])})

  def plan(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"], carry: Carry
  ) -> tuple[Plan, Carry]:
    """First tokens, then the newest backwards, then the chosen ones by position, neighbours last.

    The memo holds what `observe` notes, and `retrieve`, bool [B, K]: the KV heads that have to
    look at all keys.
    """
    window = at.top.window(at, (cache.seen - 1)[:, None])
    choice, window, logits = self._choose(at, cache, q, window)
    found, weight, *listed = self._retrieve(at, cache, q, window, choice, logits)
    table, count = listed or self._listed(at, cache, window, found, choice)
    memo = {"retrieve": (choice.retrieves > 0).any(-1), "choice": choice}
    memo |= {"found": found, "weight": weight}
    span = at.top.span(at, cache, window)
    return Plan(span, table, count, memo=memo, unit=1, pinned=self.sinks), carry

  def _choose(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"], window: Window | None
  ) -> tuple["Choice", Window | None, Float[Array, "B K G S"] | None]:
    """Which earlier query of the block each unit shares with, if any; and the window.

    The kernel works out the window too, instead of a launch of its own, and where it can the logits
    of the heads that retrieve.
    """
    if dispatch.choose("cis_anchors", at.env.impl) == "pallas":
      return self._choose_by_kernel(at, cache, q, window)
    query, step = _unit(q), cache.rows["step"][:, None, None]
    cosine = (query[:, :, None] * cache.heads["queries"]).sum(-1)  # Eq. 12, [B, K, s, G]
    alike = jnp.minimum(cosine, 1.0) > self.tau  # rounding must not let 1 exceed τ = 1
    if self.per == "kv_head":
      alike = alike.all(-1, keepdims=True)
    earlier = jnp.arange(self.block, dtype=jnp.int32)[:, None]
    latest = jnp.where(alike & (earlier < step[..., None]), earlier, -1).max(2)  # j
    anchor = _of_step(cache.heads["anchor"], latest)
    anchor = jnp.where(latest >= 0, anchor, step)
    steps = jnp.broadcast_to(step[..., 0], q.shape[:2])
    return Choice(query, anchor, (latest < 0).astype(jnp.int32), steps), window, None

  def _choose_by_kernel(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"], window: Window | None
  ) -> tuple["Choice", Window | None, Float[Array, "B K G S"] | None]:
    """`_choose`."""
    block = cache.heads["queries"], cache.heads["anchor"], cache.rows["step"], cache.seen
    run, first = dispatch.kernel("cis_anchors", "pallas"), None
    narrows = window is not None and window.view is None
    if narrows:

      def first(seen: Array) -> Array:
        window = at.top.window(at, jnp.reshape(seen - 1, (1, 1)))
        assert window is not None
        return window.first.reshape(())

    how: dict[str, Any] = {"tau": self.tau, "first": first}
    plain = window is None or narrows
    looks = (
      plain
      and self._units_are_queries(q)
      and self._by_kernels(at, "key_logits", window, q, cache.slots["k"])
    )
    if looks:
      sinks = 0 if window is None else window.sinks
      how |= {"keys": (cache.slots["k"], cache.used), "span_sinks": sinks}
    query, anchor, retrieves, step, *more = run(q, *block, **how)
    if narrows:
      assert window is not None
      window = dataclasses.replace(window, first=more[0][:, None])
    return Choice(query, anchor, retrieves, step), window, more[-1] if looks else None

  def _units_are_queries(self, q: Float[Array, "B K G H"]) -> bool:
    """Whether every query head decides for itself: its logits have the order of its weights."""
    return self.per == "query_head" or q.shape[2] == 1

  def _by_kernels(
    self, at: At, operation: str, window: Window | None, *attention: Float[Array, "..."]
  ) -> bool:
    """Whether kernels retrieve: they have one query for all keys, and spans end at the newest.

    `attention`: q and k, if any.
    """
    one = window is None or window.view is None
    one &= not at.top.overrides("span")
    return one and dispatch.choose_for(at, operation, *attention) == "pallas"

  def _retrieve(
    self,
    at: At,
    cache: Cache,
    q: Float[Array, "B K G H"],
    window: Window | None,
    choice: "Choice",
    logits: Float[Array, "B K G S"] | None = None,
  ) -> tuple[Array, ...]:
    """The k heaviest tokens of the middle (ties: the lowest) by position, −1 behind them.

    And their weights, on any scale that keeps their order: int32 and float32 [B, K, U, f]. What it
    gives for units that share is not used: the kernels skip it. They may give what `_listed` does,
    too.
    """
    if self._by_kernels(at, "key_weights", window, q, cache.slots["k"]):
      return self._retrieve_by_kernels(at, cache, q, window, choice, logits)
    now = (cache.seen - 1)[:, None]
    logits = attention.windowed_logits(
      at, q[:, :, :, None], now, cache.slots["k"], cache.pos, window
    )
    span = context.span(at, cache, at.top.span(at, cache, window))
    visible = (cache.pos >= 0) & span.holds(jnp.arange(cache.size, dtype=jnp.int32))
    if window is not None:
      visible &= window.sees(cache.pos)[:, :, 0]
    logits = jnp.where(visible[:, :, None], logits[:, :, :, 0], -jnp.inf)
    # Logarithms of the weights: the small ones still have an order where the weights are all 0.
    weight = context.log_softmax(at, logits)  # ln A, Eq. 2
    if self.per == "kv_head":
      weight = jax.nn.logsumexp(weight, 2, keepdims=True)  # of the mean, up to a constant
    place = context.first(at, cache.size) + jnp.arange(cache.size, dtype=jnp.int32)
    place = self._in_middle(cache, jnp.where(visible, place, -1)[:, :, None])
    weight = jnp.where(place >= 0, weight, -jnp.inf)
    best, index = context.top_k(at, weight, self.k)
    index = jnp.where(best > -jnp.inf, index, NOWHERE)
    index, best = jax.lax.sort((index, best), num_keys=1)
    return jnp.where(index == NOWHERE, -1, index), best

  def _retrieve_by_kernels(
    self,
    at: At,
    cache: Cache,
    q: Float[Array, "B K G H"],
    window: Window | None,
    choice: "Choice",
    logits: Float[Array, "B K G S"] | None,
  ) -> tuple[Array, ...]:
    """`_retrieve`; what is not needed reads no key, and holds anything."""
    k, span, needed = cache.slots["k"], at.top.span(at, cache, window), choice.retrieves
    batch, heads, units = needed.shape
    where = span.start, span.stop, span.stop
    some = {"span_sinks": span.sinks, "active": needed[..., 0]}
    few, sizes = min(self.k, cache.size), {"sinks": self.sinks, "local": self.local}
    operands, direct = (q.astype(k.dtype), k, *where), self._units_are_queries(q)
    if logits is None:  # units are KV heads
      logits, *rest = dispatch.kernel("key_logits", "pallas")(*operands, **some)
    if units == 1:
      with contextlib.suppress(NotImplementedError):  # more than a program can hold
        best, index, *listed = dispatch.kernel("cis_found_listed", "pallas")(
          *([logits[:, :, 0]] if direct else [logits, *rest], span.start, span.stop),
          *(cache.heads["retrieved"], choice.anchor, needed, cache.seen),
          **sizes,
          k=few,
          span_sinks=span.sinks,
        )
        return index[:, :, None], best[:, :, None], *listed
    weight = logits
    if not direct:
      weigh = dispatch.kernel("key_weights", "pallas")
      weight = weigh(*operands, blocks=cache.size, log=True, **some)
    best, index = dispatch.other_tiles(
      at,
      weight.reshape(batch, heads * units, -1),
      span,
      **sizes,
      unit=1,
      k=few,
      active=needed.reshape(batch, heads * units),
      ordered=False,
    )
    shape = *needed.shape, -1
    return index.reshape(shape), best.reshape(shape)

  def _listed(
    self,
    at: At,
    cache: Cache,
    window: Window | None,
    found: Int[Array, "B K U f"],
    choice: "Choice",
  ) -> tuple[Int[Array, "B K W"], Int[Array, "B K"]]:
    """Table and count of the plan. The kernel's lists may have holes (−1)."""
    retrieves, anchor = choice.retrieves, choice.anchor
    if self._by_kernels(at, "cis_listed", window):
      span = at.top.span(at, cache, window)
      return dispatch.kernel("cis_listed", "pallas")(
        *(cache.heads["retrieved"], found, anchor, retrieves, cache.seen, span.start),
        slots=cache.size,
        sinks=self.sinks,
        local=self.local,
        span_sinks=span.sinks,
      )
    missing = self._widest - found.shape[-1]
    fresh = jnp.pad(found, [(0, 0)] * 3 + [(0, missing)], constant_values=-1)
    old = _of_step(cache.heads["retrieved"], anchor[..., None])
    chosen = self._in_middle(cache, jnp.where(retrieves[..., None] > 0, fresh, old))
    table = jnp.concatenate([self._always(cache), chosen.reshape(*chosen.shape[:2], -1)], -1)
    if window is not None:
      table = jnp.where(_sees(window, table), table, -1)
    return _distinct(table)

  def _dilate(
    self, found: Int[Array, "B K U f"], weight: Float[Array, "B K U f"]
  ) -> Int[Array, "B K U W"]:
    """A retrieval and the neighbours of its m heaviest tokens (Eq. 13), none twice, −1 behind.

    What lies in the middle of now is for later queries to say, all but the first tokens.
    """
    order = jnp.argsort(-weight, -1, stable=True)[..., : self._dilated]
    heaviest = jnp.take_along_axis(found, jnp.sort(order, -1), -1)[..., None, :]
    away = jnp.array([d for r in range(1, self.radius + 1) for d in (-r, r)], jnp.int32)
    near = heaviest + away[:, None]  # the nearest first
    near = jnp.where((heaviest >= 0) & (near >= self.sinks), near, -1)
    both = jnp.concatenate([found, near.reshape(*found.shape[:3], -1)], -1)
    missing = self._widest - both.shape[-1]
    both = jnp.pad(both, [(0, 0)] * 3 + [(0, missing)], constant_values=-1)
    return _distinct(both)[0]

  def _in_middle(self, cache: Cache, token: Int[Array, "B K U X"]) -> Int[Array, "B K U X"]:
    """Tokens in [C_sink, n − C_local); −1 in place of the others."""
    end = (cache.seen - self.local)[:, None, None, None]
    return jnp.where((token >= self.sinks) & (token < end), token, -1)

  def _always(self, cache: Cache) -> Int[Array, "B K X"]:
    """First tokens, then the newest backwards, none twice."""
    n = cache.seen[:, None]
    first = jnp.arange(self.sinks, dtype=jnp.int32)
    newest = n - 1 - jnp.arange(self.local, dtype=jnp.int32)
    newest = jnp.where(newest >= self.sinks, newest, -1)
    both = jnp.concatenate([jnp.where(first < n, first, -1), newest], -1)[:, None]
    return jnp.broadcast_to(both, (*cache.pos.shape[:2], both.shape[-1]))

  def observe(
    self, at: At, cache: Cache, q: Array, plan: Plan, attended: Attended
  ) -> tuple[Cache, Aux]:
    """Notes query, anchor and retrieval of the step. Reports `retrieved`, bool [B, K].

    With per="query_head" it is [B, K, G].
    """
    retrieved = plan.memo["choice"].retrieves > 0
    retrieved = retrieved[..., 0] if self.per == "kv_head" else retrieved
    return self._note(at, cache, plan.memo, attended), {"retrieved": retrieved}

  def _note(self, at: At, cache: Cache, memo: dict, attended: Attended) -> Cache:
    """The cache that knows of this step, in rows that count."""
    choice, found, weight = memo["choice"], memo["found"], memo["weight"]
    names, step = ("queries", "anchor", "retrieved"), cache.rows["step"]
    held = [cache.heads[name] for name in names]
    counted = jnp.ones_like(step, bool) if attended.counted is None else attended.counted
    if dispatch.choose("cis_note", at.env.impl) == "pallas":
      # The kernel looks at the denominators itself, all but those of other devices' heads.
      live = counted if attended.live is None or at.env.head_axis else attended.live
      *noted, step = dispatch.kernel("cis_note", "pallas")(
        *(live, attended.state.l, choice.step),
        *(choice.query, choice.anchor, choice.retrieves, found, weight, *held, step),
        sinks=self.sinks,
        heaviest=self._dilated,
        radius=self.radius,
      )
      return cache.put(heads=dict(zip(names, noted, strict=True)), rows={"step": step})
    row, head, unit = jnp.indices(choice.anchor.shape, jnp.int32, sparse=True)
    place = jnp.where(counted, step, self.block)[:, None, None]
    own = jnp.where(choice.retrieves > 0, place, self.block)
    queries, anchor, retrieved = held
    noted = {
      "queries": queries.at[row[..., 0], head[..., 0], place[..., 0]].set(
        choice.query, mode="drop"
      ),
      "anchor": anchor.at[row, head, place, unit].set(choice.anchor, mode="drop"),
      "retrieved": retrieved.at[row, head, own, unit].set(self._dilate(found, weight), mode="drop"),
    }
    step = jnp.where(counted, (step + 1) % self.block, step)
    return cache.put(heads=noted, rows={"step": step})


@pytree()
@dataclasses.dataclass(frozen=True)
class Choice:
  """What a step's queries share.

  Attributes:
    query: float32 [B, K, G, H], q at norm 1.
    anchor: int32 [B, K, U], the step of the block whose retrieval is used: this one's where a unit
      retrieves.
    retrieves: int32 [B, K, U], 1 where a unit shares with none.
    step: int32 [B, K], this one, of the block.
  """

  query: Array
  anchor: Array
  retrieves: Array
  step: Array


def split(budget: int, matched: bool = False) -> dict[str, int]:
  """The paper's k, sinks and local for 128 or 512 tokens."""
  if budget not in BUDGETS:
    raise ValueError(f"budget: found {budget}, expected one of {list(BUDGETS)}")
  sinks, local, k, k_matched = BUDGETS[budget]
  return {"k": k_matched if matched else k, "sinks": sinks, "local": local}


def _unit(q: Float[Array, "B K G H"]) -> Float[Array, "B K G H"]:
  """q / ‖q‖, float32; 0 stays 0."""
  q = q.astype(jnp.float32)
  q = q / jnp.maximum(jnp.abs(q).max(-1, keepdims=True), 1e-30)  # its square must not overflow
  return q / jnp.maximum(jnp.linalg.norm(q, axis=-1, keepdims=True), 1e-30)


def _of_step(
  x: Int[Array, "B K s *unit"], step: Int[Array, "B K *#unit"]
) -> Int[Array, "B K *unit"]:
  """What was noted in a step of the block; −1 gives any."""
  return jnp.take_along_axis(x, step[:, :, None], 2, mode="clip")[:, :, 0]


def _sees(window: Window, token: Int[Array, "B K X"]) -> Bool[Array, "B K X"]:
  """Whether the newest query's window holds each token."""
  return window.sees(token)[:, :, 0]


def _distinct(table: Int[Array, "*heads W"]) -> tuple[Int[Array, "*heads W"], Int[Array, "*heads"]]:
  """The table without repetitions and holes (−1), first occurrences in their order; and its count.

  Entries behind the count are −1.
  """
  width = table.shape[-1]
  order = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), table.shape)
  token, order = jax.lax.sort((table, order), num_keys=2)
  again = jnp.concatenate(
    [jnp.zeros_like(token[..., :1], bool), token[..., 1:] == token[..., :-1]], -1
  )
  drop = again | (token < 0)
  order = jnp.where(drop, width, order)
  _, token = jax.lax.sort((order, jnp.where(drop, -1, token)), num_keys=1)
  return token, (~drop).sum(-1, dtype=jnp.int32)
