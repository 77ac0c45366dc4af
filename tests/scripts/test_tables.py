"""Documents and result files agree; what is missing or was not steady is said."""

import dataclasses
import functools
import graphlib
import gzip
import importlib
import inspect
import json
import pathlib
import re

import numpy as np
import pytest

from kvjax import METHODS
from scripts.studies import art_study
from scripts.tools import markers, tables
from scripts.tools.tablemakers import (
  DOCUMENTS,
  Results,
  art,
  cells,
  house,
  ltri,
  quotes,
  reads,
  records,
  scores,
)
from scripts.tools.tablemakers.cells import say
from scripts.tools.tablemakers.records import Number, Record
from scripts.tools.tablemakers.results import FOLDER, GPU
from scripts.tools.tablemakers.timings import Ratio, Timing, gain, over
from tests.eval_data import recording

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
    makers = {x for x in public if public[x].__annotations__.get("return") is records.Part}
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
  wrong = before.replace("**123.4 µs**", "**100.0 µs**")
  path.write_text(wrong, "utf-8")
  with pytest.raises(SystemExit) as end:
    tables.main(tables.Args(check=True, documents=tmp_path))
  out = capsys.readouterr().out
  assert end.value.code == 1 and path.read_text("utf-8") == wrong != before
  assert re.search(r"^-.*100\.0 µs", out, re.M) and re.search(r"^\+.*123\.4 µs", out, re.M)
  tables.main(tables.Args(documents=tmp_path))
  assert path.read_text("utf-8") == before
  tables.main(tables.Args(check=True, documents=tmp_path))
  assert "all tables are those of the files" in capsys.readouterr().out


def test_markers_that_nothing_writes_between(tmp_path):
  for name in DOCUMENTS:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("<!-- nonesuch: begin -->\n<!-- nonesuch: end -->", "utf-8")
  with pytest.raises(ValueError, match=r"README.md: nonesuch: found no maker of this name"):
    tables.main(tables.Args(documents=tmp_path))


def test_all_that_is_missing_is_named(tmp_path):
  text = (ROOT / "scripts/results/README.md").read_text(
    "utf-8"
  ) + "<!-- x.y: begin -->\n<!-- x.y: end -->\n"
  with pytest.raises(ValueError) as error:
    tables.made(text, Results(tmp_path))
  lines = str(error.value).splitlines()
  wanted = markers.names(text)
  assert "x.y: found no maker of this name" in lines
  assert all(any(line.startswith(name) for line in lines) for name in wanted)
  assert any("bench_decode.json: found no such file" in line for line in lines)


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
  rows = {row[1]: row[2:] for row in map(_row, scores.smollm2(Results())[2:]) if row[0] == "–"}
  *short, longest = rows["`art:splits=fill`"]
  assert short == ["–"] * 4 and float(longest) > 50 and "–" not in rows["`full`"]


def _row(line):
  return [cell.strip() for cell in line.strip("|").split("|")]


def test_other_cases_contenders_and_orders_change_nothing(folder):
  def more(found):
    for case in found:
      case["results"].insert(0, {**case["results"][0], "name": "another"})
      case.setdefault("figures", {})["another"] = 1
    found.append({**found[0], "case": "another"})
    found.reverse()

  def named(results):
    return [line for line in reads.cpe(results) if "another" not in line]

  assert named(folder(more)) == reads.cpe(Results())


def without(found, name):
  found[0]["results"] = [row for row in found[0]["results"] if row["name"] != name]


@pytest.mark.parametrize(
  "how, said",
  [
    (lambda found: found.clear(), r"found no case like 'keys\$' among \[\]"),
    (
      lambda found: without(found, "kvjax"),
      r"B8 T1024 32x1 1/8, random keys: found no 'kvjax'",
    ),
    (lambda found: found[0]["results"][0].pop("us"), r"B8 T1024 .*found no 'us', expected"),
    (lambda found: found[0]["figures"].clear(), r"B8 T1024 .*found no 'tokens a head'"),
  ],
)
def test_what_is_missing_is_named_with_its_file(folder, how, said):
  with pytest.raises(ValueError, match=rf"bench_cpe.json.*{said}"):
    reads.cpe(folder(how))


# ---- beside the papers


