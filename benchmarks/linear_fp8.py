"""How much faster are FP8 products than bfloat16 ones on this GPU, with all that FP8 costs: casts, magnitudes, transposes?

    python -m benchmarks.linear_fp8 [--tokens 16384] [--output FILE]; --tiny tries the script anywhere

Two kinds of contest, each between the project's own two ways, forward and backward, in turns in one run: one weight of Llama-3.1-8B (`linear.Linear`, its
gradients and those of its input and scales), and two of its layers with attention (`step.gradients`, remat "none", a vocabulary of 512). Goals on H100 and
H200: 1.69 for a weight, 1.5 for layers. FP8 must also agree with bfloat16 as far as its rounding allows.

Both are compiled with the options that FP8 needs, so bfloat16 has no Triton products either, which a tuned run might choose.

Not here: the whole step on several GPUs (its compiled bound is in the plan), and FP8 of other libraries.
"""

import argparse
import sys

from benchmarks.attention import NO_TIME, PASSED, first_device, medians, publish, said

WEIGHTS = {"q_proj, o_proj": (4096, 4096), "gate_proj, up_proj": (4096, 14336), "down_proj": (14336, 4096)}
LAYERS = (
    "model.hidden_size=4096", "model.intermediate_size=14336", "model.num_attention_heads=32", "model.num_key_value_heads=8",
    "model.num_hidden_layers=2",
)  # fmt: skip
TINY_LAYERS = (
    "model.hidden_size=64",
    "model.intermediate_size=96",
    "model.num_attention_heads=4",
    "model.num_hidden_layers=2",
)
# Root mean square of the difference over that of the bfloat16 result. Rounding to e4m3 alone is 2.6 %, to e5m2 5 % of each operand.
AGREEMENT = 0.15
GOALS = {"weight": 1.69, "layers": 1.5}


def distance(a, b):
    """Root mean square of a - b over that of b."""
    import jax.numpy as jnp

    size = lambda x: jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))
    return float(size(a.astype(jnp.float32) - b.astype(jnp.float32)) / size(b))


def options():
    import jax

    from jaxllm.step import FP8_OPTIONS

    return FP8_OPTIONS if jax.default_backend() == "gpu" else None


def weight(tokens, K, N):
    """{way: call() -> (y, dx, dkernel)} of one product, and what it counts, FLOPs."""
    import jax
    import jax.numpy as jnp

    from jaxllm import fp8, linear

    x, dy, kernel = (
        jax.random.normal(key, shape, dtype)
        for key, shape, dtype in zip(
            jax.random.split(jax.random.key(0), 3),
            ((1, tokens, K), (1, tokens, N), (K, N)),
            (jnp.bfloat16, jnp.bfloat16, jnp.float32),
            strict=True,
        )
    )
    static = ("embed", "mlp"), 1, "bfloat16", "float32"
    scales = {
        operand: fp8.largest(fp8.FORMATS[operand]) / jnp.max(jnp.abs(array)).astype(jnp.float32)
        for operand, array in (("input", x), ("kernel", kernel), ("output_grad", dy))
    }
    seen = {operand: jnp.zeros(2) for operand in scales}

    def plain(x, kernel, dy):
        y, back = jax.vjp(lambda x, kernel: linear.matmul(x, kernel, *static), x, kernel)
        return y, *back(dy)

    def float8(x, kernel, dy, scales, seen):
        y, back = jax.vjp(lambda *a: linear.float8_matmul(*a, *static), x, kernel, scales, seen)
        return y, *back(dy)

    plain, float8 = (jax.jit(f, compiler_options=options()) for f in (plain, float8))
    calls = {"bfloat16": lambda: plain(x, kernel, dy), "float8": lambda: float8(x, kernel, dy, scales, seen)}
    return calls, 6 * tokens * K * N


