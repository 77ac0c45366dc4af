"""A prompt that is read and answered: its progress, and what it takes in seconds and bytes."""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.leaves import Layout
from kvjax.families.method import Method
from kvjax.models.decode import checks
from kvjax.models.decode.generate import pad, prefill
from kvjax.models.decode.stopping import RowText
from kvjax.models.decode.streams import PromptStream
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn.transformer import Caches, Transformer
from kvjax.ops import offload
from kvjax.programs import common, console
from kvjax.programs.clock import Clock
from kvjax.programs.keep import Keeper

# A long prompt is read in 16 pieces at most: its progress shows, and few programs are compiled.
PIECES, LEAST = 16, 2048


@dataclasses.dataclass
class Turn:
  """A prompt and its answer, as far as they have come.

  Attributes:
    read, written: tokens of both.
    reading, writing: seconds of both.
    stream: the prompt's, where it is read in parts: its caches survive an interrupt.
  """

  read: int = 0
  written: int = 0
  reading: Clock = dataclasses.field(default_factory=Clock)
  writing: Clock = dataclasses.field(default_factory=Clock)
  stream: PromptStream | None = None

  def said(self, caches: Caches) -> str:
    """Its tokens, seconds and bytes, in words."""
    used, allocated = (size / 1e6 for size in bytes_of(caches))
    return (
      f"read {self.read:,} tokens in {self.reading.running:.1f} s, wrote {self.written} at "
      f"{self.written / self.writing.running:.1f} a second, compiled {self._compiling:.1f} s; "
      f"caches: {int(caches[0].seen[0]):,} tokens, {used:.1f} MB used, {allocated:.1f} MB allocated"
    )

  def facts(self, caches: Caches) -> dict[str, Any]:
    """The same as JSON has it: tokens, seconds, bytes."""
    used, allocated = bytes_of(caches)
    seconds = {"read": self.reading.running, "write": self.writing.running}
    return {
      "prompt_tokens": self.read,
      "seconds": {**seconds, "compile": self._compiling},
      "cache_bytes": {"used": used, "allocated": allocated, "host": common.bytes_of(caches)[1]},
    }

  @property
  def _compiling(self) -> float:
    return self.reading.compiling + self.writing.compiling


def read(
  model: Transformer,
  ids: list[int],
  caches: Caches | None,
  method: Method,
  spec: CacheSpec,
  turn: Turn,
  step: console.Step,
  *,
  chunk: int | None = None,
  begun: int = 0,
  keep: Keeper | None = None,
) -> tuple[Array, Caches]:
  """`prefill` of one row, within a step that shows how much has been read.

  Args:
    model, caches, method: as `prefill` takes them; no caches with `keep`.
    ids: the prompt's tokens.
    spec: sizes of the caches.
    turn: counts tokens and seconds, and has the stream.
    step: not yet entered.
    chunk: tokens to read at a time; None: as `pieces` says.
    begun: tokens of the prompt that the caches hold, of a stream that was interrupted.
    keep: keeps the caches in a folder, or goes on from those there.

  Returns:
    Logits and caches.
  """

  def on_chunk(count: int, end: int) -> None:
    turn.read = begun + count
    step.progress(f"{turn.read / len(ids):.0%}" if count < end else "")

  size = chunk or pieces(method, len(ids), LEAST if keep is None else 0)
  with turn.reading, step:
    if size is None and method.traits.stream is None:
      logits, caches = prefill(model, *pad([ids]), caches, method)
    else:
      how = {"chunk": size, "total": None if size is None else [len(ids)]}
      if keep is None:
        turn.stream, room = PromptStream(model, method, spec, caches=caches, **how), 0
        turn.stream.feed([ids[begun:]], on_chunk=on_chunk)
      else:
        turn.stream, room = keep.stream(model, method, spec, ids, **how), spec.capacity - len(ids)
        begun = keep.saved
        keep.read(turn.stream, ids, on_chunk)
      logits, caches = turn.stream.finish(room=room, on_chunk=on_chunk)
    jax.block_until_ready(logits)
  turn.read = len(ids)
  return logits, caches


def pieces(method: Method, length: int, short: int = LEAST) -> int | None:
  """Tokens to read at a time of a prompt; None: at once, since it is short or the method has to."""
  if length <= short or method.traits.stream is not None or not method.traits.chunkable:
    return None
  return max(LEAST, 1 << (-(-length // PIECES) - 1).bit_length())


def check_context(model: Transformer, method: Method, seen: int, new: int, what: str) -> None:
  """Warns before anything is read where a row will outgrow the model's context, once a program.

  Args:
    model, method: what reads it.
    seen: tokens that are cached.
    new: tokens that follow, of prompt and answer.
    what: names these.

  Raises:
    ValueError: the model was converted for fewer tokens.
  """
  checks.context(model.config, method, np.array([seen]), np.array([new]), what)
  # Prefill and generate would say it again.
  warnings.filterwarnings("ignore", ".*found a row of more tokens than max_context", UserWarning)


def stopped(tokenizer: Tokenizer, tokens: list[int], limit: int, stop: Sequence[str]) -> bool:
  """True if an answer of at most `limit` tokens ended at a stop, be it with its last token."""
  text = RowText(tokenizer.stream(), stop)
  for token in tokens:
    text.feed(token)
  text.flush()
  return len(tokens) < limit or tokens[-1] in tokenizer.ends or text.ended


def bytes_of(caches: Caches) -> tuple[int, int]:
  """Bytes of caches that hold something, and all of them, on the device and offloaded.

  Slots without a token hold nothing, and blocks of a store that nothing was evicted to; summaries
  and other statistics count as a whole.
  """
  allocated = _nbytes(caches)
  return allocated - sum(_empty(cache) for cache in caches), allocated


def _empty(cache: Cache) -> int:
  """Bytes of its slots without a token, and of a store's blocks that are still free."""
  parts = [(cache.slots, float((cache.pos < 0).mean()))]
  if cache.layout is Layout.SPLIT:
    apart = cache.heads["apart"]
    parts.append((apart, float((apart["pos"] < 0).mean())))
  if cache.layout is Layout.HOSTED:
    store = cache.heads["store"]
    parts.append((store, 1 - float(cache.rows["gone"].mean()) / offload.blocks_of(store)))
  return round(sum(_nbytes(arrays) * share for arrays, share in parts))


def _nbytes(tree: Any) -> int:
  return sum(x.nbytes for x in jax.tree.leaves(tree))
