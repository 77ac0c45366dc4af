"""Checkpoints: from a published model to a folder of items, and from there into a decoder.

A checkpoint folder holds config.json, the tokenizer's files, and under `items` a safetensors file,
or a folder of Orbax's, for each layer beside "embedding" and "final". Items are written one at a
time as the source is read; the whole model is never in memory (peak: two layers, the embedding, and
what the libraries take). The folder is written aside and renamed last: an interrupted conversion
leaves no checkpoint, and can be run again.

Arrays keep the precision of the source: float32, float16 and bfloat16 as they are, quantised blocks
as bfloat16; or all matrices get a dtype.
"""

from __future__ import annotations

import atexit
import collections
import json
import os
import pathlib
import re
import shlex
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from tqdm import tqdm

from kvjax.models.io import files, items
from kvjax.models.io.asides import aside
from kvjax.models.io.fetch import cache_dir, fetch_huggingface, fetch_smollm2
from kvjax.models.io.gguf import GGUF
from kvjax.models.io.huggingface import HuggingFace
from kvjax.models.io.source import Item, Source
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn import parallel
from kvjax.models.nn.config import ModelConfig
from kvjax.models.nn.transformer import Transformer

FORMAT = "kvjax-checkpoint"
VERSION = 2
HUB = "hf:"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
DTYPES = ("bfloat16", "float16", "float32")

# Embeddings are padded to round sizes: Qwen's by 0.3 %, DeepSeek's by 2.3 %.
_PADDING = 0.05


def convert(
  source: str | os.PathLike[str],
  dest: str | os.PathLike[str],
  *,
  max_context: int | None = None,
  dtype: str | None = None,
  to: str = "safetensors",
  progress: bool = True,
) -> pathlib.Path:
  """Converts a published model into a checkpoint folder.

  Families (`kvjax.models.io.families`): Llama 2 and 3, SmolLM2, Mistral, Qwen 2, 2.5 and 3 with and
  without experts, Phi-3 and 4, GLM-4, Gemma 2 and 3 (text), gpt-oss, and DeepSeek-R1's distillates.

  Args:
    source: a Hugging Face folder (config.json, safetensors, tokenizer.json), a .gguf file, or
      "hf:owner/name", which is downloaded from the Hugging Face hub.
    dest: the folder to make; it must not exist yet.
    max_context: longest rows of the checkpoint, in tokens (None: the model's context). Longer rows
      raise an error; results for others do not change. Layers with a sliding window of at least
      this length become full layers, to which the method applies.
    dtype: "bfloat16", "float16" or "float32" for all matrices; vectors stay as they are. None: as
      the source has them, quantised blocks as bfloat16; "float32" keeps every bit of these, in
      twice the bytes.
    to: "safetensors", or "orbax", of which several devices or hosts read their own chunks.
    progress: show a bar on stderr.

  Returns:
    `dest`.

  Raises:
    TypeError: `source` or `dest` is no path.
    FileNotFoundError: there is no such source, or a shard of it is missing.
    FileExistsError: `dest` exists.
    ValueError: `dtype` or `to` is another one, `dtype` too narrow for a number, the source is
      truncated or damaged, tensors are missing or of the wrong shape, the tokenizer belongs to
      another model, or there are only pickled weights.
    NotImplementedError: the architecture, a quantisation, a rope type or a tensor is not supported.
    OSError: the download failed, or `dest` cannot be written; the message gives the reason.
  """
  dest = pathlib.Path(files.path_of("dest", dest))
  if dest.exists():
    raise FileExistsError(f"{dest}: exists already, expected a folder to be made")
  if dtype not in (None, *DTYPES):
    raise ValueError(f"dtype: found {dtype!r}, expected one of {', '.join(DTYPES)}, or None")
  if to not in items.KINDS:
    raise ValueError(f"to: found {to!r}, expected one of {', '.join(items.KINDS)}")
  reader = open_source(source, max_context=max_context)
  reader.dtype = dtype
  tokenizer = reader.tokenizer()
  vocab = reader.config.vocab
  known = tokenizer.size - tokenizer.added_from(vocab)  # added tokens may lie behind the last row
  if not vocab * (1 - _PADDING) <= known <= vocab or tokenizer.size > vocab * (1 + _PADDING):
    raise ValueError(
      f"{reader.path}: found {tokenizer.size} tokens in the tokenizer, "
      f"expected the {vocab} rows of {reader.name('embedding')}, up to 5 % fewer, or up to "
      "5 % more that are added tokens"
    )
  tokenizer.fit(vocab)
  names = item_names(reader.config)
  stored: collections.Counter[str] = collections.Counter()
  sums: dict[str, int] = {}
  with aside(dest) as folder:
    (folder / "items").mkdir(parents=True)
    label = f"converting {reader.path.name}"
    for name in tqdm(names, desc=label, unit="item", disable=not progress):
      item = reader.item(name)
      for x in jax.tree.leaves(item):
        stored[x.dtype.name] += x.nbytes
      items.save(_file(folder, name, to), item)
      sums[name] = files.total(_file(folder, name, to))
    with files.written(folder / "tokenizer.json"):
      tokenizer.save(folder)
    description = {
      "format": FORMAT,
      "version": VERSION,
      "items": to,
      "bytes": dict(stored),
      "sums": sums,
      "model": reader.config.to_json(),
    }
    with files.written(folder / "config.json"):
      (folder / "config.json").write_text(json.dumps(description, indent=2), encoding="utf-8")
  return dest


