"""Chunked cross-entropy against float64 numpy: values, gradients, weights, z-loss, chunks, meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.loss import LossConfig, cross_entropy
from support import error, mesh, mesh_name

pytestmark = pytest.mark.version

B, T, E, V = 8, 16, 32, 96


def case(rng):
    hidden, head = rng.standard_normal((B, T, E)).astype(np.float32), rng.standard_normal((V, E)).astype(np.float32)
    weights = (rng.random((B, T)) < 0.7).astype(np.float32)
    weights[2] = 0.0
    return hidden, head, rng.integers(0, V, (B, T)).astype(np.int32), weights


def oracle(hidden, head, targets, weights, z_loss):
    """(loss_sum, z_sum, d_hidden, d_head) in float64."""
    x, w = hidden.astype(np.float64), weights.astype(np.float64)[..., None]
    logits = x @ head.T.astype(np.float64)
    lse = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)) + logits.max(-1, keepdims=True)
    onehot = np.eye(head.shape[0])[targets]
    slope = w * (np.exp(logits - lse) * (1 + 2 * z_loss * lse) - onehot)
    nll = lse - (logits * onehot).sum(-1, keepdims=True)
    return (w * nll).sum(), (w * lse**2).sum(), slope @ head, np.einsum("btv,bte->ve", slope, x)


def run(config, hidden, head, targets, weights, compute="float32"):
    loss = functools.partial(cross_entropy, config=config, compute=compute, reduce="float32")

    def total(hidden, head):
        total, loss_sum, z_sum = loss(hidden, head, targets, weights)
        return total, (loss_sum, z_sum)

    (total, (loss_sum, z_sum)), grads = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(hidden, head)
    return total, loss_sum, z_sum, *grads


@pytest.mark.parametrize("chunk", [1, 48, 100, 4096])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_loss_and_gradients_equal_float64_whatever_the_chunk(rng, chunk, z_loss):
    given = case(rng)
    total, loss_sum, z_sum, d_hidden, d_head = run(LossConfig(chunk_size=chunk, z_loss=z_loss), *given)
    want = oracle(*given, z_loss)
    assert error(loss_sum, want[0]) < 1e-6 and error(z_sum, want[1]) < 1e-6
    assert error(total, want[0] + z_loss * want[1]) < 1e-6
    assert error(d_hidden, want[2]) < 1e-6 and error(d_head, want[3]) < 1e-6


@pytest.mark.parametrize(
    "sizes", [dict(data=8), dict(replica=2, data=2, sequence=2), dict(sequence=4, expert=2)], ids=mesh_name
)
def test_the_mesh_changes_nothing(rng, sizes):
    given = case(rng)
    with jax.set_mesh(mesh(**sizes)):
        total, loss_sum, z_sum, d_hidden, d_head = run(LossConfig(chunk_size=5, z_loss=1e-4), *given)
    want = oracle(*given, 1e-4)
    assert error(loss_sum, want[0]) < 1e-6 and error(z_sum, want[1]) < 1e-6
    assert error(d_hidden, want[2]) < 1e-6 and error(d_head, want[3]) < 1e-6


def test_evaluation_takes_the_path_without_gradients_to_the_same_value(rng):
    given = case(rng)
    config = LossConfig(chunk_size=48)
    text = str(jax.make_jaxpr(lambda *a: cross_entropy(*a, config, "float32", "float32"))(*given))
    assert text.count("dot_general") == 1  # the logits, and no product for a gradient
    assert error(cross_entropy(*given, config, "float32", "float32")[1], oracle(*given, 0.0)[0]) < 1e-6


def test_uniform_logits_give_the_logarithm_of_the_vocabulary(rng):
    hidden, head, targets, _ = case(rng)
    total, loss_sum, z_sum, *_ = run(LossConfig(z_loss=1e-4), hidden, head * 0, targets, np.ones((B, T), np.float32))
    assert float(loss_sum) / (B * T) == pytest.approx(np.log(V), rel=1e-6)
    assert 1e-4 * float(z_sum) / (B * T) == pytest.approx(1e-4 * np.log(V) ** 2, rel=1e-6)


def test_log_softmax_is_float32_under_bfloat16_compute(rng):
    hidden, head, targets, weights = case(rng)
    rounded = lambda x: np.asarray(jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32))
    want = oracle(rounded(hidden), rounded(head), targets, weights, 0.0)
    _, loss_sum, _, d_hidden, d_head = run(
        LossConfig(), jnp.asarray(hidden, jnp.bfloat16), head, targets, weights, "bfloat16"
    )
    assert abs(float(loss_sum) - want[0]) / weights.sum() < 1e-4  # products of bfloat16 are exact in float32
    assert error(np.asarray(d_hidden, np.float32), want[2]) < 2**-7 and error(d_head, want[3]) < 2**-7


@pytest.mark.parametrize("filler", [1e30, np.inf, np.nan])
def test_tokens_of_weight_zero_may_hold_anything(rng, filler):
    hidden, head, targets, weights = case(rng)
    clean = run(LossConfig(z_loss=1e-4), hidden, head, targets, weights)
    hidden[2, 3] = filler  # row 2 has weight 0
    for got, want in zip(run(LossConfig(z_loss=1e-4), hidden, head, targets, weights), clean, strict=True):
        assert np.array_equal(got, want)


def test_nothing_trained_is_zero_and_finite(rng):
    hidden, head, targets, weights = case(rng)
    values = run(LossConfig(z_loss=1e-4), hidden, head, targets, weights * 0)
    assert all(not np.any(v) and np.all(np.isfinite(v)) for v in values)
