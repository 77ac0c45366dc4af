"""Make a report with pictures from results of evaluate, speed and bench.

    kvjax plot evaluation --out report.html
    kvjax plot run scripts/results/nvidia-h200/bench_*.json --out report.html --pictures pictures

Takes folders that `evaluate` wrote and JSON files that `bench` wrote. The report is one HTML file
that needs no other file. Pictures: needle by length and depth; score against measured bytes; score
against milliseconds per token, bytes kept and bytes read (if a folder has a speed.jsonl); speed and
memory against length; tasks with intervals relative to the full cache; divergence by position;
visited tokens by layer and step. Pictures without data are omitted.
"""

import base64
import dataclasses
import html
import io
import pathlib
import shlex
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import tyro
from matplotlib.figure import Figure

from kvjax.programs import bench_files, common
from kvjax.programs.evals import costs, needle, pictures, store, walks
from kvjax.programs.evals.standing import FULL, standings
from kvjax.programs.evals.summary import LEFT, Summary, blocks, notes, summarise

RULER = (*needle.SHAPES, "vt", "cwe", "fwe", "qa_1", "qa_2", "facts_1", "facts_2")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 78rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; }
h1, h2 { font-weight: 600; line-height: 1.2; }
h2 { margin-top: 2.5rem; }
img { max-width: 100%; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 2px 10px; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th { position: sticky; top: 0; background: #fff; }
.left { text-align: left; }
.scroll { overflow-x: auto; max-height: 40rem; overflow-y: auto; }
pre { background: #f5f5f5; padding: .7rem; overflow-x: auto; font-size: 13px; }
"""


@dataclasses.dataclass(frozen=True)
class Args:
  results: Annotated[tuple[pathlib.Path, ...], tyro.conf.Positional, common.optional("RESULTS ...")]
  """Folders of `evaluate` and files of `bench`."""
  out: Annotated[pathlib.Path, tyro.conf.arg(metavar="FILE")] = pathlib.Path("report.html")
  """The report."""
  pictures: Annotated[pathlib.Path | None, common.optional("FOLDER")] = None
  """Also write every picture there as PNG."""
  least: Annotated[float, tyro.conf.arg(metavar="SHARE")] = 0.0
  """Leave out of pictures of scores the tasks on which the full cache scores less, such as 0.5."""


class Results:
  """Content of the given paths.

  Attributes:
    runs: (name, settings) of every evaluation.
    rows: their rows; a run's rows follow those of the run before. Left out are those of methods
      whose walks are too short to end early.
    short: what these are called.
    costs: of steps, where an evaluation has its speed.jsonl.
    traces: what methods visited.
    benches: contents of bench files.

  Raises:
    FileNotFoundError, ValueError: a path is neither.
  """

  def __init__(self, paths: Iterable[pathlib.Path]):
    self.runs: list[tuple[str, dict[str, Any]]] = []
    self.rows: list[dict[str, Any]] = []
    self.short: list[str] = []
    self.costs: list[costs.Cost] = []
    self.traces: list[Any] = []
    self.benches: list[Any] = []
    for path in paths:
      if path.is_dir():
        self._add_run(path)
      elif path.suffix == ".json":
        self.benches.append(bench_files.read(path))
      else:
        expected = "expected results of evaluate or bench, a folder or a .json file"
        if path.exists():
          raise ValueError(f"{path}: found another file, {expected}")
        raise FileNotFoundError(f"{path}: not found, {expected}")

  def _add_run(self, path: pathlib.Path) -> None:
    rows = store.read(path)
    known = {store.key(row) for row in self.rows}
    twice = next((store.key(row) for row in rows if store.key(row) in known), None)
    if twice:
      raise ValueError(f"{path}: found row {twice} of an earlier folder again, expected other rows")
    settings = store.settings_of(path)
    for name, other in self.runs:
      one, before = settings.get("weights"), other.get("weights")
      same = settings.get("model") == other.get("model")
      if same and not store.may_be_same("weights", one, before):
        raise ValueError(
          f"{path}: found weights = {one!r} of {settings['model']}, and {before!r} in {name}: "
          "expected the same under one name"
        )
    for row in rows:
      if walks.too_short(row["method"], row["budget"], row["length"], settings):
        self.short.append(f"{row['method']} at {row['length']:,} tokens")
      else:
        self.rows.append(row)
    self.runs.append((path.name, settings))
    self.costs += costs.read(path)
    self.traces += store.traces(path)


def solved(summaries: Sequence[Summary], least: float) -> tuple[list[Summary], list[str]]:
  """The cells in which the full cache scores at least `least`, and what the others are called."""
  full = {(s.task, s.length, s.mode): s for s in summaries if s.method == FULL}
  weak = {place for place, s in full.items() if s.answered and s.score.mean < least}
  kept = [s for s in summaries if (s.task, s.length, s.mode) not in weak]
  return kept, [f"{task} at {length:,} tokens, {mode}" for task, length, mode in sorted(weak)]


def draw(results: Results, least: float = 0.0) -> dict[str, tuple[str, Figure]]:
  """Title and figure of every picture that there is data for, by file name.

  Scores are shown where the full cache has at least `least`; the needle's map shows them all.
  """
  summaries, _ = solved(summarise(results.rows), least)
  styles = pictures.Styles(row["method"] for row in results.rows)
  made: dict[str, tuple[str, Figure | None]] = {}
  for mode, figure in pictures.needle_maps(results.rows).items():
    made[f"needle_{mode}"] = f"Needle in a haystack, {mode}", figure
  boards = costs.boards(standings(results.rows, least), results.costs)
  for place, figure in pictures.score_by_cost(boards).items():
    mode, batch = place.split("_b")
    made[f"score_by_cost_{place}"] = f"Score against cost, {mode}, batch {batch}", figure
  aware = [board for board in boards if board.standings.mode == "aware"]
  if aware:
    made["first_page"] = "At like tokens attended to", pictures.first_page(aware[0])
  figure = pictures.score_by_bytes(summaries, styles)
  made["score_by_bytes"] = "Score against bytes", figure
  made["speed"] = "Speed and memory", pictures.speed(summaries, results.benches, styles)
  for place, figure in pictures.task_tables(summaries, RULER).items():
    made[f"ruler_{place}"] = "RULER, {}, {} tokens".format(*place.split("_")), figure
  made["divergence"] = "Divergence by position", pictures.divergence(results.rows, styles)
  made["visits"] = "What was visited", pictures.visits(results.traces)
  return {name: (title, figure) for name, (title, figure) in made.items() if figure is not None}


def page(
  results: Results, drawn: dict[str, tuple[str, bytes]], command: str, least: float = 0.0
) -> str:
  """The report as HTML, of titles and PNG files."""
  parts = ["<h1>KV-cache methods, evaluated</h1>"]
  for name, settings in results.runs:
    shown = ("model", "dtype", "device", "jax", "kvjax", "seed", "batch", "impl")
    facts = ", ".join(f"{key} {settings[key]}" for key in shown if key in settings)
    parts.append(f"<p><b>{html.escape(name)}</b>: {html.escape(facts)}</p>")
  for bench in results.benches:
    facts = ", ".join(f"{key} {value}" for key, value in bench.items() if isinstance(value, str))
    parts.append(f"<p><b>bench</b>: {html.escape(facts)}</p>")
  for title, picture in drawn.values():
    image = base64.b64encode(picture).decode()
    parts.append(f'<h2>{title}</h2>\n<img alt="{title}" src="data:image/png;base64,{image}">')
  _, weak = solved(summarise(results.rows), least)
  if weak:
    listed = html.escape("; ".join(weak))
    parts.append(f"<p>Left out, since the full cache scores below {least:.0%}: {listed}.</p>")
  if results.short:
    listed = html.escape("; ".join(dict.fromkeys(results.short)))
    parts.append(f"<p>Left out, since their walks are too short to end early: {listed}.</p>")
  if results.rows:
    summaries = summarise(results.rows)
    parts += ["<h2>All numbers</h2>", *(_table(*block) for block in blocks(summaries))]
    parts += [f"<p>{html.escape(note)}</p>" for note in notes(summaries)]
    parts.append("<p>Caches are bytes of their arrays per row; times are medians over batches.</p>")
  parts.append(f"<h2>Made with</h2>\n<pre>{html.escape(command)}</pre>")
  head = f'<meta charset="utf-8"><title>KV-cache methods</title><style>{_STYLE}</style>'
  return f"<!doctype html>\n<html lang=en><head>{head}</head><body>\n" + "\n".join(parts) + "\n"


def png(figure: Figure) -> bytes:
  """A figure as a PNG file, the same bytes every time."""
  out = io.BytesIO()
  figure.savefig(out, format="png", dpi=120, metadata={"Software": None})
  return out.getvalue()


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  lines = "".join(_line("td", cells) for cells in rows)
  return f'<div class="scroll"><table>{_line("th", head)}{lines}</table></div>'


def _line(tag: str, cells: Sequence[str]) -> str:
  made = (
    f"<{tag}{' class=left' if i in LEFT else ''}>{html.escape(cell)}</{tag}>"
    for i, cell in enumerate(cells)
  )
  return f"<tr>{''.join(made)}</tr>\n"


def main(args: Args) -> None:
  if not args.results:
    raise ValueError("RESULTS: found none, expected folders of `evaluate` or files of `bench`")
  if not 0 <= args.least <= 1:
    raise ValueError(f"--least: found {args.least}, expected a number from 0 to 1")
  results = Results(args.results)
  drawn = {
    name: (title, png(figure)) for name, (title, figure) in draw(results, args.least).items()
  }
  if not drawn:
    raise ValueError("results: found nothing to draw")
  words = ["kvjax", "plot", *map(str, args.results), "--out", str(args.out)]
  words += ["--least", f"{args.least:g}"] if args.least else []
  with common.written_aside(args.out) as path:
    path.write_text(page(results, drawn, shlex.join(words), args.least), "utf-8")
  print(f"{args.out}: {args.out.stat().st_size / 1e6:.1f} MB, {len(drawn)} pictures")
  if args.pictures:
    for name, (_, picture) in drawn.items():
      with common.written_aside(args.pictures / f"{name}.png") as path:
        path.write_bytes(picture)
      print(f"{args.pictures / name}.png")


if __name__ == "__main__":
  common.run(main, Args)
