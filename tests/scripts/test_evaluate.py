"""The evaluation program on a tiny model: what it measures, and that nothing stops it for good."""

import dataclasses
import errno
import gzip
import importlib
import json
import os
import random
import re
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx
from scipy import special

import kvjax
from kvjax.models.decode.batcher import Batcher
from kvjax.models.decode.caches import next_turn
from kvjax.models.decode.step import Device
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.programs import common, evaluate
from kvjax.programs.evals import (
  cells,
  continuations,
  divergence,
  fitted,
  origin,
  overlap,
  plan,
  stats,
  store,
  summary,
  walks,
)
from kvjax.programs.evals.prompt import Reader
from kvjax.programs.evals.registry import TASKS
from kvjax.programs.evals.task import Row
from scripts.examples import tiny
from tests import eval_data, eval_rows, plain

LENGTH = 480  # tokens are bytes
METHODS = ("streaming_llm", "snapkv")
BOTH = ("--modes", "aware", "agnostic")
SAMPLES = 3


@pytest.fixture(scope="module", autouse=True)
def few_steps():
  """A text's divergence is measured over a quarter of its usual tokens."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(divergence, "STEPS", 32)
    yield


def arguments(out, *more, tasks=("needle", "kl"), methods=METHODS, samples=SAMPLES, batch=2):
  return [
    *("--tasks", *tasks, "--methods", *methods, "--out", str(out), "--lengths", str(LENGTH)),
    *("--samples", str(samples), "--batch", str(batch), "--budgets", "64", *more),
  ]


def parse(*given):
  return common.parse(evaluate.Args, "evaluate", given)


def run(loaded, out, *more, **kwargs):
  """Rows of a run."""
  return evaluate.evaluate(parse(*arguments(out, *more, **kwargs)), *loaded)


def by_key(rows):
  return {store.key(row): row for row in rows}


def untimed(rows):
  """Rows by their keys, without the seconds that they took."""
  return {store.key(row): {n: x for n, x in row.items() if n != "seconds"} for row in rows}


@pytest.fixture(scope="module")
def finished(loaded, tmp_path_factory):
  """An uninterrupted run with both modes: its folder and rows."""
  out = tmp_path_factory.mktemp("finished")
  return out, run(loaded, out, *BOTH)


# ---- what is measured


@pytest.mark.slow
def test_a_row_says_all_there_is_to_know(loaded, finished):
  _, tokenizer = loaded
  rows = by_key(finished[1])
  each = 3 * (2 + 1)  # methods × (modes, and kl)
  assert len(rows) == len(finished[1]) == SAMPLES * each
  row = rows["needle", LENGTH, "aware", "snapkv", 64, 1]
  made = TASKS["needle"].build(Reader(tokenizer).count, length=LENGTH, seed=0, index=1)
  prompt = Reader(tokenizer).row(made)
  assert row["prompt_tokens"] == len(prompt.ids) <= LENGTH - made.max_new_tokens
  assert row["about"] == made.about and "fitted" not in row
  assert row["settings"] == repr(kvjax.settings.example(kvjax.METHODS["snapkv"], 64))
  assert row["score"] == TASKS["needle"].score(row["answer"], made)
  assert row["answer_tokens"] <= made.max_new_tokens
  assert row["seconds"]["decode"] > 0 and row["seconds"]["rows"] == 2
  assert rows["kl", LENGTH, "aware", "full", None, 2]["seconds"]["rows"] == 1
  prompts = {row["prompt"] for row in rows.values() if row["task"] == "needle"}
  assert len(prompts) == SAMPLES and all(len(text) == 16 for text in prompts)


@pytest.mark.slow
def test_measured_bytes_are_those_of_the_arrays(loaded, finished):
  """Keys and values in float32 and an int32 position per slot, and two counters per layer."""
  model = loaded[0]
  c = model.config
  slot = c.kv_heads * (2 * c.head_dim * 4 + 4)
  for row in finished[1]:
    method = plan.instance(row["method"], 64)
    claimed = plan.cache_bytes(method, model, 1, LENGTH)
    assert row["cache_bytes"] == claimed and row["host_bytes"] == 0
    slots = LENGTH if row["method"] == "full" else 64
    assert slot * slots * c.layers <= claimed <= (slot + c.kv_heads * 8) * slots * c.layers + 99


@pytest.mark.slow
def test_the_full_cache_does_not_care_when_the_question_comes(finished):
  """Aware and agnostic read the same tokens; a compressed cache has lost what it did not expect."""
  rows = by_key(finished[1])
  same = {"full": 0, "snapkv": 0}
  for method in same:
    for index in range(SAMPLES):
      budget = None if method == "full" else 64
      modes = "aware", "agnostic"
      both = [rows["needle", LENGTH, mode, method, budget, index] for mode in modes]
      assert both[0]["prompt"] == both[1]["prompt"]
      same[method] += both[0]["answer"] == both[1]["answer"]
      assert "question" in both[1]["seconds"] and "question" not in both[0]["seconds"]
  assert same["full"] == SAMPLES > same["snapkv"]


# ---- second turns

TWICE = 800  # tokens of both turns
CLOSES = 112  # a token with which the model ends one of the first two answers


def closing_tokenizer(token: int) -> Tokenizer:
  """The tiny tokenizer, in which `token` closes a message in place of a letter."""
  whole = tiny.byte_tokenizer()
  vocabulary = whole.backend.get_vocab()
  (letter,) = (text for text, number in vocabulary.items() if number == token)
  vocabulary["<|end|>"], vocabulary[letter] = token, vocabulary["<|end|>"]
  backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
  backend.pre_tokenizer, backend.decoder = whole.backend.pre_tokenizer, whole.backend.decoder
  backend.add_special_tokens([*tiny.SPECIALS])
  return Tokenizer(backend, eos=token, chat_template=tiny.CHAT_TEMPLATE)


@pytest.mark.slow
def test_a_second_turn_continues_what_the_first_one_left(loaded, tmp_path, monkeypatch):
  """Ragged answers, of which one ends by itself; the logits are those of the whole conversation."""
  model, tokenizer = loaded[0], closing_tokenizer(CLOSES)
  asked, answers = {}, {}
  insert, ready = Batcher.insert, Batcher.ready

  def inserted(self, logits, caches, row, **how):
    number = insert(self, logits, caches, row, **how)
    asked[number] = np.asarray(logits[row]), int(caches[0].seen[row]), how["keep"]
    return number

  def ended(self):
    found = ready(self)
    answers.update({answer.request: answer for answer in found})
    return found

  monkeypatch.setattr(Batcher, "insert", inserted)
  monkeypatch.setattr(Batcher, "ready", ended)
  more = ("--modes", "second", "--lengths", str(TWICE))
  rows = run((model, tokenizer), tmp_path, *more, tasks=("needle",), methods=("full",))
  rows = sorted(rows, key=lambda row: row["index"])
  firsts = [answers[number] for number in asked if asked[number][2]]
  assert len(firsts) == SAMPLES and len(asked) == 2 * SAMPLES
  ends = {int(answer.tokens[-1]) == CLOSES for answer in firsts}
  assert ends == {False, True} and len({len(answer.tokens) for answer in firsts}) > 1
  seconds = [(*asked[number][:2], answers[number]) for number in asked if not asked[number][2]]
  for index, first in enumerate(firsts):
    made = TASKS["needle"].second(Reader(tokenizer).count, length=TWICE, seed=0, index=index)
    prompt, said = Reader(tokenizer).row(made), first.tokens.tolist()
    ids = prompt.ids + said + next_turn(tokenizer, made.second.question.lstrip(), said)
    ids += tokenizer.encode(made.second.answer_prefix.lstrip(), bos=False)
    row = rows[index]
    logits, second = next(
      (x, answer) for x, n, answer in seconds if (n, answer.text) == (len(ids), row["answer"])
    )
    np.testing.assert_allclose(logits, plain.logits(model, [ids])[0, -1], atol=1e-4)
    assert (row["first_answer"], row["answer"]) == (first.text, second.text)
    assert row["score"] == TASKS["needle"].score(second.text, made.second)
    assert row["also"] == {"first": TASKS["needle"].score(first.text, made)}
    assert row["prompt_tokens"] == len(prompt.ids + prompt.second) <= TWICE - 2 * 32


@pytest.mark.slow
def test_a_row_that_ends_makes_room(loaded, tmp_path, monkeypatch):
  """Answers of unequal limits: as many steps as tokens over rows, and the last one's."""
  limits = [3, 31, 2, 30, 4, 5, 29, 1, 2, 6]
  whole = TASKS["needle"].build

  def build(count, *, length, seed, index):
    row = whole(count, length=length, seed=seed, index=index)
    return dataclasses.replace(row, max_new_tokens=limits[index])

  task = dataclasses.replace(TASKS["needle"], build=build, filled=False)
  monkeypatch.setitem(TASKS, "needle", task)
  steps, one = [], Device.step
  monkeypatch.setattr(Device, "step", lambda self, n: steps.append(0) or one(self, n))
  rows = run(loaded, tmp_path, tasks=("needle",), methods=("full",), samples=len(limits))
  assert [rows[i]["index"] for i in range(3)] == [0, 2, 1]  # as they end
  said = {row["index"]: row for row in rows}
  assert [said[i]["answer_limit"] for i in range(len(limits))] == limits
  assert [said[i]["answer_tokens"] for i in range(len(limits))] == limits
  assert all(said[i]["seconds"]["steps"] >= limits[i] for i in range(len(limits)))
  assert len(steps) <= sum(limits) / 2 + max(limits) < sum(map(max, limits[::2], limits[1::2]))


