"""Limits of kvpress: padded rows, and questions after layers of different sizes."""

from importlib import import_module
from typing import Any

import numpy as np

PADDED = ("SnapKVPress", "TOVAPress", "KnormPress", "KeyDiffPress", "ExpectedAttentionPress")
_TOKENS, _PADS, _BUDGET = 200, 56, 50


def limits() -> dict[str, Any]:
  """Results for a padded row, and for a question after layers of different sizes.

  A random Llama of two layers reads 200 tokens alone, and the same after 56 masked pads.

  Returns:
    `presses`: how many kvpress has; `padded`: by press, the share of 50 kept tokens that the two
    readings have in common, in the first layer; `uneven`: the error that transformers raises where
    several tokens follow a prompt under PyramidKVPress, or "".
  """
  torch, library = import_module("torch"), import_module("kvpress")
  transformers = import_module("transformers")
  torch.manual_seed(0)
  config = transformers.LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    attn_implementation="sdpa",
  )
  model = transformers.LlamaForCausalLM(config).eval()
  ids = torch.randint(0, config.vocab_size, (1, _TOKENS))

  def kept(press: str, pads: int) -> list[set[int]]:
    tokens = torch.nn.functional.pad(ids, (pads, 0))
    mask = (torch.arange(tokens.shape[1]) >= pads).long()[None]
    more = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    ratio = 1 - (_BUDGET + 0.5) / tokens.shape[1]
    full, cut = transformers.DynamicCache(), transformers.DynamicCache()
    model(tokens, past_key_values=full, **more)
    with getattr(library, press)(compression_ratio=ratio)(model):
      model(tokens, past_key_values=cut, **more)
    pairs = zip(cut.layers[0].keys[0], full.layers[0].keys[0], strict=True)
    return [set((torch.cdist(a, b).argmin(-1) - pads).tolist()) for a, b in pairs]

  with torch.inference_mode():
    padded = {}
    for press in PADDED:
      heads = zip(kept(press, 0), kept(press, _PADS), strict=True)
      padded[press] = float(np.mean([len(a & b) / _BUDGET for a, b in heads]))
    cache, uneven = transformers.DynamicCache(), ""
    with library.PyramidKVPress(compression_ratio=0.5, window_size=8)(model):
      model(ids, past_key_values=cache)
    try:
      at = torch.arange(_TOKENS, _TOKENS + 9)[None]
      model(ids[:, :9], past_key_values=cache, position_ids=at)
    except RuntimeError as error:
      uneven = str(error)
  classes = [x for x in vars(library).values() if isinstance(x, type)]
  presses = sum(issubclass(x, library.BasePress) for x in classes)
  return {"presses": presses, "padded": padded, "uneven": uneven}
