"""The diagnostics by hand, and the bounds of PrHS on random, extreme and real activations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvjax import CIS, PSAW, Env, Full, Linear, Measured, Rope
from kvjax.analysis import certificates as c
from kvjax.testing.layer import Layer, Stream
from tests.activations import activations
from tests.cis_oracle import wandering
from tests.oracles import begun

SCALES = [0.0, 1e-6, 0.1, 1.0, 10.0, 1e4]


# ---- by hand


def test_ratio_and_average_of_live_rows():
  """Two steps, one layer, two rows of two heads; row 1 is idle in the second step."""
  retrieved = np.array([[[[1, 1], [1, 0]]], [[[0, 0], [1, 1]]]], bool)
  live = np.array([[True, True], [True, False]])
  assert c.retrieval_ratio(retrieved) == 5 / 8
  assert c.retrieval_ratio(retrieved, live) == 3 / 6
  assert c.tokens_per_head(jnp.arange(8).reshape(2, 1, 2, 2), live) == (0 + 1 + 2 + 3 + 4 + 5) / 6


def test_live_rows_of_another_shape_are_refused(untyped):
  """Rows by steps have as many entries as steps by rows, and say something else."""
  with pytest.raises(ValueError, match=r"live: found shape \(4, 3\), expected \(3, 4\), steps and"):
    c.retrieval_ratio(np.ones((3, 2, 4, 1), bool), np.ones((4, 3), bool))


def test_mass_overlap_and_oracle_by_hand():
  weight = np.array([0.1, 0.4, 0.1, 0.3, 0.1])
  assert c.heaviest(weight, 3).tolist() == [True, True, False, True, False]  # ties: the lowest
  chosen = np.array([True, True, False, False, True])
  np.testing.assert_allclose(c.dropped_mass(weight, chosen), 0.4)
  np.testing.assert_allclose(c.overlap(chosen, c.heaviest(weight, 3)), 2 / 3)
  assert c.overlap(chosen, c.heaviest(weight, 0)) == 1
  k = np.log(weight)[:, None] * np.sqrt(2) @ np.array([[1.0, 0.0]])
  np.testing.assert_allclose(c.attention(np.array([1.0, 0.0]), k), weight)
  seen = np.array([True, True, False, False, False])
  np.testing.assert_allclose(c.attention(np.array([1.0, 0.0]), k, seen), [0.2, 0.8, 0, 0, 0])


def test_information_bound_by_hand():
  """g(0) = 0, g(1/2) = 2·(ln 2 + ln(n)/2), g(1) = 2·ln n."""
  got = c.information_bound(np.array([0.0, 0.5, 1.0]), 16)
  np.testing.assert_allclose(got, [0, 2 * (np.log(2) + np.log(16) / 2), 2 * np.log(16)])
  assert got[[0, 2]].tolist() == [0, 2 * np.log(16)]  # h_b(0) = h_b(1) = 0, to the last bit


def test_a_geometric_tail_is_fitted_exactly():
  """Weights (1 − ρ)·ρ^d after a sink: κ is what they sum to, and no other pair is closer."""
  rate = c.RATES[310]
  weight = np.exp(-rate * np.arange(59, -1, -1))
  weight[0] = 5.0
  weight /= weight.sum()
  fit = c.fit_recency(weight[None], np.array([59]), 1, np.array([30]))
  np.testing.assert_allclose(fit.rate, rate)
  np.testing.assert_allclose(np.exp(fit.log_kappa), weight[-1] / -np.expm1(-rate))
  loss = c.window_loss(weight[None], np.array([59]), 1, np.array([30]))
  np.testing.assert_allclose(loss.actual, weight[1:30].sum())
  np.testing.assert_allclose(loss.bound, weight[-1] / -np.expm1(-rate) * np.exp(-rate * 30))
  assert loss.holds


# ---- bounds: any input


def mutual_information(law):
  """I(X; T) in nats, X uniform over the rows of a conditional law [contexts, n]."""
  mean = law.mean(0)
  ratio = np.where(law > 0, law / np.maximum(mean, 1e-300), 1.0)
  return (law * np.log(ratio)).sum(-1).mean()


@given(st.integers(0, 2**32 - 1), st.sampled_from(SCALES), st.sampled_from(["oracle", "any"]))
def test_information_bound_holds(seed, scale, how):
  """Exact information of small ensembles of contexts, before and after each drops its keys."""
  rng = np.random.default_rng(seed)
  contexts, n = rng.integers(2, 6), rng.integers(2, 12)
  k = rng.normal(size=(contexts, n, 4)) * scale
  law = c.attention(rng.normal(size=4), k)
  keep = int(rng.integers(1, n + 1))
  chosen = c.heaviest(law if how == "oracle" else rng.random(law.shape), keep)
  delta = c.dropped_mass(law, chosen)
  kept = np.where(chosen, law, 0)
  assume((kept.sum(-1) >= 1e-12).all())  # else there is nothing to renormalise
  kept /= kept.sum(-1, keepdims=True)
  lost = abs(mutual_information(law) - mutual_information(kept))
  assert lost <= c.information_bound(delta.max(), int(n)) + 1e-12


@given(st.integers(0, 2**32 - 1), st.sampled_from(SCALES), st.sampled_from(SCALES))
def test_drift_and_sharing_hold(seed, scale, apart):
  rng = np.random.default_rng(seed)
  anchor, step = rng.normal(size=(2, 3, 8))
  k = rng.normal(size=(3, 40, 8)) * scale
  q, visible = anchor + apart * step, rng.random((3, 40)) < 0.7
  visible[:, 0] = True
  drift = c.query_drift(q, anchor, k, visible)
  early = c.query_drift(q, anchor, k, visible, in_advance=True)
  assert drift.holds and (drift.bound <= early.bound + 1e-12).all()
  assert (early.bound <= 2).all()
  also = rng.random((3, 40)) < 0.1
  for neighbours in (None, also):
    loss = c.sharing_loss(q, anchor, k, 5, neighbours, visible)
    assert loss.holds
    np.testing.assert_allclose(loss.bound, drift.actual)
  assert c.shared_mass(q, anchor, k, also, visible).holds


def test_bounds_are_reached():
  """By two keys: where both laws mirror each other, and where the anchor had nearly a tie."""
  change = np.array([1.3, -0.7])
  law = np.exp(-change / 2) / np.exp(-change / 2).sum()
  moved = law * np.exp(change)
  moved /= moved.sum()
  np.testing.assert_allclose(np.abs(moved - law).sum() / 2, c.shift_bound(change))
  loss = c.sharing_loss(np.array([1.0, 0.0]), np.array([0.0, 1e-9]), np.eye(2), 1)
  np.testing.assert_allclose(loss.actual, loss.bound, rtol=1e-6)


def test_mass_says_nothing_of_the_logarithm():
  """U2, O2 and P2 are false: information falls by more than ln(1/τ) where 1 − τ was dropped."""
  law = np.full((3, 4), 0.0)
  law[:, 0], law[range(3), [1, 2, 3]] = 0.9, 0.1
  chosen = np.arange(4) == 0
  kept = np.where(chosen, law, 0) / law[:, :1]
  lost = mutual_information(law) - mutual_information(kept)
  assert lost > np.log(1 / 0.9)
  assert lost <= c.information_bound(c.dropped_mass(law, chosen).max(), 4)


def test_bounds_are_not_empty():
  """They are small where little changes, and what they bound is there at all."""
  rng = np.random.default_rng(0)
  anchor, k = rng.normal(size=8), rng.normal(size=(40, 8))
  near = c.query_drift(anchor + 1e-3, anchor, k)
  assert 0 < near.actual < near.bound < 0.02
  far = c.sharing_loss(-anchor, anchor, k, 5)
  assert 0.3 < far.actual < far.bound


def test_unit_queries_are_not_enough():
  """Why √(2 − 2τ) will not do: longer queries of the same angle drift beyond it (Eq. 14)."""
  a, b, tau = np.array([1.0, 0.0]), np.array([0.8, 0.6]), 0.8
  k = np.array([[0.0, 1.0], [0.0, -1.0]]) * 0.1
  drift = c.query_drift(100 * b, 100 * a, k)
  paper = 2 * 0.1 / np.sqrt(2) * np.sqrt(2 - 2 * tau)
  assert paper < drift.actual <= drift.bound


@functools.partial(jax.jit, static_argnums=(0, 2))
def shown(method, position, size):
  """The first token that a window of the top layer shows to each query, and all that it shows."""
  window = method.window(method.at(Env(4), 3), position[None])
  return window.first[0], window.sees(jnp.arange(size)[None, None])[0, 0]


@given(st.integers(0, 2**32 - 1), st.sampled_from(SCALES), st.sampled_from([0.1, 0.5, 0.9]))
def test_window_bound_holds(seed, scale, phi):
  """Whatever the weights are, by the window of a real layer; decaying ones give a small bound."""
  rng = np.random.default_rng(seed)
  position, sinks, size = np.array([9, 30, 59]), 2, 60
  first, seen = map(np.asarray, shown(PSAW(sinks=sinks, phi=phi), position, size))
  visible = np.arange(size) <= position[:, None]
  k = rng.normal(size=(2, 1, size, 8)) * scale
  weight = c.attention(rng.normal(size=(2, 3, 8)), k, visible)
  loss = c.window_loss(weight, position, sinks, first)
  assert loss.holds
  np.testing.assert_allclose(loss.actual, c.dropped_mass(weight, seen), atol=1e-15)
  fit = c.fit_recency(weight, position, sinks, position - np.maximum(first, 0) + 1)
  behind = (position[:, None] - np.arange(size))[:, sinks:]
  rate, log_kappa = fit.rate[:, None, None], fit.log_kappa[:, None, None]
  with np.errstate(divide="ignore"):
    room = log_kappa + np.log(-np.expm1(-rate)) - rate * behind - np.log(weight[..., sinks:])
  assert (room[np.broadcast_to(behind >= 0, room.shape)] > -1e-9).all()  # Eq. 44


@given(st.integers(0, 2**32 - 1), st.sampled_from(SCALES), st.sampled_from(SCALES))
def test_freezing_bound_holds(seed, scale, change):
  rng = np.random.default_rng(seed)
  q, k = rng.normal(size=(3, 8)) * scale, rng.normal(size=(3, 40, 8))
  frozen = np.where((np.arange(40) < 25)[:, None], k + change * rng.normal(size=k.shape), k)
  visible = np.arange(40) < np.array([40, 30, 10])[:, None]
  assert c.freezing_loss(q, k, frozen, visible).holds
  assert c.freezing_loss(q, k, frozen).holds
  largest = np.linalg.norm(frozen - k, axis=-1).max(-1)
  given = c.freezing_loss(q, k, frozen, largest=largest)
  assert (given.bound >= c.freezing_loss(q, k, frozen).bound - 1e-12).all()
  reach = np.linalg.norm(q, axis=-1) * largest / np.sqrt(8)
  np.testing.assert_allclose(given.bound, np.tanh(reach / 2))


# ---- Measured


def test_measured_full_drops_nothing():
  layer = begun(Measured(Full()), Stream.random(0), [20, 5])
  _, aux = layer.decode([20, 5])
  np.testing.assert_array_equal(aux["dropped"], 0)
  np.testing.assert_array_equal(aux["overlap"], 1)


@pytest.mark.slow
@pytest.mark.parametrize("base", [PSAW(sinks=2, phi=0.3), CIS(k=5, sinks=1, local=3, block=4)])
def test_measured_is_what_the_certificates_say(base):
  """Over a generation; the base's own diagnostics stay."""
  stream, lengths = wandering(3, tokens=40, kv_heads=3), [20, 6]
  layer = Layer(Measured(base), stream, layer=3)
  plain = Layer(base, stream, layer=3)
  layer.prefill(lengths)
  plain.prefill(lengths)
  for step in range(12):
    at = [n + step for n in lengths]
    (out, aux), (want, own) = layer.decode(at), plain.decode(at)
    np.testing.assert_array_equal(out, want)
    assert all((np.asarray(aux[name]) == np.asarray(x)).all() for name, x in own.items())
    k = np.asarray(layer.cache.slots["k"])[:, :, None]
    place = np.asarray(at)[:, None, None]
    q = layer.at.env.rope.rotate(
      jnp.stack([stream.q[b, :, :, t] for b, t in enumerate(at)]), jnp.asarray(place)
    )
    weight = c.attention(q, k, (np.arange(k.shape[3]) <= place[..., None]))
    for b, t in enumerate(at):
      for h in range(3):
        assert int(aux["visited"][b, h]) <= t + 1
        oracle = c.heaviest(weight[b, h], int(aux["visited"][b, h]))
        least = c.dropped_mass(weight[b, h], oracle)
        assert (np.asarray(aux["dropped"][b, h]) >= least - 1e-6).all()
        if isinstance(base, PSAW):
          first = int(base.window(layer.at, jnp.asarray([[t]])).first[0, 0])
          seen = (np.arange(k.shape[3]) < 2) | (np.arange(k.shape[3]) >= first)
          np.testing.assert_allclose(
            aux["dropped"][b, h], c.dropped_mass(weight[b, h], seen), atol=1e-6
          )
          seen &= np.arange(k.shape[3]) <= t
          np.testing.assert_allclose(aux["overlap"][b, h], c.overlap(seen, oracle))


