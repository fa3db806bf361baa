"""FP8 with delayed scaling: casts, products of FP8 operands, and the scales' rule, as functions over arrays. `linear` multiplies with them, `step` moves
the scales.

A tensor that is multiplied in FP8 is multiplied by its scale first, so that its largest magnitude (amax) meets the largest number of its format. The scale
is delayed: it comes from the amax of earlier steps, so nothing waits for a pass over the tensor. Casts and rule are those of NVIDIA TransformerEngine's
fused kernel (common/recipe/delayed_scaling.cu), bit for bit; its other implementations differ in what they make of zero, tiny and non-finite amax.

**The gradient of a scale is the amax of its tensor.** A product has three scales, {"input", "kernel", "output_grad"}; `jax.grad` with respect to them gives
the three amax of this step, through scans and rematerialisation, and recording twice is as impossible as differentiating twice. JAX adds gradients where a
value is used twice, so a scale serves one product (under a scan over layers: one per layer, scales f32[layers]), and microbatches are differentiated one by
one and joined by jnp.maximum. Then `update` moves the state once per optimizer step. Histories never enter the model, and evaluation, which does not
differentiate, changes nothing. TransformerEngine for PyTorch updates after every microbatch instead.

    def step(scaling, ...):                                          # scaling: {operand: Scaling}
        scales = {operand: s.scale for operand, s in scaling.items()}
        amax = jax.grad(loss, argnums=...)(..., scales)               # of each microbatch; joined by jnp.maximum
        scaling = {operand: update(s, amax[operand], FORMATS[operand], config) for operand, s in scaling.items()}

In a model the scales are variables (`Observed`) beside the weights, each with two more places, whose gradients are the shares of elements that the
cast clips and loses. `observed`, `join` and `advance` are that step for all of a model's.

A sharded weight is quantised where it rests and gathered in FP8, half of bfloat16's bytes; its gradient is pinned where it rests:

    matmul(x, kernel, scales, compute, reduce, used=lambda q: gather(q, names, q.dtype).reshape(K, N),
           rests=lambda dw: constrain(dw.reshape(kernel.shape), *names, table=AT_REST))

A product of another kind is put together from the same pieces: `record` the operands and `record_gradient` the output, outside of its custom_vjp;
`quantise`, then constrain, then multiply, inside; one f32[E] of scales for the kernels of E experts. Around a product in bfloat16 the two records alone are
a warm-up: it is what it was, and the amax are there.

**No scale goes into a shard_map**: there the gradient of what is replicated is summed over devices, and the amax would come out several times too large; it
is refused. Outside, max|x| of a sharded array is the maximum over all devices.

Not here: scales per row, channel or block; casts that saturate by themselves (XLA's do not); what stays in bfloat16, which `Linear` is asked for by name.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import pydantic
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint

from jaxllm.section import Section, UserError

FORMATS = {"input": jnp.float8_e4m3fn, "kernel": jnp.float8_e4m3fn, "output_grad": jnp.float8_e5m2}
"""What each operand of a product is cast to: precision for what is multiplied forward, range for gradients."""
MULTIPLE = 16  # of K and N, as in the reference: cuBLASLt multiplies no other sizes in FP8


class FP8Config(Section):
    """FP8 with delayed scaling, where precision.matmul = "float8"."""

    history_length: int = pydantic.Field(1024, ge=1)
    """Optimizer steps whose largest magnitudes are remembered."""
    algorithm: Literal["max", "most_recent"] = "max"
    """A scale follows the largest magnitude in the history, or that of the last step."""
    margin: int = pydantic.Field(0, ge=0, le=6)
    """Scales are divided by 2^margin: room for tensors that grow from one step to the next. With more than 6, scales would leave float32's normal range."""
    first_layers_bfloat16: int = pydantic.Field(0, ge=0)
    """So many layers at the start stay in the compute dtype. TransformerEngine does not offer this with delayed scaling."""
    last_layers_bfloat16: int = pydantic.Field(0, ge=0)
    """Likewise at the end."""
    warmup_steps: int = pydantic.Field(0, ge=0)
    """Steps up to this one multiply in the compute dtype and only record magnitudes, counted from the start of the run: a run that goes over to FP8 at
    step 5,000 has ten of them with 5,010. With none, the first step in FP8 has scales of 1, as in the reference; what evaluates at step 0 is in the compute
    dtype in either case."""


