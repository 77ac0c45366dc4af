"""kvjax in a few minutes: one small model, one needle in a long text, every KV cache.

SmolLM2-135M-Instruct is fetched and converted the first time. It then answers a chat question,
and a needle question over presidential addresses under one KV-cache method after the other. The
table at the end compares each method with the full cache.
"""

import dataclasses
import json
import os
import pathlib
import random
import time
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import kvjax
from kvjax.shared_prefill import take
from models.generate import generate, prefill
from models.tokenizer import Tokenizer
from models.transformer import Caches, Transformer
from scripts import common, console
from scripts.evals import needle, scores
from scripts.evals.divergence import compare
from scripts.evals.prompt import Reader
from scripts.evals.task import Row

CHUNK = 8  # tokens that appear at once in the chat
ANSWER_TOKENS = 24
CONTINUATION_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class Args:
  """Chat, then a needle question under every chosen KV-cache method, on a real model."""

  methods: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")] = ()
  """Registered names, or "all"; by default the baselines and the systems that are registered.
  The full cache always runs: it is what the others are compared with."""
  length: Annotated[int | None, tyro.conf.arg(metavar="TOKENS")] = None
  """Tokens of the needle question and its answer; 2,000 on a CPU and 4,000 on a GPU by default."""
  budget: Annotated[int | None, tyro.conf.arg(metavar="TOKENS")] = None
  """Tokens that a method keeps or reads per step; a quarter of the length by default."""
  depth: Annotated[float | None, tyro.conf.arg(metavar="SHARE")] = None
  """Where the needle stands, from 0 (start of the text) to 1 (its end); drawn by default."""
  seed: int = 3
  """Draws the text, the needle and its depth."""
  question: str = "Give me three tips for writing clear code."
  """What the chat asks."""
  chat_tokens: int = 96
  """Longest chat answer; 0 skips the chat."""
  checkpoint: common.Checkpoint = None
  """A converted checkpoint; SmolLM2-135M-Instruct by default."""
  json: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="PATH")] = None
  """Also writes the table here."""


@dataclasses.dataclass(frozen=True)
class Result:
  """One row of the table.

  Attributes:
    name: the method's registered name.
    method: the method with its settings.
    answer: what the model said.
    right: whether the answer holds the needle's number.
    top1: share of the teacher-forced steps whose likeliest token is the full cache's.
    kl: mean KL(full ‖ method) of the next-token distributions over those steps, in nats.
    tokens_per_second: decoding speed at batch 1, compilation excluded.
    cache_bytes: bytes of the cache's arrays on the device.
    share: cache_bytes relative to the full cache.
  """

  name: str
  method: str
  answer: str
  right: bool
  top1: float
  kl: float
  tokens_per_second: float
  cache_bytes: int
  share: float


def choose(names: tuple[str, ...]) -> tuple[str, ...]:
  """The methods to run, the full cache first.

  Raises:
    ValueError: a name is not registered.
  """
  if names == ("all",):
    names = tuple(kvjax.METHODS)
  elif not names:
    names = common.usual_methods()
  unknown = [name for name in names if name not in kvjax.METHODS]
  if unknown:
    known = ", ".join(kvjax.METHODS)
    raise ValueError(f"--methods: found {', '.join(unknown)}, expected all or some of: {known}")
  return ("full", *dict.fromkeys(name for name in names if name != "full"))


def chat(
  model: Transformer, tokenizer: Tokenizer, question: str, *, steps: int, capacity: int
) -> None:
  """Streams an answer under the full cache; the second line says how fast it came."""
  method = kvjax.Full()
  ids = tokenizer.chat([{"role": "user", "content": question}])
  with console.step(f"reading {len(ids)} tokens of chat"):
    caches = method.init_caches(model.spec(1, capacity))
    tokens = common.right_padded(ids, multiple=64)
    logits, caches = prefill(model, tokens, np.array([len(ids)]), caches, method)
    logits.block_until_ready()
  streamer = console.Streamer()
  stream, text = tokenizer.stream(), ""
  times = [time.perf_counter()]

  def show(chunk: np.ndarray) -> None:
    nonlocal text
    text += "".join(stream.feed(token) for token in chunk[0].tolist() if token >= 0)
    streamer.show(text)
    times.append(time.perf_counter())

  generation, _ = decode(model, tokenizer, logits, caches, method, steps=steps, on_chunk=show)
  streamer.show(text + stream.flush(), final=True)
  speed = (generation.lengths[0] - CHUNK) / (times[-1] - times[1]) if len(times) > 2 else 0.0
  print(f"  ({generation.lengths[0]} tokens, {speed:.1f} tokens/s after the first {CHUNK})")


