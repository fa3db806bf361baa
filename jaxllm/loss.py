"""Cross-entropy from hidden states: a scan over chunks of tokens, so that the logits of a batch never exist.

The gradients are computed in the forward scan, where the logits are: three matmuls with lm_head per token, and nothing recomputed. Sums go
out, undivided; whoever has seen every microbatch and device divides once. Over a mesh the body is a shard_map: each device adds up its own
tokens, and the gradient of lm_head is reduced once, after the last chunk, not once per chunk.

Not here: label smoothing, and a vocabulary split over devices.
"""

import functools

import jax
import jax.numpy as jnp
import pydantic
from jax.sharding import PartitionSpec as P

from jaxllm.linear import dot, gather
from jaxllm.section import Section
from jaxllm.sharding import AXES, BATCH, WEIGHTS, axis_size

_TOKENS = P(BATCH, "sequence")
_ALL = (*BATCH, "sequence")
HEAD_NAMES = ("vocab", "embed")


class LossConfig(Section):
    z_loss: float = pydantic.Field(0.0, ge=0)
    """Weight of the mean squared log-partition, z_loss * lse^2 per trained token (PaLM, arXiv 2204.02311); 1e-4 is usual, 0 is off."""
    chunk_size: int = pydantic.Field(1024, ge=1)
    """Tokens per device whose logits exist at once: chunk_size x vocabulary float32 values, a few times over."""


def cross_entropy(
    hidden, head, targets, weights, config: LossConfig, compute: str, reduce: str, head_is_trained: bool = True
):
    """Weighted sums of the negative log-likelihood over all tokens of all devices.

    hidden [B, T, E]; head [V, E] as it is kept; targets i32[B, T]; weights f32[B, T] (0: not trained). Log-softmax in float32.
    Returns (total, loss_sum, z_sum), f32[]: total = loss_sum + z_loss * z_sum is differentiable in hidden and head; the parts are for
    metrics and carry no gradient. z_sum is sum(weights * lse^2). A head that is not trained gets no gradient, and none is computed.
    """
    static = (config.z_loss, config.chunk_size, compute, reduce, head_is_trained)
    return _cross_entropy(hidden, head, targets, weights, *static)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7, 8))
def _cross_entropy(hidden, head, targets, weights, z_loss, chunk_size, compute, reduce, head_is_trained):
    body = functools.partial(_local_sums, z_loss=z_loss, chunk_size=chunk_size, wanted=(), reduce=reduce)
    return _over_mesh(body, hidden, head, targets, weights, compute, wanted=())


def _forward(hidden, head, targets, weights, z_loss, chunk_size, compute, reduce, head_is_trained):
    wanted = ("hidden", "head") if head_is_trained else ("hidden",)
    body = functools.partial(_local_sums, z_loss=z_loss, chunk_size=chunk_size, wanted=wanted, reduce=reduce)
    results = _over_mesh(body, hidden, head, targets, weights, compute, wanted)
    return tuple(results[:3]), (dict(zip(wanted, results[3:], strict=True)), jnp.zeros((0,), head.dtype))


def _backward(z_loss, chunk_size, compute, reduce, head_is_trained, residuals, cotangents):
    grads, like = residuals
    scale = cotangents[0]  # of the total; loss_sum and z_sum are for metrics
    scaled = lambda x, dtype: (x.astype(jnp.float32) * scale).astype(dtype)
    d_head = scaled(grads["head"], like.dtype) if head_is_trained else None
    return scaled(grads["hidden"], grads["hidden"].dtype), d_head, None, None


_cross_entropy.defvjp(_forward, _backward)


def _over_mesh(body, hidden, head, targets, weights, compute, wanted):
    used = gather(head, HEAD_NAMES, compute)
    if axis_size(*AXES) == 1:
        return body(hidden, used, targets, weights, over_mesh=False)
    hidden_spec = P(BATCH, "sequence", None)
    of_gradients = {"hidden": hidden_spec, "head": P(None, WEIGHTS)}
    out_specs = (P(), P(), P(), *(of_gradients[name] for name in wanted))
    mapped = jax.shard_map(
        functools.partial(body, over_mesh=True),
        in_specs=(hidden_spec, P(None, None), _TOKENS, _TOKENS),
        out_specs=out_specs,
        check_vma=False,
    )
    return mapped(hidden, used, targets, weights)


def _local_sums(hidden, head, targets, weights, *, z_loss, chunk_size, wanted, reduce, over_mesh):
    B, T, E = hidden.shape
    count = B * T
    chunk = min(chunk_size, count)
    missing = -count % chunk
    rows = lambda x: jnp.pad(x.reshape(count, *x.shape[2:]), [(0, missing)] + [(0, 0)] * (x.ndim - 2)).reshape(
        -1, chunk, *x.shape[2:]
    )
    chunks = (rows(hidden.astype(head.dtype)), rows(targets), rows(weights))

    def one_chunk(carry, xs):
        loss_sum, z_sum, d_head = carry
        x, target, weight = xs
        # A token of weight 0 may hold anything, non-finite values included; 0 x inf must not reach a sum.
        x = jnp.where((weight != 0)[:, None], x, jnp.zeros((), x.dtype))
        logits = dot(x, head, ((1,), (1,)), jnp.float32)
        peak = jnp.max(logits, axis=-1, keepdims=True)
        exp = jnp.exp(logits - peak)
        partition = jnp.sum(exp, axis=-1, keepdims=True)
        lse = (peak + jnp.log(partition))[:, 0]
        picked = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
        loss_sum += jnp.sum(weight * (lse - picked))
        z_sum += jnp.sum(weight * lse * lse)
        if not wanted:
            return (loss_sum, z_sum, d_head), None
        # d/dlogit = weight ((1 + 2 z lse) p - onehot)
        slope = (weight * (1 + 2 * z_loss * lse))[:, None] / partition
        here = jnp.arange(head.shape[0])[None, :] == target[:, None]
        d_logits = (exp * slope - jnp.where(here, weight[:, None], 0)).astype(head.dtype)
        d_logits = jax.lax.optimization_barrier(d_logits)  # made once, read by two products
        d_x = dot(d_logits, head, ((1,), (0,)), hidden.dtype)
        if "head" in wanted:
            d_head += dot(d_logits, x, ((0,), (0,)), jnp.float32)
        return (loss_sum, z_sum, d_head), d_x

    zero = jnp.zeros((), jnp.float32)
    d_head = jnp.zeros(head.shape, jnp.float32) if "head" in wanted else zero
    (loss_sum, z_sum, d_head), d_hidden = jax.lax.scan(one_chunk, (zero, zero, d_head), chunks)
    if over_mesh:
        loss_sum, z_sum = jax.lax.psum((loss_sum, z_sum), _ALL)
    sums = (loss_sum + z_loss * z_sum, loss_sum, z_sum)
    if not wanted:
        return sums
    d_hidden = d_hidden.reshape(-1, E)[:count].reshape(B, T, E)
    if "head" not in wanted:
        return *sums, d_hidden
    if over_mesh:
        d_head = d_head.astype(reduce)
        d_head = jax.lax.psum_scatter(d_head, WEIGHTS, scatter_dimension=1, tiled=True)
        d_head = jax.lax.psum(d_head, "replica")
    return *sums, d_hidden, d_head
