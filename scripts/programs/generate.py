"""Write text with a model under one method, streamed to the terminal.

    kvjax generate "Name three rivers."
    kvjax generate "Who wrote the letter?" --method ltri --budget 2048 --context-file book.txt
    kvjax generate "Who wrote the letter?" --method ltri --context-file book.txt --keep caches
    kvjax generate "Once upon a time" --raw --temperature 0.8 --top-p 0.95 --method snapkv
    kvjax generate "Name three rivers." --json | jq .cache_bytes
    kvjax generate --file questions.txt --rows 16 > answers.jsonl
    kvjax generate "Name three rivers." --mesh 2 1

The text goes to standard output, everything else to standard error, so the output can be piped.
With --file each line is a prompt, in a .jsonl file an object with "prompt" or "messages"; answers
are JSON lines in the order in which they end. A row that is free takes the next prompt; short
prompts of about the same length are read several at a time.

With --mesh the model is spread over several devices, with --coordinator over those of several
processes and hosts, all of which run the same command.
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import jax
import numpy as np
import tyro

from kvjax.families.method import Method
from kvjax.methods import labels
from kvjax.models.decode import checks
from kvjax.models.decode.generate import compile_ahead, generate
from kvjax.models.decode.sampling import Sampling
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn.transformer import Transformer
from kvjax.programs import common, console, context, many, turn
from kvjax.programs.keep import Keeper
from kvjax.runtime import arguments, memory, processes


@dataclasses.dataclass(frozen=True)
class Args(common.Answering):
  prompt: Annotated[str | None, tyro.conf.Positional, common.optional("PROMPT")] = None
  """The question, or with --raw the text to continue; "-" reads it from standard input."""
  file: Annotated[pathlib.Path | None, common.optional("FILE")] = None
  """A file of prompts to answer, one per line."""
  rows: int = 8
  """Number of prompts of a file that are answered together."""
  context_file: Annotated[pathlib.Path | None, common.optional("FILE")] = None
  """A text in UTF-8 of any length to put before the prompt."""
  steps: int = 256
  """Maximum number of tokens to generate."""
  top_k: Annotated[int | None, common.optional("TOKENS")] = None
  """Draw from this many of the likeliest tokens only; all by default."""
  min_p: float = 0.0
  """Draw from tokens at least this many times as probable as the likeliest one."""
  stop: Annotated[tuple[str, ...], common.optional("TEXT ...")] = ()
  """Strings that end the text; they are not printed."""
  json: bool = False
  """Print one JSON object at the end: text, tokens, why it ended, seconds, bytes of the caches."""
  prefill_chunk: Annotated[int | None, common.optional("TOKENS")] = None
  """Read the prompt so many tokens at a time; by default at most 16 pieces of a long one, where
  the method allows it."""
  keep: Annotated[pathlib.Path | None, common.optional("FOLDER")] = None
  """Save what is read of a long prompt in this folder, every ten minutes and on Ctrl-C; the same
  command goes on from there."""
  raw: bool = False
  """Continue the prompt as it is, without the chat template."""
  devices: tyro.conf.OmitArgPrefixes[common.Devices] = dataclasses.field(
    default_factory=common.Devices
  )


def encoded(tokenizer: Tokenizer, prompt: Any, args: Args, given: Mapping[str, Any]) -> list[int]:
  """The tokens of a text, or of a chat's messages."""
  if args.raw:
    if not isinstance(prompt, str):
      raise ValueError("--raw: found messages, expected a text")
    return [*tokenizer.prefix, *tokenizer.encode(prompt, bos=False)]
  messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
  if args.system is not None:
    messages = [{"role": "system", "content": args.system}, *messages]
  return tokenizer.chat(messages, **given)


def load(args: Args) -> tuple[Transformer, Tokenizer]:
  how = {"out": sys.stderr, "mesh": args.devices.made()}
  model, tokenizer = common.load_model(args.checkpoint, args.impl, **how)
  return model, tokenizer.continuing() if args.raw else tokenizer


def text_of(args: Args) -> str:
  """The one prompt."""
  prompt = common.read_stdin() if args.prompt == "-" else str(args.prompt)
  if not prompt.strip():
    raise ValueError(f"PROMPT: found {prompt!r}, expected a text")
  return prompt


def answer_file(args: Args, method: Method, sampling: Sampling, given: Mapping[str, Any]) -> int:
  """Answers all prompts of a file; the status is 1 where one failed."""
  prompts = processes.of_first(lambda: many.read(args.file))
  model, tokenizer = load(args)
  how = {"rows": args.rows, "steps": args.steps, "sampling": sampling, "seed": args.seed}
  how |= {"stop": args.stop, "chunk": args.prefill_chunk}
  how |= {"encode": lambda prompt: encoded(tokenizer, prompt, args, given)}
  failed = 0
  with console.bar(len(prompts), "answering", "prompt") as bar:
    for answer in many.answers(model, tokenizer, method, prompts, **how):
      print(json.dumps(answer, ensure_ascii=False), flush=True)
      failed += answer["end"] == "failed"
      bar.update()
  return int(failed > 0)


