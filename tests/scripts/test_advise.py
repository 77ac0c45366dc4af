"""Which methods fit, what a token costs and how good it is: against kept measurements and rows."""

import dataclasses
import json
import pathlib

import jax.numpy as jnp
import pytest

import kvjax
from kvjax import plan_memory
from kvjax.kernels.common import devices
from kvjax.models.decode.step_bytes import step_bytes, weight_bytes
from kvjax.models.nn.presets import PRESETS
from kvjax.programs import advise, step_time
from kvjax.programs.evals.nearest import Rows
from tests.eval_rows import row, write

RESULTS = pathlib.Path(__file__).parents[2] / "scripts" / "results" / "nvidia-h200"
CELLS = {cell.name: cell for cell in step_time.cells(RESULTS)}
# None of these is fitted on: other shapes, batches and lengths, and methods that no fit has seen.
CHECKED = (
  "Llama-3.1-8B B8 T32768",
  "Qwen3-1.7B B1 T4096",
  "Qwen3-1.7B B1 T131072",
  "Quest Llama-3.1-8B B1 T128K",
  "InfLLM-v2 Llama-3.1-8B B1 T128K",
  "InfLLM-v2 Llama-3.1-8B B4 T128K",
  "CPE Llama-3.1-8B B1 T128K",
  "CPE Llama-3.1-8B B4 T128K",
  "PRR Llama-3.1-8B B1 T512K serial",
  "PRR Llama-3.1-8B B1 T128K ρ = 1.25",
  "StreamingLLM 0.2 Llama-3.1-8B B8 T32K",
  "SnapKV 0.8 Llama-3.1-8B B8 T32K",
  "PyramidKV 0.2 Llama-3.1-8B B1 T4K",
)
LLAMA = PRESETS["Llama-3.1-8B"]
H200 = devices.device("NVIDIA H200")


def expected(cell):
  return step_time.expected(cell.moved(), cell.method.traits.by_layer, H200)


@pytest.mark.core(1)
@pytest.mark.parametrize("name", CHECKED)
def test_expected_times_are_within_15_percent_of_measured_ones(name):
  assert name not in step_time.FITTED
  assert expected(CELLS[name]) == pytest.approx(CELLS[name].seconds, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(CELLS) - set(CHECKED)))
def test_so_are_all_other_cells(name):
  assert expected(CELLS[name]) == pytest.approx(CELLS[name].seconds, rel=0.15)


@pytest.mark.slow
def test_constants_are_what_the_fit_gives():
  fitted = step_time.fitted([CELLS[name] for name in step_time.FITTED], H200)
  said = step_time.LAYER, step_time.CHOICE, step_time.WALK, step_time.DISPATCH
  assert list(fitted) == pytest.approx(said, abs=0.05e-6)


@pytest.mark.slow
def test_guesses_that_hit_cost_what_prr_takes_over_quest_on_real_text():
  lines = (RESULTS / "real" / "speed.jsonl").read_text().splitlines()
  rows = [row for row in map(json.loads, lines) if (row["length"], row["batch"]) == (8192, 8)]
  us = {row["method"]: row["us"] for row in rows}
  prr, quest = (
    step_bytes(PRESETS["Qwen2.5-1.5B"], kvjax.settings.usual(kvjax.METHODS[name], 1024), 8, 8192)
    for name in ("prr", "quest")
  )
  walks = sum(x.walks - 1 for x in prr.layers)
  bytes_more = (prr.device - quest.device) / H200.read
  measured = (us["prr"] - us["quest"]) * 1e-6
  assert walks == 26
  assert measured / walks == pytest.approx(step_time.HITTING, abs=0.5e-6), bytes_more
  assert step_time.least(prr, False, H200) == pytest.approx(us["prr"] * 1e-6, rel=0.15)


@pytest.mark.slow
def test_bytes_are_those_of_the_benchmarks():
  """Which were counted by formulae of their own."""
  for suite in ("e2e", "e2e_qwen3", "e2e_sparse"):
    for case in json.loads((RESULTS / f"bench_{suite}.json").read_text())["cases"]:
      name = case["case"] if case["case"] in CELLS else f"{case['case']} serial"
      assert CELLS[name].moved().device == pytest.approx(case["bytes"], rel=2e-3), name


def test_a_narrower_memory_takes_longer():
  moved = step_bytes(LLAMA, kvjax.Full(), 1, 32768)
  fast, slow = (
    step_time.expected(moved, False, dataclasses.replace(H200, read=x)) for x in (4e12, 1e12)
  )
  assert slow - fast == pytest.approx(moved.device * (1e-12 - 0.25e-12))


@pytest.mark.slow
def test_what_fits_comes_first_by_time():
  """At 128K tokens a device of 24 GB has room for the weights, and for caches of few tokens."""
  how = {"here": H200, "budgets": ("1024", "8192"), "methods": ("quest", "snapkv", "infllm")}
  found = advise.advise(LLAMA, 131072, 1, int(24e9), **how)
  assert [(x.name, x.budget, x.fits) for x in found] == [
    ("snapkv", 1024, True),
    ("snapkv", 8192, True),
    *sorted(((x.name, x.budget, True) for x in found if x.name == "infllm"), key=lambda x: x[1]),
    ("quest", 1024, False),
    ("quest", 8192, False),
    ("full", None, False),
  ]
  spec = LLAMA.cache_spec(1, 131072, jnp.bfloat16)
  for x in found:
    caches = plan_memory(spec, x.method, apart=True)
    assert x.device == caches.device + weight_bytes(LLAMA, jnp.bfloat16)[0]
    assert x.host == caches.host
    assert (x.host > 0) == (x.name == "infllm")


