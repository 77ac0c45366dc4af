"""Records passed to moves: the place, the environment, a prompt and its attention, a carry.

One dimension key everywhere: B batch, T query tokens, S cache slots, N query heads, K key/value
heads, G = N/K query heads per key/value head, H head size, L layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.core import fields
from kvjax.core.plan import Attended
from kvjax.primitives.rope import Rope
from kvjax.primitives.traced_layer import TracedLayer
from kvjax.primitives.trees import pytree

if TYPE_CHECKING:
  from kvjax.families.method import Method

T = TypeVar("T")

IMPLEMENTATIONS = ("auto", "reference", "pallas", "jax-triton", "cudnn")


@dataclasses.dataclass(frozen=True)
class Env:
  """Static facts available to every move, in addition to the shapes of its arrays.

  Attributes:
    layers: L.
    rope: the model's rotary embedding.
    impl: "auto" (the fastest that exists, does what the method needs and runs on the device),
      "reference", "pallas", "jax-triton" (decode only) or "cudnn" (whole prompts only, of layers
      that attend to all of them); one that is missing, or cannot do it, raises.
    tile: slots per tile of a plan that covers the whole cache.
    head_axis: mesh axis over which key/value heads are sharded (inside shard_map), or None.
    slot_axis: mesh axis over which the slots of caches are sharded (inside shard_map), or None.
    soft_cap: c of logits c·tanh(x/c) (Gemma 2), x being q·k/√H, in all that attends or reports
      attention; None: x itself.
    lse: whether drivers report the log of each query's softmax denominator as "lse", float32
      [B, K, G] or [B, K, G, A]: for models that add a term of their own to it.
    defers: whether a step leaves alone what can wait until it has passed through all layers. The
      decoder sets it, and settles that then.
    check_nan: whether attention that is not finite raises, and a token for which a cache that keeps
      everything has no slot, through `jax.experimental.checkify`: wrap what you jit in
      `checkify.checkify`, and `throw` its error. Slow: for debugging.
  """

  layers: int = fields.least(1)
  rope: Rope = dataclasses.field(default_factory=Rope)
  impl: str = fields.one_of(IMPLEMENTATIONS, "auto")
  tile: int = fields.least(1, 64)
  head_axis: str | None = None
  slot_axis: str | None = None
  defers: bool = False
  check_nan: bool = False
  lse: bool = False
  soft_cap: float | None = fields.finite_above(0, None)

  def __post_init__(self):
    fields.check(type(self), vars(self))

  @property
  def axes(self) -> tuple[str, ...]:
    """The mesh axes that this runs on (inside shard_map)."""
    return tuple(axis for axis in (self.head_axis, self.slot_axis) if axis)


@dataclasses.dataclass(frozen=True)
class At:
  """The place where a move runs: the layer, the environment, and the outermost method.

  A move reaches its siblings through `at.top`, so that a wrapper's override is seen from inside
  the method that it wraps.

  Attributes:
    layer: its number, int. One that is traced (layers under `jax.lax.scan`) will do for a method
      that never asks for it; the others raise TypeError.
    env: the environment.
    top: the outermost method.
  """

  layer: Any
  env: Env
  top: Method

  def __post_init__(self):
    layer = vars(self)["layer"]  # its value, whatever a subclass makes of reading it
    if isinstance(layer, jax.core.Tracer | TracedLayer):
      object.__setattr__(self, "layer", TracedLayer(layer, self.top))

  @property
  def name(self) -> str:
    """The method's name in errors."""
    return type(self.top).__name__

  def of_layer(self, f: Callable[[int], T]) -> T:
    """f of the layer's number. Layers for which it is equal may share a compiled program; where
    `layer` itself is read, each layer has its own.
    """
    return f(self.layer)

  def under(self, top: Method) -> At:
    """The same place with another outermost method."""
    return dataclasses.replace(self, top=top)

  def by(self, impl: str) -> At:
    """The same place, where operations run as `impl`."""
    return dataclasses.replace(self, env=dataclasses.replace(self.env, impl=impl))

  def sum_heads(self, x: Array) -> Array:
    """Sum over the shards of the key/value heads of x, any shape, reduced over the local ones."""
    return jax.lax.psum(x, self.env.head_axis) if self.env.head_axis else x

  def max_heads(self, x: Array) -> Array:
    """As `sum_heads`, the maximum; x of any shape."""
    return jax.lax.pmax(x, self.env.head_axis) if self.env.head_axis else x

  def all_heads(self, x: Array) -> Array:
    """x [B, K, ...] of the key/value heads of all shards."""
    axis = self.env.head_axis
    return jax.lax.all_gather(x, axis, axis=1, tiled=True) if axis else x

  def heads_in_all(self, kv_heads: int) -> int:
    """Key/value heads of all shards, where each holds `kv_heads`."""
    axis = self.env.head_axis
    return kv_heads * jax.lax.axis_size(axis) if axis else kv_heads

  def head_index(self, kv_heads: int) -> Int[Array, " K"]:
    """Global indices of the `kv_heads` key/value heads that this shard holds."""
    shard = jax.lax.axis_index(self.env.head_axis) if self.env.head_axis else 0
    return shard * kv_heads + jnp.arange(kv_heads, dtype=jnp.int32)


