"""Tiny data sets in the published formats, written where the tasks look for local files.

The texts are made up here, or public-domain speeches: nothing of the data sets themselves.
"""

import gzip
import json
import pathlib
import random
import re

import numpy as np

from kvjax.programs.evals import (
  coding,
  haystack,
  infinitebench_files,
  longbench,
  lost_in_the_middle,
)


def paragraphs(number: int, size: int = 60) -> list[str]:
  return [" ".join(words) for words in haystack.passages(random.Random(0), number, size)]


def write(folder: pathlib.Path) -> pathlib.Path:
  """Writes every data set into `folder`."""
  texts = iter(paragraphs(600))

  def put(name: str, entries) -> None:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [entries] if file.suffix == ".json" else entries
    written = entries if isinstance(entries, str) else "\n".join(map(json.dumps, lines)) + "\n"
    text = written.encode()
    file.write_bytes(gzip.compress(text) if file.suffix == ".gz" else text)

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
  draw = random.Random(1)
  for keys in lost_in_the_middle.KEYS:
    entries = []
    for _ in range(10):
      pairs = [[haystack.draw_uuid(draw), haystack.draw_uuid(draw)] for _ in range(21)]
      key, value = draw.choice(pairs)
      entries.append({"ordered_kv_records": pairs, "key": key, "value": value})
    put(f"lost_in_the_middle/kv-retrieval-{keys}_keys.jsonl.gz", entries)
  _coding(put)
  _longbench(put)
  _infinitebench(put)
  stories = [
    {
      "id": f"story {i}",
      "story": f"{next(texts)} Number {i} was found.",
      "questions": [{"input_text": f"Question {j}?", "turn_id": j + 1} for j in range(3)],
      "answers": [{"input_text": f"answer {j} of {i}", "turn_id": j + 1} for j in range(3)],
      "additional_answers": {
        "0": [{"input_text": f"Answer {j} of {i}"} for j in range(3)],
        "1": [{"input_text": f"it is {j} of {i}"} for j in range(3)],
      },
    }
    for i in range(10)
  ]
  titled = (
    f" \n = Title {i} = \n \n {next(texts)} \n = = Part = = \n Second , part . \n"
    for i in range(11)
  )
  put("wikitext/wiki.test.raw", "".join(titled))
  put("coqa/coqa-dev-v1.0.json", {"version": "1.0", "data": stories})
  return folder


def _coding(put) -> None:
  """Twelve functions that add a number, and the prompt that asks what one returns."""
  put(coding.PROMPTS, PROMPTS)
  put(
    coding.CRUXEVAL,
    [
      {
        "code": f"def f(x):\n    return [x, x + {i}]",
        "input": f"{2 * i}",
        "output": f"[{2 * i}, {3 * i}]",
        "id": f"sample_{i}",
      }
      for i in range(12)
    ],
  )
  put(
    coding.HUMANEVAL,
    [
      {
        "task_id": f"HumanEval/{i}",
        "prompt": f'from math import inf\n\n\ndef add(x):\n    """ Add {i} to x. """\n',
        "entry_point": "add",
        "canonical_solution": f"    return x + {i}\n",
        "test": f"def check(candidate):\n    assert candidate(7) == {7 + i} < inf\n",
      }
      for i in range(12)
    ],
  )


PROMPTS = '''
def another(s):
  return f"{s}"

def make_cot_output_prompt(s):
  code, input = s
  return f"""Say what it returns.

[PYTHON]
{code}
assert f({input}) == ??
[/PYTHON]
"""
'''
NAMES = tuple(longbench.SCORERS)
CLASSES = ["Number", "Number of something", "Date", "Place"]


