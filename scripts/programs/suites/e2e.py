"""whole decode steps of full-size shapes with random weights, against their products alone"""

import contextlib
import dataclasses
import functools
import gc
import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh

import kvjax
from kvjax.kernels.common.devices import this_device
from kvjax.models.decode.generate import join, split
from kvjax.models.io.presets import PRESETS
from kvjax.models.nn import parallel
from kvjax.models.nn.config import ModelConfig
from kvjax.models.nn.transformer import Transformer
from kvjax.ops import offload
from kvjax.programs import suites
from kvjax.programs.suites import Case, Contender, clocked, optional, torch_decoder

STEPS = 16  # decode steps per dispatch
MARKS = [
  (name, batch, tokens)
  for name in ("Llama-3.1-8B", "Qwen3-1.7B")
  for batch, tokens in ((1, 4096), (8, 4096), (1, 32768), (8, 32768), (1, 131072))
]
PEERS = (1, 4096), (8, 4096)  # shapes on which Hugging Face's loop is compiled and timed
TINY = ModelConfig(
  vocab=61, dim=48, layers=2, heads=6, kv_heads=2, head_dim=16, ffn=64, max_context=512
)


@dataclasses.dataclass(frozen=True)
class Products(kvjax.Full):
  """No attention and no cache: what the matrix products, norms and residuals of a step cost."""

  def decode_step(self, at: Any, cache: Any, q: Any, k: Any, v: Any, live: Any, carry: Any) -> Any:
    return q + k[:, :, None] + v[:, :, None], cache, carry, {}


@suites.suite
def cases(quick: bool, peers: bool) -> Iterator[tuple]:
  """The shapes of this suite; weights are made once per model."""
  for name, batch, tokens in [("tiny", 2, 64)] if quick else MARKS:
    with contextlib.ExitStack() as stack:
      asked = stack if peers and (batch, tokens) in PEERS else None
      yield f"{name} B{batch} T{tokens}", case, name, batch, tokens, asked


@functools.lru_cache(maxsize=1)
def weights(name: str) -> Transformer:
  """A decoder of this shape; random weights, norm scales 1."""
  return drawn(*shape(name))


def shape(name: str) -> tuple[ModelConfig, Any]:
  """The configuration and dtype of a name."""
  return (TINY, jnp.float32) if name == "tiny" else (PRESETS[name], jnp.bfloat16)


def drawn(config: ModelConfig, dtype: Any, mesh: Mesh | None = None) -> Transformer:
  """A decoder of a configuration with random weights; over a mesh, each device draws its part."""
  made = nnx.eval_shape(lambda: Transformer(config, dtype=dtype, rngs=nnx.Rngs(0)))
  keys = map(functools.partial(jax.random.fold_in, jax.random.key(0)), itertools.count())

  def draw(x: Any, to: Any = None) -> jax.Array:
    return jax.jit(_weight, static_argnums=(1, 2), out_shardings=to)(next(keys), x.shape, x.dtype)

  if mesh is not None:
    return parallel.placed(made, mesh, draw)
  graph, shapes = nnx.split(made)
  return nnx.merge(graph, jax.tree.map(draw, shapes))


def decoder(graph: Any, leaves: Any, impl: str) -> Transformer:
  """The decoder of these leaves, by this implementation."""
  made = join(graph, leaves)
  made.env = dataclasses.replace(made.env, impl=impl)
  return made


def step_logits(model: Transformer, method: kvjax.Method, impl: str, held: Any) -> np.ndarray:
  """Logits of one step of every row over these caches."""
  graph, leaves = split(model)

  @jax.jit
  def step(leaves: Any, held: Any) -> Any:
    tokens = jnp.arange(held[0].rows["seen"].shape[0], dtype=jnp.int32)
    return decoder(graph, leaves, impl).decode(tokens, held, method)[0]

  return np.asarray(step(leaves, held))


