"""Optimizers, schedules, decay mask and clipping, as optax transformations over the flat dict {path: array}.

Chosen: the learning rate stays outside the optax chain (the step multiplies), so that the rate logged for a step is by
construction the rate used by it, and a run may resume with another rate without touching the optimizer's state. Weights
are float32 masters; a bfloat16 weight of 1.0 never moves under updates of 1e-3. Not here: parameter groups with their
own rates, and optimizers that nobody asked for.
"""

import fnmatch
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import optax
import pydantic

from jaxllm.section import Section, UserError

NO_DECAY = ("*norm/weight", "*/bias")  # by name: stacked over layers a norm's weight has two dims, as a matrix has


class OptimizerConfig(Section):
    """How gradients become updates."""

    kind: Literal["adamw", "sgd"] = "adamw"
    """"adamw", or "sgd": plain descent without momentum, for tests and comparisons."""
    learning_rate: float = pydantic.Field(3e-4, ge=0)
    """The peak, reached at step `warmup_steps`."""
    schedule: Literal["constant", "linear", "cosine", "wsd", "smp_cosine"] = "cosine"
    """Shape after the warm-up: constant; linear or cosine down to the floor at the last step; "wsd" (warm-up, stable,
    decay): constant, then linear over the last `decay_steps`; "smp_cosine": the annealing of SageMaker's model-parallel
    examples, for comparisons with them."""
    min_ratio: float = pydantic.Field(0.1, ge=0, le=1)
    """The floor as a share of `learning_rate`; unused by the constant schedule."""
    warmup_steps: int = pydantic.Field(0, ge=0)
    """Optimizer steps (not microbatches) of linear warm-up; step n of w uses n/w of the peak, so no step is wasted on a
    rate of zero."""
    schedule_steps: int | None = pydantic.Field(None, ge=1)
    """Steps that the schedule spans, for a run that does only a part of them now; unset: `steps`."""
    decay_steps: int | None = pydantic.Field(None, ge=1)
    """Optimizer steps of the final decay of "wsd"; unset: a tenth of all steps."""
    betas: list[float] = pydantic.Field([0.9, 0.95])
    """Decay rates of Adam's first and second moments."""
    eps: float = pydantic.Field(1e-8, gt=0)
    """Added to the square root of the second moment, outside the root."""
    weight_decay: float = pydantic.Field(0.1, ge=0)
    """Decoupled decay: each step takes learning_rate * weight_decay * weight."""
    no_decay: list[str] = pydantic.Field(list(NO_DECAY))
    """Patterns (* and ?) of parameter paths that do not decay: norms and biases. Embeddings and lm_head do decay."""
    max_grad_norm: float = pydantic.Field(1.0, ge=0)
    """Gradients are scaled down to this global L2 norm; 0: no clipping."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Storage of Adam's moments. "bfloat16" saves 4 bytes per parameter; a moment then stops following changes smaller
    than half a bfloat16 step, which leaves it up to 2^-8 / (1 - beta) off: 4% for beta = 0.9, 8% for 0.95."""
    num_microbatches: int = pydantic.Field(1, ge=1)
    """Pieces into which the global batch is cut, one after the other, to save memory; the result does not depend on
    it."""
    max_bad_steps: int = pydantic.Field(10, ge=1)
    """Steps in a row with a non-finite loss or gradient norm (each is skipped and reported) after which the run
    stops."""

    @pydantic.model_validator(mode="after")
    def _combinations(self):
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"optimizer.betas: must be two numbers in [0, 1), got {self.betas}")
        if self.moments == "bfloat16" and max(self.betas) > 1 - 2**-8:
            # 1 - beta is below half a unit in the last place: beta * moment rounds back to the moment
            raise UserError(
                f'optimizer.betas: {max(self.betas)} needs optimizer.moments = "float32"; with "bfloat16" moments '
                f"a beta above {1 - 2**-8:.4f} rounds to 1 and the moment never falls"
            )
        if self.decay_steps is not None and self.schedule != "wsd":
            raise UserError(
                'optimizer.decay_steps: only optimizer.schedule = "wsd" uses it, '
                f'got schedule = "{self.schedule}"; remove one'
            )
        return self


