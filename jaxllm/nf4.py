"""NF4 with double quantisation (QLoRA, arXiv 2305.14314), as functions over arrays: weights that are only read, in 4.127 bits a parameter.

64 neighbours in a row of a matrix share one scale, their largest magnitude (absmax), and each is the nearest of 16 values of a standard normal's quantiles.
256 absmax, less the mean of all, share a scale again and are 8 bits each, of the 256 values of bitsandbytes' dynamic map. Bytes, codes and the values that
they mean are those of bitsandbytes bit for bit; only its quantiser for CPUs rounds the 8-bit codes by a coarser table (0.2 % differ), and ours to nearest,
as its kernel for GPUs does.

**A matrix stays as the file has it, [outputs, inputs].** Blocks lie along the inputs, so transposing would cut every one of them. A product contracts the
last dim of both operands, its gradient the first of the weight; neither moves the weight:

    w = nf4.dequantise(nf4.gather(weight), "bfloat16")      # [outputs, inputs], made of gathered u8
    y = dot(x, w, ((1,), (1,)), "bfloat16")                 # [T, inputs] -> [T, outputs]
    dx = dot(dy, w, ((1,), (0,)), "bfloat16")

With experts, w is [experts, outputs, inputs], and `grouped.forward` of it is dx, with transposed=True y.

**Rows are split at rest**, over all weight axes, whichever of the outputs' or inputs' names the tables would split: a row holds whole blocks, so no mesh cuts
one. The second level of scales, 0.002 bits a parameter, counts blocks across rows, and every device has all of it.

Not here: matrices whose rows are not whole blocks (refused; those of the published Llama and Mixtral models are), other block sizes, FP4, and gradients, which
frozen weights do not have. Files are `bnb`'s.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import sharding
from jaxllm.section import UserError

BLOCK = 64  # weights that share an absmax
NESTED = 256  # absmax that share a scale
ROWS = "outputs"  # the logical name of a matrix's rows

# Quantiles of the standard normal, as bitsandbytes has them (get_4bit_type); the shortest decimals that float32 reads back.
CODEBOOK = np.array(
    [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0,
     0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0], np.float32,
)  # fmt: skip


class NF4(NamedTuple):
    """Matrices [outputs, inputs], *D of them (layers, experts); arrays of JAX, of numpy, or what else stands for them (shapes, shardings).

    codes: u8[*D, outputs, inputs / 2], two weights a byte, the earlier one in the upper four bits. absmax: [*D, outputs, inputs / 64], u8 codes if doubly
    quantised, else f32. codebook: f32[*D, 16]. Doubly quantised only, else None: nested f32[*D, ceil(outputs * inputs / 64 / 256)], offset f32[*D],
    absmax_map f32[*D, 256]."""

    codes: Any
    absmax: Any
    codebook: Any
    nested: Any = None
    offset: Any = None
    absmax_map: Any = None


# --- shapes and shardings ---------------------------------------------------------------------------------------------


def abstract(shape: tuple[int, ...], double_quant: bool = True, path: str = "weight") -> NF4:
    """ShapeDtypeStructs of matrices of `shape` (*D, outputs, inputs). UserError naming `path` where inputs are no multiple of 64."""
    *leading, outputs, inputs = shape
    if inputs % BLOCK:
        raise UserError(
            f"{path}: NF4 has blocks of {BLOCK} along the inputs of a matrix, got {inputs} inputs; choose sizes of the model that are multiples of {BLOCK}, "
            "or a base that is not quantised"
        )
    array = lambda dtype, *shape: jax.ShapeDtypeStruct((*leading, *shape), dtype)
    codes, blocks = array(jnp.uint8, outputs, inputs // 2), (outputs, inputs // BLOCK)
    codebook = array(jnp.float32, 16)
    if not double_quant:
        return NF4(codes, array(jnp.float32, *blocks), codebook)
    nested = array(jnp.float32, -(-math.prod(blocks) // NESTED))
    return NF4(codes, array(jnp.uint8, *blocks), codebook, nested, array(jnp.float32), array(jnp.float32, 256))


def names(weight: NF4, leading: tuple = ()) -> NF4:
    """Logical names of the dims of each array of `weight`; leading: those of *D, such as ("layers", "experts")."""
    rows, table = (*leading, ROWS, None), (*leading, None)
    return _like(weight, NF4(rows, rows, table, table, tuple(leading), table))


def at_rest(mesh, path: str, weight: NF4, leading: tuple = ()) -> NF4:
    """`weight`'s ShapeDtypeStructs with their shardings at rest. UserError where the mesh does not divide the rows (or *D)."""
    place = lambda x, dims: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.at_rest(mesh, path, dims, x.shape))
    return _map(place, weight, names(weight, leading))


def gather(weight: NF4, leading: tuple = (), table=sharding.IN_USE) -> NF4:
    """`weight` as a product reads it, still quantised: what travels is codes and absmax. Inside of jit. Layers are scanned, so leading names experts or
    nothing."""
    return _map(lambda x, dims: sharding.constrain(x, *dims, table=table), weight, names(weight, leading))


