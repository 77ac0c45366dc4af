"""The time of a decode step, expected from the bytes that it moves and what it starts.

    seconds = device bytes / bandwidth + host bytes / link
            + layers · LAYER                      products, norms and one attention: launches
            + layers that choose · CHOICE         a selection before attention
            + further walks · WALK                attention over what a guess had missed
            + layers · STREAMED                   where blocks leave a window: votes, maps, stores

The four constants are fitted on the kept cells named in `FITTED`, on an H200; a test fits them anew
and compares the other cells.
"""

import dataclasses
import pathlib
from typing import Any

import numpy as np

import kvjax
from kvjax.kernels.common.devices import Device
from kvjax.models.decode.step_bytes import StepBytes, step_bytes
from kvjax.models.nn.config import ModelConfig
from kvjax.models.nn.presets import PRESETS
from kvjax.programs import bench_files

LAYER, CHOICE, WALK, STREAMED = 28.5e-6, 11.9e-6, 79.0e-6, 88.5e-6  # seconds
ROWS = 8  # the largest batch of the cells
FETCHED = 0.73  # of the host link's bandwidth, by blocks fetched from there: `bench_offload.json`
# Of a further walk where a guess mostly hits: PRR over Quest after real text, a layer that chooses
# (`real/speed.jsonl`). WALK is fitted where queries are random, and guesses miss.
HITTING = 3.2e-6
FITTED = (
  *("Llama-3.1-8B B1 T4096", "Qwen3-1.7B B8 T32768", "Quest Llama-3.1-8B B4 T128K"),
  *("PRR Llama-3.1-8B B1 T16K serial", "PRR Llama-3.1-8B B1 T32K ρ = 1.25"),
  "Ltri Llama-3.1-8B B1 T100K",
)


@dataclasses.dataclass(frozen=True)
class Cell:
  """A whole step that was measured: the shape, the method, and its seconds."""

  name: str
  config: ModelConfig
  method: kvjax.Method
  batch: int
  tokens: int
  seconds: float

  def moved(self) -> StepBytes:
    return step_bytes(self.config, self.method, self.batch, self.tokens)


def expected(moved: StepBytes, streamed: bool, here: Device) -> float:
  """Seconds of a step, at most where `moved` is a bound.

  Args:
    moved: what it moves.
    streamed: whether blocks leave a window for a store (`Traits.stream`).
    here: the device; of it only the bandwidths count.
  """
  started = np.array(_started(moved, streamed)) @ (LAYER, CHOICE, WALK, STREAMED)
  return float(_streaming(moved, here) + started)


def least(moved: StepBytes, streamed: bool, here: Device) -> float:
  """Seconds of a step whose retrievals are shared wherever they can be, and whose guesses hit."""
  walks = sum(x.walks - 1 for x in moved.layers)
  spared = moved.spared / here.read + walks * (WALK - HITTING)
  return expected(moved, streamed, here) - spared


def _streaming(moved: StepBytes, here: Device) -> float:
  """Seconds in which the bytes pass."""
  return moved.device / here.read + moved.host / (FETCHED * here.link)


def _started(moved: StepBytes, streamed: bool) -> tuple[int, int, int, int]:
  """Number of times that a step pays each of the four constants."""
  layers = moved.layers
  chosen, walks = sum(x.chosen for x in layers), sum(x.walks - 1 for x in layers)
  return len(layers), chosen, walks, len(layers) * streamed


def fitted(cells: list[Cell], here: Device) -> np.ndarray:
  """The four constants by least squares of relative errors over some cells, in seconds."""
  moved = [cell.moved() for cell in cells]
  seconds = np.array([cell.seconds for cell in cells])
  left = seconds - [_streaming(x, here) for x in moved]
  paid = [
    _started(x, cell.method.traits.stream is not None) for x, cell in zip(moved, cells, strict=True)
  ]
  return np.linalg.lstsq(np.array(paid) / seconds[:, None], left / seconds, rcond=None)[0]


def cells(folder: pathlib.Path) -> list[Cell]:
  """The whole steps that a device's results hold: Full, and methods that read a part.

  Raises:
    FileNotFoundError: a file of results is missing.
  """
  made = []
  for name in ("e2e", "e2e_qwen3"):
    for case in _cases(folder, name):
      model, batch, tokens = case["case"].split()
      shape = PRESETS[model], kvjax.Full(), int(batch[1:]), int(tokens[1:])
      made.append(Cell(case["case"], *shape, _seconds(case, "kvjax")))
  for case in _cases(folder, "e2e_sparse"):
    made += _sparse(case)
  for case in _cases(folder, "art_e2e"):
    made += _evicting(case)
  return [*made, *_streams(folder)]


def _sparse(case: dict[str, Any]) -> list[Cell]:
  """A method and the full cache beside it; of PRR, with its base alone."""
  label, model, batch, tokens = case["case"].split()
  shape = int(batch[1:]), int(tokens[1:-1]) << 10
  quest = kvjax.Quest(4096)
  if label == "PRR":
    contenders = {"serial": quest, "ρ = 1.25": kvjax.PRR(quest, budget=1.25)}
  else:
    method: dict[str, kvjax.Method] = {
      "Quest": quest,
      "InfLLM-v2": kvjax.InfLLMv2(),
      "CPE": kvjax.CPE.preset(512, tau=-1.0),
      "DuoAttention": kvjax.DuoAttention("alternate"),
    }
    contenders = {"kvjax": method[label], "Full": kvjax.Full()}
  return [
    Cell(
      f"{case['case']} {name}".removesuffix(" kvjax"),
      *(PRESETS[model], method, *shape, _seconds(case, name)),
    )
    for name, method in contenders.items()
  ]


def _evicting(case: dict[str, Any]) -> list[Cell]:
  """A method that keeps a share of the tokens, where the case is one."""
  kinds = {"StreamingLLM": kvjax.StreamingLLM, "SnapKV": kvjax.SnapKV, "PyramidKV": kvjax.PyramidKV}
  label, *share, model, batch, length = case["case"].split()
  if label not in kinds:
    return []
  tokens = int(length[1:-1]) << 10
  method = kinds[label](int(float(*share) * tokens))
  shape = PRESETS[model], method, int(batch[1:]), tokens
  return [Cell(case["case"], *shape, _seconds(case, f"{label} {share[0]}"))]


def _streams(folder: pathlib.Path) -> list[Cell]:
  """Tokens after a long stream under Ltri, in all layers."""
  (case,) = (x for x in _cases(folder, "offload") if x["case"] == "whole stream")
  llama, made = PRESETS["Llama-3.1-8B"], []
  for mark in (100, 1024):
    took = _seconds(case, f"token at {mark}K")
    made.append(Cell(f"Ltri Llama-3.1-8B B1 T{mark}K", llama, kvjax.Ltri(), 1, mark << 10, took))
  return made


def _cases(folder: pathlib.Path, suite: str) -> list[dict[str, Any]]:
  return bench_files.read(folder / f"bench_{suite}.json")["cases"]


def _seconds(case: dict[str, Any], contender: str) -> float:
  return next(x["us"] for x in case["results"] if x["name"] == contender) * 1e-6
