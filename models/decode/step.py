"""Steps of the decode loop: as they are compiled, and as a device is called for them.

A token is chosen and predicts the next. A call is dispatched while the device runs earlier ones,
and its launches are queued, so that the device does not wait while the host reads tokens.

Before each call the host tells the device's graph where its buffers are, launch by launch, while
the device waits. A loop on the device spares that, but where it may end early it has a predicate,
for which the host waits at every step. Methods that stream, of some 20 arrays a layer, take less
time so: theirs is a loop, of as many steps as nobody looks at one by one. Others take a step a
call; of a quick model, where nobody looks, a few, whose number the graph knows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from kvjax.families.method import Method
from kvjax.models.decode import background, by_layer, checks
from kvjax.models.decode.by_layer import ByLayer
from kvjax.models.decode.rows import put
from kvjax.models.decode.sampling import COLDEST, Knobs, draw
from kvjax.models.nn import flat
from kvjax.models.nn.transformer import Caches, Transformer
from kvjax.ops import offload

SOME = 64  # steps of a call, at most, under methods that stream
FEW = 4  # of a call of a quick model, under others
QUICK = 8e9  # bytes of weights of one, at most: its steps may be shorter than the host's part
UNSOUND = -2  # in the place of a token after which the row's logits are not finite


class Always(NamedTuple):
  """Inputs of every step: stop tokens [E] of all rows or [B, E], the rows' numbers [B], how to draw
  (scalars, or [B]), the seed.
  """

  stop: Any
  rows: Any
  knobs: Knobs
  seed: Any


def ends(stop: Sequence[int]) -> np.ndarray:
  """Stop tokens int32 [E], filled up with −1, which no token is: few sizes, few compilations."""
  ends = sorted(set(stop))
  size = 8 * max(1, -(-len(ends) // 8))
  return np.array(ends + [-1] * (size - len(ends)), np.int32)


def decode(
  form: flat.Form,
  method: Method,
  greedy: bool,
  keep_logprobs: bool,
  leaves: list[Array],
  caches: Caches,
  logits: Float[Array, "B V"],
  live: Bool[Array, " B"],
  want: Int[Array, " B"],
  always: Always,
) -> Any:
  """One token per row: caches, logits [B, V], live rows [B], tokens int32 [B], and their
  log-probabilities [B] or None.
  """
  model = flat.join(form, leaves)
  token = _chosen(greedy, logits, caches[0].seen, want, always)
  new, caches = model.decode(token, caches, method, live)
  return offload.settled(caches), *_taken(keep_logprobs, logits, live, token, want, new, always)


def decode_some(
  form: flat.Form,
  method: Method,
  greedy: bool,
  keep_logprobs: bool,
  leaves: list[Array],
  caches: Caches,
  logits: Float[Array, "B V"],
  live: Bool[Array, " B"],
  want: Int[Array, "N B"],
  always: Always,
  count: Int[Array, ""],
) -> Any:
  """The first `count` of N times `decode`, in a loop on the device.

  Under methods that stream it ends where no row is live, for which the host waits at every step.
  Under others it takes N steps, after the first `count` of them without a row, and nobody waits.

  Returns:
    As `decode`, with tokens [N, B] and log-probabilities [N, B]; where no step was, −1 and any
    number.
  """
  model = flat.join(form, leaves)
  tokens = jnp.full_like(want, -1)
  logprobs = jnp.zeros(want.shape, jnp.float32) if keep_logprobs else None
  streams = method.traits.stream is not None

  def goes_on(held: Any) -> Array:
    i, _, _, live, *_ = held
    return (i < count) & live.any()

  def step(held: Any) -> Any:
    i, caches, logits, live, tokens, logprobs = held
    token = _chosen(greedy, logits, caches[0].seen, want[i], always)
    here = live if streams else live & (i < count)
    new, caches = model.decode(token, caches, method, here)
    taken = _taken(keep_logprobs, logits, here, token, want[i], new, always)
    logits, after, token, logprob = taken
    live = after if streams else jnp.where(i < count, after, live)
    tokens = tokens.at[i].set(token)
    logprobs = None if logprobs is None else logprobs.at[i].set(logprob)
    return i + 1, offload.loose(caches), logits, live, tokens, logprobs

  held = jnp.int32(0), offload.loose(caches), logits, live, tokens, logprobs
  if streams:
    _, caches, *made = jax.lax.while_loop(goes_on, step, held)
  else:
    _, caches, *made = jax.lax.fori_loop(0, len(want), lambda _, held: step(held), held)
  return offload.settled(caches), *made


def decode_checked(
  form: flat.Form, method: Method, greedy: bool, keep_logprobs: bool, *given: Any
) -> Any:
  """`decode` of a model that checks for NaN, behind an error (checkify)."""
  run = functools.partial(decode, form, method, greedy, keep_logprobs)
  return checkify.checkify(run)(*given)


def decode_by_layer(
  model: ByLayer,
  method: Method,
  greedy: bool,
  keep_logprobs: bool,
  caches: Caches,
  logits: Array,
  live: Array,
  want: Array,
  always: Always,
) -> Any:
  """`decode` from programs of a layer."""
  token = _choose(greedy, logits, caches[0].seen, want, always)
  new, caches = model.decode(token, caches, method, live)
  return caches, *_take(keep_logprobs, logits, live, token, want, new, always)


def _chosen(
  greedy: bool,
  logits: Float[Array, "B V"],
  seen: Int[Array, " B"],
  want: Int[Array, " B"],
  always: Always,
) -> Int[Array, " B"]:
  """The token that goes in: the wanted one, or where that is negative, the model's."""
  token = jnp.argmax(logits, -1).astype(jnp.int32)
  if not greedy:
    drawn = draw(logits, always.knobs, always.seed, always.rows, seen)
    token = jnp.where(always.knobs[0] > COLDEST, drawn, token)
  return jnp.where(want >= 0, want, token)


