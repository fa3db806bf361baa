"""The optimizer: schedules, decay mask, clipping, and the update of the flat dict {path: array}, with Adam's moments in 32, 16 or 8 bits, on the
device or in host memory.

Everything is computed in float32, and what is kept in fewer bits is rounded stochastically: up or down at random, so that the expected value is the
exact one. Rounded to nearest, a bfloat16 weight of 1.0 never moves under updates of 1e-3, and a moment whose change in a step is below half a step of
its format never follows. Weights are float32 unless precision.param says otherwise.

Chosen: the learning rate is an argument of the update, so that the rate logged for a step is by construction the rate used by it, and a run may
resume with another rate without touching the optimizer's state. Not here: parameter groups with their own rates, and optimizers that nobody asked
for.
"""

import dataclasses
import fnmatch
import functools
import itertools
import math
import zlib
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
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
    moments: Literal["float32", "bfloat16", "8bit"] = "float32"
    """Storage of Adam's two moments, bytes per parameter of both: 8, 4, or 2.03. "8bit": blocks of up to 256 values share a float32 scale, and each
    value is one of 256 unevenly spaced ones (Dettmers et al., arXiv 2110.02861; see `Blocks`); norms, biases and routers keep float32. Blocks of the
    embedding join rare and frequent tokens, and rare ones' steps become noisier (docs/decisions.md). Fewer bits are rounded
    stochastically: moments are right in expectation whatever the betas, and noisier."""
    moments_memory: Literal["device", "host"] = "device"
    """"host": moments rest in the host's pinned memory and visit the device layer by layer in a program of its own after the gradients. The result is
    the same, bit for bit. A GPU's host needs twice their size: the old and the new ones exist at once."""
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
        for name, usual in (("moments", "float32"), ("moments_memory", "device")):
            if self.kind == "sgd" and getattr(self, name) != usual:
                raise UserError(f'optimizer.{name}: "sgd" has no moments, got "{getattr(self, name)}"; remove it')
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


def decays(path: str, no_decay: list[str] | tuple[str, ...] = NO_DECAY) -> bool:
    """Whether weight decay applies to the parameter at `path`: every kernel and embedding, but no norm weight and no
    bias."""
    return not any(fnmatch.fnmatchcase(path, pattern) for pattern in no_decay)


def norm_and_factor(grads: dict[str, jax.Array], scale, max_norm: float) -> tuple[jax.Array, jax.Array]:
    """(global L2 norm of scale x gradients, f32[]; what the gradients are to be multiplied by, f32[]): scale x min(1, max_norm / (norm + 1e-6)), as
    torch.nn.utils.clip_grad_norm_ does.

    The norm sums squares in float32 over every array; max_norm = 0 only measures. A non-finite norm is returned as it is: the step decides.
    """
    square = lambda grad: jnp.sum(jnp.square(grad.astype(jnp.float32) * scale))
    norm = jnp.sqrt(sum(square(grad) for grad in jax.tree.leaves(grads)))
    return norm, scale if max_norm == 0 else scale * jnp.minimum(1.0, max_norm / (norm + 1e-6))


# --- what is kept in fewer bits ---------------------------------------------------------------------------------------


def mix(x):
    """u32 -> u32, one to one, each bit of x changing each bit with a chance of a half: the finaliser of MurmurHash3."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _random(words, name: str, layer, shape: tuple[int, ...]):
    """u32 of `shape`, a function of words u32[2], name, layer i32[] and each value's place alone, whatever the mesh. Not jax.random.bits: several hundred
    unrolled instructions for each tensor took two thirds of the update's compile time, and rounding needs no more than a good hash."""
    first = mix(words[0] ^ jnp.uint32(zlib.crc32(name.encode())))
    second = mix(words[1] ^ mix(first + jnp.asarray(layer).astype(jnp.uint32)))
    place = jnp.zeros(shape, jnp.uint32)
    for dim in range(len(shape)):
        stride = math.prod(shape[dim + 1 :]) % 2**32
        place += jax.lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(stride)
    return mix(mix(place + first) + second)


