"""Every family and rope type against Hugging Face transformers, on tiny models.

The goldens come from scripts/tools/make_family_goldens.py; where torch and transformers import, the
same comparison runs live.
"""

import dataclasses
import pathlib

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.models.decode.generate import prefill
from kvjax.models.io import convert, families
from kvjax.models.io.gguf import GGUF
from kvjax.models.io.huggingface import HuggingFace
from kvjax.primitives.rope import Llama3, Rope, Yarn
from tests import plain, tiny_hf
from tests.family_models import model
from tests.tiny_gguf import as_gguf

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens" / "families.npz"
PARITY = 1e-4  # of logits up to 4 and more, float32 on both sides: only the order of sums differs
# One case of each family.
FAMILIES = {case["model_type"]: name for name, case in reversed(tiny_hf.CASES.items())}
FAMILIES = [FAMILIES[family] for family in families.FAMILIES]
SLIDING = [name for name, case in tiny_hf.CASES.items() if case.get("sliding_window") == 24]


def logits_of(model):
  """Logits of `tiny_hf.tokens()`, float32 [B, T, V]: ragged rows, right-padded."""
  return plain.logits(model, tiny_hf.tokens(), tiny_hf.LENGTHS)


@pytest.mark.core(3)
@pytest.mark.parametrize("name", tiny_hf.CASES)
def test_logits_equal_the_goldens(name):
  config = tiny_hf.CASES[name]
  with np.load(GOLDENS) as stored:
    want, digest = stored[f"{name}/logits"], str(stored[f"{name}/digest"])
  assert digest == tiny_hf.digest(config), "the golden is of other weights: make it again"
  row, at = tiny_hf.positions().T
  np.testing.assert_allclose(logits_of(model(name))[row, at], want, rtol=0, atol=PARITY)


@pytest.mark.parametrize("name", tiny_hf.CASES)
def test_logits_equal_transformers(name, tmp_path):
  pytest.importorskip("torch", reason="live parity needs torch; the goldens cover it otherwise")
  pytest.importorskip("transformers", reason="live parity needs transformers")
  from scripts.tools.make_family_goldens import reference

  got, want = logits_of(model(name)), reference(tiny_hf.write(tmp_path, tiny_hf.CASES[name]))
  for row, size in enumerate(tiny_hf.LENGTHS):
    np.testing.assert_allclose(got[row, :size], want[row, :size], rtol=0, atol=PARITY)


def test_goldens_tell_ropes_apart():
  """The Llama cases share weights: another rope moves their logits a thousand tolerances."""
  with np.load(GOLDENS) as stored:
    want = {name: stored[f"{name}/logits"] for name in tiny_hf.CASES}
  plain, same = want["llama3"], want["llama3.1"]
  np.testing.assert_array_equal(same, want["llama-parameters"])
  for name in ("llama3.1", "llama-linear", "yarn-factor", "yarn-mscale"):
    assert np.abs(want[name] - plain).max() > 1000 * PARITY


@pytest.mark.core(2)
@pytest.mark.parametrize("name", dict.fromkeys([*FAMILIES, *SLIDING]))
def test_decoding_equals_the_goldens(name):
  """A prompt, then step by step to the end of the longer row; the shorter one ends on the way."""
  decoder, method, tokens = model(name), kvjax.Full(), tiny_hf.tokens()
  row, at = tiny_hf.positions().T
  with np.load(GOLDENS) as stored:
    want = dict(zip(zip(row, at, strict=True), stored[f"{name}/logits"], strict=True))
  caches, read = method.init_caches(decoder.spec(*tokens.shape)), 14
  _, caches = prefill(decoder, tokens[:, :read], np.array([read, read]), caches, method)
  step = jax.jit(lambda token, caches, live: decoder.decode(token, caches, method, live))
  seen = 0
  for t in range(read, max(tiny_hf.LENGTHS)):
    logits, caches = step(tokens[:, t], caches, np.array(tiny_hf.LENGTHS) > t)
    for r in range(len(tiny_hf.LENGTHS)):
      if (r, t) in want:
        np.testing.assert_allclose(logits[r], want[r, t], rtol=0, atol=PARITY)
        seen += 1
  assert seen == sum(at >= read)


def test_long_rope_is_chosen_by_the_context_that_the_model_states(tmp_path):
  """The long divisors where that outgrows the original one: a limit changes no number."""
  folder = tiny_hf.write(tmp_path / "long", tiny_hf.CASES["phi-long"])
  whole, short = (HuggingFace(folder, max_context=n).config for n in (None, 32))
  assert whole.rope == short.rope and (whole.limited, short.limited) == (False, True)
  entries = {"max_position_embeddings": tiny_hf.ORIGINAL}
  folder = tiny_hf.write(tmp_path / "short", {**tiny_hf.CASES["phi-long"], **entries})
  assert HuggingFace(folder).config.rope.scaling.factors == (1.0, 1.1, 1.2, 1.4, 1.7, 2.1)


def test_yarn_extends_the_stated_context(tmp_path):
  entries = {"max_position_embeddings": tiny_hf.ORIGINAL}
  folder = tiny_hf.write(tmp_path, {**tiny_hf.CASES["qwen2.5-yarn"], **entries})
  assert HuggingFace(folder).config.max_context == 4 * tiny_hf.ORIGINAL


# ---- the same weights through GGUF


_WINDOW = {"attention.sliding_window": 24}
_GEMMA2 = {**_WINDOW, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 30.0}
_LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
_GGUF_YARN = {**_LINEAR, "rope.scaling.type": "yarn", "rope.scaling.original_context_length": 32}
_FAST_YARN = {**_GGUF_YARN, "rope.scaling.yarn_beta_fast": 8.0}


