"""The tokenizer of GGUF metadata: ids, bytes, streams, chat; the real one is in test_golden."""

import itertools
import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from kvjax.models.io.tokenizer import Tokenizer
from tests.tiny_gguf import BYTES, SPECIALS, TOKENS, metadata


@pytest.fixture(scope="module")
def tokenizer():
  return Tokenizer.from_gguf(metadata())


HELLO = [{"role": "user", "content": "hello"}]


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
  data = bytes(BYTES[c] for i in ids if not tokenizer.is_special(i) for c in TOKENS[i])
  assert text == data.decode("utf-8", "replace")


def test_stream_waits_for_the_whole_character(tokenizer):
  stream = tokenizer.stream()
  assert [stream.feed(i) for i in tokenizer.encode("é🎉")] == ["", "é", "", "", "", "🎉"]
  assert stream.flush() == ""
  assert stream.feed(tokenizer.encode("é")[0]) == ""
  assert stream.flush() == "\ufffd"


def test_chat(tokenizer):
  text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
  assert tokenizer.render(HELLO) == text
  assert tokenizer.chat(HELLO) == tokenizer.encode(text)
  short = tokenizer.render(HELLO, add_generation_prompt=False)
  assert short == "<|im_start|>user\nhello<|im_end|>\n"
  with pytest.raises(ValueError, match=r"found keys \['role'\]"):
    tokenizer.chat([{"role": "user"}])


@pytest.mark.parametrize(
  ("template", "message"),
  [
    (None, "found none"),
    ("{{ raise_exception('only two roles') }}", "only two roles"),
    ("{% for %}", "does not take these messages"),
    ("{{ 'x'|no_filter }}", "No filter named 'no_filter'"),
    ("{{ no_function() }}", "'no_function' is undefined"),
    ("{% no_block %}", "unknown tag 'no_block'"),
    ("{{ ''.__class__.__mro__ }}", "does not take these messages"),
    ("{{ messages.append(1) }}", "does not take these messages"),
  ],
)
def test_chat_template_that_fails(tokenizer, template, message):
  with pytest.raises(ValueError, match=rf"chat_template: .*{message}"):
    Tokenizer(tokenizer.backend, chat_template=template).chat([{"role": "user", "content": ""}])


def test_save_and_load(tokenizer, tmp_path):
  tokenizer.save(tmp_path)
  again = Tokenizer.load(tmp_path)
  text = "hello 12 é <|im_start|>"
  assert again.encode(text) == tokenizer.encode(text)
  assert again.decode(again.encode(text)) == "hello 12 é "
  assert (again.bos, again.eos, again.add_bos) == (1, 2, False)
  assert again.chat_template == tokenizer.chat_template
  # Converted before ends were kept: what the template closes an answer with.
  old = {"bos": 1, "eos": 0, "add_bos": False, "rows": None}
  old["chat_template"] = tokenizer.chat_template
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(old))
  assert Tokenizer.load(tmp_path).ends == (0, 2)
  (tmp_path / "tokenizer_config.json").write_text('{"pad": 3}')
  with pytest.raises(ValueError, match=r"tokenizer_config\.json: found .*pad"):
    Tokenizer.load(tmp_path)


@pytest.mark.usefixtures("untyped")
def test_ids_out_of_range(tokenizer):
  for token in (-1, len(TOKENS)):
    with pytest.raises(ValueError, match=f"found id {token}"):
      tokenizer.decode([token])
  for token in (1.5, 1.0, "a", None):
    for read in (lambda token: tokenizer.decode([token]), tokenizer.stream().feed):
      with pytest.raises(TypeError, match=f"token: found {token!r}, expected an integer"):
        read(token)


