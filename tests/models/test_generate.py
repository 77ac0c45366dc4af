"""The decode loop: what it emits and leaves in the caches, what it refuses, what it compiles."""

import dataclasses
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.checkify import JaxRuntimeError

import kvjax
from kvjax.models.decode import by_layer
from kvjax.models.decode import generate as loop
from kvjax.models.decode import prefill as prompts
from kvjax.models.decode import step as device
from kvjax.models.decode.by_layer import ByLayer
from kvjax.models.decode.generate import generate, pad, prefill, split
from kvjax.models.decode.sampling import Sampling
from kvjax.models.decode.step import Always, decode
from kvjax.models.nn import flat
from kvjax.models.nn.transformer import Transformer
from kvjax.testing.tiny import CLOSE, CONFIG, LENGTHS, TOKENS, Run, model
from tests.tiny_tokenizers import letters

FULL = kvjax.Full()
STREAMED = kvjax.settings.example(kvjax.InfLLM, 16)  # decodes layer by layer, but on a GPU
NAMES = ("full", "streaming_llm", "random")  # all others stand under the laws


def read(tokens, lengths, method=FULL, capacity=48, **how):
  """Logits and caches after prompts, which nothing came before."""
  caches = method.init_caches(model().spec(len(lengths), capacity))
  return prefill(model(), tokens, lengths, caches, method, **how)


def start(rows=slice(None), capacity=64, method=FULL):
  """Logits and caches after a prompt."""
  lengths = np.asarray(LENGTHS)[rows]
  return read(TOKENS[rows, : max(lengths)], lengths, method, capacity)


def run(method=FULL, prompt=slice(None), **how):
  """A generation after a prompt, and the caches that it leaves."""
  return generate(model(), *start(prompt, method=method), method, **how)


def by_step():
  """Logits after a prompt, and a run that goes on from there step by step."""
  run = Run(FULL)
  logits, run.caches = start()
  return logits, run


def plain(steps):
  """Greedy decoding, one step at a time."""
  (logits, run), tokens, kept = by_step(), [], []
  for _ in range(steps):
    kept.append(logits)
    tokens.append(np.argmax(logits, -1))
    logits = run.decode([0, 0], tokens=tokens[-1][:, None])
  return np.stack(tokens, 1), np.stack(kept, 1), run.caches, logits


@pytest.mark.core(1)
@pytest.mark.parametrize("chunk", [4, 16])
def test_greedy_equals_the_plain_loop(chunk):
  tokens, kept, caches, last = plain(6)
  out, mine = run(steps=6, chunk=chunk, return_logits=True)
  np.testing.assert_array_equal(out.tokens, tokens)
  assert out.lengths.tolist() == [6, 6]
  chex.assert_trees_all_close(np.asarray(out.logits), kept, rtol=2e-5, atol=2e-5)
  chex.assert_trees_all_close(np.asarray(out.last), last, rtol=2e-5, atol=2e-5)
  chex.assert_trees_all_close(mine, caches, rtol=2e-5, atol=2e-5)


def sickly():
  """A model with a token whose embedding is NaN: forced tokens and a prompt that have it."""
  ill = min(set(range(CONFIG.vocab)) - set(TOKENS.ravel().tolist()))
  config = dataclasses.replace(CONFIG, layers=1, tie_embeddings=False)
  sick = Transformer(config, dtype=jnp.float32, impl="reference", rngs=nnx.Rngs(0))
  sick.embedding[...] = sick.embedding[...].at[ill].set(jnp.nan)
  forced, tokens = TOKENS[:, 23:29].copy(), TOKENS[:, :9].copy()
  forced[1, 4] = tokens[0, 4] = ill
  return sick, forced, tokens


@pytest.mark.slow
def test_nan_is_traced_to_its_layer_when_asked():
  (sick, forced, tokens), method = sickly(), kvjax.H2O(12)
  sick.env = dataclasses.replace(sick.env, check_nan=True)
  caches, fresh = (m.init_caches(sick.spec(2, 64)) for m in (method, FULL))
  logits, caches = prefill(sick, TOKENS[:, :23], LENGTHS, caches, method)
  with pytest.raises(JaxRuntimeError, match=r"H2O, layer 0: .* row 1, which has cached 18 "):
    generate(sick, logits, caches, method, steps=6, forced=forced, chunk=2)
  with pytest.raises(JaxRuntimeError, match=r"Full, layer 0: .* row 0, which has cached 0 "):
    prefill(sick, tokens, [9, 9], fresh, FULL)


