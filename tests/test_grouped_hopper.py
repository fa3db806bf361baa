"""The grouped Hopper kernels against float64, in Mosaic's interpreter on a CPU: borders anywhere, more tiles than slots, and clusters.

As for attention, the interpreter checks arithmetic, indices, barriers and races of plain memory, not operands that are overwritten too early. What the GPU's
compiler makes of the kernels is in h100/test_grouped_plans.py.
"""

import collections

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm_kernels import grouped_hopper as hopper
from jaxllm_kernels import grouped_hopper_kernels as kernels
from jaxllm_kernels.grouped_hopper_kernels import Plan
from support import error, no_races

pytestmark = pytest.mark.version
interpreted = pytest.mark.skipif(
    jax.version.__version_info__ < (0, 11),
    reason="the Mosaic interpreter of jax 0.10 cannot run these kernels; the newest pair does",
)
BFLOAT16, E4M3, E5M2 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
# Few columns and slots, so that there are more tiles than slots and the interpreter is quick; the real plans are compiled elsewhere
SMALL = {
    2: (Plan(128, 64, 3, cluster=2), Plan(128, 64, 3)),  # slots that no row of tiles begins with twice
    1: (Plan(128, 128, 2, cluster=2, promote=True), Plan(128, 128, 2, promote=True)),
}


@pytest.fixture
def small_plans(monkeypatch):
    monkeypatch.setattr(hopper, "PLANS", SMALL)
    monkeypatch.setattr(kernels, "_BAND", 1)  # several bands
    monkeypatch.setattr(kernels, "BLOCKS", 4)  # several items each


def inputs(R, K, N, E, dtype=BFLOAT16, gradient=None):
    """x, w, dy."""
    rng = np.random.default_rng(0)
    shapes = ((R, K), dtype), ((E, K, N), dtype), ((R, N), gradient or dtype)
    return [rng.standard_normal(shape).astype(dtype) for shape, dtype in shapes]


def oracle(x, w, dy, sizes):
    """y, dx, dw in float64, zeros behind the groups."""
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    y, dx, dw = np.zeros((len(x), w.shape[2])), np.zeros(x.shape), np.zeros(w.shape)
    for e, (size, end) in enumerate(zip(sizes, np.cumsum(sizes), strict=True)):
        rows = slice(end - size, end)
        y[rows], dx[rows], dw[e] = x[rows] @ w[e], dy[rows] @ w[e].T, x[rows].T @ dy[rows]
    return y, dx, dw


def check(got, want, sizes, name):
    """To within twice the error of rounding y and dx to bfloat16, and float32's in sums; exactly 0 behind the groups and without rows."""
    got = np.asarray(got, np.float64)
    assert not (got[np.array(sizes) == 0] if name == "dw" else got[sum(sizes) :]).any(), name
    rounding = 0 if name == "dw" else error(want.astype(BFLOAT16), want)
    assert error(got, want) <= 2 * rounding + 2.0**-20, name


def check_bfloat16(R, K, N, sizes):
    """All three products, with NaN behind the groups."""
    x, w, dy = inputs(R, K, N, len(sizes))
    y, dx, dw = oracle(x, w, dy, sizes)
    live = np.arange(R)[:, None] < sum(sizes)
    x, w, dy = (jnp.asarray(a) for a in (np.where(live, x, BFLOAT16(np.nan)), w, np.where(live, dy, BFLOAT16(np.nan))))
    group_sizes = jnp.asarray(sizes, jnp.int32)
    check(no_races(hopper.forward(x, w, group_sizes, interpret=True)), y, sizes, "y")
    check(no_races(hopper.forward(dy, w, group_sizes, transposed=True, interpret=True)), dx, sizes, "dx")
    check(no_races(hopper.wgrad(x, dy, group_sizes, len(sizes), interpret=True)), dw, sizes, "dw")


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the garbage, in the interpreter
@pytest.mark.parametrize("R, N, sizes", [(250, 256, (30, 0, 199, 1, 10)), (256, 384, (0, 3, 64, 60, 1))], ids=str)
def test_all_three_products_equal_the_float64_oracle_whatever_stands_behind_the_groups(R, N, sizes, small_plans):
    check_bfloat16(R, 256, N, sizes)


