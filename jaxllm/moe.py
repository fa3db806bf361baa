"""Mixture of experts without a dropped token: the router and its losses, what is recorded of the experts, and how a layer's work is spread.

Not here: how tokens travel to their experts and back (`exchange`), and the products (`grouped_linear.GroupedLinear`).
"""

from typing import Literal

import jax
import jax.numpy as jnp
import pydantic

from jaxllm import attention
from jaxllm.exchange import Exchange
from jaxllm.grouped_linear import fp8_multiple
from jaxllm.noise import uniform
from jaxllm.section import Section, UserError
from jaxllm.sharding import AXES, axis_size


class MoEConfig(Section):
    """Mixture-of-experts layers; read by the families that have them."""

    exchange: Literal["auto", "none", "allgather", "alltoall", "ragged"] = "auto"
    """How tokens meet their experts over mesh.expert: "none", experts are gathered to all tokens; "allgather", tokens to all experts; "alltoall", tokens to
    their experts in padded blocks, "ragged" without padding (GPUs only). "auto": with a buffer_factor "alltoall", else "none" or "allgather", whichever
    moves fewer bytes. See jaxllm/exchange.py."""
    buffer_factor: float | None = pydantic.Field(None, gt=0)
    """Bounds the rows that a device receives for its experts, as a multiple of what it receives when the router is balanced, and with them memory.
    What does not fit is dropped: its expert adds nothing to that token. Counted in the metrics as dropped_tokens. Which these are depends on the mesh,
    the exchange and the number of microbatches. None: room for the worst case, nothing is dropped. Evaluation drops nothing in either case."""
    backend: Literal["auto", "hopper", "xla"] = "auto"
    """What multiplies rows by their experts: our kernels for H100 and H200, in bfloat16 and FP8 (that needs JAX 0.11), or XLA anywhere. "auto": the first where
    the GPU and precision.compute fit."""
    router: Literal["float32", "match_hf"] = "float32"
    """Precision of the router's logits. "match_hf": that of the activations, as transformers computes them; bfloat16 logits tie, and ties choose
    experts by chance. The auxiliary loss takes its probabilities in float32 in both cases."""
    aux_loss: Literal["global", "hf"] = "global"
    """The loss that balances experts, weighted by model.router_aux_loss_coef: experts x sum over experts of (share of assignments) x (mean
    probability), num_experts_per_tok at balance. "global": in each layer, the mean over layers. "hf": of shares and probabilities pooled over
    layers first, as in transformers. Both over the real tokens of the whole step."""
    z_loss: float = pydantic.Field(0.0, ge=0)
    """Weight of the mean of the router's squared logsumexp (arXiv 2202.08906), over layers and tokens; 0.001 is usual."""


def route(logits, experts_per_token: int):
    """logits f32[B, T, E] -> (weights f32[B, T, K], ids i32[B, T, K]): softmax over all experts, the K largest, divided by their sum, as in Mixtral
    (arXiv 2401.04088); equal logits: the lower id."""
    probs = jax.nn.softmax(logits, axis=-1)
    weights, ids = jax.lax.top_k(probs, experts_per_token)
    return weights / jnp.sum(weights, axis=-1, keepdims=True), ids.astype(jnp.int32)


def jitter(x, noise, amount: float):
    """x [B, T, D] times a number from [1 - amount, 1 + amount) for each of its elements, as Mixtral does in training (Switch Transformer, arXiv 2101.03961).

    noise: see `noise`."""
    if not amount:
        return x
    factor = 1 - amount + 2 * amount * uniform(noise, "jitter", x.shape[-1])
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


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
    """What is shown of a step's experts, f32. expert_load [E]: each expert's share of all assignments, mean over layers. imbalance: the fullest expert's share
    over the mean, in the worst layer; idle: experts, of all layers, without a token; entropy: of the router, mean over layers and tokens, in nats;
    dropped_tokens: assignments of a token to an expert that found no room, of all layers (0 without moe.buffer_factor), and dropped_share of all."""
    share = seen["counts"] / (num_tokens * per_token)
    dropped = jnp.sum(seen["dropped"])
    return {
        "expert_load": jnp.mean(share, axis=0),
        "imbalance": jnp.max(share) * share.shape[1],
        "idle": jnp.sum(share == 0).astype(jnp.float32),
        "entropy": jnp.mean(seen["entropy"]) / num_tokens,
        "dropped_tokens": dropped,
        "dropped_share": dropped / (num_tokens * per_token * share.shape[0]),
    }


BYTES = {"trained": 8.0, "float32": 4.0, "bfloat16": 4.0, "float8": 2.2, "nf4": 1.7}
"""What a weight of an expert costs per step where experts travel, in bytes over the links: bfloat16 twice and a float32 gradient; frozen, twice as it is
gathered (1.03 for NF4), and that every place makes floats of all of them: as long as another 0.7 (estimated: 5 bytes of memory, 450 GB/s against 3,350)."""


