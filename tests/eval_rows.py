"""Rows of results, made up: what `kvjax evaluate` would have written."""

import json

from kvjax.programs.evals import store


def row(task, method, budget, index, score, length=1024, mode="aware", **more):
  """One row, whose steps took 0.1 s for two rows."""
  named = {"task": task, "length": length, "mode": mode, "method": method, "budget": budget}
  seconds = {"decode": 0.4, "steps": 4, "prefill": 1.0, "rows": 2, "cold": []}
  sizes = {"cache_bytes": 1000 * (budget or length), "host_bytes": 0, "seconds": seconds}
  return {**named, "index": index, "score": score, "also": {}, "about": {}, **sizes, **more}


def write(folder, rows, **settings):
  """A folder of them."""
  folder.mkdir(parents=True, exist_ok=True)
  (folder / store.SETTINGS).write_text(json.dumps(settings))
  (folder / store.ROWS).write_text("".join(json.dumps(each) + "\n" for each in rows))
  return folder
