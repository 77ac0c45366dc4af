"""reading a prompt: attention against cuDNN, windows by what they see, whole 8B-shaped prompts"""

import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import kvjax
from kvjax.kernels.prefill.dense import prefill_attention
from kvjax.models.decode.generate import split
from kvjax.models.nn.config import ModelConfig
from kvjax.models.nn.transformer import Transformer
from kvjax.ops import attention
from kvjax.programs import suites
from kvjax.programs.suites import Case, Contender, clocked, jax_contender, named, optional, together
from kvjax.programs.suites.e2e import decoder, hugging_face_model, weights

Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
LAST = 64  # queries whose outputs are compared
MODEL = "Llama-3.1-8B"
FEWEST = kvjax.PSAW(kvjax.ETF())  # leaves out most; frozen tokens' keys and values are computed


@suites.suite
def cases(quick: bool, peers: bool) -> Iterator[tuple]:
  """Attention alone, a layer that hides most, then whole prompts."""
  for tokens in (96,) if quick else (8 << 10, 32 << 10, 128 << 10):
    yield f"dense {named(tokens)}", dense_case, tokens, quick, peers
  tokens, most = (96, 96) if quick else (32 << 10, 128 << 10)
  for words, method in {"PSAW": kvjax.PSAW(), "ETF + PSAW": FEWEST}.items():
    name = f"top layer of {words} {named(tokens)}"
    yield name, layer_case, method, tokens, quick
  yield f"model {named(tokens)}", model_case, tokens, quick
  yield f"model {named(most)} in one piece", long_case, most, quick, peers


# ---- attention alone


