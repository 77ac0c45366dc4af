"""The examples in the docstrings of the names that users call first."""

import doctest

import pytest

import kvjax
from kvjax.core import settings
from kvjax.methods import labels, registry
from kvjax.models.decode import generate, prefill, sampling
from kvjax.models.io import convert
from scripts.examples import tiny
from tests import compiled

NAMES = {
  f"kvjax.{name}": getattr(kvjax, name)
  for name in (
    *("Full", "StreamingLLM", "SnapKV", "PyramidKV", "LongFlow", "Quest", "ART", "PRR", "CPE"),
    *("Ltri", "Quantised", "CacheSpec", "Rope", "empty_caches", "prefill", "decode"),
    *("stacked", "plan_memory", "pipeline"),
  )
} | {
  "find_method": registry.find_method,
  "settings.usual": settings.usual,
  "labels.instance": labels.instance,
  "pad": prefill.pad,
  "Sampling": sampling.Sampling,
  "generate": generate.generate,
}


@pytest.mark.core(6)
@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs(name, monkeypatch):
  """Models of the examples are random; the default one here, too, which is not fetched."""
  monkeypatch.setattr(convert, "default_checkpoint", lambda: None)
  monkeypatch.setattr(convert, "load", lambda path: tiny.load())
  compiled.front_door(monkeypatch)
  (test,) = doctest.DocTestFinder(recurse=False).find(NAMES[name], name, globs={})
  done = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test)
  assert done.attempted and not done.failed
