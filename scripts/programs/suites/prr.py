"""PRR: predicted attention beside selection and its repair, against selecting first"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import PRR, Cache, Carry, Env, InfLLMv2, Plan, Quest, Selective, Span
from kvjax.families import sight
from kvjax.kernels.common import backend
from kvjax.kernels.common.devices import this_device
from kvjax.kernels.prr.repair import repair
from kvjax.methods.prr.calibration import GAMMAS, grid
from kvjax.methods.prr.forecast import Smoothed
from kvjax.methods.prr.kernel import Written
from kvjax.programs import suites
from kvjax.programs.suites import Case, Contender, jax_contender, optional, suite, together
from kvjax.programs.suites.sparse import BLOCK_SPARSE, flashinfer

# Distinct layers: together they are past the L2 cache.
LAYERS = 4
# ρ, and the shares of the selected pages that a prediction hits and that the last step's does: the
# paper's, since queries of chance have no likeness from step to step.
RATIO, HITS, REUSED = 1.25, 0.97, 0.68
MISSES = (0, 1, 2, 4, 8, 16, 32, 64)
ENV = Env(1, impl="pallas")


@dataclasses.dataclass(frozen=True)
class Setting:
  """One model's layer under Quest or InfLLM-v2 at one length.

  Attributes:
    page: tokens of a page, or of a block.
    budget: tokens that are chosen by score; of Quest's, the newest page is one.
  """

  model: str
  batch: int
  kv_heads: int
  groups: int
  slots: int
  page: int
  budget: int
  head_dim: int = 128
  dtype: str = "bfloat16"
  selector: str = "Quest"

  @property
  def name(self) -> str:
    under = "" if self.selector == "Quest" else f" {self.selector}"
    sizes = f"B{self.batch} T{suites.named(self.slots)} {self.budget}x{self.page}"
    return f"{self.model}{under} {sizes}"

  @property
  def base(self) -> Selective:
    if self.selector == "Quest":
      return Quest(self.budget, self.page, dense_layers=0)
    local = min(2048, self.slots // 4)
    return InfLLMv2(self.budget // self.page, self.page, local=local, dense_below=0)

  def prr(self, variant: str = "S3", ratio: float = RATIO) -> PRR:
    return PRR(self.base, budget=ratio, variant=variant)

  def bytes(self, tokens: int) -> int:
    """Keys and values of that many tokens of every row."""
    rows = self.batch * self.kv_heads
    return rows * tokens * 2 * self.head_dim * jnp.dtype(self.dtype).itemsize

  def arrays(self, seed: int) -> tuple[Any, Cache]:
    """A query, and the cache of a layer under PRR, three slots short of full."""
    keys = jax.random.split(jax.random.key(seed), 5)
    heads, pages = (self.batch, self.kv_heads), self.slots // self.page
    of = functools.partial(jax.random.normal, dtype=self.dtype)
    k = of(keys[1], (*heads, self.slots, self.head_dim))
    paged = k.reshape(*heads, pages, self.page, self.head_dim)
    if self.selector == "Quest":
      summaries = {"key_min": paged.min(3), "key_max": paged.max(3)}
    else:  # means of 32 keys, one every 16
      half = k.reshape(*heads, -1, 16, self.head_dim).mean(3)
      summaries = {"compressed": (half[:, :, :-1] + half[:, :, 1:]) / 2}
    tokens, none = self.slots - 3, jnp.full((*heads, 1), -1, jnp.int32)
    pos = jnp.arange(self.slots, dtype=jnp.int32)
    heads_shelf = {
      **summaries,
      "level": jax.random.normal(keys[3], (*heads, pages)),
      "trend": jax.random.normal(keys[4], (*heads, pages)),
      "foreseen": none,
      "selected": none,
    }
    seen = jnp.full((self.batch,), tokens, jnp.int32)
    factors = jnp.tile(jnp.array([[0.6, 0.2, 0.5]], jnp.float32), (self.batch, 1))
    cache = Cache(
      slots={
        "k": k,
        "v": of(keys[2], k.shape),
        "pos": jnp.broadcast_to(jnp.where(pos < tokens, pos, -1), k.shape[:3]),
      },
      heads=heads_shelf,
      rows={"seen": seen, "used": seen, "factors": factors},
    )
    return of(keys[0], (*heads, self.groups, self.head_dim)), cache


MODELS = {"8B": (8, 4), "GLM-4-9B-like": (2, 16)}
LENGTHS = (16, 32, 64, 128, 256, 512)
TINY = Setting("tiny", 1, 2, 3, 256, 16, 96, 32)


def settings(quick: bool) -> Iterator[Setting]:
  if quick:
    yield TINY
    return
  # What matters most comes first: all of it takes an hour.
  for (page, budget), batch, (model, (kv_heads, groups)), length in itertools.product(
    ((16, 1024), (16, 4096), (64, 4096)), (1, 4), MODELS.items(), (128, 32, 512, 16, 64, 256)
  ):
    yield Setting(model, batch, kv_heads, groups, length << 10, page, budget)


def calibrated(quick: bool) -> list[Setting]:
  """The paper's example, 16K tokens (§4.2), and a long prompt."""
  if quick:
    return [TINY]
  return [Setting("8B", 1, *MODELS["8B"], length << 10, 16, 1024) for length in (16, 128)]


