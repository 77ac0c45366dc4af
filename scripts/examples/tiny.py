"""A tiny random model whose tokens are bytes: examples without a checkpoint run on it."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import tokenizers
from flax import nnx
from safetensors.numpy import save_file

from kvjax.models.io import convert
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn.config import ModelConfig
from kvjax.models.nn.transformer import Transformer
from kvjax.programs.common import keep_programs

SPECIALS = ("<|begin|>", "<|end|>")
CHAT_TEMPLATE = (
  "{% for m in messages %}<|begin|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
  "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
  """One token per byte, and two special ones that open and close a chat message."""
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  backend = tokenizers.Tokenizer(
    tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
  )
  backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = tokenizers.decoders.ByteLevel()
  backend.add_special_tokens([*SPECIALS])
  return Tokenizer(backend, eos=len(alphabet) + 1, chat_template=CHAT_TEMPLATE)


def load(checkpoint: pathlib.Path | None = None) -> tuple[Transformer, Tokenizer]:
  """A converted checkpoint; by default the tiny model, which says nothing sensible."""
  keep_programs()
  if checkpoint is not None:
    return convert.load(checkpoint)
  tokenizer = byte_tokenizer()
  config = ModelConfig(
    vocab=tokenizer.size, dim=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=64
  )
  return Transformer(config, dtype=jnp.float32, rngs=nnx.Rngs(0)), tokenizer


def huggingface_folder(path: pathlib.Path) -> pathlib.Path:
  """A Llama with random weights, as the Hugging Face hub lays models out; the folder is made."""
  rng, dim, ffn, heads, kv_heads, vocab = np.random.default_rng(0), 32, 64, 4, 2, 258
  shapes = {"model.embed_tokens.weight": (vocab, dim), "model.norm.weight": (dim,)}
  for i in range(2):
    parts = {
      "input_layernorm": (dim,),
      "self_attn.q_proj": (dim, dim),
      "self_attn.k_proj": (dim // heads * kv_heads, dim),
      "self_attn.v_proj": (dim // heads * kv_heads, dim),
      "self_attn.o_proj": (dim, dim),
      "post_attention_layernorm": (dim,),
      "mlp.gate_proj": (ffn, dim),
      "mlp.up_proj": (ffn, dim),
      "mlp.down_proj": (dim, ffn),
    }
    shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in parts.items()}
  config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": dim,
    "intermediate_size": ffn,
    "num_hidden_layers": 2,
    "num_attention_heads": heads,
    "num_key_value_heads": kv_heads,
    "vocab_size": vocab,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
  }
  path.mkdir(parents=True)
  weights = {name: rng.normal(size=s).astype(np.float32) for name, s in shapes.items()}
  save_file(weights, path / "model.safetensors")
  (path / "config.json").write_text(json.dumps(config), "utf-8")
  byte_tokenizer().backend.save(str(path / "tokenizer.json"))
  (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIALS[-1]}), "utf-8")
  return path
