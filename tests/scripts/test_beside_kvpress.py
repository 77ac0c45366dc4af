"""kvpress beside kvjax: what is compared, and how it is written; kvpress itself is not needed."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

import kvjax
from kvjax.models.decode.generate import generate, prefill
from kvjax.programs.evals import kept
from kvjax.programs.evals.prompt import Prompt, Reader
from kvjax.programs.evals.task import Row
from kvjax.programs.retrieval_heads import places
from scripts.examples import tiny
from scripts.studies import beside_kvpress as program
from scripts.studies import pressed
from scripts.studies.pressed import Kept
from scripts.tools.tablemakers import Results, beside
from tests.tiny_tokenizers import Letters

# ---- selections


def heads(*lists):
  """One layer's heads."""
  return [[np.array(each) for each in lists]]


def test_overlap_is_of_the_larger_side_and_of_the_smaller_one():
  found = kept.overlap(heads([0, 1, 2, 3], [4, 5]), heads([2, 3], [5, 4]))
  counts = {"kept": 3.0, "kept_by_kvpress": 2.0}
  assert found == {"equal": (0.5 + 1) / 2, "of_fewer": 1.0, "identical": 0.5, **counts}


def test_empty_slots_are_no_tokens():
  assert kept.overlap(heads([7, -1, -1, 3]), heads([3, 7]))["identical"] == 1


@pytest.mark.parametrize("theirs", [heads([0], [1]), [*heads([0]), *heads([0])]])
def test_other_numbers_of_heads_or_layers_are_refused(theirs):
  with pytest.raises(ValueError, match="argument 2 is longer"):
    kept.overlap(heads([0]), theirs)


def test_a_head_that_keeps_nothing_is_refused():
  with pytest.raises(ValueError, match="positions: found 2 and 0"):
    kept.overlap(heads([0, 1]), heads([-1]))


def test_needles_are_held_token_by_token():
  assert kept.holds([*heads([1, 2], [2, 9]), *heads([5, 6], [1, 2])], [1, 2]) == 2.5 / 4


def test_places_are_the_first_ones():
  ids = Letters().encode("a 12 12")
  assert [*places(Letters(), ids, "12")] == [1, 2, 3]  # with the space before it
  assert [*places(Letters(), Letters().encode("a12"), "12")] == [1, 2]
  with pytest.raises(ValueError, match="13: found no such tokens"):
    places(Letters(), ids, "13")


def test_a_summary_has_means_and_intervals():
  rows = [
    {"method": "a", "index": i, "equal": x, "score": s, "answer": "x", "answer_of_kvpress": t}
    for i, (x, s, t) in enumerate([(0.5, 1.0, "x"), (1.0, 0.0, "y")])
  ]
  (found,) = kept.summary([*rows], ["method"])
  assert (found["method"], found["n"], found["equal"]) == ("a", 2, 0.75)
  assert found["score"].mean == 0.5 and found["score"].interval == "Wilson"
  assert found["same_answers"] == 1 and "index" not in found


def test_a_number_that_some_rows_lack_is_left_out():
  (found,) = kept.summary([{"m": 1, "equal": 1.0}, {"m": 1}], ["m"])
  assert found == {"m": 1, "n": 2}


# ---- what is compared


def test_every_cell_has_a_press_and_shared_methods_their_budget():
  assert len(set(program.CELLS)) == len(program.CELLS)
  ours = [cell for cell in program.CELLS if cell.ours]
  names = {cell.pair.partition(",")[0] for cell in ours}
  assert len(names) == 11  # the full cache and ten methods
  for cell in ours:
    method = program._method(cell, 2048)
    method = getattr(method, "base", method)
    if not isinstance(method, kvjax.Full):
      assert method.budget == cell.budget(2048) == cell.cut(2048, 2000).budget


def test_caches_of_equal_lengths_run_together_and_hidden_ones_alone():
  def cache(*tokens, hidden=None):
    keys = [SimpleNamespace(shape=(1, 2, n, 8)) for n in tokens]
    return Kept(keys, [], [], [hidden] * len(tokens))

  caches = {"a": cache(4, 4), "b": cache(5, 3), "c": cache(4, 4), "d": cache(4, 4, hidden=1)}
  assert pressed.alike(caches) == [["a", "c"], ["b"], ["d"]]


def test_it_says_what_to_install(monkeypatch):
  monkeypatch.setattr(pressed, "LIBRARIES", ("no_such_library",))
  with pytest.raises(ModuleNotFoundError, match="no_such_library: not found, expected no_such"):
    pressed.versions()


# ---- a prompt on both sides

