"""Every scorer on cases worked by hand, and on answers that the published code has scored."""

import functools
import json
import pathlib
import random

import pytest

from kvjax.programs.evals import coqa, longbench, overlap, scores
from kvjax.programs.evals import infinitebench_files as infinitebench
from kvjax.programs.evals.task import Row


def score(scorer, answer, *references, **about):
  return scorer(answer, Row("", "", "", references, "", 1, about=about))


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


@functools.cache
def _rouge():
  return pytest.importorskip("rouge").Rouge()


def test_rouge_is_that_of_the_package():
  """Of random texts with blank parts, and words in ties."""
  draw = random.Random(0)
  pieces = ["a ", "b ", "c ", "d ", ". ", ".", "e\n"]
  for _ in range(300):
    answer, reference = ("".join(draw.choices(pieces, k=draw.randrange(20))) for _ in range(2))
    try:
      expected = _rouge().get_scores([answer], [reference], avg=True)["rouge-l"]["f"]
    except ValueError:  # a side has no sentence
      expected = 0.0
    assert overlap.rouge_l(answer, reference) == expected


def test_rouge_of_long_sentences():
  """Thousands of words without a full stop: the words in common, over those of both."""
  words = [f"w{i}" for i in range(3000)]
  value = overlap.rouge_l(" ".join(words), " ".join(words[:1500]))
  assert value == pytest.approx(2 * 1500 / 4500, abs=1e-6)


# ---- by hand

# scorer, answer, references, score
STRINGS = [
  (scores.all_found, "It is AB-12.", ["ab-12"], 1),
  (scores.all_found, "first 111, then 333", ["111", "222", "333", "444"], 0.5),
  (scores.all_found, "", ["111"], 0),
  (scores.any_found, "the town of PARIS", ["London", "paris"], 1),
  (scores.any_found, "Rome", ["London", "Paris"], 0),
  (scores.any_found, "", ["London"], 0),
  (scores.word_found, '"ab-1", says the key: cd.', ["ab-1"], 1),
  (scores.word_found, "xab-1x", ["ab-1"], 0),
  (scores.word_found, "", ["ab-1"], 0),
]
NUMBERS = [
  (scores.first_integer, " 12345. Remember 99999.", ["12345"], 1),
  (scores.first_integer, "It is not 1 but 12345", ["12345"], 0),
  (scores.first_integer, "00123", ["123"], 0),
  (scores.first_integer, "none", ["123"], 0),
  (scores.first_integer, "", ["123"], 0),
  (scores.first_number, " 97, or 98", ["97"], 1),
  (scores.first_number, "97.5", ["97"], 0),
  (scores.first_number, "97.0", ["97"], 0),
  (scores.first_number, "-97", ["97"], 1),  # the published score looks for digits only
  (scores.first_number, "", ["97"], 0),
  (scores.share_of_numbers, "Paragraph 7", ["Paragraph 7"], 1),
  (scores.share_of_numbers, "7 or 17", ["Paragraph 7"], 0.5),
  (scores.share_of_numbers, "seven", ["7"], 0),
  (scores.share_of_numbers, "", ["7"], 0),
]
FORMULAS = [
  (scores.boxed, r"so \boxed{4}", ["4"], 1),
  (scores.boxed, r"\boxed{3}, no: \boxed{4}", ["4"], 1),
  (scores.boxed, r"\boxed{4}, no: \boxed{3}", ["4"], 0),
  (scores.boxed, r"$\boxed{\frac{1}{\sqrt{2}}}$", [r"\frac{1}{\sqrt{2}}"], 1),
  (scores.boxed, r"$\boxed{ \dfrac 12 }$.", [r"\frac{1}{2}"], 1),
  (scores.boxed, r"\boxed{\left( 3, \frac{\pi}{2} \right)}", [r"(3,\frac{\pi}{2})"], 1),
  (scores.boxed, r"\boxed{1{,}000\text{ cm}}", ["1000cm"], 1),
  (scores.boxed, r"\boxed{\text{Evelyn}}", [r"\text{evelyn}"], 1),
  (scores.boxed, r"\boxed{90^\circ}", ["90"], 1),
  (scores.boxed, r"\boxed{50\%}", ["50"], 1),
  (scores.boxed, r"\boxed{070}", ["70"], 0),
  (scores.boxed, r"the rest is cut: \boxed{\frac{1}{2}", [r"\frac{1}{2}"], 0),
  (scores.boxed, r"\boxed{5} then cut: \boxed{\frac{1}", ["5"], 1),
  (scores.boxed, r"\boxed{}", ["5"], 0),
  (scores.boxed, "5", ["5"], 0),
  (scores.boxed, "", ["5"], 0),
]


