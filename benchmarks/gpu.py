"""Everything that only a GPU can say about this project, in one call of at most nine minutes.

    python -m benchmarks.gpu [--out DIR] [--minutes 8.5] [--parts NAME ...] [--backends hopper triton] [--shapes small|all]
    python -m benchmarks.gpu --rehearse --out DIR       # the same with tiny shapes and the backend "xla", on any device: tries the script

In this order: what the device is; whether the kernels are right (against the xla backend in float32, itself checked against float64); whether their
ORDER holds, which no interpreter can see (each kernel again and again on the same inputs, with other work in between, compared to the bit);
whether a model trains the same with them; and only then speed: attention beside others, grouped products beside others, the ring's hops, a training
step, other tile plans.

Parts run in a process of their own, so that a kernel that never ends or takes the CUDA context down costs its part and nothing else; a part that
fails gets its successor a new process. Every row is written when it is made. Rows are JSON lines in DIR/gpu.jsonl (a rehearsal's in
gpu_rehearsal.jsonl), with part, item, status ("passed", "failed: ...", "not run: budget", "left out: ...") and evidence ("measured" on a GPU).
Exit code: 0 when every check of correctness ran and passed, 1 when not, 2 without a GPU.

Not here: several GPUs (transfers, overlap), and profiles.
"""

import argparse
import contextlib
import dataclasses
import datetime
import functools
import hashlib
import importlib.metadata
import importlib.util
import multiprocessing
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable

from benchmarks import attention, linear_fp8, moe, ring
from benchmarks.attention import NO_TIME, PASSED, append, error, first_device, said, shown

ROUNDING = 2**-9  # one rounding to bfloat16, relative
LSE = 1e-5  # relative error of lse, which no rounding to bfloat16 touches: float32 sums and approximate exponentials
YARDSTICK = 1e-5  # of the xla backend in float32 against float64
UNTUNED = {
    "xla_gpu_autotune_level": 0
}  # for what is only compared: tuning dozens of products takes longer than running them
GRACE = 30.0  # seconds that a part may go on past its time, to end what it has begun


# --- running parts ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Part:
    """function(options, emit, left): calls emit(row) with rows that have a status; left() says how many seconds remain. A module's own function,
    or a functools.partial of one: it travels to another process. needs, most, quiet: seconds without which it is not begun, that it may take, and
    that may pass without a row before it counts as stuck."""

    name: str
    function: Callable
    required: bool = False  # exit code 0 takes it to pass
    needs: float = 15
    most: float = 120
    quiet: float = 60


def run_parts(parts, options, seconds, record):
    """{name: status} of parts run one after the other within `seconds`; record(part name, row) is called with every row as it comes."""
    end, process, connection, statuses = time.time() + seconds, None, None, {}
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    for part in parts:
        begin = time.time()
        if end - begin < part.needs:
            statuses[part.name] = NO_TIME
            record(part.name, {"status": NO_TIME})
            continue
        if process is None:
            connection, other = context.Pipe()
            process = context.Process(target=_work, args=(other,), daemon=True)
            process.start()
            other.close()
        stop = min(end, begin + part.most)
        connection.send((part.function, options, stop))
        rows, ended, last = [], None, time.time()
        while ended is None:
            limit = min(stop + GRACE, end + GRACE / 2, last + part.quiet)
            try:
                if not connection.poll(max(limit - time.time(), 0)):
                    took = f"stopped after {time.time() - begin:.0f} s"
                    ended = (
                        f"{NO_TIME} ({took})" if limit > end else f"failed: {took}, perhaps a kernel that never ends"
                    )
                    continue
                kind, value = connection.recv()
            except (EOFError, OSError):
                process.join(10)
                ended = f"failed: its process died (exit code {process.exitcode})"
                continue
            last = time.time()
            if kind == "row":
                rows.append(value["status"])
                record(part.name, value)
            else:
                ended = value
        statuses[part.name] = status = _worst(rows, ended)
        record(part.name, {"status": status, "seconds": round(time.time() - begin, 1)})
        if status != PASSED:  # what a failed kernel left behind, a dead context for one, is not for the next part
            process = _ended(process)
    _ended(process)
    return statuses


def _ended(process):
    """None, after the end of the process if there is one."""
    if process is not None:
        process.kill()
        process.join()


def _worst(rows, ended):
    """The status of a part, from those of its rows and how it ended: what failed, else what found no time, else passed. Rows that were left out
    count neither way, unless there are no others: nothing that was checked is no pass."""
    for start in ("failed", "not run"):
        if found := [status for status in (*rows, ended) if status.startswith(start)]:
            return found[-1]
    return rows[-1] if rows and all(status.startswith("left out") for status in rows) else PASSED


def _work(connection):
    """The other process: runs one function after the other until the pipe is closed."""
    while True:
        try:
            function, options, stop = connection.recv()
        except EOFError:
            return
        try:
            function(options, lambda row: connection.send(("row", row)), lambda stop=stop: stop - time.time())
            ended = PASSED
        except Exception as failure:
            ended = said(failure)
        connection.send(("end", ended))


# --- what the device is ----------------------------------------------------------------------------------------------


