"""Places where a program can be wrong: what stands there, and a wrong text for it.

Found by Python's own parser, so that the same file always has the same sites, and changed in the
text, so that all else of the file stays as it is. What changes no result is left out: annotations,
docstrings and messages, defaults of fields and arguments, and in kernels what only decides how
fast they are (`TUNING`).
"""

import ast
import dataclasses
import hashlib
import itertools
import pathlib
from collections.abc import Iterator, Sequence

COMPARISONS: dict[type, str] = {
  ast.Lt: "<=",
  ast.LtE: "<",
  ast.Gt: ">=",
  ast.GtE: ">",
  ast.Eq: "!=",
  ast.NotEq: "==",
}
EXTREMES = {"min": "max", "minimum": "maximum"}
EXTREMES |= {b: a for a, b in EXTREMES.items()}
TINY = 1e-9  # smaller constants only keep a division from dividing by zero
# What spans, counts and positions are called: one more is off by one.
ENDS = {"start", "stop", "first", "last", "seen", "used", "count", "newest", "valid"}
# Names of functions and arguments that decide how work is cut, not what comes of it.
TUNING = {
  *("blocking", "whole_blocking", "fitted", "choose_cut", "choose_splits", "settings", "pick"),
  *("cut", "cuts", "cut_rows", "share", "is_whole", "warps_of", "most_pieces", "warps", "stages"),
  *("example", "usual", "precision", "evict"),
}


@dataclasses.dataclass(frozen=True)
class Site:
  """One place: the text at `start` … `stop` (line and column, from 1 and 0) and the wrong one.

  `kind` is sign, comparison, off by one, mask, constant or extreme; `within` the line that it
  begins in.
  """

  path: str
  line: int
  column: int
  kind: str
  start: int
  stop: int
  wrong: str
  within: str

  @property
  def name(self) -> str:
    """Its place, for people."""
    return f"{self.path}:{self.line}:{self.column} {self.kind}"

  def applied(self, text: str) -> str:
    """The file's text with the wrong piece."""
    data = text.encode()
    return (data[: self.start] + self.wrong.encode() + data[self.stop :]).decode()


def find(root: pathlib.Path, path: str) -> list[Site]:
  """All sites of a file, in the order of its text."""
  text = (root / path).read_text()
  return sorted(set(_File(path, text).sites(ast.parse(text))), key=_place)


def _place(site: Site) -> tuple:
  return site.path, site.start, site.stop, site.kind


def draw(sites: Sequence[Site], seed: int) -> list[Site]:
  """All sites in an order by the seed, in which folders take turns and, within one, kinds do.

  The first n of them are the draw of n: a longer one goes on where a shorter one ended. What is
  drawn of a file that stays as it is does not depend on other files, nor on where its lines stand.
  """

  def drawn(site: Site) -> str:
    said = f"{seed} {site.path} {site.kind} {site.column} {site.within} {site.wrong}"
    return hashlib.sha256(said.encode()).hexdigest()

  shuffled = sorted(sorted(sites, key=_place), key=drawn)

  def in_turns(sites: list[Site], keys: Sequence) -> list[Site]:
    if not keys:
      return sites
    groups: dict[str, list[Site]] = {}
    for site in sites:
      groups.setdefault(keys[0](site), []).append(site)
    turns = [in_turns(groups[name], keys[1:]) for name in sorted(groups)]
    rounds = itertools.zip_longest(*turns)
    return [site for row in rounds for site in row if site is not None]

  folder = lambda site: str(pathlib.PurePath(site.path).parent)  # noqa: E731
  return in_turns(shuffled, (folder, lambda site: site.kind))


