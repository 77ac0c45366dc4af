"""InfiniteBench's published data from local files: books, dialogue, code, mathematics, retrieval.

Zhang et al., ∞Bench (ACL 2024): prompts of the repository for models without a system message
(`yarn-mistral`), texts cut in the middle, and its scores. Generated ones: `infinitebench.py`.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

from kvjax.programs.evals import infinitebench, local, overlap, scores
from kvjax.programs.evals.task import Count, Row, Task, cut_middle

_OPTIONS = "A. {OPTION_A}\nB. {OPTION_B}\nC. {OPTION_C}\nD. {OPTION_D}"
# Task: prompt, tokens of an answer, scorer. Math.Calc's 30,000 are cut to what the length leaves.
_TASKS: dict[str, tuple[str, int, Callable[[str, Row], float]]] = {
  **{
    name: (f"{before}{{context}}\n\n{{input}}{prefix}", tokens, scores.first_integer)
    for name, (before, _, _, prefix, tokens) in infinitebench.HIDDEN.items()
  },
  "kv_retrieval": (
    "Extract the value corresponding to the specified key in the JSON object below.\n\n{context}"
    "\n\n{input}",
    50,
    scores.word_found,
  ),
  "longbook_sum_eng": (
    "Summarize the book below.\n\n{context}\n\nSummary:",
    1200,
    overlap.rouge_l_sum,
  ),
  "longbook_choice_eng": (
    f"Read the book and answer the question.\n\n{{context}}\n\nQuestion: {{input}}\n{_OPTIONS}\n\n"
    "The letter of the correct answer is",
    40,
    scores.first_choice,
  ),
  "longbook_qa_eng": (
    "Read the book and answer the question. Be very concise in your answer.\n\n{context}\n\n"
    "Question: {input}\nAnswer:",
    40,
    overlap.best(overlap.word_f1),
  ),
  "longbook_qa_chn": (
    "阅读以下书籍然后回答问题。\n\n{context}\n\n问题：{input}\n答案：",
    40,
    overlap.best(overlap.character_f1),
  ),
  "longdialogue_qa_eng": (
    "Below is a dialogue script where one random occurrence of a character name is replaced with "
    '"$$MASK$$", and you should try to guess who that character is.\n\n{context}\n\n'
    "The name that has been replaced with $$MASK$$ is likely",
    40,
    scores.name_found,
  ),
  "math_find": ("{wanted}\n\n{context}\n\n{input}", 3, scores.first_number),
  "math_calc": (
    "Let us calculate the intermediate values of an expression.\n\nExpression: 1 + 3 + 4\n"
    "Values: [1, 4, 8]\n\nExpression: 8 - 3 + 2 - 4\nValues: [8, 5, 7, 3]\n\n"
    "Expression: {context}\nValues:",
    30_000,
    scores.leading_numbers,
  ),
  "code_run": (
    "There is a function called {func} in the following Python code.\n\n{context}\n\n"
    "Please compute the exact value of {func_call}. The value of {func_call} is",
    5,
    scores.last_word_number,
  ),
  "code_debug": (
    "Following is a Python code where exactly one of the functions/methods has a deliberate error "
    f"that makes it crash.\n\n{{context}}\n\nOptions:\n{_OPTIONS}\n\nThe correct option is:",
    5,
    scores.named_option,
  ),
}


def _build(count: Count, *, name: str, length: int, seed: int, index: int) -> Row:
  task = f"infinitebench_{name}"
  source = "hf: xinrongzhang2022/InfiniteBench"
  file = local.path(f"infinitebench/{name}.jsonl", f"InfiniteBench, {name}", source)
  entry = local.pick(local.read(file), task, seed, index)
  prompt, tokens, _ = _TASKS[name]
  fields = _fields(entry)
  before, behind = (_fill_in(part, fields) for part in prompt.split("{context}"))
  if name == "math_calc":  # an expression is never cut; as many of its values as fit are asked for
    context = before + entry["context"]
    least = count(context, behind, "") + 1
    if least > length:
      raise ValueError(f"length: found {length} tokens, expected at least {least}")
    tokens = min(tokens, length - least + 1)
  else:
    ask = behind, ""
    context = cut_middle(count, before, entry["context"], ask, length=length, reserved=tokens)
  return Row(context, behind, "", _answers(entry), task, tokens, about={"id": entry["id"]})


def _fields(entry: dict[str, Any]) -> dict[str, str]:
  """Fields that prompts name beside the context."""
  asked = entry["input"]
  fields = {"input": asked}
  fields |= {f"OPTION_{k}": v for k, v in zip("ABCD", entry.get("options") or (), strict=False)}
  if call := re.search(r"(func_\d+)\(-?\d+\)", asked):
    fields |= {"func": call[1], "func_call": call[0]}
  if wanted := re.search(r"The (.+?) number", asked):
    fields["wanted"] = f"What is the {wanted[1].lower()} number in the following list?"
  return fields


def _fill_in(text: str, fields: dict[str, str]) -> str:
  """`str.format` for the names that are known: texts have braces of their own."""
  return re.sub(r"\{(\w+)\}", lambda match: fields.get(match[1], match[0]), text)


def _answers(entry: dict[str, Any]) -> tuple[str, ...]:
  """Answers as strings; of a multiple choice the text and its letter."""
  listed = entry["answer"] if isinstance(entry["answer"], list) else [entry["answer"]]
  if listed and isinstance(listed[0], list):
    listed = listed[0]
  answers = tuple(map(str, listed))
  options = entry.get("options") or []
  if len(answers) == 1 and answers[0] in options:
    answers += ("ABCD"[options.index(answers[0])],)
  return answers


TASKS = tuple(
  Task(
    f"infinitebench_{name}",
    "infinitebench_files",
    f"{name} as published",
    functools.partial(_build, name=name),
    scorer,
    chat=False,
    filled=False,
    needs=(f"infinitebench/{name}.jsonl",),
  )
  for name, (_, _, scorer) in _TASKS.items()
)
