"""Score methods on a converted checkpoint: tasks × methods × budgets × lengths.

    kvjax evaluate --list
    kvjax evaluate --tasks needle kl --methods streaming_llm snapkv --out results
    kvjax evaluate --tasks ruler --methods all --budgets 256 0.25 --lengths 1024 4096 \\
        --samples 50 --modes aware agnostic --out results

Every sample is a line of <out>/rows.jsonl: prompt hash, answer, score, measured bytes of its cache,
timings. A stopped run resumes where it stopped when it is started again; with more tasks, methods,
budgets, lengths or samples it adds what is missing. The table at the end is also written to
<out>/summary.txt and .json.

Parts of an evaluation can run in folders of their own, at the same time or on several machines of
one kind, and be merged:

    kvjax evaluate --tasks ruler --methods h2o --out a        here
    kvjax evaluate --tasks ruler --methods snapkv --out b     and there
    kvjax evaluate --only-report --add a b --out results

Such a report may merge folders of several versions of kvjax and batch sizes; it names them.

Heads and gates from files raise an error if they were fitted on texts, keys or seeds of the rows.
Files without a record of what they were fitted on, such as published patterns, need
`--unknown-fit`, and their rows are marked.

Every scorer is tried before the model answers: a task whose metric is not installed is reported and
skipped, and the exit status is 1.

A folder records the weights, tokenizer, data, method settings and your own methods' code. If one of
them has changed, the program names it and adds nothing.

With --mesh the model is spread over several devices, with --coordinator over those of several
processes and hosts, all of which run the same command: they answer every row together. The first
one makes the rows, scores and writes them. A model that fits one host is evaluated faster in parts.

The same seed gives the same rows. On a GPU this requires the same compiled programs, which are kept
in the cache folder: newly compiled ones may sum in another order, which can change close
decisions.
"""

import dataclasses
import functools
import json
import os
import pathlib
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import jax
import tyro

import kvjax
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn.transformer import Transformer
from kvjax.programs import common, console, methods
from kvjax.programs.evals import cells as cells_of
from kvjax.programs.evals import fitted, local, origin, plan, registry, sandbox, store, summary
from kvjax.programs.evals import trace as tracing
from kvjax.programs.evals.plan import Cell, Entry, Mode
from kvjax.programs.evals.prompt import Reader
from kvjax.programs.evals.run import Runner
from kvjax.programs.evals.store import TRACES, traces
from kvjax.runtime import processes

VERSION = 3  # of the rows and what they mean
TRACED = ("method", "budget", "length", "steps")  # what names a trace


@dataclasses.dataclass(frozen=True)
class Args:
  tasks: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")] = ("needle", "kl")
  """Tasks or families of tasks; --list names them."""
  methods: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")] = common.USUAL
  """Registered methods, module:Class for your own, or "all". name:field=value,… sets further
  fields; if the value names a .tsv of gates or a .json of heads, the file is read. outer+inner is a
  method over another (quantised:bits=4+snapkv). The full cache always runs: the others are compared
  with it."""
  budgets: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TOKENS ...")] = ("0.25",)
  """Tokens that a method keeps or reads: a number, or a share of the length."""
  lengths: Annotated[tuple[int, ...], tyro.conf.arg(metavar="TOKENS ...")] = (2048,)
  """Tokens of prompt and answer together."""
  answer_tokens: Annotated[int | None, common.optional("TOKENS")] = None
  """Maximum tokens of an answer in tasks whose answers end in a box (MATH-500, AIME, gsm8k_chat);
  32,768 by default. The prompt and the answer never take more than --lengths together."""
  samples: int = 50
  """Rows of every task."""
  modes: tuple[Mode, ...] = ("aware",)
  """aware: the prompt is read at once. agnostic: the context is compressed before the question is
  seen. second: a second question about the same text follows the answer to the first, and its
  answer is scored. reuse: the context is compressed once, and two questions are asked, each on a
  copy of its cache; the score is their mean."""
  seed: int = 0
  """Random seed of all rows."""
  checkpoint: common.Checkpoint = None
  batch: Annotated[int | None, common.optional("ROWS")] = None
  """Rows at a time; 25 on a GPU by default, else 5."""
  memory: Annotated[float | None, common.optional("GB")] = None
  """Memory that caches may fill while a prompt is read; a third of the GPU's by default, else 4."""
  impl: common.Impl = "auto"
  """Implementation of the methods' operations."""
  no_chat: bool = False
  """Ask questions as plain text, without a chat template."""
  data: Annotated[pathlib.Path | None, common.optional("FOLDER")] = None
  """Folder of local data sets; by default $KVJAX_DATA, or a folder in the user's cache."""
  unknown_fit: bool = False
  """Also run heads and gates without a record of what they were fitted on, such as published ones;
  their rows are marked as unknown."""
  run_code: bool = False
  """Run programs that the model writes, to score them: in namespaces with limits, without access to
  your files or the network (KVJAX_RUN_CODE=1 is the same). Use only on machines you can afford to
  lose."""
  unsafe: bool = False
  """With --run-code: if namespaces are not available, run them with limits only and with your
  permissions (KVJAX_RUN_CODE=unsafe is the same)."""
  add: Annotated[tuple[pathlib.Path, ...], common.optional("FOLDER ...")] = ()
  """First add rows and traces of these folders, which must have equal settings (with --only-report,
  kvjax's version and batch may differ). A folder that is still being written adds its finished
  rows."""
  only_report: bool = False
  """Run nothing and load no model: only merge the folders of --add and report."""
  trace: Annotated[int | None, common.optional("STEPS")] = None
  """Also record the tiles that every method visits, by layer and step, while it decodes this many
  tokens after the first row of the first task at the greatest length."""
  out: Annotated[pathlib.Path, tyro.conf.arg(metavar="FOLDER")] = pathlib.Path("evaluation")
  """Folder of the results; existing results are extended."""
  list: bool = False
  """List tasks and methods, and stop."""
  devices: tyro.conf.OmitArgPrefixes[common.Devices] = dataclasses.field(
    default_factory=common.Devices
  )


