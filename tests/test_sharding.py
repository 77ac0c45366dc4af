"""Several devices give what one gives: every method, split over 1, 2, 4 and 8 of them."""

import dataclasses
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax import METHODS, Env
from models import convert
from models.config import ModelConfig
from models.generate import generate, join, prefill, split
from models.parallel import shard
from models.transformer import Transformer
from tests import tiny_gguf
from tests.tiny import CLOSE

CONFIG = ModelConfig(
  vocab=64, dim=48, layers=4, heads=16, kv_heads=8, head_dim=16, ffn=64, max_context=512
)
BUDGET, CAPACITY, STEPS = 12, 64, 3
LENGTHS = np.array([23, 14], np.int32)
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab, (2, 40), np.int32)

every = pytest.mark.parametrize("name", METHODS)


@functools.cache
def model(heads=0, slots=1):
  """The decoder on one device (0), or spread over heads × slots of them."""
  if heads:
    return shard(model(), kvjax.make_mesh(heads, slots))
  graph, shapes = nnx.split(
    nnx.eval_shape(
      lambda: Transformer(CONFIG, dtype=jnp.float32, impl="reference", rngs=nnx.Rngs(0))
    )
  )
  rng = np.random.default_rng(0)

  def draw(path, x):
    name = jax.tree_util.keystr(path)
    if "norm" in name:
      return jnp.ones(x.shape, x.dtype)
    scale = 2.5 * x.shape[0] ** -0.5 if "wqkv" in name else CONFIG.dim**-0.5
    return jnp.asarray(rng.normal(size=x.shape) * (1 if "embed" in name else scale), x.dtype)

  built = nnx.merge(graph, jax.tree_util.tree_map_with_path(draw, shapes))
  built.env = Env(CONFIG.layers, CONFIG.rope, "reference", tile=4)
  return built


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(graph, method, leaves, caches, tokens, lengths):
  """A prompt and STEPS tokens; logits [B, STEPS + 1, V]."""
  decoder = join(graph, leaves)
  first, caches = decoder.prefill(tokens[:, : LENGTHS.max()], lengths, caches, method)

  def step(caches, i):
    token = jnp.take_along_axis(tokens, lengths[:, None] + i, 1)[:, 0]
    return decoder.decode(token, caches, method)[::-1]

  caches, rest = jax.lax.scan(step, caches, jnp.arange(STEPS))
  return jnp.concatenate([first[None], rest]).swapaxes(0, 1), caches


@functools.cache
def logits(method, heads=0, slots=1):
  decoder = model(heads, slots)
  caches = decoder.init_caches(method, 2, CAPACITY)
  return np.asarray(run(*split(decoder)[:1], method, split(decoder)[1], caches, TOKENS, LENGTHS)[0])


def over(usual, *others):
  """Meshes (heads, slots), of which all but the usual one are for the slow tests."""
  first = pytest.param(usual, id="{}x{}".format(*usual))
  rest = [pytest.param(m, id="{}x{}".format(*m), marks=pytest.mark.slow) for m in others]
  return pytest.mark.parametrize("mesh", [first, *rest])


@every
@over((4, 1), (1, 1), (2, 1), (8, 1))
def test_tensor_parallel_equals_one_device(name, mesh):
  method = METHODS[name].example(BUDGET)
  np.testing.assert_allclose(logits(method, *mesh), logits(method), atol=CLOSE)


SPREAD = [name for name in METHODS if METHODS[name].example(BUDGET).spreads]


@pytest.mark.parametrize("name", SPREAD)
@over((2, 4), (1, 2), (1, 4), (1, 8))
def test_context_parallel_equals_one_device(name, mesh):
  method = METHODS[name].example(BUDGET)
  np.testing.assert_allclose(logits(method, *mesh), logits(method), atol=CLOSE)


def test_the_readme_claims_what_methods_say():
  """Its table, which `scripts.support_table` writes, has split slots for those that spread."""
  text = (pathlib.Path(__file__).parent.parent / "README.md").read_text("utf-8")
  _, _, rest = text.partition("<!-- devices: begin -->")
  rows = [row.split("|") for row in rest.partition("<!-- devices: end -->")[0].splitlines()[3:]]
  claims = {
    name: cells[3].strip() != "–"
    for cells in rows
    if len(cells) > 3
    for name in re.findall(r"`(\w+)`", cells[1])
  }
  assert len(claims) > 20
  assert all(claim == (name in SPREAD) for name, claim in claims.items())


@pytest.mark.parametrize("name", [name for name in METHODS if name not in SPREAD])
def test_what_cannot_be_spread_says_so(name):
  with pytest.raises(NotImplementedError, match=r"slots split over devices for .* heads only"):
    model(1, 2).init_caches(METHODS[name].example(BUDGET), 2, CAPACITY)


COLLECTIVE = re.compile(
  r"= (?P<shapes>.*?) (?P<kind>all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)"
  r"(-start)?\("
)
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}


def collectives(method, heads, slots=1, capacity=1024):
  """Kind and bytes of every collective of one decode step, and the compiled program."""
  decoder = model(heads, slots)
  graph, leaves = split(decoder)
  caches = decoder.init_caches(method, 2, capacity)

  def step(leaves, caches, token):
    return join(graph, leaves).decode(token, caches, method)

  lowered = jax.jit(step, donate_argnums=1).lower(leaves, caches, jnp.zeros(2, jnp.int32))
  compiled = lowered.compile()
  found = []
  for line in compiled.as_text().splitlines():
    if match := COLLECTIVE.search(line):
      shapes = re.findall(r"(\w+)\[([\d,]*)\]", match["shapes"])
      sizes = [
        BYTES[t] * int(np.prod([int(n) for n in dims.split(",") if n])) for t, dims in shapes
      ]
      found.append((match["kind"], sum(sizes)))
  return found, compiled, caches


