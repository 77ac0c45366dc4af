"""Several devices give what one gives: every method, split over 1, 2, 4 and 8 of them.

On GPUs (`scripts.tools.on_gpu --only devices_2`) over as many as there are, by the kernels of
"auto".
"""

import dataclasses
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import checkify

import kvjax
from kvjax import METHODS
from kvjax.models.decode import step
from kvjax.models.decode.batcher import Batcher
from kvjax.models.decode.caches import restore, save
from kvjax.models.decode.generate import generate, join, prefill, split
from kvjax.models.decode.rows import clear, insert
from kvjax.models.io import convert
from kvjax.models.nn.parallel import shard
from kvjax.models.nn.transformer import Transformer
from kvjax.ops import offload
from kvjax.runtime import sharding
from kvjax.testing.tiny import CLOSE
from tests import tiny_gguf
from tests.meshes import CONFIG, GPU, mesh_of, model
from tests.sharded import (
  BUDGET,
  CAPACITY,
  LENGTHS,
  SPREAD,
  STEPS,
  TOKENS,
  B,
  D,
  L,
  V,
  check,
  ran,
  state_bytes,
)


def over(usual, *others):
  """Meshes (heads, slots), of which all but the usual one are for the slow tests."""
  first = pytest.param(usual, id="{}x{}".format(*usual))
  rest = [pytest.param(m, id="{}x{}".format(*m), marks=pytest.mark.slow) for m in others]
  return pytest.mark.parametrize("mesh", [first, *rest])


def one_of(names, *families, alike=()):
  """Of every family of methods one for the core, all others for the slow tests; those that are
  split as another one are of sweeps.
  """
  slow, sweep = pytest.mark.slow, pytest.mark.sweep
  marks = [[slow] * (name not in families) + [sweep] * (name in alike) for name in names]
  cases = [pytest.param(name, marks=mark) for name, mark in zip(names, marks, strict=True)]
  return pytest.mark.parametrize("name", cases)


PROMPT = TOKENS[:, : LENGTHS.max()]


def read(decoder, method, tokens=PROMPT, lengths=LENGTHS, room=0, **how):
  """Logits and caches of a prompt."""
  caches = decoder.init_caches(method, len(lengths), CAPACITY + room)
  return prefill(decoder, tokens, lengths, caches, method, **how)


# Every method's layer is split over two devices in tests/laws.
ALIKE = "tova", "r_kv", "rocketkv", "twilight", "etf", "psaw"


@pytest.mark.kin
@pytest.mark.slow
@pytest.mark.rest
@over((4, 1), (1, 1), (2, 1), (8, 1))
@one_of(METHODS, "snapkv", "quest", alike=ALIKE)
def test_tensor_parallel_equals_one_device(name, mesh):
  check(name, mesh)


@pytest.mark.slow
@pytest.mark.rest
@over((2, 4), (1, 2), (1, 4), (1, 8), *[(2, 2)] * (jax.device_count() == 4))
@one_of(SPREAD, "quest", "cpe")
def test_context_parallel_equals_one_device(name, mesh):
  check(name, mesh)


@pytest.mark.rest(2)
@pytest.mark.slow
@over((1, 2), (2, 2))
@pytest.mark.parametrize("name", ["full", "quest", "psaw"])
def test_sharded_prompts_in_chunks(name, mesh):
  """The first chunk is attended to by heads, the later ones by slots."""
  method = kvjax.settings.example(METHODS[name], BUDGET)
  found, wanted = (read(x, method, TOKENS, chunk=16)[0] for x in (model(*mesh), model()))
  np.testing.assert_allclose(found, wanted, atol=CLOSE)


@dataclasses.dataclass(frozen=True)
class InParts(kvjax.Full):
  """The full cache, whose arrays nobody makes outside of a program."""

  def init_caches(self, spec):
    assert isinstance(jnp.zeros(()), jax.core.Tracer)
    return super().init_caches(spec)


