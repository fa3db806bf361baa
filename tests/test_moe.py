"""Mixture of experts: Mixtral against transformers, live; dispatch and combine against a dense float64 oracle; meshes, accumulation, padding."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import support
from jaxllm import config, exchange, hf, moe, step
from jaxllm import state as states
from jaxllm.data.batch import to_device
from jaxllm.grouped_linear import grouped_matmul
from jaxllm.models import mixtral
from jaxllm.section import UserError
from support import ROOT, error, hugging_face, mesh, mesh_name, ours, rows, tiny, worst

E, K, D = 8, 2, 16
MESHES = [
    dict(),
    dict(expert=2),
    dict(expert=8),
    dict(data=2, expert=4),
    dict(data=2, sequence=2, expert=2),
    dict(replica=2, data=2),
]
MIXTRAL = (
    *support.MIXTRAL, "model.num_local_experts=8", "model.router_aux_loss_coef=0.05", "model.initializer_range=0.1", "moe.z_loss=0.01",
)  # fmt: skip


# --- the layer alone -------------------------------------------------------------------------------------------------


def dense(x, weights, ids, kernel):
    """Every expert computes every token, float64: sum over k of weights x (x @ kernel[id])."""
    x, weights, kernel = (np.asarray(a, np.float64) for a in (x, weights, kernel))
    every = np.einsum("btd,edf->btef", x, kernel)
    gate = np.zeros((*x.shape[:2], E))
    np.put_along_axis(gate, np.asarray(ids), weights, -1)
    return np.einsum("btef,bte->btf", every, gate)


@functools.partial(jax.jit, static_argnames="how")
def layer(x, weights, ids, real, kernel, how):
    """What `how` makes of one product, with weights."""
    rows_, sizes, home, _ = exchange.dispatch(x, ids, real, how)
    names = ("experts", "embed", "mlp")
    y = grouped_matmul(rows_, sizes, kernel, names, how.everywhere, "float32", "float32", "xla")
    return exchange.combine(y, weights, home, how, jnp.float32)


def everyone_sends_to_everyone(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """jax.lax.ragged_all_to_all by its documentation, for CPUs: all slices are gathered, and written one after the other."""
    here, number = jax.lax.axis_index(axis_name), input_offsets.shape[0]
    gathered = jax.lax.all_gather((operand, input_offsets, send_sizes, output_offsets), axis_name)
    row = jnp.arange(output.shape[0], dtype=jnp.int32)
    for sender in range(number):
        theirs, begin, count, into = (a[sender] for a in gathered)
        offset = row - into[here]
        written = (offset >= 0) & (offset < count[here])
        found = jnp.take(theirs, jnp.clip(begin[here] + offset, 0, theirs.shape[0] - 1), axis=0)
        output = jnp.where(written[:, None], found, output)
    return output


@pytest.fixture(autouse=True)
def ragged_on_a_cpu(monkeypatch):
    """XLA:CPU lacks ragged-all-to-all. What stands in for it is written from its documentation; tests/h100 compiles the real one."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", everyone_sends_to_everyone)


ROUTING = {
    "random": lambda rng, shape: np.stack([rng.permutation(E)[:K] for _ in range(np.prod(shape))]).reshape(*shape, K),
    "all to two": lambda rng, shape: np.broadcast_to(np.array([7, 3]), (*shape, K)),
    "one expert idle": lambda rng, shape: np.stack([rng.permutation(E - 1)[:K] for _ in range(np.prod(shape))]).reshape(*shape, K),
}  # fmt: skip


def derivatives(x, weights, ids, kernel, cotangent):
    """Of sum(dense(...) x cotangent) by x, weights and kernel."""
    x, weights, kernel, cotangent = (np.asarray(a, np.float64) for a in (x, weights, kernel, cotangent))
    gate = np.zeros((*x.shape[:2], E))
    np.put_along_axis(gate, ids, weights, -1)
    back = np.einsum("btf,edf->bted", cotangent, kernel)
    return (
        np.einsum("bted,bte->btd", back, gate),
        np.take_along_axis(np.einsum("bted,btd->bte", back, x), ids, -1),
        np.einsum("btd,btf,bte->edf", x, cotangent, gate),
    )


def inputs(rng, routing):
    x, kernel = rng.standard_normal((8, 16, D)).astype(np.float32), rng.standard_normal((E, D, 24)).astype(np.float32)
    ids = ROUTING[routing](rng, (8, 16)).astype(np.int32)
    return (
        x,
        rng.random((8, 16, K)).astype(np.float32),
        ids,
        kernel,
        rng.standard_normal((8, 16, 24)).astype(np.float32),
    )


