"""The Hopper kernels compiled for an H100 that is not here: what the compiler made of every plan that ships. Compiled, not measured."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm import plan
from jaxllm_kernels import attention_hopper as hopper

pytestmark = [
    pytest.mark.h100,
    pytest.mark.version,
    pytest.mark.skipif(not importlib.util.find_spec("jax_cuda13_plugin"), reason="needs the extra `plan`"),
]
SMEM_LIMIT = 232448  # bytes that one block may have on compute capability 9.0
B, T, S, H, K = 2, 1024, 1536, 8, 2


def compiled_for_h100(function, *shapes, donated=()):
    """`function` of arrays (shape, dtype), compiled for one H100; `donated` names the places of those that it may overwrite."""
    mesh = Mesh(plan.devices("h100:1"), ("x",))
    arguments = [jax.ShapeDtypeStruct(*x, sharding=NamedSharding(mesh, P())) for x in shapes]
    with jax.set_mesh(mesh), plan.uncached(), plan.compiler_output():
        return jax.jit(function, donate_argnums=donated).trace(*arguments).lower(lowering_platforms=("cuda",)).compile()


def shapes(head_dim):
    """Of q, k, v, do, lse, delta, k_start, k_end."""
    q, k = ((B, T, H, head_dim), jnp.bfloat16), ((B, S, K, head_dim), jnp.bfloat16)
    rows, place = ((B, H, T), jnp.float32), ((B, T), jnp.int32)
    return q, k, k, q, rows, rows, place, place


def every_kernel(q, k, v, do, lse, delta, k_start, k_end):
    """Each kernel, and each again with sums that it adds to in place."""
    rest, intervals = (do, lse, delta, k_start, k_end), (k_start, k_end)
    dq, dkv = hopper.dq(q, k, v, *rest), hopper.dkv(q, k, v, *rest)
    carry = hopper.fold(hopper.empty(q), q, k, v, *intervals)
    return hopper.forward(q, k, v, *intervals), carry, hopper.dq(q, k, v, *rest, dq), hopper.dkv(q, k, v, *rest, dkv)


def shared_memory(stem):
    """Bytes per block; each version of the compiler writes them elsewhere."""
    resources = stem.with_name(stem.name + ".resources.txt")
    if resources.exists():
        return max(map(int, re.findall(r"(?i)(?:smem|shared).*?(\d+)", resources.read_text())))
    with stem.with_name(stem.name + ".mlir-passes.log").open(errors="replace") as log:
        return next(
            int(size[1]) for line in log if (size := re.search(r"dynamic_shared_memory_size %c(\d+)_i32", line))
        )


@pytest.mark.parametrize("head_dim", hopper.HEAD_DIMS)
def test_no_plan_spills_or_serialises_and_all_use_tensor_cores_and_tma(head_dim, tmp_path, monkeypatch):
    for name, value in dict(DUMP_TO=str(tmp_path), DUMP_PTX="1", DUMP_PTXAS="1").items():
        monkeypatch.setenv("MOSAIC_GPU_" + name, value)
    compiled_for_h100(every_kernel, *shapes(head_dim))
    found = []
    for file in sorted(tmp_path.glob("*.ptx")):
        code, log = file.read_text(), file.with_suffix(".ptxas").read_text()
        found.append(re.match(r"[a-z_]+?(?=_\d)", file.name)[0])
        assert re.findall(r"(\d+) bytes spill", log) == ["0", "0"], (file.name, log)
        assert not re.search(r"C751[0-4]", log), (file.name, log)  # wgmma serialised
        assert "setmaxnreg ignored" not in log and re.findall(r"setmaxnreg\.(\w+)\S*\s+(\d+)", code), file.name
        assert code.count("wgmma.mma_async") >= 24 and code.count("cp.async.bulk.tensor") >= 6, file.name
        assert 0 < shared_memory(file.with_suffix("")) <= SMEM_LIMIT, file.name
        tmp_path.joinpath(file.with_suffix(".mlir-passes.log").name).unlink()  # 100 MB each
    assert sorted(found) == ["attention_dkv"] * 2 + ["attention_dq"] * 2 + ["attention_forward"] * 2


def test_successive_folds_and_sums_copy_nothing():
    sums = [((B, T, H, 64), jnp.float32), *[((B, H, T), jnp.float32)] * 2, *[((B, S, K, 64), jnp.float32)] * 2]

    def ring(q, k, v, do, lse, delta, k_start, k_end, acc, m, l, dk, dv, dq):
        carry, dkv = (acc, m, l), (dk, dv)
        for _ in range(3):
            carry = hopper.fold(carry, q, k, v, k_start, k_end)
            dq = hopper.dq(q, k, v, do, lse, delta, k_start, k_end, dq)
            dkv = hopper.dkv(q, k, v, do, lse, delta, k_start, k_end, dkv)
        return carry, dkv, dq

    text = compiled_for_h100(ring, *shapes(64), *sums, sums[0], donated=range(8, 14)).as_text()
    calls = [line for line in text.splitlines() if "custom-call(" in line and "mosaic_gpu" in line]
    assert len(calls) == 9 and all("output_to_operand_aliasing" in call for call in calls)
    assert not re.findall(r"\bcopy(?:-start)?\(", text)
