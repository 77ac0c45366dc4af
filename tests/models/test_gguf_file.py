"""GGUF files as they are published, and as nobody should publish them."""

import struct

import gguf
import jax
import numpy as np
import pytest
from gguf import GGUFEndian

from kvjax.models.io import convert, gguf_parts
from kvjax.models.io.gguf import GGUF
from kvjax.primitives.rope import Linear, Rope, Yarn
from tests import tiny_gguf

THETA, H = tiny_gguf.THETA, tiny_gguf.H


def with_rope(path, tensors=(), **entries):
  """A file with more entries, `scaling__factor` say, and rope tensors of ones."""
  more = {f"llama.rope.{key.replace('__', '.')}": value for key, value in entries.items()}
  weights = {**tiny_gguf.tensors(), **{name: np.ones(H // 2, np.float32) for name in tensors}}
  tiny_gguf.write(path, weights, {**tiny_gguf.metadata(), **more})
  return path


# ---- rope, as llama.cpp reads its entries


@pytest.mark.parametrize(
  ("entries", "scaling"),
  [
    ({}, None),
    ({"scaling__factor": 4.0}, Linear(4.0)),  # no type: linear
    ({"scale_linear": 4.0}, Linear(4.0)),  # the key of 2023
    ({"scale_linear": 2.0, "scaling__factor": 4.0}, Linear(4.0)),
    ({"scale_linear": 4.0, "scaling__type": "linear"}, Linear(4.0)),
    ({"scaling__factor": 4}, Linear(4.0)),
    ({"scaling__factor": 4.0, "scaling__type": "none"}, None),
    ({"scaling__type": "linear"}, None),
    ({"scaling__factor": 0.0}, None),
    ({"scaling__factor": 1.0, "scaling__type": "linear"}, None),
    ({"scaling__type": "none", "scaling__finetuned": True}, None),
    (
      {"scaling__type": "yarn", "scaling__factor": 4.0, "scaling__original_context_length": 32}
      | {"scaling__yarn_ext_factor": 1.0, "scaling__yarn_beta_fast": 8.0},
      Yarn(4.0, 32, beta_fast=8.0),
    ),
    ({"scaling__type": "yarn", "scale_linear": 4.0}, Yarn(4.0, 128)),
  ],
)
def test_rope_entries(tmp_path, entries, scaling):
  assert GGUF(with_rope(tmp_path / "x.gguf", **entries)).config.rope == Rope(THETA, scaling)


LONG = ("rope_factors_long.weight", "rope_factors_short.weight")


WRONG = [
  ((), {"scaling__factor": -4.0}, r"scaling\.factor'.*found -4\.0"),
  ((), {"scaling__factor": float("nan")}, r"scaling\.factor'.*found nan"),
  ((), {"scaling__factor": "4"}, r"scaling\.factor'.*found '4'"),
  ((), {"freq_base": 0.0}, r"freq_base'.*found 0\.0"),
  (LONG[:1], {}, r"\['rope_factors_long\.weight'\], expected .*short"),
]
YARN = {"scaling__type": "yarn", "scaling__factor": 4.0}
UNKNOWN = [
  ((), {"scaling__type": "dynamic", "scaling__factor": 2.0}, "'dynamic'"),
  ((), {"scaling__type": "longrope"}, "'longrope' without its tensors"),
  ((), {"scaling__alpha": 1000.0}, r"rope\.scaling\.alpha'.*no such entry"),
  ((), {"dimension_sections": [4, 4, 0, 0]}, "dimension_sections"),
  ((), {"freq_base_swa": 1e4}, r"freq_base_swa'.*found 10000"),
  ((), {"scaling__attn_factor": 1.2}, r"attn_factor'.*found 1\.2"),
  ((), {"scaling__yarn_ext_factor": 1.0}, r"yarn_ext_factor'.*found 1\.0"),
  ((), {**YARN, "scaling__yarn_attn_factor": 0.5}, r"yarn_attn_factor'.*found 0\.5"),
  (("rope_freqs.weight",), {"scaling__factor": 4.0}, "rope_freqs"),
  (LONG, {"scale_linear": 4.0}, "rope_factors_long"),
]


@pytest.mark.parametrize(
  ("error", "tensors", "entries", "message"),
  [*((ValueError, *row) for row in WRONG), *((NotImplementedError, *row) for row in UNKNOWN)],
)
def test_rope_entries_that_are_not_read(tmp_path, error, tensors, entries, message):
  """None is passed over: its positions would be others than those of the model."""
  path = with_rope(tmp_path / "bad.gguf", tensors, **entries)
  with pytest.raises(error, match=rf"bad\.gguf: .*{message}"):
    GGUF(path)


# ---- a model in several files


def in_parts(folder, **how):
  tiny_gguf.write(folder / "m.gguf", tiny_gguf.tensors(), split_max_tensors=10, **how)
  return sorted(folder.glob("m-*.gguf"))


@pytest.mark.parametrize("small_first_shard", [False, True])
def test_parts_are_one_model(tmp_path, small_first_shard):
  """Whichever is given."""
  tiny_gguf.write(tmp_path / "whole.gguf")
  paths = in_parts(tmp_path, small_first_shard=small_first_shard)
  assert len(paths) == 3 + small_first_shard
  whole = GGUF(tmp_path / "whole.gguf")
  for path in (paths[0], paths[-1]):
    source = GGUF(path)
    assert source.config == whole.config
    assert source.tokenizer().size == tiny_gguf.V
    for name in convert.item_names(whole.config):
      jax.tree.map(np.testing.assert_array_equal, source.item(name), whole.item(name))


def test_a_part_that_is_missing_or_of_another_model(tmp_path):
  first, second, third = in_parts(tmp_path)
  kept = second.read_bytes()
  second.unlink()
  for path in (first, third):
    with pytest.raises(FileNotFoundError, match=r"m-00002-of-00003\.gguf: not found, .* of 3"):
      GGUF(path)
  second.write_bytes(third.read_bytes())
  with pytest.raises(ValueError, match=r"m-00002-of-00003\.gguf: found part 3 of 3, expected 2"):
    GGUF(first)
  second.write_bytes(kept[:-1])
  with pytest.raises(ValueError, match=r"m-00002-of-00003\.gguf: not readable"):
    GGUF(first)
  second.write_bytes(kept)
  renamed = first.rename(tmp_path / "model.gguf")
  with pytest.raises(ValueError, match=r"model\.gguf: found part 1 of 3 .*-00001-of-00003\.gguf"):
    GGUF(renamed)


def test_tensors_of_parts_are_counted(tmp_path):
  first, second, _ = in_parts(tmp_path)
  field = gguf.GGUFReader(first).fields["split.tensors.count"]
  patch(first, field.offset + sum(x.nbytes for x in field.parts[:-1]), struct.pack("<i", 30))
  with pytest.raises(ValueError, match=r"found 29 tensors in 3 parts, expected 30"):
    GGUF(first)
  in_parts(tmp_path)
  name = gguf.GGUFReader(first).tensors[1].name.encode()
  other = next(t.name for t in gguf.GGUFReader(second).tensors if len(t.name) == len(name))
  second.write_bytes(second.read_bytes().replace(other.encode(), name))
  with pytest.raises(ValueError, match=rf"00002.*{name.decode()}.*found in an earlier part"):
    GGUF(first)


# ---- other files than these


def test_byte_order_and_age_are_named(tmp_path):
  path = tmp_path / "x.gguf"
  tiny_gguf.write(path, endianess=GGUFEndian.BIG)
  with pytest.raises(NotImplementedError, match=r"x\.gguf: found a big-endian file"):
    GGUF(path)
  for begin, message in (
    (b"GGUF\x01\0\0\0", "found GGUF version 1, expected one of"),
    (b"GGUF\x04\0\0\0", "found GGUF version 4, expected one of"),
    (b"tjgg\x03\0\0\0", "found a GGML file from before GGUF"),
  ):
    path.write_bytes(begin + bytes(64))
    with pytest.raises(NotImplementedError, match=rf"x\.gguf: {message}"):
      GGUF(path)


# ---- hostile files


@pytest.fixture
def damaged(tmp_path):
  """A file, and where its counts are, and the fields of its second tensor."""
  path = tmp_path / "bad.gguf"
  tiny_gguf.write(path)
  reader = gguf.GGUFReader(path)
  field = reader.tensors[1].field
  ends = field.offset + np.cumsum([0, *(x.nbytes for x in field.parts)])
  second = {"dimensions": int(ends[2]), "kind": int(ends[4]), "offset": int(ends[5])}
  return path, {"count": 8, "entries": 16, "first_key": 24, **second}


def patch(path, at, data):
  whole = bytearray(path.read_bytes())
  whole[at : at + len(data)] = data
  path.write_bytes(whole)


@pytest.mark.parametrize(
  ("place", "data", "message"),
  [
    ("offset", struct.pack("<Q", 0), "found overlapping, expected apart"),
    ("offset", struct.pack("<Q", 2**64 - 4096), "the file ends at byte"),  # wraps into the header
    ("offset", struct.pack("<Q", 2**40), "the file ends at byte"),
    ("offset", struct.pack("<Q", 33), "found at offset 33, expected a multiple of 32"),
    ("dimensions", struct.pack("<IQQ", 2, 2**32, 2**32), "expected at most the file's size"),
    ("dimensions", struct.pack("<I", 2**31), "dimensions of tensor|the file ends"),
    ("dimensions", struct.pack("<I", 5), "found 5 dimensions|not a valid|number|the file ends"),
    ("kind", struct.pack("<I", 999), "tensor '.*': .* number 999"),
    ("count", struct.pack("<Q", 2**40), "found 1,099,511,627,776 tensors, expected at most"),
    ("entries", struct.pack("<Q", 2**63), "metadata entries, expected at most"),
    ("first_key", struct.pack("<Q", 2**64 - 1), "the file ends at byte"),
  ],
)
def test_structure_that_lies(damaged, place, data, message):
  path, places = damaged
  patch(path, places[place], data)
  with pytest.raises((ValueError, NotImplementedError), match=rf"bad\.gguf: .*(?:{message})"):
    GGUF(path)


def test_a_vector_that_says_it_is_in_blocks(damaged):
  """A sample of every quantisation is read when a file is opened."""
  path, _ = damaged
  field = next(t.field for t in gguf.GGUFReader(path).tensors if t.name == "output_norm.weight")
  patch(path, field.offset + sum(x.nbytes for x in field.parts[:4]), struct.pack("<I", 8))
  assert GGUF(path).read("output_norm.weight", None).shape == (tiny_gguf.D,)


def test_a_vector_in_blocks(tmp_path):
  """One of a whole block is read as llama.cpp does, one of half a block is refused."""
  path, kind = tmp_path / "bad.gguf", gguf.GGMLQuantizationType.Q8_0
  norm = tiny_gguf.tensors()["output_norm.weight"]
  blocks = gguf.quantize(norm[None], kind)[0]
  tiny_gguf.write(path, {"output_norm.weight": (blocks, kind)})
  tensor = gguf_parts.open_parts(path).tensors["output_norm.weight"]
  assert tensor.shape == norm.shape and tensor.data.nbytes == blocks.nbytes
  dimensions = gguf.GGUFReader(path).tensors[0].field
  at = dimensions.offset + sum(x.nbytes for x in dimensions.parts[:3])
  patch(path, at, struct.pack("<Q", 48))
  with pytest.raises(ValueError, match=r"bad\.gguf: .*found shape \(48,\) in Q8_0, .* of 32"):
    gguf_parts.open_parts(path)


def entry(key, kind, value):
  return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
  ("value", "message"),
  [
    (struct.pack("<IQ", 9, 1) * 5000, "array of arrays"),
    (struct.pack("<IQ", 8, 2**60), "strings in arrays, expected at most"),
    (struct.pack("<IQ", 0, 2**60), "the file ends at byte"),
    (struct.pack("<IQ", 99, 1), "99 is not a valid"),
  ],
)
def test_arrays_without_end(tmp_path, value, message):
  path = tmp_path / "bad.gguf"
  head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
  path.write_bytes(head + entry(b"a", 9, value) + bytes(64))
  with pytest.raises(ValueError, match=rf"bad\.gguf: not readable as GGUF .*{message}"):
    GGUF(path)


def test_strings_are_counted_over_all_arrays(tmp_path, monkeypatch):
  monkeypatch.setattr(gguf_parts, "_MOST_STRINGS", tiny_gguf.V)
  tiny_gguf.write(tmp_path / "x.gguf")
  with pytest.raises(ValueError, match=r"strings in arrays, expected at most"):
    GGUF(tmp_path / "x.gguf")
