"""Attention over a split sequence: layouts, masks of chunks, and the ring against the float64 oracle, on emulated devices.

Which test holds which promise of context parallelism (without a file: here; "contract" is test_attention_contract.py):

  1 rings of 1 to 8 are the float64 oracle, errors do not grow: test_outputs_and_gradients_equal_the_float64_oracle,
   test_bfloat16_errors_do_not_grow_with_the_ring
  2 layouts are permutations and change nothing: test_a_layout_is_a_permutation_that_gives_each_rank_its_chunks, CASES
  3 intervals are the mask: test_intervals_of_chunks_are_the_mask
  4 documents are isolated to the bit; 5 causality to the bit: test_documents_do_not_see_each_other_and_tokens_not_what_follows
  6 edges of windows: test_window_edges; as Mistral's: test_model.py
  7 rows, devices and documents of padding, garbage in them: test_padding_of_whole_devices_gives_exact_zeros_whatever_stands_there, contract
  8 large and equal logits, early and late maxima: test_a_row_maximum_that_comes_early_or_late_is_the_same, test_equal_logits_..., contract
  9 any order and number of pieces, infinite lse: test_chunks_may_be_folded_in_any_order_and_number, test_merging_with_lse_far_apart_or_infinite
10 what is skipped is not computed and not sent, equal work: test_executed_tiles_are_the_same_on_every_rank, test_dead_steps_are_not_sent,
   test_zigzag_gives_..., tiles in test_attention_hopper.py and test_attention_triton.py
11 grouped heads without repeated keys: test_keys_are_never_repeated_for_their_query_heads, contract (4 heads a key head), CASES
12 gradients of keys come home: test_gradients_of_keys_come_home
13 every hop behind a kernel; 14 memory is the formula: h100/test_ring_for_h100.py
15 no spills, tensor cores, asynchronous copies: h100/test_hopper_plans.py, test_attention_triton.py (every plan)
16 two runs agree to the bit: test_equal_logits_give_the_mean_and_a_repeated_run_the_same_bits; on a GPU: python -m benchmarks.gpu
17 recomputation does not repeat the ring: test_recomputation_repeats_no_transfer_of_what_is_saved_by_name; policies x meshes: test_parity.py
18 jit, scan, vmap, other axes; accumulation; donation: test_other_mesh_axes_vmap_and_scan, test_a_shard_map_that_checks_...; test_parity.py;
   h100/test_hopper_plans.py (folds and sums copy nothing)
19 what does not divide is refused, or completed before: test_a_row_that_does_not_divide_..., test_an_odd_number_of_tokens_...,
   test_what_completes_..., the backends' files; test_parity.py
20 positions travel with tokens, and it shows if they do not: test_parity.py, test_model.py (far positions on a ring)
21 every backend against one oracle: contract; cuDNN on a GPU: python -m benchmarks.gpu
22 ragged documents: test_ragged_documents
23 fifty steps on a ring follow the curve of one device: test_parity.py
24 compiles for CUDA with every JAX, no races in the interpreter: h100/*.py, contract
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from attention_contract import oracle
from jaxllm.attention import AttentionConfig
from jaxllm.attention import attention as attention_over_mesh
from jaxllm_kernels import LAYOUTS, Plan, attention, live_steps, load_backend, ring, token_order, windowed
from support import error, mesh, rows

pytestmark = pytest.mark.version
QUICK = {"xla_backend_optimization_level": 0}
ROW = 64


def split(ranks):
    return jax.make_mesh((ranks,), ("ring",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:ranks])


def inputs(rng, B=2, length=ROW, H=4, K=2, D=16, dtype=np.float32, documents=True, seed=1):
    q, k, v, weight = (rng.standard_normal((B, length, n, D)).astype(dtype) for n in (H, K, K, H))
    packed = rows(num_rows=B, length=length, seed=seed, documents=documents)
    return q, k, v, packed["k_start"], packed["k_end"], weight


def over(ranks, layout, communication="ring", window=None):
    """value_and_grad of sum(attention x weight) over a ring, taking and giving arrays in the row's own order."""

    def total(q, k, v, k_start, k_end, weight):
        local = functools.partial(attention, axis="ring", layout=layout, communication=communication, window=window)
        call = jax.shard_map(local, in_specs=P(None, "ring"), out_specs=P(None, "ring"), check_vma=False)
        out = call(q, k, v, k_start, k_end)
        return jnp.sum(out.astype(jnp.float32) * weight.astype(jnp.float32)), out

    # each program runs a few times: LLVM's passes take longer than all of that
    compute = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True), compiler_options=QUICK)

    def run(*arrays):
        order = token_order(layout, ranks, arrays[0].shape[1])
        back = np.argsort(order)
        with jax.set_mesh(split(ranks)):
            (_, out), grads = compute(*(x[:, order] for x in arrays))
        return [np.asarray(x.astype(jnp.float32))[:, back] for x in (out, *grads)]

    return run


