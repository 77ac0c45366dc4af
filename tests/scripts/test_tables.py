"""Documents and result files agree; what is missing or was not steady is said."""

import graphlib
import importlib
import inspect
import json
import pathlib
import re

import numpy as np
import pytest

from kvjax import METHODS
from kvjax.programs.evals import store
from scripts.tools import house, markers, tables
from scripts.tools.tablemakers import (
  FOLDER,
  GPU,
  H100,
  Part,
  Ratio,
  Results,
  Timing,
  cells,
  ltri,
  over,
  quotes,
  reads,
  scores,
)
from scripts.tools.tables import DOCUMENTS

ROOT = pathlib.Path(tables.__file__).parents[2]
FIRST = "B8 T1024 32x1 1/8, random keys"
STREAM = f"{GPU}/real/stream"
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
  assert tables.made(text, Results()) == text


def test_every_table_of_results_has_a_source_or_says_that_it_has_none():
  """Tables that are typed say in words what libraries do, or lists pages."""
  for path in (ROOT / "scripts/results").glob("*.md"):
    text = markers.outside(path.read_text("utf-8"))
    for section in re.split(r"^## ", text, flags=re.MULTILINE):
      before, _, table = section.partition("\n|")
      assert not table or TYPED in before or re.match("Pages|Capabilities", before), section


def test_every_maker_is_named_by_a_document():
  texts = [(ROOT / name).read_text("utf-8") for name in DOCUMENTS]
  named = {name.split(" ")[0] for text in texts for name in markers.names(text)}
  named -= tables.FROM_TESTS
  for module in sorted({name.partition(".")[0] for name in named}):
    found = vars(importlib.import_module(f"{tables.tablemakers.__name__}.{module}"))
    public = {name: x for name, x in found.items() if inspect.isfunction(x) and name[0] != "_"}
    makers = {x for x in public if public[x].__annotations__.get("return") is Part}
    assert {f"{module}.{x}" for x in makers} == {x for x in named if x.startswith(f"{module}.")}


def test_every_page_of_results_is_made():
  """A page without makers would keep markers that nothing fills."""
  pages = {f"scripts/results/{path.name}" for path in (ROOT / "scripts/results").glob("*.md")}
  assert pages == {name for name in DOCUMENTS if name.startswith("scripts/results/")}


def test_the_readme_has_no_typed_results():
  text = markers.outside((ROOT / "README.md").read_text("utf-8"))
  _, _, results = text.partition("## Results")
  assert "|" not in results.partition("## ")[0]


# ---- the program


@pytest.mark.slow
def test_check_shows_what_differs_and_a_run_writes_it(tmp_path, capsys):
  """Of the documents one has a figure that no file has."""
  for name in DOCUMENTS:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text((ROOT / name).read_text("utf-8"), "utf-8")
  path = tmp_path / "scripts/results/README.md"
  before = path.read_text("utf-8")
  (figure,) = re.findall(r"^\| B1 T128K 8x4 \| \*\*(.*?)\*\*", before, re.M)[:1]
  wrong = before.replace(f"**{figure}**", "**1.0 µs**", 1)
  path.write_text(wrong, "utf-8")
  with pytest.raises(SystemExit) as end:
    tables.main(tables.Args(check=True, documents=tmp_path))
  out = capsys.readouterr().out
  assert end.value.code == 1 and path.read_text("utf-8") == wrong != before
  assert re.search(r"^-.*\*1\.0 µs", out, re.M) and re.search(rf"^\+.*{figure}", out, re.M)
  tables.main(tables.Args(documents=tmp_path))
  assert path.read_text("utf-8") == before
  tables.main(tables.Args(check=True, documents=tmp_path))
  assert "all tables are those of the files" in capsys.readouterr().out