def stepping(graph: Any, method: kvjax.Method, impl: str, steps: int) -> Any:
  """Greedy decode steps: (leaves, caches, token) to caches and the next token.

  Caches that keep every token end where they began; those that evict go on for ever.
  """

  def run(leaves: Any, held: Any, token: Any) -> Any:
    model = decoder(graph, leaves, impl)

    def step(_: Any, carry: Any) -> Any:
      held, token = carry
      logits, held = model.decode(token, held, method)
      return offload.loose(held), jnp.argmax(logits, -1).astype(jnp.int32)

    new, token = lax.fori_loop(0, steps, step, (offload.loose(held), token))
    if method.traits.positional:
      new = tuple(c.put(rows=old.rows) for c, old in zip(new, held, strict=True))
    return offload.settled(new), token

  return run


def timing(
  model: Transformer, method: kvjax.Method, impl: str, steps: int, shapes: Any
) -> Callable[[Any], float]:
  """A function of caches of these shapes that gives the seconds of a step.

  By two runs of a compiled `stepping` after a first one.
  """
  graph, leaves = split(model)
  token = jnp.zeros(shapes[0].rows["seen"].shape[0], jnp.int32)
  suites.check_fits(leaves, shapes)
  run = jax.jit(stepping(graph, method, impl, steps), donate_argnums=1)
  program = run.lower(leaves, shapes, token).compile()

  def twice(held: Any) -> Any:
    return program(leaves, program(leaves, held, token)[0], token)

  def seconds(held: Any) -> float:
    held, _ = jax.block_until_ready(program(leaves, held, token))
    taken, (held, _) = clocked(twice, held)
    del held  # the caches of the next contender take their place
    gc.collect()
    return taken / (2 * steps)

  return seconds


