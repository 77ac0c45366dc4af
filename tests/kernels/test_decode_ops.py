"""What a decode step consists of on kernels: which XLA operations stand between the launches.

On a GPU each sort, gather or scatter is a launch of 5 to 90 µs beside kernels of 3 to 15. What is
counted is what the step's results need: diagnostics that nobody reads are gone.
"""

import jax
import pytest

from kvjax.kernels.common import devices
from tests.steps import CASES, MANY, SPEC, copied, operations


@pytest.fixture(autouse=True)
def any_machine(monkeypatch):
  """Cuts work as for an unknown device: how it is cut hangs on a device's multiprocessors.

  A GPU with programs to spare shares ART's walks, in two launches more (`test_art_spread`).
  """
  monkeypatch.setattr(devices, "_default", lambda: devices.device("some device"))
  monkeypatch.setattr(jax, "default_backend", lambda: "cpu")


SORTS = ("sort", "top_k", "approx_top_k")
MOVES = ("gather", "scatter", "scatter-add")
LOOPS = ("while", "scan")

SORTING = {
  "twilight": "candidates are sorted by weight; the paper's kernels find the set by bisection",
  "r_kv": "when its buffer is full, once in `buffer` steps, it ranks and moves what it keeps",
}


def total(counts, names):
  return sum(counts[name] for name in names)


@pytest.mark.core(8)
@pytest.mark.parametrize("name", CASES)
def test_no_sorts(name):
  counts = operations(CASES[name])
  assert counts["launches"] > 0
  assert (total(counts, SORTS) > 0) == (name in SORTING)


# Gathers, scatters and loops of a step, and its launches, of those that select or stop early. Where
# k of a row's thousands are searched for, that is two launches, which take less time than one.
STEPS = {
  "topk_oracle": (0, 7),
  "quest": (0, 6),
  "infllm_v2": (0, 7),
  "hshare": (0, 8),
  "cis": (0, 7),
  "cis per query head": (0, 8),
  "cpe": (0, 7),
  "prr": (0, 6),
  "prr over infllm_v2": (0, 7),
  "prr, strict": (0, 6),
  "art": (0, 2),
  "art over quest": (0, 6),
  "art over streaming_llm": (0, 3),
  "art over snapkv": (0, 3),
  "art, known lengths": (0, 5),
  "art, in a prompt's order": (0, 5),
  "art, certified": (3, 5),  # bounds in the order of the walk
  "quantised": (0, 3),
  "int8 over quest": (3, 5),  # Quest's newest page
  "int8 over longflow": (6, 3),  # the new token's position, words, scales and ‖v‖₁
  "int8 over art": (0, 2),
  "int4 over cis": (0, 7),
}


@pytest.mark.core(6)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_has_no_more_than(name):
  moves, launches = STEPS[name]
  counts = operations(CASES[name])
  assert total(counts, MOVES) + total(counts, LOOPS) <= moves
  assert counts["launches"] <= launches


@pytest.mark.parametrize("name", ["cis", "cpe"])
def test_many_rows_choose_and_read_in_one_launch(name):
  counts = operations(CASES[name], spec=MANY)
  assert {n: counts[n] for n in counts if n.startswith("launch ")} == {
    "launch enter_token": 1,
    "launch cis_read": 1,
    "launch cis_note": 1,
  }
  assert not set(counts) - {n for n in counts if n.startswith("launch")} - set(FREE)


@pytest.mark.core(2)
@pytest.mark.parametrize(
  ("name", "spec"),
  [
    ("cis", MANY),
    ("cpe", MANY),
    ("cis per query head", SPEC),
    ("quantised", SPEC),
    ("int8 over quest", SPEC),
  ],
)
def test_on_a_gpu_auto_takes_the_kernels(name, spec, monkeypatch):
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  named = operations(CASES[name], spec=spec)
  assert operations(CASES[name], spec=spec, impl="auto") == named
  assert named["launches"] > 1


# What is free: shapes, and the identity conversions in front of a launch.
FREE = ("reshape", "squeeze", "broadcast_in_dim", "slice", "concatenate", "convert_element_type")
FREE += ("pjit", "jit")
ALONE = ["full", "quest", "infllm_v2", "cis", "cpe", "prr", "prr, strict", "prr over infllm_v2"]
ALONE += ["art", "snapkv", "pyramidkv", "streaming_llm, original", "longflow"]
ALONE += ["quantised", "int8 over art", "art, known lengths", "art, in a prompt's order"]
ALONE += ["art over snapkv", "art over pyramidkv", "art over streaming_llm"]
# What comes after the last one, in a fusion: victims, and lengths, of rows that do not count stay.
STAY = {"and", "eq", "is_finite", "not", "unstack", "select_n"}
LAST = dict.fromkeys(("longflow", "art, known lengths", "art, in a prompt's order"), STAY)


@pytest.mark.core(8)
@pytest.mark.parametrize("name", ALONE)
def test_nothing_stands_between_the_launches(name):
  """A launch between two kernels takes 2 µs, where a layer takes 130."""
  counts = operations(CASES[name])
  beside = {n for n in counts if not n.startswith("launch")} - set(FREE)
  assert beside == LAST.get(name, set())


COPIED = {
  "duo_attention": {"rows.used"},  # its two parts count their slots apart
  "art, certified": {"heads.key_max", "heads.key_min"},  # XLA's order has their readers first
}


@pytest.mark.core(8)
@pytest.mark.parametrize("name", CASES)
def test_what_is_written_in_place_is_not_copied_first(name):
  assert copied(CASES[name]) == COPIED.get(name, set())


def main():
  """Prints the table."""
  columns = {"launches": ("launches",), "sorts": SORTS, "gathers": ("gather",)}
  columns |= {"scatters": MOVES[1:], "loops": LOOPS}
  columns |= {"reductions": ("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or")}
  columns |= {"arg min, max": ("argmin", "argmax"), "products": ("dot_general",)}
  print(f"{'':24}", *columns, sep="  ")
  for name, method in CASES.items():
    counts = operations(method)
    row = (f"{total(counts, of):{len(title)}}" for title, of in columns.items())
    kernels = ", ".join(
      x.removeprefix("launch ") for x in sorted(counts) if x.startswith("launch ")
    )
    print(f"{name:24}", *row, kernels, sep="  ")


if __name__ == "__main__":
  main()