# --- layouts and masks: numpy only -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("ranks", "chunk"), [(1, 3), (2, 1), (4, 5), (8, 7)])
def test_a_layout_is_a_permutation_that_gives_each_rank_its_chunks(layout, ranks, chunk):
    length = ranks * 2 * chunk
    order = token_order(layout, ranks, length)
    assert np.array_equal(np.sort(order), np.arange(length))
    for rank, held in enumerate(order.reshape(ranks, -1)):
        want = np.arange(rank * 2 * chunk, (rank + 1) * 2 * chunk)
        if layout == "zigzag":
            last = 2 * ranks - 1 - rank
            want = np.r_[rank * chunk : (rank + 1) * chunk, last * chunk : (last + 1) * chunk]
        assert np.array_equal(held, want)


def test_a_row_that_does_not_divide_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"63 tokens does not divide into 8 chunks \(zigzag over 4\)"):
        token_order("zigzag", 4, 63)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(LAYOUTS), st.sampled_from([1, 2, 4, 8]), st.integers(1, 6))
def test_intervals_of_chunks_are_the_mask(data, layout, ranks, chunk):
    """Random documents, padding and windows: what the interval says of a rank's keys is what the mask says of them."""
    length = ranks * 2 * chunk
    real = data.draw(st.integers(0, length))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(real - 1, 1)), max_size=6)) | {0, real})
    window = data.draw(st.none() | st.integers(1, length + 1))
    document = np.searchsorted(cuts, np.arange(length), side="right") * (np.arange(length) < real)
    i, j = np.arange(length)[:, None], np.arange(length)[None, :]
    mask = (document[i] == document[j]) & (document[i] > 0) & (j <= i) & (window is None or i - j < (window or 1))
    starts = np.array([np.flatnonzero(document == d)[0] if d else 0 for d in document])
    k_end = np.where(document > 0, np.arange(length) + 1, 0)
    k_start = np.asarray(windowed(np.where(document > 0, starts, 0), k_end, window))
    order = token_order(layout, ranks, length).reshape(ranks, -1)
    for rank, held in enumerate(order):
        low, high = (np.asarray(ring.local_interval(x, layout, ranks, rank, len(held))) for x in (k_start, k_end))
        place = np.arange(len(held))[None]
        assert np.array_equal((place >= low[:, None]) & (place < high[:, None]), mask[:, held])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_live_steps_are_those_in_which_somebody_sees_something(layout, ranks):
    length = 8
    order = token_order(layout, ranks, ranks * length).reshape(ranks, -1)
    for window in [None, *range(1, ranks * length + 2)]:
        far = ranks * length if window is None else window
        distance = order[:, None, :, None] - order[None, :, None, :]
        sees = np.any((distance >= 0) & (distance < far), axis=(2, 3))  # [rank of queries, rank of keys]
        want = [s for s in range(ranks) if any(sees[r, (r - s) % ranks] for r in range(ranks))]
        assert live_steps(layout, ranks, length, window) == want, window


def test_live_steps_of_the_windows_in_the_literature_of_this_design():
    assert live_steps("contiguous", 8, 256, 64) == [0, 1]
    assert live_steps("zigzag", 8, 256, 64) == [0, 1, 7]
    assert live_steps("zigzag", 8, 256, 256) == [0, 1, 2, 6, 7]


