"""What passes from one program to another by an arrival counter, in the instructions of a GPU.

In the interpreter programs run one after another, so that a missing barrier would hide there.
"""

import re

import pytest

from tests.kernels.test_lowering import called, compiled, slow_unless


@pytest.mark.parametrize(
  ("call", "name"),
  [
    ("arrivals-decode-H128-G4-bfloat16", "decode_joined"),
    ("arrivals-pages-8192", "score_and_select"),
    slow_unless(False, "arrivals-sparse-unit16", "sparse_joined"),
    slow_unless(False, "arrivals-blocks-2048", "score_and_select"),
  ],
)
@pytest.mark.parametrize("capability", [90, slow_unless(False, 80)])
def test_the_last_to_arrive_sees_what_the_others_wrote(call, name, capability):
  """Between two barriers one thread releases and acquires; only then is read, past the L1 cache."""
  ptx = next(b.ptx for k, b in compiled(called(call, capability)) if k.name == name)
  before, found, after = ptx.partition("atom.global.gpu.acq_rel.add")
  assert found and "atom." not in after
  waiting = r"(st\.global|bar\.sync|ld\.shared)"
  assert re.findall(waiting, before)[-1] == "bar.sync"
  assert re.findall(waiting, after)[0] == "bar.sync"
  assert "ld.volatile" not in before and "ld.volatile.global" in after
