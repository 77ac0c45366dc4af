"""Blocks outside of the device: reference and kernels against NumPy, bit for bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import Env
from kvjax.core.context import OwnRows
from kvjax.kernels.insertion import host_blocks
from kvjax.models.decode.caches import fork, restore, save
from kvjax.models.decode.generate import generate, prefill
from kvjax.ops import offload
from kvjax.testing import tiny

KERNELS = "pallas"


def filled(seed, shape, sizes, dtype):
  """A store of several segments with random content, and the same as one array per name."""
  rng = np.random.default_rng(seed)
  batch, heads, tokens, head_dim = shape
  whole = {
    name: rng.normal(size=(batch, heads, sum(sizes), tokens, head_dim)).astype(dtype)
    for name in ("k", "v")
  }
  cuts = np.cumsum(sizes)[:-1]
  parts = {n: tuple(map(jnp.asarray, np.split(x, cuts, 2))) for n, x in whole.items()}
  return OwnRows(parts), whole


def fetched(store, block):
  """The named blocks [B, K, R · U, H], zeros for −1."""
  batch, heads, _, tokens, head_dim = store.of["k"][0].shape
  empty = jnp.zeros((batch, heads, block.shape[1] * tokens, head_dim), store.of["k"][0].dtype)
  place = jnp.broadcast_to(jnp.arange(block.shape[1], dtype=jnp.int32), block.shape)
  return offload.fetch(store, block, {"k": empty, "v": empty}, place, Env(1))


def joined(store):
  return {name: np.concatenate([np.asarray(x) for x in store.of[name]], 2) for name in store.of}


@pytest.mark.core(1)
@pytest.mark.parametrize("impl", ["reference", KERNELS])
@pytest.mark.parametrize(
  ("shape", "sizes", "dtype"),
  [
    ((1, 1, 128, 128), [5], "bfloat16"),
    ((2, 3, 5, 24), [3, 3, 2], "float32"),
    ((3, 2, 40, 64), [4, 1], "float16"),
  ],
)
def test_fetch_and_append(impl, shape, sizes, dtype):
  dtype = jnp.dtype(dtype)
  store, whole = filled(0, shape, sizes, dtype)
  batch, blocks = shape[0], sum(sizes)
  rng = np.random.default_rng(1)
  block = rng.integers(-1, blocks, (batch, 6)).astype(np.int32)
  block[0, :2] = [-1, blocks - 1]
  copies = {n: rng.normal(size=(*shape[:2], 8, *shape[2:])).astype(dtype) for n in ("k", "v")}
  place = np.stack([rng.permutation(8)[:6] for _ in range(batch)]).astype(np.int32)
  place[block < 0] = -1  # as what is not wanted has no place
  flat = {name: x.reshape(*shape[:2], -1, shape[3]) for name, x in copies.items()}
  run = jax.jit(lambda *x: offload.fetch(*x, Env(1, impl=impl)))
  found = run(store, block, flat, place)
  for name, x in whole.items():
    want = copies[name].copy()
    for b, r in zip(*np.nonzero(block >= 0), strict=True):
      want[b, :, place[b, r]] = x[b, :, block[b, r]]
    np.testing.assert_array_equal(np.asarray(found[name]).reshape(want.shape), want)

  new = {n: rng.normal(size=(*shape[:2], 3, *shape[2:])).astype(dtype) for n in ("k", "v")}
  first = rng.integers(0, blocks, batch).astype(np.int32)
  first[-1] = blocks - 1  # beyond the end: dropped
  count = rng.integers(0, 4, batch).astype(np.int32)
  count[0], count[-1] = 0, 3

  def append(store, new, first, count):
    return offload.append(store, new, first, count, Env(1, impl=impl), jnp.zeros(3))

  got = joined(jax.jit(append)(store, new, first, count))
  for name, x in whole.items():
    want = x.copy()
    for b in range(batch):
      for e in range(count[b]):
        if first[b] + e < blocks:
          want[b, :, first[b] + e] = new[name][b, :, e]
    np.testing.assert_array_equal(got[name], want)


@pytest.mark.core(1)
@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("source", [[2, 0], [1, 1]])
def test_rows_of_another_store(kernel, source):
  """Its segments are cut elsewhere, as those of a store of fewer rows are."""
  shape, rows = (2, 40, 24), jnp.array([3, 1], jnp.int32)
  store, whole = filled(0, (4, *shape), [3, 3, 1], "float32")
  other, new = filled(1, (3, *shape), [5, 2], "float32")
  source = jnp.array(source, jnp.int32)
  if kernel:
    got = OwnRows(host_blocks.move(store.of, rows, other.of, source))
  else:
    got = offload.moved(store, rows, other, source)
  assert [x.shape for x in got.of["k"]] == [x.shape for x in store.of["k"]]
  for name, want in whole.items():
    want[rows] = new[name][source]
    np.testing.assert_array_equal(joined(got)[name], want)


def test_lanes_of_a_last_piece():
  """Tokens 32 … 39 of 40: the lane after them would be the next block's first token."""
  real = host_blocks._lanes(1, 40, 24)[2]
  assert real.shape == (32, 32) and real.sum() == 8 * 24 and real[:8, :24].all()


