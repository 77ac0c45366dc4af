"""Scorers: an answer and its row to a number in [0, 1]."""

import itertools
import re

from kvjax.programs.evals import local
from kvjax.programs.evals.task import Row

PATIENCE = 60  # seconds for a formula: in math-verify's 5 a busy machine may not even be loaded

# ---- strings


def all_found(answer: str, row: Row) -> float:
  """RULER's `string_match_all`: the share of references that the answer contains, in any case."""
  said = _printable(answer)
  return sum(reference.lower() in said for reference in row.answers) / len(row.answers)


def any_found(answer: str, row: Row) -> float:
  """RULER's `string_match_part`: whether the answer contains a reference, in any case."""
  said = _printable(answer)
  return float(any(reference.lower() in said for reference in row.answers))


def _printable(answer: str) -> str:
  """In lower case, control characters as line breaks, as RULER prepares answers."""
  return re.sub(r"[\x00-\x1f]", "\n", answer.strip()).strip().lower()


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

  A sign does not count. Where the reference is an integer, a decimal number is wrong, 12.0 too: the
  published code stops on it.
  """
  found, wanted = re.search(r"\d+\.\d+|\d+", answer), row.answers[0]
  if found is None:
    return 0.0
  if "." in wanted:
    return float(float(found[0]) == float(wanted))
  return float("." not in found[0] and _same_integer(found[0], wanted))


def last_word_number(answer: str, row: Row) -> float:
  """InfiniteBench's code-run score: the answer's last word is the number, as `int` reads it."""
  words = re.sub(r"""[\n.`'":]""", " ", answer).split()
  return float(bool(words) and _same_integer(words[-1], row.answers[0]))


def leading_numbers(answer: str, row: Row) -> float:
  """InfiniteBench's math-calc score: the share of values that are right before the first wrong."""
  said = re.findall(r"[0-9]+", answer)
  same = map(_same_integer, said, row.answers)
  return sum(itertools.takewhile(bool, same)) / len(row.answers)


def _same_integer(one: str, other: str) -> bool:
  """True if two texts are the same integer; False where one is none, or has too many digits."""
  try:
    return int(one) == int(other)
  except ValueError:
    return False


def share_of_numbers(answer: str, row: Row) -> float:
  """LongBench's retrieval and count scores: the share of the answer's numbers that are right."""
  numbers = re.findall(r"\d+", answer)
  named = [re.search(r"(?:Paragraph |段落)(\d+)", reference) for reference in row.answers]
  wanted = [match[1] if match else other for match, other in zip(named, row.answers, strict=True)]
  return max(map(numbers.count, wanted)) / len(numbers) if numbers else 0.0


def strict_number(answer: str, row: Row) -> float:
  """lm-evaluation-harness's strict GSM8K score: what stands after the first "#### "."""
  return _same_digits(re.findall(r"#### (-?[0-9.,]+)", answer)[:1], row)


def last_number(answer: str, row: Row) -> float:
  """lm-evaluation-harness's flexible GSM8K score: the answer's last number."""
  return _same_digits(re.findall(r"-?[$0-9.,]{2,}|-?[0-9]+", answer)[-1:], row)


def _same_digits(found: list[str], row: Row) -> float:
  """1 if the text found is the reference, but for commas, dollars and one last full stop; else 0.

  Values do not count: 18.00 is not 18.
  """
  sides = (re.sub(r"\.$", "", re.sub("[,$]", "", text)) for text in (*found, row.answers[0]))
  return float(bool(found) and len(set(sides)) == 1)


# ---- formulas


def boxed(answer: str, row: Row) -> float:
  r"""MATH and AIME: the content of the answer's last \boxed{} is the reference.

  Both are compared as normalised strings; where they differ, `math-verify` decides (1/2 and 0.5,
  2\sqrt{2} and \sqrt{8}).
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
  """True if `math-verify` finds both to be of the same value."""
  math_verify = local.package("math_verify", "math-verify")
  sides = [math_verify.parse(f"${x}$", parsing_timeout=PATIENCE) for x in (reference, said)]
  return bool(math_verify.verify(*sides, timeout_seconds=PATIENCE))


# ---- InfiniteBench's and LongBench v2's own


def name_found(answer: str, row: Row) -> float:
  """InfiniteBench's dialogue score: the reference, in capitals, is a word of the answer."""
  words = re.sub(r"""[\n:"'.,?!{}]""", " ", answer.strip()).upper().split()
  return float(row.answers[0] in words)


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
