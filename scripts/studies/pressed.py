"""kvpress on a checkpoint's own weights: what its presses keep of a prompt, and what is answered.

torch, transformers and kvpress are imported when a model is made, and are no dependencies of kvjax.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module, metadata
from typing import Any

import jax
import numpy as np

from kvjax.models.nn.config import ModelConfig
from kvjax.models.nn.transformer import Transformer
from kvjax.primitives.rope import Rope
from kvjax.programs.suites.e2e import hugging_face

LIBRARIES = ("kvpress", "torch", "transformers")


ORACLE = "oracle"


@dataclasses.dataclass(frozen=True)
class Cut:
  """One compression of a prompt.

  Attributes:
    press: kvpress's class; `ORACLE` keeps what the answer's own queries attend to most.
    fields: what is set of it, beside its ratio.
    budget: tokens to keep per KV head, or on average of them.
    skip: layers that keep everything.
    read: first tokens of the prompt, which are cut; the others are read after the cut.
    under: kvpress's class of a press over this one, such as `AdaKVPress`, which shares a layer's
      budget out among its heads and hides keys; "": none.
  """

  press: str
  fields: Mapping[str, Any]
  budget: int
  skip: Sequence[int]
  read: int
  under: str = ""


@dataclasses.dataclass
class Kept:
  """The part of a cache that a cut keeps.

  Attributes:
    keys, values: per layer, [1, K, n, H]; hidden ones included.
    positions: per layer and head, of those that are not hidden.
    hidden: per layer, indices (row, head, slot) of keys that attention is not to see, or None.
  """

  keys: list[Any] = dataclasses.field(default_factory=list)
  values: list[Any] = dataclasses.field(default_factory=list)
  positions: list[list[np.ndarray]] = dataclasses.field(default_factory=list)
  hidden: list[Any] = dataclasses.field(default_factory=list)

  @property
  def bytes(self) -> int:
    """Bytes of the tensors, with all of the memory that they hold on to."""
    return sum(x.untyped_storage().nbytes() for x in (*self.keys, *self.values))


def versions() -> dict[str, str]:
  """Version by library.

  Raises:
    ModuleNotFoundError: one of them is not there.
  """
  try:
    return {name: metadata.version(name) for name in LIBRARIES}
  except metadata.PackageNotFoundError as error:
    raise ModuleNotFoundError(
      f"{error.name}: not found, expected {', '.join(LIBRARIES)}: best in an environment of its "
      "own, pip install -e '.[eval]' torch kvpress"
    ) from None


class Pressed:
  """The checkpoint as transformers' model, float32 on a CPU, its weights shared where they can be.

  Raises:
    NotImplementedError: the model is of another family, or has scaled rotations.
  """

  def __init__(self, model: Transformer):
    versions()
    self.torch, self.library = import_module("torch"), import_module("kvpress")
    self.transformers = import_module("transformers")
    c = model.config
    sizes = ("norm_eps", "tie_embeddings", "max_context", "qkv_bias")
    flags = {f.name: f.default for f in dataclasses.fields(c) if f.name not in sizes}
    needed = dataclasses.MISSING  # by any model: no flag
    others = [name for name, usual in flags.items() if usual not in (needed, getattr(c, name))]
    if others or c.rope != Rope(c.rope.theta):
      found = ", ".join(others or ["rope"])
      raise NotImplementedError(f"model: found {found}, expected a plain Llama or Qwen 2")
    kind = "Qwen2" if c.qkv_bias else "Llama"
    config = hugging_face(
      c,
      rms_norm_eps=c.norm_eps,
      rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
      attn_implementation="sdpa",
    )
    with self.torch.device("meta"):
      self.model = getattr(self.transformers, f"{kind}ForCausalLM")(config)
    weights = _weights(model, c, self.torch.from_dlpack)
    self.model.load_state_dict(weights, strict=not c.tie_embeddings, assign=True)
    self.model.tie_weights()
    rotary = type(self.model.model.rotary_emb)  # its frequencies are no weights
    self.model.model.rotary_emb = rotary(config)
    self.model.eval()

  def read(
    self, ids: Sequence[int], answer: Sequence[int], cuts: Mapping[Any, Cut]
  ) -> tuple[np.ndarray, dict[Any, Kept]]:
    """One dense pass over a prompt: its last logits [V], and what each cut keeps of it.

    The cuts are made by the presses' own `compress`, called where kvpress would call it, from a
    press that itself keeps everything: none changes what another one sees.

    Args:
      ids: the prompt.
      answer: the right answer's tokens, read after it for the oracle; cuts do not see them.
      cuts: what is cut, by any keys.
    """
    kept: dict[Any, Kept] = {key: Kept() for key in cuts}
    scores: dict[Any, Any] = {}  # of the layer: worked out once for all budgets
    presses = {key: self._press(cut, scores) for key, cut in cuts.items()}
    oracle = self._oracle

    class All(self.library.BasePress):  # type: ignore[name-defined]
      def compress(self, module, hidden_states, keys, values, attentions, kwargs):  # type: ignore
        scores.clear()
        cos, sin = kwargs["position_embeddings"]
        expected = oracle(module, hidden_states, keys, len(answer), (cos, sin))
        # By their bytes: presses give back keys, not positions.
        where = [{x.tobytes(): i for i, x in enumerate(head)} for head in keys[0].numpy()]
        for key, cut in cuts.items():
          n, mine = cut.read, kept[key]
          k, v, hidden = keys[:, :, :n].clone(), values[:, :, :n].clone(), None
          if module.layer_idx in cut.skip:
            pass
          elif cut.press == ORACLE:
            best = expected[:, :, :n].topk(cut.budget, -1).indices[..., None]
            best = best.expand(-1, -1, -1, k.shape[-1])
            k, v = k.gather(2, best), v.gather(2, best)
          else:
            seen = {**kwargs, "position_embeddings": (cos[:, :n], sin[:, :n])}
            k, v = presses[key].compress(module, hidden_states[:, :n], k, v, attentions, seen)
            hidden, module.masked_key_indices = getattr(module, "masked_key_indices", None), None
          mine.keys.append(k)
          mine.values.append(v)
          mine.hidden.append(hidden)
          mine.positions.append(_shown(k, where, hidden))
        return keys, values

    with self.torch.inference_mode(), All()(self.model):
      out = self.model(
        self.torch.tensor([[*ids, *answer]]),
        past_key_values=self.transformers.DynamicCache(),
        use_cache=True,
        logits_to_keep=1 + len(answer),
      )
    return out.logits[0, 0].numpy(), kept

  def _oracle(self, module: Any, hidden: Any, keys: Any, tokens: int, rotation: Any) -> Any:
    """[1, K, T - tokens]: what the prompt's last query and those of the answer attend to.

    Their probabilities, averaged over queries and group; the prompt's last token is above all.
    """
    window = self.library.SnapKVPress.compute_window_attention
    p = window(module, hidden, keys, tokens + 1, rotation).mean(-2)
    p = p.unflatten(1, (keys.shape[1], -1)).mean(2)
    return self.torch.nn.functional.pad(p, (0, 1), value=2.0)

  def _press(self, cut: Cut, scores: dict[Any, Any]) -> Any:
    if cut.press == ORACLE:
      return None
    ratio = max(0.0, 1 - (cut.budget + 0.5) / cut.read)  # which is rounded down to the budget
    press = getattr(self.library, cut.press)(compression_ratio=ratio, **cut.fields)
    score, key = press.score, (cut.press, repr(cut.fields), cut.read)

    def once(*args: Any) -> Any:
      if key not in scores:
        scores[key] = score(*args)
      return scores[key].clone()  # presses over this one write to them

    press.score = once
    return getattr(self.library, cut.under)(press) if cut.under else press

  def answers(
    self,
    kept: Sequence[Kept],
    logits: np.ndarray,
    tail: Sequence[int],
    past: int,
    steps: int,
    ends: Collection[int],
  ) -> list[list[int]]:
    """Greedy answers, without what ends them, from caches that grow.

    Args:
      kept: the caches, which must be of the same lengths, layer by layer; they run as one batch.
      logits: [V] of the prompt's last token; not looked at where there is a tail.
      tail: the question, if it is read after the cut.
      past: tokens of the prompt before the tail.
      steps: tokens of an answer at most.
      ends: tokens that end one.

    Raises:
      ValueError: several caches have hidden keys, or there is a tail and layers keep different
        numbers of tokens: transformers masks all of them as it does the first.
    """
    sizes = {x.shape[2] for x in kept[0].keys}
    if tail and len(sizes) > 1:
      raise ValueError(f"tail: found one behind layers of {sorted(sizes)} tokens, expected none")
    torch, cache, rows = self.torch, self.transformers.DynamicCache(), len(kept)
    stopping = frozenset(ends)
    for layer in range(len(kept[0].keys)):
      keys, values = (torch.cat([getattr(x, y)[layer] for x in kept]) for y in ("keys", "values"))
      cache.update(keys, values, layer)
      hidden = kept[0].hidden[layer]
      if hidden is not None and rows > 1:
        raise ValueError(f"kept: found {rows} caches with hidden keys, expected one at a time")
      self.model.model.layers[layer].self_attn.masked_key_indices = hidden

    def step(tokens: Any, first: int) -> Any:
      at = torch.arange(first, first + tokens.shape[1])[None].expand(rows, -1)
      out = self.model(tokens, past_key_values=cache, position_ids=at, logits_to_keep=1)
      return out.logits[:, -1].argmax(-1)

    with torch.inference_mode():
      new = torch.full((rows,), int(logits.argmax()))
      if tail:
        new, past = step(torch.tensor([list(tail)] * rows), past), past + len(tail)
      said = [new]
      while len(said) < steps and any(map(stopping.isdisjoint, torch.stack(said, 1).tolist())):
        said.append(step(said[-1][:, None], past + len(said) - 1))
    for layer in self.model.model.layers:
      layer.self_attn.masked_key_indices = None
    texts = torch.stack(said, 1).tolist()
    return [list(itertools.takewhile(lambda x: x not in stopping, each)) for each in texts]


def alike(kept: Mapping[Any, Kept]) -> list[list[Any]]:
  """The keys of caches that can run as one batch, group by group."""
  groups: dict[Any, list[Any]] = {}
  for key, each in kept.items():
    alone = key if any(x is not None for x in each.hidden) else None
    groups.setdefault((alone, *(x.shape[2] for x in each.keys)), []).append(key)
  return list(groups.values())


def _shown(keys: Any, where: list[dict[bytes, int]], hidden: Any) -> list[np.ndarray]:
  """Positions of keys [1, K, n, H] by head, less the hidden slots; `where` has them by bytes."""
  rows = zip(where, keys[0].numpy(), strict=True)
  positions = [np.array([places[row.tobytes()] for row in head]) for places, head in rows]
  if hidden is None:
    return positions
  _, heads, at = (x.numpy() for x in hidden)
  return [np.delete(own, at[heads == head]) for head, own in enumerate(positions)]


def _weights(model: Transformer, c: ModelConfig, tensor: Callable[[jax.Array], Any]) -> dict:
  """The weights by transformers' names, [out, in] as it lays them out: views, as `tensor`'s are."""
  found = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.norm.scale}
  if not c.tie_embeddings:
    found["lm_head.weight"] = model.head
  found = {name: tensor(x[...]) for name, x in found.items()}
  for i, layer in enumerate(model.layers):
    at, name = layer.attention, f"model.layers.{i}."
    found[f"{name}input_layernorm.weight"] = tensor(layer.attention_norm.scale[...])
    found[f"{name}post_attention_layernorm.weight"] = tensor(layer.mlp_norm.scale[...])
    wqkv, wo = tensor(at.wqkv[...]), tensor(at.wo[...])
    gate_up, down = tensor(layer.mlp.gate_up[...]), tensor(layer.mlp.down[...])
    for part, which in (("q", slice(-2)), ("k", slice(-2, -1)), ("v", slice(-1, None))):
      found[f"{name}self_attn.{part}_proj.weight"] = wqkv[:, :, which].flatten(1).T
      if c.qkv_bias:
        bias = tensor(at.bqkv[...])[:, which].flatten()
        found[f"{name}self_attn.{part}_proj.bias"] = bias
    found[f"{name}self_attn.o_proj.weight"] = wo.flatten(0, -2).T
    for j, part in enumerate(("gate", "up")):
      found[f"{name}mlp.{part}_proj.weight"] = gate_up[:, j].T
    found[f"{name}mlp.down_proj.weight"] = down.T
  return found
