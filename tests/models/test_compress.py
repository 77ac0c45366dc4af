"""Live full caches cut to a method's: what it keeps when it reads the prompt itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import AdaKV, CriticalKV, Full, KeyDiff, Knorm, LagKV, Quest, SnapKV
from kvjax.models.decode.compress import compress
from kvjax.models.decode.generate import generate, prefill
from kvjax.primitives.codes import unpacked
from kvjax.testing.tiny import CLOSE, CONFIG, model
from tests import family_models, tiny_hf

LENGTHS = np.array([38, 17])
# No token twice: the keys of equal ones have norms that rounding alone tells apart.
TEXTS = np.stack([np.random.default_rng(i).permutation(CONFIG.vocab)[:38] for i in (0, 1)])
LAG = LagKV(24, 8, 4)
METHODS = [Knorm(12, (0, 2)), KeyDiff(12), AdaKV(LAG), CriticalKV(LAG), Quest(16)]
# What keeps all, or looks at keys, values and positions.
ABLE = (
  *("full", "random", "knorm", "keydiff", "lagkv", "topk_oracle", "quest", "infllm_v2"),
  *("cis", "art", "twilight", "quantised", "kivi"),
)


def read(method, decoder=None, tokens=TEXTS):
  decoder = decoder or model()
  caches = method.init_caches(decoder.spec(2, 64))
  return prefill(decoder, tokens[:, : LENGTHS.max()], LENGTHS, caches, method)


def check_alike(found, want):
  """Every array of every layer; of slots those that hold a token.

  On a GPU two programs fuse the same sums differently, so that a code on the edge may be its
  neighbour: a level of a word's one part, in few words.
  """
  assert jax.tree.structure(found) == jax.tree.structure(want)
  for a, b in zip(found, want, strict=True):
    np.testing.assert_array_equal(a.pos, b.pos)
    there = np.asarray(b.pos) >= 0
    for name, x in b.slots.items():
      assert a.slots[name].dtype == x.dtype
      got, wanted = np.asarray(a.slots[name])[there], np.asarray(x)[there]
      if (bits := b.leaf(name).bits) and jax.default_backend() == "gpu":
        apart = got != wanted
        assert apart.mean() < 0.01
        codes = [np.asarray(unpacked(jnp.asarray(x[apart][:, None]), bits)) for x in (got, wanted)]
        assert np.all(np.abs(codes[0] - codes[1]).sum(-1) < 2)
        continue
      np.testing.assert_allclose(got, wanted, atol=1e-5)
    others = [jax.tree.leaves((cache.heads, cache.rows)) for cache in (a, b)]
    for x, y in zip(*others, strict=True):
      np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_what_it_keeps_of_a_prompt_that_it_reads(method, monkeypatch):
  """And then both say the same; the full caches are left alone.

  Rows end in different tiles.
  """
  monkeypatch.setattr("kvjax.models.decode.compress.TILE", 16)
  logits, full = read(Full())
  _, want = read(method)
  found = compress(model(), full, method)
  check_alike(found, want)
  said = [
    generate(model(), logits, mine, method, steps=5, return_logits=True)[0].logits
    for mine in (found, want)
  ]
  np.testing.assert_allclose(*said, atol=CLOSE)
  assert not any(x.is_deleted() for x in jax.tree.leaves(full))


@pytest.mark.kin
@pytest.mark.core(1)
@pytest.mark.parametrize("name", kvjax.METHODS)
def test_every_method_is_as_it_would_be_or_refused(name):
  """What looks at queries, or reads prompts in its own way, is refused by its name."""
  _, full = read(Full())
  method = kvjax.settings.example(kvjax.METHODS[name], 24)
  if name in ABLE:
    check_alike(compress(model(), full, method), read(method)[1])
    return
  says = f"method: found {kvjax.METHODS[name].__name__}.*, expected one that"
  with pytest.raises(NotImplementedError, match=says):
    compress(model(), full, method)


@pytest.mark.slow
def test_layers_with_a_window_stay_as_they_are():
  """To the bit, with every token in its slot, also where an answer has gone round the ring."""
  decoder, method, tokens = family_models.model("gemma3-parameters"), KeyDiff(12), tiny_hf.tokens()
  logits, full = read(Full(), decoder, tokens)
  _, want = read(method, decoder, tokens)
  check_alike(compress(decoder, full, method), want)
  generation, full = generate(decoder, logits, full, Full(), steps=3)
  logits, found = generation.last, compress(decoder, full, method)
  windows = [i for i, window in enumerate(decoder.config.windows) if window]
  assert windows
  for i in windows:
    for mine, theirs in zip(*map(jax.tree.leaves, (found[i], full[i])), strict=True):
      np.testing.assert_array_equal(mine, theirs)
  generate(decoder, logits, found, method, steps=1)
  assert not any(x.is_deleted() for x in jax.tree.leaves(full))


def test_refusals():
  _, mine = read(KeyDiff(12))
  with pytest.raises(ValueError, match=r"caches: found those of KeyDiff.* expected Full"):
    compress(model(), mine, Knorm(8))
  _, full = read(Full())
  with pytest.raises(NotImplementedError, match=r"found SnapKV.*depends on a prompt's queries"):
    compress(model(), full, SnapKV(12, 4))
  with pytest.raises(NotImplementedError, match=r"KVzip.*kvjax\.models\.decode\.reconstruct does"):
    compress(model(), full, kvjax.KVzip(12, 4))
