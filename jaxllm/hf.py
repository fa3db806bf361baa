"""Hugging Face model folders in and out: safetensors to sharded arrays and back, without a whole model in host memory.

Reading checks the headers of all files before anything is converted, then reads blocks of rows and scatters them into
the buffers of this process's shards: the peak is those and a few MiB. (A memory map would need no block buffers, but an
I/O error in one is a SIGBUS without a message, and its pages count as ours.) Writing fetches one tensor at a time.

Chosen not to do: open pickles (they run code; transformers converts them), run code from a model folder, rename or
reshape tensors on a guess. What does not fit is listed by name and refused.

Which tensor is which parameter is a table of the model's family, {path: HfWeight(name, kind, num_inputs)}. Placeholders
in a name, such as "{layer}", stand for the leading dims of the parameter, in that order.
"""

import dataclasses
import errno
import json
import logging
import math
import os
import re
import shutil
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxllm import bnb, nf4
from jaxllm.nf4 import NF4
from jaxllm.section import UserError

logger = logging.getLogger(__name__)

DTYPES = {name: np.dtype(t) for name, t in
          {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}.items()}  # fmt: skip
_BYTES = {**DTYPES, "U8": np.dtype(np.uint8)}  # what a file may hold besides weights as they are
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
_PICKLES = ("*.bin", "*.pth", "*.pt", "*.pkl", "*.ckpt")
_HARMLESS = re.compile(r"rotary_emb\.inv_freq$")  # buffers that old converters wrote; the config determines them
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library
_BLOCK = 4 << 20  # bytes of a file held at once by each reading thread
# Copies that transpose go by pieces that fit the cache. Measured in memory: reading 5 x, writing 3 x as fast as whole.
_STRIP = 16  # rows of a file scattered at once; their outputs fill whole cache lines of a kernel
_TILE = 64  # rows and columns of a file gathered at once
_LISTED = 20


