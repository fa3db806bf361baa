"""The training step, and everything it starts from: `init_state`, `make_train_step`, `make_eval_step`, `logits`.

Sum everywhere, divide once: microbatches and devices add up losses, weights and gradients, and the sums are divided by the number of trained
tokens of the whole step. So neither accumulation nor padding nor the mesh changes the answer. A step whose loss or gradient norm is not
finite, or which trains no token, leaves parameters and optimizer as they were and says so in its metrics.
"""

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxllm import attention, fp8, hardware, linear, moe, optim, weights
from jaxllm import state as states
from jaxllm.config import Config
from jaxllm.linear import dot, gather
from jaxllm.loss import HEAD_NAMES, cross_entropy
from jaxllm.section import UserError
from jaxllm.sharding import BATCH, axis_size, replicated
from jaxllm.state import TrainState


def abstract_state(cfg: Config):
    """(graphdef, TrainState of ShapeDtypeStructs with shardings) on the current mesh: what `init_state` makes, without making it."""
    declared = weights.declare(cfg)
    opt_state = states.abstract_opt_state(cfg.optimizer, declared.params)
    return declared.graphdef, TrainState(states.abstract_step(), *declared[1:], opt_state)


def init_state(cfg: Config):
    """(graphdef, TrainState) at step 0 on the current mesh: weights from cfg.model.path and cfg.model.adapter, or random from cfg.seed."""
    graphdef, abstract = abstract_state(cfg)
    return graphdef, start(cfg, abstract, *weights.load(cfg, abstract))


def start(cfg: Config, abstract: TrainState, params: dict, frozen: dict | None = None) -> TrainState:
    """A TrainState at step 0 around these weights."""
    opt_state = states.zeros(abstract.opt_state)
    step = jax.device_put(jnp.zeros((), jnp.int32), abstract.step.sharding)
    scales = states.initial_fp8(cfg.precision.fp8, abstract.fp8)
    return TrainState(step=step, params=params, frozen=frozen or {}, fp8=scales, opt_state=opt_state)


def recording(cfg: Config) -> Config:
    """The same run while it only records: what its steps up to precision.fp8.warmup_steps are made from. Its states are those of `cfg`."""
    return cfg.model_copy(update={"precision": cfg.precision.model_copy(update={"matmul": "record"})})


def _variables(state: TrainState) -> dict:
    return {**state.params, **state.frozen, **fp8.observed(state.fp8)}


def _hidden(graphdef, variables, rows, noise=None):
    """(final hidden states, what the layers record, head) of one microbatch. noise: see `_noise`; None in evaluation."""
    model = states.merge(graphdef, variables)
    hidden, seen = model(rows.tokens, rows.positions, rows.k_start, rows.k_end, rows.layout, rows.row_length, noise)
    return hidden, seen, model.head


def _noise(batch, cfg: Config, number):
    """(random key of step `number`, i32[M, B]: each row's number in the batch, whatever the mesh and the microbatches, so that random numbers drawn for
    its tokens are the same on all)."""
    shape = batch.tokens.shape[:2]
    rows = jnp.arange(shape[0] * shape[1], dtype=jnp.int32).reshape(shape)
    return jax.random.fold_in(jax.random.key(cfg.seed), number), rows


def _sums(graphdef, variables, rows, cfg: Config, step=None, noise=None):
    """(total, parts) of one microbatch, undivided; `total` is what is differentiated. step: see `_whole_step`; None leaves the router's losses out.
    noise: see `_noise`."""
    hidden, seen, head = _hidden(graphdef, variables, rows, noise)
    with jax.named_scope("loss"):
        total, loss_sum, z_sum = cross_entropy(
            hidden,
            head,
            rows.targets,
            rows.loss_weights,
            cfg.loss,
            cfg.precision.compute,
            cfg.precision.gradient_reduce,
            head_is_trained=cfg.lora.rank is None,
        )
    parts = {"loss_sum": loss_sum, "z_sum": z_sum}
    if seen and step is not None:
        trained, num_tokens, counts = step
        counts = seen["counts"] if counts is None else counts
        balance, z = moe.auxiliary(seen, counts, num_tokens, cfg.moe.aux_loss)
        total += trained * (cfg.model.router_aux_loss_coef * balance + cfg.moe.z_loss * z)
        parts |= {"seen": seen, "balance": balance, "router_z": z}
    return total, parts


