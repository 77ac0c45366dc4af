"""The decode loop: one call of the device after another, while the host reads earlier tokens."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from numpy.typing import ArrayLike

from kvjax.families.method import Method
from kvjax.models.decode import checks
from kvjax.models.decode.prefill import pad, prefill
from kvjax.models.decode.sampling import Sampling
from kvjax.models.decode.step import FEW, UNSOUND, Always, Device, Step, ends
from kvjax.models.decode.stopping import RowText
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn import flat
from kvjax.models.nn.flat import join, split
from kvjax.models.nn.transformer import Caches, Transformer
from kvjax.runtime import arguments

__all__ = ["Generation", "compile_ahead", "generate", "join", "pad", "prefill", "split"]

GREEDY = Sampling()
AHEAD = 2  # calls of a step under way while the host reads one
FIRST = 2  # tokens returned first; then twice as many each time, up to a chunk


@dataclasses.dataclass(frozen=True)
class Generation:
  """The result of `generate`.

  Attributes:
    tokens: int32 [B, steps], −1 after a row has stopped (the stop token, or the token that
      completes a stop string, is the last one).
    lengths: int32 [B], tokens of each row.
    last: float32 [B, V], the logits after each row's last token: pass them on to continue.
    logits: float32 [B, steps, V], the logits that each token was chosen from, or None.
    logprobs: float32 [B, steps], log-probability in nats of each token under the model (before
      temperature and filters), or None; 0 where there is no token.
    texts: each row's text, without stop tokens and stop strings; None without a tokenizer.
  """

  tokens: np.ndarray
  lengths: np.ndarray
  last: Array
  logits: Array | None = None
  logprobs: np.ndarray | None = None
  texts: list[str] | None = None


def generate(
  model: Transformer,
  logits: Float[Any, "B V"],
  caches: Caches,
  method: Method,
  *,
  steps: int,
  sampling: Sampling = GREEDY,
  seed: int = 0,
  rows: ArrayLike | None = None,
  stop: Sequence[int] = (),
  stop_strings: Sequence[str] = (),
  tokenizer: Tokenizer | None = None,
  live: ArrayLike | None = None,
  forced: ArrayLike | None = None,
  return_logits: bool = False,
  return_logprobs: bool = False,
  chunk: int = 16,
  on_chunk: Callable[[np.ndarray], Any] | None = None,
  on_text: Callable[[list[str]], Any] | None = None,
) -> tuple[Generation, Caches]:
  """Decodes up to `steps` tokens per row.

  Each step chooses a token from the current logits, inserts it into the caches and predicts the
  next; every token that is returned is therefore cached, and a row that stopped is idle from then
  on. Decoding ends early when all rows have stopped.

  The host reads tokens while the next `AHEAD` = 2 calls are under way, of a step each. On a GPU a
  call takes more steps, and one is under way, where neither stop strings nor logits are asked for:
  up to 64 under methods that stream, or up to `chunk` where tokens are handed over; four of other
  models below 8 GB, if no tokens are handed over.

  Stop strings are found by the host: two tokens that are not returned, or fewer at the end of the
  steps, enter the row's cache and its `last`. If that matters (for a conversation that continues),
  use `chunk=1`: no further tokens enter, but the device waits for the host at every token.

  A model with random weights, whose tokens mean nothing:

  >>> import kvjax
  >>> from flax import nnx
  >>> from kvjax.models.decode.generate import generate, pad, prefill
  >>> from kvjax.models.nn.config import ModelConfig
  >>> from kvjax.models.nn.transformer import Transformer
  >>> sizes = {"vocab": 61, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8}
  >>> model = Transformer(ModelConfig(**sizes, ffn=64), rngs=nnx.Rngs(0))
  >>> method = kvjax.SnapKV(budget=8, window_size=4)
  >>> caches = method.init_caches(model.spec(batch=1, capacity=96))
  >>> logits, caches = prefill(model, *pad([range(20)]), caches, method)
  >>> out, caches = generate(model, logits, caches, method, steps=5)
  >>> out.tokens.shape, caches[0].seen.tolist()
  ((1, 5), [25])

  Args:
    model: the decoder.
    logits: float32 [B, V] of `prefill`, or `Generation.last` of an earlier call.
    caches: donated; the result replaces them.
    method: the KV-cache method.
    steps: tokens to generate.
    sampling: temperature and filters; the likeliest token by default. Other values do
      not recompile, unless the temperature changes from or to 0.
    seed: random seed, below 2³². A draw depends on (seed, the row's number, the token's position
      in the row) only: not on the row's neighbours, nor on where an earlier call ended.
    rows: int32 [B], the rows' numbers in all that is generated, so that a row draws the same text
      in any batch; None: 0, 1, …
    stop: token ids that end a row (unless forced).
    stop_strings: strings that end a row; its text ends before them.
    tokenizer: turns tokens into text: for `stop_strings`, `on_text` and `Generation.texts`.
    live: bool [B], rows that take part (None: all).
    forced: int32 [B, steps], tokens to insert instead of the chosen ones; −1 = free.
    return_logits: keep the logits of every step, float32 [B, steps, V].
    return_logprobs: keep the log-probability of every token, float32 [B, steps].
    chunk: tokens that are handed over at a time, the first ones sooner: 2, 4, 8, … up to `chunk`.
    on_chunk: called with the tokens int32 [B, n] of every chunk as they come (−1 = no token).
    on_text: called with the new text of every row after every chunk; all calls together give
      `Generation.texts`.

  Returns:
    The generation and the caches.

  Raises:
    TypeError: `method` is no method, or `caches` no caches, or a number is of another type.
    ValueError: an argument is out of range, the caches are those of another method or model or were
      donated before, or the longest row would outgrow the capacity of a method that keeps every
      token, or the context that the model was converted for. Nothing has run then and the caches
      are intact.
    FloatingPointError: a row's logits are NaN or infinite: those that it is given (nothing has run
      then), or those after a step, which the message names (the caches are gone then).
    MemoryError, JaxRuntimeError: as in `prefill`.

  Warns:
    UserWarning: as `prefill`; steps count that may not be taken.
  """
  checks.laid_out(caches, method, model.spec(1, 1))
  logits = checks.logits(logits, caches, model.config.vocab)
  checks.kind("sampling", sampling, Sampling)
  batch, vocab = logits.shape
  checks.callbacks(on_chunk=on_chunk, on_text=on_text)
  steps, chunk = checks.whole("steps", steps, 1), checks.whole("chunk", chunk, 1)
  seed = checks.whole("seed", seed, 0, 2**32)
  stop, stop_strings = checks.stops(stop, vocab), checks.stop_strings(stop_strings)
  live = checks.live(live, batch)
  rows = checks.row_numbers(np.arange(batch) if rows is None else rows, batch)
  if forced is not None:
    forced = checks.forced(arguments.array("forced", forced), batch, steps, vocab)
  checks.tokenizer(tokenizer, bool(stop_strings or on_text is not None))
  seen = checks.room(caches, method, steps * live, f"steps = {steps}")
  checks.context(model.config, method, seen, steps * live, f"generate(steps={steps})")
  if (ill := live & ~np.asarray(checks.sound(logits))).any():
    raise checks.unsound("generate", int(ill.argmax()), "step 0", model, caches)

  always = Always(ends(stop), rows, sampling.knobs(vocab), np.uint32(seed))
  kind = method, sampling.greedy, return_logprobs
  shown = on_chunk is not None or on_text is not None
  alone = return_logits or bool(stop_strings)
  unseen = not (shown or alone) and chunk > 1 and steps >= 4 * FEW
  device = Device(model, kind, logits, caches, live, always, forced, unseen)
  host = _Host(live, stop, forced, tokenizer, stop_strings, chunk, on_chunk, on_text)
  under_way: collections.deque[Step] = collections.deque()
  most = 1 if alone else device.most
  most = min(most, chunk) if shown or chunk == 1 else most
  ahead = steps if not host.looks else -(-AHEAD // most) if chunk > 1 else 0
  used: list[Array] = []
  left, count = steps, 1 if shown else most

  while left:
    if return_logits:
      used.append(device.logits)
    under_way.append(device.step(min(count, left)))
    left, count = left - under_way[-1].steps, min(2 * count, most)
    if len(under_way) > ahead:
      device.end(_read(device, host, under_way.popleft(), seen))
      if not host.live.any():
        break
  while under_way and host.live.any():
    _read(device, host, under_way.popleft(), seen)
  host.finish()

  tokens, logprobs = host.results(steps)
  lengths = (tokens >= 0).sum(1, dtype=np.int32)
  every = _side_by_side(used, steps) if return_logits else None
  told = logprobs if return_logprobs else None
  return Generation(tokens, lengths, device.logits, every, told, host.written()), device.caches


def compile_ahead(
  model: Transformer,
  method: Method,
  caches: Caches,
  *,
  sampling: Sampling = GREEDY,
  stop: Sequence[int] = (),
  return_logprobs: bool = False,
) -> None:
  """Begins to compile the step of `generate` in a thread, to be called before the prompt is read.

  The first step waits for it. Nothing where the program is there, or where `generate` runs one for
  each layer, or in several processes. Where nobody looks at tokens as they come `generate` may run
  another program, of several steps.

  Args:
    model, method: as `generate` takes them.
    caches: those that `prefill` is given next; they stay as they are.
    sampling, stop, return_logprobs: as `generate` takes them; of `sampling` only whether its
      temperature is 0.

  Raises:
    TypeError, ValueError: as in `generate`.
  """
  checks.laid_out(caches, method, model.spec(1, 1))
  checks.kind("sampling", sampling, Sampling)
  batch, vocab = caches[0].seen.shape[0], model.config.vocab
  always = Always(
    ends(checks.stops(stop, vocab)),
    np.arange(batch, dtype=np.int32),
    sampling.knobs(vocab),
    np.uint32(0),
  )
  kind, logits = (method, sampling.greedy, return_logprobs), jnp.zeros((batch, vocab))
  Device(model, kind, logits, caches, np.ones(batch, bool), always, None).compile_ahead()


def _read(
  device: Device, host: _Host, step: Step, seen: Int[np.ndarray, " B"]
) -> Bool[np.ndarray, " B"]:
  """Waits for a call's steps; returns the rows that a stop string ends with them."""
  found, (every, told) = np.zeros_like(host.live), device.fetch(step)
  for i, tokens in enumerate(every):
    if (ill := host.live & (tokens == UNSOUND)).any():
      row, count = int(ill.argmax()), host.count + 1
      place = f"step {count}, after {seen[row] + count} tokens"
      raise checks.unsound("generate", row, place, device.model, device.caches)
    if host.live.any():
      found |= host.read(tokens, None if told is None else told[i])
  return found


