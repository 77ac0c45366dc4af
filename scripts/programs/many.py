"""Answers to a file of prompts, over rows that come free one by one (`kvjax generate --file`)."""

import collections
import json
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from kvjax.families.method import Method
from kvjax.models.decode.batcher import Batcher
from kvjax.models.decode.prefill import widths
from kvjax.models.decode.sampling import Sampling
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn.transformer import Transformer
from kvjax.programs import common
from kvjax.runtime import sharding

ROUND = 64  # tokens to which a row's room is rounded up, at least
# Tokens that a device reads about as fast as fewer: a prompt's layers take as long to dispatch, and
# their weights to read.
BUSY = {"cpu": 64}
BUSY_ELSEWHERE = 1024


def rounded(tokens: int, model: Transformer) -> int:
  """The room of a row for so many tokens: one of few sizes, for which programs are compiled once.

  It is at most a sixteenth more, or 63 tokens, and splits evenly over the devices of its slots.
  """
  step = max(ROUND, (1 << tokens.bit_length()) // 32)
  step *= 1 if model.mesh is None else sharding.shards(model.mesh, "slots")
  return -(-tokens // step) * step


def read(path: pathlib.Path) -> dict[int, Any]:
  """The prompts of a file by line, from 1 on: texts, or the messages of chats.

  Args:
    path: a text in UTF-8; or JSON lines (.jsonl), each an object with "prompt", a text, or
      "messages", a list of objects with "role" and "content".

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it has no prompt, is no text in UTF-8, or a line is no such object.
  """
  # JSON may hold U+2028 and others, at which `splitlines` would cut.
  lines = enumerate(re.split(r"\r\n?|\n", common.read_text(path, "--file")), 1)
  prompts = {n: line for n, line in lines if line.strip()}
  if path.suffix == ".jsonl":
    prompts = {n: _object(f"--file: {path}: line {n}", line) for n, line in prompts.items()}
  if not prompts:
    raise ValueError(f"--file: {path}: found no prompt, expected one a line")
  return prompts


def _object(where: str, line: str) -> Any:
  try:
    found = json.loads(line)
  except ValueError:
    found = line
  prompt = found.get("prompt") if isinstance(found, dict) else None
  messages = found.get("messages") if isinstance(found, dict) else None
  if isinstance(prompt, str) and prompt.strip() and messages is None:
    return prompt
  if prompt is None and isinstance(messages, list) and messages:
    return messages
  raise ValueError(
    f'{where}: found {line[:80]!r}, expected {{"prompt": text}} or {{"messages": …}}'
  )


def together(method: Method, sizes: Iterable[int], rows: int, chunk: int | None) -> int:
  """Number of prompts of `sizes` tokens that are best read at a time: a power of two.

  It is at most 8, and a quarter of the rows, as those that are read take memory until they have
  one. Prompts of equal padded lengths are read together (`Batcher`), the last of them beside places
  that nobody needs.
  """
  busy = BUSY.get(jax.default_backend(), BUSY_ELSEWHERE)
  alike = collections.Counter(widths(method, size, chunk, None) for size in sizes)

  def cost(n: int) -> int:
    return sum(
      -(-m // n) * sum(max(busy, n * width) for width in each) for each, m in alike.items()
    )

  return min((n for n in (1, 2, 4, 8) if n == 1 or 4 * n <= rows), key=cost)


def answers(
  model: Transformer,
  tokenizer: Tokenizer,
  method: Method,
  prompts: Mapping[int, Any],
  *,
  encode: Callable[[Any], list[int]],
  rows: int,
  steps: int,
  sampling: Sampling,
  seed: int,
  stop: Sequence[str],
  chunk: int | None,
) -> Iterator[dict[str, Any]]:
  """Answers as they end, each the one that its prompt gets alone in such a batch.

  Args:
    prompts: by line.
    encode: a prompt's token ids; raises ValueError for one that fails.
    rows, steps, sampling, stop, chunk: as `kvjax generate` takes them.
    seed: of the first prompt's draws; the next one's are `seed` + 1, modulo 2³¹.

  Yields:
    Objects of "index", the prompt's number, "text", "tokens", their number, "end", the reason, and
    "error", which names the line, where it failed.

  Raises:
    ValueError: no prompt can be encoded; the message is the first one's.
  """
  encoded: dict[int, list[int]] = {}
  failed: dict[int, str] = {}
  lines = dict(enumerate(prompts))
  for i, prompt in enumerate(prompts.values()):
    try:
      encoded[i] = encode(prompt)
    except ValueError as error:
      failed[i] = str(error)
  if not encoded:
    raise ValueError(f"--file: line {lines[0]}: {failed[0]}")
  sizes = [len(ids) for ids in encoded.values()]
  batcher = Batcher(
    model,
    method,
    rows=min(rows, len(encoded)),
    capacity=rounded(max(sizes) + steps, model),
    sampling=sampling,
    tokenizer=tokenizer,
    chunk=chunk,
    together=together(method, sizes, min(rows, len(encoded)), chunk),
  )
  index = {}
  for i, ids in encoded.items():
    how = {"limit": steps, "seed": (seed + i) % 2**31, "stop": tokenizer.ends, "stop_strings": stop}
    try:
      index[batcher.submit(ids, **how)] = i
    except ValueError as error:
      failed[i] = str(error)
  for i, error in sorted(failed.items()):
    said = f"line {lines[i]}: {error}"
    yield {"index": i, "text": "", "tokens": 0, "end": "failed", "error": said}
  for answer in batcher:
    i = index[answer.request]
    told = {"index": i, "text": answer.text, "tokens": len(answer.tokens), "end": answer.end}
    yield told if answer.error is None else {**told, "error": f"line {lines[i]}: {answer.error}"}