def test_zigzag_gives_every_rank_the_same_number_of_scores_at_every_step():
    ranks, length = 8, 16
    k_end = np.arange(ranks * length) + 1
    order = token_order("zigzag", ranks, ranks * length).reshape(ranks, -1)
    for step in range(ranks):
        work = [
            int(
                np.asarray(
                    ring.local_interval(k_end[order[rank]], "zigzag", ranks, (rank - step) % ranks, length)
                ).sum()
            )
            for rank in range(ranks)
        ]
        assert len(set(work)) == 1, (step, work)


# --- the ring against the oracle -------------------------------------------------------------------------------------

CASES = [
    # ranks, layout, communication, window, heads and documents
    (1, "zigzag", "ring", None, {}),
    (2, "zigzag", "ring", None, {}),
    (4, "zigzag", "ring", None, {}),
    (8, "zigzag", "ring", None, {}),
    (4, "contiguous", "ring", None, {}),
    (4, "zigzag", "ring", 5, {}),
    (8, "zigzag", "ring", 9, {}),
    (4, "contiguous", "ring", 5, {}),
    (8, "contiguous", "ring", 20, {}),
    (4, "zigzag", "allgather", None, {}),
    (8, "zigzag", "allgather", 9, {}),
    (4, "contiguous", "allgather", None, {}),
    (4, "zigzag", "ring", None, dict(documents=False)),
    (4, "zigzag", "ring", None, dict(H=4, K=1)),
    (4, "zigzag", "ring", None, dict(H=2, K=2)),
    (2, "zigzag", "ring", None, dict(B=1, length=36)),
]


@pytest.mark.parametrize(("ranks", "layout", "communication", "window", "shape"), CASES, ids=str)
def test_outputs_and_gradients_equal_the_float64_oracle(rng, ranks, layout, communication, window, shape):
    q, k, v, k_start, k_end, weight = inputs(rng, **shape)
    got = over(ranks, layout, communication, window)(q, k, v, k_start, k_end, weight)
    out, _, *grads = oracle(q, k, v, np.asarray(windowed(k_start, k_end, window)), k_end, weight)
    for name, ours, exact in zip(("out", "dq", "dk", "dv"), got, (out, *grads), strict=True):
        assert error(ours, exact) < 2e-6, name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("communication", ["ring", "allgather"])
def test_what_completes_a_devices_tokens_for_the_tiles_takes_no_part(rng, monkeypatch, communication, layout):
    """18 tokens of heads of 16 on each device, for a backend with tiles of 16 and heads of 24, as the kernels of GPUs have them."""
    backend = load_backend("xla")
    monkeypatch.setattr(backend, "TILE", 16)
    monkeypatch.setattr(backend, "HEAD_DIMS", (24,))
    q, k, v, k_start, k_end, weight = inputs(rng, length=72)
    for window in (None, 20):
        got = over(4, layout, communication, window)(q, k, v, k_start, k_end, weight)
        out, _, *grads = oracle(q, k, v, np.asarray(windowed(k_start, k_end, window)), k_end, weight)
        for name, ours, exact in zip(("out", "dq", "dk", "dv"), got, (out, *grads), strict=True):
            assert error(ours, exact) < 2e-6, name


def test_window_edges(rng):
    """Windows of one token, around a chunk and around a device's share: one program per window, the mask off by one nowhere."""
    q, k, v, k_start, k_end, weight = inputs(rng, B=1, documents=False)
    for window in (1, 7, 8, 9, 15, 16, 17, 32, 64, 65):
        got = over(4, "zigzag", "ring", window)(q, k, v, k_start, k_end, weight)
        out, _, *grads = oracle(q, k, v, np.maximum(k_start, k_end - window), k_end, weight)
        for ours, exact in zip(got, (out, *grads), strict=True):
            assert error(ours, exact, floor=1.0) < 5e-6, window
    assert error(over(4, "zigzag", "ring", 1)(q, k, v, k_start, k_end, weight)[0], np.repeat(v, 2, 2)) < 1e-6