# What a profile is made of (`kvjax.programs.tune prr`): lengths of one model, and how much is
# predicted.
PROFILED = tuple(
  Setting("8B", batch, *MODELS["8B"], length << 10, page, budget, selector=selector)
  for batch in (1, 4)
  for selector, page, budget in (
    ("Quest", 16, 1024),
    ("Quest", 16, 4096),
    ("Quest", 64, 4096),
    ("InfLLM-v2", 64, 4096),
  )
  for length in (4, 8, *LENGTHS)
  if budget < length << 10
)
# By ρ, the share of the selected pages that a forecast hits on SmolLM2 over Quest, those that are
# read anyway left out (`scripts.studies.hit_rates`; at ρ = 2 as far above 1.5 as that is above
# 1.25).
PROFILED_HITS = {1.0: 0.84, 1.25: 0.915, 1.5: 0.95, 2.0: 0.985}


@suite
def cases(quick: bool, peers: bool) -> Iterator[tuple]:
  """Cases of a prompt, the settings of this suite one after another, and tables of repairs."""
  for setting in calibrated(quick):
    yield f"calibration {setting.name}", calibration, setting, quick
  for setting in settings(quick):
    yield setting.name, case, setting, quick, peers
    if quick or setting.slots == 128 << 10:
      yield f"repair {setting.name}", repairs, setting, quick


# ---- what is timed: moves of the methods, as a decode step calls them


@dataclasses.dataclass(frozen=True)
class Apart(PRR):
  """The same method, whose searches are not joined in one launch."""

  def _together(self, at: Any) -> bool:
    return False


def step(method: Any, bounds: Any, q: Any, cache: Cache) -> Any:
  """Selection, attention and bookkeeping of one layer.

  It renews the bounds of a page, unless the kernel that enters the page's token does.
  """
  at, cache = method.at(ENV, 0), cache.put(heads=bounds)
  plan, attended, _ = method.plan_and_attend(at, cache, q, sight.visible(at, cache), Carry())
  after, _ = method.observe(at, cache, q, plan, attended)
  changed = {name: x for name, x in after.heads.items() if x is not cache.heads[name]}
  out = attended.state.o.astype(q.dtype) if attended.out is None else attended.out
  return {name: changed.pop(name, x) for name, x in bounds.items()}, (out, *changed.values())


def stepping(name: str, run: Callable, turns: list[tuple], **how: Any) -> Contender:
  """A step over layers in turn, each with summaries of its own."""
  names = {"key_min", "key_max", "compressed"} & set(turns[0][1].heads)
  bounds = [{n: cache.heads[n] for n in sorted(names)} for _, cache in turns]
  return suites.looped_contender(name, run, bounds, turns, **how)


