"""Python from local files, as the publisher of Qwen2.5-Coder asks it: CRUXEval and HumanEval.

CRUXEval-O (Gu et al., 2024) asks what a function returns, after an example with its reasoning; the
answer is a literal, which is read and not run. HumanEval (Chen et al., 2021) asks for a function,
whose tests are run: `sandbox` says how. Prompts and stop strings are those of
github.com/QwenLM/Qwen2.5-Coder (qwencoder-eval/instruct); only the system message of HumanEval's
chat is the model's own here. lm-evaluation-harness has both with prompts for base models, draws ten
answers each for CRUXEval, runs what a model wrote without a sandbox, and fetches that metric.
"""

import ast
import pathlib

from kvjax.programs.evals import local, sandbox
from kvjax.programs.evals.task import Count, Row, Task, check_length

MAX_NEW_TOKENS = 1024
CRUXEVAL = "cruxeval/cruxeval.jsonl"
HUMANEVAL = "humaneval/HumanEval.jsonl.gz"
PROMPTS = "cruxeval/prompts.py"
_MAKER = "make_cot_output_prompt"
_SOURCE = "github.com/facebookresearch/cruxeval"


def cruxeval_o(count: Count, *, length: int, seed: int, index: int) -> Row:
  """The task to say what a function returns for an input."""
  file = local.path(CRUXEVAL, "CRUXEval", f"{_SOURCE} (data)")
  entry = local.pick(local.read(file), "cruxeval_o", seed, index)
  file = local.path(PROMPTS, "CRUXEval, prompts", f"{_SOURCE} (inference)")
  example, question = _published(file, entry["code"], entry["input"])
  check_length(length, count(example, question, "") + MAX_NEW_TOKENS)
  how = {"about": {"id": entry["id"]}, "scoring": {"input": entry["input"]}}
  answers = (entry["output"],)
  return Row(example, question, "", answers, "cruxeval_o", MAX_NEW_TOKENS, **how)


def _published(file: pathlib.Path, code: str, given: str) -> tuple[str, str]:
  """The published prompt of a function and its input, in two parts; its file is read, not run."""
  tree = ast.parse(file.read_text("utf-8"))
  functions = [x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == _MAKER]
  if len(functions) != 1:
    raise ValueError(f"{file}: found {len(functions)} functions {_MAKER}, expected one")
  text = next(node for node in ast.walk(functions[0]) if isinstance(node, ast.JoinedStr))
  filled = {"code": code, "input": given}
  parts = [
    filled[ast.unparse(piece.value)] if isinstance(piece, ast.FormattedValue) else piece.value
    for piece in text.values
  ]
  return parts[0], "".join(parts[1:])


def humaneval(count: Count, *, length: int, seed: int, index: int) -> Row:
  """A function to be written, whose head and description are given."""
  sandbox.check_allowed("humaneval")
  file = local.path(HUMANEVAL, "HumanEval", "github.com/openai/human-eval (data)")
  entry = local.pick(local.read(file), "humaneval", seed, index)
  head = entry["prompt"].strip()
  question = f"Can you complete the following Python function?\n```python\n{head}\n```\n"
  parts = ("", question, "```python\n")
  check_length(length, count(*parts) + MAX_NEW_TOKENS)
  scoring = {name: entry[name] for name in ("prompt", "test", "entry_point")}
  how = {"about": {"id": entry["task_id"]}, "scoring": scoring}
  return Row(*parts, (entry["canonical_solution"],), "humaneval", MAX_NEW_TOKENS, **how)


def literal(answer: str, row: Row) -> float:
  """CRUXEval's score: the right side of the answer's first assertion equals the output.

  As published, where what follows a comma is the assertion's message; but that an expression that
  is no literal is wrong and not worked out.
  """
  said = answer.split("[ANSWER]")[1] if "[ANSWER]" in answer else answer
  said = said.split("==")[1] if "==" in said else said
  if f"f({row.scoring['input']})" in said:
    return 0.0
  try:
    (stated,) = ast.parse(f"assert output == {said.strip()}").body
    if not isinstance(stated, ast.Assert) or not isinstance(stated.test, ast.Compare):
      return 0.0
    (value,) = stated.test.comparators
    return float(ast.literal_eval(value) == ast.literal_eval(row.answers[0]))
  except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
    return 0.0


def passed(answer: str, row: Row) -> float:
  """HumanEval's score: the tests pass, with the given head before the answer.

  The head has the imports and helpers that a function written anew leaves out.
  """
  head, test, name = (row.scoring[part] for part in ("prompt", "test", "entry_point"))
  return float(sandbox.passes(f"{head}\n{answer}\n", head, test, name))


TASKS = (
  Task(
    "cruxeval_o",
    "coding",
    "what a Python function returns, reasoned step by step (local file)",
    cruxeval_o,
    literal,
    chat=False,
    filled=False,
    stop=("[/ANSWER]",),
    needs=(CRUXEVAL, PROMPTS),
  ),
  Task(
    "humaneval",
    "coding",
    "Python functions, whose tests are run: --run-code (local file)",
    humaneval,
    passed,
    filled=False,
    stop=("\n```", "\nif __name__", "\ndef main(", "\nprint(", "\n#"),
    needs=(HUMANEVAL,),
  ),
)
