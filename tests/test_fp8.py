"""FP8: casts against ml_dtypes on every input of 16 bits, scales and histories bit for bit as the reference's rule has them, products against float64, and
the amax that gradients of scales carry."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pydantic
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm import fp8
from jaxllm.fp8 import FP8Config
from jaxllm.linear import gather
from jaxllm.section import Section, UserError
from jaxllm.sharding import AT_REST, constrain
from support import mesh

pytestmark = pytest.mark.version

FORMATS = {ml_dtypes.float8_e4m3fn: 448.0, ml_dtypes.float8_e5m2: 57344.0}
BOTH = pytest.mark.parametrize("dtype", FORMATS, ids=["e4m3fn", "e5m2"])
FLT_MAX = np.finfo(np.float32).max
OPERANDS = tuple(fp8.FORMATS)


# --- casts ------------------------------------------------------------------------------------------------------------


def sources(rng):
    """All bfloat16, all float16; float32: random bits, and every FP8 number and midpoint, with 1 and 2 ulp beside them."""
    every = np.arange(65536, dtype=np.uint16)
    values = [np.float32([464, 480, 449, 57344, 61440, 65536])]
    for dtype in FORMATS:
        exact = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
        exact = np.unique(exact[np.isfinite(exact)])
        values += [exact, ((exact[1:].astype(np.float64) + exact[:-1]) / 2).astype(np.float32)]
    near = np.concatenate(values).view(np.uint32)
    near = np.concatenate([near + np.uint32(step % 2**32) for step in (-2, -1, 0, 1, 2)])
    spread = rng.standard_normal(300_000) * np.exp2(rng.integers(-20, 20, 300_000))
    floats = [rng.integers(0, 2**32, 1_000_000, dtype=np.uint32).view(np.float32), spread.astype(np.float32)]
    return every.view(ml_dtypes.bfloat16), every.view(np.float16), np.concatenate(floats), near.view(np.float32)


def codes(q):
    """The bytes of FP8 numbers, each NaN, whose sign and payload are the library's affair, as -1."""
    q = np.asarray(q)
    return np.where(np.isnan(q.astype(np.float32)), -1, q.view(np.uint8).astype(np.int32))


def quantised(x, scale, dtype):
    """The definition, in numpy."""
    with np.errstate(all="ignore"):
        y = np.clip(np.asarray(x).astype(np.float32) * np.float32(scale), -FORMATS[dtype], FORMATS[dtype])
        return y.astype(dtype)


quantise = jax.jit(fp8.quantise, static_argnums=2)


@BOTH
def test_casts_are_those_of_ml_dtypes_bit_for_bit(rng, dtype):
    for scale in (1.0, 448 / 3, 2.0**-20, 2.0**100):
        bfloat16, float16, float32, near = sources(rng)
        for x in (bfloat16, float16, float32, near / np.float32(scale)):
            got = quantise(x, jnp.float32(scale), dtype)
            np.testing.assert_array_equal(codes(got), codes(quantised(x, scale, dtype)), f"{x.dtype} x {scale}")


@BOTH
def test_what_is_too_large_saturates_and_nan_stays(dtype):
    largest = FORMATS[dtype]
    x = np.float32([np.inf, -np.inf, np.nan, 0.0, -0.0, 1e30, FLT_MAX])
    got = np.asarray(quantise(x, jnp.float32(3.0), dtype)).astype(np.float32)
    np.testing.assert_array_equal(got, [largest, -largest, np.nan, 0, -0.0, largest, largest])
    assert fp8.largest(dtype) == largest
    assert not np.asarray(quantise(np.zeros(2, np.float32), jnp.float32(FLT_MAX), dtype)).astype(np.float32).any()


def test_an_unclipped_cast_of_xla_does_not_saturate():
    """A canary: the clip is there because of this."""
    cast = jax.jit(lambda x: x.astype(jnp.float8_e4m3fn))
    assert np.asarray(cast(np.float32([464, 448]))).astype(np.float32).tolist() == [448, 448]
    assert np.isnan(np.asarray(cast(np.float32([465, np.inf]))).astype(np.float32)).all()


def test_every_expert_is_quantised_by_its_own_scale(rng):
    x, scale = rng.standard_normal((3, 16, 8)).astype(np.float32), np.float32([1, 100, 448])
    got = quantise(x, jnp.asarray(scale), ml_dtypes.float8_e4m3fn)
    for mine, one, factor in zip(got, x, scale, strict=True):
        np.testing.assert_array_equal(codes(mine), codes(quantised(one, factor, ml_dtypes.float8_e4m3fn)))