@pytest.mark.slow
def test_nan_raises_where_a_row_is_read():
  """With its row and place; rows that take no part, or have ended, do no harm."""
  sick, forced, tokens = sickly()

  def fresh():
    return FULL.init_caches(sick.spec(2, 64))

  def begin():
    return prefill(sick, TOKENS[:, :23], LENGTHS, fresh(), FULL)

  with pytest.raises(FloatingPointError, match=r"generate: .* row 1, step 5, after 19 tokens"):
    generate(sick, *begin(), FULL, steps=6, forced=forced, chunk=2)
  generate(sick, *begin(), FULL, steps=4, forced=forced[:, :4], chunk=2)
  generate(sick, *begin(), FULL, steps=6, forced=forced, chunk=2, live=[True, False])
  for how, where in (
    ({}, "after the 9 tokens of its prompt"),
    ({"chunk": 3}, "after the 9 tokens of its prompt"),
    ({"all_logits": True}, r"token \d, .* expected finite"),
  ):
    with pytest.raises(FloatingPointError, match=rf"prefill: .* row 0, {where}"):
      prefill(sick, tokens, [9, 9], fresh(), FULL, **how)
  prefill(sick, tokens, [4, 9], fresh(), FULL, all_logits=True)  # the ill token is padding
  prefill(sick, tokens, [0, 9], fresh(), FULL)


@pytest.mark.parametrize("ill", [np.nan, np.inf, -np.inf])
def test_logits_of_which_nothing_can_be_chosen(ill):
  """Given, not made; one token that is forbidden, by −∞, is no reason."""
  logits, caches = start()
  for at in (3, slice(None)):
    given = np.array(logits)
    given[1, at] = ill
    if ill == -np.inf and at == 3:
      _, caches = generate(model(), given, caches, FULL, steps=2, forced=[[1, 2]] * 2)
      continue
    with pytest.raises(FloatingPointError, match="found NaN or infinite logits in row 1, step 0"):
      generate(model(), given, caches, FULL, steps=2)
  generate(model(), given, caches, FULL, steps=2, live=[True, False])  # nothing had run


@pytest.mark.slow
def test_an_overflow_in_float16_says_what_to_do():
  config = dataclasses.replace(CONFIG, layers=1)
  narrow = Transformer(config, dtype=jnp.float16, impl="reference", rngs=nnx.Rngs(0))
  narrow.layers[0].mlp.gate_up[...] *= 300
  narrow.layers[0].mlp.down[...] *= 3000
  with pytest.raises(FloatingPointError, match=r"in float16, expected .* bfloat16 or float32"):
    prefill(narrow, TOKENS[:, :9], [9, 9], FULL.init_caches(narrow.spec(2, 16)), FULL)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=["greedy", "drawn"])
def test_continuing_equals_one_call(sampling):
  """A draw depends on the token's position, not on where an earlier call ended."""
  settings = {"sampling": sampling, "chunk": 4}
  whole, _ = run(steps=9, **settings)
  first, caches = run(steps=5, **settings)
  second, _ = generate(model(), first.last, caches, FULL, steps=4, **settings)
  np.testing.assert_array_equal(np.concatenate([first.tokens, second.tokens], 1), whole.tokens)


def test_rows_stop_on_their_own():
  tokens, *_ = plain(8)
  stop = int(tokens[0, 2])
  assert stop not in tokens[1]
  out, caches = run(steps=8, stop=[stop], chunk=4)
  at = tokens[0].tolist().index(stop)
  assert out.tokens[0].tolist() == [*tokens[0, : at + 1], *[-1] * (7 - at)]
  np.testing.assert_array_equal(out.tokens[1], tokens[1])
  assert out.lengths.tolist() == [at + 1, 8]
  # The stop token is cached, and nothing after it.
  assert caches[0].seen.tolist() == [LENGTHS[0] + at + 1, LENGTHS[1] + 8]


def test_a_stopped_row_keeps_the_logits_after_its_last_token():
  """However long the others go on: those of a run of exactly its length."""
  free = run(steps=8)[0].tokens
  stop = next(t for t in free[1, :4].tolist() if t not in free[0])
  out, _ = run(steps=8, stop=[stop])
  assert out.lengths[0] == 8 and out.lengths[1] < 5
  short, _ = run(steps=int(out.lengths[1]))
  np.testing.assert_array_equal(out.last[1], short.last[1])
  idle, _ = run(steps=3, live=[True, False])
  np.testing.assert_array_equal(idle.last[1], start()[0][1])


def test_ends_early_when_all_rows_have_stopped():
  tokens, *_ = plain(8)
  stop = {int(tokens[0, 1]), int(tokens[1, 1])}
  seen = []
  out, caches = run(steps=40, stop=list(stop), chunk=4, on_chunk=seen.append)
  assert len(seen) <= 2
  assert out.tokens.shape == (2, 40)
  assert out.lengths.max() <= 2
  np.testing.assert_array_equal(caches[0].seen, LENGTHS + out.lengths)


