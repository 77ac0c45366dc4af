"""A prompt that survives its program: what is read of it is kept in a folder, and gone on from."""

import dataclasses
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from kvjax.core.cache import CacheSpec
from kvjax.families.method import Method
from kvjax.models.decode.streams import PromptStream
from kvjax.models.io import files
from kvjax.models.nn.transformer import Transformer
from kvjax.programs import common
from kvjax.programs.evals import origin

EVERY = 600.0  # seconds between two savings
PROMPT, CACHES = "prompt.npz", "caches"


@dataclasses.dataclass
class Keeper:
  """Keeps the caches of one prompt in a folder: as it is read, and where it is interrupted.

  The folder holds the prompt's tokens and a fingerprint of the weights beside the caches, so that
  those of another prompt or model are refused.

  Attributes:
    folder: made if it is not there.
    saved: tokens that the folder has.
  """

  folder: pathlib.Path
  saved: int = 0
  _time: float = dataclasses.field(default_factory=time.monotonic)

  def stream(
    self, model: Transformer, method: Method, spec: CacheSpec, ids: list[int], **how: Any
  ) -> PromptStream:
    """The stream of a whole prompt, begun, or restored from the folder.

    Raises:
      ValueError: the folder has caches of another prompt or model, or of another method or sizes.
      NotImplementedError: several processes run.
      OSError: the folder cannot be read or written.
    """
    if jax.process_count() > 1:
      raise NotImplementedError(f"--keep: found {jax.process_count()} processes, expected one")
    weights, tokens = origin.weights(model), np.array(ids, np.int32)
    if (self.folder / CACHES).exists():
      before = self._prompt(weights)  # first: the caches may be gigabytes
      stream = PromptStream.restore(self.folder / CACHES, model, method, spec, **how)
      self.saved = int(stream.seen[0])
      self._check(before, tokens, extends=how["chunk"] is None)
    else:
      stream = PromptStream(model, method, spec, **how)
    self.folder.mkdir(parents=True, exist_ok=True)
    with common.written_aside(self.folder / PROMPT) as path, path.open("wb") as file:
      np.savez(file, weights=np.array(weights), tokens=tokens)
    return stream

  def _prompt(self, weights: str) -> np.ndarray:
    """The prompt's tokens that the folder has; raises unless the model has these weights."""
    path = self.folder / PROMPT
    with files.whole(path, "the prompt of caches that --keep saved"), np.load(path) as kept:
      others, before = str(kept["weights"]), kept["tokens"]
    if others != weights:
      raise ValueError(f"--keep: found caches of another model in {self.folder}, expected its own")
    return before

  def _check(self, before: np.ndarray, tokens: np.ndarray, *, extends: bool) -> None:
    """Raises unless the prompt begins with what was read, and is the same where it may not grow."""
    count = self.saved if extends else None
    if len(tokens) <= self.saved or not np.array_equal(before[:count], tokens[:count]):
      raise ValueError(
        f"--keep: found {self.saved:,} tokens of another prompt in {self.folder}, expected "
        "those of this one, or an empty folder"
      )

  def read(self, stream: PromptStream, ids: list[int], on_chunk: Callable[[int, int], Any]) -> None:
    """Feeds a stream the prompt from where it is saved, and saves it: every ten minutes, and in the
    end, up to a chunk that the last token is not in.

    Raises:
      SystemExit: by Ctrl-C or SIGTERM; what was read is saved.
    """

    def then_save(count: int, end: int) -> None:
      on_chunk(count, end)
      if time.monotonic() - self._time > EVERY:
        self._save(stream)

    try:
      if rest := ids[self.saved : -1]:
        stream.feed([rest], on_chunk=then_save)
    except KeyboardInterrupt:
      self._save(stream)
      raise SystemExit(
        f"\nstopped: {self.saved:,} of {len(ids):,} tokens are in {self.folder}; the same command "
        "reads on from there"
      ) from None
    self._save(stream)
    stream.feed([ids[-1:]], on_chunk=on_chunk)

  def _save(self, stream: PromptStream) -> None:
    if (seen := int(stream.seen[0])) > self.saved:
      stream.save(self.folder / CACHES)
      self.saved = seen
    self._time = time.monotonic()
