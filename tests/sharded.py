"""Laws of sharding: several devices give what one gives, of one process or of several."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import METHODS
from kvjax.families.coded import Coded
from kvjax.models.decode.generate import join, split
from kvjax.ops import offload
from kvjax.primitives.codes import unpacked
from kvjax.testing.tiny import CLOSE
from tests.meshes import CONFIG, model, whole
from tests.steps import equations

BUDGET, CAPACITY, STEPS = 12, 64, 3
LENGTHS = np.array([60, 37], np.int32)  # tokens on every device that slots are split over
# No token comes twice in a row: the keys of its two places would be turned differently and else
# alike, and which of two equal norms is the smaller, their last bits would say.
IDS = np.arange(CONFIG.vocab, dtype=np.int32)
TOKENS = np.random.default_rng(0).permuted(np.stack([IDS, IDS]), axis=1)
# How far logits may lie apart: `CLOSE`, sums in another order; `MOVED`, where these have made a
# scale or zero point of 16 bits its neighbour. One of KIVI's here moves logits by up to 8e-4.
MOVED = 2e-3
B, D, V, L = 2, CONFIG.dim, CONFIG.vocab, CONFIG.layers

COLLECTIVE = re.compile(
  r"= (?P<shapes>.*?) (?P<kind>all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)"
  r"(?P<start>-start)?\("
)
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}


def collectives(program):
  """Kind and bytes of every collective of a compiled program."""
  found = []
  for line in program.splitlines():
    if match := COLLECTIVE.search(line):
      shapes = re.findall(r"(\w+)\[([\d,]*)\]", match["shapes"])
      if match["start"]:  # of what goes in, then of what comes out
        shapes = shapes[len(shapes) // 2 :]
      sizes = [
        BYTES[t] * int(np.prod([int(n) for n in dims.split(",") if n])) for t, dims in shapes
      ]
      found.append((match["kind"], sum(sizes)))
  return found


def programs(method, heads, slots):
  """The functions of a prompt and of a decode step, and what they are called with."""
  decoder = model(heads, slots)
  graph, leaves = split(decoder)

  def read(leaves, caches, tokens, lengths):
    return join(graph, leaves).prefill(tokens, lengths, caches, method)

  def step(leaves, caches, token, live):
    return join(graph, leaves).decode(token, caches, method, live)

  caches = decoder.init_caches(method, 2, CAPACITY)
  prompt = TOKENS[:, : LENGTHS.max()], LENGTHS
  return read, step, leaves, caches, prompt


@dataclasses.dataclass(frozen=True)
class Ran:
  """A prompt and STEPS tokens: logits [B, STEPS + 1, V], and what the compiled step says.

  `held` are the bytes of the caches on a device, `in_place` those that the step donates; of methods
  that store codes, `caches` are there after the prompt and after each token.
  """

  logits: np.ndarray
  collectives: list
  held: int
  in_place: int
  caches: list


@functools.cache
def ran(method, heads=0, slots=1):
  read, step, leaves, caches, prompt = programs(method, heads, slots)
  parts = jax.tree.map(lambda x: x.addressable_shards[0].data.nbytes, caches)
  read, step = (lambda *args, f=f: offload.settled(f(*args)) for f in (read, step))
  first, caches = jax.jit(read)(leaves, caches, *prompt)
  live = np.ones(2, bool)
  lowered = jax.jit(step, donate_argnums=1).lower(leaves, caches, TOKENS[:, 0], live)
  compiled = lowered.compile()
  coded = isinstance(method, Coded)
  out, stored = [first], [whole(caches)] if coded else []
  for i in range(STEPS):
    if coded and heads:  # each step from what one device has stored
      alone = ran(method).caches[i]
      caches = jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), alone, caches)
    logits, caches = compiled(leaves, caches, TOKENS[np.arange(2), LENGTHS + i], live)
    out.append(logits)
    stored += [whole(caches)] if coded else []
  analysis = compiled.memory_analysis()
  return Ran(
    np.stack(out, 1),
    collectives(compiled.as_text()),
    sum(jax.tree.leaves(parts)),
    analysis.alias_size_in_bytes + analysis.host_alias_size_in_bytes,
    stored,
  )


def check_logits(method, spread, alone):
  """Alike; of methods that store codes the steps are, where what they store is.

  A sum in another order can move a number from half-way between two codes to the other one. That is
  one level, of one number in thousands, of which the row's logits then tell.
  """
  if not isinstance(method, Coded):
    np.testing.assert_allclose(spread.logits, alone.logits, atol=CLOSE)
    return
  np.testing.assert_allclose(spread.logits[:, 0], alone.logits[:, 0], atol=CLOSE)
  alike = []
  for i, caches in enumerate(zip(spread.caches, alone.caches, strict=True)):
    codes, scales = moved(method, *caches)
    rows = codes == 0
    if i > 0:
      tolerance = np.where(scales[rows] > 0, MOVED, CLOSE)[:, None]
      assert (np.abs(spread.logits[rows, i] - alone.logits[rows, i]) <= tolerance).all()
      alike.append(rows)
  assert np.mean(alike) > 0.5


def moved(method, ours, theirs):
  """Counts of each row's codes that are a level apart, and its 16-bit numbers that are a unit."""
  codes, scales, of_16 = np.zeros(2, int), np.zeros(2, int), 0
  for a, b in zip(ours, theirs, strict=True):
    for name in "kv":
      x, y = (np.asarray(unpacked(jnp.asarray(c.slots[name]), method.bits)) for c in (a, b))
      assert np.abs(x - y).max() <= 1
      codes += (x != y).sum((1, 2, 3))
    shelves = zip({**a.slots, **a.heads}.values(), {**b.slots, **b.heads}.values(), strict=True)
    for x, y in shelves:
      if x.dtype == jnp.float16:
        unit = np.float32(np.spacing(np.maximum(np.abs(x), np.abs(y))))
        # Near 0 units are smaller than what float32 sums of numbers up to 10 lose.
        assert (np.abs(np.float32(x) - np.float32(y)) <= unit + 1e-5).all()
        scales, of_16 = scales + (x != y).sum((1, 2, 3)), of_16 + x.size
  assert codes.max() <= 4 and scales.sum() <= of_16 / 500
  return codes, scales


