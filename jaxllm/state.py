"""What a run is made of between steps: a pytree of arrays, created sharded.

Shapes first, shardings second, arrays last: a model is traced abstractly, every parameter gets its sharding at rest from the names it
declared, and only then are arrays made, each device making its own part. Parameters are a flat dict {path: array}; the module structure
stays behind in `graphdef`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm import sharding
from jaxllm.attention import AttentionConfig
from jaxllm.linear import PrecisionConfig
from jaxllm.models import FAMILIES
from jaxllm.models.decoder import Decoder, ModelConfig
from jaxllm.moe import MoEConfig

_NO_MOE = MoEConfig()  # what dense models do not read


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """step: i32[], batches consumed so far. params: what is trained, {path: array}. frozen: weights that are only read (empty in full
    training). fp8: scaling state (empty without FP8). opt_state: the optimizer's. Random numbers are fold_in(seed, step), so none is kept."""

    step: Any
    params: dict
    frozen: dict
    fp8: dict
    opt_state: Any


def _build(model: ModelConfig, precision: PrecisionConfig, attention: AttentionConfig, moe: MoEConfig, seed):
    rngs = nnx.Rngs(params=jax.random.key(seed))
    decoder = Decoder(model, precision, attention, moe, FAMILIES[model.family].Block, rngs=rngs)
    graphdef, variables = nnx.split(decoder)
    return graphdef, dict(nnx.to_flat_state(variables))


def declare(model: ModelConfig, precision: PrecisionConfig, attention: AttentionConfig, moe: MoEConfig = _NO_MOE):
    """(graphdef, {path: ShapeDtypeStruct with its sharding at rest}) on the current mesh; nothing is allocated."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise ValueError("no mesh: call this under `with jax.set_mesh(jaxllm.make_mesh(cfg.mesh)):`")
    mesh = jax.sharding.get_mesh()
    graphdef, variables = jax.eval_shape(functools.partial(_build, model, precision, attention, moe), 0)
    params = {}
    for path, variable in variables.items():
        value, axes = variable.get_value(), variable.get_metadata()["axes"]
        name = "/".join(map(str, path))
        names = (*("layers",) * (value.ndim - len(axes)), *axes)
        placed = sharding.at_rest(mesh, name, names, value.shape)
        params[name] = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=placed)
    return graphdef, params


def initialise(
    abstract: dict,
    model: ModelConfig,
    precision: PrecisionConfig,
    attention: AttentionConfig,
    seed: int,
    moe: MoEConfig = _NO_MOE,
) -> dict:
    """New random parameters, created where they rest; the same values on every mesh."""

    def make(seed):
        variables = _build(model, precision, attention, moe, seed)[1]
        return {"/".join(map(str, path)): variable.get_value() for path, variable in variables.items()}

    make = jax.jit(make, out_shardings={path: leaf.sharding for path, leaf in abstract.items()})
    return make(seed)


def merge(graphdef, params: dict) -> Decoder:
    """The module with these parameters, to be called inside a traced function."""
    return nnx.merge(graphdef, nnx.from_flat_state({tuple(path.split("/")): value for path, value in params.items()}))


def abstract_opt_state(optimizer, params: dict):
    """The optimizer's state as ShapeDtypeStructs: a moment rests like its parameter (its last key is the parameter's path), a counter is
    replicated."""
    mesh = jax.sharding.get_mesh()

    def place(path, leaf):
        key = getattr(path[-1], "key", None) if path else None
        like = params.get(key) if isinstance(key, str) else None
        placed = like.sharding if like is not None and like.shape == leaf.shape else sharding.replicated(mesh)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed)

    return jax.tree_util.tree_map_with_path(place, jax.eval_shape(optimizer.init, params))


def abstract_step():
    return jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding.replicated(jax.sharding.get_mesh()))
