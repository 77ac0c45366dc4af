"""The decoder: one transformer for all families that runs any KV-cache method.

It knows no method by name and no rotary embedding: per layer it hands un-rotated queries, keys and
values to the method's drivers and takes back attention outputs. Layers are unrolled, and each owns
its weight and cache arrays: stacking them for a scan would copy every slice before its product.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from kvjax.core import chunks, fields
from kvjax.core.cache import CacheSpec
from kvjax.core.context import At, Carry, Env, OwnRows, Prompt
from kvjax.families import sliding
from kvjax.families.method import Method
from kvjax.methods.registry import check_method
from kvjax.models.nn import parallel
from kvjax.models.nn.config import PRECISIONS, ModelConfig
from kvjax.models.nn.experts import Experts
from kvjax.models.nn.layers import GatedMLP, Projections, RMSNorm
from kvjax.primitives import softmax_state
from kvjax.runtime import drivers, memory, sharding

Caches = tuple[Any, ...]  # of kvjax.Cache, or what the method keeps per layer
Aux = list[dict[str, Any]]


class Layer(nnx.Module):
  """One decoder layer: attention and gated MLP, each after a norm and inside a residual.

  Some families norm what either adds to the residual stream, too.
  """

  def __init__(self, config: ModelConfig, *, dtype: Any, rngs: nnx.Rngs):
    self.attention_norm = RMSNorm(config.dim, config.norm_eps)
    self.attention = Projections(config, dtype=dtype, rngs=rngs)
    self.mlp_norm = RMSNorm(config.dim, config.norm_eps)
    mlp = Experts if config.experts else GatedMLP
    self.mlp = mlp(config, dtype=dtype, rngs=rngs)
    if config.norms_after:
      self.attention_after = RMSNorm(config.dim, config.norm_eps)
      self.mlp_after = RMSNorm(config.dim, config.norm_eps)

  def prefill(
    self,
    at: At,
    x: Float[Array, "B T D"],
    cache: Any,
    prompt: Prompt,
    carry: Carry,
  ) -> tuple[Float[Array, "B T D"], Any, Carry, dict[str, Any]]:
    """The layer over a chunk of prompt; x of tokens that it does not compute stays as it is."""
    y = chunks.take(x, prompt, 1)
    if prompt.index is not None and at.top.traits.projects_all:
      q, k, v = self.attention.qkv_apart(self.attention_norm(y), self.attention_norm(x))
    else:
      q, k, v = self.attention.qkv(self.attention_norm(y), at.env.impl)
    q = jnp.moveaxis(q, 1, 3)  # [B, K, G, A, H]
    k, v = jnp.moveaxis(k, 1, 2), jnp.moveaxis(v, 1, 2)  # [B, K, A or T, H]
    sinks = self.attention.sink_logits if at.env.lse else None
    if at.top.traits.weighs_outputs:
      prompt = dataclasses.replace(prompt, wo=self.attention.wo[...])
    o, cache, carry, aux = drivers.read(at, cache, q, k, v, prompt, carry, sinks)
    y, parts = self._finish(at, y, jnp.moveaxis(o, 3, 1))
    y = y + parts.sum(0).astype(y.dtype)
    return chunks.put(x, prompt, y, 1), cache, carry, aux

  def decode(
    self,
    at: At,
    x: Float[Array, "B D"],
    parts: Float[Array, "S B D"] | None,
    cache: Any,
    live: Bool[Array, " B"],
    carry: Carry,
  ) -> tuple[Float[Array, "B D"], Float[Array, "S B D"], Any, Carry, dict[str, Any]]:
    """The layer over one new token per row. The residual stream is x + Σ parts, before and after:
    the sum is left to the norm that comes next.
    """
    x, y = self.attention_norm.after(x, parts, at.env.impl)
    q, k, v = self.attention.qkv(y, at.env.impl)
    sinks = self.attention.sink_logits if at.env.lse else None
    o, cache, carry, aux = drivers.step(at, cache, q, k, v, live, carry, sinks)
    return *self._finish(at, x, o), cache, carry, aux

  def _finish(
    self, at: At, x: Float[Array, "*batch D"], o: Float[Array, "*batch K G H"]
  ) -> tuple[Float[Array, "*batch D"], Float[Array, "S *batch D"]]:
    """From attention's output to the layer's: the residual stream as x and summands.

    Over several devices these are the layer's two all-reduces, in the dtype of the stream.
    """
    env = at.env
    heads = (env.head_axis,) if env.head_axis else ()
    parts = self.attention.out(o.astype(x.dtype), env.impl, heads)
    if hasattr(self, "attention_after"):
      parts = self.attention_after(parts.sum(0).astype(x.dtype))[None]
    x, y = self.mlp_norm.after(x, parts, env.impl)
    return x, self.summands(env, y)

  def summands(self, env: Env, y: Float[Array, "*batch D"]) -> Float[Array, "S *batch D"]:
    """The MLP's part of the residual stream, from the normed state."""
    parts = self.mlp(y, env.impl, env.axes)
    if hasattr(self, "mlp_after"):
      return self.mlp_after(parts.sum(0).astype(y.dtype))[None]
    return parts


