"""Write text with a model under one method, streamed to the terminal.

    kvjax generate "Name three rivers."
    kvjax generate "Who wrote the letter?" --method ltri --budget 2048 --context-file book.txt
    kvjax generate "Once upon a time" --raw --temperature 0.8 --top-p 0.95 --method snapkv
    kvjax generate --file questions.txt --rows 16 > answers.jsonl

The text goes to standard output, everything else to standard error, so the output can be piped.
With --file each line is a prompt, in a .jsonl file an object with "prompt" or "messages"; answers
are JSON lines in the order in which they end. A row that is free takes the next prompt.
"""

import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import jax
import numpy as np
import tyro

from kvjax.families.method import Method
from kvjax.methods import labels
from kvjax.models.decode.generate import generate, prefill
from kvjax.models.decode.sampling import Sampling
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.programs import common, console, context, many


@dataclasses.dataclass(frozen=True)
class Args:
  """The prompt, the method, and how tokens are drawn."""

  prompt: Annotated[str | None, tyro.conf.Positional, common.optional("PROMPT")] = None
  """The question, or with --raw the text to continue; "-" reads it from standard input."""
  file: Annotated[pathlib.Path | None, common.optional("FILE")] = None
  """Prompts to answer in place of one, a line each."""
  rows: int = 8
  """Prompts of a file that are answered side by side."""
  method: Annotated[str, tyro.conf.arg(metavar="NAME")] = "full"
  """A method (`kvjax methods` lists them), with settings: snapkv:window_size=16,
  quantised:bits=4+snapkv, module:Class."""
  budget: Annotated[int, tyro.conf.arg(metavar="TOKENS")] = 1024
  """Tokens that the method keeps or reads per step, where it has such a setting."""
  context_file: Annotated[pathlib.Path | None, common.optional("FILE")] = None
  """A text in UTF-8 of any length to put before the prompt."""
  steps: int = 256
  """Tokens to generate at most."""
  temperature: float = 0.0
  """0 takes the likeliest token; higher values draw more freely."""
  top_k: Annotated[int | None, common.optional("TOKENS")] = None
  """Draw from this many of the likeliest tokens only; all by default."""
  top_p: float = 1.0
  """Draw from the fewest likeliest tokens whose probabilities sum to this."""
  min_p: float = 0.0
  """Draw from tokens at least this many times as probable as the likeliest one."""
  seed: int = 0
  """Random seed of the draws."""
  stop: Annotated[tuple[str, ...], common.optional("TEXT ...")] = ()
  """Strings that end the text; they are not printed."""
  prefill_chunk: Annotated[int | None, common.optional("TOKENS")] = None
  """Read a long prompt so many tokens at a time, which takes less memory; at once by default."""
  raw: bool = False
  """Continue the prompt as it is, without the chat template."""
  system: Annotated[str | None, common.optional("TEXT")] = None
  """System message of the chat."""
  template_args: Annotated[str | None, common.optional("JSON")] = None
  """Further values that the chat template reads: '{"enable_thinking": false}', tools, documents."""
  impl: Literal["auto", "reference", "pallas", "jax-triton"] = "auto"
  """Implementation of the method's operations."""
  checkpoint: common.Checkpoint = None
  """A checkpoint, a Hugging Face folder, a .gguf file or a model of the hub (owner/name);
  SmolLM2-135M-Instruct by default."""


def encoded(tokenizer: Tokenizer, prompt: Any, args: Args, given: Mapping[str, Any]) -> list[int]:
  """The tokens of a text, or of a chat's messages."""
  if args.raw:
    return [*tokenizer.prefix, *tokenizer.encode(prompt, bos=False)]
  messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
  if args.system is not None:
    messages = [{"role": "system", "content": args.system}, *messages]
  return tokenizer.chat(messages, **given)


