"""InfiniteBench's synthetic tasks at any length: pass key, number string, key-value, math find.

Zhang et al., ∞Bench (ACL 2024), §3, and the repository's generator and prompts; the tasks over
books, dialogue and code are in `infinitebench_files.py`. lm-evaluation-harness has no generator:
its tasks have the one length that was published, and an answer ends with its first line.
"""

import dataclasses
import functools
import random
import statistics

from kvjax.programs.evals import haystack, scores
from kvjax.programs.evals.task import Count, Row, Task, fill, rng

# ---- a key, or a string of digits, in noise

# What stands before the noise, the line hidden in it, the question, how its answer begins, and the
# tokens of an answer.
HIDDEN = {
  "passkey": (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. "
    "I will quiz you about the important information.\n\n",
    "The pass key is {key}. Remember it. {key} is the pass key.",
    "\n\nWhat is the pass key?",
    "\n\nThe pass key is",
    6,
  ),
  "number_string": (
    "There is an important info hidden inside a lot of irrelevant text. Find it. "
    "I will quiz you about the important information there.\n\n",
    "The sequence of digits is {key}. Remember it. {key} is the sequence of digits.",
    "\n\nWhat is the sequence of digits?",
    "\n\nThe sequence of digits is",
    12,
  ),
}


def hidden(count: Count, *, name: str, length: int, seed: int, index: int) -> Row:
  """Five digits (passkey), or ten with many repeated (number_string), told twice in the noise."""
  draw = rng(name, seed, index)
  before, line, question, prefix, tokens = HIDDEN[name]
  digits = [draw.choice("0123456789") for _ in range(5)]
  if name == "number_string":
    for _ in range(5):  # a digit drawn from those so far comes twice in a row
      at = draw.randrange(len(digits))
      digits.insert(at, digits[at])
  key, depth = "".join(digits), draw.choice(haystack.DEPTHS)

  def context(n: int) -> str:
    lines = haystack.hide([haystack.NOISE] * n, [line.format(key=key)], [depth])
    return before + "\n".join(lines)

  n = fill(
    lambda n: count(context(n), question, prefix) + tokens, length, length, "group of sentences"
  )
  return Row(context(n), question, prefix, (key,), name, tokens, about={"depth": depth})


# ---- one of many pairs of UUIDs

_KV_TOKENS = 50


def key_value(count: Count, *, length: int, seed: int, index: int, second: bool = False) -> Row:
  """The value of one key of a JSON object whose keys and values are UUIDs; then that of another."""
  draw = rng("kv_retrieval", seed, index)
  depths = [draw.choice(haystack.DEPTHS)]
  asked = [(haystack.draw_uuid(draw), haystack.draw_uuid(draw))]
  others: list[str] = []
  more = random.Random(draw.getrandbits(64))
  if second:
    depths += draw.sample([point for point in haystack.DEPTHS if point != depths[0]], 1)
    asked += [(haystack.draw_uuid(draw), haystack.draw_uuid(draw))]

  def context(n: int) -> str:
    while len(others) < n:
      others.append(f'"{haystack.draw_uuid(more)}": "{haystack.draw_uuid(more)}"')
    hidden = [f'"{key}": "{value}"' for key, value in asked]
    pairs = haystack.hide(others[:n], hidden, depths)
    before = "Extract the value corresponding to the specified key in the JSON object below.\n\n"
    return f"{before}JSON data:\n{{{', '.join(pairs)}}}"

  prefix = "\nThe value associated with the specified key is: "
  texts = [text for key, _ in asked for text in (f'\n\nKey: "{key}"', prefix)]
  reserved = len(asked) * _KV_TOKENS
  n = fill(lambda n: count(context(n), *texts) + reserved, length, length, "pair")
  rows = [
    Row("", f'\n\nKey: "{key}"', prefix, (value,), "kv_retrieval", _KV_TOKENS)
    for key, value in asked
  ]
  about = {"depth": depths[-1]}
  later = rows[1] if second else None
  return dataclasses.replace(rows[0], context=context(n), about=about, second=later)


# ---- a number of a given rank in a list

_FIND_TOKENS = 3
_RANKS = {
  "largest": -1,
  "second largest": -2,
  "third largest": -3,
  "smallest": 0,
  "second smallest": 1,
  "third smallest": 2,
}


def math_find(count: Count, *, length: int, seed: int, index: int) -> Row:
  """The largest, second largest, …, smallest number of a list, or its median.

  Numbers have at most two digits and come from a part of that range that differs from row to row.
  The three largest and the three smallest stand in the list once; the median is that of an odd
  number of entries.
  """
  draw = rng("math_find", seed, index)
  what = draw.choice([*_RANKS, "median"])
  low = draw.randrange(0, 30)
  high = draw.randrange(low + 30, 100)
  ends = [low, low + 1, low + 2, high - 2, high - 1, high]
  depths = draw.sample(haystack.DEPTHS, len(ends))
  more = random.Random(draw.getrandbits(64))
  inner: list[int] = []

  def numbers(n: int) -> list[int]:
    while len(inner) <= n:
      inner.append(more.randrange(low + 3, high - 2))
    listed = haystack.hide([str(x) for x in inner[: n | 1]], [str(x) for x in ends], depths)
    return [int(x) for x in listed]

  before = f"What is the {what} number in the following list?\n\n"
  question = "\n\nYou should answer with only one number, no other words."
  prefix = f" The {what} number of the list is: "

  def context(n: int) -> str:
    return f"{before}{numbers(n)}"

  n = fill(lambda n: count(context(n), question, prefix) + _FIND_TOKENS, length, length, "number")
  listed = numbers(n)
  answer = statistics.median(listed) if what == "median" else sorted(listed)[_RANKS[what]]
  return Row(context(n), question, prefix, (str(answer),), "math_find", _FIND_TOKENS)


TASKS = (
  *(
    Task(name, "infinitebench", text, functools.partial(hidden, name=name), scores.first_integer)
    for name, text in (
      ("passkey", "five digits told twice in noise"),
      ("number_string", "ten digits, many repeated, told twice in noise"),
    )
  ),
  Task(
    "kv_retrieval",
    "infinitebench",
    "one of many pairs of UUIDs",
    key_value,
    scores.word_found,
    second=functools.partial(key_value, second=True),
  ),
  Task(
    "math_find",
    "infinitebench",
    "the largest, third smallest, median, … number of a list",
    math_find,
    scores.first_number,
  ),
)
