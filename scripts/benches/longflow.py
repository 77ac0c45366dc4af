"""LongFlow: its step against dense decode on the same slots, and long answers at full memory"""

import dataclasses
import functools
import gc
import importlib.util
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.kernels.common.devices import this_device
from kvjax.kernels.decode.dense import decode_attention
from kvjax.models.nn.transformer import Transformer
from kvjax.programs import suites
from kvjax.programs.suites import Case, Contender, e2e, looped_contender, optional
from scripts.benches._layer import holding, projected, step_of

STEPS = 8  # decode steps per dispatch
SHAPES = [(128, 3200, 8, 4, 128), (16, 3200, 8, 4, 128)]  # rows, slots, KV heads, groups, size
MEMORY = 0.93  # share of the device's memory that weights and caches take


@dataclasses.dataclass(frozen=True)
class Answer:
  """A long answer to a short prompt: the paper's setting is 512 in, 16,000 out, 3,200 kept."""

  model: str = "Qwen3-1.7B"
  prompt: int = 512
  tokens: int = 16_000
  budget: int = 3200

  @property
  def name(self) -> str:
    return f"{self.model} {self.prompt} in {self.tokens} out"


@suites.suite
def cases(quick: bool, peers: bool) -> Iterator[tuple]:
  """A step at two sizes, then a long answer."""
  for batch, slots, *heads in [(2, 48, 3, 3, 16)] if quick else SHAPES:
    spec = kvjax.CacheSpec(batch, slots, *heads, 1, jnp.float32 if quick else jnp.bfloat16)
    name = f"step B{batch} S{slots} {spec.kv_heads}x{spec.groups}"
    yield name, step_case, spec, "pallas" if quick else "auto"
  answer = Answer("tiny", 8, 40, 16) if quick else Answer()
  installed = importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")
  if peers and installed:  # first: what JAX has taken it keeps
    yield f"{answer.model} transformers", peer_case, answer
    _empty_torch()
  yield answer.name, answer_case, answer


