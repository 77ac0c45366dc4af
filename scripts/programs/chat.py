"""Hold a conversation in the terminal; the method can change between turns.

    kvjax chat
    kvjax chat --method quest --budget 512 --checkpoint qwen
    kvjax chat --temperature 0.7 --top-p 0.9 --system "Answer in one sentence."

A line is a message, and so is a paste of several lines. A line that begins with a slash is a
command:

    /file PATH              put a file's text before the next message
    /method NAME [BUDGET]   switch to another method, which reads the conversation again
    /again                  answer the last message again, with the current method
    /methods                list the methods
    /clear                  forget the conversation
    /help                   list these commands
    /quit                   end (or Ctrl-D, or Ctrl-C twice); Ctrl-C stops an answer
"""

import contextlib
import dataclasses
import io
import pathlib
import sys
from collections.abc import Iterator
from typing import Annotated

import numpy as np
import tyro

from kvjax.methods import labels
from kvjax.models.decode.caches import next_turn, room
from kvjax.models.decode.generate import compile_ahead, generate
from kvjax.models.decode.sampling import Sampling
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn.transformer import Caches, Transformer
from kvjax.programs import common, console, methods, turn
from kvjax.runtime import arguments, memory


@dataclasses.dataclass(frozen=True)
class Args(common.Answering):
  method: Annotated[str, tyro.conf.arg(metavar="NAME")] = "full"
  """A method (/methods lists them), with settings: snapkv:window_size=16, quantised:bits=4+snapkv,
  module:Class."""
  length: Annotated[int, tyro.conf.arg(metavar="TOKENS")] = 4096
  """Maximum tokens of the whole conversation."""
  steps: Annotated[int, tyro.conf.arg(metavar="TOKENS")] = 256
  """Maximum tokens of an answer."""


@dataclasses.dataclass
class Live:
  """Caches that hold the conversation.

  Attributes:
    caches: under the present method.
    answer: int32 [n], tokens of the last answer; None: there is none yet.
    begun: the first tokens of the next message, which the caches hold: its reading was interrupted.
  """

  caches: Caches
  answer: np.ndarray | None
  begun: list[int] = dataclasses.field(default_factory=list)


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
    memory.check_host(method, self._spec, "--length")
    self.name, self.budget, self.method = name, budget, method
    self._live: Live | None = None

  def clear(self) -> None:
    """Forgets files, and all messages but the system's."""
    self._files: list[str] = []
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

  def attach(self, path: str) -> str:
    """Puts a file's text before the next message; its size in tokens, in words.

    Raises:
      FileNotFoundError, ValueError: there is no such file, or it is no text in UTF-8.
    """
    text = common.read_text(pathlib.Path(path).expanduser(), "/file")
    self._files.append(text)
    tokens = len(self._tokenizer.encode(text, bos=False))
    return f"{path}: {tokens:,} tokens, which the next message follows"

  def ask(self, message: str) -> str:
    """Prints the answer as it comes; what it took, in one line. Files go with the message.

    Raises:
      ValueError: the conversation is too long for the caches.
    """
    message = "\n\n".join([*self._files, message])
    asked = {"role": "user", "content": message}
    live, ids = self._live, self._tokens(asked)
    if live is not None and live.begun != ids[: len(live.begun)]:  # another message was begun
      self._live = live = None
      ids = self._tokens(asked)
    caches = self.method.init_caches(self._spec) if live is None else live.caches
    begun = 0 if live is None else len(live.begun)
    left, new = room(caches, self.method), len(ids) - begun
    steps = self._args.steps if left is None else min(self._args.steps, int(left[0]) - new)
    if steps < 1:
      raise ValueError(
        f"conversation: found {new} more tokens and room for {int(left[0])} of --length "
        f"{self._args.length}: /clear begins a new one, and a larger --length holds more"
      )
    seen = 0 if live is None else int(caches[0].seen[0])
    what = f"the conversation and --steps {steps}"
    turn.check_context(self._model, self.method, seen, new + steps, what)
    shown: list[str] = []
    taken, streamer = turn.Turn(), console.Streamer()
    self._live = None  # the drivers take the caches over

    def show(texts: list[str]) -> None:
      shown.append(texts[0])
      streamer.show("".join(shown))

    ends = {"sampling": self._sampling, "stop": self._tokenizer.ends}
    try:
      compile_ahead(self._model, self.method, caches, **ends)
      step = console.step(f"reading {new:,} tokens", fleeting=True)
      how = self._spec, taken, step
      logits, caches = turn.read(self._model, ids, caches, self.method, *how, begun=begun)
      with taken.writing:
        generation, caches = generate(
          self._model,
          logits,
          caches,
          self.method,
          steps=steps,
          **ends,
          seed=self._args.seed,
          tokenizer=self._tokenizer,
          chunk=8,
          on_text=show,
        )
      streamer.show("".join(shown), final=True)
    except common.Terminated:
      raise
    except KeyboardInterrupt:
      count = begun if taken.stream is None else begun + int(taken.stream.seen[0]) - seen
      if taken.stream is not None and count < len(ids):  # it was not read to its end
        answer = None if live is None else live.answer
        self._live = Live(taken.stream.caches, answer, ids[:count])
        return f"stopped after {count:,} of {len(ids):,} tokens: ask the same to read on from there"
      if shown:  # else the message waits to be asked
        self._keep(asked, "".join(shown))
      return "stopped: the conversation is read again with the next message"
    self._keep(asked, spoken(self._tokenizer, generation.tokens[0], "".join(shown)))
    self._live = Live(caches, generation.tokens[0])
    taken.written = int(generation.lengths[0])
    budget = f" {self.budget:,}" if hasattr(self.method, "budget") else ""
    return f"{self.name}{budget} · {taken.said(caches)}"

  def _tokens(self, asked: dict[str, str]) -> list[int]:
    """Tokens of a message that live caches lack, or of a conversation of which nothing was read."""
    if self._live is None or self._live.answer is None:
      return self._tokenizer.chat([*self.messages, asked], **self._template_args)
    content, answer = asked["content"], self._live.answer
    return next_turn(self._tokenizer, content, answer, **self._template_args)

  def _keep(self, asked: dict[str, str], answer: str) -> None:
    self.messages += [asked, {"role": "assistant", "content": answer}]
    self._files = []  # a message that failed has taken none


