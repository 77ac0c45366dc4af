"""SmolLM2 from its GGUF file against what an independent loader made of the same file.

The goldens come from scripts/tools/make_golden.py.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.models.decode.generate import generate, prefill
from kvjax.models.io import convert
from kvjax.programs.evals.divergence import surprise
from tests import plain

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def golden():
  with np.load(GOLDENS / "smollm2.npz") as stored:
    return dict(stored)


@pytest.fixture(scope="module")
def loaded(smollm2):
  return convert.load(smollm2, dtype=jnp.float32, impl="reference")


@pytest.fixture(scope="module")
def logits(golden, loaded):
  """Logits of every golden position, float32 [B, T, V]."""
  return plain.logits(loaded[0], golden["tokens"])


def test_logits_are_close(golden, logits):
  """Same weights, float32 on both sides: only the order of sums differs."""
  chosen = np.take_along_axis(logits, golden["top_ids"], -1)
  np.testing.assert_allclose(chosen, golden["top_logits"], atol=5e-3)
  np.testing.assert_allclose(jax.nn.logsumexp(logits, -1), golden["lse"], atol=5e-3)
  np.testing.assert_allclose(logits[:, -1], golden["last"], atol=2e-2)  # stored in float16


def test_perplexity_is_the_one_of_the_other_loader(golden, logits):
  """As evaluations compute it; a difference of 1 % would be a wrong model, not another order."""
  ours = np.asarray(surprise(logits[:, :-1], golden["tokens"][:, 1:]))
  ratio = np.exp(ours.mean(1) - golden["nll"].mean(1))
  np.testing.assert_allclose(ratio, 1, atol=0.01)


def test_decoding_predicts_what_prefill_predicts(golden, logits, loaded):
  """Teacher-forced decoding through the jitted loop, from the middle of each text."""
  model, method = loaded[0], kvjax.Full()
  tokens, half, steps = golden["tokens"], 64, 24
  caches = method.init_caches(model.spec(len(tokens), half + steps))
  lengths = np.full(len(tokens), half)
  first, caches = prefill(model, tokens[:, :half], lengths, caches, method)
  forced = tokens[:, half : half + steps]
  out, _ = generate(
    model, first, caches, method, steps=steps, forced=forced, return_logits=True, chunk=8
  )
  want = logits[:, half - 1 : half + steps - 1]
  np.testing.assert_allclose(np.asarray(out.logits), want, atol=5e-3)


def test_tokenizer(loaded):
  cases = json.loads((GOLDENS / "smollm2_tokenizer.json").read_text("utf-8"))["cases"]
  tokenizer = loaded[1]
  for case in cases:
    ids = tokenizer.encode(case["text"])
    assert ids == case["ids"], case["text"]
    assert tokenizer.decode(ids, skip_special=False) == case["text"]


def test_chat_template(loaded):
  text = loaded[1].render([{"role": "user", "content": "Hi"}])
  assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
  assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
  assert loaded[1].eos == loaded[1].encode("<|im_end|>")[0]
