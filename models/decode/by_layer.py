"""A decoder whose layers are compiled one at a time, those that are alike once.

One program for all layers is what a decode step costs least with, and what compiles longest. The
layers of a prompt take milliseconds each, and each is dispatched while the one before it runs:
prompts are always read this way. Decode steps are on a CPU, where a method asks for it
(`Traits.by_layer`); on a GPU dispatches would take most of their time.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Int

from kvjax.core.context import At, Carry, Env, Prompt
from kvjax.families import forms, sliding
from kvjax.families.method import Method
from kvjax.models.nn import flat
from kvjax.models.nn.flat import Form, join
from kvjax.models.nn.transformer import Caches, Transformer, bound
from kvjax.ops import offload
from kvjax.runtime.sites import DifferentLayer, Site

LARGE = 512  # tokens of a prompt from which on its products are the vendor's library's
# A GPU's compiler tries kernels of its own for large products, for most of the time that a layer
# takes to compile; what the vendor's library has is as fast. For small ones its own are faster.
# Candidates are timed for one program at a time, and others that compile beside it wait: the head,
# which runs once a prompt, takes the first; a layer checks no results (level 1).
_VENDORS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 1}
_UNTIMED = {**_VENDORS, "xla_gpu_autotune_level": 0}


def reads(model: Transformer) -> bool:
  """True if a model's prompts are compiled by layer: on one device, and without a NaN guard."""
  return model.mesh is None and not model.env.check_nan


def decodes(model: Transformer, method: Method) -> bool:
  """True if its decode steps are, too."""
  return method.traits.by_layer and reads(model) and jax.default_backend() != "gpu"


class ByLayer:
  """`prefill` and `decode` of a model, to be called outside of `jax.jit`; caches are donated.

  Args:
    model: the decoder, on one device. Later changes of its weights are not seen.
  """

  def __init__(self, model: Transformer):
    self.model = model
    self.layers = [flat.split(layer) for layer in model.layers]
    self.ends = flat.split(_without_layers(model))
    # What `_embed_next` is given beside tokens.
    forms, leaves = zip(self.ends, self.layers[0], strict=True)
    self._start = *forms, model.env, *leaves

  def prefill(
    self,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    caches: Caches,
    method: Method,
    *,
    total: Int[Array, " B"] | None = None,
    past: int | None = 0,
    all_logits: bool = False,
    with_aux: bool = False,
  ) -> Any:
    """As `Transformer.prefill`."""
    total = lengths if total is None else total
    form, leaves = self.ends
    with self.model.products_traced():
      x, handed = _embed(form, leaves, tokens), (_carry(method, caches),)
      told = lengths, total
      large = method.traits.stream is None and tokens.size >= LARGE
      run, last = (_prefill_large, _head_large) if large else (_prefill, _head)
      head = functools.partial(last.lower, form, all_logits, leaves, x, lengths)
      x, new, _, reports = self._through(head, run, method, past, caches, x, told, handed)
      logits = last(form, all_logits, leaves, x, lengths)
      if forms.overrides(method, "conclude"):
        new = self.model.by_served(functools.partial(_conclude, method), new, lengths)
    return (logits, new, reports) if with_aux else (logits, new)

  def decode(
    self,
    tokens: Int[Array, " B"],
    caches: Caches,
    method: Method,
    live: Bool[Array, " B"] | None = None,
    *,
    with_aux: bool = False,
  ) -> Any:
    """As `Transformer.decode`."""
    live = jnp.ones(tokens.shape, bool) if live is None else live
    form, leaves = self.ends
    with self.model.products_traced():
      x, parts = _embed_next(*self._start, tokens)
      handed = parts, _carry(method, caches)
      head = functools.partial(_predict_next.lower, form, leaves, x, parts)
      given = method, None, caches, x, live, handed
      x, new, handed, reports = self._through(head, _decode, *given)
      logits = _predict_next(form, leaves, x, handed[0])
    return (logits, new, reports) if with_aux else (logits, new)

  def _through(
    self,
    head: Callable[[], Any],
    run: Any,
    method: Method,
    past: int | None,
    caches: Caches,
    x: Any,
    told: Any,
    handed: Any,
  ) -> tuple[Any, Caches, Any, list[Any]]:
    """State, caches, what was handed on and reports, once all layers' programs have run."""
    new, reports = [], []
    sites = self._sites(head, run, method, past, caches, x, told, handed)
    for at, cache, (layer, own) in zip(sites, caches, self.layers, strict=True):
      x, cache, handed, aux = run(layer, at, bound(at, past), own, cache, x, told, handed)
      new.append(cache)
      reports.append(aux)
    return x, tuple(new), handed, reports

  def programs(self, method: Method, batch: int, tokens: int | None, capacity: int) -> int:
    """Number of programs of the layers of a prompt, or, where tokens is None, those of a decode
    step; nothing is compiled, nothing runs.
    """
    caches = jax.eval_shape(lambda: method.init_caches(self.model.spec(batch, capacity)))
    count = jax.ShapeDtypeStruct((batch,), jnp.int32)
    if tokens is None:
      x, parts = _embed_next.eval_shape(*self._start, count)
      live = jax.ShapeDtypeStruct((batch,), bool)
      return len(
        self._placed(_decode, method, None, caches, x, live, (parts, _carry(method, caches)))[1]
      )
    x = jax.ShapeDtypeStruct((batch, tokens, self.model.config.dim), self.model.dtype)
    handed = (_carry(method, caches),)
    return len(self._placed(_prefill, method, 0, caches, x, (count, count), handed)[1])

  def _sites(
    self,
    head: Callable[[], Any],
    program: Any,
    method: Method,
    past: int | None,
    caches: Caches,
    *arrays: Any,
  ) -> list[At]:
    """Site of each layer. At first, all programs that this takes are compiled, side by side, and
    what follows the layers (`head` lowers it).
    """
    forms = [form for form, _ in self.layers]
    places = self.model.places(method)
    key = program, *places, past, *forms, *_shapes((caches, arrays))
    if key not in _SITES:
      sites, traced = self._placed(program, method, past, caches, *arrays)
      lower = *(each.lower for each in traced.values()), head
      with ThreadPoolExecutor() as pool:
        for job in [pool.submit(each().compile) for each in lower]:
          job.result()
      _SITES[key] = sites
    return _SITES[key]

  def _placed(
    self,
    program: Any,
    method: Method,
    past: int | None,
    caches: Caches,
    x: Any,
    told: Any,
    handed: Any,
  ) -> tuple[list[At], dict[Any, Any]]:
    """Every layer at the first site that serves it, and the programs that this takes, traced."""
    sites: list[Site] = []
    chosen: list[At] = []
    traced: dict[Any, Any] = {}
    places = self.model.places(method)
    for at, cache, (form, own) in zip(places, caches, self.layers, strict=True):
      alike = [site for site in sites if (site.env, site.top) == (at.env, at.top)]
      for site in [*alike, Site(at.layer, at.env, at.top)]:
        key = form, site, *_shapes((cache, handed))
        try:
          with site.serving(at.layer):
            if key not in traced:
              known = bound(at, past)
              traced[key] = program.trace(form, site, known, own, cache, x, told, handed)
        except DifferentLayer:
          continue
        break
      sites += [site] * (site not in sites)
      chosen.append(site)
      handed = traced[key].out_info[2]
    return chosen, traced


