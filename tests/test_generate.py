"""The decode loop: what it emits and leaves in the caches, what it refuses, what it compiles."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from models import generate as loop
from models.generate import generate, join, prefill, split
from tests.tiny import CONFIG, LENGTHS, TOKENS, model

FULL = kvjax.Full()


def start(lengths=LENGTHS, rows=slice(None), capacity=64, method=FULL):
  """Logits and caches after a prompt."""
  lengths = np.asarray(lengths)[rows]
  caches = method.init_caches(model().spec(len(lengths), capacity))
  return prefill(model(), TOKENS[rows, : max(lengths)], lengths, caches, method)


@functools.partial(jax.jit, static_argnums=0)
def _step(graph, leaves, caches, tokens):
  return join(graph, leaves).decode(tokens, caches, FULL)


def step(tokens, caches):
  graph, leaves = split(model())
  return _step(graph, leaves, caches, jnp.asarray(tokens, jnp.int32))


def plain(steps, rows=slice(None)):
  """Greedy decoding, one step at a time."""
  logits, caches = start(rows=rows)
  tokens, kept = [], []
  for _ in range(steps):
    kept.append(np.asarray(logits))
    tokens.append(np.asarray(logits.argmax(-1)))
    logits, caches = step(tokens[-1], caches)
  return np.stack(tokens, 1), np.stack(kept, 1), caches, np.asarray(logits)


@pytest.mark.parametrize("chunk", [4, 16])
def test_greedy_equals_the_plain_loop(chunk):
  tokens, kept, caches, last = plain(6)
  logits, mine = start()
  out, mine = generate(model(), logits, mine, FULL, steps=6, chunk=chunk, return_logits=True)
  np.testing.assert_array_equal(out.tokens, tokens)
  assert out.lengths.tolist() == [6, 6]
  chex.assert_trees_all_close(np.asarray(out.logits), kept, rtol=2e-5, atol=2e-5)
  chex.assert_trees_all_close(np.asarray(out.last), last, rtol=2e-5, atol=2e-5)
  chex.assert_trees_all_close(mine, caches, rtol=2e-5, atol=2e-5)


def test_continuing_equals_one_call():
  logits, caches = start()
  whole, _ = generate(model(), logits, caches, FULL, steps=9, chunk=4)
  logits, caches = start()
  first, caches = generate(model(), logits, caches, FULL, steps=5, chunk=4)
  second, _ = generate(model(), first.last, caches, FULL, steps=4, chunk=4)
  np.testing.assert_array_equal(np.concatenate([first.tokens, second.tokens], 1), whole.tokens)


def test_rows_stop_on_their_own():
  tokens, *_ = plain(8)
  stop = int(tokens[0, 2])
  assert stop not in tokens[1]
  logits, caches = start()
  out, caches = generate(model(), logits, caches, FULL, steps=8, stop=[stop], chunk=4)
  at = tokens[0].tolist().index(stop)
  assert out.tokens[0].tolist() == [*tokens[0, : at + 1], *[-1] * (7 - at)]
  np.testing.assert_array_equal(out.tokens[1], tokens[1])
  assert out.lengths.tolist() == [at + 1, 8]
  # The stop token is cached, and nothing after it.
  assert caches[0].seen.tolist() == [LENGTHS[0] + at + 1, LENGTHS[1] + 8]


def test_ends_early_when_all_rows_have_stopped():
  tokens, *_ = plain(8)
  stop = {int(tokens[0, 1]), int(tokens[1, 1])}
  seen = []
  logits, caches = start()
  out, caches = generate(
    model(), logits, caches, FULL, steps=40, stop=list(stop), chunk=4, on_chunk=seen.append
  )
  assert len(seen) == 1
  assert out.tokens.shape == (2, 40)
  assert out.lengths.max() <= 2
  np.testing.assert_array_equal(caches[0].seen, LENGTHS + out.lengths)


def test_chunks_are_handed_over_as_they_come():
  seen = []
  logits, caches = start()
  out, _ = generate(model(), logits, caches, FULL, steps=10, chunk=4, on_chunk=seen.append)
  assert [x.shape[1] for x in seen] == [4, 4, 2]
  np.testing.assert_array_equal(np.concatenate(seen, 1), out.tokens)


def test_forced_tokens():
  """Forced tokens are inserted, never stop a row, and −1 leaves the choice free."""
  tokens, *_ = plain(4)
  forced = np.full((2, 6), -1)
  forced[:, 1:4] = TOKENS[:, 30:33]
  logits, caches = start()
  out, caches = generate(
    model(),
    logits,
    caches,
    FULL,
    steps=6,
    forced=forced,
    stop=forced[:, 1].tolist(),
    return_logits=True,
    chunk=4,
  )
  np.testing.assert_array_equal(out.tokens[:, 1:4], forced[:, 1:4])
  np.testing.assert_array_equal(out.tokens[:, 0], tokens[:, 0])
  want = [np.asarray(out.logits[:, 0])]
  logits, caches = start()
  for i in range(5):
    logits, caches = step(out.tokens[:, i], caches)
    want.append(np.asarray(logits))
  assert (out.tokens[:, 4:] == np.stack(want, 1).argmax(-1)[:, 4:]).all() or out.lengths.min() < 6
  chex.assert_trees_all_close(np.asarray(out.logits), np.stack(want, 1), rtol=2e-5, atol=2e-5)


def test_rows_that_are_not_live_stay_as_they_are():
  logits, caches = start()
  before = jax.tree.map(lambda x: np.asarray(x[1]), caches)
  out, caches = generate(model(), logits, caches, FULL, steps=3, live=[True, False], chunk=4)
  assert out.lengths.tolist() == [3, 0]
  chex.assert_trees_all_equal(jax.tree.map(lambda x: np.asarray(x[1]), caches), before)


# ---- sampling


def sample(rows=slice(None), seed=0, temperature=1.0, steps=12):
  logits, caches = start(rows=rows)
  out, _ = generate(
    model(), logits, caches, FULL, steps=steps, temperature=temperature, seed=seed, chunk=4
  )
  return out.tokens


def test_same_seed_same_text_other_seed_other_text():
  np.testing.assert_array_equal(sample(seed=3), sample(seed=3))
  assert (sample(seed=3) != sample(seed=4)).any(1).all()


def test_a_rows_draws_do_not_depend_on_its_neighbours():
  np.testing.assert_array_equal(sample()[:1], sample(rows=slice(1)))


def test_rows_draw_on_their_own():
  """Two equal rows see equal logits at first; their draws differ."""
  logits = jnp.zeros((2, CONFIG.vocab))
  _, caches = start()
  out, _ = generate(model(), logits, caches, FULL, steps=1, temperature=1.0, chunk=4)
  assert out.tokens[0, 0] != out.tokens[1, 0]


def test_low_temperature_is_greedy():
  np.testing.assert_array_equal(sample(temperature=1e-4, steps=6), plain(6)[0])


def test_draws_follow_the_distribution():
  """First tokens over many rows: frequencies within 5 standard errors of softmax(logits / T)."""
  rows, temperature = 512, 0.7
  logits = jnp.tile(jnp.array([[0.0, 1.0, 2.0, *[-jnp.inf] * (CONFIG.vocab - 3)]]), (rows, 1))
  caches = FULL.init_caches(model().spec(rows, 4))
  out, _ = generate(model(), logits, caches, FULL, steps=1, temperature=temperature, chunk=1)
  p = np.exp(np.arange(3) / temperature)
  p /= p.sum()
  found = np.bincount(out.tokens[:, 0], minlength=3)[:3] / rows
  assert (np.abs(found - p) <= 5 * np.sqrt(p * (1 - p) / rows)).all()


# ---- compilation and memory


def test_does_not_retrace():
  loop._decode_chunk.clear_cache()
  loop._prefill.clear_cache()
  for steps, temperature in ((8, 0.5), (5, 0.9), (11, 0.1)):
    logits, caches = start()
    generate(model(), logits, caches, FULL, steps=steps, temperature=temperature, chunk=4)
  assert loop._prefill._cache_size() == 1
  assert loop._decode_chunk._cache_size() == 1


def test_a_module_is_split_once_and_joined_back():
  graph, leaves = split(model())
  assert split(model())[0] == graph
  assert hash(split(model())[0]) == hash(graph)
  chex.assert_trees_all_equal(split(join(graph, leaves))[1], leaves)


def test_caches_are_donated_and_updated_in_place():
  logits, caches = start()
  old = caches[0].slots["k"]
  generate(model(), logits, caches, FULL, steps=2, chunk=4)
  assert old.is_deleted()
  assert not logits.is_deleted()


def test_a_chunk_aliases_all_cache_bytes():
  decoder, rows, capacity = model(), 2, 512
  graph, leaves = split(decoder)
  caches = FULL.init_caches(decoder.spec(rows, capacity))
  arguments = (
    jnp.zeros((rows, CONFIG.vocab)),
    jnp.ones(rows, bool),
    jnp.zeros(0, jnp.int32),
    jnp.full((rows, 16), -1),
    jnp.int32(0),
    jnp.int32(16),
    jnp.float32(0),
    jnp.uint32(0),
  )
  compiled = loop._decode_chunk.lower(graph, FULL, True, False, leaves, caches, *arguments)
  memory = compiled.compile().memory_analysis()
  size = sum(x.nbytes for x in jax.tree.leaves(caches))
  assert memory.alias_size_in_bytes >= size


# ---- bad arguments


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"steps": 0}, "steps: found 0"),
    ({"steps": 4, "chunk": 0}, "chunk: found 0"),
    ({"steps": 4, "temperature": -1.0}, "temperature: found -1.0"),
    ({"steps": 4, "temperature": float("nan")}, "temperature: found nan"),
    ({"steps": 4, "stop": [CONFIG.vocab]}, f"stop: found token {CONFIG.vocab}"),
    ({"steps": 4, "live": [True]}, r"live: found shape \(1,\), expected \(2,\)"),
    ({"steps": 4, "forced": np.zeros((2, 3), int)}, r"forced: found shape \(2, 3\)"),
    ({"steps": 1, "forced": np.full((2, 1), 99)}, r"forced: found ids in \[99, 99\]"),
    ({"steps": 42}, r"steps = 42 after 23 cached tokens \(row 0\) needs 65 slots.*capacity of 64"),
  ],
)
def test_generate_refuses(change, message):
  logits, caches = start()
  with pytest.raises(ValueError, match=message):
    generate(model(), logits, caches, FULL, **change)
  assert not caches[0].slots["k"].is_deleted()


def test_a_method_that_evicts_has_no_overflow():
  method = kvjax.StreamingLLM(16)
  logits, caches = start(method=method)
  out, _ = generate(model(), logits, caches, method, steps=48, chunk=16)
  assert out.lengths.tolist() == [48, 48]


@pytest.mark.parametrize(
  ("tokens", "lengths", "kwargs", "message"),
  [
    (TOKENS[:, :8], [9, 2], {}, r"lengths: found \[9, 2\], expected values in \[0, 8\]"),
    (TOKENS[:, :8], [-1, 2], {}, r"lengths: found \[-1, 2\]"),
    (TOKENS[:, :8], [0, 0], {}, "lengths: found an empty prompt in every row"),
    (TOKENS[:, :0], [0, 0], {}, "empty prompt"),
    (TOKENS[:, :8], [4], {}, r"lengths: found shape \(1,\), expected \(2,\)"),
    (TOKENS[:1, :8], [4], {}, "tokens: found 1 rows, expected 2"),
    (TOKENS[:, :8] + CONFIG.vocab, [4, 4], {}, r"tokens: found ids in"),
    (TOKENS[:, :8] * 1.0, [4, 4], {}, "tokens: found float64"),
    (TOKENS[:, :24], [20, 24], {}, r"a prompt of 24 tokens.*\(row 1\).*capacity of 16"),
    (TOKENS[:, :8], [4, 4], {"total": [3, 4]}, r"total: found \[3, 4\]"),
  ],
)
def test_prefill_refuses(tokens, lengths, kwargs, message):
  caches = FULL.init_caches(model().spec(2, 16))
  with pytest.raises(ValueError, match=message):
    prefill(model(), tokens, np.array(lengths), caches, FULL, **kwargs)
  assert not caches[0].slots["k"].is_deleted()


def test_prefill_counts_what_is_cached():
  caches = FULL.init_caches(model().spec(2, 16))
  _, caches = prefill(model(), TOKENS[:, :8], [8, 5], caches, FULL)
  with pytest.raises(ValueError, match="past: found 4, expected at least the 8 tokens"):
    prefill(model(), TOKENS[:, :8], [4, 4], caches, FULL, past=4)
  with pytest.raises(ValueError, match=r"a prompt of 9 tokens after 8 cached tokens \(row 0\)"):
    prefill(model(), TOKENS[:, :9], [9, 2], caches, FULL)
  logits, caches = prefill(model(), TOKENS[:, 8:16], [8, 8], caches, FULL)
  assert caches[0].seen.tolist() == [16, 13]
  whole, _ = prefill(model(), TOKENS[:1, :16], [16], FULL.init_caches(model().spec(1, 16)), FULL)
  chex.assert_trees_all_close(logits[:1], whole, rtol=2e-5, atol=2e-5)


def test_caches_of_another_model():
  caches = FULL.init_caches(model().spec(2, 16))
  with pytest.raises(ValueError, match="caches: found 3, expected one per layer, 4"):
    prefill(model(), TOKENS[:, :8], [4, 4], caches[:3], FULL)
