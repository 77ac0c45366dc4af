"""The override law: an override of a move means the same under every implementation.

Each case overrides one move so that something comes out differently, which is checked. By kernels
it comes out as by the reference; or a kernel that would pass it by refuses as soon as a step is
traced, and says which move, and "auto" takes the reference.
"""

import dataclasses
import functools
import inspect
import itertools
import re
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import (
  ART,
  CIS,
  METHODS,
  PRR,
  PSAW,
  TOVA,
  Active,
  AdaKV,
  Bounded,
  Cache,
  Carry,
  Env,
  Full,
  HShare,
  InfLLM,
  InfLLMv2,
  LongFlow,
  Method,
  Plan,
  Prompt,
  PromptScored,
  Quantised,
  Quest,
  Random,
  Selective,
  SharedPrefill,
  SnapKV,
  Span,
  StreamingLLM,
  TopKOracle,
  Window,
  Wrapper,
  settings,
)
from kvjax.core.leaves import NORM, Leaf
from kvjax.families import forms
from kvjax.families.bounded import InTurn
from kvjax.families.forms import Void
from kvjax.ops import table
from kvjax.ops.insertion import Placement
from kvjax.ops.scores import Pages
from kvjax.ops.summaries import Extremes
from kvjax.primitives import ring
from kvjax.runtime import drivers
from kvjax.testing.layer import Stream
from kvjax.testing.traced_laws import Through, operations
from tests.steps import CASES as STEPS
from tests.steps import decode_step

LAYER, LAYERS = 3, 4
CAPACITY = 20
STREAM = Stream.random(11, batch=2, kv_heads=2, groups=2, tokens=16)
PROMPT = (9, 5)
QUEST = Quest(4, page=2, dense_layers=0)
BLOCKS = InfLLMv2(1, block=2, sinks=1, local=2, kernel=2, stride=1, dense_below=0)


# Moves of a prompt alone.
OF_PROMPTS = {
  *("active", "fill", "stage", "rank", "keep", "settle", "attend_prompt", "prefill"),
}


@dataclasses.dataclass(frozen=True)
class Case:
  """An override of one move.

  Attributes:
    move: its name.
    base: the method as it is.
    own: its form, and those of others that show what it does, by name.
    refused: what a kernel says that would pass it by; None: all do as they are told.
    over: makes the method that runs of the one with the override.
    prompt: how many tokens of each row come as a prompt.
    unseen: arrays that hold anything for tiles which no query may see.
  """

  move: str
  base: Method
  own: dict[str, Any]
  refused: str | None
  over: Callable[[Method], Method]
  prompt: tuple[int, int]
  unseen: tuple[str, ...]

  @property
  def steps(self) -> int:
    """Decode steps; after a prompt there are none where the move is one of prompts alone."""
    return 0 if self.move in OF_PROMPTS else 4 if max(self.prompt) else 10

  @functools.cached_property
  def method(self) -> Method:
    """The base's subclass that has the override."""
    made = type("Own", (type(self.base),), self.own)
    fields = {f.name: getattr(self.base, f.name) for f in dataclasses.fields(self.base) if f.init}
    return self.over(made(**fields))


def case(
  move,
  base,
  form,
  refused=None,
  *,
  over=lambda method: method,
  prompt=(0, 0),
  unseen=(),
  slow=False,
  **others,
):
  """A row of the table; in the core every move of Method has one."""
  names = dict.fromkeys(type(x).__name__ for x in (over(base), base))
  found = Case(move, base, {move: form, **others}, refused, over, prompt, unseen)
  marks = [pytest.mark.slow] * slow
  return pytest.param(found, id=f"{move} of {' over '.join(names)}", marks=marks)


# ---- forms that do something else, each as the module's functions: self comes first


def narrow_span(self, at, cache, window):
  """Another part for each KV head."""
  heads = 1 + jnp.arange(cache.pos.shape[1], dtype=jnp.int32)
  stop = cache.used[:, None] - 0 * heads
  return Span(jnp.broadcast_to(2 * heads, stop.shape), stop, 1)