def value_and_gradients(how, real=True):
    """Of one layer: its output, gradients by x, weights and kernel, rows of each group and dropped assignments, compiled."""
    real = np.broadcast_to(real, (8, 16))

    @jax.jit
    def evaluate(x, weights, ids, kernel, cotangent):
        out, back = jax.vjp(lambda *a: layer(*a[:2], ids, real, a[2], how), x, weights, kernel)
        _, sizes, _, dropped = exchange.dispatch(x, ids, real, how)
        return out, back(cotangent), sizes, dropped

    return evaluate


@pytest.mark.parametrize("way", exchange.WAYS)
@pytest.mark.parametrize("sizes", MESHES, ids=mesh_name)
def test_a_layer_equals_the_dense_oracle(rng, sizes, way):
    evaluate = value_and_gradients(exchange.Exchange(way, E))
    for routing in ROUTING:
        arrays = inputs(rng, routing)
        with jax.set_mesh(mesh(**sizes)):
            out, grads, *_ = evaluate(*arrays)
        assert error(out, dense(*arrays[:4])) < 2e-6, routing
        for ours_, exact in zip(grads, derivatives(*arrays), strict=True):
            assert error(ours_, exact) < 2e-6, routing


def kept_by_a_device(ids, real, places, rows_, groups):
    """Which assignments find room, bool as ids [B, T, K]: on each device of the expert axis the first `rows_` for its experts, in the order of the tokens of
    all places (rows of the batch) that are `real`; with `groups`, rows_ / places of each place's own tokens."""
    kept = np.zeros(ids.shape, bool)
    parts = np.array_split(np.arange(ids.shape[0]), places) if groups else [np.arange(ids.shape[0])]
    for device in range(places):
        for part in parts:
            room = rows_ // len(parts)
            for place in itertools.product(part, range(ids.shape[1]), range(ids.shape[2])):
                if real[place[:2]] and ids[place] // (E // places) == device and room:
                    kept[place], room = True, room - 1
    return kept


