"""decode steps and attention over several devices of one host, against one and what links them"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import kvjax
from kvjax.families import sight
from kvjax.kernels.common.devices import this_device
from kvjax.models.decode.generate import join, split
from kvjax.models.nn import parallel
from kvjax.models.nn.transformer import Transformer
from kvjax.programs import suites
from kvjax.programs.suites import Case, Contender, clocked, e2e, jax_contender, together
from kvjax.programs.suites.decode import reference
from kvjax.runtime import sharding
from scripts.benches._layer import holding

DEVICES = (2, 4)
DECODER = "Llama-3.1-8B", 8, 32768
LONG = 1, 262144  # the same model's, with its slots split
PROMPT = 32768
CONTEXT = 1, 524288
LARGE = "Llama-3.1-70B", 8, 32768  # on four devices; on two without Full, whose caches do not fit
KEPT = 5  # methods that evict keep one token in so many
WITH_ART = ("full", "snapkv", "pyramidkv", "streaming_llm")
# Two all-reduces a layer, each alone between products that wait for it.
CHAIN = 64
USABLE = 0.85  # of a device's memory by weights and caches; the rest is for what steps make
BY_XLA = ", XLA's kernel"  # without kvjax.compiler_options


def cases(quick: bool, peers: bool = True, only: str = "") -> Iterator[Case]:
  """Those of `over_devices`, then 70B on as many devices as there are.

  Raises:
    ValueError: there is one device.
  """
  counts = [n for n in DEVICES[: 1 if quick else None] if n <= jax.device_count()]
  if not counts:
    raise ValueError(
      f"scale: found 1 {jax.default_backend()} device, expected at least 2 (of a CPU: "
      "XLA_FLAGS=--xla_force_host_platform_device_count=2)"
    )
  yield from suites.suite(functools.partial(over_devices, counts))(quick, peers, only)
  yield from large_cases(quick, counts[-1], only)


def over_devices(counts: list[int], quick: bool, peers: bool) -> Iterator[tuple]:
  """Decode steps and prompts with heads or slots split, and attention with split slots."""
  name, batch, tokens = ("tiny", 2, 64) if quick else DECODER
  shapes = {"heads": (batch, tokens), "slots": (1, 128) if quick else LONG}
  for n, (axis, (b, t)) in itertools.product(counts, shapes.items()):
    mesh = kvjax.make_mesh(**{axis: n})
    yield f"{name} B{b} T{t}, {axis} over {n}", decoder, name, b, t, mesh
    t = 64 if quick else PROMPT
    yield f"{name} prompt of {t}, {axis} over {n}", prompt, name, t, mesh
  e2e.weights.cache_clear()
  batch, tokens, dtype = (1, 512, jnp.float32) if quick else (*CONTEXT, jnp.bfloat16)
  for n in counts:
    yield f"attention B{batch} T{tokens}, slots over {n}", attention, batch, tokens, n, dtype


def large_cases(quick: bool, n: int, only: str) -> Iterator[Case]:
  """Decode steps of a model that n devices hold together, under methods with and without ART."""
  name, batch, tokens = ("tiny", 2, 64) if quick else LARGE
  labels = {
    method: f"{name} B{batch} T{tokens}, heads over {n}, {method} and ART"
    for method in WITH_ART
    if quick or n >= (4 if method == "full" else 2)
  }
  wanted = {method: label for method, label in labels.items() if only in label}
  if not wanted:
    return
  config, dtype = e2e.shape(name)
  model = e2e.drawn(config, dtype, kvjax.make_mesh(heads=n))
  with ThreadPoolExecutor() as pool:  # compiling is most of what these cases take
    made = {
      method: [pool.submit(compiled, model, each, batch, tokens) for each in pair(method, tokens)]
      for method in wanted
    }
    for method, label in wanted.items():
      programs = [future.result() for future in made[method]]
      yield stopping(label, model, method, batch, tokens, programs)


def pair(name: str, tokens: int) -> tuple[kvjax.Method, kvjax.Method]:
  """A registered method at its budget, without and with ART."""
  method = kvjax.settings.example(kvjax.METHODS[name], tokens // KEPT)
  if isinstance(method, kvjax.StreamingLLM):
    method = dataclasses.replace(method, rope="original")  # ART's kernel has one query, not two
  return method, kvjax.ART(method, splits="fill")


def compiled(model: Transformer, method: kvjax.Method, batch: int, tokens: int) -> tuple[Any, str]:
  """The decode loop of a method, compiled for caches that are not there yet."""
  assert model.mesh is not None
  spec = model.spec(batch, tokens + e2e.STEPS)
  caches = jax.eval_shape(lambda: method.init_caches(spec))
  where = sharding.named(model.mesh, sharding.cache_specs(caches, method))
  return e2e.program(model, method, "auto", jax.tree.map(_placed, caches, where))


def _placed(x: Any, to: Any) -> jax.ShapeDtypeStruct:
  """The shape of an array that lies there."""
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to)


def decoder(label: str, name: str, batch: int, tokens: int, mesh: Mesh) -> Case:
  """Whole decode steps over a mesh, on one device, and with split heads their all-reduces.

  Where a device has no room for the caches and its part of them, all contenders have the same ones.
  """
  n, method, model = mesh.size, kvjax.Full(), e2e.weights(name)
  sharded = parallel.shard(model, mesh)
  caches = e2e.filled(model, method, batch, tokens)
  where = sharding.named(mesh, sharding.cache_specs(caches, method))
  here = jax.tree.map(lambda x: x.sharding, caches)
  weight_bytes, cache_bytes = (
    sum(x.nbytes for x in jax.tree.leaves(each)) for each in (split(model)[1], caches)
  )
  size = caches[0].size
  shapes = [jax.tree.map(_placed, caches, to) for to in (here, where)]
  alone: Any
  apart: Any
  if (weight_bytes + cache_bytes) * (1 + 1 / n) < USABLE * suites.memory():
    # What is whole everywhere would share its memory with the original, which is donated.
    copied = [cache.put(rows=jax.tree.map(jnp.copy, cache.rows)) for cache in caches]
    alone, apart = [caches], [jax.device_put(tuple(copied), where)]
    del copied
  else:
    held = [caches]
    alone, apart = Turn(held, here), Turn(held, where)
  del caches
  whole, parts = "1 device", f"{n} devices"
  runs: dict[str, tuple] = {
    whole: (model, alone, shapes[0], None),
    parts: (sharded, apart, shapes[1], None),
  }
  if kvjax.compiler_options(mesh):
    runs[parts + BY_XLA] = sharded, apart, shapes[1], {}
  programs = together(
    functools.partial(e2e.program, each, method, "auto", shaped, options)
    for each, _, shaped, options in runs.values()
  )
  contenders = [
    e2e.loop(way, *program, split(each)[1], place, checked=True)
    for (way, (each, place, *_)), program in zip(runs.items(), programs, strict=True)
  ]
  width, dtype = model.config.dim, model.dtype
  heads = mesh.shape[sharding.HEADS]
  chains = reductions(mesh, batch, width, dtype) if heads > 1 else []
  summands = 2 * model.config.layers

  def figures(seconds: dict[str, float]) -> dict[str, float]:
    over = {
      f"over an equal share + {summands} all-reduces{kind}": seconds[parts]
      / (seconds[whole] / n + summands * one)
      for kind, one in all_reduces(chains, seconds)
    }
    return over | contenders[1].figures

  return Case(
    name=label,
    shapes=f"{model.config.layers} layers, {model.config.kv_heads // heads} of "
    f"{model.config.kv_heads} key/value heads and {size * heads // n} slots a device, "
    f"{dtype.name}",
    bytes=weight_bytes + cache_bytes,
    reference=contenders[0].output,
    # Two ways of rounding; each lies about 0.04 from float32 activations under random weights.
    tolerance=0.1 if dtype == jnp.bfloat16 else 1e-4,
    contenders=(*contenders, *chains),
    subject=parts,
    figures=figures,
  )


@dataclasses.dataclass
class Turn:
  """A place for caches, as `e2e.loop` wants it, that others use in turn: who looks has them moved.

  Attributes:
    held: the caches, wherever they are.
    where: of each of their arrays, the sharding here.
  """

  held: list[Any]
  where: Any

  def __getitem__(self, index: int) -> Any:
    caches = list(self.held.pop(index))
    for layer, to in enumerate(self.where):  # one by one: there is no room for more
      caches[layer] = jax.block_until_ready(jax.device_put(caches[layer], to))
    self.held.append(tuple(caches))
    return self.held[index]

  def __setitem__(self, index: int, caches: Any) -> None:
    self.held[index] = caches


def prompt(label: str, name: str, tokens: int, mesh: Mesh) -> Case:
  """A whole prompt of one row over a mesh and on one device, into caches that were always empty."""
  n, method, model = mesh.size, kvjax.Full(), e2e.weights(name)
  ids = jnp.arange(tokens, dtype=jnp.int32)[None] % model.config.vocab
  lengths = jnp.array([tokens], jnp.int32)

  def contender(name: str, model: Transformer) -> Contender:
    graph, leaves = split(model)
    held = [model.init_caches(method, 1, tokens)]

    def run(leaves: Any, caches: Any) -> Any:
      logits, new = join(graph, leaves).prefill(ids, lengths, caches, method)
      return logits, tuple(c.put(rows=old.rows) for c, old in zip(new, caches, strict=True))

    options = kvjax.compiler_options(model.mesh)
    jitted = jax.jit(run, donate_argnums=1, compiler_options=options)
    compiled = jitted.lower(leaves, held[0]).compile()
    logits, held[0] = compiled(leaves, held[0])
    output = np.asarray(logits)

    def seconds() -> float:
      taken, (_, held[0]) = clocked(compiled, leaves, held[0])
      return taken

    temporary = compiled.memory_analysis().temp_size_in_bytes
    return Contender(name, seconds, lambda: output, {"GB": temporary / 1e9})

  whole, parts = "1 device", f"{n} devices"
  contenders = contender(whole, model), contender(parts, parallel.shard(model, mesh))
  return Case(
    name=label,
    shapes=f"{model.config.layers} layers, {model.dtype.name}",
    bytes=model.weight_bytes(),
    reference=contenders[0].output,
    tolerance=0.1 if model.dtype == jnp.bfloat16 else 1e-4,
    contenders=contenders,
    subject=parts,
    figures=lambda _: {f"{each.name}, temporary, GB": each.figures["GB"] for each in contenders},
  )


def stopping(
  label: str, model: Transformer, name: str, batch: int, tokens: int, programs: list[tuple]
) -> Case:
  """Decode steps of a model that only several devices hold, under a method with and without ART."""
  mesh, (method, art) = model.mesh, pair(name, tokens)
  assert mesh is not None
  held = [[e2e.filled(model, each, batch, tokens)] for each in (method, art)]
  leaves = split(model)[1]
  contenders = [
    e2e.loop(each, *program, leaves, caches, checked=True)
    for each, program, caches in zip((name, f"ART({name})"), programs, held, strict=True)
  ]
  plain, early = (contender.output for contender in contenders)
  contenders[1] = dataclasses.replace(contenders[1], output=None)  # said below the table instead
  width, summands = model.config.dim, 2 * model.config.layers
  chains = reductions(mesh, batch, width, model.dtype)
  # Of one device. A step reads single rows of the embedding.
  embedding = model.embedding[...].addressable_shards[0].data.nbytes
  weight_bytes = model.weight_bytes() - (0 if model.config.tie_embeddings else embedding)
  slots = [cache.slots[part] for cache in held[0][0] for part in ("k", "v")]
  kept = [x.addressable_shards[0].data for x in slots]
  kv_bytes = sum(x.nbytes for x in kept)
  del kept, slots  # the steps donate them

  def figures(seconds: dict[str, float]) -> dict[str, float]:
    read = (weight_bytes + kv_bytes) / this_device().read
    over = {
      f"over bytes of a device + {summands} all-reduces{kind}": seconds[name]
      / (read + summands * one)
      for kind, one in all_reduces(chains, seconds)
    }
    apart = np.linalg.norm(early() - plain()) / np.linalg.norm(plain())
    return over | {"ART's logits apart": float(apart)}

  return Case(
    name=label,
    shapes=f"{model.config.layers} layers, {weight_bytes / 1e9:.2f} GB of weights and "
    f"{kv_bytes / 1e9:.2f} GB of keys and values a device, {model.dtype.name}; {method!r}",
    bytes=weight_bytes + kv_bytes,
    reference=plain,  # itself: one device does not hold the model
    tolerance=0.0,
    contenders=(*contenders, *chains),
    subject=name,
    figures=figures,
  )


def reductions(mesh: Mesh, batch: int, width: int, dtype: Any) -> list[Contender]:
  """CHAIN all-reduces, each of the last one's result: compiled as steps are, and as XLA would."""

  def chain(x: jax.Array) -> jax.Array:
    def once(_: Any, x: jax.Array) -> jax.Array:
      return jax.lax.psum(x, sharding.HEADS) * jnp.asarray(1 / mesh.size, x.dtype)

    return jax.lax.fori_loop(0, CHAIN, once, x)

  everywhere = PartitionSpec()
  x = jax.device_put(jnp.ones((batch, width), dtype), jax.NamedSharding(mesh, everywhere))
  run = sharding.shard_map(chain, mesh, everywhere, everywhere)
  options = kvjax.compiler_options(mesh)
  kinds = {"": options, BY_XLA: {}} if options else {"": {}}
  name = f"{CHAIN} all-reduces"
  return [
    jax_contender(name + kind, run, [(x,)], calls=8, options=how) for kind, how in kinds.items()
  ]


