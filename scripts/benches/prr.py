"""PRR: predicted attention beside selection and its repair, against selecting first"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.ops.smoothing import Smoothed
from pallas_kernels import top_k
from pallas_kernels.quest import page_bounds
from pallas_kernels.repair import repair
from pallas_kernels.sparse_decode import sparse_decode
from pallas_kernels.speculate import speculate
from scripts.benches import Case, Contender, jax_contender

# Distinct layers: together they are past the L2 cache.
LAYERS = 4
# Share of the selected pages that were predicted, and how many more pages were (ρ).
HITS, RATIO = 0.97, 1.25
BANDWIDTH = 4.45e12
MISSES = (0, 1, 2, 4, 8, 16, 32, 64)


@dataclasses.dataclass(frozen=True)
class Setting:
  """One model's layer under Quest at one length."""

  model: str
  batch: int
  kv_heads: int
  groups: int
  slots: int
  page: int
  budget: int
  head_dim: int = 128
  dtype: str = "bfloat16"

  @property
  def name(self) -> str:
    length = f"{self.slots >> 10}K" if self.slots >= 1024 else self.slots
    return f"{self.model} B{self.batch} T{length} {self.budget}x{self.page}"

  @property
  def best(self) -> int:
    """k, pages chosen by score beside the newest."""
    return self.budget // self.page - 1

  @property
  def wide(self) -> int:
    return int(RATIO * self.best)

  def bytes(self, tokens: int) -> int:
    """Keys and values of that many tokens of every row."""
    rows = self.batch * self.kv_heads
    return rows * tokens * 2 * self.head_dim * jnp.dtype(self.dtype).itemsize

  def arrays(self, seed: int) -> dict[str, Any]:
    """One layer: queries, cache, page extremes and a predictor in motion."""
    keys = jax.random.split(jax.random.key(seed), 6)
    heads, pages = (self.batch, self.kv_heads), self.slots // self.page
    of = functools.partial(jax.random.normal, dtype=self.dtype)
    k = of(keys[1], (*heads, self.slots, self.head_dim))
    paged = k.reshape(*heads, pages, self.page, self.head_dim)
    state = (*heads, pages)
    return {
      "q": of(keys[0], (*heads, self.groups, self.head_dim)),
      "k": k,
      "v": of(keys[2], k.shape),
      "low": paged.min(3),
      "high": paged.max(3),
      "level": jax.random.normal(keys[3], state),
      "trend": jax.random.normal(keys[4], state),
      "factors": jnp.tile(jnp.array([[0.6, 0.2, 0.5]], jnp.float32), (self.batch, 1)),
      "start": jnp.zeros((self.batch, 1), jnp.int32),
      "stop": jnp.full((self.batch, 1), self.slots - 3, jnp.int32),
    }


MODELS = {"8B": (8, 4), "GLM-4-9B-like": (2, 16)}
LENGTHS = (16, 32, 64, 128, 256, 512)


def settings(quick: bool) -> Iterator[Setting]:
  if quick:
    yield Setting("tiny", 2, 2, 3, 512, 16, 96, 32)
    return
  for model, (kv_heads, groups) in MODELS.items():
    for batch in (1, 4):
      for length in LENGTHS:
        for page, budget in ((16, 1024), (16, 4096), (64, 4096)):
          yield Setting(model, batch, kv_heads, groups, length << 10, page, budget)


def cases(quick: bool, peers: bool = True, only: str = "") -> Iterator[Case]:
  """The settings of this suite, one after another, and a table of repairs."""
  for setting in settings(quick):
    if only in setting.name:
      yield case(setting, quick)
    if only in f"repair {setting.name}" and (quick or setting.slots == 128 << 10):
      yield repairs(setting, quick)


# ---- what is timed


def select(s: Setting, x: dict[str, Any]) -> tuple[Any, Any]:
  """Scores of all pages, and the table of the best."""
  scores = page_bounds(x["q"], x["low"], x["high"], x["start"], x["stop"], unit=s.page)
  return top_k.best(
    scores, x["start"], x["stop"], unit=s.page, sinks=0, local=1, k=s.best, ordered=False
  )[:2]