@interpreted
def test_the_widest_plan_with_one_group_and_one_without_rows(monkeypatch):
    monkeypatch.setattr(kernels, "BLOCKS", 2)  # one cluster
    check_bfloat16(256, 256, 512, (256, 0))


@interpreted
def test_fp8_products_and_their_scales(small_plans):
    sizes = (128, 0, 256)
    x, w, dy = inputs(512, 384, 256, 3, E4M3, E5M2)
    x_scale, w_scale, dy_scale = np.float32(0.25), np.float32([1, 2, 3]), np.float32(0.5)
    scaled = [np.asarray(q, np.float64) * s for q, s in ((x, x_scale), (w, w_scale[:, None, None]), (dy, dy_scale))]
    y, dx, dw = oracle(*scaled, sizes)
    x_last, w_last, dy_last = (jnp.asarray(np.swapaxes(a, -1, -2).copy()) for a in (x, w, dy))
    x, w, dy, x_scale, w_scale, dy_scale = map(jnp.asarray, (x, w, dy, x_scale, w_scale, dy_scale))
    group_sizes, options = jnp.asarray(sizes, jnp.int32), dict(transposed=True, interpret=True)
    got = hopper.forward(x, w_last, group_sizes, x_scale=x_scale, w_scale=w_scale, **options)
    check(no_races(got), y, sizes, "y")
    got = hopper.forward(dy, w, group_sizes, x_scale=dy_scale, w_scale=w_scale, **options)
    check(no_races(got), dx, sizes, "dx")
    got = hopper.wgrad(x_last, dy_last, group_sizes, 3, x_scale=x_scale, dy_scale=dy_scale, **options)
    check(no_races(got), dw, sizes, "dw")


@interpreted
def test_an_fp8_group_that_ends_inside_a_tile_makes_its_gradient_nan(small_plans):
    x, dy = (jnp.ones((128, 256), E4M3) for _ in range(2))
    got = hopper.wgrad(x, dy, jnp.asarray((128, 1, 127), jnp.int32), 3, transposed=True, interpret=True)
    assert np.isnan(np.asarray(got)).all()