def _whole_step(graphdef, variables, batch, cfg: Config, noise):
    """What the router's losses need of all microbatches before one is differentiated: (trained tokens, real tokens, assignments f32[layers, E] of each
    expert or None where there is one microbatch, whose own they are). Several cost one more forward pass: the shares of experts multiply the
    gradient, so losses of the parts, each with shares of its own, would not add up to the step's."""
    trained = jnp.maximum(jnp.sum(batch.loss_weights), 1.0)
    real = jnp.maximum(jnp.sum(batch.k_end > batch.k_start).astype(jnp.float32), 1.0)
    if batch.tokens.shape[0] == 1 or not cfg.model.router_aux_loss_coef:
        return trained, real, None
    key, numbers = noise

    def counted(total, microbatch):
        rows, numbers = microbatch
        return total + _hidden(graphdef, variables, rows, (key, numbers))[1]["counts"], None

    zeros = jnp.zeros((cfg.model.num_hidden_layers, cfg.model.num_local_experts))
    return trained, real, jax.lax.scan(counted, zeros, (batch, numbers))[0]


def gradients(
    graphdef, params: dict, batch, cfg: Config, number=0, scales: dict | None = None, frozen: dict | None = None
):
    """(gradients of the summed loss {path: array}, parts) over all microbatches of `batch`, undivided; of one microbatch in the parameters' dtype, of several
    summed in float32. number: of the step, for its random numbers. scales: `fp8.observed` of the state; parts["fp8"] are then its gradients, joined.
    frozen: that of the state."""
    whole, key, numbers, scales, frozen = None, None, None, scales or {}, frozen or {}
    if cfg.model.num_local_experts or cfg.lora.dropout:
        key, numbers = noise = _noise(batch, cfg, number)
    if cfg.model.num_local_experts:
        whole = _whole_step(graphdef, params | frozen | scales, batch, cfg, noise)

    def total(params, scales, microbatch):
        rows, numbers = microbatch
        noise = None if key is None else (key, numbers)
        return _sums(graphdef, params | frozen | scales, rows, cfg, whole, noise)

    def one(microbatch):
        (_, parts), (grads, seen) = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(params, scales, microbatch)
        return grads, parts, seen

    microbatches = batch, numbers
    first = jax.tree.map(lambda x: x[0], microbatches)
    if batch.tokens.shape[0] == 1:  # no accumulator
        grads, parts, seen = one(first)
        return grads, parts | {"fp8": seen}

    def accumulate(carry, microbatch):
        sums, total, joined = carry
        grads, parts, seen = one(microbatch)
        grads = jax.tree.map(lambda grad: grad.astype(jnp.float32), grads)
        return (*jax.tree.map(jnp.add, (sums, total), (grads, parts)), fp8.join(joined, seen)), None

    _, parts, seen = jax.eval_shape(one, first)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), (parts, seen))
    sums = jax.tree.map(lambda param: jnp.zeros_like(param, jnp.float32), params)
    (sums, parts, seen), _ = jax.lax.scan(accumulate, (sums, *zeros), microbatches)
    return sums, parts | {"fp8": seen}


