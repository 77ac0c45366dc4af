"""A tiny model as a GGUF file and as a checkpoint."""

import pytest

from kvjax.models.io import convert
from tests import tiny_gguf


@pytest.fixture(scope="session")
def source(tmp_path_factory):
  path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
  tiny_gguf.write(path)
  return path


@pytest.fixture(scope="session")
def checkpoint(source, tmp_path_factory):
  return convert.convert(source, tmp_path_factory.mktemp("made") / "tiny", progress=False)
