"""Every registered method as a case of the laws."""

from kvjax import METHODS, Quest
from kvjax.testing import Case
from kvjax.testing.cases import BUDGET

# What decoders as shallow as these need for a method to do something, and why.
SETTINGS = {
  "quest": {"dense_layers": 1},  # the paper's two would be all there are
  "prr": {"base": Quest(BUDGET, page=4, dense_layers=1)},
  "twilight": {"base": Quest(BUDGET, page=4, dense_layers=1)},
  "psaw": {"start": 0.5},  # a quarter of two layers is none; so below
  "cpe": {"start": 0.5},
  "etf": {"start": 0.33},
  "quantised": {"bits": 4},  # with 8 these decoders hardly notice
}


NOBODY = "the paper protects no token from the cut of the prompt"


MORE = {
  "pyramidkv": {"layers": 3},  # a capacity for the first, the last and those between
  "etf": {"layers": 3},  # frozen in the top layer alone, no token is missed by anybody
  "tova": {"drops_newest": NOBODY},
  "knorm": {"drops_newest": NOBODY},
  "keydiff": {"drops_newest": NOBODY},
  "topk_oracle": {"skips_newest": "reads what weighs most and nothing else"},
  "rocketkv": {"skips_newest": "the paper forces no page"},
  "twilight": {"skips_newest": "the mass decides, of a forced page too"},
}


# Every layer of these does the same, and none hears of another: one shows it.
ONE_LAYER = {
  *("streaming_llm", "lm_infinite", "random", "h2o", "tova", "vatp", "snapkv", "adakv", "r_kv"),
  "longflow",
  *("topk_oracle", "infllm_v2", "double_sparsity", "cis", "infllm", "art"),
  *("expected_attention", "knorm", "keydiff", "kvzip", "quantised", "kivi"),
  *("lagkv", "chunkkv", "criticalkv", "rocketkv"),
}


# Methods whose authors' repository computes something else than their paper.
HAVE_REPO = {
  *("streaming_llm", "snapkv", "pyramidkv", "r_kv", "longflow", "quest", "infllm_v2"),
  *("double_sparsity", "adakv"),
}


CASES = {
  name: Case(
    method,
    tuple(SETTINGS.get(name, {}).items()),
    has_repo=name in HAVE_REPO,
    **{"layers": 2 - (name in ONE_LAYER), **MORE.get(name, {})},
  )
  for name, method in METHODS.items()
}


# What drivers and families do, not the single method: the core asks one method of each kind.
FAMILIES = {
  *("full", "snapkv", "quest", "infllm", "art"),  # all, a cut, selective, streamed, a wrapper
}
