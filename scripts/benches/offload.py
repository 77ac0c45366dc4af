"""endless context: a stream with its blocks in host memory, the link, the division into spans"""

import dataclasses
import functools
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import kvjax
from kvjax import Env
from kvjax.core.context import OwnRows
from kvjax.methods.ltri.evidence import LLAMA_3_8B_HEADS
from kvjax.models.decode.generate import split
from kvjax.models.io.presets import PRESETS
from kvjax.ops import offload
from kvjax.programs.suites import Case, Contender, clocked, fitting, jax_contender, named, together
from kvjax.programs.suites.e2e import TINY, decoder, drawn

STEPS = 16  # decode steps per dispatch
LAYERS = 32  # of the model that the shape is taken from
PART = 4  # of them that are run: what all of them take is that many times as much
TOKENS = 800 << 10
LENGTHS = (100 << 10, 200 << 10, 400 << 10, TOKENS - 8192)
# Of the whole stream: how long it may take, compiling included (8), and its tokens (819200).
MINUTES, LENGTH = "KVJAX_STREAM_MINUTES", "KVJAX_STREAM_TOKENS"


def cases(quick: bool, peers: bool = True, only: str = "") -> Iterator[Case]:
  """The link first, then the division of maps, then a stream at several lengths.

  The whole stream takes minutes and a hundred gigabytes of the host's memory: it is run
  where `only` asks for it by name.
  """
  makers = {"link": link, "spans": division, "stream": stream, "whole stream": whole}
  for name, make in makers.items():
    if only in name and (quick or name != "whole stream" or "whole" in only):
      yield from fitting(name, make, quick)


def link(name: str, quick: bool) -> Case:
  """Sixteen blocks of keys and values out of a store of a gigabyte, and four into it."""
  heads, blocks, tokens, head_dim = (2, 8, 8, 16) if quick else (8, 4096, 128, 128)
  dtype, count = jnp.bfloat16, 4 if quick else 16
  held = [offload.empty(1, heads, blocks, tokens, head_dim, dtype)]
  shape = (1, heads, count, tokens, head_dim)
  new = {n: jax.random.normal(jax.random.key(i), shape, dtype) for i, n in enumerate(("k", "v"))}
  of_block = 2 * heads * tokens * head_dim * jnp.dtype(dtype).itemsize

  def append(store, new, first):
    after = first.astype(jnp.float32)
    whole = jnp.full_like(first, count)
    return offload.settled(offload.append(store, new, first, whole, Env(1), after))

  write = jax.jit(append, donate_argnums=0)
  where = jnp.zeros(1, jnp.int32)
  held[0] = write(held[0], new, where)
  ids = place = jnp.arange(count, dtype=jnp.int32)[None]
  empty = jnp.zeros((1, heads, count * tokens, head_dim), dtype)
  copies = {"k": empty, "v": empty}

  @jax.jit
  def read(store, ids):
    def again(i, copies):
      return offload.fetch(store, (ids + i * count) % blocks, copies, place, Env(1))

    return lax.fori_loop(0, 16, again, copies)

  def fetching() -> float:
    jax.block_until_ready(read(held[0], ids))
    return clocked(read, held[0], ids)[0] / 16

  def append_all(store: Any) -> Any:
    for _ in range(8):
      store = write(store, new, where)
    return store

  def appending() -> float:
    taken, held[0] = clocked(append_all, held[0])
    return taken / 8

  def copying() -> float:
    """Time of `device_put` of the same bytes: the runtime's own copy over the link."""
    pieces = [x[:, :, :count] for x in jax.tree.leaves(new)]
    kind = "pinned_host" if offload.on_host() else None
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
    here = [jax.device_put(x, place) for x in pieces]
    back = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    jax.block_until_ready(jax.device_put(here, back))
    return clocked(jax.device_put, here, back)[0]

  fetch = jax.jit(lambda store, ids: offload.fetch(store, ids, copies, place, Env(1)))
  want = np.asarray(new["k"], np.float32).reshape(empty.shape)

  def figures(seconds: dict[str, float]) -> dict[str, float]:
    return {f"{n}, GB/s": count * of_block / s / 1e9 for n, s in seconds.items()}

  return Case(
    name=name,
    shapes=f"{count} blocks of {of_block / 1024:.0f} KiB, {heads} heads, {dtype.__name__}",
    bytes=count * of_block,
    reference=lambda: want,
    tolerance=0.0,
    contenders=(
      Contender("fetch", fetching, lambda: np.asarray(fetch(held[0], ids)["k"], np.float32)),
      Contender("append", appending),
      Contender("device_put", copying),
    ),
    subject="fetch",
    figures=figures,
  )


