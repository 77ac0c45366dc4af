"""Moves and their forms: what a class may define, and which form of a move a method has.

A kernel stands for one form of a move and no other.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
  from kvjax.families.method import Method

Form = TypeVar("Form", bound=Callable)

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
# Constructors of before 0.3, which are beside the class now (`kvjax.settings`).
SETTINGS = ("example", "usual", "neutral", "repo")


def form(method: Method, move: str) -> Any:
  """The form of a move, as its class wrote it."""
  return method._form(move)


def overrides(method: Method, move: str) -> bool:
  """Whether a method has its own form of a move."""
  return method._form(move) is not vars(_full_cache(method))[move]


def _full_cache(method: Method) -> type:
  """The class whose forms of the moves are the full cache's."""
  return next(cls for cls in reversed(type(method).__mro__) if "decode_step" in vars(cls))


def known_as(name: str) -> Callable[[Form], Form]:
  """Marks a form of a move that an operation of this name does too (`kvjax.ops`)."""

  def marked(form: Form) -> Form:
    vars(form)["known_as"] = name, form  # what is wrapped around it has the mark, and is another
    return form

  return marked


def operation(method: Method, move: str) -> str | None:
  """The operation that does what a method's form of a move does; None: there is none."""
  here = form(method, move)
  name, marked = getattr(here, "known_as", (None, None))
  return name if marked is here else None


def differs(method: Method, move: str) -> bool:
  """Whether a method's form of a move does something else than the full cache's.

  One that the same operation stands for only does it in another way.
  """
  usual = getattr(vars(_full_cache(method))[move], "known_as", None)
  own = operation(method, move)
  return overrides(method, move) and (own is None or usual is None or own != usual[0])


def knows(method: Method, move: str, other: str) -> bool:
  """Whether the class whose form of `move` this is knew the form of `other`, or is its class."""

  def said(name: str) -> int:
    return max((i for i, cls in enumerate(method._lineage()) if name in vars(cls)), default=-1)

  return said(move) >= said(other)


def dense_prefill(method: Method) -> bool:
  """Whether a prompt is computed as under the full cache, so that one pass can serve many."""
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
