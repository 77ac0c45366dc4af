"""Remake ART's studies on recorded activations: stops, ablation, probe, theorems.

    kvjax record recorded.npz --layers 0 1 … --length 2048 --stride 16
    kvjax art-study recorded.npz --tile 32 --out scripts/results/art_study

Walks the keys of every recorded query to the end, from the newest tile to the first, as the paper
does over a full cache, and once more with the tile of the first tokens before all others; and asks
each detector where it would have stopped. Remakes the convergence curve (Fig. 4), the ablation
(Tab. 3), the sensitivity to τ, φ and p (Figs. 6 and 7), the agreement of probe and oracle (Tab. 4),
and how Theorems 1 and 2 compare with the error, in terms of the output and not of task scores.
Queries whose newest tile is not whole are left out.
"""

import collections
import dataclasses
import itertools
import json
import math
import pathlib
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import tyro

from kvjax.analysis import early_stops
from kvjax.models.io import files
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
  recording: Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="NPZ")]
  """A file of `kvjax record`."""
  tile: int = 128
  """Keys per tile of the walk."""
  least: int = 8
  """Tiles that a query must see at least to be counted."""
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
  for layer in sorted(int(name[5:-2]) for name in arrays if name.endswith("/q")):
    q, k, v = (np.float64(arrays[f"layer{layer}/{name}"]) for name in "qkv")
    part, mass = _of_tiles(q[:, :, able], k, v, tokens, tile)
    length = np.linalg.norm(v, axis=-1)
    for i, seen in enumerate(tokens.tolist()):
      # The order within a tile is all one.
      index = np.arange(seen // tile)[::-1]
      if order == "sinks":
        index = np.roll(index, 1)
      longest = length[:, None, :seen].max(-1)
      yield layer, seen, early_stops.over_tiles(part[:, :, i, index], mass[:, :, i, index], longest)


def _of_tiles(
  q: np.ndarray, k: np.ndarray, v: np.ndarray, tokens: np.ndarray, tile: int
) -> tuple[np.ndarray, np.ndarray]:
  """Operands of `early_stops.over_tiles`, of every tile, [K, G, A, T, H] and [K, G, A, T].

  Queries [K, G, A, H] share the tiles of keys and values [K, S, H], of which each sees the first
  `tokens` [A].
  """
  heads, groups, count, size = q.shape
  end = tokens.max()
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


# ---- what is written


def tables(found: dict[str, Any], about: str) -> str:
  """The tables as text: Tabs. 3 and 4, Figs. 6 and 7, Theorems 1 and 2.

  The error is ‖o(T) − o(t)‖ / ‖o(T)‖, its mean that over all walks, the unstopped ones too; those
  that can stop before their end are over p + 1 tiles in a split.
  """
  lines = [about, f"{found['walks']:,} walks, {found['order']}, tiles of {found['tile']} keys"]
  return "\n".join([*lines, *sheets.tables(found)]) + "\n"


def _plain(x: Any) -> Any:
  """x with null for NaN, which JSON does not know."""
  known = {"NaN": None, "Infinity": math.inf, "-Infinity": -math.inf}
  return json.loads(json.dumps(x), parse_constant=known.__getitem__)


def main(args: Args) -> None:
  common.check_numbers(args, tile=1, least=0)
  if not args.recording.exists():
    raise FileNotFoundError(
      f"recording: found no {args.recording}, expected a file of kvjax record"
    )
  whole = files.whole(args.recording, "a file of kvjax record")
  with whole, args.recording.open("rb") as file, np.load(file) as held:
    arrays = dict(held)
    about, tokens = json.loads(str(arrays.pop("about"))), len(arrays["tokens"])
  title = f"{about['model']} on {about['text']}, {tokens:,} tokens"
  for order in ORDERS:
    found = study(arrays, args.tile, args.least, order)
    text, stem = tables(found, title), args.out / f"tile{args.tile}_{tokens}_{order}"
    sheets.write(stem.with_suffix(".txt"), text)
    sheets.write(stem.with_suffix(".json"), _plain({"about": about, **found}))
    print(text)


if __name__ == "__main__":
  common.run(main, Args)
