"""CIS in one launch between entering a token and noting it: the reference's lists, at every step.

On a GPU the same tests run the compiled kernel.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import ART, CIS, CPE, PSAW, Cache, CacheSpec, Wrapper
from kvjax.kernels.cis.read import LANES, read
from kvjax.kernels.common import devices
from tests.cis_oracle import NOTES, beside_the_reference, places, step, wandering
from tests.kernels.decode_oracle import same_bits
from tests.steps import operations


@pytest.fixture(autouse=True)
def small_device(monkeypatch):
  """Of two multiprocessors: three rows are as many as run at once."""
  monkeypatch.setattr(devices, "_default", lambda: devices.Device("small", 2, 99 << 10))


CASES = {
  "ragged": (CIS(k=9, sinks=0, local=4, block=4, tau=0.7, radius=1), None),
  "far neighbours": (CIS(k=6, sinks=2, local=3, block=5, tau=0.75, radius=2, m=4), None),
  "query heads": (CIS(k=40, sinks=1, local=2, block=5, tau=0.75, per="query_head"), 2.0),
  "window": (PSAW(CIS(k=6, sinks=2, local=3, block=4, tau=0.7), sinks=2, phi=0.4), None),
  "mean": (CIS(k=9, sinks=0, local=4, block=4, tau=0.7, agree="mean"), None),
  "cpe": (CPE(k=6, sinks=2, local=3, block=5, tau=0.75, phi=0.5), None),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_same_steps_as_the_reference(name):
  """Both from the same cache at every step; the kernel's goes on. One row is idle now and then."""
  method, cap = CASES[name]
  stream = wandering(3, tokens=26, kv_heads=3, groups=1)
  retrieved = beside_the_reference(method, stream, 29, cap, idle=True)
  assert retrieved.sum() > 20 and (~retrieved).sum() > 20


def operands(slots=40, batch=1, heads=3, head_dim=16, block=4, width=15):
  """A first step of a block, which shares with none."""
  normal = functools.partial(jax.random.normal, shape=(batch, heads, slots, head_dim))
  k, v = (normal(jax.random.key(i)) for i in range(2))
  q = jax.random.normal(jax.random.key(2), (batch, heads, 1, head_dim))
  queries = jnp.zeros((batch, heads, block, 1, head_dim))
  anchors = jnp.zeros((batch, heads, block, 1), jnp.int32)
  retrieved = jnp.full((batch, heads, block, 1, width), -1, jnp.int32)
  end = jnp.full(batch, slots, jnp.int32)
  return q, k, v, queries, anchors, retrieved, end * 0, end, end


SIZES = {"tau": 0.8, "k": 9, "sinks": 2, "local": 3}
run = jax.jit(functools.partial(read, **SIZES))


@pytest.mark.slow
def test_the_heaviest_and_their_attention():
  """NumPy float64: the heaviest tokens of the middle, and a softmax over what is listed; twice."""
  q, k, v, *rest = operands()
  made = (_, anchor, retrieves, *_), (found, _, table, count), (state, out) = run(q, k, v, *rest)
  assert (np.asarray(retrieves) == 1).all() and (np.asarray(anchor) == 0).all()
  for head in range(3):
    logits = np.asarray(k, np.float64)[0, head] @ np.asarray(q, np.float64)[0, head, 0] / 4
    middle = sorted(np.argsort(-logits[2:37], kind="stable")[:9] + 2)
    assert np.asarray(found)[0, head].tolist() == middle
    listed = [0, 1, 39, 38, 37, *middle]
    assert np.asarray(table)[0, head][: count[0, head]].tolist() == listed
    weight = np.exp(logits[listed] - logits[listed].max())
    want = weight @ np.asarray(v, np.float64)[0, head][listed] / weight.sum()
    np.testing.assert_allclose(out[0, head, 0], want, atol=1e-5)
    np.testing.assert_allclose(state.m[0, head, 0], logits[listed].max(), atol=1e-5)
  same_bits(made, run(q, k, v, *rest))


@pytest.mark.slow
@pytest.mark.parametrize("slots", [40, 1, 1500])
def test_ties_go_to_the_lowest(slots):
  """Keys that are all alike: the first tokens of the middle, in chunks and out of them."""
  q, k, v, *rest = operands(slots)
  _, (found, *_), _ = run(q, k * 0 + 1, v, *rest)
  want = [*range(2, max(2, min(11, slots - 3)))]
  for tokens in np.asarray(found)[0]:
    assert tokens.tolist() == want + [-1] * (min(9, slots) - len(want))


