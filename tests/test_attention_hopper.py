"""The Hopper kernels against float64, in Mosaic's interpreter on a CPU: every mask, head dim and way of calling, with more tiles than slots.

The interpreter checks arithmetic, indices, barriers and races of plain memory. It cannot see an operand of a product that is overwritten too
early, nor speed; what the GPU's compiler makes of the kernels is in h100/test_hopper_plans.py.
"""

import functools
import sys
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm_kernels import attention, ring, token_order
from jaxllm_kernels import attention_hopper as hopper
from jaxllm_kernels.attention_hopper_kernels import Plan
from support import error

pytestmark = pytest.mark.version
interpreted = pytest.mark.skipif(
    jax.version.__version_info__ < (0, 11),
    reason="the Mosaic interpreter of jax 0.10 cannot run these kernels; the newest pair does",
)
RESULTS = ("out", "lse", "dq", "dk", "dv")
LARGEST = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)  # garbage that is still finite


def bfloat16(x):
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16)


def causal(T, *rows, window=None):
    """(k_start, k_end), i32[B, T], of packed causal documents: the lengths of each row's, with padding behind them."""
    start, end = np.zeros((2, len(rows) or 1, T), np.int32)
    for b, documents in enumerate(rows or ((T,),)):
        first = 0
        for length in documents:
            place = np.arange(first, first + length)
            start[b, place], end[b, place] = np.maximum(first, place + 1 - (window or T)), place + 1
            first += length
    return start, end


def inputs(T, S=None, H=1, K=1, D=64, B=1):
    """q, k, v, do in bfloat16."""
    rng = np.random.default_rng(0)
    S = S or T
    return [bfloat16(rng.standard_normal((B, *n, D))) for n in ((T, H), (S, K), (S, K), (T, H))]


def oracle(q, k, v, do, k_start, k_end, scale=None, half=lambda x: x):
    """out, lse, delta, dq, dk, dv in float64; `half` rounds what the kernels keep in half precision: p, ds and out."""
    q, k, v, do = (np.asarray(x, np.float64) for x in (q, k, v, do))
    groups, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5 if scale is None else scale
    k_all, v_all = np.repeat(k, groups, 2), np.repeat(v, groups, 2)
    key = np.arange(k.shape[1])
    seen = ((key >= k_start[..., None]) & (key < k_end[..., None]))[:, None]
    scores = np.where(seen, np.einsum("bthd,bshd->bhts", q, k_all) * scale, -np.inf)
    peak = scores.max(-1, keepdims=True)
    peak = np.where(np.isfinite(peak), peak, 0)
    p = np.exp(scores - peak)
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + peak)[..., 0]
    total = np.where(total > 0, total, 1)
    out = half(np.einsum("bhts,bshd->bthd", half(p) / total, v_all))
    p, dp = p / total, np.einsum("bthd,bshd->bhts", do, v_all)
    delta = (p * dp).sum(-1)
    ds = p * (dp - delta[..., None])
    by_key = lambda x: x.reshape(*x.shape[:2], k.shape[2], groups, -1).sum(3)
    dq = np.einsum("bhts,bshd->bthd", half(ds), k_all) * scale
    dk = by_key(np.einsum("bhts,bthd->bshd", half(ds), q)) * scale
    return out, lse, delta, dq, dk, by_key(np.einsum("bhts,bthd->bshd", half(p), do))


def no_races(result):
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    result = jax.tree.map(np.asarray, result)  # the kernel has ended
    assert not interpret_pallas_call.get_races().races_found  # the interpreter records a race, and goes on
    return result


def run(arrays, k_start, k_end):
    """RESULTS by the kernels; the backward ones get the oracle's lse and delta."""
    _, lse, delta, *_ = oracle(*arrays, k_start, k_end)
    q, k, v, do = map(jnp.asarray, arrays)
    intervals = (jnp.asarray(k_start), jnp.asarray(k_end))
    rest = (do, jnp.asarray(lse, jnp.float32), jnp.asarray(delta, jnp.float32), *intervals)
    return (
        *no_races(hopper.forward(q, k, v, *intervals, interpret=True)),
        no_races(hopper.dq(q, k, v, *rest, interpret=True)),
        *no_races(hopper.dkv(q, k, v, *rest, interpret=True)),
    )


