"""dense decode attention over a whole cache, against a streaming read and other libraries"""

from collections.abc import Iterator
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
  if peers and not shape.ragged:
    contenders += optional("jax cuDNN", lambda: _jax_cudnn(inputs, calls))
    contenders += _torch(inputs, calls)
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


def _jax_cudnn(inputs: list[tuple], calls: int) -> Contender:
  """Its layout is [B, S, K, H]; the copies are made beforehand."""
  batch, kv_heads, groups, head_dim = inputs[0][0].shape
  turns = [
    (q.reshape(batch, 1, kv_heads * groups, head_dim), k.swapaxes(1, 2), v.swapaxes(1, 2))
    for q, k, v, *_ in inputs
  ]

  def attend(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")

  def output(o):
    return o.reshape(batch, kv_heads, groups, head_dim)

  return jax_contender("jax cuDNN", attend, turns, output=output, calls=calls)


def _torch(inputs: list[tuple], calls: int) -> list[Contender]:
  """PyTorch's backends, with the queries of a group either as a query axis or as heads."""
  try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
  except ImportError:
    print("  torch: not run (not installed)", flush=True)
    return []
  tensors = [tuple(torch.from_dlpack(x) for x in turn[:3]) for turn in inputs]
  batch, kv_heads, groups, head_dim = inputs[0][0].shape
  sdpa = torch.nn.functional.scaled_dot_product_attention

  def contender(name: str, backend: Any, as_heads: bool) -> Contender:
    def attend(q, k, v):
      if as_heads:
        q = q.reshape(batch, kv_heads * groups, 1, head_dim)
      with sdpa_kernel(backend):
        return sdpa(q, k, v, enable_gqa=as_heads and groups > 1).reshape(
          batch, kv_heads, groups, head_dim
        )

    return torch_contender(name, attend, tensors, calls=calls)

  made = []
  for name, backend in (
    ("torch cuDNN", SDPBackend.CUDNN_ATTENTION),
    ("torch flash", SDPBackend.FLASH_ATTENTION),
  ):
    # With one query per KV head both layouts are the same.
    for as_heads in (False, True) if groups > 1 else (False,):
      label = f"{name} (heads)" if as_heads else name
      made += optional(label, lambda: contender(label, backend, as_heads))  # noqa: B023
  if batch == 1:
    made += optional("FlashInfer", lambda: _flashinfer(tensors, calls))
  return made


def _flashinfer(tensors: list[tuple], calls: int) -> Contender:
  import flashinfer

  def attend(q, k, v):
    heads = q.reshape(-1, q.shape[-1])
    out = flashinfer.single_decode_with_kv_cache(
      heads, k[0], v[0], kv_layout="HND", use_tensor_cores=True
    )
    return out.view(q.shape)

  return torch_contender("FlashInfer", attend, tensors, calls=calls)
