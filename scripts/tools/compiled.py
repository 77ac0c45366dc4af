"""For developers: count a decode step's launches as XLA compiles them for a GPU, without one.

    python -m scripts.tools.compiled                         every method, on an H200
    python -m scripts.tools.compiled --only quest --text     and XLA's program

Kernels, XLA's own fusions and copies are those that a profile on the card shows
(`scripts.tools.launches`), without their times. Needs jax's CUDA plugin, but none of NVIDIA's
libraries: pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt, of jax's version, from 0.11 on.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Annotated, Any
from unittest import mock

import jax
import jax.numpy as jnp
import tyro
from jax.experimental import topologies

import kvjax
from kvjax.kernels.common import devices
from kvjax.kernels.common.devices import Device
from kvjax.programs import common
from scripts.benches._layer import step_of

SPEC = kvjax.CacheSpec(8, 8192, 8, 4, 128, 32, jnp.bfloat16)
LAYER, BUDGET = 7, 1024
# Of Hopper; what a device's record has is put in.
TARGET = """
gpu_device_info {{
  cuda_compute_capability {{ major: 9 }}
  core_count: {cores} fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {shared}
  shared_memory_per_core: 233472 l2_cache_size: 52428800
  memory_bandwidth: {read:.0f} device_memory_size: {memory:.0f}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{kind}"
"""


@dataclasses.dataclass(frozen=True)
class Args:
  only: str = ""
  """Only methods whose name contains it."""
  card: Annotated[str, tyro.conf.arg(metavar="NAME")] = "NVIDIA H200"
  """A Hopper card, as jax names it."""
  text: bool = False
  """Print XLA's program as well."""


def methods() -> dict[str, kvjax.Method]:
  """Those of the table, and codes under some."""
  made = {name: kvjax.settings.example(cls, BUDGET) for name, cls in kvjax.METHODS.items()}
  coded = ("quest", "longflow", "art")
  return made | {f"quantised {name}": kvjax.Quantised(made[name]) for name in coded}


def program(method: kvjax.Method, device: Any, spec: kvjax.CacheSpec = SPEC) -> str:
  """XLA's scheduled program of a layer's decode step, the cache donated."""
  here = jax.sharding.SingleDeviceSharding(device)

  def of(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=here)

  step = step_of(method, "auto", spec.layers, layer=LAYER)
  cache = jax.eval_shape(functools.partial(kvjax.Cache.empty, method, spec, LAYER))
  cache = jax.tree.map(lambda x: of(x.shape, x.dtype), cache)
  qkv = of((spec.batch, spec.kv_heads, spec.groups + 2, spec.head_dim), spec.dtype)
  abstract = jax.sharding.AbstractDevice(device.device_kind, None, "gpu")
  with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=abstract)):
    lowered = jax.jit(step, donate_argnums=0).lower(cache, qkv, of((spec.batch,), bool))
  return lowered.compile({"xla_gpu_autotune_level": "0"}).as_text()  # nothing can be timed


def launched(text: str) -> collections.Counter[str]:
  """Names of what a program launches: kernels, fusions (with what they end in), copies by shape."""
  counts: collections.Counter[str] = collections.Counter()
  for part in re.split(r"\n(?=\S[^\n]*\{\n)", text):
    if "fused" in part.split("(")[0]:
      continue
    for name, shape, kind, rest in re.findall(
      r"^  (?:ROOT )?%(\S+) = (.*?) (fusion|copy|custom-call|while)\((.*)$", part, re.M
    ):
      kernel = re.search(r'op_name="[^"]*?(\w+)/pallas_call"', rest)
      named = kernel[1] if kernel else re.sub(r"[.\d]+$", "", name)
      counts[f"copy {shape.partition('{')[0]}" if kind == "copy" else named] += 1
  return counts


def on_card(card: str, run: Callable[[Any, Device], None]) -> None:
  """Calls `run` with a described device and its record, as if the process had it."""
  record = devices.device(card)
  target = TARGET.format(**dataclasses.asdict(record), kind=card)
  jax.config.update("jax_platforms", "cpu")  # else the plugin looks for NVIDIA's libraries
  jax.config.update("jax_enable_compilation_cache", False)  # no such program is read from one
  try:
    described = topologies.get_topology_desc("", "cuda", target_config=target, topology="1x1x1")
  except NotImplementedError as error:
    raise ValueError(
      "jax: found no CUDA plugin, expected one: pip install --no-deps jax-cuda12-plugin "
      f"jax-cuda12-pjrt, of version {jax.__version__}"
    ) from error
  backend = mock.patch.object(jax, "default_backend", lambda: "gpu")
  with backend, mock.patch.object(devices, "_default", lambda: record):
    run(described.devices[0], record)


def main(args: Args) -> None:
  def run(device: Any, record: Device) -> None:
    heads = f"{SPEC.kv_heads}x{SPEC.groups} of {SPEC.head_dim}"
    print(f"{record.name}, jax {jax.__version__}: a layer's step, B{SPEC.batch}, ", end="")
    print(f"{SPEC.capacity:,} slots, {heads}, budget {BUDGET:,}")
    for name, method in methods().items():
      if args.only not in name:
        continue
      text = program(method, device)
      counts = launched(text)
      each = ", ".join(n if k == 1 else f"{n} ({k})" for n, k in counts.items())
      print(f"{name:20} {counts.total():3}  {each}", flush=True)
      if args.text:
        print(text)

  on_card(args.card, run)


if __name__ == "__main__":
  common.run(main, Args)