def spoken(tokenizer: Tokenizer, tokens: np.ndarray, text: str) -> str:
  """The text of an answer, as a conversation that is read again has it.

  gpt-oss thinks in parts of their own, which its template does not read again: the last counts.
  """
  ids = [token for token in tokens.tolist() if token >= 0]
  begin = tokenizer.backend.token_to_id("<|message|>")
  if begin not in ids:
    return text
  return tokenizer.decode(ids[len(ids) - ids[::-1].index(begin) :])


def obey(talk: Conversation, line: str) -> str:
  """Obeys a command and returns its message; `/again` answers.

  Raises:
    ValueError, OSError: there is no such command, or what it asks for cannot be done.
    EOFError: the conversation is over.
  """
  command, *words = line.split()
  if command == "/file" and words:
    return talk.attach(line.removeprefix(command).strip())
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
    return "\n".join(line.strip() for line in (__doc__ or "").splitlines() if "    /" in line)
  raise ValueError(f"{line!r}: no such command; /help lists them")


def lines() -> Iterator[str]:
  """Typed lines and pastes, one by one, until the end of the input; with a prompt on a terminal.

  There Ctrl-C asks to be pressed again before it ends the input.
  """
  live = sys.stdin.isatty()
  if isinstance(sys.stdin, io.TextIOWrapper):  # a byte that is no UTF-8 ends a message, not all
    sys.stdin.reconfigure(errors="surrogateescape")
  if live:
    _edited()
  leaving = False
  while True:
    try:
      # Windows' editors begin a text with a mark of its byte order.
      line = input("> " if live else "").removeprefix("\ufeff").strip()
    except EOFError:
      return
    except KeyboardInterrupt as stop:
      if not live or isinstance(stop, common.Terminated):
        raise
      print(flush=True)
      if leaving:
        return
      leaving = True
      print("(press Ctrl-C again to leave)", flush=True)
      continue
    leaving = False
    if line:
      yield line


def _edited() -> None:
  """Lets `input` edit lines, remember them, and take a paste as one, which Python turns off."""
  with contextlib.suppress(ImportError):
    import readline

    readline.parse_and_bind("set enable-bracketed-paste on")


def main(args: Args) -> None:
  common.check_numbers(args, budget=1, length=1, steps=1)
  arguments.integer("--seed", args.seed, 0, 2**32)
  labels.instance(args.method, args.budget, "--method")  # these three before the model is loaded
  common.template_arguments(args.template_args)
  Sampling(args.temperature, top_p=args.top_p)
  talk = Conversation(*common.load_model(args.checkpoint, args.impl), args)
  print(f"{talk.method}\n/help lists the commands", flush=True)
  for line in lines():
    command = line.startswith("/") and "\n" not in line
    try:
      said = obey(talk, line) if command else talk.ask(line)
    except EOFError:
      return
    except (ValueError, NotImplementedError, OSError, MemoryError, FloatingPointError) as error:
      said = f"error: {error}"
    print(said if command and line != "/again" else f"({said})", flush=True)


if __name__ == "__main__":
  common.run(main, Args)
