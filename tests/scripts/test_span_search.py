"""The search of θ and φ: F1 by hand and by loops, a run on a tiny model; pictures of spans."""

import numpy as np
import pytest

from kvjax import Ltri
from kvjax.methods import labels
from kvjax.programs.evals import fitted
from kvjax.testing.tiny import TOKENS, model
from scripts.examples import tiny
from scripts.studies import sheets, span_search
from scripts.studies.plot_spans import RATES, draw_spans, draw_vectors, measure
from scripts.studies.span_search import Args, Evidence, evidence, search, tried
from tests.slow_spans import slow_divide


def random_evidence(seed, layers, heads=2, size=9):
  rng = np.random.default_rng(seed)
  maps = np.tril(rng.exponential(size=(layers, heads, size, size))).astype(np.float32)
  maps[..., -1, :] = 0
  start = rng.integers(0, 4)
  return Evidence(maps, (np.arange(size) >= start) & (np.arange(size) < start + 4))


def mean_f1(made, layer, quantile, overlap):
  """By sets of tokens, without the block's last one, in three spans."""
  scores = []
  for each in made:
    said = set(np.flatnonzero(each.said))
    spans = slow_divide(each.maps[layer][:, :-1, :-1], quantile, overlap, 3)
    spans = [set(range(x, y)) for x, y in spans]
    found = set().union(*(span for span in spans if span & said))
    scores.append(2 * len(found & said) / (len(found) + len(said)))
  return np.mean(scores)


def test_pairs_are_scored_as_loops_score_them():
  made = [random_evidence(seed, 2) for seed in range(5)]
  theta, phi = (np.array(x, np.float32) for x in ([0.5, 0.8, 0.2], [0.1, 0.5, 0.9]))
  said = np.stack([each.said for each in made])
  found = tried(np.stack([each.maps[1] for each in made]), said, theta, phi, 3)
  want = [mean_f1(made, 1, *pair) for pair in zip(theta, phi, strict=True)]
  np.testing.assert_allclose(found, want, atol=1e-6)
  assert len({*want}) == 3


def test_the_best_pair_of_every_layer(tmp_path):
  """No draw is lost; the method's own pair is one of them."""
  made = [random_evidence(seed, 2) for seed in range(6)]
  method = Ltri(spans=3, quantile=(0.9, 0.3), overlap=(0.2,))
  best = search(made, method, Args(out=tmp_path, trials=20))
  for layer, own in enumerate((0.9, 0.3)):
    pairs = (own, 0.2), (best["quantile"][layer], best["overlap"][layer])
    before, after = (mean_f1(made, layer, *pair) for pair in pairs)
    assert best["f1_before"][layer] == pytest.approx(before, abs=1e-4)
    assert best["f1"][layer] == pytest.approx(after, abs=2e-2) and after >= before
  assert best["f1"] != best["f1_before"]


@pytest.mark.slow
def test_the_block_of_a_needle():
  """Its sentence stands where it is asked to, and each query's probabilities are there."""
  method = Ltri(2, 16, 8, 2, chunk=16, held=2, last=0)
  found = evidence(model(), method, TOKENS[0].tolist(), 20, 24, place=3)
  assert np.flatnonzero(found.said).tolist() == [3, 4, 5, 6]
  assert found.maps.shape == (4, 6, 8, 8) and np.triu(found.maps, 1).max() == 0
  assert (found.maps[..., -1, :] == 0).all()
  given = found.maps[..., :-1, :].sum(-1)
  assert (given > 0).all() and (given <= 1 + 1e-6).all()
  with pytest.raises(ValueError, match="--init: found a needle at token 4"):
    evidence(model(), method, TOKENS[0].tolist(), 4, 8, place=3)


@pytest.mark.slow
def test_a_file_of_settings_by_layer(monkeypatch, tmp_path):
  """Found on texts that are recorded, and read again by a label."""
  monkeypatch.setattr(span_search.common, "load_model", lambda _: tiny.load())
  path = tmp_path / "spans.json"
  sizes = {"window": 32, "init": 8, "block": 96, "chunk": 96}
  span_search.main(Args(out=path, samples=1, length=500, trials=5, **sizes))
  method = labels.instance(f"ltri:quantile={path},overlap={path}", 4096)
  assert len(method.quantile) == len(method.overlap) == 2
  assert fitted.of(path)["task"] == "fitting needle"
  with pytest.raises(ValueError, match="expected numbers under 'rate'"):
    labels.instance(f"ltri:rate={path}", 4096)
  with pytest.raises(ValueError, match="--block: found 32, expected more than a needle's"):
    span_search.main(Args(out=path, samples=1, length=500, **sizes | {"block": 32}))


@pytest.mark.slow
def test_numbers_and_pictures(tmp_path):
  method = Ltri(2, 6, 4, 2, chunk=8, held=2, spans=2, vectors=4, last=0, rate=(2.0,))
  ids = TOKENS[0].tolist()
  found = measure(model(), ids, method)
  assert found["tokens"] == 2 + 9 * 4 - 1 and found["blocks"] == (37 - 6 - 2) // 4
  assert len(found["layers"]) == 4
  for layer in found["layers"]:
    assert np.triu(layer["map"], 1).max() == 0 and layer["map"][:3].max() > 0
    assert all(0 <= a < b <= 3 for a, b in layer["spans"])
    counts = [layer["vectors"][rate] for rate in RATES]
    assert counts == sorted(counts, reverse=True) and counts[0] <= 4
  for draw in (draw_spans, draw_vectors):
    sheets.write(tmp_path / "picture.png", draw(found))
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
  with pytest.raises(ValueError, match="--length: found 5 tokens, expected 6 or more"):
    measure(model(), ids[:5], method)
