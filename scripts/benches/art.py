"""ART: what looking at the output costs, and what stopping early saves"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.families import sight
from kvjax.kernels.art import known, spread
from kvjax.kernels.art import walk as art
from kvjax.kernels.decode.dense import decode_attention
from kvjax.kernels.decode.sparse import sparse_decode
from kvjax.methods.art.splits import Walked
from kvjax.programs import suites
from kvjax.programs.suites import Case, Contender, jax_contender, sparse
from kvjax.programs.suites.decode import read_contender, reference, rotated, rotation
from kvjax.testing.decode_cases import Shape

TILE = 128
# What the paper says of its own kernel (Tab. 6): the detector at p = ∞ costs 1.3 %.
DENSE = (Shape(32, 8, 4, 8 << 10), Shape(8, 8, 4, 32 << 10))
DECAYS = (Shape(32, 8, 4, 32 << 10), Shape(8, 8, 4, 128 << 10), Shape(1, 8, 4, 128 << 10))
# One walk a KV head, as the paper has it: Qwen2.5-1.5B's heads, and eight.
LONE = (
  *(Shape(batch, 2, 6, 32 << 10) for batch in (1, 4)),
  Shape(8, 2, 6, 16 << 10),
  *(Shape(1, 8, 4, k << 10) for k in (32, 128)),
  Shape(8, 8, 4, 32 << 10),
)
KNOWN = *DENSE, Shape(1, 8, 4, 128 << 10), Shape(8, 2, 6, 32 << 10)
TAIL = 25  # tiles that the detector looks at of known lengths: of a margin of 16
QUICK = Shape(2, 2, 3, 300, head_dim=64, dtype="float32")
QUICK_STOPS = dataclasses.replace(QUICK, slots=600)  # in tiles of 16 and two splits, walks end
QUICK_TILE = 16
WHOLE = "read of the cache"
RECORDED = pathlib.Path("recorded.npz")  # of scripts.studies.record, in the working folder


@suites.suite
def cases(quick: bool, peers: bool) -> Iterator[tuple]:
  """The cost of looking, then the gain of stopping."""
  for shape in (QUICK,) if quick else DENSE:
    yield f"p=inf {shape.name}", dense_case, shape, quick
  shape = QUICK if quick else DENSE[1]
  for unit, budget in ((16, 128),) if quick else ((16, 8192), (128, 8192)):
    yield f"p=inf {shape.name} unit {unit}", sparse_case, shape, unit, budget, quick
  shapes = (QUICK_STOPS,) if quick else DECAYS
  decays = [(shape, "") for shape in shapes]
  for shape, lengths in [*decays, (shapes[0], "longest first"), (shapes[0], "all alike")]:
    name = f"decay {shape.name}" + f", {lengths}" * bool(lengths)
    tile = QUICK_TILE if quick else TILE
    make = functools.partial(decaying, shape, tile=tile, lengths=lengths)
    yield name, stopping_case, shape, make, quick
  for shape in (QUICK_STOPS,) if quick else LONE:
    yield f"lone {shape.name}", lone_case, shape, quick
  for shape in (QUICK,) if quick else KNOWN:
    for share, lengths in ((1.0, "nothing stops"), (0.6, "all stop"), (0.6, "ragged")):
      yield f"known {shape.name}, {lengths}", known_case, shape, share, lengths, quick
  if RECORDED.exists():
    yield "recorded", recorded_case, quick


# ---- what the detector costs


def dense_case(name: str, shape: Shape, quick: bool) -> Case:
  """The whole cache, newest first, without an end, against our dense decode."""
  inputs, calls = rotated(shape, quick)
  peer = jax_contender("dense decode", decode_attention, inputs, output=lambda x: x.o, calls=calls)
  want = functools.partial(reference, *inputs[0])
  return _overhead_case(name, shape, inputs, calls, whole_walk, peer, want, quick)


def sparse_case(name: str, shape: Shape, unit: int, budget: int, quick: bool) -> Case:
  """A table of `budget` slots of every KV head, without an end, against our sparse decode."""
  arrays, calls = rotated(shape, quick)
  plans = [sparse.plan(i, x[1], shape.groups, unit, budget) for i, x in enumerate(arrays)]
  inputs = [(q, *x[1:3], *rest) for x, (q, *rest) in zip(arrays, plans, strict=True)]
  decode, walk = (functools.partial(run, unit=unit) for run in (sparse_decode, art.walk))
  peer = jax_contender("sparse decode", decode, inputs, output=_out, calls=calls)
  want = functools.partial(sparse.reference, *inputs[0], unit=unit)
  listed = dataclasses.replace(shape, slots=budget)
  return _overhead_case(name, listed, inputs, calls, walk, peer, want, quick)


def _out(result: Any) -> jax.Array:
  """The output of what returns a state first."""
  return result[0].o


def _overhead_case(
  name: str,
  shape: Shape,
  inputs: list[tuple],
  calls: int,
  walk: Callable,
  peer: Contender,
  want: Callable[[], np.ndarray],
  quick: bool,
) -> Case:
  walks = (
    jax_contender(
      label,
      functools.partial(walk, tile=TILE, patience=patience),
      inputs,
      output=_out,
      calls=calls,
    )
    for label, patience in (("ART, p = inf", math.inf), ("ART, not looking", None))
  )
  return Case(
    name=name,
    shapes=f"{shape.name} {shape.dtype}: every tile of {TILE} keys is read and looked at",
    bytes=shape.kv_bytes(),
    reference=want,
    tolerance=1e-5 if quick else 1e-2,
    contenders=[peer, *walks, read_contender(inputs, shape, calls)],
    subject="ART, p = inf",
    paired={"over decode, %": peer.name, "over not looking, %": "ART, not looking"},
  )


# ---- what stopping saves


def decaying(shape: Shape, seed: int, tile: int = TILE, lengths: str = "") -> tuple[jax.Array, ...]:
  """q, k, v in which a tile's mass falls by a factor e every r tiles, counted from the newest.

  r is drawn log-uniformly for each KV head, so that walks end after 5 % to 60 % of the tiles. The
  decay sits in one channel; the others and the values are random. `lengths`: "longest first", the
  heads by r, which no step knows beforehand; "all alike", every head has their mean.
  """
  q, k, v, *_ = shape.arrays(seed)
  tiles = shape.slots / tile
  rates = jax.random.uniform(jax.random.key(seed), k.shape[:2], minval=math.log(0.05), maxval=-0.5)
  if lengths == "longest first":
    rates = -jnp.sort(-rates.ravel()).reshape(rates.shape)
  elif lengths == "all alike":
    rates = jnp.full_like(rates, jnp.log(jnp.exp(rates).mean()))
  per_tile = tiles * jnp.exp(rates) / 14  # after 14 factors e a probe moves by 1e-6 of its size
  behind = jnp.arange(shape.slots - 1, -1, -1) / tile
  logit = -behind / per_tile[..., None]
  size = shape.head_dim**0.5
  return (
    (0.1 * q).at[..., 0].set(size),
    k.at[..., 0].set(logit.astype(k.dtype)),
    v,
  )


def recorded_case(name: str, quick: bool) -> Case:
  """Walks over what a model's layers attended to."""
  with np.load(RECORDED) as file:
    arrays = dict(file)
  return stopping_case(name, *recorded(arrays, 2 if quick else 32), quick)