@pytest.mark.slow
@over((4, 1), (2, 2))
def test_a_batch_has_caches_in_parts_alone(mesh):
  """Of all rows, of prompts that are read and of an emptied row; answers are as on one device."""
  decoder, answers = model(*mesh), []
  made = sharding.maker.cache_info().misses
  for method, one in ((InParts(), decoder), (kvjax.Full(), model())):
    batch = Batcher(one, method, rows=2, capacity=CAPACITY, together=3)
    for i in range(3):
      batch.submit(TOKENS[0, : LENGTHS[1] - i], limit=3)
    answers.append({x.request: x.tokens.tolist() for x in batch})
    if one is decoder:
      held = clear(batch._device.caches, [0], method, decoder.spec(2, CAPACITY))
  assert answers[0] == answers[1]
  assert sharding.maker.cache_info().misses == made + 3  # programs: one for each of those
  for rows in (1, 2):
    spec = decoder.spec(rows, CAPACITY)
    part = kvjax.plan_memory(spec, method, decoder.mesh).device
    program = sharding.maker(InParts(), spec, decoder.mesh).lower().compile().memory_analysis()
    assert part <= program.output_size_in_bytes < 1.1 * part
    assert program.temp_size_in_bytes < 0.1 * part and program.argument_size_in_bytes == 0
  assert sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(held)) == part


@pytest.mark.slow
@over((2, 1), (1, 2))
def test_sharded_prompts_may_fill_the_capacity(mesh):
  prompt = kvjax.Full(), TOKENS, np.array([CAPACITY, 7], np.int32)
  (found, caches), (wanted, _) = read(model(*mesh), *prompt), read(model(), *prompt)
  np.testing.assert_allclose(found, wanted, atol=CLOSE)
  assert caches[0].used.tolist() == [CAPACITY, 7]


@pytest.mark.rest(1)
@pytest.mark.slow
@over((4, 1), (2, 1))
def test_retrieval_heads_on_any_device(mesh):
  """A layer's head is on one of them, and all retrieve what it wants."""
  heads = ((0, 3, 0.5), (2, 12, 0.4))
  method = kvjax.Ltri(2, 8, 4, 2, chunk=16, held=4, last=0, heads=heads, persistent=False)

  def answered(decoder):
    state = read(decoder, method)
    out, caches = generate(decoder, *state, method, steps=STEPS, return_logits=True)
    return out.logits, [cache.rows for cache in caches]

  (found, ours), (wanted, theirs) = answered(model(*mesh)), answered(model())
  np.testing.assert_allclose(found, wanted, atol=CLOSE)
  for mine, other in zip(ours, theirs, strict=True):
    for name in ("gone", "held", "kept"):
      np.testing.assert_array_equal(mine[name], other[name])
  assert (ours[0]["kept"] >= 0).all() and (ours[2]["kept"] >= 0).all()


@pytest.mark.rest(2)
@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "mesh"), [("snapkv", (2, 1)), ("longflow", (2, 1)), ("cpe", (2, 2)), ("full", (1, 2))]
)
def test_several_steps_a_call_on_any_device(monkeypatch, name, mesh):
  """As models below 8 GB take them on GPUs: the last call's are not all asked for."""
  monkeypatch.setattr(step, "quick", lambda _: True)
  method = kvjax.settings.example(METHODS[name], BUDGET)

  def answered(decoder):
    state = read(decoder, method, room=32)
    out, caches = generate(decoder, *state, method, steps=18, return_logprobs=True)
    return out, [cache.seen.tolist() for cache in caches]

  (found, ours), (wanted, theirs) = answered(model(*mesh)), answered(model())
  np.testing.assert_array_equal(found.tokens, wanted.tokens)
  np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=CLOSE)
  assert ours == theirs == [(LENGTHS + 18).tolist()] * len(theirs)


@pytest.mark.slow
@over((2, 1))
def test_stores_are_split_by_heads(mesh, tmp_path):
  """A row enters them, one is emptied, and they are saved; all in the memory where they lie."""
  method, made = kvjax.settings.example(METHODS["infllm"], BUDGET), []
  for decoder in (model(*mesh), model()):
    spec, found = decoder.spec(2, CAPACITY), []
    for rows in (2, 1):
      lengths = LENGTHS[:rows]
      found.append(read(decoder, method, TOKENS[:rows, : lengths.max()], lengths))
    (logits, live), (_, new) = found
    live, folder = insert(live, [1], new), tmp_path / str(len(made))
    save(folder, logits, live, method=method, spec=spec)
    logits, again = restore(folder, method, spec, mesh=decoder.mesh)
    generate(decoder, logits, again, method, steps=STEPS)
    live = clear(live, [0], method, spec)
    made.append(live)
    if GPU:
      assert {x.sharding.memory_kind for x in offload.hosted(live)} == {"pinned_host"}
  parts = [x.addressable_shards[0].data.nbytes for x in offload.hosted(made[0])]
  assert [2 * part for part in parts] == [x.nbytes for x in offload.hosted(made[1])]
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=CLOSE), *made)


