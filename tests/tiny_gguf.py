"""A tiny Llama in a GGUF file, with made-up weights, and the logits that it must give."""

import collections
import hashlib
import re

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from kvjax.models.io import fetch
from tests import tiny_hf

D, HEADS, KV_HEADS, H, F, LAYERS, THETA, EPS = 64, 4, 2, 16, 96, 3, 500.0, 1e-5
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "Ġ t", "1 2", "Ġ 1"]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
  "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
  "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# GPT-2's table (Radford et al., 2019): printable bytes stand for themselves.
_KEPT = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
_MOVED = (byte for byte in range(256) if byte not in _KEPT)
BYTES = {**{chr(b): b for b in _KEPT}, **{chr(256 + n): b for n, b in enumerate(_MOVED)}}
TOKENS = [*SPECIALS, *BYTES, *(merge.replace(" ", "") for merge in MERGES)]
V = len(TOKENS)


def tensors(tied=True, seed=0):
  """Names and float32 weights as a GGUF file names and shapes them."""
  rng = np.random.default_rng(seed)

  def matrix(rows, columns):
    return rng.standard_normal((rows, columns)).astype(np.float32) * columns**-0.5

  out = {"token_embd.weight": rng.standard_normal((V, D)).astype(np.float32)}
  for i in range(LAYERS):
    shapes = {
      "attn_q": (HEADS * H, D),
      "attn_k": (KV_HEADS * H, D),
      "attn_v": (KV_HEADS * H, D),
      "attn_output": (D, HEADS * H),
      "ffn_gate": (F, D),
      "ffn_up": (F, D),
      "ffn_down": (D, F),
    }
    out.update({f"blk.{i}.{name}.weight": matrix(*shape) for name, shape in shapes.items()})
    for name in ("attn_norm", "ffn_norm"):
      out[f"blk.{i}.{name}.weight"] = 1 + 0.1 * rng.standard_normal(D).astype(np.float32)
  out["output_norm.weight"] = 1 + 0.1 * rng.standard_normal(D).astype(np.float32)
  if not tied:
    out["output.weight"] = matrix(V, D)
  return out


def metadata():
  """The key-value section: what `write` is told to store."""
  return {
    "llama.block_count": LAYERS,
    "llama.context_length": 128,
    "llama.embedding_length": D,
    "llama.feed_forward_length": F,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": EPS,
    "llama.rope.freq_base": THETA,
    "llama.rope.dimension_count": H,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (V - len(SPECIALS)),
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": TEMPLATE,
  }


def write(path, weights=None, entries=None, kind=Kind.F32, architecture="llama", **how):
  """Writes a file; returns the weights as a reader must dequantise them.

  A weight may be a pair, of blocks and their type. `how` are arguments of the writer: into how many
  parts, in which byte order.
  """
  weights = tensors() if weights is None else weights
  writer = gguf.GGUFWriter(path, architecture, **how)
  for key, value in (metadata() if entries is None else entries).items():
    match value:
      case bool():
        writer.add_bool(key, value)
      case int():
        writer.add_uint32(key, value)
      case float():
        writer.add_float32(key, value)
      case str():
        writer.add_string(key, value)
      case list():
        writer.add_array(key, value)
  stored = {}
  for name, x in weights.items():
    if isinstance(x, tuple):
      data, of = x
    else:
      of = Kind.F32 if x.ndim == 1 else kind
      data = gguf.quantize(x, of)
    writer.add_tensor(name, data, raw_dtype=None if of in (Kind.F32, Kind.F16) else of)
    stored[name] = gguf.dequantize(data, of).astype(np.float32)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return stored


def publish(monkeypatch, data):
  """Bytes that are from now on those of the model which is published."""
  monkeypatch.setattr(fetch, "SMOLLM2_SIZE", len(data))
  monkeypatch.setattr(fetch, "SMOLLM2_SHA256", hashlib.sha256(data).hexdigest())