def round_bfloat16(x, random):
    """x f32 -> bfloat16, rounded stochastically by random u32 of x's shape, of which the upper 16 bits are used: E[result] = x. Values of bfloat16
    stay, so do infinities and NaN, and no finite value becomes infinite."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    kept = jnp.uint32(0xFFFF0000)
    up, down = (jax.lax.bitcast_convert_type(b & kept, jnp.float32) for b in (bits + (random >> 16), bits))
    return jnp.where(jnp.isfinite(x), jnp.where(jnp.isfinite(up), up, down), x).astype(jnp.bfloat16)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("codes", "scales"), meta_fields=("run",))
@dataclasses.dataclass(frozen=True)
class Blocks:
    """A tensor in 8 bits: `codes` u8 of its shape, and one scale, the largest magnitude, f32 for each block of consecutive values.

    Blocks run along dims that rest whole on every mesh, so none lies on two devices and any mesh restores them as they are. run = (first, end), counted
    from the last dim (-1 and 0 for the last alone), names those dims; in `scales` they are one dim, of blocks.
    """

    codes: Any
    scales: Any
    run: tuple[int, int]


BLOCK, SMALLEST_BLOCK = 256, 32
"""Values of a block: the largest divisor of what there is along the run, up to BLOCK. Tensors with less than SMALLEST_BLOCK stay float32."""


def block_layout(shape: tuple[int, ...], whole: list[bool]) -> tuple[tuple[int, int], int] | None:
    """(run, values of a block) for a tensor of this shape, None where it stays float32. whole: for each dim whether it rests whole on every mesh and is
    not the layers'. The run is the longest one of such dims."""
    edges = [i for i in range(len(shape) + 1) if i in (0, len(shape)) or whole[i] != whole[i - 1]]
    runs = [(math.prod(shape[a:b]), a, b) for a, b in itertools.pairwise(edges) if whole[a]]
    size, a, b = max(runs, default=(1, 0, 0))
    block = max(n for n in range(1, min(size, BLOCK) + 1) if size % n == 0)
    return None if block < SMALLEST_BLOCK else ((a - len(shape), b - len(shape)), block)


@dataclasses.dataclass(frozen=True)
class Map:
    """The values that codes stand for, in parts of a block's scale: bitsandbytes' dynamic maps (`create_dynamic_map`) but for their smallest values.
    Between two powers of ten values are evenly spaced, twice as many as in the decade below.

    mu: `count` = 1 in the lowest of seven decades, and a sign. Both ends and one zero more stand where bitsandbytes has one end and two smallest values, so
    that all of [-1, 1] lies between two values. nu: `count` = 2, no sign; codes stand for its square root, so that it reaches as far down as mu, and none
    for zero, so that mu is never divided by a nu that was rounded away.
    """

    count: int
    root: bool

    @functools.cached_property
    def values(self) -> np.ndarray:
        """f32[128 or 255], ascending: of magnitudes."""
        middles = []
        for decade in range(7):
            edges = np.linspace(0.1, 1.0, self.count * 2**decade + 1)
            middles += [*(10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2)]
        return np.array([*middles, 1.0] if self.root else [0.0, *middles[1:], 1.0])

    def below(self, x):
        """Index of the largest value <= x f32 in [0, 1], up to rounding errors of the comparison; never the last one."""
        x = jnp.sqrt(x) if self.root else x
        place = None
        for decade in range(7):
            number = self.count * 2**decade
            slope, first = number / 0.9 * 10.0 ** (6 - decade), number - self.count
            line = slope * x + (first - number / 9 - 0.5)
            place = line if place is None else jnp.where(x >= 10.0 ** (decade - 7), line, place)
        return jnp.clip(jnp.floor(place).astype(jnp.int32), 0, len(self.values) - 2)

    def table(self):
        return jnp.asarray(self.values**2 if self.root else self.values, jnp.float32)


MAPS = {"mu": Map(1, root=False), "nu": Map(2, root=True)}


def _blocked(x, run, blocks: int):
    """The run's dims of x as two: [blocks, values of a block]."""
    first, end = run[0] + x.ndim, run[1] + x.ndim
    return x.reshape(*x.shape[:first], blocks, -1, *x.shape[end:]), first + 1


