"""FP8 for experts: products against float64 of what the operands became, amax of all devices and of each expert, and in what
weights are gathered and multiplied. What completes groups with rows of zeros is tested with the exchange, in test_moe.py."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm import exchange, fp8
from jaxllm.grouped_linear import GroupedLinear, fp8_grouped_matmul, fp8_multiple, grouped_matmul
from jaxllm.linear import PrecisionConfig
from jaxllm.section import UserError
from jaxllm.sharding import AT_REST, AXES, spec
from jaxllm_kernels import grouped
from support import error, mesh

E, K, N, R = 8, 64, 48, 96
NAMES = ("experts", "embed", "mlp")
OPERANDS = tuple(fp8.FORMATS)
IDLE = 5  # the expert without a row on any device
EIGHT = dict(data=2, expert=4)
NEW = jax.version.__version_info__ >= (0, 11)


# --- products ---------------------------------------------------------------------------------------------------------


def case(rng, devices, held, dtype=np.float32, K=K, N=N):
    """(rows, sizes, kernel, gradient of the output) and scales that clip some of each; zeros behind the groups."""
    sizes = rng.integers(1, R // held + 1, (devices, held)).astype(np.int32)
    sizes.reshape(-1, E)[:, IDLE] = 0
    sizes[1:][-1:] = 0  # one of several devices has nothing to do
    live = np.arange(R)[None, :, None] < sizes.sum(1)[:, None, None]
    draw = lambda scale, *shape: (scale * rng.standard_normal(shape)).astype(dtype)
    # Each expert's kernel has a magnitude of its own.
    kernel = (draw(0.02, E, K, N) * 2.0 ** np.arange(E)[:, None, None]).astype(dtype)
    rows, dy = (np.where(live, draw(scale, devices, R, size), 0).astype(dtype) for scale, size in ((3, K), (1e-4, N)))
    seen = amax(rows, kernel, dy)
    scales = {op: jnp.asarray(1.3 * fp8.largest(fp8.FORMATS[op]) / a, jnp.float32) for op, a in seen.items()}
    return (rows, sizes, kernel, dy), scales


def amax(rows, kernel, dy):
    widest = lambda a, axis=None: np.abs(a.astype(np.float32)).max(axis)
    return {"input": widest(rows), "kernel": widest(kernel, (1, 2)), "output_grad": widest(dy)}


def seen_amax(rows, kernel, dy):
    """What scales get as their gradients: nothing of an expert's kernel that no row met."""
    seen = amax(rows, kernel, dy)
    return {**seen, "kernel": np.where(np.arange(E) == IDLE, 0, seen["kernel"]).astype(np.float32)}


@functools.partial(jax.jit, static_argnames=("everywhere", "compute", "reduce", "backend", "records_only"))
def value_and_gradients(
    rows, sizes, kernel, dy, scales, everywhere, compute, reduce="float32", backend="xla", **options
):
    """(y, gradients of rows and kernel, amax)."""
    multiply = lambda rows, kernel, scales: fp8_grouped_matmul(
        rows, sizes, kernel, scales, NAMES, everywhere, compute, reduce, backend, **options
    )
    y, back = jax.vjp(multiply, rows, kernel, scales)
    return y, *back(dy.astype(y.dtype))


def exact(arrays, scales, held=E):
    """y, dx, dw in float64, of the operands as FP8 has them."""
    rows, sizes, kernel, dy = arrays
    wide = lambda op, a: (
        np.asarray(fp8.quantise(a, scales[op], fp8.FORMATS[op])).astype(np.float64)
        / np.reshape(np.asarray(scales[op], np.float64), (-1, 1, 1))
    )
    x, w, g = (wide(op, a) for op, a in zip(OPERANDS, (rows, kernel, dy), strict=True))
    y, dx, dw = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(w.shape)
    for device, groups in enumerate(sizes):
        for n, (size, end) in enumerate(zip(groups, np.cumsum(groups), strict=True)):
            own, e = slice(end - size, end), (device * held + n) % E
            y[device, own], dx[device, own] = x[device, own] @ w[e], g[device, own] @ w[e].T
            dw[e] += x[device, own].T @ g[device, own]
    return y, dx, dw


def placed(arrays, sizes, everywhere=False):
    """On the mesh of those sizes: rows one block per device, the kernel at rest."""
    where = mesh(**sizes)
    specs = (P(AXES), P(AXES), spec(AT_REST, NAMES), P(AXES))
    return [jax.device_put(a, NamedSharding(where, s)) for a, s in zip(arrays, specs, strict=True)]


def bits(x):
    return np.asarray(x, np.float32).view(np.uint32)


