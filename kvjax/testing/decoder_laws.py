"""Laws of every method in a small decoder: prompts, chunks, steps, turns."""

import unittest

import chex
import jax
import jax.numpy as jnp
import numpy as np

from kvjax.core import settings
from kvjax.families.full import Full
from kvjax.models.decode import rows
from kvjax.ops import offload, shared_slots
from kvjax.runtime.memory import plan_memory
from kvjax.testing.cases import CHUNK, STEPS, Told, finite, law, logits_of, raises, same
from kvjax.testing.tiny import CAPACITY, CLOSE, CONFIG, LENGTHS, TOKENS


@law
def neutral_setting_equals_full(case):
  """Under the neutral setting a prompt and steps give the logits of the full cache."""
  out = logits_of(case, case.neutral)
  np.testing.assert_allclose(out, logits_of(case, Full()), atol=CLOSE)


@law
def tight_setting_has_an_effect(case):
  """The tight setting gives other logits: no law holds because nothing happens."""
  if case.method is Full:
    raise unittest.SkipTest("is the full cache itself")
  most = np.abs(logits_of(case) - logits_of(case, Full()))[:, 1:].max()
  assert most > 0.05, f"logits: found at most {most:.4f} from the full cache's, expected above 0.05"


@law
def chunked_prefill(case):
  """Reading the prompt in chunks of 8 equals reading it at once, where the method says so."""
  run = Told(case)
  run.prompt(np.minimum(LENGTHS, CHUNK))
  for start in range(CHUNK, int(LENGTHS.max()), CHUNK):
    run.chunk(np.clip(LENGTHS - start, 0, CHUNK), np.minimum(LENGTHS, start).astype(np.int32))
  chunked = np.stack([run.decode(LENGTHS + i) for i in range(STEPS)], 1)
  finite("logits", chunked)
  if run.method.traits.chunkable:
    np.testing.assert_allclose(chunked, logits_of(case)[:, 1:], atol=CLOSE)


@law
def decode_equals_prefill(case):
  """prefill(n + i) equals prefill(n) then i decode steps, where the method says so.

  Others decide by what they saw in which order: of them it is asked where nothing is decided, of
  the neutral setting.
  """
  method = case.tight if case.tight.traits.order_independent else case.neutral
  for i in (1, STEPS):
    whole = Told(case, method).prompt((LENGTHS + i).astype(np.int32))
    np.testing.assert_allclose(logits_of(case, method)[:, i], whole, atol=CLOSE)


@law
def kept_positions(case):
  """Occupied slots are the prefix [0, used); they hold distinct seen tokens, the newest too."""
  run = Told(case)
  for step in range(STEPS + 1):
    seen = LENGTHS + step
    run.prompt() if step == 0 else run.decode(seen - 1)
    check_kept(case, run.caches, seen)


def check_kept(case, caches, seen):
  for cache in caches:
    pos, used = np.asarray(shared_slots.by_head(cache)["pos"]), np.asarray(cache.used)
    shared = shared_slots.sharers(cache) > 1  # heads hold `used` tokens on average
    np.testing.assert_array_equal(cache.seen, seen)
    for b in range(len(seen)):
      for row in pos[b]:
        count = int((row >= 0).sum()) if shared else used[b]
        kept = row[:count]
        held = f"pos of row {b}: found {row.tolist()}, expected"
        assert (kept >= 0).all() and (row[count:] == -1).all(), f"{held} {count} tokens, then -1"
        assert len(set(kept.tolist())) == count, f"{held} no token twice"
        assert kept.max() == seen[b] - 1 or case.drops_newest, f"{held} the newest, {seen[b] - 1}"
      held, told = (pos[b] >= 0).sum(), used[b] * len(pos[b])
      assert not shared or abs(held - told) <= len(pos[b]) / 2, (
        f"row {b}: {held} tokens, used {told}"
      )


@law
def room_does_not_change_the_answer(case):
  """Twice the capacity gives the same logits, and no budget takes more than it asks for."""
  roomy = Told(case, capacity=2 * CAPACITY).generate()
  np.testing.assert_allclose(roomy, logits_of(case), atol=CLOSE)
  ample, spec = settings.example(case.method, 8 * CAPACITY), Told(case).model.spec(2, CAPACITY)
  for cache in jax.eval_shape(lambda: ample.init_caches(spec)):
    slots = shared_slots.tokens(cache)
    # A stream's window has room beside it for blocks that are about to leave.
    few = slots <= CAPACITY or ample.traits.stream is not None
    assert few, f"slots of {ample!r}: found {slots}, expected at most the capacity {CAPACITY}"
  large, larger = (settings.example(case.method, times * CAPACITY) for times in (32, 256))
  sizes = [plan_memory(spec, method) for method in (large, larger)]
  if ample.traits.stream is None:
    same(f"bytes of {larger!r}", sizes[1], sizes[0])


@law
def dtypes_hold_under_x64(case):
  """With `jax_enable_x64` the logits are the same, and so are the types of all cache arrays."""
  want = Told(case)
  want.prompt()
  want.decode(LENGTHS)
  with jax.enable_x64(True):
    run = Told(case)
    out = [run.prompt(), run.decode(LENGTHS)]
  np.testing.assert_allclose(np.stack(out, 1), logits_of(case)[:, :2], atol=CLOSE)
  types = [jax.tree.map(lambda x: (x.shape, x.dtype), each.caches) for each in (run, want)]
  same("types of the caches", *types)


TURN = np.array([5, 8], np.int32)


