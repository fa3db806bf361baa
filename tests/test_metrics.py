"""Promises of the log: valid JSON whatever happens, honest times, and a tracker that never stops a run."""

import json
import os
import pty
import re
import subprocess
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import pytest

from jaxllm import metrics
from jaxllm.metrics import LoggingConfig, Metrics
from jaxllm.section import UserError

QUIET = LoggingConfig(every=1, progress="none")


def rows_of(folder):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def step_metrics(step, **more):
    values = {"loss": jnp.float32(4 - step / 8), "learning_rate": jnp.float32(0.5), "grad_norm": jnp.float32(1.25)}
    return values | {"tokens": jnp.int32(100 + step), "bad": jnp.bool(False)} | more


def train(log, first, last, seconds=0.0, positions=8 * 128):
    for step in range(first, last + 1):
        time.sleep(seconds)
        log.record(step, step_metrics(step), positions)


# --- rows -------------------------------------------------------------------------------------------------------------

STEP = '{"step": %d, "loss": %s, "learning_rate": 0.5, "grad_norm": 1.25, "tokens": %d, "tokens_per_second": 512.0, '
STEP += '"step_time": 2.0, "mfu": 0.25, "memory": 4096, "z_loss": 0.125, "bad_steps": %d}\n'
EVALUATION = '{"step": 2, "eval_loss": 0.0, "eval_tokens": 77, "eval_perplexity": 1.0}\n'
GOLDEN = STEP % (2, "3.75", 102, 1) + EVALUATION + STEP % (4, "3.5", 104, 0)


def test_the_file_is_exactly_this(tmp_path, monkeypatch):
    clock = types.SimpleNamespace(now=100.0)
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(metrics, "_peak_memory", lambda: 4096)
    config = LoggingConfig(every=2, progress="none")
    with Metrics(tmp_path, config, total_steps=5, flops_per_step=4e9, peak_flops=8e9) as log:
        returned = []
        for step in range(1, 5):
            clock.now += 30 if step == 1 else 2
            z_loss = jnp.float32(0.125)
            returned += log.record(step, step_metrics(step, z_loss=z_loss, bad=jnp.bool(step == 1)), 1024)
            if step == 2:
                with log.pause():
                    clock.now += 60
                    log.record_evaluation(2, 0.0, 77)
    assert (tmp_path / "metrics.jsonl").read_text() == GOLDEN
    assert [step for step, _ in returned] == [1, 2, 3, 4] and [m["bad"] for _, m in returned] == [
        True,
        False,
        False,
        False,
    ]
    assert type(returned[0][1]["loss"]) is float and type(returned[0][1]["tokens"]) is int


def test_numbers_that_are_not_finite_leave_valid_json(tmp_path):
    with Metrics(tmp_path, QUIET, total_steps=2) as log:
        log.record(1, step_metrics(1, loss=jnp.float32(jnp.nan), grad_norm=jnp.float32(jnp.inf)), 64)
        log.record_evaluation(1, 1e9, 5)
    training, evaluation = rows_of(tmp_path)
    assert training["loss"] is None and training["non_finite"] == {"loss": "nan", "grad_norm": "inf"}
    assert evaluation["eval_perplexity"] is None and evaluation["eval_loss"] == 1e9


def test_experts_are_shown_and_what_they_drop_is_warned_of(tmp_path, capsys):
    """A vector is a list in the row, finite or not, and a number for each place in a tracker."""
    got = []
    tracker = types.SimpleNamespace(log=lambda step, values: got.append(values), close=lambda: None)
    with Metrics(tmp_path, LoggingConfig(every=1, progress="lines"), total_steps=2) as log:
        log._trackers["here"] = tracker
        for step, dropped in ((1, 0.0), (2, 12.0)):
            more = {"dropped_tokens": jnp.float32(dropped), "dropped_share": jnp.float32(dropped / 96)}
            load = jnp.array([0.75, 0.25 if step == 1 else jnp.nan])
            log.record(step, step_metrics(step, imbalance=jnp.float32(1.5), expert_load=load, **more), 8)
    first, second = rows_of(tmp_path)
    assert (
        first["expert_load"] == [0.75, 0.25]
        and second["expert_load"] is None
        and "nan" in second["non_finite"]["expert_load"]
    )
    assert (got[0]["expert_load/0"], got[0]["expert_load/1"]) == (0.75, 0.25) and got[1]["dropped_share"] == 0.125
    lines = capsys.readouterr().out.splitlines()
    assert all("experts' imbalance 1.50" in line for line in lines) and "WARNING" not in lines[0]
    assert "WARNING: experts dropped 12.50%, raise moe.buffer_factor" in lines[1]