def listing() -> str:
  """Tasks and methods."""
  tasks = []
  for task in registry.TASKS.values():
    there = all(map(local.there, task.needs))
    tasks.append((task.family, task.name, task.summary + ": not on this machine" * (not there)))
  return f"{console.table(('family', 'task', ''), tasks, left=(0, 1, 2))}\n\n{methods.listing()}"


def settings(args: Args, model: Transformer, tokenizer: Tokenizer, batch: int) -> dict[str, Any]:
  """Settings that the numbers of a folder depend on."""
  return {
    "version": VERSION,
    "model": common.model_name(args.checkpoint),
    "weights": origin.weights(model),
    "tokenizer": origin.tokenizer(tokenizer),
    "config": model.config.to_json(),
    "dtype": model.dtype.name,
    "impl": args.impl,
    "chat": not args.no_chat,
    "answer_tokens": args.answer_tokens,
    "seed": args.seed,
    "batch": batch,
    "mesh": None if model.mesh is None else [*model.mesh.devices.shape],
    "device": jax.devices()[0].device_kind,
    "jax": jax.__version__,
    "kvjax": kvjax.__version__,
  }


def evaluate(
  args: Args, model: Transformer, tokenizer: Tokenizer, notes: list[str] | None = None
) -> list[dict[str, Any]]:
  """Runs what the folder does not have yet; all rows of the folder, on the first process.

  `notes` takes what is not run, and why.

  Raises:
    ValueError: a length is more than the model was converted for; nothing has run then.
  """
  notes = [] if notes is None else notes
  config = model.config
  if config.limited and max(args.lengths) > config.max_context:
    raise ValueError(
      f"--lengths: found {max(args.lengths)}, expected at most max_context = "
      f"{config.max_context}, which the model was converted for"
    )
  gpu = jax.default_backend() == "gpu"
  batch = args.batch or (25 if gpu else 5)
  limit = processes.of_first(lambda: args.memory * 1e9 if args.memory else _memory())
  chosen = entries(args)
  results = _results(args, settings(args, model, tokenizer, batch))
  try:
    groups = {
      length: plan.groups(entries, model, batch, length, limit)
      for length, entries in chosen.items()
    }
    made: Iterable[Cell | str] = cells_of.of_first(functools.partial(_cells, args, tokenizer))
    if any(entry.fitted for entries in chosen.values() for entry in entries):
      made = list(made)  # refused before anything is run
      for cell in made:
        if isinstance(cell, Cell):
          held = dict.fromkeys(x for entry in chosen[cell.length] for x in entry.fitted)
          fitted.check(list(held), cell.task.name, args.seed, cell.rows)
    runner, last = Runner(model, tokenizer, batch), None
    refused: dict[Any, str] = {}
    with console.bar(0, "evaluating", "row") as bar:
      for cell in made:  # one after another: its rows are made, answered and saved
        if isinstance(cell, str):
          notes.append(cell)
          continue
        for mode in (mode for mode in args.modes if _applies(cell, mode, notes)):
          asked = dataclasses.replace(cell, mode=mode)
          origin.check(results.rows, asked, chosen[cell.length])
          _run(runner, asked, groups[cell.length], results, refused, bar)
        if last is None or cell.length > last.length:
          last = cell
    notes += refused.values()
    if args.trace and last is not None:
      trace(args.out, last, chosen[last.length], model, args.trace)
    for note in dict.fromkeys(notes):
      print(f"not run: {note}", file=sys.stderr)
    return [row for row in results.rows.values() if row is not None]
  finally:
    results.close()