def make_train_step(graphdef, cfg: Config, *, after_warmup: bool = False):
    """step(state, batch) -> (state, metrics), compiled on first use; `state` is consumed.

    With precision.fp8.warmup_steps there are two: for a state of fewer steps that of `recording(cfg)`, with the graphdef of that config, and then this one.
    Which of them a state is for is not looked at, so UserError unless after_warmup says that it is known.

    metrics (device scalars): loss (mean over trained tokens, without z-loss), z_loss, grad_norm (before clipping), learning_rate, tokens
    (trained), bad (the step was left out). With experts also aux_loss and router_z_loss (unweighted), and those of `moe.report`; with FP8 those of
    `fp8.report`."""
    warmup = cfg.precision.fp8.warmup_steps
    if warmup and cfg.precision.matmul == "float8" and not after_warmup:
        raise UserError(
            f"precision.fp8.warmup_steps: {warmup} steps are to record before this one multiplies in FP8: make them from jaxllm.step.recording(cfg) "
            "(its abstract_state gives the graphdef) and this one with after_warmup=True, or set it to 0"
        )
    schedule = optim.learning_rate(cfg.optimizer, cfg.steps)

    def differentiate(state: TrainState, batch):
        """(summed gradients, (how to descend them, the next FP8 state), metrics)."""
        scales = fp8.observed(state.fp8)
        sums, parts = gradients(graphdef, state.params, batch, cfg, state.step, scales, state.frozen)
        tokens = jnp.sum(batch.loss_weights)
        share = 1.0 / jnp.maximum(tokens, 1e-6)
        loss, z_loss = parts["loss_sum"] * share, cfg.loss.z_loss * parts["z_sum"] * share
        rate = schedule(state.step + 1)
        with jax.named_scope("optimizer"):
            norm, factor = optim.norm_and_factor(sums, share, cfg.optimizer.max_grad_norm)
        good = jnp.isfinite(loss + z_loss) & jnp.isfinite(norm) & (tokens > 0)
        metrics = {
            "loss": loss,
            "z_loss": z_loss,
            "grad_norm": norm,
            "learning_rate": rate,
            "tokens": tokens,
            "bad": ~good,
        }
        if "seen" in parts:
            num_tokens = jnp.maximum(jnp.sum(batch.k_end > batch.k_start).astype(jnp.float32), 1.0)
            # From the step's own sums: also where the losses have no weight and microbatches were not counted first.
            balance, z = moe.auxiliary(parts["seen"], parts["seen"]["counts"], num_tokens, cfg.moe.aux_loss)
            metrics |= {"aux_loss": balance, "router_z_loss": z}
            metrics |= moe.report(parts["seen"], num_tokens, cfg.model.num_experts_per_tok)
        scales = state.fp8
        if scales:
            moved = fp8.advance(scales, parts["fp8"], cfg.precision.fp8)
            metrics |= fp8.report(scales, parts["fp8"], batch.tokens.shape[0], cfg.precision.fp8)
            # A step that is left out leaves no trace: one infinity would hold a scale for as long as the history remembers it.
            kept = jax.tree.map(functools.partial(jnp.where, good), moved, scales)
            # Left alone, XLA would split those of experts over them, and the next step takes what is replicated.
            scales = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, P()), kept)
        return sums, ({"rate": rate, "factor": factor, "keep": good}, scales), metrics

    def descend(state: TrainState, sums, how):
        how, scales = how
        with jax.named_scope("optimizer"):
            params, opt_state = optim.update(
                cfg.optimizer, state.params, sums, state.opt_state, seed=cfg.seed, step=state.step, **how
            )
        return TrainState(state.step + 1, params, state.frozen, scales, opt_state)

    options = compiler_options(cfg.precision)
    if cfg.optimizer.moments_memory == "host":
        return _InTwo(differentiate, descend, options)

    def train_step(state: TrainState, batch):
        sums, how, metrics = differentiate(state, batch)
        return descend(state, sums, how), metrics

    return jax.jit(train_step, donate_argnums=0, compiler_options=options)


def compiler_options(precision) -> dict:
    """XLA's options for this precision on the current mesh's devices, beside those of XLA_FLAGS, which decide where they name the same."""
    device_kind = attention.device_kind()
    linear.describe(precision, device_kind)  # UserError where these devices cannot do it
    wanted = FP8_OPTIONS if device_kind.startswith(hardware.NVIDIA) and precision.matmul == "float8" else {}
    return {name: value for name, value in wanted.items() if name not in os.environ.get("XLA_FLAGS", "")}


# XLA:GPU hands products to cuBLASLt, which multiplies in FP8, only where its own Triton code does not take them first.
FP8_OPTIONS = {"xla_gpu_enable_triton_gemm": False}


