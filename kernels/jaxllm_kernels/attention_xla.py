"""Attention in plain XLA, blocked over queries in both directions: the path of CPUs, and the one that runs anywhere.

Each block of queries meets all the keys it may see at once, so a score block is [heads, block, keys] and nothing of size T x S exists.
Up to MAX_SECTIONS sections of the queries are unrolled, so that an aligned call reads only the keys up to its own end; inside a section
blocks of BLOCK rows are scanned. What decides the speed on XLA:CPU (measured, docs/decisions.md): heads are batched in front and rows are
(position, group) with position major, so a block is one contiguous slice and grouped heads need no repeat; p^T q is computed as q^T p
behind an optimization barrier, because XLA:CPU runs a product with a transposed left operand at half speed.

Not here: an online softmax over key blocks inside a call, which costs a CPU a second pass and an H100 has a kernel for; and skipping what the
intervals of a chunk exclude: a ring step computes all of its scores, so on a GPU this backend does twice the causal work in a ring.
"""

import functools

import jax
import jax.numpy as jnp

TILE, HEAD_DIMS = 1, None  # any length, any head dim
BLOCK = 128  # query positions per block of scores
MAX_SECTIONS = 8  # unrolled sections: compile time against causal waste (1/16 of the scores)

_barrier = jax.lax.optimization_barrier


