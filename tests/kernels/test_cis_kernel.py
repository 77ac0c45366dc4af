"""CIS on kernels against its reference: the same lists, retrievals and notes at every step.

On a GPU the same tests run the compiled kernels.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import CIS, PSAW
from kvjax.kernels.cis.anchors import anchors
from kvjax.kernels.cis.note import note
from kvjax.kernels.selection import top_k
from kvjax.kernels.selection.key_weights import key_logits
from kvjax.methods.cis.dilation import dilated
from tests.cis_oracle import beside_the_reference, wandering


@pytest.mark.rest(5)
@pytest.mark.slow
@pytest.mark.parametrize("longest", [8192, 16])
@pytest.mark.parametrize(
  ("method", "groups"),
  [
    (CIS(k=6, sinks=2, local=3, block=5, tau=0.75, radius=2, m=4), 3),
    (CIS(k=9, sinks=0, local=4, block=4, tau=0.7, radius=1), 1),
    (CIS(k=6, sinks=2, local=3, block=5, tau=0.75, radius=0, agree="mean"), 3),
    (CIS(k=6, sinks=2, local=3, block=5, tau=0.75, agree="mean"), 2),
    (CIS(k=9, sinks=0, local=4, block=4, tau=0.7, agree="mean"), 1),
    (CIS(k=5, sinks=1, local=2, block=5, tau=0.75, per="query_head"), 3),
    (CIS(k=7, sinks=0, local=3, block=4, tau=0.7, radius=2, per="query_head"), 2),
    (PSAW(CIS(k=6, sinks=2, local=3, block=5, tau=0.75, m=6), sinks=2, phi=0.4), 3),
    (PSAW(CIS(k=6, sinks=2, local=3, block=4, tau=0.7), sinks=2, phi=0.4), 1),
    (PSAW(CIS(k=6, sinks=2, local=3, block=4, tau=0.7, agree="mean"), sinks=2, phi=0.4), 3),
  ],
)
def test_same_plans_as_the_reference(method, groups, longest, monkeypatch):
  """Both implementations from the same cache at every step; the kernels' cache goes on.

  Longer rows than a program searches are cut, and weighed on the way.
  """
  monkeypatch.setattr(top_k, "LANES", longest)
  assert top_k.cut_rows(4, 32, 6) == (longest == 16)
  retrieved = beside_the_reference(method, wandering(3, tokens=26, groups=groups), 32)
  assert (~retrieved).sum() > 20


@pytest.mark.core(1)
@pytest.mark.parametrize("units, judged", [(1, 3), (3, 3), (1, 1)])
def test_logits_of_those_that_look(units, judged):
  """The first step of a block shares with none: all keys are scored, as alone."""
  q, k = (jax.random.normal(jax.random.key(n), (2, 2, n, 16)) for n in (3, 40))
  queries, anchor = jnp.zeros((2, 2, 4, judged, 16)), jnp.zeros((2, 2, 4, units), jnp.int32)
  step, used = jnp.zeros(2, jnp.int32), jnp.array([40, 7])
  *_, logits, m, l = anchors(q, queries, anchor, step, used, tau=0.8, keys=(k, used))
  want = key_logits(q, k, step[:, None], used[:, None], used[:, None])
  for a, b in zip((logits, m, l), want, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.slow
def test_of_equal_weights_the_first_tokens_gain_neighbours():
  """Three do: of the four that weigh one the first."""
  found = np.array([4, 9, 14, 19, 24, 30, -1])
  weight = np.array([1, 2, 1, 1, 2, 1, 0], np.float32)
  want = [*found[:6], 3, 8, 23, 5, 10, 25, -1]
  how = {"sinks": 0, "heaviest": 3, "radius": 1}
  made = [jnp.asarray(x)[None, None, None] for x in (found.astype(np.int32), weight)]
  assert dilated(*made, len(want), **how)[0, 0, 0].tolist() == want
  one, ones = jnp.ones((1, 1), jnp.int32), jnp.ones((1, 1, 1), jnp.int32)
  mine = (ones.astype(jnp.float32), one, jnp.ones((1, 1, 1, 8)), ones, ones, *made)
  block = jnp.zeros((1, 1, 2, 1, 8)), jnp.zeros((1, 1, 2, 1), jnp.int32)
  held = *block, jnp.full((1, 1, 2, 1, len(want)), -7, jnp.int32), one[0]
  _, _, noted, step = jax.jit(functools.partial(note, **how))(jnp.ones(1, bool), *mine, *held)
  assert noted[0, 0, :, 0].tolist() == [[-7] * len(want), want] and step.tolist() == [0]


def test_keys_of_sharing_heads_are_not_read():
  """NaN keys give no NaN where no retrieval was asked for: nothing is computed and masked."""
  k = jnp.full((1, 2, 100, 16), jnp.nan).at[0, 1].set(1.0)
  q, end = jnp.ones((1, 2, 1, 16)), jnp.full((1, 1), 100, jnp.int32)
  active = jnp.array([[0, 1]], jnp.int32)
  logits, m, l = jax.jit(key_logits)(q, k, end * 0, end, end, active=active)
  assert np.isfinite(logits[0, 1]).all() and np.isfinite(m[0, 1]).all()
  if jax.default_backend() == "cpu":  # results that no program wrote: what the interpreter fills in
    untouched = jax.jit(key_logits)(q, k * 0, end * 0, end, end, active=active)[2]
    np.testing.assert_array_equal(l[0, 0], untouched[0, 0])
