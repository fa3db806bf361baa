"""`Linear`, the only multiplication by a weight (with `loss`, which multiplies by lm_head in chunks, and the embedding gather).

One custom_vjp fixes what XLA would otherwise decide for each model anew: the weight is cast and pinned at rest before it is gathered, so
that the wire carries the compute dtype; its gradient leaves the matmul in the dtype of the reduction and is pinned at rest at once, so
that it becomes a reduce-scatter. Idiom and alternatives measured on the H100 compile: docs/decisions.md.

Products in FP8 keep the same two places: quantised at rest, gathered in FP8, the gradient pinned at rest (`fp8.matmul`).

With LoRA the weight is frozen, in whatever form `frozen` keeps it: it is gathered in that form, and has no gradient, and an adapter is added to the product.

Not here: the products of experts (`grouped_linear`).
"""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import pydantic
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxllm import fp8, frozen, hardware
from jaxllm.fp8 import FP8Config
from jaxllm.lora import NO_ADAPTERS, LoRAConfig, dropout, parameters
from jaxllm.section import Section, UserError
from jaxllm.sharding import AT_REST, IN_USE, axis_size, constrain


class PrecisionConfig(Section):
    param: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which trained parameters are kept (masters). "bfloat16" halves parameters and gradients; updates are then rounded stochastically, always:
    rounded to nearest, a weight of 1.0 never moves under updates of 1e-3."""
    compute: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of activations and of the weights that matmuls read. On a CPU float32 is the faster one."""
    gradient_reduce: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which weight gradients are summed over devices. bfloat16 halves that traffic and rounds every partial sum."""
    matmul: Literal["compute", "float8", "record"] = "compute"
    """How the weights of attention and MLPs (experts) are multiplied: in the compute dtype; in FP8 with delayed scaling; or in the compute dtype, with the
    magnitudes recorded that FP8 takes its scales from. Embedding, norms, router, attention itself and lm_head are always in the compute dtype."""
    fp8: FP8Config = pydantic.Field(default_factory=FP8Config)


def describe(precision: PrecisionConfig, device_kind: str) -> str:
    """One line on how weights are multiplied on such devices; UserError where they cannot do it."""
    line = f"products of weights: {precision.compute}"
    if precision.matmul == "compute":
        return line
    card, recipe = hardware.of(device_kind), precision.fp8
    is_gpu, capability = device_kind.startswith(hardware.NVIDIA), hardware.compute_capability(device_kind)
    multiplies = capability >= 8.9 if capability is not None else card is not None and card.fp8_flops is not None
    if precision.matmul == "float8" and is_gpu and not multiplies:
        has = "is not known to have them" if capability is None and card is None else "has none"
        raise UserError(
            f'precision.matmul: "float8" needs tensor cores for FP8 (L40S, RTX 40, H100, H200 and newer), and {device_kind} {has}; remove it'
        )
    rule = f"delayed scaling, {recipe.algorithm} of {recipe.history_length} steps, margin {recipe.margin}"
    if precision.matmul == "record":
        return f"{line}, and magnitudes are recorded for FP8 ({rule})"
    apart = recipe.first_layers_bfloat16, recipe.last_layers_bfloat16
    apart = f", but for the first {apart[0]} and the last {apart[1]} layers" if any(apart) else ""
    warmup = f"; up to step {recipe.warmup_steps} {precision.compute} while magnitudes are recorded"
    emulated = "" if is_gpu else f"; emulated on {device_kind}, which is slow"
    return (
        f"products of weights: FP8 ({rule}){apart}; lm_head, router and all else {precision.compute}"
        f"{warmup if recipe.warmup_steps else ''}{emulated}"
    )


def gather(weight, names, dtype, table=IN_USE):
    """The weight as a matmul reads it: cast on its shard, then gathered. Pinning the cast value at rest is what keeps XLA from gathering
    first and casting after."""
    return constrain(constrain(weight.astype(dtype), *names, table=AT_REST), *names, table=table)


def _flat(x, num_dims):
    """[*leading, *last num_dims] -> [leading, last], where the leading dims can be merged without moving data. XLA:CPU needs the 2-D form:
    it transposes both operands of a weight gradient that contracts two dims. Batch rows and tokens split over devices cannot be merged."""
    last = math.prod(x.shape[x.ndim - num_dims :])
    if axis_size("sequence") > 1:
        return x.reshape(*x.shape[: x.ndim - num_dims], last)
    return x.reshape(-1, last)


def dot(a, b, contract, dtype):
    """dot_general without batch dims, accumulated in float32 and given in `dtype`."""
    # float32 means float32: by default a GPU would round the operands to TF32 (10 bits), the router's among them.
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, (contract, ((), ())), precision=precision, preferred_element_type=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def matmul(x, kernel, names, num_inputs, compute, reduce):
    """x [*leading, *inputs] times kernel [*inputs, *outputs] -> [*leading, *outputs] in the compute dtype, accumulated in float32.

    names: logical names of the kernel's dims; num_inputs: how many of them are contracted; compute, reduce: dtype names."""
    return _matmul_forward(x, kernel, names, num_inputs, compute, reduce)[0]


