"""Promises of checkpoints: bitwise, on any mesh, whole after a kill, and nothing removed that the run did not write."""

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm import checkpoint
from jaxllm.checkpoint import CheckpointConfig, Checkpoints
from jaxllm.section import UserError

CONFIG = 'steps = 20\n[optimizer]\nlearning_rate = 1e-3  # "é"\n'
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-3, 0.0, 100)))
CURSORS = np.array([[2**40 + r, r] for r in range(8)], np.int64)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    step: jax.Array
    params: dict
    frozen: dict
    fp8: dict
    opt_state: tuple


def mesh_of(devices):
    return jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def sharding(leaf, mesh):
    return NamedSharding(mesh, P("data") if leaf.ndim and leaf.shape[0] % mesh.size == 0 else P())


def make_state(seed=0, devices=8, step=3, width=16, drop=()):
    """A small state with every kind of leaf a run has: f32, bf16, int32, fp8, scalars, sharded and replicated."""
    keys = jax.random.split(jax.random.key(seed), 4)
    params = {
        "embed_tokens/embedding": jax.random.normal(keys[0], (32, width)),
        "layers/self_attn/q_proj/kernel": jax.random.normal(keys[1], (2, width, 2, 8)),
        "norm/weight": jax.random.normal(keys[2], (width,)),
    }
    params = {name: leaf for name, leaf in params.items() if name not in drop}
    frozen = {"lm_head/kernel": jax.random.normal(keys[3], (32, width)).astype(jnp.bfloat16)}
    fp8 = {"codes": frozen["lm_head/kernel"].astype(jnp.float8_e4m3fn), "scale": jnp.float32(0.3)}
    opt_state = jax.tree.map(lambda leaf: leaf + jnp.asarray(seed + 3, leaf.dtype), OPTIMIZER.init(params))
    state = State(jnp.int32(step), params, frozen, fp8, opt_state)
    mesh = mesh_of(devices)
    return jax.tree.map(lambda leaf: jax.device_put(leaf, sharding(leaf, mesh)), state)


def abstract(state, devices):
    mesh = mesh_of(devices)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(x, mesh)), state)


def assert_bitwise(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes(), jax.tree_util.keystr(path)


def saved(folder, *steps, **config):
    """A run's checkpoints folder with these steps committed, one after the other."""
    with Checkpoints(folder, CheckpointConfig(**config)) as checkpoints:
        for step in steps:
            checkpoints.save(step, make_state(step), CURSORS + step, CONFIG)
    return folder


def steps_in(folder):
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# --- what is saved comes back -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [8, 4, 2, 1])
def test_a_state_restores_bitwise_onto_any_mesh(tmp_path, devices):
    state = make_state(devices=8)
    with Checkpoints(tmp_path / "checkpoints", CheckpointConfig()) as checkpoints:
        checkpoints.save(3, state, CURSORS, CONFIG)
    with Checkpoints(tmp_path / "checkpoints", CheckpointConfig()) as checkpoints:
        assert checkpoints.latest() == 3
        target = abstract(state, devices)
        restored, cursors, config_text = checkpoints.restore(3, target)
    assert_bitwise(restored, state)
    assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, target)
    assert cursors.dtype == np.int64 and np.array_equal(cursors, CURSORS)
    assert config_text == CONFIG == (tmp_path / "checkpoints/3/config.toml").read_text(encoding="utf-8")


def test_the_state_saved_is_the_state_at_the_call_though_its_buffers_are_donated_to_the_next_step(tmp_path):
    advance = jax.jit(lambda s: jax.tree.map(lambda x: (x * 0 + 7).astype(x.dtype), s), donate_argnums=0)
    state = make_state()
    before = jax.tree.map(lambda x: np.array(x), state)
    cursors = CURSORS.copy()
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(3, state, cursors, CONFIG)
        cursors[:] = 0
        for _ in range(5):
            state = advance(state)
        jax.block_until_ready(state)
        checkpoints.wait()
        restored, stored, _ = checkpoints.restore(3, abstract(state, 8))
    assert_bitwise(restored, before)
    assert np.array_equal(stored, CURSORS)


