"""Every kernel compiles for the GPUs it is meant for, on a machine without one.

Shared memory within what a program may have, and no register spills, for every configuration that
the heuristics or the measurements pick. A new kernel adds one line to KERNELS in `calls.py`.
"""

import functools
import pathlib
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from kvjax.kernels.art import walk as art
from kvjax.kernels.common import backend, config
from kvjax.kernels.common.config import Config
from kvjax.kernels.decode import dense
from kvjax.kernels.decode.sparse import settings, sparse_decode
from kvjax.kernels.prr.speculate import attend_tiles, speculate, speculate_keys
from kvjax.kernels.selection.key_weights import key_weights
from kvjax.testing.decode_cases import Shape
from tests import steps
from tests.kernels.calls import (
  CALLS,
  DEVICES,
  FAST,
  called,
  floats,
  for_gpus,
  ints,
  sizes,
  slow_unless,
)
from tests.lowering import SHARED, compile_kernel, lower, truncated

pytest.importorskip("triton", minversion="3.9")  # 3.6 aborts on ART, 3.7 and 3.8 take stack

REPO = pathlib.Path(__file__).parents[2]

# Bytes of stack that a kernel may take: the assembler gives up a few registers there so that one
# more program fits a multiprocessor. All others: none.
STACK = {"art_walk": 48, "product": 8, "enter_codes": 8, "decode_int8": 8, "decode_int4": 8}
STACK |= {"longflow_read": 48, "prefill_attend": 8}


@functools.cache
def compiled(call: str) -> tuple:
  kind, function, arguments = CALLS[call]
  kernels = lower(function, *arguments, kind=kind)
  return tuple((kernel, compile_kernel(kernel, DEVICES[kind])) for kernel in kernels)


def _tier(call: str, seen: set[tuple[str, ...]]) -> Any:
  """A call's test: in the core, slow, or of sweeps.

  Slow are the first of every form of a kernel and its size for the GPU of the measurements, and the
  first of every kernel for the others.
  """
  kernel, *form, capability = call.split("-")
  kind = kernel, *form[: 2 * (capability == "sm90")], capability
  first = kind not in seen
  seen.add(kind)
  if call in FAST and "-share-" not in call:  # the assembler takes ten seconds for these
    return pytest.param(call)
  marks = [pytest.mark.slow] if first else [pytest.mark.slow, pytest.mark.sweep]
  return pytest.param(call, marks=marks)


_SEEN: set[tuple[str, ...]] = set()


@pytest.mark.core(3)
@pytest.mark.parametrize("call", [_tier(call, _SEEN) for call in CALLS])
def test_compiles_within_limits(call):
  capability = DEVICES[CALLS[call][0]]
  kernels = compiled(call)
  assert kernels
  for kernel, binary in kernels:
    assert not truncated(kernel), kernel.name
    assert binary.shared <= SHARED[capability], kernel.name
    assert binary.stack <= STACK.get(kernel.name, 0), kernel.name


def test_choices_between_constants_are_found():
  def kernel(x_ref, literal_ref, typed_ref):
    literal_ref[0] = jnp.where(x_ref[0] > 0, 22, 0)
    typed_ref[0] = jnp.where(x_ref[0] > 0, jnp.int32(22), 0)

  out = [jax.ShapeDtypeStruct((1,), jnp.int32)] * 2
  call = functools.partial(
    backend.call, kernel, grid=(1,), out=out, warps=1, stages=1, name="choice", interpret=False
  )
  (found,) = lower(call, ints(1))
  assert len(truncated(found)) == 1


@pytest.mark.slow
def test_the_core_has_every_kernel():
  def launched(calls: Iterable[str]) -> set[str]:
    made = (CALLS[call] for call in calls)
    return {kernel.name for kind, f, given in made for kernel in lower(f, *given, kind=kind)}

  every = launched(call for call in CALLS if call.endswith("-sm90"))
  assert launched(FAST) == every
  table = (REPO / "scripts/results/cpu/a100_occupancy.txt").read_text("utf-8")
  assert {line.split()[0] for line in table.splitlines()[4:]} == every  # tests.occupancy