def _matmul_forward(x, kernel, names, num_inputs, compute, reduce):
    outputs = kernel.shape[num_inputs:]
    used = gather(kernel, names, compute).reshape(-1, math.prod(outputs))
    flat = _flat(x.astype(compute), num_inputs)
    y = dot(flat, used, ((flat.ndim - 1,), (0,)), compute)
    # The gathered weight is the residual: under rematerialisation it costs nothing, and with the sharded one XLA gathers twice.
    return y.reshape(*x.shape[: x.ndim - num_inputs], *outputs), (
        x,
        checkpoint_name(used, "gathered"),
        jnp.zeros((0,), kernel.dtype),
    )


def _matmul_backward(names, num_inputs, compute, reduce, residuals, dy):
    x, used, like = residuals
    inputs, outputs = x.shape[x.ndim - num_inputs :], dy.shape[x.ndim - num_inputs :]
    # The barrier keeps XLA from recomputing the chain that made x or dy inside the operand of each product.
    flat, dy = jax.lax.optimization_barrier((_flat(x.astype(compute), num_inputs), _flat(dy, len(outputs))))
    dx = dot(dy, used, ((dy.ndim - 1,), (1,)), compute).reshape(x.shape).astype(x.dtype)
    leading = tuple(range(dy.ndim - 1))
    # A GPU has no product of float32 operands that comes out in bfloat16.
    dw = dot(flat, dy, (leading, leading), reduce if compute == "bfloat16" else "float32").astype(reduce)
    dw = dw.reshape(*inputs, *outputs)
    return dx, constrain(dw, *names, table=AT_REST).astype(like.dtype)