def answer_file(args: Args, method: Method, sampling: Sampling, given: Mapping[str, Any]) -> int:
  """Answers all prompts of a file; the status is 1 where one failed."""
  prompts = many.read(args.file)
  if args.raw and not all(isinstance(prompt, str) for prompt in prompts):
    raise ValueError("--raw: found messages in --file, expected texts")
  model, tokenizer = common.load_model(args.checkpoint, args.impl, out=sys.stderr)
  ids = [encoded(tokenizer, prompt, args, given) for prompt in prompts]
  how = {"rows": args.rows, "steps": args.steps, "sampling": sampling, "seed": args.seed}
  how |= {"stop": args.stop, "chunk": args.prefill_chunk}
  failed = 0
  with console.bar(len(ids), "answering", "prompt") as bar:
    for answer in many.answers(model, tokenizer, method, ids, **how):
      print(json.dumps(answer, ensure_ascii=False), flush=True)
      failed += answer["end"] == "failed"
      bar.update()
  return int(failed > 0)


def main(args: Args) -> int | None:
  common.check_numbers(args, budget=1, steps=1, seed=0, prefill_chunk=1, rows=1)
  if (args.prompt is None) == (args.file is None):
    found = "neither" if args.file is None else "both"
    raise ValueError(f"PROMPT, --file: found {found}, expected one of them")
  if None not in (args.file, args.context_file):
    raise ValueError("--context-file: found with --file, expected it with PROMPT")
  method = labels.instance(args.method, args.budget, "--method")
  given = common.template_arguments(args.template_args)
  sampling = Sampling(args.temperature, args.top_k, args.top_p, args.min_p)
  if args.file is not None:
    return answer_file(args, method, sampling, given)
  prompt = common.read_stdin() if args.prompt == "-" else str(args.prompt)
  if not prompt.strip():
    raise ValueError(f"PROMPT: found {prompt!r}, expected a text")
  model, tokenizer = common.load_model(args.checkpoint, args.impl, out=sys.stderr)
  if args.context_file is not None:
    ids = context.encode(
      tokenizer, args.context_file, prompt, system=args.system, raw=args.raw, arguments=given
    )
  else:
    ids = encoded(tokenizer, prompt, args, given)

  tokens = common.right_padded(ids, multiple=64)
  spec = model.spec(1, tokens.shape[1] + args.steps)
  context.check_room(method, spec)
  print(f"reading {len(ids):,} tokens under {method}", file=sys.stderr)
  done = [0, 0]  # tokens that have been read, and generated
  try:
    caches = method.init_caches(spec)
    with console.bar(len(ids), "reading", "token") as bar:

      def read(count: int, _: int) -> None:
        bar.update(count - done[0])
        done[0] = count

      logits, caches = prefill(
        model,
        tokens,
        np.array([len(ids)]),
        caches,
        method,
        chunk=args.prefill_chunk,
        on_chunk=read,
      )
      logits.block_until_ready()
      read(len(ids), len(ids))

    def show(texts: list[str]) -> None:
      sys.stdout.write(texts[0])
      sys.stdout.flush()

    def count(tokens: np.ndarray) -> None:
      done[1] += int((tokens >= 0).sum())

    begin = time.perf_counter()
    generation, _ = generate(
      model,
      logits,
      caches,
      method,
      steps=args.steps,
      sampling=sampling,
      seed=args.seed,
      stop=tokenizer.ends,
      stop_strings=args.stop,
      tokenizer=tokenizer,
      chunk=8,
      on_text=show,
      on_chunk=count,
    )
  except (jax.errors.JaxRuntimeError, MemoryError, FloatingPointError) as error:
    print(flush=True)
    known = {MemoryError: "memory ran out", FloatingPointError: "numbers overflowed"}
    what = known.get(type(error), "the device failed")
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    raise SystemExit(
      f"error: {what} after {done[0]:,} of {len(ids):,} tokens had been read and {done[1]:,} "
      f"generated (their text is above): {reason}"
    ) from error
  print(flush=True)
  seconds, n = time.perf_counter() - begin, int(generation.lengths[0])
  print(f"({n} tokens in {seconds:.1f} s, compilation included)", file=sys.stderr)
  return None


if __name__ == "__main__":
  common.run(main, Args)