@pytree("apart")
@dataclasses.dataclass(frozen=True)
class Active:
  """The tokens of a chunk that a layer computes.

  `Active(index)` is any set, gathered; `Active.ends` the first tokens and one piece, sliced.

  Attributes:
    index: int32 [B, A], which they are; the padded length of the chunk = padding.
    start: int32 [B], where the piece begins; None: there is none. Only `ends` gives it.
    apart: number of first tokens that are separate from the piece (static). Only `ends` gives it.
  """

  index: Array
  _: dataclasses.KW_ONLY
  start: Array | None = None
  apart: int | None = None

  @classmethod
  def ends(
    cls, apart: int, start: Int[Array, " B"], count: int, tokens: int, total: Int[Array, " B"]
  ) -> Active:
    """The first `apart` tokens of a chunk and its tokens [start, start + count − apart); what lies
    past a row's end is padding, computed and seen by nothing.

    Args:
      apart: how many first tokens.
      start: int32 [B], where each row's piece begins, `apart` or later; a piece that would not fit
        in the chunk ends with it.
      count: A, how many tokens in all.
      tokens: T, the padded length of the chunk.
      total: int32 [B], where each row ends.

    Raises:
      ValueError: `apart`, `count` and `tokens` are not in order.
    """
    if not 0 <= apart <= count <= tokens:
      raise ValueError(
        f"Active.ends: found apart {apart}, count {count} and tokens {tokens}, expected "
        "0 <= apart <= count <= tokens"
      )
    start = jnp.clip(start, apart, tokens - (count - apart)).astype(jnp.int32)
    i = jnp.arange(count, dtype=jnp.int32)
    index = jnp.where(i < apart, i, start[:, None] + i - apart)
    index = jnp.where(index < total[:, None], index, tokens)
    return cls(index, start=start, apart=apart)


@pytree("tokens", "past", "apart")
@dataclasses.dataclass(frozen=True)
class Prompt:
  """One chunk of a prompt, right-padded.

  Attributes:
    valid: int32 [B], real tokens of each row in this chunk; 0 leaves the row untouched.
    total: int32 [B], length of the whole prompt of this turn.
    index: int32 [B, A], the tokens of this chunk that this layer computes (`tokens` = padding);
      None: all.
    tokens: T, the padded length of the chunk (static).
    past: static upper bound on the tokens that any row has already cached; 0 says that the cache
      is empty, None that nothing is known.
    start, apart: of the piece that they are but for the first `apart` (`Active.ends`); None: there
      is none.
    wo: [K, G, H, D], the layer's output projection, for methods that ask for it
      (`Traits.weighs_outputs`); else None.
  """

  valid: Array
  total: Array
  index: Array | None
  tokens: int
  past: int | None = None
  start: Array | None = None
  apart: int | None = None
  wo: Array | None = None

  @classmethod
  def of(cls, at: At, tokens: int, valid: Array, total: Array, past: int | None) -> Prompt:
    """A layer's view of a chunk of `tokens` padded tokens; `valid` and `total` int32 [B].

    Raises:
      TypeError: `active` returned something else than an `Active` or None.
    """
    active = at.top.active(at, tokens, total)
    if active is None:
      return cls(valid, total, None, tokens, past)
    if not isinstance(active, Active):
      raise TypeError(f"{at.name}.active: found {active!r}, expected kvjax.Active(index) or None")
    return cls(valid, total, active.index, tokens, past, active.start, active.apart)

  def query_index(self) -> Int[Array, "B A"]:
    """Index within the chunk of every computed token."""
    if self.index is not None:
      return self.index
    every = jnp.arange(self.tokens, dtype=jnp.int32)
    return jnp.broadcast_to(every, (self.valid.shape[0], self.tokens))


@pytree()
@dataclasses.dataclass(frozen=True)
class Turn:
  """A chunk of a prompt that has been attended to, for the moves that choose what stays.

  Attributes:
    staged: the slots that the chunk's queries see, [B, K, S, ...] by name; in `rank`, those of
      which some stay.
    q: [B, K, G, A, H], the chunk's queries, rotated.
    qpos: int32 [B, A], their positions; −1 = padding.
    attended: their attention, its state [B, K, G, A, ...].
    prompt: the chunk.
  """

  staged: dict[str, Any]
  q: Array
  qpos: Array
  attended: Attended
  prompt: Prompt


@pytree()
@dataclasses.dataclass(frozen=True)
class OwnRows:
  """Entries of a shelf that no driver chooses between row by row, which would copy them.

  Their writer leaves alone the rows that take no part: those without new tokens, and those
  whose attention is not finite. What lies in host memory has to be kept this way.

  Attributes:
    of: arrays by name.
  """

  of: dict[str, Any]


@pytree()
@dataclasses.dataclass(frozen=True)
class Carry:
  """Values that one forward pass hands from layer to layer; shelves as in `Cache`.

  It starts empty; the first layer that has something to hand on adds it.
  """

  heads: dict[str, Any] = dataclasses.field(default_factory=dict)
  rows: dict[str, Any] = dataclasses.field(default_factory=dict)