def test_all_that_is_missing_is_named(tmp_path):
  text = (ROOT / "scripts/results/README.md").read_text("utf-8")
  text += "<!-- x.y: begin -->\n<!-- x.y: end -->\n"
  with pytest.raises(ValueError) as error:
    tables.made(text, Results(tmp_path))
  lines = str(error.value).splitlines()
  wanted = markers.names(text)
  assert "x.y: found no maker of this name" in lines
  assert all(any(line.startswith(name) for line in lines) for name in wanted)
  assert any("No such file" in line and "bench_decode.json" in line for line in lines)


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
  rows = markers.dashed(scores.smollm2(Results())).set_index(["budget", "method"]).loc["–"]
  *short, longest = rows.loc["`art:splits=fill`"]
  assert short == ["–"] * 4 and float(longest) > 50 and "–" not in list(rows.loc["`full`"])


def _row(line):
  return [cell.strip() for cell in line.strip("|").split("|")]


def test_other_cases_contenders_and_orders_change_nothing(folder):
  def more(found):
    for case in found:
      case["results"].insert(0, {**case["results"][0], "name": "another"})
      case.setdefault("figures", {})["another"] = 1
    found.append({**found[0], "case": "another"})
    found.reverse()

  found = markers.markdown(reads.cpe(folder(more)))
  assert [line for line in found if "another" not in line] == markers.markdown(reads.cpe(Results()))


def without(found, name):
  found[0]["results"] = [row for row in found[0]["results"] if row["name"] != name]


@pytest.mark.parametrize(
  "how, said",
  [
    (lambda found: found.clear(), r"found no case like 'keys\$' among \[\]"),
    (lambda found: without(found, "kvjax"), r"B8 T1024 32x1 1/8, random keys: found no 'kvjax'"),
    (lambda found: found[0]["results"][0].pop("us"), r"B8 T1024 .*found no 'kvjax'"),
    (lambda found: found[0]["results"][0].pop("us_quartiles"), "found no 'us_quartiles'"),
    (lambda found: found[0]["figures"].clear(), r"B8 T1024 .*found no 'tokens a head'"),
  ],
)
def test_what_is_missing_is_named_with_its_file(folder, how, said):
  with pytest.raises(ValueError, match=rf"bench_cpe.json.*{said}"):
    reads.cpe(folder(how))


def test_damaged_files_are_named(tmp_path):
  (tmp_path / "papers.json").write_text("{", "utf-8")
  with pytest.raises(ValueError, match=r"papers\.json: found no JSON"):
    quotes.beside(Results(tmp_path), "art")
  found = {"task": "kl", "length": 8, "method": "full", "budget": None, "mode": "aware", "also": {}}
  score = {"n": 1, "mean": 1.0, "low": 1.0, "high": 1.0, "interval": "Wilson"}
  path, text = tmp_path / "a" / "summary.json", "<!-- {0}: begin -->\n<!-- {0}: end -->\n"
  path.parent.mkdir()
  for lacks, row in (("score", found), ("share", found | {"score": score})):
    path.write_text(json.dumps([row]), "utf-8")
    with pytest.raises(ValueError, match=f"studies.codes a: .*found no '{lacks}'"):
      tables.made(text.format("studies.codes a"), Results(tmp_path))


# ---- beside the papers


@pytest.mark.parametrize("page", ["art", "prr", "prhs", "longflow", "ltri"])
def test_a_paper_page_begins_with_figures_that_have_a_place(page):
  """The paper's column names the table, figure or section of all that it has."""
  text = (ROOT / f"scripts/results/{page}.md").read_text("utf-8")
  table = text.partition(f"<!-- quotes.beside {page}: begin -->\n\n")[2].partition("\n\n")[0]
  head, _, *rows = map(_row, table.splitlines())
  assert head == ["", "where", "the paper", "here"]
  assert all(re.search(r"Tab\.|Fig\.|§|abstract", row[1]) and all(row) for row in rows)
  held = Results().json("papers.json")["pages"][page]
  assert [row[:3] for row in rows] == [[x["what"], x["where"], x["figure"]] for x in held]


@pytest.fixture
def quoted(monkeypatch):
  """A table to quote, and how to."""
  rows = [("B1", "a", 1.5, STEADY), ("B2", "b", 0.25, STEADY), ("B3", "b", None, None)]
  rows = [dict(zip("abxy", row, strict=True)) for row in (*rows, ("B4", "b", 9.0, WIDE))]
  show = lambda row: row["x"] and Ratio(row["x"], f"**{row['x']:.2f} µs**", row["y"])  # noqa: E731
  part = cells.table(rows, ["a", "b"], ("time", show))
  monkeypatch.setattr(tables.tablemakers, "maker", lambda name: lambda results: part)
  return lambda row, column="time": quotes.filled(Results(), f"It is {{x.y :: {row} :: {column}}}.")


