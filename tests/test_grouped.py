"""The grouped products against float64: any group sizes, outputs and gradients, and whatever stands behind the groups."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxllm_kernels import grouped, grouped_xla
from support import error

R, K, N, E = 250, 24, 40, 5
SIZES = (70, 0, 129, 1, 40)


def inputs(dtype=np.float32, R=R, scale=1.0):
    """x, w, dy."""
    rng = np.random.default_rng(0)
    return [(scale * rng.standard_normal(shape)).astype(dtype) for shape in ((R, K), (E, K, N), (R, N))]


def oracle(x, w, dy, sizes):
    """y, dx, dw in float64, zeros behind the groups."""
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    y, dx, dw = np.zeros((len(x), w.shape[2])), np.zeros(x.shape), np.zeros(w.shape)
    ends = np.cumsum(sizes)
    for e, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        rows = slice(end - size, end)
        y[rows], dx[rows], dw[e] = x[rows] @ w[e], dy[rows] @ w[e].T, x[rows].T @ dy[rows]
    return y, dx, dw


def outcome(x, w, dy, sizes, backend="xla"):
    """y, dx, dw by grouped_matmul."""
    y, vjp = jax.vjp(lambda x, w: grouped.grouped_matmul(x, w, sizes, backend=backend), x, w)
    return y, *vjp(dy)


def as_sizes(sizes):
    return np.array(sizes, np.int32)


def check(got, x, w, dy, sizes, names=("y", "dx", "dw")):
    """`got` is the oracle's, to within twice the error of rounding that, and float32's in its sums. Behind the groups, and for groups without rows,
    it is exactly 0."""
    want = dict(zip(("y", "dx", "dw"), oracle(x, w, dy, sizes), strict=True))
    for name, a in zip(names, got, strict=True):
        a = np.asarray(a)
        assert not (a[as_sizes(sizes) == 0] if name == "dw" else a[sum(sizes) :]).any(), name
        rounded, sums = want[name].astype(a.dtype), 2.0**-50 if a.dtype == np.float64 else 2.0**-20
        assert error(a, want[name]) <= 2 * error(rounded, want[name]) + sums, name


@pytest.fixture(params=[(512, 64), (32, 8)], ids=str, scope="module")
def blocks(request):
    """`outcome`, compiled once, with large blocks that never fit and with ones that do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped_xla, "BLOCKS", request.param)
        yield jax.jit(lambda *arguments: outcome(*arguments))


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(0, R), min_size=E, max_size=E))
@example(cuts=[50, 100, 150, 200, 250])
@example(cuts=[0, 250, 250, 250, 250])
@example(cuts=[0, 3, 67, 127, 128])
@example(cuts=[0, 0, 0, 0, 0])
@example(cuts=[70, 70, 199, 200, 240])
def test_outputs_and_gradients_equal_the_float64_oracle_for_any_sizes(blocks, cuts):
    sizes = np.diff([0, *sorted(cuts)])
    x, w, dy = inputs()
    garbage = [np.where(np.arange(R)[:, None] < sizes.sum(), a, np.float32(np.nan)) for a in (x, dy)]
    check(blocks(garbage[0], w, garbage[1], as_sizes(sizes)), x, w, dy, sizes)


