"""The way from `generate` to a kernel stays as short as it is."""

import functools

import pytest

from scripts.tools import frames

pytestmark = pytest.mark.slow

ways = functools.cache(frames.way)
# Frames, files and calls to trace a layer: at most.
MOST = {"Full": (14, 8, 300), "Quest": (14, 8, 430), "ART over Quest": (16, 9, 490)}


@pytest.mark.rest(1)
@pytest.mark.parametrize("name", MOST)
def test_it_is_short(name):
  found = ways(frames.METHODS[name])
  assert found.frames[0] == ("models/decode/generate.py", "generate")
  assert (len(found.frames), found.files) <= MOST[name][:2], found.frames
  assert found.files <= MOST[name][1]
  assert 50 < found.calls <= MOST[name][2]


@pytest.mark.sweep
def test_no_function_on_it_is_long():
  """40 lines of code at most, docstrings and signatures apart."""
  for name, method in frames.METHODS.items():
    for file, function in ways(method).frames:
      assert frames.lines(file, function) <= 40, (name, file, function)
