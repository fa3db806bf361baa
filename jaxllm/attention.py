"""Attention over the mesh: what computes it, how keys of other devices come to the queries, and in which order a row's tokens are laid out.

The mesh decides where (tokens are split over the sequence axis), the config decides how, and `jaxllm_kernels` does the work inside a
shard_map. One custom_vjp encloses two shard_maps, forward and backward, so that its residuals are ordinary sharded arrays that
rematerialisation policies can name ("attn_out", "attn_lse"): what is saved by name is not communicated for again.

Not here: masks. They arrive as one interval of keys per query, made once per batch on the host.
"""

import contextlib
import functools
import importlib.util
import re
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxllm import hardware
from jaxllm.section import Section, UserError
from jaxllm.sharding import AXES, BATCH, axis_size
from jaxllm_kernels import Plan, attention_backward, attention_forward, load_backend, windowed, without_padding
from jaxllm_kernels.ring import live_steps

_HEADS = P(BATCH, "sequence", None, None)  # [B, T, heads, head_dim]
_ROWS = P(BATCH, "sequence")  # [B, T]
_LSE = P(BATCH, None, "sequence")  # [B, heads, T]
_NODE = 8  # GPUs that NVLink joins in the usual machine


class AttentionConfig(Section):
    backend: Literal["auto", "hopper", "triton", "xla", "cudnn"] = "auto"
    """What computes attention on each device: "hopper", our kernels for H100 and H200, bfloat16; "triton", for other NVIDIA GPUs, with the extra
    `triton`; "xla" runs anywhere; "auto" takes the first of them that fits the device, the dtype and the head dim. "cudnn" is NVIDIA's, for comparison: it
    knows no packed rows and no split sequence, and wants data.packing = "none" and mesh.sequence = 1."""
    communication: Literal["auto", "ring", "allgather"] = "auto"
    """How the keys of other devices come here when mesh.sequence > 1. "ring": they travel from device to device, each hop behind a kernel.
    "allgather": every device fetches all keys of the row first; less to start, more memory. "auto": ring where a hop can hide."""


def row_layout(num_shards: int, length: int, window: int | None) -> str:
    """In which order `length` tokens are laid out over a sequence axis of `num_shards`: "zigzag", which gives every device equal work under a
    causal mask; "contiguous" where there is nothing to balance, because each query sees only its `window` last keys."""
    return "contiguous" if num_shards == 1 or (window is not None and window < length) else "zigzag"


