"""The three Hopper attention kernels: forward, dq, and dk with dv. Tiles, barriers and products; `attention_hopper` is what callers use.

All three have one shape. A block is three warpgroups: two consumers that own 64 rows each and a producer that issues every TMA load and gives
its registers to the others. The rows of a block stay in shared memory; the other side of the product is streamed tile by tile through `stages` slots,
each with a barrier that says "full" and one that says "free". Which tiles are streamed is decided before the kernel, as bounds of three loops
(masked, plain, masked): a tile that nobody sees costs nothing, one that everybody sees no mask, and no loop asks which it is.

Formulas: FlashAttention-2 (arXiv 2307.08691), with exponentials of base 2; two consumers that take turns: FlashAttention-3 (arXiv 2407.08608).
The interpreter checks arithmetic, indices and the balance of barriers. It runs products at once and does not watch their operands, so it cannot
see an operand that is overwritten too early: lines whose order only a GPU or a reader can check are marked ORDER.

Not here: atomics and split reductions. Every sum has one fixed order, so two runs agree to the bit.
"""

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxllm_kernels.hopper_mosaic import (
    CONSUMERS,
    LOG2E,
    PER_COLUMN,
    PER_ROW,
    TILE,
    Mosaic,
    operand_memory,
    per_column,
    per_row,
    roles,
    see_the_end,
    slot_of,
    turned,
)

ROWS = 64  # rows of a consumer: the height of a warpgroup's product
FLOOR = -1e30  # the running maximum of a row that has seen nothing: finite, so that no inf - inf appears
f32, i32 = jnp.float32, jnp.int32


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a kernel is cut. streamed: rows of a streamed tile (keys for forward and dq, queries for dkv); stages: slots for such tiles;
    overlap: leave the last product of a tile running into the next tile; split: the consumers share 64 rows, both compute all scores, and each
    owns half of the gradients' columns, where a whole row of them does not fit in registers."""

    streamed: int
    stages: int = 2
    overlap: bool = False
    split: bool = False

    @property
    def block(self):
        """Rows of a block."""
        return ROWS if self.split else CONSUMERS * ROWS


def _loops(bound, step, start, carry=None):
    """step(n, carry, masked) for one n after the other from `start`: over the tiles [b0, b1) masked, [b1, b2) plain, [b2, b3) masked.

    b = bound(0 to 3) is read from memory before each loop and n is the only counter: a few registers less decide whether dkv spills.
    Returns (the n that would follow, carry).
    """
    for part, masked in enumerate((True, False, True)):
        end = start + bound(part + 1) - bound(part)
        carry = lax.fori_loop(start, end, functools.partial(step, masked=masked), carry)
        start = end
    return start, carry


def _seen(mosaic, shape, first, intervals, dim):
    """Which places of a tile of scores are inside their query's interval, [2, queries] in shared memory; keys run along `dim` from `first`."""
    layout, spread = (PER_ROW, per_row) if dim else (PER_COLUMN, per_column)
    starts, ends = (mosaic.load(intervals.at[n], layout) for n in range(2))
    key = mosaic.index(shape, dim) + first
    return (key >= spread(starts, shape)) & (key < spread(ends, shape))


def half(ref, which):
    """at(batch, rows, head) of keys (0) or values (1) in global memory: an array of their own, or half of [2, B, S, K, D], which a ring sends as one;
    slicing it outside would copy both halves (seen in compiled programs)."""
    return lambda *at: ref.at[(which, *at) if len(ref.shape) == 5 else at]


def _own_queries(plan, T, bounds_ref):
    """Of a block of forward or dq: (batch, head, bound(0 to 3), rows_of(consumer) in T)."""
    b, h = lax.axis_index("batch"), lax.axis_index("head")
    i = T // plan.block - 1 - lax.axis_index("tile")  # a causal mask's longest rows first: short ones fill the tail
    return b, h, lambda part: bounds_ref[b, i, part], lambda w: pl.ds(i * plan.block + w * ROWS, ROWS)


