"""Parts of both comparisons with kvpress: arguments, settings, a greedy answer, the prompts."""

import dataclasses
import pathlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Annotated, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.models.decode.by_layer import ByLayer
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn.transformer import Transformer
from kvjax.ops import shared_slots
from kvjax.programs import common
from kvjax.programs.evals import kept, origin, registry
from kvjax.programs.evals.prompt import Reader
from kvjax.programs.evals.store import Store, key
from kvjax.programs.evals.task import Row
from scripts.studies import pressed, sheets

TASK = "needle"
Cell = TypeVar("Cell")  # whatever names one


@dataclasses.dataclass(frozen=True)
class Args:
  """Arguments of both."""

  out: Annotated[pathlib.Path | None, common.optional("FOLDER")] = None
  """Folder of the rows; by default one of the model's name in scripts/results/cpu."""
  samples: int = 10
  """Prompts, at ten depths in turn."""
  length: int = 2048
  """Tokens of a prompt and its answer."""
  steps: int = 12
  """Tokens of an answer at most; a needle takes about eight."""
  seed: int = 0
  """Draws texts and needles."""
  alone: bool = False
  """Asks kvpress only: for a model that two libraries take too long to run."""
  checkpoint: common.Checkpoint = None


def settings(args: Args, model: Transformer, tokenizer: Tokenizer, **more: Any) -> dict[str, Any]:
  """Facts that all rows of a folder share."""
  libraries = pressed.versions()
  return {
    "model": sheets.model_name(args.checkpoint),
    "weights": origin.weights(model),
    "tokenizer": origin.tokenizer(tokenizer),
    **{name: getattr(args, name) for name in ("length", "steps", "seed", "alone")},
    "versions": {"jax": jax.__version__, "kvjax": kvjax.__version__, **libraries},
    **more,
  }


def ask(
  args: Args,
  reader: Reader,
  store: Store,
  names: Mapping[Cell, dict[str, Any]],
  answer: Callable[[Row, list[Cell]], Mapping[Cell, dict[str, Any]]],
) -> None:
  """Adds what the store lacks, prompt by prompt.

  Args:
    names: for each cell the fields that name it: mode, method and budget.
    answer: what is found of a prompt, for the cells that are asked for and maybe others.
  """
  build = registry.TASKS[TASK].build
  for index in range(args.samples):
    facts = {"task": TASK, "length": args.length}
    rows = {cell: {**facts, **name, "index": index} for cell, name in names.items()}
    left = [cell for cell, row in rows.items() if key(row) not in store.rows]
    if left:
      print(f"prompt {index + 1} of {args.samples}")
      row = build(reader.count, length=args.length, seed=args.seed, index=index)
      found = answer(row, left)
      store.append([rows[cell] | found[cell] for cell in left])


def summary(store: Store, *by: str) -> Iterator[tuple[dict[str, Any], str]]:
  """Rows by these fields, and in words what both sides keep alike and their scores."""
  for each in kept.summary(store.rows.values(), by):
    sides = [f"{each[name].mean:.0%}" for name in ("score", "score_of_kvpress") if name in each]
    equal = f"{each['equal']:.4f}" if "equal" in each else ""
    yield each, f"{equal:7} {' '.join(sides)}"


def greedy(
  layered: ByLayer,
  method: kvjax.Method,
  logits: Any,
  caches: Any,
  steps: int,
  ends: Collection[int],
) -> tuple[list[int], Any]:
  """An answer without what ends it, layer by layer as prompts are read, and the caches after it."""
  said: list[int] = []
  while (new := int(logits[0].argmax())) not in ends:
    said.append(new)
    if len(said) == steps:
      break
    logits, caches = layered.decode(jnp.asarray([new], jnp.int32), caches, method)
  return said, caches


def positions(caches: Any) -> list[np.ndarray]:
  """Of the first row, per layer and head; −1: none."""
  return [np.asarray(shared_slots.by_head(layer)["pos"][0]) for layer in caches]
