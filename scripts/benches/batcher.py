"""requests of unequal answers: a batch whose rows come and go, against batches that wait for all"""

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import kvjax
from kvjax.models.decode.batcher import Batcher
from kvjax.models.decode.generate import generate, pad, prefill
from kvjax.models.nn.transformer import Transformer
from kvjax.programs.suites import Case, Contender, fitting
from kvjax.programs.suites.e2e import weights

REPETITIONS = 1  # of minutes, in which steps are averaged
ALONE = 3  # short answers that are compared with those of a request alone


def cases(quick: bool, peers: bool = True, only: str = "") -> Iterator[Case]:
  """Methods at their rows, by prompts that are read together; answers of 100 to 1,500 tokens, short
  ones more often than long ones. Peers are batches that wait, once a method.
  """
  name = "tiny" if quick else "Llama-3.1-8B"
  rows, snapkv = (2, kvjax.SnapKV(16, window_size=4)) if quick else (64, kvjax.SnapKV(1024))
  for label, method in {"Full": kvjax.Full(), "SnapKV": snapkv}.items():
    for together in (1, 4, 8):
      title = f"{label} {name} B{rows}" + f" together {together}" * (together > 1)
      if only in title:
        how = together, peers and together == 1, quick
        yield from fitting(title, case, weights(name), method, rows, *how)


def requests(rows: int, vocab: int, quick: bool) -> list[tuple[np.ndarray, int]]:
  """Prompts and limits, whose logarithms are spread evenly: four times as many as rows."""
  rng = np.random.default_rng(0)
  prompt, low, high = (8, 2, 20) if quick else (256, 100, 1500)
  return [
    (rng.integers(0, vocab, prompt, np.int32), round(low * (high / low) ** rng.random()))
    for _ in range(4 * rows)
  ]


def case(
  title: str,
  model: Transformer,
  method: kvjax.Method,
  rows: int,
  together: int,
  waits: bool,
  quick: bool,
) -> Case:
  """All requests to their ends, by either way, and one batch of rows that all end together.

  Tokens are compared where float32 leaves no doubt which is the likeliest, and some with those of
  requests alone.
  """
  asked = requests(rows, model.config.vocab, quick)
  capacity = max(prompt.size + limit for prompt, limit in asked)
  total = sum(limit for _, limit in asked)
  mean = round(total / len(asked))
  last: dict[str, Any] = {}  # of the last run of the live batch

  def queued(asked: list[tuple[np.ndarray, int]]) -> Batcher:
    how = {"rows": rows, "capacity": capacity, "together": together}
    batcher = Batcher(model, method, **how)
    for prompt, limit in asked:
      batcher.submit(prompt, limit=limit)
    return batcher

  def live() -> dict[int, np.ndarray]:
    """All answers; seconds for as many tokens while requests wait, when every row has one."""
    began, batcher, steps = time.perf_counter(), queued(asked), 0
    while batcher.waiting:
      steps += batcher.step()
    batcher.wait()
    last["steady"] = (time.perf_counter() - began) * total / (steps * rows)
    last["answers"] = {answer.request: answer.tokens for answer in batcher}
    return last["answers"]

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

  def warmed(warm: Callable[[], Any], run: Callable[[], Any]) -> Callable[[], float]:
    """Seconds of a run; the first call, which does not count, compiles what it takes."""
    ways = itertools.chain([warm], itertools.repeat(run))

    def seconds() -> float:
      began, way = time.perf_counter(), next(ways)
      way()
      return time.perf_counter() - began

    return seconds

  def contender(name: str, run: Callable[[], Any], warm: Callable[[], Any]) -> Contender:
    def output() -> np.ndarray:
      answers = run()
      return np.concatenate([answers[i] for i in range(len(asked))])

    return Contender(name, warmed(warm, run), output if quick else None)

  def alone() -> int:
    """Short answers that have the tokens of requests with a batch for themselves."""
    short = sorted(range(len(asked)), key=lambda i: asked[i][1])[:ALONE]
    answers = ((next(iter(queued([asked[i]]))).tokens, last["answers"][i]) for i in short)
    return sum(np.array_equal(*each) for each in answers)

  def figures(t: dict[str, float]) -> dict[str, float]:
    rates = {name: total / t[name] for name in ("Batcher", "waiting", "steady") if name in t}
    rates["full"] = rows * mean / t["full"]
    return {
      "of a full batch": rates["steady"] / rates["full"],
      "of a full batch, to the last answer": rates["Batcher"] / rates["full"],
      f"of {ALONE} answers as of a request alone": alone(),
      **{f"{name}, tokens a second": rate for name, rate in rates.items()},
    }

  some = functools.partial(batch, asked[:rows])
  few = [(prompt, 2) for prompt, _ in asked[: together + 1]]
  return Case(
    name=title,
    shapes=f"{len(asked)} requests over {rows} rows, prompts read {together} at a time, "
    f"{total} tokens; {method!r}",
    bytes=0,
    reference=lambda: np.concatenate([*waiting().values()]) if quick else np.zeros(1),
    tolerance=1e-6,
    contenders=[
      contender("Batcher", live, lambda: list(queued(few))),
      *[contender("waiting", waiting, lambda: some(2))] * waits,
      Contender("steady", lambda: last.get("steady", 0.0)),  # within Batcher's run
      Contender("full", warmed(lambda: some(2), lambda: some(mean))),
    ],
    subject="Batcher",
    figures=figures,
  )
