"""The study of shared selections: what it measures on a tiny model, and what it makes of it."""

import dataclasses
import json

import numpy as np
import pytest

import kvjax
from kvjax.programs.evals.fitted import fingerprints
from kvjax.programs.evals.stats import student
from kvjax.programs.evals.streams import FITTING
from kvjax.testing.tiny import TOKENS, model
from scripts.studies import sharing_study as study
from scripts.studies import sheets

CIS = kvjax.CIS(k=4, sinks=1, local=3, block=4)


@pytest.mark.slow
def test_who_never_shares_keeps_the_oracles_selection():
  """Without groups what a head retrieves is the oracle's, but for first and newest tokens."""
  ids = TOKENS[0]
  alone = study.measure(model(), dataclasses.replace(CIS, tau=1.0), ids, 24)
  always = study.measure(model(), dataclasses.replace(CIS, tau=-1.0), ids, 24)
  assert alone["retrieved"] == 1 and always["retrieved"] == pytest.approx(0.25, abs=0.1)
  assert alone["visited"] == 8 < always["visited"]  # shared lists gain neighbours
  for found in (alone, always):
    assert 0 < found["overlap"] <= 1 and 0 <= found["dropped"] < 1
  everything = study.measure(model(), dataclasses.replace(CIS, local=len(ids)), ids, 24)
  assert everything["overlap"] == 1 and everything["dropped"] == pytest.approx(0, abs=1e-6)


def growing(monkeypatch, slope, calls):
  """Heads that attend to the first and newest tokens and to `slope` times what is retrieved."""

  def measure(_, method, ids, length):
    calls.append(method.k)
    return {"visited": method.sinks + method.local + slope * method.k}

  monkeypatch.setattr(study, "measure", measure)


@pytest.mark.parametrize("slope, tries", [(1.0, 1), (1.3, 2), (1.6, 2)])
def test_cis_is_cut_to_the_target(monkeypatch, slope, tries):
  calls = []
  growing(monkeypatch, slope, calls)
  start = kvjax.CIS(k=88, sinks=8, local=32)
  cut, found = study.fitted(None, start, TOKENS[0], 24, 128)
  assert abs(found["visited"] - 128) <= slope / 2 and cut.k == round(88 / slope)
  assert found["visited"] == 40 + slope * cut.k and len(calls) == tries


def test_a_text_takes_the_cuts_that_are_there(monkeypatch, tmp_path):
  calls, cut = [], {}
  growing(monkeypatch, 1.25, calls)
  args = study.Args(tmp_path, budget=128)
  point = kvjax.settings.example(kvjax.CIS, 128)
  monkeypatch.setattr(study, "settings", lambda _: {"CIS": {"a point": point}})
  first = study.text(None, args, TOKENS[0], cut)
  assert cut == {"CIS": {"a point": 70}} and calls == [88, 70]
  assert study.text(None, args, TOKENS[1], cut) == first and calls == [88, 70, 70]


def points(retrieved, overlap, visited=128.0):
  return {
    str(i): {"retrieved": x, "visited": visited, "overlap": y, "dropped": 1 - y}
    for i, (x, y) in enumerate(zip(retrieved, overlap, strict=True))
  }


def found(apart):
  """CIS by `apart` ahead of HShare's line from (0.2, 0.5) to (1, 0.9)."""
  mine = points([0.4, 0.1], [0.6 + apart, 0.5], visited=127.5)
  return {"CIS": mine, study.HSHARE: points([1.0, 0.2], [0.9, 0.5])}


def test_ahead_is_at_as_many_retrievals():
  texts = [found(0.1), found(0.2)]
  np.testing.assert_allclose(study.ahead(texts, "CIS", "0", "overlap"), [0.1, 0.2])
  np.testing.assert_allclose(study.ahead(texts, "CIS", "0", "dropped"), [-0.1, -0.2])
  assert study.ahead(texts, "CIS", "1", "overlap") == []  # HShare retrieves no less than 0.2


def test_intervals_are_over_texts():
  """Student's for two values d apart: 12.706·d/2."""
  made = study.summary([found(0.1), found(0.2)])
  ahead = made["CIS"]["0"]["overlap ahead"]
  np.testing.assert_allclose([ahead["mean"], ahead["high"]], [0.15, 0.15 + 12.7062 * 0.05], 1e-5)
  assert made["CIS"]["1"]["overlap ahead"] is None and "overlap ahead" not in made["HShare"]["0"]
  alone = study.summary([found(0.1)])["CIS"]["0"]["overlap"]
  assert alone["low"] == alone["mean"] == alone["high"] == pytest.approx(0.7)