def test_what_is_dropped_between_two_rows_is_counted_and_warned_of(tmp_path, capsys):
    with Metrics(tmp_path, LoggingConfig(every=2, progress="lines"), total_steps=4) as log:
        for step, dropped in ((1, 12.0), (2, 0.0), (3, 0.0), (4, 0.0)):
            share, more = jnp.float32(dropped / 96), {"aux_loss": jnp.float32(2.5), "entropy": jnp.float32(1.25)}
            log.record(step, step_metrics(step, dropped_tokens=jnp.float32(dropped), dropped_share=share, **more), 8)
    first, second = rows_of(tmp_path)
    assert (first["dropped_tokens"], first["dropped_share"]) == (12.0, 0.0625) and second["dropped_tokens"] == 0
    lines = capsys.readouterr().out.splitlines()
    assert "WARNING: experts dropped 6.25%" in lines[0] and "WARNING" not in lines[1]
    assert all("aux loss 2.500  router entropy 1.25" in line for line in lines)


def test_unknown_hardware_has_no_mfu_and_memory_is_this_process(tmp_path):
    with Metrics(tmp_path, QUIET, total_steps=2, flops_per_step=1e9) as log:
        train(log, 1, 2)
    row = rows_of(tmp_path)[-1]
    assert "mfu" not in row and 1e7 < row["memory"] < 1e12


def test_a_device_that_reports_memory_is_asked_for_its_peak(monkeypatch):
    devices = [types.SimpleNamespace(memory_stats=lambda n=n: {"peak_bytes_in_use": n}) for n in (5, 9, 7)]
    monkeypatch.setattr(metrics.jax, "local_devices", lambda: devices)
    assert metrics._peak_memory() == 9


def test_rows_are_due_every_so_many_steps_and_at_the_end_and_nothing_is_fetched_between(tmp_path, monkeypatch):
    fetches, get = [], jax.device_get
    monkeypatch.setattr(metrics.jax, "device_get", lambda tree: (fetches.append(len(tree)), get(tree))[1])
    with Metrics(tmp_path, LoggingConfig(every=3, progress="none"), total_steps=7) as log:
        train(log, 1, 7)
    assert [row["step"] for row in rows_of(tmp_path)] == [3, 6, 7] and fetches == [3, 3, 1]


def test_a_run_that_is_stopped_between_rows_still_writes_its_last_step(tmp_path):
    with Metrics(tmp_path, LoggingConfig(every=10, progress="none"), total_steps=100) as log:
        train(log, 1, 4)
    assert [row["step"] for row in rows_of(tmp_path)] == [4]


def test_only_the_writing_process_writes_but_every_one_is_told(tmp_path, capsys):
    with Metrics(tmp_path, LoggingConfig(every=1), total_steps=2, write=False) as log:
        assert log.record(1, step_metrics(1), 64)[0][1]["tokens"] == 101
        log.record_evaluation(1, 2.0, 5)
    assert not list(tmp_path.iterdir()) and capsys.readouterr().out == ""


# --- times ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 5])
def test_tokens_per_second_times_step_time_is_rows_times_seq_len(tmp_path, every):
    with Metrics(tmp_path, LoggingConfig(every=every, progress="none"), total_steps=10) as log:
        train(log, 1, 10, positions=64 * 128)
    timed = [row for row in rows_of(tmp_path) if "step_time" in row]
    assert [row["step"] for row in timed] == [step for step in range(2, 11) if step % every == 0]
    for row in timed:
        assert row["tokens_per_second"] * row["step_time"] == pytest.approx(64 * 128, rel=1e-12)