@pytest.mark.parametrize(
  ("name", "more"),
  [
    ("llama2", {}),
    ("llama3.2", "rope_freqs"),
    ("smollm2", {}),
    ("llama-linear", _LINEAR),
    ("mistral", {}),
    ("qwen2", {}),
    ("qwen2.5-yarn", _GGUF_YARN),
    ("qwen3", {}),
    ("qwen3-tied-yarn", _FAST_YARN),
    ("phi4", {}),
    ("phi-partial", {}),
    ("glm4-0414", {}),
    ("phi-long", "rope_factors"),
    ("qwen3-moe", {}),
    ("gpt-oss", {**_FAST_YARN, **_WINDOW}),
    ("mistral-sliding", _WINDOW),
    ("phi3-mini", _WINDOW),
    ("gemma2", _GEMMA2),
    ("gemma3", {**_WINDOW, "attention.sliding_window_pattern": 3}),
    (
      "gemma3-parameters",
      {**_WINDOW, "attention.sliding_window_pattern": 2, "rope.freq_base": 1e6}
      | {**_LINEAR, "rope.scaling.factor": 8.0},
    ),
  ],
)
def test_gguf_holds_the_same_items(tmp_path, name, more):
  config, tensors = tiny_hf.CASES[name], {}
  if more == "rope_freqs":
    more = {}
    config = {**config, "rope_scaling": {**config["rope_scaling"]}}
    config["rope_scaling"]["original_max_position_embeddings"] = 8192
    scaled = Rope(config["rope_theta"], Llama3(32.0)).frequencies(config["head_dim"])
    plain = Rope(config["rope_theta"]).frequencies(config["head_dim"])
    tensors["rope_freqs.weight"] = (plain / scaled).astype(np.float32)
  if name in ("gemma2", "gemma3"):
    config = {**config, "query_pre_attn_scalar": 16}  # llama.cpp knows the 27B models' alone
  if more == "rope_factors":
    more = {"rope.scaling.original_context_length": 32}
    more["rope.scaling.attn_factor"] = (1 + np.log(4) / np.log(32)) ** 0.5
    for kind in ("short", "long"):
      factors = np.array(config["rope_scaling"][f"{kind}_factor"], np.float32)
      tensors[f"rope_factors_{kind}.weight"] = factors
  want = HuggingFace(tiny_hf.write(tmp_path / "folder", config))
  got = GGUF(as_gguf(tmp_path / "x.gguf", config, more, tensors=tensors))
  same = {**want.config.to_json(), "norm_eps": pytest.approx(want.config.norm_eps)}
  if name == "phi-long":
    scaling = same["rope"]["scaling"]
    scaling["factors"] = pytest.approx(scaling["factors"])  # float32 in the file
    scaling["attention_factor"] = pytest.approx(scaling["attention_factor"])
  assert got.config.to_json() == same
  for item in convert.item_names(want.config):
    jax.tree.map(np.testing.assert_array_equal, got.item(item), want.item(item))


def test_gguf_attention_factor(tmp_path):
  more = {**_GGUF_YARN, "rope.scaling.attn_factor": 0.5}
  path = as_gguf(tmp_path / "x.gguf", tiny_hf.CASES["qwen2"], more)
  rope = GGUF(path).config.rope
  assert rope.magnitude == pytest.approx(0.5 * Rope(1.0, Yarn(4.0, 32)).magnitude)


def test_every_type_that_gguf_dequantises(tmp_path):
  """Blocks of small random bytes: all types are read as the package reads them, and rounded."""
  rng, read, name = np.random.default_rng(0), [], "blk.0.ffn_down.weight"
  config = {**tiny_hf.CASES["llama3"], "intermediate_size": 256, "num_hidden_layers": 1}
  for kind in gguf.GGMLQuantizationType:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 0x30, (32, 256 // block * size), np.uint8)
    try:
      want = gguf.dequantize(data.view(np.float32) if kind == 0 else data, kind)
    except NotImplementedError:
      continue
    if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
      continue  # in tests/models/test_convert.py, with real numbers
    source = GGUF(as_gguf(tmp_path / "x.gguf", config, tensors={name: (data, kind)}))
    for dtype, stored in ((None, ml_dtypes.bfloat16), ("float32", np.float32)):
      source.dtype = dtype
      got = source.item("layer_000")["mlp"]["down"]
      assert got.dtype == stored
      np.testing.assert_array_equal(got, want.T.astype(stored))
    read.append(kind.name)
  assert {"BF16", "Q4_0", "Q8_0", "Q2_K", "Q4_K", "Q6_K", "IQ2_XXS", "IQ4_XS", "TQ1_0"} <= set(read)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "without"),
  [
    ("gemma2", {"soft_cap": None}),
    ("gemma2", {"final_soft_cap": None}),
    ("gemma3", {"embed_scale": 1.0}),
    ("gemma3", {"windows": ()}),
    ("gemma3", {"window_rope": None}),
    ("mistral-sliding", {"windows": ()}),
    ("gpt-oss", {"sinks": False}),
    ("gpt-oss", {"rope": Rope(150000.0, Yarn(4.0, 32, beta_fast=8.0))}),
    ("glm4-9b", {"rope": Rope()}),
  ],
)
def test_goldens_tell_flags_apart(name, without):
  """A model without a flag of its family is a thousand tolerances off."""
  whole = model(name)
  bare = nnx.merge(*nnx.split(whole))
  bare.config = dataclasses.replace(whole.config, **without)
  bare.env = dataclasses.replace(whole.env, rope=bare.config.rope, soft_cap=bare.config.soft_cap)
  lengths = np.arange(96) < np.array(tiny_hf.LENGTHS)[:, None]
  off = np.abs(logits_of(bare) - logits_of(whole))[lengths]
  assert off.max() > 1000 * PARITY
