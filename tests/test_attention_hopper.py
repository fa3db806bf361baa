"""The Hopper kernels' own promises: which tiles they read, the bounds of their loops, one array of keys and values, and what is refused.

Their numbers are held to float64 with those of the other backends, in test_attention_contract.py, and by Mosaic's interpreter on a CPU as here. It
checks arithmetic, indices, barriers and races of plain memory. It cannot see an operand of a product that is overwritten too early, nor speed; what
the GPU's compiler makes of the kernels is in h100/test_hopper_plans.py.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import attention_contract as contract
from attention_contract import causal
from jaxllm_kernels import attention_hopper as hopper
from jaxllm_kernels import ring, token_order
from jaxllm_kernels.attention_hopper_kernels import Plan

pytestmark = pytest.mark.version
interpreted = pytest.mark.skipif(
    jax.version.__version_info__ < (0, 11),
    reason="the Mosaic interpreter of jax 0.10 cannot run these kernels; the newest pair does",
)


@interpreted
def test_a_tile_that_no_query_of_a_block_sees_is_not_read():
    """Each head has NaN in all tiles that one block must not meet: that block is unharmed, the others are not (0 x NaN is NaN)."""
    T = 384
    case = contract.Case(causal(T, (100, 156, 128), window=60), H=3, K=3)
    q, k, v, start, end, do = given = case.inputs(ml_dtypes.bfloat16)
    exact, lse, *_ = contract.oracle(*given)
    intervals = jnp.asarray(np.stack([start, end], 1))
    rows = np.asarray(hopper.row_bounds(intervals, hopper.FORWARD[64]))[0]
    columns = np.asarray(hopper.column_bounds(intervals, T, hopper.DKV[64]))[0]

    def poisoned(x, bounds):
        x = x.copy()
        for head, (first, _, _, last) in enumerate(128 * bounds):
            x[:, :first, head], x[:, last:, head] = np.nan, np.nan
        return jnp.asarray(x)

    rest = (
        jnp.asarray(lse, jnp.float32),
        jnp.asarray(contract.delta_of(exact, do)),
        jnp.asarray(start),
        jnp.asarray(end),
    )
    keys = (poisoned(k, rows), poisoned(v, rows))
    out, _ = hopper.forward(jnp.asarray(q), *keys, *rest[2:], interpret=True)
    dq = hopper.dq(jnp.asarray(q), *keys, jnp.asarray(do), *rest, interpret=True)
    queries = (poisoned(q, columns), poisoned(do, columns))
    dk, dv = hopper.dkv(queries[0], jnp.asarray(k), jnp.asarray(v), queries[1], *rest, interpret=True)
    for x, bounds in ((out, rows), (dq, rows), (dk, columns), (dv, columns)):
        harmed = np.isnan(np.asarray(x, np.float32)).reshape(3, 128, 3, -1).any((1, 3))  # [block, head]
        first, last = bounds[:, 0], bounds[:, 3]
        meets = (first[:, None] < first) | (last[:, None] > last)
        assert np.array_equal(harmed, meets) and meets.any() and not meets.diagonal().any()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), packed=st.booleans())
def test_bounds_hold_what_is_seen_and_skip_the_mask_only_where_all_is_seen(seed, packed):
    rng = np.random.default_rng(seed)
    B, T, S, plan = 2, 256, 384, Plan(64)
    start, end = rng.integers(-50, S + 50, (2, B, T)).astype(np.int32)
    if packed:  # runs of queries with one wide interval each
        start, end = (np.repeat(np.sort(x[:, ::32], 1), 32, 1) for x in (start // 3, 2 * S // 3 + end // 3))
    key = np.arange(S)
    seen = (key >= start[..., None]) & (key < end[..., None])
    intervals = np.stack([np.where(seen.any(2), np.clip(x, 0, S), nothing) for x, nothing in ((start, S), (end, 0))], 1)
    by_row = seen.reshape(B, 2, 128, 6, 64).swapaxes(2, 3)  # [B, block, tile, ...]
    by_column = seen.reshape(B, 4, 64, 3, 128).transpose(0, 3, 1, 2, 4)
    met = by_column.any((3, 4))  # a tile of queries also meets the blocks between its first and its last
    met = np.maximum.accumulate(met, 1) & np.maximum.accumulate(met[:, ::-1], 1)[:, ::-1]
    for bounds, tiles, live in (
        (hopper.row_bounds(jnp.asarray(intervals), plan), by_row, by_row.any((3, 4))),
        (hopper.column_bounds(jnp.asarray(intervals), S, plan), by_column, met),
    ):
        flat = [np.asarray(x).reshape(-1, x.shape[2]) for x in (bounds, live, tiles.all((3, 4)))]
        for (b0, b1, b2, b3), live_tiles, full_tiles in zip(*flat, strict=True):
            where = np.flatnonzero(live_tiles)
            assert (b0, b3) == ((where[0], where[-1] + 1) if len(where) else (b3, b3)) and b0 <= b1 <= b2 <= b3
            assert full_tiles[b1:b2].all() and (b2 > b1 or not full_tiles.any())


def test_a_causal_mask_costs_its_triangle_and_masks_its_diagonal_only():
    intervals = jnp.asarray(np.stack(causal(1024), 1))
    for bounds in (hopper.row_bounds(intervals, Plan(128)), hopper.column_bounds(intervals, 1024, Plan(128))):
        b0, b1, b2, b3 = np.moveaxis(np.asarray(bounds), -1, 0)
        assert (b3 - b0).sum() == 8 * 9 // 2 and (b3 - b0 - (b2 - b1)).sum() == 8


def test_what_fits_no_kernel_is_refused_by_name():
    case = contract.Case((np.zeros((1, 128), np.int32), np.ones((1, 128), np.int32)), S=256, H=4, K=2)
    q, k, v, start, end, do = map(jnp.asarray, case.inputs(ml_dtypes.bfloat16))
    rows, wide = jnp.zeros((1, 4, 128), jnp.float32), jnp.zeros(k.shape, jnp.float32)
    few = lambda x: x[:, :, :3]
    for message, call in {
        r"a head dim in \(64, 128, 256\), got 32; pad with zeros to 64 .*32\*\*-0.5": lambda: hopper.forward(
            q[..., :32], k[..., :32], v[..., :32], start, end
        ),
        "T a multiple of 128, got 100; pad": lambda: hopper.forward(q[:, :100], k, v, start[:, :100], end[:, :100]),
        "S a multiple of 128, got 200; pad": lambda: hopper.dq(q, k[:, :200], v[:, :200], do, rows, rows, start, end),
        "query heads .*, got 3 and 2": lambda: hopper.dkv(few(q), k, v, few(do), rows[:, :3], rows[:, :3], start, end),
        'v in bfloat16, got float32; .*"xla"': lambda: hopper.forward(q, k, wide, start, end),
        "k_end in int32, got float32": lambda: hopper.forward(q, k, v, start, end.astype(jnp.float32)),
        r"lse \[B, H, T\] = \(1, 4, 128\), got \(1, 128, 4\)": lambda: hopper.dq(
            q, k, v, do, rows.swapaxes(1, 2), rows, start, end
        ),
        r"into\[1\] in float32, got bfloat16": lambda: hopper.dkv(q, k, v, do, rows, rows, start, end, (wide, v)),
        "acc in float32, got bfloat16": lambda: hopper.fold((q, rows, rows), q, k, v, start, end),
        "four dims": lambda: hopper.forward(q[0], k, v, start, end),
    }.items():
        with pytest.raises(ValueError, match="hopper attention needs .*" + message):
            call()


@interpreted
def test_a_ring_of_two_computed_rank_by_rank():
    """What `ring_forward` and `ring_backward` ask of the kernels, in their order, with keys and values in one array; the interpreter knows one device only."""
    backend, ranks, length, scale = contract.compiled("hopper"), 2, 128, 64**-0.5
    given = contract.Case(causal(256, (100, 150)), H=2).inputs(ml_dtypes.bfloat16)
    q, k, v, starts, ends, w = map(jnp.asarray, given)
    order = token_order("zigzag", ranks, 256)
    part = lambda x, r: x[:, order][:, r * length : (r + 1) * length]
    kv = [jnp.stack([part(k, r), part(v, r)]) for r in range(ranks)]
    interval = lambda r, s: [ring.local_interval(part(x, r), "zigzag", ranks, s, length) for x in (starts, ends)]
    outs, lses, dqs, dkvs = [], [], [], [jnp.zeros((2, 1, length, 1, 64))] * ranks
    for r in range(ranks):
        carry = backend.empty(part(q, r))
        for s in (r, (r - 1) % ranks):
            carry = backend.fold(carry, part(q, r), kv[s], kv[s], *interval(r, s), scale=scale)
        out, lse = backend.finish(carry, jnp.bfloat16)
        do, dq = jnp.where((part(ends, r) > 0)[..., None, None], part(w, r), 0).astype(jnp.bfloat16), None
        delta = jnp.moveaxis(jnp.sum(do.astype(jnp.float32) * out.astype(jnp.float32), -1), 1, 2)
        for s in (r, (r - 1) % ranks):
            args = (part(q, r), kv[s], kv[s], do, lse, delta, *interval(r, s))
            dq = backend.dq(*args, into=dq, scale=scale)
            dkvs[s] = dkvs[s] + jnp.stack(backend.dkv(*args, into=None, scale=scale))
        outs.append(out)
        lses.append(jnp.swapaxes(lse, 1, 2))
        dqs.append(dq)
    back = np.argsort(order)
    parts = dict(out=outs, lse=lses, dq=dqs, dk=[x[0] for x in dkvs], dv=[x[1] for x in dkvs])
    got = {name: np.asarray(jnp.concatenate(x, 1))[:, back] for name, x in parts.items()}
    contract.check(got | {"lse": got["lse"].swapaxes(1, 2)}, given)
