"""The whole configuration of a run: TOML in, one frozen validated `Config` out, and messages that name the key, the
place and the way out.

    config = load_config("configs/quickstart.toml", "optimizer.learning_rate=1e-3", "mesh.data=4")

A file may say `extends = "other.toml"` (relative to itself, one level), and overrides are `section.field=value` with
TOML values, where a bare word is a string. If `model.path` names a Hugging Face folder (or a name on the hub), its
config.json fills the model section. Every value remembers where it came from. Section classes live beside the code they
configure; this file only lists them and checks what concerns several of them. Not here: a search path for configs,
interpolation, environment variables, more than one level of `extends`.

For an editor with a TOML language server: `python -m jaxllm.config --schema > config.schema.json`, and as the first
line of a TOML file `#:schema ./config.schema.json`, give completion, descriptions and errors while typing.
"""

import argparse
import difflib
import functools
import json
import logging
import math
import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pydantic

from jaxllm import bnb, fp8, lora
from jaxllm.attention import AttentionConfig
from jaxllm.checkpoint import CheckpointConfig
from jaxllm.data import DataConfig, EvaluationConfig, packing_of
from jaxllm.hub import resolve_model_path
from jaxllm.linear import PrecisionConfig
from jaxllm.lora import LoRAConfig
from jaxllm.loss import LossConfig
from jaxllm.metrics import LoggingConfig
from jaxllm.models import FAMILIES
from jaxllm.models.decoder import ModelConfig
from jaxllm.moe import MoEConfig
from jaxllm.moe import check as moe_conflicts
from jaxllm.optim import OptimizerConfig, learning_rate
from jaxllm.section import Section, UserError
from jaxllm.sharding import AXES, BATCH, MeshConfig


class Config(Section):
    """A run. Two configs are equal if they dump to the same TOML; where their values came from does not count."""

    output_dir: str = "runs/default"
    """Folder of this run: metrics, checkpoints, the resolved config, the tokenizer and the export."""
    seed: int = pydantic.Field(0, ge=0, lt=2**31)
    """Seed of initial weights, data order and dropout."""
    steps: int = pydantic.Field(1000, ge=1)
    """Optimizer steps in total; a resumed run counts on from where it was."""
    model: ModelConfig = pydantic.Field(default_factory=ModelConfig)
    mesh: MeshConfig = pydantic.Field(default_factory=MeshConfig)
    precision: PrecisionConfig = pydantic.Field(default_factory=PrecisionConfig)
    lora: LoRAConfig = pydantic.Field(default_factory=LoRAConfig)
    attention: AttentionConfig = pydantic.Field(default_factory=AttentionConfig)
    moe: MoEConfig = pydantic.Field(default_factory=MoEConfig)
    loss: LossConfig = pydantic.Field(default_factory=LossConfig)
    optimizer: OptimizerConfig = pydantic.Field(default_factory=OptimizerConfig)
    data: DataConfig = pydantic.Field(default_factory=DataConfig)
    evaluation: EvaluationConfig = pydantic.Field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = pydantic.Field(default_factory=CheckpointConfig)
    logging: LoggingConfig = pydantic.Field(default_factory=LoggingConfig)

    _sources: dict[tuple[str, ...], str] = pydantic.PrivateAttr(default_factory=dict)

    @pydantic.model_validator(mode="after")
    def _sections_agree(self):
        if conflicts := _conflicts(self, num_devices=None):
            raise UserError("\n".join(conflicts))
        return self

    @property
    def rows_per_microbatch(self) -> int:
        """Rows that are differentiated at a time, over all devices."""
        return self.data.global_batch_size // self.optimizer.num_microbatches

    def __eq__(self, other):
        return isinstance(other, Config) and dump(self) == dump(other)

    def __hash__(self):
        return hash(dump(self))


logger = logging.getLogger(__name__)
Key = tuple[str, ...]  # ("optimizer", "learning_rate")
COMMAND_LINE = "command line"


class Setting(NamedTuple):
    value: Any
    source: str  # COMMAND_LINE, "file.toml:12" or ".../config.json"