def test_milliseconds_say_what_data_decide():
  """A range where retrievals are shared, a bound where walks may end early, else a number."""
  how = {"here": H200, "budgets": ("512",), "methods": ("cis", "art")}
  found = advise.advise(LLAMA, 32768, 1, 10**12, **how)
  said = {x.name: advise.row(x)[5] for x in found}
  cis = next(x for x in found if x.name == "cis")
  keys = 32768 * 8 * 128 * 2 * 32
  assert cis.seconds - cis.least == pytest.approx(keys * 15 / 16 / H200.read)
  assert said["cis"] == f"{cis.least * 1e3:.2f} – {cis.seconds * 1e3:.2f}"
  assert said["art"] == f"≤ {said['full']}"


@pytest.mark.slow
def test_what_does_not_fit_says_what_would():
  size = LLAMA, 131072, 1, int(24e9)
  found = advise.advise(*size, here=H200, budgets=("1024", "2048"), methods=("quest",))
  lines = advise.refused(found, *size).splitlines()
  assert [line.split()[0] for line in lines] == ["full:", "quest"]
  assert "quest 1,024: 34.3" in lines[1]
  assert "a capacity of" in lines[1]
  none = LLAMA, 1024, 1, int(10e9)
  found = advise.advise(*none, here=H200, methods=("full",))
  assert "weights alone" in advise.refused(found, *none)


@pytest.mark.core(3)
@pytest.mark.parametrize(
  ("name", "risk"),
  [
    ("full", "keeps and reads all"),
    ("art", "keeps all, may stop early"),
    ("quest", "keeps all, reads a part"),
    ("prr", "keeps all, reads a part"),
    ("cpe", "keeps all, reads a part, prompt not exact"),
    ("psaw", "keeps all, some layers see a window, prompt not exact"),
    ("etf", "keeps and reads all, prompt not exact"),
    ("tova", "drops tokens"),
    ("streaming_llm", "drops tokens, prompt not exact"),
    ("infllm", "keeps all, most on the host, reads a part, prompt not exact"),
  ],
)
def test_risk_is_what_the_method_states(name, risk):
  found = advise.advise(LLAMA, 8192, 1, 10**12, here=H200, methods=(name,), budgets=("512",))
  assert [x.risk for x in found if x.name == name] == [risk]


@pytest.fixture
def rows(tmp_path):
  """Eight rows of a cell: Quest's first half right, the full cache's all."""
  made = []
  for i in range(8):
    made += [row("needle", "full", None, i, 1.0, n) for n in (1024, 4096)]
    made += [row("needle", "quest", n // 4, i, float(i < 4), n) for n in (1024, 4096)]
    made.append(row("needle", "quest", 64, i, 0.0, 4096))
    made.append(row("kl", "quest", 1024, i, 0.5, 4096, positions=[1]))
  return write(tmp_path, made, model="tiny")


@pytest.mark.parametrize(
  ("length", "budget", "near"),
  [
    (131072, 32768, (4096, 1024, 0.5)),
    (131072, 1024, (4096, 64, 0.0)),
    (1000, 256, (1024, 256, 0.5)),
    (2100, 32, (4096, 64, 0.0)),
    (2000, 32, (1024, 256, 0.5)),
  ],
)
def test_nearest_rows_by_length_then_by_share(rows, length, budget, near):
  kept = Rows(rows).nearest("quest", length, budget)
  assert (kept.length, kept.budget, kept.score.mean) == near
  assert (kept.score.n, kept.full, kept.model) == (8, 1.0, "tiny")
  assert kept.score.low <= kept.score.mean <= kept.score.high


def test_methods_without_rows_have_no_quality(rows):
  assert Rows(rows).nearest("tova", 4096, 512) is None
  assert Rows(rows).nearest("full", 4096, None).budget is None
  with pytest.raises(ValueError, match="--tasks: found ruler, expected some of: needle"):
    Rows(rows, ["ruler"])


@pytest.mark.slow
def test_the_program_prints_one_table(rows, capsys):
  args = {"memory": 40.0, "length": 8192, "budgets": ("2048",), "rows": rows}
  advise.main(advise.Args(methods=("quest", "tova"), batch=64, **args))
  said = capsys.readouterr().out
  lines = [line.split() for line in said.splitlines()]
  assert [line[0] for line in lines if line and line[0] in ("quest", "tova")] == ["tova", "quest"]
  (tova,) = (line for line in lines if line[:1] == ["tova"])
  assert "none" in tova
  assert "quest 2,048:" in said
  assert "checked at batches up to 8" in said


@pytest.mark.parametrize(
  ("given", "message"),
  [
    ({"model": "nosuch"}, "--model: found 'nosuch', expected a folder, or one of: Llama-2-7B"),
    ({"length": 0}, "--length: found 0, expected at least 1"),
    ({"memory": 0.0}, "--memory: found 0.0, expected more than 0"),
    ({"bandwidth": -1.0}, "--bandwidth: found -1.0, expected more than 0"),
    ({"device": "h300"}, "--device: found 'h300', expected a part of one of nvidia-h100-80gb"),
    ({"methods": ("fulll",)}, "--methods: found 'fulll', expected one of: full"),
    ({"budgets": ("x",)}, "--budgets: found 'x', expected tokens"),
  ],
)
def test_bad_arguments_are_refused(given, message):
  with pytest.raises(ValueError, match=message):
    advise.main(advise.Args(**given))