def row_places(num_shards: int, length: int, window: int | None) -> int:
    """Places that a row of `length` tokens takes over a sequence axis of `num_shards`: completed to what its layout divides."""
    chunks = num_shards * (2 if row_layout(num_shards, length, window) == "zigzag" else 1)
    return -(-length // chunks) * chunks


def is_hopper(device_kind: str) -> bool:
    return device_kind.startswith("NVIDIA") and re.search(r"\bG?H(100|200|800|20)\b", device_kind) is not None


def _unfit(backend: str, device_kind: str, dtype, head_dim: int) -> str | None:
    """Why this backend cannot serve; None where it can."""
    if backend == "xla":
        return None
    if backend == "hopper" and not is_hopper(device_kind):
        return f"its kernels are for NVIDIA's Hopper GPUs (H100, H200), and the device is {device_kind!r}"
    if backend in ("triton", "cudnn") and not device_kind.startswith(hardware.NVIDIA):
        return f"its kernels are for NVIDIA GPUs, and the device is {device_kind!r}"
    capability = hardware.compute_capability(device_kind)
    if capability is not None and capability < 8:
        return (
            f"its kernels need compute capability 8.0 (Ampere: A100, A10, RTX 30) or more, and {device_kind!r} has {capability}; "
            'attention.backend = "xla" runs there'
        )
    if backend == "triton" and not importlib.util.find_spec("jax_triton"):
        return "jax-triton is not installed (pip install 'jaxllm[triton]')"
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"its kernels take bfloat16, and precision.compute is {jnp.dtype(dtype)}"
    if head_dim > 256:
        return f"its kernels take head dims up to 256, and model.head_dim is {head_dim}"
    if backend == "cudnn" and head_dim % 8:
        return f"cuDNN takes head dims that are multiples of 8, and model.head_dim is {head_dim}"
    if backend == "cudnn" and head_dim > 128 and capability is not None and capability < 9:
        return f"before Hopper cuDNN takes head dims up to 128, and model.head_dim is {head_dim} on {device_kind!r}"
    return None


def choose_backend(config: AttentionConfig, device_kind: str, dtype, head_dim: int) -> str:
    """The backend's name: what was asked for, or the best that fits. UserError when what was asked for does not fit."""
    if config.backend == "auto":
        return next(name for name in ("hopper", "triton", "xla") if _unfit(name, device_kind, dtype, head_dim) is None)
    if reason := _unfit(config.backend, device_kind, dtype, head_dim):
        raise UserError(f'attention.backend: {config.backend!r} does not fit: {reason}. Choose another, or "auto".')
    return config.backend


def choose_communication(
    config: AttentionConfig,
    num_shards: int,
    length: int,
    heads: int,
    kv_heads: int,
    device_kind: str,
    window: int | None = None,
    span: int | None = None,
) -> tuple[str, str]:
    """("ring" or "allgather", the reason in words) for `length` tokens on each of `num_shards` devices.

    span: devices from a shard to the last of its ring, with those of axes inside the sequence axis (expert); above 8 the ring leaves the node.

    A ring step computes 2 L W D H FLOPs forward (a balanced causal step; W = L, or the window where that is shorter) while 4 L K D bytes of bfloat16
    keys and values travel; backward 2.5 times the FLOPs and 4 + 8 bytes, for gradients travel in float32. At rates F and F_b FLOP/s over a link of
    V bytes/s a hop hides behind its kernel where W >= 2 K F / (H V) and W >= 12 K F_b / (5 H V). Assumed: 60% and 45% of the device's peak, 80%
    of its link; for a device that jaxllm.hardware does not list, those of the H100.
    """
    if config.communication != "auto":
        return config.communication, "attention.communication asks for it"
    listed = hardware.of(device_kind)
    card, inside = listed or hardware.HARDWARE["h100"], (span or num_shards) <= _NODE
    name = card.name if listed else f"as for {card.name}, {device_kind} is not listed"
    link = card.nvlink_bandwidth if inside else card.nic_bandwidth
    if link is None:
        return (
            "allgather",
            f"{span or num_shards} devices are more than a node, and no link between nodes is known ({name})",
        )
    link *= 0.8
    ratio, work = kv_heads / (heads * link), length if window is None else min(length, window)
    needed = max(2 * ratio * 0.6 * card.bf16_flops, 12 / 5 * ratio * 0.45 * card.bf16_flops)
    choice, relation = ("ring", "hides") if work >= needed else ("allgather", "would not hide")
    keys = f"{length} tokens a device" + (f", {work} keys for each" if work < length else "")
    where = f"{'inside a node' if inside else 'between nodes'}, {link / 1e9:.0f} GB/s"
    return (
        choice,
        f"{keys}; a hop {relation} behind its kernel, which takes {needed:.0f} ({heads}/{kv_heads} heads, {name}, {where})",
    )


def compiling_for(config: AttentionConfig, dtype, head_dim: int, compute_capability: str):
    """Context in which to trace a program for GPUs that are not here, such as of capability "9.0": Triton asks the one that is, unless told."""
    if choose_backend(config, device_kind(), dtype, head_dim) != "triton":
        return contextlib.nullcontext()
    return load_backend("triton").compile_for(int(compute_capability.replace(".", "")))


def describe(config: AttentionConfig, model, compute: str, seq_len: int) -> str:
    """One line on what attention will do on the current mesh, and why. UserError as from `choose_backend`.

    model: its num_attention_heads, num_key_value_heads, head_dim and sliding_window are read; compute: its dtype."""
    shards, window = axis_size("sequence"), model.sliding_window
    line = f"attention: {choose_backend(config, device_kind(), compute, model.head_dim)}"
    if shards == 1:
        return line
    length = row_places(shards, seq_len, window) // shards
    way, reason = _communication(config, length, model.num_attention_heads, model.num_key_value_heads, window)
    return f"{line}, {row_layout(shards, seq_len, window)} over {shards} devices, {way} ({reason})"


def calls_per_pass(config: AttentionConfig, model, seq_len: int) -> int:
    """Kernel calls in which a device's queries meet all the keys of a row, on the current mesh: one, or one for each step of a ring in which anybody
    sees anything. `model` as for `describe`."""
    shards, window = axis_size("sequence"), model.sliding_window
    length = row_places(shards, seq_len, window) // shards
    way, _ = _communication(config, length, model.num_attention_heads, model.num_key_value_heads, window)
    if shards == 1 or way != "ring":
        return 1
    return len(live_steps(row_layout(shards, seq_len, window), shards, length, window))


def _communication(config, length, heads, kv_heads, window):
    """`choose_communication` for the current mesh."""
    mesh = axis_size("sequence"), axis_size("sequence", "expert")
    return choose_communication(config, mesh[0], length, heads, kv_heads, device_kind(), window, span=mesh[1])


def attention(
    q, k, v, k_start, k_end, config: AttentionConfig, *, layout: str = "contiguous", window: int | None = None
):
    """q [B, T, H, D], k and v [B, T, K, D], intervals i32[B, T] in the row's own token index -> out [B, T, H, D] in q's dtype.

    layout: the order of the T places (`row_layout`); intervals are causal, so k_end - 1 is a token's own index whatever the order. window: each
    query sees only its last `window` keys, itself included; None: all."""
    shards = axis_size("sequence")
    if shards == 1 and layout != "contiguous":
        raise ValueError(f"attention: rows laid out as {layout!r} need a sequence axis, and this mesh has none")
    k_start = windowed(k_start, k_end, window)
    q, k, v = without_padding(q, k, v, k_start, k_end)
    kind = device_kind()
    backend = choose_backend(config, kind, q.dtype, q.shape[3])
    if backend == "cudnn":
        local = functools.partial(one_document, window=window)
        specs = (_HEADS, _HEADS, _HEADS, _ROWS, _ROWS)
        over = jax.shard_map(local, in_specs=specs, out_specs=_HEADS, check_vma=False)
        return checkpoint_name((over if axis_size(*AXES) > 1 else local)(q, k, v, k_start, k_end), "attn_out")
    if shards == 1:
        return _over_mesh(q, k, v, k_start, k_end, Plan(backend, aligned=True), axis_size(*AXES) > 1)
    communication, _ = _communication(config, q.shape[1] // shards, q.shape[2], k.shape[2], window)
    return _over_mesh(q, k, v, k_start, k_end, Plan(backend, "sequence", layout, communication, window), True)


def one_document(q, k, v, k_start, k_end, *, window, implementation="cudnn", with_lse=False):
    """Causal attention of rows that hold one document from place 0 on and padding behind it, by `jax.nn.dot_product_attention`, which keeps
    residuals of its own. Rows that hold anything else come out as NaN: the mask of cuDNN could not tell.

    with_lse: (out, lse [B, H, T]) instead of out. JAX rounds that lse to q's dtype and gives it no gradient, which is why the ring cannot have it."""
    band = None if window is None else (window - 1, 0)
    options = dict(is_causal=True, local_window_size=band, implementation=implementation)
    if with_lse:
        out, lse = jax.nn.dot_product_attention(q, k, v, **options, return_residual=True)
    else:
        out, lse = jax.nn.dot_product_attention(q, k, v, **options), None
    index = jnp.arange(q.shape[1], dtype=jnp.int32)[None]
    first = jnp.zeros_like(k_start) if window is None else jnp.maximum(index + 1 - window, 0)
    real = k_end > k_start
    fits = jnp.all(jnp.where(real, (k_start == first) & (k_end == index + 1), True), axis=1, keepdims=True)
    fits = jnp.where(fits, jnp.ones((), out.dtype), jnp.array(jnp.nan, out.dtype))
    # A selection, for what comes back to padding: 0 x NaN is NaN.
    out = jnp.where(real[..., None, None], out, jnp.zeros((), out.dtype)) * fits[..., None, None]
    if not with_lse:
        return out
    lse = jnp.where(real[..., None], jax.lax.stop_gradient(lse), jnp.array(-jnp.inf, lse.dtype))
    return out, jnp.swapaxes(lse, 1, 2)


def device_kind() -> str:
    """What the current mesh's devices, or else the default ones, call themselves, such as "NVIDIA H100 80GB HBM3" or "cpu"."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.devices()[0].device_kind if mesh.empty else mesh.abstract_device.device_kind


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _over_mesh(q, k, v, k_start, k_end, plan, sharded):
    return _over_mesh_forward(q, k, v, k_start, k_end, plan, sharded)[0]


def _over_mesh_forward(q, k, v, k_start, k_end, plan, sharded):
    local = functools.partial(attention_forward, plan)
    if sharded:
        specs = (_HEADS, _HEADS, _HEADS, _ROWS, _ROWS)
        local = jax.shard_map(local, in_specs=specs, out_specs=(_HEADS, _LSE), check_vma=False)
    # The barrier: XLA of JAX 0.11 writes what a scan keeps by a copy of the call that made it, and runs kernels twice (docs/decisions.md).
    out, lse = jax.lax.optimization_barrier(local(q, k, v, k_start, k_end))
    out, lse = checkpoint_name(out, "attn_out"), checkpoint_name(lse, "attn_lse")
    return out, (q, k, v, k_start, k_end, out, lse)


def _over_mesh_backward(plan, sharded, residuals, do):
    local = functools.partial(attention_backward, plan)
    if sharded:
        specs = (_HEADS, _HEADS, _HEADS, _ROWS, _ROWS, _HEADS, _LSE, _HEADS)
        local = jax.shard_map(local, in_specs=specs, out_specs=(_HEADS,) * 3, check_vma=False)
    return *local(*residuals, do), None, None


_over_mesh.defvjp(_over_mesh_forward, _over_mesh_backward)
