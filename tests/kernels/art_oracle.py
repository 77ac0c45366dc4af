"""ART's walk by a loop, and its operands."""

import math

import numpy as np

from kvjax.testing.layer import softmax_average

LOOSE = {"tau": 0.7, "phi": 0.4, "patience": 1}


def algorithm(
  q, keys, values, visible, tau, phi, patience, full, per_head, kept, splits, relative=False
):
  """One KV head over its keys in visiting order [tiles, T, H], of which some are visible.

  Returns the tiles that every query head read, in all splits together, tiles walked [splits, G],
  and how near a test came to its threshold.
  """
  groups, head_dim = q.shape
  dims = list(range(head_dim))
  if not full and head_dim > 32:
    dims = [i * head_dim // 32 for i in range(32)]
  walked, margin = np.zeros((splits, groups), int), np.inf
  states = []
  for split in range(splits):
    going, calm, last = np.ones(groups, bool), np.zeros(groups, int), np.zeros(q.shape)
    read = [[] for _ in range(groups)]
    for t in range(split, len(keys), splits):
      done = calm >= patience
      for g in np.flatnonzero(going):
        walked[split, g] += 1
        if not visible[t].any():
          continue
        read[g].append(t)
        k, v = (np.concatenate([x[i][visible[i]] for i in read[g]]) for x in (keys, values))
        new = softmax_average(k @ q[g] / math.sqrt(head_dim), v)
        a, b = new[dims], last[g][dims]
        moved, norms = np.linalg.norm(a - b), np.linalg.norm(a) * np.linalg.norm(b)
        turn = 1 - a @ b / norms if norms > 0 else np.inf
        if relative and norms > 0:
          moved = moved / np.linalg.norm(a)
        if norms > 0:
          margin = min(margin, abs(moved - tau), abs(turn - phi))
        calm[g] = calm[g] + 1 if norms > 0 and moved < tau and turn < phi else 0
        done[g] = calm[g] >= patience
        last[g] = new
      if not per_head:
        done[:] = done.all()
      if t + splits >= kept:
        going &= ~done
    states.append(read)
  read = [sorted(t for read in states for t in read[g]) for g in range(groups)]
  return read, walked, margin


def cut_into(slots, seen, tile):
  """Slots in visiting order as [tiles, tile], and which count; padded by some that do not."""
  short = -len(slots) % tile
  slots, seen = np.array(slots + [0] * short, int), np.array(seen + [False] * short, bool)
  return slots.reshape(-1, tile), seen.reshape(-1, tile)


def compare(out, arrays, orders, splits, detector):
  """A kernel's outputs and walks against `algorithm`, head by head; counts early stops."""
  (q, k, v), (state, rounded, walked) = arrays, out
  o, lse, rounded, walked = map(np.asarray, (state.o, state.lse, rounded, walked))
  batch, heads, groups, head_dim = q.shape
  stopped = close = 0
  for b, h in np.ndindex(batch, heads):
    slots, seen = orders[b][h]
    keys, values = np.float64(k[b, h][slots]), np.float64(v[b, h][slots])
    used = min(splits, walked.shape[2])
    read, want, margin = algorithm(np.float64(q[b, h]), keys, values, seen, splits=used, **detector)
    if margin < 1e-5:
      close += 1
      continue
    np.testing.assert_array_equal(walked[b, h], want)
    for g in range(groups):
      if not read[g]:
        assert (o[b, h, g] == 0).all()
        assert lse[b, h, g] == -np.inf
        continue
      kept = [np.concatenate([x[t][seen[t]] for t in read[g]]) for x in (keys, values)]
      x = kept[0] @ np.float64(q[b, h, g]) / math.sqrt(head_dim)
      np.testing.assert_allclose(o[b, h, g], softmax_average(x, kept[1]), atol=2e-5)
      want_lse = x.max() + np.log(np.exp(x - x.max()).sum())
      np.testing.assert_allclose(lse[b, h, g], want_lse, atol=2e-5)
    stopped += want.min(1).sum() < len(slots)
  assert close <= 1
  np.testing.assert_array_equal(rounded, o.astype(q.dtype))
  return stopped


def listed_orders(table, count, start, stop, unit, sinks, tile, slots):
  """Of every head its slots in the order of a table, cut into tiles; and which slots are read."""
  batch, heads = count.shape
  orders, read = [[None] * heads for _ in range(batch)], np.zeros((batch, heads, slots), bool)
  for b, h in np.ndindex(batch, heads):
    listed = [int(e) * unit + i for e in table[b, h, : count[b, h]] for i in range(unit)]
    holes = [e < 0 for e in table[b, h, : count[b, h]] for i in range(unit)]
    seen = [
      not hole and s < stop[b, 0] and (s < sinks or s >= start[b, 0])
      for s, hole in zip(listed, holes, strict=True)
    ]
    listed = [s if ok else 0 for s, ok in zip(listed, seen, strict=True)]
    read[b, h, [s for s, ok in zip(listed, seen, strict=True) if ok]] = True
    orders[b][h] = cut_into(listed, seen, tile)
  return orders, read


def inputs(seed, batch, heads, groups, slots, head_dim):
  rng = np.random.default_rng(seed)
  shapes = (batch, heads, groups, head_dim), *[(batch, heads, slots, head_dim)] * 2
  return [rng.normal(size=shape).astype(np.float32) for shape in shapes]
