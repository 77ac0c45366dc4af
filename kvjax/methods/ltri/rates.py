"""The rate λ of index vectors by a compression ratio that is asked for (Ltri-LLM, 3.3.2)."""

import jax.numpy as jnp
import numpy as np

from kvjax.core.cache import Cache
from kvjax.methods.ltri import vectors


def measured_spans(cache: Cache, row: int) -> tuple[np.ndarray, np.ndarray]:
  """Lengths and r_a of the spans of all blocks that have left the window of a row, block by block.

  int [blocks, C] and float [blocks, C]; a length of 0 is no span.
  """
  found = cache.rows["found"].of["spans"][row, : int(cache.rows["gone"][row])]
  start, stop, _, ratio = vectors.unpacked(found)
  return np.asarray(stop - start), np.asarray(ratio)


def vectors_at(length: np.ndarray, ratio: np.ndarray, rate: float, most: int) -> np.ndarray:
  """Index vectors that each span would have at another λ (Eq. 7), from `measured_spans`."""
  return np.asarray(vectors.vector_counts(jnp.asarray(length), jnp.asarray(ratio), rate, most))


def calibrated_rate(
  samples: list[tuple[np.ndarray, np.ndarray]],
  tokens_per_vector: float | int,
  *,
  block: int = 128,
  most: int = 12,
) -> float:
  """The smallest λ of one layer at which blocks are compressed as far as is asked for (§3.3.2).

  More vectors help recall, so the smallest λ is the best one that keeps to the ratio.

  Args:
    samples: `measured_spans` of the layer, one pair for each context.
    tokens_per_vector: target compression ratio.
    block: tokens per block.
    most: vectors per block at most.

  Raises:
    ValueError: no λ gets there: every span keeps one vector.
  """
  length, ratio = (np.concatenate(each) for each in zip(*samples, strict=True))
  tokens = block * len(length)

  def reaches(rate: float) -> bool:
    return tokens >= tokens_per_vector * int(vectors_at(length, ratio, rate, most).sum())

  table = np.arange(0, 100.25, 0.25)
  for rate in table:
    if reaches(rate):
      return float(rate)
  fewest = vectors_at(length, ratio, table[-1], most).sum()
  raise ValueError(
    f"tokens_per_vector: found {tokens_per_vector}, expected at most "
    f"{tokens / max(fewest, 1):.1f}, where every span has one vector"
  )
