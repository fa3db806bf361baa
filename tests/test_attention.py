"""Attention against its contract in float64: every interval mask, odd lengths, grouped heads, both directions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.attention import AttentionConfig, choose_backend, choose_communication, describe, one_document
from jaxllm.attention import attention as attention_over_mesh
from jaxllm.section import UserError
from jaxllm_kernels import Plan, attention, attention_forward, reference, windowed
from support import error, mesh, mesh_name, rows, tiny

pytestmark = pytest.mark.version
BACKENDS = ("xla",)  # that run here; kernels for GPUs are interpreted in files of their own


def inputs(rng, B=2, length=96, H=4, K=2, D=16, dtype=np.float32, scale=1.0):
    q = (rng.standard_normal((B, length, H, D)) * scale).astype(dtype)
    k, v, weight = (rng.standard_normal((B, length, n, D)).astype(dtype) for n in (K, K, H))
    packed = rows(num_rows=B, length=length, seed=1)
    return q, k, v, packed["k_start"], packed["k_end"], weight


def oracle(q, k, v, k_start, k_end, weight):
    """out, lse and gradients of sum(out * weight), in float64 numpy, written independently of the package."""
    q, k, v, weight = (x.astype(np.float64) for x in (q, k, v, weight))
    groups, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    k_all, v_all = np.repeat(k, groups, 2), np.repeat(v, groups, 2)
    scores = np.einsum("bthd,bshd->bhts", q, k_all) * scale
    index = np.arange(k.shape[1])
    seen = ((index >= k_start[..., None]) & (index < k_end[..., None]))[:, None]
    peak = np.where(seen, scores, -np.inf).max(-1, keepdims=True)
    p = np.where(seen, np.exp(np.where(seen, scores, 0) - np.where(np.isfinite(peak), peak, 0)), 0.0)
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + np.where(np.isfinite(peak), peak, 0))[..., 0]
    p = p / np.where(total > 0, total, 1)
    out = np.einsum("bhts,bshd->bthd", p, v_all)
    dp = np.einsum("bthd,bshd->bhts", weight, v_all)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * scale
    fold = lambda x: x.reshape(*x.shape[:2], k.shape[2], groups, x.shape[3]).sum(3)
    dq, dk = np.einsum("bhts,bshd->bthd", ds, k_all), fold(np.einsum("bhts,bthd->bshd", ds, q))
    return out, lse, dq, dk, fold(np.einsum("bhts,bthd->bshd", p, weight))


def run(backend, aligned, q, k, v, k_start, k_end, weight):
    plan = Plan(backend, aligned=aligned)
    out, lse = jax.jit(lambda *a: attention_forward(plan, *a))(q, k, v, k_start, k_end)
    total = lambda q, k, v: jnp.sum(attention(q, k, v, k_start, k_end, backend=backend, aligned=aligned) * weight)
    return out, lse, *jax.jit(jax.grad(total, (0, 1, 2)))(q, k, v)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "any"])
@pytest.mark.parametrize(
    "shape", [dict(), dict(H=4, K=4), dict(H=4, K=1), dict(length=7), dict(B=1, length=1501, H=2, K=1)], ids=str
)
def test_outputs_and_gradients_equal_the_float64_oracle(rng, backend, aligned, shape):
    given = inputs(rng, **shape)
    for name, got, want in zip(
        ("out", "lse", "dq", "dk", "dv"), run(backend, aligned, *given), oracle(*given), strict=True
    ):
        finite = np.isfinite(want)
        assert np.array_equal(finite, np.isfinite(got)), name
        assert error(np.where(finite, got, 0), np.where(finite, want, 0)) < 2e-6, name


def test_the_reference_is_what_the_oracle_says(rng):
    given = inputs(rng)
    out, lse = reference.attention(*given[:5])
    want_out, want_lse, *_ = oracle(*given)
    assert error(out, want_out) < 1e-6
    assert np.array_equal(np.isinf(want_lse), np.isinf(lse))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_that_sees_nothing_gets_zero_and_gives_no_gradient(rng, backend):
    q, k, v, _, _, weight = inputs(rng)
    empty = np.zeros(q.shape[:2], np.int32)
    out, lse, *grads = run(backend, True, q, k, v, empty, empty, weight)
    assert not np.any(out) and np.all(np.asarray(lse) == -np.inf) and not any(np.any(g) for g in grads)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_stands_at_padding_places_has_no_influence(rng, backend):
    q, k, v, k_start, k_end, weight = inputs(rng)
    padding = k_end == k_start
    weight[padding] = 0  # no loss there
    assert padding.any()
    results = []
    for filler in (0.0, np.nan, 1e30):
        filled = [np.where(padding[..., None, None], np.float32(filler), x) for x in (q, k, v)]
        out, _, *grads = run(backend, True, *filled, k_start, k_end, weight)
        results.append(
            [
                np.asarray(x)[~padding]
                for x in (attention(*filled, k_start, k_end, backend=backend, aligned=True), *grads)
            ]
        )
    for other in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [1, 63, 65, 127, 129])
@pytest.mark.parametrize("head_dim", [16, 80])
def test_lengths_and_head_dims_that_fit_no_block(rng, backend, length, head_dim):
    given = inputs(rng, B=1, length=length, H=2, K=1, D=head_dim)
    for got, want in zip(run(backend, True, *given)[2:], oracle(*given)[2:], strict=True):
        assert error(got, want, floor=1.0) < 1e-5  # of one key only, dq and dk are exactly 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_masked_keys_lose_against_the_lowest_genuine_logits(rng, backend):
    q, k, v, _, _, weight = inputs(rng, length=8)
    k = np.broadcast_to(-1e4 * q[:, :, :1] / np.linalg.norm(q[:, :, :1], axis=-1, keepdims=True), k.shape).astype(
        np.float32
    )
    k_start, k_end = np.zeros((2, 8), np.int32), np.broadcast_to(np.arange(1, 9, dtype=np.int32), (2, 8))
    out, *_ = run(backend, True, q, k, v, k_start, k_end, weight)
    assert error(out, oracle(q, k, v, k_start, k_end, weight)[0]) < 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_stays_within_twice_the_error_of_the_reference_in_bfloat16(rng, backend):
    given = inputs(rng, length=256)
    half = tuple(x.astype(jnp.bfloat16) if x.dtype == np.float32 else x for x in given)
    total = lambda q, k, v: jnp.sum(reference.attention(q, k, v, *given[3:5])[0].astype(jnp.float32) * given[5])
    same_dtype = (reference.attention(*half[:5])[0], *jax.grad(total, (0, 1, 2))(*half[:3]))
    total = lambda q, k, v: jnp.sum(
        attention(q, k, v, *given[3:5], backend=backend, aligned=True).astype(jnp.float32) * given[5]
    )
    got = (attention(*half[:5], backend=backend, aligned=True), *jax.grad(total, (0, 1, 2))(*half[:3]))
    want = oracle(*(np.asarray(x, np.float32) if x.ndim == 4 else x for x in half[:5]), given[5])
    for name, ours, theirs, exact in zip(("out", "dq", "dk", "dv"), got, same_dtype, (want[0], *want[2:]), strict=True):
        bound = max(error(np.asarray(theirs, np.float32), exact), 2**-9)  # one rounding to bfloat16 is always allowed
        assert error(np.asarray(ours, np.float32), exact) < 2 * bound, name


def test_nothing_of_size_queries_times_keys_is_made(rng):
    q, k, v, k_start, k_end, weight = inputs(rng, B=1, length=1024, H=2, K=1)
    total = lambda q, k, v: jnp.sum(attention(q, k, v, k_start, k_end, aligned=True) * weight)
    text = str(jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(q, k, v))
    assert "1024,1024]" not in text and "2048,1024]" not in text


@pytest.mark.parametrize(
    "sizes",
    [dict(data=2), dict(sequence=2), dict(data=2, sequence=4), dict(expert=2, sequence=2, replica=2)],
    ids=mesh_name,
)
def test_attention_does_not_depend_on_the_mesh(rng, sizes):
    q, k, v, k_start, k_end, weight = inputs(rng, B=4)
    total = lambda q, k, v: jnp.sum(attention_over_mesh(q, k, v, k_start, k_end, AttentionConfig()) * weight)
    with jax.set_mesh(mesh(**sizes)):
        got = jax.jit(jax.value_and_grad(total, (0, 1, 2)))(q, k, v)
    want = oracle(q, k, v, k_start, k_end, weight)
    for ours, exact in zip(got[1], want[2:], strict=True):
        assert error(ours, exact) < 2e-6


# --- choosing --------------------------------------------------------------------------------------------------------

H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"


def test_auto_takes_the_backend_that_fits_the_device_the_dtype_and_the_head_dim(monkeypatch):
    choose = lambda *args: choose_backend(AttentionConfig(), *args)
    assert choose(H100, "bfloat16", 128) == choose("NVIDIA H200", "bfloat16", 80) == "hopper"
    assert choose(H100, "float32", 128) == choose("cpu", "bfloat16", 128) == choose(H100, "bfloat16", 512) == "xla"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert choose(A100, "bfloat16", 128) == "xla"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert choose(A100, "bfloat16", 128) == "triton"


@pytest.mark.parametrize(
    ("backend", "device", "dtype", "head_dim", "said"),
    [
        ("hopper", "cpu", "bfloat16", 128, "for NVIDIA's Hopper GPUs.*'cpu'"),
        ("hopper", A100, "bfloat16", 128, "Hopper.*A100"),
        ("hopper", H100, "float32", 128, "precision.compute is float32"),
        ("hopper", H100, "bfloat16", 320, "up to 256.*320"),
        ("triton", "cpu", "bfloat16", 128, "NVIDIA.*'cpu'"),
        ("cudnn", "cpu", "bfloat16", 128, "NVIDIA.*'cpu'"),
    ],
)
def test_a_backend_that_does_not_fit_is_refused_with_the_reason(backend, device, dtype, head_dim, said):
    with pytest.raises(UserError, match=rf"attention.backend: '{backend}' does not fit: .*{said}"):
        choose_backend(AttentionConfig(backend=backend), device, dtype, head_dim)


def test_ring_or_allgather_by_the_inequality():
    """The thresholds of the H100 inside a node are those of the design's table for Llama-8B heads, scaled to 60% of its peak."""
    choose = lambda length, shards=8, heads=(32, 8): choose_communication(
        AttentionConfig(), shards, length, *heads, H100
    )
    needed = 2 * 8 * 0.6 * 989.4e12 / (32 * 0.8 * 450e9)
    assert choose(int(needed) - 1)[0] == "allgather" and choose(int(needed) + 1)[0] == "ring"
    assert 800 < needed < 850
    assert choose(4096, heads=(32, 32))[0] == "ring" and choose(2048, heads=(32, 32))[0] == "allgather"
    name, why = choose(4096, shards=16)
    assert name == "allgather" and "between nodes" in why and "40 GB/s" in why
    assert "between nodes" in choose_communication(AttentionConfig(), 2, 16384, 32, 8, H100, None, 16)[1]
    forced = AttentionConfig(communication="ring")
    assert choose_communication(forced, 8, 2, 32, 8, "cpu") == ("ring", "attention.communication asks for it")
    windowed_ = choose_communication(AttentionConfig(), 8, 16384, 32, 8, H100, 128)
    assert windowed_[0] == "allgather" and "128 keys for each" in windowed_[1]
    assert "as for H100 SXM, cpu is not listed" in choose_communication(AttentionConfig(), 8, 4096, 32, 8, "cpu")[1]
    assert choose_communication(AttentionConfig(), 16, 65536, 32, 8, "NVIDIA L40S")[0] == "allgather"