matmul.defvjp(_matmul_forward, _matmul_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def frozen_matmul(x, weight, names, inputs, outputs, compute):
    """`matmul` by a weight that has no gradient, in any form of `frozen`: gathered in that form, and made a matrix of again in the backward pass.

    inputs, outputs: shapes; the weight's dims are named `names` whatever its form."""
    return _frozen_forward(x, weight, names, inputs, outputs, compute)[0]


def _frozen_forward(x, weight, names, inputs, outputs, compute):
    used = frozen.gather(weight, names, compute)
    w, transposed = frozen.matrix(used, len(inputs), compute)
    flat = _flat(x.astype(compute), len(inputs))
    y = dot(flat, w, ((flat.ndim - 1,), (int(transposed),)), compute)
    return y.reshape(*x.shape[: x.ndim - len(inputs)], *outputs), (used, jnp.zeros((0,), x.dtype))


def _frozen_backward(names, inputs, outputs, compute, residuals, dy):
    used, like = residuals
    w, transposed = frozen.matrix(used, len(inputs), compute)
    flat = jax.lax.optimization_barrier(_flat(dy, len(outputs)))
    dx = dot(flat, w, ((flat.ndim - 1,), (int(not transposed),)), compute)
    return dx.reshape(*dy.shape[: dy.ndim - len(outputs)], *inputs).astype(like.dtype), None


frozen_matmul.defvjp(_frozen_forward, _frozen_backward)


def float8_matmul(x, kernel, scales, seen, names, num_inputs, compute, reduce):
    """`matmul` in FP8: the kernel is quantised where it rests and gathered in FP8, its gradient pinned where it rests. scales, seen: see `fp8.matmul`."""
    outputs = kernel.shape[num_inputs:]
    y = fp8.matmul(
        _flat(x, num_inputs),
        kernel,
        scales,
        compute,
        reduce,
        seen=seen,
        used=lambda q: gather(q, names, q.dtype).reshape(-1, math.prod(outputs)),
        rests=lambda dw: constrain(dw.reshape(kernel.shape), *names, table=AT_REST),
    )
    return y.reshape(*x.shape[: x.ndim - num_inputs], *outputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def add_bias(y, bias, num_outputs, compute, reduce):
    """y [*leading, *outputs] + bias [product of outputs], flat so that it rests split; its gradient is summed over tokens and devices in the
    dtype of the reduction."""
    used = gather(bias, ("bias",), compute).reshape(y.shape[y.ndim - num_outputs :])
    return y + jnp.expand_dims(used, tuple(range(y.ndim - num_outputs)))


def _add_bias_backward(num_outputs, compute, reduce, like, dy):
    db = jnp.sum(dy.astype(reduce), axis=tuple(range(dy.ndim - num_outputs))).reshape(-1)
    return dy, constrain(db, "bias", table=AT_REST).astype(like.dtype)


add_bias.defvjp(lambda y, b, *static: (add_bias(y, b, *static), jnp.zeros((0,), b.dtype)), _add_bias_backward)


def adapted(x, a, b, names, num_inputs, scale, compute, reduce):
    """scale * (x A) B, of an adapter beside a weight with dims `names`: A [*inputs, r], B [r, *outputs]."""
    with jax.named_scope("adapter"):
        inner = matmul(x, a, (*names[:num_inputs], "rank"), num_inputs, compute, reduce)
        inner = (inner.astype(jnp.float32) * scale).astype(
            inner.dtype
        )  # a scale rounded to bfloat16 would be another one
        return matmul(inner, b, ("rank", *names[num_inputs:]), 1, compute, reduce)


class Linear(nnx.Module):
    """y = x W (+ b): contracts the last dims of x, named by `inputs`, and appends the dims named by `outputs`.

    Linear({"embed": 4096}, {"heads": 32, "head_dim": 128}, precision, name="q_proj", rngs=rngs) holds kernel [4096, 32, 128]. Names, sizes,
    sharding and init of the weight are this one expression. `name` is what rematerialisation policies know the output by, and target_modules the weight.
    """

    def __init__(
        self,
        inputs: dict,
        outputs: dict,
        precision: PrecisionConfig,
        *,
        name: str,
        rngs: nnx.Rngs,
        lora: LoRAConfig = NO_ADAPTERS,
        stddev=0.02,
        use_bias=False,
    ):
        self.names, self.num_inputs, self.name = (*inputs, *outputs), len(inputs), name
        self.compute, self.reduce = precision.compute, precision.gradient_reduce
        self.shape, key = (*inputs.values(), *outputs.values()), rngs.params()
        self.kernel = frozen.kernel(lora, precision.param, self.shape, self.names, self.num_inputs, stddev, key)
        bias = lambda: nnx.Param(jnp.zeros((math.prod(outputs.values()),), precision.param), axes=("bias",))
        self.bias = bias() if use_bias else None
        self.multiply = precision.matmul
        self.scales = None if precision.matmul == "compute" else fp8.observers()
        self.lora = lora
        self.lora_a, self.lora_b = parameters(lora, name, inputs, outputs, precision.param, key)

    def __call__(self, x, noise=None):
        """x [B, T, *inputs] -> [B, T, *outputs] in the compute dtype. noise: for the adapter's dropout; see `noise`."""
        y = self._product(x)
        if self.bias is not None:
            y = add_bias(y, self.bias.get_value(), len(self.names) - self.num_inputs, self.compute, self.reduce)
        if self.lora_a is not None:
            x, ab = dropout(x, noise, self.lora, self.name), (self.lora_a.get_value(), self.lora_b.get_value())
            y += adapted(x, *ab, self.names, self.num_inputs, self.lora.scale, self.compute, self.reduce)
        return checkpoint_name(y, self.name)

    def _product(self, x):
        weight, static = frozen.value(self.kernel), (self.num_inputs, self.compute, self.reduce)
        if self.multiply == "compute" and self.lora.rank is not None:
            n = self.num_inputs
            return frozen_matmul(x, weight, self.names, self.shape[:n], self.shape[n:], self.compute)
        if self.multiply == "compute":
            return matmul(x, weight, self.names, *static)
        scales, seen = fp8.opened(self.scales)
        kernel, names = frozen.opened(weight, self.names, self.num_inputs, self.shape, self.compute)
        if self.multiply == "record":
            return fp8.recorded(lambda x, kernel: matmul(x, kernel, names, *static), x, kernel, scales, seen)
        return float8_matmul(x, kernel, frozen.scales(weight, scales), seen, names, *static)