def narrow_window(self, at, qpos):
  return Window(1, qpos - 2)


def forecast(base):
  return PRR(base, budget=1.0, calibrate=False, history=2, every=1)


def first_slot(self, at, cache):
  return jnp.zeros(cache.pos.shape[:2], jnp.int32)


def first_own_slot(self, at, cache):
  """Where heads share the slots of a layer."""
  return cache.heads["place"][..., 0]


class First(SnapKV):
  """Gives up its first slot, though it notes whose turn it is."""

  victim = first_slot


IN_TURN = {"placement": Placement.RING}  # declared anew, beside the override that it describes


def changed(*names, **how):
  """Some arrays of the cache described otherwise."""

  def leaves(self, spec, layer):
    held = super(type(self), self).leaves(spec, layer)
    return {**held, **{name: dataclasses.replace(held[name], **how) for name in names}}

  return leaves


def sevens(new):
  return jnp.full(new["pos"].shape, 7.0)


def even_tiles(self, at, cache, q, visible, carry):
  """Every other tile of two slots, the newest one among them."""
  stop = cache.used[:, None]
  last = (stop - 1) // 2
  table = last[..., None] - 2 * jnp.arange(5, dtype=jnp.int32)
  count = (table >= 0).sum(-1, dtype=jnp.int32)
  table, count = (jnp.broadcast_to(x, (*cache.pos.shape[:2], *x.shape[2:])) for x in (table, count))
  return visible.listed(jnp.where(table >= 0, table, -1), count, unit=2), carry


def oldest_first(self, at, cache):
  return -cache.pos.astype(jnp.float32)


def of_first_entry(self, at, cache, plan, q):
  """Attention to what the plan lists first."""
  one = dataclasses.replace(plan, count=jnp.minimum(plan.count, 1))
  return super(type(self), self).attend(at, cache, one, q)


def doubled(move, which):
  """The result of the usual form with twice one of its parts."""

  def form(self, *args):
    made = super(type(self), self)
    return which(getattr(made, move)(*args))

  return form


def of_cache(name, by=2.0):
  """A cache with a multiple of a statistic."""
  return lambda cache: cache.put(slots={name: by * cache.slots[name]})


def of_first(change):
  return lambda results: (change(results[0]), *results[1:])


def of_second(change):
  return lambda results: (results[0], change(results[1]), *results[2:])


def twice_v(self, at, cache, k, v, live):
  return super(type(self), self).insert(at, cache, k, 2 * v, live)


def twice_attended(attended):
  state = dataclasses.replace(attended.state, o=2 * attended.state.o)
  return dataclasses.replace(attended, state=state, out=None)


def by_first_channel(self, at, cache, q, visible):
  """Scores that no summary knows."""
  pages = cache.slots["k"][..., 0].reshape(*cache.pos.shape[:2], -1, 2)
  return jnp.where(pages == 0, -9.0, pages).max(-1)


def by_second_channel(self, at, cache, q, visible):
  return cache.slots["k"][..., 1]


def no_summary(self, cache, start, tokens):
  return cache


def keeps_nothing(self, at, cache, turn, new):
  return cache


def top_logit(self, at, cache, q, plan, attended):
  """Notes the largest logit; of kernels that return none it would know nothing."""
  cache, aux = super(type(self), self).observe(at, cache, q, plan, attended)
  return cache.put(rows={"top": attended.logits.max((1, 2, 3))}), aux


def with_leaf(name, leaf):
  """One array more."""
  return lambda self, spec, layer: {**super(type(self), self).leaves(spec, layer), name: leaf}


TOP = with_leaf("top", Leaf("rows"))


@property
def reads_logits(self):
  return super(type(self), self).traits.but(wants_logits=True)


@property
def projecting(self):
  return super(type(self), self).traits.but(projects_all=True)