@pytest.mark.parametrize("way", ["allgather", "alltoall", "ragged"])
@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_what_finds_no_room_is_dropped_and_counted_and_nothing_else_changes(rng, way, factor):
    places, routing = 4, "one expert idle"
    x, weights, ids, kernel, cotangent = inputs(rng, routing)
    real = (
        np.arange(16)[None] < np.array([16, 16, 15, 16, 16, 2, 16, 16])[:, None]
    )  # padding takes no room and is not dropped
    how = exchange.Exchange(way, E, factor)
    with jax.set_mesh(mesh(expert=places)):
        num_rows = how.num_rows(ids[..., 0].size // places, K)
        out, grads, sizes, dropped = value_and_gradients(how, real)(x, weights, ids, kernel, cotangent)
    assert num_rows == factor * ids.size / places
    kept = kept_by_a_device(ids, real, places, num_rows, way == "alltoall")
    lost = real[..., None] & ~kept
    assert int(dropped.sum()) == lost.sum() == K * real.sum() - int(sizes.sum())
    assert lost.any() == (factor < 2), "the case has both"
    left = weights * kept
    assert error(out, dense(x, left, ids, kernel)) < 2e-6
    want = derivatives(x, left, ids, kernel, cotangent)
    for ours_, exact in zip(grads, (want[0], want[1] * kept, want[2]), strict=True):
        assert error(ours_, exact) < 2e-6


COMPLETED = [("none", None), ("allgather", 0.75), ("alltoall", 0.75), ("ragged", None), ("ragged", 0.75)]


@functools.partial(jax.jit, static_argnames="how")
def laid_open(x, weights, ids, real, kernel, cotangent, how):
    """One layer with one product: output, gradients of x, weights and kernel, what is dropped; the rows, their gradient, sizes."""
    rows, sizes, home, dropped = exchange.dispatch(x, ids, real, how)

    def mixture(x, weights, kernel, zeros):
        rows, _, home, _ = exchange.dispatch(x, ids, real, how)
        names = ("experts", "embed", "mlp")
        y = grouped_matmul(rows + zeros, sizes, kernel, names, how.everywhere, "float32", "float32", "xla")
        return exchange.combine(y, weights, home, how, jnp.float32)

    out, back = jax.vjp(mixture, x, weights, kernel, jnp.zeros_like(rows))
    *grads, of_rows = back(cotangent)
    return out, grads, dropped, rows, of_rows, sizes


@pytest.mark.parametrize("way, factor", COMPLETED)
def test_completed_groups_change_no_result_and_drop_no_token(rng, way, factor):
    x, kernel = rng.standard_normal((8, 16, 16)).astype(np.float32), rng.standard_normal((E, 16, 24)).astype(np.float32)
    ids = np.stack([rng.permutation(E - 1)[:2] for _ in range(128)]).reshape(8, 16, 2).astype(np.int32)  # one idle
    weights, cotangent = rng.random((8, 16, 2)).astype(np.float32), rng.standard_normal((8, 16, 24)).astype(np.float32)
    real = np.arange(16)[None] < np.array([16, 16, 15, 16, 16, 2, 16, 16])[:, None]
    x, cotangent = (np.where(real[..., None], a, np.float32(1e9)) for a in (x, cotangent))  # padding is nobody's
    arrays = x, weights, ids, real, kernel, cotangent
    with jax.set_mesh(mesh(data=2, expert=4)):
        plain = laid_open(*arrays, how=exchange.Exchange(way, E, factor))
        full = laid_open(*arrays, how=exchange.Exchange(way, E, factor, multiple=128))
    for got, want in zip(jax.tree.leaves(full[:2]), jax.tree.leaves(plain[:2]), strict=True):
        assert error(got, want) < 1e-6
    np.testing.assert_array_equal(full[2], plain[2])
    assert np.asarray(full[2]).any() == (factor is not None), "the case drops where it may"
    rows, of_rows, sizes, before = (np.asarray(a) for a in (*full[3:], plain[5]))
    np.testing.assert_array_equal(sizes, -(-before // 128) * 128)
    assert rows.shape[1] % 128 == 0 and (sizes.sum(1) <= rows.shape[1]).all()
    for device in range(8):
        owned = np.zeros(rows.shape[1], bool)
        for first, size in zip(np.cumsum(sizes[device]) - sizes[device], before[device], strict=True):
            owned[first : first + size] = True
        for array in (rows[device], of_rows[device]):
            assert array[owned].any(-1).all() and not array[~owned].any()
    if factor is None:
        gate = np.where(real[..., None], weights, 0)
        assert error(full[0], dense(np.where(real[..., None], x, 0), gate, ids, kernel)) < 2e-6


@pytest.mark.parametrize("way", exchange.WAYS)
def test_there_is_room_where_every_group_lacks_as_much_as_it_can(way):
    """Four tokens for eight experts, two each: groups of one row, completed to 128, fill R."""
    ids = np.arange(E, dtype=np.int32).reshape(1, 4, 2)
    x, how = np.ones((1, 4, 16), np.float32), exchange.Exchange(way, E, multiple=128)
    with jax.set_mesh(mesh()):
        rows, sizes, home, dropped = jax.jit(exchange.dispatch, static_argnums=3)(x, ids, np.ones((1, 4), bool), how)
        out = exchange.combine(rows, np.ones(ids.shape, np.float32), home, how, jnp.float32)
    assert rows.shape[1] == E * 128 and sizes.tolist() == [[128] * E] and not dropped.any()
    np.testing.assert_array_equal(np.asarray(rows).sum((0, 2)), np.where(np.arange(E * 128) % 128, 0, 16))
    np.testing.assert_array_equal(out, 2 * x)


def test_padding_goes_to_no_expert_whatever_stands_there(rng):
    x, kernel = rng.standard_normal((2, 8, D)).astype(np.float32), rng.standard_normal((E, D, 24)).astype(np.float32)
    real = np.arange(8)[None] < np.array([[8], [3]])
    ids = ROUTING["random"](rng, (2, 8)).astype(np.int32)
    weights = np.ones((2, 8, K), np.float32)
    with jax.set_mesh(mesh()):
        how = exchange.Exchange("none", E)
        _, sizes, _, dropped = jax.jit(exchange.dispatch, static_argnums=3)(x, ids, real, how)
        outs = [layer(np.where(real[..., None], x, bad), weights, ids, real, kernel, how) for bad in (0, np.nan)]
    assert not dropped.any()
    assert int(sizes.sum()) == K * int(real.sum())
    assert np.array_equal(*outs) and not np.any(np.asarray(outs[0])[~real])


def test_the_order_of_tokens_changes_nothing_but_the_order_of_outputs(rng):
    x, kernel = rng.standard_normal((1, 32, D)).astype(np.float32), rng.standard_normal((E, D, 24)).astype(np.float32)
    ids, weights = ROUTING["random"](rng, (1, 32)).astype(np.int32), rng.random((1, 32, K)).astype(np.float32)
    real, order = np.ones((1, 32), bool), rng.permutation(32)
    with jax.set_mesh(mesh()):
        how = exchange.Exchange("none", E)
        straight = layer(x, weights, ids, real, kernel, how)
        turned = layer(x[:, order], weights[:, order], ids[:, order], real, kernel, how)
    assert error(np.asarray(turned), np.asarray(straight)[:, order]) < 1e-6


def test_equal_logits_take_the_lower_id_and_weights_sum_to_one(rng):
    weights, ids = moe.route(jnp.zeros((1, 1, E)), K)
    assert np.array_equal(ids, [[[0, 1]]]) and np.allclose(weights, 0.5)
    weights, _ = moe.route(jnp.asarray(rng.standard_normal((2, 3, E)) * 30, jnp.float32), 3)
    assert np.allclose(np.sum(weights, -1), 1, atol=1e-6)


def test_routing_weights_are_softmax_over_the_chosen():
    """transformers' Mixtral: .73106 and .26894 for logits 2, 1, 0, -1; weight 1 exactly for one expert; all experts: a plain softmax."""
    logits = jnp.asarray([[[2.0, 1.0, 0.0, -1.0]]])
    weights, ids = moe.route(logits, 2)
    assert np.array_equal(ids, [[[0, 1]]]) and np.allclose(weights, [[[0.7310586, 0.2689414]]], atol=1e-6)
    assert np.array_equal(moe.route(logits, 1)[0], [[[1.0]]])
    alone = jax.grad(lambda x: moe.route(x, 1)[0].sum())(logits)
    assert np.abs(alone).max() < 1e-6, "one expert: the router learns from the auxiliary loss alone"
    weights, ids = moe.route(logits, 4)
    assert np.array_equal(ids, [[[0, 1, 2, 3]]]) and np.allclose(weights, jax.nn.softmax(logits), atol=1e-6)


@pytest.mark.parametrize(("router", "chosen"), [("float32", [2, 1]), ("match_hf", [1, 2])])
def test_float32_logits_tell_apart_what_is_equal_in_bfloat16(router, chosen):
    """1.001953125 and 1 are one number in bfloat16, and of equal ones the lower id comes first."""
    cfg = tiny(*MIXTRAL, "model.num_local_experts=4", "precision.compute=bfloat16", f"moe.router={router}")
    moe_layer = mixtral.SparseMoE(cfg.model, cfg.precision, cfg.moe, cfg.lora, rngs=nnx.Rngs(0))
    wanted = jnp.asarray([0, 1.0, 1.001953125, -1])
    moe_layer.router.set_value(jnp.zeros((64, 4)).at[0].set(wanted))
    seen = []
    with jax.set_mesh(mesh()), pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixtral, "route", lambda *a: seen.append(moe.route(*a)) or seen[-1])
        x = np.zeros((1, 1, 64), jnp.bfloat16)
        x[..., 0] = 1
        _, ids = jax.jit(lambda x: (moe_layer(x, jnp.ones((1, 1), bool)), seen[0][1]))(x)
    assert ids.tolist() == [[chosen]]


def test_padding_changes_no_balance():
    """Four tokens, one per expert, alone and with four of padding that would all choose the first: 1.0 in both, as the reference defines it."""
    logits = jnp.log(jnp.asarray(np.concatenate([np.eye(4) * 6 + 1, [[7, 1, 1, 1]] * 4]), jnp.float32))[None]
    for real in (np.ones((1, 4), bool), np.arange(8)[None] < 4):
        rows_ = logits[:, : real.shape[1]]
        seen = jax.tree.map(lambda x: x[None], moe.statistics(rows_, moe.route(rows_, 1)[1], jnp.asarray(real)))
        for form in ("global", "hf"):
            assert float(moe.auxiliary(seen, seen["counts"], 4.0, form)[0]) == pytest.approx(1.0, rel=1e-6)


def test_jitter_multiplies_what_router_and_experts_read(rng):
    x = jnp.asarray(rng.standard_normal((2, 64, 64)), jnp.float32)
    places = jnp.broadcast_to(jnp.arange(64, dtype=jnp.int32)[None], (2, 64))
    noise, jitter = (jax.random.key(1), jnp.arange(2, dtype=jnp.int32), places), jax.jit(moe.jitter, static_argnums=2)
    factor = jitter(jnp.ones_like(x), noise, 0.1)
    assert 0.9 <= factor.min() < 0.901 and 1.099 < factor.max() < 1.1 and abs(factor.mean() - 1) < 2e-3
    assert abs(np.corrcoef(factor[0, 0], factor[0, 1])[0, 1]) < 0.5, "each token has numbers of its own"
    turned = jitter(jnp.ones_like(x), (noise[0], noise[1][::-1], places[:, ::-1]), 0.1)
    assert np.array_equal(turned, factor[::-1, ::-1]), "which belong to its row and place alone"
    cfg, real = tiny(*MIXTRAL, "model.router_jitter_noise=0.1"), jnp.ones((2, 64), bool)
    moe_layer = mixtral.SparseMoE(cfg.model, cfg.precision, cfg.moe, cfg.lora, rngs=nnx.Rngs(0))
    run = jax.jit(lambda *a: moe_layer(*a))
    with jax.set_mesh(mesh()):
        noisy, calm, before = run(x, real, noise), run(x, real), run(x * factor, real)
    assert error(noisy[0], before[0]) < 1e-6 < error(noisy[0], calm[0])


def test_jitter_is_new_in_each_layer_and_step_and_absent_in_evaluation(monkeypatch):
    keys = []
    monkeypatch.setattr(
        mixtral, "jitter", lambda x, noise, amount: (keys.append(noise[0]), moe.jitter(x, noise, amount))[1]
    )
    with_key = lambda *a: {**moe.statistics(*a), "key": jax.random.key_data(keys.pop())}
    monkeypatch.setattr(mixtral, "statistics", with_key)
    cfg = tiny(*MIXTRAL, "model.router_jitter_noise=0.1", "model.remat=full")
    with jax.set_mesh(mesh()):
        graphdef, state = step.init_state(cfg)
        batch = to_device(rows(), 1, mesh())
        drawn = jax.jit(lambda number: step.gradients(graphdef, state.params, batch, cfg, number)[1]["seen"]["key"])
        seen = {tuple(key) for number in (0, 1) for key in np.asarray(drawn(number)).tolist()}
        monkeypatch.setattr(mixtral, "statistics", moe.statistics)
        jax.eval_shape(step.make_eval_step(graphdef, cfg), state, batch)
    assert len(seen) == 2 * cfg.model.num_hidden_layers and not keys


# --- the model against transformers ----------------------------------------------------------------------------------

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """(transformers model, its folder)."""
    folder = tmp_path_factory.mktemp("mixtral")
    model = hugging_face(
        num_local_experts=E,
        num_experts_per_tok=K,
        output_router_logits=True,
        router_aux_loss_coef=0.05,
        sliding_window=9,
    )
    model.save_pretrained(folder)
    return model, folder


def loaded(folder, sizes, *overrides):
    cfg = config.load_config(
        None,
        f"model.path={folder}",
        "precision.compute=float32",
        "loss.chunk_size=128",
        "data.seq_len=64",
        "moe.aux_loss=hf",
        *overrides,
    )
    device_mesh = mesh(**sizes)
    with jax.set_mesh(device_mesh):
        graphdef, abstract, *_ = states.declare(cfg.model, cfg.precision, cfg.attention, cfg.moe)
        params = hf.load_params(folder, mixtral.hf_weights(cfg.model), abstract)
    return cfg, device_mesh, graphdef, params


@pytest.mark.parametrize(
    ("sizes", "overrides"),
    [
        ({}, ()),
        (dict(expert=8), ()),
        (dict(data=2, sequence=2, expert=2), ()),
        (dict(expert=4), ("moe.exchange=none",)),
    ],
    ids=str,
)
def test_logits_losses_and_every_gradient_equal_those_of_transformers(oracle, sizes, overrides):
    model, folder = oracle
    cfg, device_mesh, graphdef, params = loaded(folder, sizes, *overrides)
    packed = rows(documents=False)
    tokens = packed["tokens"]
    with jax.set_mesh(device_mesh):
        batch = to_device(packed, 1, device_mesh, window=cfg.model.sliding_window)
        grads, parts = jax.jit(lambda p, b: step.gradients(graphdef, p, b, cfg))(params, batch)
        state = states.TrainState(jnp.zeros((), jnp.int32), params, {}, {}, None)
        logits = np.asarray(step.logits(graphdef, state, tokens))
    model.zero_grad()
    ids = torch.tensor(tokens.astype(np.int64))
    out = model(ids, labels=ids)
    out.loss.backward()
    count = packed["loss_weights"].sum()
    np.testing.assert_allclose(logits, out.logits.detach().numpy(), atol=1e-5, rtol=0)
    assert float(parts["balance"]) == pytest.approx(out.aux_loss.item(), rel=1e-5)
    cross_entropy = out.loss.item() - 0.05 * out.aux_loss.item()
    assert float(parts["loss_sum"]) / count == pytest.approx(cross_entropy, rel=1e-5)
    theirs = {name: p.grad.numpy() for name, p in model.named_parameters()}
    want = ours(theirs, mixtral.hf_weights(cfg.model), params)
    assert worst({k: np.asarray(g) / count for k, g in grads.items()}, want)[0] < 1e-5


def test_router_logits_equal_those_of_transformers(oracle, monkeypatch):
    model, folder = oracle
    cfg, device_mesh, graphdef, params = loaded(folder, {})
    with_logits = lambda logits, *rest: {**moe.statistics(logits, *rest), "logits": logits}
    monkeypatch.setattr(mixtral, "statistics", with_logits)
    packed = rows(documents=False)
    with jax.set_mesh(device_mesh):
        batch = jax.tree.map(lambda x: x[0], to_device(packed, 1, device_mesh, window=cfg.model.sliding_window))
        seen = jax.jit(lambda p, b: step._hidden(graphdef, p, b)[1])(params, batch)
    with torch.no_grad():
        theirs = model(torch.tensor(packed["tokens"].astype(np.int64)), output_router_logits=True).router_logits
    for mine, other in zip(seen["logits"], theirs, strict=True):
        np.testing.assert_allclose(np.asarray(mine).reshape(-1, E), other.numpy(), atol=1e-5, rtol=0)


def test_a_fused_folder_is_read_as_the_same_weights(oracle, tmp_path):
    """Fused experts, which transformers reads as well: its own state in memory, saved as it is."""
    import shutil

    from safetensors.torch import save_file

    model, folder = oracle
    shutil.copy(folder / "config.json", tmp_path / "config.json")
    fused = {name: value.contiguous() for name, value in model.state_dict().items()}
    assert any("gate_up_proj" in name for name in fused)
    save_file(fused, tmp_path / "model.safetensors", metadata={"format": "pt"})
    separate, together = (loaded(place, {})[3] for place in (folder, tmp_path))
    assert worst(together, separate)[0] == 0


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (".mlp.experts.", "holds experts twice, fused .* and one by one"),
        (".mlp.gate.", "holds a router twice, .*mlp.gate.weight and .*block_sparse_moe.gate.weight; remove"),
    ],
)
def test_a_folder_with_both_layouts_is_refused(oracle, tmp_path, part, said):
    import shutil

    from safetensors.torch import save_file

    model, folder = oracle
    shutil.copytree(folder, tmp_path / "both")
    files = list((tmp_path / "both").glob("*.safetensors"))
    assert len(files) == 1
    files[0].rename(tmp_path / "both" / "model-00001-of-00002.safetensors")
    fused = {name: value.contiguous() for name, value in model.state_dict().items() if part in name}
    save_file(fused, tmp_path / "both" / "model-00002-of-00002.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=said):
        loaded(tmp_path / "both", {})


def test_the_weight_of_the_balancing_loss_is_the_user_s_to_choose(oracle):
    _, folder = oracle
    assert loaded(folder, {})[0].model.router_aux_loss_coef == 0.05
    assert loaded(folder, {}, "model.router_aux_loss_coef=0")[0].model.router_aux_loss_coef == 0


def test_an_export_opens_in_transformers_with_the_same_logits(oracle, tmp_path):
    import transformers

    model, folder = oracle
    cfg, *_, params = loaded(folder, {})
    out = hf.save_folder(
        params, mixtral.hf_weights(cfg.model), mixtral.config_to_hf(cfg.model), tmp_path / "out", dtype="float32"
    )
    again = transformers.AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager").eval()
    ids = torch.tensor(rows(documents=False)["tokens"].astype(np.int64))
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


# --- what must not change the losses of the router -------------------------------------------------------------------


def gradients(sizes, packed, *overrides, microbatches=1):
    cfg, device_mesh = tiny(*MIXTRAL, *overrides), mesh(**sizes)
    with jax.set_mesh(device_mesh):
        graphdef, state = step.init_state(cfg)
        batch = to_device(packed, microbatches, device_mesh)
        grads, parts = jax.jit(lambda p, b: step.gradients(graphdef, p, b, cfg))(state.params, batch)
    return {**grads, **{name: parts[name] for name in ("loss_sum", "balance", "router_z")}}


@pytest.mark.parametrize("form", ["global", "hf"])
def test_router_losses_do_not_depend_on_mesh_accumulation_remat_or_padding(form):
    packed, overrides = rows(), [f"moe.aux_loss={form}", "model.router_jitter_noise=0.1"]
    want = gradients({}, packed, *overrides)
    cases = [gradients({}, packed, *overrides, "model.remat=none", microbatches=4)]
    if form == "global":
        cases.append(
            gradients(dict(sequence=2, expert=2, data=2), packed, *overrides, "model.remat=full", microbatches=2)
        )
        longer = {name: np.pad(values, [(0, 0), (0, 6)]) for name, values in packed.items()}
        cases.append(gradients({}, longer, *overrides, "data.seq_len=70"))
    for got in cases:
        assert worst(got, want)[0] < 1e-4


def test_what_is_seen_of_a_router_is_what_its_definitions_say(rng):
    """Three layers, 33 real tokens of 40, in float64 numpy: both auxiliary losses, the z-loss and its gradient, and the entropy."""
    layers, tokens, num_real = 3, 40, 33
    logits = rng.standard_normal((layers, 1, tokens, E)).astype(np.float32) * 2
    real = np.arange(tokens)[None] < num_real
    ids = np.argsort(-logits, axis=-1)[..., :K].astype(np.int32)
    seen = jax.vmap(moe.statistics, (0, 0, None))(logits, ids, real)
    counted = lambda form: moe.auxiliary(seen, seen["counts"], jnp.float32(num_real), form)

    x = logits[:, 0, :num_real].astype(np.float64)
    lse = np.log(np.exp(x).sum(-1, keepdims=True))
    probs = np.exp(x - lse)
    share = np.stack([np.bincount(layer[0, :num_real].ravel(), minlength=E) for layer in ids]) / num_real
    per_layer = E * (share * probs.mean(1)).sum(-1)
    pooled = E * (share.mean(0) * probs.mean((0, 1))).sum()
    assert abs(per_layer.mean() / pooled - 1) > 1e-3, "the two forms differ here"
    z = (lse**2).mean()
    for form, want in (("global", per_layer.mean()), ("hf", pooled)):
        got = counted(form)
        assert float(got[0]) == pytest.approx(want, rel=1e-6) and float(got[1]) == pytest.approx(z, rel=1e-6)
    shown = moe.report(seen | {"dropped": jnp.zeros(layers)}, jnp.float32(num_real), K)
    assert float(shown["entropy"]) == pytest.approx(-(probs * np.log(probs)).sum(-1).mean(), rel=1e-6)
    assert float(shown["imbalance"]) == pytest.approx(share.max() * E / K, rel=1e-6)

    def z_loss(logits):
        seen = jax.vmap(moe.statistics, (0, 0, None))(logits, ids, real)
        return moe.auxiliary(seen, seen["counts"], jnp.float32(num_real), "global")[1]

    gradient = np.asarray(jax.grad(z_loss)(logits))[:, 0]
    np.testing.assert_allclose(gradient[:, :num_real], 2 * lse * probs / (num_real * layers), rtol=1e-5, atol=1e-8)
    assert not gradient[:, num_real:].any()


def test_layers_that_are_lopsided_in_opposite_ways_are_balanced_to_transformers_alone():
    """Two layers of two experts, top 1: each sends all tokens to its own. Pooled over layers that is balance, 1; layer by layer the worst, 2."""
    logits = jnp.float32([[[[9.0, -9.0]] * 4], [[[-9.0, 9.0]] * 4]])
    ids = jnp.argmax(logits, axis=-1, keepdims=True).astype(jnp.int32)
    seen = jax.vmap(moe.statistics, (0, 0, None))(logits, ids, jnp.ones((1, 4), bool))
    found = {form: float(moe.auxiliary(seen, seen["counts"], jnp.float32(4), form)[0]) for form in ("hf", "global")}
    assert found == {"hf": pytest.approx(1.0), "global": pytest.approx(2.0)}


def test_metrics_of_the_experts_and_a_loss_that_balances_them():
    cfg = tiny(*MIXTRAL, "model.router_aux_loss_coef=1.0", "optimizer.learning_rate=1e-2", "steps=20")
    device_mesh = mesh(expert=2)
    with jax.set_mesh(device_mesh):
        graphdef, state = step.init_state(cfg)
        train_step, seen = step.make_train_step(graphdef, cfg), []
        for n in range(20):
            state, metrics = train_step(state, to_device(rows(seed=n % 3), 1, device_mesh))
            load = metrics.pop("expert_load")
            assert load.shape == (E,) and float(load.sum()) == pytest.approx(1, rel=1e-5)
            seen.append({name: float(value) for name, value in metrics.items()})
    assert seen[-1]["aux_loss"] < seen[0]["aux_loss"] and seen[-1]["aux_loss"] >= K * 0.99
    assert seen[-1]["imbalance"] < seen[0]["imbalance"]
    assert all(
        row["dropped_tokens"] == row["dropped_share"] == 0 and 0 < row["entropy"] <= np.log(E) + 1e-5 for row in seen
    )


@pytest.mark.parametrize("coefficient", [0, 0.05])
def test_the_balance_shown_is_the_step_s_however_it_is_cut(coefficient):
    shown = []
    for microbatches in (1, 4):
        cfg = tiny(*MIXTRAL, f"model.router_aux_loss_coef={coefficient}", f"optimizer.num_microbatches={microbatches}")
        with jax.set_mesh(mesh()):
            graphdef, state = step.init_state(cfg)
            metrics = step.make_train_step(graphdef, cfg)(state, to_device(rows(), microbatches, mesh()))[1]
        shown.append([float(metrics[name]) for name in ("aux_loss", "router_z_loss", "imbalance", "entropy")])
    assert np.allclose(*shown, rtol=1e-4) and shown[0][0] >= K * 0.99


def test_what_is_reported_of_the_experts():
    counts = np.array([[4.0, 0.0, 2.0, 2.0], [2.0, 2.0, 2.0, 2.0]])
    seen = {"counts": jnp.asarray(counts), "entropy": jnp.asarray([4.0, 8.0]), "dropped": jnp.asarray([3.0, 1.0])}
    got = {name: value.tolist() for name, value in moe.report(seen, 4.0, 2).items()}
    assert got == {
        "expert_load": [0.375, 0.125, 0.25, 0.25], "imbalance": 2.0, "idle": 1.0, "entropy": 1.5, "dropped_tokens": 4.0, "dropped_share": 0.25,
    }  # fmt: skip


def test_a_bound_drops_in_training_and_never_in_evaluation():
    """Half of what the places of all rows need: what is beyond that is dropped, counted, and the loss changes; the evaluation's does not."""
    seen = {}
    for factor in (None, 0.5):
        bound = [] if factor is None else [f"moe.buffer_factor={factor}"]
        cfg, device_mesh = tiny(*MIXTRAL, "mesh.expert=2", *bound), mesh(expert=2)
        with jax.set_mesh(device_mesh):
            graphdef, state = step.init_state(cfg)
            batch = to_device(rows(), 1, device_mesh)
            evaluated = step.make_eval_step(graphdef, cfg)(state, batch)
            _, metrics = step.make_train_step(graphdef, cfg)(state, batch)
        seen[factor] = float(evaluated["loss_sum"]), float(metrics["loss"]), float(metrics["dropped_share"])
        if factor:
            real = (rows()["k_end"] > 0).sum()
            assert float(metrics["dropped_tokens"]) == pytest.approx(seen[factor][2] * 2 * K * real, rel=1e-5)
    assert seen[0.5][2] >= 1 - 0.5 * rows()["k_end"].size / real and seen[None][2] == 0
    assert seen[0.5][1] != pytest.approx(seen[None][1], rel=1e-5)
    assert seen[0.5][0] == pytest.approx(seen[None][0], rel=1e-6)


def test_the_exchange_that_is_chosen_is_said():
    """Mixtral 8x7B: 4,096 tokens per GPU are fewer bytes than its experts, 32,768 are more."""
    cfg = config.load_config(ROOT / "configs" / "mixtral_8x7b.toml")
    says = lambda tokens, dtype="float32", **moe_settings: moe.describe(
        moe.MoEConfig(**moe_settings), cfg.model, 1, tokens, dtype
    )
    with jax.set_mesh(mesh(expert=8)):
        assert says(8 * 4096) == (
            "experts: 8 over 8 places, exchange allgather (1.5 GiB of tokens per layer and step, 9.2 GiB of experts), products by xla"
        )
        assert "exchange none (12 GiB of tokens per layer and step, 9.2 GiB of experts)" in says(8 * 32768)
        assert "exchange none (asked for)" in says(4096, exchange="none")
        bounded = says(4096, buffer_factor=1.5)
        assert "exchange alltoall (moe.buffer_factor bounds what is sent)" in bounded
        assert bounded.endswith("moe.buffer_factor = 1.5: what does not fit is dropped, and counted as dropped_tokens")
        with pytest.raises(UserError, match=r'moe.exchange: "ragged" needs GPUs.* \'cpu\'.*"alltoall"'):
            says(4096, exchange="ragged")
        with pytest.raises(UserError, match=r'moe.backend: "hopper" needs H100.*\'cpu\' and "float32".*choose'):
            says(4096, backend="hopper")
    with jax.set_mesh(mesh()):
        assert "exchange none (mesh.expert = 1)" in says(4096)
        assert says(4096, buffer_factor=2).endswith("bounds nothing here, for nothing is received")


def test_configs_that_cannot_be_are_refused():
    for overrides, said in (
        (("model.num_local_experts=8",), "the family 'llama' has no experts"),
        (("model.family=mixtral",), "router_jitter_noise: not set, and a Mixtral needs num_local_experts, "),
        ((*MIXTRAL, "model.num_experts_per_tok=9"), "num_experts_per_tok = 9 is more than num_local_experts = 8"),
        ((*MIXTRAL, "model.router_jitter_noise=1.5"), "router_jitter_noise"),
        ((*MIXTRAL, "mesh.expert=3"), "mesh.expert: 3 places do not divide model.num_local_experts = 8; legal: 1, 2, 4, 8"),
        (("mesh.expert=2",), "mesh.expert: 2 places for experts, of which a llama has none; use mesh.data"),
        (("moe.z_loss=0.001",), "moe.z_loss: 0.001 is for a mixture of experts, and a llama has none; remove it"),
        (("moe.exchange=none",), 'moe.exchange: "none" is for a mixture of experts, and a llama has none; remove it'),
        ((*MIXTRAL, "moe.exchange=none", "moe.buffer_factor=2"), "moe.buffer_factor: 2 bounds what a device receives.*remove one"),
        ((*MIXTRAL, "moe.buffer_factor=0"), "moe.buffer_factor"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=said):
            tiny(*overrides)
    with pytest.raises(UserError, match=r"experts = 6.*4 shards"), jax.set_mesh(mesh(expert=4)):
        step.abstract_state(tiny(*MIXTRAL, "model.num_local_experts=6"))
