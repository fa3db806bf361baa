"""Killed and resumed, as it happens: processes that get SIGKILL at any moment, and go on as other processes with other workers.

The lives of the first test read data and train nothing, so that it can have many; each keeps its position as the training loop does. The second
test kills the training loop itself. What can be shown inside one process (every step, every packing) is in test_pipeline.py.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxllm.config import load_config
from jaxllm.data.batch import Training
from jaxllm.data.pipeline import Pipeline
from jaxllm.data.render import train_tokenizer
from jaxllm.data.sources import Documents
from support import ROOT, TINY, finish, together

STEPS, ROWS, MICROBATCHES = 60, 8, 2
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}\n{% endfor %}"

KINDS = ("text", "chat")  # concatenated, and whole by first fit

LIFE = """
import os, pathlib, sys, time
import jax, numpy as np
port, process, processes, life, steps, folder, *overrides = sys.argv[1:]
process, processes = int(process), int(processes)
if processes > 1:
    jax.distributed.initialize(f"localhost:{port}", processes, process)
from jaxllm.config import load_config
from jaxllm.data import make_batches
from jaxllm.data.pipeline import empty_rows
from jaxllm.sharding import make_mesh

def publish(name, **arrays):
    with open(f"{folder}/.{name}", "wb") as file:
        np.savez(file, **arrays)
    os.rename(f"{folder}/.{name}", f"{folder}/{name}.npz")

reached = sorted(pathlib.Path(folder).glob("position-*.npz"), key=lambda path: int(path.stem.split("-")[1]))
begin, position = (int(reached[-1].stem.split("-")[1]), dict(np.load(reached[-1]))) if reached else (0, {})
each = {}
for kind, own in zip(("text", "chat"), (overrides[0::2], overrides[1::2])):
    cfg = load_config(None, *own)
    each[kind] = batches = make_batches(cfg, make_mesh(cfg.mesh), position.get(kind))
    assert position.get(f"{kind} fingerprint", batches.fingerprint) == batches.fingerprint
for step in range(begin + 1, int(steps) + 1):
    position = {}
    for kind, batches in each.items():
        batch = next(batches)
        shards = {name: getattr(batch, name).addressable_shards[0] for name in empty_rows(1, 2)}
        rows = {name: np.asarray(shard.data) for name, shard in shards.items()}
        publish(f"{kind}-{step}-{life}-{process}", first=shards["tokens"].index[1].start or 0, **rows)
        position |= {kind: batches.cursors, f"{kind} fingerprint": batches.fingerprint}
    if process == 0 and step % 3 == 0:
        publish(f"position-{step}", **position)
    time.sleep(0.01)  # where a run would train
while "-wait" in life:  # for its end
    time.sleep(1)
for batches in each.values():
    batches.close()
