"""Scores beside costs: standings, boards, choices, their pictures and tables, by hand."""

import dataclasses
import json

import numpy as np
import pytest
import scipy.stats
from matplotlib.figure import Figure
from matplotlib.text import Text

from kvjax.programs import plot
from kvjax.programs.evals import choices, costs, families, pictures, stats
from kvjax.programs.evals.pictures.callouts import place
from kvjax.programs.evals.pictures.cost import front
from kvjax.programs.evals.standing import standings
from scripts.tools.tablemakers import Results, real
from scripts.tools.tablemakers.scores import REAL
from tests import eval_rows

SETTINGS = {"model": "tiny", "device": "some GPU", "impl": "auto", "batch": 2}
SETTINGS["config"] = {"kv_heads": 2}
# Right answers of ten, by method, budget, mode and task.
RIGHT = {
  ("full", None): {"aware": (10, 10, 1), "agnostic": (10, 10, 1)},
  ("quest", 1024): {"aware": (9, 10, 1), "agnostic": (9, 10, 1)},
  ("snapkv", 1024): {"aware": (10, 9, 9), "agnostic": (2, 2, 1)},
  ("snapkv", 4096): {"aware": (2, 2, 1), "agnostic": (2, 2, 1)},
  ("random", 1024): {"aware": (10, 10, 1), "agnostic": (0, 0, 0)},
}
TASKS = ("needle", "niah_multikey_1", "vt")
# µs a step, MB of cache a row, GB read, GB at most; of two rows.
COSTS = {
  ("full", None): (4000, 800, 8, 20),
  ("quest", 1024): (3000, 900, 4, 21),
  ("snapkv", 1024): (2500, 100, 3.5, 12),
  ("snapkv", 4096): (2600, 50, 3, 7),
  ("random", 1024): (2000, 1, 1, 1),
}


def rows(length=8192):
  given = {"length": length, "also": {"bytes": 99}}
  made = [eval_rows.row("wikitext", *who, 0, 0.6, **given) for who in RIGHT]
  for (method, budget), by_mode in RIGHT.items():
    for mode, right in by_mode.items():
      for task, hits in zip(TASKS, right, strict=True):
        for i in range(10):
          at = {"length": length, "mode": mode, "about": {"depth": i / 10}}
          made.append(eval_rows.row(task, method, budget, i, float(i < hits), **at))
  return made


SEEN = {"full": 1.0, "quest": 0.25, "snapkv": 0.25, "random": 0.25}  # of the tokens


def lines(length=8192, batch=2):
  return [
    {
      "method": method,
      "budget": budget,
      "length": length,
      "batch": batch,
      "us": us,
      "us_quartiles": [us, 1.01 * us],
      "cache_bytes": kept * 1e6 * batch,
      "host_bytes": 0,
      "read_bytes": read * 1e9,
      "visited": SEEN[method] * (1.05 if budget == 4096 else 1),
      "peak_bytes": peak * 1e9,
    }
    for (method, budget), (us, kept, read, peak) in COSTS.items()
  ]


def write(folder, held, timed):
  eval_rows.write(folder, held, **SETTINGS)
  (folder / costs.FILE).write_text("".join(json.dumps(line) + "\n" for line in timed))
  return folder


@pytest.fixture
def folder(tmp_path):
  return write(tmp_path / REAL, rows(), lines())


@pytest.fixture
def board(folder):
  """At 8,192 tokens, aware, two rows."""
  return costs.boards(standings(rows(), 0.5), costs.read(folder))[0]


# ---- standings


def test_the_mean_of_tasks_and_its_interval_by_hand():
  """Two shares of ten: Wilson's distances are squared, added, rooted and halved."""
  parts = [stats.estimate([1.0] * 10), stats.estimate([1.0] * 5 + [0.0] * 5)]
  mean = stats.mean_of(parts)
  assert (mean.n, mean.mean) == (20, 0.75)
  below = np.hypot(1 - parts[0].low, 0.5 - parts[1].low) / 2
  bounds = 0.75 - below, 0.75 + (parts[1].high - 0.5) / 2
  np.testing.assert_allclose((mean.low, mean.high), bounds)
  alone = stats.mean_of(parts[:1])
  assert (alone.low, alone.high) == pytest.approx((parts[0].low, parts[0].high))
  with pytest.raises(ValueError, match="parts: found none"):
    stats.mean_of([])


