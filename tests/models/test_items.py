"""Weights of a checkpoint: in which dtype they are stored, written and read, to the last bit."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from gguf import GGMLQuantizationType as Kind

from kvjax.models.io import convert, gguf, items
from kvjax.models.io import source as model_source
from kvjax.models.io.source import finite, turned
from kvjax.programs import common, convert_checkpoint
from tests import tiny_gguf


@pytest.mark.parametrize(
  ("kind", "dtype", "want"),
  [
    (Kind.F32, None, np.float32),
    (Kind.F16, None, np.float16),
    (Kind.BF16, None, jnp.bfloat16),
    (Kind.Q8_0, None, jnp.bfloat16),
    (Kind.Q4_1, None, jnp.bfloat16),
    (Kind.Q4_1, "float32", np.float32),
    (Kind.Q4_1, "float16", np.float16),
    (Kind.F32, "bfloat16", jnp.bfloat16),
    (Kind.F16, "float32", np.float32),
  ],
)
def test_matrices_are_the_file_s_rounded_once(tmp_path, kind, dtype, want):
  """Numbers as the package dequantises them, in NumPy's order of rounding; vectors as they were."""
  stored = tiny_gguf.write(tmp_path / "x.gguf", tiny_gguf.tensors(tied=False), kind=kind)
  convert.convert(tmp_path / "x.gguf", tmp_path / "x", dtype=dtype, progress=False)
  final, layer = (
    safetensors.numpy.load_file(tmp_path / "x" / "items" / f"{name}.safetensors")
    for name in ("final", "layer_001")
  )
  part = lambda name: stored[f"blk.1.{name}.weight"].astype(want)  # noqa: E731
  for found, expected in (
    (final["head"], stored["output.weight"].astype(want)),
    (layer["mlp.down"], part("ffn_down").T),
    (layer["mlp.gate_up"][:, 0], part("ffn_gate").T),
    (layer["mlp.gate_up"][:, 1], part("ffn_up").T),
    (layer["attention.wo"].reshape(64, 64), part("attn_output").T),
    (layer["attention.wqkv"][:, 1, 3], part("attn_v")[16:].T),
    (final["norm.scale"], stored["output_norm.weight"]),
    (layer["mlp_norm.scale"], stored["blk.1.ffn_norm.weight"]),
  ):
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)
  vectors = 4 * 7 * tiny_gguf.D
  matrices = np.dtype(want).itemsize * sum(x.size for x in stored.values() if x.ndim > 1)
  assert convert.stored_bytes(tmp_path / "x") == (
    {"float32": matrices + vectors}
    if want is np.float32
    else {np.dtype(want).name: matrices, "float32": vectors}
  )


@pytest.mark.parametrize(
  ("kind", "more", "says"),
  [
    (Kind.Q8_0, [], "0.2 MB of bfloat16, 3 layers"),
    (Kind.Q8_0, ["--dtype", "float32"], "0.4 MB of float32, 3 layers"),
    (Kind.F16, [], "0.2 MB of float16, 3 layers"),
  ],
)
def test_the_program_says_what_is_stored(tmp_path, capsys, kind, more, says):
  path, dest = str(tmp_path / "x.gguf"), str(tmp_path / "made")
  tiny_gguf.write(path, kind=kind)
  convert_checkpoint.main(common.parse(convert_checkpoint.Args, "convert", [path, dest, *more]))
  assert capsys.readouterr().out.startswith(f"{dest}: {says}")


def test_dtypes_that_cannot_hold_the_numbers(source, tmp_path):
  with pytest.raises(ValueError, match="dtype: found 'int8', expected one of bfloat16"):
    convert.convert(source, tmp_path / "other", dtype="int8")
  weights = tiny_gguf.tensors()
  weights["blk.1.ffn_up.weight"][3, 4] = 1e5
  tiny_gguf.write(tmp_path / "x.gguf", weights)
  with pytest.raises(ValueError, match=r"blk\.1\.ffn_up\.weight.*infinity in float16"):
    convert.convert(tmp_path / "x.gguf", tmp_path / "other", dtype="float16", progress=False)
  assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]
  convert.convert(tmp_path / "x.gguf", tmp_path / "other", dtype="bfloat16", progress=False)


@pytest.mark.parametrize("shape", [(1, 1), (16, 3), (37, 50), (3, 19, 40), (2, 2, 33, 1)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_matrices_turned_in_pieces(shape, dtype):
  x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
  y = turned(x)
  assert y.flags.c_contiguous and y.dtype == x.dtype
  np.testing.assert_array_equal(y, np.moveaxis(x, -1, -2))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_every_number_is_looked_at(dtype, bad, monkeypatch):
  monkeypatch.setattr(model_source, "_PIECE", 7)
  limits = ml_dtypes.finfo(dtype)
  x = np.array([[0.0, -0.0, 1.0], [limits.max, limits.min, limits.tiny]] * 4, dtype)
  assert finite(x)
  for place in np.ndindex(x.shape):
    y = x.copy()
    y[place] = bad
    assert not finite(y)


def test_pieces_of_a_tensor_are_all_of_it(checkpoint, source, tmp_path, monkeypatch):
  """Blocks are dequantised, and items read, a few rows at a time: 3 of 64, 96 or 267."""
  monkeypatch.setattr(gguf, "_PIECE", 3 * tiny_gguf.D)
  monkeypatch.setattr(items, "_PIECE", 3 * tiny_gguf.D)
  again = convert.convert(source, tmp_path / "again", progress=False)
  files = [file.relative_to(again) for file in again.rglob("*") if file.is_file()]
  assert len(files) == 8
  for file in files:
    assert (again / file).read_bytes() == (checkpoint / file).read_bytes()
  pieces = convert.load(again, dtype=jnp.float32)[0]
  monkeypatch.undo()
  whole = convert.load(checkpoint, dtype=jnp.float32)[0]
  jax.tree.map(np.testing.assert_array_equal, pieces, whole)


def test_loaded_weights_are_written_by_nobody(checkpoint):
  """A device takes over the memory that was read to; donating it does not change other models."""
  model, other = (convert.load(checkpoint, dtype=jnp.float32)[0] for _ in range(2))
  before = np.array(other.embedding[...])
  donated = jax.jit(lambda x: x * 0, donate_argnums=0)(model.embedding[...])
  assert not donated.any()
  np.testing.assert_array_equal(other.embedding[...], before)