def test_segments(monkeypatch):
  """No array beyond the limit, the last one shorter, and none for nothing."""
  monkeypatch.setattr(offload, "SEGMENT_BYTES", 3 * 2 * 4 * 8 * 2)
  store = offload.empty(1, 2, 8, 4, 8, jnp.bfloat16)
  assert [x.shape[2] for x in store.of["k"]] == [3, 3, 2]
  assert offload.blocks_of(store) == 8
  monkeypatch.setattr(offload, "SEGMENT_BYTES", 1)
  assert len(offload.empty(1, 2, 3, 4, 8, jnp.bfloat16).of["v"]) == 3


def test_a_block_is_written_once():
  """Each into its own segment: counted from another's end, too, it would be there twice."""
  store, whole = filled(2, (1, 1, 2, 4), [2, 3], "float32")
  new = {name: jnp.ones((1, 1, 1, 2, 4)) for name in ("k", "v")}

  @jax.jit
  def append(store, first):
    return offload.append(store, new, first, jnp.ones(1, jnp.int32), Env(1), jnp.zeros(1))

  for block in range(5):
    got = joined(append(store, jnp.full(1, block, jnp.int32)))
    for name, x in whole.items():
      want = x.copy()
      want[:, :, block] = 1
      np.testing.assert_array_equal(got[name], want)


def test_shapes_only():
  """Laying out caches abstractly allocates nothing."""
  made = jax.eval_shape(lambda: offload.empty(1, 8, 1 << 20, 128, 128, jnp.bfloat16))
  assert sum(x.shape[2] for x in made.of["k"]) == 1 << 20
  assert max(x.size * 2 for x in made.of["k"]) <= offload.SEGMENT_BYTES


def test_a_pool_that_is_too_small(monkeypatch):
  monkeypatch.setattr(offload, "on_host", lambda: True)
  monkeypatch.setattr(offload.host_memory, "available", lambda: 1 << 40)
  monkeypatch.delenv(offload.LIMIT, raising=False)
  offload.check_room(64 << 30)
  message = f"found 98.0 GiB of caches.*holds 64 GB: set {offload.LIMIT} before jax is imported"
  with pytest.raises(MemoryError, match=message):
    offload.check_room(98 << 30)
  monkeypatch.setenv(offload.LIMIT, "110")
  offload.check_room(98 << 30)


@pytest.mark.parametrize(("size", "pool"), [(1, 2), (3, 6), (14 << 10, (16 << 10) - 2)])
def test_a_pool_that_doubles(monkeypatch, size, pool):
  """It takes regions of 2, 4, 8, … MiB from the system until they hold what is asked for."""
  monkeypatch.setattr(offload, "on_host", lambda: True)
  monkeypatch.setattr(offload.host_memory, "resident", lambda: 0)
  monkeypatch.delenv(offload.LIMIT, raising=False)
  monkeypatch.setattr(offload.host_memory, "available", lambda: pool << 20)
  offload.check_room(size << 20)
  monkeypatch.setattr(offload.host_memory, "available", lambda: (pool << 20) - 1)
  way_out = f"set {offload.LIMIT} before jax is imported, to {-(-size // 1024)} at least"
  message = f"the pool of pinned memory takes {pool / 1024:.1f}, expected at most .*{way_out}"
  with pytest.raises(MemoryError, match=message):
    offload.check_room(size << 20)
  monkeypatch.setenv(offload.LIMIT, str(size / 1024))  # then it takes no more than that
  offload.check_room(size << 20)


def test_host_memory_is_exhausted(monkeypatch):
  """What the runtime says of it becomes an error that names the size and the way out."""

  def exhausted(*args, **kwargs):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of pinned host memory")

  monkeypatch.setattr(offload, "on_host", lambda: True)
  monkeypatch.setattr(jax, "jit", exhausted)
  message = f"found no room for 0.25 GiB of pinned host memory.*set {offload.LIMIT} before jax"
  with pytest.raises(MemoryError, match=message) as caught:
    offload.empty(1, 8, 1024, 128, 128, jnp.bfloat16)
  assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)


