"""Divergence along long answers: by hand with NumPy, and runs on a tiny model that are stopped."""

import dataclasses
import json

import numpy as np
import pytest
from scipy.special import log_softmax

import kvjax
from kvjax.programs import common
from kvjax.programs.evals.stats import student
from kvjax.testing.tiny import CONFIG, Run, model
from scripts.studies import turnover
from tests import plain

SPECIAL, END = 5, 7  # tokens that no answer has
PROMPT, ANSWER, ROWS = 16, 40, 2


class Letters:
  """A tokenizer of one token a character."""

  ends = (END,)

  def encode(self, text):
    return [ord(c) % CONFIG.vocab for c in text]

  def is_special(self, token):
    return token == SPECIAL


@pytest.fixture
def args(monkeypatch, tmp_path):
  monkeypatch.setattr(common, "load_model", lambda _: (model(), Letters()))
  monkeypatch.setattr(turnover, "PIECE", 16)
  sizes = {"prompt": PROMPT, "answer": ANSWER, "rows": ROWS, "window": 16}
  methods = ("full", "streaming_llm")
  return turnover.Args(tmp_path, methods=methods, budgets=(64, 8), together=1, **sizes)


def forward(text):
  """Logits [B, N, V] of a plain pass, each of the prediction of an answer's token."""
  return np.array(plain.logits(model(), text)[:, PROMPT - 1 : -1], np.float64)


def records(args):
  return json.loads((args.out / "turnover.json").read_text("utf-8"))["records"]


@pytest.mark.slow
def test_what_drops_tokens_diverges(args, capsys):
  """The full cache beside itself does not, nor does a budget that is never reached."""
  assert turnover.main(args) == 0
  found = {(r["method"], r["budget"], r["window"]): r for r in records(args)}
  kept = [("full", None), ("streaming_llm", 64), ("streaming_llm", 8)]
  assert list(found) == [(*who, window) for who in kept for window in (None, 0, 1, 2)]
  full, roomy, tight = (found[*who, None] for who in kept)
  assert full["kl_rows"] == [0, 0] and full["top1_rows"] == [1, 1]
  np.testing.assert_allclose(roomy["kl_rows"], 0, atol=1e-6)
  assert min(tight["kl_rows"]) > 0.01 and tight["top1"] < 1
  assert full["turnover"] is None and tight["turnover"] == ANSWER / 8
  assert [found[*kept[2], i]["stop"] for i in range(3)] == [16, 32, 40]
  parts = [found[*kept[2], i]["kl_rows"] for i in range(3)]
  np.testing.assert_allclose(tight["kl_rows"], np.average(parts, 0, (16, 16, 8)), 1e-5)
  rows = tight["kl_rows"]
  assert (tight["kl_low"], tight["kl"]) == (student(rows).low, np.mean(rows))
  said = capsys.readouterr().out
  assert (args.out / "turnover.txt").read_text("utf-8").strip() in said
  assert "2 rows, temperature 1, seed 0" in said
  assert said.splitlines()[-2].split()[:3] == ["streaming_llm", "8", "5"]


@pytest.mark.slow
def test_divergence_is_that_of_plain_passes(args):
  """KL in float64 from one forward pass over the text, and from steps of the method alone."""
  rng, method = np.random.default_rng(0), kvjax.StreamingLLM(8)
  text = rng.integers(0, CONFIG.vocab, (ROWS, PROMPT + ANSWER), np.int32)
  full = log_softmax(forward(text), -1)
  alone = Run(method).generate(ANSWER - 1, np.full(ROWS, PROMPT, np.int32), tokens=text)
  mine = log_softmax(alone.astype(np.float64), -1)
  ((kl, top1),) = turnover.follow(model(), [method], text[:, :PROMPT], text[:, PROMPT:])
  np.testing.assert_allclose(kl, (np.exp(full) * (full - mine)).sum(-1), rtol=1e-3, atol=1e-5)
  np.testing.assert_array_equal(top1, full.argmax(-1) == mine.argmax(-1))
  assert kl.dtype == np.float32 and kl[:, 1:].min() > 0