def test_places_of_stores(monkeypatch):
  """In the host's memory where that lies apart, by heads; not of several processes."""
  monkeypatch.setattr(offload, "on_host", lambda: True)
  method = kvjax.settings.example(METHODS["infllm"], BUDGET)
  mesh, spec = mesh_of(2), model().spec(2, CAPACITY)
  shapes = jax.eval_shape(lambda: method.init_caches(spec))
  where = sharding.placement(method, spec, mesh, shapes)
  stores = {id(x) for x in offload.hosted(shapes)}
  for x, to in zip(jax.tree.leaves(shapes), jax.tree.leaves(where), strict=True):
    assert (to.memory_kind == "pinned_host") == (id(x) in stores)
    assert id(x) not in stores or to.shard_shape(x.shape)[1] == x.shape[1] // 2
  with pytest.raises(NotImplementedError, match="devices of 2 processes for InfLLM"):
    sharding.check_store(method, 2)


@pytest.mark.skipif(not GPU, reason="float32 on a CPU; in 16 bits prompts are cuDNN's")
@pytest.mark.parametrize(
  ("name", "mesh"),
  [(name, mesh) for name in ("full", "psaw") for mesh in ((2, 1), (4, 1), (1, 2), (2, 2))]
  + [(name, mesh) for name in ("snapkv", "streaming_llm") for mesh in ((2, 1), (4, 1))],
)
def test_prompts_in_sixteen_bits(name, mesh):
  """By cuDNN, whole or in pieces, and by our kernels: as far from one device as rounding goes."""
  one = Transformer(CONFIG, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
  method = kvjax.settings.example(METHODS[name], BUDGET)

  def answered(decoder):
    logits, caches = read(decoder, method)
    out, _ = generate(decoder, logits, caches, method, steps=2, return_logits=True)
    return np.asarray(logits), np.asarray(out.logits[:, 0])

  for found, wanted in zip(answered(shard(one, mesh_of(*mesh))), answered(one), strict=True):
    assert np.linalg.norm(found - wanted) <= 0.03 * np.linalg.norm(wanted)


def test_the_readme_claims_what_methods_say():
  """Of models/: `scripts.tools.support_table` writes split slots for those that spread."""
  text = (pathlib.Path(__file__).parents[2] / "models" / "README.md").read_text("utf-8")
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
    model(1, 2).init_caches(kvjax.settings.example(METHODS[name], BUDGET), 2, CAPACITY)


def test_a_step_has_the_collectives_of_the_design():
  """Two all-reduces of [B, D] a layer, one for the embedding's rows, and a gather of the logits."""
  found = ran(METHODS["full"](), 2).collectives
  wanted = [("all-reduce", B * D * 4)] * (2 * L + 1) + [("all-gather", B * V * 4)]
  assert sorted(found) == sorted(wanted)


@pytest.mark.slow
@over((2, 4), (1, 2))
def test_a_step_over_split_slots_gathers_softmax_states(mesh):
  """(o, m, l) of every device's part once a layer, and nothing else of attention. XLA makes one
  collective of the three on a GPU; a CPU's programs show them apart.
  """
  heads, slots = mesh
  found = ran(METHODS["full"](), *mesh).collectives
  behind = L * (1 if heads == 1 else 2)  # attention's sum is over the devices of "heads"
  wanted = [("all-reduce", B * D * 4)] * (behind + 1) + [("all-gather", B * V * 4)]
  queries = B * CONFIG.heads // heads
  parts = [slots * 4 * queries * width for width in (CONFIG.head_dim, 1, 1)]  # float32
  assert sum(parts) == slots * state_bytes(heads)
  wanted += [("all-gather", size) for size in ([sum(parts)] if GPU else parts)] * L
  assert sorted(found) == sorted(wanted)


@pytest.mark.slow
def test_checkpoints_are_restored_into_the_layout(tmp_path):
  """Every device reads its parts; what they give is what the model on one device gives."""
  tiny_gguf.write(tmp_path / "tiny.gguf")
  folder = convert.convert(tmp_path / "tiny.gguf", tmp_path / "tiny", progress=False)
  whole, _ = convert.load(folder, precision="float32")
  spread, _ = convert.load(folder, precision="float32", mesh=mesh_of(2))
  layer = spread.layers[1]
  for weight, parts in ((layer.attention.wqkv, 2), (layer.mlp.down, 2), (spread.norm.scale, 1)):
    shard_bytes = weight[...].addressable_shards[0].data.nbytes
    assert len(weight[...].sharding.device_set) == 2 and weight[...].nbytes == parts * shard_bytes
  method, out = kvjax.Full(), []
  for decoder in (whole, spread):
    state = read(decoder, method, np.arange(1, 12)[None], np.array([11]))
    out.append(generate(decoder, *state, method, steps=6, return_logits=True)[0])
  np.testing.assert_array_equal(out[0].tokens, out[1].tokens)
  np.testing.assert_allclose(out[0].logits, out[1].logits, atol=CLOSE)


@pytest.mark.parametrize(
  ("heads", "slots", "message"),
  [
    (64, 2, r"found \d devices, expected heads × slots = 128"),
    (0, 1, "heads: found 0, expected at least 1"),
  ],
)
def test_no_such_mesh(heads, slots, message):
  with pytest.raises(ValueError, match=message):
    kvjax.make_mesh(heads, slots)


def test_a_mesh_that_does_not_fit():
  with pytest.raises(ValueError, match="found 3 devices to split kv_heads = 8"):
    shard(model(), mesh_of(3))


@pytest.mark.parametrize("heads", [1, 2])
def test_compiler_options(heads):
  """NCCL's all-reduces on several GPUs where XLA knows the option, nothing elsewhere."""
  options = kvjax.compiler_options(mesh_of(heads))
  assert kvjax.compiler_options(None) == {}
  assert not options or (GPU and heads > 1)
  jax.jit(lambda x: x + 1, compiler_options=options)(1.0)


def test_other_meshes_are_refused():
  mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
  with pytest.raises(ValueError, match=r"found axes \('x',\).*expected \('heads', 'slots'\)"):
    shard(model(), mesh)
  with pytest.raises(ValueError, match=r"found axes \('x',\).*expected \('heads', 'slots'\)"):
    kvjax.plan_memory(model().spec(1, 64), kvjax.Full(), mesh)


def test_slots_that_do_not_split_evenly():
  decoder = model(1, 4)
  with pytest.raises(ValueError, match="expected divisors of its heads and slots"):
    decoder.init_caches(kvjax.Full(), 1, 50)
  with pytest.raises(ValueError, match="expected divisors of its heads and slots"):
    kvjax.plan_memory(decoder.spec(1, 50), kvjax.Full(), decoder.mesh)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quest", "infllm"])
def test_reports_are_of_all_heads(name):
  method = kvjax.settings.example(METHODS[name], BUDGET)

  def reports(decoder, caches):
    _, caches = decoder.prefill(jnp.asarray(PROMPT), jnp.asarray(LENGTHS), caches, method)
    return decoder.decode(jnp.asarray(TOKENS[:, 0]), caches, method, with_aux=True)[2]

  decoders = model(), model(2)
  one, other = (
    jax.jit(functools.partial(reports, d))(d.init_caches(method, 2, CAPACITY)) for d in decoders
  )
  assert one[0]["visited"].shape == (2, CONFIG.kv_heads)
  jax.tree.map(np.testing.assert_array_equal, other, one)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 1), (2, 2)])
