"""Shapes of models that programs are told by name or by folder."""

import pathlib

from kvjax.models.io import convert
from kvjax.models.io.huggingface import HuggingFace
from kvjax.models.nn.config import ModelConfig
from kvjax.models.nn.presets import PRESETS


def shape(name: str) -> ModelConfig:
  """The configuration of a preset's name, a converted checkpoint or a Hugging Face folder.

  Raises:
    ValueError: it is none of them.
  """
  if name in PRESETS:
    return PRESETS[name]
  folder = pathlib.Path(name)
  if not folder.is_dir():
    known = ", ".join(PRESETS)
    raise ValueError(f"--model: found {name!r}, expected a folder, or one of: {known}")
  return (
    convert.read_config(folder) if convert.is_checkpoint(folder) else HuggingFace(folder).config
  )
