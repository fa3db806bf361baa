"""Attention in Triton, called through jax-triton: the path of NVIDIA GPUs that are not Hopper (A100, L40S), and a second opinion on those that are.

`forward` is attention over all keys; `empty`, `fold` and `finish` are the same in parts, one block of keys after the other in any order; `dq` and `dkv`
are the gradients that one block of keys contributes, given the final lse. The programs are in `attention_triton_kernels`. jax-triton and triton are
imported at the first call, so that a machine without them can import this file.

One plan of tiles per head dim serves every GPU: it stays under the 99 KiB of shared memory that an L40S gives a block, and keeps some distance from the
255 registers of a thread, for their number varies with lengths and heads. Compiled for sm_80, sm_89 and sm_90, nothing spills; speed is unmeasured.

Not here: float32 (its three-fold TF32 products spill, and plain TF32 would not be float32), head dims between those of HEAD_DIMS, lengths that are no
whole tiles: the caller pads, and passes the scale of the true head dim. No autotuning: a result must not depend on what else the GPU was doing.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

HEAD_DIMS = (64, 128, 256)
TILE = 128  # T and S must be multiples of it; every block of every plan divides it
DTYPES = ("bfloat16", "float16")


class _Plan(NamedTuple):
    """Tiles of queries and keys; one of the two is a program's own, the other is walked over."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int  # of the loop's pipeline: one tile is in use, the others are on their way


_FORWARD = {64: _Plan(128, 64, 8, 3), 128: _Plan(128, 64, 8, 3), 256: _Plan(64, 32, 8, 2)}
_PLANS = {
    "forward": _FORWARD,
    "fold": _FORWARD,
    "dq": {64: _Plan(128, 64, 8, 2), 128: _Plan(128, 32, 8, 2), 256: _Plan(32, 32, 4, 2)},
    "dkv": {64: _Plan(32, 128, 8, 2), 128: _Plan(64, 64, 8, 2), 256: _Plan(32, 32, 8, 2)},
}

compile_for = jax.make_user_context(None)
"""`with compile_for(80): ...` compiles for GPUs of compute capability 8.0 that are not here; without it the GPU of this machine is asked."""


def forward(q, k, v, k_start, k_end, *, aligned=False, scale=None):
    """Attention over all keys that each query sees; see `reference.attention`.

    q: [B, T, H, D]; k, v: [B, S, K, D] with H a multiple of K, all bfloat16 or all float16; D one of HEAD_DIMS, T and S multiples of TILE. k_start,
    k_end: i32[B, T], the interval of keys; any integers, the part outside [0, S) is cut off. aligned: a hint that this backend has no use for, its loops
    end where the intervals end. scale: of the scores, a Python number, D**-0.5 unless given. A query that sees nothing gets out 0 and lse -inf. What
    stands at masked keys must be finite.
    Returns out [B, T, H, D] in q's dtype and lse f32[B, H, T] in base e.
    ValueError for shapes and dtypes that this backend does not take, without the extra `triton`, and without a GPU.
    """
    _check(q, k, v, k_start, k_end)
    outputs = (jax.ShapeDtypeStruct(q.shape, q.dtype), _f32(_rows(q)))
    return _call("forward", (q, k, v, k_start, k_end), outputs, q, k, scale)


def empty(q):
    """The carry of `fold` before any key, for queries [B, T, H, D]: float32 sums acc [B, T, H, D], peaks m (in base 2) and l, both [B, H, T]."""
    return jnp.zeros(q.shape, jnp.float32), jnp.full(_rows(q), -jnp.inf, jnp.float32), jnp.zeros(_rows(q), jnp.float32)


def fold(carry, q, k, v, k_start, k_end, *, scale=None):
    """The carry with these keys added, in the same memory. Arguments as in `forward`; the intervals count from the first of these keys."""
    _check(q, k, v, k_start, k_end)
    _check_like("carry", carry, (q.shape, _rows(q), _rows(q)))
    outputs = tuple(_f32(x.shape) for x in carry)
    return _call("fold", (q, k, v, k_start, k_end, *carry), outputs, q, k, scale, aliases={5: 0, 6: 1, 7: 2})


