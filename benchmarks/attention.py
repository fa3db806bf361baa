"""How fast is attention on this GPU: our kernels beside cuDNN, XLA and tokamax, at the same shapes in one run?

    python -m benchmarks.attention [--shapes small|all|tiny] [--backends hopper triton cudnn jax-xla tokamax] [--sweep] [--output FILE]

Contenders are warmed up, compared with each other, and only then timed, in turns: each round runs every contender for a while without waiting,
then waits once. TFLOP/s are of the median round, from 4 B H T S D FLOPs forward (half under a causal mask) and 2.5 times that backward, whatever a
kernel really executes. "backward" is forward and backward together less forward. --sweep times the other tile plans of the Hopper kernels instead.

Not here: whether the kernels are right (`benchmarks.gpu` asks against float32; here contenders must only agree coarsely), masks other than causal
and full (no other contender has intervals), and any tuning of the others: tokamax takes what its own tables say of this GPU.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import itertools
import json
import logging
import os
import pathlib
import statistics
import sys
import time

import jaxllm  # noqa: F401 - which finds jaxllm_kernels in a checkout that is not installed

OURS = ("hopper", "triton", "xla")
OTHERS = ("cudnn", "jax-xla", "tokamax")
CONTENDERS = ("hopper", "triton", *OTHERS)  # "xla", ours for CPUs, when asked for
PACKAGES = {"triton": "jax_triton", "tokamax": "tokamax"}  # what need not be installed
AGREEMENT = 2**-6  # largest difference of two contenders in bfloat16, max|a - b| / max|b|: eight roundings
LARGEST_SCORES = 16 * 2**30  # bytes of scores above which JAX's own "xla", which makes them all, is left out
PASSED, NO_TIME = "passed", "not run: budget"


@dataclasses.dataclass(frozen=True)
class Shape:
    """Self-attention of T tokens: H query heads and K key heads of D."""

    B: int
    T: int
    H: int
    K: int
    D: int
    causal: bool = True

    def __str__(self):
        return f"{self.B} x {self.T}, {self.H}/{self.K} heads of {self.D}, {'causal' if self.causal else 'full'}"

    @property
    def flops(self):
        """FLOPs of the two products forward; backward counts 2.5 times as many."""
        return forward_flops(self.B, self.H, self.T, self.T, self.D, self.causal)


def forward_flops(B, H, T, S, D, causal):
    """4 B H T S D, of which a causal mask leaves half."""
    return 4 * B * H * T * S * D / (2 if causal else 1)


# Beside each shape what is published of tokamax's Mosaic kernels on an H100 (TFLOP/s forward and backward, from the times in its repository under
# tokamax/data/autotuning/nvidia_h100_80gb_hbm3, by the same count): the numbers to reach.
SMALL = {
    Shape(1, 16384, 16, 16, 128): (637, 452),
    Shape(32, 4096, 32, 8, 128): (600, 399),  # Llama-3.1-8B's heads
    Shape(1, 16384, 32, 32, 64): (502, 334),
    Shape(1, 16384, 8, 8, 256): (650, 155),
    Shape(4, 4096, 16, 16, 128): (568, 408),
    Shape(1, 16384, 16, 16, 128, causal=False): (686, 455),
    Shape(16, 1024, 16, 16, 128): (388, 288),
}
ALL = SMALL | {
    Shape(2, 8192, 16, 16, 128): (620, 438),
    Shape(8, 2048, 16, 16, 128): (492, 361),
    Shape(8, 2048, 16, 16, 128, causal=False): (607, 454),
    Shape(16, 1024, 16, 16, 128, causal=False): (525, 403),
    Shape(1, 16384, 32, 32, 64, causal=False): (521, 361),
}
TINY = {Shape(1, 256, 4, 2, 64): None, Shape(1, 256, 2, 2, 64, causal=False): None}  # to try this script on a CPU
SHAPES = {"small": SMALL, "all": ALL, "tiny": TINY}


def inputs(B, T, H, K, D, S=None, seed=0):
    """(q, k, v, do) on the device: normal numbers in bfloat16."""
    import jax
    import jax.numpy as jnp

    shapes = ((B, T, H, D), (B, S or T, K, D), (B, S or T, K, D), (B, T, H, D))
    keys = jax.random.split(jax.random.key(seed), 4)
    return tuple(jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))


def error(a, b, dtype="float32"):
    """max|a - b| / max|b| in `dtype`; infinite where anything is not finite, for a maximum on XLA:CPU may pass over a NaN."""
    import jax.numpy as jnp

    a, b = a.astype(dtype), b.astype(dtype)
    difference, size = jnp.abs(a - b), jnp.maximum(jnp.max(jnp.abs(b)), 1e-8)
    found = jnp.where(jnp.isfinite(difference), difference, jnp.inf)
    return float(jnp.where(jnp.isfinite(size), jnp.max(found) / size, jnp.inf))


def said(failure):
    """An exception in one line."""
    lines = str(failure).strip().splitlines() or [""]
    return f"failed: {type(failure).__name__}: {lines[0][:300]}"


def missing(name):
    """Why a contender cannot take part; None where it can."""
    package = PACKAGES.get(name)
    return f"left out: {package} is not installed" if package and not importlib.util.find_spec(package) else None


def contender(name, shape):
    """f(q, k, v, k_start, k_end) -> out of this implementation."""
    import jax

    if name in OURS:
        from jaxllm_kernels import attention

        # `aligned` zeroes what stands at padding, which the model does beside its own elementwise work; only "xla" needs it to skip anything
        aligned = shape.causal and name == "xla"
        return lambda q, k, v, start, end: attention(q, k, v, start, end, backend=name, aligned=aligned)
    if name == "tokamax":
        import tokamax

        return lambda q, k, v, *_: tokamax.dot_product_attention(
            q, k, v, is_causal=shape.causal, implementation="mosaic"
        )
    implementation = {"cudnn": "cudnn", "jax-xla": "xla"}[name]
    if name == "jax-xla" and (scores := 4 * shape.B * shape.H * shape.T**2) > LARGEST_SCORES:
        raise MemoryError(f"it would make {scores / 2**30:.0f} GiB of scores")
    return lambda q, k, v, *_: jax.nn.dot_product_attention(
        q, k, v, is_causal=shape.causal, implementation=implementation
    )


def medians(calls, rounds=7, seconds=0.05):
    """{name: seconds per call}: the median over rounds in which all take turns, each for about `seconds`; all have run before."""
    import jax

    counts, samples = {}, {name: [] for name in calls}
    for name, call in calls.items():
        jax.block_until_ready(call())
        begin = time.perf_counter()
        jax.block_until_ready(call())
        counts[name] = min(max(int(seconds / (time.perf_counter() - begin)), 1), 200)
    for _ in range(rounds):
        for name, call in calls.items():
            begin = time.perf_counter()
            for _ in range(counts[name]):
                result = call()
            jax.block_until_ready(result)
            samples[name].append((time.perf_counter() - begin) / counts[name])
    return {name: statistics.median(times) for name, times in samples.items()}


def compare(shape, names, left=lambda: 1e9, rounds=7):
    """One row for each contender at this shape. left(): seconds that remain; contenders that come too late are rows that say so."""
    import jax
    import jax.numpy as jnp

    q, k, v, do = inputs(shape.B, shape.T, shape.H, shape.K, shape.D)
    index = jnp.broadcast_to(jnp.arange(shape.T, dtype=jnp.int32), (shape.B, shape.T))
    start, end = jnp.zeros_like(index), index + 1 if shape.causal else jnp.full_like(index, shape.T)
    rows, calls, results = {}, {}, {}
    for name in names:
        rows[name] = row = {"item": f"{name}: {shape}", "backend": name, "shape": dataclasses.asdict(shape)}
        if reason := missing(name):
            row["status"] = reason
        elif left() < 20:
            row["status"] = NO_TIME
        else:
            try:
                begin = time.perf_counter()
                run = contender(name, shape)

                def with_gradients(q, k, v, do, start, end, run=run):
                    out, back = jax.vjp(lambda q, k, v: run(q, k, v, start, end), q, k, v)
                    return out, *back(do)

                forward, both = jax.jit(run), jax.jit(with_gradients)
                results[name] = jax.block_until_ready(both(q, k, v, do, start, end))
                jax.block_until_ready(forward(q, k, v, start, end))
                calls[name, "forward"] = lambda forward=forward: forward(q, k, v, start, end)
                calls[name, "both"] = lambda both=both: both(q, k, v, do, start, end)
                row |= {"status": PASSED, "warm_up_s": round(time.perf_counter() - begin, 1)}
            except MemoryError as reason:
                row["status"] = f"left out: {reason}"
            except Exception as failure:
                row["status"] = said(failure)
    yardstick = next((name for name in (*OTHERS, *OURS) if name in results), None)
    for name, result in results.items():
        difference = max(error(a, b) for a, b in zip(result, results[yardstick], strict=True))
        if name != yardstick:
            rows[name] |= {"difference": difference, "compared_with": yardstick}
        if difference > AGREEMENT:
            rows[name]["status"] = f"failed: differs by {difference:.1e} from {yardstick}"
            del calls[name, "forward"], calls[name, "both"]
    results.clear()
    times = medians(calls, rounds)
    for name in names:
        if (name, "forward") in times:
            one, all_of_it = times[name, "forward"], times[name, "both"]
            rate = lambda flops, seconds: round(flops / seconds / 1e12, 2) if seconds > 0 else None
            rows[name] |= {
                "forward_ms": round(1e3 * one, 4),
                "both_ms": round(1e3 * all_of_it, 4),
                "forward_tflops": rate(shape.flops, one),
                "both_tflops": rate(3.5 * shape.flops, all_of_it),
                "backward_tflops": rate(2.5 * shape.flops, all_of_it - one),
            }
    for name, row in rows.items():  # beside those that could be trusted
        others = [other for other in rows if other != name and rows[other]["status"] == PASSED]
        for part in ("forward", "both"):
            if (name, part) in times and others:
                best = min(others, key=lambda other: times[other, part])
                row |= {
                    f"{part}_best_other": best,
                    f"{part}_ratio": round(times[best, part] / times[name, part], 3),
                }
    return list(rows.values())


@contextlib.contextmanager
def _planned(table, head_dim, plan):
    """Inside, kernels are traced with this plan."""
    usual = table[head_dim]
    table[head_dim] = plan
    try:
        yield
    finally:
        table[head_dim] = usual


def sweep(head_dims=(128, 64, 256), tokens=8192, left=lambda: 1e9):
    """Rows for every tile plan of the Hopper kernels that could fit, the one in use first: seconds, and the ratio to that one. Causal, one row
    of `tokens`, 2,048 components of queries and a quarter of keys. A plan whose result differs is a failure and not timed."""
    import jax
    import jax.numpy as jnp

    from jaxllm_kernels import attention_hopper as hopper

    for D in head_dims:
        heads = 2048 // D
        q, k, v, do = inputs(1, tokens, heads, max(heads // 4, 1), D)
        end = jnp.arange(1, tokens + 1, dtype=jnp.int32)[None]
        start = jnp.zeros_like(end)
        out, lse = hopper.forward(q, k, v, start, end)
        delta = jnp.swapaxes(jnp.sum(do.astype(jnp.float32) * out.astype(jnp.float32), axis=-1), 1, 2)
        arrays = (q, k, v, do, lse, delta, start, end)
        kernels = {
            "dq": (hopper.DQ, lambda *arrays: hopper.dq(*arrays)),
            "dkv": (hopper.DKV, lambda *arrays: hopper.dkv(*arrays)),
            "forward": (hopper.FORWARD, lambda q, k, v, do, lse, delta, *ends: hopper.forward(q, k, v, *ends)),
        }
        for kernel, (table, call) in kernels.items():
            usual, want, usual_ms = table[D], None, None
            for plan in _alternatives(usual, forward=kernel == "forward"):
                row = {"item": f"{kernel} of {D}: {plan}", "kernel": kernel, "head_dim": D, "tokens": tokens}
                row |= {"plan": dataclasses.asdict(plan), "in_use": plan == usual}
                if left() < 20:
                    yield row | {"status": NO_TIME}
                    continue
                try:
                    with _planned(table, D, plan):
                        run = jax.jit(lambda *arrays, call=call: call(*arrays)).lower(*arrays).compile()
                    got = [jnp.where(jnp.isfinite(x), x, 0) for x in jax.tree.leaves(run(*arrays))]
                    if plan == usual:
                        want = got
                    elif want is None:
                        yield row | {"status": "left out: the plan in use failed, so there is nothing to compare with"}
                        continue
                    row["difference"] = max(error(a, b) for a, b in zip(got, want, strict=True))
                    if row["difference"] > AGREEMENT:
                        yield row | {"status": f"failed: differs by {row['difference']:.1e} from the plan in use"}
                        continue
                    row["ms"] = 1e3 * medians({"it": lambda run=run, arrays=arrays: run(*arrays)}, rounds=5)["it"]
                    usual_ms = row["ms"] if plan == usual else usual_ms
                    yield row | {"status": PASSED, "times_as_fast_as_the_one_in_use": round(usual_ms / row["ms"], 3)}
                except Exception as failure:  # one that does not fit is an answer too
                    yield row | {"status": said(failure)}


def _alternatives(usual, forward):
    """The plan in use and its variations, those first that change least. `overlap` means nothing to forward, `split` is no choice."""
    plans = [
        dataclasses.replace(usual, streamed=streamed, stages=stages, overlap=overlap)
        for streamed, stages, overlap in itertools.product(
            (64, 128), (2, 3), (usual.overlap,) if forward else (False, True)
        )
    ]
    changes = lambda plan: sum(getattr(plan, f.name) != getattr(usual, f.name) for f in dataclasses.fields(plan))
    return [usual, *sorted((plan for plan in plans if plan != usual), key=changes)]


def first_device():
    """(JAX's first device, None), or where that is no GPU (device, why in one line), with what JAX itself would have printed about it."""
    warnings, handler, logger = [], logging.Handler(), logging.getLogger("jax")
    handler.emit = lambda record: warnings.append(record.getMessage())
    logger.addHandler(handler)
    logger.propagate, before = False, logger.propagate
    try:
        import jax

        device = jax.devices()[0]
    finally:
        logger.removeHandler(handler)
        logger.propagate = before
    because = f" ({warnings[-1].splitlines()[0]})" if warnings else ""
    return device, None if device.platform == "gpu" else f"no GPU here, JAX sees {device.device_kind!r}{because}"


def shown(row):
    """A row in one line for people."""
    hidden = ("item", "status", "backend", "kernel", "head_dim", "tokens", "in_use")
    facts = [
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in row.items()
        if key not in hidden and not isinstance(value, dict) and value is not None
    ]
    return f"  {row['item']}: {row['status']}" + (f" ({', '.join(facts)})" if facts else "")


def append(path, lines):
    """Adds JSON lines to a file, written beside and renamed: a reader sees all of them or none."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_text(before + "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    os.replace(beside, path)


def publish(file, common, rows) -> int:
    """Appends rows to `file` and prints them, each when it comes; 1 if one has not passed, else 0: an exit code."""
    failed = False
    for row in rows:
        failed |= row["status"] != PASSED
        append(file, [common | row])
        print(shown(row), flush=True)
    return int(failed)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--shapes", choices=SHAPES, default="small")
    parser.add_argument("--backends", nargs="+", choices=(*OURS, *OTHERS), default=CONTENDERS)
    parser.add_argument("--sweep", action="store_true", help="the tile plans of the Hopper kernels instead")
    parser.add_argument("--output", default="benchmarks/results/attention.jsonl")
    options = parser.parse_args(arguments)
    device, reason = first_device()
    if reason and (options.sweep or options.shapes != "tiny"):
        print(f"benchmarks.attention: {reason}; --shapes tiny tries the script on a CPU", file=sys.stderr)
        return 2
    import jax

    evidence = "rehearsed" if reason else "measured"
    common = {"benchmark": "attention", "device": device.device_kind, "jax": jax.__version__, "evidence": evidence}
    failed = False
    groups = (
        ([row] for row in sweep())
        if options.sweep
        else (compare(shape, options.backends) for shape in SHAPES[options.shapes])
    )
    for rows in groups:
        append(options.output, [common | row for row in rows])
        for row in rows:
            failed |= row["status"].startswith("failed")
            print(shown(row), flush=True)
    return 1 if failed and not options.sweep else 0


if __name__ == "__main__":
    sys.exit(main())