def _taken(
  keep_logprobs: bool,
  logits: Float[Array, "B V"],
  live: Bool[Array, " B"],
  token: Int[Array, " B"],
  want: Int[Array, " B"],
  new: Float[Array, "B V"],
  always: Always,
) -> tuple[Array, Array, Array, Array | None]:
  """Logits, live rows, tokens and log-probabilities, once a token is in and gave `new` logits."""
  logprobs = None
  if keep_logprobs:
    chosen = jnp.take_along_axis(logits, token[:, None], 1)[:, 0]
    logprobs = chosen - jax.nn.logsumexp(logits, -1)
  after = live & ((want >= 0) | ~(token[:, None] == always.stop).any(-1))
  shown = jnp.where(checks.sound(new), token, UNSOUND)
  return jnp.where(live[:, None], new, logits), after, jnp.where(live, shown, -1), logprobs


_choose, _take = (flat.own(jax.jit(function, static_argnums=0)) for function in (_chosen, _taken))


class Step(NamedTuple):
  """Results of a call of n steps: an error or None, tokens int32 [B] or [≥ n, B], and as many
  log-probabilities.

  A token of −1 is none; `UNSOUND` says that the logits after it are not finite.
  """

  steps: int
  error: Any
  tokens: Array
  logprobs: Array | None


