"""Attention on NVIDIA Hopper: kernels in Pallas Mosaic GPU (TMA, wgmma, warp specialisation), bfloat16 in, float32 sums.

For GPUs of compute capability 9.0 (H100, H200). This file is what callers see: checks, masks as loop bounds, and tile plans; the kernels are in
`attention_hopper_kernels`. Besides `forward` there is the same in parts, for keys that arrive in pieces (a ring): `empty`, `fold` once per
piece, `finish`; the backward kernels are exact addends per piece and add to a running float32 sum in place.

Not here: lengths, head dims and dtypes that fit no tile. They are refused by name; jaxllm pads before it calls. No dropout, no bias, no sinks.
"""

import jax.numpy as jnp

from jaxllm_kernels import attention_hopper_kernels as kernels
from jaxllm_kernels.attention_hopper_kernels import FLOOR, Plan
from jaxllm_kernels.hopper_mosaic import LOG2E, Mosaic

HEAD_DIMS = (64, 128, 256)
TILE = 128  # T and S are multiples of it
PAIRED = True  # keys and values may come as one array

# Tiles by head dim. What decides is 240 registers a thread and 227 KiB of shared memory; compiled for H100, no plan spills or serialises
# (kernels/README.md has the table). Which of two that fit is faster is unmeasured.
FORWARD = {64: Plan(128), 128: Plan(128), 256: Plan(64)}
DQ = {64: Plan(128, overlap=True), 128: Plan(128), 256: Plan(64, overlap=True, split=True)}
DKV = {64: Plan(128, overlap=True), 128: Plan(64, overlap=True), 256: Plan(64, overlap=True, split=True)}


def forward(q, k, v, k_start, k_end, *, aligned=False, scale=None, interpret=False):
    """Attention over the keys that each query may see; see `reference.attention`.

    q: bfloat16 [B, T, H, D]; k, v: bfloat16 [B, S, K, D], or both the same array [2, B, S, K, D] with keys and values in it (PAIRED); H a multiple of
    K, T and S multiples of TILE, D in HEAD_DIMS; k_start, k_end: i32[B, T], any integers: the interval [k_start, k_end) is cut to [0, S). scale: what
    scores are multiplied with, D**-0.5 unless given (for head dims padded with zeros). aligned: not needed here, the intervals say it all.
    interpret: run in Mosaic's interpreter, on a CPU.
    Returns (out [B, T, H, D] in q's dtype, lse f32[B, H, T]); a query that sees nothing gets out 0 and lse -inf. Finite values at keys that
    nobody sees have no influence. ValueError for shapes and dtypes that fit no tile.
    """
    intervals = _checked(q, k, v, k_start, k_end)
    plan = FORWARD[q.shape[3]]
    arguments = (q, k, v, intervals, row_bounds(intervals, plan))
    return tuple(kernels.forward(*arguments, plan=plan, scale=_scale(q, scale), mosaic=Mosaic(interpret)))


def empty(q):
    """The carry before any keys: float32 (acc [B, T, H, D], m [B, H, T], l [B, H, T]), of which callers need to know nothing."""
    B, T, H, _ = q.shape
    # Zeros made of q, which compilers keep where they are: a constant would be hoisted out of a loop over layers, held, and copied in each.
    return q.astype(jnp.float32) * 0, jnp.full((B, H, T), FLOOR, jnp.float32), jnp.zeros((B, H, T), jnp.float32)


def fold(carry, q, k, v, k_start, k_end, *, scale=None, interpret=False):
    """The carry with these keys added, in any order of pieces; arguments as for `forward`, intervals in the index of these keys.

    The carry is updated in place: successive folds in one jit copy nothing (compiled).
    """
    acc, m, l = carry
    intervals = _checked(q, k, v, k_start, k_end, acc=(acc, "BTHD"), m=(m, "BHT"), l=(l, "BHT"))
    plan = FORWARD[q.shape[3]]
    arguments = (q, k, v, intervals, row_bounds(intervals, plan), (acc, m, l))
    return tuple(kernels.forward(*arguments, plan=plan, scale=_scale(q, scale), mosaic=Mosaic(interpret)))


