"""For developers: the functions between generate and a kernel, and the calls to trace a layer.

    python -m scripts.tools.frames           # Full, Quest, and ART over Quest
    python -m scripts.tools.frames --each    # frame by frame

A step of a small decoder is traced, by kernels under the interpreter. A frame is a call of one of
our functions that is under way when the attention kernel is launched; jax's own are not counted.
"""

import ast
import dataclasses
import pathlib
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import tyro
from jax.experimental import pallas as pl

import kvjax
from kvjax.models.decode.generate import generate, prefill
from kvjax.testing import tiny

ROOT = pathlib.Path(kvjax.__file__).resolve().parent.parent
OURS = tuple(str(ROOT / folder) + "/" for folder in ("kvjax", "models", "pallas_kernels"))
QUEST = kvjax.Quest(16, page=4, dense_layers=0)
METHODS = {"Full": kvjax.Full(), "Quest": QUEST, "ART over Quest": kvjax.ART(base=QUEST, tile=4)}
ATTEND = ("decode_attend", "sparse_attend", "art_walk")  # launches that attend


@dataclasses.dataclass(frozen=True)
class Way:
  """The calls under way at the launch of attention, and those that a layer takes.

  Attributes:
    frames: file and function of each, `generate` first.
    calls: of our functions while the step of the last layer is traced.
  """

  frames: tuple[tuple[str, str], ...]
  calls: int

  @property
  def files(self) -> int:
    """The number of files that have a frame."""
    return len({file for file, _ in self.frames})


def _file(path: str) -> str | None:
  """One of our files, from the root; None: another's."""
  here = str(pathlib.Path(path).resolve())
  return here.removeprefix(f"{ROOT}/") if here.startswith(OURS) else None


def lines(file: str, function: str) -> int:
  """Lines of the longest function of this name in one of our files, without its docstring."""
  text = (ROOT / file).read_text()
  named = [x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.FunctionDef)]
  bodies = [x.body[ast.get_docstring(x) is not None :] for x in named if x.name == function]
  spans = [text.splitlines()[body[0].lineno - 1 : body[-1].end_lineno] for body in bodies if body]
  return max(sum(bool(line.strip()) for line in span) for span in spans)


def way(method: kvjax.Method) -> Way:
  """The way of a method's step; what was traced before is dropped."""
  model, found = tiny.model(impl="pallas"), []
  tokens = np.arange(2 * 24, dtype=np.int32).reshape(2, 24) % 50
  caches = model.init_caches(method, 2, 64)
  logits, caches = prefill(model, tokens, np.array([24, 17]), caches, method)
  jax.clear_caches()
  calls = _Calls()

  def launch(*given: Any, **named: Any) -> Any:
    if named.get("name") in ATTEND:
      stack = ((_file(x.filename), x.name) for x in traceback.extract_stack())
      found.append(tuple((file, name) for file, name in stack if file))
    return before(*given, **named)

  before, pl.pallas_call = pl.pallas_call, launch
  sys.setprofile(calls)
  try:
    generate(model, logits, caches, method, steps=1)
  finally:
    sys.setprofile(None)
    pl.pallas_call = before
  return Way(found[-1], calls.of_layers[-1])


class _Calls:
  """A profiler that counts calls of our functions within each layer's decode step."""

  def __init__(self) -> None:
    self.of_layers: list[int] = []
    self._within: types.FrameType | None = None

  def __call__(self, frame: types.FrameType, event: str, _: Any) -> None:
    code = frame.f_code
    if event == "return" and frame is self._within:
      self._within = None
    elif event == "call" and code.co_qualname == "Layer.decode":
      self._within = frame
      self.of_layers.append(0)
    elif event == "call" and self._within is not None and _file(code.co_filename):
      self.of_layers[-1] += 1


@dataclasses.dataclass(frozen=True)
class Args:
  each: bool = False
  """Print every frame."""


def main(args: Args, say: Callable[[str], None] = print) -> None:
  for name, method in METHODS.items():
    found = way(method)
    say(f"{name}: {len(found.frames)} frames in {found.files} files, {found.calls} calls a layer")
    for file, function in found.frames if args.each else ():
      say(f"  {file}: {function}, {lines(file, function)} lines")


if __name__ == "__main__":
  main(tyro.cli(Args, description=__doc__))