@pytest.mark.slow
def test_second_turns_are_cells_of_their_own(loaded, finished, tmp_path, capsys):
  """Rows of one turn are what they are without the mode; a task with one question stays out."""
  modes = (*BOTH, "second")
  rows = by_key(run(loaded, tmp_path, *modes, "--lengths", str(LENGTH), str(TWICE)))
  for named, row in untimed(finished[1]).items():
    assert {k: v for k, v in rows[named].items() if k != "seconds"} == row
  twice = [row for row in rows.values() if row["mode"] == "second"]
  assert {(row["task"], row["length"]) for row in twice} == {("needle", TWICE)}
  assert len(twice) == SAMPLES * 3 and all("question" in row["seconds"] for row in twice)
  prompts = {row["prompt"]: row["mode"] == "second" for row in rows.values()}
  assert all(prompts[row["prompt"]] == (row["mode"] == "second") for row in rows.values())
  said = capsys.readouterr().err
  assert "not run: kl, second: there is no second question about its text" in said
  assert "not run: needle at 480 tokens: length: found 480 tokens, expected at least" in said


@pytest.mark.slow
def test_two_questions_are_asked_on_one_context(loaded, tmp_path):
  """Each of the cut context itself; a KVzip that keeps all of it answers as the full cache does."""
  more = ("--modes", "reuse", "--lengths", str(TWICE), "--budgets", "64", "2000")
  pair = "adakv:safeguard=0+kvzip:over_layers=True"
  methods = "kvzip", pair, "quest"
  rows = run(loaded, tmp_path, *more, methods=methods, tasks=("needle",), samples=2)
  answers: dict = {}
  for row in rows:
    assert row["score"] == (row["also"]["first"] + row["also"]["other"]) / 2
    of_method = answers.setdefault((row["method"], row["budget"]), {})
    of_method[row["index"]] = row["first_answer"], row["answer"]
  assert [len(found) for found in answers.values()] == [2] * 7
  assert answers[pair, 2000] == answers["full", None] != answers[pair, 64]
  assert answers["kvzip", 2000] == answers["full", None] != answers["kvzip", 64]


def test_a_context_is_cut_before_its_question(loaded, tmp_path, capsys):
  rows = run(loaded, tmp_path, methods=("kvzip",), tasks=("needle",))
  assert {row["method"] for row in rows} == {"full"}
  assert "aware: found KVzip, which cuts a context before its question" in capsys.readouterr().err


def test_a_second_turn_needs_a_chat(loaded, tmp_path, capsys):
  more = ("--modes", "second", "--lengths", str(TWICE), "--no-chat")
  assert run(loaded, tmp_path, *more, tasks=("needle",)) == []
  assert "needle at 800 tokens: chat_template: found none in use" in capsys.readouterr().err


def test_divergence_is_that_of_a_plain_forward_pass(loaded, finished):
  """−log p of the given tokens under the full cache, from one prefill of text and continuation."""
  model, tokenizer = loaded
  rows = by_key(finished[1])
  reader = Reader(tokenizer, chat=False)
  row = TASKS["kl"].build(reader.count, length=LENGTH, seed=0, index=2)
  ids = reader.row(row).ids + reader.continuation(row)
  logits = plain.logits(model, [ids])
  steps = row.max_new_tokens - 1
  logp = np.asarray(jax.nn.log_softmax(logits))[0, -steps - 1 : -1]
  expected = -logp[np.arange(steps), ids[-steps:]]
  full = rows["kl", LENGTH, "aware", "full", None, 2]
  np.testing.assert_allclose(full["positions"]["nll"], expected, atol=1e-4)
  assert full["score"] == 1 and full["also"]["kl"] == 0
  other = rows["kl", LENGTH, "aware", "streaming_llm", 64, 2]
  assert len(other["positions"]["kl"]) == steps
  assert other["also"]["kl"] > 0 and 0 < other["score"] <= 1