def decode(
  model: Transformer,
  tokenizer: Tokenizer,
  logits: jax.Array,
  caches: Caches,
  method: kvjax.Method,
  *,
  steps: int,
  forced: np.ndarray | None = None,
  on_chunk: Any = None,
) -> Any:
  """`generate` with the same static arguments everywhere: each method compiles one loop."""
  return generate(
    model,
    logits,
    caches,
    method,
    steps=steps,
    stop=() if tokenizer.eos is None else (tokenizer.eos,),
    forced=forced,
    return_logits=True,
    chunk=CHUNK,
    on_chunk=on_chunk,
  )


@dataclasses.dataclass
class Contest:
  """The same prompt, and the same forced continuation, under one method after the other."""

  model: Transformer
  tokenizer: Tokenizer
  row: Row
  length: int
  forced: np.ndarray | None = None
  full_logits: jax.Array | None = None
  full_bytes: int = 0

  @property
  def capacity(self) -> int:
    """Slots that the full cache needs for the prompt and the longer of the two runs."""
    return self.length + CONTINUATION_TOKENS

  def prompt(self) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, padded to a size that does not depend on the text, and their number."""
    ids = Reader(self.tokenizer).row(self.row).ids
    return common.right_padded(ids, size=self.length - ANSWER_TOKENS), np.array([len(ids)])

  def read(self, method: kvjax.Method) -> tuple[jax.Array, Any]:
    """Prefills the prompt under a method (or several at once: `SharedPrefill`)."""
    caches = method.init_caches(self.model.spec(1, self.capacity))
    tokens, lengths = self.prompt()
    return jax.block_until_ready(prefill(self.model, tokens, lengths, caches, method, past=0))

  def run(self, name: str, method: kvjax.Method, logits: jax.Array, caches: Caches) -> Result:
    """Answers the question, then decodes the forced continuation from the same caches.

    The full cache has to come first: its own answer, continued by natural text, is what the
    others are forced to follow.
    """
    eos = self.tokenizer.eos
    with console.step(f"{name}: answering") as step:
      keep = jax.tree.map(jnp.copy, caches)
      generation, _ = self._decode(method, logits, keep, ANSWER_TOKENS, None)
      said = [t for t in generation.tokens[0].tolist() if t >= 0 and t != eos]
      answer = " ".join(self.tokenizer.decode(said).split())
      right = scores.all_found(answer, self.row) == 1
      step.note("right" if right else "wrong")
    if self.forced is None:
      follow = said + self.tokenizer.encode(" " + self.row.continuation, bos=False)
      self.forced = np.asarray([follow[: ANSWER_TOKENS + CONTINUATION_TOKENS]], np.int32)
    steps = self.forced.shape[1]
    with console.step(f"{name}: following {steps} given tokens") as step:
      used = common.device_bytes(caches)
      begin = time.perf_counter()
      generation, _ = self._decode(method, logits, caches, steps, self.forced)
      jax.block_until_ready(generation.last)
      speed = steps / (time.perf_counter() - begin)
      # The first logits are the prompt's; each later row shows the cache at work.
      mine = jnp.concatenate([generation.logits[0, 1:], generation.last])
      if self.full_logits is None:
        self.full_logits, self.full_bytes = mine, used
      kl, top1 = (float(x.mean()) for x in compare(self.full_logits, mine))
      step.note(f"{speed:.1f} tokens/s")
    return Result(name, repr(method), answer, right, top1, kl, speed, used, used / self.full_bytes)

  def _decode(
    self,
    method: kvjax.Method,
    logits: jax.Array,
    caches: Caches,
    steps: int,
    forced: np.ndarray | None,
  ) -> Any:
    return decode(self.model, self.tokenizer, logits, caches, method, steps=steps, forced=forced)


def contest(
  model: Transformer,
  tokenizer: Tokenizer,
  row: Row,
  names: tuple[str, ...],
  *,
  length: int,
  budget: int,
) -> list[Result]:
  """Runs the row under every named method; one prefill serves all that leave it dense.

  Args:
    names: registered names, "full" first.
    length: tokens of prompt and answer.
    budget: tokens that a method keeps or reads.
  """
  methods = {name: kvjax.METHODS[name].usual(budget) for name in names}
  game = Contest(model, tokenizer, row, length)
  dense = [name for name, method in methods.items() if method.dense_prefill]
  tokens = int(game.prompt()[1][0])
  served = ", ".join(dense) if len(dense) <= 3 else f"{len(dense)} methods"
  with console.step(f"reading {tokens:,} tokens once for {served}") as step:
    together = kvjax.SharedPrefill(tuple(methods[name] for name in dense))
    logits, shared = game.read(together)
    step.note(f"{tokens / step.seconds:.0f} tokens/s")
  results = []
  for name, method in methods.items():
    if name in dense:
      caches = take(shared, dense.index(name))
      results.append(game.run(name, method, logits, caches))
    else:
      with console.step(f"{name}: reading {tokens:,} tokens, its own way") as step:
        own_logits, caches = game.read(method)
        step.note(f"{tokens / step.seconds:.0f} tokens/s")
      results.append(game.run(name, method, own_logits, caches))
  return results


def report(results: list[Result]) -> str:
  """The table of `results`."""
  head = ("method", "answer", "right", "top-1", "KL", "tokens/s", "cache", "of full")
  rows = [
    (
      r.name,
      r.answer if len(r.answer) <= 24 else r.answer[:23] + "…",
      "yes" if r.right else "no",
      f"{r.top1:.0%}",
      f"{r.kl:.3f}",
      f"{r.tokens_per_second:.1f}",
      f"{r.cache_bytes / 1e6:.1f} MB",
      f"{r.share:.0%}",
    )
    for r in results
  ]
  return console.table(head, rows, left=(0, 1))


def main(args: Args) -> None:
  names = choose(args.methods)
  gpu = jax.default_backend() == "gpu"
  length = args.length or (4000 if gpu else 2000)
  budget = args.budget or length // 4
  device = jax.devices()[0].device_kind if gpu else f"CPU, {os.cpu_count()} cores"
  console.heading(f"kvjax {kvjax.__version__} · jax {jax.__version__} · {device}")
  model, tokenizer = common.load_model(args.checkpoint)
  row = needle.build(
    Reader(tokenizer).count,
    length=length,
    draw=random.Random(args.seed),
    depth=args.depth,
    max_new_tokens=ANSWER_TOKENS,
  )
  if args.chat_tokens:
    console.heading(f"Chat: {args.question}")
    capacity = length + CONTINUATION_TOKENS
    chat(model, tokenizer, args.question, steps=args.chat_tokens, capacity=capacity)

  source, at = row.about["source"], row.about["depth"]
  console.heading(f"A needle in {length:,} tokens of presidential addresses, from {source}")
  hidden = needle.NEEDLE.format(kind="number", key="…", value=row.answers[0])
  print(f"  at {at:.0%} of the text: {hidden}")
  print(f"  the question: {row.question.strip()}\n", flush=True)
  results = contest(model, tokenizer, row, names, length=length, budget=budget)

  console.heading(f"Every method against the full cache, budget {budget:,} tokens")
  print(f"\n{report(results)}\n")
  steps = ANSWER_TOKENS + CONTINUATION_TOKENS
  print(f"  top-1, KL   next-token agreement, and KL(full ‖ method) in nats, over {steps} given")
  print("              tokens: the full cache's own answer, then the text that follows")
  print("  tokens/s    decoding at batch 1, compilation excluded")
  print(f"  cache       bytes of the cache's arrays on the device, {model.dtype.name}")
  if args.json is not None:
    table = {
      "device": device,
      "jax": jax.__version__,
      "length": length,
      "budget": budget,
      "row": {**row.about, "answers": row.answers},
      "results": [dataclasses.asdict(r) for r in results],
    }
    with common.written_aside(args.json) as path:
      path.write_text(json.dumps(table, indent=2) + "\n", "utf-8")
    print(f"\n  written to {args.json}")


if __name__ == "__main__":
  common.run(main, Args, "demo")
