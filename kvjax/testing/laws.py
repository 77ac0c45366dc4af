"""The laws: what every method must obey, whatever it computes.

Each is a function of a `Case` that raises AssertionError where the method breaks it, and
unittest.SkipTest, which pytest reports, where there is nothing to ask. Compiling takes all the
time, so the laws of a case share its programs: of a small decoder a prompt of WIDTH tokens, a chunk
of CHUNK onto live caches and a decode step, under a tight setting and the neutral one; of a layer a
prompt and a step, with and without the NaN guard. Shapes and static arguments of a call are part of
its program: a law that needs others pays for them.
"""

import contextlib
import unittest
from typing import Any

from kvjax.families.method import Method
from kvjax.testing import decoder_laws, layer_laws, traced_laws
from kvjax.testing.cases import LAWS, Case

# They add themselves to LAWS, in this order.
FILES = decoder_laws, layer_laws, traced_laws


def check(method: type[Method] | Case, **how: Any) -> None:
  """Puts a method under all laws.

  Args:
    method: the class, which has `example` and `neutral`; or a case.
    how: fields of `Case`, for a class.

  Raises:
    AssertionError: a law does not hold: what was found; a note names the law and what it checks.
  """
  case = method if isinstance(method, Case) else Case(method, **how)
  for holds in LAWS.values():
    with contextlib.suppress(unittest.SkipTest):
      holds(case)