def test_students_interval_by_hand():
  got = student([1.0, 2.0, 3.0, 4.0])
  assert got.n == 4 and got.mean == 2.5
  np.testing.assert_allclose(got.high - 2.5, 3.182446 * np.sqrt(5 / 3) / 2, 1e-6)
  with pytest.raises(ValueError, match="values: found 1, expected at least two"):
    student([1.0])


def test_points_table_and_picture(tmp_path):
  lines = study.settings(study.Args(tmp_path, budget=64))
  rules = ("", 4), (", mean", 3), (", r = 0", 3), (", mean, r = 0", 3)
  wanted = {f"CIS, s = 16{rule}": count for rule, count in rules} | {"HShare": 6}
  assert {line: len(at) for line, at in lines.items()} == wanted
  assert lines["CIS, s = 16, mean, r = 0"]["τ = 0.8"] == dataclasses.replace(
    kvjax.settings.example(kvjax.CIS, 64), tau=0.8, radius=0, agree="mean"
  )
  made = study.summary([found(0.1), found(0.2)])
  text = "\n".join(sheets.tables(made))
  assert text.count("HShare\n") == 1 and "127.5 [127.5, 127.5]" in text
  assert study._visited(made["CIS"]) == "127.5"
  means = {str(i): {"visited": {"mean": x}} for i, x in enumerate((2.0, 1.0))}
  assert study._visited(means) == "1.0 to 2.0"
  sheets.write(tmp_path / "picture.png", study.draw(made, "tiny"))
  assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


class Bytes:
  """A tokenizer of which each word is a token."""

  def encode(self, text):
    return [len(word) % 20 for word in text.split()]


def test_a_run_that_ends_early_goes_on_after_its_last_text(monkeypatch, tmp_path):
  """First it cuts CIS, on a text of which nothing is kept; other settings are refused."""
  calls, starts = [], ("1862-Lincoln-1", "1934-Roosevelt-1")

  def measure(model, args, ids, cut):
    calls.append(ids)
    if len(calls) == 3:
      raise KeyboardInterrupt
    cut.setdefault("CIS", {"0": 70})
    return found(0.1 * len(calls))

  monkeypatch.setattr(study, "text", measure)
  monkeypatch.setattr(study.common, "load_model", lambda _: (model(), Bytes()))
  args = study.Args(tmp_path, length=24, steps=8, starts=starts)
  with pytest.raises(KeyboardInterrupt):
    study.main(args)
  study.main(args)
  assert len(calls) == 4 and (calls[2] == calls[3]).all()  # the second text, and no other
  report = json.loads((tmp_path / "sharing.json").read_text("utf-8"))
  assert list(report["texts"]) == list(starts)
  assert report["found"]["CIS"]["0"]["overlap ahead"]["mean"] == pytest.approx(0.3)
  with pytest.raises(ValueError, match=r"sharing\.json: found a run with .*'steps': 8.*'steps': 4"):
    study.main(dataclasses.replace(args, steps=4))
  assert json.loads((tmp_path / "sharing.json").read_text("utf-8")) == report and len(calls) == 4


def test_cis_is_cut_on_a_text_that_is_not_measured(monkeypatch, tmp_path):
  read = []

  class Notes(Bytes):
    def encode(self, text):
      read.append(text)
      return super().encode(text)

  def measure(model, args, ids, cut):
    cut.setdefault("CIS", {"a point": len(read)})
    return found(0.1)

  monkeypatch.setattr(study, "text", measure)
  monkeypatch.setattr(study.common, "load_model", lambda _: (model(), Notes()))
  study.main(study.Args(tmp_path, length=24, steps=8, starts=("1862-Lincoln-1",)))
  fitted, tested = read
  assert not fingerprints(fitted) & fingerprints(tested) and tested.startswith("Fellow")
  report = json.loads((tmp_path / "sharing.json").read_text("utf-8"))
  assert report["retrieved_tokens"] == {"CIS": {"a point": 1}}
  assert report["about"]["cut on"] == FITTING.about
