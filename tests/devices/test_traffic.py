"""The bytes that a step is said to move: what it reports to visit, and what it reads to choose."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kvjax
from kvjax import METHODS, CacheSpec
from kvjax.analysis import traffic
from kvjax.analysis.traffic import step_traffic
from kvjax.models.decode.generate import join
from kvjax.models.decode.step_bytes import step_bytes, weight_bytes
from kvjax.models.io.presets import PRESETS
from kvjax.models.nn.config import ModelConfig
from kvjax.testing.tiny import TOKENS, Run

LENGTH = 40  # tokens of both rows: whole pages of every method
SPEC = CacheSpec(batch=2, capacity=4096, kv_heads=4, groups=2, head_dim=64, layers=3)
TOKEN = 2 * 64 * 2 * 2 * 4  # bytes of keys and values of a slot of all heads and rows
# What reports less than is read: R-KV's budget holds the slots of tokens to come.
LESS = {"r_kv": 13 / 16}


@functools.partial(jax.jit, static_argnums=(0, 1))
def visits(graph, method, leaves, caches, tokens):
  reports = join(graph, leaves).decode(tokens, caches, method, with_aux=True)[2]
  return [report["visited"] for report in reports]


@pytest.mark.kin
@pytest.mark.core(1)
@pytest.mark.parametrize("name", METHODS)
def test_what_is_attended_to_is_what_a_step_visits(name):
  """Exactly, in every layer; where data decide, no more than is said."""
  method = kvjax.settings.usual(METHODS[name], 16)
  run = Run(method, capacity=LENGTH)
  run.prefill(np.full(2, LENGTH - 1, np.int32))
  visited = visits(run.graph, method, run.leaves, run.caches, TOKENS[:, LENGTH - 1])
  said = step_traffic(run.model.spec(2, LENGTH), method)
  for seen, layer in zip(visited, said, strict=True):
    attended = layer.attended
    if layer.bound:
      assert 0.5 * attended <= np.max(seen) <= attended
    else:  # heads may see apart
      assert np.mean(seen) == LESS.get(name, 1) * attended


@pytest.mark.kin
@pytest.mark.core(3)
@pytest.mark.parametrize("name", METHODS)
def test_rows_read_alike_and_longer_contexts_read_no_less(name):
  method = kvjax.settings.usual(METHODS[name], 256)
  once = sum(x.device for x in step_traffic(SPEC, method))
  twice = sum(x.device for x in step_traffic(dataclasses.replace(SPEC, batch=4), method))
  longer = sum(x.device for x in step_traffic(dataclasses.replace(SPEC, capacity=8192), method))
  assert twice == pytest.approx(2 * once, rel=1e-3)
  assert longer >= once


def test_the_full_cache_reads_all_of_it():
  (layer, *_) = step_traffic(SPEC, kvjax.Full())
  assert layer.attended == 4096
  assert layer.tokens == 4096 * TOKEN
  assert layer.scanned == layer.spared == layer.host == 0
  assert layer.others < 100  # counters
  assert not (layer.chosen or layer.bound)


def test_quest_reads_bounds_and_pages():
  """256 tokens in pages of 16, chosen by 256 pages' minima and maxima; one key page is renewed."""
  dense, sparse, _ = step_traffic(SPEC, kvjax.Quest(256, dense_layers=1))
  assert dense.attended == 4096
  assert sparse.attended == 256
  assert sparse.tokens == 256 * TOKEN + 16 * TOKEN // 2
  assert sparse.others == pytest.approx(256 * TOKEN, abs=100)
  assert sparse.scanned == 0
  assert sparse.chosen


