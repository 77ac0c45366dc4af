"""Batch generation: ragged prompts, read once, and several drawn answers to each."""

import pathlib

import tyro

import kvjax
from kvjax.models.decode.caches import fork
from kvjax.models.decode.generate import generate, pad, prefill
from kvjax.models.decode.sampling import Sampling
from scripts.examples.tiny import load


def main(checkpoint: pathlib.Path | None = None, answers: int = 2, steps: int = 24) -> None:
  model, tokenizer = load(checkpoint)
  questions = ("Name a river.", "Which animal is the largest, and where does it live?")
  prompts = [tokenizer.chat([{"role": "user", "content": text}]) for text in questions]
  tokens, lengths = pad(prompts, multiple=32)
  method = kvjax.Full()
  caches = method.init_caches(model.spec(len(prompts), capacity=tokens.shape[1] + steps))
  logits, caches = prefill(model, tokens, lengths, caches, method, chunk=32)
  logits, caches = fork(logits, caches, answers)
  out, caches = generate(
    model,
    logits,
    caches,
    method,
    steps=steps,
    sampling=Sampling(temperature=0.8, top_p=0.95),
    stop=tokenizer.ends,
    stop_strings=("\n\n",),
    tokenizer=tokenizer,
    return_logprobs=True,
  )
  for row, text in enumerate(out.texts):
    print(f"{questions[row // answers]} {text!r}, log p = {out.logprobs[row].sum():.1f}")


if __name__ == "__main__":
  tyro.cli(main)