def begun(self, spec):
  """Caches that hold a token of their own."""
  return tuple(_begun(cache) for cache in Method.init_caches(self, spec))


def _begun(cache):
  first = {name: cache.slots[name].at[:, :, 0].set(1) for name in ("k", "v")}
  one = jnp.ones_like(cache.seen)
  pos = cache.pos.at[:, :, 0].set(0)
  return cache.put(slots={**first, "pos": pos}, rows={"seen": one, "used": one})


def one_before(self, at, cache, new, q, prompt, carry):
  """Slots of ones in front of all others, which every query sees."""
  staged, cache, carry = super(type(self), self).stage(at, cache, new, q, prompt, carry)
  fill = {"k": 1.0, "v": 1.0, "pos": 0}
  width = [(0, 0), (0, 0), (128, 0)]  # more than a kernel reads at a time
  padded = {
    name: jnp.pad(x, width + [(0, 0)] * (x.ndim - 3), constant_values=fill.get(name, 0))
    for name, x in staged.items()
  }
  return padded, cache, carry


def last_two(self, at, tokens, total):
  return Active(total[:, None] - 2 + jnp.arange(2, dtype=jnp.int32))


def backwards(self, at, turn):
  return -turn.staged["pos"].astype(jnp.float32), turn.staged


@property
def wider_tiles(self):
  tiles = super(type(self), self).tiles
  return dataclasses.replace(tiles, unit=4, first=1, newest=2, best=3, dense_below=4)


def more_summaries(self, spec):
  return {**super(type(self), self).summaries(spec), "more": Leaf("heads", (3,), fill=1)}


# ---- the table


def hidden(move):
  known = f"has its own {move}, which its span may not know"
  return f"attend_span: Own {known}; the 'pallas' kernel sees the span alone"


