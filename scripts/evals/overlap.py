"""Scorers that measure overlap: F1 of words, ROUGE-L, edit similarity, names of classes.

As LongBench and InfiniteBench publish them; each takes the best of a row's answers. Chinese is
compared by jieba's words in LongBench and by characters in InfiniteBench.
"""

import collections
import functools
import importlib
import re
import string
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from .task import Row

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
  """ROUGE-L's F, by the `rouge` package; 0 where there is nothing to compare."""
  if not answer.strip(" .") or not reference.strip(" ."):
    return 0.0
  scores = _package("rouge").Rouge().get_scores([answer], [reference], avg=True)
  return scores["rouge-l"]["f"]


def chinese_rouge_l(answer: str, reference: str) -> float:
  """ROUGE-L's F of Chinese words, as jieba cuts them."""
  return rouge_l(" ".join(cut(answer)), " ".join(cut(reference)))


def rouge_l_sum(answer: str, row: Row) -> float:
  """ROUGE-Lsum's F against the best reference, by the `rouge-score` package, without stemming."""
  scorer = _package("rouge_score.rouge_scorer", "rouge-score").RougeScorer(["rougeLsum"])
  return scorer.score_multi(row.answers, answer)["rougeLsum"].fmeasure


def cut(text: str) -> list[str]:
  """Words of a Chinese text."""
  return _jieba().lcut(text)


@functools.cache
def _jieba() -> Any:
  """jieba, without its log and the warnings of its old code."""
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    jieba = _package("jieba")
    jieba.setLogLevel("WARNING")
    jieba.initialize()
  return jieba


# ---- the rest


def edit_similarity(answer: str, reference: str) -> float:
  """LongBench's code score: likeness of the answer's first line that is neither comment nor quote.

  2 × matches over both lengths (insertions and deletions only), in whole percent.
  """
  lines = answer.lstrip("\n").split("\n")
  code = (line for line in lines if not any(mark in line for mark in ("`", "#", "//")))
  ratio = _package("rapidfuzz.fuzz", "rapidfuzz").ratio(next(code, ""), reference)
  return round(ratio) / 100


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


def _package(module: str, name: str = "") -> Any:
  try:
    return importlib.import_module(module)
  except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
      f"the package {name or module} (a metric) is not installed: pip install 'kvjax[benchmarks]'"
    ) from error
