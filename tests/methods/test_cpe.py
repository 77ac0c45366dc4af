"""CPE against its parts in any order, and against a NumPy float64 decoder."""

import dataclasses

import numpy as np
import pytest

from kvjax import CIS, CPE, ETF, PSAW
from kvjax.methods import labels
from kvjax.testing.tiny import CLOSE, CONFIG, LENGTHS, TOKENS, Run
from tests import decoder_oracle
from tests.cis_oracle import Oracle, follow, wandering
from tests.decoder_oracle import frozen, visible

# A setting under which all three do something in four layers and 30 tokens.
SETTING = {"k": 4, "sinks": 2, "local": 3, "block": 4, "tau": 0.1, "start": 0.25}
TIGHT = CPE(**SETTING, phi=0.4, psi=0.4, alpha=1.2, gamma=0.8, kv="previous")
STEPS = 12


def parts(c):
  cis = CIS(c.k, c.sinks, c.local, c.block, c.tau, c.radius, c.m, c.per, c.agree)
  window = {"sinks": c.sinks, "phi": c.phi, "alpha": c.alpha, "start": c.start}
  freeze = {"sinks": c.sinks, "psi": c.psi, "gamma": c.gamma, "start": c.start, "kv": c.kv}
  return cis, window, freeze


@pytest.mark.slow
def test_all_orders_agree():
  """To the bit."""
  cis, window, freeze = parts(TIGHT)
  out = Run(TIGHT).generate(STEPS)
  for method in (
    PSAW(ETF(cis, **freeze), **window),
    ETF(PSAW(cis, **window), **freeze),
  ):
    np.testing.assert_array_equal(Run(method).generate(STEPS), out)


@pytest.mark.slow
def test_each_of_the_three_has_an_effect():
  out = Run(TIGHT).generate(STEPS)
  for less in ({"phi": 1.0}, {"psi": 1.0}, {"local": 64}, {"tau": 1.0}):
    other = Run(dataclasses.replace(TIGHT, **less)).generate(STEPS)
    assert np.abs(other - out).max() > 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
  "change",
  [{}, {"per": "query_head", "tau": 0.3}, {"kv": "project", "radius": 2}, {"agree": "mean"}],
)
def test_a_whole_decoder(change):
  """Prompt and decoded tokens of two rows: windows, frozen tokens and shared sets at once."""
  c = dataclasses.replace(TIGHT, **change)
  out = Run(c).generate(STEPS)
  for b, n in enumerate(LENGTHS):
    oracles, retrieved = {}, []

    def sees(layer, head, t, q, k, n=n, oracles=oracles, retrieved=retrieved):
      window = visible(t, layer, CONFIG.layers, c.sinks, c.phi, c.alpha, c.start)
      if t <= n:
        return window
      oracle = oracles.setdefault((layer, head), Oracle(c, CONFIG.groups))
      chosen = oracle.attended(q, k, {i - 1 for i in window})
      retrieved.extend(oracle.retrieved)
      return [i + 1 for i in chosen]

    def still(layer, i, n=n):
      return frozen(layer, i, n, c.sinks, c.psi, c.gamma, c.start)

    tokens = TOKENS[b, : n + STEPS]
    want = decoder_oracle.logits(tokens, n, sees=sees, frozen=still, kv=c.kv)
    np.testing.assert_allclose(out[b], want[n - 1 :], atol=CLOSE)
    assert 0.3 < np.mean(retrieved) < 0.95


@pytest.mark.slow
@pytest.mark.parametrize(
  ("cis", "sinks", "phi"),
  [
    (CIS(k=9, sinks=2, local=4, block=8), 2, 0.3),
    (CIS(k=9, sinks=2, local=4, block=8, per="query_head"), 2, 0.3),
    (CIS(k=3, sinks=4, local=20, block=4), 1, 0.1),  # the newest tokens outgrow the window
  ],
)
def test_heads_rank_and_share_visible_tokens_only(cis, sinks, phi):
  """Sets of every step of a narrowed layer, against the oracle that sees the window alone."""

  def seen(t):
    return {i - 1 for i in visible(t + 1, 4, 4, sinks, phi, 1.0)}

  args = {"over": PSAW(cis, sinks=sinks, phi=phi), "visible": seen, "layer": 3}
  retrieved = follow(cis, wandering(1, tokens=70), [29, 8], 40, **args)
  assert 0.15 < retrieved.mean() < 0.9


def test_defaults_and_presets():
  """§V-A and §V-C, with s = 16."""
  cis, window, freeze = parts(CPE())
  assert cis == CIS() == CIS.preset(512)
  assert CPE().base == PSAW(ETF(CIS())) and window["phi"] == 0.7 and freeze["psi"] == 0.5
  assert CPE.preset(128, block=8) == CPE(k=88, sinks=8, local=32, block=8)
  assert CPE.preset(512, matched=True).base.base.base.k == 388
  assert dataclasses.replace(CPE(), psi=1.0).base.base.psi == 1.0
  assert "base" not in repr(CPE())


def test_a_label_names_the_rule_of_groups():
  method = labels.instance("cpe:agree=mean,tau=0.7", 512)
  assert method == CPE(agree="mean", tau=0.7) and method.base.base.base.agree == "mean"