def test_chunks_are_handed_over_as_they_come():
  seen = []
  out, _ = run(steps=10, chunk=4, on_chunk=seen.append)
  assert [x.shape[1] for x in seen] == [2, 4, 4]  # the first words sooner
  np.testing.assert_array_equal(np.concatenate(seen, 1), out.tokens)


def test_steps_are_under_way_while_the_host_reads(monkeypatch):
  """A token is read once two later steps are dispatched; with chunk = 1 before the next one."""
  told = []
  step, read = loop.Device.step, loop._Host.read

  def dispatched(self, count):
    assert count == 1
    told.append("step")
    return step(self, count)

  def looked_at(self, *made):
    told.append("read")
    return read(self, *made)

  monkeypatch.setattr(loop.Device, "step", dispatched)
  monkeypatch.setattr(loop._Host, "read", looked_at)
  never = [int(np.setdiff1d(np.arange(CONFIG.vocab), plain(6)[0])[0])]
  for chunk, ahead in ((16, loop.AHEAD), (1, 0)):
    told.clear()
    run(steps=6, chunk=chunk, stop=never)
    assert told == ["step"] * ahead + ["step", "read"] * (6 - ahead) + ["read"] * ahead
  # Nobody looks at tokens before the last one is there: nothing is waited for.
  told.clear()
  run(steps=6)
  assert told == ["step"] * 6 + ["read"] * 6


SOME_STEPS = [
  ({"return_logprobs": True}, [8, 8, 5], [4, 4, 4, 4, 4, 1]),
  ({"sampling": Sampling(1.0), "seed": 3, "live": [True, False]}, [8, 8, 5], [4, 4, 4, 4, 4, 1]),
  ({"forced": np.arange(42).reshape(2, 21) % 9 - 1}, [8, 8, 5], [4, 4, 4, 4, 4, 1]),
  ({"stop": [*range(20), 33]}, None, None),
  ({"chunk": 6, "on_chunk": lambda _: None}, [1, 2, 4, 6, 6, 2], [1] * 21),
  ({"return_logits": True}, [1] * 21, [1] * 21),
  ({"chunk": 1, "on_chunk": lambda _: None}, [1] * 21, [1] * 21),
]


@pytest.mark.slow
@pytest.mark.rest(12)
@pytest.mark.parametrize(
  ("name", "how", "counts"),
  [("InfLLM", how, counts) for how, counts, _ in SOME_STEPS]
  + [(name, how, n) for name in ("SnapKV", "Quest", "LongFlow") for how, _, n in SOME_STEPS[:4]]
  + [("SnapKV", how, counts) for how, _, counts in SOME_STEPS[4:]],
)
def test_some_steps_a_call_are_those_steps(monkeypatch, name, how, counts):
  """As on a GPU: a loop on the device, beside a step a call (programs of a layer, of a stream)."""
  method, made = kvjax.settings.example(getattr(kvjax, name), 16), []
  want, theirs = run(method, steps=21, **how)
  monkeypatch.setattr(by_layer, "decodes", lambda *_: False)
  monkeypatch.setattr(device, "quick", lambda _: True)
  monkeypatch.setattr(device, "SOME", 8)
  step = loop.Device.step
  monkeypatch.setattr(loop.Device, "step", lambda self, n: made.append(n) or step(self, n))
  out, mine = run(method, steps=21, **how)
  np.testing.assert_array_equal(out.tokens, want.tokens)
  chex.assert_trees_all_close((out.logprobs, out.logits), (want.logprobs, want.logits), atol=CLOSE)
  chex.assert_trees_all_close((mine, out.last), (theirs, want.last), atol=CLOSE)
  assert made == (counts or made)
  assert counts is not None or out.lengths.min() < 21


def test_only_small_models_on_a_gpu_take_several_steps_a_call(monkeypatch):
  assert not device.quick(model())
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  assert device.quick(model())
  monkeypatch.setattr(device, "QUICK", 1e3)
  assert not device.quick(model())


def test_forced_tokens():
  """Forced tokens are inserted, never stop a row, and −1 leaves the choice free."""
  tokens, *_ = plain(4)
  forced = np.full((2, 6), -1)
  forced[:, 1:4] = TOKENS[:, 30:33]
  stop = forced[:, 1].tolist()
  out, _ = run(steps=6, forced=forced, stop=stop, return_logits=True, chunk=4)
  np.testing.assert_array_equal(out.tokens[:, 1:4], forced[:, 1:4])
  np.testing.assert_array_equal(out.tokens[:, 0], tokens[:, 0])
  first, again = by_step()
  want = np.stack([first, *(again.decode([i, i], tokens=out.tokens) for i in range(5))], 1)
  assert (out.tokens[:, 4:] == want.argmax(-1)[:, 4:]).all() or out.lengths.min() < 6
  chex.assert_trees_all_close(np.asarray(out.logits), want, rtol=2e-5, atol=2e-5)


