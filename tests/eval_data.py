"""Tiny data sets in the published formats, written where the tasks look for local files.

The texts are made up here, or public-domain speeches: nothing of the data sets themselves.
"""

import json
import pathlib
import random

from scripts.evals import haystack


def paragraphs(number: int, size: int = 60) -> list[str]:
  return [" ".join(words) for words in haystack.passages(random.Random(0), number, size)]


def write(folder: pathlib.Path) -> pathlib.Path:
  """Writes every data set into `folder`."""
  texts = iter(paragraphs(600))

  def put(name: str, entries) -> None:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [entries] if file.suffix == ".json" else entries
    file.write_text("\n".join(map(json.dumps, lines)) + "\n", "utf-8")

  squad = []
  for article in range(20):
    listed = []
    for i in range(5):
      name = f"Person {article}-{i}"
      context = f"{next(texts)} {name} was born in 18{article:02}{i}."
      answers = [{"text": f"18{article:02}{i}", "answer_start": 0}] * 2
      listed.append(
        {
          "context": context,
          "qas": [
            {"question": f"When was {name} born?", "is_impossible": False, "answers": answers},
            {"question": "Why not?", "is_impossible": True, "answers": []},
          ],
        }
      )
    squad.append({"title": f"Article {article}", "paragraphs": listed})
  put("squad/dev-v2.0.json", {"data": squad})

  hotpot = []
  for i in range(20):
    own = [[f"Title {i}-{j}", [next(texts)[:200], " More."]] for j in range(10)]
    own[3][1].append(f" Answer {i} is {i}{i}.")
    entry = {"question": f"What is answer {i}?", "answer": f"{i}{i}", "context": own}
    hotpot.append(entry)
  put("hotpotqa/hotpot_dev_distractor_v1.json", hotpot)

  problems = [
    {"question": f"What is {i} + {i}?", "answer": f"{i} + {i} = {2 * i}\n#### {2 * i:,}"}
    for i in range(1990, 2010)
  ]
  put("gsm8k/train.jsonl", problems[:10])
  put("gsm8k/test.jsonl", problems[10:])
  formulas = [(f"Halve {2 * i + 1}.", rf"\frac{{{2 * i + 1}}}{{2}}") for i in range(10)]
  put(
    "math500/test.jsonl",
    [{"problem": q, "answer": a, "subject": "Algebra", "level": 1} for q, a in formulas],
  )
  put("aime/test.jsonl", [{"Problem": f"Add {i} and 1.", "Answer": i + 1} for i in range(10)])
  return folder