B, D, V, L = 2, CONFIG.dim, CONFIG.vocab, CONFIG.layers


def test_a_step_has_the_collectives_of_the_design():
  """Two all-reduces of [B, D] a layer, one for the embedding's rows, and a gather of the logits."""
  found, *_ = collectives(METHODS["full"](), 4)
  wanted = [("all-reduce", B * D * 4)] * (2 * L + 1) + [("all-gather", B * V * 4)]
  assert sorted(found) == sorted(wanted)


def test_a_step_over_split_slots_gathers_softmax_states():
  """[o ‖ m ‖ l] of every device's part once a layer, and nothing else of attention."""
  found, *_ = collectives(METHODS["full"](), 2, 4)
  state = 4 * B * (CONFIG.heads // 2) * (CONFIG.head_dim + 2) * 4
  wanted = [("all-reduce", B * D * 4)] * (2 * L + 1) + [("all-gather", B * V * 4)]
  wanted += [("all-gather", state)] * L
  assert sorted(found) == sorted(wanted)


@every
@pytest.mark.parametrize("mesh", [(4, 1), (2, 4)])
def test_no_collective_moves_a_cache(name, mesh):
  """What all collectives of a step move is less than a device's part of one layer's keys.

  The caches of all layers are donated and come back in place.
  """
  method = METHODS[name].example(64)
  if mesh[1] > 1 and not method.spreads:
    pytest.skip("does not run with split slots")
  found, compiled, caches = collectives(method, *mesh)
  held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(caches))
  assert compiled.memory_analysis().alias_size_in_bytes >= held
  keys = min(cache.slots["k"].addressable_shards[0].data.nbytes for cache in caches)
  assert max(size for _, size in found) < keys / 2


def test_checkpoints_are_restored_into_the_layout(tmp_path):
  """Every device reads its parts; what they give is what the model on one device gives."""
  tiny_gguf.write(tmp_path / "tiny.gguf")
  folder = convert.convert(tmp_path / "tiny.gguf", tmp_path / "tiny", progress=False)
  whole, _ = convert.load(folder)
  spread, _ = convert.load(folder, mesh=kvjax.make_mesh(heads=2))
  layer = spread.layers[1]
  for weight, parts in ((layer.attention.wqkv, 2), (layer.mlp.down, 2), (spread.norm.scale, 1)):
    shard_bytes = weight[...].addressable_shards[0].data.nbytes
    assert len(weight[...].sharding.device_set) == 2 and weight[...].nbytes == parts * shard_bytes
  tokens, lengths = np.arange(1, 12)[None], np.array([11])
  out = []
  for decoder in (whole, spread):
    caches = decoder.init_caches(kvjax.Full(), 1, 32)
    logits, caches = prefill(decoder, tokens, lengths, caches, kvjax.Full())
    out.append(generate(decoder, logits, caches, kvjax.Full(), steps=6, return_logits=True)[0])
  np.testing.assert_array_equal(out[0].tokens, out[1].tokens)
  np.testing.assert_allclose(out[0].logits, out[1].logits, atol=CLOSE)


@pytest.mark.parametrize(
  ("heads", "slots", "message"),
  [
    (3, 1, "found 3 devices to split kv_heads = 8"),
    (8, 2, "found 8 devices, expected heads × slots = 16"),
    (0, 1, "heads: found 0, expected at least 1"),
  ],
)
def test_a_mesh_that_does_not_fit(heads, slots, message):
  with pytest.raises(ValueError, match=message):
    shard(model(), kvjax.make_mesh(heads, slots))


def test_other_meshes_are_refused():
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
  with pytest.raises(ValueError, match=r"found axes \('x',\).*expected \('heads', 'slots'\)"):
    shard(model(), mesh)


def test_slots_that_do_not_split_evenly():
  with pytest.raises(ValueError, match="expected divisors of its heads and slots"):
    model(1, 4).init_caches(kvjax.Full(), 1, 50)


def test_reports_are_of_all_heads():
  method = METHODS["quest"].example(BUDGET)

  def reports(decoder, caches):
    _, caches = decoder.prefill(jnp.asarray(TOKENS[:, :23]), jnp.asarray(LENGTHS), caches, method)
    return decoder.decode(jnp.asarray(TOKENS[:, 0]), caches, method, with_aux=True)[2]

  decoders = model(), model(4)
  one, other = (
    jax.jit(functools.partial(reports, d))(d.init_caches(method, 2, CAPACITY)) for d in decoders
  )
  for wanted, found in zip(one, other, strict=True):
    assert wanted["visited"].shape == (2, CONFIG.kv_heads)
    np.testing.assert_array_equal(wanted["visited"], found["visited"])


def test_nan_is_looked_for_on_one_device_only():
  decoder = shard(model(), kvjax.make_mesh(2))
  decoder.env = dataclasses.replace(decoder.env, check_nan=True)
  caches = decoder.init_caches(kvjax.Full(), 2, CAPACITY)
  with pytest.raises(NotImplementedError, match="check_nan: found True on a mesh"):
    prefill(decoder, TOKENS[:, :23], LENGTHS, caches, kvjax.Full())
