"""Rows of a live batch in a decode loop, and what is refused; the law stands in `kvjax.testing`."""

import dataclasses

import jax
import numpy as np
import pytest

import kvjax
from kvjax.models.decode.caches import fork_shared
from kvjax.models.decode.generate import generate, prefill
from kvjax.models.decode.rows import clear, insert
from kvjax.testing.tiny import CAPACITY, LENGTHS, TOKENS, model
from tests import family_models

METHODS = {"full": kvjax.Full(), "snapkv": kvjax.SnapKV(16, window_size=4)}


def read(decoder, method, rows, capacity=CAPACITY):
  """Logits and caches of some rows of the prompts."""
  caches = method.init_caches(decoder.spec(len(rows), capacity))
  tokens = TOKENS[rows, :23] % decoder.config.vocab
  return prefill(decoder, tokens, LENGTHS[rows], caches, method)


def answer(decoder, logits, caches, method, live):
  out, caches = generate(decoder, logits, caches, method, steps=6, chunk=3, live=np.asarray(live))
  return out.tokens, out.last, caches


@pytest.mark.slow
def test_layers_with_a_window_of_their_own():
  """Some layers keep the newest tokens alone."""
  decoder, method = family_models.model("gemma3"), kvjax.Full()
  assert any(decoder.spec(1, CAPACITY).windows)
  mine, new = read(decoder, method, [1])
  logits, idle = read(decoder, method, [0, 0, 0])
  _, last, caches = answer(decoder, logits, idle, method, [True] * 3)
  caches, logits = insert(caches, [2], new), last.at[2].set(mine[0])
  mixed = answer(decoder, logits, caches, method, [True] * 3)[0]
  idle = insert(method.init_caches(decoder.spec(3, CAPACITY)), [2], new)
  alone = answer(decoder, logits, idle, method, [False, False, True])[0]
  np.testing.assert_array_equal(mixed[2], alone[2])


def test_several_rows_and_donation():
  method = kvjax.Full()
  _, live = read(model(), method, [0, 0, 0])
  _, new = read(model(), method, [1, 0])
  put = insert(live, [2, 0], new)
  assert put[0].seen.tolist() == [LENGTHS[0], LENGTHS[0], LENGTHS[1]]
  assert not new[0].seen.is_deleted()
  with pytest.raises(ValueError, match="caches: found"):
    insert(live, [0], new)
  empty = clear(put, [0, 1, 2], method, model().spec(7, CAPACITY))
  jax.tree.map(np.testing.assert_array_equal, empty, method.init_caches(model().spec(3, CAPACITY)))


def test_bad_arguments_are_refused():
  method, other = METHODS.values()
  logits, live = read(model(), method, [0, 1])
  (_, new), (_, longer), (_, foreign) = (
    read(model(), of, [1], size)
    for of, size in ((method, CAPACITY), (method, 2 * CAPACITY), (other, CAPACITY))
  )
  for rows, given, error, message in (
    ([2], new, ValueError, r"rows: found \[2\], expected different rows of 0 to 1"),
    ([], new, ValueError, r"rows: found \[\], expected different rows"),
    ([1, 1], new, ValueError, r"rows: found \[1, 1\], expected different rows"),
    ([0, 1], new, ValueError, "rows: found 2, expected 1, one for each row of new"),
    ([0.5], new, TypeError, r"rows: found float64 \(1,\), expected a list of integers"),
    ([0], (), TypeError, "caches: found tuple, expected"),
    ([0], longer, ValueError, r"new: layer 0: slots\.k: found .* a row, expected .*64, 16"),
    ([0], foreign, ValueError, r"new: layer 0: found .*SnapKV.*, expected .*Full\(\)"),
  ):
    with pytest.raises(error, match=message):
      insert(live, rows, given)
  with pytest.raises(ValueError, match=r"SnapKV"):
    clear(live, [0], other, model().spec(2, CAPACITY))
  spec = dataclasses.replace(model().spec(2, CAPACITY), capacity=32)
  with pytest.raises(ValueError, match=r"new: layer 0: slots\.k: found"):
    clear(live, [0], method, spec)
  branches = fork_shared(logits, live, method, 2, room=8)[1]
  with pytest.raises(NotImplementedError, match="live: layer 0: rows share a context"):
    insert(branches, [0], new)
  assert not live[0].seen.is_deleted()