def bits(x):
    return np.asarray(x, np.float32).view(np.uint32)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_amax_is_the_largest_magnitude_whatever_else_stands_there(dtype):
    measure = jax.jit(fp8.amax)
    for values, want in (
        ([1, -3, 2], 3),
        ([0.0, -0.0], 0),
        ([-np.inf, np.nan, 1], np.inf),
        ([np.nan, -2, 1], 2),
        ([np.nan], 0),
    ):
        np.testing.assert_array_equal(bits(measure(np.array(values, dtype))), bits(want), str(values))
    tiny = np.array([0.0, -1e-40 if dtype != np.float16 else -6e-8], dtype)
    assert bits(measure(tiny)) == bits(np.abs(tiny.astype(np.float32)).max()) > 0, "a subnormal is not 0"


# --- scale and history ------------------------------------------------------------------------------------------------

# What the reference's update rule, TransformerEngine delayed_scaling.cu, makes of a history of 4: amax of the step, bits of the scale after it, and the
# history after it without its first place, which is 0.
REFERENCE = {
    "normal": "2 43600000 0 0 2 | 4 42e00000 0 2 4 | 1 42e00000 2 4 1 | 1 42e00000 4 1 1 | 1 42e00000 1 1 1 | 1 43e00000 1 1 1 | 1 43e00000 1 1 1",
    "zeros": "2 43600000 0 0 2 | 0 43600000 0 0 2 | 0 43600000 0 0 2 | 0 43600000 0 0 2 | 0 43600000 0 0 2",
    "inf": "2 43600000 0 0 2 | inf 43600000 0 2 inf | 1 43600000 2 inf 1 | 1 43600000 inf 1 1 | 1 43600000 1 1 1 | 1 43e00000 1 1 1",
    "nan": "2 43600000 0 0 2 | nan 43600000 0 2 nan | 1 43600000 2 nan 1 | 1 43600000 nan 1 1 | 1 43e00000 1 1 1 | 1 43e00000 1 1 1",
    "most_recent": "2 43600000 0 0 2 | 4 42e00000 0 2 4 | 1 43e00000 2 4 1 | 0 43e00000 2 4 1 | 3 43155555 4 1 3 | inf 43155555 1 3 inf | 2 43600000 3 inf 2",
    "margin": "2 42e00000 0 0 2 | 4 42600000 0 2 4 | 8 41e00000 2 4 8",
    "e5m2": "2 46e00000 0 0 2 | 4 46600000 0 2 4 | 3e-05 46600000 2 4 2.99999992e-05",
}
SETTINGS = {"most_recent": {"algorithm": "most_recent"}, "margin": {"margin": 1}}

update = jax.jit(fp8.update, static_argnums=(2, 3))


@pytest.mark.parametrize("case", REFERENCE)
def test_scales_and_histories_are_the_references_bit_for_bit(case):
    config = FP8Config(history_length=4, **SETTINGS.get(case, {}))
    dtype = jnp.float8_e5m2 if case == "e5m2" else jnp.float8_e4m3fn
    state = fp8.initial(config)
    assert state.scale == 1 and not state.amax_history.any()
    for number, row in enumerate(REFERENCE[case].split("|")):
        amax, scale, *history = row.split()
        state = update(state, jnp.float32(amax), dtype, config)
        assert bits(state.scale) == int(scale, 16), number
        np.testing.assert_array_equal(bits(state.amax_history), bits([0.0, *map(float, history)]), str(number))


class Rule:
    """The update of one tensor as the definition has it: one float32 after another, with CUDA's fmaxf."""

    def __init__(self, largest, length, algorithm, margin):
        self.largest, self.algorithm, self.margin = np.float32(largest), algorithm, margin
        self.scale, self.history = np.float32(1), [np.float32(0)] * length

    def __call__(self, amax):
        history, window = list(self.history), np.float32(0)
        history[0] = last = np.float32(amax)
        if last != 0:
            for value in (*history[1:], last):
                window = np.fmax(window, value)
            history = [*history[1:], history[0]]
            history[-1], history[0] = last, np.float32(0)
        else:
            history[0] = np.float32(0)
        chosen = last if self.algorithm == "most_recent" else window
        usable = np.isfinite(chosen) and chosen > 0
        if usable:
            with np.errstate(over="ignore"):
                scale = self.largest * np.float32(2.0**-self.margin) / chosen
            self.scale = FLT_MAX if np.isinf(scale) else scale
        self.history = history
        return self.scale, np.array(history), not usable