def test_kernels_refuse():
  store, _ = filled(0, (2, 1, 4, 8), [3], np.float32)
  with pytest.raises(TypeError, match="block: found dtype float32"):
    host_blocks.check(store.of, jnp.zeros((2, 1)))
  with pytest.raises(ValueError, match=r"block: found shape \(1, 1\), expected \[2, R\]"):
    one = jnp.zeros((1, 1), jnp.int32)
    host_blocks.fetch(store.of, one, {}, one)
  huge = jax.ShapeDtypeStruct((2, 8, 1 << 17, 16, 128), jnp.bfloat16)
  with pytest.raises(ValueError, match="expected less than 2\\*\\*31 elements"):
    host_blocks.check({"k": (huge,), "v": (huge,)}, jnp.zeros((2, 1), jnp.int32))


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
def test_over_the_link():
  """Pinned host memory: written and read back bit for bit, in place, within one program."""
  store = offload.empty(1, 8, 64, 128, 128, jnp.bfloat16)
  assert {x.sharding.memory_kind for x in jax.tree.leaves(store)} == {"pinned_host"}
  new = {
    name: jax.random.normal(jax.random.key(i), (1, 8, 16, 128, 128), jnp.bfloat16)
    for i, name in enumerate(("k", "v"))
  }

  def both(store, new):
    before = fetched(store, jnp.array([[3, -1]], jnp.int32))
    after = before["k"].sum()
    count = jnp.array([16], jnp.int32)
    store = offload.append(store, new, jnp.array([2], jnp.int32), count, Env(1), after)
    return offload.settled(store), before

  run = jax.jit(both, donate_argnums=0)
  place = store.of["k"][0].unsafe_buffer_pointer()
  store, before = run(store, new)
  assert store.of["k"][0].unsafe_buffer_pointer() == place
  assert not np.asarray(before["k"]).any()
  ids = jnp.arange(2, 18, dtype=jnp.int32)[None]
  back = jax.jit(fetched)(store, ids)
  for name in ("k", "v"):
    got = np.asarray(back[name]).reshape(new[name].shape)
    np.testing.assert_array_equal(got, np.asarray(new[name]))


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
def test_over_the_link_in_a_loop():
  """A loop, as of decode steps, may carry a store and write into it where it lies."""
  store = offload.empty(1, 2, 16, 32, 64, jnp.float32)
  new = jax.random.normal(jax.random.key(0), (8, 1, 2, 1, 32, 64))

  def write(i, carry):
    store, total = carry
    blocks = {"k": new[i], "v": -new[i]}
    first, one = jnp.full(1, i, jnp.int32), jnp.ones(1, jnp.int32)
    store = offload.append(store, blocks, first, one, Env(1), total)
    found = fetched(store, jnp.full((1, 1), i, jnp.int32))
    return store, total + found["k"].sum()

  def run(store):
    store, total = jax.lax.fori_loop(0, 8, write, (offload.loose(store), jnp.float32(0)))
    return offload.settled(store), total

  place = store.of["k"][0].unsafe_buffer_pointer()
  store, total = jax.jit(run, donate_argnums=0)(store)
  assert store.of["k"][0].unsafe_buffer_pointer() == place
  assert {x.sharding.memory_kind for x in jax.tree.leaves(store)} == {"pinned_host"}
  np.testing.assert_array_equal(
    np.asarray(store.of["v"][0])[0, :, :8], -np.asarray(new)[:, 0, :, 0].swapaxes(0, 1)
  )
  np.testing.assert_allclose(total, np.asarray(new).sum(), rtol=1e-5)


def test_loose_changes_nothing():
  np.testing.assert_array_equal(jax.jit(offload._loosened)(jnp.arange(6)), np.arange(6))


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize(
  "method",
  [
    kvjax.settings.example(kvjax.InfLLM, 16),
    kvjax.settings.example(kvjax.Ltri, 16),
    dataclasses.replace(kvjax.settings.example(kvjax.Ltri, 16), from_top=True),
  ],
)
def test_restored_and_forked_stores_lie_on_the_host(method, tmp_path):
  """And decoding goes on from them as from those that they were copied from."""
  spec = tiny.model().spec(2, 64)
  state = prefill(tiny.model(), tiny.TOKENS[:, :23], tiny.LENGTHS, method.init_caches(spec), method)
  path = save(tmp_path / "x", *state, method, spec)
  copies = restore(path, method, spec), fork(*state, 1)
  for _, caches in copies:
    assert {x.sharding.memory_kind for x in offload.hosted(caches)} == {"pinned_host"}
  want, *found = (
    generate(tiny.model(), *each, method, steps=6)[0].tokens for each in (state, *copies)
  )
  for tokens in found:
    np.testing.assert_array_equal(tokens, want)