def dequantise(stored: Blocks, name: str):
    """f32 of codes' shape; name: which of MAPS."""
    codes, axis = _blocked(stored.codes, stored.run, stored.scales.shape[stored.run[0] + stored.codes.ndim])
    table = MAPS[name].table()
    values = table if MAPS[name].root else jnp.concatenate([table, -table])
    return (values[codes.astype(jnp.int32)] * jnp.expand_dims(stored.scales, axis)).reshape(stored.codes.shape)


def quantise(x, name: str, like: Blocks, random) -> Blocks:
    """x f32 -> Blocks laid out as `like`: each value one of its two neighbours, such that the expected value is x. random: u32 of x's shape, of which the
    upper 16 bits are used. What of "nu" is below the smallest value becomes that."""
    blocks = like.scales.shape[like.run[0] + x.ndim]
    (x, axis), (random, _) = (_blocked(a, like.run, blocks) for a in (x, random))
    scales = jnp.max(jnp.abs(x), axis=axis, keepdims=True)
    ratio = jnp.where(scales > 0, jnp.abs(x) / scales, 0.0)
    codes, table = MAPS[name].below(ratio), MAPS[name].table()
    low, high = table[codes], table[codes + 1]
    up = (random >> 16).astype(jnp.float32) + 0.5 < (ratio - low) / (high - low) * 2**16
    codes += up.astype(jnp.int32)
    if not MAPS[name].root:
        codes = jnp.where(x < 0, codes + 128, codes)
    return Blocks(codes.astype(jnp.uint8).reshape(like.codes.shape), jnp.squeeze(scales, axis), like.run)


def _read(stored, name: str):
    return dequantise(stored, name) if isinstance(stored, Blocks) else stored.astype(jnp.float32)


def _write(x, name: str | None, like, random):
    """x f32 in the form of `like`. random: a function that gives u32 of x's shape; called only where bits are lost."""
    if isinstance(like, Blocks):
        return quantise(x, name, like, random())
    return round_bfloat16(x, random()) if like.dtype == jnp.bfloat16 else x


# --- state and update ---------------------------------------------------------------------------------------------------