def open_source(source: str | os.PathLike[str], *, max_context: int | None = None) -> Source:
  """The reader of a source, as `convert` takes it.

  Raises:
    FileNotFoundError: there is no such folder or file.
    ValueError: it is neither a Hugging Face folder nor a GGUF file, or not a whole one.
  """
  name = files.path_of("source", source)
  if name.startswith(HUB):
    return HuggingFace(fetch_huggingface(name.removeprefix(HUB)), max_context=max_context)
  path = pathlib.Path(source)
  if path.is_dir():
    return HuggingFace(path, max_context=max_context)
  if not path.is_file():
    raise FileNotFoundError(
      f"{path}: no such file or folder, expected a .gguf file, a Hugging Face folder, or "
      f"{HUB}owner/name to download one"
    )
  if path.suffix in (".safetensors", ".bin", ".pt", ".pth"):
    raise ValueError(
      f"{path}: found a single file of weights, expected its folder, with config.json beside it"
    )
  return GGUF(path, max_context=max_context)


def load(
  path: str | os.PathLike[str],
  *,
  dtype: Any = None,
  precision: str | None = None,
  impl: str = "auto",
  mesh: Mesh | None = None,
  progress: bool = False,
) -> tuple[Transformer, Tokenizer]:
  """Reads a checkpoint folder, layer by layer.

  Args:
    path: what `convert` made, or any model that `checkpoint` converts.
    dtype: dtype of weights and activations; None: what `precision` says, else bfloat16 on a GPU and
      float32 elsewhere.
    precision: "bf16", "float32" (products in full float32, TF32 off) or "float32-tf32" (products
      of factors rounded to TF32, on a GPU that has it); None: as jax_default_matmul_precision says.
    impl: implementation of the methods' operations, see `kvjax.Env`.
    mesh: of `kvjax.make_mesh`: every device reads its part of each weight, and no more than that
      is ever on it; None: all on the first device.
    progress: show a bar on stderr.

  Raises:
    TypeError: `path` is no path, `mesh` no mesh, or `dtype` not of floats.
    FileNotFoundError: the folder or a part of it is missing.
    ValueError: the folder is not a checkpoint, a part is damaged, dtype and precision disagree, or
      the model cannot be split evenly over the mesh.
    ValueError, NotImplementedError, OSError: of `checkpoint`.
  """
  path = checkpoint(files.path_of("path", path)).absolute()
  config, description = read_config(path), _description(path)
  kind = description["items"]
  there = sum(1 for _ in (path / "items").glob(f"*.{kind}"))
  if config.layers > there:  # before so many are made room for
    raise FileNotFoundError(
      f"{path / 'items'}: found {there} {kind} items, expected {config.layers} layers and 2 more"
    )
  for file in sorted(path.glob("*.json")):
    files.check_begin(file)
  tokenizer = Tokenizer.load(path)
  if tokenizer.rows not in (None, config.vocab):
    raise ValueError(
      f"{path / 'tokenizer_config.json'}: rows: found {tokenizer.rows}, expected the vocabulary of "
      f"{config.vocab}, as config.json says"
    )
  if dtype is None and precision is None:
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
  model = nnx.eval_shape(
    lambda: Transformer(config, dtype=dtype, precision=precision, impl=impl, rngs=nnx.Rngs(0))
  )
  leaves, tree = jax.tree.flatten(model)
  where = [None] * len(leaves) if mesh is None else parallel.shardings(model, config, mesh)
  placed = [x.update(sharding=to) for x, to in zip(leaves, where, strict=True)]
  wanted = nnx.to_pure_dict(nnx.state(jax.tree.unflatten(tree, placed)))
  names, sums = item_names(config), description["sums"]
  for i, name in enumerate(tqdm(names, desc="loading", unit="item", disable=not progress)):
    item = items.load(_file(path, name, kind), _part(wanted, name))
    if name in sums and i % jax.process_count() == jax.process_index():  # shared by all processes
      files.check_total(_file(path, name, kind), sums[name])
    layer = name.removeprefix("layer_")
    nnx.update(model if layer == name else model.layers[int(layer)], item)
  return model if mesh is None else parallel.on_mesh(model, mesh), tokenizer


