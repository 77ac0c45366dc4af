"""Needle recall of streaming methods: a needle's blocks by hand, and a run on a tiny model."""

import dataclasses
import json

import numpy as np
import pytest

from kvjax import Full, InfLLM, Ltri
from kvjax.programs import common
from kvjax.programs.evals import fitted
from kvjax.programs.evals.task import Row
from kvjax.programs.retrieval_heads import Sample
from kvjax.testing.tiny import TOKENS, model
from scripts.examples.tiny import byte_tokenizer
from scripts.studies import needle_recall as study
from tests.tiny_tokenizers import letters

ROW = Row("", "", "", ("AB",), "needle", 4, about={"depth": 0.25})


@pytest.mark.slow
def test_the_blocks_of_a_needle():
  """Tokens 10 to 13 after 3 first ones, in blocks of 4: blocks 1 and 2."""
  method = InfLLM(3, 8, 4, 2, held=2)
  assert Sample([0] * 20, 10, [0] * 4, ROW).blocks(method) == [1, 2]
  assert Sample([0] * 20, 11, [0] * 4, ROW).blocks(method) == [2]
  assert Sample([0] * 20, 1, [0] * 4, ROW).blocks(method) == [0]


def test_recall_stands_beside_that_of_blocks_by_chance():
  """Of 59 tokens 3 are first ones, 8 in the window: 12 blocks of 4 have left, 2 are retrieved."""
  methods = {"full": Full(), "infllm": InfLLM(3, 8, 4, 2, held=2)}
  methods["injected"] = InfLLM(3, 8, 4, 2, held=2, inject=1)
  by_chance = [study.chance(method, 59) for method in methods.values()]
  assert by_chance == [None, pytest.approx(1 / 6), None]
  assert study.chance(methods["infllm"], 12) == 1
  methods["ltri"] = Ltri(3, 8, 4, 2, held=2, heads=((1, 0, 0.4),))
  told = {"right": True, "recall": [[0.5, 0.25]], "asked": [1.0, 0.5]}
  found = {name: [told, told | {"asked": [0.0, 0.0]}] for name in methods}
  found["full"] = [{"right": True, "recall": [], "asked": []}]
  full, infllm, injected, ltri = study.table(found, methods, 59).splitlines()[2:]
  assert full.split()[-5:] == ["–"] * 5
  assert infllm.split()[-6:] == ["0.375", "0.375", "0.375", "0.167", "0.50", "(0)"]
  assert injected.split()[-3:] == ["–", "0.50", "(0)"]
  assert ltri.split()[-5:-2] == ["0.375", "0.250", "0.167"]
  found["ltri"] = [told]
  head, _, *layers = study.layers_table(found, methods).splitlines()
  assert head.split() == ["layer", "infllm", "injected", "ltri"]
  first, second = (line.split() for line in layers)
  assert first == ["0", "0.50*", "0.50*", "1.00"] and second == ["1", "0.25*", "0.25*", "0.50*"]


@pytest.mark.slow
def test_injected_blocks_are_all_found():
  """Against the same method left to itself, which does not always retrieve them."""
  asked = [Sample(TOKENS[0].tolist(), 5, TOKENS[0, 5:9].tolist(), ROW)]
  methods = [InfLLM(2, 8, 4, 3, chunk=8, held=3, inject=n) for n in (0, 2)]
  own, injected = (study.answer(model(), letters(), x, asked, 64)[0]["recall"] for x in methods)
  assert np.shape(injected)[1] == 4 and np.mean(injected) == 1 > np.mean(own)


@pytest.mark.slow
@pytest.mark.parametrize("from_top", [False, True])
def test_answers_side_by_side_are_those_of_each_alone(from_top):
  """Of prompts of other lengths; with the top layer's blocks, all layers hold the same."""
  heads = ((1, 0, 0.4), (2, 3, 0.6))
  method = Ltri(2, 8, 4, 3, chunk=8, held=3, last=4, heads=heads, from_top=from_top)
  asked = [
    Sample(row[:n].tolist(), at, row[at : at + 4].tolist(), ROW)
    for row, n, at in zip(TOKENS[:2], (40, 33), (5, 12), strict=True)
  ]
  together = study.answer(model(), letters(), method, asked, 64)
  assert together == [study.answer(model(), letters(), method, [one], 64)[0] for one in asked]
  for row in together:
    assert len({*row["asked"]}) == 1 or not from_top
    assert row["recall"] == [row["asked"]] * len(row["recall"])  # they persist


@pytest.mark.parametrize("samples", [3, 7, 20])
def test_depths_are_spread_for_any_number_of_samples(samples):
  """Even over what leaves the window, in an order of which any beginning is spread."""
  args = study.Args(None, samples=samples, length=800, window=64, block=16)
  made = [study.sample(byte_tokenizer(), args, index) for index in range(samples)]
  far = 800 - 64 - 3 * 16 - study.STEPS
  depths = [(800 * one.row.about["depth"] - 32) / (far - 32) for one in made]
  np.testing.assert_allclose(sorted(depths), (np.arange(samples) + 0.5) / samples)
  assert {int(3 * depth) for depth in depths[:3]} == {0, 1, 2}
  assert depths != sorted(depths)