def test_quotations_are_cells_of_other_tables(quoted):
  """By the labels' end, or from the least to the largest of several rows, without what is wide."""
  assert quoted("B1, a") == quoted("a") == "It is 1.50 µs."
  assert quoted("*") == "It is 0.25 µs to 1.50 µs (1 of 3 left out, not steady)."
  assert quoted("B[12]*, *") == "It is 0.25 µs to 1.50 µs."
  assert quotes.filled(Results(), "not measured yet") == "not measured yet"


@pytest.mark.parametrize(
  "reference, said",
  [
    (("b",), "x.y: found 3 rows like 'b', expected one"),
    (("B5",), "x.y: found 0 rows like 'B5', expected one"),
    (("a", "nonesuch"), r"x.y: found no column 'nonesuch' among \['time'\]"),
  ],
)
def test_quotations_of_what_is_not_there_are_named(quoted, reference, said):
  with pytest.raises(ValueError, match=said):
    quoted(*reference)


# ---- the rule of what is divided by


def timing(us, low, high, name="Full", card="a card"):
  return Timing(name, us, low, high, card)


STEADY, WIDE = timing(20000, 19600, 20600), timing(20000, 19700, 30200)


def test_what_is_not_steady_is_not_divided_by():
  assert STEADY.steady and not timing(20000, 19599, 20600).steady
  assert f"{over(timing(59740, 1, 1), STEADY)}" == "2.99"
  assert f"{over(timing(59740, 1, 1), WIDE)}" == "– (Full: 19.70 to 30.20 ms)"


def test_a_table_leaves_such_a_ratio_out(folder):
  def shake(found):
    dense = next(row for row in found[0]["results"] if row["name"] == "dense decode")
    dense["us_quartiles"] = [40.0, 50.0]

  before, after = (reads.cpe(results).loc[FIRST].map(str) for results in (Results(), folder(shake)))
  wide = before.index[before != after]
  assert list(wide) == ["dense", "times as fast", "of the limit by bytes"]
  assert list(after[wide[1:]]) == ["– (dense decode: 40.0 to 50.0 µs)"] * 2


def test_sums_are_as_steady_as_their_parts():
  """A wide part of a fiftieth does not make a sum wide."""
  large, small = timing(20000, 19900, 20100), timing(200, 100, 300, "chain")
  assert not small.steady and (large * 0.5 + small).steady
  assert large + small == timing(20200, 20000, 20400, "Full + chain")


def test_unlike_cards_are_not_compared():
  other = timing(10.0, 10, 10, card="another card")
  for power in (1, -1):
    with pytest.raises(ValueError, match=r"cards: found 'another card' and 'a card'"):
      over(other, STEADY, power=power)
  assert over(timing(10.0, 10, 10), STEADY).value == 0.0005


# ---- figures are those of the files, read without the tables' own code


def _made(part):
  """Cells of a part's rows in the documents, by the first label."""
  texts = ((ROOT / name).read_text("utf-8") for name in DOCUMENTS)
  (text,) = (text for text in texts if f"<!-- {part}: begin -->" in text)
  lines = text.partition(f"<!-- {part}: begin -->")[2].partition("<!--")[0].strip().splitlines()
  return {row[0]: row[1:] for row in map(_row, lines[2:])}


