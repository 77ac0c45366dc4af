"""Walks of ART in an evaluation: whether they can end early, and which share they visit.

Where they cannot, ART reads what its base does, and its rows say nothing about it.
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.analysis import early_stops
from kvjax.methods import labels
from kvjax.methods.art.splits import spares_half, usual_splits
from kvjax.models.decode.generate import join, split
from kvjax.models.nn.transformer import Caches, Transformer


def too_short(label: str, budget: int | None, length: int, settings: dict[str, Any]) -> bool:
  """True if no walk of ART over the full cache can leave out a tile at this length.

  False for other methods, for ART over other bases and for its certificate, which has no patience.

  Args:
    label, budget: as in a row of results.
    length: tokens of prompt and answer.
    settings: of the folder: its config decides "auto", batch, device and implementation "fill".
  """
  named = kvjax.METHODS.get(re.split("[:+]", label)[0])
  if named is None or not issubclass(named, kvjax.ART):
    return False
  method = _named(label, budget or length)
  if method.certify is not None or method.base != kvjax.Full():
    return False
  splits = method.splits if method.margin is None and method.by_mass is None else 1
  if splits == "auto":
    tiles = -(-length // method.tile)
    splits = usual_splits(settings["config"]["kv_heads"], tiles)
    if not spares_half(tiles, splits, method.patience):
      return True  # the base attends
  if splits == "fill":
    splits = 1
    if "NVIDIA" in settings["device"] and settings["impl"] != "reference":
      from kvjax.kernels.art.walk import choose_splits  # not every jax can import kernels

      batch = max(int(one) for one in str(settings["batch"]).split(", "))
      walks = batch * settings["config"]["kv_heads"]
      splits = choose_splits(walks, length, method.tile, kind=settings["device"])
  return not early_stops.can_stop(length, method.tile, int(splits), method.patience)


@functools.lru_cache(1024)
def _named(label: str, budget: int) -> kvjax.Method:
  return labels.instance(label, budget, "--methods")


def visited(
  model: Transformer, method: kvjax.Method, caches: Caches, logits: jax.Array
) -> np.ndarray | None:
  """Share of the tokens seen that the next step attends to, float64 [B], mean of layers and heads.

  None of methods whose plan says it. The caches stay as they are.
  """
  if not isinstance(method, kvjax.ART):
    return None
  graph, leaves = split(model)
  return np.asarray(_step(graph, method, leaves, caches, logits), np.float64)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _step(graph: Any, method: kvjax.Method, leaves: Any, caches: Any, logits: jax.Array) -> Any:
  token = jnp.argmax(logits, -1).astype(jnp.int32)
  _, caches, reports = join(graph, leaves).decode(token, caches, method, with_aux=True)
  read = jnp.stack([report["visited"].mean(-1) for report in reports])  # [L, B]
  return read.mean(0) / caches[0].seen
