"""The training step keeps its promises over meshes, microbatches and rematerialisation."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import fp8, sharding, step
from jaxllm import state as states
from jaxllm.data.batch import to_device
from jaxllm.models.decoder import REMAT
from support import MIXTRAL, batch_on, error, mesh, mesh_name, native_stderr, numpy_tree, rows, tiny, worst

pytestmark = pytest.mark.version

NF4_IN_FP8 = ("lora.rank=4", "lora.base=nf4", "model.intermediate_size=128", "precision.matmul=float8")
MESHES = [
    dict(data=2), dict(data=4), dict(data=8), dict(replica=2), dict(replica=2, data=2), dict(replica=2, data=4), dict(replica=4, data=2),
    dict(replica=4), dict(replica=8), dict(sequence=2), dict(data=2, sequence=2, expert=2), dict(sequence=8), dict(replica=2, data=2, sequence=2),
]  # fmt: skip


def gradients(cfg, device_mesh, packed, num_microbatches=1):
    """(loss_sum, gradients) as numpy."""
    with jax.set_mesh(device_mesh):
        graphdef, state = step.init_state(cfg)
        batch = to_device(packed, num_microbatches, device_mesh)
        grads, parts = jax.jit(lambda p, b: step.gradients(graphdef, p, b, cfg))(state.params, batch)
        for path, grad in grads.items():
            assert grad.sharding.is_equivalent_to(state.params[path].sharding, grad.ndim), path
        return float(parts["loss_sum"]), numpy_tree(grads)


@pytest.fixture(scope="module")
def alone():
    return gradients(tiny(), mesh(), rows())


@pytest.mark.parametrize("sizes", MESHES, ids=mesh_name)
def test_loss_and_gradients_do_not_depend_on_the_mesh(sizes, alone):
    with native_stderr() as printed:
        loss, grads = gradients(tiny(), mesh(**sizes), rows())
    assert abs(loss / alone[0] - 1) < 1e-5
    assert worst(grads, alone[1])[0] < 1e-4
    assert not [line for line in printed if "Involuntary full rematerialization" in line]


@pytest.mark.parametrize("sizes", MESHES, ids=mesh_name)
def test_everything_rests_split_over_data_sequence_and_expert(sizes):
    device_mesh = mesh(**sizes)
    with jax.set_mesh(device_mesh):
        _, state = step.init_state(tiny("model.attention_bias=true", "model.mlp_bias=true"))
    parts = int(np.prod([device_mesh.shape[a] for a in sharding.WEIGHTS]))
    arrays = [x for x in jax.tree.leaves((state.params, state.opt_state)) if x.ndim]
    held = sum(x.addressable_shards[0].data.nbytes for x in arrays)
    assert held * parts == sum(x.nbytes for x in arrays)


@pytest.mark.parametrize("pieces", [2, 4, 8])
def test_loss_gradients_and_update_are_independent_of_num_microbatches(pieces, alone):
    packed = rows(empty=(6, 7))  # with 4 pieces the last one is fully masked
    cfg = tiny(
        "optimizer.kind=sgd", "optimizer.learning_rate=1.0", "optimizer.schedule=constant", "optimizer.weight_decay=0.0"
    )
    want_loss, want = gradients(cfg, mesh(), packed)
    loss, grads = gradients(cfg, mesh(), packed, pieces)
    assert abs(loss / want_loss - 1) < 1e-6
    assert worst(grads, want)[0] < 1e-5
    with jax.set_mesh(mesh()):
        graphdef, _ = step.abstract_state(cfg)
        run = step.make_train_step(graphdef, cfg)
        after = [run(step.init_state(cfg)[1], to_device(packed, n, mesh())) for n in (1, pieces)]
    assert worst(numpy_tree(after[1][0].params), numpy_tree(after[0][0].params))[0] < 1e-6
    for name in ("loss", "grad_norm", "tokens"):
        assert float(after[1][1][name]) == pytest.approx(float(after[0][1][name]), rel=1e-6)


@pytest.mark.parametrize("policy", [name for name in REMAT if name != "attention"])
def test_rematerialisation_does_not_change_the_maths(policy, alone):
    loss, grads = gradients(tiny(f"model.remat={policy}"), mesh(), rows())
    assert loss == pytest.approx(alone[0], rel=1e-6)
    assert worst(grads, alone[1])[0] < 1e-5


@pytest.mark.parametrize(
    "more",
    [(), ("lora.rank=4", "lora.base=float8", "model.intermediate_size=128"), ("precision.matmul=float8",), NF4_IN_FP8],
)
def test_without_rematerialisation_no_gathered_weight_is_kept(more):
    """JAX's own policy of that name keeps whatever the names say. The forward scan over two layers yields what the backward one reads."""
    cfg = tiny("model.remat=none", *more)
    with jax.set_mesh(mesh()):
        graphdef, state = step.init_state(cfg)
        run = lambda p: step.gradients(graphdef, p, batch_on(mesh()), cfg, 0, fp8.observed(state.fp8), state.frozen)
        jaxpr = jax.make_jaxpr(run)(state.params)
    (forward,) = [e for e in scans(jaxpr.jaxpr) if e.params["length"] == 2 and not e.params["reverse"]]
    kept = [v.aval.shape[1:] for v in forward.outvars if v.aval.shape[:1] == (2,)]  # the carry begins with 8 rows
    assert (8, 64, 64) in kept, "activations are"
    widths = (32, 64, 96, 128)
    assert not [shape for shape in kept if len(shape) > 1 and shape[0] in widths and shape[1] in (1, 2, *widths)], kept


