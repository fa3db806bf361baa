"""Does a model in 4 bits learn, and as PEFT + bitsandbytes do? How fast are adapters, and how fast is a folder quantised?

    python -m benchmarks.qlora --data runs/questions       # writes the questions of configs/smollm2_qlora.toml, and does nothing else
    python -m benchmarks.qlora --learn MODEL               # SmolLM2-135M-Instruct as that config trains it, beside PEFT + bitsandbytes; 25 minutes on two cores
    python -m benchmarks.qlora --speed                     # adapters of a float32 model of its shape beside PEFT, two processes that take turns
    python -m benchmarks.qlora --import                    # a bfloat16 folder to NF4, beside transformers + bitsandbytes
    python -m benchmarks.qlora --gpu                       # a step with the base in NF4 beside one with the base in bfloat16; --tiny tries it anywhere

Learning: both start from the same bfloat16 folder, which each quantises for itself, and from the same adapters, and get the same packed rows in the same order,
the same rates and the same AdamW, in float32. What an item's greedy answer would be needs no generation: it is the item's own, end token included, just where
every token of it is the likeliest one behind those before it.

Questions are those of the package chatterbot-corpus, in English. Where several conversations begin with the same question the first one counts.
"""

import argparse
import contextlib
import datetime
import gc
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks.train_step import LAYERS, LENGTH, ROWS, SHAPE, ask, cpu_name, report, start, tokens_of
from jaxllm.section import UserError

CONFIG = "configs/smollm2_qlora.toml"
TOPICS = ("trivia", "science", "history", "literature")
HELD_OUT = 8  # every eighth question is never trained on
RATE = 1e-3  # of --speed
LAST = 10  # steps whose mean loss is the final one
AGREEMENT = 0.02  # of the final loss with PEFT's, relative


# --- questions --------------------------------------------------------------------------------------------------------


def conversations() -> list:
    """All of the package's conversations of TOPICS, each a list of texts. UserError where it is not installed."""
    found = importlib.util.find_spec("chatterbot_corpus")
    if found is None:
        raise UserError("the package with the questions is not installed: pip install --no-deps chatterbot-corpus")
    import yaml

    folder = pathlib.Path(found.submodule_search_locations[0]) / "data" / "english"
    files = [folder / f"{topic}.yml" for topic in TOPICS]
    return [item for file in files for item in yaml.safe_load(file.read_text(encoding="utf-8"))["conversations"]]


def questions(conversations) -> tuple[list[dict], list[dict]]:
    """(to train on, held out) as {"prompt", "completion"}: conversations of two texts, each question once, with its first answer. What is no list of two texts
    is left out: one question of trivia.yml is a single text with its answer inside."""
    answers = {}
    for item in conversations:
        if isinstance(item, list) and len(item) == 2 and all(isinstance(text, str) for text in item):
            question, answer = (" ".join(text.split()) for text in item)
            answers.setdefault(question.lower(), (question, answer))
    items = [{"prompt": f"Question: {q}\nAnswer:", "completion": f" {a}"} for q, a in answers.values()]
    held_out = items[HELD_OUT - 1 :: HELD_OUT]
    return [item for item in items if item not in held_out], held_out


