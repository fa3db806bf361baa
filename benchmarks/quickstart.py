"""What does a newcomer see? Runs the quickstart as it is and records when the first step began, how long all took, and the validation losses.

python -m benchmarks.quickstart [--output benchmarks/results/quickstart.jsonl]
"""

import argparse
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from benchmarks.attention import append
from benchmarks.train_step import cpu_name


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--output", default="benchmarks/results/quickstart.jsonl")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder) / "run"
        command = [
            sys.executable,
            "-m",
            "jaxllm.train",
            "--config",
            "configs/quickstart.toml",
            f"output_dir={output}",
            "logging.progress=lines",
        ]
        begin = time.perf_counter()
        process = subprocess.Popen([*command, "logging.every=1"], stdout=subprocess.PIPE, text=True)
        first = None
        for line in process.stdout:
            if line.startswith("compiling the training step: took"):
                first = time.perf_counter() - begin
            print(line, end="", flush=True)
        assert process.wait() == 0, "the quickstart failed"
        seconds = time.perf_counter() - begin
        rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        losses = {row["step"]: round(row["eval_loss"], 4) for row in rows if "eval_loss" in row}
    result = {
        "benchmark": "quickstart",
        "hardware": f"{os.cpu_count()} cores, {cpu_name()}",
        "seconds_before_the_first_step": round(first, 1),
        "seconds": round(seconds, 1),
        "validation_loss": losses,
        "last_over_log_vocabulary": round(losses[max(losses)] / math.log(4096), 3),
        "jax": __import__("jax").__version__,
    }
    append(options.output, [result])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
