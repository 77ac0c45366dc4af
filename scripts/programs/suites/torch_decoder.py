"""The strongest plain PyTorch peer of a decode step: static cache, one compiled step, a CUDA graph.

As gpt-fast has it: a fused product for queries, keys and values and one for gate and up, keys and
values written in place, everything between the products compiled by inductor with its coordinate
descent, the whole step replayed as one CUDA graph. Attention is torch's fastest at the shape.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from kvjax.models.nn.config import ModelConfig
from kvjax.models.nn.transformer import Transformer
from kvjax.programs.suites import Contender, torch_clocked

REPLAYS = 16


def contender(model: Transformer, caches: Any, tokens: int) -> Contender:
  """A greedy step at position `tokens` with this model's weights, after a copy of these caches."""
  import torch

  keys = [tuple(_tensor(cache.slots[n]).clone() for n in "kv") for cache in caches]
  ids = torch.arange(keys[0][0].shape[0], device="cuda")
  replay = _captured(model.config, _weights(model), keys, _turn(model.config, tokens), ids, tokens)
  first = replay(torch.arange(len(ids), device="cuda")).float().cpu().numpy()

  def seconds() -> float:
    return torch_clocked(lambda: [replay() for _ in range(REPLAYS)]) / REPLAYS

  return Contender("torch, CUDA graph", seconds, lambda: first)


def _tensor(x: jax.Array) -> Any:
  """The same memory as a torch tensor."""
  import torch

  return torch.from_dlpack(x)


def _weights(model: Transformer) -> dict[str, Any]:
  """Weights as `linear` wants them, [out, in]; embedding and head are shared with ours."""

  def linear(x: Any, rows: int) -> Any:
    x = _tensor(x[...])
    return x.reshape(rows, -1).t().contiguous()

  c = model.config
  head_norms = ("q_norm", "k_norm") if c.qk_norm else ()
  head = model.embedding if c.tie_embeddings else model.head
  if c.qkv_bias:
    raise NotImplementedError("the torch decoder has no bias")
  layers = [
    {
      "norm": _tensor(layer.attention_norm.scale[...]),
      "qkv": linear(layer.attention.wqkv, c.dim),
      "out": linear(layer.attention.wo, c.heads * c.head_dim),
      "mlp_norm": _tensor(layer.mlp_norm.scale[...]),
      "gate_up": linear(layer.mlp.gate_up, c.dim),
      "down": linear(layer.mlp.down, c.ffn),
      **{name: _tensor(getattr(layer.attention, name).scale[...]) for name in head_norms},
    }
    for layer in model.layers
  ]
  ends = {"embedding": model.embedding, "norm": model.norm.scale, "head": head}
  return {"layers": layers, **{name: _tensor(x[...]) for name, x in ends.items()}}


def _turn(config: ModelConfig, position: int) -> tuple[Any, Any]:
  """Cosines and sines of a position, float32 [H/2]."""
  import torch

  angle = position * config.rope.frequencies(config.head_dim)
  parts = (np.cos(angle), np.sin(angle))
  cos, sin = (torch.tensor(x, dtype=torch.float32, device="cuda") for x in parts)
  return cos, sin


def _fastest(attend: Callable[[], Any]) -> Any:
  """The back end by which torch attends in the least time, cuDNN or flash."""
  import torch
  from torch.nn.attention import SDPBackend, sdpa_kernel
  from triton.testing import do_bench_cudagraph

  def milliseconds(backend: Any) -> float:
    with sdpa_kernel(backend), torch.no_grad():
      return do_bench_cudagraph(attend)

  with torch.cuda.stream(torch.cuda.Stream()):
    return min((SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION), key=milliseconds)


def _captured(
  config: ModelConfig,
  weights: dict[str, Any],
  keys: list[tuple[Any, Any]],
  turn: tuple[Any, Any],
  ids: Any,
  position: int,
) -> Callable[..., Any]:
  """One compiled step as a function: of the tokens, or of those that the last one chose."""
  import torch
  from torch import nn
  from torch.nn.attention import sdpa_kernel

  torch._inductor.config.coordinate_descent_tuning = True
  torch._dynamo.reset()
  K, G, H = config.kv_heads, config.groups, config.head_dim
  cos, sin = turn
  here = torch.tensor([position], device="cuda")  # a tensor: written in place, the rest not copied

  def attend(q: Any, k: Any, v: Any) -> Any:
    seen = slice(position + 1)
    attention = nn.functional.scaled_dot_product_attention
    return attention(q, k[:, :, seen], v[:, :, seen], enable_gqa=G > 1)

  def norm(x: Any, scale: Any) -> Any:
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + config.norm_eps)
    return (y * scale).to(x.dtype)

  def rotated(x: Any) -> Any:
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

  def step(weights: dict[str, Any], keys: list[tuple[Any, Any]], ids: Any) -> Any:
    x = weights["embedding"][ids]
    for layer, (k, v) in zip(weights["layers"], keys, strict=True):
      y = nn.functional.linear(norm(x, layer["norm"]), layer["qkv"]).view(-1, K, G + 2, H)
      q, new = y[:, :, :-2], y[:, :, -2]
      if "q_norm" in layer:
        q, new = norm(q, layer["q_norm"]), norm(new, layer["k_norm"])
      q = rotated(q).reshape(-1, K * G, 1, H)
      k[:, :, here] = rotated(new)[:, :, None]
      v[:, :, here] = y[:, :, -1:]
      o = attend(q, k, v)
      x = x + nn.functional.linear(o.reshape(-1, K * G * H), layer["out"])
      y = nn.functional.linear(norm(x, layer["mlp_norm"]), layer["gate_up"])
      gate, up = y.chunk(2, -1)
      x = x + nn.functional.linear(nn.functional.silu(gate) * up, layer["down"])
    return nn.functional.linear(norm(x, weights["norm"]), weights["head"])

  query = torch.randn(len(ids), K * G, 1, H, dtype=keys[0][0].dtype, device="cuda")
  backend = _fastest(lambda: attend(query, *keys[0]))
  compiled = torch.compile(step, fullgraph=True, dynamic=False)
  stream = torch.cuda.Stream()
  with torch.no_grad(), sdpa_kernel(backend):
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
      for _ in range(3):
        compiled(weights, keys, ids)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
      logits = compiled(weights, keys, ids)
      ids.copy_(logits.argmax(-1))

  # The graph has only the addresses of what is held.
  def replay(tokens: Any = None, held: Any = (weights, keys, turn, here)) -> Any:
    if tokens is not None:
      ids.copy_(tokens)
    graph.replay()
    return logits

  return replay
