"""Every method on every family: what models/README.md's table of families says."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.models.decode.generate import prefill
from kvjax.models.io.families import FAMILIES
from tests import tiny_hf
from tests.cover import KIN
from tests.family_models import model
from tests.law_cases import CASES

# The last case of a family's, which has a window where the family can have one.
MODELS = {case["model_type"]: name for name, case in tiny_hf.CASES.items()}
MODELS |= {"llama": "llama3.1", "qwen3_moe": "qwen3-moe"}
# What the core runs, of families whose layers differ most: another kind of method for each.
CORE = {"gemma3_text": "art", "qwen3_moe": "snapkv"}
# What refuses a family by name, and why; the table lists it.
REFUSED = {("gemma2", "expected_attention"): "no closed form under a soft cap"}


# Families whose layers have what methods meet: windows, sinks, soft caps. The rest look alike.
OWN = "gemma2", "gemma3_text", "gpt_oss"
# Each method runs under one of them; the others are sweep.
UNDER = dict(zip((x for x in kvjax.METHODS if x not in KIN), itertools.cycle(OWN), strict=False))


def _marks(family, name):
  refused = REFUSED.get((family, name))
  marks = [] if CORE.get(family) == name else [pytest.mark.slow]
  if marks and UNDER.get(name) != family:
    marks.append(pytest.mark.sweep)
  if refused:
    marks.append(pytest.mark.xfail(raises=NotImplementedError, strict=True, reason=refused))
  return marks


@pytest.mark.core(1)
@pytest.mark.parametrize(
  ("family", "name"),
  [
    pytest.param(family, name, marks=_marks(family, name))
    for family in FAMILIES
    for name in kvjax.METHODS
  ],
)
def test_every_method_runs(family, name):
  """A ragged prompt longer than the window and three steps, under a setting that drops tokens."""
  decoder, method, size = model(MODELS[family]), CASES[name].tight, 48
  tokens, lengths = tiny_hf.tokens(), np.array([size, 31], np.int32)
  caches = decoder.init_caches(method, 2, 64)
  logits, caches = prefill(decoder, tokens[:, :size], lengths, caches, method)
  assert np.isfinite(logits).all()
  step = jax.jit(lambda token, caches: decoder.decode(token, caches, method))
  for i in range(3):
    token = np.take_along_axis(tokens, (lengths + i)[:, None], 1)[:, 0]
    logits, caches = step(jnp.asarray(token), caches)
    assert np.isfinite(logits).all()
  for cache in caches:
    assert cache.seen.tolist() == (lengths + 3).tolist()


def test_families_have_cases():
  """A family without a golden, or with a name that no case has, would not be in the table."""
  assert set(MODELS) == set(FAMILIES)