def operands(tokens: int, quick: bool) -> tuple[jax.Array, ...]:
  """q [1, K, G, T, H], k and v [1, K, T, H] of an 8B shape."""
  heads, groups, size = (2, 3, 16) if quick else (KV_HEADS, Q_HEADS // KV_HEADS, HEAD_DIM)
  dtype = jnp.float32 if quick else jnp.bfloat16
  kv = 1, heads, tokens, size
  keys = jax.random.split(jax.random.key(0), 3)
  shapes = (1, heads, groups, tokens, size), kv, kv
  return tuple(jax.random.normal(x, s, dtype) for x, s in zip(keys, shapes, strict=True))


def _attend(method: kvjax.Method, impl: str, layer: int, layers: int, tokens: int) -> Callable:
  """A layer's prompt attention by the method and the implementation; output in q's dtype."""
  at = method.at(kvjax.Env(layers, impl=impl), layer)
  prompt = whole_prompt(at, tokens)
  every = jnp.arange(tokens, dtype=jnp.int32)

  def run(q: Any, k: Any, v: Any) -> Any:
    staged = {"k": k, "v": v, "pos": jnp.broadcast_to(every, k.shape[:3])}
    attended = method.attend_prompt(at, staged, q, prompt.query_index(), prompt)
    return attended.state.o.astype(q.dtype) if attended.out is None else attended.out

  return run


def _reference(q: Any, k: Any, v: Any, window: Any, qpos: Any) -> np.ndarray:
  """The last queries' outputs in float32."""
  at = kvjax.Full().at(kvjax.Env(1, impl="reference"), 0)
  staged = {"k": k, "v": v, "pos": jnp.broadcast_to(jnp.arange(k.shape[2]), k.shape[:3])}
  state = attention.attend_prompt(at, q[:, :, :, -LAST:], qpos[:, -LAST:], staged, window, None)
  return np.asarray(state.o)


def _last(out: Any) -> Any:
  return out[:, :, :, -LAST:]


def dense_case(name: str, tokens: int, quick: bool, peers: bool) -> Case:
  """Causal attention over a whole prompt: what "auto" takes, our kernel, and the libraries."""
  q, k, v = operands(tokens, quick)
  operations = 2 * tokens * tokens * q.shape[1] * q.shape[2] * q.shape[4]
  few = {"calls": 2 if tokens < 1 << 17 else 1, "loops": max(1, (1 << 15) // tokens)}
  qpos = jnp.arange(tokens, dtype=jnp.int32)[None]
  auto = _attend(kvjax.Full(), "auto", 0, 1, tokens)

  def kernel(q: Any, k: Any, v: Any) -> Any:
    return prefill_attention(q, k, v, qpos)[1]

  contenders = [
    jax_contender("kvjax", auto, [(q, k, v)], output=_last, **few),
    jax_contender("our kernel", kernel, [(q, k, v)], output=_last, **few),
  ]
  if peers:
    contenders += optional("jax.nn cuDNN", lambda: _jax_nn(q, k, v, few))
    sizes = (1, q.shape[1] * q.shape[2], *q.shape[3:]), k.shape
    how = {"is_causal": True, "enable_gqa": True, "calls": 1}
    for label in ("torch flash", "torch cuDNN"):
      peer = functools.partial(suites.torch_attention, label, *sizes, **how)
      contenders += optional(label, peer)

  def figures(seconds: dict[str, float]) -> dict[str, float]:
    return {f"{n}, TFLOP/s": operations / s / 1e12 for n, s in seconds.items()}

  return Case(
    name=name,
    shapes=_shapes(q, k),
    bytes=sum(x.nbytes for x in (q, q, k, v)),
    reference=lambda: _reference(q, k, v, None, qpos),
    tolerance=1e-5 if quick else 1e-2,
    contenders=contenders,
    figures=figures,
  )


def _shapes(q: Any, k: Any) -> str:
  return (
    f"{q.shape[3]} queries of {q.shape[1]} KV heads × {q.shape[2]}, {k.shape[2]} slots of "
    f"{q.shape[4]} {q.dtype.name}"
  )


def _jax_nn(q: Any, k: Any, v: Any, few: dict[str, int]) -> Contender:
  """jax.nn's cuDNN on operands that lie as it wants them."""
  q = jnp.moveaxis(q.reshape(1, -1, *q.shape[3:]), 1, 2)
  k, v = (jnp.moveaxis(x, 1, 2) for x in (k, v))
  attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
  return jax_contender(
    "jax.nn cuDNN",
    attend,
    [(q, k, v)],
    output=lambda o: jnp.moveaxis(o[:, -LAST:], 1, 2).reshape(1, k.shape[2], -1, LAST, k.shape[3]),
    **few,
  )


def layer_case(name: str, method: kvjax.Method, tokens: int, quick: bool) -> Case:
  """Attention of the top layer, which hides and freezes most, against dense attention."""
  layers = 4 if quick else 32
  at = method.at(kvjax.Env(layers), layers - 1)
  q, k, v = operands(tokens, quick)
  qpos = whole_prompt(at, tokens).query_index()
  part = q[:, :, :, np.asarray(qpos)[0]]
  few = {"calls": 2, "loops": 2}
  options = {"layer": layers - 1, "layers": layers, "tokens": tokens}

  def contender(name: str, impl: str) -> Contender:
    run = _attend(method, impl, **options)
    return jax_contender(name, run, [(part, k, v)], output=_last, **few)

  contenders = [
    contender("kvjax", "auto"),
    contender("our kernel", "pallas"),
    jax_contender("dense", _attend(kvjax.Full(), "auto", **options), [(q, k, v)], **few),
  ]
  seen = visible(method, at, tokens) / (tokens * (tokens + 1) / 2)

  return Case(
    name=name,
    shapes=f"{_shapes(part, k)}, layer {layers} of {layers}",
    bytes=sum(x.nbytes for x in (part, part, k, v)),
    reference=lambda: _reference(part, k, v, method.window(at, qpos[:, -LAST:]), qpos),
    tolerance=1e-5 if quick else 1e-2,
    contenders=contenders,
    figures=lambda _: {"visible": seen},
  )


def whole_prompt(at: kvjax.At, tokens: int) -> kvjax.Prompt:
  """A row's prompt of so many tokens, in one piece, as a layer computes it."""
  total = jnp.array([tokens], jnp.int32)
  return kvjax.Prompt.of(at, tokens, total, total, 0)


def visible(method: kvjax.Method, at: kvjax.At, tokens: int) -> float:
  """Pairs of a computed query and a slot that it sees, in a layer of a whole prompt."""
  qpos = np.asarray(whole_prompt(at, tokens).query_index())
  pairs = (qpos + 1.0).sum()
  window = method.window(at, jnp.asarray(qpos, jnp.int32))
  if window is not None:
    pairs -= np.maximum(np.asarray(window.first, np.float64) - window.sinks, 0).sum()
  return float(pairs)


# ---- whole prompts


def operations(config: ModelConfig, method: kvjax.Method, tokens: int) -> float:
  """Floating-point operations of a prompt's products and attention, the head's left out."""
  heads = config.kv_heads * config.groups * config.head_dim
  kv = 2 * config.dim * config.kv_heads * config.head_dim
  weights = 2 * config.dim * heads + 3 * config.dim * config.ffn
  total = 0.0
  for layer in range(config.layers):
    at = method.at(kvjax.Env(config.layers), layer)
    computed = whole_prompt(at, tokens).query_index().shape[1]
    projected = tokens if method.traits.projects_all else computed
    total += 2.0 * (computed * weights + projected * kv) + 4.0 * heads * visible(method, at, tokens)
  return total


def program(model: Transformer, method: kvjax.Method, tokens: int, impl: str) -> Any:
  """A compiled prefill of one row of so many tokens; caches are donated."""
  graph, leaves = split(model)

  def run(leaves: Any, caches: Any, ids: Any) -> Any:
    lengths = jnp.array([tokens], jnp.int32)
    return decoder(graph, leaves, impl).prefill(ids, lengths, caches, method)

  caches = jax.eval_shape(lambda: method.init_caches(model.spec(1, tokens)))
  ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
  shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
  return jax.jit(run, donate_argnums=1).lower(shapes, caches, ids).compile()


def timed(model: Transformer, method: kvjax.Method, tokens: int, compiled: Any) -> Any:
  """Seconds of one prefill, and its logits."""
  leaves = split(model)[1]
  caches = jax.jit(lambda: method.init_caches(model.spec(1, tokens)))()
  ids = jax.random.randint(jax.random.key(0), (1, tokens), 0, model.config.vocab)
  jax.block_until_ready((caches, ids, leaves))
  taken, (logits, _) = clocked(compiled, leaves, caches, ids)
  return taken, np.asarray(logits)


def model_case(name: str, tokens: int, quick: bool) -> Case:
  """A whole prompt under ETF, PSAW and both, against Full; both checked against our kernel alone.

  "every layer" freezes from the first layer on: it saves several times the work, so that the share
  of it that shows in time is known better.
  """
  model = weights("tiny" if quick else MODEL)
  full, ours = kvjax.Full(), FEWEST
  ways = {"kvjax": (ours, "auto"), "Full": (full, "auto"), "ETF": (kvjax.ETF(), "auto")}
  ways |= {"PSAW": (kvjax.PSAW(), "auto"), "every layer": (kvjax.ETF(start=0.0), "auto")}
  ways["check"] = ours, "reference" if quick else "pallas"
  made = together(functools.partial(program, model, m, tokens, impl) for m, impl in ways.values())
  run = {
    n: functools.partial(timed, model, method, tokens, compiled)
    for (n, (method, _)), compiled in zip(ways.items(), made, strict=True)
  }

  def contender(name: str) -> Contender:
    checked = (lambda: run[name]()[1]) if ways[name][0] == ours else None
    return Contender(name, lambda: run[name]()[0], checked)

  work = {m: operations(model.config, m, tokens) for m, _ in ways.values()}
  saved = {n: 1 - work[m] / work[full] for n, (m, _) in ways.items() if m != full}

  def figures(seconds: dict[str, float]) -> dict[str, float]:
    rates = {f"{n}, TFLOP/s": work[ways[n][0]] / s / 1e12 for n, s in seconds.items()}
    less = {f"{n}, less work": share for n, share in saved.items() if n in seconds}
    falls = {f"{n}, less time": 1 - seconds[n] / seconds["Full"] for n in saved if n in seconds}
    return rates | less | falls

  return Case(
    name=name,
    shapes=_model_shapes(model, tokens) + "; kvjax is ETF + PSAW",
    bytes=model.weight_bytes(),
    reference=lambda: run["check"]()[1],
    tolerance=1e-4 if quick else 5e-2,
    contenders=[contender(name) for name in ways if name != "check"],
    figures=figures,
  )


def _model_shapes(model: Transformer, tokens: int) -> str:
  size = model.weight_bytes() / 1e9
  return f"{model.config.layers} layers, {size:.2f} GB of weights, {tokens} tokens"


def long_case(name: str, tokens: int, quick: bool, peers: bool) -> Case:
  """Full, SnapKV and PyramidKV over a whole prompt: seconds of a second run each, and memory."""
  model = weights("tiny" if quick else MODEL)
  budget = 32 if quick else 2048
  methods = {
    "SnapKV": kvjax.SnapKV(budget=budget, window_size=16),
    "PyramidKV": kvjax.PyramidKV(budget=budget),
    "Full": kvjax.Full(),
  }
  found: dict[str, float] = {}  # gigabytes, but for rates

  @functools.cache
  def once(method: str) -> float:
    compiled = program(model, methods[method], tokens, "auto")
    short = program(shallow(model.config, model.dtype), methods[method], tokens, "auto")
    held = compiled.memory_analysis()
    more = held.temp_size_in_bytes - short.memory_analysis().temp_size_in_bytes
    timed(model, methods[method], tokens, compiled)  # memory is asked for
    taken, logits = timed(model, methods[method], tokens, compiled)
    assert np.isfinite(logits).all()
    gc.collect()
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    told = {
      f"{method}, TFLOP/s": operations(model.config, methods[method], tokens) / taken / 1e12,
      f"{method}, caches": held.output_size_in_bytes / 1e9,
      f"{method}, temporary": held.temp_size_in_bytes / 1e9,
      f"{method}, of it, of {model.config.layers - 2} of the layers": more / 1e9,
      f"{method}, peak of the process": peak / 1e9,
    }
    found.update(told)
    return taken

  return Case(
    name=name,
    shapes=_model_shapes(model, tokens) + f", budget {budget}; a second run of each is timed",
    bytes=model.weight_bytes(),
    reference=lambda: np.zeros(1),
    tolerance=0.0,
    contenders=(
      *(Contender(n, functools.partial(once, n)) for n in methods),
      *(optional("transformers", lambda: _transformers(model.config, tokens)) if peers else ()),
    ),
    subject="Full",
    figures=lambda _: found,
  )


def _transformers(config: ModelConfig, tokens: int) -> Contender:
  """Hugging Face's decoder of this shape, flash attention, the last token's logits."""
  import torch

  model = hugging_face_model(config, attn_implementation="sdpa")
  ids = torch.zeros((1, tokens), dtype=torch.long, device="cuda")

  @torch.no_grad()
  def run() -> None:
    model(input_ids=ids, use_cache=True, logits_to_keep=1)

  @functools.cache
  def once() -> float:
    run()
    return suites.torch_clocked(run)

  return Contender("transformers", once)


def shallow(config: ModelConfig, dtype: Any) -> Any:
  """The same decoder with two layers, without weights: only its memory is asked for."""
  small = dataclasses.replace(config, layers=2)
  return nnx.eval_shape(lambda: Transformer(small, dtype=dtype, rngs=nnx.Rngs(0)))
