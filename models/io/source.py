"""Base of every kind of model file: the tensors of a decoder, and how they become items."""

from __future__ import annotations

import abc
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import ml_dtypes  # noqa: F401  (NumPy knows bfloat16 by its name through it)
import numpy as np

from kvjax.models.io.families import Family, rotary_order
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn.config import ModelConfig
from kvjax.primitives.rope import Yarn

Item = dict[str, Any]

_ROWS = 16  # of a matrix that are turned together
_PIECE = 1 << 18  # numbers that are looked at together


class Source(abc.ABC):
  """A published model: config, tokenizer, and tensors as checkpoint items.

  Everything but the numbers themselves is checked when it is opened.

  Attributes:
    path: the file or folder.
    config: sizes and flags of the decoder.
    family: how the file lays out what the decoder has in one form.
    names: what the file calls each tensor: the parts of a layer, by a pattern with {i} (and {e}
      where each expert has a tensor of its own), and "embedding", "norm" and "head".
    dtype: what matrices are rounded to, "float32" say; None: as `read` says.
    where: words before the key of an entry of the config, in errors.
    query_scale: what the decoder's queries are multiplied by, where the model does not divide
      attention's logits by √H; 1 elsewhere. Norms over query heads take it in, else the weights.
  """

  path: pathlib.Path
  config: ModelConfig
  family: Family
  names: Mapping[str, str]
  dtype: str | None = None
  where: str = ""
  query_scale: float = 1.0

  @abc.abstractmethod
  def tokenizer(self) -> Tokenizer:
    """The tokenizer that comes with the model."""

  @abc.abstractmethod
  def read(self, name: str, dtype: str | None) -> np.ndarray:
    """A tensor of the file, a matrix rounded to `dtype`.

    None: float32, float16 and bfloat16 as they are, and quantised blocks as bfloat16: that moves a
    number by 0.2 % of it at most, where 8-bit blocks are off by 0.4 % of their largest number, and
    4-bit ones by 3 % of their range. Vectors keep the file's dtype.
    """

  def refuse(self, key: str, found: Any, expected: Any) -> NoReturn:
    """Raises NotImplementedError for an entry of the config."""
    raise NotImplementedError(f"{self.where} {key!r}: found {found}, expected {expected}")

  def item(self, name: str) -> Item:
    """The arrays of one checkpoint item, in the decoder's layout.

    Raises:
      ValueError: a tensor holds NaN or infinity, or does when it is rounded to `dtype`.
    """
    if name == "embedding":
      return {"embedding": self._part("embedding")}
    if name == "final":
      item: Item = {"norm": self._norm("norm")}
      if not self.config.tie_embeddings:
        item["head"] = self._part("head")
      return item
    c, layer = self.config, int(name.removeprefix("layer_"))
    # The largest first: a transposed copy is made of it while little else is in memory.
    mlp = self._mlp(layer)
    wqkv = self._per_kv_head("", layer)
    if self.query_scale != 1 and not c.qk_norm:
      wqkv[:, :-2] = np.float32(self.query_scale) * wqkv[:, :-2].astype(np.float32)
    wo = turned(self._part("o", layer))
    attention: Item = {
      "wqkv": turned(wqkv.reshape(-1, c.dim)).reshape(c.dim, *wqkv.shape[:-1]),
      "wo": wo.reshape(c.kv_heads, c.groups, c.head_dim, c.dim),
    }
    if c.qkv_bias:
      attention["bqkv"] = self._per_kv_head("_bias", layer)
    if c.out_bias:
      attention["bo"] = self._part("o_bias", layer)
    if c.sinks:
      sinks = self._part("sinks", layer).astype(np.float32)
      attention["sinks"] = sinks.reshape(c.kv_heads, c.groups)
    if c.qk_norm:
      for part, scale in (("q_norm", self.query_scale), ("k_norm", 1.0)):
        attention[part] = {"scale": self._in_order(self._norm(part, layer)["scale"], 0)}
        if scale != 1:
          attention[part]["scale"] = np.float32(scale) * attention[part]["scale"].astype(np.float32)
    after = ("attention_after", "mlp_after") if c.norms_after else ()
    norms = {part: self._norm(part, layer) for part in ("attention_norm", "mlp_norm", *after)}
    return {**norms, "attention": attention, "mlp": mlp}

  def _mlp(self, layer: int) -> Item:
    """`gate_up` [D, 2, F] and `down` [F, D], of each expert where there are some."""
    c = self.config
    down = self._part("down", layer)
    if self.family.experts_as_used:
      gate_up = np.ascontiguousarray(_in_turn(self._part("gate_up", layer)))
    else:
      x = self._gate_up("", layer, -3)
      rows = x.reshape(*x.shape[:-3], -1, c.dim)
      down, gate_up = turned(down), turned(rows).reshape(*x.shape[:-3], c.dim, 2, c.ffn)
    out = {"gate_up": gate_up, "down": down}
    if c.experts:
      out["router"] = turned(self._part("router", layer))
    if c.mlp_bias:
      out["router_bias"] = self._part("router_bias", layer).astype(np.float32)
      out["gate_up_bias"] = self._gate_up("_bias", layer, -2)
      out["down_bias"] = self._part("down_bias", layer)
    return out

  def _gate_up(self, kind: str, layer: int, axis: int) -> np.ndarray:
    """Both halves of the gated product side by side on a new axis."""
    if "gate_up" not in self.family.fused:
      return np.stack(_alike([self._part(f"{x}{kind}", layer) for x in ("gate", "up")]), axis)
    x = self._part(f"gate_up{kind}", layer)
    if self.family.experts_as_used:
      return _in_turn(x)
    return x.reshape(*x.shape[: axis + 1], 2, -1, *x.shape[x.ndim + axis + 2 :])

  def _per_kv_head(self, kind: str, layer: int) -> np.ndarray:
    """Query, key and value rows gathered by KV head, [K, G + 2, H, ...]."""
    c = self.config
    if "qkv" in self.family.fused:
      ends = np.cumsum([c.heads * c.head_dim, c.kv_heads * c.head_dim])
      rows = np.split(self._part(f"qkv{kind}", layer), ends)
    else:
      rows = _alike([self._part(f"{name}{kind}", layer) for name in "qkv"])
    q, k, v = (x.reshape(c.kv_heads, -1, c.head_dim, *x.shape[1:]) for x in rows)
    return np.concatenate([self._in_order(q, 2), self._in_order(k, 2), v], axis=1)

  def _in_order(self, x: np.ndarray, axis: int) -> np.ndarray:
    """The dimensions of heads where the decoder's rotary embedding has them."""
    c = self.config
    turned = c.rope.turned(c.head_dim)
    order = rotary_order(c.head_dim, turned, self.family.interleaved)
    return x if order is None else np.take(x, order, axis)

  def _norm(self, part: str, layer: int = 0) -> Item:
    """A norm's scale; some files hold it without its 1."""
    x, plus = self._part(part, layer), self.family.norm_plus
    return {"scale": np.float32(plus) + x.astype(np.float32) if plus else x}

  def _part(self, part: str, layer: int = 0) -> np.ndarray:
    """A tensor as `tensor_shapes` says, all numbers."""
    each = range(self.config.experts) if "{e}" in self.names[part] else [0]
    found = []
    for name in (self.name(part, layer, e) for e in each):
      x = self.read(name, self.dtype)
      if not finite(x):
        raise ValueError(
          f"{self.path}: tensor {name!r}: found NaN or infinity in {x.dtype}, expected numbers"
        )
      found.append(x)
    return np.stack(_alike(found)) if "{e}" in self.names[part] else found[0]

  def name(self, part: str, layer: int = 0, expert: int = 0) -> str:
    """Name of a tensor in the file."""
    return self.names[part].format(i=layer, e=expert)

  def positive(self, key: str, value: Any) -> float:
    """The value of an entry of the config; ValueError where it is no number above 0."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
      raise ValueError(f"{self.where} {key}: found {value!r}, expected a number above 0")
    return float(value)

  def config_of(
    self, context: int, limit: int | None, windows: Sequence[int | None], **sizes: Any
  ) -> ModelConfig:
    """The config that the file states, with what follows from that and from the family.

    Windows that no token of the context sees past are none, unless layers with a window differ in
    more than the window.

    Args:
      context: tokens that the model was made for; YaRN's may be more.
      limit: what the caller asks for, None for all of it.
      windows: the window of every layer, None without one; []: no layer has one.
      sizes: further fields of `ModelConfig`.
    """
    scaling, apart = sizes["rope"].scaling, sizes["window_rope"] is not None
    if isinstance(scaling, Yarn):
      context = max(context, int(scaling.factor * scaling.original_context))
    limit = int(limit) if isinstance(limit, np.integer) else limit
    most = context if limit is None else limit
    if limit is not None and (type(limit) is not int or not 1 <= limit <= context):
      raise ValueError(f"max_context: found {most!r}, expected 1 to {context}, as {self.path} says")
    kept = tuple(w if w is not None and (apart or w < most) else None for w in windows)
    sizes |= {"max_context": most, "limited": most < context, "windows": kept if any(kept) else ()}
    if "query_pre_attn_scalar" in self.family.defaults:  # Gemma's
      sizes["embed_scale"] = sizes["dim"] ** 0.5
    try:
      return ModelConfig(**sizes, **self.family.flags)
    except ValueError as error:
      raise ValueError(f"{self.where} {error}") from error

  def check_tensors(
    self, found: Mapping[str, tuple[int, ...]], ignored: Iterable[str] = ()
  ) -> None:
    """Compares the tensors that a model has with those that its config asks for.

    Args:
      found: shapes by name.
      ignored: names that may be there as well.
    """
    before = self.names["attention_norm"].partition("{i}")[0]
    layers = {name[len(before) :].split(".")[0] for name in found if name.startswith(before)}
    counts = {"layers": len(layers)}
    if "{e}" in self.names.get("gate", ""):
      begin, _, end = self.names["gate"].replace("{i}", "0").partition("{e}")
      counts["experts"] = sum(name.startswith(begin) and name.endswith(end) for name in found)
    for what, count in counts.items():
      if count != (wanted := getattr(self.config, what)):
        raise ValueError(
          f"{self.path}: found tensors of {count} {what}, expected {wanted}, as its config says"
        )
    expected: dict[str, tuple[int, ...]] = {}
    for part, layer, shape in tensor_shapes(self.config, self.family):
      if "{e}" in self.names[part]:
        each = range(self.config.experts)
        expected.update((self.name(part, layer, e), shape[1:]) for e in each)
      else:
        expected[self.name(part, layer)] = shape
    missing = [name for name in expected if name not in found]
    if missing:
      raise ValueError(
        f"{self.path}: {len(missing)} of {len(expected)} tensors not found, "
        f"expected {_some(missing)}"
      )
    extra = sorted(set(found) - set(expected) - set(ignored))
    if extra:
      raise NotImplementedError(
        f"{self.path}: found {len(extra)} tensors that this decoder does not use: {_some(extra)}"
      )
    for name, shape in expected.items():
      if found[name] != shape:
        raise ValueError(
          f"{self.path}: tensor {name!r}: found shape {found[name]}, expected {shape}"
        )


def tensor_shapes(
  c: ModelConfig, family: Family | None = None
) -> list[tuple[str, int, tuple[int, ...]]]:
  """Part, layer and shape of every tensor, as files store them: matrices are [out, in].

  Args:
    c: sizes and flags.
    family: how files lay them out; None: as Llama's.
  """
  fused = () if family is None else family.fused
  attention, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
  experts = (c.experts,) if c.experts else ()
  layer: dict[str, tuple[int, ...]] = {
    "attention_norm": (c.dim,),
    "q": (attention, c.dim),
    "k": (kv, c.dim),
    "v": (kv, c.dim),
    "o": (c.dim, attention),
    "mlp_norm": (c.dim,),
    "gate": (*experts, c.ffn, c.dim),
    "up": (*experts, c.ffn, c.dim),
    "down": (*experts, c.dim, c.ffn),
  }
  if c.qkv_bias:
    layer.update(q_bias=(attention,), k_bias=(kv,), v_bias=(kv,))
  if c.qk_norm:
    layer.update(q_norm=(c.head_dim,), k_norm=(c.head_dim,))
  if c.norms_after:
    layer.update(attention_after=(c.dim,), mlp_after=(c.dim,))
  if c.experts:
    layer["router"] = (c.experts, c.dim)
  if "qkv" in fused:
    layer["qkv"] = (attention + 2 * kv, c.dim)
  if "gate_up" in fused:
    layer["gate_up"] = (*experts, 2 * c.ffn, c.dim)
  if c.out_bias:
    layer["o_bias"] = (c.dim,)
  if c.sinks:
    layer["sinks"] = (c.heads,)
  if c.mlp_bias:
    layer.update(router_bias=experts, down_bias=(*experts, c.dim))
    halves = ("gate_up",) if "gate_up" in fused else ("gate", "up")
    layer.update({f"{x}_bias": (*experts, 2 * c.ffn // len(halves)) for x in halves})
  if family is not None and family.experts_as_used:
    layer |= {part: (*experts, *layer[part][:0:-1]) for part in ("gate_up", "down")}
  gone = [part for whole in fused for part in _FUSED[whole]]
  layer = {part: shape for part, shape in layer.items() if part not in gone}
  out = [("embedding", 0, (c.vocab, c.dim)), ("norm", 0, (c.dim,))]
  if not c.tie_embeddings:
    out.append(("head", 0, (c.vocab, c.dim)))
  return out + [(part, i, shape) for i in range(c.layers) for part, shape in layer.items()]


def turned(x: np.ndarray) -> np.ndarray:
  """[..., M, N] as [..., N, M], contiguous.

  A few rows at a time, which stay in the processor's caches: a fifth of the time of one copy.
  """
  out = np.empty((*x.shape[:-2], x.shape[-1], x.shape[-2]), x.dtype)
  for i in range(0, x.shape[-2], _ROWS):
    out[..., i : i + _ROWS] = x[..., i : i + _ROWS, :].swapaxes(-1, -2)
  return out


def finite(x: np.ndarray) -> bool:
  """True if there is neither NaN nor infinity: of these all bits of the exponent are set."""
  flat = x.reshape(-1).view(f"u{x.itemsize}")
  exponent = np.array(np.inf, x.dtype).view(flat.dtype)
  return all(
    ((flat[i : i + _PIECE] & exponent) != exponent).all() for i in range(0, x.size, _PIECE)
  )


def _alike(parts: list[np.ndarray]) -> list[np.ndarray]:
  """Parts of one array; float32, which holds every number of theirs, where dtypes differ."""
  if len({x.dtype for x in parts}) == 1:
    return parts
  return [x.astype(np.float32) for x in parts]


def _in_turn(x: np.ndarray) -> np.ndarray:
  """[..., 2F] of gate and up in turn as [..., 2, F]."""
  return x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2)


_FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


def _some(names: list[str]) -> str:
  return ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
