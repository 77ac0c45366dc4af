"""ART with certify: what is left unread never moves the output by more than ε·max‖v‖."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import ART, PSAW, Cache, CacheSpec, Carry, Env, Full, Prompt, Quantised, Rope, SnapKV
from kvjax.families import sight
from kvjax.methods.art.certificate import unread_mass
from kvjax.methods.art.splits import Walked
from kvjax.primitives.codes import rounded_query
from kvjax.testing.layer import Layer, Stream, rotate, softmax_average
from tests.kernels import decode_oracle
from tests.kernels.listed import alike
from tests.oracles import begun, keys

B, K, G, S, H, TILE = 512, 2, 2, 24, 4, 2


@functools.cache
def runner(method, impl="reference", cap=None):
  """Attention of one query per row over a full cache whose bounds are the method's own."""
  at = method.at(Env(1, impl=impl, soft_cap=cap), 0)

  @jax.jit
  def run(q, k, v, length):
    spec = Stream.random(0, 1, K, G, S, H).spec(S, dtype=k.dtype)
    slot = jnp.arange(S, dtype=jnp.int32)
    pos = jnp.broadcast_to(jnp.where(slot < length[:, None, None], slot, -1), k.shape[:3])
    heads = {n: x.empty((B, K)) for n, x in method._pages.summaries(spec).items()}
    cache = Cache({"k": k, "v": v, "pos": pos}, heads, {"seen": length, "used": length})
    cache = method.settle(at, cache, Prompt(length, length, None, S, 0))
    attended = method.attend(at, cache, sight.visible(at, cache), q)
    return attended.state.o, attended.noted(Walked).tiles

  return run


def exact(q, k, v, length, cap=None):
  """Attention in float64, under a soft cap, and the largest ‖v‖ of every KV head."""
  o, *_ = decode_oracle.exact(q, k, v, lambda b, _: range(length[b]), cap)
  seen = np.arange(S) < length[:, None, None]
  return o, np.where(seen, np.linalg.norm(np.asarray(v, np.float64), axis=-1), 0).max(-1)


