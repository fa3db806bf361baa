"""4-bit weights as bitsandbytes keeps them in checkpoints: six tensors of one matrix to an `nf4.NF4` of numpy and back, the same bytes. Functions over named
arrays; `hf` reads files.

A matrix P.weight [outputs, inputs] is P.weight (packed codes, [bytes, 1]) and, with that name before them,

    .absmax              u8[blocks] if doubly quantised, else f32[blocks]; a block is 64 weights
    .quant_map           f32[16], what the codes mean
    .nested_absmax       f32[ceil(blocks / 256)]       doubly quantised only
    .nested_quant_map    f32[256]                      doubly quantised only
    .quant_state.bitsandbytes__nf4    u8, a JSON object in UTF-8: quant_type, blocksize, dtype, shape, and nested_blocksize, nested_dtype, nested_offset

(bitsandbytes 0.50, `QuantState.as_dict`.) The map of absmax, the codebook and the offset are the file's and are kept, for a library of another day may have
computed them with other last bits.

Not here: FP4, 8 bits (LLM.int8), other sizes of blocks, which are refused by name.
"""

import json
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jaxllm import nf4
from jaxllm.nf4 import NF4
from jaxllm.section import UserError

STATE = ".quant_state.bitsandbytes__nf4"
_MAPS, _NESTED = (".absmax", ".quant_map"), (".nested_absmax", ".nested_quant_map")
_STATES = ".quant_state."
_FIELDS = ("quant_type", "blocksize", "dtype", "shape")
_NESTED_FIELDS = ("nested_blocksize", "nested_dtype", "nested_offset")
_DTYPES = ("bfloat16", "float16", "float32")
# What bnb_4bit_quant_storage may call the same bytes.
_STORAGE = tuple(np.dtype(t) for t in (np.uint8, np.float16, ml_dtypes.bfloat16, np.float32))


class Form(NamedTuple):
    """What a checkpoint says of a 4-bit matrix beyond its values, to be written again as it was read. dtype: of the weights before they were quantised, and
    the one that bitsandbytes dequantises to, before it casts to that of the product. storage: what P.weight's bytes are called."""

    dtype: str = "bfloat16"
    storage: np.dtype = np.dtype(np.uint8)


def check_config(quantization, where) -> None:
    """UserError unless `quantization`, a config.json's quantization_config, says NF4 of bitsandbytes. What it says of double quantisation, dtypes and modules
    left out is not asked: tensors say it of themselves, and compute dtypes are a run's own."""
    fields = quantization if isinstance(quantization, dict) else {"quant_method": quantization}
    method, kind = fields.get("quant_method"), fields.get("bnb_4bit_quant_type")
    if method != "bitsandbytes" or not fields.get("load_in_4bit", fields.get("_load_in_4bit")) or kind != "nf4":
        said = f"quant_method {method!r}" + (f" with bnb_4bit_quant_type {kind!r}" if method == "bitsandbytes" else "")
        raise UserError(
            f'{where}: quantization_config: {said}; of quantised weights only NF4 of bitsandbytes is read (load_in_4bit, bnb_4bit_quant_type "nf4"); use the '
            "folder of the original float model"
        )


def quantised(names: Iterable[str], where) -> dict[str, list[str]]:
    """{P.weight: names of all its tensors, itself first} of every 4-bit matrix among the tensors `names` of `where`. UserError for weights in 8 bits or FP4,
    and for tensors of a 4-bit matrix that is not there in full."""
    names, found, parts = {*names}, {}, set()
    for name in sorted(names):
        if name.endswith((".SCB", ".weight_format")):
            raise UserError(
                f"{where}: {name}: weights in 8 bits (LLM.int8), and only NF4 is read; use the folder of the original float model"
            )
        if _STATES in name and not name.endswith(STATE):
            raise UserError(
                f"{where}: {name}: weights quantised as {name.partition(_STATES)[2]}, and only NF4 (bitsandbytes__nf4) is read; use the folder of the original "
                "float model"
            )
    for state in sorted(name for name in names if name.endswith(STATE)):
        weight = state.removesuffix(STATE)
        optional = [weight + suffix for suffix in _NESTED if weight + suffix in names]
        found[weight] = [weight, *(weight + suffix for suffix in _MAPS), *optional, state]
        if missing := [name for name in found[weight] if name not in names]:
            raise UserError(f"{where}: {state} is there, but not {', '.join(missing)}; fetch the files again")
        parts.update(found[weight])
    for name in sorted(names - parts):
        if name.endswith((*_MAPS, *_NESTED)):
            raise UserError(f"{where}: {name} is there, but no {name.rpartition('.')[0]}{STATE}; fetch the files again")
    return found


def described(state: np.ndarray, weight: str, where) -> tuple[tuple[int, int], bool]:
    """((outputs, inputs), whether doubly quantised) of the matrix `weight`, out of its tensor weight + STATE alone."""

    def refuse(fault):
        raise UserError(f"{where}: {weight}{STATE}: {fault}")

    fields = _fields(state, refuse)
    return tuple(fields["shape"]), "nested_offset" in fields