def check(config: FP8Config, matmul: str, num_layers: int, steps: int, sizes: dict[str, int]) -> list[str]:
    """What contradicts itself in this section, precision.matmul, the model's depth, the length of the run, and {setting: size of a weight's dim}."""
    conflicts = []
    if matmul == "compute":
        for name, field in FP8Config.model_fields.items():
            if (given := getattr(config, name)) != field.default:
                conflicts.append(
                    f'precision.fp8.{name}: {given} is for precision.matmul = "float8" or "record", and that is "compute"; remove one of them'
                )
        return conflicts
    first, last = config.first_layers_bfloat16, config.last_layers_bfloat16
    if first + last >= num_layers:
        conflicts.append(
            f"precision.fp8.first_layers_bfloat16: {first} and precision.fp8.last_layers_bfloat16 = {last} leave none of the {num_layers} layers in FP8; "
            'lower them, or remove precision.matmul = "float8"'
        )
    if matmul == "record":
        if config.warmup_steps:
            conflicts.append(
                f'precision.fp8.warmup_steps: {config.warmup_steps} is for precision.matmul = "float8"; with "record" every step records; remove it'
            )
        return conflicts
    if config.warmup_steps >= steps:
        conflicts.append(
            f"precision.fp8.warmup_steps: {config.warmup_steps} of steps = {steps} leave no step in FP8; lower it"
        )
    conflicts += [
        f'{name}: {size} is no multiple of {MULTIPLE}, and with precision.matmul = "float8" tensor cores multiply no other sizes; change one of them'
        for name, size in sizes.items()
        if size % MULTIPLE
    ]
    return conflicts


class Scaling(NamedTuple):
    """State of one quantised tensor, or of D of them (layers, experts).

    scale: f32[*D], the factor before the cast. amax_history: f32[*D, history_length], oldest first; the first place is where the reference gathers the
    amax of a step before it updates, and always 0 here."""

    scale: jax.Array
    amax_history: jax.Array


def initial(config: FP8Config, shape: tuple[int, ...] = ()) -> Scaling:
    """State of `shape` tensors of which nothing is known: scale 1."""
    return Scaling(jnp.ones(shape, jnp.float32), jnp.zeros((*shape, config.history_length), jnp.float32))


# --- one tensor -------------------------------------------------------------------------------------------------------


def largest(dtype) -> float:
    """The largest finite number of an FP8 format: 448 of e4m3fn, 57344 of e5m2."""
    return float(jnp.finfo(dtype).max)


def quantise(x, scale, dtype):
    """x [*D, ...] as FP8 numbers of `dtype` that mean x * scale[*D]: multiplied in float32, clipped to the largest finite number, rounded to nearest even.
    Infinities become that number, NaN stays NaN.

    The clip is not optional: XLA's cast to e4m3fn makes NaN of everything above 464. XLA:CPU takes subnormal float32 for 0, which shows where scale > 2^108."""
    return jnp.clip(_scaled(x, scale), -largest(dtype), largest(dtype)).astype(dtype)


def amax(x, kept: int = 0):
    """max|x| of x [*kept dims, ...] over all but the first `kept` dims -> f32[*kept dims], of x as given, before any scale. NaN is not seen, as in the
    reference, whose kernels use fmaxf; infinities are.

    Compared as integers, for the bits of floats without a sign are ordered as their values: exact in any order and on any number of devices, where XLA:CPU
    flushes subnormals and may or may not return a NaN."""
    magnitudes = _bits(x.astype(jnp.float32)) & jnp.uint32(0x7FFFFFFF)
    return _value(jnp.max(_without_nan(magnitudes), axis=tuple(range(kept, x.ndim))))


def shares(x, scale, dtype):
    """f32[*D, 2], of x [*D, ...] with its scale[*D]: share of elements that the clip changes, and of those that are not 0 and become 0."""
    y = _scaled(x, scale)
    saturated = jnp.abs(y) > largest(dtype)
    underflowed = (quantise(x, scale, dtype).astype(jnp.float32) == 0) & (x != 0)
    over = tuple(range(scale.ndim, x.ndim))
    mean = lambda hit: jnp.mean(hit.astype(jnp.float32), axis=over)
    return jnp.stack([mean(saturated), mean(underflowed)], axis=-1)


def _scaled(x, scale):
    return x.astype(jnp.float32) * jnp.expand_dims(scale, tuple(range(scale.ndim, x.ndim)))


def _bits(x):
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def _value(bits):
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


_INF = 0x7F800000  # above it: NaN


