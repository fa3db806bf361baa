"""LoRA adapters as PEFT keeps them in folders (adapter_config.json, adapter_model.safetensors): in, out, and merged into their base.

An adapted weight W [*inputs, *outputs] with path P/kernel (the router: P) has two float32 parameters, stacked as W is: P/lora_a [*inputs, r] and P/lora_b
[r, *outputs] (the router's: P_lora_a, P_lora_b). y = x W + s (x A) B with s = alpha / r, or alpha / sqrt(r) with use_rslora (arXiv 2106.09685, 2312.03732).
PEFT's lora_A [r, in] and lora_B [out, r] are their transposes.

Read are Llama's and Mistral's folders and both layouts of Mixtral's experts: one adapter per expert and matrix (block_sparse_moe.experts.E.w1, what PEFT with
transformers 4 wrote), and target_parameters (PEFT 0.21 with transformers 5), two wrappers around mlp.experts, the inner one (base_layer) of gate_up_proj and
the outer one of down_proj; a lone one has no base_layer. There lora_A is [experts * r, in], expert after expert, and lora_B [out, r * experts], the experts
innermost; gate and up share A. Written is the first layout, which old and new PEFT read.

One rank and one alpha serve all weights here. Where a folder has several (rank_pattern, alpha_pattern), the function stays the same: lower ranks are filled up
with zeros in A and in B, which have no gradient and stay zero, and so are layers without an adapter; a weight with a scale of its own has scale / s folded
into B, which is one rounding, and none for powers of two. Further training then moves that B at another rate, so it is a warning.

Not here: pickles (they run code), adapters of the embedding or lm_head, variants of LoRA, which are refused by name. The whole adapter is in host memory: for
Mixtral 8x7B at r = 16 that is 1 GB.
"""

import functools
import json
import logging
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxllm import hf
from jaxllm.models.decoder import HfWeight
from jaxllm.section import UserError

logger = logging.getLogger(__name__)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MOE = ".block_sparse_moe."
_ALL = "all-linear"
_READ = {"r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "target_parameters", "exclude_modules",
         "layers_to_transform", "layers_pattern", "base_model_name_or_path", "peft_type", "task_type", "init_lora_weights", "bias"}  # fmt: skip
# Without influence on what the adapter computes. megatron_core and qalora_group_size serve megatron_config and use_qalora, which are refused.
_IGNORED = {"auto_mapping", "inference_mode", "peft_version", "revision", "runtime_config", "megatron_core", "qalora_group_size"}  # fmt: skip
# How A was drawn is past. All others (pissa, olora, corda, loftq, lora_ga, eva) name a method that may have changed the base's weights as well.
_DRAWN = (None, True, False, "gaussian", "orthogonal")


class Settings(NamedTuple):
    """What an adapter is beside its arrays. target_modules: names as in `targets`; base: base_model_name_or_path, as the folder says it."""

    rank: int
    alpha: float
    use_rslora: bool = False
    target_modules: tuple[str, ...] = ()
    dropout: float = 0.0
    base: str | None = None

    @property
    def scale(self) -> float:
        """What x A B is multiplied by."""
        return _scale(self.alpha, self.rank, self.use_rslora)


def _scale(alpha: float, rank: int, use_rslora: bool) -> float:
    return alpha / (math.sqrt(rank) if use_rslora else rank)


def targets(weights: Mapping[str, HfWeight]) -> dict[str, str]:
    """{path: its name among target_modules} of the weights that can be adapted: q_proj, ..., down_proj, of Mixtral also router."""
    adaptable = (path for path, weight in weights.items() if weight.kind == "linear" and "{layer}" in weight.name)
    return {path: path.removesuffix("/kernel").rpartition("/")[2] for path in adaptable}


def paths(path: str) -> tuple[str, str]:
    """Paths of A and of B of the weight at `path`."""
    prefix = path.removesuffix("kernel") if path.endswith("/kernel") else path + "_"
    return prefix + "lora_a", prefix + "lora_b"


