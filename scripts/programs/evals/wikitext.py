"""WikiText-2's test set from a local file: perplexity of whole documents under a method.

As lm-evaluation-harness's `wikitext`: documents are put back into ordinary spelling, read in
windows of the length that is asked for, and counted in words and bytes of the text as published.
"""

import functools
import pathlib
import re

from kvjax.programs.evals import local
from kvjax.programs.evals.task import Count, Row, Task

FILE = "wikitext/wiki.test.raw"
_SOURCE = "wikitext-2-raw-v1 (its wiki.test.raw, or the joined lines of hf: Salesforce/wikitext)"


def build(count: Count, *, length: int, seed: int, index: int) -> Row:
  """A document, whole; its windows take at most `length` tokens each."""
  if length < 2:
    raise ValueError(f"length: found {length} tokens, expected at least 2")
  file = local.path(FILE, "WikiText-2, test set", _SOURCE)
  page = local.pick(_pages(file, file.stat().st_mtime_ns), "wikitext", seed, index)
  return Row(
    context="",
    question="",
    answer_prefix="",
    answers=(),
    task="wikitext",
    max_new_tokens=0,
    continuation=detokenised(page),
    about={"document": page.strip().partition("\n")[0].strip("= ")},
    scoring={"words": len(re.split(r"\s+", page)), "bytes": len(page.encode())},
  )


@functools.lru_cache(maxsize=2)
def _pages(file: pathlib.Path, _: int) -> list[str]:
  try:
    found = pages(file.read_text("utf-8-sig"))
  except UnicodeDecodeError as error:
    raise ValueError(f"{file}: found {error}, expected text in UTF-8") from error
  if not found:
    raise ValueError(f"{file}: found no text, expected the documents of WikiText")
  return found


def pages(text: str) -> list[str]:
  """The documents of a file, each from its title " = … = " on."""
  made: list[list[str]] = [[]]
  for line in text.split("\n"):
    # Headings inside of a document have more signs: " = = … = = ".
    title = line.replace("= = =", "===").replace("= =", "==").strip()
    if title.startswith("= ") and title.endswith(" ="):
      made.append([])
    made[-1].append(line)
  return [page for page in map("\n".join, made) if page.strip()]


def detokenised(page: str) -> str:
  """A document in ordinary spelling, by lm-evaluation-harness's rules in their order."""
  text = page.replace("s '", "s'")
  text = re.sub("/' [0-9]/", "/'[0-9]/", text)
  for mark in "-,.":
    text = text.replace(f" @{mark}@ ", mark)
  for mark in ":;.!?,":
    text = text.replace(f" {mark} ", f"{mark} ")
  for first, last in ("()", "[]", "{}", '""', "''"):
    inner = rf"{re.escape(first)}\s*([^{re.escape(last)}]*?)\s*{re.escape(last)}"
    text = re.sub(inner, rf"{first}\1{last}", text)
  for old, new in (
    *(("= = = =", "===="), ("= = =", "==="), ("= =", "==")),
    *((" ° ", "°"), (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")),
  ):
    text = text.replace(old, new)
  return text


TASKS = (
  Task(
    "wikitext",
    "wikitext",
    "perplexity of WikiText-2's documents, token by token (local file)",
    build,
    lambda answer, row: 0.0,
    chat=False,
    filled=False,
    rolling=True,
    needs=(FILE,),
  ),
)