@pytest.mark.usefixtures("untyped")
def test_what_is_no_text_or_list_is_named(tokenizer):
  for call, name in (
    (tokenizer.encode, "text"),
    (lambda x: tokenizer.encode("a", after=x), "after"),
    (tokenizer.decode, "ids"),
    (tokenizer.chat, "messages"),
  ):
    with pytest.raises(TypeError, match=rf"{name}: found 3, expected a (string|list of)"):
      call(3)
  with pytest.raises(TypeError, match=r"messages: found {'role': 'user'}, expected a list of"):
    tokenizer.chat({"role": "user"})


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
  """Nowhere; behind no marker, where Mistral's later files have markers for instructions."""
  tokens = ["[INST]" if token == "</s>" else token for token in SCORED]
  marked = Tokenizer.from_gguf(scored(**{"tokenizer.ggml.tokens": tokens}))
  ids = marked.encode("hello[INST]hello[INST] hello", bos=False)
  pieces = ["▁hello", "[INST]", "he", "llo", "[INST]", "▁hello"]
  assert [tokens[i] for i in ids] == pieces
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


def copied(tokenizer):
  return tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())


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
  assert made.render(HELLO) == "<|im_start|>hello"
  (folder / "chat_template.jinja").write_text("{% for m in messages %}{% break %}{% endfor %}y")
  assert Tokenizer.from_huggingface(folder).render(HELLO) == "y"


def around(tokenizer, single):
  """A copy whose post-processor puts tokens around a text."""
  backend = copied(tokenizer)
  named = [("<|im_start|>", 1), ("<|im_end|>", 2)]
  processor = tokenizers.processors.TemplateProcessing(single=single, special_tokens=named)
  backend.post_processor = processor
  return Tokenizer(backend)


def test_huggingface_folder_whose_post_processor_begins_with_bos(tokenizer, tmp_path):
  """Llama 3 says add_bos nowhere else."""
  whole = around(tokenizer, "<|im_start|> $A")
  folder = published(whole, tmp_path, bos_token="<|im_start|>")
  made = Tokenizer.from_huggingface(folder)
  assert made.add_bos
  assert made.encode("hello") == [1, *tokenizer.encode("hello")]
  (folder / "tokenizer_config.json").unlink()
  bare = Tokenizer.from_huggingface(folder)
  assert (bare.bos, bare.eos, bare.add_bos, bare.chat_template) == (None, None, False, None)


MARK = b"\xef\xbb\xbf"  # of the byte order: what Windows' editors put before a text


def test_files_may_begin_with_a_mark_of_their_byte_order(tokenizer, tmp_path):
  """It is no part of what they say; a template's would begin every prompt."""
  folder = published(tokenizer, tmp_path, bos_token="<|im_start|>", eos_token="<|im_end|>")
  (folder / "special_tokens_map.json").write_text('{"pad_token": "hello"}')
  (folder / "generation_config.json").write_text('{"eos_token_id": 5}')
  (folder / "config.json").write_text("{}")
  (folder / "chat_template.jinja").write_text("x\r\ny", newline="")
  (folder / "additional_chat_templates").mkdir()
  (folder / "additional_chat_templates" / "rag.jinja").write_text("z")
  for file in folder.rglob("*.j*"):
    file.write_bytes(MARK + file.read_bytes())
  made = Tokenizer.from_huggingface(folder)
  assert made.ends == (2, 5) and made.special_tokens["pad_token"] == "hello"
  assert (made.chat_template, made.templates) == ("x\ny", {"rag": "z"})


def test_named_chat_templates(tokenizer, tmp_path):
  """A list in the settings; files of their own go before it; one for tools is taken for tools."""
  templates = [{"name": "tool_use", "template": "{{ tools[0].name }}"}]
  folder = published(tokenizer, tmp_path, chat_template=templates)
  made = Tokenizer.from_huggingface(folder)
  with pytest.raises(ValueError, match=r"found None, expected one of .* \['tool_use'\]"):
    made.render(HELLO)
  published(tokenizer, tmp_path, chat_template=[*templates, {"name": "default", "template": "d"}])
  assert Tokenizer.from_huggingface(folder).chat_template == "d"
  (folder / "chat_template.json").write_text('{"chat_template": "old"}')
  assert Tokenizer.from_huggingface(folder).chat_template == "d"
  (folder / "additional_chat_templates").mkdir()
  (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ documents|length }} rag")
  made = Tokenizer.from_huggingface(folder)
  made.save(tmp_path)
  made = Tokenizer.load(tmp_path)
  assert made.render(HELLO) == made.render(HELLO, template="default") == "d"
  assert made.render(HELLO, tools=[{"name": "f"}]) == "f"
  assert made.render(HELLO, template="rag", documents=[{"title": "t", "text": "x"}]) == "1 rag"
  with pytest.raises(ValueError, match=r"template: found 'other', expected .* \['default', 'rag'"):
    made.render(HELLO, template="other")