def forward(w, tokens):
  """Logits [T, V] in float64, read as llama.cpp reads the file: rotary pairs are (2i, 2i + 1)."""
  w = {name: x.astype(np.float64) for name, x in w.items()}
  turn = np.arange(len(tokens))[:, None] * THETA ** (-np.arange(0, H, 2) / H)

  def norm(x, scale):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * scale

  def rotate(x):  # [T, heads, H]
    even, odd = x[..., ::2], x[..., 1::2]
    cos, sin = np.cos(turn)[:, None], np.sin(turn)[:, None]
    return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)

  x = w["token_embd.weight"][tokens]
  future = np.triu(np.full((len(tokens), len(tokens)), -np.inf), 1)
  for i in range(LAYERS):
    part = {name.split(".")[2]: x for name, x in w.items() if name.startswith(f"blk.{i}.")}
    h = norm(x, part["attn_norm"])
    q, k, v = ((h @ part[f"attn_{name}"].T).reshape(len(tokens), -1, H) for name in ("q", "k", "v"))
    q, k = rotate(q), rotate(k)
    k, v = (np.repeat(y, HEADS // KV_HEADS, 1) for y in (k, v))
    logits = np.einsum("tnh,snh->nts", q, k) / np.sqrt(H) + future
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    x = x + np.einsum("nts,snh->tnh", p, v).reshape(len(tokens), -1) @ part["attn_output"].T
    h = norm(x, part["ffn_norm"])
    gate = h @ part["ffn_gate"].T
    x = x + (gate / (1 + np.exp(-gate)) * (h @ part["ffn_up"].T)) @ part["ffn_down"].T
  head = w.get("output.weight", w["token_embd.weight"])
  return norm(x, w["output_norm.weight"]) @ head.T


def as_gguf(path, config, more=None, *, tensors=None):
  """Writes a case as llama.cpp's converter does: Llama's Q and K rows interleaved, others' kept."""
  weights, kind = tiny_hf.weights(config), config["model_type"]
  family = {
    "mistral": "llama",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
  }.get(kind, kind)
  kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
  there = gguf.get_tensor_name_map(kinds[family], config["num_hidden_layers"])
  out, stacked = {}, collections.defaultdict(list)
  for name, x in _apart(weights, kind).items():
    if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
      heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
      x = x.reshape(heads, 2, -1, x.shape[1]).swapaxes(1, 2).reshape(x.shape)
    if family in ("gemma2", "gemma3") and "norm" in name:
      x = 1 + x
    whole = re.sub(r"\.experts\.\d+", ".experts", name)
    target = there.get_name(whole, (".weight", ".bias"))
    if whole != name:
      stacked[target].append(x)
    else:
      out[target] = np.ascontiguousarray(x)
  out |= {name: np.stack(each) for name, each in stacked.items()}
  heads = config["num_attention_heads"]
  head_dim = config.get("head_dim", config["hidden_size"] // heads)
  entries = {
    "block_count": config["num_hidden_layers"],
    "context_length": config["max_position_embeddings"],
    "embedding_length": config["hidden_size"],
    "feed_forward_length": config["intermediate_size"],
    "attention.head_count": heads,
    "attention.head_count_kv": config["num_key_value_heads"],
    "attention.key_length": head_dim,
    "attention.value_length": head_dim,
    "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
    "rope.freq_base": config.get("rope_theta", 0.0),
    **_experts(config),
    **(more or {}),
  }
  if "partial_rotary_factor" in config:
    entries["rope.dimension_count"] = int(config["partial_rotary_factor"] * head_dim)
  tokenizer = {
    **{key: value for key, value in metadata().items() if key.startswith("tokenizer.")},
    "tokenizer.ggml.tokens": [*TOKENS[: tiny_hf.V - 1], "AB"],
    "tokenizer.ggml.token_type": [1] * tiny_hf.V,
    "tokenizer.ggml.merges": ["A B"],
  }
  entries = {f"{family}.{key}": value for key, value in entries.items()}
  write(path, {**out, **(tensors or {})}, {**entries, **tokenizer}, architecture=family)
  return path


def _apart(weights, kind):
  """gpt-oss's experts as llama.cpp's converter leaves them: gate and up apart, [out, in]."""
  if kind != "gpt_oss":
    return weights
  out = {}
  for name, x in weights.items():
    if name.endswith(("_proj", "_proj_bias", "sinks")):
      name = f"{name.removesuffix('_bias')}.{'bias' if name.endswith('bias') else 'weight'}"
    x = x.swapaxes(1, 2) if x.ndim == 3 else x
    halves = {"gate_proj": x[:, ::2], "up_proj": x[:, 1::2]} if "gate_up" in name else {"": x}
    out |= {name.replace("gate_up_proj", part): y for part, y in halves.items()}
  return out


def _experts(config):
  names = {"num_local_experts": "expert_count"}
  if config["model_type"] == "gpt_oss":
    names["intermediate_size"] = "expert_feed_forward_length"
  names |= {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
  names |= {"moe_intermediate_size": "expert_feed_forward_length"}
  return {name: config[key] for key, name in names.items() if key in config}
