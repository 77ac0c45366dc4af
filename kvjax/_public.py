"""The table of public names of `kvjax`, imported when the first of them is used."""

from kvjax.analysis.measured import Measured
from kvjax.core import fields, settings, slots
from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.context import Active, At, Carry, Env, OwnRows, Prompt
from kvjax.core.leaves import Leaf
from kvjax.core.plan import Attended, Plan, Span, View, Window
from kvjax.core.traits import Stream, Traits
from kvjax.families.bounded import Bounded, InTurn
from kvjax.families.full import Full
from kvjax.families.method import Method
from kvjax.families.prompt_scored import PromptScored
from kvjax.families.selective import Selective, SelectiveTokens, Tiles
from kvjax.families.streamed import Streamed
from kvjax.families.wrapper import Wrapper
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
from kvjax.methods.registry import METHODS, find_method
from kvjax.methods.rocketkv import RocketKV
from kvjax.methods.snapkv import SnapKV
from kvjax.methods.streaming_llm import StreamingLLM
from kvjax.methods.topk_oracle import TopKOracle
from kvjax.methods.tova import TOVA
from kvjax.methods.twilight import Twilight
from kvjax.methods.vatp import VATP
from kvjax.primitives.rope import Linear, Llama3, LongRope, Rope, Yarn
from kvjax.primitives.softmax_state import State
from kvjax.runtime.forked import Forked
from kvjax.runtime.front import LayerCache, decode, empty_caches, finish, prefill, stacked
from kvjax.runtime.memory import MemoryPlan, plan_memory
from kvjax.runtime.sharding import compiler_options, make_mesh
from kvjax.runtime.shared_prefill import SharedPrefill

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
  "InTurn",
  "InfLLM",
  "InfLLMv2",
  "KVzip",
  "KeyDiff",
  "Knorm",
  "LMInfinite",
  "LagKV",
  "LayerCache",
  "Leaf",
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
  "SelectiveTokens",
  "SharedPrefill",
  "SnapKV",
  "Span",
  "State",
  "Stream",
  "Streamed",
  "StreamingLLM",
  "Tiles",
  "TopKOracle",
  "Traits",
  "Twilight",
  "View",
  "Window",
  "Wrapper",
  "Yarn",
  "compiler_options",
  "decode",
  "empty_caches",
  "fields",
  "find_method",
  "finish",
  "make_mesh",
  "plan_memory",
  "prefill",
  "settings",
  "slots",
  "stacked",
]
