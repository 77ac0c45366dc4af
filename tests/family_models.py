"""Tiny models of the families, converted and loaded once a process."""

import functools
import pathlib
import tempfile

from kvjax.models.io import convert
from tests import tiny_hf


@functools.cache
def model(name, impl="reference"):
  """A case of `tiny_hf.CASES` as the decoder has it, float32."""
  with tempfile.TemporaryDirectory() as root:
    folder = tiny_hf.write(pathlib.Path(root) / "source", tiny_hf.CASES[name])
    made = convert.convert(folder, pathlib.Path(root) / "made", progress=False)
    return convert.load(made, precision="float32", impl=impl)[0]
