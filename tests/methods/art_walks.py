"""ART's walks by loops in float64, and the order newest first."""

import math

import numpy as np

from kvjax.testing.layer import softmax_average
from tests.kernels.art_oracle import algorithm


def walk(q, keys, values, sizes, method, pinned=0):
  """Algorithm 1 for the G queries of one KV head over keys in visiting order, in tiles of `sizes`.

  Returns outputs [G, H], steps of every query, and how near a test was to its threshold.
  """
  ends = np.cumsum(sizes)
  within = np.arange(max(sizes)) < np.array(sizes)[:, None]
  place = np.where(within, (ends - sizes)[:, None] + np.arange(max(sizes)), 0)
  how = {name: getattr(method, name) for name in ("tau", "phi", "patience", "relative")}
  how |= {"full": method.probe != "strided32", "per_head": method.stop == "head", "splits": 1}
  kept = np.searchsorted(ends, pinned) + 1  # tiles
  _, (steps,), margin = algorithm(q, keys[place], values[place], within, kept=kept, **how)
  read = zip(q, ends[steps - 1], strict=True)
  out = [softmax_average(keys[:n] @ x / math.sqrt(q.shape[1]), values[:n]) for x, n in read]
  return np.stack(out), steps, margin


def known_walk(q, k, v, sizes, method, length):
  """Outputs of G queries, tiles read, the next length and the stop, and how near a test came."""
  ends, p, m = np.cumsum(sizes), method.patience, method.margin
  size = q.shape[1]
  probe = [i * size // 32 for i in range(32)] if size > 32 and method.probe == "strided32" else ...
  least = -(-method.sinks // method.tile)
  known = min(length, len(sizes)) if length else len(sizes)
  calm, stop, fall = 0, 0, max(1, m // 4)
  margin, last = math.inf, np.zeros(q.shape)
  for t, end in enumerate(ends):
    if t >= known and stop:
      break
    out = np.stack([softmax_average(k[:end] @ x / math.sqrt(size), v[:end]) for x in q])
    stable = t > 0
    for new, old in zip(out[:, probe], last[:, probe], strict=True):
      moved = np.linalg.norm(new - old) / (np.linalg.norm(new) if method.relative else 1)
      turn = 1 - new @ old / (np.linalg.norm(new) * np.linalg.norm(old)) if t else 2
      stable &= moved < method.tau and turn < method.phi
      margin = min(margin, abs(moved - method.tau), abs(turn - method.phi))
    calm = calm + 1 if stable and t >= known - p - m - fall else 0
    if calm >= p and not stop and least <= t + 1 <= known:
      stop = t + 1
    last, read = out, t + 1
  after = max(stop + m, known - fall)
  if not stop:  # all of it was read
    after = known + max(2 * m, known // 2) if known < len(sizes) else 0
  return last, read, (after, stop), margin


def newest_tiles(tile):
  """A full cache: tiles of `tile` slots from a multiple on, newest first, ascending within."""

  def order(cache, b, h):
    used = int(cache.used[b])
    starts = range((used - 1) // tile * tile, -1, -tile)
    return [list(range(start, min(start + tile, used))) for start in starts], 0

  return order
