"""Remake ART's studies on recorded activations: stops, ablation, probe, theorems.

    kvjax record recorded.npz --layers 0 1 … --length 2048 --stride 16
    kvjax art-study recorded.npz --tile 32 --out scripts/results/art_study

Walks the keys of every recorded query to the end, from the newest tile to the first, as the paper
does over a full cache, and once more with the tile of the first tokens before all others; and asks
each detector where it would have stopped. Remakes the convergence curve (Fig. 4), the ablation
(Tab. 3), the sensitivity to τ, φ and p (Figs. 6 and 7), the agreement of probe and oracle (Tab. 4),
and how Theorems 1 and 2 compare with the error, in terms of the output and not of task scores.
Queries whose newest tile is not whole are left out.

    kvjax record a.npz --layers 0 3 … --length 8192 --stride 1 --start …
    kvjax art-study a.npz --fit b.npz

asks what groups read at a mean error of 1 %, step after step, by either test and in three orders;
and what known lengths add. The τ of each is the largest that keeps to this error on the other text.
"""

import collections
import dataclasses
import functools
import itertools
import json
import math
import pathlib
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import tyro

from kvjax.analysis import early_stops
from kvjax.methods.art import known
from kvjax.programs import common
from scripts.studies import sheets

TAU, PHI, PATIENCE = 1e-5, 1e-3, 5  # the paper's
LOADED = np.linspace(0.05, 1, 20)  # shares of the tiles at which Fig. 4's error is taken
TAUS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
PHIS = (1e-4, 1e-3, 1e-2, 1e-1)
PATIENCES = (1, 2, 5, 10)
SPLITS = (1, 2, 4, 8)
BOTH = (TAU, 1e-2)  # τ of what is not swept


@dataclasses.dataclass(frozen=True)
class Args:
  """Remakes ART's studies on the q, k and v that scripts.studies.record saved."""

  recording: Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="NPZ")]
  """A file of scripts.studies.record."""
  tile: int = 128
  """Keys per tile of the walk."""
  least: int = 8
  """Tiles that a query must see at least to be counted."""
  fit: tuple[pathlib.Path, ...] = ()
  """Recordings of other texts, of every position: with these, what groups read step after step at
  a mean error of 1 %, the τ of each test fitted on them."""
  out: pathlib.Path = pathlib.Path("scripts/results/art_study")
  """Folder of the tables and of the numbers; made if need be."""


ORDERS = {"newest": "newest tile first", "sinks": "first tile, then newest first"}


