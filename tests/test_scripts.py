"""The programs: their help, the needle task, and the demo's comparison on a tiny model."""

import dataclasses
import json
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import kvjax
from models.config import ModelConfig
from models.generate import prefill
from models.tokenizer import Tokenizer
from models.transformer import Transformer
from scripts import common, console, demo, needle, record

# Its oracle is PyTorch's transformers, which no extra of this project installs.
OUTSIDE = {"make_family_goldens", "make_golden"}
PROGRAMS = sorted(
  path.stem
  for path in pathlib.Path(demo.__file__).parent.glob("*.py")
  if "__main__" in path.read_text("utf-8") and path.stem not in OUTSIDE
)
ARGUMENTS = {
  "demo": ("--methods", "--length", "--budget", "--seed", "--json"),
  "generate": ("PROMPT", "--method", "--budget", "--temperature"),
  "convert_checkpoint": ("SOURCE", "DEST"),
  "calibrate_channels": ("OUT", "--text", "--samples", "--checkpoint"),
  "record": ("OUT", "--layers", "--stride"),
}
LENGTH, BUDGET = 600, 64
CHAT_TEMPLATE = (
  "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
  "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_names_the_arguments(name):
  run = subprocess.run(
    [sys.executable, "-m", f"scripts.{name}", "--help"], capture_output=True, text=True, timeout=300
  )
  assert run.returncode == 0, run.stderr
  assert "usage:" in run.stdout
  assert set(ARGUMENTS) <= set(PROGRAMS)
  for argument in ARGUMENTS.get(name, ()):
    assert argument in run.stdout


# ---- the needle task


def count(user: str, prefix: str) -> int:
  """Tokens of a stand-in tokenizer: words, and every punctuation mark beside them."""
  return len(re.findall(r"\w+|[^\w\s]", user + prefix))


def test_needle_by_hand():
  """Five sentences; at depth 0.4 the needle is the third."""
  words = "A b. C d. E f. G h. I j.".split()
  assert needle.hide(words, "Here.", 0.4) == "A b. C d. Here. E f. G h. I j."
  assert needle.hide(words, "Here.", 0.0).startswith("Here. A")
  assert needle.hide(words, "Here.", 1.0).endswith("j. Here.")
  assert needle.hide([], "Here.", 0.5) == "Here."


@given(length=st.integers(200, 6000), seed=st.integers(0, 10_000))
def test_needle_fills_its_budget(length, seed):
  row = needle.build(count, length=length, seed=seed, max_new_tokens=32)
  used = count(row.context + row.question, row.answer_prefix) + row.max_new_tokens
  assert 0.95 * length <= used <= length
  (value,) = row.answers
  assert re.fullmatch(r"\d{7}", value)
  key = re.search(r"number for (\S+) mentioned", row.question).group(1)
  assert row.context.count(needle.NEEDLE.format(key=key, value=value)) == 1
  assert row.context.count(value) == 1
  assert row.continuation
  assert row.depth in needle.DEPTHS


def test_needle_is_the_same_for_the_same_seed():
  rows = [needle.build(count, length=500, seed=seed) for seed in (7, 7, 8)]
  assert dataclasses.astuple(rows[0]) == dataclasses.astuple(rows[1])
  assert rows[0].context != rows[2].context


def test_needle_keeps_its_place_when_the_method_changes_nothing():
  early, late = (needle.build(count, length=800, seed=1, depth=d) for d in (0.1, 0.9))
  where = [row.context.index(row.answers[0]) / len(row.context) for row in (early, late)]
  assert where[0] < 0.3 < 0.7 < where[1]


def test_needle_refuses_bad_input():
  with pytest.raises(ValueError, match=r"depth: found 1\.5"):
    needle.build(count, length=500, depth=1.5)
  with pytest.raises(ValueError, match="length: found 20 tokens"):
    needle.build(count, length=20)
  with pytest.raises(ValueError, match="no speech is named 'Nobody'"):
    needle.words_from("Nobody", 1)


def test_words_go_on_in_a_circle():
  last, first = list(needle.speeches())[-1], next(iter(needle.speeches().values())).split()
  own = len(needle.speeches()[last].split())
  assert needle.words_from(last, own + 5)[own:] == first[:5]


def test_right_answers_contain_every_reference():
  assert needle.is_right("It is AB-12.", ("ab-12",))
  assert not needle.is_right("It is ab", ("ab", "cd"))


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


def tiny_row(tokenizer: Tokenizer, length: int) -> needle.Row:
  return needle.build(
    lambda user, prefix: len(demo.encode(tokenizer, user, prefix)),
    length=length,
    max_new_tokens=demo.ANSWER_TOKENS,
  )


def test_demo_compares_every_method_with_full(tiny, capsys):
  model, tokenizer = tiny
  names = demo.choose(("all",))
  assert names[0] == "full" and set(names) == set(kvjax.METHODS)
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
  assert demo.choose(())[0] == "full"
  assert demo.choose(("random", "full", "random")) == ("full", "random")
  with pytest.raises(ValueError, match="found nonsense, expected all or some of: full"):
    demo.choose(("nonsense",))


def test_chat_streams_an_answer(tiny, capsys):
  demo.chat(*tiny, "Who are you?", steps=12, capacity=128)
  assert "(12 tokens" in capsys.readouterr().out


def test_divergence_by_hand():
  """p = (1/2, 1/2), q = (1/4, 3/4): KL = ln 2 − (ln 3)/2; the likeliest token differs."""
  p = jnp.log(jnp.array([[0.5, 0.5], [0.9, 0.1]]))
  q = jnp.log(jnp.array([[0.25, 0.75], [0.9, 0.1]]))
  top1, kl = demo.compare(p, q)
  assert top1 == 0.5
  np.testing.assert_allclose(kl, (np.log(2) - np.log(3) / 2) / 2, rtol=1e-5)


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
