"""Documents and result files agree; what is missing or was not steady is said."""

import json
import pathlib
import re

import numpy as np
import pytest

from kvjax import METHODS
from scripts import art_study, console, markers, tables
from scripts.tablemakers import (
  DOCUMENTS,
  Results,
  cells,
  cpe,
  evaluations,
  house,
  papers,
  real_stops,
  studies,
)
from scripts.tablemakers.results import FOLDER, GPU, Timing
from tests.scripts.test_art_study import recording

ROOT = pathlib.Path(tables.__file__).parents[1]
FIRST = "B8 T1024 32x1 1/8, random keys"
TYPED = "Typed from a run whose file was not kept"


@pytest.fixture
def folder(tmp_path):
  """A folder of results with one file, and how to change it."""
  path = tmp_path / "results" / GPU / "bench_cpe.json"
  path.parent.mkdir(parents=True)
  held = json.loads((FOLDER / GPU / path.name).read_text("utf-8"))

  def change(how):
    how(held["cases"])
    path.write_text(json.dumps(held), "utf-8")
    return Results(tmp_path / "results")

  return change


@pytest.mark.core(1)
@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_are_made_from_the_files(name):
  text = (ROOT / name).read_text("utf-8")
  assert tables.made(text, DOCUMENTS[name], Results()) == text


def test_every_table_of_results_has_a_source_or_says_that_it_has_none():
  for path in (ROOT / "scripts/results").glob("*.md"):
    text = markers.outside(path.read_text("utf-8"))
    for section in re.split(r"^## ", text, flags=re.MULTILINE):
      before, table, _ = section.partition("\n|")
      assert not table or TYPED in before or before == "Pages\n", section


def test_every_page_of_results_is_made():
  """A page without makers would keep markers that nothing fills."""
  pages = {f"scripts/results/{path.name}" for path in (ROOT / "scripts/results").glob("*.md")}
  assert pages == {name for name in DOCUMENTS if name.startswith("scripts/results/")}


def test_the_readme_has_no_typed_results():
  text = markers.outside((ROOT / "README.md").read_text("utf-8"))
  _, _, results = text.partition("## Results")
  assert "|" not in results.partition("## ")[0]


# ---- the program


@pytest.fixture
def copies(tmp_path):
  """The documents, one of them with a figure that no file has."""
  for name in DOCUMENTS:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text((ROOT / name).read_text("utf-8"), "utf-8")
  path = tmp_path / "scripts/results/README.md"
  before = path.read_text("utf-8")
  path.write_text(before.replace("**123.4 µs**", "**100.0 µs**"), "utf-8")
  assert path.read_text("utf-8") != before
  return path, before


@pytest.mark.slow
def test_check_shows_what_differs_and_writes_nothing(copies, capsys):
  path, _ = copies
  wrong = path.read_text("utf-8")
  with pytest.raises(SystemExit) as end:
    tables.main(tables.Args(check=True, documents=path.parents[2]))
  out = capsys.readouterr().out
  assert end.value.code == 1 and path.read_text("utf-8") == wrong
  assert re.search(r"^-.*100\.0 µs", out, re.M) and re.search(r"^\+.*123\.4 µs", out, re.M)


@pytest.mark.slow
def test_a_run_writes_what_differs_and_then_nothing(copies, capsys):
  path, before = copies
  tables.main(tables.Args(documents=path.parents[2]))
  assert path.read_text("utf-8") == before
  tables.main(tables.Args(check=True, documents=path.parents[2]))
  assert "all figures are those of the files" in capsys.readouterr().out


def test_markers_that_nothing_writes_between(tmp_path):
  for name in DOCUMENTS:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("<!-- nonesuch: begin -->\n<!-- nonesuch: end -->", "utf-8")
  with pytest.raises(ValueError, match=r"README.md: found markers \['nonesuch'\]"):
    tables.main(tables.Args(documents=tmp_path))


def test_all_that_is_missing_is_named(tmp_path):
  text = (ROOT / "scripts/results/README.md").read_text("utf-8").replace("<!-- steps: end -->", "")
  with pytest.raises(ValueError) as error:
    tables.made(text, DOCUMENTS["scripts/results/README.md"], Results(tmp_path))
  lines = str(error.value).splitlines()
  there = DOCUMENTS["scripts/results/README.md"]
  assert [line.partition(":")[0] for line in lines] == list(there)
  assert "found no bench_*.json" in lines[0]
  assert "bench_decode.json: found no such file" in lines[1]


# ---- markers


PART = "before\n<!-- a: begin -->\nold\n<!-- a: end -->\nafter\n"


def test_a_part_is_written_and_the_rest_stays():
  text = markers.filled(PART, "a", ["new", "lines"])
  assert text == "before\n<!-- a: begin -->\n\nnew\nlines\n\n<!-- a: end -->\nafter\n"
  assert markers.filled(text, "a", ["new", "lines"]) == text
  assert markers.names(text) == ["a"] and "new" not in markers.outside(text)