def test_rows_that_are_not_live_stay_as_they_are():
  logits, caches = start()
  before = jax.tree.map(lambda x: np.asarray(x[1]), caches)
  out, caches = generate(model(), logits, caches, FULL, steps=3, live=[True, False], chunk=4)
  assert out.lengths.tolist() == [3, 0]
  chex.assert_trees_all_equal(jax.tree.map(lambda x: np.asarray(x[1]), caches), before)


# ---- sampling


def sample(prompt=slice(None), seed=0, steps=12, method=FULL, numbers=None, **sampling):
  how = {"sampling": Sampling(**{"temperature": 1.0, **sampling}), "seed": seed, "chunk": 4}
  return run(method, prompt, steps=steps, rows=numbers, **how)[0].tokens


def test_same_seed_same_text_other_seed_other_text():
  np.testing.assert_array_equal(sample(seed=3), sample(seed=3))
  assert (sample(seed=3) != sample(seed=4)).any(1).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_text_alone_or_in_a_batch(name):
  """Rows that keep their numbers draw the same text alone, and in a batch of another order."""
  method = kvjax.settings.example(kvjax.METHODS[name], 16)
  both = sample(method=method, numbers=[5, 3], top_p=0.95)
  assert (both[0] != both[1]).any()
  for row, number in enumerate((5, 3)):
    alone = sample(slice(row, row + 1), method=method, numbers=[number], top_p=0.95)
    np.testing.assert_array_equal(alone, both[row : row + 1])
  turned = sample([1, 0], method=method, numbers=[3, 5], top_p=0.95)
  np.testing.assert_array_equal(turned[::-1], both)


def test_logprobs_are_the_models():
  """Of the chosen tokens, before temperature and filters; 0 once a row has stopped."""
  stop = [int(sample(steps=7, temperature=0.8, top_k=20)[0, 2])]
  both = {"return_logits": True, "return_logprobs": True}
  out, _ = run(steps=7, sampling=Sampling(0.8, top_k=20), stop=stop, chunk=4, **both)
  assert out.lengths.min() < 7
  every = np.asarray(jax.nn.log_softmax(out.logits, -1))
  chosen = np.take_along_axis(every, np.maximum(out.tokens, 0)[..., None], 2)[..., 0]
  want = np.where(out.tokens >= 0, chosen, 0)
  np.testing.assert_allclose(out.logprobs, want, rtol=1e-5, atol=1e-5)


# ---- text, and strings that end it


def say(stop_strings=(), **how):
  heard = ["", ""]

  def hear(new):
    for row, text in enumerate(new):
      heard[row] += text

  how = {"steps": 10, "chunk": 4, "on_text": hear, **how}
  out, caches = run(stop_strings=stop_strings, tokenizer=letters(), **how)
  assert heard == out.texts
  return out, caches


def test_texts_are_the_tokens_text():
  out, _ = say()
  assert out.texts == [letters().decode(row.tolist()) for row in out.tokens]


@pytest.mark.core(2)
@pytest.mark.parametrize("chunk", [1, 3, 4, 16])
def test_rows_stop_at_strings(chunk):
  """The text ends before the string, the tokens with the one that completes it; the other row goes
  on. With chunk = 1 nothing else is in the cache."""
  whole, _ = say()
  assert len(set(whole.texts[0])) > 3
  mark = whole.texts[0][2:5]  # spans chunks of 3 and of 4
  assert mark not in whole.texts[1] and whole.texts[0].index(mark) == 2
  out, caches = say(["never", mark], chunk=chunk)
  assert out.texts == [whole.texts[0][:2], whole.texts[1]]
  assert out.lengths.tolist() == [5, 10]
  np.testing.assert_array_equal(out.tokens[0, :5], whole.tokens[0, :5])
  np.testing.assert_array_equal(out.tokens[1], whole.tokens[1])
  # The steps that were under way when the host read the token; the cache is otherwise the text's.
  assert int(caches[0].seen[0]) - LENGTHS[0] - 5 == (loop.AHEAD if chunk > 1 else 0)


def test_all_rows_stopped_by_strings_end_early():
  whole, _ = say()
  seen = []
  stops = [text[1:3] for text in whole.texts]
  out, _ = say(stops, steps=40, on_chunk=seen.append)
  found = np.concatenate(seen, 1)
  assert found.shape[1] == out.lengths.max() <= 3
  np.testing.assert_array_equal(found, out.tokens[:, : found.shape[1]])


def test_stop_tokens_are_not_text_unless_forced():
  whole, _ = say()
  stop = int(whole.tokens[0, 3])
  at = whole.tokens[0].tolist().index(stop)
  out, _ = say(stop=[stop])
  assert out.texts[0] == whole.texts[0][:at]
  forced = np.full((2, 10), -1)
  forced[:, 0] = stop
  out, _ = say(stop=[stop], forced=forced)
  assert out.texts[0].startswith(letters().decode([stop]))


