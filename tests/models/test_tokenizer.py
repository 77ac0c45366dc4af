"""The tokenizer of GGUF metadata: ids, bytes, streams, chat; the real one is in test_golden."""

import itertools
import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from kvjax.models.tokenizer import Tokenizer
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


# ---- SentencePiece's way


SCORED = {
  "<unk>": (0.0, 2),
  "<s>": (0.0, 3),
  "</s>": (0.0, 3),
  **{f"<0x{byte:02X}>": (0.0, 6) for byte in range(256)},
  "▁he": (-1.0, 1),
  "he": (-2.0, 1),
  "ll": (-3.0, 1),
  "llo": (-4.0, 1),
  "▁hello": (-5.0, 1),
  "el": (-6.0, 1),
  **{c: (-10.0 - i, 1) for i, c in enumerate("▁helotw")},
}


def scored(**more):
  """Metadata as GGUF files of Llama 2 hold it."""
  tokens = list(SCORED)
  return {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": tokens,
    "tokenizer.ggml.scores": [score for score, _ in SCORED.values()],
    "tokenizer.ggml.token_type": [kind for _, kind in SCORED.values()],
    "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
    "tokenizer.ggml.eos_token_id": tokens.index("</s>"),
    **more,
  }


def by_score(text):
  """The algorithm itself: join the neighbours that make the token of the highest score, repeat."""
  pieces = list("▁" + text.replace(" ", "▁"))
  while True:
    joined = [a + b for a, b in itertools.pairwise(pieces)]
    known = [(-SCORED[p][0], i) for i, p in enumerate(joined) if p in SCORED]
    if not known:
      break
    i = min(known)[1]
    pieces[i : i + 2] = [joined[i]]
  out = []
  for piece in pieces:
    out += [piece] if piece in SCORED else [f"<0x{byte:02X}>" for byte in piece.encode()]
  return out


@pytest.fixture(scope="module")
def sentencepiece():
  return Tokenizer.from_gguf(scored())


def test_sentencepiece_worked_example(sentencepiece):
  assert sentencepiece.add_bos
  ids = sentencepiece.encode("hello wé")
  assert [list(SCORED)[i] for i in ids] == ["<s>", *by_score("hello wé")]
  assert by_score("hello wé") == ["▁hello", "▁", "w", "<0xC3>", "<0xA9>"]
  assert sentencepiece.decode(ids) == "hello wé"
  assert sentencepiece.decode(ids, skip_special=False) == "<s> hello wé"


@given(st.text("helo twé🎉", max_size=12))
def test_sentencepiece_equals_the_algorithm_and_its_own_decoder(sentencepiece, text):
  ids = sentencepiece.encode(text, bos=False)
  if text:
    assert [list(SCORED)[i] for i in ids] == by_score(text)
  assert sentencepiece.decode(ids) == sentencepiece.backend.decode(ids) == text


def test_sentencepiece_without_a_space_before(sentencepiece):
  plain = Tokenizer.from_gguf(scored(**{"tokenizer.ggml.add_space_prefix": False}))
  ids = plain.encode(" hello", bos=False)
  assert ids == sentencepiece.encode("hello", bos=False)
  assert plain.decode(ids) == " hello"


# ---- the cuts of other families


@pytest.mark.parametrize(
  ("pre", "text", "cuts"),
  [
    ("llama-bpe", "a 12345", ["a", "Ġ", "123", "45"]),
    ("qwen2", "a 123", ["a", "Ġ", "1", "2", "3"]),
    ("deepseek-r1-qwen", "x's\n\n y", ["x", "'s", "ĊĊ", "Ġy"]),
    ("glm4", "x's 1234", ["x", "'s", "Ġ", "123", "4"]),
    ("dbrx", "aBc 1234", ["aBc", "Ġ", "123", "4"]),
    ("gpt-4o", "aBc's 1234//\n", ["a", "Bc's", "Ġ", "123", "4", "//Ċ"]),
  ],
)
def test_cuts(pre, text, cuts):
  entries = {**metadata(), "tokenizer.ggml.pre": pre}
  del entries["tokenizer.ggml.add_bos_token"]
  made = Tokenizer.from_gguf(entries)
  found = made.backend.pre_tokenizer.pre_tokenize_str(text)
  assert [piece for piece, _ in found] == cuts
  assert made.add_bos == (pre == "llama-bpe")


