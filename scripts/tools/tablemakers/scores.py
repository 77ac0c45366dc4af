"""Scores without costs: methods on a task, quality per byte, and SmolLM2."""

from collections.abc import Iterable, Sequence

from kvjax.programs.evals import walks
from kvjax.programs.evals.standing import FULL, Standing
from scripts.tools.tablemakers import GPU, Number, Part, Results, Row, cells, real
from scripts.tools.tablemakers.cells import say
from scripts.tools.tablemakers.scored import called, summary, views


def task(results: Results, where: str) -> Part:
  """Methods on a folder's task, full first, then by budget and score."""
  folder, _, name = where.partition(" ")
  sizes = cache_bytes(row for row in results.rows(folder) if row["task"] == name)
  view, *_ = views(results, folder, lambda row: row["task"] == name) or [None]
  if view is None:
    return Part()

  def row(one: Standing) -> Row:
    size = Number(sizes[one.method, one.budget] / 1e6, *view.records(one, name))
    found = {"method, budget": called(one), "n": view.n(one, name)}
    found |= {"right, %": view.score(one, name, ".1f"), "less full": view.gap(one)}
    return found | {"MB kept a row": say("{:.1f}", size)}

  rows = [row(view.whole.full)]
  for budget in sorted({one.budget for one in view.whole.by.values() if one.budget}):
    rows += view.ranked((x for x in view.whole.by.values() if x.budget == budget), row)
  return cells.framed(rows)


def cache_bytes(rows: Iterable[Row]) -> dict[tuple[str, int | None], float]:
  """Bytes of a row's cache by method and budget, the mean."""
  sizes: dict[tuple[str, int | None], list[int]] = {}
  for row in rows:
    sizes.setdefault((row["method"], row["budget"]), []).append(row["cache_bytes"])
  return {who: sum(found) / len(found) for who, found in sizes.items()}


# ---- quality per byte: what cuts, what rounds, and both, beside each other

TASKS = ("needle", "niah_multikey_1", "niah_multivalue")
LENGTH = 8192
# Shares of the full cache's bytes, each with what is nearest to it.
SHARES = {
  "a half": (0.4, 0.6),
  "a quarter": (0.2, 0.4),
  "an eighth": (0.1, 0.2),
  "a sixteenth": (0.0, 0.1),
}
BEST = 3  # of each share, the best by score; others of it are in the summary


def per_byte(results: Results) -> Part:
  """The full cache, then of each share of its bytes the methods that find most."""
  (view,) = views(results, real.FOLDER, _counts)
  sizes = cache_bytes(filter(_counts, results.rows(real.FOLDER)))
  shares = {who: size / sizes[FULL, None] for who, size in sizes.items()}

  def row(one: Standing, label: str) -> Row:
    share = Number(shares[one.method, one.budget], *view.records(one, *TASKS))
    return {"share": label, **view.shown(one, TASKS), "cache": say("{:.0%}", share)}

  full, *others = view.whole.by.values()
  rows = [row(full, "all")]
  for label, (low, high) in SHARES.items():
    inside = (one for one in others if low <= shares[one.method, one.budget] < high)
    rows += view.ranked(inside, lambda one, label=label: row(one, label))[:BEST]
  return cells.framed(rows, labels=2)


def _counts(row: Row) -> bool:
  """True of the rows that are compared."""
  asked = row["task"] in (*TASKS, "kl") and not row["method"].startswith(real.WITHDRAWN)
  return asked and (row["length"], row["mode"]) == (LENGTH, "aware")


# ---- SmolLM2: one needle, divergence, RULER

SUMMARY, SETTINGS = (f"{GPU}/evaluation/{name}.json" for name in ("summary", "settings"))
LENGTHS = (1024, 2048, 4096)
# In these the full cache reaches half at 1K and 2K.
RULER = ("single_1", "single_2", "single_3", "multikey_1", "multivalue", "multiquery")


def smollm2(results: Results) -> Part:
  """A needle and divergence at 2K, and percent, the mean of RULER's tasks, by length.

  Walks that are too short to end early at a length have no figure there.
  """
  settings, ruler = results.json(SETTINGS), [f"niah_{name}" for name in RULER]
  held = summary(results, SUMMARY, settings["device"])

  def mean(tasks: Sequence[str], length: int, who: tuple[str, int | None]) -> Number | None:
    found = [held.get((task, length, *who)) for task in tasks]
    if None in found or walks.too_short(*who, length, settings):
      return None
    return 100 * sum(cell["score"]["mean"] for cell in found) / len(found)

  rows = []
  for who in dict.fromkeys(cell[2:] for cell in held if not cell[2].startswith("ltri")):
    kl = None if walks.too_short(*who, 2048, settings) else held.get(("kl", 2048, *who))
    needle = mean(("needle",), 2048, who)
    row = [needle, kl and kl["also"]["kl"]["mean"], *(mean(ruler, n, who) for n in LENGTHS)]
    rows.append((who[1] or 0, -(needle or 0), [str(who[1] or "–"), f"`{who[0]}`", *row]))
  head = ["budget", "method", ("needle", "{:.0f}"), ("KL, nats", "{:.4f}")]
  head += [(f"RULER at {n >> 10}K", "{:.1f}") for n in LENGTHS]
  rows.sort(key=lambda row: row[:2])
  return cells.table(head, (row for *_, row in rows), labels=2)
