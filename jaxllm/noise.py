"""Random numbers for tokens: what a token meets depends on the step, the layer, its row and its place there, and not on the mesh, the microbatches or the
device that computes it. Router jitter and the dropout of adapters draw from here.

`noise` is (random key, row numbers i32, places in the rows i32): those of tokens in their rows are [B] and [B, T], those of rows sorted by expert are both
[devices, R]. None where nothing is random: in evaluation."""

import zlib

import jax
import jax.numpy as jnp


def drawn(noise, draw):
    """draw(key) -> [n], for each token -> [*places' shape, n]."""
    key, rows, places = noise
    rows = jnp.broadcast_to(rows[..., None], places.shape) if rows.ndim < places.ndim else rows
    one = lambda row, place: draw(jax.random.fold_in(jax.random.fold_in(key, row), place))
    for _ in range(places.ndim):
        one = jax.vmap(one)
    return one(rows, places)


def named(noise, name: str):
    """The noise of one of several that draw for the same tokens."""
    return None if noise is None else (jax.random.fold_in(noise[0], zlib.crc32(name.encode()) >> 1), *noise[1:])
