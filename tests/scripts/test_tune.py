"""`kvjax tune`: what it measures, where it writes, how it goes on; timings are a GPU's."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from kvjax.kernels.common import config, devices
from kvjax.kernels.common.config import Config
from kvjax.programs import suites, tune
from kvjax.testing.decode_cases import TUNED, Shape


@pytest.fixture
def gpu(monkeypatch, tmp_path):
  """A card whose measurements are made up; gives the list of what was measured."""
  measured: list[str] = []

  def shape_of(table, shape, repetitions):
    measured.append(shape.name)
    cut = Config(tile=16, programs=len(measured), warps=4, stages=2)
    cut = dataclasses.asdict(cut)
    return {"shape": shape.name, "us": 1.0, "bucket": tune.bucket(shape), "config": cut}

  def facts(repetitions):
    measured.append("device")
    return {"cores": 9, "shared": 99 << 10, "read": 2e12, "link": 1e10, "memory": 1e10}

  here = devices.device("Imaginary 1")
  monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  monkeypatch.setattr(devices, "_default", lambda: here)
  monkeypatch.setattr(tune, "tune", shape_of)
  monkeypatch.setattr(tune, "facts", facts)
  fresh()
  yield measured
  fresh()


def fresh():
  """As in a new process."""
  devices.tables.cache_clear()
  config.tuned.cache_clear()


def test_kernels_and_floors_find_what_was_measured(gpu):
  size = {"rows": 8, "groups": 4, "slots": 128 << 10, "head_dim": 128, "itemsize": 2}
  before = config.choose("decode", **size)
  tune.main(tune.Args())
  fresh()
  assert gpu == ["device", *(shape.name for shape in TUNED)]
  assert config.choose("decode", **size) == Config(tile=16, programs=2, warps=4, stages=2) != before
  here = devices.device("Imaginary 1", cores=9)
  assert (here.read, here.link, here.source) == (2e12, 1e10, "measured")
  assert devices.named("imaginary").memory == 1e10


@pytest.mark.parametrize(("slower", "whole"), [(1.0, True), (3.0, False)])
def test_rows_of_different_lengths_have_a_say(monkeypatch, slower, whole):
  """A program a row, a little faster for rows of one length and `slower` for others."""

  class Timed(tune.Sweep):
    def __init__(self, shape, *_):
      self.ragged, self.times = shape.ragged, {}

    def add(self, configs):
      for cut in configs:
        uncut = slower if self.ragged else 0.98
        self.times[cut] = uncut if cut.programs == 1 else 1 + cut.programs / 1e6

  monkeypatch.setattr(tune, "Sweep", Timed)
  monkeypatch.setattr(devices, "_default", lambda: devices.device("NVIDIA H200"))
  found = tune.tune("decode", Shape(8, 8, 4, 16 << 10, 256), 1)
  assert (found["config"]["programs"] == 1) == whole


def test_no_shipped_table_leaves_a_long_row_to_one_program():
  tables = list(devices.folders()[-1].glob("*/decode.json"))
  entries = [x for path in tables for x in json.loads(path.read_text("utf-8"))["entries"]]
  assert len(tables) > 1 and all(x["config"]["programs"] > 1 for x in entries)


def test_an_interrupted_run_goes_on_where_it_ended(gpu, monkeypatch):
  def stops(table, shape, repetitions):
    if len(gpu) == 3:
      raise KeyboardInterrupt
    return whole(table, shape, repetitions)

  whole = tune.tune
  monkeypatch.setattr(tune, "tune", stops)
  with pytest.raises(KeyboardInterrupt):
    tune.main(tune.Args())
  monkeypatch.setattr(tune, "tune", whole)
  tune.main(tune.Args())
  assert gpu == ["device", *(shape.name for shape in TUNED)]  # each once
  tune.main(tune.Args())
  assert len(gpu) == 1 + len(TUNED)
  tune.main(tune.Args(tables=("decode",), only=("B1 T4K",), again=True))
  assert gpu[-1] == "B1 T4K 8x4"
  assert len(gpu) == 2 + len(TUNED)
  path = devices.folders()[0] / "imaginary-1" / "decode.json"
  held = json.loads(path.read_text())
  assert len(held["entries"]) == len(TUNED)
  path.write_text(json.dumps(held | {"jax": "0.0"}))
  tune.main(tune.Args(tables=("decode",), only=("B1 T4K",)))
  assert len(json.loads(path.read_text())["entries"]) == 1  # those of another JAX do not count
  path.write_text("[]")
  with pytest.raises(ValueError, match=r"imaginary-1/decode\.json: found a list, expected an obj"):
    tune.main(tune.Args(tables=("decode",)))


@pytest.mark.parametrize(("given", "error"), [(1.001, ""), (1.1, "1.0e-01"), (np.nan, "nan")])
def test_a_configuration_that_is_wrong_is_named(capsys, given, error):
  sweep = tune.Sweep.__new__(tune.Sweep)
  sweep._want = np.ones(4)
  made = suites.Contender("one", lambda: 1.0, lambda: np.full(4, given))
  assert sweep._right(Config(64, 1, 4, 2), made) == (not error)
  assert capsys.readouterr().out.endswith(f"wrong, error {error}\n" if error else "")


def test_where_it_writes(gpu, tmp_path):
  tune.main(tune.Args(tables=("device",), out=tmp_path / "mine"))
  assert (tmp_path / "mine" / "imaginary-1" / "device.json").is_file()
  tune.main(tune.Args(tables=("device",), dry_run=True))
  assert not (devices.folders()[0] / "imaginary-1").exists()


def test_shapes_of_a_model_fit_a_fifth_of_the_memory():
  made = tune.of_model("Qwen3-1.7B", 24e9)
  assert Shape(8, 8, 2, 32 << 10) in made
  assert all(2 * shape.kv_bytes() <= 24e9 / 5 for shape in made)
  assert len({json.dumps(tune.bucket(shape)) for shape in made}) == len(made)


@pytest.mark.parametrize(
  ("args", "message"),
  [
    (tune.Args(repetitions=0), "--repetitions: found 0, expected at least 1"),
    (tune.Args(), "found backend cpu, expected a GPU to tune for"),
    (tune.Args(model="nosuch"), "--model: found 'nosuch', expected a checkpoint, a Hugging"),
    (tune.Args(only=("B5",)), "--only: found B5, in no shape's name, expected a part of one of B1"),
  ],
)
def test_bad_arguments_are_refused(args, message, monkeypatch):
  with pytest.raises(ValueError, match=message):
    list(tune.work(args)) if args.model or args.only else tune.main(args)
