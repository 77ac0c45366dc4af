"""budgets by head: heads that share slots against heads of equal length, a kernel and steps"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.core.leaves import Layout
from kvjax.kernels.decode.dense import decode_attention
from kvjax.models.nn.transformer import Transformer
from kvjax.ops import shared_slots
from kvjax.programs.suites import Case, jax_contender, suite
from kvjax.programs.suites.decode import reference, rotated
from kvjax.testing.decode_cases import Shape
from scripts.benches import e2e_sparse
from scripts.benches._layer import holding

SHAPES = [Shape(batch, 8, 4, slots << 10) for batch in (1, 8) for slots in (1, 4, 32)]
TINY = [Shape(2, 3, 3, 200, 64, "float32")]
BUDGET, WINDOW = 4096, 32


def lengths(heads: int, mean: int) -> np.ndarray:
  """From 0.4 to 1.6 of the mean, whose sum is that of equal heads, int32 [K]."""
  found = np.round(mean * np.linspace(0.4, 1.6, heads)).astype(np.int32)
  found[-1] += heads * mean - found.sum()
  return found


@suite
def cases(quick: bool, peers: bool) -> Iterator[tuple]:
  """The decode kernel, then steps of Ada-KV."""
  for shape in TINY if quick else SHAPES:
    yield f"shared {shape.name}", kernel_case, shape, quick
  name, budget = ("tiny", 48) if quick else ("Llama-3.1-8B", BUDGET)
  for batch in (2,) if quick else (1, 8):
    yield f"AdaKV {name} B{batch} {budget} slots", step_case, name, batch, budget, quick


def kernel_case(title: str, shape: Shape, quick: bool) -> Case:
  """Attention over as many slots, in heads of 0.4 to 1.6 of the mean and in equal ones.

  Equal heads share slots once more: what that takes beside `equal heads` is what sharing costs, and
  what `shared` takes beside it is what unequal lengths do.
  """
  equal, calls = rotated(shape, quick)
  own = lengths(shape.kv_heads, shape.slots)
  even = np.full_like(own, shape.slots)
  pools = [[shared_slots.pooled(x, shape.kv_heads) for x in (k, v)] for _, k, v, *_ in equal]

  def spans(held: np.ndarray) -> list[tuple[Any, ...]]:
    """Operands whose heads hold so many slots, one after another."""
    stop = jnp.broadcast_to(jnp.asarray(np.cumsum(held), jnp.int32), equal[0][0].shape[:2])
    return [(q, *pool, stop - held, stop) for (q, *_), pool in zip(equal, pools, strict=True)]

  shared, name = spans(own), "equal heads, shared"
  contenders = (
    jax_contender("shared", decode_attention, shared, output=lambda s: s.o, calls=calls),
    jax_contender("equal heads", decode_attention, equal, calls=calls),
    jax_contender(name, decode_attention, spans(even), calls=calls),
  )
  return Case(
    name=title,
    shapes=f"heads of {own.tolist()} slots, {shape.dtype}, {len(equal)} rotating",
    bytes=shape.kv_bytes(),
    reference=lambda: by_head(*shared[0]),
    tolerance=1e-5 if shape.dtype == "float32" else 1e-2,
    contenders=contenders,
    subject="shared",
  )


def by_head(q: Any, k: Any, v: Any, start: Any, stop: Any) -> np.ndarray:
  """Each head's attention over its own part of the shared slots, float32 [B, K, G, H]."""
  k, v = (jnp.broadcast_to(x, (*q.shape[:2], *x.shape[2:])) for x in (k, v))
  return reference(q, k, v, start, stop)


def step_case(title: str, name: str, batch: int, budget: int, quick: bool) -> Case:
  """A step of Ada-KV with heads of 0.4 to 1.6 of the budget, and one of SnapKV, whose are equal."""
  base = kvjax.SnapKV(budget, min(WINDOW, budget // 4))
  ways = {"kvjax": kvjax.AdaKV(base), "SnapKV": base}

  return e2e_sparse.case(title, name, ways, batch, 2 * budget, quick, filled=caches)


def caches(model: Transformer, method: Any, batch: int, tokens: int) -> Any:
  """Caches of random tokens, all layers alike, whose heads are full and past their prompt."""
  spec = model.spec(batch, tokens)
  cache = holding(method, spec, jnp.int32(tokens))
  base = getattr(method, "base", method)
  length = np.full(spec.kv_heads, base.budget, np.int32)
  heads = {}
  if cache.layout is Layout.SHARED:
    length = lengths(spec.kv_heads, base.budget)
    heads["place"] = np.stack([np.cumsum(length) - length, length], -1)
  heads["ring"] = np.stack([length - base.window_size, np.full_like(length, tokens)], -1)
  full = {n: jnp.broadcast_to(jnp.asarray(x), (batch, *x.shape)) for n, x in heads.items()}
  used = jnp.full(batch, base.budget, jnp.int32)
  pos = jnp.arange(cache.size, dtype=jnp.int32) % tokens  # of heads that share slots too, all full
  held = {"pos": jnp.broadcast_to(pos, cache.pos.shape)}
  cache = cache.put(slots=held, heads=full, rows={"used": used})
  return tuple(jax.tree.map(jnp.copy, cache) for _ in range(spec.layers))