def _stream_keys(plan, first, last, b, key_head, slots):
    """Producer of forward and dq: keys and values of tiles [first, last). slots: (source, memory, full, free) of each."""

    def fetch(j, _):
        n, rows = j - first, pl.ds(j * plan.streamed, plan.streamed)
        slot = slot_of(n, plan)
        for source, memory, full, free in slots:
            # ORDER: a slot is refilled only after both consumers have said that no product reads it any more
            pl.when(n >= plan.stages)(functools.partial(plgpu.barrier_wait, free.at[slot]))
            plgpu.copy_gmem_to_smem(source(b, rows, key_head), memory.at[slot], full.at[slot])

    lax.fori_loop(first, last, fetch, None)
    see_the_end(plan, last - first, [free for *_, free in slots])


def _key_slots(plan, D, dtype):
    """Scratch of forward and dq: what `_stream_keys` fills."""
    tiles = {name: operand_memory((plan.stages, plan.streamed, D), dtype) for name in ("k_s", "v_s")}
    full = {name: plgpu.Barrier(num_barriers=plan.stages) for name in ("k_full", "v_full")}
    return tiles | full | {name: _free(plan) for name in ("k_free", "v_free")}


def _free(plan):
    return plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=plan.stages)


def forward(q, k, v, intervals, bounds, sums=(), *, plan: Plan, scale: float, mosaic: Mosaic):
    """(out, lse), or with sums = (acc, m, l) those with these keys added.

    q: [B, T, H, D]; k, v: [B, S, K, D]; intervals: i32[B, 2, T], starts and ends within [0, S]; bounds: i32[B, T / plan.block, 4].
    out: [B, T, H, D] in q's dtype, lse: f32[B, H, T]. acc: f32[B, T, H, D], the sum of p v; m: f32[B, H, T], the largest score so far in units
    of log 2; l: f32[B, H, T], the sum of p = exp2(score - m).
    """
    (B, T, H, D), K, dtype = q.shape, k.shape[-2], q.dtype
    tile = (ROWS, plan.streamed)
    factor = scale * LOG2E

    def attention_forward(
        q_ref, k_ref, v_ref, intervals_ref, bounds_ref, *outs,
        q_s, k_s, v_s, intervals_s, rows_s, q_full, k_full, v_full, k_free, v_free, turn, p_s,
    ):  # fmt: skip
        b, h, bound, rows_of = _own_queries(plan, T, bounds_ref)

        def producer():
            for w in range(CONSUMERS):
                full, rows = q_full.at[w], rows_of(w)
                plgpu.copy_gmem_to_smem(q_ref.at[b, rows, h], q_s.at[w], full)
                plgpu.copy_gmem_to_smem(intervals_ref.at[b, :, rows], intervals_s.at[w], full)
                if sums:
                    plgpu.copy_gmem_to_smem(outs[1].at[b, h, rows], rows_s.at[0, w], full)
                    plgpu.copy_gmem_to_smem(outs[2].at[b, h, rows], rows_s.at[1, w], full)
            key_head = lax.div(h, jnp.int32(H // K))
            slots = ((half(k_ref, 0), k_s, k_full, k_free), (half(v_ref, 1), v_s, v_full, v_free))
            _stream_keys(plan, bound(0), bound(3), b, key_head, slots)

        def consumer(w):
            rows, first = rows_of(w), bound(0)
            plgpu.barrier_wait(q_full.at[w])
            if sums:
                acc = mosaic.load_global(outs[0].at[b, rows, h], TILE)
                m, l = (mosaic.load(rows_s.at[n, w], PER_ROW) for n in range(2))
            else:
                acc = mosaic.full((ROWS, D), 0, TILE)
                m, l = mosaic.full((ROWS,), FLOOR, PER_ROW), mosaic.full((ROWS,), 0, PER_ROW)

            def take_turns():  # both wait for both: what one consumer does before, the other does after
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(turn)

            pl.when(w == 1)(take_turns)  # from here on one multiplies while the other exponentiates

            def step(j, carry, masked):
                acc, m, l = carry
                slot = slot_of(j - first, plan)
                plgpu.barrier_wait(k_full.at[slot])

                def scores(s_acc):
                    plgpu.wgmma(s_acc, q_s.at[w], turned(k_s.at[slot]))
                    take_turns()
                    return s_acc[...]

                s = pl.run_scoped(scores, plgpu.ACC(tile, f32))
                # ORDER: reading s_acc has waited for the product that reads this slot
                plgpu.barrier_arrive(k_free.at[slot])
                if masked:  # p is exactly 0 where s is -inf, for m is never below FLOOR
                    s = jnp.where(_seen(mosaic, tile, j * plan.streamed, intervals_s.at[w], 1), s, -jnp.inf)
                new_m = jnp.maximum(m, s.max(axis=1) * factor)
                alpha = jnp.exp2(m - new_m)
                p = jnp.exp2(s * factor - per_row(new_m, tile))
                l = l * alpha + p.sum(axis=1)
                acc = acc * per_row(alpha, (ROWS, D))
                p = p.astype(dtype)
                take_turns()
                plgpu.barrier_wait(v_full.at[slot])
                acc = mosaic.add_product(acc, p, v_s.at[slot], p_s, w)
                # ORDER: add_product returns when the product has ended
                plgpu.barrier_arrive(v_free.at[slot])
                return acc, new_m, l

            _, (acc, m, l) = _loops(bound, step, first, (acc, m, l))
            pl.when(w == 0)(take_turns)  # the turn that the other took more at the start
            if sums:
                outs[0][b, rows, h] = acc
                rows_s[0, w, ...], rows_s[1, w, ...] = m, l
                copies = ((rows_s.at[0, w], outs[1].at[b, h, rows]), (rows_s.at[1, w], outs[2].at[b, h, rows]))
            else:
                total = jnp.where(l > 0, l, 1.0)
                q_s[w, ...] = (acc * per_row(1.0 / total, (ROWS, D))).astype(dtype)  # no product reads q any more
                rows_s[0, w, ...] = jnp.where(l > 0, m * (1 / LOG2E) + jnp.log(total), -jnp.inf)
                copies = ((q_s.at[w], outs[0].at[b, rows, h]), (rows_s.at[0, w], outs[1].at[b, h, rows]))
            plgpu.commit_smem()  # ORDER: before TMA reads what registers have just written
            for memory, target in copies:
                plgpu.copy_smem_to_gmem(memory, target)
            plgpu.wait_smem_to_gmem(0)  # ORDER: shared memory outlives the copies that read it

        roles(producer, consumer)

    return mosaic.launch(
        attention_forward,
        grid={"head": H, "tile": T // plan.block, "batch": B},
        arguments=(q, k, v, intervals, bounds),
        results=(jax.ShapeDtypeStruct(q.shape, dtype), jax.ShapeDtypeStruct((B, H, T), f32)),
        sums=sums,
        scratch=dict(
            q_s=operand_memory((CONSUMERS, ROWS, D), dtype),
            intervals_s=plgpu.SMEM((CONSUMERS, 2, ROWS), i32),
            rows_s=plgpu.SMEM((2, CONSUMERS, ROWS), f32),
            q_full=plgpu.Barrier(num_arrivals=4 if sums else 2, num_barriers=CONSUMERS),
            **_key_slots(plan, D, dtype),
            turn=plgpu.Barrier(num_arrivals=CONSUMERS),
            p_s=mosaic.desks(tile, dtype),
        ),
    )


def dq(q, k, v, do, rows, intervals, bounds, into=(), *, plan: Plan, scale: float, mosaic: Mosaic):
    """(dq,), or with into = (sum,) that with dq added; f32[B, T, H, D].

    As `forward`, with do like q; rows: f32[B, H, 2, T], the lse in units of log 2 and delta = sum(do * out).
    p = exp2(s - lse), ds = p * (do v^T - delta), dq = scale * ds k. Where the mask hides a place, p and ds may be anything (lse is -inf for a
    query that sees nothing) until they are replaced by 0.
    """
    (B, T, H, D), K, dtype = q.shape, k.shape[-2], q.dtype
    tile = (ROWS, plan.streamed)
    factor = scale * LOG2E
    width = D // CONSUMERS if plan.split else D
    query_tiles = 1 if plan.split else CONSUMERS  # tiles of ROWS queries in shared memory

    def attention_dq(
        q_ref, k_ref, v_ref, do_ref, rows_ref, intervals_ref, bounds_ref, dq_ref,
        *, q_s, do_s, k_s, v_s, rows_s, intervals_s, q_full, k_full, v_full, k_free, v_free, ds_s,
    ):  # fmt: skip
        b, h, bound, rows_of = _own_queries(plan, T, bounds_ref)

        def producer():
            for w in range(query_tiles):
                full, rows = q_full.at[w], rows_of(w)
                plgpu.copy_gmem_to_smem(q_ref.at[b, rows, h], q_s.at[w], full)
                plgpu.copy_gmem_to_smem(do_ref.at[b, rows, h], do_s.at[w], full)
                plgpu.copy_gmem_to_smem(rows_ref.at[b, h, :, rows], rows_s.at[w], full)
                plgpu.copy_gmem_to_smem(intervals_ref.at[b, :, rows], intervals_s.at[w], full)
            key_head = lax.div(h, jnp.int32(H // K))
            slots = ((half(k_ref, 0), k_s, k_full, k_free), (half(v_ref, 1), v_s, v_full, v_free))
            _stream_keys(plan, bound(0), bound(3), b, key_head, slots)

        def consumer(w):
            own = 0 if plan.split else w  # which queries
            rows, first = rows_of(own), bound(0)
            first_column = pl.multiple_of(w * width, width) if plan.split else 0
            plgpu.barrier_wait(q_full.at[own])
            lse, delta = (mosaic.load(rows_s.at[own, n], PER_ROW) for n in range(2))

            def accumulate(dq_acc):
                def step(j, _, masked):
                    n = j - first
                    slot = slot_of(n, plan)
                    plgpu.barrier_wait(k_full.at[slot])

                    def gradient_of_scores(s_acc, dp_acc):
                        plgpu.wgmma(s_acc, q_s.at[own], turned(k_s.at[slot]))
                        plgpu.barrier_wait(v_full.at[slot])
                        plgpu.wgmma(dp_acc, do_s.at[own], turned(v_s.at[slot]))
                        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)  # dp may still run
                        if plan.overlap:  # ORDER: products end in order, so that of the tile before has ended too
                            before = k_free.at[slot_of(n + plan.stages - 1, plan)]
                            pl.when(n > 0)(functools.partial(plgpu.barrier_arrive, before))
                        p = jnp.exp2(s * factor - per_row(lse, tile))
                        dp = dp_acc[...]
                        # ORDER: reading dp_acc has waited for the product that reads this slot
                        plgpu.barrier_arrive(v_free.at[slot])
                        ds = p * (dp - per_row(delta, tile))
                        if masked:
                            ds = jnp.where(_seen(mosaic, tile, j * plan.streamed, intervals_s.at[own], 1), ds, 0.0)
                        return ds.astype(dtype)

                    ds = pl.run_scoped(gradient_of_scores, plgpu.ACC(tile, f32), plgpu.ACC(tile, f32))
                    ds = mosaic.operand(ds, ds_s, w)
                    plgpu.wgmma(dq_acc, ds, _columns(k_s.at[slot], first_column, width, D))
                    if not plan.overlap:
                        plgpu.wgmma_wait(0)  # ORDER: before the slot is given back
                        plgpu.barrier_arrive(k_free.at[slot])

                end, _ = _loops(bound, step, first)
                target = _columns(dq_ref.at[b, rows, h], first_column, width, D)
                out = dq_acc[...] * scale
                target[...] = out + mosaic.load_global(target, TILE) if into else out
                if plan.overlap:  # ORDER: reading dq_acc has waited for the last product
                    count = end - first
                    last = k_free.at[slot_of(count + plan.stages - 1, plan)]
                    pl.when(count > 0)(functools.partial(plgpu.barrier_arrive, last))

            pl.run_scoped(accumulate, plgpu.ACC((ROWS, width), f32))

        roles(producer, consumer)

    return mosaic.launch(
        attention_dq,
        grid={"head": H, "tile": T // plan.block, "batch": B},
        arguments=(q, k, v, do, rows, intervals, bounds),
        results=(jax.ShapeDtypeStruct(q.shape, f32),),
        sums=into,
        scratch=dict(
            q_s=operand_memory((query_tiles, ROWS, D), dtype),
            do_s=operand_memory((query_tiles, ROWS, D), dtype),
            rows_s=plgpu.SMEM((query_tiles, 2, ROWS), f32),
            intervals_s=plgpu.SMEM((query_tiles, 2, ROWS), i32),
            q_full=plgpu.Barrier(num_arrivals=4, num_barriers=query_tiles),
            **_key_slots(plan, D, dtype),
            ds_s=mosaic.desks(tile, dtype),
        ),
    )


def _columns(ref, first, width, D):
    """[rows, D] as its columns [first, first + width)."""
    return ref if width == D else ref.at[:, pl.ds(first, width)]


def dkv(q, k, v, do, rows, intervals, bounds, into=(), *, plan: Plan, scale: float, mosaic: Mosaic):
    """(dk, dv), or with into = (sum, sum) those with dk and dv added; f32[B, S, K, D].

    As `dq`, with bounds i32[B, S / plan.block, 4] over tiles of queries. Scores are computed as [keys, queries], so that p and ds are left
    operands straight from registers. The query heads of a key head are a loop inside the block. dv = p^T do, dk = scale * ds^T q.
    """
    (B, _, H, D), (S, K), dtype = q.shape, k.shape[-3:-1], q.dtype
    groups = H // K
    tile = (ROWS, plan.streamed)
    factor = scale * LOG2E
    width = D // CONSUMERS if plan.split else D
    key_tiles = 1 if plan.split else CONSUMERS  # tiles of ROWS keys in shared memory

    def attention_dkv(
        q_ref, k_ref, v_ref, do_ref, rows_ref, intervals_ref, bounds_ref, groups_ref, dk_ref, dv_ref,
        *, k_s, v_s, q_s, do_s, rows_s, intervals_s, kv_full, q_full, do_full, q_free, do_free, p_s, ds_s,
    ):  # fmt: skip
        b, head, j = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("tile")
        bound = lambda part: bounds_ref[b, j, part]
        rows_of = lambda w: pl.ds(j * plan.block + w * ROWS, ROWS)

        def producer():
            for w in range(key_tiles):
                plgpu.copy_gmem_to_smem(half(k_ref, 0)(b, rows_of(w), head), k_s.at[w], kv_full.at[w])
                plgpu.copy_gmem_to_smem(half(v_ref, 1)(b, rows_of(w), head), v_s.at[w], kv_full.at[w])
            first_head = head * groups

            def stream_head(h, before):  # before: tiles streamed for the heads before this one
                def fetch(i, offset):
                    n, rows = i + offset, pl.ds(i * plan.streamed, plan.streamed)
                    slot = slot_of(n, plan)
                    # ORDER: as in _stream_keys
                    pl.when(n >= plan.stages)(functools.partial(plgpu.barrier_wait, q_free.at[slot]))
                    plgpu.copy_gmem_to_smem(q_ref.at[b, rows, h], q_s.at[slot], q_full.at[slot])
                    plgpu.copy_gmem_to_smem(intervals_ref.at[b, :, rows], intervals_s.at[slot], q_full.at[slot])
                    plgpu.copy_gmem_to_smem(rows_ref.at[b, h, :, rows], rows_s.at[slot], q_full.at[slot])
                    pl.when(n >= plan.stages)(functools.partial(plgpu.barrier_wait, do_free.at[slot]))
                    plgpu.copy_gmem_to_smem(do_ref.at[b, rows, h], do_s.at[slot], do_full.at[slot])
                    return offset

                offset = lax.fori_loop(bound(0), bound(3), fetch, before - bound(0))
                return offset + bound(3)

            count = lax.fori_loop(first_head, first_head + groups_ref[0], stream_head, jnp.int32(0))
            see_the_end(plan, count, (q_free, do_free))

        def consumer(w):
            own = 0 if plan.split else w  # which keys
            rows = rows_of(own)
            first_column = pl.multiple_of(w * width, width) if plan.split else 0
            plgpu.barrier_wait(kv_full.at[own])

            def accumulate(dk_acc, dv_acc):
                def step(n, _, masked):
                    slot = slot_of(n, plan)
                    plgpu.barrier_wait(q_full.at[slot])

                    def gradient_of_scores(s_acc, dp_acc):
                        plgpu.wgmma(s_acc, k_s.at[own], turned(q_s.at[slot]))
                        s = s_acc[...]
                        if plan.overlap:  # ORDER: everything issued so far has ended, dk of the tile before included
                            before = q_free.at[slot_of(n + plan.stages - 1, plan)]
                            pl.when(n > 0)(functools.partial(plgpu.barrier_arrive, before))
                        p = jnp.exp2(s * factor - per_column(mosaic.load(rows_s.at[slot, 0], PER_COLUMN), tile))
                        if masked:
                            first_key = j * plan.block + own * ROWS
                            p = jnp.where(_seen(mosaic, tile, first_key, intervals_s.at[slot], 0), p, 0.0)
                        plgpu.barrier_wait(do_full.at[slot])
                        plgpu.wgmma(dp_acc, v_s.at[own], turned(do_s.at[slot]))
                        p_left = mosaic.operand(p.astype(dtype), p_s, w)
                        plgpu.wgmma(dv_acc, p_left, _columns(do_s.at[slot], first_column, width, D))
                        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)  # dv may still run
                        ds = p * (dp - per_column(mosaic.load(rows_s.at[slot, 1], PER_COLUMN), tile))
                        if masked:  # whatever stands in do at places outside the mask
                            ds = jnp.where(p == 0, 0.0, ds)
                        return ds.astype(dtype)

                    ds = pl.run_scoped(gradient_of_scores, plgpu.ACC(tile, f32), plgpu.ACC(tile, f32))
                    ds = mosaic.operand(ds, ds_s, w)
                    plgpu.wgmma(dk_acc, ds, _columns(q_s.at[slot], first_column, width, D))
                    plgpu.wgmma_wait(1)  # ORDER: dv has ended, so do's slot is free; dk may still run
                    plgpu.barrier_arrive(do_free.at[slot])
                    if not plan.overlap:
                        plgpu.wgmma_wait(0)  # ORDER: before the slot is given back
                        plgpu.barrier_arrive(q_free.at[slot])

                count = lax.fori_loop(0, groups_ref[0], lambda _, n: _loops(bound, step, n)[0], jnp.int32(0))
                for ref, acc, unit in ((dk_ref, dk_acc, scale), (dv_ref, dv_acc, 1.0)):
                    target = _columns(ref.at[b, rows, head], first_column, width, D)
                    out = acc[...] * unit
                    target[...] = out + mosaic.load_global(target, TILE) if into else out
                if plan.overlap:  # ORDER: reading dk_acc has waited for the last product
                    last = q_free.at[slot_of(count + plan.stages - 1, plan)]
                    pl.when(count > 0)(functools.partial(plgpu.barrier_arrive, last))

            pl.run_scoped(accumulate, plgpu.ACC((ROWS, width), f32), plgpu.ACC((ROWS, width), f32))

        roles(producer, consumer)

    result = jax.ShapeDtypeStruct(k.shape[-4:], f32)
    return mosaic.launch(
        attention_dkv,
        grid={"head": K, "tile": S // plan.block, "batch": B},
        # the number of heads per key head is data: known to the compiler, a small one is unrolled, and spills
        arguments=(q, k, v, do, rows, intervals, bounds, jnp.full((1,), groups, i32)),
        results=(result, result),
        sums=into,
        scratch=dict(
            k_s=operand_memory((key_tiles, ROWS, D), dtype),
            v_s=operand_memory((key_tiles, ROWS, D), dtype),
            q_s=operand_memory((plan.stages, plan.streamed, D), dtype),
            do_s=operand_memory((plan.stages, plan.streamed, D), dtype),
            rows_s=plgpu.SMEM((plan.stages, 2, plan.streamed), f32),
            intervals_s=plgpu.SMEM((plan.stages, 2, plan.streamed), i32),
            kv_full=plgpu.Barrier(num_arrivals=2, num_barriers=key_tiles),
            q_full=plgpu.Barrier(num_arrivals=3, num_barriers=plan.stages),
            do_full=plgpu.Barrier(num_barriers=plan.stages),
            q_free=_free(plan),
            do_free=_free(plan),
            p_s=mosaic.desks(tile, dtype),
            ds_s=mosaic.desks(tile, dtype),
        ),
    )
