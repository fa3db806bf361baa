"""Mixtral 8x7B compiled for H100s that are not here: memory, collectives, kernels. Compiled, not measured."""

import importlib.util
import pathlib

import jax
import pytest

from jaxllm import config, plan

ROOT = pathlib.Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.h100,
    pytest.mark.version,
    pytest.mark.skipif(not importlib.util.find_spec("jax_cuda13_plugin"), reason="needs the extra `plan`"),
]


@pytest.fixture(scope="module")
def on_16():
    return plan.report(config.load_config(ROOT / "configs" / "mixtral_8x7b.toml"), "h100:2x8")


def test_mixtral_8x7b_at_4096_fits_16_gpus_without_copying_an_array_to_all(on_16):
    assert on_16["memory_gib"]["need"] <= 56
    assert on_16["memory_gib"]["weights"] == pytest.approx(46.7e9 * 4 / 16 / 2**30, rel=1e-3)
    assert not [line for line in on_16["warnings"] if "copied whole" in line]


def test_experts_are_computed_by_our_kernels_and_products_outside_are_those_of_the_rest(on_16):
    """Each layer: attention forward, dq and dkv; three grouped products forward, three again in the backward pass (the gradient of the router's weights
    needs what the experts made), and for each a gradient of rows and one of weights."""
    layers = 32
    kept = jax.version.__version_info__ >= (0, 11)  # the attention kernel once more, see test_step_for_h100
    assert on_16["custom_calls"]["mosaic_gpu_v2"] == layers * (3 + kept + 3 + 3 + 6)
    model = config.load_config(ROOT / "configs" / "mixtral_8x7b.toml").model
    attention = 2 * model.hidden_size * model.head_dim * (model.num_attention_heads + model.num_key_value_heads)
    router, head = model.hidden_size * model.num_local_experts, model.vocab_size * model.hidden_size
    products = 6 * (layers * (attention + router) + head) + 2 * layers * (attention + router)
    assert on_16["flops_per_step_per_device"] == pytest.approx(4096 * products, rel=0.02)


def test_weights_of_experts_are_gathered_between_nodes_and_tokens_inside_them(on_16):
    gathered = [c for c in on_16["collectives"] if c["kind"] == "all-gather" and c["dtype"] == "bf16"]
    one_expert = 2 * 4096 * 14336
    assert {c["bytes"] for c in gathered} >= {one_expert}, "one matrix of one expert at a time"
    tokens = 8 * 4096 * 4096 * 2
    assert tokens in {c["bytes"] for c in gathered}
