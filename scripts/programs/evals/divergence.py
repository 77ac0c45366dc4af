"""Teacher-forced divergence from the full cache: needs no skill at answering.

A natural text is read up to a point; from there on every token is given, and each method predicts
the next one from its own cache. Reported per position: KL(full ‖ method) in nats, whether both
name the same likeliest token, and −log p of the text's own token (the mean's exponential is the
perplexity).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.programs.evals import haystack
from kvjax.programs.evals.task import Count, Row, Task, fill, rng

STEPS = 128  # tokens that are given


def build(count: Count, *, length: int, seed: int, index: int) -> Row:
  """A text from a random place of the speeches, cut where `STEPS` tokens of `length` are left."""
  # A word is at least one token.
  (words,) = haystack.passages(rng("kl", seed, index), 1, length + STEPS)

  def context(n: int) -> str:
    return " ".join(words[:n])

  n = fill(lambda n: count(context(n), "", "") + STEPS, length, length, "word")
  return Row(
    context=context(n),
    question="",
    answer_prefix="",
    answers=(),
    task="kl",
    max_new_tokens=STEPS,
    continuation=" " + " ".join(words[n : n + STEPS]),
  )


@jax.jit
def compare(
  full: Float[Array, "*batch T V"], other: Float[Array, "*batch T V"]
) -> tuple[Float[Array, "*batch T"], Bool[Array, "*batch T"]]:
  """KL(full ‖ other) in nats, and whether both have the same likeliest token, of float32 logits."""
  p, q = jax.nn.log_softmax(full), jax.nn.log_softmax(other)
  return (jnp.exp(p) * (p - q)).sum(-1), full.argmax(-1) == other.argmax(-1)


@jax.jit
def surprise(
  logits: Float[Array, "*batch T V"], tokens: Int[Array, "*batch T"]
) -> Float[Array, "*batch T"]:
  """−log p of each token, in nats."""
  chosen = jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0]
  return jax.nn.logsumexp(logits, -1) - chosen


TASKS = (
  Task(
    "kl",
    "kl",
    f"KL to the full cache, top-1 agreement and perplexity over {STEPS} given tokens of a speech",
    build,
    lambda answer, row: 0.0,
    chat=False,
    forced=True,
  ),
)
