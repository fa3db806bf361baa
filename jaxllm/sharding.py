"""All sharding of the project: four mesh axes and two tables, how arrays rest and how they are used.

A weight declares logical names for its dims. AT_REST says over which mesh axes each name is split while the weight waits (parameters,
gradients, optimizer state); IN_USE says the same while a matmul reads it. The step from one to the other is an all-gather in the forward
pass and a reduce-scatter in the backward pass, which XLA derives from `constrain`. With one table only, XLA guesses, and its guess is an
"Involuntary full rematerialization".

Weights rest split over the sequence axis too: with sequence = 8 and data = 1 an 8B model and its Adam state would not fit otherwise.
Not here: tensor parallelism (it would be one axis and two table cells), and any choice of mesh, which is the config's.
"""

import math
from typing import Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm.section import Section, UserError

AXES = ("replica", "data", "sequence", "expert")
BATCH = ("replica", "data", "expert")
WEIGHTS = ("data", "sequence", "expert")

AT_REST = {
    "batch": BATCH, "sequence": "sequence", "embed": WEIGHTS, "bias": WEIGHTS, "outputs": WEIGHTS, "experts": "expert", "rank": None,
    "heads": None, "kv_heads": None, "head_dim": None, "mlp": None, "vocab": None, "layers": None, "router": None,
}  # fmt: skip
IN_USE = {**AT_REST, "embed": None, "bias": None, "outputs": None}


class MeshConfig(Section):
    """Sizes of the four mesh axes. Their product is the number of devices; one axis may be -1, "the rest"."""

    replica: int = 1
    """Copies of the weights (hybrid sharding: copied across nodes, sharded inside one)."""
    data: int = -1
    """Fully sharded data parallelism: the batch is split, and the weights rest split."""
    sequence: int = 1
    """Context parallelism: each row's tokens are split, and the weights rest split over this axis as well."""
    expert: int = 1
    """Expert parallelism: experts are split; to everything else this axis is more data parallelism."""
    platform: Literal["any", "gpu"] = "any"
    """"gpu": refuse to train where JAX finds no GPU, instead of training on the CPU at a thousandth of the speed."""

    def sizes(self, num_devices: int) -> tuple[int, ...]:
        """The four sizes for that many devices, the -1 filled in. UserError if they do not multiply to `num_devices`."""
        given = [getattr(self, axis) for axis in AXES]
        if any(n < 1 and n != -1 for n in given) or given.count(-1) > 1:
            raise UserError(
                f"mesh: sizes must be positive and at most one of them -1 (the rest), got {self.described()}"
            )
        known = math.prod(n for n in given if n != -1)
        sizes = tuple(num_devices // known if n == -1 else n for n in given)
        if math.prod(sizes) != num_devices:
            found = (
                f"{num_devices} {jax.default_backend()} device(s)"
                if num_devices == jax.device_count()
                else f"{num_devices} devices"
            )
            raise UserError(
                f"mesh: {self.described()} needs {'a multiple of ' if -1 in given else ''}{known} devices, but there are {found}. "
                f"Change mesh.{', mesh.'.join(AXES)}, or set one of them to -1 for the rest."
            )
        return sizes

    def described(self) -> str:
        return " x ".join(f"{axis} = {getattr(self, axis)}" for axis in AXES)


def make_mesh(config: MeshConfig, devices=None) -> Mesh:
    """The mesh of `config` over `devices` (default: all). Axis types are Auto: XLA propagates what the two tables pin."""
    if devices is None:
        return jax.make_mesh(config.sizes(jax.device_count()), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    devices = np.asarray(devices)  # in the order given: tests and deviceless compilation pass them explicitly
    return Mesh(devices.reshape(config.sizes(devices.size)), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def axis_size(*axes: str) -> int:
    """Product of the sizes of these axes in the current mesh; 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.prod(mesh.shape[axis] for axis in axes)


def spec(table: dict, names) -> P:
    """Partition spec of dims with these logical names. A mesh axis serves one dim only: the first name that asks for it gets it, so
    "embed" of an expert weight rests on (data, sequence), because "experts" has taken "expert"."""
    taken, parts = set(), []
    for name in names:
        axes = table[name] if name is not None else None
        axes = tuple(a for a in ((axes,) if isinstance(axes, str) else axes or ()) if a not in taken)
        taken.update(axes)
        parts.append(axes if len(axes) > 1 else axes[0] if axes else None)
    return P(*parts)


def constrain(x, *names, table=IN_USE):
    """`x` pinned to the table's layout for these dim names. Nothing to pin on one device (or without a mesh): `x` itself."""
    if axis_size(*AXES) == 1:
        return x
    return jax.lax.with_sharding_constraint(x, spec(table, names))


def at_rest(mesh: Mesh, path: str, names, shape) -> NamedSharding:
    """Sharding at rest of the weight at `path`. UserError where a mesh axis does not divide a dim."""
    partition = spec(AT_REST, names)
    for name, size, axes in zip(names, shape, partition, strict=True):
        parts = math.prod(mesh.shape[a] for a in ((axes,) if isinstance(axes, str) else axes or ()))
        if size % parts:
            raise UserError(
                f"mesh: {path} has {name} = {size}, which {parts} shards ({' x '.join([axes] if isinstance(axes, str) else axes)}) "
                f"do not divide. Choose mesh sizes whose product divides {size}, or more mesh.replica."
            )
    return NamedSharding(mesh, partition)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of per-token arrays [num_microbatches, B, T]."""
    return NamedSharding(mesh, P(None, BATCH, "sequence"))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())
