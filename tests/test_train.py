"""`python -m jaxllm.train` as a user runs it: trains, stops, goes on, exports, and refuses what cannot work."""

import contextlib
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import jax
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder of small texts that repeat themselves, so that a tiny model learns something in a few steps."""
    folder = tmp_path_factory.mktemp("corpus")
    for n in range(60):
        words = [f"item {i % (n % 7 + 2)} of list {n}." for i in range(10 + n)]
        (folder / f"{n:03}.txt").write_text(" ".join(words), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def config_file(corpus, tmp_path_factory):
    file = tmp_path_factory.mktemp("config") / "tiny.toml"
    file.write_text(
        f"""
output_dir = "unset"
steps = 10
[model]
vocab_size = 300
hidden_size = 64
intermediate_size = 96
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 64
[precision]
compute = "float32"
[optimizer]
learning_rate = 1e-2
warmup_steps = 2
[data]
path = "{corpus}"
tokenizer = "bpe:300"
seq_len = 64
global_batch_size = 8
[checkpoint]
every = 5
[logging]
every = 1
progress = "lines"
""",
        encoding="utf-8",
    )
    return file


def command(config_file, output, *overrides, module="jaxllm.train"):
    return [sys.executable, "-m", module, "--config", str(config_file), f"output_dir={output}", *overrides]


def environment(devices=1):
    return {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": os.environ["JAXLLM_TEST_CACHE"],
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
    }


def run(config_file, output, *overrides, devices=1, code=0, before=()):
    done = subprocess.run(
        [*before, *command(config_file, output, *overrides)],
        capture_output=True,
        text=True,
        env=environment(devices),
        timeout=300,
    )
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@contextlib.contextmanager
def started(config_file, output, *overrides, devices=1):
    """The process of a run, its messages in `stdout`; killed if it is still there at the end of the `with`."""
    process = subprocess.Popen(
        command(config_file, output, *overrides),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(devices),
    )
    with process:  # closes its pipe and waits for it
        try:
            yield process
        finally:
            process.kill()


def interrupted(process, beginning, action):
    """(exit code, all lines) of a run to which `action()` happened at the first line that begins so."""
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith(beginning):
            action()
            break
    seen += process.stdout.read().splitlines(keepends=True)
    return process.wait(timeout=120), seen


def metrics(output):
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {line["step"]: line for line in lines if "loss" in line}


def saved_parameters(output):
    from jaxllm import checkpoint

    return checkpoint.load_params(output)[0]


@pytest.fixture(scope="module")
def straight(config_file, tmp_path_factory):
    """The undisturbed run of 10 steps on 8 devices."""
    output = tmp_path_factory.mktemp("straight") / "run"
    run(config_file, output, "steps=10", devices=8)
    return output


def test_a_run_learns_and_leaves_what_the_readme_says(config_file, tmp_path):
    output = tmp_path / "run"
    text = run(
        config_file,
        output,
        "steps=40",
        "evaluation.every=20",
        "evaluation.holdout=0.1",
        "evaluation.prompt=item",
        "evaluation.prompt_tokens=20",
        'checkpoint.export="float32"',
    )
    rows = metrics(output)
    assert list(rows) == list(range(1, 41))
    assert {"loss", "learning_rate", "grad_norm", "tokens", "memory"} <= rows[40].keys() and "mfu" not in rows[40]
    assert rows[40]["tokens_per_second"] * rows[40]["step_time"] == pytest.approx(8 * 64, rel=1e-6)
    evaluations = [
        json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines() if "eval_loss" in line
    ]
    assert [e["step"] for e in evaluations] == [0, 20, 40]
    assert evaluations[0]["eval_loss"] == pytest.approx(np.log(300), rel=0.02)
    assert evaluations[-1]["eval_loss"] < 0.6 * evaluations[0]["eval_loss"]
    assert text.index("compiling the training step ...") < text.index("step 1/40")
    assert "sample before training" in text and "sample after training" in text and "left" in text
    names = {p.name for p in output.iterdir()}
    assert {"config.toml", "metrics.jsonl", "checkpoints", "export", "tokenizer"} <= names


def test_stop_and_resume_is_bitwise_on_the_same_mesh(config_file, straight, tmp_path):
    output = tmp_path / "run"
    run(config_file, output, "steps=10", "checkpoint.every=3", "optimizer.max_bad_steps=2", devices=8)
    for name, value in saved_parameters(straight).items():
        assert np.array_equal(saved_parameters(output)[name], value), f"two straight runs differ in {name}"
    stopped = tmp_path / "stopped"
    # the schedule belongs to 10 steps, so the run is stopped and not made shorter
    with started(config_file, stopped, "steps=10", devices=8) as process:
        code, seen = interrupted(process, "step 3/10", lambda: process.send_signal(signal.SIGINT))
    assert code == 4 and "the same command goes on" in seen[-1], "".join(seen)
    done = int(re.search(r"at step (\d+)", seen[-1])[1])
    assert 3 <= done < 10
    assert f"resuming from step {done}" in run(config_file, stopped, "steps=10", devices=8)
    want, got = saved_parameters(straight), saved_parameters(stopped)
    assert all(np.array_equal(got[name], want[name]) for name in want)
    assert {s: r["loss"] for s, r in metrics(stopped).items()} == {s: r["loss"] for s, r in metrics(straight).items()}


def test_resume_on_other_meshes_agrees(config_file, straight, tmp_path):
    output = tmp_path / "run"
    common = ("steps=10", "checkpoint.every=1", "checkpoint.keep_last=20", "optimizer.schedule=constant")
    whole = tmp_path / "whole"
    run(config_file, whole, *common, devices=8)
    plan = [(8, "mesh.data=8", 3), (4, "mesh.replica=2", 5), (2, "mesh.sequence=2", 7), (1, "mesh.data=1", 10)]
    for devices, override, steps in plan:
        run(config_file, output, *common, f"steps={steps}", override, devices=devices)
    for step, row in metrics(whole).items():
        assert metrics(output)[step]["loss"] == pytest.approx(row["loss"], rel=1e-5), step


def test_the_export_opens_in_transformers_with_the_same_logits(config_file, tmp_path):
    pytest.importorskip("torch")
    import torch
    import transformers

    from jaxllm import checkpoint, config, sharding, step
    from jaxllm import state as states

    output = tmp_path / "run"
    run(config_file, output, "steps=3", 'checkpoint.export="float32"')
    model = transformers.AutoModelForCausalLM.from_pretrained(output / "export" / "3")
    tokenizer = transformers.AutoTokenizer.from_pretrained(output / "export" / "3")
    ids = np.asarray(tokenizer(["item 3 of list 9. item 4"] * 1, add_special_tokens=True)["input_ids"], np.int32)
    cfg = config.load_config(output / "config.toml", resolve_path=False)
    with jax.set_mesh(sharding.make_mesh(sharding.MeshConfig(), jax.devices()[:1])):
        graphdef, abstract = step.abstract_state(cfg)
        params, _ = checkpoint.load_params(output, abstract.params)
        ours = step.logits(graphdef, states.TrainState(0, params, {}, {}, None), ids)
    with torch.no_grad():
        theirs = model(torch.tensor(ids.astype(np.int64))).logits.numpy()
    np.testing.assert_allclose(np.asarray(ours), theirs, atol=1e-5, rtol=1e-4)


def test_the_snippet_for_research_code_runs_as_written_in_the_readme(tmp_path, monkeypatch):
    import jaxllm

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    snippet = textwrap.dedent(re.search(r"    import jax, jaxllm\n.*?(?=\n\S)", readme, re.S)[0])
    assert "for batch in jaxllm.make_batches(cfg)" in snippet
    endless = jaxllm.make_batches
    monkeypatch.setattr(jaxllm, "make_batches", lambda cfg: itertools.islice(endless(cfg), 2), raising=False)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    monkeypatch.chdir(tmp_path)  # where it trains its tokenizer
    names = {}
    exec(snippet, names)
    state, metrics, batch = names["state"], names["metrics"], names["batch"]
    assert int(state.step) == 2 and 6 < float(metrics["loss"]) < 9
    with jax.set_mesh(jaxllm.make_mesh(names["cfg"].mesh)):
        values = jaxllm.logits(names["graphdef"], state, batch.tokens[0])
    assert values.dtype == np.float32 and values.shape == (*batch.tokens[0].shape, 4096)
    assert jaxllm.load_config(None, "steps=7").steps == 7


def test_training_goes_on_from_a_hugging_face_folder(config_file, tmp_path):
    output = tmp_path / "run"
    run(config_file, output, "steps=10", 'checkpoint.export="float32"', "optimizer.schedule=constant")
    config = (config_file).read_text(encoding="utf-8")
    tuned = tmp_path / "tuned.toml"
    model = re.search(r"\[model\].*?(?=\[precision\])", config, re.S)[0]
    tuned.write_text(
        config.replace(model, f'[model]\npath = "{output / "export" / "10"}"\n').replace('tokenizer = "bpe:300"\n', ""),
        encoding="utf-8",
    )
    run(tuned, tmp_path / "more", "steps=2", "optimizer.learning_rate=1e-4", "optimizer.schedule=constant")
    assert metrics(tmp_path / "more")[1]["loss"] < metrics(output)[9]["loss"] * 1.1
    tuned.write_text(
        tuned.read_text()
        .replace(str(output / "export" / "10"), str(output))
        .replace("seq_len", f'tokenizer = "{output / "tokenizer"}"\nseq_len'),
        encoding="utf-8",
    )
    run(tuned, tmp_path / "from_checkpoint", "steps=2", "optimizer.learning_rate=1e-4", "optimizer.schedule=constant")
    assert metrics(tmp_path / "from_checkpoint")[1]["loss"] == pytest.approx(
        metrics(tmp_path / "more")[1]["loss"], rel=1e-5
    )


BAD = {
    "misspelt key": (["optimizer.learnig_rate=1e-5"], r"learnig_rate.*learning_rate"),
    "wrong section": (["data.learning_rate=1e-5"], r"data\.learning_rate.*optimizer\.learning_rate"),
    "word for a number": (["steps=ten"], r"steps.*ten"),
    "fraction for a count": (["data.seq_len=128.5"], r"data\.seq_len.*128\.5"),
    "mesh too large": (["mesh.data=4", "mesh.replica=4"], r"mesh.*16.*"),
    "batch does not divide": (["data.global_batch_size=6", "optimizer.num_microbatches=4"], r"global_batch_size.*6.*4"),
    "no such data": (["data.path=/nowhere/*.txt"], r"data\.path.*nowhere"),
    "no such model": (["model.path=/nowhere"], r"model\.path.*nowhere"),
    "vocabulary too small": (["model.vocab_size=290"], r"vocab_size.*290"),
    "warm-up longer than the run": (["optimizer.warmup_steps=50"], r"warmup_steps.*50.*10"),
    "hidden size does not divide": (["model.hidden_size=60", "model.head_dim=16"], r"embed = 60.*8"),
    "GPU that is not there": (['mesh.platform="gpu"'], r"mesh\.platform.*gpu.*cpu.*jaxlib.*pip install"),
    "row longer than the model is meant for": (
        ["data.seq_len=128"],
        r"data\.seq_len.*128.*max_position_embeddings.*64",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_ends_before_compilation_with_one_message(name, config_file, tmp_path):
    overrides, pattern = BAD[name]
    text = run(config_file, tmp_path / "run", *overrides, devices=8, code=2)
    message = [line for line in text.splitlines() if line.startswith("error:")]
    assert len(message) == 1 and re.search(pattern, text[text.index("error:") :], re.S), text
    assert "Traceback" not in text and "compiling" not in text
    assert not (tmp_path / "run").exists()


def test_an_empty_corpus_and_one_smaller_than_a_batch_are_refused(config_file, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").write_text("")
    text = run(config_file, tmp_path / "run", f"data.path={tmp_path / 'empty'}", code=2)
    assert "data.path" in text and "Traceback" not in text
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "a.jsonl").write_text('{"prompt": "one", "completion": "short text"}')
    few = [f"data.path={tmp_path / 'small'}", "data.kind=prompt", "data.repeat=false"]
    text = run(config_file, tmp_path / "other", *few, code=2)
    assert "Traceback" not in text and "global_batch_size" in text


def test_nan_in_the_weights_is_refused_with_the_tensor_s_name(config_file, corpus, tmp_path):
    from safetensors.numpy import load_file, save_file

    output = tmp_path / "run"
    text = run(config_file, output, "steps=2", 'checkpoint.export="float32"', f"evaluation.path={corpus}")
    assert "evaluation.every = 0: nothing is evaluated on evaluation.path; set evaluation.every" in text
    folder = output / "export" / "2"
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] = np.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = config_file.read_text(encoding="utf-8")
    model = re.search(r"\[model\].*?(?=\[precision\])", config, re.S)[0]
    tuned = tmp_path / "tuned.toml"
    tuned.write_text(config.replace(model, f'[model]\npath = "{folder}"\n'), encoding="utf-8")
    text = run(tuned, tmp_path / "tuned", code=2)
    assert "model.layers.1.mlp.down_proj.weight" in text and re.search("nan", text, re.I) and "Traceback" not in text


def test_a_diverging_run_stops_with_step_and_place_and_keeps_its_checkpoint(config_file, tmp_path):
    output = tmp_path / "run"
    run(config_file, output, "steps=4", "checkpoint.every=2", "optimizer.schedule=constant", "optimizer.warmup_steps=0")
    before = {k: v.copy() for k, v in saved_parameters(output).items()}
    overrides = (
        "steps=40",
        "checkpoint.every=2",
        "checkpoint.keep_last=1",
        "optimizer.schedule=constant",
        "optimizer.warmup_steps=0",
    )
    text = run(config_file, output, *overrides, "optimizer.learning_rate=1e30", "optimizer.max_bad_steps=3", code=3)
    last = text.strip().splitlines()[-1]
    assert re.search(r"diverged: step \d+: .*non-finite.*max_bad_steps", last), last
    assert "Last checkpoint" in last and "lane 0" in last
    rows = [
        json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()
    ]  # NaN never makes invalid JSON
    assert any(row.get("bad_steps") for row in rows)
    assert (
        all(np.isfinite(v).all() for v in saved_parameters(output).values())
        and before.keys() == saved_parameters(output).keys()
    )


def test_another_run_s_folder_is_left_alone(config_file, straight, tmp_path):
    def contents():
        return {
            p: (p.stat().st_mtime_ns, p.stat().st_size)
            for p in sorted(straight.rglob("*"))
            if p.is_file() and p.name != ".lock"
        }

    before = contents()
    text = run(config_file, straight, "steps=12", "seed=9", code=2, devices=8)
    assert "seed" in text and "10" in text and re.search("resume|overwrite", text) and "Traceback" not in text
    text = run(config_file, straight, "steps=12", "checkpoint.resume=never", code=2, devices=8)
    assert "10" in text and "resume" in text
    text = run(config_file, straight, "steps=3", code=2, devices=8)
    assert re.search(r"\b10\b", text) and re.search(r"\b3\b", text)
    text = run(config_file, straight, "steps=12", "model.hidden_size=128", code=2, devices=8)
    assert "hidden_size" in text
    assert "nothing to do" in run(config_file, straight, "steps=10", devices=8)
    assert contents() == before
    (tmp_path / "file").write_text("not a folder")
    assert "file" in run(config_file, tmp_path / "file", code=2)


def test_a_new_learning_rate_is_used_and_shown_at_resume(config_file, tmp_path):
    output = tmp_path / "run"
    common = ("optimizer.schedule=constant", "optimizer.warmup_steps=0")
    run(config_file, output, "steps=3", *common)
    text = run(config_file, output, "steps=5", "optimizer.learning_rate=1e-4", *common)
    assert "optimizer.learning_rate" in text
    rows = metrics(output)
    assert rows[3]["learning_rate"] == pytest.approx(1e-2) and rows[4]["learning_rate"] == pytest.approx(1e-4)


def test_a_full_disk_names_the_last_good_checkpoint(config_file, tmp_path):
    output = tmp_path / "run"
    run(config_file, output, "steps=4", "checkpoint.every=4", "optimizer.schedule=constant")
    limited = (
        "bash",
        "-c",
        'trap "" XFSZ; ulimit -f 48; exec "$@"',
        "limited",
    )  # KiB per file: metrics fit, weights do not
    text = run(
        config_file, output, "steps=8", "checkpoint.every=4", "optimizer.schedule=constant", code=1, before=limited
    )
    assert re.search(r"checkpoint of step 8 was not saved.*last good step is 4", text.strip().splitlines()[-1], re.S), (
        text
    )
    assert "resuming from step 4" in run(config_file, output, "steps=5", "optimizer.schedule=constant")


def test_print_config_names_where_each_value_came_from(config_file, tmp_path):
    text = run(config_file, tmp_path / "run", "steps=7", "--print-config")
    assert re.search(r"steps = 7 .*command line", text)
    assert re.search(r"hidden_size = 64 .*tiny\.toml:\d+", text)
    assert re.search(r"weight_decay = 0\.1 .*default", text)
    assert not (tmp_path / "run").exists()


def test_two_runs_cannot_share_a_folder(config_file, tmp_path):
    output = tmp_path / "run"
    with started(config_file, output, "steps=100000") as process:
        assert any(line.startswith("step 1/") for line in process.stdout)
        assert "in use" in run(config_file, output, "steps=5", code=2)
    time.sleep(0.1)
    run(
        config_file,
        output,
        "steps=2",
        "checkpoint.overwrite=true",
        "data.tokenizer=bpe:290",
        "optimizer.warmup_steps=1",
    )
    assert list(metrics(output)) == [1, 2]


def tree(folder):
    return {
        p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and p.name != ".lock"
    }


def test_overwrite_gives_nothing_up_before_the_new_run_can_train(config_file, tmp_path):
    output = tmp_path / "run"
    run(config_file, output, "steps=3")
    before = tree(output)
    assert "nowhere" in run(config_file, output, "steps=3", "checkpoint.overwrite=true", "data.path=/nowhere", code=2)
    assert tree(output) == before
    inside = output / "checkpoints" / "3"
    text = run(config_file, output, "steps=3", "checkpoint.overwrite=true", f"model.path={inside}", code=2)
    assert "model.path" in text and tree(output) == before
    text = run(config_file, output, "steps=2", "seed=5", "checkpoint.overwrite=true")
    assert "replaced-1" in text and sorted(p.name for p in (output / "checkpoints").iterdir()) == ["2"]
    assert (output / "replaced-1" / "metrics.jsonl").read_bytes() == before[pathlib.Path("metrics.jsonl")]


def test_files_that_are_not_this_run_s_are_not_written_over(config_file, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "config.toml").write_text("# my own notes\n" + config_file.read_text(encoding="utf-8"), encoding="utf-8")
    (mine / "metrics.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
    before = tree(mine)
    text = run(mine / "config.toml", mine, code=2)
    assert "output_dir" in text and "config.toml" in text and tree(mine) == before


def test_a_finished_run_still_exports_and_a_missing_step_is_not_called_finished(config_file, tmp_path):
    output = tmp_path / "run"
    run(config_file, output, "steps=3")
    text = run(config_file, output, "steps=3", 'checkpoint.export="bfloat16"')
    assert "nothing to do" in text and (output / "export" / "3" / "model.safetensors").exists()
    assert (output / "export" / "3" / "tokenizer.json").exists()
    text = run(config_file, output, "steps=50", "checkpoint.resume=50", code=2)
    assert "no checkpoint of step 50" in text and "3" in text


def test_sigterm_while_compiling_saves_and_the_run_goes_on(config_file, tmp_path):
    output = tmp_path / "run"
    with started(config_file, output, "steps=10") as process:
        begun = "compiling the training step ..."
        code, seen = interrupted(process, begun, lambda: process.send_signal(signal.SIGTERM))
    assert code == 4 and "stopped by SIGTERM at step 0; the checkpoint is complete" in "".join(seen), "".join(seen)
    assert "resuming from step 0" in run(config_file, output, "steps=10")
    assert list(metrics(output)) == list(range(1, 11))


def test_validation_loss_does_not_depend_on_its_batches(config_file, tmp_path):
    losses = set()
    for size in (1, 3, 8):
        output = tmp_path / str(size)
        run(
            config_file,
            output,
            "steps=2",
            "evaluation.every=2",
            "evaluation.holdout=0.3",
            f"evaluation.batch_size={size}",
        )
        rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        losses |= {
            (round(row["eval_loss"], 5), row["eval_tokens"])
            for row in rows
            if row.get("eval_loss") and row["step"] == 2
        }
    assert len(losses) == 1, losses


def test_a_resume_on_other_documents_is_refused(config_file, corpus, tmp_path):
    copy = tmp_path / "corpus"
    shutil.copytree(corpus, copy)
    run(config_file, tmp_path / "run", "steps=2", f"data.path={copy}", "data.tokenizer=bpe:300")
    tokenizer = tmp_path / "run" / "tokenizer"
    (copy / "005.txt").write_text("another text altogether")
    text = run(config_file, tmp_path / "run", "steps=4", f"data.path={copy}", f"data.tokenizer={tokenizer}", code=2)
    assert "documents" in text and "step 2" in text
    shutil.copy(corpus / "005.txt", copy / "005.txt")
    run(config_file, tmp_path / "run", "steps=4", f"data.path={copy}", f"data.tokenizer={tokenizer}")


@pytest.mark.parametrize("kind", ["chat", "prompt"])
def test_conversations_and_prompts_train_on_answers_alone(kind, config_file, corpus, tmp_path):
    from jaxllm.data.render import Tokenizer

    run(config_file, tmp_path / "text", "steps=2")  # trains the tokenizer
    folder = tmp_path / "tokenizer"
    shutil.copytree(tmp_path / "text" / "tokenizer", folder)
    turn = "{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}\n"
    (folder / "chat_template.jinja").write_text(
        f"{{{{ bos_token }}}}{{% for m in messages %}}{turn}{{% endfor %}}", encoding="utf-8"
    )
    pairs = [(f"what is item {n}?", f"item {n} of list {n % 7}.") for n in range(60)]
    records = [
        {"prompt": q, "completion": a}
        if kind == "prompt"
        else {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in pairs
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    common = (
        f"data.kind={kind}",
        f"data.path={data}",
        f"data.tokenizer={folder}",
        "data.seq_len=64",
        "data.shuffle=false",
    )
    run(config_file, tmp_path / "run", "steps=20", *common, "data.packing=none", "optimizer.num_microbatches=2")
    rows = metrics(tmp_path / "run")
    assert rows[20]["loss"] < 0.5 * rows[1]["loss"]
    tokenizer = Tokenizer.load(folder)
    answers = [
        len(tokenizer.encode_batch([(" " if kind == "chat" else "") + a])[0]) + 1 for _, a in pairs[:8]
    ]  # and the end token
    assert rows[1]["tokens"] == sum(answers)
    shown = subprocess.run(
        [*command(config_file, tmp_path / "run", *common, module="jaxllm.data"), "--rows", "2"],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert shown.returncode == 0, shown.stderr
    row = json.loads(shown.stdout.splitlines()[0])
    assert "what is item 0?" in row["text"] and len(row["input_ids"]) == len(row["loss_mask"]) == 64
    trained = [t for t, w in zip(row["targets"], row["loss_mask"], strict=True) if w]
    assert pairs[0][1] in tokenizer.decode(trained) and "what" not in tokenizer.decode(trained)
    assert "60" in shown.stderr


def test_a_document_that_goes_bad_in_mid_run_costs_no_step(config_file, corpus, tmp_path):
    copy, output = tmp_path / "corpus", tmp_path / "run"
    shutil.copytree(corpus, copy)
    common = (f"data.path={copy}", "optimizer.schedule=constant", "checkpoint.every=0")
    with started(config_file, output, "steps=100000", *common) as process:
        code, seen = interrupted(process, "step 3/", lambda: shutil.rmtree(copy))
    assert code == 2 and "has changed since the run began" in seen[-1], "".join(seen[-40:])
    (step,) = (int(p.name) for p in (output / "checkpoints").iterdir())
    assert step >= 3 and step == max(metrics(output))
    shutil.copytree(corpus, copy)
    assert f"resuming from step {step}" in run(config_file, output, f"steps={step + 1}", *common)


def test_an_error_saves_the_run_only_where_no_other_process_would_have_to_join(monkeypatch):
    from types import SimpleNamespace

    import jax

    from jaxllm import config, train

    def broken():
        raise train.UserError("a.jsonl:3 has changed")
        yield

    cfg = config.load_config(None, "evaluation.every=1", "evaluation.holdout=0.1")
    for processes, saved in ((1, [0]), (2, [])):
        monkeypatch.setattr(jax, "process_count", lambda count=processes: count)
        steps = []
        checkpoints = SimpleNamespace(wait=lambda: None)
        idle = SimpleNamespace(signal=None)
        run_at_work = train.Run(cfg, None, None, broken(), {}, checkpoints, "", idle, None)
        monkeypatch.setattr(run_at_work, "save", lambda step, log, steps=steps: steps.append(step), raising=False)
        with pytest.raises(train.UserError, match=r"a\.jsonl:3"):
            run_at_work.loop(0, None)
        assert steps == saved
