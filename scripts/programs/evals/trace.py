"""Reports of methods while they decode: slots visited, hits, shares, by layer and step."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.models.decode import by_layer
from kvjax.models.decode.generate import join, pad, prefill, split
from kvjax.models.io import items
from kvjax.models.nn.transformer import Caches, Transformer
from kvjax.ops import offload


def trace(
  model: Transformer, method: kvjax.Method, ids: Sequence[int], steps: int
) -> dict[str, np.ndarray]:
  """Reads a prompt and decodes greedily; the mean of every number that a layer reports.

  Returns:
    By name, float64 [steps, L], NaN where a layer does not report it. "visited" is there for every
    method: the slots that were attended to, as a share of the tokens seen so far.
  """
  tokens, lengths = pad([list(ids)], multiple=64)
  caches = model.init_caches(method, 1, tokens.shape[1] + steps)
  logits, caches = prefill(model, tokens, lengths, caches, method, past=0)
  step, reports = stepper(model, method), []
  for _ in range(steps):
    logits, caches, report = step(caches, jnp.argmax(logits, -1).astype(jnp.int32))
    means = [{name: x.mean() for name, x in items.named(layer).items()} for layer in report]
    reports.append(jax.device_get(means))
  names = sorted({name for report in reports for layer in report for name in layer})
  out = {
    name: np.array([[layer.get(name, np.nan) for layer in report] for report in reports], float)
    for name in names
  }
  seen = len(ids) + 1 + np.arange(steps)
  out["visited"] = out["visited"] / seen[:, None]
  return out


def stepper(model: Transformer, method: kvjax.Method) -> Callable[[Caches, Any], Any]:
  """A step that also reports: (caches, tokens [B]) to logits, caches and reports by layer."""
  if by_layer.decodes(model, method):
    layered = by_layer.ByLayer(model)
    return lambda caches, token: layered.decode(token, caches, method, with_aux=True)
  return functools.partial(_step, *split(model), method)


@functools.partial(jax.jit, static_argnums=(0, 2), donate_argnums=3)
def _step(graph: Any, leaves: Any, method: kvjax.Method, caches: Caches, token: Any) -> Any:
  logits, caches, reports = join(graph, leaves).decode(token, caches, method, with_aux=True)
  return logits, offload.settled(caches), reports


def plain(reports: dict[str, np.ndarray]) -> dict[str, list[list[float | None]]]:
  """Reports as plain values; NaN becomes null."""
  return {
    name: [[None if np.isnan(value) else round(float(value), 5) for value in row] for row in x]
    for name, x in reports.items()
  }
