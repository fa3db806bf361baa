"""`grouped_matmul`: rows sorted by group times one matrix per group, for mixtures of experts; one custom_vjp over a backend's products.

`forward` and `wgrad` are its pieces, for callers that put their own custom_vjp around them (weights gathered over devices, gradients reduced in
float32, operands quantised to fp8). Inside a shard_map they need check_vma=False. A backend is a module with these two functions, for one device:

    forward(x, w, group_sizes, *, transposed, x_scale, w_scale, dtype) -> y
    wgrad(x, dy, group_sizes, num_groups, *, transposed, x_scale, dy_scale) -> dw

    TILE: K and N must be multiples of it. FP8_ROWS: in fp8 all group sizes must be; where it is more than 1, fp8 is taken transposed only.

Not here: routing, sorting, exchange between devices (all that comes before and after the products), and biases.
"""

import functools
import importlib

import jax
import jax.numpy as jnp

BACKENDS = ("xla", "hopper")
FLOATS = ("bfloat16", "float32", "float64")
FP8 = ("float8_e4m3fn", "float8_e5m2")


def load_backend(name):
    """The module; loaded when asked for, since a kernel language is slow to import and may not be installed."""
    if name not in BACKENDS:
        _refuse(f"a backend of {', '.join(BACKENDS)}", repr(name), '"xla" runs anywhere, "hopper" on H100 and H200')
    return importlib.import_module(f"jaxllm_kernels.grouped_{name}")


def grouped_matmul(x, w, group_sizes, *, backend="xla"):
    """y[r] = x[r] @ w[e(r)], where the first group_sizes[0] rows belong to group 0, the next group_sizes[1] to group 1, and so on.

    x: [R, K] in bfloat16 or float32 (float64 with `xla`); w: [E, K, N] in x's dtype, or in float32, and then it is multiplied in x's dtype and its
    gradient comes in float32, not rounded to x's dtype; group_sizes: i32[E], none negative, their sum at most R (data, so not checked).
    Returns y [R, N] in x's dtype; sums are float32 (float64). Rows at or behind sum(group_sizes) are exactly 0 in y and get gradient exactly 0,
    whatever stands there in x and in y's gradient, NaN included. A group without rows gets gradient exactly 0. Work follows sum(group_sizes), not R.
    Differentiable in x and w; the residuals are x, w in x's dtype and group_sizes.
    K and N that the backend's tiles do not fit are completed with zeros here; the kernels refuse them.

    ValueError: shapes or dtypes that do not go together, fp8 (call `forward` and `wgrad`), an unknown backend, and what the backend refuses. Where "hopper"
    cannot run at all (not an H100 or H200) JAX says so when it compiles, and no other backend takes its place.
    """
    if x.dtype.name not in FLOATS:
        _refuse(
            f"x in {', '.join(FLOATS)}", x.dtype, "fp8 operands go to `forward` and `wgrad`, which take their scales"
        )
    if w.dtype not in (x.dtype, jnp.float32):
        _refuse(f"w in x's dtype, {x.dtype}, or in float32", w.dtype, "convert it")
    return _grouped(x, w, group_sizes, backend)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped(x, w, group_sizes, backend):
    return _grouped_forward(x, w, group_sizes, backend)[0]


def _grouped_forward(x, w, group_sizes, backend):
    used = w.astype(x.dtype)
    return forward(x, used, group_sizes, backend=backend), (x, used, group_sizes, jnp.zeros((0,), w.dtype))


def _grouped_backward(backend, residuals, dy):
    x, w, group_sizes, like = residuals
    dx = forward(dy, w, group_sizes, backend=backend, transposed=True)
    dw = wgrad(x, dy, group_sizes, w.shape[0], backend=backend)
    return dx, dw.astype(like.dtype), None


_grouped.defvjp(_grouped_forward, _grouped_backward)


