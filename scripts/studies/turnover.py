"""Measure how far methods move from the full cache along answers longer than their budgets.

    kvjax turnover out --checkpoint FOLDER --answer 16384 --budgets 3200 2400 1200

The full cache answers prompts, which are parts of speeches, with texts that are sampled and do not
end. Every method reads the same prompts and is given the same answers token by token, as in the
task `kl` of `evaluate`: of each token, KL(full ‖ method) in nats of the two predictions, and
whether both name the same likeliest token. The first token is predicted from the prompt alone.

Turnover is answer / budget: how many times over a method has replaced what it keeps. LongFlow's
paper evicts throughout answers of 16,000 tokens at a budget of 3,200, a turnover of 5.

In the folder: texts.npz (token ids), turnover.json (records: means over windows of an answer, by
row, with intervals over rows) and turnover.txt. What is there is not made again.
"""

import dataclasses
import itertools
import json
import pathlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array, Float, Int

import kvjax
from kvjax.models.decode.generate import generate, prefill
from kvjax.models.decode.prefill import empty
from kvjax.models.decode.sampling import Sampling
from kvjax.models.io import files
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn.transformer import Caches, Transformer
from kvjax.programs import common, console
from kvjax.programs.evals import haystack, plan
from kvjax.programs.evals.divergence import compare
from kvjax.programs.evals.stats import student
from kvjax.programs.evals.streams import TESTS
from scripts.studies import sheets

PIECE = 64  # tokens whose logits [B, PIECE, V] are held at once
RUN = 8  # tokens of a run, of which answers that go round in circles have few different ones
SHOWN = 5  # windows in the table
NAMES = "kl", "top1"
SETTINGS = "prompt", "answer", "rows", "temperature", "seed"  # of the texts
FAILURES = ArithmeticError, MemoryError, NotImplementedError, ValueError


@dataclasses.dataclass(frozen=True)
class Args:
  out: Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
  """Folder of texts, records and table."""
  methods: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")] = (
    *("full", "longflow", "longflow:per=layer", "h2o", "vatp", "r_kv", "tova", "streaming_llm"),
  )
  """Methods, as `evaluate` takes them; "full" beside itself shows what is rounding."""
  budgets: tuple[int, ...] = (3200, 2400, 1200)
  """Tokens that a method keeps."""
  prompt: int = 512
  """Tokens of a prompt."""
  answer: int = 16384
  """Tokens of an answer."""
  rows: int = 8
  """Prompts, which run as one batch; at least two, for intervals over them."""
  temperature: float = 1.0
  """Of the answers. Below it those of small models go round in circles: see the share of runs."""
  seed: int = 0
  """Of prompts and answers."""
  window: int = 512
  """Positions of an answer that are averaged."""
  together: int = 4
  """Methods that run beside one pass of the full cache; a stopped run loses those it was at."""
  checkpoint: common.Checkpoint = None


# ---- texts


def prompts_of(tokenizer: Tokenizer, args: Args) -> Int[np.ndarray, "B T"]:
  """Parts of the speeches from random places; no word is in two of them."""
  parts = haystack.passages(TESTS.rng("turnover", args.seed, 0), args.rows, args.prompt)
  return np.stack([sheets.tokens(tokenizer, " ".join(words), args.prompt) for words in parts])


def read(
  model: Transformer, method: kvjax.Method, prompts: np.ndarray, room: int
) -> tuple[Array, Caches]:
  """Logits [B, V] and caches after the prompts, with room for so many tokens in all."""
  lengths = np.full(len(prompts), prompts.shape[1], np.int32)
  caches = empty(model, method, len(prompts), room)
  return prefill(model, prompts, lengths, caches, method, past=0)


def write(
  model: Transformer, tokenizer: Tokenizer, prompts: np.ndarray, args: Args
) -> Int[np.ndarray, "B N"]:
  """Answers of the full cache; tokens that are no text, such as those that end one, have p = 0."""
  tokens = range(model.config.vocab)
  special = jnp.array([tokenizer.is_special(token) or token in tokenizer.ends for token in tokens])
  how: dict[str, Any] = {"sampling": Sampling(args.temperature), "seed": args.seed % (1 << 32)}
  logits, caches = read(model, kvjax.Full(), prompts, prompts.shape[1] + args.answer)
  pieces = []
  with console.bar(args.answer, "answers", "token") as bar:
    for _ in range(args.answer):
      text = jnp.where(special, -jnp.inf, logits)
      out, caches = generate(model, text, caches, kvjax.Full(), steps=1, **how)
      logits = out.last
      pieces.append(out.tokens)
      bar.update(1)
  return np.concatenate(pieces, 1)


