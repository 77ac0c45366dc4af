"""The front door on plain arrays gives what the drivers give, or refuses by name."""

import functools
import inspect
import runpy
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import settings
from kvjax.runtime import front
from kvjax.testing.layer import Layer, Stream, capped, rotate
from tests import compiled

ROWS, KV_HEADS, GROUPS, WIDTH, CAPACITY = 2, 3, 2, 16, 48
LENGTHS = np.array([29, 17], np.int32)
STEPS = 5
STREAM = Stream.random(5, ROWS, KV_HEADS, GROUPS, 40, WIDTH)
# Float32 against NumPy's float64, and sums in another order under a scan.
CLOSE = {"rtol": 0, "atol": 5e-6}
PIECES = ("infllm", "ltri")  # read a prompt in pieces of their own
SKIP = ("etf", "cpe")  # leave tokens out of deep layers
CARRY = ("hshare",)  # hands something on, and settles at a prompt's end
CORE = {(name, "reference") for name in ("full", "h2o", "snapkv", "quest", "criticalkv")}
DEPTH = ("psaw", "pyramidkv", "random")  # do not do the same in every layer


def plain(tokens=slice(None)):
  """The stream as attention layers have it: q [B, T, N, H], k and v [B, T, K, H]."""
  q = np.moveaxis(STREAM.q, 3, 1)[:, tokens]
  q = q.reshape(*q.shape[:2], KV_HEADS * GROUPS, WIDTH)
  return q, *(np.moveaxis(x, 2, 1)[:, tokens] for x in (STREAM.k, STREAM.v))


def made(method, impl="reference", rope=kvjax.Rope(), layers=4, **how):  # noqa: B008 (frozen)
  sizes = {"batch": ROWS, "capacity": CAPACITY, "heads": KV_HEADS * GROUPS, "kv_heads": KV_HEADS}
  sizes |= {"head_dim": WIDTH, "layers": layers, "dtype": jnp.float32}
  return kvjax.empty_caches(method, **{**sizes, "rope": rope, "impl": impl, **how})


def answers(cache, arrays=None, told=(), **how):
  """The prompt's output, those of some steps, and the cache after them, each call jitted.

  What prompts alone are `told` is named apart.
  """
  q, k, v = plain() if arrays is None else arrays
  prompt = jax.jit(functools.partial(kvjax.prefill, **how, **dict(told)))
  size = int(LENGTHS.max())
  out, cache = prompt(cache, q[:, :size], k[:, :size], v[:, :size], LENGTHS)[:2]
  outs, step = [np.asarray(out)], jax.jit(functools.partial(kvjax.decode, **how))
  if not cache.ended:
    (cache,) = kvjax.finish([cache], jnp.asarray(LENGTHS))
  for i in range(STEPS):
    at = (np.arange(ROWS), LENGTHS + i)
    out, cache = step(cache, q[at], k[at], v[at])[:2]
    outs.append(np.asarray(out))
  return outs, cache


@pytest.mark.core(2)
@pytest.mark.kin
@pytest.mark.rest
@pytest.mark.parametrize(
  ("name", "impl"),
  [
    pytest.param(name, impl, marks=[pytest.mark.slow] * ((name, impl) not in CORE))
    for impl in ("reference", "pallas")
    for name in kvjax.METHODS
    if name not in PIECES + SKIP + CARRY
  ],
)
def test_it_gives_the_drivers_bits(name, impl):
  method = settings.example(kvjax.METHODS[name], 16)
  env = kvjax.Env(4, kvjax.Rope(), impl=impl)
  own = Layer(method, STREAM, CAPACITY, layer=2, env=env)
  weighs = method.traits.weighs_outputs
  told = {"wo": own.wo.reshape(-1, *own.wo.shape[2:])} if weighs else {}
  got, cache = answers(made(method, impl)[2], told=told)
  want = np.moveaxis(own.prefill(LENGTHS), 3, 1).reshape(got[0].shape)
  for row, size in enumerate(LENGTHS):
    np.testing.assert_array_equal(got[0][row, :size], want[row, :size])
  for i in range(STEPS):
    out, _ = own.decode(LENGTHS + i)
    np.testing.assert_array_equal(got[1 + i], out.reshape(got[1 + i].shape))
  for ours, theirs in zip(jax.tree.leaves(cache), jax.tree.leaves(own.cache), strict=True):
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_rotated_keys_under_no_rope():
  """Keys that come rotated are as good as keys that are rotated here, by NumPy's rotation."""
  q, k, v = plain()
  turned = [
    np.stack([rotate(x[:, t], t) for t in range(x.shape[1])], 1).astype(np.float32) for x in (q, k)
  ]
  for method in (kvjax.TOVA(12), kvjax.Quest(8, 4, dense_layers=0)):
    want, _ = answers(made(method)[1])
    got, _ = answers(made(method, rope=None)[1], (*turned, v))
    for row, size in enumerate(LENGTHS):
      np.testing.assert_allclose(got[0][row, :size], want[0][row, :size], **CLOSE)
    np.testing.assert_allclose(got[1:], want[1:], **CLOSE)


