"""The families of models: what each one's files say otherwise than Llama's.

A family is flags of `ModelConfig` and a few facts on how its files lay out what the decoder has in
one form: fused matrices, rotary pairs side by side, norms stored without their 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Family:
  """One family's files.

  Attributes:
    models: some of its models, in words.
    architecture: in config.json.
    flags: of `ModelConfig`.
    fixed: entries of config.json that may have this value only.
    defaults: what entries mean where they are missing, as transformers has it; a family without
      "partial_rotary_factor" rotates whole heads.
    fused: parts that are one tensor: "qkv", its rows in this order, and "gate_up".
    interleaved: rotary pairs are (2i, 2i + 1), not (i, i + R/2).
    experts_as_used: experts' matrices are [in, out], their gate and up columns in turn.
    norm_plus: what is added to stored norms: Gemma's scale is 1 + w.
    wide_layers: layers of the one size in whose GGUF files queries are divided by √(D/N), not √H.
    names: tensors of config.json's kind that have other names, by part; what follows
      "model.layers.{i}.".
  """

  models: str
  architecture: str
  flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  fused: tuple[str, ...] = ()
  interleaved: bool = False
  experts_as_used: bool = False
  norm_plus: float = 0.0
  wide_layers: int | None = None
  names: Mapping[str, str] = dataclasses.field(default_factory=dict)

  @property
  def tensors(self) -> dict[str, str]:
    """Names of tensors by part in files of config.json's kind: a layer's, patterns with {i}."""
    layer = {**_LAYER, **self.names}
    return {**_AROUND, **{part: f"model.layers.{{i}}.{name}" for part, name in layer.items()}}


# Llama's tensors, by part.
_AROUND = {
  "embedding": "model.embed_tokens.weight",
  "norm": "model.norm.weight",
  "head": "lm_head.weight",
}
_LAYER = {
  "attention_norm": "input_layernorm.weight",
  "q": "self_attn.q_proj.weight",
  "k": "self_attn.k_proj.weight",
  "v": "self_attn.v_proj.weight",
  "o": "self_attn.o_proj.weight",
  "q_bias": "self_attn.q_proj.bias",
  "k_bias": "self_attn.k_proj.bias",
  "v_bias": "self_attn.v_proj.bias",
  "q_norm": "self_attn.q_norm.weight",
  "k_norm": "self_attn.k_norm.weight",
  "mlp_norm": "post_attention_layernorm.weight",
  "gate": "mlp.gate_proj.weight",
  "up": "mlp.up_proj.weight",
  "down": "mlp.down_proj.weight",
}
_FUSED_MLP = {"gate_up": "mlp.gate_up_proj.weight"}

# By config.json's model_type.
FAMILIES: dict[str, Family] = {
  "llama": Family("Llama 2 and 3, SmolLM2", "LlamaForCausalLM"),
  "mistral": Family("Mistral", "MistralForCausalLM", defaults={"sliding_window": 4096}),
  "qwen2": Family("Qwen 2 and 2.5", "Qwen2ForCausalLM", {"qkv_bias": True}),
  "qwen3": Family("Qwen 3", "Qwen3ForCausalLM", {"qk_norm": True}, defaults={"head_dim": 128}),
  # Phi-3, Phi-3.5, Phi-4 and Phi-4-mini, which rotates three quarters of each head.
  "phi3": Family(
    "Phi-3, 3.5 and 4",
    "Phi3ForCausalLM",
    defaults={"partial_rotary_factor": 1.0},
    fused=("qkv", "gate_up"),
    names={"qkv": "self_attn.qkv_proj.weight", **_FUSED_MLP},
  ),
  # GLM-4-9B; GLM-4-0414 and GLM-Z1 add norms after attention and MLP.
  "glm": Family(
    "GLM-4-9B",
    "GlmForCausalLM",
    {"qkv_bias": True},
    {"attention_bias": True},
    {"partial_rotary_factor": 0.5, "head_dim": 128},
    fused=("gate_up",),
    interleaved=True,
    names=_FUSED_MLP,
  ),
  "glm4": Family(
    "GLM-4-0414, GLM-Z1",
    "Glm4ForCausalLM",
    {"qkv_bias": True, "norms_after": True},
    {"attention_bias": True},
    {"partial_rotary_factor": 0.5, "head_dim": 128},
    fused=("gate_up",),
    interleaved=True,
    names={
      **_FUSED_MLP,
      "attention_after": "post_self_attn_layernorm.weight",
      "mlp_after": "post_mlp_layernorm.weight",
    },
  ),
  # Qwen3 technical report (2025), §2: no shared expert, a token's weights normalised.
  "qwen3_moe": Family(
    "Qwen 3 with experts",
    "Qwen3MoeForCausalLM",
    {"qk_norm": True},
    {"decoder_sparse_step": 1, "mlp_only_layers": []},
    {"head_dim": 128},
    names={
      "router": "mlp.gate.weight",
      "gate": "mlp.experts.{e}.gate_proj.weight",
      "up": "mlp.experts.{e}.up_proj.weight",
      "down": "mlp.experts.{e}.down_proj.weight",
    },
  ),
  # Gemma 3 technical report (2025), §2: five layers with a window to one without, two thetas, norms
  # around attention and MLP and over heads; norms store their scale less 1, embeddings enter times
  # √D, and queries are divided by √query_pre_attn_scalar (which the norm over them takes in).
  "gemma3_text": Family(
    "Gemma 3 (text)",
    "Gemma3ForCausalLM",
    {"qk_norm": True, "norms_after": True, "activation": "gelu_tanh"},
    {
      "hidden_activation": "gelu_pytorch_tanh",
      "final_logit_softcapping": None,
      "attn_logit_softcapping": None,
      "use_bidirectional_attention": False,
    },
    {
      "head_dim": 256,
      "sliding_window": 4096,
      "sliding_window_pattern": 6,
      "rope_theta": 1e6,
      "rope_local_base_freq": 1e4,
      "query_pre_attn_scalar": 256,
      "tie_word_embeddings": True,
    },
    norm_plus=1.0,
    wide_layers=62,  # 27B
    names={
      "attention_after": "post_attention_layernorm.weight",
      "mlp_norm": "pre_feedforward_layernorm.weight",
      "mlp_after": "post_feedforward_layernorm.weight",
    },
  ),
}

# Gemma 2 technical report (2024), §2: a layer with a window and one without in turn, one theta, no
# norms over heads, and soft caps on attention's logits and on the model's; else as Gemma 3.
FAMILIES["gemma2"] = dataclasses.replace(
  FAMILIES["gemma3_text"],
  models="Gemma 2",
  architecture="Gemma2ForCausalLM",
  flags={"norms_after": True, "activation": "gelu_tanh"},
  fixed={
    **dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh"),
    "use_bidirectional_attention": False,
  },
  defaults={
    "head_dim": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
  },
  wide_layers=46,  # 27B
)

# gpt-oss model card (2025), §2: windows of 128 and full layers in turn, a learned logit per head in
# the softmax's denominator, biases throughout, experts with a clipped SwiGLU, YaRN from 4,096.
FAMILIES["gpt_oss"] = Family(
  "gpt-oss",
  "GptOssForCausalLM",
  {
    **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias", "sinks"), True),
    "activation": "clipped",
  },
  {"attention_bias": True, "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
  {
    "head_dim": 64,
    "sliding_window": 128,
    "sliding_window_pattern": 2,
    "rope_theta": 150000.0,
    "rope_scaling": {
      "rope_type": "yarn",
      "factor": 32.0,
      "original_max_position_embeddings": 4096,
      "truncate": False,
    },
  },
  fused=("gate_up",),
  experts_as_used=True,
  names={
    "o_bias": "self_attn.o_proj.bias",
    "sinks": "self_attn.sinks",
    "router": "mlp.router.weight",
    "router_bias": "mlp.router.bias",
    "gate_up": "mlp.experts.gate_up_proj",
    "gate_up_bias": "mlp.experts.gate_up_proj_bias",
    "down": "mlp.experts.down_proj",
    "down_bias": "mlp.experts.down_proj_bias",
  },
)

# Of which llama.cpp's converter makes tensors of its own.
_GPT_OSS_PARTS = {
  "sinks": "self_attn.sinks.weight",
  **{
    f"{part}{kind}": f"mlp.experts.{part}_proj.{suffix}"
    for part in ("gate", "up", "down")
    for kind, suffix in (("", "weight"), ("_bias", "bias"))
  },
}
# By GGUF's general.architecture, as llama.cpp's converter writes the family.
GGUF: dict[str, Family] = {
  # The converter interleaves Llama's rotary pairs and leaves all others' as they are.
  "llama": dataclasses.replace(FAMILIES["llama"], interleaved=True),
  "qwen2": FAMILIES["qwen2"],
  "qwen3": FAMILIES["qwen3"],
  "phi3": FAMILIES["phi3"],
  "glm4": FAMILIES["glm4"],
  "qwen3moe": FAMILIES["qwen3_moe"],
  "gpt-oss": dataclasses.replace(
    FAMILIES["gpt_oss"],
    fused=(),
    experts_as_used=False,
    names={**FAMILIES["gpt_oss"].names, **_GPT_OSS_PARTS},
  ),
  "gemma2": dataclasses.replace(FAMILIES["gemma2"], norm_plus=0.0),
  "gemma3": dataclasses.replace(FAMILIES["gemma3_text"], norm_plus=0.0),  # 1 is added already
}


def rotary_order(head_dim: int, turned: int, interleaved: bool) -> np.ndarray | None:
  """Place of each dimension of a head in a file; None: as in the decoder.

  A file turns the first R dimensions, in pairs (2i, 2i + 1) or (i, i + R/2). The decoder's pairs
  are (i, i + H/2), and those that are turned are the first R/2 (`kvjax.primitives.rope.Rope`). q·k
  is the same in any order that both share.
  """
  first = (
    np.arange(turned).reshape(2, -1) if not interleaved else np.arange(turned).reshape(-1, 2).T
  )
  rest = np.arange(turned, head_dim).reshape(2, -1)
  order = np.concatenate([first, rest], 1).reshape(-1)
  return None if (order == np.arange(head_dim)).all() else order
