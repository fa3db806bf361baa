"""The `triton` backend without a GPU: its programs interpreted against float64, compiled for sm_80 and sm_90, and lowered through jax-triton.

Triton decides at import whether it interprets, so programs are interpreted and compiled by two children of this process (this file, run as a script).
Interpreting checks indices, masks, bounds and rounding; compiling checks registers, shared memory and instructions. Neither checks speed or races.
"""

import contextlib
import importlib.util
import itertools
import json
import os
import pathlib
import pickle
import re
import subprocess
import sys
import traceback
import types

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
SHARED_MEMORY = {
    80: 99 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
}  # bytes a block may have; sm_80 has 163 KiB, but takes the plans of sm_89


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
        except Exception:
            answer = None, traceback.format_exc()
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    if sys.argv[1] == "interpret":
        prepare_interpreter()
    serve({"interpret": interpret, "compile": compile_program}[sys.argv[1]])
    sys.exit()

# ---- the tests --------------------------------------------------------------------------------------------------------------------------------------

import jax
import jax.numpy as jnp
import pytest

from conftest import CACHE
from jaxllm_kernels import attention, reference, without_padding
from jaxllm_kernels import attention_triton as backend
from support import error

needs = lambda *names: pytest.mark.skipif(
    any(not importlib.util.find_spec(name) for name in names),
    reason=f"needs {', '.join(names)}: pip install 'jaxllm[triton,test]'",
)


