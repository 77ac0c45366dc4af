"""HShare in one launch: the sets that a step reads, and its plan's table."""

from jaxtyping import Array, Int

from kvjax.core.cache import Cache
from kvjax.core.context import At
from kvjax.core.plan import Plan
from kvjax.methods.hshare import sharing
from kvjax.methods.hshare.sharing import Sets
from kvjax.ops.table import declare, pallas

declare("hshare_listed", pallas="kvjax.kernels.selection.hshare:listed")


def share_sets(
  at: At,
  cache: Cache,
  visible: Plan,
  retrieved: Int[Array, "B N k"],
  of_layers: Int[Array, "B K L k"],
  **how: int,
) -> Sets:
  """`sharing.share_sets`, by a kernel where one runs."""
  span, ends = visible.span, not visible.needs.own_span  # the kernel's end at the newest token
  if ends and (run := pallas(at, "hshare_listed")):
    shares = cache.heads["heavy"], cache.heads["from_head"], cache.rows["from_layer"]
    operands = retrieved, *shares, cache.seen, span.start, of_layers
    return Sets(*run(*operands, slots=cache.size, span_sinks=span.sinks, **how))
  return sharing.share_sets(cache, visible, retrieved, of_layers, **how)