# Methods with a `plan_and_attend` of their own.
FUSED = CIS(2, 1, 2), HShare(4, 1, 2), LongFlow(6, 2), forecast(QUEST)
TWICE = doubled("attend", twice_attended)
HALT = functools.partial(ART, tau=9.0, phi=9.0, patience=1, tile=2, splits=1)
TABLE = [
  case("window", Full(), narrow_window, prompt=PROMPT),
  case("window", QUEST, narrow_window, slow=True),
  case("window", CIS(2, 1, 2), narrow_window, slow=True),
  case("window", HShare(4, 1, 2), narrow_window, prompt=PROMPT, slow=True),
  case("window", StreamingLLM(8, 1, "original"), narrow_window, hidden("window"), slow=True),
  case("span", Full(), narrow_span),
  case("span", QUEST, narrow_span, slow=True),
  case("span", TopKOracle(4), narrow_span, slow=True),
  case("span", CIS(2, 1, 2), narrow_span, slow=True),
  case("span", HShare(4, 1, 2), narrow_span, prompt=PROMPT, slow=True),
  case("span", Full(), narrow_span, over=HALT, slow=True),
  case("span", PSAW(sinks=1, phi=0.5), narrow_span, hidden("window"), slow=True),
  case(
    *("span", QUEST, narrow_span),
    over=forecast,
    prompt=PROMPT,
    unseen=("level", "trend"),
    slow=True,
  ),
  case("victim", Random(6, recent=2), first_slot, slow=True),
  case("victim", SnapKV(6, 2), first_slot),
  case(
    *("victim", StreamingLLM(6, 1, "original"), first_slot, hidden("victim")),
    slow=True,
  ),
  case("victim", First(6, 2), ring.victim, **IN_TURN),
  case("victim", SnapKV(6, 2), first_slot, over=Through),
  case("victim", Through(SnapKV(6, 2)), first_slot),
  case("victim", Through(First(6, 2)), ring.victim, **IN_TURN, slow=True),
  case("victim", Quantised(SnapKV(6, 2)), first_slot, slow=True),
  case("victim", AdaKV(SnapKV(6, 2)), first_own_slot, prompt=PROMPT, slow=True),
  case("leaves", Full(), with_leaf("norm", NORM)),
  case("leaves", LongFlow(6, 2), changed("norm", new=sevens), slow=True),
  case("leaves", METHODS["h2o"](6), changed("mass", new=sevens), prompt=PROMPT, slow=True),
  case("leaves", SnapKV(6, 2), changed("score", new=sevens, standing=False), slow=True),
  case("insert", Full(), twice_v),
  case("plan", Full(), even_tiles),
  case("plan", QUEST, even_tiles, slow=True),
  case("order", Full(), oldest_first, over=HALT),
  case("attend", Full(), TWICE),
  case("attend", TopKOracle(4), of_first_entry, slow=True),
  *(
    case("plan", base, even_tiles, prompt=PROMPT, unseen=("level", "trend"), slow=True)
    for base in FUSED
    if not base.traits.wants_logits
  ),
  *(
    case("plan", base, even_tiles, r"reads logits \(wants_logits\)", prompt=PROMPT, slow=True)
    for base in (LongFlow(6, 2), METHODS["h2o"](6), TOVA(6))
  ),
  *(
    case("attend", base, TWICE, prompt=PROMPT, unseen=("level", "trend"), slow=True)
    for base in (*FUSED, *map(Through, FUSED))
  ),
  case("plan_and_attend", Full(), doubled("plan_and_attend", of_second(twice_attended))),
  case("observe", METHODS["h2o"](6), doubled("observe", of_first(of_cache("mass")))),
  case("traits", Full(), reads_logits, observe=top_logit, leaves=TOP, slow=True),
  case(
    *("traits", QUEST, reads_logits),
    "attend_table: Own reads logits .wants_logits.; the 'pallas' kernel returns none",
    observe=top_logit,
    leaves=TOP,
  ),
  case("capacity", Full(), lambda self, spec, layer: 8),
  case("init_caches", Full(), begun),
  case("active", Full(), last_two, prompt=PROMPT, traits=projecting),
  case("fill", Full(), doubled("fill", lambda x: (x[0], 2 * x[1], x[2])), prompt=PROMPT),
  case("stage", Full(), one_before, prompt=PROMPT),
  case("rank", Random(6, recent=2), backwards, prompt=PROMPT),
  case("keep", Full(), doubled("keep", of_cache("v")), prompt=PROMPT),
  case("settle", Full(), doubled("settle", of_cache("v")), prompt=PROMPT),
  case("attend_prompt", Full(), doubled("attend_prompt", twice_attended), prompt=PROMPT),
  case("prefill", Full(), doubled("prefill", of_first(lambda out: 2 * out)), prompt=PROMPT),
  case("decode_step", Full(), doubled("decode_step", of_first(lambda out: 2 * out))),
  # of those that select
  case("tiles", QUEST, wider_tiles, slow=True),
  case("summaries", QUEST, more_summaries, slow=True),
  case("summarise", QUEST, no_summary, slow=True),
  case("summarise", BLOCKS, no_summary, slow=True),
  case("score", TopKOracle(4), by_second_channel, slow=True),
  case("score", QUEST, by_first_channel),
  case("score", QUEST, by_first_channel, over=forecast, prompt=PROMPT, slow=True),
  case("score", BLOCKS, by_first_channel, over=forecast, prompt=PROMPT, slow=True),
]

# What no implementation can pass by, and why.
PLAIN = {
  "at": "where drivers run",
  "conclude": "the decoder calls it behind all layers; no kernel takes its place",
}


def test_every_move_is_in_the_table():
  """Or is no move, with a reason."""
  families = Method, Bounded, InTurn, Selective
  public = {name for cls in families for name in vars(cls) if not name.startswith("_")}
  public -= {name for cls in families for name in inspect.get_annotations(cls)}  # fields
  shown = {row.values[0].move for row in TABLE}
  assert shown | set(PLAIN) == public
  assert not shown & set(PLAIN)
  core = {row.values[0].move for row in TABLE if not row.marks}
  assert shown - core <= public - set(vars(Method))