@contextlib.contextmanager
def child(mode):
    """A function that sends its arguments to a child in `mode` and returns its answer."""
    env = dict(
        os.environ,
        PYTHONPATH=str(ROOT / "kernels"),
        TRITON_CACHE_DIR=str(pathlib.Path(CACHE) / "triton"),
        TRITON_INTERPRET=str(int(mode == "interpret")),
    )
    with subprocess.Popen(
        [sys.executable, __file__, mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
    ) as process:

        def ask(*arguments):
            pickle.dump(arguments, process.stdin)
            process.stdin.flush()
            answer, error_text = pickle.load(process.stdout)
            assert error_text is None, error_text
            return answer

        yield ask
        process.stdin.close()


@pytest.fixture(scope="module")
def interpreter():
    with child("interpret") as ask:
        yield ask


@pytest.fixture(scope="module")
def compiler():
    with child("compile") as ask:
        yield ask


@pytest.fixture
def launches(interpreter, monkeypatch):
    """The backend with its launches interpreted; a list of (program, dots, masks), one entry per launch. float32 is let in: exact products show every slip."""
    log = []

    def launch(program, inputs, outputs, grid, num_warps, num_stages, aliases, constants):
        flat, tree = jax.tree.flatten(outputs)
        specs = [(x.shape, x.dtype.name) for x in flat]
        results, dots, masks = interpreter(
            program, [np.asarray(x) for x in inputs], specs, grid, num_warps, num_stages, aliases, constants
        )
        log.append((program, dots, masks))
        return tree.unflatten([jnp.asarray(x, dtype=s.dtype) for x, s in zip(results, flat, strict=True)])

    monkeypatch.setattr(backend, "_launch", launch)
    monkeypatch.setattr(backend, "DTYPES", (*backend.DTYPES, "float32"))
    return log


def documents(B, T, seed=0, window=None, padding=40):
    """Intervals of packed causal documents with padding at the end, i32[B, T]."""
    rng = np.random.default_rng(seed)
    place = np.arange(T, dtype=np.int32)
    starts, ends = np.zeros((2, B, T), np.int32)
    for b in range(B):
        borders = np.concatenate([[0], np.sort(rng.choice(T - padding, 2, replace=False))])
        first = borders[np.searchsorted(borders, place, side="right") - 1]
        starts[b] = first if window is None else np.maximum(first, place - window + 1)
        ends[b] = np.where(place < T - padding, place + 1, starts[b])
    return starts, ends


def inputs(rng, k_start, k_end, S, H, K, D, dtype=np.float32, scale=1.0):
    B, T = k_start.shape
    normal = lambda length, heads: rng.standard_normal((B, length, heads, D)).astype(np.float32)
    q, k, v, do = normal(T, H) * np.float32(scale), normal(S, K), normal(S, K), normal(T, H)
    return (*(x.astype(dtype) for x in (q, k, v)), k_start, k_end, do.astype(dtype))


def oracle(q, k, v, k_start, k_end, do, scale=None):
    """out, lse, dq, dk and dv in float64 numpy, written independently of the package."""
    q, k, v, do = (np.asarray(x, np.float64) for x in (q, k, v, do))
    group, scale, index = q.shape[2] // k.shape[2], scale or q.shape[3] ** -0.5, np.arange(k.shape[1])
    wide_k, wide_v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    seen = ((index >= k_start[..., None]) & (index < k_end[..., None]))[:, None]
    scores = np.where(seen, np.einsum("bthd,bshd->bhts", q, wide_k) * scale, -np.inf)
    peak = np.where(seen.any(-1, keepdims=True), scores.max(-1, keepdims=True), 0)
    p = np.exp(scores - peak)
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + peak)[..., 0]
    p = p / np.where(total > 0, total, 1)
    dp = np.einsum("bthd,bshd->bhts", do, wide_v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * scale
    of_keys = lambda x: x.reshape(*x.shape[:2], -1, group, x.shape[3]).sum(3)
    dk, dv = of_keys(np.einsum("bhts,bthd->bshd", ds, q)), of_keys(np.einsum("bhts,bthd->bshd", p, do))
    return dict(
        out=np.einsum("bhts,bshd->bthd", p, wide_v), lse=lse, dq=np.einsum("bhts,bshd->bthd", ds, wide_k), dk=dk, dv=dv
    )


def at_once(q, k, v, k_start, k_end, do, scale=None):
    """The same from the backend, all keys in one call."""
    out, lse = backend.forward(q, k, v, k_start, k_end, scale=scale)
    delta = jnp.einsum("bthd,bthd->bht", *(jnp.asarray(x, dtype=jnp.float32) for x in (do, out)))
    rest = (do, lse, delta, k_start, k_end)
    dk, dv = backend.dkv(q, k, v, *rest, scale=scale)
    return dict(out=out, lse=lse, dq=backend.dq(q, k, v, *rest, scale=scale), dk=dk, dv=dv)


def in_parts(q, k, v, k_start, k_end, do, size=128, seed=0):
    """The same in blocks of `size` keys, which come in any order, each with the intervals in its own index."""
    blocks = np.random.default_rng(seed).permutation(k.shape[1] // size)
    part = lambda n: (q, k[:, n * size : (n + 1) * size], v[:, n * size : (n + 1) * size])
    shifted = lambda n: (k_start - np.int32(n * size), k_end - np.int32(n * size))
    carry = backend.empty(jnp.asarray(q))
    for n in blocks:
        carry = backend.fold(carry, *part(n), *shifted(n))
    out, lse = backend.finish(carry, q.dtype)
    delta = jnp.einsum("bthd,bthd->bht", *(jnp.asarray(x, dtype=jnp.float32) for x in (do, out)))
    dq, of_keys = None, {}
    for n in blocks:
        dq = backend.dq(*part(n), do, lse, delta, *shifted(n), into=dq)
        before = (jnp.full(part(n)[1].shape, 0.5, jnp.float32), jnp.full(part(n)[1].shape, -2.0, jnp.float32))
        of_keys[n] = [
            x - y for x, y in zip(backend.dkv(*part(n), do, lse, delta, *shifted(n), into=before), before, strict=True)
        ]
    dk, dv = (np.concatenate(x, axis=1) for x in zip(*(of_keys[n] for n in sorted(of_keys)), strict=True))
    return dict(out=out, lse=lse, dq=dq, dk=dk, dv=dv)


def differences(got, want):
    """{name: error}, after a check that the same rows see nothing."""
    assert np.array_equal(np.isfinite(got["lse"]), np.isfinite(want["lse"]))
    finite = lambda x: np.where(np.isfinite(want["lse"]), x, 0)
    got, want = got | {"lse": finite(got["lse"])}, want | {"lse": finite(want["lse"])}
    return {name: error(np.asarray(got[name], np.float32), want[name], floor=1.0) for name in want}


def everything(B, T, S):
    return np.full((B, T), -200, np.int32), np.full((B, T), S + 300, np.int32)  # beyond both ends: to be cut off


CASES = {
    "packed": (lambda: documents(2, 256), 256, dict(H=2, K=1, D=64)),
    "window": (lambda: documents(1, 384, window=70, padding=150), 384, dict(H=1, K=1, D=64)),
    "full-one-key-head": (lambda: everything(1, 128, 256), 256, dict(H=3, K=1, D=64)),
    "two-key-heads": (lambda: documents(1, 128, padding=9), 128, dict(H=4, K=2, D=64)),
    "head-dim-128": (lambda: documents(1, 256, seed=3), 256, dict(H=2, K=1, D=128)),
    "head-dim-256": (lambda: documents(1, 256, seed=4), 256, dict(H=1, K=1, D=256)),
}


@needs("triton", "torch")
@pytest.mark.parametrize(
    "way, case",
    [
        *((at_once, case) for case in CASES),
        (in_parts, "packed"),
        (in_parts, "full-one-key-head"),
        (in_parts, "head-dim-256"),
    ],
)
def test_every_program_equals_the_float64_oracle(rng, launches, way, case):
    intervals, S, sizes = CASES[case]
    given = inputs(rng, *intervals(), S, **sizes)
    got, want = way(*given), oracle(*given)
    assert max(differences(got, want).values()) < 2e-6, differences(got, want)
    nobody = ~np.isfinite(want["lse"]).any(1)  # padding rows: not small but nothing
    assert not np.asarray(got["out"])[nobody].any() and not np.asarray(got["dq"])[nobody].any()
    assert nobody.any() or "full" in case


@needs("triton", "torch")
def test_lengths_and_head_dims_that_fit_no_tile_are_completed_by_the_caller(rng, launches):
    q, k, v, k_start, k_end, do = inputs(rng, *documents(1, 150, padding=20), 150, 2, 1, 40)
    given = (*(jnp.asarray(x) for x in without_padding(q, k, v, k_start, k_end)), k_start, k_end)
    run = lambda q, k, v: attention(q, k, v, k_start, k_end, backend="triton", aligned=True)
    out, pullback = jax.vjp(run, *given[:3])
    want = oracle(*given, do)
    for name, got in zip(("out", "dq", "dk", "dv"), (out, *pullback(jnp.asarray(do))), strict=True):
        assert error(got, want[name]) < 2e-6, name
    assert [program for program, *_ in launches] == ["forward", "dq", "dkv"]


@needs("triton", "torch")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_half_precision_stays_within_twice_the_error_of_the_reference_in_that_precision(rng, launches, dtype):
    given = inputs(rng, *documents(1, 256), 256, 2, 1, 64, dtype=dtype)
    do = jnp.asarray(given[5])
    out, pullback = jax.vjp(lambda q, k, v: reference.attention(q, k, v, *given[3:5])[0], *given[:3])
    want = oracle(*given)
    theirs = dict(zip(("out", "dq", "dk", "dv"), (out, *pullback(do)), strict=True))
    ours = differences(at_once(*given), want)
    assert ours["lse"] < 2e-6
    for name, x in theirs.items():
        allowed = max(error(np.asarray(x, np.float32), want[name]), float(jnp.finfo(dtype).eps) / 2)
        assert ours[name] < 2 * allowed, name


@needs("triton", "torch")
def test_a_given_scale_is_the_scale_of_scores_and_gradients(rng, launches):
    given = inputs(rng, *documents(1, 128, padding=3), 128, 1, 1, 64)
    assert max(differences(at_once(*given, scale=0.3), oracle(*given, scale=0.3)).values()) < 2e-6


@needs("triton", "torch")
def test_logits_in_the_thousands_whose_peak_comes_last(rng, launches):
    q, k, v, *rest = inputs(rng, *everything(1, 128, 256), 256, 1, 1, 64, scale=1e3)
    k *= np.linspace(0.1, 1, 256, dtype=np.float32)[:, None, None]
    got, want = at_once(q, k, v, *rest), oracle(q, k, v, *rest)
    assert np.abs(want["lse"]).max() > 1000
    bound = (
        np.abs(want["lse"]).max() * 2**-22
    )  # a score of that size is known to that much in float32, and p to that much relative
    assert error(got["out"], want["out"]) < bound and error(got["lse"], want["lse"]) < 2e-6


@needs("triton", "torch")
def test_finite_garbage_at_masked_keys_changes_no_bit(rng, launches):
    k_start, k_end = documents(1, 256, window=100, padding=60)
    results = []
    for filler in (0.0, 1e30):
        given = inputs(np.random.default_rng(1), k_start, k_end, 256, 1, 1, 64)
        for x in given[:3]:
            x[:, -60:] = filler  # padding places, as queries and as keys
        results.append(at_once(*given))
    assert all(np.array_equal(results[0][name], results[1][name]) for name in results[0])


@needs("triton", "torch")
@pytest.mark.parametrize("window", [None, 70])
def test_only_tiles_that_someone_sees_are_computed_and_only_borders_are_masked(rng, launches, window):
    k_start, k_end = documents(1, 512, window=window, padding=140)
    if not window:
        k_start = np.zeros_like(k_start)  # one document: tiles that every query sees in full
        k_end = np.where(k_end > 372, 0, k_end).astype(np.int32)
    at_once(*inputs(rng, k_start, k_end, 512, 2, 1, 64))
    index = np.arange(512)
    seen = (index >= k_start[0, :, None]) & (index < k_end[0, :, None])
    for (program, dots, masks), products in zip(launches, (2, 4, 3), strict=True):
        plan = backend._PLANS[program][64]
        tiles = seen.reshape(512 // plan.block_q, plan.block_q, 512 // plan.block_k, plan.block_k)
        some, every = tiles.any((1, 3)), tiles.all((1, 3))
        assert 0 < some.sum() < some.size and (every.any() or window)
        assert dots == 2 * products * some.sum(), program  # 2 heads
        assert masks == 2 * (some & ~every).sum(), program
    assert [program for program, *_ in launches] == ["forward", "dkv", "dq"]


def test_bounds_of_the_key_side_hold_for_any_intervals(rng):
    plan, T, S = backend._Plan(32, 32, 4, 2), 256, 192
    bounds = jax.jit(lambda lo, hi: backend._query_bounds(lo, hi, S, plan))
    for trial in range(200):
        low = rng.integers(-50, S + 50, (2, T)).astype(np.int32)
        high = low + rng.integers(-20, 250, (2, T)).astype(np.int32)
        run = (1, 16, 64)[trial % 3]  # equal rows: tiles of many intervals, of two, and of one, which see whole tiles
        low, high = (np.repeat(x[:, ::run], run, axis=1) for x in (low, high))
        index = np.arange(S)
        seen = (index >= low[..., None]) & (index < high[..., None])
        every = seen.reshape(2, T // 32, 32, S // 32, 32).all((2, 4))
        union = seen.reshape(2, T // 32, 32, S).any(2)
        hull = (np.cumsum(union, -1) > 0) & (np.cumsum(union[..., ::-1], -1)[..., ::-1] > 0)  # with what lies between
        some = hull.reshape(2, T // 32, S // 32, 32).any(3)
        got = np.asarray(bounds(low, high)) // 32
        for b, j in itertools.product(range(2), range(S // 32)):
            begin, plain_begin, plain_end, end = got[b, j]
            tiles = np.flatnonzero(some[b, :, j])
            assert begin >= end if not len(tiles) else (begin, end) == (tiles[0], tiles[-1] + 1)
            assert begin >= end or begin <= plain_begin <= plain_end <= end
            assert every[b, plain_begin:plain_end, j].all() and (plain_end > plain_begin) == every[b, :, j].any()


def trace(function, *args):
    """Traces anew: jax remembers a function's last trace, whatever was put in its place since."""
    return jax.eval_shape(lambda *a: function(*a), *args)


def abstract(D, dtype=jnp.bfloat16, T=512, S=512, H=4, K=2):
    """Shapes of (q, k, v), of (do, lse, delta) and of the intervals."""
    shape = jax.ShapeDtypeStruct
    q, kv, rows = shape((1, T, H, D), dtype), shape((1, S, K, D), dtype), shape((1, H, T), jnp.float32)
    return (q, kv, kv), (q, rows, rows), (shape((1, T), jnp.int32),) * 2


@needs("triton")
@pytest.mark.parametrize("head_dim, capability", [(64, 89), (128, 80), (256, 80), (128, 90)])
def test_every_plan_compiles_without_spills_and_fetches_ahead(compiler, monkeypatch, head_dim, capability):
    calls = []

    def launch(program, inputs, outputs, grid, num_warps, num_stages, aliases, constants):
        specs = lambda arrays: [(x.shape, x.dtype.name) for x in jax.tree.leaves(arrays)]
        calls.append((program, specs(inputs), specs(outputs), num_warps, num_stages, constants))
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), outputs)

    monkeypatch.setattr(backend, "_launch", launch)
    arrays, of_out, intervals = abstract(head_dim, T=8192, S=8192, H=32, K=8)
    trace(backend.forward, *arrays, *intervals)
    trace(lambda q, *a: backend.fold(backend.empty(q), q, *a), *arrays, *intervals)
    trace(backend.dq, *arrays, *of_out, *intervals)
    trace(backend.dkv, *arrays, *of_out, *intervals)
    assert {call[0] for call in calls} == backend._PLANS.keys()
    for call in calls:
        facts = compiler(*call, capability)
        print(json.dumps(dict(program=call[0], head_dim=head_dim, capability=capability, **facts)))
        assert facts["stack"] == facts["local"] == 0, (call[0], facts)
        assert facts["shared"] <= SHARED_MEMORY[capability], (call[0], facts)
        assert facts["cp_async"] > 0 and facts["mma"] + facts["wgmma"] > 0, (call[0], facts)
        assert facts["atom"] == facts["red"] == 0, (call[0], facts)
        assert facts["scratch"] == 0, (call[0], facts)  # jaxlib launches with a null pointer for it


def three_folds(q, k, v, k_start, k_end):
    carry = backend.empty(q)
    for n in range(3):
        carry = backend.fold(carry, q, k, v, k_start - n, k_end - n)
    return backend.finish(carry, q.dtype)


def three_gradients(q, k, v, do, lse, delta, k_start, k_end):
    dq = dkv = None
    for n in range(3):
        rest = (q, k, v, do, lse, delta, k_start - n, k_end - n)
        dq, dkv = backend.dq(*rest, into=dq), backend.dkv(*rest, into=dkv)
    return dq, dkv


@needs("triton", "jax_triton", "jax_cuda13_plugin")
@pytest.mark.version
def test_sums_stay_in_their_memory_when_compiled_into_one_program():
    from jaxllm import plan

    arrays, of_out, intervals = abstract(64, T=256, S=256, H=2, K=1)
    mesh = jax.sharding.Mesh(plan.devices("h100:1"), ("data",))
    for function, args, launches in (
        (three_folds, arrays + intervals, 3),
        (three_gradients, arrays + of_out + intervals, 6),
    ):
        with jax.set_mesh(mesh), plan.uncached(), backend.compile_for(90):
            text = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).compile().as_text()
        entry = text[text.index("ENTRY") :].splitlines()
        calls = [line for line in entry if 'custom_call_target="triton_kernel_call"' in line]
        copies = [
            line for line in entry if re.search(r" = \S+ copy\(", line) and "broadcast" not in line
        ]  # of a sum, not of the zeros it starts from
        assert len(calls) == launches and not copies, copies
        assert text.count("output_to_operand_aliasing") >= launches


@needs("triton", "jax_triton", "jax_cuda13_plugin")
@pytest.mark.version
def test_each_target_gets_its_own_program():
    arrays, _, intervals = abstract(64, T=128, S=128, H=1, K=1)
    step = jax.jit(backend.forward)
    texts = []
    for capability in (80, 90):
        with backend.compile_for(capability):
            texts.append(step.trace(*arrays, *intervals).lower(lowering_platforms=("cuda",)).as_text())
    assert all("triton_kernel_call" in text for text in texts) and texts[0] != texts[1]


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(D=96), "head_dim in (64, 128, 256), got 96; fill it up with zeros"),
        (dict(dtype=jnp.float32), "got float32, float32 and float32; set precision.compute"),
        (dict(T=192), "multiples of 128, got 192 and 512"),
        (dict(S=100), "multiples of 128, got 512 and 100"),
        (dict(H=3), "multiple of the key heads, got 3 and 2"),
    ],
    ids=str,
)
def test_what_the_programs_cannot_take_is_refused_by_name(change, words):
    arrays, of_out, intervals = abstract(**{"D": 64, **change})
    for function, args in (
        (backend.forward, arrays + intervals),
        (lambda q, *a: backend.fold(backend.empty(q), q, *a), arrays + intervals),
        (backend.dq, arrays + of_out + intervals),
        (backend.dkv, arrays + of_out + intervals),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            trace(function, *args)


def test_arrays_of_the_backward_pass_are_checked():
    (q, k, v), (do, lse, delta), intervals = abstract(64)
    half = jax.ShapeDtypeStruct(lse.shape, jnp.bfloat16)
    wide, short = jax.ShapeDtypeStruct(do.shape, jnp.float32), jax.ShapeDtypeStruct(intervals[0].shape, jnp.int16)
    into = lambda q, *rest: backend.dq(q, *rest, into=q)
    for function, args, words in (
        (backend.dq, (wide, lse, delta, *intervals), "do like q, bfloat16[1, 512, 4, 64], got float32"),
        (backend.dkv, (do, half, delta, *intervals), "lse and delta of float32[1, 4, 512], got bfloat16"),
        (backend.dkv, (do, lse, delta, short, short), "intervals int32[1, 512], got int16[1, 512]"),
        (backend.dkv, (do, lse, delta, *abstract(64, T=128)[2]), "intervals int32[1, 512], got int32[1, 128]"),
        (into, (do, lse, delta, *intervals), "into of float32[1, 512, 4, 64], got bfloat16"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            trace(function, q, k, v, *args)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch):
    arrays, _, intervals = abstract(64)
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    with pytest.raises(ValueError, match=r"pip install 'jaxllm\[triton,gpu\]', or set attention.backend"):
        trace(backend.forward, *arrays, *intervals)


@pytest.mark.parametrize(
    "kind, capability, got",
    [
        ("cpu", None, "got cpu"),
        ("Tesla T4", "7.5", "got Tesla T4 of compute capability 7.5"),
        ("AMD MI250", "gfx90a", "got AMD MI250"),
    ],
)
def test_without_a_gpu_that_it_compiles_for_the_backend_refuses(monkeypatch, kind, capability, got):
    device = types.SimpleNamespace(device_kind=kind, compute_capability=capability)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    with pytest.raises(
        ValueError, match=f"NVIDIA GPU of compute capability 8.0 or more, {got}.*; set attention.backend"
    ):
        backend._capability()
    device.compute_capability = "8.9"
    assert backend._capability() == 89
    with backend.compile_for(80):
        assert backend._capability() == 80


def test_the_backend_can_be_imported_without_triton():
    code = "import sys; sys.modules.update(triton=None, jax_triton=None); import jaxllm_kernels.attention_triton"
    subprocess.run([sys.executable, "-c", code], env=dict(os.environ, PYTHONPATH=str(ROOT / "kernels")), check=True)