@pytest.mark.parametrize(
  "text", ["", PART.replace("end", "END"), PART + PART, "<!-- a: end -->\n<!-- a: begin -->\n"]
)
def test_markers_stand_once_and_in_order(text):
  with pytest.raises(ValueError, match="a: found no single pair of markers"):
    markers.filled(text, "a", [])


# ---- finding figures by name


def test_art_has_scores_only_where_it_can_stop():
  """25 rows of 3 KV heads fill an H200 with three splits: 2,048 tokens are too short."""
  rows = {row[0]: row[1:] for row in map(_row, evaluations.ruler(Results())[2:])}
  assert rows["`art:splits=fill`"][:2] == ["–", "–"] and float(rows["`art:splits=fill`"][2]) > 50
  assert "–" not in rows["`full`"] + rows["`ltri`, 256"]
  assert not any("`art:splits=fill`" in line for line in evaluations.needle(Results()))
  said = " ".join(evaluations.walked(Results()))
  assert "at 1,024 and 2,048 tokens" in said


def _row(line):
  return [cell.strip() for cell in line.strip("|").split("|")]


def test_other_cases_contenders_and_orders_change_nothing(folder):
  def more(found):
    for case in found:
      case["results"].insert(0, {**case["results"][0], "name": "another"})
      case["remarks"].insert(0, "another remark")
    found.append({**found[0], "case": "another"})
    found.reverse()

  assert cpe.table(folder(more)) == cpe.table(Results())


def without(found, name):
  found[0]["results"] = [row for row in found[0]["results"] if row["name"] != name]


@pytest.mark.parametrize(
  "how, said",
  [
    (
      lambda found: found.pop(0),
      r"found no case 'B8 T1024 32x1 1/8, random keys', expected it among",
    ),
    (
      lambda found: without(found, "kvjax"),
      r"B8 T1024 32x1 1/8, random keys: found no contender 'kvjax'",
    ),
    (lambda found: found[0]["results"][0].pop("us"), r"B8 T1024 .*found no time of 'kvjax'"),
    (lambda found: found[0]["remarks"].clear(), r"B8 T1024 .*found no remark like"),
  ],
)
def test_what_is_missing_is_named_with_its_file(folder, how, said):
  with pytest.raises(ValueError, match=rf"bench_cpe.json.*{said}"):
    cpe.table(folder(how))


# ---- beside the papers


def test_a_row_is_quoted_as_its_table_has_it():
  lines = cells.table(("order", "τ", "read", "stop", "read"), [("a", "1", "**2**", "3", "4")])
  found = papers.quoted(["before", *lines, "", "after"], "a", "1")
  assert found == {"order": "a", "τ": "1", "read": "2", "stop": "3"}
  with pytest.raises(ValueError, match=r"found no row 'a, 2', expected it among \['a, 1'\]"):
    papers.quoted(lines, "a", "2")
  with pytest.raises(ValueError, match="found no row 'a'"):
    papers.quoted([], "a")


@pytest.mark.parametrize("page", ["art", "prr", "prhs", "longflow", "ltri"])
def test_a_paper_page_begins_with_figures_that_have_a_place(page):
  """The paper's column names the table, figure or section of all that it has."""
  name = f"scripts/results/{page}.md"
  text = (ROOT / name).read_text("utf-8")
  assert markers.names(text)[0] == f"{page}-paper" == next(iter(DOCUMENTS[name]))
  head, _, *rows = map(_row, DOCUMENTS[name][f"{page}-paper"](Results()))
  assert head == list(papers.HEAD)
  assert all(re.search(r"Tab\.|Fig\.|§|abstract", row[1]) and all(row) for row in rows)


# ---- the rule of what is divided by


STEADY = Timing("Full", 20000, 19600, 20600)
WIDE = Timing("Full", 20000, 19700, 30200)


def test_what_is_not_steady_is_not_divided_by():
  assert cells.steady(STEADY) and not cells.steady(Timing("Full", 20000, 19599, 20600))
  assert cells.ratio(2.987, STEADY) == "2.99"
  assert cells.ratio(2.987, WIDE) == "– (Full: 19.70 to 30.20 ms)"


def test_a_table_leaves_such_a_ratio_out(folder):
  def shake(found):
    dense = next(row for row in found[0]["results"] if row["name"] == "dense decode")
    dense["us_quartiles"] = [40.0, 50.0]

  before, after = cpe.table(Results())[2], cpe.table(folder(shake))[2]
  assert "–" not in before
  assert "| – (dense decode: 40.0 to 50.0 µs) | – (dense decode: 40.0 to 50.0 µs) |" in after


def test_spans_name_what_they_leave_out():
  assert cells.span([(1.5, STEADY), (1.2, STEADY)]) == "1.20 to 1.50"
  assert cells.span([(1.2, STEADY)], unit=" ×") == "1.20 ×"
  assert cells.span([(-0.4, STEADY), (-0.05, STEADY)], "{:+.1f}") == "-0.4 to -0.1"
  left = cells.span([(1.5, STEADY), (9.0, WIDE)], unit=" ×")
  assert left == "1.50 × (1 of 2 left out: Full: 19.70 to 30.20 ms)"
  assert cells.span([(9.0, WIDE)]) == "– (Full: 19.70 to 30.20 ms)"
  assert "3 of 4 left out: their references" in cells.span([(9.0, WIDE)] * 3 + [(1.0, STEADY)])


