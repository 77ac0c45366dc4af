"""Your own method, and its equivalence with the full cache under chex."""

import dataclasses
import pathlib

import chex
import tyro

import kvjax
from kvjax.models.decode.generate import generate, pad, prefill
from scripts.examples.tiny import load


@dataclasses.dataclass(frozen=True)
class Recent(kvjax.Method):
  """Attends to the newest `width` tokens: the full cache with one move changed."""

  width: int = 64

  def window(self, at, qpos):
    return kvjax.Window(sinks=0, first=qpos - self.width + 1)


def main(checkpoint: pathlib.Path | None = None) -> None:
  model, tokenizer = load(checkpoint)
  tokens, lengths = pad([tokenizer.encode(text) for text in ("One, two, three, four,", "A, B,")])

  def logits(method):
    caches = method.init_caches(model.spec(batch=2, capacity=64))
    first, caches = prefill(model, tokens, lengths, caches, method)
    return generate(model, first, caches, method, steps=8, return_logits=True)[0].logits

  full = logits(kvjax.Full())
  chex.assert_trees_all_close(logits(Recent(width=64)), full, rtol=1e-5, atol=1e-5)
  moved = abs(logits(Recent(width=4)) - full).max()
  print(f"a window over all changes nothing; one of 4 tokens moves the logits by {moved:.2f}")


if __name__ == "__main__":
  tyro.cli(main)