def distinct(answer: Int[np.ndarray, " N"]) -> float:
  """Share of an answer's runs of `RUN` tokens that are no repetition of an earlier one."""
  runs = np.lib.stride_tricks.sliding_window_view(answer, min(RUN, len(answer)))
  return round(len(np.unique(runs, axis=0)) / len(runs), 4)


def texts_of(
  model: Transformer, tokenizer: Tokenizer, args: Args, about: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
  """Prompts [B, T] and answers [B, N], of an earlier run or new."""
  path = args.out / "texts.npz"
  if path.exists():
    with files.whole(path, "the texts of a run"), path.open("rb") as file, np.load(file) as held:
      found, prompts, answers = json.loads(str(held["about"])), held["prompts"], held["answers"]
    sheets.refuse_other(path, found, about)
    return prompts, answers
  prompts = prompts_of(tokenizer, args)
  answers = write(model, tokenizer, prompts, args)
  with common.written_aside(path) as aside, aside.open("wb") as file:
    np.savez(file, prompts=prompts, answers=answers, about=np.asarray(json.dumps(about)))
  return prompts, answers


# ---- predictions


def follow(
  model: Transformer,
  methods: Sequence[kvjax.Method],
  prompts: Int[np.ndarray, "B T"],
  answers: Int[np.ndarray, "B N"],
  done: Callable[[int], Any] = lambda tokens: None,
) -> list[Float[np.ndarray, "2 B N"]]:
  """Of each method KL(full ‖ method) in nats and agreement (0 or 1), token by token.

  Args:
    done: called with the number of tokens that were given since the last call.
  """
  room = prompts.shape[1] + answers.shape[1]
  states = [read(model, method, prompts, room) for method in (kvjax.Full(), *methods)]
  found: list[list[np.ndarray]] = [[] for _ in methods]
  for start in range(0, answers.shape[1], PIECE):
    given = answers[:, start : start + PIECE]
    how: dict[str, Any] = {"steps": given.shape[1], "forced": given, "return_logits": True}
    for i, method in enumerate((kvjax.Full(), *methods)):
      out, caches = generate(model, *states[i], method, **how)
      states[i] = out.last, caches
      if i == 0:
        full = out.logits
      else:
        found[i - 1].append(np.stack(jax.device_get(compare(full, out.logits))))
    done(given.shape[1])
  return [np.concatenate(pieces, -1, dtype=np.float32) for pieces in found]


Run = Callable[[list[kvjax.Method]], list[np.ndarray]]


def measured(
  entries: Sequence[plan.Entry], run: Run
) -> Iterator[tuple[plan.Entry, np.ndarray | str]]:
  """What `run` finds of methods, together; if one fails, of each alone, or what its error says."""
  try:
    found: list[Any] = run([entry.method for entry in entries])
  except (*FAILURES, jax.errors.JaxRuntimeError) as error:
    found = [] if len(entries) > 1 else [str(error)]
  if found:
    yield from zip(entries, found, strict=True)
  else:  # not while the error holds on to their caches
    for entry in entries:
      yield from measured([entry], run)


# ---- records


def records(
  entry: plan.Entry, curves: Float[np.ndarray, "2 B N"], window: int, on: dict[str, str]
) -> list[dict[str, Any]]:
  """A record for the whole answer (its window is None), and one for each window."""
  size, where = curves.shape[-1], {name: on[name] for name in ("device", "jax")}
  turnover = None if entry.budget is None else round(size / entry.budget, 3)
  who = {"method": entry.label, "budget": entry.budget, "turnover": turnover}
  parts: list[tuple[int | None, int, int]] = [(None, 0, size)]
  parts += [(i, at, min(at + window, size)) for i, at in enumerate(range(0, size, window))]
  made = []
  for number, start, stop in parts:
    record = {**who, "window": number, "start": start, "stop": stop}
    for name, curve in zip(NAMES, curves, strict=True):
      by_row = curve[:, start:stop].mean(-1, dtype=np.float64).tolist()
      over = student(by_row)
      record |= {name: over.mean, f"{name}_low": over.low, f"{name}_high": over.high}
      record[f"{name}_rows"] = by_row
    made.append({**record, "settings": repr(entry.method), **where})
  return made


def table(held: Sequence[dict[str, Any]]) -> str:
  """A line for each method and budget: means over whole answers, and KL in some windows."""
  count = max(record["window"] or 0 for record in held) + 1
  shown = sorted({round(i) for i in np.linspace(0, count - 1, SHOWN)})
  rows, starts = [], {r["window"]: r["start"] for r in held}
  for _, group in itertools.groupby(held, lambda r: (r["method"], r["budget"])):
    whole, *windows = group
    spread = f"{whole['kl']:.4f} [{whole['kl_low']:.4f}, {whole['kl_high']:.4f}]"
    sizes = ("–" if whole[x] is None else f"{whole[x]:,.4g}" for x in ("budget", "turnover"))
    each = (f"{windows[i]['kl']:.4f}" for i in shown)
    rows.append([whole["method"], *sizes, spread, f"{whole['top1']:.1%}", *each])
  head = ("method", "budget", "turnover", "KL, nats", "top-1")
  return console.table((*head, *(f"from {starts[i]:,}" for i in shown)), rows)


def said(report: dict[str, Any]) -> str:
  """Text of turnover.txt: the settings, then the table."""
  about, held = report["about"], report["records"]
  on = sorted({f"{r['device']}, jax {r['jax']}" for r in held})
  few, most = min(report["distinct_runs"]), max(report["distinct_runs"])
  return (
    f"{about['model']}, {about['dtype']}; {'; '.join(on)}\n"
    f"answers of {about['answer']:,} tokens to prompts of {about['prompt']:,}, {about['rows']} "
    f"rows, temperature {about['temperature']:g}, seed {about['seed']}; {few:.1%} to {most:.1%} of "
    f"their runs of {RUN} tokens are different ones\nturnover = answer / budget; [95 % interval "
    f"over rows, Student's]; KL in windows of {about['window']:,} tokens on the right\n\n"
    f"{table(held)}\n"
  )


def main(args: Args) -> int:
  least = {"prompt": 1, "answer": 1, "rows": 2, "temperature": 0, "seed": 0, "budgets": 1}
  common.check_numbers(args, **least, window=1, together=1)
  room = args.prompt + args.answer
  chosen = plan.entries(args.methods, [str(budget) for budget in args.budgets], room)
  chosen = [entry for entry in chosen if entry.label in args.methods]
  model, tokenizer = common.load_model(args.checkpoint)
  if room > (most := model.config.max_context):
    raise ValueError(
      f"--answer: found {args.answer}, expected at most {most - args.prompt}: with its prompt, the "
      f"{most} tokens that the model was trained for"
    )
  on = sheets.about(args.checkpoint)
  about = {"model": on["model"], "dtype": model.dtype.name, "source": TESTS.about}
  about |= {name: getattr(args, name) for name in SETTINGS}
  prompts, answers = texts_of(model, tokenizer, args, about)
  about |= {"window": args.window, "texts": zlib.crc32(answers.tobytes())}
  runs = [distinct(answer) for answer in answers]
  path = args.out / "turnover.json"
  there = sheets.held(path, about, "records") or []
  report: dict[str, Any] = {"about": about, "distinct_runs": runs, "records": there}
  done = {(record["method"], record["budget"]) for record in there}
  missing = [entry for entry in chosen if entry.key not in done]
  failed = 0
  with console.bar(len(missing) * args.answer, "methods", "token") as bar:
    for first in range(0, len(missing), args.together):
      common.drop_programs()

      def run(methods: list[kvjax.Method]) -> list[np.ndarray]:
        return follow(model, methods, prompts, answers, lambda n: bar.update(n * len(methods)))

      for entry, curves in measured(missing[first : first + args.together], run):
        if isinstance(curves, str):
          failed += 1
          print(f"{entry.label}, budget {entry.budget}: left out, {curves}")
          continue
        report["records"] += records(entry, curves, args.window, on)
        sheets.write(path, report)
        sheets.write(args.out / "turnover.txt", said(report))
  if report["records"]:
    print(said(report))
  return int(failed > 0)


if __name__ == "__main__":
  common.run(main, Args)