def _results(args: Args, made: dict[str, Any]) -> store.Store | store.Told:
  """The folder with what `--add` adds, open on the first process; the others know its keys."""
  held: list[store.Store] = []

  def keys() -> list[Any]:
    held.append(store.Store(args.out, made))
    add(held[0], args.add)
    return list(held[0].rows)

  try:
    there = processes.of_first(keys)
  except BaseException:
    for each in held:
      each.close()
    raise
  return held[0] if held else store.Told(there)


def _cells(args: Args, tokenizer: Tokenizer) -> Iterator[Cell | str]:
  """Cells that are asked for, made one after another."""
  tasks = registry.with_answers(registry.choose(args.tasks), args.answer_tokens)
  reader = {chat: Reader(tokenizer, chat=chat and not args.no_chat) for chat in (False, True)}
  turns = tuple(dict.fromkeys(plan.TURNS[mode] for mode in args.modes))
  return cells_of.build(tasks, args.lengths, args.samples, args.seed, reader, turns)


def entries(args: Args) -> dict[int, list[plan.Entry]]:
  """The methods by length.

  Raises:
    ValueError: a label is not one, or does not say what it was fitted on.
  """
  labels = kvjax.METHODS if args.methods == ("all",) else args.methods
  made = {length: plan.entries([*labels], args.budgets, length) for length in args.lengths}
  for entry in (entry for each in made.values() for entry in each):
    fitted.refuse_unknown(entry.fitted, args.unknown_fit)
  return made


def add(results: store.Store, folders: Sequence[pathlib.Path], *, to_report: bool = False) -> None:
  """Takes over what other folders have and this one lacks: rows, and traces."""
  for folder in folders:
    rows = results.add(folder, to_report=to_report)
    print(f"{folder}: {rows:,} rows added", file=sys.stderr)
    made = traces(results.folder)
    new = [trace for trace in traces(folder) if not _traced(made, trace)]
    if new:
      common.write(results.folder / TRACES, json.dumps(made + new))


def only_report(args: Args) -> list[dict[str, Any]]:
  """All rows of the folder, with those of `--add`; no model is asked what its settings are."""
  if args.add:
    folder = next(filter(store.begun, (args.out, *args.add)), args.add[0])
    results = store.Store(args.out, store.settings_of(folder))
    try:
      add(results, args.add, to_report=True)
    finally:
      results.close()
  return store.read(args.out)


def _memory() -> float:
  """A third of the device's memory, or 4 GB where it does not say."""
  stats = jax.devices()[0].memory_stats() or {}
  return stats.get("bytes_limit", 12e9) / 3


def _applies(cell: Cell, mode: str, notes: list[str]) -> bool:
  """True if a cell has as many turns as the mode, and a context to compress before its question."""
  if cell.turns != plan.TURNS[mode]:
    return False
  apart = mode in ("agnostic", "reuse")
  if not apart or (
    not (cell.task.forced or cell.task.rolling) and all(prompt.head for prompt in cell.prompts)
  ):
    return True
  notes.append(f"{cell.task.name}, {mode}: there is no question apart from a context")
  return False