SPECIAL = (0.0, np.inf, np.nan, 1e-36, 1.4e-45, 1.1754942e-38, 1.17549435e-38, 448 / FLT_MAX, FLT_MAX, 448.0, 3.0)
PATTERNS = [int(np.float32(x).view(np.uint32)) for x in (*SPECIAL, 2.0**-10, 2.0**10)]
AMAX = st.one_of(st.sampled_from(PATTERNS), st.integers(0, PATTERNS[1]), st.integers(*PATTERNS[-2:]))  # as bits
STEPS, TENSORS = 8, 4


@functools.partial(jax.jit, static_argnums=(1, 2))
def trajectory(sequence, dtype, config):
    """Scales, histories and what is frozen after each of the steps of amax f32[STEPS, 2, 2]."""

    def step(state, amax):
        moved = fp8.update(state, amax, dtype, config)
        return moved, (*moved, fp8.frozen(state, amax, config))

    return jax.lax.scan(step, fp8.initial(config, sequence.shape[1:]), sequence)[1]


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    sequence=st.lists(AMAX, min_size=STEPS * TENSORS, max_size=STEPS * TENSORS),
    setting=st.sampled_from(
        [(1, "max", 0), (1, "most_recent", 0), (3, "max", 0), (5, "max", 6), (4, "most_recent", 2)]
    ),
    dtype=st.sampled_from(list(FORMATS)),
)
def test_any_sequence_of_amax_gives_the_states_of_the_definition(sequence, setting, dtype):
    length, algorithm, margin = setting
    config = FP8Config(history_length=length, algorithm=algorithm, margin=margin)
    sequence = np.array(sequence, np.uint32).view(np.float32).reshape(STEPS, TENSORS)
    got = [np.asarray(x) for x in trajectory(sequence.reshape(STEPS, 2, 2), dtype, config)]
    for tensor in range(TENSORS):
        rule, place = Rule(FORMATS[dtype], length, algorithm, margin), np.unravel_index(tensor, (2, 2))
        for number in range(STEPS):
            scale, history, frozen = rule(sequence[number, tensor])
            assert bits(got[0][number][place]) == bits(scale), (tensor, number, sequence[: number + 1, tensor])
            assert (bits(got[1][number][place]) == bits(history)).all(), (
                tensor,
                number,
                got[1][number][place],
                history,
            )
            assert got[2][number][place] == frozen, (tensor, number)


def test_an_infinity_freezes_a_scale_until_the_history_has_forgotten_it():
    config, state, frozen = FP8Config(history_length=3), fp8.initial(FP8Config(history_length=3), (2,)), []
    for amax in ([2, 2], [np.inf, 4], [1, 1], [1, 1], [1, 0]):
        amax = jnp.float32(amax)
        frozen.append(np.asarray(fp8.frozen(state, amax, config)).tolist())
        state = update(state, amax, jnp.float8_e4m3fn, config)
    assert frozen == [[False, False], [True, False], [True, False], [True, False], [False, True]]
    assert state.scale.tolist() == [448, 112]


# --- products ---------------------------------------------------------------------------------------------------------


def operands(rng, M=64, K=4096, N=48, dtype=np.float32):
    """x [M, K], kernel [K, N], gradient of y [M, N] of very different magnitudes, and scales that clip some of each."""
    arrays = [(s * rng.standard_normal(n)).astype(dtype) for s, n in ((3, (M, K)), (0.02, (K, N)), (1e-4, (M, N)))]
    amax = [float(np.abs(x.astype(np.float32)).max()) for x in arrays]
    largest = {operand: fp8.largest(dtype) for operand, dtype in fp8.FORMATS.items()}
    scales = {op: jnp.float32(1.3 * largest[op] / a) for op, a in zip(OPERANDS, amax, strict=True)}
    return arrays, scales, dict(zip(OPERANDS, amax, strict=True))


