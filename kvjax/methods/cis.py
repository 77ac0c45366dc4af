"""CIS: queries that resemble an earlier one share what it retrieved (PrHS, §IV-A)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import dispatch
from kvjax.method import Aux, Method
from kvjax.ops import attention, context
from kvjax.types import At, Attended, Cache, CacheSpec, Carry, Plan, Prompt, Window

# Tokens in all -> first tokens, newest tokens, retrieved ones, retrieved ones of CIS* (§V-B, §V-C).
BUDGETS = {128: (8, 32, 88, 72), 512: (16, 64, 432, 388)}


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

  k: int = 432
  sinks: int = 16
  local: int = 64
  block: int = 16
  tau: float = 0.8
  radius: int = 1
  m: int | None = None
  per: str = "kv_head"

  def __post_init__(self):
    for name, least in (("k", 1), ("sinks", 0), ("local", 1), ("block", 1), ("radius", 0)):
      if getattr(self, name) < least:
        raise ValueError(f"CIS.{name}: found {getattr(self, name)}, expected {least} or more")
    if self.m is not None and not 0 <= self.m <= self.k:
      raise ValueError(f"CIS.m: found {self.m}, expected 0 to k = {self.k}")
    if self.tau != self.tau:
      raise ValueError(f"CIS.tau: found {self.tau}, expected a number")
    if self.per not in ("kv_head", "query_head"):
      raise ValueError(f"CIS.per: found {self.per!r}, expected 'kv_head' or 'query_head'")

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
  def dilated(self) -> int:
    """m, how many tokens of a shared retrieval gain neighbours."""
    return self.k // 3 if self.m is None else self.m

  @property
  def in_place(self) -> tuple[str, ...]:
    return ("queries", "anchor", "retrieved")

  def extra(self, spec: CacheSpec, layer: int) -> tuple[dict, dict, dict]:
    """What the queries of the current block were, whose retrieval each used, and the retrievals.

    U = 1 decision per KV head, or one per query head.
    """
    units = 1 if self.per == "kv_head" else spec.groups
    steps = spec.batch, spec.kv_heads, self.block
    in_heads = {
      "queries": jnp.zeros((*steps, spec.groups, spec.head_dim), jnp.float32),  # of norm 1
      "anchor": jnp.zeros((*steps, units), jnp.int32),  # step of the block
      "retrieved": jnp.full((*steps, units, self.k), -1, jnp.int32),  # heaviest first, −1 = none
    }
    return {}, in_heads, {"step": jnp.zeros(spec.batch, jnp.int32)}  # step within the block

  def settle(self, at: At, cache: Cache, prompt: Prompt) -> Cache:
    """After a prompt the next token begins a block."""
    return cache.put(rows={"step": jnp.zeros_like(cache.rows["step"])})

  def plan(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"], carry: Carry
  ) -> tuple[Plan, Carry]:
    """First tokens, then the newest backwards, then the chosen ones, heaviest first.

    The memo holds what `observe` notes, and `retrieve`, bool [B, K]: the KV heads that have to
    look at all keys.
    """
    window = at.top.window(at, (cache.seen - 1)[:, None])
    query, anchor, shares = self.find_anchor(at, cache, q)
    found = self.retrieve(at, cache, q, window, ~shares)
    table, count, fresh = self.listed(at, cache, window, found, anchor, shares)
    memo = {"retrieve": ~shares.all(-1), "query": query, "anchor": anchor, "fresh": fresh}
    span = at.top.span(at, cache, window)
    return Plan(span, table, count, memo=memo, unit=1, pinned=self.sinks), carry

  def find_anchor(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"]
  ) -> tuple[Float[Array, "B K G H"], Int[Array, "B K U"], Bool[Array, "B K U"]]:
    """q at norm 1, the step of the block whose retrieval is used, and whether that is shared.

    What shares with none uses this step's.
    """
    if dispatch.choose("cis_anchors", at.env.impl) == "pallas":
      block = cache.heads["queries"], cache.heads["anchor"], cache.rows["step"]
      query, anchor, shares = dispatch.kernel("cis_anchors", "pallas")(q, *block, tau=self.tau)
      return query, anchor, shares > 0
    query, step = _unit(q), cache.rows["step"][:, None, None]
    cosine = (query[:, :, None] * cache.heads["queries"]).sum(-1)  # Eq. 12, [B, K, s, G]
    alike = jnp.minimum(cosine, 1.0) > self.tau  # rounding must not let 1 exceed τ = 1
    if self.per == "kv_head":
      alike = alike.all(-1, keepdims=True)
    earlier = jnp.arange(self.block, dtype=jnp.int32)[:, None]
    latest = jnp.where(alike & (earlier < step[..., None]), earlier, -1).max(2)  # j
    shares = latest >= 0
    anchor = _of_step(cache.heads["anchor"], latest)
    return query, jnp.where(shares, anchor, step), shares

  def retrieve(
    self,
    at: At,
    cache: Cache,
    q: Float[Array, "B K G H"],
    window: Window | None,
    needed: Bool[Array, "B K U"],
  ) -> Int[Array, "B K U k"]:
    """The k heaviest tokens of the middle (ties: the lowest), heaviest first, −1 behind them.

    What it gives where it is not `needed` is not used: the kernels skip it.
    """
    one = window is None or window.view is None  # the kernels have one query for all keys
    if one and dispatch.choose_for(at, "key_weights") == "pallas":
      return self.retrieve_by_kernels(at, cache, q, window, needed)
    now = (cache.seen - 1)[:, None]
    logits = attention.windowed_logits(
      at, q[:, :, :, None], now, cache.slots["k"], cache.pos, window
    )
    visible = cache.pos >= 0
    if window is not None:
      visible &= window.sees(cache.pos)[:, :, 0]
    logits = jnp.where(visible[:, :, None], logits[:, :, :, 0], -jnp.inf)
    # Logarithms of the weights: the small ones still have an order where the weights are all 0.
    weight = context.log_softmax(at, logits)  # ln A, Eq. 2
    if self.per == "kv_head":
      weight = jax.nn.logsumexp(weight, 2, keepdims=True)  # of the mean, up to a constant
    place = context.first(at, cache.size) + jnp.arange(cache.size, dtype=jnp.int32)
    place = self.in_middle(cache, jnp.where(visible, place, -1)[:, :, None])
    weight = jnp.where(place >= 0, weight, -jnp.inf)
    best, index = context.top_k(at, weight, self.k)
    return self.padded(jnp.where(best > -jnp.inf, index, -1))

  def retrieve_by_kernels(
    self,
    at: At,
    cache: Cache,
    q: Float[Array, "B K G H"],
    window: Window | None,
    needed: Bool[Array, "B K U"],
  ) -> Int[Array, "B K U k"]:
    """`retrieve`; what is not needed reads no key, and holds anything."""
    k, span = cache.slots["k"], at.top.span(at, cache, window)
    batch, heads, units = needed.shape
    where = span.start, span.stop, span.stop
    some = {"span_sinks": span.sinks, "active": needed.any(-1).astype(jnp.int32)}
    if units == q.shape[2]:  # one softmax each: logits have the order of its weights
      weigh = dispatch.kernel("key_logits", "pallas")
      weight = weigh(q.astype(k.dtype), k, *where, **some)[0]
    else:
      weigh = dispatch.kernel("key_weights", "pallas")
      weight = weigh(q.astype(k.dtype), k, *where, blocks=cache.size, log=True, **some)
    _, index = dispatch.other_tiles(
      at,
      weight.reshape(batch, heads * units, -1),
      span,
      unit=1,
      sinks=self.sinks,
      local=self.local,
      k=min(self.k, cache.size),
      active=needed.reshape(batch, heads * units),
    )
    return self.padded(index.reshape(*needed.shape, -1))

  def padded(self, index: Int[Array, "B K U X"]) -> Int[Array, "B K U k"]:
    """Up to k tokens with −1 behind them."""
    missing = self.k - index.shape[-1]
    return jnp.pad(index, [(0, 0)] * 3 + [(0, missing)], constant_values=-1)

  def listed(
    self,
    at: At,
    cache: Cache,
    window: Window | None,
    found: Int[Array, "B K U k"],
    anchor: Int[Array, "B K U"],
    shares: Bool[Array, "B K U"],
  ) -> tuple[Int[Array, "B K W"], Int[Array, "B K"], Int[Array, "B K U k"]]:
    """Table and count of the plan, and what was found where it was asked for, −1 elsewhere."""
    one = window is None or window.view is None
    if one and dispatch.choose_for(at, "cis_listed") == "pallas":
      span = at.top.span(at, cache, window)
      table, count, fresh = dispatch.kernel("cis_listed", "pallas")(
        *(cache.heads["retrieved"], found, anchor, shares.astype(jnp.int32)),
        *(cache.seen, span.start),
        slots=cache.size,
        sinks=self.sinks,
        local=self.local,
        heaviest=self.dilated,
        radius=self.radius,
        span_sinks=span.sinks,
      )
      return table, count, fresh
    fresh = jnp.where(shares[..., None], -1, found)
    old = _of_step(cache.heads["retrieved"], anchor[..., None])
    chosen = jnp.where(shares[..., None], old, fresh)
    near = jnp.where(shares[..., None], self.neighbours(old), -1)
    chosen = self.in_middle(cache, jnp.concatenate([chosen, near], -1))
    table = jnp.concatenate([self.always(cache), chosen.reshape(*chosen.shape[:2], -1)], -1)
    if window is not None:
      table = jnp.where(_sees(window, table), table, -1)
    return *_distinct(table), fresh

  def neighbours(self, retrieved: Int[Array, "B K U k"]) -> Int[Array, "B K U X"]:
    """Tokens up to r away from the m heaviest (Eq. 13), the nearest first."""
    away = jnp.array([d for r in range(1, self.radius + 1) for d in (-r, r)], jnp.int32)
    heaviest = retrieved[..., None, : self.dilated]
    near = jnp.where(heaviest >= 0, heaviest + away[:, None], -1)
    return near.reshape(*retrieved.shape[:3], -1)

  def in_middle(self, cache: Cache, token: Int[Array, "B K U X"]) -> Int[Array, "B K U X"]:
    """Tokens in [C_sink, n − C_local); −1 in place of the others."""
    end = (cache.seen - self.local)[:, None, None, None]
    return jnp.where((token >= self.sinks) & (token < end), token, -1)

  def always(self, cache: Cache) -> Int[Array, "B K X"]:
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
    memo, step = plan.memo, cache.rows["step"]
    counted = attended.counted
    counted = jnp.ones_like(step, bool) if counted is None else counted
    noted = self.noted(at, cache, counted, memo["query"], memo["anchor"], memo["fresh"])
    cache = cache.put(heads=noted, rows={"step": (step + 1) % self.block})
    retrieved = memo["anchor"] == step[:, None, None]
    retrieved = retrieved[..., 0] if self.per == "kv_head" else retrieved
    return cache, {"retrieved": retrieved}

  def noted(
    self, at: At, cache: Cache, counted: Bool[Array, " B"], *new: Array
  ) -> dict[str, Array]:
    """What the block's queries were, used and retrieved, with this step's where rows count."""
    names, step = ("queries", "anchor", "retrieved"), cache.rows["step"]
    held = [cache.heads[name] for name in names]
    if dispatch.choose("cis_note", at.env.impl) == "pallas":
      run = dispatch.kernel("cis_note", "pallas")
      return dict(zip(names, run(step, counted.astype(jnp.int32), *new, *held), strict=True))
    row, place = jnp.arange(step.shape[0]), jnp.where(counted, step, self.block)
    pairs = zip(names, held, new, strict=True)
    return {name: x.at[row, :, place].set(y, mode="drop") for name, x, y in pairs}


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


def _distinct(table: Int[Array, "B K W"]) -> tuple[Int[Array, "B K W"], Int[Array, "B K"]]:
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