def test_names_hold_no_class_and_no_tuple_index_unless_two_leaves_would_share_one():
    names = set(checkpoint.flatten(make_state()))
    assert {"step", "params/norm/weight", "opt_state/mu/layers/self_attn/q_proj/kernel", "fp8/scale"} <= names
    assert {name for name in names if name.endswith("/count")} == {"opt_state/1/0/count", "opt_state/1/2/count"}
    without_schedule = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam())
    assert "opt_state/count" in checkpoint.flatten({"opt_state": without_schedule.init({"w": jnp.zeros(2)})})


def test_unflatten_is_the_inverse_of_flatten():
    state = make_state()
    assert_bitwise(checkpoint.unflatten(dict(reversed(checkpoint.flatten(state).items())), state), state)


def test_parameters_alone_are_read_from_a_step_a_run_or_a_params_only_checkpoint(tmp_path):
    saved(tmp_path / "run" / "checkpoints", 1, 2)
    want = make_state(2).params
    checkpoint.save_params(tmp_path / "weights", want, CONFIG)
    for folder in ("weights", "run", "run/checkpoints", "run/checkpoints/2"):
        params, config_text = checkpoint.load_params(tmp_path / folder)
        assert all(type(leaf) is np.ndarray for leaf in params.values()) and config_text == CONFIG
        assert_bitwise(params, want)
    target = {n: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=x.sharding) for n, x in abstract(want, 4).items()}
    params, _ = checkpoint.load_params(tmp_path / "run", target)
    assert_bitwise(params, jax.tree.map(lambda x: x.astype(jnp.bfloat16), want))
    assert all(params[name].sharding == target[name].sharding for name in target)


def test_a_params_only_checkpoint_is_never_written_over_anything(tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "notes.txt").touch()
    with pytest.raises(UserError, match="weights: exists and is not an empty folder"):
        checkpoint.save_params(tmp_path / "weights", {"w": jnp.ones(2)}, CONFIG)
    assert files_in(tmp_path) == ["weights/notes.txt"]


def test_a_folder_without_checkpoint_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path}: no checkpoint here"):
        checkpoint.load_params(tmp_path)


# --- faults -----------------------------------------------------------------------------------------------------------

SAVER = """
import sys
sys.path[:0] = {paths!r}
import test_checkpoint as t
from jaxllm.checkpoint import CheckpointConfig, Checkpoints

states = {{step: t.make_state(step, step=step) for step in range(1, 24)}}
with Checkpoints(sys.argv[1], CheckpointConfig(keep_last=1)) as checkpoints:
    print("begin", checkpoints.latest() or 0, flush=True)
    for step in range((checkpoints.latest() or 0) + 1, 24):
        checkpoints.save(step, states[step], t.CURSORS + step, t.CONFIG)
        print("saving", step, flush=True)
"""


