"""The sizes of a decoder, and the flags that tell one family from another."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from kvjax.core import fields
from kvjax.core.cache import CacheSpec
from kvjax.primitives.rope import Linear, Llama3, LongRope, Rope, Yarn

_SCALINGS = {cls.__name__.lower(): cls for cls in (Linear, Llama3, LongRope, Yarn)}

# Precision by name: the dtype of weights and activations, and how float32 products are computed.
# "float32" is float32 throughout (TF32 off); "float32-tf32" lets a GPU round the factors of every
# product to TF32 (10 bits of mantissa) and sum in float32. On a CPU the two are the same.
PRECISIONS: dict[str, tuple[str, str | None]] = {
  "bf16": ("bfloat16", None),
  "float32": ("float32", "highest"),
  "float32-tf32": ("float32", "tensorfloat32"),
}


# Gates of the MLP by name (`kvjax.models.nn.products.gated`).
ACTIVATIONS = ("silu", "gelu_tanh", "clipped")
_WIDEST_HEAD = 1 << 16
_CAP = (lambda x: 0 < x < math.inf), "a finite number above 0, or None", None
# What checkpoints older than a field do not state: they mean its default.
_LATER = (
  *("limited", "qkv_bias", "qk_norm", "norms_after", "norm_experts"),
  *("out_bias", "mlp_bias", "sinks"),
  *("activation", "embed_scale", "windows", "window_rope", "experts", "experts_per_token"),
  *("soft_cap", "final_soft_cap"),
)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Shape of a decoder of any family in `kvjax.models.io.families`.

  `kvjax.models.io.presets` has some.

  Attributes:
    vocab: vocabulary size V.
    dim: model width D.
    layers: L.
    heads: query heads N.
    kv_heads: key/value heads K; N is a multiple of K.
    head_dim: head size H, even (rotary pairs).
    ffn: width F of the gated MLP, or of each expert.
    rope: rotary embedding.
    norm_eps: epsilon inside the RMS norms.
    tie_embeddings: the output head is the transposed embedding.
    max_context: tokens that the model was trained for: past them `prefill` and `generate` warn.
    limited: `max_context` is a conversion's, less than what the model was trained for: more tokens
      are refused, as windows that nothing within it outgrows are left out.
    qkv_bias: query, key and value projections add a bias (Qwen2, Qwen2.5).
    qk_norm: an RMS norm over each query and key head, before the rotation (Qwen3, Gemma 3).
    norms_after: an RMS norm over what attention, and what the MLP, adds to the residual stream
      (GLM-4-0414, Gemma 2 and 3).
    activation: the MLP's gate: "silu", "gelu_tanh" (Gemma 2 and 3) or "clipped" (gpt-oss).
    embed_scale: factor on the embedding's rows where they enter the first layer (Gemma: √D).
    windows: for each layer the newest tokens that it sees, its own query's among them, or None: all
      of them. (): all layers see all.
    window_rope: rotary embedding of layers with a window (None: `rope`).
    experts: E of a mixture-of-experts MLP; 0: one MLP.
    experts_per_token: the best-scored experts that each token is sent to.
    norm_experts: the weights of a token's experts sum to 1; else they are shares among all E.
    out_bias: attention's output projection adds a bias (gpt-oss).
    mlp_bias: router and experts add biases (gpt-oss).
    sinks: each head has a logit of its own in the softmax's denominator (gpt-oss).
    soft_cap: c of attention's logits c·tanh(x/c) (Gemma 2); None: x itself.
    final_soft_cap: the same of the model's logits.
  """

  vocab: int = fields.least(1)
  dim: int = fields.least(1)
  layers: int = fields.least(1)
  heads: int = fields.least(1)
  kv_heads: int = fields.least(1)
  head_dim: int = fields.least(1)
  ffn: int = fields.least(1)
  rope: Rope = dataclasses.field(default_factory=Rope)
  norm_eps: float = fields.finite_above(0, 1e-5)
  tie_embeddings: bool = False
  max_context: int = fields.least(1, 8192)
  limited: bool = False
  qkv_bias: bool = False
  qk_norm: bool = False
  norms_after: bool = False
  activation: str = fields.one_of(ACTIVATIONS, "silu")
  embed_scale: float = 1.0
  windows: tuple[int | None, ...] = ()
  window_rope: Rope | None = None
  experts: int = fields.least(0, 0)
  experts_per_token: int = 0
  norm_experts: bool = True
  out_bias: bool = False
  mlp_bias: bool = False
  sinks: bool = False
  soft_cap: float | None = fields.bound(*_CAP)
  final_soft_cap: float | None = fields.bound(*_CAP)

  def __post_init__(self):
    fields.check(type(self), vars(self))
    expect = functools.partial(fields.expect, self)
    expect("heads", self.heads % self.kv_heads == 0, f"a multiple of kv_heads = {self.kv_heads}")
    even = self.head_dim % 2 == 0 and self.head_dim <= _WIDEST_HEAD
    expect("head_dim", even, f"an even number, at most {_WIDEST_HEAD}")
    for name in ("rope", "window_rope"):
      self._check_rope(name)
    self._check_windows()
    self._check_experts()

  def _check_rope(self, name: str) -> None:
    """Raises where a rotary embedding does not give each pair an angle."""
    rope = getattr(self, name)
    if rope is None:
      return
    turned = rope.turned(self.head_dim)
    factors = getattr(rope.scaling, "factors", None)
    shared = turned % 2 == 0 and turned >= 2
    shared &= factors is None or len(factors) == turned // 2
    share = f"an even share of {self.head_dim} dimensions, and a factor for each of its pairs"
    fields.expect(self, name, shared, share)
    try:
      with np.errstate(all="ignore"):
        found = [*rope.frequencies(self.head_dim)[: turned // 2], rope.magnitude]
      usable = bool(np.isfinite(found).all()) and min(found) > 0
    except (ArithmeticError, TypeError, ValueError):
      usable = False
    fields.expect(self, name, usable, "numbers above 0 that give finite angles")

  def _check_windows(self) -> None:
    right = all(x is None or (type(x) is int and x >= 1) for x in self.windows)
    right &= len(self.windows) in (0, self.layers)
    entries = f"() or {self.layers} entries, one per layer: tokens, or None"
    fields.expect(self, "windows", right, entries)

  def _check_experts(self) -> None:
    every, some = self.experts, self.experts_per_token
    right = min(1, every) <= some <= every
    wanted = f"1 to {every}" if every else "0 without experts"
    fields.expect(self, "experts_per_token", right, wanted)
    needed = self.mlp_bias or self.activation == "clipped"
    fields.expect(self, "experts", every or not needed, "some with biases or a clipped gate")

  @property
  def groups(self) -> int:
    """G, query heads per key/value head."""
    return self.heads // self.kv_heads

  @property
  def served(self) -> int:
    """Layers that see everything, which a KV-cache method serves."""
    return self.windows.count(None) if self.windows else self.layers

  def cache_spec(self, batch: int, capacity: int, dtype: Any) -> CacheSpec:
    """Sizes of caches for `batch` rows of up to `capacity` tokens, stored in this dtype."""
    heads = self.kv_heads, self.groups, self.head_dim
    return CacheSpec(batch, capacity, *heads, self.served, dtype, self.windows)

  def to_json(self) -> dict[str, Any]:
    """A dict of plain JSON values; `from_json` is its inverse."""
    out = dataclasses.asdict(self)
    for name in ("rope", "window_rope"):
      rope = getattr(self, name)
      if rope is not None and rope.scaling is not None:
        kind = type(rope.scaling).__name__.lower()
        out[name]["scaling"] = {"kind": kind, **out[name]["scaling"]}
    return {**out, "windows": list(self.windows)}

  @classmethod
  def from_json(cls, values: dict[str, Any]) -> ModelConfig:
    """Rebuilds a config; flags of families that are newer than the checkpoint may be missing.

    Raises:
      TypeError: a value is of another type.
      ValueError: fields are missing or unknown, or a value is out of range.
    """
    names = {field.name for field in dataclasses.fields(cls)}
    missing = names - set(values) - set(_LATER)
    if missing or set(values) - names:
      raise ValueError(
        f"model config: missing {sorted(missing)}, "
        f"unknown {sorted(set(values) - names)}, expected the fields {sorted(names)}"
      )
    ropes = {
      name: _rope_from_json(name, values[name])
      for name in ("rope", "window_rope")
      if values.get(name) is not None
    }
    return cls(**{**values, **ropes, "windows": tuple(values.get("windows", ()))})


def _rope_from_json(name: str, values: Any) -> Rope:
  try:
    scaling = values["scaling"]
    if scaling is not None:
      scaling = {k: tuple(x) if isinstance(x, list) else x for k, x in scaling.items()}
      scaling = _SCALINGS[scaling.pop("kind")](**scaling)
    return Rope(values["theta"], scaling, values.get("partial", 1.0))
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise ValueError(
      f"model config: {name}: found {values!r}, expected theta and scaling "
      f"(null, or kind in {sorted(_SCALINGS)} with its fields)"
    ) from error
