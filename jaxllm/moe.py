"""Mixture of experts without a dropped token: the router, the exchange of tokens over the expert axis, and what is recorded of both.

Between `dispatch` and `combine` a layer's tokens are rows sorted by expert, one block of rows per device: rows [devices, R, D] and group sizes
[devices, experts held]. Everything that multiplies them by a weight is `linear.GroupedLinear`. R is the worst case, so that nothing is ever dropped; the
products' cost follows the group sizes, while what XLA computes between them (gathers, the gated product) and the zeros behind the groups follow
R. Padding goes to no expert.

Exchanges, with the same result up to the order in which devices are summed:
  "none"       each device computes all experts on its own tokens; the experts' weights are gathered over the expert axis as well.
  "allgather"  tokens are gathered over the expert axis, each device computes its own experts, and the sums are scattered back.

Sums over a token's experts on one device are float32, in a fixed order, as gathers in both directions: nothing is scattered.

Not here: capacity that drops tokens, and all-to-all exchanges, which need a second static bound.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import pydantic
from jax.sharding import PartitionSpec as P

from jaxllm import attention
from jaxllm.section import Section
from jaxllm.sharding import AXES, BATCH, axis_size

_TOKENS, _ROWS = P(BATCH, "sequence", None), P(AXES)
EXCHANGES = ("none", "allgather")


class MoEConfig(Section):
    """Mixture-of-experts layers; read by the families that have them."""

    exchange: Literal["auto", "none", "allgather"] = "auto"
    """How tokens meet their experts; see jaxllm/moe.py. "auto": "allgather" where mesh.expert > 1."""
    router: Literal["float32", "match_hf"] = "float32"
    """Precision of the router's logits. "match_hf": that of the activations, as transformers computes them; bfloat16 logits tie, and ties choose
    experts by chance. The auxiliary loss takes its probabilities in float32 in both cases."""
    aux_loss: Literal["global", "hf"] = "global"
    """The loss that balances experts, weighted by model.router_aux_loss_coef: experts x sum over experts of (share of assignments) x (mean
    probability), num_experts_per_tok at balance. "global": in each layer, the mean over layers. "hf": of shares and probabilities pooled over
    layers first, as in transformers. Both over the real tokens of the whole step."""
    z_loss: float = pydantic.Field(0.0, ge=0)
    """Weight of the mean of the router's squared logsumexp (arXiv 2202.08906), over layers and tokens; 0.001 is usual."""


def choose_exchange(config: MoEConfig) -> str:
    if config.exchange == "auto":
        return "allgather" if axis_size("expert") > 1 else "none"
    return config.exchange


def route(logits, experts_per_token: int):
    """logits f32[B, T, E] -> (weights f32[B, T, K], ids i32[B, T, K]): softmax over all experts, the K largest, divided by their sum, as in Mixtral
    (arXiv 2401.04088); equal logits: the lower id."""
    probs = jax.nn.softmax(logits, axis=-1)
    weights, ids = jax.lax.top_k(probs, experts_per_token)
    return weights / jnp.sum(weights, axis=-1, keepdims=True), ids.astype(jnp.int32)


def statistics(logits, ids, real):
    """Sums over the real tokens of one layer, f32: counts [E] (assignments), probs [E], z (of logsumexp squared), entropy (of the router, in nats)."""
    real = real.astype(jnp.float32)[..., None]
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    probs = jnp.exp(log_probs)
    chosen = jax.nn.one_hot(ids, logits.shape[-1], dtype=jnp.float32).sum(2)
    lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    total = lambda x: jnp.sum(x * real, axis=(0, 1))
    return {
        "counts": jax.lax.stop_gradient(total(chosen)),
        "probs": total(probs),
        "z": total(lse**2)[0],
        "entropy": jax.lax.stop_gradient(total(-jnp.sum(probs * log_probs, axis=-1, keepdims=True))[0]),
    }


def auxiliary(seen, counts, num_tokens, form: str):
    """(auxiliary loss, mean squared logsumexp) of what layers have seen, f32[].

    seen: `statistics` stacked over layers, of a part of a step; counts f32[layers, E] and num_tokens f32[]: of the whole step, so that the parts' losses add
    up to the step's, however it is cut. The gradient goes through the probabilities alone (arXiv 2101.03961)."""
    layers, num_experts = counts.shape
    share, prob = counts / num_tokens, seen["probs"] / num_tokens
    if form == "hf":
        share, prob = (jnp.mean(x, axis=0, keepdims=True) for x in (share, prob))
    return num_experts * jnp.mean(jnp.sum(share * prob, axis=1)), jnp.sum(seen["z"]) / (num_tokens * layers)


def report(seen, num_tokens, per_token: int):
    """What is shown of a step's experts: f32[] each. imbalance: the fullest expert's share over the mean, in the worst layer; idle: experts, of all
    layers, without a token; entropy: of the router, mean over layers and tokens, in nats; dropped_tokens: 0, by construction."""
    share = seen["counts"] / (num_tokens * per_token)
    return {
        "imbalance": jnp.max(share) * share.shape[1],
        "idle": jnp.sum(share == 0).astype(jnp.float32),
        "entropy": jnp.mean(seen["entropy"]) / num_tokens,
        "dropped_tokens": jnp.zeros(()),
    }


