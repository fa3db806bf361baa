"""Weights that are only read, in whatever form they rest: an array of floats [*D, *inputs, *outputs], a `Float8` of that shape, or an `NF4` of matrices
[*D, outputs, inputs]. D is nothing, or experts; layers are scanned.

What `linear` and `grouped_linear` need of them: gathered as they rest (`gather`), and as the matrix that a product reads (`matrix`). Their arrays lie among
a model's variables under the path of the weight, {"P/kernel": array} or {"P/kernel/codes": array, ...}; `joined` and `apart` go from one to the other.

Not here: gradients, which frozen weights do not have; the products.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm import fp8, nf4
from jaxllm.lora import LoRAConfig
from jaxllm.nf4 import NF4
from jaxllm.sharding import AT_REST, IN_USE, constrain, spec

FORMAT = fp8.FORMATS["kernel"]


class Float8(NamedTuple):
    """values: e4m3[*D, *inputs, *outputs]; scale: f32[*D], by which the weight was multiplied before the cast (`fp8.quantise`)."""

    values: Any
    scale: Any


class Part(nnx.Param):
    """One array of a weight that is no float."""


_FORMS = {fields: form for form in (NF4, Float8) for fields in form._fields}


def kernel(lora: LoRAConfig, dtype, shape, names, num_inputs: int, stddev: float, key, num_leading: int = 0):
    """The variable of a weight [*D, *inputs, *outputs], drawn in `dtype`; where `lora` keeps it in another form, the variables of that, all zeros, whose values
    come later (`joined`)."""
    base = lora.kept
    if base not in ("float8", "nf4"):
        return nnx.Param(stddev * jax.random.normal(key, shape, dtype), axes=names)
    leading, inputs = shape[:num_leading], shape[num_leading : num_leading + num_inputs]
    outputs = shape[num_leading + num_inputs :]
    if base == "float8":
        form = Float8(jax.ShapeDtypeStruct(shape, FORMAT), jax.ShapeDtypeStruct(leading, jnp.float32))
        axes = Float8(tuple(names), tuple(names[:num_leading]))
    else:
        form = nf4.abstract((*leading, math.prod(outputs), math.prod(inputs)), lora.double_quant)
        axes = nf4.names(form, tuple(names[:num_leading]))
    made = lambda like, dims: Part(jnp.zeros(like.shape, like.dtype), axes=dims)
    return nnx.Dict({field: made(getattr(form, field), getattr(axes, field)) for field in _present(form)})


def _present(weight) -> list[str]:
    return [field for field in weight._fields if getattr(weight, field) is not None]


def value(kernel):
    """The weight of a module's `kernel`: what `kernel` made."""
    if isinstance(kernel, nnx.Variable):
        return kernel.get_value()
    held = {field: variable.get_value() for field, variable in kernel.items()}
    return _FORMS[next(iter(held))](**held)


def joined(flat: dict) -> dict:
    """{path of a weight: array, Float8 or NF4} from {path of a variable: array}."""
    groups: dict[str, dict] = {}
    for path, array in flat.items():
        above, _, field = path.rpartition("/")
        if field in _FORMS:
            groups.setdefault(above, {})[field] = array
        else:
            groups[path] = array
    return {path: _FORMS[next(iter(held))](**held) if isinstance(held, dict) else held for path, held in groups.items()}


def apart(weights: dict) -> dict:
    """The inverse of `joined`."""
    flat = {}
    for path, weight in weights.items():
        if isinstance(weight, NF4 | Float8):
            flat |= {f"{path}/{field}": getattr(weight, field) for field in _present(weight)}
        else:
            flat[path] = weight
    return flat


def to_float8(weight, like: Float8) -> Float8:
    """weight [*D, *inputs, *outputs] with the scale that makes the largest magnitude of each of D the largest number of e4m3, where `like`,
    ShapeDtypeStructs with shardings, says that it rests. Not inside of jit: the scale is divided on the host, since devices round divisions in ways of their
    own, and the same weights are to be the same bytes on all."""
    whole = NamedSharding(like.values.sharding.mesh, P())
    largest = np.asarray(jax.jit(fp8.amax, static_argnums=1, out_shardings=whole)(weight, len(like.scale.shape)))
    scale = np.where(largest > 0, np.float32(fp8.largest(FORMAT)) / np.where(largest > 0, largest, 1), 1).astype(
        np.float32
    )
    quantise = lambda weight, scale: Float8(fp8.quantise(weight, scale, FORMAT), scale)
    return jax.jit(quantise, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, like))(weight, scale)


