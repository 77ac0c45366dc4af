"""The public names of `kvjax`, which imports them when the first one is used."""

from kvjax.bounded import Bounded
from kvjax.forked import Forked
from kvjax.front import LayerCache, decode, empty_caches, finish, prefill, stacked
from kvjax.full import Full
from kvjax.measured import Measured
from kvjax.memory import MemoryPlan, plan_memory
from kvjax.method import Method
from kvjax.methods.adakv import AdaKV
from kvjax.methods.art import ART
from kvjax.methods.chunkkv import ChunkKV
from kvjax.methods.cis import CIS
from kvjax.methods.cpe import CPE
from kvjax.methods.criticalkv import CriticalKV
from kvjax.methods.double_sparsity import DoubleSparsity
from kvjax.methods.duo_attention import DuoAttention
from kvjax.methods.etf import ETF
from kvjax.methods.expected_attention import ExpectedAttention
from kvjax.methods.h2o import H2O
from kvjax.methods.hshare import HShare
from kvjax.methods.infllm import InfLLM
from kvjax.methods.infllm_v2 import InfLLMv2
from kvjax.methods.keydiff import KeyDiff
from kvjax.methods.kivi import KIVI
from kvjax.methods.knorm import Knorm
from kvjax.methods.kvzip import KVzip
from kvjax.methods.lagkv import LagKV
from kvjax.methods.lm_infinite import LMInfinite
from kvjax.methods.longflow import LongFlow
from kvjax.methods.ltri import Ltri
from kvjax.methods.prr import PRR
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
from kvjax.plans import Attended, Plan, Span, View, Window
from kvjax.prompt_scored import PromptScored
from kvjax.registry import METHODS, find_method
from kvjax.rope import Linear, Llama3, LongRope, Rope, Yarn
from kvjax.selective import Selective
from kvjax.sharding import compiler_options, make_mesh
from kvjax.shared_prefill import SharedPrefill
from kvjax.softmax_state import State
from kvjax.streamed import Streamed
from kvjax.types import Active, At, Cache, CacheSpec, Carry, Env, OwnRows, Prompt
from kvjax.wrapper import Wrapper

__all__ = [
  "ART",
  "CIS",
  "CPE",
  "ETF",
  "H2O",
  "KIVI",
  "METHODS",
  "PRR",
  "PSAW",
  "RKV",
  "TOVA",
  "VATP",
  "Active",
  "AdaKV",
  "At",
  "Attended",
  "Bounded",
  "Cache",
  "CacheSpec",
  "Carry",
  "ChunkKV",
  "CriticalKV",
  "DoubleSparsity",
  "DuoAttention",
  "Env",
  "ExpectedAttention",
  "Forked",
  "Full",
  "HShare",
  "InfLLM",
  "InfLLMv2",
  "KVzip",
  "KeyDiff",
  "Knorm",
  "LMInfinite",
  "LagKV",
  "LayerCache",
  "Linear",
  "Llama3",
  "LongFlow",
  "LongRope",
  "Ltri",
  "Measured",
  "MemoryPlan",
  "Method",
  "OwnRows",
  "Plan",
  "Prompt",
  "PromptScored",
  "PyramidKV",
  "Quantised",
  "Quest",
  "Random",
  "RocketKV",
  "Rope",
  "Selective",
  "SharedPrefill",
  "SnapKV",
  "Span",
  "State",
  "Streamed",
  "StreamingLLM",
  "TopKOracle",
  "Twilight",
  "View",
  "Window",
  "Wrapper",
  "Yarn",
  "compiler_options",
  "decode",
  "empty_caches",
  "find_method",
  "finish",
  "make_mesh",
  "plan_memory",
  "prefill",
  "stacked",
]