def device(options, emit, left):
    """Facts about the device and the software. Raises without a GPU, except in a rehearsal."""
    found, reason = first_device()
    if reason and not options.rehearse:
        raise RuntimeError(reason)
    import jax

    row = {
        "item": "facts",
        "status": PASSED,
        "device": found.device_kind,
        "platform": found.platform,
        "compute_capability": getattr(found, "compute_capability", None),
        "bytes_for_jax": (found.memory_stats() or {}).get("bytes_limit"),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "kernels": _fingerprint(),
    }
    for package in ("jaxlib", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "jax-triton", "triton", "tokamax"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            row[package] = importlib.metadata.version(package)
    if shutil.which("nvidia-smi"):
        fields = ("driver_version", "memory.total", "clocks.max.sm", "power.limit")
        command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30)
        if answer.returncode == 0:
            row |= dict(zip(fields, answer.stdout.splitlines()[0].split(", "), strict=False))
    emit(row)


def _fingerprint():
    """Of the kernels' sources, to tell runs of different ones apart."""
    import jaxllm_kernels

    digest = hashlib.blake2b(digest_size=6)
    for file in sorted(pathlib.Path(jaxllm_kernels.__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


# --- correctness -----------------------------------------------------------------------------------------------------

SMALL, LONG = dict(B=2, T=512, H=4, K=2), dict(B=1, T=8192, H=8, K=2)


def intervals(B, T, documents=1, padding=0, window=None, seed=0):
    """(k_start, k_end), i32[B, T] in numpy: rows of causal documents of random lengths, the last `padding` places and their like empty."""
    import numpy as np

    rng = np.random.default_rng(seed)
    start, index = np.zeros((B, T), np.int32), np.arange(T, dtype=np.int32)
    for row in start:
        for cut in sorted(rng.choice(np.arange(1, T), documents - 1, replace=False)):
            row[cut:] = cut
    end = np.broadcast_to(index + 1, (B, T))
    if window is not None:
        start = np.maximum(start, end - window)
    real = index < T - padding
    return np.where(real, start, 0).astype(np.int32), np.where(real, end, 0).astype(np.int32)


def masks(T):
    """{name: options of `intervals`} for rows of T tokens; documents and padding end inside tiles."""
    documents, padding = max(T // 100, 2), T // 7
    return {
        "causal": {},
        "packed, padded": dict(documents=documents, padding=padding),
        "packed, windowed, padded": dict(documents=max(documents // 8, 2), padding=padding, window=max(T // 10, 3)),
    }


@functools.cache
def kernels(backend, scale):
    """{name: compiled function} of a backend module, each kernel on its own."""
    import jax

    put = functools.partial
    return {
        "forward": jax.jit(put(backend.forward, aligned=False, scale=scale)),
        "empty": jax.jit(backend.empty),
        "fold": jax.jit(put(backend.fold, scale=scale)),
        "finish": jax.jit(lambda carry, like: backend.finish(carry, like.dtype)),
        "dq": jax.jit(put(backend.dq, into=None, scale=scale)),
        "dkv": jax.jit(put(backend.dkv, into=None, scale=scale)),
        "dq into": jax.jit(lambda into, *arrays: backend.dq(*arrays, into=into, scale=scale)),
        "dkv into": jax.jit(lambda into, *arrays: backend.dkv(*arrays, into=into, scale=scale)),
    }


@functools.cache
def _yardstick(scale):
    """f(q, k, v, do, k_start, k_end) -> {out, lse, delta, dq, dk, dv} by the xla backend, in the dtype of q."""
    import jax
    import jax.numpy as jnp

    from jaxllm_kernels import attention_xla

    def run(q, k, v, do, start, end):
        out, lse = attention_xla.forward(q, k, v, start, end, aligned=False, scale=scale)
        delta = jnp.swapaxes(jnp.sum(do.astype(jnp.float32) * out.astype(jnp.float32), axis=-1), 1, 2)
        grads = attention_xla.backward(q, k, v, do, lse, delta, start, end, aligned=False, scale=scale)
        return dict(zip(("out", "lse", "delta", "dq", "dk", "dv"), (out, lse, delta, *grads), strict=True))

    return jax.jit(run, compiler_options=UNTUNED)


def exact(q, k, v, do, start, end):
    """`_yardstick` in float32 without TF32."""
    import jax
    import jax.numpy as jnp

    with jax.default_matmul_precision("highest"):
        return _yardstick(q.shape[3] ** -0.5)(*(x.astype(jnp.float32) for x in (q, k, v, do)), start, end)


def computed(backend, q, k, v, do, start, end, lse, delta):
    """{name: array} of everything that a backend computes: in one call, and with its keys in two pieces as a ring brings them, the later one first."""
    import jax.numpy as jnp

    from jaxllm_kernels.ring import halves

    run, rows = kernels(backend, q.shape[3] ** -0.5), (do, lse, delta)
    got = {}
    got["out"], got["lse"] = run["forward"](q, k, v, start, end)
    got["dq"] = run["dq"](q, k, v, *rows, start, end)
    got["dk"], got["dv"] = run["dkv"](q, k, v, *rows, start, end)
    half = k.shape[1] // 2
    carry, dq, dkv = run["empty"](q), jnp.zeros(q.shape, jnp.float32), []
    for first in (half, 0):
        pair, ends = jnp.stack([x[:, first : first + half] for x in (k, v)]), (start - first, end - first)
        keys = halves(backend, pair)
        carry = run["fold"](carry, q, *keys, *ends)
        dq = run["dq into"](dq, q, *keys, *rows, *ends)
        # onto ones: a kernel that forgets to add, or adds twice, shows
        ones = tuple(jnp.ones(pair.shape[1:], jnp.float32) for _ in range(2))
        dkv.insert(0, [x - 1 for x in run["dkv into"](ones, q, *keys, *rows, *ends)])
    got["out, in pieces"], got["lse, in pieces"] = run["finish"](carry, q)
    got["dq, in pieces"] = dq
    got["dk, in pieces"], got["dv, in pieces"] = (jnp.concatenate(parts, axis=1) for parts in zip(*dkv, strict=True))
    return got


def judge(compute, arrays, start, end, lse=LSE):
    """({name: error}, {name: largest allowed}, [what is not exactly as it must be]) of what `compute` makes of the arguments that `computed` takes behind
    the backend, against `exact`.

    arrays: q, k, v, do in bfloat16; lse: the error allowed of it. Allowed of others is twice the error that the xla backend makes in bfloat16, and always
    two roundings, as in the tests of this project. Exact: out, dq 0 and lse -inf where a query sees nothing, dk and dv 0 where nobody sees a key
    (in pieces they were added to 1, which leaves float32's rounding of that)."""
    import jax.numpy as jnp
    import numpy as np

    want = exact(*arrays, start, end)
    rounded = _yardstick(arrays[0].shape[3] ** -0.5)(*arrays, start, end)
    got = compute(*arrays, start, end, want["lse"], want["delta"])
    blind = end <= start
    index = np.arange(arrays[1].shape[1] + 1)
    counts = np.zeros((start.shape[0], len(index)), np.int64)
    for row, low, high in zip(counts, np.asarray(start), np.asarray(end), strict=True):
        some = high > low
        np.add.at(row, np.clip(low[some], 0, index[-1]), 1)
        np.add.at(row, np.clip(high[some], 0, index[-1]), -1)
    unseen = jnp.asarray(np.cumsum(counts, axis=1)[:, :-1] == 0)
    errors, bounds, wrong = {}, {}, []
    for name, x in got.items():
        base = name.partition(",")[0]
        if base == "lse":
            nothing = jnp.broadcast_to(blind[:, None, :], x.shape)
            if not bool(jnp.all((x == -jnp.inf) == nothing)):
                wrong.append(f"{name} is not -inf exactly where nothing is seen")
            errors[name] = error(jnp.where(nothing, 0, x), jnp.where(nothing, 0, want["lse"]))
            bounds[name] = lse
            continue
        errors[name] = error(x, want[base])
        bounds[name] = 2 * max(error(rounded[base], want[base]), ROUNDING)
        zero = blind if base in ("out", "dq") else unseen
        if bool(jnp.any(jnp.where(zero[..., None, None], x, 0) != 0)):
            wrong.append(f"{name} is not 0 where nothing is seen")
    return errors, bounds, wrong


def check(backend, item, arrays, start, end):
    """`judge` of a backend's kernels, as a row."""
    return _verdict(item, functools.partial(computed, backend), arrays, start, end)


def _verdict(item, compute, arrays, start, end, **options):
    import jax.numpy as jnp

    errors, bounds, wrong = judge(compute, arrays, jnp.asarray(start), jnp.asarray(end), **options)
    wrong = [
        f"{name} is {errors[name]:.1e} off, allowed {bounds[name]:.1e}"
        for name in errors
        if errors[name] > bounds[name]
    ] + wrong
    worst = max(errors, key=lambda name: errors[name] / bounds[name])
    return {
        "item": item, "status": f"failed: {'; '.join(wrong)}" if wrong else PASSED, "worst": worst, "worst_error": errors[worst],
        "worst_allowed": bounds[worst], "errors": errors, "bounds": bounds,
    }  # fmt: skip


def yardstick(options, emit, left):
    """The xla backend in float32 on this device against the reference in float64: what everything else here rests on."""
    import jax
    import jax.numpy as jnp

    from jaxllm_kernels import reference

    sizes = _sizes(options)["small"]
    for name, mask in masks(sizes["T"]).items():
        arrays = attention.inputs(D=64, **sizes)
        start, end = map(jnp.asarray, intervals(sizes["B"], sizes["T"], **mask))
        got = exact(*arrays, start, end)
        with jax.enable_x64(True):
            q, k, v, do = (x.astype(jnp.float64) for x in arrays)
            run = jax.jit(lambda q, k, v, s=start, e=end: reference.attention(q, k, v, s, e)[0])
            out, back = jax.vjp(run, q, k, v)
            want = dict(zip(("out", "dq", "dk", "dv"), (out, *back(do)), strict=True))
            errors = {key: error(got[key], x, jnp.float64) for key, x in want.items()}
        bad = [key for key, value in errors.items() if value > YARDSTICK]
        status = f"failed: {', '.join(bad)} beyond {YARDSTICK}" if bad else PASSED
        emit({"item": f"xla in float32, {name}", "status": status, "errors": errors})


def correctness(head_dim, options, emit, left):
    """Every backend at this head dim: short rows, long ones, and (once) queries that all see all of more keys than there are queries."""
    import numpy as np

    from jaxllm_kernels.attention import load_backend

    sizes = _sizes(options)
    for name in options.backends:
        if reason := attention.missing(name):
            emit({"item": f"{name}, heads of {head_dim}", "status": reason})
            continue
        backend = load_backend(name)
        cases = [
            (size, mask, key) for size in (sizes["small"], sizes["long"]) for key, mask in masks(size["T"]).items()
        ]
        for size, mask, key in cases:
            item = f"{name}, heads of {head_dim}, {size['B']} x {size['T']}, {key}"
            if left() < 5:
                emit({"item": item, "status": NO_TIME})
                continue
            arrays = attention.inputs(D=head_dim, **size)
            emit(check(backend, item, arrays, *intervals(size["B"], size["T"], **mask)))
        if head_dim != 128:
            continue
        item = f"{name}, heads of {head_dim}, 128 queries of 8 heads see 512 keys of one"
        if left() < 5:
            emit({"item": item, "status": NO_TIME})
        else:
            arrays = attention.inputs(1, 128, 8, 1, head_dim, S=512)
            emit(check(backend, item, arrays, np.zeros((1, 128), np.int32), np.full((1, 128), 512, np.int32)))


def cudnn(options, emit, left):
    """The backend "cudnn" of jaxllm on rows of one document, all that it takes: out, lse, which JAX rounds to bfloat16, and gradients."""
    import jax

    from jaxllm.attention import one_document

    @functools.partial(jax.jit, static_argnames="window")
    def run(q, k, v, do, start, end, window):
        library = "xla" if options.rehearse else "cudnn"
        attend = functools.partial(one_document, window=window, implementation=library, with_lse=True)
        out, pull, lse = jax.vjp(lambda *arrays: attend(*arrays, start, end), q, k, v, has_aux=True)
        return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *pull(do)), strict=True))

    size = _sizes(options)["small"]
    padding, window = size["T"] // 7, max(size["T"] // 10, 3)
    masks_and_windows = (({}, None), (dict(padding=padding), None), (dict(padding=padding, window=window), window))
    for head_dim in (64, 128):
        for mask, window in masks_and_windows:
            item = f"heads of {head_dim}, {size['B']} x {size['T']}, {', '.join(('causal', *mask))}"
            if left() < 5:
                emit({"item": item, "status": NO_TIME})
                continue
            compute = lambda *given, window=window: run(*given[:6], window=window)
            arrays = attention.inputs(D=head_dim, **size)
            emit(_verdict(item, compute, arrays, *intervals(size["B"], size["T"], **mask), lse=2 * ROUNDING))


def order(head_dim, options, emit, left):
    """Each kernel on the same inputs many times, other work in between, compared bit by bit with the first time.

    What can differ is what timing decides: a slot refilled while a product still reads it, a result read before its product has ended, a copy
    that starts before registers have arrived in shared memory."""
    import jax.numpy as jnp

    from jaxllm_kernels.attention import load_backend

    sizes = _sizes(options)
    size, repeats = sizes["long"], sizes["repeats"]
    other_work = _other_work(sizes["other"])
    for name in options.backends:
        if reason := attention.missing(name):
            emit({"item": f"{name}, heads of {head_dim}", "status": reason})
            continue
        arrays = attention.inputs(D=head_dim, **size)
        for key, mask in list(masks(size["T"]).items())[::2]:  # the longest rows, and the most ragged ones
            ends = map(jnp.asarray, intervals(size["B"], size["T"], **mask))
            for kernel, call in _calls(load_backend(name), *arrays, *ends).items():
                row = {"item": f"{name}: {kernel}, heads of {head_dim}, {size['T']} tokens, {key}", "repeats": repeats}
                emit(row | {"status": NO_TIME if left() < 3 else _repeated(call, repeats, other_work)})


def _other_work(rows):
    """Calls: nothing; tensor cores at full load; a pass over memory that empties the cache; something very short."""
    import jax
    import jax.numpy as jnp

    words = jax.random.normal(jax.random.key(1), (rows, 1024), jnp.bfloat16)
    parts = (lambda x: x[:8192] @ x[:1024], lambda x: x + 1, lambda x: x[0] * 2)
    return [lambda: None, *(functools.partial(jax.jit(part), words) for part in parts)]


def _calls(backend, q, k, v, do, start, end):
    """{kernel: a call of it without arguments}; those that fold or add have the later half of the keys behind them, and take keys and values as
    a ring brings them."""
    import jax.numpy as jnp

    from jaxllm_kernels.ring import halves

    run = kernels(backend, q.shape[3] ** -0.5)
    out, lse = run["forward"](q, k, v, start, end)
    delta = jnp.swapaxes(jnp.sum(do.astype(jnp.float32) * out.astype(jnp.float32), axis=-1), 1, 2)
    rows, half = (do, lse, delta, start, end), k.shape[1] // 2
    pair = jnp.stack([k[:, :half], v[:, :half]])
    keys = halves(backend, pair)
    carry = run["fold"](run["empty"](q), q, k[:, half:], v[:, half:], start - half, end - half)
    sums = tuple(jnp.ones(pair.shape[1:], jnp.float32) for _ in range(2))
    return {
        "forward": lambda: run["forward"](q, k, v, start, end),
        "fold": lambda: run["fold"](carry, q, *keys, start, end),
        "dq": lambda: run["dq"](q, k, v, *rows),
        "dkv": lambda: run["dkv"](q, k, v, *rows),
        "dq into": lambda: run["dq into"](carry[0], q, *keys, *rows),
        "dkv into": lambda: run["dkv into"](sums, q, *keys, *rows),
    }


@functools.cache
def _differing():
    """f(a, b) -> the number of elements whose bits differ, NaNs too."""
    import jax
    import jax.numpy as jnp

    def bits(x):
        return jax.lax.bitcast_convert_type(x, jnp.uint16 if x.dtype == jnp.bfloat16 else jnp.uint32)

    def count(a, b):
        pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        return sum(jnp.sum(bits(x) != bits(y), dtype=jnp.int32) for x, y in pairs)

    return jax.jit(count)


def _repeated(call, repeats, other_work):
    """The status of `repeats` calls, other work in between, beside the first one."""
    first, counts = call(), []
    for n in range(repeats):
        other_work[n % len(other_work)]()
        counts.append(_differing()(call(), first))  # fetched after all have been asked for: nothing here waits
    counts = [int(count) for count in counts]
    bad = sum(count > 0 for count in counts)
    return f"failed: {bad} of {repeats} repetitions differ, by up to {max(counts)} elements" if bad else PASSED


# --- grouped products ------------------------------------------------------------------------------------------------

FP8_ROWS = 128  # what groups in fp8 are multiples of


def filled(R, E):
    """{name: group sizes} of R rows for E groups: ends anywhere, groups without rows, one with everything, none at all, most of R behind the groups."""
    import numpy as np

    rng = np.random.default_rng(0)
    cuts = sorted(rng.choice(np.arange(1, R - R // 9), E, replace=False))
    skewed = np.diff([0, *cuts])
    empty = [0 if e % 3 == 0 else size for e, size in enumerate(skewed)]
    one = [R if e == 1 else 0 for e in range(E)]
    few = [1, *(0 for _ in range(E - 3)), R // 8 + 3, 1]
    return {"skewed": skewed, "some empty": empty, "all in one": one, "all empty": [0] * E, "few rows": few}


@functools.cache
def grouped_kernels(name, transposed=False):
    """{product: compiled f(a, b, group_sizes)} of a backend's module. transposed: operands in fp8, the contraction last; the products of their values."""
    import jax
    import jax.numpy as jnp

    from jaxllm_kernels import grouped

    module, one = grouped.load_backend(name), jnp.float32(1)
    with_scale = lambda *names: dict.fromkeys(names, one) | {"transposed": True} if transposed else {}

    def product(x, w, n, **options):
        return module.forward(x, w, n, dtype=jnp.bfloat16 if x.dtype.itemsize == 1 else x.dtype, **options)

    def forward(x, w, n):
        options = with_scale("x_scale")
        return product(x, w, n, **options, **({"w_scale": jnp.ones(n.shape)} if transposed else {}))

    def dgrad(dy, w, n):
        return forward(dy, w, n) if transposed else product(dy, w, n, transposed=True)

    def wgrad(x, dy, n):
        return module.wgrad(x, dy, n, n.shape[0], **with_scale("x_scale", "dy_scale"))

    compiled = functools.partial(jax.jit, compiler_options=UNTUNED)
    return {"forward": compiled(forward), "dgrad": compiled(dgrad), "wgrad": compiled(wgrad)}


def grouped_inputs(R, K, N, E, fp8=False):
    """(x, w, dy): normal numbers in bfloat16, or what fp8 holds of them (e4m3, gradients e5m2 where this JAX multiplies both)."""
    import jax
    import jax.numpy as jnp

    gradient = jnp.float8_e5m2 if jax.version.__version_info__ >= (0, 11) else jnp.float8_e4m3fn
    kinds = (jnp.float8_e4m3fn, jnp.float8_e4m3fn, gradient) if fp8 else (jnp.bfloat16,) * 3
    shapes = ((R, K), (E, K, N), (R, N))
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(jax.random.normal(k, shape, jnp.bfloat16).astype(kind) for k, shape, kind in zip(keys, shapes, kinds))


def grouped_results(run, x, w, dy, group_sizes, transposed=False):
    """{product: array} by `run`, one of `grouped_kernels`."""
    last = (lambda a: a.swapaxes(-1, -2)) if transposed else (lambda a: a)
    return {
        "forward": run["forward"](x, last(w), group_sizes),
        "dgrad": run["dgrad"](dy, w, group_sizes),
        "wgrad": run["wgrad"](last(x), last(dy), group_sizes),
    }


def check_grouped(run, item, arrays, sizes, fp8=False):
    """A row: the three products of `run` against xla in float32, with NaN behind the groups.

    Allowed is twice the error that xla makes in bfloat16, and always two roundings; the gradient of w is float32 and may be YARDSTICK off. Exact: 0 behind
    the groups, and 0 for a group without rows."""
    import jax.numpy as jnp
    import numpy as np

    group_sizes, live = jnp.asarray(sizes, jnp.int32), int(sum(sizes))
    wide, narrow = ([a.astype(kind) for a in arrays] for kind in (jnp.float32, jnp.bfloat16))
    want = grouped_results(grouped_kernels("xla"), *wide, group_sizes)
    rounded = grouped_results(grouped_kernels("xla"), *narrow, group_sizes)
    garbage = [a.at[live:].set(jnp.nan) if n != 1 else a for n, a in enumerate(arrays)]
    got = grouped_results(run, *garbage, group_sizes, fp8)
    errors, bounds, wrong = {}, {}, []
    for name, x in got.items():
        exact_zero = x[np.asarray(sizes) == 0] if name == "wgrad" else x[live:]
        if bool(jnp.any(exact_zero != 0)):
            wrong.append(f"{name} is not 0 {'without rows' if name == 'wgrad' else 'behind the groups'}")
        errors[name] = error(x, want[name])
        least = YARDSTICK if name == "wgrad" else ROUNDING
        bounds[name] = 2 * max(error(rounded[name], want[name]), least)
        if errors[name] > bounds[name]:
            wrong.insert(0, f"{name} is {errors[name]:.1e} off, allowed {bounds[name]:.1e}")
    status = f"failed: {'; '.join(wrong)}" if wrong else PASSED
    return {"item": item, "status": status, "errors": errors, "bounds": bounds}


def grouped_correctness(options, emit, left):
    """Grouped products of every backend that has them: each tile plan, groups of all kinds, and fp8. First xla in float32 against float64 on the host."""
    import jax.numpy as jnp
    import numpy as np

    sizes = _sizes(options)["grouped"]
    R, E = sizes["R"], 8
    yard = (R // 8, 256, 128, E)
    arrays, groups = grouped_inputs(*yard), filled(yard[0], E)["skewed"]
    wide = [a.astype(jnp.float32) for a in arrays]
    got = grouped_results(grouped_kernels("xla"), *wide, jnp.asarray(groups, jnp.int32))
    x, w, dy = (np.asarray(a, np.float64) for a in wide)
    want = {"forward": np.zeros(dy.shape), "dgrad": np.zeros(x.shape), "wgrad": np.zeros(w.shape)}
    for e, end in enumerate(np.cumsum(groups)):
        rows = slice(end - groups[e], end)
        want["forward"][rows], want["dgrad"][rows], want["wgrad"][e] = (
            x[rows] @ w[e],
            dy[rows] @ w[e].T,
            x[rows].T @ dy[rows],
        )
    errors = {name: float(np.abs(np.asarray(got[name]) - a).max() / np.abs(a).max()) for name, a in want.items()}
    bad = [name for name, value in errors.items() if not value <= YARDSTICK]
    status = f"failed: {', '.join(bad)} beyond {YARDSTICK}" if bad else PASSED
    emit({"item": "xla in float32", "status": status, "errors": errors})

    for name in options.backends:
        if reason := _no_grouped(name):
            emit({"item": name, "status": reason})
            continue
        for width in sizes["widths"]:
            arrays = grouped_inputs(R, width, width, E)
            for kind, groups in filled(R, E).items():
                item = f"{name}, {R} rows, {width} wide, {kind}"
                late = left() < 5
                emit(
                    {"item": item, "status": NO_TIME}
                    if late
                    else check_grouped(grouped_kernels(name), item, arrays, groups)
                )
        for width in sizes["fp8_widths"]:
            item = f"{name} in fp8, {R} rows, {width} wide"
            groups = [int(n) // FP8_ROWS * FP8_ROWS for n in filled(R, E)["some empty"]]
            late = left() < 5
            arrays = grouped_inputs(R, width, width, E, fp8=True)
            emit(
                {"item": item, "status": NO_TIME}
                if late
                else check_grouped(grouped_kernels(name, True), item, arrays, groups, fp8=True)
            )


def _no_grouped(name):
    """Why a backend of attention is left out where grouped products are asked for; None where it has them."""
    from jaxllm_kernels import grouped

    return None if name in grouped.BACKENDS else "left out: it has no grouped products"


def grouped_order(options, emit, left):
    """`order`, of grouped products: groups that end inside tiles, every tile plan."""
    import jax.numpy as jnp

    sizes, repeats = _sizes(options)["grouped"], _sizes(options)["repeats"]
    R, E = sizes["R"], 8
    other_work = _other_work(_sizes(options)["other"])
    # Where no kernel of ours has them, as on GPUs that are not Hopper, models multiply by "xla".
    for name in [name for name in options.backends if _no_grouped(name) is None] or ["xla"]:
        for width in sizes["widths"]:
            x, w, dy = grouped_inputs(R, width, width, E)
            group_sizes, run = jnp.asarray(filled(R, E)["skewed"], jnp.int32), grouped_kernels(name)
            calls = {"forward": (x, w), "dgrad": (dy, w), "wgrad": (x, dy)}
            for product, operands in calls.items():
                row = {"item": f"{name}: {product}, {R} rows, {width} wide", "repeats": repeats}
                call = functools.partial(run[product], *operands, group_sizes)
                emit(row | {"status": NO_TIME if left() < 3 else _repeated(call, repeats, other_work)})


# --- a model ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _model(model, backend, tokens, rows, *more):
    """(config, graphdef, state, batch) of a model on one device, in its mesh."""
    import jax

    from benchmarks import parity
    from jaxllm import config, sharding, step
    from jaxllm.data.batch import to_device

    cfg = config.load_config(
        None, *model, f"model.max_position_embeddings={tokens}", f"data.seq_len={tokens}", f"data.global_batch_size={rows}",
        f"attention.backend={backend}", *more,
    )  # fmt: skip
    mesh = sharding.make_mesh(cfg.mesh, jax.devices()[:1])
    with jax.set_mesh(mesh):
        graphdef, state = step.init_state(cfg)
        yield cfg, graphdef, state, lambda packing: to_device(parity.rows(tokens, packing, rows), 1, mesh)


def training(options, emit, left):
    """One step's loss and gradients of a model in bfloat16, each backend beside xla: both against xla in float32.

    Gradients by the root mean square of each tensor's error over that of the tensor (the largest of millions of errors is a lottery): at most 1.5
    times what xla in bfloat16 makes. The loss: at most twice what xla makes, and always 1e-4 of it."""
    import jax
    import jax.numpy as jnp

    from jaxllm import step

    sizes = _sizes(options)

    @jax.jit
    def distances(got, want):
        size = lambda x: jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32))))
        return {path: size(got[path] - want[path]) / jnp.maximum(size(want[path]), 1e-30) for path in want}

    def gradients(backend, compute):
        more = (f"precision.compute={compute}", f"loss.chunk_size={sizes['chunk']}")
        with _model(sizes["model"], backend, sizes["tokens"], 1, *more) as (cfg, graphdef, state, batch):
            run = jax.jit(lambda params, rows: step.gradients(graphdef, params, rows, cfg), compiler_options=UNTUNED)
            rows = batch(packing=True)
            grads, parts = run(state.params, rows)
            return grads, float(parts["loss_sum"] / jnp.sum(rows.loss_weights))

    with jax.default_matmul_precision("highest"):
        want, loss = gradients("xla", "float32")
    rounded, rounded_loss = gradients("xla", "bfloat16")
    allowed = {path: 1.5 * max(float(value), ROUNDING) for path, value in distances(rounded, want).items()}
    allowed_loss = max(2 * abs(rounded_loss - loss), 1e-4 * abs(loss))
    for name in options.backends:
        if reason := attention.missing(name):
            emit({"item": name, "status": reason})
            continue
        try:
            got, got_loss = gradients(name, "bfloat16")
        except Exception as failure:
            emit({"item": name, "status": said(failure)})
            continue
        found = {path: float(value) for path, value in distances(got, want).items()}
        wrong = [
            f"{path} is {found[path]:.1e} off, allowed {allowed[path]:.1e}"
            for path in found
            if not found[path] <= allowed[path]
        ]
        if not abs(got_loss - loss) <= allowed_loss:
            wrong.append(f"the loss is {got_loss}, in float32 {loss}")
        worst = max(found, key=lambda path: found[path] / allowed[path])
        emit({
            "item": f"{name}: gradients of {sizes['tokens']} packed tokens in bfloat16",
            "status": f"failed: {'; '.join(wrong[:5])}" if wrong else PASSED,
            "loss_float32": loss, "loss_xla": rounded_loss, "loss": got_loss, "loss_xla_minus_this": rounded_loss - got_loss,
            "worst": worst, "worst_error": found[worst], "worst_allowed": allowed[worst],
        })  # fmt: skip


def training_speed(options, emit, left):
    """Tokens per second and MFU of the whole training step: forward, backward, clipping, AdamW."""
    import jax

    from jaxllm import hardware, step

    sizes = _sizes(options)
    tokens, rows = sizes["tokens"], sizes["rows"]
    for name in options.backends:
        item = f"{name}: {sizes['big_name']}, {rows} x {tokens} tokens, remat attention"
        if reason := attention.missing(name):
            emit({"item": item, "status": reason})
            continue
        if left() < 20:
            emit({"item": item, "status": NO_TIME})
            continue
        more = ("model.remat=attention", "precision.compute=bfloat16", f"loss.chunk_size={sizes['chunk']}")
        with _model(sizes["big"], name, tokens, rows, *more) as (cfg, graphdef, state, batch):
            given = batch(packing=False)
            begin = time.perf_counter()
            run = step.make_train_step(graphdef, cfg).lower(state, given).compile()
            compile_s = time.perf_counter() - begin
            losses, times = [], []
            for _ in range(sizes["rounds"]):  # the first warms up
                begin, metrics = time.perf_counter(), []
                for _ in range(sizes["steps"]):
                    state, report = run(state, given)
                    metrics.append(report)
                jax.block_until_ready(metrics)
                times.append((time.perf_counter() - begin) / sizes["steps"])
                losses += [float(report["loss"]) for report in metrics]
                if left() < 5 and len(times) > 1:
                    break
            bad = any(bool(report["bad"]) for report in metrics) or not losses[-1] < losses[0]
            seconds = sorted(times[1:])[len(times[1:]) // 2]
            flops = cfg.model.flops_per_token(tokens) * rows * tokens
            card = hardware.of(jax.devices()[0].device_kind)
            emit({
                "item": item, "status": f"failed: the loss went from {losses[0]} to {losses[-1]}" if bad else PASSED,
                "tokens_per_second": round(rows * tokens / seconds), "step_ms": round(1e3 * seconds, 2),
                "model_tflops": round(flops / seconds / 1e12, 2), "mfu": card and round(flops / seconds / card.bf16_flops, 4),
                "compile_s": round(compile_s, 1), "loss_first": losses[0], "loss_last": losses[-1],
                "peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
            })  # fmt: skip


# --- speed of the kernels --------------------------------------------------------------------------------------------


def attention_speed(options, emit, left):
    """Our kernels beside the others; see benchmarks.attention."""
    names = ("xla", "jax-xla") if options.rehearse else (*options.backends, *attention.OTHERS)
    for shape, published in attention.SHAPES["tiny" if options.rehearse else options.shapes].items():
        for row in attention.compare(shape, names, left, rounds=2 if options.rehearse else 5):
            emit(row | ({"tokamax_on_h100_published": published} if published else {}))


def grouped_speed(options, emit, left):
    """Grouped products beside those of others; see benchmarks.moe."""
    names = ("xla", "loop") if options.rehearse else (*(set(options.backends) & {"hopper"}), *moe.OTHERS)
    for groups in moe.cases(moe.TINY if options.rehearse else moe.WHOLE):
        for row in moe.compare(groups, names, left, rounds=2 if options.rehearse else 5):
            emit(row)


def fp8_speed(options, emit, left):
    """Products in FP8 beside those in bfloat16; see benchmarks.linear_fp8."""
    for row in linear_fp8.rows(_sizes(options)["fp8_tokens"], options.rehearse, left, 2 if options.rehearse else 5):
        emit(row)


def ring_speed(options, emit, left):
    """The ring's hops on one device; see benchmarks.ring. First small, all ranks: also dk and dv."""
    from jaxllm_kernels.attention import load_backend

    sizes = _sizes(options)["ring"]
    for name in options.backends:
        for tokens, more in sizes.items():
            item = f"{name}: 8 x {tokens} tokens"
            if reason := attention.missing(name):
                emit({"item": item, "status": reason})
            elif left() < 10:
                emit({"item": item, "status": NO_TIME})
            else:
                emit(ring.measure(load_backend(name), 8, tokens, **more))


def plans(options, emit, left):
    """Other tile plans of the Hopper kernels; see benchmarks.attention. A plan that does not fit is an answer and no failure."""
    if "hopper" not in options.backends:
        return emit({"item": "hopper", "status": "left out: not among --backends"})
    for row in attention.sweep(left=left):
        if row["status"].startswith("failed") and not row["in_use"]:
            row["status"] = "left out: " + row["status"]
        emit(row)


SIZES = dict(
    grouped=dict(R=4096, widths=(1024, 768, 640), fp8_widths=(512, 640)),  # one for each tile plan
    fp8_tokens=16384, small=SMALL, long=LONG, repeats=60, other=2**17, tokens=8192, chunk=2048, rows=4, steps=4, rounds=5,
    ring={512: dict(timed_ranks=range(8), rounds=3), 8192: {}, 4096: {}, 2048: {}},
    model=(
        "model.vocab_size=32000", "model.hidden_size=1024", "model.intermediate_size=2816", "model.num_hidden_layers=8",
        "model.num_attention_heads=8", "model.num_key_value_heads=2",
    ),
    big_name="Llama-3.2-1B's shape",
    big=(
        "model.vocab_size=128256", "model.hidden_size=2048", "model.intermediate_size=8192", "model.num_hidden_layers=16",
        "model.num_attention_heads=32", "model.num_key_value_heads=8", "model.tie_word_embeddings=true", "optimizer.schedule=constant",
    ),
)  # fmt: skip
_TINY_MODEL = (
    "model.vocab_size=256", "model.hidden_size=64", "model.intermediate_size=96", "model.num_hidden_layers=2", "model.num_attention_heads=4",
    "model.num_key_value_heads=2", "optimizer.schedule=constant",
)  # fmt: skip
REHEARSAL = dict(
    grouped=dict(R=512, widths=(128,), fp8_widths=(128,)),
    fp8_tokens=128, small=dict(B=2, T=128, H=4, K=2), long=dict(B=1, T=256, H=4, K=2), repeats=3, other=2**10, tokens=128, chunk=64, rows=2, steps=2,
    rounds=2, model=_TINY_MODEL, big_name="tiny", big=_TINY_MODEL,
    ring={16: dict(timed_ranks=range(8), rounds=1, heads=4, kv_heads=2, head_dim=64)},
)  # fmt: skip

PARTS = (
    Part("yardstick", yardstick, True, most=60),
    *(Part(f"correctness of {d}", functools.partial(correctness, d), True, most=90) for d in (128, 64, 256)),
    *(Part(f"order of {d}", functools.partial(order, d), True, most=60) for d in (128, 64, 256)),
    Part("cudnn", cudnn, True, most=60),
    Part("grouped correctness", grouped_correctness, True, most=150),
    Part("grouped order", grouped_order, True, most=40),
    Part("training", training, True, needs=30, most=120, quiet=120),
    Part("attention", attention_speed, most=150, quiet=90),
    Part("grouped", grouped_speed, most=120, quiet=90),
    Part("linear fp8", fp8_speed, most=90, quiet=90),
    Part("ring", ring_speed, most=90),
    Part("training speed", training_speed, needs=40, most=120, quiet=120),
    Part("tile plans", plans, most=240),
)


def _sizes(options):
    return REHEARSAL if options.rehearse else SIZES


def main(arguments=None, parts=PARTS):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--out", help="folder of gpu.jsonl; by default benchmarks/results")
    parser.add_argument(
        "--minutes", type=float, default=8.5, help="when to stop; what has begun may take 15 seconds more"
    )
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in parts], help="only these")
    parser.add_argument("--backends", nargs="+", choices=attention.OURS, help="by default hopper and triton")
    parser.add_argument("--shapes", choices=("small", "all"), default="small", help="of the attention part")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes, backend xla, any device; needs --out")
    options = parser.parse_args(arguments)
    if options.rehearse and not options.out:
        parser.error(
            "--rehearse: a rehearsal measures nothing, so its rows do not belong among the results; give --out DIR"
        )
    if options.minutes < 1:
        parser.error(f"--minutes: {options.minutes} is too short to begin anything; give 1 or more")
    options.backends = options.backends or (["xla"] if options.rehearse else ["hopper", "triton"])
    file = pathlib.Path(options.out or "benchmarks/results") / (
        "gpu_rehearsal.jsonl" if options.rehearse else "gpu.jsonl"
    )
    begin = time.time()
    common = {"benchmark": "gpu", "run": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    evidence = {"measured": "rehearsed" if options.rehearse else "measured"}

    def record(name, row):
        ran = not row["status"].startswith(("not run", "left out"))
        append(file, [common | {"part": name} | row | {"evidence": evidence["measured"] if ran else "unmeasured"}])
        print(shown(row) if "item" in row else f"{name}: {row['status']}", flush=True)

    facts = []
    found = run_parts([Part("device", device)], options, 60 * options.minutes, lambda _, row: facts.append(row))
    if found["device"] != PASSED:
        print(f"benchmarks.gpu: {found['device'].removeprefix('failed: RuntimeError: ')}; --rehearse --out DIR tries the script on any device",
              file=sys.stderr)  # fmt: skip
        return 2
    common |= {key: facts[0][key] for key in ("device", "jax", "kernels")}
    for row in facts:
        record("device", row)
    chosen = [part for part in parts if not options.parts or part.name in options.parts]
    statuses = run_parts(chosen, options, 60 * options.minutes - (time.time() - begin), record)
    print(f"\n{'part':<20} {'checks':<8} status        ({time.time() - begin:.0f} s, {file})")
    for part in chosen:
        print(f"{part.name:<20} {'required' if part.required else '':<8} {statuses[part.name]}")
    return 0 if all(statuses[part.name] == PASSED for part in chosen if part.required) else 1


if __name__ == "__main__":
    sys.exit(main())
