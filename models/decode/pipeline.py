"""Text in, text out: a model and a method in one object."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from kvjax.families.method import Method
from kvjax.methods import labels
from kvjax.models.decode import checks
from kvjax.models.decode.generate import GREEDY, generate, pad, prefill
from kvjax.models.decode.sampling import Sampling
from kvjax.models.io import convert, files
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.models.nn.transformer import Transformer

Messages = Sequence[Mapping[str, Any]]


def pipeline(
  model: str | pathlib.Path | None = None,
  method: str | Method = "full",
  *,
  budget: int = 1024,
  **how: Any,
) -> Pipeline:
  """A model under a KV-cache method, to be called with text.

      ask = kvjax.pipeline("Qwen/Qwen2.5-0.5B-Instruct", "snapkv:window_size=16")
      print(ask("Name three rivers."))

  >>> import kvjax
  >>> ask = kvjax.pipeline(method="snapkv:window_size=16", budget=512)
  >>> answers = ask(["Name three rivers.", "What is a cache?"], steps=8)
  >>> len(answers)
  2

  Args:
    model: a checkpoint, a Hugging Face folder, a .gguf file, or a model of the hub ("owner/name");
      None: SmolLM2-135M-Instruct. Converted once (`kvjax.models.io.convert.checkpoint`).
    method: a label, as `kvjax evaluate` takes it ("quest", "quantised:bits=4+snapkv"), or a method.
    budget: tokens that a method of a label keeps or reads.
    how: further arguments of `kvjax.models.io.convert.load`: dtype, impl, mesh.

  Raises:
    TypeError: `model` is no path, `method` neither, or `budget` no integer.
    ValueError: the label is none, or its method refuses a setting.
    ValueError, NotImplementedError, OSError: the model cannot be had or loaded.
  """
  if isinstance(method, str):
    method = labels.instance(method, checks.whole("budget", budget, 1), "method")
  elif not isinstance(method, Method):
    raise TypeError(f"method: found {method!r}, expected a method or its label, such as 'snapkv'")
  source = convert.default_checkpoint() if model is None else files.path_of("model", model)
  return Pipeline(*convert.load(source, **how), method)


class Pipeline:
  """A model, its tokenizer and a method; every call begins with empty caches.

  Attributes:
    model: the decoder.
    tokenizer: its tokenizer.
    method: the KV-cache method.
  """

  def __init__(self, model: Transformer, tokenizer: Tokenizer, method: Method):
    self.model, self.tokenizer, self.method = model, tokenizer, method

  def __call__(
    self,
    prompt: str | Messages | Sequence[str | Messages],
    *,
    steps: int = 256,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    stop: Sequence[str] = (),
    raw: bool = False,
    on_text: Callable[[list[str]], Any] | None = None,
  ) -> Any:
    """The model's answer, a text; of several prompts, which are answered as one batch, a list.

    Args:
      prompt: a question, or the messages of a chat (dicts of "role" and "content"); or a list of
        questions and chats.
      steps: tokens of an answer at most.
      sampling: temperature and filters; the likeliest token by default.
      seed: random seed of the draws.
      stop: strings that end an answer, which ends before them.
      raw: continue a text as it is, without the chat template.
      on_text: called with the new text of every row as it comes, for streaming.

    Raises:
      TypeError: a prompt is neither text nor messages.
      ValueError: there is no prompt, or one without text.
      ValueError, MemoryError, FloatingPointError: of `prefill` and `generate`.
    """
    listed = isinstance(prompt, Collection) and not isinstance(prompt, str | bytes | Mapping)
    one = not listed or isinstance(next(iter(prompt), None), Mapping)
    ids = [self._ids(each, raw) for each in ([prompt] if one else prompt)]
    steps, stop = checks.whole("steps", steps, 1), checks.stop_strings(stop, "stop")
    seed = checks.whole("seed", seed, 0, 2**32)
    checks.kind("sampling", sampling, Sampling)
    checks.callbacks(on_text=on_text)
    if not ids:
      raise ValueError("prompt: found no prompt, expected a text, messages, or a list of them")
    tokens, lengths = pad(ids)
    caches = self.model.init_caches(self.method, len(ids), tokens.shape[1] + steps)
    logits, caches = prefill(self.model, tokens, lengths, caches, self.method)
    out, _ = generate(
      self.model,
      logits,
      caches,
      self.method,
      steps=steps,
      sampling=sampling,
      seed=seed,
      stop=self.tokenizer.ends,
      stop_strings=stop,
      tokenizer=self.tokenizer.continuing() if raw else self.tokenizer,
      on_text=on_text,
    )
    texts = out.texts or []
    return texts[0] if one else texts

  def _ids(self, prompt: Any, raw: bool) -> list[int]:
    """The tokens of one prompt."""
    if isinstance(prompt, str):
      if not prompt.strip():
        raise ValueError(f"prompt: found {prompt!r}, expected a text")
      if raw:
        return [*self.tokenizer.prefix, *self.tokenizer.encode(prompt, bos=False)]
      if not (self.tokenizer.chat_template or self.tokenizer.templates):
        raise ValueError("prompt: the model has no chat template; raw=True continues a text")
      return self.tokenizer.chat([{"role": "user", "content": prompt}])
    messages = isinstance(prompt, Sequence) and all(isinstance(x, Mapping) for x in prompt)
    if raw or not messages or not prompt:
      raise TypeError(f"prompt: found {prompt!r}, expected a text{' (raw)' * raw}, or messages")
    return self.tokenizer.chat(prompt)
