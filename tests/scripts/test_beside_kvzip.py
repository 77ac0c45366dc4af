"""KVzip beside kvpress's: what is compared and how it is written; kvpress is not needed."""

import numpy as np
import pytest

from kvjax.models.io.tokenizer import Tokenizer
from kvjax.programs.evals import store
from kvjax.programs.evals.prompt import Prompt, Reader
from kvjax.programs.evals.task import Row
from scripts.examples import tiny
from scripts.studies import beside_kvzip as program
from scripts.studies import both
from scripts.tools.tablemakers import Results, beside, scores
from tests.tiny_tokenizers import Letters

TEXT, QUESTION = "the grass is green. " * 9 + "magic 4444 it is.", "which magic? "
LENGTH, STEPS = 256, 3


class Plain(Letters, Tokenizer):
  """The same, of the library's class."""

  def __init__(self):
    pass


class Theirs:
  """Has the scores that it is given, keeps the first tokens and says the needle."""

  opening, tokenizer = 4, Letters()

  def __init__(self, scores):
    self.scores = scores

  def read(self, ids, counts):
    first = np.arange(len(ids)) < counts[2]
    stays = np.broadcast_to(first, self.scores.shape)
    return self.scores, None, {("head", 2): stays, ("layer", 2): stays}

  def answer(self, cache, stays, prompt, steps):
    return "4444"


def rows_of(ours, theirs):
  row = Row(TEXT, QUESTION, "", ("4444",), "needle", STEPS)
  prompt = Prompt(Letters().encode(TEXT), Letters().encode(QUESTION))
  args = program.Args(length=LENGTH, steps=STEPS, parts=(2,))
  return program.rows_of(ours, theirs, row, prompt, args, [("head", 2), ("layer", 2)])


@pytest.mark.slow
def test_a_prompt_on_both_sides():
  """Scores that differ by a known number; selections against sorted lists."""
  ours = program.Ours(tiny.load()[0], Plain(), LENGTH)
  scores, _ = ours.read(Letters().encode(TEXT))
  mine = np.stack([np.asarray(x[0]) for x in scores])[..., : len(TEXT)]
  rows = rows_of(ours, Theirs(mine + 0.25))
  half = len(TEXT) // 2
  head = rows["head", 2]
  apart = (mine + 0.25 - mine)[..., Theirs.opening :].max()  # 0.25, as float32 rounds it
  assert head["scores_apart"] == apart and head["kept"] == head["kept_by_kvpress"] == half
  best = np.argsort(-mine, -1, kind="stable")[..., :half]
  assert head["equal"] == pytest.approx((best < half).mean())
  assert head["needle_kept_by_kvpress"] == 0 and head["kept_by_layer"] == [0.4975] * 2
  assert head["score_of_kvpress"] == 1
  assert rows["layer", 2]["kept"] == half and rows["layer", 2]["equal"] < 1


def test_kvpress_alone():
  rows = rows_of(None, Theirs(np.zeros((2, 2, len(TEXT)))))
  assert list(rows) == [("head", 2), ("layer", 2)]
  assert "equal" not in rows["head", 2] and rows["head", 2]["answer_of_kvpress"] == "4444"


def test_prompts_are_asked_for_what_is_not_there(tmp_path):
  names = {part: {"mode": "agnostic", "method": "head", "budget": part} for part in (2, 4)}
  asked = []

  def answer(row, cells):
    asked.append(cells)
    return {cell: {"kept": 1.0 * cell} for cell in cells}

  kept, args = store.Store(tmp_path, {"seed": 0}), program.Args(samples=2, length=512)
  for some in ({2: names[2]}, names, names):
    both.ask(args, Reader(tiny.byte_tokenizer()), kept, some, answer)
  kept.close()
  assert asked == [[2], [2], [4], [4]]
  rows = store.read(tmp_path)
  assert [(row["index"], row["budget"], row["kept"]) for row in rows] == [
    *((0, 2, 2.0), (1, 2, 2.0), (0, 4, 4.0), (1, 4, 4.0))
  ]


def test_tables_have_each_cell_once_and_figures_from_rows():
  means = beside.found(Results(), beside.KVZIP)
  assert len(beside.kvzip(Results())) == len(means)
  (one,) = means[(means.method == "all") & (means.budget == 8)].head(1).itertuples()
  mine = store.read(Results().folder / beside.KVZIP / one.model)
  wanted = [row["score_of_kvpress"] for row in mine if (row["method"], row["budget"]) == ("all", 8)]
  assert one.score_of_kvpress.mean == np.mean(wanted)
  made = beside.kvzip(Results()).loc[one.model, "1/8", "among all layers"]
  assert made.found == scores.percent(one.score_of_kvpress)


def test_missing_results_are_named(tmp_path):
  with pytest.raises(FileNotFoundError, match="kvzip: found no results of models"):
    beside.kvzip(Results(tmp_path))
