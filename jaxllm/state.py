"""What a run is made of between steps: a pytree of arrays, created sharded.

Shapes first, shardings second, arrays last: a model is traced abstractly, every parameter gets its sharding at rest from the names it
declared, and only then are arrays made, each device making its own part. Parameters are a flat dict {path: array}; the module structure
stays behind in `graphdef`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm import fp8, frozen, optim, sharding
from jaxllm.attention import AttentionConfig
from jaxllm.linear import PrecisionConfig
from jaxllm.lora import NO_ADAPTERS, Adapter, LoRAConfig
from jaxllm.models import FAMILIES
from jaxllm.models.decoder import Decoder, ModelConfig
from jaxllm.moe import MoEConfig
from jaxllm.section import UserError

_NO_MOE = MoEConfig()  # what dense models do not read


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """step: i32[], batches consumed so far. params: what is trained, {path: array}. frozen: what is only read (empty without adapters).
    fp8: {path: fp8.Scaling} (empty without FP8). opt_state: the optimizer's. Random numbers are fold_in(seed, step), so none is kept."""

    step: Any
    params: dict
    frozen: dict
    fp8: dict
    opt_state: Any


class Declared(NamedTuple):
    """What a model is made of, on the current mesh: ShapeDtypeStructs with their shardings at rest, {path: array} each. params: what is trained. frozen: what
    is only read; the arrays of a weight in another form than floats lie below its path (`frozen.joined`). fp8: {path: fp8.Scaling}, replicated; none
    unless precision.matmul asks for it."""

    graphdef: Any
    params: dict
    frozen: dict
    fp8: dict


def _build(
    model: ModelConfig, precision: PrecisionConfig, attention: AttentionConfig, moe: MoEConfig, lora: LoRAConfig, seed
):
    rngs = nnx.Rngs(params=jax.random.key(seed))
    decoder = Decoder(model, precision, attention, moe, lora, FAMILIES[model.family].Block, rngs=rngs)
    graphdef, variables = nnx.split(decoder)
    return graphdef, {"/".join(map(str, path)): variable for path, variable in nnx.to_flat_state(variables)}


def declare(
    model: ModelConfig,
    precision: PrecisionConfig,
    attention: AttentionConfig,
    moe: MoEConfig = _NO_MOE,
    lora: LoRAConfig = NO_ADAPTERS,
) -> Declared:
    """What the model that these describe is made of, nothing allocated."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise ValueError("no mesh: call this under `with jax.set_mesh(jaxllm.make_mesh(cfg.mesh)):`")
    mesh = jax.sharding.get_mesh()
    graphdef, variables = jax.eval_shape(functools.partial(_build, model, precision, attention, moe, lora), 0)
    params, kept, scales = {}, {}, {}
    for path, variable in variables.items():
        value, axes = variable.get_value(), variable.get_metadata()["axes"]
        if isinstance(variable, fp8.Observed):
            scales[path] = jax.eval_shape(functools.partial(fp8.initial, precision.fp8, value.shape[:-1]))
            continue
        names = (*("layers",) * (value.ndim - len(axes)), *axes)
        placed = sharding.at_rest(mesh, path, names, value.shape)
        if lora.rank is None or isinstance(variable, Adapter):
            params[path] = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=placed)
        else:
            dtype = value.dtype if isinstance(variable, frozen.Part) else lora.frozen_dtype
            kept[path] = jax.ShapeDtypeStruct(value.shape, dtype, sharding=placed)
    placed = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding.replicated(mesh))
    return Declared(graphdef, params, kept, jax.tree.map(placed, scales))


def initialise(
    abstract: dict,
    model: ModelConfig,
    precision: PrecisionConfig,
    attention: AttentionConfig,
    seed: int,
    moe: MoEConfig = _NO_MOE,
    lora: LoRAConfig = NO_ADAPTERS,
) -> dict:
    """New random weights, of floats, created where they rest; the same values on every mesh, drawn in float32 whatever they are kept in. What adapters stand
    beside is what a run without adapters would start from. abstract: {path: ShapeDtypeStruct}, all of them or some."""
    drawn = precision.model_copy(update={"param": "float32"})

    def make(seed):
        variables = _build(model, drawn, attention, moe, lora.in_floats, seed)[1]
        return {path: variables[path].get_value().astype(leaf.dtype) for path, leaf in abstract.items()}

    return jax.jit(make, out_shardings={path: leaf.sharding for path, leaf in abstract.items()})(seed)


def merge(graphdef, variables: dict) -> Decoder:
    """The module with these parameters (and what `fp8.observed` makes of an FP8 state), to be called inside a traced function."""
    flat = {tuple(path.split("/")): value for path, value in variables.items()}
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def initial_fp8(config: fp8.FP8Config, abstract: dict) -> dict:
    """{path: Scaling} of tensors of which nothing is known, where `abstract` says that they rest."""
    if not abstract:
        return {}
    make = lambda: {path: fp8.initial(config, s.scale.shape) for path, s in abstract.items()}
    return jax.jit(make, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract))()


def abstract_opt_state(config: optim.OptimizerConfig, params: dict):
    """The optimizer's state as ShapeDtypeStructs: a moment rests like its parameter, in the memory that the config names, and blocks' scales like the
    blocks; a counter is replicated. UserError where the devices have no such memory."""
    mesh = jax.sharding.get_mesh()
    # A spec names the axes that may split a dim also where this mesh has one place on them, so the layout is that of any mesh.
    specs = {path: (*p.sharding.spec, *(None,) * (p.ndim - len(p.sharding.spec))) for path, p in params.items()}
    layered = lambda path, dim: path.startswith("layers/") and dim == 0
    whole = {path: [axes is None and not layered(path, i) for i, axes in enumerate(s)] for path, s in specs.items()}
    kind = {"device": None, "host": "pinned_host"}[config.moments_memory]
    found = [memory.kind for memory in mesh.devices.flat[0].addressable_memories()]
    if kind and found and kind not in found:  # devices that are described and not here list none
        raise UserError(
            f'optimizer.moments_memory: "host" needs devices with the memory "{kind}", and these have {", ".join(found)}; set it to "device"'
        )

    def place(path, leaf):
        if isinstance(leaf, optim.Blocks):
            spec, (first, end) = specs[path[-1].key], leaf.run
            scales = P(*spec[:first], None, *spec[end + len(spec) :])
            return optim.Blocks(placed(leaf.codes, P(*spec)), placed(leaf.scales, scales), leaf.run)
        key = getattr(path[-1], "key", None)
        if key is None:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding.replicated(mesh))
        return placed(leaf, P(*specs[key]))

    placed = lambda leaf, spec: jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec, memory_kind=kind)
    )
    zeros = jax.eval_shape(lambda: optim.init(config, params, whole))
    return jax.tree_util.tree_map_with_path(place, zeros, is_leaf=lambda x: isinstance(x, optim.Blocks))


def zeros(abstract):
    """Arrays of zeros like these ShapeDtypeStructs, made where they rest."""
    made = lambda tree: jax.jit(
        lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree),
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, tree),
    )()
    if all(leaf.sharding.memory_kind in (None, "device") for leaf in jax.tree.leaves(abstract)):
        return made(abstract)
    return jax.tree.map(made, abstract)  # one by one: each passes through the device


def abstract_step():
    return jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding.replicated(jax.sharding.get_mesh()))
