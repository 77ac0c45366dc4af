"""Convert a Hugging Face folder or a GGUF file into a checkpoint folder.

    kvjax convert hf:Qwen/Qwen2.5-0.5B-Instruct qwen
    kvjax convert /models/Llama-3.2-1B llama --dtype bfloat16
    kvjax convert model.Q4_0.gguf small
    kvjax convert model-00001-of-00003.gguf large
    kvjax convert /models/Llama-3.3-70B llama --to orbax

Llama, Mistral, Qwen 2 and 3, Phi-3 and 4, GLM-4, Gemma 2 and 3 (text) and gpt-oss models convert.
float32, float16 and bfloat16 are stored unchanged; quantised blocks become bfloat16, or exact
float32 with --dtype float32, in twice the bytes. A few layers are in memory at a time. The folder
is written under another name and renamed at the end, so an interrupted conversion leaves no
checkpoint. Pickled weights (.bin, .pt) are not accepted.
"""

import dataclasses
import pathlib
from typing import Annotated, Literal

import tyro

from kvjax.models.io import convert
from kvjax.programs import common


@dataclasses.dataclass(frozen=True)
class Args:
  source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
  """A Hugging Face folder, a .gguf file, or hf:owner/name to download from the Hugging Face hub."""
  dest: Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="DEST")]
  """The checkpoint folder to make; it must not exist yet."""
  max_context: Annotated[int | None, common.optional("TOKENS")] = None
  """Longest context of the checkpoint: longer rows raise an error, and layers with a sliding window
  of at least this length become full layers."""
  dtype: Annotated[Literal["bfloat16", "float16", "float32"] | None, common.choice()] = None
  """Type of all matrices; by default as in the source, quantised blocks as bfloat16."""
  to: Literal["safetensors", "orbax"] = "safetensors"
  """Format of the weights: one safetensors file per layer, or an Orbax folder, of which each of
  several devices or hosts reads its part."""


def main(args: Args) -> None:
  common.check_numbers(args, max_context=1)
  how = {"max_context": args.max_context, "dtype": args.dtype, "to": args.to}
  folder = convert.convert(args.source, args.dest, **how)
  config = convert.read_config(folder)
  weights = _weights(convert.stored_bytes(folder))
  print(
    f"{folder}: {weights}, {config.layers} layers, {config.heads} query and "
    f"{config.kv_heads} key/value heads of size {config.head_dim}, {config.vocab:,} tokens"
  )


def _weights(stored: dict[str, int]) -> str:
  """Bytes of the weights by dtype, most first; what is less than a hundredth is not told."""
  total = sum(stored.values())
  parts = sorted((-size, name) for name, size in stored.items() if size > total / 100)
  return " and ".join(f"{-size / 1e6:,.1f} MB of {name}" for size, name in parts)


if __name__ == "__main__":
  common.run(main, Args)