def test_the_first_step_and_pauses_are_outside_step_time(tmp_path):
    with Metrics(tmp_path, LoggingConfig(every=4, progress="none"), total_steps=8) as log:
        time.sleep(0.5)  # the compile
        train(log, 1, 2, seconds=0.02)
        with log.pause():
            time.sleep(0.3)
            with log.pause():
                time.sleep(0.2)
        train(log, 3, 8, seconds=0.02)
    for row in rows_of(tmp_path):
        assert 0.02 <= row["step_time"] < 0.09


def test_step_time_waits_for_the_device(tmp_path):
    """Work that is only dispatched is not done: a step's metrics that take long count in full, also before a pause."""

    def slow(x):
        return jax.lax.fori_loop(0, 60, lambda _, y: jnp.tanh(y @ y), x)

    step, x = jax.jit(lambda x: slow(x).sum()), jnp.eye(400)
    jax.block_until_ready(step(x))
    begin = time.perf_counter()
    jax.block_until_ready(step(x))
    alone = time.perf_counter() - begin
    with Metrics(tmp_path, LoggingConfig(every=3, progress="none"), total_steps=3) as log:
        log.record(1, {"loss": jnp.float32(1)}, 64)
        under_way = step(x)
        log.record(2, {"loss": under_way}, 64)
        with log.pause():
            assert under_way.is_ready()
        log.record(3, {"loss": step(x)}, 64)
    assert rows_of(tmp_path)[0]["step_time"] > alone / 3


# --- resume and faults ------------------------------------------------------------------------------------------------


def test_on_resume_the_lines_of_the_dead_run_after_the_checkpoint_are_cut(tmp_path):
    with Metrics(tmp_path, QUIET, total_steps=9) as log:
        train(log, 1, 6)
        log.record_evaluation(6, 1.0, 5)
    path = tmp_path / "metrics.jsonl"
    first_four = path.read_text().splitlines(keepends=True)[:4]
    with path.open("a") as file:
        file.write('{"step": 4, "note": "of a person"}\n{"step": 7, "lo')  # cut short by a kill
    with Metrics(tmp_path, QUIET, total_steps=9, start_step=4) as log:
        train(log, 5, 6)
    lines = path.read_text().splitlines(keepends=True)
    assert lines[:5] == [*first_four, '{"step": 4, "note": "of a person"}\n']
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2, 3, 4, 4, 5, 6]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_a_run_that_starts_anew_starts_an_empty_log(tmp_path):
    for _ in range(2):
        with Metrics(tmp_path, QUIET, total_steps=2) as log:
            train(log, 1, 2)
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2]


