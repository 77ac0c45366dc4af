"""Name -> class of every method; laws, demo, evaluations and benchmarks run over this table.

A method from outside needs no line here: programs take "module:Class" for a name, and
`METHODS["mine"] = Mine` gives it a short one in your own process.
"""

import importlib
from typing import Any

from kvjax.families.full import Full
from kvjax.families.method import Method
from kvjax.methods.adakv import AdaKV
from kvjax.methods.art.method import ART
from kvjax.methods.chunkkv import ChunkKV
from kvjax.methods.cis.method import CIS
from kvjax.methods.cpe import CPE
from kvjax.methods.criticalkv import CriticalKV
from kvjax.methods.double_sparsity import DoubleSparsity
from kvjax.methods.duo_attention.method import DuoAttention
from kvjax.methods.etf import ETF
from kvjax.methods.expected_attention import ExpectedAttention
from kvjax.methods.h2o import H2O
from kvjax.methods.hshare.method import HShare
from kvjax.methods.infllm import InfLLM
from kvjax.methods.infllm_v2 import InfLLMv2
from kvjax.methods.keydiff import KeyDiff
from kvjax.methods.kivi import KIVI
from kvjax.methods.knorm import Knorm
from kvjax.methods.kvzip import KVzip
from kvjax.methods.lagkv import LagKV
from kvjax.methods.lm_infinite import LMInfinite
from kvjax.methods.longflow.method import LongFlow
from kvjax.methods.ltri.method import Ltri
from kvjax.methods.prr.method import PRR
from kvjax.methods.psaw import PSAW
from kvjax.methods.pyramidkv import PyramidKV
from kvjax.methods.quantised import Quantised
from kvjax.methods.quest import Quest
from kvjax.methods.r_kv import RKV
from kvjax.methods.random import Random
from kvjax.methods.rocketkv import RocketKV
from kvjax.methods.snapkv import SnapKV
from kvjax.methods.streaming_llm import StreamingLLM
from kvjax.methods.topk_oracle import TopKOracle
from kvjax.methods.tova import TOVA
from kvjax.methods.twilight import Twilight
from kvjax.methods.vatp import VATP

METHODS: dict[str, type[Method]] = {
  "full": Full,
  "streaming_llm": StreamingLLM,
  "lm_infinite": LMInfinite,
  "duo_attention": DuoAttention,
  "random": Random,
  "h2o": H2O,
  "tova": TOVA,
  "vatp": VATP,
  "snapkv": SnapKV,
  "pyramidkv": PyramidKV,
  "adakv": AdaKV,
  "expected_attention": ExpectedAttention,
  "knorm": Knorm,
  "keydiff": KeyDiff,
  "lagkv": LagKV,
  "chunkkv": ChunkKV,
  "criticalkv": CriticalKV,
  "r_kv": RKV,
  "kvzip": KVzip,
  "longflow": LongFlow,
  "topk_oracle": TopKOracle,
  "quest": Quest,
  "infllm_v2": InfLLMv2,
  "rocketkv": RocketKV,
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
  "twilight": Twilight,
  "quantised": Quantised,
  "kivi": KIVI,
}


def find_method(name: str, option: str = "name") -> type[Method]:
  """The class of a method, by its name.

  Args:
    name: a registered one; or "module:Class", which is imported: a method from outside.
    option: what errors call the name.

  Raises:
    ValueError: no method has this name, the module is not there, or what it holds is no method.
  """
  if name in METHODS:
    return METHODS[name]
  module, colon, attribute = name.partition(":")
  if not colon:
    known = ", ".join(METHODS)
    raise ValueError(f"{option}: found {name!r}, expected one of: {known}; or module:Class")
  try:
    found = getattr(importlib.import_module(module), attribute)
  except (ImportError, AttributeError) as error:
    raise ValueError(f"{option}: found {name!r}, expected module:Class ({error})") from error
  if not (isinstance(found, type) and issubclass(found, Method)):
    raise ValueError(f"{option}: found {name!r}, {found!r}, expected a subclass of kvjax.Method")
  return found


def check_method(name: str, found: Any) -> None:
  """Raises TypeError for an argument that is no method: a registered name, say, or a class."""
  if isinstance(found, Method):
    return
  name_of, what = "quest", repr(found)
  if isinstance(found, str):
    what = f"the string {found!r}"
    name_of = found if found in METHODS else name_of
  elif isinstance(found, type):
    what = f"the class {found.__name__}"
    name_of = next((known for known, cls in METHODS.items() if cls is found), name_of)
  instance = f"kvjax.settings.usual(kvjax.METHODS[{name_of!r}], 1024)"
  raise TypeError(f"{name}: found {what}, expected a method such as {instance}")
