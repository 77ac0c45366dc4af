"""What is in sight: windows, spans and plans against loops over single slots."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from beartype.roar import BeartypeCallHintParamViolation

from kvjax import At, Attended, Full, Plan, Rope, Span, Window
from kvjax.methods.art.splits import Walked
from kvjax.methods.longflow.kernel import Named
from kvjax.methods.ltri import vectors
from kvjax.primitives.softmax_state import State
from kvjax.runtime import memory

SIZE = 13


def inside(slot, start, stop, sinks):
  """Slots [0, min(sinks, stop)) and [max(start, sinks), stop)."""
  return slot < min(sinks, stop) or max(start, sinks) <= slot < stop


def test_a_window_shows_the_first_tokens_and_those_from_its_first_on():
  first = np.array([[0, 3, 7], [5, 5, 12]])
  pos = np.stack([np.arange(SIZE), np.arange(SIZE)[::-1]])[:, None]
  seen = jax.jit(lambda first, pos: Window(2, first).sees(pos))(first, pos)
  for b in range(2):
    for t in range(3):
      want = [p < 2 or p >= first[b, t] for p in pos[b, 0]]
      assert np.asarray(seen)[b, 0, t].tolist() == want


@pytest.mark.parametrize("sinks", [0, 1, 4, 20])
def test_spans_hold_what_they_say(sinks):
  ends = [(0, 0), (0, 5), (3, 9), (4, 4), (9, 3), (5, SIZE), (2, 3)]
  start, stop = (jnp.asarray([[x[i]] for x in ends]) for i in range(2))
  span, slot = Span(start, stop, sinks), jnp.arange(SIZE)
  held, lengths = map(np.asarray, jax.jit(lambda span: (span.holds(slot), span.length()))(span))
  for i, (a, b) in enumerate(ends):
    want = [inside(s, a, b, sinks) for s in range(SIZE)]
    assert held[i, 0].tolist() == want
    assert lengths[i, 0] == sum(want)


@pytest.mark.parametrize("unit", [1, 4])
def test_entries_of_a_plan_count_what_is_attended_to(unit):
  """Of each listed tile the slots within span and cache; nothing behind the count or below 0."""
  table = np.array([[3, 0, 1, -1], [2, 3, 0, 1]])
  count, start, stop, sinks = [3, 2], [2, 6], [11, 12], 1
  span = Span(jnp.asarray(start)[:, None], jnp.asarray(stop)[:, None], sinks)
  plan = Plan(span, jnp.asarray(table)[:, None], jnp.asarray(count)[:, None], unit=unit)
  found = jax.jit(lambda plan: (plan.sizes(SIZE), plan.visited(SIZE)))(plan)
  sizes, visited = map(np.asarray, found)
  for b in range(2):
    want = []
    for i, tile in enumerate(table[b]):
      slots = range(tile * unit, min((tile + 1) * unit, SIZE)) if i < count[b] and tile >= 0 else ()
      want.append(sum(inside(s, start[b], stop[b], sinks) for s in slots))
    assert sizes[b, 0].tolist() == want
    assert visited[b, 0] == sum(want)


def test_a_note_is_found_under_those_of_others():
  """A wrapper's hides none of its base's; of one type the newest counts."""
  made = Attended(State(*3 * [jnp.ones(1)]), None, None, jnp.ones(1, int))
  noted = made.noting(Walked(jnp.ones(1))).noting(Named(jnp.zeros(1))).noting(Named(jnp.ones(1)))
  noted = jax.jit(lambda attended: attended)(noted)
  assert noted.noted(Walked).tiles == 1 and noted.noted(Named).slot == 1
  assert made.noted(Walked) is None


@pytest.mark.parametrize(
  "call",
  [
    lambda: Rope().rotate(jnp.ones((2, 3, 16)), jnp.ones(5, int)),  # of shapes: a method
    lambda: vectors.ratios(jnp.ones((4, 4)), jnp.ones(1), jnp.ones(1, int), "row"),  # a function
    lambda: memory.readable("many"),  # of none: a function
    lambda: Full().at("reference", 0),  # a method
    lambda: Rope.none().turned("many"),  # of what a class method makes
  ],
)
def test_annotations_are_checked(call):
  """As conftest.py has it: the library by itself checks nothing."""
  with pytest.raises(jaxtyping.TypeCheckError):
    At(0, "reference", Full())  # of fields
  with pytest.raises(BeartypeCallHintParamViolation):
    call()
