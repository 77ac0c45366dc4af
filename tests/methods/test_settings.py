"""Settings that methods refuse, in which words, and presets; bounds as such: `test_fields.py`."""

import dataclasses
import math

import pytest

from kvjax import (
  ART,
  CIS,
  CPE,
  ETF,
  H2O,
  KIVI,
  PRR,
  PSAW,
  RKV,
  TOVA,
  VATP,
  AdaKV,
  CacheSpec,
  ChunkKV,
  CriticalKV,
  DoubleSparsity,
  DuoAttention,
  Full,
  HShare,
  InfLLM,
  InfLLMv2,
  LagKV,
  LMInfinite,
  LongFlow,
  Ltri,
  Measured,
  PyramidKV,
  Quantised,
  Quest,
  Random,
  RocketKV,
  SnapKV,
  StreamingLLM,
  TopKOracle,
  Twilight,
  settings,
)
from kvjax.methods.streaming_llm import StreamingLLMByTurn


@dataclasses.dataclass(frozen=True)
class Freeze(Full):
  """Somebody else's freezing."""

  def active(self, at, tokens, total):
    return None


@dataclasses.dataclass(frozen=True)
class Newest(Full):
  """A positional method with a window of its own."""

  def window(self, at, qpos):
    return None


REFUSED = [
  (AdaKV, {"base": Full()}, r"AdaKV\.base: found Full\(\), expected a method that cuts"),
  (AdaKV, {"base": LongFlow(40)}, r"AdaKV\.base: .* expected a method without victim, settle"),
  (AdaKV, {"safeguard": 1.5}, r"AdaKV\.safeguard: found 1\.5, expected 0 to 1"),
  (AdaKV, {"pools": 0}, r"AdaKV\.pools: found 0"),
  (Measured, {"base": AdaKV()}, r"Measured\.base: .* whose heads have different numbers of slots"),
  (
    Quest,
    {"budget": 64, "base": AdaKV()},
    r"Quest\.base: .* whose heads have different numbers of slots",
  ),
  (ART, {"tau": -1.0}, r"ART\.tau: found -1\.0, expected 0 or more"),
  (ART, {"phi": float("nan")}, r"ART\.phi: found nan, expected 0 or more"),
  (ART, {"patience": 0}, r"ART\.patience: found 0, expected 1 or more"),
  (ART, {"sinks": -1}, r"ART\.sinks: found -1, expected 0 or more"),
  (ART, {"tile": 0}, r"ART\.tile: found 0, expected 1 or more"),
  (ART, {"probe": "half"}, r"ART\.probe: found 'half', expected 'strided32' or 'full'"),
  (ART, {"stop": "all"}, r"ART\.stop: found 'all', expected 'group' or 'head'"),
  (ART, {"base": ART()}, "ART replaces attend, and so does its base"),
  (ART, {"certify": 2.0}, r"ART\.certify: found 2\.0, expected 0 or more, below 2"),
  (ART, {"certify": 0.1, "splits": 4}, r"ART\.splits: found 4, expected 1 with certify"),
  (ART, {"certify": 0.1, "base": SnapKV(24, window_size=4)}, r"ART\.certify: found base SnapKV"),
  (ART, {"certify": 0.1, "base": Quest(24, page=4)}, r"ART\.certify: found base Quest"),
  (ChunkKV, {"base": SnapKV(64), "chunk": 0}, r"ChunkKV\.chunk: found 0, expected 1 or more"),
  (CIS, {"k": 0}, "k: found 0, expected 1 or more"),
  (CIS, {"sinks": -1}, "sinks: found -1, expected 0 or more"),
  (CIS, {"local": 0}, "local: found 0, expected 1 or more"),
  (CIS, {"block": 0}, "block: found 0, expected 1 or more"),
  (CIS, {"radius": -1}, "radius: found -1, expected 0 or more"),
  (CIS, {"k": 4, "m": 5}, "m: found 5, expected 0 to k = 4"),
  (CIS, {"tau": float("nan")}, "tau: found nan, expected a number"),
  (CIS, {"per": "layer"}, "per: found 'layer', expected 'kv_head' or 'query_head'"),
  (CPE, {"k": 0}, r"CIS\.k: found 0"),
  (CPE, {"phi": 2.0}, r"PSAW\.phi: found 2\.0"),
  (CPE, {"psi": 0.0}, r"ETF\.psi: found 0\.0"),
  (DoubleSparsity, {"channels": 0}, "channels: found 0, expected 1 or more"),
  (DoubleSparsity, {"local": 0}, "local: found 0, expected 1 or more"),
  (DoubleSparsity, {"sinks": -1}, "sinks: found -1"),
  (
    DoubleSparsity,
    {"budget": 4, "sinks": 4},
    r"budget: found 4, expected at least sinks \+ local = 4 \+ 1",
  ),
  (
    DuoAttention,
    {"pattern": "half"},
    r"DuoAttention\.pattern: .*found 'half', expected a tuple of tuples, or 'alternate'",
  ),
  (DuoAttention, {"pattern": ()}, r"DuoAttention\.pattern: .*a tuple of equal tuples"),
  (DuoAttention, {"pattern": ((1, 0), (1,))}, r"DuoAttention\.pattern: .*a tuple of equal tuples"),
  (DuoAttention, {"pattern": ((1, 2),)}, r"DuoAttention\.pattern: .*True for a retrieval head"),
  (ETF, {"base": ETF()}, "ETF replaces active, fill, and so does its base"),
  (ETF, {"base": Freeze()}, "ETF replaces active, and so does its base"),
  (ETF, {"sinks": -1}, "sinks: found -1, expected 0 or more"),
  (ETF, {"psi": 0.0}, "psi: found 0.0, expected more than 0 and at most 1"),
  (ETF, {"gamma": -1.0}, "gamma: found -1.0, expected 0 or more"),
  (ETF, {"start": -0.1}, "start: found -0.1, expected 0 to 1"),
  (ETF, {"kv": "none"}, "kv: found 'none', expected 'previous' or 'project'"),
  (H2O, {"budget": 1}, "budget: found 1, expected 2 or more"),
  (
    H2O,
    {"budget": 8, "recent": 8},
    "recent: found 8, expected at least 1 and less than budget = 8",
  ),
  (H2O, {"recent": 0}, "recent: found 0"),
  (HShare, {"layers": 0.0}, "layers: found 0.0, expected more than 0 and at most 1"),
  (HShare, {"heads": 1.5}, "heads: found 1.5"),
  (HShare, {"steps": 0}, "steps: found 0, expected 1 or more"),
  (HShare, {"local": 0}, "local: found 0, expected 1 or more"),
  (HShare, {"budget": 40}, r"budget: found 40, expected more than sinks \+ local = 8 \+ 32"),
  (InfLLM, {"representatives": 0}, "InfLLM.representatives: found 0"),
  (InfLLM, {"local": 0}, "InfLLM.local: found 0, expected 1 or more"),
  (InfLLM, {"held": 3, "retrieved": 4}, "InfLLM.held: found 3, expected at least retrieved = 4"),
  (InfLLM, {"inject": 17}, "InfLLM.inject: found 17, expected at most retrieved = 16"),
  (InfLLMv2, {"top": -1}, "top: found -1, expected 0 or more"),
  (InfLLMv2, {"local": 0}, "local: found 0, expected 1 or more"),
  (InfLLMv2, {"block": 40}, "block: found 40, expected a multiple of stride = 16"),
  (InfLLMv2, {"kernel": 8}, "kernel: found 8, expected a multiple of stride = 16"),
  (KIVI, {"bits": 8}, "KIVI.bits: found 8, expected 4 or 2"),
  (KIVI, {"group": 0}, "KIVI.group: found 0, expected 1 or more"),
  (KIVI, {"residual": 100}, "KIVI.residual: found 100, expected a multiple of group = 32"),
  (KIVI, {"base": SnapKV(12, 4)}, "KIVI.base: found SnapKV.*, expected .* slots are positions"),
  (KIVI, {"base": ART(Full())}, "KIVI replaces attend, and so does its base"),
  (KIVI, {"base": Quantised()}, "KIVI replaces insert, attend, and so does its base"),
  (Quantised, {"base": KIVI()}, "Quantised replaces insert, and so does its base"),
  (
    LagKV,
    {"budget": 271},
    r"LagKV.budget: found 271, expected at least sinks \+ 2 · window_size = 272",
  ),
  (LagKV, {"sinks": -1}, "LagKV.sinks: found -1, expected 0 or more"),
  (LagKV, {"window_size": 0}, "LagKV.window_size: found 0, expected 1 or more"),
  (LMInfinite, {"budget": 16, "limit": 8}, "limit: found 8, expected at least budget = 16"),
  (LongFlow, {"per": "head"}, "per: found 'head', expected 'kv_head' or 'layer'"),
  (LongFlow, {"recent": 0}, "recent: found 0, expected 1 or more"),
  (LongFlow, {"budget": 40, "sinks": 39}, "budget: found 40, expected more than sinks [+] recent"),
  (Ltri, {"ratio": "diagonal"}, "Ltri.ratio: found 'diagonal'"),
  (Ltri, {"vectors": 3}, "Ltri.vectors: found 3, expected 4 or more"),
  (Ltri, {"quantile": (1.5,)}, r"Ltri.quantile: found \(1.5,\)"),
  (Ltri, {"heads": ((1, 2, 0.5), (1, 3, 0.4))}, "Ltri.heads: found"),
  (Ltri, {"heads": ()}, "Ltri.heads: found"),
  (Ltri, {"last": -1}, "Ltri.last: found -1"),
  (Ltri, {"index": "all"}, "Ltri.index: found 'all'"),
  (Ltri, {"ballot": "all"}, "Ltri.ballot: found 'all'"),
  (Ltri, {"from_top": True, "last": 0}, "Ltri.from_top: found True, expected False without"),
  (PRR, {"base": SnapKV(64)}, "PRR.base: found SnapKV"),
  (PRR, {"budget": "much"}, "PRR.budget: found 'much', expected 0, or 1 or more, or 'auto'"),
  (PRR, {"budget": 0.5}, "PRR.budget: found 0.5, expected 0, or 1 or more"),
  (PRR, {"variant": "S4"}, "PRR.variant: found 'S4', expected one of"),
  (PRR, {"predictor": "oracle"}, "PRR.predictor: found 'oracle', expected 'holt' or 'ema'"),
  (PRR, {"alpha": 1.5}, "PRR.alpha: found 1.5, expected 0 to 1"),
  (PRR, {"history": 0}, "PRR.history: found 0, expected 1 or more"),
  (PRR, {"every": 0}, "PRR.every: found 0, expected 1 or more"),
  (PRR, {"base": HShare()}, r"PRR.base: found HShare.*, expected a method that selects tiles"),
  (PSAW, {"base": Random(8)}, r"base: found Random.*expected a method whose slots are positions"),
  (PSAW, {"base": Newest()}, "PSAW replaces window, and so does its base"),
  (PSAW, {"base": PSAW()}, "PSAW replaces window, and so does its base"),
  (PSAW, {"sinks": -1}, "sinks: found -1, expected 0 or more"),
  (PSAW, {"phi": 0.0}, "phi: found 0.0, expected more than 0 and at most 1"),
  (PSAW, {"phi": 1.5}, "phi: found 1.5"),
  (PSAW, {"alpha": -1.0}, "alpha: found -1.0, expected 0 or more"),
  (PSAW, {"start": 1.5}, "start: found 1.5, expected 0 to 1"),
  (PyramidKV, {"beta": 0}, r"PyramidKV.beta: found 0, expected 1 or more"),
  (Quantised, {"bits": 3}, r"bits: found 3, expected one of \(8, 4, 2\)"),
  (Quantised, {"exact_layers": -1}, "exact_layers: found -1, expected 0 or more"),
  (Quantised, {"group": -1}, "group: found -1, expected 0 or more"),
  (Quantised, {"base": RKV()}, "Quantised replaces insert"),
  (Quest, {"page": 0}, "page: found 0, expected 1 or more"),
  (Quest, {"budget": 8}, "budget: found 8, expected at least one page of 16 tokens"),
  (Quest, {"group": "sum"}, "group: found 'sum'"),
  (RKV, {"budget": 8}, "RKV.budget: found 8, expected more than window_size = 8"),
  (RKV, {"buffer": 0}, "RKV.buffer: found 0, expected 1 or more"),
  (RKV, {"window_size": 0}, "RKV.window_size: found 0, expected 1 or more"),
  (RKV, {"pool": 6}, "RKV.pool: found 6, expected an odd number"),
  (RKV, {"weight": 1.5}, "RKV.weight: found 1.5, expected 0 to 1"),
  (RKV, {"threshold": math.nan}, "RKV.threshold: found nan, expected a number"),
  (RKV, {"group": "sum"}, "RKV.group: found 'sum', expected 'mean' or 'max'"),
  (Random, {"budget": 8, "recent": 8}, "budget: found 8, expected more than recent = 8"),
  (Random, {"recent": 0}, "recent: found 0"),
  (Quest, {"base": H2O(64)}, r"Quest\.base: found H2O.*without wants_logits of its own"),
  (Quest, {"base": RKV(64)}, r"Quest\.base: found RKV.*without insert of its own"),
  (Quest, {"base": StreamingLLM(64)}, r"Quest\.base: found StreamingLLM.*without window"),
  (Quest, {"base": ART()}, r"Quest\.base: found ART.*without attend of its own"),
  (Quest, {"base": CIS()}, "Quest replaces plan, and so does its base CIS"),
  (Quest, {"base": Quest()}, "Quest replaces .*, and so does its base Quest"),
  (InfLLMv2, {"base": SnapKV(64)}, r"InfLLMv2\.base: found SnapKV.*neighbours in the text"),
  (PRR, {"base": Quest(base=SnapKV(64))}, r"PRR\.base: found Quest.*tiles of all tokens"),
  (RocketKV, {"budget": 1}, r"RocketKV\.budget: found 1, expected 2 or more"),
  (RocketKV, {"base": H2O(64)}, r"RocketKV\.base: found H2O.*without wants_logits"),
  (RocketKV, {"base": StreamingLLM(64)}, r"RocketKV\.base: found StreamingLLM.*window"),
  (RocketKV, {"base": Quest()}, r"RocketKV replaces .*, and so does its base Quest"),
  (SnapKV, {"budget": 32}, "SnapKV.budget: found 32, expected more than window_size = 32"),
  (SnapKV, {"pool": 4}, "SnapKV.pool: found 4, expected an odd number"),
  (SnapKV, {"window_size": 0}, "SnapKV.window_size: found 0"),
  (SnapKV, {"reduce": "sum"}, "SnapKV.reduce: found 'sum'"),
  (StreamingLLM, {"budget": 4, "sinks": 4}, "budget: found 4, expected more than sinks = 4"),
  (StreamingLLM, {"sinks": -1}, "sinks: found -1"),
  (StreamingLLM, {"rope": "none"}, "rope: found 'none'"),
  (
    StreamingLLMByTurn,
    {"budget": 10, "sinks": 2, "reserve": 9},
    r"reserve: found 9, expected 0 to budget - sinks = 8",
  ),
  (TopKOracle, {"budget": 0}, "budget: found 0, expected at least 1"),
  (TopKOracle, {"budget": 8, "sinks": 4, "local": 5}, "budget: found 8, expected at least 9"),
  (TopKOracle, {"sinks": -1}, "sinks: found -1, expected 0 or more"),
  (TopKOracle, {"local": -1}, "local: found -1"),
  (TOVA, {"budget": 1}, "budget: found 1, expected 2 or more"),
  (Twilight, {"base": Full()}, r"Twilight\.base: found Full\(\), expected a method that"),
  (Twilight, {"base": HShare(64)}, r"Twilight\.base: found HShare"),
  (Twilight, {"base": Twilight()}, r"Twilight\.base: found Twilight"),
  (Twilight, {"p": 0.0}, r"Twilight\.p: found 0\.0, expected more than 0 and at most 1"),
  (Twilight, {"bits": 0}, r"Twilight\.bits: found 0, expected 1 to 16"),
  (VATP, {"sinks": -1}, "VATP.sinks: found -1"),
  (VATP, {"budget": 40}, "VATP.budget: found 40, expected more than recent [+] sinks = 20 [+] 20"),
]
# The authors' repository, an example of some budget, what keeps everything of some length.
PRESETS = [
  (settings.repo, 100, LongFlow(100, window_size=32, pool=5, reduce="avg", per="layer")),
  (settings.repo, 100, PyramidKV(100, window_size=8, pool=7, reduce="max")),
  (settings.repo, 1024, Quest(1024, group="max")),
  (settings.repo, 100, RKV(100, weight=0.1, group="max", spare_oldest=True)),
  (settings.repo, 100, SnapKV(100, window_size=32, pool=7, reduce="max")),
  (settings.example, 64, ChunkKV(SnapKV(64, 16), chunk=10)),
  (settings.neutral, 64, ChunkKV(SnapKV(65, 32))),
  (settings.example, 64, CriticalKV(SnapKV(64, 16))),
  (settings.neutral, 64, CriticalKV(SnapKV(65, 32))),
  (settings.example, 256, RocketKV(256, base=SnapKV(512, 32, 63))),
  (settings.neutral, 40, RocketKV(82, base=SnapKV(41, 32))),
  (settings.example, 64, Twilight(Quest(64))),
  (settings.neutral, 64, Twilight(Quest(80), p=1.0)),
]
# Cuts of a head that heads of a model do not have.
MISFITS = [
  (AdaKV(pools=4), 6, 16, r"AdaKV\.pools: found 4, expected a divisor of the 6 key/value heads"),
  (KIVI(), 1, 48, "KIVI.group: found 32 for heads of 48 channels, expected a divisor of them"),
  (KIVI(), 1, 12, "found head_dim = 12 and bits = 2, expected a head_dim that is a multiple of 8"),
  (
    Quantised(group=6),
    1,
    16,
    "Quantised.group: found 6 for heads of 16 channels, expected a divisor of them, or 0",
  ),
  (
    Quantised(bits=4),
    1,
    6,
    "found head_dim = 6 and bits = 4, expected a head_dim that is a multiple of 4",
  ),
]


@pytest.mark.parametrize(("method", "kwargs", "message"), REFUSED)
def test_bad_settings(method, kwargs, message):
  with pytest.raises(ValueError, match=message):
    method(**kwargs)


@pytest.mark.parametrize(("method", "heads", "head_dim", "message"), MISFITS)
def test_heads_that_do_not_fit(method, heads, head_dim, message):
  with pytest.raises(ValueError, match=message):
    method.init_caches(CacheSpec(1, 64, heads, 1, head_dim, 1))


@pytest.mark.parametrize(("preset", "size", "made"), PRESETS)
def test_presets(preset, size, made):
  assert preset(type(made), size) == made
