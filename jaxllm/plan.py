"""`python -m jaxllm.plan --config F --on h100:8 [--json]`: compiles the real training step for GPUs that are not here.

XLA's GPU compiler needs no GPU, no driver and no CUDA toolkit, only the plugin packages (`pip install 'jaxllm[plan]'`). What it reports is
*compiled, not measured*: memory per GPU, collectives and whether they overlap, FLOPs, and its own warnings. It does not see NCCL buffers, the
CUDA context and library workspaces, for which RESERVE is set aside.
"""

import argparse
import contextlib
import json
import math
import os
import pathlib
import re
import sys
import tempfile
import time

from jaxllm.section import UserError

TARGETS = {"h100": "h100_sxm.txtpb", "h200": "h200.txtpb"}
KERNELS = ("mosaic_gpu_v2", "triton_kernel_call")  # custom calls that are kernels of ours
# How many products of queries with keys each kernel makes.
ATTENTION_PRODUCTS = {"attention_forward": 2, "attention_dq": 3, "attention_dkv": 4}
RESERVE_GIB = 6.0  # NCCL buffers, CUDA context, cuBLAS workspaces: an allowance, not a measurement
OPTIONS = {
    "xla_gpu_enable_triton_gemm": False
}  # untuned Triton products say nothing; a tuned run takes cuBLASLt for the large ones


def parse_devices(on: str) -> tuple[str, int, int]:
    """(GPU, hosts, GPUs per host) of "h100:8", "h200:4x8" or "h100:16" (hosts of 8)."""
    found = re.fullmatch(r"([\w-]+):(?:(\d+)x)?(\d+)", on)
    if not found or found[1] not in TARGETS:
        raise UserError(
            f"--on: got {on!r}; write GPU:COUNT or GPU:HOSTSxCOUNT, such as h100:8 or h100:2x8, with GPU one of {', '.join(TARGETS)}"
        )
    name, hosts, count = found[1], int(found[2] or 1), int(found[3])
    if not found[2] and count > 8:
        if count % 8:
            raise UserError(f"--on: {on}: {count} GPUs are not whole hosts of 8; write h100:HOSTSxCOUNT")
        hosts, count = count // 8, 8
    if not hosts or not count:
        raise UserError(f"--on: {on}: at least one GPU")
    return name, hosts, count


