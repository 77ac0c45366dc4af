"""The sizes of a decoder, and the flags that tell one family from another."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..rope import Linear, Llama3, Rope, Yarn

_SCALINGS = {cls.__name__.lower(): cls for cls in (Linear, Llama3, Yarn)}

# Precision by name: the dtype of weights and activations, and how float32 products are computed.
# "float32" is float32 throughout (TF32 off); "float32-tf32" lets a GPU round the factors of every
# product to TF32 (10 bits of mantissa) and sum in float32. On a CPU the two are the same.
PRECISIONS: dict[str, tuple[str, str | None]] = {
  "bf16": ("bfloat16", None),
  "float32": ("float32", "highest"),
  "float32-tf32": ("float32", "tensorfloat32"),
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Shape of a decoder of the Llama, Mistral or Qwen families; `kvjax.models.presets` names some.

  Attributes:
    vocab: vocabulary size V.
    dim: model width D.
    layers: L.
    heads: query heads N.
    kv_heads: key/value heads K; N is a multiple of K.
    head_dim: head size H, even (rotary pairs).
    ffn: width F of the gated MLP.
    rope: rotary embedding.
    norm_eps: epsilon inside the RMS norms.
    tie_embeddings: the output head is the transposed embedding.
    max_context: tokens that the model was trained for.
    qkv_bias: query, key and value projections add a bias (Qwen2, Qwen2.5).
    qk_norm: an RMS norm over each query and key head, before the rotation (Qwen3).
  """

  vocab: int
  dim: int
  layers: int
  heads: int
  kv_heads: int
  head_dim: int
  ffn: int
  rope: Rope = dataclasses.field(default_factory=Rope)
  norm_eps: float = 1e-5
  tie_embeddings: bool = False
  max_context: int = 8192
  qkv_bias: bool = False
  qk_norm: bool = False

  def __post_init__(self):
    called = type(self).__name__
    for name in (
      "vocab",
      "dim",
      "layers",
      "heads",
      "kv_heads",
      "head_dim",
      "ffn",
      "max_context",
    ):
      value = getattr(self, name)
      if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{called}.{name}: found {value!r}, expected an integer of at least 1")
    for name in ("tie_embeddings", "qkv_bias", "qk_norm"):
      if not isinstance(getattr(self, name), bool):
        raise TypeError(f"{called}.{name}: found {getattr(self, name)!r}, expected a bool")
    if self.heads % self.kv_heads:
      raise ValueError(
        f"{called}.heads: found {self.heads}, expected a multiple of kv_heads = {self.kv_heads}"
      )
    if self.head_dim % 2:
      raise ValueError(f"{called}.head_dim: found {self.head_dim}, expected an even number")
    if not self.norm_eps > 0:
      raise ValueError(f"{called}.norm_eps: found {self.norm_eps}, expected more than 0")
    if not isinstance(self.rope, Rope):
      raise TypeError(f"{called}.rope: found {self.rope!r}, expected a kvjax Rope")

  @property
  def groups(self) -> int:
    """G, query heads per key/value head."""
    return self.heads // self.kv_heads

  def to_json(self) -> dict[str, Any]:
    """A dict of plain JSON values; `from_json` is its inverse."""
    out = dataclasses.asdict(self)
    scaling = self.rope.scaling
    if scaling is not None:
      out["rope"]["scaling"] = {"kind": type(scaling).__name__.lower(), **out["rope"]["scaling"]}
    return out

  @classmethod
  def from_json(cls, values: dict[str, Any]) -> ModelConfig:
    """Rebuilds a config; flags of families that are newer than the checkpoint may be missing.

    Raises:
      ValueError: fields are missing or unknown, or a value is out of range.
    """
    names = {field.name for field in dataclasses.fields(cls)}
    missing = names - set(values) - {"qkv_bias", "qk_norm"}
    if missing or set(values) - names:
      raise ValueError(
        f"model config: missing {sorted(missing)}, "
        f"unknown {sorted(set(values) - names)}, expected the fields {sorted(names)}"
      )
    return cls(**{**values, "rope": _rope_from_json(values["rope"])})


def _rope_from_json(values: Any) -> Rope:
  try:
    scaling = values["scaling"]
    if scaling is not None:
      scaling = dict(scaling)
      scaling = _SCALINGS[scaling.pop("kind")](**scaling)
    return Rope(theta=values["theta"], scaling=scaling)
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(
      f"model config: rope: found {values!r}, expected theta and scaling "
      f"(null, or kind in {sorted(_SCALINGS)} with its fields)"
    ) from error
