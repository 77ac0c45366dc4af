"""OpenAI's JSON of completions and chats: requests, which are checked, and choices."""

import itertools
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from kvjax.models.decode.batcher import Answer
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.programs.engine import Score
from kvjax.programs.evals import asked
from kvjax.programs.evals.continuations import Pair

# What no answer depends on; and what is refused unless it has a value that changes nothing.
IGNORED = "model user metadata store service_tier parallel_tool_calls prediction".split()
IGNORED += "safety_identifier prompt_cache_key prompt_cache_retention".split()
NEUTRAL: dict[str, tuple[Any, ...]] = {
  **asked.NEUTRAL,
  **dict.fromkeys(("tools", "functions"), ([],)),
  **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
  "response_format": ({"type": "text"},),
  "modalities": (["text"],),
  "logit_bias": ({},),
  "suffix": ("",),
}
KNOWN = (
  "model, prompt, messages, max_tokens, max_completion_tokens, n, stream, stream_options, stop, "
  "seed, temperature, top_p, top_k, min_p, logprobs, echo, context_tokens"
)
REASONS = {"stop": "stop", "limit": "length"}
CHAT = "token", "logprob", "bytes", "top_logprobs"
COMPLETION = "tokens", "token_logprobs", "top_logprobs", "text_offset"
LOST = "\N{REPLACEMENT CHARACTER}"  # of bytes that are a part of a character
LOWEST = -9999.0  # OpenAI's number for −∞, which JSON does not have


class Request(NamedTuple):
  """A checked request; its choices are `n` of the first prompt, `n` of the second, …

  Attributes:
    chat: whether it is a chat's.
    prompts: token ids of each.
    submits: the arguments of `Batcher.submit` for each choice; none for those of no new token.
    pairs: the prompts to be scored, cut where scores begin; None: their scores are not asked for.
    n, echo, logprobs, stream: as OpenAI has them; `logprobs` may only say whether.
    usage: whether a stream ends with the numbers of tokens.
  """

  chat: bool
  prompts: list[list[int]]
  submits: list[dict[str, Any]]
  pairs: list[Pair] | None
  n: int
  echo: bool
  logprobs: bool
  stream: bool
  usage: bool


def read(
  body: dict[str, Any],
  tokenizer: Tokenizer,
  template: dict[str, Any] | None,
  *,
  capacity: int,
  most: int,
  context: int,
) -> Request:
  """A request out of the values of its JSON that are not null.

  Args:
    template: what the template of a chat reads besides its messages; None: it is no chat.
    capacity: tokens of a prompt and its answer, at most.
    most: its jobs, at most.
    context: tokens of a prompt that are read before the others are scored; 0: requests have to say.

  Raises:
    ValueError: a field is missing or not possible, or asks for what there is not.
  """
  told = {name: x for name, x in body.items() if name not in IGNORED}
  chat = template is not None
  if template is None:
    prompts = _prompts(told.pop("prompt", None), tokenizer)
  else:
    prompts = [_chat_ids(told.pop("messages", None), tokenizer, template)]
  echo, stream = (_flag(name, told.pop(name, False)) for name in ("echo", "stream"))
  expect("echo", echo, not (echo and (chat or stream)), "false in chats and streams")
  n = asked.whole("n", told.pop("n", 1), 1)
  expect("n", n, n * len(prompts) <= most, f"at most {most} answers of all prompts (--queue)")
  limits = _limits(told, [len(ids) for ids in prompts], capacity, chat, 0 if echo else 1)
  stop = told.pop("stop", [])
  stop = [stop] if isinstance(stop, str) else stop
  texts = isinstance(stop, list) and all(isinstance(text, str) for text in stop)
  expect("stop", stop, texts, "a text, or a list of texts")
  told.setdefault("temperature", 1.0)
  sampling = asked.sampling(told)
  how = {"stop_strings": [*filter(None, stop)], "stop": tokenizer.ends, "sampling": sampling}
  seeds: list[int | None] = [None] * n
  if (seed := told.pop("seed", None)) is not None:
    seeds = [(asked.whole("seed", seed, -(2**63)) + i) % 2**31 for i in range(n)]
  given = told.pop("logprobs", None)
  if chat:
    given = 0 if _flag("logprobs", given or False) else None
  elif given is not None:
    found, most = asked.whole("logprobs", given, 0), int(sampling.greedy)
    expect("logprobs", found, found <= most, f"at most {most}; 1 with temperature 0 only")
  logprobs, cuts = given is not None, told.pop("context_tokens", context)
  pairs = _pairs(prompts, cuts) if echo and logprobs else None
  options = told.pop("stream_options", {})
  expect("stream_options", options, isinstance(options, dict), "an object")
  asked.check_neutral(told, {**NEUTRAL, "best_of": (n,), "top_logprobs": (0,)}, KNOWN)
  submits = [
    {"prompt": ids, "limit": limit, "seed": seed, **how}
    for ids, limit in zip(prompts, limits, strict=True)
    for seed in seeds
    if limit
  ]
  return Request(
    chat, prompts, submits, pairs, n, echo, logprobs, stream, bool(options.get("include_usage"))
  )


def text_ids(text: str, tokenizer: Tokenizer) -> list[int]:
  """The tokens of a text, with those that begin a text of this model unless it has them."""
  ids, prefix = tokenizer.encode(text, bos=False), tokenizer.prefix
  return ids if ids[: len(prefix)] == prefix else [*prefix, *ids]


