"""Any method as a model of lm-evaluation-harness (`pip install kvjax[benchmarks]`).

    import lm_eval
    from .harness import KVCacheLM

    model, tokenizer = convert.load(folder)
    lm = KVCacheLM(model, tokenizer, kvjax.SnapKV(budget=512))
    print(lm_eval.simple_evaluate(model=lm, tasks=["hellaswag"])["results"])

Contexts are read into the method's cache, and scored tokens are then decoded one by one: every
log-likelihood is the one that the method gives while generating.

Lengths and requests mean the same as in `HFLM`, except that sampling has no `top_k` of 50 unless a
task sets it. Unsupported requests raise an error before anything is read.
"""

import dataclasses
import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.models.decode.generate import generate, pad, prefill
from kvjax.models.decode.sampling import Sampling
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn.transformer import Transformer
from kvjax.programs import console
from kvjax.programs.evals import origin
from kvjax.programs.evals.divergence import surprise

try:
  from lm_eval import utils
  from lm_eval.api.model import TemplateLM
except ModuleNotFoundError as error:
  raise ModuleNotFoundError(
    "the package lm-eval is not installed: pip install 'kvjax[benchmarks]'"
  ) from error

_PIECE = 32  # tokens that are scored per call: their logits are held at once


class KVCacheLM(TemplateLM):
  """A decoder under one KV-cache method.

  Args:
    model, tokenizer: of a checkpoint.
    method: the KV-cache method.
    batch: rows that are read and decoded together.
    max_length: tokens that the model reads at most; a longer context loses its beginning. None:
      what the model was made for.
    max_new_tokens: tokens of an answer where a task does not say.

  Raises:
    ValueError: a number is out of range, or `max_length` is more than the model was made for.
  """

  def __init__(
    self,
    model: Transformer,
    tokenizer: Tokenizer,
    method: kvjax.Method,
    *,
    batch: int = 8,
    max_length: int | None = None,
    max_new_tokens: int = 256,
  ):
    super().__init__()
    most = model.config.max_context
    for name, value in (("batch", batch), ("max_new_tokens", max_new_tokens)):
      if type(value) is not int or value < 1:
        raise ValueError(f"{name}: found {value!r}, expected an integer of at least 1")
    if max_length is not None and (type(max_length) is not int or not 2 <= max_length <= most):
      raise ValueError(f"max_length: found {max_length!r}, expected 2 to {most} tokens, or None")
    self.model, self.tokenizer, self.method = model, tokenizer, method
    self.batch = batch
    self.max_length = max_length or most
    self.max_new_tokens = max_new_tokens

  @property
  def eot_token_id(self) -> int:
    """The token that ends an answer; 0 where the tokenizer has none."""
    return next(iter(self.tokenizer.ends), 0)

  @property
  def prefix_token_id(self) -> int:
    """Token that an empty context is read as."""
    return self.eot_token_id if self.tokenizer.bos is None else self.tokenizer.bos

  @property
  def tokenizer_name(self) -> str:
    """Tells requests of one tokenizer from those of another: lm-eval keeps them under this name."""
    return f"kvjax-{origin.tokenizer(self.tokenizer)}"

  def chat_template(self, chat_template: bool | str = False) -> str | None:
    """The checkpoint's own template."""
    return self.tokenizer.chat_template if chat_template else None

  def apply_chat_template(
    self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
  ) -> str:
    """A conversation as text."""
    return self.tokenizer.render(chat_history, add_generation_prompt=add_generation_prompt)

  def tok_encode(
    self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
  ) -> list[int]:
    """Token ids, with the token that begins a text unless the string has it or it is not wanted."""
    ids = self.tokenizer.encode(string, bos=False)
    wanted = self.tokenizer.add_bos if add_special_tokens is None else add_special_tokens
    bos = self.tokenizer.bos
    return [bos, *ids] if wanted and bos is not None and ids[:1] != [bos] else ids

  def _loglikelihood_tokens(
    self, requests: Sequence[Any], disable_tqdm: bool = False, **kwargs: Any
  ) -> list[tuple[float, bool]]:
    """Log-probability in nats of each continuation, and whether greedy decoding would say it."""
    pairs = [self._cut(context, continuation) for _, context, continuation in requests]
    found: dict[int, tuple[float, bool]] = {}
    with console.bar(len(pairs), "log-likelihoods", "request") as bar:
      for indices in self._batches(pairs):
        scores = self._score([pairs[i] for i in indices])
        for i, score in zip(indices, scores, strict=True):
          found[i] = score
          self.cache_hook.add_partial("loglikelihood", requests[i][0], score)
        bar.update(len(indices))
    return [found[i] for i in range(len(pairs))]

  def loglikelihood_rolling(
    self, requests: Sequence[Any], disable_tqdm: bool = False
  ) -> list[float]:
    """Log-probability in nats of whole texts, in windows of `max_length` tokens."""
    totals = []
    for (text,) in (request.args for request in requests):
      windows = utils.get_rolling_token_windows(
        self.tok_encode(text, add_special_tokens=False),
        prefix_token=self.prefix_token_id,
        max_seq_len=self.max_length,
        context_len=1,
      )
      parts = [(None, *utils.make_disjoint_window(window)) for window in windows]
      totals.append(sum(score for score, _ in self._loglikelihood_tokens(parts)))
    for request, total in zip(requests, totals, strict=True):
      self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
    return totals

  def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
    """Answers, up to the strings that end them.

    A prompt keeps its last `max_length` − `max_gen_toks` tokens.

    Raises:
      ValueError: a request leaves no token to its prompt, or asks for what there is not.
    """
    texts: dict[int, str] = {}
    settings = [self._settings(request.args[1]) for request in requests]
    prompts = [self.tok_encode(request.args[0]) or [self.prefix_token_id] for request in requests]
    rooms = [self.max_length - setting.steps for setting in settings]
    cut = sum(len(ids) > room for ids, room in zip(prompts, rooms, strict=True))
    if cut:
      what = f"max_length {self.max_length} leaves {min(rooms)} tokens and more"
      print(f"{cut} of {len(prompts)} prompts lose their beginning: {what}", file=sys.stderr)
    pairs = [
      (ids[-room:], [0] * setting.steps)
      for ids, room, setting in zip(prompts, rooms, settings, strict=True)
    ]
    with console.bar(len(requests), "answers", "request") as bar:
      for setting in dict.fromkeys(settings):
        mine = [i for i, other in enumerate(settings) if other == setting]
        for indices in self._batches([pairs[i] for i in mine]):
          chosen = [mine[i] for i in indices]
          for i, text in zip(
            chosen, self._answer([pairs[i] for i in chosen], setting), strict=True
          ):
            texts[i] = text
            self.cache_hook.add_partial("generate_until", requests[i].args, text)
          bar.update(len(chosen))
    return [texts[i] for i in range(len(requests))]

  def _settings(self, given: Mapping[str, Any]) -> "Settings":
    """The settings that a request asks for; raises ValueError where they cannot be met."""
    setting = Settings.of(given, self.max_new_tokens)
    if setting.steps >= self.max_length:
      raise ValueError(
        f"max_gen_toks: found {setting.steps}, expected less than max_length = {self.max_length}: "
        "no token of a prompt is left"
      )
    return setting

  def _cut(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
    """The pair without the beginning that does not fit; one token of context stays.

    The last token of a continuation is predicted and not read.
    """
    if len(continuation) > self.max_length:
      raise ValueError(
        f"continuation: found {len(continuation)} tokens, expected at most max_length = "
        f"{self.max_length}"
      )
    return context[-(self.max_length + 1 - len(continuation)) :], continuation

  def _batches(self, pairs: Sequence[tuple[list[int], list[int]]]) -> Iterable[list[int]]:
    """Indices of the pairs, those of one shape together."""
    shapes = [(_bucket(len(context)), _bucket(len(rest))) for context, rest in pairs]
    order = sorted(range(len(pairs)), key=lambda i: shapes[i], reverse=True)
    for _, alike in itertools.groupby(order, key=lambda i: shapes[i]):
      listed = list(alike)
      yield from (listed[i : i + self.batch] for i in range(0, len(listed), self.batch))

  def _read(self, pairs: Sequence[tuple[list[int], list[int]]]) -> tuple[Any, Any]:
    """Logits and caches after the contexts; rows beyond the pairs are idle."""
    contexts = [context for context, _ in pairs]
    size = _bucket(max(map(len, contexts)))
    idle: list[list[int]] = [[]] * (self.batch - len(contexts))
    tokens, lengths = pad([*contexts, *idle], multiple=size)
    capacity = size + _bucket(max(len(rest) for _, rest in pairs))
    caches = self.method.init_caches(self.model.spec(self.batch, capacity))
    return prefill(self.model, tokens, lengths, caches, self.method, past=0)

  def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
    logits, caches = self._read(pairs)
    longest = max(len(rest) for _, rest in pairs)
    forced = np.full((self.batch, -(-longest // _PIECE) * _PIECE), -1, np.int32)
    for row, (_, rest) in zip(forced, pairs, strict=False):
      row[: len(rest)] = rest
    total, greedy = np.zeros(self.batch), np.ones(self.batch, bool)
    for start in range(0, longest, _PIECE):
      wanted = forced[:, start : start + _PIECE]
      generation, caches = generate(
        self.model,
        logits,
        caches,
        self.method,
        steps=_PIECE,
        live=wanted[:, 0] >= 0,
        forced=wanted,
        return_logits=True,
        chunk=_PIECE,
      )
      logits = generation.last
      nll = np.asarray(surprise(generation.logits, jnp.asarray(np.maximum(wanted, 0))))
      likeliest = np.asarray(generation.logits.argmax(-1))
      total -= np.where(wanted >= 0, nll, 0).sum(1, dtype=np.float64)
      greedy &= ((likeliest == wanted) | (wanted < 0)).all(1)
    return [(float(total[i]), bool(greedy[i])) for i in range(len(pairs))]

  def _answer(self, pairs: Sequence[tuple[list[int], list[int]]], setting: "Settings") -> list[str]:
    logits, caches = self._read(pairs)
    generation, _ = generate(
      self.model,
      logits,
      caches,
      self.method,
      steps=setting.steps,
      sampling=setting.sampling,
      stop=self.tokenizer.ends,
      stop_strings=setting.until,
      tokenizer=self.tokenizer,
      live=np.arange(self.batch) < len(pairs),
    )
    assert generation.texts is not None  # a tokenizer was given
    return generation.texts[: len(pairs)]


# Names of the number of new tokens, the first one that is given counts.
_STEPS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
# What generation libraries are told beside these, and the values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
  "num_beams": (1,),
  "num_beam_groups": (1,),
  "num_return_sequences": (1,),
  "repetition_penalty": (1,),
  "length_penalty": (1,),
  "presence_penalty": (0,),
  "frequency_penalty": (0,),
  "diversity_penalty": (0,),
  "no_repeat_ngram_size": (0,),
  "typical_p": (1,),
  "early_stopping": (False,),
  "use_cache": (True, False),
}


@dataclasses.dataclass(frozen=True)
class Settings:
  """The settings that a request asks for.

  Attributes:
    until: strings that end an answer.
    steps: tokens of an answer at most.
    sampling: how tokens are drawn.
  """

  until: tuple[str, ...]
  steps: int
  sampling: Sampling

  @classmethod
  def of(cls, given: Mapping[str, Any], steps: int) -> "Settings":
    """Out of a request's `generation_kwargs`.

    Args:
      given: `until`, one of `max_gen_toks` and its other names, `do_sample`, `temperature`,
        `top_p`, `top_k`, `min_p`. Without `do_sample` a temperature above 0 draws.
      steps: tokens of an answer where it does not say.

    Raises:
      ValueError: a name is not known, or a value is not possible.
    """
    told = {name: value for name, value in given.items() if value is not None}
    until = told.pop("until", [])
    until = [until] if isinstance(until, str) else until
    if not isinstance(until, list | tuple) or not all(isinstance(text, str) for text in until):
      raise ValueError(f"until: found {until!r}, expected a string, or several in a list")
    for name in reversed(_STEPS):
      if name in told:
        steps = _whole(name, told.pop(name), 1)
    return cls(tuple(filter(None, until)), steps, _sampling(told))


def _sampling(told: dict[str, Any]) -> Sampling:
  """The way tokens are drawn; whatever else a request says has to be without effect."""
  sample = told.pop("do_sample", None)
  if sample not in (True, False, None):
    raise ValueError(f"do_sample: found {sample!r}, expected True or False")
  values = {
    name: _number(name, told.pop(name))
    for name in ("temperature", "top_p", "min_p")
    if name in told
  }
  top_k = _whole("top_k", told.pop("top_k", 0), -1)
  for name, value in told.items():
    if name not in _NEUTRAL:
      known = ("until", *_STEPS, "do_sample", "temperature", "top_p", "top_k", "min_p")
      raise ValueError(f"generation_kwargs: found {name} = {value!r}, expected {', '.join(known)}")
    if value not in _NEUTRAL[name]:
      raise ValueError(f"{name}: found {value!r}, expected {_NEUTRAL[name][0]}")
  temperature = values.get("temperature", 0.0)
  if sample and not temperature > 0:
    raise ValueError(f"temperature: found {temperature} with do_sample, expected more than 0")
  drawn = Sampling(**{**values, "temperature": temperature}, top_k=top_k if top_k > 0 else None)
  return Sampling() if sample is False or not temperature else drawn


def _number(name: str, value: Any) -> float:
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise ValueError(f"{name}: found {value!r}, expected a number")
  return float(value)


def _whole(name: str, value: Any, least: int) -> int:
  if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
    raise ValueError(f"{name}: found {value!r}, expected an integer")
  if value < least:
    raise ValueError(f"{name}: found {value!r}, expected at least {least}")
  return int(value)


def _bucket(tokens: int) -> int:
  """The next of 32, 64, 128, …: few sizes, few compilations."""
  return max(32, 1 << (max(1, tokens) - 1).bit_length())
