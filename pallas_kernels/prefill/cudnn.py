"""cuDNN's flash attention over prompts, with the log-sum-exp that merging and statistics need.

`jax.nn.dot_product_attention(implementation="cudnn")` rounds the log-sum-exp to the dtype of q and
wants heads after tokens; the function below it in jax does neither. It is private to jax: a test
compares its arguments with those used here, for every jax that is supported.
"""

import jax.numpy as jnp
from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention
from jaxtyping import Array, Float, Int

from kvjax.primitives.softmax_state import State


def attend_causal(
  q: Float[Array, "B K G T H"],
  k: Float[Array, "B K T H"],
  v: Float[Array, "B K T H"],
  valid: Int[Array, " B"],
) -> tuple[State, Float[Array, "B K G T H"]]:
  """Query t of a row sees its slots 0 … t; slots from `valid` on are padding and may hold NaN.

  Args:
    q, k, v: bfloat16 or float16, H a multiple of 8, at most 128 (from Hopper on 256).
    valid: int32, real tokens of each row.

  Returns:
    The softmax state in float32, empty for padding; its m is the log-sum-exp and its l is 1. And
    o as cuDNN gives it, in the dtype of q.
  """
  batch, heads, groups, tokens, head_dim = q.shape
  real = jnp.arange(tokens) < valid[:, None]
  k, v = (jnp.where(real[:, None, :, None], x, 0) for x in (k, v))
  lengths = jnp.maximum(valid, 1).astype(jnp.int32)
  o, lse = dot_product_attention(
    q.reshape(batch, heads * groups, tokens, head_dim),
    k,
    v,
    q_seqlen=lengths,
    kv_seqlen=lengths,
    scale=head_dim**-0.5,
    mask_type=MaskType.PADDING_CAUSAL,
    qkv_layout="BNTH",
    return_residual=True,
  )
  real = real[:, None, None]
  o = jnp.where(real[..., None], o.reshape(q.shape), 0)
  lse = jnp.where(real, lse.reshape(q.shape[:-1]), -jnp.inf)
  l = jnp.broadcast_to(real.astype(jnp.float32), lse.shape)
  return State(o.astype(jnp.float32), lse, l), o