def write_data(folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, items in zip(("train", "held_out"), questions(conversations()), strict=True):
        beside = folder / f".{name}.tmp"
        beside.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
        os.replace(beside, folder / f"{name}.jsonl")
        print(f"{folder / name}.jsonl: {len(items)} questions", flush=True)


# --- learning ---------------------------------------------------------------------------------------------------------


def exact(rows: dict, likeliest) -> tuple[int, int]:
    """(documents all of whose trained tokens are the likeliest, documents). rows: of a batch, [B, T] each; likeliest: i32[B, T]. No document of prompts and
    answers spans two rows."""
    import numpy as np

    trained, segments = rows["loss_weights"] > 0, rows["segment_ids"]
    right = (likeliest == rows["targets"]) | ~trained
    found = [right[b][segments[b] == n].all() for b in range(len(segments)) for n in np.unique(segments[b][trained[b]])]
    return sum(map(bool, found)), len(found)


def score(parts) -> dict:
    """Of a set: mean loss and exact matches, from [(loss sum, rows, likeliest)] of its batches."""
    matches = [exact(rows, likeliest) for _, rows, likeliest in parts]
    return {
        "loss": sum(total for total, *_ in parts) / sum(float(rows["loss_weights"].sum()) for _, rows, _ in parts),
        "exact": sum(right for right, _ in matches),
        "items": sum(count for _, count in matches),
    }


def numpy_rows(batch) -> dict:
    """The arrays of a Batch of one microbatch."""
    import dataclasses

    import numpy as np

    names = [field.name for field in dataclasses.fields(batch) if not field.metadata.get("static")]
    return {name: np.asarray(getattr(batch, name))[0] for name in names}


def learn_jaxllm(folder: pathlib.Path, overrides) -> dict:
    """Trains as CONFIG and `overrides` say. Leaves in `folder` what the other side needs: adapter (PEFT's folder), batches.npz, rates.json."""
    import jax
    import numpy as np

    from jaxllm import config, optim, peft, sharding, step
    from jaxllm import state as states
    from jaxllm.data.batch import evaluation_sets, make_batches
    from jaxllm.linear import dot, gather
    from jaxllm.loss import HEAD_NAMES
    from jaxllm.models import FAMILIES

    cfg = config.load_config(CONFIG, *overrides)
    mesh = sharding.make_mesh(cfg.mesh, jax.devices()[:1])
    with jax.set_mesh(mesh), contextlib.closing(make_batches(cfg)) as batches:
        graphdef, state = step.init_state(cfg)
        table = FAMILIES[cfg.model.family].hf_weights(cfg.model)
        peft.write(folder / "adapter", table, cfg.lora, state.params, cfg.model.path)

        @jax.jit
        def looked_at(state, batch):
            rows = jax.tree.map(lambda x: x[0], batch)
            model = states.merge(graphdef, {**state.params, **state.frozen})
            hidden, _ = model(rows.tokens, rows.positions, rows.k_start, rows.k_end, rows.layout, rows.row_length)
            logits = dot(hidden, gather(model.head, HEAD_NAMES, hidden.dtype), ((2,), (1,)), "float32")
            losses = (
                jax.nn.logsumexp(logits, -1) - jax.numpy.take_along_axis(logits, rows.targets[..., None], -1)[..., 0]
            )
            return jax.numpy.sum(losses * rows.loss_weights), jax.numpy.argmax(logits, -1)

        sets = {name: list(found) for name, found in evaluation_sets(cfg, batches).items()}

        def scores(state):
            looks = {name: [(looked_at(state, b), numpy_rows(b)) for b in found] for name, found in sets.items()}
            return {
                name: score([(float(total), rows, np.asarray(best)) for (total, best), rows in found])
                for name, found in looks.items()
            }

        run = step.make_train_step(graphdef, cfg)
        before, losses, kept = scores(state), [], []
        for batch, _ in zip(batches, range(cfg.steps)):
            kept.append(numpy_rows(batch))
            state, metrics = run(state, batch)
            losses.append(float(metrics["loss"]))
            print(f"jaxllm: step {len(losses)}, loss {losses[-1]:.4f}", flush=True)
        after = scores(state)
    arrays = {f"train/{key}": np.stack([rows[key] for rows in kept]) for key in kept[0]}
    for name, found in sets.items():
        arrays |= {f"{name}/{key}": np.stack([numpy_rows(b)[key] for b in found]) for key in kept[0]}
    np.savez(folder / "batches.npz", **arrays)
    rate = optim.learning_rate(cfg.optimizer, cfg.steps)
    settings = {"rates": [float(rate(n)) for n in range(1, cfg.steps + 1)]}
    settings |= {key: getattr(cfg.optimizer, key) for key in ("betas", "eps", "weight_decay", "max_grad_norm")}
    (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    return {"before": before, "after": after, "losses": losses}


def learn_peft(folder: pathlib.Path, model: str) -> dict:
    """The same with PEFT + bitsandbytes, from what `learn_jaxllm` left."""
    import numpy as np
    import peft
    import torch
    import transformers

    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    sets: dict[str, list[dict]] = {}
    with np.load(folder / "batches.npz") as arrays:
        for name in dict.fromkeys(key.rpartition("/")[0] for key in arrays):
            fields = {key.rpartition("/")[2]: arrays[key] for key in arrays if key.rpartition("/")[0] == name}
            sets[name] = [{key: value[n] for key, value in fields.items()} for n in range(len(fields["tokens"]))]
    quantised = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, quantization_config=quantised, device_map="cpu", attn_implementation="sdpa"
    )
    tuned = peft.PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True)
    tuned.train()  # always: dropout is 0, and bitsandbytes packs weights anew on a CPU where a model is in evaluation
    trained = [p for p in tuned.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, betas=settings["betas"], eps=settings["eps"], weight_decay=settings["weight_decay"]
    )

    def forward(rows):
        place = torch.arange(rows["tokens"].shape[1])
        of = {key: torch.from_numpy(rows[key]) for key in ("k_start", "k_end")}
        seen = (place >= of["k_start"][..., None]) & (place < of["k_end"][..., None])
        seen |= torch.eye(len(place), dtype=torch.bool)  # padding, or a softmax over nothing is NaN
        bias = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[:, None]
        ids, positions = (torch.from_numpy(rows[key]).long() for key in ("tokens", "positions"))
        logits = tuned(input_ids=ids, position_ids=positions, attention_mask=bias, use_cache=False).logits
        targets, weights = torch.from_numpy(rows["targets"]).long(), torch.from_numpy(rows["loss_weights"])
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return (losses * weights.flatten()).sum(), logits

    def scores():
        with torch.no_grad():
            found = {
                name: [(forward(rows), rows) for rows in batches] for name, batches in sets.items() if name != "train"
            }
        return {
            name: score([(total.item(), rows, logits.argmax(-1).numpy()) for (total, logits), rows in parts])
            for name, parts in found.items()
        }

    before, losses = scores(), []
    for rows, rate in zip(sets["train"], settings["rates"], strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = forward(rows)[0] / float(rows["loss_weights"].sum())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, settings["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"peft: step {len(losses)}, loss {losses[-1]:.4f}", flush=True)
    return {"before": before, "after": scores(), "losses": losses}


def bfloat16_folder(model: str, folder: pathlib.Path) -> str:
    """The model in bfloat16, as it is published; embedding and norms rest in bfloat16 here, and in the dtype of the folder there."""
    import torch
    import transformers

    transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return str(folder)


def learn(options) -> dict:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_data(folder / "questions")
        model = bfloat16_folder(options.learn, folder / "model")
        files = {kind: folder / "questions" / f"{kind}.jsonl" for kind in ("train", "held_out")}
        overrides = [
            f"model.path={model}", f"data.path={files['train']}", f"evaluation.path={files['held_out']}", f"evaluation.sets={{trained = '{files['train']}'}}",
            f"output_dir={folder / 'run'}", *options.overrides,
        ]  # fmt: skip
        sides = {}
        for side, more in (("jaxllm", overrides), ("peft", [model])):
            out = folder / f"{side}.json"
            command = [
                sys.executable, "-m", "benchmarks.qlora", "--side", side, "--folder", name, "--out", str(out), *more,
            ]  # fmt: skip
            environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
            if code := subprocess.run(command, env=environment).returncode:
                raise RuntimeError(f"the process of {side} ended with {code}, with what it said above")
            sides[side] = json.loads(out.read_text(encoding="utf-8"))
    return {"benchmark": "qlora", "item": "learn", "model": pathlib.Path(options.learn).name, **compared(sides)}


def compared(sides: dict) -> dict:
    """A row from what both sides found. Gaps are relative to PEFT's."""
    ours, theirs = sides["jaxllm"], sides["peft"]
    gaps = [a / b - 1 for a, b in zip(ours["losses"], theirs["losses"], strict=True)]
    last = {side: statistics.fmean(found["losses"][-LAST:]) for side, found in sides.items()}
    row = {"steps": len(gaps), "final_loss": last, "gap_first_step": gaps[0]}
    row |= {"gap_median": statistics.median(map(abs, gaps)), "gap_largest": max(gaps, key=abs)}
    row["gap_final"] = last["jaxllm"] / last["peft"] - 1
    row["gap_held_out"] = ours["after"][""]["loss"] / theirs["after"][""]["loss"] - 1
    within = abs(row["gap_final"]) < AGREEMENT
    row["status"] = "passed" if within else f"failed: the final losses are {row['gap_final']:+.2%} apart"
    for side, found in sides.items():
        row[side] = {when: found[when] for when in ("before", "after")}
        row[side]["losses"] = [float(f"{loss:.6g}") for loss in found["losses"]]
    return row


# --- speed ------------------------------------------------------------------------------------------------------------

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
RANK, ALPHA = 8, 16


def product_rate(multiply, repeats: int = 50) -> float:
    """GFLOP per CPU-second of `multiply`, a product of one microbatch and one weight: how much of a ratio is the libraries' own matmul on this CPU."""
    multiply()
    begin = time.process_time()
    for _ in range(repeats):
        multiply()
    flops = 2 * ROWS * LENGTH * SHAPE["hidden_size"] * SHAPE["intermediate_size"]
    return round(repeats * flops / (time.process_time() - begin) / 1e9, 1)


def speed_jaxllm(folder: pathlib.Path) -> None:
    """Answers each line of stdin, a number of steps on the same tokens, with what they took. Writes its adapters before it begins: folder/adapter."""
    import jax
    import numpy as np

    from jaxllm import config, peft, sharding, step
    from jaxllm.data.batch import to_device
    from jaxllm.models import FAMILIES

    cfg = config.load_config(
        None, f"model.path={folder}", "model.remat=none", "precision.compute=float32", f"lora.rank={RANK}", f"lora.alpha={ALPHA}", "lora.base=float32",
        f"lora.target_modules={list(TARGETS)}", "loss.chunk_size=512", "optimizer.schedule=constant", f"optimizer.learning_rate={RATE}",
        "optimizer.betas=[0.9, 0.999]", "optimizer.weight_decay=0.01", f"data.seq_len={LENGTH}", f"data.global_batch_size={ROWS}",
    )  # fmt: skip
    mesh = sharding.make_mesh(cfg.mesh, jax.devices()[:1])
    with jax.set_mesh(mesh):
        graphdef, state = step.init_state(cfg)
        peft.write(folder / "adapter", FAMILIES["llama"].hf_weights(cfg.model), cfg.lora, state.params, str(folder))

        def batch():
            tokens = tokens_of(0)
            index = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)
            rows = {
                "tokens": tokens, "targets": np.roll(tokens, -1, -1), "positions": index, "segment_ids": np.ones_like(tokens),
                "k_start": np.zeros_like(tokens), "k_end": index + 1, "loss_weights": (index < LENGTH - 1).astype(np.float32),
            }  # fmt: skip
            return to_device(rows, 1, mesh)

        begin = time.perf_counter()
        run = step.make_train_step(graphdef, cfg).lower(state, batch()).compile()
        memory = run.memory_analysis().temp_size_in_bytes
        facts = {"compile_s": round(time.perf_counter() - begin, 2), "temporaries_gb": round(memory / 1e9, 2)}
        x, w = (jax.numpy.ones((n, SHAPE["hidden_size"])) for n in (ROWS * LENGTH, SHAPE["intermediate_size"]))
        product = jax.jit(lambda x, w: x @ w.T)
        facts["jaxllm_product_gflop_per_cpu_second"] = product_rate(lambda: product(x, w).block_until_ready())
        print(json.dumps(facts), flush=True)
        for line in sys.stdin:
            losses, wall, cpu = [], time.perf_counter(), time.process_time()
            for _ in range(int(line)):
                state, metrics = run(state, batch())
                losses.append(float(metrics["loss"]))
            report(losses, wall, cpu)


def speed_peft(folder: pathlib.Path) -> None:
    """The same with PEFT, from the same weights and adapters."""
    import peft
    import torch
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.01)
    facts = {"torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__}
    x, w = (torch.ones(n, SHAPE["hidden_size"]) for n in (ROWS * LENGTH, SHAPE["intermediate_size"]))
    facts["peft_product_gflop_per_cpu_second"] = product_rate(lambda: torch.nn.functional.linear(x, w))
    print(json.dumps(facts), flush=True)
    for line in sys.stdin:
        losses, wall, cpu = [], time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            ids = torch.tensor(tokens_of(0)).long()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        report(losses, wall, cpu)


def random_folder(folder: pathlib.Path, dtype: str, **shape) -> str:
    """A Hugging Face folder of random weights; `shape` as LlamaConfig takes it."""
    import torch
    import transformers

    torch.manual_seed(0)
    made = transformers.LlamaConfig(**shape, max_position_embeddings=2048)
    transformers.LlamaForCausalLM(made).to(getattr(torch, dtype)).save_pretrained(folder)
    return str(folder)


def speed(options) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        random_folder(pathlib.Path(folder), "float32", **SHAPE, num_hidden_layers=LAYERS, tie_word_embeddings=True)
        workers = {role: start("benchmarks.qlora", role, "--folder", folder) for role in ("jaxllm", "peft")}
        rounds = {role: [] for role in workers}
        for turn in range(options.rounds + 1):  # the first warms up
            for role, (process, _) in workers.items():
                rounds[role].append(ask(process, options.steps))
                shown = {key: round(value, 2) for key, value in rounds[role][-1].items() if key != "losses"}
                print(role, turn, shown, "load", os.getloadavg()[0], flush=True)
        for process, _ in workers.values():
            process.stdin.close()
            process.wait()
    losses = {role: [loss for answer in answers for loss in answer["losses"]] for role, answers in rounds.items()}
    gap = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    fallen = losses["peft"][0] - losses["peft"][-1]
    count = options.steps * ROWS * LENGTH
    fast = {role: [count / answer["cpu"] for answer in answers[1:]] for role, answers in rounds.items()}
    ratio = [a / b for a, b in zip(*fast.values(), strict=True)]
    return {
        "benchmark": "qlora",
        "item": "speed",
        "status": "passed"
        if gap < 0.01 * fallen
        else f"failed: losses fell by {fallen} and differ by {gap}: not the same is trained",
        "model": f"SmolLM2-135M shape, {ROWS} x {LENGTH} tokens, float32, adapters of rank {RANK} on {', '.join(TARGETS)}, AdamW",
        **{f"{role}_tokens_per_cpu_second": round(statistics.median(found), 1) for role, found in fast.items()},
        "ratio_median": round(statistics.median(ratio), 3),
        "ratio_min_max": [round(min(ratio), 3), round(max(ratio), 3)],
        **{f"{role}_peak_gb": round(answers[-1]["peak_gb"], 2) for role, answers in rounds.items()},
        "loss_first": losses["jaxllm"][0],
        "loss_last": losses["jaxllm"][-1],
        "largest_loss_difference": gap,
        **workers["jaxllm"][1],
        **workers["peft"][1],
        "load": round(os.getloadavg()[0], 1),
    }


# --- import -----------------------------------------------------------------------------------------------------------

WIDE = dict(
    vocab_size=2048,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=8,
    num_attention_heads=32,
    num_key_value_heads=8,
)


def imported(options) -> dict:
    """Seconds that a folder of bfloat16 needs to become NF4, already in the page cache: medians over rounds."""
    import jax

    from jaxllm import config, sharding, weights

    with tempfile.TemporaryDirectory() as name:
        folder = random_folder(pathlib.Path(name), "bfloat16", **WIDE)
        size = sum(file.stat().st_size for file in pathlib.Path(folder).glob("*.safetensors"))

        kept_gb = {}

        def ours(base):
            cfg = config.load_config(
                None, f"model.path={folder}", "lora.rank=8", f"lora.base={base}", "data.seq_len=128"
            )
            with jax.set_mesh(sharding.make_mesh(cfg.mesh, jax.devices()[:1])):
                kept = weights.load_frozen(cfg, weights.declare(cfg))
                jax.block_until_ready(kept)
                kept_gb[base] = round(sum(array.nbytes for array in kept.values()) / 1e9, 3)

        def theirs():
            import torch
            import transformers

            quantised = transformers.BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
            )
            transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.bfloat16, quantization_config=quantised, device_map="cpu"
            )

        def plain():
            for file in pathlib.Path(folder).glob("*.safetensors"):
                file.read_bytes()

        ways = {"nf4": lambda: ours("nf4"), "bfloat16": lambda: ours("bfloat16"), "bitsandbytes": theirs, "read": plain}
        taken = {way: [] for way in ways}
        for turn in range(options.rounds + 1):  # the first warms up
            for way, run in ways.items():
                wall, cpu = time.perf_counter(), time.process_time()
                run()
                taken[way].append((time.perf_counter() - wall, time.process_time() - cpu))
                print(way, turn, *(f"{seconds:.2f}" for seconds in taken[way][-1]), flush=True)
                gc.collect()
    rates = {
        way: [size / 1e9 / statistics.median(column) for column in zip(*found[1:], strict=True)]
        for way, found in taken.items()
    }
    return {
        "benchmark": "qlora",
        "item": "import",
        "status": "passed",
        "model": "Llama of random bfloat16 weights, 8 layers, 2,048 wide",
        "folder_gb": round(size / 1e9, 3),
        "kept_gb": kept_gb,
        **{f"{way}_gb_per_second": round(wall, 3) for way, (wall, _) in rates.items()},
        **{f"{way}_gb_per_cpu_second": round(cpu, 3) for way, (_, cpu) in rates.items()},
        "load": round(os.getloadavg()[0], 1),
    }


