"""List the methods, or explain one and its settings.

    kvjax methods
    kvjax methods snapkv
    kvjax methods mine:Class

Commands accept these names with settings, snapkv:window_size=16, and compositions,
quantised:bits=4+snapkv.
"""

import dataclasses
import inspect
from typing import Annotated

import tyro

import kvjax
from kvjax.methods import labels
from kvjax.programs import common, console

_NONE = "…, which has to be given"


@dataclasses.dataclass(frozen=True)
class Args:
  name: Annotated[str | None, tyro.conf.Positional, common.optional("NAME")] = None
  """A registered method, or module:Class, also with settings; by default all are listed."""


def main(args: Args) -> None:
  print(listing() if args.name is None else explained(args.name))


def listing() -> str:
  """Every method with the first line of its docstring."""
  rows = [(name, inspect.getdoc(cls).split("\n")[0]) for name, cls in kvjax.METHODS.items()]
  return console.table(("method", ""), rows, left=(0, 1))


def explained(name: str) -> str:
  """A method's docstring, its settings with their defaults, and how to ask for it."""
  outer, *inner = labels.split(name)
  alone, given = labels.parts(outer, "NAME")
  cls = kvjax.find_method(alone, "NAME")
  settings = {field.name: _default(field) for field in dataclasses.fields(cls) if field.init}
  own = [f"{k}={v}" for k, v in settings.items() if k not in ("base", "budget") and v != _NONE]
  asked = name if name != alone else ":".join([name, *own[:1]])
  if name != alone:
    labels.instance(name, common.Decoding.budget, "NAME")  # refuses what is no setting
    settings |= given | ({"base": "+".join(inner)} if inner else {})
  lines = ["settings:", *(f"  {key} = {value}" for key, value in settings.items())]
  told = [inspect.getdoc(cls) or name, "", *lines, "", f"kvjax evaluate --methods {asked}"]
  return "\n".join(told)


def _default(field: dataclasses.Field) -> str:
  if field.default is not dataclasses.MISSING:
    return repr(field.default)
  if field.default_factory is not dataclasses.MISSING:
    return repr(field.default_factory())
  return _NONE


if __name__ == "__main__":
  common.run(main, Args)
