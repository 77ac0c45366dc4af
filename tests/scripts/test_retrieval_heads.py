"""Retrieval heads: the copy score by hand, and over a tiny model by a loop."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import DuoAttention, Full, Ltri
from kvjax.testing.tiny import TOKENS, Run, model
from scripts import retrieval_heads
from scripts.retrieval_heads import Looking, Sample, best, copied, gates, load, main, scores
from tests.methods.test_ltri import SMALL


def test_worked_example():
  """The needle 7 8 9 stands at 2; another 8 at 6 is no part of it."""
  sample = Sample([1, 2, 7, 8, 9, 3, 8, 4], 2, [7, 8, 9])
  most = np.array([[2, 2, 5], [3, 6, 3], [4, 3, 4]])  # steps × heads
  np.testing.assert_allclose(copied(most, sample), [1, 1 / 3, 2 / 3])


@pytest.mark.slow
def test_scores_of_a_model():
  """Where each head looks most, step by step: as the logits of the cache say."""
  samples = [
    Sample([*TOKENS[0, :12].tolist(), *TOKENS[0, 3:6].tolist()], 3, TOKENS[0, 6:8].tolist()),
    Sample(TOKENS[1, :20].tolist(), 5, TOKENS[1, 5:9].tolist()),
  ]
  found = scores(model(), samples)
  assert found.shape == (4, 6) and (found >= 0).all() and (found <= 1).all()
  run = Run(Full(), capacity=64)
  for row, sample in enumerate(samples):
    fed = [sample.ids[-1], *sample.answer[:-1]]
    tokens = np.array([[*sample.ids[:-1], *fed]] * 2, np.int32)
    run.caches = Full().init_caches(model().spec(2, 64))
    lengths = np.array([len(sample.ids) - 1] * 2, np.int32)
    run.prefill(lengths, tokens=tokens)
    most = []
    for i in range(len(fed)):
      token = jnp.asarray(tokens[:, len(sample.ids) - 1 + i])
      _, run.caches, reports = run.model.decode(token, run.caches, Looking(), with_aux=True)
      most.append([np.asarray(report["most"])[0].reshape(-1) for report in reports])
    part = copied(np.array(most), sample)
    rest = scores(model(), [sample])
    np.testing.assert_allclose(rest, part)
    samples[row] = part
  np.testing.assert_allclose(found, np.mean(samples, 0))


def test_the_best_of_every_layer(tmp_path):
  found = np.array([[0.05, 0.1, 0.02], [0.3, 0.2, 0.9], [0.0, 0.11, 0.11]])
  assert best(found, 0.1) == [(1, 2, 0.9), (2, 1, 0.11)]
  path = tmp_path / "heads.json"
  path.write_text('{"heads": [[1, 2, 0.9], [2, 1, 0.11]]}')
  heads = load(path)
  assert Ltri(**SMALL, heads=heads)._head(1) == (2, 0.9)
  path.write_text("[]")
  with pytest.raises(ValueError, match="expected a file of retrieval heads"):
    load(path)


def test_a_pattern_is_written_and_loaded(tmp_path, monkeypatch):
  """Six query heads of two key/value heads: the best of three each; half of four gates stream."""
  found = np.array([[0.1, 0.2, 0.0, 0.9, 0.3, 0.0], [0.0, 0.05, 0.5, 0.1, 0.1, 0.15]])
  assert gates(found, 2).tolist() == [[0.2, 0.9], [0.5, 0.15]]
  monkeypatch.setattr(retrieval_heads.common, "load_model", lambda _: (model(), None))
  monkeypatch.setattr(retrieval_heads, "needles", lambda *_: [None])
  monkeypatch.setattr(retrieval_heads, "scores", lambda *_: found)
  main(retrieval_heads.Args(tmp_path / "heads.json", pattern=tmp_path / "heads.tsv"))
  method = DuoAttention.from_tsv(tmp_path / "heads.tsv")
  assert method == DuoAttention(((False, True), (True, False)))
