"""Every scorer on answers that the published code has scored, and formulas worked by hand."""

import json
import pathlib
import random

import pytest

from kvjax.programs.evals import coqa, longbench, overlap, scores
from kvjax.programs.evals import infinitebench_files as infinitebench
from kvjax.programs.evals.task import Row


def score(scorer, answer, *references):
  return scorer(answer, Row("", "", "", references, "", 1))


# ---- against published code

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "goldens" / "scores.json").read_text())
# Of LongBench a data set with each score.
NAMED = {
  "longbench qa_f1_score": longbench.SCORERS["narrativeqa"],
  "longbench qa_f1_score, first line": longbench.SCORERS["triviaqa"],
  "longbench qa_f1_zh_score": longbench.SCORERS["multifieldqa_zh"],
  "longbench rouge_score": longbench.SCORERS["gov_report"],
  "longbench rouge_score, first line": longbench.SCORERS["samsum"],
  "longbench rouge_zh_score": longbench.SCORERS["dureader"],
  "longbench code_sim_score": longbench.SCORERS["lcc"],
  "longbench classification_score, first line": longbench.SCORERS["trec"],
  "longbench retrieval_score": longbench.SCORERS["passage_retrieval_en"],
  "longbench retrieval_zh_score": longbench.SCORERS["passage_retrieval_zh"],
  "longbench count_score": longbench.SCORERS["passage_count"],
  "gsm8k strict-match": scores.strict_number,
  "gsm8k flexible-extract": scores.last_number,
  "ruler string_match_all": scores.all_found,
  "ruler string_match_part": scores.any_found,
  "longbench_v2 extract_answer": scores.stated_choice,
  "math math_verify": scores.boxed,
  "coqa f1": coqa.score,
  "coqa em": coqa.exact_match,
} | {f"infinitebench {name}": scorer for name, (_, _, scorer) in infinitebench._TASKS.items()}
CLASSES = ["Number", "Date", "Place", "Number of something", "Other number"]
NEEDS = {"zh": "jieba", "longbook_sum": "rouge_score", "math_verify": "math_verify"}


@pytest.mark.core(1)
@pytest.mark.parametrize("name", NAMED)
def test_published_values(name):
  """tests/goldens/scores.json says which code gave them; where it raises, the score is 0."""
  for part, package in NEEDS.items():
    if part in name:
      pytest.importorskip(package)
  pairs = [pair for pair in GOLDEN["pairs"] if pair["score"] == name]
  assert len({pair["value"] for pair in pairs}) > 1
  for pair in pairs:
    about = {"classes": CLASSES} if "classification" in name else {}
    row = Row("", "", "", tuple(pair["references"]), "", 1, scoring=about)
    value = NAMED[name](pair["answer"], row)
    assert value == pytest.approx(pair["value"], abs=1e-12), pair


def test_every_published_score_has_pairs():
  assert {pair["score"] for pair in GOLDEN["pairs"]} == set(NAMED)


def test_rouge_is_that_of_the_package():
  """Of random texts with blank parts, and words in ties."""
  rouge, draw = pytest.importorskip("rouge").Rouge(), random.Random(0)
  pieces = ["a ", "b ", "c ", "d ", ". ", ".", "e\n"]
  for _ in range(300):
    answer, reference = ("".join(draw.choices(pieces, k=draw.randrange(20))) for _ in range(2))
    try:
      expected = rouge.get_scores([answer], [reference], avg=True)["rouge-l"]["f"]
    except ValueError:  # a side has no sentence
      expected = 0.0
    assert overlap.rouge_l(answer, reference) == expected


def test_rouge_of_long_sentences():
  """Thousands of words without a full stop: the words in common, over those of both."""
  words = [f"w{i}" for i in range(3000)]
  value = overlap.rouge_l(" ".join(words), " ".join(words[:1500]))
  assert value == pytest.approx(2 * 1500 / 4500, abs=1e-6)


# ---- by hand

# answer, reference, score
FORMULAS = [
  (r"so \boxed{4}", "4", 1),
  (r"\boxed{3}, no: \boxed{4}", "4", 1),
  (r"\boxed{4}, no: \boxed{3}", "4", 0),
  (r"$\boxed{\frac{1}{\sqrt{2}}}$", r"\frac{1}{\sqrt{2}}", 1),
  (r"$\boxed{ \dfrac 12 }$.", r"\frac{1}{2}", 1),
  (r"\boxed{\left( 3, \frac{\pi}{2} \right)}", r"(3,\frac{\pi}{2})", 1),
  (r"\boxed{1{,}000\text{ cm}}", "1000cm", 1),
  (r"\boxed{\text{Evelyn}}", r"\text{evelyn}", 1),
  (r"\boxed{90^\circ}", "90", 1),
  (r"\boxed{50\%}", "50", 1),
  (r"\boxed{070}", "70", 0),
  (r"the rest is cut: \boxed{\frac{1}{2}", r"\frac{1}{2}", 0),
  (r"\boxed{5} then cut: \boxed{\frac{1}", "5", 1),
  (r"\boxed{}", "5", 0),
  ("5", "5", 0),
  ("", "5", 0),
]


@pytest.mark.parametrize(("answer", "reference", "expected"), FORMULAS)
def test_formulas_by_hand(answer, reference, expected, monkeypatch):
  """As strings; what math-verify adds has its own test."""
  monkeypatch.setattr(scores, "_same_value", lambda reference, said: False)
  assert score(scores.boxed, answer, reference) == expected


@pytest.mark.parametrize(
  ("said", "reference", "expected"),
  [("0.5", r"\frac{1}{2}", 1), (r"2\sqrt{2}", r"\sqrt{8}", 1), ("070", "70", 1), ("3", "4", 0)],
)
def test_equal_formulas(said, reference, expected):
  pytest.importorskip("math_verify")
  assert score(scores.boxed, rf"\boxed{{{said}}}", reference) == expected


def test_the_best_answer_counts():
  scorer = overlap.best(overlap.word_f1)
  assert score(scorer, "red fox", "blue", "fox") == pytest.approx(2 / 3)
  assert score(scorer, "red fox") == 0
  assert score(overlap.first_line(scorer), "\n\nfox\nand more", "fox") == 1


def test_last_boxed_by_hand():
  assert scores.last_boxed(r"\boxed{a\{b}") == r"a\{b"
  assert scores.last_boxed(r"\fbox {x^{2}}") == "x^{2}"
  assert scores.last_boxed(r"\boxed{1 + \boxed{2}}") == "2"
  assert scores.last_boxed("nothing") is None
