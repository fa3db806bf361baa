"""`attention` for one device's arrays: a custom_vjp over a backend's forward and backward."""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxllm_kernels import attention_xla

BACKENDS = {"xla": attention_xla}


def without_padding(q, k, v, k_start, k_end):
    """Self-attention inputs with zeros at padding places (those whose interval is empty). A weight of exactly 0 is no protection against
    what stands there: 0 x NaN is NaN, in the output and in both gradient products."""
    real = (k_end > k_start)[..., None, None]
    return tuple(jnp.where(real, x, jnp.zeros((), x.dtype)) for x in (q, k, v))


def attention(q, k, v, k_start, k_end, backend="xla", aligned=False):
    """Attention over the keys that each query may see; differentiable in q, k and v. Inside shard_map it is local to the device.

    q: [B, T, H, D]; k, v: [B, S, K, D], float32 or bfloat16, H a multiple of K; k_start, k_end: i32[B, T], the interval of key indices
    that a query sees (`reference.attention` is the contract). aligned: a promise that this is self-attention (T == S, place i of q and of k is
    the same token) and that query i sees no key behind i (k_end[i] <= i + 1): blocks above the diagonal are skipped, and whatever stands at
    padding places, NaN included, has no influence.
    Returns out [B, T, H, D] in q's dtype. Softmax and sums in float32. Residuals are q, k, v, out and lse: nothing of size T x S.
    Papers: FlashAttention-2 (arXiv 2307.08691) for the blocked forward and backward.
    """
    if aligned:
        q, k, v = without_padding(q, k, v, k_start, k_end)
    return _attention(q, k, v, k_start, k_end, backend, aligned)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attention(q, k, v, k_start, k_end, backend, aligned):
    return BACKENDS[backend].forward(q, k, v, k_start, k_end, aligned=aligned)[0]


def _forward(q, k, v, k_start, k_end, backend, aligned):
    out, lse = BACKENDS[backend].forward(q, k, v, k_start, k_end, aligned=aligned)
    out, lse = checkpoint_name(out, "attn_out"), checkpoint_name(lse, "attn_lse")
    return out, (q, k, v, k_start, k_end, out, lse)


def _backward(backend, aligned, residuals, do):
    grads = BACKENDS[backend].backward(*residuals, do, aligned=aligned)
    return *(g.astype(x.dtype) for g, x in zip(grads, residuals[:3], strict=True)), None, None


_attention.defvjp(_forward, _backward)
