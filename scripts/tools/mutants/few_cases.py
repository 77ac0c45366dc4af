"""A plugin of pytest: of every test that is swept over cases, a few.

A fault in a kernel shows in any of them; the whole sweep takes minutes.
"""

from typing import Any

import pytest

CASES = 4


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
  """Keeps at most `CASES` of the chosen cases of each function, spread over its sweep."""
  functions: dict[tuple, list[Any]] = {}
  for item in items:
    functions.setdefault((item.path, getattr(item, "originalname", item.name)), []).append(item)
  kept = set()
  for cases in functions.values():
    kept |= {cases[i * len(cases) // CASES].nodeid for i in range(CASES)}
  config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
  items[:] = [item for item in items if item.nodeid in kept]
