"""Scorers that measure overlap: F1 of words, ROUGE-L, edit similarity, names of classes.

As LongBench and InfiniteBench publish them; each takes the best of a row's answers. Chinese is
compared by jieba's words in LongBench and by characters in InfiniteBench.
"""

import collections
import difflib
import functools
import itertools
import re
import string
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvjax.programs.evals import local
from kvjax.programs.evals.task import Row

_CHINESE = (
  "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞"
  "〟〰〾〿–—‘’‛“”„‟…‧﹏."
)


def best(metric: Callable[[str, str], float]) -> Callable[[str, Row], float]:
  """A scorer from a metric of (answer, reference): the best over the row's answers."""

  def score(answer: str, row: Row) -> float:
    return max((metric(answer, reference) for reference in row.answers), default=0.0)

  return score


def first_line(scorer: Callable[[str, Row], float]) -> Callable[[str, Row], float]:
  """A scorer of the answer's first line that is not empty."""
  return lambda answer, row: scorer(answer.lstrip("\n").split("\n")[0], row)


# ---- F1


def normal(text: str) -> str:
  """Lower case, without punctuation, articles and extra spaces (SQuAD's normalisation)."""
  text = "".join(c for c in text.lower() if c not in string.punctuation)
  return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def normal_chinese(text: str) -> str:
  """Lower case, without punctuation and spaces."""
  drop = {*string.punctuation, *_CHINESE}
  return "".join("".join(c for c in text.lower() if c not in drop).split())


def f1(answer: Sequence[str], reference: Sequence[str]) -> float:
  """Harmonic mean of precision and recall of two bags of tokens."""
  common = collections.Counter(answer) & collections.Counter(reference)
  same = sum(common.values())
  return 2 * same / (len(answer) + len(reference)) if same else 0.0


def word_f1(answer: str, reference: str) -> float:
  """F1 of words."""
  return f1(normal(answer).split(), normal(reference).split())


def character_f1(answer: str, reference: str) -> float:
  """F1 of Chinese characters (InfiniteBench)."""
  return f1(normal_chinese(answer), normal_chinese(reference))


def chinese_f1(answer: str, reference: str) -> float:
  """F1 of Chinese words, as jieba cuts them (LongBench)."""
  sides = ([normal_chinese(word) for word in cut(text)] for text in (answer, reference))
  return f1(*([word for word in words if word] for words in sides))


# ---- ROUGE


def rouge_l(answer: str, reference: str) -> float:
  """ROUGE-L's F as the `rouge` package defines it; 0 where a side has no sentence.

  Sentences end at full stops. Matches are the different words of all longest common subsequences of
  two sentences. The package finds these by recursion, a frame a word, and fails on sentences of a
  few hundred words; here they are found in a loop, with the same value.
  """
  said, wanted = map(_sentences, (answer, reference))
  if not said or not wanted:
    return 0.0
  common = {word for one in wanted for other in said for word in _common_words(one, other)}
  precision, recall = (len(common) / len(set(itertools.chain(*side))) for side in (said, wanted))
  return 2.0 * (precision * recall / (precision + recall + 1e-8))


def _sentences(text: str) -> list[list[str]]:
  """Words of the parts between full stops; of blank parts one empty word, as in the package."""
  return [part.split() or [""] for part in text.split(".") if part]


def _common_words(first: Sequence[str], second: Sequence[str]) -> set[str]:
  """Words of a longest common subsequence: of several, the one that the package finds."""
  numbers = {word: i for i, word in enumerate({*first, *second})}
  columns = np.array([numbers[word] for word in second])
  table = np.zeros((len(first) + 1, len(second) + 1), np.int32)
  for i, word in enumerate(first, 1):
    same = columns == numbers[word]
    table[i, 1:] = np.maximum.accumulate(np.where(same, table[i - 1, :-1] + 1, table[i - 1, 1:]))
  found = set()
  i, j = len(first), len(second)
  while i and j:
    if first[i - 1] == second[j - 1]:
      found.add(first[i - 1])
      i, j = i - 1, j - 1
    elif table[i - 1, j] > table[i, j - 1]:
      i -= 1
    else:
      j -= 1
  return found


def chinese_rouge_l(answer: str, reference: str) -> float:
  """ROUGE-L's F of Chinese words, as jieba cuts them."""
  return rouge_l(" ".join(cut(answer)), " ".join(cut(reference)))


def rouge_l_sum(answer: str, row: Row) -> float:
  """ROUGE-Lsum's F against the best reference, by the `rouge-score` package, without stemming."""
  scorer = local.package("rouge_score.rouge_scorer", "rouge-score").RougeScorer(["rougeLsum"])
  return scorer.score_multi(row.answers, answer)["rougeLsum"].fmeasure


def cut(text: str) -> list[str]:
  """Words of a Chinese text."""
  return _jieba().lcut(text)


@functools.cache
def _jieba() -> Any:
  """jieba, without its log and the warnings of its old code."""
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    jieba = local.package("jieba")
    jieba.setLogLevel("WARNING")
    jieba.initialize()
  return jieba


# ---- the rest


def code_similarity(answer: str, reference: str) -> float:
  """LongBench's code score: likeness of the answer's first line that is neither comment nor quote.

  In whole percent, of Python's `difflib`: `fuzzywuzzy.ratio` as LongBench's requirements install
  it. With python-Levenshtein beside it, other values come out.
  """
  lines = answer.lstrip("\n").split("\n")
  code = (line for line in lines if not any(mark in line for mark in ("`", "#", "//")))
  return round(100 * difflib.SequenceMatcher(None, next(code, ""), reference).ratio()) / 100


def named_class(answer: str, row: Row) -> float:
  """LongBench's classification score: 1 over the number of classes that the answer names.

  0 where the right one is not among them; a class whose name is part of the right one's name does
  not count.
  """

  def metric(answer: str, reference: str) -> float:
    named = [name for name in row.scoring["classes"] if name in answer]
    # The published loop removes while it walks, and so skips a name after one that it removes.
    for name in named:
      if name in reference and name != reference:
        named.remove(name)
    return 1 / len(named) if reference in named else 0.0

  return best(metric)(answer, row)
