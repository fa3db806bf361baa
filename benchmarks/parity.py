"""Does a feature change the maths? Loss and gradients of a tiny model for the product of everything that must not change them.

    python -m benchmarks.parity                   # the full product, on 8 emulated CPU devices; appends to results/parity.jsonl
    python -m benchmarks.parity --pairs           # a set of cases in which every pair of values occurs: what CI runs
    python -m benchmarks.parity --only experts=8 remat=attention --sample 500    # a part of the product: with these values, drawn at random

    python -m benchmarks.parity --pairs --matmul float8      # any part of it in FP8

A case is compared with the same rows on one device, in one piece, with nothing recomputed: float32, largest error of the loss (relative) and of
any gradient tensor (max|a - b| / max|b|; in FP8 by root mean square). "record" is float32 too, with the magnitudes that FP8 would scale by. The one device
always records, so a case in plain float32 also shows that recording changes nothing.

Not here: whether that one device is right; the tests against transformers say so.
"""

import argparse
import datetime
import functools
import itertools
import json
import math
import os
import pathlib
import random
import sys
import time

FACTORS = {
    "sequence": (1, 2, 4, 8),
    "data": (1, 2),
    "expert": (1, 2, 4, 8),
    "experts": (None, 8),
    "exchange": ("none", "allgather", "alltoall"),
    "communication": ("ring", "allgather"),
    "window": (None, 9),
    "microbatches": (1, 2),
    "remat": ("none", "dots", "attention", "full", "offload"),
    "base": (None, "nf4", "float8"),  # None: all weights are trained; else adapters beside frozen weights
    "matmul": ("compute", "record"),
    "length": (64, 57),  # 57 is completed by padding on every mesh with a sequence axis
    "packing": (True, False),  # last: neighbours share a program
}
LONG = [  # lengths that fit nothing, and many more tiles than devices
    dict(sequence=n, data=1, expert=1, experts=None, exchange="none", communication="ring", packing=True, window=None, microbatches=1,
         remat="attention", base=None, matmul="compute", length=length)
    for length in (7, 4095, 4097)
    for n in (1, 2, 4, 8)
]  # fmt: skip
# The largest errors allowed: of the loss, of a gradient, of a recorded amax. Rounding to FP8 is no continuous function: numbers that differ in their last
# bit may fall to both sides of a border, a quarter apart in a gradient, and one such number was seen to move a tensor's largest element by 6 %. So in FP8
# errors of gradients are root mean squares, which few of them do not move and anything that is missing or scaled does.
ALLOWED = {"compute": (1e-5, 1e-4, 0.0), "record": (1e-5, 1e-4, 1e-5), "float8": (1e-3, 0.02, 0.02)}
MODEL = (
    "model.vocab_size=256", "model.hidden_size=64", "model.intermediate_size=128", "model.num_hidden_layers=2",
    "model.num_attention_heads=4", "model.num_key_value_heads=2", "model.max_position_embeddings=8192", "precision.compute=float32",
    "data.global_batch_size=16", "loss.chunk_size=128",
    "model.initializer_range=0.2",  # at 0.02 attention is nearly uniform, and a loss with wrong positions within 1e-5 of the right one
)  # fmt: skip
ROUTER = (
    "model.num_experts_per_tok=2", "model.router_aux_loss_coef=0.05", "model.router_jitter_noise=0", "moe.z_loss=0.01",
)  # fmt: skip
ADAPTERS = ("lora.rank=4", "lora.dropout=0.1")
ROUTED = ("lora.target_modules=['q_proj','k_proj','v_proj','o_proj','gate_proj','up_proj','down_proj','router']",)


def possible(case):
    """Eight devices are there, dense models have no expert axis, and where an axis is not split there is nothing to communicate."""
    fits = case["sequence"] * case["data"] * case["expert"] <= 8 and (case["experts"] or case["expert"] == 1)
    one_way = case["communication"] == "ring", case["exchange"] == "none"
    return fits and (case["sequence"] > 1 or one_way[0]) and (case["expert"] > 1 or one_way[1])


def product():
    cases = [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())]
    return [case for case in cases if possible(case)]


def pairs():
    """A small part of the product in which every possible pair of values occurs, chosen greedily; always the same one."""
    cases = product()
    combinations = lambda case: set(itertools.combinations(case.items(), 2))
    missing, chosen = set().union(*map(combinations, cases)), []
    while missing:
        best = max(cases, key=lambda case: len(combinations(case) & missing))
        chosen.append(best)
        missing -= combinations(best)
    return chosen


