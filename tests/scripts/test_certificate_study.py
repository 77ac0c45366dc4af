"""The study of certificates: what is certified by what, on a tiny model and by hand."""

import dataclasses

import numpy as np
import pytest

from kvjax.analysis.certificates import Certificate
from scripts.examples import tiny
from scripts.studies import certificate_study as study

ARGS = study.Args(None, length=64, queries=8, budget=6)


def text(seed, layers=8, heads=2, groups=3, dim=8):
  """Activations without any model: keys of a layer are near those of the one below."""
  rng = np.random.default_rng(seed)
  size, newest = ARGS.length, 2 * ARGS.queries
  k = rng.normal(size=(layers, heads, size, dim)).cumsum(0).astype(np.float32) * 0.2
  frozen = k + 0.01 * rng.normal(size=k.shape).astype(np.float32)
  q = rng.normal(size=(layers, heads, groups, newest, dim)).astype(np.float32)
  position = np.arange(size - newest, size)
  return study.Text(list(q), list(k), list(frozen), [shared(rng, x) for x in k], position)


def shared(rng, k):
  """Steps of a layer, every other of which shares with the first."""
  heads, size, dim = k.shape
  steps = np.arange(ARGS.queries)[:, None]
  anchor = np.broadcast_to(np.where(steps % 2, 0, -1), (ARGS.queries, heads))
  q = rng.normal(size=(ARGS.queries, heads, 3, dim)).astype(np.float32)
  return study.Shared(q, k, rng.random((ARGS.queries, heads, size)) < 0.3, anchor)


@pytest.fixture(scope="module")
def found():
  return list(study.rows(text(0), text(1), ARGS))


def of(found, name, fitted):
  return [row.found for row in found if (row.name, row.fitted) == (name, fitted)]


def test_what_is_fitted_to_itself_holds(found):
  own = [row for row in found if row.fitted in (study.KNOWN, study.SAME)]
  assert {row.name.split(",")[0].split(" (")[0] for row in own} == {
    *("query drift", "sharing", "mass dropped where CIS shares"),
    *("information of the index", "window", "freezing"),
  }
  assert all(row.found.holds for row in own)
  assert all((row.found.actual <= row.trivial + 1e-12).all() for row in own)


def test_layers_that_change_something_are_certified(found):
  """Of 8 layers the last 2 hide and freeze; the first of them projects what it would anyway."""
  assert len(of(found, "query drift", study.KNOWN)) == 8
  below = of(found, "freezing (ETF), keys of the layer below", study.OTHER)
  projected = of(found, "freezing (ETF), keys projected", study.OTHER)
  windows = of(found, "window (PSAW)", study.OTHER)
  assert (len(windows), len(below), len(projected)) == (2, 2, 1)


def test_constants_are_of_where_they_are_said_to_be_from(found):
  """Another text changes the bounds that are fitted to it alone; what is bounded stays."""
  again = list(study.rows(text(0), text(2), ARGS))
  changed = set()
  for one, two in zip(found, again, strict=True):
    np.testing.assert_array_equal(one.found.actual, two.found.actual)
    if (one.found.bound != two.found.bound).any():
      changed.add(one.fitted)
  assert changed == {study.OTHER}


def test_queries_before_are_not_those_that_are_certified():
  """With other queries in the first half, only what is fitted to them changes."""
  one = text(0)
  q = [layer.copy() for layer in one.q]
  for layer in q:
    layer[:, :, : ARGS.queries - 1] *= 0.5  # the last one is the anchor of the first certified one
  changed = set()
  rows = (study.rows(each, text(1), ARGS) for each in (one, one._replace(q=q)))
  for old, new in zip(*rows, strict=True):
    if not np.array_equal(old.found.bound, new.found.bound):
      changed.add(old.fitted)
  assert changed == {study.BEFORE}


@pytest.mark.slow
def test_cis_is_followed_in_a_model(tmp_path):
  """Queries that share look at what an earlier one chose, and at the newest tokens."""
  model, tokenizer = tiny.load()
  args = dataclasses.replace(ARGS, out=tmp_path, queries=24, cosine=0.2, budget=16)
  for layer in study.read(model, tokenizer, "1862-Lincoln-1", args).cis:
    shares = np.argwhere(layer.anchor >= 0)
    assert 0 < len(shares) < layer.anchor.size
    for row in study._selected(layer):
      assert row.found.holds and row.found.actual.shape == (len(shares), layer.q.shape[2])
    for step, head in shares:
      anchor = layer.anchor[step, head]
      assert anchor < step and anchor // 16 == step // 16 and layer.anchor[anchor, head] == -1
      assert layer.chosen[step, head, 40 + step]  # its own token


def test_the_loss_of_information_by_hand():
  """Two contexts that look at two keys each: ln 2 nats, and none where both look alike."""
  apart = np.array([[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]])
  np.testing.assert_allclose(study._information_of(apart), np.log(2))
  np.testing.assert_allclose(study._information_of(apart[[0, 0]]), 0, atol=1e-15)


def row(actual, bound):
  return study.Row("a bound", study.OTHER, 2.0, Certificate(np.array(actual), np.array(bound)))


def test_shares_by_hand():
  """Of two texts: below 2 are 2 of 4 bounds; the last one fails."""
  (line,) = study.summary([[row([0.5, 1.0], [1.0, 2.0])], [row([0.5], [3.0]), row([1.5], [1.0])]])
  assert (line["bounds"], line["below"], line["fails"]) == (4, 0.5, 0.25)
  assert line["below_by_text"] == [0.5, 0.5] and line["fails_by_text"] == [0, 0.5]
  assert (line["bound_over_trivial"], line["actual_over_trivial"]) == (0.75, 0.375)
  assert (line["below_half"], line["below_half_by_text"]) == (0, [0, 0])  # 1 is not below 1
  assert "50.0% (50.0% to 50.0%)" in study.table([line])


@pytest.mark.parametrize(
  "how, said",
  [
    ({"starts": ("1862-Lincoln-1",)}, "starts: found .* expected at least two"),
    ({"length": 16}, "length: found 16, expected more than twice the queries, 16"),
    ({"queries": 0}, "queries: found 0, expected at least 1"),
  ],
)
def test_arguments_that_make_no_sense(how, said):
  with pytest.raises(ValueError, match=said):
    study.main(dataclasses.replace(ARGS, **how))