# --- reading ---------------------------------------------------------------------------------------------------------


def load_config(path: str | Path | None, *overrides: str, resolve_path: bool = True) -> Config:
    """The config in the TOML file at `path` (None: defaults) with `overrides` such as "mesh.data=4" on top.

    With `model.path` set, the model section is filled from the config.json (or config.toml) there. `resolve_path=False`
    reads a config that was saved already resolved, without looking for that folder again. UserError lists every problem
    of the load at once.
    """
    settings = {} if path is None else _read(Path(path))
    assignments, problems = [], []
    for override in overrides:
        try:
            assignments.append(_parse_override(override))
        except UserError as error:
            problems.append(str(error))
    wanted = {**{key: setting.value for key, setting in settings.items()}, **dict(assignments)}
    adapter, folder, unknown_model = {}, {}, False
    if resolve_path and isinstance(wanted.get(("model", "adapter")), str):
        try:
            adapter = _adapter_settings(wanted[("model", "adapter")])
        except UserError as error:
            problems.append(str(error))
    if resolve_path and isinstance(wanted.get(("model", "path")), str):
        has_rank = ("lora", "rank") in adapter or wanted.get(("lora", "rank")) is not None
        reads_bits = wanted.get(("lora", "base")) == "nf4" and has_rank
        try:
            folder = _folder_settings(wanted[("model", "path")], wanted.get(("model", "revision")), reads_bits)
        except UserError as error:
            unknown_model = True
            problems.append(str(error))
    settings = {**folder, **adapter, **settings}
    for key, value in assignments:
        _assign(settings, key, value)
    if ("model", "revision") in folder:  # the commit that was found, also where a branch was asked for
        settings["model", "revision"] = folder["model", "revision"]
    problems += _contradictions(folder, settings) + _unknown_keys(settings)
    rope, longest = ("model", "rope_parameters"), ("model", "max_position_embeddings")
    if longest in folder and settings[longest].value != folder[longest].value and settings[rope] == folder.get(rope):
        given, own = settings[longest], folder[longest].value
        if isinstance(given.value, int) and given.value > own:
            problems.append(
                f"model.max_position_embeddings: {given.value} ({given.source}) is more than the {own} of {folder[longest].source}; positions behind "
                "those mean nothing to this model unless model.rope_parameters are scaled with them"
            )
    for key in (rope, longest):
        if key in folder and settings[key].value != folder[key].value:
            logger.warning(
                "%s: %s (%s) replaces %s of %s; the model's positions mean something else than in its training",
                ".".join(key), _shown(settings[key].value), settings[key].source, _shown(folder[key].value), folder[key].source,
            )  # fmt: skip
    known = {key: setting for key, setting in settings.items() if key in _leaves()}
    usual, given = _leaves()["data", "seq_len"].default, known.get(longest)
    if (
        ("data", "seq_len") not in known
        and given is not None
        and isinstance(given.value, int)
        and 1 < given.value < usual
    ):
        known["data", "seq_len"] = Setting(given.value, f"model.max_position_embeddings, less than the usual {usual}")
    try:
        config = Config.model_validate(_nested(known))
    except pydantic.ValidationError as error:
        # How sections fit together is not to be said of a model that could not be read.
        raise _user_error(problems + _explained(error, known, fields_alone=unknown_model)) from None
    if problems:
        raise _user_error(problems)
    config._sources.update({key: setting.source for key, setting in known.items()})
    return config


