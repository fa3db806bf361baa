"""What the Hopper kernels need of Pallas Mosaic GPU, in one place: launching, roles of warpgroups, layouts, and the differences between versions and
between the GPU and the interpreter.

JAX 0.10 and 0.11 name a few things differently, and 0.10 cannot pass references through `plgpu.kernel` under jit. The interpreter of 0.11 (that of
0.10 cannot run these kernels) knows no register layouts, no `pl.run_state`, and takes the left operand of a product only from shared memory; the
methods of `Mosaic` say the same thing in both worlds. Nothing else in the kernels depends on where they run.

Not here: a general layer over Mosaic. Only what the kernels of attention and of grouped products use.
"""

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

LOG2E = 1.4426950408889634
CONSUMERS = 2  # warpgroups of 64 rows that compute; one more feeds them
# Of a consumer's and of the producer's threads: 2 x 240 + 24 = 3 x 168, which is what a block starts with.
REGISTERS = (240, 24)
_OLD = jax.version.__version_info__ < (0, 11)

TILE = plgpu.Layout.WGMMA  # a product's result, spread over a warpgroup
PER_ROW = plgpu.Layout.WGMMA.reduce(1)  # one value for each row of such a tile
PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)


def per_row(x, shape):
    """x [rows] as [rows, columns]"""
    return lax.broadcast_in_dim(x, shape, [0])


def per_column(x, shape):
    """x [columns] as [rows, columns]"""
    return lax.broadcast_in_dim(x, shape, [1])


def turned(ref):
    """A [rows, columns] reference read as [columns, rows]; tensor cores take either order of a 16-bit operand."""
    return plgpu.transpose_ref(ref, (1, 0)) if _OLD else ref.transpose((1, 0))


def operand_memory(shape, dtype):
    """Shared memory that tensor cores can read: cells of 8 rows x 128 bytes, swizzled against bank conflicts."""
    cell = plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(cell, plgpu.SwizzleTransform(128)))


def roles(producer, consumer, registers=REGISTERS):
    """Runs `consumer(number)` on the consumers and `producer()` on the remaining warpgroup, each with its share of the registers."""
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == CONSUMERS)
    def _():
        plgpu.set_max_registers(registers[1], action="decrease")
        producer()

    @pl.when(warpgroup < CONSUMERS)
    def _():
        plgpu.set_max_registers(registers[0], action="increase")
        consumer(warpgroup)


def slot_of(n, plan):
    """Which of plan.stages slots the n-th streamed tile is in."""
    return lax.rem(n, jnp.int32(plan.stages))


def see_the_end(plan, count, barriers):
    """The producer waits for the last releases of `count` tiles: no barrier may end with a phase that nobody saw (the interpreter insists), nor a block
    of a cluster while the other still arrives at it."""

    def wait(n, _):
        for free in barriers:
            plgpu.barrier_wait(free.at[slot_of(n, plan)])

    lax.fori_loop(jnp.maximum(count - plan.stages, 0), count, wait, None)


@dataclasses.dataclass(frozen=True)
class Mosaic:
    """The operations that differ between the GPU and the interpreter. `interpret`: run on the CPU, with the race detector on."""

    interpret: bool

    def load(self, ref, layout):
        """Shared memory as a value in registers."""
        return self._load(ref, layout, {})

    def load_global(self, ref, layout):
        """Global memory as a value in registers, in sectors of 32 bytes, without a detour over shared memory."""
        return self._load(ref, layout, {"optimized": False})

    def _load(self, ref, layout, options):
        if self.interpret:
            return ref[...]
        return plgpu.load(ref, *([()] if _OLD else []), layout=layout, **options)

    def full(self, shape, value, layout):
        x = jnp.full(shape, value, jnp.float32)
        return x if self.interpret else plgpu.layout_cast(x, layout)

    def index(self, shape, dim):
        """i32 of `shape`: each element's place along `dim`."""
        if self.interpret:
            return lax.broadcasted_iota(jnp.int32, shape, dim)
        return plgpu.broadcasted_iota(jnp.int32, shape, dim, layout=TILE)

    def operand(self, x, desks, consumer):
        """x as left operand of a product: in registers, or on the consumer's desk in the interpreter."""
        if not self.interpret:
            return x
        desks[consumer, ...] = x
        plgpu.commit_smem()
        return desks.at[consumer]

    def desks(self, shape, dtype):
        """Scratch for `operand`, which only the interpreter needs."""
        return operand_memory((CONSUMERS, *shape), dtype) if self.interpret else None

    def add_product(self, total, x, ref, desks, consumer):
        """total + x @ ref for values in registers; the product has ended when this returns."""
        if not self.interpret:
            return pl.run_state(lambda acc: plgpu.wgmma(acc, x, ref))(plgpu.ACC.init(total))

        def product(acc):
            plgpu.wgmma(acc, self.operand(x, desks, consumer), ref)
            return acc[...]

        return total + pl.run_scoped(product, plgpu.ACC(total.shape, jnp.float32))

    def launch(self, body, *, grid, arguments, results=(), sums=(), scratch, cluster=1):
        """Runs `body(*argument refs, *result refs, **scratch refs)` once per place of the grid {name: size}, in CONSUMERS + 1 warpgroups.

        Inside, `lax.axis_index` knows the grid's names and "warpgroup"; scratch that is None is passed on as None. cluster: so many blocks with one place in
        the grid, which can share memory; "pair" is the name of their axis.
        Without `sums` the results are new arrays of the given types. With them the body gets references to those arrays instead, which it
        reads and adds to; what comes back are the same buffers, and XLA copies nothing (successive calls in one jit; compiled).
        """
        absent = dict.fromkeys(name for name, memory in scratch.items() if memory is None)
        scratch = {name: memory for name, memory in scratch.items() if memory is not None}
        kernel = functools.partial(body, **absent)
        kernel.__name__ = body.__name__
        place = dict(
            grid=tuple(grid.values()), grid_names=tuple(grid), num_threads=CONSUMERS + 1, thread_name="warpgroup"
        )
        if cluster > 1:
            place |= dict(cluster=(cluster,), cluster_names=("pair",))
        options = dict(compiler_params=plgpu.CompilerParams(approx_math=True))
        if self.interpret:
            options["interpret"] = plgpu.InterpretGPUParams(detect_races=True)
        if not sums:
            return plgpu.kernel(kernel, out_type=results, scratch_types=scratch, **place, **options)(*arguments)
        # One dependency for all: partial evaluation (remat) would take what depends on no unknown (the zeros of an empty carry, bounds) out of
        # a surrounding shard_map as references, which cannot cross it.
        arguments, sums = lax.optimization_barrier((tuple(arguments), tuple(sums)))
        refs = [jax.new_ref(x) for x in sums]
        if not _OLD:
            plgpu.kernel(kernel, out_type=(), scratch_types=scratch, **place, **options)(*arguments, *refs)
        else:  # "JaxprInputEffect ... does not have a corresponding jaxpr input" from plgpu.kernel: the same by hand
            refs_of_arguments = [jax.new_ref(x) for x in arguments]
            pl.core_map(plgpu.Mesh(**place), name=body.__name__, **options)(
                lambda: pl.run_scoped(
                    functools.partial(kernel, *refs_of_arguments, *refs), collective_axes="warpgroup", **scratch
                )
            )
        return tuple(jax.freeze(ref) for ref in refs)