@pytest.mark.parametrize("page", ["art", "prr", "prhs", "longflow", "ltri"])
def test_a_paper_page_begins_with_figures_that_have_a_place(page):
  """The paper's column names the table, figure or section of all that it has."""
  text = (ROOT / f"scripts/results/{page}.md").read_text("utf-8")
  table = text.partition(f"<!-- quotes.beside {page}: begin -->\n\n")[2].partition("\n\n")[0]
  head, _, *rows = map(_row, table.splitlines())
  assert head == ["", "where", "the paper", "here"]
  assert all(re.search(r"Tab\.|Fig\.|§|abstract", row[1]) and all(row) for row in rows)
  held = whole(FOLDER / "papers.json")["pages"][page]
  assert [row[:3] for row in rows] == [[x["what"], x["where"], x["figure"]] for x in held]


@pytest.fixture
def quoted(monkeypatch):
  """A table to quote, and how to."""
  one, two, wide = (Number(x, HERE) for x in (1.5, 0.25, 9.0))
  rows = [["B1", "a", say("**{:.2f} µs**", one)], ["B2", "b", two], ["B3", "b", None]]
  rows.append(["B4", "b", say("{:.2f}", Ratio(wide, WIDE))])
  part = cells.table(("", "", ("time", "{:.2f}")), rows, labels=2)
  monkeypatch.setattr(tables.tablemakers, "maker", lambda name: lambda results: part)
  return lambda row, column="time": quotes.filled(Results(), f"It is {{x.y :: {row} :: {column}}}.")


def test_quotations_are_cells_of_other_tables(quoted):
  """By the labels' end, or from the least to the largest of several rows, without what is wide."""
  assert quoted("B1, a") == quoted("a") == "It is 1.50 µs." and quoted("a").records == (HERE,)
  assert quoted("*") == "It is 0.25 to 1.50 µs (1 of 3 left out, not steady)."
  assert quoted("B[12]*, *") == "It is 0.25 to 1.50 µs."
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


HERE = Record("bench_x.json", ("cases", 0), "a card", 5)


def timing(us, low, high, name="Full", record=HERE):
  return Timing(name, Number(us, record), low, high)


STEADY, WIDE = timing(20000, 19600, 20600), timing(20000, 19700, 30200)


def ratio(value, reference=STEADY):
  return Ratio(Number(value, HERE), reference)


def test_what_is_not_steady_is_not_divided_by():
  assert STEADY.steady and not timing(20000, 19599, 20600).steady
  assert f"{ratio(2.987):.2f}" == "2.99"
  assert f"{ratio(2.987, WIDE):.2f}" == "– (Full: 19.70 to 30.20 ms)"


def test_a_table_leaves_such_a_ratio_out(folder):
  def shake(found):
    dense = next(row for row in found[0]["results"] if row["name"] == "dense decode")
    dense["us_quartiles"] = [40.0, 50.0]

  before, after = (reads.cpe(results)[3] for results in (Results(), folder(shake)))
  assert "–" not in before
  assert "| – (dense decode: 40.0 to 50.0 µs) | – (dense decode: 40.0 to 50.0 µs) |" in after


def test_sums_are_as_steady_as_their_parts():
  """A wide part of a fiftieth does not make a sum wide."""
  large, small = timing(20000, 19900, 20100), timing(200, 100, 300, "chain")
  assert not small.steady and (large * 0.5 + small).steady
  assert (small + 1e5).steady
  assert large + small == timing(20200, 20000, 20400, "Full + chain")


@pytest.mark.parametrize(
  "us, text",
  [
    ((15.62, 15.5, 15.8), "15.6 µs"),
    ((15.62, 14, 17), "15.6 µs (14.0 to 17.0)"),
    ((12158, 12150, 12170), "12.16 ms"),
    ((1242599, 1242000, 1243000), "1,243 ms"),
  ],
)
def test_times_have_units_and_wide_ones_their_quartiles(us, text):
  assert f"{timing(*us)}" == text
  median, bracket, rest = text.partition(" (")
  assert f"{timing(*us):**}" == f"**{median}**{bracket}{rest}"


