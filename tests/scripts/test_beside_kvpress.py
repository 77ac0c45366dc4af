"""kvpress beside kvjax: what is compared, and how it is written; kvpress itself is not needed."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

import kvjax
from kvjax.models.decode.generate import generate, prefill
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.programs.evals import kept, store
from kvjax.programs.evals.prompt import Prompt, Reader
from kvjax.programs.evals.task import Row
from kvjax.programs.retrieval_heads import places
from scripts.examples import tiny
from scripts.studies import beside_kvpress as program
from scripts.studies import beside_kvzip, both, pressed
from scripts.studies.pressed import Kept
from scripts.tools.tablemakers import Results, beside, scores
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
ROW = Row(TEXT, QUESTION, "", ("4444",), "needle", STEPS)
PROMPT = Prompt(Letters().encode(TEXT), Letters().encode(QUESTION))


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
  args = program.Args(length=TOKENS, steps=STEPS)
  return program.rows_of(Reader(Letters()), ours, Theirs(logits), ROW, PROMPT, args)


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


@pytest.mark.parametrize("table", [beside.kvpress, beside.kvzip])
def test_missing_results_are_named(tmp_path, table):
  with pytest.raises(FileNotFoundError, match=f"{table.__name__}: found no results of models"):
    table(Results(tmp_path))


def test_facts_of_the_capabilities_hold():
  """Uneven layers refuse a longer question, and pads change what a press keeps."""
  for path in (Results().folder / beside.FOLDER).glob(f"*/{beside.LIMITS}"):
    limits = json.loads(path.read_text("utf-8"))
    assert limits["uneven"] and min(limits["padded"].values()) < 1


# ---- KVzip beside kvpress's


class Plain(Letters, Tokenizer):
  """The same, of the library's class."""

  def __init__(self):
    pass


class Scored:
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


def by_scores(ours, theirs):
  args = beside_kvzip.Args(length=TOKENS, steps=STEPS, parts=(2,))
  return beside_kvzip.rows_of(ours, theirs, ROW, PROMPT, args, [("head", 2), ("layer", 2)])


@pytest.mark.slow
def test_scores_of_a_prompt_on_both_sides():
  """Scores that differ by a known number; selections against sorted lists."""
  ours = beside_kvzip.Ours(tiny.load()[0], Plain(), TOKENS)
  scores, _ = ours.read(Letters().encode(TEXT))
  mine = np.stack([np.asarray(x[0]) for x in scores])[..., : len(TEXT)]
  rows = by_scores(ours, Scored(mine + 0.25))
  half = len(TEXT) // 2
  head = rows["head", 2]
  apart = (mine + 0.25 - mine)[..., Scored.opening :].max()  # 0.25, as float32 rounds it
  assert head["scores_apart"] == apart and head["kept"] == head["kept_by_kvpress"] == half
  best = np.argsort(-mine, -1, kind="stable")[..., :half]
  assert head["equal"] == pytest.approx((best < half).mean())
  assert head["needle_kept_by_kvpress"] == 0 and head["kept_by_layer"] == [0.4975] * 2
  assert head["score_of_kvpress"] == 1
  assert rows["layer", 2]["kept"] == half and rows["layer", 2]["equal"] < 1


def test_kvpress_alone():
  rows = by_scores(None, Scored(np.zeros((2, 2, len(TEXT)))))
  assert list(rows) == [("head", 2), ("layer", 2)]
  assert "equal" not in rows["head", 2] and rows["head", 2]["answer_of_kvpress"] == "4444"


def test_prompts_are_asked_for_what_is_not_there(tmp_path):
  names = {part: {"mode": "agnostic", "method": "head", "budget": part} for part in (2, 4)}
  asked = []

  def answer(row, cells):
    asked.append(cells)
    return {cell: {"kept": 1.0 * cell} for cell in cells}

  kept, args = store.Store(tmp_path, {"seed": 0}), beside_kvzip.Args(samples=2, length=512)
  for some in ({2: names[2]}, names, names):
    both.ask(args, Reader(tiny.byte_tokenizer()), kept, some, answer)
  kept.close()
  assert asked == [[2], [2], [4], [4]]
  rows = store.read(tmp_path)
  assert [(row["index"], row["budget"], row["kept"]) for row in rows] == [
    *((0, 2, 2.0), (1, 2, 2.0), (0, 4, 4.0), (1, 4, 4.0))
  ]


def test_tables_of_kvzip_have_each_cell_once_and_figures_from_rows():
  means = beside.found(Results(), beside.KVZIP)
  assert len(beside.kvzip(Results())) == len(means)
  (one,) = means[(means.method == "all") & (means.budget == 8)].head(1).itertuples()
  mine = store.read(Results().folder / beside.KVZIP / one.model)
  wanted = [row["score_of_kvpress"] for row in mine if (row["method"], row["budget"]) == ("all", 8)]
  assert one.score_of_kvpress.mean == np.mean(wanted)
  made = beside.kvzip(Results()).loc[one.model, "1/8", "among all layers"]
  assert made.found == scores.percent(one.score_of_kvpress)