def test_codes_are_read_where_what_they_stand_for_is():
  """256 of 4,096 tokens in a byte a number; their scales, and what Quest reads as it is."""
  dense, sparse, _ = step_traffic(SPEC, kvjax.Quantised(kvjax.Quest(256, dense_layers=1), bits=8))
  assert not (dense.bound or sparse.bound)  # as Quest's; CIS's data decide over codes, too
  assert step_traffic(SPEC, kvjax.Quantised(kvjax.CIS(64, 4, 16)))[0].bound
  assert dense.tokens == 4096 * TOKEN // 2
  assert sparse.attended == 256
  assert sparse.tokens == 256 * TOKEN // 2 + 16 * TOKEN // 4  # and a page's keys
  scales = (2 * 256 + 16) * 2 * 4 * 4
  assert sparse.others == pytest.approx(256 * TOKEN + scales, rel=0.05)
  assert sparse.chosen
  groups = step_traffic(SPEC, kvjax.KIVI(kvjax.Quest(256, dense_layers=1)))[1]  # in 2 bits
  assert (groups.attended, groups.tokens) == (256, 256 * TOKEN // 8 + 16 * TOKEN // 16)


def test_what_short_rows_would_read_does_not_count():
  """InfLLM-v2's tables have room for rows below 8,192 tokens, which attend to everything."""
  long = dataclasses.replace(SPEC, capacity=32768)
  assert step_traffic(long, kvjax.InfLLMv2())[0].attended == 64 * (1 + 32 + 64)
  assert step_traffic(long, kvjax.PRR(kvjax.InfLLMv2(), budget=1.0))[0].attended <= 2 * 64 * 97
  assert step_traffic(SPEC, kvjax.InfLLMv2())[0].attended == 4096


def test_shared_retrievals_scan_as_often_as_settings_say():
  """CIS scans between once a block and always, HShare's half of the layers, heads and steps."""
  keys = 4096 * TOKEN / 2
  scanned = [(x.scanned, x.scanned - x.spared) for x in step_traffic(SPEC, kvjax.CIS(64, 4, 16))]
  assert scanned[0] == (keys, keys / 16)
  always = step_traffic(SPEC, kvjax.CIS(64, 4, 16, tau=1.0))[0]
  assert (always.scanned, always.spared, always.bound) == (keys, 0, False)
  shared = step_traffic(SPEC, kvjax.CPE(64, 4, 16, tau=-1.0, phi=1.0))[0]
  assert (shared.scanned, shared.spared, shared.bound) == (keys / 16, 0, False)
  even = dataclasses.replace(SPEC, layers=4)
  half = step_traffic(even, kvjax.HShare())[0]
  assert (half.scanned, half.scanned - half.spared) == (keys / 2, keys / 8)


def test_windows_narrow_what_is_read_by_layer():
  attended = [x.attended for x in step_traffic(SPEC, kvjax.PSAW(sinks=4, start=0.0))]
  assert attended[0] >= attended[1] > attended[2]


def test_an_empty_wrapper_moves_what_its_base_does():
  @dataclasses.dataclass(frozen=True)
  class Empty(kvjax.Wrapper):
    pass

  for base in (kvjax.CIS(64, 4, 16), kvjax.InfLLMv2(dense_below=0), kvjax.H2O(64)):
    assert step_traffic(SPEC, Empty(base)) == step_traffic(SPEC, base)


def test_the_store_is_reached_over_the_link():
  """InfLLM fetches what it retrieves, and writes back nothing that a whole array would take."""
  method = kvjax.InfLLM(16, 256, 32, 4, held=8)
  layer = step_traffic(SPEC, method)[0]
  assert layer.host == 4 * 32 * TOKEN
  assert layer.bound


@pytest.mark.parametrize("name", ["infllm", "ltri"])
def test_a_gpu_s_kernels_do_not_hide_the_store(name, monkeypatch):
  method = kvjax.settings.example(kvjax.METHODS[name], 16)
  spec = kvjax.CacheSpec(2, 128, kv_heads=2, groups=2, head_dim=8, layers=2)
  found = [step_traffic(spec, method)]
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  found.append(step_traffic(spec, method))
  assert found[0] == found[1]


@pytest.mark.parametrize(
  ("read", "whole", "taken"),
  [
    (lambda x, i: x.sum(), 1.0, 0),
    (lambda x, i: x[:, :8].astype(jnp.float32).sum(), 0.125, 0),
    (lambda x, i: jnp.take(x, i, 0), 0.0, 128),
    (lambda x, i: x.at[i].set(1), 0.0, 0),
    (lambda x, i: jnp.where(i[0] > 0, x.at[0].set(1), x), 0.0, 0),
    (lambda x, i: x + 1, 1.0, 0),
    (lambda x, i: lax.fori_loop(0, i[0], lambda j, y: y + x[j], jnp.zeros(64)), 1.0, 0),
    (lambda x, i: lax.scan(lambda y, j: (y + x[j], None), jnp.zeros(64), i)[0], 0.0, 128),
    (lambda x, i: lax.scan(lambda y, r: (y + r, None), jnp.zeros(64), x)[0], 1.0, 0),
    (lambda x, i: lax.cond(i[0] > 0, lambda: x.sum(), lambda: x[0, 0]), 1.0, 0),
    (lambda x, i: (x.sum(), i)[1], 0.0, 0),
    (jax.jit(lambda x, i: x.T.reshape(8, -1).max()), 1.0, 0),
  ],
)
def test_what_a_program_looks_at(read, whole, taken):
  """Of x [64, 64], by two indices."""
  x, i = jnp.zeros((64, 64)), jnp.zeros(2, jnp.int32)
  program = jax.make_jaxpr(read)(x, i).jaxpr
  walk = traffic._Walk({"x": x.size})
  walk.follow(program, [(traffic._View("x"),), ()])
  assert walk.reads["x"].whole == whole
  assert walk.reads["x"].taken == pytest.approx(taken, abs=1)


@pytest.mark.parametrize(("codes", "whole", "taken"), [((), 1.0, 0), (("x",), 0.0, 128)])
def test_what_is_made_of_codes_is_read_where_it_is_used(codes, whole, taken):
  x, i = jnp.zeros((64, 64), jnp.int8), jnp.zeros(2, jnp.int32)
  program = jax.make_jaxpr(lambda x, i: jnp.take(3 * x.astype(jnp.float32), i, 0))(x, i).jaxpr
  walk = traffic._Walk({"x": x.size}, frozenset(codes))
  walk.follow(program, [(traffic._View("x"),), ()])
  assert (walk.reads["x"].whole, walk.reads["x"].taken) == (whole, taken)


@pytest.mark.slow
def test_weights_are_read_once_but_for_an_embedding_that_no_head_shares():
  llama, qwen = PRESETS["Llama-3.1-8B"], PRESETS["Qwen3-1.7B"]
  held, unread = weight_bytes(llama, jnp.bfloat16)
  assert unread == 128256 * 4096 * 2
  assert step_bytes(llama, kvjax.Full(), 1, 64).weights == held - unread
  assert weight_bytes(qwen, jnp.bfloat16)[1] == 0


def test_a_model_s_step():
  config = ModelConfig(64, 32, 2, 4, 2, 8, 48, tie_embeddings=True, max_context=64)
  moved = step_bytes(config, kvjax.Full(), 3, 64, jnp.float32)
  assert moved.device - moved.weights == pytest.approx(2 * 2 * 3 * 2 * 64 * 8 * 4, abs=200)
  assert moved.host == 0
  assert not moved.bound