class _InTwo:
    """A training step in two programs, with what of a jitted function is used of one: gradients, and the update, which alone sees moments in host memory. In
    compiles that took them for arguments of the device, one program stopped overlapping communication; it may not where they are known to be the host's
    (docs/decisions.md)."""

    def __init__(self, differentiate, descend, options):
        self._functions, self._options, self._compiled = (differentiate, descend), options, None

    def trace(self, state: TrainState, batch) -> "_Two":
        mesh, differentiate, descend = jax.sharding.get_mesh(), *self._functions
        at_rest = {path: param.sharding for path, param in state.params.items()}
        out = (at_rest, replicated(mesh), replicated(mesh))
        # XLA's scheduler counts a program's results twice against its limit, here all gradients; without more slack it overlaps nothing (compiled).
        more = {"xla_gpu_memory_limit_slop_factor": 160} if mesh.devices.flat[0].platform == "gpu" else {}
        options = self._options | more
        first = jax.jit(differentiate, out_shardings=out, compiler_options=options).trace(_bare(state), batch)
        placed = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        sums, how, _ = first.out_info
        sums = {path: placed(leaf, at_rest[path]) for path, leaf in sums.items()}
        how = jax.tree.map(lambda leaf: placed(leaf, replicated(mesh)), how)
        return _Two(first, jax.jit(descend, donate_argnums=0).trace(state, sums, how))

    def lower(self, state: TrainState, batch) -> "_Two":
        return self.trace(state, batch).lower()

    def __call__(self, state: TrainState, batch):
        if self._compiled is None:
            self._compiled = self.lower(state, batch).compile()
        return self._compiled(state, batch)


class _Two:
    """Both programs, traced, lowered or compiled."""

    def __init__(self, first, second):
        self.programs = first, second

    def lower(self, **how) -> "_Two":
        return _Two(*(program.lower(**how) for program in self.programs))

    def compile(self, *how) -> "_Two":
        return _Two(*(program.compile(*how) for program in self.programs))

    def __call__(self, state: TrainState, batch):
        sums, how, metrics = self.programs[0](_bare(state), batch)
        return self.programs[1](state, sums, how), metrics

    def as_text(self) -> str:
        """Of the first program, which multiplies and communicates; the second only updates."""
        return self.programs[0].as_text()

    def memory_analysis(self):
        """Of the first program. The second has parameters and gradients, and one layer's moments where the first has activations; compiled for GPUs that
        are not here, its arguments in host memory are reported as the device's."""
        return self.programs[0].memory_analysis()


def _bare(state: TrainState) -> TrainState:
    return dataclasses.replace(state, opt_state=())


def make_eval_step(graphdef, cfg: Config):
    """step(state, batch) -> {"loss_sum", "weight_sum"}: sums over the batch's trained tokens, to be added up and divided once."""

    def eval_step(state: TrainState, batch):
        def microbatch(total, rows):
            return total + _sums(graphdef, _variables(state), rows, cfg)[1]["loss_sum"], None

        loss_sum, _ = jax.lax.scan(microbatch, jnp.zeros(()), batch)
        return {"loss_sum": loss_sum, "weight_sum": jnp.sum(batch.loss_weights)}

    return jax.jit(eval_step, compiler_options=compiler_options(cfg.precision))


@functools.partial(jax.jit, static_argnums=0)
def logits(graphdef, state: TrainState, tokens):
    """Logits f32[B, T, V] of token ids i32[B, T], each row one document. Meant for looking, not for training: it makes them all, and products in FP8 are left
    to XLA's own options, by which a GPU may round them once more.

    Rows and places are filled up to what the mesh divides, and cut off again."""
    B, T = tokens.shape
    tokens = jnp.pad(tokens, [(0, -B % axis_size(*BATCH)), (0, -T % axis_size("sequence"))])
    index = jnp.broadcast_to(jnp.expand_dims(jnp.arange(tokens.shape[1], dtype=jnp.int32), 0), tokens.shape)
    model = states.merge(graphdef, _variables(state))
    hidden, _ = model(tokens, index, jnp.zeros_like(index), index + 1, row_length=T)
    head = gather(model.head, HEAD_NAMES, hidden.dtype)
    return dot(hidden, head, ((2,), (1,)), jnp.float32)[:B, :T]
