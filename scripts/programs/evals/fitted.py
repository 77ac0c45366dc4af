"""Records of what a file was fitted on, and the refusal to test it on the same.

Heads, gates and channels carry a record: texts, seed, model, versions, and fingerprints of the
texts themselves, so that any text is known again whatever it is called. A .json has it under
"fitted", a .tsv in a comment, an .npz in `about`. Files without one, such as published patterns,
are tested only where that is asked for, and their rows say "unknown".
"""

import dataclasses
import hashlib
import json
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

import kvjax
from kvjax.methods import labels
from kvjax.programs import common
from kvjax.programs.evals.task import Row

UNKNOWN = "unknown"
OPTION = "--methods"  # what errors call a label
FIELDS = ("heads", "pattern")  # fields that are found by looking at a model
UNFITTED = (None, "alternate")  # values of theirs that are not, nor is a share (HShare's heads)
COMMENT = "# fitted: "  # a line of a .tsv, which readers of numbers skip
_SHINGLE, _WINDOW = 13, 64  # words that are hashed together, and hashes of which one is kept


@dataclasses.dataclass(frozen=True)
class Fitted:
  """Something that a method got from a file, or from numbers given by hand.

  Attributes:
    name: how messages call it: the label's field and file.
    record: what it was fitted on, as `record` makes it; None: it does not say.
  """

  name: str
  record: dict[str, Any] | None = dataclasses.field(compare=False)

  def told(self) -> str:
    """A line on what it was fitted on, for rows of results."""
    if self.record is None:
      return UNKNOWN
    digest = hashlib.sha256(json.dumps(self.record, sort_keys=True).encode()).hexdigest()[:16]
    return f"{self.record['text']}, by {self.record.get('model', UNKNOWN)} ({digest})"


def record(text: str, texts: Iterable[str], *, model: pathlib.Path | None, **more: Any) -> Any:
  """A record of what something was fitted on: a dictionary for JSON.

  Args:
    text: what kind of texts they are, or the file's name.
    texts: the texts themselves, without what tests may say, too: instructions and questions.
    model: folder of the checkpoint; None: the default one.
    more: `task` and `seed` of random draws, `sources`, keys and values that were `hidden`, sizes.
  """
  marks = sorted(set().union(*map(fingerprints, texts)))
  return {
    "text": text,
    **more,
    "fingerprints": " ".join(marks),
    "model": common.model_name(model),
    "jax": jax.__version__,
    "kvjax": kvjax.__version__,
  }


def fingerprints(text: str) -> set[str]:
  """Hashes of some runs of 13 words: of two texts with 76 words in a row alike one at least.

  Of every 64 hashes in a row the least one is kept (winnowing).
  """
  words = re.findall(r"\w+", text.lower())
  if not words:
    return set()
  runs = range(max(1, len(words) - _SHINGLE + 1))
  found = [
    hashlib.blake2b(" ".join(words[i : i + _SHINGLE]).encode(), digest_size=6).hexdigest()
    for i in runs
  ]
  return {min(found[i : i + _WINDOW]) for i in range(max(1, len(found) - _WINDOW + 1))}


def of(path: pathlib.Path) -> dict[str, Any] | None:
  """The record of a file of heads (.json), gates (.tsv) or channels (.npz); None: it has none.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the record is damaged.
  """
  try:
    found = _read(path)
    if found is None:
      return None
    if isinstance(found, dict) and all(isinstance(found.get(n), str) for n in _NEEDED):
      return found
    error: Any = f"{type(found).__name__} without {', '.join(_NEEDED)}"
  except (ValueError, KeyError) as damage:
    error = damage
  raise ValueError(f"{path}: found {error}, expected a record of what it was fitted on")


_NEEDED = ("text", "fingerprints")


def _read(path: pathlib.Path) -> Any:
  if path.suffix == ".npz":
    with np.load(path, allow_pickle=False) as file:
      held = json.loads(str(file["about"])) if "about" in file.files else {}
      return held.get("fitted")
  text = path.read_text("utf-8")
  if path.suffix == ".json":
    held = json.loads(text)
    return held.get("fitted") if isinstance(held, dict) else None
  lines = [line for line in text.splitlines() if line.startswith(COMMENT)]
  return json.loads(lines[0].removeprefix(COMMENT)) if lines else None


def of_label(label: str) -> tuple[Fitted, ...]:
  """Records of what a label's values were fitted on, out of files or as heads given by hand.

  Raises:
    ValueError: a file is not there, or its record is damaged.
  """
  found = []
  for part in labels.split(label):
    name, fields = labels.parts(part, OPTION)
    for field, text in fields.items():
      path = pathlib.Path(text)
      if path.suffix in labels.FILES:
        found.append(Fitted(f"{name}:{field}={text}", labels.read(of, path, OPTION)))
      elif field in FIELDS:
        value = labels.value_of(field, text, OPTION)
        if value not in UNFITTED and not isinstance(value, (int, float)):
          found.append(Fitted(f"{name}:{field}={text}", None))
  return tuple(found)


def refuse_unknown(what: Sequence[Fitted], allowed: bool) -> None:
  """ValueError where something does not say what it was fitted on and nobody said that it may."""
  for each in what:
    if each.record is None and not allowed:
      raise ValueError(
        f"{each.name}: found nothing on what it was fitted on, expected a record as `kvjax "
        "retrieval-heads` writes it, or --unknown-fit, which marks its rows as unknown"
      )


def check(what: Sequence[Fitted], task: str, seed: int, rows: Sequence[Row]) -> None:
  """Refuses to test something on what it was fitted on.

  Raises:
    ValueError: texts, keys, values or random numbers are the same.
  """
  known = [each for each in what if each.record is not None]
  marks = [fingerprints(row.context) | fingerprints(row.continuation) for row in rows if known]
  for each in known:
    if why := _shared(each.record, task, seed, rows, marks):
      raise ValueError(
        f"{each.name}: found {why}, on which it was fitted, expected other texts, keys and "
        "seeds: fit again with `kvjax retrieval-heads`, or on another text"
      )


def _shared(
  held: dict[str, Any], task: str, seed: int, rows: Sequence[Row], marks: Sequence[set[str]]
) -> str:
  """The first thing that rows share with a record, in words; empty: nothing."""
  if (held.get("task"), held.get("seed")) == (task, seed):
    return f"task {task} with seed {seed}"
  own = set(held["fingerprints"].split())
  for index, (row, mine) in enumerate(zip(rows, marks, strict=True)):
    if mine & own:
      return f"text of {task}, row {index}"
    for said in held.get("hidden", ()):
      if said in row.context:
        return f"{said!r} in {task}, row {index}"
  return ""