@pytest.mark.core(1)
@pytest.mark.parametrize("impl", ["reference", "pallas"])
def test_attention_by_hand(impl):
  """A scale, a window of the layer, a learned sink for each head, a soft cap: in float64."""
  window, cap = 6, 1.5
  own = {"scale": 0.3, "soft_cap": cap, "windows": (None, window)}
  caches = made(kvjax.Full(), impl, rope=None, layers=2, **own)
  assert caches[1].cache.size == window
  logit = np.linspace(-2, 3, KV_HEADS * GROUPS)
  got, _ = answers(caches[1], sinks=logit.astype(np.float32))
  q, k, v = (x.astype(np.float64) for x in plain())

  def by_hand(row, t, head):
    seen = slice(max(0, t + 1 - window), t + 1)
    logits = capped(0.3 * k[row, seen, head // GROUPS] @ q[row, t, head], cap)
    top = max(logits.max(), logit[head])
    weights = np.exp(logits - top)
    return weights @ v[row, seen, head // GROUPS] / (weights.sum() + np.exp(logit[head] - top))

  for row, size in enumerate(LENGTHS):
    for head in range(KV_HEADS * GROUPS):
      for t in (0, 7, size - 1):
        np.testing.assert_allclose(got[0][row, t, head], by_hand(row, t, head), **CLOSE)
      for i in range(STEPS):
        np.testing.assert_allclose(got[1 + i][row, head], by_hand(row, size + i, head), **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["snapkv", "full", "quest", "h2o"])
def test_prompts_padded_on_the_left(name):
  """Tokens that begin later in their row give the bits of tokens that begin at once."""
  method = settings.example(kvjax.METHODS[name], 16)
  cache, width, starts = made(method)[3], 32, np.array([3, 9], np.int32)
  padding = np.arange(width)[None, :, None, None] >= LENGTHS[:, None, None, None]
  q, k, v = (np.where(padding, np.nan, x) for x in plain(slice(width)))
  prompt = jax.jit(kvjax.prefill)
  want, read = prompt(cache, q, k, v, LENGTHS)
  moved = [
    np.stack([np.roll(row, s, 0) for row, s in zip(x, starts, strict=True)]) for x in (q, k, v)
  ]
  got, after = prompt(cache, *moved, LENGTHS, starts=starts)
  for row, (start, size) in enumerate(zip(starts, LENGTHS, strict=True)):
    np.testing.assert_array_equal(got[row, start : start + size], want[row, :size])
  jax.tree.map(np.testing.assert_array_equal, after, read)
  for lengths in (None, LENGTHS + width):  # a program takes no token from past the row's end
    _, rest = prompt(cache, *moved, lengths, starts=starts)
    np.testing.assert_array_equal(rest.cache.seen, width - starts)


@pytest.mark.parametrize("name", ["snapkv", "adakv", "streaming_llm", "r_kv", "prr"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_caches_keep_their_dtype(name, dtype):
  """A prompt of float32 and a step leave wider and narrower caches what they are."""
  with jax.enable_x64(dtype == "float64"):
    cache = made(settings.example(kvjax.METHODS[name], 16), dtype=dtype)[-1]
    _, after = jax.eval_shape(kvjax.prefill, cache, *plain())
    _, later = jax.eval_shape(kvjax.decode, after, *(x[:, 0] for x in plain()))
    for one in (after, later):
      assert jax.tree.map(jax.typeof, one) == jax.tree.map(jax.typeof, cache)


@pytest.mark.slow
def test_a_token_may_have_an_axis_of_its_own():
  (cache,) = made(kvjax.Full(), layers=1)
  at = (np.arange(ROWS)[:, None], np.zeros((ROWS, 1), int))
  one, _ = kvjax.decode(cache, *(x[at] for x in plain()))
  bare, _ = kvjax.decode(cache, *(x[:, 0] for x in plain()))
  np.testing.assert_array_equal(one[:, 0], bare)


SCANNED = {
  name: settings.example(kvjax.METHODS[name], 16) for name in ("full", "snapkv", "h2o", "tova")
} | {"quest": kvjax.Quest(8, 4, dense_layers=0)}


@pytest.mark.slow
@pytest.mark.parametrize("method", SCANNED.values(), ids=SCANNED)
def test_layers_under_a_scan(method):
  """Stacked caches under `jax.lax.scan` give what the layers give one by one."""
  caches = made(method, layers=2)
  q, k, v = (x[:, :20] for x in plain())
  lengths = jnp.array([20, 13])

  def layer(x, cache):
    out, cache = kvjax.prefill(cache, q + x, k, v, lengths)
    out, cache = kvjax.decode(cache, out[:, 12], k[:, 3], v[:, 5])
    return x + out.mean(), (out, cache)

  @jax.jit
  def scanned(caches):
    return jax.lax.scan(layer, jnp.zeros(()), caches)[1]

  outs, after = scanned(kvjax.stacked(caches))
  x = jnp.zeros(())
  for i, cache in enumerate(caches):
    x, (out, one) = jax.jit(layer)(x, cache)
    np.testing.assert_allclose(outs[i], out, **CLOSE)
    pos = jax.tree.map(lambda x, i=i: x[i], after.cache.pos)
    np.testing.assert_array_equal(pos, one.cache.pos)


def test_results_have_types():
  """For type checkers: a tuple of two without a carry, and one of three with it."""
  told = runpy.run_path(front.__file__)  # checks at run time hide the overloads
  pair = tuple[jax.Array, kvjax.LayerCache]
  triple = tuple[jax.Array, kvjax.LayerCache, kvjax.Carry]
  for name, move in (("decode", kvjax.decode), ("prefill", kvjax.prefill)):
    overloads = typing.get_overloads(told[name])
    hints = [typing.get_type_hints(x) for x in overloads]
    assert {x["carry"]: x["return"] for x in hints} == {type(None): pair, kvjax.Carry: triple}
    for x in (*overloads, told[name]):
      assert [*inspect.signature(x).parameters] == [*inspect.signature(move).parameters]
    assert typing.get_type_hints(move)["return"] == pair | triple


@pytest.mark.slow
def test_a_carry_goes_from_layer_to_layer():
  """HShare's shared sets: as the drivers hand them on; without a carry it is refused."""
  method = settings.example(kvjax.HShare, 16)
  caches, carry = made(method, layers=3), kvjax.Carry()
  q, k, v = (x[:, :20] for x in plain())
  lengths = jnp.array([20, 13])
  prefill, decode, read = jax.jit(kvjax.prefill), jax.jit(kvjax.decode), []
  for cache in caches:
    _, cache, carry = prefill(cache, q, k, v, lengths, carry=carry)
    read.append(cache)
  with pytest.raises(ValueError, match=r"HShare has not settled, expected kvjax\.finish"):
    kvjax.decode(read[0], q[:, 0], k[:, 0], v[:, 0])
  done, carry = jax.jit(kvjax.finish)(read, lengths), kvjax.Carry()
  for cache in done:
    out, _, carry = decode(cache, q[:, 0], k[:, 0], v[:, 0], carry=carry)
    assert np.isfinite(out).all()
  assert carry.heads
  with pytest.raises(TypeError, match="HShare hands something from layer to layer: found no carry"):
    decode(done[0], q[:, 0], k[:, 0], v[:, 0])


@pytest.mark.parametrize("name", PIECES + SKIP)
def test_what_only_a_decoder_can_do_is_refused(name):
  method = settings.example(kvjax.METHODS[name], 16)
  with pytest.raises(NotImplementedError, match=rf"{type(method).__name__}: found a method that"):
    kvjax.prefill(made(method)[3], *plain())


@pytest.mark.parametrize("name", DEPTH)
def test_without_a_number_depth_is_refused(name):
  caches = made(settings.example(kvjax.METHODS[name], 16))
  with pytest.raises((TypeError, ValueError), match=r"layer|different sizes"):
    answers(jax.tree.map(lambda x: x[0], kvjax.stacked(caches)))


def test_methods_that_move_tokens_need_the_rope():
  (cache,) = made(kvjax.StreamingLLM(16), rope=None, layers=1)
  with pytest.raises(
    NotImplementedError, match=r"Rope\.none\(\).* moves tokens to other positions"
  ):
    answers(cache)


def test_what_does_not_fit_is_refused():
  (cache,) = made(kvjax.Full(), layers=1)
  q, k, v = plain()
  prompts = [
    ({"q": q[:, :, :5]}, r"q: found shape \(2, 40, 5, 16\), expected"),
    ({"k": k[:, :7]}, r"k: found shape \(2, 7, 3, 16\), expected"),
    ({"q": q[:, :0], "k": k[:, :0], "v": v[:, :0]}, r"q: found shape \(2, 0, 6, 16\)"),
    ({"lengths": [40]}, r"lengths: found shape \(1,\), expected \(2,\)"),
    ({"lengths": [41, 7]}, r"lengths: found \[41, 7\], expected values in \[0, 40\]"),
    ({"lengths": [-3, 7]}, r"lengths: found \[-3, 7\], expected values in"),
    ({"lengths": [3.0, 7.0]}, "lengths: found float64, expected integers"),
    ({"lengths": [True, True]}, "lengths: found bool, expected integers"),
    ({"starts": [[0], [1]]}, r"starts: found shape \(2, 1\)"),
    ({"starts": [0, -1]}, r"starts: found \[0, -1\]"),
    (
      {"lengths": [40, 7], "starts": [1, 0]},
      r"starts: found \[1, 0\] with lengths \[40, 7\], expected tokens within the 40 of a row",
    ),
    (
      {"lengths": [9, 7], "total": [9, 6]},
      r"total: found \[9, 6\], expected one per row, at least lengths \[9, 7\]",
    ),
    ({"total": [40]}, r"total: found shape \(1,\), expected"),
    ({"sinks": jnp.ones(3)}, r"sinks: found shape \(3,\), expected \(6,\)"),
    ({"past": -1}, "past: found -1, expected an integer of 0"),
  ]
  for told, message in prompts:
    arrays = {name: np.array(x) if isinstance(x, list) else x for name, x in told.items()}
    with pytest.raises(ValueError, match=message):
      kvjax.prefill(cache, **{"q": q, "k": k, "v": v, **arrays})
  for told, message in (
    ({"v": v[:1, 0]}, r"v: found shape \(1, 3, 16\)"),
    ({"live": np.array([1, 0])}, "live: found int64"),
    ({"live": np.array([True])}, r"live: found shape \(1,\), expected \(2,\)"),
  ):
    with pytest.raises(ValueError, match=message):
      kvjax.decode(cache, **{"q": q[:, 0], "k": k[:, 0], "v": v[:, 0], **told})
  for told, message in (
    ({"scale": -1.0}, r"scale: found -1\.0, expected a finite number"),
    ({"soft_cap": 0.0}, r"soft_cap: found 0\.0, expected a finite number"),
    ({"windows": (4, None)}, "windows: found 2, expected one for each of 4"),
  ):
    with pytest.raises(ValueError, match=message):
      made(kvjax.Full(), **told)
  for call, message in (
    (lambda: kvjax.stacked([]), "caches: found none"),
    (lambda: kvjax.finish([cache, cache], LENGTHS), "caches: found 2 .* expected 1"),
    (lambda: kvjax.finish([cache], LENGTHS[:1]), r"lengths: found shape \(1,\), expected \(2,\)"),
  ):
    with pytest.raises(ValueError, match=message):
      call()
  with pytest.raises(TypeError, match="k: found int32, expected floats"):
    kvjax.decode(cache, q[:, 0], k[:, 0].astype(np.int32), v[:, 0])


def test_arguments_of_another_kind_are_named(untyped):
  (cache,), (q, k, v) = made(kvjax.Full(), layers=1), plain()
  spec = kvjax.CacheSpec(1, 64, 2, 2, 8, layers=1)

  def read(cache=cache, q=q, **how):
    return kvjax.prefill(cache, q, k, v, **how)

  for call, message in (
    (lambda: made(kvjax.Full(), heads="6"), "heads: found '6', expected an integer"),
    (lambda: made(kvjax.Full(), kv_heads=3.0), r"kv_heads: found 3\.0, expected an integer"),
    (lambda: made(kvjax.Full(), windows=4), "windows: found 4, expected one for each of 4 layers"),
    (lambda: made(kvjax.Full(), scale="1"), "scale: found '1', expected a finite number"),
    (lambda: made(kvjax.Full(), scale=True), "scale: found True, expected a finite number"),
    (lambda: made(kvjax.Full(), scale=np.inf), "scale: found inf, expected a finite number"),
    (lambda: read(lengths=[[1], [1, 2]]), "lengths: found rows of unlike lengths, expected an"),
    (lambda: read(q=None), "q: found None, expected an array of numbers"),
    (lambda: read(q="q"), "q: found 'q', expected an array of numbers"),
    (lambda: read(past=1.0), r"past: found 1\.0, expected an integer"),
    (lambda: read(carry=3), r"carry: found int, expected kvjax\.Carry\(\), or None"),
    (lambda: read(cache=cache.cache), "cache: found Cache, expected that of one layer"),
    (lambda: kvjax.decode((cache,), q, k, v), "cache: found tuple, expected that of one layer"),
    (lambda: kvjax.finish(cache, LENGTHS), "caches: found LayerCache, expected those of"),
    (lambda: kvjax.finish([], LENGTHS), "caches: found none, expected one for each layer"),
    (lambda: kvjax.stacked([cache, None]), "cache: found NoneType, expected that of one layer"),
    (lambda: kvjax.make_mesh(heads="2"), r"make_mesh\.heads: found '2', expected an integer"),
    (
      lambda: kvjax.plan_memory(spec, kvjax.Full(), 3),
      r"mesh: found 3, expected one of kvjax\.make",
    ),
    (lambda: kvjax.find_method(3), "name: found 3, expected a method's name, such as 'quest'"),
  ):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
      call()
  (scaled,) = made(kvjax.Full(), layers=1, scale=jnp.float32(0.5))
  jax.jit(kvjax.prefill)(scaled, q, k, v, LENGTHS)  # a number: what is static has to be hashable


def test_what_a_cache_has_seen_is_looked_at(monkeypatch):
  """A further turn under `past = 0` would not see the first one; one past the capacity, itself."""
  compiled.front_door(monkeypatch)
  (cache,) = made(kvjax.Full(), layers=1)
  q, k, v = plain()
  _, cache = kvjax.prefill(cache, q, k, v, LENGTHS)
  with pytest.raises(ValueError, match="past: found 0, expected at least the 29 tokens already"):
    kvjax.prefill(cache, q, k, v, np.array([1, 1]))
  kvjax.prefill(cache, q[:, :1], k[:, :1], v[:, :1], np.array([0, 0]))  # nobody reads on
  with pytest.raises(ValueError, match="found 29 cached tokens and 40 to come in row 0, expected"):
    kvjax.prefill(cache, q, k, v, past=None)
  _, full = kvjax.prefill(cache, q, k, v, np.array([CAPACITY - 29, 1]), past=None)
  with pytest.raises(ValueError, match="found 48 cached tokens and 1 to come in row 0, expected"):
    kvjax.decode(full, q[:, 0], k[:, 0], v[:, 0])
  kvjax.decode(full, q[:, 0], k[:, 0], v[:, 0], live=np.array([False, True]))
  for more in (kvjax.H2O(64), kvjax.Knorm(8, skip_layers=(0,))):  # than there is room for
    with pytest.raises(ValueError, match="found 0 cached tokens and 40 to come in row 0, expected"):
      kvjax.prefill(made(more, layers=1, capacity=39)[0], q, k, v)


@pytest.mark.parametrize("method", [kvjax.Full(), kvjax.SnapKV(12, 4)], ids=["full", "snapkv"])
def test_within_a_program_tokens_past_the_end_are_not_there(method):
  q, k, v = plain(slice(0, 30))
  prompt = jax.jit(kvjax.prefill)
  (cache,) = made(method, layers=1)
  want, got = (prompt(cache, q, k, v, np.array(n))[1] for n in ([30, 0], [41, -3]))
  jax.tree.map(np.testing.assert_array_equal, got, want)


def test_parts_of_a_prompt_are_refused_where_it_has_to_be_seen_at_once(monkeypatch):
  """By `total`, as by `chunk` of `kvjax.models.decode.prefill`; a later turn has a total of its
  own.
  """
  compiled.front_door(monkeypatch)
  arrays = q, k, v = plain(slice(0, 8))
  for name in ("snapkv", "kivi", "tova"):
    (cache,) = made(settings.example(kvjax.METHODS[name], 12), layers=1)
    for lengths in ([8, 8], [8, 0]):
      with pytest.raises(
        NotImplementedError, match=r"total: found \[20, 20\] .* see a whole prompt"
      ):
        kvjax.prefill(cache, q, k, v, np.array(lengths), total=np.array([20, 20]))
    with pytest.raises(NotImplementedError, match="total: found traced lengths"):
      jax.jit(lambda cache, n: kvjax.prefill(cache, *arrays, n, total=n + 1))(cache, LENGTHS // 4)
  kvjax.prefill(cache, q, k, v, np.array([8, 0]), total=np.array([8, 20]))  # none of the other row
  with pytest.raises(ValueError, match="heads: found 7, expected a multiple of the 3 kv_heads"):
    kvjax.empty_caches(kvjax.Full(), batch=1, capacity=8, heads=7, kv_heads=3, head_dim=16)
