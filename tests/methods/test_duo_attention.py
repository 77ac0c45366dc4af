"""DuoAttention against a NumPy oracle: what each head sees, what its slots take, patterns."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import kvjax
from kvjax import CacheSpec, DuoAttention, Env, Full, SharedPrefill, StreamingLLM, plan_memory
from kvjax.methods.duo_attention.gates import pattern_of, read_gates
from kvjax.runtime import sharding
from kvjax.testing import LAWS, Case
from kvjax.testing.layer import Layer, Stream
from tests.oracles import attend, begun, follow, read_prompt

PATTERN = ((0, 1, 0), (1, 0, 1), (0, 0, 0), (1, 1, 1))
MIXED = DuoAttention(PATTERN, sinks=2, recent=5)


def seen(t, retrieves, sinks=2, recent=5):
  """Positions that a head holds at token t."""
  return [j for j in range(t + 1) if retrieves or j < sinks or j > t - recent]


def positions(cache, row, pattern):
  """What each head of a row holds, in the order of the heads."""
  full = [x[x >= 0] for x in np.asarray(cache.pos)[row]]
  apart = cache.heads.get("apart")
  streaming = [] if apart is None else [x[x >= 0] for x in np.asarray(apart["pos"])[row]]
  kinds = {True: iter(full), False: iter(streaming)}
  if len({*pattern}) == 1:
    return [sorted(x.tolist()) for x in full]
  return [sorted(next(kinds[bool(mark)]).tolist()) for mark in pattern]


def test_worked_example():
  """Two heads, the second a streaming one with one sink and two recent tokens: 4 sees 0, 3, 4."""
  stream = Stream.random(0, kv_heads=2, tokens=5)
  layer = begun(DuoAttention(((1, 0),) * 4, sinks=1, recent=2), stream, [4, 3])
  layer.decode([4, 3])
  assert positions(layer.cache, 0, (1, 0)) == [[0, 1, 2, 3, 4], [0, 3, 4]]
  assert positions(layer.cache, 1, (1, 0)) == [[0, 1, 2, 3], [0, 2, 3]]
  assert layer.cache.heads["apart"]["k"].shape == (2, 1, 3, 16)


@pytest.mark.core(1)
@pytest.mark.parametrize("index", range(4))
def test_prompt_then_long_decode(index):
  """Layers with both kinds, with streaming heads alone, with retrieval heads alone."""
  stream, lengths = Stream.random(1, tokens=64), [23, 4]
  layer = Layer(MIXED, stream, layer=index)

  def sees(b, h, t):
    return seen(t, PATTERN[index][h])

  def holds(cache, b, h):
    return positions(cache, b, PATTERN[index])[h]

  read_prompt(layer, lengths, sees)
  follow(layer, lengths, 30, sees, atol=3e-6, holds=holds)


def test_chunks_and_a_later_turn():
  """After each chunk streaming heads hold their window only, and the next one sees no more."""
  stream = Stream.random(2, tokens=50)
  layer, start = Layer(MIXED, stream), np.zeros(2, np.int32)
  for valid in ([9, 7], [8, 0], [1, 8], [7, 8]):
    out = layer.prefill(valid, start, tokens=9, past=None)
    for b, h in np.ndindex(2, 3):
      for i, t in enumerate(range(start[b], start[b] + valid[b])):
        want = attend(stream, b, h, t, seen(t, PATTERN[1][h]))
        np.testing.assert_allclose(out[b, h, :, i], want, atol=3e-6)
    start += valid
  out, _ = layer.decode(start)
  for b, h in np.ndindex(2, 3):
    want = attend(stream, b, h, start[b], seen(start[b], PATTERN[1][h]))
    np.testing.assert_allclose(out[b, h], want, atol=3e-6)


@pytest.mark.core(1)
@pytest.mark.parametrize(
  ("mark", "other"), [(1, Full()), (0, StreamingLLM(7, 2, "original"))], ids=["full", "streaming"]
)
def test_one_kind_alone_is_that_method_bit_for_bit(mark, other):
  stream = Stream.random(3, tokens=40)
  duo = Layer(DuoAttention(((mark,) * 3,) * 4, sinks=2, recent=5), stream)
  alone = Layer(other, stream)
  np.testing.assert_array_equal(duo.prefill([19, 3]), alone.prefill([19, 3]))
  for step in range(9):
    (out, _), (want, _) = (layer.decode([19 + step, 3 + step]) for layer in (duo, alone))
    np.testing.assert_array_equal(out, want)
  assert jax.tree.map(np.shape, duo.cache.slots) == jax.tree.map(np.shape, alone.cache.slots)


def test_bytes_are_freed():
  """Slots of a layer: retrieval heads have the capacity, streaming heads sinks and a window."""
  spec = CacheSpec(2, 512, 3, 2, 16, 4)
  method = DuoAttention(PATTERN, sinks=16, recent=48)
  tokens = sum(512 if mark else 64 for row in PATTERN for mark in row)
  each = 2 * 16 * 2 + 4  # k and v in bfloat16, a position
  notes = 4 * (2 * 2 * 4) + 6 * 2 * 2 * 4  # seen and used, a ring for each streaming head
  held = plan_memory(spec, method).device
  assert held == 2 * tokens * each + notes
  full = plan_memory(spec, Full()).device
  assert abs(held / full - tokens / (12 * 512)) < 0.01


def test_short_rows_need_no_more_slots_than_tokens():
  method = DuoAttention("alternate", sinks=128, recent=256)
  cache = method.init_caches(CacheSpec(1, 100, 2, 1, 16, 1))[0]
  assert cache.heads["apart"]["pos"].shape == (1, 1, 100)
  alone = DuoAttention(((0, 0),), sinks=128, recent=256)  # whose rows may outgrow the capacity
  assert alone.init_caches(CacheSpec(1, 100, 2, 1, 16, 1))[0].size == 384
  assert not alone.traits.positional and method.traits.positional


@pytest.mark.slow
def test_nan_in_one_kind_keeps_the_whole_cache():
  """A query of NaN in one streaming head: nothing of the row's cache changes, of either kind."""
  stream = Stream.random(6, tokens=40)
  layer = begun(MIXED, stream, [17, 6], env=Env(4, impl="reference", tile=4, check_nan=True))
  before = jax.tree.map(np.asarray, layer.cache)
  layer.stream = stream.poisoned("q", 0, 17)
  layer.stream.q[0, [0, 2], :, 17] = 1.0
  with pytest.raises(Exception, match=r"DuoAttention, layer 1: found NaN or infinity .* row 0"):
    layer.decode([17, 6])
  for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(layer.cache), strict=True):
    np.testing.assert_array_equal(old[0], np.asarray(new)[0])