@functools.partial(jax.jit, static_argnums=(4, 5))
def value_and_gradients(x, kernel, dy, scales, compute="float32", reduce="float32"):
    multiply = lambda x, kernel, scales: fp8.matmul(x, kernel, scales, compute, reduce)
    y, back = jax.vjp(multiply, x, kernel, scales)
    return y, *back(dy.astype(y.dtype))


def exact(arrays, scales):
    """y, dx and dw in float64, of the operands as FP8 has them."""
    x, w, g = (
        quantised(a, scales[op], fp8.FORMATS[op]).astype(np.float64) / np.float64(scales[op])
        for a, op in zip(arrays, OPERANDS, strict=True)
    )
    return x @ w, g @ w.T, x.T @ g


def test_products_are_those_of_the_fp8_operands_forward_and_backward(rng):
    for M, N in ((64, 48), (4096, 16), (16, 4096)):  # so that each of the three contracts 4,096
        arrays, scales, amax = operands(rng, M, 4096 if M == 64 else 32, N)
        y, dx, dw, seen = value_and_gradients(*arrays, scales)
        for got, want in zip((y, dx, dw), exact(arrays, scales), strict=True):
            assert np.abs(np.asarray(got, np.float64) - want).max() <= 1e-6 * np.abs(want).max()
        assert {op: float(a) for op, a in seen.items()} == amax


def test_a_bfloat16_product_is_the_float32_one_rounded_once(rng):
    arrays, scales, amax = operands(rng, K=512, dtype=ml_dtypes.bfloat16)
    wide = value_and_gradients(*(a.astype(np.float32) for a in arrays), scales)
    for reduce in ("float32", "bfloat16"):
        y, dx, dw, seen = value_and_gradients(*arrays, scales, "bfloat16", reduce)
        assert y.dtype == dx.dtype == dw.dtype == jnp.bfloat16  # the last as its kernel
        for got, want in zip((y, dx, dw), wide[:3], strict=True):
            if got is dw and reduce == "bfloat16":  # rounded for the sum over devices, and again as it is kept
                np.testing.assert_allclose(got.astype(np.float32), want, rtol=2**-8)
            else:
                np.testing.assert_array_equal(np.asarray(got), np.asarray(want).astype(ml_dtypes.bfloat16))
        assert {op: float(a) for op, a in seen.items()} == amax


