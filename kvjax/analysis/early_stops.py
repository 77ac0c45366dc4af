"""The cost of stopping a walk early, and how well a probe tells when to (ART, §3.2, App. A and B).

Pure functions on the host, in float64. Arrays are NumPy's or JAX's; leading axes are arbitrary, one
query each. Keys and values stand in visiting order, tiles of them are walked whole, and tiles count
from 1 as in the paper: T of them, and a stop at t means that t were read.
No logits have a soft cap.
"""

import math
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

Numbers = np.ndarray | jax.Array
NEVER = 0  # the stop of a walk that read everything


class Walk(NamedTuple):
  """A walk to its end, tile by tile.

  Attributes:
    o: [..., T, H], the normalised output after each tile.
    u: [..., T, H], the output of each tile by itself.
    mass: [..., T], ℓ_t over the largest term of the walk: Σ exp(logit − max).
    longest: [...], C_v, the largest ‖v‖.
  """

  o: np.ndarray
  u: np.ndarray
  mass: np.ndarray
  longest: np.ndarray


class Truncation(NamedTuple):
  """The error of a stop and the bound on it, of one shape; 0 where the walk did not stop.

  Attributes:
    actual: ‖o(T) − o(t)‖.
    bound: min{(τ·b + μ·Δ) / ν, 2·μ·C_v}·ln(T/t), b = t − p + 1 (Remark 2).
    decays: whether ℓ_j/A_j ≤ μ/j from b on (Lemma 1), all that the proof uses: there the bound
      holds.
    assumption: whether Assumption 1 does, from which the paper derives it.
  """

  actual: np.ndarray
  bound: np.ndarray
  decays: np.ndarray
  assumption: np.ndarray


class Agreement(NamedTuple):
  """Comparison of two detectors' stops (Tab. 4); shares of all walks.

  Attributes:
    walks: how many there are.
    agree: stop at the same tile, or both at none.
    early: the probe alone stops, or before the oracle (false positives, the risk).
    late: the oracle alone stops, or before the probe (false negatives).
    offset: mean and standard deviation of the tiles between two different stops; NaN without any.
    ended: walks that one of them stops at least.
    agree_of_ended: share of these that both stop at the same tile; NaN without any. The others
      agree whatever the probe sees.
  """

  walks: int
  agree: float
  early: float
  late: float
  offset: tuple[float, float]
  ended: int
  agree_of_ended: float