def select(method: Any, q: Any, cache: Cache) -> Any:
  """The plan alone."""
  at = method.at(ENV, 0)
  plan, _ = method.plan(at, cache, q, sight.visible(at, cache), Carry())
  return plan.table, plan.count


def score(method: Any, q: Any, cache: Cache) -> Any:
  at = method.at(ENV, 0)
  return method.score(at, cache, q, sight.visible(at, cache))


def attend(method: Any, q: Any, cache: Cache, name: str) -> Any:
  """Attention alone, over the pages listed in a leaf of the cache."""
  return method.attend(method.at(ENV, 0), cache, listed(method.tiles.unit, cache, name), q).out


def listed(unit: int, cache: Cache, name: str) -> Plan:
  table, stop = cache.heads[name], cache.used[:, None]
  count = (table >= 0).sum(-1, dtype=jnp.int32)
  return Plan(Span(jnp.zeros_like(stop), stop), table, count, unit=unit)


def beside(method: PRR, q: Any, cache: Cache) -> Any:
  """Attention over the prediction and all scores, in one launch."""
  guess = listed(method.base.tiles.unit, cache, "foreseen")
  at = method.at(ENV, 0)
  found = method._beside(at, cache, sight.visible(at, cache), guess, q)
  assert found.early is not None
  written = found.early.noted(Written)
  assert written is not None
  return written.parts, found.both


def update(method: PRR, q: Any, cache: Cache) -> Any:
  """The predictor's step and the next prediction by themselves, from scores that are there."""
  new, ahead = method._predictor.advanced(cache, cache.heads["scores"] * q[:, :, 0, :1])
  foreseen = method._foreseen(method.at(ENV, 0), cache, new, ahead)
  return [foreseen.state.level, foreseen.state.trend, foreseen.table]


def repaired(method: PRR, q: Any, cache: Cache) -> Any:
  """The repair alone, of a finished state."""
  plan = listed(method.base.tiles.unit, cache, "true")
  state = [cache.heads[name] for name in ("o", "m", "l", "out")]
  run = functools.partial(repair, unit=plan.unit)
  guess, span = cache.heads["foreseen"], plan.span
  operands = (cache.slots[n] for n in ("k", "v"))
  return run(q, *operands, plan.table, guess, span.start, span.stop, state)[1]


# ---- inputs


def predicted(s: Setting, table: np.ndarray, hits: float, named: int, seed: int) -> np.ndarray:
  """A prediction of `named` pages beside those always read that hits a share of the selected."""
  rng = np.random.default_rng(seed)
  newest, (sinks, local) = (s.slots - 4) // s.page, s.base.tiles.forced
  always = [*range(sinks), *range(newest - local + 1, newest + 1)]
  flat = table.reshape(-1, table.shape[-1])
  guess = np.full((flat.shape[0], named + len(always)), -1, np.int32)
  for row, tiles in enumerate(flat):
    chosen = rng.permutation(tiles[~np.isin(tiles, always) & (tiles >= 0)])
    kept = chosen[: round(hits * chosen.size)]
    free = np.setdiff1d(np.arange(newest), [*chosen, *always])
    wasted = rng.choice(free, min(named - kept.size, free.size), replace=False)
    both = [*always[::-1], *rng.permutation(np.concatenate([kept, wasted]))]
    guess[row, : len(both)] = both
  return guess.reshape(*table.shape[:2], -1)


def layers(s: Setting, quick: bool) -> list[tuple[Any, Cache, np.ndarray]]:
  """Distinct layers, and the pages that each selects."""
  make, choose = jax.jit(s.arrays), jax.jit(functools.partial(select, s.base))
  made = []
  for seed in range(1 if quick else LAYERS):
    q, cache = make(seed)
    made.append((q, cache, np.asarray(choose(q, cache)[0])))
  return made