def _read(path: Path, extended_by: Path | None = None) -> dict[Key, Setting]:
    try:
        text = path.read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except FileNotFoundError:
        near = difflib.get_close_matches(
            path.name, [other.name for other in path.parent.glob("*.toml")], n=3, cutoff=0.4
        )
        whose = f", which {extended_by} extends" if extended_by else ""
        raise UserError(
            f"{path}: no such config file{whose}" + (f"; near it there is {', '.join(near)}" if near else "")
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a config: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    base = table.pop("extends", None)
    settings = {}
    if base is not None:
        if extended_by:
            raise UserError(
                f"{path}: extends = {base!r}, but {extended_by} extends this file; only one level is allowed"
            )
        if not isinstance(base, str):
            raise UserError(f"{path}: extends must be the name of one TOML file, got {base!r}")
        settings = _read(path.parent / base, extended_by=path)
    lines = _line_numbers(text)
    for key, value in _flat(table):
        line = next((lines[key[:n]] for n in range(len(key), 0, -1) if key[:n] in lines), None)
        settings[key] = Setting(value, f"{path}:{line}" if line else str(path))
    return settings


_NAME = r"(?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')"
_DOTTED = rf"{_NAME}(?:\s*\.\s*{_NAME})*"


def _line_numbers(text: str) -> dict[Key, int]:
    """Line of each key and table header, which tomllib does not tell."""
    lines, table = {}, ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(rf"\s*\[\s*({_DOTTED})\s*\]\s*(?:#.*)?$", line):
            table = tuple(part.strip("\"'") for part in re.findall(_NAME, header[1]))
            lines.setdefault(table, number)
        elif key := re.match(rf"\s*({_DOTTED})\s*=", line):
            lines.setdefault(table + tuple(part.strip("\"'") for part in re.findall(_NAME, key[1])), number)
    return lines


def _parse_override(text: str) -> tuple[Key, Any]:
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", key.strip()):
        raise UserError(
            f"{text!r} on the command line: overrides are written section.field=value, without dashes or spaces"
        )
    try:
        parsed = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        parsed = {}
    # what is not one TOML value is a string: model.path=/x/y; whether a string is right here is the field's to judge
    return tuple(key.strip().split(".")), parsed["value"] if parsed.keys() == {"value"} else value


def _assign(settings: dict[Key, Setting], key: Key, value: Any) -> None:
    """Sets `key` from the command line; model.rope_parameters.factor=8 changes one entry of the table that is there."""
    field = next((key[:n] for n in range(1, len(key)) if key[:n] in _leaves()), key)
    if field != key:
        current = (
            settings[field].value if field in settings else _leaves()[field].get_default(call_default_factory=True)
        )
        inner = current = dict(current) if isinstance(current, dict) else {}
        for name in key[len(field) : -1]:
            inner[name] = dict(inner[name]) if isinstance(inner.get(name), dict) else {}
            inner = inner[name]
        inner[key[-1]] = value
        key, value = field, current
    settings[key] = Setting(value, COMMAND_LINE)


# --- Hugging Face folders --------------------------------------------------------------------------------------------

NOT_IN_A_FOLDER = {"path", "revision", "adapter", "remat"}
# What may differ from the folder; longer contexts are made by changing the first two, how experts are balanced by the others.
FREE_BESIDE_A_FOLDER = NOT_IN_A_FOLDER | {
    "rope_parameters", "max_position_embeddings", "router_aux_loss_coef", "router_jitter_noise",
}  # fmt: skip


def _folder_settings(path: str, revision: Any, reads_bits: bool) -> dict[Key, Setting]:
    folder, found_revision = resolve_model_path(path, revision if isinstance(revision, str) else None, weights=False)
    file = folder / "config.json"
    if not file.exists() and (saved := folder / "config.toml").exists():  # a checkpoint of jaxllm
        config = load_config(saved, resolve_path=False)
        if config.lora.rank is not None:
            raise UserError(
                f"model.path: {folder} holds adapters alone; give the model that they were trained on ({config.model.path!r}), and as model.adapter the folder "
                "that python -m jaxllm.convert to-hf makes of them"
            )
        return {
            key: Setting(value, str(saved))
            for key, value in _values(config).items()
            if key[0] == "model" and value is not None and key[-1] not in NOT_IN_A_FOLDER
        }
    try:
        hf = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"model.path: {folder} has neither config.json nor config.toml: "
            "it is no Hugging Face folder and no checkpoint of jaxllm"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"model.path: {file} cannot be read: {error}") from None
    family = hf.get("model_type") if isinstance(hf, dict) else None
    if family not in FAMILIES:
        raise UserError(f"model.path: {file} has model_type = {family!r}; supported are {', '.join(FAMILIES)}")
    try:
        if quantization := hf.pop("quantization_config", None):
            bnb.check_config(quantization, "config.json")
            if not reads_bits:
                raise UserError(
                    "config.json: quantization_config: the weights are in 4 bits (bitsandbytes NF4), which only adapters are trained on: set lora.rank and "
                    'lora.base = "nf4", or use the folder of the original float model'
                )
        fields = {**FAMILIES[family].config_from_hf(hf), "family": family}
    except UserError as error:
        raise UserError(f"model.path: {file}: {error}") from None
    if found_revision:
        fields["revision"] = found_revision
    return {("model", name): Setting(value, str(file)) for name, value in fields.items()}


