"""Chat, then search a long text for a hidden number, under several methods.

    kvjax demo                                     five methods, 2,000 tokens on a CPU
    kvjax demo --methods all --length 4000         every method
    kvjax demo --methods snapkv quest --budget 256

SmolLM2-135M-Instruct is downloaded and converted once. It answers a chat question, then a needle
question about presidential addresses under each method in turn. A table compares each method with
the full cache; each row is printed as soon as it is measured.
"""

import dataclasses
import os
import pathlib
import random
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import kvjax
from kvjax.methods import labels
from kvjax.models.decode.by_layer import ByLayer
from kvjax.models.decode.generate import generate, pad, prefill
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn.transformer import Caches, Transformer
from kvjax.programs import common, console
from kvjax.programs.clock import Clock
from kvjax.programs.evals import needle, scores
from kvjax.programs.evals.divergence import compare
from kvjax.programs.evals.prompt import Reader
from kvjax.programs.evals.task import Row
from kvjax.runtime.shared_prefill import take

DEFAULT = ("full", "snapkv", "quest", "art", "cpe")
CHUNK = 8  # tokens that appear at once in the chat
ANSWER_TOKENS = 24
CONTINUATION_TOKENS = 40
COLUMNS = {  # heads and widths
  "method": 15,
  "answer": 12,
  "right": 5,
  "top-1": 5,
  "KL": 5,
  "tokens/s": 8,
  "cache": 8,
  "share": 5,
  "compile": 7,
  "prompt": 7,
  "decode": 6,
}


@dataclasses.dataclass(frozen=True)
class Args:
  methods: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")] = DEFAULT
  """Methods (`kvjax methods` lists them), with settings: snapkv:window_size=16, module:Class for
  your own; or "all". The full cache always runs."""
  length: Annotated[int | None, common.optional("TOKENS")] = None
  """Tokens of the needle question and its answer; 2,000 on a CPU and 4,000 on a GPU by default."""
  budget: Annotated[int | None, common.optional("TOKENS")] = None
  """Tokens that a method keeps or reads per step; a quarter of the length by default."""
  depth: Annotated[float | None, common.optional("SHARE")] = None
  """Position of the needle, from 0 (start of the text) to 1 (its end); drawn by default."""
  seed: int = 3
  """Draws the text, the needle and its depth."""
  question: str = "Give me three tips for writing clear code."
  """Question of the chat."""
  chat_tokens: int = 96
  """Longest chat answer; 0 skips the chat, as does a model without a chat template."""
  checkpoint: common.Checkpoint = None
  json: Annotated[pathlib.Path | None, common.optional("PATH")] = None
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
    compile_seconds: tracing, lowering and compiling of the method's programs, those of a reading
      that it shares with others left out.
    prompt_seconds: reading the prompt, compilation excluded.
    decode_seconds: decoding the answer and the given tokens, compilation excluded.
    shared: whether the prompt was read once for several methods.
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
  compile_seconds: float
  prompt_seconds: float
  decode_seconds: float
  shared: bool


@dataclasses.dataclass(frozen=True)
class Reading:
  """A prompt in the caches of one method, or of several.

  Attributes:
    logits, caches: after the prompt.
    clock: what it took.
    shared: whether it serves several methods.
  """

  logits: jax.Array
  caches: Caches
  clock: Clock
  shared: bool


def choose(names: tuple[str, ...], budget: int = 1024) -> tuple[str, ...]:
  """The methods to run, the full cache first.

  Raises:
    ValueError: no method has this name, or these settings.
  """
  if names == ("all",):
    known = {name: kvjax.settings.usual(cls, 64) for name, cls in kvjax.METHODS.items()}
    # What repeats a text wants it by itself, which the demo's prompts are not.
    names = tuple(name for name, method in known.items() if not method.traits.repeats)
  for name in names:
    labels.instance(name, budget, "--methods")
  return ("full", *dict.fromkeys(name for name in names if name != "full"))


