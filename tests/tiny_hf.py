"""Tiny models of every family and rope type, as Hugging Face folders with made-up weights.

Needs NumPy, safetensors and tokenizers only: scripts/tools/make_family_goldens.py runs it beside
transformers, where JAX need not be.
"""

import hashlib
import json
import pathlib
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file

D, F, V, LAYERS = 32, 48, 64, 2
_GEMMAS = ("gemma2", "gemma3_text")
ORIGINAL = 32  # the context that the scaled ropes extend
LENGTHS = (96, 41)  # tokens of the two rows: both end beyond the original context
_LLAMA3 = {
  "rope_type": "llama3",
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": ORIGINAL,
}
_NO_PAD = {"pad_token_id": 0}  # transformers' own default lies beyond the vocabulary
_LONG = {
  "type": "longrope",
  "short_factor": [1.0, 1.1, 1.2, 1.4, 1.7, 2.1],
  "long_factor": [1.0, 1.5, 2.0, 4.0, 7.0, 11.0],
}
_GLM = {"attention_bias": True, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07}
_MOE = {
  "num_experts": 8,
  "num_experts_per_tok": 3,
  "moe_intermediate_size": 24,
  "norm_topk_prob": True,
  "decoder_sparse_step": 1,
  "mlp_only_layers": [],
  "rope_theta": 1000000.0,
}
_GEMMA = {
  "hidden_act": ...,
  "hidden_activation": "gelu_pytorch_tanh",
  "hidden_size": 48,
  "num_hidden_layers": 4,
  "head_dim": 16,
  "query_pre_attn_scalar": 20,
  "sliding_window": 24,
  "sliding_window_pattern": 3,
  "rope_theta": 1000000.0,
  "rope_local_base_freq": 10000.0,
  "tie_word_embeddings": ...,
  "pad_token_id": 0,
}
_GEMMA2 = {
  **dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh"),
  "hidden_size": 48,
  "num_hidden_layers": 4,
  "head_dim": 16,
  "query_pre_attn_scalar": 20,
  "sliding_window": 24,
  "attn_logit_softcapping": 2.0,
  "final_logit_softcapping": 30.0,
  "tie_word_embeddings": ...,
  "pad_token_id": 0,
}
_GPT_OSS = {
  "attention_bias": True,
  "head_dim": 16,
  "num_hidden_layers": 4,
  "num_local_experts": 8,
  "num_experts_per_tok": 3,
  "sliding_window": 24,
  "layer_types": ["sliding_attention", "full_attention"] * 2,
  "swiglu_limit": 7.0,
  "rope_theta": 150000.0,
  "rope_scaling": {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": ORIGINAL,
  },
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}


def config(family: str, heads: int = 4, kv_heads: int = 2, **entries: Any) -> dict[str, Any]:
  """A config.json; entries of `...` are left out."""
  names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
  names |= {"phi3": "Phi3", "glm": "Glm", "glm4": "Glm4", "qwen3_moe": "Qwen3Moe"}
  names |= {"gemma2": "Gemma2", "gemma3_text": "Gemma3", "gpt_oss": "GptOss"}
  name = names[family]
  out = {
    "architectures": [f"{name}ForCausalLM"],
    "model_type": family,
    "hidden_act": "silu",
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": heads,
    "num_key_value_heads": kv_heads,
    "vocab_size": V,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    **entries,
  }
  return {key: value for key, value in out.items() if value is not ...}


