"""`GroupedLinear`, the multiplication of rows sorted by expert by their expert's weight: `linear`'s idiom around the grouped kernels, in the compute dtype or
in FP8.

The products run inside of a shard_map, each device on its own block of rows; weights are gathered before it and their gradients summed over devices in it.

In FP8 (see `fp8`) an expert's weight has a scale of its own; the rows have one, and so has the gradient of the output. Records stand outside of the shard_map,
so an amax is that of all devices. An expert to which no row goes on any device counts as not multiplied: its amax is 0, and `fp8.update` leaves its scale.

Hopper's tensor cores take FP8 with the contraction as last dim of both operands, and each of the three tensors is contracted along either of its dims. So
each is quantised once, and its FP8 bytes are transposed where the other order is read, on the device that multiplies: the weight is gathered once, [experts,
K, N], which is the order that the gradient of the rows reads. Gathering the other order too would move as many bytes over the links between devices as the
transposition writes to memory, which is several times as fast.

A frozen weight (`frozen`) is gathered in the form in which it rests, and made a matrix of on the device that multiplies, all of its experts at once. Adapters
of experts are so narrow that one product with those of all experts held, masked to each row's own, costs less than a grouped kernel would: experts held x rank
columns (128 for Mixtral at rank 16) beside thousands.

Not here: how rows come to their experts (`exchange`), and what multiplies on one device (`jaxllm_kernels.grouped`).
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec as P

from jaxllm import fp8, frozen
from jaxllm.linear import PrecisionConfig, dot, gather
from jaxllm.lora import NO_ADAPTERS, LoRAConfig, dropout, parameters
from jaxllm.section import UserError
from jaxllm.sharding import AT_REST, AXES, IN_USE, axis_size, spec
from jaxllm_kernels import grouped

_ROWS = P(AXES)


# --- in the compute dtype ---------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6, 7))
def grouped_matmul(rows, sizes, kernel, names, everywhere, compute, reduce, backend):
    """rows [devices, R, K] sorted by expert, sizes i32[devices, experts held], kernel [experts, K, N] -> [devices, R, N] in the compute dtype.

    everywhere: each device holds all experts while they are used (else those of its place on the expert axis). names, compute, reduce: as in
    `matmul`; backend: one of `jaxllm_kernels.grouped.BACKENDS`."""
    return _grouped_forward(rows, sizes, kernel, names, everywhere, compute, reduce, backend)[0]


def _in_use(names, everywhere):
    return {**IN_USE, "experts": None} if everywhere else IN_USE


def _grouped_forward(rows, sizes, kernel, names, everywhere, compute, reduce, backend):
    table = _in_use(names, everywhere)
    used = checkpoint_name(gather(kernel, names, compute, table), "gathered")
    local = lambda rows, sizes, used: grouped.forward(rows[0].astype(compute), used, sizes[0], backend=backend)[None]
    specs = (_ROWS, _ROWS, spec(table, names))
    y = jax.shard_map(local, in_specs=specs, out_specs=_ROWS, check_vma=False)(rows, sizes, used)
    return y, (rows, sizes, used, jnp.zeros((0,), kernel.dtype))


def _grouped_backward(names, everywhere, compute, reduce, backend, residuals, dy):
    rows, sizes, used, like = residuals
    table = _in_use(names, everywhere)

    def local(rows, sizes, used, dy):
        x, dy, sizes = rows[0].astype(compute), dy[0], sizes[0]
        dx = grouped.forward(dy, used, sizes, backend=backend, transposed=True)
        dw = grouped.wgrad(x, dy, sizes, used.shape[0], backend=backend).astype(reduce)
        return dx.astype(rows.dtype)[None], _summed(dw, names, table)

    specs, results = (_ROWS, _ROWS, spec(table, names), _ROWS), (_ROWS, spec(AT_REST, names))
    dx, dw = jax.shard_map(local, in_specs=specs, out_specs=results, check_vma=False)(rows, sizes, used, dy)
    return dx, None, dw.astype(like.dtype)


def _summed(dw, names, table):
    """A weight's gradient, summed over the devices that used it as `table` says, each keeping its part at rest."""
    left, at_rest = set(AXES), spec(AT_REST, names)
    for dim, (rest, use) in enumerate(zip(at_rest, spec(table, names), strict=True)):
        rest, use = (set([axes] if isinstance(axes, str) else axes or ()) for axes in (rest, use))
        left -= rest
        if scattered := [axis for axis in AXES if axis in rest - use and axis_size(axis) > 1]:
            dw = jax.lax.psum_scatter(dw, tuple(scattered), scatter_dimension=dim, tiled=True)
    copied = tuple(axis for axis in AXES if axis in left and axis_size(axis) > 1)
    return jax.lax.psum(dw, copied) if copied else dw


