"""RULER's other tasks: variable tracking, common and frequent words, question answering.

Hsieh et al., 2024, §3.2-3.4, App. B; the `niah` tasks are in `needle.py`. Under 4,096 tokens the
repository's smaller settings hold. SQuAD and HotpotQA are read from local files; without them,
`documents.py` has made-up facts instead, under names that say so.
"""

import functools
import itertools
import math
import pathlib
import random
import string
from collections.abc import Sequence

from kvjax.programs.evals import documents, haystack, local, scores
from kvjax.programs.evals.task import Count, Row, Task, fill, rng

SMALL = 4096  # tokens below which examples are shorter and words are repeated less often

# ---- vt: one chain of assignments in noise

HOPS = 4
VT_TOKENS = 30
EXAMPLE_TOKENS = 500
_VT = (
  "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{text}"
)
_VT_QUESTION = (
  "\nQuestion: Find all variables that are assigned the value {value} in the text above."
)
_VT_PREFIX = (
  " Answer: According to the chain(s) of variable assignment in the text above, "
  f"{HOPS + 1} variables are assigned the value {{value}}, they are: "
)


def variable_tracking(count: Count, *, length: int, seed: int, index: int) -> Row:
  """VAR A = 12345, VAR B = VAR A, … in order, anywhere in the noise; one example in front."""
  draw = rng("vt", seed, index)
  values = draw.sample(range(10_000, 99_999), 2)
  example_names, names = (_names(draw, letters) for letters in (3, 5))
  orders = [draw.getrandbits(64) for _ in range(2)]
  shown = _example(count, example_names, values[0], orders[0])
  value = str(values[1])
  question, prefix = _VT_QUESTION.format(value=value), _VT_PREFIX.format(value=value)

  def context(n: int) -> str:
    return shown + _VT.format(text=_chain(names, values[1], n + len(names), orders[1]))

  n = fill(
    lambda n: count(context(n), question, prefix) + VT_TOKENS, length, length, "group of sentences"
  )
  return Row(context(n), question, prefix, tuple(names), "vt", VT_TOKENS)


def _names(draw: random.Random, letters: int) -> list[str]:
  """Distinct names of variables, first of the chain first."""
  names: list[str] = []
  while len(names) < HOPS + 1:
    name = "".join(draw.choices(string.ascii_uppercase, k=letters))
    if name not in names:
      names.append(name)
  return names


def _example(count: Count, names: Sequence[str], value: int, order: int) -> str:
  """A worked example whose prompt has at most EXAMPLE_TOKENS, of five groups of noise at least."""

  def prompt(groups: int) -> str:
    text = _VT.format(text=_chain(names, value, groups, order))
    return text + _VT_QUESTION.format(value=value) + _VT_PREFIX.format(value=value)

  most, groups = EXAMPLE_TOKENS + count("", "", ""), len(names)
  while count(prompt(groups + 1), "", "") <= most:
    groups += 1
  return f"{prompt(groups)} {' '.join(names)}\n\n"


def _chain(names: Sequence[str], value: int, groups: int, order: int) -> str:
  """The chain's assignments in order, each a line of its own in front of any group of noise."""
  lines = [f"VAR {names[0]} = {value}"]
  lines += [f"VAR {name} = VAR {last} " for last, name in itertools.pairwise(names)]
  places = sorted(random.Random(order).sample(range(groups), len(lines)))
  return "\n".join(haystack.insert([haystack.NOISE] * groups, lines, places))


# ---- cwe: the ten words that a list repeats most often

COMMON = 10
CWE_TOKENS = 120
_CWE = (
  "Below is a numbered list of words. In these words, some appear more often than others. "
  "Memorize the ones that appear most often.\n{text}"
)
_CWE_QUESTION = "\nQuestion: What are the 10 most common words in the above list?"
_CWE_PREFIX = " Answer: The top 10 words that appear most often in the list are:"