@pytest.mark.slow
def test_perplexity_is_that_of_plain_forward_passes(loaded, tmp_path, monkeypatch):
  """Window by window, each token from those before it; per word and byte of the text as it was.

  Three documents in WikiText's spelling, of several windows, one, and one token.
  """
  texts = [f" = A = \n {'so it goes , ' * 12}\n", " = B = \n b\n", " = C ="]
  (tmp_path / "data/wikitext").mkdir(parents=True)
  (tmp_path / "data/wikitext/wiki.test.raw").write_text("".join(texts))
  monkeypatch.setenv("KVJAX_DATA", str(tmp_path / "data"))
  model, tokenizer = loaded
  more = ("--lengths", "40", "--budgets", "16")  # fewer than a window: another perplexity
  rows = run(loaded, tmp_path / "out", *more, tasks=("wikitext",), methods=("streaming_llm",))
  full = [row for row in rows if row["method"] == "full"]
  assert sorted(row["about"]["document"] for row in full) == ["A", "B", "C"]
  total = words = size = 0
  for row in full:
    made = TASKS["wikitext"].build(len, length=40, seed=0, index=row["index"])
    ids = tokenizer.encode(made.continuation, bos=False)
    value = 0.0
    for context, rest in continuations.windows(ids, tokenizer.eos, 40):
      logits = plain.logits(model, [context + rest[:-1]])[0, len(context) - 1 :]
      logp = special.log_softmax(logits, -1)
      value += float(logp[np.arange(len(rest)), np.array(rest)].sum())
    np.testing.assert_allclose(row["also"]["log_likelihood"], value, rtol=1e-4)
    assert row["prompt_tokens"] == len(ids)
    total, words = total + value, words + row["also"]["words"]
    size += row["also"]["bytes"]
  (one, other) = summary.summarise(rows)
  found = summary.perplexities(one)
  expected = np.exp(-total / words), np.exp(-total / size), -total / size / np.log(2)
  np.testing.assert_allclose(found, expected, rtol=1e-3)
  assert summary.perplexities(other) != found
  assert "bits/byte" in summary.table([one, other])


@dataclasses.dataclass(frozen=True)
class Fussy(kvjax.Full):
  refuses: str = "turns"

  def settle(self, at, cache, prompt):
    if self.refuses == "prompts" or (self.refuses == "turns" and prompt.past != 0):
      raise NotImplementedError("no second turns")
    return super().settle(at, cache, prompt)

  def plan(self, at, cache, q, visible, carry):
    if self.refuses == "steps":
      raise ValueError("no second turns")
    return super().plan(at, cache, q, visible, carry)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "refuses"),
  [("fussy", "turns"), ("fussy", "prompts"), ("fussy", "steps"), ("full", "prompts")],
)
def test_a_method_that_refuses_is_left_out(loaded, tmp_path, monkeypatch, capsys, name, refuses):
  """Its reason is told once, and the other methods run; nobody is compared with them."""
  kvjax.settings.register(Fussy, example=lambda cls, budget: cls(refuses))
  monkeypatch.setitem(kvjax.METHODS, name, Fussy)
  rows = run(loaded, tmp_path, *BOTH, methods=(name, "snapkv"), batch=SAMPLES + 1)
  ran = {(row["task"], row["mode"], row["method"]) for row in rows}
  cells = [("needle", "aware"), ("needle", "agnostic"), ("kl", "aware")]
  wanted = {(*cell, method) for cell in cells for method in ("full", name, "snapkv")}
  refused = cells if refuses != "turns" else cells[1:2]
  wanted -= {(*cell, name) for cell in refused}
  wanted -= {("kl", "aware", "snapkv")} if name == "full" else set()
  assert ran == wanted
  told = capsys.readouterr().err
  for _, mode in refused:
    assert told.count(f"not run: {name}, {mode}, 480 tokens: no second turns") == 1


def test_cells_that_cannot_be_are_left_out(loaded, tmp_path, capsys):
  more = ("--lengths", "100", str(LENGTH), "--modes", "agnostic", "--data", str(tmp_path))
  rows = run(loaded, tmp_path, *more, tasks=("needle", "kl", "gsm8k"), methods=("full",))
  assert {(row["task"], row["length"]) for row in rows} == {("needle", LENGTH)}
  said = capsys.readouterr().err
  assert "not run: needle at 100 tokens: length: found 100 tokens, expected at least" in said
  assert "not run: kl, agnostic: there is no question apart from a context" in said
  assert "not run: gsm8k at 480 tokens: GSM8K" in said


def test_lengths_past_a_conversions_limit_are_refused_first(loaded, tmp_path, monkeypatch):
  model, tokenizer = loaded
  config = dataclasses.replace(model.config, limited=True, max_context=300)
  monkeypatch.setattr(model, "config", config)
  with pytest.raises(ValueError, match="--lengths: found 480, expected at most max_context = 300"):
    run((model, tokenizer), tmp_path / "out", "--lengths", "200", "480")
  assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_answers_take_what_their_prompts_leave(loaded, tmp_path, monkeypatch, capsys):
  (tmp_path / "gsm8k").mkdir()
  asked = "What is 1 + 1?", "Add up all of these numbers, one after another: " + "1, " * 9 + "1."
  lines = [json.dumps({"question": text, "answer": "#### 2"}) for text in asked]
  (tmp_path / "gsm8k/test.jsonl").write_text("\n".join(lines))
  monkeypatch.setenv("KVJAX_DATA", str(tmp_path))
  more = "--lengths", "240"
  rows = run(loaded, tmp_path / "out", *more, tasks=("gsm8k_chat",), methods=("full",), samples=2)
  assert len(rows) == 2 and "not run" not in capsys.readouterr().err
  assert all(row["answer_limit"] == 240 - row["prompt_tokens"] for row in rows)
  assert len({row["answer_limit"] for row in rows}) == 2
  more = ("--lengths", "240", "--answer-tokens", "5")
  with pytest.raises(ValueError, match="found results with answer_tokens = None, and now it is 5"):
    run(loaded, tmp_path / "out", *more, tasks=("gsm8k_chat",), methods=("full",), samples=2)
  rows = run(loaded, tmp_path / "short", *more, tasks=("gsm8k_chat",), methods=("full",), samples=2)
  assert {row["answer_limit"] for row in rows} == {5} and rows[0]["answer_tokens"] <= 5


# ---- stopping and going on


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_an_interrupted_run_goes_on(loaded, finished, tmp_path, seed):
  """Cut off anywhere, in the middle of a line too, again and again: the same rows come out."""
  out, rng = shutil.copytree(finished[0], tmp_path / "out"), random.Random(seed)
  for _ in range(4):
    written = (out / store.ROWS).read_bytes()
    (out / store.ROWS).write_bytes(written[: rng.randrange(len(written))])
    rows = run(loaded, out, *BOTH)
    assert rows == store.read(out) and len(rows) == len(finished[1])
    assert untimed(rows) == untimed(finished[1])


def test_a_finished_run_has_nothing_to_do(loaded, finished, monkeypatch):
  monkeypatch.setattr(evaluate.Runner, "_read", None)
  again = run(loaded, finished[0], *BOTH)
  assert again == finished[1]


