"""FP8 in a whole model: what multiplies in it and what does not, its state over meshes, microbatches, rematerialisation, evaluation and left-out steps, and
runs that resume, go over to FP8, or away from it."""

import dataclasses
import functools
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import checkpoint, config, fp8, linear, step, train
from jaxllm.section import UserError
from support import MIXTRAL, batch_on, mesh, tiny

FP8 = ("precision.matmul=float8", "precision.fp8.history_length=4", "steps=10", "optimizer.warmup_steps=0")
RECORD = (*FP8[1:], "precision.matmul=record")


def trained(cfg, sizes=None, steps=2, after=None):
    """(TrainState in numpy, metrics of each step) after some steps, each on rows of its own; after: a state to start from."""
    with jax.set_mesh(mesh(**(sizes or {}))):
        graphdef, state = step.init_state(cfg)
        if after is not None:
            state = jax.tree.map(lambda value, like: jax.device_put(value, like.sharding), after, state)
        one = step.make_train_step(graphdef, cfg)
        seen = []
        for number in range(steps):
            batch = batch_on(jax.sharding.get_mesh(), cfg.optimizer.num_microbatches, seed=number)
            state, metrics = one(state, batch)
            seen.append(jax.device_get(metrics))
        return jax.device_get(state), seen


# --- what multiplies in FP8 -------------------------------------------------------------------------------------------


def equations(jaxpr, name=""):
    """(name stack, equation) of all equations, inner ones included."""
    for eqn in jaxpr.eqns:
        stack = f"{name}/{eqn.source_info.name_stack}"
        yield stack, eqn
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner, stack)


def is_fp8(*values):
    return ["float8" in str(value.aval.dtype) for value in values]


def test_products_of_attention_and_mlp_are_in_fp8_and_nothing_else_is():
    cfg = tiny(*FP8, "model.remat=full")
    with jax.set_mesh(mesh()):
        graphdef, state = step.init_state(cfg)
        traced = step.make_train_step(graphdef, cfg).trace(state, batch_on(jax.sharding.get_mesh()))
    pairs = []
    for stack, eqn in equations(traced.jaxpr.jaxpr):
        inputs = is_fp8(*(x for x in eqn.invars if hasattr(x.aval, "dtype")))
        if eqn.primitive.name == "dot_general":
            assert all(inputs) or not any(inputs)
            if all(inputs):
                assert "self_attn" in stack or "mlp" in stack
                pairs.append(tuple(str(x.aval.dtype) for x in eqn.invars))
            else:
                assert "loss" in stack or "attention" in stack, stack
    e4m3, e5m2 = "float8_e4m3fn", "float8_e5m2"
    # Seven weights: forward; again for the backward pass, but for the last, whose result it does not read; and the two gradients of each.
    counts = {pair: pairs.count(pair) for pair in set(pairs)}
    assert counts == {(e4m3, e4m3): 13, (e5m2, e4m3): 7, (e4m3, e5m2): 7}


def test_layers_at_the_ends_may_stay_out_of_it():
    layers = "model.num_hidden_layers=4"
    ends = ("precision.fp8.first_layers_bfloat16=1", "precision.fp8.last_layers_bfloat16=2")
    state, (first, second) = trained(tiny(layers, *FP8, *ends))
    for path, scaling in state.fp8.items():
        assert np.all(scaling.scale[[0, 2, 3]] == 1) and not np.any(scaling.amax_history[[0, 2, 3]]), path
        assert scaling.scale[1] != 1 and scaling.amax_history[1, -1] > 0, path
    assert not np.any(second["fp8_saturated"][[0, 2, 3]]) and first["fp8_underflowed"][1] > 0


# --- the state --------------------------------------------------------------------------------------------------------


MESHES = {
    "sequence8": ((), dict(sequence=8)),
    "replica2-data2-sequence2": ((), dict(replica=2, data=2, sequence=2)),
    "experts-data2-expert4": (MIXTRAL, dict(data=2, expert=4)),
    "experts-sequence2-expert2": ((*MIXTRAL, "moe.exchange=alltoall"), dict(sequence=2, expert=2)),
}
on = lambda *names: pytest.mark.parametrize(("model", "sizes"), [MESHES[name] for name in names], ids=names)


@functools.cache
def on_one_device(*way):
    return trained(tiny(*way))


