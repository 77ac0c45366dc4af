"""LongBench (v1, E and v2) from local files, with its prompts, its truncation and its scores.

Bai et al., 2024 (arXiv 2308.14508) and 2025 (arXiv 2412.15204). Prompts and answer lengths are read
from the files that its repository publishes. Texts that are too long lose their middle. Few-shot
and code tasks are read without a chat template. LongBench-E's rows form three
tasks per data set, by the length that its authors counted. lm-evaluation-harness fills context and
question into one prompt and cuts what is too long at its beginning.
"""

import functools
from collections.abc import Callable

from kvjax.programs.evals import local, overlap, scores
from kvjax.programs.evals.task import Count, Row, Task, cut_middle

_SOURCE = "hf: THUDM/LongBench (data.zip)"

# By data set: the prompt, and the tokens of an answer.
PROMPTS, ANSWERS = "longbench/dataset2prompt.json", "longbench/dataset2maxlen.json"
_CONFIG = "github.com/THUDM/LongBench (LongBench/config)"
PLAIN = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
E = (
  "qasper multifieldqa_en hotpotqa 2wikimqa gov_report multi_news trec triviaqa samsum "
  "passage_count passage_retrieval_en lcc repobench-p"
).split()
BUCKETS = {"0-4k": (0, 4000), "4-8k": (4000, 8000), "8k+": (8000, float("inf"))}
_SCORERS: dict[Callable[[str, Row], float], tuple[str, ...]] = {
  overlap.best(overlap.word_f1): (
    *("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique"),
  ),
  overlap.best(overlap.chinese_f1): ("multifieldqa_zh",),
  overlap.best(overlap.chinese_rouge_l): ("dureader", "vcsum"),
  overlap.best(overlap.rouge_l): ("gov_report", "qmsum", "multi_news"),
  overlap.first_line(overlap.named_class): ("trec", "lsht"),
  overlap.first_line(overlap.best(overlap.word_f1)): ("triviaqa",),
  overlap.first_line(overlap.best(overlap.rouge_l)): ("samsum",),
  scores.share_of_numbers: ("passage_count", "passage_retrieval_en", "passage_retrieval_zh"),
  overlap.best(overlap.code_similarity): ("lcc", "repobench-p"),
}
SCORERS = {name: scorer for scorer, names in _SCORERS.items() for name in names}


def _build(
  count: Count, *, name: str, task: str, bucket: str, length: int, seed: int, index: int
) -> Row:
  """A row of a data set; of LongBench-E, those whose published length is in the bucket."""
  file = f"longbench/{name}_e.jsonl" if bucket else f"longbench/{name}.jsonl"
  entries = local.read(local.path(file, f"LongBench, {name}", _SOURCE))
  if bucket:
    low, high = BUCKETS[bucket]
    entries = [entry for entry in entries if low <= entry["length"] < high]
  entry = local.pick(entries, task, seed, index)
  prompt, tokens = (
    local.read(local.path(config, "LongBench, its configuration", _CONFIG))[name]
    for config in (PROMPTS, ANSWERS)
  )
  before, behind = prompt.split("{context}")
  # What follows the text is the question, up to where the answer begins.
  question, prefix = behind.replace("{input}", entry["input"]), ""
  ask = question, prefix
  context = cut_middle(count, before, entry["context"], ask, length=length, reserved=tokens)
  return Row(
    context=context,
    question=question,
    answer_prefix=prefix,
    answers=tuple(entry["answers"]),
    task=task,
    max_new_tokens=tokens,
    about={"id": entry["_id"], "length": entry["length"]},
    scoring={"classes": entry["all_classes"] or ()},
  )


def _task(name: str, bucket: str = "") -> Task:
  task = f"longbench_e_{name}_{bucket}" if bucket else f"longbench_{name}"
  return Task(
    task,
    "longbench_e" if bucket else "longbench",
    f"{name}, {bucket}" if bucket else name,
    functools.partial(_build, name=name, task=task, bucket=bucket),
    SCORERS[name],
    chat=name not in PLAIN,
    filled=False,
    needs=(f"longbench/{name}_e.jsonl" if bucket else f"longbench/{name}.jsonl", PROMPTS, ANSWERS),
  )


# ---- v2

V2 = "longbench_v2/data.json"
_V2_TOKENS = 128


def _build_v2(count: Count, *, length: int, seed: int, index: int) -> Row:
  """A multiple-choice question over a text of up to millions of words."""
  entries = local.read(local.path(V2, "LongBench v2", "hf: THUDM/LongBench-v2"))
  entry = local.pick(entries, "longbench_v2", seed, index)
  choices = "\n".join(f"({letter}) {entry[f'choice_{letter}'].strip()}" for letter in "ABCD")
  question = (
    f"\n</text>\n\nWhat is the correct answer to this question: {entry['question'].strip()}\n"
    f"Choices:\n{choices}\n\nFormat your response as follows: "
    '"The correct answer is (insert answer here)".'
  )
  before = "Please read the following text and answer the question below.\n\n<text>\n"
  text = entry["context"].strip()
  return Row(
    context=cut_middle(count, before, text, (question, ""), length=length, reserved=_V2_TOKENS),
    question=question,
    answer_prefix="",
    answers=(entry["answer"],),
    task="longbench_v2",
    max_new_tokens=_V2_TOKENS,
    about={key: entry[key] for key in ("_id", "domain", "difficulty", "length")},
  )


TASKS = (
  *(_task(name) for name in SCORERS),
  *(_task(name, bucket) for name in E for bucket in BUCKETS),
  Task(
    "longbench_v2",
    "longbench_v2",
    "multiple choice over long texts",
    _build_v2,
    scores.stated_choice,
    filled=False,
    needs=(V2,),
  ),
)