def choose_exchange(
    config: MoEConfig, model, num_tokens: int, training: bool = True, multiple: int = 1, base: str = "trained"
) -> tuple[Exchange, str]:
    """(the exchange, why) of a layer of `model` for `num_tokens` tokens, of all devices together, on the current mesh.

    "auto" compares what a device moves over the expert axis for one layer and step, P places and N tokens per device, in bytes: for "none" the other places'
    experts, BYTES[base] x 3 x experts x hidden x intermediate x (P - 1) / P; for "allgather" the others' tokens, gathered and scattered in both directions,
    14 x N x hidden x (P - 1). base: "trained", or how frozen experts are kept. UserError where the devices lack what is asked for."""
    places, kind = axis_size("expert"), attention.device_kind()
    if config.exchange == "ragged" and not kind.startswith("NVIDIA"):
        raise UserError(
            f'moe.exchange: "ragged" needs GPUs, XLA has no ragged-all-to-all for {kind!r}; "alltoall" sends the same, padded'
        )
    bound = config.buffer_factor if training else None
    make = lambda way: Exchange(way, model.num_local_experts, bound, multiple)
    if config.exchange != "auto":
        return make(config.exchange), "asked for"
    if places == 1:
        return make("none"), "mesh.expert = 1"
    if config.buffer_factor is not None:
        return make("alltoall"), "moe.buffer_factor bounds what is sent"
    weights = 3 * model.num_local_experts * model.hidden_size * model.intermediate_size
    experts = BYTES[base] * weights * (places - 1) / places
    tokens = 14 * (num_tokens // axis_size(*AXES)) * model.hidden_size * (places - 1)
    moved = f"{tokens / 2**30:.2g} GiB of tokens per layer and step, {experts / 2**30:.2g} GiB of experts"
    return make("allgather" if tokens <= experts else "none"), moved


def describe(
    config: MoEConfig,
    model,
    num_rows: int,
    seq_len: int,
    compute: str,
    multiply: str = "compute",
    base: str = "trained",
) -> str:
    """One line on what the mixture of experts will do on the current mesh, for a microbatch of `num_rows` rows; UserError where it cannot be done."""
    places = attention.row_places(axis_size("sequence"), seq_len, model.sliding_window)
    how, reason = choose_exchange(config, model, num_rows * places, base=base)
    backend, _ = choose_backend(config, compute, multiply)
    text = f"experts: {how.num_experts} over {axis_size('expert')} places, exchange {how.way} ({reason}), products by {backend}"
    if config.buffer_factor is None:
        return text
    if how.everywhere:
        return f"{text}; moe.buffer_factor bounds nothing here, for nothing is received"
    return f"{text}; moe.buffer_factor = {config.buffer_factor:g}: what does not fit is dropped, and counted as dropped_tokens"


def check(config: MoEConfig, model, places: int) -> list[str]:
    """What contradicts itself in this section, the model and the size of mesh.expert (-1: not known yet), wherever it runs."""
    conflicts, num_experts = [], model.num_local_experts
    if not num_experts:
        for name, field in MoEConfig.model_fields.items():
            if (given := getattr(config, name)) != field.default:
                shown = f'"{given}"' if isinstance(given, str) else f"{given:g}"
                conflicts.append(
                    f"moe.{name}: {shown} is for a mixture of experts, and a {model.family} has none; remove it"
                )
    if config.exchange == "none" and config.buffer_factor is not None:
        conflicts.append(
            f'moe.buffer_factor: {config.buffer_factor:g} bounds what a device receives, and with moe.exchange = "none" it receives nothing; remove one of them'
        )
    if places > 1 and not num_experts:
        conflicts.append(f"mesh.expert: {places} places for experts, of which a {model.family} has none; use mesh.data")
    elif places > 1 and num_experts % places:
        legal = ", ".join(str(n) for n in range(1, num_experts + 1) if num_experts % n == 0)
        conflicts.append(
            f"mesh.expert: {places} places do not divide model.num_local_experts = {num_experts}; legal: {legal}"
        )
    return conflicts


def choose_backend(config: MoEConfig, dtype, multiply: str = "compute") -> tuple[str, int]:
    """(what multiplies rows by their experts on the current mesh's devices, of what group sizes are multiples for it). multiply: as precision.matmul.
    UserError where what is asked for does not fit."""
    kind = attention.device_kind()
    fits = {"xla": True, "hopper": attention.is_hopper(kind) and jnp.dtype(dtype) == jnp.bfloat16}
    backend = config.backend
    if backend == "auto":
        backend = "hopper" if fits["hopper"] else "xla"
    if not fits[backend]:
        raise UserError(
            f'moe.backend: "hopper" needs H100 or H200 and precision.compute = "bfloat16", got {kind!r} and "{jnp.dtype(dtype).name}"; choose "auto" or "xla"'
        )
    return backend, fp8_multiple(backend) if multiply == "float8" else 1