def can_stop(tokens: int, tile: int, splits: int, patience: float | int) -> bool:
  """True if a walk over so many keys can leave out a tile: it reads at least p + 1 of its split."""
  return -(-tokens // (tile * splits)) > patience + 1


def walk(
  q: Float[Numbers, "*#batch H"],
  k: Float[Numbers, "*#batch S H"],
  v: Float[Numbers, "*#batch S H"],
  tile: int,
) -> Walk:
  """Outputs and masses of a walk over all keys; the last tile may be shorter."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  logits = (k @ q[..., None])[..., 0] / np.sqrt(q.shape[-1])
  weight = np.exp(logits - logits.max(-1, keepdims=True))
  starts = np.arange(0, k.shape[-2], tile)
  mass = np.add.reduceat(weight, starts, -1)
  part = np.add.reduceat(weight[..., None] * v, starts, -2)
  return over_tiles(part, mass, np.asarray(np.linalg.norm(v, axis=-1).max(-1)))


def over_tiles(
  part: Float[np.ndarray, "*batch T H"],
  mass: Float[np.ndarray, "*batch T"],
  longest: Float[np.ndarray, "*#batch"],
) -> Walk:
  """`walk`, of tiles that are summed already, in visiting order.

  Args:
    part: Σ exp(logit − max)·v of each tile.
    mass, longest: as in `Walk`.
  """
  # A tile whose terms all round to 0 adds nothing, wherever it points.
  u = part / np.where(mass > 0, mass, 1.0)[..., None]
  total = mass.cumsum(-1)
  o = part.cumsum(-2) / np.where(total > 0, total, 1.0)[..., None]
  return Walk(o, u, mass, longest)


def probe(o: Float[Numbers, "*batch H"], dims: int = 32) -> Float[np.ndarray, "*batch P"]:
  """x = the dimensions ⌊i·H/32⌋ of the output; all where there are no more."""
  o = np.asarray(o, np.float64)
  size = o.shape[-1]
  return o if size <= dims else o[..., [i * size // dims for i in range(dims)]]


def movements(
  x: Float[Numbers, "*batch T P"], relative: bool = False
) -> tuple[Float[np.ndarray, "*batch T"], Float[np.ndarray, "*batch T"]]:
  """d_scale and d_direction of every tile (Eq. 2); ∞ at the first and where a probe is 0.

  `relative`: d_scale over the norm of the tile's probe.
  """
  x = np.asarray(x, np.float64)
  new, old = x[..., 1:, :], x[..., :-1, :]
  scale, length = np.linalg.norm(new - old, axis=-1), np.linalg.norm(new, axis=-1)
  norms = length * np.linalg.norm(old, axis=-1)
  turn = 1 - (new * old).sum(-1) / np.where(norms > 0, norms, 1.0)
  first = np.full((*x.shape[:-2], 1), np.inf)
  scale = scale / np.where(length > 0, length, 1.0) if relative else scale
  scale, turn = (np.where(norms > 0, d, np.inf) for d in (scale, turn))
  return np.concatenate([first, scale], -1), np.concatenate([first, turn], -1)


def stops(
  x: Float[Numbers, "*batch T P"], tau: float | int, phi: float | int, patience: float | int
) -> Int[np.ndarray, "*batch"]:
  """Tile at which a detector that sees x ends the walk (Alg. 1); 0 where it never does.

  τ or φ = ∞ leaves that test out, which is how the paper ablates them (Tab. 3).
  """
  return stops_of_movements(*movements(x), tau, phi, patience)


def stops_of_movements(
  scale: Float[np.ndarray, "*batch T"],
  turn: Float[np.ndarray, "*batch T"],
  tau: float | int,
  phi: float | int,
  patience: float | int,
) -> Int[np.ndarray, "*batch"]:
  """`stops`, of the `movements` of x."""
  # A test that is left out leaves out its probes of norm 0 too; the first tile has nothing to be
  # compared with.
  stable = ((scale < tau) | (tau == math.inf)) & ((turn < phi) | (phi == math.inf))
  stable[..., 0] = False
  tile = np.arange(stable.shape[-1])
  calm = tile - np.maximum.accumulate(np.where(stable, 0, tile), -1)  # stable ones up to this tile
  ends = calm >= patience
  return np.where(ends.any(-1), ends.argmax(-1) + 1, NEVER)


def of_group(
  scale: Float[np.ndarray, "*batch G T"], turn: Float[np.ndarray, "*batch G T"]
) -> tuple[Float[np.ndarray, "*batch 1 T"], Float[np.ndarray, "*batch 1 T"]]:
  """`movements` of a KV head whose query heads continue together: the largest of theirs.

  It is below a threshold where all of them are, as `ART(stop="group")` has it.
  """
  return scale.max(-2, keepdims=True), turn.max(-2, keepdims=True)


def read(stop: Int[Numbers, "*batch"], tiles: int) -> Int[np.ndarray, "*batch"]:
  """Tiles read by walks with these stops."""
  return np.where(np.asarray(stop) == NEVER, tiles, stop)


def error(walked: Walk, stop: Int[Numbers, "*batch"]) -> Float[np.ndarray, "*batch"]:
  """‖o(T) − o(t)‖ / ‖o(T)‖, 0 where the walk did not stop (Fig. 4's error)."""
  last = walked.o[..., -1, :]
  return np.linalg.norm(last - _at(walked.o, read(stop, walked.o.shape[-2])), axis=-1) / np.maximum(
    np.linalg.norm(last, axis=-1), 1e-300
  )


def splits(walked: Walk, count: int) -> list[Walk]:
  """The walks of `count` interleaved splits: split s has tiles s, s + count, … of the order."""
  each = [slice(s, None, count) for s in range(min(count, walked.mass.shape[-1]))]
  part = walked.mass[..., None] * walked.u
  return [over_tiles(part[..., s, :], walked.mass[..., s], walked.longest) for s in each]


def joined(
  walks: list[Walk], stops: list[Int[Numbers, "*batch"]]
) -> tuple[Float[np.ndarray, "*batch H"], Int[np.ndarray, "*batch"]]:
  """The output of all splits together, each ended at its own stop, and the tiles that they read."""
  ends = [read(stop, walk.mass.shape[-1]) for walk, stop in zip(walks, stops, strict=True)]
  mass = [
    np.take_along_axis(walk.mass.cumsum(-1), end[..., None] - 1, -1)
    for walk, end in zip(walks, ends, strict=True)
  ]
  parts = [m * _at(walk.o, end) for m, walk, end in zip(mass, walks, ends, strict=True)]
  return np.sum(parts, 0) / np.sum(mass, 0), np.sum(ends, 0)


def truncation(
  walked: Walk, stop: Int[Numbers, "*batch"], tau: float | int, patience: int, dims: int = 32
) -> Truncation:
  """The error of stopping, and Theorems 1 and 2 put together, on these inputs.

  Assumption 1 asks for constants ℓ̂ ≥ ℓ_j and h ≤ A_j/j with ℓ̂/h = μ = b·ℓ_b/A_b, for all j ≥ b;
  since j = b is among them, that is ℓ_j ≤ ℓ_b and A_j/j ≥ A_b/b. Where mass falls off as it should
  the second fails: a mean of falling terms falls. What the proof takes from it is Lemma 1 alone.
  ν is the least of ‖P(o_j − o_{j−1})‖ / ‖o_j − o_{j−1}‖ over the steps after the stop.

  Args:
    walked: the whole walk.
    stop: where it was ended, by a detector of this τ and patience.
    tau, patience: τ and p.
    dims: dimensions of the probe.
  """
  tiles = walked.o.shape[-2]
  count = np.arange(1, tiles + 1)
  t = np.asarray(stop)[..., None]
  b = np.maximum(t - patience + 1, 1)
  total = walked.mass.cumsum(-1)

  def at_b(x: np.ndarray) -> np.ndarray:
    return np.take_along_axis(x, b - 1, -1)

  mu = b * at_b(walked.mass) / at_b(total)
  behind = count >= b
  share = walked.mass / total
  slack = 1 + 1e-12
  decays = (~behind | (share * count <= mu * slack)).all(-1)
  assumption = ~behind | (
    (walked.mass <= at_b(walked.mass) * slack) & (total / count * slack >= at_b(total) / b)
  )
  steps = np.diff(walked.o, axis=-2, prepend=0)
  size = np.linalg.norm(steps, axis=-1)
  seen = np.linalg.norm(probe(steps, dims), axis=-1)
  later = (count > t) & (size > 0)
  nu = np.where(later, seen / np.where(size > 0, size, 1.0), np.inf).min(-1)
  before = np.concatenate([np.zeros_like(walked.o[..., :1, :]), walked.o[..., :-1, :]], -2)
  pull = np.linalg.norm(probe(walked.u - before, dims), axis=-1)
  dominance = np.where(behind, pull - at_b(pull), 0).max(-1)  # Δ, Def. 1
  mu, b = mu[..., 0], b[..., 0]
  with np.errstate(divide="ignore"):
    first = np.where(np.isinf(nu), 0.0, (tau * b + mu * dominance) / nu)
  bound = np.minimum(first, 2 * mu * walked.longest) * np.log(tiles / np.maximum(t[..., 0], 1))
  stopped = t[..., 0] != NEVER
  gap = walked.o[..., -1, :] - _at(walked.o, read(stop, tiles))
  return Truncation(
    np.where(stopped, np.linalg.norm(gap, axis=-1), 0.0),
    np.where(stopped, bound, 0.0),
    decays | ~stopped,
    assumption.all(-1) | ~stopped,
  )


def agreement(probed: Int[Numbers, "*batch"], oracle: Int[Numbers, "*batch"]) -> Agreement:
  """The stops of a probe against those of an oracle that sees the whole output (App. B)."""
  probed, oracle = np.asarray(probed), np.asarray(oracle)
  a, b = (np.where(x == NEVER, np.iinfo(np.int64).max, x) for x in (probed, oracle))
  both = (probed != NEVER) & (oracle != NEVER) & (probed != oracle)
  gaps = abs(probed - oracle)[both]
  offset = (float(gaps.mean()), float(gaps.std())) if gaps.size else (math.nan, math.nan)
  agree, early, late = (float(x.mean()) for x in (a == b, a < b, a > b))
  one = (probed != NEVER) | (oracle != NEVER)
  of_ended = float((a == b)[one].mean()) if one.any() else math.nan
  return Agreement(probed.size, agree, early, late, offset, int(one.sum()), of_ended)


def _at(x: np.ndarray, tile: np.ndarray) -> np.ndarray:
  """x [..., T, H] after `tile` tiles, [..., H]."""
  return np.take_along_axis(x, tile[..., None, None] - 1, -2)[..., 0, :]