def attended(s: Setting, q: Any, cache: Cache, lists: list[np.ndarray]) -> np.ndarray:
  """Attention over the pages of several tables together, float32, one KV head at a time."""
  rows = s.batch * s.kv_heads
  flat = [x.reshape(rows, *x.shape[2:]) for x in (q, cache.slots["k"], cache.slots["v"])]
  outs = []
  for row in range(rows):
    pages = np.unique(np.concatenate([t.reshape(rows, -1)[row] for t in lists]))
    slot = (pages[pages >= 0, None] * s.page + np.arange(s.page)).reshape(-1)
    slot = jnp.asarray(slot[slot < s.slots - 3])
    wide = [x.astype(jnp.float32) for x in (flat[0][row], flat[1][row, slot], flat[2][row, slot])]
    p = jax.nn.softmax(wide[0] @ wide[1].T * s.head_dim**-0.5, -1)
    outs.append(np.asarray(p @ wide[2]))
  return np.stack(outs).reshape(q.shape)


def guessed(
  s: Setting, inputs: list[tuple], hits: float, named: int, **leaves: jax.Array
) -> list[tuple[Any, Cache]]:
  """Queries, and caches that hold a prediction, what it is of, and these leaves."""
  turns = []
  for seed, (q, cache, table) in enumerate(inputs):
    guess = predicted(s, table, hits, named, seed)
    found = {"foreseen": jnp.asarray(guess), "true": jnp.asarray(table)}
    turns.append((q, cache.put(heads=leaves | found)))
  return turns


def finished(s: Setting) -> dict[str, jax.Array]:
  """A state of attention and its output, as a repair takes them."""
  state = jnp.zeros((s.batch * s.kv_heads, s.groups, s.head_dim), jnp.float32)
  one = jnp.ones(state.shape[:2], jnp.float32)
  return {"o": state, "m": one, "l": one, "out": state.astype(s.dtype)}


# ---- cases


def case(name: str, s: Setting, quick: bool, peers: bool) -> Case:
  """One layer: selecting first, PRR and its stages, PRR one kernel after another, the parts."""
  base, prr = s.base, s.prr()
  wide, inputs = base._widened(RATIO), layers(s, quick)
  score_all = jax.jit(functools.partial(score, base))
  scored = [(q, c.put(heads={"scores": score_all(q, c)}), table) for q, c, table in inputs]
  turns = {
    "S3": guessed(s, scored, HITS, wide, **finished(s)),
    "reuse": guessed(s, scored, REUSED, base.tiles.best, **finished(s)),
  }
  (q, cache), tables = turns["S3"][0], [inputs[0][2]]
  want = attended(s, q, cache, tables)
  guesses = {n: np.asarray(x[0][1].heads["foreseen"]) for n, x in turns.items()}
  unions = {n: attended(s, q, cache, [*tables, guess]) for n, guess in guesses.items()}

  def contender(
    name: str, run: Callable[..., Any], reference: np.ndarray | None, inputs: str = "S3"
  ) -> Contender:
    def output(result: Any) -> Any:
      got = result[0] if isinstance(result, tuple) else result
      # Each is compared with what it has to compute; the case has one reference.
      return want + (np.asarray(got, np.float32) - reference)

    make = stepping if getattr(run, "func", None) is step else jax_contender
    shown = None if reference is None else output
    return make(name, run, turns[inputs], output=shown, calls=2 if quick else 64)

  of = functools.partial
  made: list[tuple] = [
    ("prr", of(step, prr), unions["S3"]),
    ("serial", of(step, base), want),
    ("prr, one by one", of(step, Apart(**vars(prr))), unions["S3"]),
    ("prr, S2", of(step, s.prr("S2")), unions["reuse"], "reuse"),
    ("prr, S1", of(step, s.prr("S1")), want, "reuse"),
  ]
  if not quick:  # the parts: what is compared has been checked above
    made += [
      ("select", of(select, base), None),
      ("score", of(score, base), None),
      ("attend", of(attend, base, name="true"), want),
      ("speculate", of(attend, base, name="foreseen"), None),
      ("speculate beside score", of(beside, prr), None),
      ("update", of(update, prr), None),
      ("repair", of(repaired, prr), None),
      ("top_k, lax", of(_lax_top_k, base.tiles.best), None),
    ]
  contenders = together(functools.partial(contender, *each) for each in made)
  if peers and s.batch == 1:  # whose wrapper takes one row of KV heads
    lists = [(q, c.slots["k"], c.slots["v"], c.heads["true"]) for q, c in turns["S3"]]
    # Timed only: it reads the three empty slots as well.
    peer = lambda: dataclasses.replace(flashinfer(lists, s.page), output=None)  # noqa: E731
    contenders += optional(BLOCK_SPARSE, peer)
  rows, pages = s.batch * s.kv_heads, s.slots // s.page
  summaries = 2 * rows * pages * s.head_dim * jnp.dtype(s.dtype).itemsize
  moved = summaries + s.bytes((wide + 1) * s.page)

  def figures(t: dict[str, float]) -> dict[str, float]:
    if quick:
      return {}
    floor = moved / this_device().read
    # The step's one search is that of the selection and of the next forecast: the update is hidden.
    parts = max(t["select"], t["speculate"], floor) + t["repair"]
    first = t["select"] + t["attend"]
    return {
      "gain if parts hid": first / parts,
      "with the update behind it": first / (parts + t["update"]),
      "attention and scoring apart, µs": 1e6 * (t["speculate"] + t["score"]),
      "their bytes, µs": 1e6 * floor,
    }

  return Case(
    name=name,
    shapes=f"q [{s.batch}, {s.kv_heads}, {s.groups}, {s.head_dim}], {s.slots} slots {s.dtype}, "
    f"{pages} pages of {s.page}, {base.tiles.best} + 1 selected, {wide} + 1 predicted, "
    f"{HITS:.0%} hit ({REUSED:.0%} in S1 and S2); {len(inputs)} layers rotating",
    bytes=moved,
    reference=lambda: want,
    tolerance=1e-2,
    contenders=contenders,
    subject="prr",
    figures=figures,
  )