@pytest.mark.slow
def test_packed_rows_are_read_and_added_to(loaded, finished, tmp_path):
  """More samples, methods and modes: only what is missing is run, and lies beside the packed."""
  few = run(loaded, tmp_path, samples=2, methods=("snapkv",))
  rows = tmp_path / store.ROWS
  packed = tmp_path / store.PACKED
  packed.write_bytes(gzip.compress(rows.read_bytes()))
  rows.unlink()
  assert store.read(tmp_path) == few
  more = run(loaded, tmp_path, *BOTH)
  assert more[: len(few)] == few
  assert len(rows.read_text().splitlines()) == len(more) - len(few)
  assert untimed(more) == untimed(finished[1])
  packed.write_bytes(packed.read_bytes()[:-9])
  with pytest.raises(ValueError, match=r"rows\.jsonl\.gz: damaged"):
    store.read(tmp_path)


@pytest.mark.slow
def test_parts_are_put_together(loaded, finished, tmp_path, monkeypatch, capsys):
  """Each row once, whatever is in both; a line that is being written is left to a later call."""
  parts = [tmp_path / "a", tmp_path / "b"]
  for part, method in zip(parts, METHODS, strict=True):
    run(loaded, part, *BOTH, methods=(method,))
  with open(parts[1] / store.ROWS, "ab") as file:
    file.write(b'{"task": "needle", "len')
  for part, named in zip(parts, "xy", strict=True):
    trace = {"method": named, "budget": 64, "length": LENGTH, "steps": 3, "reports": {}}
    both = {**trace, "method": "both"}
    (part / evaluate.TRACES).write_text(json.dumps([both, trace]))
  named = ("--add", *map(str, parts))
  out = tmp_path / "out"
  for name in ("load_model", "evaluate"):
    monkeypatch.setattr(evaluate.common if name == "load_model" else evaluate, name, None)
  for _ in range(2):
    evaluate.main(parse("--only-report", "--out", str(out), *named))
  monkeypatch.undo()
  rows = store.read(out)
  assert untimed(rows) == untimed(finished[1])
  assert len(rows) == len(finished[1])
  assert rows[: SAMPLES * 2 * 3] == store.read(parts[0])
  assert [trace["method"] for trace in evaluate.traces(out)] == ["both", "x", "y"]
  assert (out / "summary.txt").read_text() in capsys.readouterr().out
  assert len(json.loads((out / "summary.json").read_text())) == 9

  monkeypatch.setattr(evaluate.Runner, "_read", None)  # nothing is left to run
  arguments = (*BOTH, *named)
  again = run(loaded, tmp_path / "another", *arguments)
  assert again == rows == run(loaded, out, *arguments)


@pytest.mark.slow
def test_a_part_and_the_rest(loaded, finished, tmp_path):
  """What another folder has is not run again; what it lacks is."""
  part = run(loaded, tmp_path / "a", methods=("snapkv",), samples=2)
  rows = run(loaded, tmp_path / "b", *BOTH, "--add", str(tmp_path / "a"))
  assert rows[: len(part)] == part
  assert untimed(rows) == untimed(finished[1])


def test_parts_that_do_not_fit_are_refused(loaded, finished, tmp_path):
  with pytest.raises(ValueError, match="with batch = 2, and now it is 3: expected the same"):
    run(loaded, tmp_path / "three", "--add", str(finished[0]), batch=3)
  assert store.read(tmp_path / "three") == []
  with pytest.raises(FileNotFoundError, match=r"settings\.json: not found, expected results of"):
    evaluate.main(parse("--out", str(tmp_path / "two"), "--add", str(tmp_path / "none")))
  with pytest.raises(FileNotFoundError, match=r"rows\.jsonl: not found, expected results of"):
    evaluate.main(parse("--out", str(tmp_path / "two"), "--only-report"))
  with pytest.raises(ValueError, match="found no rows"):
    evaluate.main(parse("--out", str(tmp_path / "three"), "--only-report"))


def folder_of(version, path, rows, settings):
  """A folder with these rows, as that version of kvjax would have left it."""
  held = store.Store(path, {**settings, "kvjax": version})
  held.append(rows)
  held.close()
  return path


def merge(out, *folders):
  evaluate.main(parse("--only-report", "--out", str(out), "--add", *map(str, folders)))


def test_a_merge_takes_rows_of_several_versions_and_batches(finished, tmp_path):
  """Settings and report name each that has rows there; nothing else may differ."""
  _, rows = finished
  settings = store.settings_of(finished[0])
  new = folder_of("0.10.0", tmp_path / "new", rows[5:], settings)
  old = folder_of("0.9.1", tmp_path / "old", rows[:9], {**settings, "batch": 10})
  none = folder_of("0.8.0", tmp_path / "none", [], settings)
  out = tmp_path / "out"
  merge(out, none, new, old)
  both = {"kvjax": "0.9.1, 0.10.0", "batch": "2, 10"}
  assert store.settings_of(out) == settings | both
  assert store.read(out) == [*rows[5:], *rows[:5]]
  said = "\n  rows of kvjax 0.9.1, 0.10.0, in batches of 2, 10\n"
  assert said in (out / "summary.txt").read_text()
  merge(out, old, folder_of("0.8.0", tmp_path / "first", rows[:5], settings))  # all there already
  merge(tmp_path / "twice", old, out)
  for folder in (out, tmp_path / "twice"):
    assert store.settings_of(folder) == settings | both
    assert by_key(store.read(folder)) == by_key(rows)
  folder_of("0.8.0", tmp_path / "one", [], {**settings, "seed": 1})  # a run that came to no row
  merge(tmp_path / "one", old)
  assert store.settings_of(tmp_path / "one") == settings | {"kvjax": "0.9.1", "batch": 10}
  other = folder_of("0.9.1", tmp_path / "other", rows[:5], {**settings, "seed": 1})
  with pytest.raises(ValueError, match="other: found results with seed = 1, and now it is 0"):
    merge(out, other)


def test_a_run_of_another_version_does_not_go_on(loaded, finished, tmp_path):
  """Neither in its folder, nor with its rows, nor in the folder of a merge."""
  settings = store.settings_of(finished[0])
  old = folder_of("0.1.0", tmp_path / "old", finished[1][:9], settings)
  merge(tmp_path / "both", old, finished[0])
  for named in ((old,), (tmp_path / "new", "--add", str(old))):
    with pytest.raises(ValueError, match=r"old: found results with kvjax = '0\.1\.0', and now"):
      run(loaded, *named)
  with pytest.raises(ValueError, match=r"both: found results with kvjax = '0\.1\.0, "):
    run(loaded, tmp_path / "both")


def test_a_model_of_before_it_had_more_flags_is_the_same(finished, tmp_path):
  settings = store.settings_of(finished[0])
  config = {name: x for name, x in settings["config"].items() if name not in ("sinks", "windows")}
  old = folder_of(kvjax.__version__, tmp_path, finished[1][:1], settings)
  (old / store.SETTINGS).write_text(json.dumps(settings | {"config": config}))
  results = store.Store(old, settings)
  assert len(results.rows) == 1
  results.close()


