"""The laws of `kvjax.testing`, put to every registered method: one table, all methods."""

import jax
import jax.numpy as jnp
import pytest

from kvjax import METHODS, Carry, Env, Full
from kvjax.testing import LAWS, Layer, Stream
from kvjax.testing.layer import driver
from tests.cover import KIN
from tests.law_cases import CASES, FAMILIES

BY_FAMILY = {
  *("further_turns_of_the_neutral_setting_equal_full", "nan_is_loud_and_leaves_no_trace"),
  *("chunked_prefill", "decode_loop_is_in_place", "room_does_not_change_the_answer"),
  *("shared_prefill", "a_second_question_on_the_same_cache", "empty_wrapper_is_transparent"),
  *("the_repository_setting", "idle_rows_stay_untouched", "nan_in_empty_slots_never_leaks"),
  "rows_enter_and_leave_a_live_batch",
}
# Of programs that no other law has: the core asks one method.
ALONE = {"heads_sharded_over_two_devices", "nan_raises_when_asked", "dtypes_hold_under_x64"}
# Of the same two programs: what each method keeps is in its own file, against an oracle.
OF_A_RUN = {
  *("kept_positions", "rows_are_isolated", "caches_are_as_described", "decode_equals_prefill"),
  "second_call_does_not_retrace",
}
# Whose kernels their own files try.
OWN = {"infllm", "ltri", "prr", "art", "cis", "longflow", "hshare"}
FIRST = "neutral_setting_equals_full", "tight_setting_has_an_effect"
# What takes long and is shown elsewhere too: by a method's own file, by a method alike.
IN_THE_REST = {
  # Those whose kernels are another method's.
  "pallas_equals_reference_in_a_layer": {
    *("lm_infinite", "random", "h2o", "tova", "vatp", "pyramidkv", "r_kv", "topk_oracle", "etf"),
    *("expected_attention", "knorm", "keydiff", "kvzip", "lagkv", "chunkkv", "criticalkv"),
    *("duo_attention", "streaming_llm", "adakv"),
    *(*OWN, "cpe", "double_sparsity", "psaw", "infllm_v2"),
    *("rocketkv", "twilight", "quantised", "kivi"),
  },
  "pallas_equals_reference": METHODS.keys(),
  **{law: METHODS.keys() - FAMILIES for law in (*FIRST, *OF_A_RUN, *BY_FAMILY)},
  **{law: METHODS.keys() - {"full"} for law in ALONE},
  "heads_sharded_over_two_devices": METHODS.keys() - {"full", "tova"},  # which acts on all heads
}


def put_to_all(law):
  """A test of one law, with a case for every method."""
  rest = set(IN_THE_REST.get(law, ()))
  marks = {name: [pytest.mark.slow] * (name in rest) for name in METHODS}
  if law == "pallas_equals_reference":  # in a decoder what is shown in a layer
    for name in METHODS.keys() - FAMILIES:
      marks[name].append(pytest.mark.sweep)
  # These are of what methods of a kind have in common: layouts, drivers, moves they do not change.
  in_a_layer = law == "pallas_equals_reference_in_a_layer"
  if law in BY_FAMILY | ALONE or in_a_layer:
    for name in (KIN | OWN if in_a_layer else KIN) & rest:
      marks[name].append(pytest.mark.sweep)
  cases = [pytest.param(name, marks=mark) for name, mark in marks.items()]

  @pytest.mark.parametrize("name", cases)
  def test(name):
    LAWS[law](CASES[name])

  test.__name__, test.__doc__ = f"test_{law}", LAWS[law].__doc__
  return test


for _law in LAWS:
  globals()[f"test_{_law}"] = put_to_all(_law)


def test_nobody_looks_for_nan_unasked():
  """A decode step without statistics has no such operation; with the switch it has."""
  stream = Stream.random(0)
  new = [x[..., 0, :] for x in (stream.q, stream.k, stream.v)]
  for check in (False, True):
    layer = Layer(Full(), stream, env=Env(4, impl="reference", check_nan=check))
    step = driver(layer.at, "decode_step")
    jaxpr = jax.make_jaxpr(step)(layer.cache, *new, jnp.ones(2, bool), Carry())
    assert ("is_finite" in str(jaxpr)) == check