def test_heads_are_not_tested_on_what_they_were_found_on(monkeypatch, tmp_path):
  """Nothing is answered, or written, under heads of these texts, or of none that is known."""
  monkeypatch.setattr(common, "load_model", lambda _: (model(), byte_tokenizer()))
  out, sizes = tmp_path / "out", {"length": 800, "window": 64, "block": 16, "samples": 3}
  args = study.Args(out, **sizes)
  heads, hidden = tmp_path / "heads.json", [*study.sample(byte_tokenizer(), args, 2).row.answers]
  record = fitted.record("made up", ["a text of its own"], model=None, hidden=hidden)
  heads.write_text(json.dumps({"heads": [[1, 3, 0.5]], "fitted": record}))
  with pytest.raises(ValueError, match=r"heads\.json: found .*needle.*on which it was fitted"):
    study.main(dataclasses.replace(args, heads=heads))
  heads.write_text('{"heads": [[1, 3, 0.5]]}')
  with pytest.raises(ValueError, match="found nothing on what it was fitted on"):
    study.main(dataclasses.replace(args, heads=heads))
  assert not out.exists()
  told = {"answer": "", "right": True, "asked": [0.5] * 2, "recall": [[0.5] * 2]}
  monkeypatch.setattr(study, "answer", lambda *given: [told] * len(given[3]))
  more = {"methods": ("ltri",), "heads": heads, "unknown_fit": True}
  study.main(dataclasses.replace(args, **more))
  assert json.loads((out / "needles.json").read_text())["about"]["fitted"] == ["unknown"]


@pytest.mark.slow
def test_the_full_cache_is_left_out_of_texts_beyond_its_model(monkeypatch, tmp_path, capsys):
  """It would see distances that the model never saw; the others' are bounded."""
  told = {"answer": "", "right": True, "asked": [0.5] * 2, "recall": [[0.5] * 2]}
  monkeypatch.setattr(study, "answer", lambda *given: [told] * len(given[3]))
  monkeypatch.setattr(common, "load_model", lambda *_: (model(), letters()))
  monkeypatch.setattr(study, "sample", lambda *_: Sample([0] * 50, 20, [0] * 4, ROW))
  most = model().config.max_context
  args = study.Args(tmp_path, samples=1, length=most + 1, methods=("full", "infllm"))
  study.main(args)
  said = capsys.readouterr().out
  assert f"full: left out, the model was trained for {most:,} tokens, not for {most + 1:,}" in said
  assert list(json.loads((tmp_path / "needles.json").read_text())["answers"]) == ["infllm"]


@pytest.mark.slow
def test_a_run_goes_on_where_it_was_stopped(monkeypatch, tmp_path):
  """Every answer is on disk when it is known; a second run asks for what is missing only."""
  asked = []

  def count(model, tokenizer, method, samples, room):
    asked.append(type(method).__name__)
    if len(asked) == 5:
      raise KeyboardInterrupt
    if len(asked) == 3:
      raise MemoryError("no room")
    told = {"answer": "", "right": len(asked) % 2 == 0}
    return [told | {"asked": [0.5, 1.0], "recall": [[0.5, 1.0]]}] * len(samples)

  monkeypatch.setattr(study, "answer", count)
  monkeypatch.setattr(common, "load_model", lambda *a: (model(), letters()))
  made = lambda *given: Sample([0] * 50, 20 + given[2], [0] * 4, ROW)  # noqa: E731
  monkeypatch.setattr(study, "sample", made)
  args = study.Args(tmp_path, samples=2, length=400, window=64, block=16)
  names = list(study.contestants(args))
  with pytest.raises(KeyboardInterrupt):
    study.main(args)
  held = json.loads((tmp_path / "needles.json").read_text())["answers"]
  assert sum(map(len, held.values())) == 4
  failed = {"answer": "", "right": False, "asked": [], "recall": [], "depth": 0.25}
  assert held[names[2]]["0"] == {**failed, "failed": "MemoryError('no room')"}
  study.main(dataclasses.replace(args, first=1))
  held = json.loads((tmp_path / "needles.json").read_text())["answers"]
  assert [*map(list, held.values())] == [["0"]] * len(names)
  study.main(args)
  assert len(asked) == 5 + 2 * len(names) - 4
  assert "right" in (tmp_path / "needles.txt").read_text()
  with pytest.raises(ValueError, match=r"found a run with {.*}, expected"):
    study.main(study.Args(tmp_path, samples=3, length=400, window=64, block=16))
  with pytest.raises(ValueError, match="--methods: found"):
    study.main(study.Args(tmp_path, methods=("nothing",)))
  for text in ("{", "[]", "{}"):
    (tmp_path / "needles.json").write_text(text)
    with pytest.raises(ValueError, match=r"needles\.json: found .*expected the answers of a run"):
      study.main(args)