MADE_OF = {
  f"{GPU}/bench_art": ["art.endless", "art.stopping", "art.shared"],
  f"{GPU}/bench_cpe": ["reads.cpe", "reads.cpe_alone"],
  f"{GPU}/bench_decode": ["speed.decode"],
  f"{GPU}/bench_e2e": ["speed.steps e2e"],
  f"{GPU}/bench_e2e_qwen3": ["speed.steps e2e_qwen3"],
  f"{GPU}/bench_e2e_sparse": ["reads.steps e2e_sparse", "prr.steps"],
  f"{GPU}/bench_forked": ["reads.steps forked"],
  f"{GPU}/bench_generate": ["speed.generate"],
  f"{GPU}/bench_longflow": ["reads.longflow"],
  f"{GPU}/bench_per_head": ["reads.per_head"],
  f"{GPU}/bench_prefill": ["speed.windows"],
  f"{GPU}/bench_prr": ["prr.layer", "prr.calibration"],
  f"{GPU}/bench_quantised": ["reads.codes", "reads.steps quantised"],
  f"{GPU}/bench_scale": ["speed.gpus", "speed.gpus_70b"],
  f"{GPU}/bench_select": ["reads.scores"],
  f"{GPU}/bench_sparse": ["reads.sparse"],
  f"{H100}/bench_batcher": ["speed.batcher"],
  f"{H100}/bench_gate": ["speed.rows gate"],
  f"{H100}/bench_live": ["speed.rows live"],
  f"{H100}/bench_prr": [f"prr.layer {H100}"],
  f"{H100}/bench_select": [f"reads.scores {H100}"],
}


@pytest.mark.parametrize("file", MADE_OF)
def test_times_are_those_of_their_files(file):
  """Every time of a case is one that its file has, PRR's two halves, or one of 64 all-reduces."""
  held = json.loads((FOLDER / f"{file}.json").read_text("utf-8"))
  found = {case["case"]: case for case in held["cases"]}
  for case, made in (row for part in MADE_OF[file] for row in _made(part).items()):
    raw = {row["name"]: row["us"] for row in found[case]["results"]}
    times = [*raw.values(), raw.get("speculate", 0) + raw.get("score", 0)]
    times += [us / 64 for name, us in raw.items() if "64 all-reduces" in name]
    times += [us for name, us in found[case].get("figures", {}).items() if name.endswith("µs")]
    said = [re.match(r"\*{0,2}([\d.,]+) (µs|ms)", cell) for cell in made]
    assert any(said)
    for time in filter(None, said):
      us = float(time[1].replace(",", "")) * (1 if time[2] == "µs" else 1e3)
      assert min(abs(us - raw) for raw in times) <= max(0.051, 0.005 * us), (case, time[0])


@pytest.mark.parametrize("task", ["kvzip_8K needle", "published lost_in_the_middle_75"])
def test_scores_are_those_of_their_rows(task):
  """All methods have answered the same prompts."""
  folder, name = task.split()
  rows = [row for row in store.read(FOLDER / GPU / folder) if row["task"] == name]
  for method, (n, right, *_) in _made(f"scores.task {GPU}/{task}").items():
    who = re.fullmatch(r"`(.*)`(?:, ([\d,]+))?", method).groups()
    budget = who[1] and int(who[1].replace(",", ""))
    scores = [x["score"] for x in rows if (x["method"], x["budget"]) == (who[0], budget)]
    assert len(scores) == int(n) and right.startswith(f"{100 * np.mean(scores):.1f} (")


# A number by itself: not in a name (B8, T32K, Qwen2.5, 8B), nor quoted as code.
NUMBER = re.compile(r"(?<![\w.,‑-])[+−-]?\d[\d.,]*(?![\d.]*[BK]\b)")
QUOTED = re.compile(
  r"`[^`]*`|\]\([^)]*\)|§[\d.]+|"
  r"\b(?:Tab|Fig|Eq|App|Lemma|Theorem|Assumption)\w*\.? \w+(?: and \d\w*)?"
)


@pytest.mark.core(2)
@pytest.mark.parametrize("name", [name for name in DOCUMENTS if not name.startswith("kvjax/")])
def test_prose_quotes_no_figure(name):
  """Prose outside of markers has numbers in names, code and references alone."""
  text = markers.outside((ROOT / name).read_text("utf-8"))
  for line in re.sub(r"^    .*?$|^```.*?^```|<!--.*?-->", "", text, flags=re.M | re.S).splitlines():
    assert not NUMBER.findall(QUOTED.sub(" ", line)), line


# ---- the house


