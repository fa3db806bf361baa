"""What does a step of Llama-3.1-8B at 8,192 tokens need on 8 H100s? Compiled for them, not run; one JSON line per rematerialisation policy.

python -m benchmarks.plan_llama3_8b [--output benchmarks/results/plan_llama3_8b.jsonl]
"""

import argparse
import json
import os
import pathlib

os.environ["JAX_PLATFORMS"] = "cpu"  # before jax is imported

from jaxllm import config, plan


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--output", default="benchmarks/results/plan_llama3_8b.jsonl")
    options = parser.parse_args()
    import jax

    with pathlib.Path(options.output).open("w", encoding="utf-8") as file:
        for policy in ("attention", "full", "offload", "dots"):
            facts = plan.report(config.load_config("configs/llama3_8b.toml", f"model.remat={policy}"), "h100:8")
            totals = {}
            for c in facts.pop("collectives"):
                key = f"{c['kind']} {c['dtype']}"
                totals[key] = round(totals.get(key, 0) + c["bytes"] * c["times"] / 2**30, 2)
            line = {
                "benchmark": "plan_llama3_8b",
                "remat": policy,
                "jax": jax.__version__,
                **facts,
                "collectives_gib": totals,
            }
            file.write(json.dumps(line) + "\n")
            print(policy, facts["memory_gib"], totals, facts["warnings"])


if __name__ == "__main__":
    main()
