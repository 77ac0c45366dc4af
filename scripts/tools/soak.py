"""For developers: decode long under every method that evicts, checking the cache each step.

    python -m scripts.tools.soak                             50,000 steps of each, minutes on a CPU
    python -m scripts.tools.soak --steps 500 --methods h2o   a look

Random tokens go through a tiny random model. After each step, on every layer, row and head: the
kept positions are distinct tokens that have been seen, no more of them than the cache has slots,
the newest among them where the method keeps it, and nothing is NaN or infinite. Over the whole run:
one trace, the same live arrays, and no growth of the process.
"""

import dataclasses
import functools
import pathlib
import resource
import sys
import time
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

import kvjax
from kvjax.kernels.common.devices import slug
from kvjax.models.decode.generate import join, split
from kvjax.models.nn.config import ModelConfig
from kvjax.models.nn.transformer import Transformer
from kvjax.ops import shared_slots
from kvjax.programs import common, console

CONFIG = ModelConfig(
  vocab=64, dim=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=64, max_context=65536
)
BATCH, BUDGET, PROMPT, CHUNK = 2, 64, 48, 250
GROWTH = 32 << 20  # bytes that a process may grow by: pools that fill, not leaks
CHECKS = ("distinct", "seen", "within the slots", "as many as counted", "finite")


@dataclasses.dataclass(frozen=True)
class Args:
  methods: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")] = ()
  """Registered methods, or module:Class; all that evict by default."""
  steps: int = 50_000
  """Decode steps of each, in whole hundreds."""
  out: pathlib.Path | None = None
  """Write <device>/soak.json there, scripts/results say."""


def evicting() -> tuple[str, ...]:
  """Methods whose slots are reused for any number of tokens."""
  examples = {name: kvjax.settings.example(cls, BUDGET) for name, cls in kvjax.METHODS.items()}
  traits = {name: method.traits for name, method in examples.items()}
  return tuple(n for n, x in traits.items() if not x.positional and x.stream is None)


def broken(cache: kvjax.Cache, logits: jax.Array) -> jax.Array:
  """True for those of `CHECKS` that a layer's cache fails, bool [5]."""
  pos, seen = shared_slots.by_head(cache)["pos"], cache.seen[:, None, None]
  shared = shared_slots.sharers(cache) > 1  # heads hold `used` tokens on average
  held = pos >= 0
  ordered = jnp.sort(pos, -1)
  twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
  finite = [jnp.isfinite(x).all() for x in (cache.slots["k"], cache.slots["v"], logits)]
  # A statistic may be infinite (a token that is ranked before all others), never NaN.
  known = [~jnp.isnan(x).any() for x in jax.tree.leaves(cache) if x.dtype == jnp.float32]
  return jnp.stack(
    [
      twice.any(),
      (held & (pos >= seen)).any(),
      (cache.used > cache.size).any(),
      (held.mean(1).sum(-1) != cache.used if shared else held.sum(-1) != cache.used[:, None]).any(),
      ~jnp.stack(finite + known).all(),
    ]
  )


def run(name: str, steps: int) -> dict[str, Any]:
  """One method's run; its first broken step if there is one."""
  method = kvjax.settings.example(kvjax.find_method(name), BUDGET)
  model = Transformer(CONFIG, dtype=jnp.float32, impl="reference", rngs=nnx.Rngs(0))
  graph, leaves = split(model)
  traces = 0

  @functools.partial(jax.jit, donate_argnums=1)
  def chunk(leaves: Any, caches: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
    nonlocal traces
    traces += 1
    decoder = join(graph, leaves)

    def step(caches: Any, token: jax.Array) -> tuple[Any, jax.Array]:
      logits, caches = decoder.decode(token, caches, method)
      return caches, jnp.stack([broken(cache, logits) for cache in caches]).any(0)

    return jax.lax.scan(step, caches, tokens)

  rng = np.random.default_rng(0)
  prompt = jnp.asarray(rng.integers(0, CONFIG.vocab, (BATCH, PROMPT)), jnp.int32)
  lengths = jnp.array([PROMPT, PROMPT // 2], jnp.int32)
  caches = method.init_caches(model.spec(BATCH, PROMPT + steps))
  slots = [cache.size for cache in caches]
  read = jax.jit(
    lambda leaves, caches: join(graph, leaves).prefill(prompt, lengths, caches, method)
  )
  _, caches = read(leaves, caches)
  began, after_first, failures = time.perf_counter(), None, []
  for start in range(0, steps, CHUNK):
    tokens = rng.integers(0, CONFIG.vocab, (CHUNK, BATCH))
    caches, wrong = chunk(leaves, caches, jnp.asarray(tokens, jnp.int32))
    wrong = np.asarray(wrong)
    if wrong.any():
      step, check = np.argwhere(wrong)[0]
      failures.append(f"step {start + step}: not {CHECKS[check]}")
      break
    if start == 8 * CHUNK:
      after_first = (len(jax.live_arrays()), _resident())
  seconds = time.perf_counter() - began
  if traces != 1:
    failures.append(f"{traces} traces, expected 1")
  if [cache.size for cache in caches] != slots:
    failures.append("the caches' arrays changed shape")
  if after_first is not None:
    arrays, resident = len(jax.live_arrays()), _resident()
    if arrays > after_first[0]:
      failures.append(f"{arrays} live arrays, {after_first[0]} of them at the beginning")
    if resident - after_first[1] > GROWTH:
      failures.append(f"the process grew by {(resident - after_first[1]) / 1e6:.0f} MB")
  return {
    "method": repr(method),
    "steps": steps,
    "slots": slots,
    "seconds": round(seconds, 1),
    "failures": failures,
  }


def _resident() -> int:
  """Bytes that the process has in memory."""
  try:
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
  except OSError:  # not Linux: the most that it ever had
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(args: Args) -> None:
  names = args.methods or evicting()
  for name in names:
    kvjax.find_method(name, "--methods")
  if args.steps < 1 or args.steps % CHUNK:
    raise ValueError(f"--steps: found {args.steps}, expected a multiple of {CHUNK}")
  rows = []
  for name in names:
    common.drop_programs()
    with console.step(f"{name}: {args.steps:,} steps"):
      rows.append({"name": name, **run(name, args.steps)})
    jax.clear_caches()
    if args.out:
      folder = args.out / slug(jax.devices()[0].device_kind)
      common.write(folder / "soak.json", {"jax": jax.__version__, "methods": rows})
  table = [
    (
      row["name"],
      f"{row['steps']:,}",
      f"{row['seconds']:.0f}",
      "; ".join(row["failures"]) or "held",
    )
    for row in rows
  ]
  print(console.table(("method", "steps", "seconds", "invariants"), table, left=(0, 3)))
  if any(row["failures"] for row in rows):
    sys.exit(1)


if __name__ == "__main__":
  common.run(main, Args)