@law
def further_turns_of_the_neutral_setting_equal_full(case):
  """A prompt, two tokens of answer, a turn onto the live cache, two tokens more."""

  def conversation(method):
    run, seen = Told(case, method), LENGTHS.copy()
    out = [run.prompt()]
    for _ in range(2):
      out += [run.decode(seen + i) for i in range(2)]
      seen += 2
      out.append(run.chunk(TURN, seen))
      seen += TURN
    return np.stack(out)

  want = conversation(Full())
  np.testing.assert_allclose(conversation(case.neutral), want, atol=CLOSE)


@law
def a_second_question_on_the_same_cache(case):
  """Two questions to one document, each in its row: who asks what in the other row is all one."""
  document = np.array([23, 23], np.int32)
  texts = [TOKENS[0, 23:40], TOKENS[1, 10:27]]

  def ask(first, second):
    tokens = np.stack([np.concatenate([TOKENS[0, :23], texts[i]]) for i in (first, second)])
    lengths = TURN[[first, second]]
    run = Told(case)
    run.prompt(document, tokens)
    out = [run.chunk(lengths, document, tokens)]
    check_kept(case, run.caches, document + lengths)
    for i in range(3):
      out.append(run.decode(document + lengths + i, tokens=tokens))
      check_kept(case, run.caches, document + lengths + i + 1)
    return np.stack(out, 1)

  both, swapped, alike = ask(0, 1), ask(1, 0), ask(0, 0)
  finite("logits", both)
  np.testing.assert_allclose(swapped[::-1], both, atol=CLOSE)
  np.testing.assert_allclose(alike, both[[0, 0]], atol=CLOSE)
  most = np.abs(both[0] - both[1]).max()
  assert most > 0.05, (
    f"logits of two questions: found at most {most:.4f} apart, expected above 0.05"
  )


@law
def nan_in_empty_slots_never_leaks(case):
  """Keys and values of NaN in slots without a token change no logits, of a step or of a turn."""
  run = Told(case)
  run.prompt()
  clean = run.caches
  want = run.decode(LENGTHS)

  def poison(cache):
    empty = cache.pos < 0
    held = {n: x for n, x in cache.slots.items() if n.startswith(("k", "v"))}
    floats = {n: x for n, x in held.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    ill = {n: empty.reshape(*empty.shape, *[1] * (x.ndim - 3)) for n, x in floats.items()}
    return cache.put(slots={n: jnp.where(ill[n], jnp.nan, x) for n, x in floats.items()})

  run.caches = tuple(poison(cache) for cache in clean)
  np.testing.assert_array_equal(run.decode(LENGTHS), want)
  run.caches = tuple(poison(cache) for cache in clean)
  finite("logits", run.chunk([3, 3], LENGTHS))


@law
def rows_are_isolated(case):
  """Row 0 does not notice another text or another length in row 1."""
  want = logits_of(case)[0]
  other = TOKENS.copy()
  other[1] = (other[1] + 7) % CONFIG.vocab
  np.testing.assert_allclose(Told(case).generate(tokens=other)[0], want, atol=CLOSE)
  short = LENGTHS.copy()
  short[1] = 3
  np.testing.assert_allclose(Told(case).generate(lengths=short)[0], want, atol=CLOSE)


@law
def idle_rows_stay_untouched(case):
  """A row without tokens in a second turn, and a finished row in decode, keep every bit."""
  run = Told(case)
  run.prompt()

  def row(caches, b):
    return jax.tree.map(lambda x: np.asarray(x[b]), caches)

  before = row(run.caches, 1)
  run.chunk([4, 0], LENGTHS)
  chex.assert_trees_all_equal(row(run.caches, 1), before)
  before, other = row(run.caches, 0), row(run.caches, 1)
  run.decode(LENGTHS, live=np.array([False, True]))
  chex.assert_trees_all_equal(row(run.caches, 0), before)
  changed = jax.tree.map(lambda a, b: (a != b).any(), row(run.caches, 1), other)
  assert any(jax.tree.leaves(changed)), "caches of a live row: found no change, expected a token"


@law
def rows_enter_and_leave_a_live_batch(case):
  """A row that enters a batch goes on with its own bits, its neighbour keeps its bits; a cleared
  row is as a new one. Branches of a context are refused.
  """
  origin, live, alone = (Told(case) for _ in range(3))
  other = (TOKENS + 7) % CONFIG.vocab
  origin.prompt()
  for run in (live, alone):
    run.prompt(tokens=other)
    for i in range(2):
      run.decode(LENGTHS + i, tokens=other)
  held = jax.tree.map(jnp.copy, live.caches)
  entering = offload.rows_of(origin.caches, np.array([1]))
  if refusal := rows.APART.get(live.caches[0].layout):
    with raises(NotImplementedError, f"live: layer 0: {refusal}"):
      rows.insert(held, [1], entering)
    raise unittest.SkipTest(refusal)
  live.caches = rows.insert(held, [1], entering)
  mixed = np.stack([other[0], TOKENS[1]])
  for i in range(STEPS):
    at = np.array([LENGTHS[0] + 2 + i, LENGTHS[1] + i])
    got = live.decode(at, tokens=mixed)
    np.testing.assert_array_equal(got[1], origin.decode(LENGTHS + i)[1])
    np.testing.assert_array_equal(got[0], alone.decode(LENGTHS + 2 + i, tokens=other)[0])
  spec = live.model.spec(len(LENGTHS), CAPACITY)
  kept = offload.rows_of(live.caches, np.array([0]))
  cleared = rows.clear(live.caches, [1], live.method, spec)
  chex.assert_trees_all_equal(offload.rows_of(cleared, np.array([0])), kept)
  new = offload.rows_of(live.method.init_caches(spec), np.array([1]))
  chex.assert_trees_all_equal(offload.rows_of(cleared, np.array([1])), new)
