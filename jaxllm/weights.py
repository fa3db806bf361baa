"""Where the weights of a run come from: random numbers, a Hugging Face folder, a checkpoint of jaxllm, a PEFT folder of adapters.

Frozen weights are brought into the form in which they are kept one after the other, so that the model is never there as floats: NF4 while the folder is
read, matrix by matrix on the host; FP8 on the devices, a parameter at a time. From a checkpoint of jaxllm, and of random numbers, all floats are there first.

Not here: what a run saves and goes on from (`checkpoint`).
"""

import logging
import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import checkpoint, frozen, hf, nf4, peft
from jaxllm import state as states
from jaxllm.config import Config
from jaxllm.frozen import Float8
from jaxllm.hub import resolve_model_path
from jaxllm.models import FAMILIES
from jaxllm.nf4 import NF4
from jaxllm.section import UserError
from jaxllm.state import Declared, TrainState

logger = logging.getLogger(__name__)


def declare(cfg: Config) -> Declared:
    """What the model of `cfg` is made of, on the current mesh."""
    return states.declare(cfg.model, cfg.precision, cfg.attention, cfg.moe, cfg.lora)


def load(cfg: Config, declared: Declared | TrainState) -> tuple[dict, dict]:
    """(params, frozen) at the start of a run, as `declared` (or an abstract state, which has the same two) has them: from model.path, or random from
    cfg.seed; adapters from model.adapter, or new ones."""
    if cfg.lora.rank is None:
        return _weights(cfg, declared.params), {}
    kept = load_frozen(cfg, declared)
    return _adapters(cfg, declared), kept


def load_frozen(cfg: Config, declared: Declared | TrainState) -> dict:
    """What a run with adapters only reads; nothing without them."""
    return frozen.apart(_weights(cfg, frozen.joined(declared.frozen))) if declared.frozen else {}


def _random(cfg: Config, abstract: dict) -> dict:
    return states.initialise(abstract, cfg.model, cfg.precision, cfg.attention, cfg.seed, cfg.moe, cfg.lora)


def _weights(cfg: Config, wanted: dict) -> dict:
    """The model's weights in the forms of `wanted`, {path: ShapeDtypeStruct, Float8 or NF4 of them}."""
    table = FAMILIES[cfg.model.family].hf_weights(cfg.model)
    settled = lambda path, array: _settled(array, wanted[path], table[path], path)
    floats = {path: _read_as(like, cfg.lora.frozen_dtype) for path, like in wanted.items()}
    if cfg.model.path is not None:
        folder, _ = resolve_model_path(cfg.model.path, cfg.model.revision)
        if (folder / "config.json").is_file():
            return hf.load_params(folder, table, floats, finish=settled)
    # The other sources know no NF4: floats first, sharded as floats are.
    if any(isinstance(like, NF4) for like in floats.values()):
        declared = states.declare(cfg.model, cfg.precision, cfg.attention, cfg.moe, cfg.lora.in_floats)
        floats = {path: declared.frozen[path] if isinstance(like, NF4) else like for path, like in floats.items()}
    arrays = _random(cfg, floats) if cfg.model.path is None else checkpoint.load_params(folder, floats)[0]
    return {path: settled(path, arrays.pop(path)) for path in wanted}


def _read_as(like, dtype: str):
    """What is read to become `like`."""
    if not isinstance(like, Float8):
        return like
    return jax.ShapeDtypeStruct(like.values.shape, dtype, sharding=like.values.sharding)


def _settled(array, like, weight, path: str):
    """`array`, the floats of a parameter, in the form of `like`."""
    if isinstance(like, Float8):
        return frozen.to_float8(array, like)
    if not isinstance(like, NF4):
        return array
    *_, outputs, half = like.codes.shape

    def read(leading) -> NF4:
        matrix = np.asarray(hf.fetch(array, leading)).reshape(2 * half, outputs).T
        return nf4.quantise(matrix, like.nested is not None, path)

    # Every process reads every matrix: `fetch` is a collective where the array is spread over several.
    return nf4.from_numpy(like, read, every=jax.process_count() > 1)


# --- adapters ---------------------------------------------------------------------------------------------------------


def _adapters(cfg: Config, declared: Declared | TrainState) -> dict:
    if cfg.model.adapter is None:
        return _random(cfg, declared.params)
    lora, table = cfg.lora, FAMILIES[cfg.model.family].hf_weights(cfg.model)
    beside = states.declare(cfg.model, cfg.precision, cfg.attention, cfg.moe).params
    settings, arrays = peft.read(cfg.model.adapter, table, beside)
    theirs = {"rank": settings.rank, "target_modules": sorted(settings.target_modules)}
    ours = {"rank": lora.rank, "target_modules": sorted(lora.targets)}
    if not math.isclose(settings.scale, lora.scale, rel_tol=1e-6):  # which several alphas mean, by either rule
        theirs |= {"alpha": settings.alpha, "use_rslora": settings.use_rslora}
        ours |= {"alpha": lora.alpha, "use_rslora": lora.use_rslora}
    if wrong := [name for name in theirs if theirs[name] != ours[name]]:
        got = ", ".join(f"lora.{name} = {ours[name]!r}" for name in wrong)
        needed = ", ".join(f"lora.{name} = {theirs[name]!r}" for name in wrong)
        raise UserError(
            f"model.adapter: {cfg.model.adapter} needs {needed}; got {got}".replace("True", "true").replace(
                "False", "false"
            )
        )
    if cfg.precision.param != "float32":
        logger.warning("%s: float32 adapters, rounded to precision.param = %s", cfg.model.adapter, cfg.precision.param)
    placed = lambda path, leaf: jax.device_put(hf.cast(arrays[path], np.dtype(leaf.dtype), path), leaf.sharding)
    return {path: placed(path, leaf) for path, leaf in declared.params.items()}


# --- which weights these are ------------------------------------------------------------------------------------------


def checksum(kept: dict) -> str:
    """8 hexadecimal digits of all bits of the frozen weights, whatever their sharding: what is read in another run is the same only if these are."""
    sums = {path: int(_bits_sum(array)) for path, array in sorted(kept.items())}
    return f"{zlib.crc32(repr(sums).encode()):08x}"


@jax.jit
def _bits_sum(array):
    """u32[]: the sum of all elements' bits, each times an odd number that its place gives, modulo 2^32; in any order the same."""
    bits = jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}").astype(jnp.uint32)
    place = jnp.zeros(array.shape, jnp.uint32)
    for dim, size in enumerate(array.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, array.shape, dim)
    mixed = (place ^ (place >> 15)) * jnp.uint32(0x9E3779B1) | jnp.uint32(1)
    return jnp.sum((bits + jnp.uint32(1)) * mixed, dtype=jnp.uint32)
