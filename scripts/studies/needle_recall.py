"""Measure whether streaming methods find a needle again, and answer right.

    kvjax needle-recall out --length 4096 --samples 20

Every sample hides a number at a depth of its own, far enough from the end to have left the window.
Each method reads it in its own way and answers. Of methods that stream it is known which blocks
each layer retrieved for the question's chunk, the last one of the prompt, and at every step. The
recall is the share of the needle's blocks among them, by layer, over all layers and over those with
a retrieval head; beside it stands what as many blocks drawn at random would have. All methods
attend to about as many tokens (first ones, window and retrieved ones together), the full cache to
everything: it is left out where a text is longer than what the model was trained for. The others
see no distance beyond their window. An answer that fails is kept with its error, and is wrong.

In the folder: needles.json, to which each answer is added as it comes (a further run resumes
there), and needles.txt, the tables.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import kvjax
from kvjax.families import retrieval
from kvjax.families.streamed import Streamed
from kvjax.methods import labels
from kvjax.models.decode.generate import pad, prefill
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn.transformer import Transformer
from kvjax.programs import common, console
from kvjax.programs.evals import fitted, needle, scores, trace
from kvjax.programs.evals.prompt import Reader
from kvjax.programs.evals.task import rng
from kvjax.programs.retrieval_heads import LEAST, STEPS, Sample, Sizes, depths, ltri, streamed
from scripts.studies import sheets

TASK, SEED = "needle", 0  # whose texts, keys and numbers these are
CHUNK = 2048  # tokens that methods read at a time which would take any number
ABLATION = {
  "ltri": {},
  "ltri, not persistent": {"persistent": False},
  "ltri, all heads": {"heads": None},
  "ltri, no voting": {"voting": False},
}
VARIANTS = {
  "ltri, votes by rank": {"ballot": "rank"},
  "ltri, top layer's blocks": {"from_top": True},
  "ltri, by rank, top's blocks": {"ballot": "rank", "from_top": True},
  "ltri, by rank, top's blocks, beside": {"ballot": "rank", "from_top": True, "beside": 4},
  "ltri, static vectors": {"index": "static"},
  "ltri, mean vectors": {"index": "mean"},
}


# Of the arguments those that another run of the same answers may have otherwise.
SAID_ELSEWHERE = "out", "methods", "unknown_fit", "first"


@dataclasses.dataclass(frozen=True)
class Args(Sizes):
  out: Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
  """Folder of the answers and tables."""
  heads: Annotated[pathlib.Path | None, common.optional("FILE")] = None
  """Retrieval heads that `kvjax retrieval-heads` found; all heads together by default. They are
  refused where they were found on these needles."""
  unknown_fit: bool = False
  """Take heads that do not say what they were found on; the answers' settings say so."""
  samples: int = 20
  """Needles, each in a text of its own."""
  first: int = 0
  """Answer only the first so many of them; 0: all."""
  length: int = 8000
  """Tokens of a prompt and its answer."""
  batch: int = 1
  """Prompts that are answered side by side."""
  methods: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")] = ()
  """Names of those wanted, as in the table; all by default."""
  checkpoint: common.Checkpoint = None


def contestants(args: Args) -> dict[str, kvjax.Method]:
  """The methods by the names that the table gives them, at one budget."""
  shared, budget = streamed(args), args.init + args.window + args.retrieved * args.block
  whole = ltri(args, heads=None if args.heads is None else labels.read_heads(args.heads))
  found: dict[str, kvjax.Method] = {
    "full": kvjax.Full(),
    "streaming_llm": kvjax.StreamingLLM(budget),
    "infllm": kvjax.InfLLM(**shared),
    # Its blocks hold the needle whatever it would retrieve (Ltri-LLM, Tab. 1).
    "infllm, injected": kvjax.InfLLM(**shared, inject=min(2, args.retrieved)),
  }
  for name, values in (ABLATION | VARIANTS).items():
    if whole.heads is not None or "heads" not in values:
      found[name] = dataclasses.replace(whole, **values)
  return found


def found_on(args: Args) -> list[fitted.Fitted]:
  """Records of what heads and settings were found on.

  Raises:
    ValueError: they do not say.
  """
  held = [*fitted.of_label(f"ltri:{args.settings}")]
  if args.heads is not None:
    held.append(fitted.Fitted(f"--heads {args.heads}", fitted.of(args.heads)))
  fitted.refuse_unknown(held, args.unknown_fit)
  return held


