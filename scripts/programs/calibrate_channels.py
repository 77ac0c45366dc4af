"""Rank the label channels of a model for Double Sparsity.

    kvjax calibrate channels.npz --samples 64
    kvjax calibrate channels.npz --checkpoint FOLDER --text book.txt

The file is an .npz without pickles: `channels` int32 [L, K, H], for every layer and key/value head
all channels by mean |q_d·k_d| over the text, largest first, and `about`, a JSON text that says what
they were found on: by default texts that no test uses (`scripts/programs/evals/streams.py`). Use it
with

    caches = double_sparsity.calibrated(caches, double_sparsity.load_channels(path))

where double_sparsity is `kvjax.methods.double_sparsity`. The method takes the first channels, as
many as its settings ask for.
"""

import dataclasses
import json
import pathlib
from typing import Annotated

import numpy as np
import tyro

import kvjax
from kvjax.methods import double_sparsity
from kvjax.models.decode.generate import prefill
from kvjax.models.nn.transformer import Transformer
from kvjax.programs import common, console
from kvjax.programs.evals import fitted
from kvjax.programs.evals.streams import FITTING


@dataclasses.dataclass(frozen=True)
class Args:
  out: Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
  """The .npz file to write; written aside and renamed last."""
  text: Annotated[pathlib.Path | None, common.optional("FILE")] = None
  """A text in UTF-8; help texts of Python by default, which no test has."""
  samples: int = 32
  """Pieces of text to read, one after the other."""
  length: int = 512
  """Tokens per piece; each is read on its own."""
  batch: int = 4
  """Pieces that are read at a time."""
  checkpoint: common.Checkpoint = None


def calibrate(model: Transformer, ids: list[int], args: Args) -> np.ndarray:
  """Channels int32 [L, K, H], most important first, over `samples` pieces of `length` tokens.

  Raises:
    ValueError: the text is too short.
  """
  needed = args.samples * args.length
  if len(ids) < needed:
    raise ValueError(
      f"--text: found {len(ids):,} tokens, expected {needed:,} ({args.samples} pieces of "
      f"{args.length})"
    )
  pieces = np.asarray(ids[:needed], np.int32).reshape(args.samples, args.length)
  method, total = kvjax.DoubleSparsity(), 0.0
  for start in range(0, args.samples, args.batch):
    part = pieces[start : start + args.batch]
    caches = method.init_caches(model.spec(len(part), args.length))
    _, caches = prefill(model, part, np.full(len(part), args.length), caches, method)
    total = total + double_sparsity.importance(caches)
  return np.argsort(-total, -1, kind="stable").astype(np.int32)


def main(args: Args) -> None:
  common.check_numbers(args, samples=1, length=1, batch=1)
  if args.out.suffix != ".npz":
    raise ValueError(f"out: found {args.out}, expected a name that ends in .npz")
  model, tokenizer = common.load_model(args.checkpoint)
  if args.text is None:
    # A word is at least one token.
    text = " ".join(FITTING.words(args.samples * args.length))
  else:
    text = common.read_text(args.text, "--text")
  with console.step(f"reading {args.samples} pieces of {args.length} tokens"):
    ids = tokenizer.encode(text)
    channels = calibrate(model, ids, args)
  held = fitted.record(
    args.text.name if args.text else FITTING.about,
    [tokenizer.decode(ids[: args.samples * args.length])],
    model=args.checkpoint,
    samples=args.samples,
    length=args.length,
  )
  about = {"fitted": held, "computed_in": model.dtype.name}
  with common.written_aside(args.out) as path, path.open("wb") as file:
    np.savez_compressed(file, about=np.asarray(json.dumps(about)), channels=channels)
  layers, heads, size = channels.shape
  print(
    f"{args.out}: {args.out.stat().st_size / 1e3:.0f} kB, {size} channels of {heads} heads in "
    f"{layers} layers"
  )


if __name__ == "__main__":
  common.run(main, Args)