grouped_matmul.defvjp(_grouped_forward, _grouped_backward)


# --- frozen weights, and adapters -------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def frozen_grouped_matmul(rows, sizes, weight, names, everywhere, compute, backend):
    """`grouped_matmul` by a weight that has no gradient, in any form of `frozen`, whose dims are named `names` whatever its form."""
    return _frozen_forward(rows, sizes, weight, names, everywhere, compute, backend)[0]


def _frozen_product(rows, sizes, used, names, everywhere, compute, backend, backward):
    def local(rows, sizes, used):
        w, transposed = frozen.matrix(used, 1, compute, num_leading=1)
        options = dict(backend=backend, transposed=transposed != backward)
        return grouped.forward(rows[0].astype(compute), w, sizes[0], **options)[None]

    specs = (_ROWS, _ROWS, frozen.split(used, names, _in_use(names, everywhere)))
    return jax.shard_map(local, in_specs=specs, out_specs=_ROWS, check_vma=False)(rows, sizes, used)


def _frozen_forward(rows, sizes, weight, names, everywhere, compute, backend):
    used = frozen.gather(weight, names, compute, _in_use(names, everywhere))
    y = _frozen_product(rows, sizes, used, names, everywhere, compute, backend, backward=False)
    return y, (sizes, used, jnp.zeros((0,), rows.dtype))


def _frozen_backward(names, everywhere, compute, backend, residuals, dy):
    sizes, used, like = residuals
    dx = _frozen_product(dy, sizes, used, names, everywhere, compute, backend, backward=True)
    return dx.astype(like.dtype), None, None


frozen_grouped_matmul.defvjp(_frozen_forward, _frozen_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7, 8))
def grouped_adapted(rows, sizes, a, b, names, everywhere, scale, compute, reduce):
    """scale * (rows A) B, each row by its expert's: a [experts, K, r], b [experts, r, N], beside a weight with dims `names` -> [devices, R, N]."""
    return _adapted_forward(rows, sizes, a, b, names, everywhere, scale, compute, reduce)[0]


def _adapter_names(names):
    return (*names[:2], "rank"), (names[0], "rank", names[2])


