"""Hold a conversation in the terminal; the method can change between turns.

    kvjax chat
    kvjax chat --method quest --budget 512 --checkpoint qwen
    kvjax chat --temperature 0.7 --top-p 0.9 --system "Answer in one sentence."

A line is a message. A line that begins with a slash is a command:

    /method NAME [BUDGET]   go on under another method, which reads the conversation again
    /again                  answer the last message again, under the present method
    /methods                list the methods
    /clear                  forget the conversation
    /help                   list these commands
    /quit                   end (or Ctrl-D); Ctrl-C stops an answer
"""

import contextlib
import dataclasses
import io
import sys
from collections.abc import Iterator
from typing import Annotated, Literal

import jax
import numpy as np
import tyro

from kvjax.methods import labels
from kvjax.models.decode.caches import next_turn, room
from kvjax.models.decode.generate import generate, prefill
from kvjax.models.decode.sampling import Sampling
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn.transformer import Caches, Transformer
from kvjax.programs import common, console, context, methods
from kvjax.programs.clock import Clock


@dataclasses.dataclass(frozen=True)
class Args:
  """The method that the conversation begins under, and how answers are drawn."""

  method: Annotated[str, tyro.conf.arg(metavar="NAME")] = "full"
  """A method (/methods lists them), with settings: snapkv:window_size=16, quantised:bits=4+snapkv,
  module:Class."""
  budget: Annotated[int, tyro.conf.arg(metavar="TOKENS")] = 1024
  """Tokens that the method keeps or reads per step, where it has such a setting."""
  length: Annotated[int, tyro.conf.arg(metavar="TOKENS")] = 4096
  """Tokens of the whole conversation at most."""
  steps: Annotated[int, tyro.conf.arg(metavar="TOKENS")] = 256
  """Tokens of an answer at most."""
  temperature: float = 0.0
  """0 takes the likeliest token; higher values draw more freely."""
  top_p: float = 1.0
  """Draw from the fewest likeliest tokens whose probabilities sum to this."""
  seed: int = 0
  """Random seed of the draws."""
  system: Annotated[str | None, common.optional("TEXT")] = None
  """System message of the chat."""
  template_args: Annotated[str | None, common.optional("JSON")] = None
  """Further values that the chat template reads: '{"enable_thinking": false}', tools, documents."""
  impl: Literal["auto", "reference", "pallas", "jax-triton"] = "auto"
  """Implementation of the method's operations."""
  checkpoint: common.Checkpoint = None
  """A checkpoint, a Hugging Face folder, a .gguf file or a model of the hub (owner/name);
  SmolLM2-135M-Instruct by default."""


@dataclasses.dataclass
class Live:
  """Caches that hold the conversation.

  Attributes:
    caches: under the present method.
    answer: int32 [n], tokens of the last answer.
  """

  caches: Caches
  answer: np.ndarray


class Conversation:
  """Messages, the method, and the caches that hold them; no caches where they must be read again.

  Attributes:
    messages: of the chat template, the last one an answer.
    name, budget, method: what the next answer is decoded under.
  """

  def __init__(self, model: Transformer, tokenizer: Tokenizer, args: Args):
    self._model, self._tokenizer, self._args = model, tokenizer, args
    self._template_args = common.template_arguments(args.template_args)
    self._sampling = Sampling(args.temperature, top_p=args.top_p)
    self.switch(args.method, args.budget)
    self.clear()

  def switch(self, name: str, budget: int) -> None:
    """Goes on under another method.

    Raises:
      ValueError: no method has this name, or it refuses the budget or the length.
    """
    if budget < 1:
      raise ValueError(f"budget: found {budget}, expected at least 1")
    method = labels.instance(name, budget, "method")
    self._spec = self._model.spec(1, self._args.length)
    context.check_room(method, self._spec)
    self.name, self.budget, self.method = name, budget, method
    self._live: Live | None = None

  def clear(self) -> None:
    """Forgets all messages but the system's."""
    system = self._args.system
    self.messages = [] if system is None else [{"role": "system", "content": system}]
    self._live = None

  def take_back(self) -> str:
    """The last message of the user, which is forgotten with its answer.

    Raises:
      ValueError: there is none.
    """
    if not self.messages or self.messages[-1]["role"] != "assistant":
      raise ValueError("/again: found no message, expected one to answer again")
    message = self.messages[-2]["content"]
    del self.messages[-2:]
    self._live = None
    return message

  def ask(self, message: str) -> str:
    """Prints the answer as it comes; what it took, in one line.

    Raises:
      ValueError: the conversation is too long for the caches.
    """
    turn = {"role": "user", "content": message}
    live = self._live
    if live is None:
      ids = self._tokenizer.chat([*self.messages, turn], **self._template_args)
      caches = self.method.init_caches(self._spec)
    else:
      caches = live.caches
      ids = next_turn(self._tokenizer, message, live.answer, **self._template_args)
    left = room(caches, self.method)
    steps = self._args.steps if left is None else min(self._args.steps, int(left[0]) - len(ids))
    if steps < 1:
      raise ValueError(
        f"conversation: found {len(ids)} more tokens and room for {int(left[0])} of --length "
        f"{self._args.length}: /clear begins a new one"
      )
    shown: list[str] = []
    self._live = None  # the drivers take the caches over
    try:
      with Clock() as clock, console.step(f"reading {len(ids):,} tokens", fleeting=True):
        tokens = common.right_padded(ids, multiple=64)
        logits, caches = prefill(self._model, tokens, np.array([len(ids)]), caches, self.method)
        jax.block_until_ready(logits)
      streamer = console.Streamer()

      def show(texts: list[str]) -> None:
        shown.append(texts[0])
        streamer.show("".join(shown))

      with Clock() as answering:
        generation, caches = generate(
          self._model,
          logits,
          caches,
          self.method,
          steps=steps,
          sampling=self._sampling,
          seed=self._args.seed,
          stop=self._tokenizer.ends,
          tokenizer=self._tokenizer,
          chunk=8,
          on_text=show,
        )
      streamer.show("".join(shown), final=True)
    except KeyboardInterrupt:
      self._keep(turn, "".join(shown))
      return "stopped: the conversation is read again with the next message"
    self._keep(turn, spoken(self._tokenizer, generation.tokens[0], "".join(shown)))
    self._live = Live(caches, generation.tokens[0])
    budget = f" {self.budget:,}" if hasattr(self.method, "budget") else ""
    count, seen = int(generation.lengths[0]), int(caches[0].seen[0])
    return (
      f"{self.name}{budget} · read {len(ids):,} tokens in {clock.running:.1f} s, wrote "
      f"{count} at {count / answering.running:.1f} a second, compiled {_compiled(clock, answering)}"
      f" · {seen:,} tokens in {common.device_bytes(caches) / 1e6:.1f} MB"
    )

  def _keep(self, turn: dict[str, str], answer: str) -> None:
    self.messages += [turn, {"role": "assistant", "content": answer}]