@on("sequence8", "replica2-data2-sequence2", "experts-sequence2-expert2")
def test_what_is_recorded_does_not_depend_on_the_mesh(model, sizes):
    state, seen = trained(tiny(*RECORD, *model), sizes)
    alone, before = on_one_device(*RECORD, *model)
    assert_states_agree(state.fp8, alone.fp8, 1e-6, 1e-6)
    assert abs(seen[1]["loss"] / before[1]["loss"] - 1) < 1e-6


@on("replica2-data2-sequence2", "experts-data2-expert4")
def test_scales_and_loss_in_fp8_hardly_depend_on_the_mesh(model, sizes):
    """Rounding to FP8 is no continuous function: a number that differs in its last bit may become the next one."""
    state, seen = trained(tiny(*FP8, *model), sizes)
    alone, before = on_one_device(*FP8, *model)
    assert_states_agree(state.fp8, alone.fp8, 0.02, 0.02)
    assert abs(seen[1]["loss"] / before[1]["loss"] - 1) < 1e-3


def assert_states_agree(ours, theirs, scale, amax):
    assert ours.keys() == theirs.keys() and len(ours) == 21  # seven weights, three operands
    for path in ours:
        a, b = ours[path], theirs[path]
        assert np.max(np.abs(a.scale / b.scale - 1)) <= scale, path
        assert np.array_equal(a.amax_history == 0, b.amax_history == 0)
        assert np.max(np.abs(a.amax_history - b.amax_history) / np.maximum(b.amax_history, 1e-30)) <= amax, path


@pytest.mark.parametrize(
    ("num_microbatches", "way"), [(2, RECORD), (4, RECORD), (4, FP8)], ids=["record2", "record4", "fp8"]
)
def test_microbatches_are_joined_by_the_maximum(num_microbatches, way):
    state, seen = trained(tiny(*way, f"optimizer.num_microbatches={num_microbatches}"))
    alone, before = on_one_device(*way)
    recorded = way == RECORD
    assert_states_agree(state.fp8, alone.fp8, *(1e-6, 1e-6) if recorded else (0.02, 0.02))
    assert abs(seen[1]["loss"] / before[1]["loss"] - 1) < (1e-6 if recorded else 1e-3)
    if recorded:
        # A mean over microbatches of one size. (What underflows are also gradients that are 0 but for rounding, of which no two sums have the same.)
        assert np.max(np.abs(seen[1]["fp8_saturated"] - before[1]["fp8_saturated"])) < 1e-6


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_rematerialisation_records_nothing_twice(remat):
    """What goes forward is the same to the bit; the order in which gradients are summed may differ."""
    start, _ = on_one_device(*FP8)  # whose scales are no longer 1
    state, seen = trained(tiny(*FP8, f"model.remat={remat}"), steps=1, after=start)
    alone, before = trained(tiny(*FP8), steps=1, after=start)
    for path in state.fp8:
        if path.endswith("output_grad"):
            np.testing.assert_allclose(state.fp8[path].scale, alone.fp8[path].scale, rtol=1e-6)
        else:
            assert np.array_equal(state.fp8[path].scale, alone.fp8[path].scale), path
            assert np.array_equal(state.fp8[path].amax_history, alone.fp8[path].amax_history), path
    assert seen[0]["loss"] == before[0]["loss"]


def test_the_first_state_is_that_of_the_definition():
    """One step from scales of 1, by hand: amax of a weight, its place in the history, and the quotient."""
    cfg = tiny(*FP8, "precision.fp8.margin=1")
    with jax.set_mesh(mesh()):
        _, start = step.init_state(cfg)
        kernel = np.asarray(start.params["layers/mlp/up_proj/kernel"])
    state, _ = trained(cfg, steps=1)
    amax = np.abs(kernel).max(axis=(1, 2))
    scaling = state.fp8["layers/mlp/up_proj/scales/kernel"]
    assert np.array_equal(scaling.amax_history, np.stack([0 * amax, 0 * amax, 0 * amax, amax], axis=1))
    assert np.array_equal(scaling.scale, np.float32(224) / amax)


def test_recording_alone_changes_nothing_of_the_training():
    plain, seen = trained(tiny(*FP8[2:]))
    state, recorded = on_one_device(*RECORD)
    assert seen[1]["loss"] == recorded[1]["loss"] and seen[1]["grad_norm"] == recorded[1]["grad_norm"]
    for path, value in plain.params.items():
        assert np.array_equal(value, state.params[path]), path


