"""NF4: codes nearest by definition, values bit for bit those that bitsandbytes recorded, exact counts of bytes, and shards that give the unsharded bits."""

import math
import zlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from h100.compiled import MARKS, compiled_for_h100
from jaxllm import hlo, nf4
from jaxllm.nf4 import NF4
from jaxllm.section import UserError
from support import mesh

MESH = dict(data=2, sequence=2, expert=2)
dequantise = jax.jit(nf4.dequantise, static_argnums=1)


def crc(array):
    return zlib.crc32(np.ascontiguousarray(array).tobytes())


def on_device(weight):
    return jax.tree.map(jnp.asarray, weight)


def defined(weight):
    """float32 [outputs, inputs] of an NF4 of numpy without *D, after the definition."""
    codes = np.stack([weight.codes >> 4, weight.codes & 15], -1).reshape(weight.codes.shape[0], -1)
    absmax = weight.absmax
    if weight.nested is not None:
        scale = np.repeat(weight.nested, 256)[: absmax.size].reshape(absmax.shape)
        absmax = weight.absmax_map[absmax] * scale + weight.offset
    return weight.codebook[codes] * np.repeat(absmax, 64, axis=1)


def matrix(rng, outputs=80, inputs=192, std=0.02):
    """Normal weights; rows differ in size, so that absmax do."""
    return (rng.normal(size=(outputs, inputs)) * std * rng.uniform(0.3, 3, (outputs, 1))).astype(np.float32)


# --- values -----------------------------------------------------------------------------------------------------------


def test_codebook_and_dynamic_map_are_those_of_bitsandbytes():
    # As its source has them, in decimals of float32; and checksums of the bits of both tables of bitsandbytes 0.50.2.
    published = [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
        -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]  # fmt: skip
    assert nf4.CODEBOOK.astype(np.float64).tolist() == published and crc(nf4.CODEBOOK) == 3295803418
    values = nf4.ABSMAX_MAP
    assert values.dtype == np.float32 and len(np.unique(values)) == 256 and (np.diff(values) > 0).all()
    assert values[127] == 0 and values[255] == 1 and values[0] > -1 and crc(values) == 454261483


