"""The contract of attention in plain jax.numpy: what every backend computes, forward; its gradients are this function's.

Not for use: it materialises the scores. Run it in float64 to get an oracle.
"""

import jax.numpy as jnp


def attention(q, k, v, k_start, k_end, *, scale=None):
    """softmax(scale q k^T) v over the keys that each query may see.

    q: [B, T, H, D]; k, v: [B, S, K, D] with H a multiple of K (query head h reads key head h // (H // K)); k_start, k_end: i32[B, T], the
    interval [k_start, k_end) of key indices that the query sees, which expresses causal, packed, padded and windowed masks alike.
    Returns out [B, T, H, D] in q's dtype and lse [B, H, T] = log sum exp of the scaled scores. A query that sees nothing: out 0, lse -inf.
    """
    groups = q.shape[2] // k.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    k, v = (jnp.repeat(a.astype(wide), groups, axis=2) for a in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q.astype(wide), k) * scale
    index = jnp.arange(k.shape[1])[None, None, None, :]
    seen = (index >= k_start[:, None, :, None]) & (index < k_end[:, None, :, None])
    scores = jnp.where(seen, scores, -jnp.inf)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    p = jnp.exp(scores - jnp.where(jnp.isfinite(peak), peak, 0))
    total = jnp.sum(p, axis=-1, keepdims=True)
    out = jnp.einsum("bhts,bshd->bthd", p / jnp.where(total > 0, total, 1), v).astype(q.dtype)
    lse = jnp.log(total) + jnp.where(jnp.isfinite(peak), peak, 0)
    return out, lse[..., 0]
