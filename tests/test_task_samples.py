"""One sample of every generated task, read and checked by hand once, is made again byte by byte.

python -m tests.test_task_samples       writes the samples anew; read them before they are kept
"""

import pathlib

import pytest

from scripts.evals.registry import TASKS
from tests.test_evals import count

FOLDER = pathlib.Path(__file__).parent / "goldens" / "tasks"
# About the shortest text that each task can be asked over, in tokens of the stand-in tokenizer.
LENGTHS = {
  "kl": 400,
  "needle": 250,
  "niah_single_1": 700,
  "niah_single_2": 350,
  "niah_single_3": 350,
  "niah_multikey_1": 450,
  "niah_multikey_2": 500,
  "niah_multikey_3": 1200,
  "niah_multivalue": 450,
  "niah_multiquery": 500,
  "vt": 700,
  "cwe": 700,
  "fwe": 500,
  "facts_1": 400,
  "facts_2": 450,
  "passkey": 500,
  "number_string": 600,
  "kv_retrieval": 900,
  "math_find": 400,
  "passage_retrieval": 900,
  "passage_count": 900,
  "gsm_symbolic": 700,
}


def sample(name: str) -> str:
  """Row 0 of seed 0 as a text to read."""
  row = TASKS[name].build(count, length=LENGTHS[name], seed=0, index=0)
  parts = {
    f"{name}, at most {LENGTHS[name]} tokens, {row.max_new_tokens} of them for the answer": "",
    "context": row.context,
    "question": row.question,
    "answer prefix": row.answer_prefix,
    "answers": "\n".join(row.answers),
    "about": "\n".join(f"{key}: {value}" for key, value in row.about.items()),
  }
  if TASKS[name].forced:
    parts["continuation"] = row.continuation
  return "\n".join(f"=== {title}\n{text}" for title, text in parts.items()) + "\n"


def path(name: str) -> pathlib.Path:
  return FOLDER / f"{name}.txt"


@pytest.mark.parametrize("name", LENGTHS)
def test_sample_is_the_one_that_was_checked(name):
  if name == "gsm_symbolic":
    pytest.importorskip("reasoning_gym")
  assert sample(name) == path(name).read_text("utf-8")


def test_every_generated_task_has_a_sample():
  assert set(LENGTHS) == {task.name for task in TASKS.values() if not task.needs}
  assert {file.stem for file in FOLDER.glob("*.txt")} == set(LENGTHS)


if __name__ == "__main__":
  FOLDER.mkdir(parents=True, exist_ok=True)
  for name in LENGTHS:
    path(name).write_text(sample(name), "utf-8")
