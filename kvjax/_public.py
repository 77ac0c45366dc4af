"""Table of the public names of `kvjax`, each imported when it is first used.

`__init__.pyi`, which type checkers read, is made of it by `python -m scripts.tools.tables`.
"""

import importlib
from typing import Any

from kvjax.methods import TABLE

# Module -> its public names; those of methods stand in their table.
_OF = {
  "kvjax.analysis.measured": "Measured",
  "kvjax.core": "fields settings slots",
  "kvjax.core.cache": "Cache CacheSpec",
  "kvjax.core.context": "Active At Carry Env OwnRows Prompt Turn",
  "kvjax.core.leaves": "Leaf",
  "kvjax.core.plan": "Attended Plan Span View Window",
  "kvjax.core.traits": "Stream Traits",
  "kvjax.families.bounded": "Bounded InTurn",
  "kvjax.families.method": "Method",
  "kvjax.families.prompt_scored": "PromptScored",
  "kvjax.families.selective": "Selective SelectiveTokens Tiles",
  "kvjax.families.streamed": "Streamed",
  "kvjax.families.wrapper": "Wrapper",
  "kvjax.methods.registry": "METHODS find_method",
  "kvjax.primitives.rope": "Linear Llama3 LongRope Rope Yarn",
  "kvjax.primitives.softmax_state": "State",
  "kvjax.models.decode.pipeline": "pipeline",
  "kvjax.runtime.forked": "Forked",
  "kvjax.runtime.front": "decode finish prefill",
  "kvjax.runtime.layer_cache": "LayerCache empty_caches stacked",
  "kvjax.runtime.memory": "MemoryPlan plan_memory",
  "kvjax.runtime.sharding": "compiler_options make_mesh",
  "kvjax.runtime.shared_prefill": "SharedPrefill",
}
MODULES = {name: module for module, names in _OF.items() for name in names.split()}
MODULES |= {where.partition(":")[2]: where.partition(":")[0] for where in TABLE.values()}


def find(name: str) -> Any:
  """A public name: a class, a function or a module."""
  module = importlib.import_module(MODULES[name])
  if name not in vars(module):
    return importlib.import_module(f"{MODULES[name]}.{name}")
  return vars(module)[name]