def finish(carry, dtype):
    """(out [B, T, H, D] in `dtype`, lse f32[B, H, T] in base e) of everything that was folded."""
    acc, m, l = carry
    total = jnp.where(l > 0, l, 1.0)
    lse = jnp.where(l > 0, m * math.log(2) + jnp.log(total), -jnp.inf)
    return (acc / jnp.swapaxes(total, 1, 2)[..., None]).astype(dtype), lse


def dq(q, k, v, do, lse, delta, k_start, k_end, *, into=None, scale=None):
    """What these keys contribute to the gradient of q, f32[B, T, H, D], added to `into` in the same memory where that is given.

    do: [B, T, H, D] in q's dtype, the gradient of out. lse: f32[B, H, T] over the keys of all blocks, in base e; -inf for a query that sees nothing: its
    gradients are exactly 0. delta: f32[B, H, T], the sum over D of do * out. The rest as in `forward`.
    """
    _check(q, k, v, k_start, k_end)
    _check_backward(q, do, lse, delta)
    into = jnp.zeros(q.shape, jnp.float32) if into is None else into
    _check_like("into", (into,), (q.shape,))
    inputs = (q, k, v, do, lse, delta, k_start, k_end, into)
    return _call("dq", inputs, _f32(q.shape), q, k, scale, aliases={8: 0})


def dkv(q, k, v, do, lse, delta, k_start, k_end, *, into=None, scale=None):
    """The gradients (dk, dv) of these keys, f32[B, S, K, D] each, added to the pair `into` in the same memory where that is given. Arguments as in `dq`.
    A key head's group of query heads is summed in order: the same bits every time."""
    _check(q, k, v, k_start, k_end)
    _check_backward(q, do, lse, delta)
    into = (jnp.zeros(k.shape, jnp.float32), jnp.zeros(k.shape, jnp.float32)) if into is None else tuple(into)
    _check_like("into", into, (k.shape, k.shape))
    bounds = _query_bounds(k_start, k_end, k.shape[1], _PLANS["dkv"][q.shape[3]])
    inputs = (q, k, v, do, lse, delta, k_start, k_end, bounds, *into)
    return _call("dkv", inputs, (_f32(k.shape), _f32(k.shape)), q, k, scale, aliases={9: 0, 10: 1})


def _query_bounds(k_start, k_end, num_keys, plan):
    """i32[B, S / block_k, 4]: for each tile of keys the query indices (begin, plain_begin, plain_end, end), multiples of block_q. Outside [begin, end)
    no query sees one of the keys; inside [plain_begin, plain_end) every query sees all of them; those between are masked in the program. A tile of
    queries counts as seeing what lies between its lowest start and its highest end, as in forward. Where the tiles that see everything are not
    neighbours, the first run of them is plain."""
    B, T = k_start.shape
    num_tiles = T // plan.block_q
    low, high = jnp.maximum(k_start, 0), jnp.minimum(k_end, num_keys)
    low, high = (x.reshape(B, num_tiles, 1, plan.block_q) for x in (low, high))
    some = high > low
    lowest = jnp.min(jnp.where(some, low, num_keys), axis=-1)  # [B, tiles of queries, 1]
    highest = jnp.max(jnp.where(some, high, 0), axis=-1)
    key = jnp.arange(0, num_keys, plan.block_k, dtype=jnp.int32)[None, None, :]
    seen = (lowest < key + plan.block_k) & (highest > key)  # [B, tiles of queries, tiles of keys]
    full = (jnp.max(low, axis=-1) <= key) & (jnp.min(high, axis=-1) >= key + plan.block_k)
    tile = jnp.arange(num_tiles, dtype=jnp.int32)[None, :, None]
    first = lambda true: jnp.min(jnp.where(true, tile, num_tiles), axis=1)
    end = jnp.max(jnp.where(seen, tile + 1, 0), axis=1)
    begin = jnp.minimum(first(seen), end)
    plain_begin = jnp.minimum(first(full), end)
    plain_end = jnp.minimum(first(~full & (tile >= plain_begin[:, None, :])), end)
    return jnp.stack([begin, plain_begin, plain_end, end], axis=-1) * plan.block_q


