"""What every kind of model file shares: the tensors of a decoder, and how they become items."""

from __future__ import annotations

import abc
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from .config import ModelConfig
from .tokenizer import Tokenizer

Item = dict[str, Any]


class Source(abc.ABC):
  """A published model: config, tokenizer, and tensors as checkpoint items.

  Everything but the numbers themselves is checked when it is opened.

  Attributes:
    path: the file or folder.
    config: sizes and flags of the decoder.
    names: what the file calls each tensor: the parts of a layer, by a pattern with {i}, and
      "embedding", "norm" and "head".
  """

  path: pathlib.Path
  config: ModelConfig
  names: Mapping[str, str]

  @abc.abstractmethod
  def tokenizer(self) -> Tokenizer:
    """The tokenizer that comes with the model."""

  @abc.abstractmethod
  def read(self, part: str, layer: int = 0) -> np.ndarray:
    """A tensor as `tensor_shapes` says; bfloat16 and float16 as they are, others as float32."""

  def item(self, name: str) -> Item:
    """The arrays of one checkpoint item, in the decoder's layout.

    Raises:
      ValueError: a tensor holds NaN or infinity.
    """
    if name == "embedding":
      return {"embedding": self._finite("embedding")}
    if name == "final":
      item: Item = {"norm": {"scale": self._finite("norm")}}
      if not self.config.tie_embeddings:
        item["head"] = self._finite("head")
      return item
    c, layer = self.config, int(name.removeprefix("layer_"))
    # The largest first: a transposed copy is made of it while little else is in memory.
    gate_up = np.stack([self._finite("gate", layer), self._finite("up", layer)])
    mlp = {
      "gate_up": np.ascontiguousarray(gate_up.transpose(2, 0, 1)),
      "down": np.ascontiguousarray(self._finite("down", layer).T),
    }
    del gate_up
    wo = self._finite("o", layer).T.reshape(c.kv_heads, c.groups, c.head_dim, c.dim)
    attention: Item = {
      "wqkv": np.ascontiguousarray(self._per_kv_head("{}", layer).transpose(3, 0, 1, 2)),
      "wo": np.ascontiguousarray(wo),
    }
    if c.qkv_bias:
      attention["bqkv"] = self._per_kv_head("{}_bias", layer)
    if c.qk_norm:
      for part in ("q_norm", "k_norm"):
        attention[part] = {"scale": self._finite(part, layer)}
    return {
      "attention_norm": {"scale": self._finite("attention_norm", layer)},
      "attention": attention,
      "mlp_norm": {"scale": self._finite("mlp_norm", layer)},
      "mlp": mlp,
    }

  def _per_kv_head(self, part: str, layer: int) -> np.ndarray:
    """Query, key and value rows gathered by KV head, [K, G + 2, H, ...]."""
    c = self.config
    rows = [self._finite(part.format(name), layer) for name in "qkv"]
    return np.concatenate(
      [x.reshape(c.kv_heads, -1, c.head_dim, *x.shape[1:]) for x in rows], axis=1
    )

  def _finite(self, part: str, layer: int = 0) -> np.ndarray:
    x = self.read(part, layer)
    if not all(np.isfinite(rows).all() for rows in np.array_split(x, 1 + x.size // (1 << 24))):
      raise ValueError(
        f"{self.path}: tensor {self.name(part, layer)!r}: found NaN or infinity, expected numbers"
      )
    return x

  def name(self, part: str, layer: int = 0) -> str:
    """What the file calls a tensor."""
    return self.names[part].format(i=layer)

  def context(self, stated: int, window: int | None, limit: int | None) -> int:
    """The context to convert for, in tokens.

    Args:
      stated: what the model was made for.
      window: its sliding window, None without one.
      limit: what the caller asks for, None for all of it.
    """
    context = stated if limit is None else limit
    if not 1 <= context <= stated:
      raise ValueError(f"max_context: found {context}, expected 1 to {stated}, as {self.path} says")
    if window is not None and window < context:
      raise NotImplementedError(
        f"{self.path}: found a sliding window of {window} tokens in a context of {context}, "
        "expected none: this decoder attends to the whole context. Up to the window the model is "
        f"the same without it: convert with max_context={window}"
      )
    return context

  def check_tensors(
    self, found: Mapping[str, tuple[int, ...]], ignored: Iterable[str] = ()
  ) -> None:
    """Compares the tensors that a model has with those that its config asks for.

    Args:
      found: shapes by name.
      ignored: names that may be there as well.
    """
    before = self.names["q"].partition("{i}")[0]
    layers = {name[len(before) :].split(".")[0] for name in found if name.startswith(before)}
    if len(layers) != self.config.layers:
      raise ValueError(
        f"{self.path}: found tensors of {len(layers)} layers, expected {self.config.layers}, as "
        "its config says"
      )
    expected = {self.name(part, layer): shape for part, layer, shape in tensor_shapes(self.config)}
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


def tensor_shapes(c: ModelConfig) -> list[tuple[str, int, tuple[int, ...]]]:
  """Part, layer and shape of every tensor, as files store them: matrices are [out, in]."""
  attention, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
  layer: dict[str, tuple[int, ...]] = {
    "attention_norm": (c.dim,),
    "q": (attention, c.dim),
    "k": (kv, c.dim),
    "v": (kv, c.dim),
    "o": (c.dim, attention),
    "mlp_norm": (c.dim,),
    "gate": (c.ffn, c.dim),
    "up": (c.ffn, c.dim),
    "down": (c.dim, c.ffn),
  }
  if c.qkv_bias:
    layer.update(q_bias=(attention,), k_bias=(kv,), v_bias=(kv,))
  if c.qk_norm:
    layer.update(q_norm=(c.head_dim,), k_norm=(c.head_dim,))
  out = [("embedding", 0, (c.vocab, c.dim)), ("norm", 0, (c.dim,))]
  if not c.tie_embeddings:
    out.append(("head", 0, (c.vocab, c.dim)))
  return out + [(part, i, shape) for i in range(c.layers) for part, shape in layer.items()]


def _some(names: list[str]) -> str:
  return ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
