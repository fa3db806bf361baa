"""What several test files share: a tiny config, meshes, batches of random tokens, processes that work together, and a tiny Hugging Face
model as oracle."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import tempfile

import jax
import numpy as np

from jaxllm import config, sharding
from jaxllm.data.batch import to_device

ROOT = pathlib.Path(__file__).resolve().parents[1]
VOCAB, T = 256, 64
TINY = (
    "model.vocab_size=256", "model.hidden_size=64", "model.intermediate_size=96", "model.num_hidden_layers=2",
    "model.num_attention_heads=4", "model.num_key_value_heads=2", "model.max_position_embeddings=256", "precision.compute=float32",
    "data.seq_len=64", "data.global_batch_size=8", "loss.chunk_size=128",
)  # fmt: skip
MIXTRAL = (  # what makes of it a Mixtral of four experts
    "model.family=mixtral", "model.num_local_experts=4", "model.num_experts_per_tok=2", "model.router_aux_loss_coef=0.02",
    "model.router_jitter_noise=0",
)  # fmt: skip


def tiny(*overrides):
    return config.load_config(None, *TINY, *overrides)


def mesh(replica=1, data=1, sequence=1, expert=1):
    sizes = sharding.MeshConfig(replica=replica, data=data, sequence=sequence, expert=expert)
    return sharding.make_mesh(sizes, jax.devices()[: replica * data * sequence * expert])


def mesh_name(sizes):
    return "-".join(f"{axis}{size}" for axis, size in sizes.items()) or "one"


def rows(num_rows=8, seed=0, documents=True, length=T, empty=()):
    """Numpy rows of random tokens: packed documents of random lengths, some padding at the end, `empty` rows all padding."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(3, VOCAB, (num_rows, length)).astype(np.int32)
    segments, positions, starts = (np.zeros((num_rows, length), np.int32) for _ in range(3))
    for r in range(num_rows):
        place, number = 0, 1
        end = length - (int(rng.integers(0, max(length // 4, 1))) if documents else 0)
        while place < end and r not in empty:
            size = min(int(rng.integers(min(5, length), length + 1)) if documents else length, end - place)
            segments[r, place : place + size], positions[r, place : place + size] = number, np.arange(size)
            starts[r, place : place + size] = place
            place, number = place + size, number + 1
    real = segments > 0
    same = np.pad(segments[:, 1:] == segments[:, :-1], [(0, 0), (0, 1)]) & real
    index = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    return {
        "tokens": np.where(real, tokens, 0),
        "targets": np.where(same, np.roll(tokens, -1, 1), 0),
        "positions": positions,
        "segment_ids": segments,
        "k_start": np.where(real, starts, 0),
        "k_end": np.where(real, index + 1, 0),
        "loss_weights": same.astype(np.float32),
    }


def batch_on(device_mesh, num_microbatches=1, **kwargs):
    return to_device(rows(**kwargs), num_microbatches, device_mesh)


def numpy_tree(tree):
    return jax.tree.map(np.asarray, tree)


def error(a, b, floor=1e-8):
    """max|a - b| / max|b|, the measure of every gradient comparison in this suite."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape, f"shapes differ: {a.shape} and {b.shape}"
    return float(np.abs(a - b).max() / max(np.abs(b).max(), floor))


def worst(got: dict, want: dict):
    """(largest `error` over the tensors, its name)."""
    assert got.keys() == want.keys()
    return max((error(got[k], want[k]), k) for k in want)


@contextlib.contextmanager
def native_stderr():
    """Lines that native code (XLA) writes to file descriptor 2; compiled anew, for a cached program would print nothing."""
    lines = []
    jax.config.update("jax_enable_compilation_cache", False)
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            jax.config.update("jax_enable_compilation_cache", True)
            file.seek(0)
            lines += file.read().splitlines()


def no_races(result):
    """`result` of a call in Mosaic's interpreter, once that has ended; the interpreter records a race, and goes on."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    result = jax.block_until_ready(result)
    assert not interpret_pallas_call.get_races().races_found
    return result


@contextlib.contextmanager
def together(code, count, *arguments):
    """`count` Python processes, one emulated device each, that run `code` with sys.argv[1:] = [a free port for jax.distributed, the number
    of the process, *arguments]. Those still there at the end of the `with` are killed."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    processes = []
    try:
        for number in range(count):
            command = [sys.executable, "-c", code, str(port), str(number), *map(str, arguments)]
            processes.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()


def finish(processes, timeout=120):
    """Waits for the processes of `together`, all of which must succeed."""
    for process in processes:
        _, errors = process.communicate(timeout=timeout)
        assert process.returncode == 0, errors[-3000:]


def hugging_face(seed=0, **options):
    """A transformers Llama (a Mistral with sliding_window, a Mixtral with num_local_experts), in float32, with random weights large enough that
    every term shows."""
    import torch
    import transformers

    sizes = dict(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(seed)
    kind = "Mixtral" if "num_local_experts" in options else "Mistral" if "sliding_window" in options else "Llama"
    settings = getattr(transformers, f"{kind}Config")(**{**sizes, **options})
    model = getattr(transformers, f"{kind}ForCausalLM")(settings).eval()
    for parameter in model.parameters():
        matrix = parameter.ndim > 1
        torch.nn.init.normal_(parameter, mean=0.0 if matrix else 1.0, std=0.08 if matrix else 0.5)
    return model


def ours(named_arrays, table, like):
    """Hugging Face tensors {name: numpy} as our parameters {path: numpy}, after the table; for gradients as well. Fused experts, as transformers 5
    holds them in memory, are taken apart into the names that it writes."""
    named_arrays = dict(named_arrays)
    for name in [name for name in named_arrays if ".mlp.experts." in name or ".mlp.gate.weight" in name]:
        array, prefix = named_arrays.pop(name), name.partition(".mlp.")[0] + ".block_sparse_moe"
        if name.endswith("mlp.gate.weight"):
            named_arrays[f"{prefix}.gate.weight"] = array
        for e, matrix in enumerate(array) if ".experts." in name else ():
            parts = {"w2": matrix}
            if name.endswith("gate_up_proj"):
                parts = dict(zip(("w1", "w3"), np.split(matrix, 2), strict=True))
            named_arrays |= {f"{prefix}.experts.{e}.{part}.weight": value for part, value in parts.items()}
    out = {}
    for path, weight in table.items():
        shape = like[path].shape
        leading = [name for name in ("layer", "expert") if f"{{{name}}}" in weight.name]
        turn = (lambda a: a.T) if weight.kind == "linear" else (lambda a: a)
        own = shape[len(leading) :]
        places = np.ndindex(*shape[: len(leading)])
        found = [weight.name.format(**dict(zip(leading, place, strict=True))) for place in places]
        out[path] = np.stack([turn(named_arrays[name]).reshape(own) for name in found]).reshape(shape)
    return out