def read_config(path: str | os.PathLike[str]) -> ModelConfig:
  """The config of a checkpoint folder.

  Raises:
    FileNotFoundError: the folder has none.
    ValueError: it is not a checkpoint's.
  """
  found = _description(path)
  try:
    return ModelConfig.from_json(found["model"])
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(f"{pathlib.Path(path) / 'config.json'}: {error}") from error


def _description(path: str | os.PathLike[str]) -> dict[str, Any]:
  """Content of a checkpoint folder's config.json; raises as `read_config`."""
  file = pathlib.Path(path) / "config.json"
  if _published(path := pathlib.Path(path)):
    what = "a Hugging Face folder" if path.is_dir() else "a file"
    raise ValueError(f"{path}: found {what}, expected a checkpoint: {making_one(path)}")
  try:
    found = files.read_json(file, "a checkpoint's config")
  except FileNotFoundError as error:
    what = "config.json" if path.exists() else "such file or folder"
    raise FileNotFoundError(
      f"{path}: found no {what}, expected a checkpoint folder: {making_one(path)}"
    ) from error
  if (found.get("format"), found.get("version")) != (FORMAT, VERSION):
    raise ValueError(
      f"{file}: found format {found.get('format')!r} version {found.get('version')!r}, "
      f"expected {FORMAT!r} version {VERSION}: convert the model again"
    )
  # Folders of before have safetensors and no sums, and do not say so.
  if not isinstance(found.setdefault("sums", {}), dict):
    raise ValueError(f"{file}: sums: found {found['sums']!r}, expected a number by item")
  if (kind := found.setdefault("items", items.KINDS[0])) not in items.KINDS:
    raise ValueError(f"{file}: items: found {kind!r}, expected one of {', '.join(items.KINDS)}")
  return found


def making_one(source: str | os.PathLike[str]) -> str:
  """The command that converts a model, in words; of the hub's where no such folder is there."""
  name = os.fspath(source)
  if _published(pathlib.Path(name)):
    return f"kvjax convert {shlex.quote(name)} FOLDER makes one"
  of_hub = f"{HUB}{name}" if _HUB_ID.fullmatch(name) and not os.path.exists(name) else "MODEL"
  return f"kvjax convert {of_hub} FOLDER makes one"


def stored_bytes(path: str | os.PathLike[str]) -> dict[str, int]:
  """Bytes of a checkpoint's weights by the dtype in which they are stored.

  Raises:
    FileNotFoundError: the folder has no config.
    ValueError: it is not a checkpoint's.
  """
  sizes = _description(path).get("bytes")
  if not isinstance(sizes, dict):
    raise ValueError(f"{path}: config.json: 'bytes': found {sizes!r}, expected bytes by dtype")
  return sizes


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
  """True if a folder is a checkpoint of this version."""
  try:
    read_config(path)
  except (OSError, ValueError):
    return False
  return True


def item_names(config: ModelConfig) -> list[str]:
  """The items of a checkpoint, in the order in which they are written."""
  return ["embedding", *(f"layer_{i:03d}" for i in range(config.layers)), "final"]


def _file(folder: pathlib.Path, name: str, kind: str) -> pathlib.Path:
  """File or folder in which a checkpoint holds an item."""
  return folder / "items" / f"{name}.{kind}"


def _part(wanted: dict[str, Any], name: str) -> Item:
  """The abstract arrays of one item, out of those of the whole model."""
  if name.startswith("layer_"):
    return wanted["layers"][int(name.removeprefix("layer_"))]
  keys = ("embedding",) if name == "embedding" else ("norm", "head")
  return {key: wanted[key] for key in keys if key in wanted}


