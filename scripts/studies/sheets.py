"""Parts of all studies: the model's name, texts, and files of an earlier run."""

import json
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvjax.models.io.tokenizer import Tokenizer
from kvjax.programs import bench, console
from kvjax.programs.common import model_name as model_name
from kvjax.programs.common import write as write
from kvjax.programs.evals import haystack


def about(checkpoint: pathlib.Path | None) -> dict[str, str]:
  """Device, versions and model."""
  facts = {name: x for name, x in bench.environment().items() if name != "command"}
  return facts | {"model": model_name(checkpoint)}


def words(start: str, count: int, option: str = "--starts") -> str:
  """A text of so many tokens and more, from this speech on: a word is at least one."""
  return " ".join(haystack.words_from(start, count, option=option))


def tables(found: dict[Any, Any], title: str = "") -> Iterator[str]:
  """Tables of nested figures as text, one of the rows that stand together: {row: {column: …}}."""
  rows = {name: x for name, x in found.items() if isinstance(x, dict)}
  if any(isinstance(x, dict) and "mean" not in x for row in rows.values() for x in row.values()):
    for name, row in rows.items():
      yield from tables(row, f"{title}, {name}".removeprefix(", "))
  elif rows:
    columns = dict.fromkeys(name for row in rows.values() for name in row)
    cells = [[str(name), *(_figure(row.get(x)) for x in columns)] for name, row in rows.items()]
    yield f"\n{title}\n\n{console.table(('', *columns), cells)}"


def _figure(x: Any) -> str:
  """A figure, several, or a mean with its interval, as text; a dash for none."""
  if isinstance(x, dict):
    return "{} [{}, {}]".format(*(_figure(x[name]) for name in ("mean", "low", "high")))
  if isinstance(x, list | tuple):
    return " ".join(map(_figure, x))
  if x is None or math.isnan(x):
    return "–"
  return f"{x:,}" if isinstance(x, int) else f"{x:.4g}"


def held(path: pathlib.Path, about: dict[str, Any], part: str) -> Any:
  """A part of the file of an earlier run with the same settings; None: there is no file.

  Raises:
    ValueError: it is of other settings, or no such file.
  """
  if not path.is_file():
    return None
  try:
    kept = json.loads(path.read_text("utf-8"))
    settings, found = kept["about"], kept[part]
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(f"{path}: found {error!r}, expected the {part} of a run") from error
  refuse_other(path, settings, about)
  return found


def refuse_other(path: pathlib.Path, found: dict[str, Any], about: dict[str, Any]) -> None:
  """Raises ValueError where a file is of a run with other settings, which it names."""
  if found != about:
    other = {name: found.get(name) for name, value in about.items() if found.get(name) != value}
    wanted = {name: about[name] for name in other}
    raise ValueError(f"{path}: found a run with {other}, expected {wanted}, or another folder")


def check_layers(layers: Sequence[int], count: int) -> None:
  """Raises ValueError where --layers names one that a model of so many does not have."""
  if not all(0 <= layer < count for layer in layers):
    raise ValueError(f"--layers: found {layers}, expected some of 0 to {count - 1}")


def tokens(tokenizer: Tokenizer, text: str, count: int) -> np.ndarray:
  """The first tokens of a text, int32."""
  return np.asarray(tokenizer.encode(text)[:count], np.int32)