def _adapter_settings(path: str) -> dict[Key, Setting]:
    file = Path(path) / "adapter_config.json"
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"model.adapter: {path!r} is no PEFT folder: {file.name} cannot be read: {error}") from None
    fields = fields if isinstance(fields, dict) else {}
    if (kind := fields.get("peft_type")) != "LORA":
        raise UserError(f"model.adapter: {file}: peft_type = {json.dumps(kind)}; only LORA adapters are supported")
    found = lora.from_peft(fields)
    return {("lora", name): Setting(value, str(file)) for name, value in found.items()}


def _contradictions(folder: dict[Key, Setting], settings: dict[Key, Setting]) -> list[str]:
    return [
        f"{'.'.join(key)}: {_shown(settings[key].value)} ({settings[key].source}), but the weights in model.path have "
        f"the shape and meaning of {key[-1]} = {_shown(given.value)} ({given.source}); remove {'.'.join(key)}, or "
        "model.path to start from random weights"
        for key, given in folder.items()
        if key[-1] not in FREE_BESIDE_A_FOLDER and settings[key].value != given.value
    ]


# --- checking --------------------------------------------------------------------------------------------------------


def check(config: Config, num_devices: int | None = None) -> None:
    """UserError if the sections do not fit each other or, when given, that number of devices. Everything here is known
    before compiling."""
    if conflicts := _conflicts(config, num_devices):
        raise _user_error(conflicts)


def _conflicts(config: Config, num_devices: int | None) -> list[str]:
    conflicts = []
    try:
        learning_rate(config.optimizer, config.steps)
    except UserError as error:
        conflicts.append(str(error))
    sizes = {axis: getattr(config.mesh, axis) for axis in AXES}
    if num_devices is not None:
        try:
            sizes = dict(zip(AXES, config.mesh.sizes(num_devices), strict=True))
        except UserError as error:
            return [*conflicts, str(error)]
    # A -1 is not known before the devices are; what the other axes demand is.
    rows = {f"mesh.{axis}": sizes[axis] for axis in BATCH if sizes[axis] != -1}
    microbatches = {"optimizer.num_microbatches": config.optimizer.num_microbatches}
    conflicts += _not_a_multiple("data.global_batch_size", config.data.global_batch_size, rows | microbatches)
    conflicts += moe_conflicts(config.moe, config.model, sizes["expert"])
    widths = {
        "model.hidden_size": config.model.hidden_size,
        "model.intermediate_size": config.model.intermediate_size,
        "model.num_attention_heads x model.head_dim": config.model.num_attention_heads * config.model.head_dim,
        "model.num_key_value_heads x model.head_dim": config.model.num_key_value_heads * config.model.head_dim,
    }
    precision, experts = config.precision, config.model.num_local_experts is not None
    conflicts += lora.check(
        config.lora, config.model.adapter, experts, {name: widths[name] for name in list(widths)[:3]}
    )
    if config.lora.rank is not None and config.checkpoint.export not in (None, "float32"):
        conflicts.append(
            f'checkpoint.export: "{config.checkpoint.export}", but adapters are written as float32, which PEFT keeps them in; set it to "float32" (python -m '
            "jaxllm.convert to-hf --merge writes merged models in any dtype)"
        )
    conflicts += fp8.check(precision.fp8, precision.matmul, config.model.num_hidden_layers, config.steps, widths)
    lengths = [("data.seq_len", config.data.seq_len, "shorten the rows")]
    if config.evaluation.prompt is not None:
        sample = "evaluation.prompt_tokens, with a prompt of at least one", config.evaluation.prompt_tokens + 1
        lengths.append((*sample, "lower evaluation.prompt_tokens"))
    for length in lengths:
        try:
            config.model.check_length(*length)
        except UserError as error:
            conflicts.append(str(error))
    if config.attention.backend == "cudnn" and packing_of(config.data) != "none":
        conflicts.append(
            f'attention.backend: "cudnn" knows no packed rows, and data.packing is "{packing_of(config.data)}"; set '
            'data.packing = "none", or choose another backend'
        )
    if config.attention.backend == "cudnn" and sizes["sequence"] > 1:
        conflicts.append(
            f'attention.backend: "cudnn" cannot split a row over mesh.sequence = {sizes["sequence"]}; choose another backend'
        )
    if config.data.packing == "first_fit" and config.data.kind in ("text", "tokens"):
        conflicts.append(
            f'data.packing: "first_fit" splits nothing, and documents of data.kind = "{config.data.kind}" may be of any '
            'length; use "concatenate" or "none"'
        )
    size = (config.data.tokenizer or "").removeprefix("bpe:")
    if size != config.data.tokenizer and size.isdecimal() and int(size) > config.model.vocab_size:
        conflicts.append(
            f"model.vocab_size: {config.model.vocab_size} rows of the embedding are too few for the {size} entries of "
            f"data.tokenizer = {config.data.tokenizer!r}; make them equal"
        )
    if config.evaluation.every:
        conflicts += _not_a_multiple("evaluation.batch_size", config.evaluation.batch_size, rows)
    return conflicts