if processes > 1:
    jax.distributed.shutdown()
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer") / "t"
    train_tokenizer(Documents("{stdlib}/json/*.py"), 300, folder, {})
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """text.jsonl: 70 short texts and two of several rows; chat.jsonl: 60 conversations that fit into a row."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [{"text": f"row {n:03d} " + "word é " * (n % 9)} for n in range(70)] + [{"text": "long " * 200}] * 2
    turns = lambda n: [
        {"role": ("user", "assistant")[i % 2], "content": f"{n * (i + 1)}"} for i in range(2 + 2 * (n % 2))
    ]
    chats = [{"messages": turns(n)} for n in range(60)]
    for name, records in (("text", texts), ("chat", chats)):
        lines = [json.dumps(record) + "\n" for record in records]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def settings(corpus, tokenizer, kind, *more):
    data = [f"data.kind={kind}", f"data.path={corpus / kind}.jsonl", f"data.tokenizer={tokenizer}"]
    return [*TINY, "model.vocab_size=300", *data, f"optimizer.num_microbatches={MICROBATCHES}", "seed=4", *more]


def steps_of(folder, names):
    return {int(path.stem.split("-")[1]) for path in folder.glob(f"{names}.npz")}


def straight_run(cfg):
    """[(rows, cursors)] of all steps, without processes or workers."""
    pipeline = Pipeline(Training(cfg).source, None, cfg.data, seed=cfg.seed)
    made = [next(pipeline) for _ in range(STEPS)]
    pipeline.close()
    return made


def test_sixty_steps_killed_five_times_at_random_and_resumed_by_others_are_byte_identical(corpus, tokenizer, tmp_path):
    want = {kind: straight_run(load_config(None, *settings(corpus, tokenizer, kind))) for kind in KINDS}
    rng = np.random.default_rng(0)
    lives = [(1, 0), (4, 2), (2, 0), (1, 2), (4, 0), (2, 2)]
    rng.shuffle(lives)
    begins = []
    for life, (count, workers) in enumerate(lives):
        begins.append(max(steps_of(tmp_path, "position-*"), default=0))
        both = [settings(corpus, tokenizer, kind, f"data.workers={workers}") for kind in KINDS]
        overrides = itertools.chain(*zip(*both, strict=True))
        spared = life == len(lives) - 1
        name, limit = (life, STEPS) if spared else (f"{life}-wait", 10 * life + 9)
        with together(LIFE, count, count, name, limit, tmp_path, *overrides) as processes:
            if spared:
                finish(processes)
                break
            end, deadline = 10 * life + int(rng.integers(1, 6)), time.monotonic() + 300
            while max(steps_of(tmp_path, f"*-{name}-*"), default=0) < end:
                failed = [process for process in processes if process.poll() is not None]
                assert not failed and time.monotonic() < deadline, [process.stderr.read()[-2000:] for process in failed]
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.04))
            for number in rng.permutation(count):
                processes[number].kill()
            assert -signal.SIGKILL in [process.wait() for process in processes]
    assert begins == sorted(begins) and begins[0] == 0 and begins[-1] > 30

    for kind in KINDS:
        seen = np.zeros((STEPS, ROWS), np.int32)
        for path in tmp_path.glob(f"{kind}-*.npz"):
            got = dict(np.load(path))
            step, first = int(path.stem.split("-")[1]), int(got.pop("first"))
            rows, _ = want[kind][step - 1]
            assert got.keys() == rows.keys()
            for name, values in got.items():
                mine = np.arange(ROWS).reshape(MICROBATCHES, -1)[:, first : first + values.shape[1]]
                same = values.dtype == rows[name].dtype and values.tobytes() == rows[name][mine].tobytes()
                assert same, f"{name} in {path.name}"
            seen[step - 1, mine] += 1
        assert seen.min() == 1 < seen.max(), "nothing is missing, and what came after the last position was made again"
        for step in range(3, STEPS + 1, 3):
            saved = np.load(tmp_path / f"position-{step}.npz")[kind]
            assert saved.dtype == np.int64 and np.array_equal(saved, want[kind][step - 1][1]), step


def test_a_run_killed_between_checkpoints_goes_on_with_other_workers_as_if_nothing_had_happened(
    corpus, tokenizer, tmp_path
):
    (tmp_path / "empty.toml").write_text("")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_COMPILATION_CACHE_DIR": os.environ["JAXLLM_TEST_CACHE"]}
    env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"

    def start(output, workers):
        overrides = [
            *settings(corpus, tokenizer, "text"), f"steps={STEPS}", f"data.workers={workers}", f"output_dir={tmp_path / output}",
            "checkpoint.every=7",
            "logging.every=1", 'logging.progress="lines"',
        ]  # fmt: skip
        command = [sys.executable, "-m", "jaxllm.train", "--config", str(tmp_path / "empty.toml"), *overrides]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)

    def finished(process):
        text = process.communicate(timeout=200)[0]
        assert process.returncode == 0, text
        return text

    def losses(output):
        lines = (tmp_path / output / "metrics.jsonl").read_text().splitlines()
        return {row["step"]: (row["loss"], row["tokens"]) for row in map(json.loads, lines) if "loss" in row}

    finished(start("straight", 0))
    killed = start("killed", 2)
    try:
        assert any(line.startswith(f"step 24/{STEPS}") for line in killed.stdout)
    finally:
        killed.kill()
    assert killed.wait() == -signal.SIGKILL
    killed.stdout.close()
    reached = max(losses("killed"))
    text = finished(start("killed", 0))
    begin = int(text.split("resuming from step ")[1].split()[0])
    assert 0 < begin <= reached < STEPS and begin % 7 == 0, (
        "a checkpoint before the kill, and steps that are made again"
    )
    assert losses("killed") == losses("straight") and len(losses("straight")) == STEPS
