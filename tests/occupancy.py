"""Occupancy of an A100 by each kernel, from its machine code: no A100 was measured.

.venv/bin/python -m tests.occupancy > scripts/results/cpu/a100_occupancy.txt
"""

from collections.abc import Iterator

import jax

from tests.kernels.calls import CALLS
from tests.lowering import Binary, Kernel, compile_kernel, lower

CAPABILITY = 80
# A multiprocessor of an A100: bytes of shared memory, of which the driver takes some for each
# program; registers, handed out by 256 to a warp; warps; programs.
SHARED, RESERVED, REGISTERS, WARPS, PROGRAMS = 164 << 10, 1 << 10, 64 << 10, 64, 32


def programs(kernel: Kernel, binary: Binary) -> tuple[int, str]:
  """Programs that a multiprocessor runs at once, and what bounds them."""
  of_warp = -(-32 * binary.registers // 256) * 256
  limits = {
    "shared memory": SHARED // (binary.shared + RESERVED),
    "registers": REGISTERS // (of_warp * kernel.warps),
    "warps": WARPS // kernel.warps,
    "programs": PROGRAMS,
  }
  bound = min(limits, key=limits.__getitem__)
  return limits[bound], bound


def rows() -> Iterator[list[str]]:
  """One call of every kernel, in bfloat16 where it has one of 128 lanes."""
  chosen: dict[str, tuple[int, str, Kernel]] = {}
  for call, (kind, function, arguments) in CALLS.items():
    if not call.endswith(f"-sm{CAPABILITY}"):
      continue
    usual = ("H128" not in call) + ("bfloat16" not in call)
    for kernel in lower(function, *arguments, kind=kind):
      held = chosen.get(kernel.name)
      if held is None or usual < held[0]:
        chosen[kernel.name] = usual, call.removesuffix(f"-sm{CAPABILITY}"), kernel
  for name, (_, call, kernel) in sorted(chosen.items()):
    binary = compile_kernel(kernel, CAPABILITY)
    count, bound = programs(kernel, binary)
    yield [
      *(name, call, str(kernel.warps), str(kernel.stages), str(binary.registers)),
      *(f"{binary.shared / 1024:.1f}", str(binary.stack), str(count)),
      *(f"{count * kernel.warps / WARPS:.2f}", bound),
    ]


HEAD = (
  *("kernel", "call", "warps", "stages", "registers", "shared KiB", "stack"),
  *("programs", "of 64 warps", "bound by"),
)


def table() -> str:
  """The rows beneath their head, in columns."""
  every = [list(HEAD), *rows()]
  widths = [max(len(row[i]) for row in every) for i in range(len(HEAD))]
  lines = [
    "  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in every
  ]
  return "\n".join(lines)


if __name__ == "__main__":
  print(f"Kernels as jax {jax.__version__} lowers them and Triton compiles them for sm_80; cuts as")
  print("for an A100 80GB. Programs that a multiprocessor holds at once. Nothing was run.\n")
  print(table())
