"""A GGUF file becomes a checkpoint folder that `models.convert.load` reads."""

import dataclasses
import pathlib
from typing import Annotated

import tyro

from models import convert
from scripts import common


@dataclasses.dataclass(frozen=True)
class Args:
  """Converts a GGUF file of the Llama architecture into a checkpoint folder.

  Quantised tensors are dequantised to float32; float16 and bfloat16 stay as they are. The folder
  is written aside and renamed last, so that an interrupted conversion leaves no checkpoint.
  """

  source: Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
  """The .gguf file."""
  dest: Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="DEST")]
  """The checkpoint folder to make; it must not exist yet."""


def main(args: Args) -> None:
  folder = convert.convert(args.source, args.dest)
  config = convert.read_config(folder)
  size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
  print(
    f"{folder}: {size / 1e6:.0f} MB, {config.layers} layers, {config.heads} query and "
    f"{config.kv_heads} key/value heads of size {config.head_dim}, {config.vocab:,} tokens"
  )


if __name__ == "__main__":
  common.run(main, Args, "convert_checkpoint")