def expect(name: str, found: Any, right: bool, expected: str) -> None:
  """Raises ValueError unless it is right."""
  if not right:
    raise ValueError(f"{name}: found {reprlib.repr(found)}, expected {expected}")


def _flag(name: str, found: Any) -> bool:
  expect(name, found, isinstance(found, bool), "true or false")
  return found


def _prompts(given: Any, tokenizer: Tokenizer) -> list[list[int]]:
  several = isinstance(given, list) and given and isinstance(given[0], str | list)
  prompts = given if several else [given]
  prompts = [text_ids(x, tokenizer) if isinstance(x, str) else x for x in prompts]
  size = tokenizer.rows or tokenizer.size
  for ids in prompts:
    right = isinstance(ids, list) and all(type(x) is int and 0 <= x < size for x in ids) and ids
    expect("prompt", given, bool(right), f"a text, ids in [0, {size}), or a list of either")
  return prompts


def _chat_ids(messages: Any, tokenizer: Tokenizer, template: dict[str, Any]) -> list[int]:
  listed = isinstance(messages, list) and len(messages) > 0
  expect("messages", messages, listed, "a list of messages")
  return tokenizer.chat(messages, **template)


def _limits(
  told: dict[str, Any], sizes: Sequence[int], capacity: int, chat: bool, least: int
) -> list[int]:
  """Tokens of an answer to each prompt; by default 16, in a chat all that there is room for."""
  name = "max_completion_tokens" if "max_completion_tokens" in told else "max_tokens"
  given = told.pop(name, None)
  limits = [max(capacity - size, 1) if chat else 16 for size in sizes]
  if given is not None:
    limits = [asked.whole(name, given, least)] * len(sizes)
  for limit, size in zip(limits, sizes, strict=True):
    together = f"at most {capacity} with the prompt's {size} tokens (--capacity)"
    expect(name, limit, limit + size <= capacity, together)
  return limits


def _pairs(prompts: list[list[int]], given: Any) -> list[Pair]:
  """Every prompt, cut after its context."""
  cuts = given if isinstance(given, list) else [given] * len(prompts)
  right = len(cuts) == len(prompts) and all(type(x) is int and x >= 1 for x in cuts)
  what = "tokens of each prompt, at least 1, that are read before the others are scored"
  expect("context_tokens", given, right, f"{what} (or --context-tokens)")
  return [(ids[:cut], ids[cut:]) for ids, cut in zip(prompts, cuts, strict=True)]


def choice(
  request: Request, index: int, answer: Answer | None, scores: Sequence[Score], tokenizer: Tokenizer
) -> dict[str, Any]:
  """A whole choice.

  Args:
    answer: None where no new token was wanted.
    scores: of the last tokens of its prompt; of the others nothing is told.
  """
  ids = request.prompts[index // request.n] if request.echo else []
  text, made, logprobs, end = tokenizer.decode(ids), [], [], "limit"
  if answer is not None and answer.logprobs is not None:
    made, logprobs = answer.tokens.tolist(), answer.logprobs.tolist()
    text, end = f"{text}{answer.text}", answer.end
  unknown: list[Any] = [(token, None, None, None) for token in ids[: len(ids) - len(scores)]]
  told = [*unknown, *scores, *zip(made, logprobs, made, logprobs, strict=True)]
  said = {"message": {"role": "assistant", "content": text}} if request.chat else {"text": text}
  rows = _logprobs(told, request.chat, tokenizer) if request.logprobs else None
  return {"index": index, **said, "logprobs": rows, "finish_reason": REASONS.get(end)}


def part(request: Request, index: int, event: str | Answer, tokenizer: Tokenizer) -> dict[str, Any]:
  """A choice's new text; or its end, with the log-probabilities of all its tokens."""
  made = {"index": index, "logprobs": None, "finish_reason": None}
  text = event if isinstance(event, str) else ""
  if isinstance(event, Answer):
    made = choice(request, index, event, [], tokenizer)
    made.pop("message", None)
  return {**made, **({"delta": {"content": text}} if request.chat else {"text": text})}


def usage(request: Request, answers: Iterable[Answer]) -> dict[str, int]:
  """Numbers of tokens; an answer's with those that end it."""
  read, made = sum(map(len, request.prompts)), sum(len(x.tokens) for x in answers)
  return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}


def _logprobs(told: Sequence[Any], chat: bool, tokenizer: Tokenizer) -> dict[str, Any]:
  """Of each token, and of the likeliest one in its place."""

  def named(token: int) -> str:
    return tokenizer.decode([token], skip_special=False)

  names = [named(token) for token, *_ in told]
  values = [None if value is None else max(value, LOWEST) for _, value, *_ in told]
  if chat:
    parts = [None if LOST in name else [*name.encode()] for name in names]
    rows = zip(names, values, parts, [[]] * len(names), strict=True)
    return {"content": [dict(zip(CHAT, row, strict=True)) for row in rows]}
  tops = [
    None if value is None else {name: value, named(likeliest): max(best, LOWEST)}
    for name, value, (*_, likeliest, best) in zip(names, values, told, strict=True)
  ]
  starts = [0, *itertools.accumulate(map(len, names))][: len(names)]
  columns = names, values, tops, starts
  return dict(zip(COMPLETION, columns, strict=True))