def test_other_settings_are_refused(loaded, finished):
  with pytest.raises(ValueError, match="found results with seed = 0, and now it is 1"):
    run(loaded, finished[0], "--seed", "1")
  model = nnx.clone(loaded[0])
  model.config = dataclasses.replace(loaded[0].config, max_context=4096)
  with pytest.raises(ValueError, match="found results with config = "):
    evaluate.evaluate(parse(*arguments(finished[0])), model, loaded[1])


def test_two_runs_do_not_write_into_one_folder(finished):
  settings = json.loads((finished[0] / store.SETTINGS).read_text())
  first = store.Store(finished[0], settings)
  with pytest.raises(OSError, match="another run is writing there"):
    store.Store(finished[0], settings)
  first.close()
  store.Store(finished[0], settings).close()


def test_settings_without_rows_are_replaced(tmp_path):
  """A run came to none: its lengths were too short, or it was stopped while it compiled."""
  for batch in (5, 2):
    store.Store(tmp_path, {"batch": batch}).close()
  assert store.settings_of(tmp_path) == {"batch": 2}


def test_rows_without_settings_are_refused(tmp_path):
  (tmp_path / store.ROWS).write_text(f"{LINE}\n")
  with pytest.raises(ValueError, match="expected both or none"):
    store.Store(tmp_path, {})


LINE = json.dumps(dict(zip(store.KEY, ("t", 0, "aware", "full", None, 1), strict=True)))


