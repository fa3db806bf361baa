"""Optimizer, schedules, clipping: against torch, published values and plain Python arithmetic."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
import pytest

from jaxllm import optim
from jaxllm.optim import OptimizerConfig, decays, learning_rate, norm_and_factor
from jaxllm.section import UserError

STEPS = 50
SHAPES = {
    "layers/mlp/gate_proj/kernel": (2, 8, 6),
    "layers/input_layernorm/weight": (2, 8),
    "layers/self_attn/q_proj/bias": (2, 2, 4),
}


def init(config, params):
    """The state of parameters none of whose dims a mesh may split."""
    whole = {
        path: [not (path.startswith("layers/") and dim == 0) for dim in range(x.ndim)] for path, x in params.items()
    }
    return optim.init(config, params, whole)


def reference_rate(config, steps, n):
    """The documented formulas in Python floats, written without the product's code."""
    peak, warmup = config.learning_rate, config.warmup_steps
    floor = peak * config.min_ratio
    if n < warmup:
        return peak * n / warmup
    if config.schedule == "constant":
        return peak
    if config.schedule == "wsd":
        left = steps - n
        return peak if left >= config.decay_steps else floor + (peak - floor) * left / config.decay_steps
    if config.schedule == "smp_cosine":  # AnnealingLR.get_lr, decay_style "cosine"
        return max(peak / 2.0 * (math.cos(math.pi * (min(n, steps - warmup) - warmup) / steps) + 1), floor)
    progress = (n - warmup) / (steps - warmup)
    if config.schedule == "linear":
        return peak - (peak - floor) * progress
    return floor + (peak - floor) * (1 + math.cos(math.pi * progress)) / 2