class _Host:
  """Decoding as the host sees it: tokens as they come, their text, and who has ended.

  Attributes:
    live: bool [B], rows that go on.
    looks: whether anybody has to see tokens before the last one is there.
  """

  def __init__(
    self,
    live: np.ndarray,
    stop: Sequence[int],
    forced: np.ndarray | None,
    tokenizer: Tokenizer | None,
    stop_strings: Sequence[str],
    chunk: int,
    on_chunk: Callable[[np.ndarray], Any] | None,
    on_text: Callable[[list[str]], Any] | None,
  ):
    self.live, self._stop, self._forced = live.copy(), sorted(set(stop)), forced
    self._texts: list[RowText] | None = None
    if tokenizer is not None:
      self._texts = [RowText(tokenizer.stream(), stop_strings) for _ in live]
    self.looks = bool(stop or stop_strings or on_chunk or on_text)
    self._chunk, self._on_chunk, self._on_text = chunk, on_chunk, on_text
    self._tokens: list[np.ndarray] = []
    self._logprobs: list[np.ndarray] = []
    self._new = [""] * len(live)
    self._given, self._next = 0, min(FIRST, chunk)  # tokens handed over, and with the next call

  @property
  def count(self) -> int:
    """Steps that have been read."""
    return len(self._tokens)

  def read(
    self, tokens: Int[np.ndarray, " B"], logprobs: Float[np.ndarray, " B"] | None
  ) -> Bool[np.ndarray, " B"]:
    """Takes a step's tokens; returns the rows that a stop string ends with it."""
    tokens = np.where(self.live, tokens, -1)
    free = True if self._forced is None else self._forced[:, len(self._tokens)] < 0
    stopped = np.isin(tokens, self._stop) & free
    found = np.zeros_like(stopped)
    if self._texts is not None:
      for row in np.flatnonzero(tokens >= 0):
        text = self._texts[row]
        self._new[row] += text.flush() if stopped[row] else text.feed(int(tokens[row]))
        found[row] = text.ended
    self.live &= ~(stopped | found)
    self._tokens.append(tokens)
    if logprobs is not None:
      self._logprobs.append(logprobs)
    if len(self._tokens) - self._given == self._next:
      self._hand_over()
    return found

  def _hand_over(self) -> None:
    """Calls back with what is new."""
    tokens = self._tokens[self._given :]
    if self._on_text is not None:
      self._on_text(self._new)
    if self._on_chunk is not None:
      self._on_chunk(np.stack(tokens, 1))
    self._new = [""] * len(self._new)
    self._given += len(tokens)
    self._next = min(2 * self._next, self._chunk)

  def finish(self) -> None:
    """Hands over the rest, once no token follows."""
    if self._given < len(self._tokens):
      self._hand_over()
    rest = [text.flush() for text in self._texts or ()]
    if self._on_text is not None and any(rest):
      self._on_text(rest)

  def results(self, steps: int) -> tuple[Int[np.ndarray, "B N"], Float[np.ndarray, "B N"]]:
    """Tokens and log-probabilities, padded to `steps` with −1 and 0."""
    shape = len(self.live), steps
    tokens, logprobs = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
    if self._tokens:
      tokens[:, : len(self._tokens)] = np.stack(self._tokens, 1)
    if self._logprobs:
      logprobs[:, : len(self._logprobs)] = np.stack(self._logprobs, 1)
    return tokens, np.where(tokens >= 0, logprobs, 0)

  def written(self) -> list[str] | None:
    """Every row's text."""
    return None if self._texts is None else [text.text for text in self._texts]


def _side_by_side(steps: list[Array], size: int) -> Array:
  """Logits [B, V] of one step each as [B, size, V], padded with zeros; the list is used up."""
  pieces = []
  while steps:  # a few at a time: few sizes, and nothing is held twice
    pieces.append(_stacked(steps[:16]))
    del steps[:16]
  whole = jnp.concatenate(pieces, 1)
  return jnp.pad(whole, ((0, 0), (0, size - whole.shape[1]), (0, 0)))


@flat.own
@jax.jit
def _stacked(parts: list[Array]) -> Array:
  return jnp.stack(parts, 1)
