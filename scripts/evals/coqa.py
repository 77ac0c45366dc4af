"""CoQA (Reddy et al., 2019) from a local file: the last question of every conversation.

The conversation before it stands with its answers after the story. The score is CoQA's own: F1 of
words, each of the annotators left out in turn.
"""

from . import local, overlap
from .task import Count, Row, Task, cut_middle

FILE = "coqa/coqa-dev-v1.0.json"
MAX_NEW_TOKENS = 32


def build(count: Count, *, length: int, seed: int, index: int) -> Row:
  """A story, its conversation, and the last question."""
  file = local.path(FILE, "CoQA, dev set", "stanfordnlp.github.io/coqa")
  entry = local.pick(local.read(file)["data"], "coqa", seed, index)
  asked = [question["input_text"] for question in entry["questions"]]
  said = [answer["input_text"] for answer in entry["answers"]]
  turns = [f"Q: {q}\n\nA: {a}\n\n" for q, a in zip(asked, said[:-1], strict=False)]
  question = f"\n\n{''.join(turns)}Q: {asked[-1]}\n\n"
  others = [listed[-1]["input_text"] for listed in entry.get("additional_answers", {}).values()]
  answers = {answer.lower(): answer for answer in reversed([said[-1], *others])}
  ask = question, "A:"
  return Row(
    context=cut_middle(count, "", entry["story"], ask, length=length, reserved=MAX_NEW_TOKENS),
    question=question,
    answer_prefix="A:",
    answers=tuple(reversed(answers.values())),
    task="coqa",
    max_new_tokens=MAX_NEW_TOKENS,
    about={"id": entry["id"], "turns": len(asked)},
  )


def score(answer: str, row: Row) -> float:
  """The mean, over the annotators, of the best F1 against all the others."""
  said = answer.strip().split("\n")[0]
  if len(row.answers) == 1:
    return _f1(said, row.answers[0])
  best = [
    max(_f1(said, other) for j, other in enumerate(row.answers) if j != i)
    for i in range(len(row.answers))
  ]
  return sum(best) / len(best)


def _f1(answer: str, reference: str) -> float:
  """F1 of words; two answers without any word are equal."""
  first, second = overlap.normal(answer).split(), overlap.normal(reference).split()
  return overlap.f1(first, second) if first and second else float(first == second)


TASKS = (
  Task(
    "coqa",
    "coqa",
    "the last question of a conversation about a story",
    build,
    score,
    chat=False,
    filled=False,
    stop=("\nQ:",),
    needs=(FILE,),
  ),
)
