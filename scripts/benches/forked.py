"""branches of one context: whole steps that hold and read it once, against copies of it"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import kvjax
from kvjax.models.nn.transformer import Transformer
from kvjax.programs.suites import Case, named, suite
from scripts.benches import e2e_sparse
from scripts.benches._layer import holding
from scripts.benches.e2e_sparse import STEPS

BRANCHES = ((8, 32 << 10), (16, 16 << 10), (32, 8 << 10))  # whose copies fit beside the weights
ROOM = 64


@suite
def cases(quick: bool, peers: bool) -> Iterator[tuple]:
  """A step of n branches of one context."""
  name = "tiny" if quick else "Llama-3.1-8B"
  for branches, tokens in ((4, 128),) if quick else BRANCHES:
    title = f"forked {name} n{branches} T{named(tokens)}"
    yield title, case, name, branches, tokens, quick


def case(title: str, name: str, branches: int, tokens: int, quick: bool) -> Case:
  """Steps over a shared context and over copies; outputs are compared for two branches."""
  full, shared = kvjax.Full(), kvjax.Forked(kvjax.Full(), branches, tokens, ROOM)
  two = dataclasses.replace(shared, branches=2, context=1 << 20)  # whatever they are compared in
  ways = {"kvjax": shared, "copies": full}
  sizes = branches, tokens, quick
  return e2e_sparse.beside(title, name, ways, *sizes, compared=(two, full), filled=caches)


def caches(model: Transformer, method: kvjax.Method, batch: int, tokens: int) -> Any:
  """Caches of branches that have read nothing yet, or copies of the same random context."""
  if not isinstance(method, kvjax.Forked):
    return e2e_sparse.caches(model, method, batch, tokens)
  spec = model.spec(batch, tokens + STEPS)
  contexts = dataclasses.replace(spec, batch=batch // method.branches)
  read = holding(method.base, contexts, jnp.int32(tokens))
  cache = kvjax.Cache.empty(method, spec, 0)
  size = cache.heads["context_k"].shape[2]
  held = {f"context_{name}": x[:, :, :size] for name, x in read.slots.items()}
  rows = {"seen": jnp.full(batch, tokens, jnp.int32), "context": read.used}
  cache = cache.put(heads=held, rows=rows)
  return tuple(jax.tree.map(jnp.copy, cache) for _ in range(spec.layers))