def _weight(key: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
  """Norm scales are 1."""
  if len(shape) == 1:
    return jnp.ones(shape, dtype)
  return jax.random.normal(key, shape, dtype) * jnp.asarray(0.02, dtype)


def filled(
  model: Transformer, method: kvjax.Method, batch: int, tokens: int, room: int = STEPS
) -> tuple[kvjax.Cache, ...]:
  """Caches that have seen `tokens` random tokens, with room for more: the steps of a dispatch.

  On the model's mesh, if it has one. The first four tokens and the newest are there, as many as the
  method keeps.
  """
  env = dataclasses.replace(model.env, impl="reference")
  count = jnp.full(batch, tokens, jnp.int32)

  def fill(layer: int, cache: kvjax.Cache, key: Any) -> kvjax.Cache:
    slot = jnp.arange(cache.size, dtype=jnp.int32)
    newest = jnp.where(slot < 4, slot, slot + max(0, tokens - cache.size))
    pos = jnp.broadcast_to(jnp.where(slot < tokens, newest, -1), cache.pos.shape)
    kv = {
      name: jax.random.normal(each, cache.slots[name].shape, cache.slots[name].dtype)
      for name, each in zip(("k", "v"), jax.random.split(key), strict=True)
    }
    counted = {"seen": tokens, "used": min(tokens, cache.size)}
    rows = {name: jnp.full(batch, n, jnp.int32) for name, n in counted.items()}
    held = cache.put(slots={**kv, "pos": pos}, rows=rows)
    return method.settle(method.at(env, layer), held, kvjax.Prompt(count, count, None, tokens, 0))

  def drawing(layer: int, cache: kvjax.Cache, key: Any) -> Any:
    where = jax.tree.map(lambda x: x.sharding, cache)
    made = jax.jit(fill, static_argnums=0, donate_argnums=1, out_shardings=where)
    return made.lower(layer, cache, key).compile

  empty = model.init_caches(method, batch, tokens + room)
  keys = jax.random.split(jax.random.key(1), len(empty))
  programs = suites.together(map(drawing, range(len(empty)), empty, keys))
  return tuple(draw(cache, key) for draw, cache, key in zip(programs, empty, keys, strict=True))


def case(
  label: str, name: str, batch: int, tokens: int, peers: contextlib.ExitStack | None
) -> Case:
  """One shape: our step, its products alone, and Hugging Face's until `peers` closes."""
  model = weights(name)
  c = model.config
  leaves = split(model)[1]
  # Without tied embeddings a step reads single rows of the embedding.
  unread = 0 if c.tie_embeddings else c.vocab * c.dim * model.dtype.itemsize
  weight_bytes = sum(x.nbytes for x in leaves) - unread
  kv_bytes = 2 * batch * tokens * c.kv_heads * c.head_dim * model.dtype.itemsize * c.layers
  held = [filled(model, kvjax.Full(), batch, tokens)]
  methods = {
    "kvjax": (kvjax.Full(), "auto"),
    "products": (Products(), "auto"),
    "products (XLA)": (Products(), "reference"),
  }
  *loops, wide, narrow = suites.together(
    [
      *(functools.partial(program, model, *how, held[0]) for how in methods.values()),
      *(functools.partial(_step, model, dtype, held[0]) for dtype in (jnp.float32, model.dtype)),
    ]
  )
  exact, plain = (_logits(step, leaves, held) for step in (wide, narrow))
  rounding = float(np.linalg.norm(plain - exact) / np.linalg.norm(exact))
  contenders = [
    loop(name, *made, leaves, held, checked=name == "kvjax")
    for name, made in zip(methods, loops, strict=True)
  ]
  if peers:
    plain = functools.partial(torch_decoder.contender, model, held[0], tokens)
    contenders += optional("torch, CUDA graph", plain)
    contenders += optional("transformers", lambda: _transformers(c, batch, tokens, peers))
  rate = this_device().read

  def figures(seconds: dict[str, float]) -> dict[str, float]:
    ours, cache = seconds["kvjax"], kv_bytes / rate
    return {
      "over XLA's products + KV": ours / (seconds["products (XLA)"] + cache),
      "over our products + KV": ours / (seconds["products"] + cache),
      "over all bytes": ours * rate / (weight_bytes + kv_bytes),
      "error of XLA's own step": rounding,
      **contenders[0].figures,
    }

  return Case(
    name=label,
    shapes=f"{c.layers} layers, {weight_bytes / 1e9:.2f} GB of weights, "
    f"{kv_bytes / 1e9:.2f} GB of keys and values, {model.dtype.name}",
    bytes=weight_bytes + kv_bytes,
    reference=lambda: exact,
    # As far from float32 activations as XLA's own step in the model's dtype, and a quarter more.
    tolerance=1.25 * rounding + 1e-5,
    contenders=contenders,
    figures=figures,
  )


def _step(model: Transformer, dtype: Any, caches: Any) -> Any:
  """One compiled step of the reference with activations of this dtype; caches come back."""
  graph, leaves = split(model)
  start = caches[0].rows

  def step(leaves: Any, caches: Any, start: Any) -> Any:
    model = decoder(graph, leaves, "reference")
    # What follows is promoted to the dtype of the first activations.
    model.embedding = nnx.Param(model.embedding[...].astype(dtype))
    token = jnp.arange(caches[0].rows["seen"].shape[0], dtype=jnp.int32)
    logits, caches = model.decode(token, caches, kvjax.Full())
    return logits, tuple(c.put(rows=start) for c in caches)

  return jax.jit(step, donate_argnums=1).lower(leaves, caches, start).compile()


def _logits(step: Any, leaves: Any, held: list[Any]) -> np.ndarray:
  start = jax.tree.map(jnp.copy, held[0][0].rows)
  logits, held[0] = step(leaves, held[0], start)
  return np.asarray(logits)


def program(
  model: Transformer, method: Any, impl: str, caches: Any, options: dict[str, str] | None = None
) -> tuple[Any, dict[str, float]]:
  """STEPS decode steps in one compiled program, always from the same state, and what it took.

  `options` are the compiler's, by default those of the devices that the model is on.
  """
  graph, leaves = split(model)
  token = jnp.arange(caches[0].rows["seen"].shape[0], dtype=jnp.int32)
  vocab = model.config.vocab

  def run(leaves, caches, token, start):
    model = decoder(graph, leaves, impl)

    def step(i, carry):
      caches, token, first = carry
      logits, caches = model.decode(token, caches, method)
      first = jnp.where(i == 0, logits, first)
      return caches, jnp.argmax(logits, -1).astype(jnp.int32), first

    first = jnp.zeros((token.shape[0], vocab), jnp.float32)
    caches, _, first = lax.fori_loop(0, STEPS, step, (caches, token, first))
    return tuple(c.put(rows=start) for c in caches), first

  began = time.perf_counter()
  options = kvjax.compiler_options(model.mesh) if options is None else options
  jitted = jax.jit(run, donate_argnums=1, compiler_options=options)
  compiled = jitted.lower(leaves, caches, token, caches[0].rows).compile()
  memory = compiled.memory_analysis()
  layer = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(caches[0]))
  return compiled, {
    "compiled beside others in, s": time.perf_counter() - began,
    "temporary memory, MB": memory.temp_size_in_bytes / 1e6,
    "a layer's cache, MB": layer / 1e6,
  }


