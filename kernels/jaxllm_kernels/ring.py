"""Attention over tokens that an axis of a shard_map splits: which tokens a device holds, and how it meets the keys of the others.

Masks stay intervals of the whole row; `local_interval` turns them into intervals of one device's keys, which a kernel understands, and since
both of a zigzag device's chunks are in order, a row's interval in them is one interval again. So one kernel call per ring step does whatever the
step needs: nothing, a triangle, or everything; the kernel's loop bounds skip the rest, and no branch on the rank exists.

The ring is unrolled. Each hop is tied by an optimization barrier to the kernel that it should hide behind: without, XLA starts the hops
at once, before the first kernel; in a loop, it copies the keys each turn (both seen in schedules compiled for H100). In the backward pass the keys
travel behind the dq kernel and their gradients behind the dkv kernel (home, behind the last dq), in float32: errors of bfloat16 sums grow with the ring.

Not here: what a kernel computes, and the choice between ring and all-gather, which needs to know the links.
"""

import jax
import jax.numpy as jnp
import numpy as np

LAYOUTS = ("contiguous", "zigzag")


def token_order(layout, ranks, length):
    """i64[length]: the token of a row that stands at each place when the row is laid out for `ranks` devices, rank r holding the r-th of
    `ranks` equal parts of the places. "zigzag": of 2 x ranks chunks rank r holds r and 2 x ranks - 1 - r, so that under a causal mask all have
    equal work. ValueError where chunks would be unequal."""
    chunks = ranks * (2 if layout == "zigzag" else 1)
    if length % chunks:
        raise ValueError(f"a row of {length} tokens does not divide into {chunks} chunks ({layout} over {ranks})")
    return np.concatenate(
        [np.arange(length).reshape(chunks, -1)[list(held)].reshape(-1) for held in _held(layout, ranks)]
    )


def _held(layout, ranks):
    """The chunks of the row that each rank holds, in order."""
    return [(r, 2 * ranks - 1 - r) if layout == "zigzag" else (r,) for r in range(ranks)]


def local_interval(bound, layout, ranks, rank, length):
    """Either end of an interval of the row's tokens as an index into the `length` tokens that `rank` holds (clipped to them)."""
    if layout == "contiguous":
        return jnp.clip(bound - rank * length, 0, length)
    half = length // 2
    first, second = rank * half, (2 * ranks - 1 - rank) * half
    return jnp.clip(bound - first, 0, half) + jnp.clip(bound - second, 0, half)


def live_steps(layout, ranks, length, window):
    """The ring steps, ascending, in which some rank's queries see some key of the rank that many places before; 0 is always one."""
    if window is None:
        return list(range(ranks))
    held = _held(layout, ranks)
    size = length // len(held[0])

    def sees(
        queries, keys
    ):  # chunk numbers; the first key is not behind the last query, nor the last key before the first one's window
        return keys <= queries and (keys + 1) * size - 1 > queries * size - window

    def live(step):
        return any(sees(q, k) for r in range(ranks) for q in held[r] for k in held[(r - step) % ranks])

    return [step for step in range(ranks) if live(step)]


def _hop(x, axis, distance):
    """`x` of the rank `distance` places before."""
    ranks = jax.lax.axis_size(axis)
    return jax.lax.ppermute(x, axis, [(rank, (rank + distance) % ranks) for rank in range(ranks)])


def _steps(axis, layout, window, k_start, k_end, length):
    """(interval start, interval end, distance of the next hop or None) of each live step; `length` tokens are real, the rest completion."""
    ranks, rank = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    live = live_steps(layout, ranks, length, window)
    for step, after in zip(live, [*live[1:], None], strict=True):
        source = (rank - step) % ranks
        ends = (local_interval(bound, layout, ranks, source, length) for bound in (k_start, k_end))
        yield *ends, None if after is None else after - step


def halves(backend, kv):
    """Keys and values as the backend takes them: a PAIRED one reads its half of what travels; for others the halves are cut out, a copy."""
    return (kv, kv) if getattr(backend, "PAIRED", False) else (kv[0], kv[1])


def ring_forward(backend, axis, layout, window, q, k, v, k_start, k_end, length, scale):
    """(out, lse) of this device's queries. k and v travel as one array: one transfer a step."""
    kv, carry = jnp.stack([k, v]), backend.empty(q)
    for start, end, hop in _steps(axis, layout, window, k_start, k_end, length):
        coming = None if hop is None else _hop(kv, axis, hop)
        carry = backend.fold(carry, q, *halves(backend, kv), start, end, scale=scale)
        if hop is not None:
            kv, carry = jax.lax.optimization_barrier((coming, carry))
    return backend.finish(carry, q.dtype)