def taken(which, index):
  """Tokens [B, N] of a part of the stream."""
  x = jnp.asarray(getattr(STREAM, which))
  index = index.reshape(len(index), *(1,) * (x.ndim - 3), -1, 1)
  return jnp.take_along_axis(x, index, -2, mode="clip")


def program(method, impl, prompt, steps):
  """A prompt, if there is one, and decode steps: what came out, and what is cached."""
  at, cut, valid = method.at(Env(LAYERS, impl=impl, tile=4), LAYER), max(prompt), jnp.array(prompt)

  def run():
    cache, outs = method.init_caches(STREAM.spec(CAPACITY, LAYERS))[LAYER], []
    if cut:
      told = Prompt.of(at, cut, valid, valid, 0)
      index = told.query_index()
      every = jnp.broadcast_to(jnp.arange(cut), (2, cut))
      q, k, v = (taken(which, i) for which, i in zip("qkv", (index, every, every), strict=True))
      out, cache, _, _ = method.prefill(at, cache, q, k, v, told, Carry())
      outs.append(jnp.where((index < valid[:, None])[:, None, None, :, None], out, 0))

    def step(cache, i):
      q, k, v = (taken(which, i + valid[:, None])[..., 0, :] for which in "qkv")
      out, cache, _, _ = method.decode_step(at, cache, q, k, v, jnp.ones(2, bool), Carry())
      return cache, out

    if steps:
      cache, out = jax.lax.scan(step, cache, jnp.arange(steps))
      outs.append(out)
    return outs, cache

  return run


@functools.cache
def results(method, impl, prompt=(0, 0), steps=10):
  """As NumPy's, by name."""
  run = jax.jit(program(method, impl, prompt, steps))
  found = jax.tree_util.tree_flatten_with_path(run())[0]
  return {jax.tree_util.keystr(path): np.asarray(x) for path, x in found}


def differ(a, b):
  """Whether two results do, in shape or in a number, by far more than implementations may."""
  if {name: x.shape for name, x in a.items()} != {name: x.shape for name, x in b.items()}:
    return True
  return not all(np.allclose(x, b[name], atol=1e-3) for name, x in a.items())


def kernels_for_auto(monkeypatch):
  """Has "auto" take kernels as on a GPU, though they are interpreted."""
  seen = types.SimpleNamespace(default_backend=lambda: "gpu")
  monkeypatch.setattr(table, "jax", seen)
  monkeypatch.setattr(table, "beyond_device", lambda *_: "")
  assert table.choose("enter_token", "auto") == "pallas"


@pytest.mark.core(2)
@pytest.mark.parametrize("case", TABLE)
def test_an_override_means_the_same_under_every_implementation(case, monkeypatch):
  told = case.prompt, case.steps
  want = results(case.method, "reference", *told)
  assert differ(want, results(case.over(case.base), "reference", *told))
  impl = "pallas"
  if case.refused:
    with pytest.raises(NotImplementedError, match=case.refused):
      jax.eval_shape(program(case.method, "pallas", *told))
    impl = "auto"
    kernels_for_auto(monkeypatch)
  found = results(case.method, impl, *told)
  assert found.keys() == want.keys()
  for name, x in want.items():
    if not any(array in name for array in case.unseen):
      np.testing.assert_allclose(found[name], x, atol=2e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["reference", "pallas"])
@pytest.mark.parametrize("base", [CIS(2, 1, 2), LongFlow(6, 2), forecast(QUEST)])
def test_attention_of_ones_own_beneath_plan_and_attend(base, impl):
  """As if the class had the usual form of it, which is the two in turn."""
  usual = {"plan_and_attend": lambda self, *args: Method.plan_and_attend(self, *args)}
  made = [type("Own", (type(base),), {"attend": TWICE, **held}) for held in ({}, usual)]
  fields = {f.name: getattr(base, f.name) for f in dataclasses.fields(base) if f.init}
  found, want = (results(cls(**fields), impl, PROMPT, 4) for cls in made)
  for name, x in want.items():
    np.testing.assert_allclose(found[name], x, atol=2e-5, err_msg=name)


