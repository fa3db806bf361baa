"""The two Hopper kernels of grouped products: rows times the matrix of their group, and the gradient of the matrices. `grouped_hopper` is what
callers use.

Both have the shape of the attention kernels: two consumer warpgroups, and a producer that issues every TMA load into `stages` slots, each with a
barrier that says "full" and one that says "free". A group may end anywhere, but TMA reads tiles from aligned rows only; so blocks of rows are
aligned, and one that holds a border is visited once for each of its groups (`visits`). Forward stores of it only the rows of that group; wgrad puts
zeros in place of the others. With a cluster two blocks side by side in N share each tile of x: one reads it for both (multicast).

Work ends where the groups end: forward deals a list as long as the groups are to a fixed number of blocks, a block of wgrad loops over one group's rows.

Lines whose order the interpreter cannot check are marked ORDER, as in `attention_hopper_kernels`.

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
    TILE,
    Mosaic,
    operand_memory,
    roles,
    see_the_end,
    slot_of,
    turned,
)

# As hopper_mosaic.REGISTERS; with its 24 the producer of forward spills (compiled). 2 x 232 + 40 = 3 x 168
_REGISTERS = (232, 40)
_OUT_COLUMNS = 128  # of y staged at a time: JAX 0.12 finds no layout for a wider plain buffer, and it spares memory
BLOCKS = 132  # of `forward`: the multiprocessors of an H100 with NVLink and of an H200. Where there are fewer, the rest of them come in a second wave
_BAND = 8  # blocks side by side in N that run before the next rows: a wave of 132 then reads about as much of x as of w

f32, i32 = jnp.float32, jnp.int32


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a product is cut. columns: of a block's result; depth: contracted per tile, 128 bytes; stages: slots for tiles; cluster: blocks that
    share x; promote: add each tile's product to a float32 sum outside the tensor cores, which keep fewer bits of fp8 sums (about 14 bits of
    mantissa; DeepSeek-V3, arXiv 2412.19437, section 3.3.2)."""

    columns: int
    depth: int
    stages: int
    cluster: int = 1
    promote: bool = False
    rows = 64  # of a consumer: the height of a warpgroup's product

    @property
    def block(self):
        """Rows of a block's result."""
        return CONSUMERS * self.rows