def _without_nan(bits):
    return jnp.where(bits > _INF, jnp.uint32(0), bits)


# --- the rule ---------------------------------------------------------------------------------------------------------


def update(scaling: Scaling, amax, dtype, config: FP8Config) -> Scaling:
    """The state after an optimizer step that saw `amax` f32[*D] >= 0, the maximum over its microbatches and devices; kernel_bulk in delayed_scaling.cu.

    The history moves by one place, unless amax is 0 (nothing was multiplied, or zeros): then nothing changes. scale = largest(dtype) / 2^margin / a, where a
    is the largest amax in the history, this one included and NaN left out, or with "most_recent" this one alone. Where a is not finite, or 0, the scale
    stays: an infinity holds it for as long as the history remembers it. A quotient above float32 becomes the largest float32."""
    _, history = scaling
    last, a = _bits(amax), _reference_amax(scaling, amax, config)
    moved = jnp.concatenate([history[..., 1:], jnp.expand_dims(amax, -1)], axis=-1).at[..., 0].set(0.0)
    history = jnp.where(jnp.expand_dims(last == 0, -1), history, moved)
    quotient = jnp.float32(largest(dtype) * 2.0**-config.margin) / _value(a)
    scale = jnp.minimum(quotient, jnp.finfo(jnp.float32).max)
    return Scaling(jnp.where(_usable(a), scale, scaling.scale), history)


def frozen(scaling: Scaling, amax, config: FP8Config):
    """bool[*D]: whether `update` of this state by this amax keeps the scale for want of a finite amax above 0."""
    return ~_usable(_reference_amax(scaling, amax, config))


def _reference_amax(scaling, amax, config):
    """Bits of the amax that the next scale comes from. As bits, because XLA:CPU takes a subnormal float for 0, and 0 means something else here."""
    last = _bits(amax)
    if config.algorithm == "most_recent":
        return last
    window = jnp.concatenate([_bits(scaling.amax_history[..., 1:]), jnp.expand_dims(last, -1)], axis=-1)
    return jnp.where(last == 0, last, jnp.max(_without_nan(window), axis=-1))


def _usable(bits):
    return (bits > 0) & (bits < _INF)


# --- all of a model's -------------------------------------------------------------------------------------------------

AMAX, SATURATED, UNDERFLOWED = range(3)


class Observed(nnx.Variable):
    """f32[*D, 3], of one operand of a module's product: the scale, and two places whose values nobody reads. Its gradient: amax, and `shares`."""


def observers(*experts: int) -> nnx.Dict:
    """{operand: Observed} of a module that multiplies by one kernel, or by those of so many experts, which share the other scales."""
    shapes = {operand: (experts if operand == "kernel" else ()) for operand in FORMATS}
    return nnx.Dict(
        {
            operand: Observed(jnp.ones((*D, 3), jnp.float32), axes=(None,) * (len(D) + 1))
            for operand, D in shapes.items()
        }
    )


def opened(observers) -> tuple[dict, dict]:
    """(scales {operand: f32[*D]}, seen {operand: f32[*D, 2]}) of a module's `observers`."""
    values = {operand: observers[operand].get_value() for operand in FORMATS}
    return {operand: v[..., 0] for operand, v in values.items()}, {operand: v[..., 1:] for operand, v in values.items()}


def observed(states: dict) -> dict:
    """{path: value of an `Observed`} from {path: Scaling}."""
    return {path: jnp.stack([s.scale, *[jnp.zeros_like(s.scale)] * 2], axis=-1) for path, s in states.items()}


def join(a: dict, b: dict) -> dict:
    """The gradients of `Observed` of two microbatches in one: the maximum of amax, the sum of shares."""
    one = lambda a, b: jnp.concatenate([jnp.maximum(a[..., :1], b[..., :1]), a[..., 1:] + b[..., 1:]], axis=-1)
    return {path: one(a[path], b[path]) for path in a}


def advance(states: dict, seen: dict, config: FP8Config) -> dict:
    """{path: Scaling} after an optimizer step; seen: joined gradients of `Observed`. A path ends with the operand's name."""
    return {path: update(s, seen[path][..., AMAX], FORMATS[_operand(path)], config) for path, s in states.items()}


def _operand(path):
    return path.rsplit("/", 1)[-1]