def step_case(name: str, spec: kvjax.CacheSpec, impl: str) -> Case:
  """One layer: enter a token, attend, name the victim; beside it dense decode, and H2O in XLA."""
  ours = kvjax.LongFlow(spec.capacity, window_size=max(1, min(32, spec.capacity // 4)))
  h2o = kvjax.H2O(spec.capacity)
  inputs = projected(spec)
  kv_bytes = 2 * spec.capacity * spec.batch * spec.kv_heads * spec.head_dim * inputs[0].itemsize

  def dense(cache: Any, qkv: Any, live: Any) -> tuple[Any, Any]:
    bounds = jnp.zeros((spec.batch, 1), jnp.int32), cache.used[:, None]
    q = qkv[..., :-2, :]
    return cache, decode_attention(q, cache.slots["k"], cache.slots["v"], *bounds).o

  full = holding(ours, spec, spec.capacity)

  def contender(name: str, method: kvjax.Method, run: Callable, output: Any = None) -> Contender:
    cache = holding(method, spec, spec.capacity)
    return looped_contender(name, run, [cache], [inputs], output=output, calls=STEPS, loops=4)

  contenders = [
    contender("kvjax", ours, step_of(ours, impl, 1), lambda out: out),
    contender("dense decode", ours, dense),
    suites.reading([[full.slots["k"], full.slots["v"]]], STEPS),
    contender("H2O in XLA", h2o, step_of(h2o, "reference", 1)),
  ]

  return Case(
    name=name,
    shapes=f"{spec.batch} rows, {spec.kv_heads} KV heads × {spec.groups}, {spec.capacity} slots "
    f"of {spec.head_dim} {jnp.dtype(spec.dtype).name}; a step enters a token and names a victim",
    bytes=kv_bytes,
    reference=lambda: np.asarray(
      jax.jit(step_of(ours, "reference", 1))(full, *inputs)[1], np.float32
    ),
    tolerance=1e-5 if spec.dtype == jnp.float32 else 1e-2,
    contenders=contenders,
  )


def answer_case(name: str, answer: Answer) -> Case:
  """Tokens a second over a whole answer, each method at the batch that fills the memory (Fig. 4).

  Steps are timed at a few lengths and summed over the answer by the trapezoidal rule. Full's cache
  has room for everything from the start, and its step reads what is there. R-KV's steps are those
  between two of its rankings.
  """
  model = e2e.weights(answer.model)
  total = answer.prompt + answer.tokens
  filling = answer.prompt, answer.budget
  marks = {
    "LongFlow": (kvjax.LongFlow(answer.budget, window_size=4), filling),
    "Full": (kvjax.Full(), tuple(np.linspace(answer.prompt, total - STEPS, 4).astype(int))),
  }
  others = {"H2O": kvjax.H2O, "VATP": kvjax.VATP, "R-KV": kvjax.RKV}
  marks |= {
    name: (kvjax.settings.example(cls, answer.budget), filling) for name, cls in others.items()
  }
  subject = f"LongFlow at {answer.budget}"
  logits = functools.partial(_answer_logits, model, marks["LongFlow"][0], answer)
  contenders, batches = [], {}
  for each, (method, lengths) in marks.items():
    batches[each] = _batch(model, method, total)
    seconds = _answer_seconds(model, method, batches[each], total)
    for length in lengths:
      label, run = f"{each} at {length}", functools.partial(seconds, int(length))
      checked = functools.partial(logits, "auto") if label == subject else None
      contenders.append(Contender(label, run, checked))
  weight_bytes = model.weight_bytes()
  slot_bytes = _row_bytes(model, kvjax.Full(), total) // total

  def figures(seconds: dict[str, float]) -> dict[str, float]:
    found = {}
    for name, (method, lengths) in marks.items():
      live, batch = np.minimum(np.arange(answer.prompt, total), lengths[-1]), batches[name]
      step = np.interp(live, lengths, [seconds[f"{name} at {n}"] for n in lengths])
      bound = (weight_bytes + batch * live * float(slot_bytes)) / this_device().read
      found |= {
        f"{name}, batch": batch,
        f"{name}, tokens a second": batch * answer.tokens / step.sum(),
        f"{name}, of its byte limit": bound.sum() / step.sum(),
        f"{name}, MiB of a row": _row_bytes(model, method, total) / 2**20,
      }
    return found

  return Case(
    name=name,
    shapes=f"{model.config.layers} layers, {weight_bytes / 1e9:.2f} GB of weights, "
    f"{slot_bytes} bytes a token, budget {answer.budget}, {model.dtype.name}; µs are of a step",
    bytes=weight_bytes,
    reference=functools.partial(logits, "reference"),
    tolerance=1e-4 if model.dtype == jnp.float32 else 5e-2,
    contenders=contenders,
    subject=subject,
    figures=figures,
  )


def _row_bytes(model: Transformer, method: kvjax.Method, capacity: int) -> int:
  """Bytes of one row of the caches."""
  return kvjax.plan_memory(model.spec(1, capacity), method).device


def _batch(model: Transformer, method: kvjax.Method, capacity: int) -> int:
  """Rows that fill the device's memory; 2 where it does not tell its size."""
  if math.isinf(limit := suites.memory()):
    return 2
  # Beside its caches a row takes logits, and what comes of them.
  row = _row_bytes(model, method, capacity) + 12 * model.config.vocab
  return int((MEMORY * limit - model.weight_bytes()) / row)


def _answer_seconds(
  model: Transformer, method: kvjax.Method, batch: int, capacity: int
) -> Callable[[int], float]:
  """A function that gives the seconds of a step at a length; compiled when it is first called."""
  spec = model.spec(batch, capacity)

  def held(length: int) -> Any:
    return tuple(holding(method, spec, length) for _ in range(spec.layers))

  @functools.cache
  def seconds() -> Callable[[Any], float]:
    return e2e.timing(model, method, "auto", STEPS, jax.eval_shape(lambda: held(1)))

  return lambda length: seconds()(held(length))


def _answer_logits(
  model: Transformer, method: kvjax.Method, answer: Answer, impl: str
) -> np.ndarray:
  """Logits of one step of two rows whose budget is full."""
  spec = model.spec(2, answer.prompt + answer.tokens)
  caches = tuple(holding(method, spec, answer.budget) for _ in range(spec.layers))
  return e2e.step_logits(model, method, impl, caches)


def peer_case(name: str, answer: Answer) -> Case:
  """Hugging Face's dynamic cache with a decoder of the same shape, at the same lengths.

  At the batch that fills the memory once the answer is whole, as the full cache of ours.
  """
  config, dtype = e2e.shape(answer.model)
  total = answer.prompt + answer.tokens
  batch = _peer_batch(config, jnp.dtype(dtype).itemsize, total)
  lengths = [int(n) for n in np.linspace(answer.prompt, total, 3)]
  contenders = [
    c for n in lengths for c in optional(str(n), lambda n=n: _dynamic(config, batch, n))
  ]

  def figures(seconds: dict[str, float]) -> dict[str, float]:
    have = [n for n in lengths if f"at {n}" in seconds]
    steps = np.interp(np.arange(answer.prompt, total), have, [seconds[f"at {n}"] for n in have])
    return {"batch": batch, "tokens a second": batch * answer.tokens / steps.sum()}

  return Case(
    name=name,
    shapes=f"batch {batch}, dynamic cache, bfloat16, not compiled; µs are of a step",
    bytes=0,
    reference=lambda: np.zeros(1),
    tolerance=0.0,
    contenders=contenders,
    subject=f"at {lengths[-1]}",
    figures=figures,
  )


def _peer_batch(config: Any, size: int, total: int) -> int:
  """Rows of so many tokens that fill the device's memory, an eighth fewer until they do fit.

  Each step makes a layer of them anew.
  """
  import torch

  held = _hugging_face_model(config).num_parameters() * size
  row = 2 * config.kv_heads * config.head_dim * size * total * (config.layers + 1)
  limit = MEMORY * torch.cuda.mem_get_info()[1] - held
  batch = int(limit / (row + 12 * config.vocab))
  while batch > 1:
    try:
      _dynamic(config, batch, total).seconds()
      break
    except torch.OutOfMemoryError:
      batch -= -(-batch // 8)
  return batch


_hugging_face_model = functools.lru_cache(maxsize=1)(e2e.hugging_face_model)


def _empty_torch() -> None:
  """Gives the memory back that torch holds for later."""
  import torch

  _hugging_face_model.cache_clear()
  gc.collect()
  torch.cuda.empty_cache()


def _dynamic(config: Any, batch: int, length: int) -> Contender:
  import torch
  import transformers

  model = _hugging_face_model(config)

  def seconds() -> float:
    torch.cuda.empty_cache()
    cache = transformers.DynamicCache()
    kv = batch, config.kv_heads, length, config.head_dim
    for layer in range(config.layers):
      k, v = (torch.randn(kv, dtype=torch.bfloat16, device="cuda") for _ in range(2))
      cache.update(k, v, layer)
    ids = torch.zeros((batch, 1), dtype=torch.long, device="cuda")

    def step() -> None:
      model(input_ids=ids, past_key_values=cache, use_cache=True)

    with torch.no_grad():
      return min([suites.torch_clocked(step) for _ in range(4)][1:])

  return Contender(f"at {length}", seconds)
