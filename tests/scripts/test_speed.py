"""The programs that time steps after real text, and first prompts, on a tiny model."""

import json
import pathlib

import pytest

import kvjax
from kvjax.programs import cold, speed
from scripts.examples import tiny

LENGTH = 480  # tokens are bytes


@pytest.fixture
def loaded(monkeypatch):
  model, tokenizer = tiny.load()
  monkeypatch.setattr(speed.common, "load_model", lambda *args, **kwargs: (model, tokenizer))
  return model


def args(out, **changes):
  usual = {"methods": ("snapkv",), "budgets": ("64",), "lengths": (LENGTH,)}
  return speed.Args(out, **usual | changes)


@pytest.mark.slow
def test_a_line_says_what_a_step_costs(loaded, tmp_path):
  speed.main(args(tmp_path, batches=(1, 2), methods=("snapkv", "quest")))
  rows = {speed.key(row): row for row in speed.measured(tmp_path)}
  labels = (("full", None), ("snapkv", 64), ("quest", 64))
  assert set(rows) == {(*label, LENGTH, batch) for label in labels for batch in (1, 2)}
  for row in rows.values():
    low, high = row["us_quartiles"]
    assert 0 < low <= row["us"] <= high and len(row["us_all"]) == speed.TIMES
    assert row["error"] <= speed.TOLERANCE and row["agreed"] == 1
    assert row["peak_bytes"] > row["cache_bytes"] > 0 and row["prefill_s"] > 0
  full, kept = rows["full", None, LENGTH, 2], rows["snapkv", 64, LENGTH, 2]
  assert full["visited"] == 1 and kept["visited"] < 0.5
  assert kept["cache_bytes"] < full["cache_bytes"] / 3
  spec = loaded.spec(2, LENGTH)
  assert full["cache_bytes"] == kvjax.runtime.memory.plan_memory(spec, kvjax.Full()).device
  assert full["cache_bytes"] == 2 * rows["full", None, LENGTH, 1]["cache_bytes"]


@pytest.mark.slow
def test_a_line_says_what_generate_takes(loaded, tmp_path):
  """Of methods that keep every token, too, whose prompts leave room for it."""
  kept = tmp_path / "profiles"
  methods = ("snapkv", "snapkv:window_size=8", "infllm")
  speed.main(args(tmp_path, methods=methods, called=True, trace=kept))
  rows = speed.measured(tmp_path)
  assert len(rows) == 4 and all(row["called_us"] > 0 < row["us"] for row in rows)
  for name in ("full_None", "snapkv_64", "snapkv_window_size=8_64", "infllm_64"):
    assert len([*(kept / f"{name}_B8_T{LENGTH}").rglob("*.xplane.pb")]) == 1


@pytest.mark.slow
def test_what_is_there_is_not_measured_again(loaded, tmp_path):
  speed.main(args(tmp_path))
  first = (tmp_path / speed.FILE).read_text()
  cut = json.dumps({"method": "h2o"})[:-4]
  (tmp_path / speed.FILE).write_text(first + cut)  # killed while it wrote
  speed.main(args(tmp_path, methods=("snapkv", "tova")))
  assert (tmp_path / speed.FILE).read_text().startswith(first)
  assert [row["method"] for row in speed.measured(tmp_path)] == ["full", "snapkv", "tova"]
  with pytest.raises(ValueError, match=r"found lines with seed = 0, and now it is 1: expected"):
    speed.main(args(tmp_path, seed=1))


@pytest.mark.slow
def test_what_is_wrong_gets_no_time(loaded, tmp_path, monkeypatch):
  monkeypatch.setattr(speed, "TOLERANCE", -1.0)
  speed.main(args(tmp_path))
  assert all("us" not in row and "error" in row for row in speed.measured(tmp_path))


@pytest.mark.sweep
@pytest.mark.slow
def test_every_method_is_timed(loaded, tmp_path):
  speed.main(args(tmp_path, methods=("all",), batches=(2,)))
  assert {row["method"] for row in speed.measured(tmp_path) if "us" in row} == set(kvjax.METHODS)


@pytest.mark.parametrize(
  ("changes", "named"),
  [
    ({"lengths": ()}, "--lengths: found none, expected at least one"),
    ({"budgets": ()}, "--budgets: found none, expected at least one"),
    ({"batches": (0,)}, "--batches"),
    ({"budgets": ("none",)}, "--budgets"),
    ({"methods": ("nobody",)}, "--methods"),
    ({"lengths": (160,), "called": True}, "--lengths: found 160, expected more than the 160"),
    ({"trace": pathlib.Path("x")}, "--trace: found it alone, expected it beside --called"),
  ],
)
def test_bad_arguments_are_named(loaded, tmp_path, changes, named):
  """And leave nothing behind."""
  with pytest.raises(ValueError, match=named):
    speed.main(args(tmp_path / "out", **changes))
  assert not (tmp_path / "out").exists()


def test_a_folder_without_a_line_is_an_error(loaded, tmp_path, monkeypatch):
  def refuse(*_):
    raise NotImplementedError

  monkeypatch.setattr(speed.Bench, "measure", refuse)
  with pytest.raises(ValueError, match="found no lines: every method was refused"):
    speed.main(args(tmp_path))


# ---- the cold start, a fresh process for each row


@pytest.mark.slow
def test_a_warm_cache_compiles_nothing(tmp_path, capsys, monkeypatch):
  """The second process finds what the first one kept, and both count one program of all layers."""
  monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
  cold.main(cold.Args(("full",), "tiny", 64, 16, tmp_path))
  (path,) = tmp_path.glob("*/cold.json")
  empty, warm = json.loads(path.read_text())["rows"]
  assert (empty["cache"], warm["cache"]) == ("empty", "warm")
  assert empty["programs"] == warm["programs"] <= 8  # of the prompt and of a step
  assert (empty["found"], warm["found"]) == (0, warm["programs"])
  assert empty["again"] < empty["first_token"] < empty["generated"]
  assert "first token" in capsys.readouterr().out


def test_unknown_methods_are_refused():
  with pytest.raises(ValueError, match="--methods: found 'fulll', expected one of: full"):
    cold.main(cold.Args(("fulll",)))
