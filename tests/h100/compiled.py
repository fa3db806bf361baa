"""What the tests for H100s that are not here share: compiling for them, what a program needs, and what the assembler said of every kernel.

A whole step is compiled by `plan.compile_step`.
"""

import importlib.util
import math
import re

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm import plan, sharding

MARKS = [
    pytest.mark.h100,
    pytest.mark.version,
    pytest.mark.skipif(not importlib.util.find_spec("jax_cuda13_plugin"), reason="needs the extra `plan`"),
]
# A whole step takes half a minute to compile; on older JAX a few of them have to do.
NEWEST = pytest.mark.skipif(
    jax.version.__version_info__ < (0, 11), reason="whole steps are compiled by the newest JAX, few by others"
)
GIB = 2**30
SMEM_LIMIT = 232448  # bytes that one block may have on compute capability 9.0


def h100s(**sizes):
    """A mesh of H100s that are not here, with these axes."""
    return sharding.make_mesh(sharding.MeshConfig(**sizes), plan.devices(f"h100:{math.prod(sizes.values())}"))


def abstract(mesh, shape, dtype, *axes):
    """An array of the mesh without values: its dims split over `axes` as in a PartitionSpec."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))


def compiled_on(mesh, function, *arguments, donated=()):
    """`function` of abstract arrays compiled for the GPUs of `mesh`, with the options of a plan; `donated`: the places of those that it may overwrite."""
    with jax.set_mesh(mesh), plan.uncached(), plan.compiler_output():
        traced = jax.jit(function, donate_argnums=donated).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).compile(plan.OPTIONS)


def compiled_for_h100(function, *shapes, devices=1, donated=()):
    """The same of arrays (shape, dtype), whose first dim the devices split."""
    mesh = h100s(data=devices)
    return compiled_on(mesh, function, *(abstract(mesh, *x, "data") for x in shapes), donated=donated)


def need(compiled):
    """GiB that a program takes on each device while it runs."""
    memory = compiled.memory_analysis()
    size = lambda part: getattr(memory, f"{part}_size_in_bytes") / GIB
    return size("argument") + size("temp") + size("output") - size("alias")


def at_rest(tree):
    """GiB of a tree of abstract arrays on each device."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves) / GIB


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
