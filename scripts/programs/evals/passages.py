"""Retrieval and counting of passages, after LongBench's two synthetic tasks.

LongBench (Bai et al., 2024) takes Wikipedia and a model's abstracts; here the passages are parts of
presidential addresses, and what is looked for is a few of a passage's own words.
"""

from kvjax.programs.evals import haystack, scores
from kvjax.programs.evals.task import Count, Row, Task, fill, rng

MAX_NEW_TOKENS = 32
PASSAGES = 30
COUNTED = 20
_QUOTED = 12  # words of a quotation


def retrieval(count: Count, *, length: int, seed: int, index: int) -> Row:
  """Thirty passages of equal length; which one does the quotation come from?"""
  draw = rng("passage_retrieval", seed, index)
  sources = haystack.passages(draw, PASSAGES, length // PASSAGES + 1)
  target, place = draw.randrange(PASSAGES), draw.random()

  def quotation(n: int) -> str:
    first = int(place * (n - _QUOTED))
    return " ".join(sources[target][first : first + _QUOTED])

  def context(n: int) -> str:
    before = "Here are 30 paragraphs from speeches, along with a quotation. "
    before += "Please determine which paragraph the quotation is from.\n\n"
    return before + _listed([source[:n] for source in sources])

  def question(n: int) -> str:
    return (
      f"\n\nThe following is a quotation.\n\n{quotation(n)}\n\nPlease enter the number of the "
      'paragraph that the quotation is from. The answer format must be like "Paragraph 1", '
      '"Paragraph 2", etc.'
    )

  prefix = "\n\nThe answer is: "
  # Shorter passages than a quotation there are none.
  n = _QUOTED + fill(
    lambda n: count(context(n + _QUOTED), question(n + _QUOTED), prefix) + MAX_NEW_TOKENS,
    length,
    len(sources[0]) - _QUOTED,
    f"{PASSAGES} words",
  )
  answers = (f"Paragraph {target + 1}",)
  return Row(context(n), question(n), prefix, answers, "passage_retrieval", MAX_NEW_TOKENS)


def counting(count: Count, *, length: int, seed: int, index: int) -> Row:
  """Twenty passages, some of them several times: how many different ones are there?"""
  draw = rng("passage_count", seed, index)
  different = draw.randrange(COUNTED // 4, COUNTED + 1)
  sources = haystack.passages(draw, different, length // COUNTED + 1)
  order = [*range(different), *(draw.randrange(different) for _ in range(COUNTED - different))]
  draw.shuffle(order)

  def context(n: int) -> str:
    before = (
      "There are some paragraphs below sourced from speeches. Some of them may be duplicates. "
      "Please carefully read these paragraphs and determine how many unique paragraphs there are "
      "after removing duplicates. In other words, how many non-repeating paragraphs are there in "
      "total?\n\n"
    )
    return before + _listed([sources[i][: n + 1] for i in order])

  question = (
    "\n\nPlease enter the final count of unique paragraphs after removing duplicates. "
    "The output format should only contain the number, such as 1, 2, 3, and so on."
  )
  prefix = "\n\nThe final answer is: "
  n = fill(
    lambda n: count(context(n), question, prefix) + MAX_NEW_TOKENS,
    length,
    len(sources[0]) - 1,
    f"{COUNTED} words",
  )
  return Row(context(n), question, prefix, (str(different),), "passage_count", MAX_NEW_TOKENS)


def _listed(passages: list[list[str]]) -> str:
  return "\n\n".join(f"Paragraph {i}: {' '.join(words)}" for i, words in enumerate(passages, 1))


TASKS = (
  Task(
    "passage_retrieval",
    "passages",
    f"which of {PASSAGES} passages a quotation is from",
    retrieval,
    scores.share_of_numbers,
  ),
  Task(
    "passage_count",
    "passages",
    f"how many of {COUNTED} passages are different",
    counting,
    scores.share_of_numbers,
  ),
)