def hf_weights(weights: Mapping[str, HfWeight]) -> dict[str, HfWeight]:
    """{path: tensor in PEFT's folder} of A and B of all weights that can be adapted, in the layout of one adapter per matrix."""
    table = {}
    for path in targets(weights):
        module = _PREFIX + weights[path].name.removesuffix(".weight")
        a, b = paths(path)
        table[a] = HfWeight(module + ".lora_A.weight", "linear", weights[path].num_inputs)
        table[b] = HfWeight(module + ".lora_B.weight", "linear", 1)
    return table


# --- in ---------------------------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """Where the adapter of one matrix lies in the file, and its scale: `module`'s tensors, of which it is the `expert`-th of `experts`, and those of `ranks`
    among the `rank` components of each. half: 0 or 1 where gate (0) and up (1) share the outputs, else None. key: what patterns are compared with."""

    key: str
    module: str
    scale: float
    rank: int
    ranks: slice
    expert: int = 0
    experts: int = 1
    half: int | None = None

    def shapes(self, inputs: int, outputs: int) -> dict[str, tuple[int, int]]:
        outputs *= 1 if self.half is None else 2
        width = self.rank * self.experts
        return {self.module + ".lora_A.weight": (width, inputs), self.module + ".lora_B.weight": (outputs, width)}

    def take(self, array) -> tuple[np.ndarray, np.ndarray]:
        """A [r, in] and B [out, r]. array: gives a tensor by its name."""
        a, b = array(self.module + ".lora_A.weight"), array(self.module + ".lora_B.weight")
        a = a.reshape(self.experts, self.rank, -1)[self.expert, self.ranks]
        b = b.reshape(len(b), self.rank, self.experts)[:, self.ranks, self.expert]
        return a, b if self.half is None else np.split(b, 2)[self.half]


def read(folder, weights: Mapping[str, HfWeight], base: Mapping) -> tuple[Settings, dict[str, np.ndarray]]:
    """Settings and {path: float32 array} of the adapter in a PEFT folder: A and B, stacked, of every weight that it adapts anywhere.

    weights: the family's table; base: {path: anything with the shape of that weight}, the adapted ones among others. UserError naming field or tensor, before
    data is read, for a folder that is damaged, does not fit the base, or whose adapter is more than this file's y = x W + s (x A) B; later for NaN, infinities,
    and values that overflow float32.

    A folder of one adapter per expert with use_rslora or patterns is read as the PEFT that wrote it computed it; PEFT 0.21 with transformers 5 reads another
    scale into w1 and w3, sqrt(2) times as large, and compares patterns with the names of fused weights."""
    folder = Path(folder)
    config, tensors, names = _read_config(folder), _tensors(folder), targets(weights)
    places: dict[str, dict[tuple, _Place]] = {}  # of each adapted path, by the leading indices of the matrix
    for path in names:
        shape = base[path].shape
        named = {at: name.removesuffix(".weight") for name, at in hf.tensors_of(weights[path], shape)}
        if found := {at: place for at, name in named.items() if (place := _place(config, name, shape, at))}:
            places[path] = found
    _check_fit(folder, config, tensors, places, weights, base)
    bad = set()

    @functools.lru_cache(maxsize=2)  # fused experts come out of one pair of tensors
    def array(name):
        ((_, flat),) = tensors[name].blocks(1)
        if hf.has_nonfinite(flat):
            bad.add(name)
        return hf.cast(flat, np.dtype(np.float32), name).reshape(tensors[name].shape)

    places = _halved(config, places, array)
    every = [place for mine in places.values() for place in mine.values()]
    usual = _scale(config["lora_alpha"], config["r"], config["use_rslora"])
    counts = Counter(place.scale for place in every)
    scale = max(counts, key=lambda s: (counts[s], s == usual))
    ranks = {place.ranks.stop - place.ranks.start for place in every}
    rank, arrays, idle, folded = max(ranks), {}, [], {}
    for path, mine in places.items():
        leading, inputs, outputs = _dims(weights[path], base[path].shape)
        a, b = (np.zeros((*leading, *shape), np.float32) for shape in ((*inputs, rank), (rank, *outputs)))
        for at, place in mine.items():
            their_a, their_b = place.take(array)
            a[at][..., : len(their_a)] = their_a.T.reshape(*inputs, -1)
            b[at][: len(their_a)] = their_b.T.reshape(-1, *outputs)
            if place.scale != scale:
                b[at] *= np.float32(place.scale / scale)
                folded[names[path]] = None
        arrays |= dict(zip(paths(path), (a, b), strict=True))
        if not (a.any() or b.any()):
            idle.append(path)
    if idle and len(idle) < len(places):  # as `write` adds them to experts
        logger.info("%s: left out, for they are zeros and would remain so: %s", folder, ", ".join(idle))
        arrays = {own: array for own, array in arrays.items() if not any(own in paths(path) for path in idle)}
    if bad:
        listed = hf.some(sorted(bad, key=hf.natural_order))
        raise UserError(f"{folder}: {len(bad)} tensors hold NaN or infinite values: {listed}; get a sound copy")
    if len(ranks) > 1:
        logger.info("%s: ranks %s; the lower ones are filled up with zeros to %d", folder, sorted(ranks), rank)
    if folded:
        logger.warning(
            "%s: scales other than %g, of %s, are folded into their lora_b: the adapter computes the same, but further training moves these at another rate",
            folder, scale, ", ".join(folded),
        )  # fmt: skip
    alpha = config["lora_alpha"]
    if (rank, scale) != (config["r"], usual):
        alpha = scale * (math.sqrt(rank) if config["use_rslora"] else rank)
    adapted = tuple(name for path, name in names.items() if paths(path)[0] in arrays)
    own = config["use_rslora"], adapted, float(config["lora_dropout"]), config.get("base_model_name_or_path")
    return Settings(rank, float(alpha), *own), arrays


def _read_config(folder: Path) -> dict:
    """adapter_config.json with the defaults of absent fields, all of which is honoured or refused."""
    path = hf.existing_folder(folder) / CONFIG
    if not path.is_file():
        raise UserError(f"{folder}: no {CONFIG}, so no PEFT adapter folder. It holds: {hf.contents(folder)}")
    config = {"use_rslora": False, "lora_dropout": 0.0, "bias": "none"} | hf.read_json(path)

    def refuse(key, why):
        raise UserError(f"{path}: {key} = {json.dumps(config.get(key))}: {why}")

    if config.get("peft_type") != "LORA":
        refuse(
            "peft_type", "only LORA adapters are supported; merge this one into its base with PEFT, and use that model"
        )
    if config.get("task_type") not in ("CAUSAL_LM", None):
        refuse("task_type", "only CAUSAL_LM adapters are supported")
    if config["bias"] != "none":
        refuse("bias", 'adapters with biases are not supported, only "none"; merge it with PEFT, and use that model')
    if config.get("init_lora_weights") not in _DRAWN:
        refuse(
            "init_lora_weights",
            "such a method may have changed the base's weights, which this folder does not hold. Save it as a plain adapter "
            "(path_initial_model_for_weight_conversion of PEFT's save_pretrained), or merge it with PEFT and use that model",
        )
    for key in sorted(config.keys() - _READ - _IGNORED):
        if not (config[key] is None or config[key] is False or config[key] in ([], {})):
            refuse(
                key,
                "not supported, or unknown to jaxllm. If it does not change what the adapter computes, remove it; else merge it with PEFT, and use that model",
            )
    positive = lambda value, *kinds: type(value) in kinds and 0 < value < math.inf
    for key in ("r", "lora_alpha"):
        if not positive(config.get(key), int, *([float] if key == "lora_alpha" else [])):
            refuse(key, "wanted a positive number" + (", a whole one" if key == "r" else ""))
    for key in ("rank_pattern", "alpha_pattern"):
        config[key] = {} if config.get(key) is None else config[key]
        kinds = (int,) if key == "rank_pattern" else (int, float)
        if not isinstance(config[key], dict) or not all(positive(value, *kinds) for value in config[key].values()):
            refuse(key, "wanted an object from regular expressions to positive numbers")
    if not isinstance(config.get("base_model_name_or_path"), str | None):
        refuse("base_model_name_or_path", "wanted a name")
    if not isinstance(config["use_rslora"], bool):
        refuse("use_rslora", "wanted true or false")
    if type(config["lora_dropout"]) not in (int, float) or not 0 <= config["lora_dropout"] < 1:
        refuse("lora_dropout", "wanted a number from 0 to 1")
    listed = lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value)
    for key in ("target_modules", "exclude_modules", "layers_pattern", "target_parameters"):
        value = config.get(key)
        if not (value is None or listed(value) or (isinstance(value, str) and key != "target_parameters")):
            refuse(key, "wanted a list of names" + ("" if key == "target_parameters" else " or a regular expression"))
    layers = config.get("layers_to_transform")
    if not (
        layers is None or type(layers) is int or (isinstance(layers, list) and all(type(i) is int for i in layers))
    ):
        refuse("layers_to_transform", "wanted a number or a list of them")
    if isinstance(config.get("target_modules"), str) and layers is not None:
        refuse(
            "layers_to_transform", "PEFT knows it with a list of target_modules alone, not with a regular expression"
        )
    if not config.get("target_modules") and not config.get("target_parameters"):
        refuse("target_modules", "neither it nor target_parameters names anything to adapt")
    # Lists of target_modules and exclude_modules are names. Flags as in (?i) may only begin an expression, and the patterns are read inside of larger ones.
    wholes = ((key, config.get(key)) for key in ("target_modules", "exclude_modules"))
    expressions = [(key, whole, whole) for key, whole in wholes if isinstance(whole, str)]
    for key in ("layers_pattern", "rank_pattern", "alpha_pattern"):
        parts = config.get(key) or ()
        expressions += [(key, part, f"({part})") for part in ([parts] if isinstance(parts, str) else parts)]
    for key, given, expression in expressions:
        try:
            re.compile(expression)
        except re.error as error:
            refuse(key, f"{given!r} is no regular expression: {error}")
    return config


def _tensors(folder: Path) -> dict[str, hf.Tensor]:
    if (folder / WEIGHTS).is_file():
        return hf.read_header(folder / WEIGHTS)
    if pickles := sorted(
        path.name for path in folder.glob("adapter_model.*") if path.suffix in (".bin", ".pt", ".pth")
    ):
        raise UserError(
            f"{folder}: holds its weights only as pickle ({hf.some(pickles)}). Loading a pickle runs whatever code is in it, so it is never opened here. "
            f"Convert it without running that code, and use the {WEIGHTS} that this writes:\n"
            f'  python -c "import torch; from safetensors.torch import save_file; d = torch.load({pickles[0]!r}, weights_only=True); '
            f'save_file({{k: v.contiguous() for k, v in d.items()}}, {WEIGHTS!r})"'
        )
    raise UserError(f"{folder}: no {WEIGHTS} there. It holds: {hf.contents(folder)}")


def _place(config: dict, module: str, shape: tuple[int, ...], leading: tuple[int, ...]) -> _Place | None:
    """Where the adapter of the matrix `module` (transformers 4's name) should be by adapter_config.json, None if it has none. shape: of the parameter that the
    matrix is number `leading` of."""
    block, is_moe, inner = module.partition(_MOE)
    parameter = module + ".weight"
    if is_moe and inner == "gate":
        parameter = f"{block}.mlp.gate.weight"
    elif is_moe:
        matrix = inner.rpartition(".")[2]
        parameter = f"{block}.mlp.experts.{'down_proj' if matrix == 'w2' else 'gate_up_proj'}"
    by_parameter = _parameter_is_targeted(config, parameter)
    if not by_parameter and not _module_is_targeted(config, module):
        return None
    key = parameter if by_parameter else module
    rank = _by_pattern(config["rank_pattern"], key, config["r"])
    alpha = _by_pattern(config["alpha_pattern"], key, config["lora_alpha"])
    scale, ranks = _scale(alpha, rank, config["use_rslora"]), slice(0, rank)
    if not by_parameter or parameter.endswith(".weight"):
        return _Place(key, _PREFIX + key.removesuffix(".weight"), scale, rank, ranks)
    wrapper = f"{_PREFIX}{block}.mlp.experts"
    half = {"w1": 0, "w3": 1}.get(matrix)
    if half is not None and _parameter_is_targeted(config, f"{block}.mlp.experts.down_proj"):
        wrapper += ".base_layer"
    return _Place(key, wrapper, scale, rank, ranks, leading[1], shape[1], half)


def _parameter_is_targeted(config: dict, name: str) -> bool:
    return any(name == target or name.endswith("." + target) for target in config.get("target_parameters") or ())


def _module_is_targeted(config: dict, name: str) -> bool:
    """As `check_target_module_exists` of PEFT 0.21 decides it."""
    is_among = lambda names: name in names or any(name.endswith("." + one) for one in names)
    chosen, excluded = config.get("target_modules"), config.get("exclude_modules")
    if excluded and (re.fullmatch(excluded, name) if isinstance(excluded, str) else is_among(excluded)):
        return False
    if isinstance(chosen, str):
        return chosen.lower() == _ALL or re.fullmatch(chosen, name) is not None
    if not chosen or not is_among(chosen):
        return False
    layers = config.get("layers_to_transform")
    if name in chosen or layers is None or layers == []:
        return True
    within = config.get("layers_pattern") or r"[^.]*"
    within = [within] if isinstance(within, str) else within
    matches = (re.match(rf"(?:^|.*?\.)({part})\.(?P<layer>\d+)\.", name) for part in within)
    found = next((match for match in matches if match), None)
    return found is not None and int(found["layer"]) in ([layers] if isinstance(layers, int) else layers)


def _by_pattern(patterns: dict, key: str, default):
    return next((value for pattern, value in patterns.items() if _matches(pattern, key)), default)


def _matches(pattern: str, key: str) -> bool:
    """Whether it is `key`, or its end after a dot, as PEFT's `get_pattern_key` has it."""
    return re.match(rf"(.*\.)?({pattern})$", key) is not None


def _halved(config: dict, places: dict, array) -> dict:
    """PEFT makes of w1 and w3 one adapter of gate_up_proj with twice the rank, whose A is theirs, one above the other, and whose B has theirs as blocks on its
    diagonal. Where no training has filled the rest of B, they are taken apart again, and keep their rank."""
    fused = [place for mine in places.values() for place in mine.values() if place.half is not None]
    if any(place.rank != 2 * config["r"] for place in fused):
        return places
    for module in dict.fromkeys(place.module for place in fused):
        b = array(module + ".lora_B.weight")
        b = b.reshape(2, len(b) // 2, 2, -1)  # half of the outputs, output, half of the ranks, rank and expert
        if b[0, :, 1].any() or b[1, :, 0].any():
            return places

    def own(place):
        first = 0 if place.half is None else place.half * place.rank // 2
        return place if place.half is None else place._replace(ranks=slice(first, first + place.rank // 2))

    return {path: {at: own(place) for at, place in mine.items()} for path, mine in places.items()}


def _check_fit(folder: Path, config: dict, tensors: dict, places: dict, weights: Mapping, base: Mapping) -> None:
    """UserError with everything that is missing, unexpected or misshapen; a warning of patterns that nothing matches."""
    if not places:
        raise UserError(
            f"{folder / CONFIG}: target_modules and target_parameters name none of {', '.join(targets(weights).values())}"
        )
    wanted = {}
    for path, mine in places.items():
        _, inputs, outputs = _dims(weights[path], base[path].shape)
        for place in mine.values():
            wanted |= place.shapes(math.prod(inputs), math.prod(outputs))
    report = {
        "missing": [name for name in wanted if name not in tensors],
        f"unexpected: no weight that {CONFIG} names reads them": [name for name in tensors if name not in wanted],
        f"of another shape than {CONFIG} and the base model say": [
            f"{name}: found {list(tensors[name].shape)}, wanted {list(shape)}"
            for name, shape in wanted.items()
            if name in tensors and tensors[name].shape != shape
        ],
        f"of a dtype other than {', '.join(hf.DTYPES)}": [
            f"{name}: {tensors[name].dtype}"
            for name in wanted
            if name in tensors and tensors[name].dtype not in hf.DTYPES
        ],
    }
    if any(report.values()):
        lines = [
            f"{len(names)} tensors {what}:\n{hf.listing(sorted(names, key=hf.natural_order))}"
            for what, names in report.items()
            if names
        ]
        raise UserError(
            f"{folder}: the adapter does not fit {CONFIG} and the base model\n"
            + "\n".join(lines)
            + "\nNothing was read. Take the adapter's own base "
            f"model (its folder names {json.dumps(config.get('base_model_name_or_path'))}), or fetch the adapter again."
        )
    keys = {place.key for mine in places.values() for place in mine.values()}
    for field in ("rank_pattern", "alpha_pattern"):
        if idle := [pattern for pattern in config[field] if not any(_matches(pattern, key) for key in keys)]:
            logger.warning("%s: %s: nothing adapted matches %s", folder / CONFIG, field, ", ".join(map(repr, idle)))


def _dims(weight: HfWeight, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Leading dims (layers, experts), inputs and outputs of a parameter of `shape`."""
    first = weight.name.count("{")
    second = first + weight.num_inputs
    return shape[:first], shape[first:second], shape[second:]


# --- out --------------------------------------------------------------------------------------------------------------


def write(out, weights: Mapping[str, HfWeight], settings, arrays: Mapping, base: str) -> Path:
    """Writes a PEFT folder, float32, that PEFT opens on `base`, a folder or hub name. Returns its path.

    weights: the family's table; settings: `Settings`, or what has rank, alpha, use_rslora and dropout; arrays: {path: A or B, stacked}, in numpy or on devices,
    which they leave one matrix at a time. With several processes all must call; process 0 writes. UserError if `out` exists and is not empty.

    What PEFT gets is what it reads rightly, old and new. use_rslora is off, with alpha times sqrt(rank) instead: PEFT 0.4 passes over it, and 0.21 with
    transformers 5, which fuses Mixtral's w1 and w3 as it reads, doubles their rank and alpha, which is right for alpha / rank alone. Where experts or router
    are adapted, dropout is 0, as it refuses any other there. Of w1, w2 and w3 those without an adapter get one of zeros if w1 or w3 has one: alone it refuses
    either, and without w2 it leaves both at zero. (`read` leaves such zeros out.)"""
    out = Path(out).absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: already exists, and nothing is written over it. Name another folder, or move it away.")
    table, places, shapes, modules = hf_weights(weights), {}, {}, []
    adapted = {path for path in targets(weights) if paths(path)[0] in arrays}
    assert arrays.keys() == {own for path in adapted for own in paths(path)} != set(), sorted(arrays)
    zeros = _zeros(weights, arrays)
    if zeros:
        logger.info(
            "%s: zeros are written for %s, without which new PEFT does not read the experts", out, sorted(zeros)
        )
    for path in targets(weights):
        if path not in adapted and paths(path)[0] not in zeros:
            continue
        modules.append(weights[path].name.removesuffix(".weight").rpartition(".")[2])
        for own, rank_dim in zip(paths(path), (-1, weights[path].name.count("{")), strict=True):
            array = arrays[own] if path in adapted else zeros[own]
            assert array.shape[rank_dim] == settings.rank, f"{own} {array.shape} is not of rank {settings.rank}"
            for name, leading in hf.tensors_of(table[own], array.shape):
                places[name] = array, leading
                shapes[name] = hf.file_shape(table[own], array.shape)
    names = sorted(places, key=hf.natural_order)
    sizes = {name: 4 * math.prod(shape) for name, shape in shapes.items()}
    partial, writes = out.with_name(f".{out.name}.partial-{os.getpid()}"), jax.process_index() == 0
    try:
        if writes:
            partial.mkdir(parents=True)
        with open(partial / WEIGHTS if writes else os.devnull, "wb") as stream:
            stream.write(hf.header_of(np.dtype(np.float32), names, shapes, sizes))
            for name in names:
                array, leading = places[name]
                matrix = hf.fetch(array, leading).reshape(shapes[name][::-1]).T
                stream.write(np.ascontiguousarray(matrix, np.float32).data)
            stream.flush()
            if writes:
                os.fsync(stream.fileno())  # or the rename below may reach the disk before the data
        if writes:
            hf.write_json(partial / CONFIG, _config(settings, modules, any(_MOE in name for name in names), base))
            os.replace(partial, out)
    finally:
        if writes:
            shutil.rmtree(partial, ignore_errors=True)
    return out


def _zeros(weights: Mapping[str, HfWeight], arrays: Mapping) -> dict[str, np.ndarray]:
    """{path: zeros} of the A and B that `write` adds to those of w1 or w3; they take no memory."""
    found = {weights[path].name.removesuffix(".weight").rpartition(".")[2]: path for path in targets(weights)}
    experts = [found[name] for name in ("w1", "w3", "w2") if name in found]
    adapted = [path for path in experts if paths(path)[0] in arrays]
    if not {*adapted} & {*experts[:2]}:
        return {}
    (*leading, inputs, rank), (*_, outputs) = (arrays[own].shape for own in paths(adapted[0]))
    shape_of = lambda into, out: ((*leading, into, rank), (*leading, rank, out))
    zeros = {}
    for path in set(experts) - set(adapted):
        shapes = shape_of(outputs, inputs) if path == found["w2"] else shape_of(inputs, outputs)
        zeros |= {own: np.broadcast_to(np.float32(0), shape) for own, shape in zip(paths(path), shapes, strict=True)}
    return zeros


def _config(settings, modules: list[str], is_moe: bool, base: str) -> dict:
    """adapter_config.json, of fields that PEFT 0.4 knows: it passes over others without a word."""
    alpha = settings.alpha * (math.sqrt(settings.rank) if settings.use_rslora else 1)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0 if is_moe else settings.dropout,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }


# --- merged -----------------------------------------------------------------------------------------------------------


def merge(kernel, a, b, scale: float) -> np.ndarray:
    """W + scale * A B, of one matrix or of all that are stacked: kernel [*leading, *inputs, *outputs], a [*leading, *inputs, r], b [*leading, r, *outputs].

    In numpy and in the kernel's dtype, rounded once from float32; a matrix at a time, so that this needs no more memory than the result. UserError where shapes
    do not fit, and where a sum is infinite in that dtype though its terms are finite."""
    kernel, a, b = (np.asarray(array) for array in (kernel, a, b))
    num_leading = a.ndim + b.ndim - kernel.ndim - 2
    leading, rank = kernel.shape[: max(num_leading, 0)], a.shape[-1]
    if (
        num_leading < 0
        or (*a.shape[:-1], *b.shape[num_leading + 1 :]) != kernel.shape
        or b.shape[: num_leading + 1] != (*leading, rank)
    ):
        raise UserError(
            f"adapter with A {list(a.shape)} and B {list(b.shape)} does not fit a weight {list(kernel.shape)}; take the adapter's own base model"
        )
    merged = np.empty_like(kernel)
    for at in np.ndindex(*leading):
        scaled = np.float32(scale) * b[at].reshape(rank, -1).astype(np.float32)
        total = (a[at].reshape(-1, rank).astype(np.float32) @ scaled).reshape(kernel[at].shape)
        total += kernel[at].astype(np.float32, copy=False)
        merged[at] = hf.cast(total, kernel.dtype, "merged weight")
    return merged


def merge_params(params: Mapping, arrays: Mapping, scale: float) -> tuple[dict, int]:
    """(`params` with all adapters of `arrays` merged in, how many matrices were). params: {path: array}; arrays: {path: A or B, stacked}.

    UserError for an adapter whose weight is not among `params`, or of another shape."""
    merged, count, left = dict(params), 0, set(arrays)
    for path in params:
        a, b = paths(path)
        if a not in arrays or b not in arrays:
            continue
        try:
            merged[path] = merge(params[path], arrays[a], arrays[b], scale)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        count += math.prod(arrays[a].shape[: arrays[a].ndim + arrays[b].ndim - params[path].ndim - 2])
        left -= {a, b}
    if left:
        raise UserError(f"the model has no weights for {hf.some(sorted(left))}; take the adapter's own base model")
    return merged, count
