"""What do the steps of our configs need on GPUs that are not here? Compiled for them, not run; one JSON line for each case of CASES.

    python -m benchmarks.plans [--only llama3_8b_128k ...] [--output benchmarks/results/plans.jsonl]

Takes about a minute and up to 2 GiB of memory per case. Not here: what `tests/h100/` holds these steps to.
"""

import argparse
import datetime
import os

os.environ["JAX_PLATFORMS"] = "cpu"  # before jax is imported

from benchmarks.attention import append
from jaxllm import config, plan

ONE, EIGHT, SIXTEEN = "h100:1", "h100:8", "h100:2x8"
CASES = [  # (config, what is changed, devices)
    *(("llama3_8b", (f"model.remat={policy}",), EIGHT) for policy in ("attention", "full", "offload", "dots")),
    ("llama3_8b_128k", (), EIGHT),
    ("llama3_8b_128k", ("mesh.sequence=4",), "h100:4"),
    (
        "llama3_8b_128k",
        ("data.seq_len=524288", "model.max_position_embeddings=524288", "model.remat=full"),
        EIGHT,
    ),
    ("llama3_8b_1m", (), EIGHT),
    ("mixtral_8x7b", (), SIXTEEN),
    ("mixtral_8x7b", ("moe.exchange=alltoall", "moe.buffer_factor=2"), SIXTEEN),
    ("mixtral_8x22b", (), "h100:8x8"),
    *(("mixtral_8x7b_long", changes, SIXTEEN) for changes in ((), ("moe.exchange=none",), ("moe.buffer_factor=2",))),
    *((f"mixtral_8x7b_8gpus_{way}", (), EIGHT) for way in ("8bit", "host", "bfloat16")),
    ("mixtral_8x7b_8gpus_bfloat16", ("precision.param=float32", "optimizer.moments=float32"), EIGHT),
    *((f"{name}_qlora", (), ONE) for name in ("llama3_8b", "llama3_70b", "mixtral_8x7b")),
    ("mixtral_8x7b_qlora", ("data.seq_len=16384",), ONE),
    ("mixtral_8x7b_qlora", ("mesh.expert=8", "optimizer.num_microbatches=1"), EIGHT),
    ("mixtral_8x7b_qlora_aws", (), EIGHT),
    ("mixtral_8x7b_qlora_aws", ("mesh.expert=1", "optimizer.num_microbatches=8"), ONE),
]


def row(name, changes, devices):
    import jax

    facts = plan.report(config.load_config(f"configs/{name}.toml", *changes), devices)
    totals, waiting, large = {}, 0, 0
    for c in facts.pop("collectives"):
        key = f"{c['kind']} {c['dtype']}"
        totals[key] = round(totals.get(key, 0) + c["bytes"] * c["times"] / 2**30, 2)
        large += c["bytes"] * c["times"] > 2**20
        waiting += c["bytes"] * c["times"] > 2**20 and not c["asynchronous"]
    described = {"benchmark": "plans", "config": name, "changes": changes, "on": devices, "jax": jax.__version__}
    counted = {"collectives_gib": totals, "collectives_over_1_mib": large, "of_which_wait": waiting}
    return described | {"date": datetime.date.today().isoformat()} | facts | counted


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=sorted({name for name, *_ in CASES}), help="configs")
    parser.add_argument("--output", default="benchmarks/results/plans.jsonl")
    options = parser.parse_args()
    for name, changes, devices in CASES:
        if not options.only or name in options.only:
            line = row(name, changes, devices)
            append(options.output, [line])
            facts = line["memory_gib"], line["of_which_wait"], line["collectives_over_1_mib"], line["warnings"]
            print(name, *changes, devices, *facts, flush=True)


if __name__ == "__main__":
    main()
