"""Rules for what a class may define, and when an overridden move voids its declarations.

A kernel implements what a method declares about its moves, and nothing else.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from kvjax.families.method import Method

# The moves that each declaration describes.
DESCRIBED = {
  "entry": ("insert",),
  "placement": ("victim",),
  "attention": ("attend",),
  "_covers": ("span", "window", "victim", "insert", "rank", "keep", "_always"),
  "_spares": ("stage", "keep"),
  "_scored": ("score",),
  "_renewal": ("summarise",),
}
# Declarations of what operation of `kvjax.ops` a move is.
OPERATIONS = {"insert": "entry", "attend": "attention"}
# Names of before 0.3, and what says the same now.
MOVED = {
  **dict.fromkeys(("positional", "wants_logits", "ordered", "chunkable", "scans"), "traits"),
  **dict.fromkeys(("order_independent", "projects_all", "spreads", "by_layer"), "traits"),
  **dict.fromkeys(("pieces", "alike", "persistent_blocks"), "traits, whose stream says it"),
  **dict.fromkeys(("unit", "forced", "best", "dense_below", "positive"), "tiles"),
  **dict.fromkeys(("everything", "select"), "plan"),
  **dict.fromkeys(("tile_scores", "scores"), "score"),
  "read": "attend",
  "landing": "victim or insert",
  "apart": "active, which returns kvjax.Active",
  "enter": "fill or stage",
  "renew": "summarise",
  "foresee": "choose, which is asked without a similarity",
  **dict.fromkeys(
    ("form", "overrides", "knows", "dense_prefill"), "nothing: kvjax.families.forms says it"
  ),
  "init": "capacity and leaves, or init_caches",
  "room": "nothing: kvjax.families.entrance.room says it",
}
# Constructors from before 0.3, which are now next to the class (`kvjax.settings`).
SETTINGS = ("example", "usual", "neutral", "repo")


def overrides(method: Method, move: str, cls: type | None = None) -> bool:
  """True if a method's form of a move is not that of a class, by default the full cache."""
  return method._form(move) is not _static(cls or _full_cache(method), move)


def _full_cache(method: Method) -> type:
  """The class whose forms of the moves are the full cache's."""
  return next(cls for cls in reversed(type(method).__mro__) if "decode_step" in vars(cls))


def differs(method: Method, move: str) -> bool:
  """True if a method's form of a move does something else than the full cache's.

  One that is declared to be the same operation only does it in another way.
  """
  name = OPERATIONS.get(move)
  same = name is not None and getattr(method, name) == vars(_full_cache(method))[name]
  return overrides(method, move) and not same


@dataclasses.dataclass(frozen=True)
class Void:
  """A declaration that does not hold: it does not know the forms of these moves. It is false."""

  moves: tuple[str, ...]

  def __bool__(self) -> bool:
    return False


def void(cls: type) -> None:
  """Voids each declaration of which the class has another form of a move than who declared it.

  A class that declares anew, in the body that overrides the move, has said what it is. A span of
  one's own declares that it covers what the window does, whatever decides which tokens stay.
  """
  if "span" in vars(cls) and "_covers" not in vars(cls):
    cls._covers = True  # type: ignore[attr-defined]
  for name, moves in DESCRIBED.items():
    by = next((base for base in cls.__mro__ if name in vars(base)), cls)
    others = {x for x in moves if _static(cls, x) is not _static(by, x)}
    if others:
      before = vars(by)[name]
      others |= {*before.moves} if isinstance(before, Void) else set()
      setattr(cls, name, Void(tuple(x for x in moves if x in others)))


def _static(cls: type, move: str) -> Any:
  return inspect.getattr_static(cls, move, None)


def dense_prefill(method: Method) -> bool:
  """True if a prompt is computed as under the full cache, so that one pass can serve many."""
  moves = "window", "active", "fill", "stage", "attend_prompt", "prefill"
  return not any(overrides(method, move) for move in moves)


def check_moves(cls: type, moves: Sequence[str]) -> None:
  """Raises TypeError for public names that are no fields, and no moves of the class's bases."""
  known = {name for base in cls.__bases__ for name in dir(base) if not name.startswith("_")}
  for name, value in vars(cls).items():
    if name in known:
      _check_form(cls, name, value)
    if isinstance(value, classmethod) and name in SETTINGS:
      raise TypeError(
        f"{cls.__name__}.{name}: found a constructor in the class, expected "
        f"kvjax.settings.register({cls.__name__}, {name}=...) beside it (MOVING.md)"
      )
    public = not name.startswith("_") and name not in (*known, *moves)
    # Fields are values, and class methods are constructors.
    if public and name not in inspect.get_annotations(cls) and not isinstance(value, classmethod):
      if name in MOVED:
        raise TypeError(
          f"{cls.__name__}.{name}: found a move of before 0.3, expected {MOVED[name]} (MOVING.md)"
        )
      close = difflib.get_close_matches(name, known, 1)
      raise TypeError(
        f"{cls.__name__}.{name}: found a public name that is no move"
        f"{f' (is {close[0]} meant?)' if close else ''}, expected a move of "
        f"{', '.join(base.__name__ for base in cls.__bases__)}, or a name beginning with _"
      )
  if missing := [name for name in moves if name not in vars(cls)]:
    raise TypeError(f"{cls.__name__}: found no {', '.join(missing)}, which its moves name")


def _check_form(cls: type, name: str, value: Any) -> None:
  """Raises TypeError for a move that does not take what the move of that name is given."""
  known = next((getattr(base, name) for base in cls.__bases__ if hasattr(base, name)), None)
  if not (inspect.isfunction(value) and inspect.isfunction(known)):
    return
  given = [p for p in inspect.signature(known).parameters.values() if p.kind != p.VAR_KEYWORD]
  try:
    inspect.signature(value).bind(*(p.name for p in given))
  except TypeError as error:
    raise TypeError(
      f"{cls.__name__}.{name}: found parameters {inspect.signature(value)} ({error}), expected "
      f"those of {name}({', '.join(p.name for p in given)})"
    ) from None