def loop(
  name: str,
  compiled: Any,
  figures: dict[str, float],
  leaves: Any,
  held: list[Any],
  *,
  checked: bool,
) -> Contender:
  """A compiled loop as a contender. `held` is one place for the caches, which contenders donate
  and put back in turn.
  """
  start = jax.tree.map(jnp.copy, held[0][0].rows)
  token = jnp.arange(start["seen"].shape[0], dtype=jnp.int32)
  held[0], first = compiled(leaves, held[0], token, start)
  output = np.asarray(first)

  def seconds() -> float:
    taken, (held[0], _) = clocked(compiled, leaves, held[0], token, start)
    return taken / STEPS

  return Contender(name, seconds, (lambda: output) if checked else None, figures)


def hugging_face(config: ModelConfig, **more: Any) -> Any:
  """transformers' configuration of this shape."""
  import transformers

  kind = "Qwen3" if config.qk_norm else "Qwen2" if config.qkv_bias else "Llama"
  return getattr(transformers, f"{kind}Config")(
    vocab_size=config.vocab,
    hidden_size=config.dim,
    num_hidden_layers=config.layers,
    num_attention_heads=config.heads,
    num_key_value_heads=config.kv_heads,
    head_dim=config.head_dim,
    intermediate_size=config.ffn,
    max_position_embeddings=config.max_context,
    tie_word_embeddings=config.tie_embeddings,
    **more,
  )


def hugging_face_model(config: ModelConfig, **more: Any) -> Any:
  """transformers' decoder of this shape on the GPU, bfloat16."""
  import torch
  import transformers

  shape = hugging_face(config)
  with torch.device("cuda"):
    made = transformers.AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16, **more)
  return made.eval()


def _transformers(
  config: ModelConfig, batch: int, tokens: int, stack: contextlib.ExitStack
) -> Contender:
  """Hugging Face's decoder of the same shape, in a process of its own, which ends with `stack`."""
  context = multiprocessing.get_context("spawn")
  ours, theirs = context.Pipe()
  process = context.Process(target=_serve, args=(theirs, config, batch, tokens), daemon=True)
  process.start()
  stack.callback(process.terminate)
  theirs.close()
  _ask(ours)  # a peer that cannot run is left out here
  return Contender("transformers", lambda: _ask(ours))


def _ask(pipe: Any) -> float:
  """One timing of the other process."""
  pipe.send(None)
  try:
    return pipe.recv()
  except EOFError as error:
    raise RuntimeError("the process of transformers ended; its message is above") from error


def _serve(pipe: Any, config: ModelConfig, batch: int, tokens: int) -> None:
  """Answers every message with the seconds of a decode step: static cache, CUDA graphs.

  The cache counts its tokens in place, for which graphs of the whole step would be left out: it is
  compiled in parts, and each step says that it begins.
  """
  import torch
  import transformers

  model = hugging_face_model(config)
  with torch.device("cuda"):
    cache = transformers.StaticCache(config=model.config, max_cache_len=tokens + STEPS)
    ids = torch.zeros((batch, 1), dtype=torch.long)
    here = torch.tensor([tokens])
  forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=False)

  @torch.no_grad()
  def steps() -> None:
    for _ in range(STEPS):
      torch.compiler.cudagraph_mark_step_begin()
      forward(input_ids=ids, past_key_values=cache, cache_position=here, use_cache=True)

  steps()
  while True:
    pipe.recv()
    pipe.send(suites.torch_clocked(steps) / STEPS)
