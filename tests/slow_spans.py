"""Spans of attention maps by loops in float64."""

import itertools
import math

import numpy as np


def slow_scores(a, theta):
  """Brute-force sums over every triangle."""
  size = len(a)
  out = np.full((size, size), -np.inf)
  for x in range(size):
    for y in range(x, size):
      out[x, y] = sum(float(a[i, j]) - theta for i in range(x, y + 1) for j in range(x, i + 1))
  return out


def slow_candidates(scores):
  """For every x + y the best (x, y + 1, score)."""
  size, best = len(scores), []
  for middle in range(2 * size - 1):
    spans_ = [(x, middle - x) for x in range(size) if x <= middle - x < size]
    x, y = max(spans_, key=lambda s: (scores[s], -s[0]))
    best.append((x, y + 1, scores[x, y]))
  return best


def slow_nms(boxes, overlap, count):
  """The textbook's: sort, take the first, drop what overlaps it, and again."""
  left = sorted((box for box in boxes if box[2] > 0), key=lambda box: -box[2])
  kept = []
  while left:
    a, b, _ = left.pop(0)
    kept.append((a, b))

    def iou(box, a=a, b=b):
      common = max(0, min(b, box[1]) - max(a, box[0])) ** 2
      return common / ((b - a) ** 2 + (box[1] - box[0]) ** 2 - common)

    left = [box for box in left if iou(box) <= overlap]
  return (kept + [(0, 0)] * count)[:count]


def slow_divide(maps, quantile, overlap, count):
  """Of the maps of several heads, each with a threshold of its own."""
  scores = 0
  for a in np.float64(maps):
    triangle = [a[i, j] for i in range(len(a)) for j in range(i + 1)]
    scores = scores + slow_scores(a, float(np.quantile(triangle, quantile)))
  return slow_nms(slow_candidates(scores), overlap, count)


def slow_counts(lengths, ratios, rate, most):
  """Vectors of each span of one block: ⌈length · r_v⌉, and of what is too much a share."""
  more = [
    max(math.ceil(n * math.exp(-rate * (1 - r))), 1) - 1 if n else 0
    for n, r in zip(lengths, ratios, strict=True)
  ]
  real = sum(n > 0 for n in lengths)
  if sum(more) > most - real:
    upto = [sum(more[:i]) * (most - real) // sum(more) for i in range(len(more) + 1)]
    more = [b - a for a, b in itertools.pairwise(upto)]
  return [m + 1 if n else 0 for n, m in zip(lengths, more, strict=True)]


def slow_ratio(a, start, stop, mode):
  size = len(a)
  own = sum(a[i, j] for i in range(start, stop) for j in range(start, stop))
  row = sum(a[i, j] for i in range(start, stop) for j in range(start))
  col = sum(a[i, j] for i in range(stop, size) for j in range(start, stop))
  every = own + row * ("row" in mode) + col * ("col" in mode)
  return own / every if every > 0 else 1.0


def slow_elect(votes, start, stop, n):
  return sorted(range(start, stop), key=lambda t: (-votes[t], t))[:n]
