"""attention over the blocks that a plan lists, in a long context, against FlashInfer"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.kernels.decode.sparse import sparse_decode
from kvjax.programs import suites
from kvjax.programs.suites import Case, Contender, jax_contender, optional, reading, torch_contender
from kvjax.programs.suites import decode as dense

# The grid of PRR's Tab. 3.
UNITS, BUDGETS = (16, 32, 64, 128, 256), (1024, 2048, 4096, 6144, 8192)
PAGED, BLOCK_SPARSE = "FlashInfer paged", "FlashInfer block-sparse"


@suites.suite
def cases(quick: bool, peers: bool) -> Iterator[tuple]:
  """Every block size with every budget over one cache."""
  slots, kv_heads, groups, head_dim = (1024, 2, 3, 32) if quick else (128 << 10, 8, 4, 128)
  dtype = jnp.float32 if quick else jnp.bfloat16
  cache = 1, kv_heads, slots, head_dim
  k, v = (jax.random.normal(key, cache, dtype) for key in jax.random.split(jax.random.key(0)))
  for unit in (16,) if quick else UNITS:
    for budget in (64, 128) if quick else BUDGETS:
      yield f"block {unit} budget {budget}", case, k, v, groups, unit, budget, peers


def case(name: str, k: Any, v: Any, groups: int, unit: int, budget: int, peers: bool) -> Case:
  """One block size and budget; several random plans, so that the L2 cache holds little of one."""
  _, kv_heads, slots, head_dim = k.shape
  moved = 2 * kv_heads * budget * head_dim * k.dtype.itemsize
  copies = min(max(4, (64 << 20) // moved), 16) if peers else 2
  plans = [plan(i, k, groups, unit, budget) for i in range(copies)]
  turns = [(q, k, v, *rest) for q, *rest in plans]
  run = functools.partial(sparse_decode, unit=unit)
  contenders = [jax_contender("kvjax", run, turns, output=lambda x: x[0].o, calls=2 * copies)]
  contenders.append(read_contender(k, v, budget, min(copies, 8)))
  if peers:
    for peer in (PAGED, BLOCK_SPARSE):
      contenders += optional(peer, functools.partial(flashinfer, turns, unit, peer))

  return Case(
    name=name,
    shapes=f"{kv_heads} KV heads × {groups}, {slots} slots of {head_dim} {k.dtype.name}, "
    f"{copies} plans in turn",
    bytes=moved,
    reference=lambda: reference(*turns[0], unit=unit),
    tolerance=1e-5 if k.dtype == jnp.float32 else 1e-2,
    contenders=contenders,
  )


def plan(seed: int, k: Any, groups: int, unit: int, budget: int) -> tuple:
  """Queries, and a random list of blocks for every row's heads: q, table, count, start, stop."""
  batch, kv_heads, slots, head_dim = k.shape
  keys = jax.random.split(jax.random.key(seed + 1), batch * kv_heads + 1)
  q = jax.random.normal(keys[0], (batch, kv_heads, groups, head_dim), k.dtype)
  blocks = [jax.random.permutation(key, slots // unit)[: budget // unit] for key in keys[1:]]
  table = jnp.stack(blocks).reshape(batch, kv_heads, -1).astype(jnp.int32)
  count = jnp.full((batch, kv_heads), budget // unit, jnp.int32)
  return q, table, count, jnp.zeros((batch, 1), jnp.int32), jnp.full((batch, 1), slots, jnp.int32)


def gathered(x: Any, table: Any, unit: int) -> Any:
  """The listed slots of x, [B, K, W·unit, H]."""
  slot = (table[..., None] * unit + jnp.arange(unit)).reshape(*table.shape[:2], -1)
  return jnp.take_along_axis(x, slot[..., None], 2)


def reference(q, k, v, table, count, start, stop, *, unit: int) -> np.ndarray:
  """Attention over all listed slots in float32, [B, K, G, H]."""
  k, v = (gathered(x, table, unit) for x in (k, v))
  first, last = jnp.zeros_like(start), jnp.full_like(stop, k.shape[2])
  return dense.reference(q, k, v, first, last)


def read_contender(k: Any, v: Any, budget: int, pieces: int) -> Contender:
  """As many bytes in one piece, read and summed."""
  slots = [slice(i * budget, (i + 1) * budget) for i in range(pieces)]
  return reading(([x[:, :, at] for x in (k, v)] for at in slots), calls=2 * pieces)


def flashinfer(turns: list[tuple], unit: int, name: str = BLOCK_SPARSE) -> Contender:
  """Attention over q, k, v and the table of every turn, one row.

  Every KV head is a request (or a row of the mask) of its own over one long cache.
  """
  import flashinfer
  import torch

  tensors = [tuple(torch.from_dlpack(x) for x in turn) for turn in turns]
  _, kv_heads, groups, head_dim = turns[0][0].shape
  slots = turns[0][1].shape[2]
  runs = []
  for q, k, v, table, *_ in tensors:
    width = table.shape[2]
    head = torch.arange(kv_heads, dtype=torch.int32, device="cuda")
    indices = (head[:, None] * (slots // unit) + table[0].sort(-1).values).reshape(-1)
    indptr = torch.arange(kv_heads + 1, dtype=torch.int32, device="cuda") * width
    workspace = torch.zeros(128 << 20, dtype=torch.uint8, device="cuda")
    heads = {"num_qo_heads": groups, "num_kv_heads": 1, "head_dim": head_dim}
    types = {"q_data_type": q.dtype, "kv_data_type": k.dtype}
    if name == PAGED:
      wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, kv_layout="HND", use_tensor_cores=True
      )
      full = torch.full((kv_heads,), unit, dtype=torch.int32, device="cuda")
      wrapper.plan(indptr, indices, full, **heads, page_size=unit, **types)
      pages = tuple(x.view(-1, 1, unit, head_dim) for x in (k, v))
      runs.append(functools.partial(wrapper.run, q[0], pages))
    else:
      wrapper = flashinfer.BlockSparseAttentionWrapper(workspace)
      wrapper.plan(indptr, indices, kv_heads, kv_heads * slots, 1, unit, **heads, **types)
      flat = (x.view(-1, 1, head_dim) for x in (k, v))
      runs.append(functools.partial(wrapper.run, q[0], *flat))

  def attend(run):
    return run()[None]

  return torch_contender(name, attend, [(run,) for run in runs], calls=2 * len(runs))
