"""Two runs beside each other: what became slower and faster, and what cannot be compared."""

import json

import numpy as np
import pytest

from kvjax.programs import bench, common, compare

FACTS = {"device": "NVIDIA H200", "jax": "0.11.2", "command": "kvjax bench decode"}


def times(median, count=20):
  """Repetitions within one percent of a median."""
  return list(median * (1 + 0.01 * np.linspace(-1, 1, count)))


def run(path, cases, **facts):
  """A file of results: cases' contenders, each with all its times."""
  path.parent.mkdir(parents=True, exist_ok=True)
  held = []
  for name, contenders in cases.items():
    timed = [
      {"name": who, **({"us": float(np.median(us)), "us_all": us} if us else {})}
      for who, us in contenders.items()
    ]
    held.append({"case": name, "shapes": "q [1, 8]", "results": timed})
  path.write_text(json.dumps({**FACTS, **facts, "cases": held}), "utf-8")
  return path


@pytest.fixture
def folders(tmp_path):
  old = {
    "a": {"kvjax": times(100), "read": times(50), "gone": times(1)},
    "b": {"kvjax": times(200), "wrong": times(3)},
    "dropped": {"kvjax": times(7)},
  }
  new = {
    "a": {"kvjax": times(110), "read": times(50.1)},
    "b": {"kvjax": times(150), "wrong": None},
    "added": {"kvjax": times(7)},
  }
  run(tmp_path / "old" / "bench_decode.json", old)
  run(tmp_path / "old" / "bench_select.json", old)
  run(tmp_path / "new" / "nvidia-h200" / "bench_decode.json", new, jax="0.12.0")
  return tmp_path / "old", tmp_path / "new"


def test_what_became_slower_and_what_faster(folders):
  found = compare.compare(*folders)
  by_name = {(change.case, change.contender): change for change in found.changes}
  assert set(by_name) == {("a", "kvjax"), ("a", "read"), ("b", "kvjax")}
  assert [named for named, change in by_name.items() if change.slower] == [("a", "kvjax")]
  assert [named for named, change in by_name.items() if change.faster] == [("b", "kvjax")]
  slow = by_name["a", "kvjax"]
  assert slow.ratio == pytest.approx(1.1) and slow.interval[0] < 1.1 < slow.interval[1]


def test_what_differs_and_what_is_missing_is_said(folders):
  said = compare.compare(*folders).differences
  for case in ("a, gone", "b, wrong", "dropped, kvjax"):
    assert f"decode: only in the old: {case}" in said
  more = ["decode: jax 0.11.2, then 0.12.0", "decode: only in the new: added, kvjax"]
  assert {*more, "only in the old: suite select"} <= set(said)
  assert not any("command" in line for line in said)


@pytest.mark.parametrize("other", ['"q [2, 8]"', '""'])
def test_other_shapes_are_said(folders, other):
  old, new = folders
  path = new / "nvidia-h200" / "bench_decode.json"
  text = path.read_text("utf-8").replace('"q [1, 8]"', other, 1)
  path.write_text(text.replace('"shapes": "", ', ""), "utf-8")
  said = compare.compare(old, new).differences
  assert f"decode: a is of other shapes: q [1, 8], then {json.loads(other)}" in said


def test_noise_is_no_change():
  """Medians 3 % apart within times that spread by half."""
  old = list(np.linspace(80, 120, 20))
  noisy = compare.change(("s", "c", "k"), old, [1.03 * us for us in old])
  assert noisy.ratio == pytest.approx(1.03) and not noisy.slower
  tiny = compare.change(("s", "c", "k"), times(100), [us + 0.9 for us in times(100)])
  assert not tiny.slower  # less than one percent


@pytest.mark.parametrize("few", [[120.0], [120.0] * 20])
def test_without_a_spread_there_is_no_interval(few):
  found = compare.change(("s", "c", "k"), times(100), few)
  assert found.interval is None and not found.slower and found.row()[-1] == "–"


def test_the_interval_holds_the_ratio_as_often_as_it_says():
  rng = np.random.default_rng(0)
  held = 0
  for _ in range(100):
    low, high = compare.interval(rng.normal(100, 2, 20), rng.normal(105, 2, 20))
    held += low < 1.05 < high
  assert held >= 88


def test_two_files(folders):
  old, new = folders
  files = old / "bench_decode.json", new / "nvidia-h200" / "bench_decode.json"
  assert compare.compare(*files).changes == compare.compare(*folders).changes


@pytest.mark.parametrize(
  "new, error, said",
  [
    ("none", FileNotFoundError, "none: found nothing there"),
    ("twice", ValueError, "expected the results of one device"),
    ("old/bench_decode.json", ValueError, "a folder and a file"),
    ("empty", FileNotFoundError, "found no bench_.*json"),
    ("prr", ValueError, "found no suite in both"),
    ("select", ValueError, "found no case and"),
    ("object", ValueError, "found no cases"),
    ("text", ValueError, "not JSON"),
    ("bare", ValueError, r"c: found no repetitions .*of 'kvjax'"),
    ("unnamed", ValueError, "unnamed/bench_decode.json: found KeyError: 'name', expected results"),
    ("foreign", ValueError, "foreign/bench_decode.json: found no cases or no device"),
    ("zero", ValueError, "zero/bench_decode.json: .* of c, kvjax, expected positive"),
  ],
)
def test_what_cannot_be_compared_is_refused(folders, tmp_path, new, error, said):
  cases = {"c": {"kvjax": times(1)}}
  for name in ("twice/one", "twice/other", "object", "text", "bare", "unnamed", "foreign", "zero"):
    path = run(tmp_path / name / "bench_decode.json", cases)
    found = {
      "object": "{}",
      "text": "run",
      "bare": path.read_text("utf-8").replace("us_all", "all"),
      "unnamed": path.read_text("utf-8").replace('"name"', '"who"'),
      "foreign": path.read_text("utf-8").replace('"NVIDIA H200"', "3"),
      "zero": path.read_text("utf-8").replace("0.99,", "0,"),
    }
    path.write_text(found.get(name, path.read_text("utf-8")), "utf-8")
  for name in ("prr", "select"):
    run(tmp_path / name / f"bench_{name}.json", cases)
  (tmp_path / "empty").mkdir()
  with pytest.raises(error, match=said):
    compare.compare(folders[0], tmp_path / new)


def main(*given):
  return bench.main(common.parse(bench.Args, "bench", given))


def test_the_program(folders, capsys):
  command = ["--compare", *map(str, folders)]
  assert main(*command) == 0
  assert "decode, a: kvjax" in capsys.readouterr().out
  assert main(*command, "--fail-slower") == 1
  old = str(folders[0])
  assert main("--compare", old, old, "--fail-slower") == 0
  with pytest.raises(ValueError, match="--fail-slower: found no --compare"):
    main("decode", "--quick", "--only", "nothing", "--fail-slower")
  with pytest.raises(ValueError, match="--repetitions: found 0, expected at least 1"):
    main("decode", "--quick", "--only", "nothing", "--repetitions", "0")
  with pytest.raises(ValueError, match="expected one of a suite to run"):
    main(*command, "--add", old)