def _like(weight: NF4, values: NF4) -> NF4:
    """`values` where `weight` has an array."""
    return NF4(*(None if x is None else value for x, value in zip(weight, values, strict=True)))


def _map(function, weight: NF4, *others: NF4) -> NF4:
    return NF4(*(None if x[0] is None else function(*x) for x in zip(weight, *others, strict=True)))


# --- reading ----------------------------------------------------------------------------------------------------------


def dequantise(weight: NF4, dtype):
    """[*D, outputs, inputs] in `dtype`: codebook[code] * absmax in float32, rounded once; the bits of bitsandbytes' dequantize_4bit. (XLA takes results below
    float32's smallest normal number, 1.2e-38, for 0.) For H100s it is two kernels, absmax in float32 (1/16 byte a weight), then all the rest (compiled). On a
    CPU 1.3 to 2.2 ns a weight (measured, of one core)."""
    matrix = functools.partial(_dequantise, dtype=dtype)
    for _ in range(weight.codebook.ndim - 1):
        matrix = jax.vmap(matrix)
    return matrix(weight)


def _dequantise(weight: NF4, dtype):
    outputs, half = weight.codes.shape
    pairs = jnp.stack([weight.codes >> jnp.uint8(4), weight.codes & jnp.uint8(15)], axis=-1)
    values = _take(weight.codebook, pairs).reshape(outputs, -1, BLOCK)
    return (values * jnp.expand_dims(_absmax(weight), -1)).astype(dtype).reshape(outputs, 2 * half)