def test_bad_huggingface_folder(tokenizer, tmp_path, untyped):
  with pytest.raises(FileNotFoundError, match=r"tokenizer\.json: not found, expected a Hugging"):
    Tokenizer.from_huggingface(tmp_path)
  folder = published(tokenizer, tmp_path, chat_template="\\ud83d \U0001f600")
  assert Tokenizer.from_huggingface(folder).chat_template == "\\ud83d \U0001f600"
  wrong = (2, ["<|im_end|>"], {"id": 2, "content": 7})
  for text, message in (
    ('{"bos_token": "<s>"}', "bos_token: found '<s>'"),
    *((json.dumps({"eos_token": x}), "eos_token: found .*text, or nu") for x in wrong),
    ('{"chat_template": "\\ud83d"}', r"found a lone surrogate \\ud83d, expected"),
    *((text, ".*expected an object") for text in ("{", "[]")),
  ):
    (folder / "tokenizer_config.json").write_text(text)
    with pytest.raises(ValueError, match=rf"tokenizer_config\.json: {message}"):
      Tokenizer.from_huggingface(folder)
  published(tokenizer, folder, bos_token=SPECIALS[1], add_bos_token="false")
  with pytest.raises(ValueError, match="add_bos: found 'false', expected bool"):
    Tokenizer.from_huggingface(folder)
  published(tokenizer, folder)
  state = json.loads((folder / "tokenizer.json").read_text())
  state["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
  (folder / "tokenizer.json").write_text(json.dumps(state))
  with pytest.raises(NotImplementedError, match=r"tokenizer\.json: .*found \['WordPiece'\]"):
    Tokenizer.from_huggingface(folder)


def test_added_tokens_may_lie_behind_the_last_row(tokenizer, tmp_path):
  """They are refused where a text has them, and end no answer."""
  backend = copied(tokenizer)
  rows = len(TOKENS)
  backend.add_special_tokens(["<image>"])
  made = Tokenizer(backend, eos=2, ends=[rows], rows=rows)
  assert made.size == rows + 1 and made.added_from(rows) == 1 and made.ends == (2,)
  with pytest.raises(ValueError, match=rf"found token '<image>' of id {rows}, expected ids in"):
    made.encode("a <image>")
  with pytest.raises(ValueError, match=rf"rows: found {rows - 1}, expected at least {rows}"):
    made.fit(rows - 1)
  assert made.decode([rows]) == ""
  assert made.decode([rows], skip_special=False) == "<image>"


# ---- what a tokenizer's file has kept from training


@pytest.mark.parametrize("kept", ["truncation", "padding", "dropout"])
def test_texts_are_encoded_whole_and_as_they_are(tokenizer, tmp_path, kept):
  backend = copied(tokenizer)
  match kept:
    case "truncation":
      backend.enable_truncation(max_length=4, stride=1, direction="left")
    case "padding":
      backend.enable_padding(length=64, direction="left", pad_id=0, pad_token="<|endoftext|>")
    case "dropout":
      backend.model.dropout = 1.0
  backend.save(str(tmp_path / "tokenizer.json"))
  text = "hello 12 hello hello"
  made = Tokenizer.from_huggingface(tmp_path)
  assert made.encode(text) == tokenizer.encode(text)
  made.save(tmp_path)
  assert Tokenizer.load(tmp_path).encode(text) == tokenizer.encode(text)
  state = json.loads((tmp_path / "tokenizer.json").read_text())
  assert state["truncation"] is state["padding"] is state["model"]["dropout"] is None


# ---- what is around a text


@pytest.mark.parametrize(
  ("settings", "begin", "end"),
  [
    ({}, [1], [2]),
    ({"add_bos_token": False}, [], [2]),
    ({"add_eos_token": False}, [1], []),
    ({"add_bos_token": True, "add_eos_token": True}, [1], [2]),
  ],
)
def test_prefixes_and_suffixes(tokenizer, tmp_path, settings, begin, end):
  """Of the post-processor, unless the settings know better of bos and eos."""
  whole = around(tokenizer, "<|im_start|> $A <|im_end|>")
  names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
  made = Tokenizer.from_huggingface(published(whole, tmp_path, **names, **settings))
  hello = tokenizer.encode("hello")
  assert made.encode("hello") == begin + hello + end
  assert (made.prefix, made.suffix) == (begin, end)
  assert made.encode("hello", bos=True) == [1, *hello]
  assert made.encode("hello", bos=False) == hello
  if not settings:
    assert made.encode("hello") == whole.backend.encode("hello").ids


def test_a_fragment_has_no_prefix_of_its_own(sentencepiece):
  def pieces(text, after):
    return [list(SCORED)[i] for i in sentencepiece.encode(text, after=after)]

  assert pieces("hello", "we ") == ["he", "llo"]
  assert pieces(" hello", "we") == ["▁hello"]
  assert pieces("llo", "we") == ["llo"]
  assert pieces("llo", "he") == ["llo"]  # the whole's "llo" begins at the seam, too
  assert pieces("o", "hell") == ["o"]  # "llo" reaches over the seam


# ---- text that is not Unicode


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("ok\ud800bad", r"a lone surrogate U\+D800, .*UTF-8 .*at character 2"),
    (b"caf\xe9".decode("utf-8", "surrogateescape"), "a byte 0xE9 that is no UTF-8 at character 3"),
  ],
)
def test_text_that_is_not_unicode(tokenizer, text, message):
  for encode in (tokenizer.encode, lambda x: tokenizer.chat([{"role": "user", "content": x}])):
    with pytest.raises(ValueError, match=message):
      encode(text)


