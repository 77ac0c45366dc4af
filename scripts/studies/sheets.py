"""Parts of all studies: the model's name, and texts."""

import pathlib

import numpy as np

from kvjax.models.io.tokenizer import Tokenizer
from kvjax.programs import bench
from kvjax.programs.common import write as write
from kvjax.programs.evals import haystack


def model_name(checkpoint: pathlib.Path | None) -> str:
  """The name of a converted checkpoint, or of the default one."""
  return checkpoint.name if checkpoint else "SmolLM2-135M-Instruct"


def about(checkpoint: pathlib.Path | None) -> dict[str, str]:
  """Device, versions and model."""
  facts = {name: x for name, x in bench.environment().items() if name != "command"}
  return facts | {"model": model_name(checkpoint)}


def words(start: str, count: int) -> str:
  """A text of so many tokens and more, from this speech on: a word is at least one."""
  return " ".join(haystack.words_from(start, count))


def tokens(tokenizer: Tokenizer, text: str, count: int) -> np.ndarray:
  """The first tokens of a text, int32."""
  return np.asarray(tokenizer.encode(text)[:count], np.int32)