# ---- compilation and memory


def jitted():
  """A layer of a prompt and a decode step as they are compiled, with nothing compiled yet."""
  found = by_layer._prefill, flat.jitted(decode, 4, None)
  for function in found:
    function.clear_cache()
  by_layer._SITES.clear()
  return found


def test_does_not_retrace():
  reading, decoding = jitted()
  settings = (Sampling(0.5), Sampling(0.9, top_k=5), Sampling(0.1, top_p=0.5, min_p=0.1))
  stops = [], [1], [1, 2, 3]
  for seed, sampling in enumerate(settings):
    run(steps=5 + 3 * seed, sampling=sampling, seed=seed, stop=stops[seed], chunk=4)
  assert reading._cache_size() == decoding._cache_size() == 1


def test_steps_are_one_program_on_a_gpu(monkeypatch):
  assert by_layer.decodes(model(), STREAMED)
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  assert by_layer.reads(model()) and not by_layer.decodes(model(), STREAMED)


def test_layers_that_are_alike_share_a_program():
  by_layer._SITES.clear()
  by_layer._decode.clear_cache()
  for steps in (3, 5):
    run(STREAMED, steps=steps, chunk=4)
  assert by_layer._decode._cache_size() == 1


def test_a_step_aliases_all_cache_bytes():
  decoder, rows, capacity = model(), 2, 512
  graph, leaves = split(decoder)
  caches = FULL.init_caches(decoder.spec(rows, capacity))
  knobs = Sampling().knobs(CONFIG.vocab)
  always = Always(jnp.zeros(8, jnp.int32), jnp.arange(rows), knobs, jnp.uint32(0))
  logits, live, want = jnp.zeros((rows, CONFIG.vocab)), jnp.ones(rows, bool), jnp.full(rows, -1)
  _, decoding = jitted()
  lowered = decoding.lower(graph, FULL, True, False, leaves, caches, logits, live, want, always)
  memory = lowered.compile().memory_analysis()
  size = sum(x.nbytes for x in jax.tree.leaves(caches))
  assert memory.alias_size_in_bytes >= size


# ---- bad arguments


LOGITS = np.zeros((2, CONFIG.vocab))
VALUES = [
  ({"steps": 0}, "steps: found 0"),
  ({"chunk": 0}, "chunk: found 0"),
  ({"seed": -1}, "seed: found -1"),
  ({"seed": 2**32}, r"seed: found 4294967296, expected an integer in \[0, 4294967296\)"),
  ({"rows": [1]}, r"rows: found shape \(1,\), expected \(2,\)"),
  ({"rows": [1, -1]}, r"rows: found \[1, -1\]"),
  ({"rows": [0, 1.5]}, r"rows: found \[0.0, 1.5\]"),
  ({"rows": [[0], [1, 2]]}, "rows: found rows of unlike lengths, expected an array"),
  ({"stop_strings": ["x"]}, "tokenizer: found None"),
  ({"on_text": print}, "tokenizer: found None"),
  ({"stop_strings": "x"}, "stop_strings: found 'x', expected a list"),
  ({"stop_strings": [""]}, r"stop_strings: found \[''\]"),
  ({"stop_strings": [3]}, r"stop_strings: found \[3\], expected a list of non-empty strings"),
  ({"stop_strings": None}, "stop_strings: found None"),
  ({"stop_strings": ["a\udce9"]}, "stop_strings: found a byte 0xE9 that is no UTF-8"),
  ({"stop": [CONFIG.vocab]}, f"stop: found {CONFIG.vocab}, expected an integer"),
  ({"live": [True]}, r"live: found shape \(1,\), expected \(2,\)"),
  ({"live": [1, 0.5]}, r"live: found \[1.0, 0.5\], expected booleans"),
  ({"live": [1, 2]}, r"live: found \[1, 2\], expected booleans"),
  ({"forced": np.zeros((2, 3), int)}, r"forced: found shape \(2, 3\)"),
  ({"forced": np.full((2, 1), 99), "steps": 1}, r"forced: found ids in \[99, 99\]"),
  ({"forced": [[1], [1, 2]]}, "forced: found rows of unlike lengths"),
  ({"steps": 42}, r"steps = 42 after 23 cached tokens \(row 0\) needs 65 slots.*capacity of 64"),
  ({"logits": LOGITS.astype(str)}, "^logits: found "),
  ({"logits": LOGITS.astype(object)}, "^logits: found "),
]
# Nothing is truncated.
KINDS = [
  ({"steps": 2.7}, "steps: found 2.7, expected an integer"),
  ({"steps": True}, "steps: found True, expected an integer"),
  ({"steps": "4"}, "steps: found '4', expected an integer"),
  ({"chunk": 2.0}, "chunk: found 2.0"),
  ({"seed": 1.5}, "seed: found 1.5"),
  ({"seed": None}, "seed: found None"),
  ({"stop": [25.5]}, "stop: found 25.5"),
  ({"stop": [True]}, "stop: found True"),
  ({"stop": ["a"]}, "stop: found 'a'"),
  ({"stop": 3}, "stop: found 3, expected a list of token ids"),
  ({"stop": "ab"}, "stop: found 'ab', expected a list of token ids"),
  ({"stop": None}, "stop: found None, expected a list of token ids"),
  ({"forced": np.full((2, 4), 1.5)}, "forced: found float64, expected integers"),
  ({"forced": np.full((2, 4), True)}, "forced: found bool, expected integers"),
  ({"sampling": 0.7}, "sampling: found 0.7, expected a Sampling"),
  ({"sampling": None}, "sampling: found None, expected a Sampling"),
  ({"tokenizer": "gpt2"}, "tokenizer: found 'gpt2', expected a Tokenizer"),
  ({"on_chunk": 3}, "on_chunk: found 3, expected a function, or None"),
  *(({"logits": LOGITS.astype(kind)}, "^logits: found ") for kind in (int, bool, complex)),
]