def test_qwen_normalises():
  made = Tokenizer.from_gguf({**metadata(), "tokenizer.ggml.pre": "qwen2"})
  assert made.decode(made.encode("e\u0301")) == "\u00e9"


# ---- Hugging Face folders


def published(tokenizer, folder, **settings):
  """What a publisher's folder holds of a tokenizer."""
  tokenizer.backend.save(str(folder / "tokenizer.json"))
  (folder / "tokenizer_config.json").write_text(json.dumps(settings))
  return folder


def test_huggingface_folder(tokenizer, tmp_path):
  folder = published(
    tokenizer,
    tmp_path,
    bos_token={"content": "<|im_start|>", "lstrip": False},
    eos_token="<|im_end|>",
    chat_template="{{ bos_token }}{{ messages[0]['content'] }}",
    add_bos_token=True,
    model_max_length=128,
  )
  made = Tokenizer.from_huggingface(folder)
  assert (made.bos, made.eos, made.add_bos) == (1, 2, True)
  assert made.encode("hello", bos=False) == tokenizer.encode("hello")
  assert made.render([{"role": "user", "content": "x"}]) == "<|im_start|>x"
  (folder / "chat_template.jinja").write_text("{% for m in messages %}{% break %}{% endfor %}y")
  assert Tokenizer.from_huggingface(folder).render([{"role": "user", "content": "x"}]) == "y"


def test_huggingface_folder_whose_post_processor_begins_with_bos(tokenizer, tmp_path):
  """Llama 3 says add_bos nowhere else."""
  backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
  single = "<|im_start|> $A"
  backend.post_processor = tokenizers.processors.TemplateProcessing(
    single=single, special_tokens=[("<|im_start|>", 1)]
  )
  folder = published(Tokenizer(backend), tmp_path, bos_token="<|im_start|>")
  made = Tokenizer.from_huggingface(folder)
  assert made.add_bos
  assert made.encode("hello") == [1, *tokenizer.encode("hello")]
  (folder / "tokenizer_config.json").unlink()
  bare = Tokenizer.from_huggingface(folder)
  assert (bare.bos, bare.eos, bare.add_bos, bare.chat_template) == (None, None, False, None)


def test_named_chat_templates(tokenizer, tmp_path):
  templates = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
  folder = published(tokenizer, tmp_path, chat_template=templates)
  assert Tokenizer.from_huggingface(folder).chat_template == "d"


def test_bad_huggingface_folder(tokenizer, tmp_path):
  with pytest.raises(FileNotFoundError, match=r"tokenizer\.json: not found, expected a Hugging"):
    Tokenizer.from_huggingface(tmp_path)
  folder = published(tokenizer, tmp_path, bos_token="<s>")
  with pytest.raises(ValueError, match=r"tokenizer_config\.json: bos_token: found '<s>'"):
    Tokenizer.from_huggingface(folder)
  for text in ("{", "[]"):
    (folder / "tokenizer_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: .*expected an object"):
      Tokenizer.from_huggingface(folder)
  tokenizer.backend.save(str(folder / "tokenizer.json"))
  published(tokenizer, folder)
  state = json.loads((folder / "tokenizer.json").read_text())
  state["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
  (folder / "tokenizer.json").write_text(json.dumps(state))
  with pytest.raises(NotImplementedError, match=r"tokenizer\.json: .*found \['WordPiece'\]"):
    Tokenizer.from_huggingface(folder)