def layers(tokens, overrides):
    """{way: call() -> (loss, gradients, FP8's magnitudes)} of two layers, from the same weights and rows, and FLOPs of a whole pass."""
    import jax

    from benchmarks import parity
    from jaxllm import config, fp8, sharding, step
    from jaxllm.data.batch import to_device

    calls, params = {}, None
    for way, matmul in {"bfloat16": "compute", "float8": "float8"}.items():
        cfg = config.load_config(
            None, *overrides, f"precision.matmul={matmul}", f"model.max_position_embeddings={tokens}", f"data.seq_len={tokens}",
            "data.global_batch_size=1", "model.vocab_size=512", "model.remat=none", "loss.chunk_size=4096",
        )  # fmt: skip
        mesh = sharding.make_mesh(cfg.mesh, jax.devices()[:1])
        with jax.set_mesh(mesh):
            graphdef, state = step.init_state(cfg)
            params = params or state.params
            rows = to_device(parity.rows(tokens, False, 1), 1, mesh)

            def gradients(params, scales, rows, graphdef=graphdef, cfg=cfg):
                grads, parts = step.gradients(graphdef, params, rows, cfg, 0, scales)
                return parts["loss_sum"], grads, parts["fp8"]

            scales = fp8.observed(state.fp8)
            run = jax.jit(gradients, compiler_options=options()).lower(params, scales, rows).compile()
            if (
                scales
            ):  # those of a second step; with scales of 1 the products cost as much, but small gradients are lost
                seen = run(params, scales, rows)[2]
                scales = fp8.observed(fp8.advance(state.fp8, seen, cfg.precision.fp8))
            calls[way] = lambda run=run, params=params, scales=scales, rows=rows: run(params, scales, rows)[:2]
    return calls, cfg.model.flops_per_token(tokens) * tokens


def measured(item, kind, calls, flops, rounds):
    """One row: TFLOP/s of both ways, their ratio beside its goal, and how far their results, gradients among them, are apart at most."""
    import jax

    results = {way: jax.tree.leaves(call())[:3] if kind == "weight" else call() for way, call in calls.items()}
    apart = max(map(distance, *(jax.tree.leaves(results[way]) for way in ("float8", "bfloat16"))))
    results.clear()
    seconds = medians(calls, rounds)
    return {
        "item": item,
        "status": PASSED if apart <= AGREEMENT else f"failed: {apart:.1%} apart",
        **{f"{way}_tflops": round(flops / s / 1e12, 2) for way, s in seconds.items()},
        "ratio": round(seconds["bfloat16"] / seconds["float8"], 3),
        "goal": GOALS[kind],
        "difference": round(apart, 4),
    }


def contests(tokens, tiny):
    """(item, kind, function that makes the calls) of all."""
    for name, (K, N) in {"tiny": (64, 96)}.items() if tiny else WEIGHTS.items():
        yield f"{name}: {tokens} x {K} x {N}", "weight", lambda K=K, N=N: weight(tokens, K, N)
    yield f"two layers, {tokens} tokens", "layers", lambda: layers(tokens, TINY_LAYERS if tiny else LAYERS)


def rows(tokens, tiny=False, left=lambda: 1e9, rounds=7):
    """Rows of all contests; one that fails or finds no time says so."""
    for item, kind, make in contests(tokens, tiny):
        if left() < 15:
            yield {"item": item, "status": NO_TIME}
            continue
        try:
            yield measured(item, kind, *make(), rounds)
        except Exception as failure:
            yield {"item": item, "status": said(failure)}


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linear_fp8", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--tiny", action="store_true", help="tries the script with tiny sizes, on any device")
    parser.add_argument("--output", help="by default benchmarks/results/linear_fp8.jsonl")
    options = parser.parse_args(arguments)
    if options.tiny and not options.output:
        parser.error("--tiny: a rehearsal's rows do not belong among the results; give --output FILE")
    device, reason = first_device()
    if reason and not options.tiny:
        print(f"benchmarks.linear_fp8: {reason}; --tiny --output FILE tries the script on a CPU", file=sys.stderr)
        return 2
    import jax

    evidence = "rehearsed" if options.tiny else "measured"
    common = {"benchmark": "linear_fp8", "device": device.device_kind, "jax": jax.__version__, "evidence": evidence}
    return publish(
        options.output or "benchmarks/results/linear_fp8.jsonl",
        common,
        rows(128 if options.tiny else options.tokens, options.tiny),
    )


if __name__ == "__main__":
    sys.exit(main())
