"""GPUs with less shared memory: kernels are cut smaller, and refused where nothing fits."""

import dataclasses
import itertools
import json
import types
import warnings

import jax
import jax.numpy as jnp
import pytest

from kvjax import CacheSpec, Env
from kvjax.kernels.art import walk as art
from kvjax.kernels.common import config, devices
from kvjax.kernels.decode import sparse
from kvjax.kernels.products import product
from kvjax.kernels.prr import ratio, speculate
from kvjax.kernels.selection import key_weights
from kvjax.ops import table
from tests import steps

SMALL = ("NVIDIA RTX A6000", "NVIDIA GeForce RTX 5090", "Imaginary 1")
# Query heads per key/value head, head size, bytes per element.
SHAPES = [
  dict(zip(("groups", "head_dim", "itemsize"), shape, strict=True))
  for shape in itertools.product((1, 4, 32, 128), (64, 128, 256), (2, 4))
]


@pytest.fixture
def on(monkeypatch):
  """Takes the default device for a GPU of a kind, with as much shared memory as it is said to."""

  def take(kind: str, shared: int | None = None) -> None:
    here = devices.device(kind, shared=shared)
    monkeypatch.setattr(devices, "_default", lambda: here)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    table._say_once.cache_clear()

  return take


def heads(groups, head_dim, dtype):
  """Queries and keys of a step."""
  return jnp.zeros((1, 1, groups, head_dim), dtype), jnp.zeros((1, 1, 512, head_dim), dtype)


def test_what_the_runtime_says_of_a_device_counts(monkeypatch):
  """A slice of a GPU reads its part, and what was measured on the whole does not count."""
  found = types.SimpleNamespace(device_kind="NVIDIA H200", platform="cpu", core_count=16)
  monkeypatch.setattr(jax, "devices", lambda: [found])
  whole, here = devices.device("NVIDIA H200"), devices.this_device()
  assert (here.name, here.cores, here.shared) == ("nvidia-h200", 16, 227 << 10)
  assert (whole.source, here.source) == ("measured", "name")
  assert here.read == pytest.approx(devices.REACHED * 4.8e12 * 16 / 132)
  found.shared_memory_per_block_optin = 64 << 10
  assert devices.this_device().shared == 64 << 10


def test_tables_serve_devices_that_are_alike(monkeypatch, tmp_path):
  """Multiprocessors, shared memory and bandwidth within a tenth; the user's own come first."""
  shape = {"groups": 4, "slots": 32 << 10, "head_dim": 128, "itemsize": 2}
  h200 = devices.device("NVIDIA H200")
  known = {x.name: x for x in devices.known()}
  assert known["nvidia-h200"] == h200
  near = dataclasses.replace(h200, name="near", read=0.93 * h200.read)
  far = dataclasses.replace(h200, name="far", read=0.8 * h200.read, cores=110)
  assert config.tuned("decode", near) == config.tuned("decode", h200)
  assert config.tuned("decode", far) == ()
  monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))
  path = devices.folders()[0] / "nvidia-h200" / "decode.json"
  path.parent.mkdir(parents=True)
  own = config.Config(tile=16, programs=7, warps=4, stages=2)
  entry = {"bucket": config.bucket(rows=64, **shape), "config": dataclasses.asdict(own)}
  path.write_text(json.dumps({"entries": [entry]}))
  caches = devices.tables, config.tuned
  for cache in caches:
    cache.cache_clear()
  assert config.choose("decode", rows=64, **shape, kind="NVIDIA H200") == own
  assert len(config.tuned("decode", h200)) >= 10  # those of other buckets stay
  path.unlink()
  for stem, text, found, asked in (
    ("decode", "no table", "no JSON", lambda: config.tuned("decode", h200)),
    ("decode", '{"entries": [{"bucket": {}}]}', "KeyError", lambda: config.tuned("decode", h200)),
    ("prr", '{"entries": [{"bucket": {}}]}', "KeyError", lambda: ratio.measured("nvidia-h200")),
    ("device", '{"cores": 132}', "KeyError", lambda: devices.device("NVIDIA H200")),
    ("device", '{"cores": 0, "shared": 1}', "ValueError", lambda: devices.device("NVIDIA H200")),
  ):
    damaged = path.with_name(f"{stem}.json")
    damaged.write_text(text)
    for cache in caches:
      cache.cache_clear()
    with pytest.raises(ValueError, match=rf"{stem}\.json: found {found} .* `kvjax tune` writes"):
      asked()
    damaged.unlink()
  for cache in caches:
    cache.cache_clear()


def test_a_user_names_a_device_by_a_part():
  assert devices.named("H200").name == "nvidia-h200"
  assert devices.named("h100").source == "measured"
  assert devices.named("a100").source == "name"
  assert [devices.named(x).memory for x in ("a100", "A100-SXM4-40GB", "h100-nvl")] == [
    80e9,
    40e9,
    94e9,
  ]
  assert [devices.named(x).name for x in ("a10", "l4", "4090")] == ["a10", "l4", "rtx-4090"]
  assert devices.device("NVIDIA L40S").memory == 48e9
  with pytest.raises(ValueError, match="device: found 'b300', expected a part of one of nvidia-h"):
    devices.named("b300")


@pytest.mark.parametrize("kind", SMALL)
def test_every_shape_is_cut_to_fit_or_refused(kind, on):
  on(kind)
  refused = []
  for shape in SHAPES:
    cut = config.choose("decode", rows=8, slots=8192, **shape)
    walk = art.choose_cut(256, shape["head_dim"], shape["itemsize"], groups=shape["groups"])
    if config.least_shared("attend_span", **shape) > 99 << 10:
      refused.append(tuple(shape.values()))
      continue
    for found in (cut, walk):
      assert config.shared_bytes(found.tile, found.stages, **shape) <= 99 << 10
  assert refused == [(128, 256, 4)]