def answer(
  model: Transformer,
  tokenizer: Tokenizer,
  ids: list[int],
  method: Method,
  sampling: Sampling,
  args: Args,
) -> None:
  """Answers one prompt: its text as it comes, or with --json what is known in the end."""
  spec = model.spec(1, many.rounded(len(ids) + args.steps, model))
  memory.check_host(method, spec, "the prompt and --steps")
  what = f"the prompt and --steps {args.steps}"
  turn.check_context(model, method, 0, len(ids) + args.steps, what)
  taken = turn.Turn()

  def show(texts: list[str]) -> None:
    sys.stdout.write(texts[0])
    sys.stdout.flush()

  def count(tokens: np.ndarray) -> None:
    taken.written += int((tokens >= 0).sum())

  try:
    keep = None if args.keep is None else Keeper(args.keep)
    caches = None if keep else model.init_caches(method, spec.batch, spec.capacity)
    ends = {"sampling": sampling, "stop": tokenizer.ends}
    if caches is not None:
      compile_ahead(model, method, caches, **ends)
    step = console.step(f"reading {len(ids):,} tokens under {method}", sys.stderr)
    how = {"chunk": args.prefill_chunk, "keep": keep}
    logits, caches = turn.read(model, ids, caches, method, spec, taken, step, **how)
    with taken.writing:
      generation, caches = generate(
        model,
        logits,
        caches,
        method,
        steps=args.steps,
        **ends,
        seed=args.seed,
        stop_strings=args.stop,
        tokenizer=tokenizer,
        chunk=8,
        on_text=None if args.json else show,
        on_chunk=count,
      )
  except (jax.errors.JaxRuntimeError, MemoryError, FloatingPointError) as error:
    known = {MemoryError: "memory ran out", FloatingPointError: "numbers overflowed"}
    what = known.get(type(error), "the device failed")
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    above = "" if args.json else " (their text is above)"
    print(end="" if args.json else "\n", flush=True)
    raise SystemExit(
      f"error: {what} after {taken.read:,} of {len(ids):,} tokens had been read and "
      f"{taken.written:,} generated{above}: {reason}"
    ) from error
  if args.json:
    tokens = generation.tokens[0, : generation.lengths[0]].tolist()
    end = "stop" if turn.stopped(tokenizer, tokens, args.steps, args.stop) else "limit"
    said = {"text": generation.texts[0], "tokens": len(tokens), "end": end}
    print(json.dumps({**said, **taken.facts(caches)}, ensure_ascii=False), flush=True)
    return
  print(flush=True)
  print(f"({taken.said(caches)})", file=sys.stderr)


def main(args: Args) -> int | None:
  common.check_numbers(args, budget=1, steps=1, prefill_chunk=1, rows=1)
  arguments.integer("--seed", args.seed, 0, 2**32)
  checks.stop_strings(args.stop, "--stop")
  if (args.prompt is None) == (args.file is None):
    found = "neither" if args.file is None else "both"
    raise ValueError(f"PROMPT, --file: found {found}, expected one of them")
  alone = {"--context-file": args.context_file, "--json": args.json or None, "--keep": args.keep}
  for option, given in alone.items():
    if None not in (args.file, given):
      raise ValueError(f"{option}: found with --file, expected it with PROMPT")
  for option, given in {"--system": args.system, "--template-args": args.template_args}.items():
    if args.raw and given is not None:
      raise ValueError(f"{option}: found with --raw, which has no chat, expected it without")
  method = labels.instance(args.method, args.budget, "--method")
  arguments.chunk(method, args.prefill_chunk)
  if args.keep is not None and not (method.traits.chunkable or method.traits.stream):
    raise NotImplementedError(f"--keep: found {method!r}, which has to see a prompt at once")
  template = common.template_arguments(args.template_args)
  sampling = Sampling(args.temperature, args.top_k, args.top_p, args.min_p)
  if args.file is not None:
    return answer_file(args, method, sampling, template)
  prompt = processes.of_first(lambda: text_of(args))
  model, tokenizer = load(args)
  if args.context_file is not None:
    how = {"system": args.system, "raw": args.raw, "arguments": template}
    file = args.context_file
    ids = processes.of_first(lambda: context.encode(tokenizer, file, prompt, **how))
  else:
    ids = encoded(tokenizer, prompt, args, template)
  answer(model, tokenizer, ids, method, sampling, args)
  return None


if __name__ == "__main__":
  common.run(main, Args)
