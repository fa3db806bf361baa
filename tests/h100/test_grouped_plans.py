"""The grouped Hopper kernels compiled for an H100 that is not here: what the compiler made of every plan that ships. Compiled, not measured."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from h100.compiled import MARKS, checked_kernels, compiled_for_h100, dump_kernels
from jaxllm_kernels import grouped, grouped_hopper

pytestmark = MARKS
R, E = 1000, 8
WIDTHS = {2: (4096, 768, 640), 1: (4096, 640)}  # by bytes of an operand: one for each plan
MIXED = jax.version.__version_info__ >= (0, 11)


def products(x, w, dy, sizes):
    """Forward, the gradient of x and that of w, in bfloat16."""
    return (
        grouped_hopper.forward(x, w, sizes),
        grouped_hopper.forward(dy, w, sizes, transposed=True),
        grouped_hopper.wgrad(x, dy, sizes, E),
    )


def fp8_products(x, w_last, w, dy, x_last, dy_last, sizes):
    """The same in fp8, every operand with the contraction as last dim."""
    return (
        grouped_hopper.forward(x, w_last, sizes, transposed=True),
        grouped_hopper.forward(dy, w, sizes, transposed=True),
        grouped_hopper.wgrad(x_last, dy_last, sizes, E, transposed=True),
    )


def case(width, size):
    """(function, shapes) of products with K = N = width and operands of so many bytes."""
    matrix, sizes = (E, width, width), ((E,), jnp.int32)
    if size == 2:
        return products, [((R, width), jnp.bfloat16), (matrix, jnp.bfloat16), ((R, width), jnp.bfloat16), sizes]
    values, gradients = jnp.float8_e4m3fn, jnp.float8_e5m2 if MIXED else jnp.float8_e4m3fn
    rows, columns = (1024, width), (width, 1024)
    weights = [(matrix, values)] * 2
    return fp8_products, [
        ((R, width), values),
        *weights,
        (rows, gradients),
        (columns, values),
        (columns, gradients),
        sizes,
    ]


@pytest.mark.parametrize("size, number", [(size, n) for size in WIDTHS for n in range(len(WIDTHS[size]))])
def test_no_plan_spills_or_serialises_and_all_use_tensor_cores_and_tma(size, number, tmp_path, monkeypatch):
    width, tiles = WIDTHS[size][number], grouped_hopper.PLANS[size][number]
    dump_kernels(tmp_path, monkeypatch)
    function, shapes = case(width, size)
    compiled_for_h100(function, *shapes)
    found = checked_kernels(tmp_path)
    assert sorted(name for name, _ in found) == ["grouped_forward", "grouped_forward", "grouped_wgrad"]
    for name, code in found:
        assert f"m64n{tiles.columns}k{32 // size}" in code and "cp.async.bulk.tensor" in code, name
        assert ("multicast::cluster" in code) == (tiles.cluster > 1), name


@pytest.mark.parametrize("backend", grouped.BACKENDS)
def test_gradients_inside_a_shard_map_compile_for_two_devices(backend):
    def local(x, w, sizes):
        loss = lambda x, w: jnp.sum(grouped.grouped_matmul(x, w, sizes, backend=backend).astype(jnp.float32) ** 2)
        return jax.grad(loss, (0, 1))(x, w)

    both = jax.shard_map(local, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    shapes = ((2 * R, 200), jnp.bfloat16), ((2 * E, 200, 120), jnp.float32), ((2 * E,), jnp.int32)
    text = compiled_for_h100(both, *shapes, devices=2).as_text()
    assert not re.search("all-(gather|reduce|to-all)", text)
    assert len(re.findall(r"custom-call\(.*mosaic_gpu", text)) == (3 if backend == "hopper" else 0)
