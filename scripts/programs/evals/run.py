"""Runs a cell: reads its prompts once for many methods, decodes under each, scores the answers."""

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

import kvjax
from kvjax.models.decode import reconstruct
from kvjax.models.decode.generate import Generation, generate, pad, prefill
from kvjax.models.decode.reconstruct import Instructions
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn.transformer import Caches, Transformer
from kvjax.ops import offload
from kvjax.programs import common
from kvjax.programs.evals import origin, rolling, walks
from kvjax.programs.evals.divergence import compare, surprise
from kvjax.programs.evals.plan import Cell, Entry
from kvjax.programs.evals.task import Row, Task
from kvjax.runtime.shared_prefill import take

CHUNK = 16  # decode steps per dispatch
_TAIL = 64  # questions on filled caches are padded to this many tokens times a power of two


@dataclasses.dataclass
class Runner:
  """A model that answers batches of rows, `batch` rows at a time.

  Shapes are few: prompts are padded to the length of their cell, caches hold as many tokens, and
  the last batch of a cell has idle rows, so that a program compiles once per length and method.

  Attributes:
    model, tokenizer: of the checkpoint.
    batch: rows of a batch.
  """

  model: Transformer
  tokenizer: Tokenizer
  batch: int

  def __post_init__(self):
    self._compiled: set[Any] = set()

  def run(
    self, cell: Cell, mode: str, first: int, groups: Sequence[Sequence[Entry]], done: set[Any]
  ) -> Iterator[tuple[Entry, list[dict[str, Any]] | Exception]]:
    """The rows from number `first` on, one batch of them, under every method that is not done.

    Args:
      cell: the task's rows.
      mode: "aware", "agnostic": caches are filled before the question is read, "second": two
        turns, of which the second answer is scored, or "reuse": two questions on one context, each
        on a copy of its caches.
      first: index of the batch's first row.
      groups: methods whose caches one pass fills, the full cache first of all.
      done: (label, budget) of methods to leave out.

    Yields:
      An entry, and its rows of results, or the error with which it refused.
    """
    indices = range(first, min(first + self.batch, len(cell.rows)))
    if cell.task.rolling:
      yield from self._roll_all(cell, mode, indices, groups, done)
      return
    reference: Any = None  # the full cache's logits of a given text
    for group in groups:
      wanted = [entry for entry in group if (entry.label, entry.budget) not in done]
      compared = cell.task.forced and group is groups[0] and _any_left(groups, done)
      if compared and group[0] not in wanted:
        wanted.insert(0, group[0])
      if not wanted:
        continue
      try:
        logits, filled, reading = self._read(cell, mode, indices, [e.method for e in group])
      except (ValueError, NotImplementedError) as error:
        yield from ((entry, error) for entry in wanted)
        continue
      for entry in wanted:
        if common.drop_programs():
          self._compiled.clear()
        mine, caches = logits, take(filled, group.index(entry)) if len(group) > 1 else filled
        try:
          result, reference = self._decode(
            cell, mode, indices, entry, mine, caches, reading, reference
          )
        except (ValueError, NotImplementedError) as error:
          yield entry, error
          continue
        if (entry.label, entry.budget) not in done:
          yield entry, result

  def _read(
    self, cell: Cell, mode: str, indices: range, methods: list[kvjax.Method]
  ) -> tuple[jax.Array, Caches, dict[str, Any]]:
    """Fills the caches of one method, or of several at once, with the batch's prompts."""
    method = methods[0] if len(methods) == 1 else kvjax.SharedPrefill(tuple(methods))
    prompts = [cell.prompts[i] for i in indices]
    apart = mode in ("agnostic", "reuse")
    texts = [prompt.head if apart else prompt.ids for prompt in prompts]
    tokens, lengths = self._padded(texts, cell.length)
    cold = self._cold("prefill", method, cell.length)
    began = time.perf_counter()
    if method.traits.repeats:
      if not apart and any(prompt.tail for prompt in prompts):
        raise NotImplementedError(
          f"{mode}: found {type(method).__name__}, which cuts a context before its question is "
          "known, expected --modes agnostic or reuse"
        )
      ask = Instructions.of(self.tokenizer)
      logits, caches = reconstruct.read(self.model, tokens, lengths, method, ask)
    else:
      caches = method.init_caches(self.model.spec(self.batch, cell.length))
      logits, caches = prefill(self.model, tokens, lengths, caches, method, past=0)
    jax.block_until_ready((logits, caches))
    seconds = time.perf_counter() - began
    return logits, caches, {"prefill": seconds, "shared": len(methods), "cold": cold}

  def _decode(
    self,
    cell: Cell,
    mode: str,
    indices: range,
    entry: Entry,
    logits: jax.Array,
    caches: Caches,
    reading: dict[str, Any],
    reference: Any,
  ) -> tuple[list[dict[str, Any]], Any]:
    """Answers, or follows the given text; the rows of results, and the logits to compare with."""
    timing = {**reading, "cold": [*reading["cold"]]}
    asked_for = entry
    if entry.method.traits.repeats:  # budgets of its layers are known now
      entry = dataclasses.replace(entry, method=caches[0].origin.method)
    used, host = common.device_bytes(caches), common.host_bytes(caches)
    asked = [cell.rows[i] for i in indices]
    firsts: list[dict[str, Any]] = [{}] * len(indices)
    if mode == "agnostic":
      tails = [cell.prompts[i].tail for i in indices]
      longest = max(len(prompt.tail) for prompt in cell.prompts)
      logits, caches = self._ask(cell, entry, caches, tails, longest, timing)
    elif mode == "second":
      steps = max(row.max_new_tokens for row in asked)
      timing["cold"] += ["first"] if self._cold("decode", entry.method, cell.length, False) else []
      began = time.perf_counter()
      generation, caches = self._generate(cell, indices, entry, logits, caches, steps)
      timing["first"] = time.perf_counter() - began
      firsts = self._score(cell.task, asked, generation)
      said = [generation.tokens[row, :n] for row, n in enumerate(generation.lengths)]
      tails = [cell.prompts[i].second_after(said[row]) for row, i in enumerate(indices)]
      longest = max(len(prompt.second) for prompt in cell.prompts)
      logits, caches = self._ask(cell, entry, caches, tails, longest, timing)
      asked = [row.second for row in asked if row.second is not None]
    elif mode == "reuse":
      firsts = self._first_of_two(cell, indices, entry, caches, timing)
      tails = [cell.prompts[i].other for i in indices]
      longest = max(len(prompt.other) for prompt in cell.prompts)
      logits, caches = self._ask(cell, entry, caches, tails, longest, timing)
      asked = [row.second for row in asked if row.second is not None]
    steps = max(row.max_new_tokens for row in asked)
    if mode in ("aware", "agnostic"):  # an answer takes what its prompt leaves, a batch the least
      steps = min(steps, cell.length - max(len(cell.prompts[i].ids) for i in indices))
    forced = None
    if cell.task.forced:
      forced = np.full((self.batch, steps), -1, np.int32)
      for row, i in enumerate(indices):
        forced[row] = cell.forced[i][:steps]
    visited = walks.visited(self.model, entry.method, caches, logits)
    timing["cold"] += self._cold("decode", entry.method, cell.length, cell.task.forced)
    began = time.perf_counter()
    generation, caches = self._generate(cell, indices, entry, logits, caches, steps, forced)
    timing |= {
      "decode": time.perf_counter() - began,
      "steps": int(generation.lengths.max()),
      "rows": len(indices),
    }
    if cell.task.forced:
      reference = generation.logits if reference is None else reference
      scores = self._follow(cell, indices, generation, reference)
    else:
      scores = self._score(cell.task, asked, generation)
    for score, first in zip(scores, firsts, strict=True):
      if first:
        score["also"]["first"], score["first_answer"] = first["score"], first["answer"]
      if mode == "reuse":
        score["also"]["other"] = score["score"]
        score["score"] = (first["score"] + score["score"]) / 2
    more: list[dict[str, Any]] = [{"answer_limit": steps} for _ in indices]
    for row, facts in enumerate(more):
      facts |= {} if visited is None else {"visited": round(float(visited[row]), 5)}
    sizes = used, host
    return self._rows(cell, mode, indices, entry, asked_for, scores, sizes, timing, more), reference

  def _rows(
    self,
    cell: Cell,
    mode: str,
    indices: range,
    entry: Entry,
    asked_for: Entry,
    scores: Sequence[dict[str, Any]],
    sizes: tuple[int, int],
    timing: dict[str, Any],
    more: Sequence[dict[str, Any]],
  ) -> list[dict[str, Any]]:
    """Rows of results; `sizes` are the bytes of a batch's caches on the device and the host."""
    rows = []
    for row, i in enumerate(indices):
      prompt = cell.prompts[i].ids + cell.prompts[i].second
      rows.append(
        {
          "task": cell.task.name,
          "length": cell.length,
          "mode": mode,
          "method": entry.label,
          "budget": entry.budget,
          "index": i,
          **origin.facts(cell, i, asked_for),
          **({"fitted": "; ".join(x.told() for x in entry.fitted)} if entry.fitted else {}),
          "prompt_tokens": len(prompt),
          **scores[row],
          "cache_bytes": sizes[0] // self.batch,
          "host_bytes": sizes[1] // self.batch,
          **more[row],
          "about": dict(cell.rows[i].about),
          "seconds": {
            name: round(value, 5) if isinstance(value, float) else value
            for name, value in timing.items()
          },
        }
      )
    return rows

  def _roll_all(
    self,
    cell: Cell,
    mode: str,
    indices: range,
    groups: Sequence[Sequence[Entry]],
    done: set[Any],
  ) -> Iterator[tuple[Entry, list[dict[str, Any]] | Exception]]:
    """Whole texts under every method that is not done."""
    for entry in itertools.chain(*groups):
      if (entry.label, entry.budget) not in done:
        if common.drop_programs():
          self._compiled.clear()
        try:
          yield entry, self._roll(cell, mode, indices, entry)
        except (ValueError, NotImplementedError) as error:
          yield entry, error

  def _roll(self, cell: Cell, mode: str, indices: range, entry: Entry) -> list[dict[str, Any]]:
    """Log-likelihoods of a batch's texts; the score is the geometric mean of a byte's."""
    if entry.method.traits.repeats:
      raise NotImplementedError(
        f"{cell.task.name}: found {type(entry.method).__name__}, which cuts a context before its "
        "question is known, expected a method that reads a text in order"
      )
    ids = [cell.prompts[i].ids for i in indices]
    begin = self.tokenizer.eos if self.tokenizer.bos is None else self.tokenizer.bos
    cold = self._cold("decode", entry.method, cell.length, "rolling")
    began = time.perf_counter()
    values, caches = rolling.log_likelihoods(
      self.model, entry.method, ids, prefix=begin or 0, length=cell.length, batch=self.batch
    )
    timing = {"prefill": 0.0, "shared": 1, "cold": ["prefill", *cold]}
    timing |= {"decode": time.perf_counter() - began, "rows": len(indices)}
    timing["steps"] = sum(map(len, ids)) // len(indices)
    scores = []
    for value, i in zip(values.tolist(), indices, strict=True):
      counted = cell.rows[i].scoring
      also = {"log_likelihood": value, "words": counted["words"], "bytes": counted["bytes"]}
      scores.append({"score": math.exp(value / counted["bytes"]), "also": also})
    sizes = common.device_bytes(caches), common.host_bytes(caches)
    return self._rows(cell, mode, indices, entry, entry, scores, sizes, timing, [{}] * len(ids))

  def _first_of_two(
    self, cell: Cell, indices: range, entry: Entry, caches: Caches, timing: dict[str, Any]
  ) -> list[dict[str, Any]]:
    """Answers to the first questions, on a copy of the caches."""
    tails = [cell.prompts[i].tail for i in indices]
    longest = max(len(prompt.tail) for prompt in cell.prompts)
    copies = offload.rows_of(caches, np.arange(self.batch))
    logits, copies = self._ask(cell, entry, copies, tails, longest, timing)
    asked = [cell.rows[i] for i in indices]
    steps = max(row.max_new_tokens for row in asked)
    timing["cold"] += ["first"] if self._cold("decode", entry.method, cell.length, False) else []
    began = time.perf_counter()
    generation, _ = self._generate(cell, indices, entry, logits, copies, steps)
    timing["first"] = time.perf_counter() - began
    return self._score(cell.task, asked, generation)

  def _ask(
    self,
    cell: Cell,
    entry: Entry,
    caches: Caches,
    texts: Sequence[list[int]],
    longest: int,
    timing: dict[str, Any],
  ) -> tuple[jax.Array, Caches]:
    """Reads a question into live caches, padded for the cell's longest; notes its seconds."""
    size = _TAIL
    while size < longest:
      size *= 2
    tokens, lengths = self._padded(texts, size)
    timing["cold"] += self._cold("question", entry.method, cell.length, size)
    began = time.perf_counter()
    logits, caches = prefill(self.model, tokens, lengths, caches, entry.method)
    jax.block_until_ready((logits, caches))
    timing["question"] = time.perf_counter() - began
    return logits, caches

  def _generate(
    self,
    cell: Cell,
    indices: range,
    entry: Entry,
    logits: jax.Array,
    caches: Caches,
    steps: int,
    forced: np.ndarray | None = None,
  ) -> tuple[Generation, Caches]:
    """Decodes the batch's rows until each ends, or along the forced tokens."""
    generation, caches = generate(
      self.model,
      logits,
      caches,
      entry.method,
      steps=steps,
      stop=self.tokenizer.ends,
      stop_strings=cell.task.stop,
      tokenizer=self.tokenizer,
      live=np.arange(self.batch) < len(indices),
      forced=forced,
      return_logits=cell.task.forced,
      chunk=CHUNK,
    )
    jax.block_until_ready(generation.last)
    return generation, caches

  def _score(self, task: Task, rows: Sequence[Row], generation: Generation) -> list[dict[str, Any]]:
    """Each row's answer and what it is worth."""
    assert generation.texts is not None  # a tokenizer was given
    out = []
    for text, row, tokens in zip(generation.texts, rows, generation.lengths, strict=False):
      also = {name: scorer(text, row) for name, scorer in task.also.items()}
      score = task.score(text, row)
      out.append({"answer": text, "answer_tokens": int(tokens), "score": score, "also": also})
    return out

  def _follow(
    self, cell: Cell, indices: range, generation: Generation, reference: jax.Array
  ) -> list[dict[str, Any]]:
    """Each row's divergence from the full cache, position by position.

    The first logits are the prompt's; every later row shows the cache at work. The score is the
    share of positions with the full cache's likeliest token.
    """
    steps = reference.shape[1]
    given = np.stack([cell.forced[i][:steps] for i in indices])
    mine, full = (x[: len(indices), 1:] for x in (generation.logits, reference))
    kl, top1 = compare(full, mine)
    nll = surprise(mine, given[:, 1:])
    out = []
    for row in range(len(indices)):
      curves = {"kl": kl, "top1": top1, "nll": nll}
      positions = {
        name: [round(float(value), 5) for value in np.asarray(x[row], np.float64)]
        for name, x in curves.items()
      }
      means = {name: float(np.mean(values)) for name, values in positions.items()}
      out.append({"score": means["top1"], "also": means, "positions": positions})
    return out

  def _padded(self, texts: Sequence[list[int]], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [batch, size] and lengths; rows beyond the texts are empty."""
    idle: list[list[int]] = [[]] * (self.batch - len(texts))
    tokens, lengths = pad([*texts, *idle], multiple=1)
    return np.pad(tokens, ((0, 0), (0, size - tokens.shape[1]))), lengths

  def _cold(self, phase: str, *program: Any) -> list[str]:
    """The phase, if its program runs for the first time: its seconds include its compilation."""
    fresh = (phase, *program) not in self._compiled
    self._compiled.add((phase, *program))
    return [phase] if fresh else []


def _any_left(groups: Sequence[Sequence[Entry]], done: set[Any]) -> bool:
  return any((entry.label, entry.budget) not in done for group in groups for entry in group)
