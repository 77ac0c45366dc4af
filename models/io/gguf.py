"""GGUF files of the architectures in `families.GGUF`, with any block type that `gguf` reads."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any

import gguf
import numpy as np

from kvjax.models.io import families, gguf_parts
from kvjax.models.io.source import Source
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn.config import ModelConfig
from kvjax.primitives.rope import Linear, Llama3, LongRope, Rope, Yarn

_PLAIN = {
  gguf.GGMLQuantizationType.F32: "float32",
  gguf.GGMLQuantizationType.F16: "float16",
  gguf.GGMLQuantizationType.BF16: "bfloat16",
}
_PIECE = 1 << 18  # numbers that are dequantised together
_ROPE_FREQS = "rope_freqs.weight"
_ROPE_ENTRIES = (
  *("dimension_count", "freq_base", "freq_base_swa", "scale_linear"),
  *(f"scaling.{x}" for x in ("type", "factor", "attn_factor", "original_context_length")),
  *(f"scaling.{x}" for x in ("finetuned", "yarn_beta_fast", "yarn_beta_slow")),
)
_LONG_ROPE = {long: f"rope_factors_{long}.weight" for long in ("short", "long")}


class GGUF(Source):
  """A GGUF file, or the parts of one (`model-00001-of-00003.gguf`), found beside each other.

  Args:
    path: the .gguf file; any part of several.
    max_context: use the model up to so many tokens (None: as many as it states).

  Raises:
    FileNotFoundError: there is no such file, or a part of it is missing.
    ValueError: it is truncated or damaged, or tensors are missing or of the wrong shape.
    NotImplementedError: the byte order, the architecture, a quantisation, a rope entry or a tensor
      is not supported.
  """

  def __init__(self, path: str | os.PathLike[str], *, max_context: int | None = None):
    self.path, self.where = pathlib.Path(path), f"{path}: metadata"
    if not self.path.is_file():
      raise FileNotFoundError(f"{path}: no such file, expected a .gguf file")
    self.metadata, self._tensors, _ = self._parts = gguf_parts.open_parts(self.path)
    try:
      self.config = self._read_config(max_context)
    except (OverflowError, TypeError, ZeroDivisionError) as error:
      raise ValueError(
        f"{path}: metadata: found entries of the wrong type ({error}), expected numbers"
      ) from error
    found = {name: tensor.shape for name, tensor in self._tensors.items()}
    self.check_tensors(found, [_ROPE_FREQS, *_LONG_ROPE.values()])
    samples = {tensor.kind: tensor for tensor in self._tensors.values()}
    for tensor in samples.values():
      self._dequantize(tensor.name, np.atleast_2d(tensor.data)[:1])

  def tokenizer(self) -> Tokenizer:
    """The tokenizer of the file's metadata; raises as `Tokenizer.from_gguf` does."""
    try:
      return Tokenizer.from_gguf(self.metadata, str(self.path))
    except (AttributeError, TypeError) as error:
      raise ValueError(
        f"{self.path}: tokenizer metadata: found entries of the wrong type ({error}), expected "
        "lists of tokens, kinds and merges, and integer ids"
      ) from error

  def read(self, name: str, dtype: str | None) -> np.ndarray:
    tensor = self._tensors[name]
    shape = tensor.shape
    if dtype is None or len(shape) == 1:
      dtype = _PLAIN.get(tensor.kind, "bfloat16")
    out = np.empty(shape, dtype)
    # As many rows at a time as stay in the processor's caches.
    rows = out.reshape(-1, shape[-1])
    stored = tensor.data.reshape(len(rows), -1)
    step = max(1, _PIECE // shape[-1])
    with np.errstate(over="ignore"):  # infinity is found out later
      for i in range(0, len(rows), step):
        rows[i : i + step] = self._dequantize(name, stored[i : i + step])
    self._parts.release()  # what was read need not stay in memory
    return out

  def _entry(self, key: str, default: Any = None) -> Any:
    value = self.metadata.get(f"{self.metadata['general.architecture']}.{key}", default)
    if value is None:
      raise ValueError(f"{self.where} {key!r}: not found, expected an entry")
    return value

  def _positive(self, key: str, default: Any = None) -> float:
    return self.positive(repr(key), self._entry(key, default))

  def _read_config(self, max_context: int | None) -> ModelConfig:
    architecture = self.metadata.get("general.architecture")
    if architecture not in families.GGUF:
      raise NotImplementedError(
        f"{self.path}: general.architecture: found {architecture!r}, expected one of "
        f"{tuple(families.GGUF)}"
      )
    self.family = family = families.GGUF[architecture]
    self.names = _names(architecture)
    heads, dim = self._entry("attention.head_count"), self._entry("embedding_length")
    head_dim = self._entry("attention.key_length", dim // heads)
    if (size := self._entry("attention.value_length", head_dim)) != head_dim:
      self.refuse("attention.value_length", size, f"the head size {head_dim}")
    if not self._entry("attention.causal", True):
      self.refuse("attention.causal", False, "True or no entry")
    experts = {}
    if "router" in family.names:  # llama.cpp makes weights sum to 1 in all that are read here
      experts["experts"] = self._entry("expert_count")
      experts["experts_per_token"] = self._entry("expert_used_count")
    if self._entry("expert_count", 0) and not experts:
      self.refuse("expert_count", self._entry("expert_count"), "none")
    embedding = self._tensors.get("token_embd.weight")
    if embedding is None:
      raise ValueError(f"{self.path}: tensor 'token_embd.weight': not found, expected [V, {dim}]")
    rows = embedding.shape[0]
    if (stated := self._entry("vocab_size", rows)) != rows:
      raise ValueError(
        f"{self.where} 'vocab_size': found {stated!r}, expected the {rows} rows of {embedding.name}"
      )
    layers, local = self._entry("block_count"), None
    if "rope_local_base_freq" in family.defaults:
      local = Rope(self._entry("rope.freq_base_swa", family.defaults["rope_local_base_freq"]))
    if "query_pre_attn_scalar" in family.defaults:
      # As in llama.cpp: by the width of a head of the 27B model, which it tells by its layers.
      wide = layers == family.wide_layers
      self.query_scale = (head_dim / (dim / heads)) ** 0.5 if wide else 1.0
    return self.config_of(
      self._entry("context_length"),
      max_context,
      self._windows(layers),
      vocab=rows,
      dim=dim,
      layers=layers,
      heads=heads,
      kv_heads=self._entry("attention.head_count_kv", heads),
      head_dim=head_dim,
      ffn=self._entry("expert_feed_forward_length" if experts else "feed_forward_length"),
      rope=self._rope(head_dim),
      norm_eps=self._entry("attention.layer_norm_rms_epsilon"),
      tie_embeddings="output.weight" not in self._tensors,
      window_rope=local,
      soft_cap=self._cap("attn_logit_softcapping"),
      final_soft_cap=self._cap("final_logit_softcapping"),
      **experts,
    )

  def _cap(self, key: str) -> float | None:
    """A soft cap, in families that have them."""
    default = self.family.defaults.get(key)
    return None if default is None else self._entry(key, default)

  def _windows(self, layers: int) -> list[int | None]:
    """The sliding window of each layer; []: none has one."""
    window = self._entry("attention.sliding_window", 0)
    if not window or layers > 1 << 16:  # more layers than the file has are found out later
      return []
    pattern = self.family.defaults.get("sliding_window_pattern", 0)
    pattern = self._entry("attention.sliding_window_pattern", pattern)
    if isinstance(pattern, list) and len(pattern) == layers:
      return [window if slides else None for slides in pattern]
    if not isinstance(pattern, int):
      expected = f"a number, or {layers} booleans"
      self.refuse("attention.sliding_window_pattern", repr(pattern), expected)
    return [None if pattern and (i + 1) % pattern == 0 else window for i in range(layers)]

  def _rope(self, head_dim: int) -> Rope:
    share = self.family.defaults.get("partial_rotary_factor", 1.0)
    turned = self._entry("rope.dimension_count", int(share * head_dim))
    if "partial_rotary_factor" not in self.family.defaults and turned != head_dim:
      self.refuse("rope.dimension_count", turned, f"the head size {head_dim}")
    return dataclasses.replace(self._whole_rope(head_dim), partial=turned / head_dim)

  def _whole_rope(self, head_dim: int) -> Rope:
    """The rotary embedding of heads that turn whole, as llama.cpp reads its entries."""
    theta = self._positive("rope.freq_base", 10000.0)
    kind, factor = self._scaling(theta)
    by_tensor = {name for name in (_ROPE_FREQS, *_LONG_ROPE.values()) if name in self._tensors}
    if by_tensor and (kind == "yarn" or factor != 1):
      both = f"{kind!r} with the factor {factor} beside the tensor {min(by_tensor)}"
      self.refuse("rope.scaling", both, "one of the two")
    if by_tensor == {_ROPE_FREQS}:
      return Rope(theta, self._llama3(theta, head_dim))
    if by_tensor == set(_LONG_ROPE.values()):
      return Rope(theta, self._longrope())
    if by_tensor:
      raise ValueError(
        f"{self.path}: found the rope tensors {sorted(by_tensor)}, expected {_ROPE_FREQS}, or both "
        f"{' and '.join(_LONG_ROPE.values())}"
      )
    if kind == "yarn":
      return Rope(theta, self._yarn(theta, factor))
    if kind not in ("none", "linear"):
      found = f"{kind!r} without its tensors"
      self.refuse("rope.scaling.type", found, "'none', 'linear' or 'yarn'")
    return Rope(theta, None if factor == 1 else Linear(factor))

  def _scaling(self, theta: float) -> tuple[str, float]:
    """Kind and factor of the scaling.

    Where no kind is stated, llama.cpp takes a factor as "linear"; the key of it was another in
    2023, and 0 stands for 1.
    """
    self._check_rope_entries(theta)
    kind = self._entry("rope.scaling.type", "linear")
    old = self.metadata.get(f"{self.metadata['general.architecture']}.rope.scale_linear")
    if kind == "none" or (kind != "yarn" and not self._entry("rope.scaling.factor", old or 0)):
      return kind, 1.0
    return kind, self._positive("rope.scaling.factor", old)

  def _check_rope_entries(self, theta: float) -> None:
    """Raises for entries that ask for what `Rope` does not do: none is passed over."""
    prefix = f"{self.metadata['general.architecture']}.rope."
    kind = self._entry("rope.scaling.type", "linear")
    own_theta = "rope_local_base_freq" in self.family.defaults
    scaled = kind == "yarn" or _LONG_ROPE["long"] in self._tensors  # rotated queries and keys
    plain: dict[str, tuple[Any, ...]] = {
      "scaling.yarn_log_multiplier": (0,),
      "scaling.yarn_ext_factor": (-1, 1) if kind == "yarn" else (-1, 0),
      "scaling.yarn_attn_factor": (1,),
      "dimension_count_swa": (self._entry("rope.dimension_count", 0),),
      **({} if own_theta else {"freq_base_swa": (theta,)}),
      **({} if scaled else {"scaling.attn_factor": (1,)}),
    }
    for key in sorted(key for key in self.metadata if key.startswith(prefix)):
      name, found = key.removeprefix(prefix), self.metadata[key]
      if name in plain and found not in plain[name]:
        self.refuse(f"rope.{name}", found, f"{' or '.join(map(str, plain[name]))}, or no entry")
      if name not in plain and name not in _ROPE_ENTRIES:
        self.refuse(f"rope.{name}", found, "no such entry")

  def _yarn(self, theta: float, factor: float) -> Yarn:
    original = self._entry("rope.scaling.original_context_length", self._entry("context_length"))
    yarn = Yarn(
      factor=factor,
      original_context=original,
      beta_fast=self._positive("rope.scaling.yarn_beta_fast", 32.0),
      beta_slow=self._positive("rope.scaling.yarn_beta_slow", 1.0),
      truncate=not self.family.flags.get("sinks", False),  # gpt-oss's is not; no entry says so
    )
    # llama.cpp puts this factor on top of YaRN's own.
    extra = self._positive("rope.scaling.attn_factor", 1.0)
    if extra == 1:
      return yarn
    return dataclasses.replace(yarn, attention_factor=extra * Rope(theta, yarn).magnitude)

  def _longrope(self) -> LongRope:
    """As in a Hugging Face folder: the divisors of the context that the model states."""
    context = self._entry("context_length")
    original = self._entry("rope.scaling.original_context_length", context)
    tensor = self._tensors[_LONG_ROPE["short" if context <= original else "long"]]
    factors = np.asarray(self._dequantize(tensor.name, tensor.data), np.float64).reshape(-1)
    return LongRope(tuple(factors.tolist()), self._positive("rope.scaling.attn_factor", 1.0))

  def _llama3(self, theta: float, head_dim: int) -> Llama3 | None:
    """Llama 3.1's scaling, which GGUF stores as a divisor of each frequency.

    The divisors fix the factor; that the rest is what every Llama 3.1 to 3.3 was trained with is
    checked against them.
    """
    tensor = self._tensors[_ROPE_FREQS]
    divisors = np.asarray(self._dequantize(_ROPE_FREQS, tensor.data), np.float64).reshape(-1)
    if divisors.shape == (head_dim // 2,) and np.allclose(divisors, 1.0, rtol=1e-5):
      return None
    factor = float(divisors.max(initial=0.0))
    scaling = Llama3(factor=factor)
    want = Rope(theta).frequencies(head_dim) / Rope(theta, scaling).frequencies(head_dim)
    if divisors.shape != want.shape or not np.allclose(divisors, want, rtol=1e-4):
      raise NotImplementedError(
        f"{self.path}: tensor {_ROPE_FREQS!r}: found divisors {divisors[:4]} …, expected those of "
        f"{scaling}"
      )
    return scaling

  def _dequantize(self, name: str, data: np.ndarray) -> np.ndarray:
    kind = self._tensors[name].kind
    try:
      if data.dtype != np.uint8:  # plain numbers
        return gguf.dequantize(data, kind)
      shape = gguf.quant_shape_from_byte_shape(data.shape, kind)
      # As one row: the package takes 16 at a time, and then puts them together.
      return gguf.dequantize(data.reshape(1, -1), kind).reshape(shape)
    except NotImplementedError as error:
      raise NotImplementedError(
        f"{self.path}: tensor {name!r}: found quantisation {kind.name}, "
        "expected one that the gguf package dequantises"
      ) from error


def _names(architecture: str) -> dict[str, str]:
  """The file's name of each part, by the package's table of Hugging Face's names."""
  kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
  table = gguf.get_tensor_name_map(kinds[architecture], 1)
  names = {"head": "output.weight"}  # also in architectures that never have one
  for part, name in families.GGUF[architecture].tensors.items():
    whole = name.replace("{i}", "0").replace(".{e}", "")  # the experts' are one tensor
    if found := table.get_name(whole, (".weight", ".bias")):
      names[part] = found.replace("blk.0.", "blk.{i}.")
  return names
