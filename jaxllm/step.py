"""The training step, and everything it starts from: `init_state`, `make_train_step`, `make_eval_step`, `logits`.

Sum everywhere, divide once: microbatches and devices add up losses, weights and gradients, and the sums are divided by the number of trained
tokens of the whole step. So neither accumulation nor padding nor the mesh changes the answer. A step whose loss or gradient norm is not
finite, or which trains no token, leaves parameters and optimizer as they were and says so in its metrics.
"""

import functools

import jax
import jax.numpy as jnp
import optax

from jaxllm import checkpoint, hf, moe, optim
from jaxllm import state as states
from jaxllm.config import Config
from jaxllm.hub import resolve_model_path
from jaxllm.linear import gather
from jaxllm.loss import HEAD_NAMES, cross_entropy
from jaxllm.models import FAMILIES
from jaxllm.sharding import BATCH, axis_size
from jaxllm.state import TrainState


def abstract_state(cfg: Config):
    """(graphdef, TrainState of ShapeDtypeStructs with shardings) on the current mesh: what `init_state` makes, without making it."""
    graphdef, params = states.declare(cfg.model, cfg.precision, cfg.attention, cfg.moe)
    opt_state = states.abstract_opt_state(optim.make_optimizer(cfg.optimizer), params)
    return graphdef, TrainState(step=states.abstract_step(), params=params, frozen={}, fp8={}, opt_state=opt_state)


def init_state(cfg: Config):
    """(graphdef, TrainState) at step 0 on the current mesh: weights from cfg.model.path, or random from cfg.seed."""
    graphdef, abstract = abstract_state(cfg)
    if cfg.model.path is None:
        params = states.initialise(abstract.params, cfg.model, cfg.precision, cfg.attention, cfg.seed, cfg.moe)
    else:
        folder, _ = resolve_model_path(cfg.model.path, cfg.model.revision)
        if (folder / "config.json").is_file():
            params = hf.load_params(folder, FAMILIES[cfg.model.family].hf_weights(cfg.model), abstract.params)
        else:
            params, _ = checkpoint.load_params(folder, abstract.params)
    return graphdef, start(cfg, abstract, params)


def start(cfg: Config, abstract: TrainState, params: dict) -> TrainState:
    """A TrainState at step 0 around these parameters."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract.opt_state)
    opt_state = jax.jit(optim.make_optimizer(cfg.optimizer).init, out_shardings=shardings)(params)
    step = jax.device_put(jnp.zeros((), jnp.int32), abstract.step.sharding)
    return TrainState(step=step, params=params, frozen={}, fp8={}, opt_state=opt_state)


def _hidden(graphdef, params, rows):
    """(final hidden states, what the layers record, head) of one microbatch."""
    model = states.merge(graphdef, params)
    hidden, seen = model(rows.tokens, rows.positions, rows.k_start, rows.k_end, rows.layout, rows.row_length)
    return hidden, seen, model.head


def _sums(graphdef, params, rows, cfg: Config, step=None):
    """(total, parts) of one microbatch, undivided; `total` is what is differentiated. step: see `_whole_step`; None leaves the router's losses out."""
    hidden, seen, head = _hidden(graphdef, params, rows)
    with jax.named_scope("loss"):
        total, loss_sum, z_sum = cross_entropy(
            hidden,
            head,
            rows.targets,
            rows.loss_weights,
            cfg.loss,
            cfg.precision.compute,
            cfg.precision.gradient_reduce,
        )
    parts = {"loss_sum": loss_sum, "z_sum": z_sum}
    if seen and step is not None:
        trained, num_tokens, counts = step
        counts = seen["counts"] if counts is None else counts
        balance, z = moe.auxiliary(seen, counts, num_tokens, cfg.moe.aux_loss)
        total += trained * (cfg.model.router_aux_loss_coef * balance + cfg.moe.z_loss * z)
        parts |= {"seen": seen, "balance": balance, "router_z": z}
    return total, parts


def _whole_step(graphdef, params, batch, cfg: Config):
    """What the router's losses need of all microbatches before one is differentiated: (trained tokens, real tokens, assignments f32[layers, E] of each
    expert or None where there is one microbatch, whose own they are). Several cost one more forward pass: the shares of experts multiply the
    gradient, so losses of the parts, each with shares of its own, would not add up to the step's."""
    trained = jnp.maximum(jnp.sum(batch.loss_weights), 1.0)
    real = jnp.maximum(jnp.sum(batch.k_end > batch.k_start).astype(jnp.float32), 1.0)
    if batch.tokens.shape[0] == 1 or not cfg.model.router_aux_loss_coef:
        return trained, real, None
    counted = lambda total, rows: (total + _hidden(graphdef, params, rows)[1]["counts"], None)
    zeros = jnp.zeros((cfg.model.num_hidden_layers, cfg.model.num_local_experts))
    return trained, real, jax.lax.scan(counted, zeros, batch)[0]


