"""OpenAI's JSON of completions and chats: requests, which are checked, and choices."""

import collections
import copy
import itertools
import reprlib
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from kvjax.models.decode.requests import Answer
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.programs.engine import Choice, Inbox
from kvjax.programs.evals.asked import Settings

REASONS = {"stop": "stop", "limit": "length"}
Ids = Annotated[list[pydantic.NonNegativeInt], Field(min_length=1)]


class Body(pydantic.BaseModel):
  """A request's JSON object without its null fields; no answer depends on `user`.

  Fields that are not declared are in `model_extra`; `asked.Settings` reads them.
  """

  model_config = pydantic.ConfigDict(strict=True, extra="allow")
  model: str = ""
  n: int = Field(1, ge=1)
  seed: int | None = None
  stream: bool = False
  stream_options: dict[str, bool] = {}
  user: Any = None

  @pydantic.model_validator(mode="before")
  @classmethod
  def _given(cls, body: Any) -> Any:
    return {k: x for k, x in body.items() if x is not None} if isinstance(body, dict) else body


class Text(Body):
  """A text to be turned into tokens."""

  prompt: str
  add_special_tokens: bool = True


class Completion(Body):
  """A completion; `context_tokens` of a prompt are read before the others are scored."""

  prompt: str | Ids | Annotated[list[str] | list[Ids], Field(min_length=1)]
  echo: bool = False
  logprobs: int | None = Field(None, ge=0, le=1)
  context_tokens: int | None = Field(None, ge=1)


class Chat(Body):
  """A chat."""

  messages: list[dict[str, Any]] = Field(min_length=1)
  logprobs: Literal[False] = False


def parse(kind: type[Body], body: bytes) -> Any:
  """The fields of a request's JSON; raises ValueError for the first that is not possible."""
  try:
    return kind.model_validate_json(body)
  except pydantic.ValidationError as error:
    wrong = error.errors()[0]
    name, found = (*wrong["loc"], "body")[0], reprlib.repr(wrong["input"])
    raise ValueError(f"{name}: found {found}. {wrong['msg']}") from None


def choices(
  fields: Completion | Chat,
  tokenizer: Tokenizer,
  template: dict[str, Any],
  *,
  capacity: int,
  most: int,
  context: int | None,
) -> list[Choice]:
  """The choices that a request asks for: `n` of the first prompt, `n` of the second, …

  Args:
    template: what the template of a chat reads besides its messages.
    capacity: tokens of a prompt and its answer, at most.
    most: choices, at most.
    context: `context_tokens` of requests without it.

  Raises:
    ValueError: a field is not possible, or asks for what is not supported.
  """
  chat, cut = isinstance(fields, Chat), None
  prompts = [tokenizer.chat(fields.messages, **template)] if chat else _prompts(fields, tokenizer)
  longest = max(map(len, prompts))
  steps = max(capacity - longest, 1) if chat else 16
  settings = Settings.of({"temperature": 1.0, **(fields.model_extra or {})}, steps)
  room = f"at most {capacity} with the prompt's {longest} tokens (--capacity)"
  _expect("max_tokens", settings.steps, settings.steps + longest <= capacity, room)
  _expect("n", fields.n, fields.n * len(prompts) <= most, f"at most {most} choices (--queue)")
  if isinstance(fields, Completion):
    cut = _context(fields, settings.sampling.greedy, context)
  how = {"limit": settings.steps, "sampling": settings.sampling}
  how |= {"stop": tokenizer.ends, "stop_strings": settings.until}
  inbox: Inbox = collections.deque()
  made = []
  for index, (prompt, i) in enumerate(itertools.product(prompts, range(fields.n))):
    seed = None if fields.seed is None else (fields.seed + i) % 2**31
    behind = not chat and tokenizer.decode(prompt)
    answers = tokenizer.continuing() if behind else tokenizer
    made.append(Choice(index, prompt, cut, {**how, "seed": seed, "tokenizer": answers}, inbox))
  return made