# ---- real activations

STEPS = 32


@pytest.fixture(scope="module")
def real(smollm2):
  return activations(smollm2, STEPS)


@pytest.mark.slow
def test_sharing_on_real_activations(real):
  """Neighbouring queries over the same keys, every layer and head: Eq. 14 as it stands here."""
  queries, keys, _ = real
  q, anchor, k = queries[..., 1:, :], queries[..., :-1, :], keys[:, :, None, None]
  drift, loss = c.query_drift(q, anchor, k), c.sharing_loss(q, anchor, k, 16)
  assert drift.holds and loss.holds
  assert 0 < loss.actual.mean() < drift.actual.mean() < 2


@pytest.mark.slow
def test_window_on_real_activations(real):
  """PSAW's dropped mass under a decay that is fitted to every query head of every layer."""
  queries, keys, _ = real
  size = keys.shape[2]
  position = np.arange(size - STEPS, size)
  weight = c.attention(queries, keys[:, :, None, None], np.arange(size) <= position[:, None])
  method = PSAW(sinks=8)
  first = method.window(method.at(Env(4), 3), jnp.asarray(position[None])).first[0]
  loss = c.window_loss(weight, position, 8, first)
  assert loss.holds and (loss.actual > 0).all()


@pytest.mark.slow
def test_freezing_on_real_activations(real):
  """Keys of half the tokens taken from the layer below, one layer at a time."""
  queries, keys, _ = real
  frozen = (np.arange(keys.shape[2]) < keys.shape[2] // 2)[:, None]
  mixed = np.where(frozen, keys[:-1], keys[1:])[:, :, None, None]
  loss = c.freezing_loss(queries[1:], keys[1:, :, None, None], mixed)
  assert loss.holds and (loss.actual > 0).all()


@pytest.mark.slow
def test_what_cis_leaves_out_of_real_attention(real):
  """Every layer as a row of its own: ρ̂ above 1/s, and what sharing costs beside exact top-k."""
  queries, keys, values = real
  layers, heads, groups, _, head_dim = queries.shape
  size = keys.shape[2]
  before = np.zeros((layers, heads, groups, size - STEPS, head_dim), np.float32)
  stream = Stream(np.concatenate([before, queries], 3), keys, values)  # rotated already

  def measure(method):
    still = Env(4, Rope(scaling=Linear(1e30)), impl="reference", tile=4)
    layer = begun(
      Measured(method), stream, [size - STEPS] * layers, capacity=size, layer=3, env=still
    )
    reports = [layer.decode([t] * layers)[1] for t in range(size - STEPS, size)]
    names = "retrieved", "visited", "overlap", "dropped"
    report = {name: np.stack([x[name] for x in reports])[:, None] for name in names}
    ratio = c.retrieval_ratio(report["retrieved"])
    tokens = c.tokens_per_head(report["visited"])
    return ratio, tokens, report["overlap"].mean(), report["dropped"].mean()

  budget = {"k": 22, "sinks": 2, "local": 8, "block": 8}
  exact, shared = measure(CIS(**budget, tau=1.0)), measure(CIS(**budget))
  assert exact[:2] == (1, 32)
  assert 1 / 8 < shared[0] < 0.6 and 32 < shared[1] < 32 + 2 * 7
  assert exact[2] > shared[2] > 0.5  # overlap with each query head's own oracle
  assert exact[3] < shared[3] < 0.3  # dropped mass
  narrowed = measure(PSAW(CIS(**budget), sinks=2))
  assert narrowed[1] < shared[1]  # the window takes shared tokens away


def test_what_no_query_sees_changes_nothing_by_freezing():
  rng = np.random.default_rng(0)
  q, k = rng.normal(size=8), rng.normal(size=(5, 8))
  frozen, visible = k.copy(), np.arange(5) > 1
  frozen[0] += 9
  loss = c.freezing_loss(q, k, frozen, visible)
  assert loss.actual == 0 and loss.bound == 0