@pytest.mark.parametrize(
  ("data", "what"),
  [
    ("[1]", "line 1: found task = None, length = None"),
    ('{"task": "t"}', "line 1: found length = None"),
    (LINE.replace('"t"', "[1]"), r"line 1: found task = \[1\], expected a row of results"),
    (LINE.replace(" 0", ' "0"'), "line 1: found length = '0', expected a row of results"),
    (f"{LINE}\n\0\0", "line 2: found "),
    (f"{LINE}\n\n{LINE}", "line 2: found "),
    (f'{LINE}\n{{"b"\n{{"c": 3}}', "line 2: found "),
    (f'{LINE}\n{LINE[:-1]}, "score": 1}}', "line 2: found another result of a row"),
    ("[" * 100_000, "line 1: found maximum recursion"),
    ("\udcff", "line 1: found"),
  ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_damaged_lines_are_named(tmp_path, data, what, packed):
  path = tmp_path / (store.PACKED if packed else store.ROWS)
  text = (data + "\n").encode("utf-8", "surrogateescape")
  path.write_bytes(gzip.compress(text) if packed else text)
  with pytest.raises(ValueError, match=rf"{re.escape(str(path))}: {what}"):
    store.read(tmp_path)


@pytest.mark.parametrize("data", ["{", "[]", "null", "[" * 100_000, ""])
def test_damaged_settings_are_named(tmp_path, data):
  (tmp_path / store.SETTINGS).write_text(data)
  with pytest.raises(ValueError, match=rf"{re.escape(str(tmp_path / store.SETTINGS))}: "):
    store.settings_of(tmp_path)


@pytest.mark.parametrize("cut", [*range(len(LINE) + 1), "zeros"])
def test_a_last_line_may_be_cut_off_anywhere(tmp_path, cut):
  """Only its end is missing: it is a row. Else it is left out, and another row may follow."""
  settings = {"kvjax": "0"}
  store.Store(tmp_path, settings).close()
  rest = "\0" * 9 if cut == "zeros" else LINE[:cut]
  (tmp_path / store.ROWS).write_text(LINE.replace("1", "0") + "\n" + rest)
  whole = [0, 1] if cut == len(LINE) else [0]
  assert [row["index"] for row in store.read(tmp_path)] == whole
  results = store.Store(tmp_path, settings)
  results.append([{**json.loads(LINE), "index": 2}])
  results.close()
  assert [row["index"] for row in store.read(tmp_path)] == [*whole, 2]


def test_rows_that_were_packed_and_left_are_there_once(tmp_path):
  (tmp_path / store.ROWS).write_text(f"{LINE}\n")
  (tmp_path / store.PACKED).write_bytes(gzip.compress(f"{LINE}\n".encode()))
  assert len(store.read(tmp_path)) == 1


def test_a_full_disk_is_named(tmp_path, monkeypatch):
  results = store.Store(tmp_path, {})

  def full(_):
    raise OSError(errno.ENOSPC, "No space left on device")

  monkeypatch.setattr(os, "fsync", full)
  with pytest.raises(OSError, match=r"rows\.jsonl: rows cannot be written: No space left"):
    results.append([json.loads(LINE)])
  results.close()


# ---- what results come from


def test_other_weights_of_the_same_name_are_refused(loaded, finished, tmp_path):
  """Of the same shapes and sums, in another order."""
  graph, state = nnx.split(loaded[0])
  model = nnx.merge(graph, jax.tree.map(lambda x: jnp.flip(x, -1), state))
  assert origin.weights(nnx.clone(loaded[0])) == origin.weights(loaded[0])
  found = r"with weights = '\w+', and now it is '\w+': expected the s"
  with pytest.raises(ValueError, match=found):
    run((model, loaded[1]), finished[0])
  with pytest.raises(ValueError, match=r"with weights = '\w+', and now it is"):
    run((model, loaded[1]), tmp_path / "b", "--add", str(finished[0]))
  settings = store.settings_of(finished[0])
  other = folder_of(kvjax.__version__, tmp_path / "c", [], settings | {"weights": "other"})
  with pytest.raises(ValueError, match="with weights = 'other', and now it is"):
    merge(tmp_path / "d", finished[0], other)


def test_one_changed_number_changes_the_weights():
  model = tiny.load()[0]
  before = origin.weights(model)
  graph, state = nnx.split(model)
  leaves, tree = jax.tree.flatten(state)
  leaves[-1] = leaves[-1].at[(0,) * leaves[-1].ndim].add(1e-3)
  assert origin.weights(nnx.merge(graph, jax.tree.unflatten(tree, leaves))) != before


def test_another_tokenizer_is_refused(loaded, finished):
  tokenizer = tiny.byte_tokenizer()
  tokenizer.chat_template = tokenizer.chat_template + " "
  with pytest.raises(ValueError, match="with tokenizer = "):
    run((loaded[0], tokenizer), finished[0])
  assert origin.tokenizer(tiny.byte_tokenizer()) == origin.tokenizer(loaded[1])


def test_folders_of_before_there_were_fingerprints_are_reported_on(loaded, finished, tmp_path):
  """Alone and beside others, which the settings then say; nothing is added to them."""
  settings = store.settings_of(finished[0])
  before = {name: x for name, x in settings.items() if name not in store.PRINTS}
  bare = [{name: x for name, x in row.items() if name != "data"} for row in finished[1]]
  old = folder_of(kvjax.__version__, tmp_path / "old", bare[:9], before)
  merge(tmp_path / "report", old)
  assert store.read(tmp_path / "report") == bare[:9]
  for named in ((tmp_path / "old",), (tmp_path / "new", "--add", str(old))):
    with pytest.raises(ValueError, match="results that do not say of which weights they are"):
      run(loaded, *named)
  for _ in range(2):
    merge(tmp_path / "both", old, finished[0], old)
  told = store.settings_of(tmp_path / "both")
  assert sorted(told["weights"].split(", ")) == sorted([settings["weights"], "not recorded"])
  assert len(store.read(tmp_path / "both")) == len(finished[1])
  with pytest.raises(ValueError, match=r"with weights = .*not recorded.*, and now it is"):
    run(loaded, tmp_path / "both")


def questions(folder, **changed):
  (folder / "gsm8k").mkdir(parents=True, exist_ok=True)
  question = {"question": "What is 1 + 1?", "answer": "#### 2"}
  (folder / "gsm8k/test.jsonl").write_text(json.dumps(question | changed) + "\n")


@pytest.mark.slow
@pytest.mark.parametrize(
  ("changed", "what"),
  [({"question": "What is 1 + 2?"}, "prompt"), ({"answer": "#### 3"}, "data")],
)
def test_other_data_is_refused(loaded, tmp_path, monkeypatch, changed, what):
  """Another question, or another reference to the same question; also where folders are merged."""

  def asked(out, data, *more):
    monkeypatch.setenv("KVJAX_DATA", str(data))
    return run(loaded, out, *more, "--lengths", "300", tasks=("gsm8k_chat",), methods=(), samples=1)

  questions(tmp_path / "a")
  questions(tmp_path / "b", **changed)
  rows = asked(tmp_path / "out", tmp_path / "a")
  assert asked(tmp_path / "out", tmp_path / "a") == rows and len(rows) == 1
  found = rf"gsm8k_chat at 300 tokens, aware, full, row 0: found results with {what} = '\w+' \("
  with pytest.raises(ValueError, match=found):
    asked(tmp_path / "out", tmp_path / "b")
  with pytest.raises(ValueError, match=found):
    asked(tmp_path / "added", tmp_path / "b", "--add", str(tmp_path / "out"))
  others = asked(tmp_path / "other", tmp_path / "b")
  mine = [{**row, "method": "snapkv"} for row in others]  # another method's on the other data
  (tmp_path / "others").mkdir()
  folder_of(kvjax.__version__, tmp_path / "others", mine, store.settings_of(tmp_path / "other"))
  for name in ("other", "others"):
    with pytest.raises(ValueError, match=rf"{name}: gsm8k_chat .*: found {what} = '\w+', but"):
      merge(tmp_path / f"merged {name}", tmp_path / "out", tmp_path / name)


OWN = """
import dataclasses
import kvjax
from own_helper import KEPT

@dataclasses.dataclass(frozen=True)
class Mine(kvjax.StreamingLLM):
  kept: int = KEPT

kvjax.settings.register(Mine, example=lambda cls, budget: cls(budget=budget))
"""


@pytest.mark.slow
@pytest.mark.parametrize("edited", ["own_helper", "own_method", "base"])
def test_an_edited_own_method_is_refused(loaded, tmp_path, monkeypatch, edited):
  """Its file, one that it imports, and as what another method is over; an unrelated one is free."""
  monkeypatch.syspath_prepend(tmp_path)
  names = ("own_method", "own_helper", "own_other")
  (tmp_path / "own_method.py").write_text(OWN)
  (tmp_path / "own_helper.py").write_text("KEPT = 1\n")
  (tmp_path / "own_other.py").write_text("")
  label = "own_method:Mine" if edited != "base" else "quantised+own_method:Mine"

  def asked():
    for name in names:
      sys.modules.pop(name, None)
    importlib.invalidate_caches()
    origin._file.cache_clear()
    return run(loaded, tmp_path / "out", methods=(label,), tasks=("needle",), samples=1, batch=1)

  try:
    rows = asked()
    (tmp_path / "own_other.py").write_text("X = 1\n")
    assert asked() == rows and "code" in rows[1] and "code" not in rows[0]
    path = tmp_path / ("own_method.py" if edited == "base" else f"{edited}.py")
    path.write_text(path.read_text() + "# another\n")
    with pytest.raises(ValueError, match=r"row 0: found results with code = '\w+' \(source files"):
      asked()
  finally:
    for name in names:
      sys.modules.pop(name, None)


def test_a_file_of_settings_that_changed_is_refused(loaded, tmp_path):
  """Gates are in the method's fields."""
  gates = tmp_path / "gates.tsv"
  label = f"duo_attention:pattern={gates}"

  def now(text):
    gates.write_text(text)
    method = plan.entries([label], ["64"], LENGTH)[1].method
    return {"settings": repr(method), "code": origin.own_code(method)}

  before = {**result(label, 0, 1), **now("0.9\t0.1\n0.2\t0.8\n")}
  origin.compare(before, now("0.9\t0.1\n0.2\t0.8\n"))
  with pytest.raises(ValueError, match=r"found results with settings = .* \(fields of the method"):
    origin.compare(before, now("0.9\t0.1\n0.8\t0.2\n"))


# ---- metrics that are not installed


def without(monkeypatch, package):
  """As if a package were not installed."""
  for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
    monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.slow
def test_a_missing_metric_stops_its_task_alone(loaded, tmp_path, monkeypatch, capsys):
  """Before the model answers; the others run, are kept, and the status says that not all did."""
  data = eval_data.write(tmp_path / "data")
  overlap._jieba.cache_clear()
  without(monkeypatch, "jieba")
  monkeypatch.setattr(evaluate.common, "load_model", lambda *a, **k: loaded)
  monkeypatch.setattr(sys, "argv", ["kvjax", "evaluate"])
  more = ("--data", str(data), "--lengths", "2000", "--no-chat")
  tasks = ("longbench_vcsum", "passkey", "needle")
  given = arguments(tmp_path / "out", *more, tasks=tasks, methods=("full",), samples=1, batch=1)
  monkeypatch.setenv("KVJAX_DATA", "")
  assert evaluate.main(parse(*given)) == 1
  said = capsys.readouterr()
  assert "not run: longbench_vcsum at 2,000 tokens: the package jieba (a metric) is" in said.err
  assert {row["task"] for row in store.read(tmp_path / "out")} == {"passkey", "needle"}
  given[given.index("longbench_vcsum")] = "passkey"
  assert evaluate.main(parse(*given)) == 0


@pytest.mark.parametrize(
  ("package", "names"),
  [
    ("jieba", ("longbench_dureader", "longbench_multifieldqa_zh", "longbench_vcsum")),
    ("rouge_score", ("infinitebench_longbook_sum_eng",)),
    ("math_verify", ("math500", "aime")),
  ],
)
def test_scorers_say_beforehand_what_they_lack(monkeypatch, package, names):
  """A trial imports what a scorer ever does, also where the first answer would not ask for it."""
  overlap._jieba.cache_clear()
  without(monkeypatch, package)
  for name in (*names, "needle", "gsm8k"):
    error = cells._unscorable(TASKS[name], Row("c", "q", "", ("1",), name, 8))
    if name in names:
      lacks = f"the package {package.replace('_', '-')} (a metric) is not installed: pip install"
      assert isinstance(error, ImportError) and str(error) == f"{lacks} 'kvjax[benchmarks]'"
    else:
      assert error is None


# ---- methods and budgets


def test_methods_with_every_budget():
  made = plan.entries(["streaming_llm", "snapkv:pool=7", "full"], ["64", "0.25"], 1000)
  each = [(label, budget) for label in ("streaming_llm", "snapkv:pool=7") for budget in (64, 250)]
  assert [(entry.label, entry.budget) for entry in made] == [("full", None), *each]
  assert made[3].method.pool == 7 and made[3].method.budget == 64
  for budget in ("lots", "0"):
    with pytest.raises(ValueError, match=f"--budgets: found '{budget}', expected tokens"):
      plan.entries(["snapkv"], [budget], 1000)


# ---- fitted apart from tested


def heads_of(tmp_path, **said):
  """A file of heads, and its label; it was fitted on text of its own, but for what is said."""
  path = tmp_path / "heads.json"
  record = fitted.record("made up", ["a text of its own"], model=None) | said
  path.write_text(json.dumps({"heads": [[1, 3, 0.5]], "fitted": record}))
  return path, f"ltri:heads={path},local=64,block=16,retrieved=1"


@pytest.mark.slow
def test_rows_say_what_their_heads_were_fitted_on(loaded, tmp_path):
  path, ltri = heads_of(tmp_path, task="fitting needle", seed=0, hidden=["no-such-key"])
  (tmp_path / "gates.tsv").write_text("0.9\t0.1\n0.2\t0.8\n")
  duo = f"duo_attention:pattern={tmp_path}/gates.tsv"
  more = {"tasks": ("needle",), "methods": (ltri, duo), "samples": 1}
  rows = run(loaded, tmp_path / "run", "--unknown-fit", **more)
  told = {row["method"]: row.get("fitted") for row in rows}
  known = fitted.Fitted("", fitted.of(path)).told()
  assert told == {"full": None, ltri: known, duo: "unknown"}
  assert known.startswith("made up, by SmolLM2-135M-Instruct (")


def test_heads_that_say_nothing_are_refused_unless_told(loaded, tmp_path):
  path = tmp_path / "heads.json"
  path.write_text('{"heads": [[1, 3, 0.5]]}')
  (tmp_path / "gates.tsv").write_text("0.9\t0.1\n0.2\t0.8\n")
  sizes = "local=64,block=16,retrieved=1"
  labels = [f"ltri:heads={path},{sizes}", f"duo_attention:pattern={tmp_path}/gates.tsv"]
  labels += [f"ltri:heads=((1,3,0.5),),{sizes}"]
  found = r"found nothing on what .* expected a record.*unknown-fit"
  for label in labels:
    with pytest.raises(ValueError, match=found):
      run(loaded, tmp_path / "run", methods=(label,))
    assert evaluate.entries(parse("--methods", label, "--unknown-fit"))
    assert [each.record for each in fitted.of_label(f"quantised+{label}")] == [None]
  assert not (tmp_path / "run").exists()
  bare = "ltri ltri:heads=None duo_attention:pattern=alternate snapkv:pool=7 hshare:heads=0.75"
  for label in bare.split():
    assert fitted.of_label(label) == ()


@pytest.mark.parametrize("shared", ["text", "seed", "key", "value", "continuation"])
def test_heads_are_not_tested_on_what_they_were_fitted_on(loaded, tmp_path, shared, monkeypatch):
  monkeypatch.setattr(divergence, "STEPS", 128)  # words enough to be known again
  task = "kl" if shared == "continuation" else "needle"
  row = TASKS[task].build(Reader(loaded[1]).count, length=LENGTH, seed=0, index=1)
  said = {
    "text": {"fingerprints": " ".join(fitted.fingerprints(row.context.upper()))},
    "seed": {"task": "needle", "seed": 0},
    "key": {"hidden": re.findall(r"for (\S+) mentioned", row.question)},
    "value": {"hidden": list(row.answers)},
    "continuation": {"fingerprints": " ".join(fitted.fingerprints(row.continuation))},
  }[shared]
  _, label = heads_of(tmp_path, **said)
  with pytest.raises(ValueError, match=f"heads=.*json: found .*{task}.*on which it was fitted"):
    run(loaded, tmp_path / "run", tasks=("kl", "needle"), methods=(label,))
  assert not store.read(tmp_path / "run")


def test_a_text_is_known_again():
  """A stretch of 76 words is found wherever it stands; other words of the same kind are not."""
  draw = random.Random(0)
  text, other = ([f"w{draw.randrange(500)}" for _ in range(2000)] for _ in range(2))
  marks = fitted.fingerprints(" ".join(text))
  for start in range(0, 1900, 50):
    within = [*other[:300], *text[start : start + 76], *other[300:600]]
    assert marks & fitted.fingerprints(", ".join(within).title())
  assert not marks & fitted.fingerprints(" ".join(other))
  assert len(marks) < 2000 / 20 and fitted.fingerprints(" … ") == set()
  assert len(fitted.fingerprints("two words")) == 1


@pytest.mark.parametrize("damage", ['{"fitted": 3}', '{"fitted": {"text": 1}}', '{"fitted"'])
def test_a_damaged_record_is_no_record(tmp_path, damage):
  path = tmp_path / "heads.json"
  path.write_text(damage)
  with pytest.raises(ValueError, match=r"heads\.json: found .*expected a record of what it was"):
    fitted.of(path)


def test_groups_hold_what_fits(loaded):
  """Dense methods share passes within the limit; the others read alone, after them."""
  model = loaded[0]
  made = plan.entries(["streaming_llm", "snapkv", "random", "h2o"], ["64"], LENGTH)
  full = plan.cache_bytes(kvjax.Full(), model, 2 + plan.read_at_once(2), LENGTH)

  def names(limit):
    return [[e.label for e in group] for group in plan.groups(made, model, 2, LENGTH, limit)]

  assert names(1e12) == [["full", "snapkv", "random", "h2o"], ["streaming_llm"]]
  assert names(1.15 * full) == [["full", "snapkv"], ["random", "h2o"], ["streaming_llm"]]
  assert names(0) == [["full"], ["snapkv"], ["random"], ["h2o"], ["streaming_llm"]]


# ---- summaries


def test_intervals_by_hand():
  """Wilson's for 8 of 10 is 0.490 to 0.943 (a textbook's example); 0 of n still has a width."""
  assert stats.wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
  assert stats.wilson(0, 50) == pytest.approx((0, 0.0713), abs=1e-4)
  shares = stats.estimate([1, 0, 1, 1])
  assert (shares.n, shares.mean, shares.interval) == (4, 0.75, "Wilson")
  values = np.random.default_rng(0).normal(3, 1, 400)
  means = stats.estimate(values)
  assert means.interval == "bootstrap" and means == stats.estimate(values)
  # The normal approximation of the mean's interval: bounds of 2,000 resamples have an error of
  # 0.003, those of an interval of 90 % lie 0.016 further in.
  assert means.low == pytest.approx(values.mean() - 1.96 * values.std() / 20, abs=0.005)
  assert means.high == pytest.approx(values.mean() + 1.96 * values.std() / 20, abs=0.005)
  with pytest.raises(ValueError, match="values: found none"):
    stats.estimate([])


def result(method, index, score, *, budget=None, cold=(), size=100, **more):
  made = eval_rows.row("t", method, budget, index, score, 8, cache_bytes=size, **more)
  made["seconds"]["cold"] = [*cold]
  return made


def test_a_summary_by_hand():
  """Relative values compare rows that both have; batches that compiled have no times."""
  rows = [
    result("x", 0, 1.0, budget=4, size=25, cold=["decode"]),
    result("x", 1, 0.0, budget=4, size=25),
    *(result("full", index, score) for index, score in enumerate((1.0, 0.0, 1.0, 0.0))),
  ]
  full, x = summary.summarise(rows)
  assert (full.method, full.score.n, full.score.mean, full.relative) == ("full", 4, 0.5, 1.0)
  assert (x.score.n, x.relative, x.share, x.cache_bytes) == (2, 1.0, 0.25, 25)
  assert x.step_seconds == pytest.approx(0.1) and x.prefill_seconds == 1.0
  lines = summary.table([full, x]).splitlines()
  said = "t 8 aware full – 4 50.0% 15.0% – 85.0% 100% 0.000 MB 100% 100.0"
  assert lines[2].split() == said.split()
  assert "Wilson" in lines[-2] and "bootstrap" not in lines[-2]
  assert lines[-1] == "  –: budget: the method takes none"
  (alone,) = summary.summarise(rows[:1])
  assert summary.table([alone]).splitlines()[-2:] == [
    "  –: of full: the full cache has no such rows, or scores 0 in them",
    "  –: ms: every batch compiled a program, or decoded no step",
  ]


H200 = {"device": "NVIDIA H200", "impl": "auto", "batch": 25, "config": {"kv_heads": 3}}
CPU = {**H200, "device": "cpu"}


@pytest.mark.parametrize(
  "label, length, settings, short",
  [
    ("art", 768, CPU, True),  # six tiles of 128: the first, five calm ones, and none to leave out
    ("art", 769, CPU, False),
    ("art:splits=fill", 2048, H200, True),  # 16 tiles in three splits
    ("art:splits=fill", 4096, H200, False),
    ("art:splits=fill", 2048, {**H200, "impl": "reference"}, False),
    ("art:splits=fill", 2048, {**H200, "batch": 50}, False),
    ("art", 2048, H200, False),
    ("art:splits=auto", 11 * 42 * 128, CPU, True),  # 42 walks a head, the base below 12 tiles each
    ("art:splits=auto", 11 * 42 * 128 + 1, H200, False),
    ("art:splits=4", 2048, CPU, True),
    ("art:patience=2,tile=256", 768, CPU, True),
    ("art:certify=0.1", 512, CPU, False),
    ("art:splits=auto,margin=8", 768, CPU, True),
    ("art:splits=auto,margin=8", 769, CPU, False),
    ("quest", 16, CPU, False),
    ("module:Class", 16, CPU, False),
  ],
)
def test_walks_that_are_too_short_to_end_early(label, length, settings, short):
  assert walks.too_short(label, None, length, settings) == short


def test_a_table_says_what_was_visited():
  """Column and note are there only where a method says it."""
  rows = [result("full", 0, 1.0), result("art", 0, 1.0, visited=0.5), result("x", 0, 1.0)]
  rows.append(result("art", 1, 1.0, visited=0.75))
  listed = summary.summarise(rows)
  assert {s.method: s.visited for s in listed} == {"full": None, "art": 0.625, "x": None}
  text = summary.table(listed)
  assert "visited" in text and text.count("62.5%") == 1 and "cannot stop" not in text
  short = summary.table(summary.summarise(rows, CPU))
  assert short.count("cannot stop") == 2 and "62.5%" not in short
  assert "visited" not in summary.table(summary.summarise(rows[:1]))


@pytest.mark.slow
def test_what_art_visits_is_in_its_rows(loaded, tmp_path):
  """All of it where it never ends, less where anything is stable; the answers stay as they were."""
  methods = ("art:patience=9e9", "art:tau=9e9,phi=9.0,patience=1,tile=32,splits=1")
  rows = run(loaded, tmp_path, tasks=("needle",), methods=methods, samples=2)
  shares = {row["method"]: row.get("visited") for row in rows}
  assert shares["full"] is None and shares[methods[0]] == 1
  seen = by_key(rows)["needle", LENGTH, "aware", methods[1], None, 1]["prompt_tokens"] + 1
  # The newest tile, which may be short, and the one before it.
  assert 32 < round(shares[methods[1]] * seen) <= 64
  answers = [row["answer"] for row in rows if row["method"] in ("full", methods[0])]
  assert answers[:2] == answers[2:]
  assert "visited" in evaluate.report(tmp_path, rows, "kvjax evaluate")


def test_a_report_is_kept(finished, loaded):
  out, rows = finished
  text = evaluate.report(out, rows, "kvjax evaluate --samples 3")
  assert (out / "summary.txt").read_text() == text + "\n"
  listed = json.loads((out / "summary.json").read_text())
  assert len(listed) == 9 and {entry["score"]["n"] for entry in listed} == {SAMPLES}
  assert "perplexity" in text and "Wilson" in text and "bootstrap" in text
  assert plan.MEANING["aware"] in text and text.endswith("made with: kvjax evaluate --samples 3")


@pytest.mark.slow
def test_what_was_visited_is_recorded(loaded, tmp_path, monkeypatch):
  """The full cache sees all that came before, a bounded one its budget; made once."""
  more = ("--trace", "3")
  run(loaded, tmp_path, *more, tasks=("needle",), methods=("snapkv",), samples=1)
  full, snapkv = made = json.loads((tmp_path / evaluate.TRACES).read_text())
  assert np.shape(full["reports"]["visited"]) == (3, loaded[0].config.layers)
  np.testing.assert_allclose(full["reports"]["visited"], 1)
  tokens = store.read(tmp_path)[0]["prompt_tokens"]
  expected = 64 / (tokens + np.arange(1, 4))[:, None]
  np.testing.assert_allclose(snapkv["reports"]["visited"], np.tile(expected, 2), atol=1e-5)
  monkeypatch.setattr(evaluate.tracing, "trace", None)
  run(loaded, tmp_path, *more, tasks=("needle",), methods=("snapkv",), samples=1)
  assert json.loads((tmp_path / evaluate.TRACES).read_text()) == made


def test_the_program_lists_what_there_is(capsys):
  evaluate.main(parse("--list"))
  said = capsys.readouterr().out
  assert all(name in said for name in (*TASKS, *kvjax.METHODS))