def adversary(kind, seed):
  """q, k, v, lengths of B rows, made to get past the bound."""
  rng = np.random.default_rng(seed)
  q, k = rng.normal(size=(B, K, G, H)), rng.normal(size=(B, K, S, H))
  v, length = rng.normal(size=(B, K, S, H)), rng.integers(1, S + 1, B)
  scale = 10.0 ** rng.uniform(-2, 2.5, (B, 1, 1, 1))
  if kind == "any scale":
    k = k * scale
  else:
    # Keys of a tile are alike, so that the bound is what is there; one channel carries all.
    k = np.repeat(k[:, :, ::TILE], TILE, 2)
  if kind == "tight":
    # Everything heavy has one value, everything light its opposite: the largest error there is.
    x = np.sort(rng.exponential(rng.uniform(0.5, 4, (B, K, 1)), (B, K, S // TILE)), -1)
    k[..., 0], q[..., 0] = np.repeat(x, TILE, -1), 2 * abs(q[..., :1])[..., 0]
    k[..., 1:] = 0
    heavy = np.arange(S) >= rng.integers(0, S, (B, 1, 1))
    v = np.where(heavy, 1.0, -1.0)[..., None] * np.array([3.0, 0, 0, 0]) + 0 * v
  if kind == "hidden":
    # A tile whose keys are opposite: its bounds are wide, its keys score low, or one scores high.
    k[:, :, ::2] = -k[:, :, 1::2] * rng.choice([1, 8], (B, K, S // 2, 1))
    v[:, :, ::2] = 50 * v[:, :, ::2] * rng.choice([0, 1], (B, K, S // 2, 1))
  if kind == "cancelling":
    # Two large terms cancel, by what is left of the query once it is rounded to bfloat16 too.
    q[..., :2] = [4.0, -4.0] + 0.01 * rng.uniform(-1, 1, (B, K, G, 2))
    c = np.repeat(rng.uniform(-200, 200, (B, K, S // TILE)), TILE, -1)
    k[..., 0] = k[..., 1] = c
    k[..., 2:] = 0
    v = np.sign(c)[..., None] * np.array([3.0, 0, 0, 0]) + 0 * v
  if kind == "huge":
    q, k = q * 1e2, k * 1e2  # logits of thousands, whose rounding alone is a factor
  return *(x.astype(np.float32) for x in (q, k, v)), length.astype(np.int32)


def stopped(kind, seed, method, impl, dtype=jnp.float32, cap=None):
  """Number of an adversary's walks that stop early; none is off by more than ε·max‖v‖."""
  q, k, v, length = adversary(kind, seed)
  k, v = (jnp.asarray(x, dtype) for x in (k, v))
  o, tiles = runner(method, impl, cap)(q, k, v, length)
  q, k, v = (np.asarray(jnp.asarray(x, dtype), np.float32) for x in (q, k, v))
  want, most = exact(q, k, v, length, cap)
  error, most = np.linalg.norm(np.asarray(o, np.float64) - want, axis=-1), most[..., None]
  # Beside the bound: rounding of the output, of logits in the output, and of the kernel's weights
  # to the dtype of the values, by half a unit in the last of 8 bits.
  logits = 1e-6 * np.abs(np.einsum("bkgh,bksh->bkgs", q, k)).max(-1) / np.sqrt(H)
  logits = logits if cap is None else np.minimum(logits, 2 * cap)
  weights = 2.0**-8 if (impl, dtype) == ("pallas", jnp.bfloat16) else 0
  allowed = method.certify + 4e-6 + 4 * logits + weights
  assert (error <= allowed * most).all(), (error - method.certify * most).max()
  return (np.asarray(tiles) < -(-length // TILE)[:, None, None]).sum()


KINDS = ["any scale", "tight", "hidden", "cancelling", "huge"]


@pytest.mark.rest(5)
@pytest.mark.slow
@pytest.mark.parametrize("stop", ["group", "head"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("impl", ["reference", "pallas"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_violation_in_many_adversarial_cases(kind, impl, dtype, stop):
  """2,048 query heads for each ε, of float32 queries over a cache of either dtype."""
  every = (1e-4, 0.02, 0.3, 1.0, 1.9)  # each is a kernel, and takes seconds to compile
  every = every if impl == "reference" else every[1:4:2]
  methods = [ART(tile=TILE, certify=eps, stop=stop) for eps in every]
  assert sum(stopped(kind, seed, m, impl, dtype) for seed, m in enumerate(methods)) > 500


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["reference", "pallas"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_violation_under_a_soft_cap(kind, impl):
  """Caps that most logits reach, and one that few do."""
  capped_ = enumerate([(0.3, 0.5), (0.3, 4.0), (1.0, 4.0), (0.02, 50.0)])
  found = [
    stopped(kind, seed, ART(tile=TILE, certify=eps), impl, cap=cap) for seed, (eps, cap) in capped_
  ]
  assert sum(found) > 500


@pytest.mark.slow
def test_the_bound_is_nearly_reached():
  """Where bounds say what is there and values are opposite, the error comes near to ε."""
  q, k, v, length = adversary("tight", 0)
  nearest = 0.0
  for eps in (0.05, 0.2, 0.6):
    o, _ = runner(ART(tile=TILE, certify=eps, stop="head"))(q, k, v, length)
    want, most = exact(q, k, v, length)
    error = np.linalg.norm(o - want, axis=-1) / most[..., None]
    nearest = max(nearest, (error / eps).max())
  assert 0.8 < nearest <= 1 + 1e-4


@pytest.mark.slow
@settings(max_examples=8)
@given(
  st.integers(0, 1000),
  st.sampled_from([0.0, 0.01, 0.5, 1.5]),
  st.floats(0.1, 4.0),
)
def test_whole_generations(seed, eps, heat):
  """Chunked prompts, ragged rows, tokens as they come: within ε of attention to everything."""
  stream = Stream.random(seed, tokens=40)
  stream.k[:] *= heat
  layer = Layer(ART(tile=4, certify=eps), stream)
  layer.prefill([9, 4], tokens=9)
  layer.prefill([8, 3], start=[9, 4], tokens=8, past=9)
  for i in range(5):
    at = [17 + i, 7 + i]
    out, aux = layer.decode(at)
    for b, h, g in np.ndindex(2, 3, 3):
      n = at[b] + 1
      k = keys(stream, b, h, range(n))
      values = np.float64(stream.v[b, h, :n])
      x = k @ rotate(stream.q[b, h, g, n - 1], n - 1) / np.sqrt(stream.q.shape[-1])
      error = np.linalg.norm(out[b, h, g] - softmax_average(x, values))
      assert error <= eps * np.linalg.norm(values, axis=-1).max() + 1e-4
    if eps == 0:
      np.testing.assert_array_equal(aux["tiles"][:, 0, 0], [-(-(n + 1) // 4) for n in at])


@pytest.mark.slow
def test_over_a_window():
  """What the base hides is neither read nor missed."""
  stream, base = Stream.random(3, tokens=40), PSAW(sinks=3, phi=0.5, start=0.0)
  outputs = {}
  for name, method in {
    "base": base,
    "all": ART(base, tile=4, certify=0.0),
    "some": ART(base, tile=2, certify=1.5),
  }.items():
    layer = begun(method, stream, [30, 21], layer=3)
    outputs[name] = layer.decode([30, 21])
  np.testing.assert_allclose(outputs["all"][0], outputs["base"][0], atol=1e-5)
  np.testing.assert_array_equal(outputs["all"][1]["visited"], outputs["base"][1]["visited"])
  most = np.linalg.norm(stream.v[:, :, :31], axis=-1).max()
  assert np.linalg.norm(outputs["some"][0] - outputs["base"][0], axis=-1).max() <= 1.5 * most
  assert (outputs["some"][1]["visited"] < outputs["base"][1]["visited"]).any()


@pytest.mark.slow
def test_first_tokens_are_read_whatever_they_weigh():
  """The newest tile has nearly all of it, and comes after theirs."""
  stream = Stream.random(3, tokens=40)
  stream.q[:], stream.k[:, :, :30] = 0, 0
  method = ART(PSAW(sinks=3, phi=0.5, start=0.0), tile=4, certify=1.99)
  layer = begun(method, stream, [30, 21], layer=3)
  _, aux = layer.decode([30, 21])
  np.testing.assert_array_equal(aux["tiles"], 2)


@pytest.mark.slow
def test_where_a_walk_begins_decides_what_it_can_miss():
  """A dominant tile: missed from the end; found by score, by bounds, and among first tokens."""
  stream = Stream.random(5, batch=1, kv_heads=1, groups=2, tokens=48, head_dim=16)
  stream.q[:], stream.k[:], stream.v[:] = 0, 0, 1
  stream.q[..., 7] = 8  # a channel that positions hardly turn
  stream.k[:, :, 2, 7], stream.v[:, :, 2] = 8, -1
  found, read, cut = {}, {}, SnapKV(40, window_size=2, pool=1)
  detector = {"tau": 1e-3, "phi": 1e-3, "patience": 2, "tile": 4, "splits": 1}
  for name, method in {
    "detected": ART(**detector),
    "after first tokens": ART(**detector, sinks=4),
    "by score": ART(cut, **detector),
    "certified": ART(tile=4, certify=0.05),
    "dense": Full(),
    "cut": cut,
  }.items():
    layer = begun(method, stream, [44])
    out, aux = layer.decode([44])
    found[name], read[name] = out.mean(), np.asarray(aux.get("tiles", 0)).max()
  assert found["detected"] > 0.99 and found["after first tokens"] < 0.5 > found["dense"]
  assert abs(found["certified"] - found["dense"]) < 0.05 > abs(found["by score"] - found["cut"])
  assert read["certified"] < 6 and read["after first tokens"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["group", "head"])
def test_the_kernel_equals_the_reference(stop):
  """Same order, same stops, same output, over tokens as they come."""
  method = ART(tile=2, certify=1.5, stop=stop)
  stream, lengths = Stream.random(2, tokens=40), np.array([30, 17])
  (_, told, _), _ = alike(method, stream, 1, "tiles", "visited", steps=3, lengths=lengths)
  left = [(lengths + i + 1)[:, None] - x["visited"] for i, x in enumerate(told)]
  assert np.count_nonzero(left) > 2


def test_the_first_tile_is_as_unread_as_any():
  """Last in the order and like the others, it has to be read before anything can be certified."""
  q, k = np.ones((B, K, G, H)), np.ones((B, K, S, H))
  k[:, :, :TILE] *= 0.99
  v, length = np.random.default_rng(0).normal(size=(B, K, S, H)), np.full(B, S)
  arrays = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
  _, tiles = runner(ART(tile=TILE, certify=1e-3))(*arrays, jnp.asarray(length))
  assert (np.asarray(tiles) == S // TILE).all()


def test_bounds_of_a_further_turn_begin_with_its_first_token():
  """Whose page the turn before has begun."""
  layer = begun(ART(tile=4, certify=0.1), Stream.random(0), [7, 9])
  layer.prefill([6, 3], start=[7, 9], past=None)
  k, heads = np.asarray(layer.cache.slots["k"]), layer.cache.heads
  for b, used in enumerate((13, 12)):
    for page in range(-(-used // 4)):
      held = k[b, :, 4 * page : min(4 * page + 4, used)]
      np.testing.assert_array_equal(heads["key_max"][b, :, page], held.max(1))
      np.testing.assert_array_equal(heads["key_min"][b, :, page], held.min(1))


def test_unread_mass_is_the_logarithm_of_what_is_left_and_no_less():
  """Against float64, tile by tile; above it by no more than the rounding that is allowed for."""
  rng = np.random.default_rng(3)
  bounds = rng.normal(size=(2, 3, 4, 9)).astype(np.float32) * 8
  errors = rng.uniform(0.0, 0.5, bounds.shape).astype(np.float32)
  errors[..., 0] = 0  # the largest is that of another tile
  keys = rng.integers(0, 5, (2, 3, 9)).astype(np.int32)
  found = np.asarray(jax.jit(unread_mass)(bounds, errors, keys), np.float64)
  assert np.isneginf(found[..., -1]).all()
  for b, h, g, t in np.ndindex(2, 3, 4, 9):
    left = (keys[b, h, t:] * np.exp(np.float64(bounds[b, h, g, t:]))).sum()
    most = errors[b, h, g, keys[b, h] > 0].max()
    want = math.log(left) + most if left else -math.inf
    assert want + 5e-6 < found[b, h, g, t] < want + 1e-4 or want == found[b, h, g, t] == -math.inf


@pytest.mark.core(1)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_bounds_hold_what_codes_stand_for(dtype):
  """Numbers of codes are float32, and extremes are kept in 16 bits: rounded, these do not hold."""
  rng, base = np.random.default_rng(3), ART(certify=0.5, tile=1)
  method, shapes = Quantised(base), ((2, 3, 3, 40, 16), *[(2, 3, 40, 16)] * 2)
  q, k, v = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
  at, count = method.at(Env(4, Rope.none(), impl="reference"), 1), jnp.asarray([40, 23])
  cache = Cache.empty(method, CacheSpec(2, 64, 3, 3, 16, 4, dtype), 1)
  prompt = Prompt(count, count, None, 40, 0)

  @jax.jit
  def run(q, k, v):
    stored = method.prefill(at, cache, q, k, v, prompt, Carry())[1]
    seen, q = method._of_base(stored), rounded_query(q[:, :, :, -1])
    return seen, q, base._order(at, seen, sight.visible(at, seen), q)

  seen, q, order = run(q, k, v)
  unread, table = np.float64(order.unread), np.asarray(order.plan.table)
  x = np.einsum("bkgh,bksh->bkgs", np.float64(q), np.float64(seen.slots["k"])) / 4
  for b, h, g in np.ndindex(*x.shape[:3]):
    listed = [t for t in table[b, h] if t >= 0]
    assert sorted(listed) == list(range(count[b]))
    for i in range(len(listed)):
      assert np.logaddexp.reduce(x[b, h, g, listed[i:]]) <= unread[b, h, g, i]
  pages = [np.float64(seen.heads[name]) for name in ("key_min", "key_max")]
  numbers = np.float64(seen.slots["k"])[:, :, :23]
  assert (numbers > pages[1][:, :, :23]).any() and (numbers < pages[0][:, :, :23]).any()