def _not_a_multiple(name: str, value: int, factors: dict[str, int]) -> list[str]:
    divisor = math.prod(factors.values())
    if divisor < 1 or value % divisor == 0:  # sizes below 1 are the mesh's error to report
        return []
    below = value // divisor * divisor
    product = " x ".join(f"{factor} {size}" for factor, size in factors.items())
    nearest = f"{below} or {below + divisor}" if below else str(divisor)
    return [f"{name}: {value} must be a multiple of {product} = {divisor}; nearest: {nearest}"]


@functools.cache
def _leaves() -> dict[Key, pydantic.fields.FieldInfo]:
    """Every setting there is, in the order of the classes."""
    return {
        (*section, name): field
        for section, cls in _sections().items()
        for name, field in cls.model_fields.items()
        if not _is_section(field.annotation)
    }


@functools.cache
def _sections() -> dict[Key, type[Section]]:
    found, queue = {}, [((), Config)]
    for path, cls in queue:
        found[path] = cls
        queue += [
            ((*path, name), field.annotation)
            for name, field in cls.model_fields.items()
            if _is_section(field.annotation)
        ]
    return found


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _flat(table: dict, prefix: Key = ()):
    for name, value in table.items():
        path = (*prefix, name)
        if isinstance(value, dict) and value and path not in _leaves():
            yield from _flat(value, path)
        elif value != {} or path not in _sections():  # an empty [section] says nothing; an unknown one is an error
            yield path, value


def _nested(settings: dict[Key, Setting]) -> dict:
    tree = {}
    for path, setting in settings.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = setting.value
    return tree


def _unknown_keys(settings: dict[Key, Setting]) -> list[str]:
    problems = []
    for path, setting in settings.items():
        if path in _leaves():
            continue
        name, got = ".".join(path), f"got {_shown(setting.value)} ({setting.source})"
        if path in _sections():
            problems.append(
                f"{name}: is a section, {got}; write [{name}] in a file, {name}.<key>=<value> on the command line"
            )
            continue
        near = _nearest(path)
        if near and near[0][-1] == path[-1] and near[0] in _leaves():
            advice = f"it belongs in {'.'.join(near[0][:-1]) or 'no section'}: {'.'.join(near[0])}"
        elif near:
            advice = "did you mean " + " or ".join(".".join(other) for other in near) + "?"
        else:
            section = path[:-1] if path[:-1] in _sections() else ()
            inside = [other[-1] for other in (*_leaves(), *_sections()) if other and other[:-1] == section]
            advice = f"there are {', '.join(inside)}"
        problems.append(f"{name}: no such key, {got}; {advice}")
    return problems


