"""`generate` and README's own loop beside a loop on the device, as a user calls them"""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from jax import lax

import kvjax
from kvjax.models.decode.generate import generate, join, split
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn.transformer import Transformer
from kvjax.programs import suites
from kvjax.programs.suites import Case, Contender, e2e

NEW = 64  # tokens of a call
SHORT = 8  # tokens of a short answer
MARKS = [(batch, tokens) for tokens in (4096, 32768) for batch in (1, 8)]
FULL = kvjax.Full()


@suites.suite
def cases(quick: bool, peers: bool) -> Iterator[tuple]:
  """Llama-3.1-8B's shape under the full cache."""
  name = "tiny" if quick else "Llama-3.1-8B"
  for batch, tokens in [(2, 64)] if quick else MARKS:
    yield f"{name} B{batch} T{tokens}", case, name, batch, tokens


def case(label: str, name: str, batch: int, tokens: int) -> Case:
  """One shape: `NEW` tokens by each way, from the same caches and the same logits."""
  model = e2e.weights(name)
  held = [e2e.filled(model, FULL, batch, tokens, room=NEW)]
  start = jax.tree.map(jnp.copy, (held[0][0].pos, held[0][0].rows))
  logits = jax.random.normal(jax.random.key(2), (batch, model.config.vocab))
  words = tokenizer(model.config.vocab)
  run = functools.partial(_Way, held, start)

  def call(caches: Any, stop: Any = (), **how: Any) -> tuple[np.ndarray, Any]:
    out, caches = generate(model, logits, caches, FULL, steps=NEW, stop=stop, **how)
    return out.tokens, caches

  own = _own(model, logits, words)
  plain = run(own).output()
  never = sorted(set(range(model.config.vocab)) - set(plain.ravel().tolist()))[:2]
  end, short = _short(plain)
  streamed = {"tokenizer": words, "stop_strings": ["\0"], "on_text": lambda texts: None}
  ways: dict[str, tuple[Callable[..., Any], int]] = {
    "loop": (_on_device(model, logits), NEW),
    "generate": (call, NEW),
    "generate, streamed": (functools.partial(call, stop=never, **streamed), NEW),
    "generate, chunk=1": (functools.partial(call, stop=never, chunk=1), NEW),
    "own loop": (own, NEW),
    "short answer": (functools.partial(call, stop=end, **streamed), short),
  }
  contenders = []
  for way, (decode, count) in ways.items():
    compared = run(decode).output if way != "short answer" else None
    contenders.append(Contender(way, functools.partial(run(decode).seconds, count), compared))

  return Case(
    name=label,
    shapes=f"{NEW} tokens, {model.config.layers} layers, {model.dtype.name}",
    bytes=sum(x.nbytes for x in jax.tree.leaves(held[0])),
    reference=lambda: plain,
    tolerance=0,  # the same tokens, each of them
    contenders=contenders,
    subject="generate",
    figures=lambda seconds: {"tokens of the short answer": short},
  )


def _short(tokens: np.ndarray) -> tuple[list[int], int]:
  """Stop tokens that end every row's answer after `SHORT` tokens at most, and the longest one."""
  stop = sorted(set(tokens[:, SHORT - 1].tolist()))
  return stop, int(np.isin(tokens, stop).argmax(1).max()) + 1


class _Way:
  """A way to decode from the same caches, which it donates and puts back."""

  def __init__(self, held: list[Any], start: Any, run: Callable[..., tuple[Any, Any]]):
    self._held, self._start, self._run = held, start, run

  def output(self) -> np.ndarray:
    tokens, caches = self._run(self._held[0])
    self._put_back(caches)
    return np.asarray(tokens)

  def seconds(self, count: int) -> float:
    """Of a token, from the call until all tokens are on the host."""
    jax.block_until_ready(self._held[0])
    began = time.perf_counter()
    tokens, caches = self._run(self._held[0])
    np.asarray(tokens)
    taken = time.perf_counter() - began
    self._put_back(caches)
    return taken / count

  def _put_back(self, caches: Any) -> None:
    """Nothing of what was decoded is left in sight; each layer donates arrays of its own."""
    begun = [jax.tree.map(jnp.copy, self._start) for _ in caches]
    layers = zip(caches, begun, strict=True)
    self._held[0] = tuple(c.put(slots={"pos": pos}, rows=rows) for c, (pos, rows) in layers)


def tokenizer(vocab: int) -> Tokenizer:
  """One whose tokens are letters, and words of some length."""
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  words = [*alphabet, *(f"Ġword{i}" for i in range(len(alphabet), vocab))][:vocab]
  table = {word: i for i, word in enumerate(words)}
  return Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE(vocab=table, merges=[])))


def _on_device(model: Transformer, logits: Any) -> Callable[..., tuple[Any, Any]]:
  """Greedy decoding, `e2e.STEPS` steps a dispatch: what the other benches time."""
  graph, leaves = split(model)

  @functools.partial(jax.jit, donate_argnums=1)
  def several(leaves: Any, caches: Any, token: Any) -> Any:
    def step(i: Any, carry: Any) -> Any:
      caches, token, tokens = carry
      tokens = tokens.at[:, i].set(token)
      logits, caches = join(graph, leaves).decode(token, caches, FULL)
      return caches, jnp.argmax(logits, -1).astype(jnp.int32), tokens

    tokens = jnp.zeros((token.shape[0], e2e.STEPS), jnp.int32)
    return lax.fori_loop(0, e2e.STEPS, step, (caches, token, tokens))

  def run(caches: Any) -> tuple[Any, Any]:
    token, parts = jnp.argmax(logits, -1).astype(jnp.int32), []
    for _ in range(NEW // e2e.STEPS):
      caches, token, tokens = several(leaves, caches, token)
      parts.append(tokens)
    return np.concatenate([np.asarray(x) for x in parts], 1), caches

  return run


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _step(graph: Any, leaves: Any, caches: Any, tokens: Any) -> Any:
  logits, caches = join(graph, leaves).decode(tokens, caches, FULL)
  return jnp.argmax(logits, -1), caches


def _own(model: Transformer, logits: Any, tokenizer: Tokenizer) -> Callable[..., tuple[Any, Any]]:
  """The loop of README, one step ahead of the text."""
  graph, leaves = split(model)

  def run(caches: Any) -> tuple[Any, Any]:
    token, found = jnp.argmax(logits, -1), []
    streams = [tokenizer.stream() for _ in range(len(logits))]
    for _ in range(NEW):
      token.copy_to_host_async()
      following, caches = _step(graph, leaves, caches, token)
      found.append(np.asarray(token))
      for stream, ident in zip(streams, found[-1].tolist(), strict=True):
        stream.feed(ident)
      token = following
    return np.stack(found, 1), caches

  return run
