"""Random numbers for tokens: what a token meets depends on the step, the layer, its row and its place there, and not on the mesh, the microbatches or the
device that computes it. Router jitter and the dropout of adapters draw from here.

`noise` is (random key, row numbers i32, places in the rows i32): those of tokens in their rows are [B] and [B, T], those of rows sorted by expert are both
[devices, R]. None where nothing is random: in evaluation.

Not jax.random for each token: a number of its own costs several hundred instructions, to draw and to compile, as `optim` found."""

import zlib

import jax
import jax.numpy as jnp

from jaxllm.optim import mix


def uniform(noise, name: str, size: int):
    """f32 [*places' shape, size] from [0, 1), 24 bits each: numbers of their own for each token, place in `size`, and name."""
    key, rows, places = noise
    rows = jnp.broadcast_to(rows[..., None], places.shape) if rows.ndim < places.ndim else rows
    first, second = jax.random.key_data(key)[:2]
    first, second = mix(first ^ jnp.uint32(zlib.crc32(name.encode()))), mix(second + jnp.uint32(0x9E3779B9))
    rows, places = rows.astype(jnp.uint32), places.astype(jnp.uint32)
    # Two hashes of the token: where one is the same for two tokens, by chance, the other is not.
    one = mix(mix(rows + first) + places)
    other = mix(mix(places ^ second) ^ (rows * jnp.uint32(0x85EBCA6B) + first))
    index = jax.lax.broadcasted_iota(jnp.uint32, (*places.shape, size), places.ndim) * jnp.uint32(0x9E3779B9)
    bits = mix(mix(index + one[..., None]) + other[..., None])
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2**-24)