def calibration(name: str, s: Setting, quick: bool) -> Case:
  """Case of PRR's part of a layer's prompt: the predictor over its last tokens, and the search."""
  _, cache = jax.jit(s.arrays)(0)
  searched = PRR(s.base, budget=RATIO, **({"history": 32} if quick else {}))
  tried = {"searched": searched, "followed": dataclasses.replace(searched, calibrate=False)}
  tokens = searched.history
  shape = s.batch, s.kv_heads, s.groups, tokens, s.head_dim
  q = jax.random.normal(jax.random.key(2), shape, s.dtype)
  qpos = cache.seen[:, None] - tokens + jnp.arange(tokens, dtype=jnp.int32)

  def follow(method: PRR, q: Any, cache: Cache, qpos: Any) -> Any:
    none = jnp.full_like(cache.seen, -1)
    return method._calibration.follow(method.at(ENV, 0), cache, none, q, qpos, RATIO)

  def rates(impl: str) -> np.ndarray:
    """Hit rates of all candidates for one token, from states of chance."""
    at = searched.at(dataclasses.replace(ENV, impl=impl), 0)
    pairs = grid().shape[0] // len(GAMMAS)
    shape = pairs, *cache.heads["level"].shape
    drawn = (jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(3)))

    @jax.jit
    def search(q: Any, cache: Cache, state: Any) -> Any:
      visible = sight.visible(at, cache)
      scores = searched.base.score(at, cache, q, visible)
      found, last = searched._calibration, cache.seen - 2
      return found.hit_rates(at, cache, scores, visible.span, state, last, RATIO)[0]

    return np.asarray(search(q[:, :, :, -1], cache, Smoothed(*drawn)))

  few: dict[str, Any] = {"calls": 1, "loops": 1}
  contenders = together(
    functools.partial(jax_contender, label, functools.partial(follow, m), [(q, cache, qpos)], **few)
    for label, m in tried.items()
  )
  contenders[0] = dataclasses.replace(contenders[0], output=functools.partial(rates, "pallas"))
  return Case(
    name=name,
    shapes=f"the last {tokens} tokens of a row's prompt in one layer, every "
    f"{searched.every}th of them counted, {grid().shape[0]} candidates",
    bytes=0,
    reference=functools.partial(rates, "reference"),
    tolerance=1e-5,
    contenders=contenders,
    subject="searched",
  )


