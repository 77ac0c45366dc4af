"""A tiny random decoder under any method, and two jitted calls of it: what the laws run on."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax.core.context import Env
from kvjax.families.method import Method
from kvjax.models.decode.generate import join, split
from kvjax.models.nn.config import ModelConfig
from kvjax.models.nn.transformer import Transformer
from kvjax.ops import offload
from kvjax.primitives.rope import Rope

CONFIG = ModelConfig(
  vocab=61,
  dim=48,
  layers=4,
  heads=6,
  kv_heads=2,
  head_dim=16,
  ffn=64,
  rope=Rope(),
  norm_eps=1e-6,
  tie_embeddings=True,
  max_context=512,
)
CAPACITY = 64
# Float32 logits of up to 20 after four layers of peaked attention, summed in another order.
CLOSE = 2e-4
LENGTHS = np.array([23, 14], np.int32)
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab, (2, 40), np.int32)


@functools.cache
def model(impl="reference", tile=4, layers=CONFIG.layers):
  """The decoder that the laws run on, with as many of its layers."""
  return drawn(dataclasses.replace(CONFIG, layers=layers), impl, tile)


def drawn(config, impl, tile=4):
  """Weights scaled so that attention is peaked: dropping tokens must change the logits."""
  graph, shapes = nnx.split(
    nnx.eval_shape(lambda: Transformer(config, dtype=jnp.float32, impl=impl, rngs=nnx.Rngs(0)))
  )
  rng = np.random.default_rng(0)

  def draw(path, x):
    name = jax.tree_util.keystr(path)
    if "norm" in name:
      return jnp.ones(x.shape, x.dtype)
    scale = 2.5 * x.shape[0] ** -0.5 if "wqkv" in name else config.dim**-0.5
    scale = 1.0 if "embedding" in name else scale
    return jnp.asarray(rng.normal(size=x.shape) * scale, x.dtype)

  built = nnx.merge(graph, jax.tree_util.tree_map_with_path(draw, shapes))
  built.env = Env(config.layers, config.rope, impl, tile)
  return built


@functools.lru_cache(maxsize=64)
def _empty(method, spec):
  return method.init_caches(spec)


class Run:
  """One sequence of calls: prefill chunks and decode steps of given tokens, row by row."""

  def __init__(
    self,
    method: Method,
    capacity: int = CAPACITY,
    impl: str = "reference",
    layers: int = CONFIG.layers,
  ):
    self.method, self.model = method, model(impl, layers=layers)
    self.caches = _empty(method, self.model.spec(len(LENGTHS), capacity))
    self.graph, self.leaves = split(self.model)

  def prefill(self, lengths=LENGTHS, start=None, tokens=TOKENS, width=None, past=0):
    """Rows' tokens start … start + lengths, padded to `width`; logits [B, V]."""
    start = np.zeros_like(lengths) if start is None else start
    width = int(np.max(lengths)) if width is None else width
    index = np.minimum(start[:, None] + np.arange(width), tokens.shape[1] - 1)
    chunk = np.take_along_axis(tokens, index, 1)
    logits, self.caches = _prefill(
      self.graph, self.method, past, self.leaves, self.caches, chunk, lengths
    )
    return np.asarray(logits)

  def decode(self, at, live=None, tokens=TOKENS):
    """Inserts each row's token `at`; logits [B, V]."""
    live = np.ones(len(at), bool) if live is None else live
    chosen = np.take_along_axis(tokens, np.asarray(at)[:, None], 1)[:, 0]
    logits, self.caches = _decode(self.graph, self.method, self.leaves, self.caches, chosen, live)
    return np.asarray(logits)

  def generate(self, steps, lengths=LENGTHS, **kwargs):
    """Prompt and `steps` teacher-forced tokens; logits [B, steps + 1, V]."""
    out = [self.prefill(lengths, **kwargs)]
    tokens = kwargs.get("tokens", TOKENS)
    out += [self.decode(lengths + i, tokens=tokens) for i in range(steps)]
    return np.stack(out, 1)

  def jaxprs(self, chunk):
    """Of a prompt of these tokens, which fill the width, and of a decode step."""
    given = self.leaves, self.caches
    live = np.ones(len(LENGTHS), bool)
    prompt = _prefill.trace(self.graph, self.method, 0, *given, chunk, LENGTHS)
    return prompt.jaxpr, _decode.trace(self.graph, self.method, *given, chunk[:, 0], live).jaxpr


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _prefill(graph, method, past, leaves, caches, tokens, lengths):
  logits, caches = join(graph, leaves).prefill(tokens, lengths, caches, method, past=past)
  return logits, offload.settled(caches)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _decode(graph, method, leaves, caches, tokens, live):
  logits, caches = join(graph, leaves).decode(tokens, caches, method, live)
  return logits, offload.settled(caches)
