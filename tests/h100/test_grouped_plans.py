"""The grouped Hopper kernels compiled for an H100 that is not here: what the compiler made of every plan that ships. Compiled, not measured."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm import plan
from jaxllm_kernels import grouped, grouped_hopper

pytestmark = [
    pytest.mark.h100,
    pytest.mark.version,
    pytest.mark.skipif(not importlib.util.find_spec("jax_cuda13_plugin"), reason="needs the extra `plan`"),
]
SMEM_LIMIT = 232448  # bytes that one block may have on compute capability 9.0
R, E = 1000, 8
WIDTHS = {2: (4096, 768, 640), 1: (4096, 640)}  # by bytes of an operand: one for each plan
MIXED = jax.version.__version_info__ >= (0, 11)


def compiled_for_h100(function, *shapes, devices=1):
    """`function` of arrays (shape, dtype), compiled for H100s that split the first dim."""
    mesh = Mesh(plan.devices(f"h100:{devices}"), ("x",))
    arguments = [jax.ShapeDtypeStruct(*x, sharding=NamedSharding(mesh, P("x"))) for x in shapes]
    with jax.set_mesh(mesh), plan.uncached(), plan.compiler_output():
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).compile()


def shared_memory(stem):
    """Bytes per block; each version of the compiler writes them elsewhere."""
    resources = stem.with_name(stem.name + ".resources.txt")
    if resources.exists():
        return max(map(int, re.findall(r"(?i)(?:smem|shared).*?(\d+)", resources.read_text())))
    with stem.with_name(stem.name + ".mlir-passes.log").open(errors="replace") as log:
        return next(
            int(size[1]) for line in log if (size := re.search(r"dynamic_shared_memory_size %c(\d+)_i32", line))
        )


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
    for name, value in dict(DUMP_TO=str(tmp_path), DUMP_PTX="1", DUMP_PTXAS="1").items():
        monkeypatch.setenv("MOSAIC_GPU_" + name, value)
    function, shapes = case(width, size)
    compiled_for_h100(function, *shapes)
    found = []
    for file in sorted(tmp_path.glob("*.ptx")):
        code, log = file.read_text(), file.with_suffix(".ptxas").read_text()
        found.append(re.match(r"[a-z_]+?(?=_\d)", file.name)[0])
        assert re.findall(r"(\d+) bytes spill", log) == ["0", "0"], (file.name, log)
        assert not re.search(r"C751[0-4]", log), (file.name, log)  # wgmma serialised
        assert "setmaxnreg ignored" not in log and re.findall(r"setmaxnreg\.(\w+)\S*\s+(\d+)", code), file.name
        assert f"m64n{tiles.columns}k{32 // size}" in code and "cp.async.bulk.tensor" in code, file.name
        assert ("multicast::cluster" in code) == (tiles.cluster > 1), file.name
        assert 0 < shared_memory(file.with_suffix("")) <= SMEM_LIMIT, file.name
        tmp_path.joinpath(file.with_suffix(".mlir-passes.log").name).unlink()  # 100 MB each
    assert sorted(found) == ["grouped_forward", "grouped_forward", "grouped_wgrad"]


@pytest.mark.parametrize("backend", grouped.BACKENDS)
def test_gradients_inside_a_shard_map_compile_for_two_devices(backend):
    def local(x, w, sizes):
        loss = lambda x, w: jnp.sum(grouped.grouped_matmul(x, w, sizes, backend=backend).astype(jnp.float32) ** 2)
        return jax.grad(loss, (0, 1))(x, w)

    both = jax.shard_map(local, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    shapes = ((2 * R, 200), jnp.bfloat16), ((2 * E, 200, 120), jnp.float32), ((2 * E,), jnp.int32)
    text = compiled_for_h100(both, *shapes, devices=2).as_text()
    assert not re.search("all-(gather|reduce|to-all)", text)
    assert len(re.findall(r"custom-call\(.*mosaic_gpu", text)) == (3 if backend == "hopper" else 0)