# ---- names


def of_turn(base, move, form, now):
  """A refusal of a prompt's move as it was before 0.3, when what is in a turn came one by one."""
  found = re.escape(f"{inspect.signature(form)}")
  return base, {move: form}, rf"Own\.{move}: .* {found} .*those of {re.escape(now)}"


# What a class may not define, as a public name or with such parameters, and what it is told.
NAMES = [
  *(
    (Full, {name: lambda self: None}, rf"^Own\.{name}: .* expected {now} \(MOVING\.md\)")
    for name, now in forms.MOVED.items()
  ),
  *(
    (Full, {name: classmethod(len)}, rf"^Own\.{name}: .*register\(Own, {name}=...\) beside")
    for name in forms.SETTINGS
  ),
  (Full, {"windw": narrow_window}, r"Own\.windw: .* no move \(is window meant\?\), .*of Full"),
  (Bounded, {"traist": True}, r"Own\.traist: .*\(is traits meant\?\)"),
  (Wrapper, {"victm": property(len)}, r"Own\.victm: .*\(is victim meant\?\)"),
  (Selective, {"scor": by_first_channel}, r"Own\.scor: .*\(is score meant\?\)"),
  (Full, {"zzz": staticmethod(len)}, r"Own\.zzz: .* no move, expected a move of Full, or a name"),
  # Moves of before 0.3 were not handed the plan of all visible slots.
  (
    Full,
    {"plan": first_slot},
    r"Own\.plan: found parameters \(self, at, cache\) \(too many .*, visible, carry",
  ),
  (
    Selective,
    {"score": first_slot},
    r"Own\.score: .*, expected those of score\(self, at, cache, q, visible\)",
  ),
  of_turn(
    *(Bounded, "rank", lambda self, at, staged, q, qpos, attended, prompt: None),
    "rank(self, at, turn)",
  ),
  of_turn(
    *(Wrapper, "keep", lambda self, at, cache, new, q, qpos, attended, prompt: None),
    "keep(self, at, cache, turn, new)",
  ),
  of_turn(
    *(PromptScored, "score", lambda self, at, staged, past, q, qpos, attended: None),
    "score(self, at, turn, past)",
  ),
]


@pytest.mark.parametrize(("base", "own", "message"), NAMES)
def test_what_a_class_may_not_define(base, own, message):
  with pytest.raises(TypeError, match=message):
    named(base, **own)


def test_a_wrapper_may_define_a_move_of_its_base():
  named(Wrapper, victim=first_slot)


def test_a_plan_that_forgets_what_queries_see_is_refused():
  """It would attend to what the window hides."""

  def anew(self, at, cache, q, visible, carry):
    return Plan(visible.span), carry

  own = type("Own", (Full,), {"plan": anew, "window": narrow_window})()
  with pytest.raises(ValueError, match=r"Own\.plan: found a plan without .* visible\.listed"):
    jax.eval_shape(program(own, "reference", (0, 0), 10))


def test_what_a_class_may_have_beside_moves():
  """Helpers, fields, class variables, constructors, and what a family asks for."""

  class Own(Full, moves=("page",)):
    page = 4
    size: int = 3

    def _help(self):
      return self.page

    @classmethod
    def preset(cls):
      return cls()

  class Member(Own):
    page = 8

  assert Member.preset()._help() == 8
  with pytest.raises(TypeError, match="Own: found no pages, which its moves name"):
    type("Own", (Full,), {}, moves=("pages",))


# ---- declarations


def named(base, **body):
  return type("Own", (base,), body)


VOID = Void(("victim",))
INSERTS = {"insert": twice_v}