def test_documents_do_not_see_each_other_and_tokens_not_what_follows(rng):
    q, k, v, _, _, weight = inputs(rng, B=1)
    second, real = slice(11, 42), np.arange(ROW) < 60  # the second document touches three devices
    k_start = np.where(real, np.repeat([0, 11, 42], [11, 31, 22]), 0).astype(np.int32)[None]
    k_end = np.where(real, np.arange(ROW) + 1, 0).astype(np.int32)[None]
    run = over(4, "zigzag")
    before = run(q, k, v, k_start, k_end, weight)
    changed = [x.copy() for x in (q, k, v)]
    for x in changed:
        x[:, second] += 1
    after = run(*changed, k_start, k_end, weight)
    others = np.setdiff1d(np.arange(ROW), np.arange(second.start, second.stop))
    for a, b in zip(before, after, strict=True):
        assert np.array_equal(a[:, others], b[:, others]) and not np.array_equal(a[:, second], b[:, second])
    for token in (7, 8, 9, 15, 16, 17, 31, 32, 33, 55, 56, 57):  # around edges of chunks and of devices
        later = [x.copy() for x in (k, v)]
        for x in later:
            x[:, token] += 1
        assert np.array_equal(run(q, *later, k_start, k_end, weight)[0][:, :token], before[0][:, :token])


def test_padding_of_whole_devices_gives_exact_zeros_whatever_stands_there(rng):
    q, k, v, _, _, weight = inputs(rng, B=2)
    real = np.arange(ROW) < 9  # device 2 and 3 of the zigzag hold padding alone
    k_end = np.broadcast_to(np.where(real, np.arange(ROW) + 1, 0), (2, ROW)).astype(np.int32)
    k_start = np.zeros_like(k_end)
    results = []
    for filler in (0.0, np.nan, 1e30):
        filled = [np.where(real[None, :, None, None], x, np.float32(filler)) for x in (q, k, v)]
        results.append(over(4, "zigzag")(*filled, k_start, k_end, weight * real[None, :, None, None]))
        assert not any(np.any(x[:, ~real]) for x in results[-1])
    for other in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("late", [False, True], ids=["first", "last"])
def test_a_row_maximum_that_comes_early_or_late_is_the_same(rng, late):
    """Keys a thousand times larger on one device: the running maximum jumps at the first or at the last step."""
    q, k, v, k_start, k_end, weight = inputs(rng, B=1, documents=False)
    k[:, 0 if late else 8] *= 1000
    got = over(4, "zigzag")(q, k, v, k_start, k_end, weight)
    want = oracle(q, k, v, k_start, k_end, weight)
    assert error(got[0], want[0]) < 2e-4  # float32 logits of some thousands have errors of some 1e-4
    assert all(np.isfinite(x).all() for x in got)


@pytest.mark.parametrize("communication", ["ring", "allgather"])
def test_bfloat16_errors_do_not_grow_with_the_ring(rng, communication):
    given_ = [x.astype(jnp.bfloat16) if x.dtype == np.float32 else x for x in inputs(rng, length=256, B=1)]
    exact = oracle(*(np.asarray(x, np.float32) if x.dtype == jnp.bfloat16 else x for x in given_))
    errors = {}
    for ranks in (1, 8):
        got = over(ranks, "zigzag", communication)(*given_)
        errors[ranks] = [error(a, b) for a, b in zip(got, (exact[0], *exact[2:]), strict=True)]
    assert all(many <= 1.2 * max(one, 2**-9) for many, one in zip(errors[8], errors[1], strict=True)), errors


def test_ragged_documents(rng):
    """Documents of one token, of a chunk and one more, over three devices, and 64 of one token each."""
    q, k, v, _, _, weight = inputs(rng, B=1)
    run = over(4, "zigzag")
    for sizes in ([1, 9, 1, 25, 8, 7, 13], [64], [1] * 64):
        starts = np.repeat(np.cumsum([0, *sizes[:-1]]), sizes).astype(np.int32)[None]
        ends = np.arange(1, ROW + 1, dtype=np.int32)[None]
        want = oracle(q, k, v, starts, ends, weight)
        for ours, exact in zip(run(q, k, v, starts, ends, weight), (want[0], *want[2:]), strict=True):
            assert error(ours, exact, floor=1.0) < 2e-6, sizes