@pytest.mark.parametrize(
    "double_quant, absmax, values", [(False, 3066825335, 1381157815), (True, 3106935349, 2377635002)]
)
def test_bytes_and_values_are_those_that_bitsandbytes_recorded(double_quant, absmax, values):
    # Checksums of what bitsandbytes 0.50.2 made of this matrix; absmax are chosen such that its quantiser for CPUs rounds them to nearest.
    i = np.arange(6 * 192)
    w = ((i * 7919 + i // 64 * 131) % 1009 - 504) / 1009 * 0.1 * (1 + i // 64) / 8
    w = w.astype(ml_dtypes.bfloat16).reshape(6, 192)
    w[2, 64:128] = 0
    weight = nf4.quantise(w, double_quant)
    assert (crc(weight.codes), crc(weight.absmax)) == (3159718156, absmax)
    assert crc(dequantise(on_device(weight), "bfloat16")) == values


def test_each_weight_gets_the_nearest_value_and_each_absmax_too(rng):
    w = matrix(rng)
    weight = nf4.quantise(w, double_quant=False)
    assert np.array_equal(weight.absmax, np.abs(w.reshape(80, 3, 64)).max(-1))
    scale = np.repeat(weight.absmax, 64, axis=1).astype(np.float64)
    error = np.abs(defined(weight) - w.astype(np.float64))
    best = np.min([np.abs(value * scale - w) for value in nf4.CODEBOOK.astype(np.float64)], axis=0)
    assert (error <= best + 1e-6 * scale).all()

    twice = nf4.quantise(w)
    assert np.array_equal(twice.codes, weight.codes) and twice.offset == np.float32(
        weight.absmax.astype(np.float64).mean()
    )
    difference = (weight.absmax - twice.offset).reshape(-1).astype(np.float64)
    assert twice.nested.shape == (1,) and twice.nested[0] == np.float32(np.abs(difference).max())
    best = np.min([np.abs(value * twice.nested[0] - difference) for value in nf4.ABSMAX_MAP.astype(np.float64)], axis=0)
    error = np.abs(nf4.ABSMAX_MAP[twice.absmax.reshape(-1)] * twice.nested[0].astype(np.float64) - difference)
    assert (error <= best + 1e-6 * twice.nested[0]).all()


def test_a_value_in_the_middle_of_two_takes_the_lower_one():
    middles = np.float32(0.5) * (nf4.CODEBOOK[1:] + nf4.CODEBOOK[:-1])
    above, below = np.nextafter(middles, np.float32(2)), np.nextafter(middles, np.float32(-2))
    w = np.concatenate([middles, [1], above, [-1], below, np.zeros(17, np.float32)]).astype(np.float32)
    packed, absmax = nf4.encode(w)
    codes = np.stack([packed >> 4, packed & 15], 1).reshape(-1)
    assert absmax == [1] and codes[:15].tolist() == [*range(15)] and codes[15] == 15
    assert codes[16:31].tolist() == [*range(1, 16)] and codes[31] == 0 and codes[32:47].tolist() == [*range(15)]
    assert set(codes[47:]) == {7}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("double_quant", [False, True])
def test_dequantised_in_a_compiled_program_it_is_the_definition_bit_for_bit(rng, double_quant, dtype):
    weight = nf4.quantise(matrix(rng, 640, 192), double_quant)  # 1,920 blocks, 8 of 256 with the last one in part
    got = np.asarray(dequantise(on_device(weight), dtype))
    want = defined(weight).astype(got.dtype)
    assert want.dtype.name == dtype and np.array_equal(got.view(np.uint8), want.view(np.uint8))


def test_maps_of_each_matrix_are_used(rng):
    """Two matrices of a stack with codebooks and maps of their own, as a file may have them."""
    parts = [nf4.quantise(matrix(rng, 16, 64)) for _ in range(2)]
    parts[1] = parts[1]._replace(
        codebook=parts[1].codebook[::-1].copy(), absmax_map=parts[1].absmax_map * np.float32(0.5)
    )
    got = np.asarray(dequantise(on_device(NF4(*map(np.stack, zip(*parts, strict=True)))), "float32"))
    assert np.array_equal(got, np.stack([defined(part) for part in parts]))
    assert not np.allclose(got[1], defined(parts[1]._replace(codebook=nf4.CODEBOOK)))


@pytest.mark.parametrize("zero", [0x77, 0x00])
def test_a_block_of_zeros_is_read_as_zeros_whichever_way_it_is_written(zero):
    weight = nf4.quantise(np.zeros((2, 64), np.float32), double_quant=False)
    assert (
        set(weight.codes.reshape(-1)) == {0x77} and not weight.absmax.any()
    )  # as on CPUs; kernels for GPUs write 0x00
    assert not np.asarray(
        dequantise(on_device(weight._replace(codes=np.full((2, 32), zero, np.uint8))), "float32")
    ).any()
    equal = nf4.quantise(
        np.ones((4, 64), np.float32)
    )  # all absmax are their mean: nothing is left for the second level
    assert set(equal.absmax.reshape(-1)) == {127} and not equal.nested.any()
    assert (np.asarray(dequantise(on_device(equal), "float32")) == 1).all()


def test_what_nf4_cannot_hold_is_refused_by_name():
    w = np.ones((8, 128), np.float64)
    for value in (np.nan, np.inf, -np.inf, 1e39):
        bad = w.copy()
        bad[5, 70] = value
        with pytest.raises(UserError, match=r"layer\.weight: holds NaN or infinite values"):
            nf4.quantise(bad, path="layer.weight")
    with pytest.raises(UserError, match=r"layer\.weight: NF4 has blocks of 64 .* got 96 inputs"):
        nf4.quantise(np.ones((8, 96), np.float32), path="layer.weight")


# --- sizes ------------------------------------------------------------------------------------------------------------


def size(weight):
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(weight))


def test_bits_of_a_parameter_are_counted_exactly():
    large = (4096, 14336)
    parameters, tables = math.prod(large), 4 * (16 + 256 + 1)  # both maps, and the offset, of each matrix
    assert 8 * (size(nf4.abstract(large)) - tables) == parameters * (4 + 8 / 64 + 32 / (64 * 256))  # 4.127
    assert 8 * (size(nf4.abstract(large, double_quant=False)) - 4 * 16) == parameters * (4 + 32 / 64)
    assert size(nf4.abstract((3, 2, *large))) == 6 * size(nf4.abstract(large))
    for shape in ((80, 192), (640, 192)):
        made = nf4.quantise(np.ones(shape, np.float32))
        assert jax.tree.map(lambda x: (x.shape, x.dtype), made) == jax.tree.map(
            lambda x: (x.shape, x.dtype), nf4.abstract(shape)
        )


def test_a_frozen_mixtral_8x7b_takes_22_8_gib():
    hidden, mlp, kv, vocab, layers, experts = 4096, 14336, 1024, 32000, 32, 8
    attention = [(layers, out, hidden) for out in (hidden, kv, kv, hidden)]
    mixture = [(layers, experts, *shape) for shape in ((mlp, hidden), (mlp, hidden), (hidden, mlp))]
    quantised = sum(size(nf4.abstract(shape)) for shape in attention + mixture)
    rest = 2 * (2 * vocab * hidden + layers * (experts * hidden + 2 * hidden) + hidden)  # bfloat16
    parameters = sum(map(math.prod, attention + mixture)) + rest // 2
    assert parameters == 46_702_792_704
    assert quantised / 2**30 == pytest.approx(22.31, abs=0.01)
    assert (quantised + rest) / 2**30 == pytest.approx(22.80, abs=0.01)


# --- on many devices --------------------------------------------------------------------------------------------------


def stack(rng, leading, outputs=24, inputs=128, double_quant=True):
    """{indices: NF4 of numpy}, and the whole stack of them."""
    parts = {place: nf4.quantise(matrix(rng, outputs, inputs), double_quant) for place in np.ndindex(*leading)}
    whole = [
        np.stack(values).reshape(*leading, *values[0].shape)
        for values in zip(*map(list, parts.values()), strict=True)
        if values[0] is not None
    ]
    return parts, NF4(*whole)


@pytest.mark.parametrize("double_quant", [False, True])
def test_shards_hold_their_part_and_give_the_bits_of_the_whole(rng, double_quant):
    leading = ("layers", "experts")
    parts, whole = stack(rng, (2, 4), double_quant=double_quant)
    here, seen = mesh(**MESH), []
    with jax.set_mesh(here):
        like = nf4.at_rest(here, "w", nf4.abstract((2, 4, 24, 128), double_quant), leading)
        weight = nf4.from_numpy(like, lambda place: seen.append(place) or parts[place])
        assert sorted(seen) == sorted(parts)
        for got, want in zip(jax.tree.leaves(weight), jax.tree.leaves(whole), strict=True):
            assert np.array_equal(np.asarray(got), want)
        for array in (weight.codes, weight.absmax):  # over data x sequence by rows, over expert by experts
            assert {shard.data.size * 8 for shard in array.addressable_shards} == {array.size}
        used = lambda w: nf4.dequantise(nf4.gather(w, ("experts",)), "bfloat16")
        layers = jax.jit(lambda w: jax.lax.scan(lambda carry, w: (carry, used(w)), 0, w)[1])
        got = layers(weight)
    assert np.array_equal(
        np.asarray(got).view(np.uint16), np.asarray(dequantise(on_device(whole), "bfloat16")).view(np.uint16)
    )


def test_only_bytes_of_codes_and_absmax_travel(rng):
    """A product with a sharded weight and its gradient: weights are gathered as u8, and nothing of them in another dtype."""
    parts, whole = stack(rng, (2,))
    here = mesh(**MESH)

    def loss(x, w):
        def layer(x, w):
            kernel = nf4.dequantise(nf4.gather(w), "bfloat16")
            y = jax.lax.dot_general(
                x.astype(jnp.bfloat16), kernel, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
            )
            return x + jnp.pad(y, ((0, 0), (0, 104))), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, w)[0] ** 2)

    x = rng.normal(size=(16, 128)).astype(np.float32)
    with jax.set_mesh(here):
        like = nf4.at_rest(here, "w", nf4.abstract((2, 24, 128)), ("layers",))
        weight = nf4.from_numpy(like, lambda place: parts[place])
        placed = jax.device_put(x, NamedSharding(here, P(("replica", "data", "sequence", "expert"))))
        compiled = jax.jit(jax.value_and_grad(loss)).lower(placed, weight).compile()
        got = compiled(placed, weight)
    found = [(c.kind, c.dtype, c.bytes) for c in hlo.read(compiled.as_text()).collectives]
    gathered = [c for c in found if c[0] == "all-gather"]
    assert {c[1] for c in gathered} == {"u8"}
    assert {c[2] for c in gathered} == {24 * 64, 24 * 2}
    assert {c[0] for c in found} == {"all-gather", "all-reduce"}  # the latter of the loss alone
    assert max(c[2] for c in found if c[0] == "all-reduce") == 4
    want = jax.jit(jax.value_and_grad(loss))(jnp.asarray(x), on_device(whole))
    np.testing.assert_allclose(np.asarray(got[1]), np.asarray(want[1]), rtol=1e-5, atol=1e-5)