def gradients(graphdef, params: dict, batch, cfg: Config):
    """(gradients of the summed loss {path: f32}, parts) over all microbatches of `batch`, undivided."""
    whole = _whole_step(graphdef, params, batch, cfg) if cfg.model.num_local_experts else None
    one = jax.value_and_grad(lambda p, rows: _sums(graphdef, p, rows, cfg, whole), has_aux=True)
    if batch.tokens.shape[0] == 1:  # no accumulator
        (_, parts), grads = one(params, jax.tree.map(lambda x: x[0], batch))
        return grads, parts

    def microbatch(carry, rows):
        (_, parts), grads = one(params, rows)
        return jax.tree.map(jnp.add, carry, (grads, parts)), None

    shapes = jax.eval_shape(one, params, jax.tree.map(lambda x: x[0], batch))[0][1]
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    carry, _ = jax.lax.scan(microbatch, (jax.tree.map(jnp.zeros_like, params), zeros), batch)
    return carry


def make_train_step(graphdef, cfg: Config):
    """step(state, batch) -> (state, metrics), compiled on first use; `state` is consumed.

    metrics (device scalars): loss (mean over trained tokens, without z-loss), z_loss, grad_norm (before clipping), learning_rate, tokens
    (trained), bad (the step was left out). With experts also aux_loss and router_z_loss (unweighted), and those of `moe.report`."""
    optimizer = optim.make_optimizer(cfg.optimizer)
    schedule = optim.learning_rate(cfg.optimizer, cfg.steps)

    def train_step(state: TrainState, batch):
        sums, parts = gradients(graphdef, state.params, batch, cfg)
        tokens = jnp.sum(batch.loss_weights)
        share = 1.0 / jnp.maximum(tokens, 1e-6)
        loss, z_loss = parts["loss_sum"] * share, cfg.loss.z_loss * parts["z_sum"] * share
        with jax.named_scope("optimizer"):
            grads, norm = optim.clip(jax.tree.map(lambda g: g * share, sums), cfg.optimizer.max_grad_norm)
            rate = schedule(state.step + 1)
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, jax.tree.map(lambda u: -rate * u, updates))
        good = jnp.isfinite(loss + z_loss) & jnp.isfinite(norm) & (tokens > 0)
        keep = lambda new, old: jnp.where(good, new, old)
        params, opt_state = jax.tree.map(keep, (params, opt_state), (state.params, state.opt_state))
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
        return TrainState(state.step + 1, params, state.frozen, state.fp8, opt_state), metrics

    return jax.jit(train_step, donate_argnums=0)


def make_eval_step(graphdef, cfg: Config):
    """step(state, batch) -> {"loss_sum", "weight_sum"}: sums over the batch's trained tokens, to be added up and divided once."""

    def eval_step(state: TrainState, batch):
        def microbatch(total, rows):
            return total + _sums(graphdef, state.params, rows, cfg)[1]["loss_sum"], None

        loss_sum, _ = jax.lax.scan(microbatch, jnp.zeros(()), batch)
        return {"loss_sum": loss_sum, "weight_sum": jnp.sum(batch.loss_weights)}

    return jax.jit(eval_step)


@functools.partial(jax.jit, static_argnums=0)
def logits(graphdef, state: TrainState, tokens):
    """Logits f32[B, T, V] of token ids i32[B, T], each row one document. Meant for looking, not for training: it makes them all.

    Rows and places are filled up to what the mesh divides, and cut off again."""
    B, T = tokens.shape
    tokens = jnp.pad(tokens, [(0, -B % axis_size(*BATCH)), (0, -T % axis_size("sequence"))])
    index = jnp.broadcast_to(jnp.expand_dims(jnp.arange(tokens.shape[1], dtype=jnp.int32), 0), tokens.shape)
    model = states.merge(graphdef, state.params)
    hidden, _ = model(tokens, index, jnp.zeros_like(index), index + 1)
    head = gather(model.head, HEAD_NAMES, hidden.dtype)
    dims = (((2,), (1,)), ((), ()))
    return jax.lax.dot_general(hidden, head, dims, preferred_element_type=jnp.float32)[:B, :T]
