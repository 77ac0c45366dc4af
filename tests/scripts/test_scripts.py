"""The programs: their help, the demo's comparison on a tiny model, and what they share."""

import dataclasses
import json
import os
import pathlib
import random
import re
import runpy
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx

import kvjax
from models.config import ModelConfig
from models.generate import prefill
from models.tokenizer import Tokenizer
from models.transformer import Transformer
from scripts import common, console, demo, record
from scripts.evals import needle
from scripts.evals.prompt import Reader
from scripts.evals.task import Row

# Its oracle is PyTorch's transformers, which no extra of this project installs.
OUTSIDE = {"make_family_goldens", "make_golden"}
PROGRAMS = sorted(
  path.stem
  for path in pathlib.Path(demo.__file__).parent.glob("*.py")
  if "__main__" in path.read_text("utf-8") and path.stem not in OUTSIDE
)
ARGUMENTS = {
  "demo": ("--methods", "--length", "--budget", "--seed", "--json"),
  "generate": ("PROMPT", "--method", "--budget", "--temperature", "--context-file"),
  "convert_checkpoint": ("SOURCE", "DEST"),
  "retrieval_heads": ("OUT", "--samples", "--length", "--threshold", "--checkpoint"),
  "calibrate_channels": ("OUT", "--text", "--samples", "--checkpoint"),
  "art_study": ("NPZ", "--tile", "--least", "--out"),
  "hit_rates": ("OUT", "--length", "--history", "--layers"),
  "record": ("OUT", "--layers", "--stride"),
  "sharing_study": ("FOLDER", "--length", "--steps", "--budget"),
  "needle_recall": ("FOLDER", "--heads", "--length", "--window", "--samples", "--methods"),
  "plot_spans": ("FOLDER", "--text", "--length", "--local"),
  "on_gpu": ("--out", "--only", "--minutes"),
  "plot": ("RESULTS", "--out", "--pictures"),
  "evaluate": ("--tasks", "--methods", "--budgets", "--lengths", "--modes", "--samples", "--add"),
}
LENGTH, BUDGET = 600, 64
CHAT_TEMPLATE = (
  "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
  "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize("name", PROGRAMS)
def test_help_names_the_arguments(name, monkeypatch, capsys):
  monkeypatch.setattr(sys, "argv", [name, "--help"])
  monkeypatch.setattr(os, "environ", os.environ.copy())
  with pytest.raises(SystemExit) as end:
    runpy.run_module(f"scripts.{name}", run_name="__main__")
  out = capsys.readouterr().out
  assert not end.value.code and "usage:" in out
  assert set(ARGUMENTS) <= set(PROGRAMS)
  for argument in ARGUMENTS.get(name, ()):
    assert argument in out


# ---- the demo's comparison


@pytest.fixture(scope="module")
def tiny():
  """A random two-layer model and a tokenizer of one token per byte."""
  alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
  vocab = {c: i for i, c in enumerate(sorted(alphabet))}
  backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
  backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = tokenizers.decoders.ByteLevel()
  tokenizer = Tokenizer(backend, chat_template=CHAT_TEMPLATE)
  config = ModelConfig(
    vocab=256, dim=16, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=32, tie_embeddings=True
  )
  return Transformer(config, dtype=jnp.float32, rngs=nnx.Rngs(0)), tokenizer


def tiny_row(tokenizer: Tokenizer, length: int) -> Row:
  return needle.build(
    Reader(tokenizer).count,
    length=length,
    draw=random.Random(0),
    max_new_tokens=demo.ANSWER_TOKENS,
  )


@pytest.mark.parametrize(
  "chosen", [("random", "snapkv", "quest"), pytest.param(("all",), marks=pytest.mark.slow)]
)
def test_demo_compares_every_method_with_full(tiny, capsys, chosen):
  model, tokenizer = tiny
  names = demo.choose(chosen)
  assert names[0] == "full"
  row = tiny_row(tokenizer, LENGTH)
  results = demo.contest(model, tokenizer, row, names, length=LENGTH, budget=BUDGET)
  by_name = {r.name: r for r in results}
  full = by_name["full"]
  assert (full.top1, full.kl, full.share) == (1.0, 0.0, 1.0)
  # k, v in float32 and an int32 position per slot, plus two counters per layer.
  slots, heads, layers = LENGTH + demo.CONTINUATION_TOKENS, 2, 2
  assert full.cache_bytes == layers * (slots * heads * (2 * 8 * 4 + 4) + 2 * 4)
  assert by_name["random"].share < 0.2
  assert by_name["random"].kl > 0
  assert all(r.kl >= -1e-6 and 0 <= r.top1 <= 1 and r.tokens_per_second > 0 for r in results)
  table = demo.report(results).splitlines()
  assert len(table) == len(names) + 2
  assert "tokens once for " in capsys.readouterr().out


def test_demo_shared_prefill_gives_what_its_own_gives(tiny):
  """A member's continuation is the same as after a prefill of its own."""
  model, tokenizer = tiny
  row = tiny_row(tokenizer, LENGTH)
  shared = demo.contest(model, tokenizer, row, ("full", "random"), length=LENGTH, budget=BUDGET)[1]
  game = demo.Contest(model, tokenizer, row, LENGTH)
  for name in ("full", "random"):
    method = kvjax.METHODS[name].example(BUDGET)
    own = game.run(name, method, *game.read(method))
  assert own.answer == shared.answer
  np.testing.assert_allclose((own.top1, own.kl), (shared.top1, shared.kl), rtol=1e-4)


def test_demo_chooses_methods():
  assert demo.choose(())[0] == demo.choose(("all",))[0] == "full"
  assert set(demo.choose(("all",))) == set(kvjax.METHODS)
  assert demo.choose(("random", "full", "random")) == ("full", "random")
  with pytest.raises(ValueError, match="found nonsense, expected all or some of: full"):
    demo.choose(("nonsense",))


def test_chat_streams_an_answer(tiny, capsys):
  demo.chat(*tiny, "Who are you?", steps=12, capacity=128)
  assert "(12 tokens" in capsys.readouterr().out


# ---- record, and what the programs share


def test_record_reports_what_attention_is_given(tiny, tmp_path):
  """Attention over the recorded arrays, done by hand, is the layer's output."""
  model, tokenizer = tiny
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


def test_record_refuses_bad_input(tiny, tmp_path):
  model, tokenizer = tiny
  good = record.Args(tmp_path / "x.npz", layers=(0,), length=8)
  for change, message in (
    ({"layers": (2,)}, "--layers: found .2,., expected some of 0 to 1"),
    ({"stride": 0}, "--stride: found 0"),
    ({"length": 99}, "--length: found 99, expected 1 to 10"),
  ):
    with pytest.raises(ValueError, match=message):
      record.record(model, tokenizer, "ten bytes.", dataclasses.replace(good, **change))


def test_files_are_whole_or_not_there(tmp_path):
  target = tmp_path / "folder" / "x.json"
  with pytest.raises(KeyboardInterrupt), common.written_aside(target) as path:
    path.write_text("half")
    raise KeyboardInterrupt
  assert list(target.parent.iterdir()) == []
  with common.written_aside(target) as path:
    path.write_text(json.dumps({"a": 1}))
  assert [p.name for p in target.parent.iterdir()] == ["x.json"]


def test_streamed_text_wraps_at_words(capsys):
  text = "one two three four\n\nfive six"
  streamer = console.Streamer(width=12, indent="  ")
  for end in range(len(text)):
    streamer.show(text[:end])
  streamer.show(text, final=True)
  assert capsys.readouterr().out == "  one two\n  three four\n\n  five six\n"


def test_steps_read_well_in_a_log(capsys):
  with console.step("reading") as step:
    step.note("12 tokens/s")
  with pytest.raises(ValueError, match="x"), console.step("failing"):
    raise ValueError("x")
  done, failed = capsys.readouterr().out.splitlines()
  assert re.fullmatch(r"\[ *\d+\.\d s\] reading \.+ 12 tokens/s \d+\.\d s", done)
  assert failed.endswith(" stopped")
  assert len(done) == console._WIDTH
