"""Attention over the mesh: picks the backend, and brings keys to queries where the sequence axis splits them.

The mesh decides where (queries stay; with sequence > 1 keys and values are gathered over that axis), the config decides how. One
custom_vjp encloses two shard_maps, forward and backward, so that its residuals are ordinary sharded arrays that rematerialisation policies
can name ("attn_out", "attn_lse").

Not here: masks. They arrive as one interval of keys per query, made once per batch on the host.
"""

import functools
from typing import Literal

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxllm.section import Section
from jaxllm.sharding import AXES, BATCH, axis_size
from jaxllm_kernels import BACKENDS, without_padding
from jaxllm_kernels import attention as local_attention

_HEADS = P(BATCH, "sequence", None, None)  # [B, T, heads, head_dim]
_ROWS = P(BATCH, "sequence")  # [B, T]
_LSE = P(BATCH, None, "sequence")  # [B, heads, T]


class AttentionConfig(Section):
    backend: Literal["auto", "xla"] = "auto"
    """What computes attention on each device: "xla" runs anywhere; "auto" takes the best backend that the device has."""


def choose_backend(config: AttentionConfig) -> str:
    """The backend's name: what was asked for, or the best of what is there."""
    return "xla" if config.backend == "auto" else config.backend


def attention(q, k, v, k_start, k_end, config: AttentionConfig):
    """q [B, T, H, D], k and v [B, T, K, D], intervals i32[B, T] in the row's own token index -> out [B, T, H, D] in q's dtype."""
    backend = choose_backend(config)
    if axis_size(*AXES) == 1:
        return local_attention(q, k, v, k_start, k_end, backend, True)
    return _over_mesh(*without_padding(q, k, v, k_start, k_end), k_start, k_end, backend)


def _gathered(x):
    return jax.lax.all_gather(x, "sequence", axis=1, tiled=True) if axis_size("sequence") > 1 else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _over_mesh(q, k, v, k_start, k_end, backend):
    return _over_mesh_forward(q, k, v, k_start, k_end, backend)[0]


def _over_mesh_forward(q, k, v, k_start, k_end, backend):
    aligned = axis_size("sequence") == 1

    def local(q, k, v, k_start, k_end):
        return BACKENDS[backend].forward(q, _gathered(k), _gathered(v), k_start, k_end, aligned=aligned)

    specs = (_HEADS, _HEADS, _HEADS, _ROWS, _ROWS)
    out, lse = jax.shard_map(local, in_specs=specs, out_specs=(_HEADS, _LSE), check_vma=False)(q, k, v, k_start, k_end)
    out, lse = checkpoint_name(out, "attn_out"), checkpoint_name(lse, "attn_lse")
    return out, (q, k, v, k_start, k_end, out, lse)


def _over_mesh_backward(backend, residuals, do):
    aligned = axis_size("sequence") == 1

    def local(q, k, v, k_start, k_end, out, lse, do):
        grads = BACKENDS[backend].backward(q, _gathered(k), _gathered(v), k_start, k_end, out, lse, do, aligned=aligned)
        if not aligned:  # every device holds a part of each key's gradient: summed in float32, each keeps its own keys
            scatter = functools.partial(jax.lax.psum_scatter, axis_name="sequence", scatter_dimension=1, tiled=True)
            grads = (grads[0], scatter(grads[1]), scatter(grads[2]))
        return tuple(g.astype(x.dtype) for g, x in zip(grads, (q, k, v), strict=True))

    specs = (_HEADS, _HEADS, _HEADS, _ROWS, _ROWS, _HEADS, _LSE, _HEADS)
    grads = jax.shard_map(local, in_specs=specs, out_specs=(_HEADS,) * 3, check_vma=False)(*residuals, do)
    return *grads, None, None


_over_mesh.defvjp(_over_mesh_forward, _over_mesh_backward)
