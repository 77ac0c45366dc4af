"""Records of what a label's values were fitted on: those found by looking at a model."""

import pathlib

from kvjax.methods import labels
from kvjax.programs.evals.fitted import Fitted, of

OPTION = "--methods"  # what errors call a label
FIELDS = ("heads", "pattern")  # fields that are found by looking at a model
UNFITTED = (None, "alternate")  # values of theirs that are not


def fitted(label: str) -> tuple[Fitted, ...]:
  """Records of what a label's values were fitted on, out of files or as heads given by hand.

  Raises:
    ValueError: a file is not there, or its record is damaged.
  """
  found = []
  for part in labels.split(label):
    name, fields = labels.parts(part, OPTION)
    for field, text in fields.items():
      path = pathlib.Path(text)
      if path.suffix in labels.FILES:
        found.append(Fitted(f"{name}:{field}={text}", labels.read(of, path, OPTION)))
      elif field in FIELDS and labels.value_of(field, text, OPTION) not in UNFITTED:
        found.append(Fitted(f"{name}:{field}={text}", None))
  return tuple(found)