@pytest.mark.parametrize(("scorer", "answer", "references", "expected"), [*STRINGS, *NUMBERS])
def test_by_hand(scorer, answer, references, expected):
  assert score(scorer, answer, *references) == pytest.approx(expected)


@pytest.mark.parametrize(("scorer", "answer", "references", "expected"), FORMULAS)
def test_formulas_by_hand(scorer, answer, references, expected, monkeypatch):
  """As strings; what math-verify adds has its own test."""
  monkeypatch.setattr(scores, "_same_value", lambda reference, said: False)
  assert score(scorer, answer, *references) == expected


@pytest.mark.parametrize(
  ("said", "reference", "expected"),
  [("0.5", r"\frac{1}{2}", 1), (r"2\sqrt{2}", r"\sqrt{8}", 1), ("070", "70", 1), ("3", "4", 0)],
)
def test_equal_formulas(said, reference, expected):
  pytest.importorskip("math_verify")
  assert score(scores.boxed, rf"\boxed{{{said}}}", reference) == expected


CHOICES = [
  (scores.name_found, "it is Alice.", ["ALICE"], 1),
  (scores.name_found, "Alicent", ["ALICE"], 0),
  (scores.last_word_number, "The value is -12.", ["-12"], 1),
  (scores.last_word_number, "-12 I think", ["-12"], 0),
  (scores.leading_numbers, "[1, 3, 5, 6]", ["1", "3", "6"], 2 / 3),
  (scores.leading_numbers, "", ["1"], 0),
  (scores.first_choice, " C. because", ["the third", "C"], 1),
  (scores.first_choice, "B or C", ["the third", "C"], 0),
  (scores.first_choice, "the third", ["the third", "C"], 1),
  (scores.first_choice, "I say the answer is: C", ["the third", "C"], 1),
  (scores.first_choice, "the option is D, not C", ["the third", "C"], 0),
  (scores.first_choice, "maybe C", ["the third", "C"], 1),
  (scores.first_choice, "the answer is", ["the third", "C"], 0),
  (scores.first_choice, "", ["the third", "C"], 0),
  (scores.named_option, "B. name", ["name", "B"], 1),
  (scores.named_option, "the answer is: `name`", ["name", "B"], 1),
  (scores.named_option, "the correct option is: D", ["name", "B"], 0),
  (scores.named_option, "B", ["name", "B"], 0),
  (scores.named_option, "", ["name", "B"], 0),
  (scores.stated_choice, "The correct answer is (C).", ["C"], 1),
  (scores.stated_choice, "**The correct answer is C**", ["C"], 1),
  (scores.stated_choice, "The correct answer is (B), or C", ["C"], 0),
  (scores.stated_choice, "C", ["C"], 0),
  (scores.stated_choice, "", ["C"], 0),
]


@pytest.mark.parametrize(("scorer", "answer", "references", "expected"), CHOICES)
def test_choices_by_hand(scorer, answer, references, expected):
  assert score(scorer, answer, *references) == pytest.approx(expected)


# metric, answer, reference, score
WORDS = [
  (overlap.word_f1, "The cat sat, on a mat!", "cat sat on mats", 3 / 4),
  (overlap.word_f1, "the the the", "cat", 0),
  (overlap.word_f1, "", "cat", 0),
  (overlap.word_f1, "cat cat", "cat", 2 / 3),
  (overlap.character_f1, "清华，大学。", "清华大学", 1),
  (overlap.character_f1, "北京大学", "清华大学", 1 / 2),
  (overlap.character_f1, "", "清华大学", 0),
]


@pytest.mark.parametrize(("metric", "answer", "reference", "expected"), WORDS)
def test_words_by_hand(metric, answer, reference, expected):
  assert metric(answer, reference) == pytest.approx(expected)


def test_the_best_answer_counts():
  scorer = overlap.best(overlap.word_f1)
  assert score(scorer, "red fox", "blue", "fox") == pytest.approx(2 / 3)
  assert score(scorer, "red fox") == 0
  assert score(overlap.first_line(scorer), "\n\nfox\nand more", "fox") == 1