@pytest.mark.parametrize(
    "sizes, held", [(dict(), 8), (EIGHT, 2), (EIGHT, 8), (dict(replica=2, sequence=2), 8)], ids=str
)
def test_products_are_those_of_the_fp8_operands_and_amax_those_of_all_devices(rng, sizes, held):
    devices = int(np.prod(list(sizes.values()), initial=1))
    arrays, scales = case(rng, devices, held)
    with jax.set_mesh(mesh(**sizes)):
        y, dx, dw, seen = value_and_gradients(*placed(arrays, sizes), scales, held == E, "float32")
    for got, want in zip((y, dx, dw), exact(arrays, scales, held), strict=True):
        assert error(got, want) < 1e-6
    assert not np.asarray(dw)[IDLE].any()
    rows, _, kernel, dy = arrays
    for operand, want in seen_amax(rows, kernel, dy).items():
        np.testing.assert_array_equal(bits(seen[operand]), bits(want), operand)


def test_a_bfloat16_product_is_the_float32_one_rounded_once_and_sums_meet_in_the_dtype_of_the_reduction(rng):
    arrays, scales = case(rng, 8, 2, ml_dtypes.bfloat16)
    wide = [a if a.dtype == np.int32 else a.astype(np.float32) for a in arrays]
    with jax.set_mesh(mesh(**EIGHT)):
        want = value_and_gradients(*placed(wide, EIGHT), scales, False, "float32")
        for reduce in ("float32", "bfloat16"):
            call = functools.partial(value_and_gradients, everywhere=False, compute="bfloat16", reduce=reduce)
            arguments = (*placed(arrays, EIGHT), scales)
            got = call(*arguments)
            assert {a.dtype for a in got[:3]} == {jnp.dtype(jnp.bfloat16)}
            for ours, theirs in zip(got[:2], want[:2], strict=True):
                np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs).astype(ml_dtypes.bfloat16))
            assert error(got[2], want[2]) < 2.0**-7
            jaxpr = jax.make_jaxpr(call)(*arguments).jaxpr
            sums = [e for e in equations(jaxpr) if e.primitive.name in ("reduce_scatter", "psum")]
            assert [e.invars[0].aval.dtype.name for e in sums] == [reduce]


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def test_each_product_is_given_two_fp8_operands_and_nothing_wider_comes_to_it(rng, monkeypatch):
    e4m3, e5m2 = "float8_e4m3fn", "float8_e5m2"
    given = []
    for name in ("forward", "wgrad"):
        product = getattr(grouped, name)
        watched = lambda a, b, *rest, product=product, name=name, **options: (
            given.append((name, a.dtype.name, b.dtype.name)), product(a, b, *rest, **options)
        )[1]  # fmt: skip
        monkeypatch.setattr(grouped, name, watched)
    arrays, scales = case(rng, 1, 8)
    function = value_and_gradients.__wrapped__
    with jax.set_mesh(mesh()):
        jaxpr = jax.make_jaxpr(lambda *a: function(*a, True, "bfloat16"))(*arrays, scales).jaxpr
    assert given == [("forward", e4m3, e4m3), ("forward", e5m2, e4m3), ("wgrad", e4m3, e5m2)]
    shards = [e for e in equations(jaxpr) if e.primitive.name == "shard_map"]
    large = [sorted(v.aval.dtype.name for v in e.invars if v.aval.ndim == 3) for e in shards]
    assert large == [[e4m3, e4m3], [e4m3, e4m3, e5m2]]


def test_experts_are_quantised_where_they_rest_and_gathered_in_fp8(rng):
    arrays, scales = case(rng, 8, 2)
    with jax.set_mesh(mesh(**EIGHT)):
        text = value_and_gradients.lower(*placed(arrays, EIGHT), scales, False, "float32").compile().as_text()
    # By the shape of what a device has of an expert's kernel while it is used. XLA:CPU keeps FP8 as float16 while it travels.
    gathered = [line.split("=")[1].strip() for line in text.splitlines() if " all-gather(" in line]
    kernels = [what for what in gathered if f"[2,{K},{N}]" in what or f"[2,{N},{K}]" in what]
    assert len(kernels) == 1 and kernels[0].startswith(("f8e4m3fn[", "f16[")), gathered
    assert all(what.startswith(("f8e4m3fn[", "f16[", "f32[8]", "u32[8]", "s32[")) for what in gathered), gathered


