"""kvjax: KV-cache methods for long-context decoding, as jittable steps over an explicit cache."""

from kvjax.bounded import Bounded
from kvjax.method import Method
from kvjax.methods.full import Full
from kvjax.methods.h2o import H2O
from kvjax.methods.lm_infinite import LMInfinite
from kvjax.methods.longflow import LongFlow
from kvjax.methods.pyramidkv import PyramidKV
from kvjax.methods.r_kv import RKV
from kvjax.methods.random import Random
from kvjax.methods.snapkv import SnapKV
from kvjax.methods.streaming_llm import StreamingLLM
from kvjax.methods.tova import TOVA
from kvjax.methods.vatp import VATP
from kvjax.registry import METHODS
from kvjax.rope import Linear, Llama3, Rope, Yarn
from kvjax.shared_prefill import SharedPrefill
from kvjax.softmax_state import State
from kvjax.types import (
  At,
  Attended,
  Cache,
  CacheSpec,
  Carry,
  Env,
  Plan,
  Prompt,
  Span,
  View,
  Window,
)
from kvjax.wrapper import Wrapper

__version__ = "0.1.0"

__all__ = [
  "H2O",
  "METHODS",
  "RKV",
  "TOVA",
  "VATP",
  "At",
  "Attended",
  "Bounded",
  "Cache",
  "CacheSpec",
  "Carry",
  "Env",
  "Full",
  "LMInfinite",
  "Linear",
  "Llama3",
  "LongFlow",
  "Method",
  "Plan",
  "Prompt",
  "PyramidKV",
  "Random",
  "Rope",
  "SharedPrefill",
  "SnapKV",
  "Span",
  "State",
  "StreamingLLM",
  "View",
  "Window",
  "Wrapper",
  "Yarn",
]
