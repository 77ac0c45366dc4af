"""Which tests belong to a file: its own first, then its kernel's, then some laws of its method.

A selection takes half a minute at most without a fault, so that a walk which never ends can be told
from a slow test.
"""

import pathlib
from collections.abc import Sequence

LAWS = "tests/laws"
# Those that show most of what a method computes, in a part of the time of all.
CHOSEN = ("neutral_setting", "decode_equals", "chunked_prefill", "kept_positions")


def of(*names: str, laws: Sequence[str] = (), chosen: Sequence[str] = CHOSEN) -> tuple[str, ...]:
  """Arguments of pytest: files "methods/quest" say, and the chosen laws of some methods."""
  files = [pathlib.PurePath("tests") / name for name in names]
  paths = tuple(str(file.with_name(f"test_{file.name}.py")) for file in files)
  if not laws:
    return paths
  cases = " or ".join(f"[{name}]" for name in laws)
  every = " or ".join(f"test_{file.name}.py" for file in files)
  law = f"(({' or '.join(chosen)}) and ({cases}))"
  return *paths, LAWS, "-k", f"{every} or {law}" if every else law


# Files whose tests have other names, or that several methods share.
SELECTIONS: dict[str, tuple[str, ...]] = {
  "kvjax/arguments.py": of("laws/front"),
  "kvjax/drivers.py": of("laws/front"),
  "pallas_kernels/_addresses.py": of("kernels/addresses"),
  "kvjax/dispatch/contributions.py": of("methods/longflow", laws=("longflow",)),
  "kvjax/dispatch/scores.py": of(
    *("methods/quest", "methods/infllm_v2", "methods/topk_oracle", "kernels/score_kernels")
  ),
  "kvjax/dispatch/shared_sets.py": of("methods/hshare", "kernels/hshare_kernel"),
  "kvjax/dispatch/sharing.py": of("methods/cis", "kernels/cis_kernel", "kernels/cis_read_kernel"),
  "kvjax/dispatch/speculation.py": of("methods/prr", "kernels/prr_kernel"),
  "kvjax/dispatch/walk.py": of("methods/art", "methods/art_certificate", laws=("art",)),
  "kvjax/methods/art.py": of("methods/art", "methods/art_certificate", laws=("art",)),
  "kvjax/ops/attention.py": of(
    *("methods/full", "methods/tova", "methods/topk_oracle"), laws=("full", "streaming_llm", "h2o")
  ),
  "kvjax/ops/context.py": of("devices/context"),
  "kvjax/ops/depth.py": of("methods/psaw", "methods/etf", laws=("psaw",)),
  "kvjax/ops/shared_slots.py": of("methods/adakv", laws=("adakv",)),
  "kvjax/ops/slots.py": of("methods/slots", laws=("h2o",)),
  "kvjax/ops/smoothing.py": of("methods/prr"),
  "kvjax/ops/spans.py": of("methods/spans", "methods/ltri"),
  "kvjax/ops/tiles.py": of("methods/selective", "methods/quest", laws=("quest",)),
  "kvjax/predictor.py": of("methods/prr", "kernels/prr_kernel"),
  "kvjax/plans.py": of("methods/types", "methods/quest", laws=("full", "h2o")),
  "kvjax/prompt_scored.py": of("methods/snapkv", "methods/expected_attention", laws=("snapkv",)),
  "kvjax/coded.py": of("methods/quantised", "methods/kivi"),
  "kvjax/bounded.py": of("methods/h2o", "methods/tova", laws=("h2o", "random")),
  "kvjax/entrance.py": of("models/refusals"),
  "kvjax/forked.py": of("models/forked"),
  "kvjax/foresight.py": of("methods/prr"),
  "kvjax/mass_bound.py": of("methods/art_certificate"),
  "kvjax/forms.py": of("kernels/dispatch", laws=("quest",)),
  "kvjax/full.py": of("methods/full", laws=("full",)),
  "kvjax/leaves.py": of("methods/full", laws=("h2o", "snapkv")),
  "kvjax/measured.py": of("methods/certificates"),
  "kvjax/method.py": of(
    "methods/full",
    laws=("full", "streaming_llm", "snapkv", "psaw"),
    chosen=(*CHOSEN, "nan_raises_when_asked"),
  ),
  "kvjax/memory.py": of("devices/memory"),
  "kvjax/offload.py": of("kernels/offload"),
  "kvjax/ring.py": of("methods/ring", "methods/streaming_llm", laws=("streaming_llm",)),
  "kvjax/retrieval.py": of("methods/infllm", "methods/ltri"),
  "kvjax/selective.py": of("methods/selective", "methods/topk_oracle", laws=("topk_oracle",)),
  "kvjax/settings.py": of("laws/members", "scripts/own_methods"),
  "kvjax/shared_prefill.py": of(
    "models/refusals", laws=("full", "h2o"), chosen=("shared_prefill",)
  ),
  "kvjax/shapes.py": of("models/refusals"),
  "kvjax/sight.py": of("methods/windows_by_head", laws=("psaw", "streaming_llm")),
  "kvjax/sites.py": of("models/by_layer"),
  "kvjax/streamed.py": of("methods/infllm", "methods/ltri", laws=("infllm",)),
  "kvjax/traced_layer.py": of("models/refusals"),
  "kvjax/traffic.py": of("devices/traffic"),
  "kvjax/front.py": of("laws/front"),
  "kvjax/traits.py": of("methods/infllm", "methods/ltri"),
  "kvjax/windowed.py": of("models/windows"),
  "kvjax/types.py": of("methods/types", "methods/quest", laws=("full", "h2o")),
  "pallas_kernels/_art_judge.py": of("kernels/art_kernel", "kernels/art_spread"),
  "pallas_kernels/_art_left.py": of("kernels/art_kernel", "kernels/art_spread"),
  "pallas_kernels/_art_order.py": of("kernels/art_kernel"),
  "pallas_kernels/_art_read.py": of("kernels/art_kernel", "kernels/art_codes"),
  "pallas_kernels/_art_settle.py": of("kernels/art_kernel", "kernels/art_spread"),
  "pallas_kernels/_art_stop.py": of("kernels/art_kernel"),
  "pallas_kernels/art_spread.py": of("kernels/art_kernel", "kernels/art_spread"),
  "pallas_kernels/longflow_read.py": of("kernels/longflow_kernel"),
  "pallas_kernels/_bounds.py": of("kernels/top_k_kernel"),
  "pallas_kernels/_cuts.py": of("kernels/top_k_kernel"),
  "pallas_kernels/_lists.py": of("kernels/cis_kernel", "kernels/hshare_kernel"),
  "pallas_kernels/_ranked.py": of("kernels/top_k_kernel"),
  "pallas_kernels/_search.py": of("kernels/top_k_kernel", "kernels/cis_kernel"),
  "pallas_kernels/_smoothing.py": of("kernels/prr_kernel"),
  "pallas_kernels/_split.py": of("kernels/sparse_decode_kernel", "kernels/decode_kernel"),
  "pallas_kernels/_tiles.py": of("kernels/sparse_decode_kernel", "kernels/decode_kernel"),
  "pallas_kernels/add_norm.py": of("kernels/product_kernels"),
  "pallas_kernels/cis_anchors.py": of("kernels/cis_kernel"),
  "pallas_kernels/cis_listed.py": of("kernels/cis_kernel"),
  "pallas_kernels/cis_note.py": of("kernels/cis_kernel"),
  "pallas_kernels/host_blocks.py": of("kernels/offload"),
  "pallas_kernels/key_weights.py": of("kernels/score_kernels"),
  "pallas_kernels/prefill_pieces.py": of("kernels/prefill_pieces"),
  "pallas_kernels/product.py": of("kernels/product_kernels"),
  "pallas_kernels/_codes.py": of(
    "kernels/quantised_kernel", "kernels/quantised_sparse_kernel", "kernels/art_codes"
  ),
  "pallas_kernels/_listed.py": of("kernels/sparse_decode_kernel"),
  "pallas_kernels/quantised_decode.py": of("kernels/quantised_kernel"),
  "pallas_kernels/quantised_sparse.py": of("kernels/quantised_sparse_kernel"),
  "pallas_kernels/qkv_heads.py": of("kernels/product_kernels"),
  "pallas_kernels/quest.py": of("kernels/score_kernels"),
  "pallas_kernels/repair.py": of("kernels/prr_kernel"),
  "pallas_kernels/speculate.py": of("kernels/prr_kernel"),
  "pallas_kernels/speculation.py": of("kernels/speculation"),
  "pallas_kernels/summaries.py": of("kernels/score_kernels"),
}
# Not drawn from: what says which kernels run or how they are cut, needs a GPU, or names things.
LEFT_OUT = (
  *("kvjax/dispatch/entering.py", "kvjax/dispatch/prompt.py", "kvjax/dispatch/selection.py"),
  *("kvjax/dispatch/step.py", "kvjax/dispatch/summaries.py", "kvjax/dispatch/table.py"),
  *("kvjax/ops/cudnn.py", "kvjax/registry.py", "kvjax/sharding.py", "kvjax/wrapper.py"),
  *("kvjax/fields.py", "pallas_kernels/_backend.py", "pallas_kernels/config.py"),
  *("pallas_kernels/decode_jax_triton.py", "pallas_kernels/decode_mosaic.py"),
  *("kvjax/__main__.py", "kvjax/api.py"),
)
FOLDERS = ("kvjax", "kvjax/dispatch", "kvjax/methods", "kvjax/ops", "pallas_kernels")


def files(root: pathlib.Path) -> list[str]:
  """The files that are drawn from, relative to the root."""
  every = (path for folder in FOLDERS for path in sorted((root / folder).glob("*.py")))
  names = (path.relative_to(root).as_posix() for path in every)
  return [name for name in names if name not in LEFT_OUT and not name.endswith("__init__.py")]


def selection(root: pathlib.Path, path: str) -> tuple[str, ...]:
  """pytest's arguments for the tests that a fault in a file should fail.

  Raises:
    ValueError: there are none.
  """
  if path in SELECTIONS:
    return SELECTIONS[path]
  name = pathlib.PurePath(path).stem
  own = [f"methods/{name}", f"kernels/{name}_kernel"]
  if path.startswith("pallas_kernels/"):
    own = own[1:]
  found = [x for x in own if (root / of(x)[0]).is_file()]
  if not found:
    raise ValueError(f"{path}: found no tests of this name, expected a line in SELECTIONS")
  lawful = path.startswith("kvjax/methods/") and (root / LAWS).is_dir()
  return of(*found, laws=(name,) if lawful else ())
