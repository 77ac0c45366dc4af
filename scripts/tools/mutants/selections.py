"""Tests that belong to a file: its own first, then its kernel's, then some laws of its method.

A selection takes half a minute at most without a fault, so that a walk which never ends can be told
from a slow test.
"""

import pathlib
from collections.abc import Sequence

LAWS = "tests/laws"
SETTINGS = "methods/settings"  # what methods refuse, and their presets
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
  "kvjax/runtime/arguments.py": of("laws/front"),
  "kvjax/runtime/drivers.py": of("laws/front"),
  "pallas_kernels/common/addresses.py": of("kernels/addresses"),
  "kvjax/primitives/codes.py": of("methods/quantised", "kernels/quantised_kernel"),
  "kvjax/primitives/once.py": of("methods/once"),
  "kvjax/primitives/trees.py": of("methods/types"),
  "kvjax/core/context.py": of("methods/types", "methods/full"),
  "kvjax/methods/duo_attention/apart.py": of("methods/duo_attention"),
  "kvjax/methods/duo_attention/gates.py": of("methods/duo_attention"),
  "kvjax/methods/ltri/evidence.py": of("methods/ltri"),
  "kvjax/methods/ltri/rates.py": of("methods/ltri"),
  "pallas_kernels/art/walk.py": of("kernels/art_kernel"),
  "pallas_kernels/cis/read.py": of("kernels/cis_read_kernel"),
  "pallas_kernels/codes/enter.py": of("kernels/enter_codes_kernel"),
  "pallas_kernels/decode/dense.py": of("kernels/decode_kernel"),
  "pallas_kernels/decode/sparse.py": of("kernels/sparse_decode_kernel"),
  "pallas_kernels/longflow/victim.py": of("kernels/longflow_kernel"),
  "pallas_kernels/prefill/dense.py": of("kernels/prefill_kernel"),
  "kvjax/methods/longflow/contribution.py": of("methods/longflow", laws=("longflow",)),
  "kvjax/methods/longflow/method.py": of("methods/longflow", SETTINGS, laws=("longflow",)),
  "kvjax/ops/scores.py": of(
    *("methods/quest", "methods/infllm_v2", "methods/topk_oracle", "kernels/score_kernels")
  ),
  "kvjax/methods/cis/kernel.py": of("kernels/cis_kernel", "kernels/cis_read_kernel"),
  "kvjax/methods/cis/retrieval.py": of("methods/cis", "kernels/cis_kernel"),
  "kvjax/methods/cis/similarity.py": of("methods/cis", "kernels/cis_kernel"),
  "kvjax/methods/cis/dilation.py": of("methods/cis", "kernels/cis_kernel"),
  "kvjax/methods/cis/method.py": of("methods/cis", SETTINGS, laws=("cis",)),
  "kvjax/methods/hshare/sharing.py": of("methods/hshare", "kernels/hshare_kernel"),
  "kvjax/methods/hshare/method.py": of("methods/hshare", SETTINGS, laws=("hshare",)),
  "kvjax/methods/art/method.py": of(
    *("methods/art", "methods/art_certificate", SETTINGS), laws=("art",)
  ),
  "kvjax/methods/art/order.py": of("methods/art", laws=("art",)),
  "kvjax/methods/art/splits.py": of("methods/art", laws=("art",)),
  "kvjax/methods/art/walk.py": of("methods/art", "methods/art_certificate", laws=("art",)),
  "kvjax/ops/attention.py": of(
    *("methods/full", "methods/tova", "methods/topk_oracle"), laws=("full", "streaming_llm", "h2o")
  ),
  "kvjax/ops/slot_shards.py": of("devices/context"),
  "kvjax/methods/depth.py": of("methods/psaw", "methods/etf", laws=("psaw",)),
  "kvjax/ops/shared_slots.py": of("methods/adakv", laws=("adakv",)),
  "kvjax/core/slots.py": of("methods/slots", laws=("h2o",)),
  "kvjax/methods/ltri/spans.py": of("methods/spans", "methods/ltri"),
  "kvjax/methods/ltri/vectors.py": of("methods/spans", "methods/ltri"),
  "kvjax/ops/tiles.py": of("methods/selective", "methods/quest", laws=("quest",)),
  **{
    f"kvjax/methods/prr/{name}.py": of("methods/prr", "kernels/prr_kernel")
    for name in ("forecast", "calibration", "speculation", "repair", "hit_rates", "kernel")
  },
  "kvjax/methods/prr/budget.py": of("kernels/speculation"),
  "kvjax/core/plan.py": of("methods/types", "methods/quest", laws=("full", "h2o")),
  "kvjax/families/prompt_scored.py": of(
    "methods/snapkv", "methods/expected_attention", laws=("snapkv",)
  ),
  "kvjax/families/coded.py": of("methods/quantised", "methods/kivi"),
  "kvjax/families/bounded.py": of("methods/h2o", "methods/tova", laws=("h2o", "random")),
  "kvjax/families/entrance.py": of("models/refusals"),
  "kvjax/runtime/forked.py": of("models/forked"),
  "kvjax/methods/art/certificate.py": of("methods/art_certificate"),
  "kvjax/families/forms.py": of("kernels/dispatch", laws=("quest",)),
  "kvjax/families/full.py": of("methods/full", laws=("full",)),
  "kvjax/core/leaves.py": of("methods/full", laws=("h2o", "snapkv")),
  "kvjax/analysis/measured.py": of("methods/certificates"),
  "kvjax/families/method.py": of(
    "methods/full",
    laws=("full", "streaming_llm", "snapkv", "psaw"),
    chosen=(*CHOSEN, "nan_raises_when_asked"),
  ),
  "kvjax/runtime/memory.py": of("devices/memory"),
  "kvjax/ops/offload.py": of("kernels/offload"),
  "kvjax/primitives/ring.py": of("methods/ring", "methods/streaming_llm", laws=("streaming_llm",)),
  "kvjax/families/retrieval.py": of("methods/infllm", "methods/ltri"),
  "kvjax/families/selective.py": of(
    "methods/selective", "methods/topk_oracle", laws=("topk_oracle",)
  ),
  "kvjax/core/settings.py": of("laws/members", "scripts/own_methods"),
  "kvjax/runtime/shared_prefill.py": of(
    "models/refusals", laws=("full", "h2o"), chosen=("shared_prefill",)
  ),
  "kvjax/families/shapes.py": of("models/refusals"),
  "kvjax/families/sight.py": of("methods/windows_by_head", laws=("psaw", "streaming_llm")),
  "kvjax/runtime/sites.py": of("models/by_layer"),
  "kvjax/families/streamed.py": of("methods/infllm", "methods/ltri", laws=("infllm",)),
  "kvjax/primitives/traced_layer.py": of("models/refusals"),
  "kvjax/analysis/traffic.py": of("devices/traffic"),
  "kvjax/runtime/front.py": of("laws/front"),
  "kvjax/runtime/layer_cache.py": of("laws/front"),
  "kvjax/core/traits.py": of("methods/infllm", "methods/ltri"),
  "kvjax/families/sliding.py": of("models/windows"),
  "kvjax/core/cache.py": of("methods/types", "methods/quest", laws=("full", "h2o")),
  "pallas_kernels/art/judge.py": of("kernels/art_kernel", "kernels/art_spread"),
  "pallas_kernels/art/remaining.py": of("kernels/art_kernel", "kernels/art_spread"),
  "pallas_kernels/art/ordering.py": of("kernels/art_kernel"),
  "pallas_kernels/art/reading.py": of("kernels/art_kernel", "kernels/art_codes"),
  "pallas_kernels/art/settle.py": of("kernels/art_kernel", "kernels/art_spread"),
  "pallas_kernels/art/stopping.py": of("kernels/art_kernel"),
  "pallas_kernels/art/spread.py": of("kernels/art_kernel", "kernels/art_spread"),
  "pallas_kernels/longflow/read.py": of("kernels/longflow_kernel"),
  "pallas_kernels/common/bounds.py": of("kernels/top_k_kernel"),
  "pallas_kernels/common/cuts.py": of("kernels/top_k_kernel"),
  "pallas_kernels/common/devices.py": of("kernels/shared_memory", "scripts/tune"),
  "pallas_kernels/common/listing.py": of("kernels/cis_kernel", "kernels/hshare_kernel"),
  "pallas_kernels/common/ranking.py": of("kernels/top_k_kernel"),
  "pallas_kernels/common/search.py": of("kernels/top_k_kernel", "kernels/cis_kernel"),
  "pallas_kernels/common/smoothing.py": of("kernels/prr_kernel"),
  "pallas_kernels/common/split_k.py": of("kernels/sparse_decode_kernel", "kernels/decode_kernel"),
  "pallas_kernels/common/tiling.py": of("kernels/sparse_decode_kernel", "kernels/decode_kernel"),
  "pallas_kernels/products/add_norm.py": of("kernels/product_kernels"),
  "pallas_kernels/cis/anchors.py": of("kernels/cis_kernel"),
  "pallas_kernels/cis/listed.py": of("kernels/cis_kernel"),
  "pallas_kernels/cis/note.py": of("kernels/cis_kernel"),
  "pallas_kernels/insertion/host_blocks.py": of("kernels/offload"),
  "pallas_kernels/selection/key_weights.py": of("kernels/score_kernels"),
  "pallas_kernels/prefill/pieces.py": of("kernels/prefill_pieces"),
  "pallas_kernels/products/product.py": of("kernels/product_kernels"),
  "pallas_kernels/codes/code_words.py": of(
    "kernels/quantised_kernel", "kernels/quantised_sparse_kernel", "kernels/art_codes"
  ),
  "pallas_kernels/common/listed.py": of("kernels/sparse_decode_kernel"),
  "pallas_kernels/codes/dense.py": of("kernels/quantised_kernel"),
  "pallas_kernels/codes/sparse.py": of("kernels/quantised_sparse_kernel"),
  "pallas_kernels/products/qkv_heads.py": of("kernels/product_kernels"),
  "pallas_kernels/selection/page_bounds.py": of("kernels/score_kernels"),
  "pallas_kernels/prr/repair.py": of("kernels/prr_kernel"),
  "pallas_kernels/prr/speculate.py": of("kernels/prr_kernel"),
  "pallas_kernels/prr/ratio.py": of("kernels/speculation"),
  "pallas_kernels/selection/summaries.py": of("kernels/score_kernels"),
}
# Not drawn from: what says which kernels run or how they are cut, needs a GPU, or names things.
LEFT_OUT = (
  *("kvjax/ops/insertion.py", "kvjax/ops/prefill.py", "kvjax/ops/selection.py"),
  *("kvjax/ops/decode.py", "kvjax/ops/summaries.py", "kvjax/ops/table.py"),
  *(
    "pallas_kernels/prefill/cudnn.py",
    "kvjax/methods/registry.py",
    "kvjax/runtime/sharding.py",
    "kvjax/families/wrapper.py",
  ),
  *("kvjax/core/fields.py", "pallas_kernels/common/backend.py", "pallas_kernels/common/config.py"),
  *("pallas_kernels/decode/jax_triton.py", "pallas_kernels/decode/mosaic.py"),
  *("kvjax/__main__.py", "kvjax/_public.py"),
)
ROOMS = ("primitives", "core", "ops", "families", "methods", "runtime", "analysis")
FOLDERS = (*(f"kvjax/{room}" for room in ROOMS), "pallas_kernels")


def files(root: pathlib.Path) -> list[str]:
  """The files that are drawn from, relative to the root."""
  every = (path for folder in FOLDERS for path in sorted((root / folder).glob("**/*.py")))
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
  if path.startswith("kvjax/methods/") and name in ("method", "kernel"):
    name = pathlib.PurePath(path).parent.name
  own = [f"methods/{name}", f"kernels/{name}_kernel"]
  if path.startswith("pallas_kernels/"):
    own = own[1:]
  found = [x for x in own if (root / of(x)[0]).is_file()]
  if not found:
    raise ValueError(f"{path}: found no tests of this name, expected a line in SELECTIONS")
  if path.startswith("kvjax/methods/") and (root / of(SETTINGS)[0]).is_file():
    found.append(SETTINGS)
  lawful = path.startswith("kvjax/methods/") and (root / LAWS).is_dir()
  return of(*found, laws=(name,) if lawful else ())
