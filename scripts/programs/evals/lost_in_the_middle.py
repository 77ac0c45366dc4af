"""Lost in the Middle's key-value retrieval from local files: a key at a chosen place among many.

Liu et al., 2023, §3; data and prompt of github.com/nelson-liu/lost-in-the-middle (MIT licence). As
there, the asked pair is moved to a place and the others keep their order.
"""

import functools

from kvjax.programs.evals import haystack, local, scores
from kvjax.programs.evals.task import Count, Row, Task, check_length, rng

KEYS = (75, 140, 300)
PLACES = 5  # evenly spaced, the first and the last pair among them
MAX_NEW_TOKENS = 100
_BEFORE = "Extract the value corresponding to the specified key in the JSON object below."


def _build(
  count: Count, *, keys: int, length: int, seed: int, index: int, second: bool = False
) -> Row:
  """Row `index` is entry index // 5 in the seed's order, each at five places in a random order."""
  task = _name(keys)
  source = "github.com/nelson-liu/lost-in-the-middle (kv_retrieval_data)"
  file = local.path(_file(keys), f"Lost in the Middle, {keys} keys", source)
  entry = local.pick(local.read(file), task, seed, index // PLACES)
  pairs = [tuple(pair) for pair in entry["ordered_kv_records"]]
  asked = [(entry["key"], entry["value"])]
  others = [pair for pair in pairs if pair not in asked]
  places = [i * (len(pairs) - 1) // (PLACES - 1) for i in range(PLACES)]
  order = haystack.spread(places, rng(f"{task} places", seed, index // PLACES))
  place = order[index % PLACES]
  placed = [*others[:place], *asked, *others[place:]]
  if second:  # two places further on, in a circle
    place = places[(places.index(place) + 2) % PLACES]
    asked.append(placed[place])
  lines = ",\n ".join(f'"{key}": "{value}"' for key, value in placed)  # as it was published
  context = f"{_BEFORE}\n\nJSON data:\n{{{lines}}}\n"
  rows = [
    Row("", f'\nKey: "{key}"\nCorresponding value:', "", (value,), task, MAX_NEW_TOKENS)
    for key, value in asked
  ]
  used = count(context, *(text for row in rows for text in (row.question, "")))
  check_length(length, used + len(rows) * MAX_NEW_TOKENS)
  about = {"place": place, "depth": place / (len(pairs) - 1)}
  first, later = rows[0], rows[1] if second else None
  return Row(context, first.question, "", first.answers, task, MAX_NEW_TOKENS, "", about, {}, later)


def _name(keys: int) -> str:
  return f"lost_in_the_middle_{keys}"


def _file(keys: int) -> str:
  return f"lost_in_the_middle/kv-retrieval-{keys}_keys.jsonl.gz"


TASKS = tuple(
  Task(
    _name(keys),
    "lost_in_the_middle",
    f"one of {keys} published pairs of UUIDs, at {PLACES} places in turn (local file)",
    functools.partial(_build, keys=keys),
    scores.all_found,
    filled=False,
    needs=(_file(keys),),
    second=functools.partial(_build, keys=keys, second=True),
  )
  for keys in KEYS
)