def report(states: dict, seen: dict, num_microbatches: int, config: FP8Config) -> dict:
    """What is shown of a step, f32[layers] each. fp8_saturated, fp8_underflowed: share of elements that the cast clips, or loses to 0, in the tensor of
    that layer where it is largest (mean over microbatches); fp8_frozen: scales that this step leaves as they were for want of a finite amax above 0."""
    first, last = config.first_layers_bfloat16, config.last_layers_bfloat16
    flat = lambda x: x.reshape(x.shape[0], -1)
    worst = lambda part: functools.reduce(jnp.maximum, [jnp.max(flat(x[..., part]), axis=1) for x in seen.values()])
    stuck = [jnp.sum(flat(frozen(states[path], x[..., AMAX], config)), axis=1) for path, x in seen.items()]
    (layers,) = stuck[0].shape
    multiplied = (jnp.arange(layers) >= first) & (jnp.arange(layers) < layers - last)
    return {
        "fp8_saturated": worst(SATURATED) / num_microbatches,
        "fp8_underflowed": worst(UNDERFLOWED) / num_microbatches,
        "fp8_frozen": jnp.where(multiplied, sum(stuck), 0).astype(jnp.float32),
    }


# --- what a step sees -------------------------------------------------------------------------------------------------


def record(x, scale, seen, dtype):
    """x, unchanged, and with the gradient unchanged; the gradient of `scale` f32[*D] is amax(x), that of `seen` is shares(x, scale, dtype).

    x: [*D, ...]. seen: f32[*D, 2] of any values, or None where shares are not wanted. Those of microbatches of one size are averaged. ValueError inside of a
    shard_map."""
    _outside_shard_map()
    return _record(x, scale, seen, dtype)


def record_gradient(y, scale, seen, dtype):
    """y, unchanged, and with the gradient unchanged; the gradients of `scale` and `seen` are what `record` says of the gradient of y."""
    _outside_shard_map()
    return _record_gradient(y, scale, seen, dtype)


def recorded(product, x, kernel, scales: dict, seen: dict | None = None):
    """product(x, kernel), with its three tensors recorded: `scales` and `seen` {operand: see `record`}. The last dims of a kernel, behind its scale's, are one
    tensor."""
    seen = dict.fromkeys(FORMATS) if seen is None else seen
    x, kernel = (
        record(value, scales[operand], seen[operand], FORMATS[operand])
        for operand, value in (("input", x), ("kernel", kernel))
    )
    return record_gradient(product(x, kernel), scales["output_grad"], seen["output_grad"], FORMATS["output_grad"])


@jax.custom_vjp
def instead(scale, value):
    """`value`, with `scale` getting what is recorded: for a tensor whose scale is known."""
    return value


instead.defvjp(lambda scale, value: (value, None), lambda _, recorded: (recorded, None))


