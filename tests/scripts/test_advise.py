"""Which methods fit, what a token costs and how good it is: against kept measurements and rows."""

import dataclasses
import functools
import json
import math
import pathlib
import re
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding

import kvjax
from kvjax import plan_memory
from kvjax.kernels.common import devices
from kvjax.methods import labels
from kvjax.models.decode.step_bytes import step_bytes, weight_bytes
from kvjax.models.io.presets import PRESETS
from kvjax.models.nn import parallel
from kvjax.models.nn.config import ModelConfig
from kvjax.models.nn.transformer import Transformer
from kvjax.programs import advise, bench_files, step_time
from kvjax.programs.evals import advice, store
from kvjax.programs.evals.advice import Advice, Case, considered, recommended
from kvjax.programs.evals.nearest import Kept, Rows
from scripts.benches import e2e_sparse
from tests.eval_rows import row, write

RESULTS = pathlib.Path(__file__).parents[2] / "scripts" / "results" / "nvidia-h200"
LLAMA = PRESETS["Llama-3.1-8B"]
H200 = devices.device("NVIDIA H200")
LTRI = kvjax.Ltri(128, 4096, 128, 16, chunk=512, held=32, last=48)


@pytest.fixture(autouse=True, scope="module")
def laid_out_once():
  """Nothing is laid out again at the same sizes, as it is in one run of the program."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(kvjax, "plan_memory", functools.cache(kvjax.plan_memory))
    patch.setattr(advice, "step_bytes", functools.cache(advice.step_bytes))
    yield


class Cell(NamedTuple):
  """A whole step that was measured: the shape, the method, and its seconds."""

  config: ModelConfig
  method: kvjax.Method
  batch: int
  tokens: int
  seconds: float

  def moved(self):
    return step_bytes(self.config, self.method, self.batch, self.tokens)

  @property
  def streamed(self):
    return self.method.traits.stream is not None


def contenders(label, tokens):
  """Methods by the names that a case of the benchmarks gives them; the rest is not of a method."""
  quest, full = kvjax.Quest(4096), {"Full": kvjax.Full()}
  known = {
    "": {"kvjax": kvjax.Full()},
    "Quest": {"kvjax": quest, **full},
    "InfLLM-v2": {"kvjax": kvjax.InfLLMv2(), **full},
    "CPE": {"kvjax": kvjax.CPE.preset(512, tau=-1.0), **full},
    "DuoAttention": {"kvjax": kvjax.DuoAttention("alternate"), **full},
    "PRR": {"serial": quest, "ρ = 1.25": kvjax.PRR(quest, budget=1.25)},
  }
  if label == "Tab. V":  # of long rows HShare takes less than is expected, Double Sparsity more
    far = "HShare-0", "HShare-1", "Double Sparsity"
    return {x: y for x, y in e2e_sparse.shared(tokens // 8).items() if x not in far}
  kind, _, share = label.partition(" ")
  if kind in ("StreamingLLM", "SnapKV", "PyramidKV"):
    return {label: getattr(kvjax, kind)(int(float(share) * tokens))}
  return known.get(label, {})


def cells():
  """The whole steps that are kept, by name: Full, and methods that read or keep a part."""
  made = {}
  for line in (RESULTS / "real" / "speed_16K.jsonl").read_text().splitlines():
    if (row := json.loads(line))["method"].startswith("ltri"):
      shape = PRESETS["Qwen2.5-1.5B"], LTRI, row["batch"], row["length"]
      made[f"Ltri Qwen2.5-1.5B B{row['batch']} T16K"] = Cell(*shape, row["us"] * 1e-6)
  for suite in ("e2e", "e2e_qwen3", "e2e_sparse", "art_e2e", "offload_128K"):
    for case in bench_files.read(RESULTS / f"bench_{suite}.json")["cases"]:
      us = {x["name"]: x["us"] for x in case["results"] if "us" in x}
      if suite == "offload_128K":  # a token after a long stream under Ltri, in all layers
        if case["case"] == "whole stream":
          took = us["token at 100K"] * 1e-6
          made["Ltri Llama-3.1-8B B1 T100K"] = Cell(LLAMA, kvjax.Ltri(), 1, 100 << 10, took)
        continue
      *words, model, batch, size = case["case"].split()
      label, tokens = " ".join(words), int(size[1:].replace("K", "")) << 10 * size.endswith("K")
      for name, method in contenders(label, tokens).items():
        of = "" if name in ("kvjax", label) else f" {name}"
        cell = Cell(PRESETS[model], method, int(batch[1:]), tokens, us[name] * 1e-6)
        made[case["case"] + of] = cell
  return made


CELLS = cells()
FITTED = (
  *("Llama-3.1-8B B1 T4096", "Qwen3-1.7B B8 T32768", "Quest Llama-3.1-8B B4 T128K"),
  *("PRR Llama-3.1-8B B1 T16K serial", "PRR Llama-3.1-8B B1 T32K ρ = 1.25"),
  "Ltri Qwen2.5-1.5B B8 T16K",
)


def expected(cell):
  return step_time.expected(cell.moved(), cell.streamed, H200)


@pytest.mark.core(1)
@pytest.mark.parametrize("name", sorted(set(CELLS) - set(FITTED)) + [*FITTED])
def test_expected_times_are_within_15_percent_of_measured_ones(name):
  """Most are not fitted on: other shapes, batches and lengths, and methods that no fit has seen."""
  assert expected(CELLS[name]) == pytest.approx(CELLS[name].seconds, rel=0.15)


@pytest.mark.slow
def test_constants_are_what_the_fit_gives():
  """By least squares of relative errors."""
  chosen = [CELLS[name] for name in FITTED]
  seconds = np.array([cell.seconds for cell in chosen])
  left = seconds - [step_time._streaming(cell.moved(), H200) for cell in chosen]
  paid = np.array([step_time._started(cell.moved(), cell.streamed) for cell in chosen])
  fitted = np.linalg.lstsq(paid / seconds[:, None], left / seconds, rcond=None)[0]
  said = step_time.LAYER, step_time.CHOICE, step_time.WALK, step_time.STREAMED
  assert list(fitted) == pytest.approx(said, abs=0.05e-6)


@pytest.mark.slow
def test_guesses_that_hit_cost_what_prr_takes_over_quest_on_real_text():
  lines = (RESULTS / "real" / "speed.jsonl").read_text().splitlines()
  rows = [row for row in map(json.loads, lines) if (row["length"], row["batch"]) == (8192, 8)]
  us = {row["method"]: row["us"] for row in rows}
  methods = (kvjax.settings.usual(kvjax.METHODS[name], 1024) for name in ("prr", "quest"))
  prr, quest = (step_bytes(PRESETS["Qwen2.5-1.5B"], method, 8, 8192) for method in methods)
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


def case(memory, length=32768, batch=1, config=LLAMA):
  return Case(config, length, batch, dataclasses.replace(H200, memory=memory))


def advised(name, budget, where, *scores):
  """A method as the table has it, with shares of the full cache's score at as many lengths."""
  kept = tuple(Kept(n, n // 8, (x,), 1.0) for n, x in zip((4096, 1024), scores, strict=False))
  return Advice(where, name, budget, labels.instance(name, budget or 1), kept)


def test_milliseconds_say_what_data_decide():
  """A range where retrievals are shared, a bound where walks may end early, else a number."""
  where = case(1e12)
  cis, art, full = (advised(*x, where) for x in (("cis", 512), ("art", None), ("full", None)))
  keys = 32768 * 8 * 128 * 2 * 32
  assert cis.seconds - cis.least == pytest.approx(keys * 15 / 16 / H200.read)
  assert advise.time(cis) == f"{cis.least * 1e3:.1f} – {cis.seconds * 1e3:.1f}"
  assert advise.time(art) == f"≤ {advise.time(full)}"
  lacking = dataclasses.replace(full, case=case(20e9))
  assert advise.time(lacking) == f"{(full.device - 19e9) / 1e9:.1f} GB over"


@pytest.mark.parametrize("name", ["full", "infllm", "snapkv"])
def test_sizes_are_those_of_weights_and_caches(name):
  found = advised(name, 1024, case(24e9, 8192))
  caches = plan_memory(LLAMA.cache_spec(1, 8192, jnp.bfloat16), found.method, apart=True)
  assert found.device == caches.device + weight_bytes(LLAMA, jnp.bfloat16)[0]
  assert found.caches.host == caches.host
  assert (caches.host > 0) == (name == "infllm")


@pytest.mark.core(1)
@pytest.mark.parametrize("name", ["Qwen2.5-1.5B", "Gemma-2-2B", "gpt-oss-20B"])
def test_weights_are_those_of_all_layers(name):
  config = PRESETS[name]
  made = nnx.eval_shape(lambda: Transformer(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
  leaves = jax.tree.leaves(nnx.split(made)[1])
  assert weight_bytes(config, jnp.bfloat16)[0] == sum(x.size * x.dtype.itemsize for x in leaves)


@pytest.mark.core(1)
@pytest.mark.parametrize(
  ("name", "heads", "slots"),
  [("Llama-3.1-70B", 8, 1), ("Llama-3.1-70B", 2, 4), ("gpt-oss-20B", 4, 1), ("Qwen2.5-1.5B", 2, 1)],
)
def test_a_device_of_several_has_its_part(name, heads, slots):
  """The weights that are laid out for it, and of what a step moves of caches an equal share."""
  config, mesh = PRESETS[name], AbstractMesh((heads, slots), ("heads", "slots"))
  config = dataclasses.replace(config, layers=2, windows=config.windows[:2])
  model = nnx.eval_shape(lambda: Transformer(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
  state = nnx.state(model)
  specs = parallel.weight_specs(state, config, mesh)
  parts = [
    math.prod(NamedSharding(mesh, spec).shard_shape(x.shape)) * x.dtype.itemsize
    for x, spec in zip(jax.tree.leaves(state), specs, strict=True)
  ]
  cases = (Case(config, 4096, 2, H200, to) for to in (mesh, None))
  full, alone = (Advice(each, "full", None, kvjax.Full()) for each in cases)
  assert full.case.weights == sum(parts)
  assert full.caches == plan_memory(alone.case.spec, kvjax.Full(), mesh, apart=True)
  for part, whole in zip(full.moved.layers, alone.moved.layers, strict=True):
    assert part.device == pytest.approx(whole.device / mesh.size)
  unread = 0 if config.tie_embeddings else config.vocab // mesh.size * config.dim * 2
  if not config.experts:
    assert full.moved.weights == sum(parts) - unread


# ---- what is recommended


TOLD = (
  ("quest", 4096, 0.99, 0.99),  # reads a part: loses no token
  ("snapkv", 4096, 0.98, 0.99),  # keeps a part
  ("streaming_llm", 4096, 0.91, 0.99),
  ("tova", 4096, 0.5, 0.99),
)


@pytest.mark.core(2)
@pytest.mark.parametrize(
  ("memory", "told", "want"),
  [
    (80e9, TOLD, {"fastest to keep 98%": "snapkv", "fastest to keep all tokens and 98%": "quest"}),
    (19e9, TOLD, {"fastest to keep 98%": "snapkv"}),  # all of the cache has no room there
    (80e9, TOLD[2:], {"fastest to keep 90%": "streaming_llm"}),  # where nothing keeps 98 %
    (80e9, TOLD[3:], {}),
    (17e9, TOLD, {}),
  ],
)
def test_what_is_recommended(memory, told, want):
  """At 32,768 tokens Llama's caches are 4.3 GB beside 16.1 GB of weights."""
  where = case(memory, 131072 if memory == 80e9 else 32768)
  budget = where.length // 8
  found = [advised("full", None, where, 1.0, 1.0)]
  found += [advised(name, budget, where, *scores) for name, _, *scores in told]
  chosen = recommended(found)
  score = " of the full cache's score at 4,096"
  assert {why.removesuffix(score): x.name for why, x in chosen.items()} == want


def test_scores_at_the_nearest_length_come_first():
  """One of a shorter length counts where nothing else serves, and one of larger budgets never."""
  where = case(80e9, 131072)
  full = advised("full", None, where, 1.0, 1.0)
  quest, snapkv, tova = (
    dataclasses.replace(x, scores=scores)
    for x, scores in (
      (advised("quest", 16384, where), full.scores),
      (advised("snapkv", 16384, where), (None, full.scores[1])),
      (advised("tova", 1024, where), full.scores),
    )
  )
  why = "fastest to keep 98% of the full cache's score at"
  assert recommended([full, quest, snapkv, tova])[f"{why} 4,096"] is quest
  assert recommended([full, snapkv, tova])[f"{why} 1,024"] is snapkv
  assert recommended([full, tova]) == {}


def test_the_least_budget_is_enough():
  where = case(80e9, 131072)
  full, *others = (
    advised(name, budget, where, 1.0)
    for name, budget in (("full", None), ("snapkv", 65536), ("snapkv", 16384), ("snapkv", 32768))
  )
  assert [x.budget for x in recommended([full, *others]).values()] == [16384]


# ---- the scores


@pytest.fixture
def rows(tmp_path):
  """Eight rows of a cell: Quest's first half right, the full cache's all."""
  made = []
  for i in range(8):
    for n in (256, 1024, 4096):
      made.append(row("needle", "full", None, i, 1.0, n))
      made += [row("needle", "random", n // 4, i, 0.0, n), row("needle", "art", None, i, 1.0, n)]
      made.append(row("needle", "quest", n // 4, i, float(i < 4), n))
    made.append(row("needle", "quest", 64, i, 0.0, 4096))
    made.append(row("needle", "duo_attention:pattern=lost.tsv", 512, i, 0.0, 4096))
    for given, also in (("kl", {"kl": 0.1}), ("wikitext", {"bytes": 9})):
      made.append(row(given, "quest", 1024, i, 0.5, 4096, also=also))
  made.append(row("needle", "quest", 1024, 8, 0.0, 4096))  # which the full cache lacks
  return write(tmp_path, made, model="tiny")


@pytest.mark.parametrize(
  ("length", "lengths"),
  [(131072, [4096, 1024]), (1000, [1024, 256]), (2048, [4096, 1024]), (16, [256, 1024])],
)
def test_nearest_lengths(rows, length, lengths):
  assert Rows(rows).lengths(length) == lengths


@pytest.mark.parametrize(
  ("at", "share", "budget", "of_full"),
  [(4096, 1 / 4, 1024, 0.5), (4096, 1 / 128, 64, 0.0), (1024, 1 / 128, 256, 0.5)],
)
def test_nearest_rows_by_share(rows, at, share, budget, of_full):
  kept = Rows(rows).nearest("quest", at, share)
  assert (kept.length, kept.budget, kept.of_full, len(kept.values)) == (at, budget, of_full, 8)


def test_methods_without_rows_have_no_quality(rows):
  assert Rows(rows).nearest("tova", 4096, 0.1) is None
  assert Rows(rows).nearest("full", 4096, 1.0).budget is None
  with pytest.raises(ValueError, match="--tasks: found ruler, expected some of: needle"):
    Rows(rows, ["ruler"])
  write(rows, [row("needle", "full", None, 0, 1.0, mode="reuse")], model="tiny")
  with pytest.raises(ValueError, match="found no answers in the mode aware, expected some"):
    Rows(rows)


def test_methods_of_the_rows_are_considered(rows):
  """With the budgets of the rows, as shares; no control, and none whose file is not here."""
  where, held = case(80e9, 8192), Rows(rows)
  found = [(x.name, x.budget) for x in considered(where, held)]
  assert found == [("full", None), ("art", None), ("quest", 128), ("quest", 2048)]
  chosen = considered(where, held, ("random", "tova"), ("512", "0.5"))
  want = [("random", 512), ("random", 4096), ("tova", 512), ("tova", 4096)]
  assert [(x.name, x.budget) for x in chosen] == [("full", None), *want]
  assert [advise.score(chosen[1], x) for x in chosen[1].scores] == ["0%*", "0%*"]
  assert [advise.score(chosen[3], x) for x in chosen[3].scores] == ["–", "–"]
  with pytest.raises(ValueError, match=r"lost\.tsv: not found, expected a file"):
    considered(where, held, ("duo_attention:pattern=lost.tsv",))


# ---- the program


LARGE = {"model": "Llama-3.1-70B", "device": "h100"}


def said(capsys, **args):
  advise.main(advise.Args(**args))
  found = capsys.readouterr().out
  assert max(map(len, found.splitlines())) <= 80 or args.get("json")
  return found


# Arguments, and what is said of them.
SAID = [
  (
    {"model": "Qwen3-32B", "length": 32768, "device": "rtx-4090"},
    "65.5 GB of weights do not fit: 42.7 GB more than the 22.8 GB that may be filled. "
    "A device of 78.1 GB would hold them and 8.7 GB of full cache.",
  ),
  (
    {"memory": 20.0, "length": 32768},
    "do not fit: 1.4 GB more than the 19.0 GB that may be",
    "A device of 21.5 GB would hold both.",
    "No method that keeps 90% of the full cache's score fits.",
  ),
  (
    {"length": 2048},
    "16.1 GB of weights and 0.3 GB of full cache fit: 117.6 GB are left",
    "Take the full cache: no method that keeps 90% of the full cache's score is",
    "No scores are of 2,048 tokens.",
    "4K, 1K: score of tiny at that length over the full cache's on the same",
  ),
  ({"length": 1024}, "bandwidth measured, launches as"),
  (
    {"length": 1024, "device": "a100", "methods": ("quest",), "budgets": ("64",)},
    "bandwidth 0.92 of the nominal bandwidth, launches as",
    "*: with another share of the",
  ),
  ({"length": 1024, "bandwidth": 0.5}, "nvidia-h200: 141.0 GB, 0.50 TB/s"),
  ({"length": 1024, "batch": 64}, "Checked at batches up to 8; larger ones may take longer."),
  ({"length": 131073}, "The model was made for 131,072 tokens."),
  (LARGE, "A device of 194.1 GB would hold them and 43.3 GB of full cache. So would 4 of these."),
  (
    {**LARGE, "devices": 2},
    "70.6 GB of weights and 21.6 GB of full cache a device do not fit: 13.9 GB more than the "
    "78.3 GB that may be filled. Devices of 97.1 GB would hold both. So would 4 of these.",
  ),
  (
    {**LARGE, "devices": 4, "hosts": 2},
    "8 × nvidia-h100-80gb-hbm3: 82.5 GB, 3.20 TB/s; heads",
    "heads split over 8, slots over 1 17.6 GB of weights and 5.4 GB of full cache a device fit",
  ),
  ({**LARGE, "devices": 16}, "; heads split over 8, slots over 2 10.3 GB of weights and 2.7 GB"),
  (
    {**LARGE, "devices": 8, "mesh": (1, 8), "methods": ("snapkv", "quest"), "budgets": ("64",)},
    "Not split over these devices: snapkv (--json says why).",
  ),
  (
    {**LARGE, "devices": 4, "hosts": 2, "methods": ("infllm",)},
    "every layer has two, come on top. Not split over these devices: infllm (--json says why).",
  ),
]


@pytest.mark.core(4)
@pytest.mark.parametrize(("args", "texts"), [(args, texts) for args, *texts in SAID])
def test_what_it_says(rows, capsys, args, texts):
  found = " ".join(said(capsys, rows=rows, **args).split())
  for text in texts:
    assert text in found


@pytest.mark.slow
def test_its_table_and_next_commands(capsys):
  """By the rows that a wheel has; in 10 s of a processor."""
  began = time.process_time()
  found = said(capsys, length=131072, memory=24.0)
  assert time.process_time() - began < 10
  lines = [line.split() for line in found.splitlines()]
  assert ["method", "budget", "GB", "ms", "a", "token", "32K", "8K"] in lines
  (full,) = (line for line in lines if line[:1] == ["full"])
  assert full == ["full", "–", "33.4", "10.6", "GB", "over", "100%", "100%"]
  joined = found.replace(" \\\n    ", " ")
  assert "\n\nNext (MODEL: its checkpoint, folder" in found
  given = re.search(r"kvjax generate .*--method (\S+)", joined)
  assert f"\n{given[1]}: the fastest to keep 98% of the full cache's score at 8,192" in joined
  assert re.search(r"kvjax evaluate --checkpoint MODEL --lengths 131072 --methods .*--out", joined)
  assert "kvjax advise --model Llama-3.1-8B --length 131072 --rows run" in joined


@pytest.mark.core(1)
@pytest.mark.parametrize(
  ("args", "names"),
  [
    ({}, ["full"]),
    ({"all": True}, ["expected_attention:epsilon=0.02", "full", "art", "quest", "quest"]),
    ({"methods": ("infllm", "random")}, ["random", "full", *["infllm"] * 3]),
  ],
)
def test_all_of_them_on_request(rows, capsys, args, names):
  """The fastest first; the longest name has room, too."""
  made = [row("needle", "expected_attention:epsilon=0.02", 512, 0, 0.5, 4096)]
  write(rows, [*map(json.loads, (rows / store.ROWS).read_text().splitlines()), *made], model="tiny")
  given = {"model": "Qwen2.5-1.5B", "length": 32768, "rows": rows, "memory": 24.0}
  lines = said(capsys, **given, **args).split("\n\n")[2].splitlines()
  assert [line.split()[0] for line in lines[2:]] == names
  assert ("on host" in lines[0]) == ("infllm" in names)


def test_json_has_all_numbers(rows, capsys):
  given = {"rows": rows, "length": 8192, "methods": ("quest", "tova"), "memory": 17.0}
  spread = {"devices": 2, "hosts": 2, "mesh": (2, 2), "length": 8192, "methods": ("tova",)}
  found = json.loads(said(capsys, json=True, rows=rows, **spread))
  assert (found["devices"], found["hosts"], found["mesh"]) == (2, 2, {"heads": 2, "slots": 2})
  assert "needs a row's slots on one" in found["refused"]["tova"]
  assert [x["method"] for x in found["methods"]] == ["full"]
  found = json.loads(said(capsys, json=True, **given, budgets=("2048", "64")))
  by = {(x["method"], x["budget"]): x for x in found["methods"]}
  assert list(by)[-1] in (("quest", 2048), ("quest", 64)) and by["tova", 64]["over"] == 0
  assert by["quest", 2048]["over"] > 0 and "seconds" not in by["quest", 2048]
  score = by["quest", 2048]["scores"][0]
  assert (score["length"], score["budget"], score["n"], score["of_full"]) == (4096, 1024, 8, 0.5)
  assert found["model"] == "Llama-3.1-8B" and found["device"]["memory"] == 17e9
  assert (found["commands"], found["weights"]) == ([], weight_bytes(LLAMA, jnp.bfloat16)[0])


def test_commands_name_the_model_that_was_given(tmp_path):
  where = case(80e9)
  args = advise.Args(model="my models/x", length=32768)
  some = [advised("kivi:bits=4", None, where), advised("knorm:skip_layers=(0,1)", 512, where)]
  one, two, three = advise.commands(args, some)
  assert one.endswith("--checkpoint 'my models/x' --method kivi:bits=4")
  assert "--methods kivi:bits=4 'knorm:skip_layers=(0,1)' --budgets 512 --out" in two
  assert three == "kvjax advise --model 'my models/x' --length 32768 --rows run"
  args = dataclasses.replace(args, devices=4, hosts=2)
  where = dataclasses.replace(where, mesh=advise.spread(args, LLAMA))
  over = " --mesh 8 1 --coordinator HOST:PORT --processes 2 --process NUMBER"
  one, two, three = advise.commands(args, [dataclasses.replace(x, case=where) for x in some])
  assert one.endswith("--method kivi:bits=4" + over) and two.endswith("--out run" + over)
  assert three.endswith(" --rows run --devices 4 --hosts 2 --mesh 8 1")


def test_the_device_is_this_machines_gpu_unless_one_is_named(monkeypatch):
  assert advise.device(advise.Args()).name == "nvidia-h200"
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  monkeypatch.setattr(devices, "this_device", lambda: devices.Device("mine", 1, 1))
  assert advise.device(advise.Args(memory=12.0)).memory == 12e9
  assert advise.device(advise.Args()).name == "mine"
  assert advise.device(advise.Args(device="l4")).memory == 24e9


@pytest.mark.core(1)
@pytest.mark.parametrize(
  ("given", "message"),
  [
    ({"model": "qwen3-8b"}, r"--model: found 'qwen3-8b', expected .* \(did you mean Qwen3-8B\?\)"),
    ({"length": 0}, "--length: found 0, expected at least 1"),
    ({"memory": 0.0}, "--memory: found 0.0, expected a number above 0"),
    ({"memory": float("inf")}, "--memory: found inf, expected a number above 0"),
    ({"bandwidth": -1.0}, "--bandwidth: found -1.0, expected a number above 0"),
    ({"device": "h300"}, "--device: found 'h300', expected a part of one of nvidia-h100-80gb"),
    ({"methods": ("fulll",)}, "--methods: found 'fulll', expected one of: full"),
    ({"budgets": ("x",)}, "--budgets: found 'x', expected tokens"),
    ({"budgets": ("x",), "memory": 1.0}, "--budgets: found 'x', expected tokens"),
    ({"hosts": 0}, "--hosts: found 0, expected at least 1"),
    ({"devices": 4, "mesh": (2, 1)}, "--mesh: found 2 × 1, expected --devices × --hosts = 4"),
    ({"devices": 3}, "^--devices: found 3 devices to split ffn = 14336 over, expected a divisor"),
    ({"devices": 3, "mesh": (3, 1)}, "^--mesh: found 3 devices to split kv_heads = 8 over"),
    (
      {"model": "gpt-oss-20B", "devices": 8, "hosts": 2},
      "^--devices × --hosts: found slots split over 2 devices for a model with windows",
    ),
  ],
)
def test_bad_arguments_are_refused(given, message, capsys):
  """Before a line of the report."""
  with pytest.raises((ValueError, NotImplementedError), match=message):
    advise.main(advise.Args(**given))
  assert not capsys.readouterr().out
