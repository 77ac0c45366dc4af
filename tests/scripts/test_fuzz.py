"""Bad values: constructors and readers refuse them with a documented error, never with another."""

import dataclasses
import json
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvjax
from kvjax import METHODS, CacheSpec, Env, Rope
from kvjax.families.coded import Coded
from kvjax.models.decode.sampling import Sampling
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn.config import ModelConfig
from kvjax.testing.tiny import CONFIG
from scripts.tools import fuzz
from tests.processes import ROOT

REFUSALS = (ValueError, TypeError, NotImplementedError)

# What may come in place of a number, a name or a method.
anything = st.one_of(
  st.integers(-3, 70),
  st.integers(),
  st.floats(),
  st.sampled_from([None, True, "", "kv_head", "mean", "slot", math.nan, math.inf, -0.0, 1e-300]),
  st.sampled_from([[], {}, b"x", object, 1j, kvjax.Full(), kvjax.Quest(64), kvjax.H2O(16)]),
)


def changed(data, whole):
  """Some of a dataclass's fields, drawn anew: those that its constructor takes."""
  names = [f.name for f in dataclasses.fields(whole) if f.init]
  chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
  return {name: data.draw(anything, label=name) for name in chosen}


@pytest.mark.core(6)
@pytest.mark.parametrize("name", [n for n in METHODS if dataclasses.fields(METHODS[n])])
@given(data=st.data())
def test_methods(name, data):
  """A method of bad values is refused at once; one that is made can be hashed and makes caches."""
  example = kvjax.settings.example(METHODS[name], 24)
  values = changed(data, example)
  try:
    method = dataclasses.replace(example, **values)
  except REFUSALS as error:
    assert str(error)
    return
  hash(method)
  assert method == method
  if all(abs(x) <= 10_000 for x in values.values() if isinstance(x, int)):  # no test of memory
    spec = CacheSpec(1, 64, 2, 2, 16, 2)
    try:
      held = kvjax.plan_memory(spec, method)
    except ValueError as error:  # groups of channels: whether they divide a head, its model knows
      assert isinstance(method, Coded) and f"{type(method).__name__}.group" in str(error)
      return
    assert held.device > 0


@pytest.mark.parametrize(
  "whole",
  [CacheSpec(1, 64, 2, 2, 16, 2), Env(4), CONFIG, Sampling(0.7), Rope(1e4, kvjax.Yarn(4.0, 64))],
  ids=lambda x: type(x).__name__,
)
@given(data=st.data())
def test_descriptions(whole, data):
  try:
    dataclasses.replace(whole, **changed(data, whole))
  except REFUSALS as error:
    assert str(error)


@pytest.mark.slow
def test_types_are_checked_without_a_checker():
  """In a process without the tests' import hook: no value of another type gets through."""
  program = """
import dataclasses, math
import kvjax
values = [None, True, "", 1.5, math.nan, math.inf, [], {}, b"x", 1j, object(), kvjax.Full()]
for name, cls in kvjax.METHODS.items():
  example = kvjax.settings.example(cls, 24)
  for field in dataclasses.fields(example):
    for value in values if field.init else ():
      try:
        method = dataclasses.replace(example, **{field.name: value})
      except (ValueError, TypeError):
        continue
      hash(method)
      assert type(value).__name__ in str(field.type) or isinstance(
        value, (kvjax.Method, type(None))
      ), (name, field.name, value)
"""
  done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr


@given(st.dictionaries(st.sampled_from(sorted(CONFIG.to_json())), anything, max_size=3))
def test_configs_of_checkpoints(values):
  try:
    ModelConfig.from_json({**CONFIG.to_json(), **values})
  except REFUSALS as error:
    assert str(error)


# ---- files


def test_a_panic_of_the_tokenizers_library_is_a_refusal(tmp_path):
  """A prefix longer than the merged token, found by input 17248."""
  fuzz.originals(tmp_path)
  path = tmp_path / "made/tokenizer.json"
  changed = json.loads(path.read_text())
  changed["model"]["continuing_subword_prefix"] = "x" * 30
  path.write_text(json.dumps(changed))
  with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer: range end index"):
    Tokenizer.load(tmp_path / "made")


@pytest.mark.slow
def test_some_damaged_files(tmp_path, capsys):
  """A few of each kind; `python -m scripts.tools.fuzz --count 25000` reads many."""
  fuzz.main(fuzz.Args(count=60, out=tmp_path))
  out = capsys.readouterr().out
  assert "failed" in out and (tmp_path / "fuzz.json").exists()
