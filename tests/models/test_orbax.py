"""Weights in folders that Orbax writes: the numbers of safetensors, or a refusal by name."""

import json
import shutil
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from kvjax.models.io import convert, items, orbax
from tests import processes, tiny_gguf, tiny_hf
from tests.meshes import mesh_of


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
  """One model in both kinds of folders."""
  root = tmp_path_factory.mktemp("made")
  tiny_gguf.write(root / "x.gguf", tiny_gguf.tensors(tied=False))
  return {
    to: convert.convert(root / "x.gguf", root / to, to=to, progress=False) for to in items.KINDS
  }


@pytest.fixture
def copy(folders, tmp_path):
  return shutil.copytree(folders["orbax"], tmp_path / "copy")


@pytest.mark.core(3)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("mesh", [None, (2, 1), (1, 2), (2, 2)])
def test_both_kinds_load_alike(folders, mesh, dtype):
  """Bit by bit, and every part on the same device; without a mesh, committed to none."""
  mesh = mesh and mesh_of(*mesh)
  one, other = (
    jax.tree.leaves(convert.load(folders[to], dtype=dtype, mesh=mesh)[0]) for to in items.KINDS
  )
  for x, y in zip(one, other, strict=True):
    assert (x.dtype, x.sharding, x.committed) == (y.dtype, y.sharding, y.committed)
    for ours, theirs in zip(x.addressable_shards, y.addressable_shards, strict=True):
      np.testing.assert_array_equal(ours.data, theirs.data)
  assert convert.stored_bytes(folders["orbax"]) == convert.stored_bytes(folders["safetensors"])


def test_heads_are_written_apart(folders):
  """A device that holds one key/value head reads no other's numbers."""
  found = ocp.PyTreeCheckpointHandler().metadata(folders["orbax"] / "items" / "layer_001.orbax")
  chunks = {name: x.storage.chunk_shape for name, x in found.tree.items()}
  assert chunks["attention.wqkv"] == (64, 1, 4, 16) and chunks["attention.wo"] == (1, 2, 16, 64)


def test_other_kinds_are_refused(copy, tmp_path):
  with pytest.raises(ValueError, match="to: found 'zip', expected one of safetensors, orbax"):
    convert.convert(tmp_path / "x.gguf", tmp_path / "made", to="zip")
  description = json.loads((copy / "config.json").read_text())
  assert description["items"] == "orbax"
  for kind, error, says in (
    ("zip", ValueError, r"config\.json: items: found 'zip', expected one of safetensors"),
    ("safetensors", FileNotFoundError, "items: found 0 safetensors items, expected 3 layers"),
  ):
    (copy / "config.json").write_text(json.dumps({**description, "items": kind}))
    with pytest.raises(error, match=says):
      convert.load(copy)


@pytest.mark.parametrize("to", items.KINDS)
def test_arrays_of_another_shape(folders, tmp_path, to):
  copy = shutil.copytree(folders[to], tmp_path / "copy")
  description = json.loads((copy / "config.json").read_text())
  description["model"]["ffn"] = 128
  (copy / "config.json").write_text(json.dumps(description))
  with pytest.raises(ValueError, match=rf"layer_000\.{to}: found arrays .*96.*expected .*128"):
    convert.load(copy)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of its threads
def test_damaged_folders_are_refused_by_name(copy):
  """Every file of an item: cut short, begun with something else, one bit off, empty, or gone."""
  item = copy / "items" / "layer_002.orbax"
  for path in sorted(path for path in item.rglob("*") if path.is_file()):
    whole = path.read_bytes()
    half, bit = len(whole) // 2, bytes([whole[-1] ^ 1])
    for data in (None, b"", whole[:half], b"damaged!" + whole[8:], whole[:-1] + bit):
      path.unlink() if data is None else path.write_bytes(data)
      with pytest.raises(ValueError) as refused:
        convert.load(copy)
      assert str(refused.value).startswith(f"{item}: found ") and "\n" not in str(refused.value)
      path.write_bytes(whole)
  shutil.rmtree(item)
  with pytest.raises(FileNotFoundError, match=r"layer_002\.orbax: not found, expected"):
    convert.load(copy)


