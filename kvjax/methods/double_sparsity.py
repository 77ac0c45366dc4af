"""Double Sparsity: heavy tokens, found by a few channels of every key (Yang et al., 2024)."""

import dataclasses
import os
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from numpy.typing import ArrayLike

from kvjax.core import settings, slots
from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.context import At, Prompt, Turn
from kvjax.core.fields import expect, least
from kvjax.core.leaves import Leaf
from kvjax.core.plan import Attended, Plan
from kvjax.families import sliding
from kvjax.families.coded import Coded
from kvjax.families.method import Aux
from kvjax.families.selective import SelectiveTokens
from kvjax.ops import attention, tiles
from kvjax.primitives import softmax_state


@dataclasses.dataclass(frozen=True)
class DoubleSparsity(SelectiveTokens):
  """Reads the tokens that score highest over the label channels (§3).

  A copy of every key's label channels is stored compactly: scoring reads that instead of the keys.
  Approximate logits (q·k over the label channels alone) become probabilities per query head and are
  averaged over the group; the newest token, whose label is not stored yet, is always read and does
  not take part.

  Label channels are those with the largest mean |q_d·k_d| (§3.2), per layer and KV head. They come
  from a calibration over text (`scripts/programs/calibrate_channels.py`) through `calibrated`, or,
  without one, from the prompt: the same statistic is kept over the tokens of all prompts so far,
  and the best channels are chosen, and the labels of all tokens written, anew after each chunk.
  That needs no file, follows the text at hand, and does not depend on how a prompt is cut into
  chunks; fixed channels save the rewriting. An empty cache starts with evenly spaced channels.

  The paper stores labels in 4 bits; here they have the dtype of the keys.

  Attributes:
    budget: tokens read per KV head and step, those of `sinks` and `local` included.
    channels: label channels of every key; heads of fewer channels have all of them (of a head of
      128, §4 takes 8, and 16 or 32, which are more accurate).
    sinks: first tokens, always read (the paper has none).
    local: newest tokens, always read, the newest itself among them.
  """

  budget: int = 2048
  channels: int = least(1, 16)
  sinks: int = least(0, 0)
  local: int = least(1, 1)

  def __post_init__(self):
    super().__post_init__()
    sinks, local = self.sinks, self.local
    expected = f"at least sinks + local = {sinks} + {local}"
    expect(self, "budget", self.budget >= sinks + local, expected)

  def summaries(self, spec: CacheSpec) -> dict[str, Leaf]:
    count = min(self.channels, spec.head_dim)
    step = spec.head_dim // count
    even = tuple(range(0, count * step, step))
    return {
      # A function of the keys.
      "labels": Leaf("heads", (spec.capacity, count), spec.dtype, in_place=True),
      "channels": Leaf("heads", (count,), jnp.int32, even),
      "importance": Leaf("heads", (spec.head_dim,)),
      "fixed": Leaf("rows", dtype=bool),
    }

  def score(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"], visible: Plan
  ) -> Float[Array, "B K S"]:
    labels = cache.heads["labels"]
    slot = jnp.arange(labels.shape[2], dtype=jnp.int32)
    known = slot < (cache.seen - 1)[:, None, None]  # the newest token has no label yet
    ok = known & tiles.visible(visible.span, slot, 1)
    # An index for every query head: XLA's CPU has no product of bfloat16 in the order of fewer.
    channels = cache.heads["channels"][:, :, None]
    channels = jnp.broadcast_to(channels, (*q.shape[:3], channels.shape[-1]))
    part = jnp.take_along_axis(q, channels, -1)
    # logits_of divides by √(label channels); what is approximated is q·k/√H.
    scale = (part.shape[-1] / q.shape[-1]) ** 0.5
    logits = attention.logits_of(part[:, :, :, None], labels)[:, :, :, 0] * scale
    logits = softmax_state.capped(logits, at.env.soft_cap)
    p = jax.nn.softmax(logits, -1, where=ok[:, :, None]).mean(2)
    return jnp.where(ok, p, 0.0)

  def summarise(self, cache: Cache, start: Int[Array, " B"], tokens: int) -> Cache:
    """Labels of the slots [start, start + tokens)."""
    slot = start[:, None] + jnp.arange(tokens, dtype=jnp.int32)
    held = (slot >= 0) & (slot < cache.used[:, None])
    at = jnp.broadcast_to(slot[:, None], (*cache.pos.shape[:2], tokens))
    new = label(slots.take(cache.slots["k"], at), cache.heads["channels"])
    return cache.put(heads={"labels": tiles.write(cache.heads["labels"], slot, held, new)})

  def observe(
    self, at: At, cache: Cache, q: Array, plan: Plan, attended: Attended
  ) -> tuple[Cache, Aux]:
    """Labels the newest token, in rows that count.

    Which rows do is known once the labels have been read: before that XLA would copy all of them.
    """
    assert attended.counted is not None
    rows = {"used": jnp.where(attended.counted, cache.used, 0)}
    labelled, aux = super().observe(at, cache.put(rows=rows), q, plan, attended)
    return labelled.put(rows={"used": cache.used}), aux

  def keep(self, at: At, cache: Cache, turn: Turn, new: slots.Slots) -> Cache:
    if "importance" in cache.heads:
      q = turn.q
      index = jnp.broadcast_to(turn.prompt.query_index()[:, None], (*q.shape[:2], q.shape[3]))
      found = channel_importance(q, slots.take(new["k"], index), turn.qpos >= 0)
      cache = cache.put(heads={"importance": cache.heads["importance"] + found})
    return super().keep(at, cache, turn, new)

  def settle(self, at: At, cache: Cache, prompt: Prompt) -> Cache:
    """Chooses the channels, unless they are given, and labels all tokens by them."""
    if "importance" not in cache.heads:
      return cache
    held = cache.heads["channels"]
    _, best = jax.lax.top_k(cache.heads["importance"], held.shape[-1])
    fixed = cache.rows["fixed"][:, None, None]
    return _labelled(cache, jnp.where(fixed, held, best))


