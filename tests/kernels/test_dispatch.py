"""Which implementation runs: names are honoured, missing ones raise, auto is stated."""

import dataclasses
import functools
import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import kvjax
from kvjax import (
  ART,
  CIS,
  CPE,
  ETF,
  H2O,
  PRR,
  PSAW,
  TOVA,
  CacheSpec,
  Full,
  HShare,
  Prompt,
  Quest,
  SnapKV,
  Span,
  StreamingLLM,
  TopKOracle,
  Wrapper,
)
from kvjax.families import entrance, sight
from kvjax.kernels.prefill import hopper
from kvjax.methods.streaming_llm import StreamingLLMByTurn
from kvjax.ops import prefill, table
from kvjax.runtime import sharding
from kvjax.testing.layer import Layer, Stream, softmax_average
from tests.kernels.listed import alike, taken
from tests.meshes import mesh_of
from tests.steps import env, implementation


def test_missing_kernel_names_what_there_is():
  with pytest.raises(NotImplementedError, match=r"attend_table: no 'jax-triton' .*pallas"):
    table.kernel("attend_table", "jax-triton")


def test_unknown_implementation():
  with pytest.raises(ValueError, match=r"Env\.impl: found 'cuda', expected one of"):
    env("cuda")


def test_auto_is_the_reference_without_a_gpu(monkeypatch):
  monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
  assert table.choose("attend_span", "auto") == "reference"
  assert table.choose("attend_span", "pallas") == "pallas"


def test_auto_leaves_alone_what_has_not_run(monkeypatch):
  """By name it runs."""
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  monkeypatch.setattr(table, "_UNRUN", {"repair"})
  assert table.choose("repair", "auto") == "reference"
  assert table.choose("repair", "pallas") == "pallas"
  assert table.choose("attend_shared", "auto") == "pallas"
  assert table.choose("attend_span", "auto") == "pallas"


WITHOUT = """
import sys, warnings
sys.modules["jax.experimental.pallas.triton"] = None  # as a jax that has dropped it
import jax, numpy as np
from kvjax import Full, Quest
from kvjax.ops import table
from kvjax.models.decode.generate import generate, pad, prefill
from kvjax.testing import Run

method = Quest(8, page=4)
run = Run(method, impl="auto")
caches = run.model.init_caches(method, 1, 32)
logits, caches = prefill(run.model, *pad([[1, 2, 3]]), caches, method)
out, _ = generate(run.model, logits, caches, method, steps=3)
assert out.tokens.shape == (1, 3)

try:
  table.choose("attend_table", "pallas")
except NotImplementedError as error:
  print(error)
gpu = {"default_backend": lambda: "gpu", "__version__": jax.__version__}
table.jax = type("", (), gpu)
with warnings.catch_warnings(record=True) as said:
  warnings.simplefilter("always")
  for operation in ("attend_span", "enter_token", "attend_span"):
    assert table.choose(operation, "auto") == "reference"
(warning,) = said
print(warning.message)
"""


@pytest.mark.slow
def test_a_jax_without_the_lowering_runs_the_references():
  """It decodes; a kernel by name is refused, and "auto" says once what it lacks."""
  env = {**os.environ, "JAX_PLATFORMS": "cpu"}
  command = [sys.executable, "-c", WITHOUT]
  done = subprocess.run(command, env=env, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  refused, said = done.stdout.splitlines()
  lacks = "needs jax.experimental.pallas.triton, which jax "
  assert refused.startswith(f"attend_table: the 'pallas' kernel {lacks}")
  assert said.startswith(f"a GPU kernel {lacks}")
  assert said.endswith("impl='auto' takes the reference")


def test_a_kernel_that_returns_no_logits_is_refused_to_who_reads_them():
  layer = Layer(TOVA(budget=12), Stream.random(0), env=env("jax-triton"))
  layer.prefill([5, 3])
  with pytest.raises(
    NotImplementedError, match=r"TOVA reads logits \(wants_logits\); the 'jax-triton' kernel"
  ):
    layer.decode([5, 3])


@dataclasses.dataclass(frozen=True)
class Narrowed(Wrapper):
  """Two first slots, and of the others, for each KV head, a range of its own."""

  @property
  def traits(self):
    return super().traits.but(spreads=True)

  def span(self, at, cache, window):
    heads = 1 + jnp.arange(cache.pos.shape[1], dtype=jnp.int32)
    stop = cache.used[:, None] - heads
    return Span(jnp.broadcast_to(3 * heads, stop.shape), stop, 2)


NARROWED = {
  "full": Full(),
  "reads logits": H2O(budget=24),
  "ring": StreamingLLM(budget=24, sinks=2, rope="original"),
  "turned ring": StreamingLLM(budget=24, sinks=2),
  "pages": Quest(budget=12, page=4, dense_layers=0),
  "tokens": TopKOracle(budget=12),
  "shared": CIS(k=6, sinks=2, local=2),
  "heads shared": kvjax.settings.example(HShare, 16),
  "walk": ART(tile=4, patience=99, splits=1),
  "forecast": PRR(Quest(budget=12, page=4, dense_layers=0)),
}


@pytest.mark.rest(5)
@pytest.mark.slow
@pytest.mark.parametrize("name", NARROWED)
def test_nothing_outside_of_the_span_is_attended_to(name):
  """A method's own span means the same to kernels and to the reference."""
  base, stream, how = NARROWED[name], Stream.random(1), {"steps": 3, "lengths": [30, 17]}
  (outs, *_), _ = alike(Narrowed(base), stream, 3, "visited", atol=1e-5, **how)
  others, *_ = taken(base, stream, "pallas", 3, **how)
  assert all(np.abs(out - other).max() > 0.1 for out, other in zip(outs, others, strict=True))


def test_a_span_of_every_head_over_slots_on_two_devices():
  """As on one; against NumPy too."""
  mesh, stream = mesh_of(slots=2), Stream.random(1, tokens=13)
  method, seen = Narrowed(Full()), jnp.array([12, 9])
  cache = kvjax.Cache.empty(method, stream.spec(16), 0)
  k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, 3), (0, 0))) for x in (stream.k, stream.v))
  pos = jnp.where(jnp.arange(16) < seen[:, None], jnp.arange(16), -1)
  pos = jnp.broadcast_to(pos[:, None], k.shape[:3])
  cache = cache.put(slots={"k": k, "v": v, "pos": pos}, rows={"seen": seen, "used": seen})
  specs, alike = sharding.cache_specs(cache, method), PartitionSpec()
  at = method.at(sharding.on_mesh(env("reference"), mesh), 0)

  def attended(cache, q):
    return method.attend(at, cache, sight.visible(at, cache), q).state.o

  q = stream.q[..., 0, :]
  out = jax.jit(sharding.shard_map(attended, mesh, (specs, alike), alike))(cache, q)
  for b, h, g in np.ndindex(2, 3, 3):
    see = [s for s in range(seen[b] - h - 1) if s < 2 or s >= 3 * (h + 1)]
    want = softmax_average(stream.k[b, h, see] @ q[b, h, g] / 4.0, stream.v[b, h, see])
    np.testing.assert_allclose(out[b, h, g], want, atol=1e-5)