def test_rows_have_the_cells_of_the_head():
  """Values are written in their column's form; what is not there is a dash."""
  head, rows = ("a", ("b", "{:.0%}"), "c"), [("1", Number(0.5, HERE), None)]
  assert cells.table(head, rows) == ["| a | b | c |", "|---|---|---|", "| 1 | 50 % | – |"]
  with pytest.raises(ValueError, match="row: found 1 cells"):
    cells.table(("a", "b"), [("1",)])


# ---- every figure has a source


def raw(record):
  """The value in the file at a record's place, read without the tables' own code."""
  path = FOLDER / record.file
  if record.place[0] == "line":
    return path.read_text("utf-8").splitlines()[record.place[1]]
  if isinstance(record.place[0], tuple):
    names, values = zip(*record.place, strict=True)
    return rows(path, names).get(values, [])
  return functools.reduce(lambda value, key: value[key], record.place, whole(path))


@functools.cache
def rows(path, names):
  """The rows of a file by some of their fields."""
  found = {}
  with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
    for row in map(json.loads, lines):
      row.pop("positions", None)
      found.setdefault(tuple(row[name] for name in names), []).append(row)
  return found


@functools.cache
def whole(path):
  return json.loads(path.read_text("utf-8"))


@functools.cache
def parts(name):
  """The figures of a document's parts, made once for all tests of them."""
  text, results = (ROOT / name).read_text("utf-8"), Results()
  return {part: tables.tablemakers.maker(part)(results).figures for part in markers.names(text)}


@pytest.mark.core(1)
@pytest.mark.parametrize("name", [name for name in DOCUMENTS if not name.startswith("kvjax/")])
def test_every_number_between_markers_leads_to_its_file(name):
  """A figure's place is in its file, which has as many samples, of the same prompts and card."""
  for part, made in parts(name).items():
    for figure in made:
      for record in figure.records:
        found = raw(record)
        assert found or found == 0, (part, figure, record)
        if record.samples and record.file.endswith(".gz"):
          prompts = {row["prompt"] for row in found}
          assert record.samples <= prompts and record.n == len(record.samples), (part, record)
        if record.place[0] == "cases":
          held = whole(FOLDER / record.file)
          assert record.card == held["device"]
          assert record.n == held["cases"][record.place[1]]["repetitions"]


@pytest.mark.core(1)
@pytest.mark.parametrize("name", [name for name in DOCUMENTS if not name.startswith("kvjax/")])
def test_times_and_scores_are_those_of_their_files(name):
  """Of figures with one record: the first number is the file's, or an even share of it."""
  for part, made in parts(name).items():
    for figure in made:
      if len(figure.records) != 1 or "×" in figure:
        continue
      (record,), said = figure.records, re.match(r"\*{0,2}([\d.,]+) (µs|ms)", figure)
      if said and record.place[-1] == "us":
        us = float(said[1].replace(",", "")) * (1 if said[2] == "µs" else 1e3)
        parts_of = max(1, round(raw(record) / us))  # of a chain of all-reduces, of some maps
        assert parts_of in (1, 32, 64) or us < 1, (part, figure)
        assert us == pytest.approx(raw(record) / parts_of, rel=0.04, abs=0.051), (part, figure)
      elif record.samples and re.fullmatch(r"\d+ \(\d+–\d+\)", figure):
        scores = [row["score"] for row in raw(record) if row["prompt"] in record.samples]
        assert int(figure.split()[0]) == round(100 * np.mean(scores)), (part, figure)


@pytest.mark.core(2)
@pytest.mark.parametrize("name", [name for name in DOCUMENTS if not name.startswith("kvjax/")])
def test_prose_quotes_no_figure(name):
  """Prose outside of markers has numbers in names, code and references alone."""
  text = markers.outside((ROOT / name).read_text("utf-8"))
  for line in re.sub(r"^    .*?$|^```.*?^```|<!--.*?-->", "", text, flags=re.M | re.S).splitlines():
    assert records.numbers(line) == [], line


def test_a_record_says_all_that_judges_a_figure():
  for name in ("file", "place", "card"):
    with pytest.raises(ValueError, match=f"found no {name} of a figure"):
      dataclasses.replace(HERE, **{name: ""})
  with pytest.raises(ValueError, match="found n = 0 of a figure"):
    dataclasses.replace(HERE, n=0)