def check(got, arrays, k_start, k_end, scale=None, largest_score=0.0):
    """`got` is the oracle's, to within twice the error that rounding p, ds and out to bfloat16 makes, and float32's in scores so large.

    Queries that see nothing and keys that nobody sees: exactly 0, and lse -inf."""
    names = ("out", "lse", "delta", "dq", "dk", "dv")
    want = dict(zip(names, oracle(*arrays, k_start, k_end, scale), strict=True))
    rounded = dict(zip(names, oracle(*arrays, k_start, k_end, scale, bfloat16), strict=True))
    key = np.arange(arrays[1].shape[1])
    seen = (key >= k_start[..., None]) & (key < k_end[..., None])
    blind, unseen = ~seen.any(2), ~seen.any(1)
    for name, x in zip(RESULTS, got, strict=True):
        x = np.asarray(x, np.float64)
        if name == "lse":
            blind_heads = np.broadcast_to(blind[:, None], x.shape)
            assert np.array_equal(x == -np.inf, blind_heads)
            assert error(x[~blind_heads], want[name][~blind_heads]) < 1e-6
            continue
        bound = 2 * max(error(rounded[name], want[name]), 2**-9) + 4 * 2.0**-23 * largest_score
        assert error(x, want[name]) < bound, name
        assert not x[blind if name in ("out", "dq") else unseen].any(), name


EVERYTHING = (np.zeros((1, 128), np.int32), np.full((1, 128), 384, np.int32))


@interpreted
@pytest.mark.parametrize(
    "sizes, intervals",
    [
        (dict(T=384, D=128), causal(384)),
        (dict(T=256, D=256, B=2), causal(256, (100, 140), (3, 253), window=70)),
        (dict(T=128, S=384, D=64, H=8), EVERYTHING),
    ],
    ids=["causal", "windows-in-wide-heads", "everything-in-8-groups"],
)
def test_outputs_and_gradients_equal_the_float64_oracle(sizes, intervals):
    arrays = inputs(**sizes)
    check(run(arrays, *intervals), arrays, *intervals)


@interpreted
@pytest.mark.filterwarnings("ignore:.* encountered in matmul:RuntimeWarning")  # the garbage, in the interpreter
def test_finite_garbage_outside_the_mask_has_no_influence():
    """Packed documents, grouped heads and padding; the padding holds the largest numbers there are, its intervals point anywhere."""
    start, end = causal(384, (70, 230, 60))
    padding, clean = start == end, inputs(384, H=2)
    fill = lambda value: [np.where(padding[..., None, None], bfloat16(value), x) for x in clean]
    zeroed, filled = fill(0), fill(LARGEST)
    nowhere = (np.where(padding, 10**6, start).astype(np.int32), np.where(padding, -3, end).astype(np.int32))
    _, lse, delta, *_ = oracle(*zeroed, *nowhere)
    q, k, v, do, *intervals = map(jnp.asarray, (*filled, *nowhere))
    rest = (do, jnp.asarray(lse, jnp.float32), jnp.asarray(delta, jnp.float32), *intervals)
    out, lse = hopper.forward(q, k, v, *intervals, interpret=True)
    dq, dkv = hopper.dq(q, k, v, *rest, interpret=True), hopper.dkv(q, k, v, *rest, interpret=True)
    check((out, lse, dq, *dkv), zeroed, *nowhere)


@interpreted
def test_logits_a_thousand_times_larger():
    arrays = inputs(384)
    scores = np.einsum("bthd,bshd->bts", *(x.astype(np.float64) for x in arrays[:2])) * 64**-0.5
    arrays[0] = bfloat16(arrays[0].astype(np.float32) * 1e3)
    check(run(arrays, *causal(384)), arrays, *causal(384), largest_score=1e3 * np.abs(scores).max())


@interpreted
def test_keys_in_pieces_in_any_order_give_what_whole_keys_give():
    """As in a ring: queries are a part of the row, intervals count from each piece's first key. The scale is that of a padded head dim."""
    arrays, scale = inputs(128, 640, H=2, K=2, D=128), 80**-0.5
    start, end = np.zeros((1, 128), np.int32), 501 + np.arange(128, dtype=np.int32)[None]
    start[0, 100:], end[0, 120:] = 590, 0  # a second document, and padding
    _, lse, delta, *_ = oracle(*arrays, start, end, scale)
    q, k, v, do = map(jnp.asarray, arrays)
    rows = (jnp.asarray(lse, jnp.float32), jnp.asarray(delta, jnp.float32))
    options = dict(scale=scale, interpret=True)
    carry, dq = hopper.empty(q), jnp.full(q.shape, 3.0, jnp.float32)
    dkv = {}
    for first, last in ((384, 640), (0, 384)):
        keys = (k[:, first:last], v[:, first:last])
        intervals = (jnp.asarray(start - first), jnp.asarray(end - first))
        carry = no_races(hopper.fold(carry, q, *keys, *intervals, **options))
        carry = tuple(map(jnp.asarray, carry))
        dq = jnp.asarray(no_races(hopper.dq(q, *keys, do, *rows, *intervals, dq, **options)))
        into = (jnp.full(keys[0].shape, 1.0, jnp.float32), jnp.full(keys[0].shape, 2.0, jnp.float32))
        dkv[first] = no_races(hopper.dkv(q, *keys, do, *rows, *intervals, into, **options))
    out, lse = hopper.finish(carry, jnp.bfloat16)
    assert out.dtype == jnp.bfloat16
    dk, dv = (np.concatenate([dkv[0][n], dkv[384][n]], 1) - (n + 1) for n in range(2))
    dq = np.where((np.asarray(dq) == 3).all(-1, keepdims=True), 0, np.asarray(dq) - 3)
    check((out, lse, dq, dk, dv), arrays, start, end, scale)


