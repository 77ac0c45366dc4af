"""Hugging Face folders: config.json, safetensors in one file or in shards, tokenizer.json.

Tensors are read one at a time. Pickled weights (.bin, .pt) are never opened.
"""

from __future__ import annotations

import math
import os
import pathlib
from typing import Any

import ml_dtypes  # noqa: F401  (safetensors hands out bfloat16 through it)
import numpy as np

from kvjax.models.io import files
from kvjax.models.io.families import FAMILIES
from kvjax.models.io.source import Source
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn.config import ModelConfig
from kvjax.primitives.rope import Linear, Llama3, LongRope, Rope, Yarn

_ROWS = 1 << 10  # of embeddings that are compared together
_MOST_LAYERS = 1 << 16  # of which a list is made before the weights are looked at
_READ = ("*.json", "*.jinja", "model*.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_KINDS_OF_LAYERS = ("full_attention", "sliding_attention")
_ROPES = ("default", "linear", "llama3", "longrope", "yarn")
# What this decoder does not do, by the entry that would ask for it.
_FIXED = {
  "hidden_act": "silu",
  "attention_bias": False,
  "mlp_bias": False,
  "quantization_config": None,
}


class HuggingFace(Source):
  """A folder in the layout of the Hugging Face hub; `kvjax.models.io.families` has the families.

  Args:
    path: the folder.
    max_context: use the model up to so many tokens (None: as many as it states).
    weights: whether they have to be there; without them only `config` can be asked for.

  Raises:
    FileNotFoundError: the folder, its config, its weights or a shard is missing.
    ValueError: an entry is missing or wrong, a tensor is missing or of another shape, or there are
      only pickled weights.
    NotImplementedError: the architecture or a feature of it is not supported.
  """

  def __init__(
    self, path: str | os.PathLike[str], *, max_context: int | None = None, weights: bool = True
  ):
    self.path = pathlib.Path(path)
    self._file = self.path / "config.json"
    self.where = f"{self._file}:"
    self._entries = files.read_json(self._file, "a Hugging Face folder")
    if self._entries.get("format") == "kvjax-checkpoint":
      raise ValueError(f"{self.path}: found a converted checkpoint, expected a Hugging Face folder")
    for pattern in _READ:
      for file in sorted(self.path.glob(pattern)):
        if file.is_file():
          files.check_begin(file)
    try:
      self.config = self._read_config(max_context)
    except (AttributeError, OverflowError, TypeError, ZeroDivisionError) as error:
      raise ValueError(
        f"{self._file}: found entries of the wrong type ({error}), expected numbers"
      ) from error
    if weights:
      self._shard_of = self._find_shards()
      self._check_shards()

  def tokenizer(self) -> Tokenizer:
    """The tokenizer of the folder; raises as `Tokenizer.from_huggingface` does."""
    return Tokenizer.from_huggingface(self.path)

  def read(self, name: str, dtype: str | None) -> np.ndarray:
    # Opened anew for every tensor: a mapping that stays open keeps all that was read in memory.
    with files.safetensors_opened(self._shard_of[name]) as shard:
      x = shard.get_tensor(name)
    with np.errstate(over="ignore"):  # infinity is found out later
      return x if dtype is None or x.ndim == 1 else x.astype(dtype, copy=False)

  def _entry(self, key: str, default: Any = None) -> Any:
    value = self._entries.get(key)
    value = self.family.defaults.get(key, default) if value is None else value
    if value is None:
      raise ValueError(f"{self._file}: {key!r}: not found, expected an entry")
    return value

  def _read_config(self, max_context: int | None) -> ModelConfig:
    kind = str(self._entries.get("model_type"))
    known = {name: family.architecture for name, family in FAMILIES.items()}
    architectures = self._entries.get("architectures") or [known.get(kind)]
    if kind not in known or architectures != [known[kind]]:
      raise NotImplementedError(
        f"{self._file}: found model_type {kind!r}, architectures {architectures}, expected one "
        f"of {known}"
      )
    self.family = family = FAMILIES[kind]
    self.names = family.tensors
    for key, value in {**_FIXED, **family.fixed}.items():
      if self._entries.get(key) not in (None, value):
        self.refuse(key, repr(self._entries[key]), f"{value!r} or no entry")
    heads, dim, layers = (
      self._entry(key) for key in ("num_attention_heads", "hidden_size", "num_hidden_layers")
    )
    rope, window_rope = self._ropes()
    experts = self._experts() if "router" in family.names else {}
    head_dim = self._entry("head_dim", dim // heads)
    if "query_pre_attn_scalar" in family.defaults:  # logits are divided by √H where they are made
      self.query_scale = (head_dim / self._entry("query_pre_attn_scalar")) ** 0.5
    return self.config_of(
      self._entry("max_position_embeddings"),
      max_context,
      self._windows(kind, layers),
      vocab=self._entry("vocab_size"),
      dim=dim,
      layers=layers,
      heads=heads,
      kv_heads=self._entry("num_key_value_heads", heads),
      head_dim=head_dim,
      ffn=self._entry("moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"),
      rope=rope,
      norm_eps=self._entry("rms_norm_eps"),
      tie_embeddings=self._entry("tie_word_embeddings", False),
      window_rope=window_rope,
      soft_cap=self._cap("attn_logit_softcapping"),
      final_soft_cap=self._cap("final_logit_softcapping"),
      **experts,
    )

  def _cap(self, key: str) -> float | None:
    """A soft cap, in families that have them; null says that there is none."""
    default = self.family.defaults.get(key)
    return None if default is None else self._entries.get(key, default)

  def _experts(self) -> dict[str, Any]:
    """Flags of a mixture of experts."""
    # gpt-oss's softmax is over the chosen experts alone: weights that sum to 1.
    norm = "router_bias" in self.family.names or self._entries.get("norm_topk_prob", False)
    return {
      "experts": self._entry("num_experts", self._entries.get("num_local_experts")),
      "experts_per_token": self._entry("num_experts_per_tok"),
      "norm_experts": bool(norm),
    }

  def _windows(self, family: str, layers: int) -> list[int | None]:
    """The sliding window of each layer; []: none has one."""
    window = self._entries.get("sliding_window", self.family.defaults.get("sliding_window"))
    kinds = self._entries.get("layer_types")
    if family in ("llama", "glm", "glm4"):
      return []
    if family.startswith("qwen") and self._entries.get("use_sliding_window") is False:
      window = None
    if kinds is not None:
      known = dict(zip(_KINDS_OF_LAYERS, (None, window), strict=True))
      if len(kinds) != layers or not set(kinds) <= set(known):
        self.refuse("layer_types", kinds, f"{layers} of {sorted(known)}")
      if window is None and "sliding_attention" in kinds:
        raise ValueError(
          f"{self._file}: 'layer_types': found 'sliding_attention' without a sliding window in "
          "use, expected 'full_attention' alone"
        )
      return [known[kind] for kind in kinds]
    if window is None:
      return []
    if layers > _MOST_LAYERS:
      raise ValueError(
        f"{self._file}: 'num_hidden_layers': found {layers}, expected at most {_MOST_LAYERS}"
      )
    if "sliding_window_pattern" in self.family.defaults:
      pattern = self._entry("sliding_window_pattern")
      return [window if (i + 1) % pattern else None for i in range(layers)]
    if family in ("mistral", "phi3"):
      return [window] * layers
    slides = self._entry("use_sliding_window", False)
    first = 0 if family == "qwen3_moe" else self._entry("max_window_layers", 28)
    return [window if slides and i >= first else None for i in range(layers)]

  def _ropes(self) -> tuple[Rope, Rope | None]:
    """The rotary embedding, and that of layers with a window where it is another.

    In `rope_parameters` (transformers 5) or in `rope_theta` and `rope_scaling` (before).
    """
    key = "rope_parameters" if self._entries.get("rope_parameters") else "rope_scaling"
    given = self._entries.get(key, self.family.defaults.get(key)) or {}
    apart = "rope_local_base_freq" in self.family.defaults
    if key == "rope_parameters":
      self._check_one_rope(given.get("full_attention") or {} if apart else given)
    if not apart:
      return self._rope(key, given, self._entry("rope_theta", 10000.0)), None
    whole: Any = given
    local: Any = {}
    if key == "rope_parameters":
      if set(given) - set(_KINDS_OF_LAYERS):
        self.refuse(key, f"the entries {sorted(given)}", " and ".join(_KINDS_OF_LAYERS))
      whole, local = (given.get(kind) or {} for kind in _KINDS_OF_LAYERS)
    theta, local_theta = self._entry("rope_theta"), self._entry("rope_local_base_freq")
    return self._rope(key, whole, theta), self._rope(key, local, local_theta)

  def _check_one_rope(self, parameters: Any) -> None:
    """Raises where an old entry beside the new one says something else: neither is passed over."""
    old = self._entries.get("rope_scaling") or {}
    kinds = [x.get("rope_type") or x.get("type") or "default" for x in (parameters, old)]
    apart = sorted(x for x in {*old} - {"rope_type", "type"} if old[x] != parameters.get(x))
    if old and (kinds[0] != kinds[1] or apart):
      raise NotImplementedError(
        f"{self._file}: found 'rope_scaling' {old} beside 'rope_parameters' {parameters}, expected "
        "one of them, or the same in both"
      )
    for key in ("rope_theta", "partial_rotary_factor"):
      top, own = self._entries.get(key), parameters.get(key)
      if top is not None and own not in (None, top):
        both = f"{top} beside {own} in 'rope_parameters'"
        self.refuse(key, both, "one of them, or the same in both")

  def _rope(self, key: str, given: Any, theta: Any) -> Rope:
    kind = given.get("rope_type") or given.get("type")
    if kind == "yarn" and "long_factor" in given:
      kind = "longrope"  # as Phi-3's first files call it, and transformers reads it
    untold = sorted(set(given) - {"rope_theta", "partial_rotary_factor", "rope_type", "type"})
    if kind is None and untold:
      self.refuse(key, f"{untold} without a 'rope_type'", f"one of {_ROPES}")

    def entry(name: str, default: Any = None) -> float:
      value = default if given.get(name) is None else given[name]
      return self.positive(f"{key!r}: {name!r}", value)

    theta = entry("rope_theta", theta)
    partial = entry("partial_rotary_factor", self._entry("partial_rotary_factor", 1.0))
    if partial > 1:
      raise ValueError(f"{self._file}: 'partial_rotary_factor': found {partial}, expected up to 1")
    if "partial_rotary_factor" not in self.family.defaults and partial != 1:
      self.refuse("partial_rotary_factor", partial, "1.0 or no entry")
    stated = self._entry("max_position_embeddings")
    top = self._entries.get("original_max_position_embeddings")
    given = given if top is None else {**given, "original_max_position_embeddings": top}
    original = int(entry("original_max_position_embeddings", stated))
    match kind:
      case None | "default":
        return Rope(theta, partial=partial)
      case "linear":
        return Rope(theta, Linear(entry("factor")), partial)
      case "llama3":
        low, high = entry("low_freq_factor"), entry("high_freq_factor")
        return Rope(theta, Llama3(entry("factor"), low, high, original), partial)
      case "longrope" | "su":
        return Rope(theta, self._longrope(given, stated, original), partial)
      case "yarn":
        factor = entry("factor", stated / original)
        fast, slow = entry("beta_fast", 32.0), entry("beta_slow", 1.0)
        attention = _attention_factor(given, factor)
        yarn = Yarn(factor, original, fast, slow, attention, bool(given.get("truncate", True)))
        return Rope(theta, yarn, partial)
    self.refuse(key, f"rope type {kind!r}", f"one of {_ROPES}")

  def _longrope(self, given: dict[str, Any], stated: int, original: int) -> LongRope:
    """One set of divisors for all positions: that of the context that the model states.

    transformers takes the long ones as soon as a sequence outgrows the original context, when keys
    are cached already; llama.cpp and vLLM choose once, as here.
    """
    key = "short_factor" if stated <= original else "long_factor"
    factors = given.get(key)
    numbers = isinstance(factors, list) and all(isinstance(x, int | float) for x in factors)
    if not numbers or not factors or min(factors) <= 0:
      raise ValueError(f"{self._file}: {key!r}: found {factors!r}, expected numbers above 0")
    factor = given.get("factor") or stated / original
    attention = given.get("attention_factor")
    if attention is None:  # §3.3
      attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return LongRope(tuple(map(float, factors)), attention)

  def _find_shards(self) -> dict[str, pathlib.Path]:
    """The file of each tensor."""
    single, index = (
      self.path / name for name in ("model.safetensors", "model.safetensors.index.json")
    )
    if single.is_file():
      with files.safetensors_opened(single) as shard:
        return dict.fromkeys(shard.keys(), single)
    if not index.is_file():
      pickles = sorted(p.name for p in self.path.iterdir() if p.suffix in _PICKLES)
      if pickles:
        raise ValueError(
          f"{self.path}: found only pickled weights ({', '.join(pickles[:3])}), expected "
          "model.safetensors or model.safetensors.index.json: a pickle can run any code when it "
          "is loaded, so none is; transformers' save_pretrained writes safetensors"
        )
      raise FileNotFoundError(
        f"{self.path}: found no model.safetensors and no model.safetensors.index.json, expected one"
      )
    places = files.read_json(index, "an index of shards").get("weight_map")
    if not isinstance(places, dict) or not all(
      isinstance(file, str) and pathlib.PurePath(file).name == file for file in places.values()
    ):
      raise ValueError(f"{index}: expected a 'weight_map' from tensors to files of the folder")
    for file in sorted(set(places.values())):
      if not os.path.isfile(self.path / file):  # False where no file can have such a name
        raise FileNotFoundError(
          f"{self.path / file}: not found, expected this shard of {len(set(places.values()))}, "
          f"as {index.name} says"
        )
    return {name: self.path / file for name, file in places.items()}

  def _check_shards(self) -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    for file in dict.fromkeys(self._shard_of.values()):
      with files.safetensors_opened(file) as shard:
        held = set(shard.keys())
        for name in (name for name, place in self._shard_of.items() if place == file):
          if name not in held:
            raise ValueError(f"{file}: tensor {name!r}: not found, expected as the index says")
          tensor = shard.get_slice(name)
          shapes[name] = tuple(tensor.get_shape())
          if tensor.get_dtype() not in files.FLOATS:
            raise NotImplementedError(
              f"{file}: tensor {name!r}: found dtype {tensor.get_dtype()}, expected F32, F16 or "
              "BF16"
            )
    unused = {name for name in shapes if name.endswith(".rotary_emb.inv_freq")}
    if self.config.tie_embeddings:
      unused.add(self.name("head"))
    self.check_tensors(shapes, unused)
    if self.config.tie_embeddings and self.name("head") in shapes:
      self._check_tied(self.name("embedding"), self.name("head"))

  def _check_tied(self, embedding: str, head: str) -> None:
    """Raises for a tied head with numbers of its own: some readers take these."""
    with (
      files.safetensors_opened(self._shard_of[embedding]) as one,
      files.safetensors_opened(self._shard_of[head]) as other,
    ):
      x, y = one.get_slice(embedding), other.get_slice(head)
      for i in range(0, rows := self.config.vocab, _ROWS):
        end = min(i + _ROWS, rows)
        if not np.array_equal(x[i:end], y[i:end]):
          raise ValueError(
            f"{self._file}: 'tie_word_embeddings': found True beside other numbers in {head!r} "
            f"than in {embedding!r}, expected False, or no such tensor"
          )


def _attention_factor(given: dict[str, Any], factor: float) -> float | None:
  """YaRN's factor on rotated queries and keys, as transformers infers it; None: kvjax's default."""
  if given.get("attention_factor") is not None:
    return float(given["attention_factor"])
  mscale, all_dim = given.get("mscale"), given.get("mscale_all_dim")
  if not mscale or not all_dim or factor <= 1:
    return None
  return (0.1 * mscale * math.log(factor) + 1) / (0.1 * all_dim * math.log(factor) + 1)
