"""Which implementation an operation runs as.

An operation is looked up by (name, implementation). "reference" always exists; a kernel that is
asked for by name and does not exist, or does not take these operands, raises. "auto" means: the
Pallas kernel on a GPU where there is one that has run there (`UNRUN`), does all that the method
needs and finds the shared memory that it needs, the reference otherwise; for a prompt, cuDNN's
attention before either, where it does.
"""

import functools
import importlib
import warnings
from collections.abc import Callable

import jax
from jaxtyping import Array

from kvjax.core.context import At

# operation -> implementation -> (module, function) of a kernel
KERNELS: dict[str, dict[str, tuple[str, str]]] = {
  "enter_token": {"pallas": ("kvjax.kernels.insertion.enter_token", "enter_token")},
  "enter_codes": {"pallas": ("kvjax.kernels.codes.enter", "enter_codes")},
  "keep_rows": {"pallas": ("kvjax.kernels.insertion.keep_rows", "keep")},
  "longflow_victim": {"pallas": ("kvjax.kernels.longflow.victim", "victim")},
  "longflow_read": {"pallas": ("kvjax.kernels.longflow.read", "read")},
  "product": {"pallas": ("kvjax.kernels.products.product", "product")},
  "partial_products": {"pallas": ("kvjax.kernels.products.product", "partial_products")},
  "gated_product": {"pallas": ("kvjax.kernels.products.product", "gated_product")},
  "add_norm": {"pallas": ("kvjax.kernels.products.add_norm", "add_norm")},
  "qkv_heads": {"pallas": ("kvjax.kernels.products.qkv_heads", "qkv_heads")},
  "attend_span": {
    "pallas": ("kvjax.kernels.decode.dense", "decode_with_output"),
    "jax-triton": ("kvjax.kernels.decode.jax_triton", "decode_with_output"),
  },
  # The same kernels, where heads share slots.
  "enter_shared": {"pallas": ("kvjax.kernels.insertion.enter_token", "enter_token")},
  "attend_shared": {"pallas": ("kvjax.kernels.decode.dense", "decode_with_output")},
  "attend_quantised": {"pallas": ("kvjax.kernels.codes.dense", "decode_attention")},
  "attend_quantised_table": {"pallas": ("kvjax.kernels.codes.sparse", "sparse_decode")},
  "append_blocks": {"pallas": ("kvjax.kernels.insertion.host_blocks", "append")},
  "fetch_blocks": {"pallas": ("kvjax.kernels.insertion.host_blocks", "fetch")},
  "attend_table": {"pallas": ("kvjax.kernels.decode.sparse", "sparse_decode")},
  "attend_prompt": {
    "cudnn": ("kvjax.kernels.prefill.cudnn", "attend_causal"),
    "pallas": ("kvjax.kernels.prefill.dense", "prefill_attention"),
  },
  "attend_prompt_pieces": {"cudnn": ("kvjax.kernels.prefill.pieces", "attend_in_pieces")},
  "column_mass": {"pallas": ("kvjax.kernels.prefill.dense", "column_mass")},
  "art": {"pallas": ("kvjax.kernels.art.walk", "walk")},
  "art_quantised": {"pallas": ("kvjax.kernels.art.walk", "walk")},
  "art_splits": {"pallas": ("kvjax.kernels.art.walk", "choose_splits")},
  "page_bounds": {"pallas": ("kvjax.kernels.selection.page_bounds", "page_bounds")},
  "key_logits": {"pallas": ("kvjax.kernels.selection.key_weights", "key_logits")},
  "key_weights": {"pallas": ("kvjax.kernels.selection.key_weights", "key_weights")},
  "renew_extremes": {"pallas": ("kvjax.kernels.selection.summaries", "renew_extremes")},
  "renew_mean": {"pallas": ("kvjax.kernels.selection.summaries", "renew_mean")},
  "cis_anchors": {"pallas": ("kvjax.kernels.cis.anchors", "anchors")},
  # The same kernel, where KV heads that retrieve are scored on the way, by all of their queries.
  "cis_logits": {"pallas": ("kvjax.kernels.cis.anchors", "anchors")},
  "cis_found_listed": {"pallas": ("kvjax.kernels.cis.listed", "found_and_listed")},
  "cis_listed": {"pallas": ("kvjax.kernels.cis.listed", "listed")},
  "cis_read": {"pallas": ("kvjax.kernels.cis.read", "read")},
  "cis_note": {"pallas": ("kvjax.kernels.cis.note", "note")},
  "hshare_listed": {"pallas": ("kvjax.kernels.selection.hshare", "listed")},
  "best_tiles": {"pallas": ("kvjax.kernels.selection.top_k", "best")},
  "best_tiles_of_each": {"pallas": ("kvjax.kernels.selection.top_k", "best_of_each")},
  "other_tiles": {"pallas": ("kvjax.kernels.selection.top_k", "others")},
  "attend_tiles": {"pallas": ("kvjax.kernels.prr.speculate", "attend_tiles")},
  "speculate": {"pallas": ("kvjax.kernels.prr.speculate", "speculate")},
  "speculate_keys": {"pallas": ("kvjax.kernels.prr.speculate", "speculate_keys")},
  "speculation_ratio": {"pallas": ("kvjax.kernels.prr.ratio", "ratio")},
  "repair": {"pallas": ("kvjax.kernels.prr.repair", "repair")},
}