def attend(s: Setting, x: dict[str, Any], table: Any, count: Any) -> Any:
  where = x["start"], x["stop"]
  return sparse_decode(x["q"], x["k"], x["v"], table, count, *where, unit=s.page)


def serial(s: Setting, x: dict[str, Any]) -> Any:
  """Selection, then attention."""
  return attend(s, x, *select(s, x))[1]


def both_sets(s: Setting, both: Any, stops: Any) -> tuple[Any, Any]:
  """The best pages by score, and by forecast, in one search."""
  rows = s.batch * s.kv_heads * 2
  scores, stop = both.reshape(rows, 1, -1), stops.reshape(rows, 1)
  limit = jnp.tile(jnp.array([s.best, s.wide], jnp.int32), rows // 2)
  forced = {"unit": s.page, "sinks": 0, "local": 1}
  table, count, _ = top_k.best(
    scores, jnp.zeros_like(stop), stop, **forced, k=s.wide, limit=limit, ordered=False
  )
  heads = s.batch, s.kv_heads, 2
  return table.reshape(*heads, -1), count.reshape(heads)


def overlapped(s: Setting, x: dict[str, Any]) -> Any:
  """PRR in three launches: attention beside scoring; both searches; repair."""
  moving = (x[n] for n in ("low", "high", "level", "trend", "factors"))
  written, both, stops, *state = speculate(
    x["q"], x["k"], x["v"], x["guess"], x["stop"][:, 0], *moving, unit=s.page
  )
  table, count = both_sets(s, both, stops)
  where = x["start"], x["stop"]
  _, out, _, _ = repair(
    x["q"], x["k"], x["v"], table, count, x["guess"], *where, written, unit=s.page, stored="pieces"
  )
  return out, table, state


def updated(s: Setting, x: dict[str, Any], scores: Any) -> tuple[Any, Any]:
  """The predictor's next state, and its forecasts."""
  alpha, beta, gamma = (x["factors"][:, i, None, None] for i in range(3))
  page = jnp.arange(scores.shape[-1])
  begun, there = (page < ((x["stop"] - n) // s.page)[..., None] for n in (2, 1))
  state = Smoothed(x["level"], x["trend"]).updated(scores, alpha, beta, begun, there)
  return state, jnp.where(there, state.forecast(gamma), jnp.inf)


def update(s: Setting, x: dict[str, Any]) -> Any:
  """What prediction costs by itself: the predictor's step, and a search of its own."""
  state, ahead = updated(s, x, x["scores"])
  stop = x["stop"] + 1
  table, *_ = top_k.best(
    ahead, x["start"], stop, unit=s.page, sinks=0, local=1, k=s.wide, ordered=False
  )
  return table, state


def one_by_one(s: Setting, x: dict[str, Any]) -> Any:
  """PRR without overlap: the same work, one kernel after another."""
  where = x["start"], x["stop"]
  full = jnp.full(x["guess"].shape[:2], x["guess"].shape[2], jnp.int32)
  state, rounded = attend(s, x, x["guess"], full)
  scores = page_bounds(x["q"], x["low"], x["high"], *where, unit=s.page)
  moved, ahead = updated(s, x, scores)
  stops = jnp.broadcast_to(
    jnp.concatenate([x["stop"], x["stop"] + 1], 1)[:, None], (s.batch, s.kv_heads, 2)
  )
  table, count = both_sets(s, jnp.stack([scores, ahead], 2), stops)
  rows = s.batch * s.kv_heads
  written = [a.reshape(rows, *a.shape[2:]) for a in (state.o, state.m, state.l, rounded)]
  _, out, _, _ = repair(
    x["q"], x["k"], x["v"], table, count, x["guess"], *where, written, unit=s.page
  )
  return out, table, moved


def repaired(s: Setting, x: dict[str, Any]) -> Any:
  """The repair alone, of a finished state."""
  rows = s.batch * s.kv_heads
  o = jnp.zeros((rows, s.groups, s.head_dim), jnp.float32)
  one = jnp.ones((rows, s.groups), jnp.float32)
  where = x["start"], x["stop"]
  lists = x["table"], x["count"], x["guess"]
  written = [o, one, one, o.astype(s.dtype)]
  return repair(x["q"], x["k"], x["v"], *lists, *where, written, unit=s.page)[1]


# ---- inputs


def predicted(s: Setting, table: np.ndarray, misses: int, seed: int) -> np.ndarray:
  """A prediction that misses that many of the selected pages and names ρ·k in all."""
  rng = np.random.default_rng(seed)
  newest = (s.slots - 4) // s.page
  flat = table.reshape(-1, table.shape[-1])
  guess = np.full((flat.shape[0], s.wide + 1), -1, np.int32)
  for row, listed in enumerate(flat):
    chosen = rng.permutation(listed[listed != newest])
    kept = chosen[: max(chosen.size - misses, 0)]
    free = np.setdiff1d(np.arange(newest), chosen)
    wasted = rng.choice(free, min(s.wide - kept.size, free.size), replace=False)
    named = np.concatenate([[newest], rng.permutation(np.concatenate([kept, wasted]))])
    guess[row, : named.size] = named
  return guess.reshape(*table.shape[:2], -1)


def layers(s: Setting, quick: bool) -> list[dict[str, Any]]:
  """Distinct layers with their true selections and predictions that miss as usual."""
  make = jax.jit(s.arrays, static_argnums=())
  choose = jax.jit(functools.partial(select, s))
  misses = round((1 - HITS) * s.best)
  made = []
  for seed in range(1 if quick else LAYERS):
    x = make(seed)
    table, count = choose(x)
    scores = page_bounds(x["q"], x["low"], x["high"], x["start"], x["stop"], unit=s.page)
    guess = jnp.asarray(predicted(s, np.asarray(table), misses, seed))
    made.append(x | {"table": table, "count": count, "scores": scores, "guess": guess})
  return jax.block_until_ready(made)


def attended(s: Setting, x: dict[str, Any], lists: list[Any]) -> np.ndarray:
  """Attention over the pages of several tables together, float32, one KV head at a time."""
  q, k, v = (x[n].reshape(-1, *x[n].shape[2:]) for n in ("q", "k", "v"))
  stop = int(x["stop"][0, 0])
  outs = []
  for row in range(q.shape[0]):
    named = {int(j) for t in lists for j in np.asarray(t).reshape(q.shape[0], -1)[row] if j >= 0}
    pages = np.array(sorted(named))
    slot = (pages[:, None] * s.page + np.arange(s.page)).reshape(-1)
    slot = jnp.asarray(slot[slot < stop])
    wide = [a.astype(jnp.float32) for a in (q[row], k[row, slot], v[row, slot])]
    p = jax.nn.softmax(wide[0] @ wide[1].T * s.head_dim**-0.5, -1)
    outs.append(np.asarray(p @ wide[2]))
  return np.stack(outs).reshape(x["q"].shape)


# ---- cases


def case(s: Setting, quick: bool) -> Case:
  """One layer: serial, overlapped, one by one, and the parts of both."""
  inputs = layers(s, quick)
  first = inputs[0]
  want = attended(s, first, [first["table"]])
  union = attended(s, first, [first["table"], first["guess"]])
  calls = 2 if quick else 64
  turns = [(x.pop("q"), x) for x in [dict(x) for x in inputs]]

  def contender(name: str, run: Callable[..., Any], reference: np.ndarray | None) -> Contender:
    def of(q: Any, x: dict[str, Any]) -> Any:
      return run(s, {**x, "q": q})

    def output(result: Any) -> Any:
      got = result[0] if isinstance(result, tuple) else result
      # Each is compared with what it has to compute; the case has one reference.
      return want + (np.asarray(got, np.float32) - reference)

    shown = None if reference is None else output
    return jax_contender(name, of, turns, output=shown, calls=calls)

  def over(name: str) -> Callable[..., Any]:
    def run(s: Setting, x: dict[str, Any]) -> Any:
      count = jnp.full(x[name].shape[:2], x[name].shape[2], jnp.int32)
      return attend(s, x, x[name], count)[1]

    return run

  def beside(s: Setting, x: dict[str, Any]) -> Any:
    moving = (x[n] for n in ("low", "high", "level", "trend", "factors"))
    return speculate(x["q"], x["k"], x["v"], x["guess"], x["stop"][:, 0], *moving, unit=s.page)

  def score(s: Setting, x: dict[str, Any]) -> Any:
    return page_bounds(x["q"], x["low"], x["high"], x["start"], x["stop"], unit=s.page)

  contenders = (
    contender("prr", overlapped, union),
    contender("serial", serial, want),
    contender("prr, one by one", one_by_one, union),
    contender("select", select, None),
    contender("score", score, None),
    contender("attend", over("table"), want),
    contender("speculate", over("guess"), None),
    contender("speculate beside score", beside, None),
    contender("update", update, None),
    contender("repair", repaired, None),
    contender("top_k, lax", functools.partial(_lax_top_k), None),
  )
  pages = s.slots // s.page
  rows = s.batch * s.kv_heads
  scored = 2 * rows * pages * s.head_dim * jnp.dtype(s.dtype).itemsize
  moved = scored + s.bytes((s.wide + 1) * s.page)

  def remarks(t: dict[str, float]) -> list[str]:
    floor = moved / BANDWIDTH
    longest = max(t["select"], t["speculate"], floor)
    bound = (t["select"] + t["attend"]) / (longest + t["repair"] + t["update"])
    hidden = (t["select"] + t["attend"]) / (longest + t["repair"])
    gain, lone = t["serial"] / t["prr"], t["serial"] / t["prr, one by one"]
    apart = t["speculate"] + t["score"]
    return [
      f"serial / prr {gain:.2f}; without overlap {lone:.2f}",
      f"bound {bound:.2f} from the parts, reached {gain / bound:.2f} of it; {hidden:.2f} with the "
      "update hidden",
      f"attention and scoring: {apart * 1e6:.1f} µs apart, "
      f"{t['speculate beside score'] * 1e6:.1f} side by side, bytes {floor * 1e6:.1f}",
    ]

  return Case(
    name=s.name,
    shapes=f"q [{s.batch}, {s.kv_heads}, {s.groups}, {s.head_dim}], {s.slots} slots {s.dtype}, "
    f"{pages} pages of {s.page}, {s.best} + 1 selected, {s.wide} + 1 predicted, "
    f"{round((1 - HITS) * s.best)} missed; {len(inputs)} layers rotating",
    bytes=moved,
    reference=lambda: want,
    tolerance=1e-2,
    contenders=contenders,
    subject="prr",
    remarks=remarks,
  )


def _lax_top_k(s: Setting, x: dict[str, Any]) -> Any:
  """The search that a plain program would do."""
  return jax.lax.top_k(x["scores"], s.best)[1]


def repairs(s: Setting, quick: bool) -> Case:
  """Repair of 0 … 64 missed pages."""
  inputs = layers(s, quick)
  table = [np.asarray(x["table"]) for x in inputs]
  first = inputs[0]
  want = np.asarray(first["q"], np.float32)
  contenders = []
  for n in MISSES:
    if n > s.best:
      continue
    turns = []
    for seed, x in enumerate(inputs):
      guess = jnp.asarray(predicted(s, table[seed], n, seed))
      turns.append((x["q"], {**{m: y for m, y in x.items() if m != "q"}, "guess": guess}))

    def of(q: Any, x: dict[str, Any]) -> Any:
      return repaired(s, {**x, "q": q})

    contenders.append(jax_contender(f"{n} missed", of, turns, calls=2 if quick else 64))
  return Case(
    name=f"repair {s.name}",
    shapes=f"{s.batch * s.kv_heads} rows, G {s.groups}, pages of {s.page}, {s.best} + 1 selected",
    bytes=s.bytes(s.page),
    reference=lambda: want,
    tolerance=1e-2,
    contenders=tuple(contenders),
    subject="0 missed",
  )