def _own(inner, sizes):
    """inner [R, experts held * r], of which each row keeps what is its expert's; rows of nobody keep nothing."""
    ends = jnp.cumsum(sizes)
    row = jax.lax.broadcasted_iota(jnp.int32, (inner.shape[0], 1), 0)
    mine = (row < ends[None]) & (row >= (ends - sizes)[None])
    inner = inner.reshape(-1, len(sizes), inner.shape[1] // len(sizes))
    return jnp.where(mine[..., None], inner, jnp.zeros((), inner.dtype)).reshape(len(row), -1)


def _beside(a):
    """A of all experts [experts, K, r] side by side: [K, experts * r]."""
    return a.swapaxes(0, 1).reshape(a.shape[1], -1)


def _adapted_forward(rows, sizes, a, b, names, everywhere, scale, compute, reduce):
    table = _in_use(names, everywhere)
    ab = tuple(
        checkpoint_name(gather(w, own, compute, table), "gathered")
        for w, own in zip((a, b), _adapter_names(names), strict=True)
    )

    def local(rows, sizes, a, b):
        inner = _own(dot(rows[0].astype(compute), _beside(a), ((1,), (0,)), compute), sizes[0])
        inner = (inner.astype(jnp.float32) * scale).astype(compute)
        return dot(inner, b.reshape(-1, b.shape[2]), ((1,), (0,)), compute)[None], inner[None]

    specs = (_ROWS, _ROWS, *(spec(table, own) for own in _adapter_names(names)))
    y, inner = jax.shard_map(local, in_specs=specs, out_specs=(_ROWS, _ROWS), check_vma=False)(rows, sizes, *ab)
    return y, (rows, sizes, *ab, inner, jnp.zeros((0,), a.dtype))


def _adapted_backward(names, everywhere, scale, compute, reduce, residuals, dy):
    rows, sizes, a, b, inner, like = residuals
    table, (of_a, of_b) = _in_use(names, everywhere), _adapter_names(names)
    rest = reduce if compute == "bfloat16" else "float32"

    def local(rows, sizes, a, b, inner, dy):
        x, dy, (held, K, r) = rows[0].astype(compute), dy[0], a.shape
        d_inner = _own(dot(dy, b.reshape(-1, b.shape[2]), ((1,), (1,)), compute), sizes[0])
        d_inner = (d_inner.astype(jnp.float32) * scale).astype(compute)
        dx = dot(d_inner, _beside(a), ((1,), (1,)), compute)
        da = dot(x, d_inner, ((0,), (0,)), rest).astype(reduce).reshape(K, held, r).swapaxes(0, 1)
        db = dot(inner[0], dy, ((0,), (0,)), rest).astype(reduce).reshape(b.shape)
        return dx.astype(rows.dtype)[None], _summed(da, of_a, table), _summed(db, of_b, table)

    specs = (_ROWS, _ROWS, spec(table, of_a), spec(table, of_b), _ROWS, _ROWS)
    results = (_ROWS, spec(AT_REST, of_a), spec(AT_REST, of_b))
    both = jax.shard_map(local, in_specs=specs, out_specs=results, check_vma=False)
    dx, da, db = both(rows, sizes, a, b, inner, dy)
    return dx, None, da.astype(like.dtype), db.astype(like.dtype)


grouped_adapted.defvjp(_adapted_forward, _adapted_backward)


# --- in FP8 -----------------------------------------------------------------------------------------------------------


def fp8_multiple(backend: str) -> int:
    """Of what group sizes are multiples in FP8: `Exchange.multiple`. UserError where this JAX cannot multiply in FP8 with `backend`."""
    if backend == "hopper" and jax.version.__version_info__ < (0, 11):
        raise UserError(
            f'precision.matmul: "float8" for experts needs JAX 0.11 (Python 3.12 or newer) with moe.backend = "hopper", got {jax.__version__}, which cannot '
            'multiply float8_e5m2 by float8_e4m3fn there; install the newer ones, set moe.backend = "xla", or remove precision.matmul'
        )
    return grouped.load_backend(backend).FP8_ROWS


def fp8_grouped_matmul(
    rows,
    sizes,
    kernel,
    scales: dict,
    names,
    everywhere,
    compute,
    reduce,
    backend,
    *,
    seen: dict | None = None,
    records_only=False,
):
    """`grouped_matmul` multiplied in FP8: summed in float32, scaled back, and rounded once to the compute dtype.

    scales: {"input": f32[], "kernel": f32[experts], "output_grad": f32[]}; their gradients are the amax, of all devices, of rows, of the kernel of each expert
    that has rows (0 for others), and of the gradient of what is returned. seen: None, or {operand: f32[*, 2]}; see `fp8.record`. Shares are of the rows that
    belong to groups, those that complete them included, and 0 for kernels that no row meets.
    sizes: multiples of `fp8_multiple(backend)` ("hopper" makes the kernel's gradient NaN where one is not). Rows behind the groups are multiplied by nothing,
    but amax sees them, and their gradients: they are 0, as `exchange` has them, and rows of zeros behind stay so through these products.
    records_only: a warm-up; the product is `grouped_matmul`'s, and the amax are there.
    UserError where K or N is no multiple of 16, and as `fp8_multiple`. ValueError inside of a shard_map."""
    if any(size % fp8.MULTIPLE for size in kernel.shape[1:]):
        raise UserError(
            f'precision.matmul: "float8" multiplies by weights whose dims are multiples of {fp8.MULTIPLE}, got experts of '
            f"{kernel.shape[1]} x {kernel.shape[2]}; choose sizes of the model that are, or remove precision.matmul"
        )
    static = (names, everywhere, compute, reduce, backend)
    # The scales' gradients are the records', and nothing is to be added to those.
    fixed = jax.lax.stop_gradient(scales)
    if records_only:
        multiply = lambda rows, kernel: grouped_matmul(rows, sizes, kernel, *static)
    else:
        fp8_multiple(backend)
        multiply = lambda rows, kernel: _fp8_grouped(rows, sizes, kernel, fixed, *static)
    # What is recorded of a kernel goes to its scale where the expert is used.
    of_kernels = jnp.where(_used(sizes, len(kernel)), scales["kernel"], fixed["kernel"])
    if seen is not None:
        of_all = rows.shape[0] * rows.shape[1] / jnp.maximum(jnp.sum(sizes), 1).astype(jnp.float32)
        of_experts = _used(sizes, len(kernel)).astype(jnp.float32)[:, None]
        seen = {operand: own * (of_experts if operand == "kernel" else of_all) for operand, own in seen.items()}
    return fp8.recorded(multiply, rows, kernel, {**scales, "kernel": of_kernels}, seen)


def _used(sizes, num_experts):
    """bool[experts]: whether any device has a row for them. sizes: as `exchange.dispatch` gives them, the expert axis last among the devices."""
    return jnp.sum(sizes.reshape(-1, num_experts), axis=0) > 0


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7, 8))
def _fp8_grouped(rows, sizes, kernel, scales, names, everywhere, compute, reduce, backend):
    return _fp8_forward(rows, sizes, kernel, scales, names, everywhere, compute, reduce, backend)[0]


