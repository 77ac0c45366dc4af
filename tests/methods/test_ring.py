"""Slots used in turn, against a list that tokens are put into one by one."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.primitives import ring


@pytest.mark.parametrize(
  ("size", "first", "seen", "used"), [(7, 0, 0, 0), (7, 2, 5, 5), (7, 3, 90, 7), (5, 4, 9, 3)]
)
def test_every_token_has_the_slot_that_a_list_gives_it(size, first, seen, used):
  rings = jnp.asarray([first, seen + size - used], jnp.int32)
  slot = used - 1
  for position in range(seen, seen + 20):
    slot = slot + 1 if slot + 1 < size else first
    assert ring.place(rings, jnp.int32(position), size) == slot


def test_heads_have_rings_of_their_own():
  rings = jnp.asarray([[[0, 4], [1, 9]], [[2, 4], [3, 4]]], jnp.int32)  # [B, K, 2]
  place = ring.place(rings, jnp.asarray([[9], [8]], jnp.int32), 4)
  np.testing.assert_array_equal(place, [[1, 1], [2, 3]])
