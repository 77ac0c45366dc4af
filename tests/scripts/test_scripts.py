"""The programs: the demo's comparison on a tiny model, and what they share."""

import dataclasses
import io
import os
import pathlib
import random
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.models.decode.generate import prefill
from kvjax.programs import (
  bench,
  chat,
  clock,
  common,
  console,
  demo,
  evaluate,
  generate,
  retrieval_heads,
)
from kvjax.programs.clock import Clock
from kvjax.programs.evals import needle
from kvjax.programs.evals.prompt import Reader
from scripts.studies import certificate_study, hit_rates, needle_recall, record, sharing_study
from tests.processes import ROOT

LENGTH, BUDGET = 400, 64
SPEECH = "1862-Lincoln"
NO_SPEECH = (
  f"found {SPEECH!r}, expected a name such as '1790-Washington-1' (did you mean '{SPEECH}-1'?)"
)


# ---- the demo's comparison


def run_demo(loaded, *names):
  """The results of the demo's comparison, as they come."""
  how = {"length": LENGTH, "draw": random.Random(0), "max_new_tokens": demo.ANSWER_TOKENS}
  row = needle.build(Reader(loaded[1]).count, **how)
  return demo.contest(*loaded, row, names, length=LENGTH, budget=BUDGET)


DEMO = "full", "snapkv", "quest", "art", "cpe"
FEW = "full", "snapkv", "cpe"  # two that share a pass, one that does not


@pytest.mark.slow
@pytest.mark.parametrize("names", [FEW, DEMO], ids=["few", "all"])
def test_demo_compares_methods_with_full(names, loaded, capsys):
  jax.clear_caches()  # nothing that is timed was compiled by an earlier case
  results = demo.show(run_demo(loaded, *names))
  by_name = {r.name: r for r in results}
  full = by_name["full"]
  assert (full.top1, full.kl, full.share) == (1.0, 0.0, 1.0)
  # k, v in float32 and an int32 position per slot, plus two counters per layer.
  slots, heads, layers = LENGTH + demo.CONTINUATION_TOKENS, 2, 2
  assert full.cache_bytes == layers * (slots * heads * (2 * 8 * 4 + 4) + 2 * 4)
  assert by_name["snapkv"].share < 0.2
  assert by_name["snapkv"].kl > 0
  for r in results:
    assert r.kl >= -1e-6 and 0 <= r.top1 <= 1 and r.tokens_per_second > 0
    assert r.compile_seconds > 0 and r.prompt_seconds > 0 and r.decode_seconds > 0
    assert r.shared == (r.name != "cpe")
  reading, head, rule, *rows = capsys.readouterr().out.splitlines()
  assert f"tokens once for {', '.join(names[:-1])} " in reading
  assert [line.split()[0] for line in (head, *rows)] == ["method", *names]
  assert all(len(line) <= len(rule) for line in (head, *rows))


def test_demo_prints_a_row_before_the_next_method_runs(loaded, monkeypatch, capsys):
  began = []

  def run(self, name, *rest):
    began.append((name, capsys.readouterr().out))
    return ran(self, name, *rest)

  ran = demo.Contest.run
  monkeypatch.setattr(demo.Contest, "run", run)
  demo.show(run_demo(loaded, "full", "snapkv"))
  (full, before), (snapkv, between) = began
  assert (full, snapkv) == ("full", "snapkv")
  assert "once for full, snapkv" in before and before.splitlines()[-1].startswith("---")
  assert between.startswith("full ") and between.count("\n") == 1
  assert capsys.readouterr().out.startswith("snapkv ")


def test_demo_chooses_methods():
  assert demo.choose(demo.Args().methods) == DEMO
  assert demo.choose(()) == ("full",)
  assert demo.choose(("random", "full", "random")) == ("full", "random")
  every = demo.choose(("all",))
  assert every[0] == "full" and {*every, "kvzip"} == {*kvjax.METHODS} != {*every}