def dots(jaxpr):
    """(dtypes of both operands, of the output) of every dot in a jaxpr and those inside of it."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            found.append((*(v.aval.dtype.name for v in eqn.invars), eqn.outvars[0].aval.dtype.name))
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            found += dots(inner) if hasattr(inner, "eqns") else []
    return found


def test_tensor_cores_are_given_fp8_operands(rng):
    arrays, scales, _ = operands(rng, K=64)
    e4m3, e5m2 = "float8_e4m3fn", "float8_e5m2"
    jaxpr = jax.make_jaxpr(value_and_gradients, static_argnums=(4, 5))(*arrays, scales, "bfloat16", "float32").jaxpr
    # What comes out in bfloat16 is there twice, in the form for GPUs and in that for others.
    forward, dgrad, wgrad = (e4m3, e4m3), (e5m2, e4m3), (e4m3, e5m2)
    twice = [(*operands, out) for operands in (forward, dgrad) for out in ("bfloat16", "float32")]
    assert sorted(dots(jaxpr)) == sorted([*twice, (*wgrad, "float32")])


def test_rows_and_places_may_stay_two_dims(rng):
    arrays, scales, amax = operands(rng, K=64)
    flat = value_and_gradients(*arrays, scales)
    split = value_and_gradients(arrays[0].reshape(4, 16, 64), arrays[1], arrays[2].reshape(4, 16, 48), scales)
    for one, other in zip(split[:3], flat[:3], strict=True):
        np.testing.assert_allclose(np.asarray(one).reshape(other.shape), other, rtol=0, atol=1e-6 * np.abs(other).max())
    assert jax.tree.map(float, split[3]) == amax


@pytest.mark.parametrize("K, N", [(40, 48), (64, 24)])
def test_sizes_that_cublas_does_not_multiply_in_fp8_are_refused(rng, K, N):
    arrays, scales, _ = operands(rng, K=K, N=N)
    with pytest.raises(UserError, match=rf"precision.matmul: .*multiples of 16, got {K} x {N}"):
        value_and_gradients(*arrays, scales)


# --- what a step sees -------------------------------------------------------------------------------------------------

LAYERS, WIDTH = 3, 32


def stack_of_layers(rng):
    """(x [16, 4, WIDTH], kernels [LAYERS, WIDTH, WIDTH], scales f32[LAYERS] of each operand)."""
    x = rng.standard_normal((16, 4, WIDTH)).astype(np.float32)
    kernels = np.reshape([0.1, 0.3, 0.2], (LAYERS, 1, 1)) * rng.standard_normal((LAYERS, WIDTH, WIDTH))
    return x, kernels.astype(np.float32), {op: jnp.float32([20, 30, 40]) for op in OPERANDS}


def whole_loss(kernels, scales, x, remat=False, seen=None):
    def layer(x, own):
        kernel, scales, seen = own
        return jnp.tanh(fp8.matmul(x, kernel, scales, "float32", "float32", seen=seen)), None

    layer = jax.checkpoint(layer, prevent_cse=False) if remat else layer
    return jnp.sum(jax.lax.scan(layer, x, (kernels, scales, seen))[0] ** 2)


of_scales = jax.jit(jax.grad(whole_loss, argnums=1), static_argnums=3)


def test_layers_of_a_scan_each_see_their_own_amax_and_rematerialisation_sees_nothing_twice(rng):
    x, kernels, scales = stack_of_layers(rng)
    seen, again = of_scales(kernels, scales, x), of_scales(kernels, scales, x, True)
    np.testing.assert_array_equal(seen["kernel"], np.abs(kernels).max((1, 2)))
    inputs = [x]
    for kernel, scale in zip(kernels[:-1], np.asarray(scales["input"]), strict=False):
        own = {op: jnp.float32(scale) for op in OPERANDS}
        inputs.append(np.asarray(jnp.tanh(fp8.matmul(inputs[-1], kernel, own, "float32", "float32"))))
    np.testing.assert_allclose(seen["input"], [np.abs(x).max() for x in inputs], rtol=1e-6)
    assert float(seen["input"][0]) == np.abs(x).max() and all(np.asarray(seen["output_grad"]) > 0)
    for operand in OPERANDS:
        np.testing.assert_array_equal(seen[operand], again[operand])


@pytest.mark.parametrize("num_microbatches", [2, 4])
def test_the_maximum_over_microbatches_is_what_one_batch_sees(rng, num_microbatches):
    x, kernels, scales = stack_of_layers(rng)
    whole = of_scales(kernels, scales, x)

    @jax.jit
    def joined(kernels, scales, x):
        one = jax.grad(whole_loss, argnums=1)
        join = lambda total, x: (jax.tree.map(jnp.maximum, total, one(kernels, scales, x)), None)
        return jax.lax.scan(join, jax.tree.map(jnp.zeros_like, scales), x)[0]

    parts = joined(kernels, scales, x.reshape(num_microbatches, -1, *x.shape[1:]))
    for operand in OPERANDS:  # products of rows do not depend on the other rows, but XLA may sum them in another order
        np.testing.assert_allclose(parts[operand], whole[operand], rtol=1e-6, err_msg=operand)
    assert float(parts["input"][0]) == float(whole["input"][0]) == np.abs(x).max()
    np.testing.assert_array_equal(parts["kernel"], whole["kernel"])


def test_a_product_that_does_not_reach_the_loss_has_an_amax_of_zero(rng):
    x, kernels, scales = stack_of_layers(rng)

    def loss(scales):
        fp8.matmul(x, kernels[0], scales["unused"], "float32", "float32")
        return jnp.sum(fp8.matmul(x, kernels[0], scales["used"], "float32", "float32"))

    own = {op: jnp.float32(1) for op in OPERANDS}
    seen = jax.jit(jax.grad(loss))({"used": own, "unused": own})
    assert [float(a) for a in seen["unused"].values()] == [0, 0, 0] and all(a > 0 for a in seen["used"].values())


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_the_amax_of_a_sharded_array_is_that_of_all_of_it(rng, dtype):
    everywhere = mesh(replica=2, data=2, sequence=2)
    x = rng.standard_normal((8, 16, WIDTH)).astype(dtype)
    kernel, dy = (rng.standard_normal((WIDTH, WIDTH)).astype(dtype), rng.standard_normal(x.shape).astype(dtype))
    scales = {op: jnp.float32(2) for op in OPERANDS}
    for place, value in (((7, 15, 3), -41.0), ((3, 9, 1), np.nan), ((5, 2, 2), -np.inf)):
        x[place] = value  # the largest is on the last device, then there is a NaN, then an infinity
        with jax.set_mesh(everywhere):
            rows = NamedSharding(everywhere, P(("replica", "data"), "sequence"))
            placed = [jax.device_put(a, rows) for a in (x, dy)]
            weight = jax.device_put(kernel, NamedSharding(everywhere, P(("data", "sequence"))))
            *_, seen = value_and_gradients(placed[0], weight, placed[1], scales, np.dtype(dtype).name)
        for operand, array in zip(OPERANDS, (x, kernel, dy), strict=True):
            want = np.nanmax(np.abs(array.astype(np.float32)))
            assert bits(seen[operand]) == bits(want), (operand, value)


@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
def test_the_gradient_of_a_weight_meets_other_devices_in_the_dtype_of_the_reduction(rng, reduce):
    x, kernels, _ = stack_of_layers(rng)
    met = []
    rests = lambda dw: met.append(dw.dtype.name) or dw
    multiply = lambda kernel: fp8.matmul(
        x, kernel, {op: jnp.float32(1) for op in OPERANDS}, "float32", reduce, rests=rests
    )
    assert jax.grad(lambda kernel: jnp.sum(multiply(kernel)))(kernels[0]).dtype == jnp.float32 and met == [reduce]


def test_a_scale_inside_a_shard_map_is_refused(rng):
    x, kernels, scales = stack_of_layers(rng)
    own = {op: jnp.float32(1) for op in OPERANDS}
    with jax.set_mesh(mesh(data=2)):
        shards = functools.partial(jax.shard_map, in_specs=(P("data"), P()), out_specs=P("data"), check_vma=False)
        for inside in (
            lambda x, own: fp8.matmul(x, kernels[0], own, "float32", "float32"),
            lambda x, own: fp8.record_gradient(x, own["output_grad"], None, fp8.FORMATS["output_grad"]),
        ):
            with pytest.raises(ValueError, match="inside of a shard_map over .*data"):
                jax.jit(jax.grad(lambda own, inside=inside: jnp.sum(shards(inside)(x, own))))(own)


def test_a_weight_is_quantised_where_it_rests_and_gathered_in_fp8(rng):
    x, kernel = rng.standard_normal((8, 8, 64)).astype(np.float32), rng.standard_normal((64, 4, 16)).astype(np.float32)
    scales, names = {op: jnp.float32(30) for op in OPERANDS}, ("embed", "heads", "head_dim")

    def gradients(x, kernel, scales):
        used = lambda q: gather(q, names, q.dtype).reshape(64, 64)
        rests = lambda dw: constrain(dw.reshape(64, 4, 16), *names, table=AT_REST)
        loss = lambda *args: jnp.sum(fp8.matmul(*args, "float32", "float32", used=used, rests=rests) ** 2)
        return jax.grad(loss, argnums=(0, 1, 2))(x, kernel, scales)

    want = jax.jit(gradients)(x, kernel, scales)
    everywhere = mesh(data=8)
    with jax.set_mesh(everywhere):
        kernel = jax.device_put(kernel, NamedSharding(everywhere, P("data")))
        x = jax.device_put(x, NamedSharding(everywhere, P("data")))
        compiled = jax.jit(gradients).trace(x, kernel, scales).lower().compile()
        got = compiled(x, kernel, scales)
    gathered = [line.split("=")[1] for line in compiled.as_text().splitlines() if " all-gather(" in line]
    # XLA:CPU keeps FP8 numbers as float16 while they travel; a kernel gathered before its cast would be float32 or bfloat16.
    assert gathered and all(line.strip().startswith(("f8e4m3fn[", "f16[")) for line in gathered), gathered
    assert got[1].sharding.is_equivalent_to(kernel.sharding, 3)
    for one, other in zip(got[:2], want[:2], strict=True):
        np.testing.assert_allclose(np.asarray(one), other, rtol=0, atol=1e-6 * np.abs(other).max())
    assert jax.tree.map(float, got[2]) == jax.tree.map(float, want[2])


def test_records_around_another_product_change_nothing_of_it_and_see_the_same(rng):
    """A warm-up step, and the experts' products."""
    _, kernels, _ = stack_of_layers(rng)
    x = rng.standard_normal((LAYERS, 8, WIDTH)).astype(np.float32)
    scales = {"input": jnp.float32(1), "kernel": jnp.ones(LAYERS), "output_grad": jnp.float32(1)}
    multiply = lambda x, kernels: jnp.einsum("erk,ekn->ern", x, kernels)

    def watched(x, kernels, scales):
        x = fp8.record(x, scales["input"], None, fp8.FORMATS["input"])
        kernels = fp8.record(kernels, scales["kernel"], None, fp8.FORMATS["kernel"])
        y = multiply(x, kernels)
        return fp8.record_gradient(y, scales["output_grad"], None, fp8.FORMATS["output_grad"])

    square = lambda f: lambda *args: jnp.sum(jnp.sin(f(*args)))
    value, (dx, dk, seen) = jax.jit(jax.value_and_grad(square(watched), argnums=(0, 1, 2)))(x, kernels, scales)
    plain, want = jax.jit(jax.value_and_grad(square(multiply), argnums=(0, 1)))(x, kernels)
    assert value == plain and (dx == want[0]).all() and (dk == want[1]).all()
    assert float(seen["input"]) == np.abs(x).max()
    np.testing.assert_array_equal(seen["kernel"], np.abs(kernels).max((1, 2)))
    dy = np.asarray(jnp.cos(multiply(x, kernels)))
    assert float(seen["output_grad"]) == pytest.approx(np.abs(dy).max(), rel=1e-6)


