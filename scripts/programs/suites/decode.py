"""dense decode attention over a whole cache, against a streaming read and other libraries"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.kernels.decode.dense import decode_attention
from kvjax.programs import suites
from kvjax.programs.suites import Case, Contender, jax_contender, optional, reading, torch_contender
from kvjax.testing.decode_cases import MARKS, OTHERS, QUICK, Shape

# Enough distinct buffers that a 60 MB L2 cache holds nothing of the next call's.
ROTATION_BYTES = 256 << 20


def reference(q, k, v, start, stop) -> np.ndarray:
  """Attention output in float32, one row of the batch at a time, [B, K, G, H]."""

  def row(operands):
    q, k, v, start, stop = (x.astype(jnp.float32) for x in operands)
    slot = jnp.arange(k.shape[1])
    visible = (slot >= start[:, None]) & (slot < stop[:, None])
    x = jnp.einsum("kgh,ksh->kgs", q, k, precision="highest") * q.shape[-1] ** -0.5
    p = jax.nn.softmax(jnp.where(visible[:, None], x, -jnp.inf), axis=-1)
    return jnp.einsum("kgs,ksh->kgh", p, v, precision="highest")

  return np.asarray(jax.jit(lambda *a: lax.map(row, a))(q, k, v, start, stop))


@suites.suite
def cases(quick: bool, peers: bool) -> Iterator[tuple]:
  """The shapes of this suite."""
  for shape in QUICK if quick else (*MARKS, *OTHERS):
    yield shape.name, case, shape, quick, peers


def case(name: str, shape: Shape, quick: bool, peers: bool) -> Case:
  """One shape with everything that is timed on it."""
  inputs, calls = rotated(shape, quick)
  contenders = [
    jax_contender("kvjax", decode_attention, inputs, output=lambda s: s.o, calls=calls),
    read_contender(inputs, shape, calls),
  ]
  if not quick:
    contenders += optional("kvjax (jax-triton)", lambda: _jax_triton(inputs, calls))
  if peers:
    contenders += _peers(inputs, shape, calls)
  batch, kv_heads, groups, head_dim = inputs[0][0].shape
  return Case(
    name=name,
    shapes=f"q [{batch}, {kv_heads}, {groups}, {head_dim}], "
    f"k, v [{batch}, {kv_heads}, {shape.slots}, {head_dim}] {shape.dtype}, {len(inputs)} rotating",
    bytes=shape.kv_bytes(),
    reference=lambda: reference(*inputs[0]),
    tolerance={"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}[shape.dtype],
    contenders=contenders,
  )


def rotation(shape: Shape) -> tuple[int, int]:
  """(distinct inputs, calls per program): past the L2 cache, and milliseconds of work."""
  copies = min(max(2, -(-ROTATION_BYTES // shape.kv_bytes())), 16)
  return copies, min(max(8, (4 << 30) // shape.kv_bytes()), 64)


def rotated(shape: Shape, quick: bool) -> tuple[list[tuple], int]:
  """Distinct inputs, and calls per program."""
  copies, calls = (1, 2) if quick else rotation(shape)
  return jax.block_until_ready([shape.arrays(seed) for seed in range(copies)]), calls


def read_contender(inputs: list[tuple], shape: Shape, calls: int) -> Contender:
  """Reads the same bytes and does next to nothing with them: what the memory can give."""
  slots = max(int(shape.lengths().sum()) // shape.batch, 1)
  return reading(([x[:, :, :slots] for x in (k, v)] for _, k, v, *_ in inputs), calls)


def _jax_triton(inputs: list[tuple], calls: int) -> Contender:
  """Our kernel in another language."""
  from kvjax.kernels.decode.jax_triton import decode_attention as run

  return jax_contender("kvjax (jax-triton)", run, inputs, output=lambda s: s.o, calls=calls)


def _peers(inputs: list[tuple], shape: Shape, calls: int) -> list[Contender]:
  """Other libraries, each in its own layout; of rows of different lengths those that take them."""
  made = optional("tokamax", lambda: _tokamax(inputs, shape, calls))
  if not shape.ragged:
    made += optional("jax cuDNN", lambda: _jax_cudnn(inputs, calls))
  try:
    import torch
  except ImportError:
    print("  torch: not run (not installed)", flush=True)
    return made
  tensors = [tuple(torch.from_dlpack(x) for x in turn[:3]) for turn in inputs]
  made += optional("FlashInfer paged", lambda: _flashinfer_paged(tensors, shape, calls))
  made += optional("torch flex", lambda: _torch_flex(tensors, shape, calls))
  if not shape.ragged:
    made += _torch_sdpa(tensors, shape, calls)
    if shape.batch == 1:
      made += optional("FlashInfer", lambda: _flashinfer(tensors, calls))
  return made


def _by_token(name: str, attend: Callable[..., Any], inputs: list[tuple], calls: int) -> Contender:
  """A contender of q [B, 1, N, H] and k, v [B, S, K, H], as jax's attention has them: copies."""
  batch, kv_heads, groups, head_dim = of = inputs[0][0].shape
  turns = [
    (q.reshape(batch, 1, kv_heads * groups, head_dim), k.swapaxes(1, 2), v.swapaxes(1, 2))
    for q, k, v, *_ in inputs
  ]
  return jax_contender(name, attend, turns, output=lambda o: o.reshape(of), calls=calls)