def test_a_full_disk_costs_a_row_and_not_the_run_nor_the_file(tmp_path, capsys):
    with Metrics(tmp_path, QUIET, total_steps=4) as log:
        train(log, 1, 1)
        file = log._file

        class Full:
            def write(self, line):
                return file.write(line[: len(line) // 2])

            def __getattr__(self, name):
                return getattr(file, name)

        log._file = Full()
        train(log, 2, 2)
        log._file = file
        train(log, 3, 3)
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 3]
    assert "row of step 2 was not written" in capsys.readouterr().out


def test_a_tracker_that_is_not_installed_is_refused_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(UserError, match="logging.to: .*pip install tensorboardX"):
        Metrics(tmp_path, LoggingConfig(to=["tensorboard"]), total_steps=1)
    assert not list(tmp_path.iterdir())


def test_a_tracker_that_fails_is_reported_once_and_training_goes_on(tmp_path, monkeypatch, capsys):
    seen = []

    class Tracker:
        def __init__(self, folder, start_step):
            pass

        def log(self, step, values):
            seen.append(step)
            if step == 2:
                raise ConnectionError("no route to host")

        def close(self):
            raise AssertionError("switched off")

    monkeypatch.setitem(metrics.TRACKERS, "tensorboard", Tracker)
    with Metrics(tmp_path, LoggingConfig(every=1, to=["tensorboard"], progress="none"), total_steps=4) as log:
        train(log, 1, 4)
    assert seen == [1, 2] and [row["step"] for row in rows_of(tmp_path)] == [1, 2, 3, 4]
    assert capsys.readouterr().out.count("tensorboard failed and is switched off: ConnectionError: no route") == 1


def test_tensorboard_gets_every_number_of_every_row(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto import event_pb2

    with Metrics(tmp_path, LoggingConfig(every=1, to=["tensorboard"], progress="none"), total_steps=2) as log:
        train(log, 1, 2)
        log.record_evaluation(2, 0.5, 12, "code")
    (file,) = (tmp_path / "tensorboard").iterdir()
    data, events = file.read_bytes(), []
    while data:  # a record: length (8 bytes), its checksum (4), the event, its checksum (4)
        length = int.from_bytes(data[:8], "little")
        events.append(event_pb2.Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    seen = {(event.step, value.tag): value.simple_value for event in events for value in event.summary.value}
    assert seen[2, "loss"] == 3.75 and (2, "step_time") in seen and (1, "memory") in seen
    assert seen[2, "eval_loss/code"] == 0.5 and (2, "eval_set") not in seen


# --- what a person sees -----------------------------------------------------------------------------------------------


def test_a_pipe_gets_one_line_per_row(tmp_path, capsys):
    with Metrics(tmp_path, LoggingConfig(every=2), total_steps=4) as log:
        train(log, 1, 4)
        log.record_evaluation(4, 0.5, 1234)
        log.record_evaluation(4, 0.5, 12, "code")
    lines = capsys.readouterr().out.splitlines()
    row = r"step {}/4  loss {}  learning rate 0.5  grad norm 1.25  [\d,]+ tokens/s  \S+ s/step  0:00 left"
    assert re.fullmatch(row.format(2, "3.7500"), lines[0]) and re.fullmatch(row.format(4, "3.5000"), lines[1])
    assert lines[2:] == [
        "step 4/4  validation loss 0.5000, perplexity 1.65, 1,234 tokens",
        "step 4/4  validation loss of code 0.5000, perplexity 1.65, 12 tokens",
    ]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("eval_set") for row in rows] == [None, None, None, "code"]


SCRIPT = """
import sys, time, pathlib
sys.path.insert(0, sys.argv[2])
import jax.numpy as jnp
from jaxllm import metrics
metrics.PULSE = 0.2
with metrics.phase("compiling the training step"):
    time.sleep(0.5)
with metrics.Metrics(sys.argv[1], metrics.LoggingConfig(every=1), total_steps=3) as log:
    for step in range(1, 4):
        log.record(step, {"loss": jnp.float32(step)}, 64)
    log.record_evaluation(3, 1.0, 5)
    time.sleep(float(sys.argv[3]))
"""
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def test_a_line_reaches_a_pipe_at_once(tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), ROOT, "60"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        patience = threading.Timer(30, process.kill)  # it sleeps for longer, and a kill flushes nothing
        patience.start()
        lines = [process.stdout.readline() for _ in range(8)]
        patience.cancel()
        process.kill()
    assert lines[0] == "compiling the training step ...\n"
    assert all(re.fullmatch(r"compiling the training step: \d+ s so far\n", line) for line in lines[1:3])
    assert re.fullmatch(r"compiling the training step: took 0\.[5-9] s\n", lines[3])
    assert lines[4].startswith("step 1/3  loss 1.0000") and lines[7].startswith("step 3/3  validation loss 1.0000")


def test_a_terminal_gets_a_bar_with_loss_speed_and_time_left(tmp_path):
    terminal, end = pty.openpty()
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), ROOT, "0"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen(command, stdout=end, stdin=end, stderr=end, env=environment) as process:
        os.close(end)
        screen = b""
        while chunk := _read(terminal):
            screen += chunk
    assert process.returncode == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.decode())
    assert re.search(r"step 3/3 .*loss 3\.0000  [\d,]+ tokens/s 0:00:00 0:00 left", text), text
    assert "step 3/3  validation loss 1.0000" in text


def _read(terminal):
    try:
        return os.read(terminal, 4096)
    except OSError:  # the other end closed
        return b""


def test_a_phase_that_fails_says_when(capsys):
    with pytest.raises(KeyError), metrics.phase("loading"):
        raise KeyError
    assert re.fullmatch(r"loading \.\.\.\nloading: stopped after 0\.\d s\n", capsys.readouterr().out)
    assert metrics.PULSE < 30
