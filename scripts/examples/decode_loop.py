"""Your own decode loop: one jitted step, one step ahead of the text, any method."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import kvjax
from kvjax.models.decode.generate import join, pad, prefill, split
from scripts.examples.tiny import load


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def step(graph, method, leaves, caches, tokens):
  """Inserts one token per row and takes the likeliest next one."""
  logits, caches = join(graph, leaves).decode(tokens, caches, method)
  return jnp.argmax(logits, -1), caches


def main(checkpoint: pathlib.Path | None = None, steps: int = 32) -> None:
  model, tokenizer = load(checkpoint)
  method = kvjax.StreamingLLM(budget=64)
  caches = method.init_caches(model.spec(batch=1, capacity=256))
  tokens, lengths = pad([tokenizer.encode("The longest river of the world is")], multiple=64)
  logits, caches = prefill(model, tokens, lengths, caches, method)
  graph, leaves = split(model)  # flat leaves are much cheaper to dispatch than a module
  token, text = jnp.argmax(logits, -1), tokenizer.continuing().stream()
  for _ in range(steps):
    token.copy_to_host_async()
    made, (token, caches) = token, step(graph, method, leaves, caches, token)
    print(text.feed(int(np.asarray(made)[0])), end="", flush=True)  # while the step runs
  print(text.flush())
  print(f"{int(caches[0].seen[0])} tokens seen, {int(caches[0].used[0])} kept per layer and head")


if __name__ == "__main__":
  tyro.cli(main)