@pytest.mark.parametrize(
  ("error", "change", "message"),
  [*((ValueError, *row) for row in VALUES), *((TypeError, *row) for row in KINDS)],
)
def test_generate_refuses(error, change, message, untyped):
  logits, caches = start()
  how = {"logits": logits, "steps": 4, **change}
  with pytest.raises(error, match=message):
    generate(model(), how.pop("logits"), caches, FULL, **how)
  assert not caches[0].slots["k"].is_deleted()


@pytest.mark.parametrize("on_chunk", [None, lambda tokens: None])
def test_where_no_row_takes_part_nothing_is_generated(on_chunk):
  logits, caches = start()
  given = {"live": [False, False], "on_chunk": on_chunk, "return_logprobs": True}
  out, _ = generate(model(), logits, caches, FULL, steps=3, **given)
  np.testing.assert_array_equal(out.tokens, np.full((2, 3), -1))
  np.testing.assert_array_equal(out.last, logits)
  assert not out.lengths.any() and not out.logprobs.any()


def test_numbers_of_numpy_are_taken(untyped):
  out, _ = run(
    steps=np.int64(4),
    chunk=np.int32(2),
    seed=np.uint32(3),
    stop=np.array([60, 59]),
    live=np.array([1, 0]),
    rows=np.array([0, 1], np.uint8),
    forced=np.full((2, 4), 5, np.int64),
  )
  assert out.lengths.tolist() == [4, 0]


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
    (TOKENS[:, :8], [8, 4], {"chunk": 0}, "chunk: found 0"),
    (TOKENS[:, :8], [8, 4], {"chunk": 4, "past": 0}, "past: found 0 and chunk = 4"),
    (TOKENS[:, :8], [8, 4], {"chunk": 4, "with_aux": True}, "with_aux: found True and chunk = 4"),
  ],
)
def test_prefill_refuses(tokens, lengths, kwargs, message):
  caches = FULL.init_caches(model().spec(2, 16))
  with pytest.raises(ValueError, match=message):
    prefill(model(), tokens, np.array(lengths), caches, FULL, **kwargs)
  assert not caches[0].slots["k"].is_deleted()


def test_prefill_counts_what_is_cached():
  _, caches = read(TOKENS[:, :8], [8, 5], capacity=16)
  with pytest.raises(ValueError, match="past: found 4, expected at least the 8 tokens"):
    prefill(model(), TOKENS[:, :8], [4, 4], caches, FULL, past=4)
  with pytest.raises(ValueError, match=r"a prompt of 9 tokens after 8 cached tokens \(row 0\)"):
    prefill(model(), TOKENS[:, :9], [9, 2], caches, FULL)
  logits, caches = prefill(model(), TOKENS[:, 8:16], [8, 8], caches, FULL)
  assert caches[0].seen.tolist() == [16, 13]
  whole, _ = read(TOKENS[:1, :16], [16])
  chex.assert_trees_all_close(logits[:1], whole, rtol=2e-5, atol=2e-5)


def test_caches_of_another_model():
  caches = FULL.init_caches(model().spec(2, 16))
  with pytest.raises(ValueError, match="caches: found 3, expected one per layer, 4"):
    prefill(model(), TOKENS[:, :8], [4, 4], caches[:3], FULL)


# ---- prompts in chunks