def test_rows_that_the_mesh_does_not_divide_are_refused_and_blocks_are_never_cut():
    here = mesh(data=8)
    with pytest.raises(
        UserError, match=r"mesh: layers/mlp/down_proj/kernel has .* = 60, which 8 shards .* do not divide"
    ):
        nf4.at_rest(here, "layers/mlp/down_proj/kernel", nf4.abstract((2, 60, 128)), ("layers",))
    placed = nf4.at_rest(here, "w", nf4.abstract((2, 576, 576)), ("layers",))  # SmolLM2: 9 blocks in a row
    assert placed.absmax.sharding.shard_shape((2, 576, 9)) == (2, 72, 9)


def test_a_matrix_that_is_not_as_declared_is_refused(rng):
    like = nf4.at_rest(mesh(), "w", nf4.abstract((2, 24, 128)), ("layers",))
    good = nf4.quantise(matrix(rng, 24, 128))
    for bad in (nf4.quantise(matrix(rng, 16, 128)), nf4.quantise(matrix(rng, 24, 128), double_quant=False)):
        with pytest.raises(ValueError, match=r"matrix \(1,\): wanted"):
            nf4.from_numpy(like, lambda place, bad=bad: bad if place == (1,) else good)


class TestForH100:
    pytestmark = MARKS

    def test_no_copy_of_a_weight_is_made_but_the_one_that_is_asked_for(self):
        like = nf4.abstract((4, 512, 4096))
        shapes = [(x.shape, x.dtype) for x in like]
        compiled = compiled_for_h100(lambda *w: nf4.dequantise(NF4(*w), "bfloat16"), *shapes)
        program = compiled.as_text()
        entry = program[program.index("ENTRY") :]
        assert entry.count(" fusion(") == 2  # absmax as float32, 1/16 byte a weight; then all the rest
        assert compiled.memory_analysis().temp_size_in_bytes <= 4 * math.prod(like.absmax.shape) + 1024
