"""branches of one context: whole steps that hold and read it once, against copies of it"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import kvjax
from kvjax.kernels.common.devices import this_device
from kvjax.models.nn.transformer import Transformer
from kvjax.programs.suites import Case, Contender, fitting, together
from kvjax.programs.suites.e2e import weights
from scripts.benches import e2e_sparse
from scripts.benches.e2e_sparse import STEPS, logits, moved_by, timed
from scripts.benches.longflow import holding

BRANCHES = ((8, 32 << 10), (16, 16 << 10), (32, 8 << 10))  # whose copies fit beside the weights
ROOM = 64


def cases(quick: bool, peers: bool = True, only: str = "") -> Iterator[Case]:
  """A step of n branches of one context."""
  name = "tiny" if quick else "Llama-3.1-8B"
  for branches, tokens in ((4, 128),) if quick else BRANCHES:
    size = f"{tokens >> 10}K" if tokens >= 1024 else tokens
    if only in (title := f"forked {name} n{branches} T{size}"):
      yield from fitting(title, case, weights(name), branches, tokens, quick)


def case(title: str, model: Transformer, branches: int, tokens: int, quick: bool) -> Case:
  """Steps over a shared context and over copies; outputs are compared for two branches."""
  impl = "reference" if quick else "pallas"
  full, shared = kvjax.Full(), kvjax.Forked(kvjax.Full(), branches, tokens, ROOM)
  two = dataclasses.replace(shared, branches=2, context=1 << 20)  # whatever they are compared in
  run = [functools.partial(timed, model, m, impl, branches, tokens, caches) for m in (shared, full)]
  ours, copied = together(run)
  contenders = (
    Contender("kvjax", ours, functools.partial(logits, model, two, "pallas", caches)),
    Contender("copies", copied, None),
  )
  moved = {m: moved_by(model, m, branches, tokens) for m in (shared, full)}

  def remarks(seconds: dict[str, float]) -> list[str]:
    rate = this_device().read
    faster, limit = seconds["copies"] / seconds["kvjax"], moved[full] / moved[shared]
    return [
      f"{faster:.2f} × copies, {faster / limit:.3f} of what the bytes allow ({limit:.2f} ×); "
      f"{seconds['kvjax'] * rate / moved[shared]:.2f} × its bytes over {rate / 1e12:.2f} TB/s"
    ]

  return Case(
    name=title,
    shapes=f"{shared!r}; {model.dtype.name}; compared over four layers",
    bytes=moved[shared],
    reference=lambda: logits(model, full, "reference", caches),
    tolerance=1e-4 if model.dtype == jnp.float32 else 2e-2,
    contenders=contenders,
    subject="kvjax",
    remarks=remarks,
  )


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