@interpreted
def test_a_tile_that_no_query_of_a_block_sees_is_not_read():
    """Each head has NaN in all tiles that one block must not meet: that block is unharmed, the others are not (0 x NaN is NaN)."""
    T = 384
    start, end = causal(T, (100, 156, 128), window=60)
    q, k, v, do = inputs(T, H=3, K=3)
    _, lse, delta, *_ = oracle(q, k, v, do, start, end)
    intervals = jnp.asarray(np.stack([start, end], 1))
    rows = np.asarray(hopper.row_bounds(intervals, hopper.FORWARD[64]))[0]
    columns = np.asarray(hopper.column_bounds(intervals, T, hopper.DKV[64]))[0]

    def poisoned(x, bounds):
        x = x.copy()
        for head, (first, _, _, last) in enumerate(128 * bounds):
            x[:, :first, head], x[:, last:, head] = np.nan, np.nan
        return jnp.asarray(x)

    rest = (jnp.asarray(lse, jnp.float32), jnp.asarray(delta, jnp.float32), jnp.asarray(start), jnp.asarray(end))
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
    q, k, v, do = map(jnp.asarray, inputs(128, 256, H=4, K=2))
    start, end = jnp.zeros((1, 128), jnp.int32), jnp.ones((1, 128), jnp.int32)
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


@pytest.fixture
def backend(monkeypatch):
    """`attention(backend="hopper")` in the interpreter."""
    options = {
        name: functools.partial(getattr(hopper, name), interpret=True) for name in ("forward", "fold", "dq", "dkv")
    }
    kept = {name: getattr(hopper, name) for name in ("empty", "finish", "TILE", "HEAD_DIMS", "PAIRED")}
    module = types.SimpleNamespace(**options, **kept)
    monkeypatch.setitem(sys.modules, "jaxllm_kernels.attention_hopper", module)
    return module


@interpreted
def test_lengths_and_head_dims_between_the_kernels_are_completed(backend):
    rng = np.random.default_rng(0)
    q, k, v, w = (jnp.asarray(rng.standard_normal((1, 150, n, 40)), jnp.bfloat16) for n in (2, 1, 1, 2))
    ends = jnp.arange(1, 151, dtype=jnp.int32)[None]
    starts = jnp.where(ends > 60, 60, 0)
    got, pull = jax.vjp(lambda *a: attention(*a, starts, ends, backend="hopper", aligned=True), q, k, v)
    wide = tuple(np.asarray(x, np.float32) for x in (q, k, v))
    out, _, _, *grads = oracle(*wide, np.asarray(w, np.float32), np.asarray(starts), np.asarray(ends))
    for ours, exact in zip((got, *pull(w)), (out, *grads), strict=True):
        assert error(np.asarray(ours, np.float32), exact) < 8e-3


@interpreted
def test_a_ring_of_two_computed_rank_by_rank(backend):
    """What `ring_forward` and `ring_backward` ask of the kernels, in their order, with keys and values in one array; the interpreter knows one device only."""
    rng, ranks, length, scale = np.random.default_rng(1), 2, 128, 64**-0.5
    q, k, v, w = (jnp.asarray(rng.standard_normal((1, 256, n, 64)), jnp.bfloat16) for n in (2, 1, 1, 2))
    ends = jnp.asarray(np.where(np.arange(256) < 250, np.arange(1, 257), 0)[None].astype(np.int32))
    starts = jnp.where(ends > 100, 100, 0)
    order = token_order("zigzag", ranks, 256)
    part = lambda x, r: x[:, order][:, r * length : (r + 1) * length]
    kv = [jnp.stack([part(k, r), part(v, r)]) for r in range(ranks)]
    interval = lambda r, s: [ring.local_interval(part(x, r), "zigzag", ranks, s, length) for x in (starts, ends)]
    outs, dqs, dkvs = [], [], [jnp.zeros((2, 1, length, 1, 64))] * ranks
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
        dqs.append(dq)
    together = lambda parts: np.asarray(jnp.concatenate([x.astype(jnp.float32) for x in parts], 1))[
        :, np.argsort(order)
    ]
    got = [together(outs), together(dqs), *(together([x[n] for x in dkvs]) for n in range(2))]
    wide = tuple(np.asarray(x, np.float32) for x in (q, k, v))
    out, _, _, *grads = oracle(*wide, np.asarray(w, np.float32), np.asarray(starts), np.asarray(ends))
    for ours, exact in zip(got, (out, *grads), strict=True):
        assert error(ours, exact) < 8e-3