@pytest.mark.slow
def test_answers_are_the_full_caches_and_do_not_end(args):
  """Drawn by the seed, or without a temperature the likeliest, of tokens that end nothing."""
  prompts, made = turnover.prompts_of(Letters(), args), {}
  for how in ((0.0, 0), (50.0, 0), (50.0, 1)):
    changed = dataclasses.replace(args, temperature=how[0], seed=how[1])
    made[how] = turnover.write(model(), Letters(), prompts, changed)
    assert not np.isin(made[how], (SPECIAL, END)).any()
  logits = forward(np.concatenate([prompts, made[0.0, 0]], 1))
  logits[..., [SPECIAL, END]] = -np.inf
  np.testing.assert_array_equal(made[0.0, 0], logits.argmax(-1))
  assert (made[50.0, 0] != made[50.0, 1]).any() and (prompts[0] != prompts[1]).any()
  assert turnover.distinct(made[50.0, 0][0]) == 1 and turnover.distinct(np.zeros(40)) == 0.0303


@pytest.mark.slow
def test_a_run_goes_on_where_it_was_stopped(args, monkeypatch):
  """Neither texts nor records are made again, and they are those of a run at once."""
  calls, follow = [], turnover.follow

  def stopping(model, methods, *given):
    calls.append(len(methods))
    if len(calls) == 3:
      raise KeyboardInterrupt
    return follow(model, methods, *given)

  monkeypatch.setattr(turnover, "follow", stopping)
  with pytest.raises(KeyboardInterrupt):
    turnover.main(args)
  held = records(args)
  assert {(r["method"], r["budget"]) for r in held} == {("full", None), ("streaming_llm", 64)}
  monkeypatch.setattr(turnover, "write", None)
  turnover.main(args)
  assert calls == [1, 1, 1, 1] and records(args)[: len(held)] == held
  once = dataclasses.replace(args, out=args.out / "once", together=3)
  once.out.mkdir()
  (args.out / "texts.npz").rename(once.out / "texts.npz")
  turnover.main(once)
  assert calls[4:] == [3] and records(once) == records(args)


@pytest.mark.slow
def test_a_method_that_fails_is_left_out(args, monkeypatch, capsys):
  """The others beside it run, and the exit status is 1."""
  follow = turnover.follow

  def failing(model, methods, *given):
    if any(method != kvjax.Full() for method in methods):
      raise MemoryError("no room")
    return follow(model, methods, *given)

  monkeypatch.setattr(turnover, "follow", failing)
  assert turnover.main(dataclasses.replace(args, budgets=(8,), together=2)) == 1
  assert {r["method"] for r in records(args)} == {"full"}
  assert "streaming_llm, budget 8: left out, no room" in capsys.readouterr().out


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"rows": 1}, "--rows: found 1, expected at least 2"),
    ({"budgets": (64, 0)}, "--budgets: found 0"),
    ({"methods": ()}, "--methods: found none"),
    ({"methods": ("nothing",)}, "--methods: found 'nothing'"),
    ({"answer": 500}, "--answer: found 500, expected at most 496"),
    ({"temperature": -1.0}, "--temperature: found -1.0"),
  ],
)
def test_bad_arguments_are_refused(args, changes, message):
  with pytest.raises(ValueError, match=message):
    turnover.main(dataclasses.replace(args, **changes))


def test_files_of_other_runs_are_refused(args, monkeypatch):
  written = np.zeros((ROWS, ANSWER), np.int32)
  monkeypatch.setattr(turnover, "write", lambda *given: written)
  monkeypatch.setattr(turnover, "follow", lambda *given: [np.zeros((2, ROWS, ANSWER))])
  turnover.main(args)
  with pytest.raises(ValueError, match=r"texts\.npz: found a run with {'seed': 0}, expected"):
    turnover.main(dataclasses.replace(args, seed=1))
  with pytest.raises(ValueError, match=r"turnover\.json: found .*'window': 16}, expected"):
    turnover.main(dataclasses.replace(args, window=8))
  (args.out / "texts.npz").write_bytes(b"PK\3\4 cut off")
  with pytest.raises(ValueError, match=r"texts\.npz: found .*, expected the texts of a run"):
    turnover.main(args)
  (args.out / "texts.npz").unlink()
  written += 1  # on another device other texts are drawn
  with pytest.raises(ValueError, match=r"turnover\.json: found a run with {'texts': "):
    turnover.main(args)
  (args.out / "turnover.json").write_text("[]")
  with pytest.raises(ValueError, match=r"turnover\.json: found .*expected the records of a run"):
    turnover.main(args)
