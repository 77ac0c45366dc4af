"""Runs a cell: reads its prompts once for many methods, decodes under each, scores the answers."""

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import kvjax
from kvjax.models.decode import reconstruct
from kvjax.models.decode.generate import Generation, generate, pad, prefill
from kvjax.models.decode.prefill import empty
from kvjax.models.decode.reconstruct import Instructions
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn.transformer import Caches, Transformer
from kvjax.programs import common
from kvjax.programs.evals import continuations, origin, walks
from kvjax.programs.evals.answers import Answers
from kvjax.programs.evals.divergence import compare, surprise
from kvjax.programs.evals.plan import Cell, Entry, read_at_once
from kvjax.programs.evals.standing import FULL
from kvjax.runtime.shared_prefill import take

CHUNK = 16  # decode steps between two looks at a text that is given
_TAIL = 64  # questions on filled caches are padded to this many tokens times a power of two

# Numbers of the rows that are not there yet, by label and budget of a method.
Missing = Mapping[tuple[str, int | None], Sequence[int]]
# An entry and results of it, or the error with which it refused.
Made = tuple[Entry, list[dict[str, Any]] | Exception]


@dataclasses.dataclass
class Runner:
  """A model that answers rows, `batch` of them at a time.

  A row that has been answered makes room for the next one. Prompts are read a few at a time, once
  for all methods of a group. Shapes are few: prompts are padded to the length of their cell, caches
  hold as many tokens, and the last ones of a cell are read beside idle rows, so that a program
  compiles once per length and method.
  """

  model: Transformer
  tokenizer: Tokenizer
  batch: int

  def __post_init__(self):
    self._compiled: set[Any] = set()
    self._refused: set[Any] = set()  # methods that do not read the prompts of a length and a mode

  def run(self, cell: Cell, groups: Sequence[Sequence[Entry]], missing: Missing) -> Iterator[Made]:
    """Results of the missing rows, as they come; a method that refuses gives no more.

    Args:
      cell: the task's rows, and how they are asked.
      groups: methods whose caches one pass fills, the full cache first of all.
      missing: what is to be run.
    """
    left = dict(missing)
    if cell.task.rolling or cell.task.forced:
      indices = sorted(set().union(*missing.values()))
      run_all = self._roll_all if cell.task.rolling else self._follow_all
      parts = (indices[i : i + self.batch] for i in range(0, len(indices), self.batch))
      runs = (run_all(cell, part, groups, left) for part in parts)
    else:
      runs = (self._answer_all(cell, group, left) for group in groups)
    for entry, made in itertools.chain.from_iterable(runs):
      if isinstance(made, Exception):
        left[entry.key] = ()
      yield entry, made

  # ---- answers

  def _answer_all(self, cell: Cell, group: Sequence[Entry], missing: Missing) -> Iterator[Made]:
    """Answers under methods whose caches one pass fills, each in a live batch of its own."""
    made: dict[Entry, Answers] = {}
    indices = sorted(set().union(*(missing[entry.key] for entry in group)))
    repeats = group[0].method.traits.repeats  # the budgets of its layers are each reading's
    size = self.batch if repeats else read_at_once(self.batch)
    for first in range(0, len(indices), size):
      part = indices[first : first + size]
      rows = {
        entry: {i: place for place, i in enumerate(part) if i in missing[entry.key]}
        for entry in group
      }
      wanted = [entry for entry in rows if rows[entry]]
      for entry, read in self._readings(cell, part, group, wanted, size):
        if isinstance(read, Exception):
          yield entry, read
          continue
        logits, caches, about = read
        try:
          method = caches[0].origin.method if repeats else entry.method
          if entry not in made:
            # What is reconstructed has as many slots as its budget, even where the text is shorter.
            room = max(cell.length, *(cache.size for cache in caches)) if repeats else cell.length
            made[entry] = Answers(self, cell, entry, method, room)
          mine = {"seconds": about, "bytes": _bytes(caches, size)}
          for row in made[entry].enter(rows[entry], logits, caches, mine):
            yield entry, [row]
          if repeats:
            yield from ((entry, [row]) for row in made.pop(entry).finish())
        except (ValueError, NotImplementedError) as error:
          made.pop(entry, None)
          yield entry, error
    for entry, answers in made.items():
      try:
        yield from ((entry, [row]) for row in answers.finish())
      except (ValueError, NotImplementedError) as error:
        yield entry, error

  def _readings(
    self,
    cell: Cell,
    indices: Sequence[int],
    group: Sequence[Entry],
    wanted: Sequence[Entry],
    size: int,
  ) -> Iterator[tuple[Entry, Any]]:
    """Logits, caches and facts of a reading for each of the wanted methods, or its refusal.

    One pass fills the caches of a group. A method that refuses is looked for by halves, so that the
    others run, and is left out of later passes.
    """
    group = [entry for entry in group if (entry, cell.length, cell.mode) not in self._refused]
    wanted = [entry for entry in wanted if entry in group]
    if not wanted:
      return
    try:
      logits, filled, about = self._read(cell, indices, [x.method for x in group], size)
    except (ValueError, NotImplementedError) as error:
      if len(group) == 1:
        self._refused.add((group[0], cell.length, cell.mode))
        yield group[0], error
        return
      for half in (group[: len(group) // 2], group[len(group) // 2 :]):
        yield from self._readings(cell, indices, half, wanted, size)
      return
    for entry in wanted:
      self._drop_programs()
      caches = take(filled, group.index(entry)) if len(group) > 1 else filled
      yield entry, (logits, caches, about)

  def _read(
    self, cell: Cell, indices: Sequence[int], methods: list[kvjax.Method], size: int
  ) -> tuple[jax.Array, Caches, dict[str, Any]]:
    """Fills the caches of one method, or of several at once, with some prompts, `size` at most."""
    method = methods[0] if len(methods) == 1 else kvjax.SharedPrefill(tuple(methods))
    prompts = [cell.prompts[i] for i in indices]
    apart = cell.mode in ("agnostic", "reuse")
    texts = [prompt.head if apart else prompt.ids for prompt in prompts]
    tokens, lengths = _padded(texts, size, cell.length)
    cold = self.cold("prefill", method, cell.length, size)
    began = time.perf_counter()
    if method.traits.repeats:
      if not apart and any(prompt.tail for prompt in prompts):
        raise NotImplementedError(
          f"{cell.mode}: found {type(method).__name__}, which cuts a context before its question "
          "is known, expected --modes agnostic or reuse"
        )
      ask = Instructions.of(self.tokenizer)
      logits, caches = reconstruct.read(self.model, tokens, lengths, method, ask)
    else:
      caches = empty(self.model, method, size, cell.length)
      logits, caches = prefill(self.model, tokens, lengths, caches, method, past=0)
    jax.block_until_ready((logits, caches))
    seconds = time.perf_counter() - began
    return logits, caches, {"prefill": seconds, "shared": len(methods), "cold": cold}

  def ask(
    self, length: int, method: kvjax.Method, texts: list[list[int]], longest: int, caches: Caches
  ) -> tuple[jax.Array, Caches, float, list[str]]:
    """Reads a question into live caches, padded for the cell's longest.

    Returns:
      Logits, caches, seconds, and ["question"] if they include the program's compilation.
    """
    size = _TAIL
    while size < longest:
      size *= 2
    tokens, lengths = _padded(texts, len(texts), size)
    cold = self.cold("question", method, length, size, len(texts))
    began = time.perf_counter()
    logits, caches = prefill(self.model, tokens, lengths, caches, method)
    jax.block_until_ready((logits, caches))
    return logits, caches, time.perf_counter() - began, cold

  def result(
    self,
    cell: Cell,
    index: int,
    entry: Entry,
    score: dict[str, Any],
    timing: dict[str, Any],
    facts: dict[str, Any],
  ) -> dict[str, Any]:
    """A row of results; `facts` are bytes of its cache, and what else is known."""
    prompt = cell.prompts[index].ids + cell.prompts[index].second
    return {
      "task": cell.task.name,
      "length": cell.length,
      "mode": cell.mode,
      "method": entry.label,
      "budget": entry.budget,
      "index": index,
      **origin.facts(cell, index, entry),
      **({"fitted": "; ".join(x.told() for x in entry.fitted)} if entry.fitted else {}),
      "prompt_tokens": len(prompt),
      **score,
      **facts,
      "about": dict(cell.rows[index].about),
      "seconds": {
        name: round(value, 5) if isinstance(value, float) else value
        for name, value in timing.items()
      },
    }

  # ---- given texts

  def _follow_all(
    self, cell: Cell, indices: Sequence[int], groups: Sequence[Sequence[Entry]], missing: Missing
  ) -> Iterator[Made]:
    """Given continuations under every method that lacks one, beside the full cache's logits."""
    reference: Any = None
    lacks = {entry: {*missing[entry.key]} & {*indices} for group in groups for entry in group}
    for group in groups:
      wanted = [entry for entry in group if lacks[entry]]
      if group is groups[0] and group[0] not in wanted:
        wanted.insert(0, group[0])  # what the others are compared with
      for entry, read in self._readings(cell, indices, group, wanted, self.batch):
        try:
          if isinstance(read, Exception):
            raise read
          if reference is None and entry.label != FULL:
            raise ValueError(f"{cell.task.name}: found no full cache to compare with, expected one")
          rows, reference = self._follow(cell, indices, entry, *read, reference)
        except (ValueError, NotImplementedError) as error:
          yield entry, error
          continue
        if lacks[entry]:
          yield entry, [row for row in rows if row["index"] in lacks[entry]]

  def _follow(
    self,
    cell: Cell,
    indices: Sequence[int],
    entry: Entry,
    logits: jax.Array,
    caches: Caches,
    about: dict[str, Any],
    reference: Any,
  ) -> tuple[list[dict[str, Any]], Any]:
    """Results of a batch along its given texts; the logits to compare others with."""
    facts = _bytes(caches, self.batch)
    rows = [cell.rows[i] for i in indices]
    steps = max(row.max_new_tokens for row in rows)
    steps = min(steps, cell.length - max(len(cell.prompts[i].ids) for i in indices))
    forced = np.full((self.batch, steps), -1, np.int32)
    for row, i in enumerate(indices):
      forced[row] = cell.forced[i][:steps]
    visited = walks.visited(self.model, entry.method, caches, logits)
    cold = about["cold"] + self.cold("decode", entry.method, cell.length, self.batch, True)
    began = time.perf_counter()
    generation, _ = generate(
      self.model,
      logits,
      caches,
      entry.method,
      steps=steps,
      live=np.arange(self.batch) < len(indices),
      forced=forced,
      return_logits=True,
      chunk=CHUNK,
    )
    jax.block_until_ready(generation.last)
    taken = time.perf_counter() - began
    timing = {**about, "cold": cold, "decode": taken, "steps": steps, "rows": len(indices)}
    reference = generation.logits if reference is None else reference
    scores = _divergence(cell, indices, generation, reference)
    made = []
    for row, (i, score) in enumerate(zip(indices, scores, strict=True)):
      seen = {} if visited is None else {"visited": round(float(visited[row]), 5)}
      more = {**facts, "answer_limit": steps, **seen}
      made.append(self.result(cell, i, entry, score, timing, more))
    return made, reference

  def _roll_all(
    self, cell: Cell, indices: Sequence[int], groups: Sequence[Sequence[Entry]], missing: Missing
  ) -> Iterator[Made]:
    """Whole texts under every method that lacks one."""
    for entry in itertools.chain(*groups):
      if lacks := {*missing[entry.key]} & {*indices}:
        self._drop_programs()
        try:
          yield entry, [x for x in self._roll(cell, indices, entry) if x["index"] in lacks]
        except (ValueError, NotImplementedError) as error:
          yield entry, error

  def _roll(self, cell: Cell, indices: Sequence[int], entry: Entry) -> list[dict[str, Any]]:
    """Log-likelihoods of a batch's texts; the score is the geometric mean of a byte's."""
    if entry.method.traits.repeats:
      raise NotImplementedError(
        f"{cell.task.name}: found {type(entry.method).__name__}, which cuts a context before its "
        "question is known, expected a method that reads a text in order"
      )
    model, method, batch = self.model, entry.method, self.batch
    ids = [cell.prompts[i].ids for i in indices]
    begin = (self.tokenizer.eos if self.tokenizer.bos is None else self.tokenizer.bos) or 0
    windows = [[*continuations.windows(text, begin, cell.length)] for text in ids]
    cold = self.cold("decode", method, cell.length, batch, "rolling")
    began = time.perf_counter()
    every = continuations.score_all(model, method, [*itertools.chain(*windows)], batch)
    told = iter(every)
    values = [
      sum(nats for scores in itertools.islice(told, len(mine)) for _, nats, *_ in scores)
      for mine in windows
    ]
    timing = {"prefill": 0.0, "shared": 1, "cold": ["prefill", *cold]}
    timing |= {"decode": time.perf_counter() - began, "rows": len(indices)}
    timing["steps"] = sum(map(len, ids)) // len(indices)
    facts, made = _bytes(empty(model, method, 1, cell.length), 1), []
    for value, i in zip(values, indices, strict=True):
      counted = cell.rows[i].scoring
      also = {"log_likelihood": value, "words": counted["words"], "bytes": counted["bytes"]}
      score = {"score": math.exp(value / counted["bytes"]), "also": also}
      made.append(self.result(cell, i, entry, score, timing, facts))
    return made

  # ---- programs

  def cold(self, phase: str, *program: Any) -> list[str]:
    """The phase, if its program runs for the first time: its seconds include its compilation."""
    fresh = (phase, *program) not in self._compiled
    self._compiled.add((phase, *program))
    return [phase] if fresh else []

  def _drop_programs(self) -> None:
    if common.drop_programs():
      self._compiled.clear()


def _divergence(
  cell: Cell, indices: Sequence[int], generation: Generation, reference: jax.Array
) -> list[dict[str, Any]]:
  """Each row's divergence from the full cache, position by position.

  The first logits are the prompt's; every later row shows the cache at work. The score is the
  share of positions with the full cache's likeliest token.
  """
  steps = reference.shape[1]
  given = np.stack([cell.forced[i][:steps] for i in indices])
  mine, full = (x[: len(indices), 1:] for x in (generation.logits, reference))
  kl, top1 = compare(full, mine)
  curves = {"kl": kl, "top1": top1, "nll": surprise(mine, given[:, 1:])}
  out = []
  for row in range(len(indices)):
    positions = {
      name: [round(float(value), 5) for value in np.asarray(x[row], np.float64)]
      for name, x in curves.items()
    }
    means = {name: float(np.mean(values)) for name, values in positions.items()}
    out.append({"score": means["top1"], "also": means, "positions": positions})
  return out


def _bytes(caches: Caches, rows: int) -> dict[str, int]:
  """A row's bytes, on the device and the host."""
  device, host = common.bytes_of(caches)
  return {"cache_bytes": device // rows, "host_bytes": host // rows}


def _padded(texts: Sequence[list[int]], rows: int, size: int) -> tuple[np.ndarray, np.ndarray]:
  """Token ids [rows, size] and lengths; rows beyond the texts are empty."""
  idle: list[list[int]] = [[]] * (rows - len(texts))
  return pad([*texts, *idle], multiple=size)
