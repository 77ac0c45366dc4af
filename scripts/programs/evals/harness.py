"""Any method as a model of lm-evaluation-harness (`pip install kvjax[benchmarks]`).

    import lm_eval
    from .harness import KVCacheLM

    model, tokenizer = convert.load(folder)
    lm = KVCacheLM(model, tokenizer, kvjax.SnapKV(budget=512))
    print(lm_eval.simple_evaluate(model=lm, tasks=["hellaswag"])["results"])

lm-evaluation-harness finds no models of other packages by itself. Its own command with this one
registered, `kvjax`, is this module:

    python -m kvjax.programs.evals.harness run --model kvjax --tasks hellaswag \
      --model_args pretrained=FOLDER,method=snapkv:window_size=16,budget=512

Contexts are read into the method's cache, and scored tokens are then decoded one by one: every
log-likelihood is the one that the method gives while generating.

Lengths and requests mean the same as in `HFLM`, except that sampling has no `top_k` of 50 unless a
task sets it. Unsupported requests raise an error before anything is read.
"""

import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

import kvjax
from kvjax.methods import labels
from kvjax.models.decode.generate import generate
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn.transformer import Transformer
from kvjax.programs import common, console
from kvjax.programs.evals import continuations, origin
from kvjax.programs.evals.asked import Settings
from kvjax.programs.evals.continuations import Pair

try:
  from lm_eval import utils
  from lm_eval.api.model import TemplateLM
  from lm_eval.api.registry import register_model
except ModuleNotFoundError as error:
  raise ModuleNotFoundError(
    "the package lm-eval is not installed: pip install 'kvjax[benchmarks]'"
  ) from error


@register_model("kvjax")
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

  @classmethod
  def create_from_arg_string(
    cls, arg_string: str, additional_config: dict[str, Any] | None = None
  ) -> Self:
    """A model out of --model_args, as `loaded` takes them."""
    return cls.create_from_arg_obj(utils.simple_parse_args_string(arg_string), additional_config)

  @classmethod
  def create_from_arg_obj(
    cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
  ) -> Self:
    """As `create_from_arg_string`; JSON, in which a label may have several settings."""
    return cls.loaded(**arg_dict, **(additional_config or {}))

  @classmethod
  def loaded(
    cls,
    pretrained: str | None = None,
    method: str = "full",
    budget: int = 1024,
    batch_size: int | str | None = None,
    max_batch_size: int | None = None,
    device: str | None = None,
    **lengths: Any,
  ) -> Self:
    """A model under the method of a label.

    Args:
      pretrained: a checkpoint, as `kvjax evaluate` takes it; None: SmolLM2-135M-Instruct.
      method: the method's label.
      budget: tokens that it keeps or reads.
      batch_size: rows that are read together; None: 1.
      max_batch_size, device: not used: batches have one size, and JAX chooses the device.
      lengths: `max_length` and `max_new_tokens`.

    Raises:
      ValueError: the label is none, or a number is out of range.
    """
    if not str(batch_size or 1).isdigit():
      raise ValueError(f"batch_size: found {batch_size!r}, expected an integer")
    found = labels.instance(method, budget, "method")
    checkpoint = None if pretrained is None else pathlib.Path(pretrained)
    model, tokenizer = common.load_model(checkpoint, out=sys.stderr)
    return cls(model, tokenizer, found, batch=int(batch_size or 1), **lengths)

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
      for indices in continuations.batches(pairs, self.batch):
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
      ids = self.tok_encode(text, add_special_tokens=False)
      windows = continuations.windows(ids, self.prefix_token_id, self.max_length)
      parts = [(None, *window) for window in windows]
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
      (ids[-room:], [0] * (setting.steps + 1))  # each token of an answer is read
      for ids, room, setting in zip(prompts, rooms, settings, strict=True)
    ]
    with console.bar(len(requests), "answers", "request") as bar:
      for setting in dict.fromkeys(settings):
        mine = [i for i, other in enumerate(settings) if other == setting]
        for indices in continuations.batches([pairs[i] for i in mine], self.batch):
          chosen = [mine[i] for i in indices]
          for i, text in zip(
            chosen, self._answer([pairs[i] for i in chosen], setting), strict=True
          ):
            texts[i] = text
            self.cache_hook.add_partial("generate_until", requests[i].args, text)
          bar.update(len(chosen))
    return [texts[i] for i in range(len(requests))]

  def _settings(self, given: Mapping[str, Any]) -> Settings:
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

  def _score(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
    return [
      (sum(score for _, score, *_ in told), all(token == best for token, _, best, _ in told))
      for told in continuations.score(self.model, self.method, pairs, self.batch)
    ]

  def _answer(self, pairs: Sequence[Pair], setting: Settings) -> list[str]:
    logits, caches = continuations.read(self.model, self.method, pairs, self.batch)
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
    return generation.texts[: len(pairs)]


if __name__ == "__main__":
  from lm_eval.__main__ import cli_evaluate

  with common.one_line_errors():
    cli_evaluate()