# Of all that a program has been compiled for: where its layers run.
_SITES: dict[Any, list[At]] = {}


# Each takes some 35 memory maps on a CPU, of which Linux gives a process 65,530, and 3 MB.
MOST_PROGRAMS = 384


def bound_programs() -> None:
  """Drops what the library has compiled where that is much; no call may be under way."""
  if flat.held() > MOST_PROGRAMS:
    flat.drop()
    _SITES.clear()


def _carry(method: Method, caches: Caches) -> Carry:
  """Carry of the first layer; those with a window of the model's own hand it on."""
  served, stream = sliding.served(caches), method.traits.stream
  if stream is None or stream.begins is None or not served:
    return Carry()
  return stream.begins(served[0])


def _shapes(tree: Any) -> tuple[Any, ...]:
  """Structure, shapes and dtypes of these arrays, for which a program is compiled."""
  leaves, form = jax.tree.flatten(tree)
  return form, *((x.shape, x.dtype) for x in leaves)


def _without_layers(model: Transformer) -> Transformer:
  """Embedding, last norm and head: the model's own, in a shell of their own."""
  ends = copy.copy(model)
  ends.layers = nnx.List([])
  return ends


@flat.own
@functools.partial(jax.jit, static_argnums=0)
def _embed(form: Form, leaves: Any, tokens: Any) -> Any:
  return join(form, leaves).embed(tokens)


@flat.own
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _embed_next(form: Form, first: Form, env: Env, leaves: Any, own: Any, tokens: Any) -> Any:
  """The state of a decode step, and zeros for what layers hand on of theirs as summands: with
  them the first layer, whose leaves are `own`, runs the program of the others.
  """
  x = join(form, leaves).embed(tokens)
  parts = jax.eval_shape(lambda: join(first, own).summands(env, x))
  return x, jnp.zeros(parts.shape, parts.dtype)


def _predict(form: Form, all_logits: bool, leaves: Any, x: Any, lengths: Any) -> Any:
  return join(form, leaves).predict(x, lengths, all_logits)


_head = flat.own(jax.jit(_predict, static_argnums=(0, 1)))
_head_large = flat.own(jax.jit(_predict, static_argnums=(0, 1), compiler_options=_UNTIMED))


@flat.own
@functools.partial(jax.jit, static_argnums=0)
def _predict_next(form: Form, leaves: Any, x: Any, parts: Any) -> Any:
  return join(form, leaves).predict_next(x, parts)


@flat.own
@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _conclude(method: Method, env: Env, caches: Any, lengths: Any) -> Any:
  return offload.settled(method.conclude(env, caches, lengths))


def _of_prompt(
  form: Form, at: At, past: int | None, leaves: Any, cache: Any, x: Any, told: Any, handed: Any
) -> Any:
  """A layer of a prompt: state, cache, what it hands on (the carry), reports."""
  (lengths, total), (carry,) = told, handed
  prompt = Prompt.of(at, x.shape[1], lengths, total, past)
  x, cache, carry, aux = join(form, leaves).prefill(at, x, cache, prompt, carry)
  return x, offload.settled(cache), (carry,), aux


_jitted = functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(4, 5))
_prefill = flat.own(_jitted(_of_prompt))
_prefill_large = flat.own(_jitted(_of_prompt, compiler_options=_VENDORS))


@flat.own
@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def _decode(
  form: Form, at: At, _: None, leaves: Any, cache: Any, x: Any, live: Any, handed: Any
) -> Any:
  """A layer of a decode step: state, cache, what it hands on (summands and carry), reports."""
  parts, carry = handed
  x, parts, cache, carry, aux = join(form, leaves).decode(at, x, parts, cache, live, carry)
  return x, offload.settled(cache), (parts, carry), aux