def check(name, mesh):
  """What one device gives; no collective moves a cache, and the caches are updated in place."""
  method = kvjax.settings.example(METHODS[name], BUDGET)
  uneven = method.traits.uneven
  if uneven is not None and (why := uneven(model().spec(2, CAPACITY), mesh[0])):
    with pytest.raises(ValueError, match=re.escape(why)):
      ran(method, *mesh)
    pytest.skip(f"refused: {why}")  # as was asserted: the table of devices has no such mesh
  if mesh == (1, 1):  # nothing to run: it is the program of no mesh
    return check_same_program(method)
  spread, alone = ran(method, *mesh), ran(method)
  check_logits(method, spread, alone)
  assert spread.in_place >= spread.held
  largest = max(size for _, size in spread.collectives)
  heads, slots = mesh
  if slots == 1:
    assert largest < spread.held / L / 4
  else:  # logits, a softmax state of every query head, or k scores with their indices
    candidates = B * CONFIG.kv_heads // heads * BUDGET * 2 * 4
    assert largest <= max(B * V * 4, slots * max(state_bytes(heads), candidates))


def state_bytes(heads):
  """(o, m, l) of a device's query heads, float32."""
  return B * CONFIG.heads // heads * (CONFIG.head_dim + 2) * 4


def check_same_program(method):
  """On a mesh of one device, shard_map holds the equations that are traced without a mesh."""
  traced = []
  for heads in (1, 0):
    read, step, leaves, caches, prompt = programs(method, heads, 1)
    token = TOKENS[:, 0], np.ones(2, bool)
    traced.append(
      [jax.make_jaxpr(f)(leaves, caches, *x) for f, x in ((read, prompt), (step, token))]
    )
  for on_mesh, alone in zip(*traced, strict=True):
    (outer,) = on_mesh.eqns
    assert outer.primitive.name == "shard_map"
    assert shapes(outer.params["jaxpr"]) == shapes(alone.jaxpr)


def shapes(jaxpr):
  """Operations with the shapes and dtypes that they take and give, nested ones included.

  But for "reshard", by which a constant made under a mesh says where it lies: on the one device.
  """
  return [
    (eqn.primitive.name, [(x.aval.shape, x.aval.dtype) for x in (*eqn.invars, *eqn.outvars)])
    for eqn in equations(jaxpr)
    if eqn.primitive.name != "reshard"
  ]


SPREAD = [name for name in METHODS if kvjax.settings.example(METHODS[name], BUDGET).traits.spreads]
