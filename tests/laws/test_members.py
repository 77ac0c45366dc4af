"""Each fact is said once: how many public members a method has, its families' included."""

import inspect

from kvjax.families.bounded import Bounded, InTurn
from kvjax.families.forms import DESCRIBED
from kvjax.families.method import Method
from kvjax.families.prompt_scored import PromptScored
from kvjax.families.selective import Selective, SelectiveTokens
from kvjax.families.streamed import Streamed
from kvjax.families.wrapper import Wrapper

FAMILIES = Method, Bounded, InTurn, PromptScored, Selective, SelectiveTokens, Streamed, Wrapper
MOST = 31


def members() -> dict[str, list[str]]:
  """Public names by the families that define them; a name that several define counts once.

  Functions, properties and class methods count, whoever defined them first; the fields of a
  dataclass and class variables do not.
  """
  found: dict[str, list[str]] = {}
  for cls in FAMILIES:
    for name in vars(cls):
      if not name.startswith("_") and name not in {*inspect.get_annotations(cls), *DESCRIBED}:
        found.setdefault(name, []).append(cls.__name__)
  return found


def test_members_are_few():
  found = members()
  assert len(found) <= MOST, sorted(found)


def test_members_are_counted():
  """Those of all families, and each once."""
  found = members()
  assert {"plan", "tiles", "similarity", "window"} < set(found)
  assert found["score"] == ["PromptScored", "Selective"] and "base" not in found
