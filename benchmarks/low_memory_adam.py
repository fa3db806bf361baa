"""Does Adam with a small state train as well as float32 Adam? A tiny Llama is fine-tuned on the CPU in each way, and with parts of them replaced.

    python -m benchmarks.low_memory_adam [--steps 400] [--seeds 2] [--output benchmarks/results/low_memory_adam.jsonl]

A model (hidden 64, 2 layers) first learns one random language of a table of next tokens in float32, and then another one, at a learning rate so low that most
updates are below half a step of a bfloat16 weight. One JSON line per way: the mean loss of the last tenth of steps, and how much higher it is than float32's
with the same seed, as a share of what float32 gained: mean, and largest over the seeds. The rows that were committed first lack the hardware and the date.
"""

import argparse
import contextlib
import dataclasses
import datetime
import functools
import json
import os
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.attention import append
from benchmarks.train_step import cpu_name
from jaxllm import config, optim, sharding, step
from jaxllm.data.batch import to_device

VOCAB, ROWS, LENGTH = 64, 8, 64
BASE = (
    f"model.vocab_size={VOCAB}", "model.hidden_size=64", "model.intermediate_size=128", "model.num_hidden_layers=2", "model.num_attention_heads=4",
    "model.max_position_embeddings=64", "model.initializer_range=0.1", "precision.compute=float32", f"data.seq_len={LENGTH}",
    f"data.global_batch_size={ROWS}", "optimizer.schedule=constant", "optimizer.weight_decay=0.0", "optimizer.betas=[0.9, 0.999]",
)  # fmt: skip
RATE = 5e-5


def to_nearest(x, random):
    return x.astype(jnp.bfloat16)


def nearest_code(quantise, x, name, like, random):
    return quantise(x, name, like, jnp.full(x.shape, 0x7FFF0000, jnp.uint32))


def one_scale(dequantise, stored, name):
    scales = jnp.full_like(stored.scales, jnp.mean(stored.scales))
    return dequantise(dataclasses.replace(stored, scales=scales), name)


WAYS = {
    "float32": (),
    "8bit": ("optimizer.moments=8bit",),
    "host": ("optimizer.moments_memory=host",),
    "bfloat16 weights and moments": ("precision.param=bfloat16", "optimizer.moments=bfloat16"),
    "bfloat16 weights, 8bit": ("precision.param=bfloat16", "optimizer.moments=8bit"),
}
# Without what makes them work, and as bitsandbytes rounds: {name: (way, replaced function of optim, by what)}.
REPLACED = {
    "bfloat16 rounded to nearest": ("bfloat16 weights and moments", "round_bfloat16", to_nearest),
    "8bit rounded to nearest": ("8bit", "quantise", functools.partial(nearest_code, optim.quantise)),
    "8bit with one scale for all blocks": ("8bit", "dequantise", functools.partial(one_scale, optim.dequantise)),
}


def batches(seed, language, count):
    """Rows of a language in which each token has four possible successors."""
    successors = np.random.default_rng([language, 99]).integers(0, VOCAB, (VOCAB, 4))
    rng = np.random.default_rng([seed, language])
    for _ in range(count):
        tokens = np.zeros((ROWS, LENGTH + 1), np.int32)
        tokens[:, 0] = rng.integers(0, VOCAB, ROWS)
        for t in range(LENGTH):
            tokens[:, t + 1] = successors[tokens[:, t], rng.integers(0, 4, ROWS)]
        index = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH))
        yield {
            "tokens": tokens[:, :-1], "targets": tokens[:, 1:], "positions": index, "segment_ids": np.ones_like(index),
            "k_start": np.zeros_like(index), "k_end": index + 1, "loss_weights": np.ones(index.shape, np.float32),
        }  # fmt: skip


def train(overrides, seed, language, steps, weights=None):
    """(losses of all steps, weights {path: numpy float32} after them)."""
    cfg = config.load_config(None, *BASE, f"seed={seed}", f"steps={steps}", *overrides)
    mesh = sharding.make_mesh(cfg.mesh, jax.devices()[:1])
    losses = []
    with jax.set_mesh(mesh):
        graphdef, state = step.init_state(cfg)
        if weights is not None:
            params = {path: jnp.asarray(weights[path], p.dtype) for path, p in state.params.items()}
            state = step.start(cfg, step.abstract_state(cfg)[1], params)
        run = step.make_train_step(graphdef, cfg)
        for rows in batches(seed, language, steps):
            state, metrics = run(state, to_device(rows, 1, mesh))
            losses.append(metrics["loss"])
    return np.array(losses, np.float32), {k: np.asarray(p, np.float32) for k, p in state.params.items()}


@functools.cache
def learned(seed, steps):
    return train(("optimizer.learning_rate=3e-3",), seed, 0, steps)[1]


def fine_tune(name, seed, steps, learn=300):
    """Losses of fine-tuning in a way of WAYS or REPLACED, after `learn` steps of the first language (0: random weights)."""
    way, function, by = REPLACED.get(name, (name, None, None))
    with mock.patch.object(optim, function, by) if function else contextlib.nullcontext():
        return train(
            (*WAYS[way], f"optimizer.learning_rate={RATE}"), seed, 1, steps, learned(seed, learn) if learn else None
        )[0]


def behind(losses, reference):
    """How much of what the reference gained these losses lack."""
    tenth = max(len(reference) // 10, 1)
    return float(
        (losses[-tenth:].mean() - reference[-tenth:].mean()) / (reference[:3].mean() - reference[-tenth:].mean())
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--output", default="benchmarks/results/low_memory_adam.jsonl")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    reference = {}
    for name in (*WAYS, *REPLACED):
        begin, runs = time.perf_counter(), [fine_tune(name, seed, options.steps) for seed in range(options.seeds)]
        reference = reference or dict(enumerate(runs))
        lacks = [behind(losses, reference[seed]) for seed, losses in enumerate(runs)]
        tenth = options.steps // 10
        line = {
            "benchmark": "low_memory_adam",
            "hardware": f"{os.cpu_count()} cores, {cpu_name()}",
            "date": datetime.date.today().isoformat(),
            "way": name,
            "replaced": REPLACED[name][1] if name in REPLACED else None,
            "steps": options.steps,
            "seeds": options.seeds,
            "first_loss": round(float(np.mean([r[:3].mean() for r in runs])), 4),
            "last_loss": round(float(np.mean([r[-tenth:].mean() for r in runs])), 4),
            "behind_mean": round(float(np.mean(lacks)), 5),
            "behind_largest": round(max(lacks), 5),
            "jax": jax.__version__,
            "seconds": round(time.perf_counter() - begin, 1),
        }
        append(options.output, [line])
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