@pytest.mark.slow
def test_devices_whose_heads_differ():
  """Heads 0 and 3 of four retrieve: the first of one device, the second of the other."""
  case = Case(DuoAttention, (("pattern", ((True, False, False, True),) * 4),))
  LAWS["heads_sharded_over_two_devices"](case)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
def test_an_unbalanced_pattern_is_refused_over_devices():
  spec, mesh = CacheSpec(1, 64, 4, 1, 16, 2), kvjax.make_mesh(2)
  method = DuoAttention(((1, 0, 0, 1), (1, 1, 0, 0)), sinks=2, recent=5)
  message = r"mesh: found heads split over 2 devices .* layer 1 has \[2, 0\]"
  for refused in (plan_memory, lambda *args: sharding.init_caches(args[1], args[0], mesh)):
    with pytest.raises(ValueError, match=message):
      refused(spec, method, mesh)
  balanced = DuoAttention(((1, 0, 0, 1), (1, 0, 1, 0)), sinks=2, recent=5)
  assert plan_memory(spec, balanced, mesh).device < plan_memory(spec, balanced).device
  at = method.at(Env(2, head_axis="heads"), 1)
  of_two = sharding.shard_map(lambda: method._order(at, 2)[0], mesh, (), PartitionSpec())
  with pytest.raises(ValueError, match=r"layer 1 has \[2, 0\]"):  # of caches that somebody split
    jax.eval_shape(of_two)