def scans(jaxpr):
    """All scans in it, inner ones included."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from scans(getattr(inner, "jaxpr", inner))


def test_each_rematerialisation_policy_holds_less_than_the_one_before():
    size = {}
    with jax.set_mesh(mesh()):
        for policy in ("none", "dots", "attention", "full"):
            cfg = tiny(f"model.remat={policy}", "model.num_hidden_layers=8", "data.seq_len=256")
            graphdef, state = step.abstract_state(cfg)
            batch = batch_on(mesh(), length=256)
            compiled = (
                jax.jit(lambda p, b, g=graphdef, c=cfg: step.gradients(g, p, b, c)).lower(state.params, batch).compile()
            )
            size[policy] = compiled.memory_analysis().temp_size_in_bytes
    assert size["none"] > size["dots"] > size["attention"] > size["full"], size


def test_bfloat16_gradients_agree_over_the_mesh_in_either_reduction():
    for reduce in ("float32", "bfloat16"):
        cfg = tiny("precision.compute=bfloat16", f"precision.gradient_reduce={reduce}")
        (loss_one, one), (loss, grads) = gradients(cfg, mesh(), rows()), gradients(cfg, mesh(data=4, replica=2), rows())
        assert abs(loss / loss_one - 1) < 1e-3
        assert worst(grads, one)[0] < 2**-5
        assert all(g.dtype == np.float32 for g in grads.values())


def test_a_step_that_is_not_finite_keeps_the_old_state_and_says_so():
    cfg = tiny("optimizer.weight_decay=0.5")
    with jax.set_mesh(mesh()):
        graphdef, state = step.init_state(cfg)
        run = step.make_train_step(graphdef, cfg)
        poisoned = {**state.params, "norm/weight": state.params["norm/weight"].at[3].set(jnp.nan)}
        before = numpy_tree((poisoned, state.opt_state))
        after, metrics = run(states.TrainState(state.step, poisoned, {}, {}, state.opt_state), batch_on(mesh()))
    assert bool(metrics["bad"]) and int(after.step) == 1
    same = jax.tree.map(lambda a, b: np.array_equal(a, b, equal_nan=True), (after.params, after.opt_state), before)
    assert all(jax.tree.leaves(same))


def test_a_batch_without_a_trained_token_changes_nothing():
    cfg = tiny()
    with jax.set_mesh(mesh()):
        graphdef, state = step.init_state(cfg)
        before = numpy_tree(state.params)
        after, metrics = step.make_train_step(graphdef, cfg)(state, batch_on(mesh(), empty=range(8)))
    assert bool(metrics["bad"]) and float(metrics["loss"]) == 0.0 and float(metrics["tokens"]) == 0.0
    assert all(np.array_equal(after.params[k], before[k]) for k in before)


def test_masters_and_moments_are_float32_under_bfloat16_compute():
    with jax.set_mesh(mesh()):
        _, state = step.abstract_state(tiny("precision.compute=bfloat16"))
    assert {str(x.dtype) for x in jax.tree.leaves((state.params, state.opt_state)) if x.ndim} == {"float32"}


def test_biases_and_a_pad_id_do_not_depend_on_the_mesh():
    cfg = tiny("model.attention_bias=true", "model.mlp_bias=true", "model.pad_token_id=7", "loss.z_loss=1e-3")
    loss, grads = gradients(cfg, mesh(replica=2, data=2, sequence=2), rows())
    want_loss, want = gradients(cfg, mesh(), rows())
    assert loss == pytest.approx(want_loss, rel=1e-5)
    assert worst(grads, want)[0] < 1e-4 and "layers/self_attn/q_proj/bias" in grads


def test_a_tied_head_gets_the_sum_of_both_gradients():
    packed = rows()
    tied_loss, tied = gradients(tiny("model.tie_word_embeddings=true"), mesh(), packed)
    cfg = tiny()
    with jax.set_mesh(mesh()):
        graphdef, _ = step.abstract_state(cfg)
        params = {**step.init_state(tiny("model.tie_word_embeddings=true"))[1].params}
        params["lm_head/kernel"] = params["embed_tokens/embedding"]
        untied, parts = jax.jit(lambda p, b: step.gradients(graphdef, p, b, cfg))(params, to_device(packed, 1, mesh()))
    assert float(parts["loss_sum"]) == pytest.approx(tied_loss, rel=1e-6)
    both = np.asarray(untied["embed_tokens/embedding"]) + np.asarray(untied["lm_head/kernel"])
    assert error(tied["embed_tokens/embedding"], both) < 1e-5


def test_evaluation_sums_do_not_depend_on_how_rows_are_batched():
    cfg = tiny()
    packed = rows(num_rows=8)
    with jax.set_mesh(mesh()):
        graphdef, state = step.init_state(cfg)
        run = step.make_eval_step(graphdef, cfg)
        whole = run(state, to_device(packed, 1, mesh()))
        halves = [
            run(state, to_device({k: v[s] for k, v in packed.items()}, 1, mesh())) for s in (slice(0, 4), slice(4, 8))
        ]
    for name in ("loss_sum", "weight_sum"):
        assert sum(float(h[name]) for h in halves) == pytest.approx(float(whole[name]), rel=1e-6)


def test_logits_are_float32_and_causal():
    cfg = tiny("precision.compute=bfloat16")
    with jax.set_mesh(mesh()):
        graphdef, state = step.init_state(cfg)
        tokens = rows(num_rows=2, documents=False)["tokens"]
        changed = tokens.copy()
        changed[:, 40:] = 5
        one, two = step.logits(graphdef, state, tokens), step.logits(graphdef, state, changed)
    assert one.dtype == jnp.float32 and one.shape == (*tokens.shape, cfg.model.vocab_size)
    assert np.array_equal(one[:, :40], two[:, :40]) and not np.array_equal(one[:, 40:], two[:, 40:])


def test_logits_of_any_number_of_rows_and_places_on_any_mesh():
    tokens = rows(num_rows=3, documents=False)["tokens"][:, :37]
    values = []
    for sizes in (dict(), dict(data=2, sequence=2, expert=2)):
        with jax.set_mesh(mesh(**sizes)):
            values.append(np.asarray(step.logits(*step.init_state(tiny()), tokens)))
    assert values[1].shape == (3, 37, 256) and error(values[1], values[0]) < 1e-5


def test_a_dimension_that_the_mesh_does_not_divide_is_refused_by_name():
    with jax.set_mesh(mesh(data=8)), pytest.raises(ValueError, match="embed = 68.*8 shards"):
        step.abstract_state(tiny("model.hidden_size=68", "model.head_dim=16"))


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_every_product_of_float32_operands_in_a_step_asks_for_float32(compute):
    """XLA would round them to TF32 on a GPU; on a CPU nothing shows it. A Mixtral, whose router is float32 in both."""
    cfg, device_mesh = tiny(*MIXTRAL, f"precision.compute={compute}"), mesh()
    with jax.set_mesh(device_mesh):
        graphdef, abstract = step.abstract_state(cfg)
        lowered = step.make_train_step(graphdef, cfg).lower(abstract, batch_on(device_mesh)).as_text()
    products = [line for line in lowered.splitlines() if "stablehlo.dot_general" in line]
    of_float32 = [line for line in products if re.search(r"\(tensor<[^>]*xf32>", line)]
    assert len(of_float32) >= 3 and (len(of_float32) == len(products)) == (compute == "float32")
    assert all(("HIGHEST" in line) == (line in of_float32) for line in products)
    assert (len(of_float32) == len(products)) == (compute == "float32")