def test_layers_of_a_scan_see_their_own_amax_and_rematerialisation_changes_nothing(rng):
    (rows, sizes, *_), _ = case(rng, 1, 8, N=K)
    kernels = rng.standard_normal((2, E, K, K)).astype(np.float32) * np.float32([0.1, 0.2])[:, None, None, None]
    scales = {"input": jnp.float32([20, 30]), "kernel": jnp.full((2, E), 100.0), "output_grad": jnp.float32([50, 60])}

    def loss(kernels, scales, remat):
        def layer(x, own):
            static = (NAMES, True, "float32", "float32", "xla")
            return jnp.tanh(fp8_grouped_matmul(x, sizes, *own, *static)), None

        policy = jax.checkpoint_policies.save_anything_except_these_names("gathered")
        layer = {"none": layer, "full": jax.checkpoint(layer), "names": jax.checkpoint(layer, policy=policy)}[remat]
        return jnp.sum(jax.lax.scan(layer, rows, (kernels, scales))[0] ** 2)

    with jax.set_mesh(mesh()):
        results = [
            jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)(kernels, scales, r) for r in ("none", "full", "names")
        ]
    want = np.abs(kernels).max((2, 3))
    want[:, IDLE] = 0
    for dw, seen in results:
        np.testing.assert_array_equal(seen["kernel"], want)
        assert seen["input"][0] == np.abs(rows).max() and seen["input"][1] <= 1
        assert error(dw, results[0][0]) < 1e-6
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), seen, results[0][1]))


def test_a_warm_up_multiplies_in_the_compute_dtype_and_sees_the_same(rng):
    arrays, scales = case(rng, 8, 2, ml_dtypes.bfloat16)
    rows, sizes, kernel, dy = arrays

    @jax.jit
    def plain(rows, sizes, kernel, dy):
        multiply = lambda rows, kernel: grouped_matmul(rows, sizes, kernel, NAMES, False, "bfloat16", "float32", "xla")
        y, back = jax.vjp(multiply, rows, kernel)
        return y, *back(dy)

    with jax.set_mesh(mesh(**EIGHT)):
        on_devices = placed(arrays, EIGHT)
        *got, seen = value_and_gradients(*on_devices, scales, False, "bfloat16", records_only=True)
        for ours, theirs in zip(got, plain(*on_devices), strict=True):
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    for operand, want in seen_amax(rows, kernel, dy).items():
        np.testing.assert_array_equal(bits(seen[operand]), bits(want), operand)


def test_shares_are_those_of_each_expert_and_of_the_rows_of_groups(rng):
    (rows, sizes, kernel, dy), scales = case(rng, 1, 8)
    seen = {op: jnp.zeros((*scales[op].shape, 2)) for op in OPERANDS}

    def loss(seen):
        static = (NAMES, True, "float32", "float32", "xla")
        return jnp.sum(fp8_grouped_matmul(rows, sizes, kernel, scales, *static, seen=seen) * dy)

    with jax.set_mesh(mesh()):
        shares = jax.jit(jax.grad(loss))(seen)
    live, used = np.arange(R) < sizes.sum(), np.asarray(sizes)[0] > 0
    assert not used.all(), "an expert is idle, and its kernel counts nothing"
    for operand, array in zip(OPERANDS, (rows[:, live], kernel, dy[:, live]), strict=True):
        want = fp8.shares(array, scales[operand], fp8.FORMATS[operand])
        want = np.where(used[:, None], want, 0) if operand == "kernel" else want
        np.testing.assert_allclose(shares[operand], want, rtol=1e-6, err_msg=operand)
        clipped = np.asarray(shares[operand])[..., 0]
        assert (clipped[used] if operand == "kernel" else clipped).all(), "some of each is clipped"


def test_a_module_multiplies_as_its_precision_says(rng):
    (rows, sizes, _, dy), scales = case(rng, 1, 8)

    def made(matmul):
        precision = PrecisionConfig(compute="float32", matmul=matmul)
        module = GroupedLinear({"embed": K}, {"mlp": N}, precision, experts=E, name="gate_proj", rngs=nnx.Rngs(0))
        for op, observer in (module.scales or {}).items():
            observer.set_value(observer.get_value().at[..., 0].set(scales[op]))
        return module

    with jax.set_mesh(mesh()):
        call = jax.jit(lambda module: module(rows, sizes, everywhere=True, backend="xla"))
        plain, in_fp8, warm_up = (call(made(matmul)) for matmul in ("compute", "float8", "record"))
    kernel = np.asarray(made("float8").kernel.get_value())
    assert error(in_fp8, exact((rows, sizes, kernel, dy), scales)[0]) < 1e-6 < error(in_fp8, plain)
    np.testing.assert_array_equal(plain, warm_up)


