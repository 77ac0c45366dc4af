"""Lowers a jitted function for a GPU on a machine without one, down to machine code.

jax gives the Triton IR of every kernel; the stand-alone `triton` package compiles it for a compute
capability with the ptxas that it carries, and cuobjdump reports what the machine code needs.
Touches private jax modules, which is why it lives with the tests.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src.lib.mlir import ir
from jax._src.pallas.triton import lowering as triton_lowering

from kvjax.kernels.common import devices

# What XLA does too; triton warns when nobody says.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

# Shared memory that one program may use, in bytes, by compute capability: A100; workstation and
# consumer parts of Ampere; H100 and H200; workstation and consumer parts of Blackwell.
SHARED = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10, 120: 99 << 10}


@dataclasses.dataclass(frozen=True)
class Kernel:
  """Triton IR of one kernel call, with its launch parameters."""

  name: str
  text: str
  warps: int
  stages: int
  grid: tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Binary:
  """Machine code of a kernel: PTX, bytes of shared memory and of stack (spills), registers."""

  ptx: str
  shared: int
  stack: int
  registers: int


@contextlib.contextmanager
def default_device(kind: str) -> Iterator[None]:
  """Kernels cut their work for a device of this JAX kind, whatever there is."""
  before, devices._default = devices._default, lambda: devices.device(kind)
  try:
    yield
  finally:
    devices._default = before


def lower(function: Callable, *shapes: Any, kind: str = "NVIDIA H200") -> list[Kernel]:
  """The Triton kernels that `function` calls, lowered for a device from abstract arguments."""
  context: Any = contextlib.nullcontext()
  if hasattr(jax.sharding, "AbstractDevice"):
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    # Kernels are cut for `kind`; jax has to know the device that it lowers for, and does not all.
    here = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    context = use_abstract_mesh(AbstractMesh((), (), abstract_device=here))
  with default_device(kind), context:
    lowered = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",))
  return list(_kernels(lowered.compiler_ir().operation))


def _kernels(operation: Any) -> Iterator[Kernel]:
  operation = getattr(operation, "operation", operation)
  if operation.name == "stablehlo.custom_call":
    target = ir.StringAttr(operation.attributes["call_target_name"]).value
    if target == "__gpu$xla.gpu.triton":
      yield _kernel(operation)
  for region in operation.regions:
    for block in region.blocks:
      for inner in block.operations:
        yield from _kernels(inner)


def _kernel(operation: Any) -> Kernel:
  attributes = operation.attributes
  key = next(key for key in ("mhlo.backend_config", "backend_config") if key in attributes)
  call = ir.DictAttr(attributes[key])

  def integer(name):
    return ir.IntegerAttr(call[name]).value

  with triton_lowering._new_ir_context(), ir.Location.unknown():
    module = ir.Module.parse(ir.StringAttr(call["ir"]).value_bytes)
    module.operation.verify()
    text = module.operation.get_asm(enable_debug_info=False, print_generic_op_form=True)
  return Kernel(
    ir.StringAttr(call["name"]).value,
    text,
    integer("num_warps"),
    integer("num_stages"),
    (integer("grid_x"), integer("grid_y"), integer("grid_z")),
  )


def truncated(kernel: Kernel) -> list[str]:
  """Choices between two constants that became one bit wide, whatever they were.

  Triton's lowering (jax 0.11) gives the constants of `jnp.where(p, 22, 0)`, p a scalar, the type of
  p: 22 becomes 0. The interpreter does not.
  """
  bits = set(re.findall(r'(%\w+) = "arith\.constant"\(\).*-> i1$', kernel.text, re.MULTILINE))
  choice = re.compile(r'.*"arith\.select"\(%\w+, (%\w+), (%\w+)\).*-> i1$', re.MULTILINE)
  return [found[0] for found in choice.finditer(kernel.text) if bits.issuperset(found.groups())]


def compile_kernel(kernel: Kernel, capability: int) -> Binary:
  """Compiles a kernel for a compute capability, 80 or 120 say."""
  import triton
  from triton.backends import nvidia
  from triton.backends.compiler import GPUTarget

  with tempfile.TemporaryDirectory() as folder:
    source = pathlib.Path(folder) / "kernel.ttir"
    source.write_text(kernel.text)
    built = triton.compile(
      str(source),
      target=GPUTarget("cuda", capability, 32),
      options={"num_warps": kernel.warps, "num_stages": kernel.stages},
    )
    cubin = pathlib.Path(folder) / "kernel.cubin"
    cubin.write_bytes(built.asm["cubin"])
    tool = pathlib.Path(nvidia.__path__[0]) / "bin" / "cuobjdump"
    report = subprocess.run(
      [str(tool), "--dump-resource-usage", str(cubin)], check=True, capture_output=True, text=True
    ).stdout
  usage = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", report)}
  return Binary(
    built.asm["ptx"], built.metadata.shared, usage["STACK"] + usage["LOCAL"], usage["REG"]
  )
