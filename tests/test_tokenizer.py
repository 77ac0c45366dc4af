"""The tokenizer of GGUF metadata: ids, bytes, streams, chat; the real one is in test_golden."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.tokenizer import Tokenizer
from tests.tiny_gguf import TOKENS, metadata


@pytest.fixture(scope="module")
def tokenizer():
  return Tokenizer.from_gguf(metadata())


def pieces(tokenizer, text):
  return [TOKENS[i] for i in tokenizer.encode(text)]


def test_worked_example(tokenizer):
  """Merges apply within a word, never across digits: "12" and " 1" have merges, and stay apart."""
  assert pieces(tokenizer, "hello hell") == ["hello", "Ġ", "hell"]
  assert pieces(tokenizer, "a hello 12") == ["a", "Ġhello", "Ġ", "1", "2"]
  assert pieces(tokenizer, "t t") == ["t", "Ġt"]


def test_special_tokens_are_recognised_and_skipped(tokenizer):
  ids = tokenizer.encode("<|im_start|>hello<|im_end|>")
  assert [TOKENS[i] for i in ids] == ["<|im_start|>", "hello", "<|im_end|>"]
  assert tokenizer.decode(ids) == "hello"
  assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>hello<|im_end|>"
  assert tokenizer.is_special(tokenizer.eos)
  assert not tokenizer.is_special(ids[1])


def test_bos(tokenizer):
  assert tokenizer.encode("hello", bos=True) == [tokenizer.bos, *tokenizer.encode("hello")]
  begins = Tokenizer.from_gguf({**metadata(), "tokenizer.ggml.add_bos_token": True})
  assert begins.encode("hello") == tokenizer.encode("hello", bos=True)
  assert begins.encode("hello", bos=False) == tokenizer.encode("hello")
  without = Tokenizer(tokenizer.backend)
  with pytest.raises(ValueError, match="no bos token"):
    without.encode("hello", bos=True)
  with pytest.raises(ValueError, match="add_bos: found True without"):
    Tokenizer(tokenizer.backend, add_bos=True)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_round_trip(tokenizer, text):
  assert tokenizer.decode(tokenizer.encode(text, bos=False), skip_special=False) == text


@given(st.lists(st.integers(0, len(TOKENS) - 1), max_size=30))
def test_stream_gives_the_same_text_and_no_half_characters(tokenizer, ids):
  stream = tokenizer.stream()
  text = "".join([*(stream.feed(i) for i in ids), stream.flush()])
  assert text == tokenizer.decode(ids)
  data = b"".join(tokenizer.token_bytes(i) for i in ids if not tokenizer.is_special(i))
  assert text == data.decode("utf-8", "replace")


def test_stream_waits_for_the_whole_character(tokenizer):
  stream = tokenizer.stream()
  assert [stream.feed(i) for i in tokenizer.encode("é🎉")] == ["", "é", "", "", "", "🎉"]
  assert stream.flush() == ""
  assert stream.feed(tokenizer.encode("é")[0]) == ""
  assert stream.flush() == "\ufffd"


def test_chat(tokenizer):
  messages = [{"role": "user", "content": "hello"}]
  text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
  assert tokenizer.render(messages) == text
  assert tokenizer.chat(messages) == tokenizer.encode(text)
  short = tokenizer.render(messages, add_generation_prompt=False)
  assert short == "<|im_start|>user\nhello<|im_end|>\n"


@pytest.mark.parametrize(
  ("template", "message"),
  [
    (None, "found none"),
    ("{{ raise_exception('only two roles') }}", "only two roles"),
    ("{% for %}", "does not take these messages"),
    ("{{ ''.__class__.__mro__ }}", "does not take these messages"),
    ("{{ messages.append(1) }}", "does not take these messages"),
  ],
)
def test_chat_template_that_fails(tokenizer, template, message):
  with pytest.raises(ValueError, match=rf"chat_template: .*{message}"):
    Tokenizer(tokenizer.backend, chat_template=template).chat([{"role": "user", "content": ""}])


def test_messages_without_content(tokenizer):
  with pytest.raises(ValueError, match="found keys \\['role'\\]"):
    tokenizer.chat([{"role": "user"}])


def test_save_and_load(tokenizer, tmp_path):
  tokenizer.save(tmp_path)
  again = Tokenizer.load(tmp_path)
  text = "hello 12 é <|im_start|>"
  assert again.encode(text) == tokenizer.encode(text)
  assert again.decode(again.encode(text)) == "hello 12 é "
  assert (again.bos, again.eos, again.add_bos) == (1, 2, False)
  assert again.chat_template == tokenizer.chat_template
  (tmp_path / "tokenizer_config.json").write_text('{"pad": 3}')
  with pytest.raises(ValueError, match=r"tokenizer_config\.json: found .*pad"):
    Tokenizer.load(tmp_path)


def test_ids_out_of_range(tokenizer):
  for token in (-1, len(TOKENS)):
    with pytest.raises(ValueError, match=f"found id {token}"):
      tokenizer.decode([token])