def _quantised(operand, value, scales):
    return fp8.quantise(value, scales[operand], fp8.FORMATS[operand])


def _factors(scales, names, table, *operands):
    """(what scales these operands back, how that is split while it is used)."""
    split = {"kernel": spec(table, names[:1])}  # a number for each expert
    return [1 / scales[operand] for operand in operands], [split.get(operand, P()) for operand in operands]


def _contraction_last(backend):
    return backend == "hopper"


def _fp8_forward(rows, sizes, kernel, scales, names, everywhere, compute, reduce, backend):
    table, last = _in_use(names, everywhere), _contraction_last(backend)
    x, w = _quantised("input", rows, scales), _quantised("kernel", kernel, scales)
    w = gather(w, names, w.dtype, table)
    factors, splits = _factors(scales, names, table, "input", "kernel")

    def local(x, sizes, w, of_x, of_w):
        w = w.swapaxes(1, 2) if last else w
        options = dict(backend=backend, transposed=last, dtype=compute)
        return grouped.forward(x[0], w, sizes[0], x_scale=of_x, w_scale=of_w, **options)[None]

    specs = (_ROWS, _ROWS, spec(table, names), *splits)
    y = jax.shard_map(local, in_specs=specs, out_specs=_ROWS, check_vma=False)(x, sizes, w, *factors)
    # The names of `fp8.matmul`. Kept in one order each: the other is a copy of bytes, made where it is read.
    kept = checkpoint_name(x, "quantised"), sizes, checkpoint_name(w, "gathered")
    return y, (*kept, scales, jnp.zeros((0,), rows.dtype), jnp.zeros((0,), kernel.dtype))


def _turned(x):
    # Without the constraint XLA would transpose all that x is made of: the amax of a gradient would then be taken of 4 bytes for each element, written for it.
    return with_layout_constraint(x, Layout((0, 1))).T