def test_a_kill_at_any_moment_of_a_save_leaves_a_whole_checkpoint_and_steps_never_fall(tmp_path):
    here = pathlib.Path(__file__).parent
    script = SAVER.format(paths=[str(here), str(here.parent)])
    newest, random = 0, np.random.default_rng(int.from_bytes(os.urandom(4), "little"))
    for attempt in range(3):
        environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
        command = [sys.executable, "-c", script, str(tmp_path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        for line in process.stdout:
            if line.startswith(f"saving {newest + 2 + attempt}"):
                break
        time.sleep(delay := random.uniform(0, 0.08))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
            step = checkpoints.latest()
            assert step is not None and step > newest, f"step {step} after {newest}, killed {delay:.3f} s into a save"
            restored, cursors, _ = checkpoints.restore(step, abstract(make_state(), 8))
        assert_bitwise(restored, make_state(step, step=step))
        assert np.array_equal(cursors, CURSORS + step)
        newest = step


def test_an_unfinished_save_is_named_passed_over_and_left_alone(tmp_path, capsys):
    saved(tmp_path, 2)
    shutil.copytree(tmp_path / "2", tmp_path / "4")
    (tmp_path / "4" / "meta.json").unlink()
    shutil.copytree(tmp_path / "2" / "state", tmp_path / "4.partial-0badcafe.orbax-checkpoint-tmp" / "state")
    (tmp_path / "notes.txt").touch()
    (tmp_path / "2" / "notes.txt").touch()
    before = files_in(tmp_path)
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        assert checkpoints.latest() == 2
        said = capsys.readouterr().out
        assert "4 is incomplete" in said and "4.partial-0badcafe.orbax-checkpoint-tmp is incomplete" in said
        checkpoints.save(3, make_state(3), CURSORS, CONFIG)
    assert set(before) <= set(files_in(tmp_path)) and steps_in(tmp_path) == [2, 3, 4]


@pytest.mark.parametrize("drop_empty_files", [False, True])
def test_a_copied_run_resumes(tmp_path, drop_empty_files):
    saved(tmp_path / "run", 2)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    if drop_empty_files:
        empty = [path for path in (tmp_path / "copy").rglob("*") if path.is_file() and path.stat().st_size == 0]
        assert empty, "orbax writes no empty marker any more: this case can go"
        for path in empty:
            path.unlink()
    with Checkpoints(tmp_path / "copy", CheckpointConfig()) as checkpoints:
        restored, _, _ = checkpoints.restore(checkpoints.latest(), abstract(make_state(), 8))
        assert_bitwise(restored, make_state(2))


@pytest.mark.parametrize("harm", ["missing", "cut"])
def test_a_checkpoint_that_lost_bytes_is_refused_by_file_and_the_older_one_is_used_only_if_asked(tmp_path, harm):
    saved(tmp_path, 2, 4)
    data = max(
        (path for path in (tmp_path / "4" / "state").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size
    )
    if harm == "missing":
        data.unlink()
    else:
        os.truncate(data, data.stat().st_size - 1)
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        with pytest.raises(
            UserError, match=rf"4: .*damaged: {data.relative_to(tmp_path / '4')} .*checkpoint.resume.*: 2"
        ):
            checkpoints.latest()
        assert_bitwise(checkpoints.restore(2, abstract(make_state(), 8))[0], make_state(2))


def replace_folder_by_file(folder):
    folder.rename(folder.with_name("gone"))
    folder.touch()


def remove_folder(folder):
    folder.rename(folder.with_name("gone"))


@pytest.mark.parametrize("harm", [replace_folder_by_file, remove_folder])
def test_a_save_that_cannot_be_written_surfaces_with_path_cause_and_last_good_step(tmp_path, harm):
    folder = tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder, CheckpointConfig())
    checkpoints.save(5, make_state(5), CURSORS, CONFIG)
    checkpoints.wait()
    harm(folder)
    with pytest.raises(checkpoint.SaveError, match=rf"step 10 .*{folder}.*Error: .*last good step is 5"):
        checkpoints.save(10, make_state(10), CURSORS, CONFIG)
        checkpoints.close()
    checkpoints.close()


def test_an_error_of_the_writing_thread_surfaces_at_the_next_save_and_saving_can_go_on(tmp_path, monkeypatch):
    def no_space(*_):
        raise OSError(28, "No space left on device")

    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(5, make_state(5), CURSORS, CONFIG)
    checkpoints.wait()
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "_commit", no_space)
        checkpoints.save(10, make_state(10), CURSORS, CONFIG)
        with pytest.raises(checkpoint.SaveError, match=r"step 10 .*No space left on device; the last good step is 5"):
            checkpoints.save(15, make_state(15), CURSORS, CONFIG)
    checkpoints.save(15, make_state(15), CURSORS, CONFIG)
    checkpoints.close()
    with Checkpoints(tmp_path, CheckpointConfig()) as again:
        assert again.latest() == 15


# --- what does not fit ------------------------------------------------------------------------------------------------


def test_a_newer_format_is_refused_with_both_numbers(tmp_path):
    saved(tmp_path, 2)
    meta = json.loads((tmp_path / "2" / "meta.json").read_text())
    assert {"jaxllm", "jax", "flax", "orbax", "python"} == set(meta["versions"]) and meta["step"] == 2
    assert meta["parameters"] == 32 * 16 + 2 * 16 * 2 * 8 + 16
    (tmp_path / "2" / "meta.json").write_text(json.dumps({**meta, "format": 99, "files": None}))
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        for read in (checkpoints.latest, lambda: checkpoints.restore(2, abstract(make_state(), 8))):
            with pytest.raises(UserError, match=rf"format 99 is newer than format {checkpoint.FORMAT}.*orbax"):
                read()


def test_leaves_that_differ_are_listed_with_recorded_and_running_versions(tmp_path):
    saved(tmp_path, 2)
    meta = json.loads((tmp_path / "2" / "meta.json").read_text())
    meta["versions"]["flax"] = "0.0.1"
    (tmp_path / "2" / "meta.json").write_text(json.dumps(meta))
    other = make_state(drop=["norm/weight"])
    other.params["extra/weight"] = jnp.ones(3)
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        with pytest.raises(UserError) as caught:
            checkpoints.restore(2, abstract(other, 1))
        message = str(caught.value)
        assert "missing: params/extra/weight" in message and "flax 0.0.1" in message and jax.__version__ in message
        assert {line.split()[-1] for line in message.splitlines() if "unexpected:" in line} == {
            "params/norm/weight",
            "opt_state/mu/norm/weight",
            "opt_state/nu/norm/weight",
        }


def test_another_shape_or_dtype_names_the_tensor_and_both(tmp_path):
    saved(tmp_path, 2)
    halved = make_state()
    halved.params["norm/weight"] = halved.params["norm/weight"].astype(jnp.bfloat16)
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        with pytest.raises(UserError, match=r"params/norm/weight is \(16,\) in the checkpoint, \(32,\) in this config"):
            checkpoints.restore(2, abstract(make_state(width=32), 1))
        with pytest.raises(UserError, match="params/norm/weight is float32 in the checkpoint, bfloat16"):
            checkpoints.restore(2, abstract(halved, 1))


def test_a_long_list_of_differences_is_cut_and_counted(tmp_path):
    checkpoint.save_params(tmp_path / "w", {f"a{n:02d}": jnp.ones(1) for n in range(25)}, CONFIG)
    with pytest.raises(UserError, match="26 leaves differ(.|\n)*and 6 more"):
        checkpoint.load_params(tmp_path / "w", {"b": jax.ShapeDtypeStruct((1,), jnp.float32)})


def test_a_step_that_is_not_there_names_those_that_are(tmp_path):
    saved(tmp_path, 2, 4)
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints, pytest.raises(UserError, match="3: .*steps: 2, 4"):
        checkpoints.restore(3, abstract(make_state(), 8))


# --- rotation and the output folder -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, kept",
    [
        ({"keep_last": 1}, [7]),
        ({"keep_last": 2}, [6, 7]),
        ({"keep_last": 1, "keep_every": 3}, [3, 6, 7]),
        ({"keep_last": 9}, [1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_rotation_keeps_the_newest_and_the_multiples(tmp_path, config, kept):
    assert steps_in(saved(tmp_path, *range(1, 8), **config)) == kept
    assert sorted(path.name for path in tmp_path.iterdir()) == [str(step) for step in kept]


def test_rotation_waits_for_the_newer_checkpoint(tmp_path, monkeypatch):
    saved(tmp_path, 1, keep_last=1)
    monkeypatch.setattr(checkpoint, "_commit", lambda *_: (_ for _ in ()).throw(OSError("the disk is gone")))
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_last=1))
    checkpoints.save(2, make_state(2), CURSORS, CONFIG)
    with pytest.raises(checkpoint.SaveError):
        checkpoints.close()
    assert steps_in(tmp_path) == [1]


def test_rotation_and_overwrite_remove_only_what_a_save_wrote(tmp_path):
    folder = saved(tmp_path / "checkpoints", 1, 2)
    (folder / "1" / "notes.txt").write_text("mine")
    (folder / "0").mkdir()
    (folder / "0" / "mine.txt").write_text("mine")
    (folder / "7.partial-1234.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "thesis.tex").write_text("mine")
    saved(folder, 3, 4, keep_last=1)
    assert steps_in(folder) == [0, 4]
    checkpoint.erase(tmp_path)
    assert files_in(tmp_path) == ["checkpoints/0/mine.txt", "checkpoints/1.removing/notes.txt", "thesis.tex"]


def test_a_removal_cut_short_is_finished_later_and_never_looks_complete(tmp_path):
    saved(tmp_path, 1, 2)
    (tmp_path / "1").rename(tmp_path / "1.removing")
    shutil.rmtree(tmp_path / "1.removing" / "state")
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        assert checkpoints.latest() == 2
        checkpoints.save(3, make_state(3), CURSORS, CONFIG)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]


def test_a_list_of_files_that_leads_outside_removes_nothing(tmp_path):
    folder = saved(tmp_path / "checkpoints", 1)
    (tmp_path / "precious").write_text("mine")
    meta = json.loads((folder / "1" / "meta.json").read_text())
    meta["files"]["../../precious"] = 4
    (folder / "1" / "meta.json").write_text(json.dumps(meta))
    saved(folder, 2, keep_last=1)
    checkpoint.erase(tmp_path)
    assert (tmp_path / "precious").read_text() == "mine" and steps_in(folder) == [1]


def test_resuming_at_an_earlier_step_sets_the_later_ones_aside(tmp_path):
    saved(tmp_path, 2, 4, 6, keep_last=9)
    with Checkpoints(tmp_path, CheckpointConfig(keep_last=9)) as checkpoints:
        checkpoints.restore(2, abstract(make_state(), 8))
        checkpoints.set_aside_after(2)
        assert checkpoints.latest() == 2
        checkpoints.save(4, make_state(44), CURSORS, CONFIG)
    assert steps_in(tmp_path) == [2, 4]
    assert_bitwise(checkpoint.load_params(tmp_path / "4.replaced-1")[0], make_state(4).params)
    assert_bitwise(checkpoint.load_params(tmp_path / "4")[0], make_state(44).params)


def test_a_step_already_on_disk_is_not_written_twice(tmp_path):
    saved(tmp_path, 2)
    before = (tmp_path / "2" / "meta.json").stat()
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        state, cursors, text = checkpoints.restore(2, abstract(make_state(), 8))
        checkpoints.save(2, state, cursors, text)
    assert (tmp_path / "2" / "meta.json").stat() == before and [path.name for path in tmp_path.iterdir()] == ["2"]


def test_an_output_folder_can_be_looked_into_without_changing_it(tmp_path):
    assert checkpoint.inspect(tmp_path / "new") == checkpoint.Found((), ())
    assert not (tmp_path / "new").exists()
    saved(tmp_path / "checkpoints", 2, 10)
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "thesis.tex").touch()
    assert checkpoint.inspect(tmp_path, ("metrics.jsonl",)) == checkpoint.Found((2, 10), ("thesis.tex",))
    with pytest.raises(UserError, match="thesis.tex is a file"):
        checkpoint.inspect(tmp_path / "thesis.tex")


def test_a_folder_that_is_a_file_or_unwritable_is_refused_before_training(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="output_dir: .*cannot be made"):
        Checkpoints(tmp_path / "file" / "checkpoints", CheckpointConfig())
    if os.getuid():  # root writes everywhere
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(UserError, match="output_dir: .*cannot be"):
            Checkpoints(tmp_path / "closed" / "checkpoints", CheckpointConfig())


def test_a_second_run_in_the_same_folder_is_stopped_until_the_first_ends_or_is_killed(tmp_path):
    script = "import sys, time; sys.path.insert(0, sys.argv[2]); from jaxllm import checkpoint\n"
    script += "with checkpoint.lock(sys.argv[1]): print('locked', flush=True); time.sleep(60)"
    root = str(pathlib.Path(__file__).parent.parent)
    command = [sys.executable, "-c", script, str(tmp_path), root]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "locked\n"
        with (
            pytest.raises(UserError, match=f"output_dir: .* is in use by process {process.pid}"),
            checkpoint.lock(tmp_path),
        ):
            pass
        process.kill()
    for _ in range(2):
        with checkpoint.lock(tmp_path):
            pass
    assert (tmp_path / ".lock").stat().st_size == 0


def test_checkpoint_settings_are_checked():
    for resume in ("auto", "never", 12):
        assert CheckpointConfig(resume=resume).resume == resume
    for wrong in ({"resume": "yes"}, {"resume": -1}, {"resume": True}, {"keep_last": 0}, {"every": -1}):
        with pytest.raises(ValueError):
            CheckpointConfig(**wrong)
