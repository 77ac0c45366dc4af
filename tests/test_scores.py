"""Every scorer on cases worked by hand."""

import pytest

from scripts.evals import scores
from scripts.evals.task import Row


def score(scorer, answer, *references, **about):
  return scorer(answer, Row("", "", "", references, "", 1, about=about))


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
  (scores.first_number, "97.0", ["97"], 1),
  (scores.first_number, "-97", ["97"], 1),  # the published score looks for digits only
  (scores.first_number, "", ["97"], 0),
  (scores.share_of_numbers, "Paragraph 7", ["Paragraph 7"], 1),
  (scores.share_of_numbers, "7 or 17", ["Paragraph 7"], 0.5),
  (scores.share_of_numbers, "seven", ["7"], 0),
  (scores.share_of_numbers, "", ["7"], 0),
  (scores.strict_number, "so 2+2 = 4\n#### 4\nQuestion", ["4"], 1),
  (scores.strict_number, "#### 1,234.00", ["1234"], 1),
  (scores.strict_number, "#### $18.", ["18"], 1),
  (scores.strict_number, "#### -3 #### 4", ["4"], 0),
  (scores.strict_number, "the answer is 4", ["4"], 0),
  (scores.strict_number, "#### .", ["4"], 0),
  (scores.strict_number, "", ["4"], 0),
  (scores.last_number, "2 apples and 3 pears are 5 fruits.", ["5"], 1),
  (scores.last_number, "It costs $1,234.50!", ["1234.5"], 1),
  (scores.last_number, "from 4 to -3.", ["-3"], 1),
  (scores.last_number, "a half is .5", ["1/2"], 1),
  (scores.last_number, "none", ["5"], 0),
  (scores.last_number, "", ["5"], 0),
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


def test_last_boxed_by_hand():
  assert scores.last_boxed(r"\boxed{a\{b}") == r"a\{b"
  assert scores.last_boxed(r"\fbox {x^{2}}") == "x^{2}"
  assert scores.last_boxed(r"\boxed{1 + \boxed{2}}") == "2"
  assert scores.last_boxed("nothing") is None