@functools.partial(jax.tree_util.register_dataclass, data_fields=("count", "mu", "nu"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class AdamState:
    """count i32[]: updates made. mu, nu: {path: moment}, of its parameter's shape, as the config's `moments` says."""

    count: Any
    mu: dict
    nu: dict


def init(config: OptimizerConfig, params: dict, whole: dict[str, list[bool]]):
    """The state before the first update: an AdamState of zeros, () for "sgd". params: {path: anything with a shape}; whole: {path: dims}, see
    `block_layout`. UserError where a pattern of no_decay matches no parameter."""
    for pattern in config.no_decay:
        # The default patterns may match nothing (many models have no biases); one that a user wrote may not.
        if pattern not in NO_DECAY and not fnmatch.filter(params, pattern):
            raise UserError(
                f"optimizer.no_decay: {pattern!r} matches no parameter; there are {', '.join(sorted(params))}"
            )
    if config.kind == "sgd":
        return ()

    def zero(path):
        shape = params[path].shape
        layout = block_layout(shape, whole[path]) if config.moments == "8bit" else None
        if layout is None:
            return jnp.zeros(shape, jnp.float32 if config.moments == "8bit" else config.moments)
        (first, end), block = layout
        run = math.prod(shape[first : end + len(shape)])
        scales = (*shape[:first], run // block, *shape[end + len(shape) :])
        return Blocks(jnp.zeros(shape, jnp.uint8), jnp.zeros(scales, jnp.float32), (first, end))

    return AdamState(jnp.zeros((), jnp.int32), *({path: zero(path) for path in params} for _ in range(2)))


def update(config: OptimizerConfig, params: dict, grads: dict, state, *, rate, factor=1.0, keep=True, seed=0, step=0):
    """(parameters, state) after one step down: parameter - rate x direction.

    adamw: direction = bias-corrected m / (sqrt(v) + eps), plus weight_decay x parameter where `decays`, as torch.optim.AdamW (arXiv 1711.05101). grads
    {path: float}, multiplied by `factor` f32[]; keep: bool[], False leaves everything as it was. Stochastic rounding draws from (seed, step, path,
    layer) alone: the same on every mesh, and after a resume.

    Stacked layers are gone through one by one wherever values are converted, so that float32 copies of one layer exist at a time.
    """
    host, adam = config.moments_memory == "host", config.kind == "adamw"
    count = state.count + 1 if adam else None
    # 1 - beta^count without the cancellation
    log = lambda beta: math.log(beta) if beta else -math.inf
    corrections = [-jnp.expm1(count.astype(jnp.float32) * log(beta)) for beta in config.betas] if adam else []
    words = jax.random.key_data(jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), step))

    def one(path, param, grad, moments, layer):
        """A tensor, or one layer of it."""
        random = lambda use: _random(words, f"{path} {use}", layer, param.shape)
        both = functools.cache(lambda: random("moments"))
        draws = (both, lambda: both() << 16)  # 16 bits each
        old, direction = param.astype(jnp.float32), grad.astype(jnp.float32) * factor
        if adam:
            read = [_read(moment, name) for moment, name in zip(moments, MAPS)]
            raw = (direction, direction * direction)
            new = [b * x + (1 - b) * g for b, x, g in zip(config.betas, read, raw)]
            written = [_write(x, name, like, r) for x, name, like, r in zip(new, MAPS, moments, draws)]
            m, v = (x / c for x, c in zip(new, corrections))
            direction, moments = m / (jnp.sqrt(v) + config.eps), (moments, tuple(written))
        if decays(path, config.no_decay):
            direction += config.weight_decay * old
        after = _write(old - rate * direction, None, param, lambda: random("weight"))
        pick = lambda new, old: jnp.where(keep, new, old)
        return pick(after, param), jax.tree.map(pick, moments[1], moments[0]) if adam else ()

    moments = {path: (state.mu[path], state.nu[path]) if adam else () for path in params}
    narrow = host or any(leaf.dtype != jnp.float32 for leaf in jax.tree.leaves((params, moments)))
    stacked = [path for path in params if narrow and path.startswith("layers/")]
    to = lambda tree, space: jax.tree.map(lambda x: jax.device_put(x, space), tree) if host else tree
    place, rest = jax.memory.Space.Device, jax.memory.Space.Host
    new_params, new_moments = {}, {}
    for path in [path for path in params if path not in stacked]:
        param, moment = one(path, params[path], grads[path], to(moments[path], place), 0)
        new_params[path], new_moments[path] = param, to(moment, rest)
    for path in stacked:  # a loop for each: in one loop the temporaries of several tensors exist at a time
        whole = (params[path], grads[path], moments[path])
        new_params[path], new_moments[path] = _layer_by_layer(functools.partial(one, path), *whole, host, to)
    params = {path: new_params[path] for path in params}
    if not adam:
        return params, ()
    mu, nu = ({path: new_moments[path][i] for path in params} for i in range(2))
    return params, AdamState(jnp.where(keep, count, state.count), mu, nu)


def _layer_by_layer(one, param, grad, moments, host, to):
    """`one` for each layer of a stacked tensor. What is on the device is carried through the loop and so updated in place. What is in host memory is read
    and written as the loop's slices: carried, it would lose its place (compiled)."""
    at = lambda tree, i: jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False), tree)
    put = lambda tree, new, i: jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, i, 0), tree, new)

    def layer(carry, given):
        (param, carried), (i, streamed) = carry, given
        old = to(streamed, jax.memory.Space.Device) if host else at(carried, i)
        new_param, new = one(at(param, i), at(grad, i), old, i)
        return (put(param, new_param, i), None if host else put(carried, new, i)), to(
            new, jax.memory.Space.Host
        ) if host else None

    given = jnp.arange(param.shape[0]), moments if host else None
    (param, carried), streamed = jax.lax.scan(layer, (param, None if host else moments), given)
    return param, streamed if host else carried
