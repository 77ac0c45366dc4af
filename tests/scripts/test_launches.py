"""What a profile lists: a GPU's launches in order, and their medians over steps that are alike."""

from types import SimpleNamespace

import pytest

from scripts.tools import compiled, launches


def plane(name, **lines):
  """A plane of a profile; a line's events are (name, start, duration in ns)."""

  def event(name, at, time):
    return SimpleNamespace(name=name, start_ns=at, duration_ns=time)

  made = {line: [event(*each) for each in events] for line, events in lines.items()}
  return SimpleNamespace(
    name=name, lines=[SimpleNamespace(name=n, events=x) for n, x in made.items()]
  )


def test_only_the_streams_of_a_gpu_are_listed_in_order():
  streams = {"Stream #7(Compute)": [("b", 30, 2000), ("a", 10, 1500)]}
  gpu = plane("/device:GPU:0", **streams, **{"XLA Ops": [("c", 0, 9000)]})
  host = plane("/host:CPU", **{"Stream #1": [("d", 0, 9000)]})
  assert launches.listed([host, gpu]) == [("a", 1.5), ("b", 2.0)]


def test_a_profile_is_accounted_for():
  """Time with a gap in it, and names by the time that they take together."""
  events = [("a", 0, 1000), ("b", 5000, 3000), ("a", 8000, 1500)]
  whole, busy, names = launches.accounted([plane("/device:GPU:0", **{"Stream #1": events})])
  assert (whole, busy) == (9500 / 1e6, 5500 / 1e6)
  assert [*names.items()] == [("b", (1, 3.0)), ("a", (2, 2.5))]
  with pytest.raises(ValueError, match="found no launch"):
    launches.accounted([])


def test_medians_are_of_the_steps_that_launch_the_same():
  steps = [[("a", a), ("b", b)] for a, b in ((1.0, 5.0), (3.0, 4.0), (2.0, 9.0))]
  steps.insert(2, [("a", 2.0)])
  assert launches.medians(steps) == [("a", 2.0), ("b", 5.0)]


def test_every_layer_has_room_for_its_steps():
  for layer in launches.layers().values():
    assert layer.spec.capacity - layer.tokens == (0 if layer.full else 1 + layer.before)


def test_launches_of_a_compiled_program():
  """Kernels by name, fusions without their numbers, copies by shape; nothing within a fusion."""
  text = """HloModule jit_step, is_scheduled=true

%fused_add (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %copy.9 = f32[8]{0} copy(%p)
}

ENTRY %main.4 (q: f32[8]) -> (f32[8], s32[2]) {
  %q = f32[8]{0} parameter(0)
  %copy.1 = s32[8,2]{1,0} copy(%q), metadata={op_name="x"}
  %pallas_call.0 = (f32[8]{0}, s32[2]{0}) custom-call(%q), metadata={op_name="f/read/pallas_call"}
  %loop_add_fusion.12 = f32[8]{0} fusion(%q), kind=kLoop, calls=%fused_add
  ROOT %loop_add_fusion = f32[8]{0} fusion(%q), kind=kLoop, calls=%fused_add
}
"""
  assert compiled.launched(text) == {"copy s32[8,2]": 1, "read": 1, "loop_add_fusion": 2}