class Device:
  """A batch that decodes.

  Attributes:
    model: the decoder.
    logits: float32 [B, V], what the next token is chosen from.
    caches: of the newest step that was dispatched.
    most: steps that a call may take.
  """

  def __init__(
    self,
    model: Transformer,
    kind: tuple[Method, bool, bool],
    logits: Any,
    caches: Caches,
    live: np.ndarray,
    always: Always,
    forced: np.ndarray | None,
    unseen: bool = False,
  ):
    """Puts everything where steps take it.

    `unseen`: nobody looks at a token before the next three, so that a call may take them all, and
    the last one steps that nobody asked for.
    """
    by_layer.bound_programs()
    self.model = model
    mesh, self.logits = model.mesh, jnp.asarray(logits, jnp.float32)
    # Laid out as what steps return, or else the second one would be compiled anew.
    where = self.logits.sharding if self.logits.committed else None
    where = where if mesh is None else NamedSharding(mesh, PartitionSpec())
    self._put = functools.partial(jax.device_put, device=where)
    self._explained = checks.explained("generate", model, caches, kind[0])
    self.caches, self.logits = caches, self._put(self.logits)
    self._live, self._always = self._put(live), self._put(always)
    self._by_layer, self._checked = by_layer.decodes(model, kind[0]), model.env.check_nan
    whole = not self._by_layer and not self._checked
    self.most = _most(model, kind[0], unseen) if whole else 1
    loops = self.most > 1
    shape = (self.most, len(live)) if loops else (len(live),)
    self._free, self._forced = self._put(np.full(shape, -1, np.int32)), forced
    if self._by_layer:
      self._run: functools.partial[Any] = functools.partial(decode_by_layer, ByLayer(model), *kind)
    else:
      form, leaves = flat.split(model)
      step = decode_checked if self._checked else decode_some if loops else decode
      self._run = functools.partial(flat.jitted(step, 4, mesh), form, *kind, leaves)

  def compile_ahead(self) -> None:
    """Begins to compile the step in a thread; the first one that is dispatched waits for it.

    Nothing where its layers are programs of their own, nor in several processes, whose compilers
    talk to each other.
    """
    if self._by_layer or jax.process_count() > 1:
      return
    told = self._given(self._free, 1)
    background.begin(self._run.func, self._run.args[:-1], self._run.args[-1], told)

  def _given(self, want: Array, count: int) -> tuple[Any, ...]:
    """Arguments of a call of so many steps."""
    held = self.caches, self.logits, self._live, want, self._always
    return (*held, self._put(np.int32(count))) if self.most > 1 else held

  def _wanted(self, count: int) -> Array:
    """The tokens that the next steps are to take; −1: the model's."""
    if self._forced is None:
      return self._free
    want, self._forced = self._forced[:, :count].T, self._forced[:, count:]
    rest = np.full((self.most - count, len(self._live)), -1, np.int32)
    return self._put(np.concatenate([want, rest]).reshape(self._free.shape))

  def step(self, count: int = 1) -> Step:
    """Dispatches a call of `count` steps, at most `most`."""
    background.wait()
    arrays = self._given(self._wanted(count), count)
    with self._explained():
      made = self._run(*arrays)
    error, made = made if self._checked else (None, made)
    self.caches, self.logits, self._live, *made = made
    for x in jax.tree.leaves((error, made)):
      x.copy_to_host_async()
    return Step(count, error, *made)

  def fetch(self, step: Step) -> tuple[Int[np.ndarray, "n B"], Float[np.ndarray, "n B"] | None]:
    """Waits for a call's steps: tokens int32 and their log-probabilities, or None."""

    def rows(x: Array) -> np.ndarray:
      return np.asarray(x).reshape(-1, len(self._live))[: step.steps]

    with self._explained():
      if step.error is not None:
        step.error.throw()
      tokens = rows(step.tokens)
    return tokens, None if step.logprobs is None else rows(step.logprobs)

  def end(self, rows: Bool[np.ndarray, " B"]) -> None:
    """No step that is dispatched from now on touches these rows."""
    if rows.any():
      self._live &= self._put(~rows)

  def enter(
    self,
    row: int,
    logits: Float[Array, "n V"],
    caches: Caches,
    source: int,
    number: int,
    stop: Int[np.ndarray, " E"],
    knobs: Knobs,
  ) -> None:
    """From the next step on a row is the row `source` of another batch, under its number.

    Only where `Always` has stops [B, E] and knobs [B] of each row. Nothing is checked.
    """
    at, of = np.array([row], np.int32), np.array([source], np.int32)
    self.caches = put(self.caches, at, caches, of)
    always, seed = self._always._replace(seed=None), self._always.seed
    held = self.logits, self._live, always
    new = np.bool_(True), Always(stop, np.int32(number), knobs, None)
    self.logits, self._live, always = _entered(held, at, logits, of, new)
    self._always = always._replace(seed=seed)


def _most(model: Transformer, method: Method, unseen: bool) -> int:
  """Steps of a call, at most."""
  if method.traits.stream is not None:
    return SOME
  return FEW if unseen and quick(model) else 1


def quick(model: Transformer) -> bool:
  """True where a step may take a GPU less time than a call takes the host."""
  return jax.default_backend() == "gpu" and sum(x.nbytes for x in flat.split(model)[1]) < QUICK


@flat.own
@functools.partial(jax.jit, donate_argnums=0)
def _entered(held: Any, row: Int[Array, " 1"], logits: Any, source: Any, new: Any) -> Any:
  """The device's logits, live rows and what steps know of rows, with those of a new one."""
  return jax.tree.map(lambda x, y: x.at[row].set(y), held, (logits[source], *new))
