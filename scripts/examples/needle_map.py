"""Maps of where three methods find a needle: score by length of the text and depth of the needle.

The tiny model that runs without `--checkpoint` has random weights and finds nothing: its map is
blank. SmolLM2-135M-Instruct finds needles, and shows where methods lose them:

    python -m scripts.examples.needle_map --checkpoint <folder> --lengths 512 1024
"""

import pathlib

import tyro

from kvjax.programs import evaluate
from kvjax.programs.evals import pictures
from scripts.examples.tiny import load


def main(
  checkpoint: pathlib.Path | None = None,
  out: pathlib.Path = pathlib.Path("needle_map"),
  lengths: tuple[int, ...] = (480, 640),
  samples: int = 10,
) -> None:
  """Writes the rows of the evaluation into a folder, and the picture into needle_map.png there."""
  args = evaluate.Args(
    tasks=("needle",),
    methods=("streaming_llm", "snapkv", "quest"),
    budgets=("0.25",),
    lengths=lengths,
    samples=samples,
    out=out,
  )
  rows = evaluate.evaluate(args, *load(checkpoint))
  figure = pictures.needle_maps(rows)["aware"]
  figure.savefig(out / "needle_map.png")
  print(
    f"{out / 'needle_map.png'}: {len(rows)} answers of {len({r['method'] for r in rows})} methods"
  )


if __name__ == "__main__":
  tyro.cli(main)