def test_nan_on_one_device_is_everybodys(mesh):
  """A NaN in one value of one head: layer and row are named, and the row's cache stays."""
  decoder, method = shard(model(), mesh_of(*mesh)), kvjax.Full()
  decoder.env = dataclasses.replace(decoder.env, check_nan=True)
  graph, leaves = split(decoder)
  state = read(decoder, method)
  generate(decoder, *state, method, steps=4, chunk=2)  # finds nothing where there is nothing
  logits, caches = read(decoder, method)
  v = caches[1].slots["v"]
  sick = caches[0], caches[1].put(slots={"v": v.at[1, 5, 3, 2].set(jnp.nan)}), *caches[2:]

  @jax.jit
  def once(leaves, caches, token):
    return checkify.checkify(lambda c: join(graph, leaves).decode(token, c, method))(caches)

  error, (_, after) = once(leaves, sick, TOKENS[:, 0])
  message = r"Full, layer 1: .* row 1, which has cached 37 tokens"
  with pytest.raises(checkify.JaxRuntimeError, match=message):
    error.throw()
  assert [cache.seen.tolist() for cache in after[:2]] == [[61, 38], [61, 37]]
  np.testing.assert_array_equal(after[1].pos[1], sick[1].pos[1])
  with pytest.raises(checkify.JaxRuntimeError, match=message):  # out of a loop, too
    generate(decoder, logits, sick, method, steps=4, chunk=2)