def _nearest(path: Key) -> list[Key]:
    """Up to three right keys like this one: the name counts most, then the section."""

    def likeness(a: str, b: str) -> float:
        return difflib.SequenceMatcher(None, a, b).ratio()

    scored = []
    for other in [*_leaves(), *(section for section in _sections() if section)]:
        name = likeness(path[-1], other[-1])
        if name >= 0.6:
            scored.append((name + 0.3 * likeness(".".join(path[:-1]), ".".join(other[:-1])), other))
    scored.sort(key=lambda pair: -pair[0])
    return [other for score, other in scored[:3] if score > scored[0][0] - 0.25]


def _explained(error: pydantic.ValidationError, settings: dict[Key, Setting], fields_alone: bool) -> list[str]:
    """pydantic's errors in our words, alternatives of one key joined; fields_alone: without those of whole sections."""
    found: dict[Key, list] = {}
    problems = []
    for item in error.errors():
        loc = tuple(str(part) for part in item["loc"])
        path = next((loc[:n] for n in range(len(loc), 0, -1) if loc[:n] in _leaves()), ())
        if path:
            found.setdefault(path, []).append(item)
        elif not fields_alone:  # from a validator of ours of a whole section, or of Config
            section = ".".join(loc)
            for text in item["msg"].removeprefix("Value error, ").split("\n"):
                problems.append(text if text.startswith(section) else f"{section}: {text}")
    for path, items in found.items():
        setting = settings.get(path) or Setting(items[0]["input"], "from the other values")
        wanted = " or ".join(
            item["msg"].removeprefix("Value error, ").replace("Input should", "must") for item in items
        )
        is_text = setting.source == COMMAND_LINE and any(item["type"] == "string_type" for item in items)
        hint = f"; for the string, quote it: '\"{setting.value}\"'" if is_text else ""
        problems.append(f"{'.'.join(path)}: {wanted}, got {_shown(setting.value)} ({setting.source}){hint}")
    return problems


def _user_error(problems: list[str]) -> UserError:
    if len(problems) == 1:
        return UserError(problems[0])
    return UserError(
        f"{len(problems)} problems in the configuration:\n" + "\n".join(f"  - {problem}" for problem in problems)
    )


# --- writing ---------------------------------------------------------------------------------------------------------


def dump(config: Config) -> str:
    """TOML of every value, which `load_config(..., resolve_path=False)` reads back to an equal Config. Unset values are
    left out."""
    return _written(config, lambda path, value: None if value is None else f"{path[-1]} = {_toml(value)}")


def describe(config: Config) -> str:
    """The same with a comment on each line saying where the value came from, and with the unset keys as comments."""

    def line(path: Key, value: Any) -> str:
        text = f"# {path[-1]} is unset" if value is None else f"{path[-1]} = {_toml(value)}"
        usual = value == _leaves()[path].get_default(call_default_factory=True)
        return f"{text}  # from {config._sources.get(path, 'default' if usual else 'the other values')}"

    return _written(config, line)


def json_schema() -> dict:
    """JSON schema of a config file."""
    schema = Config.model_json_schema()
    schema["properties"] = {
        "extends": {
            "type": "string",
            "description": "Another TOML file, relative to this one, whose values this one changes.",
        },
        **schema["properties"],
    }
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema}


def _written(config: Config, line) -> str:
    values = _values(config)
    blocks = []
    for section in _sections():
        lines = [line(path, value) for path, value in values.items() if path[:-1] == section]
        header = [f"[{'.'.join(section)}]"] if section else []
        if lines := [text for text in lines if text is not None]:
            blocks.append("\n".join(header + lines))
    return "\n\n".join(blocks) + "\n"


