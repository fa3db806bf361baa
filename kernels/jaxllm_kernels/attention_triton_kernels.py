"""The Triton programs of the `triton` attention backend: forward, fold, dq and dkv. Imports triton at the top: `attention_triton` loads this file late.

Arrays are read where they lie, [B, T, H, D] and [B, S, K, D], without a transpose; every size is a compile-time constant. One program owns one
tile of queries (forward, fold, dq) or one tile of keys (dkv) of one head and one row of the batch, and walks over the tiles of the other side
between two loop bounds. Three loops in a row: tiles that some queries see in part (masked), tiles that all queries see in full (plain, no mask
arithmetic), and masked again. The bounds are data, the loops are not conditional: a condition inside a loop keeps the compiler from fetching the
next tiles ahead.

Scores are kept in base 2 (times log2 e), because exp2 is the instruction that the GPU has. Sums are float32, products take their operands in the
dtype of the inputs. Offsets of tiles are int64: at a million tokens [T, H, D] has more than 2**31 elements. Where a sum is updated
in place, a program reads of it only what it alone writes, and before it writes.

Not here: atomics (the key side sums over its group of query heads in order, so results are the same from run to run), dropout, biases.
Paper: FlashAttention-2 (arXiv 2307.08691).
"""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
INF: tl.constexpr = tl.constexpr(float("inf"))


@triton.jit
def _interval(k_start, k_end, first_row, S: tl.constexpr, BLOCK_Q: tl.constexpr):
    """(low, high) i32[BLOCK_Q] of a tile of queries, clipped to the S keys; a row that sees nothing has (S, 0)."""
    rows = first_row + tl.arange(0, BLOCK_Q)
    low = tl.maximum(tl.load(k_start + rows), 0)
    high = tl.minimum(tl.load(k_end + rows), S)
    seen = high > low
    return tl.where(seen, low, S), tl.where(seen, high, 0)


