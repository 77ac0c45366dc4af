"""Which tests a worker runs one after another: those that share compiled programs and fixtures."""

import re

from xdist.scheduler import LoadScopeScheduling

# In these files every method, the first word of a case, has programs of its own.
BY_METHOD = ("tests/laws/test_laws.py", "tests/devices/test_sharding.py")


def group(test: str) -> str:
  """Its file, in some files with the method that the test is about."""
  file, _, case = test.partition("::")
  method = re.search(r"\[(\w+)", case) if file in BY_METHOD else None
  return f"{file} {method[1]}" if method else file


class ByPrograms(LoadScopeScheduling):
  """Hands out whole groups."""

  def _split_scope(self, nodeid: str) -> str:
    return group(nodeid)
