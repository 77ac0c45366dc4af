"""`kvjax.pipeline`: text, chats and batches, as the loop of prompt and steps answers them."""

import pytest

import kvjax
from kvjax.models.decode import pipeline
from kvjax.models.decode.generate import generate, pad, prefill
from kvjax.models.decode.pipeline import Pipeline
from kvjax.models.decode.sampling import Sampling
from kvjax.models.io import convert
from scripts.examples import tiny

QUESTION = "Name three rivers."


@pytest.fixture
def ask():
  return Pipeline(*tiny.load(), kvjax.SnapKV(budget=12, window_size=4))


def by_hand(ask, prompts, steps, **how):
  tokens, lengths = pad(prompts)
  spec = ask.model.spec(len(prompts), tokens.shape[1] + steps)
  caches = ask.method.init_caches(spec)
  logits, caches = prefill(ask.model, tokens, lengths, caches, ask.method)
  how |= {"steps": steps, "stop": ask.tokenizer.ends, "tokenizer": ask.tokenizer}
  return generate(ask.model, logits, caches, ask.method, **how)[0].texts


@pytest.mark.core(1)
def test_text_chat_and_batch(ask):
  chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
  ids = [ask.tokenizer.chat([{"role": "user", "content": QUESTION}]), ask.tokenizer.chat(chat)]
  assert ask(QUESTION, steps=9) == by_hand(ask, ids[:1], 9)[0] != ""
  assert ask(chat, steps=9) == by_hand(ask, ids[1:], 9)[0]
  assert ask([QUESTION, chat], steps=9) == by_hand(ask, ids, 9)
  plain = [*ask.tokenizer.prefix, *ask.tokenizer.encode(QUESTION, bos=False)]
  assert ask(QUESTION, steps=9, raw=True) == by_hand(ask, [plain], 9)[0]
  drawn = {"sampling": Sampling(temperature=2.0), "seed": 3}
  assert ask(QUESTION, steps=9, **drawn) == by_hand(ask, ids[:1], 9, **drawn)[0]


def test_stops_and_streams(ask):
  whole, parts = ask(QUESTION, steps=24), []
  mark = whole[5:8]
  said = ask(QUESTION, steps=24, stop=[mark], on_text=lambda new: parts.append(new[0]))
  assert said == "".join(parts) == whole[: whole.index(mark)]


def test_models_and_methods_are_named(tmp_path, monkeypatch):
  folder = tiny.huggingface_folder(tmp_path / "tiny")
  monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "cache"))
  ask = kvjax.pipeline(folder, "snapkv:window_size=4", budget=12)
  assert ask.method == kvjax.SnapKV(budget=12, window_size=4) and ask(QUESTION, steps=4, raw=True)
  with pytest.raises(ValueError, match=r"no chat template.*raw=True continues a text"):
    ask(QUESTION)
  made = convert.checkpoint(folder)
  ask = kvjax.pipeline(made, kvjax.Full(), dtype="bfloat16")
  assert ask.model.dtype == "bfloat16" and ask.method == kvjax.Full()
  monkeypatch.setattr(convert, "default_checkpoint", lambda: made)
  assert kvjax.pipeline().method == kvjax.Full()


def test_what_is_no_prompt_is_refused(ask, untyped, monkeypatch):
  for given, error, message in (
    ("  ", ValueError, "prompt: found '  ', expected a text"),
    ([], ValueError, "prompt: found no prompt"),
    ([QUESTION, ""], ValueError, "prompt: found '', expected a text"),
    ([3], TypeError, "prompt: found 3, expected a text"),
    ([["x"]], TypeError, r"prompt: found \['x'\], expected a text, or messages"),
    ([[]], TypeError, r"prompt: found \[\], expected a text, or messages"),
    (None, TypeError, "prompt: found None, expected a text"),
    (b"x", TypeError, "prompt: found b'x', expected a text"),
    ({"role": "user", "content": "x"}, TypeError, "prompt: found {'role': .*, expected a text"),
  ):
    with pytest.raises(error, match=message):
      ask(given)
  monkeypatch.setattr(pipeline, "prefill", None)  # which comes later
  for how, message in (
    ({"steps": -100}, "steps: found -100, expected at least 1"),
    ({"stop": "x"}, "stop: found 'x', expected a list of non-empty strings"),
    ({"seed": -1}, "seed: found -1, expected an integer in"),
    ({"sampling": 0.7}, "sampling: found 0.7, expected a Sampling"),
    ({"on_text": 3}, "on_text: found 3, expected a function"),
  ):
    with pytest.raises((ValueError, TypeError), match=message):
      ask(QUESTION, **how)
  with pytest.raises(TypeError, match=r"expected a text \(raw\), or messages"):
    ask([{"role": "user", "content": "x"}], raw=True)
  with pytest.raises(ValueError, match=r"method: found 'snapkw', .*did you mean 'snapkv'"):
    kvjax.pipeline(None, "snapkw")
  with pytest.raises(TypeError, match="method: found 3, expected a method or its label"):
    kvjax.pipeline(None, 3)
  with pytest.raises(TypeError, match="model: found 3, expected a path"):
    kvjax.pipeline(3)
  with pytest.raises(TypeError, match="budget: found '512', expected an integer"):
    kvjax.pipeline(None, "snapkv", budget="512")
