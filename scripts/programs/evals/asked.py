"""Wishes of requests for an answer, in the names of generation libraries."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Mapping
from typing import Any

from kvjax.models.decode.sampling import Sampling

_UNTIL = ("until", "stop")  # names of the strings that end an answer
# Names of the number of new tokens, the first one that is given counts.
_STEPS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_DRAWS = ("do_sample", "temperature", "top_p", "top_k", "min_p")
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
  "best_of": (1,),
  "logit_bias": ({},),
  "suffix": ("",),
  "tools": ([],),
  "tool_choice": ("none",),
  "parallel_tool_calls": (True, False),
  "response_format": ({"type": "text"},),
  "top_logprobs": (0,),
  "store": (False,),
}


@dataclasses.dataclass(frozen=True)
class Settings:
  """The settings that a request asks for: what ends an answer, its most tokens, their drawing."""

  until: tuple[str, ...]
  steps: int
  sampling: Sampling

  @classmethod
  def of(cls, given: Mapping[str, Any], steps: int) -> Settings:
    """Out of a request's `generation_kwargs`.

    Args:
      given: `until` or `stop`, one of `max_gen_toks` and its other names, `do_sample`,
        `temperature`, `top_p`, `top_k`, `min_p`. Without `do_sample` a temperature above 0 draws.
      steps: tokens of an answer where it does not say.

    Raises:
      ValueError: a name is not known, or a value is not possible.
    """
    told = {name: value for name, value in given.items() if value is not None}
    until: Any = []
    for name in _UNTIL:
      until = told.pop(name, until)
      until = [until] if isinstance(until, str) else until
      if not isinstance(until, list | tuple) or not all(isinstance(text, str) for text in until):
        raise ValueError(f"{name}: found {until!r}, expected a string, or several in a list")
    for name in reversed(_STEPS):
      if name in told:
        steps = _whole(name, told.pop(name), 1)
    setting = cls(tuple(filter(None, until)), steps, _sampling(told))
    for name, value in told.items():
      known = ", ".join((*_UNTIL, *_STEPS, *_DRAWS))
      if name not in _NEUTRAL:
        raise ValueError(f"{name}: found {reprlib.repr(value)}, expected only {known}")
      if value not in _NEUTRAL[name]:
        found, only = reprlib.repr(value), repr(_NEUTRAL[name][0])
        raise ValueError(f"{name}: found {found}, expected {only}: other values are not supported")
    return setting


def _sampling(told: dict[str, Any]) -> Sampling:
  """The way tokens are drawn; takes what it reads out of `told`.

  Raises:
    ValueError: a value is not possible.
  """
  sample = told.pop("do_sample", None)
  if sample not in (True, False, None):
    raise ValueError(f"do_sample: found {sample!r}, expected True or False")
  values = {
    name: _number(name, told.pop(name))
    for name in ("temperature", "top_p", "min_p")
    if name in told
  }
  top_k = _whole("top_k", told.pop("top_k", 0), -1)
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
  """An integer of at least `least`, as JSON has it; ValueError for anything else."""
  if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
    raise ValueError(f"{name}: found {value!r}, expected an integer")
  if value < least:
    raise ValueError(f"{name}: found {value!r}, expected at least {least}")
  return int(value)