def _product(a, b, contract):
    """f32. float32 means float32: by default a GPU would round the operands to TF32 (10 bits)."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, (contract, ((0,), (0,))), precision=precision, preferred_element_type=jnp.float32)


def _nt(a, b):
    """[n, i, d] x [n, j, d] -> f32[n, i, j]"""
    return _product(a, b, ((2,), (2,)))


def _nn(a, b):
    """[n, i, j] x [n, j, d] -> f32[n, i, d]"""
    return _product(a, b, ((2,), (1,)))


def _sections(T):
    """(first row, last row + 1, number of blocks) of each section of T rows, where T is a whole number of blocks."""
    block = min(BLOCK, T)
    rows = -(-T // (MAX_SECTIONS * block)) * block
    return [(start, min(start + rows, T), (min(start + rows, T) - start) // block) for start in range(0, T, rows)]


def _whole_blocks(*arrays):
    """[B, T, ...] arrays with T completed by zeros to a whole number of blocks: rows whose interval is empty."""
    T = arrays[0].shape[1]
    missing = -T % min(BLOCK, T)
    return [jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)) if missing else x for x in arrays]


def _heads_first(x, num_kv_heads):
    """[B, T, H, D] -> [B * K, T * G, D], position major."""
    B, T, H, D = x.shape
    return x.reshape(B, T, num_kv_heads, H // num_kv_heads, D).transpose(0, 2, 1, 3, 4).reshape(B * num_kv_heads, -1, D)


def _heads_back(x, B, T):
    """[B * K, T * G, D] -> [B, T, H, D]"""
    K, G, D = x.shape[0] // B, x.shape[1] // T, x.shape[2]
    return x.reshape(B, K, T, G, D).transpose(0, 2, 1, 3, 4).reshape(B, T, K * G, D)


def _scores(q, k, k_start, k_end, scale):
    """Scaled scores f32[n, rows, keys], -inf where the interval excludes the key; q rows are (position, group)."""
    n, rows, _ = q.shape
    B, positions = k_start.shape
    seen = jnp.arange(k.shape[1])[None, None, :]
    seen = (seen >= k_start[:, :, None]) & (seen < k_end[:, :, None])
    shape = (B, n // B, positions, rows // positions, k.shape[1])
    scores = (_nt(q, k) * scale).reshape(shape)
    return jnp.where(seen[:, None, :, None, :], scores, -jnp.inf).reshape(n, rows, k.shape[1])


def _by_block(function, carry, num_blocks, *arrays):
    """`function(carry, *blocks) -> (carry, outputs)` over blocks of rows (dim 1) of each array; outputs are joined along dim 1."""
    if num_blocks == 1:
        return function(carry, *arrays)
    split = lambda x: jnp.moveaxis(x.reshape(x.shape[0], num_blocks, -1, *x.shape[2:]), 1, 0)
    join = lambda y: jnp.moveaxis(y, 0, 1).reshape(y.shape[1], -1, *y.shape[3:])
    carry, outputs = jax.lax.scan(lambda c, blocks: function(c, *blocks), carry, tuple(split(x) for x in arrays))
    return carry, jax.tree.map(join, outputs)


def forward(q, k, v, k_start, k_end, *, aligned, scale, dtype=None):
    """(out [B, T, H, D] in `dtype`, by default q's, lse f32[B, H, T]); see `reference.attention`."""
    (B, T, H, _), S, K = q.shape, k.shape[1], k.shape[2]
    G, dtype = H // K, dtype or q.dtype
    q, k_start, k_end = _whole_blocks(q, k_start, k_end)
    rows, keys, values = (_heads_first(x, K) for x in (q, k, v))

    def one_block(k_part, v_part, _, starts, ends, q_rows):
        s = _scores(q_rows, k_part, starts, ends, scale)
        peak = jnp.max(s, axis=-1, keepdims=True)
        peak = jnp.where(peak == -jnp.inf, 0.0, peak)
        p = jnp.exp(s - peak)
        total = jnp.sum(p, axis=-1, keepdims=True)
        out = _nn(p.astype(v.dtype), v_part) / jnp.where(total > 0, total, 1.0)
        return None, (out.astype(dtype), peak + jnp.log(total))

    parts = []
    for start, end, num_blocks in _sections(q.shape[1]):
        visible = min(end, S) if aligned else S
        block = functools.partial(one_block, keys[:, :visible], values[:, :visible])
        arrays = (k_start[:, start:end], k_end[:, start:end], rows[:, start * G : end * G])
        parts.append(_by_block(block, None, num_blocks, *arrays)[1])
    out, lse = (_heads_back(jnp.concatenate(x, axis=1), B, q.shape[1])[:, :T] for x in zip(*parts, strict=True))
    return out, jnp.moveaxis(lse[..., 0], 1, 2)


def empty(q):
    """What `fold` starts from: no key seen. The carry is (out f32[B, T, H, D], lse f32[B, H, T]) of the keys so far."""
    B, T, H, _ = q.shape
    return jnp.zeros(q.shape, jnp.float32), jnp.full((B, H, T), -jnp.inf, jnp.float32)


def fold(carry, q, k, v, k_start, k_end, *, scale):
    """The carry with the keys of one more chunk. All in float32: sums in bfloat16 lose more with every chunk."""
    (out, lse), (more, more_lse) = (
        carry, forward(q, k, v, k_start, k_end, aligned=False, scale=scale, dtype=jnp.float32)
    )  # fmt: skip
    peak = jnp.maximum(lse, more_lse)
    peak = jnp.where(peak == -jnp.inf, 0.0, peak)  # a row that has seen nothing yet: weights 0 and 0, not NaN
    weights = jnp.exp(lse - peak), jnp.exp(more_lse - peak)
    total = weights[0] + weights[1]
    share = [jnp.moveaxis(w / jnp.where(total > 0, total, 1.0), 1, 2)[..., None] for w in weights]
    return out * share[0] + more * share[1], peak + jnp.log(total)


def finish(carry, dtype):
    """(out in `dtype`, lse) of all keys folded."""
    out, lse = carry
    return out.astype(dtype), lse


def dq(*args, into, scale):
    """f32[B, T, H, D], added to `into` unless that is None. The rest of `backward` is dead code to the compiler."""
    part = backward(*args, aligned=False, scale=scale)[0]
    return part if into is None else into + part


def dkv(*args, into, scale):
    """(dk, dv) f32[B, S, K, D], added to `into` unless that is None."""
    parts = backward(*args, aligned=False, scale=scale)[1:]
    return parts if into is None else tuple(a + b for a, b in zip(into, parts, strict=True))


def backward(q, k, v, do, lse, delta, k_start, k_end, *, aligned, scale):
    """(dq, dk, dv) in float32, what these keys add to them; p is recomputed, block by block, from the lse of all keys.

    do [B, T, H, D]; delta f32[B, H, T], the sum over D of do x out."""
    (B, T, H, D), S, K = q.shape, k.shape[1], k.shape[2]
    G = H // K
    lse = jnp.where(lse == -jnp.inf, 0.0, lse)  # a row that sees nothing: p = exp(-inf - 0) = 0
    lse, delta = (jnp.moveaxis(x, 1, 2)[..., None] for x in (lse, delta))
    q, k_start, k_end, do, lse, delta = _whole_blocks(q, k_start, k_end, do, lse, delta)
    rows, keys, values, do, lse, delta = (_heads_first(x, K) for x in (q, k, v, do, lse, delta))

    def one_block(k_part, v_part, sums, starts, ends, q_rows, do_rows, lse_rows, delta_rows):
        p = jnp.exp(_scores(q_rows, k_part, starts, ends, scale) - lse_rows)
        ds = p * (_nt(do_rows, v_part) - delta_rows)
        p, ds = _barrier((p.astype(q.dtype), ds.astype(q.dtype)))
        q_turned, do_turned = (_barrier(jnp.swapaxes(x, 1, 2)) for x in (q_rows, do_rows))
        sums = (sums[0] + _nn(q_turned, ds), sums[1] + _nn(do_turned, p))
        return sums, _nn(ds, k_part) * scale

    # zeros_like: they vary over the axes of a surrounding shard_map as the keys do, which one that checks types insists on
    sums = tuple(jnp.zeros_like(x, jnp.float32, shape=(x.shape[0], D, S)) for x in (keys, values))
    dqs = []
    for start, end, num_blocks in _sections(q.shape[1]):
        visible = min(end, S) if aligned else S
        block = functools.partial(one_block, keys[:, :visible], values[:, :visible])
        part = slice(start * G, end * G)
        arrays = (k_start[:, start:end], k_end[:, start:end], rows[:, part], do[:, part], lse[:, part], delta[:, part])
        seen, dq = _by_block(block, tuple(x[:, :, :visible] for x in sums), num_blocks, *arrays)
        sums = tuple(jax.lax.dynamic_update_slice(x, y, (0, 0, 0)) for x, y in zip(sums, seen, strict=True))
        dqs.append(dq)
    dq = _heads_back(jnp.concatenate(dqs, axis=1), B, q.shape[1])[:, :T]
    dk, dv = (_heads_back(jnp.swapaxes(x, 1, 2), B, S) for x in sums)
    return dq, dk * scale, dv