def visits(group_sizes, R, block):
    """The work of `forward` on rows: (i32[n, 4] of (group, block of rows, first and past-last of its rows), i32[2] of (entries, rows of all groups)).

    One entry for each pair of a group and an aligned block that has rows of it, n = ceil(R / block) + E - 1 places for them; those behind the
    entries hold zeros and are not visited. Neither are the rows behind the groups: `forward` writes zeros there, and multiplies nothing.
    """
    E = group_sizes.shape[0]
    ends = jnp.minimum(jnp.cumsum(group_sizes, dtype=i32), R)
    starts = jnp.concatenate([jnp.zeros((1,), i32), ends[:-1]])
    blocks = jnp.where(ends > starts, (ends - 1) // block - starts // block + 1, 0)
    past = jnp.cumsum(blocks, dtype=i32)
    n = jnp.arange(pl.cdiv(R, block) + E - 1, dtype=i32)
    group = jnp.minimum(jnp.sum(n[:, None] >= past[None], axis=1, dtype=i32), E - 1)
    place = starts[group] // block + n - (past - blocks)[group]
    first = jnp.maximum(starts[group] - place * block, 0)
    last = jnp.minimum(ends[group] - place * block, block)
    entries = jnp.where((n < past[-1])[:, None], jnp.stack([group, place, first, last], axis=1), 0)
    return entries, jnp.stack([past[-1], ends[-1]])


def _band(columns, plan):
    """(bands, clusters in a band) of all columns."""
    clusters = columns // (plan.columns * plan.cluster)
    width = max(d for d in range(1, clusters + 1) if clusters % d == 0 and (d == 1 or d * plan.cluster <= _BAND))
    return clusters // width, width


def _column_block(width, plan):
    n = lax.axis_index("band") * width + lax.axis_index("n")
    return n * plan.cluster + lax.axis_index("pair") if plan.cluster > 1 else n


def _produce(plan, before, count, copies, full, free):
    """Streams `count` tiles. copies(n, slot): the copies of tile n, (source, memory, axis to share over or None) each. before: tiles that this
    block has streamed already."""

    def fetch(n, _):
        slot = slot_of(before + n, plan)
        # ORDER: a slot is refilled only after all consumers that read it, those of the other block of a cluster too, have said that they are done
        pl.when(before + n >= plan.stages)(functools.partial(plgpu.barrier_wait, free.at[slot]))
        for source, memory, shared in copies(n, slot):
            plgpu.copy_gmem_to_smem(source, memory, full.at[slot], collective_axes=shared)

    lax.fori_loop(0, count, fetch, None)


def _sum_of_products(plan, loops, operands, full, free, before, count, mosaic):
    """The consumer's sum over `count` tiles, f32[plan.rows, plan.columns]. loops: (first, last, masked) one after the other; operands(n, slot, masked);
    before: tiles that this block has summed already."""
    shape = (plan.rows, plan.columns)

    def promoted(n, total, masked):
        slot = slot_of(before + n, plan)
        plgpu.barrier_wait(full.at[slot])

        def product(acc):
            plgpu.wgmma(acc, *operands(n, slot, masked))
            return acc[...]

        part = pl.run_scoped(product, plgpu.ACC(shape, f32))
        plgpu.barrier_arrive(free.at[slot])  # ORDER: reading acc has waited for the product that reads this slot
        return total + part

    def run(step, carry):
        for first, last, masked in loops:
            carry = lax.fori_loop(first, last, functools.partial(step, masked=masked), carry)
        return carry

    if plan.promote:
        return run(promoted, mosaic.full(shape, 0, TILE))

    def accumulate(acc):
        def step(n, _, masked):
            slot = slot_of(before + n, plan)
            plgpu.barrier_wait(full.at[slot])
            plgpu.wgmma(acc, *operands(n, slot, masked))
            plgpu.wgmma_wait(1)  # ORDER: the product of the tile before has ended, so its slot is free
            freed = free.at[slot_of(before + n + plan.stages - 1, plan)]
            pl.when(n > 0)(functools.partial(plgpu.barrier_arrive, freed))

        run(step, None)
        total = acc[...]
        last = free.at[slot_of(before + count + plan.stages - 1, plan)]
        pl.when(count > 0)(
            functools.partial(plgpu.barrier_arrive, last)
        )  # ORDER: reading acc has waited for the last product
        return total

    return pl.run_scoped(accumulate, plgpu.ACC(shape, f32))


def _barriers(plan):
    """What says of each slot that it is full, after two copies, and that it is free: all consumers that read it, those of the other block of a cluster
    too, are done."""
    free = dict(num_arrivals=CONSUMERS, num_barriers=plan.stages)
    return dict(
        full=plgpu.Barrier(num_arrivals=2, num_barriers=plan.stages),
        free=plgpu.ClusterBarrier(collective_axes=("pair",), **free) if plan.cluster > 1 else plgpu.Barrier(**free),
    )


def forward(x, w, work, scale, *, plan: Plan, transposed: bool, mosaic: Mosaic):
    """y [R, N] in bfloat16: y[r] = x[r] @ w[e(r)] * scale[e(r)], and 0 behind the groups.

    x: [R, K]; w: [E, K, N], [E, N, K] with transposed; work: `visits`; scale: f32[E].

    One block of the grid for each multiprocessor (a cluster for two). They deal the items, an entry of the table and a block of columns each, among themselves
    and stop where the items end, which is where the groups end. The producer fetches the next item's tiles while consumers still store this one's
    result; the zeros behind the groups are stored in between, and nothing waits for them but the next use of memory.
    """
    (R, K), N = x.shape, w.shape[1 if transposed else 2]
    bands, width = _band(N, plan)
    shared = "pair" if plan.cluster > 1 else None
    workers, steps = BLOCKS // plan.cluster, K // plan.depth

    def grouped_forward(x_ref, w_ref, table_ref, totals_ref, scale_ref, y_ref, *, x_s, w_s, y_s, zeros_s, full, free):
        worker, entries, end = lax.axis_index("worker"), totals_ref[0], totals_ref[1]
        pair = lax.axis_index("pair") if shared else 0
        items = _share(bands * width * entries, worker, workers)

        def item(i):
            """(table's entry, block of columns) of this block's i-th item. Side by side in a band first, then down the rows, then the next band."""
            n = worker + i * workers
            visit = lax.div(n, i32(width))
            column = lax.div(visit, entries) * width + lax.rem(n, i32(width))
            group, place, first, last = (table_ref[lax.rem(visit, entries), part] for part in range(4))
            return group, place, first, last, column * plan.cluster + pair

        def producer():
            def fetch(i, _):
                group, place, _, _, n_block = item(i)
                rows = pl.ds(pl.multiple_of(place * plan.block, plan.block), plan.block)
                columns = pl.ds(n_block * plan.columns, plan.columns)

                def copies(n, slot):
                    depth = pl.ds(n * plan.depth, plan.depth)
                    yield x_ref.at[rows, depth], x_s.at[slot], shared
                    w_tile = (group, columns, depth) if transposed else (group, depth, columns)
                    yield w_ref.at[w_tile], w_s.at[slot], None

                _produce(plan, i * steps, steps, copies, full, free)

            lax.fori_loop(0, items, fetch, None)
            see_the_end(plan, items * steps, (free,))

        def consumer(warpgroup):
            own = pl.ds(pl.multiple_of(warpgroup * plan.rows, plan.rows), plan.rows)
            zeros_s[warpgroup, ...] = mosaic.full((plan.rows, _OUT_COLUMNS), 0, TILE).astype(y_ref.dtype)
            plgpu.commit_smem()  # ORDER: before TMA reads what registers have just written

            def operands(n, slot, masked):
                w_tile = w_s.at[slot]
                return x_s.at[slot, own], turned(w_tile) if transposed else w_tile

            def multiply(i):
                group, place, first, last, n_block = item(i)
                loops = ((0, steps, False),)
                y = _sum_of_products(plan, loops, operands, full, free, i * steps, steps, mosaic) * scale_ref[group]
                start, end = (jnp.clip(edge - warpgroup * plan.rows, 0, plan.rows) for edge in (first, last))
                row = place * plan.block + warpgroup * plan.rows
                for column in range(0, plan.columns, _OUT_COLUMNS):
                    # ORDER: memory is written again only after the copies that read it
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    y_s[warpgroup, ...] = y[:, column : column + _OUT_COLUMNS].astype(y_ref.dtype)
                    plgpu.commit_smem()  # ORDER: before TMA reads what registers have just written
                    _store_rows(y_s.at[warpgroup], y_ref, row, start, end, n_block * plan.columns + column)

            # zeros behind the groups, in pieces as high as a consumer's rows, dealt among all consumers; some after each item
            rows, columns = lax.div(end, i32(plan.rows)), N // _OUT_COLUMNS
            consumers = workers * plan.cluster * CONSUMERS
            number = (worker * plan.cluster + pair) * CONSUMERS + warpgroup
            pieces = _share((pl.cdiv(R, plan.rows) - rows) * columns, number, consumers)
            rounds = jnp.maximum(items, 1)
            each = lax.div(pieces + rounds - 1, rounds)

            def zero(n, _):
                piece = number + n * consumers
                row = (rows + lax.div(piece, i32(columns))) * plan.rows
                start, stop = jnp.maximum(end - row, 0), jnp.minimum(R - row, plan.rows)
                _store_rows(zeros_s.at[warpgroup], y_ref, row, start, stop, lax.rem(piece, i32(columns)) * _OUT_COLUMNS)

            def work(i, _):
                pl.when(items > 0)(functools.partial(multiply, i))
                lax.fori_loop(i * each, jnp.minimum((i + 1) * each, pieces), zero, None)

            lax.fori_loop(0, rounds, work, None)
            plgpu.wait_smem_to_gmem(0)  # ORDER: memory is given up only after the copies that read it

        roles(producer, consumer, _REGISTERS)

    return mosaic.launch(
        grouped_forward,
        grid={"worker": workers},
        arguments=(x, w, *work, scale),
        results=jax.ShapeDtypeStruct((R, N), jnp.bfloat16),
        scratch=dict(
            x_s=operand_memory((plan.stages, plan.block, plan.depth), x.dtype),
            w_s=operand_memory(
                (plan.stages, plan.columns, plan.depth) if transposed else (plan.stages, plan.depth, plan.columns),
                w.dtype,
            ),
            y_s=plgpu.SMEM((CONSUMERS, plan.rows, _OUT_COLUMNS), jnp.bfloat16),
            zeros_s=plgpu.SMEM((CONSUMERS, plan.rows, _OUT_COLUMNS), jnp.bfloat16),
            **_barriers(plan),
        ),
        cluster=plan.cluster,
    )


def _share(total, number, count):
    """How many of `total` things, dealt one by one to `count`, `number` gets."""
    return lax.div(total - number + (count - 1), i32(count))


def _store_rows(memory, target, row, start, end, column):
    """Copies rows [start, end) of `memory` to row + start and on of `target`: sizes of copies are static, so one for each bit of their number."""
    count, size = end - start, memory.shape[0]
    while size:

        def copy(size=size, start=start):
            at = (pl.ds(row + start, size), pl.ds(column, _OUT_COLUMNS))
            plgpu.copy_smem_to_gmem(memory.at[pl.ds(start, size)], target.at[at])

        pl.when((count & size) != 0)(copy)
        start = start + (count & size)
        size //= 2


def wgrad(x, dy, borders, scale, *, plan: Plan, transposed: bool, mosaic: Mosaic):
    """dw f32[E, K, N]: dw[e] = x[rows of e]^T @ dy[rows of e] * scale.

    x: [R, K], dy: [R, N], or [K, R] and [N, R] with transposed, where each border is a multiple of plan.depth; borders: i32[E, 2], first and
    past-last row of each group; scale: f32[1].
    """
    row_dim = 1 if transposed else 0
    K, N, E = x.shape[1 - row_dim], dy.shape[1 - row_dim], borders.shape[0]
    bands, width = _band(N, plan)
    shared = "pair" if plan.cluster > 1 else None
    half = plan.columns // CONSUMERS

    def grouped_wgrad(x_ref, dy_ref, borders_ref, scale_ref, dw_ref, *, x_s, dy_s, full, free, masked_both):
        e, k_block, n_block = lax.axis_index("group"), lax.axis_index("k"), _column_block(width, plan)
        start, end = borders_ref[e, 0], borders_ref[e, 1]
        down, up = (
            (lambda row: lax.div(row, i32(plan.depth))),
            (lambda row: lax.div(row + (plan.depth - 1), i32(plan.depth))),
        )
        first = down(start)
        count = jnp.where(end > start, up(end) - first, 0)  # tiles; only the first and the last can have rows of others
        whole = jnp.minimum(up(start) - first, count)
        whole_end = jnp.clip(down(end) - first, whole, count)

        def producer():
            ks = pl.ds(k_block * plan.block, plan.block)
            ns = pl.ds(n_block * plan.columns, plan.columns)

            def copies(n, slot):
                rows = pl.ds(pl.multiple_of((first + n) * plan.depth, plan.depth), plan.depth)
                yield x_ref.at[(ks, rows) if transposed else (rows, ks)], x_s.at[slot], shared
                yield dy_ref.at[(ns, rows) if transposed else (rows, ns)], dy_s.at[slot], None

            _produce(plan, 0, count, copies, full, free)
            see_the_end(plan, count, (free,))

        def consumer(warpgroup):
            own = pl.ds(pl.multiple_of(warpgroup * plan.rows, plan.rows), plan.rows)
            own_half = pl.ds(pl.multiple_of(warpgroup * half, half), half)

            def only_rows_of_the_group(n, tile):
                row = mosaic.index(tile.shape, 0) + (first + n) * plan.depth
                values = mosaic.load(tile, TILE)
                tile[...] = jnp.where((row >= start) & (row < end), values, jnp.zeros_like(values))

            def operands(n, slot, masked):
                if transposed:
                    return x_s.at[slot, own], turned(dy_s.at[slot])
                x_tile = x_s.at[slot, :, own]
                if masked:  # both, for 0 x NaN is NaN; each consumer its columns of x and half of dy's
                    only_rows_of_the_group(n, x_tile)
                    only_rows_of_the_group(n, dy_s.at[slot, :, own_half])
                    plgpu.commit_smem()  # ORDER: before products read what registers have just written
                    plgpu.barrier_arrive(masked_both)
                    # ORDER: the product reads the half of dy's tile that the other consumer masks
                    plgpu.barrier_wait(masked_both)
                return turned(x_tile), dy_s.at[slot]

            loops = ((0, count, False),)
            if not transposed:
                loops = ((0, whole, True), (whole, whole_end, False), (whole_end, count, True))
            dw = _sum_of_products(plan, loops, operands, full, free, 0, count, mosaic) * scale_ref[0]
            rows = pl.ds(k_block * plan.block + warpgroup * plan.rows, plan.rows)
            target = dw_ref.at[e, rows, pl.ds(n_block * plan.columns, plan.columns)]
            target[...] = dw

        roles(producer, consumer, _REGISTERS)

    tiles = lambda size: (plan.stages, size, plan.depth) if transposed else (plan.stages, plan.depth, size)
    return mosaic.launch(
        grouped_wgrad,
        grid={"group": E, "band": bands, "k": K // plan.block, "n": width},
        arguments=(x, dy, borders, scale),
        results=jax.ShapeDtypeStruct((E, K, N), f32),
        scratch=dict(
            x_s=operand_memory(tiles(plan.block), x.dtype),
            dy_s=operand_memory(tiles(plan.columns), dy.dtype),
            masked_both=plgpu.Barrier(num_arrivals=CONSUMERS),
            **_barriers(plan),
        ),
        cluster=plan.cluster,
    )