def read_config(folder) -> dict:
    """config.json of a model folder as it stands. UserError where there is none, where it is no JSON object, and where
    it says that the weights are already quantised."""
    folder = existing_folder(folder)
    path = folder / "config.json"
    if (folder / "adapter_config.json").is_file() and not path.is_file():
        raise UserError(f"{folder}: a PEFT adapter (adapter_config.json); give the folder of its base model")
    if not path.is_file():
        raise UserError(f"{folder}: no config.json, so no Hugging Face model folder. It holds: {contents(folder)}")
    config = read_json(path)
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise UserError(
            f"{path}: quantization_config: the weights are already quantised ({method}). Use the folder of the original float model"
            + (
                '; only training with lora.base = "nf4" reads 4-bit weights of bitsandbytes'
                if method == "bitsandbytes"
                else ""
            )
        )
    return config


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where one tensor lies: its file, dtype (a safetensors name), shape, and first byte in the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def blocks(self, num_rows: int, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, np.ndarray]]:
        """Cuts the tensor into `num_rows` equal rows and yields (first row, [rows, elements]) of start to stop, some
        MiB at a time. An array is valid until the next one is asked for."""
        dtype, stop = _BYTES[self.dtype], num_rows if stop is None else stop
        row_bytes = math.prod(self.shape) // num_rows * dtype.itemsize
        step = min(max(1, _BLOCK // row_bytes), stop - start)
        buffer = np.empty(step * row_bytes, np.uint8)
        with open(self.file, "rb", buffering=0) as file:
            for first in range(start, stop, step):
                view = memoryview(buffer)[: (min(first + step, stop) - first) * row_bytes]
                file.seek(self.offset + first * row_bytes)
                done = 0
                while done < len(view):  # one system call reads at most 2 GiB
                    if not (count := file.readinto(view[done:])):
                        raise UserError(f"{self.file}: ended in the middle of {self.name}; is it still being written?")
                    done += count
                yield first, np.frombuffer(view, dtype).reshape(-1, row_bytes // dtype.itemsize)

    def whole(self) -> np.ndarray:
        """The tensor in host memory."""
        array = np.empty(self.shape, _BYTES[self.dtype])
        rows = array.reshape(array.shape[0] if array.ndim else 1, -1)
        for first, block in self.blocks(len(rows)):
            rows[first : first + len(block)] = block
        return array


class ModelFolder:
    """The tensors of a model folder, single or sharded. Opening it reads headers only, and refuses what is damaged,
    incomplete or ambiguous. Without an index, the shards serve if all of them are there.

    path: Path; tensors: dict[str, Tensor]."""

    def __init__(self, folder):
        self.path = existing_folder(folder)
        files, index = _files(self.path)
        held, found, faults = Counter(index.values()), {}, []
        for file in files:
            try:
                found[file] = read_header(self.path / file)
            except UserError as error:
                faults.append(str(error) + (f" (by the index it should hold {held[file]} tensors)" if held else ""))
        if faults:
            raise UserError("\n".join(faults[:_LISTED]) + "\nNothing was converted. Fetch these files again.")
        self.tensors: dict[str, Tensor] = {}
        for tensors in found.values():
            if twice := tensors.keys() & self.tensors.keys():
                raise UserError(f"{self.path}: two files hold {some(sorted(twice))}; remove the stale one")
            self.tensors |= tensors
        lost = [
            f"{name}: by the index in {file} (which should hold {held[file]} tensors), "
            + (f"but in {self.tensors[name].file.name}" if name in self.tensors else "but in no file")
            for name, file in index.items()
            if name not in found[file]
        ]
        if lost:
            raise UserError(f"{self.path / INDEX} and the files there disagree:\n{listing(lost)}\nFetch all again.")
        self.tensors = _experts_apart(self.tensors)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of all tensors; where they differ float32, which holds every 16-bit float exactly."""
        found = {tensor.dtype for name, tensor in self.tensors.items() if not _HARMLESS.search(name)}
        return DTYPES.get(found.pop() if len(found) == 1 else "F32", DTYPES["F32"])


def _experts_apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Mixtral's fused layout (mlp.experts.gate_up_proj [E, 2 F, D] with the gate's rows first, mlp.experts.down_proj [E, D, F], mlp.gate) under the
    names of the other one (block_sparse_moe.experts.E.w1, w3 and w2, block_sparse_moe.gate): each matrix lies in one piece."""
    apart = {}
    fused_names = [name for name in tensors if ".mlp.experts." in name]
    if fused_names and (separate := [name for name in tensors if ".block_sparse_moe.experts." in name]):
        raise UserError(
            f"{tensors[fused_names[0]].file.parent}: holds experts twice, fused ({some(fused_names)}) and one by one ({some(separate)}); remove "
            "the files of one layout"
        )
    for name, tensor in tensors.items():
        prefix, fused, matrix = name.partition(".mlp.experts.")
        parts = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}.get(matrix) if fused else None
        if name.endswith(".mlp.gate.weight"):
            renamed = name.replace(".mlp.gate.", ".block_sparse_moe.gate.")
            if renamed in tensors:
                raise UserError(
                    f"{tensor.file.parent}: holds a router twice, {name} and {renamed}; remove the files of one layout"
                )
            apart[renamed] = dataclasses.replace(tensor, name=renamed)
        elif parts is None or len(tensor.shape) != 3 or tensor.shape[1] % len(parts) or tensor.dtype not in DTYPES:
            apart[name] = tensor
        else:
            num_experts, num_rows, width = tensor.shape
            shape = (num_rows // len(parts), width)
            size = math.prod(shape) * DTYPES[tensor.dtype].itemsize
            for n in range(num_experts * len(parts)):
                expert, part = divmod(n, len(parts))
                one = f"{prefix}.block_sparse_moe.experts.{expert}.{parts[part]}.weight"
                apart[one] = Tensor(one, tensor.file, tensor.dtype, shape, tensor.offset + n * size)
    return apart


def _files(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Names of the files to read, and the index's weight_map ({} without an index)."""
    present = sorted(p.name for p in folder.glob("*.safetensors"))
    shards = [m for m in (re.fullmatch(r"(.+)-\d{5}-of-(\d{5})\.safetensors", name) for name in present) if m]
    index = {}
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX).get("weight_map")
        if not isinstance(index, dict) or not index or any(str(f) != Path(str(f)).name for f in index.values()):
            raise UserError(f"{folder / INDEX}: wanted a weight_map from tensor names to names of files in this folder")
        held = Counter(index.values())
        used = sorted(held)
        if absent := [f"{name} (should hold {held[name]} tensors)" for name in used if name not in present]:
            raise UserError(f"{folder / INDEX} names files that are not there; fetch them:\n{listing(absent)}")
    elif shards:
        used, series = [m[0] for m in shards], {m.groups() for m in shards}
        prefix, total = min(series)
        wanted = [f"{prefix}-{i:05d}-of-{total}.safetensors" for i in range(1, int(total) + 1)]
        if len(series) > 1:
            raise UserError(f"{folder}: no {INDEX}, and shards of more than one model: {some(used)}; keep one model's")
        if used != wanted:
            raise UserError(f"{folder}: no {INDEX}, and these shards are missing: {some(sorted({*wanted} - {*used}))}")
        logger.info("%s: no %s; taking the tensors of all %d shards", folder, INDEX, len(used))
    elif SINGLE in present:
        return [SINGLE], {}
    elif pickles := sorted(p.name for pattern in _PICKLES for p in folder.glob(pattern)):
        raise UserError(
            f"{folder}: holds its weights only as pickle ({some(pickles)}). Loading a pickle runs whatever code is in "
            "it, so it is never opened here. Where you trust it, convert it and use the safetensors in DST:\n"
            '  python -c "from transformers import AutoModelForCausalLM as M; '
            "M.from_pretrained('SRC').save_pretrained('DST')\""
        )
    else:
        raise UserError(f"{folder}: holds neither {SINGLE} nor shards. It holds: {contents(folder)}")
    if SINGLE in present and SINGLE not in used:
        raise UserError(f"{folder}: holds two models, {SINGLE} and {used[0]} with its like; remove the stale one")
    if ignored := sorted({*present} - {*used}):
        logger.warning("%s: not read, because the index does not name them: %s", folder, some(ignored))
    return used, index


def read_header(file: Path) -> dict[str, Tensor]:
    """Tensors of one safetensors file (u64 header length, JSON header, data), whose size must be their sum."""
    size = file.stat().st_size
    with open(file, "rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8)) if size >= 8 else (0,)
        if size < 8 or length > min(_MAX_HEADER, size - 8):
            says = f", but its header alone should be {length} bytes" if size >= 8 else ""
            raise UserError(f"{file}: holds {size} bytes{says}: cut off, damaged, or no safetensors file")
        header = stream.read(length)
    try:
        entries, tensors, end = json.loads(header), {}, 0
        entries.pop("__metadata__", None)
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            (begin, stop), dtype, shape = entry["data_offsets"], entry["dtype"], tuple(entry["shape"])
            size_fits = dtype not in _BYTES or stop - begin == math.prod(shape) * _BYTES[dtype].itemsize
            if begin != end or min(shape, default=0) < 0 or not size_fits:
                raise ValueError(f"{name}: bytes {begin} to {stop} for {dtype} {list(shape)}")
            tensors[name], end = Tensor(name, file, dtype, shape, 8 + length + begin), stop
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: damaged, its header makes no sense: {type(error).__name__}: {error}") from None
    if size != 8 + length + end:
        fault = "cut off" if size < 8 + length + end else "damaged"
        raise UserError(f"{file}: holds {size} bytes, but by its header {8 + length + end}: {fault}")
    return tensors


def load_params(
    folder, weights: Mapping, abstract: Mapping, *, on_nan: str = "error", finish: Callable | None = None
) -> dict[str, jax.Array | NF4]:
    """The parameters that `weights` ({path: HfWeight}) names, from a model folder (or its path) into their shards.

    abstract: {path: ShapeDtypeStruct}, the shapes, dtypes and shardings wanted (no sharding: the first device), or an NF4 of them. finish: what of a
    parameter is kept in its stead, (path, array) -> anything, called as soon as it is there. A process reads only rows that its own devices need. Peak host
    memory: its shards of one parameter (on a CPU, where those are the arrays themselves, of all) and a few MiB.

    An NF4 is quantised matrix by matrix while the folder is read, each by one thread in host memory; or its bytes are those of a folder in which bitsandbytes
    quantised. There other matrices than those asked for as NF4 are made floats again (the router of an old Mixtral).

    Raises UserError before it reads data: for what `ModelFolder` refuses, and for missing, unexpected or misshapen
    tensors. Later: for a value that overflows in its dtype, and with on_nan = "error" for NaN and infinities; with
    on_nan = "warn" those are a warning that names the tensors. NF4 has neither: always an error."""
    assert on_nan in ("error", "warn"), on_nan
    folder = folder if isinstance(folder, ModelFolder) else ModelFolder(folder)
    in_bits = _in_four_bits(folder, weights, abstract)
    bit_shapes = {name: bnb.described(folder.tensors[name + bnb.STATE].whole(), name, folder.path) for name in in_bits}
    shapes = {path: _leading_shape(weights[path], abstract[path]) for path in weights}
    wanted = {
        name: _file_shape_of(weights[p], abstract[p]) for p in weights for name, _ in tensors_of(weights[p], shapes[p])
    }
    _check_fit(folder, wanted, in_bits, {name: shape for name, (shape, _) in bit_shapes.items()})
    double = {target.nested is not None for target in abstract.values() if isinstance(target, NF4)}
    if differ := [name for name, (_, doubly) in bit_shapes.items() if {doubly} != double]:
        given = str(double.pop()).lower()
        raise UserError(
            f"lora.double_quant: {given}, but of {folder.path} {some(differ)} {'are not' if given == 'true' else 'are'} doubly quantised; set it to "
            f"{'false' if given == 'true' else 'true'}"
        )
    found = {DTYPES.get(tensor.dtype) for tensor in folder.tensors.values()}
    floats = [path for path in weights if not isinstance(abstract[path], NF4)]
    _warn_of_rounding(folder.path, found, {np.dtype(abstract[path].dtype) for path in floats})
    params, bad = {}, []
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for path, weight in weights.items():
            if isinstance(abstract[path], NF4):
                params[path] = _load_nf4(pool, folder, weight, abstract[path], in_bits)
                continue
            params[path], names = _load_param(pool, folder, weight, abstract[path], in_bits)
            bad += names
            if finish is not None:
                params[path] = finish(path, params[path])
    if bad:
        message = f"{folder.path}: {len(bad)} tensors hold NaN or infinite values: {some(bad)}"
        if on_nan == "error":
            raise UserError(f"{message}. Training cannot start from these; get a sound copy of the model.")
        logger.warning(message)
    return params


def _leading_shape(weight, target) -> tuple[int, ...]:
    """The dims of a parameter that are one tensor of the file each, and (of floats) the others."""
    return target.codebook.shape[:-1] if isinstance(target, NF4) else target.shape


def _file_shape_of(weight, target) -> tuple[int, ...]:
    if not isinstance(target, NF4):
        return file_shape(weight, target.shape)
    *_, outputs, half = target.codes.shape
    return outputs, 2 * half


def _in_four_bits(folder: ModelFolder, weights: Mapping, abstract: Mapping) -> dict[str, list[str]]:
    """`bnb.quantised` of the folder's tensors. UserError where what is asked for as NF4 is there in floats beside others in 4 bits, or the other way round."""
    found = bnb.quantised(folder.tensors, folder.path)
    if not found:
        return found
    names = lambda is_nf4: [
        name
        for path, weight in weights.items()
        if isinstance(abstract[path], NF4) is is_nf4
        for name, _ in tensors_of(weight, _leading_shape(weight, abstract[path]))
    ]
    asked = names(True)
    if not asked:
        raise UserError(
            f'{folder.path}: weights in 4 bits ({some(sorted(found, key=natural_order))}), which only training with lora.base = "nf4" reads; set it, or use '
            "the folder of the original float model"
        )
    if floats := [name for name in asked if name in folder.tensors and name not in found]:
        raise UserError(
            f"{folder.path}: weights in floats ({some(floats)}) among others in 4 bits. These would have to be quantised too, which the folder's author chose "
            "not to; use the folder of the original float model"
        )
    return found


def _load_nf4(pool, folder: ModelFolder, weight, target: NF4, in_bits) -> NF4:
    names = {leading: name for name, leading in tensors_of(weight, _leading_shape(weight, target))}

    def read(leading) -> NF4:
        name = names[leading]
        if name not in in_bits:
            return nf4.quantise(folder.tensors[name].whole(), target.nested is not None, f"{folder.path}: {name}")
        return _four_bits(folder, name, in_bits)[0]

    return nf4.from_numpy(target, read, pool.map)


def _dequantised(folder: ModelFolder, name: str, in_bits) -> np.ndarray:
    matrix, form = _four_bits(folder, name, in_bits)
    return np.asarray(nf4.dequantise(NF4(*(None if x is None else jax.numpy.asarray(x) for x in matrix)), form.dtype))


def _four_bits(folder: ModelFolder, name: str, in_bits):
    return bnb.read({part: folder.tensors[part].whole() for part in in_bits[name]}, name, folder.path)


def _load_param(pool, folder: ModelFolder, weight, target, in_bits) -> tuple[jax.Array, list[str]]:
    """One parameter, and the names of its tensors that hold non-finite values."""
    sharding = target.sharding or SingleDeviceSharding(jax.devices()[0])
    devices: dict[tuple, list] = {}  # bounds of a shard -> the local devices that hold it
    for device, index in sharding.addressable_devices_indices_map(target.shape).items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, target.shape, strict=True))
        devices.setdefault(bounds, []).append(device)
    buffers = {bounds: _aligned_empty([high - low for low, high in bounds], target.dtype) for bounds in devices}
    num_leading = weight.name.count("{")
    order = _file_order(weight, len(target.shape) - num_leading)
    num_rows, *row_shape = (target.shape[num_leading:][i] for i in order)

    def fill(place) -> str | None:
        """Reads one tensor of the file, block by block, into every shard that holds a part of it."""
        name, leading = place
        parts = []  # (bounds in the file's order of dims, view of a buffer in that order)
        for bounds, buffer in buffers.items():
            if all(low <= i < high for i, (low, high) in zip(leading, bounds, strict=False)):
                inner = buffer[tuple(i - low for i, (low, _) in zip(leading, bounds, strict=False))]
                parts.append(([bounds[num_leading:][i] for i in order], _bits(inner.transpose(order))))
        if not parts:
            return None
        finite, ranges = True, [bounds[0] for bounds, _ in parts]
        wanted = min(r[0] for r in ranges), max(r[1] for r in ranges)
        if name in in_bits:
            blocks = [(wanted[0], _dequantised(folder, name, in_bits)[slice(*wanted)])]
        else:
            blocks = folder.tensors[name].blocks(num_rows, *wanted)
        for at, block in blocks:
            finite &= not has_nonfinite(block)
            for first in range(at, at + len(block), _STRIP):
                strip = cast(block[first - at : first - at + _STRIP], target.dtype, name)
                strip = _bits(strip).reshape(-1, *row_shape)
                for ((low, high), *rest), out in parts:
                    begin, end = max(low, first), min(high, first + len(strip))
                    if begin < end:
                        wanted = (slice(begin - first, end - first), *(slice(*bounds) for bounds in rest))
                        out[begin - low : end - low] = strip[wanted]
        return None if finite else name

    bad = [name for name in pool.map(fill, tensors_of(weight, target.shape)) if name]
    arrays = []
    for bounds, holders in devices.items():
        buffer = buffers.pop(bounds)
        for device in holders:
            arrays.append(jax.device_put(buffer, SingleDeviceSharding(device, memory_kind=sharding.memory_kind)))
        del buffer
    array = jax.make_array_from_single_device_arrays(target.shape, sharding, arrays)
    return jax.block_until_ready(array), bad  # without waiting, the host buffers of several parameters would pile up


def _check_fit(folder: ModelFolder, wanted: dict[str, tuple[int, ...]], in_bits: Mapping, bit_shapes: Mapping) -> None:
    """UserError with everything that is missing, unexpected or misshapen. bit_shapes: of the matrices in 4 bits, as they are meant."""
    parts = {part for name in in_bits for part in in_bits[name] if part != name}
    tensors = {name: tensor for name, tensor in folder.tensors.items() if name not in parts}
    missing = [name for name in wanted if name not in tensors]
    extra = sorted(tensors.keys() - wanted.keys(), key=natural_order)
    if harmless := [name for name in extra if _HARMLESS.search(name)]:
        logger.info("%s: %d inv_freq buffers ignored; the config determines them", folder.path, len(harmless))
    tied = _HEAD in extra and _EMBEDDING in wanted and _EMBEDDING in tensors
    if tied and not _equal(tensors[_HEAD], tensors[_EMBEDDING]):
        raise UserError(
            f"{folder.path}: tie_word_embeddings is true, but {_HEAD} is there and differs from {_EMBEDDING}. If the "
            "model has a head of its own, say tie_word_embeddings = false in config.json; else remove the tensor."
        )
    report = {
        "missing": missing,
        "unexpected, nothing in this config reads them": [
            name for name in extra if name not in harmless and not (tied and name == _HEAD)
        ],
        "of another shape than config.json says": [
            f"{name}: found {list(found)}, wanted {list(shape)}"
            for name, shape in wanted.items()
            if name in tensors and (found := bit_shapes.get(name, tensors[name].shape)) != shape
        ],
        f"of a dtype other than {', '.join(DTYPES)}": [
            f"{name}: {tensors[name].dtype}"
            for name in wanted
            if name in tensors and name not in in_bits and tensors[name].dtype not in DTYPES
        ],
    }
    if any(report.values()):
        lines = [f"{len(names)} tensors {what}:\n{listing(names)}" for what, names in report.items() if names]
        hint = f"\nOnly with tie_word_embeddings = true may {_HEAD} be absent." if _HEAD in missing else ""
        raise UserError(f"{folder.path}: the tensors do not fit config.json\n" + "\n".join(lines) + hint)


def save_folder(
    params: Mapping, weights: Mapping, hf_config: Mapping, out, *, dtype, tokenizer_folder=None,
    max_shard_bytes: int = 5 * 10**9,
) -> Path:  # fmt: skip
    """Writes a model folder that transformers opens: safetensors, config.json, the tokenizer's files. Returns its path.

    params, weights: {path: array}, {path: HfWeight}; dtype: "float32", "bfloat16" or "float16", of every tensor and in
    config.json. Tensors leave the devices one at a time. With several processes all must call; process 0 writes.
    UserError if `out` exists and is not empty, if the disk is full, and if a finite value becomes infinite in `dtype`;
    `out` is then as it was."""
    out, dtype = Path(out).absolute(), np.dtype(getattr(ml_dtypes, str(dtype), dtype))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: already exists, and nothing is written over it. Name another folder, or move it away.")
    _warn_of_rounding(out, {np.dtype(params[path].dtype) for path in weights}, {dtype})
    places = {name: (path, at) for path, w in weights.items() for name, at in tensors_of(w, params[path].shape)}
    shapes = {name: file_shape(weights[path], params[path].shape) for name, (path, _) in places.items()}
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    files, total = _cut_into_files(sizes, max_shard_bytes), sum(sizes.values())
    config = {key: value for key, value in hf_config.items() if key not in ("dtype", "torch_dtype")}
    config |= {"dtype": dtype.name, "torch_dtype": dtype.name}  # transformers before 4.56 reads the second
    index = {"total_parameters": sum(map(math.prod, shapes.values())), "total_size": total}
    writes = jax.process_index() == 0
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        if writes:
            partial.mkdir(parents=True)
            if (free := shutil.disk_usage(partial).free) < total:
                raise UserError(f"{out}: needs {total / 1e9:.2f} GB, but the disk has {free / 1e9:.2f} GB left")
        for file, names in files.items():
            with open(partial / file if writes else os.devnull, "wb") as stream:
                stream.write(header_of(dtype, names, shapes, sizes))
                for name in names:
                    path, leading = places[name]
                    tensor, shape = fetch(params[path], leading), shapes[name]
                    linear = weights[path].kind == "linear"
                    tensor = tensor.reshape(shape[::-1]).T if linear else tensor.reshape(shape)
                    for start in range(0, len(tensor), _TILE):
                        stream.write(_bits(cast(_contiguous(tensor[start : start + _TILE]), dtype, name)).data)
                stream.flush()
                if writes:
                    os.fsync(stream.fileno())  # or the rename below may reach the disk before the data
        if writes:
            if len(files) > 1:
                weight_map = {name: file for file, names in files.items() for name in names}
                write_json(partial / INDEX, {"metadata": index, "weight_map": weight_map})
            write_json(partial / "config.json", config)
            if tokenizer_folder is not None:
                copy_tokenizer(tokenizer_folder, partial)
            os.replace(partial, out)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            need = f"{total / 1e9:.2f} GB"
            raise UserError(f"{out}: the disk is full; the export needs {need}. Nothing is left there.") from None
        raise
    finally:
        if writes:
            shutil.rmtree(partial, ignore_errors=True)
    return out


def copy_tokenizer(source, destination) -> list[str]:
    """Copies the tokenizer's files and generation_config.json, and returns their names. Code stays behind."""
    names = [name for name in TOKENIZER_FILES if (Path(source) / name).is_file()]
    for name in names:
        shutil.copyfile(Path(source) / name, Path(destination) / name)
    if not {"tokenizer.json", "tokenizer.model", "vocab.json"} & {*names}:
        logger.info("%s: no tokenizer there, so none was copied", source)
    return names


def _cut_into_files(sizes: dict[str, int], limit: int) -> dict[str, list[str]]:
    """{file: its tensors, by name}, layer after layer; a tensor above the limit gets a file of its own."""
    groups, held = [[]], 0
    for name in sorted(sizes, key=natural_order):
        if groups[-1] and held + sizes[name] > limit:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += sizes[name]
    if len(groups) == 1:
        return {SINGLE: sorted(groups[0])}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": sorted(names) for i, names in enumerate(groups, 1)}


def natural_order(name: str) -> list:
    """Key that sorts layer 2 before layer 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def header_of(dtype: np.dtype, names: list[str], shapes: dict, sizes: dict) -> bytes:
    (dtype_name,) = (name for name, known in DTYPES.items() if known == dtype)
    entries, begin = {"__metadata__": {"format": "pt"}}, 0
    for name in names:
        end = begin + sizes[name]
        entries[name] = {"dtype": dtype_name, "shape": list(shapes[name]), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts at a multiple of 8 bytes
    return struct.pack("<Q", len(text)) + text


_take = jax.jit(lambda array, leading: array[leading])


def fetch(array, leading: tuple[int, ...]) -> np.ndarray:
    """One tensor of a parameter in host memory. It is cut out on the devices, so that `array` caches no host copy."""
    if isinstance(array, np.ndarray):
        return array[leading]
    tensor = _take(array, tuple(np.int32(i) for i in leading))
    if tensor.is_fully_addressable:
        return np.asarray(tensor)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(tensor, tiled=True)


def tensors_of(weight, shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name in the file, leading indices in the parameter) of every tensor that a parameter of `shape` is made of."""
    fields = re.findall(r"\{(\w+)\}", weight.name)
    for leading in np.ndindex(*shape[: len(fields)]):
        yield weight.name.format(**dict(zip(fields, leading, strict=True))), leading


def _file_order(weight, rank: int) -> list[int]:
    """Order of a tensor's dims in the file: linear weights are [outputs, inputs] there and [*inputs, *outputs] here."""
    first = weight.num_inputs if weight.kind == "linear" else 0
    return [*range(first, rank), *range(first)]


def file_shape(weight, shape) -> tuple[int, ...]:
    """Shape in the file of one tensor of a parameter of `shape`: linear weights are matrices, biases vectors."""
    shape = tuple(shape[weight.name.count("{") :])
    if weight.kind == "linear":
        return math.prod(shape[weight.num_inputs :]), math.prod(shape[: weight.num_inputs])
    return (math.prod(shape),) if weight.name.endswith(".bias") else shape


def cast(block: np.ndarray, dtype, name: str) -> np.ndarray:
    """`block` in `dtype`, rounded to nearest even. UserError if a finite value becomes infinite."""
    if block.dtype == dtype:
        return block
    with np.errstate(over="ignore"):
        result = block.astype(dtype)
    if has_nonfinite(result) and (lost := np.isinf(result) & np.isfinite(block)).any():
        raise UserError(
            f"{name}: {float(block[lost][0]):.4g} would become infinite in {result.dtype.name}, whose largest value is "
            f"{float(ml_dtypes.finfo(dtype).max):.4g}. Choose bfloat16 or float32."
        )
    return result


def _warn_of_rounding(where: Path, sources: set, targets: set) -> None:
    """float32 is rounded by whoever asks for less; that one 16-bit float loses bits as another is less well known."""
    if DTYPES["F16"] in sources and DTYPES["BF16"] in targets:
        logger.warning("%s: float16 weights lose 3 of 11 bits as bfloat16; float32 would keep them", where)


def _bits(array: np.ndarray) -> np.ndarray:
    """The same memory as unsigned integers, which numpy copies without the interpreter lock and compares by bits."""
    return array.view(f"u{array.dtype.itemsize}")


def has_nonfinite(array: np.ndarray) -> bool:
    """Whether NaN or an infinity is in a non-empty array, by two fast maxima: seen as integers, they are the largest of
    their sign."""
    infinity, negative_infinity = (int(_bits(np.array(x, array.dtype))) for x in (np.inf, -np.inf))
    unsigned = _bits(array)
    return bool(unsigned.view(f"i{array.dtype.itemsize}").max() >= infinity or unsigned.max() >= negative_infinity)


def _contiguous(rows: np.ndarray) -> np.ndarray:
    """`rows` in C order."""
    if rows.flags.c_contiguous:
        return rows
    result = np.empty(rows.shape, rows.dtype)
    for start in range(0, rows.shape[-1], _TILE):
        result[..., start : start + _TILE] = rows[..., start : start + _TILE]
    return result


def _equal(a: Tensor, b: Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    pairs = zip(a.blocks(a.shape[0]), b.blocks(b.shape[0]), strict=True)
    return all(np.array_equal(_bits(x), _bits(y)) for (_, x), (_, y) in pairs)


def _aligned_empty(shape, dtype) -> np.ndarray:
    """Uninitialised, at a multiple of 64 bytes: XLA on a CPU then takes the memory over instead of copying it."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def existing_folder(folder) -> Path:
    folder = Path(folder)
    if not folder.is_dir():
        fault = "is a file" if folder.exists() else "does not exist"
        raise UserError(f"{folder}: {fault}; wanted the folder of a Hugging Face model")
    return folder


def read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: wanted a JSON object, got {type(value).__name__}")
    return value


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def contents(folder: Path) -> str:
    return some(sorted(path.name for path in folder.iterdir()))


def some(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return (", ".join(names[:_LISTED]) or "nothing") + more


def listing(names: list[str]) -> str:
    more = [f"and {len(names) - _LISTED} more"] if len(names) > _LISTED else []
    return "\n".join(f"  {name}" for name in names[:_LISTED] + more)