def division(name: str, quick: bool) -> Case:
  """The maps of a block, of one layer and of all layers, into spans."""
  size, layers = (16, 2) if quick else (128, LAYERS)
  maps = jnp.tril(jax.random.uniform(jax.random.key(0), (layers, 1, 1, 1, 1, size, size)))
  method = kvjax.Ltri()
  caches = method.init_caches(kvjax.CacheSpec(1, 1, 1, 1, 2, layers))

  def every(impl, maps):
    at = method.at(Env(layers, impl=impl), 0)
    divided = [method.divide(at, *each, None)[:3] for each in zip(caches, maps, strict=True)]
    return jnp.stack([jnp.stack(each) for each in divided])

  reference = jax.jit(functools.partial(every, "reference"))
  ours = functools.partial(every, "pallas" if quick else "auto")
  how: dict[str, Any] = {"calls": 2, "output": lambda x: x}

  return Case(
    name=name,
    shapes=f"a map of {size} x {size} in each of {layers} layers, float32",
    bytes=maps.nbytes,
    reference=lambda: np.asarray(reference(maps), np.float32),
    tolerance=0.0,
    contenders=(jax_contender("divide", ours, [(maps,)], **how),),
    subject="divide",
  )


def stream(name: str, quick: bool) -> Case:
  """Chunks of a prompt and decode steps at several lengths of the context before them."""
  part = 2 if quick else PART
  model, method = _model(quick, part)
  config = model.config
  lengths = (200, 400) if quick else LENGTHS
  spec = model.spec(1, 512 if quick else TOKENS)
  caches = method.init_caches(spec)
  bytes_of = _bytes(caches)
  held = [caches]
  leaves = split(model)[1]
  draw = np.random.default_rng(0)
  tokens = _drawn_tokens(draw, config.vocab, method.chunk)
  valid = jnp.full(1, method.chunk, jnp.int32)
  token, count = jnp.zeros(1, jnp.int32), jnp.int32(STEPS)
  ahead = dataclasses.replace(method, prefetch=True)

  program = functools.partial(_compiled, model, caches)
  chunk, decode = (_chunk, tokens, valid), (_decode, token, count)
  read, read_plainly, read_ahead, say, say_plainly = together(
    [
      program(method, "auto", *chunk),
      program(method, "reference", *chunk),
      program(ahead, "auto", *chunk),
      program(method, "auto", *decode),
      program(method, "reference", *decode),
    ]
  )
  temporary: list[int] = [x.memory_analysis().temp_size_in_bytes for x in (read, say)]

  # A short real stream, which fills the window, the copies and the first blocks.
  began, memory = time.perf_counter(), []
  start = 4 if quick else 24
  for _ in range(start):
    logits, held[0] = read(leaves, held[0], tokens, valid)
  jax.block_until_ready(logits)
  rate = start * method.chunk / (time.perf_counter() - began)

  def at(length: int) -> None:
    """Counters as if `length` tokens had been read; what stands in blocks is whatever it is."""
    held[0] = tuple(_moved(method, cache, length) for cache in held[0])

  def timed(program: Any, length: int, *arguments: Any, per: int) -> float:
    at(length)
    taken, (_, held[0]) = clocked(program, leaves, held[0], *arguments)
    memory.append(_in_use())
    return taken / per

  fetched: dict[str, list[float]] = {"": [], " ahead": []}

  def timed_chunk(program: Any, length: int, how: str) -> float:
    """Of new tokens, and as if every block had vectors of its own: it wants others than before."""
    held[0] = tuple(_stirred(cache, i) for i, cache in enumerate(held[0]))
    old = [np.asarray(cache.rows["held"][0]) for cache in held[0]]
    new = _drawn_tokens(draw, config.vocab, method.chunk)
    taken = timed(program, length, new, valid, per=1)
    now = [np.asarray(cache.rows["held"][0]) for cache in held[0]]
    fetched[how].append(float(np.mean([len(np.setdiff1d(*x)) for x in zip(now, old, strict=True)])))
    return taken

  def without_stores() -> tuple[kvjax.Cache, ...]:
    return tuple(
      dataclasses.replace(c, heads={n: x for n, x in c.heads.items() if n != "store"})
      for c in held[0]
    )

  before = jax.tree.map(jnp.copy, without_stores())

  def logits_of(which: tuple[Any, Any]) -> np.ndarray:
    """Of a chunk and of a token after it, from the same state but for what blocks hold."""
    found, same = [], jax.tree.map(jnp.copy, before)
    held[0] = tuple(
      c.put(heads={"store": now.heads["store"]}) for c, now in zip(same, held[0], strict=True)
    )
    arguments: tuple[Any, ...]
    for run, arguments in zip(which, ((tokens, valid), (token, jnp.int32(1))), strict=True):
      at(lengths[0])
      logits, held[0] = run(leaves, held[0], *arguments)
      found.append(np.asarray(logits, np.float32))
    return np.concatenate(found)

  ends, run = (lengths[0], lengths[-1]), functools.partial
  ways = {f"chunk at {named(n)}": run(timed_chunk, read, n, "") for n in lengths}
  ways |= {f"chunk at {named(n)}, ahead": run(timed_chunk, read_ahead, n, " ahead") for n in ends}
  ways |= {f"token at {named(n)}": run(timed, say, n, token, count, per=STEPS) for n in ends}
  subject = next(iter(ways))
  # The first one stands for all: the same two programs run at every length.
  checked = {subject: run(logits_of, (read, say))}

  def figures(seconds: dict[str, float]) -> dict[str, Any]:
    chunks = [s for n, s in seconds.items() if n.startswith("chunk") and "ahead" not in n]
    early = [s for n, s in seconds.items() if "ahead" in n]
    whole = 1 if quick else LAYERS / part
    vectors = len(method.heads if quick else LLAMA_3_8B_HEADS) / len(method.heads)
    used = [x / 2**30 for x in memory if x]
    return {
      f"tokens a second in {part} layers": [method.chunk / chunks[i] for i in (0, -1)],
      f"tokens a second if all {LAYERS} layers take as much": method.chunk / (chunks[-1] * whole),
      "tokens a second of the first, all run": rate,
      "blocks fetched by a chunk, and with prefetch=True": [np.mean(x) for x in fetched.values()],
      "time with prefetch=True": [early[i] / chunks[i] for i in (0, -1)],
      "vectors, GiB": bytes_of["index"] * vectors / 2**30,
      "copies, GiB": bytes_of["held"] * whole / 2**30,
      "host, GiB": bytes_of["store"] * whole / 2**30,
      "in use, GiB": [min(used, default=0), max(used, default=0)],
      "temporary memory of a chunk and of decoding, MiB": [x / 2**20 for x in temporary],
    }

  return Case(
    name=name,
    shapes=f"{part} layers of Llama-3-8B's shape, chunks of {method.chunk}, capacity "
    f"{spec.capacity:,} tokens, {model.dtype.name}, {method}",
    bytes=sum(x.nbytes for x in leaves),
    reference=lambda: logits_of((read_plainly, say_plainly)),
    # Two ways to round to bfloat16 in every layer.
    tolerance=1e-3 if quick else 0.05,
    contenders=[Contender(label, way, checked.get(label)) for label, way in ways.items()],
    subject=subject,
    figures=figures,
  )


