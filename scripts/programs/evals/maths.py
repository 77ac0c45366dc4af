"""Word problems and competition problems: GSM-style, GSM8K, MATH-500, AIME.

`gsm_symbolic` is the generator of the `reasoning-gym` package (endless, nothing is fetched); the
others are read from local files. Worked examples stand in front of the GSM problems, as many of
eight as fit; their answers end in "#### x". lm-evaluation-harness asks GSM8K with the same words:
what it would bring (prompt and scores) is what the generator's problems need as well.
"""

import functools
import warnings
from typing import Any

from kvjax.programs.evals import local, scores
from kvjax.programs.evals.task import Count, Row, Task, check_length

EXAMPLES = 8
GSM_TOKENS = 256
BOXED_TOKENS = 32_768  # what reports on models that reason at length give an answer
GSM8K = "github.com/openai/grade-school-math (or hf: openai/gsm8k, as jsonl)"


def _few_shot(count: Count, problems: list[tuple[str, str]], *, task: str, length: int) -> Row:
  """A row of (question, worked answer) pairs, the last of which is asked."""
  *shown, (question, worked) = problems
  asked, prefix = f"Question: {question}\nAnswer:", ""
  examples = [f"Question: {q}\nAnswer: {a}\n\n" for q, a in shown]

  def tokens(n: int) -> int:
    return count("".join(examples[:n]), asked, prefix) + GSM_TOKENS

  check_length(length, tokens(0))
  fits = next(n for n in range(len(examples), -1, -1) if tokens(n) <= length)
  answer = worked.split("####")[-1].strip()
  return Row(
    context="".join(examples[:fits]),
    question=asked,
    answer_prefix=prefix,
    answers=(answer,),
    task=task,
    max_new_tokens=GSM_TOKENS,
    about={"examples": fits},
  )


@functools.lru_cache(maxsize=4)
def _reasoning_gym(seed: int) -> Any:
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    gym = local.package("reasoning_gym", "reasoning-gym", "problems of gsm_symbolic")
  return gym.create_dataset("gsm_symbolic", seed=seed, size=1 << 20)


def gsm_symbolic(count: Count, *, length: int, seed: int, index: int) -> Row:
  """Problem `index` of the generator, after eight that no other row shows or asks."""
  made = _reasoning_gym(seed)
  first = index * (EXAMPLES + 1)
  entries = [made[first + i] for i in range(EXAMPLES + 1)]
  problems = [(entry["question"], entry["metadata"]["answer_cot"]) for entry in entries]
  return _few_shot(count, problems, task="gsm_symbolic", length=length)


def gsm8k(count: Count, *, length: int, seed: int, index: int) -> Row:
  """A problem of the test set after the first eight of the training set."""
  shown, asked = (
    local.read(local.path(f"gsm8k/{part}.jsonl", f"GSM8K, {part} set", GSM8K))
    for part in ("train", "test")
  )
  chosen = [*shown[:EXAMPLES], local.pick(asked, "gsm8k", seed, index)]
  problems = [(entry["question"], entry["answer"]) for entry in chosen]
  return _few_shot(count, problems, task="gsm8k", length=length)


# Tasks whose answers stand in a box: title, file, what it is, its source, and whose order it has.
_BOXED = {
  "gsm8k_chat": (
    *("GSM8K as a chat's only turn", "gsm8k/test.jsonl", "GSM8K, test set", GSM8K, "gsm8k"),
  ),
  "math500": (
    *("MATH-500", "math500/test.jsonl", "math500", "hf: HuggingFaceH4/MATH-500", "math500"),
  ),
  "aime": ("AIME", "aime/test.jsonl", "aime", "hf: HuggingFaceH4/aime_2024", "aime"),
}


def _boxed(
  count: Count, *, name: str, length: int, seed: int, index: int, answer: int = BOXED_TOKENS
) -> Row:
  """A problem alone, as instruction models are measured, whose answer is to stand in a box.

  The answer takes what the length leaves, and no more than `answer` tokens.
  """
  _, file, what, source, order = _BOXED[name]
  entry = local.pick(local.read(local.path(file, what, source)), order, seed, index)
  entry = {key.lower(): value for key, value in entry.items()}
  problem, right = entry.get("problem", entry.get("question")), str(entry["answer"])
  if name == "gsm8k_chat":
    right = right.split("####")[-1].strip()
  question = (
    f"{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
  )
  room = length - count("", question, "")
  if room < 1:
    raise ValueError(f"length: found {length} tokens, expected at least {length - room + 1}")
  return Row(
    context="",
    question=question,
    answer_prefix="",
    answers=(right,),
    task=name,
    max_new_tokens=min(room, answer),
    about={key: entry[key] for key in ("subject", "level") if key in entry},
  )


def _gsm(name: str, summary: str, build: Any, needs: tuple[str, ...] = ()) -> Task:
  return Task(
    name,
    "maths",
    summary,
    build,
    scores.strict_number,
    chat=False,
    filled=False,
    stop=("Question:",),
    also={"flexible": scores.last_number},
    needs=needs,
  )


TASKS = (
  _gsm("gsm_symbolic", "GSM-style problems after eight worked ones (reasoning-gym)", gsm_symbolic),
  _gsm(
    "gsm8k",
    "GSM8K after eight worked problems (local file)",
    gsm8k,
    needs=("gsm8k/train.jsonl", "gsm8k/test.jsonl"),
  ),
  *(
    Task(
      name,
      "maths",
      f"{title}, answers in \\boxed{{}} (local file)",
      functools.partial(_boxed, name=name),
      scores.boxed,
      filled=False,
      open_ended=True,
      also={"flexible": scores.last_number} if name == "gsm8k_chat" else {},
      needs=(file,),
    )
    for name, (title, file, *_) in _BOXED.items()
  ),
)