def from_float8(weight: Float8, dtype):
    """[*D, *inputs, *outputs] in `dtype`, from float32 rounded once."""
    inverse = jnp.expand_dims(1 / weight.scale, tuple(range(weight.scale.ndim, weight.values.ndim)))
    return (weight.values.astype(jnp.float32) * inverse).astype(dtype)


def _leading(names) -> tuple:
    """Names of the dims D."""
    return tuple(names[:1]) if names[0] == "experts" else ()


def split(weight, names, table):
    """Partition specs of a weight that rests or is used as `table` says; names: of [*D, *inputs, *outputs], "experts" first where there are any."""
    leading = _leading(names)
    if isinstance(weight, NF4):
        dims = nf4.names(weight, leading)
        return NF4(*(None if d is None else spec(table, d) for d in dims))
    if isinstance(weight, Float8):
        return Float8(spec(table, names), spec(table, leading))
    return spec(table, names)


def gather(weight, names, dtype, table=IN_USE):
    """The weight in use, still in its form, named "gathered"; floats in `dtype`, cast where they rest."""
    leading = _leading(names)
    if isinstance(weight, NF4):
        used = nf4.gather(weight, leading, table)
    elif isinstance(weight, Float8):
        # Pinned where it rests, or XLA may gather what is made of it instead.
        values = constrain(constrain(weight.values, *names, table=AT_REST), *names, table=table)
        used = Float8(values, constrain(weight.scale, *leading, table=table) if leading else weight.scale)
    else:
        used = constrain(constrain(weight.astype(dtype), *names, table=AT_REST), *names, table=table)
    return jax.tree.map(lambda x: checkpoint_name(x, "gathered"), used)


def matrix(weight, num_inputs: int, dtype, num_leading: int = 0):
    """([*D, inputs, outputs] or [*D, outputs, inputs] in `dtype`, whether it is the latter)."""
    if isinstance(weight, NF4):
        return nf4.dequantise(weight, dtype), True
    whole = from_float8(weight, dtype) if isinstance(weight, Float8) else weight.astype(dtype)
    leading, outputs = whole.shape[:num_leading], math.prod(whole.shape[num_leading + num_inputs :])
    return whole.reshape(*leading, -1, outputs), False


def dequantised(weight, shape):
    """f32 of `shape` [*D, *inputs, *outputs]: what `weight` means."""
    if isinstance(weight, NF4):
        return jnp.swapaxes(nf4.dequantise(weight, jnp.float32), -1, -2).reshape(shape)
    return from_float8(weight, jnp.float32) if isinstance(weight, Float8) else weight.astype(jnp.float32)


def opened(weight, names, num_inputs: int, shape, dtype):
    """(array [*D, *inputs, *outputs] of `shape`, names of its dims as it lies) for a product that quantises it itself. Floats and FP8 stay where they rest;
    NF4 is gathered first, for its blocks lie along the inputs, except over experts."""
    if isinstance(weight, Float8):
        return from_float8(weight, jnp.float32), names
    if not isinstance(weight, NF4):
        return weight, names
    leading = _leading(names)
    w = nf4.dequantise(jax.tree.map(lambda x: checkpoint_name(x, "gathered"), nf4.gather(weight, leading)), dtype)
    return w.swapaxes(-1, -2).reshape(shape), (*leading, *(None for _ in names[len(leading) :]))


def scales(weight, scales: dict) -> dict:
    """`scales` of a product in FP8, that of a kernel which rests in FP8 replaced by the kernel's own; what is recorded goes to the same place as ever."""
    if not isinstance(weight, Float8):
        return scales
    return {**scales, "kernel": fp8.instead(scales["kernel"], weight.scale)}
