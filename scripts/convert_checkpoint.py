"""A published model becomes a checkpoint folder that `kvjax.models.convert.load` reads."""

import dataclasses
import pathlib
from typing import Annotated, Literal

import tyro

from kvjax.models import convert

from . import common


@dataclasses.dataclass(frozen=True)
class Args:
  """Converts a model of the Llama, Mistral or Qwen families into a checkpoint folder.

  Quantised tensors are dequantised to float32 unless --dtype says otherwise; float16 and bfloat16
  stay as they are. One layer is
  in memory at a time. The folder is written aside and renamed last, so that an interrupted
  conversion leaves no checkpoint. Pickled weights (.bin, .pt) are refused.
  """

  source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
  """A Hugging Face folder, a .gguf file, or hf:owner/name to download from the Hugging Face hub."""
  dest: Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="DEST")]
  """The checkpoint folder to make; it must not exist yet."""
  max_context: int | None = None
  """Use the model up to so many tokens only; needed where it has a sliding window of that size."""
  dtype: Literal["bfloat16", "float16", "float32"] | None = None
  """Of all matrices; by default as in the source. bfloat16 halves what 4-bit models take."""


def main(args: Args) -> None:
  common.check_numbers(args, max_context=1)
  folder = convert.convert(args.source, args.dest, max_context=args.max_context, dtype=args.dtype)
  config = convert.read_config(folder)
  size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
  print(
    f"{folder}: {size / 1e6:.0f} MB, {config.layers} layers, {config.heads} query and "
    f"{config.kv_heads} key/value heads of size {config.head_dim}, {config.vocab:,} tokens"
  )


if __name__ == "__main__":
  common.run(main, Args, "convert_checkpoint")
