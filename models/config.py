"""The sizes of a decoder, and the flags that tell one family from another."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvjax.rope import Linear, Llama3, Rope, Yarn

_SCALINGS = {cls.__name__.lower(): cls for cls in (Linear, Llama3, Yarn)}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Shape of a Llama-architecture decoder.

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

  def __post_init__(self):
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
        raise ValueError(f"ModelConfig.{name}: found {value!r}, expected an integer of at least 1")
    if self.heads % self.kv_heads:
      raise ValueError(
        f"ModelConfig.heads: found {self.heads}, expected a multiple of kv_heads = {self.kv_heads}"
      )
    if self.head_dim % 2:
      raise ValueError(f"ModelConfig.head_dim: found {self.head_dim}, expected an even number")
    if not self.norm_eps > 0:
      raise ValueError(f"ModelConfig.norm_eps: found {self.norm_eps}, expected more than 0")
    if not isinstance(self.rope, Rope):
      raise TypeError(f"ModelConfig.rope: found {self.rope!r}, expected a kvjax Rope")

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
    """Rebuilds a config.

    Raises:
      ValueError: fields are missing or unknown, or a value is out of range.
    """
    names = {field.name for field in dataclasses.fields(cls)}
    if set(values) != names:
      raise ValueError(
        f"model config: missing {sorted(names - set(values))}, "
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