def sample(tokenizer: Tokenizer, args: Args, index: int) -> Sample:
  """Number `index`, at a depth of its own."""
  every = depths(args, args.length, args.samples, rng("needle depths", SEED, args.samples))
  draw, count = rng(TASK, SEED, index), Reader(tokenizer).count
  sizes = {"length": args.length, "max_new_tokens": STEPS}
  return Sample.of(tokenizer, needle.build(count, **sizes, draw=draw, depth=every[index]))


def stepper(model: Transformer, method: kvjax.Method) -> Callable:
  """One greedy step: the likeliest token goes in; it, new logits, caches, and retrieved blocks."""
  decode = trace.stepper(model, method)

  def step(caches: Any, logits: Any) -> Any:
    token = jnp.argmax(logits, -1).astype(jnp.int32)
    logits, caches, reports = decode(caches, token)
    blocks = [report["retrieved"] for report in reports if "retrieved" in report]
    return token, logits, caches, jnp.stack(blocks) if blocks else None  # [L, B, R]

  return step


def share(found: np.ndarray, wanted: Sequence[int]) -> float:
  """Share of the wanted blocks that were found."""
  return round(float(np.isin(wanted, found).mean()), 3)


def answer(
  model: Transformer,
  tokenizer: Tokenizer,
  method: kvjax.Method,
  samples: Sequence[Sample],
  room: int,
) -> list[dict[str, Any]]:
  """Of each sample a method's answer, and its recall by layer: of the question, and by step."""
  caches = method.init_caches(model.spec(len(samples), room))
  streams = isinstance(method, Streamed)
  wanted = [sample.blocks(method) if streams else [] for sample in samples]
  if streams and method.inject:
    forced = [(blocks + [-1] * method.inject)[: method.inject] for blocks in wanted]
    caches = retrieval.injected(caches, jnp.array(forced))
  tokens, lengths = pad([sample.ids for sample in samples], multiple=room - STEPS)
  traits = method.traits
  # What forgets as it reads needs no whole prompt at once.
  chunk = CHUNK if traits.chunkable and not traits.positional else None
  logits, caches = prefill(model, tokens, lengths, caches, method, chunk=chunk)
  kept = np.stack([retrieval.kept(cache) for cache in caches]) if streams else None
  step = stepper(model, method)
  rows = [{"said": [], "recall": [], "live": True} for _ in samples]
  for _ in range(STEPS):
    token, logits, caches, blocks = step(caches, logits)
    for i, row in enumerate(rows):
      if row["live"] and blocks is not None:
        row["recall"].append([share(layer, wanted[i]) for layer in np.asarray(blocks)[:, i]])
      row["live"] &= int(token[i]) not in tokenizer.ends
      row["said"] += [int(token[i])] * row["live"]
    if not any(row["live"] for row in rows):
      break
  made = []
  for i, (row, sample) in enumerate(zip(rows, samples, strict=True)):
    text = " ".join(tokenizer.decode(row["said"]).split())
    asked = [] if kept is None else [share(layer, wanted[i]) for layer in kept[:, i]]
    right = scores.all_found(text, sample.row) == 1
    made.append({"answer": text, "right": right, "asked": asked, "recall": row["recall"]})
  return made


def rows_of(
  method: kvjax.Method, samples: Sequence[Sample], give: Callable[..., list[dict[str, Any]]]
) -> list[dict[str, Any]]:
  """Results of a method and the needles' depths; the error of a sample that fails alone, too."""
  try:
    rows = give(method, samples)
  except (ArithmeticError, MemoryError, jax.errors.JaxRuntimeError) as error:
    if len(samples) > 1:
      return [row for sample in samples for row in rows_of(method, [sample], give)]
    rows = [{"answer": "", "right": False, "asked": [], "recall": [], "failed": repr(error)}]
  stood = [round(sample.row.about["depth"], 3) for sample in samples]
  return [{**row, "depth": depth} for row, depth in zip(rows, stood, strict=True)]


