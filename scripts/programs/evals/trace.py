"""Reports of methods while they decode: slots visited, hits, shares, by layer and step."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.models.decode.generate import join, pad, prefill, split
from kvjax.models.nn.transformer import Transformer


def trace(
  model: Transformer, method: kvjax.Method, ids: Sequence[int], steps: int
) -> dict[str, np.ndarray]:
  """Reads a prompt and decodes greedily; the mean of every number that a layer reports.

  Args:
    model: the decoder.
    method: any method; what its decode step reports is shown by the names that it gives.
    ids: the prompt's tokens.
    steps: tokens to decode.

  Returns:
    By name, float64 [steps, L], NaN where a layer does not report it. "visited" is there for every
    method: the slots that were attended to, as a share of the tokens seen so far.
  """
  tokens, lengths = pad([list(ids)], multiple=64)
  caches = model.init_caches(method, 1, tokens.shape[1] + steps)
  logits, caches = prefill(model, tokens, lengths, caches, method, past=0)
  graph, leaves = split(model)
  reports = []
  for _ in range(steps):
    logits, caches, report = _step(graph, method, leaves, caches, logits)
    reports.append(jax.device_get(report))
  names = sorted({name for report in reports for layer in report for name in layer})
  out = {
    name: np.array([[layer.get(name, np.nan) for layer in report] for report in reports], float)
    for name in names
  }
  seen = len(ids) + 1 + np.arange(steps)
  out["visited"] = out["visited"] / seen[:, None]
  return out


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _step(graph: Any, method: kvjax.Method, leaves: Any, caches: Any, logits: jax.Array) -> Any:
  token = jnp.argmax(logits, -1).astype(jnp.int32)
  logits, caches, aux = join(graph, leaves).decode(token, caches, method, with_aux=True)
  return (
    logits,
    caches,
    [
      {name: jnp.asarray(x, jnp.float32).mean() for name, x in flat(layer).items()} for layer in aux
    ],
  )


def flat(report: dict[str, Any]) -> dict[str, Any]:
  """The arrays of a report by path: {"a": {"b": x}} has "a.b"."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(report)
  return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}


def plain(reports: dict[str, np.ndarray]) -> dict[str, list[list[float | None]]]:
  """Reports as plain values; NaN becomes null."""
  return {
    name: [[None if np.isnan(value) else round(float(value), 5) for value in row] for row in x]
    for name, x in reports.items()
  }