def test_the_demo_of_a_model_without_a_chat_template(loaded, monkeypatch, capsys):
  """It says that there is no chat, and asks for the needle in plain text."""
  model, tokenizer = loaded
  monkeypatch.setattr(tokenizer, "chat_template", None)
  monkeypatch.setattr(demo.common, "load_model", lambda checkpoint: (model, tokenizer))
  asked = []
  monkeypatch.setattr(demo, "contest", lambda *args, **how: asked.append(args[2]) or iter(()))
  demo.main(demo.Args(length=LENGTH, budget=BUDGET))
  assert "No chat: the checkpoint has no chat template" in capsys.readouterr().out
  assert len(asked) == 1 and len(Reader(tokenizer).row(asked[0]).ids) <= LENGTH


def test_chat_streams_an_answer(loaded, capsys):
  demo.chat(*loaded, "Who are you?", steps=12, capacity=128)
  assert "(12 tokens" in capsys.readouterr().out


def test_a_clock_counts_compiling_apart():
  """What is traced or compiled inside of something else, or while it is, counts once."""
  with Clock() as cold:
    jax.block_until_ready(jax.jit(lambda x: jax.jit(jnp.sin)(x) @ x)(jnp.ones((40, 40))))
  with Clock() as idle:
    time.sleep(0.05)
  assert 0 < cold.compiling < 60 and cold.running > 0
  assert idle.compiling == 0 and idle.running >= 0.05
  assert clock._covered([(0.0, 3.0), (1.0, 2.0), (4.0, 6.0), (5.0, 7.0)], 1.0) == 5.0


@pytest.mark.slow
def test_programs_keep_what_they_compile(tmp_path):
  """In the user's cache folder, whatever program it is."""
  program = """
import jax, jax.numpy as jnp
from kvjax.programs import common
with common.one_line_errors():
  jax.jit(jnp.sort)(jnp.ones(50)).block_until_ready()
"""
  env = {name: x for name, x in os.environ.items() if not name.startswith("JAX_")}
  env |= {"JAX_PLATFORMS": "cpu", "KVJAX_CACHE": str(tmp_path)}
  env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
  subprocess.run([sys.executable, "-c", program], env=env, cwd=ROOT, check=True)
  assert [path.name for path in tmp_path.iterdir()] == ["jax"]
  assert list((tmp_path / "jax").glob("jit_sort*"))


def test_what_programs_keep_is_where_somebody_said(jax_config, monkeypatch):
  """A folder that is set stays; programs of less than a second are kept too."""
  config = jax_config
  monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
  told = config.jax_compilation_cache_dir
  common.keep_programs()
  assert config.jax_compilation_cache_dir == told is not None
  assert config.jax_persistent_cache_min_compile_time_secs == 0.2
  monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "1")
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
  common.keep_programs()
  assert config.jax_persistent_cache_min_compile_time_secs == 1.0


def test_programs_are_dropped_before_they_are_too_many(monkeypatch, tmp_path):
  """By the maps that they take; what is wanted again is compiled again."""
  plus_one = jax.jit(lambda x: x + 1)
  maps = tmp_path / "maps"
  monkeypatch.setattr(common, "_MAPS", maps)
  for lines, dropped in ((20_000, False), (20_001, True)):
    maps.write_text("x\n" * lines)
    assert plus_one(1) == 2 and plus_one._cache_size() == 1
    assert common.drop_programs() == dropped
    assert plus_one._cache_size() == (not dropped)
  monkeypatch.setattr(common, "_MAPS", tmp_path / "none")  # not Linux
  assert not common.drop_programs()


# ---- record, and what the programs share