# ---- ends of an answer


def test_ends_of_a_huggingface_folder(tokenizer, tmp_path):
  """Of three files and the template's own close; numbers or lists; what is no token is nothing."""
  text = "{% for m in messages %}{{ m.content }}<|im_start|>{% endfor %}"
  folder = published(tokenizer, tmp_path, eos_token="<|im_end|>", chat_template=text)
  assert Tokenizer.from_huggingface(folder).ends == (2, 1)
  (folder / "config.json").write_text('{"eos_token_id": 0}')
  (folder / "generation_config.json").write_text('{"eos_token_id": [5, 2, 100000]}')
  made = Tokenizer.from_huggingface(folder)
  assert made.eos == 2 and made.ends == (2, 5, 0, 1)
  made.save(tmp_path)
  assert Tokenizer.load(tmp_path).ends == (2, 5, 0, 1)
  (folder / "generation_config.json").write_text('{"eos_token_id": ["2"]}')
  with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id: found \['2'\]"):
    Tokenizer.from_huggingface(folder)
  # Without a name in the settings.
  published(tokenizer, tmp_path)
  (folder / "config.json").write_text("{}")
  (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
  made = Tokenizer.from_huggingface(folder)
  assert made.eos is None and made.ends == (2,)


def test_ends_of_gguf():
  entries = {**metadata(), "tokenizer.chat_template": "{{ messages[0].content }}"}
  assert Tokenizer.from_gguf(entries).ends == (2, 0)  # <|endoftext|>, as Qwen's folders say
  entries |= {"tokenizer.ggml.eot_token_id": 1, "tokenizer.ggml.eom_token_id": 0}
  assert Tokenizer.from_gguf(entries).ends == (2, 1, 0)
  # Old files name none of them: control tokens that end an answer in every model.
  entries = {**metadata(), "tokenizer.ggml.eos_token_id": 0}
  entries["tokenizer.chat_template"] = "{{ messages[0].content }}"
  assert Tokenizer.from_gguf(entries).ends == (0, 2)


@pytest.mark.parametrize("kind", [1, 4], ids=["normal", "user defined"])
@pytest.mark.parametrize("end", ["<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>"])
def test_ends_that_a_converter_took_for_text(kind, end):
  """Whatever their type, they are found in a text, left out of it, and end an answer."""
  tokens = [end if token == "<|im_end|>" else token for token in TOKENS]
  kinds = [kind if token == end else 3 if token in TOKENS[:3] else 1 for token in tokens]
  entries = {**metadata(), "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
  made = Tokenizer.from_gguf({**entries, "tokenizer.ggml.eos_token_id": 0})
  assert made.ends == (0, 2) and made.encode(f"a{end}")[-1] == 2 and made.decode([2]) == ""


@pytest.mark.parametrize("listed", [True, False])
def test_named_chat_templates_of_gguf(listed):
  """Found by their keys: not every file lists them."""
  entries = {**metadata(), "tokenizer.chat_template.tool_use": "{{ tools[0].name }}"}
  entries |= {"tokenizer.chat_templates": ["tool_use"]} if listed else {}
  made = Tokenizer.from_gguf(entries)
  assert made.render(HELLO, tools=[{"name": "f"}]) == "f"


@pytest.mark.parametrize("calls", [False, True])
def test_end_of_a_part_of_an_answer(calls):
  """<|end|> ends Phi-3's answers, and the parts of gpt-oss's."""
  names = {"<|endoftext|>": "<|end|>", **({"<|im_start|>": "<|call|>"} if calls else {})}
  entries = {**metadata(), "tokenizer.ggml.tokens": [names.get(x, x) for x in TOKENS]}
  del entries["tokenizer.chat_template"]
  assert Tokenizer.from_gguf(entries).ends == ((2, 1) if calls else (2, 0))


# ---- special tokens of the settings


def test_tokens_that_only_the_settings_know(tokenizer, tmp_path):
  """They are added; a token of the vocabulary that is named is special from then on.

  Of a token that tokenizer.json has, too, the settings' flags count, as in transformers.
  """
  new = {"content": "<tool>", "special": False, "lstrip": True, "rstrip": False}
  added = {str(len(TOKENS)): new}
  folder = published(tokenizer, tmp_path, added_tokens_decoder=added, pad_token="hello")
  made = Tokenizer.from_huggingface(folder)
  ids = made.encode("a  <tool> t")
  assert ids == [*made.encode("a"), len(TOKENS), *made.encode(" t")]
  assert made.decode(ids) == "a<tool> t" and not made.is_special(len(TOKENS))
  assert made.is_special(TOKENS.index("hello"))
  assert made.special_tokens == {"pad_token": "hello"}
  other = {"content": SPECIALS[0], "special": False, "rstrip": True}
  published(tokenizer, tmp_path, added_tokens_decoder={"0": other})
  made = Tokenizer.from_huggingface(folder)
  assert made.encode(f"{SPECIALS[0]} \nt") == [0, *made.encode("t")] and not made.is_special(0)
  published(tokenizer, tmp_path, added_tokens_decoder={"9999": new})
  with pytest.raises(ValueError, match=r"added_tokens_decoder: found '<tool>' would have the id"):
    Tokenizer.from_huggingface(folder)


def test_special_tokens_map(tokenizer, tmp_path):
  folder = published(tokenizer, tmp_path)
  for key in ("additional_special_tokens", "extra_special_tokens"):  # transformers 4, 5
    named = {"eos_token": {"content": "<|im_end|>"}, key: ["hello"]}
    (folder / "special_tokens_map.json").write_text(json.dumps(named))
    made = Tokenizer.from_huggingface(folder)
    assert made.eos == 2
    assert made.special_tokens["additional_special_tokens"] == ["hello"]
    assert made.is_special(TOKENS.index("hello"))


def test_phi3_markers_of_gguf_take_the_white_space_behind_them():
  tokens = scored(**{"general.architecture": "phi3"})
  made = Tokenizer.from_gguf(tokens)
  assert made.encode("</s>  hello", bos=False) == made.encode("</s>hello", bos=False)
  assert made.encode("<s>  hello", bos=False) != made.encode("<s>hello", bos=False)


def test_unknown_tokens_of_gguf_are_no_text(sentencepiece):
  assert sentencepiece.encode("<unk>", bos=False) == [0]
  assert sentencepiece.decode([0]) == ""