settings.register(
  DoubleSparsity,
  example=lambda cls, budget: cls(budget=budget),
  neutral=lambda cls, length: cls(budget=length),
  # The authors' runs on heads of 128: two dense layers, and half of the channels. Their group
  # factor of 2 leaves 64. Labels of 2 bits and tokens per query head are not offered.
  repo=lambda cls, budget: cls(budget=budget, channels=64, dense_layers=2),
)


def label(x: Float[Array, "B K N H"], channels: Int[Array, "B K C"]) -> Float[Array, "B K N C"]:
  """The label channels of vectors."""
  return jnp.take_along_axis(x, channels[:, :, None], -1)


def _labelled(cache: Cache, channels: Int[Array, "B K C"]) -> Cache:
  """The cache with these label channels, and labels of all its tokens: of numbers, if of codes."""
  method = cache.origin and cache.origin.method
  while method is not None and not isinstance(method, Coded):
    method = getattr(method, "base", None)
  keys = (cache if method is None else method._of_base(cache)).slots["k"]
  labels = label(keys, channels).astype(cache.heads["labels"].dtype)
  return cache.put(heads={"channels": channels, "labels": labels})


def channel_importance(
  q: Float[Array, "B K G T H"], k: Float[Array, "B K T H"], ok: Bool[Array, "B T"]
) -> Float[Array, "B K H"]:
  """Σ over tokens of |q_d·k_d|, each token's query with its own key, mean over the group (§3.2).

  Args:
    q, k: of the same tokens, as attention uses them (after RoPE).
    ok: tokens that count.
  """
  product = jnp.abs(q.astype(jnp.float32) * k[:, :, None].astype(jnp.float32)).mean(2)
  return jnp.where(ok[:, None, :, None], product, 0.0).sum(2)


def importance(caches: Sequence[Cache]) -> np.ndarray:
  """Importance of a model's channels, summed over the rows of its caches: float64 [L, K, H].

  Raises:
    ValueError: some layer's cache keeps no such statistic (dense layers do not), or there is none.
  """
  caches = sliding.served(caches)
  without = [i for i, cache in enumerate(caches) if "importance" not in cache.heads]
  if without or not caches:
    raise ValueError(
      f"caches: found no importance of channels in layers {without or 'at all'}, expected caches "
      "of a DoubleSparsity without dense layers"
    )
  return np.stack([np.asarray(cache.heads["importance"], np.float64).sum(0) for cache in caches])


def calibrated(caches: Sequence[Cache], channels: ArrayLike) -> tuple[Cache, ...]:
  """The caches with their label channels fixed; tokens that they hold are labelled by them.

  Args:
    caches: of a DoubleSparsity method, one per layer.
    channels: int32 [L, K, ≥ label channels], most important first, as `load_channels` gives them;
      of L layers without a window of the model's own.

  Raises:
    ValueError: the shape does not fit, or a number is not a channel, or one twice.
  """
  channels, served = np.asarray(channels), sliding.served(caches)
  sparse = [cache for cache in caches if "labels" in cache.heads]
  if not sparse:
    raise ValueError("caches: found no labels, expected caches of a DoubleSparsity method")
  _, heads, count = sparse[0].heads["channels"].shape
  if channels.ndim != 3 or channels.shape[:2] != (len(served), heads) or channels.shape[2] < count:
    raise ValueError(
      f"channels: found shape {channels.shape}, expected ({len(served)}, {heads}, {count} or more)"
    )
  size, first = sparse[0].head_dim, np.sort(channels[..., :count], -1)
  if channels.dtype.kind not in "iu" or channels.min() < 0 or channels.max() >= size:
    raise ValueError(
      f"channels: found {channels.min()} to {channels.max()}, expected 0 to {size - 1}, integers"
    )
  if (first[..., 1:] == first[..., :-1]).any():
    raise ValueError(f"channels: found one twice among the first {count}, expected each once")

  def fix(cache: Cache, own: np.ndarray) -> Cache:
    if "labels" not in cache.heads:
      return cache
    held = cache.heads["channels"]
    chosen = jnp.broadcast_to(jnp.asarray(own[:, :count], jnp.int32), held.shape)
    return _labelled(cache, chosen).put(rows={"fixed": jnp.ones_like(cache.rows["fixed"])})

  fixed = [fix(cache, own) for cache, own in zip(served, channels, strict=True)]
  return sliding.rejoined(caches, fixed)


def load_channels(path: str | os.PathLike[str]) -> np.ndarray:
  """Channels by importance, int32 [L, K, H], from a file of `kvjax calibrate`.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the file holds no such array.
  """
  path = pathlib.Path(path)
  try:
    with path.open("rb") as data, np.load(data, allow_pickle=False) as file:
      names = file.files
      channels = file["channels"] if "channels" in names else None
  except OSError:
    raise
  except Exception as error:  # NumPy and zipfile raise many kinds
    raise ValueError(f"{path}: found {error!r}, expected a whole .npz file") from error
  if channels is None:
    raise ValueError(f"{path}: found arrays {names}, expected channels [L, K, H]")
  ordered = np.sort(channels, -1) == np.arange(channels.shape[-1]) if channels.ndim == 3 else False
  if not np.all(ordered):
    raise ValueError(
      f"{path}: found {channels.dtype} {channels.shape}, expected every channel once per layer and "
      "head"
    )
  return channels.astype(np.int32)