def test_evaluation_and_steps_that_are_left_out_leave_the_state_alone():
    cfg = tiny(*FP8)
    with jax.set_mesh(mesh()) as _:
        device_mesh = jax.sharding.get_mesh()
        graphdef, state = step.init_state(cfg)
        one, evaluate = step.make_train_step(graphdef, cfg), step.make_eval_step(graphdef, cfg)
        state, _ = one(state, batch_on(device_mesh))
        before = jax.device_get(state.fp8)
        evaluate(state, batch_on(device_mesh, seed=1))
        broken = {k: v.at[(0,) * v.ndim].set(np.inf) if k == "norm/weight" else v for k, v in state.params.items()}
        state, metrics = one(dataclasses.replace(state, params=broken), batch_on(device_mesh, seed=2))
        after = jax.device_get(state.fp8)
    assert metrics["bad"] and jax.tree.all(jax.tree.map(np.array_equal, before, after))


# --- runs -------------------------------------------------------------------------------------------------------------


RUN = """
seed = 3
[model]
hidden_size = 64
intermediate_size = 96
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
vocab_size = 512
max_position_embeddings = 256
[precision]
compute = "float32"
[data]
path = ["{stdlib}/json"]
kind = "text"
tokenizer = "bpe:512"
seq_len = 64
global_batch_size = 8
workers = 0
[optimizer]
schedule = "constant"
warmup_steps = 0
[logging]
every = 1
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """run(*overrides) -> (exit code, what was printed): one training in the folder tmp_path / "run"."""
    (tmp_path / "run.toml").write_text(RUN)
    monkeypatch.chdir(tmp_path)

    def run(*overrides):
        capfd.readouterr()
        code = train.main(["--config", "run.toml", 'output_dir="run"', *overrides])
        return code, "".join(capfd.readouterr())

    return run


def metrics_of(tmp_path):
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def state_at(tmp_path, number, cfg):
    with jax.set_mesh(mesh()), checkpoint.Checkpoints(tmp_path / "run" / "checkpoints", cfg.checkpoint) as saved:
        return jax.device_get(saved.restore(number, step.abstract_state(cfg)[1])[0])


def test_a_run_goes_on_with_its_state_to_the_bit(run, tmp_path):
    settings = (
        "precision.matmul=float8",
        "precision.fp8.history_length=3",
        "checkpoint.every=2",
        "checkpoint.keep_last=9",
    )
    assert run(*settings, "steps=4")[0] == 0
    whole = metrics_of(tmp_path)
    (tmp_path / "run").rename(tmp_path / "whole")
    assert run(*settings, "steps=2")[0] == 0
    code, said = run(*settings, "steps=4")
    assert code == 0 and "resuming from step 2" in said
    parts = metrics_of(tmp_path)
    kept = ("step", "loss", "grad_norm", "fp8_saturated", "fp8_underflowed", "fp8_frozen")
    assert [{k: row[k] for k in kept} for row in parts] == [{k: row[k] for k in kept} for row in whole]


def test_a_checkpoint_that_has_lost_its_state_is_refused(run, tmp_path):
    assert run("steps=2")[0] == 0  # without FP8
    saved = tmp_path / "run" / "checkpoints" / "2" / "config.toml"
    saved.write_text(saved.read_text().replace('matmul = "compute"', 'matmul = "float8"'))
    code, said = run("steps=4", "precision.matmul=float8")
    assert code == 2 and "missing: fp8/layers/mlp/down_proj/scales/input/amax_history" in said


def test_a_run_goes_over_to_fp8_by_recording_first_and_back(run, tmp_path):
    assert run("steps=2")[0] == 0
    code, said = run("steps=3", "precision.matmul=float8")
    assert code == 0 and "scales start at 1" in said and "precision.fp8.warmup_steps=12 would record" in said
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "3")
    code, said = run("steps=4", "precision.matmul=float8", "precision.fp8.warmup_steps=3")
    assert code == 0 and "precision.matmul: 'compute' -> 'float8'" in said
    assert "scales start at 1" not in said
    rows = metrics_of(tmp_path)
    assert "fp8_saturated" not in rows[1] and "fp8_saturated" in rows[-2]
    recorded = config.load_config("run.toml", "steps=4", "precision.matmul=float8")
    history = state_at(tmp_path, 4, recorded).fp8["layers/mlp/up_proj/scales/kernel"].amax_history
    assert np.all(history[:, -2:] > 0) and not np.any(history[:, :-2])  # of steps 3 and 4 alone
    code, said = run("steps=6", "precision.matmul=compute")
    assert code == 0 and "'float8' -> 'compute'" in said
    plain = config.load_config("run.toml", "steps=6")
    assert state_at(tmp_path, 6, plain).fp8 == {}


def test_steps_of_a_warm_up_are_those_without_fp8(run, tmp_path):
    held_out = ("steps=4", "evaluation.every=4", "evaluation.holdout=0.2")
    code, said = run(*held_out, "precision.matmul=float8", "precision.fp8.warmup_steps=2")
    assert code == 0 and "up to step 2 float32 while magnitudes are recorded" in said
    rows = [row for row in metrics_of(tmp_path) if "loss" in row]
    (tmp_path / "run").rename(tmp_path / "warm")
    assert run(*held_out)[0] == 0
    without = [row for row in metrics_of(tmp_path) if "loss" in row]
    assert [a["loss"] == b["loss"] for a, b in zip(rows, without, strict=True)] == [True, True, False, False]


def test_experts_over_a_mesh_go_on_after_their_first_step(run):
    """A compiled step takes the state that it gives: its scales rest as they came."""
    code, said = run("steps=3", "precision.matmul=float8", "precision.fp8.warmup_steps=1", "mesh.expert=2", *MIXTRAL)
    assert code == 0, said


def test_padding_counts_nothing():
    """Its embedding is wilder than any token's; magnitudes are recorded without it."""
    cfg = tiny(*RECORD)
    with jax.set_mesh(mesh()):
        device_mesh = jax.sharding.get_mesh()
        graphdef, state = step.init_state(cfg)
        batch = batch_on(device_mesh)
        real = np.asarray(batch.k_end > batch.k_start)
        assert not real.all() and not np.any(np.asarray(batch.tokens)[real] == 0)
        seen = lambda params: step.gradients(graphdef, params, batch, cfg, 0, fp8.observed(state.fp8))[1]["fp8"]
        wild = state.params["embed_tokens/embedding"].at[0].set(50 * jnp.eye(64)[0])  # 8 behind a norm
        both = jax.jit(seen)(state.params), jax.jit(seen)(state.params | {"embed_tokens/embedding": wild})
    for path, value in both[0].items():
        assert np.array_equal(value[..., 0], both[1][path][..., 0]), path


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["precision.fp8.margin=1"], 'precision.fp8.margin: 1 is for precision.matmul = "float8"'),
        (["precision.matmul=float8", "model.intermediate_size=100"], "model.intermediate_size: 100 is no multiple of 16"),
        (["precision.matmul=float8", "model.head_dim=12"], "model.num_key_value_heads x model.head_dim: 24"),
        (["precision.matmul=float8", "precision.fp8.warmup_steps=5", "steps=5"], "leave no step in FP8"),
        (["precision.matmul=float8", "precision.fp8.last_layers_bfloat16=2"], "leave none of the 2 layers"),
        (["precision.matmul=record", "precision.fp8.warmup_steps=5"], 'with "record" every step records'),
        (["precision.matmul=fp8"], "precision.matmul: must be 'compute', 'float8' or 'record'"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(overrides, message):
    with pytest.raises(UserError, match=re.escape(message)):
        tiny(*overrides)


def test_a_step_of_research_code_does_not_leave_a_warm_up_out():
    cfg = tiny("precision.matmul=float8", "precision.fp8.warmup_steps=10")
    with jax.set_mesh(mesh()), pytest.raises(UserError, match="jaxllm.step.recording"):
        step.make_train_step(step.abstract_state(cfg)[0], cfg)


@pytest.mark.parametrize(
    ("device_kind", "said"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB has none"),
        ("Tesla V100-SXM2-16GB", "is not known to have them"),
        ("NVIDIA H100 80GB HBM3", None),
        ("cpu", None),
    ],
)
def test_gpus_without_tensor_cores_for_it_are_refused(device_kind, said):
    precision = tiny("precision.matmul=float8").precision
    if said:
        with pytest.raises(UserError, match=said):
            linear.describe(precision, device_kind)
    else:
        line = linear.describe(precision, device_kind)
        assert "FP8 (delayed scaling, max of 1024 steps" in line and ("emulated" in line) == (device_kind == "cpu")
