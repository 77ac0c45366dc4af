"""Pictures and the report, from results small enough to know every number of."""

import json
import re

import numpy as np
import pytest

from kvjax.programs import common, plot
from kvjax.programs.evals import pictures, store, summary
from tests.eval_rows import row, write

STYLES = pictures.Styles(["full", "random", "x"])


def results():
  rows = []
  for length in (1024, 2048):
    for method, budget in (("full", None), ("random", length // 4), ("x", length // 4)):
      for index in range(4):
        depth = {"depth": index % 2}
        score = {"full": 1.0, "random": 0.0, "x": float(index == 3)}[method]
        rows.append(row("needle", method, budget, index, score, length, about=depth))
        rows.append(row("vt", method, budget, index, score / 2, length))
        kl = [0.0 if method == "full" else 0.25] * 32
        curves = {"kl": kl, "top1": [1.0] * 32, "nll": [np.log(8.0)] * 32}
        means = {name: float(np.mean(values)) for name, values in curves.items()}
        rows.append(row("kl", method, budget, index, 1.0, length, also=means, positions=curves))
  return rows


REPORTS = {"visited": [[0.5, 0.25]] * 3, "hits": [[None, 1.0]] * 3}
TRACES = [{"method": "x", "budget": 256, "length": 1024, "steps": 3, "reports": REPORTS}]
BENCH = {
  "device": "some GPU",
  "cases": [
    {
      "case": f"tiny B2 T{tokens}",
      "results": [{"name": "kvjax", "us": 100.0}, {"name": "products", "us": 50.0}, {"name": "x"}],
    }
    for tokens in (1024, 4096)
  ],
}


@pytest.fixture
def folder(tmp_path):
  run = write(tmp_path / "run", results(), model="tiny <1>", device="CPU")
  (run / "traces.json").write_text(json.dumps(TRACES))
  (tmp_path / "bench_e2e.json").write_text(json.dumps(BENCH))
  return tmp_path


def main(*given):
  plot.main(common.parse(plot.Args, "plot", given))


@pytest.mark.slow
def test_the_report_stands_alone(folder, capsys):
  """One file, every picture in it, the same bytes again; pictures as files where asked for."""
  paths = [str(folder / "run"), str(folder / "bench_e2e.json")]
  out = folder / "report.html"
  main(*paths, "--out", str(out), "--pictures", str(folder / "pictures"))
  text = out.read_text()
  names = {"needle_aware", "score_by_bytes", "speed", "divergence", "visits"}
  names |= {"ruler_aware_1024", "ruler_aware_2048"}
  assert {path.stem for path in (folder / "pictures").iterdir()} == names
  assert text.count('src="data:image/png;base64,') == len(names)
  assert not re.search(r'(src|href)="(?!data:)|<script|@import|url\(', text)
  assert all(x in text for x in ("tiny &lt;1&gt;", "some GPU", "kvjax plot", "n: rows"))
  assert "7 pictures" in capsys.readouterr().out
  main(*paths, "--out", str(out))
  assert out.read_text() == text


def test_walks_that_are_too_short_are_left_out(folder):
  """ART at 512 tokens is not drawn, and the page says so; at 1,024 it is."""
  rows = [row("needle", "art", None, 0, 1.0, length) for length in (512, 1024)]
  with (folder / "run" / store.ROWS).open("a") as file:
    file.writelines(json.dumps(one) + "\n" for one in rows)
  found = plot.Results([folder / "run"])
  assert [r["length"] for r in found.rows if r["method"] == "art"] == [1024]
  text = plot.page(found, {}, "")
  assert "too short to end early: art at 512 tokens." in text
  assert "too short" not in plot.page(plot.Results([]), {}, "")


def test_needle_by_hand():
  """Depth 0 has rows 0 and 2, depth 1 has rows 1 and 3; only row 3 of x is right."""
  (figure,) = pictures.needle_maps(results()).values()
  grids = {axis.get_title(): axis.images[0] for axis in figure.axes if axis.images}
  full, random, x = grids
  assert full.startswith("full\n100% (") and random.startswith("random\nbudget 1/4\n0% (0% – ")
  assert x == "x\nbudget 1/4\n25% (7% – 59%)"  # Wilson: 2 of 8
  np.testing.assert_array_equal(grids[full].get_array(), np.ones((2, 2)))
  np.testing.assert_array_equal(grids[x].get_array(), [[0, 0], [0.5, 0.5]])
  assert all(image.get_clim() == (0, 1) for image in grids.values())


def test_score_by_bytes_by_hand():
  """The mean over both tasks, at the bytes of one row: x has (1/4 + 1/8)/2."""
  summaries = summary.summarise(results())
  figure = pictures.score_by_bytes(summaries, STYLES)
  first = figure.axes[0]
  assert first.get_title() == "1,024 tokens, aware\n2 tasks, n = 4 each"
  lines = {line.get_label(): line for line in first.lines}
  np.testing.assert_allclose(lines["x"].get_xydata(), [[0.256, 0.1875]], rtol=0.02)
  assert lines["x"].get_xdata() != lines["random"].get_xdata()  # of as many bytes: side by side
  np.testing.assert_allclose(lines["full"].get_xydata(), [[1.024, 0.75]])
  assert first.get_xscale() == "log"


def test_the_table_of_tasks_by_hand():
  tables = pictures.task_tables(summary.summarise(results()), plot.RULER)
  assert list(tables) == ["aware_1024", "aware_2048"]
  (axis, _) = tables["aware_1024"].axes
  assert [label.get_text() for label in axis.get_yticklabels()] == ["full", "random 256", "x 256"]
  np.testing.assert_allclose(axis.images[0].get_array(), [[1, 1], [0, 0], [0.25, 0.25]])
  texts = [text.get_text() for text in axis.texts]
  assert texts[0].startswith("50\n") and texts[-1].startswith("12\n")


def test_tasks_that_the_full_cache_does_not_solve_are_left_out(folder):
  """It has 1 on the needle and 1/2 on vt."""
  found = plot.Results([folder / "run"])
  kept, weak = plot.solved(summary.summarise(found.rows), 0.6)
  assert {s.task for s in kept} == {"needle", "kl"}
  assert weak == ["vt at 1,024 tokens, aware", "vt at 2,048 tokens, aware"]
  drawn = plot.draw(found, 0.6)
  assert "needle_aware" in drawn and not any(name.startswith("ruler") for name in drawn)
  text = plot.page(found, {}, "", 0.6)
  assert "below 60%: vt at 1,024 tokens, aware; vt at 2,048 tokens, aware." in text
  assert plot.solved(summary.summarise(found.rows), 0.5)[1] == []


def test_divergence_by_hand():
  figure = pictures.divergence(results(), STYLES)
  by_position, means = figure.axes[:2]
  lines = {line.get_label(): line.get_xydata() for line in by_position.lines}
  assert set(lines) == {"random", "x"}
  np.testing.assert_allclose(lines["x"][:, 0], np.arange(1024 - 32, 1024))
  np.testing.assert_allclose(lines["x"][:, 1], 0.25)
  assert {label.get_text() for label in means.get_yticklabels()} == {"random", "x"}
  np.testing.assert_allclose([float(box[0].get_xdata()[0]) for box in means.containers], 0.25)
  assert "smoothed over 16 tokens" in figure.get_suptitle()
  assert "logarithmic" in by_position.get_ylabel() and "logarithmic" in means.get_xlabel()


def test_speed_by_hand():
  """0.1 s a step of two rows are 20 tokens a second; a bench's 100 µs for two are 20,000."""
  summaries = summary.summarise(results())
  figure = pictures.speed(summaries, [BENCH], STYLES)
  drawn = {axis.get_title(): axis for axis in figure.axes}
  ours = drawn["tokens per second\nevaluate, batch 2"].lines
  assert {line.get_label() for line in ours} == {"full", "random", "x"}
  np.testing.assert_allclose([line.get_ydata() for line in ours], 20)
  (line,) = drawn["tokens per second\ntiny, batch 2"].lines
  np.testing.assert_allclose(line.get_xydata(), [[1024, 20_000], [4096, 20_000]])
  places = {float(line.get_xdata()[0]) for line in ours}
  assert len(places) == 3 and max(places) / min(places) < 1.12
  once = [s for s in summaries if s.length == 1024]
  assert pictures.speed(once, [], STYLES) is None


def test_speed_is_that_of_the_smallest_budget():
  """Whatever the order in which budgets were run."""
  rows = [row("vt", "x", n, 0, 1.0, length) for length in (1024, 2048) for n in (512, 256)]
  figure = pictures.speed(summary.summarise(rows), [], STYLES)
  np.testing.assert_allclose(figure.axes[2].lines[0].get_ydata(), 2 * 256e-6)  # GB, of two rows


def test_reports_by_hand():
  """Layers are rows; what is alike everywhere is a line of text, and only that is no picture."""
  figure = pictures.visits(TRACES)
  np.testing.assert_array_equal(figure.axes[0].images[0].get_array(), [[0.5] * 3, [0.25] * 3])
  assert figure.axes[0].get_title() == "x 256: visited"
  assert figure.get_supxlabel() == "the same everywhere: x 256: hits 1"
  alike = [{**TRACES[0], "reports": {"visited": [[0.5, 0.5]]}}]
  assert pictures.visits(alike) is None


def test_what_cannot_be_drawn_is_left_out(tmp_path):
  assert plot.draw(plot.Results([])) == {}
  with pytest.raises(FileNotFoundError, match="expected results of evaluate or bench"):
    plot.Results([tmp_path / "none"])
  (tmp_path / "rows.jsonl").touch()
  with pytest.raises(
    ValueError, match=r"rows\.jsonl: found another file, expected results of eval"
  ):
    plot.Results([tmp_path / "rows.jsonl"])
  (tmp_path / "x.json").write_text("[]")
  with pytest.raises(ValueError, match=r"x\.json: found a list, expected"):
    plot.Results([tmp_path / "x.json"])


@pytest.mark.parametrize("least", ["nan", "2", "-1"])
def test_a_least_score_is_a_share(folder, least):
  with pytest.raises(ValueError, match=f"--least: found {least}.*, expected a number from 0 to 1"):
    main(str(folder / "run"), "--least", least, "--out", str(folder / "x.html"))


def test_a_folder_is_not_counted_twice(folder):
  with pytest.raises(ValueError, match="of an earlier folder again"):
    plot.Results([folder / "run", folder / "run"])


def test_other_weights_under_one_name_are_not_drawn_together(tmp_path):
  for name in "ab":
    write(tmp_path / name, [], model="m", weights=name)
  with pytest.raises(ValueError, match="b: found weights = 'b' of m, and 'a' in a: expected the s"):
    plot.Results([tmp_path / "a", tmp_path / "b"])
  write(tmp_path / "b", [], model="n", weights="b")
  assert len(plot.Results([tmp_path / "a", tmp_path / "b"]).runs) == 2
  (tmp_path / "a/traces.json").write_text("[")
  with pytest.raises(ValueError, match=r"traces\.json: damaged"):
    plot.Results([tmp_path / "a"])


@pytest.mark.slow
def test_panels_are_as_wide_beside_a_long_legend_and_titles_apart():
  """Fifty methods of long names: no title reaches into the next."""
  rows = [row("vt", "full", None, i, 1.0, length) for length in (1024, 2048) for i in range(2)]
  for name in (f"a_method_with_a_long_name:setting={i}" for i in range(50)):
    rows += [row("vt", name, 64, i, 0.5, length) for length in (1024, 2048) for i in range(2)]
  styles = pictures.Styles(dict.fromkeys(each["method"] for each in rows))
  figure = pictures.score_by_bytes(summary.summarise(rows), styles)
  figure.draw_without_rendering()
  left, right = (axis.title.get_window_extent() for axis in figure.axes)
  assert left.x1 < right.x0
  assert all(axis.get_window_extent().width > 2.5 * figure.dpi for axis in figure.axes)


def test_one_budget_at_several_lengths_is_one_panel():
  """What was not run is said to be white."""
  rows = [row("needle", "full", None, 0, 1.0, length, about={"depth": 0}) for length in (512, 1024)]
  rows += [{**each, "method": "x", "budget": 64} for each in rows]
  rows.append(row("needle", "y", 64, 0, 1.0, 512, about={"depth": 0}))

  def drawn(rows):
    (figure,) = pictures.needle_maps(rows).values()
    titles = [axis.get_title().split("\n")[:2] for axis in figure.axes if axis.images]
    return titles, "white: not run" in figure.get_suptitle()

  titles, white = drawn(rows)
  assert titles[1:] == [["x", "budget 64"], ["y", "budget 64"]] and white
  assert not drawn(rows[:-1])[1]


def test_a_task_that_a_method_has_not_done_is_said_not_to_be_run():
  rows = [row(task, "full", None, 0, 1.0) for task in ("vt", "cwe")] + [row("vt", "x", 64, 0, 0.0)]
  (figure,) = pictures.task_tables(summary.summarise(rows), plot.RULER).values()
  texts = [text.get_text() for text in figure.axes[0].texts]
  assert texts.count("not run") == 1 and texts.count("0\n0–79") == 2


def test_the_report_has_a_table_for_each_measure():
  """KL and perplexity are no scores, and an empty cell says why."""
  also = {"kl": 0.5, "top1": 0.75, "nll": 2.0}
  rolled = {"log_likelihood": -8.0, "words": 2.0, "bytes": 8.0}
  rows = [row("kl", "x", 64, 0, 0.75, also=also, positions={"kl": [0.5]})]
  rows += [row("wikitext", "x", 64, 0, 0.3, also=rolled), row("vt", "x", 64, 0, 0.0)]
  found = plot.Results([])
  found.rows = rows
  text = plot.page(found, {}, "")
  heads = [re.findall(r"<th[^>]*>(.*?)</th>", line) for line in text.splitlines() if "<th" in line]
  assert [head[6] for head in heads] == ["score", "KL, nats", "word perplexity"]
  assert text.count("75.0%") == 1 and "30.0%" not in text
  assert "–: of full: the full cache has no such rows" in text and "<td></td>" not in text
  assert pictures.score_by_bytes(summary.summarise(rows[:2]), STYLES) is None