# config.json by name, each as that family's publisher writes it.
CASES: dict[str, dict[str, Any]] = {
  "llama2": config("llama", kv_heads=4),
  "llama3": config("llama", rope_theta=500000.0),
  "llama3.1": config("llama", rope_theta=500000.0, rope_scaling=_LLAMA3),
  "llama3.2": config(
    "llama",
    rope_theta=500000.0,
    rope_scaling={**_LLAMA3, "factor": 32.0},
    tie_word_embeddings=True,
    head_dim=8,
  ),
  "smollm2": config("llama", heads=3, kv_heads=1, hidden_size=48, tie_word_embeddings=True),
  "llama-linear": config("llama", rope_scaling={"type": "linear", "factor": 4.0}),
  "llama-parameters": config(
    "llama", rope_theta=..., rope_parameters={**_LLAMA3, "rope_theta": 500000.0}
  ),
  "mistral": config("mistral", rope_theta=1000000.0, sliding_window=None),
  "mistral-window": config("mistral", sliding_window=128),
  "qwen2": config(
    "qwen2", sliding_window=64, use_sliding_window=False, max_window_layers=2, rms_norm_eps=1e-6
  ),
  "qwen2.5-yarn": config(
    "qwen2",
    rope_theta=1000000.0,
    tie_word_embeddings=True,
    rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
  ),
  "r1-distill-qwen": config("qwen2", heads=6, kv_heads=2, hidden_size=48),
  "qwen3": config("qwen3", head_dim=16, rope_theta=1000000.0, attention_bias=False),
  "qwen3-tied-yarn": config(
    "qwen3", head_dim=16, tie_word_embeddings=True, rope_scaling={**_YARN, "beta_fast": 8.0}
  ),
  "yarn-factor": config("llama", rope_scaling={**_YARN, "attention_factor": 1.3}),
  "yarn-mscale": config("llama", rope_scaling={**_YARN, "mscale": 0.8, "mscale_all_dim": 0.3}),
  "phi4": config("phi3", heads=6, kv_heads=2, hidden_size=48, rope_theta=250000.0, **_NO_PAD),
  "phi-partial": config(
    "phi3",
    head_dim=...,
    partial_rotary_factor=0.75,
    hidden_size=64,
    tie_word_embeddings=True,
    **_NO_PAD,
  ),
  "phi-long": config(
    "phi3",
    partial_rotary_factor=0.75,
    hidden_size=64,
    original_max_position_embeddings=ORIGINAL,
    rope_scaling=_LONG,
    **_NO_PAD,
  ),
  "phi-short": config(
    "phi3", hidden_size=48, original_max_position_embeddings=128, rope_scaling=_LONG, **_NO_PAD
  ),
  "glm4-9b": config("glm", heads=6, kv_heads=2, head_dim=16, **_GLM, **_NO_PAD),
  "glm4-0414": config("glm4", heads=6, kv_heads=2, head_dim=16, **_GLM, **_NO_PAD),
  "mistral-sliding": config("mistral", sliding_window=24),
  "qwen2-sliding": config("qwen2", sliding_window=24, use_sliding_window=True, max_window_layers=1),
  "phi3-mini": config("phi3", sliding_window=24, **_NO_PAD),
  "gemma3": config("gemma3_text", heads=6, kv_heads=2, **_GEMMA),
  "gemma3-parameters": config(
    "gemma3_text",
    **{
      **_GEMMA,
      "rope_theta": ...,
      "rope_local_base_freq": ...,
      "layer_types": ["sliding_attention", "full_attention"] * 2,
      "query_pre_attn_scalar": ...,
      "head_dim": 256,
      "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
      },
    },
  ),
  "gemma2": config("gemma2", heads=6, kv_heads=2, **_GEMMA2),
  "gemma2-parameters": config(
    "gemma2",
    **{
      **_GEMMA2,
      "rope_theta": ...,
      "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
      "layer_types": ["full_attention", "sliding_attention"] * 2,
      "query_pre_attn_scalar": ...,
      "head_dim": 256,
      "attn_logit_softcapping": 4.0,
      "final_logit_softcapping": None,
    },
  ),
  "gpt-oss": config("gpt_oss", heads=6, kv_heads=2, hidden_size=48, **_GPT_OSS),
  "qwen3-moe": config("qwen3_moe", heads=6, kv_heads=2, head_dim=16, **_MOE),
  "qwen3-moe-shares": config("qwen3_moe", head_dim=16, **{**_MOE, "norm_topk_prob": False}),
}


def weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
  """Float32 tensors by name, drawn in a fixed order; attention is peaked, so that order shows."""
  rng = np.random.default_rng(seed)
  dim, heads, kv_heads = (
    config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads")
  )
  size, ffn = config.get("head_dim", dim // heads), config["intermediate_size"]

  def matrix(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
    return rng.standard_normal((rows, columns), np.float32) * np.float32(scale * columns**-0.5)

  def near(center: float, n: int) -> np.ndarray:
    return np.float32(center) + np.float32(0.3) * rng.standard_normal(n, np.float32)

  out = {"model.embed_tokens.weight": matrix(V, dim, dim**0.5)}
  family = config["model_type"]
  experts = config.get("num_experts", config.get("num_local_experts", 0))
  for i in range(config["num_hidden_layers"]):
    out |= {
      f"model.layers.{i}.{name}.weight": matrix(*shape)
      for name, shape in {
        "self_attn.q_proj": (heads * size, dim, 1.5),
        "self_attn.k_proj": (kv_heads * size, dim, 1.5),
        "self_attn.v_proj": (kv_heads * size, dim),
        "self_attn.o_proj": (dim, heads * size),
        **({} if experts else _mlp("mlp", dim, ffn)),
      }.items()
    }
    norms = {"input_layernorm": dim, "post_attention_layernorm": dim}
    if family in ("qwen3", "qwen3_moe", "gemma3_text"):
      norms |= {"self_attn.q_norm": size, "self_attn.k_norm": size}
    if family == "glm4":
      norms |= {"post_self_attn_layernorm": dim, "post_mlp_layernorm": dim}
    if family in _GEMMAS:
      norms |= {"pre_feedforward_layernorm": dim, "post_feedforward_layernorm": dim}
    one = 0 if family in _GEMMAS else 1  # Gemma stores w for a scale of 1 + w
    out |= {f"model.layers.{i}.{name}.weight": near(one, n) for name, n in norms.items()}
    if family in ("qwen2", "glm", "glm4", "gpt_oss"):
      for name, n in {"q": heads, "k": kv_heads, "v": kv_heads}.items():
        out[f"model.layers.{i}.self_attn.{name}_proj.bias"] = near(0, n * size)
    if family == "gpt_oss":
      layer = f"model.layers.{i}"
      out[f"{layer}.self_attn.o_proj.bias"] = near(0, dim)
      out[f"{layer}.self_attn.sinks"] = near(1, heads)
      out[f"{layer}.mlp.router.weight"] = matrix(experts, dim, 2.0)
      out[f"{layer}.mlp.router.bias"] = near(0, experts)
      # Gates beyond the clip's 7.
      both = [matrix(2 * ffn, dim, 3.0).T for _ in range(experts)]
      out[f"{layer}.mlp.experts.gate_up_proj"] = np.ascontiguousarray(np.stack(both))
      out[f"{layer}.mlp.experts.gate_up_proj_bias"] = near(0, experts * 2 * ffn).reshape(
        experts, -1
      )
      down = [matrix(dim, ffn, 0.3).T for _ in range(experts)]
      out[f"{layer}.mlp.experts.down_proj"] = np.ascontiguousarray(np.stack(down))
      out[f"{layer}.mlp.experts.down_proj_bias"] = near(0, experts * dim).reshape(experts, dim)
    elif experts:
      out[f"model.layers.{i}.mlp.gate.weight"] = matrix(experts, dim, 2.0)
      for e in range(experts):
        parts = _mlp(f"mlp.experts.{e}", dim, config["moe_intermediate_size"])
        out |= {f"model.layers.{i}.{n}.weight": matrix(*shape) for n, shape in parts.items()}
  out["model.norm.weight"] = near(0 if family in _GEMMAS else 1, dim)
  if not config.get("tie_word_embeddings", family in _GEMMAS):
    out["lm_head.weight"] = matrix(V, dim)
  return fused(out, family, config["num_hidden_layers"])


def _mlp(name: str, dim: int, ffn: int) -> dict[str, tuple[int, int]]:
  shapes = {"gate": (ffn, dim), "up": (ffn, dim), "down": (dim, ffn)}
  return {f"{name}.{part}_proj": shape for part, shape in shapes.items()}


def fused(tensors: dict[str, np.ndarray], family: str, layers: int) -> dict[str, np.ndarray]:
  """What the family's files hold in one tensor, stacked."""
  wholes = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}
  parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
  wholes |= {"self_attn.qkv_proj": parts} if family == "phi3" else {}
  out = dict(tensors)
  for i in range(layers) if family in ("phi3", "glm", "glm4") else ():
    for whole, parts in wholes.items():
      rows = [out.pop(f"model.layers.{i}.{part}.weight") for part in parts]
      out[f"model.layers.{i}.{whole}.weight"] = np.concatenate(rows)
  return out


def tokens() -> np.ndarray:
  """Int32 [2, T], right-padded with 0 as `LENGTHS` says."""
  ids = np.random.default_rng(7).integers(0, V, (len(LENGTHS), max(LENGTHS)), np.int32)
  return np.where(np.arange(ids.shape[1]) < np.array(LENGTHS)[:, None], ids, 0).astype(np.int32)


def positions() -> np.ndarray:
  """Row and position of the logits that goldens keep, int [n, 2]: some early, the last of each."""
  early = [(row, at) for row in range(len(LENGTHS)) for at in (0, 1, 13, 31, 32)]
  late = [(0, 40), (0, 63), (0, 80), *((row, size - 1) for row, size in enumerate(LENGTHS))]
  return np.array(early + late)


def digest(config: dict[str, Any]) -> str:
  """Of all that a golden depends on: a golden of other numbers is found out."""
  text = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
  for name, x in sorted(weights(config).items()):
    text.update(name.encode() + x.tobytes())
  text.update(tokens().tobytes())
  return text.hexdigest()[:16]


def tokenizer(size: int = V) -> tokenizers.Tokenizer:
  """Byte-level and useless: `size` characters, each its own token."""
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())[:size]
  vocab = {c: i for i, c in enumerate(alphabet)}
  backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
  backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = tokenizers.decoders.ByteLevel()
  return backend


def write(
  folder: pathlib.Path,
  config: dict[str, Any],
  tensors: dict[str, np.ndarray] | None = None,
  *,
  shards: int = 1,
  size: int = V,
) -> pathlib.Path:
  """A folder as `save_pretrained` leaves it, its weights in one file or in `shards`."""
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "config.json").write_text(json.dumps(config, indent=1))
  tensors = weights(config) if tensors is None else tensors
  if shards == 1:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
  else:
    place = {}
    for n in range(shards):
      file = f"model-{n + 1:05d}-of-{shards:05d}.safetensors"
      part = {name: tensors[name] for name in list(tensors)[n::shards]}
      save_file(part, folder / file, metadata={"format": "pt"})
      place |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
  tokenizer(size).save(str(folder / "tokenizer.json"))
  (folder / "tokenizer_config.json").write_text('{"bos_token": null, "eos_token": null}')
  return folder