def finish(carry, dtype):
    """(out [B, T, H, D] in dtype, lse f32[B, H, T]) of a carry."""
    acc, m, l = carry
    total = jnp.where(l > 0, l, 1.0)
    lse = jnp.where(l > 0, m * (1 / LOG2E) + jnp.log(total), -jnp.inf)
    return (acc / jnp.swapaxes(total, 1, 2)[..., None]).astype(dtype), lse


def dq(q, k, v, do, lse, delta, k_start, k_end, into=None, *, scale=None, interpret=False):
    """The gradient of q from these keys, f32[B, T, H, D].

    As `forward`, with do like q; lse: f32[B, H, T] over all keys, of other pieces too; delta = sum(do * out) over the head dim, f32[B, H, T];
    into: a sum of dq's type that is added to in place. Rows that see nothing get exactly 0.
    """
    sums = {} if into is None else {"into": (into, "BTHD")}
    intervals = _checked(q, k, v, k_start, k_end, do, lse=(lse, "BHT"), delta=(delta, "BHT"), **sums)
    plan = DQ[q.shape[3]]
    options = dict(plan=plan, scale=_scale(q, scale), mosaic=Mosaic(interpret))
    arguments = (q, k, v, do, _rows(lse, delta), intervals, row_bounds(intervals, plan))
    return kernels.dq(*arguments, () if into is None else (into,), **options)[0]


def dkv(q, k, v, do, lse, delta, k_start, k_end, into=None, *, scale=None, interpret=False):
    """The gradients (dk, dv) of these keys and values, each f32[B, S, K, D]; arguments as for `dq`, into a pair.

    One block sums over all query heads of its key head, in one order: bitwise the same in every run. Keys that nobody sees get exactly 0.
    """
    sums = {} if into is None else {"into[0]": (into[0], "BSKD"), "into[1]": (into[1], "BSKD")}
    intervals = _checked(q, k, v, k_start, k_end, do, lse=(lse, "BHT"), delta=(delta, "BHT"), **sums)
    plan = DKV[q.shape[3]]
    options = dict(plan=plan, scale=_scale(q, scale), mosaic=Mosaic(interpret))
    arguments = (q, k, v, do, _rows(lse, delta), intervals, column_bounds(intervals, k.shape[-3], plan))
    return tuple(kernels.dkv(*arguments, () if into is None else tuple(into), **options))


def _refuse(what, got, advice):
    raise ValueError(f"hopper attention needs {what}, got {got}; {advice}")


def _scale(q, scale):
    return q.shape[3] ** -0.5 if scale is None else float(scale)


def _rows(lse, delta):
    """What the backward kernels know of a query, side by side so that one copy brings it: f32[B, H, 2, T]."""
    return jnp.stack([lse * LOG2E, delta], axis=2)