# --- GPU --------------------------------------------------------------------------------------------------------------

LLAMA_3_8B = (
    "model.vocab_size=32768", "model.hidden_size=4096", "model.intermediate_size=14336", "model.num_hidden_layers=4", "model.num_attention_heads=32",
    "model.num_key_value_heads=8", "model.max_position_embeddings=4096", "data.seq_len=4096", "data.global_batch_size=2",
)  # fmt: skip
TINY = (
    "model.vocab_size=512", "model.hidden_size=128", "model.intermediate_size=256", "model.num_hidden_layers=2", "model.num_attention_heads=4",
    "model.num_key_value_heads=2", "model.max_position_embeddings=128", "data.seq_len=128", "data.global_batch_size=2",
)  # fmt: skip


def nf4_beside_bfloat16(model, rounds: int, steps: int = 4) -> dict:
    """Step times of the same model with its base in NF4 and in bfloat16, adapters of rank 16 on everything, in turns."""
    import jax

    from benchmarks.parity import rows
    from jaxllm import config, sharding, step
    from jaxllm.data.batch import to_device

    made = {}
    for base in ("nf4", "bfloat16"):
        cfg = config.load_config(
            None, *model, "lora.rank=16", "lora.alpha=32", f"lora.base={base}", "optimizer.learning_rate=1e-3"
        )
        mesh = sharding.make_mesh(cfg.mesh, jax.devices()[:1])
        with jax.set_mesh(mesh):
            graphdef, state = step.init_state(cfg)
            batch = to_device(rows(cfg.data.seq_len, False, cfg.data.global_batch_size), 1, mesh)
            made[base] = [mesh, step.make_train_step(graphdef, cfg).lower(state, batch).compile(), state, batch]
    times, losses = {base: [] for base in made}, {base: [] for base in made}
    for _ in range(rounds + 1):  # the first warms up
        for base, (mesh, run, state, batch) in made.items():
            with jax.set_mesh(mesh):
                begin, seen = time.perf_counter(), []
                for _ in range(steps):
                    state, metrics = run(state, batch)
                    seen.append(metrics["loss"])
                jax.block_until_ready(state)
                times[base].append((time.perf_counter() - begin) / steps)
                made[base][2] = state
                losses[base] += [float(loss) for loss in seen]
    ratio = [a / b for a, b in zip(times["nf4"][1:], times["bfloat16"][1:], strict=True)]
    learns = all(found[-1] < found[0] for found in losses.values())
    return {
        "benchmark": "qlora",
        "item": "gpu",
        "status": "passed"
        if learns
        else f"failed: losses went from {[x[0] for x in losses.values()]} to {[x[-1] for x in losses.values()]}",
        "device": jax.devices()[0].device_kind,
        "model": ", ".join(model),
        **{f"{base}_step_ms": round(1e3 * statistics.median(found[1:]), 3) for base, found in times.items()},
        "ratio_median": round(statistics.median(ratio), 3),
        "ratio_min_max": [round(min(ratio), 3), round(max(ratio), 3)],
    }


