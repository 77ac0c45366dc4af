"""Kinds of methods by what they promise, which is also what can go wrong with them."""

import dataclasses
import functools

import kvjax
from kvjax.families.coded import Coded
from kvjax.methods import labels


@dataclasses.dataclass(frozen=True)
class Family:
  """Methods that promise the same.

  Attributes:
    name: what they do.
    risk: what can go wrong.
    colour: matplotlib's, in pictures of families.
    safe: whether every token stays and the prompt is read as under the full cache.
  """

  name: str
  risk: str
  colour: str
  safe: bool = False


WHOLE = Family("the full cache", "none", "black", safe=True)
READS = Family(
  "keep all, read a part",
  "a step may miss a token; the next can find it",
  "tab:blue",
  safe=True,
)
ROUNDS = Family(
  "keep all, in fewer bits",
  "all keys and values are rounded",
  "tab:cyan",
  safe=True,
)
SKIMS = Family(
  "keep all, deep layers skip a part of the prompt",
  "deep layers never see a part of the prompt",
  "tab:purple",
)
EVICTS = Family(
  "keep the budget, the prompt read in full",
  "evicted tokens are gone; a later question may need them",
  "tab:red",
)
WINDOWS = Family(
  "keep first and newest tokens",
  "tokens outside the window are gone, and the prompt is read through it",
  "tab:orange",
)
STREAMS = Family(
  "keep blocks in host memory",
  "the prompt is read through a window; only retrieved blocks are seen",
  "tab:green",
)
CONTROL = Family("the control", "it chooses at random", "0.55")
OTHERS = Family("others", "unknown", "tab:brown")
FAMILIES = (WHOLE, READS, ROUNDS, SKIMS, EVICTS, WINDOWS, STREAMS, OTHERS, CONTROL)

# Upper bound and control, not for use.
YARDSTICKS = ("topk_oracle", "random")


@functools.lru_cache(1024)
def _named(label: str) -> kvjax.Method:
  return labels.instance(label, 1024, "--methods")


def of(label: str) -> Family:
  """Family of a method, by what its class declares; of names that this machine lacks, OTHERS."""
  try:
    method = _named(label)
  except (ImportError, TypeError, ValueError):
    return OTHERS
  if isinstance(method, kvjax.Full):
    return WHOLE
  if isinstance(method, kvjax.Random):
    return CONTROL
  if isinstance(method, kvjax.Streamed):
    return STREAMS
  if isinstance(method, Coded) and isinstance(method.base, kvjax.Full):
    return ROUNDS
  if method.traits.positional and method.traits.uneven is None:  # every head keeps every token
    return READS if kvjax.families.forms.dense_prefill(method) else SKIMS
  return EVICTS if kvjax.families.forms.dense_prefill(method) else WINDOWS