def test_rows_that_share_look_at_no_other_key():
  """NaN in keys and values that are not listed never leaks from a row that shares."""
  q, k, v, queries, anchors, retrieved, step, seen, stop = operands()
  unit = q / jnp.linalg.norm(q, axis=-1, keepdims=True)
  queries = queries.at[:, :, 0].set(unit)
  retrieved = retrieved.at[..., 0, 0, :2].set(jnp.array([7, 20]))
  listed = jnp.zeros(40, bool).at[jnp.array([0, 1, 7, 20, 37, 38, 39])].set(True)[:, None]
  k, v = (jnp.where(listed, x, jnp.nan) for x in (k, v))
  block = queries, anchors, retrieved, step + 1
  (_, anchor, retrieves, *_), (*_, count), (_, out) = run(q, k, v, *block, seen, stop)
  assert not np.asarray(retrieves).any() and not np.asarray(anchor).any()
  assert (np.asarray(count) == 7).all() and np.isfinite(out).all()


@pytest.mark.slow
def test_nan_leaves_the_notes_alone():
  """A row whose attention is NaN says so; its block stays as it was, as by the reference."""
  method, stream = CASES["ragged"][0], wandering(3, tokens=6, kv_heads=3, groups=1)
  at, live, stepped = places(method), np.ones(2, bool), jax.jit(step, static_argnums=0)
  cache = Cache.empty(method, stream.spec(29), 3)
  for t in range(5):
    token = [x[..., t, :] for x in (stream.q, stream.k, stream.v)]
    cache = stepped(at["pallas"], cache, *token, live)[0]
  token[0][1, 2] = np.nan
  after, out, *_ = stepped(at["pallas"], cache, *token, live)
  assert np.isnan(out[1, 2]).all() and np.isfinite(out[0]).all()
  for name in NOTES:
    np.testing.assert_array_equal(after.heads[name][1], cache.heads[name][1])
  np.testing.assert_array_equal(after.rows["step"] - cache.rows["step"], [1, 0])


def with_own(move):
  """A wrapper that has its own form of a move, which asks the base for it."""
  form = lambda self, at, *rest: getattr(self.base, move)(at, *rest)  # noqa: E731
  return type("Own", (Wrapper,), {move: form})


class Attending(CIS):
  """Attention of its own."""

  def attend(self, at, cache, plan, q):
    return super().attend(at, cache, plan, q)


ROWS = CacheSpec(1, 64, 3, 1, 16, 8)


@pytest.mark.core(3)
@pytest.mark.parametrize(
  ("method", "changes", "launches"),
  [
    (CIS(k=6), {}, 3),
    (CIS(k=6, per="query_head"), {}, 3),
    (CPE(k=6), {}, 3),
    (CIS(k=6), {"kv_heads": 2}, None),  # fewer rows than run at once
    (CIS(k=6), {"groups": 3}, None),
    (CIS(k=6), {"capacity": LANES + 1}, None),
    *((with_own(move)(CIS(k=6)), {}, None) for move in ("attend", "plan", "span")),
    *((over(Attending(k=6)), {}, None) for over in (lambda method: method, with_own("plan"))),
    (ART(CIS(k=6)), {}, None),
  ],
)
def test_where_one_launch_chooses_and_reads(method, changes, launches):
  counts = operations(method, spec=dataclasses.replace(ROWS, **changes))
  assert counts["launch cis_read"] == (launches is not None)
  assert launches in (None, counts["launches"])


def test_what_is_refused():
  q, k, v, queries, *rest = operands()
  with pytest.raises(NotImplementedError, match="found 2 query heads"):
    read(jnp.tile(q, (1, 1, 2, 1)), k, v, jnp.tile(queries, (1, 1, 1, 2, 1)), *rest, **SIZES)
  long = jax.ShapeDtypeStruct((1, 3, LANES + 1, 16), jnp.float32)
  with pytest.raises(NotImplementedError, match=f"found {LANES + 1} slots"):
    jax.eval_shape(functools.partial(read, **SIZES), q, long, long, queries, *rest)