@pytest.mark.core(1)
@pytest.mark.parametrize("name", ["full", "streaming_llm"])
@pytest.mark.parametrize("chunk", [8, 32])
def test_chunks_give_what_one_call_gives(name, chunk):
  method, seen = kvjax.settings.example(kvjax.METHODS[name], 16), []
  prompt = TOKENS[:, :30], [30, 13], method
  whole, wanted = read(*prompt, past=0)
  logits, caches = read(*prompt, chunk=chunk, on_chunk=lambda *x: seen.append(x))
  chex.assert_trees_all_close(logits, whole, rtol=1e-4, atol=1e-4)
  for mine, other in zip(caches, wanted, strict=True):
    np.testing.assert_array_equal(mine.seen, other.seen)
    np.testing.assert_array_equal(np.sort(mine.pos), np.sort(other.pos))
  assert seen == ([(30, 30)] if chunk == 32 else [(8, 30), (16, 30), (24, 30), (30, 30)])
  # A further turn in chunks, onto rows of different lengths; one row is idle.
  before = jax.tree.map(lambda x: np.asarray(x[1]), caches)
  one, _ = prefill(model(), TOKENS[:, 30:], [10, 0], wanted, method)
  two, caches = prefill(model(), TOKENS[:, 30:], [10, 0], caches, method, chunk=4)
  chex.assert_trees_all_close(two[0], one[0], rtol=1e-4, atol=1e-4)
  chex.assert_trees_all_equal(jax.tree.map(lambda x: np.asarray(x[1]), caches), before)