def _values(config: Config) -> dict[Key, Any]:
    return {path: functools.reduce(getattr, path, config) for path in _leaves()}


def _toml(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():  # JSON's escapes are TOML's, but for the one control character that JSON leaves alone
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
        case list() | tuple():
            return f"[{', '.join(map(_toml, value))}]"
        case dict():
            entries = (
                f"{key if re.fullmatch('[A-Za-z0-9_-]+', key) else _toml(key)} = {_toml(item)}"
                for key, item in value.items()
            )
            return f"{{{', '.join(entries)}}}"
    raise TypeError(f"TOML has no way to write {value!r}")


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str) else json.dumps(value, default=str)


# --- resuming --------------------------------------------------------------------------------------------------------

# Changing these leaves the maths alone: where things are, how the work is cut and spread, what is reported and kept.
HARMLESS = (
    "output_dir", "steps", "mesh", "model.path", "model.revision", "model.adapter", "model.remat", "data.path", "checkpoint", "logging",
    "evaluation", "optimizer.num_microbatches", "optimizer.moments_memory", "optimizer.max_bad_steps", "attention", "moe.exchange",
    "moe.backend", "loss.chunk_size",
    "data.workers", "data.cache", "data.tokenizer",  # what the tokenizer holds is in the fingerprint of the data
)  # fmt: skip
# With moe.buffer_factor these decide which tokens an expert drops; raising the bound is what the warning of drops advises.
DROPPING = (*(f"mesh.{axis}" for axis in AXES), "optimizer.num_microbatches", "moe.exchange", "moe.buffer_factor")
# These change the course of the run and may be meant to: allowed, and shown first.
RESHAPING = ("learning_rate", "schedule", "min_ratio", "warmup_steps", "decay_steps", "schedule_steps")


def differences(saved: Config, now: Config) -> tuple[list[str], list[str]]:
    """(what changes the maths, what is harmless): a line for each difference of a resumed run's config from its
    checkpoint's.

    The first list is a reason to refuse. The second is to be shown; what takes effect, such as learning-rate changes, leads it.
    """
    refused, prominent, harmless = [], [], []
    then = _values(saved)
    for path, value in _values(now).items():
        if value == then[path]:
            continue
        name = ".".join(path)
        change = f"{name}: {_or_unset(then[path])} -> {_or_unset(value)}"
        if path[0] == "optimizer" and path[-1] in RESHAPING:
            prominent.append(
                f"{change} (the new value is used from the first resumed step on; the optimizer's state is kept)"
            )
        elif saved.moe.buffer_factor is not None and _is_of(name, DROPPING):
            prominent.append(f"{change} (under moe.buffer_factor other tokens are dropped than before)")
        elif path == ("precision", "matmul"):
            state = {"compute": "; the scales of FP8 are left behind"}.get(value, "")
            prominent.append(f"{change} (from the first resumed step on{state})")
        elif path == ("precision", "fp8", "warmup_steps"):
            prominent.append(change)
        elif path[:2] == ("precision", "fp8") and "compute" in (saved.precision.matmul, now.precision.matmul):
            continue  # the one without FP8 has no choice of these
        elif path == ("steps",):
            fixed = now.optimizer.schedule == "constant" or now.optimizer.schedule_steps is not None
            stretched = "" if fixed else "; the learning-rate schedule now ends there"
            harmless.insert(0, f"{change}{stretched}")
        elif _is_of(name, HARMLESS):
            harmless.append(change)
        else:
            refused.append(change)
    return refused, prominent + harmless


def _is_of(name: str, entries: tuple[str, ...]) -> bool:
    return any(name == entry or name.startswith(f"{entry}.") for entry in entries)


def _or_unset(value: Any) -> str:
    return "unset" if value is None else _shown(value)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jaxllm.config", description="Prints the JSON schema of config files, for editors."
    )
    parser.add_argument("--schema", action="store_true", required=True)
    parser.parse_args(arguments)
    print(json.dumps(json_schema(), indent=2))
    return 0


if __name__ == "__main__":
    main()
