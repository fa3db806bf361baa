"""Grouped products in plain XLA: loops over blocks of rows whose trip counts are data. The path of CPUs, and the one that runs anywhere.

Groups are taken one after the other (a scan over the weights), each in blocks of BLOCKS rows: as many large ones as fit, then small ones, the last of
which may reach into the next group and is masked. So the work follows sum(group_sizes), within a small block per group, and neither R nor E times R.
Every sum has one fixed order; nothing is scattered.

Not here: `lax.ragged_dot`, which XLA:CPU computes as a product with every expert and a mask (several times slower).
"""

import jax.numpy as jnp
from jax import lax

TILE = 1  # K and N may be anything
FP8_ROWS = 1  # and so may groups
# Rows. Large blocks spare loads of the weight and additions to its gradient, small ones bound the waste. Measured, 4,096 rows for 8 experts of 512 x 1,792:
# large blocks of 128 to 1,024 and small ones of 32 or 64 cost the same CPU time forward and backward to within 10 %.
BLOCKS = (512, 64)


def forward(x, w, group_sizes, *, dtype, transposed=False, x_scale=None, w_scale=None):
    """y[r] = x[r] @ w[e(r)], or x[r] @ w[e(r)]^T; see `grouped.forward`. fp8 operands are multiplied as float32."""
    wide = _wide(x)
    scale = jnp.ones(group_sizes.shape, wide) if x_scale is None else (x_scale * w_scale).astype(wide)
    y = jnp.zeros((x.shape[0], w.shape[1 if transposed else 2]), dtype)

    def group(y, this):
        start, end, w, scale = this
        w = _factor(w)

        def block(y, rows, own):
            product = _dot(_factor(_take(x, rows)), w, 1, 1 if transposed else 0, wide)
            if x_scale is not None:
                product = product * scale
            product = product.astype(dtype)
            if own is not None:
                product = jnp.where(own, product, _take(y, rows))
            return lax.dynamic_update_slice_in_dim(y, product, rows[0], 0)

        return _by_block(block, y, start, end, x.shape[0]), None

    return lax.scan(group, y, (*_borders(group_sizes), w, scale))[0]


def wgrad(x, dy, group_sizes, num_groups, *, transposed=False, x_scale=None, dy_scale=None):
    """dw[e] = x[rows of e]^T @ dy[rows of e]; see `grouped.wgrad`. fp8 operands are multiplied as float32."""
    if transposed:
        x, dy = x.T, dy.T
    wide = _wide(x)

    def group(_, borders):
        def block(dw, rows, own):
            operands = [_factor(_take(a, rows)) for a in (x, dy)]
            if own is not None:  # both: 0 x NaN is NaN
                operands = [jnp.where(own, a, jnp.zeros((), a.dtype)) for a in operands]
            return dw + _dot(*operands, 0, 0, wide)

        dw = _by_block(block, jnp.zeros((x.shape[1], dy.shape[1]), wide), *borders, x.shape[0])
        if x_scale is not None:
            dw = dw * (x_scale * dy_scale).astype(wide)
        return None, dw

    return lax.scan(group, None, _borders(group_sizes))[1]


def _by_block(step, carry, start, end, R):
    """step(carry, (first row, rows), own) over the blocks of rows [start, end) of R. own: which rows belong here, bool [rows, 1], None for all."""
    for size in BLOCKS:
        small = size == BLOCKS[-1]
        if size > R and not small:
            continue
        size = min(size, R)
        count = (end - start + (size - 1 if small else 0)) // size

        def block(n, carry, first=start, size=size, small=small):
            first = first + n * size
            if not small:
                return step(carry, (first, size), None)
            reached = jnp.minimum(first, R - size)  # the last rows of all: what a block before has done is not its own
            row = lax.broadcasted_iota(jnp.int32, (size, 1), 0) + reached
            return step(carry, (reached, size), (row >= first) & (row < end))

        carry = lax.fori_loop(0, count, block, carry)
        start = start + count * size
    return carry


def _borders(group_sizes):
    """(first row, last row + 1) of each group, i32[E] each."""
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    return ends - group_sizes, ends


def _take(x, rows):
    return lax.dynamic_slice_in_dim(x, *rows, 0)


def _factor(x):
    return x.astype(jnp.float32) if x.dtype.itemsize == 1 else x


def _wide(x):
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def _dot(a, b, contract_a, contract_b, dtype):
    """Sums in `dtype`. Products of float32 are float32: on a GPU XLA would round their operands to TF32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((contract_a,), (contract_b,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=dtype)