def test_a_figure_without_a_source_cannot_be_written():
  with pytest.raises(ValueError, match="found a figure without a source"):
    say("{:.1f}", 0.5)
  with pytest.raises(ValueError, match=r"found \['1.5'\] without a source"):
    cells.table(("", "time"), [("B1 T4K", "1.5 µs")])
  with pytest.raises(ValueError, match=r"found \['7'\] without a source"):
    say("{} and {}", STEADY, "7")
  with pytest.raises(ValueError, match=r"found \['84'\] without a source"):
    say("It hits 84 % of {}.", STEADY)
  made = say("Llama-3.1-8B, `B8`, Tab. 4: {}.", STEADY)
  assert made == "Llama-3.1-8B, `B8`, Tab. 4: 20.00 ms." and made.records == (HERE,)


def test_numbers_keep_their_records():
  other = dataclasses.replace(HERE, place=("cases", 1))
  one, two = Number(3.0, HERE), Number(2.0, other)
  for made, value in (
    (one + two, 5),
    (one - two, 1),
    (1 - two / one, 1 / 3),
    (100 * one * two, 600),
  ):
    assert made == pytest.approx(value) and set(made.records) <= {HERE, other}
  assert (one / two).records == sum([one, two]).records == (HERE, other)
  assert (2 * one).records == (one - one).records == (HERE,)


def test_unlike_cards_are_not_compared():
  other = timing(10.0, 10, 10, record=dataclasses.replace(HERE, card="another card"))
  for compare in (over, gain):
    with pytest.raises(ValueError, match=r"cards: found \['a card', 'another card'\]"):
      compare(other, STEADY)
  assert over(timing(10.0, 10, 10), STEADY).value == 0.0005


def test_unlike_prompts_are_not_ranked():
  few, many = (dataclasses.replace(HERE, samples=frozenset(x)) for x in ("ab", "abc"))
  rows = [(Number(1.0, few), ["a"]), (Number(2.0, few), ["b"])]
  assert cells.ranked(rows) == [["b"], ["a"]]
  with pytest.raises(ValueError, match="samples: found unlike prompts"):
    cells.ranked([*rows, (Number(3.0, many), ["c"])])


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
    about = {"model": "tiny", "text": "drawn"}
    text = json.dumps({**art_study._plain(found), "about": about})
    (folder / f"tile128_16384_{order}.json").write_text(text, "utf-8")
  held = Results(tmp_path)
  stops, groups, theory = (
    make(held, "qwen1.5b/tile") for make in (art.stops, art.groups, art.theory)
  )
  assert len(stops) == 2 + 16 and all("16,384 tokens, " in line for line in stops[2:])
  assert [line.split("|")[1].strip() for line in groups] == ["layer", "---", "3"]
  assert len(theory) == 2 + 8 and sum(" a group " in line for line in theory) == 4


def test_needles_show_what_was_asked_and_withdraw_what_was_fitted_on_them(tmp_path):
  """Two of three samples are shared; heads of an unknown origin are not shown."""
  path = tmp_path / STREAM / ltri.FILE
  assert ltri.needles(Results(tmp_path), STREAM) == []
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
  infllm, spans, every = map(_row, ltri.needles(Results(tmp_path), STREAM)[2:])
  assert infllm == ["`infllm`", "2 of 3 (21–94 %)", "1 of 2 (9–91 %)", "0.750", "0.222", "1.00 (1)"]
  assert spans[:2] == ["`ltri`", "withdrawn"] and every[1:3] == ["2 of 2 (34–100 %)"] * 2
  held["about"]["fitted"] = ["other speeches"]
  path.write_text(json.dumps(held), "utf-8")
  assert _row(ltri.needles(Results(tmp_path), STREAM)[3])[1] == "1 of 1 (21–100 %)"


def test_no_test_module_imports_another():
  """Helpers hold what two of them need."""
  own = re.compile(
    r"^ *(?:from|import) tests\.(?:\w+\.)?(?:test_|\w+ import .*\btest_)", re.MULTILINE
  )
  assert own.search("  from tests.laws import test_laws") and own.search("import tests.laws.test_x")
  files = (ROOT / "tests").rglob("*.py")
  assert not [str(path) for path in files if own.search(path.read_text("utf-8"))]