def rows(length, packing, num_rows=16, seed=0):
    """Rows of random tokens in numpy, one document each or several, some padding at the end."""
    import numpy as np

    rng = np.random.default_rng(seed)
    tokens = rng.integers(3, 256, (num_rows, length)).astype(np.int32)
    starts = np.zeros((num_rows, length), np.int32)
    for row in starts:
        for cut in sorted(rng.integers(1, length, 4 + length // 500)) if packing else ():
            row[cut:] = cut
    index = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    real = index < length - rng.integers(0, min(6, length), (num_rows, 1))
    follows = np.concatenate([(starts[:, 1:] == starts[:, :-1]) & real[:, 1:], np.zeros((num_rows, 1), bool)], 1)
    return {
        "tokens": tokens * real,
        "targets": np.roll(tokens, -1, 1) * follows,
        "positions": (index - starts) * real,
        "segment_ids": (np.cumsum(np.diff(starts, axis=1, prepend=0) > 0, 1, dtype=np.int32) + 1) * real,
        "k_start": starts * real,
        "k_end": (index + 1) * real,
        "loss_weights": follows.astype(np.float32),
    }


def configured(case):
    from jaxllm import config

    family = [] if case["window"] is None else [f"model.sliding_window={case['window']}", "model.family=mistral"]
    if case["experts"]:
        family += [
            "model.family=mixtral",
            f"model.num_local_experts={case['experts']}",
            f"moe.exchange={case['exchange']}",
            *ROUTER,
        ]
    if case["base"]:
        family += [*ADAPTERS, f"lora.base={case['base']}", *(ROUTED if case["experts"] else ())]
    return config.load_config(
        None, *MODEL, *family, f"precision.matmul={case['matmul']}", f"data.seq_len={case['length']}", f"attention.communication={case['communication']}",
        f"optimizer.num_microbatches={case['microbatches']}", f"model.remat={case['remat']}",
    )  # fmt: skip


@functools.cache
def initial(experts, base):
    """(params, frozen) in numpy. Made once: that initial weights are the same on every mesh is for the tests to say."""
    import jax
    import numpy as np

    from jaxllm import sharding, step

    cfg = configured({**PLAIN, "length": 64, "window": None, "experts": experts, "base": base, "matmul": "compute"})
    with jax.set_mesh(sharding.make_mesh(sharding.MeshConfig(), jax.devices()[:1])):
        state = step.init_state(cfg)[1]
    params, frozen = jax.tree.map(np.asarray, (state.params, state.frozen))
    for path, b in params.items():
        if path.endswith("lora_b"):  # which is 0 in a new adapter, and hides A
            params[path] = np.random.default_rng(len(path)).normal(0, 0.1, b.shape).astype(b.dtype)
    return params, frozen


@functools.lru_cache(maxsize=2)
def program(**case):
    """(mesh, TrainState, compiled gradients of parameters and scales) of a case, whatever its rows hold."""
    import jax

    from jaxllm import sharding, step

    cfg, sizes = configured(case), {axis: case[axis] for axis in ("data", "sequence", "expert")}
    mesh = sharding.make_mesh(sharding.MeshConfig(**sizes), jax.devices()[: math.prod(sizes.values())])
    with jax.set_mesh(mesh):
        graphdef, abstract = step.abstract_state(cfg)
        like = abstract.params, abstract.frozen
        placed = jax.device_put(initial(case["experts"], case["base"]), jax.tree.map(lambda x: x.sharding, like))
        state = step.start(cfg, abstract, *placed)
    gradients = lambda params, frozen, batch, scales: step.gradients(graphdef, params, batch, cfg, 0, scales, frozen)
    # A program here runs once or twice; not to optimise its code halves the time to compile it.
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return mesh, state, jax.jit(gradients, compiler_options=quick)


def observers(case, initial):
    """{path: value of an `fp8.Observed`}: as the state `initial` has them, or for FP8 after one step on the same rows, recorded on one device."""
    from jaxllm import fp8

    if case["matmul"] == "float8":
        recorded = {key: case[key] for key in SAME}
        initial = fp8.advance(initial, alone(**recorded, matmul="record")[2], fp8.FP8Config())
    return fp8.observed(initial)


def run(case):
    """(loss, {path: gradient}, {path: gradient of `fp8.Observed`}) of a case in numpy."""
    import jax
    import numpy as np

    from jaxllm.data.batch import to_device

    mesh, state, gradients = program(**{key: value for key, value in case.items() if key != "packing"})
    with jax.set_mesh(mesh):
        batch = to_device(rows(case["length"], case["packing"]), case["microbatches"], mesh, window=case["window"])
        grads, parts = gradients(state.params, state.frozen, batch, observers(case, state.fp8))
    return float(parts["loss_sum"]), jax.tree.map(np.asarray, grads), jax.tree.map(np.asarray, parts["fp8"])


PLAIN = dict(sequence=1, data=1, expert=1, exchange="none", communication="ring", microbatches=1, remat="none")
SAME = ("length", "packing", "window", "experts", "base")  # what decides the answer


@functools.cache
def alone(matmul, **same):
    return run({**PLAIN, **same, "matmul": matmul})


def errors(case):
    """((error of the loss, largest error of a gradient, of an amax), path of that gradient)."""
    import numpy as np

    loss, grads, seen = run(case)
    parts = {key: case[key] for key in SAME}
    want_loss, want, want_seen = alone("float8" if case["matmul"] == "float8" else "record", **parts)
    size = (lambda x: np.sqrt(np.mean(x**2))) if case["matmul"] == "float8" else (lambda x: np.abs(x).max())
    error = lambda path: float(size(grads[path] - want[path]) / max(size(want[path]), 1e-8))
    worst = max(want, key=error)
    apart = (np.abs(seen[path][..., 0] / want_seen[path][..., 0] - 1).max() for path in seen)
    return (abs(loss - want_loss) / abs(want_loss), error(worst), max(map(float, apart), default=0.0)), worst


def fits(found, matmul):
    """Whether errors are allowed; a NaN is not."""
    return all(error <= allowed for error, allowed in zip(found, ALLOWED[matmul], strict=True))


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--pairs", action="store_true", help="only the cases that CI runs")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="FACTOR=VALUE", help="only the cases with these values"
    )
    parser.add_argument("--sample", type=int, help="only so many cases, drawn at random (always the same)")
    parser.add_argument(
        "--matmul", choices=["float8"], help="precision.matmul of all cases, on both sides, instead of their own"
    )
    options = parser.parse_args(arguments)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    import jax

    cases, failed, worst, begin = pairs() if options.pairs else product() + LONG, [], (0.0,) * 3, time.time()
    for name, _, value in (text.partition("=") for text in options.only):
        values = list(dict.fromkeys(str(case.get(name)) for case in cases))
        if name not in FACTORS or value not in values:  # no case would be no failure
            known = (
                f"of those chosen it has {', '.join(values)}"
                if name in FACTORS
                else f"factors are {', '.join(FACTORS)}"
            )
            parser.error(f"--only: no case has {name}={value}; {known}")
        cases = [case for case in cases if str(case[name]) == value]
    if options.sample:
        cases = [cases[n] for n in sorted(random.Random(0).sample(range(len(cases)), options.sample))]
    for number, case in enumerate(cases):
        case |= {"matmul": options.matmul or case["matmul"]}
        found, path = errors(case)
        worst = tuple(map(max, worst, found))
        if not fits(found, case["matmul"]):
            failed.append(case)
        loss, gradient, amax = found
        print(
            f"{number + 1}/{len(cases)} {case}: loss {loss:.1e}, gradient {gradient:.1e} ({path}), amax {amax:.1e}",
            flush=True,
        )
        if number % 50 == 49:
            jax.clear_caches()
    result = {
        "date": datetime.date.today().isoformat(), "jax": jax.__version__, "platform": "8 emulated CPU devices",
        "factors": FACTORS, "matmul": options.matmul, "pairs": options.pairs, "only": options.only, "sample": options.sample,
        "cases": len(cases), "failed": failed, "worst_loss_error": worst[0], "worst_gradient_error": worst[1], "worst_amax_error": worst[2],
        "seconds": round(time.time() - begin),
    }  # fmt: skip
    print(json.dumps(result))
    if not options.pairs or options.matmul:  # what CI runs anyway is no result
        with (pathlib.Path(__file__).parent / "results" / "parity.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
