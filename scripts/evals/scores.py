"""Scorers: an answer and its row to a number in [0, 1]."""

import importlib.util
import re
from fractions import Fraction

from .task import Row

# ---- strings


def all_found(answer: str, row: Row) -> float:
  """RULER's `string_match_all`: the share of references that the answer contains, in any case."""
  said = answer.lower()
  return sum(reference.lower() in said for reference in row.answers) / len(row.answers)


def any_found(answer: str, row: Row) -> float:
  """RULER's `string_match_part`: whether the answer contains a reference, in any case."""
  said = answer.lower()
  return float(any(reference.lower() in said for reference in row.answers))


def word_found(answer: str, row: Row) -> float:
  """InfiniteBench's key-value score: the reference is a word of the answer."""
  words = re.sub(r"""[\n:"'.,?!{}]""", " ", answer).split()
  return float(row.answers[0] in words)


# ---- numbers


def first_integer(answer: str, row: Row) -> float:
  """InfiniteBench's pass-key score: the answer's first run of digits is the reference."""
  return float(re.findall(r"[0-9]+", answer)[:1] == [row.answers[0]])


def first_number(answer: str, row: Row) -> float:
  """InfiniteBench's math-find score: the answer's first number equals the reference.

  A sign does not count, and a decimal number never equals an integer reference.
  """
  found = re.search(r"\d+\.\d+|\d+", answer)
  if found is None:
    return 0.0
  return float(_value(found[0]) == _value(row.answers[0]))


def share_of_numbers(answer: str, row: Row) -> float:
  """LongBench's retrieval and count scores: the share of the answer's numbers that are right."""
  numbers = re.findall(r"\d+", answer)
  wanted = [re.findall(r"\d+", reference)[0] for reference in row.answers]
  return max(map(numbers.count, wanted)) / len(numbers) if numbers else 0.0


def strict_number(answer: str, row: Row) -> float:
  """GSM8K: the number after the first "####" equals the reference."""
  found = re.search(r"#### *(-?[$0-9.,]+)", answer)
  return float(found is not None and _value(found[1]) == _value(row.answers[0]))


def last_number(answer: str, row: Row) -> float:
  """GSM8K, the flexible way: the answer's last number equals the reference."""
  found = re.findall(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\.\d+", answer)
  return float(bool(found) and _value(found[-1]) == _value(row.answers[0]))


def _value(number: str) -> Fraction | None:
  """The exact value of "$1,234.50", or None."""
  try:
    return Fraction(number.replace(",", "").replace("$", "").rstrip("."))
  except (ValueError, ZeroDivisionError):
    return None


# ---- formulas


def boxed(answer: str, row: Row) -> float:
  r"""MATH and AIME: the content of the answer's last \boxed{} is the reference.

  Both are compared as normalised strings; where they differ, `math-verify` decides if it is
  installed (1/2 and 0.5, 2\sqrt{2} and \sqrt{8}).
  """
  said = last_boxed(answer)
  if not said:
    return 0.0
  first, second = map(normal_formula, (said, row.answers[0]))
  return float(first == second or _same_value(row.answers[0], said))


def last_boxed(text: str) -> str | None:
  r"""The content of the last \boxed{} (or \fbox{}) whose braces are balanced, or None."""
  for start in reversed([match.end() for match in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)]):
    depth = 1
    for at in range(start, len(text)):
      if text[at] in "{}" and text[at - 1] != "\\":
        depth += 1 if text[at] == "{" else -1
      if depth == 0:
        return text[start:at]
  return None


def normal_formula(text: str) -> str:
  """A LaTeX answer without what does not change its meaning: spaces, units, sizes of brackets."""
  for old, new in (
    (r"\\(?:left|right|displaystyle|,|;|:|!|quad|qquad)(?![a-zA-Z])", ""),
    (r"\\[dt]frac", r"\\frac"),
    (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
    (r"\\sqrt\s*(\w)", r"\\sqrt{\1}"),
    (r"\\text(?:bf|it|rm)?\s*\{\s*([^{}]*?)\s*\}", r"\1"),
    (r"\\(?:mathrm|mathbf)\s*\{\s*([^{}]*?)\s*\}", r"\1"),
    (r"\^\s*\{?\s*\\circ\s*\}?|\\degree", ""),
    (r"\\[%$]|[%$]", ""),
    (r"(?<=\d)(?:,|\{,\})(?=\d{3}(?!\d))", ""),
    (r"(?<![\d.])\.(?=\d)", "0."),
    (r"(?<=\d)\.0+(?!\d)", ""),
  ):
    text = re.sub(old, new, text)
  return re.sub(r"\s+", "", text).rstrip(".").lower()


def _same_value(reference: str, said: str) -> bool:
  """What `math-verify` says, or False where it is not installed."""
  if importlib.util.find_spec("math_verify") is None:
    return False
  import math_verify

  sides = (math_verify.parse(f"${formula}$") for formula in (reference, said))
  return bool(math_verify.verify(*sides))


# ---- InfiniteBench's and LongBench v2's own


def name_found(answer: str, row: Row) -> float:
  """InfiniteBench's dialogue score: the reference, in capitals, is a word of the answer."""
  words = re.sub(r"""[\n:"'.,?!{}]""", " ", answer.strip()).upper().split()
  return float(row.answers[0] in words)


def last_word_number(answer: str, row: Row) -> float:
  """InfiniteBench's code-run score: the answer's last word is the number."""
  words = re.sub(r"""[\n.`'":]""", " ", answer).split()
  return float(words[-1:] == [row.answers[0]])


def leading_numbers(answer: str, row: Row) -> float:
  """InfiniteBench's math-calc score: the share of values that are right before the first wrong."""
  said = [int(x) for x in re.findall(r"[0-9]+", answer)]
  right = 0
  for found, wanted in zip(said, map(int, row.answers), strict=False):
    if found != wanted:
      break
    right += 1
  return right / len(row.answers)


def first_choice(answer: str, row: Row) -> float:
  """InfiniteBench's multiple-choice score: the letter with which the answer begins, or names."""
  answer = answer.strip()
  if not answer:
    return 0.0
  if answer[0] in "ABCD":
    return float(answer[0] in row.answers)
  if answer in row.answers:
    return 1.0
  plain = re.sub(" +", " ", re.sub(r"""[\n"'.,?!{}]""", " ", answer))
  for mark in ("answer is:", "answer:", "answer is", "option is"):
    if mark in plain:
      rest = plain.split(mark, 1)[1][1:]
      return float(any(map(rest.startswith, row.answers)))
  return float(next((word for word in plain.split() if word in "ABCD"), None) in row.answers)


def named_option(answer: str, row: Row) -> float:
  """InfiniteBench's code-debug score: the right letter at the start, or after "answer is:"."""
  name, letter = row.answers[:2]
  answer = answer.strip()
  if answer[:2] in (f"{letter}.", f"{letter}:"):
    return 1.0
  plain = re.sub(" +", " ", re.sub(r"""[\n`'"*-]|[Oo]ption""", " ", answer))
  for mark in ("answer is:", "is:", "answer:", "correct option is:"):
    if mark in plain:
      return float(plain.split(mark, 1)[1][1:].startswith((letter, name)))
  return 0.0


def stated_choice(answer: str, row: Row) -> float:
  """LongBench v2's score: the letter after "The correct answer is"."""
  said = answer.replace("*", "")
  found = re.search(r"The correct answer is \(([A-D])\)", said)
  found = found or re.search(r"The correct answer is ([A-D])", said)
  return float(found is not None and found[1] == row.answers[0])
