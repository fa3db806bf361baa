"""Attention on XLA for lengths and head dims that fit no block, attention over a mesh, and the choice of backend and communication.

What every backend must do is in test_attention_contract.py."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_contract import RESULTS, oracle
from jaxllm.attention import (
    AttentionConfig,
    calls_per_pass,
    choose_backend,
    choose_communication,
    describe,
    one_document,
)
from jaxllm.attention import attention as attention_over_mesh
from jaxllm.data.batch import abstract_batch
from jaxllm.section import UserError
from jaxllm_kernels import Plan, attention, attention_forward, reference
from support import error, mesh, mesh_name, rows, tiny

pytestmark = pytest.mark.version


def inputs(rng, B=2, length=96, H=4, K=2, D=16, dtype=np.float32, scale=1.0):
    q = (rng.standard_normal((B, length, H, D)) * scale).astype(dtype)
    k, v, weight = (rng.standard_normal((B, length, n, D)).astype(dtype) for n in (K, K, H))
    packed = rows(num_rows=B, length=length, seed=1)
    return q, k, v, packed["k_start"], packed["k_end"], weight


def gradients(aligned, q, k, v, k_start, k_end, weight):
    """out, lse and the gradients of sum(out * weight)."""
    out, lse = jax.jit(lambda *a: attention_forward(Plan("xla", aligned=aligned), *a))(q, k, v, k_start, k_end)
    total = lambda q, k, v: jnp.sum(attention(q, k, v, k_start, k_end, aligned=aligned) * weight)
    return out, lse, *jax.jit(jax.grad(total, (0, 1, 2)))(q, k, v)


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "any"])
@pytest.mark.parametrize("shape", [dict(), dict(length=7), dict(B=1, length=1501, H=2, K=1)], ids=str)
def test_outputs_and_gradients_equal_the_float64_oracle(rng, aligned, shape):
    given = inputs(rng, **shape)
    for name, got, want in zip(RESULTS, gradients(aligned, *given), oracle(*given), strict=True):
        finite = np.isfinite(want)
        assert np.array_equal(finite, np.isfinite(got)), name
        assert error(np.where(finite, got, 0), np.where(finite, want, 0)) < 2e-6, name


def test_the_reference_is_what_the_oracle_says(rng):
    given = inputs(rng)
    out, lse = reference.attention(*given[:5])
    want_out, want_lse, *_ = oracle(*given)
    assert error(out, want_out) < 1e-6
    assert np.array_equal(np.isinf(want_lse), np.isinf(lse))


@pytest.mark.parametrize("length", [1, 63, 65, 127, 129])
@pytest.mark.parametrize("head_dim", [16, 80])
def test_lengths_and_head_dims_that_fit_no_block(rng, length, head_dim):
    given = inputs(rng, B=1, length=length, H=2, K=1, D=head_dim)
    for got, want in zip(gradients(True, *given)[2:], oracle(*given)[2:], strict=True):
        assert error(got, want, floor=1.0) < 1e-5  # of one key only, dq and dk are exactly 0


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
        ("cudnn", H100, "bfloat16", 100, "multiples of 8, and model.head_dim is 100"),
    ],
)
def test_a_backend_that_does_not_fit_is_refused_with_the_reason(backend, device, dtype, head_dim, said):
    with pytest.raises(UserError, match=rf"attention.backend: '{backend}' does not fit: .*{said}"):
        choose_backend(AttentionConfig(backend=backend), device, dtype, head_dim)


@pytest.mark.parametrize(
    ("kind", "capability"),
    [
        ("Tesla V100-SXM2-16GB", "7.0"),
        ("Tesla T4", "7.5"),
        ("NVIDIA GeForce RTX 2080 Ti", "7.5"),
        ("Quadro RTX 8000", "7.5"),
    ],
)
def test_cards_before_ampere_are_refused_by_name_and_auto_does_without_their_kernels(monkeypatch, kind, capability):
    card = types.SimpleNamespace(device_kind=kind, compute_capability=capability)
    monkeypatch.setattr(jax, "local_devices", lambda: [card])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    for backend in ("triton", "cudnn"):
        said = rf'8.0 \(Ampere.*{kind}.* has {capability}; attention.backend = "xla" runs there'
        with pytest.raises(UserError, match=f"attention.backend: '{backend}' does not fit: .*{said}"):
            choose_backend(AttentionConfig(backend=backend), kind, "bfloat16", 128)
    assert choose_backend(AttentionConfig(), kind, "bfloat16", 128) == "xla"
    card.compute_capability = "8.6"
    assert choose_backend(AttentionConfig(), kind, "bfloat16", 128) == "triton"
    with pytest.raises(UserError, match="before Hopper cuDNN takes head dims up to 128, and model.head_dim is 256"):
        choose_backend(AttentionConfig(backend="cudnn"), kind, "bfloat16", 256)


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


def test_an_odd_number_of_tokens_a_device_is_described_and_counted_as_it_is_laid_out():
    """24 tokens with a window lie in 8 parts of 3, and 5 last keys begin two devices before."""
    model, ring = tiny("model.family=mistral", "model.sliding_window=5").model, AttentionConfig(communication="ring")
    devices = mesh(sequence=8)
    with jax.set_mesh(devices):
        assert abstract_batch(devices, 1, 1, 24, 5).tokens.shape[2] == 24
        said = describe(AttentionConfig(), model, "float32", 24)
        assert said.startswith("attention: xla, contiguous over 8 devices, allgather (3 tokens a device")
        assert calls_per_pass(ring, model, 24) == 3


def test_inputs_that_do_not_go_together_are_refused(rng):
    q, k, v, k_start, k_end, _ = inputs(rng)
    for arrays, said in (
        ((q, k, v[:, :, :1], k_start, k_end), r"k, v \[B, S, K, D\]"),
        ((q, k[..., :8], v[..., :8], k_start, k_end), "one B and one D"),
        ((q, k.astype(np.float16), v.astype(np.float16), k_start, k_end), "one dtype"),
        ([x.astype(np.float64) for x in (q, k, v)] + [k_start, k_end], "float32, bfloat16 or float16 .*, got float64"),
        ((q[:, :, :3], k, v, k_start, k_end), "multiple of the key heads"),
        ((q, k, v, k_start[0], k_end), r"k_start int32\[2, 96\]"),
        ((q, k, v, k_start, k_end.astype(np.float32)), r"k_end int32\[2, 96\], got float32"),
        ((q, k[:, :90], v[:, :90], k_start, k_end), "T == S for self-attention"),
        ((q[:, :0], k[:, :0], v[:, :0], k_start[:, :0], k_end[:, :0]), "at least one query"),
    ):
        with pytest.raises(ValueError, match=said):
            attention(*arrays, aligned=True)


def test_rows_that_cudnns_mask_cannot_express_are_refused_or_nan(rng):
    """NaN, never wrong: tried with the XLA implementation of the same function. Rows that it can are in test_attention_contract.py."""
    q, k, v, k_start, k_end, _ = inputs(rng)
    compute = functools.partial(one_document, q, k, v, implementation="xla", with_lse=True)
    causal = np.broadcast_to(np.arange(1, 97, dtype=np.int32), k_end.shape)
    one = np.isfinite(compute(0 * causal, np.where(np.arange(96) < 70, causal, 0), window=None)[0])
    assert one.all() and (k_start[0] > 0).any()
    for start, end, window in (
        (k_start, k_end, None),  # several documents
        (0 * causal, causal, 9),  # a window that the intervals do not have
        (np.maximum(causal - 9, 0), causal, None),  # and one that only they have
        (0 * causal, causal - 1, None),  # a query that does not see itself
    ):
        bad = np.asarray(compute(start, end, window=window)[0])
        assert np.isnan(bad[0]).all()
    with pytest.raises(UserError, match=r'attention.backend: "cudnn" knows no packed rows'):
        tiny("attention.backend=cudnn")
    with pytest.raises(UserError, match=r"cannot split a row over mesh.sequence = 2"):
        tiny("attention.backend=cudnn", "data.packing=none", "mesh.sequence=2")
