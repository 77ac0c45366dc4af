"""Tiny models of every family and rope type, as Hugging Face folders with made-up weights.

Needs NumPy, safetensors and tokenizers only: scripts/make_family_goldens.py runs it beside
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
ORIGINAL = 32  # the context that the scaled ropes extend
LENGTHS = (96, 41)  # tokens of the two rows: both end beyond the original context
_LLAMA3 = {
  "rope_type": "llama3",
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": ORIGINAL,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}


def config(family: str, heads: int = 4, kv_heads: int = 2, **entries: Any) -> dict[str, Any]:
  """A config.json; entries of `...` are left out."""
  name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
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
  for i in range(config["num_hidden_layers"]):
    out |= {
      f"model.layers.{i}.{name}.weight": matrix(*shape)
      for name, shape in {
        "self_attn.q_proj": (heads * size, dim, 1.5),
        "self_attn.k_proj": (kv_heads * size, dim, 1.5),
        "self_attn.v_proj": (kv_heads * size, dim),
        "self_attn.o_proj": (dim, heads * size),
        "mlp.gate_proj": (ffn, dim),
        "mlp.up_proj": (ffn, dim),
        "mlp.down_proj": (dim, ffn),
      }.items()
    }
    norms = {"input_layernorm": dim, "post_attention_layernorm": dim}
    if config["model_type"] == "qwen3":
      norms |= {"self_attn.q_norm": size, "self_attn.k_norm": size}
    out |= {f"model.layers.{i}.{name}.weight": near(1, n) for name, n in norms.items()}
    if config["model_type"] == "qwen2":
      for name, n in {"q": heads, "k": kv_heads, "v": kv_heads}.items():
        out[f"model.layers.{i}.self_attn.{name}_proj.bias"] = near(0, n * size)
  out["model.norm.weight"] = near(1, dim)
  if not config["tie_word_embeddings"]:
    out["lm_head.weight"] = matrix(V, dim)
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
