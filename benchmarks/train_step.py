"""How fast is the training step on a CPU, beside transformers + torch?

    python -m benchmarks.train_step [--steps 5] [--rounds 3] [--output benchmarks/results/train_step.jsonl]

Trains the same Llama (SmolLM2-135M's shape, 4 rows of 512 tokens, float32, AdamW, clipping) with both, from the same weights on the same
tokens, in two processes that take turns; torch's threads wait passively, because spinning ones would count as CPU time. Checks that the losses
agree before it reports: tokens per CPU-second and per second (median over rounds), peak memory, compile time, and the compile time of 32
layers against 4. One JSON line per result.
"""

import argparse
import json
import os
import pathlib
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time

SHAPE = dict(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3)
LAYERS, ROWS, LENGTH, RATE = 30, 4, 512, 1e-4


def tokens_of(step):
    import numpy as np

    return np.random.default_rng(step).integers(0, 2000, (ROWS, LENGTH)).astype(np.int32)


def jaxllm_worker(folder):
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import numpy as np

    from jaxllm import config, sharding, step
    from jaxllm.data.batch import Batch

    cfg = config.load_config(
        None, f"model.path={folder}", "model.remat=none", "precision.compute=float32", "loss.chunk_size=512", "optimizer.schedule=constant",
        f"optimizer.learning_rate={RATE}", "optimizer.betas=[0.9, 0.999]", "optimizer.weight_decay=0.01", "optimizer.no_decay=[]",
        f"data.seq_len={LENGTH}", f"data.global_batch_size={ROWS}",
    )  # fmt: skip
    mesh = sharding.make_mesh(cfg.mesh)
    with jax.set_mesh(mesh):
        graphdef, state = step.init_state(cfg)

        def batch(number):
            tokens = tokens_of(number)[None]
            index = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)
            weights = np.where(index < LENGTH - 1, 1, 0).astype(np.float32)
            fields = (
                tokens,
                np.roll(tokens, -1, -1),
                index,
                np.ones_like(tokens),
                np.zeros_like(tokens),
                index + 1,
                weights,
            )
            return Batch(*(jax.device_put(x, sharding.batch_sharding(mesh)) for x in fields))

        begin = time.perf_counter()
        run = step.make_train_step(graphdef, cfg).lower(state, batch(0)).compile()
        print(
            json.dumps(
                {
                    "compile_s": time.perf_counter() - begin,
                    "temporaries_gb": run.memory_analysis().temp_size_in_bytes / 1e9,
                }
            ),
            flush=True,
        )
        number = 0
        for line in sys.stdin:
            losses, wall, cpu = [], time.perf_counter(), time.process_time()
            for _ in range(int(line)):
                state, metrics = run(state, batch(number))
                losses.append(float(metrics["loss"]))
                number += 1
            report(losses, wall, cpu)


def torch_worker(folder):
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__}), flush=True)
    number = 0
    for line in sys.stdin:
        losses, wall, cpu = [], time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            ids = torch.tensor(tokens_of(number)).long()
            loss = model(ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            number += 1
        report(losses, wall, cpu)


def report(losses, wall, cpu):
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(
        json.dumps(
            {"losses": losses, "wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "peak_gb": peak}
        ),
        flush=True,
    )


def compile_seconds(num_layers):
    """Seconds to lower and compile the same step at this depth, in a fresh process."""
    code = f"""
import os; os.environ["JAX_PLATFORMS"] = "cpu"
import time, jax
from jaxllm import config, sharding, step
from jaxllm.data.batch import abstract_batch
shape = {SHAPE!r}
cfg = config.load_config(None, *(f"model.{{k}}={{v}}" for k, v in shape.items()), "model.num_hidden_layers={num_layers}", "model.remat=none",
    "model.tie_word_embeddings=true", "precision.compute=float32", "data.seq_len={LENGTH}", "data.global_batch_size={ROWS}")
mesh = sharding.make_mesh(cfg.mesh)
with jax.set_mesh(mesh):
    graphdef, state = step.abstract_state(cfg)
    batch = abstract_batch(mesh, 1, {ROWS}, {LENGTH})
    begin = time.perf_counter(); step.make_train_step(graphdef, cfg).lower(state, batch).compile(); print(time.perf_counter() - begin)
"""
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def cpu_name():
    file = pathlib.Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def start(benchmark, role, *arguments):
    """(the process `python -m BENCHMARK --worker ROLE ARGUMENTS`, the facts in its first line). RuntimeError if it ends without one."""
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", benchmark, "--worker", role, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    if not (facts := process.stdout.readline()):
        process.communicate()
        raise RuntimeError(f"the process of {role} ended before it began, with what it said above")
    return process, json.loads(facts)


def ask(process, steps):
    process.stdin.write(f"{steps}\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", default="benchmarks/results/train_step.jsonl")
    parser.add_argument("--worker", choices=("jaxllm", "torch"))
    parser.add_argument("--folder")
    options = parser.parse_args()
    if options.worker:
        return (jaxllm_worker if options.worker == "jaxllm" else torch_worker)(options.folder)

    import torch
    import transformers

    from benchmarks.attention import append  # here, for workers count their memory

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            **SHAPE, num_hidden_layers=LAYERS, tie_word_embeddings=True, max_position_embeddings=2048
        )
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
        workers = {role: start("benchmarks.train_step", role, "--folder", folder) for role in ("jaxllm", "torch")}
        rounds = {role: [] for role in workers}
        for turn in range(options.rounds + 1):  # the first warms up
            for role, (process, _) in workers.items():
                answer = ask(process, options.steps)
                rounds[role].append(answer)
                print(role, turn, {k: v for k, v in answer.items() if k != "losses"}, flush=True)
        for process, _ in workers.values():
            process.stdin.close()
            process.wait()
    losses = {role: [loss for answer in answers for loss in answer["losses"]] for role, answers in rounds.items()}
    gap = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    assert gap < 1e-3, f"the two do not train the same model: losses differ by {gap}"
    count = options.steps * ROWS * LENGTH
    speed = {role: [count / answer["cpu"] for answer in answers[1:]] for role, answers in rounds.items()}
    wall = {role: [count / answer["wall"] for answer in answers[1:]] for role, answers in rounds.items()}
    ratio = [a / b for a, b in zip(speed["jaxllm"], speed["torch"], strict=True)]
    seconds = {n: compile_seconds(n) for n in (4, 32)}
    result = {
        "benchmark": "train_step",
        "hardware": f"{os.cpu_count()} cores, {cpu_name()}",
        "model": "SmolLM2-135M shape, 4 x 512 tokens, float32, AdamW",
        "jaxllm_tokens_per_cpu_second": round(statistics.median(speed["jaxllm"]), 1),
        "torch_tokens_per_cpu_second": round(statistics.median(speed["torch"]), 1),
        "ratio_median": round(statistics.median(ratio), 3),
        "ratio_min_max": [round(min(ratio), 3), round(max(ratio), 3)],
        "jaxllm_tokens_per_second": round(statistics.median(wall["jaxllm"]), 1),
        "torch_tokens_per_second": round(statistics.median(wall["torch"]), 1),
        "jaxllm_peak_gb": round(rounds["jaxllm"][-1]["peak_gb"], 2),
        "torch_peak_gb": round(rounds["torch"][-1]["peak_gb"], 2),
        "compile_s": round(workers["jaxllm"][1]["compile_s"], 1),
        "compile_s_32_layers_over_4": round(seconds[32] / seconds[4], 2),
        "largest_loss_difference": gap,
        **workers["torch"][1],
        "jax": __import__("jax").__version__,
    }
    append(options.output, [result])
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