class _File:
  """The sites of one file."""

  def __init__(self, path: str, text: str):
    self.path = path
    self.data, self.lines = text.encode(), text.splitlines()
    lengths = [len(line) for line in self.data.splitlines(keepends=True)]
    self.starts = [0, *itertools.accumulate(lengths)]

  def sites(self, node: ast.AST) -> Iterator[Site]:
    """Those of a node and of what it holds."""
    yield from self.here(node)
    for child in _computed(node):
      yield from self.sites(child)

  def here(self, node: ast.AST) -> Iterator[Site]:
    match node:
      case ast.BinOp(op=ast.Add() | ast.Sub()) if not _is_text(node):
        yield self.site(node, "sign", self.operator(node, "-+"[isinstance(node.op, ast.Sub)]))
        yield from self.one_more(node.left, node.right)
      case ast.BinOp(op=ast.BitAnd()):
        yield self.site(node, "mask", f"({self.text(node.left)})")
      case ast.UnaryOp(op=ast.USub()):
        yield self.site(node, "sign", f"({self.text(node.operand)})")
      case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
        yield self.site(node, "comparison", self.operator(node, COMPARISONS[type(op)]))
        yield from self.one_more(node.left, *node.comparators)
      case ast.Slice():
        yield from self.one_more(*(x for x in (node.lower, node.upper) if x))
      case ast.Call():
        yield from self.call(node)
      case ast.Constant(value=float()) if node.value == 0 or abs(node.value) > TINY:
        yield self.site(node, "constant", "1.0" if node.value == 0 else f"({2 * node.value!r})")

  def call(self, node: ast.Call) -> Iterator[Site]:
    """A selection without its mask, and the other extreme."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else None
    name = node.func.id if isinstance(node.func, ast.Name) else name
    if name == "where" and len(node.args) == 3:
      yield self.site(node, "mask", f"({self.text(node.args[1])})")
    if name in EXTREMES:
      stop = self.at(node.func.end_lineno, node.func.end_col_offset)
      start = stop - len(name)
      yield self.of(node, "extreme", start, stop, EXTREMES[name])

  def one_more(self, *operands: ast.expr) -> Iterator[Site]:
    """Whole numbers, and ends of spans, one too large."""
    for x in operands:
      name = x.attr if isinstance(x, ast.Attribute) else x.id if isinstance(x, ast.Name) else ""
      if isinstance(x, ast.Constant) and type(x.value) is int:
        yield self.site(x, "off by one", str(x.value + 1))
      elif name in ENDS:
        yield self.site(x, "off by one", f"({self.text(x)} + 1)")

  # ---- text

  def at(self, line: int | None, column: int | None) -> int:
    assert line is not None and column is not None
    return self.starts[line - 1] + column

  def span(self, node: ast.expr) -> tuple[int, int]:
    """First byte of a node and the one after its last."""
    return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

  def text(self, node: ast.expr) -> str:
    start, stop = self.span(node)
    return self.data[start:stop].decode()

  def operator(self, node: ast.BinOp | ast.Compare, other: str) -> str:
    """The text of two operands with another operator between them."""
    right = node.right if isinstance(node, ast.BinOp) else node.comparators[0]
    start, stop = self.span(node)
    low, high = self.span(node.left)[1], self.span(right)[0]
    between = self.data[low:high].decode()
    signs = "+-" if isinstance(node, ast.BinOp) else "<>=!"
    first = next(i for i, x in enumerate(between) if x in signs)
    rest = between[first:].lstrip(signs)
    made = between[:first] + other + rest
    return self.data[start:low].decode() + made + self.data[high:stop].decode()

  def site(self, node: ast.expr, kind: str, wrong: str) -> Site:
    return self.of(node, kind, *self.span(node), wrong)

  def of(self, node: ast.expr, kind: str, start: int, stop: int, wrong: str) -> Site:
    within = self.lines[node.lineno - 1].strip()
    return Site(self.path, node.lineno, node.col_offset, kind, start, stop, wrong, within)


def _computed(node: ast.AST) -> Iterator[ast.AST]:
  """Parts of a node that are computed, and matter."""
  match node:
    case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
      return
    case ast.FunctionDef():
      if node.name not in TUNING:
        yield from node.body
    case ast.ClassDef():
      yield from (x for x in node.body if isinstance(x, ast.FunctionDef))
    case ast.Module():
      yield from (x for x in node.body if isinstance(x, (ast.FunctionDef, ast.ClassDef)))
    case ast.AnnAssign():
      yield from filter(None, [node.value])
    case ast.keyword(arg=str(name)) if name in TUNING:
      return
    case ast.If() if all(isinstance(x, ast.Raise) for x in node.body):
      yield node.test
    case ast.Lambda():
      yield node.body
    case _:
      yield from ast.iter_child_nodes(node)


def _is_text(node: ast.BinOp) -> bool:
  """True if a sum joins texts, tuples or lists, of which there is no difference."""
  parts = [x for x in ast.walk(node) if isinstance(x, ast.BinOp)]
  literal = (ast.JoinedStr, ast.Tuple, ast.List, ast.ListComp)
  sides = [side for x in parts for side in (x.left, x.right)]
  return any(
    isinstance(x, literal) or (isinstance(x, ast.Constant) and isinstance(x.value, str))
    for x in sides
  )