def ring_backward(backend, axis, layout, window, q, k, v, do, lse, delta, k_start, k_end, length, scale):
    """(dq, dk, dv) in float32 of this device's queries and keys.

    In the last step gradients of keys come first, so that their way home has the dq kernel to hide behind."""
    kv, dq, dkv, back, travelled = jnp.stack([k, v]), None, None, 0, 0
    tied = jax.lax.optimization_barrier
    for start, end, hop in _steps(axis, layout, window, k_start, k_end, length):
        args = (q, *halves(backend, kv), do, lse, delta, start, end)
        if hop is not None:
            kv, dq = tied((_hop(kv, axis, hop), backend.dq(*args, into=dq, scale=scale)))
        part = jnp.stack(backend.dkv(*args, into=None, scale=scale))
        if dkv is not None:
            arriving, part = tied((_hop(dkv, axis, back), part))
            part = arriving + part
        dkv, back, travelled = part, hop, travelled + (hop or 0)
    if not travelled:
        return backend.dq(*args, into=None, scale=scale), dkv[0], dkv[1]
    dkv, dq = tied((dkv, dq))
    dkv, dq = tied((_hop(dkv, axis, -travelled), backend.dq(*args, into=dq, scale=scale)))
    return dq, dkv[0], dkv[1]


def both(backend, *args, aligned, scale):
    """(dq, dk, dv) in float32 of one call's queries and keys, in one pass where the backend has it."""
    if hasattr(backend, "backward"):
        return backend.backward(*args, aligned=aligned, scale=scale)
    return backend.dq(*args, into=None, scale=scale), *backend.dkv(*args, into=None, scale=scale)


def _gathered(x, axis, layout, length):
    """The keys of all devices [..., B, S, K, D] in the row's order, without each device's completion."""
    ranks = jax.lax.axis_size(axis)
    parts = jax.lax.all_gather(x[..., :length, :, :], axis)  # [ranks, ..., B, length, K, D]
    return jnp.concatenate([parts[r][..., begin:end, :, :] for r, begin, end in _in_order(layout, ranks, length)], -3)


def _in_order(layout, ranks, length):
    """(rank, begin, end) of each chunk of the row, in the row's order."""
    held = _held(layout, ranks)
    size = length // len(held[0])
    where = {chunk: (rank, i * size, (i + 1) * size) for rank, own in enumerate(held) for i, chunk in enumerate(own)}
    return [where[chunk] for chunk in sorted(where)]


def _completed(x, tile):
    missing = [(0, 0)] * (x.ndim - 3) + [(0, -x.shape[-3] % tile), (0, 0), (0, 0)]
    return jnp.pad(x, missing) if missing[-3][1] else x


def allgather_forward(backend, axis, layout, window, q, k, v, k_start, k_end, length, scale):
    """(out, lse) of this device's queries against all keys at once."""
    kv = _completed(_gathered(jnp.stack([k, v]), axis, layout, length), backend.TILE)
    return backend.forward(q, *halves(backend, kv), k_start, k_end, aligned=False, scale=scale)


def allgather_backward(backend, axis, layout, window, q, k, v, do, lse, delta, k_start, k_end, length, scale):
    """(dq, dk, dv) in float32: every device has a part of each key's gradient; they are summed in float32, each keeps its own keys'."""
    ranks = jax.lax.axis_size(axis)
    kv = _completed(_gathered(jnp.stack([k, v]), axis, layout, length), backend.TILE)
    args = (q, *halves(backend, kv), do, lse, delta, k_start, k_end)
    dq, dk, dv = both(backend, *args, aligned=False, scale=scale)
    dkv = jnp.stack([dk, dv])
    place = {chunk: i for i, chunk in enumerate(_in_order(layout, ranks, length))}
    size = ranks * length // len(place)
    parts = [dkv[..., i * size : (i + 1) * size, :, :] for _, i in sorted(place.items())]
    own = jax.lax.psum_scatter(jnp.concatenate(parts, -3), axis, scatter_dimension=dkv.ndim - 3, tiled=True)
    own = jnp.pad(own, [(0, 0)] * (own.ndim - 3) + [(0, k.shape[1] - length), (0, 0), (0, 0)])
    return dq, own[0], own[1]
