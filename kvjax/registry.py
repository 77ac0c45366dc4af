"""Name -> class of every method; laws, demo, evaluations and benchmarks run over this table."""

from typing import Any

from kvjax.method import Method
from kvjax.methods.art import ART
from kvjax.methods.cis import CIS
from kvjax.methods.cpe import CPE
from kvjax.methods.double_sparsity import DoubleSparsity
from kvjax.methods.etf import ETF
from kvjax.methods.full import Full
from kvjax.methods.h2o import H2O
from kvjax.methods.hshare import HShare
from kvjax.methods.infllm import InfLLM
from kvjax.methods.infllm_v2 import InfLLMv2
from kvjax.methods.lm_infinite import LMInfinite
from kvjax.methods.longflow import LongFlow
from kvjax.methods.ltri import Ltri
from kvjax.methods.prr import PRR
from kvjax.methods.psaw import PSAW
from kvjax.methods.pyramidkv import PyramidKV
from kvjax.methods.quest import Quest
from kvjax.methods.r_kv import RKV
from kvjax.methods.random import Random
from kvjax.methods.snapkv import SnapKV
from kvjax.methods.streaming_llm import StreamingLLM
from kvjax.methods.topk_oracle import TopKOracle
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
  "topk_oracle": TopKOracle,
  "quest": Quest,
  "infllm_v2": InfLLMv2,
  "double_sparsity": DoubleSparsity,
  "hshare": HShare,
  "cis": CIS,
  "infllm": InfLLM,
  "ltri": Ltri,
  "psaw": PSAW,
  "etf": ETF,
  "cpe": CPE,
  "art": ART,
  "prr": PRR,
}


def check_method(name: str, found: Any) -> None:
  """Raises TypeError for an argument that is no method: a registered name, say, or a class."""
  if isinstance(found, Method):
    return
  what, instance = repr(found), "kvjax.METHODS['quest'].usual(1024)"
  if isinstance(found, str):
    what = f"the string {found!r}"
    instance = f"kvjax.METHODS[{found if found in METHODS else 'quest'!r}].usual(1024)"
  elif isinstance(found, type):
    what = f"the class {found.__name__}"
    instance = f"{found.__name__}.usual(1024)" if issubclass(found, Method) else instance
  raise TypeError(f"{name}: found {what}, expected a method such as {instance}")
