"""The time of a decode step, expected from the bytes that it moves and what it starts.

    seconds = device bytes / bandwidth + host bytes / link
            + layers · LAYER                      products, norms and one attention: launches
            + layers that choose · CHOICE         a selection before attention
            + further walks · WALK                attention over what a guess had missed
            + layers · STREAMED                   where blocks leave a window: votes, maps, stores

The four constants are fitted on kept cells of an H200, which tests/scripts/test_advise.py names: it
fits them anew and compares the other cells.
"""

import numpy as np

from kvjax.kernels.common.devices import Device
from kvjax.models.decode.step_bytes import StepBytes

LAYER, CHOICE, WALK, STREAMED = 28.5e-6, 11.9e-6, 79.0e-6, 36.6e-6  # seconds
ROWS = 8  # the largest batch of the cells
FETCHED = 0.73  # of the host link's bandwidth, by blocks fetched from there: `bench_offload.json`
# Of a further walk where a guess mostly hits: PRR over Quest after real text, a layer that chooses
# (`real/speed.jsonl`). WALK is fitted where queries are random, and guesses miss.
HITTING = 3.2e-6


def expected(moved: StepBytes, streamed: bool, here: Device) -> float:
  """Seconds of a step, at most where `moved` is a bound.

  Args:
    moved: what it moves.
    streamed: whether blocks leave a window for a store (`Traits.stream`).
    here: the device; of it only the bandwidths count.
  """
  started = np.array(_started(moved, streamed)) @ (LAYER, CHOICE, WALK, STREAMED)
  return float(_streaming(moved, here) + started)


def least(moved: StepBytes, streamed: bool, here: Device) -> float:
  """Seconds of a step whose retrievals are shared wherever they can be, and whose guesses hit."""
  walks = sum(x.walks - 1 for x in moved.layers)
  spared = moved.spared / here.read + walks * (WALK - HITTING)
  return expected(moved, streamed, here) - spared


def _streaming(moved: StepBytes, here: Device) -> float:
  """Seconds in which the bytes pass."""
  return moved.device / here.read + moved.host / (FETCHED * here.link)


def _started(moved: StepBytes, streamed: bool) -> tuple[int, int, int, int]:
  """Number of times that a step pays each of the four constants."""
  layers = moved.layers
  chosen, walks = sum(x.chosen for x in layers), sum(x.walks - 1 for x in layers)
  return len(layers), chosen, walks, len(layers) * streamed
