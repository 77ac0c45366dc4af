"""Needles in a haystack: RULER's eight `niah` tasks, and the heat map of length and depth.

RULER (Hsieh et al., 2024, §3.1, App. B): sentences that name a key and its value stand somewhere
in a long text; the question asks for the values of one or several keys.
"""

import dataclasses
import functools
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from kvjax.programs.evals import haystack, scores
from kvjax.programs.evals.streams import TESTS, Stream
from kvjax.programs.evals.task import Count, Row, Task, fill, rng

NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
ONE = (
  "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
  "I will quiz you about the {kind} afterwards.\n",
  "\nWhat is the special magic {kind} for {key} mentioned in the provided text?",
  " The special magic {kind} for {key} mentioned in the provided text is",
)
MANY = (
  "Some special magic {kind}s are hidden within the following text. Make sure to memorize it. "
  "I will quiz you about the {kind}s afterwards.\n",
  "\nWhat are all the special magic {kind}s for {key} mentioned in the provided text?",
  " The special magic {kind}s for {key} mentioned in the provided text are",
)
MAX_NEW_TOKENS = 128
HEAT_MAP_DEPTHS = 10
_CONTINUATION_WORDS = 1000


@dataclasses.dataclass(frozen=True)
class Shape:
  """Needles: what is hidden, where, and how much of it is asked for.

  Attributes:
    text: "essay" (speeches), "noise" (five sentences again and again), or "needles" (needles of
      other keys).
    key, value: "word" (adjective-noun), "number" (7 digits) or "uuid".
    keys: keys that are hidden in the text (beside those of a haystack of needles).
    values: values of each key.
    asked: keys that the question names.
  """

  text: Literal["essay", "noise", "needles"] = "essay"
  key: str = "word"
  value: str = "number"
  keys: int = 1
  values: int = 1
  asked: int = 1


SHAPES = {
  "niah_single_1": Shape("noise"),
  "niah_single_2": Shape(),
  "niah_single_3": Shape(value="uuid"),
  "niah_multikey_1": Shape(keys=4),
  "niah_multikey_2": Shape("needles"),
  "niah_multikey_3": Shape("needles", key="uuid", value="uuid"),
  "niah_multivalue": Shape(values=4),
  "niah_multiquery": Shape(keys=4, asked=4),
}


def build(
  count: Count,
  shape: Shape = SHAPES["niah_single_2"],
  *,
  length: int,
  draw: random.Random,
  depth: float | None = None,
  max_new_tokens: int = MAX_NEW_TOKENS,
  task: str = "niah_single_2",
  second: bool = False,
  stream: Stream = TESTS,
) -> Row:
  """One row that fills `length` tokens as far as whole units of its text allow.

  Units are words (essay), groups of five sentences (noise), or needles. As in RULER, depths in
  essays are drawn from forty points without replacement, and other texts have the needles in front
  of any of their units.

  Args:
    count: tokens of context, question and answer prefix.
    shape: what is hidden and asked for.
    length: tokens of the prompt, the answer prefix and the answer together.
    draw: draws the text, keys and values, and the depths.
    depth: where the first needle stands, in [0, 1]; None: drawn. With a second question, the first
      needle is one that this question asks for.
    max_new_tokens: tokens reserved for the answer.
    task: the row's task.
    second: ask a second question about as many other keys; where the shape hides none, they are
      added.
    stream: what texts, keys and values are drawn from.

  Raises:
    ValueError: `depth` is outside [0, 1], or `length` cannot be filled.
  """
  if depth is not None and not 0 <= depth <= 1:
    raise ValueError(f"depth: found {depth}, expected a number in [0, 1]")
  source = draw.choice(list(stream.texts())) if shape.text == "essay" else ""
  if second:
    shape = dataclasses.replace(shape, keys=max(shape.keys, 2 * shape.asked))
  pairs = _pairs(shape, stream, draw)
  hidden = [(key, value) for key, values in pairs.items() for value in values]
  depths = [draw.choice(haystack.DEPTHS)] if depth is None else [depth]
  others = [point for point in haystack.DEPTHS if point != depths[0]]
  depths += draw.sample(others, len(hidden) - 1)
  draw.shuffle(hidden)
  names = draw.sample(list(pairs), shape.asked)
  later = draw.sample([key for key in pairs if key not in names], shape.asked) if second else []
  hidden.sort(key=lambda pair: pair[0] not in later)
  needles = [NEEDLE.format(kind=shape.value, key=key, value=value) for key, value in hidden]
  before, question, prefix = _ask(shape, names)
  then = _ask(shape, later)[1:] if second else ()
  reserved = (1 + second) * max_new_tokens
  # A word is at least one token, and every other unit is several.
  words = stream.words(length + _CONTINUATION_WORDS, source) if source else []
  distractors = _distractors(shape, stream, pairs, random.Random(draw.getrandbits(64)))
  drawn: list[str] = []  # as many of them as were needed: the first n are the same for every n
  order = draw.getrandbits(64)

  def places(n: int) -> list[int]:
    """In front of which of n units the needles stand."""
    free = list(range(n))
    first = [] if depth is None else [free.pop(min(int(depth * n), n - 1))]
    return first + random.Random(order).sample(free, len(needles) - len(first))

  def context(n: int) -> str:
    if shape.text == "essay":
      return before + haystack.hide_in_text(haystack.sentences(words[:n]), needles, depths)
    n += len(needles)  # one unit for each at least
    if shape.text == "needles":
      drawn.extend(itertools.islice(distractors, max(0, n - len(drawn))))
    units = [haystack.NOISE] * n if shape.text == "noise" else drawn[:n]
    return before + "\n".join(haystack.insert(units, needles, places(n)))

  unit = {"essay": "word", "noise": "group of sentences", "needles": "needle"}[shape.text]
  n = fill(lambda n: count(context(n), question, prefix, *then) + reserved, length, length, unit)
  if shape.text != "essay":
    depths[0] = places(n + len(needles))[0] / (n + len(needles))
  return Row(
    context=context(n),
    question=question,
    answer_prefix=prefix,
    answers=_values(pairs, names),
    task=task,
    max_new_tokens=max_new_tokens,
    continuation=" ".join(words[n : n + _CONTINUATION_WORDS]),
    about={"depth": depths[0], **({"source": source} if source else {})},
    second=Row("", *then, _values(pairs, later), task, max_new_tokens) if second else None,
  )