def attention_calls(groups: int, head_dim: int, dtype: str) -> dict[str, tuple[Callable, list]]:
  """Operations whose shared memory grows with the queries, at one shape of heads."""
  shape, of, unit = Shape(1, 8, groups, 8192, head_dim, dtype), jax.ShapeDtypeStruct, 64
  (q, k, v), where, stop, lists = shape.abstract()[:3], [ints(1, 1)] * 2, ints(1), ints(1, 8, 32)
  kept, edge, keys = (of((1, *size, head_dim), dtype) for size in ((1, 8192), (8, 128), (8, 511)))
  guess, rest = [q, k, v, lists, stop], [*[floats(1, 8, 128)] * 2, floats(1, 3)]
  cut = settings(rows=8, slots=8192, **sizes(shape), unit=16, kind="NVIDIA RTX A6000")
  sparse = functools.partial(sparse_decode, unit=16, config=cut)
  walk = functools.partial(art.walk, patience=5, tile=128)
  beside = functools.partial(speculate_keys, unit=unit, stride=16, width=32)
  weigh = functools.partial(key_weights, blocks=8192, log=True)
  made: dict[str, tuple[Callable, list]] = {
    "attend_span": (dense.decode_with_output, [q, k, v, *where]),
    "attend_shared": (dense.decode_with_output, [q, kept, kept, *[ints(1, 8)] * 2]),
    "attend_table": (sparse, [q, k, v, *shape.lists(128), *where]),
    "attend_tiles": (functools.partial(attend_tiles, unit=unit), [q, k, v, lists, *where]),
    "speculate": (functools.partial(speculate, unit=unit), [*guess, edge, edge, *rest]),
    "speculate_keys": (beside, [*guess, keys, *rest]),
    "key_weights": (weigh, [q, k, *where, where[0]]),
    "art": (walk, [q, k, v, None, None, *where]),
  }
  return {name: (for_gpus(function), given) for name, (function, given) in made.items()}


@pytest.mark.rest(1)
@pytest.mark.slow
@pytest.mark.parametrize(
  "heads",
  [(128, 128, "bfloat16"), (64, 256, "bfloat16"), (32, 128, "float32"), (4, 256, "float32")],
)
def test_many_and_large_heads_fit_small_devices(heads):
  groups, head_dim, dtype = heads
  shape = {"groups": groups, "head_dim": head_dim, "itemsize": jnp.dtype(dtype).itemsize}
  for operation, (function, arguments) in attention_calls(*heads).items():
    assert config.least_shared(operation, **shape) <= SHARED[86]
    for kernel in lower(function, *arguments, kind="NVIDIA RTX A6000"):
      assert compile_kernel(kernel, 86).shared <= SHARED[86], (operation, kernel.name)


@pytest.mark.slow
def test_what_is_refused_does_not_fit():
  function, arguments = attention_calls(128, 256, "float32")["attend_span"]
  kernel = lower(function, *arguments, kind="NVIDIA RTX A6000")[0]
  shared, shape = SHARED[86], {"groups": 128, "head_dim": 256, "itemsize": 4}
  assert shared < compile_kernel(kernel, 86).shared <= config.least_shared("attend_span", **shape)


@pytest.mark.core(2)
@pytest.mark.parametrize(
  ("call", "name"),
  [
    ("art-unitNone-H128-bfloat16", "art_walk"),
    ("decode-H128-bfloat16", "decode_attend"),
    ("prr-speculate-unit64", "speculate"),
    ("quantised-int8-H128", "decode_int8"),
    ("quantised_sparse-int8-unit16-H128", "sparse_int8"),
    slow_unless(False, "quantised-int4-H128", "decode_int4"),
    slow_unless(False, "quantised_sparse-int4-unit16-H128", "sparse_int4"),
    slow_unless(False, "quantised_sparse-int8-unit64-H128", "sparse_int8"),
    slow_unless(False, "quantised_sparse-int8-unit1-H128", "sparse_int8"),
    slow_unless(False, "art-unit128-H128-bfloat16", "art_walk"),
    slow_unless(False, "sparse_decode-unit1-H128-bfloat16", "sparse_attend"),
    slow_unless(False, "sparse_decode-unit64-H128-bfloat16", "sparse_attend"),
    slow_unless(False, "products-partial_products-8B", "product"),
    slow_unless(False, "products-product-part-of-8B", "product"),
    slow_unless(False, "products-gated_product-part-of-8B", "product"),
    slow_unless(False, "prr-repair-pieces-unit64", "repair"),
  ],
)
def test_streams_through_shared_memory(call, name):
  # Without asynchronous copies the loop waits for every tile: a third of the bandwidth is lost.
  call = called(call)
  binary = next(b for k, b in compiled(call) if k.name == name)
  assert "cp.async" in binary.ptx
  assert "mma.sync" in binary.ptx