@pytest.mark.parametrize(
  ("method", "name", "expected"),
  [
    # of one class
    (Full(), "placement", Placement.APPEND),
    (SnapKV(6, 2), "placement", Placement.RING),
    (TOVA(6), "placement", VOID),
    (named(SnapKV, victim=first_slot)(6, 2), "placement", VOID),
    (named(SnapKV, victim=first_slot)(6, 2), "entry", "enter_token"),
    (named(SnapKV, **INSERTS)(6, 2), "placement", Placement.RING),
    (named(SnapKV, **INSERTS)(6, 2), "entry", Void(("insert",))),
    (named(First, victim=ring.victim, **IN_TURN)(6, 2), "placement", Placement.RING),
    # of those that follow
    (named(First)(6, 2), "placement", VOID),
    (named(named(First, victim=ring.victim, **IN_TURN))(6, 2), "placement", Placement.RING),
    (named(named(First, **IN_TURN), victim=first_slot)(6, 2), "placement", Placement.RING),
    (named(named(First, **IN_TURN), victim=oldest_first)(6, 2), "placement", VOID),
    # of wrappers
    (Through(SnapKV(6, 2)), "placement", Placement.RING),
    (Through(First(6, 2)), "placement", VOID),
    (named(Wrapper, victim=first_slot)(SnapKV(6, 2)), "placement", VOID),
    (Through(named(Wrapper, victim=first_slot)(SnapKV(6, 2))), "placement", VOID),
    (named(Wrapper, victim=ring.victim, **IN_TURN)(First(6, 2)), "placement", Placement.RING),
    (Through(LongFlow(6, 2)), "attention", "attend_span"),
    (HALT(), "attention", Void(("attend",))),
    (HALT(), "entry", "enter_token"),
    # of codes
    (Quantised(SnapKV(6, 2)), "placement", Placement.RING),
    (Quantised(First(6, 2)), "placement", VOID),
    (Quantised(SnapKV(6, 2)), "entry", "enter_codes"),
    (Through(Quantised()), "entry", "enter_codes"),
    (named(Quantised, victim=first_slot)(SnapKV(6, 2)), "placement", VOID),
    (named(Quantised, **INSERTS)(), "entry", Void(("insert",))),
    # of what selects
    (named(Quest, score=by_first_channel)(16), "_scored", Void(("score",))),
    (named(Quest, score=by_first_channel)(16), "_renewal", Extremes(16)),
    (named(Quest, summarise=no_summary)(16), "_renewal", Void(("summarise",))),
    (named(Quest, summarise=no_summary)(16), "_scored", Pages("mean")),
    # of rows that a prompt leaves alone
    *((m, "_spares", ("k", "v", "pos", "held_k", "held_v")) for m in (InfLLM(), Through(InfLLM()))),
    (named(InfLLM, keep=keeps_nothing)(), "_spares", Void(("keep",))),
    (named(InfLLM, stage=one_before)(), "_spares", Void(("stage",))),
    # of a span, which is a declaration itself
    (StreamingLLM(8, 1), "_covers", True),
    (Quantised(StreamingLLM(8, 1)), "_covers", True),
    (named(StreamingLLM, victim=first_slot)(8, 1), "_covers", VOID),
    (named(StreamingLLM, victim=first_slot, span=narrow_span)(8, 1), "_covers", True),
  ],
)
def test_an_override_voids_what_describes_it(method, name, expected):
  found = getattr(method, name)
  assert found == expected and bool(found) != isinstance(found, Void)


def test_moves_of_classes_beside_void_them_too():
  """Mixins that are no methods; and of two parents the one that declared nothing anew."""
  mixin = type("Mixin", (), {"victim": first_slot})
  assert type("Own", (mixin, SnapKV), {})(6, 2).placement == VOID
  declared = type("Declared", (SnapKV,), {"insert": twice_v, **IN_TURN})
  assert type("Own", (declared, First), {})(6, 2).placement == VOID