@pytest.mark.slow
def test_queries_are_rounded_to_the_dtype_of_the_cache():
  """Float32 projections over a bfloat16 cache: the kernel agrees to bfloat16, in float32."""
  outputs = []
  for impl in ("pallas", "reference"):
    layer = Layer(Full(), Stream.random(1), env=env(impl))
    layer.cache = kvjax.Cache.empty(Full(), dataclasses.replace(layer.spec, dtype=jnp.bfloat16), 1)
    layer.prefill([20, 7])
    out, _ = layer.decode([20, 7])
    outputs.append(out)
  assert outputs[0].dtype == np.float32
  np.testing.assert_allclose(*outputs, atol=2e-2)


@pytest.mark.slow
def test_a_token_enters_split_slots_by_the_kernel():
  """Rows that end on either device, a full one and an idle one, as the reference enters them."""
  mesh, method = mesh_of(slots=2), Full()
  cache = kvjax.Cache.empty(method, CacheSpec(4, 16, 3, 2, 8, 1, jnp.float32), 0)
  seen = jnp.array([7, 8, 16, 3])
  live, specs = jnp.array([True, True, True, False]), sharding.cache_specs(cache, method)
  q, k, v = (
    jax.random.normal(jax.random.key(i), (4, 3, *size))
    for i, size in enumerate([(2, 8), (8,), (8,)])
  )

  def entered(impl):
    at = method.at(sharding.on_mesh(env(impl), mesh), 0)
    enter = functools.partial(entrance.enter_token, at)
    alike = PartitionSpec()
    run = sharding.shard_map(enter, mesh, (specs, *[alike] * 4), (alike, specs))
    return jax.jit(run)(cache.put(rows={"seen": seen, "used": seen}), q, k, v, live)

  found, wanted = (jax.tree.leaves(entered(impl)) for impl in ("pallas", "reference"))
  for a, b in zip(found, wanted, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("heads", [3, 4])
def test_a_prompt_that_all_devices_have_is_shared_by_heads(heads):
  """Each attends to half of them; where they are odd, to all."""
  mesh, valid = mesh_of(slots=2), jnp.array([9, 5])
  prompt = Prompt(valid, valid, None, 9, 0)
  sizes = (2, heads, 2, 9, 8), (2, heads, 9, 8), (2, heads, 9, 8)
  rng = np.random.default_rng(0)
  q, k, v = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in sizes)
  qpos = jnp.where(jnp.arange(9) < valid[:, None], jnp.arange(9), -1)
  staged = {"k": k, "v": v, "pos": jnp.broadcast_to(qpos[:, None], k.shape[:3])}

  def attended(where):
    at = Full().at(where, 0)
    found = Full().attend_prompt(at, staged, q, qpos, prompt)
    return found.state.o, found.state.m, found.visited

  alike = PartitionSpec()
  spread = functools.partial(attended, sharding.on_mesh(env("reference"), mesh))
  found = jax.jit(sharding.shard_map(spread, mesh, (), alike))()
  wanted = jax.jit(lambda: attended(env("reference")))()
  for a, b in zip(found, wanted, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-6)