def _run(
  runner: Runner,
  cell: Cell,
  groups: Sequence[Sequence[Entry]],
  results: store.Store | store.Told,
  refused: dict[Any, str],
  bar: Any,
) -> None:
  """Runs what is missing; each row is saved as it comes, and what methods refuse is noted."""
  missing = {
    entry.key: [
      i
      for i in range(len(cell.rows))
      if (cell.task.name, cell.length, cell.mode, *entry.key, i) not in results.rows
      and (cell.length, cell.mode, *entry.key) not in refused
    ]
    for group in groups
    for entry in group
  }
  left = {key: len(indices) for key, indices in missing.items()}
  bar.total += sum(left.values())
  for entry, rows in runner.run(cell, groups, missing):
    if isinstance(rows, Exception):
      what = f"{entry.label}, {cell.mode}, {cell.length:,} tokens"
      refused[cell.length, cell.mode, *entry.key] = f"{what}: {rows}"
      done = left[entry.key]
    else:
      results.append(rows)
      done = len(rows)
    left[entry.key] -= done
    bar.set_postfix_str(f"{cell.task.name} {cell.length} {cell.mode} {entry.label}", refresh=False)
    bar.update(done)


def trace(
  folder: pathlib.Path, cell: Cell, entries: Sequence[Entry], model: Transformer, steps: int
) -> None:
  """Adds to <folder>/traces.json what methods report while they decode; one that has it is kept."""
  made = processes.of_first(lambda: traces(folder))
  for entry in entries:
    named = {"method": entry.label, "budget": entry.budget, "length": cell.length, "steps": steps}
    if _traced(made, named):
      continue
    with console.step(f"tracing {entry.label} over {steps} steps", sys.stderr):
      try:
        reports = tracing.trace(model, entry.method, cell.prompts[0].ids, steps)
      except (ValueError, NotImplementedError) as error:
        print(f"not traced: {entry.label}: {error}", file=sys.stderr)
        continue
    made.append({**named, "task": cell.task.name, "reports": tracing.plain(reports)})
    if jax.process_index() == 0:
      common.write(folder / TRACES, json.dumps(made))


def _traced(made: Sequence[dict[str, Any]], named: dict[str, Any]) -> bool:
  return any(all(other[name] == named[name] for name in TRACED) for other in made)


def report(folder: pathlib.Path, rows: list[dict[str, Any]], command: str) -> str:
  """The table of a folder and the command that made it, which also writes them there."""
  settings = store.settings_of(folder)
  summaries = summary.summarise(rows, settings)
  of = f"rows of kvjax {settings['kvjax']}, in batches of {settings['batch']}"
  text = f"{summary.table(summaries)}\n\n  {of}\n  made with: {command}"
  common.write(folder / "summary.txt", text)
  common.write(folder / "summary.json", [dataclasses.asdict(s) for s in summaries])
  return text


def main(args: Args) -> int:
  """Runs the program; 1 where something was not run since a package is missing, else 0."""
  notes: list[str] = []
  common.check_numbers(args, samples=1, batch=1, trace=1, lengths=1, answer_tokens=1)
  if args.memory is not None and not 0 < args.memory < float("inf"):
    raise ValueError(f"--memory: found {args.memory}, expected a number above 0")
  if args.data:
    os.environ["KVJAX_DATA"] = str(args.data.absolute())
  if args.unsafe and not args.run_code:
    raise ValueError("--unsafe: found it alone, expected it beside --run-code")
  if args.run_code:
    os.environ[sandbox.ALLOW] = sandbox.UNSAFE if args.unsafe else "1"
  if args.list:
    print(listing())
    return 0
  first = jax.process_index() == 0
  if first:  # before a model is loaded
    for folder in args.add:
      store.settings_of(folder)
  if args.only_report:
    rows = only_report(args) if first else []
  else:
    if first:
      registry.with_answers(registry.choose(args.tasks), args.answer_tokens)
    entries(args)
    mesh = args.devices.made()
    model, tokenizer = common.load_model(args.checkpoint, args.impl, out=sys.stderr, mesh=mesh)
    try:
      rows = evaluate(args, model, tokenizer, notes)
    except KeyboardInterrupt:
      if not first:
        raise
      path = args.out / store.ROWS
      done = len(store.read(args.out)) if path.is_file() else 0
      text = f"stopped: {done:,} rows are in {path}; the same command adds the others"
      raise SystemExit(f"\n{text}") from None
  if not first:
    return 0
  if not rows:
    raise ValueError(f"{args.out}: found no rows: nothing was run, or every cell was refused")
  print(report(args.out, rows, shlex.join(["kvjax", "evaluate", *sys.argv[1:]])))
  print(f"\n  {len(rows):,} rows in {args.out / store.ROWS}")
  return int(any(isinstance(note, cells_of.Lacking) for note in notes))


if __name__ == "__main__":
  common.run(main, Args)