def _absmax(weight: NF4):
    """f32[outputs, inputs / 64]."""
    if weight.nested is None:
        return weight.absmax
    row, column = (jax.lax.broadcasted_iota(jnp.int32, weight.absmax.shape, dim) for dim in (0, 1))
    block = row * weight.absmax.shape[1] + column
    product = _take(weight.absmax_map, weight.absmax) * _take(weight.nested, block // NESTED)
    # Changes no finite number. With nothing in between, XLA:CPU joins product and sum and rounds once where bitsandbytes rounds twice: 6 % of all absmax differ
    # in their last bit (measured).
    return jnp.maximum(product, jnp.finfo(jnp.float32).min) + weight.offset


def _take(table, index):
    return table.at[index.astype(jnp.int32)].get(mode="promise_in_bounds")


# --- quantising, on the host ------------------------------------------------------------------------------------------


def quantise(w: np.ndarray, double_quant: bool = True, path: str = "weight") -> NF4:
    """The matrix w [outputs, inputs], of any float dtype, as an NF4 of numpy. UserError naming `path` where inputs are no multiple of 64, and for NaN,
    infinities and what is one as float32. Threads may do it side by side."""
    outputs, inputs = w.shape
    like = abstract((outputs, inputs), double_quant, path)
    codes, absmax = encode(w, path)
    codes = codes.reshape(like.codes.shape)
    if not double_quant:
        return NF4(codes, absmax.reshape(like.absmax.shape), CODEBOOK)
    absmax, nested, offset = encode_absmax(absmax)
    return NF4(codes, absmax.reshape(like.absmax.shape), CODEBOOK, nested, offset, ABSMAX_MAP)


def encode(w: np.ndarray, path: str = "weight") -> tuple[np.ndarray, np.ndarray]:
    """w, of any shape and float dtype, flattened row by row -> codes u8[ceil(w.size / 2)], absmax f32[ceil(w.size / 64)]; a byte half used and the last
    block are filled up with zeros. UserError for NaN and infinities."""
    flat = np.ascontiguousarray(w).reshape(-1)
    num_blocks = -(-flat.size // BLOCK)
    packed, absmax = np.empty(num_blocks * BLOCK // 2, np.uint8), np.empty(num_blocks, np.float32)
    for first in range(0, num_blocks, _PIECE):
        with np.errstate(over="ignore"):
            x = flat[first * BLOCK : (first + _PIECE) * BLOCK].astype(np.float32)
        x = np.pad(x, (0, -x.size % BLOCK)).reshape(-1, BLOCK)
        largest = np.abs(x).max(1)
        absmax[first : first + _PIECE] = largest
        if not np.isfinite(largest).all():
            raise UserError(
                f"{path}: holds NaN or infinite values (as float32), which NF4 cannot; get a sound copy of it"
            )
        # Multiplied by the inverse, not divided, and never by 1 / 0, as bitsandbytes does.
        codes = _nearest(x * (np.float32(1) / np.maximum(largest, np.float32(1e-38)))[:, None], CODEBOOK)
        codes = codes.reshape(-1)
        packed[first * BLOCK // 2 : (first + _PIECE) * BLOCK // 2] = codes[0::2] << 4 | codes[1::2]
    return packed[: -(-flat.size // 2)], absmax


_PIECE = 1024  # blocks quantised at once: they and their codes stay in a core's cache


def encode_absmax(absmax: np.ndarray, offset=None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """absmax f32[blocks] -> codes u8[blocks], nested f32[ceil(blocks / 256)], offset f32[]: the nearest values of the dynamic map to (absmax - offset) /
    nested. offset: their mean if None. bitsandbytes sums it in float32, in an order of its own, and may be one unit in the last place away."""
    offset = np.float32(absmax.mean(dtype=np.float64) if offset is None else offset)
    x = absmax - offset
    blocks = np.pad(x, (0, -x.size % NESTED)).reshape(-1, NESTED)
    nested = np.abs(blocks).max(1)
    inverse = np.divide(np.float32(1), nested, where=nested > 0, out=np.zeros_like(nested))
    codes = np.searchsorted(_middles(ABSMAX_MAP), (blocks * inverse[:, None]).reshape(-1)[: x.size], side="left")
    return codes.astype(np.uint8), nested, np.array(offset)


def _nearest(x, values):
    """u8 of x's shape: index of the nearest of a few ascending `values`; what is in the middle goes down. Ten times as fast as a binary search."""
    codes, above = np.zeros(x.shape, np.uint8), np.empty(x.shape, bool)
    for middle in _middles(values):
        codes += np.greater(x, middle, out=above).view(np.uint8)
    return codes


def _middles(values):
    return np.float32(0.5) * (values[:-1] + values[1:])


def _dynamic_map() -> np.ndarray:
    """f32[256], ascending: bitsandbytes' create_dynamic_map(signed=True), arXiv 2110.02861 section 2.1. Decade i of seven, 10^(i - 7) to 10^(i - 6), has 2^i
    values, the middles of as many equal parts; then signs, 0 and 1."""
    positive = []
    for decade in range(7):
        # torch.linspace: from both ends, each point rounded once.
        count = 2**decade
        step = np.float64((np.float32(1) - np.float32(0.1)) / np.float32(count))
        up, down = np.float64(np.float32(0.1)) + step * np.arange(count + 1), 1 - step * np.arange(count, -1, -1)
        edges = np.where(np.arange(count + 1) < (count + 1) // 2, up, down).astype(np.float32)
        positive.append(np.float32(10.0 ** (decade - 6)) * ((edges[:-1] + edges[1:]) / np.float32(2)))
    positive = np.concatenate(positive)
    return np.sort(np.concatenate([positive, -positive, np.float32([0, 1])]))


ABSMAX_MAP = _dynamic_map()


# --- from the host to where it rests ----------------------------------------------------------------------------------


def from_numpy(like: NF4, read: Callable[[tuple[int, ...]], NF4], map: Callable = map, every=False) -> NF4:
    """Arrays as `like`, ShapeDtypeStructs with shardings (`at_rest`), has them. read: indices into *D -> that matrix as an NF4 of numpy; called once for each
    of which this process holds a part, by `map`, which may be that of a pool of threads; every: also for those held elsewhere. Host memory: this process's
    shards, and one matrix (of such a pool: those that are read faster than they are put in their place). ValueError where a matrix is not as `like` has it."""
    leading_shape = like.codebook.shape[:-1]
    shards = _map(_buffers, like)
    held = [buffers for buffers in shards if buffers is not None]
    needed = [
        leading
        for leading in np.ndindex(*leading_shape)
        if every or any(_inside(leading, bounds) for buffers in held for bounds in buffers)
    ]
    for leading, matrix in zip(needed, map(read, needed), strict=True):
        wanted = _map(lambda x: jax.ShapeDtypeStruct(x.shape[len(leading_shape) :], x.dtype), like)
        got = _map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), matrix)
        if got != wanted:
            raise ValueError(f"matrix {leading}: wanted {wanted}, got {got}")
        for value, buffers in zip(matrix, shards, strict=True):
            for bounds, (buffer, _) in (buffers or {}).items():
                if _inside(leading, bounds):
                    place = tuple(i - start for i, (start, _) in zip(leading, bounds, strict=False))
                    buffer[place] = value[tuple(slice(*part) for part in bounds[len(leading) :])]
    return _map(_array, like, shards)


def _buffers(target) -> dict[tuple, tuple]:
    """{bounds of a shard: (an empty array for it, the local devices that hold it)}."""
    held: dict[tuple, tuple] = {}
    for device, index in target.sharding.addressable_devices_indices_map(target.shape).items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, target.shape, strict=True))
        if bounds not in held:
            held[bounds] = np.empty([end - start for start, end in bounds], target.dtype), []
        held[bounds][1].append(device)
    return held


def _inside(leading, bounds) -> bool:
    return all(start <= i < end for i, (start, end) in zip(leading, bounds, strict=False))


def _array(target, held):
    place = lambda buffer, device: jax.device_put(buffer, jax.sharding.SingleDeviceSharding(device))
    arrays = [place(buffer, device) for buffer, devices in held.values() for device in devices]
    array = jax.make_array_from_single_device_arrays(target.shape, target.sharding, arrays)
    return jax.block_until_ready(array)  # without waiting, the buffers of several weights would pile up
