"""Everything that must not change the maths, in every pair: `benchmarks/parity.py` runs the full product."""

import dataclasses
import os

import jax
import numpy as np
import pytest

from benchmarks import parity
from jaxllm import step
from jaxllm.data.batch import to_device
from support import batch_on, error, mesh, rows, tiny


@pytest.mark.parametrize("case", parity.pairs(), ids=lambda case: "-".join(str(value) for value in case.values()))
def test_loss_and_gradients_are_those_of_one_device(case):
    found, path = parity.errors(case)
    assert parity.fits(found, case["matmul"]), (found, path)


@pytest.mark.parametrize(
    ("only", "said"),
    [
        (["expert=3"], "no case has expert=3; of those chosen it has 1, 2, 4, 8"),
        (["experts=None", "expert=2"], "no case has expert=2; of those chosen it has 1"),
        (["expart=2"], "no case has expart=2; factors are sequence, data, expert, experts"),
    ],
)
def test_a_part_of_the_product_without_a_case_is_no_success(only, said, capsys, monkeypatch):
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):  # the command sets them
        monkeypatch.setenv(name, os.environ.get(name, ""))
    with pytest.raises(SystemExit):
        parity.main(["--pairs", "--only", *only])
    assert said in capsys.readouterr().err


def curve(sequence, steps=50):
    """Losses and gradient norms of 50 bfloat16 steps on one changing batch of random documents."""
    cfg = tiny(
        "precision.compute=bfloat16", "attention.communication=ring", "optimizer.learning_rate=1e-3", f"steps={steps}"
    )
    device_mesh = mesh(sequence=sequence)
    with jax.set_mesh(device_mesh):
        graphdef, state = step.init_state(cfg)
        train_step, seen = step.make_train_step(graphdef, cfg), []
        for number in range(steps):
            state, metrics = train_step(state, batch_on(device_mesh, seed=number % 5))
            seen.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return np.array(seen)


def test_fifty_bfloat16_steps_over_a_ring_follow_the_curve_of_one_device():
    """The loss hides what the gradient norm shows: both."""
    alone, ring = curve(1), curve(4)
    assert alone[-1, 0] < alone[0, 0] - 0.5, "it learns"
    assert np.abs(ring[:, 0] - alone[:, 0]).max() < 1e-3
    assert np.abs(ring[:, 1] / alone[:, 1] - 1).max() < 1e-2


def test_positions_in_the_wrong_order_are_noticed():
    """What the cases above would see if positions did not travel with their tokens: gradients far beyond the tolerance."""
    cfg, device_mesh = tiny("attention.communication=ring", "model.initializer_range=0.2"), mesh(sequence=4)
    packed = rows(documents=False)
    with jax.set_mesh(device_mesh):
        graphdef, state = step.init_state(cfg)
        right = to_device(packed, 1, device_mesh)
        unmoved = jax.device_put(packed["positions"][None], right.positions.sharding)
        gradients = jax.jit(lambda batch: step.gradients(graphdef, state.params, batch, cfg)[0])
        got, want = gradients(dataclasses.replace(right, positions=unmoved)), gradients(right)
    path = "layers/self_attn/q_proj/kernel"
    assert error(got[path], want[path]) > 100 * parity.ALLOWED["compute"][1]
