"""The layout of GGUF files: one file or several parts, read without trust in what they say.

Offsets and sizes are Python's integers, which do not wrap; counts have limits, and every tensor
lies inside of its file and apart from the others.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import math
import mmap
import os
import pathlib
from typing import Any, NamedTuple

import gguf
import numpy as np

from kvjax.models.io import files

Kind = gguf.GGMLQuantizationType

_MOST_TENSORS = _MOST_KEYS = 1 << 16
_MOST_STRINGS = 1 << 21  # in all arrays; a vocabulary of 262,144 has 515,000 merges
_MOST_DIMENSIONS = 4
_MOST_PARTS = 1 << 10
_VERSIONS = (2, 3)
_OLD = (b"ggml", b"lmgg", b"ggmf", b"fmgg", b"ggjt", b"tjgg", b"ggla", b"algg")
_NUMPY = {
  Kind.F16: np.float16,
  Kind.F32: np.float32,
  Kind.F64: np.float64,
  Kind.I8: np.int8,
  Kind.I16: np.int16,
  Kind.I32: np.int32,
  Kind.I64: np.int64,
}


class Tensor(NamedTuple):
  """A tensor of a file.

  Attributes:
    name: as the file calls it.
    kind: of quantisation.
    shape: rows first.
    data: its numbers, or the bytes of its blocks, row by row.
  """

  name: str
  kind: Kind
  shape: tuple[int, ...]
  data: np.ndarray


class Parts(NamedTuple):
  """The contents of all files of a model together.

  Attributes:
    metadata: of the first file.
    tensors: of all, by name.
    mappings: what holds the files' bytes.
  """

  metadata: dict[str, Any]
  tensors: dict[str, Tensor]
  mappings: list[Any]

  def release(self) -> None:
    """Lets the system drop what has been read."""
    for mapping in self.mappings:
      if isinstance(mapping, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED)


def open_parts(path: pathlib.Path) -> Parts:
  """Reads a file's structure; of a model in several parts, that of all, whichever is given.

  Raises:
    FileNotFoundError: a part is missing.
    ValueError: a file is truncated or damaged, or is a part of something else.
    NotImplementedError: a byte order, version or quantisation that is not read.
  """
  reader = _opened(path)
  count = _entry(path, reader.metadata, "split.count", 1)
  if count == 1:
    return Parts(reader.metadata, reader.held, [reader.mapping])
  if count > _MOST_PARTS:
    raise ValueError(f"{path}: split.count: found {count}, expected at most {_MOST_PARTS:,}")
  number = _entry(path, reader.metadata, "split.no", -1) + 1
  names = [f"-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
  if not 1 <= number <= count or not path.name.endswith(names[number - 1]):
    own = names[number - 1] if 1 <= number <= count else f"-?????-of-{count:05d}.gguf"
    raise ValueError(
      f"{path}: found part {number} of {count} of a model, expected a name that ends with {own}, "
      "as it was published: the other parts are found by it"
    )
  stem = path.name.removesuffix(names[number - 1])
  places = [path.with_name(stem + name) for name in names]
  for place in places:
    if not place.is_file():
      raise FileNotFoundError(f"{place}: not found, expected this part of {count} beside {path}")
  readers = [reader if place == path else _opened(place) for place in places]
  tensors: dict[str, Tensor] = {}
  for i, (place, part) in enumerate(zip(places, readers, strict=True)):
    found = tuple(_entry(place, part.metadata, f"split.{key}", -1) for key in ("no", "count"))
    if found != (i, count):
      raise ValueError(
        f"{place}: found part {found[0] + 1} of {found[1]}, expected {i + 1} of {count}"
      )
    twice = [name for name in part.held if name in tensors]
    if twice:
      raise ValueError(f"{place}: tensor {twice[0]!r}: found in an earlier part, too, expected one")
    tensors.update(part.held)
  first = readers[0].metadata
  total = _entry(places[0], first, "split.tensors.count", len(tensors))
  if total != len(tensors):
    raise ValueError(
      f"{places[0]}: found {len(tensors)} tensors in {count} parts, expected {total}, as "
      "split.tensors.count says"
    )
  return Parts(first, tensors, [part.mapping for part in readers])


def _entry(path: pathlib.Path, metadata: dict[str, Any], key: str, default: int) -> int:
  value = metadata.get(key, default)
  if not isinstance(value, int) or isinstance(value, bool):
    raise ValueError(f"{path}: metadata {key!r}: found {value!r}, expected an integer")
  return value


def _opened(path: pathlib.Path) -> _Reader:
  _check_kind(path)
  try:
    return _Reader(path)
  except NotImplementedError as error:
    raise NotImplementedError(f"{path}: {error}") from error
  except Exception as error:  # a damaged file can trip the reader anywhere
    raise ValueError(
      f"{path}: not readable as GGUF ({type(error).__name__}: {error}), "
      "expected a complete GGUF file"
    ) from error


def _check_kind(path: pathlib.Path) -> None:
  """Raises for files that are no GGUF, or of a byte order or version that is not read."""
  files.check_begin(path)
  with path.open("rb") as file:
    begin = file.read(8)
  if begin[:4] in _OLD:
    raise NotImplementedError(
      f"{path}: found a GGML file from before GGUF ({begin[:4].decode()}), expected GGUF: "
      "llama.cpp's converter makes one from the model's Hugging Face folder"
    )
  little, big = (int.from_bytes(begin[4:8], order) for order in ("little", "big"))
  if begin[:4] == b"FUGG" or (begin[:4] == b"GGUF" and len(begin) == 8 and big < little):
    raise NotImplementedError(
      f"{path}: found a big-endian file, expected little-endian: `gguf-convert-endian` of the "
      "package gguf turns one into the other"
    )
  if begin[:4] == b"GGUF" and len(begin) == 8 and little not in _VERSIONS:
    raise NotImplementedError(
      f"{path}: found GGUF version {little}, expected one of {_VERSIONS}: llama.cpp's converter "
      "makes one from the model's Hugging Face folder"
    )


class _Reader(gguf.GGUFReader):
  """Raises where the file ends too early, wraps, overlaps or counts without end.

  It reads a vocabulary piece by piece: slices of a plain array take a third of a memmap's time.

  Attributes:
    mapping: what holds the file.
    metadata: entries by key.
    held: tensors by name.
  """

  mapping: Any = None

  def __init__(self, path: str | os.PathLike[str]):
    self._strings = 0
    super().__init__(path)
    self.metadata = {key: field.contents() for key, field in self.fields.items()}

  def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
    if self.mapping is None:
      self.mapping, plain = self.data.base, self.data.view(np.ndarray)
      self.data = plain  # type: ignore[assignment]
    end = int(offset) + int(np.dtype(dtype).itemsize) * int(count)
    if end > len(self.data):
      raise ValueError(f"the file ends at byte {len(self.data)}, expected at least {end}")
    return super()._get(offset, dtype, count, override_order)

  def _build_fields(self, offs: int, count: Any) -> int:
    _at_most("metadata entries", count, _MOST_KEYS)
    return super()._build_fields(offs, count)

  def _build_tensor_info(self, offs: int, count: Any) -> tuple[int, list[gguf.ReaderField]]:
    _at_most("tensors", count, _MOST_TENSORS)
    return super()._build_tensor_info(offs, count)

  def _get_field_parts(self, orig_offs: int, raw_type: Any) -> Any:
    """As the package reads an entry, but an array of numbers as one part."""
    if raw_type != gguf.GGUFValueType.ARRAY:
      return super()._get_field_parts(orig_offs, raw_type)
    of = gguf.GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
    count = int(self._get(orig_offs + 4, np.uint64)[0])
    if of == gguf.GGUFValueType.ARRAY:
      raise ValueError("found an array of arrays, expected numbers or strings")
    if of == gguf.GGUFValueType.STRING:
      self._strings += count
      _at_most("strings in arrays", self._strings, _MOST_STRINGS)
      return super()._get_field_parts(orig_offs, raw_type)
    values = self._get(orig_offs + 12, self.gguf_scalar_to_np[of], count)
    parts = [self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64), values]
    return sum(int(x.nbytes) for x in parts), parts, [2], [gguf.GGUFValueType(raw_type), of]

  def _build_tensors(self, start_offs: Any, fields: list[gguf.ReaderField]) -> None:
    start, ends = int(start_offs), []
    self.held: dict[str, Tensor] = {}
    for field in fields:
      _, name_data, _, dims, kind, offset = field.parts
      name, begin = str(bytes(name_data), "utf-8"), start + int(offset[0])
      if name in self.held:
        raise ValueError(f"tensor {name!r}: found twice, expected once")
      if int(offset[0]) % int(self.alignment):
        raise ValueError(
          f"tensor {name!r}: found at offset {offset[0]}, expected a multiple of {self.alignment}"
        )
      self.held[name] = self._tensor(name, [int(n) for n in dims], int(kind[0]), begin)
      ends.append((begin, begin + self.held[name].data.nbytes, name))
    ends.sort()
    for (_, end, one), (begin, _, other) in itertools.pairwise(ends):
      if begin < end:
        raise ValueError(f"tensors {one!r} and {other!r}: found overlapping, expected apart")

  def _tensor(self, name: str, dims: list[int], number: int, begin: int) -> Tensor:
    """A tensor with its data, which the file holds."""
    _at_most(f"dimensions of tensor {name!r}", len(dims), _MOST_DIMENSIONS)
    try:
      kind = Kind(number)
      block, size = gguf.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
      raise NotImplementedError(
        f"tensor {name!r}: found quantisation number {number}, expected one that gguf "
        f"{importlib.metadata.version('gguf')} knows"
      ) from error
    shape = tuple(reversed(dims))
    row = shape[-1] if shape else 1
    if not shape or row % block:
      raise ValueError(
        f"tensor {name!r}: found shape {shape} in {kind.name}, expected rows of a multiple of "
        f"{block}"
      )
    stored = _NUMPY.get(kind, np.uint8)
    width = row if kind in _NUMPY else row // block * size
    length = math.prod(shape[:-1]) * width
    if length * np.dtype(stored).itemsize > len(self.data):
      raise ValueError(f"tensor {name!r}: found shape {shape}, expected at most the file's size")
    data = self._get(begin, stored, length)
    return Tensor(name, kind, shape, data.reshape(*shape[:-1], width))


def _at_most(what: str, count: Any, most: int) -> None:
  if int(count) > most:
    raise ValueError(f"found {int(count):,} {what}, expected at most {most:,}")
