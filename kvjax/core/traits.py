"""Static facts of a method, declared once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from kvjax.core.cache import CacheSpec


@dataclasses.dataclass(frozen=True)
class Stream:
  """Reading of a prompt piece by piece, each of which is one call of the model.

  What it retrieves depends on the pieces before it.

  Attributes:
    chunk: tokens of a piece, but for the last one.
    last: tokens at the end of a turn that are a piece of their own; 0: none.
    persists: whether decoding uses the blocks that the last piece retrieved.
    alike: the first layer in which the method does exactly the same as in this one: they share a
      program; None: not known.
    begins: the carry of the first layer, of its cache, where layers add to what those below hand
      on: nothing in that form, so that the first layer is compiled as the others are; None: empty.
  """

  chunk: int
  last: int = 0
  persists: bool = False
  alike: Callable[[int], int] | None = None
  begins: Callable[[Any], Any] | None = None

  def pieces(self, length: int) -> list[int]:
    """Numbers of tokens of the pieces in which a turn of `length` tokens is read."""
    end = min(self.last, length)
    starts = range(0, length - end, self.chunk)
    return [min(self.chunk, length - end - start) for start in starts] + [end] * (end > 0)


def every_step(spec: CacheSpec) -> tuple[float, float]:
  """Of methods whose every head looks at keys in every step to choose some of them."""
  return 1.0, 1.0


@dataclasses.dataclass(frozen=True)
class Traits:
  """Static facts of a method.

  Attributes:
    positional: whether slot = position: tokens are appended and none ever leaves or moves.
    wants_logits: whether `observe` reads the logits of a decode step.
    ordered: whether attention depends on the order of a plan's tiles; else kernels may use any.
    chunkable: whether a prompt read in chunks gives what the prompt read at once gives.
    order_independent: whether decoding a token gives what a prompt that includes it gives.
    projects_all: whether tokens that a layer does not compute (`active`) still get its keys and
      values: the decoder projects those of all tokens of a chunk, and `fill` is handed all.
    spreads: whether the method runs with the slots of its caches split over devices.
    by_layer: whether decode steps compile slowly, and on a CPU are compiled layer by layer.
      Prompts always are, where the model can (`kvjax.models.decode.by_layer`).
    stream: how prompts are read piece by piece; None: as one likes.
    uneven: of a cache whose heads do not all have as many slots: why they cannot be split over so
      many devices, as a text, empty if they can; None: heads are equal.
    prunes: whether data decide how many slots a plan lists: what is said of bytes is the most.
    weighs_outputs: whether `rank` reads the layer's output projection (`Prompt.wo`).
    endless: whether no query meets a distance beyond what the method keeps, however long a row:
      the context that the model was trained for is not outgrown.
    repeats: whether a context is scored by having the model repeat it
      (`kvjax.models.decode.reconstruct`): `prefill` alone keeps its newest tokens.
    scans: of a cache, the least and largest share of heads, layers and steps that look at keys to
      choose some of them: it only says how many bytes a step moves (`kvjax.analysis.traffic`).
  """

  positional: bool = True
  wants_logits: bool = False
  ordered: bool = False
  chunkable: bool = True
  order_independent: bool = False
  projects_all: bool = False
  spreads: bool = False
  prunes: bool = False
  weighs_outputs: bool = False
  endless: bool = False
  repeats: bool = False
  by_layer: bool = False
  stream: Stream | None = None
  uneven: Callable[[CacheSpec, int], str] | None = None
  scans: Callable[[CacheSpec], tuple[float, float]] = every_step

  def but(self, **changes: Any) -> Traits:
    """The same, but for some of them."""
    return dataclasses.replace(self, **changes)

  def pieces(self, length: int) -> list[int] | None:
    """Sizes of the pieces in which a turn of `length` tokens must be read; None: any sizes."""
    return None if self.stream is None else self.stream.pieces(length)