PROMPTS = {
  "full": Full(),
  "narrowing": PSAW(sinks=2, phi=0.5),
  "turned": StreamingLLM(budget=9, sinks=2),
  "by turn": StreamingLLMByTurn(budget=40, sinks=2, reserve=2),
  "weighed": SnapKV(budget=12, window_size=4),
  "gathered": H2O(budget=12),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMPTS)
def test_prompt_kernels_agree_with_the_reference(name):
  """A ragged prompt and a further turn: outputs, and what stays in the cache."""
  outputs, caches = [], []
  for impl in ("pallas", "reference"):
    layer = Layer(PROMPTS[name], Stream.random(2), env=env(impl), layer=3)
    first = layer.prefill([20, 7])
    second = layer.prefill([9, 13], start=[20, 7], past=None, total=[9, 13])
    real = [
      x[b, :, :, :n] for x, ns in ((first, (20, 7)), (second, (9, 13))) for b, n in enumerate(ns)
    ]
    outputs.append(real)
    caches.append(layer.cache)
  for a, b in zip(*outputs, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)
  for a, b in zip(*map(jax.tree.leaves, caches), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


def test_auto_takes_what_does_all_that_a_prompt_needs(monkeypatch):
  monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
  assert implementation(Full()) == "reference"
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  assert implementation(Full()) == "cudnn"
  assert implementation(SnapKV(budget=64)) == "cudnn"
  assert implementation(PSAW()) == "cudnn"  # a layer without a window
  assert implementation(PSAW(), layer=3) == "pallas"
  assert implementation(StreamingLLM(budget=512)) == "pallas"
  assert implementation(ETF(), layer=3) == "pallas"
  assert implementation(Full(), past=4096) == "pallas"
  assert implementation(Full(), past=None) == "pallas"
  assert implementation(Full(), head_dim=256) == "pallas"
  assert implementation(Full(), soft_cap=50.0) == "pallas"
  assert implementation(Full(), past=4096, soft_cap=50.0) == "pallas"
  assert implementation(Full(), head_dim=512) == "reference"
  assert implementation(Full(), dtype=jnp.float32) == "reference"


@pytest.mark.parametrize(("capability", "has"), [("7.5", False), ("gfx90a", False), ("12.1", True)])
def test_cudnn_is_for_ampere_and_what_came_after(monkeypatch, capability, has):
  device = types.SimpleNamespace(compute_capability=capability)
  monkeypatch.setattr(jax, "devices", lambda: [device])
  assert prefill._has_cudnn() == has


def test_cudnn_by_name_takes_whole_prompts():
  assert implementation(Full(), impl="cudnn") == "cudnn"
  assert implementation(PSAW(), impl="cudnn") == "cudnn"  # a layer without a window


def test_auto_takes_the_kernel_of_hopper_where_slots_are_positions(monkeypatch):
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  monkeypatch.setattr(hopper, "_lowers", lambda: True)
  for method in (PSAW(), ETF(), CPE()):
    assert implementation(method, layer=3) == "hopper"
  assert implementation(Full()) == "cudnn"
  assert implementation(Full(), rows=2) == "hopper"
  assert implementation(Full(), past=4096) == "hopper"
  assert implementation(Full(), past=None) == "hopper"
  assert implementation(Full(), head_dim=256) == "hopper"
  assert implementation(Full(), head_dim=96) == "cudnn"
  assert implementation(PSAW(), layer=3, head_dim=96) == "pallas"
  assert implementation(StreamingLLM(budget=512)) == "pallas"  # sinks are turned
  assert implementation(SnapKV(budget=64), past=4096) == "pallas"  # slots in any order
  assert implementation(Full(), soft_cap=50.0) == "pallas"
  assert implementation(Full(), dtype=jnp.float32) == "reference"


@pytest.mark.parametrize(
  ("found", "options"),
  [
    ("StreamingLLM has a window in this layer; 'cudnn'", {"method": StreamingLLM(budget=512)}),
    ("PSAW has a window in this layer; 'cudnn'", {"method": PSAW(), "layer": 3}),
    ("ETF attends to more or less than a whole prompt", {"method": ETF(), "layer": 3}),
    ("Full attends to more or less than a whole prompt", {"past": None}),
    ("SnapKV attends to more or less", {"method": SnapKV(budget=64), "past": 4096}),
    ("Full has heads of 128 float32; 'cudnn' takes", {"dtype": jnp.float32}),
    (r"Full caps its logits \(soft_cap = 50\.0\); 'cudnn' does not", {"soft_cap": 50.0}),
    ("Full caps its logits", {"soft_cap": 50.0, "past": 4096}),
    ("Full has heads of 36 bfloat16; 'cudnn' takes", {"head_dim": 36}),
    ("Full has heads of 512; 'pallas' takes up to 256", {"head_dim": 512, "impl": "pallas"}),
  ],
)
def test_a_named_implementation_never_gives_way(found, options):
  with pytest.raises(NotImplementedError, match=f"attend_prompt: {found}"):
    implementation(**{"method": Full(), "impl": "cudnn", **options})