@pytest.mark.parametrize("rows", [1, 7, 64, 65])
def test_few_rows(rows):
    operands, sizes = inputs(R=rows), (0, rows // 2, 0, rows - rows // 2, 0)
    check(jax.jit(outcome)(*operands, as_sizes(sizes)), *operands, sizes)


@pytest.mark.parametrize("backend", grouped.BACKENDS)
def test_no_rows_at_all(backend):
    y, dx, dw = outcome(*map(jnp.asarray, inputs(R=0)), jnp.zeros(E, jnp.int32), backend)
    assert y.shape == (0, N) and dx.shape == (0, K) and dw.shape == (E, K, N) and not dw.any()


def test_bfloat16_is_summed_in_float32_and_float64_in_float64():
    operands = inputs(ml_dtypes.bfloat16)
    got = jax.jit(outcome)(*operands, as_sizes(SIZES))
    assert {a.dtype for a in got} == {jnp.dtype(jnp.bfloat16)}
    check(got, *operands, SIZES)
    with jax.enable_x64(True):
        operands = inputs(np.float64)
        got = jax.jit(outcome)(*operands, as_sizes(SIZES))
        assert {a.dtype for a in got} == {jnp.dtype(jnp.float64)}
        check(got, *operands, SIZES)


def test_float32_masters_get_their_gradient_unrounded():
    x, w, dy = inputs(ml_dtypes.bfloat16)
    y, dx, dw = jax.jit(outcome)(x, w.astype(np.float32), dy, as_sizes(SIZES))
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    check((y, dx, dw), x, w, dy, SIZES)  # dw to float32's accuracy


@pytest.mark.parametrize("kinds", [("e4m3fn", "e4m3fn"), ("e5m2", "e4m3fn")], ids=str)
def test_fp8_operands_give_the_scaled_products_of_their_values(kinds):
    a, b = (getattr(ml_dtypes, "float8_" + kind) for kind in kinds)
    x, w, dy = inputs()
    x, w, dy = x.astype(a), w.astype(b), dy.astype(b)
    x_scale, w_scale, dy_scale = np.float32(0.25), np.float32([1, 2, 0.5, 3, 5]), np.float32(3)
    scaled = [np.asarray(q, np.float64) * s for q, s in ((x, x_scale), (w, w_scale[:, None, None]), (dy, dy_scale))]
    y, dx, dw = oracle(*scaled, SIZES)
    sizes = as_sizes(SIZES)
    for stored, transposed in ((w, False), (w.swapaxes(1, 2), True)):
        got = grouped.forward(x, stored, sizes, transposed=transposed, x_scale=x_scale, w_scale=w_scale)
        assert got.dtype == jnp.bfloat16
        check((got,), *scaled, SIZES, names=("y",))
        got = grouped.forward(
            x, stored, sizes, transposed=transposed, x_scale=x_scale, w_scale=w_scale, dtype="float32"
        )
        assert got.dtype == jnp.float32
        check((got,), *scaled, SIZES, names=("y",))
    got = grouped.forward(dy, w, sizes, transposed=True, x_scale=dy_scale, w_scale=w_scale)
    check((got,), *scaled, SIZES, names=("dx",))
    for transposed in (False, True):
        operands = (x.T, dy.T) if transposed else (x, dy)
        got = grouped.wgrad(*operands, sizes, E, transposed=transposed, x_scale=x_scale, dy_scale=dy_scale)
        assert got.dtype == jnp.float32
        check((got,), *scaled, SIZES, names=("dw",))


def test_work_follows_the_rows_that_belong_to_groups():
    """Each of them is in one block, and blocks hold few others: none of the rows behind, below a small block for each group."""
    rng = np.random.default_rng(0)
    rows_of_all = 10_000

    @jax.jit
    def visits(start, end):
        def step(carry, rows, own):
            counts, read = carry
            own = jnp.ones((rows[1], 1), bool) if own is None else own
            seen = jax.lax.dynamic_slice_in_dim(counts, rows[0], rows[1]) + own[:, 0].astype(jnp.int32)
            return jax.lax.dynamic_update_slice_in_dim(counts, seen, rows[0], 0), read + rows[1]

        return grouped_xla._by_block(step, (jnp.zeros(rows_of_all, jnp.int32), jnp.int32(0)), start, end, rows_of_all)

    for _ in range(20):
        start, end = np.sort(rng.integers(0, rows_of_all, 2)).astype(np.int32)
        counts, read = visits(start, end)
        index = np.arange(rows_of_all)
        assert np.array_equal(counts, (index >= start) & (index < end))
        assert end - start <= read < end - start + grouped_xla.BLOCKS[-1]
    counts, read = visits(np.int32(7), np.int32(7))
    assert not counts.any() and read == 0


def test_nothing_is_scattered_and_products_leave_the_tensor_cores_in_float32():
    """Read from the program, for on a CPU products in bfloat16 are not rounded either."""
    text = jax.jit(outcome).lower(*inputs(ml_dtypes.bfloat16), as_sizes(SIZES)).as_text()
    assert "while" in text and "scatter" not in text
    assert set(re.findall(r"dot_general .*-> tensor<[0-9x]*(\w+)>", text)) == {"f32"}


def test_inside_a_shard_map_each_device_has_its_own_groups():
    mesh = jax.make_mesh((2,), ("expert",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    x, w, dy = (np.stack([a, a[::-1]]) for a in inputs())
    sizes = [SIZES, (0, 1, 2, 3, 244)]
    local = lambda *arguments: jax.tree.map(lambda a: a[None], outcome(*(a[0] for a in arguments)))
    both = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=False))
    got = both(x, w, dy, np.array(sizes, np.int32))
    for n in range(2):
        check([a[n] for a in got], x[n], w[n], dy[n], sizes[n])


def test_dims_that_a_backend_does_not_fit_are_completed(monkeypatch):
    module, shapes = grouped.load_backend("xla"), []
    for name in ("forward", "wgrad"):
        product = getattr(module, name)
        watched = lambda a, b, *rest, product=product, **options: (
            shapes.append((a.shape, b.shape)), product(a, b, *rest, **options)
        )[1]  # fmt: skip
        monkeypatch.setattr(module, name, watched)
    monkeypatch.setattr(module, "TILE", 64)
    operands = inputs()
    got = outcome(*map(jnp.asarray, operands), jnp.asarray(as_sizes(SIZES)))
    check(got, *operands, SIZES)
    assert shapes == [((R, 64), (E, 64, 64)), ((R, 64), (E, 64, 64)), ((R, 64), (R, 64))]


def test_what_does_not_go_together_is_refused_by_name():
    x, w, dy = map(jnp.asarray, inputs())
    sizes, one = jnp.asarray(as_sizes(SIZES)), jnp.float32(1)
    fp8 = lambda a: a.astype(jnp.float8_e4m3fn)
    for message, call in {
        r"x \[R, K\] and w \[E, K, N\] .*got \(250, 40\) and \(5, 24, 40\)": lambda: grouped.grouped_matmul(
            dy, w, sizes
        ),
        r"w \[E, N, K\]": lambda: grouped.forward(x, w, sizes, transposed=True),
        r"x \[R, K\] and dy \[R, N\] .*\(10, 40\)": lambda: grouped.wgrad(x, dy[:10], sizes, E),
        "fp8 operands go to `forward` and `wgrad`": lambda: grouped.grouped_matmul(fp8(x), fp8(w), sizes),
        "w in x's dtype, float32.*got bfloat16": lambda: grouped.grouped_matmul(x, w.astype(jnp.bfloat16), sizes),
        "two operands in one of .*got float32 and float8_e4m3fn": lambda: grouped.forward(x, fp8(w), sizes),
        r"group_sizes int32\[5\].*got int32\[4\]": lambda: grouped.grouped_matmul(x, w, sizes[:4]),
        r"group_sizes int32\[5\].*got float32\[5\]": lambda: grouped.wgrad(x, dy, sizes.astype(jnp.float32), E),
        "x_scale and w_scale, both or neither": lambda: grouped.forward(fp8(x), fp8(w), sizes, x_scale=one),
        r"w_scale float32\[5\], got float32\[\]": lambda: grouped.forward(x, w, sizes, x_scale=one, w_scale=one),
        "a dtype of y, .*got float16 for operands in float8_e4m3fn": lambda: grouped.forward(
            fp8(x), fp8(w), sizes, dtype="float16"
        ),
        "a dtype of y, .*got float32 for operands in float32": lambda: grouped.forward(x, w, sizes, dtype="float32"),
        "a backend of xla, hopper, got 'cuda'; .*anywhere": lambda: grouped.grouped_matmul(x, w, sizes, backend="cuda"),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
