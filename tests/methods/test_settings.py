"""Settings that methods refuse, in which words, and presets; bounds as such: `test_fields.py`."""

import dataclasses
import itertools
import math
import re

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
  ExpectedAttention,
  Full,
  HShare,
  InfLLM,
  InfLLMv2,
  KeyDiff,
  Knorm,
  KVzip,
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


# A field, a value out of its bounds, what is expected, and whose field it is.
BOUNDS = [
  ("agree", "most", "'all' or 'mean'", (CIS,)),
  ("alpha", -1.0, "0 or more, below inf", (PSAW,)),
  ("alpha", 1.5, "0 to 1", (PRR,)),
  ("ballot", "all", "'score' or 'rank'", (Ltri,)),
  ("beta", 0, "1 or more", (PyramidKV,)),
  ("bits", 0, "1 to 16", (Twilight,)),
  ("bits", 8, "4 or 2", (KIVI,)),
  ("bits", 3, "one of (8, 4, 2)", (Quantised,)),
  ("block", 0, "1 or more", (CIS,)),
  ("budget", "much", "0, or 1 or more, or 'auto'", (PRR,)),
  ("budget", 0.5, "0, or 1 or more", (PRR,)),
  ("budget", 0, "1 or more", (KeyDiff, Knorm)),
  ("budget", 1, "2 or more", (H2O, RocketKV, TOVA)),
  ("buffer", 0, "1 or more", (RKV,)),
  ("certify", 2.0, "0 or more, below 2", (ART,)),
  ("channels", 0, "1 or more", (DoubleSparsity,)),
  ("every", 0, "1 or more", (PRR,)),
  ("exact_layers", -1, "0 or more", (Quantised,)),
  ("future", 0, "1 or more", (ExpectedAttention,)),
  ("gamma", -1.0, "0 or more, below inf", (ETF,)),
  ("group", "sum", "'mean' or 'max'", (Quest, RKV)),
  ("group", -1, "0 or more", (Quantised,)),
  ("group", 0, "1 or more", (KIVI,)),
  ("heads", 1.5, "more than 0 and at most 1", (HShare,)),
  ("heads", ((1, 2, 0.5), (1, 3, 0.4)), "one or more, one per layer", (Ltri,)),
  ("heads", (), "one or more", (Ltri,)),
  ("history", 0, "1 or more", (PRR,)),
  ("index", "all", "one of ('dynamic', 'static', 'mean')", (Ltri,)),
  ("inject", 17, "at most retrieved = 16", (InfLLM,)),
  ("k", 0, "1 or more", (CIS,)),
  ("kv", "none", "'previous' or 'project'", (ETF,)),
  ("last", -1, "0 or more", (Ltri,)),
  ("layers", 0.0, "more than 0 and at most 1", (HShare,)),
  ("local", -1, "0 or more", (TopKOracle,)),
  ("local", 0, "1 or more", (CIS, DoubleSparsity, HShare, InfLLM, InfLLMv2)),
  ("margin", 0, "1 or more", (ART,)),
  ("p", 0.0, "more than 0 and at most 1", (Twilight,)),
  ("page", 0, "1 or more", (Quest,)),
  ("patience", 0, "1 or more", (ART,)),
  ("pattern", (), "a tuple of equal tuples", (DuoAttention,)),
  ("pattern", ((1, 0), (1,)), "a tuple of equal tuples", (DuoAttention,)),
  ("pattern", "half", "a tuple of tuples, or 'alternate'", (DuoAttention,)),
  ("per", "head", "'kv_head' or 'layer'", (LongFlow,)),
  ("per", "layer", "'kv_head' or 'query_head'", (CIS,)),
  ("phi", math.nan, "0 or more", (ART,)),
  ("phi", 1.5, "more than 0 and at most 1", (PSAW,)),
  ("pool", 6, "an odd number", (RKV, SnapKV)),
  ("pools", 0, "1 or more", (AdaKV,)),
  ("predictor", "oracle", "one of ('holt', 'ema', 'last')", (PRR,)),
  ("probe", "half", "'strided32' or 'full'", (ART,)),
  ("psi", 0.0, "more than 0 and at most 1", (ETF,)),
  ("quantile", (1.5,), "numbers in [0, 1]", (Ltri,)),
  ("radius", -1, "0 or more", (CIS,)),
  ("ratio", "diagonal", "one of ('row', 'col', 'rowcol')", (Ltri,)),
  ("recent", 0, "1 or more", (LongFlow, Random)),
  ("reduce", "sum", "'avg' or 'max'", (SnapKV,)),
  ("representatives", 0, "1 or more", (InfLLM,)),
  ("rope", "none", "'slot' or 'original'", (StreamingLLM,)),
  ("safeguard", 1.5, "0 to 1", (AdaKV,)),
  (
    "sinks",
    -1,
    "0 or more",
    (ART, CIS, DoubleSparsity, ETF, LagKV, PSAW, StreamingLLM, TopKOracle, VATP),
  ),
  ("start", -0.1, "0 to 1", (ETF,)),
  ("start", 1.5, "0 to 1", (PSAW,)),
  ("steps", 0, "1 or more", (HShare,)),
  ("share", 2, "0 to 1", (CriticalKV,)),
  ("stop", "all", "'group' or 'head'", (ART,)),
  ("tau", -1.0, "0 or more", (ART,)),
  ("tau", math.nan, "a number", (CIS,)),
  ("threshold", math.nan, "a number", (RKV,)),
  ("tile", 0, "1 or more", (ART,)),
  ("top", -1, "0 or more", (InfLLMv2,)),
  ("variant", "S4", "one of ('S1', 'S2', 'S3')", (PRR,)),
  ("vectors", 3, "4 or more", (Ltri,)),
  ("weight", 1.5, "0 to 1", (RKV,)),
  ("window_size", 0, "1 or more", (LagKV, RKV, SnapKV)),
]
# Fields that do not go together, and bases that a method does not go over.
REFUSED = [
  (DuoAttention, {"pattern": ((1, 2),)}, r"DuoAttention\.pattern: .*True for a retrieval head"),
  (DuoAttention, {"pattern": (), "sinks": -1}, r"DuoAttention\.sinks: found -1"),
  (Measured, {"base": Quantised()}, r"Measured\.base: found .*, expected .* holds numbers"),
  (Measured, {"base": Random(8)}, r"Measured\.base: found Random.*expected a method whose"),
  (Measured, {"base": PSAW(KIVI())}, r"Measured\.base: found .*, expected .* holds numbers"),
  (Quantised, {"base": settings.repo(StreamingLLM, 64)}, "Quantised replaces stage"),
  (ART, {"margin": 2, "certify": 0.1}, r"ART\.margin: found 2, expected None with certify"),
  (ART, {"margin": 2, "stop": "head"}, r"ART\.stop: found 'head', expected 'group' with margin"),
  (ART, {"margin": 2, "splits": 4}, r"ART\.splits: found 4, expected 1 with margin"),
  (ART, {"by_mass": 4, "margin": 2}, r"ART\.by_mass: found 4, expected None or infinity with mar"),
  (ART, {"by_mass": 4, "certify": 0.1}, r"ART\.by_mass: found 4, expected None with certify"),
  (ART, {"by_mass": 1.5}, r"ART\.by_mass: found 1\.5, expected a whole number from 1 on, or infin"),
  *(
    (ART, {name: 4, "base": base}, rf"ART\.{name}: found base .*, expected one that keeps every")
    for name in ("margin", "by_mass")
    for base in (SnapKV(24, window_size=4), Quest(24, 4), StreamingLLM(20))
  ),
  (AdaKV, {"base": KVzip(12, 3), "rounded": True}, r"rounded: found True, expected False: KVzip"),
  (KVzip, {"budget": 256}, "budget: found 256, expected more than room = 256"),
  (
    KVzip,
    {"budget": 12, "room": 3, "budgets": (12, 3)},
    r"KVzip\.budgets: found \(12, 3\), expected more than room",
  ),
  (AdaKV, {"base": Full()}, r"AdaKV\.base: found Full\(\), expected a method that cuts"),
  (AdaKV, {"base": LongFlow(40)}, r"AdaKV\.base: .* expected a method without victim, settle"),
  (Measured, {"base": AdaKV()}, r"Measured\.base: .* whose heads have different numbers of slots"),
  (
    Quest,
    {"budget": 64, "base": AdaKV()},
    r"Quest\.base: .* whose heads have different numbers of slots",
  ),
  (ART, {"base": ART()}, "ART replaces attend, and so does its base"),
  (ART, {"base": PRR()}, "ART replaces"),
  (ART, {"certify": 0.1, "splits": 4}, r"ART\.splits: found 4, expected 1 with certify"),
  (ART, {"certify": 0.1, "base": SnapKV(24, window_size=4)}, r"ART\.certify: found base SnapKV"),
  (ART, {"certify": 0.1, "base": Quest(24, page=4)}, r"ART\.certify: found base Quest"),
  (ChunkKV, {"base": SnapKV(64), "chunk": 0}, r"ChunkKV\.chunk: found 0, expected 1 or more"),
  (CIS, {"k": 4, "m": 5}, "m: found 5, expected 0 to k = 4"),
  (
    CIS,
    {"per": "query_head", "agree": "mean"},
    r"agree: found 'mean', expected 'all' where per is",
  ),
  (
    CPE,
    {"per": "query_head", "agree": "mean"},
    r"^CPE: CIS\.agree: found 'mean', expected 'all' wh",
  ),
  (CPE, {"k": 0}, r"^CPE: CIS\.k: found 0"),
  (CPE, {"phi": 2.0}, r"^CPE: PSAW\.phi: found 2\.0"),
  (CPE, {"psi": 0.0}, r"^CPE: ETF\.psi: found 0\.0"),
  (
    DoubleSparsity,
    {"budget": 4, "sinks": 4},
    r"budget: found 4, expected at least sinks \+ local = 4 \+ 1",
  ),
  (ETF, {"base": ETF()}, "ETF replaces active, fill, and so does its base"),
  (ETF, {"base": Freeze()}, "ETF replaces active, and so does its base"),
  (
    H2O,
    {"budget": 8, "recent": 8},
    "recent: found 8, expected at least 1 and less than budget = 8",
  ),
  (H2O, {"recent": 0}, "recent: found 0"),
  (HShare, {"budget": 40}, r"budget: found 40, expected more than sinks \+ local = 8 \+ 32"),
  (InfLLM, {"held": 3, "retrieved": 4}, "InfLLM.held: found 3, expected at least retrieved = 4"),
  (InfLLMv2, {"block": 40}, "block: found 40, expected a multiple of stride = 16"),
  (InfLLMv2, {"kernel": 8}, "kernel: found 8, expected a multiple of stride = 16"),
  (KIVI, {"residual": 100}, "KIVI.residual: found 100, expected a multiple of group = 32"),
  (KIVI, {"base": SnapKV(12, 4)}, "KIVI.base: found SnapKV.*, expected .* slots are positions"),
  (KIVI, {"base": ART(Full())}, "KIVI replaces attend, and so does its base"),
  (KIVI, {"base": Quantised()}, "KIVI replaces insert, attend, and so does its base"),
  (
    LagKV,
    {"budget": 271},
    r"LagKV.budget: found 271, expected at least sinks \+ 2 · window_size = 272",
  ),
  (LMInfinite, {"budget": 16, "limit": 8}, "limit: found 8, expected at least budget = 16"),
  (LongFlow, {"budget": 40, "sinks": 39}, "budget: found 40, expected more than sinks [+] recent"),
  (Ltri, {"from_top": True, "last": 0}, "Ltri.from_top: found True, expected False without"),
  (PRR, {"base": SnapKV(64)}, "PRR.base: found SnapKV"),
  (PRR, {"base": HShare()}, r"PRR.base: found HShare.*, expected a method that selects tiles"),
  (PSAW, {"base": Random(8)}, r"base: found Random.*expected a method whose slots are positions"),
  (PSAW, {"base": Newest()}, "PSAW replaces window, and so does its base"),
  (PSAW, {"base": PSAW()}, "PSAW replaces window, and so does its base"),
  (Quest, {"budget": 8}, "budget: found 8, expected at least one page of 16 tokens"),
  (RKV, {"budget": 8}, "RKV.budget: found 8, expected more than window_size = 8"),
  (Random, {"budget": 8, "recent": 8}, "budget: found 8, expected more than recent = 8"),
  (Quest, {"base": H2O(64)}, r"Quest\.base: found H2O.*without wants_logits of its own"),
  (Quest, {"base": RKV(64)}, r"Quest\.base: found RKV.*without insert of its own"),
  (Quest, {"base": StreamingLLM(64)}, r"Quest\.base: found StreamingLLM.*without window"),
  (Quest, {"base": ART()}, r"Quest\.base: found ART.*without attend of its own"),
  (Quest, {"base": CIS()}, "Quest replaces plan, and so does its base CIS"),
  (Quest, {"base": Quest()}, "Quest replaces .*, and so does its base Quest"),
  (InfLLMv2, {"base": SnapKV(64)}, r"InfLLMv2\.base: found SnapKV.*neighbours in the text"),
  (PRR, {"base": Quest(base=SnapKV(64))}, r"PRR\.base: found Quest.*tiles of all tokens"),
  (RocketKV, {"base": H2O(64)}, r"RocketKV\.base: found H2O.*without wants_logits"),
  (RocketKV, {"base": StreamingLLM(64)}, r"RocketKV\.base: found StreamingLLM.*window"),
  (RocketKV, {"base": Quest()}, r"RocketKV replaces .*, and so does its base Quest"),
  (SnapKV, {"budget": 32}, "SnapKV.budget: found 32, expected more than window_size = 32"),
  (StreamingLLM, {"budget": 4, "sinks": 4}, "budget: found 4, expected more than sinks = 4"),
  (
    StreamingLLMByTurn,
    {"budget": 10, "sinks": 2, "reserve": 9},
    r"reserve: found 9, expected 0 to budget - sinks = 8",
  ),
  (TopKOracle, {"budget": 0}, "budget: found 0, expected at least 1"),
  (TopKOracle, {"budget": 8, "sinks": 4, "local": 5}, "budget: found 8, expected at least 9"),
  (Twilight, {"base": Full()}, r"Twilight\.base: found Full\(\), expected a method that"),
  (Twilight, {"base": HShare(64)}, r"Twilight\.base: found HShare"),
  (Twilight, {"base": Twilight()}, r"Twilight\.base: found Twilight"),
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


def with_subclass(method):
  """A method, and a subclass of another name: an error names the class that was asked for."""
  return method, dataclasses.dataclass(frozen=True)(type("Mine", (method,), {}))


@pytest.mark.parametrize(("field", "value", "expected", "methods"), BOUNDS)
def test_values_out_of_bounds(field, value, expected, methods):
  for cls in itertools.chain(*map(with_subclass, methods)):
    message = f"{cls.__name__}.{field}: found {value!r}, expected {expected}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
      cls(**{field: value})


@pytest.mark.parametrize(("method", "kwargs", "message"), REFUSED)
def test_bad_settings(method, kwargs, message):
  for cls in with_subclass(method):
    with pytest.raises(ValueError, match=message.replace(method.__name__, cls.__name__, 1)):
      cls(**kwargs)


@pytest.mark.parametrize(("method", "heads", "head_dim", "message"), MISFITS)
def test_heads_that_do_not_fit(method, heads, head_dim, message):
  with pytest.raises(ValueError, match=message):
    method.init_caches(CacheSpec(1, 64, heads, 1, head_dim, 1))


@pytest.mark.parametrize(("preset", "size", "made"), PRESETS)
def test_presets(preset, size, made):
  assert preset(type(made), size) == made


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("preset", [settings.example, settings.usual, settings.neutral])
def test_presets_of_no_class_or_no_size(preset):
  for cls, size, error, said in (
    ("snapkv", 64, TypeError, "cls: found 'snapkv', expected the class of a method"),
    (SnapKV(64), 64, TypeError, r"cls: found SnapKV\(.*, expected the class of a method"),
    (SnapKV, "64", TypeError, "SnapKV: found '64' tokens, expected an integer"),
    (InfLLM, 0, ValueError, "InfLLM: found 0 tokens, expected 1 or more"),
  ):
    with pytest.raises(error, match=said):
      preset(cls, size)