def gpu(options) -> dict:
    return nf4_beside_bfloat16(TINY if options.tiny else LLAMA_3_8B, options.rounds)


# ----------------------------------------------------------------------------------------------------------------------


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="--learn: changes to the config")
    parser.add_argument("--data", metavar="DIR", help="write train.jsonl and held_out.jsonl there")
    parser.add_argument("--learn", metavar="MODEL", help="folder or hub name of SmolLM2-135M-Instruct")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--import", dest="imported", action="store_true")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="--gpu: a tiny model, anywhere, and no result is written")
    parser.add_argument("--steps", type=int, default=3, help="--speed: steps of a turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", default="benchmarks/results/qlora.jsonl")
    for name in ("--worker", "--side", "--folder", "--out"):  # of the processes that this starts
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker or options.side == "jaxllm":
        os.environ["JAX_PLATFORMS"] = "cpu"
    if options.worker:
        return {"jaxllm": speed_jaxllm, "peft": speed_peft}[options.worker](pathlib.Path(options.folder))
    if options.side:
        folder, given = pathlib.Path(options.folder), options.overrides
        found = learn_jaxllm(folder, given) if options.side == "jaxllm" else learn_peft(folder, *given)
        pathlib.Path(options.out).write_text(json.dumps(found), encoding="utf-8")
        return 0
    wanted = {"learn": learn, "speed": speed, "imported": imported, "gpu": gpu}
    chosen = [run for name, run in wanted.items() if getattr(options, name)]
    if not (chosen or options.data):
        parser.error("choose --data DIR, --learn MODEL, --speed, --import or --gpu")
    from benchmarks.attention import PASSED, append, first_device  # here, for workers count their memory

    if options.gpu and not options.tiny and (reason := first_device()[1]):
        print(f"benchmarks.qlora: {reason}; --tiny tries the script on a CPU", file=sys.stderr)
        return 2
    right = True
    try:
        if options.data:
            write_data(pathlib.Path(options.data))
        for run in chosen:
            row = run(options) | {
                "hardware": f"{os.cpu_count()} cores, {cpu_name()}",
                "jax": importlib.metadata.version("jax"),
                "date": datetime.date.today().isoformat(),
            }
            if not options.tiny:
                append(options.output, [row])
            runs = [key for key, value in row.items() if isinstance(value, dict) and "losses" in value]
            print(json.dumps({key: value for key, value in row.items() if key not in runs}, indent=1))
            right &= row["status"] == PASSED
    except UserError as error:
        print(f"benchmarks.qlora: {error}", file=sys.stderr)
        return 2
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