@pytest.mark.slow
def test_record_reports_what_attention_is_given(loaded, tmp_path):
  """Attention over the recorded arrays, done by hand, is the layer's output."""
  model, tokenizer = loaded
  T, layer = 40, 1
  args = record.Args(tmp_path / "x.npz", layers=(layer,), length=T, stride=7)
  arrays = record.record(model, tokenizer, "word " * T, args)
  assert list(arrays["positions"]) == [4, 11, 18, 25, 32, 39]
  q, k, v = (arrays[f"layer{layer}/{name}"].astype(np.float32) for name in "qkv")
  assert q.shape == (2, 2, 6, 8) and k.shape == v.shape == (2, T, 8)

  class Spy(kvjax.Full):
    def prefill(self, at, *rest):
      out, *others, aux = super().prefill(at, *rest)
      return out, *others, {**aux, "out": out}

  tokens, caches = arrays["tokens"][None], Spy().init_caches(model.spec(1, T))
  _, _, reports = prefill(model, tokens, np.array([T]), caches, Spy(), with_aux=True)
  attention = reports[layer]["out"][0][:, :, arrays["positions"]]
  logits = np.einsum("kgah,ksh->kgas", q, k) / np.sqrt(8)
  logits = np.where(np.arange(T) <= arrays["positions"][:, None], logits, -np.inf)
  out = np.einsum("kgas,ksh->kgah", jax.nn.softmax(logits), v)
  # float16 storage: 11 bits of q, k and v
  np.testing.assert_allclose(out, attention, atol=5e-3)


def test_record_refuses_bad_input(loaded, tmp_path, monkeypatch):
  model, tokenizer = loaded
  good = record.Args(tmp_path / "x.npz", layers=(0,), length=8)
  for change, message in (
    ({"layers": (2,)}, "--layers: found .2,., expected some of 0 to 1"),
    ({"stride": 0}, "--stride: found 0"),
    ({"length": 99}, "--length: found 99, expected 1 to 10"),
    ({"length": 0}, "--length: found 0, expected at least 1"),
  ):
    with pytest.raises(ValueError, match=message):
      record.record(model, tokenizer, "ten bytes.", dataclasses.replace(good, **change))
  monkeypatch.setattr(common, "load_model", lambda *_: loaded)
  with pytest.raises(ValueError, match=r"--layers: found \(0, -1\), expected some of 0 to 1"):
    hit_rates.main(hit_rates.Args(tmp_path / "x.json", layers=(0, -1)))
  capped = nnx.merge(*nnx.split(model))
  capped.config = dataclasses.replace(model.config, soft_cap=50.0)
  with pytest.raises(NotImplementedError, match=r"model: found a soft cap of 50\.0 on logits"):
    record.record(capped, tokenizer, "ten bytes.", good)


@pytest.mark.parametrize(
  ("args", "says"),
  [
    (demo.Args(budget=0), "--budget: found 0, expected at least 1"),
    (demo.Args(length=0), "--length: found 0, expected at least 1"),
    (demo.Args(chat_tokens=-1), "--chat-tokens: found -1, expected at least 0"),
    (demo.Args(depth=1.5), "--depth: found 1.5, expected a number from 0 to 1"),
    (generate.Args("Who?", budget=0), "--budget: found 0, expected at least 1"),
    (generate.Args("Who?", steps=-3), "--steps: found -3, expected at least 1"),
    (generate.Args("Who?", seed=-1), "--seed: found -1, expected an integer in [0, 4294967296)"),
    (chat.Args(seed=2**32), "--seed: found 4294967296, expected an integer in [0, 4294967296)"),
    (
      generate.Args("Who?", stop=("x", "")),
      "--stop: found ['x', ''], expected a list of non-empty strings",
    ),
    (generate.Args("Who?", prefill_chunk=0), "--prefill-chunk: found 0, expected at least 1"),
    (evaluate.Args(samples=0), "--samples: found 0, expected at least 1"),
    (evaluate.Args(tasks=()), "--tasks: found none, expected at least one"),
    (evaluate.Args(memory=-1.0), "--memory: found -1.0, expected a number above 0"),
    (evaluate.Args(lengths=(64, 0)), "--lengths: found 0, expected at least 1"),
    (
      generate.Args("Who?", method="h2o", prefill_chunk=8),
      "chunk: found 8, expected None for H2O(budget=1024, recent=None), which has to see a whole "
      "prompt before it chooses tokens",
    ),
    (
      generate.Args("Who?", method="tova", keep=ROOT),
      "--keep: found TOVA(budget=1024), which has to see a prompt at once",
    ),
    (
      chat.Args(temperature=-1.0),
      "Sampling.temperature: found -1.0, expected a finite number of at least 0",
    ),
    *(
      (study.Args(ROOT / "x.json", starts=(f"{SPEECH}-1", SPEECH)), f"--starts: {NO_SPEECH}")
      for study in (certificate_study, hit_rates, sharing_study)
    ),
    (record.Args(ROOT / "x.npz", start=SPEECH), f"--start: {NO_SPEECH}"),
    (sharing_study.Args(ROOT, steps=0), "--steps: found 0, expected at least 1"),
    (retrieval_heads.Args(ROOT, length=0), "--length: found 0, expected at least 1"),
    (
      retrieval_heads.Args(ROOT / "x.json", threshold=float("nan")),
      "--threshold: found nan, expected at least 0",
    ),
    (retrieval_heads.Args(ROOT), f"out: found {ROOT}, expected a name that ends in .json"),
    (
      retrieval_heads.Args(ROOT / "x.json", pattern=ROOT / "x.txt"),
      f"--pattern: found {ROOT / 'x.txt'}, expected a name that ends in .tsv",
    ),
    (needle_recall.Args(ROOT, block=0), "--block: found 0, expected at least 1"),
    (
      hit_rates.Args(ROOT / "x.json", length=300, history=301),
      "--history: found 301, expected at most the 300 tokens of --length",
    ),
  ],
)
def test_nonsense_numbers_end_a_program_in_one_line(args, says, monkeypatch, tmp_path):
  """Before it loads a model."""
  monkeypatch.setattr(common, "load_model", None)
  monkeypatch.setattr(common, "keep_programs", lambda: None)
  monkeypatch.delenv("KVJAX_TRACEBACK", raising=False)
  with pytest.raises(SystemExit) as end, common.one_line_errors():
    sys.modules[type(args).__module__].main(args)
  assert str(end.value).splitlines()[0] == f"error: {says}"