def devices(on: str):
    """Devices of a machine that is not here, for `make_mesh`. UserError without the plugin packages."""
    import numpy as np
    from jax.experimental import topologies

    name, hosts, count = parse_devices(on)
    target = (pathlib.Path(__file__).parent / "targets" / TARGETS[name]).read_text(encoding="utf-8")
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name=name, target_config=target, topology=f"1x{hosts}x{count}"
        )
    except (NotImplementedError, RuntimeError, ValueError) as error:
        import jax

        raise UserError(
            "the compiler for CUDA is not here (or does not fit this jax): pip install 'jaxllm[plan]', that is "
            f"jax-cuda13-plugin=={jax.__version__} and jax-cuda13-pjrt=={jax.__version__}. ({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from error
    return np.array(topology.devices)


@contextlib.contextmanager
def compiler_output():
    """Collects what native code writes to file descriptor 2 into the list that it yields."""
    lines = []
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        sys.stderr.flush()
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            lines += file.read().splitlines()


@contextlib.contextmanager
def uncached():
    """Without jax's compilation cache, from which a program for a machine that is not here cannot be read back."""
    import jax

    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


def compile_step(cfg, on: str):
    """(compiled, abstract TrainState, seconds, lines that the compiler printed) of the training step of `cfg` on `on`."""
    import jax

    from jaxllm import attention, sharding, step
    from jaxllm.data.batch import abstract_batch

    mesh = sharding.make_mesh(cfg.mesh, devices(on))
    with jax.set_mesh(mesh):
        graphdef, state = step.abstract_state(cfg)
        batch = abstract_batch(
            mesh, cfg.optimizer.num_microbatches, cfg.data.global_batch_size, cfg.data.seq_len, cfg.model.sliding_window
        )
        begin = time.perf_counter()
        target = attention.compiling_for(
            cfg.attention, cfg.precision.compute, cfg.model.head_dim, mesh.devices.flat[0].compute_capability
        )
        with uncached(), target, compiler_output() as lines:
            lowered = (
                step.make_train_step(graphdef, cfg, after_warmup=True)
                .trace(state, batch)
                .lower(lowering_platforms=("cuda",))
            )
            compiled = lowered.compile(OPTIONS)
    return compiled, state, time.perf_counter() - begin, lines


# What the compiler prints and what it means; lines that match none are harmless (autotuning without a device, and the like).
WARNINGS = {
    "Involuntary full rematerialization": "an array is copied whole to every device to change its sharding",
    "Can't reduce memory use below": "above the compiler's own limit (80% of the device): it may give up overlapping communication",
    "exceeds the base limit": "close to the memory limit: the scheduler gives up overlapping communication",
}


def kernel_flops(kernels, cfg) -> list[float] | None:
    """FLOPs of each of our kernels (`hlo.Kernel`s; 0 for other calls) per execution and device on the current mesh; None if one is not known by name
    (Triton's are not).

    What a call computes depends on its data, so this is what `cfg` means by it: a row is one document, of whose keys a query sees those before it and
    inside its window (half of them, without a window), and experts have equal rows, sum(group_sizes) = tokens x experts of each. Products that a kernel
    makes again (the scores, in both backward kernels) count."""
    from jaxllm import attention
    from jaxllm.sharding import AXES, axis_size

    seq_len, model = cfg.data.seq_len, cfg.model
    window = min(model.sliding_window or seq_len, seq_len)
    keys = (window - window**2 / (2 * seq_len)) / attention.calls_per_pass(cfg.attention, model, seq_len)
    tokens = cfg.rows_per_microbatch * seq_len / axis_size(*AXES)
    found = []
    for kernel in kernels:
        if kernel.target not in KERNELS:
            flops = 0.0
        elif kernel.name in ATTENTION_PRODUCTS:
            queries = max(math.prod(dims) for _, dims in kernel.operands if len(dims) == 4)  # B x T x H x D
            flops = ATTENTION_PRODUCTS[kernel.name] * 2 * queries * keys
        elif kernel.name.startswith("grouped_"):
            arrays = kernel.results if kernel.name == "grouped_wgrad" else kernel.operands
            weight = next(dims[-2] * dims[-1] for _, dims in arrays if len(dims) == 3)  # of one expert
            flops = 2 * tokens * model.num_experts_per_tok * weight
        else:
            return None
        found.append(flops * kernel.times)
    return found


def fp8_share(program, in_kernels) -> float | None:
    """Of the FLOPs of products with weights of attention and MLPs or experts, forward and backward, the share whose operands are both FP8; in_kernels: as
    `kernel_flops` says, and None if that does."""
    if in_kernels is None:
        return None
    work = [
        (p.dtypes, p.flops) for p in program.products if not re.search(r"\b(loss|router|attention|adapter)\b", p.name)
    ]
    for kernel, flops in zip(program.kernels, in_kernels, strict=True):
        if kernel.name.startswith("grouped_"):
            arrays = [dtype for dtype, dims in kernel.operands if len(dims) >= 2 and dtype[0] in "bf"]
            work.append((arrays[:2], flops))
    total = sum(flops for _, flops in work)
    return sum(flops for dtypes, flops in work if all(d.startswith("f8") for d in dtypes)) / total if total else None


def report(cfg, on: str) -> dict:
    """The facts of the compiled step as a dict: what `--json` prints."""
    import jax
    import numpy as np

    from jaxllm import attention, config, hardware, hlo, linear, moe, sharding

    name, hosts, count = parse_devices(on)
    config.check(cfg, hosts * count)
    with jax.set_mesh(sharding.make_mesh(cfg.mesh, devices(on))):
        products = linear.describe(cfg.precision, attention.device_kind())
        described = attention.describe(cfg.attention, cfg.model, cfg.precision.compute, cfg.data.seq_len)
        experts = None
        if cfg.model.num_local_experts:
            shape = cfg.rows_per_microbatch, cfg.data.seq_len
            experts = moe.describe(
                cfg.moe, cfg.model, *shape, cfg.precision.compute, cfg.precision.matmul, cfg.lora.kept
            )
        compiled, state, seconds, lines = compile_step(cfg, on)
        memory, program = compiled.memory_analysis(), hlo.read(compiled.as_text())
        in_kernels = kernel_flops(program.kernels, cfg)
    gib = lambda n: round(float(n) / 2**30, 3)
    bytes_of = lambda x: np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    at_rest = lambda *trees: sum(bytes_of(x) for x in jax.tree.leaves(trees))
    # By the config: shardings of devices that are described and not here forget their memory.
    moments = getattr(state.opt_state, "mu", {}), getattr(state.opt_state, "nu", {})
    on_host = at_rest(moments) if cfg.optimizer.moments_memory == "host" else 0
    need = (
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )
    capacity = hardware.HARDWARE[name].memory_gib
    seen = [
        f"{meaning} ({sum(text in line for line in lines)} x)"
        for text, meaning in WARNINGS.items()
        if any(text in line for line in lines)
    ]
    if large := [c for c in program.collectives if not c.asynchronous and c.bytes * c.times > 2**20]:
        seen.append(
            f"{len(large)} collectives of over 1 MiB wait instead of overlapping: {', '.join(sorted({c.kind for c in large}))}"
        )
    if cfg.precision.matmul == "float8" and cfg.precision.fp8.warmup_steps:
        seen.append(
            f"the first {cfg.precision.fp8.warmup_steps} steps are another program, in {cfg.precision.compute}: precision.matmul=record "
            "precision.fp8.warmup_steps=0 plans it"
        )
    if program.unknown_loops:
        seen.append(f"{program.unknown_loops} loops have no known trip count and are counted once")
    return {
        "device": name,
        "devices": hosts * count,
        "evidence": "compiled, not measured",
        "attention": described,
        "products": products,
        "experts": experts,
        "fits": gib(need) + RESERVE_GIB <= capacity,
        "memory_gib": {
            "weights": gib(at_rest(state.params, state.frozen)),
            "frozen": gib(at_rest(state.frozen)),
            "optimizer": gib(at_rest(state.opt_state) - on_host),
            "temporaries": gib(memory.temp_size_in_bytes),
            "need": gib(need),
            "reserve": RESERVE_GIB,
            # Moments that rest there are read and written in one program: the old and the new ones exist at once.
            "host": gib(memory.host_temp_size_in_bytes + 2 * on_host),
            "device": capacity,
        },
        "trained_parameters": sum(math.prod(x.shape) for x in state.params.values()),
        "flops_per_step_per_device": program.flops,
        "kernel_flops_per_step_per_device": None if in_kernels is None else sum(in_kernels),
        "fp8_share": fp8_share(program, in_kernels),
        "collectives": [
            {"kind": c.kind, "dtype": c.dtype, "bytes": c.bytes, "times": c.times, "asynchronous": c.asynchronous}
            for c in sorted(program.collectives, key=lambda c: -c.bytes * c.times)
        ],
        "custom_calls": program.custom_calls,
        "compile_s": round(seconds, 1),
        "warnings": seen,
    }


def page(facts: dict) -> str:
    """The same for a reader."""
    memory = facts["memory_gib"]
    frozen = f" ({memory['frozen']:.1f} frozen)" if memory["frozen"] else ""
    lines = [
        facts["attention"],
        facts["products"],
        *([facts["experts"]] if facts["experts"] else []),
        f"{facts['devices']} x {facts['device']} ({facts['evidence']}), compiled in {facts['compile_s']} s",
        f"memory per GPU: need {memory['need']:.1f} GiB = weights {memory['weights']:.1f}{frozen} + optimizer {memory['optimizer']:.1f} + temporaries "
        f"{memory['temporaries']:.1f}; with {memory['reserve']:.0f} GiB in reserve it {'fits' if facts['fits'] else 'does NOT fit'} in {memory['device']:.1f}",
    ]
    if memory["host"]:
        lines.append(f"host memory per GPU: {memory['host']:.1f} GiB of offloaded activations and moments")
    kernels = sum(facts["custom_calls"].get(target, 0) for target in KERNELS)
    inside = facts["kernel_flops_per_step_per_device"]
    work = "whose work is not counted" if inside is None else f"{inside / 1e12:.1f} TFLOP if rows are whole documents"
    lines.append(
        f"matrix products per GPU and step: {facts['flops_per_step_per_device'] / 1e12:.1f} TFLOP, and {kernels} calls of our kernels, {work}"
    )
    if facts["fp8_share"]:
        lines.append(f"in FP8: {facts['fp8_share']:.1%} of the products with weights of attention and MLPs or experts")
    totals = {}
    for c in facts["collectives"]:
        size, count, late = totals.get((c["kind"], c["dtype"]), (0, 0, 0))
        totals[c["kind"], c["dtype"]] = (
            size + c["bytes"] * c["times"],
            count + c["times"],
            late + c["times"] * (not c["asynchronous"]),
        )
    for (kind, dtype), (size, count, late) in sorted(totals.items(), key=lambda item: -item[1][0]):
        lines.append(f"  {kind} {dtype}: {size / 2**30:.2f} GiB in {count} a step, {late} of them not overlapped")
    return "\n".join(lines + [f"warning: {text}" for text in facts["warnings"]])


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jaxllm.plan", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--config", required=True, metavar="FILE", help="TOML file; see configs/")
    parser.add_argument(
        "--on", required=True, metavar="GPU:COUNT", help="such as h100:8, h200:8, h100:2x8 (hosts x GPUs)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes on top, with TOML values")
    options = parser.parse_intermixed_args(arguments)
    os.environ["JAX_PLATFORMS"] = "cpu"  # before jax is imported: the plugin must not look for a driver
    try:
        from jaxllm.config import load_config

        facts = report(load_config(options.config, *options.overrides), options.on)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(facts, indent=1) if options.json else page(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
