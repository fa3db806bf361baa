"""Grouped products on NVIDIA Hopper: kernels in Pallas Mosaic GPU (TMA, wgmma, warp specialisation), bfloat16 or fp8 in, float32 sums.

For GPUs of compute capability 9.0 (H100, H200). This file is what callers see: checks, the list of work, and tile plans; the kernels are in
`grouped_hopper_kernels`.

Not here: sizes and dtypes that fit no tile. They are refused by name; `grouped` completes them with zeros. No fp8 with rows of several groups in one
tile: tensor cores take fp8 with the contraction as last dim only, and a group's end inside a tile would have to be masked there.
"""

import jax
import jax.numpy as jnp

from jaxllm_kernels import grouped_hopper_kernels as kernels
from jaxllm_kernels.grouped_hopper_kernels import Plan
from jaxllm_kernels.hopper_mosaic import Mosaic

TILE = 128  # K and N are multiples of it
FP8_ROWS = 128  # in the gradient of w, groups in fp8 have multiples of so many rows

# Tiles by bytes of an operand; the first whose columns divide N is taken. What decides is 232 registers a thread and 227 KiB of shared memory;
# compiled for H100, no plan spills or serialises. Which of several that fit is faster is unmeasured.
PLANS = {
    2: (Plan(256, 64, 3, cluster=2), Plan(256, 64, 3), Plan(128, 64, 4)),
    1: (Plan(128, 128, 4, cluster=2, promote=True), Plan(128, 128, 4, promote=True)),
}
_FP8 = ("float8_e4m3fn", "float8_e5m2")


def forward(x, w, group_sizes, *, transposed=False, x_scale=None, w_scale=None, dtype=jnp.bfloat16, interpret=False):
    """y[r] = x[r] @ w[e(r)], or x[r] @ w[e(r)]^T, bfloat16 [R, N]; see `grouped.forward`.

    x: [R, K], w: [E, K, N], or [E, N, K] with transposed, both bfloat16; or both fp8 with transposed. K and N: multiples of TILE. interpret: run in
    Mosaic's interpreter, on a CPU. Rows behind the groups are 0. ValueError for sizes and dtypes that fit no tile; that shapes go together is for
    `grouped` to check.
    """
    (R, K), N = x.shape, w.shape[1 if transposed else 2]
    plan = _plan(x, w, K, N, R, transposed, "w [E, N, K]")
    if dtype != jnp.bfloat16:
        _refuse("y in bfloat16", jnp.dtype(dtype), 'compute in bfloat16, or use the backend "xla"')
    work = kernels.visits(group_sizes, R, plan.block)
    scale = jnp.ones(group_sizes.shape, jnp.float32) if x_scale is None else x_scale * w_scale
    return kernels.forward(x, w, work, scale, plan=plan, transposed=transposed, mosaic=Mosaic(interpret))


def wgrad(x, dy, group_sizes, num_groups, *, transposed=False, x_scale=None, dy_scale=None, interpret=False):
    """dw[e] = x[rows of e]^T @ dy[rows of e], f32[num_groups, K, N]; see `grouped.wgrad`.

    x: [R, K], dy: [R, N], both bfloat16; or [K, R] and [N, R], both fp8, with transposed: R and all group sizes are then multiples of FP8_ROWS, and
    where a size is not, dw is NaN. Otherwise as `forward`. A group without rows gets 0.
    """
    row_dim = 1 if transposed else 0
    R, K, N = x.shape[row_dim], x.shape[1 - row_dim], dy.shape[1 - row_dim]
    plan = _plan(x, dy, K, N, R, transposed, "x [K, R] and dy [N, R]")
    if transposed and x.dtype == jnp.bfloat16:
        _refuse("x [R, K] and dy [R, N] in bfloat16", "transposed = True", "only fp8 is wanted with rows as last dim")
    if transposed and R % FP8_ROWS:
        _refuse(f"R a multiple of {FP8_ROWS} for fp8", R, "complete every group with rows of zeros")
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    scale = jnp.ones((1,), jnp.float32) if x_scale is None else (x_scale * dy_scale).reshape(1)
    if transposed:
        scale = jnp.where(jnp.any(group_sizes % FP8_ROWS != 0), jnp.nan, scale)
    borders = jnp.stack([ends - group_sizes, ends], axis=1)
    return kernels.wgrad(x, dy, borders, scale, plan=plan, transposed=transposed, mosaic=Mosaic(interpret))


def _refuse(what, got, advice):
    raise ValueError(f"hopper grouped matmul needs {what}, got {got}; {advice}")


def _plan(a, b, K, N, R, transposed, contraction_last):
    """The plan for operands a and b, after all that fits no kernel is refused."""
    for name, size in (("K", K), ("N", N)):
        if size % TILE or not size:
            _refuse(f"{name} a multiple of {TILE}", size, "pad with zeros, as `grouped` does")
    if not R:
        _refuse("at least one row", R, "nothing is to be multiplied")
    names = a.dtype.name, b.dtype.name
    if not (names == ("bfloat16", "bfloat16") or set(names) <= set(_FP8)):
        _refuse("bfloat16 or fp8 operands", " and ".join(names), 'compute in bfloat16, or use the backend "xla"')
    fp8 = a.dtype.itemsize == 1
    if fp8 and not transposed:
        advice = "tensor cores take fp8 with the contraction as last dim only"
        _refuse(f"fp8 transposed, {contraction_last}", "transposed = False", advice)
    if len(set(names)) > 1 and jax.version.__version_info__ < (0, 11):
        _refuse("fp8 operands of one dtype with this JAX", " and ".join(names), "use jax 0.11 (Python 3.12 or newer)")
    plans = PLANS[a.dtype.itemsize]
    return next(plan for plan in plans if N % (plan.columns * plan.cluster) == 0)