def pairs(sizes, block):
    """How many (group, aligned block of rows) there are."""
    ends = np.cumsum(sizes)
    return sum(-(-end // block) - (end - size) // block for size, end in zip(sizes, ends, strict=True) if size)


@settings(max_examples=100, deadline=None)
@given(cuts=st.lists(st.integers(0, 1000), min_size=6, max_size=6))
def test_every_row_of_a_group_is_visited_once_and_no_other(cuts):
    R, block = 1000, 128
    sizes = np.diff([0, *sorted(cuts)])
    table, totals = map(np.asarray, kernels.visits(jnp.asarray(sizes, jnp.int32), R, block))
    entries, end = totals
    assert end == sizes.sum() and entries == pairs(sizes, block) <= len(table) == -(-R // block) + len(sizes) - 1
    owner = np.full(R, -1)
    for group, place, first, last in table[:entries]:
        rows = owner[place * block + first : place * block + last]
        assert 0 <= first < last <= block and (rows == -1).all()
        rows[:] = group
    assert np.array_equal(owner, np.repeat([*range(6), -1], [*sizes, R - end]))


@interpreted
@pytest.mark.parametrize("sizes", [(1, 0, 290, 3), (0, 0, 0, 0), (96, 96, 96, 96), (128, 0, 256, 128)], ids=str)
def test_work_ends_where_the_groups_end_and_zeros_stand_behind(sizes, small_plans, monkeypatch):
    """Loads and products are counted as the interpreter executes them: R is twice what is used and more, and does not matter."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    R, size, counts = 1000, 128, collections.Counter()
    for name in ("copy_gmem_to_smem", "wgmma"):
        usual = getattr(gpu_callbacks, name)
        counted = lambda *, usual=usual, name=name, **arguments: (counts.update([name]), usual(**arguments))[1]
        monkeypatch.setattr(gpu_callbacks, name, counted)
    x, w, dy = inputs(R, size, size, len(sizes))
    y, dx, dw = oracle(x, w, dy, sizes)
    x, w, dy, group_sizes = jnp.asarray(x), jnp.asarray(w), jnp.asarray(dy), jnp.asarray(sizes, jnp.int32)
    for name, call, want, block, steps in (
        ("y", lambda: hopper.forward(x, w, group_sizes, interpret=True), y, 128, size // 64),
        ("dx", lambda: hopper.forward(dy, w, group_sizes, transposed=True, interpret=True), dx, 128, size // 64),
        ("dw", lambda: hopper.wgrad(x, dy, group_sizes, len(sizes), interpret=True), dw, 64, 1),
    ):
        counts.clear()
        check(no_races(call()), want, sizes, name)
        # a tile: one load of each operand, one product of each consumer
        assert counts["wgmma"] == counts["copy_gmem_to_smem"] == 2 * steps * pairs(sizes, block), name
        assert pairs(sizes, block) <= sum(-(-np.array(sizes) // block)) + np.count_nonzero(sizes)


def test_bands_are_narrow_and_hold_every_column_once():
    for plan in (*hopper.PLANS[2], *hopper.PLANS[1]):
        for clusters in (1, 2, 3, 7, 8, 11, 28, 36):
            bands, width = kernels._band(clusters * plan.cluster * plan.columns, plan)
            assert bands * width == clusters and (width * plan.cluster <= 8 or width == 1)
            assert width > 1 or clusters in (1, 7, 11), (plan, clusters)


def test_what_fits_no_kernel_is_refused_by_name():
    x, w, dy = map(jnp.asarray, inputs(256, 128, 128, 2))
    sizes = jnp.asarray((100, 100), jnp.int32)
    fp8, fp8_gradient = (lambda a: a.astype(jnp.float8_e4m3fn)), (lambda a: a.astype(jnp.float8_e5m2))
    cases = {
        "K a multiple of 128, got 100; pad": lambda: hopper.forward(x[:, :100], w[:, :100], sizes),
        "N a multiple of 128, got 200; pad": lambda: hopper.forward(x, jnp.zeros((2, 128, 200), jnp.bfloat16), sizes),
        "N a multiple of 128, got 64": lambda: hopper.wgrad(x, dy[:, :64], sizes, 2),
        "at least one row, got 0": lambda: hopper.forward(x[:0], w, sizes),
        'got float32 and float32; .*"xla"': lambda: hopper.forward(x.astype(jnp.float32), w.astype(jnp.float32), sizes),
        "got bfloat16 and float8_e4m3fn": lambda: hopper.wgrad(x, fp8(dy), sizes, 2),
        r"fp8 transposed, w \[E, N, K\], got transposed = False": lambda: hopper.forward(fp8(x), fp8(w), sizes),
        r"fp8 transposed, x \[K, R\] and dy \[N, R\]": lambda: hopper.wgrad(fp8(x), fp8(dy), sizes, 2),
        "R a multiple of 128 for fp8, got 200; complete every group": lambda: hopper.wgrad(
            fp8(x[:200].T), fp8(dy[:200].T), sizes, 2, transposed=True
        ),
        'y in bfloat16, got float32; .*"xla"': lambda: hopper.forward(
            fp8(x), fp8(w), sizes, transposed=True, dtype=jnp.float32
        ),
        "in bfloat16, got transposed = True": lambda: hopper.wgrad(x.T, dy.T, sizes, 2, transposed=True),
    }
    if jax.version.__version_info__ < (0, 11):
        mixed = lambda: hopper.forward(fp8_gradient(x), fp8(w), sizes, transposed=True)
        cases["one dtype with this JAX, got float8_e5m2 and float8_e4m3fn; use jax 0.11"] = mixed
    for message, call in cases.items():
        with pytest.raises(ValueError, match="hopper grouped matmul needs .*" + message):
            call()
