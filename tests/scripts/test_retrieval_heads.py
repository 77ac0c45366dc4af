"""Retrieval heads: the copy score by hand, and over a tiny model by a loop."""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import DuoAttention, Full, Ltri
from kvjax.methods.labels import read_heads
from kvjax.models.decode.generate import prefill
from kvjax.programs import retrieval_heads
from kvjax.programs.evals import fitted, haystack, streams
from kvjax.programs.evals.registry import TASKS
from kvjax.programs.evals.streams import FITTING
from kvjax.programs.evals.task import Row, rng
from kvjax.programs.retrieval_heads import Looking, Sample, copied, gates, needles, recalled, scores
from kvjax.testing.tiny import TOKENS, model
from scripts.examples.tiny import byte_tokenizer

ROW = Row("", "", "", ("AB",), "needle", 4)


def test_worked_example():
  """The needle 7 8 9 stands at 2; another 8 at 6 is no part of it."""
  sample = Sample([1, 2, 7, 8, 9, 3, 8, 4], 2, [7, 8, 9], ROW)
  most = np.array([[2, 2, 5], [3, 6, 3], [4, 3, 4]])  # steps × heads
  np.testing.assert_allclose(copied(most, sample), [1, 1 / 3, 2 / 3])


def test_block_recall_by_hand():
  """Two layers of two heads, four blocks of which 1 and 2 are wanted, two are retrieved."""
  none = -np.inf
  similarity = np.array([[[0.0, 3, 2, 1], [5, 3, 2, 1]], [[9, 1, 1, 9], [1, none, none, none]]])
  found = np.array([[1, 0.5], [0, 0]])
  np.testing.assert_allclose(recalled(similarity, [1, 2], 2), 2 * found - 1)  # by chance a half
  np.testing.assert_array_equal(recalled(similarity, [1, 2], 4), np.zeros((2, 2)))


@pytest.mark.slow
def test_scores_of_a_model():
  """Where each head looks most, step by step: as the logits of the cache say."""
  ids = [*TOKENS[0, :12].tolist(), *TOKENS[0, 3:6].tolist()]
  samples = [
    Sample(ids, 3, TOKENS[0, 6:8].tolist(), ROW),
    Sample(TOKENS[1, :20].tolist(), 5, TOKENS[1, 5:9].tolist(), ROW),
  ]
  found, wanted = scores(model(), samples), []
  assert found.shape == (4, 6) and (found >= 0).all() and (found <= 1).all()
  for sample in samples:
    caches = Full().init_caches(model().spec(1, 64))
    given = np.array([sample.ids[:-1]]), [len(sample.ids) - 1]
    _, caches = prefill(model(), *given, caches, Full())
    most = []
    for token in (sample.ids[-1], *sample.answer[:-1]):
      _, caches, reports = model().decode(jnp.array([token]), caches, Looking(), with_aux=True)
      most.append([np.asarray(report["most"])[0].reshape(-1) for report in reports])
    wanted.append(copied(np.array(most), sample))
    np.testing.assert_allclose(scores(model(), [sample]), wanted[-1])
  np.testing.assert_allclose(found, np.mean(wanted, 0))


def test_the_best_of_every_layer(tmp_path):
  found = np.array([[0.05, 0.1, 0.02], [0.3, 0.2, 0.9], [0.0, 0.11, 0.11]])
  assert retrieval_heads.best(found, 0.1) == [(1, 2, 0.9), (2, 1, 0.11)]
  path = tmp_path / "heads.json"
  path.write_text('{"heads": [[1, 2, 0.9], [2, 1, 0.11]]}')
  heads = read_heads(path)
  assert Ltri(heads=heads)._head(1) == (2, 0.9)


@pytest.mark.slow
def test_a_pattern_is_written_and_loaded(tmp_path, monkeypatch):
  """Six query heads of two key/value heads: the best of three each; half of four gates stream."""
  found = np.array([[0.1, 0.2, 0.0, 0.9, 0.3, 0.0], [0.0, 0.05, 0.5, 0.1, 0.1, 0.15]])
  assert gates(found, 2).tolist() == [[0.2, 0.9], [0.5, 0.15]]
  asked = np.array([[0.3, 0.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.05, 0.05, 0.1, 0.1, 0.1]])
  monkeypatch.setattr(retrieval_heads, "scores", lambda *_: found)
  monkeypatch.setattr(retrieval_heads, "recall", lambda *_: asked)
  monkeypatch.setattr(retrieval_heads.common, "load_model", lambda _: (model(), byte_tokenizer()))
  heads, pattern = tmp_path / "heads.json", tmp_path / "heads.tsv"
  args = retrieval_heads.Args(heads, samples=3, length=1500, pattern=pattern)
  retrieval_heads.main(args)
  method = DuoAttention.from_tsv(pattern)
  assert method == DuoAttention(((False, True), (True, False)))
  np.testing.assert_array_equal(np.loadtxt(pattern, delimiter="\t"), gates(found, 2))
  assert read_heads(heads) == ((0, 0, 0.3),)
  held = fitted.of(heads)
  assert held == fitted.of(pattern)
  assert (held["task"], held["seed"], held["samples"]) == ("fitting needle", 0, 3)
  assert held["text"] == FITTING.about and held["model"] == "SmolLM2-135M-Instruct"
  assert held["kvjax"] == kvjax.__version__ and len(held["hidden"]) == 6 == len({*held["hidden"]})
  for sample in needles(byte_tokenizer(), args):
    row = sample.row
    assert row.answers[0] in held["hidden"] and row.about["source"] in held["sources"]
    assert {word for word in held["hidden"] if word in row.question}
    assert not fitted.fingerprints(row.context).isdisjoint(held["fingerprints"].split())


@pytest.mark.slow
def test_heads_are_found_on_nothing_that_a_test_has():
  """Texts, words of keys, numbers and seeds of both streams, whichever rows are drawn."""
  args = retrieval_heads.Args("heads.json", samples=5, length=1500)
  found = [sample.row for sample in needles(byte_tokenizer(), args)]
  assert len(found) == 5 == len({row.question for row in found})

  def runs(stream):
    words = " ".join(stream.texts().values()).lower().split()
    return zip(*(words[i:] for i in range(9)), strict=False)

  assert set(runs(FITTING)).isdisjoint(runs(streams.TESTS))
  words = {word for kind in ("adjective", "noun", "verb") for word in haystack.word_list(kind)}
  words |= {word for part in haystack.vocabulary() for word in part}
  for index, row in enumerate(found):
    assert row.about["source"] in set(FITTING.texts()) - set(streams.TESTS.texts())
    assert len(row.answers[0]) == 8  # a test's has seven digits
    key = retrieval_heads._key(row)
    assert f"for {key} mentioned" in row.question and words.isdisjoint(key.split("-"))
    again, other = FITTING.rng("needle", 0, index), streams.TESTS.rng("needle", 0, index)
    assert again.random() != other.random() == rng("needle", 0, index).random()
  assert FITTING.task("needle") not in TASKS


def test_the_trees_own_heads_say_what_they_were_found_on():
  path = pathlib.Path(__file__).parents[2] / "scripts/results/cpu/retrieval_heads.json"
  held = fitted.of(path)
  assert held["task"] == FITTING.task("needle") and held["samples"] == 8 and held["fingerprints"]
  assert len(read_heads(path)) == 21
