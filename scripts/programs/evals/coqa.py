"""CoQA (Reddy et al., 2019) from a local file: the last question of every conversation.

The conversation before it stands with its answers after the story. The scores are CoQA's own, F1 of
words and exact match, each of the annotators left out in turn; as in lm-evaluation-harness, whose
prompt this is, an answer that several annotators give counts once.
"""

from collections.abc import Callable

from kvjax.programs.evals import local, overlap
from kvjax.programs.evals.task import Count, Row, Task, cut_middle

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
  return _agreement(_f1, answer, row)


def exact_match(answer: str, row: Row) -> float:
  """The share of annotators without whom another one gives this answer."""
  return _agreement(_same, answer, row)


def _agreement(metric: Callable[[str, str], float], answer: str, row: Row) -> float:
  said = answer.strip().split("\n")[0]
  values = [metric(said, reference) for reference in row.answers]
  if len(values) == 1:
    return values[0]
  return sum(max(values[:i] + values[i + 1 :]) for i in range(len(values))) / len(values)


def _f1(answer: str, reference: str) -> float:
  """F1 of words; two answers without any word are equal."""
  first, second = overlap.normal(answer).split(), overlap.normal(reference).split()
  return overlap.f1(first, second) if first and second else float(first == second)


def _same(answer: str, reference: str) -> float:
  return float(overlap.normal(answer) == overlap.normal(reference))


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
    also={"em": exact_match},
    needs=(FILE,),
  ),
)