def _fp8_backward(names, everywhere, compute, reduce, backend, residuals, dy):
    x, sizes, w, scales, like_rows, like_kernel = residuals
    table, last = _in_use(names, everywhere), _contraction_last(backend)
    # The barrier keeps XLA from quantising again inside each of the products.
    x, g = jax.lax.optimization_barrier((x, _quantised("output_grad", dy, scales)))
    factors, splits = _factors(scales, names, table, "input", "kernel", "output_grad")

    def local(x, sizes, w, g, of_x, of_w, of_g):
        x, sizes, g = x[0], sizes[0], g[0]
        options = dict(backend=backend, transposed=True, dtype=compute)
        dx = grouped.forward(g, w, sizes, x_scale=of_g, w_scale=of_w, **options)
        x, g = (_turned(x), _turned(g)) if last else (x, g)
        options = dict(backend=backend, transposed=last)
        dw = grouped.wgrad(x, g, sizes, w.shape[0], x_scale=of_x, dy_scale=of_g, **options)
        return dx.astype(like_rows.dtype)[None], _summed(dw.astype(reduce), names, table)

    specs, results = (_ROWS, _ROWS, spec(table, names), _ROWS, *splits), (_ROWS, spec(AT_REST, names))
    both = jax.shard_map(local, in_specs=specs, out_specs=results, check_vma=False)
    dx, dw = both(x, sizes, w, g, *factors)
    return dx, None, dw.astype(like_kernel.dtype), None


_fp8_grouped.defvjp(_fp8_forward, _fp8_backward)


# --- the module -------------------------------------------------------------------------------------------------------


class GroupedLinear(nnx.Module):
    """`Linear` over rows sorted by expert: GroupedLinear({"embed": 4096}, {"mlp": 14336}, experts=8, ...) holds kernel [8, 4096, 14336]."""

    def __init__(
        self,
        inputs: dict,
        outputs: dict,
        precision: PrecisionConfig,
        *,
        experts: int,
        name: str,
        rngs: nnx.Rngs,
        lora: LoRAConfig = NO_ADAPTERS,
        stddev=0.02,
    ):
        self.names, self.name = ("experts", *inputs, *outputs), name
        self.compute, self.reduce = precision.compute, precision.gradient_reduce
        self.shape, key = (experts, *inputs.values(), *outputs.values()), rngs.params()
        self.kernel = frozen.kernel(lora, precision.param, self.shape, self.names, 1, stddev, key, num_leading=1)
        self.multiply = precision.matmul
        self.scales = None if precision.matmul == "compute" else fp8.observers(experts)
        self.lora = lora
        self.lora_a, self.lora_b = parameters(lora, name, inputs, outputs, precision.param, key, experts)

    def __call__(self, rows, sizes, *, everywhere, backend, noise=None):
        """rows [devices, R, K], sizes i32[devices, experts held] -> [devices, R, N]; see `grouped_matmul`, and `fp8_grouped_matmul`. noise: for the adapters'
        dropout; see `noise`."""
        y = self._product(rows, sizes, everywhere, backend)
        if self.lora_a is not None:
            rows, ab = dropout(rows, noise, self.lora, self.name), (self.lora_a.get_value(), self.lora_b.get_value())
            static = (self.names, everywhere, self.lora.scale, self.compute, self.reduce)
            with jax.named_scope("adapter"):
                y += grouped_adapted(rows, sizes, *ab, *static)
        return checkpoint_name(y, self.name)

    def _product(self, rows, sizes, everywhere, backend):
        weight, static = frozen.value(self.kernel), (everywhere, self.compute, self.reduce, backend)
        if self.multiply == "compute" and self.lora.rank is not None:
            return frozen_grouped_matmul(rows, sizes, weight, self.names, everywhere, self.compute, backend)
        if self.multiply == "compute":
            return grouped_matmul(rows, sizes, weight, self.names, *static)
        scales, seen = fp8.opened(self.scales)
        kernel, names = frozen.opened(weight, self.names, 1, self.shape, self.compute)
        how = dict(seen=seen, records_only=self.multiply == "record")
        return fp8_grouped_matmul(rows, sizes, kernel, frozen.scales(weight, scales), names, *static, **how)