def walks(
  arrays: dict[str, np.ndarray], tile: int, least: int, order: str
) -> Iterator[tuple[int, int, early_stops.Walk]]:
  """Every layer and position whose keys make whole tiles, at least `least` of them.

  Yields:
    The layer, the tokens up to the position, and the walks of its query heads [K, G].
  """
  tokens = arrays["positions"] + 1
  able = (tokens % tile == 0) & (tokens >= least * tile)
  if not able.any():
    return
  tokens = tokens[able]
  for layer in _layers(arrays):
    q, k, v = (np.float64(arrays[f"layer{layer}/{name}"]) for name in "qkv")
    part, mass = _of_tiles(q[:, :, able], k, v, tokens, tile, tokens.max())
    length = np.linalg.norm(v, axis=-1)
    for i, seen in enumerate(tokens.tolist()):
      # The order within a tile is all one.
      index = np.arange(seen // tile)[::-1]
      if order == "sinks":
        index = np.roll(index, 1)
      longest = length[:, None, :seen].max(-1)
      yield layer, seen, early_stops.over_tiles(part[:, :, i, index], mass[:, :, i, index], longest)


def _layers(arrays: dict[str, np.ndarray]) -> list[int]:
  return sorted(int(name[5:].split("/")[0]) for name in arrays if name.endswith("/q"))


def _of_tiles(
  q: np.ndarray, k: np.ndarray, v: np.ndarray, tokens: np.ndarray, tile: int, end: int
) -> tuple[np.ndarray, np.ndarray]:
  """Operands of `early_stops.over_tiles`, of every tile, [K, G, A, T, H] and [K, G, A, T].

  Queries [K, G, A, H] share the tiles of the first `end` keys and values [K, S, H], of which each
  sees the first `tokens` [A].
  """
  heads, groups, count, size = q.shape
  logits = q.reshape(heads, -1, size) @ np.swapaxes(k[:, :end], 1, 2) / np.sqrt(size)
  logits = logits.reshape(heads, groups, count, end)
  logits = np.where(np.arange(end) < tokens[:, None], logits, -np.inf)
  weight = np.exp(logits - logits.max(-1, keepdims=True))
  weight = weight.reshape(heads, groups * count, -1, tile)
  part = np.swapaxes(weight, 1, 2) @ v[:, :end].reshape(heads, -1, tile, size)  # [K, T, G·A, H]
  part = np.swapaxes(part, 1, 2).reshape(heads, groups, count, -1, size)
  return part, weight.sum(-1).reshape(heads, groups, count, -1)


@dataclasses.dataclass(frozen=True)
class Stops:
  """Ends of the walks of one layer from one position, at one τ.

  Attributes:
    kind: of whom: each "query head" [K, G], or the "group" of a KV head [K, 1].
    probed, oracle: tiles at which the probe, and one that sees the whole output, stop.
    visited: share of the tiles that the probe's walks read.
    found: what stopping costs each query head whose walk ended.
  """

  kind: str
  tau: float
  layer: int
  tokens: int
  probed: np.ndarray
  oracle: np.ndarray
  visited: np.ndarray
  found: early_stops.Truncation


def cost(walk: early_stops.Walk, stop: np.ndarray, patience: int) -> np.ndarray:
  """Of each query head the share of the tiles that it reads, its error, and whether it was able to
  stop before its end: [3, K·G].
  """
  tiles, stop = walk.o.shape[-2], np.broadcast_to(stop, walk.mass.shape[:-1])
  able = early_stops.can_stop(tiles, 1, 1, patience)
  return _cost(early_stops.read(stop, tiles) / tiles, early_stops.error(walk, stop), able)


def cost_of_splits(
  walk: early_stops.Walk, parts: list[early_stops.Walk], moved: list[Any], tau: float
) -> np.ndarray:
  """`cost` of a walk in splits, each with its `movements`."""
  ends = (early_stops.stops_of_movements(*each, tau, PHI, PATIENCE) for each in moved)
  o, read = early_stops.joined(parts, [np.broadcast_to(x, walk.mass.shape[:-1]) for x in ends])
  tiles, last = walk.o.shape[-2], walk.o[..., -1, :]
  apart = np.linalg.norm(o - last, axis=-1) / np.linalg.norm(last, axis=-1)
  return _cost(read / tiles, apart, early_stops.can_stop(tiles, 1, len(parts), PATIENCE))


def _cost(visited: np.ndarray, errors: np.ndarray, able: bool) -> np.ndarray:
  return np.stack([visited.ravel(), errors.ravel(), np.full(errors.size, able)])


def summary(costs: list[np.ndarray]) -> dict[str, float]:
  """Means over all walks of one detector."""
  visited, errors, able = np.concatenate(costs, 1)
  stopped = visited < 1
  return {
    "visited": float(visited.mean()),
    "able": float(able.mean()),
    "stopped": float(stopped.mean()),
    "stopped_of_able": float(stopped[able > 0].mean()) if able.any() else math.nan,
    "error": float(errors.mean()),
    "error_p99": float(np.quantile(errors, 0.99)),
    "far_off": float((errors > 0.1).mean()),
  }


KINDS = "query head", "group"  # who stops: each by itself, or those of a KV head together
DETECTORS: dict[str, tuple[float, float, int]] = {
  # (τ, φ, p): the paper's, each of its tests left out (Tab. 3), sweeps (Figs. 6, 7).
  "ART": (TAU, PHI, PATIENCE),
  "without scale": (math.inf, PHI, PATIENCE),
  "without direction": (TAU, math.inf, PATIENCE),
  "without patience": (TAU, PHI, 1),
  "without direction at tau 0.01": (1e-2, math.inf, PATIENCE),
  **{f"tau {tau:g}": (tau, PHI, PATIENCE) for tau in TAUS},
  **{f"phi {phi:g} at tau 0.01": (1e-2, phi, PATIENCE) for phi in PHIS},
  **{f"p {p} at tau 0.01": (1e-2, PHI, p) for p in PATIENCES},
}
SPLIT = [f"tau {tau:g}, {n} splits" for tau in BOTH for n in SPLITS]


def study(arrays: dict[str, np.ndarray], tile: int, least: int, order: str) -> dict[str, Any]:
  """All numbers of the tables and pictures, for one of ORDERS.

  Raises:
    ValueError: no recorded query sees `least` whole tiles.
  """
  costs: dict[tuple[str, str], list[np.ndarray]] = collections.defaultdict(list)  # by detector
  alike: dict[float, list[np.ndarray]] = {tau: [] for tau in BOTH}
  curves: dict[int, list[np.ndarray]] = {}
  stops: list[Stops] = []
  for layer, tokens, walk in walks(arrays, tile, least, order):
    tiles, heads = walk.o.shape[-2], walk.mass.shape[:-1]
    seen, whole = _moved(early_stops.probe(walk.o)), _moved(walk.o)
    for kind, (name, detector) in itertools.product(KINDS, DETECTORS.items()):
      stop = early_stops.stops_of_movements(*seen[kind], *detector)
      costs[kind, name].append(cost(walk, stop, detector[-1]))
    for count in SPLITS:
      parts = early_stops.splits(walk, count)
      moved = [_moved(early_stops.probe(part.o)) for part in parts]
      for kind, tau in itertools.product(KINDS, BOTH):
        split = cost_of_splits(walk, parts, [x[kind] for x in moved], tau)
        costs[kind, f"tau {tau:g}, {count} splits"].append(split)
    read = np.maximum(np.ceil(LOADED * tiles).astype(int), 1)
    errors = [early_stops.error(walk, np.full(heads, t)) for t in read]
    curves.setdefault(layer, []).append(np.stack(errors, -1).reshape(-1, len(LOADED)))
    for tau, kind in itertools.product(BOTH, KINDS):
      probed, oracle = (
        early_stops.stops_of_movements(*x[kind], tau, PHI, PATIENCE) for x in (seen, whole)
      )
      if kind == "query head":
        free = early_stops.stops_of_movements(*seen[kind], tau, math.inf, PATIENCE)
        alike[tau].append(free == probed)
      ended = np.broadcast_to(probed, heads)
      found = early_stops.truncation(walk, ended, tau, PATIENCE)
      found = early_stops.Truncation(*(part[ended != early_stops.NEVER] for part in found))
      visited = early_stops.read(probed, tiles) / tiles
      stops.append(Stops(kind, tau, layer, tokens, probed, oracle, visited, found))
  if not stops:
    raise ValueError(f"recording: found no query that sees {least} whole tiles of {tile} keys")

  def chosen(**wanted: Any) -> list[Stops]:
    return [s for s in stops if all(getattr(s, name) == x for name, x in wanted.items())]

  def agreed(**wanted: Any) -> dict[str, Any]:
    some = chosen(**wanted)
    both = (np.concatenate([getattr(s, n).ravel() for s in some]) for n in ("probed", "oracle"))
    return early_stops.agreement(*both)._asdict()

  def agreements(kind: str) -> dict[str, Any]:
    return {
      f"{tau:g}": {
        **{f"{n} tokens": agreed(kind=kind, tau=tau, tokens=n) for n in halves},
        **{f"layer {n}": agreed(kind=kind, tau=tau, layer=n) for n in _some(list(curves))},
        "all": agreed(kind=kind, tau=tau),
      }
      for tau in BOTH
    }

  def bounds(kind: str) -> dict[str, Any]:
    return {f"{tau:g}": _bounds([s.found for s in chosen(kind=kind, tau=tau)]) for tau in BOTH}

  def share(kind: str, tau: float, layer: int) -> list[Any]:
    some = chosen(kind=kind, tau=tau, layer=layer)
    return np.mean([s.visited for s in some], 0).round(4).tolist()

  def visits(kind: str, tau: float, tokens: int) -> float:
    return float(np.mean([s.visited for s in chosen(kind=kind, tau=tau, tokens=tokens)]))

  def summaries(kind: str, *names: str) -> dict[str, Any]:
    return {name: summary(costs[kind, name]) for name in names}

  lengths = sorted({s.tokens for s in stops})
  halves = [n for n in lengths if n in (lengths[0], lengths[len(lengths) // 2], lengths[-1])]
  return {
    "order": ORDERS[order],
    "tile": tile,
    "walks": sum(x.shape[1] for x in costs["query head", "ART"]),
    "costs": summaries("query head", *DETECTORS),
    "splits": summaries("query head", *SPLIT),
    "groups": summaries("group", *DETECTORS, *SPLIT),
    "lengths": {
      f"{tau:g}": {
        f"{n} tokens": {kind: visits(kind, tau, n) for kind in KINDS} for n in _few(lengths)
      }
      for tau in BOTH
    },
    "without_direction": {
      f"{tau:g}": {"walks": sum(x.size for x in found), "same_stop": int(sum(map(np.sum, found)))}
      for tau, found in alike.items()
    },
    "curves": {
      layer: np.quantile(np.concatenate(found), (0.5, 0.9), 0).tolist()
      for layer, found in curves.items()
    },
    "heads": {
      f"{tau:g}": {layer: {kind: share(kind, tau, layer) for kind in KINDS} for layer in curves}
      for tau in BOTH
    },
    "agreement": agreements("query head"),
    "group_agreement": agreements("group"),
    "bounds": bounds("query head"),
    "group_bounds": bounds("group"),
  }


def _moved(outputs: np.ndarray) -> dict[str, Any]:
  """By kind, how outputs move from tile to tile."""
  found = early_stops.movements(outputs)
  return dict(zip(KINDS, (found, early_stops.of_group(*found)), strict=True))


def _few(listed: list[Any]) -> list[Any]:
  """At most eight, evenly apart, the last one among them."""
  return listed[::-1][:: math.ceil(len(listed) / 8)][::-1]


def _some(layers: list[int]) -> list[int]:
  """The first, middle and last of the recorded layers."""
  return sorted({layers[0], layers[len(layers) // 2], layers[-1]})


def _bounds(found: list[early_stops.Truncation]) -> dict[str, float | int]:
  """Share of stops where the bound's premise holds, and its values there and elsewhere."""
  actual, bound, decays, assumption = (np.concatenate(x) for x in zip(*found, strict=True))
  if not actual.size:
    return {"stops": 0}

  def ratio(ok: np.ndarray) -> float:
    some = ok & (actual > 0)
    return float(np.median(bound[some] / actual[some])) if some.any() else math.nan

  return {
    "stops": actual.size,
    "decays": float(decays.mean()),
    "assumption": float(assumption.mean()),
    "violations_where_it_decays": int((decays & (actual > bound * (1 + 1e-9) + 1e-12)).sum()),
    "violations_elsewhere": int((~decays & (actual > bound)).sum()),
    "bound_over_error_where_it_decays": ratio(decays),
    "bound_over_error": ratio(np.ones_like(decays)),
  }


# ---- step after step


ERROR = 0.01  # mean, of each fitted τ
ENDS, STEPS = (4544, 8128), 64  # tokens at the last of so many steps
WINDOW = 32  # queries before the first step whose mass begins an order, as SnapKV's
DECAY = 0.5  # of a tile's mass from step to step, in an order by it
TAU_RANGE, SEARCH = (1e-6, 0.3), 8
EVERY = 32  # steps between walks of everything, in such an order


@dataclasses.dataclass(frozen=True)
class Rule:
  """A way to walk: its order, its test, and the margin of known lengths, if any."""

  order: str
  relative: bool
  margin: int | None = None


@dataclasses.dataclass
class Reads:
  """Tiles that groups read, step by step, and the errors of their query heads.

  Attributes:
    share: of the tiles, [K] of each step and layer.
    errors: [K, G].
    longer: whether a walk read everything beyond its known length.
  """

  share: list[np.ndarray] = dataclasses.field(default_factory=list)
  errors: list[np.ndarray] = dataclasses.field(default_factory=list)
  longer: list[np.ndarray] = dataclasses.field(default_factory=list)

  def summary(self) -> dict[str, float]:
    share, errors, longer = (np.array(x) for x in (self.share, self.errors, self.longer))
    return {
      "read": float(share.mean()),
      "error": float(errors.mean()),
      "error_p99": float(np.quantile(errors, 0.99)),
      "longer": float(longer.mean()),
    }


RULES = {
  "the paper's test, newest first": Rule("newest", False),
  "the paper's test, first tile first": Rule("sinks", False),
  "relative test, newest first": Rule("newest", True),
  "relative test, first tile first": Rule("sinks", True),
  "the paper's test, by mass": Rule("mass", False),
  "relative test, by mass": Rule("mass", True),
  "relative test, by this step's mass": Rule("oracle", True),
}
MARGINS = 2, 4, 8
RULES |= {f"the same, known lengths, margin {m}": Rule("sinks", True, m) for m in MARGINS}


@dataclasses.dataclass(frozen=True)
class Segment:
  """Consecutive steps of a layer: operands of `over_tiles` in order of position, [K, G, A, T, …],
  tokens seen [A], and the mass of each tile for the queries before, [K, T].
  """

  part: np.ndarray
  mass: np.ndarray
  tokens: np.ndarray
  begun: np.ndarray


def segments(arrays: dict[str, np.ndarray], tile: int) -> Iterator[Segment]:
  """`STEPS` steps up to each of `ENDS` tokens, of every layer.

  Raises:
    ValueError: a position was not recorded.
  """
  held = (arrays["positions"] + 1).tolist()
  for layer, end in itertools.product(_layers(arrays), ENDS):
    tokens = np.arange(end - STEPS - WINDOW, end) + 1
    if not set(tokens.tolist()) <= set(held):
      raise ValueError(f"recording: found no query of each of {tokens[0]} to {end} tokens")
    at = slice(held.index(int(tokens[0])), held.index(end) + 1)
    q, k, v = (np.float64(arrays[f"layer{layer}/{name}"]) for name in "qkv")
    whole = -(-end // tile) * tile
    part, mass = _of_tiles(q[:, :, at], k[:, :whole], v[:, :whole], tokens, tile, whole)
    share = mass / mass.sum(-1, keepdims=True)
    begun = share[:, :, :WINDOW].mean(2).max(1)
    yield Segment(part[:, :, WINDOW:], mass[:, :, WINDOW:], tokens[WINDOW:], begun)


@dataclasses.dataclass(frozen=True)
class Step:
  """A walk to its end: the `movements` of groups [K, T], and what each query head is off at every
  tile, [K, G, T]; tiles in visiting order [K, T] and their mass [K, G, T].
  """

  scale: np.ndarray
  turn: np.ndarray
  errors: np.ndarray
  index: np.ndarray
  mass: np.ndarray


def step_of(segment: Segment, i: int, tile: int, rule: Rule, score: np.ndarray) -> Step:
  """The walk of step i, in an order by `score` where the rule has one."""
  count = -(-int(segment.tokens[i]) // tile)
  mass = segment.mass[:, :, i]
  share = mass / mass.sum(-1, keepdims=True)
  index = _ordered(rule.order, count, score, share.max(1))
  part = np.take_along_axis(segment.part[:, :, i], index[:, None, :, None], 2)
  mass = np.take_along_axis(mass, index[:, None], 2)
  o = early_stops.over_tiles(part, mass, np.ones(mass.shape[:-1])).o
  moved = early_stops.movements(early_stops.probe(o), rule.relative)
  scale, turn = (x[:, 0] for x in early_stops.of_group(*moved))
  last = o[:, :, -1:]
  errors = np.linalg.norm(o - last, axis=-1) / np.linalg.norm(last, axis=-1)
  return Step(scale, turn, errors, index, mass)


def walk_steps(
  steps: Iterator[Step] | list[Step], rule: Rule, tau: float, reads: Reads
) -> Iterator[np.ndarray]:
  """Adds the walks of a segment by a rule to `reads`; yields what each step's groups read."""
  held: Any = 0
  for i, step in enumerate(steps):
    count, scale = step.scale.shape[-1], step.scale
    length = np.where(held > 0, np.minimum(held, count), count) * np.ones(len(scale), int)
    if rule.margin is not None:
      judged = np.arange(count) >= (length - known.tail(PATIENCE, rule.margin))[:, None]
      scale = np.where(judged, scale, np.inf)
    stop = early_stops.stops_of_movements(scale, step.turn, tau, PHI, PATIENCE)
    read = early_stops.read(stop, count)
    if rule.order == "mass" and i % EVERY == 0:
      read = np.full_like(read, count)
    longer = np.zeros(len(read), bool)
    if rule.margin is not None:
      stopped = (stop != early_stops.NEVER) & (stop <= length)
      longer = ~stopped & (length < count)
      read = np.where(stopped, length, count)
      after = np.maximum(stop + rule.margin, length - known.fall(rule.margin))
      on = np.where(longer, known.lengthened(length, rule.margin), 0)
      held = np.where(stopped, after, on)
    reads.longer.append(longer)
    reads.share.append(read / count)
    at = np.broadcast_to(read[:, None, None] - 1, (*step.errors.shape[:2], 1))
    reads.errors.append(np.take_along_axis(step.errors, at, -1)[..., 0])
    yield read


def by_mass(segment: Segment, tile: int, rule: Rule, tau: float, reads: Reads) -> None:
  """Adds the walks of a segment in the order of earlier steps' mass to `reads`."""
  score, made = segment.begun.copy(), []

  def steps() -> Iterator[Step]:
    for i in range(len(segment.tokens)):
      made.append(step_of(segment, i, tile, rule, score))
      yield made[-1]

  for read in walk_steps(steps(), rule, tau, reads):
    step = made[-1]
    total = np.take_along_axis(step.mass.cumsum(-1), read[:, None, None] - 1, -1)
    new = (step.mass / total).max(1)
    for head, count in enumerate(read):
      seen = step.index[head, :count]
      score[head, seen] = DECAY * score[head, seen] + (1 - DECAY) * new[head, :count]


def _ordered(order: str, count: int, score: np.ndarray, share: np.ndarray) -> np.ndarray:
  """Tiles of each KV head in visiting order, [K, T]; by mass after the first and the newest one."""
  newest = np.arange(count)[::-1]
  if order in ("newest", "sinks"):
    index = np.roll(newest, 1) if order == "sinks" else newest
    return np.broadcast_to(index, (len(score), count))
  rank = (score if order == "mass" else share)[:, :count].copy()
  rank[:, 0], rank[:, count - 1] = np.inf, 1e9
  return np.argsort(-rank, -1, kind="stable")


def by_steps(fit: list[Segment], tested: list[Segment], tile: int) -> dict[str, Any]:
  """For each rule the largest τ of mean error `ERROR` on the texts of `fit`, and its reads."""

  @functools.cache
  def held(fitted: bool, order: str, relative: bool) -> list[list[Step]]:
    """Walks that do not hang on what was read before."""
    rule = Rule(order, relative)
    return [
      [step_of(segment, i, tile, rule, segment.begun) for i in range(len(segment.tokens))]
      for segment in (fit if fitted else tested)
    ]

  def reads(fitted: bool, rule: Rule, tau: float) -> dict[str, float]:
    found = Reads()
    if rule.order == "mass":
      for segment in fit if fitted else tested:
        by_mass(segment, tile, rule, tau, found)
    else:
      for steps in held(fitted, rule.order, rule.relative):
        collections.deque(walk_steps(steps, rule, tau, found), 0)
    return found.summary()

  found: dict[str, Any] = {}
  for name, rule in RULES.items():
    low, high = TAU_RANGE
    for _ in range(SEARCH):  # the error grows with τ
      middle = math.sqrt(low * high)
      small = reads(True, rule, middle)["error"] < ERROR
      low, high = (middle, high) if small else (low, middle)
    found[name] = {"tau": low, "fitted": reads(True, rule, low), **reads(False, rule, low)}
  return found


# ---- what is written


def tables(found: dict[str, Any], about: str) -> str:
  """The tables as text: Tabs. 3 and 4, Figs. 6 and 7, Theorems 1 and 2.

  The error is ‖o(T) − o(t)‖ / ‖o(T)‖, its mean that over all walks, the unstopped ones too; those
  that can stop before their end are over p + 1 tiles in a split.
  """
  lines = [about, f"{found['walks']:,} walks, {found['order']}, tiles of {found['tile']} keys"]
  return "\n".join([*lines, *sheets.tables(found)]) + "\n"


def steps_table(found: dict[str, Any], about: str) -> str:
  """Tiles that groups read step after step, as text."""
  rows = {
    rule: {f"fitted {name}": x for name, x in row["fitted"].items()}
    | {name: x for name, x in row.items() if name != "fitted"}
    for rule, row in found.items()
  }
  return "\n".join([about, *sheets.tables(rows)]) + "\n"


def _plain(x: Any) -> Any:
  """x with null for NaN, which JSON does not know."""
  if isinstance(x, dict):
    return {str(name): _plain(value) for name, value in x.items()}
  if isinstance(x, list | tuple):
    return [_plain(value) for value in x]
  return None if isinstance(x, float) and math.isnan(x) else x


def _load(path: pathlib.Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  with np.load(path) as file:
    arrays = dict(file)
  return arrays, json.loads(str(arrays.pop("about")))


def _main_steps(args: Args, arrays: dict[str, np.ndarray], about: Any, title: str) -> None:
  """Writes what groups read step after step."""
  others = [_load(path) for path in args.fit]
  texts = [other["text"] for _, other in others]
  if about["text"] in texts:
    raise ValueError(f"--fit: found the tested text, {about['text']}, expected others")
  fit = [segment for other, _ in others for segment in segments(other, args.tile)]
  tested = list(segments(arrays, args.tile))
  found = by_steps(fit, tested, args.tile)
  groups = sum(len(segment.mass) for segment in tested)
  facts = {"about": about, "fitted_on": texts, "tile": args.tile, "ends": ENDS, "steps": STEPS}
  facts["walks"] = groups * STEPS
  text = steps_table(found, f"{title}; τ fitted on {', '.join(texts)}")
  stem = args.out / f"steps{args.tile}_{about['text'].split()[-1]}"
  sheets.write(stem.with_suffix(".txt"), text)
  sheets.write(stem.with_suffix(".json"), _plain({**facts, "rules": found}))
  print(text)


def main(args: Args) -> None:
  common.check_numbers(args, tile=1, least=0)
  if not args.recording.exists():
    raise FileNotFoundError(
      f"recording: found no {args.recording}, expected a scripts.studies.record file"
    )
  arrays, about = _load(args.recording)
  tokens = len(arrays["tokens"])
  title = f"{about['model']} on {about['text']}, {tokens:,} tokens"
  if args.fit:
    return _main_steps(args, arrays, about, title)
  for order in ORDERS:
    found = study(arrays, args.tile, args.least, order)
    text, stem = tables(found, title), args.out / f"tile{args.tile}_{tokens}_{order}"
    sheets.write(stem.with_suffix(".txt"), text)
    sheets.write(stem.with_suffix(".json"), _plain({"about": about, **found}))
    print(text)


if __name__ == "__main__":
  common.run(main, Args)
