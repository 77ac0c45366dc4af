"""Decode steps of every method, what they consist of, and which implementation reads a prompt."""

import collections
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from kvjax import (
  ART,
  CIS,
  METHODS,
  PRR,
  Cache,
  CacheSpec,
  Carry,
  Env,
  InfLLMv2,
  LongFlow,
  Prompt,
  PyramidKV,
  Quantised,
  Quest,
  Rope,
  SnapKV,
  StreamingLLM,
  settings,
)
from kvjax.families import sight
from kvjax.ops import prefill

SPEC = CacheSpec(1, 4096, 2, 4, 64, 8, jnp.bfloat16)


CASES = {name: settings.example(cls, 256) for name, cls in METHODS.items()} | {
  "art over quest": ART(settings.example(Quest, 256), splits=1),
  "art over snapkv": ART(settings.example(SnapKV, 256), splits=1),
  "art over pyramidkv": ART(settings.example(PyramidKV, 256), splits=1),
  "art over streaming_llm": ART(StreamingLLM(256, rope="original"), splits=1),
  "streaming_llm, original": StreamingLLM(256, rope="original"),
  "art, certified": ART(certify=0.01),
  "art, known lengths": ART(margin=8),
  "art, in a prompt's order": ART(margin=8, by_mass=math.inf, sinks=4, relative=True),
  "prr over infllm_v2": PRR(settings.example(InfLLMv2, 256), budget=1.25),
  "prr, strict": PRR(settings.example(Quest, 256), budget=1.25, strict=True),
  "cis per query head": CIS(k=64, per="query_head"),
  "int8 over quest": Quantised(settings.example(Quest, 256)),
  "int8 over longflow": Quantised(settings.example(LongFlow, 256)),
  "int8 over art": Quantised(ART(splits=1)),
  "int4 over cis": Quantised(settings.example(CIS, 256), bits=4),
}


def decode_step(method, layer=7, spec=None, impl="pallas"):
  """A step by kernels, and its abstract arguments; `spec` None: `SPEC`."""
  spec = spec or SPEC
  at = method.at(Env(spec.layers, Rope(), impl=impl), layer)
  cache = jax.eval_shape(functools.partial(Cache.empty, method, spec, layer))
  of, heads = jax.ShapeDtypeStruct, (spec.batch, spec.kv_heads)
  q = of((*heads, spec.groups, spec.head_dim), spec.dtype)
  k = of((*heads, spec.head_dim), spec.dtype)

  def step(cache, q, k, v, live):
    return method.decode_step(at, cache, q, k, v, live, Carry())[:3]

  return step, (cache, q, k, k, of((spec.batch,), bool))


def operations(method, layer=7, spec=None, impl="pallas"):
  """Number of each primitive that the step's results need; "launch name" for kernels."""
  step, arguments = decode_step(method, layer, spec, impl)
  jaxpr = jax.make_jaxpr(step)(*arguments).jaxpr
  needed, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
  counts: collections.Counter[str] = collections.Counter()
  for equation in equations(needed, unless=("pallas_call",)):
    name = equation.primitive.name
    launch = name == "pallas_call"
    counts.update(["launches", f"launch {_name(equation.params)}"] if launch else [name])
  return counts


def equations(jaxpr, unless=()):
  """Equations of a program, each followed by those inside of it unless its primitive is named."""
  for equation in jaxpr.eqns:
    yield equation
    inside = [] if equation.primitive.name in unless else [*equation.params.values()]
    for value in jax.tree.leaves(inside):
      inner = getattr(value, "jaxpr", value)
      if hasattr(inner, "eqns"):
        yield from equations(inner, unless)


class _Value:
  """A value of a program whose calls are written out; `above`: the numbers of what it hangs on."""

  def __init__(self, above=frozenset()):
    self.above, self.readers = above, []


def copied(method, layer=7, spec=None):
  """Leaves of the cache that are written in place, though operations read them as they were.

  XLA copies such a leaf, unless each of its readers is known to come first: where what is written,
  or where it is, is made of the reader's result. It keeps launches in their order, and orders its
  own operations so that few copies are left: looked at are those between a launch and them.
  """
  step, arguments = decode_step(method, layer, spec)
  jaxpr, found = jax.make_jaxpr(step)(*arguments).jaxpr, set()
  needed, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
  leaves = [_Value() for _ in needed.invars]
  lines: list[tuple] = []
  _written_out(needed, leaves, lines)
  for number, (equation, inputs) in enumerate(lines):
    above, name = frozenset().union(*(x.above for x in inputs)), equation.primitive.name
    launch = name == "pallas_call"
    written = [i for i, _ in equation.params.get("input_output_aliases", ())]
    written += [0] * name.startswith(("scatter", "dynamic_update"))
    for x in (inputs[i] for i in written):
      readers = {n for n, reader in x.readers if (reader == "pallas_call") != launch}
      if readers - above - {number}:
        found.add(x)
  paths = jax.tree_util.tree_flatten_with_path(arguments[0])[0]
  names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]
  return {name for name, x in zip(names, leaves, strict=False) if x in found}


def _written_out(jaxpr, inputs, lines):
  """Equations with the `_Value`s that they read, those of calls in their place; the results'."""
  known = dict(zip(jaxpr.invars, inputs, strict=True))

  def value(x):
    return _Value() if hasattr(x, "val") else known.setdefault(x, _Value())

  for equation in jaxpr.eqns:
    name, operands = equation.primitive.name, [value(x) for x in equation.invars]
    if name in ("jit", "pjit"):
      made = _written_out(equation.params["jaxpr"].jaxpr, operands, lines)
    elif name in ("reshape", "squeeze"):
      made = operands[:1]
    else:
      above = frozenset({len(lines)}).union(*(x.above for x in operands))
      for x in operands:
        x.readers.append((len(lines), name))
      lines.append((equation, operands))
      made = [_Value(above) for _ in equation.outvars]
    known.update(zip(equation.outvars, made, strict=True))
  return [value(x) for x in jaxpr.outvars]


def _name(params):
  """The name of a launch, where this version of jax keeps it."""
  return str(params.get("name_and_src_info") or params.get("name")).split()[0]


# Many rows of one query head: a row is one program's, which chooses and reads.
MANY = CacheSpec(8, 1040, 32, 1, 128, 8, jnp.bfloat16)


def env(impl):
  return Env(4, Rope(), impl=impl, tile=4)


def implementation(
  method,
  layer=0,
  past=0,
  tokens=8192,
  dtype=jnp.bfloat16,
  head_dim=128,
  impl="auto",
  soft_cap=None,
  rows=1,
):
  """What attends to a prompt."""
  at, names = method.at(dataclasses.replace(env(impl), soft_cap=soft_cap), layer), []

  def trace(k, valid):
    prompt = Prompt.of(at, tokens, valid, valid, past)
    qpos = prompt.query_index()
    q = jnp.zeros((rows, 1, 1, qpos.shape[1], head_dim), dtype)
    chunk = sight.of(at, qpos, prompt)
    names.append(prefill._prompt_implementation(at, {"k": k}, q, chunk)[0])

  k = jax.ShapeDtypeStruct((rows, 1, tokens + (past or 0), head_dim), dtype)
  jax.eval_shape(trace, k, jax.ShapeDtypeStruct((rows,), jnp.int32))
  return names[0]