@pytest.mark.slow
def test_chunks_keep_the_logits_of_every_position():
  lengths = [14, 5]
  whole, _ = read(TOKENS[:, :14], lengths, all_logits=True)
  parts, _ = read(TOKENS[:, :22], lengths, all_logits=True, chunk=8)
  assert parts.shape == (2, 22, CONFIG.vocab)
  for row, n in enumerate(lengths):
    chex.assert_trees_all_close(parts[row, :n], whole[row, :n], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_chunks_compile_once_per_doubling():
  reading, _ = jitted()
  for length in (33, 40, 25):
    read(TOKENS[:, :length], [length, 3], capacity=64, chunk=8)
  assert reading._cache_size() == 4  # an empty cache, and bounds of 8, 16 and 32


@pytest.mark.slow
def test_chunks_tell_the_method_the_whole_length():
  seen = []

  class Spy(kvjax.Full):
    def active(self, at, tokens, total):
      jax.debug.callback(lambda x: seen.append(x.tolist()), total)

  read(TOKENS[:, :12], [12, 7], Spy(), chunk=8)
  jax.effects_barrier()
  assert seen == [[12, 7]] * 2 * CONFIG.layers


def test_chunks_are_refused_of_a_method_that_has_to_see_a_whole_prompt():
  with pytest.raises(NotImplementedError, match="chunk: found 4, expected None for Random"):
    read(TOKENS[:, :8], [8, 4], kvjax.Random(8), chunk=4)


@pytest.mark.usefixtures("untyped")
def test_prompts_are_padded():
  tokens, lengths = pad([[1, 2, 3], [], [4]], multiple=4)
  assert tokens.tolist() == [[1, 2, 3, 0], [0, 0, 0, 0], [4, 0, 0, 0]]
  assert lengths.tolist() == [3, 0, 1]
  assert pad([[1, 2, 3]])[0].shape == (1, 64) and pad([[1] * 65])[0].shape == (1, 128)
  assert pad([[1, 2, 3]], multiple=1)[0].shape == (1, 3)
  with pytest.raises(ValueError, match="multiple: found 0"):
    pad([[1]], multiple=0)
  for wrong in ([[1], [1.5]], [[1], "ab"], [[1], 2], [[1], [True]], [[1], [[2]]]):
    with pytest.raises(TypeError, match=r"prompts\[1\]: found .*expected a list of integers"):
      pad(wrong)
  with pytest.raises(ValueError, match=r"prompts\[0\]: found .* 4294967297, expected at most"):
    pad([[2**32 + 1]])
  with pytest.raises(TypeError, match="prompts: found None, expected a list of lists of token ids"):
    pad(None)


# ---- methods that read prompts in pieces of their own


@pytest.mark.slow
def test_prompts_of_any_length_take_few_programs():
  """With the logits and caches of their own length; none where there is no room for a round one."""

  def kept(caches):
    """Empty slots may hold anything."""
    there = [c.pos >= 0 for c in caches]
    keys = [jnp.where(x[..., None], c.slots["k"], 0) for x, c in zip(there, caches, strict=True)]
    return keys, [jnp.where(x, c.pos, 0) for x, c in zip(there, caches, strict=True)]

  method = kvjax.StreamingLLM(12)
  before = by_layer._prefill._cache_size()
  for size in (3, 17, 40):
    logits, caches = read(TOKENS[:, :size], [size, 2], method)
    own = method.init_caches(model().spec(2, 48))
    given = jnp.asarray(TOKENS[:, :size]), jnp.array([size, 2]), own, method
    want, own = ByLayer(model()).prefill(*given, past=0)
    chex.assert_trees_all_close((logits, kept(caches)), (want, kept(own)), rtol=2e-4, atol=2e-4)
  assert by_layer._prefill._cache_size() - before == 4  # one, and three of their own lengths
  _, full = start(capacity=40)
  _, full = prefill(model(), TOKENS[:, 23:26], [3, 3], full, FULL)
  assert full[0].seen.tolist() == [26, 17]
  read(np.zeros((2, 40), np.int32), [40, 40], capacity=40)  # to the last


def test_widths_are_few_and_close():
  def width(size):
    return prompts._width(size, None)

  assert [width(n) for n in (1, 64, 65, 1024, 8192, 131072)] == [64, 64, 128, 1024, 8192, 131072]
  sizes = range(1, 131073, 37)
  assert all(n <= width(n) <= max(n * 17 / 16, n + 63) for n in sizes)
  assert len({width(n) for n in sizes}) <= 128
  assert prompts._width(40, np.array([48, 44])) == 48 and prompts._width(50, np.array([48])) == 50


@pytest.mark.slow
def test_programs_are_dropped_where_they_are_many(monkeypatch):
  monkeypatch.setattr(by_layer, "MOST_PROGRAMS", 0)
  logits, caches = start()
  assert 0 < flat.held() < 12
  found = generate(model(), logits, caches, FULL, steps=3)[0].tokens
  monkeypatch.undo()
  np.testing.assert_array_equal(run(steps=3)[0].tokens, found)


@pytest.mark.rest(1)
@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/maps").exists(), reason="needs Linux")
@pytest.mark.parametrize("all_logits", [False, True])
def test_prompts_of_many_lengths_leave_memory_maps_for_others(all_logits, monkeypatch):
  """120 lengths took 14,000 of 65,530; where they are not rounded up, dropping helps."""

  def maps():
    return pathlib.Path("/proc/self/maps").read_bytes().count(b"\n")

  monkeypatch.setattr(by_layer, "MOST_PROGRAMS", 60)
  start()
  before, most = maps(), 0
  for size in range(1, 121):
    read(np.ones((1, size), np.int32), [size], capacity=256, all_logits=all_logits)
    most = max(most, maps() - before)
  assert most < 4000


@pytest.mark.slow  # the laws put streams' pieces beside one call in the core
def test_pieces_are_calls_of_the_model():
  """Each row in its own pieces: as one call after another by hand, row by row."""
  method = kvjax.Ltri(2, 6, 4, 2, chunk=8, held=2, spans=2, vectors=4, last=3)
  lengths, seen = [30, 14], []  # pieces of few widths
  assert [method.traits.pieces(n) for n in lengths] == [[8, 8, 8, 3, 3], [8, 3, 3]]
  prompt = TOKENS[:, :30], lengths, method, 40
  logits, caches = read(*prompt, on_chunk=lambda *x: seen.append(x))
  assert seen == [(8, 30), (16, 30), (24, 30), (27, 30), (30, 30)]
  every, _ = read(*prompt, all_logits=True)
  assert every.shape == (2, 30, CONFIG.vocab)
  call = jax.jit(lambda *given: model().prefill(*given, method, past=None))
  for row, n in enumerate(lengths):
    alone, start = method.init_caches(model().spec(1, 40)), 0
    for count in method.traits.pieces(n):
      last, alone = call(TOKENS[row : row + 1, start : start + count], np.array([count]), alone)
      start += count
      chex.assert_trees_all_close(every[row, start - 1], last[0], rtol=1e-4, atol=1e-4)
    chex.assert_trees_all_close(logits[row], last[0], rtol=1e-4, atol=1e-4)
    for mine, other in zip(caches, alone, strict=True):
      for name in ("seen", "gone", "kept", "held"):
        np.testing.assert_array_equal(mine.rows[name][row], other.rows[name][0])
  with pytest.raises(NotImplementedError, match="chunk: found 8, expected None for Ltri"):
    read(*prompt, chunk=8)


@pytest.mark.slow
def test_a_store_that_is_full():
  method = kvjax.InfLLM(2, 6, 4, 2, chunk=8, held=2)
  caches = method.init_caches(model().spec(2, 24))
  room = kvjax.families.entrance.room(method, caches[0])
  assert 24 <= room < 36
  with pytest.raises(ValueError, match=rf"a prompt of 40 tokens.*found a capacity of {room}"):
    prefill(model(), TOKENS, [40, 3], caches, method)
  logits, caches = prefill(model(), TOKENS[:, :20], [20, 3], caches, method)
  with pytest.raises(ValueError, match=r"steps = 20 after 20 cached tokens"):
    generate(model(), logits, caches, method, steps=20)