def _longbench(put) -> None:
  """Ten rows of every data set, and of LongBench-E ten per bucket; context 7 is too long."""
  long = " ".join(paragraphs(200))

  def rows(name, lengths):
    answers = {"trec": ["Date"], "lsht": ["Place"], "passage_count": ["7"]}
    answers |= {"passage_retrieval_en": ["Paragraph 7"], "passage_retrieval_zh": ["段落7"]}
    for i, length in enumerate(lengths):
      yield {
        "input": f"What about {i}?",
        "context": f"Beginning {i}. {long if i % 10 == 7 else 'Short.'} End {i}.",
        "answers": answers.get(name, [f"answer {i}", "清华大学"]),
        "length": length,
        "dataset": name,
        "language": "zh" if name in ("lsht", "dureader") else "en",
        "all_classes": CLASSES if name in ("trec", "lsht") else None,
        "_id": f"{name}-{i}",
      }

  prompts = {name: f"Read {name}:\n\n{{context}}\n\nAnswer {{input}}\n\nAnswer:" for name in NAMES}
  put(longbench.PROMPTS, prompts)
  put(longbench.ANSWERS, {name: 16 + i for i, name in enumerate(NAMES)})
  for name in NAMES:
    put(f"longbench/{name}.jsonl", rows(name, range(10)))
  for name in longbench.E:
    put(f"longbench/{name}_e.jsonl", rows(name, [2000, 6000, 9000] * 10))
  entries = [
    {
      **{f"choice_{letter}": f"choice {letter} of {i} " for letter in "ABCD"},
      "_id": str(i),
      "question": f" What about {i}? ",
      "answer": "ABCD"[i % 4],
      "domain": "d",
      "sub_domain": "s",
      "difficulty": "easy",
      "length": "short",
      "context": f"Beginning {i}. {long} End {i}.",
    }
    for i in range(10)
  ]
  put("longbench_v2/data.json", entries)


def _infinitebench(put) -> None:
  """Ten rows of every task."""
  long = " ".join(paragraphs(200))
  options = ["the first", "the second", "the third", "the fourth"]
  special = {
    "passkey": ("What is the pass key?", ["12345"]),
    "number_string": ("What is the sequence of digits?", ["1122334455"]),
    "kv_retrieval": ('Key: "a-b"\nThe value associated with the specified key is: ', ["c-d"]),
    "longbook_choice_eng": ("Which one?", ["the third"]),
    "longbook_qa_chn": ("谁？", ["清华大学"]),
    "longdialogue_qa_eng": ("", ["ALICE"]),
    "math_find": ("Only one number. The second largest number of the list is: ", [41]),
    "math_calc": ("", [[1, 3, 6]]),
    "code_run": ("Please give me the exact number of the return value of func_7(-3).", [-12]),
    "code_debug": ("Which one?", ["the second"]),
  }
  for name in infinitebench_files._TASKS:
    asked, answer = special.get(name, ("Who?", ["Alice and Bob"]))
    text = "1 + 2 + 3" if name == "math_calc" else f"Beginning. {long} {{braces}} End."
    entries = [
      {
        "id": i,
        "context": text,
        "input": asked,
        "answer": answer,
        "options": options if name in ("longbook_choice_eng", "code_debug") else [],
      }
      for i in range(10)
    ]
    put(f"infinitebench/{name}.jsonl", entries)


def recording(v, heat=0.0, tokens=64, head_dim=40):
  """One layer, one KV head, two query heads; keys of equal weight, but for the first one's."""
  q = np.zeros((1, 2, 4, head_dim), np.float16)
  k = np.zeros((1, tokens, head_dim), np.float16)
  q[..., 0], k[:, 0, 0] = head_dim**0.5, heat
  return {
    "layer3/q": q,
    "layer3/k": k,
    "layer3/v": v.astype(np.float16).reshape(1, tokens, -1),
    "positions": np.array([15, 30, 31, 63], np.int32),
    "tokens": np.zeros(tokens, np.int32),
  }


def count(*texts: str) -> int:
  """Tokens of a stand-in tokenizer: words, and every punctuation mark beside them."""
  return len(re.findall(r"\w+|[^\w\s]", "".join(texts)))