def test_declarations_describe_moves():
  described = {x for x in itertools.chain(*forms.DESCRIBED.values()) if not x.startswith("_")}
  assert described <= {*vars(Method), *vars(Selective)}
  assert {*forms.DESCRIBED} <= {*vars(Method), *vars(Selective)}


# ---- wrappers


TYPICAL = ("full", "snapkv", "quest", "art", "prr", "infllm")


@pytest.mark.kin
@pytest.mark.core(2)
@pytest.mark.parametrize(
  "name",
  [pytest.param(name, marks=[pytest.mark.slow] * (name not in TYPICAL)) for name in METHODS],
)
def test_an_empty_wrapper_takes_the_kernels_of_its_base(name):
  def jaxpr(method):
    step, arguments = decode_step(method)
    return operations(jax.make_jaxpr(step)(*arguments))

  assert jaxpr(Through(STEPS[name])) == jaxpr(STEPS[name])


class Driven(Full):
  """Drivers of its own, and empty caches of its own."""

  def decode_step(self, at, *rest):
    return of_first(lambda out: 2 * out)(super().decode_step(at, *rest))

  init_caches = begun


def test_an_empty_wrapper_is_driven_as_its_base():
  own, through = (results(method, "reference") for method in (Driven(), Through(Driven())))
  assert not differ(own, through) and differ(own, results(Full(), "reference"))
  assert (Through(Driven()).init_caches(STREAM.spec(8))[0].seen == 1).all()
  shared = SharedPrefill((Full(), Random(6, recent=2)))
  made, wrapped = (m.init_caches(STREAM.spec(8)) for m in (shared, Through(shared)))
  assert jax.tree.structure(made) == jax.tree.structure(wrapped)


@pytest.mark.parametrize(
  ("move", "form", "driver"),
  [
    ("window", narrow_window, "decode_step"),
    ("capacity", lambda self, spec, layer: 4, "init_caches"),
  ],
)
def test_overrides_over_drivers_that_need_not_ask_are_refused(move, form, driver):
  own = type("Own", (Wrapper,), {move: form})
  with pytest.raises(
    ValueError, match=rf"Own\.base: found Driven.*whose {driver} may not .*{move}"
  ):
    own(Driven())


@pytest.mark.parametrize("move", ["window", "span"])
@pytest.mark.parametrize("name", ["infllm", "ltri"])
def test_what_a_streamed_method_sees_is_its_own(name, move):
  """An override that nothing would ask for is refused as soon as a step is traced."""
  base = settings.example(METHODS[name], 16)
  own = type("Own", (Wrapper,), {move: lambda self, at, *rest: getattr(self.base, move)(at, *rest)})
  message = rf"Own\.{move}: found an override over {METHODS[name].__name__}, expected none"
  with pytest.raises(NotImplementedError, match=message):
    jax.eval_shape(program(own(base), "reference", (0, 0), 10))


def test_layers_that_are_alike_differ_under_an_override():
  """Each is traced for itself: the override may ask for the layer's number."""
  layers = []

  def asks(self, at, cache, q, plan, attended):
    layers.append(at.layer)
    return self.base.observe(at, cache, q, plan, attended)

  base = METHODS["infllm"](4, 8, 4, 1, chunk=4, held=1)
  own = type("Own", (Wrapper,), {"observe": asks})(base)
  for layer in (1, 2):
    at = own.at(Env(LAYERS, impl="reference", tile=4), layer)
    for top in (base, Through(base)):
      assert drivers.twin_of(at.under(top)).layer == 0
    assert drivers.twin_of(at) is None
    new = [taken(which, jnp.zeros((2, 1), jnp.int32))[..., 0, :] for which in "qkv"]
    cache = Cache.empty(own, STREAM.spec(CAPACITY, LAYERS), layer)
    jax.eval_shape(functools.partial(own.decode_step, at), cache, *new, jnp.ones(2, bool), Carry())
  assert layers == [1, 2]
