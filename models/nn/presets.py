"""Full-size shapes by name, as their publishers' config.json states them.

For throughput and memory studies with random weights, and to check that the decoder builds them:
the weights themselves come from `kvjax.models.io.convert`.
"""

from kvjax.models.nn.config import ModelConfig
from kvjax.primitives.rope import Llama3, Rope, Yarn

_LLAMA3_1 = Rope(500000.0, Llama3(factor=8.0))
_LLAMA3_2 = Rope(500000.0, Llama3(factor=32.0))
_QWEN = Rope(1000000.0)


def _llama3(
  dim: int,
  layers: int,
  heads: int,
  ffn: int,
  *,
  head_dim: int = 128,
  rope: Rope = _LLAMA3_1,
  tied: bool = False,
) -> ModelConfig:
  return ModelConfig(
    vocab=128256,
    dim=dim,
    layers=layers,
    heads=heads,
    kv_heads=8,
    head_dim=head_dim,
    ffn=ffn,
    rope=rope,
    tie_embeddings=tied,
    max_context=131072,
  )


def _qwen3(dim: int, layers: int, heads: int, ffn: int, *, tied: bool = False) -> ModelConfig:
  return ModelConfig(
    vocab=151936,
    dim=dim,
    layers=layers,
    heads=heads,
    kv_heads=8,
    head_dim=128,
    ffn=ffn,
    rope=_QWEN,
    norm_eps=1e-6,
    tie_embeddings=tied,
    max_context=40960,
    qk_norm=True,
  )


def _gemma3(
  dim: int, layers: int, heads: int, kv_heads: int, ffn: int, *, window: int
) -> ModelConfig:
  """Five layers with a window to one without."""
  return ModelConfig(
    vocab=262144,
    dim=dim,
    layers=layers,
    heads=heads,
    kv_heads=kv_heads,
    head_dim=256,
    ffn=ffn,
    rope=Rope(1000000.0),
    norm_eps=1e-6,
    tie_embeddings=True,
    max_context=32768,
    qk_norm=True,
    norms_after=True,
    activation="gelu_tanh",
    embed_scale=dim**0.5,
    windows=tuple(window if (i + 1) % 6 else None for i in range(layers)),
    window_rope=Rope(),
  )


def _qwen2_7b(rope: Rope, max_context: int) -> ModelConfig:
  return ModelConfig(
    vocab=152064,
    dim=3584,
    layers=28,
    heads=28,
    kv_heads=4,
    head_dim=128,
    ffn=18944,
    rope=rope,
    norm_eps=1e-6,
    max_context=max_context,
    qkv_bias=True,
  )


PRESETS: dict[str, ModelConfig] = {
  "Llama-2-7B": ModelConfig(
    vocab=32000,
    dim=4096,
    layers=32,
    heads=32,
    kv_heads=32,
    head_dim=128,
    ffn=11008,
    max_context=4096,
  ),
  "Llama-3.1-8B": _llama3(4096, 32, 32, 14336),
  "Llama-3.1-70B": _llama3(8192, 80, 64, 28672),
  "Llama-3.2-1B": _llama3(2048, 16, 32, 8192, head_dim=64, rope=_LLAMA3_2, tied=True),
  "Llama-3.2-3B": _llama3(3072, 28, 24, 8192, rope=_LLAMA3_2, tied=True),
  # v0.3: in v0.1 all layers have a sliding window, which leaves nothing for a method to do.
  "Mistral-7B": ModelConfig(
    vocab=32768,
    dim=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    ffn=14336,
    rope=Rope(1000000.0),
    max_context=32768,
  ),
  "Qwen2.5-1.5B": ModelConfig(
    vocab=151936,
    dim=1536,
    layers=28,
    heads=12,
    kv_heads=2,
    head_dim=128,
    ffn=8960,
    rope=_QWEN,
    norm_eps=1e-6,
    tie_embeddings=True,
    max_context=32768,
    qkv_bias=True,
  ),
  "Qwen2.5-7B": _qwen2_7b(_QWEN, 32768),
  "Qwen3-0.6B": _qwen3(1024, 28, 16, 3072, tied=True),
  "Qwen3-1.7B": _qwen3(2048, 28, 16, 6144, tied=True),
  "Qwen3-4B": _qwen3(2560, 36, 32, 9728, tied=True),
  "Qwen3-8B": _qwen3(4096, 36, 32, 12288),
  "Qwen3-14B": _qwen3(5120, 40, 40, 17408),
  "Qwen3-32B": _qwen3(5120, 64, 64, 25600),
  "DeepSeek-R1-Distill-Llama-8B": _llama3(4096, 32, 32, 14336),
  "DeepSeek-R1-Distill-Qwen-7B": _qwen2_7b(Rope(), 131072),
  "GLM-4-9B": ModelConfig(
    vocab=151552,
    dim=4096,
    layers=40,
    heads=32,
    kv_heads=2,
    head_dim=128,
    ffn=13696,
    rope=Rope(partial=0.5),
    norm_eps=1.5625e-07,
    max_context=131072,
    qkv_bias=True,
  ),
  "Gemma-2-2B": ModelConfig(
    vocab=256000,
    dim=2304,
    layers=26,
    heads=8,
    kv_heads=4,
    head_dim=256,
    ffn=9216,
    norm_eps=1e-6,
    tie_embeddings=True,
    norms_after=True,
    activation="gelu_tanh",
    embed_scale=2304**0.5,
    windows=(4096, None) * 13,
    soft_cap=50.0,
    final_soft_cap=30.0,
  ),
  "Gemma-3-270M": _gemma3(640, 18, 4, 1, 2048, window=512),
  "Gemma-3-1B": _gemma3(1152, 26, 4, 1, 6912, window=512),
  "gpt-oss-20B": ModelConfig(
    vocab=201088,
    dim=2880,
    layers=24,
    heads=64,
    kv_heads=8,
    head_dim=64,
    ffn=2880,
    rope=Rope(150000.0, Yarn(32.0, 4096, truncate=False)),
    max_context=131072,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    sinks=True,
    activation="clipped",
    windows=(128, None) * 12,
    experts=32,
    experts_per_token=4,
  ),
  "Phi-4": ModelConfig(
    vocab=100352,
    dim=5120,
    layers=40,
    heads=40,
    kv_heads=10,
    head_dim=128,
    ffn=17920,
    rope=Rope(250000.0),
    max_context=16384,
  ),
  "Qwen3-30B-A3B": ModelConfig(
    vocab=151936,
    dim=2048,
    layers=48,
    heads=32,
    kv_heads=4,
    head_dim=128,
    ffn=768,
    rope=_QWEN,
    norm_eps=1e-6,
    max_context=40960,
    qk_norm=True,
    experts=128,
    experts_per_token=8,
  ),
}