def spoken(tokenizer: Tokenizer, tokens: np.ndarray, text: str) -> str:
  """The text of an answer, as a conversation that is read again has it.

  gpt-oss thinks in parts of their own, which its template does not read again: the last counts.

  Args:
    tokenizer: of the model.
    tokens: int32 [n], of the answer; those < 0 are none.
    text: of the whole answer.
  """
  ids = [token for token in tokens.tolist() if token >= 0]
  begin = tokenizer.backend.token_to_id("<|message|>")
  if begin not in ids:
    return text
  return tokenizer.decode(ids[len(ids) - ids[::-1].index(begin) :])


def _compiled(*clocks: Clock) -> str:
  return f"{sum(clock.compiling for clock in clocks):.1f} s"


def obey(talk: Conversation, line: str) -> str:
  """Obeys a command and returns its message; `/again` answers.

  Raises:
    ValueError: there is no such command, or what it asks for cannot be done.
    EOFError: the conversation is over.
  """
  command, *words = line.split()
  if command == "/quit":
    raise EOFError
  if command == "/again" and not words:
    messages = list(talk.messages)
    try:
      return talk.ask(talk.take_back())
    except (ValueError, NotImplementedError, MemoryError):
      talk.messages = messages
      raise
  if command == "/clear" and not words:
    talk.clear()
    return "the conversation is empty"
  if command == "/methods" and not words:
    return methods.listing()
  if command == "/method" and len(words) in (1, 2):
    budget = words[1] if len(words) == 2 else str(talk.budget)
    if not budget.isdecimal():
      raise ValueError(f"/method: found budget {budget!r}, expected a number of tokens")
    talk.switch(words[0], int(budget))
    return f"{talk.method}"
  if command == "/help" and not words:
    return _commands()
  raise ValueError(f"{line!r}: no such command; /help lists them")


def _commands() -> str:
  return "\n".join(line.strip() for line in (__doc__ or "").splitlines() if "    /" in line)


def lines() -> Iterator[str]:
  """Typed lines, one by one, until the end of the input; with a prompt on a terminal."""
  live = sys.stdin.isatty()
  if isinstance(sys.stdin, io.TextIOWrapper):  # a byte that is no UTF-8 ends a message, not all
    sys.stdin.reconfigure(errors="surrogateescape")
  if live:
    with contextlib.suppress(ImportError):
      import readline  # noqa: F401 - `input` edits lines and remembers them
  with contextlib.suppress(EOFError):
    while True:
      # Windows' editors begin a text with a mark of its byte order.
      if line := input("> " if live else "").removeprefix("\ufeff").strip():
        yield line


def main(args: Args) -> None:
  common.check_numbers(args, budget=1, length=1, steps=1, seed=0)
  labels.instance(args.method, args.budget, "--method")
  talk = Conversation(*common.load_model(args.checkpoint, args.impl), args)
  print(f"{talk.method}\n/help lists the commands", flush=True)
  for line in lines():
    try:
      said = obey(talk, line) if line.startswith("/") else talk.ask(line)
    except EOFError:
      return
    except (ValueError, NotImplementedError, MemoryError, FloatingPointError) as error:
      said = f"error: {error}"
    print(said if line.startswith("/") and line != "/again" else f"({said})", flush=True)


if __name__ == "__main__":
  common.run(main, Args)
