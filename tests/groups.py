"""Which tests a worker runs one after another: those that share compiled programs and fixtures."""

import re

from xdist.scheduler import LoadScopeScheduling

from kvjax import METHODS

# In these files every method has programs of its own.
BY_METHOD = ("tests/laws/test_laws.py", "tests/devices/test_sharding.py")


def group(test: str) -> str:
  """Its file, in some files with the method that the test is about."""
  file, _, case = test.partition("::")
  words = re.split(r"[\[\]-]", case)[1:] if file in BY_METHOD else ()
  return " ".join([file, *(word for word in words if word in METHODS)][:2])


class ByPrograms(LoadScopeScheduling):
  """Hands out whole groups, the largest first."""

  def _split_scope(self, nodeid: str) -> str:
    return group(nodeid)