def recorded(arrays: dict[str, np.ndarray], batch: int) -> tuple[Shape, Callable[[int], Any]]:
  """q, k, v of a model's layers, each row of the batch another layer and query position.

  Keys after the query's position do not exist for it: it is the last of as many slots as it sees.
  """
  layers = sorted({name.split("/")[0] for name in arrays if "/" in name})
  heads, groups, _, head_dim = arrays[f"{layers[0]}/q"].shape
  slots = arrays[f"{layers[0]}/k"].shape[1]
  shape = Shape(batch, heads, groups, slots, head_dim)

  def make(seed: int) -> tuple[jax.Array, ...]:
    rows = []
    for row in range(batch):
      layer = layers[(row + seed) % len(layers)]
      q, k, v = (arrays[f"{layer}/{name}"] for name in "qkv")
      rows.append((q[:, :, -1], k, v))
    return tuple(jnp.asarray(np.stack(x), jnp.bfloat16) for x in zip(*rows, strict=True))

  return shape, make


def turns_of(shape: Shape, make: Callable[[int], tuple[jax.Array, ...]], quick: bool) -> list[Any]:
  """q, k, v and the whole range of slots, of a few seeds."""
  start = jnp.zeros((shape.batch, shape.kv_heads), jnp.int32)
  stop = jnp.broadcast_to(jnp.asarray(shape.lengths())[:, None], start.shape)
  copies = 1 if quick else min(rotation(shape)[0], 4)
  return jax.block_until_ready([(*make(seed), start, stop) for seed in range(copies)])


