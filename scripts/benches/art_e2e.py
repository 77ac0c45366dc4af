"""ART over whole decode steps: its bases with and without it, stops forced after recorded shares"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.kernels.art import walk
from kvjax.kernels.common.devices import this_device
from kvjax.models.nn.transformer import Transformer
from kvjax.programs.suites import Case, Contender, suite, together
from kvjax.programs.suites.e2e import shape, step_logits, weights
from scripts.benches import e2e_sparse
from scripts.benches.e2e_sparse import STEPS, few_layers

PATIENCE = 5  # ART's: the first tile is never stable, so that no walk ends before its sixth
# Behind τ no output of values of usual size moves, and every output of `LOUD` ones does.
TAU, LOUD = 16.0, 2.0**24
STUDY = pathlib.Path(__file__).parents[1] / "results" / "art_study"
SHAPES = [(8, 32), (1, 32), (8, 8), (4, 16), (8, 16), (8, 4), (2, 32), (4, 32), (1, 8), (1, 4)]
SHAPES += [(batch, k) for batch in (4, 2, 1) for k in (16, 8, 4) if (batch, k) not in SHAPES]
# TPOT × of the base and with ART: Mistral-7B, Llama-3.1-70B (Tab. 1); with ART by length, Qwen3-8B
# (Tab. 2).
STREAMING = {4: 1.12, 8: 1.18, 16: 1.26, 32: 1.42}
SNAP = {4: 1.11, 8: 1.15, 16: 1.21, 32: 1.36}
PAPER = {
  "Full": ([1.00, 1.16], [1.00, 1.15], {4: 1.10, 8: 1.15, 16: 1.17, 32: 1.27}),
  "StreamingLLM 0.8": ([1.08, 1.24], [1.13, 1.27], STREAMING),
  "StreamingLLM 0.2": ([1.18, 1.30], [1.52, 1.66], STREAMING),
  "SnapKV 0.8": ([1.07, 1.17], [1.08, 1.18], SNAP),
  "SnapKV 0.2": ([1.17, 1.27], [1.47, 1.58], SNAP),
  "PyramidKV 0.2": ([1.17, 1.29], [1.47, 1.60], SNAP | {32: 1.37}),
}


class Stops(NamedTuple):
  """Walks that stop, and where: `stopped` of the heads after `after` of their tiles."""

  stopped: float
  after: float


@dataclasses.dataclass(frozen=True)
class Forced(kvjax.ART, moves=("walks", "length", "visited")):
  """ART whose detector ends every walk of a stable output after a given share of its tiles.

  It looks at each tile as always; τ and φ are so large that all outputs of values of usual size are
  stable from the second tile on, and the patience is what the share leaves.

  Attributes:
    after: the share, of each split's own tiles.
  """

  tau: float | int = TAU
  phi: float | int = float("inf")
  splits: int | str = "fill"
  after: float = 1.0

  def attend(self, at: Any, cache: Any, plan: Any, q: Any) -> Any:
    splits, tiles = self.walks(cache.pos.shape[:2], cache.size)
    ends = dataclasses.replace(self, splits=splits, patience=self.length(tiles // splits) - 1)
    return kvjax.ART.attend(ends, at, cache, plan, q)

  def walks(self, heads: tuple[int, ...], size: int) -> tuple[int, int]:
    """Splits of a walk, and the tiles of all of them."""
    tiles = -(-size // self.tile)
    if self.splits != "fill":
      return min(int(self.splits), tiles), tiles
    quiet = jax.default_backend() != "gpu"
    return walk.choose_splits(heads[0] * heads[1], size, self.tile, interpret=quiet), tiles

  def length(self, tiles: int) -> int:
    """Tiles that a walk of so many takes before it stops."""
    return max(PATIENCE + 1, round(self.after * tiles))

  def visited(self, heads: tuple[int, ...], size: int) -> float:
    """Share of the tiles that a head whose walks stop takes."""
    splits, tiles = self.walks(heads, size)
    mine = (tiles - np.arange(splits) + splits - 1) // splits
    return float(np.minimum(mine, self.length(tiles // splits)).sum() / tiles)


@dataclasses.dataclass(frozen=True)
class Held(kvjax.ART):
  """ART whose known lengths stay the share `after` of the tiles; at 1 no walk stops.

  Below 1 each output is stable, so that a walk takes what its length says.
  """

  margin: int | None = 16
  after: float = 1.0

  @property
  def _stop(self) -> Any:
    limit = 0.0 if self.after == 1 else float("inf")
    return dataclasses.replace(super()._stop, tau=limit, phi=limit)

  def settle(self, at: Any, cache: Any, prompt: Any) -> Any:
    tiles = -(-cache.used // self.tile)[:, None]
    length = jnp.rint(self.after * tiles * (self.after < 1)).astype(jnp.int32)
    cache = kvjax.ART.settle(self, at, cache, prompt)
    return cache.put(heads={"walk": jnp.broadcast_to(length, cache.pos.shape[:2])})

  def observe(self, at: Any, cache: Any, q: Any, plan: Any, attended: Any) -> Any:
    after, aux = kvjax.ART.observe(self, at, cache, q, plan, attended)
    return after.put(heads={"walk": cache.heads["walk"]}), aux


def recorded(order: str, tau: str) -> Stops:
  """Stops of SmolLM2's walks over 8K tokens, one a KV head, whose query heads stop together."""
  costs = json.loads((STUDY / f"tile128_8192_{order}.json").read_text())["groups"][tau]
  return Stops(costs["stopped"], 1 - (1 - costs["visited"]) / costs["stopped"])