def test_what_is_chosen_is_said():
    with jax.set_mesh(mesh(sequence=4)):
        cfg = tiny("data.seq_len=57")
        said = describe(cfg.attention, cfg.model, cfg.precision.compute, cfg.data.seq_len)
    assert said.startswith("attention: xla, zigzag over 4 devices, allgather (16 tokens a device; a hop would not hide")
    with jax.set_mesh(mesh(data=2)):
        assert describe(cfg.attention, cfg.model, cfg.precision.compute, 64) == "attention: xla"


def test_inputs_that_do_not_go_together_are_refused(rng):
    q, k, v, k_start, k_end, _ = inputs(rng)
    for arrays, said in (
        ((q, k, v[:, :, :1], k_start, k_end), r"k, v \[B, S, K, D\]"),
        ((q, k[..., :8], v[..., :8], k_start, k_end), "one B and one D"),
        ((q, k.astype(np.float16), v.astype(np.float16), k_start, k_end), "one dtype"),
        ((q[:, :, :3], k, v, k_start, k_end), "multiple of the key heads"),
        ((q, k, v, k_start[0], k_end), r"k_start int32\[2, 96\]"),
        ((q, k, v, k_start, k_end.astype(np.float32)), r"k_end int32\[2, 96\], got float32"),
        ((q, k[:, :90], v[:, :90], k_start, k_end), "T == S for self-attention"),
        ((q[:, :0], k[:, :0], v[:, :0], k_start[:, :0], k_end[:, :0]), "at least one query"),
    ):
        with pytest.raises(ValueError, match=said):
            attention(*arrays, aligned=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_that_comes_back_to_padding_has_no_influence(rng, backend):
    q, k, v, k_start, k_end, weight = inputs(rng)
    padding = (k_end == k_start)[..., None, None]
    pull = jax.vjp(lambda *a: attention(*a, k_start, k_end, backend=backend, aligned=True), q, k, v)[1]
    clean, dirty = (pull(np.where(padding, np.float32(filler), weight)) for filler in (0.0, np.nan))
    assert all(np.array_equal(a, b) for a, b in zip(clean, dirty, strict=True))


def test_rows_of_one_document_for_cudnn(rng):
    """Its mask, tried with the XLA implementation of the same function; rows it cannot express come out as NaN, never wrong."""
    q, k, v, *_ = inputs(rng)
    real = np.arange(96) < np.array([[96], [70]])
    k_end = np.where(real, np.arange(96) + 1, 0).astype(np.int32)
    for window in (None, 9):
        k_start = np.asarray(windowed(np.zeros_like(k_end), k_end, window))
        got = one_document(q, k, v, k_start, k_end, window=window, implementation="xla")
        assert error(got, oracle(q, k, v, k_start, k_end, q)[0]) < 2e-6
    packed = np.where(real, 5, 0).astype(np.int32) * (np.arange(96) >= 5)
    assert np.isnan(one_document(q, k, v, packed, k_end, window=None, implementation="xla")).all()
    with pytest.raises(UserError, match=r'attention.backend: "cudnn" knows no packed rows'):
        tiny("attention.backend=cudnn")
    with pytest.raises(UserError, match=r"cannot split a row over mesh.sequence = 2"):
        tiny("attention.backend=cudnn", "data.packing=none", "mesh.sequence=2")