def test_chinese_words_by_hand():
  """jieba cuts 我来到北京清华大学 into four words, two of which the answer has."""
  pytest.importorskip("jieba")
  assert overlap.cut("我来到北京清华大学") == ["我", "来到", "北京", "清华大学"]
  assert overlap.chinese_f1("北京，清华大学！", "我来到北京清华大学") == pytest.approx(4 / 6)
  assert overlap.chinese_f1("", "北京") == 0


def test_rouge_by_hand():
  """the cat on mat: 4 of 5 words of the answer and of the 5 of the reference, in order."""
  value = overlap.rouge_l("the cat sat on mat", "the cat was on mat")
  assert value == pytest.approx(4 / 5, abs=1e-6)
  for nothing in ("", " . ", "..."):
    assert overlap.rouge_l(nothing, "the cat") == overlap.rouge_l("the cat", nothing) == 0


def test_chinese_rouge_by_hand():
  pytest.importorskip("jieba")
  value = overlap.chinese_rouge_l("我来到清华大学", "我来到北京清华大学")
  assert value == pytest.approx(6 / 7, abs=1e-6)  # 3 of 3 words, 3 of 4
  assert overlap.chinese_rouge_l("", "北京") == 0


@pytest.mark.slow
def test_rouge_of_summaries_by_hand():
  """Lines are compared apart: 3 words of the answer's 4, and of the reference's 5."""
  pytest.importorskip("rouge_score")
  answer, reference = "a dog barks\nloudly", "a cat sleeps\na dog"
  assert score(overlap.rouge_l_sum, answer, "x", reference) == pytest.approx(4 / 9)
  assert score(overlap.rouge_l_sum, "", reference) == 0


def test_code_by_hand():
  """The first line without comment or quote; x = 1 and x = 2 share 4 of 5 characters each."""
  assert overlap.code_similarity("```python\n# note\nx = 1\ny", "x = 1") == 1
  assert overlap.code_similarity("x = 2", "x = 1") == 0.8
  assert overlap.code_similarity("# only a note", "x = 1") == 0
  assert overlap.code_similarity("", "x = 1") == 0


@pytest.mark.parametrize(
  ("answer", "expected"),
  [
    ("Date", 1),
    ("Date or Place", 0.5),
    ("Place", 0),
    ("", 0),
  ],
)
def test_classes_by_hand(answer, expected):
  row = Row("", "", "", ("Date",), "", 1, scoring={"classes": ["Number", "Date", "Place"]})
  assert overlap.named_class(answer, row) == expected


def test_classes_within_classes():
  """A name within the right one's name does not count."""
  classes = ["Number", "Date", "Number of things"]
  row = Row("", "", "", ("Number of things",), "", 1, scoring={"classes": classes})
  assert overlap.named_class("Number of things", row) == 1


@pytest.mark.parametrize(
  ("answer", "expected"),
  [
    ("white", (1 + 1 + 1) / 3),  # every reference left out in turn, the best of the others
    ("a cat", 1 / 3 * (0 + 2 / 3 + 2 / 3)),
    ("", 0),
  ],
)
def test_coqa_by_hand(answer, expected):
  references = (
    ("white", "White.", "the cat was white")
    if answer == "white"
    else (*("cat sat", "dog", "bird"),)
  )
  row = Row("", "", "", references, "", 1)
  assert coqa.score(answer, row) == pytest.approx(expected)


def test_coqa_with_one_answer():
  row = Row("", "", "", ("the",), "", 1)
  assert coqa.score("a", row) == 1 and coqa.score("cat", row) == 0


def test_metrics_that_are_not_there_say_how_to_get_them(monkeypatch):
  monkeypatch.setattr(overlap.importlib, "import_module", _missing)
  with pytest.raises(ModuleNotFoundError, match=r"package jieba .*kvjax\[benchmarks\]"):
    overlap._jieba.__wrapped__()


def _missing(name):
  raise ModuleNotFoundError(name)


def test_last_boxed_by_hand():
  assert scores.last_boxed(r"\boxed{a\{b}") == r"a\{b"
  assert scores.last_boxed(r"\fbox {x^{2}}") == "x^{2}"
  assert scores.last_boxed(r"\boxed{1 + \boxed{2}}") == "2"
  assert scores.last_boxed("nothing") is None