class Transformer(nnx.Module):
  """A decoder with random weights; `kvjax.models.io.convert.load` fills them from a checkpoint.

  On one device unless `kvjax.models.nn.parallel.shard` spreads it over a mesh: its `prefill` and
  `decode` then run on all devices of the mesh, on caches of its `init_caches`.

  Args:
    config: sizes and flags.
    dtype: dtype of weights and activations (norms, attention and logits are float32); None: what
      `precision` says, or bfloat16.
    impl: implementation of the methods' operations, see `kvjax.Env`.
    precision: a name of `kvjax.models.nn.config.PRECISIONS`: sets the dtype, and how float32
      products are computed. None leaves products to `jax_default_matmul_precision`.
    rngs: random keys of the initial weights.
  """

  def __init__(
    self,
    config: ModelConfig,
    *,
    dtype: Any = None,
    impl: str = "auto",
    precision: str | None = None,
    rngs: nnx.Rngs,
  ):
    self.config = config
    self.dtype, self.products = _precision(precision, dtype)
    self.env = Env(config.layers, config.rope, impl, soft_cap=config.soft_cap)
    self.mesh: Mesh | None = None
    shape = (config.vocab, config.dim)
    self.embedding = nnx.Param(jax.random.normal(rngs.params(), shape, self.dtype))
    self.layers = nnx.List(
      [Layer(config, dtype=self.dtype, rngs=rngs) for _ in range(config.layers)]
    )
    self.norm = RMSNorm(config.dim, config.norm_eps)
    if not config.tie_embeddings:
      scale = jnp.asarray(config.dim**-0.5, self.dtype)
      self.head = nnx.Param(jax.random.normal(rngs.params(), shape, self.dtype) * scale)

  def spec(self, batch: int, capacity: int, dtype: Any = None) -> CacheSpec:
    """Sizes of this model's caches for `batch` rows of up to `capacity` tokens.

    Keys and values are stored in the model's dtype unless `dtype` says otherwise.
    """
    dtype = self.dtype if dtype is None else dtype
    fields.check_float("dtype", dtype)
    return self.config.cache_spec(batch, capacity, jnp.dtype(dtype))

  def init_caches(self, method: Method, batch: int, capacity: int, dtype: Any = None) -> Caches:
    """Empty caches of a method, `method.init_caches(self.spec(...))`, laid out over the mesh.

    Raises:
      TypeError: `method` is no method.
      MemoryError: there is no room for them; the message says what would fit.
      ValueError: they cannot be split evenly over the mesh.
      NotImplementedError: the method does not run on such a mesh.
    """
    check_method("method", method)
    spec = self.spec(batch, capacity, dtype)
    memory.check_host(method, spec)
    with memory.explained("init_caches", method, spec, self.mesh, self.weight_bytes):
      # A GPU says only when it is waited for that it had no room.
      if self.mesh is None:
        return jax.block_until_ready(method.init_caches(spec))
      return jax.block_until_ready(sharding.init_caches(method, spec, self.mesh))

  def weight_bytes(self) -> int:
    """Bytes of weights on each device."""
    leaves = jax.tree.leaves(self)
    parts = [x.sharding.shard_shape(x.shape) for x in leaves]
    return sum(math.prod(n) * x.dtype.itemsize for n, x in zip(parts, leaves, strict=True))

  def prefill(
    self,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    caches: Caches,
    method: Method,
    *,
    total: Int[Array, " B"] | None = None,
    past: int | None = 0,
    all_logits: bool = False,
    with_aux: bool = False,
  ) -> Any:
    """Reads a prompt, or a chunk of one, into the caches.

    Pure and unchecked, to be called under `jax.jit`; `kvjax.models.decode.generate.prefill` is the
    jitted form that checks its arguments.

    Args:
      tokens: int32 [B, T], right-padded.
      lengths: int32 [B], valid tokens of each row; 0 leaves the row's cache untouched.
      caches: one per layer, of `method.init_caches(model.spec(...))` or an earlier call.
      method: the KV-cache method.
      total: int32 [B], length of the whole prompt of this turn, when `tokens` is a chunk of it.
      past: static upper bound on the tokens already cached in any row (None: unknown).
      all_logits: logits of every position instead of each row's last (a float32 [B, T, V]).
      with_aux: also return what the method reports, one dict per layer.

    Returns:
      logits float32 [B, V] at each row's last valid token ([B, T, V] with `all_logits`), caches,
      and with `with_aux` the list of dicts.
    """
    total = lengths if total is None else total
    if self.mesh is not None:
      how: dict[str, Any] = {"past": past, "all_logits": all_logits, "with_aux": with_aux}

      def run(model: Transformer, caches: Caches, tokens: Array, lengths: Array, n: Array) -> Any:
        return model.prefill(tokens, lengths, caches, method, total=n, **how)

      return self._on_mesh(run, method, with_aux, caches, tokens, lengths, total)
    carry = Carry()
    new, reports = [], []
    with self.products_traced():
      x = self.embed(tokens)
      for at, layer, cache in zip(self.places(method), self.layers, caches, strict=True):
        prompt = Prompt.of(at, tokens.shape[1], lengths, total, bound(at, past))
        x, cache, carry, aux = layer.prefill(at, x, cache, prompt, carry)
        x, cache = _done(x, cache)
        new.append(cache)
        reports.append(aux)
      logits = self.predict(x, lengths, all_logits)
      caches = self.by_served(method.conclude, tuple(new), lengths)
    return (logits, caches, self._whole(reports, method)) if with_aux else (logits, caches)

  def decode(
    self,
    tokens: Int[Array, " B"],
    caches: Caches,
    method: Method,
    live: Bool[Array, " B"] | None = None,
    *,
    with_aux: bool = False,
  ) -> Any:
    """One decode step: inserts one token per row and predicts the next.

    Pure, to be called under `jax.jit` with donated caches.

    Args:
      tokens: int32 [B].
      caches: one per layer.
      method: the KV-cache method.
      live: bool [B]; rows that are not live keep their caches (None: all live).
      with_aux: also return what the method reports, one dict per layer.

    Returns:
      logits float32 [B, V], caches, and with `with_aux` the list of dicts.
    """
    live = jnp.ones(tokens.shape, bool) if live is None else live
    if self.mesh is not None:

      def run(model: Transformer, caches: Caches, tokens: Array, live: Array) -> Any:
        return model.decode(tokens, caches, method, live, with_aux=with_aux)

      return self._on_mesh(run, method, with_aux, caches, tokens, live)
    carry = Carry()
    new, reports = [], []
    with self.products_traced():
      x, parts = self.embed(tokens), None
      for at, layer, cache in zip(self.places(method, True), self.layers, caches, strict=True):
        x, parts, cache, carry, aux = layer.decode(at, x, parts, cache, live, carry)
        new.append(cache)
        reports.append(aux)
      logits = self.predict_next(x, parts)
      sound = live & jnp.isfinite(logits).all(-1)
      caches = self.by_served(method._conclude_step, tuple(new), sound)
    return (logits, caches, self._whole(reports, method)) if with_aux else (logits, caches)

  def places(self, method: Method, defers: bool = False) -> list[At]:
    """Site of each layer's attention: under the method, or in the model's own window."""
    c, env = self.config, dataclasses.replace(self.env, lse=self.config.sinks, defers=defers)
    return sliding.places(method, env, c.windows, c.window_rope)

  def by_served(
    self, move: Callable[..., Any], caches: Caches, rows: Int[Array, " B"] | Bool[Array, " B"]
  ) -> Caches:
    """Caches after a move of the method's, which is asked for its own layers together."""
    env = dataclasses.replace(self.env, layers=max(1, self.config.served))
    own = sliding.served(caches)
    return sliding.rejoined(caches, move(env, own, rows) if own else ())

  def _on_mesh(
    self, run: Callable[..., Any], method: Method, with_aux: bool, caches: Caches, *args: Array
  ) -> Any:
    """run(model, caches, *args) on every device of the mesh, where `model` has what lies there."""
    assert self.mesh is not None
    sharding.check_supported(method, self.mesh)
    leaves, tree = jax.tree.flatten(self)
    weights = parallel.weight_specs(self, self.config, self.mesh)
    cached, everywhere = sharding.cache_specs(caches, method), PartitionSpec()

    def on_device(leaves: list[Array], caches: Caches, *args: Array) -> Any:
      model = jax.tree.unflatten(tree, leaves)
      model.mesh = None
      return run(model, caches, *args)

    given = (weights, cached, *[everywhere] * len(args))
    results = (everywhere, cached, everywhere)[: 2 + with_aux]
    over = sharding.checked_shard_map if self.env.check_nan else sharding.shard_map
    return over(on_device, self.mesh, given, results)(leaves, caches, *args)

  def embed(self, tokens: Int[Array, "*batch"]) -> Float[Array, "*batch D"]:
    """Rows of the embedding, of which a device may hold a part."""
    table = self.embedding[...]
    rows = table.shape[0]
    if rows == self.config.vocab:
      return self._scaled(table[tokens])
    index = tokens - jax.lax.axis_index(self.env.axes) * rows
    own = (index >= 0) & (index < rows)
    x = jnp.where(own[..., None], table[jnp.where(own, index, 0)], 0)
    return self._scaled(jax.lax.psum(x, self.env.axes))

  def _scaled(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
    """Embedded tokens as the first layer takes them; the factor has the dtype of the rows."""
    scale = self.config.embed_scale
    return x if scale == 1 else x * jnp.asarray(scale, x.dtype)

  def predict(
    self, x: Float[Array, "B T D"], lengths: Int[Array, " B"], all_logits: bool
  ) -> Float[Array, "B *_ V"]:
    """Logits from the last layer's states: at each row's last valid token, or at every one."""
    if not all_logits:
      x = x[jnp.arange(x.shape[0]), jnp.maximum(lengths - 1, 0)]
    return self._head(self.norm(x))

  def predict_next(
    self, x: Float[Array, "B D"], parts: Float[Array, "S B D"] | None
  ) -> Float[Array, "B V"]:
    """Logits of a decode step from the last layer's state, x + Σ parts."""
    return self._head(self.norm.after(x, parts, self.env.impl)[1])

  def _head(self, y: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
    """Output head on normed hidden states, float32; gathered where devices hold parts of it."""
    head = self.embedding[...] if self.config.tie_embeddings else self.head[...]
    dims = (((y.ndim - 1,), (1,)), ((), ()))
    logits = jax.lax.dot_general(y, head, dims, preferred_element_type=jnp.float32)
    logits = softmax_state.capped(logits, self.config.final_soft_cap)
    if head.shape[0] == self.config.vocab:
      return logits
    return jax.lax.all_gather(logits, self.env.axes, axis=logits.ndim - 1, tiled=True)

  def _whole(self, reports: Aux, method: Method) -> Aux:
    """Reports of all key/value heads: [B, K, ...] gathered over the devices.

    Not the blocks [B, R] that a stream has retrieved, which are every head's.
    """
    at, alike = method.at(self.env, 0), {"retrieved"} if method.traits.stream else ()
    gather = functools.partial(jax.tree.map, lambda x: at.all_heads(x) if x.ndim > 1 else x)
    return [{n: x if n in alike else gather(x) for n, x in each.items()} for each in reports]

  def products_traced(self) -> contextlib.AbstractContextManager[Any]:
    """Under which products are traced: the model's and the method's."""
    if self.products is None:
      return contextlib.nullcontext()
    return jax.default_matmul_precision(self.products)


def bound(at: At, past: int | None) -> int | None:
  """The bound on cached tokens that a layer is told: beyond a window's ring it is no size."""
  return None if past and isinstance(at.top, sliding.Sliding) else past


def _done(x: Array, cache: Any) -> tuple[Array, Any]:
  """Both of them, and what a layer keeps is made before the next one begins: or else its queries,
  keys and values wait for the end of the prompt, and so do those of all layers.
  """
  # What lies in the host's memory stays out of it.
  parts, tree = jax.tree.flatten(cache, is_leaf=lambda part: isinstance(part, OwnRows))
  held = {i: part for i, part in enumerate(parts) if not isinstance(part, OwnRows)}
  x, held = jax.lax.optimization_barrier((x, held))
  return x, jax.tree.unflatten(tree, [held.get(i, part) for i, part in enumerate(parts)])


def _precision(precision: str | None, dtype: Any) -> tuple[Any, str | None]:
  """The dtype and the product precision that the two arguments ask for together."""
  if dtype is not None:
    fields.check_float("dtype", dtype)
  if precision is None:
    return jnp.dtype(jnp.bfloat16 if dtype is None else dtype), None
  if precision not in PRECISIONS:
    raise ValueError(f"precision: found {precision!r}, expected one of {sorted(PRECISIONS)}")
  name, products = PRECISIONS[precision]
  if dtype is not None and jnp.dtype(dtype) != jnp.dtype(name):
    raise ValueError(
      f"dtype: found {jnp.dtype(dtype).name}, expected {name}, or no dtype, with "
      f"precision {precision!r}"
    )
  return jnp.dtype(name), products
