"""Faults that change no result: by file and by the line as the fault leaves it, with the reason.

A fault that survives and stands here is counted apart. One that a test fails is not looked for.
"""

from scripts.tools.mutants.sites import Site

_DIVISOR = "what is divided by it is 0"
_MAXIMUM = "any finite base will do where there is no key: all is multiplied by 0"

EQUIVALENT = {
  "kvjax/primitives/softmax_state.py": {"return jnp.where(l == 0, (2.0), l)": _DIVISOR},
  "kvjax/ops/slot_shards.py": {
    "whole = State(total[..., :-1] / jnp.where(l == 0, (2.0), l)[..., None], m, l)": _DIVISOR,
    "m = jnp.where(m == -jnp.inf, 1.0, m)": _MAXIMUM,
    "weight = state.l * jnp.exp(state.m - jnp.where(m == -jnp.inf, 1.0, m))": _MAXIMUM,
    "inside = (tile * unit <= stop) & "
    "((tile * unit < span.sinks) | (tile * unit + unit > start))": (
      "a tile that begins at `stop` is behind the newest one, which the next line leaves out"
    ),
  },
  "kvjax/methods/ltri/vectors.py": {
    "return jnp.where(every > 0, own / (every), 1.0)": "what is divided by 0 is not taken",
  },
  "kvjax/ops/attention.py": {
    "return jax.tree.map(lambda x: x[:, :, :, :(count + 1)], of_queries(jnp.int32(0)))": (
      "one block has as many queries as there are"
    ),
    "width = [(0, to + n if a == axis else 0) for a, n in enumerate(x.shape)]": (
      "more padding than is needed, which the positions mask: it costs time"
    ),
  },
  "kvjax/analysis/early_stops.py": {
    "u = part / np.where(mass > 0, mass, (2.0))[..., None]": _DIVISOR,
    "o = part / np.where(total > 0, total, (2.0))[..., None]": _DIVISOR,
  },
  "kvjax/methods/art/order.py": {
    "table = jnp.where(t < count[..., None], table, (1))": "nothing reads entries beyond the count",
  },
  "kvjax/methods/art/certificate.py": {
    "rank = jnp.where(t < pinned, 3.0, jnp.where(t == newest, (4.0), share))": (
      "first tiles and the newest are read before a walk may stop, in any order"
    ),
  },
  "kvjax/methods/prr/calibration.py": {
    "jnp.zeros_like(scores), (index), weight": (
      "a hole writes 0 to the last tile, but rows with holes are not counted: `counts` asks every "
      "head for one tile more than is put here"
    ),
  },
  "kvjax/methods/longflow/contribution.py": {
    "top = jnp.where(jnp.isneginf(top), 1.0, top)": _MAXIMUM,
  },
  "kvjax/methods/art/walk.py": {
    "if self.full or size < PROBES:": "of 32 channels the 32 probes are all",
    "cosine = (x * last).sum(-1) / jnp.where(norms > 0, norms, (2.0))  # 8 (Eq. 2)": _DIVISOR,
  },
  "kvjax/methods/cis/retrieval.py": {
    "now = (cache.seen - 2)[:, None]": (
      "where the query stands is asked only by windows that turn it, which CIS has no base with"
    ),
  },
  "kvjax/families/prompt_scored.py": {
    "return jnp.where(jnp.isinf(score), (2.0) + cache.pos, ranked)": (
      "positions keep their order among themselves, and above the ranks"
    )
  },
  "kvjax/families/streamed.py": {
    "held, carry = self._retrieve(at, cache, similarity, carry, qpos > 0)": (
      "the very first token has no block to retrieve"
    ),
    "cache, carry = self._retrieve(at, cache, similarity, carry, prompt.valid[:, None] >= 0)": (
      "a row without tokens gets its cache back, and its votes are its own"
    ),
    "return jnp.where(beyond < 1, pos, turned)": (
      "the ring's first slot is that of its first position, turned or not"
    ),
  },
  "pallas_kernels/common/split_k.py": {
    "new_l = _backend.load(part_l_ref, part, group, mask=keep, other=1.0)": (
      "a state whose maximum is −∞ weighs 0"
    ),
  },
  "pallas_kernels/common/tiling.py": {
    "return jnp.where(i <= last, find(jnp.minimum(i, jnp.maximum(last - 1, 0))), -1)": (
      "the tile behind the last one is fetched ahead and never added"
    ),
  },
  "kvjax/methods/infllm_v2.py": {
    "return cls(dense_below=length + 2)": "what is dense for one token more is neutral, too",
  },
  "kvjax/methods/ltri/method.py": {
    "blocks = -(-tokens // self.block) + (tokens >= 1)": (
      "one block more than a token touches, to which it adds nothing: it costs time"
    ),
  },
  "pallas_kernels/cis/note.py": {
    "return jnp.where((key >= higher).astype(jnp.int32).sum() > heaviest, higher, low)": (
      "the bound of one more: of its equals as many belong as are short, be it none"
    ),
  },
  "pallas_kernels/cis/anchors.py": {
    'how |= {"span_sinks": span_sinks, "scale": head_dim**-(1.0)}': (
      "heads are ranked each by itself, and a positive scale changes no order"
    ),
  },
  "pallas_kernels/decode/dense.py": {
    "share = piece.share(pl.cdiv(stop + base, config.tile))": (
      "tiles behind the row's last one, shared out with the others: `fetch` and `write` mask their "
      "slots, and a state without keys weighs 0; it costs time"
    ),
  },
  "pallas_kernels/longflow/victim.py": {
    "inside = slot <= slots  # a bound that is known beforehand leaves the loads whole vectors": (
      "the lane behind a row is masked later; it is read, which only a memory checker would show"
    ),
    "l = _backend.load(l_ref, row, head[:, None], group[None, :], mask=mask, other=(2.0))": (
      "lanes without a query head, which nothing reads"
    ),
  },
  "pallas_kernels/products/product.py": {
    "x = _backend.load(x_ref, row, k[None, :], mask=(real))": (
      "the weight beside it is masked; only a NaN behind the array would show, on a GPU"
    ),
  },
  "pallas_kernels/selection/top_k.py": {
    "place = (place)": ("the stores behind it are masked by `ok`: other lanes write nothing"),
  },
  "pallas_kernels/prr/repair.py": {
    "l = _backend.load(l_ref, part, group, mask=keep, other=1.0)": (
      "a state whose maximum is −∞ weighs 0"
    ),
  },
}


def reason(site: Site, diff: list[str]) -> str | None:
  """Reason why a fault changes no result, if known; `diff`: its lines, as they are shown."""
  known = EQUIVALENT.get(site.path, {})
  return next((known[line[1:].strip()] for line in diff if line[1:].strip() in known), None)