def read(tensors: Mapping[str, np.ndarray], weight: str, where) -> tuple[NF4, Form]:
    """The matrix `weight` ("P.weight") out of its tensors, as an NF4 of numpy without a copy of the codes, and how it was written. UserError naming `where`
    and tensor for whatever is not as this file describes it."""

    def refuse(suffix, fault):
        raise UserError(f"{where}: {weight}{suffix}: {fault}")

    def array(suffix):
        if (value := tensors.get(weight + suffix)) is None:
            refuse(suffix, "is missing; fetch the files again")
        return value

    def checked(suffix, dtype, *shape):
        value = array(suffix)
        if (value.dtype, value.shape) != (np.dtype(dtype), shape):
            wanted = f"{np.dtype(dtype).name} {list(shape)}"
            refuse(suffix, f"wanted {wanted}, got {value.dtype.name} {list(value.shape)}; fetch the files again")
        return value

    def numbers(suffix, *shape):
        value = checked(suffix, np.float32, *shape)
        if not np.isfinite(value).all():
            refuse(suffix, "holds NaN or infinite values; get a sound copy of the model")
        return value

    fields = _fields(array(STATE), lambda fault: refuse(STATE, fault))
    like = nf4.abstract(tuple(fields["shape"]), "nested_offset" in fields, f"{where}: {weight}")
    storage = array("").dtype
    if storage not in _STORAGE:
        refuse("", f"wanted bytes, as one of {', '.join(d.name for d in _STORAGE)}, got {storage.name}")
    codes = checked("", storage, math.prod(like.codes.shape) // storage.itemsize, 1)
    codes = np.ascontiguousarray(codes).view(np.uint8).reshape(like.codes.shape)
    num_blocks, form = math.prod(like.absmax.shape), Form(fields["dtype"], storage)
    if like.nested is None:
        if found := [weight + suffix for suffix in _NESTED if weight + suffix in tensors]:
            refuse(STATE, f"has no nested_offset, but there is {', '.join(found)}; fetch the files again")
        absmax = numbers(".absmax", num_blocks).reshape(like.absmax.shape)
        return NF4(codes, absmax, numbers(".quant_map", 16)), form
    absmax = checked(".absmax", np.uint8, num_blocks).reshape(like.absmax.shape)
    nested = numbers(".nested_absmax", *like.nested.shape), np.array(fields["nested_offset"], np.float32)
    return NF4(codes, absmax, numbers(".quant_map", 16), *nested, numbers(".nested_quant_map", 256)), form


def write(weight: str, matrix: NF4, form: Form) -> dict[str, np.ndarray]:
    """{name: array} of one matrix's tensors, as bitsandbytes writes them: of what `read` gave, the same bytes."""
    matrix = NF4(*(None if x is None else np.asarray(x) for x in matrix))
    outputs, half = matrix.codes.shape
    fields = {"quant_type": "nf4", "blocksize": nf4.BLOCK, "dtype": form.dtype, "shape": [outputs, 2 * half]}
    tensors = {
        weight: np.ascontiguousarray(matrix.codes).reshape(-1).view(form.storage)[:, None],
        weight + ".absmax": matrix.absmax.reshape(-1),
        weight + ".quant_map": matrix.codebook,
    }
    if matrix.nested is not None:
        tensors |= {weight + ".nested_absmax": matrix.nested, weight + ".nested_quant_map": matrix.absmax_map}
        fields |= {"nested_blocksize": nf4.NESTED, "nested_dtype": "float32", "nested_offset": float(matrix.offset)}
    return tensors | {weight + STATE: np.frombuffer(json.dumps(fields).encode(), np.uint8)}


def _fields(state: np.ndarray, refuse) -> dict:
    """The JSON object in `state`, checked. refuse: raises, given the fault."""
    if state.dtype != np.uint8 or state.ndim != 1:
        refuse(f"wanted JSON as uint8 [bytes], got {state.dtype.name} {list(state.shape)}")
    try:
        fields = json.loads(state.tobytes(), object_pairs_hook=_once)
    except ValueError as error:
        refuse(f"is not JSON: {error}")
    if not isinstance(fields, dict):
        refuse(f"wanted a JSON object, got {json.dumps(fields)}")
    wanted = _FIELDS + (_NESTED_FIELDS if fields.keys() & {*_NESTED_FIELDS} else ())
    if unknown := sorted(fields.keys() - {*wanted}):
        refuse(f"unknown fields {', '.join(unknown)}; known are {', '.join(_FIELDS + _NESTED_FIELDS)}")
    if missing := [key for key in wanted if key not in fields]:
        refuse(f"lacks {', '.join(missing)}; fetch the files again")
    same = lambda key, *values: (
        any(type(fields[key]) is type(v) and fields[key] == v for v in values)
        or refuse(
            f"{key}: wanted {' or '.join(map(json.dumps, values))}, got {json.dumps(fields[key])}; use the folder of the original float model"
        )
    )
    same("quant_type", "nf4")
    same("blocksize", nf4.BLOCK)
    same("dtype", *_DTYPES)
    shape = fields["shape"]
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(size) is int and size > 0 for size in shape):
        refuse(f"shape: wanted [outputs, inputs], got {json.dumps(shape)}")
    if "nested_offset" in fields:
        same("nested_blocksize", nf4.NESTED)
        same("nested_dtype", "float32")
        offset, largest = fields["nested_offset"], float(np.finfo(np.float32).max)
        if type(offset) is not float or not abs(offset) <= largest:
            refuse(f"nested_offset: wanted a finite number, got {json.dumps(offset)}")
    return fields


def _once(pairs: list[tuple]) -> dict:
    """Parsers differ on which value a key has that stands twice."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"a field stands twice among {', '.join(key for key, _ in pairs)}")
    return dict(pairs)
