"""Shapes of models that programs are told by name: weights are not asked for."""

import os
from difflib import get_close_matches

from kvjax.models.io import convert
from kvjax.models.io.presets import PRESETS
from kvjax.models.nn.config import ModelConfig


def shape(name: str) -> ModelConfig:
  """The configuration of a preset's name, or of a model as `convert.checkpoint` takes it.

  Raises:
    ValueError: it is none of them.
    ValueError, NotImplementedError, OSError: of `convert.config_of`.
  """
  if name in PRESETS:
    return PRESETS[name]
  if "/" in name or name.startswith(convert.HUB) or os.path.exists(name):
    return convert.config_of(name)
  near = "".join(f" (did you mean {x}?)" for x in get_close_matches(name, PRESETS, 1))
  raise ValueError(
    f"--model: found {name!r}, expected a checkpoint, a Hugging Face folder, a .gguf file, "
    f"owner/name of the hub, or one of: {', '.join(PRESETS)}{near}"
  )
