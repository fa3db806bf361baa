"""Mixture of experts: Mixtral against transformers, live; dispatch and combine against a dense float64 oracle; meshes, accumulation, padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import config, hf, moe, step
from jaxllm import state as states
from jaxllm.data.batch import to_device
from jaxllm.models import mixtral
from jaxllm.section import UserError
from support import error, hugging_face, mesh, mesh_name, ours, rows, tiny, worst

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
    "model.family=mixtral", "model.num_local_experts=8", "model.num_experts_per_tok=2", "model.router_aux_loss_coef=0.05",
    "model.router_jitter_noise=0", "model.initializer_range=0.1", "moe.z_loss=0.01",
)  # fmt: skip


# --- the layer alone -------------------------------------------------------------------------------------------------


def dense(x, weights, ids, kernel):
    """Every expert computes every token, float64: sum over k of weights x (x @ kernel[id])."""
    x, weights, kernel = (np.asarray(a, np.float64) for a in (x, weights, kernel))
    every = np.einsum("btd,edf->btef", x, kernel)
    gate = np.zeros((*x.shape[:2], E))
    np.put_along_axis(gate, np.asarray(ids), weights, -1)
    return np.einsum("btef,bte->btf", every, gate)


def layer(x, weights, ids, real, kernel, exchange):
    from jaxllm.linear import grouped_matmul

    rows_, sizes, slots = moe.dispatch(x, ids, real, E, exchange)
    names = ("experts", "embed", "mlp")
    y = grouped_matmul(rows_, sizes, kernel, names, exchange == "none", "float32", "float32", "xla")
    return moe.combine(y, weights, slots, exchange, jnp.float32)


ROUTING = {
    "random": lambda rng, shape: np.stack([rng.permutation(E)[:K] for _ in range(np.prod(shape))]).reshape(*shape, K),
    "all to two": lambda rng, shape: np.broadcast_to(np.array([7, 3]), (*shape, K)),
    "one expert idle": lambda rng, shape: np.stack([rng.permutation(E - 1)[:K] for _ in range(np.prod(shape))]).reshape(*shape, K),
}  # fmt: skip


@pytest.mark.parametrize("routing", ROUTING)
@pytest.mark.parametrize("exchange", moe.EXCHANGES)
@pytest.mark.parametrize("sizes", MESHES, ids=mesh_name)
def test_a_layer_equals_the_dense_oracle(rng, sizes, exchange, routing):
    x, kernel = rng.standard_normal((8, 16, D)).astype(np.float32), rng.standard_normal((E, D, 24)).astype(np.float32)
    ids = ROUTING[routing](rng, (8, 16)).astype(np.int32)
    weights, cotangent = rng.random((8, 16, K)).astype(np.float32), rng.standard_normal((8, 16, 24)).astype(np.float32)
    real = np.ones((8, 16), bool)
    total = lambda x, weights, kernel: jnp.sum(layer(x, weights, ids, real, kernel, exchange) * cotangent)
    with jax.set_mesh(mesh(**sizes)):
        out = jax.jit(lambda *a: layer(*a[:2], ids, real, a[2], exchange))(x, weights, kernel)
        grads = jax.jit(jax.grad(total, (0, 1, 2)))(x, weights, kernel)
    assert error(out, dense(x, weights, ids, kernel)) < 2e-6
    wide = lambda a: np.asarray(a, np.float64)
    gate = np.zeros((8, 16, E))
    np.put_along_axis(gate, ids, wide(weights), -1)
    back = np.einsum("btf,edf->bted", wide(cotangent), wide(kernel))
    want = (
        np.einsum("bted,bte->btd", back, gate),
        np.take_along_axis(np.einsum("bted,btd->bte", back, wide(x)), ids, -1),
        np.einsum("btd,btf,bte->edf", wide(x), wide(cotangent), gate),
    )
    for ours_, exact in zip(grads, want, strict=True):
        assert error(ours_, exact) < 2e-6


def test_padding_goes_to_no_expert_whatever_stands_there(rng):
    x, kernel = rng.standard_normal((2, 8, D)).astype(np.float32), rng.standard_normal((E, D, 24)).astype(np.float32)
    real = np.arange(8)[None] < np.array([[8], [3]])
    ids = ROUTING["random"](rng, (2, 8)).astype(np.int32)
    weights = np.ones((2, 8, K), np.float32)
    with jax.set_mesh(mesh()):
        _, sizes, _ = moe.dispatch(x, ids, real, E, "none")
        outs = [layer(np.where(real[..., None], x, bad), weights, ids, real, kernel, "none") for bad in (0, np.nan)]
    assert int(sizes.sum()) == K * int(real.sum())
    assert np.array_equal(*outs) and not np.any(np.asarray(outs[0])[~real])


def test_the_order_of_tokens_changes_nothing_but_the_order_of_outputs(rng):
    x, kernel = rng.standard_normal((1, 32, D)).astype(np.float32), rng.standard_normal((E, D, 24)).astype(np.float32)
    ids, weights = ROUTING["random"](rng, (1, 32)).astype(np.int32), rng.random((1, 32, K)).astype(np.float32)
    real, order = np.ones((1, 32), bool), rng.permutation(32)
    with jax.set_mesh(mesh()):
        straight = layer(x, weights, ids, real, kernel, "none")
        turned = layer(x[:, order], weights[:, order], ids[:, order], real, kernel, "none")
    assert error(np.asarray(turned), np.asarray(straight)[:, order]) < 1e-6


def test_equal_logits_take_the_lower_id_and_weights_sum_to_one(rng):
    weights, ids = moe.route(jnp.zeros((1, 1, E)), K)
    assert np.array_equal(ids, [[[0, 1]]]) and np.allclose(weights, 0.5)
    weights, _ = moe.route(jnp.asarray(rng.standard_normal((2, 3, E)) * 30, jnp.float32), 3)
    assert np.allclose(np.sum(weights, -1), 1, atol=1e-6)


# --- the model against transformers ----------------------------------------------------------------------------------

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """(transformers model, its folder)."""
    folder = tmp_path_factory.mktemp("mixtral")
    model = hugging_face(
        num_local_experts=E, num_experts_per_tok=K, output_router_logits=True, router_aux_loss_coef=0.05
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
        graphdef, abstract = states.declare(cfg.model, cfg.precision, cfg.attention, cfg.moe)
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
        batch = to_device(packed, 1, device_mesh)
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


def test_a_folder_with_both_layouts_is_refused(oracle, tmp_path):
    import shutil

    from safetensors.torch import save_file

    model, folder = oracle
    shutil.copytree(folder, tmp_path / "both")
    files = list((tmp_path / "both").glob("*.safetensors"))
    assert len(files) == 1
    files[0].rename(tmp_path / "both" / "model-00001-of-00002.safetensors")
    fused = {name: value.contiguous() for name, value in model.state_dict().items() if ".mlp.experts." in name}
    save_file(fused, tmp_path / "both" / "model-00002-of-00002.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="holds experts twice, fused .* and one by one"):
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
    packed, overrides = rows(), [f"moe.aux_loss={form}"]
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


def test_metrics_of_the_experts_and_a_loss_that_balances_them():
    cfg = tiny(*MIXTRAL, "model.router_aux_loss_coef=1.0", "optimizer.learning_rate=1e-2", "steps=20")
    device_mesh = mesh(expert=2)
    with jax.set_mesh(device_mesh):
        graphdef, state = step.init_state(cfg)
        train_step, seen = step.make_train_step(graphdef, cfg), []
        for n in range(20):
            state, metrics = train_step(state, to_device(rows(seed=n % 3), 1, device_mesh))
            seen.append({name: float(value) for name, value in metrics.items()})
    assert seen[-1]["aux_loss"] < seen[0]["aux_loss"] and seen[-1]["aux_loss"] >= K * 0.99
    assert seen[-1]["imbalance"] < seen[0]["imbalance"]
    assert all(row["dropped_tokens"] == 0 and 0 < row["entropy"] <= np.log(E) + 1e-5 for row in seen)


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
    seen = {"counts": jnp.asarray(counts), "entropy": jnp.asarray([4.0, 8.0])}
    got = {name: float(value) for name, value in moe.report(seen, 4.0, 2).items()}
    assert got == {"imbalance": 2.0, "idle": 1.0, "entropy": 1.5, "dropped_tokens": 0.0}


def test_the_exchange_that_is_chosen_is_said():
    with jax.set_mesh(mesh(expert=4)):
        assert moe.describe(moe.MoEConfig(), 8, "float32") == (
            "experts: 8 over 4 places, exchange allgather (mesh.expert = 4), products by xla"
        )
        assert "exchange none (asked for)" in moe.describe(moe.MoEConfig(exchange="none"), 8, "float32")


def test_configs_that_cannot_be_are_refused():
    for overrides, said in (
        (("model.num_local_experts=8",), "the family 'llama' has no experts"),
        (("model.family=mixtral",), "a Mixtral needs all four"),
        ((*MIXTRAL, "model.num_experts_per_tok=9"), "num_experts_per_tok = 9 is more than num_local_experts = 8"),
        ((*MIXTRAL, "model.router_jitter_noise=0.1"), "router_jitter_noise"),
    ):
        with pytest.raises(UserError, match=said):
            tiny(*overrides)
    with pytest.raises(UserError, match=r"experts = 6.*4 shards"), jax.set_mesh(mesh(expert=4)):
        step.abstract_state(tiny(*MIXTRAL, "model.num_local_experts=6"))
