"""Gates of heads, and which heads are retrieval heads by them (DuoAttention, 2.2 and 3.1)."""

import json
import os
import pathlib

import numpy as np

Pattern = tuple[tuple[bool | int, ...], ...]


def read_gates(path: str | os.PathLike[str]) -> np.ndarray:
  """Gates of a model's heads, float64 [L, K], in [0, 1].

  The file has a line for each layer with a number for each key/value head, parted by tabs, as
  `full_attention_heads.tsv` of the authors' repository; after a # comes a comment. Trained gates
  may lie a little outside of [0, 1]: they are clipped.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it holds something else.
  """
  path = pathlib.Path(path)
  try:
    lines = path.read_text("utf-8-sig").splitlines()
    said = (line.partition("#")[0].rstrip() for line in lines)
    gates = np.array([[float(x) for x in line.split("\t")] for line in said if line])
  except ValueError as error:
    raise ValueError(f"{path}: found {error}, expected lines of gates parted by tabs") from None
  if gates.ndim != 2 or not np.isfinite(gates).all():
    raise ValueError(f"{path}: found gates {gates.shape}, expected finite numbers [layers, heads]")
  return np.clip(gates, 0, 1)


def read_sizes(path: str | os.PathLike[str]) -> dict[str, int]:
  """Sinks and recent as `config.json` beside a file of gates says, where it does.

  Raises:
    ValueError: it is no object of JSON.
  """
  if not (beside := pathlib.Path(path).with_name("config.json")).exists():
    return {}
  try:
    said = json.loads(beside.read_text("utf-8-sig"))
    known = {"sinks": said.get("sink_size"), "recent": said.get("recent_size")}
  except (AttributeError, RecursionError, ValueError) as error:
    raise ValueError(f"{beside}: found {error}, expected an object of JSON") from error
  return {name: x for name, x in known.items() if x is not None}


def pattern_of(gates: np.ndarray, sparsity: float | int = 0.5, shards: int = 1) -> Pattern:
  """The retrieval heads of gates [L, K]: round(L·K·sparsity) heads of the lowest gates stream.

  Of equal gates the first ones do; the authors add noise to part them.

  Args:
    gates: what each key/value head is worth as a retrieval head.
    sparsity: share of streaming heads.
    shards: devices that heads will be split over. Each gets as many retrieval heads of a layer as
      the one with most: its best streaming heads become retrieval heads.

  Raises:
    ValueError: an argument is out of range.
  """
  gates = np.asarray(gates)
  if not 0 <= sparsity <= 1:
    raise ValueError(f"sparsity: found {sparsity}, expected 0 to 1")
  if gates.ndim != 2 or shards < 1 or gates.shape[1] % shards:
    raise ValueError(
      f"shards: found {shards} for gates {gates.shape}, expected a divisor of the heads of [L, K]"
    )
  streams = np.argsort(gates, axis=None, kind="stable")[: round(gates.size * sparsity)]
  marks = np.ones(gates.size, bool)
  marks[streams] = False
  blocks = marks.reshape(len(gates), shards, -1)
  most = blocks.sum(2).max(1)
  best = np.lexsort((-gates.reshape(blocks.shape), ~blocks), axis=2)  # retrieval heads first
  rank = np.argsort(best, axis=2)
  kept = (rank < most[:, None, None]).reshape(gates.shape)
  return tuple(tuple(map(bool, row)) for row in kept)