LOAD = """
import kvjax
from kvjax.models.io import convert
from tests.processes import peak

mesh = kvjax.make_mesh(heads=2)
small, folder = arguments
convert.load(small, mesh=mesh)  # what the libraries take once
(model, _), took = peak(lambda: convert.load(folder, mesh=mesh))
size = lambda tree: sum(s.data.nbytes for x in jax.tree.leaves(tree) for s in x.addressable_shards)
layer = max(sum(x.nbytes for x in jax.tree.leaves(x)) for x in model.layers)
print(took, size(model), layer)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from /proc")
@pytest.mark.parametrize("to", items.KINDS)
def test_a_process_reads_its_part(tmp_path, monkeypatch, to):
  """Memory of each of two processes: its own shards and 1.3 layers at most, of 142 MB."""
  monkeypatch.setenv(*processes.FREED_AT_ONCE)
  sizes = {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 6}
  made = []
  for name, config in (("small", {}), ("large", sizes)):
    source = tiny_hf.write(tmp_path / f"{name}.hf", {**tiny_hf.CASES["llama3"], **config})
    made.append(convert.convert(source, tmp_path / name, to=to, progress=False))
  for said in processes.output(LOAD, 2, *made):
    took, own, layer = map(int, said.split())
    assert layer > 1.4e8 and own == pytest.approx(3 * layer, rel=0.01)
    assert own < took < own + 1.3 * layer, f"found {(took - own) / layer:.2f} layers beside"


@pytest.mark.parametrize("dtype", ["bool", "int8", "bfloat16", "float32", "int32"])
def test_sums_tell_exchanged_numbers_wherever_they_are(dtype, monkeypatch):
  """The same on a host, on a device and in shards; two entries that change places are noticed."""
  monkeypatch.setattr(orbax, "_PIECE", 7)
  x = np.random.default_rng(0).integers(0, 100, (4, 3, 5)).astype(jnp.dtype(dtype))
  x[0, 0, 0], x[3, 2, 4] = 0, 1
  spread = jax.device_put(x, jax.NamedSharding(mesh_of(2, 2), jax.P("heads", None, None)))
  entries = (x.view(np.uint8) if dtype == "bool" else x).reshape(-1)
  bits = [int.from_bytes(entry.tobytes(), "little") for entry in entries]
  want = sum(n * (i * 0x9E3779B1 + 1) for i, n in enumerate(bits)) % 2**32
  assert orbax.sums({"a": x, "b": jnp.asarray(x), "c": spread}) == dict.fromkeys("abc", want)
  x[0, 0, 0], x[3, 2, 4] = 1, 0
  assert orbax.sums({"a": x})["a"] != want


@pytest.mark.parametrize("lent", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("devices", [1, 2])
def test_what_was_saved_can_be_donated(tmp_path, devices, dtype, lent):
  """From jax 0.11 on a view that an array has given to NumPy would forbid it."""
  mesh = mesh_of(devices)
  where = jax.NamedSharding(mesh, jax.P("heads"), memory_kind="pinned_host")
  x = jax.device_put(np.arange(8, dtype=jnp.dtype(dtype)), where)
  path = orbax.Saving(tmp_path / "x", {}, {"a": x}, lent=lent).wait()
  saved = orbax.latest(path) / orbax.ARRAYS
  read = orbax.load(saved, {"a": jax.ShapeDtypeStruct(x.shape, x.dtype)})["a"]
  np.testing.assert_array_equal(np.asarray(read, np.float32), np.arange(8))
  jax.jit(lambda x: x, donate_argnums=0, out_shardings=where)(x)
  assert x.is_deleted()


@pytest.mark.parametrize(("lent", "copies"), [(False, 1), (True, 0)])
def test_copies_of_what_is_saved(tmp_path, lent, copies):
  """A host's array is copied once, or not at all: a store may take half of its memory."""
  x = np.zeros(64 << 20, np.uint8)
  tracemalloc.start()
  try:
    orbax.Saving(tmp_path / "x", {}, {"a": x}, lent=lent).wait()
    _, peak = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  assert copies * x.nbytes <= peak < (copies + 0.5) * x.nbytes