def common_words(count: Count, *, length: int, seed: int, index: int) -> Row:
  """Ten words 30 times and others 3 times, shuffled and numbered (small: 6 times and once)."""
  draw = rng("cwe", seed, index)
  often, seldom = (6, 1) if length < SMALL else (30, 3)
  sizes = (20, 3, 1) if length < SMALL else (40, 10, 3)
  # A list is drawn from anew for the example, and where it runs out another takes its place.
  lists = haystack.vocabulary()
  shown = draw.sample(lists[0], sizes[0])
  example = _CWE.format(text=_numbered(shown, *sizes[1:], 0)) + _CWE_QUESTION + _CWE_PREFIX + " "
  example += " ".join(f"{i}. {word}" for i, word in enumerate(shown[:COMMON], 1)) + "\n"
  orders = [draw.sample(words, len(words)) for words in lists]
  order = draw.getrandbits(64)

  def context(words: Sequence[str], n: int) -> str:
    return example + _CWE.format(text=_numbered(words[: COMMON + n], often, seldom, order))

  def filled(words: Sequence[str]) -> int:
    return fill(
      lambda n: count(context(words, n), _CWE_QUESTION, _CWE_PREFIX) + CWE_TOKENS,
      length,
      min(length // (3 * seldom), len(words) - COMMON),  # an entry: a number, a dot and a word
      "word",
    )

  try:
    words, n = orders[0], filled(orders[0])
  except ValueError:
    words, n = orders[1], filled(orders[1])
  answers = tuple(words[:COMMON])
  return Row(context(words, n), _CWE_QUESTION, _CWE_PREFIX, answers, "cwe", CWE_TOKENS)


def _numbered(words: Sequence[str], often: int, seldom: int, order: int) -> str:
  """The first ten words `often` times, the others `seldom` times: "1. word 2. word …"."""
  listed = [*words[:COMMON]] * often + [*words[COMMON:]] * seldom
  random.Random(order).shuffle(listed)
  return " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1))


# ---- fwe: the three most frequent coded words

FWE_TOKENS = 50
LETTERS = 6
_FWE = (
  "Read the following coded text and track the frequency of each coded word. "
  "Find the three most frequently appeared coded words. {text}"
)
_FWE_QUESTION = (
  "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
  "What are the three most frequently appeared words in the above coded text?"
)
_FWE_PREFIX = (
  " Answer: According to the coded text above, the three most frequently appeared words are:"
)


def frequent_words(count: Count, *, length: int, seed: int, index: int) -> Row:
  """Words of six letters with zeta-distributed frequencies, α = 2; the first is printed as dots."""
  draw = rng("fwe", seed, index)
  size = max(5, (length - FWE_TOKENS) // 50)
  names: dict[str, None] = {}
  while len(names) < size:
    names["".join(draw.choices(string.ascii_lowercase, k=LETTERS))] = None
  ranked = list(names)
  ranked[0] = "..."
  order = draw.getrandbits(64)

  def context(n: int) -> str:
    # A share of k^−2 / ζ(2) for rank k, ζ(2) = π²/6.
    times = (int(n * 6 / (math.pi * k) ** 2) for k in range(1, size + 1))
    listed = [word for word, many in zip(ranked, times, strict=True) for _ in range(many)]
    random.Random(order).shuffle(listed)
    return _FWE.format(text=" ".join(listed))

  n = fill(
    lambda n: count(context(n), _FWE_QUESTION, _FWE_PREFIX) + FWE_TOKENS,
    length,
    2 * length,
    "word",
  )
  answers = tuple(ranked[1:4])
  return Row(context(n), _FWE_QUESTION, _FWE_PREFIX, answers, "fwe", FWE_TOKENS)


# ---- qa: a question over documents, of which one or two hold the answer

SQUAD = "squad/dev-v2.0.json"
HOTPOTQA = "hotpotqa/hotpot_dev_distractor_v1.json"


@functools.lru_cache(maxsize=1)
def squad(file: pathlib.Path) -> documents.Collection:
  """SQuAD 2.0's answerable questions; distractors come from the same article first."""
  articles = [article["paragraphs"] for article in local.read(file)["data"]]
  questions = []
  for paragraphs in articles:
    texts = [paragraph["context"] for paragraph in paragraphs]
    for paragraph in paragraphs:
      near = tuple(text for text in texts if text != paragraph["context"])
      for entry in paragraph["qas"]:
        if not entry["is_impossible"]:
          answers = tuple(dict.fromkeys(answer["text"] for answer in entry["answers"]))
          gold = (paragraph["context"],)
          questions.append(documents.Question(entry["question"], answers, gold, near))
  every = sorted({paragraph["context"] for paragraphs in articles for paragraph in paragraphs})
  return documents.Collection(tuple(questions), tuple(every))


@functools.lru_cache(maxsize=1)
def hotpotqa(file: pathlib.Path) -> documents.Collection:
  """HotpotQA's distractor setting: ten paragraphs of a question's own, then those of others."""
  questions = []
  for entry in local.read(file):
    own = tuple(f"{title}\n{''.join(lines)}" for title, lines in entry["context"])
    questions.append(documents.Question(entry["question"], (entry["answer"],), own, ()))
  every = sorted({text for question in questions for text in question.gold})
  return documents.Collection(tuple(questions), tuple(every))


def _qa(count: Count, *, name: str, length: int, seed: int, index: int) -> Row:
  if name == "qa_1":
    title = "qa_1: SQuAD 2.0, dev set"
    collection = squad(local.path(SQUAD, title, "rajpurkar.github.io/SQuAD-explorer"))
  else:
    title = "qa_2: HotpotQA, dev set (distractor)"
    collection = hotpotqa(local.path(HOTPOTQA, title, "hotpotqa.github.io"))
  return documents.build(count, collection, task=name, length=length, seed=seed, index=index)


TASKS = (
  Task("vt", "ruler", f"one chain of {HOPS} hops in noise", variable_tracking, scores.all_found),
  Task("cwe", "ruler", "the ten most common words of a list", common_words, scores.all_found),
  Task("fwe", "ruler", "the three most frequent coded words", frequent_words, scores.all_found),
  Task(
    "qa_1",
    "ruler",
    "SQuAD questions over many paragraphs (local file)",
    functools.partial(_qa, name="qa_1"),
    scores.any_found,
    needs=(SQUAD,),
    stand_in="facts_1",
  ),
  Task(
    "qa_2",
    "ruler",
    "HotpotQA questions over many paragraphs (local file)",
    functools.partial(_qa, name="qa_2"),
    scores.any_found,
    needs=(HOTPOTQA,),
    stand_in="facts_2",
  ),
)
