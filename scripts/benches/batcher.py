"""requests of unequal answers: a batch whose rows come and go, against batches that wait for all"""

import functools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import kvjax
from kvjax.models.decode.batcher import Batcher
from kvjax.models.decode.generate import generate, pad, prefill
from kvjax.models.nn.transformer import Transformer
from kvjax.programs.suites import Case, Contender, fitting
from kvjax.programs.suites.e2e import weights

REPETITIONS = 3


def cases(quick: bool, peers: bool = True, only: str = "") -> Iterator[Case]:
  """Methods at their rows; answers of 100 to 1,500 tokens, short ones more often than long ones."""
  name = "tiny" if quick else "Llama-3.1-8B"
  rows, snapkv = (2, kvjax.SnapKV(16, window_size=4)) if quick else (64, kvjax.SnapKV(1024))
  for label, method in {"Full": kvjax.Full(), "SnapKV": snapkv}.items():
    title = f"{label} {name} B{rows}"
    if only in title:
      yield from fitting(title, case, weights(name), method, rows, quick)


def requests(rows: int, vocab: int, quick: bool) -> list[tuple[np.ndarray, int]]:
  """Prompts and limits, whose logarithms are spread evenly: four times as many as rows."""
  rng = np.random.default_rng(0)
  prompt, low, high = (8, 2, 20) if quick else (256, 100, 1500)
  return [
    (rng.integers(0, vocab, prompt, np.int32), round(low * (high / low) ** rng.random()))
    for _ in range(4 * rows)
  ]


def case(title: str, model: Transformer, method: kvjax.Method, rows: int, quick: bool) -> Case:
  """All requests to their ends, by either way; and one batch of rows that all end together.

  Tokens are compared where float32 leaves no doubt which is the likeliest.
  """
  asked = requests(rows, model.config.vocab, quick)
  capacity = max(prompt.size + limit for prompt, limit in asked)

  def queued() -> Batcher:
    batcher = Batcher(model, method, rows=rows, capacity=capacity)
    for prompt, limit in asked:
      batcher.submit(prompt, limit=limit)
    return batcher

  def together() -> dict[int, np.ndarray]:
    return {answer.request: answer.tokens for answer in queued()}

  def steady() -> float:
    """Seconds for as many tokens as all answers have, as long as the queue keeps all rows busy."""
    began, batcher = time.perf_counter(), queued()
    while batcher.waiting:
      batcher.step()
    took = time.perf_counter() - began
    for i in range(len(asked)):
      batcher.cancel(i)
    return took * total / sum(len(answer.tokens) for answer in batcher)

  def batch(part: list[tuple[np.ndarray, int]], steps: int) -> np.ndarray:
    tokens, lengths = pad([prompt for prompt, _ in part])
    caches = method.init_caches(model.spec(rows, capacity))
    logits, caches = prefill(model, tokens, lengths, caches, method)
    return generate(model, logits, caches, method, steps=steps, chunk=64)[0].tokens

  def waiting() -> dict[int, np.ndarray]:
    answers: dict[int, np.ndarray] = {}
    for first in range(0, len(asked), rows):
      part = asked[first : first + rows]
      made = batch(part, max(limit for _, limit in part))
      for i, (_, limit) in enumerate(part):
        answers[first + i] = made[i, :limit]
    return answers

  def seconds(run: Any) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began

  def output(run: Any) -> np.ndarray:
    answers = run()
    return np.concatenate([answers[i] for i in range(len(asked))])

  total = sum(limit for _, limit in asked)
  mean = round(total / len(asked))
  ways = {"Batcher": together, "waiting": waiting}

  def remarks(t: dict[str, float]) -> list[str]:
    rates = {name: total / t[name] for name in (*ways, "steady")}
    rates["full"] = rows * mean / t["full"]
    return [
      f"{t['Batcher'] / t['waiting']:.3f} × the time of batches that wait (at most 0.6)",
      f"{rates['steady'] / rates['full']:.3f} of the tokens a second of a full batch of equal "
      f"answers while the queue lasts (at least 0.9), {rates['Batcher'] / rates['full']:.3f} to "
      f"the last answer: " + ", ".join(f"{x:,.0f} {name}" for name, x in rates.items()),
    ]

  return Case(
    name=title,
    shapes=f"{len(asked)} requests over {rows} rows, {total} tokens; {method!r}",
    bytes=0,
    reference=lambda: output(waiting) if quick else np.zeros(1),
    tolerance=1e-6,
    contenders=[
      *(
        Contender(
          *(name, functools.partial(seconds, run)),
          functools.partial(output, run) if quick else None,
        )
        for name, run in ways.items()
      ),
      Contender("steady", steady),
      Contender("full", functools.partial(seconds, lambda: batch(asked[:rows], mean))),
    ],
    subject="Batcher",
    remarks=remarks,
  )
