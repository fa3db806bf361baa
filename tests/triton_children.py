"""Triton's programs without a GPU, for the tests: interpreted on the CPU, or compiled for a GPU that is not here.

Triton decides at import whether it interprets, so programs are interpreted and compiled by two children of this process (this file, run as a script),
which start when first asked and end with it. Interpreting checks indices, masks, bounds and rounding; compiling checks registers, shared memory and
instructions. Neither checks speed or races.
"""

import atexit
import functools
import os
import pathlib
import pickle
import re
import subprocess
import sys
import traceback

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]


# ---- the children -----------------------------------------------------------------------------------------------------------------------------------


def interpret(program, inputs, outputs, grid, num_warps, num_stages, aliases, constants):
    """One launch on torch's CPU tensors -> (outputs, number of dots, number of masks). What a program leaves unwritten is NaN."""
    import torch

    import jaxllm_kernels.attention_triton_kernels as kernels

    def to_torch(x):
        half = x.dtype.name == "bfloat16"
        return torch.from_numpy(np.array(x.view(np.int16) if half else x)).view(
            torch.bfloat16 if half else torch.from_numpy(x[:0]).dtype
        )

    tensors = [to_torch(x) for x in inputs]
    sources = {output: input for input, output in aliases.items()}
    results = [
        tensors[sources[i]] if i in sources else torch.full(shape, float("nan"), dtype=getattr(torch, dtype)) for i, (shape, dtype) in enumerate(outputs)
    ]  # fmt: skip
    counts.update(dots=0, masks=0)
    getattr(kernels, program)[grid](*tensors, *results, num_warps=num_warps, num_stages=num_stages, **constants)
    return [x.float().numpy() for x in results], counts["dots"], counts["masks"]


counts = {}


def prepare_interpreter():
    """Counts products and masks, and mends bfloat16: Triton's interpreter multiplies the bits as integers, and truncates where a GPU rounds to even."""
    import ml_dtypes
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot, cast, both = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl, InterpreterBuilder.create_and
    widened = lambda x: cast(None, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x

    def create_dot(self, a, b, d, *options):
        counts["dots"] += 1
        assert a.dtype.scalar == b.dtype.scalar
        return dot(self, widened(a), widened(b), d, *options)

    def cast_impl(self, x, dst_type):
        if (x.dtype.scalar, dst_type.scalar) == (tl.float32, tl.bfloat16):
            return TensorHandle(x.data.astype(ml_dtypes.bfloat16).view(np.uint16), tl.bfloat16)
        return cast(self, x, dst_type)

    def create_and(self, a, b):
        counts["masks"] += (
            a.data.ndim == 2 and min(a.data.shape) > 1
        )  # of a tile; Triton also joins its own checks of offsets, [rows, 1] and [1, columns]
        return both(self, a, b)

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl, InterpreterBuilder.create_and = (
        create_dot,
        cast_impl,
        create_and,
    )


def compile_program(program, inputs, outputs, num_warps, num_stages, constants, capability):
    """What the compiler made of one launch: registers, bytes of stack (where spills go) and of shared memory, counts of instructions."""
    import tempfile

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    import jaxllm_kernels.attention_triton_kernels as kernels

    names = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "int32": "*i32"}
    function = getattr(kernels, program)
    arrays = dict(zip(function.arg_names, [names[dtype] for _, dtype in (*inputs, *outputs)]))
    signature = {name: arrays.get(name, "constexpr") for name in function.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(arrays))}  # as jax-triton promises of every array
    result = triton.compile(
        ASTSource(function, signature=signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", capability, 32),
        options=dict(num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=True),
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        tool = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    facts = {key.lower(): int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    text = result.asm["ptx"]
    instructions = {
        "cp_async": "cp.async.cg",
        "mma": "mma.sync",
        "wgmma": "wgmma.mma_async",
        "atom": "\tatom.",
        "red": "\tred.",
    }
    sizes = {"shared": result.metadata.shared, "scratch": result.metadata.global_scratch_size}
    return facts | {key: text.count(word) for key, word in instructions.items()} | sizes


def serve(function):
    """Answers pickled argument tuples on stdin with pickled (result, error text) on stdout; what the libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = function(*arguments), None
        except Exception:  # whatever it is: the parent fails its test with this text, and the next question is answered
            answer = None, traceback.format_exc()
        pickle.dump(answer, answers)
        answers.flush()


# ---- the parent -------------------------------------------------------------------------------------------------------------------------------------


@functools.cache
def _child(mode):
    env = dict(
        os.environ,
        PYTHONPATH=str(ROOT / "kernels"),
        TRITON_CACHE_DIR=str(pathlib.Path(os.environ["JAXLLM_TEST_CACHE"]) / "triton"),
        TRITON_INTERPRET=str(int(mode == "interpret")),
    )
    process = subprocess.Popen([sys.executable, __file__, mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
    atexit.register(lambda: (process.stdin.close(), process.wait()))
    return process


def ask(mode, *arguments):
    """The answer of the child in `mode`, "interpret" or "compile", to the arguments of its function."""
    process = _child(mode)
    pickle.dump(arguments, process.stdin)
    process.stdin.flush()
    try:
        answer, error_text = pickle.load(process.stdout)
    except EOFError:
        raise AssertionError(f"the {mode} child ended with code {process.wait()}; its messages are on stderr") from None
    assert error_text is None, error_text
    return answer


def interpreted(monkeypatch):
    """Interprets the launches of the backend from here on. A list of (program, dots, masks), one entry per launch. float32 is let in: exact products
    show every slip."""
    import jax
    import jax.numpy as jnp

    from jaxllm_kernels import attention_triton as backend

    log = []

    def launch(program, inputs, outputs, grid, num_warps, num_stages, aliases, constants):
        flat, tree = jax.tree.flatten(outputs)
        specs = [(x.shape, x.dtype.name) for x in flat]
        arrays = [np.asarray(x) for x in inputs]
        call = (program, arrays, specs, grid, num_warps, num_stages, aliases, constants)
        results, dots, masks = ask("interpret", *call)
        log.append((program, dots, masks))
        return tree.unflatten([jnp.asarray(x, dtype=s.dtype) for x, s in zip(results, flat, strict=True)])

    monkeypatch.setattr(backend, "_launch", launch)
    monkeypatch.setattr(backend, "DTYPES", (*backend.DTYPES, "float32"))
    return log


if __name__ == "__main__":
    if sys.argv[1] == "interpret":
        prepare_interpreter()
    serve({"interpret": interpret, "compile": compile_program}[sys.argv[1]])
