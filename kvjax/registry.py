"""Name -> class of every method; laws, demo, evaluations and benchmarks run over this table."""

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

METHODS: dict[str, type[Method]] = {
  "full": Full,
  "streaming_llm": StreamingLLM,
  "lm_infinite": LMInfinite,
  "random": Random,
  "h2o": H2O,
  "tova": TOVA,
  "vatp": VATP,
  "snapkv": SnapKV,
  "pyramidkv": PyramidKV,
  "r_kv": RKV,
  "longflow": LongFlow,
}
