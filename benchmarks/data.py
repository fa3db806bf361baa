"""How fast do files become batches? Tokens per second and core through read, tokenise, pack and batch, without and with the token
cache, for texts, prompts and conversations; the same job with Hugging Face `datasets` and a packing loop; and the memory that going
through one large file takes.

python -m benchmarks.data [--megabytes 24] [--size 0.2] [--theirs PYTHON] [--output benchmarks/results/data.jsonl]

--theirs: a Python that has `datasets` and `transformers`, by default this one; without them that part is null. All parts run in
processes of their own, one after the other, each held to one core, with the same tokenizer (a BPE of 4,096 entries) on the same file.
Rates leave out imports and the first batch; the first pass over a file that checks it is reported apart, as seconds to open. Texts
are read in rounds, ours and theirs in turn, and the best round of each is kept; on a machine that others use as well, compare the rates
per second of processor time.

--size: of the large file, in GB. Every record of it is read, checked and packed in a shuffled order, once; so that gigabytes go through
in minutes, only the first CUT characters of each become tokens. What is shown is that memory does not grow with what has been read.
"""

import argparse
import itertools
import json
import os
import pathlib
import subprocess
import sys
import sysconfig
import tempfile

SEQ_LEN, ROWS, CUT = 2048, 8, 64
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

OURS = """
import json, os, resource, sys, time
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[0]})
import numpy as np
from jaxllm.config import load_config
from jaxllm.data.batch import Training
from jaxllm.data.pipeline import Pipeline, Rendering
import grain, tokenizers
seconds, cut, *overrides = sys.argv[1:]
seconds, cut = float(seconds), int(cut)
cfg = load_config(None, *overrides)
begin = time.perf_counter()
training = Training(cfg)
opened = time.perf_counter() - begin
source, documents = training.source, [0]
if cut:
    def render(records):
        documents[0] += len(records)
        return training.render([(text[:cut], where) for text, where in records])
    source = Rendering(training.documents, render)
rows = Pipeline(source, None, cfg.data)
next(rows)
anonymous = lambda: int(next(l for l in open("/proc/self/smaps_rollup") if l.startswith("Anonymous")).split()[1]) / 1024
begin, cpu, tokens, memory = time.perf_counter(), time.process_time(), 0, []
for batch, _ in rows:
    tokens += int(np.count_nonzero(batch["segment_ids"]))
    if len(memory) * 0.25 < time.perf_counter() - begin:  # to look costs milliseconds
        memory.append(anonymous())
    if not cut and time.perf_counter() - begin > seconds:
        break
took, cpu = time.perf_counter() - begin, time.process_time() - cpu
quarter = max(len(memory) // 4, 1)
result = {
    "tokens_per_second": round(tokens / took),
    "tokens_per_cpu_second": round(tokens / cpu),
    "seconds_to_open": round(opened, 2),
    "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    "memory_mib_first_and_last_quarter": [round(np.mean(memory[:quarter])), round(np.mean(memory[-quarter:]))],
}
if cut:
    assert documents[0] == len(training.documents)
    result |= {"documents_read": documents[0], "characters_tokenised_of_each": cut, "seconds_to_read": round(took, 1),
               "bytes_read": int(training.documents.size.sum())}
print(json.dumps(result))
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
begin, cpu, tokens = time.perf_counter(), time.process_time(), 0
while time.perf_counter() - begin < seconds:
    tokens += np.asarray(next(it)["input_ids"]).size
took, cpu = time.perf_counter() - begin, time.process_time() - cpu
print(json.dumps({"tokens_per_second": round(tokens / took), "tokens_per_cpu_second": round(tokens / cpu), "datasets": datasets.__version__}))
os._exit(0)
"""


def child(python, code, *arguments):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd() if python == sys.executable else ""}
    done = subprocess.run([python, "-c", code, *map(str, arguments)], capture_output=True, text=True, env=env)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def best(results):
    """The round with the highest rate per second of processor time, None if there is none."""
    return max(filter(None, results), key=lambda result: result["tokens_per_cpu_second"], default=None)


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


def write_chats(path, prompts):
    """The same texts as `prompts`, as conversations of two to six turns."""
    with open(path, "w", encoding="utf-8") as out, open(prompts, encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            text, turns = "".join(json.loads(line).values()), 2 + 2 * (number % 3)
            edges = [len(text) * turn // turns for turn in range(turns + 1)]
            parts = [text[a:b] for a, b in itertools.pairwise(edges)]
            roles = ("user", "assistant")
            messages = [{"role": roles[turn % 2], "content": part} for turn, part in enumerate(parts)]
            out.write(json.dumps({"messages": messages}) + "\n")


def main():
    from benchmarks.attention import append
    from benchmarks.train_step import cpu_name

    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--megabytes", type=int, default=24)
    parser.add_argument("--size", type=float, default=0.2, help="of the large file, in GB")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3, help="of texts, ours and theirs in turn")
    parser.add_argument("--theirs", default=sys.executable)
    parser.add_argument("--output", default="benchmarks/results/data.jsonl")
    options = parser.parse_args()
    from jaxllm.data.render import train_tokenizer
    from jaxllm.data.sources import Documents

    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        files = {name: folder / f"{name}.jsonl" for name in ("text", "prompt", "chat", "large")}
        write_texts(files["text"], options.megabytes * 10**6)
        write_prompts(files["prompt"], files["text"], 3 * 10**6)
        write_chats(files["chat"], files["prompt"])
        tokenizer, cache, seconds = folder / "tokenizer", folder / "cache", options.seconds
        train_tokenizer(Documents("{stdlib}/*.py"), 4096, tokenizer, {})
        (tokenizer / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")

        def ours(name, kind, seconds, *overrides, cut=0):
            data = [f"data.path={files[name]}", f"data.kind={kind}", f"data.tokenizer={tokenizer}"]
            data += [f"data.seq_len={SEQ_LEN}", f"data.global_batch_size={ROWS}", "model.vocab_size=4096"]
            return child(sys.executable, OURS, seconds, cut, *data, *overrides)

        result = {
            "benchmark": "data",
            "hardware": f"1 of {os.cpu_count()} cores, {cpu_name()}",
            "load_average_before": round(os.getloadavg()[0], 1),
            "seq_len": SEQ_LEN,
            "rows": ROWS,
            "rounds": options.rounds,
        }
        pairs = []  # in turn, so that both meet the same disturbances
        for _ in range(options.rounds):
            pairs.append(
                (ours("text", "text", seconds), child(options.theirs, THEIRS, files["text"], tokenizer, seconds))
            )
        result["text"], result["hugging_face_datasets_text"] = map(best, zip(*pairs, strict=True))
        for kind in ("text", "prompt", "chat"):
            if kind != "text":
                result[kind] = ours(kind, kind, seconds)
            result[f"{kind}_cached"] = ours(kind, kind, seconds / 2, f"data.cache={cache}")
            result[f"{kind}_cache_found"] = ours(kind, kind, seconds / 2, f"data.cache={cache}")
        write_texts(files["large"], options.size * 10**9)
        result["large_file_gb"] = options.size
        result["large_file"] = ours("large", "text", 0, "data.repeat=false", cut=CUT)
    append(options.output, [result])
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
