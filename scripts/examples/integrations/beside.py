"""Parts that the integrations share: methods, ragged prompts, a model beside its own full cache."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import kvjax
from kvjax import settings

VOCAB, WIDTH, STEPS = 64, 24, 6
LENGTHS = (24, 15)  # of the prompts, padded with 0 on the left
METHODS = {"snapkv": kvjax.SnapKV, "quest": kvjax.Quest, "art": kvjax.ART}


def method(name: str, *, neutral: bool) -> kvjax.Method:
  """One that keeps and reads every token of the prompts and steps, or about 8 of them."""
  if neutral:
    made = settings.neutral(METHODS[name], WIDTH + STEPS)
  else:
    made = settings.example(METHODS[name], 8)
  return dataclasses.replace(made, dense_layers=0) if name == "quest" else made


def tokens() -> tuple[jax.Array, jax.Array]:
  """Prompts [B, T] and the tokens that follow, [B, S]."""
  drawn = np.random.default_rng(0).integers(1, VOCAB, (len(LENGTHS), WIDTH + STEPS))
  padding = np.arange(WIDTH) < WIDTH - np.array(LENGTHS)[:, None]
  return jnp.asarray(np.where(padding, 0, drawn[:, :WIDTH])), jnp.asarray(drawn[:, WIDTH:])


def randomised(model: nnx.Module) -> Any:
  """The model with normal weights, where some are zero at first."""
  draw = np.random.default_rng(1)
  drawn = lambda x: jnp.asarray(0.2 * draw.normal(size=x.shape), x.dtype)  # noqa: E731
  nnx.update(model, jax.tree.map(drawn, nnx.state(model, nnx.Param)))
  return model


@nnx.jit
def called(model: nnx.Module, *inputs: Any) -> Any:
  """Result of the model, its modules among the inputs changed in place."""
  return model(*inputs)


def apart(ours: jax.Array, theirs: jax.Array) -> float:
  """The largest difference of logits [B, T + S, V] as a share of the largest logit, padding out."""
  real = np.concatenate(tokens(), 1) != 0
  ours, theirs = (np.asarray(x)[real] for x in (ours, theirs))
  return float(abs(ours - theirs).max() / abs(theirs).max())


def report(model: Any, own: Callable, kept: Callable) -> None:
  """Prints how far each method is from the model's own cache, neutral and tight."""
  inputs = tokens()
  want = own(model, *inputs)
  for name in METHODS:
    far = [apart(kept(model, method(name, neutral=x), *inputs), want) for x in (True, False)]
    print(f"{name}: {far[0]:.0e} of the largest logit apart; at a tight setting {far[1]:.2f}")