def test_standings_by_hand():
  """The full cache solves two of three tasks; Quest misses one of twenty rows."""
  aware, agnostic = standings(rows(), 0.5)
  assert (aware.mode, agnostic.mode, aware.n) == ("aware", "agnostic", "n = 10")
  assert (aware.tasks, aware.weak) == (TASKS[:2], TASKS[2:])
  quest = aware.by["quest", 1024]
  assert quest.score.mean == pytest.approx(0.95) and quest.gap.mean == pytest.approx(-0.05)
  assert quest.gap.low < 0 <= quest.gap.high and next(iter(aware.by)) == ("full", None)
  assert standings(rows(), 0.0)[0].tasks == TASKS


def test_gaps_compare_the_same_rows():
  """Only rows 0 to 4 of the method are there; the full cache is right in the first three."""
  held = [row for row in rows() if row["method"] in ("full", "snapkv") and row["budget"] != 4096]
  held = [row for row in held if row["method"] == "full" or row["index"] < 5]
  for row in held:
    row["score"] = float(row["index"] < 3) if row["method"] == "full" else 1.0
  found = standings(held)[0].by["snapkv", 1024]
  assert found.gap.mean == pytest.approx(1 - 3 / 5)


def test_means_are_of_the_prompts_that_all_have_answered():
  """A method with rows 0 to 5 leaves those to everybody; one with a few is not compared."""
  held = [row for row in rows() if row["mode"] == "aware" and row["task"] != "vt"]
  short = [row for row in held if row["method"] != "quest" or row["index"] < 6]
  found = standings(short)[0]
  assert found.n == "n = 6" and {one.tasks["needle"].n for one in found.by.values()} == {6}
  assert found.by["snapkv", 1024].score.mean == 1  # its one miss is row 9
  few = [row for row in held if row["method"] != "quest" or row["index"] < 4]
  found = standings(few)[0]
  assert found.n == "n = 10" and [one.method for one in found.missing] == ["quest"]
  assert found.by["quest", 1024].tasks["needle"].n == 4


def test_equal_answers_leave_a_gap_as_wide_as_their_number():
  """No difference in thirty: each side may still lose what one prompt in seven would."""
  even = stats.paired([0.0] * 30)
  assert (even.mean, even.low, even.high) == pytest.approx((0, -0.1359, 0.1359), abs=1e-4)
  lost = stats.paired([-1.0] * 3 + [0.0] * 27)
  low, high = scipy.stats.binomtest(3, 30).proportion_ci(0.975, "exact")
  assert (lost.low, lost.high) == pytest.approx((-high, 0.1359 - low), abs=1e-4)
  parts = stats.paired([0.25] * 10 + [0.0] * 20)
  assert parts.low < 0 < parts.mean < parts.high < stats.paired([1.0] * 10 + [0.0] * 20).high
  with pytest.raises(ValueError, match="differences: found"):
    stats.paired([2.0])


def test_who_lacks_a_task_is_named_and_shortens_nobodys_mean():
  held = [row for row in rows() if (row["method"], row["task"]) != ("quest", "needle")]
  aware = standings(held, 0.5)[0]
  assert aware.tasks == TASKS[:2]
  assert [one.method for one in aware.missing] == ["quest"]


def test_without_the_full_cache_nothing_stands():
  assert standings([row for row in rows() if row["method"] != "full"]) == []


# ---- costs


@pytest.mark.parametrize(
  "line, said",
  [
    ("{", "line 1: found Expecting"),
    ("[]", "line 1: found method = None, budget = None, length = None"),
    ('{"method": "full", "budget": null}', "line 1: found length = None, batch = None, expected"),
    (json.dumps({**lines()[0], "method": ["full"]}), r"line 1: found method = \['full'\]"),
    (json.dumps({**lines()[0], "us_quartiles": [1]}), r"us_quartiles = \[1\], expected two"),
    (json.dumps({**lines()[0], "us": -1}), "found us = -1, expected a number"),
  ],
)
def test_damaged_costs_are_named(tmp_path, line, said):
  (tmp_path / costs.FILE).write_text(line + "\n")
  with pytest.raises(ValueError, match=rf"speed\.jsonl: .*{said}"):
    costs.read(tmp_path)


def test_lines_without_a_time_and_cut_off_ones_cost_nothing(tmp_path):
  """Of a method that computed something else, and of a run that was killed."""
  timed, wrong = lines()[:2]
  write(tmp_path, [], [timed, {name: x for name, x in wrong.items() if name[:2] != "us"}])
  with (tmp_path / costs.FILE).open("a") as file:
    file.write('{"method": "h2')
  assert [cost.method for cost in costs.read(tmp_path)] == [timed["method"]]


def test_the_last_line_of_a_shape_counts(tmp_path):
  write(tmp_path, [], [lines()[0], {**lines()[0], "us": 5000}])
  (cost,) = costs.read(tmp_path)
  assert (cost.milliseconds, cost.kept, cost.read) == (5.0, 0.8, 8.0)
  assert costs.read(tmp_path / "none") == []