def test_what_cannot_be_multiplied_in_fp8_is_refused(rng):
    (rows, sizes, kernel, _), scales = case(rng, 1, 8)
    call = lambda rows, kernel, backend="xla", **options: fp8_grouped_matmul(
        rows, sizes, kernel, scales, NAMES, True, "bfloat16", "float32", backend, **options
    )
    for records_only in (False, True):  # before the first step in FP8
        with pytest.raises(UserError, match='precision.matmul: "float8" .*multiples of 16, got experts of 64 x 40'):
            call(rows, kernel[..., :40], records_only=records_only)
    with jax.set_mesh(mesh(data=2)):
        inside = jax.shard_map(lambda x: call(x, kernel), in_specs=P("data"), out_specs=P("data"), check_vma=False)
        with pytest.raises(ValueError, match="inside of a shard_map over .*data"):
            jax.eval_shape(inside, np.concatenate([rows, rows]))
    assert fp8_multiple("xla") == 1
    if NEW:
        assert fp8_multiple("hopper") == 128
    else:
        old = r'precision.matmul: "float8" for experts needs JAX 0.11 .* moe.backend = "hopper", got 0.10.*set moe.backend = "xla"'
        with pytest.raises(UserError, match=old):
            call(rows, kernel, "hopper")


@pytest.mark.version
@pytest.mark.skipif(not NEW, reason="the Mosaic interpreter of jax 0.10 cannot run these kernels; the newest pair does")
def test_hopper_s_kernels_multiply_the_same_in_both_orders(rng, monkeypatch):
    """In Mosaic's interpreter, through the whole custom_vjp: what is transposed for which product is what could be wrong."""
    from jaxllm_kernels import grouped_hopper, grouped_hopper_kernels

    monkeypatch.setattr(grouped_hopper_kernels, "BLOCKS", 2)
    for name in ("forward", "wgrad"):
        monkeypatch.setattr(grouped_hopper, name, functools.partial(getattr(grouped_hopper, name), interpret=True))
    sizes = np.int32([[128, 0, 128]])
    rows, dy = (rng.standard_normal((1, 384, size)).astype(ml_dtypes.bfloat16) for size in (128, 256))
    rows[:, 256:], dy[:, 256:] = 0, 0
    kernel = rng.standard_normal((3, 128, 256)).astype(np.float32)
    scales = {"input": jnp.float32(100), "kernel": jnp.float32([50, 100, 150]), "output_grad": jnp.float32(9000)}
    arrays = tuple(map(jnp.asarray, (rows, sizes, kernel, dy)))
    with jax.set_mesh(mesh()):
        run = lambda backend: value_and_gradients(*arrays, scales, True, "bfloat16", backend=backend)
        ours, theirs = run("hopper"), run("xla")
    for got, want, rounding in zip(ours, theirs, (2.0**-7, 2.0**-7, 1e-6), strict=False):
        assert np.asarray(want).any() and error(got, want) <= rounding
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), ours[3], theirs[3]))


# --- between dispatch and combine ---------------------------------------------------------------------------------------


def test_padding_and_completion_are_not_seen_by_amax(rng):
    """Two products between dispatch and combine; padding holds NaN and infinities, and its gradients are infinite."""
    real = np.arange(16)[None] < np.array([16, 3, 15, 16, 16, 2, 16, 0])[:, None]
    ids = np.stack([rng.permutation(E)[:2] for _ in range(128)]).reshape(8, 16, 2).astype(np.int32)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    x, cotangent, up, down = draw(8, 16, 16), draw(8, 16, 16), draw(E, 16, 32), draw(E, 32, 16)
    want = np.abs(x[real]).max()
    x[~real], cotangent[~real] = np.inf, np.inf
    weights = rng.random(ids.shape).astype(np.float32)
    scales = {op: jnp.full((E,) if op == "kernel" else (), 30.0) for op in OPERANDS}

    @functools.partial(jax.jit, static_argnums=1)
    def seen(scales, how):
        def mixture(scales):
            rows, sizes, home, _ = exchange.dispatch(x, ids, real, how)
            static = (how.everywhere, "float32", "float32", "xla")
            hidden = fp8_grouped_matmul(rows, sizes, up, scales[0], NAMES, *static)
            hidden = jax.nn.silu(hidden) * hidden
            y = fp8_grouped_matmul(hidden, sizes, down, scales[1], ("experts", "mlp", "embed"), *static)
            return exchange.combine(y, weights, home, how, jnp.float32)

        return jax.vjp(mixture, scales)[1](cotangent)[0]

    with jax.set_mesh(mesh(**EIGHT)):
        of = [
            seen([scales, scales], exchange.Exchange(way, E, multiple=m)) for way, m in (("none", 1), ("alltoall", 128))
        ]
    for first, second in of:
        assert bits(first["input"]) == bits(want)
        largest = (np.abs(cotangent)[..., None, :] * weights[..., None])[real].max()
        assert float(second["output_grad"]) == pytest.approx(largest, rel=1e-6)
        assert all(np.isfinite(np.asarray(a)).all() for a in (*first.values(), *second.values()))
