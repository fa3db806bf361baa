"""Mixtral 8x7B compiled for H100s that are not here: memory, collectives, kernels. Compiled, not measured."""

import re

import jax
import jax.numpy as jnp
import pytest

from h100.compiled import MARKS, NEWEST, abstract, compiled_on, h100s
from jaxllm import config, exchange, plan, sharding
from jaxllm.section import UserError
from support import ROOT

pytestmark = MARKS


@pytest.fixture(scope="module")
def on_16():
    return plan.report(config.load_config(ROOT / "configs" / "mixtral_8x7b.toml"), "h100:2x8")


def test_mixtral_8x7b_at_4096_fits_16_gpus_without_copying_an_array_to_all(on_16):
    assert on_16["memory_gib"]["need"] <= 56 and on_16["memory_gib"]["need"] == pytest.approx(54.7, abs=0.5)
    assert on_16["memory_gib"]["weights"] == pytest.approx(46.7e9 * 4 / 16 / 2**30, rel=1e-3)
    assert not [line for line in on_16["warnings"] if "copied whole" in line]


def test_experts_are_computed_by_our_kernels_and_products_outside_are_those_of_the_rest(on_16):
    """Each layer: attention forward, dq and dkv; three grouped products forward, three again in the backward pass (the gradient of the router's weights
    needs what the experts made), and for each a gradient of rows and one of weights."""
    layers = 32
    assert on_16["custom_calls"]["mosaic_gpu_v2"] == layers * (3 + 3 + 3 + 6)
    model = config.load_config(ROOT / "configs" / "mixtral_8x7b.toml").model
    attention = 2 * model.hidden_size * model.head_dim * (model.num_attention_heads + model.num_key_value_heads)
    router, head = model.hidden_size * model.num_local_experts, model.vocab_size * model.hidden_size
    products = 6 * (layers * (attention + router) + head) + 2 * layers * (attention + router)
    assert on_16["flops_per_step_per_device"] == pytest.approx(4096 * products, rel=0.02)


def test_flops_with_those_of_kernels_are_the_model_s_and_what_is_computed_again(on_16):
    """6 per active weight; attention, whose kernels make 9 products of queries with keys where the model's count has 6; and the products of a layer once
    more, since rematerialisation keeps attention alone."""
    model, tokens = config.load_config(ROOT / "configs" / "mixtral_8x7b.toml").model, 4096
    active = model.matmul_parameters
    attention = model.flops_per_token(tokens) - 6 * active
    expected = tokens * (6 * active + 9 / 6 * attention + 2 * (active - model.vocab_size * model.hidden_size))
    total = on_16["flops_per_step_per_device"] + on_16["kernel_flops_per_step_per_device"]
    assert total == pytest.approx(expected, rel=0.005)


def test_weights_of_experts_are_gathered_between_nodes_and_tokens_inside_them(on_16):
    gathered = [c for c in on_16["collectives"] if c["kind"] == "all-gather" and c["dtype"] == "bf16"]
    one_expert = 2 * 4096 * 14336
    assert {c["bytes"] for c in gathered} >= {one_expert}, "one matrix of one expert at a time"
    tokens = 8 * 4096 * 4096 * 2
    assert tokens in {c["bytes"] for c in gathered}


@pytest.mark.parametrize(
    "way, factor, rows",
    [("ragged", None, [512, 512, 2048, 2048]), ("ragged", 1.5, [512, 512, 768, 768]), ("alltoall", 2, [128] * 4)],
)
def test_tokens_that_are_sent_travel_in_bounded_rows_there_and_back_in_both_directions(way, factor, rows):
    """Dispatch and combine alone, 8 places with 256 tokens and top 2. XLA:CPU has no ragged-all-to-all: nothing else compiles the real one."""
    how, mesh = exchange.Exchange(way, 8, factor), h100s(expert=8)
    shapes = ((8, 256, 512), jnp.bfloat16), ((8, 256, 2), jnp.float32), ((8, 256, 2), jnp.int32), ((8, 256), jnp.bool_)
    arguments = [abstract(mesh, *shape, sharding.BATCH) for shape in shapes]

    def there_and_back(x, weights, ids, real):
        out, _, home, _ = exchange.dispatch(x, ids, real, how)
        return jnp.sum(exchange.combine(out * out, weights, home, how, jnp.bfloat16).astype(jnp.float32) ** 2)

    text = compiled_on(mesh, jax.grad(there_and_back, (0, 1)), *arguments).as_text()
    kind = {"ragged": "ragged-all-to-all", "alltoall": "all-to-all"}[way]
    found = re.findall(rf"bf16\[(?:8,)?(\d+),512\][^=\n]* {kind}(?:-start)?\(", text)
    assert sorted(map(int, found)) == rows


@NEWEST
def test_kernels_whose_results_are_kept_run_once():
    """With "dots" nothing of a layer is computed again: three attention kernels, and a forward product, two gradients for each of three weights."""
    small = (
        "model.num_hidden_layers=2", "model.hidden_size=512", "model.intermediate_size=512", "model.num_attention_heads=4", "model.vocab_size=1024",
        "model.num_key_value_heads=4", "model.remat=dots", "mesh.data=1", "data.global_batch_size=8",
    )  # fmt: skip
    on_8 = plan.report(config.load_config(ROOT / "configs" / "mixtral_8x7b.toml", *small), "h100:8")
    assert on_8["custom_calls"]["mosaic_gpu_v2"] == 2 * (3 + 3 + 6)


FP8 = "precision.matmul=float8"
MIXED = jax.version.__version_info__ >= (0, 11)  # JAX that multiplies float8_e5m2 by float8_e4m3fn in its kernels


@pytest.mark.skipif(not MIXED, reason="kernels of JAX 0.10 cannot multiply e5m2 by e4m3; the newest pair compiles this")
def test_in_fp8_experts_multiply_in_it_throughout_and_half_the_bytes_of_weights_are_gathered(on_16):
    facts = plan.report(config.load_config(ROOT / "configs" / "mixtral_8x7b.toml", FP8), "h100:2x8")
    assert facts["fp8_share"] >= 0.99 and on_16["fp8_share"] == 0
    for counted in ("kernel_flops_per_step_per_device", "flops_per_step_per_device"):
        assert facts[counted] == on_16[counted]
    assert facts["memory_gib"]["temporaries"] <= 1.1 * on_16["memory_gib"]["temporaries"]
    size = lambda report, dtype: sum(
        c["bytes"] * c["times"] for c in report["collectives"] if c["kind"] == "all-gather" and c["dtype"] == dtype
    )
    moved = size(on_16, "bf16") - size(facts, "bf16")  # what remains are lm_head, the router and tokens
    assert size(facts, "f8e4m3fn") == pytest.approx(moved / 2, rel=0.01) and moved > 24 * 2**30
    assert not [line for line in facts["warnings"] if "copied whole" in line]


@pytest.mark.skipif(MIXED, reason="from JAX 0.11 on there is nothing to refuse; the test above compiles it")
def test_experts_in_fp8_on_hopper_are_refused_by_name_where_jax_cannot():
    message = r'precision.matmul: "float8" for experts needs JAX 0.11 .* set moe.backend = "xla"'
    with pytest.raises(UserError, match=message):
        plan.report(config.load_config(ROOT / "configs" / "mixtral_8x7b.toml", FP8), "h100:2x8")
