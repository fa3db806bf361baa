"""What the tests of kernels for H100s that are not here share: compiling for them, and reading what the assembler said of every kernel."""

import importlib.util
import re

import jax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm import plan

MARKS = [
    pytest.mark.h100,
    pytest.mark.version,
    pytest.mark.skipif(not importlib.util.find_spec("jax_cuda13_plugin"), reason="needs the extra `plan`"),
]
SMEM_LIMIT = 232448  # bytes that one block may have on compute capability 9.0


def compiled_for_h100(function, *shapes, devices=1, donated=()):
    """`function` of arrays (shape, dtype), compiled for H100s that split the first dim; `donated`: the places of those that it may overwrite."""
    mesh = Mesh(plan.devices(f"h100:{devices}"), ("x",))
    arguments = [jax.ShapeDtypeStruct(*x, sharding=NamedSharding(mesh, P("x"))) for x in shapes]
    with jax.set_mesh(mesh), plan.uncached(), plan.compiler_output():
        return jax.jit(function, donate_argnums=donated).trace(*arguments).lower(lowering_platforms=("cuda",)).compile()


def dump_kernels(folder, monkeypatch):
    """From here on every Mosaic kernel that is compiled leaves its code and what the assembler said in `folder`."""
    for name, value in dict(DUMP_TO=str(folder), DUMP_PTX="1", DUMP_PTXAS="1").items():
        monkeypatch.setenv("MOSAIC_GPU_" + name, value)


def checked_kernels(folder):
    """[(name, PTX)] of the kernels in `folder`. None spills, has its tensor cores wait for each other, or takes more memory than there is, and all hand
    registers from the producer to the consumers."""
    found = []
    for file in sorted(folder.glob("*.ptx")):
        code, log = file.read_text(), file.with_suffix(".ptxas").read_text()
        assert set(re.findall(r"(\d+) bytes spill", log)) == {"0"}, (file.name, log)
        assert not re.search(r"C751[0-4]", log), (file.name, log)  # wgmma serialised
        assert "setmaxnreg ignored" not in log and re.findall(r"setmaxnreg\.(\w+)\S*\s+(\d+)", code), file.name
        assert 0 < _shared_memory(file.with_suffix("")) <= SMEM_LIMIT, file.name
        found.append((re.match(r"[a-z_]+?(?=_\d)", file.name)[0], code))
        folder.joinpath(file.with_suffix(".mlir-passes.log").name).unlink()  # 100 MB each
    return found


def _shared_memory(stem):
    """Bytes per block; each version of the compiler writes them elsewhere."""
    resources = stem.with_name(stem.name + ".resources.txt")
    if resources.exists():
        return max(map(int, re.findall(r"(?i)(?:smem|shared).*?(\d+)", resources.read_text())))
    with stem.with_name(stem.name + ".mlir-passes.log").open(errors="replace") as log:
        return next(
            int(size[1]) for line in log if (size := re.search(r"dynamic_shared_memory_size %c(\d+)_i32", line))
        )