def that_retrieved(found: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
  """Of each method that streams its answers that did not fail."""
  parts = {name: [a for a in answers if a["recall"]] for name, answers in found.items()}
  return {name: answers for name, answers in parts.items() if answers}


def mean_recall(answers: Sequence[dict[str, Any]]) -> np.ndarray:
  """Recall by step and layer [steps, L], mean over answers; shorter answers end sooner."""
  steps = max(len(found["recall"]) for found in answers)
  rows = [[a["recall"][i] for a in answers if len(a["recall"]) > i] for i in range(steps)]
  return np.stack([np.mean(row, 0) for row in rows])


def chance(method: kvjax.Method, length: int) -> float | None:
  """Recall of blocks drawn from all that leave the window in so many tokens; None: of no choice."""
  if not isinstance(method, Streamed) or method.inject:
    return None
  gone = (length - method.init_tokens - method.local) // method.block
  return min(1.0, method.retrieved / max(gone, 1))


def asking(method: kvjax.Method, layers: int) -> list[int]:
  """Layers whose own queries choose blocks: those with a retrieval head, or all."""
  heads = method.heads if isinstance(method, kvjax.Ltri) else None
  return list(range(layers)) if heads is None else sorted(layer for layer, *_ in heads)


def table(
  found: dict[str, list[dict[str, Any]]], methods: dict[str, kvjax.Method], length: int
) -> str:
  """A line for each method: right answers, recall over steps and for the question, by chance."""
  rows, retrieved = [], that_retrieved(found)
  for name, answers in found.items():
    right = sum(a["right"] for a in answers)
    cells = ["–"] * 5
    if part := retrieved.get(name):
      asked, drawn = np.mean([a["asked"] for a in part], 0), chance(methods[name], length)
      own = asked[asking(methods[name], len(asked))]
      means = [f"{x.mean():.3f}" for x in (mean_recall(part), asked, own)]
      best = f"{asked.max():.2f} ({asked.argmax()})"
      cells = [*means, "–" if drawn is None else f"{drawn:.3f}", best]
    rows.append([name, f"{right} / {len(answers)}", *cells])
  head = ("method", "right", "steps", "question", "layers that ask", "by chance", "best layer")
  return console.table(head, rows)


def layers_table(found: dict[str, list[dict[str, Any]]], methods: dict[str, kvjax.Method]) -> str:
  """A line for each layer: recall for the question under each method, * where the layer asks."""
  columns, retrieved = [], that_retrieved(found)
  for name, answers in retrieved.items():
    asked = np.mean([a["asked"] for a in answers], 0)
    own = asking(methods[name], len(asked))
    columns.append([f"{x:.2f}{'*' if i in own else ' '}" for i, x in enumerate(asked)])
  lines = zip(*columns, strict=True)
  rows = [[str(i), *line] for i, line in enumerate(lines)]
  return console.table(("layer", *retrieved), rows, left=())


def main(args: Args) -> None:
  common.check_numbers(args, **LEAST, samples=1, first=0, length=1, batch=1)
  methods = contestants(args)
  if unknown := set(args.methods) - set(methods):
    raise ValueError(f"--methods: found {sorted(unknown)}, expected some of {list(methods)}")
  about = {k: v for k, v in dataclasses.asdict(args).items() if k not in SAID_ELSEWHERE}
  about |= {
    k: None if v is None else v.name for k, v in about.items() if k in ("heads", "checkpoint")
  }
  held = found_on(args)
  about |= {"fitted": [each.told() for each in held]}
  about |= {"methods": {name: repr(method) for name, method in methods.items()}}
  path = args.out / "needles.json"
  answers = sheets.held(path, about, "answers") or {}  # method -> sample number -> answer
  model, tokenizer = common.load_model(args.checkpoint)
  if args.length > (most := model.config.max_context):
    methods.pop("full")
    print(f"full: left out, the model was trained for {most:,} tokens, not for {args.length:,}")
  names = [name for name in args.methods or methods if name in methods]
  room = -(-(args.length + STEPS) // args.block) * args.block
  count = min(args.first or args.samples, args.samples)
  samples = [sample(tokenizer, args, index) for index in range(count)]
  if held:
    fitted.check(held, TASK, SEED, [asked.row for asked in samples])
  give = lambda method, asked: answer(model, tokenizer, method, asked, room)  # noqa: E731
  with console.bar(count * len(names), "answers", "answer") as bar:
    for start in range(0, count, args.batch):
      part = range(count)[start : start + args.batch]
      for name in names:
        done = answers.setdefault(name, {})
        if left := [index for index in part if str(index) not in done]:
          rows = rows_of(methods[name], [samples[index] for index in left], give)
          done |= {str(index): row for index, row in zip(left, rows, strict=True)}
          sheets.write(path, json.dumps({"about": about, "answers": answers}))
        bar.update(len(part))
      # A run that is stopped leaves its table.
      found = {name: list(answers[name].values()) for name in methods if answers.get(name)}
      text = table(found, methods, args.length - STEPS)
      if that_retrieved(found):
        text += "\n\n" + layers_table(found, methods)
      sheets.write(args.out / "needles.txt", text)
  print(text)


if __name__ == "__main__":
  common.run(main, Args)