def whole_walk(q: Any, k: Any, v: Any, start: Any, stop: Any, **options: Any) -> Any:
  """A walk over all slots of the range, newest first."""
  return art.walk(q, k, v, None, None, start, stop, **options)


def stopping_case(
  name: str, shape: Shape, make: Callable[[int], tuple[jax.Array, ...]], quick: bool
) -> Case:
  """τ = 1e-5, φ = 1e-3, p = 5 over the whole cache, newest first, in as many splits as fill it.

  Tiles walked are compared beside outputs, which a walk that never stops would get right.
  """
  tile = QUICK_TILE if quick else TILE
  inputs = turns_of(shape, make, quick)
  copies, walk = len(inputs), functools.partial(whole_walk, tile=tile)
  stopping = functools.partial(walk, patience=5, splits=2 if quick else None)
  # [B, K, P] tiles: until the walk's end, and with those on their way until it is looked for.
  walked, loaded = (
    [np.asarray(looked(*turn)[2]).max(-1) for turn in inputs]
    for looked in (jax.jit(functools.partial(stopping, loaded=each)) for each in (False, True))
  )
  splits = walked[0].shape[-1]
  tiles = -(-int(shape.lengths().max()) // tile)
  tile_bytes = 2 * tile * shape.head_dim * jnp.dtype(shape.dtype).itemsize
  bytes_visited, bytes_loaded = (
    float(np.mean([x.sum() for x in each])) * tile_bytes for each in (walked, loaded)
  )
  longest = float(np.mean([x.max() for x in loaded]))

  one = [(q[:1, :1], k[:1, :1], v[:1, :1], a[:1, :1], b[:1, :1]) for q, k, v, a, b in inputs]
  alone = functools.partial(walk, patience=math.inf, splits=1, share=0)
  # As many tiles from the newest on, of every head alike: what is walked where nothing is asked.
  mean = tile * math.ceil(bytes_visited / tile_bytes / (shape.batch * shape.kv_heads))
  short = [(q, k, v, jnp.maximum(b - mean, 0), b) for q, k, v, _, b in inputs]
  unasked = functools.partial(walk, patience=None, splits=splits)
  # Each input once a program: further turns have another query, with which a walk ends elsewhere.
  contenders = (
    jax_contender("ART", stopping, inputs, output=_out, steps=_tiles, calls=copies),
    jax_contender("dense decode", decode_attention, inputs, calls=copies),
    jax_contender("as many tiles, not looking", unasked, short, calls=copies),
    jax_contender("one head alone", alone, one, calls=copies),
    # Of every tile, not of those visited: no floor of this case.
    dataclasses.replace(read_contender(inputs, shape, copies), name=WHOLE),
  )

  want = functools.cache(functools.partial(taken, inputs[0], shape, tile, splits))

  def figures(seconds: dict[str, float]) -> dict[str, float]:
    per_tile = 1e6 * seconds["one head alone"] / tiles
    visited, loaded = (x / shape.kv_bytes() for x in (bytes_visited, bytes_loaded))
    bound = max(1e6 * loaded * seconds[WHOLE], longest * per_tile)
    return {
      "splits": splits,
      "visited": visited,
      "loaded": loaded,
      "longest walk, tiles": longest,
      "a tile of a lone walk, µs": per_tile,
      "bound, µs": bound,
      "expected, µs": 1.1 * bound + 5,
      "of dense decode's bandwidth": visited * seconds["dense decode"] / seconds["ART"],
    }

  return Case(
    name=name,
    shapes=f"{shape.name} {shape.dtype}, tiles of {tile}, τ = 1e-5, φ = 1e-3, p = 5",
    bytes=round(bytes_visited),
    reference=lambda: want()[0],
    tolerance=1e-3 if quick else 1e-2,
    contenders=contenders,
    subject="ART",
    figures=figures,
    steps=lambda: want()[1],
    # What is rounded to 16 bits may move a stop by a tile.
    slack=0 if quick else splits,
  )


def taken(
  turn: tuple[Any, ...], shape: Shape, tile: int, splits: int
) -> tuple[np.ndarray, np.ndarray]:
  """The reference's output and the tiles that its query heads took [B, K, G], of all splits."""
  q, k, v, _, stop = turn
  method = kvjax.ART(tile=tile, splits=splits)
  pos = jnp.broadcast_to(jnp.arange(shape.slots, dtype=jnp.int32), k.shape[:3])
  pos = jnp.where(pos < stop[..., None], pos, -1)
  rows = dict.fromkeys(("seen", "used"), stop[:, 0])
  cache = kvjax.Cache({"k": k, "v": v, "pos": pos}, {}, rows)
  at = method.at(kvjax.Env(1, impl="reference"), 0)
  run = jax.jit(lambda cache, q: method.attend(at, cache, sight.visible(at, cache), q))
  walked = run(cache, q)
  return np.asarray(walked.state.o), np.asarray(walked.noted(Walked).tiles)


def known_case(name: str, shape: Shape, share: float, lengths: str, quick: bool) -> Case:
  """Known lengths: `share` of the tiles, of all heads alike or of each its own, or everything.

  Where walks stop each tile is stable, so that a walk takes what its length says.
  """
  tile = QUICK_TILE if quick else TILE
  arrays, calls = rotated(shape, quick)
  tiles, rows = -(-shape.slots // tile), arrays[0][3].shape
  shares = np.full(rows, share)
  if lengths == "ragged":  # from a third of the mean to the rest
    shares = np.random.default_rng(0).uniform(share / 3, 5 * share / 3, rows)
  length = np.maximum(np.rint(shares * tiles), 6).astype(np.int32)  # p + 1 at least
  known_lengths = jnp.asarray(length if share < 1 else 0 * length)
  first = jnp.asarray(np.maximum((tiles - length) * tile, 0), jnp.int32)
  inputs = [(q, k, v, start, stop, known_lengths) for q, k, v, start, stop in arrays]
  nearer = [(q, k, v, first, stop) for q, k, v, _, stop in arrays]
  limit = 9.0 if share < 1 else 0.0
  how = {"tau": limit, "phi": limit, "patience": 5, "following": lambda walked, *_: walked}
  run = functools.partial(known.read, tail=TAIL, tile=tile, **how)
  listed = jnp.asarray(shuffled(length, tiles)), jnp.full(rows, tiles, jnp.int32)
  read = int((shape.slots - np.asarray(first)).sum())
  each = 2 * shape.head_dim * jnp.dtype(shape.dtype).itemsize
  contenders = [
    jax_contender("ART, known", run, inputs, output=_out, steps=_read, calls=calls),
    jax_contender(
      "ART, known, listed",
      lambda table, count, *x: run(*x, table=table, count=count, unit=tile),
      [(*listed, *x) for x in inputs],
      output=_out,
      steps=_read,
      calls=calls,
    ),
    jax_contender("dense decode", decode_attention, arrays, calls=calls),
    dataclasses.replace(read_contender(arrays, shape, calls), name=WHOLE),
  ]
  if share < 1:
    as_much = "dense decode of as much"
    contenders.append(jax_contender(as_much, decode_attention, nearer, calls=calls))

  def figures(seconds: dict[str, float]) -> dict[str, float]:
    part = read * each / shape.kv_bytes()
    return {"of the bytes": part, "over their read": seconds["ART, known"] / part / seconds[WHOLE]}

  return Case(
    name=name,
    shapes=f"{shape.name} {shape.dtype}, tiles of {tile}, {TAIL} of them looked at, p = 5",
    bytes=read * each,
    reference=functools.partial(reference, *nearer[0]),
    tolerance=1e-5 if quick else 1e-2,
    contenders=contenders,
    subject="ART, known",
    figures=figures,
    paired={"over decode, %": "dense decode"} if share == 1 else {},
    steps=lambda: np.asarray(length),
  )


def shuffled(length: np.ndarray, tiles: int) -> np.ndarray:
  """Tiles newest first [B, K, tiles], the first `length` of each row in an order of its own."""
  rng, newest = np.random.default_rng(0), np.arange(tiles, dtype=np.int32)[::-1]
  table = np.broadcast_to(newest, (*length.shape, tiles)).copy()
  for b, k in np.ndindex(*length.shape):
    table[b, k, : length[b, k]] = rng.permutation(table[b, k, : length[b, k]])
  return table


def _read(result: Any) -> jax.Array:
  """Tiles that each KV head read."""
  return result[2]


def _tiles(result: Any) -> jax.Array:
  """Tiles walked by each query head, of all splits."""
  return result[2].sum(2)


def lone_case(name: str, shape: Shape, quick: bool) -> Case:
  """One walk a KV head: tiles read ahead by many programs, against one program that walks alone.

  Outputs and tiles walked of both are compared with the reference's.
  """
  tile = QUICK_TILE if quick else TILE
  inputs = turns_of(shape, functools.partial(decaying, shape, tile=tile), quick)
  copies, walk = len(inputs), functools.partial(whole_walk, tile=tile, splits=1)
  many = functools.partial(walk, share=2 if quick else spread.SHARE)
  alone = functools.partial(walk, share=0)
  looked = jax.jit(functools.partial(many, patience=5, loaded=True))
  read = float(np.mean([np.asarray(looked(*turn)[2]).max(-1).mean() for turn in inputs]))
  tiles = -(-int(shape.lengths().max()) // tile)
  want = functools.cache(functools.partial(taken, inputs[0], shape, tile, 1))
  stopping = {"patience": 5}, {"output": _out, "steps": _tiles, "calls": copies}
  endless = {"patience": math.inf}, {"calls": copies}
  contenders = (
    *(
      jax_contender(label + end, functools.partial(run, **options), inputs, **how)
      for end, (options, how) in {"": stopping, ", p = inf": endless}.items()
      for label, run in {"ART": many, "one program": alone}.items()
    ),
    jax_contender("dense decode", decode_attention, inputs, calls=copies),
    dataclasses.replace(read_contender(inputs, shape, copies), name=WHOLE),
  )

  return Case(
    name=name,
    shapes=f"{shape.name} {shape.dtype}, tiles of {tile}, τ = 1e-5, φ = 1e-3, p = 5, one walk",
    bytes=shape.kv_bytes(),
    reference=lambda: want()[0],
    tolerance=1e-3 if quick else 1e-2,
    contenders=contenders,
    subject="ART",
    figures=lambda _: {"visited": np.mean(want()[1]) / tiles, "read": read / tiles},
    steps=lambda: want()[1],
    slack=0 if quick else 1,
  )
