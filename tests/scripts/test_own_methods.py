"""A method from outside: found by its module, under the laws, and in the programs."""

import importlib
import pathlib
import re
import sys

import pytest

import kvjax
import kvjax.testing
from kvjax import methods
from kvjax.programs import demo
from kvjax.programs.evals import plan
from kvjax.testing import LAWS, Case
from scripts.tools import house
from scripts.tools.tablemakers import Results

GUIDE = pathlib.Path(__file__).parents[2] / "kvjax/methods/README.md"


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
  """The module that the methods' page shows, on the path."""
  folder = tmp_path_factory.mktemp("elsewhere")
  (code,) = re.findall(r"```python\n(# mine\.py\n.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
  (folder / "mine.py").write_text(code)
  sys.path.insert(0, str(folder))
  yield importlib.import_module("mine")
  sys.path.remove(str(folder))
  del sys.modules["mine"]


def test_is_found_by_its_module(mine):
  assert kvjax.find_method("mine:Middle") is mine.Middle
  assert demo.choose(("mine:Middle", "full")) == ("full", "mine:Middle")
  made = plan.entries(["mine:Middle", "mine:Middle:sinks=2"], ["16"], 100)
  assert [entry.method for entry in made[1:]] == [mine.Middle(16), mine.Middle(16, sinks=2)]


def test_a_short_name_is_in_programs_compositions_and_tables(mine, monkeypatch):
  monkeypatch.setitem(kvjax.METHODS, "middle", mine.Middle)
  assert demo.choose(("middle", "full")) == ("full", "middle")
  _, entry = plan.entries(["middle"], ["16"], 100)
  assert entry.method == mine.Middle(16)
  assert "middle" in house.over("art") and "middle" not in house.over("chunkkv")
  assert list(house.moves(Results()).loc["`middle`"]) == ["`Bounded`", "`rank`, `victim`"]


def test_a_line_of_the_table_is_all_that_a_method_needs():
  """The names of kvjax, METHODS and the stub follow from it."""
  assert [*kvjax.METHODS] == [*methods.TABLE]
  for name, where in methods.TABLE.items():
    module, _, cls = where.partition(":")
    assert kvjax.METHODS[name] is getattr(kvjax, cls) and kvjax.METHODS[name].__module__ == module
    assert f"from {module} import {cls} as {cls}\n" in house.stub()


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("midle", "--methods: found 'midle', expected one of: full, .*; or module:Class"),
    ("nowhere:Middle", r"found 'nowhere:Middle', expected module:Class \(No module named"),
    ("mine:Midle", r"found 'mine:Midle', expected module:Class \(module 'mine' has no"),
    (".mine:Middle", "--methods: found '.mine:Middle', expected module:Class, a whole"),
    (":Middle", "found ':Middle', expected module:Class"),
    ("mine:kvjax", "found 'mine:kvjax', <module .*, expected a subclass of kvjax.Method"),
  ],
)
def test_what_is_none_is_refused(mine, name, message):
  with pytest.raises(ValueError, match=message):
    kvjax.find_method(name, "--methods")


@pytest.mark.slow
def test_all_laws_at_once(mine):
  kvjax.testing.check(mine.Middle)


def test_the_law_that_is_broken_is_named():
  class Forgetful(kvjax.Full):
    """Forgets the first token that it is given, whatever the setting."""

  forgets = kvjax.StreamingLLM(budget=4, sinks=1)
  kvjax.settings.register(Forgetful, neutral=lambda cls, length: forgets)
  with pytest.raises(AssertionError) as caught:
    kvjax.testing.check(Forgetful)
  assert "Mismatched elements" in str(caught.value)
  assert caught.value.__notes__ == [
    "Forgetful breaks the law neutral_setting_equals_full: Under the neutral setting a prompt and "
    "steps give the logits of the full cache."
  ]


def test_a_law_says_what_it_found():
  """In words of its own, with pytest or without."""

  class Idle(kvjax.Full):
    """The full cache by another name."""

  with pytest.raises(AssertionError) as caught:
    LAWS["tight_setting_has_an_effect"](Case(Idle))
  said = "logits: found at most 0.0000 from the full cache's, expected above 0.05"
  assert str(caught.value) == said


@pytest.mark.parametrize("law", LAWS)
def test_every_law_says_what_it_checks(law):
  assert LAWS[law].__doc__
