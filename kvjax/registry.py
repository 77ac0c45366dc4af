"""Name -> class of every method; laws, demo, evaluations and benchmarks run over this table."""

from kvjax.method import Method
from kvjax.methods.full import Full
from kvjax.methods.h2o import H2O
from kvjax.methods.pyramidkv import PyramidKV
from kvjax.methods.random import Random
from kvjax.methods.snapkv import SnapKV
from kvjax.methods.streaming_llm import StreamingLLM

METHODS: dict[str, type[Method]] = {
  "full": Full,
  "streaming_llm": StreamingLLM,
  "random": Random,
  "h2o": H2O,
  "snapkv": SnapKV,
  "pyramidkv": PyramidKV,
}