def all_reduces(chains: list[Contender], seconds: dict[str, float]) -> Iterator[tuple[str, float]]:
  """The kind of each chain, and seconds of an all-reduce."""
  for chain in chains:
    yield chain.name.removeprefix(f"{CHAIN} all-reduces"), seconds[chain.name] / CHAIN


def attention(label: str, batch: int, tokens: int, n: int, dtype: Any) -> Case:
  """One layer's decode attention with the slots over n devices, and on one device."""
  heads, groups, size = 8, 4, 128
  method, mesh = kvjax.Full(), kvjax.make_mesh(slots=n)
  spec = kvjax.CacheSpec(batch, tokens, heads, groups, size, 1, dtype)
  cache = holding(method, spec, tokens)
  q = jax.random.normal(jax.random.key(1), (batch, heads, groups, size), dtype)

  def attend(env: kvjax.Env, q: jax.Array, cache: kvjax.Cache) -> jax.Array:
    at = method.at(env, 0)
    return method.attend(at, cache, sight.visible(at, cache), q).state.o

  env, everywhere = kvjax.Env(1), PartitionSpec()
  specs = sharding.cache_specs(cache, method)
  over = functools.partial(attend, sharding.on_mesh(env, mesh))
  run = sharding.shard_map(over, mesh, (everywhere, specs), everywhere)
  spread = jax.device_put((q, cache), sharding.named(mesh, (everywhere, specs)))
  kwargs: Any = {"output": lambda o: o, "calls": 16, "options": kvjax.compiler_options(mesh)}
  whole = jax_contender("1 device", functools.partial(attend, env), [(q, cache)], **kwargs)
  parts = jax_contender(f"{n} devices", run, [spread], **kwargs)

  ends = jnp.zeros((batch, 1), jnp.int32), jnp.full((batch, 1), tokens, jnp.int32)
  return Case(
    name=label,
    shapes=f"q [{batch}, {heads}, {groups}, {size}], {tokens // n} slots a device, "
    f"{jnp.dtype(dtype).name}",
    bytes=2 * cache.slots["k"].nbytes,
    reference=lambda: reference(q, cache.slots["k"], cache.slots["v"], *ends),
    tolerance=1e-2 if dtype == jnp.bfloat16 else 1e-4,
    contenders=(whole, parts),
    subject=parts.name,
  )
