"""One sample of every generated task, read and checked by hand once, is made again byte by byte.

python -m tests.scripts.test_task_samples       writes the samples anew
python -m tests.scripts.test_task_samples -f    prints them in full; read them before they are kept

Speeches are not kept: what comes of them is left out of the files, which hold a hash of all.
"""

import hashlib
import pathlib
import re
import sys

import pytest

from kvjax.programs.evals.registry import TASKS
from tests.eval_data import count

FOLDER = pathlib.Path(__file__).parents[1] / "goldens" / "tasks"
# About the shortest text that each task can be asked over, in tokens of the stand-in tokenizer.
LENGTHS = {
  name: length
  for length, names in {
    250: "needle",
    350: "niah_single_2 niah_single_3",
    400: "kl facts_1 math_find",
    450: "niah_multikey_1 niah_multivalue facts_2",
    500: "niah_multikey_2 niah_multiquery fwe passkey",
    600: "number_string",
    700: "niah_single_1 cwe gsm_symbolic",
    900: "kv_retrieval passage_retrieval passage_count",
    1000: "vt",
    1200: "niah_multikey_3",
  }.items()
  for name in names.split()
}


# Sentences that are the tasks' own, where the rest is taken from speeches.
OWN = re.compile(
  r"special magic|needle|quiz|memorize|=== |^Paragraph \d+:?$|answer|^[\da-f-]{7,36}\.$"
)
QUOTES = {
  *("kl", "needle", "niah_single_2", "niah_single_3", "niah_multikey_1"),
  *("niah_multivalue", "niah_multiquery", "passage_retrieval", "passage_count"),
}


def kept(name: str) -> str:
  """A sample as its file holds it: speeches replaced by dots, and a hash of the whole."""
  text = sample(name)
  if name not in QUOTES:
    return text
  head, _, rest = text.partition("=== answers\n")
  lines = []
  for line in head.split("\n"):
    parts = re.split(r"(?<=[.?!:]) ", line)
    own = [part if OWN.search(part) or not part else "…" for part in parts]
    lines.append(re.sub(r"…( …)+", "…", " ".join(own)))
  if name == "kl":  # what goes on is a speech too, and so is the answer
    rest = rest.partition("=== continuation")[0]
  digest = hashlib.sha256(text.encode()).hexdigest()
  return f"=== sha256 {digest}\n" + "\n".join(lines) + "=== answers\n" + rest


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


@pytest.mark.core(2)
@pytest.mark.parametrize("name", LENGTHS)
def test_sample_is_the_one_that_was_checked(name):
  if name == "gsm_symbolic":
    pytest.importorskip("reasoning_gym")
  assert kept(name) == path(name).read_text("utf-8")


def test_every_generated_task_has_a_sample():
  assert set(LENGTHS) == {task.name for task in TASKS.values() if not task.needs}
  assert {file.stem for file in FOLDER.glob("*.txt")} == set(LENGTHS)


if __name__ == "__main__":
  FOLDER.mkdir(parents=True, exist_ok=True)
  for name in LENGTHS:
    if "-f" in sys.argv:
      print(sample(name))
    else:
      path(name).write_text(kept(name), "utf-8")