def _call(program, inputs, outputs, q, k, scale, aliases=None):
    """One launch: sizes and the plan of (program, head dim) as constants, a grid over tiles, heads and batch."""
    (B, T, H, D), S, K = q.shape, k.shape[1], k.shape[2]
    plan = _PLANS[program][D]
    constants = dict(
        T=T, S=S, H=H, K=K, D=D, SCALE=float(D**-0.5 if scale is None else scale), BLOCK_Q=plan.block_q, BLOCK_K=plan.block_k
    )  # fmt: skip
    grid = (S // plan.block_k, K, B) if program == "dkv" else (T // plan.block_q, H, B)
    return _launch(program, inputs, outputs, grid, plan.num_warps, plan.num_stages, aliases or {}, constants)


# The one place that knows jax-triton; tests put an interpreter here.
def _launch(program, inputs, outputs, grid, num_warps, num_stages, aliases, constants):
    try:
        from jax_triton import triton_call

        from jaxllm_kernels import attention_triton_kernels
    except ImportError as error:
        raise ValueError(
            "the triton attention backend needs jax-triton, triton and jax's CUDA plugin: pip install 'jaxllm[triton,gpu]', "
            f'or set attention.backend = "xla". ({type(error).__name__}: {error})'
        ) from error
    return triton_call(
        *inputs,
        kernel=getattr(attention_triton_kernels, program),
        out_shape=outputs,
        grid=grid,
        name=f"attention_{program}",
        num_warps=num_warps,
        num_stages=num_stages,
        compute_capability=_capability(),
        input_output_aliases=aliases,
        **constants,
    )


def _capability():
    """Of the GPU compiled for, as 80 for 8.0."""
    if compile_for.value is not None:
        return compile_for.value
    device = jax.local_devices()[0]
    found = getattr(device, "compute_capability", None)  # "8.0" on NVIDIA GPUs
    if not found or not found.replace(".", "").isdigit() or float(found) < 8:
        got = f"{device.device_kind}{f' of compute capability {found}' if found else ''}"
        raise ValueError(
            f'the triton attention backend needs an NVIDIA GPU of compute capability 8.0 or more, got {got}; set attention.backend = "xla", '
            "or compile for a GPU that is not here inside attention_triton.compile_for(80)"
        )
    return int(found.replace(".", ""))


def _rows(q):
    B, T, H, _ = q.shape
    return B, H, T


def _f32(shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _check(q, k, v, k_start, k_end):
    """ValueError for what the programs cannot take."""
    refuse = lambda need, got: _refuse(need, got, 'or set attention.backend = "xla"')
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        refuse("q [B, T, H, D] and k, v [B, S, K, D]", f"{q.shape}, {k.shape} and {v.shape}")
    (B, T, H, D), S, K = q.shape, k.shape[1], k.shape[2]
    if {x.dtype.name for x in (q, k, v)} - {q.dtype.name} or q.dtype.name not in DTYPES:
        refuse(
            f"q, k and v of one dtype of {', '.join(DTYPES)}",
            f"{q.dtype.name}, {k.dtype.name} and {v.dtype.name}; set precision.compute to one of them",
        )
    if D not in HEAD_DIMS:
        refuse(f"head_dim in {HEAD_DIMS}", f"{D}; fill it up with zeros and pass scale = {D}**-0.5")
    if H % K:
        refuse("query heads that are a multiple of the key heads", f"{H} and {K}")
    if T % TILE or S % TILE or not T or not S:
        refuse(
            f"T and S that are multiples of {TILE}",
            f"{T} and {S}; fill up with rows whose interval is empty and with keys that nobody sees",
        )
    for x in (k_start, k_end):
        if x.shape != (B, T) or x.dtype != jnp.int32:
            refuse(f"intervals int32{[B, T]}", f"{x.dtype.name}{list(x.shape)}")


def _check_backward(q, do, lse, delta):
    if do.shape != q.shape or do.dtype != q.dtype:
        _refuse(
            f"do like q, {q.dtype.name}{list(q.shape)}",
            f"{do.dtype.name}{list(do.shape)}",
            "cast it where out was made",
        )
    _check_like("lse and delta", (lse, delta), (_rows(q), _rows(q)))


def _check_like(name, arrays, shapes):
    for x, shape in zip(arrays, shapes, strict=True):
        if x.shape != shape or x.dtype != jnp.float32:
            _refuse(f"{name} of float32{list(shape)}", f"{x.dtype.name}{list(x.shape)}", "take it from this backend")


def _refuse(need, got, do):
    raise ValueError(f"triton attention needs {need}, got {got}; {do}")