def test_imports_are_found_wherever_they_stand():
  source = (
    "import kvjax.a.b\nfrom kvjax.a import c\nfrom kvjax.d import f\nimport numpy\n"
    "def late():\n  from kvjax.e import F\n"
    "  importlib.import_module('kvjax.kernels.g')\n"
    "if TYPE_CHECKING:\n  from kvjax.h import H\n"
  )
  known = {f"kvjax.{name}" for name in ("a.b", "a.c", "d", "e", "kernels.g", "h", "a")}
  assert house.imports(source, known) == known - {"kvjax.h", "kvjax.a"}


def test_folders_import_those_below_them_and_none_above():
  order = list(house.ROOMS)
  doors = house.doors()
  assert {room for door in doors for room in door} == set(order)
  assert not {(a, b) for a, b in doors if order.index(a) > order.index(b)}


def test_no_module_imports_itself_by_way_of_others():
  graph = house.imported()
  assert len(graph) > 200
  graphlib.TopologicalSorter(graph).prepare()  # raises an error that names a circle


def test_the_root_has_few_files_and_core_no_paper():
  assert len(list(house.CODE.glob("*.py"))) <= 6
  core = [path.stem for path in (house.CODE / "core").glob("*.py")]
  assert len(core) <= 10 and not set(core) & set(METHODS)
  inside = {name for name in house.modules() if name.startswith("kvjax.") and "._" not in name}
  assert {name for name in inside if not house.room_of(name)} <= {"kvjax.models"}


def test_a_wheel_needs_nothing_of_a_checkout():
  """What kvjax imports begins with kvjax, or is of somebody else."""
  own = re.compile(r"^ *(?:from|import) (?:scripts|tests|models|pallas_kernels)\b", re.MULTILINE)
  assert not [name for name, path in house.modules().items() if own.search(path.read_text("utf-8"))]


# ---- studies that come later


def test_needles_show_what_was_asked_and_withdraw_what_was_fitted_on_them(tmp_path):
  """Two of three samples are shared; heads of an unknown origin are not shown."""
  path = tmp_path / STREAM / "needles.json"
  with pytest.raises(FileNotFoundError, match=r"needles\.json"):
    ltri.needles(Results(tmp_path), STREAM)
  path.parent.mkdir(parents=True)
  methods = dict.fromkeys(("full", "infllm", "ltri", "ltri, all heads"), "its settings")
  about = {"methods": methods, "length": 1024, "init": 8, "window": 100, "block": 100}
  said = lambda right: {"right": right, "recall": [[0.5, 1.0]]}  # noqa: E731
  answers = {
    "infllm": {"0": said(True), "1": said(False), "2": said(True)},
    "ltri": {"0": said(True)},
    "ltri, all heads": {"0": said(True), "1": said(True)},
  }
  held = {"about": {**about, "retrieved": 2}, "answers": answers}
  path.write_text(json.dumps(held), "utf-8")
  lines = markers.markdown(ltri.needles(Results(tmp_path), STREAM))
  infllm, spans, every = map(_row, lines[2:])
  right = "2 of 3 (21–94 %)", "1 of 2 (9–91 %)"
  assert infllm == ["`infllm`", *right, "0.750", "0.222", "0, 0, 1", "1.00 (1)"]
  assert spans[:2] == ["`ltri`", "withdrawn"] and every[1:3] == ["2 of 2 (34–100 %)"] * 2
  held["about"]["fitted"] = ["other speeches"]
  path.write_text(json.dumps(held), "utf-8")
  again = ltri.needles(Results(tmp_path), STREAM)
  assert again.loc["`ltri`", "right of answered"] == "1 of 1 (21–100 %)"


def test_no_test_module_imports_another():
  """Helpers hold what two of them need."""
  own = re.compile(
    r"^ *(?:from|import) tests\.(?:\w+\.)?(?:test_|\w+ import .*\btest_)", re.MULTILINE
  )
  assert own.search("  from tests.laws import test_laws") and own.search("import tests.laws.test_x")
  files = (ROOT / "tests").rglob("*.py")
  assert not [str(path) for path in files if own.search(path.read_text("utf-8"))]