def chat(
  model: Transformer, tokenizer: Tokenizer, question: str, *, steps: int, capacity: int
) -> None:
  """Streams an answer under the full cache; the second line says how fast it came."""
  method = kvjax.Full()
  ids = tokenizer.chat([{"role": "user", "content": question}])
  with console.step(f"reading {len(ids)} tokens of chat") as step:
    with Clock() as clock:
      caches = method.init_caches(model.spec(1, capacity))
      logits, caches = prefill(model, *pad([ids]), caches, method)
      logits.block_until_ready()
    step.note(_parts(clock))
  streamer, text = console.Streamer(), ""

  def show(texts: list[str]) -> None:
    nonlocal text
    text += texts[0]
    streamer.show(text)

  how = {"stop": tokenizer.ends, "tokenizer": tokenizer, "chunk": CHUNK, "on_text": show}
  with Clock() as clock:
    generation, _ = generate(model, logits, caches, method, steps=steps, **how)
  streamer.show(text, final=True)
  speed = generation.lengths[0] / clock.running
  print(
    f"  ({generation.lengths[0]} tokens, {speed:.1f} tokens/s after {clock.compiling:.1f} s of "
    "compiling)"
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
    return pad([ids], multiple=self.length - ANSWER_TOKENS)

  def read(self, method: kvjax.Method) -> Reading:
    """Prefills the prompt under a method (or several at once: `SharedPrefill`)."""
    tokens, lengths = self.prompt()
    with Clock() as clock:
      caches = method.init_caches(self.model.spec(1, self.capacity))
      logits, caches = prefill(self.model, tokens, lengths, caches, method, past=0)
      jax.block_until_ready((logits, caches))
    return Reading(logits, caches, clock, isinstance(method, kvjax.SharedPrefill))

  def run(self, name: str, method: kvjax.Method, reading: Reading) -> Result:
    """Answers the question, then decodes the forced continuation from the same caches.

    The full cache has to come first: its own answer, continued by natural text, is what the
    others are forced to follow.
    """
    ends, logits, caches = self.tokenizer.ends, reading.logits, reading.caches
    with console.step(f"{name}: answering", fleeting=True):
      keep = jax.tree.map(jnp.copy, caches)
      generation, answering = self._decode(method, logits, keep)
      said = [t for t in generation.tokens[0].tolist() if t >= 0 and t not in ends]
      answer = " ".join(self.tokenizer.decode(said).split())
      right = scores.all_found(answer, self.row) == 1
    if self.forced is None:
      follow = said + self.tokenizer.encode(" " + self.row.continuation, after=answer or "a")
      self.forced = np.asarray([follow[: ANSWER_TOKENS + CONTINUATION_TOKENS]], np.int32)
    steps = self.forced.shape[1]
    with console.step(f"{name}: following {steps} given tokens", fleeting=True):
      used = common.bytes_of(caches)[0]
      generation, following = self._decode(method, logits, caches, self.forced)
      # The first logits are the prompt's; each later row shows the cache at work.
      mine = jnp.concatenate([generation.logits[0, 1:], generation.last])
      if self.full_logits is None:
        self.full_logits, self.full_bytes = mine, used
      kl, top1 = (float(x.mean()) for x in compare(self.full_logits, mine))
    own = [answering, following] + [reading.clock] * (not reading.shared)
    return Result(
      name,
      repr(method),
      answer,
      right,
      top1,
      kl,
      tokens_per_second=steps / following.running,
      cache_bytes=used,
      share=used / self.full_bytes,
      compile_seconds=sum(clock.compiling for clock in own),
      prompt_seconds=reading.clock.running,
      decode_seconds=answering.running + following.running,
      shared=reading.shared,
    )

  def _decode(
    self, method: kvjax.Method, logits: jax.Array, caches: Caches, forced: np.ndarray | None = None
  ) -> tuple[Any, Clock]:
    steps = ANSWER_TOKENS if forced is None else forced.shape[1]
    with Clock() as clock:
      how = {"steps": steps, "stop": self.tokenizer.ends, "forced": forced}
      generation, _ = generate(self.model, logits, caches, method, return_logits=True, **how)
      jax.block_until_ready(generation.last)
    return generation, clock


def _parts(clock: Clock) -> str:
  """Parts of the time of a step that read a prompt, put before their sum."""
  return f"compile {clock.compiling:.1f} s + prompt {clock.running:.1f} s ="


def contest(
  model: Transformer,
  tokenizer: Tokenizer,
  row: Row,
  names: tuple[str, ...],
  *,
  length: int,
  budget: int,
) -> Iterator[Result]:
  """Reads the row's prompt once for all methods that leave it dense, then runs one after the other.

  Methods whose layers take many programs read on their own: with them, what is compiled for all of
  the others would be compiled as often.
  The full cache comes first, and a method runs when its result is asked for.
  """
  methods = {name: labels.instance(name, budget, "--methods") for name in names}
  game = Contest(model, tokenizer, row, length)
  size = 1, length - ANSWER_TOKENS, game.capacity
  layered = ByLayer(model)
  dense = {n: m for n, m in methods.items() if kvjax.families.forms.dense_prefill(m)}
  shared = [n for n, m in dense.items() if layered.programs(m, *size) <= 2]
  served = ", ".join(shared) if len(shared) <= 5 else f"{len(shared)} methods"
  with console.step(f"reading {game.prompt()[1][0]:,} tokens once for {served}") as step:
    together = game.read(kvjax.SharedPrefill(tuple(methods[name] for name in shared)))
    step.note(_parts(together.clock))

  def result(name: str, method: kvjax.Method) -> Result:
    common.drop_programs()
    if name in shared:
      caches = take(together.caches, shared.index(name))
      return game.run(name, method, dataclasses.replace(together, caches=caches))
    with console.step(f"{name}: reading the prompt", fleeting=True):
      reading = game.read(method)
    return game.run(name, method, reading)

  return (result(*each) for each in methods.items())


def show(results: Iterable[Result]) -> list[Result]:
  """Prints the table of `results`, each row as soon as there is one."""
  table, shown = console.Table(COLUMNS, left=(0, 1)), []
  for r in results:
    table.row(
      (
        r.name,
        r.answer,
        "yes" if r.right else "no",
        f"{r.top1:.0%}",
        f"{max(r.kl, 0):.3f}",  # rounding may leave it below
        f"{r.tokens_per_second:.1f}",
        f"{r.cache_bytes / 1e6:.1f} MB",
        f"{r.share:.0%}",
        f"{r.compile_seconds:.1f} s",
        f"{r.prompt_seconds:.1f} s" + ("*" if r.shared else " "),
        f"{r.decode_seconds:.1f} s",
      )
    )
    shown.append(r)
  return shown


def main(args: Args) -> None:
  common.check_numbers(args, length=1, budget=1, chat_tokens=0)
  if args.depth is not None and not 0 <= args.depth <= 1:
    raise ValueError(f"--depth: found {args.depth}, expected a number from 0 to 1")
  gpu = jax.default_backend() == "gpu"
  length = args.length or (4000 if gpu else 2000)
  budget = args.budget or length // 4
  names = choose(args.methods, budget)
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
  if args.chat_tokens and tokenizer.chat_template is None:
    print("\nNo chat: the checkpoint has no chat template. The needle's text is read as it is.")
  elif args.chat_tokens:
    console.heading(f"Chat: {args.question}")
    capacity = length + CONTINUATION_TOKENS
    chat(model, tokenizer, args.question, steps=args.chat_tokens, capacity=capacity)

  source, at = row.about["source"], row.about["depth"]
  console.heading(f"A needle in {length:,} tokens of presidential addresses, from {source}")
  hidden = needle.NEEDLE.format(kind="number", key="…", value=row.answers[0])
  print(f"  at {at:.0%} of the text: {hidden}")
  print(f"  the question: {row.question.strip()}", flush=True)
  results = contest(model, tokenizer, row, names, length=length, budget=budget)
  console.heading(f"Every method against the full cache, budget {budget:,} tokens")
  shown = show(results)
  steps = ANSWER_TOKENS + CONTINUATION_TOKENS
  print(f"""
  top-1, KL   next-token agreement with the full cache, and KL(full ‖ method) in nats, over up to
              {steps} given tokens: the full cache's own answer, then the text that follows
  tokens/s    decoding the given tokens at batch 1, compilation excluded
  cache       the cache's arrays on the device, {model.dtype.name}; share: of the full cache's
  compile     tracing, lowering and compiling the method's own programs
  prompt      reading the prompt, compilation excluded; *: one reading, above, for all of these
  decode      decoding the answer and the given tokens, compilation excluded""")
  if args.json is not None:
    table = {
      "device": device,
      "jax": jax.__version__,
      "length": length,
      "budget": budget,
      "row": {**row.about, "answers": row.answers},
      "results": [dataclasses.asdict(r) for r in shown],
    }
    common.write(args.json, table)
    print(f"\n  written to {args.json}")


if __name__ == "__main__":
  common.run(main, Args)
