"""PRR against a NumPy float64 oracle: forecasts, calibration, sets and outputs of generations."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import PRR, Cache, Carry, Env, InfLLMv2, Quest, TopKOracle
from kvjax.methods.prr.calibration import LEAST, grid
from kvjax.methods.prr.forecast import Smoothed
from kvjax.testing.layer import Layer, Stream
from tests.kernels.listed import alike
from tests.oracles import attend, begun, probabilities
from tests.selection import Watched, block_scores, choose, page_bounds, tokens_of
from tests.selection import read as slots_read

QUEST = Quest(16, 4)
INFLLM = InfLLMv2(top=2, block=8, sinks=1, local=8, kernel=4, stride=2, dense_below=0)
GRID = list(
  itertools.product(
    [i / 10 for i in range(1, 10)], [i / 10 for i in range(10)], [0, 0.25, 0.5, 0.75, 1]
  )
)


def scores_of(base, stream, b, h, t):
  """A score for every tile that holds one of the tokens 0 … t."""
  if isinstance(base, TopKOracle):
    return np.log(probabilities(stream, b, h, t, range(t + 1)).sum(0)).tolist()
  if isinstance(base, Quest):
    return [x / np.sqrt(stream.q.shape[-1]) for x in page_bounds(stream, b, h, t, base.page)]
  return block_scores(stream, b, h, t, base)


class Predictor:
  """Level and trend of the tiles of one KV head, by the formulae of the docstring."""

  def __init__(self, alpha, beta, gamma, kind):
    self.alpha, self.beta, self.gamma, self.kind = alpha, beta, gamma, kind
    self.level, self.trend = {}, {}

  def forecast(self, count):
    return [
      self.level[j] + self.gamma * self.trend[j] if j in self.level else np.inf
      for j in range(count)
    ]

  def update(self, scores, full):
    for j in range(full):
      if j not in self.level:
        self.level[j], self.trend[j] = scores[j], 0.0
        continue
      a, b = self.level[j], self.trend[j]
      before = a + b if self.kind == "holt" else a
      self.level[j] = self.alpha * scores[j] + (1 - self.alpha) * before
      self.trend[j] = self.beta * (self.level[j] - a) + (1 - self.beta) * b


class Last:
  """The scores of the last step, of the tiles that were full before it, by one KV head."""

  def __init__(self, past, h, unit):
    self.t, self.unit = past[-1][0] if past else 0, unit
    self.scores = past[-1][1][h] if past else []

  def forecast(self, count):
    return [self.scores[j] if j < self.t // self.unit else np.inf for j in range(count)]


class Row:
  """One row of a batch: scores of all KV heads as they come, predictions, sets."""

  def __init__(self, method, stream, b):
    self.method, self.base, self.stream, self.b = method, method.base, stream, b
    self.heads = stream.k.shape[1]
    self.wide = int(method.budget * self.base.tiles.best + 1e-9) if method.variant == "S3" else None
    self.wide = self.base.tiles.best if self.wide is None else self.wide
    self.last = method.predictor == "last" or method.variant != "S3"
    self.factors = method.alpha, method.beta, method.gamma
    self.past = []  # (t, scores of every head)
    self.selected = None

  def scores(self, t):
    return [scores_of(self.base, self.stream, self.b, h, t) for h in range(self.heads)]

  def choose(self, scores, k):
    sinks, local = self.base.tiles.forced
    return choose(scores, sinks, local, k)

  def fixed(self, count):
    return set(self.choose([0.0] * count, 0))

  def predictors(self, factors):
    """The heads' predictors after all that has passed."""
    if self.last:
      return [Last(self.past, h, self.base.tiles.unit) for h in range(self.heads)]
    made = [Predictor(*factors, self.method.predictor) for _ in range(self.heads)]
    for t, scores in self.past:
      for p, s in zip(made, scores, strict=True):
        p.update(s, t // self.base.tiles.unit)
    return made

  def prompt(self, start, stop):
    """Returns the hit rate of every candidate, None if there are too few tokens to tell."""
    first = max(start, stop - self.method.history)
    new = [(t, self.scores(t)) for t in range(first, stop)]
    searches = self.method.calibrate and not self.last
    rates = self.calibration(new) if searches else None
    self.past += new
    self.selected = [set(self.choose(s, self.base.tiles.best)) for s in new[-1][1]]
    return rates

  def calibration(self, new):
    rates, tokens = {}, 0
    for factors in GRID:
      made, total, tokens = self.predictors(factors), 0.0, 0
      begun = bool(self.past)
      for t, scores in new:
        count = t // self.base.tiles.unit + 1
        fixed = self.fixed(count)
        counted = (new[-1][0] - t) % self.method.every == 0
        if begun and counted and count - len(fixed) > self.base.tiles.best:
          tokens += 1
          for p, s in zip(made, scores, strict=True):
            true = set(self.choose(s, self.base.tiles.best)) - fixed
            guess = set(self.choose(p.forecast(count), self.wide))
            total += self.rate(s, true, guess)
        for p, s in zip(made, scores, strict=True):
          p.update(s, t // self.base.tiles.unit)
        begun = True
      rates[factors] = total / max(tokens, 1) / self.heads
    return rates if tokens >= LEAST else None

  def rate(self, s, true, guess):
    """Score-weighted hit rate of a guess, of tiles chosen by score."""
    top = 0 if self.base.tiles.positive else max(s[j] for j in true)
    w = {j: s[j] if self.base.tiles.positive else np.exp(s[j] - top) for j in true}
    total = sum(w.values())
    return sum(w[j] for j in true & guess) / total if total > 0 else 1.0

  def step(self, t):
    """For every head: what is foreseen and what is selected, in order, and the report."""
    scores, count = self.scores(t), t // self.base.tiles.unit + 1
    made, fixed, found = self.predictors(self.factors), self.fixed(count), []
    for h, (p, s) in enumerate(zip(made, scores, strict=True)):
      guess, true = self.choose(p.forecast(count), self.wide), self.choose(s, self.base.tiles.best)
      chosen = set(true) - fixed
      share = len(chosen & set(guess)) / len(chosen) if chosen else 1.0
      again = self.selected[h] if self.selected else set()
      report = {
        "missed": len(set(true) - set(guess)),
        "wasted": len(set(guess) - set(true)),
        "hit_rate": share,
        "hit_rate_forced": len(set(true) & set(guess)) / len(true),
        "weighted_hit_rate": self.rate(s, chosen, set(guess)) if chosen else 1.0,
        "reuse": len(chosen & again) / len(chosen) if chosen else 1.0,
      }
      found.append((guess, true, report))
    self.selected = [set(true) for _, true, _ in found]
    self.past.append((t, scores))
    return found


def check_steps(run, rows, at, steps):
  """Decodes from `at` on; every row, head and step against the oracle."""
  method = rows[0].method
  totals = {}
  for step in range(steps):
    now = [t + step for t in at]
    out, aux = run.decode(now)
    for b, row in enumerate(rows):
      for h, (guess, true, report) in enumerate(row.step(now[b])):
        unit = row.base.tiles.unit
        missed = [j for j in true if j not in guess]
        if method.variant == "S1" and missed:
          read = true
        elif method.strict:
          read = [j for j in guess if j in true] + missed
        else:
          read = guess + missed
        want = tokens_of(read, unit, now[b] + 1)
        assert slots_read(aux, b, h) == want, (b, h, now[b])
        assert aux["visited"][b, h] == len(want)
        np.testing.assert_allclose(out[b, h], attend(row.stream, b, h, now[b], want), atol=1e-5)
        for name, value in report.items():
          np.testing.assert_allclose(aux[name][b, h], value, atol=1e-5, err_msg=name)
          totals[name] = totals.get(name, 0) + value
  return totals


def generation(method, lengths=(45, 6), steps=24, seed=1):
  stream = Stream.random(seed, tokens=max(lengths) + steps)
  run = Layer(Watched(method), stream, capacity=max(lengths) + steps, layer=2)
  rows = [Row(method, stream, b) for b in range(len(lengths))]
  run.prefill(list(lengths))
  factors = np.asarray(run.cache.rows.get("factors", [row.factors for row in rows]))
  for row, n, found in zip(rows, lengths, factors, strict=True):
    rates = row.prompt(0, n)
    if rates is not None:
      found = min(GRID, key=lambda c: np.abs(np.subtract(c, found)).sum())
      assert rates[found] >= max(rates.values()) - 1e-6
      row.factors = found
    np.testing.assert_allclose(found, row.factors, atol=1e-6)
  return check_steps(run, rows, list(lengths), steps)


def test_worked_example():
  """Two scores of one tile, 1 then 2: a = 1.5, b = 0.2·0.5 = 0.1; next 1.5 + 0.5·0.1."""
  x, yes, no = jnp.ones(1), jnp.array([True]), jnp.array([False])
  state = Smoothed(0 * x, 0 * x).updated(x, 0.5 * x, 0.2 * x, no, yes)
  assert (state.level, state.trend) == (1, 0)
  state = state.updated(2 * x, 0.5 * x, 0.2 * x, yes, yes)
  np.testing.assert_allclose([state.level[0], state.trend[0]], [1.5, 0.1], rtol=1e-6)
  np.testing.assert_allclose(state.forecast(0.5 * x), 1.55, rtol=1e-6)
  # Then 3. holt: 0.5·3 + 0.5·1.6 = 2.3, b = 0.2·0.8 + 0.8·0.1; ema: 0.5·3 + 0.5·1.5 = 2.25.
  for kind, level, trend in (("holt", 2.3, 0.24), ("ema", 2.25, 0.23)):
    new = state.updated(3 * x, 0.5 * x, 0.2 * x, yes, yes, kind)
    np.testing.assert_allclose([new.level[0], new.trend[0]], [level, trend], rtol=1e-6)


@pytest.mark.parametrize("how", [{"variant": "S1"}, {"variant": "S2"}, {"predictor": "last"}])
def test_the_last_scores_are_a_forecast_without_a_state(how):
  method = PRR(Quest(32, page=4), budget=2.0, **how)
  cache = Cache.empty(method, Stream.random(0).spec(40), method.base.dense_layers)
  assert not {"level", "trend"} & cache.heads.keys() and "factors" not in cache.rows


def test_the_grid():
  np.testing.assert_allclose(grid(), GRID, atol=1e-7)


@pytest.mark.core(1)
@pytest.mark.rest
@pytest.mark.parametrize("base", [QUEST, INFLLM], ids=["quest", "infllm"])
@pytest.mark.parametrize("strict", [False, True], ids=["loose", "strict"])
@pytest.mark.parametrize(
  "kwargs",
  [
    {"budget": 1.5, "calibrate": False},
    {"budget": 1.0, "calibrate": False, "predictor": "ema", "history": 3, "gamma": 1.0},
    {"budget": 1.5, "predictor": "last"},
    {"budget": 2.0, "variant": "S1"},
    {"budget": 2.0, "variant": "S2"},
  ],
  ids=["holt", "ema", "last", "S1", "S2"],
)
def test_a_generation(base, kwargs, strict):
  """Across tile boundaries at every offset; rows apart in length, one with nothing to predict."""
  totals = generation(PRR(base, strict=strict, **kwargs))
  assert totals["missed"] > 0 and totals["wasted"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
  ("base", "predictor"), [(QUEST, "holt"), (INFLLM, "ema")], ids=["quest-holt", "infllm-ema"]
)
def test_calibration(base, predictor):
  """Each row's factors are those of its highest hit rate; the short row keeps the given ones."""
  generation(PRR(base, budget=1.5, predictor=predictor, history=18, every=2), steps=4)


@pytest.mark.slow
def test_single_tokens():
  generation(PRR(TopKOracle(6), budget=1.5, calibrate=False), steps=6)


@pytest.mark.slow
def test_a_second_turn_and_idle_rows():
  """The predictor follows a further turn's last tokens; rows that have none stay as they were.

  The turn begins after the first token of a tile: only tiles before it have had a score.
  """
  method = PRR(QUEST, budget=1.5, calibrate=False, history=5)
  stream = Stream.random(3, tokens=70)
  run = Layer(Watched(method), stream, capacity=70, layer=2)
  rows = [Row(method, stream, b) for b in range(2)]
  run.prefill([29, 19])
  for row, n in zip(rows, (29, 19), strict=True):
    row.prompt(0, n)
  for step in range(3):
    run.decode([29, 19 + step], live=[False, True])
    rows[1].step(19 + step)
  run.prefill([10, 0], start=[29, 22], past=None)
  rows[0].prompt(29, 39)
  check_steps(run, rows, [39, 22], 12)


@pytest.mark.slow
def test_from_an_empty_cache():
  """Nothing is known of any tile: all are predicted, the lowest first."""
  method = PRR(QUEST, budget=1.0, calibrate=False)
  stream = Stream.random(4, tokens=30)
  run = Layer(Watched(method), stream, capacity=30, layer=2)
  check_steps(run, [Row(method, stream, b) for b in range(2)], [0, 0], 30)


@pytest.mark.slow
def test_without_speculation_it_is_the_base():
  stream = Stream.random(6, tokens=40)
  layers = [Layer(m, stream, layer=2) for m in (QUEST, PRR(QUEST, budget=0))]
  caches = [layer.cache.heads.keys() for layer in layers]
  assert caches[0] == caches[1]
  for layer in layers:
    layer.prefill([30, 12])
  (want, _), (out, _) = (layer.decode([30, 12]) for layer in layers)
  np.testing.assert_array_equal(out, want)

  def program(layer):
    q, k, v = (x[..., 30, :] for x in (stream.q, stream.k, stream.v))
    step = jax.jit(functools.partial(layer.method.decode_step, layer.at))
    return step.lower(layer.cache, q, k, v, jnp.ones(2, bool), Carry()).as_text()

  assert program(layers[0]) == program(layers[1])
  assert "level" not in Cache.empty(PRR(QUEST, budget=2), stream.spec(40), 1).heads  # a dense layer


@pytest.mark.rest
@pytest.mark.slow
@pytest.mark.parametrize(
  "base",
  [QUEST, Quest(16, 4, "max"), INFLLM, dataclasses.replace(INFLLM, dense_below=40)],
  ids=["mean", "max", "infllm", "infllm-dense"],
)
@pytest.mark.parametrize(
  "kwargs",
  [
    {"budget": 1.5},
    {"budget": 1.5, "predictor": "ema"},
    {"budget": 1.5, "predictor": "last"},
    {"variant": "S1"},
    {"variant": "S2"},
    {"budget": 1.5, "strict": True},
    {"variant": "S1", "strict": True},
  ],
  ids=["S3", "ema", "last", "S1", "S2", "strict", "S1-strict"],
)
def test_kernels_equal_the_reference(kwargs, base):
  """Outputs, sets, reports and the predictor, step by step: in one launch where one does both."""
  method = PRR(base, calibrate=False, **kwargs)
  how = {"atol": 1e-5, "steps": 6, "lengths": [37, 21]}
  kernels, reference = alike(method, Stream.random(8, tokens=50), 2, **how)
  for aux, there in zip(kernels[1], reference[1], strict=True):
    for name in there:
      np.testing.assert_allclose(aux[name], there[name], atol=1e-5, err_msg=name)
  for name, x in reference[2].heads.items():
    found, want = (np.asarray(cache.heads[name]) for cache in (kernels[2], reference[2]))
    if x.dtype == np.int32:  # kernels list tiles by index
      found, want = np.sort(found, -1), np.sort(want, -1)
    np.testing.assert_allclose(found, want, atol=1e-4, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("base", [QUEST, INFLLM], ids=["quest", "infllm"])
def test_kernels_calibrate_as_the_reference_does(base):
  """The search for the best forecasts of every candidate, by the kernel that selects tiles."""
  stream = Stream.random(9, batch=2, kv_heads=1, tokens=50)
  method, heads = PRR(base, budget=1.5, history=16, every=2), {}
  for impl in ("reference", "pallas"):
    layer = begun(method, stream, [48, 9], capacity=50, layer=2, env=Env(4, impl=impl, tile=4))
    heads[impl] = {**layer.cache.heads, "factors": layer.cache.rows["factors"]}
  np.testing.assert_array_equal(heads["pallas"]["factors"], heads["reference"]["factors"])
  assert (heads["pallas"]["factors"][0] != heads["pallas"]["factors"][1]).any()
  for name in ("level", "trend"):  # of scores that kernels sum in another order
    np.testing.assert_allclose(heads["pallas"][name], heads["reference"][name], atol=1e-5)