def test_devices_with_more_keep_the_heuristic():
  """Up to 32 query heads a key/value head the heuristic stands as it is."""
  here = devices.device("NVIDIA H200")
  for shape in SHAPES:
    size = {name: shape[name] for name in ("head_dim", "itemsize")}
    for cut in (
      config.heuristic(here, **size),
      config.streaming(here, rows=8, slots=8192, **shape),
    ):
      assert shape["groups"] > 32 or config.fitted(cut, here, **shape) == cut


def test_stages_go_before_keys():
  cut = config.Config(tile=64, programs=8, warps=4, stages=4)
  shape = {"groups": 4, "head_dim": 128, "itemsize": 2}
  made = [
    config.fitted(cut, devices.Device("", 1, size << 10), **shape) for size in (200, 80, 30, 1)
  ]
  assert [(found.tile, found.stages) for found in made] == [(64, 4), (64, 3), (32, 2), (16, 2)]


def test_a_shape_that_fits_nowhere(on):
  """`auto` says once that it takes the reference, and why; a name raises with the same figures."""
  q, k = heads(128, 256, jnp.float32)
  why = (
    r"needs 174080 bytes of shared memory for 128 query heads of 256 float32 per key/value head, "
    r"of which nvidia-geforce-rtx-5090 has 101376"
  )
  on("NVIDIA GeForce RTX 5090")
  with pytest.warns(UserWarning, match=rf"attend_span: .*{why}: impl='auto' takes the reference"):
    assert table.choose("attend_span", "auto", q, k) == "reference"
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    assert table.choose("attend_span", "auto", q, k) == "reference"
  for impl in ("pallas", "jax-triton"):
    with pytest.raises(NotImplementedError, match=rf"attend_span: the '{impl}' kernel {why}"):
      table.choose("attend_span", impl, q, k)
  assert table.choose("attend_span", "auto", *heads(128, 256, jnp.bfloat16)) == "pallas"
  on("NVIDIA H200")
  assert table.choose("attend_span", "auto", q, k) == "pallas"
  assert table.choose("attend_span", "pallas", q, k) == "pallas"


def test_the_interpreter_refuses_nothing():
  assert table.choose("attend_span", "pallas", *heads(128, 256, jnp.float32)) == "pallas"


ATTENTION = {
  *("decode_attend", "sparse_attend", "attend_tiles", "speculate"),
  *("art_walk", "art_read", "key_logits", "key_weights", "cis_read"),
}


@pytest.mark.core(3)
@pytest.mark.parametrize(
  "name", ["full", "streaming_llm", "quest", "cis", "infllm_v2", "prr", "prr, strict", "art"]
)
def test_a_step_of_refused_kernels_is_the_references(name, on, monkeypatch):
  """And its other launches stay; the same step on a GPU with more memory has all of them."""
  spec = CacheSpec(1, 4096, 2, 128, 256, 8, jnp.float32)
  monkeypatch.setattr(steps, "SPEC", spec)
  monkeypatch.setattr(steps, "Env", lambda *args, impl: Env(*args, impl="auto"))
  launched = {}
  for kind in ("NVIDIA GeForce RTX 5090", "NVIDIA H200"):
    on(kind)
    with warnings.catch_warnings(record=True) as said:
      warnings.simplefilter("always")
      counts = steps.operations(steps.CASES[name])
    launched[kind] = {x.removeprefix("launch ") for x in counts if x.startswith("launch ")}
    assert bool(said) == (kind not in ("NVIDIA H200",))
  small, large = launched.values()
  assert not small & ATTENTION and large & ATTENTION
  assert "enter_token" in small


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("rows", [1, 64])
def test_products_have_fewer_stages(rows, dtype, on):
  x, w = jnp.zeros((rows, 512), dtype), jnp.zeros((512, 2, 96), dtype)
  cut = product.whole_blocking(96, gated=True)
  tile = (max(16, rows) + 2 * cut.columns) * cut.depth * w.dtype.itemsize
  on("NVIDIA RTX A6000")
  found = product.fitted(cut, x, w)
  assert (found.stages - 1) * tile <= 99 << 10 < found.stages * tile or found == cut
  on("NVIDIA H200")
  assert product.fitted(cut, x, w).stages >= found.stages
  if dtype == jnp.bfloat16 and rows == 1:
    assert found == cut


def test_tiles_of_scores_and_speculation_shrink(on):
  shape = {"groups": 4, "head_dim": 256, "itemsize": 4}
  q, keys = heads(4, 256, jnp.float32)
  tiles = {}
  for kind in ("NVIDIA RTX A6000", "NVIDIA H200"):
    on(kind)
    tile, steps_each = key_weights.cut(q, keys, None, 1)
    assert tile * steps_each == 512  # one program goes over all keys of its row
    tiles[kind] = tile, config.fitted_tile(speculate.KEYS, speculate.STAGES, **shape)
  assert tiles == {"NVIDIA RTX A6000": (32, 16), "NVIDIA H200": (64, 32)}
  on("NVIDIA RTX A6000")
  cut = sparse.settings(rows=8, groups=4, slots=8192, head_dim=256, itemsize=4, unit=16)
  assert config.shared_bytes(cut.tile, (cut.stages + 1) // 2, **shape) <= 99 << 10