# Kernels that equal their references in the interpreter, where programs run one after another, and
# compile, but have not run and been timed on a GPU in their present form: "auto" leaves them alone.
UNRUN: set[str] = set()


def kernel(operation: str, impl: str) -> Callable:
  """The kernel of an operation; NotImplementedError names both if there is none."""
  try:
    module, function = KERNELS[operation][impl]
  except KeyError:
    have = ", ".join(["reference", *KERNELS.get(operation, {})])
    raise NotImplementedError(
      f"{operation}: no {impl!r} implementation (there is: {have})"
    ) from None
  return getattr(importlib.import_module(module), function)


def choose(operation: str, impl: str, q: Array | None = None, k: Array | None = None) -> str:
  """Resolves "auto" for the default backend; other names are returned as they are.

  Args:
    operation, impl: a name in `KERNELS`, and as in `kvjax.Env`.
    q: queries [B, K, G, ...] of attention; for operations without any, None.
    k: the keys [..., H] of that attention.

  Raises:
    NotImplementedError: the kernel that `impl` names wants more shared memory than the device has,
      or a lowering that this jax lacks; "auto" takes the reference there, and says so once.
  """
  trusted = "pallas" in KERNELS.get(operation, {}) and operation not in UNRUN
  if impl == "reference" or (impl == "auto" and not (trusted and jax.default_backend() == "gpu")):
    return "reference"
  if lacking := unlowered():
    if impl != "auto":
      raise NotImplementedError(f"{operation}: the {impl!r} kernel {lacking}")
    _say_once(f"a GPU kernel {lacking}: impl='auto' takes the reference")
    return "reference"
  beyond = "" if q is None or k is None else beyond_device(operation, q, k)
  if beyond and impl != "auto":
    raise NotImplementedError(f"{operation}: the {impl!r} kernel {beyond}")
  if beyond:
    _say_once(f"{operation}: the kernel {beyond}: impl='auto' takes the reference")
    return "reference"
  return "pallas" if impl == "auto" else impl


@functools.cache
def unlowered() -> str:
  """What this jax lacks of what kernels are lowered by, in words; empty if nothing."""
  try:
    importlib.import_module("kvjax.kernels.common.backend")
  except ImportError as error:
    return f"needs jax.experimental.pallas.triton, which jax {jax.__version__} lacks ({error})"
  return ""


def beyond_device(operation: str, q: Array, k: Array) -> str:
  """What the default device lacks of what a kernel needs, in words; empty if nothing."""
  if jax.default_backend() != "gpu":
    return ""  # the interpreter has all memory there is
  config = importlib.import_module("kvjax.kernels.common.config")
  here, groups, head_dim = config.this_device(), q.shape[2], k.shape[-1]
  shape = {"groups": groups, "head_dim": head_dim, "itemsize": k.dtype.itemsize}
  if (needed := config.least_shared(operation, **shape)) <= here.shared:
    return ""
  return (
    f"needs {needed} bytes of shared memory for {groups} query heads of {head_dim} {k.dtype.name} "
    f"per key/value head, of which {here.name} has {here.shared}"
  )


@functools.cache
def _say_once(message: str) -> None:
  warnings.warn(message, stacklevel=3)


def pallas(
  at: At, operation: str, q: Array | None = None, k: Array | None = None, *, whole: bool = False
) -> Callable | None:
  """The Pallas kernel of an operation where it is what runs, as `choose` says; None: the reference.

  `whole`: it takes a cache's slots for all there are; the reference runs where they are split.
  """
  if (whole and at.env.slot_axis) or choose(operation, at.env.impl, q, k) != "pallas":
    return None
  return kernel(operation, "pallas")