@pytest.mark.parametrize(
  ("call", "name"),
  [
    ("quantised-int8", "decode_int8"),
    ("quantised_sparse-int8-unit16-H128", "sparse_int8"),
    slow_unless(False, "quantised-int4", "decode_int4"),
    slow_unless(False, "quantised_sparse-int4-unit16-H128", "sparse_int4"),
    slow_unless(False, "quantised_sparse-int8-unit1-H128", "sparse_int8"),
    slow_unless(False, "quantised_sparse-int4-unit64-H128", "sparse_int4"),
  ],
)
def test_codes_are_multiplied_as_integers_and_turned_in_shared_memory(call, name):
  """Values byte by byte out of shared memory, or keys as floats, would cost what is saved."""
  binary = next(b for k, b in compiled(called(call)) if k.name == name)
  assert "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32" in binary.ptx
  assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in binary.ptx
  assert "ldmatrix.sync.aligned.m8n8.x4.trans" in binary.ptx
  assert "ld.shared.b8" not in binary.ptx


@pytest.mark.slow
@pytest.mark.parametrize(("call", "at_once"), [("cis-read-8x1040", 2), ("cis-read-16x4112", 4)])
def test_what_chooses_and_reads_leaves_room_for_others(call, at_once):
  """All rows run at once, as under `sparse_decode` alone: of registers each has its share."""
  ((kernel, binary),) = compiled(called(call))
  assert at_once * 32 * kernel.warps * binary.registers <= 65536
  assert "cp.async" in binary.ptx  # the keys of rows that look


@pytest.mark.slow
def test_a_single_query_waits_for_no_thread():
  call = called("sparse_decode-unit1-H128-bfloat16-rows512")
  ((_, binary),) = compiled(call)
  loop = re.search(r"^(\$L__BB0_\d+):(.*?)bra\s+\1;", binary.ptx, re.DOTALL | re.MULTILINE)
  assert loop and loop[2].count("ld.global.v4.b32") == 4
  assert "bar.sync" not in loop[2] and "st.shared" not in loop[2]


def test_prompts_use_the_matrix_units_of_a_group_of_warps():
  ((_, binary),) = compiled("prefill-plain-8192-H128-bfloat16-sm90")
  assert "wgmma.mma_async" in binary.ptx


# Of methods that insert, select, score, share, stop and stream in ways of their own.
LOWERED = ("full", "longflow", "quest", "cis", "prr, strict", "art, certified", "infllm")
LOWERED += ("int8 over quest",)


@pytest.mark.core(2)
@pytest.mark.parametrize("name", [slow_unless(name in LOWERED, name) for name in steps.CASES])
def test_a_step_lowers(name, monkeypatch):
  """Arguments as methods make them: a weakly typed one once lowered to no valid program."""
  monkeypatch.setattr(backend, "interpreted", lambda interpret=None: False)
  step, arguments = steps.decode_step(steps.CASES[name])
  assert lower(step, *arguments)


@pytest.mark.slow
def test_a_step_of_many_rows_lowers(monkeypatch):
  monkeypatch.setattr(backend, "interpreted", lambda interpret=None: False)
  step, arguments = steps.decode_step(steps.CASES["cpe"], spec=steps.MANY)
  names = sorted(kernel.name for kernel in lower(step, *arguments))
  assert names == ["cis_note", "cis_read", "enter_token"]


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED)
def test_triton_source_compiles(capability):
  import triton
  from triton.backends.compiler import GPUTarget
  from triton.compiler import ASTSource

  from kvjax.kernels.decode import jax_triton as twin

  cut = Config(tile=64, programs=264, warps=4, stages=3)
  attend = twin.attend_constants(8, 4096, 4, 128, 4, False, None, cut, "bfloat16")
  pointers = {f"{name}_ptr": "*bf16" for name in ("q", "q_sinks", "k", "v")}
  pointers |= {f"{name}_ptr": "*i32" for name in ("start", "stop", "cut")}
  for kernel, constants in (
    (twin.attend_kernel, attend),
    (twin.join_kernel, twin.join_constants(4, 128)),
  ):
    signature = {
      name: "constexpr" if name in constants else pointers.get(name, "*fp32")
      for name in kernel.arg_names
    }
    built = triton.compile(
      ASTSource(kernel, signature, constants),
      target=GPUTarget("cuda", capability, 32),
      options={"num_warps": cut.warps, "num_stages": cut.stages},
    )
    assert built.metadata.shared <= SHARED[capability]