def profile(s: Setting, repetitions: int) -> dict[str, Any]:
  """The entry of one setting in `tuned/<device>/prr.json`: microseconds, medians, interleaved."""
  inputs, base = layers(s, False), s.base
  plain = [(q, cache) for q, cache, _ in inputs]
  makers: dict[tuple[str, str], Callable[[], Contender]] = {}

  def add(name: str, ratio: str, make: Callable, run: Callable, turns: list[tuple]) -> None:
    makers[name, ratio] = functools.partial(make, name + ratio, run, turns, calls=64)

  add("select_us", "", jax_contender, functools.partial(select, base), plain)
  add("serial_us", "", stepping, functools.partial(step, base), plain)
  for ratio, hits in PROFILED_HITS.items():
    turns = guessed(s, inputs, hits, base._widened(ratio))
    speculate = functools.partial(attend, base, name="foreseen")
    add("speculate_us", f"{ratio:g}", jax_contender, speculate, turns)
    whole = functools.partial(step, s.prr(ratio=ratio))
    add("prr_us", f"{ratio:g}", stepping, whole, turns)
  timed = dict(zip(makers, together(makers.values()), strict=True))
  times = suites.in_turn(list(timed.values()), repetitions + 1)  # the first is not counted
  shape = {"unit": s.page, "best": base.tiles.best, "batch": s.batch, "slots": s.slots}
  entry: dict[str, Any] = {"shape": s.name, "bucket": {"selector": type(base).__name__, **shape}}
  entry["hits"] = {f"{ratio:g}": hits for ratio, hits in PROFILED_HITS.items()}
  for name, ratio in timed:
    us = round(float(np.median(times[name + ratio][1:])) * 1e6, 2)
    if ratio:
      entry.setdefault(name, {})[ratio] = us
    else:
      entry[name] = us
  print(f"  {s.name}: {json.dumps({n: x for n, x in entry.items() if n.endswith('_us')})}")
  return entry


def _lax_top_k(k: int, q: Any, cache: Cache) -> Any:
  """The search that a plain program would do."""
  return jax.lax.top_k(cache.heads["scores"] * q[:, :, 0, :1], k)[1]


def _launch(q: Any) -> Any:
  """A kernel that does next to nothing."""

  def kernel(q_ref: Any, out_ref: Any) -> None:
    out_ref[0] = q_ref[0]

  out, shape = q.reshape(-1), jax.ShapeDtypeStruct((1,), q.dtype)
  return backend.call(kernel, out, grid=(1,), out=[shape], warps=1, stages=1, name="launch")[0]


def repairs(name: str, s: Setting, quick: bool) -> Case:
  """Repair of 0 … 64 missed pages."""
  prr, inputs = s.prr(), layers(s, quick)
  want = np.asarray(inputs[0][0], np.float32)
  held, contenders = finished(s), []
  for n in (0, 2) if quick else MISSES:
    if n > prr.base.tiles.best:
      continue
    hits, named = 1 - n / prr.base.tiles.best, prr.base._widened(RATIO)
    turns = guessed(s, inputs, hits, named, **held)
    run = functools.partial(repaired, prr)
    contenders.append(jax_contender(f"{n} missed", run, turns, calls=2 if quick else 64))
  plain = [(q,) for q, _, _ in inputs]
  contenders.append(jax_contender("a launch", _launch, plain, calls=2 if quick else 64))

  return Case(
    name=name,
    shapes=f"{s.batch * s.kv_heads} rows, G {s.groups}, pages of {s.page}, "
    f"{prr.base.tiles.best} + 1 selected",
    bytes=s.bytes(s.page),
    reference=lambda: want,
    tolerance=1e-2,
    contenders=contenders,
    subject="0 missed",
  )
