"""Models as published, where a checkpoint is asked for: converted once, and as `convert` does."""

import shutil

import chex
import numpy as np
import pytest

from kvjax.models.io import convert, files
from kvjax.programs import common, shapes
from tests import tiny_gguf, tiny_hf


@pytest.fixture
def sources(tmp_path, monkeypatch):
  """A Hugging Face folder and a GGUF file, and a cache that is empty."""
  monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "cache"))
  config = tiny_hf.config("llama")
  tiny_hf.write(tmp_path / "tiny-hf", config, tiny_hf.weights(config))
  tiny_gguf.write(tmp_path / "tiny.gguf")
  return tmp_path / "tiny-hf", tmp_path / "tiny.gguf"


@pytest.mark.parametrize("kind", [0, 1])
def test_a_published_model_is_converted_once(sources, kind, tmp_path, capfd):
  want, known = convert.load(convert.convert(sources[kind], tmp_path / "made", progress=False))
  capfd.readouterr()
  found, tokenizer = convert.load(sources[kind])
  chex.assert_trees_all_equal(found, want)
  assert tokenizer.encode("a b") == known.encode("a b")
  said = capfd.readouterr()
  assert said.out == "" and f"converted once, into {tmp_path / 'cache'}" in said.err
  folder = convert.checkpoint(sources[kind])
  assert convert.checkpoint(folder) == folder == convert.checkpoint(str(sources[kind]))
  convert.load(sources[kind])
  assert capfd.readouterr().err == ""
  assert list((tmp_path / "cache").iterdir()) == [folder]


def test_other_content_is_another_checkpoint(sources):
  folder, file = sources
  first = convert.checkpoint(folder), convert.checkpoint(file)
  config = tiny_hf.config("llama")
  tiny_hf.write(folder, config, tiny_hf.weights(config, seed=1))
  tiny_gguf.write(file, tiny_gguf.tensors(seed=1))
  second = convert.checkpoint(folder), convert.checkpoint(file)
  assert len({*first, *second}) == 4
  moved = shutil.copytree(folder, folder.parent / "copy" / folder.name)
  assert convert.checkpoint(moved) == second[0]  # wherever it lies
  (moved / "additional_chat_templates").mkdir()
  (moved / "additional_chat_templates" / "rag.jinja").write_text("rag")
  assert convert.checkpoint(moved) != second[0]


def test_all_parts_of_a_file_are_its_content(tmp_path):
  for number in (1, 2):
    (tmp_path / f"x-0000{number}-of-00002.gguf").write_bytes(b"x")
  (tmp_path / "y-00001-of-00002.gguf").write_bytes(b"y")
  first = tmp_path / "x-00001-of-00002.gguf"
  before = files.digest(first)
  (tmp_path / "y-00001-of-00002.gguf").write_bytes(b"z")
  assert files.digest(first) == before
  (tmp_path / "x-00002-of-00002.gguf").write_bytes(b"z")
  assert files.digest(first) != before


def test_the_end_of_a_large_file_tells_it_from_others(tmp_path, monkeypatch):
  monkeypatch.setattr(files, "_END", 8)
  file, found = tmp_path / "x.gguf", set()
  for text in (b"a" * 20, b"a" * 19 + b"b", b"b" + b"a" * 19, b"a" * 21):
    file.write_bytes(text)
    found.add(files.digest(file))
  assert len(found) == 4


def test_models_of_the_hub(sources, tmp_path, monkeypatch):
  asked = []

  def fetch(repo):
    asked.append(repo)
    if repo != "owner/name":
      raise OSError(f"{repo}: download failed")
    return sources[0]

  monkeypatch.setattr(convert, "fetch_huggingface", fetch)
  monkeypatch.chdir(tmp_path)
  found = convert.checkpoint("owner/name")
  assert found.name.startswith("name-") and convert.checkpoint("hf:owner/name") == found
  with pytest.raises(FileNotFoundError, match="runs/x: found no such folder, and no model"):
    convert.checkpoint("runs/x")
  with pytest.raises(OSError, match=r"^runs/x: download failed"):
    convert.checkpoint("hf:runs/x")
  (tmp_path / "owner" / "name").mkdir(parents=True)  # a folder of that name comes first
  assert convert.checkpoint("owner/name") == type(tmp_path)("owner/name")
  assert asked == ["owner/name", "owner/name", "runs/x", "runs/x"]


def test_configs_are_read_without_weights(sources, tmp_path, monkeypatch):
  folder, file = sources
  configs = [convert.open_source(x).config for x in sources]
  asked = []

  def fetch(repo, **which):
    asked.append((repo, which))
    return folder

  monkeypatch.setattr(convert, "fetch_huggingface", fetch)
  (folder / "model.safetensors").unlink()
  assert [convert.config_of(x) for x in (folder, file)] == configs
  assert convert.config_of("hf:owner/name") == convert.config_of("owner/name") == configs[0]
  assert asked == [("owner/name", {"wanted": ("config.json",)})] * 2
  assert not (tmp_path / "cache").exists()
  made = convert.convert(file, tmp_path / "made", progress=False)
  assert convert.config_of(made) == shapes.shape(str(made)) == configs[1]
  assert shapes.shape(str(file)) == configs[1] and shapes.shape("owner/name") == configs[0]
  with pytest.raises(FileNotFoundError, match="gone: found no such file or folder, expected a"):
    shapes.shape(str(tmp_path / "gone"))
  blob = file.rename(tmp_path / "sha256-1")  # a name of its own, as in other programs' caches
  assert convert.config_of(blob) == convert.read_config(convert.checkpoint(blob)) == configs[1]
  with pytest.raises(ValueError, match="found a single file of weights, expected its folder"):
    convert.load(made / "items" / "final.safetensors")


def test_programs_take_them(sources, capsys):
  model, _ = common.load_model(sources[1])
  assert np.isfinite(np.asarray(model.embedding)).all()
  assert "loading tiny.gguf" in capsys.readouterr().out
