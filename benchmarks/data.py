"""How fast do files become batches? Tokens per second and core through read, tokenise, pack and batch, without and with the token
cache, for text and for prompts; the memory that a large file takes; and the same job with Hugging Face `datasets` and a packing loop.

python -m benchmarks.data [--megabytes 24] [--stream-megabytes 200] [--theirs PYTHON] [--output benchmarks/results/data.jsonl]

--theirs: a Python that has `datasets` and `transformers`, by default this one; without them that part is null. All parts run in
processes of their own, one after the other, each held to one core, with the same tokenizer (a BPE of 4,096 entries) on the same file.
Rates leave out imports and the first batch; the first pass over a file that checks it is reported apart, as seconds per GB.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import sysconfig
import tempfile

SEQ_LEN, ROWS = 2048, 8

OURS = """
import json, os, resource, sys, time
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[0]})
import numpy as np
from types import SimpleNamespace as N
from jaxllm.data import DataConfig, EvaluationConfig
from jaxllm.data.batch import Training
from jaxllm.data.pipeline import Pipeline
import grain, tokenizers
path, tokenizer, kind, cache, seconds = *sys.argv[1:4], sys.argv[4] or None, float(sys.argv[5])
data = DataConfig(path=path, tokenizer=tokenizer, kind=kind, cache=cache, seq_len=2048, global_batch_size=8, on_long="error")
cfg = N(data=data, evaluation=EvaluationConfig(), model=N(path=None, vocab_size=None), seed=0, output_dir="unused")
begin = time.perf_counter()
training = Training(cfg)
opened = time.perf_counter() - begin
rows = Pipeline(training.source, None, data)
next(rows)
anonymous = lambda: int(next(l for l in open("/proc/self/smaps_rollup") if l.startswith("Anonymous")).split()[1]) / 1024
begin, tokens, memory = time.perf_counter(), 0, []
while time.perf_counter() - begin < seconds:
    tokens += int(np.count_nonzero(next(rows)[0]["segment_ids"]))
    if len(memory) * 0.25 < time.perf_counter() - begin:  # to look costs milliseconds
        memory.append(anonymous())
took = time.perf_counter() - begin
quarter = max(len(memory) // 4, 1)
print(json.dumps({"tokens_per_second": round(tokens / took), "seconds_to_open": round(opened, 2), "peak_rss_mib": round(resource.getrusage(
    resource.RUSAGE_SELF).ru_maxrss / 1024), "memory_mib_first_and_last_quarter": [round(np.mean(memory[:quarter])), round(np.mean(memory[-quarter:]))]}))
os._exit(0)
"""

THEIRS = """
import json, os, sys, time
os.environ["TOKENIZERS_PARALLELISM"], os.environ["HF_DATASETS_OFFLINE"], os.environ["HF_HUB_OFFLINE"] = "false", "1", "1"
os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[0]})
import datasets, numpy as np, transformers
datasets.disable_progress_bars()
path, tokenizer, seconds = sys.argv[1], transformers.AutoTokenizer.from_pretrained(sys.argv[2]), float(sys.argv[3])
eos = tokenizer.eos_token_id
def tokenize(batch):  # [BOS] text [EOS], as ours
    return {"input_ids": [ids + [eos] for ids in tokenizer(batch["text"])["input_ids"]]}
def pack(batch):  # documents concatenated and cut, with positions that restart: what a packing collator makes
    ids = np.concatenate([np.asarray(x, np.int32) for x in batch["input_ids"]])
    positions = np.concatenate([np.arange(len(x), dtype=np.int32) for x in batch["input_ids"]])
    rows = len(ids) // 2048
    return {"input_ids": ids[: rows * 2048].reshape(rows, 2048), "position_ids": positions[: rows * 2048].reshape(rows, 2048)}
stream = datasets.load_dataset("json", data_files=path, split="train", streaming=True).shuffle(seed=0, buffer_size=1000)
names = list(next(iter(stream)))
packed = stream.map(tokenize, batched=True, batch_size=64, remove_columns=names).map(pack, batched=True, batch_size=64, remove_columns=["input_ids"])
rows = packed.with_format("numpy").batch(8).repeat(None) if hasattr(packed, "repeat") else packed.with_format("numpy").batch(8)
it = iter(rows)
next(it)
begin, tokens = time.perf_counter(), 0
while time.perf_counter() - begin < seconds:
    tokens += np.asarray(next(it)["input_ids"]).size
print(json.dumps({"tokens_per_second": round(tokens / (time.perf_counter() - begin)), "datasets": datasets.__version__}))
os._exit(0)
"""


def child(python, code, *arguments):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd() if python == sys.executable else ""}
    done = subprocess.run([python, "-c", code, *map(str, arguments)], capture_output=True, text=True, env=env)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def write_texts(path, size):
    """JSON lines of the standard library's sources, each cut at 20,000 characters, over and over up to `size` bytes."""
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [file.read_text(encoding="utf-8", errors="replace")[:20_000] for file in files]
    with open(path, "w", encoding="utf-8") as out:
        number = 0
        while out.tell() < size:
            out.write(json.dumps({"text": f"# {number}\n{texts[number % len(texts)]}"}) + "\n")
            number += 1


def write_prompts(path, texts, size):
    with open(path, "w", encoding="utf-8") as out, open(texts, encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            text = json.loads(line)["text"][: 300 + 97 * (number % 31)]
            out.write(json.dumps({"prompt": text[: len(text) // 3], "completion": text[len(text) // 3 :]}) + "\n")
            if out.tell() > size:
                return


def main():
    from benchmarks.train_step import cpu_name

    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--megabytes", type=int, default=24)
    parser.add_argument("--stream-megabytes", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--theirs", default=sys.executable)
    parser.add_argument("--output", default="benchmarks/results/data.jsonl")
    options = parser.parse_args()
    from jaxllm.data.render import train_tokenizer
    from jaxllm.data.sources import Documents

    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        texts, prompts, large = folder / "texts.jsonl", folder / "prompts.jsonl", folder / "large.jsonl"
        write_texts(texts, options.megabytes * 10**6)
        write_prompts(prompts, texts, 3 * 10**6)
        train_tokenizer(Documents("{stdlib}/*.py"), 4096, folder / "tokenizer", {})
        tokenizer, cache, seconds = folder / "tokenizer", folder / "cache", options.seconds
        result = {
            "benchmark": "data",
            "hardware": f"1 of {os.cpu_count()} cores, {cpu_name()}",
            "seq_len": SEQ_LEN,
            "rows": ROWS,
            "text": child(sys.executable, OURS, texts, tokenizer, "text", "", seconds),
            "text_cached": child(sys.executable, OURS, texts, tokenizer, "text", cache, seconds / 2),
            "prompt": child(sys.executable, OURS, prompts, tokenizer, "prompt", "", seconds),
            "prompt_cached": child(sys.executable, OURS, prompts, tokenizer, "prompt", cache, seconds / 2),
            "hugging_face_datasets_text": child(options.theirs, THEIRS, texts, tokenizer, seconds),
        }
        write_texts(large, options.stream_megabytes * 10**6)
        result["large_file_mb"] = options.stream_megabytes
        result["text_large_file"] = child(sys.executable, OURS, large, tokenizer, "text", "", seconds)
    with pathlib.Path(options.output).open("a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