def _checked(q, k, v, k_start, k_end, do=None, **sums):
    """i32[B, 2, T]: the intervals within [0, S], that of a query that sees nothing as (S, 0), after all that fits no kernel is refused.

    sums: name = (float32 array, its dims in letters).
    """
    if q.ndim != 4 or k.ndim not in (4, 5) or (k.ndim == 5 and k.shape[0] != 2):
        _refuse(
            "q [B, T, H, D] and k [B, S, K, D] or k and v [2, B, S, K, D]",
            f"{q.shape} and {k.shape}",
            "give every array its four dims",
        )
    (B, T, H, D), (S, K) = q.shape, k.shape[-3:-1]
    if D not in HEAD_DIMS:
        larger = [d for d in HEAD_DIMS if d > D]
        pad = f"pad with zeros to {larger[0]} and pass scale = {D}**-0.5, or " if larger else ""
        _refuse(f"a head dim in {HEAD_DIMS}", D, f'{pad}use the backend "xla"')
    for name, length in (("T", T), ("S", S)):
        if length % TILE or not length:
            advice = "pad with queries that see nothing and keys that nobody sees"
            _refuse(f"{name} a multiple of {TILE}", length, advice)
    if not K or H % K:
        _refuse("query heads that are a multiple of the key heads", f"{H} and {K}", "use so many heads")
    keys = "BSKD" if k.ndim == 4 else "2BSKD"
    halves = dict(q=(q, "BTHD"), k=(k, keys), v=(v, keys)) | ({} if do is None else {"do": (do, "BTHD")})
    intervals = dict(k_start=(k_start, "BT"), k_end=(k_end, "BT"))
    sizes = dict(B=B, T=T, H=H, D=D, S=S, K=K) | {"2": 2}
    for arrays, dtype, advice in (
        (halves, jnp.bfloat16, 'compute in bfloat16, or use the backend "xla"'),
        (intervals, jnp.int32, "convert it"),
        (sums, jnp.float32, "keep what is summed over pieces of the keys in float32"),
    ):
        for name, (x, dims) in arrays.items():
            shape = tuple(sizes[dim] for dim in dims)
            if x.shape != shape:
                _refuse(f"{name} [{', '.join(dims)}] = {shape}", x.shape, f"q is {q.shape} and k {k.shape}")
            if x.dtype != dtype:
                _refuse(f"{name} in {jnp.dtype(dtype)}", x.dtype, advice)
    starts, ends = jnp.clip(k_start, 0, S), jnp.clip(k_end, 0, S)
    nothing = ends <= starts
    return jnp.stack([jnp.where(nothing, S, starts), jnp.where(nothing, 0, ends)], axis=1)


def row_bounds(intervals, plan):
    """Tiles of keys that each block of queries meets: i32[B, T / plan.block, 4] = (b0, b1, b2, b3).

    [b0, b3) are the tiles from the first to the last that some query sees; in [b1, b2) every query sees every key, and no mask is needed.
    intervals: those of `_checked`.
    """
    return _bounds(intervals, plan.block, plan.streamed)


def column_bounds(intervals, S, plan):
    """Tiles of queries that each block of keys meets, as `row_bounds`: i32[B, S / plan.block, 4].

    A tile of queries counts as seeing all keys from the first to the last that one of its queries sees.
    """
    blocks = _bounds(intervals, plan.streamed, plan.block)  # of keys, that each tile of queries meets
    block = jnp.arange(S // plan.block, dtype=jnp.int32)[None, :, None]
    first, first_full, last_full, last = (blocks[:, None, :, part] for part in range(4))
    live, full = (first <= block) & (block < last), (first_full <= block) & (block < last_full)
    n = blocks.shape[1]
    tile = jnp.arange(n, dtype=jnp.int32)[None, None, :]
    b3 = jnp.max(jnp.where(live, tile + 1, 0), axis=-1)
    b0 = jnp.minimum(jnp.min(jnp.where(live, tile, n), axis=-1), b3)
    b1 = jnp.minimum(jnp.min(jnp.where(full, tile, n), axis=-1), b3)
    b2 = jnp.minimum(jnp.min(jnp.where(~full & (tile >= b1[..., None]), tile, n), axis=-1), b3)
    return jnp.stack([b0, b1, b2, b3], axis=-1)


def _bounds(intervals, rows, keys):
    """(first live, first full, past the last full, past the last live) tile of `keys` keys for each tile of `rows` queries."""
    starts, ends = (intervals[:, n].reshape(intervals.shape[0], -1, rows) for n in range(2))
    up = lambda x: (x + keys - 1) // keys
    b3 = up(jnp.max(ends, axis=-1))
    b0 = jnp.minimum(jnp.min(starts, axis=-1) // keys, b3)
    b1 = jnp.clip(up(jnp.max(starts, axis=-1)), b0, b3)
    b2 = jnp.clip(jnp.min(ends, axis=-1) // keys, b1, b3)
    return jnp.stack([b0, b1, b2, b3], axis=-1)
