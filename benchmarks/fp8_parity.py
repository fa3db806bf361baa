"""Does training in FP8 end where training in bfloat16 ends? Small models on real text, beside controls that say how much of a difference means nothing.

    python -m benchmarks.fp8_parity                       # Llama and Mixtral, two seeds, 500 steps each; about an hour on two cores
    python -m benchmarks.fp8_parity --plot FILE.svg       # draws what the results hold, and trains nothing

For each model and seed, with one order of the same text: three runs in bfloat16 whose initial weights are multiplied by 1, 1 + 1e-6 and 1 - 1e-6, which
gives the spread sigma of a difference without meaning; runs in FP8 with a history of 64 steps, so that it comes round, and of 1,024; and one that has to
fail, FP8 whose scales are 2^8 too large. The rule, for the mean training loss of the last 50 steps and for the validation loss: |run - mean of the
controls| <= max(3 sigma, 0.5 % of that mean). Three controls make a rough sigma; the absolute gaps say more, and all are written down.

A CPU emulates the products: FP8 operands, float32 sums. What tensor cores sum otherwise, and what billions of weights do, this does not say.
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import statistics
import sys
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.attention import append
from benchmarks.train_step import cpu_name
from jaxllm import config, fp8, sharding, step
from jaxllm.data.batch import evaluation_sets, make_batches

BASE = (
    "model.hidden_size=128", "model.num_hidden_layers=4", "model.num_attention_heads=4", "model.num_key_value_heads=2", "model.vocab_size=1024",
    "model.max_position_embeddings=128", "data.tokenizer=bpe:1024", "data.kind=text", "data.seq_len=128", "data.global_batch_size=8", "data.workers=0",
    "evaluation.holdout=0.05", "evaluation.every=1", "evaluation.batch_size=8", "optimizer.learning_rate=1e-3", "optimizer.warmup_steps=50",
    "model.remat=none", "logging.progress=none",
)  # fmt: skip
TEXT = 'data.path=["{stdlib}/asyncio", "{stdlib}/email", "{stdlib}/json", "{stdlib}/http", "{stdlib}/unittest", "{stdlib}/*.py"]'
MODELS = {
    "llama": ("model.intermediate_size=384",),
    "mixtral": (
        "model.family=mixtral", "model.intermediate_size=192", "model.num_local_experts=8", "model.num_experts_per_tok=2",
        "model.router_aux_loss_coef=0.02", "model.router_jitter_noise=0",
    ),
}  # fmt: skip
IN_FP8 = ("precision.matmul=float8", "precision.fp8.history_length=")
# name: (overrides, factor of the initial weights)
RUNS = {
    "bfloat16": ((), 1.0),
    "bfloat16, weights x (1 + 1e-6)": ((), 1 + 1e-6),
    "bfloat16, weights x (1 - 1e-6)": ((), 1 - 1e-6),
    "FP8, history 64": ((IN_FP8[0], f"{IN_FP8[1]}64"), 1.0),
    "FP8, history 1,024": ((IN_FP8[0], f"{IN_FP8[1]}1024"), 1.0),
    "FP8, scales x 2^8": ((IN_FP8[0], f"{IN_FP8[1]}1024"), 1.0),
}
CONTROLS, WRONG = tuple(RUNS)[:3], "FP8, scales x 2^8"
LAST, BOUND = 50, 0.005


_update = fp8.update


def too_large(scaling, *arguments):
    """`fp8.update`, whose new scales are wrong by 2^8; one that stays, stays."""
    right = _update(scaling, *arguments)
    return right._replace(scale=jnp.where(right.scale == scaling.scale, scaling.scale, right.scale * 256))


def train(model: str, name: str, seed: int, steps: int) -> dict:
    """One run: losses of all steps, the validation loss after them, and the largest share of clipped elements in the last step."""
    overrides, factor = RUNS[name]
    cfg = config.load_config(None, *BASE, TEXT, *MODELS[model], f"seed={seed}", f"steps={steps}", *overrides)
    mesh = sharding.make_mesh(cfg.mesh, jax.devices()[:1])
    wrong = mock.patch.object(fp8, "update", too_large) if name == WRONG else contextlib.nullcontext()
    with jax.set_mesh(mesh), wrong, contextlib.closing(make_batches(cfg)) as batches:
        graphdef, state = step.init_state(cfg)
        scaled = jax.tree.map(lambda p: p * jnp.asarray(factor, p.dtype), state.params)
        state = dataclasses.replace(state, params=scaled)
        run, evaluate = step.make_train_step(graphdef, cfg), step.make_eval_step(graphdef, cfg)
        seen = []
        for batch, _ in zip(batches, range(steps)):
            state, metrics = run(state, batch)
            seen.append(metrics)
        losses = [float(metrics["loss"]) for metrics in seen]
        (held_out,) = evaluation_sets(cfg, batches).values()
        sums = [jax.device_get(evaluate(state, batch)) for batch in held_out]
    total = {key: sum(float(x[key]) for x in sums) for key in ("loss_sum", "weight_sum")}
    clipped = float(np.max(seen[-1]["fp8_saturated"])) if "fp8_saturated" in seen[-1] else None
    return {
        "losses": [round(loss, 5) for loss in losses],
        "last": statistics.fmean(losses[-LAST:]),
        "validation": total["loss_sum"] / total["weight_sum"],
        "validation_tokens": int(total["weight_sum"]),
        "clipped": clipped,
        "bad_steps": sum(bool(metrics["bad"]) for metrics in seen),
    }


def judged(rows: list[dict]) -> list[dict]:
    """Rows of one model and seed with what the rule says of each: gap and bound (relative) of both losses, and whether the run passed; NaN never does."""
    found = []
    for row in rows:
        verdicts = {}
        for loss in ("last", "validation"):
            controls = [other[loss] for other in rows if other["run"] in CONTROLS]
            mean, sigma = statistics.fmean(controls), statistics.stdev(controls)
            gap, bound = row[loss] / mean - 1, max(3 * sigma / mean, BOUND)
            verdicts[loss] = {"gap": gap, "sigma": sigma / mean, "bound": bound}
        found.append(row | {"verdicts": verdicts})
        if (
            row["run"] not in CONTROLS
        ):  # those cannot fail: three numbers are never further than 1.2 sigma from their mean
            found[-1]["passed"] = all(abs(v["gap"]) <= v["bound"] for v in verdicts.values())
    return found


def plot(rows: list[dict], file: str) -> None:
    """Training losses (mean of 10 steps) of the first seed of each model, and below them the distance to the mean of the controls."""
    from matplotlib.figure import Figure  # pip install 'jaxllm[benchmarks]'

    models = [model for model in MODELS if any(row["model"] == model for row in rows)]
    figure = Figure(figsize=(5.5 * len(models), 5.5), layout="constrained")
    axes = figure.subplots(2, len(models), squeeze=False, sharex=True, height_ratios=(3, 2))
    smooth = lambda losses: np.asarray(losses)[: len(losses) // 10 * 10].reshape(-1, 10).mean(1)
    for column, model in enumerate(models):
        runs = {row["run"]: smooth(row["losses"]) for row in rows if row["model"] == model and row["seed"] == 0}
        middle = np.mean([runs[name] for name in CONTROLS], axis=0)
        for name, losses in runs.items():
            style = dict(color="0.6", lw=1) if name in CONTROLS else dict(lw=1.3, ls="--" if name == WRONG else "-")
            steps = 10 * np.arange(1, len(losses) + 1)
            axes[0, column].plot(steps, losses, label=name, **style)
            if name != WRONG:
                axes[1, column].plot(steps, 100 * (losses / middle - 1), **style)
        axes[0, column].set(title=f"{model}, seed 0", ylabel="training loss (nats)")
        axes[1, column].set(xlabel="step", ylabel="% from mean of controls")
        axes[1, column].axhline(0, color="0.8", lw=0.8, zorder=0)
        axes[0, column].legend(fontsize=7)
    figure.savefig(file, metadata={"Date": None})


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--output", default="benchmarks/results/fp8_parity.jsonl")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--plot", metavar="FILE", help="draw the results there, and train nothing")
    options = parser.parse_args(arguments)
    if options.plot:
        plot([json.loads(line) for line in pathlib.Path(options.output).read_text().splitlines()], options.plot)
        return 0
    right = True
    for model in options.models:
        for seed in range(options.seeds):
            rows = []
            for name in RUNS:
                begin = time.perf_counter()
                facts = {"benchmark": "fp8_parity", "model": model, "seed": seed, "run": name, "steps": options.steps}
                rows.append(facts | train(model, name, seed, options.steps))
                rows[-1] |= {
                    "seconds": round(time.perf_counter() - begin, 1),
                    "hardware": f"{os.cpu_count()} cores, {cpu_name()}",
                    "jax": jax.__version__,
                    "date": datetime.date.today().isoformat(),
                }
                print(f"{model}, seed {seed}, {name}: {rows[-1]['last']:.5f}, {rows[-1]['validation']:.5f}", flush=True)
            for row in judged(rows):
                gaps = ", ".join(f"{loss} {v['gap']:+.3%} of {v['bound']:.3%}" for loss, v in row["verdicts"].items())
                verdict = {True: "passed", False: "failed", None: "control"}[row.get("passed")]
                print(f"  {row['run']}: {gaps}: {verdict}", flush=True)
                right &= row.get("passed", True) == (row["run"] != WRONG)
            append(options.output, judged(rows))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