def test_equal_logits_give_the_mean_and_a_repeated_run_the_same_bits(rng):
    q, k, v, k_start, k_end, weight = inputs(rng, B=1, documents=False)
    run = over(4, "zigzag")
    got = run(q, np.zeros_like(k), v, k_start, k_end, weight)
    mean = np.cumsum(v.astype(np.float64), 1) / np.arange(1, ROW + 1)[None, :, None, None]
    assert error(got[0], np.repeat(mean, 2, 2)) < 1e-6
    for first, second in zip(run(q, k, v, k_start, k_end, weight), run(q, k, v, k_start, k_end, weight), strict=True):
        assert np.array_equal(first, second)


def test_gradients_of_keys_come_home(rng):
    """The slope of the loss along a change of one device's keys and values alone, by finite differences."""
    q, k, v, k_start, k_end, weight = inputs(rng, B=1, documents=False)
    run, order = over(4, "zigzag"), token_order("zigzag", 4, ROW).reshape(4, -1)
    value = lambda k, v: float(np.sum(run(q, k, v, k_start, k_end, weight)[0].astype(np.float64) * weight))
    _, _, dk, dv = run(q, k, v, k_start, k_end, weight)
    for held in order:
        step = np.zeros_like(k)
        step[:, held] = 0.01 * rng.standard_normal(step[:, held].shape)
        slope = value(k + step, v + step) - value(k - step, v - step)
        assert slope == pytest.approx(2 * float(np.sum((dk + dv) * step)), rel=2e-2, abs=2e-4)


@pytest.mark.parametrize("names", [("rows", "ring"), ("ring", "rows")])
def test_other_mesh_axes_vmap_and_scan(rng, names):
    """A mesh with a second axis before or after the ring's, inside jit, scan and vmap."""
    q, k, v, k_start, k_end, weight = inputs(rng, B=4)
    sizes = [2 if name == "rows" else 4 for name in names]
    mesh = jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = P("rows", "ring")

    def local(*arrays):
        one = lambda *row: attention(*(x[None] for x in row), axis="ring", layout="zigzag")[0]
        return jax.vmap(one)(*arrays)

    def total(q, k, v, k_start, k_end, weight):
        call = jax.shard_map(local, in_specs=spec, out_specs=spec, check_vma=False)
        twice = lambda x, _: (call(x, k, v, k_start, k_end), None)
        return jnp.sum(jax.lax.scan(twice, q, None, length=2)[0] * weight)

    order = token_order("zigzag", 4, ROW)
    with jax.set_mesh(mesh):
        got = jax.jit(jax.grad(total, (0, 1, 2)))(*(x[:, order] for x in (q, k, v, k_start, k_end, weight)))
    out = oracle(q, k, v, k_start, k_end, weight)[0].astype(np.float32)
    _, _, middle, dk2, dv2 = oracle(out, k, v, k_start, k_end, weight)
    _, _, dq, dk1, dv1 = oracle(q, k, v, k_start, k_end, middle.astype(np.float32))
    back = np.argsort(order)
    for ours, exact in zip(got, (dq, dk1 + dk2, dv1 + dv2), strict=True):
        assert error(np.asarray(ours)[:, back], exact) < 5e-6


def test_chunks_may_be_folded_in_any_order_and_number(rng):
    """Two to 32 chunks of keys, shuffled; some that a row sees nothing of come first, in the middle and last."""
    q, k, v, k_start, k_end, weight = inputs(rng, B=1)
    want, lse, *_ = oracle(q, k, v, k_start, k_end, weight)
    backend = load_backend("xla")
    for count in (2, 4, 32):
        carry, size = backend.empty(q), ROW // count
        for chunk in rng.permutation(count):
            part = slice(chunk * size, (chunk + 1) * size)
            ends = (np.clip(bound - chunk * size, 0, size) for bound in (k_start, k_end))
            carry = backend.fold(carry, q, k[:, part], v[:, part], *ends, scale=16**-0.5)
        out, got = backend.finish(carry, np.float32)
        assert error(out, want) < 1e-6
        assert np.array_equal(np.isinf(got), np.isinf(lse))
        assert np.abs(np.where(np.isinf(lse), 0, got - np.where(np.isinf(lse), 0, lse))).max() < 1e-5