def _jax_cudnn(inputs: list[tuple], calls: int) -> Contender:
  """jax's attention by cuDNN."""
  attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
  return _by_token("jax cuDNN", attend, inputs, calls)


def _tokamax(inputs: list[tuple], shape: Shape, calls: int) -> Contender:
  """tokamax's attention by its own kernels, whichever of them takes the shape first."""
  import tokamax

  attend = functools.partial(
    tokamax.dot_product_attention,
    key_value_seq_lengths=jnp.asarray(shape.lengths()) if shape.ragged else None,
    implementation=("mosaic", "triton"),
  )
  return _by_token("tokamax", attend, inputs, calls)


def _torch_sdpa(tensors: list[tuple], shape: Shape, calls: int) -> list[Contender]:
  """PyTorch's backends, with the queries of a group either as a query axis or as heads."""

  def contender(name: str, label: str, as_heads: bool) -> Contender:
    def attend(q, k, v):
      heads, grouped = _as_heads(q) if as_heads else q, as_heads and shape.groups > 1
      return suites.torch_sdpa(name, heads, k, v, enable_gqa=grouped).reshape(q.shape)

    return torch_contender(label, attend, tensors, calls=calls)

  made = []
  for name in ("torch cuDNN", "torch flash"):
    # With one query per KV head both layouts are the same.
    for as_heads in (False, True) if shape.groups > 1 else (False,):
      label = f"{name} (heads)" if as_heads else name
      made += optional(label, functools.partial(contender, name, label, as_heads))
  return made


def _as_heads(q: Any) -> Any:
  """[B, K, G, H] as [B, K·G, 1, H]."""
  return q.reshape(q.shape[0], -1, 1, q.shape[-1])


def _torch_flex(tensors: list[tuple], shape: Shape, calls: int) -> Contender:
  """PyTorch's flex_attention, compiled: its decode kernel, which splits the keys."""
  import torch
  from torch.nn.attention.flex_attention import create_block_mask, flex_attention

  torch._dynamo.reset()  # else a shape counts as a recompilation of the one before
  mask = None
  if shape.ragged:
    lengths = torch.from_numpy(shape.lengths()).cuda()
    mask = create_block_mask(
      lambda b, h, at, slot: slot < lengths[b], shape.batch, None, 1, shape.slots, device="cuda"
    )
  compiled = torch.compile(flex_attention, dynamic=False)

  def attend(q, k, v):
    heads = _as_heads(q)
    return compiled(heads, k, v, block_mask=mask, enable_gqa=shape.groups > 1).reshape(q.shape)

  return torch_contender("torch flex", attend, tensors, calls=calls)


def _flashinfer(tensors: list[tuple], calls: int) -> Contender:
  import flashinfer

  def attend(q, k, v):
    heads = q.reshape(-1, q.shape[-1])
    out = flashinfer.single_decode_with_kv_cache(
      heads, k[0], v[0], kv_layout="HND", use_tensor_cores=True
    )
    return out.view(q.shape)

  return torch_contender("FlashInfer", attend, tensors, calls=calls)


def _flashinfer_paged(tensors: list[tuple], shape: Shape, calls: int) -> Contender:
  """FlashInfer's decode of a batch over pages of 16 tokens, as servers call it; planned before."""
  import flashinfer
  import torch

  page, how = 16, {"dtype": torch.int32, "device": "cuda"}
  lengths = torch.from_numpy(shape.lengths()).to(**how)
  used = (lengths + page - 1) // page
  first = torch.arange(shape.batch, **how) * (shape.slots // page)
  indices = torch.cat([at + torch.arange(int(n), **how) for at, n in zip(first, used, strict=True)])
  indptr = torch.nn.functional.pad(used.cumsum(0), (1, 0)).to(**how)
  workspace = torch.zeros(512 << 20, dtype=torch.uint8, device="cuda")
  wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
    workspace, kv_layout="HND", use_tensor_cores=shape.groups > 1
  )
  wrapper.plan(
    *(indptr, indices, lengths - (used - 1) * page),
    num_qo_heads=shape.kv_heads * shape.groups,
    num_kv_heads=shape.kv_heads,
    head_dim=shape.head_dim,
    page_size=page,
    q_data_type=tensors[0][0].dtype,
    kv_data_type=tensors[0][1].dtype,
  )

  def paged(x):  # [B, K, S, H] as [pages, K, page, H]
    of = x.shape[0], x.shape[1], -1, page, x.shape[-1]
    return x.view(of).transpose(1, 2).flatten(0, 1).contiguous()

  def attend(q, k, v):
    return wrapper.run(q.view(q.shape[0], -1, q.shape[-1]), (k, v)).view(q.shape)

  turns = [(q, paged(k), paged(v)) for q, k, v in tensors]
  return torch_contender("FlashInfer paged", attend, turns, calls=calls)