def forward(x, w, group_sizes, *, backend="xla", transposed=False, x_scale=None, w_scale=None, dtype=None):
    """y[r] = x[r] @ w[e(r)] * x_scale * w_scale[e(r)], not differentiable.

    x: [R, K]; w: [E, K, N], or [E, N, K] with transposed, y[r] = x[r] @ w[e(r)]^T: with N and K exchanged that is the gradient of x from that of y.
    dtypes: bfloat16, float32 or float64, one for both; or any two of FP8. `hopper` takes fp8 transposed only: K is the last dim of both operands, so the
    forward product wants w stored as [E, N, K] and the gradient of x wants it as [E, K, N]. Scales: f32[] and f32[E], both or neither.
    dtype: what sums of fp8 are rounded to, bfloat16 (None too) or float32; `hopper` has bfloat16 only.
    Returns y [R, N] in x's dtype, in `dtype` for fp8; rows at or behind sum(group_sizes) are exactly 0, whatever stands in x, NaN included.
    """
    contracted = 2 if transposed else 1
    if x.ndim != 2 or w.ndim != 3 or not w.shape[0] or x.shape[1] != w.shape[contracted]:
        dims = "[E, N, K]" if transposed else "[E, K, N]"
        _refuse(f"x [R, K] and w {dims} of at least one group", f"{x.shape} and {w.shape}", "give both the same K")
    _check(x, w, group_sizes, w.shape[0], {"x_scale": (x_scale, ()), "w_scale": (w_scale, (w.shape[0],))})
    N, fp8 = w.shape[3 - contracted], x.dtype.name in FP8
    if dtype is not None and (not fp8 or jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32)):
        got = f"{jnp.dtype(dtype)} for operands in {x.dtype}"
        _refuse("a dtype of y, bfloat16 or float32, for fp8 alone", got, "others give x's dtype")
    dtype = jnp.dtype(jnp.bfloat16 if dtype is None else dtype) if fp8 else x.dtype
    if not x.shape[0]:
        return jnp.zeros((0, N), dtype)
    tile = load_backend(backend).TILE
    x, w = _completed(x, tile, 1), _completed(w, tile, 1, 2)
    options = dict(transposed=transposed, x_scale=x_scale, w_scale=w_scale, dtype=dtype)
    return load_backend(backend).forward(x, w, group_sizes, **options)[:, :N]


def wgrad(x, dy, group_sizes, num_groups, *, backend="xla", transposed=False, x_scale=None, dy_scale=None):
    """dw[e] = x[rows of e]^T @ dy[rows of e] * x_scale * dy_scale, the gradient of w in `forward`.

    x: [R, K], dy: [R, N], or [K, R] and [N, R] with transposed; dtypes as for `forward`. `hopper` takes fp8 transposed only, R is then a multiple of 128
    and so is every group's size (complete groups with rows of zeros); sizes are data, so where one is not, all of dw is NaN. Scales: f32[], both or neither.
    Returns dw f32[num_groups, K, N] (float64 for float64); a group without rows gets exactly 0, and rows at or behind sum(group_sizes) have no influence,
    NaN included.
    """
    row_dim = 1 if transposed else 0
    if x.ndim != 2 or dy.ndim != 2 or num_groups < 1 or x.shape[row_dim] != dy.shape[row_dim]:
        dims = "[K, R] and dy [N, R]" if transposed else "[R, K] and dy [R, N]"
        _refuse(
            f"x {dims} of at least one group", f"{x.shape} and {dy.shape}, {num_groups} groups", "give both the same R"
        )
    _check(x, dy, group_sizes, num_groups, {"x_scale": (x_scale, ()), "dy_scale": (dy_scale, ())})
    K, N = x.shape[1 - row_dim], dy.shape[1 - row_dim]
    if not x.shape[row_dim]:
        return jnp.zeros((num_groups, K, N), jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
    tile = load_backend(backend).TILE
    x, dy = _completed(x, tile, 1 - row_dim), _completed(dy, tile, 1 - row_dim)
    options = dict(transposed=transposed, x_scale=x_scale, dy_scale=dy_scale)
    return load_backend(backend).wgrad(x, dy, group_sizes, num_groups, **options)[:, :K, :N]


def _refuse(what, got, advice):
    raise ValueError(f"grouped: needs {what}, got {got}; {advice}")


def _check(a, b, group_sizes, num_groups, scales):
    fp8 = a.dtype.name in FP8 and b.dtype.name in FP8
    if not fp8 and (a.dtype != b.dtype or a.dtype.name not in FLOATS):
        _refuse(
            f"two operands in one of {', '.join(FLOATS)}, or both in fp8", f"{a.dtype} and {b.dtype}", "convert one"
        )
    if group_sizes.shape != (num_groups,) or group_sizes.dtype != jnp.int32:
        got = f"{group_sizes.dtype}{list(group_sizes.shape)}"
        _refuse(f"group_sizes int32[{num_groups}], one for each matrix", got, "count the rows of each group")
    if len({scale is None for scale, _ in scales.values()}) > 1:
        _refuse(f"{' and '.join(scales)}, both or neither", "one of them", "a scale of 1 changes nothing")
    for name, (scale, shape) in scales.items():
        if scale is not None and (scale.shape != shape or scale.dtype != jnp.float32):
            _refuse(f"{name} float32{list(shape)}", f"{scale.dtype}{list(scale.shape)}", "one factor for each matrix")


def _completed(x, tile, *dims):
    """x with zeros behind, so that `dims` are multiples of `tile`: components that add nothing to a product, columns cut off from it."""
    missing = [(0, -size % tile if dim in dims else 0) for dim, size in enumerate(x.shape)]
    return jnp.pad(x, missing) if any(after for _, after in missing) else x