@pytest.mark.parametrize("far", [-np.inf, -200.0, -110.0, 0.0, 110.0, 200.0])
def test_merging_with_lse_far_apart_or_infinite(far):
    """Forms with log(1 + exp(d)) or a sigmoid give inf or NaN here."""
    backend = load_backend("xla")
    q, key = np.ones((1, 1, 1, 16), np.float32), np.full((1, 1, 1, 16), far / 4, np.float32)
    seen = np.array([[0 if np.isinf(far) else 1]], np.int32)
    carry = backend.fold(backend.empty(q), q, np.where(np.isinf(key), 0, key), 2 + 0 * q, 0 * seen, seen, scale=0.25)
    for _ in range(2):
        carry = backend.fold(
            carry, q, 0 * key if np.isfinite(far) else 0 * q, 3 * q, 0 * seen, 0 * seen + 1, scale=0.25
        )
    out, lse = backend.finish(carry, np.float32)
    share = 0.0 if np.isinf(far) else 1 / (1 + 2 * np.exp(-np.float64(far)))
    assert np.allclose(out, 2 * share + 3 * (1 - share), atol=1e-6)
    assert np.allclose(lse, np.logaddexp(far, np.log(2.0)), rtol=1e-6)
    nothing = backend.fold(backend.empty(q), q, 0 * q, q, 0 * seen, 0 * seen, scale=0.25)
    out, lse = backend.finish(nothing, np.float32)
    assert not np.any(out) and np.all(np.isneginf(lse))


# --- what is sent ----------------------------------------------------------------------------------------------------


def program(ranks, layout, window, H=4, K=2):
    q, k, v, k_start, k_end, weight = inputs(np.random.default_rng(0), B=1, H=H, K=K)

    def total(q, k, v):
        call = jax.shard_map(
            functools.partial(attention, axis="ring", layout=layout, window=window),
            in_specs=P(None, "ring"), out_specs=P(None, "ring"), check_vma=False,
        )  # fmt: skip
        return jnp.sum(call(q, k, v, k_start, k_end) * weight)

    with jax.set_mesh(split(ranks)):
        return str(jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(q, k, v))


def test_dead_steps_are_not_sent():
    """Forward: one transfer less than live steps. Backward: those, as many for gradients, and the way home."""
    for layout, window in (("zigzag", None), ("contiguous", 5), ("zigzag", 5), ("contiguous", 1)):
        live = len(live_steps(layout, 8, 8, window))
        home = 1 if live > 1 else 0
        assert program(8, layout, window).count("= ppermute[") == 3 * (live - 1) + home, (layout, window)


def test_recomputation_repeats_no_transfer_of_what_is_saved_by_name(rng):
    """Out and lse saved by name: the backward pass sends what it sends without recomputation, and its gradients are the same."""
    q, k, v, k_start, k_end, weight = inputs(rng)
    config = AttentionConfig(communication="ring")

    def total(q, k, v):
        return jnp.sum(attention_over_mesh(q, k, v, k_start, k_end, config, layout="zigzag") * weight)

    save = jax.checkpoint_policies.save_only_these_names("attn_out", "attn_lse")
    sent, grads = {}, {}
    ways = {"none": total, "all but names": jax.checkpoint(total, policy=save), "all": jax.checkpoint(total)}
    with jax.set_mesh(mesh(sequence=2)):
        for name, function in ways.items():
            gradients = jax.grad(function, (0, 1, 2))
            sent[name] = str(jax.make_jaxpr(gradients)(q, k, v)).count("= ppermute[")
            if name != "all":
                grads[name] = jax.jit(gradients)(q, k, v)
    assert sent == {"none": 4, "all but names": 4, "all": 5}
    assert max(error(a, b) for a, b in zip(*grads.values(), strict=True)) < 2e-6