def stops(base: str) -> dict[str, Stops]:
  """The cases of a base: recorded newest first where it pins no first tokens, else those first."""
  order = "newest" if base == "Full" else "sinks"
  made = {"1e-5": recorded(order, "ART"), "1e-2": recorded(order, "tau 0.01")}
  if base == "Full":
    # Time of its kernel with ART over time without (Tab. 3 and 6), as if all heads stopped alike.
    made["paper"] = Stops(1.0, 0.633 / 0.78)
  return made


def bases(tokens: int) -> dict[str, kvjax.Method]:
  """The paper's bases by name, with its settings (App. D), the most important first."""
  low, high = tokens // 5, tokens * 4 // 5

  def pyramid(budget: int) -> kvjax.Method:
    return kvjax.PyramidKV(budget, window_size=min(128, budget // 4))

  def snap(budget: int) -> kvjax.Method:
    return kvjax.SnapKV(budget, window_size=min(32, budget // 4), reduce="max")

  return {
    "Full": kvjax.Full(),
    "StreamingLLM 0.2": kvjax.StreamingLLM(low, rope="original"),
    "SnapKV 0.2": snap(low),
    "PyramidKV 0.2": pyramid(low),
    "StreamingLLM 0.8": kvjax.StreamingLLM(high, rope="original"),
    "SnapKV 0.8": snap(high),
  }


@suite
def cases(quick: bool, peers: bool) -> Iterator[tuple]:
  """Every base at every shape, the most important ones first."""
  name = "tiny" if quick else "Llama-3.1-8B"
  for batch, thousands in [(2, 0.5)] if quick else SHAPES:
    tokens = int(thousands * 1024)
    for base in ("Full", "SnapKV 0.2") if quick else bases(tokens):
      yield f"{base} {name} B{batch} T{thousands:g}K", case, name, base, batch, tokens
  name, batch, tokens = ("tiny", 2, 512) if quick else ("Qwen2.5-1.5B", 8, 32 << 10)
  yield f"known {name} B{batch} T{tokens}", known_case, name, batch, tokens


def case(title: str, name: str, base: str, batch: int, tokens: int) -> Case:
  """A step of the base, of the base with ART at each of its shares, and of the full cache."""
  model, quick, method = weights(name), name == "tiny", bases(tokens)[base]
  ends = stops(base)
  forced = {label: over(method, end, quick) for label, end in ends.items()}
  subject = f"ART {next(iter(forced))}"
  ways: dict[str, tuple[kvjax.Method, float]] = {"Full": (kvjax.Full(), 1.0), base: (method, 1.0)}
  ways |= {f"ART {label}": (art, ends[label].stopped) for label, art in forced.items()}
  logged = [functools.partial(logits, name, base, impl) for impl in ("pallas", "reference")]
  # Logits too are made, and kept, beside what compiles: that is most of this suite's time.
  *seconds, _, _ = together(
    [
      *(functools.partial(timed, model, m, batch, tokens, end) for m, end in ways.values()),
      *logged,
    ]
  )
  contenders = [
    Contender(label, run, logged[0] if label == subject else None)
    for label, run in zip(ways, seconds, strict=True)
  ]
  full, held = (cache_bytes(model, m, batch, tokens) for m in (kvjax.Full(), method))
  shares = {
    label: visited(model, wrapped, ends[label].stopped, batch, tokens)
    for label, wrapped in forced.items()
  }

  def figures(taken: dict[str, float]) -> dict[str, Any]:
    """Gain that the bytes allow over the full cache, and the paper's gains."""
    mistral, llama, by_length = PAPER[base]
    found: dict[str, Any] = {"paper, Mistral-7B": mistral, "paper, Llama-3.1-70B": llama}
    if tokens >> 10 in by_length:
      found["paper, Qwen3-8B"] = by_length[tokens >> 10]
    dense, rate = taken["Full"], this_device().read
    if base != "Full":
      found[f"{base}, bytes allow"] = dense / (dense - (full - held) / rate)
    for label, share in shares.items():
      found[f"ART {label}, heads that stop, where"] = ends[label]
      found[f"ART {label}, visited"] = share
      found[f"ART {label}, bytes allow"] = dense / (dense - (full - share * held) / rate)
    return found

  return Case(
    name=title,
    shapes=f"{method!r}; {model.dtype.name}; compared over two layers",
    bytes=held,
    reference=logged[1],
    tolerance=1e-4 if model.dtype == jnp.float32 else 5e-2,
    contenders=contenders,
    subject=subject,
    figures=figures,
  )


def known_case(title: str, name: str, batch: int, tokens: int) -> Case:
  """A step of the full cache, of known lengths where nothing stops, and at 0.6 of the tiles."""
  model, quick = weights(name), name == "tiny"
  tile = 4 if quick else 128
  ways = {"Full": kvjax.Full(), "ART, known": Held(tile=tile)}
  ways["ART, known, 0.6"] = Held(tile=tile, after=0.6)

  @functools.cache
  def logged(impl: str) -> np.ndarray:
    small, size = few_layers(*shape(name), 2), (2, 512) if quick else (8, 8192)
    held = jax.jit(functools.partial(filled, small, ways["ART, known, 0.6"], *size, 1.0))
    return step_logits(small, ways["ART, known, 0.6"], impl, held(jax.random.key(0)))

  seconds = together([functools.partial(timed, model, m, batch, tokens) for m in ways.values()])
  subject = "ART, known, 0.6"
  contenders = [
    Contender(label, run, functools.partial(logged, "pallas") if label == subject else None)
    for label, run in zip(ways, seconds, strict=True)
  ]
  held = cache_bytes(model, kvjax.Full(), batch, tokens)

  def figures(taken: dict[str, float]) -> dict[str, float]:
    saved = 0.4 * held / this_device().read
    return {f"{subject}, bytes allow": taken["Full"] / (taken["Full"] - saved)}

  return Case(
    name=title,
    shapes=f"{ways['ART, known']!r}; {model.dtype.name}; compared over two layers",
    bytes=held,
    reference=functools.partial(logged, "reference"),
    tolerance=1e-4 if model.dtype == jnp.float32 else 5e-2,
    contenders=contenders,
    subject=subject,
    figures=figures,
  )


def over(method: kvjax.Method, end: Stops, quick: bool) -> Forced:
  """ART over a base with its stops forced."""
  sizes: dict[str, Any] = {"tile": 4, "splits": 2} if quick else {}
  return Forced(method, after=end.after, **sizes)


def visited(model: Transformer, method: Forced, stopped: float, batch: int, tokens: int) -> float:
  """Share of all tiles, layers weighed by their caches, that forced walks take."""
  sizes = [cache.size for cache in caches_of(model, method, batch, tokens)]
  heads = batch, model.config.kv_heads
  taken = []
  for layer, size in enumerate(sizes):
    share = float(np.mean(stopping(*heads, layer, stopped)))
    taken.append(share * method.visited(heads, size) + 1 - share)
  return float(np.average(taken, weights=sizes))


def stopping(batch: int, kv_heads: int, layer: int, share: float) -> np.ndarray:
  """bool [B, K], spread evenly: the heads whose walks stop."""
  golden = (5**0.5 - 1) / 2
  index = np.arange(batch * kv_heads) + layer * batch * kv_heads
  return ((index * golden) % 1 < share).reshape(batch, kv_heads)


def caches_of(model: Transformer, method: kvjax.Method, batch: int, tokens: int) -> Any:
  """Abstract caches."""
  spec = model.spec(batch, tokens + STEPS)
  return jax.eval_shape(lambda: method.init_caches(spec))


def cache_bytes(model: Transformer, method: kvjax.Method, batch: int, tokens: int) -> int:
  """Keys and values that a step of the base reads."""
  c, key = model.config, model.config.head_dim * model.dtype.itemsize
  sizes = [min(cache.size, tokens) for cache in caches_of(model, method, batch, tokens)]
  return 2 * batch * c.kv_heads * key * sum(sizes)


def filled(
  model: Transformer, method: kvjax.Method, batch: int, tokens: int, stopped: float, key: Any
) -> Any:
  """Caches after `tokens` tokens, full where they are bounded; values of all but `stopped` of the
  heads are loud. One row's tokens in all rows and layers.
  """
  spec = dataclasses.replace(model.spec(batch, tokens + STEPS), batch=1)
  keys = jax.random.split(key, 3)

  def layer(i: int) -> Any:
    cache = kvjax.Cache.empty(method, spec, i)
    size, slot = cache.size, jnp.arange(cache.size)
    used = min(size, tokens)
    pos = jnp.where(slot < 4, slot, slot + tokens - used)  # first tokens, then the newest
    pos = jnp.where(slot < used, pos, -1).astype(jnp.int32)
    shapes = [cache.slots[name].shape for name in "kv"]
    k, v = (jax.random.normal(x, s, spec.dtype) for x, s in zip(keys, shapes, strict=False))
    slots = {**cache.slots, "k": k, "v": v, "pos": jnp.broadcast_to(pos, cache.pos.shape)}
    if "score" in slots:  # those that were chosen, then the window, which nothing has ranked
      base = getattr(method, "base", method)
      score = jax.random.uniform(keys[2], cache.pos.shape)
      slots["score"] = jnp.where(slot >= size - base.window_size, jnp.inf, score)
    rows = {name: jnp.full(1, n, jnp.int32) for name, n in (("seen", tokens), ("used", used))}
    at = method.at(dataclasses.replace(model.env, impl="reference"), i)
    prompt = kvjax.Prompt(rows["seen"], rows["seen"], None, tokens, 0)
    made = method.settle(at, cache.put(slots=slots, rows=rows), prompt)
    made = jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape[1:])), made)
    quiet = stopping(batch, spec.kv_heads, i, stopped)[..., None, None]
    return made.put(slots={"v": made.slots["v"] * jnp.where(quiet, 1, LOUD).astype(spec.dtype)})

  return tuple(layer(i) for i in range(spec.layers))


@functools.lru_cache(maxsize=8)
def timed(
  model: Transformer, method: kvjax.Method, batch: int, tokens: int, stopped: float = 1.0
) -> Any:
  """A function that gives the seconds of a step, in compiled programs of STEPS steps."""
  impl = "auto" if jax.default_backend() == "gpu" else "reference"
  fill = jax.jit(functools.partial(filled, model, method, batch, tokens, stopped))
  made = functools.partial(fill, jax.random.key(0))
  return e2e_sparse.timed(model, method, impl, batch, tokens, lambda *_: made())


@functools.cache
def logits(name: str, base: str, impl: str) -> np.ndarray:
  """Logits of one step of eight rows after 8K tokens, stops of the first case forced."""
  model, quick = few_layers(*shape(name), 2), name == "tiny"
  batch, tokens = (2, 512) if quick else (8, 8192)
  end = next(iter(stops(base).values()))
  method = over(bases(tokens)[base], end, quick)
  fill = jax.jit(functools.partial(filled, model, method, batch, tokens, end.stopped))
  return step_logits(model, method, impl, fill(jax.random.key(0)))