def _ask(shape: Shape, names: Sequence[str]) -> tuple[str, str, str]:
  """Words before the text, the question for some keys, and the beginning of its answer."""
  asked = ", ".join(names[:-1]) + ", and " + names[-1] if len(names) > 1 else names[0]
  texts = ONE if shape.asked * shape.values == 1 else MANY
  before, question, prefix = (text.format(kind=shape.value, key=asked) for text in texts)
  return before, question, prefix


def _values(pairs: dict[str, list[str]], names: Sequence[str]) -> tuple[str, ...]:
  return tuple(value for name in names for value in pairs[name])


def _pairs(shape: Shape, stream: Stream, draw: random.Random) -> dict[str, list[str]]:
  """Distinct keys, each with its distinct values."""
  pairs: dict[str, list[str]] = {}
  used: set[str] = set()
  while len(pairs) < shape.keys:
    key, values = stream.draw[shape.key](draw), []
    while len(values) < shape.values:
      value = stream.draw[shape.value](draw)
      if value not in used:
        used.add(value)
        values.append(value)
    pairs.setdefault(key, values)
  return pairs


def _distractors(
  shape: Shape, stream: Stream, pairs: dict[str, list[str]], draw: random.Random
) -> Iterator[str]:
  """Needles of other keys without end."""
  used = {*pairs, *(value for values in pairs.values() for value in values)}
  while True:
    key, value = (stream.draw[kind](draw) for kind in (shape.key, shape.value))
    if used.isdisjoint((key, value)):
      used |= {key, value}
      yield NEEDLE.format(kind=shape.value, key=key, value=value)


def _niah(
  count: Count, *, name: str, length: int, seed: int, index: int, second: bool = False
) -> Row:
  draw = rng(name, seed, index)
  return build(count, SHAPES[name], length=length, draw=draw, task=name, second=second)


def _heat_map(count: Count, *, length: int, seed: int, index: int, second: bool = False) -> Row:
  """Ten rows have ten evenly spaced depths, in a random order of which any beginning is spread."""
  turn, place = divmod(index, HEAT_MAP_DEPTHS)
  order = haystack.spread(range(HEAT_MAP_DEPTHS), rng("needle depths", seed, turn))
  depth = order[place] / (HEAT_MAP_DEPTHS - 1)
  more: dict[str, Any] = {"max_new_tokens": 32, "task": "needle", "second": second}
  return build(count, length=length, draw=rng("needle", seed, index), depth=depth, **more)


def _summary(shape: Shape) -> str:
  what = f"{shape.keys} {shape.key}→{shape.value}"
  what += f", {shape.values} values each" if shape.values > 1 else ""
  what += f", all {shape.asked} asked for" if shape.asked > 1 else ""
  return f"{what}, in {shape.text}"


TASKS = (
  Task(
    "needle",
    "needle",
    f"one word→number in essay, at {HEAT_MAP_DEPTHS} depths in turn: the heat map",
    _heat_map,
    scores.all_found,
    second=functools.partial(_heat_map, second=True),
  ),
  *(
    Task(
      name,
      "ruler",
      _summary(shape),
      functools.partial(_niah, name=name),
      scores.all_found,
      second=functools.partial(_niah, name=name, second=True),
    )
    for name, shape in SHAPES.items()
  ),
)