SCHEDULES = {
    "constant": {},
    "linear": {},
    "cosine": {},
    "wsd": {"decay_steps": 12},
    "smp_cosine": {},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_adamw_clipping_and_schedule_follow_torch_for_50_steps(schedule, max_grad_norm, rng):
    torch = pytest.importorskip("torch")
    config = OptimizerConfig(
        schedule=schedule, learning_rate=2e-2, warmup_steps=7, max_grad_norm=max_grad_norm, **SCHEDULES[schedule]
    )
    start = {path: rng.normal(size=shape).astype(np.float32) for path, shape in SHAPES.items()}
    weights = {path: torch.nn.Parameter(torch.tensor(value)) for path, value in start.items()}
    decayed = weights["layers/mlp/gate_proj/kernel"]
    reference = torch.optim.AdamW(
        [
            {"params": [decayed]},
            {"params": [weight for weight in weights.values() if weight is not decayed], "weight_decay": 0.0},
        ],
        lr=config.learning_rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1,
    )  # fmt: skip
    rates = torch.optim.lr_scheduler.LambdaLR(
        reference, lambda epoch: reference_rate(config, STEPS, epoch + 1) / config.learning_rate
    )
    rate = learning_rate(config, STEPS)

    @jax.jit
    def step(params, state, grads, n):
        norm, factor = norm_and_factor(grads, jnp.float32(1), config.max_grad_norm)
        return *optim.update(config, params, grads, state, rate=rate(n), factor=factor), norm

    params = {path: jnp.asarray(value) for path, value in start.items()}
    state = init(config, params)
    clipped = 0
    for n in range(1, STEPS + 1):
        scale = 10.0 ** rng.uniform(-2, 0)  # some norms below the limit, some above
        grads = {path: (scale * rng.normal(size=shape)).astype(np.float32) for path, shape in SHAPES.items()}
        for path, weight in weights.items():
            weight.grad = torch.tensor(grads[path])
        expected = torch.nn.utils.clip_grad_norm_(weights.values(), max_grad_norm or math.inf)
        assert float(rate(n)) == pytest.approx(rates.get_last_lr()[0], abs=1e-8)
        reference.step()
        rates.step()
        params, state, norm = step(params, state, grads, jnp.int32(n))
        assert float(norm) == pytest.approx(float(expected), rel=1e-6)
        clipped += float(norm) > max_grad_norm > 0
        for path, weight in weights.items():
            np.testing.assert_allclose(
                params[path], weight.detach().numpy(), atol=1e-5, rtol=0, err_msg=f"{path}, step {n}"
            )
    assert 5 < clipped < STEPS - 5 if max_grad_norm else clipped == 0


def test_sgd_with_decay_follows_torch(rng):
    torch = pytest.importorskip("torch")
    path = "embed_tokens/embedding"
    start, grad = (rng.normal(size=(4, 3)).astype(np.float32) for _ in range(2))
    weight = torch.nn.Parameter(torch.tensor(start))
    weight.grad = torch.tensor(grad)
    torch.optim.SGD([weight], lr=0.3, weight_decay=0.2).step()
    config, params = OptimizerConfig(kind="sgd", weight_decay=0.2), {path: jnp.asarray(start)}
    after, _ = optim.update(config, params, {path: jnp.asarray(grad)}, init(config, params), rate=0.3)
    np.testing.assert_allclose(after[path], weight.detach().numpy(), atol=1e-6)


def test_llama3_405b_schedule_has_its_published_values():
    rate = learning_rate(OptimizerConfig(learning_rate=8e-5, min_ratio=0.01, warmup_steps=8000), steps=1_200_000)
    golden = {0: 0.0, 4000: 4e-5, 8000: 8e-5, 604_000: 4.04e-5, 1_200_000: 8e-7}
    for step, value in golden.items():
        assert float(rate(step)) == pytest.approx(value, rel=1e-5, abs=1e-12)


def test_smp_cosine_is_cut_off_by_its_floor_and_does_not_reach_it_smoothly():
    config = OptimizerConfig(schedule="smp_cosine", learning_rate=1e-4, min_ratio=0.1, warmup_steps=153)
    steps = 47_683
    rate = learning_rate(config, steps)
    for step in (1, 152, 153, 154, 10_000, 30_000, 37_000, 40_000, steps - 153, steps):
        assert float(rate(step)) == pytest.approx(reference_rate(config, steps, step), rel=1e-5)
    assert float(rate(steps - 153)) == pytest.approx(1e-5) and float(rate(40_000)) == pytest.approx(1e-5)
    assert float(rate(37_000)) > 1.1e-5  # a smooth cosine to the floor would still be well above it at 40,000


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_peak_at_the_last_warmup_step_and_floor_at_the_last_step_whatever_the_accumulation(schedule, num_microbatches):
    config = OptimizerConfig(
        learning_rate=1e-3, schedule=schedule, warmup_steps=10, min_ratio=0.1, num_microbatches=num_microbatches
    )
    values = np.asarray(jax.vmap(learning_rate(config, 100))(jnp.arange(1, 101)))
    assert values[0] == pytest.approx(1e-4)  # the first step is used
    assert values[9] == pytest.approx(1e-3, rel=1e-6) and values.max() == pytest.approx(1e-3, rel=1e-6)
    assert values[99] == pytest.approx(1e-4, rel=1e-6)
    assert (np.diff(values[:10]) > 0).all() and (np.diff(values[10:]) <= 0).all()
    if schedule == "wsd":  # unset decay_steps: the last tenth
        assert values[89] == pytest.approx(1e-3) and values[90] < 1e-3


def test_the_floor_holds_after_the_last_step():
    for schedule in ("linear", "cosine", "wsd", "smp_cosine"):
        config = OptimizerConfig(learning_rate=1e-3, schedule=schedule, warmup_steps=2)
        assert float(learning_rate(config, 20)(35)) == pytest.approx(1e-4, rel=1e-5)


def test_warmup_or_decay_longer_than_the_run_is_refused_with_both_numbers():
    with pytest.raises(UserError, match=r"warmup_steps: 30 .*steps = 20"):
        learning_rate(OptimizerConfig(warmup_steps=30), 20)
    with pytest.raises(UserError, match=r"decay_steps: 15 .*warmup_steps = 10.*steps = 20"):
        learning_rate(OptimizerConfig(schedule="wsd", warmup_steps=10, decay_steps=15), 20)


def test_decay_mask_of_every_parameter_of_a_llama():
    blocks = {
        f"layers/self_attn/{name}_proj/{kind}": kind == "kernel" for name in "qkvo" for kind in ("kernel", "bias")
    } | {
        f"layers/mlp/{name}_proj/{kind}": kind == "kernel"
        for name in ("gate", "up", "down")
        for kind in ("kernel", "bias")
    }
    expected = blocks | {
        "embed_tokens/embedding": True,
        "lm_head/kernel": True,
        "norm/weight": False,
        "layers/input_layernorm/weight": False,
        "layers/post_attention_layernorm/weight": False,
    }
    assert {path: decays(path) for path in expected} == expected
    # and the optimizer acts on it: with zero gradients only decayed weights move
    params = {path: jnp.ones((2, 2)) for path in expected}
    config = OptimizerConfig(weight_decay=0.5)
    after, _ = optim.update(config, params, jax.tree.map(jnp.zeros_like, params), init(config, params), rate=1.0)
    assert {path: bool((value == 0.5).all()) for path, value in after.items()} == expected
    assert all((after[path] == 1).all() for path, decayed in expected.items() if not decayed)


def test_no_decay_pattern_that_matches_nothing_is_refused():
    params = {"embed_tokens/embedding": jnp.ones((2, 2)), "norm/weight": jnp.ones(2)}
    init(OptimizerConfig(no_decay=["embed_tokens/*"]), params)
    with pytest.raises(UserError, match="no_decay: 'embed_token/\\*' matches no parameter"):
        init(OptimizerConfig(no_decay=["embed_token/*"]), params)


def test_clipping_sums_in_float32_and_passes_non_finite_norms_on():
    grads = {"a": jnp.full((4096,), 0.5, jnp.bfloat16), "b": jnp.full((2, 2), 3.0)}
    norm, factor = norm_and_factor(grads, jnp.float32(0.5), 1.0)
    exact = 0.5 * math.sqrt(4096 * 0.25 + 36)
    assert norm.dtype == jnp.float32 and float(norm) == pytest.approx(exact, rel=1e-6)
    assert float(factor) == pytest.approx(0.5 / exact, rel=1e-5)
    assert float(norm_and_factor({"b": jnp.full((2, 2), 0.1)}, jnp.float32(1), 1.0)[1]) == 1
    assert float(norm_and_factor(grads, jnp.float32(0.5), 0.0)[1]) == 0.5
    assert math.isinf(float(norm_and_factor({"b": jnp.array([jnp.inf, 1.0])}, jnp.float32(1), 1.0)[0]))
    assert math.isnan(float(norm_and_factor({"b": jnp.array([jnp.nan, 1.0])}, jnp.float32(1), 1.0)[0]))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"betas": [0.9]}, "two numbers in"),
        ({"betas": [0.9, 1.0]}, "two numbers in"),
        ({"schedule": "cosine", "decay_steps": 5}, 'only optimizer.schedule = "wsd" uses it'),
        ({"kind": "sgd", "moments": "8bit"}, 'optimizer.moments: "sgd" has no moments, got "8bit"'),
        ({"kind": "sgd", "moments_memory": "host"}, 'optimizer.moments_memory: "sgd" has no moments'),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"learning_rate": float("nan")}, "learning_rate"),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields, message):
    with pytest.raises(pydantic.ValidationError, match=message):
        OptimizerConfig(**fields)


def test_a_run_may_do_a_part_of_its_schedule():
    whole, part = OptimizerConfig(warmup_steps=5), OptimizerConfig(warmup_steps=5, schedule_steps=100)
    n = jnp.arange(1, 41)
    assert np.array_equal(learning_rate(whole, 100)(n), learning_rate(part, 40)(n))
    with pytest.raises(UserError, match="schedule_steps.*30.*steps = 40"):
        learning_rate(OptimizerConfig(schedule_steps=30), 40)