@triton.jit
def _own_queries(
    k_start, k_end,
    T: tl.constexpr, S: tl.constexpr, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """The tile of queries of a program in the grid (T / BLOCK_Q, H, B): (its first row, where its rows are in [B, H, T], where its head begins in
    [B, T, H, D], where its key head does in [B, S, K, D], its rows' intervals low, high). The last queries of a causal mask have the most work: they
    start first."""
    row = (T // BLOCK_Q - 1 - tl.program_id(0)) * BLOCK_Q
    head, batch = tl.program_id(1), tl.cast(tl.program_id(2), tl.int64)
    rows = (batch * H + head) * T + row + tl.arange(0, BLOCK_Q)
    first_query, first_key = batch * (T * H * D) + head * D, batch * (S * K * D) + head // (H // K) * D
    low, high = _interval(k_start, k_end, batch * T + row, S, BLOCK_Q)
    return row, rows, first_query, first_key, low, high


@triton.jit
def _loop_bounds(low, high, BLOCK_K: tl.constexpr):
    """Key indices (begin, plain_begin, plain_end, end), multiples of BLOCK_K: what some row sees, and inside it what all rows see. begin >= end: nothing."""
    begin = tl.min(low) // BLOCK_K * BLOCK_K
    end = (tl.max(high) + BLOCK_K - 1) // BLOCK_K * BLOCK_K
    plain_begin = tl.minimum((tl.max(low) + BLOCK_K - 1) // BLOCK_K * BLOCK_K, end)
    plain_end = tl.maximum(tl.min(high) // BLOCK_K * BLOCK_K, plain_begin)
    return begin, plain_begin, plain_end, end


@triton.jit
def _tile(pointer, first_row, ROW: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """Pointers [ROWS, D] to rows of D elements that lie ROW elements apart."""
    pointer += tl.cast(first_row, tl.int64) * ROW
    return pointer + tl.arange(0, ROWS)[:, None] * ROW + tl.arange(0, D)[None, :]


@triton.jit
def _visible(keys, low, high):
    return (keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None])


@triton.jit
def _fold_keys(
    acc, m, l, q, k, v, low, high, begin, end,
    SCALE: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The online softmax over keys [begin, end): acc f32[rows, D] and l f32[rows] are sums weighted relative to the running peak m f32[rows]."""
    for start in range(begin, end, BLOCK_K):
        k_tile = tl.load(_tile(k, start, ROW, BLOCK_K, D))
        s = tl.dot(q, tl.trans(k_tile)) * (SCALE * LOG2_E)
        if MASKED:
            s = tl.where(_visible(start + tl.arange(0, BLOCK_K), low, high), s, -INF)
        peak = tl.maximum(m, tl.max(s, 1))
        base = peak
        if MASKED:
            base = tl.where(peak == -INF, 0.0, peak)  # a row that has seen nothing yet: exp2(-inf - 0) = 0, not NaN
        p = tl.exp2(s - base[:, None])
        decay = tl.exp2(m - base)
        v_tile = tl.load(_tile(v, start, ROW, BLOCK_K, D))
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * decay[:, None])
        l = l * decay + tl.sum(p, 1)
        m = peak
    return acc, m, l


@triton.jit
def _fold_all(
    acc, m, l, q, k, v, low, high, begin, plain_begin, plain_end, end,
    SCALE: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    acc, m, l = _fold_keys(acc, m, l, q, k, v, low, high, begin, plain_begin, SCALE, ROW, D, BLOCK_K, True)
    acc, m, l = _fold_keys(acc, m, l, q, k, v, low, high, plain_begin, plain_end, SCALE, ROW, D, BLOCK_K, False)
    return _fold_keys(acc, m, l, q, k, v, low, high, plain_end, end, SCALE, ROW, D, BLOCK_K, True)


@triton.jit
def forward(
    q, k, v, k_start, k_end, out, lse,
    T: tl.constexpr, S: tl.constexpr, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    SCALE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (T / BLOCK_Q, H, B). out [B, T, H, D] in its own dtype, lse f32[B, H, T] in base e."""
    row, rows, first_query, first_key, low, high = _own_queries(k_start, k_end, T, S, H, K, D, BLOCK_Q)
    begin, plain_begin, plain_end, end = _loop_bounds(low, high, BLOCK_K)
    q_tile = tl.load(_tile(q + first_query, row, H * D, BLOCK_Q, D))
    acc = tl.zeros([BLOCK_Q, D], tl.float32)
    m = tl.full([BLOCK_Q], -INF, tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    acc, m, l = _fold_all(
        acc, m, l, q_tile, k + first_key, v + first_key, low, high, begin, plain_begin, plain_end, end, SCALE, K * D, D, BLOCK_K
    )  # fmt: skip
    total = tl.where(l > 0, l, 1.0)
    tl.store(_tile(out + first_query, row, H * D, BLOCK_Q, D), (acc / total[:, None]).to(out.dtype.element_ty))
    tl.store(lse + rows, tl.where(l > 0, m * LN_2 + tl.log(total), -INF))


@triton.jit
def fold(
    q, k, v, k_start, k_end, acc_in, m_in, l_in, acc_out, m_out, l_out,
    T: tl.constexpr, S: tl.constexpr, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    SCALE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (T / BLOCK_Q, H, B). acc f32[B, T, H, D], m (base 2) and l f32[B, H, T]; in and out are the same memory, so a tile without keys is left alone."""
    row, rows, first_query, first_key, low, high = _own_queries(k_start, k_end, T, S, H, K, D, BLOCK_Q)
    begin, plain_begin, plain_end, end = _loop_bounds(low, high, BLOCK_K)
    if begin < end:
        q_tile = tl.load(_tile(q + first_query, row, H * D, BLOCK_Q, D))
        acc = tl.load(_tile(acc_in + first_query, row, H * D, BLOCK_Q, D))
        m, l = tl.load(m_in + rows), tl.load(l_in + rows)
        acc, m, l = _fold_all(
            acc, m, l, q_tile, k + first_key, v + first_key, low, high, begin, plain_begin, plain_end, end, SCALE, K * D, D, BLOCK_K
        )  # fmt: skip
        tl.store(_tile(acc_out + first_query, row, H * D, BLOCK_Q, D), acc)
        tl.store(m_out + rows, m)
        tl.store(l_out + rows, l)


@triton.jit
def _dq_keys(
    dq, q, do, lse, delta, k, v, low, high, begin, end,
    SCALE: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    for start in range(begin, end, BLOCK_K):
        k_tile = tl.load(_tile(k, start, ROW, BLOCK_K, D))
        v_tile = tl.load(_tile(v, start, ROW, BLOCK_K, D))
        s = tl.dot(q, tl.trans(k_tile)) * (SCALE * LOG2_E)
        p = tl.exp2(s - lse[:, None])  # infinite in a row that sees nothing: such a row is masked wherever it stands
        if MASKED:
            p = tl.where(_visible(start + tl.arange(0, BLOCK_K), low, high), p, 0.0)
        dp = tl.dot(do, tl.trans(v_tile))
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq)
    return dq


@triton.jit
def dq(
    q, k, v, do, lse, delta, k_start, k_end, into, out,
    T: tl.constexpr, S: tl.constexpr, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    SCALE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (T / BLOCK_Q, H, B). Adds to f32[B, T, H, D]; `into` and `out` are the same memory, so a tile without keys is left alone."""
    row, rows, first_query, first_key, low, high = _own_queries(k_start, k_end, T, S, H, K, D, BLOCK_Q)
    begin, plain_begin, plain_end, end = _loop_bounds(low, high, BLOCK_K)
    if begin < end:
        q_tile = tl.load(_tile(q + first_query, row, H * D, BLOCK_Q, D))
        do_tile = tl.load(_tile(do + first_query, row, H * D, BLOCK_Q, D))
        lse_tile, delta_tile = tl.load(lse + rows) * LOG2_E, tl.load(delta + rows)
        grad = tl.zeros([BLOCK_Q, D], tl.float32)
        grad = _dq_keys(
            grad, q_tile, do_tile, lse_tile, delta_tile, k + first_key, v + first_key, low, high, begin, plain_begin,
            SCALE, K * D, D, BLOCK_K, True,
        )  # fmt: skip
        grad = _dq_keys(
            grad, q_tile, do_tile, lse_tile, delta_tile, k + first_key, v + first_key, low, high, plain_begin, plain_end,
            SCALE, K * D, D, BLOCK_K, False,
        )  # fmt: skip
        grad = _dq_keys(
            grad, q_tile, do_tile, lse_tile, delta_tile, k + first_key, v + first_key, low, high, plain_end, end,
            SCALE, K * D, D, BLOCK_K, True,
        )  # fmt: skip
        sums = tl.load(_tile(into + first_query, row, H * D, BLOCK_Q, D))
        tl.store(_tile(out + first_query, row, H * D, BLOCK_Q, D), sums + grad * SCALE)


@triton.jit
def _dkv_queries(
    dk, dv, k, v, key, q, do, lse, delta, k_start, k_end, begin, end,
    SCALE: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Everything is turned, scores are [keys, queries]: p and ds are then left operands where they stand, in registers."""
    for start in range(begin, end, BLOCK_Q):
        rows = start + tl.arange(0, BLOCK_Q)
        q_tile = tl.load(_tile(q, start, ROW, BLOCK_Q, D))
        lse_tile = tl.load(lse + rows) * LOG2_E
        s = tl.dot(k, tl.trans(q_tile)) * (SCALE * LOG2_E)
        p = tl.exp2(s - lse_tile[None, :])
        if MASKED:
            keys = key + tl.arange(0, BLOCK_K)
            low, high = tl.load(k_start + rows), tl.load(k_end + rows)
            p = tl.where((keys[:, None] >= low[None, :]) & (keys[:, None] < high[None, :]), p, 0.0)
        do_tile = tl.load(_tile(do, start, ROW, BLOCK_Q, D))
        dv = tl.dot(p.to(do_tile.dtype), do_tile, dv)
        dp = tl.dot(v, tl.trans(do_tile))
        ds = p * (dp - tl.load(delta + rows)[None, :])
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk)
    return dk, dv


@triton.jit
def dkv(
    q, k, v, do, lse, delta, k_start, k_end, bounds, dk_in, dv_in, dk_out, dv_out,
    T: tl.constexpr, S: tl.constexpr, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    SCALE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (S / BLOCK_K, K, B). Adds to f32[B, S, K, D], in and out the same memory; bounds i32[B, S / BLOCK_K, 4] are the query indices
    (begin, plain_begin, plain_end, end) that a tile of keys meets. The group's query heads are summed in order."""
    tile, key_head, batch = tl.program_id(0), tl.program_id(1), tl.cast(tl.program_id(2), tl.int64)
    bounds += (batch * (S // BLOCK_K) + tile) * 4
    begin, plain_begin, plain_end, end = tl.load(bounds), tl.load(bounds + 1), tl.load(bounds + 2), tl.load(bounds + 3)
    if begin < end:
        key = tile * BLOCK_K
        first_key = batch * (S * K * D) + key_head * D
        k_tile = tl.load(_tile(k + first_key, key, K * D, BLOCK_K, D))
        v_tile = tl.load(_tile(v + first_key, key, K * D, BLOCK_K, D))
        dk = tl.zeros([BLOCK_K, D], tl.float32)
        dv = tl.zeros([BLOCK_K, D], tl.float32)
        starts, ends = k_start + batch * T, k_end + batch * T
        for member in range(H // K):
            head = key_head * (H // K) + member
            first_query, first_row = batch * (T * H * D) + head * D, (batch * H + head) * T
            dk, dv = _dkv_queries(
                dk, dv, k_tile, v_tile, key, q + first_query, do + first_query, lse + first_row, delta + first_row, starts, ends,
                begin, plain_begin, SCALE, H * D, D, BLOCK_Q, BLOCK_K, True,
            )  # fmt: skip
            dk, dv = _dkv_queries(
                dk, dv, k_tile, v_tile, key, q + first_query, do + first_query, lse + first_row, delta + first_row, starts, ends,
                plain_begin, plain_end, SCALE, H * D, D, BLOCK_Q, BLOCK_K, False,
            )  # fmt: skip
            dk, dv = _dkv_queries(
                dk, dv, k_tile, v_tile, key, q + first_query, do + first_query, lse + first_row, delta + first_row, starts, ends,
                plain_end, end, SCALE, H * D, D, BLOCK_Q, BLOCK_K, True,
            )  # fmt: skip
        dk_sum = tl.load(_tile(dk_in + first_key, key, K * D, BLOCK_K, D))
        tl.store(_tile(dk_out + first_key, key, K * D, BLOCK_K, D), dk_sum + dk * SCALE)
        dv_sum = tl.load(_tile(dv_in + first_key, key, K * D, BLOCK_K, D))
        tl.store(_tile(dv_out + first_key, key, K * D, BLOCK_K, D), dv_sum + dv)