def dispatch(x, ids, real, num_experts: int, exchange: str):
    """x [B, T, D], ids i32[B, T, K], real bool[B, T] -> (rows [devices, R, D] sorted by expert, sizes i32[devices, experts held], slots
    i32[devices, N, K]: the row of each assignment of the N tokens that the device sees, R where it is not here)."""
    local = functools.partial(_dispatch, num_experts=num_experts, exchange=exchange)
    specs = (_TOKENS, _TOKENS, P(*_TOKENS[:2]))
    return jax.shard_map(local, in_specs=specs, out_specs=(_ROWS,) * 3, check_vma=False)(x, ids, real)


def combine(rows, weights, slots, exchange: str, dtype):
    """rows [devices, R, D], weights f32[B, T, K] -> [B, T, D] in `dtype`: each token's weighted sum over its experts, float32 until the end."""
    local = functools.partial(_combine, exchange=exchange, dtype=dtype)
    return jax.shard_map(local, in_specs=(_ROWS, _TOKENS, _ROWS), out_specs=_TOKENS, check_vma=False)(
        rows, weights, slots
    )


def _everywhere(x, exchange):
    """The tokens [N, ...] that this device sees, from its own [B, T, ...]."""
    x = x.reshape(-1, *x.shape[2:])
    return jax.lax.all_gather(x, "expert", tiled=True) if exchange == "allgather" and axis_size("expert") > 1 else x


def _dispatch(x, ids, real, *, num_experts, exchange):
    held = num_experts // (axis_size("expert") if exchange == "allgather" else 1)
    ids = jnp.where(real[..., None], ids, num_experts)  # padding: an expert that nobody has
    x, ids = (_everywhere(a, exchange) for a in (x, ids))
    first = jax.lax.axis_index("expert") * held if exchange == "allgather" else 0
    num_tokens, per_token = ids.shape
    num_rows = num_tokens * min(per_token, held)
    flat = ids.reshape(-1) - first
    flat = jnp.where((flat >= 0) & (flat < held), flat, held)
    chosen = flat[:, None] == jax.lax.broadcasted_iota(jnp.int32, (1, held), 1)
    seen = jnp.cumsum(chosen.astype(jnp.int32), axis=0)  # counting sort, stable
    sizes = seen[-1]
    place = jnp.sum(jnp.where(chosen, seen - 1 + (jnp.cumsum(sizes) - sizes)[None], 0), axis=1)
    slots = jnp.where(flat < held, place, num_rows).reshape(ids.shape)
    sources = jnp.argsort(flat, stable=True)[:num_rows] // per_token
    sources = jnp.where(jnp.arange(num_rows) < jnp.sum(sizes), sources, num_tokens)  # rows that nobody fills
    return _take(x, sources, slots)[None], sizes[None], slots[None]


def _combine(rows, weights, slots, *, exchange, dtype):
    rows, slots, local = rows[0], slots[0], weights.shape
    weights = _everywhere(weights, exchange)
    out = _weighted(rows, weights, slots)
    if exchange == "allgather" and axis_size("expert") > 1:
        out = jax.lax.psum_scatter(out, "expert", scatter_dimension=0, tiled=True)
    return out.astype(dtype).reshape(*local[:2], -1)


def _row(x, index):
    """x[index], zeros where index is x's length."""
    inside = index < x.shape[0]
    found = jnp.take(x, jnp.minimum(index, x.shape[0] - 1), axis=0)
    return jnp.where(inside[..., None], found, jnp.zeros((), x.dtype))


@jax.custom_vjp
def _take(x, sources, slots):
    """Rows [R, D] of tokens [N, D]; backward the sum over each token's slots, so that neither direction scatters."""
    return _row(x, sources)


def _take_backward(slots, dy):
    dx = jnp.sum(_row(dy, slots).astype(jnp.float32), axis=1)
    return dx.astype(dy.dtype), None, None


_take.defvjp(lambda x, sources, slots: (_take(x, sources, slots), slots), _take_backward)


@jax.custom_vjp
def _weighted(rows, weights, slots):
    """f32[N, D]: sum over k of weights[n, k] x rows[slots[n, k]]."""
    return jnp.sum(weights[..., None] * _row(rows, slots).astype(jnp.float32), axis=1)


def _weighted_backward(residuals, dout):
    rows, weights, slots = residuals
    num_tokens, per_token = weights.shape
    # Where each row comes from: the inverse of slots, by a stable sort (the assignments that are not here sort behind all rows).
    order = jnp.argsort(slots.reshape(-1), stable=True)[: rows.shape[0]]
    filled = jnp.arange(rows.shape[0]) < jnp.sum(slots < rows.shape[0])
    weight = jnp.where(filled, weights.reshape(-1)[order], 0.0)
    drows = jnp.where(filled[:, None], jnp.take(dout, order // per_token, axis=0), 0.0) * weight[:, None]
    dweights = jnp.sum(_row(rows, slots).astype(jnp.float32) * dout[:, None], axis=-1)
    return drows.astype(rows.dtype), dweights, None


_weighted.defvjp(lambda *a: (_weighted(*a), a), _weighted_backward)


def describe(config: MoEConfig, num_experts: int, compute: str) -> str:
    """One line on what the mixture of experts will do on the current mesh."""
    places = axis_size("expert")
    exchange, reason = choose_exchange(config), "asked for" if config.exchange != "auto" else f"mesh.expert = {places}"
    return f"experts: {num_experts} over {places} places, exchange {exchange} ({reason}), products by {choose_backend(compute)}"


def choose_backend(dtype) -> str:
    """What multiplies rows by their experts on the current mesh's devices: "hopper" in bfloat16 on H100 and H200, else "xla"."""
    hopper = attention.is_hopper(attention.device_kind()) and jnp.dtype(dtype) == jnp.bfloat16
    return "hopper" if hopper else "xla"
