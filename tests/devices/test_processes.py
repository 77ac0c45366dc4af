"""A mesh over the devices of several processes: what each of them gets is what one device gives."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{sys.argv[2]}", num_processes=2, process_id=int(sys.argv[1]))
import jax.numpy as jnp
import numpy as np
from flax import nnx
import kvjax
from kvjax.models.nn.config import ModelConfig
from kvjax.models.decode.generate import generate, prefill
from kvjax.models.nn.parallel import shard
from kvjax.models.nn.transformer import Transformer

assert (len(jax.devices()), len(jax.local_devices())) == (4, 2)
config = ModelConfig(vocab=64, dim=32, layers=2, heads=8, kv_heads=4, head_dim=8, ffn=64)
model = Transformer(config, dtype=jnp.float32, impl="reference", rngs=nnx.Rngs(0))
method = kvjax.H2O(budget=8)
out = []
for decoder in (model, shard(model, kvjax.make_mesh(heads=4))):
  caches = decoder.init_caches(method, batch=1, capacity=32)
  logits, caches = prefill(decoder, np.arange(1, 13)[None], np.array([12]), caches, method)
  out.append(generate(decoder, logits, caches, method, steps=6, return_logits=True)[0])
np.testing.assert_array_equal(out[0].tokens, out[1].tokens)
np.testing.assert_allclose(out[0].logits, out[1].logits, atol=1e-4)
print("alike")
"""


@pytest.mark.slow
def test_two_processes_of_two_devices():
  """Each passes the same model and the same tokens, and reads the same text."""
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
  flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
  environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
  processes = [
    subprocess.Popen(
      [sys.executable, "-c", PROGRAM, str(rank), str(port)],
      cwd=ROOT,
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for rank in range(2)
  ]
  try:
    for process in processes:
      said, errors = process.communicate(timeout=300)
      assert process.returncode == 0 and said.endswith("alike\n"), errors
  finally:
    for process in processes:
      process.kill()