def test_shares_of_what_is_clipped_and_of_what_is_lost(rng):
    e4m3, e5m2 = jnp.float8_e4m3fn, jnp.float8_e5m2
    x = np.float32([448, 449, -1000, np.inf, 2.0**-10, -(2.0**-11), 2.0**-9, 0])
    np.testing.assert_array_equal(fp8.shares(x, jnp.float32(1), e4m3), [3 / 8, 2 / 8])
    np.testing.assert_array_equal(fp8.shares(x, jnp.float32(0.5), e4m3), [2 / 8, 3 / 8])
    np.testing.assert_array_equal(fp8.shares(x, jnp.float32(1), e5m2), [1 / 8, 0])
    np.testing.assert_array_equal(
        fp8.shares(np.stack([x, x]), jnp.float32([1, 0.5]), e4m3), [[3 / 8, 2 / 8], [2 / 8, 3 / 8]]
    )

    stacked, kernels, scales = stack_of_layers(rng)
    zeros = {op: jnp.zeros((LAYERS, 2)) for op in OPERANDS}
    of_both = jax.jit(jax.grad(whole_loss, argnums=(1, 4)), static_argnums=3)
    amax, seen = of_both(
        kernels,
        {
            **scales,
            "kernel": jnp.float32([500, 2000, 1]),
            "input": jnp.full(3, 500.0),
            "output_grad": jnp.full(3, 1e12),
        },
        stacked,
        False,
        zeros,
    )
    np.testing.assert_array_equal(amax["kernel"], np.abs(kernels).max((1, 2)))
    want = np.stack([fp8.shares(k, jnp.float32(s), e4m3) for k, s in zip(kernels, (500, 2000, 1), strict=True)])
    np.testing.assert_array_equal(seen["kernel"], want)
    assert want[0, 0] == 0 < want[1, 0]
    np.testing.assert_array_equal(seen["input"][0], fp8.shares(stacked, jnp.float32(500), e4m3))
    assert (
        seen["input"][0, 0] > 0 and np.all(seen["output_grad"][:, 0] > 0) and seen["output_grad"].shape == (LAYERS, 2)
    )


# --- config -----------------------------------------------------------------------------------------------------------


class Precision(Section):
    fp8: FP8Config = pydantic.Field(default_factory=FP8Config)


def test_the_section_has_the_usual_recipe_and_refuses_what_it_cannot_do():
    config = Precision().fp8
    assert (config.history_length, config.algorithm, config.margin, config.warmup_steps) == (1024, "max", 0, 0)
    for field, value in (
        ("history_length", 0),
        ("history_length", 1.5),
        ("algorithm", "mean"),
        ("margin", 7),
        ("margin", -1),
        ("warmup_steps", -1),
        ("first_layers_bfloat16", -1),
        ("last_layers_bfloat16", True),
        ("amax_window", 4),
    ):
        with pytest.raises(pydantic.ValidationError) as error:
            Precision.model_validate({"fp8": {field: value}})
        assert [problem["loc"] for problem in error.value.errors()] == [("fp8", field)]