# ---- patterns


def test_a_pattern_by_hand(tmp_path):
  """Half of six gates stream: −0.02, 0 and 0.3; the file's config says how many tokens."""
  path = tmp_path / "full_attention_heads.tsv"
  path.write_text("0.9\t-0.02\t0.3\n1.01\t0.0\t0.4\n")
  assert read_gates(path).tolist() == [[0.9, 0.0, 0.3], [1.0, 0.0, 0.4]]
  expected = ((True, False, False), (True, False, True))
  assert DuoAttention.from_tsv(path) == DuoAttention(expected, sinks=128, recent=256)
  (tmp_path / "config.json").write_text('{"sink_size": 64, "recent_size": 128}')
  assert DuoAttention.from_tsv(path) == DuoAttention(expected, sinks=64, recent=128)
  assert DuoAttention.from_tsv(path, recent=9) == DuoAttention(expected, sinks=64, recent=9)


@pytest.mark.parametrize("sparsity", [0, 0.3, 0.5, 0.75, 1])
def test_the_lowest_gates_stream(sparsity):
  """Sorted in a list, as kvpress takes round(L·K·sparsity) of them."""
  gates = np.random.default_rng(0).uniform(size=(5, 7))
  lowest = sorted(gates.ravel().tolist())[: round(35 * sparsity)]
  assert pattern_of(gates, sparsity) == tuple(tuple(x not in lowest for x in row) for row in gates)


def test_a_pattern_for_two_devices():
  """Heads 0 and 1 on one device, 2 and 3 on the other: the best one of the latter joins."""
  gates = np.array([[0.9, 0.8, 0.3, 0.4], [0.7, 0.1, 0.6, 0.2]])
  assert pattern_of(gates) == ((1, 1, 0, 0), (1, 0, 1, 0))
  assert pattern_of(gates, shards=2) == ((1, 1, 1, 1), (1, 0, 1, 0))
  gates[0, 1] = 0.05
  assert pattern_of(gates, 0.5, shards=2) == ((1, 0, 0, 1), (1, 0, 1, 0))


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"x": "\xe9"}'])
def test_a_damaged_config_beside_a_pattern_is_named(tmp_path, data):
  path = tmp_path / "gates.tsv"
  path.write_bytes(b"\xef\xbb\xbf0.1\t0.2\r\n")
  (tmp_path / "config.json").write_bytes(data)
  with pytest.raises(ValueError, match=r"config\.json: found .*expected an object"):
    DuoAttention.from_tsv(path)
  (tmp_path / "config.json").write_bytes(b'\xef\xbb\xbf{"sink_size": 4}')
  assert DuoAttention.from_tsv(path).sinks == 4


@pytest.mark.parametrize("text", ["0.1 0.2\n", "0.1\t0.2\n0.3\n", "0.1\tnan\n", "", "# \xe9\n"])
def test_other_files_are_refused(tmp_path, text):
  path = tmp_path / "gates.tsv"
  path.write_text("# fitted: {}\n0.5\t2 # so\n\n-1\t0\n")
  assert read_gates(path).tolist() == [[0.5, 1], [0, 0]]
  path.write_text(text, "latin-1")
  with pytest.raises(ValueError, match=r"gates\.tsv: found .*expected"):
    read_gates(path)


def test_what_does_not_fit_is_refused():
  spec = CacheSpec(1, 64, 4, 1, 16, 2)
  with pytest.raises(ValueError, match="found 4 layers of 3 key/value heads, expected 2 of 4"):
    MIXED.init_caches(spec)
  with pytest.raises(ValueError, match="sparsity: found 2"):
    pattern_of(np.ones((1, 2)), 2)
  with pytest.raises(ValueError, match="shards: found 3"):
    pattern_of(np.ones((1, 2)), shards=3)
  with pytest.raises(ValueError, match="leave prefill attention dense"):
    SharedPrefill((MIXED,))
  with pytest.raises(TypeError, match=r"Own\.victim: found an override"):
    dataclasses.make_dataclass("Own", [], bases=(DuoAttention,), namespace={"victim": None})