def test_boards_have_what_has_both(folder):
  found = costs.boards(standings(rows()), [c for c in costs.read(folder) if c.budget != 4096])
  told = [(b.standings.mode, b.batch, len(b.points)) for b in found]
  assert told == [("aware", 2, 4), ("agnostic", 2, 4)]
  without = [cost for cost in costs.read(folder) if cost.method != "full"]
  assert costs.boards(standings(rows()), without) == []


# ---- which method when


def named(found):
  return [(choice.aims, choice.point and choice.point.method, choice.loses) for choice in found]


def test_choices_by_hand(board):
  """One prompt in twenty lost is 95 %: enough for nine tenths. Random is nobody's choice."""
  strict, loose = ("fastest", "least kept"), ("fastest at 90 %", "least kept at 90 %")
  enough = (loose, "snapkv", False)
  assert named(choices.choices(board)) == [((*strict, "safest"), "full", False), enough]
  nothing = (("safest",), None, False)
  assert named(choices.choices(board, 12)) == [(strict, "snapkv", True), nothing, enough]
  losing = ((*strict, *loose), "snapkv", True)
  assert named(choices.choices(board, 8)) == [losing, nothing]
  assert choices.choices(board, 8)[0].point.budget == 4096
  assert choices.choices(board, 2)[0].point is None


def test_a_share_of_the_score_may_be_enough(board):
  """A quarter of the full cache's score: the larger budget has it, and keeps less."""
  aim = choices.Aim("", lambda cost: (cost.kept,), share=0.15)
  found, loses = choices._best(aim, list(board.points), board.full)
  assert (found.method, found.budget, loses) == ("snapkv", 4096, True)
  enough = dataclasses.replace(aim, share=0.9)
  found, loses = choices._best(enough, list(board.points), board.full)
  assert (found.method, found.budget, loses) == ("snapkv", 1024, False)


def test_only_what_attends_to_as_many_tokens_is_compared(board):
  """Within a tenth; who attends to more stands in a class of its own, beside the full cache."""
  far = dataclasses.replace(board.points[1].cost, visited=0.28)
  points = [board.full, dataclasses.replace(board.points[1], cost=far), *board.points[2:]]
  mixed = dataclasses.replace(board, points=points)
  with pytest.raises(ValueError, match=r"found methods that attend to \[2048, 2150, 2294\]"):
    choices.choices(mixed)
  few, more = choices.classes(mixed)
  assert [point.method for point in few.points] == ["full", "snapkv", "snapkv"]
  assert [point.method for point in more.points] == ["full", "quest"]


def test_memory_limits_with_the_same_choices_are_one(board):
  found = dict(choices.by_memory(board))
  assert list(found) == ["8 GB", "16 GB", "24 GB and more"]
  assert named(found["24 GB and more"]) == named(choices.choices(board))


def test_families_are_what_classes_declare():
  of = {name: families.of(name) for name in ("quest", "cis", "art:splits=4", "prr")}
  assert set(of.values()) == {families.READS}
  assert {families.of(name) for name in ("quantised:bits=4", "kivi")} == {families.ROUNDS}
  assert families.of("quantised:bits=8+quest") == families.READS
  assert families.of("quantised:bits=8+snapkv") == families.EVICTS
  assert families.of("cpe") == families.SKIMS and families.of("h2o") == families.EVICTS
  of = {name: families.of(name) for name in ("streaming_llm", "duo_attention")}
  assert set(of.values()) == {families.WINDOWS} and families.of("full") == families.WHOLE
  assert families.of("ltri") == families.STREAMS and families.of("random") == families.CONTROL
  assert families.of("nonesuch") == families.of("mine:Middle") == families.OTHERS


# ---- the picture


@pytest.mark.slow
def test_score_by_cost_by_hand(board, folder):
  """Every point is where its cost and score are, with its interval; what leads has its name."""
  found = costs.boards(standings(rows(), 0.5), costs.read(folder))
  drawn = pictures.score_by_cost(found)
  assert list(drawn) == ["aware_b2", "agnostic_b2"]
  time, kept, read = drawn["aware_b2"].axes
  points = {tuple(line.get_xydata()[0]) for line in time.lines if line.get_linestyle() == "None"}
  assert points == {(p.cost.milliseconds, 100 * p.score.mean) for p in board.points}
  shown = [line.get_xydata()[0] for line in read.lines if line.get_linestyle() == "None"]
  reads = sorted((p.cost.read, 100 * p.score.mean) for p in board.points)
  np.testing.assert_allclose(sorted(map(tuple, shown)), reads, rtol=0.03)  # equal ones side by side
  bars = [bar.get_segments()[0] for bar in time.collections]
  whole = board.full
  np.testing.assert_allclose(bars[0], [[4, 100 * whole.score.low], [4, 100 * whole.score.high]])
  assert {text.get_text() for text in time.texts} == {"full", "snapkv 1K"}
  assert (time.get_xscale(), kept.get_xscale(), read.get_xscale()) == ("linear", "log", "log")
  assert "without vt" in drawn["aware_b2"].get_supxlabel()
  assert "needle, niah_multikey_1, n = 10 each" in drawn["aware_b2"].get_supxlabel()


