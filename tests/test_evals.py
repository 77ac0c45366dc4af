"""The evaluation tasks: budgets kept and filled, needles as asked, the same seed the same bytes."""

import dataclasses
import functools
import random
import re

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.evals import divergence, haystack, needle
from scripts.evals.registry import TASKS, choose
from scripts.evals.task import FILLED, fill

LENGTH = 2000


def count(*texts: str) -> int:
  """Tokens of a stand-in tokenizer: words, and every punctuation mark beside them."""
  return len(re.findall(r"\w+|[^\w\s]", "".join(texts)))


def make(task, length=LENGTH, seed=0, index=0):
  return TASKS[task].build(count, length=length, seed=seed, index=index)


def used(row) -> int:
  return count(row.context, row.question, row.answer_prefix) + row.max_new_tokens


# ---- laws of every task


@pytest.mark.parametrize("name", TASKS)
@given(length=st.integers(1500, 6000), seed=st.integers(0, 1000), index=st.integers(0, 1000))
def test_budget_is_kept_and_filled(name, length, seed, index):
  row = make(name, length, seed, index)
  assert row.task == name
  assert used(row) <= length
  if TASKS[name].filled:
    assert used(row) >= FILLED * length


@pytest.mark.parametrize("name", TASKS)
def test_same_seed_same_bytes(name):
  rows = [make(name, seed=seed, index=index) for seed, index in ((7, 1), (7, 1), (8, 1), (7, 2))]
  first, again, other_seed, other_index = map(dataclasses.astuple, rows)
  assert first == again
  assert first not in (other_seed, other_index)


@pytest.mark.parametrize("name", TASKS)
def test_answers_follow_from_the_text(name):
  for index in range(5):
    row = make(name, seed=3, index=index)
    DERIVED[name](row)
    if not TASKS[name].forced:
      assert TASKS[name].score(" ".join(row.answers), row) == 1.0
      assert TASKS[name].score("", row) == 0.0


@pytest.mark.parametrize("name", TASKS)
def test_too_short_is_refused(name):
  with pytest.raises(ValueError, match="length: found 20 tokens, expected at least"):
    make(name, length=20)


# ---- how the answers of each task follow from its text

SENTENCE = re.compile(r"One of the special magic (\w+)s for (\S+) is: (\S+)\.")
KINDS = {
  "number": r"\d{7}",
  "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
  "word": r"[A-Za-z'-]+",
}


def values_in_the_text(row, shape):
  found = SENTENCE.findall(row.context)
  assert all(
    re.fullmatch(KINDS[shape.value], value) and kind == shape.value for kind, _, value in found
  )
  asked = re.search(r"for (.+) mentioned", row.question)[1]
  names = re.split(r", (?:and )?", asked)
  assert len(names) == shape.asked and all(re.fullmatch(KINDS[shape.key], name) for name in names)
  assert asked in row.answer_prefix
  assert sorted(row.answers) == sorted(value for _, key, value in found if key in names)
  assert len(row.answers) == shape.asked * shape.values
  assert len(set(row.answers)) == len(row.answers)
  hidden = {key for _, key, _ in found}
  if shape.text == "needles":
    assert len(hidden) == len(found)
  else:
    assert len(found) == shape.keys * shape.values and len(hidden) == shape.keys
  assert all(row.context.count(answer) == 1 for answer in row.answers)


@functools.cache
def every_word() -> str:
  words = [word for text in haystack.speeches().values() for word in text.split()]
  return " ".join([*words, *words[:20_000]])


def text_that_goes_on(row):
  assert row.continuation.startswith(" ")
  assert count(row.continuation) >= row.max_new_tokens
  assert row.context + row.continuation in every_word()


DERIVED = {
  "kl": text_that_goes_on,
  "needle": lambda row: values_in_the_text(row, needle.Shape()),
  **{
    name: lambda row, shape=shape: values_in_the_text(row, shape)
    for name, shape in needle.SHAPES.items()
  },
}


# ---- needles


def test_hiding_by_hand():
  """Five sentences; at depth 0.4 the needle is the third."""
  five = haystack.sentences("A b. C d. E f. G h. I j.".split())
  assert five == ["A b.", "C d.", "E f.", "G h.", "I j."]
  assert " ".join(haystack.hide(five, ["Here."], [0.4])) == "A b. C d. Here. E f. G h. I j."
  assert haystack.hide(five, ["Here."], [0.0])[0] == "Here."
  assert haystack.hide(five, ["Here."], [1.0])[-1] == "Here."
  assert haystack.hide(haystack.sentences([]), ["Here."], [0.5]) == ["Here."]
  both = haystack.hide(five, ["late", "early"], [0.8, 0.2])
  assert both == ["A b.", "early", "C d.", "E f.", "G h.", "late", "I j."]


