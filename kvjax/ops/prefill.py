"""Attention of a prompt, or a chunk of one: a kernel, cuDNN, or the reference."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvjax.core.context import At, Prompt
from kvjax.core.plan import Attended, Window
from kvjax.core.slots import Slots
from kvjax.ops import attention, slot_shards
from kvjax.ops.table import choose, declare, kernel
from kvjax.primitives.softmax_state import State

declare(
  "attend_prompt",
  hopper="kvjax.kernels.prefill.hopper:prefill_attention",
  cudnn="kvjax.kernels.prefill.cudnn:attend_causal",
  pallas="kvjax.kernels.prefill.dense:prefill_attention",
)
declare("column_mass", pallas="kvjax.kernels.prefill.dense:column_mass")


@dataclasses.dataclass(frozen=True)
class Chunk:
  """The slots that the queries of a chunk may see.

  Attributes:
    prompt: the chunk.
    seen: the part of the past that they see; None: everything.
    aligned: whether the staged slots carry their positions, from 0 on; else the chunk stands last.
  """

  prompt: Prompt
  seen: Window | None
  aligned: bool


def attend_prompt(at: At, staged: Slots, q: Array, qpos: Array, chunk: Chunk) -> Attended:
  """Causal attention of a chunk's queries over the staged slots, as `at.env.impl` says.

  `qpos` [B, A] are the positions of the rotated queries; −1 = padding. Implementations that do not
  attend to prompts at all stand for the reference here.
  """
  prompt, seen = chunk.prompt, chunk.seen
  visited = (staged["pos"] >= 0).sum(-1, dtype=jnp.int32)
  impl, run = _prompt_implementation(at, staged, q, chunk)
  before = prompt.past  # slots that can stand before the chunk's own
  if not chunk.aligned:
    before = staged["pos"].shape[2] - prompt.tokens
  reach = None
  if before is not None:
    held = staged["pos"].shape[2]
    reach = slot_shards.reach(at, before + 1 + prompt.query_index().max(0), held)
  if impl == "reference":
    state = attention.attend_prompt(at, q, qpos, staged, seen, reach)
    return Attended(state, None, None, visited)
  k, v = staged["k"], staged["v"]
  if impl == "cudnn":
    state, out = run(q.astype(k.dtype), k, v, prompt.valid)
    return Attended(state, None, None, visited, out.astype(q.dtype))
  first, sinks = (None, 0) if seen is None else (seen.first, seen.sinks)
  options: dict[str, Any] = {"sinks": sinks}
  if impl == "pallas":
    options["soft_cap"] = at.env.soft_cap
    if seen is not None and seen.view is not None:
      turned = at.env.rope.shift(q, (seen.view - qpos)[:, None, None])
      options["q_sinks"] = turned.astype(k.dtype)
    if at.env.slot_axis or not chunk.aligned:
      options |= {"pos": staged["pos"], "reach": reach}
  state, out = run(q.astype(k.dtype), k, v, qpos, first, **options)
  return Attended(state, None, None, visited, out.astype(q.dtype))


def attend_anywhere(at: At, held: Slots, q: Array, qpos: Array, past: int = 0) -> State:
  """Attention of a chunk's queries over slots in any order, each up to its own position.

  The first `past` slots are empty or seen by every query; a kernel then does not ask for each.
  """
  impl = choose("attend_prompt", at.env.impl)
  if impl == "cudnn":
    raise NotImplementedError(
      f"attend_prompt: {at.name} attends to slots in no order; {impl!r} takes a whole prompt"
    )
  # Float32 products of the kernel would leave the matrix units unused.
  narrow = at.env.impl == "auto" and held["k"].dtype.itemsize != 2
  if narrow or impl != "pallas":
    return attention.attend_prompt(at, q, qpos, held, None, None)
  k, v = held["k"], held["v"]
  how = {"pos": held["pos"], "soft_cap": at.env.soft_cap, "past": past}
  return kernel("attend_prompt", impl)(q.astype(k.dtype), k, v, qpos, **how)[0]


def _prompt_implementation(at: At, staged: Slots, q: Array, chunk: Chunk) -> tuple[str, Callable]:
  """Implementation of a prompt's attention, its name and function; raises if that asked for cannot.

  "auto" takes "hopper", the kernel for those cards, where cuDNN cannot, and for several rows, of
  which it reads what is there. A whole prompt of one row takes hardly longer by cuDNN, and a second
  less to compile (`scripts/results/nvidia-h200/prefill_hopper.txt`).
  """
  named, narrow = at.env.impl, staged["k"].dtype.itemsize == 2
  able: tuple[str, ...] = (named,) if named in ("cudnn", "pallas") else ()
  # Float32 products of the kernels would leave the matrix units unused.
  if named == "auto" and narrow and jax.default_backend() == "gpu":
    best = ("cudnn", "hopper") if len(q) == 1 else ("hopper", "cudnn")
    able = (*best, "pallas") if _has_cudnn() else ("pallas",)
  beyond = ""
  for impl in able:
    if not (beyond := _beyond_prompt(at, staged, q, chunk, impl)):
      return impl, kernel("attend_prompt", impl)
  if beyond and named != "auto":
    raise NotImplementedError(f"attend_prompt: {at.name} {beyond}")
  return "reference", attention.attend_prompt


def _has_cudnn() -> bool:
  """True if the device is one for cuDNN's flash attention: NVIDIA's, from Ampere on."""
  capability = str(getattr(jax.devices()[0], "compute_capability", "8.0"))
  return capability[0].isdigit() and float(capability) >= 8


def _beyond_prompt(at: At, staged: Slots, q: Array, chunk: Chunk, impl: str) -> str:
  """The part of a prompt's attention that the implementation lacks, in words; empty if none."""
  dtype, head_dim = staged["k"].dtype, staged["k"].shape[3]
  if impl == "pallas":
    return f"has heads of {head_dim}; 'pallas' takes up to 256" if head_dim > 256 else ""
  if at.env.soft_cap is not None:
    return f"caps its logits (soft_cap = {at.env.soft_cap}); {impl!r} does not"
  if impl == "hopper":
    takes = importlib.import_module("kvjax.kernels.prefill.hopper").takes
    return "" if takes(q, dtype) and _by_position(at, chunk) else "has what 'hopper' does not take"
  if dtype.itemsize != 2 or head_dim % 8 or head_dim > 128:
    return (
      f"has heads of {head_dim} {dtype.name}; 'cudnn' takes up to 128 of 16 bits, a multiple of 8"
    )
  if chunk.seen is not None:
    return "has a window in this layer; 'cudnn' attends to all that came before"
  if chunk.prompt.past != 0 or chunk.prompt.index is not None or not chunk.aligned:
    return "attends to more or less than a whole prompt in order, which is what 'cudnn' takes"
  return ""


def _by_position(at: At, chunk: Chunk) -> bool:
  """True if slots are positions, which all heads see alike."""
  seen = chunk.seen
  alike = seen is None or not (seen.by_head or seen.view is not None)
  return alike and chunk.aligned and not at.env.slot_axis


def column_mass(
  at: At,
  q: Array,
  qpos: Array,
  staged: Slots,
  window: Window | None,
  state: State,
  past: int = 0,
) -> Array:
  """Probability that queries give to every slot; see `kvjax.ops.attention.column_mass`.

  `past`: as in `attend_anywhere`.
  """
  turned = window is not None and (window.by_head or window.view is not None)
  narrow = at.env.impl == "auto" and staged["k"].dtype.itemsize != 2
  if turned or narrow or choose("column_mass", at.env.impl) != "pallas":
    return attention.column_mass(at, q, qpos, staged, window, state)
  k, pos = staged["k"], staged["pos"]
  first, sinks = (None, 0) if window is None else (window.first, window.sinks)
  how = {"sinks": sinks, "soft_cap": at.env.soft_cap, "past": past}
  run = kernel("column_mass", "pallas")
  return run(q.astype(k.dtype), k, pos, qpos, state.m, state.l, first, **how)