def test_the_first_page_shows_what_attends_to_as_many_tokens(board):
  """SnapKV beside the full cache is one point too few; with another both have their names."""
  assert pictures.first_page(board) is None
  (again,) = (p for p in board.points if p.budget == 4096)
  named = dataclasses.replace(again, method="tova")
  fewer = [
    dataclasses.replace(p, cost=dataclasses.replace(p.cost, visited=0.48 * p.cost.visited))
    for p in (*board.points[:-2], named)
  ]
  figure = pictures.first_page(dataclasses.replace(board, points=fewer))
  axis = figure.axes[0]
  assert {text.get_text() for text in axis.texts} == {"full", "snapkv", "tova"}
  assert "attend to 983 to 1,032 of them" in axis.get_title() and len(axis.collections) == 3


def test_what_leads_is_what_nothing_cheaper_beats(board):
  leads = front(board.points, lambda cost: cost.read)
  told = [(p.method, p.budget) for p in leads]
  assert told == [("snapkv", 4096), ("snapkv", 1024), ("full", None)]


def test_names_do_not_cover_each_other():
  """Twenty names at one point."""
  figure = Figure()
  axis = figure.subplots()
  axis.set(xlim=(0, 1), ylim=(0, 1))
  figure.draw_without_rendering()
  place(axis, [(f"method {i}", 0.5, 0.5, "black") for i in range(20)], [(0.5, 0.5)])
  figure.draw_without_rendering()
  boxes = [Text.get_window_extent(text) for text in axis.texts]  # without the lines that lead back
  assert len(boxes) == 20
  assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


@pytest.mark.slow
def test_the_report_shows_it_where_costs_are(folder):
  drawn = plot.draw(plot.Results([folder]))
  assert {"score_by_cost_aware_b2", "score_by_cost_agnostic_b2"} <= set(drawn)
  (folder / costs.FILE).unlink()
  assert not any("cost" in name for name in plot.draw(plot.Results([folder])))


# ---- tables


def test_the_table_of_a_length_by_hand(folder):
  results = Results(folder.parents[1])
  by = real.scores(results, "8192").reset_index().set_index("method, budget").T
  assert by.columns[0] == "`full`" and by.columns[-1] == "`snapkv`, 4,096"
  assert by["`snapkv`, 4,096"]["tokens attended to"] == "2,048 to 2,150"
  quest = by["`quest`, 1,024"]
  assert quest["n"] == "10" and quest["`needle`"] == "90 (60–98)"
  assert quest["less full"].startswith("−5 (−")
  assert quest["ms a token, batch 2 (× full)"] == "3.00 (0.75)"
  assert (quest["GB kept a row"], quest["GB read a step, batch 2"]) == ("0.90", "4.00")
  assert quest["KL, nats"] is None and quest["`vt`, not in the mean"] == "10 (2–40)"
  assert real.scores(results, "32768").empty


def test_which_method_when_by_hand(folder):
  listed = real.when(Results(folder.parents[1])).reset_index()
  last = listed[listed.memory == "24 GB and more"]
  assert last[["for", "take"]].to_numpy().tolist() == [
    ["fastest, least kept, safest", "`full`"],
    ["fastest at 90 %, least kept at 90 %", "`snapkv`, 1,024"],
  ]
  assert "agnostic −80" in last.risk.iloc[1] and last["GB a step holds"].iloc[1] == "12.0"
  assert set(listed["attended to"]) == {"2,048 to 2,150"}
  assert listed["take"][0] == "`snapkv`, 4,096" and listed["less full"][0].startswith("**−80")
  assert listed["take"][1] == "nothing that was measured fits"


def test_without_costs_scores_remain(folder):
  (folder / costs.FILE).unlink()
  results = Results(folder.parents[1])
  assert real.when(results).empty
  found = real.scores(results, "8192")
  assert found.columns[-1] == "KL, nats" and {*found.index.get_level_values(0)} == {"all", "–"}
