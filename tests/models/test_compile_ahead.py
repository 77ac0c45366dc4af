"""A step that is compiled while its prompt is read: the one that runs, compiled once."""

import contextlib
import threading

import jax
import numpy as np
import pytest

import kvjax
from kvjax.models.decode import background, by_layer
from kvjax.models.decode.batcher import Batcher
from kvjax.models.decode.generate import compile_ahead, generate, prefill
from kvjax.models.decode.sampling import Sampling
from kvjax.models.nn import flat, parallel
from kvjax.testing.tiny import LENGTHS, TOKENS, model
from tests.meshes import mesh_of

DREW = {"sampling": Sampling(0.7, top_k=5), "return_logprobs": True}


@contextlib.contextmanager
def compiled():
  """Threads in which a step was compiled meanwhile, one for each time."""
  flat.drop()
  heard = []

  def hear(event, seconds, **about):
    step = about.get("fun_name") in ("jit(decode)", "jit(decode_some)")
    if event.endswith("backend_compile_duration") and step:
      heard.append(threading.current_thread().name)

  jax.monitoring.register_event_duration_secs_listener(hear)
  try:
    yield heard
  finally:
    jax.monitoring.unregister_event_duration_listener(hear)


def on_a_device():
  return jax.device_put(model(), jax.devices()[-1])


def on_a_mesh():
  return parallel.shard(model(), mesh_of(2, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("made", "how"), [(model, {}), (on_a_mesh, DREW), (model, DREW), (on_a_device, {})]
)
def test_it_is_the_step_that_runs(made, how):
  decoder, method = made(), kvjax.SnapKV(16, window_size=4)

  def run(early):
    caches = decoder.init_caches(method, 2, 64)
    if early:
      compile_ahead(decoder, method, caches, stop=[1, 2], **how)
    logits, caches = prefill(decoder, TOKENS, LENGTHS, caches, method)
    return generate(decoder, logits, caches, method, steps=4, stop=[3], **how)[0].tokens

  with compiled() as threads:
    tokens = run(early=True)
    np.testing.assert_array_equal(run(early=True), tokens)
  assert threads == [background.THREAD]
  with compiled() as threads:
    np.testing.assert_array_equal(run(early=False), tokens)
  assert threads == [threading.current_thread().name]


@pytest.mark.slow
def test_a_stream_is_decoded_by_one_program_too(monkeypatch):
  """Where steps are one program, as on a GPU: with the store that the prompt fills."""
  monkeypatch.setattr(by_layer, "decodes", lambda *_: False)
  method = kvjax.Ltri(2, 6, 4, 2, chunk=8, held=4)
  caches = model().init_caches(method, 2, 64)
  with compiled() as threads:
    compile_ahead(model(), method, caches)
    logits, caches = prefill(model(), TOKENS, LENGTHS, caches, method)
    generate(model(), logits, caches, method, steps=2)
  assert threads == [background.THREAD]


@pytest.mark.slow
def test_a_batcher_compiles_with_its_first_request():
  batcher = Batcher(model(), kvjax.Full(), rows=2, capacity=64)
  with compiled() as threads:
    for row, length in zip(TOKENS, LENGTHS, strict=True):
      batcher.submit(row[:length], limit=3)
    assert len(list(batcher)) == 2
  assert threads == [background.THREAD]


@pytest.mark.slow
def test_what_fails_ahead_fails_where_it_is_called(monkeypatch):
  """The thread says nothing; the step raises."""

  def failing(*_):
    raise FileNotFoundError("no such table")

  monkeypatch.setattr(type(model()), "decode", failing)
  caches = model().init_caches(kvjax.Full(), 2, 64)
  flat.drop()
  compile_ahead(model(), kvjax.Full(), caches)
  logits, caches = prefill(model(), TOKENS, LENGTHS, caches, kvjax.Full())
  with pytest.raises(FileNotFoundError, match="no such table"):
    generate(model(), logits, caches, kvjax.Full(), steps=2)
  flat.drop()


def test_other_caches_are_refused():
  caches = model().init_caches(kvjax.Quest(16), 2, 64)
  with pytest.raises(ValueError, match="caches: found"):
    compile_ahead(model(), kvjax.Full(), caches)