def test_keys_are_never_repeated_for_their_query_heads():
    """Five chunks of keys against three of queries, so that no other array has the shape of keys repeated for all query heads."""
    q, k, v, k_start, k_end, _ = inputs(np.random.default_rng(0), B=1, length=80, H=8, K=2)
    arrays = q[:, :48], k, v, k_start[:, :48], k_end[:, :48]
    total = lambda q, k, v, *rows: jnp.sum(attention(q, k, v, *rows))
    text = str(jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(*arrays))
    assert "1,80,2,16]" in text and "1,48,8,16]" in text
    assert "1,80,8,16]" not in text and "8,80,16]" not in text


def test_executed_tiles_are_the_same_on_every_rank():
    """Tiles of 128 x 128 that the Hopper kernels' loop bounds visit over a causal ring, against a count of the tiles that hold a visible pair."""
    from jaxllm_kernels import attention_hopper as hopper

    ranks, length, plan = 4, 1024, hopper.FORWARD[128]
    order = token_order("zigzag", ranks, ranks * length).reshape(ranks, -1)
    visited = []
    for rank in range(ranks):
        visited.append(0)
        for step in range(ranks):
            keys = order[(rank - step) % ranks]
            ends = ring.local_interval(jnp.asarray(order[rank] + 1), "zigzag", ranks, (rank - step) % ranks, length)
            intervals = jnp.stack([jnp.zeros_like(ends), ends])[None].astype(jnp.int32)
            bounds = np.asarray(hopper.row_bounds(intervals, plan))
            count = int((bounds[..., 3] - bounds[..., 0]).sum())
            seen = (keys[None] <= order[rank][:, None]).reshape(8, 128, 8, 128).any((1, 3))
            assert count == seen.sum(), (rank, step)
            visited[-1] += count
    assert visited == [132] * ranks  # 32 x 33 / 2 tiles of the whole row, shared by four


def test_an_odd_number_of_tokens_on_a_device_is_refused_for_zigzag(rng):
    """jaxllm completes rows before; whoever calls the kernels has to."""
    arrays = inputs(rng, B=1, length=36)[:5]
    with (
        pytest.raises(ValueError, match="an even number of tokens on each device for zigzag, got 9; pad the rows"),
        jax.set_mesh(split(4)),
    ):
        local = functools.partial(attention, axis="ring", layout="zigzag")
        jax.eval_shape(
            jax.shard_map(local, in_specs=P(None, "ring"), out_specs=P(None, "ring"), check_vma=False), *arrays
        )


def test_a_shard_map_that_checks_types_is_served_by_xla_and_refused_by_name_by_kernels():
    """jax.shard_map checks which values vary over its axes unless told otherwise; kernels of GPUs do not say."""
    q, k = (jax.ShapeDtypeStruct((1, 4 * 2048, heads, 64), jnp.bfloat16) for heads in (2, 1))
    interval = jax.ShapeDtypeStruct((1, 4 * 2048), jnp.int32)

    def gradients(backend, *arrays):
        local = functools.partial(attention, axis="ring", layout="zigzag", backend=backend)
        call = jax.shard_map(local, in_specs=P(None, "ring"), out_specs=P(None, "ring"))
        total = lambda q, k, v, *ends: jnp.sum(call(q, k, v, *ends).astype(jnp.float32))
        return jax.eval_shape(jax.grad(total, (0, 1, 2)), *arrays)

    arrays = q, k, k, interval, interval
    with jax.set_mesh(split(4)):
        assert [x.shape for x in gradients("xla", *arrays)] == [x.shape for x in arrays[:3]]
        for backend in ("hopper", "triton"):
            with pytest.raises(ValueError, match=f"jax.shard_map.*check_vma=False.* around backend = '{backend}'"):
                gradients(backend, *arrays)


def test_a_plan_that_cannot_be_is_refused_by_name():
    with pytest.raises(ValueError, match="layout = 'zigzag' without an axis"):
        Plan(layout="zigzag")
    for field, value in (
        ("backend", "cuda"),
        ("layout", "striped"),
        ("communication", "ulysses"),
        ("communication", "none"),
        ("window", 0),
        ("window", 2.5),
        ("window", True),
    ):
        with pytest.raises(ValueError, match=f"{field} = {value!r}"):
            Plan(**{field: value})