def whole(name: str, quick: bool) -> Case:
  """The whole stream, chunk after chunk: its rate and the memory in use all along."""
  began, minutes = time.monotonic(), float(os.environ.get(MINUTES, 8))
  total, mark = (512, 128) if quick else (int(os.environ.get(LENGTH, TOKENS)), 100 << 10)
  part = 2 if quick else min(LAYERS, _layers_that_fit(total))
  model, method = _model(quick, part)
  spec, leaves = model.spec(1, total), split(model)[1]
  held = method.init_caches(spec)
  sizes = _bytes(held)
  draw = np.random.default_rng(0)
  valid, token = jnp.full(1, method.chunk, jnp.int32), jnp.zeros(1, jnp.int32)
  tokens = _drawn_tokens(draw, model.config.vocab, method.chunk)

  program = functools.partial(_compiled, model, held, method, "auto")
  read, say = together([program(_chunk, tokens, valid), program(_decode, token, jnp.int32(STEPS))])
  print(f"  compiled after {time.monotonic() - began:.0f} s, {part} layers", flush=True)

  def token_seconds() -> float:
    """Of the second call: the first one loads what it runs."""
    nonlocal held
    for _ in range(2):
      taken, (_, held) = clocked(say, leaves, held, token, jnp.int32(STEPS))
    return taken / STEPS

  times: dict[str, float] = {}
  rates: list[float] = []  # tokens a second from mark to mark
  used: list[int] = []
  seen = 0

  def over() -> bool:
    return seen == total or time.monotonic() - began > 60 * minutes

  while True:
    start, first = time.perf_counter(), seen
    while seen < min(first + mark, total):
      for _ in range(min(25, (min(first + mark, total) - seen) // method.chunk)):
        tokens = _drawn_tokens(draw, model.config.vocab, method.chunk)
        logits, held = read(leaves, held, tokens, valid)
        seen += method.chunk
      jax.block_until_ready(logits)
      if over():
        break
    taken = time.perf_counter() - start
    rates.append((seen - first) / taken)
    used.append(_in_use())
    times[f"chunk to {named(seen)}"] = taken * method.chunk / (seen - first)
    print(
      f"  {seen:,} tokens: {rates[-1]:,.0f} a second, {used[-1] / 2**30:.3f} GiB in use",
      flush=True,
    )
    if len(rates) == 1 or over():
      times[f"token at {named(seen)}"] = token_seconds()
    if over():
      break

  def figures(seconds: dict[str, float]) -> dict[str, Any]:
    memory = [x / 2**30 for x in used[1:] or used]
    return {
      "tokens read": seen,
      "logits finite": bool(jnp.isfinite(logits).all()),
      "tokens a second to each mark": rates,
      "in use, GiB": [min(memory), max(memory)],
      "vectors, GiB": sizes["index"] / 2**30,
      "copies, GiB": sizes["held"] / 2**30,
      "host, GiB": sizes["store"] / 2**30,
    }

  return Case(
    name=name,
    shapes=f"{part} layers of Llama-3-8B's shape, chunks of {method.chunk}, {total:,} tokens, "
    f"{model.dtype.name}, {method}",
    bytes=sum(x.nbytes for x in leaves),
    reference=lambda: np.zeros(1),  # what the programs compute is checked by the case before
    tolerance=0.0,
    contenders=[Contender(n, functools.partial(times.__getitem__, n)) for n in times],
    subject=next(reversed([n for n in times if n.startswith("chunk")])),
    figures=figures,
  )


def _layers_that_fit(tokens: int) -> int:
  """Number of layers whose stores fit the host's memory and the pool of pinned memory."""
  config = PRESETS["Llama-3.1-8B"]
  of_layer = 2 * tokens * config.kv_heads * config.head_dim * 2
  pool = float(os.environ.get(offload.LIMIT, 64)) * 2**30
  found = re.search(r"MemAvailable:\s+(\d+) kB", pathlib.Path("/proc/meminfo").read_text())
  available = int(found[1]) * 1024 - (12 << 30) if found else pool
  return max(1, int(min(pool, available) // of_layer))


def _drawn_tokens(draw: np.random.Generator, vocab: int, count: int) -> jax.Array:
  return jnp.asarray(draw.integers(0, vocab, (1, count)), jnp.int32)


def _compiled(
  model: Any, caches: Any, method: Any, impl: str, function: Any, *arguments: Any
) -> Callable[[], Any]:
  """A function that compiles `_chunk` or `_decode`; caches are donated."""
  graph, leaves = split(model)

  def run(leaves: Any, caches: Any, *arguments: Any) -> Any:
    logits, caches = function(decoder(graph, leaves, impl), method, caches, *arguments)
    return logits, offload.settled(caches)

  return lambda: jax.jit(run, donate_argnums=1).lower(leaves, caches, *arguments).compile()


def _chunk(model: Any, method: Any, caches: Any, tokens: Any, valid: Any) -> Any:
  """A chunk of the prompt: logits and caches."""
  return model.prefill(tokens, valid, caches, method, past=None)


def _decode(model: Any, method: Any, caches: Any, token: Any, count: Any) -> Any:
  """`count` greedy steps: the last one's logits, and caches."""

  def step(_: Any, carry: Any) -> Any:
    caches, token, _ = carry
    logits, caches = model.decode(token, caches, method)
    return caches, jnp.argmax(logits, -1).astype(jnp.int32), logits

  first = jnp.zeros((1, model.config.vocab), jnp.float32)
  caches, _, logits = lax.fori_loop(0, count, step, (caches, token, first))
  return logits, caches


def _stirred(cache: kvjax.Cache, seed: int) -> kvjax.Cache:
  """With vectors drawn for every block, as if all had been read; nothing in other layers."""
  if "index" not in cache.rows:
    return cache
  index, found = (cache.rows[name].of for name in ("index", "found"))
  drawn = jax.random.normal(jax.random.key(seed), index["sum"].shape, jnp.float32)
  rows = {
    "index": OwnRows({"sum": drawn}),
    "found": OwnRows({"spans": jnp.ones_like(found["spans"])}),
  }
  return cache.put(rows=rows)


def _model(quick: bool, part: int) -> tuple[Any, Any]:
  """The decoder with a part of its layers, and the method with retrieval heads in their share."""
  if quick:
    small = kvjax.Ltri(8, 64, 8, 4, chunk=32, held=8, last=8, heads=((0, 1, 0.5), (1, 2, 0.4)))
    return drawn(TINY, jnp.float32), small
  share = round(len(LLAMA_3_8B_HEADS) * part / LAYERS)
  config = dataclasses.replace(PRESETS["Llama-3.1-8B"], layers=part)
  if part == LAYERS:
    return drawn(config, jnp.bfloat16), kvjax.Ltri(heads=LLAMA_3_8B_HEADS)
  heads = tuple((part - 1 - i, head, score) for i, (_, head, score) in enumerate(LLAMA_3_8B_HEADS))
  return drawn(config, jnp.bfloat16), kvjax.Ltri(heads=heads[:share], rate=(3.0,))


def _moved(method: Any, cache: kvjax.Cache, length: int) -> kvjax.Cache:
  """Counters and positions as they are after `length` tokens."""
  init, slot = method.init_tokens, jnp.arange(cache.size, dtype=jnp.int32)
  ring = cache.size - init
  pos = jnp.where(slot < init, slot, slot + (length - 1 - slot) // ring * ring)
  gone = (length - method.local - init) // method.block
  rows = {"seen": jnp.full(1, length, jnp.int32), "gone": jnp.full(1, gone, jnp.int32)}
  return cache.put(slots={"pos": jnp.broadcast_to(pos, cache.pos.shape)}, rows=rows)


def _bytes(caches: tuple[kvjax.Cache, ...]) -> dict[str, int]:
  """Bytes that stand for tokens which have left the window, by what they are."""

  def of(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))

  found = {"store": 0, "held": 0, "index": 0}
  for cache in caches:
    found["store"] += of(cache.heads["store"])
    found["held"] += cache.heads["held_k"].nbytes + cache.heads["held_v"].nbytes
    found["index"] += of([x for x in cache.rows.values() if isinstance(x, OwnRows)])
  return found


def _in_use() -> int:
  stats = jax.devices()[0].memory_stats() or {}
  return int(stats.get("bytes_in_use", 0))
