"""What does cutting a row into ring steps cost the kernels? One GPU does what each of `ranks` would do, hop by hop, with nothing sent.

    python -m benchmarks.ring [--backend hopper] [--tokens 2048 4096 8192] [--ranks 8] [--output FILE]

A virtual rank folds the keys of one rank after the other into its carry and adds up its gradients as `jaxllm_kernels.ring` does, with the same
intervals, one compiled kernel for all hops. The whole row in one call is the ideal: efficiency = its time / (ranks x the time of a virtual rank).
What a real ring adds (transfers, and how well they hide) is not in it: it is an upper bound, and every row says so.

Not here: layouts other than the ring's own for a causal row (zigzag), packed rows, windows; the intervals are data, so the kernels are the same.
"""

import argparse
import sys

from benchmarks.attention import PASSED, error, first_device, forward_flops, inputs, medians, publish, said

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # Llama-3.1-8B's
LABEL = "virtual hops on one device, no communication"
# Largest difference: 2^-8, half a place of the whole row's out in bfloat16, and 2^-9 for each one's rounding of p.
AGREEMENT = 2**-7


def hops(layout, ranks, rank, k_start, k_end, window=None):
    """(rank whose keys these are, k_start, k_end) of each hop of `rank`, in the order in which a ring brings them.

    k_start, k_end: i32[B, T], intervals of a row in its natural order; what comes back are i32[B, T / ranks], those of this rank's queries as
    indices into the keys of that hop."""
    from jaxllm_kernels import live_steps, ring, token_order

    length = k_start.shape[1] // ranks
    own = token_order(layout, ranks, k_start.shape[1]).reshape(ranks, -1)[rank]
    for step in live_steps(layout, ranks, length, window):
        source = (rank - step) % ranks
        ends = (ring.local_interval(bound[:, own], layout, ranks, source, length) for bound in (k_start, k_end))
        yield source, *ends


class Virtual:
    """The kernels of one backend, compiled once per shape and used for every hop; sums are updated in place."""

    def __init__(self, backend, scale):
        import jax
        import jax.numpy as jnp

        self.backend = backend
        self._empty = jax.jit(lambda q: backend.empty(q))
        self._finish = jax.jit(backend.finish, static_argnums=1)
        self._fold = jax.jit(lambda carry, *arrays: backend.fold(carry, *arrays, scale=scale), donate_argnums=0)
        self._dq = jax.jit(lambda into, *arrays: backend.dq(*arrays, into=into, scale=scale), donate_argnums=0)
        # what arrives from the rank before, plus this rank's part: two steps, as in the ring, where the first travels behind the second
        self._dkv = jax.jit(
            lambda arriving, *arrays: arriving + jnp.stack(backend.dkv(*arrays, into=None, scale=scale)),
            donate_argnums=0,
        )

    def forward(self, q, keys, steps, dtype=None):
        """(out in `dtype`, by default q's, lse) of q; keys: {rank: (k, v) as `ring.halves` gives them}; steps: those of `hops`."""
        carry = self._empty(q)
        for source, start, end in steps:
            carry = self._fold(carry, q, *keys[source], start, end)
        return self._finish(carry, dtype or q.dtype)

    def backward(self, q, keys, do, lse, delta, steps, sums):
        """dq f32 of q; `sums` {rank: f32[2, B, L, K, D]} is replaced by those with this rank's dk and dv added."""
        import jax.numpy as jnp

        dq = jnp.zeros(q.shape, jnp.float32)
        for source, start, end in steps:
            arrays = (q, *keys[source], do, lse, delta, start, end)
            dq = self._dq(dq, *arrays)
            sums[source] = self._dkv(sums[source], *arrays)
        return dq