def checkpoint(source: str | os.PathLike[str]) -> pathlib.Path:
  """The checkpoint folder of a model: a checkpoint itself, or converted on the first call.

  What is converted lies in `cache_dir()`, by its content; a line on stderr says so. A model of the
  hub that was downloaded before needs no network.

  Args:
    source: a checkpoint folder; or a Hugging Face folder, a .gguf file, "hf:owner/name", or
      "owner/name" where there is no such folder.

  Raises:
    ValueError, NotImplementedError, OSError: of `convert`.
  """
  name = files.path_of("source", source)
  if _of_hub(name):
    path = _fetched(name)
    name = name.rpartition("/")[2]
  else:
    path = pathlib.Path(source)
    if not _published(path):
      return path
    name = path.absolute().name.removesuffix(".gguf")

  def make(folder: pathlib.Path) -> pathlib.Path:
    print(f"{name}: converted once, into {folder}", file=sys.stderr, flush=True)
    return _made(path, folder)

  return _kept(cache_dir(), f"{name}-{files.digest(path)}-v{VERSION}", make)


def config_of(source: str | os.PathLike[str]) -> ModelConfig:
  """The config of a model, which `checkpoint` takes: no weights are fetched or looked at.

  Raises:
    ValueError, NotImplementedError, OSError: of `convert`.
  """
  name = files.path_of("source", source)
  if _of_hub(name):
    return HuggingFace(_fetched(name, wanted=("config.json",)), weights=False).config
  path = pathlib.Path(source)
  if not _published(path):
    return read_config(path)
  return open_source(path).config if path.is_file() else HuggingFace(path, weights=False).config


def _of_hub(name: str) -> bool:
  """True for "hf:owner/name", and for "owner/name" where there is no such folder."""
  return name.startswith(HUB) or bool(_HUB_ID.fullmatch(name) and not os.path.exists(name))


def _fetched(name: str, **which: Any) -> pathlib.Path:
  """A model of the hub; who only names a folder that is not there hears of both."""
  if name.startswith(HUB):
    return fetch_huggingface(name.removeprefix(HUB), **which)
  try:
    return fetch_huggingface(name, **which)
  except (OSError, ImportError) as error:
    raise FileNotFoundError(
      f"{name}: found no such folder, and no model of the hub: {error}"
    ) from error


def _published(path: pathlib.Path) -> bool:
  """True for a file, GGUF whatever its name, and for a Hugging Face folder: no checkpoints."""
  try:
    return path.is_file() or "model_type" in files.read_json(path / "config.json", "a config")
  except (OSError, ValueError):
    return False


def default_checkpoint(
  folder: str | os.PathLike[str] | None = None, *, progress: bool = True
) -> pathlib.Path:
  """The checkpoint folder of SmolLM2-135M-Instruct, fetched and converted on the first call.

  Its weights are float32, the numbers of the file's 4-bit blocks to the last bit. Where the folder
  is full or cannot be written, it is made for this process alone, and a warning says so.

  Args:
    folder: where it is kept (None: `cache_dir()`).
    progress: show what happens.

  Raises:
    OSError: the download failed, or no folder has room for it.
    ValueError: what was downloaded is another model.
  """

  def make(dest: pathlib.Path) -> pathlib.Path:
    source = fetch_smollm2(dest.parent, progress=progress)
    return _made(source, dest, dtype="float32", progress=progress)

  folder = cache_dir() if folder is None else pathlib.Path(folder).expanduser().absolute()
  return _kept(folder, f"SmolLM2-135M-Instruct-v{VERSION}", make)


def _kept(
  folder: pathlib.Path, name: str, make: Callable[[pathlib.Path], pathlib.Path]
) -> pathlib.Path:
  """The checkpoint of that name in a folder, made where it is not there yet.

  Where the folder is full or cannot be written, one is made for this process alone.
  """
  if is_checkpoint(folder / name):
    return folder / name
  try:
    return make(folder / name)
  except OSError as error:
    if error.errno not in files.NO_ROOM:
      raise
    warnings.warn(f"{error}: made for this process alone", stacklevel=3)
  own = pathlib.Path(tempfile.mkdtemp(prefix="kvjax-"))
  atexit.register(shutil.rmtree, own, ignore_errors=True)
  return make(own / name)


def _made(source: pathlib.Path, dest: pathlib.Path, **how: Any) -> pathlib.Path:
  """A checkpoint, converted by this process or meanwhile by another one."""
  try:
    convert(source, dest, **how)
  except FileExistsError:
    if not is_checkpoint(dest):
      raise
  return dest