def _context(fields: Completion, greedy: bool, context: int | None) -> int | None:
  """Tokens of a prompt that are read before the others are scored; None: no scores are wanted."""
  known = fields.logprobs is not None
  _expect(
    "stream", True, not (fields.stream and (fields.echo or known)), "false with echo or logprobs"
  )
  _expect("logprobs", fields.logprobs, greedy or not fields.logprobs, "0, or temperature 0")
  if not (fields.echo and known):
    return None
  cut = fields.context_tokens or context
  what = "the number of tokens to read before the others are scored (or --context-tokens)"
  _expect("context_tokens", cut, cut is not None, what)
  return cut


def _expect(name: str, found: Any, right: bool, expected: str) -> None:
  if not right:
    raise ValueError(f"{name}: found {reprlib.repr(found)}, expected {expected}")


def _prompts(fields: Completion, tokenizer: Tokenizer) -> list[list[int]]:
  given: Any = fields.prompt
  several = isinstance(given, list) and not isinstance(given[0], int)
  prompts = [
    [*tokenizer.prefix, *tokenizer.encode(x, bos=False)] if isinstance(x, str) else x
    for x in (given if several else [given])
  ]
  size = tokenizer.rows or tokenizer.size
  right = all(ids and max(ids) < size for ids in prompts)
  _expect("prompt", given, right, f"a text, or ids in [0, {size})")
  return prompts


def whole(fields: Completion | Chat, choice: Choice, tokenizer: Tokenizer) -> dict[str, Any]:
  """A choice that has been answered and scored."""
  text, end = choice.answer.text or "", REASONS[choice.answer.end]
  ended = {"index": choice.index, "finish_reason": end, "logprobs": None}
  if isinstance(fields, Chat):
    return {**ended, "message": {"role": "assistant", "content": text}}
  tokens, logprobs = choice.answer.tokens.tolist(), choice.answer.logprobs.tolist()
  scores = [*choice.scores, *zip(tokens, logprobs, tokens, logprobs, strict=True)]
  first = tokenizer if fields.echo else choice.how["tokenizer"]
  if fields.echo:
    text = tokenizer.decode(choice.prompt) + text
    unknown = choice.prompt[: choice.cut]
    scores = [*((token, None, None, None) for token in unknown), *scores]
  if fields.logprobs is not None:
    ended["logprobs"] = _logprobs(scores, first)
  return {**ended, "text": text}


def usage(fields: Completion | Chat, choices: list[Choice]) -> dict[str, int]:
  """Tokens that were read, a prompt once, and written."""
  read = sum(len(choice.prompt) for choice in choices) // fields.n
  new = sum(len(choice.answer.tokens) for choice in choices if choice.answer is not None)
  return {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new}


def part(fields: Completion | Chat, choice: Choice, event: str | Answer) -> dict[str, Any]:
  """A choice's new text, or its end."""
  text, end = (event, None) if isinstance(event, str) else ("", REASONS[event.end])
  said = {"delta": {"content": text}} if isinstance(fields, Chat) else {"text": text}
  return {"index": choice.index, **said, "logprobs": None, "finish_reason": end}


def _logprobs(scores: list[Any], first: Tokenizer) -> dict[str, list[Any]]:
  """Of each token, and of the likeliest one in its place; `first` has the texts of the first."""
  told: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
  text, known, offsets = first.stream(), 0, []
  tokenizer, others = first, first.continuing()

  def named(token: int) -> str:
    alone = tokenizer.stream(skip_special=False)
    return alone.feed(token) + alone.flush()

  for token, value, likeliest, best in scores:
    offsets.append(known + len(copy.copy(text).flush()))
    top = None if value is None else {named(token): value, named(likeliest): best}
    for name, x in zip(told, (named(token), value, top), strict=True):
      told[name].append(x)
    known, tokenizer = known + len(text.feed(token)), others
  # Half a character may be shown as more than the whole one.
  return {**told, "text_offset": [*itertools.accumulate(reversed(offsets), min)][::-1]}