def learning_rate(config: OptimizerConfig, steps: int) -> Callable[[jax.typing.ArrayLike], jax.Array]:
    """The rate, f32[], used by optimizer step n of a run of `steps` (or of `schedule_steps`), n counted from 1.

    With peak P, floor F = min_ratio P, warm-up w, S steps and progress p = (n - w) / (S - w): P n/w for n < w, else
        linear       P + (F - P) p
        cosine       F + (P - F) (1 + cos(pi p)) / 2
        wsd          P, then linear down to F over the last decay_steps
        smp_cosine   max(F, P/2 (1 + cos(pi (t - w) / S))), t = min(n, S - w)
    so the peak falls on n = w and the floor on n = S. The last one has the period S and not S - w, and its floor cuts
    the curve off instead of bending it: that is `AnnealingLR` in aws/amazon-sagemaker-examples, model_parallel_v2/
    shared-scripts/learning_rates.py, whose update n uses the value at n - 1 (its first update does nothing); here
    update n uses the value at n. UserError if warm-up and decay do not fit into `steps`.
    """
    if config.schedule_steps is not None:
        if config.schedule_steps < steps:
            raise UserError(
                f"optimizer.schedule_steps: {config.schedule_steps} is less than steps = {steps}; the schedule would end "
                "before the run"
            )
        steps = config.schedule_steps
    peak, warmup, floor = config.learning_rate, config.warmup_steps, config.min_ratio * config.learning_rate
    if warmup > steps:
        raise UserError(f"optimizer.warmup_steps: {warmup} is more than steps = {steps}")
    decay = min(steps - warmup, max(1, steps // 10)) if config.decay_steps is None else config.decay_steps
    if warmup + decay > steps:
        raise UserError(
            f"optimizer.decay_steps: {decay} after optimizer.warmup_steps = {warmup} is more than steps = {steps}"
        )
    start = steps - decay if config.schedule == "wsd" else warmup

    def at(step: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(step).astype(jnp.float32)
        progress = jnp.clip((step - start) / max(steps - start, 1), 0.0, 1.0)
        if config.schedule == "constant":
            rate = jnp.full_like(step, peak)
        elif config.schedule == "cosine":
            rate = floor + (peak - floor) * 0.5 * (1.0 + jnp.cos(math.pi * progress))
        elif config.schedule == "smp_cosine":
            capped = jnp.minimum(step, steps - warmup)
            rate = jnp.maximum(floor, peak / 2 * (jnp.cos(math.pi * (capped - warmup) / steps) + 1.0))
        else:
            rate = peak + (floor - peak) * progress
        return jnp.where(step < warmup, peak * step / max(warmup, 1), rate)

    return at


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """The direction of descent, before the learning rate: the step does `params - rate * updates`.

    adamw: bias-corrected m / (sqrt(v) + eps), plus weight_decay * weight where `decays`, as torch.optim.AdamW. Takes
    float32 gradients and parameters {path: array}; moments have the parameters' shapes and the dtype `config.moments`.
    """
    if config.kind == "adamw":
        scale = _stored_as(optax.scale_by_adam(*config.betas, eps=config.eps), jnp.dtype(config.moments))
    else:
        scale = optax.identity()
    mask = lambda params: _decay_mask(params, config.no_decay)
    return optax.chain(scale, optax.add_decayed_weights(config.weight_decay, mask=mask))


def decays(path: str, no_decay: list[str] | tuple[str, ...] = NO_DECAY) -> bool:
    """Whether weight decay applies to the parameter at `path`: every kernel and embedding, but no norm weight and no
    bias."""
    return not any(fnmatch.fnmatchcase(path, pattern) for pattern in no_decay)


def clip(grads: dict[str, jax.Array], max_norm: float) -> tuple[dict[str, jax.Array], jax.Array]:
    """Gradients scaled by min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_, and their global L2
    norm, f32[], before it.

    The norm sums squares in float32 over every array; max_norm = 0 only measures. A non-finite norm is returned as it
    is: the step decides.
    """
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(grad.astype(jnp.float32))) for grad in jax.tree.leaves(grads)))
    if max_norm == 0:
        return grads, norm
    factor = jnp.minimum(1.0, max_norm / (norm + 1e-6))
    return jax.tree.map(lambda grad: grad * factor.astype(grad.dtype), grads), norm


def _decay_mask(params: dict, no_decay: list[str]) -> dict[str, bool]:
    for pattern in no_decay:
        # The default patterns may match nothing (many models have no biases); one that a user wrote may not.
        if pattern not in NO_DECAY and not fnmatch.filter(params, pattern):
            raise UserError(
                f"optimizer.no_decay: {pattern!r} matches no parameter; there are {', '.join(sorted(params))}"
            )
    return {path: decays(path, no_decay) for path in params}


def _stored_as(adam: optax.GradientTransformation, dtype: jnp.dtype) -> optax.GradientTransformation:
    """`adam` computing in float32 with both moments kept in `dtype` between steps; optax's own mu_dtype covers the
    first one only."""

    def cast(state: optax.ScaleByAdamState, to: jnp.dtype) -> optax.ScaleByAdamState:
        return state._replace(mu=optax.tree.cast(state.mu, to), nu=optax.tree.cast(state.nu, to))

    def update(grads, state, params=None):
        with jax.numpy_dtype_promotion("standard"):  # optax raises a Python float to its integer step count
            updates, state = adam.update(grads, cast(state, jnp.float32), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(lambda params: cast(adam.init(params), dtype), update)
