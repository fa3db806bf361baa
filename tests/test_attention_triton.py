"""The `triton` backend's own promises, without a GPU: which tiles it computes, what the compiler makes of every plan, and what is refused.

Its numbers are held to float64 with those of the other backends, in test_attention_contract.py.
"""

import importlib.util
import itertools
import os
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import triton_children
from attention_contract import Case, blocks, causal
from jaxllm_kernels import attention_triton as backend
from support import ROOT

SHARED_MEMORY = {
    80: 99 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
}  # bytes a block may have; sm_80 has 163 KiB, but takes the plans of sm_89

needs = lambda *names: pytest.mark.skipif(
    any(not importlib.util.find_spec(name) for name in names),
    reason=f"needs {', '.join(names)}: pip install 'jaxllm[triton,test]'",
)


@needs("triton", "torch")
@pytest.mark.parametrize("window", [None, 70])
def test_only_tiles_that_someone_sees_are_computed_and_only_borders_are_masked(monkeypatch, window):
    launches = triton_children.interpreted(monkeypatch)
    intervals = causal(
        512, (100, 172, 100) if window else (372,), window=window
    )  # one document: tiles that every query sees in full
    case = Case(intervals, H=2)
    blocks(backend, case.inputs(np.float32), case, case.inputs(np.float32))
    index = np.arange(512)
    seen = (index >= intervals[0][0, :, None]) & (index < intervals[1][0, :, None])
    assert [program for program, *_ in launches] == ["forward", "dq", "dkv"]
    for (program, dots, masks), products in zip(launches, (2, 3, 4), strict=True):
        plan = backend._PLANS[program][64]
        tiles = seen.reshape(512 // plan.block_q, plan.block_q, 512 // plan.block_k, plan.block_k)
        some, every = tiles.any((1, 3)), tiles.all((1, 3))
        assert 0 < some.sum() < some.size and (every.any() or window)
        assert dots == 2 * products * some.sum(), program  # 2 heads
        assert masks == 2 * (some & ~every).sum(), program


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
@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize("head_dim", backend.HEAD_DIMS)
def test_every_plan_compiles_without_spills_and_fetches_ahead(monkeypatch, head_dim, capability):
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
        facts = triton_children.ask("compile", *call, capability)
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
    from h100.compiled import compiled_on, h100s

    arrays, of_out, intervals = abstract(64, T=256, S=256, H=2, K=1)
    for function, args, launches in (
        (three_folds, arrays + intervals, 3),
        (three_gradients, arrays + of_out + intervals, 6),
    ):
        with backend.compile_for(90):
            text = compiled_on(h100s(), function, *args).as_text()
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