def test_a_model_is_called_as_its_folder(tmp_path, monkeypatch):
  (tmp_path / "mine" / "part").mkdir(parents=True)
  monkeypatch.chdir(tmp_path / "mine")
  given = (".", "../mine", "part/..", str(tmp_path / "mine"), "owner/mine")
  assert {common.model_name(pathlib.Path(name)) for name in given} == {"mine"}


def test_files_are_whole_or_not_there(tmp_path):
  target = tmp_path / "folder" / "x.json"
  with pytest.raises(KeyboardInterrupt), common.written_aside(target) as path:
    path.write_text("half")
    raise KeyboardInterrupt
  assert list(target.parent.iterdir()) == []
  with pytest.raises(IsADirectoryError, match="folder: found a folder, expected a file"):
    common.write(target.parent, "text")


def test_streamed_text_wraps_at_words(capsys):
  text = "one two three four\n\nfive six"
  streamer = console.Streamer(width=12)
  for end in range(len(text)):
    streamer.show(text[:end])
  streamer.show(text, final=True)
  assert capsys.readouterr().out == "  one two\n  three four\n\n  five six\n"


@pytest.mark.slow
def test_a_fleeting_step_leaves_nothing():
  terminal, log = io.StringIO(), io.StringIO()
  terminal.isatty = lambda: True
  for out in (terminal, log):
    with console.step("full: answering", out, fleeting=True):
      time.sleep(2 * console._TICK_SECONDS)
  assert log.getvalue() == ""
  shown = terminal.getvalue()
  assert "full: answering" in shown and shown.endswith("\r\x1b[K") and "\n" not in shown


# Those of developers that compile for ten seconds and more.
LONG = ("art", "art_e2e", "batcher", "cpe", "cuts", "e2e_sparse", "forked", "live", "longflow")
LONG += ("offload", "per_head", "prefill", "quantised", "scale")


@pytest.mark.slow
@pytest.mark.parametrize(
  "suite", [pytest.param(x, marks=[pytest.mark.sweep] * (x in LONG)) for x in bench.SUITES]
)
def test_every_suite_of_the_bench_runs(suite):
  """Tiny shapes, outputs compared: a bench that nobody runs falls behind the library.

  In a process of its own, where no annotation is checked.
  """
  command = [sys.executable, "-m", "kvjax.programs.bench", suite, "--quick", "--no-peers"]
  done = subprocess.run([*command, "--repetitions", "1"], capture_output=True, text=True)
  assert done.returncode == 0, done.stdout + done.stderr