def test_a_needle_keeps_its_place():
  early, late = (
    needle.build(count, length=800, draw=random.Random(1), depth=depth) for depth in (0.1, 0.9)
  )
  where = [row.context.index(row.answers[0]) / len(row.context) for row in (early, late)]
  assert where[0] < 0.3 < 0.7 < where[1]
  assert early.answers == late.answers


def test_depths():
  """Drawn from RULER's forty points; the heat map goes through its own in turn."""
  assert len(haystack.DEPTHS) == 40 and haystack.DEPTHS[0] == 0 and haystack.DEPTHS[-1] == 1
  drawn = {make("niah_single_2", index=i).about["depth"] for i in range(20)}
  assert drawn <= set(haystack.DEPTHS) and len(drawn) > 10
  points = [make("needle", index=i).about["depth"] for i in range(20)]
  assert points == pytest.approx([i / 9 for i in range(10)] * 2)


def test_questions_speak_of_one_or_of_many():
  one, many = make("niah_single_3"), make("niah_multiquery")
  assert one.context.startswith("A special magic uuid is hidden within the following text.")
  assert one.question.startswith("\nWhat is the special magic uuid for ")
  assert one.answer_prefix.endswith(" mentioned in the provided text is")
  assert many.context.startswith("Some special magic numbers are hidden within the following text.")
  assert re.match(
    r"\nWhat are all the special magic numbers for \S+, \S+, \S+, and \S+ mentioned", many.question
  )
  assert many.answer_prefix.endswith(" mentioned in the provided text are")


def test_refusals():
  with pytest.raises(ValueError, match=r"depth: found 1\.5"):
    needle.build(count, length=500, draw=random.Random(0), depth=1.5)
  with pytest.raises(ValueError, match="no speech is named 'Nobody'"):
    haystack.words_from("Nobody", 1)
  with pytest.raises(ValueError, match="--tasks: found nonsense, expected families"):
    choose(["nonsense"])


def test_choosing_tasks():
  assert [task.name for task in choose(["kl", "niah_single_1", "kl"])] == ["kl", "niah_single_1"]
  assert {task.name for task in choose(["ruler"])} >= set(needle.SHAPES)


def test_words_go_on_in_a_circle():
  last, first = list(haystack.speeches())[-1], next(iter(haystack.speeches().values())).split()
  own = len(haystack.speeches()[last].split())
  assert haystack.words_from(last, own + 5)[own:] == first[:5]


# ---- filling


@given(
  length=st.integers(100, 20_000),
  costs=st.lists(st.integers(1, 5), min_size=1, max_size=50),
  base=st.integers(0, 40),
)
def test_filling_takes_as_much_as_fits(length, costs, base):
  counted = []

  def tokens(n):
    counted.append(n)
    return base + n // len(costs) * sum(costs) + sum(costs[: n % len(costs)])

  n = fill(tokens, length, length, "word")
  assert tokens(n) <= length < tokens(n + 1)
  assert len(counted) < 30


def test_filling_refuses_what_it_cannot_fill():
  with pytest.raises(ValueError, match=r"found 100 .* 1 × brick .* 81 \(81%\).*one more brick is"):
    fill(lambda n: 1 + 80 * n, 100, 100, "brick")
  with pytest.raises(ValueError, match="there are only 3"):
    fill(lambda n: n, 100, 3, "word")
  with pytest.raises(ValueError, match="expected at least 101 for question and answer"):
    fill(lambda n: 101 + n, 100, 100, "word")


# ---- divergence


def test_divergence_by_hand():
  """p = (1/2, 1/2), q = (1/4, 3/4): KL = ln 2 − (ln 3)/2; the likeliest token differs."""
  p = jnp.log(jnp.array([[0.5, 0.5], [0.9, 0.1]]))
  q = jnp.log(jnp.array([[0.25, 0.75], [0.9, 0.1]]))
  kl, top1 = divergence.compare(p, q)
  np.testing.assert_allclose(kl, [np.log(2) - np.log(3) / 2, 0], atol=1e-6)
  assert list(top1) == [False, True]
  nll = divergence.surprise(q + 3.0, jnp.array([1, 1]))
  np.testing.assert_allclose(nll, -np.log([0.75, 0.1]), rtol=1e-5)
