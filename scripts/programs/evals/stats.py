"""Means with 95 % confidence intervals.

Wilson's of shares, Student's of a few, exact ones of paired differences, else the bootstrap's.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import scipy.stats
from scipy import optimize, special

_RESAMPLES = 2000


@dataclasses.dataclass(frozen=True)
class Estimate:
  """A mean of n values, with its 95 % confidence interval and how that was found."""

  n: int
  mean: float
  low: float
  high: float
  interval: str


def estimate(values: Sequence[float], *, shares: bool = True) -> Estimate:
  """Wilson's interval where every value is 0 or 1, else the bootstrap's percentiles.

  The bootstrap draws 2,000 resamples from a fixed seed: the same values give the same interval.

  Args:
    values: one per row.
    shares: whether values of 0 and 1 mean wrong and right; numbers of another kind never get
      Wilson's interval.

  Raises:
    ValueError: there are no values.
  """
  x = np.asarray(values, np.float64)
  if not x.size:
    raise ValueError("values: found none, expected at least one")
  if shares and np.isin(x, (0, 1)).all():
    return Estimate(x.size, float(x.mean()), *wilson(int(x.sum()), x.size), "Wilson")
  rng = np.random.default_rng(0)
  means = x[rng.integers(0, x.size, (_RESAMPLES, x.size))].mean(1)
  low, high = np.quantile(means, (0.025, 0.975))
  return Estimate(x.size, float(x.mean()), float(low), float(high), "bootstrap")


def student(values: Sequence[float]) -> Estimate:
  """Student's interval: for a few values, of which resamples would say too little.

  Raises:
    ValueError: there are fewer than two.
  """
  x = np.asarray(values, np.float64)
  if x.size < 2:
    raise ValueError(f"values: found {x.size}, expected at least two")
  half = special.stdtrit(x.size - 1, 0.975) * x.std(ddof=1) / math.sqrt(x.size)
  mean = float(x.mean())
  return Estimate(x.size, mean, mean - float(half), mean + float(half), "Student")


def paired(differences: Sequence[float]) -> Estimate:
  """The mean of differences of scores on the same prompts, with an interval that always holds.

  What is won and what is lost are two means of values in [0, 1], each bounded at 97.5 %: so many
  equal answers leave it open how many others would differ, where a bootstrap would be certain.
  Bounds are Clopper and Pearson's (1934) where values are 0 or 1; of parts, Hoeffding's (1963,
  Eq. 2.1).

  Raises:
    ValueError: there are none, or one is not in [−1, 1].
  """
  x = np.asarray(differences, np.float64)
  if not x.size or np.abs(x).max() > 1:
    raise ValueError(f"differences: found {list(x)}, expected some in [-1, 1]")
  won, lost = (_bounds(part, 0.05 / 2) for part in (np.maximum(x, 0), np.maximum(-x, 0)))
  return Estimate(x.size, float(x.mean()), won[0] - lost[1], won[1] - lost[0], "exact")


def _bounds(x: np.ndarray, alpha: float) -> tuple[float, float]:
  """Both ends of a mean of values in [0, 1], each missed with a probability of alpha / 2."""
  mean, n = float(x.mean()), x.size
  if np.isin(x, (0, 1)).all():
    hits = round(mean * n)
    low = special.betaincinv(hits, n - hits + 1, alpha / 2) if hits else 0.0
    high = special.betaincinv(hits + 1, n - hits, 1 - alpha / 2) if hits < n else 1.0
    return float(low), float(high)
  far = lambda p: n * special.rel_entr([mean, 1 - mean], [p, 1 - p]).sum() + math.log(alpha / 2)  # noqa: E731
  low = optimize.brentq(far, 1e-12, mean) if mean > 0 and far(1e-12) > 0 else 0.0
  high = optimize.brentq(far, mean, 1 - 1e-12) if mean < 1 and far(1 - 1e-12) > 0 else 1.0
  return float(low), float(high)


def mean_of(parts: Sequence[Estimate]) -> Estimate:
  """The mean of several means, each of the same weight, and of independent rows.

  Its interval is put together from theirs (Zou and Donner, 2008: the variance at each end is
  recovered from that end): tasks without a miss are not certain, as a bootstrap would have it.

  Raises:
    ValueError: there are none.
  """
  if not parts:
    raise ValueError("parts: found none, expected at least one")
  mean = sum(part.mean for part in parts) / len(parts)
  below = math.sqrt(sum((part.mean - part.low) ** 2 for part in parts)) / len(parts)
  above = math.sqrt(sum((part.high - part.mean) ** 2 for part in parts)) / len(parts)
  interval = parts[0].interval if len(parts) == 1 else "recovered"
  return Estimate(sum(part.n for part in parts), mean, mean - below, mean + above, interval)


def wilson(hits: int, n: int) -> tuple[float, float]:
  """Wilson's score interval of a share (Wilson, 1927)."""
  low, high = scipy.stats.binomtest(hits, n).proportion_ci(method="wilson")
  return float(low), float(high)
