"""Questions over many documents: how they are laid out, and made-up facts to ask about.

`facts_1` and `facts_2` stand in for RULER's `qa_1` and `qa_2` where SQuAD and HotpotQA are not on
this machine: one or two steps from the question to the answer, over people and towns that do not
exist. Their scores are not RULER's.
"""

import dataclasses
import functools
import itertools
import random
import re

from kvjax.programs.evals import local, scores
from kvjax.programs.evals.task import Count, Row, Task, fill, rng

MAX_NEW_TOKENS = 32
_INSTRUCTION = (
  "Answer the question based on the given documents. "
  "Only give me the answer and do not output any other words.\n\n"
)


@dataclasses.dataclass(frozen=True)
class Question:
  """A question, its answers (any will do), the documents it needs, and those like them."""

  text: str
  answers: tuple[str, ...]
  gold: tuple[str, ...]
  near: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Collection:
  """Questions, and all documents that may stand beside those that a question needs."""

  questions: tuple[Question, ...]
  texts: tuple[str, ...]


def build(
  count: Count, collection: Collection, *, task: str, length: int, seed: int, index: int
) -> Row:
  """Question `index` of the collection's own order, shuffled once by `seed`.

  Raises:
    ValueError: there are fewer questions, or `length` cannot be filled.
  """
  question = local.pick(collection.questions, task, seed, index)
  draw = rng(task, seed, index)
  used = {*question.gold, *question.near}
  # A document has eight words at least: these are more than enough.
  others = draw.sample(collection.texts, min(len(collection.texts), length // 8))
  near = list(question.near)
  draw.shuffle(near)
  distractors = [*near, *(text for text in others if text not in used)]
  return lay_out(count, question, distractors, task=task, length=length, draw=draw)


def lay_out(
  count: Count,
  question: Question,
  distractors: list[str],
  *,
  task: str,
  length: int,
  draw: random.Random,
) -> Row:
  """The question's documents among as many distractors as fit, numbered in an order of chance.

  The last distractor is cut between words, where RULER leaves a gap of up to a document.
  """
  texts = [*question.gold, *distractors]
  places = [draw.random() for _ in texts]
  sizes = [len(text.split()) for text in distractors]
  asked = f"\n\n{_INSTRUCTION}Question: {question.text}"

  def context(words: int) -> str:
    shown = [*question.gold]
    for text, size in zip(distractors, sizes, strict=True):
      if words <= 0:
        break
      shown.append(text if size <= words else _first_words(text, words))
      words -= size
    ordered = [text for _, text in sorted(zip(places, shown, strict=False))]
    listed = (f"Document {i}:\n{text}" for i, text in enumerate(ordered, 1))
    before = f"{_INSTRUCTION}The following are given documents.\n\n"
    return before + "\n\n".join(listed)

  n = fill(
    lambda n: count(context(n), asked, " Answer:") + MAX_NEW_TOKENS,
    length,
    min(length, sum(sizes)),
    "word",
  )
  return Row(context(n), asked, " Answer:", question.answers, task, MAX_NEW_TOKENS)


def _first_words(text: str, count: int) -> str:
  """The text up to the end of a word, line breaks as they are."""
  ends = [match.end() for match in re.finditer(r"\S+", text)]
  return text[: ends[count - 1]]


# ---- made-up facts

_STARTS = "Bar Cor Dal Fen Gar Hol Jor Kel Lan Mar Nor Pel Rad Sel Tor Ul Ver Wen Yar Zel".split()
_MIDDLES = "a e i o u ae ia".split()
_NAME_ENDS = "bert dan gor lin mund nar rick ston tha vin wick zor".split()
_TOWN_ENDS = "bridge burgh dale field ford haven holm mouth stead ton wick worth".split()
_COUNTRY_ENDS = "land mark ria stan via nia".split()
_JOBS = (
  "baker beekeeper blacksmith carpenter clockmaker cook dentist farmer gardener glassblower "
  "judge librarian mason miller painter pilot plumber potter sailor shepherd tailor"
).split()
_INSTRUMENTS = "accordion cello clarinet drum flute guitar harp lute oboe organ piano tuba".split()


@functools.cache
def _invented(*parts: tuple[str, ...]) -> tuple[str, ...]:
  """Every combination of the parts, as one word each."""
  return tuple("".join(combined) for combined in itertools.product(*parts))


def facts(count: Count, *, steps: int, length: int, seed: int, index: int) -> Row:
  """Documents about people (and, with two steps, about the towns that they were born in)."""
  task = f"facts_{steps}"
  draw = rng(task, seed, index)
  people = length // 20 + 1  # a document has over twenty words
  names = _invented(tuple(_STARTS), tuple(_MIDDLES), tuple(_NAME_ENDS))
  lower = tuple(start.lower() for start in _STARTS)
  places = tuple(_STARTS), tuple(_MIDDLES), lower
  born = draw.sample(_invented(*places, tuple(_TOWN_ENDS)), people)
  countries = draw.sample(_invented(*places, tuple(_COUNTRY_ENDS)), people)
  pairs = draw.sample(range(len(names) ** 2), people)
  texts, asked = [], []
  for pair, town, country in zip(pairs, born, countries, strict=True):
    person = " ".join(names[i] for i in divmod(pair, len(names)))
    asked.append(person)
    texts.append(
      f"{person} was born in the town of {town} and works as a {draw.choice(_JOBS)}. "
      f"{person} now lives in {draw.choice(born)} and plays the {draw.choice(_INSTRUMENTS)}."
    )
    if steps == 2:
      texts.append(
        f"{town} is a town in the country of {country}. It was founded in the year "
        f"{draw.randrange(1000, 1900)} and is known for its {draw.choice(_JOBS)}s."
      )
  if steps == 1:
    text, answer = f"In which town was {asked[0]} born?", born[0]
  else:
    text, answer = f"In which country is the town where {asked[0]} was born?", countries[0]
  question = Question(text, (answer,), tuple(texts[:steps]))
  return lay_out(count, question, texts[steps:], task=task, length=length, draw=draw)


TASKS = tuple(
  Task(
    f"facts_{steps}",
    "facts",
    f"made-up facts over many documents, {steps} step{'s' * (steps > 1)}: in place of qa_{steps}",
    functools.partial(facts, steps=steps),
    scores.any_found,
  )
  for steps in (1, 2)
)
