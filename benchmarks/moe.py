"""How fast are a layer's experts: on a CPU beside transformers, on a GPU the products beside those of others?

    python -m benchmarks.moe [--rounds 9] [--steps 3] [--threads 2 1] [--output benchmarks/results/moe.jsonl]
    python -m benchmarks.moe --rehearse --output FILE    # both with tiny shapes, on any device: tries the script

On a CPU: dispatch, the three grouped products with the gated product between them, and combine, forward and backward, through jaxllm.exchange and
jaxllm.grouped_linear as the model calls them, against transformers' MixtralExperts with experts_implementation="grouped_mm". Same numbers, same routing (the
router itself is in neither), float32, a layer of Mixtral 8x7B scaled down. Two processes take turns; torch's threads wait passively, because spinning
ones would count as CPU time. Outputs and gradients are compared before anything is reported. With one thread both are bound to one and the same core.

On a GPU: forward, the gradient of x and that of w, each alone, at the width of Mixtral 8x7B; our kernels beside JAX's own ragged_dot_mgpu, tokamax and one
dense product per expert. Contenders are compared, then timed in turns (`attention.medians`). TFLOP/s are of 2 x rows x K x N.

Not here: whether the kernels are right (`benchmarks.gpu` asks against float32), exchanges between devices, and any tuning of the others beyond what
their own tables or defaults say.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time

from benchmarks.attention import AGREEMENT, NO_TIME, PASSED, append, error, first_device, medians, missing, said, shown
from benchmarks.train_step import ask, cpu_name, start


@dataclasses.dataclass(frozen=True)
class Layer:
    """`tokens` of `hidden` components, each through `per_token` of `experts` gated MLPs of width `mlp`."""

    tokens: int
    hidden: int
    mlp: int
    experts: int = 8
    per_token: int = 2

    @property
    def flops(self):
        """Of the products forward: three matrices for each assignment. Backward counts twice as many."""
        return 6 * self.tokens * self.per_token * self.hidden * self.mlp


SCALED = Layer(2048, 512, 1792)  # Mixtral 8x7B, an eighth as wide
WHOLE = Layer(16384, 4096, 14336)  # Mixtral 8x7B itself
TINY = Layer(64, 128, 256)
SAME = 1e-4  # largest difference of outputs and gradients in float32, max|a - b| / max|b|


# --- the layer, on a CPU ---------------------------------------------------------------------------------------------


def case(layer: Layer):
    """Numpy x, dy [T, D], weights f32[T, K], ids i64[T, K], and w1, w3 [E, D, F], w2 [E, F, D]: experts chosen with unequal probability."""
    import numpy as np

    rng = np.random.default_rng(0)
    T, D, F, E = layer.tokens, layer.hidden, layer.mlp, layer.experts
    scores = rng.gumbel(size=(T, E)) + np.linspace(0, 1, E)
    weights = rng.random((T, layer.per_token)).astype(np.float32)
    normal = lambda *shape: rng.standard_normal(shape, np.float32)
    return {
        "x": normal(T, D),
        "dy": normal(T, D),
        "ids": np.argsort(-scores, axis=1)[:, : layer.per_token],
        "weights": weights / weights.sum(axis=1, keepdims=True),
        "w1": normal(E, D, F) * D**-0.5,
        "w3": normal(E, D, F) * D**-0.5,
        "w2": normal(E, F, D) * F**-0.5,
    }


def jaxllm_worker(layer, threads, file):
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import numpy as np

    from jaxllm import exchange, grouped_linear, sharding
    from jaxllm.layers import swiglu

    given, how = case(layer), exchange.Exchange("none", layer.experts)
    up, down = ("experts", "embed", "mlp"), ("experts", "mlp", "embed")
    with jax.set_mesh(sharding.make_mesh(sharding.MeshConfig(data=1), jax.devices()[:1])):

        def experts(x, weights, w1, w3, w2, ids):
            rows, sizes, home, _ = exchange.dispatch(x, ids, np.ones(ids.shape[:2], bool), how)
            product = lambda rows, w, names: grouped_linear.grouped_matmul(
                rows, sizes, w, names, True, "float32", "float32", "xla"
            )
            y = product(swiglu(product(rows, w1, up), product(rows, w3, up)), w2, down)
            return exchange.combine(y, weights, home, how, x.dtype)

        @jax.jit
        def run(dy, ids, *operands):
            y, back = jax.vjp(lambda *operands: experts(*operands, ids), *operands)
            return y, *back(dy)

        arguments = [given[name] for name in ("x", "weights", "w1", "w3", "w2")]
        arguments[:2] = [a[None] for a in arguments[:2]]  # one row of tokens
        arguments = jax.device_put((given["dy"][None], given["ids"][None].astype(np.int32), *arguments))
        first = jax.block_until_ready(run(*arguments))
        np.savez(file, *(np.asarray(a).reshape(-1, a.shape[-1]) for a in first))
        del first
        take_turns(lambda: jax.block_until_ready(run(*arguments)), jax=jax.__version__)


def torch_worker(layer, threads, file):
    import numpy as np
    import torch
    import transformers
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    torch.set_num_threads(threads)
    given = {name: torch.from_numpy(value) for name, value in case(layer).items()}
    config = transformers.MixtralConfig(
        hidden_size=layer.hidden, intermediate_size=layer.mlp, num_local_experts=layer.experts, num_experts_per_tok=layer.per_token,
        experts_implementation="grouped_mm",
    )  # fmt: skip
    experts = MixtralExperts(config)
    with torch.no_grad():
        experts.gate_up_proj.copy_(torch.cat([given["w1"], given["w3"]], dim=2).transpose(1, 2))
        experts.down_proj.copy_(given["w2"].transpose(1, 2))
    x, weights = given["x"].requires_grad_(), given["weights"].requires_grad_()
    differentiated = (x, weights, *experts.parameters())

    def run():
        for parameter in differentiated:
            parameter.grad = None
        y = experts(x, given["ids"], weights)
        y.backward(given["dy"])
        return y

    y = run().detach()
    gate, up = experts.gate_up_proj.grad.transpose(1, 2).split(layer.mlp, dim=2)
    results = (y, x.grad, weights.grad, gate, up, experts.down_proj.grad.transpose(1, 2))
    np.savez(file, *(a.numpy().reshape(-1, a.shape[-1]) for a in results))
    take_turns(run, torch=torch.__version__, transformers=transformers.__version__)


def take_turns(run, **facts):
    """Says `facts`; then for each number on stdin runs so often, and says the seconds that one took."""
    print(json.dumps(facts), flush=True)
    for line in sys.stdin:
        steps, wall, cpu = int(line), time.perf_counter(), time.process_time()
        for _ in range(steps):
            run()
        took = {"wall": (time.perf_counter() - wall) / steps, "cpu": (time.process_time() - cpu) / steps}
        print(json.dumps(took), flush=True)


WORKERS = {"jaxllm": jaxllm_worker, "torch": torch_worker}


def beside_transformers(layer, threads, rounds, steps):
    """A row: seconds of both, medians over rounds, and the median over rounds of theirs / ours."""
    import numpy as np

    row = {
        "item": f"layer of {layer.tokens} tokens, {layer.hidden} x {layer.mlp}, {threads} threads",
        "threads": threads,
    }
    row |= {"layer": dataclasses.asdict(layer)}
    if not importlib.util.find_spec("torch"):
        return row | {"status": "left out: torch is not installed"}
    processes, facts, times = {}, {}, {role: [] for role in WORKERS}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for role in WORKERS:
                file = os.path.join(folder, f"{role}.npz")
                arguments = "--file", file, "--threads", str(threads), "--layer", json.dumps(dataclasses.asdict(layer))
                processes[role], said_first = start("benchmarks.moe", role, *arguments)
                facts |= said_first
            ours, theirs = (np.load(os.path.join(folder, f"{role}.npz")) for role in WORKERS)
            names = ("y", "dx", "dweights", "dw1", "dw3", "dw2")
            differences = {
                name: float(np.abs(ours[key] - theirs[key]).max() / np.abs(theirs[key]).max())
                for name, key in zip(names, theirs.files, strict=True)
            }
            for turn in range(rounds + 1):  # the first warms up
                for role, process in processes.items():
                    answer = ask(process, steps)
                    if turn:
                        times[role].append(answer)
        finally:
            for process in processes.values():
                process.stdin.close()
                process.wait()
    row |= {
        "status": PASSED if max(differences.values()) <= SAME else f"failed: differs from transformers, {differences}",
        **facts,
        "largest_difference": max(differences.values()),
    }
    for kind in ("cpu", "wall"):
        ratios = [b[kind] / a[kind] for a, b in zip(times["jaxllm"], times["torch"], strict=True)]
        row |= {f"{role}_{kind}_s": round(statistics.median(t[kind] for t in times[role]), 4) for role in times}
        row |= {
            f"{kind}_ratio": round(statistics.median(ratios), 3),
            f"{kind}_ratio_min_max": [round(min(ratios), 3), round(max(ratios), 3)],
        }
    return row


# --- the products, on a GPU ------------------------------------------------------------------------------------------

PRODUCTS = ("forward", "dgrad", "wgrad")
OURS = ("hopper", "xla")
OTHERS = ("ragged_dot_mgpu", "tokamax", "loop")
CONTENDERS = ("hopper", *OTHERS)  # "xla", ours for CPUs, when asked for
# Rows, columns and depth of a block, slots, and column blocks side by side: of the choices in JAX's own benchmark, those whose memory fits; the fastest counts
MGPU_BLOCKS = ((128, 128, 64, 4, 8), (128, 128, 64, 4, 1), (64, 192, 64, 4, 8), (64, 128, 64, 6, 8))


@dataclasses.dataclass(frozen=True)
class Groups:
    """`rows` rows of K components, of which the first sum(sizes) belong to len(sizes) groups with a K x N matrix each."""

    name: str
    rows: int
    K: int
    N: int
    sizes: tuple

    def __str__(self):
        return f"{self.name}, {self.K} x {self.N}"

    @property
    def flops(self):
        """Of each of the three products: those of rows that belong to a group."""
        return 2 * sum(self.sizes) * self.K * self.N


def cases(layer: Layer):
    """[Groups] of a layer: all experts on one device, unequally filled, and one of as many devices with one expert each, whose rows are the worst case."""
    rows, E = layer.tokens * layer.per_token, layer.experts
    fair = rows // E
    uneven = tuple(
        fair + (1 if e % 2 else -1) * (fair // 4 + 3) for e in range(E)
    )  # two sizes, for each is compiled in "loop"
    up, down = (layer.hidden, layer.mlp), (layer.mlp, layer.hidden)
    return [
        *(Groups(f"{layer.tokens} tokens, {E} experts", rows, *matrix, uneven) for matrix in (up, down)),
        Groups(f"room for {rows} rows, {fair + 1} used, 1 expert", rows, *up, (fair + 1,)),
    ]


def contender(name, product, sizes):
    """[f(x, w, dy, group_sizes), ...] of this implementation, of which the fastest counts. sizes: the same on the host, which only "loop" knows."""
    import functools

    import jax
    import jax.numpy as jnp

    if name in OURS:
        from jaxllm_kernels import grouped

        return [{
            "forward": lambda x, w, dy, n: grouped.forward(x, w, n, backend=name),
            "dgrad": lambda x, w, dy, n: grouped.forward(dy, w, n, backend=name, transposed=True),
            "wgrad": lambda x, w, dy, n: grouped.wgrad(x, dy, n, len(sizes), backend=name),
        }[product]]  # fmt: skip
    if name == "ragged_dot_mgpu":
        from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot
        from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot

        names = ("block_m", "block_n", "block_k", "max_concurrent_steps", "grid_block_n")
        plans = [dict(zip(names, plan, strict=True)) for plan in MGPU_BLOCKS]
        call = {
            "forward": lambda x, w, dy, n, plan: ragged_dot(x, w, group_sizes=n, **plan),
            "dgrad": lambda x, w, dy, n, plan: ragged_dot(dy, w, group_sizes=n, transpose_rhs=True, **plan),
            "wgrad": lambda x, w, dy, n, plan: transposed_ragged_dot(x, dy, group_sizes=n, **plan),
        }[product]
        return [functools.partial(call, plan=plan) for plan in plans]
    if name == "tokamax":
        import tokamax

        multiply = functools.partial(tokamax.ragged_dot, implementation="mosaic")
    else:  # the per-expert loop, at its best: the sizes are compiled in

        def multiply(x, w, group_sizes):
            starts = [sum(sizes[:e]) for e in range(len(sizes))]
            y = [x[start : start + size] @ w[e] for e, (start, size) in enumerate(zip(starts, sizes, strict=True))]
            return jnp.concatenate([*y, jnp.zeros((len(x) - sum(sizes), w.shape[2]), x.dtype)])

    return [{
        "forward": lambda x, w, dy, n: multiply(x, w, group_sizes=n),
        "dgrad": lambda x, w, dy, n: jax.vjp(lambda x: multiply(x, w, group_sizes=n), x)[1](dy)[0],
        "wgrad": lambda x, w, dy, n: jax.vjp(lambda w: multiply(x, w, group_sizes=n), w)[1](dy)[0],
    }[product]]  # fmt: skip


def compare(groups, names, left=lambda: 1e9, rounds=7):
    """Yields rows, one for each product and contender. left(): seconds that remain; contenders that come too late are rows that say so."""
    import jax
    import jax.numpy as jnp

    normal = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
    x, dy = normal(0, groups.rows, groups.K), normal(1, groups.rows, groups.N)
    w = normal(2, len(groups.sizes), groups.K, groups.N) * groups.K**-0.5
    arguments = (x, w, dy, jnp.asarray(groups.sizes, jnp.int32))
    for product in PRODUCTS:
        found, calls, results = {}, {}, {}
        for name in names:
            found[name] = row = {"item": f"{name}: {product}, {groups}", "backend": name, "product": product}
            row |= {"rows": groups.rows, "K": groups.K, "N": groups.N, "sizes": groups.sizes}
            if reason := missing(name):
                row["status"] = reason
                continue
            failures, functions = [], []
            try:
                functions = contender(name, product, groups.sizes)
            except Exception as failure:
                failures.append(said(failure))
            for number, function in enumerate(functions):
                if left() < 20:
                    failures.append(NO_TIME)
                    break
                try:
                    run = jax.jit(function)
                    result = jax.block_until_ready(run(*arguments))
                    # what stands behind the groups is not compared: others leave it unwritten
                    results[name, number] = result if product == "wgrad" else result[: sum(groups.sizes)]
                    calls[name, number] = lambda run=run: run(*arguments)
                except Exception as failure:
                    failures.append(said(failure))
            row["status"] = PASSED if any(key[0] == name for key in results) else failures[0]
            if failures and len(functions) > 1:
                row["plans_left_out"] = failures
        yardstick = next((key for name in (*reversed(OTHERS), *OURS) for key in results if key[0] == name), None)
        for key, result in results.items():
            difference = error(result, results[yardstick])
            row = found[key[0]]
            if key != yardstick:
                row |= {"difference": max(difference, row.get("difference", 0)), "compared_with": yardstick[0]}
            if difference > AGREEMENT:
                row["status"] = f"failed: differs by {difference:.1e} from {yardstick[0]}"
        results.clear()
        times = {}
        for (name, _), seconds in medians(
            {key: call for key, call in calls.items() if found[key[0]]["status"] == PASSED}, rounds
        ).items():
            times[name] = min(seconds, times.get(name, seconds))
        for name, seconds in times.items():
            found[name] |= {"ms": round(1e3 * seconds, 4), "tflops": round(groups.flops / seconds / 1e12, 2)}
            if others := [other for other in times if other != name]:
                best = min(others, key=times.get)
                found[name] |= {"best_other": best, "ratio": round(times[best] / seconds, 3)}
            if "loop" in times and name != "loop":
                found[name]["times_the_loop"] = round(times["loop"] / seconds, 3)
        yield from found.values()


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.moe", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3, help="of the layer in a round")
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1], help="of the layer, one comparison for each")
    parser.add_argument("--backends", nargs="+", choices=(*OURS, *OTHERS), default=CONTENDERS, help="of the products")
    parser.add_argument("--output", help="by default benchmarks/results/moe.jsonl")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes, both parts, any device; needs --output")
    for name in ("--worker", "--file", "--layer"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        if options.threads[0] < os.cpu_count():  # XLA counts the cores it may use
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-options.threads[0] :])
        WORKERS[options.worker](Layer(**json.loads(options.layer)), options.threads[0], options.file)
        return 0
    if options.rehearse and not options.output:
        parser.error("--rehearse: a rehearsal's rows do not belong among the results; give --output FILE")
    device, no_gpu = first_device()
    import jax

    def layers():
        for threads in options.threads:
            row = beside_transformers(TINY if options.rehearse else SCALED, threads, options.rounds, options.steps)
            yield {"hardware": f"{os.cpu_count()} cores, {cpu_name()}"} | row

    def products():
        names = ("xla", "loop") if options.rehearse else options.backends
        for groups in cases(TINY if options.rehearse else WHOLE):
            for row in compare(groups, names, rounds=options.rounds):
                yield {"hardware": device.device_kind, "jax": jax.__version__} | row

    failed = False
    for part in (layers, products) if options.rehearse else (layers,) if no_gpu else (products,):
        for row in part():
            failed |= row["status"].startswith("failed")
            ran = not row["status"].startswith(("left out", "not run"))
            evidence = "unmeasured" if not ran else "rehearsed" if options.rehearse else "measured"
            append(options.output or "benchmarks/results/moe.jsonl", [{"benchmark": "moe", "evidence": evidence} | row])
            print(shown(row), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