def measure(
    backend, ranks=8, tokens=8192, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, timed_ranks=None, rounds=5
):
    """One row: virtual ranks of `tokens` tokens each beside one call over the whole causal row, compared and timed.

    backend: a module of jaxllm_kernels. timed_ranks: those to time, by default the first, whose hops are most unlike each other, and the
    last; with all of them dk and dv are compared too."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxllm_kernels import ring, token_order

    name, scale, length = backend.__name__.rpartition("_")[2], head_dim**-0.5, ranks * tokens
    timed_ranks = sorted({0, ranks - 1}) if timed_ranks is None else timed_ranks
    row = {
        "item": f"{name}: {ranks} x {tokens} tokens, {heads}/{kv_heads} heads of {head_dim}", "label": LABEL, "layout": "zigzag",
        "ranks": ranks, "tokens_per_rank": tokens,
    }  # fmt: skip
    q, k, v, do = inputs(1, length, heads, kv_heads, head_dim)
    end = jnp.arange(1, length + 1, dtype=jnp.int32)[None]
    start = jnp.zeros_like(end)
    whole = jax.jit(lambda *arrays: backend.forward(*arrays, aligned=True, scale=scale))
    back = jax.jit(lambda *arrays: ring.both(backend, *arrays, aligned=True, scale=scale))
    out, lse = whole(q, k, v, start, end)
    delta = jnp.swapaxes(jnp.sum(do.astype(jnp.float32) * out.astype(jnp.float32), axis=-1), 1, 2)
    dq, dk, dv = back(q, k, v, do, lse, delta, start, end)

    order = token_order("zigzag", ranks, length).reshape(ranks, -1)
    pairs = [jnp.stack([k[:, own], v[:, own]]) for own in order]
    keys = {rank: ring.halves(backend, pair) for rank, pair in enumerate(pairs)}
    sums = {rank: jnp.zeros(pair.shape, jnp.float32) for rank, pair in enumerate(pairs)}
    virtual, calls, differences = Virtual(backend, scale), {}, {}

    def note(what, got, want):
        differences[what] = max(differences.get(what, 0.0), error(got, want))

    for rank in timed_ranks:
        own = order[rank]
        steps = [(source, *map(jnp.asarray, ends)) for source, *ends in hops("zigzag", ranks, rank, start, end)]
        mine = (q[:, own], do[:, own], lse[:, :, own], delta[:, :, own])
        forward = lambda mine=mine, steps=steps: virtual.forward(mine[0], keys, steps)
        backward = lambda mine=mine, steps=steps: virtual.backward(mine[0], keys, *mine[1:], steps, sums)
        note("out", virtual.forward(mine[0], keys, steps, jnp.float32)[0], out[:, own])
        note("dq", backward(), dq[:, own])
        calls[rank, "forward"], calls[rank, "backward"] = forward, backward
    if len(timed_ranks) == ranks:
        for part, (what, want) in enumerate((("dk", dk), ("dv", dv))):
            got = jnp.concatenate([sums[rank][part] for rank in range(ranks)], axis=1)
            note(what, got, want[:, np.concatenate(order)])
    row["differences"] = differences
    if bad := [what for what, value in differences.items() if value > AGREEMENT]:
        return row | {
            "status": f"failed: {', '.join(bad)} differ from the whole row's by {[differences[what] for what in bad]}"
        }
    calls["whole", "forward"] = lambda: whole(q, k, v, start, end)
    calls["whole", "backward"] = lambda: back(q, k, v, do, lse, delta, start, end)
    times = medians(calls, rounds)
    flops = forward_flops(1, heads, length, length, head_dim, causal=True)
    for part, factor in (("forward", 1.0), ("backward", 2.5), ("both", 3.5)):
        parts = ("forward", "backward") if part == "both" else (part,)
        one = sum(times["whole", each] for each in parts)
        hop = sum(times[rank, each] for rank in timed_ranks for each in parts) / len(timed_ranks)
        row[f"{part}_efficiency"] = round(one / (ranks * hop), 4)
        row[f"{part}_tflops_whole"] = round(factor * flops / one / 1e12, 2)
        row[f"{part}_tflops_hops"] = round(factor * flops / ranks / hop / 1e12, 2)
    row["rank_ms"] = {f"{rank} {part}": round(1e3 * times[rank, part], 4) for rank, part in calls if rank != "whole"}
    return row | {"status": PASSED}


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ring", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--backend", default="hopper", choices=("hopper", "triton", "xla"))
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=(2048, 4096, 8192), help="of each rank")
    parser.add_argument("--output", default="benchmarks/results/ring.jsonl")
    options = parser.parse_args(arguments)
    if options.ranks < 1 or any(tokens < 2 or tokens % 2 for tokens in options.tokens):
        parser.error(
            f"--ranks: {options.ranks}, --tokens: {options.tokens}; zigzag needs a rank, and an even number of tokens on each"
        )
    device, reason = first_device()
    if reason and options.backend != "xla":
        print(f"benchmarks.ring: {reason}; --backend xla tries the script on a CPU", file=sys.stderr)
        return 2
    import jax

    from jaxllm_kernels.attention import load_backend

    evidence = "rehearsed" if reason else "measured"
    common = {"benchmark": "ring", "device": device.device_kind, "jax": jax.__version__, "evidence": evidence}

    def rows():
        for tokens in options.tokens:
            try:
                yield measure(load_backend(options.backend), options.ranks, tokens)
            except Exception as failure:
                yield {"item": f"{options.backend}: {options.ranks} x {tokens} tokens", "status": said(failure)}

    return publish(options.output, common, rows())


if __name__ == "__main__":
    sys.exit(main())