TOKENS, STEPS = 256, 4
CELLS = tuple(
  program.Cell(name, share, "aware")
  for name, share in (("full", 1.0), ("knorm", 0.125), ("pyramidkv", 0.125), ("oracle", 0.125))
)


class Theirs:
  """Keeps the first tokens, and has the logits that it is given."""

  def __init__(self, logits):
    self.logits = logits

  def read(self, ids, answer, cuts):
    left = {}
    for cell, cut in cuts.items():
      left[cell] = Kept(positions=[[np.arange(cut.budget)] * 2] * 2)
    return self.logits, left

  def answers(self, several, logits, tail, past, steps, ends):
    return [[ord("4")] * steps for _ in several]


@pytest.fixture
def ours(monkeypatch):
  monkeypatch.setattr(program, "CELLS", CELLS)
  return program.Ours(tiny.load()[0], Letters(), TOKENS)


TEXT, QUESTION = "the grass is green. " * 9 + "magic 4444 it is.", "which magic? "


def test_methods_whose_layers_differ_are_read_apart(ours):
  full, knorm, pyramid, _ = CELLS
  assert ours.passes == [[full, knorm], [pyramid]]


@pytest.mark.slow
def test_answers_layer_by_layer_are_those_of_generate(ours):
  ids = Letters().encode(TEXT)
  logits, caches = ours.read(ids)
  for cell in CELLS[:3]:
    method = ours.methods[cell]
    own = method.init_caches(ours.model.spec(1, TOKENS))
    padded = np.pad(np.array([ids], np.int32), ((0, 0), (0, TOKENS - len(ids))))
    first, own = prefill(ours.model, padded, [len(ids)], own, method)
    wanted, _ = generate(ours.model, first, own, method, steps=STEPS)
    answer, cached = ours.answer(cell, logits, caches[cell], STEPS)
    assert Letters().encode(answer) == [*wanted.tokens[0]]
    assert 0 <= cached <= 1 and (cached == 1 or cell.pair != "full")


def rows_of(ours, logits):
  row = Row(TEXT, QUESTION, "", ("4444",), "needle", STEPS)
  prompt = Prompt(Letters().encode(TEXT), Letters().encode(QUESTION))
  args = program.Args(length=TOKENS, steps=STEPS)
  return program.rows_of(Reader(Letters()), ours, Theirs(logits), row, prompt, args)


@pytest.mark.slow
def test_a_prompt_under_every_cell(ours):
  ids = Letters().encode(TEXT + QUESTION)
  logits, caches = ours.read(ids)
  rows = rows_of(ours, logits[0])
  assert list(rows) == list(CELLS)
  full, knorm, _, oracle = (rows[cell] for cell in CELLS)
  assert (full["kept"], full["kept_by_kvpress"]) == (len(ids), len(ids))
  assert full["equal"] == full["needle_kept"] == full["needle_kept_by_kvpress"] == 1
  kept = [np.asarray(x.pos[0, k]) for x in caches[CELLS[1]] for k in (0, 1)]
  shares = [np.intersect1d(each, np.arange(32)).size / 32 for each in kept]
  assert knorm["equal"] == pytest.approx(np.mean(shares))
  assert knorm["score_of_kvpress"] == 1 and knorm["answer_of_kvpress"] == "4444"
  assert "equal" not in oracle and oracle["score_of_kvpress"] == 1


@pytest.mark.slow
def test_other_weights_are_found_by_their_logits(ours):
  logits, _ = ours.read(Letters().encode(TEXT + QUESTION))
  with pytest.raises(ValueError, match=r"logits: found them 1 apart, expected at most 0\.01"):
    rows_of(ours, logits[0] + 1)


# ---- tables


def test_tables_have_each_cell_once():
  made, means = beside.kvpress(Results()), beside.found(Results(), beside.FOLDER)
  assert len(made) == len(means) and made.index.is_unique
  settings = (Results().folder / beside.FOLDER).glob("*/settings.json")
  both = sum(not json.loads(path.read_text("utf-8"))["alone"] for path in settings)
  same = made["same answer"].str.endswith(" of 10").sum()
  assert same == both * sum(x.ours for x in program.CELLS)


def test_missing_results_are_named(tmp_path):
  with pytest.raises(FileNotFoundError, match="kvpress: found no results of models"):
    beside.kvpress(Results(tmp_path))


def test_facts_of_the_capabilities_hold():
  """Uneven layers refuse a longer question, and pads change what a press keeps."""
  for path in (Results().folder / beside.FOLDER).glob(f"*/{beside.LIMITS}"):
    limits = json.loads(path.read_text("utf-8"))
    assert limits["uneven"] and min(limits["padded"].values()) < 1