def test_sums_are_as_steady_as_their_parts():
  """A wide part of a fiftieth does not make a sum wide."""
  large, small = Timing("Full", 20000, 19900, 20100), Timing("chain", 200, 100, 300)
  assert not cells.steady(small) and cells.steady(large.scaled(0.5).then(small))
  assert cells.steady(small.later(1e5))
  assert large.then(small) == Timing("Full + chain", 20200, 20000, 20400)


@pytest.mark.parametrize(
  "timing, text",
  [
    (Timing("", 15.62, 15.5, 15.8), "15.6 µs"),
    (Timing("", 15.62, 14, 17), "15.6 µs (14.0 to 17.0)"),
    (Timing("", 12158, 12150, 12170), "12.16 ms"),
    (Timing("", 1242599, 1242000, 1243000), "1,243 ms"),
  ],
)
def test_times_have_units_and_wide_ones_their_quartiles(timing, text):
  assert cells.time(timing) == text
  median, bracket, rest = text.partition(" (")
  assert cells.ours(timing) == f"**{median}**{bracket}{rest}"


def test_rows_have_the_cells_of_the_head():
  assert cells.table(("a", "b"), [("1", "2")]) == ["| a | b |", "|---|---|", "| 1 | 2 |"]
  with pytest.raises(ValueError, match="row: found 1 cells"):
    cells.table(("a", "b"), [("1",)])


# ---- the house


def test_imports_are_found_wherever_they_stand(tmp_path):
  path = tmp_path / "here.py"
  path.write_text(
    "import kvjax.memory\nfrom .. import types\nfrom ..ops import slots\nimport numpy\n"
    "def late():\n  from kvjax.methods.psaw import PSAW\n"
    "  importlib.import_module(f'kvjax.kernels.{name}')\n"
  )
  found = set(house.imports(path, "dispatch.here"))
  assert found == {"memory", "types", "ops.slots", "methods.psaw.PSAW", "kernels."}


def test_only_dispatch_opens_the_door_to_kernels_and_nobody_that_to_models():
  doors = house.doors()
  assert {here for here, there in doors if there == "kernels"} == {"dispatch"}
  assert not {here for here, there in doors if there == "models"}


def test_no_two_rooms_import_each_other():
  """But for what all of them share."""
  doors = {door for door in house.doors() if "shared" not in door}
  assert ("methods", "protocol") in doors
  assert not {(here, there) for here, there in doors if (there, here) in doors}


def test_moves_are_those_of_classes():
  assert house.own(METHODS["tova"]) == [*("traits", "leaves", "victim", "observe", "rank")]
  assert house.own(METHODS["snapkv"]) == ["score"]
  assert house.family(METHODS["snapkv"]) == "`PromptScored`"
  assert house.family(METHODS["longflow"]) == "`PromptScored`"


# ---- studies that come later


def test_studies_of_stops_are_those_of_the_lengths_that_there_are(tmp_path):
  rng = np.random.default_rng(0)
  folder = tmp_path / "art_study" / "qwen1.5b"
  folder.mkdir(parents=True)
  for order in art_study.ORDERS:
    found = art_study.study(recording(rng.normal(size=(64, 40))), 4, 6, order)
    text = json.dumps(art_study._plain(found))
    (folder / f"tile128_16384_{order}.json").write_text(text, "utf-8")
  held = Results(tmp_path)
  makers = real_stops.stops, real_stops.groups, real_stops.theory
  stops, groups, theory = (make(held) for make in makers)
  assert len(stops) == 2 + 4 and all("16,384 tokens, " in line for line in stops[2:])
  assert [line.split("|")[1].strip() for line in groups] == ["layer", "---", "3"]
  assert len(theory) - 2 == 2 * (len(stops) - 2)
  assert sum(" a group " in line for line in theory) == 4


def test_recall_has_its_column_of_chance_where_the_file_has_one(tmp_path):
  path = tmp_path / GPU / "real" / "stream" / "needles.txt"
  path.parent.mkdir(parents=True)
  assert studies.stream_needles(Results(tmp_path)) == []
  rows = [["infllm, injected", "3 / 4", "1.000", "–", "1.00 (0)"]]
  head = ("method", "right", "recall", "by chance", "best layer")
  path.write_text(console.table(head, rows), "utf-8")
  lines = studies.stream_needles(Results(tmp_path))
  assert "| needle recall | by chance |" in lines[0]
  assert lines[2] == "| `infllm`, injected | 3 / 4 | 1.000 | – | 1.00 (0) |"
  path.write_text(console.table(head[:3], [rows[0][:3]]), "utf-8")
  with pytest.raises(ValueError, match="expected method, right, needle recall, best layer"):
    studies.stream_needles(Results(tmp_path))