def _outside_shard_map():
    if axes := jax.sharding.get_abstract_mesh().manual_axes:
        raise ValueError(
            f"a scale of FP8 inside of a shard_map over {', '.join(axes)}: its gradient would be the sum of the devices' amax; call record, record_gradient "
            "and matmul outside"
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _record(x, scale, seen, dtype):
    return x


def _record_forward(x, scale, seen, dtype):
    # Named, so that a rematerialisation policy may keep a number instead of reducing x again.
    return x, checkpoint_name(_observed(x, scale, seen, dtype), "amax")


_record.defvjp(_record_forward, lambda dtype, observed, dx: (dx, *observed))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _record_gradient(y, scale, seen, dtype):
    return y


_record_gradient.defvjp(
    lambda y, scale, seen, dtype: (y, (scale, seen)),
    lambda dtype, kept, dy: (dy, *_observed(dy, *kept, dtype)),
)


def _observed(x, scale, seen, dtype):
    return amax(x, scale.ndim), None if seen is None else shares(x, scale, dtype)


# --- the product ------------------------------------------------------------------------------------------------------


def matmul(
    x,
    kernel,
    scales: dict,
    compute: str,
    reduce: str,
    *,
    seen: dict | None = None,
    used: Callable = lambda q: q,
    rests: Callable = lambda dw: dw,
):
    """x [*leading, K] times kernel -> [*leading, N] in the dtype `compute`, multiplied in FP8, summed in float32, scaled back and rounded once.

    kernel: [K, N], or any shape that `used` makes [K, N] of; it and x are quantised as given, from bfloat16 or float32. reduce: dtype in which the kernel's
    gradient is summed over devices; it then gets the kernel's.
    scales: {operand of FORMATS: f32[]}, whose gradients are the operands' amax. seen: None, or {operand: f32[2]}; see `record`.
    used: the quantised kernel at rest -> FP8 [K, N] as it is multiplied. rests: gradient [K, N], not scaled back yet -> the kernel's shape, where it rests.
    UserError where K or N is no multiple of 16."""
    # The scales' gradients are the records', and nothing is to be added to those.
    fixed = jax.lax.stop_gradient(scales)
    multiply = lambda x, kernel: _multiply(x, kernel, fixed, compute, reduce, used, rests)
    return recorded(multiply, x, kernel, scales, seen)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _multiply(x, kernel, scales, compute, reduce, used, rests):
    return _multiply_forward(x, kernel, scales, compute, reduce, used, rests)[0]


def _multiply_forward(x, kernel, scales, compute, reduce, used, rests):
    qx = quantise(x, scales["input"], FORMATS["input"])
    qw = used(quantise(kernel, scales["kernel"], FORMATS["kernel"]))
    # Left to itself, XLA for GPUs turns the kernel round for the product, and all of a scan's kernels before the scan: a copy of every one of them.
    qw = with_layout_constraint(qw, Layout((0, 1)))
    if any(size % MULTIPLE for size in qw.shape):
        raise UserError(
            f'precision.matmul: "float8" multiplies by weights whose dims are multiples of {MULTIPLE}, got {" x ".join(map(str, qw.shape))}; choose sizes '
            "of the model that are, or remove precision.matmul"
        )
    y = _scaled_product(qx, qw, ((qx.ndim - 1,), (0,)), _factor(scales, "input", "kernel"), compute, FORWARD)
    # The names of `linear.matmul`: under rematerialisation neither the gathered weight nor what is cheap to make again is kept.
    kept = checkpoint_name(qx, "quantised"), checkpoint_name(qw, "gathered")
    return y, (*kept, scales, jnp.zeros((0,), x.dtype), jnp.zeros((0,), kernel.dtype))


def _multiply_backward(compute, reduce, used, rests, residuals, dy):
    qx, qw, scales, like_x, like_kernel = residuals
    qg = quantise(dy, scales["output_grad"], FORMATS["output_grad"])
    # The barrier keeps XLA from quantising again inside each of the two products.
    qx, qg = jax.lax.optimization_barrier((qx, qg))
    to_x = _factor(scales, "output_grad", "kernel")
    dx = _scaled_product(qg, qw, ((qg.ndim - 1,), (1,)), to_x, compute, BACKWARD)
    leading = tuple(range(qg.ndim - 1))
    # Scaled back after the sum over devices, where each holds its part of it; that sum has the dtype in which the product comes out.
    dw = rests(_product(qx, qg, (leading, leading), reduce, BACKWARD)).astype(jnp.float32)
    dw = dw * _factor(scales, "input", "output_grad")
    return dx.astype(like_x.dtype), dw.astype(like_kernel.dtype), None


_multiply.defvjp(_multiply_forward, _multiply_backward)


# To cuBLASLt this means the sums of tensor cores as they are, about 14 bits, in the forward product, and in the backward ones sums promoted to float32 after
# every few terms, as in the reference's recipe. Nothing to a CPU.
FORWARD, BACKWARD = jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGHEST


def _factor(scales, a, b):
    """What scales a product of the operands a and b back."""
    return (1 / scales[a]) * (1 / scales[b])


def _product(a, b, contract, dtype, precision):
    # FP8 operands straight into the dot: XLA for GPUs makes an FP8 product of that alone, and bfloat16 of operands that are scaled back first.
    return jax.lax.dot_general(a, b, (contract, ((), ())), precision=precision, preferred_element_type=dtype)


def _scaled_product(a, b, contract, factor, dtype, precision):
    once = lambda: (_product(a, b, contract, jnp.float32, precision) * factor).astype(dtype)
    if dtype != "bfloat16":
        return once()

    # What XLA for GPUs makes of this is `once` in a single call, which gets the factor in float32 and rounds what it has multiplied; of `once` it makes a
    # float32 array and a kernel that rounds. The barrier keeps both conversions of the factor together, to cancel; without it, a scan's factors would be
    # rounded (compiled, with 0.10.2 and 0.11.2; a test looks).
    def in_the_call():
        y = _product(a, b, contract, jnp.bfloat16, precision)
        return y * jax.lax.optimization_barrier(factor).astype(jnp.bfloat16)

    return jax.lax.platform_dependent(cuda=in_the_call, default=once)
